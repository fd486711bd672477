"""Docstrings of the package, and help texts of its options, open with a verb or a subject, never with a relative clause."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import typer

from holdfast.cli.cli import app

SOURCE = Path(__file__).parents[1] / "src" / "holdfast"

pytestmark = pytest.mark.usefixtures("without_collector")
NEVER = {
    "As", "By", "For", "From", "How", "If", "In", "Of", "To", "What", "When", "Where", "Whether", "Which", "Who", "Whose",
    "Whatever", "Whoever", "Why", "With",
}  # fmt: skip


def openings(source: str) -> list[tuple[str, str]]:
    """Return (name, first word) of each docstring of a module: its own, and those of classes and functions at any depth."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    documented = [(getattr(node, "name", "module"), ast.get_docstring(node)) for node in nodes]
    return [(name, text.split()[0].strip("`*.,:")) for name, text in documented if text]


@pytest.mark.parametrize("room", sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()))
def test_no_docstring_opens_with_a_relative_clause(room: str) -> None:
    found = {path: openings(path.read_text()) for path in (SOURCE / room).rglob("*.py")}
    assert sum(map(len, found.values())) > 30, "nothing was looked at"
    assert not [
        f"{path.relative_to(SOURCE)}: {name}" for path, each in found.items() for name, word in each if word in NEVER
    ]


def test_first_word_of_each_docstring_is_looked_at() -> None:
    source = '"""What a module is."""\nclass A:\n    """Of one."""\n    def b(self):\n        """Whether."""\n'
    assert openings(source + '    def _c(self):\n        """Who."""\n') == [
        ("module", "What"),
        ("A", "Of"),
        ("b", "Whether"),
        ("_c", "Who"),
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
