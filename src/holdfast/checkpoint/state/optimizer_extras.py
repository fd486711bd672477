"""Keeps what an optimizer hands out by its own `state_dict()` beyond its state and its parameter groups, and takes
back.

torch documents three ways to say more than `.state` and `.param_groups`: a class of one's own with `state_dict` and
`load_state_dict`, hooks of both directions, and keys in `.state` that are no parameters. What is said more is kept as one
value, with references where it holds tensors of `.state`; at a restore it goes back through the same methods, hooks
included, and what is handed out afterwards is compared with what was saved.

`load_state_dict` casts state to the dtype of its parameter and replaces the parameter groups. Where nothing but that
happened to a value, the saved one is put in its place, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.base.errors import MismatchError, UsageError
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.entries.sharding import local_of
from holdfast.checkpoint.state.change_detection import SCALARS

# The two that torch's own `state_dict()` has.
OWN_KEYS = ("state", "param_groups")

# What a `load_state_dict` raises that does not like what it gets.
REFUSALS = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError)


class OptimizerExtras:
    """Asks one optimizer what it hands out, and gives it back.

    Args:
        name: of the optimizer, for errors.
        voice: whose `state_dict()` and `load_state_dict()` count: a wrapper, or the one that steps.
        stepper: whose `.state` and `.param_groups` are kept.
    """

    def __init__(self, name: str, voice: Optimizer, stepper: Optimizer) -> None:
        self._name = name
        self._voice = voice
        self._stepper = stepper
        self._asked = False
        self._said: Any = None
        self._odd = False

    @property
    def speaks(self) -> bool:
        """Tells whether `state_dict()` may say more than torch's own."""
        return self._odd or overrides(self._voice, "state_dict") or self._has_hooks("state_dict")

    @property
    def takes(self) -> bool:
        """Tells whether `load_state_dict()` may do more than torch's own."""
        return overrides(self._voice, "load_state_dict") or self._has_hooks("load_state_dict")

    @property
    def says_all(self) -> bool:
        """Tells whether the optimizer that steps may hand out what one inside it keeps."""
        return overrides(self._stepper, "state_dict") or bool(hooks_of(self._stepper, "state_dict"))

    @property
    def makes_state(self) -> bool:
        """Tells whether the class takes state in a way of its own, which must not be called without all that was saved."""
        return overrides(self._stepper, "load_state_dict")

    def found_odd(self, odd: bool) -> None:
        """Notes whether `.state` has keys that are no parameters, or values that are no dicts."""
        self._asked &= odd == self._odd
        self._odd = odd

    def ask(self) -> None:
        """Calls the own `state_dict()`, before anything is read: its hooks may bring `.state` up to date.

        Raises:
            UsageError: it raises.
        """
        self._asked, self._said = True, None
        if not self.speaks:
            return
        try:
            self._said = self._voice.state_dict()
        except Exception as error:  # whatever a class of somebody's own raises
            pass_on(error)
            raise UsageError(
                f"state_dict() of {type(self._voice).__name__} failed: {type(error).__name__}: {error}",
                where=self._name,
                remedy="give an object with state_dict() and load_state_dict() that holds what the optimizer keeps",
            ) from error

    def more(self) -> dict[str, Any] | None:
        """Returns what was said beyond torch's own, as `as_kept` (keys left out, for they say the same) and `more`.

        None if nothing was. The answer to the last `ask` is used up.

        Raises:
            UsageError: nothing would take it back; names it.
        """
        if not self._asked:
            self.ask()
        said, self._said, self._asked = self._said, None, False
        if said is None:
            return None
        as_kept = self._as_kept(said)
        more = {key: value for key, value in said.items() if key not in as_kept} if isinstance(said, dict) else said
        if not more and len(as_kept) == len(OWN_KEYS):
            return None
        lost = [str(key) for key in more if key not in OWN_KEYS] if isinstance(more, dict) else [type(more).__name__]
        if lost and not self.takes:
            raise UsageError(
                f"state_dict() of the optimizer hands out {', '.join(lost[:5])}, and nothing takes it back",
                where=self._name,
                remedy="write load_state_dict() too, or register_load_state_dict_pre_hook, or leave it out",
            )
        return {"as_kept": as_kept, "more": more}

    def give_back(self, saved: Any, state: Mapping[torch.Tensor, dict[Any, Any]], groups: Sequence[Any]) -> list[str]:
        """Calls the own `load_state_dict()` with all that was saved, and puts the saved bits in place of cast ones.

        Where state was handed out in another form than it is kept in, the saved bits stand if the optimizer then hands out
        what it did at the save; else what it made of it stands.

        Args:
            saved: what `more` returned at the save, with its tensors; None if there was no more.
            state: by parameter.
            groups: parameter groups without regard to their `params`.

        Returns:
            the keys of what was saved more that are not handed out again, bit for bit.

        Raises:
            MismatchError: it refuses.
        """
        optimizer = self._stepper
        numbers = self._numbers()
        own = {
            "state": {numbers[id(p)]: dict(s) for p, s in state.items() if id(p) in numbers},
            "param_groups": [
                {**saved_group, "params": [numbers[id(p)] for p in group["params"]]}
                for group, saved_group in zip(optimizer.param_groups, groups, strict=True)
            ],
        }
        words = own if saved is None else _copied(saved["more"])
        if saved is not None and saved["as_kept"]:
            words = {**{key: own[key] for key in saved["as_kept"]}, **words}
        before = optimizer.state, optimizer.param_groups
        try:
            self._voice.load_state_dict(words)
        except REFUSALS as error:
            pass_on(error)
            raise MismatchError(f"the optimizer refuses the saved state: {error}", where=self._name) from error
        for parameter in (p for p in state if id(p) not in numbers):
            optimizer.state[parameter] = state[parameter]
        keep_objects(optimizer, *before, shared=self._voice)
        otherwise = saved is not None and "state" not in saved["as_kept"]
        replaced = self._put_saved(state, otherwise=otherwise)
        lost = self._lost(saved)
        if lost and replaced:
            for held, key, value in replaced:
                held[key] = value
            lost = self._lost(saved)
        return lost

    def _put_saved(
        self, state: Mapping[torch.Tensor, dict[Any, Any]], *, otherwise: bool
    ) -> list[tuple[dict[Any, Any], Any, Any]]:
        """Puts saved values in the place of those that were loaded, if nothing but a cast lies between, or `otherwise`.

        Returns:
            dict, key and loaded value where there lies more between.
        """
        replaced = []
        for parameter, wanted in state.items():
            now: Any = self._stepper.state.get(parameter)
            if not isinstance(now, dict):
                continue
            for key, value in wanted.items():
                if key not in now:
                    continue
                is_cast = _is_cast(now[key], value)
                if otherwise and not is_cast:
                    replaced.append((now, key, now[key]))
                if otherwise or is_cast:
                    now[key] = value
        return replaced

    def _lost(self, saved: Any) -> list[str]:
        if saved is None:
            return []
        self.ask()
        again = self.more() or {"more": {}}
        before, after = saved["more"], again["more"]
        if not (isinstance(before, dict) and isinstance(after, dict)):
            return [] if same(before, after) else ["all of it"]
        return [str(key) for key, value in before.items() if key not in after or not same(value, after[key])]

    def _has_hooks(self, method: str) -> bool:
        return any(hooks_of(each, method) for each in (self._voice, self._stepper))

    def _numbers(self) -> dict[int, int]:
        """Parameter's id -> its number in torch's `state_dict()`."""
        listed = [p for group in self._stepper.param_groups for p in group["params"]]
        return {id(p): number for number, p in reversed(list(enumerate(listed)))}

    def _as_kept(self, said: Any) -> list[str]:
        """Return which of the two keys say nothing but what `.state` and `.param_groups` hold, by identity."""
        if not isinstance(said, dict):
            return []
        numbers, (states, groups) = self._numbers(), (said.get(key) for key in OWN_KEYS)
        kept = []
        mine = self._stepper.state.items()
        states = states if isinstance(states, dict) else {}
        plain = not self._odd and "state" in said and len(states) == len(mine)
        if plain and all(_is_same(states.get(numbers.get(id(p))), s) for p, s in mine):
            kept.append("state")
        here = [{**g, "params": [numbers[id(p)] for p in g["params"]]} for g in self._stepper.param_groups]
        if isinstance(groups, list) and len(groups) == len(here) and all(map(_is_same, groups, here)):
            kept.append("param_groups")
        return kept


def is_handed(saved: Any) -> bool:
    """Returns whether a value has the form of what `OptimizerExtras.more` returns; a checkpoint may hold anything."""
    return (
        isinstance(saved, dict)
        and saved.keys() == {"as_kept", "more"}
        and isinstance(saved["as_kept"], list)
        and all(key in OWN_KEYS for key in saved["as_kept"])
        and (isinstance(saved["more"], dict) or not saved["as_kept"])
    )


def more_keys(saved: Any) -> list[Any]:
    """Returns the keys of what was handed out more, as a version has it."""
    return list(saved["more"]) if is_handed(saved) and isinstance(saved["more"], dict) else []


def hooks_of(optimizer: Optimizer, method: str) -> list[Any]:
    """Returns the hooks before and after `state_dict` or `load_state_dict` of an optimizer."""
    kinds = (vars(optimizer).get(f"_optimizer_{method}_{when}_hooks") for when in ("pre", "post"))
    return [hook for hooks in kinds if hooks for hook in hooks.values()]


def overrides(thing: Optimizer | nn.Module, method: str) -> bool:
    """Returns whether a method is another one than the base class has, by class or by assignment to the object."""
    base = Optimizer if isinstance(thing, Optimizer) else nn.Module
    return method in vars(thing) or getattr(type(thing), method) is not getattr(base, method)


def keep_objects(
    optimizer: Optimizer, state: Any, groups: list[dict[str, Any]], *, shared: Optimizer | None = None
) -> None:
    """Puts what was loaded into the state and the groups that were there before, which others may hold on to.

    Args:
        optimizer: `load_state_dict` was called, which makes new ones.
        state: its `.state` before.
        groups: its `.param_groups` before; tensors in them keep their identity too.
        shared: a wrapper; what it or an optimizer inside took over stays.
    """
    within = [each for each in (shared, *vars(optimizer).values()) if isinstance(each, Optimizer)]
    holders = [vars(each) for each in within if each is not optimizer]
    new_groups, new_state = optimizer.param_groups, optimizer.state
    if "param_groups" in vars(optimizer) and new_groups is not groups and len(new_groups) == len(groups):
        for new, values in zip(new_groups, kept(groups, new_groups), strict=True):
            new.update(values)
        if not any(each.get("param_groups") is new_groups for each in holders):
            for old, new in zip(groups, new_groups, strict=True):
                old.clear()
                old.update(new)
            optimizer.param_groups = groups
    if (
        "state" in vars(optimizer)
        and new_state is not state
        and not any(each.get("state") is new_state for each in holders)
    ):
        state.clear()
        state.update(new_state)
        optimizer.state = state


def kept(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns values for groups; a tensor keeps its identity (a compiled or captured step holds on to it).

    One that several groups share keeps it only if the same was saved for all of them.
    """

    def keep(now: Any, key: str, value: Any) -> Any:
        both = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
        if not both or (now.shape, now.dtype) != (value.shape, value.dtype):
            return value
        others = (theirs.get(key) for group, theirs in zip(groups, saved, strict=True) if group.get(key) is now)
        return (now if all(same(value, other) for other in others) else torch.empty_like(now)).copy_(value)

    pairs = zip(groups, saved, strict=True)
    return [{key: keep(group.get(key), key, value) for key, value in values.items()} for group, values in pairs]


def _copied(tree: Any) -> Any:
    """Returns the same tree in new containers: a `load_state_dict` may take out of them what it likes."""
    if isinstance(tree, dict):
        return type(tree)((key, _copied(value)) for key, value in tree.items())
    return type(tree)(map(_copied, tree)) if type(tree) in (list, tuple) else tree


def same(left: Any, right: Any) -> bool:
    """Returns whether two trees are equal, tensors and floats by their bits."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left is right or _same_bits(local_of(left), local_of(right))
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return left.hex() == str(right.hex())
    if left is right:
        return True
    equal = left == right
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
        return False
    rows = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(*rows)


def _is_cast(loaded: Any, saved: Any) -> bool:
    """Returns whether a value is the saved one after the cast that torch's `load_state_dict` makes."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        wanted, found = local_of(saved), local_of(loaded)
        return loaded is saved or _same_bits(wanted.to(dtype=found.dtype, device=found.device), found)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return loaded.keys() == saved.keys() and all(_is_cast(value, saved[key]) for key, value in loaded.items())
    if isinstance(loaded, list | tuple) and type(loaded) is type(saved):
        return len(loaded) == len(saved) and all(map(_is_cast, loaded, saved))
    return same(loaded, saved)


def _is_same(said: Any, held: Any) -> bool:
    """Returns whether what was handed out has the very tensors and objects of what is held, and equal numbers."""
    if said is held:
        return True
    if type(said) is not type(held):
        return False
    if isinstance(said, dict):
        return said.keys() == held.keys() and all(_is_same(value, held[key]) for key, value in said.items())
    if isinstance(said, list | tuple):
        return len(said) == len(held) and all(map(_is_same, said, held))
    return type(said) in SCALARS and bool(said == held)
