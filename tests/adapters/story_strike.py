"""How a story is struck, once, at a named moment, and which moments it comes to. Not a test itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

ALL = -1


class Strike:
    """Kills a process, or sends it SIGTERM, at `MOMENT:STEP`. A life that is not struck notes each moment in a file."""

    def __init__(self) -> None:
        self._at, self._of, self._signal = "", 0, signal.SIGKILL
        self._marker = self._moments = Path()
        self._noted: set[str] = set()

    def aim(self, facts: Path, rank: int, *, at: str, of: int, term: bool) -> None:
        """Sets what will happen.

        Args:
            facts: the file of the story; the marker and the moments lie beside it.
            rank: of this process.
            at: the moment, empty for none.
            of: the rank that is struck, or -1 for all.
            term: with SIGTERM instead of SIGKILL.
        """
        self._at, self._of, self._signal = at, of, signal.SIGTERM if term else signal.SIGKILL
        self._marker, self._moments = facts.with_suffix(f".killed{rank}"), facts.with_suffix(f".moments{rank}")

    def reached(self, moment: str, rank: int, meet: Callable[[], object]) -> None:
        """Strikes this process if it is its moment; the marker outlives it.

        Args:
            moment: `MOMENT:STEP`.
            rank: of this process.
            meet: waits for all ranks, before all are struck.
        """
        if not self._at and moment not in self._noted:
            self._noted.add(moment)
            with self._moments.open("a", encoding="utf-8") as file:
                file.write(f"{moment}\n")
        if self._at != moment or self._marker.exists():
            return
        if self._of == ALL:
            meet()
        elif rank != self._of:
            return
        self._marker.touch()
        os.kill(os.getpid(), self._signal)
