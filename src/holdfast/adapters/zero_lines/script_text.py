"""Reads in the text of a script what any part of it may do to the names of a loop: read them later, by text, or as numbers alone.

Pure. Also what the text says of files, of clocks and of sets; and the lines that tell the hook where a loop is left in good order.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator

from holdfast.checkpoint.usage.name_flow import Function, Scope, last_name, loaded

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


def words_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the names, and the names of attributes, in parts of a text."""
    return {name for node in nodes if (name := last_name(node))}


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


def scope_of(tree: ast.Module, loop: ast.AST) -> Scope:
    """Returns the innermost function around the loop, or another part, or the script."""
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
