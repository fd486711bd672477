"""What datasets and samplers of plain loaders count and draw by themselves goes on behind a restart. Nothing of Lightning is needed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, Subset

from holdfast.adapters.lightning.data_attributes import DataAttributes
from holdfast.adapters.lightning.plain_loaders import PlainLoaders

ROWS = 12


class Counts(Sampler[int]):
    """Another order in each epoch, by a count of its own."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Draws(Dataset[Any]):
    """Rows with noise of generators of its own, and with the number of rows that were loaded."""

    def __init__(self) -> None:
        self.loaded, self.name = 0, "rows"
        self.rng, self.plain = np.random.default_rng(3), random.Random(3)
        self.torch = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> float:
        self.loaded += 1
        return float(
            index + self.loaded + self.rng.random() + self.plain.random() + torch.rand((), generator=self.torch)
        )


class Stream(IterableDataset[Any]):
    """Rows in an order by a count of its own."""

    def __init__(self) -> None:
        self.counts = Counts()

    def __iter__(self) -> Iterator[int]:
        yield from self.counts


KINDS = {
    "sampler": lambda: DataLoader(range(ROWS), sampler=Counts()),
    "workers": lambda: DataLoader(range(ROWS), sampler=Counts(), num_workers=1),
    "dataset": lambda: DataLoader(Draws(), shuffle=True),
    "subset": lambda: DataLoader(Subset(Draws(), range(ROWS))),
    "stream": lambda: DataLoader(Stream()),
}


def counted(loader: Any) -> PlainLoaders:
    made = PlainLoaders(tells=True)
    made.count([loader])
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("had", [3, ROWS + 5])
def test_behind_a_restart_within_an_epoch_they_go_on(kind: str, had: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    loader = KINDS[kind]()
    places, rows = counted(loader), list[Any]()
    saved: list[Any] = []
    for _ in range(3):
        for batch in loader:
            rows.append(batch.tolist())
            if len(rows) == had:
                saved, process = places.state_dict(), torch.get_rng_state()
    again = KINDS[kind]()
    counted(again).load_state_dict(saved)
    iterator, told = iter(again), list[Any]()
    torch.set_rng_state(process)
    told += [batch.tolist() for batch in iterator]
    while len(told) < len(rows) - had:
        told += [batch.tolist() for batch in again]
    assert told == rows[had:]
    assert not [
        record for record in caplog.records if "not kept" in record.message or "not with the order" in record.message
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_between_two_epochs_they_go_on_too(kind: str) -> None:
    torch.manual_seed(1)
    loader = KINDS[kind]()
    places = counted(loader)
    list(loader)
    saved, process = places.behind(), torch.get_rng_state()
    rest = [batch.tolist() for batch in loader]
    again = KINDS[kind]()
    counted(again).begin_behind(saved)
    torch.set_rng_state(process)
    assert [batch.tolist() for batch in again] == rest


def test_what_does_not_change_is_as_the_script_made_it() -> None:
    """Another name for the same data, in a version of before."""
    first = DataLoader(Draws())
    attributes = DataAttributes(first, set(), pytest.fail)
    list(first)
    again = Draws()
    again.name = "elsewhere"
    DataAttributes(DataLoader(again), set(), pytest.fail).load_state_dict(attributes.state_dict())
    assert (again.name, again.loaded) == ("elsewhere", ROWS)


@pytest.mark.parametrize(
    "order", [list(range(ROWS)), torch.arange(ROWS), np.arange(ROWS)], ids=["list", "tensor", "array"]
)
def test_an_order_that_a_dataset_changes_is_told_of_once(order: Any) -> None:
    told: list[str] = []
    dataset = Draws()
    dataset.order = order  # type: ignore[attr-defined]
    attributes = DataAttributes(DataLoader(dataset), set(), told.append)
    assert attributes.state_dict() == {}
    order[0] = 5
    assert attributes.state_dict() == attributes.state_dict() == {}
    assert told == ["dataset.order"]


def test_what_lightning_tells_the_epoch_and_what_is_no_data_is_passed_by() -> None:
    dataset = Draws()
    dataset.model = torch.nn.Linear(1, 1)  # type: ignore[attr-defined]
    dataset.itself = dataset  # type: ignore[attr-defined]
    sampler: Any = DistributedSampler(dataset, 2, 0)
    attributes = DataAttributes(DataLoader(dataset, sampler=sampler), set(), pytest.fail)
    sampler.set_epoch(4)
    dataset.model.in_features = 3  # type: ignore[attr-defined]
    assert attributes.state_dict() == {}
