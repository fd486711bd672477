"""Tells, of the body of a loop, which gradients every turn clears before anybody reads them.

    events = read(body, functions, methods)          # from the text: what is cleared and read, in order
    proven(events, resolve, parameters)              # when names have values: numbers (`id`) of the parameters that are surely cleared
    turn = turn_at(source, line)                     # the same of a turn that reports its step in this line
    judged(turn, resolve, parameters)                # those that are surely cleared, and those that the next turn may read

Gradients that are surely cleared need not be in a version: whatever they were, the next turn does not know. Who reads them: a step
of an optimizer (those of its own parameters), clipping and unscaling, whatever speaks of `.grad` (all). Functions and methods of
the script are followed where they are called in a statement of their own. What the text leaves open counts as not cleared.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from holdfast.checkpoint.usage.loop_analysis import loops_at, report_at, scope_at
from holdfast.checkpoint.usage.name_flow import TRY, Function, defined, stored

_MAX_DEPTH = 6
# Words of calls that read gradients besides `step`.
_READS = ("clip_grad", "unscale_", "get_total_norm", "clip_grad_norm_", "clip_grad_value_")
_PLAIN = (nn.Module.zero_grad, Optimizer.zero_grad)


@dataclass(frozen=True, slots=True)
class Cleared:
    """`path.zero_grad()`, or a loop that sets gradients to None."""

    path: str


@dataclass(frozen=True, slots=True)
class Read:
    """Gradients are read: of the optimizers among these paths; of all parameters if there is none."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of two ways."""

    one: tuple[Event, ...]
    other: tuple[Event, ...]


Event: TypeAlias = Cleared | Read | Either
_Names: TypeAlias = dict[str, str]


def read(
    body: Sequence[ast.stmt],
    functions: Mapping[str, Sequence[ast.AST]],
    methods: Mapping[str, Sequence[ast.AST]],
) -> tuple[Event, ...]:
    """Returns what is cleared and read, in order.

    Args:
        body: of the loop.
        functions: of the script, by name.
        methods: of its classes, by name.
    """
    return tuple(_Reader(functions, methods).run(body, None, 0))


def proven(
    events: Sequence[Event], resolve: Callable[[str], Any], parameters: Sequence[torch.Tensor]
) -> frozenset[int]:
    """Returns the numbers of the parameters whose gradients are cleared before they are read. `events` are those of one
    turn; `resolve` returns what a path means, None if nobody knows.
    """
    everything = frozenset(map(id, parameters))
    cleared, _ = _walk(events, resolve, everything, frozenset(), frozenset())
    return cleared


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the innermost loop around a report of a step.

    Attributes:
        events: what is cleared and read in it, in order; the report is none of it.
        around: the same of what the loops around it run besides.
        sets: names that these loops may set, and attributes, each with a dot before it.
        keeps: whether the next turn begins behind the report.
        over: what the loops go over.
        paths: all of them.
    """

    events: tuple[Event, ...]
    around: tuple[Event, ...]
    sets: frozenset[str]
    keeps: bool
    over: tuple[str, ...]
    paths: frozenset[str]


def turn_at(source: str, line: int) -> Turn | None:
    """Returns what the turn does that reports its step in a line; None where no loop is around it.

    Raises:
        SyntaxError: the text is no Python.
    """
    tree = ast.parse(source)
    scope = scope_at(tree, line)
    loops, report = loops_at(scope, line), report_at(scope, line)
    if not loops or report is None:
        return None
    functions, methods = defined(tree)
    reader = _Reader(functions, methods, without=report)
    besides = [
        statement
        for loop, inner in pairwise(loops)
        for statement in loop.body
        if all(node is not inner for node in ast.walk(statement))
    ]
    events, around = tuple(reader.run(loops[-1].body, None, 0)), tuple(reader.run(besides, None, 0))
    over = tuple(path for loop in loops for path in _gone_over(loop))
    return Turn(
        events,
        around,
        frozenset(stored([loops[0]]) | _set_elsewhere(tree, loops[0])),
        _is_last(loops, report),
        over,
        frozenset(path for event in (*events, *around) for path in _paths(event)) | {*over},
    )


def judged(
    turn: Turn, resolve: Callable[[str], Any], parameters: frozenset[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Returns which gradients the next turn seems to clear before it reads them, and which it may read, whichever way it goes, as they are.

    The first ones are a guess: what a text calls may be something else, and what it calls in other files is not seen. Of the second ones
    too many may be there. None is cleared between the report and the next turn: there is nothing between them.

    Args:
        turn: what the text says.
        resolve: returns what a path means; None if nobody knows.
        parameters: numbers of all.
    """
    nothing = frozenset[int]()
    cleared, _ = _walk(turn.events, resolve, parameters, nothing, nothing)
    _, read = _walk(turn.events, resolve, parameters, nothing, nothing, surely=False)
    _, read_around = _walk(turn.around, resolve, parameters, nothing, nothing)
    keeps = (
        turn.keeps
        and all(_of(resolve(path)) for path in _cleared_by(turn.events))
        and all(isinstance(resolve(path), DataLoader | list | tuple) for path in turn.over)
    )
    return cleared - read_around, read if keeps else nothing


def _paths(event: Event) -> Iterator[str]:
    if isinstance(event, Either):
        yield from (path for part in (*event.one, *event.other) for path in _paths(part))
    else:
        yield from (event.path,) if isinstance(event, Cleared) else event.paths


def _cleared_by(events: Sequence[Event]) -> Iterator[str]:
    for event in events:
        if isinstance(event, Cleared):
            yield event.path
        elif isinstance(event, Either):
            yield from _cleared_by([*event.one, *event.other])


def _set_elsewhere(tree: ast.Module, loop: ast.AST) -> set[str]:
    """Returns names that functions of a file may set beyond themselves, and with a dot before it each attribute that they or a loop set."""
    begins = {id(part) for node in ast.walk(tree) if _is_begin(node) for part in ast.walk(node)}
    functions = [node for node in ast.walk(tree) if isinstance(node, Function | ast.Lambda)]
    nodes = [part for node in (loop, *functions) for part in ast.walk(node) if id(part) not in begins]
    names = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)}
    return names | {f".{attribute}" for attribute in attributes}


def _is_begin(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def _is_last(loops: Sequence[ast.AST], report: ast.Call) -> bool:
    """Tell whether nothing of these loops runs between a report and the next turn, but for what they go over."""
    for loop, inside in zip(loops, (*loops[1:], report), strict=True):
        last: ast.AST = loop
        while isinstance(last, ast.For | ast.While | ast.If) and last is not inside:
            if last.orelse or (last is not loop and not isinstance(last, ast.If)):
                return False
            last = last.body[-1]
        if (last.value if isinstance(last, ast.Expr) else last) is not inside:
            return False
    return True


def _gone_over(loop: ast.AST) -> tuple[str, ...]:
    """Returns what a loop goes over by name, but for a `range` and what is counted; `?` of what is no name."""
    if not isinstance(loop, ast.For):
        return ()
    over = loop.iter
    word = over.func.id if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) else ""
    if word == "range":
        return ()
    if word == "enumerate" and isinstance(over, ast.Call) and over.args:
        over = over.args[0]
    return (ast.unparse(over) if isinstance(over, ast.Name | ast.Attribute) else "?",)


def _walk(
    events: Sequence[Event],
    resolve: Callable[[str], Any],
    everything: frozenset[int],
    cleared: frozenset[int],
    lost: frozenset[int],
    *,
    surely: bool = True,
) -> tuple[frozenset[int], frozenset[int]]:
    """Returns what is cleared, and what was read before: on all ways, or on one; and on one, or on all."""
    for event in events:
        if isinstance(event, Cleared):
            cleared |= (_of(resolve(event.path)) & everything) - lost
        elif isinstance(event, Either):
            one, lost_one = _walk(event.one, resolve, everything, cleared, lost, surely=surely)
            other, lost_other = _walk(event.other, resolve, everything, cleared, lost, surely=surely)
            lost = lost_one | lost_other if surely else lost_one & lost_other
            cleared = (one & other if surely else one | other) - lost
        else:
            things = [resolve(path) for path in event.paths]
            optimizers = [thing for thing in things if isinstance(thing, Optimizer)]
            if any(isinstance(thing, LRScheduler) for thing in things):
                continue
            read = frozenset().union(*map(_parameters, optimizers)) if optimizers else everything
            lost |= read - cleared
    return cleared, lost


def _parameters(thing: Any) -> frozenset[int]:
    if isinstance(thing, nn.Module):
        return frozenset(map(id, thing.parameters()))
    if isinstance(thing, Optimizer):
        return frozenset(id(p) for group in thing.param_groups for p in group["params"])
    return frozenset()


def _of(thing: Any) -> frozenset[int]:
    return _parameters(thing) if getattr(type(thing), "zero_grad", None) in _PLAIN else frozenset()


class _Reader:
    """Reads statements; names are those of the loop's frame, through what functions call them."""

    def __init__(
        self,
        functions: Mapping[str, Sequence[ast.AST]],
        methods: Mapping[str, Sequence[ast.AST]],
        without: ast.Call | None = None,
    ) -> None:
        self._functions, self._methods, self._without = functions, methods, without

    def run(self, body: Sequence[ast.stmt], names: _Names | None, depth: int) -> list[Event]:
        found: list[Event] = []
        for number, statement in enumerate(body, 1):
            found += self._one(statement, names, depth)
            if isinstance(statement, ast.Continue | ast.Break | ast.Return):
                break
            # A turn that is left reads nothing either; a function that is left goes back to what reads.
            if depth and any(isinstance(node, ast.Return) for node in ast.walk(statement)):
                return [*found, Either(tuple(self.run(body[number:], names, depth)), ())]
        return found

    def _one(self, statement: ast.stmt, names: _Names | None, depth: int) -> list[Event]:
        if isinstance(statement, Function | ast.ClassDef):
            return []
        if isinstance(statement, ast.With | ast.AsyncWith):
            heads = [event for item in statement.items for event in self._expression(item.context_expr, names, depth)]
            return [*heads, *self.run(statement.body, names, depth)]
        if isinstance(statement, ast.If):
            one, other = self.run(statement.body, names, depth), self.run(statement.orelse, names, depth)
            if _leaves(statement.body) or _leaves(statement.orelse):  # the rest may not be run
                return [*self._expression(statement.test, names, depth), *_reads_of([*one, *other])]
            return [*self._expression(statement.test, names, depth), Either(tuple(one), tuple(other))]
        if (over := sets_none(statement)) is not None:
            return [Cleared(self._path(over, names))]
        if isinstance(statement, (ast.For, ast.While, ast.AsyncFor, ast.Match, *TRY)):
            return _reads_of(
                [event for part in ast.iter_child_nodes(statement) for event in self._any(part, names, depth)]
            )
        return [event for part in ast.iter_child_nodes(statement) for event in self._expression(part, names, depth)]

    def _any(self, node: ast.AST, names: _Names | None, depth: int) -> list[Event]:
        if isinstance(node, ast.stmt):
            return self._one(node, names, depth)
        if isinstance(node, ast.ExceptHandler | ast.match_case):
            return self.run(node.body, names, depth)
        return self._expression(node, names, depth)

    def _expression(self, node: ast.AST, names: _Names | None, depth: int) -> list[Event]:
        """Returns the events of an expression, those of its parts first."""
        if isinstance(node, ast.Lambda):
            return []
        found = [event for part in ast.iter_child_nodes(node) for event in self._expression(part, names, depth)]
        if isinstance(node, ast.IfExp | ast.BoolOp | ast.comprehension | ast.ListComp | ast.GeneratorExp):
            found = _reads_of(found)
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            found.append(Read(()))
        if isinstance(node, ast.Call) and node is not self._without:
            found += self._call(node, names, depth)
        return found

    def _call(self, call: ast.Call, names: _Names | None, depth: int) -> list[Event]:
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if method == "zero_grad" and isinstance(call.func, ast.Attribute):
            return [Cleared(self._path(call.func.value, names))]
        if method == "step" and isinstance(call.func, ast.Attribute):
            own = self._path(call.func.value, names)
            return [*self._closures(call, names, depth), Read((own, *(self._path(part, names) for part in call.args)))]
        if (method or name).startswith(_READS):
            return [Read(())]
        targets = self._methods.get(method, ()) if method else self._functions.get(name, ())
        if not targets:
            return []
        if len(targets) > 1 or depth >= _MAX_DEPTH or not _is_plain(targets[0]):
            return _reads_of([event for target in targets for event in self._inside(target)])
        function = cast("Function", targets[0])
        return self.run(function.body, self._passed(call, function, names, is_method=bool(method)), depth + 1)

    def _closures(self, call: ast.Call, names: _Names | None, depth: int) -> list[Event]:
        """Returns the events of a function that `step` is given: it clears, computes, and is followed by the step."""
        for part in call.args:
            targets = self._functions.get(part.id, ()) if isinstance(part, ast.Name) else ()
            if len(targets) == 1 and isinstance(targets[0], Function):
                local = stored(targets[0].body)
                own = dict.fromkeys(local, "?") if names is None else {**dict.fromkeys(local, "?"), **names}
                return self.run(targets[0].body, own if local or names is not None else None, depth + 1)
        return []

    def _inside(self, target: ast.AST) -> list[Event]:
        words = {node.attr for node in ast.walk(target) if isinstance(node, ast.Attribute)}
        reads = words & {"step", "grad"} or any(word.startswith(_READS) for word in words)
        return [Read(())] if reads else []

    def _passed(self, call: ast.Call, function: Function, names: _Names | None, *, is_method: bool) -> _Names:
        """Returns what the names of a function are called where the loop stands; `?` if nobody knows."""
        own = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        found = dict.fromkeys({*own, *stored(function.body), *(a.arg for a in function.args.kwonlyargs)}, "?")
        given = list(call.args)
        if is_method and isinstance(call.func, ast.Attribute) and own:
            given.insert(0, call.func.value)
        for name, value in zip(own, given, strict=False):
            if isinstance(value, ast.Starred):
                break
            found[name] = self._path(value, names)
        for word in call.keywords:
            if word.arg:
                found[word.arg] = self._path(word.value, names)
        reset = stored(function.body)
        return {name: "?" if name in reset else path for name, path in found.items()}

    def _path(self, node: ast.expr, names: _Names | None) -> str:
        """Returns how the loop's frame calls this; `?` if it is no plain path."""
        if isinstance(node, ast.Name):
            return names.get(node.id, node.id) if names is not None else node.id
        if isinstance(node, ast.Attribute):
            inner = self._path(node.value, names)
            return inner if inner == "?" else f"{inner}.{node.attr}"
        return "?"


def _reads_of(events: Sequence[Event]) -> list[Event]:
    """Returns what may be read on ways that need not be gone, and that something is cleared there."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, Either):
            found += _reads_of([*event.one, *event.other])
        else:  # whose gradients are cleared then is nothing that anybody may count on
            found.append(event if isinstance(event, Read) else Cleared("?"))
    return found


def _is_plain(target: ast.AST) -> bool:
    """Tell whether a call of this runs what it says, and nothing around it."""
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(target))
    return isinstance(target, ast.FunctionDef) and not target.decorator_list and not yields


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Return | ast.Continue | ast.Break) for part in body for node in ast.walk(part))


def sets_none(statement: ast.stmt, of: ast.expr | None = None) -> ast.expr | None:
    """Returns whose gradients are set to None by loops over `x.parameters()` or `x.param_groups`; None if this is no such loop."""
    if isinstance(statement, ast.For):
        over = statement.iter
        if isinstance(over, ast.Call) and not (over.args or over.keywords):
            over = over.func
        if isinstance(over, ast.Attribute) and over.attr in ("parameters", "param_groups"):
            of = over.value
        return sets_none(statement.body[0], of) if len(statement.body) == 1 else None
    sets = (
        isinstance(statement, ast.Assign)
        and any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in statement.targets)
        and isinstance(statement.value, ast.Constant)
        and statement.value.value is None
    )
    return of if sets else None
