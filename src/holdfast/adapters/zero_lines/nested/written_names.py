"""Tells which names of a script may be written in place, by any way that its text leaves open.

    written(tree)       {"a", "flat"} of `flat = a.view(-1); flat += 1`

Pure. Rather one name too many is told: what is asked is only whether two names that share memory may stay two behind a restart. A name
may be written where a method that ends with an underscore, an item or `out=` says so, where it is given to a function that is none of torch's or
numpy's, where it is put into an object, and where this is so of a name that is made of it, of a function that returns it, or of a class
that has it. What is reckoned of a name is another value. Of a script that reads names by their text (`globals()`) all are told.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from holdfast.checkpoint.usage.in_place import is_writing
from holdfast.checkpoint.usage.name_flow import Function, last_name, own, stored

_LIBRARIES = {"torch", "numpy", "math"}
_READING = {
    "abs", "bool", "float", "int", "isinstance", "len", "max", "min", "print", "repr", "round", "str", "sum", "type",
}  # fmt: skip
# Functions of torch and numpy that may write to what they are given, or run a function with it.
_WRITING = {
    "apply_along_axis", "at", "batch_norm", "cond", "copyto", "embedding", "embedding_bag", "fill_diagonal", "instance_norm", "place", "put",
    "put_along_axis", "putmask", "shuffle", "swap_tensors",
}  # fmt: skip
# Parts of torch of which no function is believed.
_OTHER_PARTS = {"autograd", "distributed", "func", "ops", "optim", "utils"}
# Methods of arrays that write, besides those whose names say so.
_ARRAY_METHODS = {"byteswap", "fill", "itemset", "partition", "put", "setfield"}
# What reaches names that the text does not show.
_BY_TEXT = {"eval", "exec", "globals", "locals"}
# What makes another value of names.
_RECKONED = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.JoinedStr)


def written(tree: ast.Module) -> set[str]:
    """Returns the names that may be written in place."""
    libraries = _libraries(tree)
    found: set[str] = set()
    made: list[tuple[set[str], set[str]]] = []  # names, and those that they may be views of
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _reads_by_text(node.func.id, node):
            return {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
        found |= _written_here(node, libraries)
        made += _made_here(node)
    before = -1
    while len(found) != before:
        before = len(found)
        for names, of in made:
            if names & found:
                found |= of
    return found


def _reads_by_text(name: str, call: ast.Call) -> bool:
    return name in _BY_TEXT or (name == "vars" and not call.args)


def _written_here(node: ast.AST, libraries: dict[str, str]) -> set[str]:
    if isinstance(node, ast.AugAssign):
        return _names([node.target])
    if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return _names([node.value])
    if isinstance(node, ast.Assign) and not all(_is_plain(target) for target in node.targets):
        return _names([node.value])
    if isinstance(node, ast.Call):
        given = _names([*node.args, *(word.value for word in node.keywords)])
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if isinstance(node.func, ast.Attribute) and (
            is_writing(method) or method in _ARRAY_METHODS or method.startswith("__")
        ):
            return given | _names([node.func.value])
        return set() if _only_reads(node, libraries) else given
    return set()


def _made_here(node: ast.AST) -> Iterator[tuple[set[str], set[str]]]:
    if isinstance(node, ast.Assign):
        yield stored(node.targets), _names([node.value])
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield stored([node.target]), _names([node.value])
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield stored([node.target]), _names([node.iter])
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield stored([node.optional_vars]), _names([node.context_expr])
    elif isinstance(node, ast.Match):
        captured = {part.name for part in ast.walk(node) if isinstance(part, ast.MatchAs | ast.MatchStar) and part.name}
        yield captured, _names([node.subject])
    elif isinstance(node, Function | ast.Lambda):
        yield {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}, _names(_defaults(node.args))
        if isinstance(node, Function):
            told = (part.value for part in own(node) if isinstance(part, ast.Return | ast.Yield | ast.YieldFrom))
            yield {node.name}, _names(value for value in told if value is not None)
    elif isinstance(node, ast.ClassDef):
        held = [part.value for part in node.body if isinstance(part, ast.Assign | ast.AnnAssign)]
        yield {node.name}, _names(value for value in held if value is not None)


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [*arguments.defaults, *(value for value in arguments.kw_defaults if value is not None)]


def _only_reads(call: ast.Call, libraries: dict[str, str]) -> bool:
    """Tell whether a function surely leaves alone what it is given."""
    name = last_name(call.func)
    if any(word.arg in ("out", "inplace", "copy", None) for word in call.keywords):
        return False
    if any(isinstance(part, ast.Constant) and part.value is True for part in call.args):  # F.relu(x, True)
        return False
    words = []
    root: ast.expr = call.func
    while isinstance(root, ast.Attribute):
        words.append(root.attr)
        root = root.value
    if not isinstance(root, ast.Name):
        return False
    if libraries.get(root.id) == "numpy" and len(call.args) > 1:  # np.add(a, b, a), np.exp(a, a)
        return False
    if root.id in libraries:  # what classes make may keep it
        return not (name[0] == "_" or name[0].isupper() or name in _WRITING or _OTHER_PARTS & {*words[1:]})
    return not words and name in _READING


def _libraries(tree: ast.Module) -> dict[str, str]:
    """Returns the names by which the script calls functions of torch and numpy that may be believed, and whose they are."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            home = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            words = f"{home}{alias.name}".split(".")
            if words[0] in _LIBRARIES and not (_OTHER_PARTS & {*words} and (home or alias.asname)):
                found[alias.asname or (alias.name if home else words[0])] = words[0]
    return found


def _is_plain(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return all(map(_is_plain, target.elts))
    return isinstance(target, ast.Name) or (isinstance(target, ast.Starred) and _is_plain(target.value))


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the names that a value may be, or be a part of."""
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif not isinstance(node, _RECKONED):
            waiting += ast.iter_child_nodes(node)
    return found
