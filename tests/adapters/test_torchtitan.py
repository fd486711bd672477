"""TorchTitan's Trainer with FSDP2, tensor parallel and replicas through the contract of doors, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from doors_kit import SOURCE, starter, workshops
from holdfast.testing.contracts.door import CHECKS, Check, Door, Workshop

WORKER = Path(__file__).with_name("torchtitan_worker.py")

pytestmark = [pytest.mark.slow, pytest.mark.rival("torchtitan"), pytest.mark.timeout(600)]


def door(way: str, twins: int) -> Door:
    return Door(
        starter(WORKER, "--way", way), steps=6, twins=twins, root=lambda path: path / "holdfast", environment=SOURCE
    )


DOORS = {"fsdp": door("fsdp", 1), "tp": door("tp", 1), "replicated": door("ddp", 2)}
workshop = workshops(DOORS)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_contract_of_doors(check: Check, workshop: tuple[Door, Workshop]) -> None:
    check(*workshop)
