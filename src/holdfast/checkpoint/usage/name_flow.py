"""Tells, of a piece of Python text, which names it reads and sets, and in which order.

Pure: syntax trees in, sets of names out. Where the text leaves it open (a branch, a handler, a `continue` before the line) a
name counts as read and not as set, so that a loop carries rather one name too many. A function of the script that is
called, or that anybody may call, reads at that place what its own text reads.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
# Words that read a clock: what comes from one is no state of the training.
CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "datetime", "time_ns", "perf_counter_ns"}
# Functions that keep nothing of a dict.
_READERS = {"dict", "len", "list", "print", "repr", "set", "sorted", "str", "tuple"}
# `try` with `except`, and with `except*`.
TRY = (ast.Try, ast.TryStar) if sys.version_info >= (3, 11) else (ast.Try,)
_LEAVES = (ast.Continue, ast.Break, ast.Return)
_OWN_LOOP = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def last_name(node: ast.AST) -> str:
    """Returns the last name of `a.b`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def stored(nodes: Sequence[ast.AST]) -> set[str]:
    """Returns the names that are set, or deleted, in the scope of the nodes."""
    return {name for node in nodes for name, sets in _names(node) if sets}


def loaded(nodes: Sequence[ast.AST], without: ast.AST | None = None) -> set[str]:
    """Returns the names of the scope that are read, but not in `without`; `x += 1` reads x."""
    return {name for node in nodes for name, sets in _names(node, without) if not sets}


def _names(node: ast.AST, without: ast.AST | None = None) -> Iterator[tuple[str, bool]]:
    """Yields (name, whether it is set) of all names of this scope; names of comprehensions and lambdas are their own."""
    if node is without:
        return
    if isinstance(node, ast.Name):
        yield node.id, isinstance(node.ctx, ast.Store | ast.Del)
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, False
    yield from ((name, True) for name in _bound(node))
    own: set[str] = set()
    if isinstance(node, _COMPREHENSION):
        own = {n.id for part in node.generators for n in ast.walk(part.target) if isinstance(n, ast.Name)}
    elif isinstance(node, ast.Lambda):
        own = _arguments(node) | stored([node.body])
    elif isinstance(node, Function | ast.ClassDef):
        yield node.name, True
        inside = [found for part in ast.iter_child_nodes(node) for found in _names(part)]
        own = {name for name, sets in inside if sets} | _arguments(node)
        own -= {name for n in ast.walk(node) if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names}
    around = _around(node)
    for child in ast.iter_child_nodes(node):
        hidden = set() if child in around else own
        yield from ((name, sets) for name, sets in _names(child, without) if name not in hidden)
    if isinstance(node, _COMPREHENSION):
        yield from _names(node.generators[0].iter, without)


def _around(node: ast.AST) -> list[ast.AST]:
    """Returns the parts of a function that do not see its own names: defaults and decorators."""
    decorators = node.decorator_list if isinstance(node, Function) else []
    return [node.args, *decorators] if isinstance(node, Function | ast.Lambda) else []


def _arguments(node: ast.AST) -> set[str]:
    """Returns the names of a function's own arguments: those of functions and lambdas in it are theirs alone."""
    if not isinstance(node, Function | ast.Lambda):
        return set()
    given = node.args
    every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    return {argument.arg for argument in every if argument is not None}


def _bound(node: ast.AST) -> Iterator[str]:
    """Yields the names that a node sets without an `ast.Name`: of imports, handlers, patterns."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest


def own(scope: Scope) -> Iterator[ast.AST]:
    """Yields the nodes of a scope without those of functions and classes in it."""
    waiting: list[ast.AST] = list(scope.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def keeps_names(function: Function) -> int:
    """Returns the line in which a function may keep what `locals()` gave, or hand it on; 0 if it only reads it there and then."""
    calls = [node for node in own(function) if isinstance(node, ast.Call)]
    scopes = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("locals", "vars")]
    read = _read_in(function)
    kept = [*(call for call in scopes if not call.args), *_of_frames(function)]
    return next((node.lineno for node in kept if id(node) not in read), 0)


def keeps_names_of_others(function: Function) -> int:
    """Returns the line in which a function may keep, beyond its end, the names of one that called it; 0 if it does not."""
    read, kept = _read_in(function), _of_frames(function)
    ids = {id(node) for node in kept}
    nodes = list(own(function))
    open_names = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    for node in (each for each in nodes if isinstance(each, ast.Assign) and id(each.value) in ids):
        names = stored([node])
        parts = [part for target in node.targets for part in ast.walk(target)]
        if not names & open_names and all(
            isinstance(part, ast.Name | ast.Tuple | ast.Starred | ast.expr_context) for part in parts
        ):
            read.add(id(node.value))
            loads = (
                each for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
            )
            kept += [each for each in loads if each.id in names]
    return next((node.lineno for node in kept if id(node) not in read), 0)


def _of_frames(function: Function) -> list[ast.expr]:
    """Returns what asks a frame for its names."""
    found: list[ast.expr] = [
        node for node in own(function) if isinstance(node, ast.Attribute) and node.attr == "f_locals"
    ]
    calls = (node for node in own(function) if isinstance(node, ast.Call))
    return [
        *found,
        *(call for call in calls if "getargvalues" in (getattr(call.func, "attr", ""), getattr(call.func, "id", ""))),
    ]


def _read_in(function: Function) -> set[int]:
    """Returns the `id` of what a function keeps nothing of."""
    read = {id(part) for node in own(function) for part in _read_at_once(node)}
    calls = (node for node in own(function) if isinstance(node, ast.Call))
    return read | {
        id(call.func.value) for call in calls if isinstance(call.func, ast.Attribute) and _is_copy(call, read)
    }


def _read_at_once(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yields the values that a node keeps nothing of."""
    if isinstance(node, ast.Subscript | ast.Expr | ast.FormattedValue):
        yield node.value
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in _READERS:
            yield from node.args
        yield from (word.value for word in node.keywords if word.arg is None)
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
        yield node.generators[0].iter
    elif isinstance(node, ast.Compare):
        yield from node.comparators
    elif isinstance(node, ast.Dict):
        yield from (value for key, value in zip(node.keys, node.values, strict=True) if key is None)
    elif isinstance(node, ast.BinOp):
        yield node.right


def _is_copy(node: ast.Call, read: set[int]) -> bool:
    """Tell whether a method returns no part of the dict, or one that is read at once."""
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return method in ("copy", "get", "pop") or (method in ("items", "keys", "values") and id(node) in read)


Defined: TypeAlias = dict[str, list[ast.AST]]


def defined(tree: ast.Module) -> tuple[Defined, Defined]:
    """Returns by name the functions and lambdas of a script, and the methods of its classes. A class is called as its `__init__`."""
    methods: Defined = {}
    functions: Defined = {}
    inside: set[int] = set()
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef):
            own_methods = [part for part in kind.body if isinstance(part, Function)]
            inside.update(map(id, own_methods))
            for part in own_methods:
                methods.setdefault(part.name, []).append(part)
            functions[kind.name] = [part for part in own_methods if part.name == "__init__"]
    for node in ast.walk(tree):
        if isinstance(node, Function) and id(node) not in inside:
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    functions.setdefault(target.id, []).append(node.value)
    return functions, methods


class Functions:
    """The functions of a script, by name: what calls of them read.

    Attributes:
        by_name: functions, methods and lambdas that have a name; all that have it, for a name does not tell which one runs.
        ambient: names that functions read which anybody may call at any time: methods, and functions that are handed on.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.by_name: Defined = {}
        for node in ast.walk(tree):
            if isinstance(node, Function):
                self.by_name.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.by_name.setdefault(target.id, []).append(node.value)
        methods = {
            n.name for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, Function)
        }
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        handed = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in called
        }
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        self.ambient = self.reads((methods | handed) & self.by_name.keys()) | loaded(lambdas)

    def reads(self, names: set[str]) -> set[str]:
        """Returns what functions of these names read, and the functions of the script that they call."""
        found: set[str] = set()
        waiting, seen = list(names & self.by_name.keys()), set()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                inside = loaded(self.by_name[name])
                found |= inside
                waiting += inside & self.by_name.keys()
        return found


class Reader:
    """Goes through the statements of a loop's body in order.

    Args:
        known: names that are set before.
        functions: what calls read.
        exits: what is set where a step ends early; by default a list of its own.
        runs: the body of an inner loop, and of a `try`, counts as run once: for who tells rather one name too few.

    Attributes:
        early: names that are read where they may not have been set in this step.
    """

    def __init__(
        self, known: set[str], functions: Functions, exits: list[set[str]] | None = None, *, runs: bool = False
    ) -> None:
        self._known = known
        self._functions = functions
        self._exits: list[set[str]] = [] if exits is None else exits
        self._runs = runs
        self.early: set[str] = set()

    def body(self, statements: Sequence[ast.stmt]) -> set[str]:
        """Returns the names that every step has surely set when it ends, also one that ends by `continue` or `break`."""
        done = self.run(statements)
        return done.intersection(*self._exits)

    def run(self, statements: Sequence[ast.stmt]) -> set[str]:
        """Returns the names that are surely set where the statements are through."""
        done = set(self._known)
        for statement in statements:
            done = self._one(statement, done)
        return done

    def _one(self, statement: ast.stmt, done: set[str]) -> set[str]:
        if isinstance(statement, _LEAVES):
            self._exits.append(set(done))
        branches = [
            (branch, set[str]())
            for name in ("body", "orelse", "finalbody")
            if (branch := getattr(statement, name, None))
        ]
        branches += [(part.body, {part.name} - {None}) for part in getattr(statement, "handlers", ())]
        if isinstance(statement, Function | ast.ClassDef):
            self._read([statement], done)
            return done | {statement.name}
        cases = statement.cases if isinstance(statement, ast.Match) else []
        if not branches and not cases:
            self._read([statement], done)
            return done | stored([statement])
        heads = [
            child
            for child in ast.iter_child_nodes(statement)
            if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        ]
        self._read(heads, done)
        with_heads = done | stored(heads)
        for case in cases:
            self._read([case.pattern], with_heads)
            captured = stored([case.pattern])
            if case.guard is not None:
                self._read([case.guard], with_heads | captured)
                captured |= stored([case.guard])
            branches.append((case.body, captured))
        ends = []
        for branch, bound in branches:
            # A `break` of an inner loop ends that one; what is set in its body is not surely set anyway.
            # What its `else` leaves is the loop around it.
            is_turn = isinstance(statement, _OWN_LOOP) and branch is statement.body
            exits = [] if is_turn else self._exits
            inner = Reader(with_heads | bound, self._functions, exits, runs=self._runs)
            ends.append(inner.run(branch))
            self.early |= inner.early
        if isinstance(statement, ast.With | ast.AsyncWith):
            return with_heads if _suppresses(statement) else ends[0]
        if isinstance(statement, ast.If) and statement.orelse:
            return ends[0] & ends[1]
        if self._runs and isinstance(statement, (*_OWN_LOOP, *TRY)):
            return ends[0]
        return set(done)

    def _read(self, nodes: Sequence[ast.AST], done: set[str]) -> None:
        names = loaded(nodes)
        called = names | {n.attr for node in nodes for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        self.early |= (names | self._functions.reads(called)) - done


def _suppresses(statement: ast.With | ast.AsyncWith) -> bool:
    return any(last_name(node) in ("suppress", "raises") for item in statement.items for node in ast.walk(item))
