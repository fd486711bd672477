"""The kept loop at run time: looks at what is there when it begins, restores, saves after every step, ends in good order.

Put into the script under the name `script.HOOK`. What it may never do: change how a script runs that it does not keep.

A version says where it is by value: the range, and the number that the loop had. It carries every plain value that is not
as it was when the loop began (`changes.py`); whatever else changed makes the loop one that is not kept. A version that does
not fit the loop that asks for it is refused before anything of it is loaded: the script then runs as it was written. When
all steps are made the loop yields nothing, and what lies behind it runs with everything restored.
"""

from __future__ import annotations

import functools
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.adapters.zero_lines.changes import Changed, Changes
from holdfast.adapters.zero_lines.files_read_back import FileWatch
from holdfast.adapters.zero_lines.objects import Kept, sort_out
from holdfast.adapters.zero_lines.proposed_lines import Proposer
from holdfast.adapters.zero_lines.reach.look import Look
from holdfast.adapters.zero_lines.reach.plain_values import MAX_ELEMENTS, has_set, is_plain
from holdfast.adapters.zero_lines.reach.reach import Reach
from holdfast.adapters.zero_lines.script import Loop
from holdfast.base.errors import LevelNotReached, MismatchError, UsageError
from holdfast.base.events import Events
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.device.accelerator import name_of
from holdfast.checkpoint.entries import living_gradients
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.usage.replay_check import SelfCheck, why_not
from holdfast.checkpoint.usage.user_frames import own

logger = logging.getLogger(__name__)

# A shorter loop is not rehearsed.
MIN_STEPS = 8
# What it means that a loop which trains is not kept, and what to do.
UNKEPT = (
    "it runs as under torchrun: nothing of it is saved, and a restart begins it anew; "
    "holdfast.Checkpointer in the script keeps it"
)


class KeptLoop:
    """The thing that the loop of one script iterates over.

    Args:
        loop: what the text of the script told.
        root: directory or URL of the checkpoints.
        events: told `script_kept` and `script_refused`, with the reason.
        files: watches which files the script opens.

    Attributes:
        back: whether values of a version are there to be taken: by the first step after a restore, or by what lies behind.
    """

    def __init__(self, loop: Loop, root: str, events: Events | None = None, files: FileWatch | None = None) -> None:
        self._loop = loop
        self._files = files
        self._root = root
        self._events = events or Events()
        self._begun = False
        self._values: dict[str, Any] = {}
        self.back = False
        self._left = False

    def leave(self) -> None:
        """The script leaves its loop in good order, by `break` or `return`."""
        self._left = True

    def take(self) -> tuple[Any, ...]:
        """Returns the carried values of the version, once."""
        self.back = False
        return tuple(self._values[name] for name in self._loop.carried)

    def rest(self) -> tuple[Any, ...]:
        """Returns what the code behind the loop reads, when no step was left to make."""
        self.back = False
        return tuple(self._values[name] for name in (*self._loop.carried, *self._loop.after))

    def __call__(self, steps: range) -> Iterator[int]:
        """Returns the numbers that are left of `steps`."""
        kept = None if self._begun else self._begin(steps, Names.of(sys._getframe(1)))
        self._begun = True
        if kept is None:
            return iter(steps)
        checkpointer, carried, check = kept
        if len(steps) >= MIN_STEPS:
            check.begin(carried.objects)
            carried.rehearses(check.reason)
        return (
            self._rehearsed(steps, carried, check) if check.child else self._kept(steps, checkpointer, carried, check)
        )

    def _rehearsed(self, steps: range, carried: _Carried, check: SelfCheck) -> Iterator[int]:
        """Yields the steps that a child makes a second time; it ends there."""
        count = Count()
        return check.perform(carried, steps, given=lambda: self._take_over(steps, carried), count=lambda: count.steps)

    def _take_over(self, steps: range, carried: _Carried) -> int:
        """Names of the script are there to be taken; returns the place in the range of the step that is next."""
        first = 0 if carried.value is None else steps.index(carried.value) + 1
        if carried.restored is not None and first:
            names = self._loop.carried if first < len(steps) else (*self._loop.carried, *self._loop.after)
            self._values, self.back = carried.restored, bool(names)
        return first

    def _begin(self, steps: range, names: Names) -> tuple[Checkpointer, _Carried, SelfCheck] | None:
        """Returns a Checkpointer of what is there; None, and a reason told, if anything is unsure on any rank."""
        if (group := ranks(self._events)) is None:
            return None
        found = sort_out(self._loop.used, self._loop.carried, names.all(), Reach(sets=(), used=(), kept=()).is_of_user)
        if any(isinstance(thing, Checkpointer) for thing in open_checkpointers.opened()):
            found = "the script has a Checkpointer of its own"
        changes = None
        if isinstance(found, Kept):
            try:
                changes = _changes(self._loop, names, found)
            except Exception as error:  # noqa: BLE001 - objects of other people are asked, and the script must run
                found = f"what it holds cannot be looked at: {type(error).__name__}: {error}"
        if changes is not None and changes.before.unsure:
            (path, kind), *_ = changes.before.unsure
            found = f"nobody can be sure what {path!r}, a {kind}, keeps from one step to the next"
        if changes is not None and changes.before.unknown and isinstance(found, Kept):
            reason = why_not(found.objects) if len(steps) >= MIN_STEPS else "the loop is short"
            found = unknown(changes, reason) if reason else found
        if is_refused(group, found if isinstance(found, str) else "", self._events, self._root):
            return None
        assert isinstance(found, Kept)
        assert changes is not None
        carried = _Carried(self._loop, steps, names, changes, group)
        carried.events = self._events
        carried.files, carried.root = self._files, self._root
        if self._files is not None:
            self._files.loop_begins()
        carried.stepped = _stepped(found)
        carried.clears = does_clear(self._loop.clears, names.all(), carried.stepped)
        objects = {**found.objects, "main_values": carried}
        checkpointer = Checkpointer(self._root, **objects)
        self._events.emit("script_kept", root=self._root, objects=", ".join(sorted(found.objects)))
        if group.rank == 0:
            say(f"this script is kept in {self._root}: {', '.join(sorted(found.objects))}")
        carried.objects = objects
        make = functools.partial(State, objects, rank=0, world_size=1)
        return checkpointer, carried, SelfCheck(make, clock=self._loop.reads_clock)

    def _kept(self, steps: range, checkpointer: Checkpointer, carried: _Carried, check: SelfCheck) -> Iterator[int]:
        try:
            yield from self._steps(steps, checkpointer, carried, check)
        finally:
            check.end()

    def _steps(self, steps: range, checkpointer: Checkpointer, carried: _Carried, check: SelfCheck) -> Iterator[int]:
        if not self._restored(checkpointer, carried, check):
            yield from steps
            return
        first = self._take_over(steps, carried)
        if first == len(steps) > 0:
            say(f"all {len(steps)} steps are made; what lies behind the loop runs")
            checkpointer.save(first - 1, "durable")  # it may lie in memory alone
            close(checkpointer)
            return
        count = Count()
        unsaved = -1  # a step that is finished, and of which it was not known whether it may be saved
        ended = False
        try:
            for number in range(first, len(steps)):
                before = count.steps
                yield steps[number]
                unsaved = -1
                if count.steps == before:
                    continue  # gradients are on their way
                if not carried.note(number):
                    continue  # what lies behind the loop could not be run again
                carried.doubt(differs(check.made(number, {})))
                carried.rehearses(check.reason)
                if carried.unsure and carried.alone:
                    check.end()
                    if carried.spoiled:
                        checkpointer.save(number, "durable")  # it says of itself that it is not to be taken
                    close(checkpointer)  # else what was saved before that is right
                    yield from steps[number + 1 :]
                    return
                if check.pending:
                    unsaved = number
                else:
                    checkpointer.step(number)
            if unsaved >= 0:
                checkpointer.step(unsaved)
            ended = True
        finally:
            count.close()
            if ended or self._left:
                close(checkpointer)
            else:  # left by an error: what was saved counts
                checkpointer.__exit__(UsageError, None, None)

    def _restored(self, checkpointer: Checkpointer, carried: _Carried, check: SelfCheck) -> bool:
        """Tell whether what was saved is here, if there is anything; False, and the reason told, if it is not of this loop."""
        group = collectives.ranks()
        try:
            checkpointer.restore()
            if carried.value is not None:
                check.end()  # the run that saved made it
        except MismatchError:
            if not is_foreign(group, carried.refused, self._root, self._events):
                raise
            checkpointer.abandon()
            return False
        return True


def ranks(events: Events) -> collectives.Ranks | None:
    """Returns the ranks of the job; None, and the reason told, if they cannot be asked."""
    try:
        return collectives.ranks()
    except UsageError as error:
        say(str(error.what))
        events.emit("script_refused", reason=str(error.what))
        return None


def is_refused(group: collectives.Ranks, reason: str, events: Events, root: str) -> bool:
    """Tell whether any rank has a reason not to keep the script; says the first one."""
    told = collectives.gather_json(group, reason)
    reasons = [f"rank {rank}: {reason}" if len(told) > 1 else reason for rank, reason in enumerate(told) if reason]
    if reasons:
        events.emit("script_refused", reason=reasons[0])
        if group.rank == 0:
            say(f"this script is not kept, {reasons[0]}; {UNKEPT}")
            Proposer(root, say, events, reasons[0])
    return bool(reasons)


def is_foreign(group: collectives.Ranks, reason: str, root: str, events: Events) -> bool:
    """Tell whether any rank has a reason not to take a version that was found; says the first one."""
    reasons = [each for each in collectives.gather_json(group, reason) if each]
    if reasons:
        events.emit("script_refused", reason=reasons[0])
        if group.rank == 0:
            say(
                f"this script is not kept, {reasons[0]}; it runs as it is written, and nothing of it is saved. To begin "
                f"anew with it, give another --checkpoint-dir, or remove {root}"
            )
    return bool(reasons)


def close(checkpointer: Checkpointer) -> None:
    """The last step is durable, or it is said that it is not: what lies behind the loop runs in either case."""
    try:
        checkpointer.close()
    except LevelNotReached as error:
        say(f"the last step is not durable: {error}")


def differs(name: str) -> str:
    """Returns what is told of a value that a rehearsal did not make again; empty if there is none."""
    if not name:
        return ""
    return f"a rehearsal of a restart differs in {name!r}: some state that its steps depend on is in no version"


def unknown(changes: Changes, reason: str) -> str:
    """Returns why an object that nobody can look into is in the way where nothing is rehearsed."""
    (path, kind), *_ = changes.before.unknown
    return (
        f"nobody can be sure what {path!r}, a {kind}, keeps from one step to the next, and the first steps are not rehearsed: "
        f"{reason}"
    )


def _changes(loop: Loop, names: Names, kept: Kept) -> Changes:
    lines = dict(loop.lines)
    reach = Reach(
        sets=loop.sets, used=loop.used, kept=kept.things, carried=loop.carried, members=loop.members, pops=loop.pops
    )

    def look() -> Look:
        return reach.look(names.main, names.frames())

    return Changes(look, lines, loop.members)


def _stepped(kept: Kept) -> list[torch.Tensor]:
    return [p for group in kept.objects["optimizer"].param_groups for p in group["params"]]


def does_clear(clears: str, names: Mapping[str, Any], stepped: Sequence[torch.Tensor]) -> bool:
    """Tell whether what every step clears, by the text, has all parameters that are stepped."""
    if not clears:
        return False
    name, *attributes = clears.split(".")
    thing = names.get(name)
    for attribute in attributes:
        thing = getattr(thing, "__dict__", {}).get(attribute)
    if isinstance(thing, torch.nn.Module):
        cleared = list(thing.parameters())
    elif isinstance(thing, torch.optim.Optimizer):
        cleared = [p for group in thing.param_groups for p in group["params"]]
    else:
        return False
    plain = (torch.nn.Module.zero_grad, torch.optim.Optimizer.zero_grad)
    return type(thing).zero_grad in plain and {id(p) for p in stepped} <= {id(p) for p in cleared}


class Names:
    """The names of the running script, read anew at every look.

    Args:
        main: those of the script itself.
        frames: the functions of the script that run, the one with the loop first.
    """

    def __init__(self, main: dict[str, Any], frames: Sequence[FrameType] = ()) -> None:
        self.main = main
        self._frames = frames

    @classmethod
    def of(cls, frame: FrameType) -> Names:
        """Returns the names where the loop runs."""
        main: dict[str, Any] = frame.f_globals
        frames: list[FrameType] = []
        around: FrameType | None = frame
        while around is not None and around.f_globals is main and around.f_code.co_name != "<module>":
            frames.append(around)
            around = around.f_back
        return cls(main, frames)

    def frames(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Returns the functions of the script that run, the one with the loop first, with their names."""
        return [(f"{frame.f_code.co_name}()", own(frame)) for frame in self._frames]

    def all(self) -> dict[str, Any]:
        """Returns what names mean where the loop is."""
        return {**self.main, **(own(self._frames[0]) if self._frames else {})}


class Count:
    """Holds how many steps optimizers have made."""

    def __init__(self) -> None:
        self.steps = 0
        self._handle = register_optimizer_step_post_hook(self._step)

    def _step(self, *_: Any) -> None:
        self.steps += 1

    def close(self) -> None:
        """Counts no more."""
        self._handle.remove()


class Doubts(ABC):
    """Tells the person who started the job, once, what makes the versions of a run unsure.

    Args:
        group: the ranks.
        began: numbers and texts that the loops read, as they were when they began; empty if the script reads no files.

    Attributes:
        refused: why a version was not taken.
        unsure: why no version of this run can be right any more; empty as long as nothing says so.
        unrehearsed: why its first steps are not rehearsed.
        alone: whether this rank is the job.
        who: number of this rank, and of all.
        events: told why no version can be right any more.
        files: watches which files the script opens; None if nobody does.
        spoiled: whether what was saved before is not right any more either.
        root: directory or URL of the checkpoints; empty: no lines are proposed.
    """

    holdfast_saves_gradients = True

    def __init__(self, group: collectives.Ranks, began: Mapping[str, str]) -> None:
        self._rank, self._began = group.rank, began
        self._noted: dict[str, Any] = {}
        self.refused = ""
        self.alone = group.world_size == 1
        self.who = [group.rank, group.world_size]
        self.events = Events()
        self.files: FileWatch | None = None
        self.spoiled = False
        self.root = ""
        self.unsure = self.unrehearsed = ""

    def doubt(self, reason: str) -> None:
        """Says a reason why no version of this run can be right any more, once; nothing if it is empty."""
        if reason and not self.unsure:
            self.unsure = reason
            self.events.emit("script_refused", reason=reason)
            who = "" if self.alone else f"rank {self._rank}: "
            say(f"{who}this script is not kept any more, {reason}; {UNKEPT}")
            if self._rank == 0 and self.root:
                Proposer(self.root, say, self.events, reason)

    def state_dict(self) -> dict[str, Any]:
        """Returns what was noted last."""
        return self._noted

    def holdfast_accepts(self, state: Any) -> None:
        """Looks at a version before anything of it is loaded.

        Raises:
            MismatchError: it is not of these loops, or cannot be right.
        """
        self.refused = self._why_not(state) if isinstance(state, dict) else ""
        if self.refused:
            raise MismatchError(self.refused, where=self._loop_name())

    @abstractmethod
    def _why_not(self, state: Mapping[str, Any]) -> str:
        """Returns why a version does not fit; empty if it does."""

    @abstractmethod
    def _loop_name(self) -> str: ...

    def _why_not_begun(self, state: Mapping[str, Any]) -> str:
        """Returns why a version does not fit where the loops begin; empty if it does."""
        for path, token in state["began"].items():
            if self._began.get(path, token) != token:
                return (
                    f"{path!r} was {token} when the loop began that was saved, and is {self._began[path]}: the script may "
                    f"have gone on from a file of its own"
                )
        return ""

    def judge_files(self) -> None:
        """Looks at what the script has read and written since the step before, behind a step."""
        if self.files is not None:
            reason, warning = self.files.step_made()
            self.spoiled = self.spoiled or bool(
                reason and not self.unsure
            )  # the file has gone on, and nothing brings it back
            self.doubt(reason)
            if warning and self._rank == 0:
                say(f"warning: {warning}")

    def rehearses(self, reason: str) -> None:
        """Says once why the first steps are not rehearsed; nothing if it is empty."""
        if reason and not self.unrehearsed:
            self.unrehearsed = reason
            if self._rank == 0:
                say(
                    f"warning: the first steps are not rehearsed, {reason}; state that holdfast cannot see would not be missed"
                )


class _Carried(Doubts):
    """The position and all that is carried, as an object with a state.

    Attributes:
        value: the number that the loop had in the version that was restored; None if there was none.
        restored: what names of the script meant then; None if nothing was restored.
        stepped: the parameters that the optimizer steps.
        clears: whether every step surely clears their gradients first.
        objects: what is saved, by name.
    """

    def __init__(self, loop: Loop, steps: range, names: Names, changes: Changes, group: collectives.Ranks) -> None:
        super().__init__(group, changes.began(loop.used, loop.bounds) if loop.reads_files else {})
        self._loop, self._steps, self._names, self._changes = loop, steps, names, changes
        self.stepped: list[torch.Tensor] = []
        self.clears = False
        self.objects: dict[str, Any] = {}
        self.value: int | None = None
        self.restored: dict[str, Any] | None = None
        self._noted = self._state(None, {}, {}, Changed([], []))

    def note(self, number: int) -> bool:
        """Takes everything as it is now, behind step `number` of the range; False: this step must be in no version."""
        names = self._names.all()
        after: dict[str, Any] = {}
        if number == len(self._steps) - 1:
            for name in self._loop.after:
                value = packed(names.get(name, self), number=name in self._loop.numbers)
                if value is None:
                    say(f"the last step is made again after a failure behind the loop, which reads {name!r}")
                    return False
                after[name] = value
        changed = self._changes.now()
        self.judge_files()
        carried = {name: names[name] for name in self._loop.carried if name in names and is_plain(names[name])}
        gradients = {} if self.clears else living_gradients.packed(self.stepped)
        why = living_gradients.UNSURE if gradients is None else ""
        self.doubt(changed.reason or self._why_unsure(carried, names) or why)
        self._noted = self._state(self._steps[number], carried, after, changed) | {"gradients": gradients or {}}
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Plain values in place; names of the script when the first step begins."""
        self._noted = state
        self.value = state["value"]
        self._changes.before.put(state["rows"], state["gone"])
        living_gradients.put(self.stepped, state.get("gradients", {}))
        self.restored = {**state["carried"], **{name: unpacked(value) for name, value in state["after"].items()}}

    def _state(self, value: int | None, carried: Any, after: Any, changed: Changed) -> dict[str, Any]:
        steps = self._steps
        return {
            "range": [steps.start, steps.stop, steps.step], "value": value, "carried": carried, "after": after,
            "rows": changed.rows, "gone": changed.gone, "unsure": self.unsure, "began": self._began,
            "data": self._data(changed.rows), "who": self.who,
        }  # fmt: skip

    def rehearses(self, reason: str) -> None:
        """Says once why the first steps are not rehearsed, and doubts what only a rehearsal could judge; nothing if it is empty."""
        first = reason and not self.unrehearsed
        super().rehearses(reason)
        if first and self._changes.before.unknown:
            self.doubt(unknown(self._changes, reason))

    def _why_unsure(self, carried: Mapping[str, Any], names: Mapping[str, Any]) -> str:
        for name in self._loop.carried:
            if name not in carried:
                what = f"a {type(names[name]).__qualname__}" if name in names else "without a value"
                return f"{name!r}, {what}, is carried from one step to the next"
        for name, value in carried.items():
            if has_set(value) and name not in self._loop.members:
                return (
                    f"{name!r}, a set or with one in it, is carried from one step to the next, and its order cannot be"
                )
            if held := self._changes.holds_identity(value):
                return f"{name!r} is carried from one step to the next, and {held}"
        return ""

    def _data(self, rows: list[list[Any]]) -> dict[str, str]:
        """Returns tokens of what the script made, without what a version with these rows puts in place."""
        loop = self._loop
        return self._changes.data(set(loop.used) - set(loop.carried), clock=loop.reads_clock, carried=rows)

    def _why_not(self, state: Mapping[str, Any]) -> str:
        """Returns why a version does not fit this loop; empty if it does."""
        steps, loop = self._steps, self._loop
        if not {"range", "value", "rows", "unsure", "began"} <= state.keys():
            return "what was saved is of another release of holdfast"
        if state["unsure"]:
            return f"the run that saved was not sure of it: {state['unsure']}"
        start, _, stride = state["range"]
        if (start, stride) != (steps.start, steps.step):
            return (
                f"its loop counts from {steps.start} by {steps.step}, and the one that was saved counted from {start} by "
                f"{stride}: it may have gone on from a file of its own"
            )
        if state["value"] is not None and state["value"] not in steps:
            return f"step {state['value']} was saved, and is not one of {steps}"
        if state["value"] is not None and state["carried"].keys() != set(loop.carried):
            return "other names live from step to step than in the script that saved"
        if state["value"] is not None and state["value"] == steps[-1] and not state["after"].keys() >= set(loop.after):
            missing = sorted(set(loop.after) - state["after"].keys())
            return f"all steps are made, and {missing[0]!r}, which is read behind the loop, was not saved"
        if why := self._why_not_begun(state):
            return why
        if state["value"] is not None and state.get("who") == self.who:
            other = self._changes.other_data(state.get("data", {}), self._data(state["rows"]))
            if other:
                return other
        return self._changes.misses(state["rows"])

    def _loop_name(self) -> str:
        return f"the loop over {self._steps}"


def packed(value: Any, *, number: bool) -> Any:
    """Returns a value as it can be stored; None if it cannot."""
    if is_plain(value):
        return {"plain": value}
    if isinstance(value, torch.Tensor) and number and value.numel() <= MAX_ELEMENTS and not value.is_quantized:
        where = name_of(value.device)
        return {"tensor": value.detach().tolist(), "dtype": str(value.dtype).removeprefix("torch."), "device": where}
    return None


def unpacked(packed: Mapping[str, Any]) -> Any:
    """Returns the value that was stored."""
    if "plain" in packed:
        return packed["plain"]
    return torch.tensor(packed["tensor"], dtype=getattr(torch, packed["dtype"]), device=packed["device"])


def say(what: str) -> None:
    """Writes one line for the person who started the job."""
    sys.stderr.write(f"holdfast: {what}\n")
