"""The event model of a pipeline: who waits for whom, and so when every rank of a step is idle.

A schedule is, per rank, the order of its actions on stages and micro-batches. An action starts when the rank is free and
what it needs has arrived: a forward the activations of the stage before, a backward the gradients of the stage after, a
weight gradient its own input gradient. A schedule may join two actions so that both results leave with the second. Steps
follow one another without a barrier, so the idle time of a rank is judged in the steady state: from the start of one step
to the start of the next, warm-up of the pipeline included.

Pure. Times are seconds as floats, counted from the first action of the step that is looked at. With equal stages, no
hops and no optimizer GPipe and 1F1B are idle (p - 1) / (m + p - 1) of a step on every rank (Huang et al. 2019, Narayanan
et al. 2021), which the tests hold exactly, as they do with those of the other schedules. Tests hold it against
pipelines that run.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Steps that are simulated: the pipeline fills in the first, the second is like every later one, the third tells where
# the second ends.
_STEPS = 3


class Kind(enum.Enum):
    """Names what an action computes; the letters are those of PyTorch's schedules."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and weights together
    INPUT = "I"  # gradients of inputs only
    WEIGHT = "W"  # gradients of weights, later


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of one stage on one micro-batch; written `2F0`.

    Attributes:
        joined: its result leaves the rank together with that of the action after it, of an overlapped pair.
    """

    stage: int
    kind: Kind
    microbatch: int
    joined: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Order = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured or assumed seconds.

    Attributes:
        compute: per (stage, kind); what is missing costs nothing.
        hop: from the end of an action to the arrival of its result at another rank.
        ending: per rank, from its last action to its next step: reduction of gradients, optimizer, data, logging.
    """

    compute: Mapping[tuple[int, Kind], float]
    hop: float = 0.0
    ending: Mapping[int, float] = field(default_factory=dict)

    def of(self, action: Action) -> float:
        """Seconds of one action."""
        return self.compute.get((action.stage, action.kind), 0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """Says when an action runs; `index` is its place in the rank's order."""

    action: Action
    index: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Idle time of a rank before the action at `index` of its order."""

    index: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return how long."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """One step of one rank in the steady state.

    Attributes:
        start: when the rank is free for this step; the step of another rank may have begun earlier.
        ends: when its last action ends; `ending` of the costs follows.
        spans: its actions, in order.
        waits: where it is idle, in order; never zero seconds long.
    """

    start: float
    ends: float
    spans: tuple[Span, ...]
    waits: tuple[Wait, ...]

    @property
    def idle(self) -> float:
        """Seconds that the rank waits in a step."""
        return sum(wait.seconds for wait in self.waits)


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of all ranks; `period` is the seconds from step to step, the slowest rank's."""

    ranks: tuple[RankTimeline, ...]
    period: float

    def idle_share(self, rank: int) -> float:
        """Return which part of a step the rank waits."""
        return self.ranks[rank].idle / self.period if self.period else 0.0


def stages_of(layers: Sequence[float], num_stages: int) -> tuple[float, ...]:
    """Seconds of each stage, given those of a model's layers in order.

    A stage has neighbouring layers, as many as any other or one more; the first stages have that one.

    Raises:
        ValueError: more stages than layers.
    """
    if num_stages > len(layers):
        raise ValueError(f"{num_stages} stages cannot share {len(layers)} layers")
    each, more = divmod(len(layers), num_stages)
    ends = [each * (stage + 1) + min(stage + 1, more) for stage in range(num_stages)]
    return tuple(sum(layers[start:end]) for start, end in zip([0, *ends], ends, strict=False))


def gpipe(num_stages: int, num_microbatches: int) -> tuple[Order, ...]:
    """All forwards, then all backwards; one stage per rank."""
    return tuple(
        tuple(Action(rank, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(num_microbatches))
        for rank in range(num_stages)
    )


def one_f_one_b(num_stages: int, num_microbatches: int) -> tuple[Order, ...]:
    """Forwards until the first gradient can be there, then backward and forward in turn; one stage per rank."""
    orders = []
    for rank in range(num_stages):
        ahead = min(num_microbatches, num_stages - rank)
        order = [Action(rank, Kind.FORWARD, m) for m in range(ahead)]
        for m in range(num_microbatches):
            order.append(Action(rank, Kind.BACKWARD, m))
            if ahead + m < num_microbatches:
                order.append(Action(rank, Kind.FORWARD, ahead + m))
        orders.append(tuple(order))
    return tuple(orders)


def interleaved_1f1b(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> tuple[Order, ...]:
    """1F1B with several stages per rank, the earlier micro-batches first (Narayanan et al. 2021, section 2.2).

    A rank has every `num_ranks`-th stage, and changes from stage to stage after a round of micro-batches. Its number of
    forwards ahead and its rounds are those of PyTorch's schedule of this name; the tests hold that the orders are equal.

    Raises:
        ValueError: the micro-batches make no whole rounds.
    """
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        raise ValueError(f"{num_microbatches} micro-batches cannot be divided into {rounds} rounds")
    each, total = num_microbatches // rounds, num_microbatches * stages_per_rank
    turns = [
        (step // each % stages_per_rank, step // (each * stages_per_rank) * each + step % each) for step in range(total)
    ]
    orders = []
    for rank in range(num_ranks):
        forwards = [Action(turn * num_ranks + rank, Kind.FORWARD, m) for turn, m in turns]
        back = [Action((stages_per_rank - 1 - turn) * num_ranks + rank, Kind.BACKWARD, m) for turn, m in turns]
        ahead = min(total, (stages_per_rank - 1) * each + 2 * (num_ranks - 1 - rank))
        order = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], back, strict=False):
            order += (forward, backward)
        orders.append((*order, *back[total - ahead :]))
    return tuple(orders)


def simulate(orders: Sequence[Order], costs: Costs) -> Timeline:
    """The timeline of one step in the steady state.

    Args:
        orders: per rank its actions, in order.
        costs: seconds of everything.

    Raises:
        ValueError: the order can never end, or names an action twice or a stage on two ranks; names the actions.
    """
    home, last_stage = _homes(orders)
    steps = _Run(orders, costs, home, last_stage).steps(_STEPS)
    middle, after = steps[1], steps[2]
    zero = min(rank.start for rank in middle)
    ranks = tuple(_moved(rank, -zero) for rank in middle)
    period = max(later.start - now.start for now, later in zip(middle, after, strict=True)) if ranks else 0.0
    return Timeline(ranks, period)


def _homes(orders: Sequence[Order]) -> tuple[dict[int, int], int]:
    """Rank of every stage, and the last stage."""
    home: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, order in enumerate(orders):
        for action in order:
            if action in seen or home.setdefault(action.stage, rank) != rank:
                raise ValueError(f"{action} stands twice in the schedule, or its stage on two ranks")
            seen.add(action)
    return home, max(home, default=-1)


def _needs(action: Action, last_stage: int, present: frozenset[Action] | set[Action]) -> Action | None:
    """The action whose result this one cannot do without; None if it needs only its rank."""
    stage, m = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return Action(stage - 1, Kind.FORWARD, m) if stage else None
    if action.kind is Kind.WEIGHT:
        return Action(stage, Kind.INPUT, m)
    if stage == last_stage:
        return Action(stage, Kind.FORWARD, m)
    split = Action(stage + 1, Kind.INPUT, m)
    return split if split in present else Action(stage + 1, Kind.BACKWARD, m)


class _Run:
    """Steps one after the other; every rank goes on when it is free and its input is there."""

    def __init__(self, orders: Sequence[Order], costs: Costs, home: Mapping[int, int], last_stage: int) -> None:
        self._orders = orders
        self._costs = costs
        self._home = home
        present = {action for order in orders for action in order}
        self._needs = {action: _needs(action, last_stage, present) for action in present}
        self._free = [0.0] * len(orders)
        self._ended: dict[Action, float] = {}
        self._sent: dict[Action, float] = {}

    def steps(self, number: int) -> list[list[RankTimeline]]:
        """The timelines of so many steps."""
        return [self._step() for _ in range(number)]

    def _step(self) -> list[RankTimeline]:
        starts = list(self._free)
        spans: list[list[Span]] = [[] for _ in self._orders]
        self._ended, self._sent = {}, {}
        waiting: dict[Action, int] = {}
        ready = deque(range(len(self._orders)))
        while ready:
            rank = ready.popleft()
            blocked = self._advance(rank, spans[rank], waiting, ready)
            if blocked is not None:
                waiting[blocked] = rank
        stuck = [str(o[len(s)]) for o, s in zip(self._orders, spans, strict=True) if len(s) < len(o)]
        if stuck:
            raise ValueError(f"the schedule never ends: {', '.join(stuck)} wait for what never comes")
        rows = [_rank(start, row) for start, row in zip(starts, spans, strict=True)]
        self._free = [row.ends + self._costs.ending.get(rank, 0.0) for rank, row in enumerate(rows)]
        return rows

    def _advance(self, rank: int, spans: list[Span], waiting: dict[Action, int], ready: deque[int]) -> Action | None:
        """Runs a rank as far as it comes; what it waits for, or None at the end of the step."""
        order = self._orders[rank]
        free = spans[-1].end if spans else self._free[rank]
        for index in range(len(spans), len(order)):
            action = order[index]
            need = self._needs[action]
            start = free
            if need is not None:
                is_here = self._home.get(need.stage) == rank
                there = self._ended if is_here else self._sent
                if need not in there:
                    return need
                start = max(free, there[need] + (0.0 if is_here else self._costs.hop))
            free = start + self._costs.of(action)
            spans.append(Span(action, index, start, free))
            self._ended[action] = free
            for leaving in _leaving(order, index):
                self._sent[leaving] = free
                if leaving in waiting:
                    ready.append(waiting.pop(leaving))
        return None


def _leaving(order: Order, index: int) -> Order:
    """The actions whose results leave the rank when the one at `index` ends."""
    if order[index].joined:
        return ()
    first = index
    while first and order[first - 1].joined:
        first -= 1
    return order[first : index + 1]


def _rank(start: float, spans: Sequence[Span]) -> RankTimeline:
    waits = []
    free = start
    for span in spans:
        if span.start > free:
            waits.append(Wait(span.index, free, span.start))
        free = span.end
    return RankTimeline(start, free, tuple(spans), tuple(waits))


def _moved(rank: RankTimeline, by: float) -> RankTimeline:
    return RankTimeline(
        rank.start + by,
        rank.ends + by,
        tuple(Span(s.action, s.index, s.start + by, s.end + by) for s in rank.spans),
        tuple(Wait(w.index, w.start + by, w.end + by) for w in rank.waits),
    )
