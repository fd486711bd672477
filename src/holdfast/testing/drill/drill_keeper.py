"""A keeper of the crash drill: the production process, in a child forked from the lane, with a probe in it."""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from dataclasses import replace

from holdfast.base.errors import HoldfastError
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.keeper.service import keeper_main
from holdfast.keeper.slots.sealer import Sealer
from holdfast.testing.drill.shared import Ground, Setup, enter
from holdfast.tiers.memory import slots
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.stored_bundles import StoredBundles
from holdfast.tiers.storage.version_store import Storage, open_storage

logger = logging.getLogger(__name__)

PHASES = {
    "seal": ((Sealer, "_seal"),),
    "persist": ((StoredBundles, "write"), (Storage, "write_part")),
    "commit": ((Storage, "commit"),),
    "retention": ((Storage, "retire"),),
}
POINTS = ((slots, "invalidate"), (slots, "write_header"))


def keeper(setup: Setup, ground: Ground, ready: int) -> int:
    """A keeper's whole life; tells through `ready` that it listens. Returns the exit code."""
    name = f"k{setup.rank}"
    enter(setup, name)
    ground.probe(name, setup).watch(PHASES, POINTS)
    # The drill has its own log, which outlives the keeper's directory.
    keeper_main._log_to = lambda *_: None
    return keeper_main.run(options_of(setup, ready))


def options_of(setup: Setup, ready: int) -> Namespace:
    """Return what the command line would say; parsing one takes longer than forking."""
    config = setup.config
    own = {
        "root": setup.root, "run_id": config.run_id, "node": config.node, "runtime_dir": config.runtime_dir,
        "memory_budget": config.memory_budget, "linger_s": config.linger_s, "ready_fd": ready,
    }  # fmt: skip
    return Namespace(**{**_defaults(), **own})


@functools.cache
def _defaults() -> dict[str, object]:
    return vars(keeper_main.parse(["--root", "", "--run-id", "", "--node", "", "--runtime-dir", ""]))


def commit_again(setup: Setup) -> int:
    """Be a keeper of a dead incarnation that wakes up: it commits the newest version again, and a new one.

    Protocol section 6: that changes nothing. Whatever is refused is logged. The lane compares the manifests before and after.
    """
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
            storage.bundles.read_into(source, file, memoryview(image))
            storage.bundles.write(version, file.ref, file.seal, memoryview(image), stamp=stamp)
        part = storage.write_part(version, 0, known.bundles, stamp=stamp)
        name, length, digest = part
        manifest = replace(known, version=version, layout="of nobody", parts={name: (length, digest)}, bundles=())
        storage.commit(manifest, stamp=stamp)
        logger.warning("%s was committed again", version)
    except HoldfastError as error:
        logger.warning("refused: %s", error)
