"""The nouns: versions, extents, shards, bundles, seals. Values without behaviour beyond their own consistency.

Nothing here knows a tensor, a file, a socket or a clock. A rank is an index into the job (0 .. world_size - 1); a node
is the label of a failure domain.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

from holdfast.core.rank_runs import Runs, is_in, runs_of, spread

NAME_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z")
_VERSION_PATTERN = re.compile(r"i(\d{6,10})-s(\d{10,16})\Z")

# Element sizes of the dtypes that a safetensors header may name, in bytes.
DTYPE_BYTES: dict[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class Level(enum.IntEnum):
    """Says how safe a version is; nothing ever names a level that is not reached.

    Ordered by what is survived, but a durable version need not be replicated: each is reached for itself.
    """

    NONE = 0
    CAPTURED = 1  # every bundle is sealed in some node's memory
    REPLICATED = 2  # every bundle is sealed in at least two nodes, or survives any one of them by parity
    DURABLE = 3  # the manifest is committed in storage


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """The identity of saved state. Ordered by (incarnation, step); a step number alone is no identity."""

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"i{self.incarnation:06d}-s{self.step:010d}"

    @classmethod
    def parse(cls, text: str) -> Version | None:
        """The version that `text` names exactly, else None."""
        match = _VERSION_PATTERN.match(text)
        return cls(int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class Extent:
    """A box in a global tensor: per dimension where it starts and how long it is. Zero dimensions: a scalar."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.lengths)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a named tensor that one rank holds, and who else holds the same bytes.

    Attributes:
        name: entry name, DCP's flattened name; state of one rank alone is named `rank<N>/...`.
        dtype: a key of DTYPE_BYTES.
        global_shape: shape of the whole tensor.
        extent: which part this is. Row-major contiguous in the rank's memory.
        ranks: the redundancy group, ascending, the rank itself included.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    extent: Extent
    ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.extent.num_elements * DTYPE_BYTES[self.dtype]

    def row(self) -> tuple[Any, ...]:
        """Return plain values that can be sent to another process; see `of_row`."""
        return self.name, self.dtype, self.global_shape, self.extent.offsets, self.extent.lengths, self.ranks

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Shard:
        """Return the shard of a row that came as JSON."""
        name, dtype, shape, offsets, lengths, ranks = row
        return cls(name, dtype, tuple(shape), Extent(tuple(offsets), tuple(lengths)), tuple(ranks))


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of rows of a shard (dimension 0) that lies in one bundle. A bundle holds at most one piece of a name.

    Attributes:
        start_row: first row of the piece *within the shard*; 0 for a scalar or a whole shard.
    """

    shard: Shard
    start_row: int
    num_rows: int

    @property
    def extent(self) -> Extent:
        """The piece's box in the global tensor."""
        whole = self.shard.extent
        if not whole.lengths:
            return whole
        offsets = (whole.offsets[0] + self.start_row, *whole.offsets[1:])
        return Extent(offsets, (self.num_rows, *whole.lengths[1:]))

    @property
    def num_bytes(self) -> int:
        return self.extent.num_elements * DTYPE_BYTES[self.shard.dtype]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Shards with the same redundancy group, cut into byte-balanced shares: share `index` of `count`.

    Nothing in it depends on the rank or incarnation that writes it.

    Attributes:
        bundle_id: file-name safe, unique within a version, equal on every rank of the group.
        has_values: this share also carries the group's non-tensor values (share 0 only).
    """

    bundle_id: str
    ranks: tuple[int, ...]
    index: int
    count: int
    pieces: tuple[Piece, ...]
    has_values: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor payload, values and header not counted."""
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True, init=False)
class BundleRef:
    """A bundle as everyone but its writer needs it: identity and group, not content.

    Attributes:
        runs: the ranks of the group, as messages carry them (`core.rank_runs`).
        fingerprint: digest of names, dtypes, shapes and extents; twins' fingerprints are equal.
    """

    bundle_id: str
    runs: Runs
    index: int
    count: int
    num_bytes: int
    fingerprint: str

    def __init__(
        self,
        bundle_id: str,
        ranks: tuple[int, ...] = (),
        index: int = 0,
        count: int = 1,
        num_bytes: int = 0,
        fingerprint: str = "",
        *,
        runs: Runs = (),
    ) -> None:
        """The group is given as `ranks`, or as `runs`."""
        fields = (bundle_id, runs_of(ranks) if ranks else runs, index, count, num_bytes, fingerprint)
        for name, value in zip(_REF_FIELDS, fields, strict=True):
            object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        """Called for what came in a message.

        Raises:
            ValueError: the runs are no group.
        """
        spread(self.runs)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group, ascending."""
        return spread(self.runs)

    def has(self, rank: int) -> bool:
        """Return whether a rank is a member of the group."""
        return is_in(rank, self.runs)


_REF_FIELDS = ("bundle_id", "runs", "index", "count", "num_bytes", "fingerprint")


@dataclass(frozen=True, slots=True)
class Seal:
    """Proof of content of one bundle of one version: length in bytes, digest of the image, digests of its chunks."""

    bundle_id: str
    length: int
    digest: str
    chunk_digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    """Says who runs where: `node_of[rank]` is the index of the rank's node in `nodes` (labels, in order of first rank).

    Attributes:
        racks: label of each node's rack; empty if nobody said.
        backups: index of the node that was named to keep each node's replicas, -1 where none was; empty if none at all.
        redundancy: what survives a lost node in memory, and how (`core.layout.parity_groups`).
    """

    nodes: tuple[str, ...]
    node_of: tuple[int, ...]
    racks: tuple[str, ...] = ()
    backups: tuple[int, ...] = ()
    redundancy: str = "replica"

    @property
    def world_size(self) -> int:
        return len(self.node_of)

    def ranks_on(self, node: int) -> tuple[int, ...]:
        return tuple(rank for rank, home in enumerate(self.node_of) if home == node)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Holds what one rank knows without asking anybody: the bundles of all its groups, and which of them it captures.

    Attributes:
        bundles: every bundle whose group contains `rank` (twins list the same ones).
        captures: ids of those that this rank copies into its slot; within a node each is captured once.
    """

    rank: int
    bundles: tuple[BundleRef, ...]
    captures: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Digest of identity, group and structure of all bundles; a cheap name for this layout."""
        name = repr((self.rank, structure_of(self.bundles), self.captures))
        return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


# Lists whose digests are kept, each with its list, so that no other one gets its number. Twins share one of thousands of bundles.
_structures: dict[int, tuple[tuple[BundleRef, ...], str]] = {}
MAX_STRUCTURES = 64


def structure_of(bundles: tuple[BundleRef, ...]) -> str:
    """Return a digest of identity, group and structure of bundles."""
    kept = _structures.get(id(bundles))
    if kept is None:
        rows = [(b.bundle_id, b.fingerprint) for b in bundles]
        kept = bundles, hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()
        if len(_structures) >= MAX_STRUCTURES:
            _structures.clear()
        _structures[id(bundles)] = kept
    return kept[1]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A decision with its reason: one sentence for the log, the status page and the tests."""

    value: T
    reason: str
