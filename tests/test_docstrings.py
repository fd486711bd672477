"""Docstrings of the package, and help texts of its options, open with a verb or a subject, never with a relative clause."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from holdfast.cli.cli import app

SOURCE = Path(__file__).parents[1] / "src" / "holdfast"
NEVER = {
    "As", "By", "For", "From", "How", "If", "In", "Of", "To", "What", "When", "Where", "Whether", "Which", "Who", "Whose",
    "Why", "With",
}  # fmt: skip


def public(node: ast.AST) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield a module's public classes, functions and methods by name; what stands inside a function is its own business."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("_") and not child.name.startswith("__"):
                continue
            yield child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public(child)
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from public(child)


def openings(source: str) -> list[tuple[str, str]]:
    """Return (name, first word) of each public docstring of a module, its own included."""
    tree = ast.parse(source)
    documented = [(name, ast.get_docstring(node)) for name, node in [("module", tree), *public(tree)]]
    return [(name, text.split()[0].strip("`*.,:")) for name, text in documented if text]


@pytest.mark.parametrize("room", sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()))
def test_no_docstring_opens_with_a_relative_clause(room: str) -> None:
    found = {path: openings(path.read_text()) for path in (SOURCE / room).rglob("*.py")}
    assert sum(map(len, found.values())) > 30, "nothing was looked at"
    assert not [
        f"{path.relative_to(SOURCE)}: {name}" for path, each in found.items() for name, word in each if word in NEVER
    ]


def test_the_first_word_of_each_public_docstring_is_looked_at() -> None:
    source = '"""What a module is."""\nclass A:\n    """Of one."""\n    def b(self):\n        """Whether."""\n'
    assert openings(source + '    def _c(self):\n        """Who."""\n') == [
        ("module", "What"),
        ("A", "Of"),
        ("b", "Whether"),
    ]


def test_no_help_text_of_an_option_opens_with_a_relative_clause() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    texts = {
        f"{name} {parameter.name}": parameter.help
        for name, command in commands.items()
        for parameter in command.params
        if getattr(parameter, "help", None)
    }
    assert len(texts) > 40
    assert not [option for option, text in texts.items() if text.split()[0] in NEVER or not text.endswith(".")]
