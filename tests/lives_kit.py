"""Lives of one job: its ranks are killed together, and what the next life restores must be what was trained before.

A rank of such a job prints `{"start": ..., "digest": ...}` when it begins, `{"step": ..., "digest": ...}` after every step that
it finished, and whatever else it likes; digests are of all that the optimizer's step changes. `Lives` holds each of them
against the same one of every life before.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

import forked

Row = dict[str, Any]
LIMIT_S = 100.0


class Lives:
    """One job on one path; its keepers outlive the ranks, and end with this.

    Args:
        script: run as `script RANK WORLD STORE ROOT WORDS`.
        known: digests of another run that this one must repeat, by rank and step.
        nodes: on so many, in turn, the ranks believe themselves.
        every: steps from checkpoint to checkpoint; only before the first one there is nothing to come back to.

    Attributes:
        lost: per life but the first, how many finished steps had to be made again.
    """

    def __init__(
        self,
        home: Path,
        script: Path,
        *words: object,
        ranks: int = 2,
        known: Mapping[tuple[int, int], str] | None = None,
        every: int = 1,
        nodes: int = 1,
    ) -> None:
        home.mkdir(exist_ok=True)
        self.home, self.script, self.words, self.ranks, self.every = home, script, words, ranks, every
        self.nodes = nodes
        self.known = dict(known or {})
        self.lives = 0
        self.finished = -1  # the last step that any rank finished before the last life ended
        self.lost: list[int] = []

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "holdfast.keeper" in words and str(self.home) in " ".join(words):
                process.terminate()

    def live(
        self,
        *,
        until: Callable[[Row], bool] | None = None,
        victim: int = 0,
        later: Callable[[float], float] = lambda _: 0.0,
    ) -> list[list[Row]]:
        """What every rank told in one life.

        Args:
            until: all are killed once the victim told such a row; None: they end by themselves.
            later: how many seconds after that row, given what a step of this life takes.
        """
        self.lives += 1
        store = str(self.home / f"store{self.lives}")
        tail = [str(self.ranks), store, str(self.home / "ckpt"), *map(str, self.words)]
        workers = [
            forked.Popen(
                [sys.executable, str(self.script), str(rank), *tail],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "HOLDFAST_NODE_LABEL": f"n{rank % self.nodes}"} if self.nodes > 1 else None,
            )
            for rank in range(self.ranks)
        ]
        try:
            if until is None:
                with ThreadPoolExecutor(self.ranks) as pool:
                    told = [text.splitlines(True) for text in pool.map(_all, workers)]
                assert [worker.wait(LIMIT_S) for worker in workers] == [0] * self.ranks
            else:
                told = self._killed(workers, until, victim, later)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(30)
                worker._close()
        rows = [[json.loads(line) for line in lines if line.endswith("\n")] for lines in told]
        self._judge(rows)
        return rows

    def _killed(
        self, workers: list[Any], until: Callable[[Row], bool], victim: int, later: Callable[[float], float]
    ) -> list[list[str]]:
        lines: list[list[str]] = [[] for _ in workers]
        came: list[float] = []
        for line in workers[victim].stdout:
            lines[victim].append(line)
            row = json.loads(line)
            if "step" in row:
                came.append(time.monotonic())
            if until(row):
                break
        else:
            raise AssertionError("the job ended before the moment at which it was to be killed")
        steps = [after - before for before, after in itertools.pairwise(came)]
        # Which moment of the step is hit is an input of the test; nothing is waited for to become true.
        time.sleep(later(statistics.median(steps) if steps else 0.0))
        for worker in (workers[victim], *workers):
            worker.kill()
        for rank, worker in enumerate(workers):
            lines[rank] += worker.stdout
        return lines

    def _judge(self, told: list[list[Row]]) -> None:
        starts = {rank: rows[0] for rank, rows in enumerate(told) if rows}
        assert starts, "nobody came as far as its first step"
        (start,) = {row["start"] for row in starts.values()}
        if self.lives > 1:
            self.lost.append(self.finished + 1 - start)
            assert start > 0 or self.finished < self.every, "the job began anew"
            for rank, row in starts.items() if start else ():
                assert row["digest"] == self.known[rank, start - 1], (
                    f"rank {rank} is not what it was at step {start - 1}"
                )
        steps = [[row for row in rows if "step" in row] for rows in told]
        for rank, rows in enumerate(steps):
            for row in rows:
                same = self.known.setdefault((rank, row["step"]), row["digest"])
                assert same == row["digest"], f"step {row['step']} of rank {rank} was another one before"
        self.finished = max([start - 1, *(row["step"] for rows in steps for row in rows)])


def _all(worker: Any) -> str:
    return worker.communicate(timeout=LIMIT_S)[0]
