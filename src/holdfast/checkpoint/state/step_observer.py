"""Sees every optimizer step that may write the training state, by whichever optimizer and in whichever thread.

torch calls global hooks before and after the step of every optimizer of the process, so a second optimizer over the
same parameters, or one that took the place of the given one, is seen too. Steps of optimizers that write nothing of the
state are left alone.

What a graph of a device replays no hook sees. That a step is recorded into one is seen (`captured`): nothing runs then, and
nothing may be waited for, but from then on steps come by without a word. What code writes past `torch.optim` no hook sees
either: `checkpoint.capture.late_copy_check` finds that afterwards. `GradScaler.step` leaves out the step of an optimizer whose
gradients overflowed, and torch has no hook for that: its method is wrapped, and that of each class that derives from it.

An exception of ours never leaves the user's `step()`; one that a signal's handler raises while we wait does. In a
forked child nothing is done: the state that the hooks guard is its parent's.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from holdfast.base import handler_errors
from holdfast.checkpoint.device import accelerator

logger = logging.getLogger(__name__)

# The file of the function that torch puts around every `step`.
_AROUND_STEPS = Optimizer.profile_hook_step.__code__.co_filename


class Steps:
    """Calls back at every step of an optimizer that steps a parameter of the given ones.

    Args:
        optimizers: those whose state is saved. Their parameters are what a step is judged by.
        before: called before such a step, in the thread that steps.
        after: called with the optimizer behind it, unless it raised.
        skipped: called with the optimizer when a `GradScaler` has left out such a step.
        recorded: called instead of both when the step is recorded into a graph, in the thread that records.
        warn: whether another optimizer over the same parameters is named in the log, once.

    Attributes:
        begun: steps that have begun, ever.
        newest: the identifier of the thread in which the last of them did, and its name, for it may have ended.
        captured: a step was recorded into a graph: from then on steps may be made that nobody sees here.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[Optimizer], None] = lambda _: None,
        skipped: Callable[[Optimizer], None] = lambda _: None,
        recorded: Callable[[], None] = lambda: None,
        warn: bool = False,
    ) -> None:
        self.begun, self.newest, self.captured = 0, (0, ""), False
        self._before, self._after, self._recorded, self._warn = before, after, recorded, warn
        self._skipped = skipped
        self._given = list(optimizers)
        self._pid = os.getpid()
        self._hooks: list[Any] = []
        self._others: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._inside: dict[int, int] = {}  # thread -> steps within steps; one that raised is never counted down
        if self._given:
            self._hooks.append(register_optimizer_step_pre_hook(_Hook(self._begin)))
            self._hooks.append(register_optimizer_step_post_hook(_Hook(self._end)))
            self._hooks.append(register_skipped_step_hook(self._skip))

    def under_way(self) -> set[int]:
        """Returns the identifiers of the threads that are within a step now; one that raised has ended."""
        if not (inside := self._inside.copy()):
            return set()
        # Behind the look at who is inside: who comes in later is not taken for one that has left.
        frames = sys._current_frames()
        within = {thread for thread in inside if _steps(frames.get(thread))}
        for thread in inside.keys() - frames.keys():
            self._inside.pop(thread, None)
        return within

    def is_interrupted(self) -> bool:
        """Return whether a signal's handler calls this in the middle of a step of its thread, which has written a part then. Not in a hook of ours."""
        if threading.get_ident() not in self._inside:
            return False
        frame: FrameType | None = sys._getframe()
        handlers, is_handled, is_ours = handler_errors.handler_codes(), False, False
        while frame is not None:
            if frame.f_code.co_filename == _AROUND_STEPS:
                if is_handled and not is_ours:
                    return True
                is_ours = False  # around this step there may be another one, which has written a part
            is_handled = is_handled or handler_errors.is_of_a_handler(frame, handlers)
            is_ours = is_ours or frame.f_code is _Hook.__call__.__code__
            frame = frame.f_back
        return False

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, optimizer: Optimizer) -> None:
        if not self._concerns(optimizer):
            return
        if accelerator.capturing():
            self.captured = True
            self._recorded()
            return
        thread = threading.get_ident()
        self._inside[thread] = self._inside.get(thread, 0) + 1  # before it counts: no moment is left out
        self.newest = thread, names_of({thread})
        self.begun += 1
        self._before()

    def _end(self, optimizer: Optimizer) -> None:
        if self._concerns(optimizer) and not accelerator.capturing():
            thread = threading.get_ident()
            left = self._inside.pop(thread, 1) - 1
            if left:
                self._inside[thread] = left
            self._after(optimizer)

    def _skip(self, optimizer: Optimizer) -> None:
        # It may wrap one of ours and be none itself, and what makes no step is no stranger to warn of.
        is_given = any(optimizer is given for given in self._given)
        if os.getpid() == self._pid and (is_given or self._shares(optimizer, warn=False)):
            self._skipped(optimizer)

    def _concerns(self, optimizer: Optimizer) -> bool:
        if os.getpid() != self._pid:
            return False
        if any(optimizer is given for given in self._given):
            return True
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._others.get(optimizer)
        if known is None or known[0] != size:
            known = self._others[optimizer] = (size, self._shares(optimizer, warn=self._warn))
        return known[1]

    def _shares(self, optimizer: Optimizer, *, warn: bool) -> bool:
        """Return whether a stranger steps a parameter of ours, or memory of one."""
        ours = {key for given in self._given for key in _memory(given)}
        shared = not ours.isdisjoint(_memory(optimizer))
        if shared and warn and not any(optimizer in _inner(given) for given in self._given):
            logger.warning(
                "%s steps parameters of the checkpointer's state and was not given to it: what it keeps is not saved. "
                "Give it to the Checkpointer (optimizer=[...]), or build a new Checkpointer if it replaces another one",
                type(optimizer).__name__,
            )
        return shared


class _Call:
    """One call of a scaler's `step`.

    Attributes:
        looked_at: optimizers, and wrappers around them, that it was given, and whose gradients the scaler looked at.
        stepped: optimizers that made a step in it.
    """

    def __init__(self) -> None:
        self.looked_at: list[Any] = []
        self.stepped: list[Optimizer] = []

    def left_out(self) -> list[Any]:
        """Lists those given that did not step, each once; of a wrapper, neither it nor what it steps the parameters of."""
        done = {id(each) for each in self.stepped}
        rest = {id(each): each for each in self.looked_at if id(each) not in done and _groups_parameters(each)}
        return [each for each in rest.values() if not any(_memory(each) & _memory(made) for made in self.stepped)]


class _Scalers:
    """Wraps `step` of `GradScaler` and of what derives from it, each once: which calls made no step."""

    def __init__(self) -> None:
        self.hooks: dict[int, Callable[[Optimizer], None]] = OrderedDict()
        self._calls = threading.local()  # in each thread, what is known of the call of a scaler's `step` that goes on
        self._made: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # a mark would be copied to what wraps them
        self._tell = _Hook(self._find)
        register_optimizer_step_post_hook(_Hook(self._note))

    def wrap(self) -> None:
        """Wraps that of each class that has one of its own by now."""
        kinds: list[type] = [GradScaler]
        for kind in kinds:
            kinds += kind.__subclasses__()
            original = vars(kind).get("step")
            if isinstance(original, FunctionType) and original not in self._made:
                kind.step = self._around(original)  # type: ignore[attr-defined]

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            if not self.hooks or torch.compiler.is_compiling():
                return original(scaler, *args, **kwargs)
            outer: _Call | None = getattr(self._calls, "now", None)
            # One that derives calls that of its base, maybe for several optimizers.
            call, before = outer or _Call(), _states(scaler)
            try:
                self._calls.now = call
                result = original(scaler, *args, **kwargs)
                call.looked_at += _looked_at(scaler, before, [*args, *kwargs.values()])
            finally:
                self._calls.now = outer
            if outer is None:
                self._tell(call)
            return result

        _leave_uncompiled(step)
        self._made.add(step)
        return step

    def _find(self, call: _Call) -> None:
        for optimizer in call.left_out():
            for hook in list(self.hooks.values()):
                hook(optimizer)

    def _note(self, optimizer: Optimizer) -> None:
        call: _Call | None = getattr(self._calls, "now", None)
        if call is not None:
            call.stepped.append(optimizer)


_scalers = functools.cache(_Scalers)


def register_skipped_step_hook(call: Callable[[Optimizer], None]) -> RemovableHandle:
    """Calls back when a `GradScaler` has left out the step of an optimizer, whose gradients overflowed, until the handle is removed.

    A class that derives later, and steps by a method of its own, is seen from the next registration on.
    """
    scalers = _scalers()
    scalers.wrap()
    hooks = scalers.hooks
    handle = RemovableHandle(hooks)
    hooks[handle.id] = _Hook(call)
    return handle


def names_of(threads: set[int]) -> str:
    """Returns the names of those of these threads that Python knows."""
    return ", ".join(sorted(thread.name for thread in threading.enumerate() if thread.ident in threads))


def _steps(frame: FrameType | None) -> bool:
    """Return whether a stack has a frame of torch's own around a step, compiled or not."""
    while frame is not None and frame.f_code.co_filename != _AROUND_STEPS:
        frame = frame.f_back
    return frame is not None


def _memory(optimizer: Optimizer) -> set[int]:
    """Keys of the parameters of an optimizer: their ids, and the addresses of those that have memory."""
    found: set[int] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.add(id(parameter))
            if isinstance(parameter, torch.Tensor) and type(parameter) in (torch.Tensor, torch.nn.Parameter):
                address = parameter.data_ptr()
                found |= {-address} if address else set()
    return found


def _groups_parameters(thing: Any) -> bool:
    """Return whether a thing that a scaler was given has parameters in groups, as optimizers have them."""
    try:
        return bool(_memory(thing))
    except Exception as error:  # noqa: BLE001 - it is whatever the script's own scaler takes
        handler_errors.pass_on(error)
        return False


def _states(scaler: GradScaler) -> Any:
    """Returns by id what a scaler knows of optimizers since its last update; None where it has no such thing, as another torch."""
    return vars(scaler).get("_per_optimizer_states")


def _looked_at(scaler: GradScaler, before: Any, given: list[Any]) -> list[Any]:
    """Lists those given of which a scaler may have looked at the gradients.

    One that leaves everything for a later call, as where it adds up gradients by itself, has looked at none.
    """
    states = _states(scaler)
    if states is None or states is not before:  # it has updated itself, too
        return given
    return [each for each in given if states.get(id(each), {}).get("stage", OptState.READY) is not OptState.READY]


def _leave_uncompiled(function: Any) -> None:
    """Has torch.compile leave a function alone, but not what it calls. What torch has for that in public takes a second to import."""
    with suppress(AttributeError, TypeError):  # another torch: compiled, it sees no step that is left out
        eval_frame: Any = torch._C._dynamo.eval_frame
        action = eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))


def _inner(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that one of torch's wrappers, such as ZeroRedundancyOptimizer, steps in its own step."""
    return [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]


class _Hook:
    """A hook that raises nothing into the step, and that torch.compile leaves alone where it compiles one."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call
        self._uncompiled = False

    def __call__(self, optimizer: Any, *_: Any) -> None:
        if (
            not self._uncompiled and "torch._dynamo" in sys.modules
        ):  # else nothing is compiled, and it is slow to import
            self._call, self._uncompiled = torch.compiler.disable(self._call), True  # type: ignore[no-untyped-call]
        try:
            self._call(optimizer)
        except Exception as error:  # the step is the user's, and what failed is ours
            handler_errors.pass_on(error)
            logger.exception("a hook of ours failed at an optimizer's step; the step goes on")
