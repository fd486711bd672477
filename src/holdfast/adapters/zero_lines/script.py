"""Finds the training loop of a script, and writes the lines into it that nobody had to write.

    for step in range(1000):          for step in __holdfast_kept__(range(1000)):
        ...                               if __holdfast_kept__.back:
                                              total, = __holdfast_kept__.take()
                                          ...
    print(total, step)                if __holdfast_kept__.back:
                                          total, step, = __holdfast_kept__.rest()
                                      print(total, step)

Pure: a syntax tree in, a tree or a reason out. What is looked for: exactly one loop over a `range` of numbers, in which,
or in functions of the script that it calls, there is a call of `backward` and one of `step`; no such loop around or inside
it. Names that live from one step to the next are found too (`carried`): those that a step may read before it has set them,
and those that it may leave unset and that are read behind the loop. What every step sets and code behind the loop reads
(`after`) is needed when all steps are made and that code runs again.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.usage.cleared_gradients import sets_none
from holdfast.checkpoint.usage.clock_names import last_name
from holdfast.checkpoint.usage.name_flow import CLOCKS, Function, Functions, Reader, Scope, loaded, own, stored

HOOK = "__holdfast_kept__"
# Why a script that calls us by itself is left alone.
ITSELF = "the script uses holdfast itself"
NO_LOOP = "no loop with backward() and step() was found"

# What may be asked of a tensor so that one without its graph gives the same answer.
_NUMBER_METHODS = {"item", "tolist", "detach"}
_NUMBER_FUNCTIONS = {"float", "int", "bool"}

# Words of scripts that look for a file of their own and go on from it.
READS = {"exists", "isfile", "is_file", "isdir", "is_dir", "glob", "listdir", "open", "read_text", "read_bytes"}
# What fills and empties a set, whatever its order is.
_FILLS = {"add", "discard", "remove", "update", "clear"}
# Calls by which names are read that the text does not name.
_BY_TEXT = {"globals", "locals", "eval", "exec"}
# What may read a name later than where it stands.
_LASTING = (Function, ast.Lambda, ast.ClassDef, ast.GeneratorExp)
_SCOPES = ("globals", "locals", "vars")


@dataclass(frozen=True, slots=True)
class Loop:
    """A script with a loop that can be kept, as far as its text tells.

    Attributes:
        tree: the script with the lines.
        carried: names that live from one step to the next.
        used: names that the loop, or any function of the script, reads and the loop does not set.
        after: names that every step sets and that are read outside of the loop, the loop's own number among them.
        numbers: those of them of which only the number is asked for, so that a tensor may come back without its graph.
        sets: names that the loop itself sets.
        clears: the optimizer or module, as written, whose gradients every step clears before it computes new ones.
        pops: whether something is popped that may be a set.
        members: names of which nothing is asked but what they contain, so that an order of theirs matters to nobody.
        reads_clock: whether the script reads a clock.
        reads_files: whether the script calls something that may have it go on from a file of its own.
        bounds: names and attributes that say how far the loop counts.
        lines: attribute or name -> the first line of the loop, or of a function, that stores to it or calls a method of it.
    """

    tree: ast.Module
    carried: tuple[str, ...]
    used: tuple[str, ...]
    after: tuple[str, ...] = ()
    numbers: frozenset[str] = frozenset()
    sets: frozenset[str] = frozenset()
    clears: str = ""
    members: frozenset[str] = frozenset()
    pops: bool = False
    reads_clock: bool = False
    reads_files: bool = False
    bounds: frozenset[str] = frozenset()
    lines: tuple[tuple[str, int], ...] = ()


def find(source: str) -> Loop | str:
    """Returns the loop, or why there is none that can be kept.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source)
    if any(name.split(".")[0] == "holdfast" for name in imported(tree)):
        return ITSELF
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
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
    scope = scope_of(tree, loop)
    if any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await) for node in own(scope)):
        return f"the loop of line {loop.lineno} stands in a generator, whose caller runs between two steps"
    return _described(tree, loop, loop.target.id, scope, functions)


def _described(tree: ast.Module, loop: ast.For, target: str, scope: Scope, functions: dict[str, Function]) -> Loop:
    known = Functions(tree)
    reader = Reader({target}, known)
    done = reader.body(loop.body)
    sets = stored(loop.body) | {target}
    # What the function of the loop declares to be somebody else's may be read anywhere.
    outside = read_later(scope, loop) | {
        name for node in own(scope) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names
    }
    early = reader.early | (known.ambient - {target}) | read_by_text(tree, loop)
    carried = sorted((early & (sets - {target})) | ((sets - done) & outside))
    after = sorted((sets & outside) - set(carried))
    used = {n for part in (loop, *functions.values()) for n in loaded([part])} - (sets - set(carried))
    words = words_in(ast.walk(tree))
    bounds = {ast.unparse(n) for n in ast.walk(loop.iter) if isinstance(n, ast.Attribute | ast.Name)}
    clears = _clears_first(loop.body, functions, frozenset()) or ""
    if clears.partition(".")[0] in sets:
        clears = ""
    members = frozenset(only_members(tree))
    lines = lines_of(loop, functions.values())
    numbers = frozenset(name for name in after if only_numbers(scope, loop, name))
    _rewrite(scope, loop, carried, after)
    return Loop(
        tree,
        tuple(carried),
        tuple(sorted(used - {HOOK})),
        after=tuple(after),
        numbers=numbers,
        sets=frozenset(sets),
        clears=clears,
        members=members,
        pops=any(isinstance(n, ast.Attribute) and n.attr == "pop" for n in ast.walk(tree)),
        reads_clock=bool(words & CLOCKS),
        reads_files=reads_files(words),
        bounds=frozenset(bounds),
        lines=tuple(sorted(lines.items())),
    )


def words_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the names, and the names of attributes, in parts of a text."""
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in nodes
        if isinstance(node, ast.Attribute | ast.Name)
    }


def reads_files(words: Iterable[str]) -> bool:
    """Tell whether a text with these words may look for files or read them."""
    return any(word in READS or word.startswith(("load", "resume", "restore")) for word in words)


def imported(tree: ast.Module) -> Iterator[str]:
    """Yields the modules that a script imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def _trains(loop: ast.For | ast.While, functions: dict[str, Function]) -> bool:
    called = _called(loop.body, functions, set())
    return {"backward", "step"} <= called


def _called(body: Sequence[ast.AST], functions: dict[str, Function], seen: set[str]) -> set[str]:
    """Returns names of methods that are called here, and in functions of the script that are called here."""
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


def scope_of(tree: ast.Module, loop: ast.stmt) -> Scope:
    """Returns the innermost function around the loop, or the script."""
    found: Scope = tree
    for node in ast.walk(tree):
        if isinstance(node, Function) and any(inner is loop for inner in ast.walk(node)):
            found = node  # ast.walk goes from the outside in
    return found


def read_later(scope: Scope, loop: ast.stmt) -> set[str]:
    """Returns the names that are read around a loop or behind it, and by functions; not what was read once before it."""
    place = next(index for index, part in enumerate(scope.body) if any(node is loop for node in ast.walk(part)))
    lasting = [part for part in scope.body[:place] if any(isinstance(node, _LASTING) for node in ast.walk(part))]
    return loaded([*lasting, *scope.body[place:]], without=loop)


def read_by_text(tree: ast.Module, loop: ast.For) -> set[str]:
    """Returns the names with a value before the loop, if the script reads names in a way that its text does not show.

    What is done once and for all before a loop of the script itself reads nothing of it: `exec(open("config.py").read())`. A function
    that is made so is seen when it is looked at (`reach`).
    """
    done = {id(node) for node in _done_before(tree, loop)}
    calls = [
        (node.func.id, node.args)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and id(node) not in done
    ]
    if not any(name in _BY_TEXT or (name == "vars" and not arguments) for name, arguments in calls):
        return set()
    inside = {id(node) for node in ast.walk(loop)}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in inside)
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _done_before(tree: ast.Module, loop: ast.For) -> Iterator[ast.Call]:
    """Yields the calls that have read all that they read before a loop begins: of statements of the script itself, above it."""
    for statement in tree.body:
        if any(node is loop for node in ast.walk(statement)):
            return
        if isinstance(statement, Function | ast.ClassDef | ast.For | ast.While):
            continue
        if any(isinstance(node, _LASTING) for node in ast.walk(statement)):
            continue
        for node in ast.walk(statement):
            # Of `globals()` only an item is taken, or it is gone through: who kept it could read it later.
            for value in _values_read(node):
                if isinstance(value, ast.Call):
                    yield value


def _values_read(node: ast.AST) -> Iterator[ast.expr]:
    found: ast.expr | None = None
    if (isinstance(node, ast.Expr) and _is_call_of(node.value, ("exec",))) or (
        isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
    ):
        found = node.value
    elif isinstance(node, ast.comprehension):
        method = node.iter.func if isinstance(node.iter, ast.Call) else None
        found = method.value if isinstance(method, ast.Attribute) else node.iter
    if found is not None and _is_call_of(found, ("exec", *_SCOPES)):
        yield found


def _is_call_of(node: ast.expr, names: Container[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def only_numbers(scope: Scope, loop: ast.For, name: str) -> bool:
    """Tell whether outside of the loop nothing is asked of a name but its number: `x.item()`, `float(x)`, `f"{x:.3f}"`."""
    inside = {id(node) for node in ast.walk(loop)}
    plain: set[int] = set()
    for node in ast.walk(scope):
        if (isinstance(node, ast.Attribute) and node.attr in _NUMBER_METHODS) or (
            isinstance(node, ast.FormattedValue) and node.conversion == -1
        ):
            plain.add(id(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NUMBER_FUNCTIONS:
            plain.update(map(id, node.args))
    return all(
        id(node) in plain or id(node) in inside
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    )


def _clears_first(body: Sequence[ast.stmt], functions: dict[str, Function], seen: frozenset[str]) -> str | None:
    """Returns whose gradients are cleared before any are computed, in every step, as it is written.

    Empty if they may be computed before, or nobody can tell; None if neither is done here.
    """
    for statement in body:
        found: str | None
        if isinstance(statement, ast.With | ast.AsyncWith):
            found = _clears_first(statement.body, functions, seen)
        elif (cleared := _sets_grad(statement)) is not None:
            found = cleared
        elif isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return):
            found = _order(statement, functions, seen)
        else:
            found = "" if "backward" in _called([statement], functions, set()) else None
        if found is not None:
            return found
    return None


def _order(statement: ast.stmt, functions: dict[str, Function], seen: frozenset[str]) -> str | None:
    whole = getattr(statement, "value", None)
    method = whole.func if isinstance(statement, ast.Expr) and isinstance(whole, ast.Call) else None
    if isinstance(method, ast.Attribute) and method.attr == "zero_grad" and _is_path(method.value):
        return ast.unparse(method.value)
    called = _called([statement], functions, set())
    if not called & {"zero_grad", "backward"}:
        return None
    while isinstance(whole, ast.Call | ast.Attribute) and not (
        isinstance(whole, ast.Call) and isinstance(whole.func, ast.Name)
    ):  # `train(x).item()`
        whole = whole.func if isinstance(whole, ast.Call) else whole.value
    if isinstance(whole, ast.Call) and isinstance(whole.func, ast.Name) and whole.func.id not in seen:
        name = whole.func.id
        within = [part for part in (*whole.args, *whole.keywords) if _called([part], functions, set()) & {"backward"}]
        if name in functions and not within:
            return _of_call(whole, functions[name], _clears_first(functions[name].body, functions, seen | {name}))
    return ""


def _of_call(call: ast.Call, function: Function, cleared: str | None) -> str | None:
    """Returns what a function clears, as its caller names it: what is passed, or a name that is not the function's own."""
    if not cleared:
        return cleared
    root, dot, rest = cleared.partition(".")
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    if root in stored(function.body):
        return ""
    passed = dict(zip(names, call.args, strict=False)) | {word.arg: word.value for word in call.keywords if word.arg}
    if root in passed and _is_path(passed[root]) and not any(isinstance(part, ast.Starred) for part in call.args):
        return ast.unparse(passed[root]) + dot + rest
    own_names = {*names, *(argument.arg for argument in function.args.kwonlyargs)}
    return "" if root in own_names else cleared


def _is_path(node: ast.expr) -> bool:
    """Tell whether this is a name, or an attribute of one."""
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_path(node.value))


def _sets_grad(statement: ast.stmt) -> str | None:
    """Returns whose gradients a loop sets to None, as the script calls it; None if it does not, or for what has no such name."""
    of = sets_none(statement)
    return ast.unparse(of) if of is not None and _is_path(of) else None


def only_members(tree: ast.Module) -> set[str]:
    """Returns the names of which nothing is asked but `in`, `len` and `sorted`, and that are only filled and emptied."""
    asked: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            pairs = zip(node.ops, node.comparators, strict=True)
            asked.update(id(value) for op, value in pairs if isinstance(op, ast.In | ast.NotIn))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("len", "sorted"):
            asked.update(map(id, node.args))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
            asked.add(id(node.func.value))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return {node.id for node in names} - {node.id for node in names if id(node) not in asked}


def lines_of(loop: ast.For, functions: Iterable[Function]) -> dict[str, int]:
    """Returns, by attribute or name, the first line that stores to it or calls a method of it."""
    found: dict[str, int] = {}
    for part in (loop, *functions):
        for node in ast.walk(part):
            name = ""
            if isinstance(node, ast.Attribute):
                name = node.attr if isinstance(node.ctx, ast.Store | ast.Del) else last_name(node.value)
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                name = last_name(node.value)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                name = node.id
            if name:
                found.setdefault(name, node.lineno)  # type: ignore[attr-defined]  # all of these have a line
    return found


def _rewrite(scope: Scope, loop: ast.For, carried: Sequence[str], after: Sequence[str]) -> None:
    loop.iter = ast.Call(ast.Name(HOOK, ast.Load()), [loop.iter], [])
    loop.body = [new for statement in loop.body for new in Leaving.of(statement)]
    if carried:
        loop.body[:0] = _taking("take", carried, loop)
    if carried or after:
        for node in ast.walk(scope):
            for _, block in ast.iter_fields(node):
                if isinstance(block, list) and any(part is loop for part in block):
                    place = next(index for index, part in enumerate(block) if part is loop)
                    block[place + 1 : place + 1] = _taking("rest", [*carried, *after], loop)
    ast.fix_missing_locations(scope)


class Leaving(ast.NodeTransformer):
    """Tells the hook of each `break` and `return` that leaves the loop: an error that leaves it says nothing."""

    @classmethod
    def of(cls, statement: ast.stmt) -> list[ast.stmt]:
        """Returns the statements in the place of one."""
        found = cls().visit(statement)
        return found if isinstance(found, list) else [found]

    def visit_Break(self, node: ast.Break | ast.Return) -> list[ast.stmt]:
        call = ast.Call(ast.Attribute(ast.Name(HOOK, ast.Load()), "leave", ast.Load()), [], [])
        return [ast.copy_location(ast.Expr(call), node), node]

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        return self.visit_Break(node)

    def visit_For(self, node: ast.For | ast.While) -> ast.stmt:
        inner = [child for statement in node.body for child in _Returning.of(statement)]
        node.body, node.orelse = inner, [new for statement in node.orelse for new in self.of(statement)]
        return node

    def visit_While(self, node: ast.While) -> ast.stmt:
        return self.visit_For(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.stmt:
        return node


class _Returning(Leaving):
    """The same of a loop within the loop."""

    def visit_Break(self, node: ast.Break | ast.Return) -> list[ast.stmt]:
        return super().visit_Break(node) if isinstance(node, ast.Return) else [node]

    def visit_For(self, node: ast.For | ast.While) -> ast.stmt:
        self.generic_visit(node)
        return node


def _taking(method: str, names: Sequence[str], loop: ast.For) -> list[ast.stmt]:
    lines = ast.parse(f"if {HOOK}.back:\n    {', '.join(names)}, = {HOOK}.{method}()").body
    for node in ast.walk(lines[0]):
        if hasattr(node, "lineno"):
            ast.copy_location(node, loop)
    return lines
