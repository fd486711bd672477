"""Made-up files of the kernel about the control groups of a process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def made_up(base: Path, cgroup: str, files: Mapping[str, str]) -> dict[str, Path]:
    """Returns where a function that reads control groups finds lines of /proc/self/cgroup, and files below the mount of the groups."""
    named = {base / "cg" / name: text for name, text in files.items()}
    for path, text in {base / "proc" / "self" / "cgroup": cgroup, **named}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"proc": base / "proc", "cgroup": base / "cg"}
