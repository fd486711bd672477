"""Reads what lies in storage and in memory, past holdfast: the facts that testing/checks/invariants.py judges.

Shares no code with the rooms below: the formats are read as docs/spec/format.md and docs/spec/keeper.md describe them,
with json, msgspec and xxhash alone, so that a bug in a reader of ours cannot hide what it should report. Memory is
read through /proc of the processes that hold it, living trainers and keepers, whatever the keeper believes about it.
Damaged bytes are evidence, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from holdfast.core.model import Version
from holdfast.testing.checks.invariants import MemoryView, SealedCopy, StorageView, StoredVersion

CHUNK_BYTES = 8 << 20
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
# Entries that make up "the state" in digests; the rest (random states, values) is compared by the trainer itself.
STATE = re.compile(r"(?:rank\d+/)?(?:model\.|optimizer\.state\.)")

_BUNDLE_FILE = re.compile(r".+-([0-9a-f]{32})\.safetensors\Z")
_TAIL = re.compile(rb',"checksum":"([0-9a-f]{32})"\}\n\Z')
_OURS = re.compile(r"manifest(?:-\d+)?\.json\Z|.+-[0-9a-f]{32}\.safetensors\Z")
_SLOT_PREFIX = struct.Struct("<8sQQ")
_RECORD_AT = 64
# What the kernel calls the descriptor of a slot's memory; pages, notes and keys have longer names.
_SLOT_LINK = "/memfd:holdfast (deleted)"


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of a tensor found in an image: the box at `offsets` of a tensor of `global_shape`."""

    name: str
    item_bytes: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    data: bytes


@dataclass(slots=True)
class _Puzzle:
    """The state of every rank, put together from fragments."""

    boxes: dict[int, dict[str, Any]] = field(default_factory=dict)
    filled: dict[tuple[int, str], dict[tuple[int, ...], int]] = field(default_factory=dict)

    def add(self, ranks: Iterable[int], fragment: Fragment) -> None:
        name = fragment.name.partition("/")[2] if fragment.name.startswith("rank") else fragment.name
        for rank in ranks:
            box = self.boxes.setdefault(rank, {})
            shape = (*fragment.global_shape, fragment.item_bytes)
            whole = box.setdefault(name, np.zeros(shape, dtype=np.uint8))
            at = tuple(slice(start, start + size) for start, size in zip(fragment.offsets, fragment.shape, strict=True))
            whole[at] = np.frombuffer(fragment.data, dtype=np.uint8).reshape((*fragment.shape, fragment.item_bytes))
            # Twins and replicas hold a piece several times; it counts once.
            self.filled.setdefault((rank, name), {})[fragment.offsets] = prod(fragment.shape)

    def digests(self, num_entries: int) -> dict[int, str]:
        """Rank -> digest of its state, of ranks whose `num_entries` tensors are there from end to end."""
        found = {}
        for rank, box in self.boxes.items():
            whole = all(
                sum(self.filled[rank, name].values()) == prod(tensor.shape[:-1]) for name, tensor in box.items()
            )
            if whole and len(box) == num_entries:
                found[rank] = state_digest((name, tensor.tobytes()) for name, tensor in box.items())
        return found


def state_digest(tensors: Iterable[tuple[str, bytes]]) -> str:
    """Digest of named tensors, whatever their order; the trainers of the drill make the same of their live state."""
    state = hashlib.blake2b(digest_size=16)
    for name, data in sorted(tensors):
        state.update(f"{name}:{len(data)};".encode())
        state.update(data)
    return state.hexdigest()


def image_digest(data: bytes | memoryview) -> str:
    """Digest of an image: xxh3_128 over the digests of its chunks."""
    digests = [xxhash.xxh3_128_digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def fragments(image: bytes | memoryview) -> Iterator[Fragment]:
    """The tensors of the state in a safetensors image that passed its digest."""
    (length,) = struct.unpack("<Q", image[:8])
    header = json.loads(bytes(image[8 : 8 + length]))
    metadata = header.pop("__metadata__", {})
    offsets = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
    global_shapes = json.loads(metadata.get("holdfast", "{}")).get("global_shapes", {})
    for name, item in header.items():
        if STATE.match(name) is None:
            continue
        first, last = item["data_offsets"]
        yield Fragment(
            name,
            ITEM_BYTES[item["dtype"]],
            tuple(item["shape"]),
            tuple(offsets[name]["saved_offsets"]),
            tuple(global_shapes.get(name, item["shape"])),
            bytes(image[8 + length + first : 8 + length + last]),
        )


# --- storage -----------------------------------------------------------------------------------------------------


def read_storage(root: Path, *, num_entries: int) -> StorageView:
    """The checkpoint root as it is now; call it when nobody writes.

    Args:
        root: the checkpoint directory; it may not exist yet.
        num_entries: how many tensors the state of one rank has; a version with fewer does not spell it out.
    """
    versions: dict[Version, StoredVersion] = {}
    foreign: dict[str, str] = {}
    problems: list[str] = []
    incarnations: set[int] = set()
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        version = Version.parse(path.name)
        if version is not None:
            versions[version] = _read_version(path, version, num_entries, foreign)
        elif path.name == "incarnations":
            for file in path.iterdir():
                incarnations.add(int(file.name.split(".")[0]))
                problems += _torn(file)
        elif path.name == "holdfast.json":
            problems += _torn(path)
        elif path.name not in {".tmp", "latest", "pinned", "kept", "held", "run.lock"}:
            foreign[path.name] = _content(path)
    temporary = tuple(sorted(str(p.relative_to(root)) for p in (root / ".tmp").rglob("*") if p.is_file()))
    return StorageView(versions, tuple(sorted(incarnations)), foreign, temporary, tuple(problems))


def _read_version(path: Path, version: Version, num_entries: int, foreign: dict[str, str]) -> StoredVersion:
    files = {file.name: file for file in sorted(path.iterdir())}
    foreign.update({f"{path.name}/{name}": _content(file) for name, file in files.items() if not _OURS.match(name)})
    problems: list[str] = []
    for file in files.values():
        problems += _torn(file)
    if "manifest.json" not in files:
        return StoredVersion(version, "", tuple(problems), {}, tuple(files))
    manifest = files["manifest.json"].read_bytes()
    puzzle = _Puzzle()
    listed = {"manifest.json"}
    ranks: set[int] = set()
    root = _json(manifest)
    for name, part in root.get("parts", {}).items():
        listed.add(name)
        data = files[name].read_bytes() if name in files else b""
        if (len(data), xxhash.xxh3_128_hexdigest(data)) != (part["length"], part["digest"]):
            problems.append(f"{name} is not the part that was committed")
            continue
        for bundle in _json(data)["bundles"]:
            listed.add(bundle["file"])
            problems += _add_bundle(bundle, files, puzzle)
            ranks.update(_ranks(bundle["ranks"]))
    problems += [f"{name} is not in the manifest" for name in sorted(set(files) - listed) if _OURS.match(name)]
    contents = puzzle.digests(num_entries)
    missing = set(range(root.get("world_size", 1))) - set(contents)
    if missing and not problems:
        problems.append(f"it is committed and does not hold the whole state of ranks {sorted(missing)}")
    digest = hashlib.blake2b(manifest, digest_size=16).hexdigest()
    return StoredVersion(version, digest, tuple(problems), contents, tuple(files))


def _add_bundle(bundle: Mapping[str, Any], files: Mapping[str, Path], puzzle: _Puzzle) -> list[str]:
    name = bundle["file"]
    if name not in files:
        return [f"{name} is in the manifest and not there"]
    data = files[name].read_bytes()
    if len(data) != bundle["length"] or image_digest(data) != bundle["digest"]:
        return [f"{name} is not what its manifest says"]
    for fragment in fragments(data):
        puzzle.add(_ranks(bundle["ranks"]), fragment)
    return []


def _ranks(runs: Sequence[tuple[int, int, int]]) -> list[int]:
    return [rank for first, last, step in runs for rank in range(first, last + 1, step)]


def _torn(file: Path) -> list[str]:
    """Return what contradicts the proof that a file of ours carries in its name or in its tail."""
    named = _BUNDLE_FILE.match(file.name)
    if named is not None:
        return [] if image_digest(file.read_bytes()) == named[1] else [f"{file.name} stands torn at its final name"]
    if file.suffix != ".json":
        return []
    data = file.read_bytes()
    tail = _TAIL.search(data)
    intact = tail is not None and xxhash.xxh3_128_hexdigest(data[: tail.start()]).encode() == tail[1]
    return [] if intact else [f"{file.name} stands torn at its final name"]


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _content(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else "a directory"


# --- memory ------------------------------------------------------------------------------------------------------


def read_memory(holders: Mapping[int, Iterable[int]], *, num_entries: int) -> MemoryView:
    """Return what the slots hold that living processes have open; call it when no trainer writes.

    Args:
        holders: node -> ids of its processes (keeper and trainers). A node none of which lives has lost its memory.
        num_entries: how many tensors the state of one rank has.
    """
    copies: list[SealedCopy] = []
    puzzles: dict[Version, _Puzzle] = {}
    lost = set()
    for node, pids in holders.items():
        alive = False
        seen: set[int] = set()
        for pid in pids:
            alive |= os.path.exists(f"/proc/{pid}/fd")
            for fd in slot_descriptors(pid, seen):
                try:
                    copies += _read_slot(fd, node, puzzles)
                finally:
                    os.close(fd)
        if not alive:
            lost.add(node)
    contents = {version: puzzle.digests(num_entries) for version, puzzle in puzzles.items()}
    return MemoryView(tuple(copies), contents, frozenset(lost))


def slot_links(pid: int) -> Iterator[str]:
    """Yield where /proc shows the slots that a process has open; each may be closed meanwhile."""
    try:
        links = sorted(os.listdir(f"/proc/{pid}/fd"), key=int)
    except OSError:
        return
    for link in links:
        path = f"/proc/{pid}/fd/{link}"
        with contextlib.suppress(OSError):
            if os.readlink(path) == _SLOT_LINK:
                yield path


def slot_descriptors(pid: int, seen: set[int], *, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Own descriptors, for the caller to close, of the slots that a process has open; each memory file once.

    One that is just being made has no bytes yet, and is none.
    """
    for path in slot_links(pid):
        try:
            fd = os.open(path, flags | os.O_CLOEXEC)
        except OSError:
            continue  # closed meanwhile
        facts = os.fstat(fd)
        if facts.st_ino in seen or not facts.st_size:
            os.close(fd)
            continue
        seen.add(facts.st_ino)
        yield fd


def _read_slot(fd: int, node: int, puzzles: dict[Version, _Puzzle]) -> list[SealedCopy]:
    """The sealed images of one slot. A header that changes while its images are read was not sealed for us."""
    copies = []
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        header, body = slot_header(memory)
        if header is None:
            return []
        _, header_bytes, _ = _SLOT_PREFIX.unpack_from(memory)
        version = Version(header["version"]["incarnation"], header["version"]["step"])
        found: list[tuple[list[int], bytes, bool, str]] = []
        for image in header["images"]:
            start, seal = header_bytes + image["offset"], image["seal"]
            data = memory[start : start + seal["length"]]
            ranks = _ranks(image["ref"]["runs"])
            found.append((ranks, data, image_digest(data) == seal["digest"], seal["bundle_id"]))
        if slot_header(memory)[1] != body:
            return []
    for ranks, data, intact, bundle_id in found:
        copies.append(SealedCopy(node, version, bundle_id, intact))
        for fragment in fragments(data) if intact else ():
            puzzles.setdefault(version, _Puzzle()).add(ranks, fragment)
    return copies


def slot_header(memory: mmap.mmap) -> tuple[dict[str, Any] | None, bytes]:
    """The header of a sealed slot and its bytes; no header if the slot is empty, being written, or torn."""
    magic, header_bytes, _ = _SLOT_PREFIX.unpack_from(memory)
    (length,) = struct.unpack_from("<Q", memory, _RECORD_AT)
    if magic != b"HFSLOT01" or not 0 < length <= header_bytes:
        return None, b""
    body = memory[_RECORD_AT + 24 : _RECORD_AT + 24 + length]
    if xxhash.xxh3_128_digest(body) != memory[_RECORD_AT + 8 : _RECORD_AT + 24]:
        return None, body
    return msgspec.msgpack.decode(body), body
