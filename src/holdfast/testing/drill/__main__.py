"""`python -m holdfast.testing.drill`."""

from __future__ import annotations

import sys

from holdfast.testing.drill.command import main

if __name__ == "__main__":
    sys.exit(main())
