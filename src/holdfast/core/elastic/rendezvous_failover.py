"""Decides where the launchers of a job meet when the host of their rendezvous store is gone: one place, found by each
alone.

Every launcher keeps a store of its own ready, and says in it which store it uses: its own, or another. Who has lost the
store asks the endpoint of the job and all members it knows of. A store that is in use draws everybody; if none is, the
lowest live member opens its own, and the others wait for that, with a bound: it may live and be stuck.

Pure: the answers are arguments. The rules of the host's own look around are here too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.core.model import Decision

# How long a live member that should open its store, and does not, is waited for.
PATIENCE_S = 10.0
# How long a member that neither answers nor refuses is waited for: a busy machine takes seconds, a frozen one never answers.
UNSURE_S = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A store that answered.

    Attributes:
        uses: the address that its owner uses, as it says there; empty: nobody ever said, so it is itself in use.
    """

    address: str
    uses: str = ""

    @property
    def in_use(self) -> bool:
        """Return whether whoever comes here stays here."""
        return self.uses in ("", self.address)


def where(
    answers: Mapping[str, Answer],
    *,
    endpoint: str,
    members: Mapping[int, str],
    me: int,
    waited_s: float,
    unsure: Collection[str] = (),
) -> Decision[str]:
    """The address to meet at; empty: wait and ask again.

    Args:
        answers: of every store that answers, by address; ours is among them.
        endpoint: of the job.
        members: address by rank of those that met last, ours too.
        me: our rank, below 0 if we were never a member: then we open nothing.
        waited_s: since the store was lost.
        unsure: addresses that have neither answered nor refused yet.
    """
    ours = members.get(me, "")
    live = {rank: answers[address] for rank, address in sorted(members.items()) if address in answers and rank != me}
    others = [answer for answer in (answers.get(endpoint), *live.values()) if answer is not None]
    beyond = [answers[answer.uses] for answer in others if answer.uses in answers]
    for answer in (*others, *beyond):
        if answer.in_use and answer.address != ours:
            return Decision(answer.address, "that store is in use")
    below = [rank for rank in live if rank < me]
    if waited_s <= UNSURE_S and not below:
        slow = [rank for rank, address in sorted(members.items()) if rank < me and address in unsure]
        if slow:
            return Decision("", f"member {slow[0]} has neither answered nor refused yet")
    if me >= 0 and (not below or waited_s > PATIENCE_S):
        return Decision(ours, "nobody below us opens a store" if below else "we are the lowest live member")
    return Decision("", f"member {min(live)} is to open its store" if live else "nobody answers")


def is_whole(ranks: Collection[int], least: int) -> bool:
    """Return whether a rendezvous of `least` or more gave these ranks and nobody was lost since: they are 0 to n - 1."""
    return len(ranks) >= least and sorted(ranks) == list(range(len(ranks)))


def host_yields(other: Answer, mine: str, *, met: bool) -> bool | None:
    """Return what the host of an opened store does about another one that answers.

    Args:
        other: what it says.
        mine: our address.
        met: whether the job has come together here.

    Returns:
        True: everybody is sent there. False: everybody there is sent here. None: nothing.
    """
    if other.uses == mine:
        return None
    if met:
        return False
    return True if other.in_use else None
