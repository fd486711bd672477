"""Tells, of the text around one call of `step()`, what lives from one step to the next, and where its number comes from.

Pure: text and a line in, names and lines out. A name lives on if a step may read it before it has set it, and sets it. Of what
the text leaves open rather one name too few is told: inner loops count as run once, times of a clock count as nothing, and what
is made of the number that `restore()` returned is there again after a restart.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from holdfast.checkpoint.usage.behind_step import changed_late, frozen_once, is_by_number, left_behind, placed_behind
from holdfast.checkpoint.usage.in_place import changed_in_place
from holdfast.checkpoint.usage.name_flow import (
    CLOCKS,
    Function,
    Functions,
    Reader,
    Scope,
    last_name,
    loaded,
    own,
    stored,
)

Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While
# The method that tells a finished step, and what the number of the first one is asked for with.
DRAWS = {"next", "zip", "enumerate", "islice", "iter", "map", "tqdm"}
# What a best loss begins with.
_INFINITE = {"float('inf')": math.inf, "float('-inf')": -math.inf}
STEP, RESTORE = "step", ("restore", "last_restore")


@dataclass(frozen=True, slots=True)
class Around:
    """The loops of one function around one line.

    Attributes:
        line: the line of the outermost loop.
        caller: what `step` is called of, as written.
        told: what it is told, as written: the number, and what is passed besides.
        lives: name -> line that sets it, of each name that lives from one step to the next and is not passed to `step`.
        changed: path -> line that changes it, of each value that lives on and is changed in place: `losses`, `self.mean`.
        reads: names that the loops read, those included that functions of the file read which they call.
        drawn: names and attributes that the file takes the next of, or goes over.
        goes_over: line -> names, of each thing that one of the loops goes over.
        one_more: whether the first number is certainly one more than `restore()` returned.
        counts: name -> (line, names), of each index of `enumerate` that decides what the loop does in that line, and what it counts.
        epoch: the name of an outer loop that counts epochs from `restore()` by a division, as written; empty if there is none.
        cycles: line -> names, of what is handed to `cycle` in the head of a loop.
        ends: name -> (line, names), of each name that only an inner loop sets and that is read behind it, and what that loop goes over.
        late: path -> (line, whether it is passed to `step`), of what a turn changes behind `step`.
        skips: line -> names, of what the head of a loop leaves out the first items of, by `islice`.
        frozen: the line that sets `requires_grad` in one turn alone; None if there is none.
        numbered: those of `lives` that are set by how far the loop has come.
        begins: name -> value, of each name that the text sets once outside of the loops, to a number or to None, if these do not restore.
        placed: path -> line, of each attribute that a turn sets behind an inner loop and that is not passed to `step`.
        inner: names that loops within the loops give to what they go over.
        passed: paths that are passed to `step`, as written; with nothing before the dot where another function calls it.
    """

    line: int
    caller: str = ""
    told: tuple[str, ...] = ()
    lives: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    drawn: frozenset[str] = frozenset()
    goes_over: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    one_more: bool = False
    counts: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    epoch: str = ""
    cycles: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    ends: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    late: Mapping[str, tuple[int, bool]] = field(default_factory=dict)
    skips: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    frozen: int | None = None
    numbered: frozenset[str] = frozenset()
    begins: Mapping[str, object] = field(default_factory=dict)
    placed: Mapping[str, int] = field(default_factory=dict)
    inner: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()


def around(source: str, line: int, *, told: bool = True) -> Around | None:
    """Returns what the loops around a line have; None where there is no loop, or no call of `step`.

    Args:
        source: the text of a file.
        line: a line of it that runs.
        told: whether a call of `step` has to stand there.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source)
    scope = scope_at(tree, line)
    loops, call = loops_at(scope, line), report_at(scope, line)
    if not loops or (told and call is None):
        return None
    functions = Functions(tree if scope is tree else ast.Module(list(scope.body), []))
    lines: dict[str, int] = {}
    for loop in loops:
        for name in _carried(loop, functions):
            lines.setdefault(name, _line(loop, name))
    for name in left_behind(loops[0], scope, functions):
        lines.setdefault(name, _line(loops[0], name))
    read = {name for loop in loops for name in loaded([loop])}
    number = _number(call)
    outside = list(_assignments(scope, without=loops[0]))
    origin = {*loaded([number] if number is not None else []), *_origin(number, outside, loops)}
    known = _derived(origin, outside) | _clocks(scope)
    passed = loaded([word.value for word in call.keywords]) if call is not None else set()
    told_paths = [node for node in ast.walk(call) if isinstance(node, ast.Attribute)] if call is not None else []
    elsewhere = {*lines, *known, *passed, *map(ast.unparse, told_paths)}
    changed = changed_in_place(source, {loop.lineno for loop in loops}, elsewhere)
    return Around(
        loops[0].lineno,
        ast.unparse(call.func.value) if call is not None and isinstance(call.func, ast.Attribute) else "",
        tuple(map(ast.unparse, (*call.args, *call.keywords))) if call is not None else (),
        {name: at for name, at in sorted(lines.items(), key=lambda item: item[1]) if name not in known | passed},
        changed,
        frozenset(read | Functions(tree).reads(read)),
        frozenset(_drawn(tree)),
        {loop.lineno: tuple(sorted(loaded([loop.iter]))) for loop in loops if isinstance(loop, ast.For)},
        _is_one_more(number, outside, loops, line),
        {name: found for loop in loops for name, found in _deciding_counts(loop, call, line)},
        _divided_epoch(loops, outside),
        _handed(loops, "cycle", 1),
        dict(_read_at_ends(loops, {name for names, _ in outside for name in names} | passed, functions)),
        changed_late(loops[-1], call, number, set(lines)) if call is not None else {},
        _handed(loops, "islice", 3),
        next((at for loop in loops if (at := frozen_once(loop, known, functions)) is not None), None),
        frozenset(name for name in lines if any(is_by_number(loop, name) for loop in loops)),
        {} if any(map(_is_restored, ast.walk(loops[0]))) else dict(_beginnings(scope, loops[0])),
        {path: at for loop in loops for path, at in placed_behind(loop, elsewhere | changed.keys()).items()},
        frozenset(stored([n.target for n in ast.walk(loops[0]) if isinstance(n, ast.For | ast.AsyncFor)])),
        frozenset(_passed(call)) if call is not None else frozenset(),
    )


def from_outside(source: str, line: int, inner_source: str, inner_line: int) -> Around | None:
    """Returns what the loops around a line have, where `step()` is called by a function that is called there; None if there is no such.

    What is passed to `step()` there is known by its last word alone: `best` of `step(number, best=trainer.best)`.

    Args:
        source: the text of the file with the loops.
        line: a line of it that runs.
        inner_source: the text of the file that calls `step()`.
        inner_line: the line of it that does.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(inner_source)
    call = report_at(scope_at(tree, inner_line), inner_line)
    found = around(source, line, told=False)
    if call is None or found is None or not isinstance(call.func, ast.Attribute):
        return None
    parts = [part for value in (*call.args, *(word.value for word in call.keywords)) for part in ast.walk(value)]
    passed = {*(word.arg for word in call.keywords), *map(last_name, parts)}
    return replace(
        found,
        caller=ast.unparse(call.func.value),
        told=tuple(map(ast.unparse, (*call.args, *call.keywords))),
        lives={name: at for name, at in found.lives.items() if name not in passed},
        changed={path: at for path, at in found.changed.items() if path.rpartition(".")[2] not in passed},
        placed={path: at for path, at in found.placed.items() if path.rpartition(".")[2] not in passed},
        ends={name: each for name, each in found.ends.items() if name not in passed},
        passed=frozenset(f".{word}" for word in passed),
    )


def _beginnings(scope: Scope, loop: Loop) -> Iterator[tuple[str, object]]:
    """Yields name and value of what is set once outside of a loop, to a constant."""
    values: dict[str, list[ast.expr | None]] = {}
    for names, value in _assignments(scope, without=loop):
        for name in names:
            values.setdefault(name, []).append(value if len(names) == 1 else None)
    for name, found in values.items():
        begins = found[0] if len(found) == 1 else None
        if isinstance(begins, ast.Call) and ast.unparse(begins) in _INFINITE:
            yield name, _INFINITE[ast.unparse(begins)]
        elif isinstance(begins, ast.Constant) and not isinstance(begins.value, str):
            yield name, begins.value


def _handed(loops: Sequence[Loop], function: str, least: int) -> dict[int, tuple[str, ...]]:
    """Returns line -> names, of what the head of a loop hands to a function with so many arguments."""
    return {
        loop.lineno: tuple(sorted(loaded(node.args)))
        for loop in loops
        if isinstance(loop, ast.For)
        for node in ast.walk(loop.iter)
        if isinstance(node, ast.Call) and last_name(node.func) == function and len(node.args) >= least
    }


def scope_at(tree: ast.Module, line: int) -> Scope:
    """Returns the innermost function around a line, or the file."""
    found: Scope = tree
    for node in ast.walk(tree):  # from the outside in
        if isinstance(node, Function) and node.body[0].lineno <= line <= (node.end_lineno or 0):
            found = node
    return found


def loops_at(scope: Scope, line: int) -> list[Loop]:
    """Returns the loops of a scope around a line, the outermost first."""
    found = [n for n in own(scope) if isinstance(n, Loop) and n.body[0].lineno <= line <= (n.body[-1].end_lineno or 0)]
    return sorted(found, key=lambda loop: loop.lineno)


def report_at(scope: Scope, line: int) -> ast.Call | None:
    """Returns the call of `step` with a number that stands at a line."""
    for node in own(scope):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == STEP
            and node.lineno <= line <= (node.end_lineno or 0)
            and _number(node) is not None
        ):
            return node
    return None


def _passed(call: ast.Call) -> Iterator[str]:
    """Yields the paths that a call of `step` is passed, of each the longest: `hooks[0].best`, and `hooks[0]` of `vars(hooks[0])`."""
    for value in (*call.args, *(word.value for word in call.keywords)):
        methods = {id(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
        inside = {
            id(node.value)
            for node in ast.walk(value)
            if isinstance(node, ast.Attribute | ast.Subscript) and id(node) not in methods
        }
        for node in ast.walk(value):
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and id(node) not in inside | methods:
                yield ast.unparse(node)


def _number(call: ast.Call | None) -> ast.expr | None:
    if call is None:
        return None
    if call.args:
        return call.args[0]
    return next((word.value for word in call.keywords if word.arg == STEP), None)


def _carried(loop: Loop, functions: Functions) -> set[str]:
    targets: set[str] = set()
    body: list[ast.stmt] = list(loop.body)
    if isinstance(loop, ast.While):
        body.insert(0, ast.Expr(loop.test))
    else:
        targets = stored([loop.target])
    reader = Reader(targets, functions, runs=True)
    reader.run(body)
    return reader.early & (stored(body) - targets)


def _drawn(tree: ast.Module) -> Iterator[str]:
    """Yields the last names of what is handed to `next`, `zip` and their like, and of what loops go over."""
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            values = [node.iter]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DRAWS:
            values = node.args
        yield from (
            v.id if isinstance(v, ast.Name) else v.attr for v in values if isinstance(v, ast.Name | ast.Attribute)
        )


def _line(loop: ast.AST, name: str) -> int:
    """Returns the first line of a loop that sets a name."""
    lines = [
        node.lineno
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
    ]
    return min(lines, default=getattr(loop, "lineno", 0))


def _assignments(scope: Scope, without: ast.AST | None = None) -> Iterator[tuple[set[str], ast.expr]]:
    """Yields (names, value) of everything that a scope sets, but not in `without`."""
    left_out = {id(node) for node in ast.walk(without)} if without is not None else set()
    for node in own(scope):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Assign):
            yield stored(node.targets), node.value
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield stored([node.target]), node.value
        elif isinstance(node, ast.For | ast.comprehension):
            yield stored([node.target]), node.iter


def _origin(number: ast.expr | None, outside: Iterable[tuple[set[str], ast.expr]], loops: Sequence[Loop]) -> set[str]:
    """Returns the names that the number of the first step is made of."""
    waiting = loaded([number]) if number is not None else set()
    values = [*outside, *((stored([loop.target]), _first(loop.iter)) for loop in loops if isinstance(loop, ast.For))]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for names, value in values:
            if name in names and isinstance(value, ast.Name | ast.BinOp):
                waiting |= loaded([value])
    return found


def _first(value: ast.expr) -> ast.expr:
    """Returns what a `range` or an `enumerate` begins with; anything else as it is."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and not value.keywords:
        if value.func.id == "range" and len(value.args) > 1:
            return value.args[0]
        if value.func.id == "enumerate" and len(value.args) > 1:
            return value.args[1]
    return value


def _derived(known: set[str], outside: Iterable[tuple[set[str], ast.expr]]) -> set[str]:
    """Returns the names that are made of these, or of what `restore()` returned, before the loop."""
    found, before, values = set(known), -1, list(outside)
    while len(found) != before:
        before = len(found)
        for names, value in values:
            if found & loaded([value]) or any(_is_restored(node) for node in ast.walk(value)):
                found |= names
    return found


def _is_restored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in RESTORE


def _clocks(scope: Scope) -> set[str]:
    """Returns the names that are made of times."""
    found: set[str] = set()
    before, values = -1, list(_assignments(scope))
    while len(found) != before:
        before = len(found)
        for names, value in values:
            if not (CLOCKS | found).isdisjoint(map(last_name, ast.walk(value))):
                found |= names
    return found


def _is_one_more(
    number: ast.expr | None, outside: Iterable[tuple[set[str], ast.expr]], loops: Sequence[Loop], line: int
) -> bool:
    """Tell whether the number is one more than that of the step that was made.

    `for step in range(start, n)` with `step + 1`, or a `while` that counts before it tells; `start` from `restore()` itself.
    """
    values = list(outside)

    def restored(value: ast.expr) -> bool:
        if isinstance(value, ast.Name):
            given = [found for names, found in values if value.id in names]
            return len(given) == 1 and restored(given[0]) and not isinstance(value.ctx, ast.Store)
        return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == RESTORE[0]

    if isinstance(number, ast.BinOp) and isinstance(number.op, ast.Add) and _is_one(number.right):
        name = number.left.id if isinstance(number.left, ast.Name) else ""
        return any(
            isinstance(loop, ast.For)
            and isinstance(loop.target, ast.Name)
            and loop.target.id == name
            and _first(loop.iter) is not loop.iter
            and restored(_first(loop.iter))
            and name not in stored(loop.body)
            for loop in loops
        )
    if isinstance(number, ast.Name) and restored(number) and isinstance(loops[-1], ast.While):
        inside = [node for node in ast.walk(loops[0]) if isinstance(node, ast.Name) and node.id == number.id]
        sets = [node for node in inside if isinstance(node.ctx, ast.Store)]
        counts = [s for s in loops[-1].body if isinstance(s, ast.AugAssign) and s.target in sets and _is_one(s.value)]
        return len(sets) == len(counts) == 1 and isinstance(counts[0].op, ast.Add) and counts[0].lineno < line
    return False


def _is_one(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == 1


def _deciding_counts(
    loop: Loop, report: ast.Call | None, line: int
) -> Iterator[tuple[str, tuple[int, tuple[str, ...]]]]:
    """Yields the index of `for i, batch in enumerate(...)`, if a test that reads it decides about steps or leaves the loop.

    One that only decides about what is shown is none, nor is one that begins with a number of the script's.
    """
    head = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(loop, ast.For) or not isinstance(head, ast.Call) or last_name(head.func) != "enumerate":
        return
    names = loop.target.elts if isinstance(loop.target, ast.Tuple) else ()
    begins = [*head.args[1:], *(word.value for word in head.keywords)]
    if not names or not isinstance(names[0], ast.Name) or not all(isinstance(each, ast.Constant) for each in begins):
        return
    made = {names[0].id}
    for node in ast.walk(loop):  # `last = (i + 1) % 4 == 0`
        if isinstance(node, ast.Assign) and made & loaded([node.value]) and not _calls(node.value) - _PLAIN_CALLS:
            made |= stored(node.targets)
    for node in ast.walk(loop):
        if not isinstance(node, ast.If) or not made & loaded([node.test]):
            continue
        if _decides([*node.body, *node.orelse], report, line):
            yield names[0].id, (node.lineno, tuple(sorted(loaded(head.args[:1]))))
            return


# What a step of training is made of, and what a condition is computed with.
_DECIDED = {"step", "zero_grad", "backward"}
_PLAIN_CALLS = {"len", "int", "bool", "float", "min", "max"}


def _decides(nodes: Iterable[ast.AST], report: ast.Call | None, line: int, *, leaves: bool = True) -> bool:
    """Tell whether nodes make a part of a step, or leave the loop or a step of it before the line that reports.

    A report is none, nor is what is only defined there, and a `break` of an inner loop ends that one.
    """
    return any(
        (isinstance(node, ast.Call) and node is not report and last_name(node.func) in _DECIDED)
        or (leaves and isinstance(node, ast.Break))
        or (leaves and isinstance(node, ast.Continue) and node.lineno < line)
        or _decides(ast.iter_child_nodes(node), report, line, leaves=leaves and not isinstance(node, Loop))
        for node in nodes
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef)
    )


def _divided_epoch(loops: Sequence[Loop], outside: Iterable[tuple[set[str], ast.expr]]) -> str:
    """Returns the target of a loop over a range that begins with the number of `restore()`, divided: `start // len(loader)`."""
    values = list(outside)

    def is_restored(value: ast.expr) -> bool:
        made = [found for names, found in values if isinstance(value, ast.Name) and value.id in names]
        value = made[0] if len(made) == 1 else value
        return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == RESTORE[0]

    def is_divided(value: ast.expr) -> bool:
        if isinstance(value, ast.Name):
            made = [found for names, found in values if value.id in names]
            return len(made) == 1 and not isinstance(made[0], ast.Name) and is_divided(made[0])
        return isinstance(value, ast.BinOp) and isinstance(value.op, ast.FloorDiv) and is_restored(value.left)

    for loop in loops[:-1]:
        if isinstance(loop, ast.For) and _first(loop.iter) is not loop.iter and is_divided(_first(loop.iter)):
            return ast.unparse(loop.target)
    return ""


def _read_at_ends(
    loops: Sequence[Loop], known: set[str], functions: Functions
) -> Iterator[tuple[str, tuple[int, tuple[str, ...]]]]:
    """Yields the names that have no value behind an inner loop that had nothing to go over."""
    for outer, inner in pairwise(loops):
        place = next((number for number, part in enumerate(outer.body) if part is inner), None)
        if place is None or not isinstance(inner, ast.For):
            continue
        reader = Reader(set(), functions, runs=True)
        reader.run(outer.body[place + 1 :])
        targets = stored([outer.target]) if isinstance(outer, ast.For) else set()
        lost = (
            reader.early & (stored(inner.body) | stored([inner.target])) - stored(outer.body[:place]) - targets - known
        )
        yield from ((name, (inner.lineno, tuple(sorted(loaded([inner.iter]))))) for name in sorted(lost))


def _calls(node: ast.AST) -> set[str]:
    return {last_name(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
