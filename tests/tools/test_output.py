"""How commands speak."""

from __future__ import annotations

import io

import pytest

from holdfast.base.errors import StorageFull
from holdfast.tools import output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 60, "3072.0 PiB")]
)
def test_sizes(size: int, text: str) -> None:
    assert output.size_text(size) == text


def test_short_work_shows_no_progress() -> None:
    stream = Terminal()
    progress = output.Progress("reading", 100, stream)
    progress.add(100)
    progress.close()
    assert stream.getvalue() == ""


def test_long_work_shows_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    stream = Terminal()
    progress = output.Progress("reading", 8 << 20, stream)
    now += 4
    progress.add(2 << 20)
    progress.close()
    assert "reading: 2.0 MiB of 8.0 MiB, 512.0 KiB/s, 12 s left" in stream.getvalue()


def test_an_error_says_what_where_and_remedy() -> None:
    text = output.error_text(StorageFull("no space is left", where="/ckpts", remedy="free some"))
    assert text == "error HF201: no space is left\n  where:  /ckpts\n  remedy: free some"


def test_columns_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("name", "bytes"), [("a", 1), ("long", 1000)])
    assert capsys.readouterr().out == "name  bytes\na         1\nlong   1000\n"
