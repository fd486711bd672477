"""The agent of one node: torchrun's, that replaces one failed worker while the others keep their processes.

It forks workers from the fork server, tells them what to run, hears what they say and sees them end. A failure is judged by
`core.elastic.escalation`; what is mended in place raises the incarnation (`elastic.launch.rendezvous.incarnation_rounds`), at which every agent gives its living
workers the new order: they leave their broken groups and run the script again in the same process. `elastic.launch.worker_eviction` helps
them, and ends those that cannot.

A new or lost node is torchrun's business, a new rendezvous; living workers wait for it instead of being ended. The last
action, restarting all workers, is torchrun's own way. A worker that finished waits until all ranks of the job have: until
then it may have to run again.

Must never: publish an incarnation before the failed process is dead and reaped; close what is not its own.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import ProcessFailure
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.utils.api import macros
from torch.distributed.launcher.api import LaunchConfig

from holdfast.base.errors import InUse
from holdfast.base.terminal import some_of
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.liveness import heartbeat_page
from holdfast.core.elastic.escalation import Failure, Fault, RecoveryAction, RecoveryDecision
from holdfast.core.elastic.failure_detector import Exit, Verdict, cause, first_failure
from holdfast.core.elastic.lost_node import MOST_SILENCE_S, NodeFacts, Sign, lost
from holdfast.core.elastic.rerun import cannot_run_twice
from holdfast.core.versions.late_copy_rules import is_result
from holdfast.elastic.launch import worker_assignment
from holdfast.elastic.launch.agent_options import Program, Rules
from holdfast.elastic.launch.incident_tracker import IncidentTracker, step_of
from holdfast.elastic.launch.rendezvous.incarnation_rounds import Incarnation, Round, RoundOver
from holdfast.elastic.launch.rendezvous.store_failover import LOST, RendezvousMoved
from holdfast.elastic.launch.rendezvous_agent import RendezvousAgent
from holdfast.elastic.launch.worker_eviction import enforce_deadlines, was_evicted
from holdfast.elastic.processes.forkserver import NotForked, readable
from holdfast.elastic.processes.process_supply import ProcessSupply
from holdfast.elastic.processes.worker_processes import KillReason, Workers, WorkerSlot, WorkerStatus
from holdfast.elastic.watchdog import proc_stats
from holdfast.elastic.watchdog.watchdog import Watchdog
from holdfast.elastic.worker.agent_channel import RunOrder

logger = logging.getLogger(__name__)

# How long broken groups may stay unexplained before they are made again: a lost node is known by then.
HOLD_S = 5.0
HOLD_ALONE_S = 1.0
# How long the death of a process that was killed is waited for, before its peers' broken groups are a failure of their own.
DIES_S = 60.0
SPARE_DELAY_S = 1.0
# How long a rank may be without a process because none can be forked.
VACANT_S = 600.0
# How long a worker that has finished keeps its process and its groups. The others may wait for the end of just that process.
RELEASE_S = 60.0
# How often it is said which workers are awaited at the end of the job.
SAY_S = 60.0
# What a machine may be out of for a while: descriptors, here or at all, and memory.
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
# From when on it is told that torch itself may hang, and what to do.
HINT_S = 300.0
# Why a job is not gone on with.
INPUT_SPENT = (
    "a rank has read from the standard input, and a run that begins anew would find the rest of it or nothing; give the"
    " script a file to read, or a terminal"
)
NO_NODE_BACK = "the static rendezvous cannot bring a node back; start the job again, or use --rdzv-backend=c10d"
# How often other launchers of a job that was told to end are asked for their ranks.
ASK_S = 1.0
# So often a launcher without ranks looks whether others have some.
BARRIER_S = 0.2
HEARD = {
    "started": WorkerStatus.RUNS,
    "finished": WorkerStatus.FINISHED,
    "raised": WorkerStatus.HOLDS,
    "failed": WorkerStatus.ENDS,
}


class Agent(RendezvousAgent):
    """Called by torchrun's loop: start workers, look at them every moment, stop them.

    Args:
        program: what workers run; None: a command that cannot be forked, and all is as with torchrun.
        watch: the watchdog, if it is on; closed here.
        rules: how long and how often.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        config: LaunchConfig,
        *,
        supply: ProcessSupply,
        program: Program | None,
        num_spares: int,
        watch: Watchdog | None,
        rules: Rules,
    ) -> None:
        super().__init__(spec, config, rules)
        self._supply, self._program, self._num_spares = supply, program, num_spares
        self._watch = watch
        self._cases = IncidentTracker(rules.limits)
        self._node = socket.gethostname()
        self._interval_s = spec.monitor_interval
        if program is not None:
            spec.monitor_interval = 0.0  # the wait is ours: it ends when something happens
        self._workers: Workers | None = None
        self._round: Round | None = None
        self._num_rounds, self._is_static = 0, spec.rdzv_handler.get_backend() == "static"
        self._current = Incarnation(0, 0, 0)
        self._recoveries = 0
        self._serial = 0
        self._num_needed, self._join_s = config.min_nodes, config.rdzv_configs.get("join_timeout", 600)
        self._failures: dict[int, ProcessFailure] = {}
        self._version = rules.version
        self._jobs: dict[str, str] = {}  # checkpoint path -> whose it is, as workers told
        self._all_anew = False
        self._unfit = ""  # why no process of this job runs its script again
        self._mended_at = time.monotonic()
        self._asked_at = 0.0
        self._scarce_said_at = -math.inf
        self._input_spent = False  # a script read what no second run can read

    # What torchrun's loop calls.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._program is None:
            return dict(super()._start_workers(worker_group))
        group: Any = worker_group  # torch's annotations say that its fields are None or never
        self._num_rounds += 1
        # The static rendezvous gives the same store every time: without a prefix, the end of this round would end the next one.
        store = PrefixStore(f"round/{self._num_rounds}", group.store) if self._is_static else group.store
        self._round = Round(
            store, rank=group.group_rank, size=group.group_world_size, address=group.master_addr,
            keeper=self._rules.early.address(), node=self._rules.node,
            ranks=[worker.global_rank for worker in group.workers],
        )  # fmt: skip
        self._round.version = self._version
        meeting = self._meeting
        apart, introduce = (meeting.apart, meeting.introduce) if meeting is not None else (str, object)
        self._current = self._round.open(self._recoveries, apart, introduce)
        if meeting is not None:
            meeting.learn()
        self._rules.early.starts(group, self._round.keepers())
        self._num_namesakes = self._round.namesakes()
        self._recoveries = self._current.recoveries
        if self._workers is None:
            self._workers = self._pcontext = self._new_workers(worker_group)
            self._workers.start()  # otherwise those that live get a new order, and the dead are replaced
            self._take_signals()
        else:  # the ranks of this node may be others
            self._workers.name_lines(worker_assignment.prefixes(self._log_line_prefix_template, worker_group))
        self._failures.clear()
        if self._watch is not None:
            self._watch.begin_round()
        self._order_all()
        return self._workers.pids()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._program is None or self._workers is None or self._round is None:
            return super()._monitor_workers(worker_group)
        self._raise_swallowed_signal()
        try:
            if self._meeting is not None:
                self._meeting.require()
            return self._monitor(worker_group)
        except LOST as error:
            return self._store_lost(error, worker_group)
        except OSError as error:
            if error.errno not in SCARCE:
                raise
            self._tell_scarce(error)
            return RunResult(state=WorkerState.HEALTHY)

    def _tell_scarce(self, error: OSError) -> None:
        """The workers are looked at again as soon as there are descriptors and memory to do it with."""
        now = time.monotonic()
        if now - self._scarce_said_at > SAY_S:
            self._scarce_said_at = now
            logger.error(
                "workers cannot be looked at now (%s; see `ulimit -n`); they go on, and it is tried again", error
            )

    def _monitor(self, worker_group: WorkerGroup) -> RunResult:
        assert self._workers is not None
        assert self._round is not None
        self._wait()
        now = time.monotonic()
        if self._identity is not None and not self._identity.holds(now):
            self._end_as_replaced()
        for worker_slot in self._workers.worker_slots.values():
            self._hear(worker_slot)
        silent = self._round.heartbeats.beat(now, stuck=self._watch is not None and self._watch.stuck)
        lost = self._obey_watch(now, silent)
        self._renew_unfit()
        over = self._round.over() or lost or self._fill_vacant(now) or self._look()
        over = over or self._look_for_lost(now, silent) or self._look_at_groups(now)
        newest = self._round.newest()
        follows = newest is not None and newest.number > self._current.number
        if self._input_spent and (follows or (over is not None and over.action != "stop")):
            over = RoundOver("stop", INPUT_SPENT)
            self._round.end(over)
        if over is not None:
            return self._leave_round(over, worker_group)
        if newest is not None and follows:
            self._go_on(newest)
        self._push(now)
        if self._all_finished():
            return self._succeeded()
        self._note_progress(now)
        return RunResult(state=WorkerState.HEALTHY)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """A node came or went: living workers go on or wait, and get a new order after the rendezvous."""
        with contextlib.suppress(*LOST):  # the next look meets it again
            if self._workers is not None and self._all_finished():
                return  # nobody has anything left to do: the next look says so
        self._recoveries += 1
        if self._round is not None:
            self._round.close()
        if self._workers is None or self._all_anew:
            self._all_anew = False
            super()._restart_workers(worker_group)
        else:
            logger.warning(
                "the nodes of the job have changed; workers go on when they have met: %d at least (--nnodes), within %s s",
                self._num_needed,
                self._join_s,
            )
            self._initialize_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        super()._stop_workers(worker_group, *args, **kwargs)
        self._workers = None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        for worker_slot in self._worker_slots():
            worker_slot.line.send("end")  # those that finished wait for this word
        try:
            super()._shutdown(death_sig, *args, **kwargs)
        finally:
            if self.is_ending():
                self._tell_that_ranks_are_gone()

    def _end(self, death_sig: signal.Signals, grace_s: float, *, told: bool = False) -> None:
        super()._end(death_sig, grace_s, told=told)
        if self._watch is not None:
            self._watch.ended()

    def rest(self) -> None:
        super().rest()
        if self._identity is not None:
            self._identity.leave()  # last, for it asks the store, which may not answer

    def exit_code_after(self, sigval: signal.Signals) -> int:
        """0 if every worker ended well after the signal, else the shell's 128 + signal. Says what is safe."""
        worker_slots = self._worker_slots()
        if not worker_slots:
            return super().exit_code_after(sigval)
        for worker_slot in worker_slots:
            self._hear(worker_slot)
            for message in worker_slot.last_words:
                self._note_state(worker_slot, message)
        well = sum(worker_slot.proc.poll() == 0 for worker_slot in worker_slots)
        logger.warning(
            "the job was told to end (%s): %d of %d workers ended well; %s",
            sigval.name,
            well,
            len(worker_slots),
            self.safe(),
        )
        return 0 if all(worker_slot.proc.poll() == 0 for worker_slot in worker_slots) else 128 + sigval

    def safe(self) -> str:
        """Returns what was saved, as far as workers told."""
        step = self._cases.saved_step
        if step < 0:
            return "no worker told of state that is safe"
        return f"the newest state that workers told to be safe is that after step {step}"

    def _hang(self, now: float) -> str:
        """Hear what workers say of their last saves. Who hangs the watchdog tells, once no rank elsewhere may save still."""
        for worker_slot in self._worker_slots():
            self._hear(worker_slot)
            if worker_slot.status is WorkerStatus.LEAVES:  # what it stands in is void: it has nothing to save
                self._enforce_deadlines(worker_slot, now)
        living = [self._rank_of(worker_slot) for worker_slot in self._worker_slots() if worker_slot.proc.poll() is None]
        why = self._watch.why_hopeless(now, living) if self._watch is not None else ""
        return why if why and self._is_nowhere_awaited(now) else ""

    def _is_nowhere_awaited(self, now: float) -> bool:
        """Return whether the ranks of all other launchers have ended or hang, as those launchers say, or are gone with
        them.
        """
        if self._round is None or self._round.size == 1:
            return True
        if now - self._asked_at < ASK_S:
            return False
        self._asked_at = now
        gone = self._gone()
        try:
            self._round.spend()
            return self._round.all_spent(gone)
        except (DistError, RuntimeError) as error:  # its host has left, and with it what others said
            logger.info("what other launchers say of their ranks is not known: %s", error)
            return self._round.size == 2 and bool(gone)

    def _tell_that_ranks_are_gone(self) -> None:
        """Tell the launchers whose ranks hang. The store may be gone with the job, or hang: then they wait."""
        if self._round is None or self._round.size == 1:
            return
        try:
            self._round.spend()
        except (DistError, RuntimeError) as error:
            logger.info("the others were not told that no rank is left here: %s", error)

    # What is seen.

    def _wait(self) -> None:
        """Until something happens, or the monitor interval is over."""
        lines = [worker_slot.line.fileno for worker_slot in self._worker_slots() if not worker_slot.silent]
        forkserver = self._supply.forkserver
        links = self._meeting.links if self._meeting is not None else None
        ends = links.filenos() if links is not None else []
        news = readable([*lines, *ends, *([] if forkserver.lost else [forkserver.fileno])], self._interval_s)
        # What is left unread would end the next wait at once.
        if links is not None and not set(ends).isdisjoint(news):
            links.gone()
        if not forkserver.lost and forkserver.fileno in news:
            forkserver.await_news(0.0)

    def _hear(self, worker_slot: WorkerSlot) -> None:
        worker_slot.line.flush()
        messages = [] if worker_slot.silent else worker_slot.line.receive(wait=False)
        if messages is None:
            worker_slot.silent = True
        for message in messages or ():
            self._note_state(worker_slot, message)
            worker_slot.left = message["op"] == "left" or (worker_slot.left and message["op"] != "started")
            worker_slot.began |= (
                message["op"] == "started"
            )  # also an order that was replaced: it needs help to leave that
            if message["op"] == "failed":  # whatever was ordered meanwhile: it has not heard of it, and ends
                worker_slot.announced_code = int(message["code"])
                worker_slot.set_status(WorkerStatus.ENDS)
                if self._round is not None:
                    self._round.ends(self._current.number)
            if message["op"] == "unfit":  # of whatever run: it cannot run again
                worker_slot.set_status(WorkerStatus.UNFIT)
                self._run_anew(message["why"], worker_slot)
            worker_slot.again = bool(message.get("again", worker_slot.again))
            if message["number"] != worker_slot.order or message["op"] not in HEARD:
                continue  # of an incarnation before, or the greeting
            worker_slot.set_status(HEARD[message["op"]])
            worker_slot.departs = bool(message.get("departs"))
            if self._watch is not None and worker_slot.status is not WorkerStatus.RUNS:  # it waits for a word of ours
                self._watch.gone(self._rank_of(worker_slot))
            worker_slot.error = message.get("error", "")

    def _note_state(self, worker_slot: WorkerSlot, message: Mapping[str, Any]) -> None:
        """Note what a worker tells of its job's state: whose it is, where it came back from, what is safe by now."""
        if message["op"] == "works on":
            self._tell_of_namesakes()
            if self._watch is not None and message["root"] not in self._jobs:
                self._watch.journal.works_on(message["root"])
            self._jobs[message["root"]] = message["job"]
        if message["op"] == "reads":
            self._input_spent = True
        if message["op"] == "saved":
            self._cases.saved(int(message["step"]))
        if message["number"] == worker_slot.order and message["op"] == "restored":
            self._version = ""  # the job came back once as the operator wanted; from now on it goes on from there
            if self._round is not None:
                self._round.version = ""
            self._cases.restored(self._rank_of(worker_slot), message)
            if self._watch is not None and worker_slot.local_rank == 0:
                self._watch.journal.restored(int(message["step"]) + 1)

    def _look(self) -> RoundOver | None:
        """Workers that ended although they should not have."""
        assert self._workers is not None
        assert self._round is not None
        dead = [worker_slot for worker_slot in self._worker_slots() if self._died(worker_slot)]
        spent = [worker_slot for worker_slot in dead if self._cannot_run_twice(worker_slot)]
        for worker_slot in spent:
            self._run_anew(f"it {self._why(worker_slot)} before its first step: {worker_slot.error}", worker_slot)
            self._replace(worker_slot.local_rank, self._recoveries + 1)
        dead = [worker_slot for worker_slot in dead if worker_slot not in spent]
        if not dead:
            if spent:
                self._round.propose(self._current.number + 1, f"scripts do not run again in this job: {self._unfit}")
            return None
        ends = [(worker_slot.local_rank, Exit(worker_slot.code, report=worker_slot.error)) for worker_slot in dead]
        first = self._workers.worker_slots[first_failure(ends)]
        dead.sort(key=lambda worker_slot: worker_slot is not first)
        readings = self._readings()
        step = step_of(heartbeat_page.read(first.page))
        for worker_slot in dead:
            self._note_death(worker_slot)
        ranks = [self._rank_of(worker_slot) for worker_slot in dead]
        found = first.verdict
        error = found.reason if found else first.error or self._why(first)
        by, after_s = ("; ".join(found.evidence), found.found_after_s) if found else (self._why(first), 0.0)
        facts = {"ranks": ranks, "nodes": [self._node], "found_by": by, "found_s": after_s}
        failed = Failure(Fault.PROCESS, ranks[0], step, error, self._node, said=not found and bool(first.error))
        answer = self._cases.judge(failed, time.monotonic(), readings, facts)
        if answer.action is RecoveryAction.REPLACE:
            for worker_slot in dead:
                self._replace(worker_slot.local_rank, self._recoveries + 1)
        return self._act(answer, f"rank {ranks[0]} {self._why(first)}")

    def _renew_unfit(self) -> None:
        """Processes that cannot run the script again are replaced by forks, which get the order in force."""
        assert self._workers is not None
        for worker in self._worker_group.workers:
            worker_slot = self._workers.worker_slots[worker.local_rank]
            if worker_slot.status is WorkerStatus.UNFIT and worker_slot.proc.poll() is not None:
                self._replace(worker.local_rank, self._recoveries)
                self._give_order(worker)
                self._cases.renewed(worker.global_rank)

    def _run_anew(self, why: str, worker_slot: WorkerSlot) -> None:
        """Note that from now on no process of this job runs its script again: what holds for one holds for others."""
        assert self._round is not None
        rank = self._rank_of(worker_slot)
        if why and not self._unfit:
            self._unfit = self._round.all_anew(f"rank {rank}: {why}"[:1000])
            logger.warning(
                "the script cannot run again in its process (%s). Processes that live are replaced from now on, which"
                " counts as no failure; they go on from what was saved in memory",
                self._unfit,
            )

    def _cannot_run_twice(self, worker_slot: WorkerSlot) -> bool:
        return cannot_run_twice(
            again=worker_slot.again,
            num_steps=step_of(heartbeat_page.read(worker_slot.page)),
            ran_s=time.monotonic() - self._mended_at,
            code=worker_slot.code,
            condemned=worker_slot.verdict is not None,
        )

    def _died(self, worker_slot: WorkerSlot) -> bool:
        code = worker_slot.proc.poll()
        if (
            code is None
            or worker_slot.status is WorkerStatus.VACANT
            or (worker_slot.status is WorkerStatus.FINISHED and worker_slot.order == self._serial)
        ):
            return False
        self._hear(worker_slot)  # what it said last
        if worker_slot.status is WorkerStatus.LEAVES and (worker_slot.departs or was_evicted(worker_slot)):
            # It had finished, and ended as its order came, or could not leave: another one takes the order, and it was no failure.
            worker_slot.set_status(WorkerStatus.UNFIT)
        if worker_slot.status is WorkerStatus.UNFIT:
            return False
        # Who has not begun its order ends a run that was broken off, whose results are void.
        if (
            code == 0
            and worker_slot.order == self._serial
            and is_result(left=worker_slot.status is WorkerStatus.LEAVES)
        ):
            worker_slot.set_status(WorkerStatus.FINISHED)  # the script left by a way of its own, and well
            return False
        return True

    def _note_death(self, worker_slot: WorkerSlot) -> None:
        assert self._workers is not None
        code = worker_slot.code
        rank = worker_slot.local_rank
        self._failures[rank] = ProcessFailure(
            local_rank=rank, pid=worker_slot.proc.pid, exitcode=code, error_file=self._workers.error_files[rank]
        )
        worker_slot.clean_up()  # first: if it cannot be done now, all of this comes again
        logger.error(
            "failed (exitcode: %s) rank: %s local_rank: %s (pid: %s)",
            code, self._rank_of(worker_slot), rank, worker_slot.proc.pid,
        )  # fmt: skip
        if self._watch is not None:
            self._watch.gone(self._rank_of(worker_slot))

    def _why(self, worker_slot: WorkerSlot) -> str:
        """A phrase that follows the name of a worker: how it ended."""
        code = worker_slot.code
        if worker_slot.killed_for is KillReason.LATE and code == -signal.SIGKILL:
            return f"was killed: {KillReason.LATE.value}"
        return self._watch.why_it_ended(code) if self._watch is not None else cause(Exit(code))

    def _readings(self) -> list[heartbeat_page.Reading]:
        return [heartbeat_page.read(worker_slot.page) for worker_slot in self._worker_slots() if worker_slot.page >= 0]

    def _obey_watch(self, now: float, silent: Mapping[int, float]) -> RoundOver | None:
        """Obey the watchdog: what is stuck gets SIGKILL, and goes the way of a dead process. A lost node is left; who
        all wait, meet anew.
        """
        assert self._round is not None
        if self._watch is None or any(
            worker_slot.status is WorkerStatus.LEAVES for worker_slot in self._worker_slots()
        ):
            return None
        mine = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        nodes = {self._round.ranks_of(node): (node, seconds) for node, seconds in silent.items()}
        silent_nodes = {node: (seconds, ranks) for ranks, (node, seconds) in nodes.items()}
        size, elsewhere = self._worker_group.workers[0].world_size, self._round.heartbeats.stuck_elsewhere(now)
        of_many: Verdict | None = None
        may = {"may_replace": self._cases.may_fail(), "may_lose_node": not self._is_static}
        for verdict in self._watch.poll(now, silent_nodes, world_size=size, stuck_elsewhere=elsewhere, **may):
            for rank in verdict.ranks:
                if verdict.kind in ("restart_rank", "replace_node") and rank in mine:
                    worker_slot = self._workers_of()[mine[rank]]
                    worker_slot.verdict = verdict
                    worker_slot.kill(KillReason.HANGS)
            if verdict.kind == "restart_all" or (verdict.ranks in nodes and verdict.kind == "replace_node"):
                of_many = verdict
        if of_many is None or (self._round.wanted(self._current.number + 1) and not self._is_leader_missed(silent)):
            return None
        if of_many.ranks in nodes:
            return self._node_lost(now, *nodes[of_many.ranks], of_many.reason)
        by = "; ".join(of_many.evidence)
        failure = Failure(Fault.GROUPS, first_error=f"{of_many.reason}: {by}", node=self._node)
        facts = {"ranks": of_many.ranks, "nodes": [self._node], "found_by": by, "found_s": of_many.found_after_s}
        return self._act(self._cases.judge(failure, now, self._readings(), facts), of_many.reason)

    def _node_lost(self, now: float, node: int, silent_s: float, what: str) -> RoundOver | None:
        assert self._round is not None
        failure = Failure(Fault.NODE, node=f"node of group rank {node}", first_error=what)
        facts = {"ranks": self._round.ranks_of(node), "nodes": [failure.node], "found_by": what, "found_s": silent_s}
        return self._act(self._cases.judge(failure, now, self._readings(), facts), what)

    def _look_for_lost(self, now: float, silent: Mapping[int, float]) -> RoundOver | None:
        """A node that is silent or gone, and ranks here that miss it: two kinds of evidence."""
        assert self._round is not None
        sign = self._sign_of_loss(silent)
        if sign is None:
            return None
        signs = self._signs(silent)
        if sign is Sign.AWAITED:  # a launcher that goes when its ranks have finished is not waited for
            done = self._current.number
            signs = {node: facts for node, facts in signs.items() if not self._round.has_finished(node, done)}
        found = lost(signs, sign)
        return (
            self._node_lost(now, found.value, silent.get(found.value, 0.0), found.reason) if found.value >= 0 else None
        )

    def _sign_of_loss(self, silent: Mapping[int, float]) -> Sign | None:
        """Return what shows here that a node may be lost; None: nothing does."""
        assert self._round is not None
        holding, has_finished, is_missed = self._holding(), self._has_finished(), self._is_leader_missed(silent)
        if not holding and not has_finished and not is_missed:
            return None
        if self._round.wanted(self._current.number + 1):
            return Sign.UNANSWERED if is_missed else None
        if holding:
            return Sign.BROKEN
        return Sign.AWAITED if has_finished and not self._all_finished() else None

    def _holding(self) -> list[WorkerSlot]:
        """Return the workers that hold an error of broken groups."""
        slots = self._worker_slots()
        return [slot for slot in slots if slot.status is WorkerStatus.HOLDS and slot.order == self._serial]

    def _look_at_groups(self, now: float) -> RoundOver | None:
        """Workers that hold an error of broken groups, which no process and no node explains."""
        assert self._round is not None
        holding = self._holding()
        if not holding or self._round.wanted(self._current.number + 1):
            return None
        if self._round.somebody_ends(self._current.number):
            return None  # the cause is known, and is told as soon as that process is gone
        if any(
            worker_slot.proc.is_untold()
            or (
                worker_slot.killed_for is KillReason.HANGS
                and now - worker_slot.killed_at < DIES_S
                and worker_slot.proc.poll() is None
            )
            for worker_slot in self._worker_slots()
        ):
            return (
                None  # so is this one: a process has ended, or hung and was killed, and a busy machine takes its time
            )
        first = min(holding, key=lambda worker_slot: worker_slot.since)
        held_s = now - first.since
        if held_s < (HOLD_S if self._round.size > 1 else HOLD_ALONE_S):
            return None
        if held_s < HOLD_S + MOST_SILENCE_S and self._round.heartbeats.is_one_missed(now):
            return None  # that node may be lost, which is known soon: who goes on in place would wait for its ranks
        if not self._unfit and self._cannot_run_twice(first):
            self._run_anew(f"it failed before its first step: {first.error}", first)
            self._round.propose(self._current.number + 1, f"scripts do not run again in this job: {self._unfit}")
            return None
        rank = self._rank_of(first)
        slots = [slot for slot in self._worker_slots() if slot.status is WorkerStatus.FINISHED]
        ended = [f"rank {self._rank_of(slot)}" for slot in slots if slot.proc.poll() is not None]
        why = f"{some_of(ended, 8)} had finished" if ended else "no process died"
        failure = Failure(Fault.GROUPS, first_error=f"rank {rank}: {first.error}", node=self._node)
        answer = self._cases.judge(failure, now, self._readings(), {"found_by": why} if ended else None)
        return self._act(answer, f"groups broke, and {why}: {first.error[:200]}")

    def _gone(self) -> dict[int, str]:
        """Return group rank -> proof of the launchers whose processes have ended."""
        return self._meeting.links.gone() if self._meeting is not None else {}

    def _is_leader_missed(self, silent: Mapping[int, float]) -> bool:
        """Return whether the launcher that grants incarnations is silent or gone: what was asked for may never come."""
        assert self._round is not None
        return not self._round.leads and 0 in {*silent, *self._gone()}

    def _signs(self, silent: Mapping[int, float]) -> dict[int, NodeFacts]:
        """Return what is known of the nodes that are silent or proven gone."""
        assert self._round is not None
        gone = self._gone()
        return {
            node: NodeFacts(silent.get(node, 0.0), self._round.heartbeats.longest_silence_s(node), gone.get(node, ""))
            for node in {*silent, *gone}
        }

    # What is done.

    def _act(self, answer: RecoveryDecision, fact: str) -> RoundOver | None:
        assert self._round is not None
        reason = f"{fact}: {answer.action.value} ({answer.reason})"
        logger.warning("%s", reason)
        if answer.action in (RecoveryAction.REJOIN, RecoveryAction.REPLACE):
            self._round.propose(self._current.number + 1, reason, older=answer.older)
            return None
        action = {
            RecoveryAction.REPLACE_NODE: "again",
            RecoveryAction.RESTART_ALL: "restart",
            RecoveryAction.STOP: "stop",
        }[answer.action]
        reason = self._cases.summary if answer.action is RecoveryAction.STOP else reason
        if self._is_static and answer.action is RecoveryAction.REPLACE_NODE:  # nobody could join, and all would wait
            action, reason = "stop", f"{fact}: {NO_NODE_BACK}"
        self._round.end(RoundOver(action, reason))
        return self._round.over()

    def _leave_round(self, over: RoundOver, worker_group: WorkerGroup) -> RunResult:
        if over.action == "again":
            self._restart_workers(worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        if over.action == "restart":
            logger.warning("all workers are restarted: %s", over.reason)
            self._all_anew, self._remaining_restarts = True, max(1, self._remaining_restarts)
            return RunResult(state=WorkerState.FAILED)
        logger.error("the job stops: %s", over.reason)
        self._tell(self._cases.ended(time.monotonic()))
        if self._round is not None:
            self._round.leave()
        for worker_slot in self._worker_slots():
            if worker_slot.status is WorkerStatus.HOLDS:  # its error stands; it prints it and ends
                worker_slot.line.send("fail")
                worker_slot.set_status(WorkerStatus.ENDS)
                worker_slot.announced_code = worker_slot.announced_code or 1
        for worker_slot in self._worker_slots():
            if worker_slot.status is WorkerStatus.ENDS and worker_slot.proc.poll() is None:
                worker_slot.await_end(self._rules.exit_grace_s + worker_slot.since - time.monotonic())
                self._note_death(worker_slot)
        self._remaining_restarts = 0
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        failures = {ranks[local_rank]: failure for local_rank, failure in self._failures.items()}
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _end_as_replaced(self) -> NoReturn:
        """Another launcher is this node by now: nothing of ours goes on, and the job, which is the other's, does.

        Raises:
            InUse: always.
        """
        for worker_slot in self._worker_slots():
            worker_slot.close(signal.SIGKILL)
        raise InUse(
            "another launcher took the place of this one, which was silent for too long; it ends",
            where=f"node {self._rules.name}",
            remedy="start it again under another --node-label if the node is wanted",
        )

    def _store_lost(self, error: Exception, worker_group: WorkerGroup) -> RunResult:
        """The host of the rendezvous store is gone: workers go on as they can until all have met elsewhere."""
        if self._meeting is None:
            raise error
        self._meeting.lost(error)
        if not isinstance(error, RendezvousMoved):
            failure = Failure(Fault.NODE, node="the host of the rendezvous store", first_error="it does not answer")
            answer = self._cases.judge(failure, time.monotonic(), self._readings(), {"nodes": [failure.node]})
            if answer.action is RecoveryAction.STOP:
                return self._leave_round(RoundOver("stop", self._cases.summary), worker_group)
        self._restart_workers(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _go_on(self, newest: Incarnation) -> None:
        logger.warning("incarnation %d: %s", newest.number, newest.reason)
        self._current, self._recoveries = newest, newest.recoveries
        self._order_all()

    def _order_all(self) -> None:
        """Every living worker gets the order of the incarnation in force; the dead are replaced."""
        assert self._workers is not None
        assert self._round is not None
        before = {worker.id for worker in self._worker_group.workers}
        self._unfit = self._round.all_anew(self._unfit)
        for worker_slot in self._worker_slots():
            if self._died(worker_slot):  # since the last look: it belongs to the failure that the order is of
                self._note_death(worker_slot)
                self._cases.join([self._rank_of(worker_slot)])
        self._serial += 1  # incarnations are counted anew in every round, orders are not
        for worker in self._worker_group.workers:
            worker_slot = self._workers.worker_slots[worker.local_rank]
            if worker_slot.proc.poll() is not None:
                self._replace(worker.local_rank, self._recoveries)
            self._give_order(worker)
        self._mended_at = time.monotonic()
        kept = [worker.global_rank for worker in self._worker_group.workers if worker.id in before]
        self._cases.ordered(self._mended_at, kept)

    def _replace(self, local_rank: int, incarnation: int) -> None:
        """Another process takes the worker slot; if none can be had the worker slot is vacant for a while."""
        assert self._workers is not None
        try:
            self._workers.replace(local_rank, incarnation)
        except NotForked as error:
            self._not_forked(error)
        else:
            self._supply.worked()

    def _not_forked(self, error: NotForked) -> None:
        self._supply.failed(error, time.monotonic())
        if self._workers is not None:
            self._workers.fork_from(self._supply.forkserver)

    def _fill_vacant(self, now: float) -> RoundOver | None:
        """Ranks without a process get one as soon as there is one; a job that gets none for long is over."""
        assert self._workers is not None
        assert self._round is not None
        for worker in self._worker_group.workers:
            worker_slot = self._workers.worker_slots[worker.local_rank]
            if worker_slot.status is not WorkerStatus.VACANT:
                continue
            if now - worker_slot.since > VACANT_S:
                what = f"no process could be had for rank {worker.global_rank} for {VACANT_S:.0f} s"
                self._round.end(RoundOver("stop", what))
                return self._round.over()
            if self._supply.may_try(now) and not self._round.wanted(self._current.number + 1):
                since = worker_slot.since
                self._replace(worker.local_rank, self._recoveries)
                self._give_order(worker)
                worker_slot.since = since
        return None

    def _refill(self, now: float) -> None:
        if self._workers is None or not self._supply.may_try(now):
            return
        try:
            self._workers.refill()
        except NotForked as error:
            self._not_forked(error)

    def _give_order(self, worker: Worker) -> None:
        assert self._workers is not None
        worker_slot = self._workers.worker_slots[worker.local_rank]
        worker.id = worker_slot.proc.pid
        worker_slot.order = self._serial
        if worker_slot.status in (WorkerStatus.ENDS, WorkerStatus.UNFIT, WorkerStatus.VACANT):
            return  # it hears nothing any more, and is replaced when it has ended
        self._workers.forget_error(worker.local_rank)
        worker_slot.line.order(self._order(worker), self._workers.notes_of(worker.local_rank))
        worker_slot.set_status(WorkerStatus.LEAVES)
        if self._watch is not None:
            self._watch.started(worker.global_rank, worker_slot.proc.pid, worker_slot.page)

    def _push(self, now: float) -> None:
        """Workers that have not begun their order are helped, then ended. A spare is forked in a quiet moment."""
        assert self._workers is not None
        for worker_slot in self._worker_slots():
            self._enforce_deadlines(worker_slot, now)
            if (
                worker_slot.status is WorkerStatus.FINISHED
                and not worker_slot.departs
                and now - worker_slot.since > RELEASE_S
            ):
                worker_slot.departs = True
                worker_slot.line.send("end")
        still = any(worker_slot.status is WorkerStatus.LEAVES for worker_slot in self._worker_slots())
        if not still and now - self._mended_at > SPARE_DELAY_S:
            self._refill(now)

    def _enforce_deadlines(self, worker_slot: WorkerSlot, now: float) -> None:
        enforce_deadlines(worker_slot, now, store_port=self._current.port, exit_grace_s=self._rules.exit_grace_s)

    def _note_progress(self, now: float) -> None:
        all_run = all(
            worker_slot.status in (WorkerStatus.RUNS, WorkerStatus.FINISHED) for worker_slot in self._worker_slots()
        )
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        self._tell(self._cases.look(now, dict(zip(ranks, self._readings(), strict=False)), all_run=all_run))

    def _tell(self, incident: dict[str, Any] | None) -> None:
        if incident is not None and self._watch is not None:
            self._watch.journal.incident(incident)

    def _all_finished(self) -> bool:
        assert self._round is not None
        if not self._has_finished():
            return False
        self._round.finish(self._current.number)
        return self._round.all_finished(self._current.number)

    def _has_finished(self) -> bool:
        """Return whether all workers of this node have finished the order in force."""
        return all(
            worker_slot.status is WorkerStatus.FINISHED and worker_slot.order == self._serial
            for worker_slot in self._worker_slots()
        )

    def _succeeded(self) -> RunResult:
        """All ranks have finished: workers end as plain Python does. Threads and exit handlers have all the time they take."""
        assert self._workers is not None
        self._tell(self._cases.ended(time.monotonic()))
        self._workers.dismiss_spares()
        for worker_slot in self._worker_slots():
            worker_slot.line.send("end")
        self._await_ends()
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        failed = [
            worker_slot
            for worker_slot in self._worker_slots()
            if worker_slot.proc.returncode and not worker_slot.proc.guessed
        ]
        for worker_slot in failed:
            logger.error(
                "rank %d finished its script and then %s",
                ranks[worker_slot.local_rank],
                self._why(worker_slot),
            )
            self._note_death(worker_slot)
        if failed:
            self._remaining_restarts = 0  # the work is done: what failed is what the script does at its end
            failures = {ranks[local_rank]: failure for local_rank, failure in self._failures.items()}
            self._exit_barrier()  # other nodes wait there for this one
            return RunResult(state=WorkerState.FAILED, failures=failures)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks.values()))

    def _exit_barrier(self) -> None:
        """Waits until no launcher has a rank any more: one of them hosts the store that all ask.

        torch's own stands in one call, in which Python hears no signal, and waits as long for a launcher that is gone.
        """
        if self._round is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
            return
        until = time.monotonic() + self._exit_barrier_timeout
        try:
            self._round.spend()
            while not self._round.all_spent(gone := self._gone()) and time.monotonic() < until:
                time.sleep(BARRIER_S)
        except (DistError, RuntimeError) as error:  # its host has left, or was lost: nothing more is heard
            logger.info("the other launchers are not waited for: %s", error)
            return
        for node, proof in sorted(gone.items()):
            logger.warning("node of group rank %d is not waited for: %s", node, proof)

    def _await_ends(self) -> None:
        began = said = time.monotonic()
        while lasting := [worker_slot for worker_slot in self._worker_slots() if worker_slot.proc.poll() is None]:
            self._supply.forkserver.await_news(self._interval_s or 1.0)
            now = time.monotonic()
            if self._identity is not None:
                self._identity.holds(now)
            if now - said > SAY_S:
                said = now
                named = {self._rank_of(worker_slot): worker_slot.proc.pid for worker_slot in lasting}
                num_ended = len(self._worker_slots()) - len(named)
                logger.warning("%s", awaited(named, now - began, num_ended=num_ended))

    # Parts.

    def _new_workers(self, worker_group: WorkerGroup) -> Workers:
        spec = worker_group.spec
        envs = {worker.local_rank: self._environment(worker) for worker in worker_group.workers}
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        known = inspect.signature(SubprocessContext).parameters
        names = ("duplicate_stdout_filters", "duplicate_stderr_filters")
        return Workers(
            self._supply.forkserver,
            self._logs_specs,
            self._num_spares,
            name=spec.role,
            entrypoint=self._program.arguments[0] if self._program else "",
            args=dict.fromkeys(envs, ()),
            envs=envs,
            log_line_prefixes=worker_assignment.prefixes(self._log_line_prefix_template, worker_group),
            **{name: getattr(spec, name, None) for name in names if name in known},
        )

    def _environment(self, worker: Worker) -> dict[str, str]:
        assert self._round is not None
        env = worker_assignment.environment(
            self._worker_group,
            worker,
            address=self._round.address,
            port=self._current.port,
            recoveries=self._recoveries,
        )
        if hasattr(self, "_set_local_rank_env"):
            self._set_local_rank_env(env, worker.local_rank, self._worker_group.spec)  # type: ignore[arg-type]
        return {"LOCAL_RANK": str(worker.local_rank), **env}

    def _order(self, worker: Worker) -> RunOrder:
        assert self._workers is not None
        assert self._program is not None
        rank = worker.local_rank
        logged = self._workers.envs[rank].get("TORCHELASTIC_ERROR_FILE")
        environment = {**os.environ, **self._environment(worker)}
        if self._watch is not None:  # without it a hang would be left to nobody
            environment |= accelerator.presets(os.environ)  # what the user set stays; torchrun's own default does not
        if logged is not None:
            environment["TORCHELASTIC_ERROR_FILE"] = logged
        arguments = macros.substitute(list(self._program.arguments), str(rank))
        return RunOrder(
            self._serial,
            environment,
            tuple(arguments),
            is_module=self._program.is_module,
            stdout=self._workers.stdouts[rank] or "",
            stderr=self._workers.stderrs[rank] or "",
            older=self._current.older,
            version=self._current.version,
            jobs=dict(self._jobs),
            anew=bool(self._unfit),
            text=self._program.text,
        )

    def _rank_of(self, worker_slot: WorkerSlot) -> int:
        return int(self._worker_group.workers[worker_slot.local_rank].global_rank)

    def _worker_slots(self) -> list[WorkerSlot]:
        return list(self._workers.worker_slots.values()) if self._workers is not None else []

    def _workers_of(self) -> dict[int, WorkerSlot]:
        return self._workers.worker_slots if self._workers is not None else {}

    def _spared(self) -> set[int]:
        return {
            worker_slot.proc.pid for worker_slot in self._worker_slots() if worker_slot.status is WorkerStatus.FINISHED
        }


def awaited(named: Mapping[int, int], after_s: float, *, num_ended: int) -> str:
    """Return what is said of ranks that have finished the script and do not end.

    Args:
        named: rank -> process id.
        after_s: seconds since all ranks of the job have finished.
        num_ended: how many ranks of this node have ended.
    """
    who = ", ".join(f"rank {rank} (process {pid}{_if_stopped(pid)})" for rank, pid in sorted(named.items()))
    text = f"the script has finished, and its threads or exit handlers have not: {who}"
    if after_s < HINT_S:
        return text
    others = f"; {num_ended} other ranks of this node have ended" if num_ended else ""
    return (
        f"{text}, after {after_s:.0f} s{others}. torch may hang at its own end (a DDP model that outlives its gloo group);"
        " `py-spy dump --native --pid` shows it. Nothing is killed here: if no work is left there, `kill -9` ends it"
    )


def _if_stopped(pid: int) -> str:
    """Return what is to be done about a process that a signal has stopped; nothing if none has."""
    return f", which is stopped: `kill -CONT {pid}` lets it end" if proc_stats.state(pid) == "T" else ""
