"""The parts of a value that hold something of the world outside, and the paths by which a text names parts.

    path_of(`a.b['c']`)       "a.b['c']"
    {"": sources, "['lr']": sources, ".now()": sources}       what it is made of, what an item is, what an attribute returns when it is called

Pure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.checkpoint.usage.name_flow import last_name


@dataclass(frozen=True)
class Source:
    """One place where something is asked.

    Attributes:
        text, line: of the call.
        is_file: whether it is asked of a file.
        node: the call.
    """

    text: str
    line: int
    is_file: bool
    node: ast.Call = field(compare=False)


Sources: TypeAlias = frozenset[Source]
# What a value holds: a part of it, as "", "[0]", "['lr']" or ".total" -> where that comes from.
Value: TypeAlias = dict[str, Sources]
NONE: Sources = frozenset()


def path_of(node: ast.AST) -> str:
    """Returns `a.b['c']` of what is written so; empty if it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if (of := _attributes_of(node)) is not None:
        return path_of(of)
    if isinstance(node, ast.Attribute):
        base = path_of(node.value)
        return f"{base}.{node.attr}" if base else ""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        key: object = node.slice.value
        if _are_names(node.value):
            return str(key)
        base = path_of(node.value)
        is_attribute = _attributes_of(node.value) is not None
        return f"{base}.{key!s}" if base and is_attribute else f"{base}[{key!r}]" if base else ""
    return ""


def _attributes_of(node: ast.AST) -> ast.expr | None:
    """Returns x of `vars(x)` and `x.__dict__`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args:
        return node.args[0]
    return node.value if isinstance(node, ast.Attribute) and node.attr == "__dict__" else None


def _are_names(node: ast.AST) -> bool:
    """Tell whether this is the dict of the names that are set here: `globals()`."""
    return isinstance(node, ast.Call) and not node.args and last_name(node.func) in ("globals", "locals", "vars")


def stores(node: ast.Call) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields what a call sets, with the value: `setattr(x, "lr", y)`, `operator.setitem(x, "lr", y)`, `vars(x).update(lr=y)`."""
    name, given = last_name(node.func), node.args
    of = node.func.value if isinstance(node.func, ast.Attribute) else None
    if of is not None and len(given) == 2 and name in ("__setattr__", "__setitem__", "setdefault"):
        given = [of, *given]
    if len(given) == 3 and name in ("setattr", "__setattr__", "setitem", "__setitem__", "setdefault"):
        yield _target(given[0], given[1], is_item="attr" not in name), given[2]
    elif of is not None and name == "update" and (_are_names(of) or _attributes_of(of) is not None):
        for word in node.keywords:
            yield ast.Subscript(of, ast.Constant(word.arg), ast.Store()), word.value
        for part in given:
            for key, value in (
                zip(part.keys, part.values, strict=True) if isinstance(part, ast.Dict) else ((None, part),)
            ):
                yield ast.Subscript(of, key or ast.Name("*"), ast.Store()), value


def _target(of: ast.expr, key: ast.expr, *, is_item: bool) -> ast.expr:
    if isinstance(key, ast.Constant) and isinstance(key.value, str) and not is_item:
        return ast.Attribute(of, key.value, ast.Store())
    return ast.Subscript(of, key, ast.Store())


def root(path: str) -> str:
    """Returns the name that a path begins with."""
    return path.replace("[", ".").replace("(", ".").partition(".")[0]


def is_part(path: str, of: str) -> bool:
    """Tell whether a path is of a part of another one."""
    return path.startswith(of) and path[len(of) : len(of) + 1] in (".", "[", "(")


def functions_in(value: Value) -> Sources:
    """Returns what the functions tell that a value is, or that lie in it as items."""
    return NONE.union(*(held for part, held in value.items() if part.endswith("()") and part[0] in "[("))


def everything(value: Value) -> Sources:
    """Returns what a value, and all that lies in it, is made of."""
    return NONE.union(*value.values())


def part_of(value: Value, name: str) -> Value:
    """Returns what a part of a value holds."""
    found: Value = {}
    for part, sources in value.items():
        if not part or part == name:
            add(found, "", sources)
        elif is_part(part, name):
            add(found, part[len(name) :], sources)
    return found


def plain(value: Value) -> Sources:
    """Returns what a value is made of; not what lies in it under a name: who takes a part of it mostly takes another."""
    return NONE.union(
        *(
            sources
            for part, sources in value.items()
            if not part or (part[0] == "[" and part[1] not in "'\"" and part[-1] != ")")
        )
    )


def merged(one: Value, other: Value) -> Value:
    """Returns a value that may be one or the other."""
    found = dict(one)
    for part, sources in other.items():
        add(found, part, sources)
    return found


def add(found: dict[str, Sources], part: str, sources: Sources) -> None:
    """Adds where a part comes from, if that is anywhere."""
    if sources:
        found[part] = found.get(part, NONE) | sources


def without_files(sources: Sources) -> Sources:
    """Returns what is not asked of files."""
    return frozenset(source for source in sources if not source.is_file)
