"""The stage for scenarios about verdicts: workers that step, wait, hang, spin; what the real Watch says, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast.core.elastic.failure_detector import LATE_S, Exit, Watch, cause, first_failure
from holdfast.core.elastic.watch_mode import MODES
from holdfast.core.elastic.worker_facts import Beat, Phase, WorkerSample
from scenario_kit import Args, Lines, numbers

LOOK_EVERY_S = 0.05
MOVING = 0.3  # processor seconds of threads that move a collective's bytes, in each second
# What a second of each way of being costs: (processor seconds, wakes, bytes read, kernel's letter).
WAYS = {
    "steps": (0.5, 50, 0, "S"),
    "waits": (0.0, 0, 0, "S"),  # in a collective, for others
    "moves": (0.0, 0, 0, "S"),  # in a collective, and its bytes are moving
    "hangs": (0.0, 0, 0, "S"),  # on a lock
    "spins": (1.0, 0, 0, "R"),
    "reads": (0.01, 0, 1 << 20, "S"),
    "sends": (0.0, 0, 0, "S"),  # in a collective, over a slow link
    "stopped": (0.0, 0, 0, "T"),
    "traced": (0.0, 0, 0, "t"),
    "device": (0.0, 0, 0, "D"),
    "starved": (0.02, 1, 0, "R"),
    "unheard": (0.5, 50, 0, "S"),  # goes on, but its beats do not arrive
}


@dataclass
class Worker:
    way: str
    sight: WorkerSample
    every_s: float = 0.1
    stack: Phase | None = None


class Watching:
    """One node's workers and its Watch; time passes by command."""

    def __init__(self, mode: str = "quick") -> None:
        self.now_s = 0.0
        self.watch, self.world_size = Watch(MODES[mode]), 0
        self.stuck: dict[int, tuple[int, ...]] = {}
        self.workers: dict[int, Worker] = {}
        self.silent: dict[int, float] = {}
        self.node_ranks: dict[int, tuple[int, ...]] = {}

    def run(self, name: str, args: Args) -> Lines:
        command: Callable[[Args], Lines | None] = getattr(self, f"do_{name.replace('-', '_')}")
        return command(args) or []

    def do_job(self, args: Args) -> None:
        ranks = numbers(args["ranks"])
        self.workers = {}
        mode = MODES[args["mode"]] if "mode" in args else self.watch.mode
        self.watch, self.world_size = Watch(mode), int(args.get("world", len(ranks)))
        for rank in ranks:
            self._start(rank, float(args.get("every", "0.1")))

    def _start(self, rank: int, every_s: float) -> None:
        self.watch.started(rank, self.now_s)
        self.workers[rank] = Worker("steps", WorkerSample(rank, Beat(phase=Phase.STEP), wakes=1), every_s)

    def do_ranks(self, args: Args) -> None:
        """`ranks who=1,2 way=hangs phase=data stack=collective at=20`: the step, if it is another one."""
        for rank in numbers(args["who"]):
            worker = self.workers[rank]
            worker.way = args.get("way", worker.way)
            worker.every_s = float(args.get("every", worker.every_s))
            worker.stack = Phase[args["stack"].upper()] if "stack" in args else None
            beat, inside = worker.sight.beat, worker.way in ("waits", "moves", "sends")
            phase = Phase[args["phase"].upper()] if "phase" in args else Phase.COLLECTIVE if inside else beat.phase
            entered = beat.sequence + 1 if inside else beat.sequence
            name = args.get("collective", "all_reduce") if inside else beat.collective
            step = int(args.get("at", beat.step))
            changes = beat.changes + (worker.way in ("waits", "moves", "sends", "steps") or "phase" in args)
            worker.sight = replace(
                worker.sight,
                beat=replace(
                    beat, changes=changes, step=step, phase=phase, collective=name, sequence=entered, inside=inside
                ),
                state=WAYS[worker.way][3],
            )

    def do_replaced(self, args: Args) -> None:
        for rank in numbers(args["who"]):
            self._start(rank, 0.1)

    def do_node(self, args: Args) -> None:
        """`node silent=1 ranks=4-7`, `node heard=1`, `node stuck=1 ranks=4-7`, `node stuck=1`: it says so, and no more."""
        if "stuck" in args:
            self.stuck[int(args["stuck"])] = tuple(numbers(args["ranks"]) if "ranks" in args else ())
        elif "heard" in args:
            self.silent.pop(int(args["heard"]))
        else:
            self.silent[int(args["silent"])] = self.now_s
            self.node_ranks[int(args["silent"])] = tuple(numbers(args["ranks"]))

    def do_exit(self, args: Args) -> Lines:
        """`exit rank=1 code=-9 memory`."""
        self.workers.pop(int(args["rank"]), None)
        ended = Exit(int(args["code"]), "memory" in args, args.get("report", ""))
        self.watch.gone(int(args["rank"]))
        return [f"rank {args['rank']} {cause(ended)}" if ended.code else "nothing: it ended well"]

    def do_first(self, args: Args) -> Lines:
        """`first 0=1:Connection_reset_by_peer 1=-9`: whose end came first of all."""
        exits = []
        for rank, text in args.items():
            code, _, report = text.partition(":")
            exits.append((int(rank), Exit(int(code), report=report.replace("_", " "))))
        return [f"the first failure is that of rank {first_failure(exits)}"]

    def do_pass(self, args: Args) -> Lines:
        """`pass seconds=5 asleep=2`: the watcher itself is late by `asleep` at first."""
        lines: Lines = []
        end = self.now_s + float(args["seconds"])
        every = LATE_S if self.watch.mode.learns else LOOK_EVERY_S  # minutes pass before a careful watch
        step = float(args.get("asleep", every))
        while self.now_s < end - 1e-9:
            self.now_s += step
            for worker in self.workers.values():
                self._live(worker, step)
            silent = {node: (self.now_s - since, self.node_ranks[node]) for node, since in self.silent.items()}
            elsewhere = [rank for ranks in self.stuck.values() for rank in ranks]
            sights = [worker.sight for worker in self.workers.values()]
            for verdict in self.watch.look(
                self.now_s, sights, silent, world_size=self.world_size, stuck_elsewhere=elsewhere
            ):
                lines.append(f"{self.now_s:6.2f} {verdict.kind.value}: {verdict.reason}")
                lines += [f"         {fact}" for fact in verdict.evidence if verdict.kind.value != "wait"]
            step = every
        return lines or ["nothing to say"]

    def _live(self, worker: Worker, seconds: float) -> None:
        busy, wakes, read, state = WAYS[worker.way]
        sight = replace(
            worker.sight,
            busy_s=worker.sight.busy_s + busy * seconds,
            spent_s=worker.sight.spent_s + (busy + MOVING * (worker.way == "moves")) * seconds,
            wakes=worker.sight.wakes + round(wakes * seconds),
            file_bytes=worker.sight.file_bytes + round(read * seconds),
            socket_bytes=(worker.sight.socket_bytes or 0) + round((1 << 20) * seconds * (worker.way == "sends")),
            starved_s=worker.sight.starved_s + (0.97 * seconds if worker.way == "starved" else 0.0),
            state=state,
            stands=None if worker.way == "steps" else worker.stack,
        )
        if worker.way == "steps":
            before, after = self.now_s - seconds, self.now_s
            made = int(after / worker.every_s + 1e-6) - int(before / worker.every_s + 1e-6)
            if made:
                beat = sight.beat
                samples = {**beat.samples, beat.phase: beat.samples.get(beat.phase, 0) + made}
                known = {**beat.p99_s, beat.phase: worker.every_s}
                sight = replace(
                    sight,
                    beat=replace(
                        beat, changes=beat.changes + made, step=beat.step + made, samples=samples, p99_s=known,
                        step_p99_s=worker.every_s, inside=False,
                    ),
                )  # fmt: skip
        worker.sight = sight
