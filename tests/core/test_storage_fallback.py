"""Ranks that run apart and hear of each other late: all go down after the same step, or nobody does."""

from __future__ import annotations

import random

from holdfast.core.scheduling.storage_fallback import MAX_ROUNDS, FallbackState, FallbackStep


class Board:
    """A dictionary."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        return self.rows.get(key)

    def put(self, key: str, text: str) -> None:
        self.rows[key] = text

    def add(self, key: str) -> int:
        self.rows[key] = str(int(self.rows.get(key, "0")) + 1)
        return int(self.rows[key])

    def first(self, key: str, text: str) -> str:
        return self.rows.setdefault(key, text)

    def least(self, key: str, number: int) -> None:
        self.rows[key] = str(min(number, int(self.rows.get(key, number))))


class Rank:
    """One rank that trains at its own pace, waits with little patience, and looks at the board only when unsure."""

    def __init__(self, board: Board, rank: int, size: int, draw: random.Random) -> None:
        self.descent = FallbackState(board, rank=rank, world_size=size)
        self.draw = draw
        self.step = draw.randrange(5)
        self.unsure_from = draw.randrange(20)
        self.waited = -1
        self.went: int | None = None

    def move(self, trouble: str, patience: int) -> None:
        if self.went is not None:
            return
        if self.waited >= 0:
            move = self.descent.outcome()
            self.waited += 1
            if move is FallbackStep.WAIT and self.waited > patience:
                move = self.descent.give_up()
            if move is FallbackStep.WAIT:
                return
            self.waited = -1
        else:
            self.step += 1
            if not trouble and self.step < self.unsure_from:
                return
            move = self.descent.after(self.step, trouble)
            if move is FallbackStep.WAIT:
                self.waited = 0
        if move is FallbackStep.GO:
            self.went = self.step


def test_all_go_after_the_same_step_or_nobody_does() -> None:
    found = [drawn(random.Random(seed)) for seed in range(200)]
    assert max(len(steps) for steps in found) == 1
    assert len(set().union(*found)) > 5, "different steps, and sometimes none"


def drawn(draw: random.Random) -> set[int | None]:
    """After which steps the ranks went down, in a run of `draw`."""
    board, size = Board(), draw.randrange(2, 6)
    ranks = [Rank(board, number, size, draw) for number in range(size)]
    troubled = draw.sample(range(size), draw.randrange(1, size + 1))
    patience = draw.choice([0, 2, 30])
    for _ in range(4000):
        number = draw.randrange(size)
        ranks[number].move("no keeper" if number in troubled else "", patience)
    return {rank.went for rank in ranks}


def lockstep(size: int, troubled: set[int], steps: int) -> tuple[Board, list[Rank]]:
    draw, board = random.Random(0), Board()
    ranks = [Rank(board, number, size, draw) for number in range(size)]
    for rank in ranks:
        rank.step, rank.unsure_from = 0, 3
    for _ in range(steps):
        for number, rank in enumerate(ranks):
            rank.move("memory is refused" if number in troubled else "", 10)
    return board, ranks


def test_ranks_in_step_go_down_soon_and_know_why() -> None:
    _, ranks = lockstep(4, {2}, 10)
    (step,) = {rank.went for rank in ranks}
    assert step is not None
    assert step <= 6
    assert ranks[0].descent.reason == "rank 2: memory is refused"


def test_without_anybody_in_trouble_nothing_is_written() -> None:
    board, ranks = lockstep(4, set(), 50)
    assert not board.rows
    assert {rank.went for rank in ranks} == {None}


def test_who_never_comes_is_waited_for_a_few_times_only() -> None:
    board = Board()
    one = FallbackState(board, rank=0, world_size=2)
    waits = 0
    for step in range(200):
        board.rows.setdefault(f"{waits}/at/1", "0")  # it notes its step, and then hangs
        if one.after(step, "no keeper") is FallbackStep.WAIT:
            waits += 1
            assert one.give_up() is FallbackStep.STAY
    assert waits == MAX_ROUNDS


def test_at_the_end_all_meet_once_somebody_cannot_save() -> None:
    board = Board()
    ranks = [FallbackState(board, rank=rank, world_size=2) for rank in range(2)]
    assert not ranks[0].meets_at_the_end("")
    assert ranks[1].meets_at_the_end("no keeper")
    assert ranks[1].outcome() is FallbackStep.WAIT
    assert ranks[0].meets_at_the_end("")
    assert [rank.outcome() for rank in ranks] == [FallbackStep.GO, FallbackStep.GO]


def test_who_is_past_the_step_sends_the_waiting_home() -> None:
    board = Board()
    slow, fast = (FallbackState(board, rank=rank, world_size=2) for rank in range(2))
    assert slow.after(1, "no keeper") is FallbackStep.STAY
    assert fast.after(1, "") is FallbackStep.STAY
    assert slow.after(2, "no keeper") is FallbackStep.STAY
    assert slow.after(3, "no keeper") is FallbackStep.WAIT
    assert fast.after(10, "") is FallbackStep.STAY
    assert slow.outcome() is FallbackStep.STAY
