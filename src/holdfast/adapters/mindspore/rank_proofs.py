"""The proof beside a rank's file: what a file must be before a byte of it is taken. For `rank_files` and `rank_copies`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from holdfast.base import private
from holdfast.base.errors import CorruptError
from holdfast.base.handler_errors import pass_on
from holdfast.core.layout.bundles import fingerprint
from holdfast.core.model import Bundle, Piece, Seal, Shard
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values as value_codec
from holdfast.tiers.format.image import Entry

SUFFIX, PROOF = ".safetensors", ".proof"
MAX_PROOF_BYTES = 64 << 20


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Says what a file must be, in a file of its own.

    Attributes:
        epoch, step: the state after this step of this epoch.
        slices: digest of names, dtypes, shapes and extents of all that the rank held; twins' are equal, other ranks'
            differ.
        length, digest, chunks: of the bytes.
        names: of the slices that are in the file; None: all of them.
    """

    epoch: int
    step: int
    slices: str
    length: int
    digest: str
    chunks: tuple[str, ...]
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A file that is what is wanted as far as its name and its proof say."""

    path: Path
    proof: Proof


@dataclass(frozen=True, slots=True)
class Parts:
    """Holds what is loaded: proved bytes by name of the slice, and numbers by the group that shares them."""

    entries: dict[str, Entry] = field(default_factory=dict)
    data: dict[str, memoryview] = field(default_factory=dict)
    values: dict[tuple[int, ...], Mapping[str, Any]] = field(default_factory=lambda: defaultdict(dict))


def bundle_of(shards: Sequence[Shard]) -> Bundle:
    """The slices as one image. Nothing in it depends on the rank that writes it."""
    ordered = sorted(shards, key=lambda shard: shard.name)
    pieces = tuple(Piece(s, 0, s.extent.lengths[0] if s.extent.lengths else 1) for s in ordered)
    return Bundle("slices", (0,), 0, 1, pieces, has_values=True)


def slices_digest(shards: Sequence[Shard]) -> str:
    """Return what `Proof.slices` is for a rank that holds these."""
    return fingerprint(bundle_of(shards))


def longest(shards: Sequence[Shard]) -> int:
    """Return how many bytes a file of these slices, or of some of them, has at most."""
    return image_format.MAX_HEADER_BYTES + sum(shard.num_bytes for shard in shards) + value_codec.MAX_BYTES


def names_in(directory: Path) -> list[str]:
    """Return what lies in a directory, which need not be there; sorted."""
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def read_proof(path: Path, named: tuple[int, int], slices: str, most_bytes: int) -> Proof:
    """Return what the file beside `path` says of it.

    Args:
        path: of the slices.
        named: epoch and step in its name.
        slices: what the rank that wrote it holds.
        most_bytes: how long a file of these is at most: whoever put an endless one there may have written its proof too.

    Raises:
        CorruptError: the proof is missing or damaged, or it is of another step, of other slices or of more than they can be.
    """
    try:
        data = private.read(path.with_suffix(PROOF), MAX_PROOF_BYTES, through_links=True)
        proof = msgspec.json.decode(data, type=Proof)
    except OSError as error:
        pass_on(error)
        raise CorruptError(f"its proof cannot be read: {error.strerror}", where=str(path)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"its proof cannot be understood: {error}", where=str(path)) from error
    if (proof.epoch, proof.step) != named:
        raise CorruptError(f"it holds step {proof.step} of epoch {proof.epoch}", where=str(path))
    if proof.slices != slices:
        raise CorruptError("it holds other slices than this rank needs", where=str(path))
    if proof.length > most_bytes:
        raise CorruptError(
            f"its proof says {proof.length} bytes, its slices have {most_bytes} at most", where=str(path)
        )
    return proof


def read_good(found: Found, faults: list[str]) -> bytes | None:
    """The bytes of a file if they are what its proof says; None, and why in `faults`, if not."""
    seal = Seal("slices", found.proof.length, found.proof.digest, found.proof.chunks)
    try:
        data = private.read(found.path, max(0, found.proof.length), through_links=True)
        image_format.verify(memoryview(data), seal, str(found.path))
    except OSError as error:
        pass_on(error)
        faults.append(f"it cannot be read: {error.strerror} [{found.path}]")
    except CorruptError as error:
        faults.append(str(error))
    else:
        return data
    return None
