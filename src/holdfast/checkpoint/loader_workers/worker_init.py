"""Stands for the `worker_init_fn` of a data loader, to be there where a worker begins to load.

torch makes a fetcher in a worker when it begins, and another one at each message that an epoch begins for a worker that stays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader


class WorkerInit(ABC):
    """Calls the loader's own function in the worker, and is told of each fetcher that torch makes there.

    Args:
        init: the loader's own; None if it has none.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, number: int) -> None:
        """Begins a worker."""
        if self._init is not None:
            self._init(number)
        original, first = dataloader._DatasetKind.create_fetcher, list[Any]()

        def create_fetcher(kind: Any, dataset: Any, auto_collation: Any, collate_fn: Any, drop_last: Any) -> Any:
            fetcher = original(kind, dataset, auto_collation, collate_fn, drop_last)  # type: ignore[no-untyped-call]
            first[:] = first or [dataset]
            if dataset is first[0]:  # else of a loader that the dataset goes over in the worker
                self.fetches(number, dataset, collate_fn, fetcher)
            return fetcher

        setattr(dataloader._DatasetKind, "create_fetcher", staticmethod(create_fetcher))  # noqa: B010 - of this process alone

    @abstractmethod
    def fetches(self, number: int, dataset: Any, collate_fn: Any, fetcher: Any) -> None:
        """A worker loads with this fetcher from here on."""
