"""Finds damage of images that stay in memory from version to version, so that none is handed on for ever."""

from __future__ import annotations

import random

from holdfast.base.errors import CorruptError
from holdfast.core.model import Seal
from holdfast.tiers.format import image as image_format

# This share of the chunks is proved, at least one, chosen at random.
PROVED_PARTS = 64


def spoiled(view: memoryview, seal: Seal) -> str:
    """Return what is wrong with some chunks of an image that was proved before, chosen at random; empty: nothing."""
    count = len(seal.chunk_digests)
    for index in random.sample(range(count), -(-count // PROVED_PARTS)):
        chunk = view[index * image_format.CHUNK_BYTES : (index + 1) * image_format.CHUNK_BYTES]
        try:
            image_format.check_chunk(index, image_format.chunk_digest(chunk), seal, "")
        except CorruptError as error:
            return error.what
    return ""
