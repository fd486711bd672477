"""Tells, of a piece of Python text, which values a loop changes without setting a name: items, tensors written in place, attributes.

Pure: syntax trees in, paths (`losses`, `self.mean`, `state.batch`) with lines out. Attributes are read as names with dots, so the order of
reading and setting is judged as that of names is (`name_flow`): what every step sets before it reads it does not live on. Functions
of the file that the loop calls are looked into, with their parameters taken for what is passed. What is made of a clock, or of what
`restore()` returned, counts as nothing. Rather one path too few is told; whether a value really changes is seen at run time.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence

from holdfast.checkpoint.usage.name_flow import CLOCKS, Function, Functions, Reader, last_name, loaded, stored

# Methods that change what they are called of; those of tensors end with an underscore.
CHANGES = {
    "append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "clear", "update", "setdefault", "sort", "reverse",
}  # fmt: skip
# Functions that change their first argument.
_CHANGING = {"shuffle", "heappush", "heappop", "heapify", "heapreplace", "heappushpop"}
# How deep calls are followed.
MAX_DEPTH = 3
_NO_FUNCTIONS = Functions(ast.Module([], []))


def changed_in_place(source: str, loops: Container[int], without: set[str]) -> dict[str, int]:
    """Returns path -> line of what lives from one step to the next and is changed in place.

    Args:
        source: the text of the file.
        loops: the lines of its loops that are looked at.
        without: paths that are told elsewhere, or passed to `step`.
    """
    tree = _Dotted().visit(ast.parse(source))
    functions = {**{node.name: node for node in ast.walk(tree) if isinstance(node, Function)}, **_of_instances(tree)}
    read = _read_attributes(tree)
    found: dict[str, int] = {}
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For | ast.AsyncFor | ast.While) or loop.lineno not in loops:
            continue
        targets = stored([loop.target]) if not isinstance(loop, ast.While) else set()
        reader = Reader(set(targets), _NO_FUNCTIONS, runs=True)
        done = reader.run(loop.body)
        lasting = (reader.early | _sometimes(loop, done, read)) - targets
        found |= {path: line for path, line in _changes(loop.body) if path in lasting}
        called = {path: line for path, line in _of_calls(loop.body, functions, read, MAX_DEPTH) if path not in done}
        found = called | found
    known = _known(tree)
    return {path: at for path, at in found.items() if path not in without and path.rpartition(".")[2] not in known}


def left_in(source: str, first: int) -> dict[str, int]:
    """Returns attribute -> line of what methods of a class leave to their next calls; 0 for what some method sets anew.

    Args:
        source: the text of the class.
        first: the line of its file that it begins in.
    """
    tree = _Dotted().visit(parsed(source))
    methods = {node.name: node for node in ast.walk(tree) if isinstance(node, Function) and node.args.args}
    read, known = _read_attributes(tree), _known(tree)
    found: dict[str, int] = {}
    anew: set[str] = set()
    for name, method in methods.items():
        own = f"{method.args.args[0].arg}."
        if name == "__init__":
            continue
        reader = Reader(set(), _NO_FUNCTIONS, runs=True)
        done = reader.run(method.body)
        anew |= {path.removeprefix(own) for path in done - reader.early}
        for path, line in _inside(method, methods, read, MAX_DEPTH):
            if path.startswith(own):
                found.setdefault(path.removeprefix(own), line + first - 1)
    anew |= {path for path in found if path.rpartition(".")[2] in known}
    return {**found, **dict.fromkeys(anew, 0)}


def parsed(source: str) -> ast.Module:
    """Returns the tree of a class or function, with the lines that it has here; texts in it may begin in the first column.

    Raises:
        SyntaxError: it is no Python, as a part of a line may be.
    """
    if not source[:1].isspace():
        return ast.parse(source)
    return ast.increment_lineno(ast.parse("if True:\n" + source), -1)


def kept_by(source: str, first: int) -> dict[str, int]:
    """Returns name -> line of what a function keeps of the one around it, from one call to the next; as `left_in`."""
    tree = _Dotted().visit(parsed(source))
    function = next((node for node in ast.walk(tree) if isinstance(node, Function)), None)
    if function is None:
        return {}
    outside = {name for node in ast.walk(function) if isinstance(node, ast.Nonlocal) for name in node.names}
    found = _inside(function, {}, _read_attributes(tree), MAX_DEPTH)
    return {name: line + first - 1 for name, line in found if name in outside - _known(tree)}


def _of_instances(tree: ast.AST) -> dict[str, ast.AST]:
    """Returns what runs where an object of a class of the file is called, by its path: `stop()` for `stop = EarlyStopping(3)`."""
    classes = {
        node.name: {part.name: part for part in node.body if isinstance(part, Function)}
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target, value in _pairs(node):
            made = value.func if isinstance(value, ast.Call) else None
            methods = classes.get(made.id, {}) if isinstance(made, ast.Name) else {}
            method = methods.get("__call__") or methods.get("forward")
            if isinstance(target, ast.Name) and method is not None:
                found[f"{target.id}()"] = method
    return found


def _read_attributes(tree: ast.AST) -> Counter[str]:
    """Counts how often attributes are read in the file, by their last words."""
    return Counter(
        node.id.rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and "." in node.id and isinstance(node.ctx, ast.Load)
    )


def _sometimes(top: ast.AST, done: set[str], read: Counter[str]) -> set[str]:
    """Returns the attributes that only some steps set here, and that are read elsewhere: the weights of the best epoch."""
    here = _read_attributes(top)
    body = getattr(top, "body", [])
    return {path for path in stored(body) - done if "." in path and read[word := path.rpartition(".")[2]] > here[word]}


class _Dotted(ast.NodeTransformer):
    """Makes a name with dots of each attribute of a name; the method of a call stays one."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Leave the last word of what is called."""
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        else:
            node.func = self.visit(node.func)
        node.args = [self.visit(part) for part in node.args]
        node.keywords = [self.visit(part) for part in node.keywords]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Join the words; `x.data` is x."""
        node.value = self.visit(node.value)
        if not isinstance(node.value, ast.Name):
            return node
        if node.attr == "data":
            return node.value
        return ast.copy_location(ast.Name(f"{node.value.id}.{node.attr}", node.ctx), node)


def _changes(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yields path and line of what is changed: attributes that are set, items, and what methods change.

    What a loop gets from a name counts for that name: `for momentum in momenta: momentum.mul_(0.9)`.
    """
    inner = [node for top in nodes for node in ast.walk(top) if isinstance(node, ast.For)]
    for path, line in _changes_here(nodes):
        yield path, line
        yield from ((name, line) for loop in inner if path in stored([loop.target]) for name in loaded([loop.iter]))


def _changes_here(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int]]:
    for top in nodes:
        for node in ast.walk(top):
            path = ""
            if isinstance(node, ast.Name) and "." in node.id and not isinstance(node.ctx, ast.Load):
                path = node.id
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and "." in node.target.id:
                path = node.target.id
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                path = _root(node.value)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_writing(node.func.attr):
                path = _root(node.func.value)
            elif isinstance(node, ast.Call) and node.args and last_name(node.func) in _CHANGING:
                path = _root(node.args[0])
            if path:
                yield path, getattr(node, "lineno", 0)


def is_writing(method: str) -> bool:
    """Tell whether a method of this name changes what it is called of."""
    return method in CHANGES or (method.endswith("_") and not method.startswith("_") and not method.endswith("__"))


def _root(node: ast.AST) -> str:
    """Returns the path whose value an expression is a part of; empty if it is a part of none."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _of_calls(
    nodes: Sequence[ast.AST], functions: Mapping[str, ast.AST], read: Counter[str], depth: int
) -> Iterator[tuple[str, int]]:
    """Yields path and line of what lives on in functions that are called here, as their caller names it."""
    for top in nodes if depth else ():
        for node in ast.walk(top):
            if not isinstance(node, ast.Call):
                continue
            function, given = _called(node, functions)
            if function is None:
                continue
            for path, line in _inside(function, functions, read, depth):
                root, dot, rest = path.partition(".")
                if root in given:
                    if given[root]:
                        yield given[root] + dot + rest, line
                else:
                    yield path, line


def _called(call: ast.Call, functions: Mapping[str, ast.AST]) -> tuple[Function | None, dict[str, str]]:
    """Returns the function of a call, and what its parameters are called here; empty for what has no name here."""
    function = functions.get(last_name(call.func))
    called = ast.unparse(call.func) if isinstance(call.func, ast.Name | ast.Attribute) else ""
    instance = functions.get(f"{called}()") if function is None else None
    function = function or instance
    if not isinstance(function, Function):
        return None, {}
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    given = dict.fromkeys([*names, *(argument.arg for argument in function.args.kwonlyargs)], "")
    passed: list[ast.AST] = list(call.args)
    if instance is not None:
        passed.insert(0, ast.Name(called))
    elif isinstance(call.func, ast.Attribute):
        if names[:1] != ["self"]:
            return None, {}
        passed.insert(0, call.func.value)
    for name, value in [*zip(names, passed, strict=False), *((word.arg or "", word.value) for word in call.keywords)]:
        given[name] = value.id if isinstance(value, ast.Name) else ""
    return function, given


def _inside(
    function: Function, functions: Mapping[str, ast.AST], read: Counter[str], depth: int
) -> Iterator[tuple[str, int]]:
    """Yields path and line of what a function leaves to its next call: of its parameters, and of names that are not its own."""
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    outside = {n for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal) for n in node.names}
    own = {name for name in stored(function.body) if "." not in name} - outside
    reader = Reader(set(), _NO_FUNCTIONS, runs=True)
    done = reader.run(function.body)
    lasting = reader.early | _sometimes(function, done, read)
    changes = [
        *((path, line) for path, line in _changes(function.body) if path in lasting),
        *((name, function.lineno) for name in outside & reader.early & stored(function.body)),
        *((path, line) for path, line in _of_calls(function.body, functions, read, depth - 1) if path not in done),
    ]
    for path, line in changes:
        if path.partition(".")[0] not in own - arguments and path not in own:
            yield path, line


def _pairs(node: ast.Assign) -> list[tuple[ast.AST, ast.AST]]:
    """Returns what is set to what: `a, b = c, d` one by one."""
    (target, *others), value = node.targets, node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(each, value) for each in (target, *others)]


def _known(tree: ast.AST) -> set[str]:
    """Returns the last words of what the file makes of a clock, of what `restore()` returned or of what `carry` did."""
    values = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            values += [(stored([target]), value) for target, value in _pairs(node)]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
            values.append((stored([node.target]), node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_writing(node.func.attr):
            values += [({_root(node.func.value)}, value) for value in node.args]
    found = CLOCKS | {"restore", "last_restore", "carry"}
    before = -1
    while len(found) != before:
        before = len(found)
        for names, value in values:
            if {last_name(node).rpartition(".")[2] for node in ast.walk(value)} & found:
                found |= {name.rpartition(".")[2] for name in names}
    return found
