"""All checks on one card: python -m benchmarks.gpu [--call A|B] [--seconds 520] [--out DIR] [--device cuda].

It needs no network and no installation beyond torch, msgspec, xxhash, numpy, cryptography, psutil, typer, rich, pytest and hypothesis:
`PYTHONPATH=SITE:src python3 -m benchmarks.gpu`. Each check is a process of its own with a deadline, and writes a JSON line to
DIR/gpu.jsonl, flushed at once. Call A has the first nine checks, call B the others. `--device sim --small` tries the script
itself on the simulated device; its figures say nothing about a card. The exit code is 1 if a goal was missed or a check failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# (name, module, function, seconds at most), in order of risk.
CHECKS = (
    ("the card and its tests", "around", "card_itself", 170),
    ("void before abort", "copies", "void", 60),
    ("registration", "copies", "register", 90),
    ("device to host", "copies", "rates", 60),
    ("the call", "copies", "call", 120),
    ("torn versions", "copies", "torn", 150),
    ("host ahead", "copies", "ahead", 60),
    ("slowdown", "training", "slowdown", 150),
    ("memory of the device", "copies", "memory", 90),
    ("restore", "copies", "restore", 90),
    ("bit for bit", "training", "exact", 120),
    ("a killed holder", "training", "killed_holder", 120),
    ("a survivor", "training", "survivor", 150),
    ("groups anew", "training", "groups", 90),
    ("a hang", "training", "hang", 240),
    ("graphs", "around", "graphs", 60),
    ("waits of a pipeline", "around", "pace", 120),
    ("compiled code", "around", "compiled", 240),
    ("a fault that stays", "around", "fault", 120),
    ("scripts without a line", "training", "scripts", 240),
)
# Less than this is no time for a check.
FEWEST_S = 5.0
CALLS = {"A": range(1, 10), "B": range(10, len(CHECKS) + 1), "all": range(1, len(CHECKS) + 1)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--call", choices=sorted(CALLS), default="all")
    parser.add_argument("--seconds", type=float, default=520.0, help="for all checks of the call")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that only try the script")
    parser.add_argument(
        "--only", type=int, nargs="+", choices=CALLS["all"], metavar="N", help=f"checks, 1 to {len(CHECKS)}"
    )
    parser.add_argument("--check", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check is not None:
        return check(options)
    deadline = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    states = []
    with (options.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
        for number in options.only or CALLS[options.call]:
            most = CHECKS[number - 1][3] * (3 if options.small else 1)  # a busy machine that has no card
            left = deadline - time.monotonic()
            line = supervised(number, options, min(most, left)) if left >= FEWEST_S else begun(number, options)
            states.append(line["state"])
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
            print(json.dumps(line), flush=True)
    return int(any(state in ("missed", "failed", "late") for state in states))


def begun(number: int, options: argparse.Namespace) -> dict[str, Any]:
    """The line of a check of which nothing is known yet."""
    line = {"check": number, "name": CHECKS[number - 1][0], "device": options.device}
    return line | {"state": "not begun", "why": "the time of this call is over"}


def supervised(number: int, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """One check in a process group of its own, ended with all that it started when its time is over."""
    line = begun(number, options) | {"state": "late", "why": f"not done after {seconds:.0f} s"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--check", str(number), "--device", options.device]
    command += ["--small"] * options.small
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=seconds)
        found = [text for text in said.splitlines() if text.startswith('{"state"')]
        line |= {"why": ""} | (json.loads(found[-1]) if found else {"state": "failed", "why": said[-2000:]})
    except subprocess.TimeoutExpired:
        pass
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()
    return line | {"seconds": round(time.monotonic() - began, 1)}


def check(options: argparse.Namespace) -> int:
    """Runs one check here and prints its line."""
    from benchmarks import measure  # noqa: PLC0415 - imports torch
    from benchmarks.gpu.card import Card, NoDevice, NotHere  # noqa: PLC0415

    _, module, function, _ = CHECKS[options.check - 1]
    line: dict[str, Any] = {"state": "met"}
    with tempfile.TemporaryDirectory(prefix="hf-gpu-", ignore_cleanup_errors=True) as directory:
        try:
            card = Card(options.device, small=options.small, directory=Path(directory))
            line |= {"card": card.name, "machine": measure.machine()}
            work = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
            figures = work(card)
            rows = []
            for figure in figures:
                good = not figure.goal or (figure.value is not None and measure.met(figure.value, figure.goal))
                line["state"] = line["state"] if good else "missed"
                value = None if figure.value is None else round(figure.value, 4)
                rows.append({"metric": figure.metric, "value": value, "unit": figure.unit, "goal": figure.goal})
            line["figures"] = rows
        except NotHere as error:
            line |= {"state": "not here", "why": str(error)}
        except NoDevice as error:
            line |= {"state": "failed", "why": str(error)}
        except BaseException:  # noqa: BLE001 - whatever it is, the line says so
            line |= {"state": "failed", "why": traceback.format_exc()[-2500:]}
    print(json.dumps({"state": line.pop("state"), **line}), flush=True)
    os._exit(0)  # no thread of a failed check may hold up the next one


if __name__ == "__main__":
    sys.exit(main())
