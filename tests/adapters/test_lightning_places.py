"""Loaders of a Lightning Trainer: plain ones have a place, and what has none is told at the start, once. Nothing of Lightning is needed."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, dataloader

from holdfast.adapters.lightning.loops import Place
from holdfast.adapters.lightning.plain_loaders import PlainLoaders, doubts_of
from holdfast.adapters.lightning.validation_loaders import ValidationLoaders
from holdfast.checkpoint.loader_workers import worker_draws

ROWS = 12


@pytest.fixture(autouse=True)
def no_workers_stay() -> Iterator[None]:
    """Ends workers that a test leaves: the garbage collector, which ends queues first, would wait five seconds for each."""
    yield
    for each in gc.get_objects():
        if isinstance(each, dataloader._MultiProcessingDataLoaderIter):
            each._shutdown_workers()  # type: ignore[no-untyped-call]


class Placed(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Own(DataLoader[Any]):
    """One that makes its batches itself."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Noisy(torch.utils.data.Dataset[Any]):
    """Rows that draw when they are loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> float:
        self.loaded.append(index)
        return index + torch.rand(()).item()


class StepByStep(Sampler[int]):
    """Draws each index when it is asked for it."""

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        for _ in range(ROWS):
            yield int(torch.randint(ROWS, ()))


class Buffer(IterableDataset[Any]):
    """Draws each row when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        yield from StepByStep()


def counted(*loaders: Any) -> PlainLoaders:
    made = PlainLoaders(tells=True)
    made.count(loaders)
    return made


@pytest.mark.parametrize(("kind", "told"), [(DataLoader, 0), (Placed, 0), (Own, 1)])
def test_a_loader_without_a_place_is_told_of_once(kind: Any, told: int, caplog: pytest.LogCaptureFixture) -> None:
    place: Any = Place.__new__(Place)
    place._told, place._trainer = False, SimpleNamespace(is_global_zero=True)
    combined = SimpleNamespace(flattened=[kind([1, 2])], _mode="max_size_cycle")
    place._fit = SimpleNamespace(_combined_loader=combined, _data_fetcher=None)
    place._note()
    place._note()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * told
    assert all("a restart within an epoch begins its data anew" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("number", "mode", "has_length", "takes_itself", "told"),
    [
        (1, "max_size_cycle", True, False, ""),
        (1, "max_size_cycle", False, False, ""),
        (2, "max_size_cycle", True, False, ""),
        (2, "min_size", True, False, ""),
        (2, "max_size_cycle", False, False, "nobody knows how long"),
        (2, "max_size", True, False, "the mode is max_size"),
        (1, "max_size_cycle", True, True, "dataloader_iter"),
    ],
)
def test_ways_to_go_over_loaders_that_have_no_place_are_told_of(
    number: int, mode: str, has_length: bool, takes_itself: bool, told: str
) -> None:
    loaders = [DataLoader([1, 2]) for _ in range(number)]
    doubts = doubts_of(loaders, mode, has_length=has_length, takes_itself=takes_itself)
    assert len(doubts) == bool(told)
    assert all(told in doubt for doubt in doubts)


def test_one_loader_that_is_given_twice_is_told_of() -> None:
    loader = DataLoader([1, 2])
    (doubt,) = doubts_of([loader, loader], "max_size_cycle", has_length=True, takes_itself=False)
    assert "given twice" in doubt


def test_batches_in_no_order_are_told_of() -> None:
    loader = DataLoader([1, 2], num_workers=2, in_order=False)
    (doubt,) = doubts_of([loader], "max_size_cycle", has_length=True, takes_itself=False)
    assert "in no order" in doubt


@pytest.mark.parametrize("had", [1, 3, 5])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_goes_on_at_its_place(had: int, workers: int) -> None:
    """Workers load again what was had, so that they have drawn it; without workers nothing is loaded again."""

    def loader() -> DataLoader[Any]:
        return DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)

    torch.manual_seed(1)
    first = loader()
    places = counted(first)
    iterator = iter(first)
    torch.rand(5)  # a hook between the beginning of the data and the first batch
    for _ in range(had):
        next(iterator)
        torch.rand(3)  # a step
    saved, random = places.state_dict(), torch.get_rng_state()
    rest = [batch.tolist() for batch in iterator]
    torch.manual_seed(2)
    again = loader()
    counted(again).load_state_dict(saved)
    iterator = iter(again)
    torch.set_rng_state(random)
    assert [batch.tolist() for batch in iterator] == rest
    assert workers or len(again.dataset.loaded) == ROWS - 2 * had  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (DataLoader(range(ROWS), shuffle=True), ""),
        (DataLoader(range(ROWS), sampler=torch.utils.data.WeightedRandomSampler([1.0] * ROWS, ROWS)), ""),
        (DataLoader(Noisy()), ""),
        (DataLoader(range(ROWS), sampler=StepByStep()), "the order of its batches is drawn step by step"),
        (DataLoader(Buffer()), "the items of its dataset are drawn step by step"),
    ],
    ids=["shuffled", "weighted", "noisy", "sampler", "stream"],
)
def test_what_is_drawn_step_by_step_is_told_of_once(loader: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    counted(loader)
    for _ in range(2):
        assert len(list(loader)) == ROWS
    messages = [record.message for record in caplog.records if "step by step" in record.message]
    assert [told in message for message in messages] == [True] * bool(told)


def test_a_loader_that_is_let_go_is_as_it_was() -> None:
    loader = DataLoader(range(ROWS), batch_size=2)
    before = set(vars(loader))
    places = counted(loader)
    next(iter(loader))
    saved = places.state_dict()
    places.load_state_dict(saved)
    places.let_go()
    assert set(vars(loader)) == before
    assert len(list(loader)) == ROWS // 2


def test_a_version_of_other_loaders_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    places = counted(DataLoader(range(ROWS)))
    places.load_state_dict([])
    assert [
        record.message.startswith("a restart within an epoch begins its data anew") for record in caplog.records
    ] == [True]


def test_what_changes_under_a_loader_that_hands_out_its_place_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Such a loader goes on by asking its sampler again, with what the script has given it at its start."""
    loader = Placed(list(range(ROWS)), batch_size=2)
    places = counted(loader)
    places.state_dict()
    assert not caplog.records
    loader.batch_sampler.batch_size = 3  # type: ignore[union-attr]
    places.state_dict()
    places.state_dict()
    assert [record.message.partition(" changes")[0] for record in caplog.records] == [
        "the loader's batch_sampler.batch_size"
    ]


@pytest.mark.parametrize("had", [3, ROWS // 2])
def test_workers_that_stay_go_on_with_what_they_draw(had: int) -> None:
    """Behind an epoch, of which the rest that they loaded ahead was not had."""

    def loader() -> DataLoader[Any]:
        return DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)

    torch.manual_seed(1)
    first = loader()
    places = counted(first)
    assert len(list(itertools.islice(first, had))) == had
    own, drawn, random = places.behind(), places.workers_behind(), torch.get_rng_state()
    expected = [batch.tolist() for batch in first]
    torch.manual_seed(2)
    again = loader()
    places = counted(again)
    iter(again)  # Lightning makes one with the loader
    places.begin_behind(own)
    places.stay_behind(drawn)
    torch.set_rng_state(random)
    assert [batch.tolist() for batch in again] == expected


def test_for_what_workers_load_ahead_is_waited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Noisy):
        def __getitem__(self, index: int) -> float:
            while index and not go_on.is_set():
                time.sleep(0.01)
            return super().__getitem__(index)

    monkeypatch.setattr(worker_draws, "_PATIENCE_S", 0.5)
    go_on = torch.multiprocessing.get_context("fork").Event()
    loader = DataLoader(Slow(), num_workers=1, persistent_workers=True)
    places = counted(loader)
    iterator = iter(loader)
    next(iterator)
    for least, most in ((0.5, 60.0), (0.0, 0.5)):
        begun = time.monotonic()
        assert places.workers_behind() == [None]
        assert least <= time.monotonic() - begun < most
    go_on.set()
    next(iterator)
    monkeypatch.setattr(worker_draws, "_PATIENCE_S", 60.0)
    assert places.workers_behind() != [None]


def test_workers_that_stay_and_whose_draws_no_version_has_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Noisy(), num_workers=1, persistent_workers=True)
    places = counted(loader)
    places.stay_behind([])
    next(iter(loader))
    assert "begin anew in them: the version does not have them" in caplog.text


def test_workers_of_a_validation_that_stay_go_on_with_what_they_draw() -> None:
    def validating() -> ValidationLoaders:
        loader = DataLoader(Noisy(), batch_size=2, num_workers=1, persistent_workers=True)
        return ValidationLoaders(SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[loader])), print)

    def rows(loaders: ValidationLoaders) -> list[Any]:
        loaders.begin()
        return [batch.tolist() for batch in itertools.islice(loaders._combined.flattened[0], 2)]

    first, again = validating(), validating()
    rows(first)
    saved, random = first.state_dict(), torch.get_rng_state()
    expected = rows(first)
    torch.manual_seed(2)
    again.load_state_dict(saved)
    torch.set_rng_state(random)
    assert rows(again) == expected
    loader = again._combined.flattened[0]
    again.let_go()
    assert "_get_iterator" not in vars(loader)


def test_workers_of_a_validation_that_stay_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for workers, told in ((0, 0), (1, 1)):
        place: Any = Place.__new__(Place)
        context = "spawn" if workers else None
        loader = DataLoader(
            [1, 2], num_workers=workers, persistent_workers=bool(workers), multiprocessing_context=context
        )
        loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[loader]))
        place._plain, place._validating = counted(), ValidationLoaders(loop, print)
        place.made_to_validate = SimpleNamespace(were_due=False)
        for _ in range(2):
            place.validation_begins()
        assert sum("persistent_workers" in record.message for record in caplog.records) == told


@pytest.mark.parametrize(("limits", "expected"), [([10], (10, 5, 6)), ([9], (7, 3, 7))], ids=["the same", "another"])
def test_an_epoch_that_goes_on_is_as_long_as_when_it_began(limits: list[int], expected: tuple[int, ...]) -> None:
    """Its loader has another size of batches since. A script that sets another limit now means that."""

    def set_up() -> None:
        place._fit._combined_loader = SimpleNamespace(limits=limits)
        place._fit.max_batches, place._fit._data_fetcher, trainer.val_check_batch = 7, SimpleNamespace(length=7), 3

    place: Any = Place.__new__(Place)
    trainer = place._trainer = SimpleNamespace(val_check_interval=0.5)
    place._fit = SimpleNamespace(_combined_loader=None, _data_fetcher=None, trainer=trainer)
    place.made = SimpleNamespace(set_up=lambda make: make())
    place._plain = counted()
    place._within, place._lengths = True, {"limits": [10], "max_batches": 10, "length": 6}
    place.set_up(set_up)
    found = (place._fit.max_batches, trainer.val_check_batch, place._fit._data_fetcher.length)
    assert found == expected
    place._fit.max_batches = 8
    place.set_up(lambda: None)
    assert place._fit.max_batches == 8, "loaders were there already"


def test_what_a_hook_of_the_start_sets_anew_is_as_the_epoch_had_it() -> None:
    """And a batch that Lightning has fetched ahead stays fetched."""

    class Goes(IterableDataset[Any]):
        def __init__(self) -> None:
            self.at, self.scale = 0, 1

        def __iter__(self) -> Iterator[int]:
            for _ in range(ROWS):
                self.at += 1
                yield self.at * self.scale

    loader = DataLoader(Goes(), batch_size=None)
    place: Any = Place.__new__(Place)
    combined = SimpleNamespace(limits=[None])
    place._fit = SimpleNamespace(_combined_loader=None, _data_fetcher=None)
    place._plain, place._within, place._lengths, place._reloads = counted(loader), True, {}, None
    place.made = SimpleNamespace(set_up=lambda make: make())
    place._trainer, place._trained = SimpleNamespace(callbacks=()), SimpleNamespace(change=lambda: None)
    iterator = iter(loader)

    def set_up() -> None:
        place._fit._combined_loader = combined
        loader.dataset.at, loader.dataset.scale = 3, 2  # type: ignore[attr-defined]
        assert next(iterator) == 8

    place.set_up(set_up)
    loader.dataset.scale = 1  # type: ignore[attr-defined]
    place.run_starts()
    assert next(iterator) == 10
