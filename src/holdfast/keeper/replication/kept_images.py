"""Replicas that need not be sent: what did not change since an earlier version lies in this node's memory already.

The slot that is overwritten may hold the same image at the same place; then it stays there. Or another replica slot of the
rank holds it; then it is copied. A node keeps two such slots, so from the second version on only what changed is sent.

Invariants: the same means the whole seal, not the name; what is copied is proved chunk by chunk as if it had been sent; of
what stays in place a share is proved every time, so that damage of it is not handed from version to version. Whatever is
in doubt is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.base.errors import CorruptError
from holdfast.core.model import Seal
from holdfast.core.versions.slot_guard import SlotState
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory.slots import ImagePlace
from holdfast.tiers.memory.spoiled_images import spoiled

logger = logging.getLogger(__name__)

_PIN = "copied from"


def keep(state: NodeState, held: HeldSlot, place: ImagePlace, stopping: Callable[[], bool]) -> bool:
    """Return whether the image that `place` names is in `held` now, a slot that is being written, without being sent.

    If it is not, its bytes there may be anything. Not under the state's lock.
    """
    seal = place.seal
    if image_format.num_chunks(seal.length) != len(seal.chunk_digests):
        return False
    if image_format.image_digest(seal.chunk_digests) != seal.digest:
        return False  # it could not be proved
    before = held.before.get(seal.bundle_id)
    if before is not None and (before.offset, before.seal) == (place.offset, seal):
        fault = spoiled(_view(held, place), seal)
        if not fault:
            return True
        logger.warning("a replica of rank %d is not kept but brought anew: %s", held.rank, fault)
    return _copied(state, held, place, stopping)


def _copied(state: NodeState, held: HeldSlot, place: ImagePlace, stopping: Callable[[], bool]) -> bool:
    """Copies the image from another replica slot of the rank, if one holds it."""
    source = _pinned(state, held, place.seal)
    if source is None:
        return False
    other, there = source
    target, index = _view(held, place), 0
    try:
        for chunk in image_format.chunks(_view(other, there)):
            if stopping():
                return False
            copy = target[index * image_format.CHUNK_BYTES :][: len(chunk)]
            copy[:] = chunk
            image_format.check_chunk(index, image_format.chunk_digest(copy), place.seal, "")
            index += 1
    except CorruptError as error:
        logger.warning("a replica of rank %d is not copied but brought anew: %s", held.rank, error.what)
        return False
    finally:
        state.unpin(other, _PIN)
    return True


def _pinned(state: NodeState, held: HeldSlot, seal: Seal) -> tuple[HeldSlot, ImagePlace] | None:
    """A slot that holds an image with this very seal, pinned. What was preloaded may go any time."""
    with state.lock:
        for other in state.slot_pool.of_rank(held.rank, replica=True):
            place = other.images.get(seal.bundle_id)
            if other is held or other.state is not SlotState.SEALED or other.preloaded or place is None:
                continue
            if place.seal == seal and seal.bundle_id not in other.condemned:
                other.pins[_PIN] += 1
                return other, place
    return None


def _view(held: HeldSlot, place: ImagePlace) -> memoryview:
    return held.slot.view[place.offset : place.offset + place.seal.length]
