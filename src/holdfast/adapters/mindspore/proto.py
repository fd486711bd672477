"""Protocol buffers, as much as MindSpore's files need: a declared message is read into a dict and written from one.

The wire format is public (https://protobuf.dev/programming-guides/encoding/). The schemas of the few messages stand
beside the code that uses them, which is less than a dependency on a code generator, and lets a file be written back
byte for byte: repeated whole numbers are written unpacked, as proto2 writes them; both spellings are read.

Hostile bytes are refused in well under a second: messages nest only as deep as the schema, nothing is allocated that
the length of the input does not bound, and the number of fields is limited. What the schema does not know is refused
too, because it could not be written back. `CorruptError` names the message and the offset in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from holdfast.base.errors import CorruptError, UsageError

# A layout takes about twenty fields, so this is room for fifty thousand parameters, and half a second of reading.
MAX_FIELDS: Final = 1 << 20

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
        kind: "uint32", "int32", "int64", "text", "bytes" (read as a view of the input), or the message it holds.
    """

    number: int
    name: str
    kind: str | Message
    label: Label = "required"


class Message:
    """A message type: its name for errors, and its fields by number."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str, *fields: Field) -> None:
        self.name = name
        self.fields = {field.number: field for field in fields}


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


def decode(message: Message, source: Source, start: int = 0, end: int | None = None) -> dict[str, Any]:
    """Reads the message that fills `start` to `end`.

    Returns:
        Values by field name; a list for a repeated field, None for an optional one that is not there.

    Raises:
        CorruptError: not such a message.
    """
    at, end = start, len(source.data) if end is None else end
    values: dict[str, Any] = {f.name: [] if f.label == "repeated" else None for f in message.fields.values()}
    data, fields = source.data, message.fields
    while at < end:
        begin = at
        source.fields_left -= 1
        if source.fields_left < 0:
            raise source.damage(f"more than {MAX_FIELDS} fields", begin)
        tag = data[at]
        at += 1
        if tag > 0x7F:
            tag, at = _varint(source, begin, end)
        field = fields.get(tag >> 3)
        if field is None:
            raise source.damage(f"a {message.name} has no field {tag >> 3}", begin)
        if field.label != "repeated" and values[field.name] is not None:
            raise source.damage(f"{message.name}.{field.name} is there twice", begin)
        at = _read_value(field, source, values, (tag & 7, at, end))
    for field in fields.values():
        if field.label == "required" and values[field.name] is None:
            raise source.damage(f"a {message.name} lacks {field.name}", start)
    return values


def _read_value(field: Field, source: Source, values: dict[str, Any], at: tuple[int, int, int]) -> int:
    """Reads one value after its tag; returns where it ends. `at` is wire type, start, end of the message."""
    wire_type, start, end = at
    is_number = field.kind in _RANGES
    if wire_type == _VARINT and is_number:
        value, start = _whole_number(field, source, start, end)
    elif wire_type == _DELIMITED:
        length, start = _varint(source, start, end)
        stop = start + length
        if stop > end:
            raise source.damage(f"{field.name} is {length} bytes long, {end - start} are left", start)
        if is_number and field.label == "repeated":
            _read_packed(field, source, values[field.name], start, stop)
            return stop
        value, start = _delimited(field, source, start, stop), stop
    else:
        raise source.damage(f"{field.name} cannot have wire type {wire_type}", start)
    if field.label == "repeated":
        values[field.name].append(value)
    else:
        values[field.name] = value
    return start


def _read_packed(field: Field, source: Source, into: list[int], start: int, end: int) -> None:
    while start < end:
        source.fields_left -= 1
        if source.fields_left < 0:
            raise source.damage(f"more than {MAX_FIELDS} fields", start)
        value, start = _whole_number(field, source, start, end)
        into.append(value)


def _delimited(field: Field, source: Source, start: int, end: int) -> Any:
    if isinstance(field.kind, Message):
        return decode(field.kind, source, start, end)
    if field.kind == "bytes":
        return source.view[start:end]
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
    """What stands before `length` bytes of field `number`."""
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
