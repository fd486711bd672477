"""Spots of tensors on devices, as far as they can be tried in host memory: which bytes are read, and where they lie in a slot."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.checkpoint.capture import block_copies
from holdfast.checkpoint.capture.copy_plan import Copies, Split
from holdfast.checkpoint.capture.late_copy_check import LateCopyChecker
from holdfast.checkpoint.device.device_spots import (
    FEWEST_TENSORS,
    LAST_TENSORS,
    MOST_TENSORS,
    MOST_TURNS,
    ROOM_BYTES,
    DeviceSpots,
    Turn,
)


def saved(tensors: Sequence[torch.Tensor]) -> tuple[bytes, list[int]]:
    """Tensors one after the other in order, as they lie in a slot, and where each begins."""
    payload, starts = b"", []
    for tensor in tensors:
        starts.append(len(payload))
        payload += tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return payload, starts


def differing(spots: DeviceSpots, payload: bytes) -> set[int]:
    return differing_of(spots.next(), payload)


def differing_of(turn: Turn, payload: bytes) -> set[int]:
    seen = torch.cat([view for views in turn.views.values() for view in views])
    assert len(seen) == turn.num_bytes <= ROOM_BYTES
    return turn.differing(np.frombuffer(payload + seen.numpy().tobytes(), np.uint8), len(payload))


def layouts() -> list[torch.Tensor]:
    base = torch.arange(4 * 6 * 8 * 10.0).view(4, 6, 8, 10)
    return [
        base,
        base.contiguous(memory_format=torch.channels_last),
        base.view(24, 80).t(),
        base.view(24, 80)[:, 7:50],
        base.view(24, 80)[::3, ::2],
        base[1:2, 2:3, :, 5:6],
        base[0, 0, 0, :1].expand(9),
        base.permute(3, 1, 0, 2)[2:],
        base.view(-1)[1:].bfloat16()[1:],
        base.view(-1)[:5].to(torch.float8_e4m3fn),
        torch.complex(base, base)[0],
        base.double().view(-1).to(torch.complex128),
        torch.tensor(3.0),
        torch.tensor([True]),
        torch.tensor(7, dtype=torch.int64),
    ]


def test_what_is_saved_as_it_was_has_the_same_spots_in_every_layout() -> None:
    tensors = layouts()
    payload, starts = saved(tensors)
    spots = DeviceSpots(tensors, starts)
    for _ in range(2 * MOST_TURNS):
        assert differing(spots, payload) == set()


@pytest.mark.parametrize("number", range(len(layouts())))
def test_a_tensor_of_any_layout_that_is_another_is_found_in_every_turn(number: int) -> None:
    tensors = layouts()
    payload, starts = saved(tensors)
    spots = DeviceSpots(tensors, starts)
    end = starts[number] + tensors[number].numel() * tensors[number].element_size()
    other = bytes(byte ^ 1 for byte in payload[starts[number] : end])
    for _ in range(2 * MOST_TURNS):
        assert differing(spots, payload[: starts[number]] + other + payload[end:]) == {number}


@pytest.mark.parametrize("end", ["first", "last"])
def test_a_few_tensors_are_looked_at_at_both_ends_in_every_turn(end: str) -> None:
    tensors = [torch.zeros(5000, dtype=torch.uint8) for _ in range(8)]
    payload, starts = saved(tensors)
    spots = DeviceSpots(tensors, starts)
    at = starts[3] + (0 if end == "first" else 4999)
    for _ in range(MOST_TURNS):
        assert differing(spots, payload[:at] + b"\x01" + payload[at + 1 :]) == {3}


@pytest.mark.parametrize(("count", "saves"), [(FEWEST_TENSORS, 1), (300, 4), (3000, 4), (5000, 6)])
def test_every_one_of_many_tensors_is_looked_at_in_its_turn(count: int, saves: int) -> None:
    tensors = [torch.zeros(64) for _ in range(count)]
    payload, starts = saved(tensors)
    spots = DeviceSpots(tensors, starts)
    found = [differing(spots, b"\x01" * len(payload)) for _ in range(saves)]
    assert set.union(*found) == set(range(count))
    assert max(map(len, found)) <= MOST_TENSORS
    assert set.intersection(*found) >= set(range(count - LAST_TENSORS, count)), "what is copied last is torn first"


def test_what_is_copied_behind_the_blocks_is_looked_at_in_every_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that ends in small tensors: their blocks are copied first, and what the device has to work out comes last."""
    monkeypatch.setattr(block_copies, "SMALL_BYTES", 128)
    tensors = [torch.zeros(8, 8).t() if number == 70 else torch.zeros(64) for number in range(300)]
    tensors += [torch.zeros(4) for _ in range(LAST_TENSORS + 8)]
    payload, starts = saved(tensors)
    memory = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    targets = [
        memory[at:].view(torch.float32).as_strided(each.shape, (8, 1)[2 - each.dim() :])
        for at, each in zip(starts, tensors, strict=True)
    ]
    late: Any = Copies(device_targets=targets, device_sources=tensors, device_parts=list(range(len(tensors))))
    plan: Any = SimpleNamespace(parts=[SimpleNamespace(name=str(number), start=at) for number, at in enumerate(starts)])
    checker, split = LateCopyChecker(), Split((), ())
    found = [
        differing_of(
            checker.on_devices(split, plan, Copies(), late, lambda: (set(), set())).spots, b"\x01" * len(payload)
        )
        for _ in range(6)
    ]
    assert set.intersection(*found) >= {70, *range(300 - LAST_TENSORS + 1, 300)}, "torn first"
