"""What a worker's page tells that the launcher cannot see from outside."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPILES = """
import torch
from holdfast.core.elastic.worker_facts import Phase
from holdfast.checkpoint.liveness import heartbeat as beats, heartbeat_page as page
fd = page.make_page()
beats.attach(fd)
plain = torch.compile(lambda x: x * 2 + 1, backend="eager")
plain(torch.ones(3))
reading = page.read(fd)
print(reading.spent_s[Phase.COMPILE] > 0, reading.beat.phase.name)
"""


@pytest.mark.slow
def test_compiling_is_a_phase_of_its_own_and_over_when_it_is_done() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", COMPILES], capture_output=True, text=True, check=True, timeout=120, env=os.environ
    )
    assert answer.stdout.split() == ["True", "START"]
