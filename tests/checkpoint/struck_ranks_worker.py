"""Two ranks that save to storage alone; a signal's handler takes one of them out of a save, at one moment after the other.

`struck_ranks_worker.py RESULTS`. Each writes for each step: what became of its save, and whether storage had the version by then.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import gloo_kit
import holdfast
from holdfast.base.errors import LevelNotReached
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.save import storage_saver
from holdfast.checkpoint.save.storage_only_schedule import MeetingSchedule
from holdfast.checkpoint.save.storage_saver import DirectSaver
from holdfast.tiers.storage.version_store import Storage
from kit.strikes import Strike, called

# Which rank is struck, and where; behind each of them comes a step at which nobody is.
MOMENTS: list[tuple[int, Callable[..., Any]]] = [
    (0, MeetingSchedule._meet),
    (1, MeetingSchedule._meet),
    (0, DirectSaver.save),
    (0, DirectSaver._save),
    (1, DirectSaver._write_still),
    (0, dist.all_gather.__wrapped__),  # type: ignore[attr-defined]
    (1, collectives.Meeting.gather),
    (0, storage_saver._require_alike),
    (1, storage_saver._require_equal),
    (0, DirectSaver._commit),
    (0, Storage._take_back_if_retired),
    (0, DirectSaver._retire),
    (1, collectives.gather_json),
]


def _fails(error: type[BaseException]) -> None:
    raise error


def main(rank: int, results: Path) -> None:
    with gloo_kit.member(rank, 2, results):
        root = results / "job"
        model = torch.nn.Linear(8, 8)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = holdfast.Config(
            runtime_dir=str(results / "run"), memory_budget="1KB", every="0", durable_every="1h", close_timeout_s=20.0
        )
        checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer, config=config)
        checkpointer.restore()
        told: list[tuple[int, str, bool, bool]] = []
        for step in range(2 * len(MOMENTS)):
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            victim, moment = MOMENTS[step // 2] if step % 2 == 0 else (-1, None)
            error = (KeyboardInterrupt, TimeoutError)[step // 2 % 2]
            struck = False
            strike = Strike(functools.partial(_fails, error), called(moment)) if victim == rank else nullcontext()
            try:
                with strike:
                    checkpointer.step(step)
                    said = _saved(checkpointer, step)
            except (KeyboardInterrupt, TimeoutError):
                struck, said = True, "struck"
            last = checkpointer._run.last  # type: ignore[union-attr]
            if struck and (last is None or last.version.step != step):  # it was struck in `step`: the others save
                said = _saved(checkpointer, step)
            # The script's own, which must not be answered by a word of ours.
            rows = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(rows, torch.tensor([step + rank]))
            assert [int(row) for row in rows] == [step, step + 1]
            told.append((step, said, struck, (root / f"i000001-s{step:010d}" / "manifest.json").exists()))
        checkpointer.close()
        (results / f"{rank}.json").write_text(json.dumps(told))


def _saved(checkpointer: holdfast.Checkpointer, step: int) -> str:
    try:
        return checkpointer.save(step, "durable").wait().name
    except LevelNotReached as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(gloo_kit.join(gloo_kit.start(main, 2, Path(sys.argv[1])), 100))
