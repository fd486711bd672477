"""A worker's signs of progress, written into its page without a line of the user's: steps, collectives, batches.

`attach` is called once before the user's script runs. From then on the main thread, and no other, writes:
- every optimizer step (a global hook of torch), which is what a step is;
- every wait for a collective (`Work.wait`, the one door through which Python waits for one) with its name and number;
- every batch that a `DataLoader` gives, saving, loading, and evaluation, as phases with patience of their own.
Waits that torch makes in C++ (gradient buckets inside backward) write nothing; there the stack tells: a signal makes
the fault handler append all stacks behind the page, also while the main thread stands in C++ with the interpreter
locked. A few microseconds a sign. Must never raise into training, and never counts a heartbeat: a thread that lives on
beside a stuck main thread is no progress.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.checkpoint.liveness import group_timeouts
from holdfast.checkpoint.liveness.heartbeat_page import Writer
from holdfast.core.elastic.worker_facts import Phase
from holdfast.tiers.backends.own_descriptor import OwnDescriptor

# Nobody else's: the first few are taken by libc, and libraries that use real-time signals take low ones.
DUMP_SIGNAL = signal.SIGRTMIN + 11


class _Hooks:
    """Holds what was hung into torch; lasts as long as the process. The page that they write into may change."""

    def __init__(self) -> None:
        self.writer: Writer | None = None
        self.main = threading.main_thread().ident
        self.steps_of: weakref.ref[Any] | None = None
        self.stacks: OwnDescriptor | None = None  # not a file: one would close its number whoever has it by then

    def mine(self) -> Writer | None:
        """The page's writer, if this is the main thread."""
        writer = self.writer
        return writer if writer is not None and threading.get_ident() == self.main else None


_hooks = _Hooks()


def attach(fd: int, *, dump_thread: int = 0) -> None:
    """Writes beats into the page `fd` (checkpoint.liveness.heartbeat_page.make_page) from now on; called again it starts a new record.

    A process that was forked calls it anew: the hooks are its own then.

    Args:
        fd: of the page.
        dump_thread: native id of a thread of ours. It gets the signal for a dump while the main thread sleeps in a system
            call, which the signal would end with EINTR: `poll` and `select` are never begun anew, and C libraries may fail.
    """
    detach()
    first = _hooks.stacks is None and not getattr(Work.wait, "holdfast", False)
    # A description of its own: the position in the file is not the launcher's, and it only appends.
    stacks = OwnDescriptor.of(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
    faulthandler.register(DUMP_SIGNAL, file=stacks.number, all_threads=True, chain=False)
    if _hooks.stacks is not None:
        _hooks.stacks.close()
    _hooks.stacks = stacks
    _hooks.main = threading.main_thread().ident
    _hooks.steps_of = None
    _hooks.writer = Writer(fd, dump_signal=DUMP_SIGNAL, dump_thread=dump_thread, dump_fd=stacks.number)
    if first:
        _hang_in()


def detach() -> None:
    """No more beats; the hooks stay and do nothing."""
    writer, _hooks.writer = _hooks.writer, None
    if writer is not None:
        writer.close()
    if _hooks.stacks is not None:
        # Not unregistered: a signal on its way would end the process.
        nowhere = OwnDescriptor.of(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        faulthandler.register(DUMP_SIGNAL, file=nowhere.number, chain=False)
        _hooks.stacks.close()
        _hooks.stacks = nowhere


def forget() -> None:
    """Leave the worker's page alone, in a forked child that is not the worker and still sees it."""
    _hooks.writer = None


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """The block takes as long as that phase may."""
    writer = _hooks.mine()
    if writer is None:
        yield
        return
    before = writer.phase
    writer.turn(name)
    try:
        yield
    finally:
        if writer is _hooks.writer:
            writer.turn(before)


def at_step(step: int) -> None:
    """The step that is finished has this number; without it steps are counted from the start of the script."""
    writer = _hooks.mine()
    if writer is not None:
        writer.at_step(step)


def _hang_in() -> None:
    register_optimizer_step_post_hook(_stepped)
    work: Any = Work
    work.wait = _watched_wait(work.wait)
    _wrap(_BaseDataLoaderIter, "__next__", Phase.DATA)
    _wrap(torch, "save", Phase.SAVING)
    _wrap(torch, "load", Phase.LOADING)
    _wrap_eval()
    _wrap_compile()
    group_timeouts.watch(_granted)


def _granted(seconds: float) -> None:
    writer = _hooks.mine()
    if writer is not None:
        writer.may_wait(seconds)


def _stepped(optimizer: Any, *_: Any) -> None:
    writer = _hooks.mine()
    if writer is None:
        return
    known = _hooks.steps_of() if _hooks.steps_of is not None else None
    if known is None:  # of several optimizers one counts
        _hooks.steps_of = weakref.ref(optimizer)
    if known is None or known is optimizer:
        writer.stepped()
    else:
        writer.turn(Phase.STEP)


def _watched_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        writer = _hooks.mine()
        if writer is None:
            return original(self, *args, **kwargs)
        # The caller is torch's own function, named like the collective.
        before = writer.enter(sys._getframe(1).f_code.co_name.encode())
        try:
            return original(self, *args, **kwargs)
        finally:
            if writer is _hooks.writer:
                writer.leave(before)

    wait.holdfast = True  # type: ignore[attr-defined]
    return wait


def _wrap(owner: Any, name: str, during: Phase) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _hooks.mine() is None:
            return original(*args, **kwargs)
        with phase(during):
            return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _wrap_eval() -> None:
    original = torch.nn.Module.eval

    @functools.wraps(original)
    def wrapped(self: Any) -> Any:
        """Evaluation lasts until the next optimizer step; what it does meanwhile is not seen, and may take long."""
        writer = None if torch.compiler.is_compiling() else _hooks.mine()
        if writer is not None and writer.phase is Phase.STEP:
            writer.turn(Phase.EVALUATION)
        return original(self)

    module: Any = torch.nn.Module
    module.eval = wrapped


def _wrap_compile() -> None:
    """Make compiling a phase: from the first `torch.compile` on, compiling is a phase of its own: it may take long, and
    is told in incidents.
    """
    original = torch.compile

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _watch_compiler()
        return original(*args, **kwargs)

    module: Any = torch
    module.compile = wrapped


@functools.cache
def _watch_compiler() -> None:
    from torch._dynamo import callback  # noqa: PLC0415 - torch.compile imports it, which takes seconds

    handler = getattr(callback, "callback_handler", None)
    if handler is None or not hasattr(handler, "register_start_callback"):
        return  # another torch; compilation is then seen in the stacks of a silent rank
    before: list[Phase] = []

    def begin(_: Any) -> None:
        writer = _hooks.mine()
        if writer is not None:
            before.append(writer.phase)
            writer.turn(Phase.COMPILE)

    def end(_: Any) -> None:
        writer = _hooks.mine()
        if writer is not None and before:
            writer.turn(before.pop())

    handler.register_start_callback(begin)
    handler.register_end_callback(end)
