"""Writes the page of measured figures from `benchmarks/results`: each beside its goal, as a bar where both are numbers."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from website.pages import joined, page, table

WIDTH = 160  # pixels of a bar; its middle is the goal


def figures(results: Path) -> str:
    """Returns the page.

    Args:
        results: the folder with a file of JSON lines for each benchmark.
    """
    parts = {}
    for path in sorted(results.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        found = [figure for row in rows for figure in row.get("figures", [row]) if "metric" in figure]
        if found:
            machine = next((row["machine"] for row in rows if "machine" in row), {})
            told = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "load")
            head = ("figure", "value", "goal", "against the goal")
            parts[path.stem] = f"{told}\n\n" + table(head, [_row(row) for row in found])
    text = "Figures of the last full run of each benchmark. [What each means](../project/benchmarks.md)."
    legend = "A bar ends at the value; the line in its middle is the goal. Green meets it, red misses it."
    return page("Figures", text, legend, joined(parts))


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    goal = str(row.get("goal") or "")
    name, _, more = row["metric"].partition(" ")  # the name stays on one line, and what is behind it need not
    return f"`{name}` {more}".rstrip(), f"{row['value']} {row.get('unit', '')}", goal, bar(row["value"], goal)


def bar(value: Any, goal: str) -> str:
    """Returns a bar as SVG; empty where value and goal are not both numbers above zero."""
    said = re.fullmatch(r"(<=|>=|<|>)\s*([\d.]+)", goal)
    if said is None or not isinstance(value, int | float) or not float(said[2]):
        return ""
    met = value <= float(said[2]) if said[1][0] == "<" else value >= float(said[2])
    length = min(WIDTH, max(1.0, WIDTH / 2 * value / float(said[2])))
    color = "#2e7d32" if met else "#c62828"
    label = html.escape(f"{value} of {goal}, {'met' if met else 'missed'}")
    return (
        f'<svg role="img" aria-label="{label}" width="{WIDTH}" height="12" viewBox="0 0 {WIDTH} 12">'
        f'<rect width="{length:.0f}" height="12" fill="{color}"/>'
        f'<rect x="{WIDTH // 2}" width="2" height="12" fill="currentColor"/></svg>'
    )
