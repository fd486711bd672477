"""The demo: train on two simulated nodes, break them three ways, and end bit for bit where an undisturbed run ends.

    holdfast demo [--json] [--keep DIR] [--quick]        (or: python -m holdfast.testing.demo.demo)

1. Plain torchrun without holdfast: one rank gets SIGKILL in its first steps, to see how long torchrun takes; what it
   then trains from the start, uninterrupted, is the reference.
2. The same job under `holdfast run` on two nodes. Fault 1: one rank gets SIGKILL. Fault 2: a whole node with its keeper
   gets SIGKILL and a node with empty memory takes its place. Fault 3: everything gets SIGKILL, keepers too, and one byte
   of the newest checkpoint is flipped; `holdfast verify` must name the file; the job is started again.
3. One table from what the ranks and launchers logged, then the comparison. Exit code 0 only if every recovery used the
   promised source and everything is bit-equal.

Nothing is staged: the faults hit whatever the job is doing at that moment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.testing.demo.cluster import Cluster, DemoFailure, wait_until
from holdfast.testing.demo.facts import Comparison, Facts, compare

WORLD_SIZE = 4
SOURCE_NAMES = {
    "peer": "other node's memory",
    "slot": "own slot",
    "node": "a rank beside it",
    "preloaded": "its keeper's memory",
    "storage": "storage",
    "cache": "storage, read by a rank beside it",
    "live": "what it still held",
    "twin": "a living twin",
    "note": "its own note",
}
STANDS = "stands in a wait that nothing ends"  # `elastic.launch.worker_eviction` logs this; not imported, for torch would come with it
RECOVERY_TIMEOUT_S = 120.0
TRAINING_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Says how long to train and when to break what."""

    steps: int = 120
    faults: tuple[int, int, int] = (25, 55, 90)
    durable_every: int = 15


@dataclass(frozen=True, slots=True)
class Promise:
    """Says where state must come from: one of `sources` on every rank that lost something, nothing but `allowed` on any
    rank.

    What one rank has fetched lies in its node's memory, where the next one takes it from: `node`. A fault that finds the
    survivors between two updates costs no step: who is new gets the live state of its twin (`checkpoint.survivors.peer_restore`).
    """

    sources: frozenset[str]
    allowed: frozenset[str]
    text: str


LIVE = frozenset({"live", "twin", "note"})
OWN_MEMORY = Promise(
    frozenset({"slot", "twin"}), LIVE | {"slot", "node"}, "the memory of its own node, or its twin if that is newer"
)
OTHER_NODE = Promise(
    frozenset({"peer", "twin"}), LIVE | {"slot", "node", "peer"}, "the memory of the other node, no read from storage"
)
STORAGE = Promise(frozenset({"storage", "cache"}), frozenset({"storage", "cache", "node", "peer"}), "storage")

# What the timeline of the demo must show at least.
SHOWN = frozenset({"step", "save", "copy", "seal", "replicate", "persist", "fault", "recovery"})

QUICK = Plan(steps=48, faults=(10, 20, 34), durable_every=6)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table.

    Attributes:
        fault: what was done.
        found_after_s: from the SIGKILL until the surviving launcher reported it; None when nobody survived.
        restored_from: source -> bytes, summed over the ranks that lost their memory or process.
        version: what was restored.
        steps_lost: finished steps that had to be made again.
        seconds: from the SIGKILL until all ranks had finished a step again.
        kept: ranks whose processes lived on.
        unwakeable: survivors whose processes stood in a wait of gloo that nothing ends, and were replaced for that reason.
    """

    fault: str
    found_after_s: float | None
    restored_from: dict[str, int]
    version: str
    steps_lost: int
    seconds: float
    kept: tuple[int, ...] = ()
    unwakeable: tuple[int, ...] = ()


class Demo:
    """The story, step by step; every method either sees what was promised or raises DemoFailure."""

    def __init__(self, cluster: Cluster, plan: Plan, console: Console) -> None:
        self.cluster, self.plan, self.console = cluster, plan, console
        self.reference = Facts(cluster.home / "reference", WORLD_SIZE)
        self.facts = Facts(cluster.home / "facts", WORLD_SIZE)
        self.outcomes: list[Outcome] = []
        self.torchrun_s = 0.0
        self.timeline: dict[str, Any] = {}
        self._shown_at = 0.0
        self._shown_step = -1

    def run(self) -> Comparison:
        """All of it; returns the comparison with the uninterrupted run."""
        self.say("[bold]The yardstick[/bold]: 4 ranks, plain torchrun, no holdfast")
        self.cluster.start_reference()
        self.train(self.reference, 3)
        self.measure_torchrun()
        self.train(self.reference, self.plan.steps)
        self.say("[bold]The same job on two nodes[/bold] with `holdfast run`: HSDP 2 x 2, shards inside, twins across")
        self.start("node-a", "node-b")
        self.train(self.facts, self.plan.faults[0])
        self.kill_one_rank()
        self.train(self.facts, self.plan.faults[1])
        self.lose_a_node()
        self.train(self.facts, self.plan.faults[2])
        self.lose_everything()
        self.train(self.facts, self.plan.steps)
        wait_until(lambda: not self.cluster.living(), 15, "all processes of the job, its keepers too, have ended")
        self.draw()
        return compare(self.facts, self.reference)

    def start(self, first: str, second: str) -> None:
        """Starts both nodes; the first hosts the rendezvous."""
        self.cluster.new_rendezvous()
        self.cluster.start_node(first, place=1)
        self.cluster.wait_port()
        self.cluster.start_node(second, place=2)

    def train(self, facts: Facts, until: int) -> None:
        """Until all ranks have finished step `until - 1` (and the launchers ended, if it is the last)."""
        deadline = time.monotonic() + TRAINING_TIMEOUT_S
        while True:
            self.cluster.check()
            facts.refresh()
            self.show_progress(facts)
            done = facts.finished_step() >= until - 1
            if done and (until < self.plan.steps or self.cluster.ended()):
                return
            if time.monotonic() > deadline:
                raise DemoFailure(f"training stands at step {facts.finished_step()} for too long")
            time.sleep(0.02)

    def draw(self) -> None:
        """All of it on one axis: what was trained, copied, replicated and stored, what was broken, and what came back."""
        self.timeline = self.cluster.timeline()
        missing = SHOWN - set(self.timeline["kinds"])
        if missing:
            raise DemoFailure(f"the timeline does not show: {', '.join(sorted(missing))}")
        page = self.cluster.home / "timeline.html" if self.cluster.keep else "kept with --keep DIR"
        self.say(f"Timeline of {len(self.timeline['tracks'])} processes, {self.timeline['spans']} spans: {page}")

    def measure_torchrun(self) -> None:
        """SIGKILL to one rank of plain torchrun, until all ranks have finished a step again. All start anew, from 0."""
        victim = self.reference.last(3, "start")
        assert victim is not None, "it has finished steps"
        killed_at = time.time()
        os.kill(victim["pid"], signal.SIGKILL)

        def again() -> bool:
            self.reference.refresh()
            return all(self.reference.restarted(rank, killed_at) for rank in range(WORLD_SIZE))

        wait_until(again, RECOVERY_TIMEOUT_S, "plain torchrun trains again", self.cluster.check)
        steps = [self.reference.restarted(rank, killed_at) or {"time": killed_at} for rank in range(WORLD_SIZE)]
        self.torchrun_s = max(step["time"] for step in steps) - killed_at
        self.say(f"  one rank killed: all workers restarted, back after {self.torchrun_s:.1f} s without any state")

    def show_progress(self, facts: Facts, every_s: float = 2.0) -> None:
        """One line now and then: step and loss."""
        step = facts.finished_step()
        if step < 0 or step == self._shown_step or time.monotonic() - self._shown_at < every_s:
            return
        self._shown_at, self._shown_step = time.monotonic(), step
        self.say(f"  step {step + 1:>3} of {self.plan.steps}   loss {facts.mean_loss(step):.3f}")

    def kill_one_rank(self) -> None:
        """Fault 1: the rank comes back from the memory of its own node, or takes over what its twin holds."""
        victim = self.facts.last(3, "start")
        if victim is None:
            raise DemoFailure("rank 3 never started")
        self.say(f"[red]Fault 1[/red]: SIGKILL rank 3 (process {victim['pid']})")
        reported = self.log_size("node-b")
        killed_at = time.time()
        os.kill(victim["pid"], signal.SIGKILL)
        found_at = self.wait_report("node-b", reported)
        outcome = self.recovered("1: one rank killed", killed_at, found_at, ranks=(3,), promised=OWN_MEMORY)
        self.must_have_kept(outcome, 0, 1, 2)

    def lose_a_node(self) -> None:
        """Fault 2: the ranks of the lost node come back from the other node's memory, without storage."""
        self.say("[red]Fault 2[/red]: SIGKILL all of node-b, its keeper too; node-c with empty memory takes its place")
        if not self.cluster.keepers("node-b"):
            raise DemoFailure("node-b has no keeper")
        reported = self.log_size("node-a")
        killed_at = time.time()
        self.cluster.kill_node("node-b")
        self.cluster.start_node("node-c", place=2)
        found_at = self.wait_report("node-a", reported)
        outcome = self.recovered("2: a whole node lost", killed_at, found_at, ranks=(2, 3), promised=OTHER_NODE)
        self.must_have_kept(outcome, 0, 1)

    def must_have_kept(self, outcome: Outcome, *ranks: int) -> None:
        """The processes of `ranks` must have lived on, but for those that waited for the rest of a message of the dead.

        Gloo wakes nobody who waits for that (docs/elastic.md): one survivor in some sixty here. Its launcher must have said so.
        """
        for rank in sorted(set(ranks) & set(outcome.unwakeable)):
            self.say(
                f"  rank {rank} was replaced too: half of a message had come, and gloo wakes nobody who waits for the rest"
            )
        if not set(ranks) <= {*outcome.kept, *outcome.unwakeable}:
            raise DemoFailure(f"only ranks {outcome.kept} kept their processes; promised: {ranks}")

    def lose_everything(self) -> None:
        """Fault 3: all memory is gone and the newest checkpoint is damaged; the one before is used."""
        wait_until(lambda: len(self.checkpoints()) >= 2, 60, "two checkpoints are durable", self.cluster.check)
        self.say("[red]Fault 3[/red]: SIGKILL everything on all nodes, keepers too")
        killed_at = time.time()
        num_killed = self.cluster.kill_node("")
        previous, newest = self.checkpoints()[-2:]
        damaged = flip_one_byte(self.cluster.checkpoints / newest)
        self.say(f"  {num_killed} processes are gone; one byte of {newest}/{damaged.name} is flipped")
        self.verify_names(damaged)
        self.start("node-d", "node-e")
        fault = "3: all killed, byte flipped"
        outcome = self.recovered(fault, killed_at, None, ranks=(0, 1, 2, 3), promised=STORAGE)
        if outcome.version != previous:
            raise DemoFailure(f"restored {outcome.version}; {previous} is the newest undamaged checkpoint")

    def verify_names(self, damaged: Path) -> None:
        """`holdfast verify` must exit with 1 and name the damaged file."""
        result = self.cluster.command("verify", str(self.cluster.checkpoints))
        if result.returncode != 1 or damaged.name not in "".join((result.stdout + result.stderr).split()):
            raise DemoFailure(f"`holdfast verify` did not name {damaged.name}: {result.stdout}{result.stderr}")
        self.say(f"  `holdfast verify` names {damaged.name}")

    def recovered(
        self, fault: str, killed_at: float, found_at: float | None, *, ranks: tuple[int, ...], promised: Promise
    ) -> Outcome:
        """Waits until every rank has finished a step again and checks where the state of `ranks` came from."""

        def again() -> bool:
            self.facts.refresh()
            return all(self.facts.recovery(rank, killed_at) for rank in range(WORLD_SIZE))

        wait_until(again, RECOVERY_TIMEOUT_S, "all ranks train again", self.cluster.check)
        recoveries = {rank: self.facts.recovery(rank, killed_at) or ({}, {}) for rank in range(WORLD_SIZE)}
        resumed = {(restored["report"]["version"], restored["start"]) for restored, _ in recoveries.values()}
        if len(resumed) != 1:
            raise DemoFailure(f"the ranks disagree about where to go on: {resumed}")
        version, start = resumed.pop()
        total: Counter[str] = Counter()
        for rank in range(WORLD_SIZE):
            found = bytes_by_source(recoveries[rank][0]["report"])
            if rank in ranks:
                total.update(found)
            if (rank in ranks and promised.sources.isdisjoint(found)) or not set(found) <= promised.allowed:
                raise DemoFailure(f"rank {rank} was restored from {found}; promised: {promised.text}")
        outcome = Outcome(
            fault=fault,
            found_after_s=None if found_at is None else found_at - killed_at,
            restored_from=dict(total),
            version=version,
            steps_lost=self.facts.finished_step(killed_at) + 1 - start,
            seconds=max(step["time"] for _, step in recoveries.values()) - killed_at,
            kept=self.facts.kept(killed_at),
            unwakeable=tuple(rank for rank in range(WORLD_SIZE) if self.stood(rank, killed_at)),
        )
        self.outcomes.append(outcome)
        self.say(f"  back after {outcome.seconds:.1f} s from {sources_text(total)}, {outcome.steps_lost} steps lost")
        return outcome

    def stood(self, rank: int, at: float) -> bool:
        """Return whether a launcher ended the process that `rank` had at that time, for it stood in a wait that nothing ends."""
        pid = self.facts.process(rank, at)
        logs = (self.cluster.home / "logs").glob("*.log")
        return any(f"process {pid} {STANDS}" in log.read_text(errors="replace") for log in logs)

    def checkpoints(self) -> list[str]:
        """Durable versions in storage, oldest first: those with a manifest."""
        return sorted(path.parent.name for path in self.cluster.checkpoints.glob("i*-s*/manifest.json"))

    def log_size(self, node: str) -> int:
        return self.cluster.log(node).stat().st_size

    def wait_report(self, node: str, offset: int) -> float:
        """The moment when the node's launcher has written that a worker failed, or a node."""

        def reported() -> bool:
            with self.cluster.log(node).open("rb") as log:
                log.seek(offset)
                said = log.read()
                return b"exitcode" in said or b"nodes of the job have changed" in said

        wait_until(reported, RECOVERY_TIMEOUT_S, f"{node} reports the fault", self.cluster.check)
        return time.time()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def flip_one_byte(checkpoint: Path) -> Path:
    """Changes one bit pattern in the middle of the largest tensor file of a checkpoint; returns the file."""
    victim = max(sorted(checkpoint.glob("*.safetensors")), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as file:
        file.seek(victim.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))
    return victim


def bytes_by_source(report: dict[str, Any]) -> dict[str, int]:
    """Source -> bytes of a restore report, empty sources left out."""
    return {source: num_bytes for source, num_bytes in report["bytes"].items() if num_bytes}


def sources_text(total: dict[str, int]) -> str:
    """Return sources for people: "own slot 1,533 kB, storage 5 kB"."""
    ordered = sorted(total.items(), key=lambda item: -item[1])
    return ", ".join(f"{SOURCE_NAMES.get(name, name)} {count / 1e3:,.0f} kB" for name, count in ordered)


def show_table(console: Console, outcomes: list[Outcome], torchrun_s: float) -> None:
    """The one table of the demo."""
    table = Table(title="What was broken, and how it came back")
    for column in ("fault", "found after", "restored from", "kept their process", "steps lost", "seconds"):
        table.add_column(column, justify="right" if column in ("found after", "steps lost", "seconds") else "left")
    for outcome in outcomes:
        found = "-" if outcome.found_after_s is None else f"{outcome.found_after_s:.2f} s"
        source = f"{sources_text(outcome.restored_from)}"
        kept = f"ranks {', '.join(map(str, outcome.kept))}" if outcome.kept else "none"
        table.add_row(outcome.fault, found, source, kept, str(outcome.steps_lost), f"{outcome.seconds:.1f}")
    table.add_section()
    table.add_row("plain torchrun, one rank killed", "-", "nothing: from step 0", "none", "all", f"{torchrun_s:.1f}")
    console.print(table)


def show_comparison(console: Console, result: Comparison) -> None:
    """Equal, or what is not."""
    if result.differences:
        console.print(f"[bold red]{len(result.differences)} differences[/bold red] from the uninterrupted run:")
        for line in result.differences[:10]:
            console.print(f"  {escape(line)}", highlight=False)
        return
    console.print(
        f"[bold green]Bit for bit equal[/bold green] to the uninterrupted run: {result.num_values:,} numbers in "
        f"{result.num_tensors} tensors (all parameters and optimizer moments of {WORLD_SIZE} ranks), "
        f"{result.num_losses} losses.",
        highlight=False,
    )


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends the demo like Ctrl-C: through the clean-up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: everything was as promised and bit-equal; 1: it was not, or the demo was interrupted."""
    parser = argparse.ArgumentParser(prog="holdfast demo", description="Break a training job three ways and compare.")
    parser.add_argument("--json", action="store_true", help="facts as JSON lines on standard output")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep checkpoints, logs and facts in this directory")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    options = parser.parse_args(arguments)
    console = Console(stderr=options.json)
    started = time.monotonic()
    with interruptible():
        try:
            return _run(options, console, started)
        except KeyboardInterrupt:
            console.print("[red]Interrupted[/red]; everything is cleaned up")
        except DemoFailure as failure:
            console.print(
                f"[bold red]The demo failed:[/bold red] {escape(str(failure))}", highlight=False, soft_wrap=True
            )
            if options.json:
                sys.stdout.write(json.dumps({"equal": False, "failure": str(failure)}) + "\n")
        return 1


def _run(options: argparse.Namespace, console: Console, started: float) -> int:
    plan = QUICK if options.quick else Plan()
    cluster = Cluster(plan.steps, plan.durable_every, options.keep)
    try:
        demo = Demo(cluster, plan, console)
        result = demo.run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it behind
        cluster.close()
    seconds = time.monotonic() - started
    if options.json:
        for outcome in demo.outcomes:
            sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.write(
            json.dumps(
                {
                    "equal": not result.differences,
                    "seconds": seconds,
                    "torchrun_seconds": demo.torchrun_s,
                    "timeline": demo.timeline.get("kinds", {}),
                    **asdict(result),
                }
            )
            + "\n"
        )
    else:
        show_table(console, demo.outcomes, demo.torchrun_s)
    show_comparison(console, result)
    console.print(f"The demo took {seconds:.0f} s.", highlight=False)
    return 1 if result.differences else 0


if __name__ == "__main__":
    sys.exit(main())
