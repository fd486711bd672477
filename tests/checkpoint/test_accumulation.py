"""Steps that are reported within an accumulation of gradients: versions have what was added up, and say what they cannot have."""

from __future__ import annotations

import _thread
import copy
import functools
import json
import pickle
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import forked
from holdfast.checkpoint.entries import carried_tensors, fsdp1, gradients_part, living_gradients
from holdfast.checkpoint.state.step_observer import Steps
from holdfast.checkpoint.state.training_state import State
from kit.checkpointers import Make
from sample_kit import MORE, sampled

WORKER = str(Path(__file__).with_name("accumulation_worker.py"))

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
    ("most", "steps", "clear_before", "clear_behind", "report", "is_told"),
    [
        (8, "(step + 1) % 4 == 0", "", CLEAR, "checkpointer.step(step)", True),
        pytest.param(8, "step % 2 == 0", "", CLEAR, "checkpointer.step(step)", True, marks=MORE),
        (1024, "step % 2 == 0", "", CLEAR, "checkpointer.step(step)", False),  # they are carried
        pytest.param(
            8, "(step + 1) % 4 == 0", "", CLEAR, "(step + 1) % 4 or checkpointer.step(step)", False, marks=MORE
        ),
        pytest.param(8, "True", CLEAR, "", "checkpointer.step(step)", False, marks=MORE),
        (8, "step not in (3, 9)", CLEAR, "", "checkpointer.step(step)", False),  # as a scaler of gradients does
        (8, "False", "", "", "checkpointer.step(step)", False),  # its steps are made in another way
    ],
)
def test_gradients_that_are_added_up_over_reported_steps_and_cannot_be_carried_are_told(
    tmp_path: Path, runtime_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    most: int, steps: str, clear_before: str, clear_behind: str, report: str, is_told: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(carried_tensors, "MAX_BYTES", most)
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


def live(tmp_path: Path, life: str, way: str, world: int, kill: int) -> list[dict[str, Any]]:
    arguments = [str(world), str(tmp_path / life), str(tmp_path / "ckpt"), way, str(kill)]
    ranks = [
        forked.Popen([sys.executable, WORKER, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    told = [rank.communicate(timeout=120)[0] for rank in ranks]
    return [json.loads(text) for text in told if text]


@pytest.mark.parametrize(
    ("way", "world"),
    [
        ("plain", 1),
        pytest.param("first", 1, marks=MORE),
        pytest.param("two", 1, marks=MORE),
        pytest.param("heads", 1, marks=MORE),
        ("zeros", 1),
        ("scaler", 1),
        pytest.param("channels", 1, marks=MORE),
        ("ddp", 2),
        pytest.param("no_sync", 2, marks=MORE),
        ("no_sync_buckets", 2),
        pytest.param("buckets", 2, marks=MORE),
        ("fsdp", 2),
    ],
)
def test_a_job_that_is_killed_between_two_micro_batches_ends_as_the_undisturbed_one(
    tmp_path: Path, runtime_dir: Path, way: str, world: int
) -> None:
    assert not live(tmp_path, "first", way, world, kill=5)
    ended = live(tmp_path, "second", way, world, kill=-1)
    assert [row["start"] for row in ended] == [6] * world
    assert [row["end"] for row in ended] == [row["whole"] for row in ended]


def test_gradients_of_another_number_of_ranks_are_lost_aloud(tmp_path: Path, runtime_dir: Path, capfd: Any) -> None:
    assert not live(tmp_path, "first", "no_sync", 2, kill=5)
    (alone,) = live(tmp_path, "second", "plain", 1, kill=-1)
    assert alone["start"] == 6
    assert capfd.readouterr().err.count("are lost: they were added up in another layout") == 1


class Loop:
    """A model that is trained in this process, as a script does it."""

    def __init__(self, *, turns: int = 4, clear: str = "behind", none: bool = True) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.turns, self.clear, self.none = turns, clear, none

    def turn(self, number: int) -> None:
        begins, ends = number % self.turns == 0, (number + 1) % self.turns == 0
        if begins and self.clear == "before":
            self.optimizer.zero_grad(set_to_none=self.none)
        self.model(torch.full((4, 8), float(number % 5))).square().mean().backward()
        if ends:
            self.optimizer.step()
        if (ends and self.clear == "behind") or (self.clear == "second" and (number + 1) % (2 * self.turns) == 0):
            self.optimizer.zero_grad(set_to_none=self.none)

    def run(self, begin: int, end: int, checkpointer: Any = None) -> list[torch.Tensor]:
        for number in range(begin, end):
            self.turn(number)
            if checkpointer is not None:
                checkpointer.step(number)
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def kept(self, make: Make, **options: Any) -> Any:
        checkpointer = make(model=self.model, optimizer=self.optimizer, **{"every": "1", **options})
        checkpointer.restore()
        return checkpointer


@pytest.mark.parametrize(
    ("level", "clear", "none"),
    sampled(
        product(["memory", "storage"], ["before", "behind"], [True, False]),
        ("memory", "before", True),
        ("storage", "behind", False),
    ),
)
def test_gradients_that_were_used_up_cost_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, level: str, clear: str, none: bool
) -> None:
    monkeypatch.setattr(carried_tensors, "packed", None)
    monkeypatch.setattr(living_gradients, "why_not", None)
    loop = Loop(turns=1, clear=clear, none=none)
    budget = {"memory_budget": "1KB"} if level == "storage" else {}
    checkpointer = loop.kept(make, **budget)
    for number in range(4):
        loop.run(number, number + 1, checkpointer)
        assert checkpointer._run.state.gradients.fits(0)  # in a note of the step
        gathered = checkpointer._run.state.gather()
        assert not [name for name in gathered.tensors if name.startswith("gradients")]
        named = [name for group in gathered.values.values() for name in group if "gradients" in name]
        assert not named or number == 0 or not none  # only names, where a later step may find the gradients in place
    assert not checkpointer._run.state.gradients._uncleared
    assert not any(parameter._backward_hooks for parameter in loop.model.parameters())


def test_gradients_that_the_first_fsdp_holds_are_lost_aloud_where_they_are_zero(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(turns=1, none=False)
    checkpointer = loop.kept(make, every="0")
    loop.run(0, 2, checkpointer)
    monkeypatch.setattr(fsdp1, "units_of", lambda module: [module])
    gradients = checkpointer._run.state.gradients
    gradients.note()
    assert gradients.why_lost == "the first FSDP holds them"
    assert not gradients.fits(1 << 20)


class Operations(TorchDispatchMode):
    """Lists those that are run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [3, 5])
def test_a_report_runs_no_operation_of_torch_on_gradients(make: Make, number: int) -> None:
    """One takes three microseconds and more, for each of thousands of parameters, at each micro-batch."""
    loop = Loop(none=False)
    checkpointer = loop.kept(make, every="0")
    loop.run(0, number + 1, checkpointer)
    with Operations() as operations:
        checkpointer._run.state.gradients.note()
    assert not operations.seen
    assert bool(checkpointer._run.state.gradients._zero) == (number == 3)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (64, 64), (65, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_zero_is_told_from_all_else_by_each_byte(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    parameter.grad = torch.zeros(shape, dtype=dtype)
    assert living_gradients.is_zero(parameter)
    for at in {0, parameter.numel() - 1} if parameter.numel() else ():
        for value in (5e-40, float("nan"), -0.0):
            parameter.grad.zero_().view(-1)[at] = value
            assert not living_gradients.is_zero(parameter), (at, value)
    if len(shape) == 2:
        rows = torch.zeros(2 * shape[0], shape[1], dtype=dtype)
        rows[1::2] = 1
        parameter.grad = rows[::2]
        assert living_gradients.is_zero(parameter) == (not shape[0])  # it has gaps, which `put_zero` would not leave
        parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype).t())
        parameter.grad = torch.zeros_like(parameter)
        assert living_gradients.is_zero(parameter)


class Heads(torch.nn.Module):
    """A body and two heads, of which every second step uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = torch.nn.Linear(8, 8)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(2))

    def forward(self, number: int) -> torch.Tensor:
        return self.heads[number % 2](self.body(torch.full((4, 8), float(number % 5)))).square().mean()


def in_place(net: Heads, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    net(number).backward()
    optimizer.step()


def by_data(net: Heads, optimizer: torch.optim.Optimizer, number: int) -> None:
    net(number).backward()
    optimizer.step()
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def clipped(net: Heads, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    net(number).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    optimizer.step()


def by_hand(net: Heads, _: torch.optim.Optimizer, number: int) -> None:
    net(number).backward()
    for parameter in net.parameters() if number % 4 == 3 else ():
        if parameter.grad is not None:
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None


@pytest.mark.parametrize(
    ("turn", "at"),
    sampled(product([in_place, by_data, clipped, by_hand], [0, 1, 4, 5]), (in_place, 4), (clipped, 1), (by_hand, 4)),
)
def test_gradients_that_are_read_beside_those_of_the_next_step_are_as_they_were(
    make: Make, turn: Callable[[Heads, torch.optim.Optimizer, int], None], at: int
) -> None:
    def begin() -> tuple[Heads, torch.optim.Optimizer, dict[str, Any]]:
        net = Heads()
        parameters = net.heads.parameters() if turn is clipped else net.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)
        return net, optimizer, {"model": net} | ({} if turn is by_hand else {"optimizer": optimizer})

    whole, optimizer, _ = begin()
    for number in range(12):
        turn(whole, optimizer, number)
    net, optimizer, objects = begin()
    checkpointer: Any = make(every="1", **objects)
    checkpointer.restore()
    for number in range(at + 1):
        turn(net, optimizer, number)
        checkpointer.step(number)
    checkpointer.close()
    net, optimizer, objects = begin()
    checkpointer = make(every="1", **objects)
    assert checkpointer.restore() == at + 1
    for number in range(at + 1, 12):
        turn(net, optimizer, number)
    assert all(map(torch.equal, net.parameters(), whole.parameters()))


@pytest.mark.parametrize("at", sampled([3, 5], 5))
def test_what_lives_here_gives_way_to_what_lived_in_the_version_that_is_gone_back_to(make: Make, at: int) -> None:
    whole = Loop().run(0, 12)
    loop = Loop()
    checkpointer = loop.kept(make)
    loop.run(0, at + 1, checkpointer)
    checkpointer.save(at, "durable").wait("durable", 60)
    version = str(checkpointer._run.last.version)
    loop.run(at + 1, 7)  # which is not reported
    assert checkpointer.restore(version) == at + 1
    assert all(map(torch.equal, loop.run(at + 1, 12, checkpointer), whole))


@pytest.mark.parametrize("none", sampled([True, False], False))
def test_gradients_that_were_used_up_go_where_the_script_goes_back_before_it_clears_them(
    make: Make, none: bool
) -> None:
    whole = Loop(turns=1, none=none).run(0, 8)
    loop = Loop(turns=1, none=none)
    checkpointer = loop.kept(make)
    loop.run(0, 4, checkpointer)
    checkpointer.save(3, "durable").wait("durable", 60)
    loop.run(4, 5)
    loop.clear = "never"
    loop.turn(5)  # after which the script finds its loss bad
    assert checkpointer.restore(str(checkpointer._run.last.version)) == 4
    loop.clear = "behind"
    assert all(map(torch.equal, loop.run(4, 8, checkpointer), whole))


@pytest.mark.parametrize(
    ("clear", "none"), sampled([("never", True), ("second", True), ("second", False)], ("second", False))
)
def test_gradients_that_a_script_does_not_clear_at_each_step_live_on(make: Make, clear: str, none: bool) -> None:
    whole = Loop(clear=clear, none=none).run(0, 36)
    loop = Loop(clear=clear, none=none)
    checkpointer = loop.kept(make, every="0")
    loop.run(0, 20, checkpointer)  # in which it was seen
    checkpointer.close()
    for begin, end in ((20, 24), (24, 28), (28, 36)):
        again = Loop(clear=clear, none=none)
        checkpointer = again.kept(make, every="0")
        assert checkpointer.last_restore.version.step == begin - 1
        ended = again.run(begin, end, checkpointer)
        checkpointer.close()
    assert all(map(torch.equal, ended, whole))


def test_a_version_that_lacks_gradients_says_so_when_it_is_restored(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(carried_tensors, "MAX_BYTES", 8)
    loop = Loop()
    checkpointer = loop.kept(make)
    loop.run(0, 6, checkpointer)
    checkpointer.close()
    assert "are lost" not in caplog.text
    assert Loop().kept(make).last_restore.version.step == 5
    assert "when this version was saved, and are lost: they have more than" in caplog.text


@pytest.mark.parametrize("change", sampled(["added", "cleared"], "added"))
def test_gradients_that_changed_behind_the_last_step_are_not_taken_for_its_own(
    make: Make, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    loop = Loop()
    checkpointer = loop.kept(make, every="100")
    loop.run(0, 6, checkpointer)
    if change == "added":
        loop.turn(6)
    else:
        loop.optimizer.zero_grad()
    checkpointer.close()
    again = Loop()
    assert again.kept(make).last_restore.version.step == 5
    assert "are lost: they were written or cleared after the step was reported" in caplog.text
    assert all(parameter.grad is None for parameter in again.model.parameters())


@pytest.mark.parametrize("kind", ["flat", "sparse"])
def test_gradients_of_odd_kinds_are_not_carried(make: Make, kind: str) -> None:
    model = torch.nn.Embedding(4, 4, sparse=kind == "sparse")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer: Any = make(model=model, other=(other := torch.nn.Linear(4, 4)), optimizer=optimizer)
    optimizer.add_param_group({"params": list(other.parameters())})
    checkpointer.restore()
    if kind == "flat":
        flat = torch.zeros(64)
        for number, parameter in enumerate(other.parameters()):
            parameter.grad = flat[16 * number :][: parameter.numel()].view_as(parameter)
    other(model(torch.arange(3))).sum().backward()
    checkpointer.step(0)
    why = checkpointer._run.state.gradients.why_lost
    assert (
        why
        == {
            "flat": "they are parts of memory that others may read",
            "sparse": "they are sparse, or cut in another way than their parameters",
        }[kind]
    )


@pytest.mark.parametrize("used", sampled([True, False], True))
def test_sparse_gradients_go_where_the_script_goes_back(make: Make, used: bool) -> None:
    model = torch.nn.Embedding(4, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer: Any = make(model=model, optimizer=optimizer)
    checkpointer.restore()
    checkpointer.save(0, "durable").wait("durable", 60)
    model(torch.arange(3)).sum().backward()
    if used:
        optimizer.step()
    assert checkpointer.restore(str(checkpointer._run.last.version)) == 1
    assert model.weight.grad is None


@pytest.mark.parametrize("reported", sampled([True, False], True))
def test_a_save_of_a_step_that_is_known_has_nothing_of_the_backward_pass_behind_it(make: Make, reported: bool) -> None:
    """As a signal's handler, or another thread, saves it between a backward pass and its optimizer's step."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer: Any = make(model=model, optimizer=optimizer)
    checkpointer.restore()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step(0) if reported else checkpointer.save(0)
    model(torch.ones(4)).sum().backward()
    checkpointer.save(0, "durable").wait("durable", 60)
    assert checkpointer.restore(str(checkpointer._run.last.version)) == 1
    assert all(parameter.grad is None for parameter in model.parameters())


def _linear() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_another_thread_that_saves_a_reported_step_reads_no_gradient(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward pass may be writing them, and torch ends the process where a gradient is read meanwhile."""
    model, optimizer = _linear()
    checkpointer: Any = make(every="0", model=model, optimizer=optimizer)
    checkpointer.restore()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step(0)
    state, readers = checkpointer._run.state, list[int]()
    reads: dict[Any, str] = {state._overlooked: "look", state.gradients: "note"}
    for part, name in reads.items():
        monkeypatch.setattr(part, name, lambda *_: readers.append(threading.get_ident()))
    thread = threading.Thread(target=lambda: saved.append(checkpointer.save(0)))
    saved = list[Any]()
    thread.start()
    thread.join(60)
    assert [str(each.version) for each in saved] == ["i000001-s0000000000"]
    assert not readers
    checkpointer.save(1)
    assert set(readers) == {threading.get_ident()}


@pytest.mark.parametrize("reported", [False, True])
def test_a_version_that_another_thread_saves_has_no_gradient_that_lives_and_says_so(
    make: Make, caplog: pytest.LogCaptureFixture, *, reported: bool
) -> None:
    """A backward pass may be adding to them."""
    model, optimizer = _linear()
    checkpointer: Any = make(every="0", model=model, optimizer=optimizer)
    checkpointer.restore()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(0)
    model(torch.ones(4)).sum().backward()
    if reported:
        checkpointer.step(1)
    thread = threading.Thread(target=checkpointer.save, args=(1, "durable"))
    thread.start()
    thread.join(60)
    part = checkpointer._run.state.gradients
    assert bool(part._living) == reported
    assert ("another thread saves" in caplog.text) != reported
    checkpointer.flush(60)
    checkpointer.abandon()
    model, optimizer = _linear()
    assert make(every="0", model=model, optimizer=optimizer).restore() == 2
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "another thread saves" in caplog.text


@pytest.mark.parametrize(
    ("overflows", "unscaled"),
    sampled(product([(True,), (False, True), (True, True)], [False, True]), ((True,), False), ((False, True), True)),
    ids=str,
)
def test_gradients_of_a_step_that_a_scaler_left_out_are_used_up(
    make: Make, overflows: tuple[bool, ...], *, unscaled: bool
) -> None:
    """The script clears them behind the report, and nothing of them comes back."""
    pairs = [_linear() for _ in overflows]
    scaler = torch.amp.GradScaler("cpu")
    objects = {f"model{number}": model for number, (model, _) in enumerate(pairs)}
    checkpointer = make(every="0", optimizer=[optimizer for _, optimizer in pairs], scaler=scaler, **objects)
    checkpointer.restore()
    for (model, optimizer), overflow in zip(pairs, overflows, strict=True):
        scaler.scale(model(torch.ones(4)).sum() * (torch.inf if overflow else 1.0)).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        before = model.weight.clone()
        scaler.step(optimizer)
        assert torch.equal(before, model.weight) == overflow
    scaler.update()
    assert checkpointer.save(0, level="durable") is not None
    checkpointer.flush(60)
    checkpointer.abandon()
    back = [_linear() for _ in overflows]
    objects = {f"model{number}": model for number, (model, _) in enumerate(back)}
    optimizers = [optimizer for _, optimizer in back]
    again = make(every="0", optimizer=optimizers, scaler=torch.amp.GradScaler("cpu"), **objects)
    assert again.restore() == 1
    parameters = [parameter for model, _ in back for parameter in model.parameters()]
    # Of the first step it is not known yet whether the script clears in place.
    assert not any(parameter.grad.any() for parameter in parameters if parameter.grad is not None)


class NamedScaler(torch.amp.GradScaler):
    """Is given its optimizer before, and steps it without one; another one is given by its name."""

    def __init__(self, own: torch.optim.Optimizer) -> None:
        super().__init__("cpu")
        self.own = own

    def step(self, opt: torch.optim.Optimizer | None = None) -> float | None:  # type: ignore[override]
        return super().step(opt or self.own)


class AllScaler(torch.amp.GradScaler):
    """Steps several optimizers in one call."""

    def step(self, optimizers: list[torch.optim.Optimizer]) -> None:  # type: ignore[override]
        for optimizer in optimizers:
            super().step(optimizer)


@pytest.mark.parametrize("way", sampled(["own", "named", "all"], "named", "all"))
def test_a_scaler_that_steps_in_its_own_way_is_left_to_it(
    make: Make, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Of several optimizers in one call those count as left out that were."""
    (model, optimizer), (other, second) = _linear(), _linear()
    named = NamedScaler(optimizer)
    scaler = AllScaler("cpu") if way == "all" else named
    checkpointer: Any = make(every="0", optimizer=[optimizer, second], scaler=scaler, model=model, other=other)
    checkpointer.restore()
    for last in (False, True):
        for each in (optimizer, second):
            each.zero_grad()
        scaler.scale(model(torch.ones(4)).sum() * (torch.inf if last else 1.0)).backward()
        scaler.scale(other(torch.ones(4)).sum()).backward()
        if isinstance(scaler, AllScaler):
            scaler.step([optimizer, second])
        else:
            scaler.step() if way == "own" else scaler.step(opt=optimizer)
            torch.amp.GradScaler.step(scaler, second)
        scaler.update()
        checkpointer.step(0 + last)
    assert not checkpointer._run.state.gradients._living
    assert "Traceback" not in caplog.text
    checkpointer.abandon()


class OwnScaler(torch.amp.GradScaler):
    """A scaler that decides itself which steps are made, as those of some devices do."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.unscale_(optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        return None if any(each.item() for each in found) else optimizer.step(*args, **kwargs)


class CallingScaler(torch.amp.GradScaler):
    """A scaler that calls that of torch."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return super().step(optimizer, *args, **kwargs)


class Wrapper:
    """No optimizer, but has one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.step, self.param_groups = inner.step, inner.param_groups


@pytest.mark.parametrize("wrapped", [lambda optimizer: optimizer, Wrapper], ids=["plain", "wrapped"])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, OwnScaler, CallingScaler])
def test_steps_that_an_own_scaler_leaves_out_are_seen_once_each(
    caplog: pytest.LogCaptureFixture, kind: type[torch.amp.GradScaler], wrapped: Callable[[Any], Any]
) -> None:
    model, optimizer = _linear()
    scaler, told, made, given = kind("cpu"), list[Any](), list[Any](), wrapped(optimizer)
    steps = Steps([optimizer], after=made.append, skipped=told.append, warn=True)
    try:
        for factor in (torch.inf, 1.0, torch.inf):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4)).sum() * factor).backward()
            scaler.step(given)
            scaler.update()
    finally:
        steps.close()
    assert (told, made) == ([given, given], [optimizer])
    assert not caplog.text


class AddingScaler(torch.amp.GradScaler):
    """Adds up the gradients of two calls, and steps at each second one."""

    calls = 0

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return None if self.calls % 2 else super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("factor", [1.0, torch.inf])
def test_what_a_scaler_adds_up_in_its_own_step_lives(make: Make, factor: float) -> None:
    model, optimizer = _linear()
    scaler = AddingScaler("cpu")
    checkpointer: Any = make(every="0", model=model, optimizer=optimizer, scaler=scaler)
    checkpointer.restore()
    lives = []
    for each in (1.0, factor):
        scaler.scale(model(torch.ones(4)).sum() * each).backward()
        scaler.step(optimizer)
        checkpointer._run.state.gradients.note()
        lives.append(bool(checkpointer._run.state.gradients._living))
    scaler.update()
    assert lives == [True, False]
    checkpointer.abandon()


@pytest.mark.parametrize("groups", [None, [{"names": ["a"]}], [[{"params": []}]], "error"], ids=str)
def test_whatever_a_scaler_is_given_its_step_is_as_without_us(groups: Any) -> None:
    model, optimizer = _linear()

    class Several:
        """Steps what it has, and groups it in its own way."""

        @property
        def param_groups(self) -> Any:
            if groups == "error":
                raise RuntimeError
            return groups

        def step(self) -> str:
            optimizer.step()
            return "made"

    told = list[Any]()
    steps = Steps([optimizer], skipped=told.append)
    try:
        assert torch.amp.GradScaler("cpu", enabled=False).step(Several()) == "made"
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(4)).sum() * torch.inf).backward()
        scaler.step(optimizer)
        assert told == [optimizer]
    finally:
        steps.close()


def test_a_scaler_whose_step_was_patched_with_the_attributes_of_ours_is_seen() -> None:
    model, optimizer = _linear()
    Steps([optimizer]).close()

    class Patched(OwnScaler):
        @functools.wraps(torch.amp.GradScaler.step)
        def step(self, optimizer: Any) -> Any:
            return OwnScaler.__dict__["step"].__wrapped__(self, optimizer)

    told = list[Any]()
    steps = Steps([optimizer], skipped=told.append)
    try:
        scaler = Patched("cpu")
        scaler.scale(model(torch.ones(4)).sum() * torch.inf).backward()
        scaler.step(optimizer)
        assert told == [optimizer]
    finally:
        steps.close()


@MORE
@pytest.mark.filterwarnings("ignore")  # of what torch compiles, about torch itself
def test_a_step_that_a_scaler_leaves_out_in_what_torch_compiles_is_seen(make: Make) -> None:
    model, optimizer = _linear()
    scaler = torch.amp.GradScaler("cpu")
    checkpointer = make(every="0", model=model, optimizer=optimizer, scaler=scaler)
    checkpointer.restore()

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> None:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    for factor in (1.0, 1.0, 1.0, torch.inf):
        optimizer.zero_grad()
        step(torch.full((4,), factor))
    checkpointer._run.state.gradients.note()
    assert not checkpointer._run.state.gradients._living
    checkpointer.abandon()


@pytest.mark.filterwarnings("ignore")  # of what torch compiles, about torch itself
def test_a_backward_pass_that_is_compiled_is_as_without_us() -> None:
    """And the look at what a step used is made in it."""
    import torch._dynamo

    model, optimizer = _linear()
    part = gradients_part.GradientsPart("gradients", lambda: [optimizer], lambda: [model])
    steps = Steps([optimizer], after=part.stepped)

    @torch.compile(backend="eager")
    def back(x: torch.Tensor) -> None:
        model(x).sum().backward()

    try:
        with torch._dynamo.config.patch(compiled_autograd=True):  # type: ignore[attr-defined]
            for _ in range(5):  # never cleared
                back(torch.ones(2, 4))
                optimizer.step()
    finally:
        steps.close()
    assert part._uncleared == {id(parameter) for parameter in model.parameters()}


def test_a_parameter_is_pickled_between_two_steps_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    loose = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([loose], lr=0.1)
    part = gradients_part.GradientsPart("gradients", lambda: [optimizer], list)
    for _ in range(2):
        loose.sum().backward()
        part.stepped(optimizer)
    assert loose._backward_hooks
    pickle.dumps(loose)
    assert not [each for each in recwarn if "hook" in str(each.message)]


def test_gradients_that_are_added_up_beside_a_scaler_come_back(make: Make) -> None:
    model, optimizer = _linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    checkpointer = make(every="0", model=model, optimizer=optimizer, scaler=scaler)
    checkpointer.restore()
    for factor in (torch.inf, 1.0):  # behind one that was left out, as behind any
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4)).sum() * factor).backward()
        if factor != 1.0:
            scaler.step(optimizer)
            scaler.update()
    assert checkpointer.save(0, level="durable") is not None
    checkpointer.flush(60)
    checkpointer.abandon()
    back, optimizer = _linear()
    assert make(every="0", model=back, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu")).restore() == 1
    for parameter, before in zip(back.parameters(), model.parameters(), strict=True):
        assert parameter.grad is not None
        assert before.grad is not None
        assert torch.equal(parameter.grad, before.grad)


def test_a_step_in_a_thread_of_torch_leaves_the_thread_that_trains_as_it_is() -> None:
    """On a device a backward pass that steps runs in one, and the thread that reports has begun it."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    part = gradients_part.GradientsPart("gradients", lambda: [optimizer], list)
    parameter.grad = torch.ones(3)
    part.stepped(optimizer)
    stepped = threading.Event()

    def steps() -> None:
        part.stepped(optimizer)
        stepped.set()

    _thread.start_new_thread(steps, ())
    assert stepped.wait(60)
    assert not part.is_elsewhere


def test_of_many_parameters_a_sample_is_looked_at_until_a_report_without_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, seen = [], gradients_part._seen
    monkeypatch.setattr(gradients_part, "SAMPLE", 5)
    monkeypatch.setattr(gradients_part, "_seen", lambda grad: looks.append(1) or seen(grad))
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(100)]
    halves = [torch.optim.SGD(parameters[:50], lr=0.1), torch.optim.SGD(parameters[50:], lr=0.1)]
    part = gradients_part.GradientsPart("gradients", lambda: halves, list)

    def turn(*optimizers: torch.optim.Optimizer) -> int:
        looks.clear()
        sum(each.sum() for each in parameters).backward()
        for optimizer in optimizers:
            optimizer.step()
            part.stepped(optimizer)
        part.note()
        found = len(part._living)
        for optimizer in optimizers:
            optimizer.zero_grad()
        return found

    for turns in range(gradients_part.FULL_EVERY + 1):
        assert turn(*halves) == 0
        assert len(looks) == (100 if turns < gradients_part.FULL_FIRST or turns == gradients_part.FULL_EVERY else 10)
    assert turn(halves[0]) >= 50, "the other half lives, and what of the first was not looked at may"
    assert turn(halves[0]) == 50
    assert turn() == 100
    assert turn(*halves) == 0


def test_where_an_object_saves_them_no_parameter_gets_a_hook() -> None:
    """Zero lines do; a hook that comes to be within the loop ends them, for a restart would not have it."""
    hooks = {}
    for off in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        part = gradients_part.GradientsPart("gradients", lambda: [optimizer], list, off=off)  # noqa: B023
        for _ in range(2):
            parameter.sum().backward()
            optimizer.step()
            part.stepped(optimizer)
            optimizer.zero_grad(set_to_none=False)
            part.note()
        hooks[off] = bool(parameter._backward_hooks)
    assert hooks == {False: True, True: False}


def test_of_each_parameter_it_is_looked_whether_the_script_clears_what_it_used() -> None:
    """Two optimizers; and within one of them a parameter that is none of the model's, so that `model.zero_grad()` passes it over."""
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(4)]
    optimizers = [torch.optim.SGD(parameters[at : at + 2], lr=0.1) for at in (0, 2)]
    part = gradients_part.GradientsPart("gradients", lambda: optimizers, list)
    for _ in range(4):
        for cleared in parameters[:3]:
            if cleared.grad is not None:
                cleared.grad.zero_()
        sum(each.sum() for each in parameters).backward()
        for optimizer in optimizers:
            optimizer.step()
            part.stepped(optimizer)
        part.note()
    assert [*part._living] == ["3"]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(("way", "lives"), [("second", True), ("zero", False), ("none", False), ("hand", False)])
def test_what_a_second_step_reads_though_no_backward_pass_has_come_to_it_lives(
    way: str, *, lives: bool, clips: bool
) -> None:
    """A part of a model that each second batch uses; and a copy in another precision, whose gradient is written by hand."""
    often, seldom = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([often, seldom], lr=0.1, momentum=0.9)
    part = gradients_part.GradientsPart("gradients", lambda: [optimizer], list)
    by_hand = torch.ones(3)
    for number in range(7):
        if way != "second" or number % 2 == 0:
            optimizer.zero_grad(set_to_none=way != "zero")
        used = often if number % 2 or way == "hand" else often + seldom
        used.sum().backward()
        if way == "hand":
            seldom.grad = by_hand
        if clips:
            torch.nn.utils.clip_grad_norm_([often, seldom], 0.5)
        optimizer.step()
        part.stepped(optimizer)
        part.note()
    assert ("1" in part._living) == lives


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("none", [False, True])
def test_what_is_read_by_clipping_alone_lives(*, clips: bool, none: bool) -> None:
    """The second optimizer makes its step, and clears, at every second turn. At the others its gradients count in the norm."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    first, second = (torch.optim.SGD([each], lr=0.1) for each in parameters)
    part = gradients_part.GradientsPart("gradients", lambda: [first, second], list)
    for turn in range(5):
        first.zero_grad()
        if turn % 2 == 0:
            second.zero_grad(set_to_none=none)
        sum(each.sum() for each in parameters[: 1 if turn % 2 else 2]).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        for optimizer in [first] if turn % 2 else [first, second]:
            optimizer.step()
            part.stepped(optimizer)
        part.note()
    assert ("1" in part._living) == clips


@pytest.mark.parametrize("clears", [False, True])
def test_what_is_frozen_before_its_second_step_and_never_cleared_lives(*, clears: bool) -> None:
    """The optimizer goes on to step it by the gradient that it has."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    part = gradients_part.GradientsPart("gradients", lambda: [optimizer], list)
    for _ in range(3):
        if clears:
            optimizer.zero_grad(set_to_none=False)
        sum(each.sum() for each in parameters).backward()
        optimizer.step()
        part.stepped(optimizer)
        part.note()
        parameters[0].requires_grad_(False)
    assert ("0" in part._living) != clears


@pytest.mark.parametrize(("way", "lives"), [("data", False), ("half", True)])
def test_what_is_written_before_the_next_backward_pass_is_cleared_only_if_it_is_zero(way: str, lives: bool) -> None:
    """`p.grad.data.zero_()` is no write that torch counts, and `p.grad.mul_(0.5)` is one that clears nothing."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    part = gradients_part.GradientsPart("gradients", lambda: [optimizer], list)
    for _ in range(4):
        if parameter.grad is not None:
            _ = parameter.grad.data.zero_() if way == "data" else parameter.grad.mul_(0.5)
        parameter.sum().backward()
        optimizer.step()
        part.stepped(optimizer)
        part.note()
    assert bool(part._living) == lives


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", ["fsdp", "buckets"])
@pytest.mark.parametrize("clears", [False, True])
def test_it_is_seen_of_a_wrapped_model_whether_the_script_clears_its_gradients(way: str, clears: bool) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    if way == "fsdp":
        fully_shard(model[0])
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State({"model": model, "optimizer": optimizer}, rank=0, world_size=1)
    state.trained()
    for _ in range(5):
        if clears:
            optimizer.zero_grad(set_to_none=False)
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        state.stepped(optimizer)
        state.gradients.note()
    assert bool(state.gradients._living) == (not clears)


def test_what_a_backward_pass_behind_the_step_gave_is_brought_back_and_not_told_as_lost(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """As of the discriminator of a GAN: the step of the generator adds to what its own step has used."""
    for begin, end in ((0, 1), (1, 4)):
        torch.manual_seed(3)
        makes, judges = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (judges, makes)]
        checkpointer: Any = make(judges=judges, makes=makes, optimizers=optimizers, every="1")
        assert checkpointer.restore() == begin
        for number in range(begin, end):
            for optimizer, sign in zip(optimizers, (1, -2), strict=True):
                optimizer.zero_grad(set_to_none=False)
                made = makes(torch.ones(2, 4))
                judges(made.detach() if sign > 0 else made).square().mean().mul(sign).backward()
                optimizer.step()
            checkpointer.step(number)
        checkpointer.close()
    assert "does not clear" not in caplog.text.replace("this script does not clear gradients that", "")


def weights_of_losses(make: Make, at: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A run of a model beside which the optimizer has weights of losses, and one that restarts behind step `at`."""
    ends = []
    for kills in (False, True):
        lives = [(0, at + 1), (at + 1, 12)] if kills else [(0, 12)]
        for begin, end in lives:
            torch.manual_seed(3)
            model, weights = torch.nn.Linear(8, 2), torch.nn.Parameter(torch.zeros(2))
            optimizer = torch.optim.AdamW([*model.parameters(), weights], lr=0.1)
            checkpointer: Any = make(model=model, weights={"weights": weights}, optimizer=optimizer, every="1")
            assert not kills or checkpointer.restore() == begin
            for number in range(begin, end):
                model.zero_grad()
                losses = model(torch.full((4, 8), float(number % 5))).square().mean(0)
                ((-weights).exp() * losses + weights).sum().backward()
                optimizer.step()
                if kills:
                    checkpointer.step(number)
            checkpointer.close()
        ends.append([each.detach() for each in (*model.parameters(), weights)])
    return ends[0], ends[1]


@MORE
@pytest.mark.parametrize("at", [3, 6])
def test_what_a_script_never_clears_beside_what_it_clears_lives_on(make: Make, at: int) -> None:
    whole, again = weights_of_losses(make, at)
    assert all(map(torch.equal, whole, again))


@MORE
def test_a_version_of_before_it_was_known_that_a_gradient_is_never_cleared_is_told(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    whole, again = weights_of_losses(make, 0)
    assert not all(map(torch.equal, whole, again))
    assert caplog.text.count("does not clear the gradient of weights.weights") == 1


@pytest.mark.parametrize("is_cleared", sampled([False, True], False))
def test_torch_may_swap_other_tensors_into_the_place_of_gradients_and_parameters(
    make: Make, *, is_cleared: bool
) -> None:
    """As `to` of a module does with `DTensor`, so of each model of `fully_shard`: it refuses what somebody refers to weakly."""
    model = torch.nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    checkpointer = make(model=model, optimizer=optimizer)
    checkpointer.restore()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for step in range(8):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            if is_cleared:
                optimizer.zero_grad(set_to_none=False)
            checkpointer.step(step)
            if not is_cleared or step > 5:  # where they lie is known by then
                model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    checkpointer.save(7).wait("captured")
    checkpointer.abandon()


def test_a_parameter_that_no_optimizer_steps_is_followed_where_another_one_takes_its_place(make: Make) -> None:
    model = torch.nn.Linear(3, 3)
    checkpointer: Any = make(model=model, optimizer=torch.optim.SGD([model.weight], lr=0.1))
    checkpointer.restore()
    model.load_state_dict({name: value + 1.0 for name, value in model.state_dict().items()}, assign=True)
    gradients = checkpointer._run.state.gradients
    assert any(each is model.bias for each in gradients._parameters().values())
    del model.bias
    assert len(gradients._parameters()) == 1
    checkpointer.abandon()


def test_a_copy_of_a_gradient_that_was_used_up_lives(make: Make) -> None:
    """It has the attributes of what it was copied from."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer: Any = make(model=model, optimizer=optimizer)
    checkpointer.restore()
    model(torch.ones(3)).sum().backward()
    torch.nn.utils.clip_grad_value_([model.bias], 0.5)
    optimizer.step()
    model.bias.grad = copy.deepcopy(model.bias.grad)
    assert model.bias.grad is not None
    model.bias.grad.mul_(0.5)
    gradients = checkpointer._run.state.gradients
    gradients.note()
    assert [parameter is model.bias for parameter, _ in gradients._living.values()] == [True]
    checkpointer.abandon()


@pytest.mark.parametrize("clear", sampled(["never", "second", "behind", "before"], "never"))
@pytest.mark.parametrize("ends", [pytest.param((2, 3), marks=MORE), pytest.param((2, 3, 5), marks=MORE), (2, 4, 5)])
def test_what_a_version_lacked_is_told_also_by_those_that_were_saved_before_it_was_known(
    make: Make, caplog: pytest.LogCaptureFixture, ends: tuple[int, ...], clear: str
) -> None:
    """The first one lacks what a step has used; what was added up behind it lives in the next one, without that."""
    whole = Loop(turns=2, clear=clear).run(0, 12)
    begin = 0
    for end in (*ends, 12):
        checkpointer = (again := Loop(turns=2, clear=clear)).kept(make)
        found = checkpointer.last_restore.version
        assert (found.step + 1 if found is not None else 0) == begin
        ended = again.run(begin, end, checkpointer)
        checkpointer._run.last.wait("captured", 60)
        checkpointer.abandon()
        begin = end
    is_equal = clear in ("behind", "before")
    assert all(map(torch.equal, ended, whole)) == is_equal
    assert caplog.text.count("does not clear the gradient of") == (not is_equal)
