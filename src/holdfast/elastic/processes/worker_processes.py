"""The local workers of one agent as torch's elastic code sees them: a context of subprocesses, forked by the fork server.

`Workers` is torch's `SubprocessContext` with three differences: a worker is forked and told what to run later, a failed
one is replaced while the others are not touched, and replacements write log files of their own
(`attempt_<n>.<incarnation>`). Who decides is `elastic.launch.agent`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from holdfast.checkpoint.liveness.heartbeat_page import make_page
from holdfast.checkpoint.survivors import step_snapshot
from holdfast.core.elastic.failure_detector import Verdict
from holdfast.elastic.processes.forkserver import Child, ForkServer, NotForked, close_all
from holdfast.elastic.watchdog.proc_stats import state
from holdfast.elastic.worker.agent_channel import AgentChannel, pair
from holdfast.elastic.worker.kill_descendants import kill_group, was_given_away

logger = logging.getLogger(__name__)

EXIT_S = 30.0
CLOSE_S = 5


class WorkerStatus(enum.Enum):
    """Says what a worker is doing, as far as it has told."""

    WAITS = "waits for an order"
    LEAVES = "has an order and has not begun it"
    RUNS = "runs the script"
    HOLDS = "met a broken group and waits for a word"
    FINISHED = "finished the script"
    ENDS = "told of an error of its own and ends"
    VACANT = "is dead, and no process could be forked for the rank yet"
    UNFIT = "cannot run the script again and ends"


class KillReason(enum.Enum):
    """Says why the launcher killed a worker."""

    HANGS = "the watchdog condemned it"
    STANDS = "it stood in a run that is over"
    LATE = "it did not begin its order in time"
    OVERDUE = "it had its time to end after an error of its own"


@dataclass(slots=True)
class WorkerSlot:
    """One local rank and the process that has it now.

    Attributes:
        page: descriptor of its beats; ours to close.
        order: the number of the order that it was given.
        since: when `status` began, monotonic.
        error: what it said when it met a broken group.
        silent: its line has ended.
        began: it has run the script at least once.
        cut_at: when its sockets were last cut from outside, monotonic.
        cut_times: for how long its main thread had run by then, and waited for a processor.
        num_still: at how many such cuts in a row its main thread stood still.
        announced_code: the exit code that it said it would end with, after an error of its own.
        again: it runs the script for the second time or more.
        killed_for: why it was killed from here; None if it was not. `killed_at`: when that was, monotonic.
        verdict: the watchdog's, if it condemned the process.
        left: it has left the script of a run that is over, and clears up behind it.
        departs: it has finished the script, and its process ends without waiting for the others.
        last_words: messages that nobody had heard when its line was closed.
    """

    local_rank: int
    proc: Child
    line: AgentChannel
    page: int
    status: WorkerStatus = WorkerStatus.WAITS
    order: int = 0
    since: float = 0.0
    error: str = ""
    silent: bool = False
    cut_at: float = 0.0
    cut_times: tuple[float, float] = (0.0, 0.0)
    num_still: int = 0
    began: bool = False
    announced_code: int = 0
    again: bool = False
    killed_for: KillReason | None = None
    killed_at: float = 0.0
    verdict: Verdict | None = None
    left: bool = False
    departs: bool = False
    last_words: list[dict[str, Any]] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code (negative: the signal) of a process that ended; what it told, if it was killed after that."""
        code = self.proc.returncode or 0
        is_cut_short = self.killed_for is KillReason.OVERDUE and code == -signal.SIGKILL
        return self.announced_code if self.announced_code and is_cut_short else code

    def set_status(self, status: WorkerStatus) -> None:
        """Records what the worker does from this moment on."""
        self.status, self.since = status, time.monotonic()
        self.began = self.began or status is WorkerStatus.RUNS

    def kill(self, reason: KillReason) -> None:
        """Kills the worker; what it started goes with it, at once if it had its time, else when its end is seen."""
        self.killed_for, self.killed_at = reason, time.monotonic()
        if reason is KillReason.OVERDUE:
            self.close(signal.SIGKILL)
        else:
            self.proc.send_signal(signal.SIGKILL)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signals the worker and all it started; torch calls this."""
        if was_given_away(self.proc.pid, self.proc.returncode):
            return
        if death_sig == signal.SIGKILL:
            kill_group(self.proc.pid)
            return
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # it is gone, or what is left of it is another user's
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)

    def await_end(self, grace_s: float) -> None:
        """Give a worker that told of an error its time to end."""
        try:
            self.proc.wait(max(0.0, grace_s))
        except subprocess.TimeoutExpired:
            self.cut_off()
            try:
                self.proc.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                logger.error("process %d does not die, as it hangs in the kernel: it is left behind", self.proc.pid)

    def cut_off(self) -> None:
        """The worker had its time to end after an error, and is killed with all that it started."""
        logger.error(
            "process %d was told to end after its error and still runs exit handlers or threads: it is killed (--exit-grace)",
            self.proc.pid,
        )
        self.kill(KillReason.OVERDUE)

    def clean_up(self, *, well: bool = False) -> None:
        """Kills what the dead process started, and closes its channel.

        Args:
            well: the job is over, and what it left running is the script's own, as with plain Python.
        """
        if not well:
            self.close(signal.SIGKILL)
        while not self.silent and (said := self.line.receive(wait=False)):
            self.last_words += said
        self.line.close()
        self.silent = True
        close_all(self.page)
        self.page = -1


class _Prefix(str):
    """A prefix of the lines in a log: torch formats it with every line, and it may be another by then."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __format__(self, spec: str) -> str:
        return format(self.text, spec)


class Workers(SubprocessContext):
    """All local workers; `subprocess_handlers` are worker slots."""

    def __init__(self, forkserver: ForkServer, logs_specs: LogsSpecs, num_spares: int, **given: Any) -> None:
        self._prefixes: dict[int, Any] = {
            rank: _Prefix(text) for rank, text in (given.pop("log_line_prefixes", None) or {}).items()
        }
        super().__init__(logs_specs=logs_specs, log_line_prefixes=self._prefixes or None, **given)
        self._forkserver = forkserver
        self._logs_specs = logs_specs
        self._num_spares = num_spares
        self._num_replaced: Counter[tuple[int, int]] = Counter()  # (local rank, incarnation)
        self._logs: dict[
            str, tuple[Any, dict[int, dict[str, str]]]
        ] = {}  # of replacements, by the suffix of the attempt
        self._spares: list[tuple[Child, AgentChannel, int]] = []
        self._followers: dict[
            tuple[int, int], TailLog
        ] = {}  # of replacements, by local rank and the stream's first one
        self._notes: dict[int, int] = {}
        self._has_pages = True

    @property
    def worker_slots(self) -> dict[int, WorkerSlot]:
        """Return the worker slots by local rank."""
        return self.subprocess_handlers  # type: ignore[return-value]  # worker slots have what torch asks of its handlers

    def name_lines(self, prefixes: Mapping[int, str] | None) -> None:
        """Takes what stands before each line of a worker's log from here on, by local rank."""
        for local_rank, text in (prefixes or {}).items():
            self._prefixes[local_rank].text = text

    def notes_of(self, local_rank: int) -> int:
        """Descriptor of the worker slot's page of notes; it outlives the processes that have the worker slot."""
        return self._notes[local_rank]

    def _start(self) -> None:
        self._notes = {local_rank: step_snapshot.make_page() for local_rank in range(self.nprocs)}
        for local_rank in range(self.nprocs):
            self.worker_slots[local_rank] = WorkerSlot(local_rank, *self._fork())

    def _poll(self) -> RunProcsResult | None:
        """Torch's way to end all when one fails; our agent decides and never asks."""
        return None

    def replace(self, local_rank: int, incarnation: int) -> WorkerSlot:
        """Another process takes the worker slot: a spare if there is one, else a new fork.

        Raises:
            NotForked: there is none now; the worker slot is vacant until the next attempt.
        """
        self.worker_slots[local_rank].clean_up()
        self.worker_slots[local_rank].set_status(WorkerStatus.VACANT)
        while self._spares:
            child, line, page = self._spares.pop(0)
            if child.poll() is None and state(child.pid) not in "Tt":
                break
            child.send_signal(signal.SIGKILL)  # one that is stopped would take the rank and do nothing
            line.close()
            close_all(page)
        else:
            child, line, page = self._fork()
        try:
            self._new_logs(local_rank, incarnation)
        except OSError as error:
            child.send_signal(signal.SIGKILL)
            line.close()
            close_all(page)
            raise NotForked(f"no log files for a new process: {error.strerror}") from error
        self.worker_slots[local_rank] = WorkerSlot(local_rank, child, line, page)
        return self.worker_slots[local_rank]

    def forget_error(self, local_rank: int) -> None:
        """Forget what the worker slot's process wrote of an error in an earlier incarnation: it is no cause of a later one."""
        path = self.envs[local_rank].get("TORCHELASTIC_ERROR_FILE") or self.error_files[local_rank]
        for known in {path, self.error_files[local_rank]}:
            if known:
                Path(known).unlink(missing_ok=True)

    def refill(self) -> None:
        """Forks one spare if there are too few.

        Raises:
            NotForked: there is none now.
        """
        if len(self._spares) < self._num_spares:
            self._spares.append(self._fork())

    def dismiss_spares(self) -> None:
        """Those that wait for nothing any more end."""
        for child, _, _ in self._spares:
            child.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + CLOSE_S
        for child, line, page in self._spares:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("process %d, a spare, does not die", child.pid)
            line.close()
            close_all(page)
        self._spares = []

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self.dismiss_spares()
        super()._close(death_sig, min(timeout, CLOSE_S))  # the agent gave them their time, and killed them
        for worker_slot in self.worker_slots.values():
            # Of one that ended badly the fork server has killed the group; its number may be another one's by now.
            worker_slot.clean_up(well=worker_slot.proc.returncode is not None and not worker_slot.proc.guessed)
        while self._notes:
            os.close(self._notes.popitem()[1])

    def fork_from(self, forkserver: ForkServer) -> None:
        """Replacements come from this fork server from now on."""
        self._forkserver = forkserver

    def _fork(self) -> tuple[Child, AgentChannel, int]:
        """Fork a process with its line and its page; the same refusal for both, as a cause that lasts is told once."""
        line, page = None, -1
        try:
            line, theirs = pair()
            with theirs:
                page = self._new_page()
                return self._forkserver.fork(theirs, page), line, page
        except (NotForked, OSError) as error:
            if line is not None:
                line.close()
            close_all(page)
            if isinstance(error, NotForked):
                raise
            raise NotForked(f"no line and page for a new process: {error.strerror}") from error

    def _new_page(self) -> int:
        """Return a page, or -1 where the user allows no file of its size: such a limit stays."""
        try:
            return make_page()
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
        if self._has_pages:
            self._has_pages = False
            logger.warning(
                "no file may be large enough for the signs of progress of workers (ulimit -f): ranks that hang are not"
                " found, only those that end or are stopped"
            )
        return -1

    def _new_logs(self, local_rank: int, incarnation: int) -> None:
        """Log files of a replacement, in a directory of their own; those of the dead one stay."""
        if not self.stdouts[local_rank] and not self.stderrs[local_rank]:
            return
        self._num_replaced[local_rank, incarnation] += 1
        number = self._num_replaced[local_rank, incarnation]
        name = f".{incarnation}" if number == 1 else f".{incarnation}.{number}"
        if name not in self._logs:  # torch empties the directory that it makes, and others of it may have been replaced
            envs = {rank: dict(env) for rank, env in self.envs.items()}
            for env in envs.values():
                env["TORCHELASTIC_RESTART_COUNT"] += name
            self._logs[name] = self._logs_specs.reify(envs), envs
        made, envs = self._logs[name]
        self.stdouts[local_rank], self.stderrs[local_rank] = made.stdouts[local_rank], made.stderrs[local_rank]
        self.error_files[local_rank] = made.error_files[local_rank]
        self.envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = envs[local_rank]["TORCHELASTIC_ERROR_FILE"]
        for tail, files in zip(self._tail_logs[:2], (made.tee_stdouts, made.tee_stderrs), strict=False):
            if local_rank in files:
                if (before := self._followers.pop((local_rank, id(tail)), None)) is not None:
                    for event in before._finished_events.values():
                        event.set()  # it reads what is left in the file of the dead one, and ends; who reads it may be slow
                    self._tail_logs.remove(before)
                follower = TailLog(self.name, {local_rank: files[local_rank]}, tail._dst, self._prefixes).start()
                self._followers[local_rank, id(tail)] = follower
                self._tail_logs.append(follower)
