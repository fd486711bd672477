"""Makes from the results: the tables of docs/versions.md, and the ranges that `holdfast doctor` knows. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from website.pages import table

BEGIN, END = "<!-- made by `make matrix` -->", "<!-- until here -->"
# So many failed tests of a row are named.
MOST_NAMES = 12
HEAD = ("row", "Python", "versions", "torch is built for", "tests", "passed", "skipped", "failed", "date")


def newest(results: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the last result of each row and selection of tests, in the order of their names."""
    last = {(result["row"], result["tests"]): result for result in results}
    return [last[key] for key in sorted(last, key=lambda key: (_kind(key[0]), *_numbers(key[0]), *key))]


def with_tables(page: str, results: Iterable[Mapping[str, Any]]) -> str:
    """Returns the page with the tables of these results between the two marks."""
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n\n{_tables(newest(results))}\n\n{END}{after}"


def ranges(results: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns for Python and each distribution the oldest and the newest version in a row where nothing failed."""
    last = newest(results)
    bad = {result["row"] for result in last if result["ended"] or result["failed"]}
    seen: dict[str, set[str]] = {}
    for result in last:
        if result["row"] not in bad:
            for name, version in {"python": result["python"], **result["versions"]}.items():
                seen.setdefault(name, set()).add(version)
    return {name: [min(found, key=_numbers), max(found, key=_numbers)] for name, found in sorted(seen.items())}


def _tables(results: list[Mapping[str, Any]]) -> str:
    parts = [table(HEAD, [_cells(result) for result in results])]
    for result in results:
        if result.get("failed"):
            names, more = result["failed"][:MOST_NAMES], len(result["failed"]) - MOST_NAMES
            lines = [f"- `{name}`" for name in names] + [f"- and {more} more, named in `versions.jsonl`"] * (more > 0)
            tests = "the whole suite" if result["tests"] == "all" else f"`{result['tests']}`"
            parts.append(f"Failed on {result['row']}, {tests}:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _cells(result: Mapping[str, Any]) -> tuple[str, ...]:
    versions = ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items())
    built = f"CUDA {result['cuda']}" if result.get("cuda") else "CPU" if versions else ""
    if "failed" in result:
        numbers = [str(result["passed"]), str(result["skipped"]), str(len(result["failed"]))]
    else:
        numbers = ["", "", result["ended"]]
    tests = "the whole suite" if result["tests"] == "all" else f"`{result['tests']}`"
    return result["row"], result.get("python", ""), versions, built, tests, *numbers, result["date"]


def _kind(row: str) -> int:
    kinds = (r"torch-\d", r"python-\d")  # and then frameworks, among them torch_checkpointing
    return next((number for number, kind in enumerate(kinds) if re.match(kind, row)), len(kinds))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
