"""A script is run again in the same process without leaving anything behind: memory, descriptors and threads stay flat."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import forked

AGENT = str(Path(__file__).with_name("rerun_agent.py"))
# The allocator and torch's caches level off after some runs; what is held at a broken group counts too.
WARM_UP = 4
MAY_GROW_BYTES = 12 << 20


def runs(tmp_path: Path, count: int) -> tuple[list[dict[str, Any]], list[str]]:
    losses = tmp_path / "losses"
    command = [sys.executable, AGENT, str(count), str(losses)]
    answer = forked.run(command, capture_output=True, text=True, timeout=2900)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return [json.loads(line) for line in answer.stdout.splitlines()], losses.read_text().splitlines()


def stays_flat(tmp_path: Path, count: int) -> None:
    rows, losses = runs(tmp_path, count)
    assert len(rows) == len(losses) == count
    assert len({line.split()[0] for line in losses}) == 1, "every run begins with the same seeds"
    steady = rows[WARM_UP:]
    for what in ("fds", "threads"):
        assert max(row[what] for row in steady) <= rows[WARM_UP - 1][what] + 1, [row[what] for row in rows]
    assert steady[-1]["rss"] - rows[WARM_UP - 1]["rss"] < MAY_GROW_BYTES, [row["rss"] >> 20 for row in rows]


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_many_runs_in_one_process_leave_nothing_behind(tmp_path: Path, count: int) -> None:
    stays_flat(tmp_path, count)


# Leaves behind whatever a script may leave: what it was given is what it finds when it is run again.
UNTIDY = """
import json, os, random, resource, signal, sys, tempfile
import torch
import own, json.tool
own.runs += 1
facts = {
    "own": own.runs, "torch": torch.rand(1).item(), "cwd": os.getcwd(), "path": sys.path[:2], "argv": sys.argv[:2],
    "term": str(signal.getsignal(signal.SIGTERM)), "mine": os.environ.get("MINE"), "threads": torch.get_num_threads(),
    "dtype": str(torch.get_default_dtype()), "grad": torch.is_grad_enabled(), "hook": str(sys.excepthook),
    "library": id(json.tool), "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "mask": os.umask(0o27),
    "temporary": tempfile.gettempdir(),
}
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(facts) + "\\n")
random.seed(1)
torch.manual_seed(5)
torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(3)
os.environ["MINE"] = "left"
tempfile.tempdir = os.path.dirname(sys.argv[1])
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit[0] - 100, limit[1]))
os.chdir("/")
sys.path.insert(0, "/nowhere")
sys.excepthook = print
signal.signal(signal.SIGTERM, lambda *_: None)
if sys.argv.pop() == "raise":
    raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer: as if a rank had died")
"""


def test_a_script_finds_what_it_found_the_first_time(tmp_path: Path) -> None:
    """Its own modules are made anew; those that were installed stay, for some cannot be loaded twice."""
    (tmp_path / "own.py").write_text("runs = 0\n")
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(UNTIDY)
    command = [sys.executable, AGENT, "3", str(told), str(script)]
    done = forked.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *others = map(json.loads, told.read_text().splitlines())
    assert others == [first, first]
    assert (first["own"], first["path"][0], first["mine"]) == (1, str(tmp_path), None)


def test_an_order_whose_store_is_gone_already_is_left_for_the_next_one(tmp_path: Path) -> None:
    """As after two failures in one moment: the store of the first recovery gives way to that of the second."""
    losses = tmp_path / "losses"
    script = str(Path(__file__).with_name("stale_store_agent.py"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    command = [sys.executable, script, str(losses)]
    done = forked.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(losses.read_text().splitlines()) == 1
