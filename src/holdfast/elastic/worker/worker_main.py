"""A worker: waits for an order, runs the user's script as `__main__`, and when the job is interrupted, runs it again.

The main thread runs the script. A second thread hears the agent; when a newer order arrives while the script runs, it
interrupts it: a signal makes the main thread raise `Interrupted` wherever Python runs, the sockets of its groups are cut
wherever it waits in a collective, and both are repeated until it has left (`_break_off`). Then frames, tensors and groups
are freed and the script runs again *in the same process*. A process that is not healthy does not stay: an error of the
script's own ends it with the traceback and exit code that plain Python gives, and a device that does not run one more
kernel ends it too; the agent is told first, and replaces it. The end of a process is the script's own too: its threads and
exit handlers run as in plain Python, and find its `__main__` and its groups as it left them.

A script that left something which cannot be put back (`elastic.worker.run_leftovers`) does not run again here: the process ends at once
with all that it started, and its agent forks another one for the rank. A process whose script has finished stays while it
holds groups, which others may use; without one it ends at once, since others may wait for just that.

A process that the script forks is the script's own: it ends as in plain Python, and says nothing to the agent.

An error that looks like a broken group is held back until the agent says whose fault it was: another process died
(run again), or nobody's (it stands). Its sockets are cut at once, because ranks further away wait for this one.

`holdfast.resumable` (see `elastic.worker.resumable`) takes part through `current`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from holdfast.base.errors import Interrupted
from holdfast.base.process_label import label_process
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.liveness import heartbeat, open_checkpointers
from holdfast.checkpoint.survivors import step_snapshot
from holdfast.core.elastic.rerun import why_not
from holdfast.core.versions.late_copy_rules import LEAVING
from holdfast.elastic.worker import group_teardown, input_watch, interruptible_store, main_module
from holdfast.elastic.worker.agent_channel import AgentChannel, RunOrder, order_of
from holdfast.elastic.worker.kill_descendants import kill_group
from holdfast.elastic.worker.run_leftovers import Look
from holdfast.elastic.worker.script_sandbox import ScriptSandbox, leave_logging_to_the_script
from holdfast.elastic.worker.signal_mask import deaf
from holdfast.tiers.backends.own_descriptor import OwnDescriptor

logger = logging.getLogger(__name__)

# Raises `Interrupted` in the main thread. A real-time signal, so that none of the script's own is taken.
WAKE = signal.SIGRTMAX - 3
# An interrupt that was swallowed (`except BaseException`, a finaliser) is repeated.
AGAIN_S = 0.1
# How long a device may take for one more kernel after its groups were aborted; the agent ends one that stands still for 5 s.
PROBE_S = 3.0
# Words in the text of an error that broken groups raise; gloo and NCCL raise RuntimeError, DDP does it outside of Python.
_BROKEN = re.compile(
    r"gloo|nccl|process ?group|connection (closed|reset|refused)|broken pipe|socket|tcpstore", re.IGNORECASE
)
_BROKEN_TYPES = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}


class Runner:
    """The one of this process; `current` is None where no agent of ours started it."""

    current: Runner | None = None

    def __init__(
        self, link: socket.socket, page: int, script: Callable[[RunOrder], None], looks: Sequence[Look]
    ) -> None:
        self._script = script
        self._looks = looks
        self._line = AgentChannel(link)
        self._page = OwnDescriptor.of(page)
        leave_logging_to_the_script()
        input_watch.watch(lambda: self._tell("reads"))
        self._stage = ScriptSandbox()
        self._sockets = group_teardown.GroupSockets()
        self._changed = threading.Condition()
        self._order: RunOrder | None = None  # the newest; under _changed
        self._running: RunOrder | None = None  # what the main thread runs; under _changed
        self._notes = -1  # descriptor of the page that came with the newest order, until it is attached; under _changed
        self._verdict = ""  # "end" or "fail"; under _changed
        self._lingers = False  # a script has finished, and what it left stands until the next run or the end
        self._departs = False  # the process ends, and takes no order any more; under _changed
        self._pid = os.getpid()
        self._main = threading.main_thread().ident or 0
        self._ear = threading.Thread(target=self._hear, name="holdfast-agent", daemon=True)
        self._aborts = group_teardown.Aborts()

    def serve(self) -> int:
        """Until the agent says that it is over. Returns the exit code."""
        Runner.current = self
        atexit.register(self._at_exit)  # before any of the script's, so it runs after all of them
        os.register_at_fork(after_in_child=self._leave_child_alone)
        self._sockets.install()
        interruptible_store.install(lambda: self._running.environment if self._running is not None else {})
        signal.signal(WAKE, self._wake)
        wish = open_checkpointers.wish
        wish.works_on = lambda root, job: self._tell("works on", root=root, job=job)
        wish.restored = lambda step, source: self._tell("restored", step=step, source=source)
        wish.saved = lambda step: self._tell("saved", step=step)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]  # torchrun starts Python with -u
        with deaf():
            self._ear.start()
        self._line.send("idle")
        while True:
            order = self._next()
            if order is None:
                return 0
            code = self._run(order)
            if code is not None:
                return code

    # The main thread.

    def _next(self) -> RunOrder | None:
        """The next order to run; None: it is over."""
        with self._changed:
            done = self._running.number if self._running else -1
            self._changed.wait_for(lambda: self._verdict == "end" or self._newer(done) is not None)
            newer = self._newer(done)
            self._departs = newer is None
            return newer

    def _newer(self, than: int) -> RunOrder | None:
        return self._order if self._order is not None and self._order.number > than else None

    def _run(self, order: RunOrder) -> int | None:
        """Runs the script once; the exit code if the process is to end."""
        error: BaseException | None = None
        if self._lingers:
            self._lingers = False
            assert self._running is not None, "a run has finished"
            if not order.anew:
                self._prove_device(self._running)
            self._line.send("left", order.number)
            self._make_ready(order, None)
        try:
            self.begin(order)
            self._execute(order)
        except SystemExit as stop:
            error = stop if _code_of(stop) else None
        except BaseException as fault:  # noqa: BLE001 - whatever the script raised is told, judged or raised again below
            error = fault
        if os.getpid() != self._pid:
            return _end_of_child(error)
        return self._after(self._running or order, error)  # a resumable function may have taken a newer one

    def begin(self, order: RunOrder) -> None:
        """This process is `order` from now on."""
        with self._changed:
            again = self._running is not None
            if not again:
                _redirect(order)
            self._stage.enter(order)
            open_checkpointers.begin()
            signal.signal(WAKE, self._wake)
            self._running = order
        self._started(order, again=again)

    def _tell(self, what: str, **said: Any) -> None:
        running = self._running
        if running is not None:
            self._line.send(what, running.number, **said)

    def _execute(self, order: RunOrder) -> None:
        self._script(order)

    def _after(self, order: RunOrder, error: BaseException | None) -> int | None:
        """Return what the end of a run means: None goes on, in this process."""
        if error is None:
            return self._finish(order)
        if self.is_over(order, error):
            with self._changed:
                newer = self._newer(order.number)
            self._make_ready(newer or order, error)
            return None
        code = _code_of(error)
        self._line.send("failed", order.number, error=_line_of(error), code=code)
        _print(error)
        return code

    def _finish(self, order: RunOrder) -> int | None:
        """The script has finished. The process stays for a run that may be needed if it holds groups, else it ends: 0."""
        with self._changed:
            self._departs = not group_teardown.holds_groups() and self._newer(order.number) is None
            if not self._line.is_whole():  # nobody can say when to end: it ends as under plain Python, and well
                self._departs, self._verdict = True, "end"
        self._lingers = True
        self._line.send("finished", order.number, departs=self._departs)
        return 0 if self._departs else None

    def _leave_child_alone(self) -> None:
        """Leave a process alone that the script has forked: nothing of it is the rank's, so nothing of ours is left
        there.
        """
        self._line.close()
        heartbeat.forget()
        self._running = Runner.current = None

    def _make_ready(self, order: RunOrder, error: BaseException | None) -> None:
        """Clear the process for `order`, or end it: at once, so that its rank has another one within milliseconds."""
        unfit = "" if order.anew else why_not(self._stage.clear(error, *self._looks))
        self._end_if_stuck()
        if order.anew or unfit:
            logger.info(
                "this process ends, for the script cannot run again in it: %s", unfit or "as those of other ranks"
            )
            self._line.send("unfit", order.number, why=unfit)
            _end_now()
        self._sockets.forget()

    def _at_exit(self) -> None:
        """After a good end, groups that the script left open are closed: gloo's threads may abort a process that just ends."""
        if self._verdict == "end":
            group_teardown.destroy_groups()

    def is_over(self, order: RunOrder, error: BaseException) -> bool:
        """Return whether `error` is no fault of ours: a newer order is there, or comes after we told of broken groups.

        If it is, the process may stay: its device works. Else this does not return.
        """
        if os.getpid() != self._pid or not self._is_replaced(order, error):
            return False
        self._prove_device(order)
        self._line.send("left", order.number)
        return True

    def _prove_device(self, order: RunOrder) -> None:
        """Returns if the device of a process that left a run can be used in the next one; else the process ends."""
        with self._changed:
            self._break_off(order)  # the newer order may have come a moment ago
        if not self._aborts.ended(group_teardown.ABORT_S):
            open_checkpointers.broken.stuck = "the communicators of its device cannot be aborted"
        elif not accelerator.healthy(PROBE_S):
            open_checkpointers.broken.stuck = f"a device of it did not run one more kernel within {PROBE_S:g} s"
        self._end_if_stuck()

    def _is_replaced(self, order: RunOrder, error: BaseException) -> bool:
        with self._changed:
            if self._newer(order.number) is not None:
                return True
        if isinstance(error, SystemExit | KeyboardInterrupt | Interrupted) or not looks_broken(error):
            return False
        with self._changed:
            self._break_off(order)
        told = self._line.send("raised", order.number, error=_line_of(error))
        if not told and self._line.lost:
            return False  # nobody can say whose fault it was
        with self._changed:
            self._changed.wait_for(lambda: bool(self._verdict) or self._newer(order.number) is not None)
            return self._newer(order.number) is not None

    def _break_off(self, order: RunOrder) -> None:
        """Ends what the processes of a run have in common. Under the lock, from any thread, as often as it takes.

        The order of the steps is an invariant of the protocol (S20): an aborted collective ends, what a device has queued
        behind it runs on, and so does a rank whose sockets are cut. Nothing of that may count.
        """
        steps = {
            "void": open_checkpointers.void,
            "cut": lambda: self._sockets.cut(int(order.environment.get("MASTER_PORT", "0"))),
            "abort": self._aborts.begin,
        }
        for step in LEAVING:
            steps[step]()

    def _end_if_stuck(self) -> None:
        """A process whose device is out of order ends, and is replaced; others may run the script again in theirs."""
        if not open_checkpointers.broken.stuck:
            return
        logger.error("this process ends, and another one takes its place: %s", open_checkpointers.broken.stuck)
        if self._running is not None:
            self._line.send("unfit", self._running.number, why="")
        _end_now()

    def rejoin(self, after: RunOrder) -> None:
        """The process takes the order that replaces `after`, in the middle of the script. For `elastic.worker.resumable`."""
        self._end_if_stuck()
        with self._changed:
            newer = self._newer(after.number)
            assert newer is not None, "is_over said that there is one"
            self._sockets.forget()
            os.environ.update(newer.environment)
            open_checkpointers.begin()
            self._running = newer
        self._started(newer)

    def _started(self, order: RunOrder, *, again: bool = False) -> None:
        wish = open_checkpointers.wish
        wish.older, wish.version, wish.jobs = order.older, order.version, order.jobs
        label_process(f"hf-rank-{order.environment.get('RANK', '')}")
        if self._page.is_ours():  # else the record goes on in memory
            heartbeat.attach(self._page.number, dump_thread=self._ear.native_id or 0)
        heartbeat.at_step(-1)  # the script begins at its first line; a restore says where it goes on
        with self._changed:
            fd, self._notes = self._notes, -1
        if fd >= 0:
            step_snapshot.attach(fd)
        self._line.send("started", order.number, again=again)

    @property
    def running(self) -> RunOrder | None:
        """Return what the main thread runs."""
        return self._running

    def _wake(self, _: int, frame: FrameType | None) -> None:
        """Interrupt a run that a newer order replaces. A handler: it runs in the main thread, between two instructions."""
        running = self._running
        if running is not None and self._order is not None and self._order.number > running.number and not _ours(frame):
            raise Interrupted(f"incarnation {self._order.number} replaces {running.number}")

    # The thread that hears the agent.

    def _hear(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {heartbeat.DUMP_SIGNAL})
        while True:
            messages = self._line.receive(wait=not self._must_leave())
            if messages is None and self._line.lost:
                threading.Event().wait()  # the script runs on; this thread may still be asked for stacks
            if messages is None:
                _end_now()  # the agent is gone: whoever replaces it starts others
            for message in messages or ():
                with self._changed:
                    if message["op"] == "run":
                        self._take(order_of(message))
                    else:
                        self._verdict = message["op"]
                    self._changed.notify_all()
            with self._changed:  # `begin` takes it too: what is cut here is of the run that must end
                if self._must_leave() and self._running is not None:
                    try:
                        self._break_off(self._running)
                    except Exception:  # the launcher cuts and ends; without this thread nothing is heard
                        logger.exception("the groups of a run that is over could not be left")
                    signal.pthread_kill(self._main, WAKE)
                    self._changed.wait(AGAIN_S)

    def _take(self, order: RunOrder) -> None:
        """Under the lock."""
        # What the script does at its end belongs to a run that is void now; without a line none can be taken.
        if self._departs or not self._line.is_whole():
            self._line.send("unfit", order.number, why="")
            _end_now()
        self._order = order
        if order.notes and self._line.descriptors:
            if self._notes >= 0:
                os.close(self._notes)  # of an order that was never begun
            self._notes = self._line.descriptors.pop(0)

    def _must_leave(self) -> bool:
        running, order = self._running, self._order
        return running is not None and order is not None and order.number > running.number


def run_script(order: RunOrder) -> None:
    """Runs the script or module of the order as `__main__`."""
    if order.is_module:
        main_module.run_module(order.arguments[0])
    else:
        main_module.run_path(order.arguments[0], text=order.text.encode("latin-1") if order.text else None)


def _end_now() -> None:
    """End this process with everything that the script started."""
    kill_group(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)  # it leads no group: not forked by the fork server


def looks_broken(error: BaseException) -> bool:
    """Return whether this is what ranks raise whose peers are gone; a candidate only, the agent decides."""
    seen: BaseException | None = error
    while seen is not None:
        names = {kind.__name__ for kind in type(seen).__mro__}
        if names & _BROKEN_TYPES or (isinstance(seen, RuntimeError) and _BROKEN.search(_said(seen))):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _line_of(error: BaseException) -> str:
    """Return an error in one line, as the agent is told of it."""
    return f"{type(error).__name__}: {_said(error)}"[:500]


def _said(error: BaseException) -> str:
    """Return what an error says. Its class may be the script's own, and fail to say anything: then as Python has it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever it raises, the script's own error is what must be told
        return "<exception str() failed>"


def _ours(innermost: FrameType | None) -> bool:
    """Return whether the main thread is in our own bookkeeping (here or in `elastic.worker.resumable`) and not in the
    script.
    """
    frame = innermost
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == __name__:
            return frame.f_code.co_name not in ("_execute", "run_script")
        if name == "holdfast.elastic.worker.resumable":
            return frame is innermost or frame.f_code.co_name != "called"
        frame = frame.f_back
    return True


def _redirect(order: RunOrder) -> None:
    for path, target in ((order.stdout, 1), (order.stderr, 2)):
        if path:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
            os.dup2(fd, target)
            os.close(fd)


def _end_of_child(error: BaseException | None) -> int:
    """A process that the script forked leaves the script: the exit code that plain Python ends with. Prints as Python does."""
    if error is None:
        return 0
    _print(error)
    return _code_of(error)


def _code_of(error: BaseException) -> int:
    """Return the exit code that Python would end with, as a parent sees it: of a signal, its number below zero."""
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
        if not isinstance(code, int):
            return 1
        return code & 0xFF if abs(code) < 1 << 63 else 0xFF  # Python takes what is no `long` of C for -1
    return -signal.SIGINT if type(error) is KeyboardInterrupt else 1


def _print(error: BaseException) -> None:
    """Print the error as Python would."""
    if not isinstance(error, SystemExit):
        error.__traceback__ = _scripts_part(error)
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit:
            raise  # the hook says how the process ends
        except BaseException as fault:  # noqa: BLE001 - a hook of the script's: both errors are told
            _write("Error in sys.excepthook:\n")
            fault.__traceback__ = fault.__traceback__ and fault.__traceback__.tb_next
            sys.__excepthook__(type(fault), fault, fault.__traceback__)
            _write("\nOriginal exception was:\n")
            sys.__excepthook__(type(error), error, error.__traceback__)
    elif not isinstance(error.code, int | None):
        with contextlib.suppress(Exception):  # as Python, which says nothing of what cannot be told
            _write(f"{error.code}\n")


def _write(text: str) -> None:
    """Write to the standard error, if the script has left one."""
    if sys.stderr is not None:
        sys.stderr.write(text)


def _scripts_part(error: BaseException) -> TracebackType | None:
    """Return the traceback from the script's first line on, without what ran it; all of it if the script never began."""
    part = error.__traceback__
    while part is not None and part.tb_frame.f_globals.get("__name__") != "__main__":
        part = part.tb_next
    return part if part is not None or isinstance(error, SyntaxError) else error.__traceback__


def serve(
    link: socket.socket, page: int, *, looks: Sequence[Look], script: Callable[[RunOrder], None] = run_script
) -> int:
    """Serve as a forked worker, for the fork server; returns the exit code.

    Args:
        link: to the agent.
        page: descriptor of the page for its beats.
        script: how a script is run.
        looks: further looks at what a run left, of libraries.
    """
    label_process("hf-spare")
    return Runner(link, page, script, looks).serve()
