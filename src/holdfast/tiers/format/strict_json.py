"""JSON with exactly one spelling, read from bytes that nobody vouches for.

Every JSON text of holdfast is canonical: what decodes to a record must encode to the very same bytes. That one rule
refuses doubled names, unknown fields, spare white space and odd escapes without a line of code for each, and makes the
content of a file a function of what it says. Texts that stand in files of their own end in a checksum whose place
never changes between format versions, so a damaged file is told from one of a newer format.

Canonical form: docs/spec/format.md, section 2.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
import xxhash

from holdfast.base.errors import CorruptError, NewerFormat, UsageError
from holdfast.base.handler_errors import pass_on

# What this holdfast writes; one number for images, manifests and registrations.
FORMAT_VERSION = 1
# The format of the root of a manifest that is authenticated, whose files have nonces that follow from their content. The
# newest that this holdfast reads; in 2 nonces were numbers.
AUTHENTICATED_FORMAT = 3
# Longest record file. A manifest is cut into parts by line of writers, so that none comes near it.
MAX_RECORD_BYTES = 16 << 20

_TAIL = re.compile(rb',"checksum":"([0-9a-f]{32})"\}\n\Z')
_TAIL_BYTES = len(',"checksum":"') + 32 + len('"}\n')

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what is a file of its own. A subclass narrows `format` to its own name."""

    format: str
    format_version: int = FORMAT_VERSION


R = TypeVar("R", bound=Record)


class _Head(msgspec.Struct):
    format: str
    format_version: int


def encode(value: object) -> bytes:
    """The canonical text of a struct, dict, list, string or whole number.

    Raises:
        UsageError: a string that is not Unicode text (a lone surrogate).
    """
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise UsageError(f"{error.object!r} is not Unicode text", remedy="rename what carries this name") from error


def decode(data: bytes | str, kind: Any, where: str, what: str) -> Any:
    """The `kind` that `data` spells.

    Args:
        data: JSON text.
        kind: a type as msgspec understands it.
        where: the file and place, for the error.
        what: what the text should be, for the error.

    Raises:
        CorruptError: not JSON, not of this kind, or not in canonical form.
    """
    try:
        value = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        pass_on(error)
        raise CorruptError(f"{what} is not valid: {error}", where=where) from error
    if encode(value) != (data.encode() if isinstance(data, str) else data):
        raise CorruptError(f"{what} is not in canonical form (doubled names, spare white space)", where=where)
    return value


def peek(data: bytes | str, kind: type[T], where: str, what: str) -> T:
    """Like `decode`, but ignores what it does not know. Good for finding the format version, for nothing else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        pass_on(error)
        raise CorruptError(f"{what} is not valid: {error}", where=where) from error


def parse_loose(data: bytes | str) -> Any:
    """Returns what JSON of no fixed schema spells: notes and journals that a person may also read.

    Raises:
        ValueError: not JSON, nested too deep, or not UTF-8; nothing else.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None


def check_version(found: int, where: str, *, newest: int = FORMAT_VERSION) -> None:
    """Refuses a format that this holdfast does not know.

    Args:
        found: what the file says.
        where: the file, for the error.
        newest: the newest format of files of this kind.

    Raises:
        NewerFormat: a newer one; names both.
        CorruptError: one that never existed.
    """
    if found > newest:
        what = f"written in format {found}; this holdfast reads formats up to {newest}"
        raise NewerFormat(what, where=where, remedy="upgrade holdfast")
    if found < 1:
        raise CorruptError(f"there is no format {found}", where=where)


def encode_record(record: Record) -> bytes:
    """The bytes of a record's file: canonical JSON whose last field is the checksum of all that stands before it."""
    body = encode(record)[:-1]
    return body + b',"checksum":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def decode_record(data: bytes, kind: type[R], where: str, *, later: type[R] | None = None) -> R:
    """The record that a file holds.

    Args:
        data: the file's bytes.
        kind: what it should be.
        where: the file, for the error.
        later: what it should be in formats above FORMAT_VERSION, up to AUTHENTICATED_FORMAT; None if there is no such.

    Raises:
        NewerFormat: intact, but of a newer format.
        CorruptError: anything else that is not exactly what `encode_record` makes.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise CorruptError(f"{len(data)} bytes are more than any record has ({MAX_RECORD_BYTES})", where=where)
    tail = _TAIL.match(data, max(0, len(data) - _TAIL_BYTES))
    body = data[:-_TAIL_BYTES]
    if not tail or xxhash.xxh3_128_hexdigest(body) != tail[1].decode():
        raise CorruptError("the checksum does not fit: the file is damaged or incomplete", where=where)
    text = body + b"}"
    head = peek(text, _Head, where, "the record")
    check_version(head.format_version, where, newest=AUTHENTICATED_FORMAT if later else FORMAT_VERSION)
    if later is not None and head.format_version > FORMAT_VERSION:
        kind = later
    record: R = decode(text, kind, where, f"the record {head.format[:40]!r}")
    return record
