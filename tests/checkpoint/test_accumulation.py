"""Steps that are reported within an accumulation of gradients are told; others are not."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = """
import torch, holdfast
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = holdfast.Checkpointer(ROOT, model=model, optimizer=optimizer, config=CONFIG)
for step in range(checkpointer.restore(), 24):
    CLEAR_BEFORE
    model(torch.randn(4, 8)).square().mean().backward()
    if STEPS:
        optimizer.step()
        CLEAR_BEHIND
    REPORT
checkpointer.abandon()
"""
CLEAR = "optimizer.zero_grad()"


@pytest.mark.parametrize(
    ("steps", "clear_before", "clear_behind", "report", "is_told"),
    [
        ("(step + 1) % 4 == 0", "", CLEAR, "checkpointer.step(step)", True),
        ("step % 2 == 0", "", CLEAR, "checkpointer.step(step)", True),
        ("(step + 1) % 4 == 0", "", CLEAR, "(step + 1) % 4 or checkpointer.step(step)", False),
        ("True", CLEAR, "", "checkpointer.step(step)", False),
        ("step not in (3, 9)", CLEAR, "", "checkpointer.step(step)", False),  # as a scaler of gradients does
        ("False", "", "", "checkpointer.step(step)", False),  # its steps are made in another way
    ],
)
def test_gradients_that_are_added_up_over_reported_steps_are_told(
    tmp_path: Path, runtime_dir: Path, caplog: pytest.LogCaptureFixture,
    steps: str, clear_before: str, clear_behind: str, report: str, is_told: bool,
) -> None:  # fmt: skip
    names = {
        "STEPS": steps, "CLEAR_BEFORE": clear_before, "CLEAR_BEHIND": clear_behind, "REPORT": report,
        "ROOT": repr(str(tmp_path / "job")),
        "CONFIG": f"holdfast.Config(linger_s=1.0, durable_every='0', runtime_dir={str(runtime_dir)!r})",
    }  # fmt: skip
    text = SCRIPT
    for name, value in names.items():
        text = text.replace(name, value)
    script = tmp_path / "train.py"
    script.write_text(text)
    runpy.run_path(str(script), run_name="__main__")
    assert caplog.text.count("while gradients are added up") == is_told
