"""A case as a value: drawn from seed and number, and made plainer one choice at a time while it still fails."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zoo_calls import CALLS
from zoo_states import STATES

FAULTS = (
    "none",
    "kill",
    "term",
    "interrupt",
    "exception",
    "storage refuses",
    "storage slow",
    "keeper frozen",
    "keeper killed",
)
# What a signal's handler of the script does, and within which call of ours.
HANDLERS = ("saves", "waits", "flushes", "raises", "closes", "exits")
WITHIN = ("save", "wait", "flush", "close")
# When the fault strikes, in the step at which the call comes.
MOMENTS = ("before the save", "behind the save", "in the call", "behind the call", "in the next step")
# Calls that leave the Checkpointer and take the job up again, or need a second one: for one rank only.
ALONE = frozenset({"closed_in_a_thread", "left_and_taken_up", "left_by_an_exception", "two_checkpointers"})
# Calls that are themselves a signal, or end in other shapes than those that a new life builds.
LEFT_OUT = frozenset(
    {"interrupted_wait", "saved_by_a_signal_at_the_fence", "saved_by_a_signal_in_a_save"}
    | {name for name, call in CALLS.items() if call.rebuild is not None}
)


@dataclass(frozen=True)
class Case:
    """What is combined; the defaults are the plain ones.

    Attributes:
        fault, moment: what strikes, and when.
        copies: whether late copies are let through, held until the call is over, or torn by it.
        drive: who decides what is saved: the script (`save`), the cadence (`step`), or a budget (`budget`).
        shared: both ranks hold the same, and one of them is saved for both.
        victims: which ranks the fault strikes, all or the first.
        strike_step: steps before the call.
        handler, within: what a signal's handler does, and in the middle of which call.
        point: at which call or return of a function in it the signal comes, as a power of ten.
    """

    call: str = "nothing"
    state: str = "plain"
    fault: str = "none"
    moment: str = "behind the save"
    copies: str = "free"
    drive: str = "save"
    overlap: bool = True
    verify_capture: bool = False
    keep_every: str = "0"
    num_slots: int = 2
    world: int = 1
    encrypted: bool = False
    shared: bool = False
    victims: str = "all"
    strike_step: int = 5
    handler: str = "none"
    within: str = "save"
    point: float = 1.5

    def __str__(self) -> str:
        plain = Case()
        odd = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        return ", ".join(f"{name}={value}" for name, value in odd if value != getattr(plain, name)) or "all plain"


def drawn(seed: int, number: int) -> Case:
    """The case of that seed and number, always the same."""
    dice = random.Random(f"{seed}/{number}")
    world = dice.choice((1, 1, 2))
    calls = [name for name in CALLS if name not in LEFT_OUT and (world == 1 or name not in ALONE)]
    call = dice.choice(calls)
    case = Case(
        call=call,
        state=dice.choice([*STATES]),
        fault=dice.choice(FAULTS),
        moment=dice.choice(MOMENTS),
        copies=dice.choice(("free", "held", "torn")),
        drive=dice.choice(("save", "save", "step", "budget")),
        overlap=dice.random() < 0.8,
        verify_capture=CALLS[call].verified or dice.random() < 0.2,
        keep_every=dice.choice(("0", "3")),
        num_slots=dice.choice((2, 3)),
        world=world,
        encrypted=dice.random() < 0.25,
        shared=world > 1 and dice.random() < 0.5,
        victims=dice.choice(("all", "first")) if world > 1 else "all",
        strike_step=dice.randint(1, 7),
    )
    if dice.random() < 0.6:
        return case
    return dataclasses.replace(
        case,
        fault="none",
        handler=dice.choice(HANDLERS),
        within=dice.choice(WITHIN),
        point=round(dice.uniform(0.0, 3.3), 3),
    )


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The plainest case that still fails, found by dropping one choice at a time."""
    again = True
    while again:
        again = False
        for plainer in _plainer(case):
            if fails(plainer):
                case, again = plainer, True
                break
    return case


def _plainer(case: Case) -> Iterator[Case]:
    plain: dict[str, Any] = dataclasses.asdict(Case())
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield dataclasses.replace(case, **{name: value})
