"""A keeper of the crash drill: the production process, in a child forked from the lane, with a probe in it."""

from __future__ import annotations

import functools
from argparse import Namespace

from holdfast.keeper.service import keeper_main
from holdfast.keeper.slots.sealer import Sealer
from holdfast.testing.drill.shared import Ground, Setup, enter
from holdfast.tiers.memory import slots
from holdfast.tiers.storage.version_store import Storage

PHASES = {
    "seal": ((Sealer, "_seal"),),
    "persist": ((Storage, "write_bundle"), (Storage, "write_part")),
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
