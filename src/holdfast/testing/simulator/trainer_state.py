"""Holds what the trainers of the simulated job hold beside their slots: the live state of a step, and notes of the last
two.

A step of a rank is an update that takes a moment, then a note. A rank that is interrupted in between holds nothing that
may be gone on from. Its device is behind: it has the noted state only a moment later, and if the job breaks off before, it
has something else for ever, since what is queued runs on behind collectives that were aborted. Who dies loses the live state; its notes stay on its node, and go with that. The choice is
core.livefill's; the truth about every rank's memory is kept here beside it, and judged (S3, S10, S12, S20).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.core.model import BundleRef, Version
from holdfast.core.recovery import survivor_vote
from holdfast.core.recovery.survivor_vote import Offer
from holdfast.core.versions.lineage import Lineage
from holdfast.testing.simulator.clock import Clock, Violation

# How far a device is behind its host.
LAG_S = 0.2


@dataclass(slots=True)
class Memory:
    """Is the memory of one rank.

    Attributes:
        truth: the version whose parameters lie here; None: something between two, or nothing.
        noted: the version of its last note.
        torn: its update is under way.
        behind: its device has not passed the last note.
        notes: the two newest, oldest first; they outlive the process, not the node.
    """

    truth: Version | None = None
    noted: Version | None = None
    torn: bool = False
    behind: bool = False
    notes: list[Version] = field(default_factory=list)

    def update(self) -> None:
        """The optimizer's step begins."""
        self.torn, self.behind, self.truth = True, False, None

    def note(self, version: Version) -> None:
        """The step is over for the host, and noted; its device has it later."""
        self.torn, self.behind, self.noted = False, True, version
        self.notes = [*(v for v in self.notes if v != version), version][-2:]

    def passes(self, version: Version) -> None:
        """The device has come as far as the note of this version."""
        if self.noted == version and not self.torn:
            self.truth, self.behind = version, False

    def void(self) -> None:
        """The job breaks off: what the device has not passed is no step's state (checkpoint.survivors.survivor_state)."""
        if self.behind:
            self.noted = None

    def die(self) -> None:
        """The process ends; its notes stay."""
        self.truth = self.noted = None
        self.torn = self.behind = False

    def offer(self) -> Offer:
        """Return the offer as checkpoint.survivors.survivor_state makes it, from what the process itself can know."""
        live = None if self.torn else self.noted
        return Offer(live, tuple(self.notes), "" if live else "it holds nothing whole")


class Memories:
    """Holds the memories of all ranks."""

    def __init__(self, ranks: Iterable[int], table: Sequence[BundleRef]) -> None:
        self.of = {rank: Memory() for rank in ranks}
        self._table = table
        self.fills = 0

    def break_off(self) -> None:
        """All ranks leave the run."""
        for memory in self.of.values():
            memory.void()

    def lose(self, ranks: Iterable[int]) -> None:
        """Their node is gone."""
        for rank in ranks:
            self.of[rank] = Memory()

    def agreed(self, newest: Version | None, lineage: Lineage) -> Version | None:
        """The step that all go on from without what was saved, or None."""
        offers = [self.of[rank].offer() for rank in sorted(self.of)]
        version = survivor_vote.agree(offers, newest=newest, lineage=lineage).value
        if version is None:
            return None
        live = {rank for rank, offer in enumerate(offers) if offer.live == version}
        for ref in self._table:
            for rank in ref.ranks if len(ref.ranks) > 1 else ():
                giver = rank if rank in live else survivor_vote.giver(ref.ranks, live, rank)
                if giver is None:
                    return None  # the vote
                self._prove(giver, version)
        self._prove_notes(version, newest, lineage)
        self.fills += 1
        return version

    def _prove(self, giver: int, version: Version) -> None:
        if self.of[giver].behind:
            raise Violation(
                "S20", f"rank {giver} gives {version}, which its device had not finished when the job broke off"
            )
        if self.of[giver].truth != version:
            raise Violation("S12", f"rank {giver} gives what is not the state of {version}")

    def _prove_notes(self, version: Version, newest: Version | None, lineage: Lineage) -> None:
        for rank, memory in self.of.items():
            if version not in memory.notes:
                raise Violation("S3", f"rank {rank} has nothing of its own of {version}, which all go on from")
        if newest is not None and version < newest:
            raise Violation("S8", f"{version} is gone on from although {newest} was saved")
        if not lineage.is_live(version):
            raise Violation("S4", f"{version} is gone on from, which an incarnation in between had rolled back")

    def resumed(self, version: Version | None) -> None:
        """All ranks hold `version` of the new incarnation, and have noted it."""
        for memory in self.of.values():
            memory.die()
            if version is not None:
                memory.note(version)
                memory.passes(version)


def stepper(
    clock: Clock, memory: Memory, version: Version, goes_on: Callable[[], bool], save: Callable[[], None]
) -> Callable[[], None]:
    """One step of a rank: an update that takes a moment, the note, the save; later the device passes the note.

    It breaks off when `goes_on` says so.
    """

    def update() -> None:
        if goes_on():
            memory.update()
            clock.after(clock.chance.uniform(0.0, 0.05), noted)

    def noted() -> None:
        if goes_on():
            memory.note(version)
            clock.after(LAG_S, passed)
            save()

    def passed() -> None:
        if goes_on():
            memory.passes(version)

    return update
