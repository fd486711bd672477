"""What the text of a loop tells about gradients that a step has used: the next turn clears them first, or reads them as they are."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from holdfast.checkpoint.checkpointer.turn_gradients import TurnGradients, meant_in
from holdfast.checkpoint.entries import carried_tensors
from holdfast.checkpoint.entries.gradients_part import GradientsPart
from holdfast.checkpoint.usage.cleared_gradients import judged, turn_at

REPORT = "ckpt.step(n)"


def text(*lines: str, head: str = "for n in range(9):") -> str:
    return "\n".join([head, *(f"    {line}" for line in lines)])


CASES = {
    "cleared first": (["one.zero_grad()", "one.step()", REPORT], "a", ""),
    "cleared behind the step": (["one.step()", "one.zero_grad()", REPORT], "", "a"),
    "cleared behind the report": (["one.step()", REPORT, "one.zero_grad()"], "", ""),
    "cleared behind the report by a function": (["one.step()", REPORT, "clear(one)"], "", ""),
    "behind the report is what nobody knows": (["one.step()", REPORT, "unknown()"], "", ""),
    "behind the report it is only told": (["one.step()", REPORT, "print(n)"], "", ""),
    "the report stands in a branch": (["one.step()", "if n % 2:", f"    {REPORT}"], "", "a"),
    "the report stands in a context": (["with it:", "    one.step()", f"    {REPORT}"], "", ""),
    "an optimizer that clears in its own way": (["own.zero_grad()", "own.step()", REPORT], "", ""),
    "clipping reads all": (
        ["two.zero_grad()", "clip_grad_norm_(a)", "two.step()", "one.zero_grad()", REPORT],
        "b",
        "a",
    ),
    "one of two optimizers": (["one.zero_grad()", "one.step()", "two.step()", REPORT], "a", "b"),
    "each before its step": (["one.zero_grad()", "one.step()", "two.zero_grad()", "two.step()", REPORT], "ab", ""),
    "at every second turn": (["if n % 2:", "    one.zero_grad()", "one.step()", REPORT], "", ""),
    "in a loop": (["for it in [one]:", "    it.zero_grad()", "two.step()", REPORT], "", ""),
    "read on one way": (["if n % 2:", "    one.step()", "one.zero_grad()", REPORT], "", ""),
    "what the loop sets": (["one = pick()", "one.zero_grad()", "one.step()", REPORT], "", ""),
    "read by hand": (["norm = a.grad.norm()", "one.zero_grad()", "two.zero_grad()", REPORT], "", "ab"),
    "in a function": (["work(one)", REPORT], "a", ""),
    "in a function that may be left before": (["maybe(one, n)", "one.step()", REPORT], "", ""),
    "in a function that is decorated": (["often(one)", "one.step()", REPORT], "", "a"),
    "in a generator that nobody runs": (["lazily(one)", "one.step()", REPORT], "", "a"),
    "of some of the parameters": (
        ["for p in net.parameters(recurse=False):", "    p.grad = None", "one.step()", REPORT],
        "",
        "ab",
    ),
    "of all parameters": (["for p in net.parameters():", "    p.grad = None", "one.step()", REPORT], "ab", ""),
    "what a function sets": (["pick(n)", "kept.zero_grad()", "kept.step()", REPORT], "", ""),
    "an attribute that the loop sets": (
        ["held.it = held.that", "held.it.zero_grad()", "held.it.step()", REPORT],
        "",
        "",
    ),
    "an attribute": (["held.that.zero_grad()", "held.that.step()", REPORT], "a", ""),
    "nothing is said": (["engine.run()", REPORT], "", ""),
}
FUNCTIONS = """
def clear(it):
    it.zero_grad()
def work(it):
    it.zero_grad()
    it.step()
def maybe(it, n):
    if n % 4:
        return
    it.zero_grad()
@every(4)
def often(it):
    it.zero_grad()
def lazily(it):
    it.zero_grad()
    yield
def pick(n):
    global kept
    kept = [one, two][n % 2]
"""


def judge(source: str) -> tuple[str, str]:
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    one, two = torch.optim.SGD([a], 0.1), torch.optim.SGD([b], 0.1)
    rate = torch.optim.lr_scheduler.ConstantLR(one)
    own = type("Own", (torch.optim.SGD,), {"zero_grad": lambda _: None})([a], 0.1)
    net = torch.nn.Module()
    net.a, net.b = a, b
    names: dict[str, Any] = {
        "held": SimpleNamespace(that=one, it=one),
        "kept": one,
        "net": net,
        "own": own,
        "items": [],
        "loader": DataLoader([0]),
        "it": iter([]),
        "a": a,
        "b": b,
        "one": one,
        "two": two,
        "rate": rate,
        "ckpt": object(),
    }
    lines = source.splitlines()
    turn = turn_at(source, next(at for at, line in enumerate(lines, 1) if REPORT in line))
    assert turn is not None
    found = judged(turn, lambda path: meant_in(turn, path, names), frozenset({id(a), id(b)}))
    words = {id(a): "a", id(b): "b"}
    cleared, read = ("".join(sorted(words[key] for key in part)) for part in found)
    return cleared, read


@pytest.mark.parametrize("case", CASES)
def test_a_turn_clears_or_reads_what_its_text_says(case: str) -> None:
    lines, cleared, read = CASES[case]
    assert judge(FUNCTIONS + text(*lines)) == (cleared, read)


@pytest.mark.parametrize(
    ("head", "read"),
    [
        ("for n in range(9):", "a"),
        ("while True:", "a"),
        ("for n, row in enumerate(loader):", "a"),
        ("for row in items:", "a"),
        ("for row in it:", ""),
        ("for row in rows():", ""),
    ],
)
def test_what_the_loop_goes_over_clears_nothing(head: str, read: str) -> None:
    """Not so a generator: behind what it hands out it may do anything."""
    assert judge(text("one.step()", REPORT, head=head)) == ("", read)


def test_a_loop_that_goes_on_behind_its_end_keeps_nothing() -> None:
    assert judge(text("one.step()", REPORT) + "\nelse:\n    one.zero_grad()") == ("", "")


@pytest.mark.parametrize(
    ("behind", "found"),
    [
        ("", ("a", "b")),
        ("one.step()", ("", "")),  # what outer loops read between two turns is read before it is cleared
        ("two.zero_grad()", ("a", "")),
        ("print(n)", ("a", "")),
    ],
)
def test_outer_loops_count_too(behind: str, found: tuple[str, str]) -> None:
    turn = ["for n in range(3):", "    one.zero_grad()", "    one.step()", "    two.step()", f"    {REPORT}", behind]
    assert judge(text(*turn, head="for epoch in range(9):")) == found


@pytest.mark.parametrize("source", [REPORT, text("ckpt.flush()  # ckpt.step(n)")])
def test_without_a_loop_or_a_report_nothing_is_said(source: str) -> None:
    assert turn_at(source, len(source.splitlines())) is None


SCRIPT = """
import torch, holdfast
torch.manual_seed(3)
G, D = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
net = torch.nn.ModuleList([G, D])
oG, oD = (torch.optim.AdamW(each.parameters(), 0.1) for each in (G, D))
if KEEPS:
    ckpt = holdfast.Checkpointer(ROOT, net=net, optimizer=[oG, oD], config=CONFIG)
    assert ckpt.restore() == BEGIN
for n in range(BEGIN, END):
    z = torch.arange(6.).reshape(2, 3) * 0.1 + n % 5
    BODY
    if KEEPS:
        ckpt.step(n)
if KEEPS:
    carried = ckpt._run.state.gradients.num_bytes
    ckpt.close()
else:
    carried = 0
end = [each.detach().clone() for each in net.parameters()]
"""
HALVES = ["oD.zero_grad()", "D(G(z).detach()).square().mean().backward()", "CLIP", "oD.step()",
          "oG.zero_grad()", "(D(G(z)) - 1).square().mean().backward()", "CLIP", "oG.step()"]  # fmt: skip
TWO_PASSES = ["D(G(z)).square().mean().backward()", "oD.step()", "oD.zero_grad()", "oG.zero_grad()",
              "(D(G(z)) - 1).square().mean().backward()", "oG.step()"]  # fmt: skip
GAN = [line for line in HALVES if line != "CLIP"]
# What a turn does, and whether its text reads what a step has used.
BODIES = {
    "a GAN": (GAN, False),
    "a GAN, the other half first": (["oG.zero_grad()", "(-D(G(z)).mean()).backward()", "oG.step()", "oD.zero_grad()",
        "(D(G(z).detach()).mean() + D(torch.ones(2, 4)).square().mean()).backward()", "oD.step()"], False),
    "clips all": ([line.replace("CLIP", "torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)") for line in HALVES], True),
    "the first pass adds": (TWO_PASSES, True),
    "multiplied by zero": (["for p in net.parameters():", "    if p.grad is not None:", "        p.grad *= 0", *TWO_PASSES[:2], "oG.step()"], True),
    "never": (["D(G(z)).square().mean().backward()", "oD.step()", "oG.step()"], True),
}  # fmt: skip


def run(path: Path, body: list[str], config: str, begin: int, end: int, *, keeps: bool) -> dict[str, Any]:
    words = {"BODY": "\n    ".join(body), "ROOT": repr(str(path.parent / "job")), "CONFIG": config,
             "BEGIN": str(begin), "END": str(end), "KEEPS": str(keeps)}  # fmt: skip
    source = SCRIPT
    for word, value in words.items():
        source = source.replace(word, value)
    path = path.with_name(f"{path.stem}{begin}{end}{keeps}.py")  # a text that is read is read once
    path.write_text(source)
    return runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("most", [64 << 20, 8], ids=["carried", "too large"])
@pytest.mark.parametrize("body", BODIES)
def test_a_job_that_comes_back_behind_any_step_ends_as_the_undisturbed_one(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    body: str, most: int,
) -> None:  # fmt: skip
    """Also behind the first steps, which no look at gradients can judge. Nothing is told where nothing is lost."""
    monkeypatch.setattr(carried_tensors, "MAX_BYTES", most)
    lines, reads = BODIES[body]
    config = f"holdfast.Config(every='1', linger_s=1.0, durable_every='0', runtime_dir={str(runtime_dir)!r})"
    whole = run(tmp_path / "whole.py", lines, config, 0, 6, keeps=False)["end"]
    for at in (1, 4) if not reads or most > 8 else ():
        first = run(tmp_path / "kept.py", lines, config, 0, at, keeps=True)
        assert first["carried"] or not reads
        again = run(tmp_path / "kept.py", lines, config, at, 6, keeps=True)
        assert all(map(torch.equal, again["end"], whole)), at
        shutil.rmtree(tmp_path / "job")
    assert not [text for text in ("gradient", "are lost") if text in caplog.text.replace("versions have them", "")]


@pytest.mark.parametrize("clears", [False, True])
def test_what_the_text_seems_to_clear_is_told_as_lost_by_nobody(
    caplog: pytest.LogCaptureFixture, *, clears: bool
) -> None:
    optimizer = torch.optim.SGD([parameter := torch.nn.Parameter(torch.zeros(3))], 0.1)
    part = GradientsPart("gradients", lambda: [optimizer], list)
    loading: Any = SimpleNamespace(has=lambda _: False)
    part.apply(loading)  # a version that has none
    part.note(lambda keys: (frozenset(keys if clears else ()), frozenset()))
    for _ in range(3):  # never cleared, by what is seen of the gradient
        parameter.sum().backward()
        optimizer.step()
        part.stepped(optimizer)
    assert ("does not clear the gradient" in caplog.text) != clears


@pytest.mark.parametrize("most", [12, 8])
def test_what_the_text_reads_is_saved_if_it_can_be(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(carried_tensors, "MAX_BYTES", most)
    optimizer = torch.optim.SGD([parameter := torch.nn.Parameter(torch.zeros(3))], 0.1)
    part = GradientsPart("gradients", lambda: [optimizer], list)
    parameter.sum().backward()
    optimizer.step()
    part.stepped(optimizer)
    part.note(lambda keys: (frozenset(), frozenset(keys)))
    assert ([*part._living], part.why_lost) == (["0"] if most == 12 else [], "")


def test_names_that_mean_something_else_by_now_are_looked_up_again(tmp_path: Path) -> None:
    """By a function that the loop calls: its text shows no assignment."""
    source = "def swaps():\n    if ckpt.last == 3: globals()['one'] = other\n" + text(
        "one.zero_grad()", "one.step()", "swaps()", "ckpt.step(n)"
    )
    (path := tmp_path / "swaps.py").write_text(source)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    one, other = (torch.optim.SGD([each], 0.1) for each in parameters)
    looks, found = TurnGradients(), list[frozenset[int]]()

    def step(number: int) -> None:
        ckpt.last = number
        found.append(looks.at(sys._getframe(1), {*map(id, parameters[: 1 if number == 8 else 2])})[0])

    ckpt = SimpleNamespace(step=step, last=0)
    exec(compile(source, str(path), "exec", dont_inherit=True), {"one": one, "other": other, "ckpt": ckpt})
    first, second = (frozenset({id(each)}) for each in parameters)
    assert found == [first] * 4 + [second] * 4 + [frozenset()]


def test_a_text_that_was_edited_since_says_nothing(tmp_path: Path) -> None:
    source = text("one.zero_grad()", "one.step()", REPORT)
    found = []
    for name, edited in (("same.py", source), ("other.py", source.replace("range(9)", "range(8)"))):
        path = tmp_path / name
        path.write_text(edited)
        one = torch.optim.SGD([parameter := torch.nn.Parameter(torch.zeros(1))], 0.1)
        looks = TurnGradients()

        def step(_: int, looks: TurnGradients = looks, parameter: torch.nn.Parameter = parameter) -> None:
            found.append(bool(looks.at(sys._getframe(1), {id(parameter)})[0]))

        code = compile(source, str(path), "exec", dont_inherit=True)
        exec(code, {"one": one, "ckpt": SimpleNamespace(step=step)})
    assert found == [True] * 9 + [False] * 9
