"""An exhaustive model check of void before abort: a host, its device, a peer that dies, and who leaves the run, in every order.

A step is a collective, an update and a note, and then the step is saved. The host only queues it; the device does it later,
in order, and a copy of ours on a side stream, which the next update waits for. Where the state is the host's (parameters that
are offloaded) the host waits for the collective instead, and updates and copies itself. A collective whose peer is dead does
not end by itself. It ends when the run is left, with gradients that nobody reduced, and from then on the state is spoiled;
the host may run on for as long as it likes. What is believed, and the order in which a run is left, are the real rules
(`core.versions.late_copy_rules`).

  S20  what a device had not finished when its communicators were cut or aborted counts as neither saved nor live, nor as a result
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast.core.versions import late_copy_rules
from model_check.search import search
from model_check.state import Broken

# Steps of the run; the host queues the last one, and the script ends.
NUM_STEPS = 3
SPOILED = -1  # the state behind a collective that was cut or aborted


@dataclass(frozen=True)
class World:
    """Everything at one moment.

    Attributes:
        offloaded: the state is the host's.
        todo: what the host has yet to do.
        queue: what its device has yet to do, in order: (what, step).
        copies: copies on the side stream that have not been made, by step.
        live: the step whose state lies in memory; SPOILED.
        peer: the other rank lives.
        leaving: how many steps of leaving were made.
        spoiled: a collective ended although its peer was dead.
        begun: updates that the host has begun.
        noted: the newest note: its step, how many updates had begun, whether the device had passed it.
        voided: what void found: the copies that were made, and the step whose note the device had passed; None before.
    """

    offloaded: bool
    todo: tuple[tuple[str, int], ...]
    queue: tuple[tuple[str, int], ...] = ()
    copies: tuple[int, ...] = ()
    live: int = 0
    peer: bool = True
    leaving: int = 0
    spoiled: bool = False
    begun: int = 0
    noted: tuple[int, int, bool] = (0, 0, True)
    voided: tuple[frozenset[int], int | None] | None = None

    @property
    def left(self) -> tuple[str, ...]:
        """The steps of leaving that were made."""
        return late_copy_rules.LEAVING[: self.leaving]


def ends_by_itself() -> bool:
    """Returns whether a collective ends without an error when its peer is dead: of a library that would break S20."""
    return False


def program() -> tuple[tuple[str, int], ...]:
    """Return what the host does."""
    steps = range(1, NUM_STEPS + 1)
    return (*((what, step) for step in steps for what in ("collective", "update", "note", "save")), ("end", NUM_STEPS))


def moves(world: World) -> Iterator[tuple[str, World]]:
    """Every event that may come next, with the world behind it."""
    if world.peer:
        yield "the peer dies", replace(world, peer=False)
    elif world.leaving < len(late_copy_rules.LEAVING):
        yield f"the run is left: {late_copy_rules.LEAVING[world.leaving]}", _left(world)
    yield from _device(world)
    if world.todo:
        yield from _host(world)


def _left(world: World) -> World:
    """The next step of leaving. Void sees what the device has passed."""
    if late_copy_rules.LEAVING[world.leaving] == "void":
        unmade = {step for what, step in world.queue if what == "copy"} | set(world.copies)
        passed = frozenset(range(NUM_STEPS + 1)) - unmade - {step for what, step in world.todo if what == "save"}
        world = replace(world, voided=(passed, world.noted[0] if world.noted[2] else None))
    return replace(world, leaving=world.leaving + 1)


def _device(world: World) -> Iterator[tuple[str, World]]:
    if world.copies:
        step = world.copies[0]
        yield f"the device has copied {step}", _copied(replace(world, copies=world.copies[1:]), step)
    if not world.queue:
        return
    (what, step), rest = world.queue[0], world.queue[1:]
    after = replace(world, queue=rest)
    if what == "collective":
        ended = _ended(world, after)
        if ended is not None:
            yield f"the device: {what} {step}", ended
    elif what == "update":
        if not world.copies:  # the fence: it waits for the copy of the step before
            yield f"the device: {what} {step}", _updated(after, step)
    elif what == "note":
        same = world.noted[0] == step
        yield f"the device: {what} {step}", replace(after, noted=(*world.noted[:2], True)) if same else after
    else:
        yield f"the device begins to copy {step}", replace(after, copies=(*world.copies, step))


def _ended(world: World, after: World) -> World | None:
    """The world in which the collective has ended; None if it hangs."""
    if world.peer:
        return after
    if {"cut", "abort"} & set(world.left) or ends_by_itself():
        return replace(after, spoiled=True)
    return None


def _updated(world: World, step: int) -> World:
    return replace(world, live=SPOILED if world.spoiled else step)


def _host(world: World) -> Iterator[tuple[str, World]]:
    (what, step), rest = world.todo[0], world.todo[1:]
    after = replace(world, todo=rest)
    if what == "end":
        if not world.queue and not world.copies:
            yield "the script ends", _result(after)
    elif what == "update":
        begun = replace(after, begun=world.begun + 1)
        yield f"the host: {what} {step}", _updated(begun, step) if world.offloaded else _queued(begun, what, step)
    elif what == "note":
        after = replace(after, noted=(step, world.begun, world.offloaded))
        yield f"the host: {what} {step}", after if world.offloaded else _queued(after, what, step)
    elif not world.offloaded:
        yield f"the host: {what} {step}", _queued(after, "copy" if what == "save" else what, step)
    elif what == "save":
        yield f"the host copies {step}", _copied(after, step)
    else:  # it waits for what the device reduced
        ended = _ended(world, after)
        if ended is not None:
            yield f"the host: {what} {step}", ended


def _queued(world: World, what: str, step: int) -> World:
    return replace(world, queue=(*world.queue, (what, step)))


def _copied(world: World, step: int) -> World:
    """A copy was made; is it believed, and is it the state?"""
    broke_off = world.voided is not None
    passed = world.voided is None or step in world.voided[0]
    if late_copy_rules.counts(broke_off=broke_off, passed_by_then=passed) and world.live != step:
        raise Broken("S20", f"what is saved as {step} is {_named(world.live)}")
    return world


def _result(world: World) -> World:
    if late_copy_rules.is_result(left=bool(world.leaving)) and world.live != NUM_STEPS:
        raise Broken("S20", f"the script ends well, and its result is {_named(world.live)}")
    return world


def offered(world: World) -> int | None:
    """The step whose state the process offers once all that was queued has run; None: none."""
    step, begun, passed = world.noted
    passed_by_then = world.voided[1] == step if world.voided is not None else passed
    whole = begun == world.begun
    return (
        step
        if whole and late_copy_rules.counts(broke_off=world.voided is not None, passed_by_then=passed_by_then)
        else None
    )


def _judged(world: World) -> None:
    """The host is interrupted here, and its device has run dry: what the process offers is the state of that step."""
    if world.leaving < len(late_copy_rules.LEAVING) or world.queue or world.copies:
        return
    step = offered(world)
    if step is not None and world.live != step:
        raise Broken("S20", f"what is live as {step} is {_named(world.live)}")


def _named(live: int) -> str:
    return "spoiled" if live == SPOILED else f"the state of {live}"


@dataclass(frozen=True, slots=True)
class Result:
    """Says what a check came to.

    Attributes:
        num_states: how many worlds there were.
        num_kept: in how many of them, left and run dry, a step is live: a rule that refuses everything is none.
        invariant: what is broken; empty: nothing.
        story: the shortest way there.
    """

    num_states: int
    num_kept: int = 0
    invariant: str = ""
    story: tuple[str, ...] = ()


def check(*, offloaded: bool = False) -> Result:
    """Visits every order of events of one run."""
    num_kept = 0

    def judged(world: World) -> Iterator[tuple[str, World]]:
        nonlocal num_kept
        _judged(world)
        if world.leaving == len(late_copy_rules.LEAVING) and not world.queue and not world.copies:
            num_kept += offered(world) is not None
        return moves(world)

    found = search(World(offloaded, program()), judged)
    return Result(found.num_states, num_kept, found.invariant, found.story)
