"""What datasets and samplers of plain loaders count and draw by themselves goes on behind a restart. Nothing of Lightning is needed."""

from __future__ import annotations

import enum
import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, Subset

from holdfast.adapters.lightning.data_attributes import DataAttributes
from holdfast.adapters.lightning.plain_loaders import PlainLoaders

ROWS = 12


class Phase(enum.Enum):
    EASY = 1
    HARD = 2


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


class Transforms:
    """What is applied to a row, in a list."""

    def __init__(self) -> None:
        self.transforms = [self._noise(np.random.default_rng(3)), self._noise(random.Random(3))]

    @staticmethod
    def _noise(rng: Any) -> Any:
        return functools.partial(plus, rng=rng)


class Transformed(Dataset[Any]):
    def __init__(self) -> None:
        self.transform = Transforms()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> float:
        return float(functools.reduce(lambda row, each: each(row), self.transform.transforms, index))


class OfModule(Transformed):
    """Rows with noise of a generator of this module, and a number of it."""

    def __getitem__(self, index: int) -> float:
        global LOADED  # noqa: PLW0603 - as scripts do
        LOADED = (LOADED or 0) + 0.5
        return index + RNG.random() + LOADED


RNG, LOADED = np.random.default_rng(3), None


def of_module() -> DataLoader[Any]:
    global RNG, LOADED
    RNG, LOADED = np.random.default_rng(3), None
    return DataLoader(OfModule())


def plus(row: float, rng: Any) -> float:
    return float(row + rng.random())


def counting() -> Callable[[list[float]], torch.Tensor]:
    count, rng = 0, random.Random(3)

    def collate(rows: list[float]) -> torch.Tensor:
        nonlocal count
        count += 1
        return torch.tensor(rows) + count + rng.random()

    return collate


KINDS = {
    "nested": lambda: DataLoader(Subset(Subset(Transformed(), range(ROWS)), range(ROWS))),
    "of the module": of_module,
    "function": lambda: DataLoader(range(ROWS), collate_fn=counting()),
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


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (0.0, np.float32(0.5)),
        (np.float64(1), np.float64(2)),
        (np.int64(1), np.int64(2)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (np.array(1), np.array(2)),
        (Phase.EASY, Phase.HARD),
    ],
    ids=str,
)
def test_a_single_number_that_is_none_of_pythons_is_told_of_once(first: Any, then: Any) -> None:
    """`self.mean = 0.9 * self.mean + 0.1 * row.mean()`."""
    told: list[str] = []
    dataset: Any = Draws()
    dataset.mean = first
    attributes = DataAttributes(DataLoader(dataset), set(), told.append)
    assert attributes.state_dict() == {}
    dataset.mean = then
    assert attributes.state_dict() == attributes.state_dict() == {}
    assert told == ["dataset.mean"]


def test_what_lightning_tells_the_epoch_and_what_is_no_data_is_passed_by() -> None:
    dataset = Draws()
    dataset.model = torch.nn.Linear(1, 1)  # type: ignore[attr-defined]
    dataset.itself = dataset  # type: ignore[attr-defined]
    sampler: Any = DistributedSampler(dataset, 2, 0)
    attributes = DataAttributes(DataLoader(dataset, sampler=sampler), set(), pytest.fail)
    sampler.set_epoch(4)
    dataset.model.in_features = 3  # type: ignore[attr-defined]
    assert attributes.state_dict() == {}


class Later(Dataset[Any]):
    """Makes its generator when the first row is asked for."""

    def __init__(self) -> None:
        self.rng: Any = None

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> float:
        self.rng = self.rng or random.Random(3)
        return index + float(self.rng.random())


def remembers(made: Any) -> Dataset[Any]:
    class Remembers(Draws):
        def __getitem__(self, index: int) -> float:
            made.append(index)
            return index

    return Remembers()


class Steps(Draws):
    """Takes something of an iterator with each row."""

    def __init__(self) -> None:
        self.scales = itertools.cycle(range(5))

    def __getitem__(self, index: int) -> float:
        return index * next(self.scales)


@pytest.mark.parametrize(
    ("dataset", "told"),
    [(Later(), "dataset.rng"), (remembers(deque(maxlen=3)), "dataset.__getitem__.made"), (Steps(), "dataset.scales")],
    ids=["later", "deque", "iterator"],
)
def test_what_cannot_be_set_in_another_process_is_told_of_once(dataset: Any, told: str) -> None:
    heard: list[str] = []
    loader = DataLoader(dataset)
    attributes = DataAttributes(loader, set(), heard.append)
    for _ in range(3):
        list(loader)
        assert not attributes.state_dict().keys() & {told}
    assert [name.replace("__getitem__.", "") for name in heard] == [told.replace("__getitem__.", "")]


def test_a_number_may_become_one_of_another_kind() -> None:
    first, again = Draws(), Draws()
    attributes = DataAttributes(DataLoader(first), set(), pytest.fail)
    first.loaded, first.name = 0.5, None  # type: ignore[assignment]
    DataAttributes(DataLoader(again), set(), pytest.fail).load_state_dict(attributes.state_dict())
    assert (again.loaded, again.name) == (0.5, None)
