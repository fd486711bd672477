"""A job that ends while its very first version is being captured: there is nothing to come back to, and it begins anew."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from holdfast.checkpoint.restore.version_vote import _is_any_whole
from holdfast.core.model import Level, Seal, Version
from holdfast.core.recovery.version_choice import MemoryCopy
from holdfast.keeper.rpc.messages import Inventory
from kit.inventories import held_as, packed

WORKER = str(Path(__file__).with_name("begin_anew_worker.py"))
VERSION = Version(1, 0)


def start(tmp_path: Path, life: str) -> list[forked.Popen]:
    arguments = [str(tmp_path / life), str(tmp_path / "ckpt"), life, "first-version"]
    return [
        forked.Popen(
            [sys.executable, WORKER, str(rank), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]


def test_killed_in_the_middle_of_its_first_version_a_job_begins_anew(tmp_path: Path, runtime_dir: Path) -> None:
    ranks = start(tmp_path, "first")
    assert [json.loads(rank.stdout.readline()) for rank in ranks] == [{"start": 0}] * 2
    for rank in ranks:
        rank.kill()
        rank.communicate()
    again = [json.loads(rank.communicate(timeout=60)[0]) for rank in start(tmp_path, "second")]
    assert [row["start"] for row in again] == [0, 0]
    assert all("i000001-s0000000000 refused: no keeper knows all of its bundles" in row["reason"] for row in again)


@pytest.mark.parametrize(
    ("more", "is_any"),
    [
        ({}, False),
        ({"packed": packed({VERSION: ()})}, True),
        ({"levels": ((VERSION, Level.CAPTURED),)}, True),
        ({"packed": packed({Version(1, 1): ()})}, False),
        ({"silent": ((1, "does not answer"),)}, True),
        ({"suspects": ((VERSION, "twins differ"),)}, True),
        ({"held": ()}, False),
        ({"held": (), "silent": ((1, "does not answer"),)}, False),
    ],
)
def test_what_may_have_been_captured_is_never_passed_over_in_silence(more: dict, is_any: bool) -> None:
    copy = MemoryCopy.at(VERSION, node=0, rank=0, seal=Seal("g0", "0" * 16, 10))
    facts = {"held": (held_as(copy),), "packed": (), "suspects": (), "levels": ()}
    assert _is_any_whole(Inventory(**{**facts, "reachable": (0,), **more})) is is_any
