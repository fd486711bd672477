from __future__ import annotations

import itertools
import random

from holdfast.core.scheduling.step_agreement import REPEAT_STEPS, Appointment, Diary, Proposal, Purpose, StepAgreement


def test_an_appointment_lies_ahead_of_the_proposer_and_stands() -> None:
    diary = Diary()
    first = diary.propose(Proposal(Purpose.SAVE, 0, 10))
    assert first == Appointment(Purpose.SAVE, 12)
    assert diary.propose(Proposal(Purpose.SAVE, 1, 11)) == first
    assert diary.propose(Proposal(Purpose.SAVE, 1, 12)) == Appointment(Purpose.SAVE, 14)


def test_a_rank_that_is_past_the_step_says_so_and_proposes_to_stop_again() -> None:
    calendar = StepAgreement(rank=1)
    calendar.take(Appointment(Purpose.STOP, 5))
    due = calendar.finished(7)
    assert not due.stop
    assert due.missed == (5,)
    assert due.propose == (Proposal(Purpose.STOP, 1, 7),)


def test_a_lost_proposal_is_repeated_but_not_every_step() -> None:
    calendar = StepAgreement(rank=0)
    calendar.want(Purpose.SAVE)
    sent = [step for step in range(60) if calendar.finished(step).propose]
    assert sent == [0, REPEAT_STEPS, 2 * REPEAT_STEPS]


def test_ranks_that_run_apart_stop_at_one_step() -> None:
    """Whatever the skew and the delay of the word, all ranks end at the same step, or none has ended yet."""
    for seed in range(300):
        rng = random.Random(seed)
        diary, calendars = Diary(), [StepAgreement(rank) for rank in range(3)]
        position = [rng.randrange(3) for _ in calendars]
        waiting: dict[int, int] = {}  # rank -> step it stands at, its save not complete
        mail: list[tuple[int, Appointment]] = []
        calendars[rng.randrange(3)].want(Purpose.STOP)
        for _ in itertools.count():
            if len(waiting) == 3 and len(set(waiting.values())) == 1:
                break
            rank = rng.randrange(3)
            while mail and rng.random() < 0.5:
                target, word = mail.pop(0)
                calendars[target].take(word)
            if rank in waiting:
                stuck = waiting[rank]
                if any(other != rank and position[other] > stuck for other in range(3)):
                    del waiting[rank]  # the version is abandoned: somebody is past it
                continue
            position[rank] += 1
            due = calendars[rank].finished(position[rank])
            mail += [(other, diary.propose(p)) for p in due.propose for other in range(3)]
            if due.stop:
                waiting[rank] = position[rank]
        assert len(set(waiting.values())) == 1
