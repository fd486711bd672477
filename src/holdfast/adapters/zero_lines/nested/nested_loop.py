"""Kept loops that lie inside each other, at run time: the thing that the loops of one script iterate over.

Put into the script under the name `script_text.HOOK`. Versions are made where the innermost loop asks for its next item, behind a
step of the optimizer. A restart goes straight to the saved item of each outer loop, with the random numbers and values that its
item began with; the statements up to the inner loop are executed again; there everything is restored and compared, and the inner
loop goes on behind the items that it had. What follows the last step of an inner loop (an evaluation, a schedule) is done again.

What cannot be taken up where it was raises `Unfit`: the script is then run from its beginning, and is not kept.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from holdfast.adapters.zero_lines.doubts import (
    UNKEPT,
    different,
    differs,
    have_all_come,
    is_foreign,
    is_refused,
    patience,
    ranks,
    say,
    unknown,
)
from holdfast.adapters.zero_lines.files_read_back import FileWatch
from holdfast.adapters.zero_lines.nested.nested_items import Items
from holdfast.adapters.zero_lines.nested.nested_look import Entry, Looker, Untouched, is_function
from holdfast.adapters.zero_lines.nested.nested_objects import collect
from holdfast.adapters.zero_lines.nested.nested_script import Nest, Site, kept_names
from holdfast.adapters.zero_lines.nested.nested_state import (
    NestedState,
    differing,
    drawn,
    generators,
    given,
    noted,
    packed_randomness,
    put_randomness,
    put_settings,
    stand_in,
)
from holdfast.adapters.zero_lines.nested.staying_workers import StayingWorkers
from holdfast.adapters.zero_lines.objects import Kept
from holdfast.adapters.zero_lines.reach.attributes import silence_writers
from holdfast.adapters.zero_lines.reach.loader_places import LoaderPlaces
from holdfast.adapters.zero_lines.reach.look import Look
from holdfast.adapters.zero_lines.reach.reach import Reach
from holdfast.base.errors import LevelNotReached, MismatchError, UsageError
from holdfast.base.events import Events
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.entries import fsdp1, living_gradients
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.usage import user_frames
from holdfast.checkpoint.usage.cleared_gradients import proven
from holdfast.checkpoint.usage.loop_snapshot import meant
from holdfast.checkpoint.usage.replay_check import SelfCheck, why_not
from holdfast.checkpoint.usage.user_frames import own


class Unfit(BaseException):
    """A version cannot be taken up where it was. No `except Exception` of the script must take it for an error of its own."""


class KeptLoops:
    """The thing that the loops of one script iterate over.

    Args:
        nest: what the text of the script told.
        root: directory or URL of the checkpoints.
        events: told `script_kept` and `script_refused`, with the reason.
        files: watches which files the script opens.
        modules: names of the script's own modules, if the loops stand in one of these.

    Attributes:
        back: whether values of a version are there to be taken.
    """

    def __init__(
        self,
        nest: Nest,
        root: str,
        events: Events | None = None,
        files: FileWatch | None = None,
        modules: frozenset[str] = frozenset(),
    ) -> None:
        self._modules = modules
        self._nest, self._root, self._files = nest, root, files
        self._events = events or Events()
        self.back = False
        self._values: tuple[Any, ...] = ()
        self._absent: frozenset[str] = frozenset()
        self._owner = (os.getpid(), threading.get_ident())
        self._run: _Run | None = None
        self._begun = self._left = False
        self._stack: list[Entry] = []
        self._next: Entry | None = None
        self._told: set[int] = set()
        self._generators = generators()
        self._judge = Reach(used=(), kept=(), named={})
        self._workers = StayingWorkers(self._judge, self._may_be_saved)
        self._workers.begin()
        self._places = LoaderPlaces()
        self._places.begin()

    def end(self, *, unfit: bool) -> None:
        """The script is left; or what it has made so far, if a version could not be taken up."""
        self._workers.end(unfit=unfit)
        self._places.end()

    def _may_be_saved(self) -> bool:
        return not self._begun or (self._run is not None and self._run.looks)

    def leave(self) -> None:
        """The script leaves a loop in good order, by `break` or `return`."""
        if self._is_mine() and self._run is not None:
            self._left = True
            self._run.goes_on()

    def asks(self, ask: Any, text: str, line: int, goes_to: int, ends: bool) -> Any:
        """Returns what asks something of files, for the training of this line: the files are noted that it asks for."""
        files = self._files
        if files is None or self._run is None or not self._is_mine():
            return ask

        @functools.wraps(ask)
        def asked(*args: Any, **kwargs: Any) -> Any:
            files.asked(ask, args, f"{text!r} (line {line}) goes into the training (line {goes_to})", ends=ends)
            return ask(*args, **kwargs)

        return asked

    def turns(self) -> Iterator[int]:
        """Returns the numbers of the turns of a `while`."""
        return itertools.count()

    def take(self) -> tuple[Any, ...]:
        """Returns the values of the version, once."""
        self.back = False
        values, self._values = self._values, ()
        return values

    def absent(self, name: str) -> bool:
        """Tell whether a name, which has a stand-in now, was not set when the version was saved."""
        return name in self._absent

    def at(self, number: int) -> None:
        """A loop is about to begin: what it goes over is not made yet."""
        if not self._is_mine():
            return
        self._left = False
        self._next = None
        site, frame = self._nest.sites[number], sys._getframe(1)
        if not self._begun:
            self._begun = True
            self._next = self._begin(site, frame)
        elif self._run is not None and self._run.looks and self._stack:
            self._next = self._enter(site, frame)
        elif self._run is None and number not in self._told and self._told:
            self._say_of(site, "another loop trained before it")

    def __call__(self, number: int, iterable: Any) -> Any:
        """Returns the items of a loop that are left."""
        entry = self._next if self._is_mine() else None
        self._next = None
        if entry is None or entry.site.number != number or self._run is None:
            return iterable
        return self._turns(entry, Items(iterable, self._judge.is_of_user, self._workers.why_not), self._run)

    def _is_mine(self) -> bool:
        return self._owner == (os.getpid(), threading.get_ident())

    def _say_of(self, site: Site, why: str) -> None:
        if site.number not in self._told:
            self._told.add(site.number)
            say(f"the loop of line {site.line} is not kept, {why}: a restart makes it again from its first step")

    def _begin(self, site: Site, frame: FrameType) -> Entry | None:
        """Returns the outermost loop if all is kept; None, and a reason told, if anything is unsure on any rank."""
        if (group := ranks(self._events)) is None:
            return None
        if not have_all_come(group, patience()):
            reason = f"not all ranks come to the loop of line {site.line}"
            self._events.emit("script_refused", reason=reason)
            say(f"rank {group.rank}: this script is not kept, {reason}; {UNKEPT}")
            return None
        if self._modules and group.rank == 0:
            say(f"the loop that trains stands in {frame.f_code.co_filename}, of which all lines are that are named")
        found: Kept | str
        entry = None
        looker = None
        failed: Exception | None = None
        try:
            found, looker, entry = self._looked(site, frame)
        except Exception as error:  # noqa: BLE001 - objects of other people are asked, and the script must run
            failed, found = error, f"what it holds cannot be looked at: {type(error).__name__}: {error}"
        if (other := different(group, site.line)) != site.line:
            found = f"another rank comes to the loop of line {other} when this one comes to that of line {site.line}"
        if any(isinstance(thing, Checkpointer) for thing in open_checkpointers.opened()):
            found = "the script has a Checkpointer of its own"
        if is_refused(group, found if isinstance(found, str) else "", self._events, self._root):
            if failed is not None:
                pass_on(failed)
            return None
        assert isinstance(found, Kept)
        assert entry is not None
        assert looker is not None
        self._told.add(site.number)
        self._run = _Run(self._nest, self._root, found, looker, entry, group, self._events)
        self._run.generators, self._run.workers = self._generators, self._workers
        self._run.watch(self._files)
        return entry

    def _looked(self, site: Site, frame: FrameType) -> tuple[Kept | str, Looker | None, Entry | None]:
        if self._nest.outside:
            return self._nest.outside, None, None
        if reason := _why_no_look(frame):
            return reason, None, None
        main: dict[str, Any] = frame.f_globals
        mine = own(frame) if is_function(frame) else {}
        hidden = site.sets - set(site.lives)
        scope = {
            name: value for name, value in {**main, **mine}.items() if name not in hidden and not name.startswith("__")
        }
        found = collect(self._nest.used - set(site.lives), scope, self._judge.is_of_user, by_hand=self._nest.by_hand)
        if isinstance(found, str):
            return found, None, None
        looker = Looker(self._nest, found.things, frame, self._modules, self._workers.why_not)
        entry = looker.enter((), site, frame)
        if entry.before.unsure:
            (path, kind), *_ = entry.before.unsure
            return f"nobody can be sure what {path!r}, a {kind}, keeps from one step to the next", None, None
        if entry.before.unknown and (reason := _why_not_rehearsed(found.objects)):
            return unknown(entry.changes, reason), None, None
        entry.drawn, entry.generators = drawn(), generators()
        return found, looker, entry

    def _enter(self, site: Site, frame: FrameType) -> Entry | None:
        """Returns a loop inside of others, if it is the one of its item that is kept."""
        run, around = self._run, self._stack[-1]
        assert run is not None
        if not around.site.outer:
            return None  # it belongs to a step
        around.inner += 1
        if around.inner > 1:
            run.goes_on()
            self._say_of(site, f"another loop trained before it in one turn of the loop of line {around.site.line}")
            return None
        return run.enter(self._stack, site, frame)

    def _turns(self, entry: Entry, items: Items, run: _Run) -> Iterator[Any]:
        entry.items = items
        outermost = not self._stack
        self._stack.append(entry)
        try:
            if outermost and not run.begin(self._adopt):
                self._run = None
                yield from _rest(items)
                return
            if entry.site.outer:
                yield from self._outer(entry, items, run)
            else:
                yield from self._inner(entry, items, run)
            if outermost:
                self._left = True
        except Exception as error:
            run.fails(error)
            raise
        finally:
            ended = self._stack[self._stack.index(entry) :]
            del self._stack[-len(ended) :]
            if outermost and self._run is not None:
                self._run = None
                run.end(in_order=self._left)
            for each in ended:
                each.let_go()

    def _adopt(self) -> None:
        """This is the child that rehearses."""
        self._owner = (os.getpid(), threading.get_ident())
        self._workers.adopt()
        silence_writers()

    def _outer(self, entry: Entry, items: Items, run: _Run) -> Iterator[Any]:
        start = run.outer_begins(self._stack)
        if start is not None:
            there = entry.names() if entry.taken == 0 else {}
            stays, same = entry.names(), start.get("same")
            self._give(given(entry.site.lives, start["carried"], there=there, stays=stays, same=same), start)
            yield stand_in(entry.site.target, start["targets"])
        while True:
            self._left = False
            if start is None:
                run.item_begins(self._stack)
            try:
                item = next(items)
            except StopIteration:
                run.goes_on()
                return
            entry.inner = 0
            start = None
            run.goes_in()
            yield item
            run.comes_out()
            entry.taken += 1

    def _inner(self, entry: Entry, items: Items, run: _Run) -> Iterator[Any]:
        version = run.inner_begins(self._stack)
        self._workers.inner_begins(version.get("workers", b"") if version is not None else b"")
        if version is not None:
            stays, same = entry.names(), version.get("same")
            self._give(given(entry.site.lives, version["carried"], stays=stays, same=same), version)
            yield stand_in(entry.site.target, version["targets"])
        while True:
            self._left = False
            before = run.count.steps
            try:
                item = next(items)
            except StopIteration:
                break
            entry.taken += 1
            version = None
            yield item
            run.unsaved = -1  # the item that is done has changed what a version of the step before would hold
            if run.by_hand or run.count.steps != before:
                run.made(self._stack)
        run.inner_ends(entry, again=version is not None)
        if version is not None:
            names = (*entry.site.lives, *entry.site.after)
            if version["after"] is None:
                run.unfit(f"the loop of line {entry.site.line} has ended, and what is read behind it was not saved")
            if names:
                stays, same = entry.names(), version.get("same")
                self._give(given(names, version["carried"], version["after"], stays=stays, same=same), version)

    def _give(self, values: tuple[Any, ...], saved: Mapping[str, Any]) -> None:
        self._values, self._absent, self.back = values, frozenset(saved.get("absent", ())), True


class _Count:
    """Holds how many steps optimizers have made."""

    def __init__(self) -> None:
        self.steps = 0
        self._handle = register_optimizer_step_post_hook(self._step)

    def _step(self, *_: Any) -> None:
        self.steps += 1

    def close(self) -> None:
        self._handle.remove()


class _Run:
    """One run of a script's loops that is kept.

    Args:
        root: directory or URL of the checkpoints.
        found: what is kept.
        outermost: the loop that began first.
        events: told `script_kept` and `script_refused`.

    Attributes:
        count: steps that optimizers have made.
        by_hand: whether there is no optimizer: then each turn of the innermost loop is a step.
        generators: tokens of the generators of random numbers as the script began.
        workers: of data loaders, that stay.
        unsaved: number of the step that is done, and of which it is not known yet whether it may be saved; -1 if there is none.
    """

    def __init__(
        self,
        nest: Nest,
        root: str,
        found: Kept,
        looker: Looker,
        outermost: Entry,
        group: collectives.Ranks,
        events: Events,
    ) -> None:
        self._events = events
        self._nest, self._root, self._looker, self._group = nest, root, looker, group
        self._outermost = outermost
        began = {}
        if nest.reads_files:
            began = outermost.changes.began(nest.used, nest.bounds, nest.started if nest.reread else frozenset())
        self._state = NestedState(nest, outermost, began, group)
        self._state.events = events
        self._state.root = root
        self._state.stepped = _stepped(found)
        self._state.objects = list(found.objects.values())
        self._objects = {**found.objects, "main_values": self._state}
        self._checkpointer = Checkpointer(root, **self._objects)
        # Who has not made the last step by then may wait for what lies behind this loop.
        self._checkpointer.patience_s = patience()
        events.emit("script_kept", root=root, objects=", ".join(sorted(found.objects)))
        if group.rank == 0:
            say(f"this script is kept in {root}: {', '.join(sorted(found.objects))}")
        make = functools.partial(State, self._objects, rank=0, world_size=1)
        self._checks = [SelfCheck(make, clock=nest.reads_clock) for _ in range(2 if outermost.site.outer else 1)]
        self._child: SelfCheck | None = None
        self.count = _Count()
        self.by_hand = "optimizer" not in found.objects
        self._pending: dict[str, Any] | None = None
        self._number = self.unsaved = -1
        self.generators: dict[str, str] = {}
        self.workers: StayingWorkers
        self._ended = self._taken_up = False
        self._cleared: dict[int, frozenset[int]] = {}
        models = self._objects["model"]
        models = models if isinstance(models, list) else [models]
        self._state.loses_gradients = any(map(fsdp1.units_of, models))
        self._untouched = Untouched(models)

    def watch(self, files: FileWatch | None) -> None:
        """Watches what the script reads and writes from here on."""
        self._state.files = files
        if files is not None:
            files.loop_begins()

    @property
    def looks(self) -> bool:
        """Tell whether anything of this run is, or may be, saved."""
        return not self._ended

    def begin(self, adopt: Any) -> bool:
        """The outermost loop asks for its first item: goes to what was saved; False, and told why, if that cannot be.

        Args:
            adopt: called in the child that rehearses.
        """
        self._state.randomness = packed_randomness()
        self._state.generators = noted(self.generators, self._outermost.generators, generators())
        reason = _why_not_rehearsed(self._objects)
        for check in self._checks:
            if reason:
                check.reason = reason
                continue
            check.begin(self._objects)
            if check.child:
                adopt()
                self._parents, self._child, self._checks = (
                    self._checks,
                    check,
                    [],
                )  # their lines must not be collected here
                check.taken()
                self._pending = self._state.restored
                assert self._pending is not None
                put_randomness(self._pending["randomness"])
                return True
        self._state.rehearses(self._checks[0].reason)
        try:
            self._checkpointer.restore()
        except MismatchError:
            if not is_foreign(self._group, self._state.refused, self._root, self._events):
                raise
            self._end_checks()
            self._checkpointer.abandon()
            self._ended = True
            self.count.close()
            return False
        self._state.all_are_here()
        if self._state.restored is not None and self._state.restored["position"]:
            self._end_checks()  # the run that saved made them
            self._state.rehearsed = True
            self._taken_up = True
            if self._state.put_back and self._group.rank == 0:
                say(
                    f"{', '.join(map(repr, self._state.put_back))}: set to what the run that saved had, the name of another start"
                )
            self._pending = self._state.restored
            self._state.randomness = self._pending["randomness"]
            put_randomness(self._state.randomness)
        return True

    def goes_on(self) -> None:
        """The script goes on to where only one that took up its version may be."""
        if self._pending is not None:
            self.unfit("the statements before the loop that was saved went another way")

    def unfit(self, reason: str) -> None:
        """Raises that the version cannot be taken up.

        Raises:
            Unfit: always.
        """
        if self._child is not None:
            self._child.refused(reason)
        self._end_checks()
        self._untouched.end()
        self._ended = True
        self.count.close()
        self._checkpointer.abandon()
        raise Unfit(reason)

    def goes_in(self) -> None:
        """An item of an outer loop begins: the statements up to the inner loop run, which a restart makes again."""
        if not self._ended:
            self._untouched.begin()

    def comes_out(self) -> None:
        """An item of an outer loop is done."""
        self._untouched.end()

    def enter(self, entries: Sequence[Entry], site: Site, frame: FrameType) -> Entry | None:
        """Returns a loop that begins inside of others; None if nothing is saved any more."""
        if used := self._untouched.end():
            used = (
                f"{used} before the loop of line {site.line}, in a turn of that of line {entries[-1].site.line}: a restart in the "
                f"inner loop would do that again, with parameters of a later step"
            )
            if self._pending is not None:
                self.unfit(used)
            self._state.doubt(used)
        try:
            entry = self._looker.enter(entries, site, frame)
        except Exception as error:  # noqa: BLE001 - objects of other people are asked, and the script must run
            self._give_up(f"what it holds cannot be looked at: {type(error).__name__}: {error}")
            pass_on(error)
            return None
        changed = entry.changes.between_fixed(self._looker.look([*entries, entry]))
        if changed and self._pending is not None:
            self.unfit(changed)
        self._state.doubt(changed)
        if entry.before.unknown and self._checks and self._checks[0].reason:
            self._state.doubt(unknown(entry.changes, self._checks[0].reason))
        entry.drawn = drawn()
        return None if self._stopped() else entry

    def outer_begins(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        """Returns what the item began with that was saved, with everything as it was then; None without a version."""
        if self._pending is None:
            return None
        *_, entry = entries
        depth = len(entries) - 1
        if len(self._pending["position"]) <= depth + 1:
            self.unfit(f"the loop of line {entry.site.line} runs inside of others otherwise than in the run that saved")
        self._goes_to(entry, depth)
        start: dict[str, Any] = self._pending["starts"][depth]
        assert entry.items is not None
        if entry.items.digest() != start["digest"]:
            self.unfit(f"the items of the loop of line {entry.site.line} are others than in the run that saved")
        look = self._looker.look(entries)
        try:
            look.put(start["rows"], start["gone"])
        except KeyError as error:
            self.unfit(f"{error} was carried by the run that saved, and has no place now")
        if other := self.workers.restore(start.get("workers", b""), _loaders(look), _running(entries)):
            self.unfit(other)
        put_settings(self._state.objects, start["settings"])
        put_randomness(start["rng"])
        entry.start = start
        return start

    def item_begins(self, entries: Sequence[Entry]) -> None:
        """An outer loop asks for its next item."""
        self.goes_on()
        if not self._ended:
            entries[-1].start = self._state.start_of(entries)
            if self.workers.any_begun():
                found = _loaders(self._looker.look(entries))
                entries[-1].start["workers"] = self.workers.states(found, _running(entries))
                self._state.doubt(self.workers.reason)
            self._stopped()

    def inner_begins(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        """Returns the version that was taken up, if there is one."""
        *_, entry = entries
        names = entry.names()
        self._cleared[entry.site.number] = proven(
            entry.site.gradients, functools.partial(_resolved, names, entry.site), self._state.stepped
        )
        if self._pending is None:
            return None
        version, depth = self._pending, len(entries) - 1
        saved = version["position"]
        if len(saved) != depth + 1:
            self.unfit(f"the loop of line {entry.site.line} runs inside of others otherwise than in the run that saved")
        made = saved[depth][3]
        if depth and (path := _first_difference(made, entry.made)):
            self.unfit(
                f"{path!r} was made before the loop of line {entry.site.line}, and is not what it was in the run that saved"
            )
        if depth and saved[depth][4] != entry.drawn:
            self.unfit(
                f"random numbers before the loop of line {entry.site.line} are others than in the run that saved"
            )
        if any(saved[depth][6:7]):  # what a generator reads is as the steps left it, before it is taken again
            try:
                self._looker.look(entries).put(version["rows"], version["gone"])
            except KeyError as error:
                self.unfit(f"{error} was carried by the run that saved, and has no place now")
        self._goes_to(entry, depth)
        assert entry.items is not None
        if entry.items.digest() != saved[depth][5]:
            self.unfit(f"the items of the loop of line {entry.site.line} are others than in the run that saved")
        self._take_over(entries, version)
        if version.get("workers"):
            loaders = _loaders(self._looker.look(entries))
            if other := self.workers.restore(version["workers"], loaders, _running(entries)):
                self.unfit(other)
        if entry.items.told:
            say(f"the loop of line {entry.site.line}: {entry.items.told}")
        self._pending = None
        self._number = version["number"]
        return version

    def _goes_to(self, entry: Entry, depth: int) -> None:
        assert self._pending is not None
        assert entry.items is not None
        number, taken, shape = self._pending["position"][depth][:3]
        if number != entry.site.number or list(shape) != entry.items.shape:
            self.unfit(f"the loop of line {entry.site.line} is not the one that was saved, or goes over something else")
        if entry.items.refused:
            self.unfit(f"the loop of line {entry.site.line} cannot be taken up: {entry.items.refused}")
        try:
            entry.items.skip(taken)
        except StopIteration:
            self.unfit(f"the loop of line {entry.site.line} has fewer items than in the run that saved")
        except Exception as error:  # noqa: BLE001 - the script's own code is run again, where it does not expect it
            why = f"the items of the loop of line {entry.site.line} cannot be taken again"
            try:
                self.unfit(f"{why}: {type(error).__name__}: {error}")
            finally:
                pass_on(error)
        entry.taken = taken

    def _take_over(self, entries: Sequence[Entry], version: dict[str, Any]) -> None:
        """Everything as the version has it, and compared with it."""
        *_, entry = entries
        self._state.placing = self._looker.look(entries)
        try:
            if self._child is not None:
                self._child.take_again()
            else:
                self._checkpointer.restore()
        except KeyError as error:
            self.unfit(f"{error} was carried by the run that saved, and has no place now")
        self._state.placing = None
        self._state.all_are_here()
        living_gradients.put(self._state.stepped, version.get("gradients", {}))
        changed = entry.changes.now()
        path = differing(version["rows"], changed)
        if changed.reason or path:
            self.unfit(changed.reason or f"{path!r} is not what it was in the run that saved")

    def made(self, entries: Sequence[Entry]) -> None:
        """An optimizer has stepped in the item that is done."""
        if self._ended:
            return
        *_, entry = entries
        number = self._number + 1
        self._state.rehearsed = (
            self._taken_up or self._child is not None or bool(self._checks and not self._checks[0].reason)
        )
        self._state.workers = self.workers.moved(lambda: _loaders(self._looker.look(entries)), _running(entries))
        self._state.doubt(self.workers.why_unsure([each.items for each in entries if each.items is not None]))
        if not self._state.note(entries, number, self._cleared.get(entry.site.number, frozenset())):
            if self._child is None:
                say(f"the last step of the loop of line {entry.site.line} is made again after a failure behind it")
            return
        self._number = number
        if self._child is not None:
            self._child.told({})
            return
        for index, check in enumerate(self._checks):
            if index == 0 or entries[0].taken:
                self._state.doubt(differs(check.made(number, {})))
        if not self._taken_up and self._checks and (reason := self._checks[0].reason):
            self._state.rehearses(reason)
            relied = next((each.changes for each in entries if each.before.unknown), None)
            self._state.doubt(unknown(relied, reason) if relied is not None else "")
        if self._state.spoiled and self._state.alone:
            self._checkpointer.save(number, "durable")  # it says of itself that it is not to be taken
        if self._stopped():
            return
        if any(check.pending for index, check in enumerate(self._checks) if index == 0 or entries[0].taken):
            self.unsaved = number
        else:
            self._save(number)

    def _save(self, number: int) -> None:
        self._checkpointer.step(number)
        if self.by_hand:
            self._checkpointer.settle()  # no step of an optimizer waits for the copy

    def inner_ends(self, entry: Entry, *, again: bool) -> None:
        """An innermost loop has no more items; everything is as behind its last step."""
        if not again:
            self._state.ends(entry)
        if self.unsaved >= 0 and not self._ended:
            self._save(self.unsaved)
        elif again and self._child is None:
            say(f"the loop of line {entry.site.line} has made all its steps; what lies behind it runs")
            self._checkpointer.save(self._number, "durable")  # it may lie in memory alone
        self.unsaved = -1

    def _stopped(self) -> bool:
        """Tell whether nothing is saved any more; ends all that is open if so."""
        if self._state.unsure and self._state.alone and not self._ended:
            if self._child is not None:
                self._child.refused(self._state.unsure)
            self._give_up("")
        return self._ended

    def _give_up(self, reason: str) -> None:
        self._state.doubt(reason)
        if not self._state.alone:
            return
        self._ended = True
        self._end_checks()
        self.count.close()
        _close(self._checkpointer)  # what was saved before that is right

    def fails(self, error: Exception) -> None:
        """An error of ours, or of the items: the child that rehearses tells it."""
        if self._child is not None:
            self._child.refused(f"{type(error).__name__}: {error}")

    def end(self, *, in_order: bool) -> None:
        """The outermost loop is left."""
        if self._child is not None:
            os._exit(0)  # nothing more of the script runs here
        self._untouched.end()
        if self._ended:
            return
        self._ended = True
        self._end_checks()
        self.count.close()
        if in_order:
            _close(self._checkpointer)
        else:  # left by an error: what was saved counts
            self._checkpointer.__exit__(UsageError, None, None)

    def _end_checks(self) -> None:
        for check in self._checks:
            check.end()


def _loaders(look: Look) -> dict[str, DataLoader[Any]]:
    """Returns the data loaders whose workers stay, by path."""
    found = {path: reference() for path, reference in look.loaders.items()}
    return {path: loader for path, loader in found.items() if loader is not None}


def _running(entries: Sequence[Entry]) -> set[int]:
    """Returns the `id` of data loaders that loops go over which run now."""
    return {id(loader) for entry in entries if entry.items is not None for loader in entry.items.loaders}


def _close(checkpointer: Checkpointer) -> None:
    """The last step is durable, or it is said that it is not: what lies behind the loop runs in either case."""
    try:
        checkpointer.close()
    except LevelNotReached as error:
        pass_on(error)
        say(f"the last step is not durable: {error}")


def _why_no_look(frame: FrameType | None) -> str:
    """Returns why the names of the functions that run cannot be looked at; empty if they can."""
    while frame is not None:
        if user_frames.is_users(frame) and (line := user_frames.keeps_names(frame)):
            return kept_names(line)
        frame = frame.f_back
    return ""


def _why_not_rehearsed(objects: dict[str, Any]) -> str:
    if multiprocessing.active_children():
        return "the script has processes of its own, which do not survive a fork"
    return why_not(objects)


def _first_difference(saved: dict[str, str], now: dict[str, str]) -> str:
    return next((path for path in (*saved, *now) if saved.get(path) != now.get(path)), "")


def _resolved(names: dict[str, Any], site: Site, path: str) -> Any:
    """Returns what a path means where a loop stands; None if nobody knows, or if the loop sets it."""
    return None if path.partition(".")[0] in site.sets else meant(path, names)


def _stepped(found: Kept) -> list[torch.Tensor]:
    if "optimizer" not in found.objects:
        models = found.objects["model"]
        return [p for model in (models if isinstance(models, list) else [models]) for p in model.parameters()]
    optimizers = found.objects["optimizer"]
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _rest(items: Items) -> Iterator[Any]:
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        yield item
