"""`python -m holdfast.testing.drill`: `crash` kills real processes, `sim` strikes clusters in virtual time."""

from __future__ import annotations

import sys

from holdfast.testing.drill.command import main
from holdfast.testing.simulator.__main__ import main as simulate

if __name__ == "__main__":
    sys.exit(simulate(sys.argv[2:]) if sys.argv[1:2] == ["sim"] else main())
