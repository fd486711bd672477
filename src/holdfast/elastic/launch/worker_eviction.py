"""Getting a worker out of a run that is over, from its agent: its sockets are cut from outside, then it is ended.

    at once     the order; the worker's own thread interrupts the script and cuts its groups' sockets (`elastic.worker.worker_main`)
    0.5 s       the agent cuts them too, and again every 0.5 s: the worker may hold the interpreter's lock
    5 s         SIGKILL, if its main thread stood still between the last ten cuts and it has not left the script
    60 s        SIGKILL, whatever it does

The third line is for a gap in gloo (as of torch 2.13): a pair whose connection ends tells the operations that wait for their
turn, but not the one whose bytes are on their way (`Pair::signalException` in gloo/transport/tcp/pair.cc looks at
neither `rx_` nor the unbound buffers in `tx_`). Whoever waits for that one is not woken by anything but its timeout,
which is half an hour. Messages between pipeline stages are hit nearly always, small all-reduces now and then.

Who is killed for standing still failed in nothing: a fork takes the order in its place, and the others, who may wait for it already,
get no other one. Who does not begin its order in time counts as one more failed process.

A worker that told of an error of its own runs its exit handlers and waits for its threads, as plain Python does. The others
wait for it: two processes of one rank would share a device, ports and files. It has `exit_grace_s` for that.
"""

from __future__ import annotations

import contextlib
import logging
import signal

from holdfast.elastic.processes.worker_processes import KillReason, WorkerSlot, WorkerStatus
from holdfast.elastic.watchdog import proc_stats, worker_interrupt

logger = logging.getLogger(__name__)

CUT_S = 0.5
# A main thread that computes, or wants to and gets no processor, is not still; one that merely sleeps hears the signal
# that the worker sends itself ten times a second. Torch's `FileStore` sleeps a hundred times a second and looks in between.
STILL_CUTS = 10
RUNS_SHARE, WANTS_SHARE = 0.1, 0.5
# In the log, behind the process.
STANDS, STOPPED = "stands in a wait that nothing ends, not even cut connections", "is stopped in a run that is over"
KILL_S = 60.0  # a starved machine may need some tens of seconds for what takes one otherwise
START_S = 300.0


def enforce_deadlines(worker_slot: WorkerSlot, now: float, *, store_port: int, exit_grace_s: float) -> None:
    """Kill a worker that is past a deadline, and cut connections that keep it in its broken groups.

    Args:
        worker_slot: of a worker; only one that has an order and does not begin it, or ends, is touched.
        now: monotonic.
        store_port: connections to it are the rendezvous store's, and are left alone.
        exit_grace_s: how long a worker that told of its error may take to end.
    """
    overdue = worker_slot.status is WorkerStatus.ENDS and now - worker_slot.since > exit_grace_s
    if overdue and worker_slot.killed_for is not KillReason.OVERDUE:
        worker_slot.cut_off()
    if worker_slot.status is not WorkerStatus.LEAVES or worker_slot.killed_for is not None:
        return  # the end of one that was killed may take a while, in which it does not look still
    if now - worker_slot.since > (KILL_S if worker_slot.began else START_S):
        logger.error("process %d did not begin its order within %.0f s", worker_slot.proc.pid, now - worker_slot.since)
        worker_slot.kill(KillReason.LATE)
    elif worker_slot.began and not worker_slot.left and now - max(worker_slot.since, worker_slot.cut_at) >= CUT_S:
        is_later = worker_slot.cut_at > worker_slot.since
        still = stood_still(worker_slot, now - worker_slot.cut_at)
        worker_slot.num_still = worker_slot.num_still + 1 if is_later and still else 0
        worker_slot.cut_at = now
        worker_interrupt.cut(worker_slot.proc.pid, worker_slot.proc.pidfd, spared_ports=(store_port,))
        if worker_slot.num_still == STILL_CUTS:
            stopped = proc_stats.state(worker_slot.proc.pid) == "T"
            logger.error(
                "process %d %s: it is killed, and a fork takes the order of local rank %d, which counts as no failure",
                worker_slot.proc.pid, STOPPED if stopped else STANDS, worker_slot.local_rank,
            )  # fmt: skip
            worker_slot.kill(KillReason.STANDS)


def was_evicted(worker_slot: WorkerSlot) -> bool:
    """Tell whether a worker that is dead was killed for standing in a wait that nothing ends."""
    return worker_slot.killed_for is KillReason.STANDS and worker_slot.code == -signal.SIGKILL


def stood_still(worker_slot: WorkerSlot, elapsed: float) -> bool:
    """Return whether the main thread stood still since the last cut: it slept, was stopped, or hardly ran between short
    sleeps. Notes its times for the next cut.

    Args:
        worker_slot: of a worker that has an order and has not left its run.
        elapsed: seconds since then.
    """
    pid, before = worker_slot.proc.pid, worker_slot.cut_times
    with contextlib.suppress(OSError, ValueError):  # the kernel does not tell: its state is all that is known
        worker_slot.cut_times = proc_stats.main_thread_times(pid)
    ran, waited = (now - then for now, then in zip(worker_slot.cut_times, before, strict=True))
    state = proc_stats.state(pid)
    if state not in ("S", "T") and not (state == "R" and ran > 0):  # who is ready and never ran is starved
        return False
    return ran <= RUNS_SHARE * elapsed and ran + waited <= WANTS_SHARE * elapsed
