"""The stage for stories about bubbles: a pipeline's step is drawn, chunks are placed, waits are learnt.

`Pipelines` runs the real event model and the real placement; one column of a drawing is one millisecond.
"""

from __future__ import annotations

from holdfast.cli.planning.pipeline_timeline import Picture, draw, tracks
from holdfast.core.pipeline.bubble_placement import (
    GUARD_SHARE,
    Load,
    Placement,
    Window,
    highest_cadence,
    place,
    review_due,
    reviewed,
)
from holdfast.core.pipeline.event_model import Action, Costs, Kind, Order, Timeline, gpipe, one_f_one_b, simulate
from holdfast.core.pipeline.wait_forecast import Waits, has_room

Args = dict[str, str]
Lines = list[str]
MS = 1e-3


class Pipelines:
    """One pipeline at a time; times in milliseconds."""

    def __init__(self) -> None:
        self.orders: tuple[Order, ...] = ()
        self.compute: dict[tuple[int, Kind], float] = {}
        self.step: Timeline | None = None
        self.placements: dict[int, Placement] = {}
        self.waits = Waits()
        self.every = 0

    def run(self, name: str, args: Args) -> Lines:
        return getattr(self, f"do_{name.replace('-', '_')}")(args)

    def do_schedule(self, args: Args) -> Lines:
        """`kind=gpipe stages=3 microbatches=4 forward=2 backward=4`, or the order of each rank: `rank0=0F0,0B0`; `of` names it."""
        make = {"gpipe": gpipe, "1f1b": one_f_one_b}.get(args.get("kind", ""))
        if make is not None:
            self.orders = make(int(args["stages"]), int(args["microbatches"]))
        else:
            rows = [args[key] for key in sorted(args) if key.startswith("rank")]
            self.orders = tuple(tuple(_action(word) for word in row.split(",")) for row in rows)
        stages = {action.stage for order in self.orders for action in order}
        backward = float(args.get("backward", 2)) * MS
        each = {Kind.FORWARD: float(args.get("forward", 1)) * MS, Kind.BACKWARD: backward}
        each |= {Kind.INPUT: backward / 2, Kind.WEIGHT: backward / 2}
        self.compute = {(stage, kind): each[kind] for stage in stages for kind in Kind}
        self.placements = {}
        return self._draw()

    def do_slow(self, args: Args) -> Lines:
        """A stage takes longer than the others."""
        stage, factor = int(args["stage"]), float(args["times"])
        self.compute = {key: s * factor if key[0] == stage else s for key, s in self.compute.items()}
        self.placements = {}
        return self._draw()

    def do_copy(self, args: Args) -> Lines:
        """So many chunks of so many milliseconds into the waits of every rank; the guard is the product's unless given."""
        assert self.step is not None
        chunks = [float(args["each"]) * MS] * int(args["chunks"])
        for rank, row in enumerate(self.step.ranks):
            windows = [Window(wait.index, wait.seconds) for wait in row.waits]
            self.placements[rank] = place(chunks, windows, guard=float(args.get("guard", GUARD_SHARE)))
        lines = self._draw()
        return lines + [f"rank {rank}: {one.reason}" for rank, one in self.placements.items()]

    def do_cadence(self, args: Args) -> Lines:
        """How often, if a save may cost such a share of a step and each call takes so many milliseconds."""
        assert self.step is not None
        loads = [
            Load(float(args.get("call", 0)) * MS, self.placements[rank].left_seconds, self.step.period)
            for rank in range(len(self.orders))
        ]
        decision = highest_cadence(loads, budget=float(args["budget"]))
        return [f"every {decision.value}: {decision.reason}"]

    def do_review(self, args: Args) -> Lines:
        """What each rank measured in milliseconds; the cadence of before is the one that is judged."""
        calls = [float(ms) for ms in args["call"].split(",")]
        lefts = [float(ms) for ms in args.get("left", ",".join("0" for _ in calls)).split(",")]
        period = float(args["period"]) * MS
        loads = [Load(call * MS, left * MS, period) for call, left in zip(calls, lefts, strict=True)]
        decision = reviewed(self.every, loads, budget=float(args["budget"]))
        self.every = decision.value
        return [f"every {decision.value}: {decision.reason}"]

    def do_reviews(self, args: Args) -> Lines:
        """After which steps, up to the given one, is the cadence reviewed?"""
        return [", ".join(str(n) for n in range(int(args["until"]) + 1) if review_due(n))]

    def do_waited(self, args: Args) -> Lines:
        """One step in which the waits took these milliseconds, and what is expected of the next step."""
        self.waits.begin_step()
        for text in args["ms"].split(","):
            self.waits.ended(float(text) * MS)
        return ["expected: " + ", ".join(f"{window.seconds / MS:g}" for window in self.waits.windows())]

    def do_lasts(self, args: Args) -> Lines:
        """A wait, by its number, that really takes so many milliseconds: which chunks are copied when, one after another."""
        number, lasts, each = int(args["wait"]), float(args["ms"]), float(args["each"])
        expected = self.waits.expected(number)
        until = None if expected is None else expected / MS
        now, copied, chunks, lines = 0.0, 0, int(args["chunks"]), []
        while now < lasts and copied < chunks:
            first, began = copied + 1, now
            while now < lasts and copied < chunks and has_room(until, now, each):
                now, copied = now + each, copied + 1
            if copied >= first:
                lines.append(f"{began:g} to {now:g} ms: chunks {first} to {copied}")
            else:
                now = min(until, lasts) if until is not None and until > now else lasts
                lines.append(
                    f"{began:g} to {now:g} ms: none is begun, for it would end later than the wait is expected to"
                )
        over = f", {now - lasts:g} ms after the wait" if now > lasts else ""
        return [*lines, f"{copied} of {chunks} chunks are copied{over}; the wait took {lasts:g} ms"]

    def _draw(self) -> Lines:
        self.step = simulate(self.orders, Costs(self.compute))
        shares = ", ".join(f"{self.step.idle_share(rank):.1%}" for rank in range(len(self.orders)))
        drawn = draw(tracks(self.step, self.placements), Picture(MS))
        return [*drawn, f"a step takes {self.step.period / MS:g} ms; idle: {shares}"]


def _action(text: str) -> Action:
    kind = next(letter for letter in text if letter.isalpha())
    stage, _, microbatch = text.partition(kind)
    return Action(int(stage), Kind(kind), int(microbatch))
