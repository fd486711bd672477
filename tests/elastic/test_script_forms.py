"""A script has the form that Python takes: text, archive, directory, compiled, from a pipe; in each its arguments are its own."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import forked
from holdfast.elastic.worker import main_module
from holdfast.elastic.worker.worker_main import _code_of
from sample_kit import sampled

# One run of a script in a process of its own, as a worker does it.
RUN = """
import os, sys
from holdfast.elastic.worker.agent_channel import RunOrder
from holdfast.elastic.worker.script_sandbox import ScriptSandbox
from holdfast.elastic.worker.worker_main import run_script
order = RunOrder(1, dict(os.environ), tuple(sys.argv[1:]))
ScriptSandbox().enter(order)
run_script(order)
"""
SAYS = """
import sys
import beside
print(__name__, sys.argv, beside.X, sys.path[0])
assert sys.modules["__main__"].__dict__ is globals()
"""


def archive(home: Path) -> str:
    """Neither its name nor its first bytes say that it is one: a line for the shell comes first, as zipapp writes it."""
    with (home / "app").open("wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w") as packed:
            packed.writestr("__main__.py", SAYS)
            packed.writestr("beside.py", "X = 'packed'")
    return "app"


def directory(home: Path) -> str:
    (home / "app").mkdir()
    (home / "app/__main__.py").write_text(SAYS)
    (home / "app/beside.py").write_text("X = 'below'")
    return "app"


def compiled(name: str) -> Callable[[Path], str]:
    def make(home: Path) -> str:
        (home / "text").write_text(SAYS)
        (home / "beside.py").write_text("X = 'beside'")
        py_compile.compile(str(home / "text"), str(home / name), doraise=True)
        return name

    return make


def text(home: Path) -> str:
    (home / "train").write_text(SAYS)
    (home / "beside.py").write_text("X = 'beside'")
    return "train"


@pytest.mark.parametrize(
    "make", [archive, directory, compiled("app.pyc"), compiled("app"), text],
    ids=["archive", "directory", "compiled", "compiled, by its bytes", "text"],
)  # fmt: skip
def test_a_script_of_any_form_runs_as_in_python(tmp_path: Path, make: Callable[[Path], str]) -> None:
    script = make(tmp_path)
    expected = subprocess.run([sys.executable, script, "-x"], cwd=tmp_path, capture_output=True, text=True, check=True)
    done = forked.run(
        [sys.executable, "-c", RUN, script, "-x"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == expected.stdout, done.stderr[-2000:]


def test_a_script_that_is_not_there_is_told_as_by_python(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, "nothing.py"]
    expected = subprocess.run([sys.executable, "nothing.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (expected.returncode, expected.stderr)
    assert done.returncode == 2


def test_pythonsafepath_keeps_the_directory_of_the_script_out(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[0].rpartition('/')[0] in sys.path)")
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", RUN, str(tmp_path / "script.py")]
    done = forked.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr[-2000:]


# Its first life is killed behind its first line: a second one that finds an empty script would end well.
ONCE = """
import os, pathlib, signal
here, rank = pathlib.Path(os.environ["HERE"]), os.environ["RANK"]
if not (here / f"lived{rank}").exists():
    (here / f"lived{rank}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
(here / f"done{rank}").write_text(__file__)
"""


@pytest.mark.parametrize(
    ("name", "seen"), sampled([("-", "<stdin>"), ("/dev/stdin", "/dev/stdin"), ("pipe", "pipe")], ("-", "<stdin>"))
)
def test_a_script_from_a_pipe_is_whole_for_every_rank_and_every_life(tmp_path: Path, name: str, seen: str) -> None:
    (tmp_path / "text").write_text(ONCE)
    os.mkfifo(tmp_path / "pipe")
    flags = "--standalone --nproc-per-node=2 --max-restarts=4"
    # The script comes through a pipe, as from another program.
    line = f'cat text | "$PYTHON" -W ignore -m holdfast.elastic.launch.run_command {flags} {name}'
    environment = {
        **os.environ, "PYTHON": sys.executable, "HERE": str(tmp_path), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")
    }  # fmt: skip
    if name == "pipe":
        line = "cat text > pipe & " + line.partition("| ")[2]
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert all((tmp_path / f"done{rank}").read_text().endswith(seen) for rank in range(2))


def test_only_what_cannot_be_read_again_is_read_by_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("pass")
    for path in (tmp_path / "script.py", tmp_path, tmp_path / "nothing", Path("/dev/null")):
        assert main_module.read_once(str(path)) is None


@pytest.mark.parametrize(
    ("code", "expected"), [(0, 0), (None, 0), (256, 0), (257, 1), (-1, 255), (True, 1), ("text", 1), (1 << 70, 255)]
)
def test_an_exit_code_is_the_one_that_python_ends_with(code: object, expected: int) -> None:
    assert _code_of(SystemExit(code)) == expected
