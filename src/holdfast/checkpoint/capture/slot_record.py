"""Tells what a save left in a slot, by digests; written and believed by `checkpoint.capture.unchanged_images` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.model import Version


@dataclass(frozen=True, slots=True)
class Known:
    """Digests of an image in a slot.

    Attributes:
        probe: of the first bytes of its smallest part.
        parts: of each part, in the order of the plan; None: it moves, and they were not taken.
        moved: it was not what had been there before it.
    """

    probe: bytes
    parts: tuple[bytes, ...] | None
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """Holds what one save, complete, left in a slot: by whom the keeper was told, and what is known of images by bundle."""

    client: object
    version: Version
    known: Mapping[str, Known]
