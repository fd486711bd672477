"""An exhaustive model check of capture: a save, its copy, the steps behind it and whoever waits, in every order.

The state is two tensors, which steps write one after the other. The copying thread copies one tensor at a time. The thread
that trains saves and steps; some steps save within (a closure), or a signal makes the thread save wherever it is. Another
thread waits for the version, settles, or steps by an optimizer of its own. Who takes a copy out of the fence, what is
copied late and when a version is void are the real rules (`core.versions.late_copy_rules`); the checks of late copies, which would find
out most of what goes wrong, are left out.

  S12  what is complete is the state at its call
  S19  nobody waits for ever
  S23  no copy that runs is taken out of the fence
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from holdfast.core.versions import late_copy_rules
from holdfast.core.versions.late_copy_rules import Who
from model_check.search import Found, search
from model_check.state import Broken

Tensors: TypeAlias = tuple[int, ...]
NUM_TENSORS = 2

# What a call of a thread is made of. A save: pass, look, start. A step: begin, pass, one write a tensor, end.
CALLS: dict[str, tuple[str, ...]] = {
    "save": ("pass save", "look", "start"),
    "step": ("begin", "pass step", "write 0", "write 1", "end"),
    "step that saves": ("begin", "pass step", "write 0", "pass save", "look", "start", "write 1", "end"),
    "wait": ("wait",),
    "settle": ("pass settle",),
}
_WHO = {"pass save": Who.SAVE, "pass step": Who.STEP, "pass settle": Who.SETTLE}


@dataclass(frozen=True)
class Copy:
    """A version under way: the state at its call, and what lies in the slot so far."""

    at_call: Tensors
    slot: tuple[int | None, ...]
    given_up: bool = False

    @property
    def ended(self) -> bool:
        """Return whether it is complete or given up."""
        return self.given_up or None not in self.slot


@dataclass(frozen=True)
class World:
    """Everything at one moment.

    Attributes:
        todo: what each thread has yet to do; the first trains.
        within: how many steps deep each thread is.
        looked: what each save under way saw at its call: state, steps that had begun, whether another was within, whether it was.
        copies: those that were started and are not told of, the newest last.
        in_fence: the last of them stands in the fence.
        passing: who holds the lock that one passes the fence with, and how often.
        signals: how many may still come.
    """

    todo: tuple[tuple[str, ...], ...]
    live: Tensors = (0,) * NUM_TENSORS
    within: tuple[int, ...] = (0, 0)
    steps: int = 0
    looked: tuple[tuple[Tensors, int, bool, bool], ...] = ()
    copies: tuple[Copy, ...] = ()
    in_fence: bool = False
    passing: tuple[int, int] = (-1, 0)
    saving: bool = False
    signals: int = 0


def reenters() -> bool:
    """Returns whether a thread that waits at the fence may come to it once more, in a signal's handler."""
    return True


def refuses_nested() -> bool:
    """Returns whether a save in the middle of another one of its thread is refused."""
    return True


def moves(world: World) -> Iterator[tuple[str, World]]:
    """Every event that may come next, with the world behind it."""
    yield from _copying(world)
    for thread, todo in enumerate(world.todo):
        if todo:
            yield from _acting(world, thread, todo[0], todo[1:])
    # A handler saves wherever its thread is, but in a save, which refuses another one.
    if world.signals and world.todo[0] and not (world.saving and refuses_nested()):
        more = _tail(world, 0, CALLS["save"] + world.todo[0])
        yield "a signal", replace(world, todo=more, signals=world.signals - 1)


def _copying(world: World) -> Iterator[tuple[str, World]]:
    """The copying thread, one copy after the other, and a bound that is over."""
    for index, copy in enumerate(world.copies):
        if copy.ended:
            continue
        number = copy.slot.index(None)
        slot = (*copy.slot[:number], world.live[number], *copy.slot[number + 1 :])
        yield f"tensor {number} is copied", _with(world, index, replace(copy, slot=slot))
        yield "the bound is over", _with(world, index, replace(copy, given_up=True))
        return


def _with(world: World, index: int, copy: Copy) -> World:
    if copy.ended and not copy.given_up and copy.slot != copy.at_call:
        raise Broken("S12", f"what is complete is {copy.slot}, the state at the call was {copy.at_call}")
    return replace(world, copies=(*world.copies[:index], copy, *world.copies[index + 1 :]))


def _acting(world: World, thread: int, action: str, rest: tuple[str, ...]) -> Iterator[tuple[str, World]]:
    name = ("the trainer", "another thread")[thread]
    todo = (*world.todo[:thread], rest, *world.todo[thread + 1 :])
    after = replace(world, todo=todo)
    if action.startswith("pass"):
        passed = _passing(world, after, thread, _WHO[action])
        if passed is not None:
            yield f"{name}: {action}", passed
    elif action == "locked":
        owner, depth = world.passing
        last, who = world.copies[-1], Who[rest[0]]
        if world.in_fence and not last.ended and not late_copy_rules.opens(who, ended=False):
            return  # it waits
        if world.in_fence:
            _ended(last, who)
        still = world.in_fence and not late_copy_rules.opens(who, ended=True)
        lock = (owner, depth - 1) if depth > 1 else (-1, 0)
        yield f"{name} passes", replace(after, todo=_tail(after, thread, rest[1:]), in_fence=still, passing=lock)
    elif action == "wait":
        copy = world.copies[-1] if world.copies else None
        if copy is None or copy.ended:
            yield f"{name} has waited", after
        elif late_copy_rules.opens(Who.WAIT, ended=False) and world.in_fence:
            _ended(copy, Who.WAIT)
    else:
        yield f"{name}: {action}", _done(after, thread, action)


def _passing(world: World, after: World, thread: int, who: Who) -> World | None:
    """The world in which a thread has the lock of the fence; None if it cannot have it now."""
    saving = world.saving or who is Who.SAVE
    if not world.in_fence:  # it need not pass
        return replace(after, saving=saving)
    owner, depth = world.passing
    if depth and (owner != thread or not reenters()):
        return None
    todo = _tail(after, thread, ("locked", who.name, *after.todo[thread]))
    return replace(after, todo=todo, passing=(thread, depth + 1), saving=saving)


def _tail(world: World, thread: int, actions: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return (*world.todo[:thread], actions, *world.todo[thread + 1 :])


def _ended(copy: Copy, who: Who) -> None:
    if not copy.ended:
        raise Broken("S23", f"{who.name} takes a copy out of the fence that runs")


def _done(world: World, thread: int, action: str) -> World:
    within = world.within
    if action == "begin":
        within = (*within[:thread], within[thread] + 1, *within[thread + 1 :])
        return replace(world, within=within, steps=world.steps + 1)
    if action == "end":
        return replace(world, within=(*within[:thread], within[thread] - 1, *within[thread + 1 :]))
    if action == "look":
        others = any(depth for other, depth in enumerate(within) if other != thread)
        seen = (world.live, world.steps, others, within[thread] > 0)
        return replace(world, looked=(*world.looked, seen), saving=True)
    if action == "start":
        return _started(world)
    number = int(action.split()[1])
    live = (*world.live[:number], world.live[number] + 1, *world.live[number + 1 :])
    return replace(world, live=live)


def _started(world: World) -> World:
    *looked, (at_call, steps, others, within) = world.looked
    if world.in_fence:
        _ended(world.copies[-1], Who.SAVE)
    void = late_copy_rules.is_void(others_within=others, steps_before=steps, steps_now=world.steps)
    late = late_copy_rules.may_be_late(within_step=within)
    slot: tuple[int | None, ...] = (None,) * NUM_TENSORS if late else world.live
    copy = Copy(at_call, slot, given_up=void)
    if copy.ended and not void and slot != at_call:
        raise Broken("S12", f"what is complete is {slot}, the state at the call was {at_call}")
    copies = (*(c for c in world.copies if not c.ended), copy)
    return replace(world, copies=copies, in_fence=late, looked=tuple(looked), saving=False)


def check(trainer: tuple[str, ...], other: tuple[str, ...] = (), *, signals: int = 0) -> Found:
    """Runs what two threads do, calls of `CALLS`, in every order of events.

    Args:
        trainer: calls of the thread that saves.
        other: calls of another thread.
        signals: how many signals may come, whose handler saves.
    """
    todo = tuple(tuple(part for call in calls for part in CALLS[call]) for calls in (trainer, other))
    return search(World(todo, signals=signals), _judged)


def _judged(world: World) -> Iterator[tuple[str, World]]:
    stands = any(world.todo)
    for move in moves(world):
        stands = False
        yield move
    if stands:
        raise Broken("S19", f"nobody can go on: {world.todo}")
