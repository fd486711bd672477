"""Everything that is neither model nor optimizer: objects with `state_dict`, and plain dicts of tensors.

An object's state is asked for at every save and handed back whole at a restore, with tensors on the device where the
object has them now. A plain dict is filled in place: its tensors keep their identity, its other values are replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from holdfast.base.errors import UsageError
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.entries.entries import Collector, Loading, NotedPart, TransientPart, templates
from holdfast.checkpoint.entries.pytree import Emit, flatten, unflatten
from holdfast.checkpoint.entries.rng import GeneratorState, OwnRandomness, ProcessRandomness
from holdfast.checkpoint.entries.types import LiveTensor
from holdfast.checkpoint.state.change_detection import same_objects
from holdfast.tiers.format import values
from holdfast.tiers.format.values import TensorRef

# The method of an object that takes the states of all saved ranks, when another number of ranks goes on:
# `load_state_dicts(states, rank, world_size)`, states in order of rank.
ALL_RANKS = "load_state_dicts"
# The method of an object that knows who holds the same: `holders(name)` gives the ranks, in ascending order, that hold the
# tensor of this name alike, or None for one of this rank's own. Two groups must not give the same name to different bytes.
HOLDERS = "holders"
# The method of an object that looks at the saved state before anything is loaded, and raises if it must not be:
# `holdfast_accepts(state)`, with references in the place of tensors.
ACCEPTS = "holdfast_accepts"
# Beside the keys of a saved dict: those that its script began with and had taken out by then.
REMOVED = "holdfast.removed"

# Keys of nested dicts; None where no dict stands, or all of it is meant.
Keys: TypeAlias = dict[Any, Any]


@runtime_checkable
class Stateful(Protocol):
    """Names what PyTorch's objects with state have in common."""

    def state_dict(self) -> Any:
        """The state; tensors, numbers, strings and containers of these."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Takes over a state."""


def is_stateful(value: Any) -> bool:
    """Tell whether an object hands out its state: with methods, and not by a `__getattr__` that answers to every name.

    One that raises another error than AttributeError, as that of many settings (`__getattr__ = dict.__getitem__`), has none either.
    """
    try:
        methods = [getattr(value, name, None) for name in ("state_dict", "load_state_dict")]
    except Exception as error:  # noqa: BLE001 - it is the user's own
        pass_on(error)
        return False
    return not isinstance(value, type) and all(map(callable, methods))


class StatefulPart(TransientPart):
    """A scheduler, a loader, random number generators, any object of the user.

    Args:
        name: what its entries begin with.
    """

    def __init__(self, name: str, stateful: Stateful) -> None:
        super().__init__(name)
        self.random = isinstance(stateful, GeneratorState | OwnRandomness | ProcessRandomness)
        self._object = stateful
        self._of_ranks: list[Any] | None = None

    def report(self, out: Collector) -> None:
        """Asks the object for its state."""
        holders = getattr(self._object, HOLDERS, None)
        out.transient(self.name, self._object.state_dict(), holders=holders, still=True)

    def plan(self, loading: Loading) -> None:
        """Claims the saved state, with memory of its own for every tensor in it; of all ranks if the object can do that.

        Raises:
            HoldfastError: the object does not accept it.
        """
        if hasattr(self._object, ACCEPTS):
            getattr(self._object, ACCEPTS)(loading.offered(self.name))
        self._of_ranks = loading.states_of_ranks(self.name) if hasattr(self._object, ALL_RANKS) else None
        if self._of_ranks is not None:
            return
        now = templates(loading.layouts, self.name, self._object.state_dict())
        loading.claim_value(self.name, templates=now)

    def apply(self, loading: Loading) -> None:
        """Hands the saved state to the object."""
        if self._of_ranks is not None:
            getattr(self._object, ALL_RANKS)(self._of_ranks, loading.layouts.rank, loading.layouts.world_size)
        elif loading.has(self.name):
            self._object.load_state_dict(loading.value(self.name))


class DictPart:
    """A plain dict of tensors, nested or not, with other values among them.

    Args:
        name: what its entries begin with.
        content: filled in place.
        began: the keys that the script began with, if they were noted earlier.

    Attributes:
        began: the keys that the script began with; nested dicts below them.
    """

    def __init__(self, name: str, content: dict[Any, Any], began: Keys | None = None) -> None:
        self.name = name
        self._content = content
        self.began = _keys(content) if began is None else began
        self._persistent: list[tuple[LiveTensor, torch.Tensor]] = []
        self._refs: dict[str, TensorRef | None] = {}
        self._seen: dict[str, torch.Tensor] = {}
        self._tree: Any = None

    def build(self, out: Collector) -> None:
        """Adds every tensor of the dict."""
        self._look()
        self._persistent, self._refs = [], {}
        for name, tensor in self._seen.items():
            ref = self._refs[name] = out.persistent(name, tensor, still=not tensor.requires_grad)
            if ref is not None:
                self._persistent.append((out.tensors[ref.name], tensor))

    def unchanged(self) -> bool:
        """Return whether the dict holds the very same tensors at the same places."""
        seen = self._seen
        self._look()
        return list(seen) == list(self._seen) and same_objects(list(seen.values()), list(self._seen.values()))

    def report(self, out: Collector) -> None:
        """Adds the dict as a value, with references to its tensors, and the keys that the script has taken out since it began."""
        removed = _removed(self.began, self._content)
        content = {**self._content, REMOVED: removed} if removed else self._content
        out.value(self.name, flatten(content, self.name, _apart(lambda name, _: self._refs[name])))

    def plan(self, loading: Loading) -> None:
        """Claims every tensor in place, then the rest; notes what the script began with and the version does not know."""
        tree = unflatten(loading.offered(self.name), lambda _: torch.empty(0, device="cpu"))
        saved, removed = _split(tree) if isinstance(tree, dict) else ({}, {})
        gone = set(map(id, _tensors(_at(self._content, removed))))
        for live, tensor in self._persistent:
            if id(tensor) not in gone:
                loading.claim(live, tensor)
        if loading.claim_value(self.name, kind=dict) is not None:
            entry, _ = loading.layouts.resolve(self.name)
            loading.missing += [f"{entry}.{path}" for path in _unknown(self._content, saved, self.began, removed)]

    def create(self, loading: Loading) -> None:
        """Nothing: the dict has its tensors."""

    def apply(self, loading: Loading) -> None:
        """Replaces what is not a tensor. Keys that the script had taken out when it saved, and such as came later, are removed.

        Those that the script begins with and of which the version knows nothing stay: it is of an older script.
        """
        if loading.has(self.name):
            saved, removed = _split(loading.value(self.name))
            _remove(self._content, removed)
            _merge(self._content, saved, self.began)

    def _look(self) -> None:
        self._seen = {}

        def note(name: str, tensor: torch.Tensor) -> None:
            self._seen[name] = tensor

        if REMOVED in self._content:
            raise UsageError(f"the key {REMOVED!r} is reserved", where=self.name, remedy="rename the key")
        flatten(self._content, self.name, _apart(note))


def _apart(emit: Emit) -> Emit:
    """Returns `emit` with a name of its own for each tensor: those of the keys 1 and "1", or "a.b" and "a", "b", look alike."""
    given: set[str] = set()

    def take(name: str, tensor: torch.Tensor) -> Any:
        while name in given:
            name += "~"
        given.add(name)
        return emit(name, tensor)

    return take


class InfoPart(NotedPart):
    """Holds what a caller wrote beside one save (`Checkpointer.save(info=...)`); a checkpoint need not have it.

    Attributes:
        value: what the next save gets; nothing if empty.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.value: dict[str, Any] = {}

    @contextmanager
    def beside(self, info: Mapping[str, Any] | None, *, saved: bool) -> Iterator[None]:
        """The save within gets `info` as it is now: its own containers may change while the save is still being copied.

        Raises:
            UsageError: it is no dict, it holds what cannot be saved, or the step is `saved` already, without it.
        """
        try:
            value = dict(info or {})
        except (TypeError, ValueError) as error:
            remedy = "give a dict, such as info={'epoch': 3}"
            raise UsageError(f"info is a {type(info).__name__} and no dict", where=self.name, remedy=remedy) from error
        if value:
            if saved:
                raise UsageError(
                    "the step is saved already", where=self.name, remedy="give info to the first save of a step"
                )
            value = values.decode(values.encode({self.name: value}), where=self.name)[self.name]
        self.value = value
        try:
            yield
        finally:
            self.value = {}

    def report(self, out: Collector) -> None:
        """The value, of this rank's own; without tensors."""
        if self.value:
            out.value(self.name, self.value)

    def plan(self, loading: Loading) -> None:
        """Claims it if it is there."""
        if loading.layouts.resolve(self.name)[0] in loading.values:
            loading.claim_value(self.name, kind=dict)


class ScalerState:
    """A `torch.amp.GradScaler` whose state can be read without waiting for the device.

    Its own `state_dict()` fetches scale and growth count from the device; here both stay tensors until a restore. A class that
    derives and hands out more, or otherwise, is asked itself.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's own state, with tensors where torch's class has tensors; empty if it is disabled."""
        scaler = self._scaler
        is_own = getattr(scaler.state_dict, "__func__", None) is not torch.amp.GradScaler.state_dict
        if is_own or not scaler.is_enabled() or scaler._scale is None:
            return scaler.state_dict()
        return {
            "scale": scaler._scale,
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": scaler._growth_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets scale and growth, and ends the step under way; a scaler that is disabled ignores it as its own method does."""
        plain = {
            key: v.item() if key in ("scale", "_growth_tracker") and isinstance(v, torch.Tensor) else v
            for key, v in state.items()
        }
        self._scaler.load_state_dict(plain)
        seen = getattr(self._scaler, "_per_optimizer_states", None)
        if isinstance(seen, dict):  # of gradients that are gone: the next ones have to be unscaled
            seen.clear()


def _keys(content: Mapping[Any, Any]) -> Keys:
    return {key: _keys(value) if isinstance(value, dict) else None for key, value in content.items()}


def _removed(began: Keys, content: Mapping[Any, Any]) -> Keys:
    """The keys of `began` that are not in the content any more: None where all below is gone too."""
    found: Keys = {}
    for key, below in began.items():
        if key not in content:
            found[key] = None
        elif below and isinstance(content[key], dict) and (deeper := _removed(below, content[key])):
            found[key] = deeper
    return found


def _split(tree: Mapping[Any, Any]) -> tuple[dict[Any, Any], Keys]:
    """Return what was saved, and the keys that had been taken out."""
    saved = dict(tree)
    return saved, saved.pop(REMOVED, {})


def _at(content: Mapping[Any, Any], keys: Keys) -> list[Any]:
    """Return what stands at these keys."""
    found: list[Any] = []
    for key, below in keys.items():
        if key in content and below is None:
            found.append(content[key])
        elif below is not None and isinstance(content.get(key), dict):
            found += _at(content[key], below)
    return found


def _remove(content: dict[Any, Any], keys: Keys) -> None:
    for key, below in keys.items():
        if below is None:
            content.pop(key, None)
        elif isinstance(content.get(key), dict):
            _remove(content[key], below)


def _unknown(
    content: Mapping[Any, Any], saved: Mapping[Any, Any], began: Keys, removed: Keys, path: str = ""
) -> Iterator[str]:
    """Yields the paths of keys that the script began with, and that the version neither has nor knows to be taken out.

    Tensors are left out: they are entries, which are claimed by name.
    """
    for key in (key for key in content if key in began):
        below, value = began[key], content[key]
        if key in saved:
            if below and isinstance(value, dict) and isinstance(saved[key], dict):
                yield from _unknown(value, saved[key], below, removed.get(key) or {}, f"{path}{key}.")
        elif key not in removed and not any(True for _ in _tensors(value)):
            yield f"{path}{key}"


def _tensors(value: Any) -> Iterator[Any]:
    """Yields what becomes an entry in nested dicts, lists and tuples: tensors and arrays of NumPy."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, numpy.ndarray)):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _merge(content: dict[Any, Any], saved: Mapping[Any, Any], began: Keys) -> None:
    for key in content.keys() - saved.keys() - began.keys():
        if not any(True for _ in _tensors(content[key])):  # those are entries, of which the report speaks
            del content[key]
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(content.get(key), dict):
            _merge(content[key], value, began.get(key) or {})
        elif value is not None or not isinstance(content.get(key), torch.Tensor):
            content[key] = value  # None in place of a tensor: this rank holds nothing of it
