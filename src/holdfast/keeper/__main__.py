"""The keeper's process, the program `holdfast.keeper`. Started by keeper.rpc.spawn, never by hand: `python -m` would search the
working directory (base.program).

Forks at once, so that whoever started it has no child to reap and no process group that reaches us; only then imports
the rest. Tells through an inherited pipe that it listens, or why not.
"""

from __future__ import annotations

import os
import sys


def _detach() -> None:
    """The starter's child ends here; the grandchild, in a session of its own, goes on."""
    if os.fork():
        os._exit(0)


if __name__ == "__main__":
    _detach()
    from holdfast.keeper.service.keeper_main import main  # after the fork, so that the starter waits for nothing

    sys.exit(main(sys.argv[1:]))
