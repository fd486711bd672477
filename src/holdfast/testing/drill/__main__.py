"""`python -m holdfast.testing.drill`: `crash` kills real processes, `power` cuts file systems off, `sim` strikes clusters in virtual time."""

from __future__ import annotations

import sys

from holdfast.testing.drill.command import main
from holdfast.testing.drill.power import main as cut
from holdfast.testing.simulator.__main__ import main as simulate

if __name__ == "__main__":
    kind, rest = sys.argv[1:2], sys.argv[2:]
    sys.exit(simulate(rest) if kind == ["sim"] else cut(rest) if kind == ["power"] else main())
