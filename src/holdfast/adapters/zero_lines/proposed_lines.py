"""Writes the lines that would keep a script which zero lines refuse, with the names that the script itself has.

    these lines keep it, a save for each turn of the loop of line 12; try them with `holdfast prove`:
      before line 12: |import holdfast; ckpt = holdfast.Checkpointer('ckpts', model=net, optimizer=opt)
      before line 12: |first = ckpt.restore(); best = ckpt.carry('best', best)
      line 12 becomes: |for epoch in range(first, args.epochs):
      behind line 30: |    ckpt.step(epoch, best=best)
      behind line 30: |ckpt.close()

Looked for where an optimizer steps first behind a refusal: the outermost loop of the user's code that runs then, in whatever file, and
what names mean there. A turn of that loop is a step, so nothing has to be known of loops inside it. What lives from turn to turn
is carried. Where something that does cannot be, or the loop goes over what cannot be taken up, no lines are given, and that is said.
"""

from __future__ import annotations

import ast
import collections
import dis
import io
import linecache
import os
import queue
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.adapters.zero_lines.accelerate_lines import MODULE, Wrapped, wrapped_by
from holdfast.adapters.zero_lines.nested.nested_script import kept_names
from holdfast.adapters.zero_lines.nested.written_names import written
from holdfast.adapters.zero_lines.reach.attributes import attributes_of, has_a_reader, is_output, is_progress_bar
from holdfast.adapters.zero_lines.reach.memory import spans_of
from holdfast.adapters.zero_lines.reach.plain_values import is_plain
from holdfast.adapters.zero_lines.reach.reach import Reach
from holdfast.base.events import Events
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.containers import items_of
from holdfast.checkpoint.entries.carried_tensors import is_carried
from holdfast.checkpoint.entries.rng import random_state
from holdfast.checkpoint.state.stateful import is_stateful
from holdfast.checkpoint.usage import user_frames
from holdfast.checkpoint.usage.in_place import CHANGES
from holdfast.checkpoint.usage.loop_analysis import around, scope_at
from holdfast.checkpoint.usage.name_flow import Function, Functions, Reader, loaded, own, stored

# So deep objects are looked for, and so many parts of a container.
MAX_DEPTH, MAX_PARTS = 2, 64
_SEQUENCES = (list, tuple, range, str)
# Reasons that no line removes: structures that change, files, state that nobody has found, memory that two have a part of.
_BEYOND = (
    "'the tensors of", "'the modules of", "'the parameter groups of", "a file, is", "a rehearsal of a restart", "torch's settings",
    "the working directory", "goes into the training", "share memory, and may be written", "share memory with each other",
    "that is kept by itself",
)  # fmt: skip
_UNSURE, _UNREHEARSED = "nobody can be sure what", "the first steps are not rehearsed"
# What is only written to.
_WRITERS = ("a writer,", "a DictWriter,", "a SummaryWriter,")
_CHANGED = re.compile(r"(['\"])(.+?)\1(?: \(line \d+\))? (?:changes in|came to be in|is taken away in|becomes )")
# What a line would make a copy of.
_ALIAS = re.compile(r"'(\w+)' lives from one turn to the next, and shares memory with")
_NAMES = ("ckpt", "keeper", "holdfast_ckpt")
_FIRST = ("first", "first_turn", "holdfast_first")


@dataclass(frozen=True, slots=True)
class Line:
    """One line: where it stands, and its text with the spaces before it."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: |{self.text}"


@dataclass(frozen=True, slots=True)
class Proposal:
    """The lines for one script.

    Attributes:
        file: of the loop.
        loop: line of it.
        lines: in the order of the text.
        notes: what they do not do.
    """

    file: str
    loop: int
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    def shown(self) -> list[str]:
        """Returns what is said, line by line."""
        head = (
            f"these lines keep it, a save for each turn of the loop of line {self.loop} of {os.path.basename(self.file)}; try "
            f"them with `holdfast prove`:"
        )
        return [head, *(f"  {line}" for line in self.lines), *self.notes]


class NoLines(Exception):
    """No lines can be given; the message says why."""


class Proposer:
    """Waits for the next step of an optimizer, and says the lines, once.

    Args:
        root: directory or URL of the checkpoints.
        say: writes one line for the person who started the job.
        events: told `script_lines`.
        reason: why the script is not kept.
    """

    def __init__(self, root: str, say: Callable[[str], None], events: Events, reason: str) -> None:
        self._root, self._say, self._events, self._reason = root, say, events, reason
        self._pid = os.getpid()
        self._said = False
        self.end_all()
        self._handle: Any = register_optimizer_step_post_hook(self._stepped)
        self._waiting.append(self)

    _waiting: ClassVar[list[Proposer]] = []

    @classmethod
    def end_all(cls) -> None:
        """Nothing is said any more: the script has ended, or is kept by somebody else."""
        for each in list(cls._waiting):
            each.end()

    def end(self) -> None:
        """Waits no more; calling it again does nothing."""
        handle, self._handle = self._handle, None
        if self in self._waiting:
            self._waiting.remove(self)
        if handle is not None:
            handle.remove()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._said or self._handle is None or os.getpid() != self._pid:
            return
        self._said = True  # the hook is taken away later: torch goes over its hooks now
        try:
            shown = propose(sys._getframe(1), optimizer, self._root, self._reason).shown()
        except NoLines as error:
            shown = [f"no lines can be given that would keep it: {error}"]
        except Exception as error:  # noqa: BLE001 - objects of other people are asked, and the script must run
            pass_on(error)
            shown = [f"no lines can be given that would keep it: {type(error).__name__}: {error}"]
        self._events.emit("script_lines", lines="\n".join(shown))
        for line in shown:
            self._say(line)


def propose(frame: FrameType | None, optimizer: Optimizer, root: str, reason: str = "") -> Proposal:
    """Returns the lines for the loop that runs.

    Args:
        frame: where the optimizer steps, or what it was called from.
        optimizer: the one that steps.
        root: directory or URL of the checkpoints.
        reason: why the script is not kept: lines that do not meet it are none.

    Raises:
        NoLines: there is no loop of the user's, or something that lives from turn to turn cannot be carried.
    """
    place = _outermost(frame)
    if place is None:
        raise NoLines("its steps are made in no loop of the script")
    if line := user_frames.keeps_names(place[0]):
        raise NoLines(kept_names(line))
    found = _Text(*place, root, optimizer)
    unsure = _UNSURE in reason and not any(kind in reason for kind in _WRITERS)
    told = unsure and _UNREHEARSED in reason and found.wrapped is not None
    if any(words in reason for words in _BEYOND) or (unsure and not told):
        raise NoLines(reason)
    proposal = found.lines(optimizer)
    if (alias := _ALIAS.match(reason)) and found.carries(alias[1]):
        raise NoLines(reason)
    path = _CHANGED.match(reason)
    if path is not None and not found.carries(re.sub(r"^(the length of )?(\w+\(\)'*\.)?", "", path[2])):
        raise NoLines(f"{path[2]!r} changes in the loop, and is nothing that a line could carry")
    if told:
        note = f"they keep what the Accelerator has prepared, and what the script counts; {reason.partition(', and the')[0]}"
        return replace(proposal, notes=(*proposal.notes, note))
    return proposal


def _outermost(frame: FrameType | None) -> tuple[FrameType, ast.Module, ast.For | ast.While] | None:
    """Returns the outermost loop that runs, with its frame and its file."""
    found = None
    while frame is not None:
        if user_frames.is_users(frame):
            tree = ast.parse(user_frames.text(frame))
            loops = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.For | ast.While)
                and node.body[0].lineno <= frame.f_lineno <= (node.body[-1].end_lineno or 0)
                and scope_at(tree, node.lineno) is scope_at(tree, frame.f_lineno)
            ]
            if loops:
                found = frame, tree, min(loops, key=lambda node: node.lineno)
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break  # who started the script is no part of it
        frame = frame.f_back
    return found


@dataclass(slots=True)
class _Found:
    """The objects that hand out their state, by what the script calls them."""

    modules: dict[int, tuple[str, nn.Module]] = field(default_factory=dict)
    optimizers: dict[int, tuple[str, Optimizer]] = field(default_factory=dict)
    others: dict[int, tuple[str, Any]] = field(default_factory=dict)
    holders: dict[int, tuple[str, Any]] = field(default_factory=dict)


class _Text:
    """One loop with its surroundings.

    Args:
        frame: where it runs.
        root: directory or URL of the checkpoints.
        optimizer: the one that steps.

    Attributes:
        wrapped: the Accelerator that has prepared it; None if there is none.
    """

    def __init__(
        self, frame: FrameType, tree: ast.Module, loop: ast.For | ast.While, root: str, optimizer: Optimizer
    ) -> None:
        self._frame, self._tree, self._loop, self._root = frame, tree, loop, root
        self._source = user_frames.text(frame)
        self._names = {**frame.f_globals, **user_frames.own(frame)}
        self._reach = Reach(used=(), kept=(), named={})
        scope = scope_at(tree, loop.lineno)
        assert isinstance(scope, ast.Module | Function)
        self._scope = scope
        self._set = stored(loop.body) | (stored([loop.target]) if isinstance(loop, ast.For) else set())
        self._modules: dict[str, Any] = {}
        self._found: dict[str, None] = {}
        self.wrapped = wrapped_by(self._names, optimizer)
        self._words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}

    def lines(self, optimizer: Optimizer) -> Proposal:
        """Returns the lines."""
        loop = self._loop
        if loop.body[0].lineno == loop.lineno or any(
            isinstance(node, ast.Yield | ast.YieldFrom | ast.Await) for node in own(self._scope)
        ):
            raise NoLines(f"the loop of line {loop.lineno} stands in a generator, or on one line")
        found = around(self._source, loop.body[0].lineno, told=False)
        if found is None:
            raise NoLines(f"the loop of line {loop.lineno} cannot be read")
        reads = set(found.reads) | loaded([loop])
        objects = self._objects(reads, optimizer)
        called = [node for node in ast.walk(self._tree) if isinstance(node, Function) and node.name in reads]
        for node in (part for each in (loop, *called) for part in ast.walk(each)):
            if isinstance(node, ast.Attribute) and node.attr == "add_param_group":
                raise NoLines(f"line {node.lineno} adds parameters to an optimizer in the loop")
        self._require_no_places(reads, objects)
        modules = dict(self._of_modules(reads))
        lives = {*found.lives, *self._globals(reads), *self._left_unset(), *modules}
        carried = self._found = self._carried(lives, dict(found.changed), objects)
        self._require_own_memory(carried, objects)
        ckpt, first = (next(name for name in each if name not in self._words) for each in (_NAMES, _FIRST))
        header, number = self._header(first)
        guard = self._guard(number, {name for name in carried if name.isidentifier()})
        outside, inside = " " * loop.col_offset, " " * loop.body[0].col_offset
        key = {path: _key(path) for path in carried}
        takes = "".join(f"; {self._taking(path, ckpt, key[path])}" for path in carried)
        gives = "".join(f", {key[path]}={self._giving(path)}" for path in carried)
        needed = [MODULE if self.wrapped else "holdfast", *sorted({name for name in modules.values() if name})]
        imports, makes = (
            ", ".join(needed),
            f"{MODULE}.wrap({self.wrapped.name}, " if self.wrapped else "holdfast.Checkpointer(",
        )
        counts = f"; {first} += 1" if isinstance(loop, ast.While) else ""
        last = max(statement.end_lineno or 0 for statement in loop.body)
        end = loop.end_lineno or last
        before, behind = f"before line {loop.lineno}", f"behind line {last}"
        step = f"{ckpt}.step({number}{gives}){counts}"
        found_lines = [
            Line(
                before,
                f"{outside}import {imports}; {ckpt} = {makes}{', '.join([repr(self._root), *self._arguments(objects)])})",
            ),
            Line(before, f"{outside}{first} = {ckpt}.restore(){takes}"),
            *([Line(_becomes(loop), f"{outside}{header}")] if header else []),
            Line(behind, f"{inside}{f'if {guard}: ' if guard else ''}{step}"),
            Line(f"behind line {end}", f"{outside}{ckpt}.close()"),
        ]
        return Proposal(self._frame.f_code.co_filename, loop.lineno, tuple(found_lines), tuple(self._notes()))

    def carries(self, path: str) -> bool:
        """Tell whether a value is, or lies in, what the lines carry."""
        return any(path == each or path.startswith((f"{each}.", f"{each}[")) for each in self._found)

    def _notes(self) -> Iterator[str]:
        for name, value in sorted(self._names.items()):
            if (
                isinstance(value, io.IOBase)
                and str(getattr(value, "mode", "")).startswith("w")
                and not name.startswith("__")
            ):
                yield f"{name!r} is a file that a restart empties: open it with 'a' in place of 'w' to keep what is in it"

    # --- what is given ---------------------------------------------------------------------------------------------

    def _objects(self, reads: set[str], optimizer: Optimizer) -> _Found:
        found = _Found()
        seen: dict[int, Any] = {}
        here = [name for name in reads & self._names.keys() if not name.startswith("__")]
        names = sorted(
            here, key=lambda name: (name in self._set, name)
        )  # `optimizers` before the `o` that goes over them
        for name in names:
            self._visit(found, name, self._names[name], seen, 0)
        stepped = [p for _, each in found.optimizers.values() for group in each.param_groups for p in group["params"]]
        for name in sorted(self._names.keys() - set(names)):  # stepped through something else: a function, a class
            value = self._names[name]
            if isinstance(value, nn.Module) and {id(p) for p in value.parameters()} & {id(p) for p in stepped}:
                self._visit(found, name, value, seen, 0)
        if self.wrapped is not None:
            return self._not_wrapped(found, self.wrapped)
        if id(optimizer) not in found.optimizers:
            for name, value in self._names.items():
                if value is optimizer:
                    self._visit(found, name, value, seen, 0)
        if id(optimizer) not in found.optimizers:
            raise NoLines(
                f"the {type(optimizer).__name__} that steps has no name where the loop of line {self._loop.lineno} stands"
            )
        inside = {id(part) for _, module in found.modules.values() for part in module.modules() if part is not module}
        found.modules = {number: each for number, each in found.modules.items() if number not in inside}
        owned = {id(p) for _, module in found.modules.values() for p in module.parameters()}
        stepped = [p for _, each in found.optimizers.values() for group in each.param_groups for p in group["params"]]
        if any(id(p) not in owned for p in stepped):
            raise NoLines("an optimizer steps parameters of no module that has a name where the loop stands")
        for path, value in (*found.modules.values(), *found.optimizers.values(), *found.others.values()):
            root = path.partition(".")[0].partition("[")[0]
            if root in self._set:
                raise NoLines(
                    f"{path!r}, a {type(value).__qualname__}, is made anew in the loop of line {self._loop.lineno}, so nothing can be "
                    f"given to a Checkpointer before it"
                )
        return found

    def _not_wrapped(self, found: _Found, wrapped: Wrapped) -> _Found:
        """Returns what has to be given beside an Accelerator.

        Raises:
            NoLines: something trains that it has not prepared.
        """
        inside = _Found()
        for loader in wrapped.loaders:
            self._visit(inside, "", loader, {}, 0)
        for path, value in (*found.modules.values(), *found.optimizers.values()):
            if not wrapped.has(value):
                raise NoLines(f"{path!r}, a {type(value).__qualname__}, is not prepared by {wrapped.name!r}")
        others = {
            number: each
            for number, each in found.others.items()
            if not wrapped.has(each[1]) and number not in inside.others
        }
        return _Found(others=others, holders=found.holders)

    def _visit(self, found: _Found, path: str, value: Any, seen: dict[int, Any], depth: int) -> None:
        if id(value) in seen or is_plain(value) or depth > MAX_DEPTH or isinstance(value, type | types.ModuleType):
            return
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            if any(True for _ in (*value.parameters(), *value.buffers())) or value.state_dict():
                found.modules[id(value)] = path, value
        elif isinstance(value, Optimizer):
            found.optimizers[id(value)] = path, value
        elif isinstance(value, DataLoader | Sampler):
            for name in ("generator", "sampler"):
                self._visit(found, f"{path}.{name}", getattr(value, name, None), seen, depth)
        elif is_stateful(value) or random_state(value) is not None:
            found.others[id(value)] = path, value
        else:
            self._visit_parts(found, path, value, seen, depth + 1)

    def _visit_parts(self, found: _Found, path: str, value: Any, seen: dict[int, Any], depth: int) -> None:
        if isinstance(value, list | tuple | dict):
            parts = [*items_of(value)]
            for key, part in parts if len(parts) <= MAX_PARTS else ():
                self._visit(found, f"{path}[{key!r}]", part, seen, depth)
        elif self._reach.is_of_user(value) and not _is_code(value):
            if not isinstance(value, Dataset):
                found.holders[id(value)] = path, value
            for key, part in attributes_of(value).items():
                self._visit(found, f"{path}.{key}", part, seen, depth)

    def _arguments(self, found: _Found) -> list[str]:
        parts = [
            f"{name}={_one_or_many([path for path, _ in each.values()])}"
            for name, each in (("model", found.modules), ("optimizer", found.optimizers))
            if each
        ]
        used: set[str] = set()
        for path, _ in found.others.values():
            name = _key(path)
            while name in ("model", "optimizer", "path", "schedule") or name in used:
                name += "_"
            used.add(name)
            parts.append(f"{name}={path}")
        return parts

    # --- what is carried -------------------------------------------------------------------------------------------

    def _carried(self, lives: set[str], changed: dict[str, int], objects: _Found) -> dict[str, None]:
        """Returns the paths that live from turn to turn and are of no object that is given."""
        given = {path for each in (objects.modules, objects.optimizers, objects.others) for path, _ in each.values()}
        given |= {name for name, value in self._names.items() if self.wrapped and self.wrapped.has(value)}
        target = ast.unparse(self._loop.target) if isinstance(self._loop, ast.For) else ""
        found = {path: None for path in self._attributes(objects, given) if path != target}
        for path in (*sorted(lives), *sorted(changed)):
            if self._is_set_first(path):
                continue
            covered = any(
                path == each or path.startswith((f"{each}.", f"{each}[")) for each in (*given, *found, target)
            )
            value = self._value(path)
            if (
                covered
                or self._is_of_none(path)
                or is_progress_bar(value)
                or isinstance(value, nn.Module | Optimizer)
                or _is_code(value)
            ):
                continue
            if "." not in path and not self._has_value_before(path):
                raise NoLines(f"{path!r} lives from one turn of the loop to the next, and has no value before it")
            if not _is_saved(value):
                raise NoLines(
                    f"{path!r}, a {type(value).__qualname__}, lives from one turn of the loop of line "
                    f"{self._loop.lineno} to the next, and cannot be saved"
                )
            found[path] = None
        return found

    def _require_own_memory(self, carried: Iterable[str], objects: _Found) -> None:
        """Refuses to carry what has a part of the memory of something else: the lines would make two of one."""
        place: dict[int, str] = {
            first: path
            for path, thing in (*objects.modules.values(), *objects.optimizers.values())
            for first, end in spans_of(thing, gradients=False)
            if first < end
        }
        given, may_write = {*place.values()}, written(self._tree)
        for path in carried:
            value = self._value(path)
            is_tensor = isinstance(value, torch.Tensor)
            for first in {first for first, end in spans_of(value, gradients=False) if first < end}:
                # Of a container rather its list is written than its tensors: a buffer of what was seen.
                other = place.setdefault(first, path) if is_tensor else place.get(first, path)
                words = {re.split(r"\W", each)[0] for each in (path, other)}
                if other != path and (other in given or (is_tensor and words & may_write)):
                    raise NoLines(f"{path!r} and {other!r} share memory, of which a restart would make two")

    def _attributes(self, objects: _Found, given: set[str]) -> Iterator[str]:
        """Yields the attributes of the script's own objects that may change while the loop runs."""
        for path, value in objects.holders.values():
            if not self._changes_itself(value, path):
                continue
            for key, part in attributes_of(value).items():
                name = f"{path}.{key}"
                if name in given or self._is_data(part) or _is_code(part):
                    continue
                if not _is_saved(part):
                    raise NoLines(f"{name!r}, a {type(part).__qualname__}, may change in the loop, and cannot be saved")
                yield name

    def _globals(self, reads: set[str]) -> Iterator[str]:
        """Yields the names of the file that functions of it, which the loop calls, declare to be global and set."""
        for node in ast.walk(self._tree):
            if isinstance(node, Function) and (node.name in reads or node.name in self._methods()):
                for part in ast.walk(node):
                    if isinstance(part, ast.Global):
                        yield from (name for name in part.names if name in self._frame.f_globals)

    def _methods(self) -> set[str]:
        return {node.attr for node in ast.walk(self._tree) if isinstance(node, ast.Attribute)}

    def _changes_itself(self, value: Any, path: str) -> bool:
        """Tell whether an object of the user's may change while the loop runs: a method sets attributes, or the file does."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == path:
                return True
        for kind in type(value).__mro__:
            for method in vars(kind).values():
                code = getattr(method, "__code__", None)
                if code is not None and method.__name__ != "__init__" and _stores(code):
                    return True
        return False

    def _is_data(self, value: Any) -> bool:
        return isinstance(value, Dataset | DataLoader | Sampler | nn.Module | Optimizer) or is_progress_bar(value)

    def _value(self, path: str) -> Any:
        if path in self._modules:
            return self._modules[path]
        name, *rest = path.split(".")
        value = self._names.get(name)
        for part in rest:
            value = getattr(value, part, None)
        return value

    def _is_set_first(self, name: str) -> bool:
        """Tell whether each turn sets a name before it reads it, both under one condition that no turn changes."""
        loop = self._loop
        places = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id == name]
        written = {
            ast.unparse(node)
            for node in ast.walk(loop)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        for first in (node for node in loop.body if isinstance(node, ast.If)):
            sets = [
                node for node in first.body if isinstance(node, ast.Assign) and name in stored([node]) - loaded([node])
            ]
            parts = [*ast.walk(first.test)]
            if not sets or any(isinstance(part, ast.Call | ast.NamedExpr | ast.Await) for part in parts):
                continue
            if loaded([first.test]) & self._set or written & {
                ast.unparse(part) for part in parts if isinstance(part, ast.Attribute)
            }:
                continue
            test = ast.unparse(first.test)
            same = [node for node in ast.walk(loop) if isinstance(node, ast.If) and ast.unparse(node.test) == test]
            inside = {id(part) for each in same for node in each.body for part in ast.walk(node)}
            return all(id(place) in inside and place.lineno >= sets[0].lineno for place in places)
        return False

    def _is_of_none(self, path: str) -> bool:
        """Tell whether a path is an attribute of nothing: an average that this run has not, a scaler that is off."""
        return "." in path and self._value(path.rpartition(".")[0]) is None

    def _left_unset(self) -> set[str]:
        """Returns the names that a turn may leave as they were, and that are read behind the loop: `best = ...` under an `if`."""
        targets = stored([self._loop.target]) if isinstance(self._loop, ast.For) else set()
        done = Reader(targets, Functions(self._tree)).body(self._loop.body)
        return {name for name in (self._set - done - targets) & self._read_behind() if self._has_value_before(name)}

    def _has_value_before(self, name: str) -> bool:
        """Tell whether a name is set before the loop, as far as the text says."""
        begin = self._loop.lineno
        nodes = [node for node in own(self._scope) if getattr(node, "lineno", begin) < begin]
        done = [node for node in nodes if isinstance(node, ast.stmt) and (node.end_lineno or 0) < begin]
        names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        if isinstance(self._scope, Function):
            names |= {argument.arg for argument in ast.walk(self._scope.args) if isinstance(argument, ast.arg)}
            names |= self._frame.f_globals.keys()
        return name in names | stored(done)

    def _read_behind(self) -> set[str]:
        """Returns the names that are read behind the loop, where it stands or in functions that are called there."""
        end = self._loop.end_lineno or 0
        names = loaded([node for node in own(self._scope) if isinstance(node, ast.stmt) and node.lineno > end])
        return names | (Functions(self._tree).reads(names) if self._scope is self._tree else set())

    def _require_no_places(self, reads: set[str], objects: _Found) -> None:
        """Refuses what has a place of its own that no version has: iterators, queues, caches.

        Raises:
            NoLines: there is such a thing.
        """
        given = {
            id(value) for each in (objects.modules, objects.optimizers, objects.others) for _, value in each.values()
        }
        things = {name: self._names[name] for name in sorted(reads & self._names.keys()) if name not in self._set}
        for path, holder in objects.holders.values():
            things |= {f"{path}.{key}": value for key, value in attributes_of(holder).items()}
        for path, value in things.items():
            if id(value) in given or isinstance(value, type) or (isinstance(value, io.IOBase) and value.closed):
                continue
            if is_output(value) and not has_a_reader(value):
                continue
            kind = type(value).__qualname__
            if (
                hasattr(value, "__next__")
                or isinstance(value, queue.Queue | queue.SimpleQueue)
                or kind == "_lru_cache_wrapper"
                or (_is_environment(value) and not self._reach.is_of_user(value))
            ):
                raise NoLines(f"{path!r}, a {kind}, has a place, or a memory, of its own that nobody can save")

    def _of_modules(self, reads: set[str]) -> Iterator[tuple[str, str]]:
        """Yields (path, what has to be imported for it) of what modules of the user's keep: `global` names, and what they fill."""
        main = self._frame.f_globals
        for name in sorted(reads & self._names.keys()):
            value = self._names[name]
            if isinstance(value, types.ModuleType):
                module: types.ModuleType | None = value
                path, needed = name, ""
            elif isinstance(value, types.FunctionType) and value.__globals__ is not main:
                module = sys.modules.get(value.__module__)
                path = needed = value.__module__
            else:
                continue
            if module is None or vars(module) is main or not self._reach.is_of_user_module(module.__name__):
                continue
            tree = ast.parse("".join(linecache.getlines(str(vars(module).get("__file__", "")))))
            for word in sorted(_kept_by(tree)):
                if word in vars(module) and not isinstance(vars(module)[word], types.ModuleType):
                    if not _is_saved(vars(module)[word]):
                        raise NoLines(
                            f"{path}.{word}, a {type(vars(module)[word]).__qualname__}, may change in the loop, and cannot be saved"
                        )
                    self._modules[f"{path}.{word}"] = vars(module)[word]
                    yield f"{path}.{word}", needed

    def _giving(self, path: str) -> str:
        return f"list({path})" if isinstance(self._value(path), collections.deque) else path

    def _taking(self, path: str, ckpt: str, key: str) -> str:
        if isinstance(self._value(path), collections.deque):
            call = f"type({path})({ckpt}.carry({key!r}, list({path})), {path}.maxlen)"
        else:
            call = f"{ckpt}.carry({key!r}, {path})"
        if path.isidentifier() and self._scope is not self._tree and path not in stored(self._scope.body):
            return f"globals().update({path}={call})"
        return f"{path} = {call}"

    # --- the loop --------------------------------------------------------------------------------------------------

    def _header(self, first: str) -> tuple[str, str]:
        """Returns the first line of the loop as it has to be, empty if it stays, and the number of a turn."""
        loop = self._loop
        if isinstance(loop, ast.While):
            return "", first
        target, over = ast.unparse(loop.target), loop.iter
        counted = _range_in(over)
        if (
            counted is not None
            and not counted.keywords
            and 1 <= len(counted.args) <= 2
            and isinstance(loop.target, ast.Name | ast.Attribute)
        ):
            text = ast.unparse(counted)
            if len(counted.args) == 1:
                new, number = f"range({first}, {ast.unparse(counted.args[0])})", target
            else:
                begin = ast.unparse(counted.args[0])
                new, number = f"{text}[{first}:]", f"{target} - ({begin})"
            return f"for {target} in {ast.unparse(over).replace(text, new, 1)}:", number
        value = self._names.get(over.id) if isinstance(over, ast.Name) else None
        if isinstance(over, ast.Name) and isinstance(value, _SEQUENCES) and over.id not in self._set:
            number = next(each for each in ("turn", "turn_number", "holdfast_turn") if each not in self._words)
            return f"for {number}, {_in_tuple(loop.target)} in list(enumerate({over.id}))[{first}:]:", number
        raise NoLines(
            f"the loop of line {loop.lineno} goes over {ast.unparse(over)!r}, whose place is in no version; lines can be given for a "
            f"loop over a range, a list, or a while"
        )

    def _guard(self, number: str, carried: set[str]) -> str:
        """Returns what has to hold for a save: another turn follows. Empty where what stands behind asks for nothing of the last turn."""
        loop = self._loop
        needed = (self._set & self._read_behind()) - carried
        if not needed:
            return ""
        if isinstance(loop, ast.While):
            if isinstance(loop.test, ast.Constant):
                return ""
            if any(isinstance(node, ast.Call | ast.NamedExpr | ast.Await) for node in ast.walk(loop.test)):
                raise NoLines(
                    f"{sorted(needed)[0]!r}, which the last turn of the loop of line {loop.lineno} sets, is read behind it"
                )
            return ast.unparse(loop.test)
        counted = _range_in(loop.iter)
        if counted is not None:
            if len(counted.args) == 1:
                return f"{number} + 1 < {ast.unparse(counted.args[0])}"
            return f"{ast.unparse(loop.target)} + 1 < {ast.unparse(counted.args[1])}"
        return f"{number} + 1 < len({ast.unparse(loop.iter)})"


def _is_environment(value: Any) -> bool:
    """Tell whether an object goes on by itself, and hands out no state: one of gymnasium, which has a `step` and a `reset`."""
    kind = type(value)
    methods = (getattr(kind, name, None) for name in ("step", "reset"))
    return all(map(callable, methods)) and not hasattr(kind, "state_dict")


def _is_saved(value: Any) -> bool:
    """Tell whether a Checkpointer can carry a value."""
    if isinstance(value, collections.deque):
        return type(value) is collections.deque and _is_saved(list(value))
    if type(value) is collections.OrderedDict:
        value = dict(value)
    return is_carried(value, is_plain) or (isinstance(value, torch.Tensor) and not value.is_leaf)


def _kept_by(tree: ast.Module) -> set[str]:
    """Returns the names of a module that its functions set, or fill."""
    names = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    top = stored([node for node in tree.body if not isinstance(node, Function | ast.ClassDef)])
    for function in ast.walk(tree):
        if not isinstance(function, Function):
            continue
        for node in ast.walk(function):
            filled: ast.expr | None = None
            if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                filled = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                filled = node.func.value
            if isinstance(filled, ast.Name) and filled.id in top:
                names.add(filled.id)
    return names


def _range_in(node: ast.expr) -> ast.Call | None:
    """Returns the `range(...)` that a loop goes over, also in a progress bar."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Name) and node.func.id == "range":
        return None if any(isinstance(argument, ast.Starred) for argument in node.args) else node
    if "tqdm" in ast.unparse(node.func) and node.args:
        return _range_in(node.args[0])
    return None


def _in_tuple(node: ast.expr) -> str:
    return (
        f"({ast.unparse(node)})"
        if isinstance(node, ast.Tuple) and not ast.unparse(node).startswith("(")
        else ast.unparse(node)
    )


def _becomes(loop: ast.For | ast.While) -> str:
    head = (loop.iter if isinstance(loop, ast.For) else loop.test).end_lineno or loop.lineno
    return f"line {loop.lineno} becomes" if head == loop.lineno else f"lines {loop.lineno} to {head} become"


def _one_or_many(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"[{', '.join(paths)}]"


def _key(path: str) -> str:
    """Returns a name for a path: `self.best` -> `self_best`."""
    word = "".join(letter if letter.isalnum() else "_" for letter in path).strip("_")
    while "__" in word:
        word = word.replace("__", "_")
    return word if word not in ("self", "step") else f"{word}_value"


def _stores(code: types.CodeType) -> bool:
    """Tell whether a method may change what it is called of: it sets attributes, or fills what is in one."""
    return any(line.opname in ("STORE_ATTR", "DELETE_ATTR") for line in dis.get_instructions(code)) or bool(
        {"append", "update", "add", "pop", "extend", "clear"} & set(code.co_names)
    )


def _is_code(value: Any) -> bool:
    return isinstance(
        value,
        type
        | types.FunctionType
        | types.MethodType
        | types.ModuleType
        | types.BuiltinFunctionType
        | torch.device
        | torch.dtype,
    )
