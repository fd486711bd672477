"""Writes the page of all metrics from their declarations and from where the code counts. One without help fails the build."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from holdfast.base.events import COUNTERS
from holdfast.keeper.observe.metrics import COMMON_LABELS, METRICS, PREFIX, unit_of
from website.pages import joined, page, table

MADE = "This page is made from the code of this version."
HEAD = ("name", "help", "type, unit, labels")
# Rooms and what runs their code; both read and write storage.
KEEPER, TRAINER = ("keeper", "tiers"), ("checkpoint", "tiers")


def metrics(source: Path) -> str:
    """Returns the page.

    Args:
        source: the folder of the package.

    Raises:
        ValueError: a metric has no help, a counter is not declared, or none counts what is declared.
    """
    found = counted(source)
    complain(found)
    gauges = [_row(PREFIX + name, "gauge", metric.labels, metric.help) for name, metric in METRICS.items()]
    served = [
        _row(f"{PREFIX}{name}_total", "counter", (), text)
        for name, text in COUNTERS.items()
        if found[name] & set(KEEPER)
    ]
    own = [_row(name, "counter", None, text) for name, text in COUNTERS.items() if found[name] & set(TRAINER)]
    common = " and ".join(f"`{label}`" for label in COMMON_LABELS)
    parts = {
        "Metrics of a keeper": (
            f"Prometheus reads them [from the keeper's port](../storage.md#metrics). All have the labels {common} too. "
            "Those of the run come from the journal that the launcher writes (`holdfast run`), so it needs no port of its own. "
            "A counter is there once it has counted something.\n\n" + table(HEAD, gauges + served)
        ),
        "Counters of a trainer": (
            "Each rank sums these for itself; `Checkpointer.events.counters()` returns them. No port serves them.\n\n"
            + table(HEAD, own)
        ),
    }
    return page("Metrics", MADE, joined(parts))


def counted(source: Path) -> dict[str, set[str]]:
    """Returns the rooms of the package that count each counter: each call `events.count("name", ...)`."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("events.count"):
                name = node.args[0]
                if not isinstance(name, ast.Constant):
                    raise ValueError(f"{path}:{node.lineno}: the name of a counter must be written out")
                found[str(name.value)].add(path.relative_to(source).parts[0])
    return found


def complain(found: dict[str, set[str]]) -> None:
    """Refuses what the page could not tell truly.

    Raises:
        ValueError: names each metric and what it lacks.
    """
    texts = {name: metric.help for name, metric in METRICS.items()} | COUNTERS
    wrong = [f"{name} has no help text" for name, text in texts.items() if not text.strip()]
    wrong += [f"{name} is counted and not declared in base/events.py" for name in found if name not in COUNTERS]
    wrong += [f"{name} is declared in base/events.py and nothing counts it" for name in COUNTERS if name not in found]
    if wrong:
        raise ValueError("; ".join(sorted(wrong)))


def _row(name: str, kind: str, labels: tuple[str, ...] | None, text: str) -> tuple[str, ...]:
    return f"`{name}`", text, ", ".join(filter(None, [kind, unit_of(name), *(f"`{label}`" for label in labels or ())]))
