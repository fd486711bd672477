"""Images: their layout, their determinism, and what hostile bytes do to the reader."""

from __future__ import annotations

import struct
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.errors import CorruptError, HoldfastError, NewerFormat, UsageError
from holdfast.core.model import DTYPE_BYTES, Bundle, Seal
from holdfast.tiers.format import image as image_format
from kit.hostile_images import HOSTILE, SAMPLE, header_of, rewritten, set_note, spelt
from sample_kit import MORE
from tiers.samples import build, bundle, entry_size, piece, random_image, sample_bundle

NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).map(lambda s: f"m.{s}")


@st.composite
def bundles(draw: st.DrawFn) -> Bundle:
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    pieces = []
    for name in names:
        lengths = draw(st.lists(st.integers(0, 4), max_size=3))
        offsets = [draw(st.integers(0, 3)) for _ in lengths]
        shape = [n + o + draw(st.integers(0, 2)) for n, o in zip(lengths, offsets, strict=True)]
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        pieces.append(piece(name, dtype, lengths, offsets=offsets, global_shape=shape))
    return bundle("b-0", *pieces, has_values=draw(st.booleans()))


# Layout.


def test_the_header_of_a_small_bundle_is_these_bytes() -> None:
    plan = image_format.plan_image(bundle("b", piece("w", "F32", (2,), offsets=(2,), global_shape=(4,))))
    text = (
        rb'{"__metadata__":{"DCP_SHARDING_INFO":"{\"w\":{\"saved_offsets\":[2]}}","format":"pt",'
        rb'"holdfast":"{\"format_version\":1,\"bundle\":\"b\",\"global_shapes\":{\"w\":[4]}}"},'
        rb'"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    )
    assert plan.header == struct.pack("<Q", 4088) + text.ljust(4088)
    assert (plan.spans, plan.length) == ({"w": (4096, 8)}, 4104)


@given(bundles())
def test_what_is_planned_is_read_back(b: Bundle) -> None:
    image = random_image(b, stored_values={"a": 1})
    read = image_format.read_image(image, "here")
    plan = image_format.plan_image(b, 1024 if b.has_values else 0)
    pieces = {p.shard.name: p for p in b.pieces}
    assert {e.name: (e.start, e.end - e.start) for e in read.entries if e.end > e.start} == {
        name: span for name, span in plan.spans.items() if span[1]
    }
    assert {e.name for e in read.entries} == set(pieces) == set(plan.spans)
    for entry in read.entries:
        extent, shard = pieces[entry.name].extent, pieces[entry.name].shard
        assert (entry.shape, entry.offsets) == (extent.lengths, extent.offsets)
        assert (entry.dtype, entry.global_shape) == (shard.dtype, shard.global_shape)
    assert (read.values is not None) == b.has_values
    assert read.length == len(image) == plan.length


@given(bundles(), st.randoms())
def test_an_image_does_not_depend_on_the_order_of_pieces(b: Bundle, source: Any) -> None:
    shuffled = list(b.pieces)
    source.shuffle(shuffled)
    tensors = {p.shard.name: bytes([7]) * p.num_bytes for p in b.pieces}
    again = Bundle(b.bundle_id, b.ranks, b.index, b.count, tuple(shuffled), b.has_values)
    assert build(b, tensors, [1]) == build(again, tensors, [1])


@given(bundles())
def test_every_tensor_is_aligned_to_its_dtype_and_the_header_to_a_page(b: Bundle) -> None:
    plan = image_format.plan_image(b)
    assert len(plan.header) % 4096 == 0
    assert all(plan.spans[p.shard.name][0] % DTYPE_BYTES[p.shard.dtype] == 0 for p in b.pieces)


def test_values_come_last_and_fill_whole_kilobytes() -> None:
    image = random_image(sample_bundle(), stored_values={"lr": 0.5})
    read = image_format.read_image(image, "here")
    assert read.values is not None
    assert (read.values.end, read.values.end - read.values.start) == (len(image), 1024)
    assert bytes(image[read.values.start :]).rstrip(b" ") == b'{"lr":0.5}'


def test_a_piece_without_rows_is_noted_and_not_stored() -> None:
    b = sample_bundle("b")
    image = random_image(b)
    assert "b.none" not in header_of(image)
    (entry,) = [e for e in image_format.read_image(image, "here").entries if e.name == "b.none"]
    assert (entry.shape, entry.global_shape, entry.start == entry.end) == ((0, 4), (6, 4), True)


def test_a_tensor_that_is_empty_as_a_whole_is_stored() -> None:
    image = random_image(bundle("b", piece("e", "F32", (0, 4))))
    assert header_of(image)["e"]["shape"] == [0, 4]


@pytest.mark.parametrize("name", ["", "__metadata__", "values/x", "a\nb", "x" * 5000, "\ud800"])
def test_names_that_cannot_be_stored_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        image_format.plan_image(bundle("b", piece(name, "F32", (2,))))


def test_two_pieces_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two pieces"):
        image_format.plan_image(
            bundle("b", piece("w", "F32", (2,)), piece("w", "F32", (2,), offsets=(2,), global_shape=(4,)))
        )


def test_a_header_beyond_the_limit_is_refused_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_format, "MAX_HEADER_BYTES", 4096)
    with pytest.raises(UsageError, match="allowed"):
        image_format.plan_image(bundle("b", *(piece(f"w{i}", "F32", (2,)) for i in range(100))))


# Digests.


def test_a_flip_in_a_large_image_names_its_chunk_and_bytes() -> None:
    image = bytearray(2 * image_format.CHUNK_BYTES + 1000)
    sealed = image_format.seal("b", image)
    assert (len(sealed.chunk_digests), sealed.length) == (3, len(image))
    image_format.verify(image, sealed, "here")
    image[image_format.CHUNK_BYTES + 5] ^= 1
    with pytest.raises(CorruptError, match=r"chunk 1 .*\(bytes 8388608 to 16777215\)"):
        image_format.verify(image, sealed, "here")


def test_a_seal_without_chunks_still_proves_the_image() -> None:
    image = bytearray(b"x" * 100)
    whole = image_format.seal("b", image)
    bare = Seal("b", whole.length, whole.digest)
    image_format.verify(image, bare, "here")
    image[3] ^= 1
    with pytest.raises(CorruptError):
        image_format.verify(image, bare, "here")


@given(st.integers(0, len(SAMPLE) - 1), st.integers(1, 255))
def test_every_flip_is_found(at: int, mask: int) -> None:
    damaged = bytearray(SAMPLE)
    damaged[at] ^= mask
    with pytest.raises(CorruptError):
        image_format.verify(damaged, image_format.seal("b", SAMPLE), "here")


@given(st.integers(0, len(SAMPLE) - 1), st.booleans())
def test_every_other_length_is_found_even_without_the_seal(cut: int, longer: bool) -> None:
    damaged = SAMPLE + SAMPLE[: cut + 1] if longer else SAMPLE[:cut]
    with pytest.raises(CorruptError):
        image_format.verify(damaged, image_format.seal("b", SAMPLE), "here")
    with pytest.raises(CorruptError):
        image_format.read_image(damaged, "here")


@given(st.integers(0, 4095), st.integers(1, 255))
def test_a_flip_in_the_header_is_refused_or_harmless_but_never_another_error(at: int, mask: int) -> None:
    damaged = bytearray(SAMPLE)
    damaged[at] ^= mask
    try:
        read = image_format.read_image(damaged, "here")
    except CorruptError:
        return
    assert all(0 < e.start <= e.end <= len(SAMPLE) for e in read.entries)
    assert all(e.end - e.start == entry_size(e.dtype, e.shape) for e in read.entries)


# Hostile bytes.


def test_the_changed_images_are_refused_for_their_change_only() -> None:
    assert len(image_format.read_image(rewritten(lambda _: None), "here").entries) == 2


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_images_are_refused_within_a_second(case: str) -> None:
    started = time.perf_counter()
    with pytest.raises(CorruptError) as caught:
        image_format.read_image(HOSTILE[case], "here")
    assert time.perf_counter() - started < 5  # within a second on a quiet machine
    assert not isinstance(caught.value, NewerFormat)
    assert caught.value.where == "here"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("case", ["header of 2^63", "deep JSON", "a million names", "shape whose product overflows"])
def test_hostile_images_are_refused_in_little_memory(case: str) -> None:
    data = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            image_format.read_image(data, "here")
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("claimed", "length"),
    [
        (1 << 63, 100),
        (1 << 63, 1 << 64),
        (image_format.MAX_HEADER_BYTES + 1, 1 << 30),
        (4096, 4096 + 7),
        (image_format.MAX_HEADER_BYTES, image_format.MAX_HEADER_BYTES + 7),
    ],
)
def test_a_length_that_no_header_has_is_refused_before_anything_is_read(claimed: int, length: int) -> None:
    """So that a reader of a file never asks for so many bytes (tiers/storage/version_store.py)."""
    with pytest.raises(CorruptError, match="the header claims"):
        image_format.header_length(struct.pack("<Q", claimed), length, "here")


def test_more_tensors_than_are_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a header that is sound else. (A million names do not fit into one, with all that belongs to each.)"""
    image = rewritten(lambda _: None)
    monkeypatch.setattr(image_format, "MAX_TENSORS", 3)  # the two, and the metadata
    image_format.read_image(image, "here")
    monkeypatch.setattr(image_format, "MAX_TENSORS", 2)
    with pytest.raises(CorruptError, match="too many tensors"):
        image_format.read_image(image, "here")


@MORE
def test_the_largest_header_that_is_allowed_is_read_in_bounded_memory() -> None:
    b = bundle("b", *(piece(f"{i}", "U8", (1,)) for i in range(100_000)))
    image = random_image(b)
    tracemalloc.start()
    try:
        assert len(image_format.read_image(image, "here").entries) == 100_000
        assert tracemalloc.get_traced_memory()[1] < 40 * image_format.MAX_HEADER_BYTES
    finally:
        tracemalloc.stop()


def test_a_newer_format_is_refused_by_naming_both() -> None:
    newer = rewritten(set_note("format_version", 7))
    with pytest.raises(NewerFormat, match=r"format 7; .* up to 1.*upgrade"):
        image_format.read_image(newer, "here")


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(HoldfastError):
        image_format.read_image(data, "here")
    with pytest.raises(HoldfastError):
        image_format.read_image(spelt(data), "here")
