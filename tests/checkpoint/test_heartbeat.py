"""What a worker's page tells that the launcher cannot see from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from holdfast.checkpoint.liveness import heartbeat_page

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


def test_a_look_while_the_worker_writes_finds_no_empty_head() -> None:
    """A worker may be stopped by the scheduler half way: who looks then must not read that it made no step."""
    fd = heartbeat_page.make_page()
    writer = heartbeat_page.Writer(fd)
    writer.at_step(6)
    if not (child := os.fork()):
        while True:
            writer.at_step(6)
    try:
        assert {heartbeat_page.read(fd).beat.step for _ in range(20_000)} == {7}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        writer.close()
        os.close(fd)
