"""Doors of frameworks in tests: how a worker script is started, and one workshop for all checks of a door."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import forked
from holdfast.testing.contracts.adapter import Door, Task, Workshop

# Where a launcher starts the source tree's holdfast, also from an environment of a framework.
SOURCE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")])}
TORCHRUN = "torch.distributed.run"
HOLDFAST_RUN = "holdfast.adapters.zero_lines.launcher"


def launching(num_ranks: int) -> list[str]:
    """The command of `holdfast run` of this source tree, as far as its flags."""
    command = [sys.executable, "-W", "ignore", "-m", HOLDFAST_RUN]
    return [*command, "--standalone", "--nproc-per-node", str(num_ranks)]


def starter(worker: Path, *words: str, launcher: str = TORCHRUN, wide: str = "--wide") -> Callable[[Task], list[str]]:
    """`WORKER ROOT --steps N [words] [--wide]` on every rank; a plain task always under torchrun."""

    def start(task: Task) -> list[str]:
        module = TORCHRUN if task.plain else launcher
        ranks = ["-m", module, "--standalone", "--nproc-per-node", str(task.ranks)]
        script = [str(worker), str(task.checkpoints), "--steps", str(task.steps), *words]
        return [sys.executable, "-W", "ignore", *ranks, *script, *(wide.split() if task.changed else [])]

    return start


def untouched(script: Path, *words: str) -> Callable[[Task], list[str]]:
    """`SCRIPT --steps N [words]`, which knows nothing of holdfast: under `holdfast run`, a plain task under torchrun."""

    def start(task: Task) -> list[str]:
        ranks = ["--standalone", "--nproc-per-node", str(task.ranks), str(script), "--steps", str(task.steps), *words]
        if task.plain:
            return [sys.executable, "-m", TORCHRUN, *ranks]
        return [
            sys.executable,
            "-m",
            HOLDFAST_RUN,
            "--checkpoint-dir",
            str(task.checkpoints),
            *ranks,
        ]

    return start


def folds_end_as_in_plain_python(script: Path, place: Path) -> None:
    """A script that trains several times ends under `holdfast run` with zero lines as it does alone."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **SOURCE, **single}
    run = [*launching(1), "--max-restarts", "0", "--checkpoint-dir", str(place / "root")]
    ended = []
    with Workshop(place):
        for name, start in (("alone", [sys.executable, "-W", "ignore"]), ("kept", run)):
            command = [*start, str(script), str(place / name)]
            runtime = {"HOLDFAST_RUNTIME_DIR": str(place / "runtime")}
            done = subprocess.run(
                command, env=environment | runtime, capture_output=True, text=True, timeout=250, check=False
            )
            assert done.returncode == 0, done.stderr
            ended.append((place / name).read_text())
    assert ended[0] == ended[1]
    assert done.stderr.count("has trained before") == 1


def warm(*args: Any, **options: Any) -> forked.Popen:
    """Starts a launcher from a process that has imported torch, and its children too."""
    return forked.Popen(*args, **options, warm_children=True)


def workshops(
    doors: Mapping[str, Door], *, popen: Callable[..., Any] = subprocess.Popen, timeout_s: float = 150.0
) -> Any:
    """A fixture of the module: each door with the workshop that its checks share."""

    @pytest.fixture(scope="module", params=doors)
    def workshop(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[tuple[Door, Workshop]]:
        with Workshop(tmp_path_factory.mktemp(request.param), popen=popen, timeout_s=timeout_s) as made:
            yield doors[request.param], made

    return workshop
