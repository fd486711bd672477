"""A script that forgets `close()`: one line at its end names what memory alone holds, and nothing else is said."""

from __future__ import annotations

import gc
import shutil
import sys
import weakref
from pathlib import Path
from typing import NoReturn

import pytest

import forked
import holdfast
from holdfast.checkpoint.checkpointer.closing import Closing
from holdfast.checkpoint.checkpointer.unclosed_notice import UnclosedNotice
from kit.checkpointers import Make, Trainee, kill_keeper
from sample_kit import sampled

SCRIPT = """
import os, sys, torch, holdfast
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = holdfast.Config(every="1", durable_every="0", runtime_dir=sys.argv[2], linger_s=1.0)
checkpointer = holdfast.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, config=config)
for step in range(checkpointer.restore(), 2):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    handle = checkpointer.step(step)
handle.wait()
if sys.argv[3] == "durable":
    checkpointer.save(1, "durable").wait()
if sys.argv[3] in ("close", "abandon"):
    getattr(checkpointer, sys.argv[3])()
if sys.argv[3] == "child":
    if os.fork() == 0:
        sys.exit(0)  # runs what is registered for the end of a process
    os.wait()
    checkpointer.close()
"""
SAID = "close() was not called, and i000001-s0000000001 is not durable"


def ended(tmp_path: Path, runtime_dir: Path, how: str) -> str:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "job"), str(runtime_dir), how]
    done = forked.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stderr


def test_a_script_that_forgets_close_is_told_what_is_not_durable(tmp_path: Path, runtime_dir: Path) -> None:
    said = ended(tmp_path, runtime_dir, "forget")
    assert said.count(SAID) == 1
    assert "checkpointer.close()" in said


@pytest.mark.parametrize("how", sampled(["durable", "close", "abandon", "child"], "close", "child"))
def test_nothing_is_said_where_nothing_was_forgotten(how: str, tmp_path: Path, runtime_dir: Path) -> None:
    assert "close() was not called" not in ended(tmp_path, runtime_dir, how)


def test_a_close_that_is_broken_off_tells_what_is_not_durable(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    checkpointer = make(Trainee(), every=1)
    checkpointer.restore()
    checkpointer.save(0).wait("captured", 60)
    monkeypatch.setattr(Closing, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.close()
    said = "close() was broken off by KeyboardInterrupt, and i000001-s0000000000 is not durable"
    assert caplog.text.count(said) == 1
    checkpointer.close()
    assert caplog.text.count("is not durable") == 1


def test_the_notice_keeps_nothing_alive_and_speaks_once(
    make: Make, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = make(Trainee(), every=1)
    checkpointer.restore()
    checkpointer.save(0).wait("captured", 60)
    run = checkpointer._run
    assert run is not None

    class Owner:
        """What is to go."""

    owner = Owner()
    gone = weakref.ref(owner)
    notice = UnclosedNotice(owner, lambda: None, linger_s=1.0)
    notice.saved(run)
    del owner
    gc.collect()
    assert gone() is None
    assert caplog.text.count("i000001-s0000000000 is not durable") == 1
    notice._finalizer()
    notice.end()
    assert caplog.text.count("i000001-s0000000000 is not durable") == 1
    kill_keeper(checkpointer)
    shutil.rmtree(runtime_dir)  # of the keeper that was killed and has no successor


def test_a_checkpointer_that_was_never_used_goes_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainee = Trainee()
    gone = weakref.ref(holdfast.Checkpointer(tmp_path / "job", model=trainee.model, optimizer=trainee.optimizers[0]))
    gc.collect()
    assert gone() is None
    assert "close() was not called" not in caplog.text
