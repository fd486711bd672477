"""Bundles, images and stores for the tests of this room."""

from __future__ import annotations

import mmap
import random
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from holdfast.base.events import Events
from holdfast.core.layout.bundles import fingerprint
from holdfast.core.model import DTYPE_BYTES, Bundle, BundleRef, Extent, Piece, Shard, Version
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values
from holdfast.tiers.storage import manifest
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.version_store import Storage, open_storage

JOB_LAYOUT = "0123456789abcdef"


def piece(
    name: str,
    dtype: str,
    lengths: Sequence[int],
    *,
    offsets: Sequence[int] | None = None,
    global_shape: Sequence[int] | None = None,
) -> Piece:
    """A whole shard as one piece; `offsets` and `global_shape` default to an uncut tensor."""
    extent = Extent(tuple(offsets or (0,) * len(lengths)), tuple(lengths))
    shard = Shard(name, dtype, tuple(global_shape or lengths), extent, (0,))
    return Piece(shard, 0, lengths[0] if lengths else 1)


def bundle(bundle_id: str, *pieces: Piece, ranks: Sequence[int] = (0,), has_values: bool = False) -> Bundle:
    return Bundle(bundle_id, tuple(ranks), 0, 1, pieces, has_values)


def ref_of(b: Bundle) -> BundleRef:
    return BundleRef(b.bundle_id, b.ranks, b.index, b.count, b.num_bytes, fingerprint(b))


def build(b: Bundle, tensors: Mapping[str, bytes], stored_values: object = None) -> bytearray:
    """The image of a bundle whose entries have these bytes."""
    raw = image_format.pad_values(values.encode(stored_values)) if b.has_values else b""
    plan = image_format.plan_image(b, len(raw))
    image = bytearray(plan.length)
    image[: len(plan.header)] = plan.header
    for name, (start, size) in plan.spans.items():
        assert len(tensors[name]) == size
        image[start : start + size] = tensors[name]
    if plan.values_span:
        start, size = plan.values_span
        image[start : start + size] = raw
    return image


def random_image(b: Bundle, seed: int = 0, stored_values: object = None) -> bytearray:
    """The image of a bundle with bytes that depend on `seed`."""
    source = random.Random(seed)
    tensors = {p.shard.name: source.randbytes(p.num_bytes) for p in b.pieces}
    return build(b, tensors, stored_values)


def sample_bundle(bundle_id: str = "g0x1-aaaa-0") -> Bundle:
    """A small bundle with all that is special: three widths, a scalar, a cut tensor, a piece without rows, values."""
    return bundle(
        bundle_id,
        piece(f"{bundle_id}.weight", "F32", (3, 5), offsets=(3, 0), global_shape=(6, 5)),
        piece(f"{bundle_id}.half", "BF16", (7,)),
        piece(f"{bundle_id}.step", "I64", ()),
        piece(f"{bundle_id}.mask", "BOOL", (9,)),
        piece(f"{bundle_id}.none", "F32", (0, 4), global_shape=(6, 4)),
        has_values=True,
    )


def entry_size(dtype: str, shape: Sequence[int]) -> int:
    return prod(shape) * DTYPE_BYTES[dtype]


def new_store(root: Path) -> Storage:
    """A claimed store with incarnation 1 registered."""
    store = open_storage(root, Events())
    store.claim()
    if not store.incarnations.highest():
        store.incarnations.register()
    return store


def save(store: Storage, version: Version, *, num_bundles: int = 2, seed: int = 0) -> manifest.Manifest:
    """Writes and commits a version of `num_bundles` bundles on as many nodes."""
    stamp = make_stamp(version.incarnation)
    parts: dict[str, tuple[int, str]] = {}
    for node in range(num_bundles):
        b = sample_bundle(f"g{node}x1-aaaa-0")
        image = random_image(b, seed + node, {"lr": 0.1, "seed": seed})
        sealed = image_format.seal(b.bundle_id, image)
        file = store.bundles.write(version, ref_of(b), sealed, memoryview(image), stamp=stamp)
        name, length, digest = store.write_part(version, node, [file], stamp=stamp)
        parts[name] = (length, digest)
    root = manifest.Manifest(version, store.job_id(), num_bundles, JOB_LAYOUT, None, parts)
    store.commit(root, stamp=stamp)
    return store.manifest(version)


def verify(store: Storage, version: Version) -> int:
    """Proves every file of a version; returns the bytes that were proved."""
    files = store.manifest(version).bundles
    done: list[int] = []
    for file in files:
        store.bundles.verify(version, file, done.append)
    return sum(done)


STAMP = "i000001-t000000-h000000000000-p1"


def local_backend(root: Path) -> LocalBackend:
    made = LocalBackend(root)
    made.prepare()
    return made


def page_memory(num_bytes: int) -> memoryview:
    """Page-aligned memory with bytes that differ from page to page."""
    memory = memoryview(mmap.mmap(-1, max(1, num_bytes)))[:num_bytes]
    for at in range(0, num_bytes, 512):
        memory[at : at + 8] = at.to_bytes(8, "little")[: num_bytes - at]
    return memory


def put(backend: LocalBackend, name: str, *chunks: bytes | memoryview) -> None:
    backend.put(name, [memoryview(chunk) for chunk in chunks], stamp=STAMP)


def tree(root: Path) -> dict[str, bytes]:
    """Every file beneath the root with its bytes."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
