"""A plain DataLoader that was given goes on with the next batch, wherever the run before was killed."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import multiprocessing
import pickle
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from holdfast.checkpoint.loader_workers import dataset_generators, worker_draws
from holdfast.checkpoint.state.dataloader import LoaderPlace, place_of
from holdfast.checkpoint.state.training_state import State
from kit.checkpointers import Make, Trainee
from sample_kit import MORE, sampled
from state_kit import restore, save

ROWS = torch.arange(20.0)


class Loud(Dataset[torch.Tensor]):
    """Rows that are counted as they are loaded, and blurred by random numbers of the process."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return ROWS[index] + torch.rand(())


class Drawing(Dataset[torch.Tensor]):
    """Rows that are blurred by all kinds of generators, and counted: a worker that begins anew makes others."""

    def __init__(self, *, often: int = 1) -> None:
        self.often, self.taken = often, 0
        self.own = {"torch": own(), "numpy": [np.random.default_rng(1)], "python": random.Random(2)}

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.taken += 1
        row = ROWS[index]
        if index % self.often == 0:
            row = row + torch.rand(()) + random.random() + np.random.random() + 100 * self.taken  # noqa: NPY002
            row = row + torch.rand((), generator=self.own["torch"]) + self.own["numpy"][0].random()  # type: ignore[call-overload, index]
        return row + self.own["python"].random() if index % (3 * self.often) == 0 else row  # type: ignore[attr-defined]


class Narrow:
    """A transform without a dictionary of attributes, and with a generator that only a method reaches."""

    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own = random.Random(4)

    def blur(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows) + self.own.random()


class Sequence(random.Random):
    """A generator of a class of one's own."""


OF_THE_MODULE = np.random.default_rng(5)


class Reaching(Dataset[torch.Tensor]):
    """Rows blurred by generators that are no attributes of it, and by a loader of its own."""

    of_the_class = Sequence(6)

    def __init__(self) -> None:
        held = random.Random(7)
        self.inner = DataLoader(TensorDataset(ROWS[:4]), batch_size=2, shuffle=True)
        self.parts = [
            lambda: 2 * held.random(),
            functools.partial(lambda own: own.random(), random.Random(8)),
            lambda: sum(batch[0][0].item() for batch in self.inner),
        ]

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [part() for part in self.parts] + [self.of_the_class.random(), helped()]
        return ROWS[index] + torch.tensor(drawn, dtype=torch.float64).sum()


def helped() -> float:
    return OF_THE_MODULE.random()


class Shared:
    """What functions name, and nothing holds."""

    own = random.Random(9)
    bits = np.random.PCG64(10)

    @classmethod
    def draw(cls) -> float:
        return cls.own.random()


HERE = sys.modules[__name__]


def elsewhere(by: random.Random = random.Random(11)) -> float:  # noqa: B008
    return HERE.helped() + Shared.draw() + by.random()  # type: ignore[attr-defined]


class Counted(random.Random):
    """A generator with a state that `getstate` does not hand out."""

    drawn = 0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return super().random() + self.drawn


class Whole(random.Random):
    def getstate(self) -> tuple[Any, ...]:
        return (self.seed, super().getstate())


def within(value: Any, times: int) -> Any:
    for _ in range(times):
        value = [value]
    return value


def kept_of(value: Any) -> Any:
    return types.SimpleNamespace(value=value)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from ROWS[torch.randperm(len(ROWS))]


class Unsteady(torch.utils.data.Sampler[int]):
    """A sampler that is another in every process."""

    seeds = iter(range(100))

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(20, generator=torch.Generator().manual_seed(next(self.seeds))).tolist()

    def __len__(self) -> int:
        return 20


def own() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def seeded(number: int) -> None:
    random.seed(torch.initial_seed() + number)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(TensorDataset(ROWS), batch_size=3),
    "shuffled": lambda: DataLoader(TensorDataset(ROWS), batch_size=3, shuffle=True, drop_last=True),
    "random transforms": lambda: DataLoader(Loud(), batch_size=3, shuffle=True),
    "a generator of its own": lambda: DataLoader(TensorDataset(ROWS), batch_size=3, shuffle=True, generator=own()),
    "a sampler with replacement": lambda: DataLoader(
        TensorDataset(ROWS), batch_size=3, sampler=RandomSampler(ROWS, replacement=True, num_samples=50, generator=own())
    ),
    "no batches": lambda: DataLoader(TensorDataset(ROWS), batch_size=None, shuffle=True),
    "iterable": lambda: DataLoader(Stream(), batch_size=3),
    "two workers": lambda: DataLoader(TensorDataset(ROWS), batch_size=3, shuffle=True, num_workers=2),
    "a worker that stays": lambda: DataLoader(
        TensorDataset(ROWS), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "workers that draw": lambda: DataLoader(Drawing(), batch_size=3, shuffle=True, num_workers=3),
    "workers that draw and stay": lambda: DataLoader(
        Drawing(), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=1
    ),
    "workers that draw now and then": lambda: DataLoader(
        Drawing(often=7), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True, worker_init_fn=seeded
    ),
    "workers that draw elsewhere": lambda: DataLoader(
        Reaching(), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=Narrow().blur
    ),
    "more workers than batches": lambda: DataLoader(
        Drawing(), batch_size=9, generator=own(), num_workers=5, persistent_workers=True
    ),
}  # fmt: skip


class Life:
    """A loop over epochs of a loader that also draws random numbers of its own."""

    begun: ClassVar[list[Life]] = []

    def __init__(self, make: Callable[[], DataLoader[Any]]) -> None:
        torch.manual_seed(5)
        self.begun.append(self)
        self.over: Any = None
        self.loader = make()
        self.state = State({"loader": self.loader}, rank=0, world_size=1)
        self.state.trained()

    def steps(self) -> Iterator[list[float]]:
        while True:
            for batch in self.loader:
                rows = batch[0] if isinstance(batch, list | tuple) else batch
                yield [*rows.flatten().tolist(), torch.rand(()).item()]

    def end(self) -> None:
        """Ends workers that nobody ends: the garbage collector would wait five seconds for each."""
        for iterator in (vars(self.loader).get("_iterator"), self.over):
            if hasattr(inner := getattr(iterator, "_inner", iterator), "_shutdown_workers"):
                inner._shutdown_workers()


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    while Life.begun:
        Life.begun.pop().end()


# Workers take a second or two to start.
CASES = [(name, killed) for name in LOADERS for killed in ((4,) if "worker" in name else (1, 4, 7, 9))]
CASES.append(("a worker that stays", 10))  # in its second epoch
CASES += [
    (name, killed) for name in LOADERS if "draw" in name or "more" in name for killed in (1, 2, 3, 7, 8, 10, 13, 14, 21)
]
DRAWN = [("workers that draw", 4), ("workers that draw and stay", 10), ("workers that draw now and then", 21)]
DRAWN += [("workers that draw elsewhere", 8), ("more workers than batches", 2)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("name", "killed"),
    sampled(
        CASES,
        *(
            case
            for case in CASES
            if case[0] not in {name for name, _ in DRAWN} | {"a worker that stays", "two workers"}
        ),
        *DRAWN,
        ("a worker that stays", 10),
    ),
)
def test_it_goes_on_with_the_next_batch(name: str, killed: int) -> None:
    first = Life(LOADERS[name])
    steps = first.steps()
    for _ in range(killed):
        next(steps)
    saved = save(first.state)
    expected = [next(steps) for _ in range(12)]
    second = Life(LOADERS[name])
    restore(second.state, saved)
    again = second.steps()
    assert [next(again) for _ in range(12)] == expected


class Handing(DataLoader[Any]):
    """Hands out its place and goes on there as torchdata's loader does: it begins the epoch again."""

    had, left_out, began = 0, 0, torch.empty(0)

    def state_dict(self) -> dict[str, Any]:
        return {"had": self.had, "began": self.began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left_out, self.began = state["had"], state["began"]

    def _get_iterator(self) -> Any:
        had, self.left_out = self.left_out, 0
        if had:
            self.generator.set_state(self.began)
        self.began = self.generator.get_state()
        rows = super()._get_iterator()
        for _ in range(had):
            next(rows)
        self.had = had
        return self._counted(rows)

    def _counted(self, rows: Iterator[Any]) -> Iterator[Any]:
        for batch in rows:
            self.had += 1
            yield batch
        self.had = 0


class Pair:
    """A loop over two loaders at once, whose iterators are made before either draws its order.

    Args:
        generator: of both; None: that of the process.
        kinds: classes of the loaders.
    """

    def __init__(self, generator: torch.Generator | None = None, kinds: Any = (DataLoader, DataLoader)) -> None:
        torch.manual_seed(5)
        self.loaders = [
            kind(TensorDataset(ROWS), size, shuffle=True, drop_last=True, generator=generator)
            for kind, size in zip(kinds, (3, 4), strict=True)
        ]
        self.state = State({"one": self.loaders[0], "two": self.loaders[1]}, rank=0, world_size=1)
        self.state.trained()

    def steps(self) -> Iterator[list[float]]:
        while True:
            for one, two in zip(*self.loaders, strict=False):
                yield [*one[0].tolist(), *two[0].tolist(), torch.rand(()).item()]


class Cycle(Pair):
    """A loop over one loader that asks for a batch of the other in each step, and begins that one anew when it ends."""

    def steps(self) -> Iterator[list[float]]:
        other: Iterator[Any] = iter([])
        while True:
            for (one,) in self.loaders[0]:
                while (two := next(other, None)) is None:
                    other = iter(self.loaders[1])
                yield [*one.tolist(), *two[0].tolist(), torch.rand(()).item()]


class Both(Pair):
    """Epochs of the one and of the other in turn."""

    def steps(self) -> Iterator[list[float]]:
        while True:
            for loader in self.loaders:
                yield from (rows.tolist() for (rows,) in loader)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("make", [Pair, Cycle])
@pytest.mark.parametrize("killed", [1, 3, 5, 6, 7])
def test_loaders_that_are_gone_over_together_go_on_with_their_next_batches(
    killed: int, make: type[Pair], shares: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = make(own() if shares else None)
    steps = first.steps()
    for _ in range(killed):
        next(steps)
    saved = save(first.state)
    expected = [next(steps) for _ in range(24)]
    second = make(own() if shares else None)
    restore(second.state, saved)
    again = second.steps()
    assert [next(again) for _ in range(24)] == expected
    assert not caplog.text


@pytest.mark.parametrize("kinds", [(Handing, Handing), (Handing, DataLoader), (DataLoader, Handing)])
def test_loaders_that_hand_out_their_place_may_share_a_generator(kinds: Any) -> None:
    first, second = (Cycle(own(), kinds) for _ in range(2))
    steps = first.steps()
    for _ in range(6):  # the first loader draws when it ends
        next(steps)
    saved = save(first.state)
    expected = [next(steps) for _ in range(24)]
    for life in (second, second):  # the second time in the same process
        life.state = State({"one": life.loaders[0], "two": life.loaders[1]}, rank=0, world_size=1)
        life.state.trained()
        restore(life.state, saved)
        again = life.steps()
        assert [next(again) for _ in range(24)] == expected


def test_a_loader_that_goes_on_at_its_place_while_another_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread, which opens a Checkpointer: what loaders share is looked at meanwhile."""
    first, second = Pair(own()), Pair(own())
    steps = first.steps()
    next(steps)
    restore(second.state, save(first.state))
    made, shares = list[Any](), LoaderPlace.shares

    def slowly(place: LoaderPlace, generator: torch.Generator, other: object) -> bool:
        made.append(DataLoader([1]))
        place_of(made[-1])
        return shares(place, generator, other)

    monkeypatch.setattr(LoaderPlace, "shares", slowly)
    next(second.steps())
    assert made


@pytest.mark.parametrize("shares", [False, True])
def test_draws_of_another_loader_that_a_place_undoes_are_told(shares: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The second loader goes on at its place when the first has gone over its data, once more or again."""
    first, second = (Both(own() if shares else None) for _ in range(2))
    steps = first.steps()
    for _ in range(8):
        next(steps)
    restore(second.state, save(first.state))
    again = second.steps()
    for _ in range(6):
        next(again)
    assert not caplog.text
    next(again)
    assert ("shares its generator with another loader" in caplog.text) == shares


def test_a_worker_that_stays_is_made_before_the_order_of_a_later_epoch_is_drawn() -> None:
    def epoch(life: Life) -> list[float]:
        return [row for (rows,) in life.loader for row in rows.tolist()]

    first, second = (Life(LOADERS["a worker that stays"]) for _ in range(2))
    epoch(first)
    saved = save(first.state)
    expected = [epoch(first) for _ in range(2)]
    restore(second.state, saved)
    assert [epoch(second) for _ in range(2)] == expected


def test_nothing_is_loaded_that_was_had(caplog: pytest.LogCaptureFixture) -> None:
    first = Life(LOADERS["random transforms"])
    steps = first.steps()
    for _ in range(4):
        next(steps)
    saved = save(first.state)
    second = Life(LOADERS["random transforms"])
    restore(second.state, saved)
    next(second.steps())
    loaded = second.loader.dataset.loaded  # type: ignore[attr-defined]
    assert len(loaded) == 3
    assert not set(loaded) & set(first.loader.dataset.loaded)  # type: ignore[attr-defined]
    assert not caplog.records


@MORE
def test_a_version_between_restore_and_the_first_batch_has_the_same_place() -> None:
    first = Life(LOADERS["shuffled"])
    steps = first.steps()
    for _ in range(4):
        next(steps)
    saved = save(first.state)
    expected = next(steps)
    second = Life(LOADERS["shuffled"])
    restore(second.state, saved)
    saved = save(second.state)
    third = Life(LOADERS["shuffled"])
    restore(third.state, saved)
    assert next(third.steps()) == expected


def test_an_order_that_is_another_and_an_iterable_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def unsteady() -> DataLoader[Any]:
        return DataLoader(TensorDataset(ROWS), batch_size=3, sampler=Unsteady())

    for make, said in (
        (unsteady, "not with the order of the run that saved"),
        (LOADERS["iterable"], "3 batches are loaded"),
    ):
        first = Life(make)
        steps = first.steps()
        for _ in range(3):
            next(steps)
        saved = save(first.state)
        second = Life(make)
        restore(second.state, saved)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            next(second.steps())
        assert said in caplog.text


class Lazy(Drawing):
    """A dataset that makes a generator where it is first asked."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Any = None

    def __getitem__(self, index: int) -> torch.Tensor:
        self.made = self.made or random.Random(3)
        return super().__getitem__(index) + self.made.random()


class Late(Lazy):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) if index >= 15 else ROWS[index]


class Replaced(Loud):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.worker = random.Random(1), -1

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.worker < 0:
            self.worker, self.own = 0, random.Random(2)
        return super().__getitem__(index) + self.own.random()


class Seeded(Loud):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.is_seeded = random.Random(1), False

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.is_seeded:
            self.own.seed(2)
            self.is_seeded = True
        return super().__getitem__(index) + self.own.random()


class Summing(Loud):
    """A number that becomes a tensor."""

    def __init__(self) -> None:
        self.total: Any = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.total = self.total + ROWS[:2]
        return ROWS[index]


class Caching(Loud):
    """A count of what lies in a cache: a restart has the one no more than the other."""

    def __init__(self) -> None:
        self.cache: dict[int, float] = {}
        self.size = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.cache[index] = 1.0
        self.size += 1
        while self.size > 2:
            self.cache.pop(next(key for key in self.cache if key != index))
            self.size -= 1
        return ROWS[index]


class Counting(Loud):
    count = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        type(self).count += 1
        return super().__getitem__(index)


class Tallying(Loud):
    """Counts in a list, and in what each item begins with anew."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [0] * len(ROWS)
        self.once, self.other, self.sums = [0], {"rows": 0}, np.zeros(2)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.once[0], self.other = 0, {"rows": 0}
        self.sums.fill(0)
        self.once[0] += index
        self.other["rows"] += index
        self.sums[0] += index
        self.seen[index] += 1
        return super().__getitem__(index)


STREAM = {"num_workers": 1, "persistent_workers": True, "dataset": Stream(), "batch_size": 3}


class Failing(Loud):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index in {4, 13}:
            raise ValueError("a row that cannot be read")
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("of_save", "of_restore", "said"),
    [
        ({"num_workers": 2}, {"num_workers": 1}, "begin anew in them: they are 1, and were 2"),
        pytest.param({"num_workers": 2}, {"num_workers": 0}, "begin anew in them: they are 0, and were 2", marks=MORE),
        ({"num_workers": 0}, {"num_workers": 2}, "begin anew in them: the version does not have them"),
        pytest.param({"num_workers": 2, "dataset": Lazy()}, {"num_workers": 2}, "no version has 'dataset.made', which a worker makes", marks=MORE),
        (STREAM, STREAM, "begins anew in them: its dataset is iterable"),
        ({"num_workers": 1, "dataset": Late(), "batch_size": 2}, {"num_workers": 1}, "'dataset.made', which a worker makes"),
        pytest.param({"num_workers": 2, "dataset": Replaced()}, {"num_workers": 2}, "'dataset.own', which a worker makes", marks=MORE),
        ({"num_workers": 2, "dataset": Seeded()}, {"num_workers": 2}, "'dataset.is_seeded', which a worker changes"),
        ({"num_workers": 2, "dataset": Summing()}, {"num_workers": 2}, "'dataset.total', which cannot be read"),
        pytest.param({"num_workers": 2, "dataset": Caching()}, {"num_workers": 2}, "'dataset.cache', which a worker changes", marks=MORE),
        ({"num_workers": 2, "dataset": Counting()}, {"num_workers": 2}, "'dataset.count', which a worker changes"),
        pytest.param({"num_workers": 2, "dataset": Tallying()}, {"num_workers": 2}, "'dataset.seen', which a worker changes", marks=MORE),
    ],
)  # fmt: skip
def test_workers_that_begin_anew_are_told(
    of_save: dict[str, Any], of_restore: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = Life(lambda: DataLoader(**{"dataset": Drawing(), "batch_size": 3, **of_save}))
    steps = first.steps()
    for _ in range(8 if of_save.get("batch_size") else 3):
        next(steps)
    saved = save(first.state)
    second = Life(lambda: DataLoader(**{"dataset": Drawing(), "batch_size": 3, **of_restore}))
    restore(second.state, saved)
    next(second.steps())
    assert said in caplog.text


@pytest.mark.parametrize(
    ("dataset", "paths"),
    [
        (elsewhere, ["dataset.by", "test_dataloader.OF_THE_MODULE", "test_dataloader.Shared.bits", "test_dataloader.Shared.own"]),
        (kept_of(np.random.SFC64(1)), ["dataset.value"]),
        (kept_of(Counted(1)), ["dataset.value", "dataset.value.drawn"]),
        (kept_of(within(random.Random(1), 20)), ["dataset.value" + "[0]" * 20]),
        ([[[(at, other) for at in range(100)] for other in range(100)], (random.Random(1),)], ["dataset[1][0]"]),
    ],
)  # fmt: skip
def test_what_a_dataset_draws_from_is_found_wherever_it_lies(dataset: Any, paths: list[str]) -> None:
    found = dataset_generators.kept_in({"dataset": dataset})
    assert sorted(path.replace(__name__, "test_dataloader") for path in found) == paths


ONE = random.Random(1)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ([kept_of([kept_of(random.Random(at))]) for at in range(200)], "'dataset', which has too many generators"),
        ([kept_of([kept_of(ONE)]) for _ in range(200)], ""),
        (kept_of(Whole(1)), "'dataset.value', a generator with a state"),
        (kept_of(random.SystemRandom()), ""),
    ],
)
def test_generators_that_cannot_be_kept_are_named(dataset: Any, said: str) -> None:
    words = dataset_generators.Look({"dataset": dataset}).words
    assert words.startswith(said) if said else not words


def test_an_iterator_has_what_that_of_torch_has() -> None:
    """A script ends workers that stay with `_shutdown_workers`."""
    life = Life(LOADERS["in order"])
    iterator: Any = iter(life.loader)
    assert iterator._num_workers == 0
    assert not hasattr(iterator, "_workers")


class Sized:
    """Batches whose sizes are drawn one by one, with random numbers that steps draw too."""

    def __iter__(self) -> Iterator[list[int]]:
        for at in range(40):
            yield [at % 20] * int(torch.randint(1, 9, ()))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_an_order_that_is_another_ahead_of_the_loop_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(TensorDataset(ROWS), batch_sampler=Sized(), num_workers=1, prefetch_factor=4)  # type: ignore[arg-type]

    first, second = Life(make), Life(make)
    steps = first.steps()
    for _ in range(4):  # the first four were asked for at once
        next(steps)
    saved = save(first.state)
    expected = [next(steps) for _ in range(4)]
    restore(second.state, saved)
    again = second.steps()
    assert [next(again) for _ in range(4)] != expected
    assert "not with the order" in caplog.text


def test_nothing_holds_a_class_that_was_looked_at() -> None:
    """A script that runs again in its process leaves its modules behind."""

    class Passing(Drawing):
        pass

    assert "dataset.taken" in dataset_generators.kept_in({"dataset": Passing()})
    assert dataset_generators.Look({"dataset": Tallying()}).lists.keys() == {"dataset.seen"}
    held = weakref.ref(Passing)
    del Passing
    gc.collect()
    assert held() is None


class Short(Loud):
    """Its methods call their object otherwise."""

    def __init__(s) -> None:  # noqa: N805
        super().__init__()
        s.had, s.other, s.passed, s.seen = 0, 0, 0, [0]

    def __getitem__(s, index: int, /) -> torch.Tensor:  # noqa: N805
        s.had += 1
        s.seen[0] += 1
        self = s.of(s)
        self.other += 1
        return super().__getitem__(index)

    @staticmethod
    def of(passed: Any) -> Any:
        passed.passed += 1
        return types.SimpleNamespace(other=0)


def test_counts_are_found_whatever_a_method_calls_its_object() -> None:
    looked = dataset_generators.Look({"dataset": Short()})
    assert looked.found.keys() == {"dataset.had"}
    assert looked.lists.keys() == {"dataset.seen"}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_count_beside_a_cache_begins_anew_with_it() -> None:
    first = Life(lambda: DataLoader(Caching(), batch_size=3, num_workers=1))
    steps = first.steps()
    next(steps)
    saved = save(first.state)
    expected = next(steps)
    second = Life(lambda: DataLoader(Caching(), batch_size=3, num_workers=1))
    restore(second.state, saved)
    assert next(second.steps()) == expected


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("killed", "num_workers"), sampled(product([3, 5, 6], [0, 2]), (3, 0), (5, 0), (6, 0), (5, 2)))
def test_a_batch_that_failed_was_had(killed: int, num_workers: int) -> None:
    """A loop that catches the error goes on with the next one."""

    def lived(life: Life) -> Iterator[list[float]]:
        while True:
            batches = life.over = iter(life.loader)
            while True:
                try:
                    yield [*next(batches).tolist(), torch.rand(()).item()]
                except ValueError:
                    continue
                except StopIteration:
                    break

    def make() -> DataLoader[Any]:
        return DataLoader(Failing(), batch_size=2, num_workers=num_workers, shuffle=True)

    first = Life(make)
    steps = lived(first)
    for _ in range(killed):
        next(steps)
    saved = save(first.state)
    expected = [next(steps) for _ in range(9)]
    second = Life(make)
    restore(second.state, saved)
    again = lived(second)
    assert [next(again) for _ in range(9)] == expected


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_that_nobody_holds_any_more_has_no_place(num_workers: int) -> None:
    """`next(iter(loader))` in each step takes the first batch of another order each time."""

    def make() -> DataLoader[Any]:
        return DataLoader(Loud(), batch_size=3, shuffle=True, num_workers=num_workers)

    first = Life(make)
    next(iter(first.loader))
    saved = save(first.state)
    expected = [next(iter(first.loader)).tolist() for _ in range(2)]
    second = Life(make)
    restore(second.state, saved)
    assert [next(iter(second.loader)).tolist() for _ in range(2)] == expected


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_loader_hands_out_its_own_rows(copied: Callable[[Any], Any]) -> None:
    life = Life(lambda: DataLoader(Loud(), batch_size=3))
    next(iter(life.loader))
    other = copied(life.loader)
    other.dataset.loaded.clear()
    assert len(list(other)) == 7
    assert len(other.dataset.loaded) == len(ROWS)
    assert len(life.loader.dataset.loaded) == 3  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_loop_that_leaves_workers_that_stay_is_told(caplog: pytest.LogCaptureFixture) -> None:
    life = Life(lambda: DataLoader(Loud(), batch_size=3, num_workers=1, persistent_workers=True))
    for _ in life.loader:
        save(life.state)
        break
    assert not caplog.text
    save(life.state)
    assert "a loop has left an epoch of a loader whose workers stay" in caplog.text


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_that_stay_and_cannot_say_what_they_draw_are_told_between_epochs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_draws, "why_not", lambda _: "they are not forked")

    def make() -> DataLoader[Any]:
        return DataLoader(Loud(), batch_size=3, num_workers=1, persistent_workers=True)

    first = Life(make)
    list(first.loader)
    saved = save(first.state)
    assert not caplog.text
    second = Life(make)
    restore(second.state, saved)
    list(second.loader)
    assert "begin anew in them: they are not forked" in caplog.text


class Read(dict[int, float]):
    """Reads an item when it is asked for it, and crops it."""

    def __getitem__(self, index: int) -> float:
        return super().__getitem__(index) + random.random()


class Cropped(list[float]):
    """The same."""

    def __iter__(self) -> Iterator[float]:
        return (value + random.random() for value in super().__iter__())


@pytest.mark.parametrize("held", [Read({1: 2.0}), Cropped([1.0, 2.0])])
def test_to_look_into_a_dataset_calls_nothing_of_its_containers(held: Any) -> None:
    random.seed(1)
    before = random.getstate()
    looked = dataset_generators.Look({"dataset": types.SimpleNamespace(held=held)})
    assert not looked.words
    assert random.getstate() == before


def test_batches_in_no_order_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A count does not say which of them were had."""
    for num_workers, is_told in ((2, True), (1, False)):
        make = functools.partial(DataLoader, TensorDataset(ROWS), num_workers=num_workers, in_order=False)
        first, second = Life(make), Life(make)
        steps = first.steps()
        next(steps)
        restore(second.state, save(first.state))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            next(second.steps())
        assert ("may be had twice" in caplog.text) is is_told


def test_workers_that_are_not_forked_or_have_no_order_cannot_say_what_they_draw() -> None:
    assert worker_draws.why_not(DataLoader(Drawing(), num_workers=1)) == ""
    assert "not forked" in worker_draws.why_not(DataLoader(Drawing(), num_workers=1, multiprocessing_context="spawn"))
    assert "no order" in worker_draws.why_not(DataLoader(Drawing(), num_workers=1, in_order=False))


@pytest.mark.parametrize("stays", sampled([False, True], True), ids=["made anew", "that stay"])
def test_workers_end_with_what_goes_over_them_and_wait_for_no_garbage_collector(make: Make, *, stays: bool) -> None:
    """It would end their queues first, and torch waits five seconds for each worker then."""
    loader = DataLoader(TensorDataset(ROWS), batch_size=3, num_workers=2, persistent_workers=stays)
    trainee = Trainee()
    trainee.loader = loader  # type: ignore[assignment]
    checkpointer = make(trainee)
    checkpointer.restore()
    gc.collect()
    gc.disable()
    try:
        for _ in loader:
            break
        workers = [weakref.ref(child) for child in multiprocessing.active_children() if "Process" in child.name]
        assert bool(workers) is stays
        checkpointer.close()
        del loader, trainee.loader, _
        assert not [worker for ref in workers if (worker := ref()) is not None and worker.is_alive()]
    finally:
        gc.enable()
