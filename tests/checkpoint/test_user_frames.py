"""Looks at the names of a script's function change nothing that it holds."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

# One look is made early, the others at the first steps and at powers of two.
SCRIPT = """
import json, torch, holdfast

def train(rate=0.1, steps=10):
    settings = HELD
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["rate"])
    checkpointer = holdfast.Checkpointer(ROOT, model=model, optimizer=optimizer, config=holdfast.Config(
        linger_s=1.0, durable_every="0", runtime_dir=RUNTIME))
    for step in range(checkpointer.restore(), settings["steps"]):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        checkpointer.step(step)
    checkpointer.abandon()
    return {name: value for name, value in settings.items() if name != "settings"}

found = train()
"""


@pytest.mark.parametrize("held", ["locals()", "vars()"])
def test_settings_that_a_function_keeps_of_its_own_names_stay(tmp_path: Path, runtime_dir: Path, held: str) -> None:
    script = tmp_path / "train.py"
    text = SCRIPT.replace("HELD", held).replace("ROOT", repr(str(tmp_path / "job")))
    script.write_text(text.replace("RUNTIME", repr(str(runtime_dir))))
    found = runpy.run_path(str(script), run_name="__main__")["found"]
    assert {"rate": 0.1, "steps": 10}.items() <= found.items()
    if held == "locals()":  # another name for it is not known, and what it holds grows as by asking again
        assert json.dumps(found)
