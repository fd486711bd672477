"""Manifests: what is written is read, every damage is found, and hostile ones are refused."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.base.errors import CorruptError, NewerFormat
from holdfast.core.model import BundleRef, Version
from holdfast.core.rank_runs import runs_of
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage import manifest as manifests
from holdfast.tiers.storage.manifest import BundleFile, Manifest

VERSION = Version(2, 120)


def bundle_file(number: int, ranks: tuple[int, ...] = (0, 1), length: int = 5000) -> BundleFile:
    chunks = tuple(f"{number + i:032x}" for i in range(-(-length // image_format.CHUNK_BYTES)))
    digest = image_format.image_digest(chunks)
    ref = BundleRef(f"g{number}", ranks, 0, 1, length - 4096, "ab12")
    return BundleFile(ref, manifests.bundle_file_name(ref.bundle_id, digest), length, digest, chunks)


FILES = (bundle_file(0), bundle_file(1, (0, 2, 4, 6)), bundle_file(2, (3,), 20 << 20))
PART = manifests.encode_part(FILES)
ROOT = Manifest(VERSION, "ab" * 8, 8, "cd" * 16, Version(1, 100), {"manifest-0.json": manifests.part_entry(PART)})
ROOT_BYTES = manifests.encode_root(ROOT)


def test_a_root_is_these_bytes() -> None:
    root = Manifest(Version(1, 7), "00ff", 2, "l", None, {"manifest-0.json": (5, "0" * 32)})
    text = (
        b'{"format":"holdfast-manifest","format_version":1,"version":"i000001-s0000000007","job_id":"00ff",'
        b'"world_size":2,"layout":"l","resumed_from":null,"parts":{"manifest-0.json":{"length":5,'
        b'"digest":"00000000000000000000000000000000"}}'
    )
    digest = xxhash.xxh3_128_hexdigest(text).encode()
    assert manifests.encode_root(root) == text + b',"checksum":"' + digest + b'"}\n'


def test_a_manifest_is_read_back_whole() -> None:
    root = manifests.decode_root(ROOT_BYTES, "here")
    assert root == ROOT
    whole = manifests.assemble(root, {"manifest-0.json": PART}, "here")
    assert whole == dataclasses.replace(ROOT, bundles=FILES)
    assert whole.num_bytes == sum(file.length for file in FILES)


@given(st.permutations(FILES))
def test_a_part_does_not_depend_on_the_order_of_its_bundles(files: list[BundleFile]) -> None:
    assert manifests.encode_part(files) == PART


@given(st.sets(st.integers(0, 300), min_size=1))
def test_any_ranks_come_back(ranks: set[int]) -> None:
    file = bundle_file(0, tuple(sorted(ranks)))
    assert manifests.decode_part(manifests.encode_part([file]), "here") == (file,)


def test_the_ranks_of_a_mesh_dimension_take_one_run() -> None:
    assert runs_of(tuple(range(3, 16384, 8))) == ((3, 16379, 8),)
    assert len(manifests.encode_part([bundle_file(0, tuple(range(16384)))])) < 500


@given(st.sampled_from([PART, ROOT_BYTES]), st.data(), st.integers(1, 255))
def test_every_flip_is_found_and_never_taken_for_a_newer_format(data: bytes, draw: st.DataObject, mask: int) -> None:
    damaged = bytearray(data)
    damaged[draw.draw(st.integers(0, len(data) - 1))] ^= mask
    decode = manifests.decode_part if data is PART else manifests.decode_root
    with pytest.raises(CorruptError) as caught:
        decode(bytes(damaged), "here")
    assert not isinstance(caught.value, NewerFormat)


@given(st.sampled_from([PART, ROOT_BYTES]), st.data(), st.booleans())
def test_every_other_length_is_found(data: bytes, draw: st.DataObject, longer: bool) -> None:
    cut = draw.draw(st.integers(0, len(data) - 1))
    decode = manifests.decode_part if data is PART else manifests.decode_root
    with pytest.raises(CorruptError):
        decode(data + data[: cut + 1] if longer else data[:cut], "here")


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        manifests.decode_root(data, "here")
    with pytest.raises(CorruptError):
        manifests.decode_part(sealed(data), "here")


# Hostile, with a checksum that fits.


def sealed(body: bytes) -> bytes:
    return body + b',"checksum":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def changed(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    fields = json.loads(data)
    del fields["checksum"]
    change(fields)
    return sealed(json.dumps(fields, separators=(",", ":")).encode()[:-1])


def in_first(field: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields["bundles"][0].__setitem__(field, value)


def setting(field: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields.__setitem__(field, value)


EVIL_NAME = "../../etc/passwd"
LARGEST = manifests.MAX_RANKS - 1

PARTS = {
    "deep JSON": sealed(b'{"format":"holdfast-manifest-part","format_version":1,"bundles":' + b"[" * 1_000_000),
    "deep unknown field": sealed(b'{"format":"x","format_version":1,"y":' + b"[" * 1_000_000 + b"]" * 1_000_000),
    "a root": ROOT_BYTES,
    "ranks without end": changed(PART, in_first("ranks", [[0, 1 << 62, 1]])),
    "many long runs": changed(
        PART, lambda f: f.__setitem__("bundles", [{**f["bundles"][0], "id": f"g{i:06d}", "ranks": [[i, LARGEST, 1]]} for i in range(2000)])
    ),
    "ranks with step 0": changed(PART, in_first("ranks", [[0, 3, 0]])),
    "ranks that fall": changed(PART, in_first("ranks", [[5, 5, 1], [1, 1, 1]])),
    "ranks spelt otherwise": changed(PART, in_first("ranks", [[0, 0, 1], [1, 1, 1]])),
    "no ranks": changed(PART, in_first("ranks", [])),
    "negative length": changed(PART, in_first("length", -1)),
    "length of 400 bits": changed(PART, in_first("length", 1 << 400)),
    "length without its chunks": changed(PART, in_first("length", 1 << 40)),
    "share beyond the count": changed(PART, in_first("index", 1)),
    "more payload than file": changed(PART, in_first("num_bytes", 6000)),
    "file elsewhere": changed(PART, in_first("file", EVIL_NAME)),
    "bundle named as a path": changed(
        PART, lambda f: f["bundles"][0].update(id=EVIL_NAME, file=manifests.bundle_file_name(EVIL_NAME, f["bundles"][0]["digest"]))
    ),
    "digest that is no digest": changed(PART, in_first("digest", "x" * 32)),
    "chunks that are not the image's": changed(PART, in_first("chunks", ["1" * 32])),
    "chunks without hex": changed(PART, in_first("chunks", ["zz"])),
    "doubled bundle": changed(PART, lambda f: f["bundles"].insert(0, f["bundles"][0])),
    "bundles out of order": changed(PART, lambda f: f["bundles"].reverse()),
    "unknown field": changed(PART, setting("extra", 1)),
    "format 0": changed(PART, setting("format_version", 0)),
    "white space": sealed(PART[: PART.index(b',"checksum"')].replace(b":", b": ")),
    "doubled field": sealed(PART[: PART.index(b',"checksum"')] + b',"format_version":1'),
    "too long": sealed(b'{"format":"' + b"x" * (17 << 20)),
}  # fmt: skip

ROOTS = {
    "a part": PART,
    "no version": changed(ROOT_BYTES, setting("version", EVIL_NAME)),
    "resumed from nowhere": changed(ROOT_BYTES, setting("resumed_from", "yesterday")),
    "no ranks": changed(ROOT_BYTES, setting("world_size", 0)),
    "too many ranks": changed(ROOT_BYTES, setting("world_size", 1 << 61)),
    "no parts": changed(ROOT_BYTES, setting("parts", {})),
    "part elsewhere": changed(ROOT_BYTES, setting("parts", {EVIL_NAME: {"length": 1, "digest": "0" * 32}})),
    "part that is the root": changed(
        ROOT_BYTES, setting("parts", {"manifest.json": {"length": 1, "digest": "0" * 32}})
    ),
    "part without a digest": changed(ROOT_BYTES, setting("parts", {"manifest-0.json": {"length": 1, "digest": ""}})),
    "job named as a path": changed(ROOT_BYTES, setting("job_id", EVIL_NAME)),
    "a million parts": changed(
        ROOT_BYTES, setting("parts", {f"manifest-{i}.json": {"length": 1, "digest": "0"} for i in range(300_000)})
    ),
}


def test_unchanged_manifests_are_accepted() -> None:
    assert changed(PART, lambda _: None) == PART
    assert changed(ROOT_BYTES, lambda _: None) == ROOT_BYTES


@pytest.mark.parametrize("case", [*(("part", name) for name in PARTS), *(("root", name) for name in ROOTS)], ids=str)
def test_hostile_manifests_are_refused_within_a_second(case: tuple[str, str]) -> None:
    kind, name = case
    data = (PARTS if kind == "part" else ROOTS)[name]
    decode = manifests.decode_part if kind == "part" else manifests.decode_root
    started = time.perf_counter()
    with pytest.raises(CorruptError) as caught:
        decode(data, "here")
    assert time.perf_counter() - started < 5  # within a second on a quiet machine
    assert caught.value.where == "here"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("case", ["ranks without end", "deep JSON", "too long"])
def test_hostile_manifests_are_refused_in_little_memory(case: str) -> None:
    data = PARTS[case]
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            manifests.decode_part(data, "here")
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_a_root_that_claims_parts_without_bound_is_refused_before_they_are_read() -> None:
    for parts in (
        {"manifest-0.json": (1 << 62, "0" * 32)},
        {"manifest-0.json": ((16 << 20) + 1, "0" * 32)},
        {f"manifest-{number}.json": (16 << 20, "0" * 32) for number in range(200)},
    ):
        hostile = manifests.encode_root(dataclasses.replace(ROOT, parts=parts))
        with pytest.raises(CorruptError, match="long"):
            manifests.decode_root(hostile, "here")


def test_groups_without_number_are_counted_in_one_pass() -> None:
    """6,000 bundles of one group each take little longer than as many of one group for all: no group is summed anew per row."""

    def seconds(num_groups: int) -> float:
        rows = []
        for number in range(6_000):
            group = number % num_groups
            ref = dataclasses.replace(FILES[0].ref, bundle_id=f"g{number:05}", runs=((group, group, 1),))
            name = manifests.bundle_file_name(ref.bundle_id, FILES[0].digest)
            rows.append(dataclasses.replace(FILES[0], ref=ref, file=name))
        data = manifests.encode_part(rows)
        gc.collect()
        gc.disable()  # which looks at all that earlier tests left, the longer the more is made
        try:
            began = time.thread_time()
            assert len(manifests.decode_part(data, "here")) == len(rows)
            return time.thread_time() - began
        finally:
            gc.enable()

    seconds(1)
    pairs = [(seconds(1), seconds(6_000)) for _ in range(2)]
    assert min(many for _, many in pairs) < 2.5 * min(one for one, _ in pairs), pairs


@pytest.mark.parametrize("data", [PART, ROOT_BYTES], ids=["part", "root"])
def test_a_newer_format_is_refused_by_naming_both_even_if_nothing_else_is_known(data: bytes) -> None:
    newer = sealed(b'{"format":"holdfast-manifest","format_version":4,"what":{"is":["this"]}')
    decode = manifests.decode_part if data is PART else manifests.decode_root
    with pytest.raises(NewerFormat, match=rf"format 4; .* up to {1 if data is PART else 3}.*upgrade"):
        decode(newer, "here")


@pytest.mark.parametrize(
    "parts",
    [{}, {"manifest-0.json": PART[:-1]}, {"manifest-0.json": manifests.encode_part(FILES[:2])}],
    ids=["missing", "cut", "another"],
)
def test_a_part_that_was_not_committed_is_refused_by_name(parts: dict[str, bytes]) -> None:
    with pytest.raises(CorruptError, match=r"not the part that was committed.*manifest-0.json"):
        manifests.assemble(ROOT, parts, "here")


def test_a_bundle_in_two_parts_is_refused() -> None:
    parts = {"manifest-0.json": PART, "manifest-1.json": manifests.encode_part(FILES[:1])}
    root = dataclasses.replace(ROOT, parts={name: manifests.part_entry(data) for name, data in parts.items()})
    with pytest.raises(CorruptError, match="g0 is listed twice"):
        manifests.assemble(root, parts, "here")


def test_a_rank_beyond_the_job_is_refused() -> None:
    with pytest.raises(CorruptError, match="beyond the job"):
        manifests.assemble(dataclasses.replace(ROOT, world_size=4), {"manifest-0.json": PART}, "here")
