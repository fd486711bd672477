"""Holds what an agent is told by whoever starts it: what its workers run, how long and how often, and who its node is."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.checkpoint.liveness.open_checkpointers import NO_WISH
from holdfast.core.elastic.escalation import Limits
from holdfast.core.elastic.node_lease import GUARD_S
from holdfast.elastic.launch.keeper_hints import KeeperHints

# Exit handlers upload the report of a crash. torchrun waits for ever; other ranks wait meanwhile.
EXIT_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Program:
    """Says what every worker runs: a script or module with its arguments.

    Attributes:
        text: of a script that can be read only once, as `RunOrder` has it.
    """

    arguments: tuple[str, ...]
    is_module: bool
    text: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """Says how long workers may take to save when the job is told to end, what the escalation policy allows, and who this node is.

    Attributes:
        name: of the node; empty: several launchers may share it, and none is asked who it is.
        node: the same, or the name of the host: what the keeper calls the node.
        guard_s: how long a silent launcher of the same name is waited for.
        early: what tells the keeper that workers start.
        version: which version the job comes back to at first; `NO_WISH`: the newest.
        exit_grace_s: how long a worker may take to end after an error of its own.
    """

    grace_s: float
    limits: Limits
    name: str = ""
    node: str = ""
    guard_s: float = GUARD_S
    early: KeeperHints = field(default_factory=KeeperHints)
    version: str = NO_WISH
    exit_grace_s: float = EXIT_GRACE_S
