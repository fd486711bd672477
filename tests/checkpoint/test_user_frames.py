"""Looks at the names of a script's function change nothing that it holds."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path

import pytest

from holdfast.checkpoint.usage.name_flow import keeps_names, keeps_names_of_others
from sample_kit import sampled

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


@pytest.mark.parametrize("held", sampled(["locals()", "vars()"], "locals()"))
def test_settings_that_a_function_keeps_of_its_own_names_stay(tmp_path: Path, runtime_dir: Path, held: str) -> None:
    script = tmp_path / "train.py"
    text = SCRIPT.replace("HELD", held).replace("ROOT", repr(str(tmp_path / "job")))
    script.write_text(text.replace("RUNTIME", repr(str(runtime_dir))))
    found = runpy.run_path(str(script), run_name="__main__")["found"]
    assert {"rate": 0.1, "steps": 10}.items() <= found.items()
    assert json.dumps(found)


@pytest.mark.parametrize(
    "line",
    [
        "held = locals()",
        "log(locals())",
        "return vars()",
        "rows = locals().items()",
        "for name in locals(): pass",
        "held = {1: vars()}",
        "held = sys._getframe().f_locals",
        "held = inspect.getargvalues(frame)",
    ],
)
def test_what_may_keep_the_names_of_a_function_is_seen(line: str) -> None:
    assert keeps_names(of(line)) == 2


@pytest.mark.parametrize(
    "line",
    [
        "held = dict(locals())", "held = locals().copy()", "held = {k: v for k, v in locals().items()}", "'{a}'.format(**locals())",
        "print(locals(), f'{vars()}')", "a = locals()['a']", "b = 'a' in locals()", "held = {**locals()}", "'%(a)s' % vars()", "held = vars(args)",
        "rows = sorted(locals().keys())", "locals()", "def f(): return locals()", "names = locals", "held = dict(frame.f_locals)", "n = frame.f_locals['a']",
    ],
)  # fmt: skip
def test_what_reads_the_names_of_a_function_at_once_keeps_none(line: str) -> None:
    assert keeps_names(of(line)) == 0


@pytest.mark.parametrize(
    ("line", "keeps"),
    [
        ("return inspect.getargvalues(sys._getframe(1))", 2), ("self.held = inspect.stack()[1].frame.f_locals", 2),
        ("held = inspect.currentframe().f_back.f_locals; return held", 2), ("global held; held = sys._getframe(1).f_locals", 2),
        ("*_, held = getargvalues(f); log(held)", 2), ("held = f.f_locals; return lambda: held", 2),
        ("held = dict(sys._getframe(1).f_locals)", 0), ("*_, held = getargvalues(f); self.a = {k: v for k, v in held.items()}", 0),
        ("return sys._getframe(1).f_code.co_name", 0), ("held = f.f_locals; return held['a']", 0),
    ],
)  # fmt: skip
def test_a_helper_that_keeps_the_names_of_its_caller_is_seen(line: str, keeps: int) -> None:
    assert keeps_names_of_others(of(line)) == keeps


def of(line: str) -> ast.FunctionDef:
    function = ast.parse(f"def f(a):\n    {line}").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function
