"""Writes descriptions for `holdfast plan --pipeline`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def described(directory: Path, schedule: str, ranks: int, microbatches: int, **keys: Any) -> str:
    """The name of a file that describes a pipeline; `start` and `end` for `from` and `to`."""
    keys = {{"start": "from", "end": "to"}.get(key, key): value for key, value in keys.items()}
    path = directory / "pipeline.json"
    path.write_text(json.dumps({"schedule": schedule, "ranks": ranks, "microbatches": microbatches, **keys}))
    return str(path)
