"""Every call of a checkpointer ends, whatever a device does: hangs or fails, at every moment of a step.

The moments and the calls are those of device_waits.py, which runs in a process of its own. A call that waits without a
limit ends that process after a minute, with its stacks.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

import forked

HERE = Path(__file__).resolve().parent
KINDS = ("registered", "pinned", "none", "verified", "in-the-call", "offloaded", "storage-alone")
NUM_MOMENTS, NUM_CALLS = 7, 9
LIMIT_S = 1.0  # of close(), in those jobs
# The wait for the device and the wait for the level have the limit of close() each; what is left ends within seconds.
MOST_S = 2 * LIMIT_S + 20.0  # on a machine that is loaded
MATRIX = [(kind, how) for kind in KINDS for how in ("hang", "fault")]

pytestmark = [pytest.mark.device, pytest.mark.timeout(900)]


def tried(path: Path, kind: str, how: str, *words: str) -> list[dict[str, object]]:
    """How the calls went, at every moment, or those that `words` name."""
    log = path / "log"
    environment = os.environ | {"CASE_DIRECTORY": str(path / "checkpoints")}
    if kind in ("pinned", "none"):
        environment["SIMULATED_DEVICE_HOST_MEMORY"] = kind
    command = [sys.executable, str(HERE / "device_waits.py"), kind, how, *words]
    with log.open("w") as file:
        code = forked.Popen(command, env=environment, stdout=file, stderr=file).wait(890)
    said = log.read_text()
    assert code == 0, said[-6000:]
    assert not re.search(r"is not saved: *(\n|after)", said), "it is not said why"
    rows = [json.loads(line) for line in said.splitlines() if line.startswith('{"moment"')]
    expected = sum(1 if "@" in word else NUM_MOMENTS for word in words) if words else NUM_MOMENTS * NUM_CALLS
    assert len(rows) == expected, said[-6000:]
    return rows


def check(rows: list[dict[str, object]]) -> None:
    for row in rows:
        assert row["seconds"] < MOST_S, row
        assert not row["raised"] or str(row["raised"]).startswith("LevelNotReached"), row


def test_close_and_an_exception_leave_a_device_that_hangs(tmp_path: Path, runtime_dir: Path) -> None:
    moments = ("before_a_copy", "with_a_copy_behind_it", "in_an_update")
    check(tried(tmp_path, "pinned", "hang", *(f"close@{moment}" for moment in moments), "leave@in_an_update"))


def test_a_save_on_a_device_that_failed_is_given_up_and_raises_nothing(tmp_path: Path, runtime_dir: Path) -> None:
    rows = tried(tmp_path, "registered", "fault", "save@at_rest", "step@before_a_copy")
    assert [row["raised"] for row in rows] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), MATRIX)
def test_every_call_ends_at_every_moment(kind: str, how: str, tmp_path: Path, runtime_dir: Path) -> None:
    """A device that failed raises at once, so a few calls tell; each costs a process."""
    check(tried(tmp_path, kind, how, *(("save", "close", "abandon", "leave") if how == "fault" else ())))
