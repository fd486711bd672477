"""How commands speak."""

from __future__ import annotations

import ast
import io
import json
import math
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from holdfast.base.errors import StorageFull
from holdfast.cli import console
from sample_kit import sampled


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 60, "3072.0 PiB")]
)
def test_sizes(size: int, text: str) -> None:
    assert console.size_text(size) == text


def test_numbers_that_json_does_not_know_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A best loss is infinite before the first evaluation; no program but Python's reads `Infinity`."""
    values = {"best": math.inf, "worst": -math.inf, "losses": [1.5, math.nan], "state": {"seed": 1 << 20000}, "step": 3}
    console.print_json({"values": values})
    written = capsys.readouterr().out
    shown = json.loads(written, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["values"]
    assert (shown["best"], shown["worst"], shown["losses"]) == ("inf", "-inf", [1.5, "nan"])
    assert (int(shown["state"]["seed"], 16), shown["step"]) == (1 << 20000, 3)


def test_short_work_shows_no_progress() -> None:
    stream = Terminal()
    progress = console.Progress("reading", 100, stream)
    progress.add(100)
    progress.close()
    assert stream.getvalue() == ""


def test_long_work_shows_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    stream = Terminal()
    progress = console.Progress("reading", 8 << 20, stream)
    now += 4
    progress.add(2 << 20)
    progress.close()
    assert "reading: 2.0 MiB of 8.0 MiB, 512.0 KiB/s, 12 s left" in stream.getvalue()


def test_an_error_says_what_where_and_remedy() -> None:
    text = console.error_text(StorageFull("no space is left", where="/ckpts", remedy="free some"))
    assert text == "error HF201: no space is left\n  where:  /ckpts\n  remedy: free some"


HOSTILE = "a\x1b]0;owned\x07\x9b31m\u202eb\x7f\ud800"
PLAIN = r"a\x1b]0;owned\x07\x9b31m\u202eb\x7f\ud800"


def test_what_a_terminal_obeys_is_spelt_out(capsys: pytest.CaptureFixture[str]) -> None:
    console.say(HOSTILE)
    console.print_table(("name", HOSTILE), [(HOSTILE, 1)])
    with pytest.raises(typer.Exit), console.errors_shown(as_json=False):
        raise StorageFull(HOSTILE, where=HOSTILE)
    told = capsys.readouterr()
    assert set(told.out + told.err) <= set(string.printable)
    assert told.out.count(PLAIN) == 3
    assert str(StorageFull(HOSTILE)).startswith(PLAIN), "tracebacks and logs show errors too"
    stream = Terminal()
    console.Progress(HOSTILE, 1, stream)._show(1.0)
    assert "owned\x07" not in stream.getvalue()


def test_no_command_prints_past_it() -> None:
    """Text of files reaches the terminal through `say` alone."""
    rooms = Path(console.__file__).parent
    past = re.compile(r"(print|typer\.echo|click\.echo|sys\.(stdout|stderr)\.write)\(")
    loose = {
        (path.name, ast.unparse(node))
        for path in rooms.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and past.match(ast.unparse(node)) and path.name != "console.py"
    }
    assert loose == {("status.py", "sys.stdout.write(CLEAR)")}


def test_columns_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(("name", "bytes"), [("a", 1), ("long", 1000)])
    assert capsys.readouterr().out == "name  bytes\na         1\nlong   1000\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    sampled([["--help"], ["ls", "/no/such/path", "--json"]], ["ls", "/no/such/path", "--json"]),
    ids=["help", "json"],
)
def test_an_answer_that_does_not_fit_on_the_disk_is_told_without_a_traceback(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "holdfast.cli.cli", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: standard output took not all of the answer: No space left on device\n"
