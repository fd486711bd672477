"""Finds the training loop of a script, and writes the two lines into it that nobody had to write.

    for step in range(1000):          for step in __holdfast_kept__(range(1000)):
        ...                               if __holdfast_kept__.back:
                                              total, = __holdfast_kept__.take()
                                          ...

Pure: a syntax tree in, a tree or a reason out. What is looked for: exactly one loop over a `range` of numbers, in which,
or in functions of the script that it calls, there is a call of `backward` and one of `step`; no such loop around or inside
it. Names that live from one step to the next are found too (`carried`): those that a step may read before it has set them,
and those that it may leave unset and that are read behind the loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

HOOK = "__holdfast_kept__"
# Why a script that calls us by itself is left alone.
ITSELF = "the script uses holdfast itself"
NO_LOOP = "no loop with backward() and step() was found"

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Loop:
    """A script with a loop that can be kept, as far as its text tells.

    Attributes:
        tree: the script with the two lines.
        carried: names that live from one step to the next.
        used: names that the loop, or any function of the script, reads and the loop does not set.
    """

    tree: ast.Module
    carried: tuple[str, ...]
    used: tuple[str, ...]


def find(source: str) -> Loop | str:
    """The loop, or why there is none that can be kept.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source)
    if any(name.split(".")[0] == "holdfast" for name in _imported(tree)):
        return ITSELF
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, _Function)}
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While) and _trains(node, functions)]
    inner = [loop for loop in loops if not any(other is not loop and other in loops for other in ast.walk(loop))]
    if not loops:
        return NO_LOOP
    if len(loops) > 1:
        return "loops lie inside each other" if len(inner) == 1 else f"{len(loops)} loops train"
    loop = loops[0]
    if (
        not isinstance(loop, ast.For)
        or not _is_range(loop.iter)
        or not isinstance(loop.target, ast.Name)
        or loop.orelse
    ):
        return f"the loop of line {loop.lineno} does not simply count: for step in range(...)"
    scope = _scope_of(tree, loop)
    carried = _carried(loop, scope)
    stored = _stored(loop.body) | {loop.target.id}
    used = {n for part in (loop, *functions.values()) for n in _loaded([part])} - (stored - set(carried))
    _rewrite(loop, carried)
    ast.fix_missing_locations(tree)
    return Loop(tree, carried, tuple(sorted(used - {HOOK})))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def _trains(loop: ast.For | ast.While, functions: dict[str, _Function]) -> bool:
    called = _called(loop.body, functions, set())
    return {"backward", "step"} <= called


def _called(body: Sequence[ast.AST], functions: dict[str, _Function], seen: set[str]) -> set[str]:
    """Names of methods that are called here, and in functions of the script that are called here."""
    found: set[str] = set()
    for part in body:
        for node in ast.walk(part):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute):
                found.add(node.func.attr)
            elif isinstance(node.func, ast.Name) and node.func.id in functions and node.func.id not in seen:
                seen.add(node.func.id)
                found |= _called(functions[node.func.id].body, functions, seen)
    return found


def _is_range(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "range"
        and not node.keywords
        and not any(isinstance(argument, ast.Starred) for argument in node.args)
    )


def _scope_of(tree: ast.Module, loop: ast.For) -> _Scope:
    """The innermost function around the loop, or the script."""
    found: _Scope = tree
    for node in ast.walk(tree):
        if isinstance(node, _Function) and any(inner is loop for inner in ast.walk(node)):
            found = node  # ast.walk goes from the outside in
    return found


def _carried(loop: ast.For, scope: _Scope) -> tuple[str, ...]:
    assert isinstance(loop.target, ast.Name)
    reader = _Reader({loop.target.id})
    done = reader.run(loop.body)
    stored = _stored(loop.body)
    inside = {id(node) for node in ast.walk(loop)}
    outside = {
        node.id
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside
    }
    return tuple(sorted((reader.early & stored) | ((stored - done) & outside)))


class _Reader:
    """Goes through statements in order.

    Attributes:
        early: names that are read where they may not have been set in this step.
    """

    def __init__(self, known: set[str]) -> None:
        self._known = known
        self.early: set[str] = set()

    def run(self, body: Sequence[ast.stmt]) -> set[str]:
        """The names that are surely set when the statements are through."""
        done = set(self._known)
        for statement in body:
            done = self._one(statement, done)
        return done

    def _one(self, statement: ast.stmt, done: set[str]) -> set[str]:
        branches = [
            getattr(statement, name) for name in ("body", "orelse", "finalbody") if getattr(statement, name, None)
        ]
        branches += [handler.body for handler in getattr(statement, "handlers", ())]
        if not branches or isinstance(statement, _Function | ast.ClassDef):
            self._read([statement], done)
            return done | _stored([statement])
        heads = [
            child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt | ast.excepthandler)
        ]
        self._read(heads, done)
        sure = done | _stored(heads) if isinstance(statement, ast.With) else set(done)
        ends = []
        for branch in branches:
            inner = _Reader(sure | _stored(heads))
            ends.append(inner.run(branch))
            self.early |= inner.early
        if isinstance(statement, ast.With):
            return ends[0]
        if isinstance(statement, ast.If) and statement.orelse:
            return ends[0] & ends[1]
        return sure

    def _read(self, nodes: Sequence[ast.AST], done: set[str]) -> None:
        # `x += 1` reads x, which its tree does not say.
        augmented = {
            node.target.id
            for part in nodes
            for node in ast.walk(part)
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
        }
        self.early |= (_loaded(nodes) | augmented) - done


def _stored(nodes: Sequence[ast.AST]) -> set[str]:
    return {name for node in nodes for name, sets in _names(node) if sets}


def _loaded(nodes: Sequence[ast.AST]) -> set[str]:
    return {name for node in nodes for name, sets in _names(node) if not sets}


def _names(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """(name, whether it is set) of all names of this scope; names of comprehensions and lambdas are their own."""
    if isinstance(node, ast.Name):
        yield node.id, isinstance(node.ctx, ast.Store | ast.Del)
        return
    own: set[str] = set()
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        own = {n.id for part in node.generators for n in ast.walk(part.target) if isinstance(n, ast.Name)}
    elif isinstance(node, ast.Lambda):
        own = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
    elif isinstance(node, _Function | ast.ClassDef):
        yield node.name, True
        inside = [found for part in ast.iter_child_nodes(node) for found in _names(part)]
        own = {name for name, sets in inside if sets} | {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}
    for child in ast.iter_child_nodes(node):
        yield from ((name, sets) for name, sets in _names(child) if name not in own)


def _rewrite(loop: ast.For, carried: Sequence[str]) -> None:
    loop.iter = ast.Call(ast.Name(HOOK, ast.Load()), [loop.iter], [])
    if carried:
        names = ", ".join(carried)
        lines = ast.parse(f"if {HOOK}.back:\n    {names}, = {HOOK}.take()").body
        for node in ast.walk(lines[0]):
            if hasattr(node, "lineno"):
                ast.copy_location(node, loop)
        loop.body[:0] = lines
    ast.fix_missing_locations(loop)
