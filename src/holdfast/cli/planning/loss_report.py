"""`plan --lost-nodes`, `plan --lost-ranks`: what is gone when several nodes die at once, or several ranks lose what they hold.

One node is what a job must survive, and what `plan` tells anyway. This answers for any other set: two nodes of a rack, the
files of two ranks that are twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.base.errors import UsageError
from holdfast.cli import console, rank_ranges
from holdfast.core.layout.cost_plan import JobPlan, Loss
from holdfast.core.layout.parity_groups import groups, keeps_replicas
from holdfast.core.model import Topology

MAX_ROWS = 20


@dataclass(frozen=True, slots=True)
class Question:
    """Names which nodes (numbers or labels), or which ranks, as the user writes them: `0,4-6`. Empty: nobody asks."""

    nodes: str = ""
    ranks: str = ""

    def __post_init__(self) -> None:
        if self.nodes and self.ranks:
            raise UsageError("lost nodes and lost ranks are two questions", remedy="ask one at a time")


@dataclass(frozen=True, slots=True)
class Answer:
    """Says what is lost with these nodes or ranks; tensors by name."""

    what: str
    members: tuple[int, ...]
    losses: tuple[Loss, ...]


def answer(costs: JobPlan, question: Question, *, replicas: bool) -> Answer | None:
    """Return what is lost, None if nobody asks.

    Args:
        costs: of the job.
        question: who is gone.
        replicas: whether the version was replicated before nodes died. Of lost ranks twins alone count.

    Raises:
        UsageError: no such node or rank.
    """
    topology = costs.topology
    if question.nodes:
        nodes = _numbers(question.nodes, len(topology.nodes), "node", topology.nodes)
        return Answer("nodes", nodes, costs.lost(nodes, replicas=replicas))
    if question.ranks:
        ranks = _numbers(question.ranks, topology.world_size, "rank", ())
        return Answer("ranks", ranks, costs.lost_with(ranks))
    return None


def document(found: Answer | None) -> dict[str, Any]:
    """The same for `--json`."""
    if found is None:
        return {}
    tensors = [{"name": loss.name, "parts": loss.num_slices, "bytes": loss.num_bytes} for loss in found.losses]
    return {"lost": {found.what: found.members, "tensors": tensors}}


def print_answer(found: Answer | None, topology: Topology) -> None:
    """The same for a person."""
    if found is None:
        return
    labels = found.what == "nodes"
    ranks = rank_ranges.ranks_text(found.members)
    holders = f"rank {ranks} holds" if len(found.members) == 1 else f"ranks {ranks} hold"
    who = rank_ranges.nodes_text(found.members, topology.nodes) if labels else f"all that {holders}"
    who = f"nodes {who}" if labels and len(found.members) > 1 else who
    verb = "are" if labels and len(found.members) > 1 else "is"
    console.say()
    if not found.losses:
        kept = "twins and replicas" if keeps_replicas(topology) else "twins and parity" if groups(topology) else "twins"
        rest = f"{kept} on other nodes" if labels else "other ranks"
        console.say(f"If {who} {verb} lost: nothing is, {rest} hold all of it.")
        return
    size = console.size_text(sum(loss.num_bytes for loss in found.losses))
    where = "in no memory any more: storage has its last version" if labels else "held by no other rank"
    console.say(f"If {who} {verb} lost: {size} of {len(found.losses)} tensors is {where}.")
    rows = [(loss.name, loss.num_slices, console.size_text(loss.num_bytes)) for loss in found.losses]
    console.print_table(("lost of", "parts", "size"), rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        console.say(f"... and {len(rows) - MAX_ROWS} more tensors; --json shows all")


def _numbers(text: str, count: int, kind: str, labels: Sequence[str]) -> tuple[int, ...]:
    """`0,4-6` or labels, ascending."""
    found: set[int] = set()
    for word in (part.strip() for part in text.split(",")):
        if word in labels:
            found.add(labels.index(word))
            continue
        first, _, last = word.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) >= count:
            known = f"{kind}s are 0 to {count - 1}" + (f", {rank_ranges.names_text(labels)}" if labels else "")
            raise UsageError(f"there is no {kind} {word!r}; {known}", remedy="write 0,4-6")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))
