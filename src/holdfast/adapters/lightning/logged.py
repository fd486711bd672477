"""Keeps what a training has logged so far in its epoch: sums, values of the last step, and metrics of torchmetrics.

Lightning writes a value that was logged once in every step behind it, until the epoch ends; and what is logged for the epoch
is a sum. Both would begin anew in another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

# What `log` was told of a value, and would have to be told again.
_TOLD = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "metric_attribute")
# A value of which nothing changes, by the name of the reduction.
_NEUTRAL = {"max": float("-inf"), "min": float("inf")}


def sums_of(results: Any) -> dict[str, Any]:
    """Returns what was logged so far in the epoch, by Lightning's key: sums, and what the last step said."""
    found = {}
    for key, metric in results.items():
        meta = metric.meta
        if not metric.is_tensor or metric.has_reset:
            continue
        sums = ("value", "cumulated_batch_size") if meta.on_epoch else ()
        found[key] = {
            "sums": {name: getattr(metric, name) for name in sums if hasattr(metric, name)},
            "last": metric._forward_cache if meta.on_step else None,
            "as": meta.forked_name(True),
            "reduce_fx": meta.reduce_fx.__name__,
            "sync_dist": bool(meta.sync.should),
            "rank_zero_only": bool(meta.sync.rank_zero_only),
            **{name: getattr(meta, name) for name in _TOLD},
        }
    return found


def resume_sums(results: Any, sums: Mapping[str, Any]) -> None:
    """Values that are logged for the first time in this process go on with what was summed up before."""
    kind = type(results)
    if not sums:
        return
    if not hasattr(results, "holdfast_sums"):
        results.__class__ = type(kind.__name__, (Resumed, kind), {})
    results.holdfast_sums = dict(sums)


class Resumed:
    """Lightning's collection of logged values, of which some were begun in another process."""

    holdfast_sums: dict[str, Any]

    def __setitem__(self, key: str, metric: Any) -> None:
        for name, value in self.holdfast_sums.pop(key, {}).get("sums", {}).items():
            setattr(metric, name, value)
        super().__setitem__(key, metric)  # type: ignore[misc]

    def metrics(self, on_step: bool) -> Any:
        """Return what Lightning hands on, with values of the last step that were not logged again."""
        found = super().metrics(on_step)  # type: ignore[misc]
        for told in self.holdfast_sums.values() if on_step else ():
            last, name = told.get("last"), told.get("as")
            if last is None:
                continue
            found["callback"].update({told["name"]: last, name: last})
            if told["logger"]:
                found["log"][name] = last
            if told["prog_bar"]:
                found["pbar"][name] = last.item()
        return found

    def finish(self, strategy: Any) -> None:
        """The epoch is over: what was not logged again is logged once more, with a value that changes nothing."""
        for told in [each for each in self.holdfast_sums.values() if each["sums"]]:
            words = {name: value for name, value in told.items() if name not in ("sums", "last", "as")}
            neutral = torch.full_like(told["sums"]["value"], _NEUTRAL.get(told["reduce_fx"], 0.0))
            self.log(value=neutral, batch_size=0, sync_dist_fn=strategy.reduce, **words)  # type: ignore[attr-defined]
        self.holdfast_sums = {}


def metrics_of(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the states of metrics that were updated and not reset since; a module's `state_dict` has none of them."""
    found = {}
    for name, metric, counted in _metrics(module):
        if metric._update_count:
            states = {each: getattr(counted, each) for each in counted._defaults}
            found[name] = {"updates": counted._update_count, "states": states}
    return found


def put_back(module: torch.nn.Module, states: Mapping[str, Any]) -> None:
    """Metrics go on with what they had counted."""
    for name, metric, _ in _metrics(module):
        if name not in states:
            continue
        for each, value in states[name]["states"].items():
            if each in metric._defaults:
                setattr(metric, each, value.to(metric.device) if isinstance(value, torch.Tensor) else value)
        metric._update_count, metric._computed = states[name]["updates"], None


def _metrics(module: torch.nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Metrics of a module by name, each with the one that counts for it: in a collection one may count for several."""
    leads: dict[int, Any] = {}
    for name, each in module.named_modules():
        kinds = {(kind.__module__, kind.__name__) for kind in type(each).__mro__}
        if ("torchmetrics.collections", "MetricCollection") in kinds and each._groups_checked:
            groups = [[each._modules[one] for one in names] for names in each._groups.values()]
            leads.update((id(one), group[0]) for group in groups for one in group)
        elif ("torchmetrics.metric", "Metric") in kinds:
            yield name, each, leads.get(id(each), each)
