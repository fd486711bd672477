"""Tells which pages of the repository stand on the site, and where a link between two of them leads there. Pure.

Pages stay where readers of the repository find them. Those outside of `docs/` get a place under `project/`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping

# Path in the repository -> path on the site, for what does not lie in docs/.
OUTSIDE = {
    "README.md": "project/readme.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security-policy.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "examples/README.md": "project/examples.md",
}
# [text](target), also [`text`](target); not an image.
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~)")


def origin_of(place: str) -> str:
    """Returns the path in the repository of a page of the site."""
    return next((path for path, there in OUTSIDE.items() if there == place), f"docs/{place}")


def place_of(path: str) -> str | None:
    """Returns the place on the site of a path of the repository; None if it is no page."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") and path.endswith(".md") else None


def with_links(markdown: str, place: str, exists: Callable[[str], bool]) -> str:
    """Returns a page whose links lead to pages of the site; of a link to another file of the repository the text stays.

    Args:
        markdown: the page, as it stands in the repository.
        place: where it stands on the site.
        exists: whether the repository has a path. A link to what it has not stays as it is, and fails a strict build.
    """
    origin = posixpath.dirname(origin_of(place))

    def lead(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path, _, anchor = target.partition("#")
        if not path or ":" in path:
            return found[0]
        path = posixpath.normpath(posixpath.join(origin, path))
        there = place_of(path)
        if there is None:
            return text if exists(path) else found[0]
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{'#' + anchor if anchor else ''})"

    lines, fenced = [], False
    for line in markdown.split("\n"):
        fenced ^= bool(_FENCE.match(line.lstrip()))
        lines.append(line if fenced else _LINK.sub(lead, line))
    return "\n".join(lines)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Returns a table in Markdown; bars and line ends in cells do not break it."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |" for row in lines
    )


def page(title: str, *parts: str) -> str:
    """Returns a page of a title and parts."""
    return "\n\n".join([f"# {title}", *parts]) + "\n"


def joined(pages: Mapping[str, str]) -> str:
    """Returns sections, one for each title."""
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in pages.items())
