"""Writes the reference pages from the code itself: what is public, every setting, every error, every command's help."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import click
import typer

import holdfast
from holdfast.base import config, errors
from holdfast.cli.cli import app
from website.pages import joined, page, table

MADE = "This page is made from the code of this version."
# What a framework or a script imports besides `holdfast` itself; docs/frameworks.md tells how.
DOORS = (
    "holdfast.adapters.huggingface",
    "holdfast.adapters.lightning",
    "holdfast.adapters.dcp",
    "holdfast.adapters.deepspeed",
    "holdfast.adapters.megatron",
    "holdfast.adapters.torch_checkpointing",
    "holdfast.adapters.torchtitan",
    "holdfast.adapters.ray",
)


def api() -> str:
    """Returns the page of the public API; mkdocstrings fills it in."""
    homes = {name: holdfast._HOMES[name] for name in holdfast.__all__}
    names = "\n\n".join(f"::: {home}.{name}\n    options: {{heading_level: 3}}" for name, home in homes.items())
    doors = "\n\n".join(f"::: {door}\n    options: {{heading_level: 3, show_root_full_path: true}}" for door in DOORS)
    return page("Python API", MADE, "## holdfast", names, "## Doors for frameworks", doors)


def settings() -> str:
    """Returns the page of all settings, with variables, defaults and meanings."""
    variables = {field: name for name, field in config.ENVIRONMENT.items()}
    meanings = attributes(config.Config)
    rows = [
        (f"`{field.name}`", f"`{field.default!r}`", f"`{variables[field.name]}`" if field.name in variables else "",
         meanings[field.name])
        for field in dataclasses.fields(config.Config)
    ]  # fmt: skip
    where = (
        "An argument or flag goes before the environment, the environment before the TOML file that "
        f"`{config.CONFIG_FILE_VARIABLE}` names, and that before the default. `{config.DISABLE_VARIABLE}=1` switches "
        "everything off."
    )
    return page("Settings", f"{MADE} {where}", table(("setting", "default", "variable", "meaning"), rows))


def attributes(cls: type) -> dict[str, str]:
    """Returns what the section `Attributes:` of a class's docstring says of each name."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): ((?:.|\n(?!    \w+: ))*)", text, re.MULTILINE)
    return {name: " ".join(said.split()) for name, said in found}


def error_codes() -> str:
    """Returns the page of all errors, by code."""
    found = sorted(_below(errors.HoldfastError), key=lambda error: error.code)
    rows = [
        (f"[{error.code}](../troubleshooting.md#{error.code.lower()}-{error.__name__.lower()})", f"`{error.__name__}`",
         inspect.cleandoc(error.__doc__ or "").split("\n\n")[0], error.advice, "yes" if error.retryable else "no")
        for error in found
    ]  # fmt: skip
    head = ("code", "class", "what it says", "what to do, where the error does not say it better", "may pass by itself")
    return page("Errors", MADE, table(head, rows))


def _below(error: type[errors.HoldfastError]) -> list[type[errors.HoldfastError]]:
    return [found for each in error.__subclasses__() for found in (each, *_below(each))]


def help_texts() -> str:
    """Returns the page of what `--help` of every command prints."""
    command = typer.main.get_command(app)
    return page("Help of every command", MADE, joined(dict(_helps(command, "holdfast"))))


def _helps(command: Any, name: str) -> list[tuple[str, str]]:
    context = click.Context(command, info_name=name, terminal_width=110, max_content_width=110)
    found = [(name, f"```text\n{command.get_help(context)}\n```")]
    for each, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            found += _helps(below, f"{name} {each}")
    return found
