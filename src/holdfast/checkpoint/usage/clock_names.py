"""Finds the names of a script that may hold a time: no two runs have the same there, and nobody takes that for a fault.

    t0 = time.time()                 t0, by a word of a clock
    spent = now() - t0               spent, by a name that holds one, or by a function of the script that asks a clock
    def train(epoch, since): ...     since, if it is called as train(1, t0)

Pure: a tree in, names out. It follows names only, not attributes and items; `names_of_start` follows attributes too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Sequence

from holdfast.checkpoint.usage.name_flow import CLOCKS, Function, last_name, stored

# Words of what draws a name for a run.
_DRAWN = {"uuid1", "uuid4", "token_hex", "token_urlsafe", "mkdtemp", "TemporaryDirectory"}
# What reads a file begins with one of these words, or opens it so.
_READERS = ("load", "read", "resume", "restore", "from_", "imread", "safe_open", "open")
_WRITING = re.compile(r"[wax][bt]?")
# Statements and expressions by which something is given a value.
_GIVING = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.Return, ast.Call)
_OF_START = re.compile(rf"\b({'|'.join(sorted(CLOCKS | _DRAWN))})\b")


def of_start(text: str) -> bool:
    """Tell whether a text asks a clock, or draws a name."""
    return _OF_START.search(text) is not None


def names_of_start(trees: Sequence[ast.Module]) -> frozenset[str]:
    """Returns the names and attributes, in texts that belong together, that may hold a time or a name that was drawn."""
    functions: dict[str, list[Function]] = {}
    nodes: list[ast.AST] = []
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, _GIVING):
            nodes.append(node)
        elif isinstance(node, Function):
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            made = [part for part in node.body if isinstance(part, Function) and part.name == "__init__"]
            functions.setdefault(node.name, []).extend(made)
    found: set[str] = set()
    returns = _returns(functions)
    while True:
        words = CLOCKS | _DRAWN | found
        new = {name for node in nodes for name in _given(node, functions, words, returns, attributes=True)} - found
        if not new:
            return frozenset(found)
        found |= new


def finds_files(trees: Sequence[ast.Module], started: Container[str]) -> bool:
    """Tell whether a script finds files that it reads by one of these names: `torch.load(run / "best.pt")`."""
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and _reads(node))
    parts = (part for call in calls for part in _given_to(call))
    return any(last_name(node) in started for part in parts for node in ast.walk(part))


def _reads(call: ast.Call) -> bool:
    """Tell whether a call may read a file: it is called so, and opens none for writing alone."""
    name = last_name(call.func)
    if not name.startswith(_READERS) or name == "load_state_dict":
        return False
    texts = (part.value for part in _given_to(call) if isinstance(part, ast.Constant) and isinstance(part.value, str))
    return name != "open" or not any(map(_WRITING.fullmatch, texts))


def _given_to(call: ast.Call) -> list[ast.expr]:
    """Returns what a call is given, with the object that it is a method of."""
    own = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return [*own, *call.args, *(word.value for word in call.keywords)]


def clock_names(tree: ast.Module, *, meters: bool = False) -> frozenset[str]:
    """Returns the names that may hold what a clock told. `meters`: an object counts too that is given a time,
    `seconds.update(time.time() - t0)`.
    """
    functions: dict[str, list[Function]] = {}
    for node in ast.walk(tree):
        if isinstance(node, Function):
            functions.setdefault(node.name, []).append(node)
    found: set[str] = set()
    returns = _returns(functions)
    while True:
        words = CLOCKS | found
        new = {name for node in ast.walk(tree) for name in _given(node, functions, words, returns)} - found
        new |= (
            {name for node in ast.walk(tree) for name in _metered(node, functions, words)} - found if meters else set()
        )
        if not new:
            return frozenset(found)
        found |= new


def _returns(functions: dict[str, list[Function]]) -> dict[int, set[str]]:
    """Returns the names of the functions that each `return` stands in, by its `id`."""
    found: dict[int, set[str]] = {}
    for name, each in functions.items():
        for node in (node for function in each for node in ast.walk(function)):
            if isinstance(node, ast.Return):
                found.setdefault(id(node), set()).add(name)
    return found


def _given(
    node: ast.AST,
    functions: dict[str, list[Function]],
    words: set[str],
    returns: dict[int, set[str]],
    *,
    attributes: bool = False,
) -> set[str]:
    """Returns what gets a time by one node."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
        if node.value is None or not _asks(node.value, functions, words):
            return set()
        held = (part for part in ast.walk(node) if isinstance(part, ast.Attribute) and attributes)
        return stored([node]) | {part.attr for part in held if isinstance(part.ctx, ast.Store)}
    if isinstance(node, ast.Return) and node.value is not None and _asks(node.value, functions, words):
        return returns.get(id(node), set())
    if isinstance(node, ast.Call):
        return {
            name for each in functions.get(last_name(node.func), ()) for name in _passed(node, each, functions, words)
        }
    return set()


def _metered(node: ast.AST, functions: dict[str, list[Function]], words: set[str]) -> set[str]:
    """Returns the name of an object of which a method is given a time."""
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or not isinstance(node.func.value, ast.Name)
    ):
        return set()
    given = [*node.args, *(word.value for word in node.keywords)]
    return {node.func.value.id} if any(_asks(value, functions, words) for value in given) else set()


def _passed(call: ast.Call, function: Function, functions: dict[str, list[Function]], words: set[str]) -> set[str]:
    """Returns the parameters of a function that a call gives a time."""
    names = [part.arg for part in (*function.args.posonlyargs, *function.args.args)]
    names = names[names[:1] in (["self"], ["cls"]) :]
    passed = [*zip(names, call.args, strict=False), *((word.arg, word.value) for word in call.keywords if word.arg)]
    return {name for name, value in passed if _asks(value, functions, words)}


def _asks(value: ast.AST, functions: dict[str, list[Function]], words: set[str]) -> bool:
    """Tell whether an expression may be a time: what is passed to a function of the script is no part of its result."""
    if isinstance(value, ast.Call) and last_name(value.func) in functions:
        return last_name(value.func) in words
    return last_name(value) in words or any(_asks(part, functions, words) for part in ast.iter_child_nodes(value))
