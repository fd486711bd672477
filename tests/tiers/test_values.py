"""Values: what goes in comes out with its type and its bits, nothing else goes in, and hostile bytes do no harm."""

from __future__ import annotations

import json
import math
import random
import struct
import subprocess
import sys
import time
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.base.errors import CorruptError, UsageError
from holdfast.tiers.format import values
from holdfast.tiers.format.values import NUMPY_TYPES, TensorRef, decode, encode

FLOATS = st.floats() | st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack("<d", b)[0])
TEXT = st.text(st.characters(), max_size=8)  # lone surrogates included
KEYS = TEXT | st.integers()
NUMPY = st.sampled_from(sorted(NUMPY_TYPES)).flatmap(
    lambda name: st.binary(min_size=np.dtype(name).itemsize, max_size=np.dtype(name).itemsize).map(
        lambda raw: np.frombuffer(bytes([raw[0] & 1]) if name == "bool" else raw, name)[0]
    )
)
HASHABLE = st.none() | st.booleans() | st.integers() | TEXT | st.binary(max_size=8) | st.floats(allow_nan=False)
SCALARS = HASHABLE | FLOATS | st.complex_numbers() | NUMPY | st.builds(TensorRef, TEXT)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=4).map(Counter)
        | st.sets(HASHABLE, max_size=4)
        | st.frozensets(HASHABLE, max_size=4)
        | st.sets(st.tuples(HASHABLE, HASHABLE), max_size=3)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type and in bits, order of keys included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is float:
        return struct.pack("<d", a) == struct.pack("<d", b)
    if type(a) is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@settings(max_examples=400)
@given(VALUES)
def test_every_value_comes_back_with_its_type_and_its_bits(value: Any) -> None:
    data = encode(value)
    assert same(decode(data), value)
    assert encode(decode(data + b"   ")) == data


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"lr": 0.1, "betas": (0.9, 0.999)}, b'{"lr":0.1,"betas":{"$tuple":[0.9,0.999]}}'),
        ({1: "a", "b": None}, b'{"$dict":[[1,"a"],["b",null]]}'),
        ({"$x": 1}, b'{"$dict":[["$x",1]]}'),
        (-0.0, b"-0.0"),
        (math.inf, b'{"$float":"7ff0000000000000"}'),
        (2**53, b'{"$int":"0x20000000000000"}'),
        (Counter({30: 1}), b'{"$counter":[[30,1]]}'),
        (np.float32(0.5), b'{"$numpy":["float32","0000003f"]}'),
        (b"\x00\xff", b'{"$bytes":"AP8="}'),
        (TensorRef("model.w"), b'{"$tensor":"model.w"}'),
        ("\u00e9", b'"\\u00e9"'),
    ],
)  # fmt: skip
def test_values_are_spelt_like_this(value: Any, text: bytes) -> None:
    assert encode(value) == text
    assert same(decode(text), value)


def test_sets_are_spelt_alike_whatever_their_order() -> None:
    words = [f"word{i}" for i in range(50)]
    expected = encode(set(words))
    random.Random(1).shuffle(words)
    assert encode(set(words)) == expected
    assert encode({*words[:25]} | {*words[25:]}) == expected


def test_the_generator_states_of_python_and_numpy_come_back() -> None:
    state = random.Random(3).getstate()
    assert decode(encode(state)) == state
    legacy = np.random.RandomState(3).get_state(legacy=False)
    legacy["state"]["key"] = legacy["state"]["key"].tolist()
    assert decode(encode(legacy)) == legacy


class Colour(IntEnum):
    RED = 1


Point = namedtuple("Point", "x")


@pytest.mark.parametrize(
    "value",
    [lambda: 0, object(), defaultdict(int), Colour.RED, Point(1), np.zeros(3), np.str_("a"), range(3), bytearray(b"x"),
     np.longdouble(1), np.datetime64(0, "s"), type, iter([])],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_types_are_refused_by_place_and_name(value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        encode({"scheduler": {"lr_lambdas": [value]}})
    assert caught.value.where == "scheduler.lr_lambdas[0]"
    assert type(value).__name__ in caught.value.what
    assert "state_dict" in caught.value.remedy


@pytest.mark.parametrize("key", [True, None, 1.5, (1,), b"x"])
def test_other_keys_are_refused_by_place(key: Any) -> None:
    with pytest.raises(UsageError, match=r"keys are strings or whole numbers \[loader.a\]"):
        encode({"loader": {"a": {key: 1}}})


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("leaf", [1, "a", 2.5, float("nan"), 1j, (1, 2), b"", {1: "a"}], ids=repr)
@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}, lambda v: {"a": v}])
def test_the_deepest_value_that_is_written_is_read(wrap: Any, leaf: Any) -> None:
    value, deepest = leaf, None
    for _ in range(values.MAX_DEPTH + 3):
        try:
            encode(value)
        except UsageError:
            break
        deepest, value = value, wrap(value)
    assert same(decode(encode(deepest)), deepest)
    with pytest.raises(UsageError, match="deeper"):
        encode(wrap(wrap(value)))


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contain themselves"):
        encode(loop)


def test_too_many_values_are_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="tensor"):
        encode("x" * (values.MAX_BYTES + 1))


HOSTILE = {
    "nothing": b"",
    "deep lists": b"[" * 5_000_000,
    "deep objects": b'{"a":' * 2_000_000,
    "deeper than allowed": b"[" * 104 + b"]" * 104,
    "deep tuples": b'{"$tuple":[' * 104 + b"]}" * 104,
    "doubled key": b'{"a":1,"a":2}',
    "doubled key in pairs": b'{"$dict":[["a",1],["a",2]]}',
    "doubled member": b'{"$set":[1,1]}',
    "unhashable member": b'{"$set":[[]]}',
    "unhashable key": b'{"$dict":[[[],1]]}',
    "a boolean as key": b'{"$dict":[[true,1]]}',
    "pairs of three": b'{"$dict":[["a",1,2]]}',
    "pairs that are no list": b'{"$dict":{"ab":1}}',
    "a literal NaN": b"NaN",
    "a literal infinity": b"-Infinity",
    "unknown type": b'{"$module":"os.system"}',
    "two types": b'{"$int":"1","$str":""}',
    "type and key": b'{"$int":"1","a":1}',
    "odd hex": b'{"$float":"7ff"}',
    "float of two bytes": b'{"$float":"7ff0"}',
    "number where text belongs": b'{"$bytes":1}',
    "bad base64": b'{"$bytes":"@@@@"}',
    "complex of three": b'{"$complex":[1.0,2.0,3.0]}',
    "NumPy object": b'{"$numpy":["object","0000000000000000"]}',
    "NumPy by a structure": b'{"$numpy":["V8","0000000000000000"]}',
    "NumPy array": b'{"$numpy":["int8","0001"]}',
    "NumPy nothing": b'{"$numpy":["int8",""]}',
    "NumPy number": b'{"$numpy":1}',
    "a number of ten million digits": b"9" * 10_000_000,
    "no UTF-8": b'"\xff"',
    "longer than allowed": b'"' + b"x" * (17 << 20) + b'"',
    "two texts": b"1 2",
    "members that share a hash": json.dumps(
        {"$set": [{"$int": hex(k * (2**61 - 1))} for k in range(1, 16_000)]}
    ).encode(),
    "keys that share a hash": json.dumps(
        {"$dict": [[{"$int": hex(k * (2**61 - 1))}, 1] for k in range(1, 16_000)]}
    ).encode(),
}


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys])
def test_what_would_not_be_read_back_is_refused_when_it_is_written(kind: Callable[[Any], Any]) -> None:
    members = [k * (2**61 - 1) for k in range(1, 18)]
    with pytest.raises(UsageError, match=r"share a hash.*\[loader.seen\]"):
        encode({"loader": {"seen": kind(members)}})
    few = kind(members[:-1])
    assert decode(encode(few)) == few


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_values_are_refused_within_a_second(case: str) -> None:
    started = time.perf_counter()
    with pytest.raises(CorruptError) as caught:
        decode(HOSTILE[case], where="here")
    assert time.perf_counter() - started < 5  # within a second on a quiet machine
    assert caught.value.where == "here"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "case", ["deep lists", "deep objects", "a number of ten million digits", "longer than allowed"]
)
def test_hostile_values_are_refused_in_little_memory(case: str) -> None:
    data = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


GOOD = encode({"a": [1, 2.5, (3, b"x", np.int8(1))], 4: {5, 6}, "s": "\ud800"})


@settings(max_examples=300)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
@example(0, ord("{"))
def test_a_changed_byte_is_another_value_or_a_refusal_and_nothing_else(at: int, byte: int) -> None:
    damaged = bytearray(GOOD)
    damaged[at] = byte
    again = decoded(bytes(damaged))
    assert again is None or same(decode(encode(again[0])), again[0])


def decoded(data: bytes) -> list[Any] | None:
    """The value in a list, or None if it was refused as CorruptError."""
    try:
        return [decode(data)]
    except CorruptError:
        return None


@given(st.binary(max_size=60))
def test_random_bytes_decode_or_are_refused(data: bytes) -> None:
    found = decoded(data)
    assert found is None or same(decode(encode(found[0])), found[0])


def test_numpy_is_not_imported_where_no_value_needs_it() -> None:
    code = "import sys; from holdfast.tiers.format.values import *; decode(encode({'a': (1, 2.5)})); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
