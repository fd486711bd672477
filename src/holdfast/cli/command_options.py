"""Options that several commands have, and commands whose options are the fields of a record."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Root = Annotated[str, typer.Argument(metavar="ROOT", help="The checkpoint directory, or a URL (file, s3, gs, az).")]
Redundancy = Annotated[
    str | None, typer.Option(metavar="WAY", help="Survive a lost node by replica, parity:K or none; default: replica.")
]
LikeRun = Annotated[
    str | None, typer.Option(metavar="RUN", help="Take failures, recovery and step time from the journal of this run.")
]
RanksPerNode = Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of ranks on each node.")]
RunningJob = Annotated[
    str | None, typer.Option(metavar="ROOT", help="The job that runs on this machine and saves to ROOT.")
]
VersionName = Annotated[str | None, typer.Argument(metavar="[VERSION]", help="A version as `holdfast ls` shows it.")]
Record = TypeVar("Record")


def takes(record: type[Record]) -> Callable[[Callable[[Record], None]], Callable[..., None]]:
    """Return what gives a command the fields of a dataclass as its options; each says as what it is written."""
    hints = get_type_hints(record, include_extras=True)
    options = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(record)  # type: ignore[arg-type]  # it is a dataclass
    ]

    def given(command: Callable[[Record], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(record(**values))

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = hints
        return run

    return given
