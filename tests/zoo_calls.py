"""Everyday calls around a save: what scripts do between a save and the next step, or in its place.

Each is run while the copy of a save is under way. Where it makes the state another one by name or shape, it says how a
script that starts anew gets there too (`rebuild`).
"""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from holdfast.base.errors import HoldfastError, KeeperLost
from zoo_states import World

WAIT_S = 20.0


@dataclass
class Saved:
    """One call of `save`: what it returned, and the digest of the state taken right before it, in the same thread."""

    handle: Any
    path: str
    expected: dict[str, str]
    rebuilt: bool


class Run:
    """A script under way: what it trains, and the saves that it made."""

    def __init__(self, world: World, another: Callable[[str], Any], path: str) -> None:
        self.world = world
        self.another = another
        self.path = path
        self.checkpointer = another(path)
        self.saves: list[Saved] = []
        self.number = 0
        self.rebuilt = False

    @property
    def model(self) -> nn.Module:
        return self.world.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.world.optimizers[0]

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters that have a direction: no empty and no complex ones."""
        return [p for p in self.model.parameters() if p.numel() and p.is_floating_point()]

    def train(self) -> None:
        self.world.train()
        self.number += 1

    def save(
        self, level: str = "durable", *, by: Any = None, path: str = "", during: Callable[[], None] | None = None
    ) -> Any:
        """Saves; `during` is called in the middle, when the save asks an object for its state."""
        expected = self.world.fingerprint()
        self.world.probe.during = during
        handle = (by or self.checkpointer).save(self.number, level)
        path = path or self.path
        if not any(s.path == path and s.handle.version == handle.version for s in self.saves):
            self.saves.append(Saved(handle, path, expected, self.rebuilt))
        return handle

    def kept(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def back(self, kept: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for p, before in zip(self.model.parameters(), kept, strict=True):
                p.copy_(before)

    def grads(self) -> None:
        for p in self.params:
            p.grad = torch.ones_like(p)


Oddity = Callable[[Run], None]


@dataclass(frozen=True)
class Call:
    """One everyday call.

    Attributes:
        does: is run between a save and the next step.
        harmless: writes nothing outside of an optimizer's step, so every save is captured.
        rebuild: what makes a fresh world look as the saves after it do.
        verified: writes a few elements past torch's counts, which only `verify_capture` always finds.
    """

    name: str
    does: Oddity
    harmless: bool
    rebuild: Callable[[World], None] | None
    verified: bool


CALLS: dict[str, Call] = {}


def call(
    *, harmless: bool = False, rebuild: Callable[[World], None] | None = None, verified: bool = False
) -> Callable[[Oddity], Oddity]:
    def add(does: Oddity) -> Oddity:
        CALLS[does.__name__] = Call(does.__name__, does, harmless, rebuild, verified)
        return does

    return add


def aside(*works: Callable[[], Any]) -> list[threading.Thread]:
    """Runs each in a thread of its own, as a script does that has no time to wait."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a thread of the script waits for ever"


def quiet(work: Callable[[], Any]) -> Callable[[], Any]:
    """Whoever waits in a thread may be told that a version was given up."""

    def run() -> None:
        try:
            work()
        except HoldfastError:
            pass

    return run


# --- waiting, in this thread and in others


@call(harmless=True)
def nothing(run: Run) -> None:
    """The plain loop."""


@call(harmless=True)
def wait_in_a_thread(run: Run) -> None:
    threads = aside(quiet(lambda: run.saves[-1].handle.wait("captured", WAIT_S)))
    run.train()
    joined(threads)


@call(harmless=True)
def flush_in_a_thread(run: Run) -> None:
    threads = aside(quiet(lambda: run.checkpointer.flush(WAIT_S)))
    run.train()
    joined(threads)


@call(harmless=True)
def settle_in_a_thread(run: Run) -> None:
    threads = aside(run.checkpointer.settle, run.checkpointer.settle)
    run.train()
    joined(threads)


@call(harmless=True)
def three_waits_at_once(run: Run) -> None:
    handle = run.saves[-1].handle
    threads = aside(
        quiet(lambda: handle.wait("captured", WAIT_S)), run.checkpointer.settle, quiet(run.checkpointer.flush)
    )
    run.train()
    run.save()
    run.train()
    joined(threads)


@call(harmless=True)
def wait_in_a_pool(run: Run) -> None:
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(quiet(lambda: run.saves[-1].handle.wait(timeout_s=WAIT_S))) for _ in range(3)]
        run.train()
        for wait in waits:
            wait.result(WAIT_S)


@call(harmless=True)
def wait_in_asyncio(run: Run) -> None:
    async def both() -> None:
        waiting = asyncio.create_task(asyncio.to_thread(quiet(lambda: run.saves[-1].handle.wait("captured", WAIT_S))))
        await asyncio.sleep(0)
        run.train()
        await waiting

    asyncio.run(both())


@call(harmless=True)
def wait_before_the_step(run: Run) -> None:
    run.saves[-1].handle.wait("captured", WAIT_S)


@call(harmless=True)
def asks_the_keeper(run: Run) -> None:
    run.checkpointer.keeper_status()
    assert run.saves[-1].handle.reached is not None
    repr(run.saves[-1].handle)


@call(harmless=True)
def flush_then_train(run: Run) -> None:
    run.checkpointer.flush(WAIT_S)
    run.train()


# --- weights that are swapped or written


@call()
def data_swapped(run: Run) -> None:
    kept = run.kept()
    for p in reversed(run.params):
        p.data.fill_(7.0)
    run.back(kept)


@call()
def swapped_and_waited(run: Run) -> None:
    """Evaluation with other weights, and only then a look at the save."""
    kept = run.kept()
    for p in reversed(run.params):
        p.data.fill_(7.0)
    quiet(lambda: run.saves[-1].handle.wait("captured", WAIT_S))()
    run.back(kept)


@call(harmless=True)
def swapped_after_settle(run: Run) -> None:
    run.checkpointer.settle()
    data_swapped(run)


@call()
def swapped_for_the_next_save(run: Run) -> None:
    """Evaluation ends behind the next save: the averaged weights are in it, as they were at its call."""
    kept = run.kept()
    for p in run.params:
        p.data.mul_(0.5)
    run.number += 1
    run.save()
    run.back(kept)


@call()
def swapped_under_no_grad(run: Run) -> None:
    kept = run.kept()
    with torch.no_grad():
        for p in run.params:
            p.copy_(torch.zeros_like(p))
    run.back(kept)


@call()
def pointer_swapped(run: Run) -> None:
    kept = [p.data for p in run.params]
    for p in run.params:
        p.data = torch.zeros_like(p)
    run.world.model(run.world.batch())
    for p, before in zip(run.params, kept, strict=True):
        p.data = before


@call()
def foreach_written(run: Run) -> None:
    torch._foreach_add_([p.data for p in run.params], 1.0)


@call(verified=True)
def one_element_written(run: Run) -> None:
    for p in run.params[::-1]:
        p.data[(p.shape[0] // 2,) if p.dim() else ()] += 1


@call()
def rows_written(run: Run) -> None:
    with torch.no_grad():
        for p in run.params:
            (p[:1] if p.dim() else p).add_(1)


@call()
def written_through_numpy(run: Run) -> None:
    for p in run.params:
        if p.dtype in (torch.float32, torch.float64):
            p.detach().numpy()[...] = 3.0


@call()
def tensors_swapped(run: Run) -> None:
    for p in run.params[:2]:
        if not any(p is q for group in run.optimizer.param_groups for q in group["params"]):
            continue
        with torch.no_grad():
            other = nn.Parameter(torch.zeros_like(p))
        p.data, other.data = other.data, p.data


@call()
def a_vector_of_all(run: Run) -> None:
    with torch.no_grad():
        for p in run.params:
            p.set_(torch.rand_like(p))


@call()
def clipped_before_the_step(run: Run) -> None:
    for p in run.params:
        p.data.clamp_(-0.01, 0.01)


@call()
def clipped_after_the_step(run: Run) -> None:
    run.train()
    with torch.no_grad():
        for p in run.params:
            p.clamp_(-0.01, 0.01)
    run.save()
    run.train()


@call()
def best_weights_loaded(run: Run) -> None:
    run.model.load_state_dict(
        {k: v.clone() + 1 if v.is_floating_point() else v for k, v in run.model.state_dict().items()}
    )


@call()
def weights_assigned(run: Run) -> None:
    """`assign=True` makes new parameters, which the optimizers do not know: a script then builds them anew."""
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))


@call()
def optimizer_loaded(run: Run) -> None:
    for optimizer in run.world.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@call()
def moments_reset(run: Run) -> None:
    for optimizer in run.world.optimizers:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if torch.is_tensor(value) and value.dim():
                    value.data.zero_()


@call()
def moments_thrown_away(run: Run) -> None:
    if type(run.optimizer) in (torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.SGD):
        run.optimizer.state.clear()


@call()
def ema_by_hand(run: Run) -> None:
    """store(), copy_to(), evaluate, restore(): as diffusers and timm write it."""
    shadow = [p.detach() * 0.5 for p in run.model.parameters()]
    stored = run.kept()
    for p, s in zip(run.model.parameters(), shadow, strict=True):
        p.data.copy_(s.data)
    run.model.eval()
    with torch.no_grad():
        run.model(run.world.batch())
    run.model.train()
    for p, s in zip(run.model.parameters(), stored, strict=True):
        p.data.copy_(s.data)


@call(harmless=True)
def ema_only_kept(run: Run) -> None:
    shadow = run.kept()
    run.train()
    with torch.no_grad():
        for s, p in zip(shadow, run.model.parameters(), strict=True):
            s.mul_(0.9).add_(p, alpha=0.1)


@call(harmless=True)
def torch_averages(run: Run) -> None:
    average = AveragedModel(run.model)
    run.train()
    average.update_parameters(run.model)
    average.eval()(run.world.batch())


@call()
def averaged_weights_swapped_in(run: Run) -> None:
    average = AveragedModel(run.model)
    run.train()
    average.update_parameters(run.model)
    run.save()
    kept = run.kept()
    with torch.no_grad():
        for p, a in zip(run.model.parameters(), average.module.parameters(), strict=True):
            p.copy_(a)
    run.back(kept)


@call()
def stochastic_averages(run: Run) -> None:
    average = AveragedModel(run.model)
    rates = SWALR(run.optimizer, swa_lr=0.005) if "lr" in run.optimizer.param_groups[0] else None
    run.train()
    average.update_parameters(run.model)
    if rates is not None:
        rates.step()
    if all(p.dtype == torch.float32 for p in run.params) and all(p.dim() < 4 for p in run.params):
        update_bn([run.world.batch() for _ in range(2)], average)


def _there_and_back(run: Run, *, counted: bool) -> None:
    """`optimizer.eval()` and `.train()` of schedule-free, which come back to the same weights but for rounding."""
    with torch.no_grad():
        for weight in (1 - 1 / 0.9, 1 - 0.9):
            for p in run.params:
                other = run.optimizer.state.get(p, {}).get("z", torch.zeros_like(p))
                (p if counted else p.data).lerp_(other, weight)


@call()
def schedule_free_modes(run: Run) -> None:
    _there_and_back(run, counted=True)


@call(verified=True)
def schedule_free_modes_past_the_counts(run: Run) -> None:
    """Afterwards only some elements differ, by their last bit."""
    _there_and_back(run, counted=False)


@call()
def target_network(run: Run) -> None:
    """Soft updates in the wrong direction: from the target into the network that is saved."""
    target = copy.deepcopy(run.model)
    run.train()
    run.save()
    with torch.no_grad():
        for p, t in zip(run.model.parameters(), target.parameters(), strict=True):
            p.data.mul_(0.9).add_(t.data, alpha=0.1)


@call()
def gradient_free(run: Run) -> None:
    """Evolution strategies: no optimizer steps at all."""
    for _ in range(3):
        with torch.no_grad():
            for p in run.params:
                p.add_(torch.randn_like(p), alpha=0.01)
        run.number += 1
        run.save()


@call()
def codebook_reset_in_forward(run: Run) -> None:
    def reset(*_: Any) -> None:
        run.params[-1].data.fill_(0.25)

    hook = run.model.register_forward_pre_hook(reset)
    run.world.backward()
    run.world.step()
    hook.remove()
    run.number += 1


def _convert(world: World) -> None:
    """Buffers that shared memory do so no more."""
    if all(p.dtype == torch.float32 for p in world.model.parameters()):
        world.model.half()
        world.model.float()


@call(rebuild=_convert)
def half_and_back(run: Run) -> None:
    _convert(run.world)
    run.rebuilt = True


@call(harmless=True)
def half_copy(run: Run) -> None:
    copy.deepcopy(run.model).half()
    run.train()


@call()
def shared_with_workers(run: Run) -> None:
    """Moves the parameters into shared memory, under the feet of the copy."""
    if not any(b.is_conj() for b in run.model.buffers()):
        run.model.share_memory()


@call()
def memory_thrown_away(run: Run) -> None:
    for p in run.params:
        p.data = p.data.clone()
    gc.collect()
    trash = [torch.full((4096,), 9.0) for _ in range(50)]
    assert trash


# --- optimizers and hooks


@call()
def second_optimizer(run: Run) -> None:
    run.grads()
    torch.optim.Adagrad(run.params[::-1], lr=0.1).step()


@call()
def optimizer_replaced(run: Run) -> None:
    successor = torch.optim.SGD(run.params[::-1], lr=0.01)
    for _ in range(2):
        run.grads()
        successor.step()
        run.number += 1
        run.save()


@call(harmless=True)
def optimizer_of_others(run: Run) -> None:
    stranger = nn.Parameter(torch.ones(3))
    stranger.grad = torch.ones(3)
    torch.optim.SGD([stranger], lr=1.0).step()


@call()
def lbfgs(run: Run) -> None:
    params = [p for p in run.params if p.dtype == torch.float32 and p.is_contiguous()]
    if not params:
        return

    def closure() -> torch.Tensor:
        loss = sum((p.square().sum() for p in params), torch.tensor(0.0))
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g
        return loss

    torch.optim.LBFGS(params, max_iter=3, line_search_fn="strong_wolfe").step(closure)
    for p in params:
        p.grad = None


@call()
def closure_that_saves(run: Run) -> None:
    """A closure is called in the middle of the step; what it saves is the state in the middle of the step."""
    params = [p for p in run.params if p.dtype == torch.float32 and p.is_contiguous()]
    if not params:
        return

    def closure() -> torch.Tensor:
        loss = sum((p.square().sum() for p in params), torch.tensor(0.0))
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g
        run.number += 1
        run.save()
        return loss

    torch.optim.LBFGS(params, max_iter=3).step(closure)
    for p in params:
        p.grad = None


@call()
def post_hook_that_saves(run: Run) -> None:
    """Trainers that save in a hook behind the step, while an outer step still writes."""

    def save(*_: Any) -> None:
        run.number += 1
        run.save()
        for p in run.params:  # what a wrapper's step does behind that of the optimizer inside
            p.data.mul_(0.5)

    hook = run.optimizer.register_step_post_hook(save)
    run.world.train()
    hook.remove()


@call()
def pre_hook_that_writes(run: Run) -> None:
    """A hook of the user's may be called before ours."""
    hook = run.optimizer.register_step_pre_hook(lambda *_: [p.data.mul_(0.9) for p in run.params] and None)
    run.train()
    hook.remove()


@call()
def post_hook_that_clips(run: Run) -> None:
    hook = run.optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-1, 1) for p in run.params] and None)
    run.train()
    run.save()
    run.train()
    hook.remove()


@call()
def step_in_backward(run: Run) -> None:
    """One optimizer per parameter, stepped as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in run.params}

    def step(p: Any) -> None:
        optimizers[p].step()
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(step) for p in run.params]
    run.world.backward()
    run.number += 1
    run.save()
    run.world.backward()
    for hook in hooks:
        hook.remove()
    run.model.zero_grad()


@call(harmless=True)
def state_dict_hooks(run: Run) -> None:
    seen: list[int] = []
    hooks = [
        run.model.register_state_dict_post_hook(lambda *_: seen.append(1)),
        run.model.register_state_dict_pre_hook(lambda *_: seen.append(2)),
    ]
    run.model.state_dict()
    run.train()
    for hook in hooks:
        hook.remove()
    assert seen


@call(harmless=True)
def gradients_only(run: Run) -> None:
    run.world.backward()
    torch.nn.utils.clip_grad_norm_(run.params, 1.0)
    run.model.zero_grad(set_to_none=False)
    run.world.backward()
    run.model.zero_grad(set_to_none=True)
    run.train()


@call(harmless=True)
def accumulates(run: Run) -> None:
    for _ in range(3):
        run.world.backward()
    run.world.step()
    run.number += 1


@call(harmless=True)
def rates_before_the_step(run: Run) -> None:
    """lr in the groups is a value: it is kept at the call."""
    for group in run.optimizer.param_groups:
        if "lr" in group:
            group["lr"] *= 0.5
    run.train()


@call(harmless=True)
def scheduler_twice(run: Run) -> None:
    scheduler = run.world.objects.get("scheduler")
    run.train()
    if scheduler is not None:
        scheduler.step()
    run.save()


@call(harmless=True)
def scaler_that_skips(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if any(p.dtype != torch.float32 for p in run.params) or len(run.world.optimizers) > 1:
        return
    run.world.backward()
    scaler.scale(torch.ones(()))
    for p in run.params:
        if p.grad is not None:
            p.grad.fill_(float("inf"))
            break
    scaler.step(run.optimizer)
    scaler.update()
    run.optimizer.zero_grad()
    run.number += 1
    run.save()


def _add_group(world: World) -> None:
    extra = nn.Parameter(torch.zeros(3, 2))
    world.model.register_parameter("late_one", extra)
    world.optimizers[0].add_param_group({"params": [extra]})


@call(rebuild=_add_group)
def group_added(run: Run) -> None:
    if (
        "averaged" not in run.world.objects
        and isinstance(run.optimizer, torch.optim.SGD | torch.optim.Adam | torch.optim.NAdam)
        and not hasattr(run.optimizer, "slow")
    ):
        _add_group(run.world)
        run.rebuilt = True


def _add_buffer(world: World) -> None:
    world.model.register_buffer("late_buffer", torch.zeros(4))


@call(rebuild=_add_buffer)
def buffer_added(run: Run) -> None:
    if "averaged" not in run.world.objects:
        _add_buffer(run.world)
        run.rebuilt = True
        run.model.late_buffer.add_(1)


@call()
def frozen_and_back(run: Run) -> None:
    for p in run.params[:1]:
        p.requires_grad_(False)
    run.train()
    run.save()
    for p in run.params[:1]:
        p.requires_grad_(True)
    run.train()


@call()
def pruned(run: Run) -> None:
    layers = [m for m in run.model.modules() if type(m) is nn.Linear and m.weight.dtype == torch.float32]
    if (
        layers and "averaged" not in run.world.objects
    ):  # it puts the weight behind the bias, which averages do not follow
        prune.l1_unstructured(layers[0], "weight", 0.5)
        prune.remove(layers[0], "weight")


@call()
def parametrized_for_a_while(run: Run) -> None:
    layer = nn.Linear(3, 3)
    parametrizations.weight_norm(layer)
    parametrize.remove_parametrizations(layer, "weight")
    run.train()


# --- saves, at odd moments


@call(harmless=True)
def saved_twice(run: Run) -> None:
    again = run.save()
    assert again is None or again is run.saves[-1].handle
    run.train()
    run.save("captured")
    run.save("durable")


@call(harmless=True)
def saved_without_a_step(run: Run) -> None:
    for _ in range(3):
        run.number += 1
        run.save()


@call(harmless=True)
def saved_in_a_thread(run: Run) -> None:
    run.train()
    joined(aside(run.save))
    run.train()


@call(harmless=True)
def trained_in_a_thread(run: Run) -> None:
    joined(aside(run.train))
    run.save()
    joined(aside(run.train))


@call()
def training_goes_on_while_another_saves(run: Run) -> None:
    """Nothing orders the two: the version is some state between two steps, and the digest cannot tell which."""
    begin = threading.Event()

    def steps() -> None:
        begin.wait(WAIT_S)
        for _ in range(3):
            run.world.train()

    threads = aside(steps)
    begin.set()
    joined(threads)
    run.number += 1


@call()
def closed_in_a_thread(run: Run) -> None:
    threads = aside(run.checkpointer.close)
    run.world.train()
    joined(threads)
    run.checkpointer = run.another(run.path)
    run.number = run.checkpointer.restore()


@call()
def left_and_taken_up(run: Run) -> None:
    run.saves[-1].handle.wait("captured", WAIT_S)
    run.checkpointer.abandon()
    run.world.train()
    run.checkpointer = run.another(run.path)
    run.number = run.checkpointer.restore()


@call(harmless=True)
def gone_back(run: Run) -> None:
    """The same Checkpointer restores in the middle of training."""
    run.saves[-1].handle.wait("captured", WAIT_S)
    run.train()
    try:
        run.number = run.checkpointer.restore()
    except KeeperLost:  # it died meanwhile; a restart finds the next one
        run.number = run.checkpointer.restore()


@call()
def left_by_an_exception(run: Run) -> None:
    try:
        with run.checkpointer:
            run.world.train()
            raise ValueError("of the script")
    except ValueError:
        pass
    run.checkpointer = run.another(run.path)
    run.number = run.checkpointer.restore()


@call(harmless=True)
def two_checkpointers(run: Run) -> None:
    path = run.path + ".second"
    second = run.another(path)
    second.restore(fresh=True)
    for _ in range(2):
        run.save(by=second, path=path)
        run.train()
        run.save()
    second.flush(WAIT_S)


@call()
def interrupted_save(run: Run) -> None:
    """Ctrl-C in the middle of a save, while it asks an object for its state."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    run.train()
    with pytest.raises(KeyboardInterrupt):
        run.save(during=interrupt)
    run.number += 1


@call(harmless=True)
def interrupted_wait(run: Run) -> None:
    """Ctrl-C in the step, most likely while it waits for the copy."""
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    timer = threading.Timer(0.01, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    try:
        timer.start()
        run.world.backward()
        run.world.step()
        timer.join()
    except KeyboardInterrupt:
        pass
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    run.model.zero_grad()
    run.number += 1


@call(harmless=True)
def saved_by_a_signal_at_the_fence(run: Run) -> None:
    """A handler that saves, as schedulers send SIGUSR1 before they preempt; it comes while the step waits for the copy."""
    main = threading.main_thread().ident
    assert main is not None

    def handle(*_: Any) -> None:
        run.number += 1
        run.save()

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.01, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    try:
        timer.start()
        run.world.backward()
        for optimizer in run.world.optimizers[-1:]:
            optimizer.step()
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    run.model.zero_grad()
    run.number += 1


@call()
def saved_by_a_signal_in_a_save(run: Run) -> None:
    """The handler comes while a save asks an object for its state."""
    came: list[int] = []

    def handle(*_: Any) -> None:
        came.append(run.number)
        run.number += 1
        run.save()

    run.train()
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        run.save(during=lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(came) == 1
    run.number += 1


@call(harmless=True)
def exception_in_forward(run: Run) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("bad batch")

    hook = run.model.register_forward_pre_hook(fails)
    try:
        run.world.backward()
    except ValueError:
        pass
    hook.remove()
    run.train()


@call()
def exception_in_the_step(run: Run) -> None:
    """Half of the parameters are stepped; the script catches, saves and goes on."""

    def fails(*_: Any) -> None:
        raise ValueError("of the script")

    hook = run.optimizer.register_step_post_hook(fails)
    run.world.backward()
    try:
        run.world.step()
    except ValueError:
        pass
    hook.remove()
    run.number += 1
    run.save()
    for p in run.params:
        p.data.add_(1.0)


# --- other processes, copies of objects


@call(harmless=True)
def forked(run: Run) -> None:
    child = os.fork()
    if child == 0:
        try:
            for p in run.params:
                p.data.fill_(9.0)
            run.optimizer.step()
        finally:
            os._exit(0)
    run.train()
    assert psutil.Process(child).wait(WAIT_S) == 0


@call(harmless=True)
def deep_copied(run: Run) -> None:
    twin = copy.deepcopy(run.model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
    for p in twin.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    copy.deepcopy(run.optimizer)


@call(harmless=True)
def torch_saved(run: Run) -> None:
    buffer = io.BytesIO()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, buffer)
    pickle.dumps(run.model.state_dict())
    run.train()


@call(harmless=True)
def called_with_other_weights(run: Run) -> None:
    with torch.no_grad():
        torch.func.functional_call(run.model, {n: p * 2 for n, p in run.model.named_parameters()}, run.world.batch())


@call(harmless=True)
def random_numbers_drawn(run: Run) -> None:
    torch.manual_seed(99)
    torch.randn(3)
    run.train()


@call(harmless=True)
def containers_changed(run: Run) -> None:
    counts = run.world.objects.get("counts")
    if counts is not None:
        counts.step()
        counts.items["nested"][0].append(5)
        counts.items["tensor"].add_(1)
        counts.items["array"] *= 2


@call(harmless=True)
def evaluated(run: Run) -> None:
    """Buffers change in a forward pass: running averages, counters."""
    with torch.no_grad():
        for _ in range(2):
            run.model(run.world.batch())
    run.train()


@call()
def buffers_written(run: Run) -> None:
    for buffer in run.model.buffers():
        if buffer.is_floating_point() and buffer.numel():
            buffer.data.fill_(2.0)
