"""`python -m holdfast.testing`: five ways to break it.

`crash` kills real processes, `faults` hurts them in every phase, `power` cuts file systems off, `soak` strikes one job for
long, `sim` strikes clusters in virtual time.
"""

from __future__ import annotations

import sys

from holdfast.testing.drill.crash_drill import main
from holdfast.testing.faults.fault_drill import main as hurt
from holdfast.testing.power.power import main as cut
from holdfast.testing.simulator.__main__ import main as simulate
from holdfast.testing.soak.soak import main as soak

KINDS = {"sim": simulate, "power": cut, "soak": soak, "faults": hurt}

if __name__ == "__main__":
    kind, rest = sys.argv[1:2], sys.argv[2:]
    sys.exit(KINDS[kind[0]](rest) if kind and kind[0] in KINDS else main())
