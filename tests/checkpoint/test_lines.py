"""The few lines of a plain loop: what they leave out is named at the first steps, and nothing else is."""

from __future__ import annotations

import logging
import random
import re
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from checkpoint.lines_zoo import CASES, Case
from holdfast.base.errors import UsageError
from holdfast.checkpoint.liveness import heartbeat
from holdfast.checkpoint.state.loop_values import CarriedPart
from holdfast.checkpoint.usage import loop_snapshot
from holdfast.checkpoint.usage.loop_observer import Observer
from holdfast.core.elastic.worker_facts import Phase
from sample_kit import MORE


class Lines:
    """A Checkpointer that saves nothing, for what it says."""

    def __init__(self, _: str, **objects: Any) -> None:
        self._objects = objects

    @heartbeat.phase(Phase.LOADING)  # as the real one: a frame of the decorator's stands between
    def restore(self) -> int:
        self._early = loop_snapshot.look_early(sys._getframe(1), self._objects)
        self._observer = Observer(
            self._objects, CarriedPart("carried"), start=0, count=lambda: 0, early=self._early, says=True
        )
        return 0

    def carry(self, _: str, value: Any) -> Any:
        return value

    def step(self, step: int, **_: Any) -> None:
        assert not self._observer.at(step, sys._getframe(1))


def told(tmp_path: Path, case: Case, caplog: pytest.LogCaptureFixture) -> str:
    script = tmp_path / "train.py"
    script.write_text(case.text())
    caplog.clear()
    with caplog.at_level(logging.INFO, "holdfast"):
        runpy.run_path(str(script), {"Checkpointer": Lines}, "__main__")
    return caplog.text


@pytest.mark.parametrize("name", CASES)
def test_what_a_loop_leaves_out_is_named_and_nothing_else(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = told(tmp_path, CASES[name], caplog)
    assert "is not looked at" not in said
    assert set(re.findall(r"^    ([\w.\[\]'\"-]+): ", said, re.MULTILINE)) == set(CASES[name].names)


def test_what_is_told_names_the_place_and_the_lines_that_keep_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = told(tmp_path, CASES["batch fetched one ahead, in an inner loop"], caplog)
    line = (tmp_path / "train.py").read_text().splitlines().index("            x, y = batch(), 0") + 1
    assert f"x: a tensor that lives from one step to the next, set in line {line}" in said
    assert 'x = ckpt.carry("x", x)\n' in said
    assert "ckpt.step(step, x=x)" in said
    assert said.count("WARNING") == 1


def test_the_lines_of_a_later_warning_keep_what_was_told_before_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who takes the last ones needs no other."""
    loop = """
        for step in range(start, 8):
            often.append(train(batch()).item())
            if step >= 3:
                seldom.append(often[-1])
            ckpt.step(step)
        """
    said = told(tmp_path, Case(loop, before="often, seldom = [0.0], [0.0]"), caplog)
    assert said.count("WARNING") == 2
    first, last = said.split("WARNING")[1:]
    assert "ckpt.step(step, often=often)\n" in first
    assert "often: " not in last
    assert 'often, seldom = ckpt.carry("often", often), ckpt.carry("seldom", seldom)\n' in last
    assert "ckpt.step(step, often=often, seldom=seldom)\n" in last


@pytest.mark.parametrize("name", ["callbacks of names that are alike", "callbacks by the members of enumerations"])
def test_the_lines_that_are_told_can_be_taken_as_they_are(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = CASES[name].text()
    said = told(tmp_path, CASES[name], caplog)
    *_, taken, passed = said.rstrip().splitlines()
    text = text.replace("    start = ckpt.restore()", f"    start = ckpt.restore()\n    {taken.strip()}")
    text = text.replace("        ckpt.step(step)", f"        {passed.strip()}")
    (tmp_path / "train.py").write_text(text)
    caplog.clear()
    runpy.run_path(str(tmp_path / "train.py"), {"Checkpointer": Lines}, "__main__")
    assert not caplog.records
    keys = re.findall(r"carry\(\"(.*?)\", ", taken)
    assert len(set(keys)) == len(CASES[name].names)
    for key in keys:
        CarriedPart("carried").take(key, 1.0)


def test_no_line_is_told_that_carry_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = told(tmp_path, CASES["a defaultdict that grows"], caplog)
    assert re.search("losses: a defaultdict that is changed .*; carry keeps it as a dict\n", said)
    assert "carry(" not in said


Make = Callable[..., holdfast.Checkpointer]


@pytest.fixture
def make(tmp_path: Path, runtime_dir: Path) -> Iterator[Make]:
    """Builds checkpointers of one job with real keepers; whatever is open at the end is left without a save."""
    made: list[holdfast.Checkpointer] = []

    def build(**objects: Any) -> holdfast.Checkpointer:
        config = holdfast.Config(runtime_dir=str(runtime_dir), linger_s=1.0)
        made.append(holdfast.Checkpointer(tmp_path / "job", config=config, **objects))
        return made[-1]

    yield build
    for checkpointer in made:
        checkpointer.abandon()


def job() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def train(objects: dict[str, Any]) -> None:
    objects["model"](torch.randn(3, 4)).square().mean().backward()
    objects["optimizer"].step()
    objects["optimizer"].zero_grad()


def test_a_number_one_more_than_that_of_the_step_is_refused_at_the_first(make: Make) -> None:
    objects = job()
    checkpointer = make(**objects)
    start = checkpointer.restore()
    for step in range(start, 3):
        train(objects)
        with pytest.raises(UsageError, match=r"step 1 was reported first, and restore\(\) returned 0: after a restart"):
            checkpointer.step(step + 1)
        break
    count = start
    while count < 3:
        count += 1
        with pytest.raises(UsageError, match="report the number of the step that was made"):
            checkpointer.step(count)
        break


@MORE
def test_a_loop_that_counts_from_one_is_right(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    objects = job()
    checkpointer = make(**objects)
    start = max(1, checkpointer.restore())
    for step in range(start, 4):
        train(objects)
        checkpointer.step(step)
    checkpointer.close()
    checkpointer = make(**objects)
    start = max(1, checkpointer.restore())
    assert start == 4
    for step in range(start, 7):
        train(objects)
        checkpointer.step(step)
    assert not caplog.records


def test_a_step_left_out_at_a_restart_is_told(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        objects = job()
        checkpointer = make(**objects)
        numbers = iter(range(checkpointer.restore(), 100))
        for _ in range(3):
            train(objects)
            checkpointer.step(next(numbers) + 1)
        checkpointer.close()
    said = "restore() returned 4 and the first step that was reported is 5: a step was left out at this restart"
    assert [record.message.partition(".")[0] for record in caplog.records if "left out" in record.message] == [said]


def test_steps_that_were_made_already_are_refused(make: Make) -> None:
    objects = job()
    checkpointer = make(**objects)
    for step in range(checkpointer.restore(), 3):
        train(objects)
        checkpointer.step(step)
    with pytest.raises(UsageError, match="step 2 was reported twice"):
        checkpointer.step(2)
    with pytest.raises(UsageError, match="step 1 was reported after step 2"):
        checkpointer.step(1)
    checkpointer.close()
    checkpointer = make(**job())
    assert checkpointer.restore() == 3
    with pytest.raises(UsageError, match=r"step 0 was reported first, and restore\(\) returned 3"):
        checkpointer.step(0)
    checkpointer.step(3)


def test_values_of_the_loop_come_back_as_the_step_left_them(make: Make) -> None:
    objects = job()
    checkpointer = make(**objects)
    start = checkpointer.restore()
    batch = checkpointer.carry("batch", (torch.zeros(3, 4), {"rows": [1]}))
    best = checkpointer.carry("best", float("inf"))
    assert (batch[0].sum(), best) == (0, float("inf"))
    for step in range(start, 3):
        train(objects)
        batch, best = (torch.full((3, 4), float(step)), {"rows": [step]}), best if step else 0.5
        checkpointer.step(step, batch=batch, best=best)
    checkpointer.close()

    checkpointer = make(**job())
    assert checkpointer.restore() == 3
    tensor, rows = checkpointer.carry("batch", (torch.zeros(3, 4), {"rows": [1]}))
    assert torch.equal(tensor, torch.full((3, 4), 2.0))
    assert rows == {"rows": [2]}
    assert checkpointer.carry("best", float("inf")) == 0.5
    assert checkpointer.carry("new", "value") == "value", "a version without it fits"
    handle = checkpointer.step(3, batch=(tensor, rows), best=best, new="other")
    assert handle is not None
    assert handle.wait("captured", 60) >= holdfast.Level.CAPTURED
    assert checkpointer.restore() == 4, "back in the middle of training"
    assert checkpointer.carry("new", "value") == "other"


def test_a_script_that_has_made_all_its_steps_saves_the_last_one_again(make: Make) -> None:
    for start in (0, 3):
        objects = job()
        checkpointer = make(**objects)
        assert checkpointer.restore() == start
        best = checkpointer.carry("best", 1.0)
        for step in range(start, 3):
            train(objects)
            checkpointer.step(step, best=best / 2)
        checkpointer.save_last(2)
        checkpointer.close()
    checkpointer = make(**job())
    assert checkpointer.restore() == 3
    assert checkpointer.carry("best", 1.0) == 0.5
    checkpointer.carry("new", 0)
    with pytest.raises(UsageError, match="without the values"):
        checkpointer.save(2)


def test_a_counter_among_the_values_comes_back_with_its_counts(make: Make) -> None:
    for start in range(2):
        checkpointer = make(**job())
        assert checkpointer.restore() == start
        words = checkpointer.carry("words", Counter("aab"))
        assert words == Counter(a=2, b=1)
        checkpointer.step(start, words=words)
        checkpointer.close()


def test_values_are_asked_for_and_kept_or_it_is_refused(make: Make) -> None:
    checkpointer = make(**job())
    with pytest.raises(UsageError, match=r"restore\(\) has not been called"):
        checkpointer.carry("best", 1.0)
    checkpointer.restore()
    for name in ("step", "two words", ""):
        with pytest.raises(UsageError, match="cannot be called"):
            checkpointer.carry(name, 1.0)
    with pytest.raises(UsageError, match=r"nobody asks for it after a restart.*best = checkpointer.carry"):
        checkpointer.step(0, best=1.0)
    with pytest.raises(UsageError, match=r"builtins.object cannot be stored as a value \[best\]"):
        checkpointer.carry("best", object())
    checkpointer.carry("best", 1.0)
    with pytest.raises(UsageError, match="asked for already"):
        checkpointer.carry("best", 1.0)
    with pytest.raises(UsageError, match=r"'best' was asked for by carry.*step, best=best"):
        checkpointer.step(0)
    with pytest.raises(UsageError, match="step 0 is saved without the values that live on: best"):
        checkpointer.save(0)
    checkpointer.step(0, best=1.0)
    checkpointer.save(0, "durable")


def test_a_value_that_was_written_after_its_step_is_not_saved_as_that_of_the_step(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    objects = job()
    checkpointer = make(every="2", **objects)
    checkpointer.restore()
    mean = checkpointer.carry("mean", torch.zeros(2))
    for step in range(4):
        train(objects)
        mean += 1
        checkpointer.step(step, mean=mean)
    checkpointer.step(4, mean=mean)
    mean += 1
    checkpointer.close()
    assert "step 4 is not saved: a tensor that was passed to step() was written" in caplog.text


@MORE
def test_generators_of_others_go_on_where_they_were(make: Make) -> None:
    def draw(own: dict[str, Any]) -> list[float]:
        return [
            own["die"].random(),
            own["dice"].random(),
            own["old"].rand(),
            float(torch.rand((), generator=own["own"])),
        ]

    def generators() -> dict[str, Any]:
        old = np.random.RandomState(3)
        return {"die": random.Random(1), "dice": np.random.default_rng(2), "old": old, "own": torch.Generator()}

    own = generators()
    checkpointer = make(**job(), **own)
    checkpointer.restore()
    draw(own)
    checkpointer.step(0)
    checkpointer.close()
    expected = draw(own)
    own = generators()
    make(**job(), **own).restore()
    assert draw(own) == expected


def test_a_generator_of_numpy_spawns_the_next_children_behind_a_restart(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    own = np.random.default_rng(2)
    checkpointer = make(**job(), own=own)
    checkpointer.restore()
    checkpointer.step(0)
    own.spawn(3)
    checkpointer.step(1)
    checkpointer.close()
    expected = own.spawn(1)[0].random()
    again = np.random.default_rng(2)
    checkpointer = make(**job(), own=again)
    checkpointer.restore()
    assert again.spawn(1)[0].random() == expected
    assert "spawned" not in caplog.text
    checkpointer.restore()
    assert "has spawned 1 more children than when it was saved" in caplog.text
