"""A keeper that can be hurt and has a bug: `python -m planted.faults_inject BUG CONTROL [arguments of a keeper]`."""

from __future__ import annotations

import sys

from holdfast.testing.faults import inject
from planted.faults_keeper import BUGS

if __name__ == "__main__":
    sys.exit(inject.main(sys.argv[2:], BUGS[sys.argv[1]]))
