"""The commit record of a version: which files it consists of, and what proves each of them.

A manifest is one root file and one part per line of writers (core.takeover). A part lists the bundles that have this line,
whoever wrote them; the root lists the parts with their digests, and its existence is the commit. Content is determined by
the version alone: no clock, no host, no writer. Two committers of one version write the same bytes.

Specification: docs/spec/format.md, section 5.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec
import xxhash

from holdfast.base.errors import CorruptError
from holdfast.base.handler_errors import pass_on
from holdfast.core.model import NAME_PATTERN, BundleRef, Seal, Version
from holdfast.core.rank_runs import MAX_RANKS, count_in, spread
from holdfast.core.recovery.version_choice import Stored
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.strict_json import (
    AUTHENTICATED_FORMAT,
    MAX_RECORD_BYTES,
    Record,
    decode_record,
    encode_record,
)

ROOT_NAME = "manifest.json"
MAX_PARTS = 1 << 17
# All parts of a version together: they are held at once.
MAX_PART_BYTES = 2 << 30

_PART_NAME = re.compile(r"manifest-(?:0|[1-9][0-9]{0,5})\.json\Z")
ENCRYPTED = re.compile(r".+-[0-9a-f]{32}\.([0-9a-f]{16})\.(encrypted2?)\Z")
OLDER = "encrypted"
_DIGEST = re.compile(r"[0-9a-f]{32}\Z")
_MAC = re.compile(r"[0-9a-f]{64}\Z")

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Run: TypeAlias = tuple[_Count, _Count, _Count]


@dataclass(frozen=True, slots=True)
class BundleFile:
    """A bundle of one version as it lies in storage: whose it is, its file, and the proof of the file's content."""

    ref: BundleRef
    file: str
    length: int
    digest: str
    chunk_digests: tuple[str, ...]

    @property
    def seal(self) -> Seal:
        """The proof, as the rest of the house names it."""
        return Seal(self.ref.bundle_id, self.length, self.digest, self.chunk_digests)

    @property
    def key_id(self) -> str:
        """Return the id of the key that the file is encrypted with; empty if it is plain."""
        match = ENCRYPTED.match(self.file)
        return match[1] if match else ""

    @property
    def is_older(self) -> bool:
        """An encrypted file of format 2."""
        return is_older(self.file)

    @classmethod
    def of(cls, ref: BundleRef, seal: Seal, key_id: str = "") -> BundleFile:
        """The file that a sealed image becomes."""
        name = bundle_file_name(seal.bundle_id, seal.digest, key_id)
        return cls(ref, name, seal.length, seal.digest, seal.chunk_digests)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version in storage.

    Attributes:
        layout: fingerprint of the job's layout.
        resumed_from: what the version's incarnation started from; None for a fresh start.
        parts: name of a part's file -> (length, digest).
        bundles: what the parts list, sorted by bundle; empty as long as only the root was read.
        mac: proof of whoever has the job's key (64 hex digits, see `proved_texts`); empty without encryption.
        proved_format: format of the root, where it has a `mac`.
    """

    version: Version
    job_id: str
    world_size: int
    layout: str
    resumed_from: Version | None
    parts: Mapping[str, tuple[int, str]]
    bundles: tuple[BundleFile, ...] = ()
    mac: str = ""
    proved_format: int = AUTHENTICATED_FORMAT

    @property
    def num_bytes(self) -> int:
        return sum(bundle.length for bundle in self.bundles)


class _PartRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    length: _Count
    digest: str


class _Root(Record, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["holdfast-manifest"] = "holdfast-manifest"
    version: str
    job_id: str
    world_size: _Count
    layout: str
    resumed_from: str | None
    parts: dict[str, _PartRef]


class _ProvedRoot(_Root, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format_version: int = AUTHENTICATED_FORMAT
    mac: str


class _Bundle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    ranks: tuple[_Run, ...]
    index: _Count
    count: _Count
    num_bytes: _Count
    fingerprint: str
    file: str
    length: _Count
    digest: str
    chunks: tuple[str, ...]


class _Part(Record, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["holdfast-manifest-part"] = "holdfast-manifest-part"
    bundles: tuple[_Bundle, ...]


def bundle_file_name(bundle_id: str, digest: str, key_id: str = "") -> str:
    """The name of a bundle's file: its content's, so a writer that lost its term can only write the same again."""
    return f"{bundle_id}-{digest}.{key_id}.encrypted2" if key_id else f"{bundle_id}-{digest}.safetensors"


def is_older(name: str) -> bool:
    """Return whether the name is that of an encrypted file of format 2."""
    match = ENCRYPTED.match(name)
    return match is not None and match[2] == OLDER


def part_name(node: int) -> str:
    """The file of a node's part."""
    return f"manifest-{node}.json"


def part_entry(data: bytes) -> tuple[int, str]:
    """Return what the root says of a part's bytes: (length, digest)."""
    return len(data), xxhash.xxh3_128_hexdigest(data)


def encode_part(bundles: Iterable[BundleFile]) -> bytes:
    """The bytes of a part. The order of `bundles` does not matter."""
    rows = (
        _Bundle(
            b.ref.bundle_id, b.ref.runs, b.ref.index, b.ref.count, b.ref.num_bytes, b.ref.fingerprint,
            b.file, b.length, b.digest, b.chunk_digests,
        )
        for b in sorted(bundles, key=lambda b: b.ref.bundle_id)
    )  # fmt: skip
    return encode_record(_Part(bundles=tuple(rows)))


def encode_root(manifest: Manifest) -> bytes:
    """The bytes of the root; `manifest.bundles` is not part of it."""
    root = _Root(
        version=str(manifest.version),
        job_id=manifest.job_id,
        world_size=manifest.world_size,
        layout=manifest.layout,
        resumed_from=str(manifest.resumed_from) if manifest.resumed_from else None,
        parts={name: _PartRef(*manifest.parts[name]) for name in sorted(manifest.parts)},
    )
    if not manifest.mac:
        return encode_record(root)
    fields = {name: getattr(root, name) for name in root.__struct_fields__ if name != "format_version"}
    return encode_record(_ProvedRoot(**fields, format_version=manifest.proved_format, mac=manifest.mac))


def proved_texts(root: Manifest, parts: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield what `mac` is a proof of: the root without it, and every part, in the order of their names."""
    yield encode_root(dataclasses.replace(root, mac=""))
    yield from (parts[name] for name in sorted(root.parts))


def decode_part(data: bytes, where: str) -> tuple[BundleFile, ...]:
    """The bundles that a part lists.

    Raises:
        NewerFormat: of a newer format.
        CorruptError: damaged, or nothing that `encode_part` writes.
    """
    rows = decode_record(data, _Part, where).bundles
    ids = [row.id for row in rows]
    _check(all(a < b for a, b in itertools.pairwise(ids)), "bundles are not sorted, or named twice", where)
    try:
        num_ranks = sum(count_in(runs) for runs in {row.ranks for row in rows})  # groups recur; each is paid for once
        _check(num_ranks <= MAX_RANKS, f"more than {MAX_RANKS} ranks", where)
        _check(all(map(spread, {row.ranks for row in rows})), "a bundle of no rank", where)
    except ValueError as error:
        pass_on(error)
        raise CorruptError(str(error), where=where) from error
    return tuple(_checked(row, where) for row in rows)


def decode_root(data: bytes, where: str) -> Manifest:
    """The root of a manifest, without its bundles.

    Raises:
        NewerFormat: of a newer format.
        CorruptError: damaged, or nothing that `encode_root` writes.
    """
    root = decode_record(data, _Root, where, later=_ProvedRoot)
    mac = root.mac if isinstance(root, _ProvedRoot) else ""
    version = Version.parse(root.version)
    resumed_from = Version.parse(root.resumed_from) if root.resumed_from is not None else None
    _check(version is not None, f"{root.version[:40]!r} is not a version", where)
    _check(root.resumed_from is None or resumed_from is not None, "it resumed from no version", where)
    _check(0 < root.world_size <= MAX_RANKS and 0 < len(root.parts) <= MAX_PARTS, "no ranks, or too many", where)
    _check(bool(NAME_PATTERN.match(root.job_id)), "the job has no proper name", where)
    _check(not isinstance(root, _ProvedRoot) or bool(_MAC.match(mac)), "its proof is none", where)
    _check(sum(part.length for part in root.parts.values()) <= MAX_PART_BYTES, "its parts are too long", where)
    _check(list(root.parts) == sorted(root.parts), "the parts are not sorted", where)
    for name, part in root.parts.items():
        _check(bool(_PART_NAME.match(name)), f"{name[:40]!r} is not the name of a part", where)
        _check(bool(_DIGEST.match(part.digest)), f"part {name} has no digest", where)
        _check(part.length <= MAX_RECORD_BYTES, f"part {name} is longer than any record", where)
    assert version is not None  # checked above; tells the type checker
    parts = {name: (part.length, part.digest) for name, part in root.parts.items()}
    found = Manifest(version, root.job_id, root.world_size, root.layout, resumed_from, parts, mac=mac)
    return dataclasses.replace(found, proved_format=root.format_version) if mac else found


def assemble(root: Manifest, parts: Mapping[str, bytes], where: str) -> Manifest:
    """The whole manifest, from its root and the bytes of every part that the root lists.

    Raises:
        NewerFormat: a part is of a newer format.
        CorruptError: a part is missing or not the one that was committed, or two list one bundle.
    """
    bundles: dict[str, BundleFile] = {}
    for name, entry in root.parts.items():
        place = f"{where}/{name}"
        _check(name in parts and part_entry(parts[name]) == entry, "this is not the part that was committed", place)
        for bundle in decode_part(parts[name], place):
            _check(bundle.ref.bundle_id not in bundles, f"{bundle.ref.bundle_id} is listed twice", place)
            _check(bundle.ref.ranks[-1] < root.world_size, f"{bundle.ref.bundle_id} names a rank beyond the job", place)
            bundles[bundle.ref.bundle_id] = bundle
    return dataclasses.replace(root, bundles=tuple(bundles[name] for name in sorted(bundles)))


def _checked(row: _Bundle, where: str) -> BundleFile:
    """A row of a part whose fields fit each other."""
    num_chunks = -(-row.length // image_format.CHUNK_BYTES)
    _check(bool(NAME_PATTERN.match(row.id)), f"{row.id[:40]!r} is not the name of a bundle", where)
    key_id = match[1] if (match := ENCRYPTED.match(row.file)) else ""
    name = bundle_file_name(row.id, row.digest, key_id)
    _check(
        row.file in (name, name.removesuffix("2")) if key_id else row.file == name,
        f"bundle {row.id} is in a file of another name",
        where,
    )
    _check(bool(NAME_PATTERN.match(row.file)), f"bundle {row.id} has no proper file name", where)
    _check(row.index < row.count and row.num_bytes <= row.length, f"bundle {row.id}: impossible sizes", where)
    digests_fit = len(row.chunks) == num_chunks and all(map(_DIGEST.match, (row.digest, *row.chunks)))
    _check(
        digests_fit and image_format.image_digest(row.chunks) == row.digest,
        f"bundle {row.id}: its digests do not fit",
        where,
    )
    ref = BundleRef(row.id, (), row.index, row.count, row.num_bytes, row.fingerprint, runs=row.ranks)
    return BundleFile(ref, row.file, row.length, row.digest, row.chunks)


def _check(condition: bool, what: str, where: str) -> None:
    if not condition:
        raise CorruptError(f"the manifest is not valid: {what}", where=where)


def stored_of(manifest: Manifest) -> Stored:
    """A committed version as `core.recovery.version_choice` judges it."""
    seals = {file.ref.bundle_id: file.seal for file in manifest.bundles}
    files = {file.ref.bundle_id: file.file for file in manifest.bundles}
    return Stored(manifest.version, manifest.world_size, tuple(file.ref for file in manifest.bundles), seals, files)
