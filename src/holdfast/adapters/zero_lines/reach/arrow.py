"""Data of Arrow, as datasets of Hugging Face hold them: tables, columns, types. Nobody changes them in place, and they keep no place."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import xxhash

from holdfast.adapters.zero_lines.reach.plain_values import MAX_BYTES, NUM_SPOTS

_TABLES, _COLUMNS = ("Table", "RecordBatch"), ("Array", "ChunkedArray")
_OTHERS = ("Scalar", "DataType", "Field", "Schema", "KeyValueMetadata")
# `id` of a table or column -> a reference to it, and its token: it is read once.
_read: dict[int, tuple[weakref.ref[Any], object]] = {}


def is_data(value: Any) -> bool:
    """Tell whether a value is such data."""
    return bool(_kinds(value).intersection((*_TABLES, *_COLUMNS, *_OTHERS)))


def token_of(value: Any) -> object:
    """Returns the token of data: equal as long as the data is. Of more than 64 MiB the first and the last rows are read."""
    kinds = _kinds(value)
    if not kinds.intersection((*_TABLES, *_COLUMNS)):
        return (type(value).__qualname__, str(value))
    known = _read.get(id(value))
    if known is None or known[0]() is not value:
        table = value if kinds.intersection(_TABLES) else sys.modules["pyarrow"].table({"": value})
        known = weakref.ref(value, functools.partial(_forget, id(value))), _of_table(table)
        _read[id(value)] = known
    return (type(value).__qualname__, known[1])


def may_hold_times(value: Any) -> bool:
    """Tell whether data has more than whole numbers and yes or no in it."""
    types, kinds = sys.modules["pyarrow"].types, _kinds(value)
    if not kinds.intersection((*_TABLES, *_COLUMNS)):
        return True
    held = value.schema.types if kinds.intersection(_TABLES) else [value.type]
    return not all(types.is_integer(kind) or types.is_boolean(kind) for kind in held)


def _kinds(value: Any) -> set[str]:
    return {part.__name__ for part in type(value).__mro__ if part.__module__ == "pyarrow.lib"}


def _forget(number: int, gone: weakref.ref[Any]) -> None:
    if number in _read and _read[number][0] is gone:
        del _read[number]


def _of_table(table: Any) -> object:
    """Returns rows, and a digest of names, types and content."""
    parts = [table]
    if table.nbytes > MAX_BYTES:
        parts = [table.slice(0, NUM_SPOTS), table.slice(max(0, table.num_rows - NUM_SPOTS))]
    found = _Digest()
    for part in parts:
        with sys.modules["pyarrow"].ipc.new_stream(found, part.schema) as writer:
            writer.write(part)
    return table.num_rows, found.digest.hexdigest()


class _Digest:
    """A file that keeps a digest of what is written to it."""

    closed = False

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""
