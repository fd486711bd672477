"""Marks of versions that must stay: pins of an operator, what retention keeps for its time, holds of who reads at length.

A pin stays until it is taken away; a hold ends with whoever made it. A mark is an empty file whose name is the version; that
of a hold has the stamp of the holder besides (`incarnations.make_stamp`), so that several may hold one version, and so that
everybody can tell whether the holder is gone: the rule is that of temporary files (`incarnations.is_dead`).
"""

from __future__ import annotations

from holdfast.core.model import Version
from holdfast.tiers.backends.interface import Backend
from holdfast.tiers.storage.incarnations import is_dead, make_stamp

PINNED = "pinned"
KEPT = "kept"
HELD = "held"


class Marks:
    """The marks of versions under one root."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def pin(self, version: Version) -> None:
        """Keeps a version from ever being retired."""
        self._backend.create(f"{PINNED}/{version}", b"", stamp=make_stamp(0))

    def unpin(self, version: Version) -> None:
        """Takes a pin away."""
        self._backend.delete(f"{PINNED}/{version}")

    def pins(self) -> set[Version]:
        return self._marked(PINNED)

    def keep(self, version: Version) -> None:
        """Marks a version as the one to be kept of its minutes; unlike a pin, retention itself set it."""
        self._backend.create(f"{KEPT}/{version}", b"", stamp=make_stamp(version.incarnation))

    def kept(self) -> set[Version]:
        return self._marked(KEPT)

    def hold(self, version: Version, stamp: str) -> None:
        """Keeps a version, which need not be there yet, until `release` with the same stamp, or until the stamp's process is gone.

        Doing it again with the same stamp changes nothing.
        """
        self._backend.create(f"{HELD}/{version}.{stamp}", b"", stamp=stamp)

    def release(self, version: Version, stamp: str) -> None:
        """Ends a hold. Without one it does nothing."""
        self._backend.delete(f"{HELD}/{version}.{stamp}")

    def held(self) -> dict[Version, str]:
        """Returns the versions that are held, each with the name of one mark; see `break_holds` for those of the dead."""
        found = ((Version.parse(name.partition(".")[0]), name) for name, _ in self._backend.listing(HELD))
        return {version: f"{HELD}/{name}" for version, name in found if version is not None}

    def break_holds(self, incarnation: int) -> list[str]:
        """Ends the holds of processes that are gone, given the incarnation that runs; returns the names of the marks."""
        names = [name for name, _ in self._backend.listing(HELD)]
        dead = [f"{HELD}/{name}" for name in names if is_dead(name.partition(".")[2], incarnation)]
        if dead:
            self._backend.delete(*dead)
        return dead

    def _marked(self, directory: str) -> set[Version]:
        found = (Version.parse(name) for name, _ in self._backend.listing(directory))
        return {version for version in found if version is not None}
