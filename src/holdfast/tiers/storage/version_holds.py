"""Marks of versions that somebody reads at length, and that must stay as long as that takes.

A pin stays until it is taken away; a hold ends with whoever made it. A mark is an empty file whose name is the version and
the stamp of the holder (`registry.make_stamp`), so that several may hold one version, and so that everybody can tell whether
the holder is gone: the rule is that of temporary files (`registry.is_dead`). Called by `storage`.
"""

from __future__ import annotations

from holdfast.core.model import Version
from holdfast.tiers.backends.interface import Backend
from holdfast.tiers.storage.incarnations import is_dead

HELD = "held"


def hold(backend: Backend, version: Version, stamp: str) -> None:
    """Marks a version, which need not be there yet. Doing it again with the same stamp changes nothing."""
    backend.create(f"{HELD}/{version}.{stamp}", b"", stamp=stamp)


def release(backend: Backend, version: Version, stamp: str) -> None:
    """Takes the mark of this holder away."""
    backend.delete(f"{HELD}/{version}.{stamp}")


def held(backend: Backend) -> dict[Version, str]:
    """Returns the versions that are held, each with the name of one mark."""
    found = ((Version.parse(name.partition(".")[0]), name) for name, _ in backend.listing(HELD))
    return {version: f"{HELD}/{name}" for version, name in found if version is not None}


def break_dead(backend: Backend, incarnation: int) -> list[str]:
    """Takes away the marks of holders that are gone, given the incarnation that runs; returns their names."""
    names = [name for name, _ in backend.listing(HELD)]
    dead = [f"{HELD}/{name}" for name in names if is_dead(name.partition(".")[2], incarnation)]
    if dead:
        backend.delete(*dead)
    return dead
