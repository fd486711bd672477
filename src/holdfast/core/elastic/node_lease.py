"""Decides who may take part as the node of a name: one launcher at a time, and none that comes back from the dead.

A launcher claims its node's name in the rendezvous store before it meets the others, with a number drawn at its start. A
second one with that name is let in when the first has left, or is proven gone (its process, on the same machine), or
was not heard of for the guard time. The first one, should it wake up then, finds the claim of another: it was
replaced, and may neither join nor have its workers go on.

Pure: nobody's clock is compared, only how long a claim stood still while the second one looked.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.model import Decision

GUARD_S = 30.0


@dataclass(frozen=True, slots=True)
class Claim:
    """Holds what a launcher wrote under its node's name.

    Attributes:
        nonce: drawn at its start; tells two launchers of one name apart.
        machine: what no two machines share.
        pid, started: its process there.
        beat: rises while it lives.
        left: it went of its own accord.
    """

    nonce: str
    machine: str = ""
    pid: int = 0
    started: int = 0
    beat: int = 0
    left: bool = False


def admit(known: Claim | None, mine: Claim, *, gone: bool, still_s: float, guard_s: float) -> Decision[bool | None]:
    """Return whether `mine` may replace `known`: yes, not yet (False), never (None), and why.

    Args:
        known: the claim that stands; None if nobody made one.
        mine: of whoever asks.
        gone: its process is proven to be gone.
        still_s: for how long its beat stood still while we looked; below 0: it has moved.
        guard_s: for how long it must.
    """
    if known is None or known.nonce == mine.nonce:
        return Decision(True, "nobody else has the name")
    if known.left:
        return Decision(True, "who had the name has left")
    if gone:
        return Decision(True, f"process {known.pid}, which had the name, is gone")
    if still_s < 0:
        return Decision(None, f"process {known.pid} has the name and lives")
    if still_s >= guard_s:
        return Decision(True, f"who had the name was not heard of for {guard_s:g} s")
    return Decision(False, f"process {known.pid} may still have the name; it is waited for")


def stands(known: Claim | None, mine: Claim) -> bool:
    """Return whether `mine` still holds; a store that lost it is no rival."""
    return known is None or known.nonce == mine.nonce
