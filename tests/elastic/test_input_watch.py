"""What a script has read from its standard input is gone: no second run ends well without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch_kit import LAUNCH
from sample_kit import sampled

# Does its work for each line of its input. Its first life is killed in the middle.
SCRIPT = """
import os, pathlib, signal, sys
here = pathlib.Path(os.environ["HERE"])
first = not (here / "lived").exists()
(here / "lived").touch()
lines = READ
if first:
    os.kill(os.getpid(), signal.SIGKILL)
(here / "done").write_text(f"{len(lines)} {sys.stdin.name} {sys.stdin.encoding} {sys.stdin.fileno()}")
"""


@pytest.mark.parametrize(
    ("read", "given", "code"),
    sampled(
        [
            ("[next(sys.stdin)]", "one\ntwo\n", 1),
            ("sys.stdin.buffer.read()", "one\n", 1),
            ("[input()]", "one\n", 1),
            ("[]", "one\n", 0),
            ("sys.stdin.read()", "", 0),
        ],
        ("[input()]", "one\n", 1),
        ("[]", "one\n", 0),
    ),
)
def test_a_script_that_has_read_its_input_is_not_run_again(tmp_path: Path, read: str, given: str, code: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("READ", read))
    command = [*LAUNCH, "--standalone", "script.py"]
    environment = {**os.environ, "HERE": str(tmp_path), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, input=given, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == code, done.stderr[-3000:]
    assert (tmp_path / "done").exists() is (code == 0)
    assert ("has read from the standard input" in done.stderr) is (code == 1)


def test_the_input_is_read_as_in_plain_python(tmp_path: Path) -> None:
    """Lines, bytes that are no text, and its name, in one process that has read some of it before."""
    text = """
import sys
TOLD = []
WATCH
facts = [sys.stdin.name, sys.stdin.mode, sys.stdin.errors, sys.stdin.readline(), sys.stdin.buffer.read()]
print(ascii([*facts, sys.stdin.read(), sys.__stdin__ is sys.stdin]), len(TOLD))
"""
    watch = "from holdfast.elastic.worker import input_watch; input_watch.watch(lambda: TOLD.append(1))"
    given = b"one\r\n" + b"x" * 20_000 + b"\xff\n"
    seen = []
    for line in ("TOLD.append(1)", watch):
        command = [sys.executable, "-c", text.replace("WATCH", line)]
        seen.append(subprocess.run(command, input=given, capture_output=True, timeout=100, check=True).stdout)
    assert seen[0] == seen[1]
