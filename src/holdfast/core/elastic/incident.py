"""Tells what happened at one failure, as a record, and as a box that a person reads in the launcher's output. Pure.

Whoever brought the job back fills the record from a plain mapping (`from_facts`), so that it can lie in a journal as one
line of JSON.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.terminal import some_of

WIDTH = 100
# The parts of a recovery, in their order; the names under which agents report them first.
PARTS: tuple[tuple[str, str], ...] = (
    ("T0", "roll back"),
    ("T1", "reschedule"),
    ("T2", "groups"),
    ("T3", "load"),
    ("T4", "compile"),
)
_MAX_TEXT = 400
_MAX_NUMBER = 1e12


@dataclass(frozen=True, slots=True)
class Incident:
    """One failure and its end.

    Attributes:
        number: of the run, from 1.
        ranks, nodes: what failed.
        first_error: what was seen first, in one sentence.
        found_by: the evidence; `found_s`: seconds from the last progress to the verdict.
        action: what was done, and why that.
        came_back: rank -> where its state came from (slot, node, twin, replica, storage, kept).
        steps_lost: steps to be made again; None if that is not known.
        seconds: per part of the recovery.
        kept: ranks whose processes lived on.
    """

    number: int
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    first_error: str = "unknown"
    found_by: str = ""
    found_s: float = 0.0
    action: str = ""
    came_back: Mapping[str, str] = field(default_factory=dict)
    steps_lost: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    kept: tuple[int, ...] = ()

    @property
    def total_s(self) -> float:
        """Return the seconds from the verdict until training was where it had been."""
        return sum(self.seconds.values())


def from_facts(facts: Mapping[str, Any]) -> Incident:
    """The record of what an agent reports; what is missing or odd is left out, for a report must never fail."""
    seconds = facts.get("seconds")
    lost = facts.get("steps_lost")
    back = facts.get("came_back")
    nodes = facts.get("nodes")
    action = ": ".join(_text(facts[name]) for name in ("action", "why") if facts.get(name))
    return Incident(
        number=_number(facts.get("number"), int),
        ranks=_ranks(facts.get("ranks")),
        nodes=tuple(map(_text, nodes)) if isinstance(nodes, list | tuple) else (),
        first_error=_text(facts.get("first_error") or "unknown"),
        found_by=_text(facts.get("found_by") or ""),
        found_s=_number(facts.get("found_s"), float),
        action=action,
        came_back={str(rank): _text(source) for rank, source in back.items()} if isinstance(back, Mapping) else {},
        steps_lost=lost if isinstance(lost, int) else None,
        seconds={str(k): _number(v, float) for k, v in seconds.items()} if isinstance(seconds, Mapping) else {},
        kept=_ranks(facts.get("kept")),
    )


def box(incident: Incident) -> str:
    """The incident as text, WIDTH columns at most."""
    where = f" on {', '.join(incident.nodes)}" if incident.nodes else ""
    rows = [("failed", f"{_named(incident.ranks)}{where}"), ("first error", incident.first_error)]
    found = f"after {incident.found_s:.2f} s"
    rows.append(("found", f"{found}: {incident.found_by}" if incident.found_by else found))
    if incident.action:
        rows.append(("done", incident.action))
    if incident.kept:
        rows.append(("kept", f"the process{'es' * (len(incident.kept) != 1)} of {_named(incident.kept)}"))
    if incident.came_back:
        rows.append(("came back", _sources(incident.came_back)))
    if incident.steps_lost is not None:
        rows.append(("steps lost", str(incident.steps_lost)))
    rows.append(("seconds", _parts(incident)))
    lines = []
    for name, text in rows:
        head, *more = textwrap.wrap(text, WIDTH - 18) or [""]
        lines += [f"| {name:<12} {head}", *(f"| {'':<12} {line}" for line in more)]
    width = max(len(line) for line in lines) + 2
    title = f"+-- incident {incident.number} "
    edge = "+" + "-" * (width - 2) + "+"
    return "\n".join([title + "-" * (width - len(title) - 1) + "+", *(f"{line:<{width - 1}}|" for line in lines), edge])


def _parts(incident: Incident) -> str:
    known = dict(PARTS)
    order = [name for name, _ in PARTS] + sorted(set(incident.seconds) - set(known))
    parts = [f"{name} {known.get(name, '')} {incident.seconds[name]:.2f}" for name in order if name in incident.seconds]
    return f"{incident.total_s:.2f} in all" + (f": {', '.join(' '.join(p.split()) for p in parts)}" if parts else "")


def _sources(came_back: Mapping[str, str]) -> str:
    by: dict[str, list[str]] = {}
    for rank, source in came_back.items():
        by.setdefault(source, []).append(rank)
    return "; ".join(f"{_named(ranks)} from {source}" for source, ranks in sorted(by.items()))


def _named(ranks: tuple[int, ...] | list[str]) -> str:
    if not ranks:
        return "nobody known"
    return f"rank{'s' * (len(ranks) != 1)} {some_of(ranks, 8)}"


def _text(value: object) -> str:
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 4]} ..."


def _ranks(value: object) -> tuple[int, ...]:
    return tuple(rank for rank in value if isinstance(rank, int)) if isinstance(value, list | tuple) else ()


def _number(value: object, kind: type) -> Any:
    return kind(value) if isinstance(value, int | float) and abs(value) < _MAX_NUMBER else kind(0)
