"""`python -m holdfast.adapters.aiturbo.front` prints the folder for PYTHONPATH."""

from __future__ import annotations

import sys
from pathlib import Path

sys.stdout.write(f"{Path(__file__).parent}\n")
