"""What MkDocs calls: adds pages that lie outside of `docs/` or are made from the code, and leads links between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from website import covered, figures, metrics, pages, reference, scenarios

ROOT = Path(__file__).resolve().parents[1]
COVERED = ROOT / "website" / "covered.json"
# Names in tables are not broken in their middle, where the window is wide enough for what stands beside them.
STYLE = """.md-typeset td code { overflow-wrap: anywhere; }
@media (min-width: 45em) {
  .md-typeset td:first-child code, .md-typeset td:nth-child(3) code { white-space: nowrap; }
}
@media (max-width: 45em) {
  .md-typeset table:not([class]) td, .md-typeset table:not([class]) th { min-width: 4.5em; padding: 0.6em; }
}
"""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    made = {
        "reference/api.md": reference.api(),
        "reference/settings.md": reference.settings(),
        "reference/metrics.md": metrics.metrics(ROOT / "src" / "holdfast"),
        "reference/errors.md": reference.error_codes(),
        "reference/help.md": reference.help_texts(),
        "reference/tested.md": scenarios.tested(ROOT / "tests" / "core" / "scenarios"),
        "reference/figures.md": figures.figures(ROOT / "benchmarks" / "results"),
        "reference/coverage.md": covered.covered(json.loads(COVERED.read_text()) if COVERED.exists() else {}),
    }
    outside = {place: (ROOT / path).read_text() for path, place in pages.OUTSIDE.items()}
    for place, text in (outside | made).items():
        files.append(File.generated(config, place, content=text))
    files.append(File.generated(config, "site.css", content=STYLE))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads the links of a page."""
    if page.file.src_uri.startswith("reference/"):
        return markdown
    return pages.with_links(markdown, page.file.src_uri, lambda path: (ROOT / path).exists())
