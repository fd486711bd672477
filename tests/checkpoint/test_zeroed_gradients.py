"""Gradients that are set to zero in place behind each step: a report reads few bytes of them, and finds what lives all the same."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint.entries import living_gradients, zeroed_gradients
from holdfast.checkpoint.entries.gradients_part import GradientsPart
from holdfast.checkpoint.entries.zeroed_gradients import FULL_FIRST, IN_TURN, ZeroedGradients
from holdfast.checkpoint.state.training_state import State
from state_kit import restore, save

ROWS, WIDTH = 512, 64
END = 2048
MIDDLE = END // (4 * WIDTH)  # the first row behind the first bytes


class Words(torch.nn.Module):
    """An embedding, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = torch.nn.Embedding(ROWS, WIDTH)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Sequence[int]) -> torch.Tensor:
        return self.layer(self.table(torch.tensor(rows))).square().sum()


class Script:
    """A training that clears in place behind its step and reports."""

    def __init__(self) -> None:
        self.words = Words()
        self.optimizer = torch.optim.SGD(self.words.parameters(), lr=0.1)
        self.part = GradientsPart("gradients", lambda: [self.optimizer], lambda: [self.words])
        named = {id(p): SimpleNamespace(entry=name) for name, p in self.words.named_parameters()}
        out: Any = SimpleNamespace(owners=named)
        self.part.build(out)
        self.optimizer.register_step_post_hook(lambda *_: self.part.stepped(self.optimizer))

    def steps(self, *rows: int) -> None:
        self.words(rows).backward()
        self.optimizer.step()

    def clears(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def reports(self) -> bool:
        """Returns whether a gradient was found that lives."""
        self.part.note()
        return bool(self.part._living)

    def goes_on(self, reports: int) -> None:
        for number in range(reports):
            self.steps(0, MIDDLE + number, ROWS - 1)
            self.clears()
            assert not self.reports()


def adds(script: Script) -> None:
    script.words.table(torch.tensor([MIDDLE + 9])).sum().backward()


def clears_and_adds(script: Script) -> None:
    script.clears()
    adds(script)


def clears_the_first_rows(script: Script) -> None:
    script.words.layer.zero_grad(set_to_none=False)
    grad = script.words.table.weight.grad
    assert grad is not None
    grad[:MIDDLE].zero_()


@pytest.mark.parametrize(
    ("rows", "behind"),
    [
        ([MIDDLE], adds),
        ([0, MIDDLE, ROWS - 1], clears_and_adds),
        ([0, MIDDLE, ROWS - 1], clears_the_first_rows),
        ([0, MIDDLE], clears_the_first_rows),
    ],
)
def test_what_lives_between_the_ends_is_found(rows: list[int], behind: Callable[[Script], None]) -> None:
    script = Script()
    script.goes_on(FULL_FIRST + 3)
    script.steps(*rows)
    behind(script)
    assert script.reports()


def test_until_the_first_looks_have_found_zero_all_is_read() -> None:
    """One write makes both ends zero, and leaves numbers between."""
    script = Script()
    script.goes_on(FULL_FIRST - 1)
    script.steps(0, MIDDLE, ROWS - 1)
    script.words.layer.zero_grad(set_to_none=False)
    grad = script.words.table.weight.grad
    assert grad is not None
    grad.masked_fill_((torch.arange(ROWS) != MIDDLE)[:, None], 0.0)
    assert script.reports()


def test_where_one_lives_all_of_the_others_is_read() -> None:
    """Both ends of the table are cleared in one write, and the gradient of the layer is not."""
    script = Script()
    script.goes_on(FULL_FIRST + 3)
    script.steps(0, MIDDLE, ROWS - 1)
    for parameter in script.words.parameters():
        grad = parameter.grad
        assert grad is not None
        grad.index_fill_(0, torch.tensor([0, len(grad) - 1]), 0.0)
    assert script.reports()
    assert "0" in script.part._living


def test_a_write_that_torch_does_not_count_is_found_when_its_turn_comes() -> None:
    script, found = Script(), 0
    script.goes_on(FULL_FIRST + 3)
    for _ in range(IN_TURN):
        script.steps(0, MIDDLE, ROWS - 1)
        script.clears()
        grad = script.words.table.weight.grad
        assert grad is not None
        grad.numpy()[MIDDLE] = 1.0
        found += script.reports()
    assert found


def test_where_all_is_cleared_a_report_reads_two_ends_and_all_of_each_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, read = Script(), list[int]()
    same_memory = living_gradients.same_memory

    def counted(one: int, other: int | bytes, num_bytes: int) -> bool:
        read.append(num_bytes)
        return same_memory(one, other, num_bytes)

    whole = sum(parameter.nbytes for parameter in script.words.parameters())
    script.goes_on(FULL_FIRST)
    monkeypatch.setattr(living_gradients, "same_memory", counted)
    sums = list[int]()
    for number in range(IN_TURN):
        script.steps(0, MIDDLE + number, ROWS - 1)
        script.clears()
        read.clear()
        assert not script.reports()
        sums.append(sum(read))
    assert sorted(sums)[IN_TURN // 2] <= 6 * END < whole / 10
    assert sum(sums[FULL_FIRST:]) < 2 * whole + IN_TURN * 6 * END


def _clears(script: Script, reports: int, behind: Callable[[torch.Tensor], object] | None) -> list[bool]:
    """Returns of each report whether it has the names of gradients that are zero."""
    found = []
    for _ in range(reports):
        script.steps(0, ROWS - 1)
        for parameter in script.words.parameters():
            if behind is None:
                parameter.grad = None
            else:
                assert parameter.grad is not None
                behind(parameter.grad)
        script.part.note()
        found.append(bool(script.part._zero))
    return found


@pytest.mark.parametrize("behind", [lambda grad: grad.data.zero_(), lambda grad: grad.zero_()])
def test_a_script_that_begins_to_clear_in_place_is_followed(behind: Callable[[torch.Tensor], object]) -> None:
    """The first write is none that torch counts, as are those of `fully_shard`'s gradients."""
    script = Script()
    assert _clears(script, 1, None) == [False]
    assert _clears(script, 1, behind) == [True]
    script = Script()
    assert not any(_clears(script, 9, None))
    assert all(_clears(script, 9, behind)[1:])


def replaces(parameter: torch.Tensor, _: int) -> None:
    parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)


def clears_by_turns(parameter: torch.Tensor, turn: int) -> None:
    if turn % 2:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad.zero_()


def clears_to_none(parameter: torch.Tensor, _: int) -> None:
    parameter.grad = None


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("clears", "reached", "is_there"),
    [
        (replaces, "each", True),
        (replaces, "seldom", True),
        (clears_by_turns, "each", True),
        (clears_to_none, "each", False),
        (clears_to_none, "seldom", False),
    ],
)
def test_a_gradient_comes_back_as_zero_where_the_script_leaves_one(
    clears: Callable[[torch.Tensor, int], None], reached: str, *, is_there: bool, clips: bool
) -> None:
    """The step of this version has used it, and the next turn clears it before its backward pass, which need not come to it."""
    parameter, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter, other], lr=0.1)
    part = GradientsPart("gradients", lambda: [optimizer], list)
    named: Any = SimpleNamespace(owners={id(parameter): SimpleNamespace(entry="it")})
    part.build(named)
    for turn in range(12):
        for each in (parameter, other):
            clears(each, turn)
        is_reached = reached == "each" or turn % 3 == 0
        (parameter.square() + other if is_reached else other).sum().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_([parameter, other], 0.5)
        optimizer.step()
        part.stepped(optimizer)
        part.note()
        # What a backward pass has made anew, and nobody has written to, asks for no look.
        assert clips or is_there or not parameter._backward_hooks
        if turn > 2 and parameter.grad is not None:
            assert bool(part._zero) == is_there, turn


@pytest.mark.parametrize("synced", [False, True])
def test_what_ddp_has_noted_of_an_accumulation_is_told_as_lost(
    caplog: pytest.LogCaptureFixture, *, synced: bool
) -> None:
    """Without it, a parameter that no backward pass behind a restart comes to keeps the gradient of its own rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(4, 2), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = State({"model": model, "optimizer": optimizer}, rank=0, world_size=1)
        with contextlib.nullcontext() if synced else model.no_sync():
            model(torch.ones(3, 4)).sum().backward()
        state.gradients.note()
        restore(state, save(state))
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert ("its ranks differ" in caplog.text) == (not synced)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ends", [False, True])
def test_a_gradient_that_another_thread_takes_away_is_there_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    """Its memory would be gone, and the process end."""
    parameter, there = torch.nn.Parameter(torch.zeros(4096)), list[bool]()
    parameter.grad = torch.zeros(4096)
    held = weakref.ref(parameter.grad)

    def take_away(*_: object) -> tuple[bool, bool]:
        parameter.grad = None
        there.append(held() is not None)
        return True, True

    if ends:
        found = ZeroedGradients()
        found._proven[id(parameter)] = FULL_FIRST
        monkeypatch.setattr(zeroed_gradients._Ends, "are_zero", take_away)
        found.used((id(p), p, p.grad, 0) for p in [parameter] if p.grad is not None)
    else:
        monkeypatch.setattr(living_gradients, "same_memory", take_away)
        living_gradients.is_zero(parameter)
    assert there
    assert all(there)
    assert held() is None
