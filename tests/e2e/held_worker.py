"""One rank of `layout_worker` that stops in the middle of reading from storage and says so. Not a test itself.

python held_worker.py SPEC: as for layout_worker. It goes on when a file `go` is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import layout_worker

from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format.image import CHUNK_BYTES

GO_S = 60.0


def hold(out: Path, rank: str) -> None:
    """From now on this process stops before it reads the second or third chunk of a file: no header and no values lie there."""
    real = LocalBackend.read_into

    def read_into(self: LocalBackend, name: str, view: memoryview, *, offset: int = 0) -> int:
        if CHUNK_BYTES <= offset < 3 * CHUNK_BYTES:
            (out / f"held-{rank}").touch()
            deadline = time.monotonic() + GO_S
            while not (out / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return real(self, name, view, offset=offset)

    LocalBackend.read_into = read_into  # type: ignore[method-assign]


if __name__ == "__main__":
    hold(Path(json.loads(sys.argv[1])["out"]), os.environ["RANK"])
    layout_worker.main()
