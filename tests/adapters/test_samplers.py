"""What samplers of a script have drawn goes on in a process that was started again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from holdfast.adapters.hf_parts import samplers
from holdfast.adapters.hf_parts.samplers import Samplers

ROWS = 12


class Drawn(torch.utils.data.Sampler[int]):
    """Its order depends on the orders before it."""

    def __init__(self, part: int = 0) -> None:
        self.part, self.epoch, self.heat = part, 0, 1.0
        self.rows, self.places, self.cuts = list(range(ROWS)), np.arange(ROWS), torch.arange(ROWS)
        self.numbers, self.own, self.older = np.random.default_rng(5), random.Random(6), np.random.RandomState(7)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        self.heat *= 0.5
        self.own.shuffle(self.rows)
        self.numbers.shuffle(self.places)
        self.cuts[:] = self.cuts.roll(self.epoch)
        first = int(self.older.randint(ROWS)) + round(8 * self.heat)
        yield from ((first + self.rows[self.places[int(cut)]]) % ROWS for cut in self.cuts)


def orders(sampler: Drawn, number: int) -> list[list[int]]:
    return [list(sampler) for _ in range(number)]


def test_orders_go_on_where_they_were() -> None:
    undisturbed = orders(Drawn(), 6)
    sampler = Drawn()
    saving = Samplers(DataLoader(range(ROWS), sampler=sampler))  # type: ignore[arg-type]
    assert orders(sampler, 3) == undisturbed[:3]
    state = saving.state_dict()
    going_on = Drawn(part=1)
    rows = going_on.rows
    Samplers(DataLoader(range(ROWS), sampler=going_on)).load_state_dict(state)  # type: ignore[arg-type]
    assert orders(going_on, 3) == undisturbed[3:]
    assert going_on.part == 1, "what never changed is the script's to say"
    assert going_on.rows is rows, "others may hold it"


def test_a_generator_of_a_known_sampler_is_kept_and_its_counts_are_not() -> None:
    def loader(seed: int) -> DataLoader[int]:
        return DataLoader(range(ROWS), shuffle=True, generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]

    saving, going_on = loader(1), loader(2)
    saving.sampler.counted = 3  # type: ignore[attr-defined]
    of_saving = Samplers(saving)
    list(saving.sampler)
    saving.sampler.counted = 4  # type: ignore[attr-defined]
    Samplers(going_on).load_state_dict(of_saving.state_dict())
    assert list(going_on.sampler) == list(saving.sampler)
    assert not hasattr(going_on.sampler, "counted")


def test_an_order_that_is_too_long_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samplers, "_MAX_NUMBERS", ROWS - 1)
    sampler = Drawn()
    kept = Samplers(DataLoader(range(ROWS), sampler=sampler))  # type: ignore[arg-type]
    list(sampler)
    assert not any(place.endswith((".rows", ".places", ".cuts")) for place in kept.state_dict())
    assert caplog.text.count("Drawn.rows holds 12 numbers, and is not kept") == 1
