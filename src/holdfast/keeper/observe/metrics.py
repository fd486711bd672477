"""Tells what keepers say about themselves as Prometheus text.

The names are a promise; the page "Metrics" of the site is made from `METRICS` and `base.events.COUNTERS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.base.events import COUNTERS
from holdfast.core.model import Version

Facts = Mapping[str, Any]
Sample = tuple[dict[str, object], float]

PREFIX = "holdfast_"
# Of every metric, before its own labels.
COMMON_LABELS = ("node", "job")
UNITS = ("seconds", "bytes", "steps", "step", "ratio")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a keeper.

    Attributes:
        help: a sentence, shown by Prometheus.
        labels: after those that all have.
    """

    help: str
    labels: tuple[str, ...] = ()


# All gauges; every counter of the keeper is a metric besides, with `_total` behind its name.
METRICS = {
    "uptime_seconds": Metric("Time since the keeper started."),
    "resident_bytes": Metric("Memory of the keeper's process at its peak."),
    "memory_used_bytes": Metric("Snapshot memory of all keepers that share the budget."),
    "memory_allowed_bytes": Metric("The budget of snapshot memory."),
    "incarnation": Metric("How often the job has started or come back."),
    "nodes": Metric("Nodes of the job."),
    "alarms": Metric("Conditions that somebody should look at."),
    "suspect_versions": Metric("Versions whose twins sealed different bytes."),
    "version_step": Metric("Step of the newest version that reached the level.", ("level",)),
    "lag_steps": Metric("Steps between the newest captured version and the level's newest, of one incarnation.", ("level",)),
    "goodput_ratio": Metric("Part of the run's time that went into steps that count."),
    "run_seconds": Metric("Where the time of the run went; stalls are saves.", ("what",)),
    "incidents": Metric("Failures of the run that were mended."),
    "detection_seconds": Metric("Time from the last progress to the verdict, summed over incidents."),
    "recovery_seconds": Metric("Time of recoveries by part, T0 to T4, summed over incidents.", ("part",)),
    "rank_up": Metric("1 if the rank's process is connected, else 0.", ("rank",)),
    "slot_sealed_bytes": Metric("Images in a slot; replica: of another node's rank.", ("rank", "replica", "slot")),
}  # fmt: skip


def unit_of(name: str) -> str:
    """Returns the unit that a metric's name ends with, before `_total`; empty for a count."""
    last = name.removesuffix("_total").removesuffix("_in_waits").rpartition("_")[2]
    return last if last in UNITS else ""


def render(keepers: Iterable[Facts]) -> str:
    """The statuses of keepers as one exposition: each metric once, with a sample per keeper."""
    families: dict[str, list[Sample]] = {}
    for facts in keepers:
        whose = dict(zip(COMMON_LABELS, (facts["node"], facts["job"]), strict=True))
        for name, samples in _families(facts):
            families.setdefault(name, []).extend((whose | labels, value) for labels, value in samples)
    lines: list[str] = []
    for name, found in sorted(families.items()):
        text, kind = (METRICS[name].help, "gauge") if name in METRICS else (_of_counter(name), "counter")
        lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"]
        lines += [f"{PREFIX}{name}{_labels(labels)} {_number(value)}" for labels, value in found]
    return "\n".join(lines) + "\n" if lines else ""


def _of_counter(name: str) -> str:
    counter = name.removesuffix("_total")
    return COUNTERS.get(counter, f"Sum of {counter} of this keeper's life.")


def _families(facts: Facts) -> Iterator[tuple[str, list[Sample]]]:
    """(name, samples) of one keeper."""
    memory = facts["memory"]
    alone = {
        "uptime_seconds": facts["uptime_s"],
        "resident_bytes": facts["resident_bytes"],
        "memory_used_bytes": memory["used_bytes"],
        "memory_allowed_bytes": memory["allowed_bytes"],
        "incarnation": facts["incarnation"],
        "nodes": len(facts["nodes"]),
        "alarms": len(facts["alarms"]),
        "suspect_versions": len(facts["suspects"]),
    }
    for name, value in alone.items():
        yield name, [({}, value)]
    yield from _levels(facts)
    yield from _run(facts["run"])
    ranks = facts["ranks"].items()
    yield "rank_up", [({"rank": rank}, 1 if found["pid"] else 0) for rank, found in ranks]
    slots = [({"rank": rank, "replica": "no"}, slot) for rank, found in ranks for slot in found["slots"]]
    slots += [({"rank": slot["rank"], "replica": "yes"}, slot) for slot in facts["replicas"]]
    yield "slot_sealed_bytes", [(labels | {"slot": slot["slot"]}, slot["sealed_bytes"]) for labels, slot in slots]
    for name, value in sorted(facts["counters"].items()):
        yield f"{_NOT_IN_NAMES.sub('_', name)}_total", [({}, value)]


def _run(run: Facts | None) -> Iterator[tuple[str, list[Sample]]]:
    """Yield the samples of the run that this node's launcher writes down."""
    if run is None:
        return
    yield "goodput_ratio", [({}, run["goodput"])]
    yield "run_seconds", [({"what": name}, seconds) for name, seconds in run["seconds"].items()]
    yield "incidents", [({}, run["incidents"])]
    yield "detection_seconds", [({}, run["detection_s"])]
    yield "recovery_seconds", [({"part": name}, seconds) for name, seconds in run["recovery_s"].items()]


def _levels(facts: Facts) -> Iterator[tuple[str, list[Sample]]]:
    """The newest version per level, and how far it lies behind what is captured."""
    newest = {level: Version.parse(name) if name else None for level, name in facts["newest"].items()}
    yield "version_step", [({"level": level}, found.step) for level, found in newest.items() if found]
    captured = newest.pop("captured")
    lags: list[Sample] = [
        ({"level": level}, captured.step - found.step)
        for level, found in newest.items()
        if captured and found and captured.incarnation == found.incarnation
    ]
    yield "lag_steps", lags


def _labels(labels: Mapping[str, object]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
