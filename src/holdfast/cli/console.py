"""Tells how commands speak: results on standard output, progress on standard error, errors as what, where and remedy.

With `--json` standard output is one JSON document (with `--watch`: one per line), errors included, so that a program
never has to read prose; where options are used wrongly it is empty. Exit codes: 0 good, 1 a problem was found, or standard output took
not all of the answer, 2 the command was used wrongly. No command shows a traceback for a HoldfastError.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import typer

from holdfast.base import progress_report
from holdfast.base.errors import HoldfastError, UsageError
from holdfast.base.progress_report import QUIET_S, progress_text
from holdfast.base.terminal import shown

GOOD, PROBLEM, USAGE = 0, 1, 2
TERMINAL_REFRESH_S = 0.1
LOG_REFRESH_S = 5.0
# Longer ones are refused by Python (sys.set_int_max_str_digits), beyond 4,300 digits.
MOST_DECIMAL_BITS = 8192

size_text = progress_report.size_text


def say(text: object = "", *, file: TextIO | None = None, end: str = "\n") -> None:
    """Prints a line, or several. Everything that a command tells people goes through here."""
    print(shown(text), file=file, end=end)


def print_json(document: Any) -> None:
    """One JSON document on one line. A number that JSON does not know stands there as text: `"nan"`, `"inf"`."""
    try:
        text = json.dumps(document, default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_with_numbers_of_json(document), default=str, allow_nan=False)
    print(text)


def _with_numbers_of_json(document: Any) -> Any:
    """Spell out numbers without end, and those with more digits than Python writes in decimal."""
    if isinstance(document, dict):
        return {key: _with_numbers_of_json(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [_with_numbers_of_json(value) for value in document]
    if isinstance(document, float) and not math.isfinite(document):
        return str(float(document))
    if isinstance(document, int) and document.bit_length() > MOST_DECIMAL_BITS:
        return hex(document)
    return document


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns aligned by spaces; numbers to the right."""
    lines = [list(titles), *([shown(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    right = [all(isinstance(row[column], int | float) for row in rows) for column in range(len(titles))]
    for line in lines:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ]
        say("  ".join(cells).rstrip())


def error_document(error: HoldfastError) -> dict[str, Any]:
    """An error as `--json` shows it."""
    kind = type(error)
    return {
        "code": kind.code,
        "kind": kind.__name__,
        "what": error.what,
        "where": error.where,
        "remedy": error.remedy,
        "retryable": kind.retryable,
    }


def error_text(error: HoldfastError) -> str:
    """An error as a person reads it."""
    lines = [f"error {type(error).code}: {error.what}"]
    if error.where:
        lines.append(f"  where:  {error.where}")
    if error.remedy:
        lines.append(f"  remedy: {error.remedy}")
    return "\n".join(lines)


@contextmanager
def errors_shown(*, as_json: bool) -> Iterator[None]:
    """Around a whole command: a HoldfastError becomes its text and an exit code."""
    try:
        yield
    except HoldfastError as error:
        if as_json:
            print_json({"error": error_document(error)})
        else:
            say(error_text(error), file=sys.stderr)
        raise typer.Exit(USAGE if isinstance(error, UsageError) else PROBLEM) from None


@contextmanager
def whole_output() -> Iterator[None]:
    """Around a program: ends it with a word and exit code 1 where standard output did not take what was printed (a full disk)."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it is where the descriptor was closed
                sys.stdout.flush()
    except BrokenPipeError:
        raise  # who reads has seen enough
    except OSError as error:
        if error.filename is not None:
            raise
        with open(os.devnull, "wb") as nowhere:  # else the interpreter writes what is left at its end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        say(f"error: standard output took not all of the answer: {error.strerror}", file=sys.stderr)
        raise SystemExit(PROBLEM) from None


class Progress:
    """Bytes done of bytes to do, with rate and time left, once the work has lasted longer than QUIET_S.

    Writes to `stream` only: a line that replaces itself on a terminal, else a new line every few seconds.
    """

    def __init__(self, subject: str, total_bytes: int, stream: TextIO | None = None) -> None:
        self._subject = subject
        self._total = total_bytes
        self._stream = sys.stderr if stream is None else stream
        self._refresh_s = TERMINAL_REFRESH_S if self._stream.isatty() else LOG_REFRESH_S
        self._started = time.monotonic()
        self._shown_at = 0.0
        self._done = 0

    def add(self, num_bytes: int) -> None:
        """So many bytes more are done."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._started >= QUIET_S and now - self._shown_at >= self._refresh_s:
            self._shown_at = now
            self._show(now - self._started)

    def close(self) -> None:
        """Ends the line, if there is one."""
        if self._shown_at and self._stream.isatty():
            self._stream.write("\n")

    def _show(self, seconds: float) -> None:
        text = f"{shown(self._subject)}: {progress_text(self._done, self._total, seconds)}"
        # Carriage return and "erase to the end of the line" (ECMA-48, 8.3.41).
        self._stream.write(f"\r{text}\x1b[K" if self._stream.isatty() else f"{text}\n")
        self._stream.flush()
