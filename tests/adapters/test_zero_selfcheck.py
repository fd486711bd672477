"""The first steps of a kept loop are made twice, once where nobody sees it; what is in no version is found before it is relied on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import forked
from holdfast.checkpoint.usage import replay_check, sandbox
from sample_kit import MORE

LIFE = str(Path(__file__).with_name("zero_life.py"))
pytestmark = pytest.mark.skipif(not sandbox.available(), reason="a process can be shut in on Linux and x86-64 only")

SCRIPT = """
import logging, math, os, sys, torch
logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
math.hidden, told = 0, []
try:
    for step in range(10):
        hidden = math.hidden
        loss = model(torch.randn(2, 4)).square().mean() * (1 + {uses})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        math.hidden = hidden + 1
        told.append(step)
        {body}
finally:
    print("left", step)
print("END", told, loss.item(), [p.tolist() for p in model.parameters()])
"""
SAME = "2 steps were rehearsed as a restart would make them, and were the same"


def run(tmp_path: Path, root: str, *, uses: str = "0", body: str = "pass") -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{uses}", uses).replace("{body}", body))
    environment = {
        **os.environ,
        "POCKET": "1",
        "PYTHONPATH": str(Path(LIFE).parent.parent),
        "FILE": str(tmp_path / "log"),
    }
    return forked.run(
        [sys.executable, LIFE, root, str(script)], capture_output=True, text=True, env=environment, timeout=60
    )


def test_what_a_restart_would_make_is_compared_and_nobody_notices(tmp_path: Path) -> None:
    plain = run(tmp_path, "-")
    kept = run(tmp_path, str(tmp_path / "root"))
    assert kept.returncode == 0, kept.stderr
    assert SAME in kept.stderr
    assert kept.stdout == plain.stdout
    again = run(tmp_path, str(tmp_path / "root"))
    assert SAME not in again.stderr, "the run that saved was rehearsed"


def test_state_that_no_version_has_is_found_and_the_script_goes_on_unharmed(tmp_path: Path) -> None:
    plain = run(tmp_path, "-", uses="hidden")
    kept = run(tmp_path, str(tmp_path / "root"), uses="hidden")
    assert "a rehearsal of a restart differs in '" in kept.stderr
    assert "nothing of it is saved" in kept.stderr
    assert kept.stdout == plain.stdout
    assert not (tmp_path / "root" / "pocket").exists(), "nothing was saved before it was known"


@pytest.mark.parametrize(
    "body",
    ["open(os.environ['FILE'], 'a').write(f'{step}\\n')", "os.system(f'echo {step} >> $FILE')"],
    ids=["a file", "another process"],
)
def test_a_script_that_reaches_outside_in_its_steps_does_so_once(body: str, tmp_path: Path) -> None:
    kept = run(tmp_path, str(tmp_path / "root"), body=body)
    assert kept.returncode == 0, kept.stderr
    assert (tmp_path / "log").read_text().split() == [str(step) for step in range(10)]
    assert "not rehearsed: the child ended" in kept.stderr
    assert (tmp_path / "root" / "pocket").exists(), "it is kept all the same"


@MORE
@pytest.mark.parametrize(
    "body", ["if step == 2: break", "if step == 2: raise KeyError(step)"], ids=["break", "an error"]
)
def test_a_script_that_leaves_its_loop_while_it_is_rehearsed_leaves_it_once(body: str, tmp_path: Path) -> None:
    plain = run(tmp_path, "-", body=body)
    kept = run(tmp_path, str(tmp_path / "root"), body=body)
    assert kept.stdout == plain.stdout
    assert kept.stdout.count("left 2") == 1
    assert kept.returncode == plain.returncode


def shut(work: Callable[[], object]) -> tuple[bytes, int]:
    """What a process that is shut in says of its work, and how it ended."""
    reader, writer = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if not pid:
        try:
            sandbox.shut_in(keep=writer, parent=parent)
            work()
            os.write(writer, b"done")
        finally:
            os._exit(0)
    os.close(writer)
    said = os.read(reader, 99)
    os.close(reader)
    return said, os.waitpid(pid, 0)[1]


def train() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    os.write(1, b"nobody reads this")


@pytest.mark.parametrize("by_script", [False, True], ids=["ignored", "taken up by the script"])
def test_a_child_that_is_not_there_to_be_waited_for_is_no_error(
    by_script: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(replay_check, "why_not", lambda _: "")
    monkeypatch.setattr(replay_check.os, "fork", lambda: child.pid)
    check = replay_check.SelfCheck(lambda: pytest.fail("nobody asks"), clock=False)
    before = signal.getsignal(signal.SIGCHLD)
    try:
        check.begin({})
        assert check.pending
        if by_script:
            child.kill()
            child.wait()
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        check.end()
    finally:
        signal.signal(signal.SIGCHLD, before)
        child.kill()
        child.wait()
    assert not check.pending


def test_who_is_shut_in_can_compute_and_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train()  # what torch starts at the first step is there
        assert shut(train) == (b"done", 0)
    finally:
        torch.set_num_threads(threads)
    assert shut((tmp_path / "file").read_text) == (b"done", 0)


def test_who_is_shut_in_ends_before_anything_outside_is_changed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with file.open("a") as inherited:
        for work in (
            lambda: file.write_text("y"),
            (tmp_path / "new").mkdir,
            file.unlink,
            lambda: os.rename(file, tmp_path / "other"),
            lambda: os.truncate(file, 0),
            lambda: torch.save({}, tmp_path / "new"),
            lambda: print("y", file=inherited, flush=True),
            socket.socket,
            lambda: os.kill(os.getppid(), signal.SIGTERM),
            lambda: os.system("true"),
        ):
            assert shut(work) == (b"", signal.SIGSYS)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "x"
