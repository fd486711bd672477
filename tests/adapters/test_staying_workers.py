"""Workers of data loaders that stay: what a script sees of it, and what is not known. Kills: `staying_zoo.py`."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, dataloader

from holdfast.adapters.zero_lines.nested import staying_workers
from holdfast.adapters.zero_lines.nested.nested_items import Items
from holdfast.adapters.zero_lines.nested.staying_workers import StayingWorkers
from holdfast.adapters.zero_lines.reach.reach import Reach


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=1, persistent_workers=True)


def watching() -> StayingWorkers:
    return StayingWorkers(Reach(used=(), kept=(), named={}), lambda: True)


def test_a_script_sees_nothing_of_it() -> None:
    original, workers, held = DataLoader._get_iterator, watching(), loader()
    workers.begin()
    try:
        expected = [batch[0].tolist() for batch in held]
        iterator = held._iterator
        states = workers.states({"held": held}, ())
        assert [batch[0].tolist() for batch in held] == expected
        assert held._iterator is iterator, "they are made once"
        assert held.worker_init_fn is None
        assert type(iterator).__name__ == dataloader._MultiProcessingDataLoaderIter.__name__
        assert workers.reason == ""
        assert workers.restore(states, {"held": held}, ()) == ""
        drawn = torch.get_rng_state()
        again = loader()
        assert workers.restore(states, {"held": again}, {id(held)}) == ""
        assert torch.equal(torch.get_rng_state(), drawn), "a number was drawn"
        assert again._iterator._base_seed == iterator._base_seed
        assert [batch[0].tolist() for batch in again] == expected
    finally:
        workers.end(unfit=True)
    assert DataLoader._get_iterator is original
    assert held._iterator is None
    assert not any(process.is_alive() for process in iterator._workers)


@pytest.mark.parametrize("begun", [False, True])
def test_batches_in_no_order_are_not_taken_up_by_their_count(*, begun: bool) -> None:
    held = [DataLoader([1, 2], num_workers=count, in_order=False) for count in (1, 2)]
    refused = [Items(iter(each) if begun else each).refused for each in held]
    assert refused == ["", "its workers hand out batches in no order"]


class Nested:
    """Each item is made of what a loader has that is gone over in the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index + sum(int(each) for each in DataLoader([1, 2]))


def test_a_loader_that_the_dataset_goes_over_in_a_worker_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staying_workers, "PATIENCE_S", 5.0)
    workers, held = watching(), DataLoader(Nested(), num_workers=1, persistent_workers=True)
    workers.begin()
    try:
        list(held)
        workers.states({"held": held}, ())
        assert "does not say" not in workers.reason
    finally:
        workers.end(unfit=True)


def test_workers_of_a_torch_that_is_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staying_workers, "_PARTS", ((DataLoader, "_made_otherwise", frozenset()),))
    workers = watching()
    workers.begin()
    try:
        assert "otherwise than is known" in workers.why_not(loader())
    finally:
        workers.end()
