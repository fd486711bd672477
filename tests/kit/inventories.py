"""What keepers tell of what they hold, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.model import BundleRef, Version
from holdfast.core.recovery.version_choice import MemoryCopy
from holdfast.keeper.rpc.messages import Held, pack, together


def held_as(copy: MemoryCopy) -> Held:
    """The copy as a keeper tells of it."""
    return Held(copy.version, copy.nodes, copy.ranks, copy.preloaded, bytes(pack([copy.seal])))


def packed(tables: Mapping[Version, Sequence[BundleRef]]) -> tuple[tuple[tuple[Version, ...], bytes], ...]:
    """Tables of bundles as a keeper tells of them."""
    return together({version: bytes(pack(table)) for version, table in tables.items()})
