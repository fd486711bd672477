"""Protocol buffers, as much as MindSpore's files need: a declared message is read into a dict and written from one.

The wire format is public (https://protobuf.dev/programming-guides/encoding/). The schemas of the few messages stand
beside the code that uses them, which is less than a dependency on a code generator, and lets a file be written back
byte for byte: repeated whole numbers are written unpacked, as proto2 writes them; both spellings are read.

Hostile bytes are refused in well under a second: messages nest only as deep as the schema, nothing is allocated that
the length of the input does not bound, and the number of fields is limited. What the schema does not know is refused
too, because it could not be written back. `CorruptError` names the message and the offset in the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from holdfast.base.errors import CorruptError, UsageError

# Reading so many takes half a second. A strategy file has three per parameter and twenty per layout.
MAX_FIELDS: Final = 1 << 19

Label = Literal["required", "optional", "repeated"]
_VARINT, _DELIMITED = 0, 2
_MAX_VARINT_BYTES = 10
_RANGES = {
    "uint32": (0, 1 << 32),
    "int32": (-(1 << 31), 1 << 31),
    "int64": (-(1 << 63), 1 << 63),
}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message.

    Attributes:
        kind: "uint32", "int32", "int64", "text", "bytes" (read as a view of the input), "span" (read as where the bytes
            start and stop in the input), or the message it holds.
    """

    number: int
    name: str
    kind: str | Message
    label: Label = "required"
    is_number: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_number", self.kind in _RANGES)


class Message:
    """A message type: its name for errors, and its fields by number."""

    __slots__ = ("fields", "name", "repeated", "required", "unread")

    def __init__(self, name: str, *fields: Field) -> None:
        self.name = name
        self.fields = {field.number: field for field in fields}
        # Asked for with every message that is read, so they stand ready.
        self.unread: dict[str, Any] = dict.fromkeys(field.name for field in fields)
        self.repeated = tuple(field.name for field in fields if field.label == "repeated")
        self.required = tuple(field.name for field in fields if field.label == "required")


class Source:
    """Bytes that are being read: where they come from, and how many fields may still be read from them."""

    __slots__ = ("data", "fields_left", "view", "where")

    def __init__(self, data: bytes, where: str) -> None:
        self.data = data
        self.view = memoryview(data)
        self.where = where
        self.fields_left = MAX_FIELDS

    def damage(self, what: str, offset: int) -> CorruptError:
        """The error that says what is wrong at which byte."""
        return CorruptError(what, where=f"{self.where}, byte {offset}")

    def count(self, fields: int, offset: int) -> None:
        """Takes note that so many fields were read up to `offset`; CorruptError if that is too many."""
        self.fields_left -= fields
        if self.fields_left < 0:
            raise self.damage(f"more than {MAX_FIELDS} fields", offset)


def decode(message: Message, source: Source, start: int = 0, end: int | None = None) -> dict[str, Any]:
    """Reads the message that fills `start` to `end`.

    Returns:
        Values by field name; a list for a repeated field, None for an optional one that is not there.

    Raises:
        CorruptError: not such a message.
    """
    at, end = start, len(source.data) if end is None else end
    values = message.unread.copy()
    for name in message.repeated:
        values[name] = []
    data, fields = source.data, message.fields
    while at < end:
        begin = at
        tag = data[at]
        at += 1
        if tag > 0x7F:
            tag, at = _varint(source, begin, end)
        source.fields_left -= 1
        if source.fields_left < 0:
            source.count(0, begin)
        field = fields.get(tag >> 3)
        if field is None:
            raise source.damage(f"a {message.name} has no field {tag >> 3}", begin)
        if field.label == "repeated":
            at = _read_more(field, source, values[field.name], tag, (at, end))
        elif values[field.name] is None:
            values[field.name], at = _read_one(field, source, tag & 7, at, end)
        else:
            raise source.damage(f"{message.name}.{field.name} is there twice", begin)
    for name in message.required:
        if values[name] is None:
            raise source.damage(f"a {message.name} lacks {name}", start)
    return values


def _read_one(field: Field, source: Source, wire_type: int, start: int, end: int) -> tuple[Any, int]:
    """The value after a tag, and where it ends."""
    if wire_type == _VARINT and field.is_number:
        return _whole_number(field, source, start, end)
    stop = _stop(field, source, wire_type, (start, end))
    return _delimited(field, source, stop[0], stop[1]), stop[1]


def _read_more(field: Field, source: Source, into: list[Any], tag: int, at: tuple[int, int]) -> int:
    """Adds the value after a tag of a repeated field, and those that follow in one run; returns where they end."""
    if tag & 7 == _VARINT and field.is_number:
        return _read_run(field, source, into, tag if tag < 0x80 else None, at)
    start, stop = _stop(field, source, tag & 7, at)
    if field.is_number:
        return _read_run(field, source, into, None, (start, stop), packed=True)
    into.append(_delimited(field, source, start, stop))
    return stop


def _read_run(
    field: Field, source: Source, into: list[Any], tag: int | None, at: tuple[int, int], *, packed: bool = False
) -> int:
    """Numbers, each after the same tag or (packed) after no tag at all. The hot loop: ranks stand in such runs."""
    start, end = at
    data, before = source.data, len(into)
    most = before + source.fields_left
    while start < end or not packed:
        if start < end and data[start] < 0x80:
            into.append(data[start])
            start += 1
        else:
            value, start = _whole_number(field, source, start, end)
            into.append(value)
        if len(into) > most:
            break
        if not packed:
            if start >= end or data[start] != tag:
                break
            start += 1
    source.count(len(into) - before, start)
    return start


def _stop(field: Field, source: Source, wire_type: int, at: tuple[int, int]) -> tuple[int, int]:
    """Return where the bytes of a delimited field start and stop."""
    start, end = at
    if wire_type != _DELIMITED:
        raise source.damage(f"{field.name} cannot have wire type {wire_type}", start)
    if start < end and source.data[start] < 0x80:
        length, start = source.data[start], start + 1
    else:
        length, start = _varint(source, start, end)
    if length > end - start:
        raise source.damage(f"{field.name} is {length} bytes long, {end - start} are left", start)
    return start, start + length


def _delimited(field: Field, source: Source, start: int, end: int) -> Any:
    if isinstance(field.kind, Message):
        return decode(field.kind, source, start, end)
    if field.kind == "bytes":
        return source.view[start:end]
    if field.kind == "span":
        return start, end
    if field.kind == "text":
        try:
            return str(source.view[start:end], "utf-8")
        except UnicodeDecodeError as error:
            raise source.damage(f"{field.name} is not UTF-8", start + error.start) from None
    raise source.damage(f"{field.name} is a number, not bytes", start)


def _whole_number(field: Field, source: Source, start: int, end: int) -> tuple[int, int]:
    value, stop = _varint(source, start, end)
    low, high = _RANGES[str(field.kind)]
    if low and value >= 1 << 63:  # negative numbers are sign-extended to 64 bits
        value -= 1 << 64
    if not low <= value < high:
        raise source.damage(f"{field.name} is {value}, which is no {field.kind}", start)
    return value, stop


def _varint(source: Source, start: int, end: int) -> tuple[int, int]:
    value, data = 0, source.data
    for index in range(_MAX_VARINT_BYTES):
        at = start + index
        if at >= end:
            raise source.damage("the bytes end within a number", at)
        byte = data[at]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, at + 1
    raise source.damage("a number longer than 64 bits", start)


def encode(message: Message, values: Mapping[str, Any]) -> bytes:
    """The bytes of a message: fields in order of their numbers, repeated numbers unpacked.

    Raises:
        UsageError: a required field is missing, or a number does not fit its field.
    """
    out = bytearray()
    for number in sorted(message.fields):
        field = message.fields[number]
        value = values.get(field.name)
        if value is None:
            if field.label == "required":
                raise UsageError(f"a {message.name} needs {field.name}")
            continue
        for item in value if field.label == "repeated" else (value,):
            out += _encode_item(field, item)
    return bytes(out)


def _encode_item(field: Field, item: Any) -> bytes:
    if isinstance(field.kind, Message):
        payload = encode(field.kind, item)
    elif field.kind in _RANGES:
        low, high = _RANGES[field.kind]
        if not low <= item < high:
            raise UsageError(f"{field.name} cannot be {item}: it is written as {field.kind}")
        return varint(field.number << 3 | _VARINT) + varint(item)
    else:
        payload = item.encode() if field.kind == "text" else bytes(item)
    return prefix(field.number, len(payload)) + payload


def prefix(number: int, length: int) -> bytes:
    """Return what stands before `length` bytes of field `number`."""
    return varint(number << 3 | _DELIMITED) + varint(length)


def varint(value: int) -> bytes:
    """A whole number of 64 bits; a negative one as its two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def numbers(values: Iterable[int]) -> dict[str, Any]:
    """The message of a single list, which MindSpore uses wherever a list stands in a list."""
    return {"dim": list(values)}
