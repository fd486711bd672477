"""Tells, of the text of a loop, what a restart at the next turn does not do again: what a turn changes behind `step()`, and what only some
turns do.

Pure: syntax trees in, paths with lines out. Rather one path too few is told.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from holdfast.checkpoint.usage.in_place import is_writing
from holdfast.checkpoint.usage.name_flow import TRY, Function, Functions, Reader, Scope, last_name, loaded, stored

Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While
# Methods that change what has a state of its own.
_MOVES = {"step", "update"}


def left_behind(loop: Loop, scope: Scope, functions: Functions) -> set[str]:
    """Returns the names that only some turns of a loop set, and that are read behind it: the weights of the best epoch.

    Args:
        loop: the loop.
        scope: the function that it stands in, or the file.
        functions: what calls read.
    """
    reader = Reader(set(), functions, runs=True)
    reader.run([*loop.orelse, *(_behind(scope.body, loop) or [])])
    targets = stored([loop.target]) if not isinstance(loop, ast.While) else set()
    surely = Reader(targets, functions, runs=True).run(loop.body)
    return reader.early & stored(loop.body) - surely


def changed_late(loop: Loop, call: ast.Call, number: ast.expr | None, lives: set[str]) -> dict[str, tuple[int, bool]]:
    """Returns path -> (line, whether it is passed to `step()`) of what a turn of the innermost loop changes behind
    `step()`. `number` is what the call of `step()` is told; `lives` are the names that live from one turn to the
    next.
    """
    behind = _behind(loop.body, call) or []
    if not isinstance(number, ast.Name) or not _is_of_this_turn(number.id, loop, behind):
        return {}
    values = [word.value for word in call.keywords if isinstance(word.value, ast.Name | ast.Attribute)]
    passed = set(map(ast.unparse, values))
    found: dict[str, tuple[int, bool]] = {}
    for node in (part for statement in behind for part in _parts(statement)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            path = ast.unparse(node.func.value)
            if path in passed and is_writing(node.func.attr):
                found.setdefault(path, (node.lineno, True))
            elif node.func.attr in _MOVES or node.func.attr.startswith("update_"):
                found.setdefault(path, (node.lineno, False))
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            is_item = isinstance(node, ast.Subscript)
            while isinstance(node, ast.Subscript):
                node = node.value
            path = ast.unparse(node)
            if path in passed and (not isinstance(node, ast.Name) or path in lives or is_item):
                found.setdefault(path, (node.lineno, True))
    return found


def placed_behind(loop: Loop, without: set[str]) -> dict[str, int]:
    """Returns path -> line of each attribute that a turn sets behind an inner loop: a dataset may hand it out in the
    next turn. Left out are paths that are told elsewhere, or passed to `step`.
    """
    found: dict[str, int] = {}
    first = next((at for at, part in enumerate(loop.body) if isinstance(part, Loop)), len(loop.body))
    for node in (part for statement in loop.body[first + 1 :] for part in _parts(statement)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node) not in without:
            found.setdefault(ast.unparse(node), node.lineno)
    return found


def frozen_once(loop: Loop, known: set[str], functions: Functions) -> int | None:
    """Returns the line that sets `requires_grad` in one turn alone, of `if epoch == 3:`; None if there is none, or if other turns set it too.

    Args:
        loop: the loop.
        known: names that a restart makes anew, by the number that `restore()` returns.
        functions: what calls do.
    """
    targets = stored([loop.target]) if not isinstance(loop, ast.While) else set()
    lines: list[int] = []
    once: list[ast.AST] = []
    for node in _parts(loop):
        if isinstance(node, ast.If) and not node.orelse and _is_one_turn(node.test, targets, known):
            once += [part for statement in node.body for part in _parts(statement)]
    inside = {id(node) for node in once}
    for node in _parts(loop):
        if _freezes(node, functions):
            if id(node) not in inside:
                return None
            lines.append(getattr(node, "lineno", loop.lineno))
    return min(lines, default=None)


def is_by_number(loop: Loop, name: str) -> bool:
    """Tell whether every place that sets a name in a loop is chosen by how far the loop has come: `if epoch >= 3:`."""
    targets = stored([loop.target]) if not isinstance(loop, ast.While) else set()
    chosen = {
        id(part)
        for node in _parts(loop)
        if isinstance(node, ast.If) and _compares(node.test, (ast.Gt, ast.GtE, ast.Lt, ast.LtE), targets)
        for part in ast.walk(node)
    }
    sets = [n for n in _parts(loop) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)]
    return bool(sets) and all(id(node) in chosen for node in sets)


def _is_one_turn(test: ast.expr, targets: set[str], known: set[str]) -> bool:
    return (
        _compares(test, (ast.Eq, ast.In), targets)
        and not loaded([test]) & known - targets
        and not any(isinstance(node, ast.Mod | ast.FloorDiv | ast.Or | ast.Not) for node in ast.walk(test))
    )


def _compares(test: ast.expr, kinds: tuple[type[ast.cmpop], ...], names: set[str]) -> bool:
    return any(
        isinstance(node, ast.Compare) and any(isinstance(op, kinds) for op in node.ops) and loaded([node]) & names
        for node in ast.walk(test)
    )


def _freezes(node: ast.AST, functions: Functions, depth: int = 2) -> bool:
    """Tell whether a node sets `requires_grad`, or calls a function of the file that does."""
    if isinstance(node, ast.Attribute) and node.attr in ("requires_grad", "requires_grad_"):
        return node.attr == "requires_grad_" or isinstance(node.ctx, ast.Store)
    if not isinstance(node, ast.Call) or not depth:
        return False
    called = functions.by_name.get(last_name(node.func), ())
    return any(_freezes(part, functions, depth - 1) for each in called for part in ast.walk(each))


def _is_of_this_turn(number: str, loop: Loop, behind: Sequence[ast.stmt]) -> bool:
    """Tell whether `step()` is told the number of this turn: what the loop counts, or what is counted behind the call."""
    if not isinstance(loop, ast.While) and number in stored([loop.target]):
        return True
    counts = (node for statement in behind for node in _parts(statement) if isinstance(node, ast.AugAssign))
    return any(isinstance(node.target, ast.Name) and node.target.id == number for node in counts)


def _behind(block: Sequence[ast.stmt], inside: ast.AST) -> list[ast.stmt] | None:
    """Returns the statements that run behind a node, without those of other branches; None if the node is not there."""
    for number, statement in enumerate(block):
        if not any(part is inside for part in ast.walk(statement)):
            continue
        found: list[ast.stmt] = []
        for part in _blocks(statement):
            if (rest := _behind(part, inside)) is not None:
                found += rest
                if isinstance(statement, TRY):
                    found += [*(statement.orelse if part is statement.body else []), *statement.finalbody]
        return [*found, *block[number + 1 :]]
    return None


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    parts = [statement, *(part for name in ("handlers", "cases") for part in getattr(statement, name, ()))]
    yield from (part.body for part in parts if hasattr(part, "body"))
    yield from (getattr(statement, name) for name in ("orelse", "finalbody") if getattr(statement, name, None))


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and what it is made of, without what is only defined there."""
    if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
        yield node
        for part in ast.iter_child_nodes(node):
            yield from _parts(part)
