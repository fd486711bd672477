"""`prove=True`: the first steps are made again as a restart would make them; what differs is named before anything rests on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from holdfast.checkpoint.usage import sandbox
from sample_kit import MORE

pytestmark = pytest.mark.skipif(not sandbox.available(), reason="a process can be shut in on Linux and x86-64 only")

SCRIPT = """
import logging, os, sys, torch
import holdfast
logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
os.environ["HIDDEN"] = "0"
def batch():
    return torch.randn(3, 4)
x, scale, seen = batch(), 1.0, 0
ckpt = holdfast.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, prove={prove}{given})
start = ckpt.restore()
{behind}
for step in range(start, 8):
    {before}
    loss = model(x).square().mean() * scale
    {fetch}
    loss.backward()
    {makes}
    print("step", step, loss.item())
    {told}
    {after}
ckpt.close()
print("END", [p.tolist() for p in model.parameters()])
"""
SAME = "2 steps were made again as after a restart, and were the same"


def run(
    tmp_path: Path,
    *,
    prove: bool = True,
    given: str = "",
    behind: str = "",
    before: str = "x = batch()",
    fetch: str = "pass",
    told: str = "ckpt.step(step)",
    after: str = "pass",
    makes: str = "optimizer.step(); optimizer.zero_grad()",
    root: str = "root",
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    places = {
        "prove": str(prove),
        "given": given,
        "behind": behind,
        "before": before,
        "fetch": fetch,
        "told": told,
        "after": after,
        "makes": makes,
    }
    text = SCRIPT
    for name, value in places.items():
        text = text.replace(f"{{{name}}}", value)
    script.write_text(text)
    (tmp_path / "holdfast.toml").write_text("linger_s = 1.0\n")
    environment = {**os.environ, "FILE": str(tmp_path / "log"), "HOLDFAST_CONFIG": str(tmp_path / "holdfast.toml")}
    command = [sys.executable, str(script), str(tmp_path / root)]
    return forked.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.usefixtures("runtime_dir")
def test_lines_that_are_right_are_proven_and_nobody_notices(tmp_path: Path) -> None:
    plain = run(tmp_path, prove=False, root="plain")
    proven = run(tmp_path)
    assert proven.returncode == 0, proven.stderr
    assert SAME in proven.stderr
    assert proven.stdout == plain.stdout
    carry = {"fetch": "x = batch()", "before": "pass", "told": "ckpt.step(step, x=x)"}
    carried = run(tmp_path, behind='x = ckpt.carry("x", x)', root="carried", **carry)
    assert SAME in carried.stderr
    assert carried.returncode == 0, carried.stderr


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize(
    "lines",
    [
        {"makes": "optimizer.step(); optimizer.zero_grad(set_to_none=False)"},
        pytest.param(
            {"makes": "pass", "before": "x = batch(); step and (optimizer.step(), optimizer.zero_grad())"}, marks=MORE
        ),
        pytest.param({"makes": "optimizer.step()", "before": "x = batch(); optimizer.zero_grad()"}, marks=MORE),
        {
            "given": ", scaler=(scaler := torch.amp.GradScaler('cpu')), last=(last := torch.nn.Linear(1, 1)), "
            "other=(other := torch.optim.SGD(last.parameters(), lr=0.1))",
            "makes": "[p.grad.fill_(torch.inf) for p in model.parameters() if 1 <= step <= 2]; "
            "scaler.scale(last(torch.ones(1))).backward(); scaler.step(other); scaler.step(optimizer); scaler.update()",
            "after": "optimizer.zero_grad(); other.zero_grad()",
        },
    ],
    ids=["in place", "a step later", "before", "left out by a scaler"],
)
def test_gradients_that_live_or_are_cleared_in_place_are_proven(lines: dict[str, str], tmp_path: Path) -> None:
    proven = run(tmp_path, **lines)
    assert proven.returncode == 0, proven.stderr
    assert SAME in proven.stderr


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize(
    ("lines", "named"),
    [
        pytest.param({"before": "pass", "fetch": "x = batch()"}, r"x \(line \d+\) lives on and is in no version", marks=MORE),
        ({"after": "scale = scale * 0.9"}, r"scale \(line \d+\) lives on and is in no version"),
        ({"after": "seen = seen + 1"}, r"differs in 'seen \(line \d+\)'"),
        ({"before": "x = batch() * int(os.environ['HIDDEN'])", "after": "os.environ['HIDDEN'] = str(step)"}, "differs in 'model"),
    ],
    ids=["a batch", "a factor", "a number that nothing depends on", "state out of reach"],
)  # fmt: skip
def test_what_a_restart_would_make_otherwise_is_named(lines: dict[str, str], named: str, tmp_path: Path) -> None:
    done = run(tmp_path, **lines)
    assert done.returncode == 1
    assert "END" not in done.stdout
    (said,) = re.findall(r"UsageError: these lines are not right: made again as after a restart.*", done.stderr)
    assert re.search(named, said)


@pytest.mark.usefixtures("runtime_dir")
def test_what_cannot_be_proven_goes_on_and_it_is_said(tmp_path: Path) -> None:
    done = run(tmp_path, before="x = batch(); open(os.environ['FILE'], 'a').write(f'{step}\\n')")
    assert done.returncode == 0, done.stderr
    assert "END" in done.stdout
    assert "the first steps are not proven: the child ended, or took too long" in done.stderr
    assert (tmp_path / "log").read_text().split() == [str(step) for step in range(8)], "every step was made once"


@MORE
@pytest.mark.usefixtures("runtime_dir")
def test_a_loop_that_ends_early_ends_once(tmp_path: Path) -> None:
    done = run(tmp_path, after="if step == 2: break")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("END") == 1
    again = run(tmp_path)
    assert again.returncode == 0, again.stderr
    assert SAME in again.stderr, "a start from a version is proven as well"
    assert [int(step) for step in re.findall(r"step (\d+)", again.stdout)] == [3, 4, 5, 6, 7]
