"""holdfast beside other libraries that save PyTorch state: python -m benchmarks.rivals [--quick] [--json] [--envs DIR]

One process per contestant, each with the same tensors (145 parameters of a GPT and their two moments, 256 MiB, one rank) and
a directory of its own on the same disk. They save in turn, round by round, so that all see the same machine. Every save
is stamped; a load that shows another stamp, or two, fails.

- `stall`: seconds until the tensors may change again, and over a plain copy of the same tensors taken right before.
- `safe`: seconds until the state survives SIGKILL of the process that trains.
- `durable`: seconds until the library calls the checkpoint complete and its files are synced (by this program, if the
  library does not).
- `load`: seconds to bring it back into the tensors of the training, from files that the kernel has in its cache; holdfast's
  includes the start of a keeper. `load_memory`: from memory, where the library keeps it there.

A contestant whose library is not part of PyTorch runs in DIR/NAME/bin/python, where somebody installed it (benchmarks/
README.md); who is missing, fails or is not published is listed with the reason. No GPU: nothing is copied from a device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import MIB, Report

WORKER = Path(__file__).with_name("rivals_worker.py")
# Name -> the package that it needs; empty where PyTorch or holdfast is enough.
CONTESTANTS = {
    "holdfast": "",
    "torch_save": "",
    "dcp_thread": "",
    "dcp_process": "",
    "torchsnapshot": "torchsnapshot",
    "nvidia_resiliency_ext": "nvidia-resiliency-ext",
    "dlrover": "dlrover[torch]",
    "torch_checkpointing": "torch_checkpointing",
    "lm_resiliency": "lm-resiliency",
}
ANSWER_S = 180.0
WARM_UP = 2
LEVELS = ("stall", "safe", "durable")


class Out(Exception):
    """A contestant does not run here; says why."""


@dataclass(slots=True)
class Contestant:
    """One process and what it measured."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    rounds: list[dict[str, float]] = field(default_factory=list)
    loads: list[dict[str, float | None]] = field(default_factory=list)

    def ask(self, order: str) -> dict[str, Any]:
        """Tells it to do something and waits for what came of it."""
        if order:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(order + "\n")
                self.process.stdin.flush()
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            told = self.log.read_text(errors="replace").strip().splitlines()
            raise Out(told[-1][:200] if told else f"no answer within {ANSWER_S:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Ends it, and whatever it started."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write("end\n")
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(name: str, home: Path, shapes: Path, envs: Path | None) -> Contestant:
    """Starts a contestant and waits until it holds its tensors.

    Raises:
        Out: it does not run here.
    """
    python = Path(sys.executable)
    if CONTESTANTS[name]:
        if envs is None or not (envs / name / "bin" / "python").exists():
            raise Out(f"{CONTESTANTS[name]} is not installed in an environment of its own")
        python = envs / name / "bin" / "python"
    directory = home / name
    directory.mkdir()
    log = home / f"{name}.log"
    source = str(Path(measure.holdfast.__file__).parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": source} if name == "holdfast" else {})}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [str(python), str(WORKER), name, str(directory), str(shapes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        )  # fmt: skip
    contestant = Contestant(name, process, log)
    try:
        contestant.ask("")
    except Out:
        contestant.end()
        raise
    return contestant


def compete(contestants: list[Contestant], rounds: int, out: dict[str, str]) -> None:
    """Everybody saves once in every round and loads after the last; the order is turned every round."""
    for number in range(WARM_UP + rounds):
        for contestant in contestants[:: 1 if number % 2 else -1]:
            if contestant.name in out:
                continue
            try:
                facts = contestant.ask("save")
                if number >= WARM_UP:
                    contestant.rounds.append(facts)
                if number >= WARM_UP + rounds - 3:
                    contestant.loads.append(contestant.ask("load"))
            except Out as error:
                out[contestant.name] = str(error)


def tell(report: Report, contestant: Contestant) -> None:
    """The figures of one contestant."""
    for level in LEVELS:
        seconds = [facts[level] for facts in contestant.rounds]
        spread = {"least": round(min(seconds), 4), "most": round(max(seconds), 4), "saves": len(seconds)}
        report.figure(f"{level}_seconds:{contestant.name}", statistics.median(seconds), "s", **spread)
    stalls, copies = ([facts[what] for facts in contestant.rounds] for what in ("stall", "copy"))
    report.figure(f"stall_ratio:{contestant.name}", measure.ratio(stalls, copies), "ratio")
    for what in ("load", "load_memory"):
        seconds = [facts[what] for facts in contestant.loads if facts[what] is not None]
        if seconds:
            report.figure(f"{what}_seconds:{contestant.name}", statistics.median(seconds), "s")


def shapes_of(num_bytes: int) -> dict[str, list[int]]:
    """The tensors of a GPT and its two moments, by name."""
    model, _ = measure.gpt_of(num_bytes)
    kinds = ("model", "exp_avg", "exp_avg_sq")
    return {f"{kind}.{name}": list(p.shape) for kind in kinds for name, p in model.named_parameters()}


def main() -> None:
    parser: argparse.ArgumentParser = measure.options("rivals", "holdfast beside other libraries.")
    parser.set_defaults(mib=256)
    parser.add_argument("--envs", type=Path, help="directory of environments, one per contestant that needs a package")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), help="only these")
    options = parser.parse_args()
    rounds = 3 if options.quick else 9
    home = Path(tempfile.mkdtemp(prefix="hf-bench-", dir=options.dir))
    report = Report("rivals", options.quick, options.json)
    shapes = home / "shapes.json"
    shapes.write_text(json.dumps(shapes_of(options.mib * MIB)))
    running: list[Contestant] = []
    out: dict[str, str] = {}
    try:
        for name in options.only or CONTESTANTS:
            try:
                running.append(start(name, home, shapes, options.envs))
            except Out as error:
                out[name] = str(error)
        compete(running, rounds, out)
        for contestant in running:
            if contestant.name not in out:
                tell(report, contestant)
        for name, reason in out.items():
            report.figure(f"not_run:{name}", None, "", reason=reason)
            if not options.json:
                print(f"  {reason}")
        report.save()
    finally:
        for contestant in running:
            contestant.end()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
