"""What a rank of a case runs: `python -m redteam.script LIFE`, with the case and its place in the environment.

The first life trains, saves, meets the call and the fault, and notes before every save the digest of the state, and
afterwards what was announced. The second comes back, notes what it finds, trains on, saves and closes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

import holdfast
from holdfast.base.errors import HoldfastError, LevelNotReached, UsageError
from holdfast.checkpoint.capture import copy_plan
from holdfast.core.model import Level
from redteam import planted
from redteam.case import Case
from zoo_calls import CALLS, Run, call
from zoo_states import STATES

WAIT_S = 15.0
HOLD_S = 0.05
# How long a keeper is frozen, and storage refuses.
FAULT_S = 1.5
STEPS_BEHIND = 3
_OURS = f"{os.sep}holdfast{os.sep}"


@call()
def ranks_differ(run: Run) -> None:
    """A processor that computes otherwise, or an averager that nobody told of; for two ranks that share their state."""
    if os.environ["RANK"] == "1":
        for p in run.params:
            p.data.mul_(1.5)
    run.train()
    run.save()
    run.train()


class Oracle:
    """Notes of one rank and life, one line each; what the kernel has, no kill -9 takes away."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.RLock()

    def note(self, **facts: Any) -> None:
        with self._lock:
            os.write(self._file, json.dumps(facts).encode() + b"\n")


class Script(Run):
    """A script under way that notes what it does."""

    def __init__(self, case: Case, root: Path, oracle: Oracle) -> None:
        self.case, self.root, self.oracle = case, root, oracle
        self.handles: list[Any] = []
        self.made: list[holdfast.Checkpointer] = []
        self.level = "captured"
        super().__init__(STATES[case.state](), self._another, str(root / "job"))

    def _another(self, path: str) -> holdfast.Checkpointer:
        case = self.case
        every = {"save": ("0", "0"), "step": ("1", "3"), "budget": ("1", "2")}[case.drive]
        settings: dict[str, Any] = {"overhead": "50%"} if case.drive == "budget" else {"every": every[0]}
        config = holdfast.Config(
            runtime_dir=str(self.root / "r"), durable_every=every[1], keep_last=4, keep_every=case.keep_every,
            num_slots=case.num_slots, overlap=case.overlap, verify_capture=case.verify_capture, linger_s=30.0,
            fence_timeout_s=5.0, begin_timeout_s=2.0, close_timeout_s=WAIT_S,
            encryption_key=str(self.root / "key") if case.encrypted else "", **settings,
        )  # fmt: skip
        shared = ["model.*", "optimizer.*"] if case.shared else []
        made = holdfast.Checkpointer(path, config=config, replicated=shared, **self.world.objects)
        self.made.append(made)
        return made

    def save(
        self,
        level: str = "durable",
        *,
        by: Any = None,
        path: str = "",
        during: Callable[[], None] | None = None,
        drive: str = "",
    ) -> Any:
        by = by or self.checkpointer
        if by is not self.checkpointer:
            return by.save(self.number, level)
        inner = by._run
        if inner is not None and (inner.last is None or inner.last.version.step != self.number):
            version = str(inner.job.version(self.number))
            self.oracle.note(saved=version, state=self.world.fingerprint())
        self.world.probe.during = during
        if (drive or self.case.drive) == "save":
            handle = by.save(self.number, level)
        else:
            handle = by.step(self.number) if inner is None or self.number > inner.step else None
        if handle is not None:
            self.handles.append(handle)
            self.saves.append(_Seen(handle))
        return handle

    def look(self) -> None:
        """Notes what was announced so far."""
        for handle in self.handles[-6:]:
            if handle.given_up:
                continue
            reached = handle.reached
            if reached is not Level.NONE:
                self.oracle.note(acked=str(handle.version), level=reached.name.lower())


@dataclasses.dataclass
class _Seen:
    handle: Any


def hold(case: Case) -> Callable[[], None]:
    """Late copies are held, or torn, until the call is over; returns what lets them go."""
    go, left = threading.Event(), [3 if case.copies == "torn" else 0]
    real = copy_plan.copy
    if case.copies == "free":
        go.set()

    def held(targets: Any, sources: Any) -> None:
        if threading.current_thread().name == "holdfast-capture":
            left[0] -= 1
            if left[0] < 0:
                go.wait(HOLD_S)
                go.set()
        real(targets, sources)

    copy_plan.copy = held
    return go.set


class Fault:
    """Strikes once."""

    def __init__(self, case: Case, script: Script) -> None:
        self._case, self._script = case, script
        self._healing: list[threading.Timer] = []
        self._keeper = int(script.checkpointer.keeper_status()["pid"])

    def at(self, moment: str) -> None:
        one = self._case.victims == "first" or self._case.fault.startswith("keeper")  # all ranks have one keeper
        hit = int(os.environ["RANK"]) == 0 or not one
        if hit and self._case.moment == moment and self._case.fault != "none":
            self._script.look()
            self._script.oracle.note(struck=self._case.fault, moment=moment)
            getattr(self, "_" + self._case.fault.replace(" ", "_"))()

    def healed(self) -> None:
        for timer in self._healing:
            timer.join()

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _term(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def _interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def _exception(self) -> None:
        raise ZeroDivisionError("of the script")

    def _storage_refuses(self) -> None:
        """A file stands where temporary files are written, as if the path were broken."""
        place = self._script.root / "job" / ".tmp"
        aside = place.with_name(f"aside-{os.getpid()}")
        if not place.is_dir():
            return
        try:
            place.rename(aside)
            place.write_bytes(b"")
        except OSError:  # the other rank did it
            return

        def heal() -> None:
            place.unlink()
            aside.rename(place)

        self._later(heal)

    def _storage_slow(self) -> None:
        """What keepers write is on the disk only when it is over (`kit/slow_disk`): slots are taken for as long."""
        held = Path(os.environ["HELD"])
        held.touch()
        self._later(lambda: held.unlink(missing_ok=True))

    def _keeper_frozen(self) -> None:
        os.kill(self._keeper, signal.SIGSTOP)
        self._later(lambda: os.kill(self._keeper, signal.SIGCONT))

    def _keeper_killed(self) -> None:
        os.kill(self._keeper, signal.SIGKILL)

    def _later(self, work: Callable[[], None]) -> None:
        timer = threading.Timer(FAULT_S, work)
        self._healing.append(timer)
        timer.start()


class Handler:
    """A signal's handler that strikes once, in the middle of a call of ours."""

    def __init__(self, case: Case, script: Script) -> None:
        self._case, self._script = case, script
        self._left = round(10**case.point)
        self.has_closed = False
        signal.signal(signal.SIGUSR1, self._strike)

    @contextlib.contextmanager
    def within(self, call: str) -> Iterator[None]:
        """The signal may come in here; what the handler raises is caught, as a script may do."""
        hit = self._case.victims == "all" or int(os.environ["RANK"]) == 0
        if self._case.handler != "none" and self._case.within == call and hit:
            sys.setprofile(self._count)
        try:
            with contextlib.suppress(ZeroDivisionError):
                yield
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, *_: object) -> None:
        code = frame.f_code.co_filename
        if _OURS in code or code.endswith("threading.py"):
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(signal.SIGUSR1)

    def _strike(self, *_: object) -> None:
        sys.setprofile(None)
        script, does = self._script, self._case.handler
        script.oracle.note(struck=does, within=self._case.within)
        if does == "raises":
            raise ZeroDivisionError("of the handler")
        if does == "exits":
            sys.exit()
        if does == "closes":
            self.has_closed = True
            _quiet(script.checkpointer.close)
        elif does == "saves":
            _quiet(lambda: script.save(drive="save"))
        elif does == "flushes":
            _quiet(lambda: script.checkpointer.flush(WAIT_S))
        elif script.handles:
            _quiet(lambda: script.handles[-1].wait("captured", WAIT_S))


def seeded(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the generator behind numpy.random.*


def first(script: Script, case: Case) -> None:
    script.number = script.checkpointer.restore()
    script.oracle.note(restored="", step=script.number)
    fault, handler = Fault(case, script), Handler(case, script)
    for _ in range(case.strike_step):
        script.train()
        handle = script.save("durable" if script.number % 3 == 0 else "captured")
        if handle is not None and case.drive == "save":
            _quiet(lambda h=handle: h.wait("captured", WAIT_S))
        script.look()
    script.train()
    fault.at("before the save")
    let_go = hold(case)
    with (
        handler.within("save"),
        contextlib.suppress(UsageError) if case.handler == "closes" else contextlib.nullcontext(),
    ):
        script.save()
    if script.handles and case.within == "wait":
        with handler.within("wait"):
            _quiet(lambda: script.handles[-1].wait("captured", WAIT_S))
    if handler.has_closed:
        let_go()
        return
    fault.at("behind the save")
    timer = threading.Timer(0.005, lambda: fault.at("in the call"))
    if case.fault != "exception":  # that is raised where the script is
        timer.start()
    try:
        if script.saves:
            _quiet(lambda: CALLS[case.call].does(script))
    finally:
        let_go()
        if timer.is_alive() or timer.finished.is_set():
            timer.join()
    if script.handles and case.moment == "behind the call":
        _quiet(lambda: script.handles[-1].wait("captured", WAIT_S))
    fault.at("behind the call")
    hook = register_optimizer_step_pre_hook(lambda *_: fault.at("in the next step"))
    try:
        script.train()
    finally:
        hook.remove()
    for _ in range(STEPS_BEHIND):
        script.save()
        script.look()
        script.train()
    fault.healed()
    last(script, case, handler)


def last(script: Script, case: Case, handler: Handler) -> None:
    """Saves once more and closes."""
    handle = script.save()
    script.look()
    try:
        if case.within == "flush":
            with handler.within("flush"):
                _quiet(lambda: script.checkpointer.flush(WAIT_S))
        with handler.within("close"):
            script.checkpointer.close()
        for made in script.made:
            made.close()
    except LevelNotReached as error:  # said aloud, which is all that can be done where keeper or storage is away
        if case.fault not in ("keeper killed", "keeper frozen", "storage refuses"):
            raise
        print(f"told: {error}", file=sys.stderr)
        return
    if handle is not None and not handle.given_up:
        script.oracle.note(acked=str(handle.version), level="durable")
    script.oracle.note(closed=True)


def second(script: Script) -> None:
    script.number = script.checkpointer.restore()
    report = script.checkpointer.last_restore
    assert report is not None
    version = "" if report.version is None else str(report.version)
    script.oracle.note(restored=version, step=script.number, state=script.world.fingerprint())
    for _ in range(2):
        script.train()
        script.save()
    script.checkpointer.close()
    script.oracle.note(closed=True)


def _quiet(work: Callable[[], Any]) -> None:
    """A version that is given up is none of the script's worries."""
    try:
        work()
    except HoldfastError as error:
        print(f"told: {error}", file=sys.stderr)


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes away from what runs behind it
    life, root = int(sys.argv[1]), Path(os.environ["REDTEAM_ROOT"])
    case = Case(**json.loads((root / "case.json").read_text()))
    rank = int(os.environ["RANK"])
    planted.apply(os.environ.get("REDTEAM_PLANT", ""))
    copy_plan.BATCH_BYTES = 2048 if case.state != "big" else 256 << 10
    if case.world > 1:
        dist.init_process_group("gloo", init_method=f"file://{root}/meet-{life}", rank=rank, world_size=case.world)
    seeded(10 * life + (0 if case.shared else rank))
    script = Script(case, root, Oracle(root / f"oracle-{life}-{rank}"))
    if life == 1:
        first(script, case)
    else:
        second(script)
    if case.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
