"""Lets an adapter stand around the order that a sampler draws for an epoch.

hook(sampler, rows)      # at each iter(sampler): rows(make), where make() is what the sampler itself would return
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def hook(sampler: Any, rows: Callable[[Callable[[], Iterable[Any]]], Iterator[Any]]) -> None:
    """Have `rows` yield what the sampler draws. Another hook on the same sampler is replaced."""
    sampler.__class__ = _hooked(type(sampler))
    sampler.holdfast_rows = rows


def _hooked(kind: type[Any]) -> type[Any]:
    """Return a class of samplers that ask `holdfast_rows`; it has one base, or no sampler could change to it."""
    if hasattr(kind, "holdfast_hooked"):
        return kind

    def begins(sampler: Any) -> Iterator[Any]:
        rows: Iterator[Any] = sampler.holdfast_rows(lambda: kind.__iter__(sampler))
        return rows

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__iter__": begins, "holdfast_hooked": True})
