"""A keeper of a dead incarnation that wakes up: commits the newest version again with other content, and a new one.

Protocol section 6: a paused writer that wakes up after a takeover changes nothing. Runs in a forked child of the lane.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from holdfast.base.errors import HoldfastError
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.testing.drill.shared import Setup, enter
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.version_store import Storage, open_storage

logger = logging.getLogger(__name__)


def commit_again(setup: Setup) -> int:
    """Tries; whatever is refused is logged. The lane compares the manifests before and after."""
    enter(setup, "late")
    storage = open_storage(setup.root, Events())
    committed = storage.versions()
    if not committed:
        return 0
    _try(storage, committed[-1], committed[-1])
    _try(storage, committed[-1], Version(1, committed[-1].step + 1))
    return 0


def _try(storage: Storage, source: Version, version: Version) -> None:
    """Commits the bundles of `source` as `version`, under a layout that nobody agreed on."""
    stamp = make_stamp(version.incarnation)
    try:
        known = storage.manifest(source)
        for file in known.bundles:
            image = bytearray(file.length)
            storage.read_bundle_into(source, file, memoryview(image))
            storage.write_bundle(version, file.ref, file.seal, memoryview(image), stamp=stamp)
        part = storage.write_part(version, 0, known.bundles, stamp=stamp)
        name, length, digest = part
        manifest = replace(known, version=version, layout="of nobody", parts={name: (length, digest)}, bundles=())
        storage.commit(manifest, stamp=stamp)
        logger.warning("%s was committed again", version)
    except HoldfastError as error:
        logger.warning("refused: %s", error)
