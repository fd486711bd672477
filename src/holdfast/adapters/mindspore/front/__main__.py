"""`python -m holdfast.adapters.mindspore.front` prints the folder that `holdfast.adapters.aiturbo.front` prints."""

from __future__ import annotations

import sys
from pathlib import Path

sys.stderr.write("holdfast.adapters.mindspore.front is called holdfast.adapters.aiturbo.front now\n")
sys.stdout.write(f"{Path(__file__).parents[2] / 'aiturbo' / 'front'}\n")
