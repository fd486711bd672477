"""Data of Arrow in what a loop reads: it keeps no place, and other data is another token."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.adapters.zero_lines.reach import arrow


def test_what_is_no_data_of_arrow_is_none() -> None:
    assert not any(map(arrow.is_data, (3, "a", [1], object())))
    kind: Any = type("Schema", (), {"__module__": "pyarrow.lib"})
    assert arrow.is_data(kind())


def test_tables_are_read_whole_and_once() -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"a": list(range(10)), "b": list("abcdefghij")})
    assert arrow.token_of(table) == arrow.token_of(pa.table({"a": list(range(10)), "b": list("abcdefghij")}))
    assert arrow.token_of(table.slice(1)) != arrow.token_of(table.slice(0, 9))
    assert arrow.token_of(table["a"]) != arrow.token_of(pa.chunked_array([list(range(1, 11))]))
    assert arrow.token_of(pa.int8()) != arrow.token_of(pa.int16())
    assert not any(map(arrow.is_data, (pa.BufferReader(b"1"), table.to_reader())))
    assert [arrow.may_hold_times(each) for each in (table["a"], table["b"], table)] == [False, True, True]
    del table
    assert not arrow._read
