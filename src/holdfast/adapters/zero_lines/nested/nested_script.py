"""Finds the training loops of a script that lie inside each other or go over batches, and writes the lines into it.

    for epoch in range(3):                __holdfast_kept__.at(0)
        train(model, loader)              for epoch in __holdfast_kept__(0, range(3)):
                                              if __holdfast_kept__.back: best, = __holdfast_kept__.take(); ...; continue
    def train(model, loader):                 train(model, loader)
        for batch in loader:                  ...
            ...                           in train: __holdfast_kept__.at(1); for batch in __holdfast_kept__(1, loader): ...

Pure: text in, a tree with its loops or a reason out. A loop trains if in it, or in functions and methods of the script that it
reaches, there is a call of `backward` and one of `step`. One that reaches another such loop is an outer one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.adapters.zero_lines.nested.written_names import written
from holdfast.adapters.zero_lines.outside_values import find_outside
from holdfast.adapters.zero_lines.script_text import (
    HOOK,
    ITSELF,
    NO_LOOP,
    Leaving,
    imported,
    lines_of,
    only_members,
    only_numbers,
    read_by_text,
    read_later,
    reads_files,
    scope_of,
    words_in,
)
from holdfast.checkpoint.usage.cleared_gradients import Event, read
from holdfast.checkpoint.usage.clock_names import clock_names, finds_files, names_of_start
from holdfast.checkpoint.usage.name_flow import (
    CLOCKS,
    Function,
    Functions,
    Reader,
    Scope,
    defined,
    keeps_names,
    keeps_names_of_others,
    last_name,
    loaded,
    own,
    stored,
)
from holdfast.checkpoint.usage.user_frames import IS_SHARED

# The number of the turn of what was a `while`.
TURN = "__holdfast_turn__"

_Place = tuple[int, int]
# Words by which gradients are read.
_GRADIENTS = {"grad", "get_total_norm", "unscale_"}


@dataclass(frozen=True, slots=True)
class Site:
    """One loop that trains.

    Attributes:
        number: its place among the loops of the script.
        line: where it stands.
        outer: whether another loop that trains runs inside of it.
        carried: names that surely live from one turn to the next.
        loose: names that may do so: on a way that the text leaves open.
        after: names that every turn sets and that are read outside of the loop.
        numbers: those of them of which only the number is asked for.
        sets: names that the loop sets.
        dead: of an outer loop: names whose values nobody reads any more while an inner loop runs.
        gradients: what every turn clears and reads of gradients, in order.
        target: names that each item is given to: one, or a tuple of such.
        grads: whether what stands outside of it may read the gradients of its last step.
    """

    number: int
    line: int
    outer: bool
    carried: tuple[str, ...]
    loose: tuple[str, ...]
    after: tuple[str, ...]
    numbers: frozenset[str]
    sets: frozenset[str]
    dead: frozenset[str]
    gradients: tuple[Event, ...]
    target: Any
    grads: bool

    @property
    def lives(self) -> tuple[str, ...]:
        """Lists the names that are taken over by the first turn after a restart."""
        return (*self.carried, *self.loose)


@dataclass(frozen=True, slots=True)
class Nest:
    """A script with loops that can be kept, as far as its text tells.

    Attributes:
        tree: the script with the lines.
        sites: its loops that train.
        used: names that the loops, or any function of the script, read.
        members: names of which nothing is asked but what they contain.
        pops: whether something is popped that may be a set.
        reads_clock: whether the script reads a clock.
        clocked: names that may hold what a clock told.
        started: names and attributes that may hold the time of the start, or a name that was drawn for it.
        reread: whether the script finds files that it reads by one of these.
        reads_files: whether the script calls something that may have it go on from a file of its own.
        bounds: names and attributes that say how far loops count.
        retains: whether the script speaks of graphs that outlive a backward pass.
        by_hand: whether a loop changes parameters one by one, without an optimizer.
        lines: attribute or name -> the first line that stores to it or calls a method of it.
        written: names that it may write in place.
        reuses_gradients: whether it may clear gradients in their memory, which the next ones are written to.
        outside: what it trains by that a restart is told otherwise; empty if there is nothing.
    """

    tree: ast.Module
    sites: tuple[Site, ...]
    used: frozenset[str]
    members: frozenset[str]
    pops: bool
    reads_clock: bool
    clocked: frozenset[str]
    started: frozenset[str]
    reread: bool
    reads_files: bool
    bounds: frozenset[str]
    retains: bool
    by_hand: bool
    lines: tuple[tuple[str, int], ...]
    written: frozenset[str]
    reuses_gradients: bool
    outside: str


def find_nested(source: str, others: Sequence[ast.Module] = ()) -> Nest | str:
    """Returns the loops, or why there are none that can be kept. `others`: texts of other modules of the script, with
    functions that its loops may call.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source)
    if any(name.split(".")[0] == "holdfast" for name in imported(tree)):
        return ITSELF
    before = _Calls(tree)
    plain = {id(node) for node in ast.walk(tree) if isinstance(node, ast.For | ast.While) and before.trains(node)}
    tree = _PlainLoops(plain).visit(tree)
    calls = _Calls(tree)
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While) and calls.trains(node)]
    loops.sort(key=lambda loop: (loop.lineno, loop.col_offset))
    if not loops:
        return NO_LOOP
    for loop in loops:
        if reason := _why_not(tree, loop):
            return reason
    for node in (part for each in (tree, *others) for part in ast.walk(each)) if IS_SHARED else ():
        if (
            isinstance(node, Function)
            and (line := keeps_names(node))
            and (is_drawn(node) or calls.leads_to(node, loops))
        ) or (isinstance(node, Function) and (line := keeps_names_of_others(node))):
            return kept_names(line)
    known = Functions(tree)
    inner = [[other for other in loops if other is not loop and calls.reaches(loop, other)] for loop in loops]
    kept = [loop for loop in loops if isinstance(loop, ast.For)]
    sites = [_site(tree, calls, known, number, loop, inner[number]) for number, loop in enumerate(kept)]
    words = words_in(ast.walk(tree))
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    lines: dict[str, int] = {}
    for loop in kept:
        for name, line in lines_of(loop, functions).items():
            lines.setdefault(name, line)
    used = {name for part in (*kept, *functions) for name in loaded([part])}
    heads = [node for loop in kept for node in ast.walk(loop.iter)]
    bounds = {ast.unparse(node) for node in heads if isinstance(node, ast.Attribute | ast.Name)}
    started = names_of_start([tree])
    outside = find_outside(tree, kept, others)
    nest = Nest(
        tree,
        tuple(sites),
        used=frozenset(used - {HOOK}),
        members=frozenset(only_members(tree)),
        pops=any(isinstance(node, ast.Attribute) and node.attr == "pop" for node in ast.walk(tree)),
        reads_clock=bool(words & CLOCKS),
        clocked=clock_names(tree),
        started=started,
        reread=finds_files([tree], started),
        reads_files=reads_files(words),
        bounds=frozenset(bounds),
        retains=_retains(ast.walk(tree)),
        by_hand=any(_is_by_hand(calls.inside(loop)) for loop in kept),
        lines=tuple(sorted(lines.items())),
        written=frozenset(written(ast.parse(source))),
        reuses_gradients=_reuses_gradients(ast.walk(tree)),
        outside=outside.reason,
    )
    for loop, site in zip(kept, sites, strict=True):  # last: all else is of the script as it is written
        _rewrite(tree, loop, site)
    for call, line, ends in outside.files:
        _watch(call, line, ends=ends)
    ast.fix_missing_locations(tree)
    return nest


def facts(nest: Nest, others: Sequence[ast.Module]) -> Nest:
    """Returns the same loops, with what other parts of the program, in modules of their own, say of clocks, files and graphs."""
    nodes = [node for tree in others for node in ast.walk(tree)]
    words = words_in(nodes)
    return replace(
        nest,
        pops=nest.pops or "pop" in words,
        reads_clock=nest.reads_clock or bool(words & CLOCKS),
        clocked=nest.clocked.union(*map(clock_names, others)),
        reads_files=nest.reads_files or reads_files(words),
        retains=nest.retains or _retains(nodes),
        reuses_gradients=nest.reuses_gradients or _reuses_gradients(nodes),
    )


def _retains(nodes: Iterable[ast.AST]) -> bool:
    return any(isinstance(node, ast.keyword) and node.arg == "retain_graph" for node in nodes)


def _reuses_gradients(nodes: Iterable[ast.AST]) -> bool:
    for node in nodes:
        told: list[ast.expr] = []
        if isinstance(node, ast.keyword) and node.arg == "gradient_as_bucket_view":
            return True
        if isinstance(node, ast.keyword) and node.arg == "set_to_none":
            told = [node.value]
        elif isinstance(node, ast.Call) and last_name(node.func) == "zero_grad":
            told = node.args
        if any(not (isinstance(each, ast.Constant) and each.value is True) for each in told):
            return True
    return False


def is_drawn(function: Function) -> bool:
    """Tell whether a function makes items one by one; its names are looked at where a loop goes over them."""
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own(function))


def kept_names(line: int) -> str:
    """Returns why a script is not kept whose function keeps its own names."""
    return (
        f"line {line} may keep what locals() returns, or the f_locals of a frame, which a look at the loop would add names to before Python 3.13: "
        f"give it a copy, dict(locals())"
    )


class _PlainLoops(ast.NodeTransformer):
    """Makes loops plain ones: `while x: ...` goes over its turns, `for turn in ...: if not x: break; ...`.

    `for self.epoch in range(9): ...` gives its items to a name first: `for item in range(9): self.epoch = item; ...`.

    Args:
        loops: by `id`, those that are made so.
    """

    def __init__(self, loops: set[int]) -> None:
        self._loops = loops

    def visit_For(self, node: ast.For) -> ast.stmt:
        self.generic_visit(node)
        if id(node) in self._loops and not all(isinstance(part, ast.Name) for part in _targets(node.target)):
            name, target = f"__holdfast_item_{node.lineno}__", node.target
            node.target = ast.copy_location(ast.Name(name, ast.Store()), target)
            given = ast.copy_location(ast.Assign([target], ast.Name(name, ast.Load())), target)
            node.body = [ast.fix_missing_locations(given), *node.body]
        return node

    def visit_While(self, node: ast.While) -> ast.stmt:
        self.generic_visit(node)
        if id(node) not in self._loops or node.orelse:
            return node
        body = node.body
        if not (isinstance(node.test, ast.Constant) and node.test.value):
            body = [ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Break()], []), *body]
        turns = ast.Call(ast.Attribute(ast.Name(HOOK, ast.Load()), "turns", ast.Load()), [], [])
        found = ast.For(ast.Name(TURN, ast.Store()), turns, body, [])
        for part in (
            found,
            found.target,
            turns,
            *ast.walk(turns),
            *body[:1],
            *(ast.walk(body[0]) if body is not node.body else ()),
        ):
            if not hasattr(part, "lineno"):
                ast.copy_location(part, node)
        return ast.fix_missing_locations(ast.copy_location(found, node))


def _why_not(tree: ast.Module, loop: ast.For | ast.While) -> str:
    """Returns what is in the way of a loop; empty if nothing is."""
    if isinstance(loop, ast.While):
        return f"the loop of line {loop.lineno} is a while with an else"
    if loop.orelse:
        return f"the loop of line {loop.lineno} has an else"
    if any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await) for node in own(scope_of(tree, loop))):
        return f"the loop of line {loop.lineno} stands in a generator, whose caller runs between two steps"
    return ""


def _targets(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Tuple | ast.List):
        for part in node.elts:
            yield from _targets(part)
    elif isinstance(node, ast.Starred):
        yield from _targets(node.value)
    else:
        yield node


def _target(node: ast.expr) -> Any:
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_target(part) for part in node.elts if not isinstance(part, ast.Starred))
    return node.id if isinstance(node, ast.Name) else ""


def _is_by_hand(nodes: Sequence[ast.AST]) -> bool:
    """Tell whether parameters are changed in place one by one: `for p in model.parameters(): p.data.add_(p.grad, alpha=-rate)`."""
    for loop in nodes:
        if not isinstance(loop, ast.For) or not _goes_over_parameters(loop.iter):
            continue
        targets = stored([loop.target])
        for node in (part for statement in loop.body for part in ast.walk(statement)):
            changed: ast.expr | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
                changed = node.func.value
            elif isinstance(node, ast.AugAssign):
                changed = node.target
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                changed = node.targets[0]
            words = ast.unparse(changed).split(".") if changed is not None else [""]
            if words[0] in targets and words[1:] in ([], ["data"]):
                return True
    return False


def _goes_over_parameters(node: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Attribute) and part.attr in ("parameters", "named_parameters") for part in ast.walk(node)
    )


class _Calls:
    """Finds what code of the script reaches: by name, as a method, as a function that is handed on.

    Attributes:
        functions, methods: of the script, by name.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.functions, self.methods = defined(tree)
        self._found: dict[int, list[ast.AST]] = {}

    def nodes(self, parts: Sequence[ast.AST]) -> list[ast.AST]:
        """Returns all nodes of these parts, and of what they reach."""
        found: list[ast.AST] = []
        seen: set[int] = set()
        waiting = list(parts)
        while waiting:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            for node in ast.walk(part):
                found.append(node)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    waiting += self.functions.get(node.id, [])
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    waiting += self.methods.get(node.attr, [])
        return found

    def inside(self, loop: ast.For | ast.While) -> list[ast.AST]:
        """Returns all nodes that the body of a loop reaches."""
        if id(loop) not in self._found:
            self._found[id(loop)] = self.nodes(loop.body)
        return self._found[id(loop)]

    def trains(self, loop: ast.For | ast.While) -> bool:
        """Tell whether gradients are computed and applied in a loop."""
        called = {
            node.func.attr
            for node in self.inside(loop)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        return "backward" in called and ("step" in called or _is_by_hand(self.inside(loop)))

    def reaches(self, loop: ast.For | ast.While, other: ast.AST) -> bool:
        """Tell whether one loop runs inside of another."""
        return any(node is other for node in self.inside(loop))

    def leads_to(self, function: Function, loops: Sequence[ast.AST]) -> bool:
        """Tell whether a function has one of these loops, or runs it."""
        return any(self.leads(statement, loops) for statement in function.body)

    def leads(self, statement: ast.stmt, to: Sequence[ast.AST]) -> bool:
        """Tell whether a statement runs one of these loops."""
        return any(node is loop for node in self.nodes([statement]) for loop in to)


def _site(
    tree: ast.Module,
    calls: _Calls,
    known: Functions,
    number: int,
    loop: ast.For,
    inner: Sequence[ast.For | ast.While],
) -> Site:
    scope = scope_of(tree, loop)
    targets = stored([loop.target])
    sets = stored(loop.body) | targets
    outside = (read_later(scope, loop) - _set_by_with(scope, loop)) | {
        name for node in own(scope) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names
    }
    ambient = (known.ambient - targets) | read_by_text(tree, loop)
    early = ambient & _read_outside(tree, loop)
    must = _carried(loop, Reader(targets, known, runs=True), sets, outside, early)
    if inner:  # a turn that ends at its beginning came behind one that a restart begins again
        reader = Reader(targets, known, runs=True)
        must -= reader.body(_without_ends(loop.body)) - reader.early - early
    may = _carried(loop, Reader(targets, known), sets, outside, ambient)
    gradients = () if inner else read(loop.body, calls.functions, calls.methods)
    after = (sets & outside) - may
    before = _set_before(loop, _place_of(loop.body, calls, inner)) if inner else set()
    return Site(
        number,
        loop.lineno,
        outer=bool(inner),
        carried=tuple(sorted(must)),
        loose=tuple(sorted(may - must)),
        after=tuple(sorted(after)),
        numbers=frozenset(name for name in after if only_numbers(scope, loop, name)),
        sets=frozenset(sets),
        dead=frozenset(sets - before - may - targets) if inner else frozenset(sets),
        gradients=gradients,
        target=_target(loop.target),
        grads=_reads_gradients(tree, loop),
    )


def _set_by_with(scope: Scope, loop: ast.For) -> set[str]:
    """Returns the names that are read outside of a loop only where a `with` has just set them: `with open(path) as file`."""
    inside = {id(node) for node in ast.walk(loop)}
    within: dict[str, set[int]] = {}
    for node in own(scope):
        if isinstance(node, ast.With) and id(node) not in inside:
            body = [part for statement in node.body for part in ast.walk(statement)]
            for item in node.items:
                if isinstance(item.optional_vars, ast.Name):
                    within.setdefault(item.optional_vars.id, set()).update(map(id, body))
    mine = {id(node) for node in own(scope)} - inside
    for node in ast.walk(scope):
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load) or id(node) in inside:
            continue
        if id(node) not in mine or id(node) not in within.get(node.id, ()):
            within.pop(node.id, None)
    return set(within)


def _read_outside(tree: ast.Module, loop: ast.For) -> set[str]:
    """Returns the names that code reads which is not made anew in every turn of a loop: functions that do not stand in it."""
    inside = {id(node) for part in loop.body for node in ast.walk(part)}
    around = [node for node in ast.walk(tree) if any(part is loop for part in ast.walk(node))]
    functions = [node for node in ast.walk(tree) if isinstance(node, Function | ast.Lambda) and id(node) not in inside]
    return loaded([node for node in functions if not any(node is each for each in around)]) | read_by_text(tree, loop)


def _carried(loop: ast.For, reader: Reader, sets: set[str], outside: set[str], ambient: set[str]) -> set[str]:
    done = reader.body(loop.body)
    targets = stored([loop.target])
    return ((reader.early | ambient) & (sets - targets)) | ((sets - done) & outside)


def _without_ends(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    """Returns the statements of a turn without those at its beginning that only end it: `if done: break`."""
    first = body[0] if len(body) > 1 else None
    ends = isinstance(first, ast.If) and not first.orelse and isinstance(first.body[0], ast.Break | ast.Continue)
    return _without_ends(body[1:]) if ends else body


def _place_of(body: Sequence[ast.stmt], calls: _Calls, inner: Sequence[ast.AST]) -> _Place:
    """Returns where the first inner loop begins to run."""
    for statement in body:
        if not calls.leads(statement, inner):
            continue
        if any(statement is loop for loop in inner):
            break
        blocks = [getattr(statement, name, None) or [] for name in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(statement, "handlers", ())]
        for block in blocks:
            if any(calls.leads(part, inner) for part in block):
                return _place_of(block, calls, inner)
        break
    return statement.lineno, statement.col_offset


def _reads_gradients(tree: ast.Module, loop: ast.For) -> bool:
    """Tell whether gradients are read, or added to, outside of a loop."""
    inside = {id(node) for node in ast.walk(loop)}
    for node in ast.walk(tree):
        word = last_name(node)
        is_set = isinstance(getattr(node, "ctx", None), ast.Store)  # `config.grad_norm_clip = 1.0` reads none
        told = ("grad_norm" in word or "grad_value" in word) and not is_set
        if id(node) not in inside and (word in _GRADIENTS or told):
            return True
    around = (
        node for node in ast.walk(tree) if isinstance(node, ast.For) and any(part is loop for part in ast.walk(node))
    )
    return any(
        isinstance(node, ast.Attribute) and node.attr == "backward" and id(node) not in inside
        for outer in around
        for node in ast.walk(outer)
    )


def _set_before(loop: ast.For, place: _Place) -> set[str]:
    nodes = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.stmt | ast.expr) and (node.lineno, node.col_offset) < place
    ]
    # A statement that began before the inner loop may go on behind it.
    whole = [node for node in nodes if (node.end_lineno or 0, node.end_col_offset or 0) <= place]
    return stored(whole) | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _rewrite(tree: ast.Module, loop: ast.For, site: Site) -> None:
    loop.iter = ast.Call(ast.Name(HOOK, ast.Load()), [ast.Constant(site.number), loop.iter], [])
    loop.body = [new for statement in loop.body for new in Leaving.of(statement)]
    taken = _taken(site.lives) if site.lives else f"    {HOOK}.take()\n"
    # Before the next item is asked for: who makes it may read these names, and those that the item before was given to.
    loop.body[:0] = _lines(f"if {HOOK}.back:\n{taken}    continue", loop)
    names = [*site.lives, *site.after]
    behind = _lines(f"if {HOOK}.back:\n{_taken(names, site.lives)}", loop) if names and not site.outer else []
    for node in ast.walk(tree):
        for _, block in ast.iter_fields(node):
            if isinstance(block, list) and any(part is loop for part in block):
                place = next(index for index, part in enumerate(block) if part is loop)
                block[place + 1 : place + 1] = behind
                block[place:place] = _lines(f"{HOOK}.at({site.number})", loop)
                return


def _watch(call: ast.Call, line: int, *, ends: bool) -> None:
    """Has the hook told what a call asks of a file: `os.path.getsize(path)` becomes `asks(os.path.getsize, ...)(path)`."""
    told = [
        call.func,
        ast.Constant(ast.unparse(call)),
        ast.Constant(call.lineno),
        ast.Constant(line),
        ast.Constant(ends),
    ]
    hook = ast.Attribute(ast.Name(HOOK, ast.Load()), "asks", ast.Load())
    func = ast.copy_location(ast.Call(hook, told, []), call.func)
    call.func = func


def _taken(names: Sequence[str], lives: Sequence[str] | None = None) -> str:
    """Returns the lines that set names to what a version has, and delete those that the script had not set, or had
    deleted. `lives`: those that a step need not set; None: all.
    """
    deleted = (f"    if {HOOK}.absent({name!r}):\n        del {name}\n" for name in (names if lives is None else lives))
    return f"    {', '.join(names)}, = {HOOK}.take()\n" + "".join(deleted)


def _lines(text: str, loop: ast.For) -> list[ast.stmt]:
    lines = ast.parse(text).body
    for line in lines:
        for node in ast.walk(line):
            if hasattr(node, "lineno"):
                ast.copy_location(node, loop)
    return lines
