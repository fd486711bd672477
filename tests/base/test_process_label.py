"""What processes are called."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from pathlib import Path
from holdfast.base.process_label import label_process
label_process("hf rank 1234567890")
print(Path("/proc/self/stat").read_text())
"""


def test_a_name_has_no_space_for_others_split_there() -> None:
    """Slurm's proctrack/linuxproc reads the fourth word of this file as the parent, and signals only whom it can read."""
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert said.split()[1] == "(hf-rank-1234567)"
