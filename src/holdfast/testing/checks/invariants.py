"""The protocol's invariants as a checker: observed facts in, violations out.

Nothing here runs a trainer or reads a file; whoever observed the facts (the crash drill, a test, a simulator) hands
them over as values and gets back what contradicts docs/spec/protocol.md, each with the invariant's number and the
evidence. The checks share no code with what they judge: the lineage is rebuilt from what the trainers journalled, and
retention is counted again. `Course` collects the facts of one job in the order in which they happened; `judge` runs
every check over it.

A checker that cannot fail proves nothing: each of these is shown to fail by a bug in tests/planted/crash.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.model import Level, Version


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise. `invariant` is its number in the protocol (S1 .. S24, V1 .. V5)."""

    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what}"


@dataclass(frozen=True, slots=True)
class Ack:
    """A level that was named to a rank."""

    version: Version
    level: Level
    rank: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """Says what a rank came back with: `version` None is a fresh start; `digest` is that of the state it then had."""

    rank: int
    incarnation: int
    version: Version | None
    digest: str


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version's directory as an outsider reads it.

    Attributes:
        manifest: digest of the root manifest's bytes; `""` if there is none, so it is not committed.
        problems: what contradicts its manifest: missing, torn or unlisted files.
        contents: rank -> digest of the state that the files spell out; only of ranks that are complete in them.
        files: names in the directory.
    """

    version: Version
    manifest: str
    problems: tuple[str, ...] = ()
    contents: Mapping[int, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StorageView:
    """The checkpoint root at one moment.

    Attributes:
        foreign: files that are not ours, with a digest of their content.
        temporary: files in the temporary directory.
        problems: records beside the versions that are torn.
    """

    versions: Mapping[Version, StoredVersion]
    incarnations: tuple[int, ...] = ()
    foreign: Mapping[str, str] = field(default_factory=dict)
    temporary: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def committed(self) -> tuple[Version, ...]:
        """Versions whose root manifest stands, ascending."""
        return tuple(sorted(v for v, stored in self.versions.items() if stored.manifest))


@dataclass(frozen=True, slots=True)
class SealedCopy:
    """A bundle in memory whose header calls it sealed; `intact`: its bytes have the digest that the header names."""

    node: int
    version: Version
    bundle_id: str
    intact: bool


@dataclass(frozen=True, slots=True)
class MemoryView:
    """All memory of the job at one moment, read past the keepers.

    Attributes:
        copies: what the headers call sealed.
        contents: version -> rank -> digest of the state that the intact copies spell out.
        lost: nodes whose memory is gone because neither the keeper nor a trainer of theirs lives.
    """

    copies: tuple[SealedCopy, ...]
    contents: Mapping[Version, Mapping[int, str]]
    lost: frozenset[int] = frozenset()


@dataclass(slots=True)
class Life:
    """One incarnation of the trainers, from their start to their end.

    Attributes:
        states: (version, rank) -> digest of the rank's state at the call of save.
        wanted: the version that the user ordered, if any.
        spoiled: versions of which a copy was damaged on purpose before this life; an older one may be used.
        suspects: versions whose twins were made to differ.
        lost_early: nodes whose memory was lost before the ranks had come back.
        storage, memory: what was found after the life ended.
        faults: what no process may do: hang, die by itself, leave an error unsaid.
    """

    world_size: int
    states: dict[tuple[Version, int], str] = field(default_factory=dict)
    acks: list[Ack] = field(default_factory=list)
    resumed: list[Resumed] = field(default_factory=list)
    wanted: Version | None = None
    spoiled: frozenset[Version] = frozenset()
    suspects: frozenset[Version] = frozenset()
    lost_early: frozenset[int] = frozenset()
    storage: StorageView | None = None
    memory: MemoryView | None = None
    faults: list[Violation] = field(default_factory=list)


@dataclass(slots=True)
class Course:
    """All lives of one job, in order, and what was left when it had ended.

    Attributes:
        keep_last: what retention was told.
        left_behind: processes, files, sockets and memory that outlived the job.
    """

    keep_last: int
    lives: list[Life] = field(default_factory=list)
    left_behind: tuple[str, ...] = ()

    @property
    def acks(self) -> Iterator[Ack]:
        """Every acknowledgement, oldest first."""
        for life in self.lives:
            yield from life.acks


def judge(course: Course) -> list[Violation]:
    """Every violation in the whole course."""
    found: list[Violation] = []
    for life in course.lives:
        found += life.faults
        found += one_version_for_all(life)
    found += loaded_is_what_was_saved(course.lives)
    found += acknowledged_is_found(course.lives)
    found += dead_lineage_is_never_chosen(course.lives)
    found += incarnations_grow(course.lives)
    found += nothing_half_visible(course.lives)
    found += sealed_memory_is_intact(course.lives)
    found += snapshots_are_the_state(course.lives)
    found += newest_complete_is_kept_in_memory(course.lives)
    found += levels_are_true(course.lives, keep_last=course.keep_last)
    found += history_is_never_rewritten(course.lives)
    found += retention_keeps(course.lives, keep_last=course.keep_last)
    found += suspects_never_replace(course.lives)
    found += foreign_files_stay(course.lives)
    found += [Violation("V5", f"left behind: {thing}") for thing in course.left_behind]
    return found


def one_version_for_all(life: Life) -> list[Violation]:
    """S3, S10: all ranks of a life that came back did so in one incarnation from one version."""
    versions = {(r.incarnation, r.version) for r in life.resumed}
    if len(versions) <= 1:
        return []
    told = ", ".join(f"rank {r.rank} from {r.version} in incarnation {r.incarnation}" for r in life.resumed)
    return [Violation("S10", f"the ranks started from different versions: {told}")]


def loaded_is_what_was_saved(lives: Sequence[Life]) -> list[Violation]:
    """S5: the state after a restore has the digest of the state when that version was saved."""
    found = []
    saved: dict[tuple[Version, int], str] = {}
    for number, life in enumerate(lives, 1):
        for resumed in life.resumed:
            version = resumed.version
            if version is None:
                continue
            expected = saved.get((version, resumed.rank))
            if expected is None:
                found.append(
                    Violation("S5", f"life {number}: rank {resumed.rank} loaded {version}, which it never saved")
                )
            elif expected != resumed.digest:
                found.append(
                    Violation(
                        "S5", f"life {number}: rank {resumed.rank} loaded {version} with other bytes than it saved"
                    )
                )
        saved.update(life.states)
    return found


def acknowledged_is_found(lives: Sequence[Life]) -> list[Violation]:
    """S1: a life starts at least as far as the newest acknowledgement of a level that survived the losses before it."""
    found = []
    for number, life in enumerate(lives, 1):
        left = _survivors(standing(lives[: number - 1]), life.lost_early)
        required = max((version for version in left if version not in life.spoiled), default=None)
        for resumed in life.resumed:
            if life.wanted is None and required and (resumed.version is None or resumed.version < required):
                what = f"life {number}: {required} was acknowledged and survived, rank {resumed.rank} got {resumed.version}"
                found.append(Violation("S1", what))
    return found


def standing(lives: Sequence[Life]) -> dict[Version, Level]:
    """Acknowledged versions with the level that the losses and roll-backs of these lives left of them."""
    left: dict[Version, Level] = {}
    suspects: set[Version] = set()
    for life in lives:
        if _all_resumed(life):
            start = life.resumed[0].version
            left = {v: level for v, level in left.items() if start is not None and v <= start}
        for ack in life.acks:
            left[ack.version] = max(ack.level, left.get(ack.version, Level.NONE))
        left = _survivors(left, life.memory.lost if life.memory else frozenset())
        suspects |= life.suspects
    return {version: level for version, level in left.items() if version not in suspects}


def _all_resumed(life: Life) -> bool:
    return len({resumed.rank for resumed in life.resumed}) == life.world_size


def _survivors(levels: Mapping[Version, Level], lost: frozenset[int]) -> dict[Version, Level]:
    """Return what the loss of the memory of these nodes leaves of the acknowledged levels."""
    if not lost:
        return dict(levels)
    left: dict[Version, Level] = {v: level for v, level in levels.items() if level is Level.DURABLE}
    if len(lost) == 1:  # the other copy lives; it is one copy now
        left |= {version: Level.CAPTURED for version, level in levels.items() if level is Level.REPLICATED}
    return left


def dead_lineage_is_never_chosen(lives: Sequence[Life]) -> list[Violation]:
    """S4: no life starts from a version beyond the point where a later incarnation had resumed."""
    found = []
    live: set[Version] = set()
    for number, life in enumerate(lives, 1):
        found += [
            Violation("S4", f"life {number}: rank {resumed.rank} resumed from {resumed.version} of dead lineage")
            for resumed in life.resumed
            if resumed.version is not None and life.wanted is None and live and resumed.version not in live
        ]
        if _all_resumed(life):
            start = life.resumed[0].version
            live = {version for version in live if start is not None and version <= start}
        live |= {version for version, _ in life.states}
    return found


def incarnations_grow(lives: Sequence[Life]) -> list[Violation]:
    """S7: every life has a higher incarnation than all before, and it stands registered."""
    found = []
    highest = 0
    for number, life in enumerate(lives, 1):
        mine = {r.incarnation for r in life.resumed} | {version.incarnation for version, _ in life.states}
        found += [
            Violation("S7", f"life {number} runs as incarnation {incarnation}, {highest} was there before")
            for incarnation in sorted(mine)
            if incarnation <= highest
        ]
        registered = life.storage.incarnations if life.storage else None
        if registered is not None and mine - set(registered):
            found.append(Violation("S7", f"life {number}: incarnation {max(mine)} is not registered ({registered})"))
        highest = max([highest, *mine, *(registered or ())])
    return found


def nothing_half_visible(lives: Sequence[Life]) -> list[Violation]:
    """S2: what bears a final name is whole, and a committed version is exactly what its manifest lists."""
    found = []
    for number, life in enumerate(lives, 1):
        if life.storage is None:
            continue
        found += [Violation("S2", f"after life {number}: {problem}") for problem in life.storage.problems]
        for version, stored in sorted(life.storage.versions.items()):
            if version not in life.spoiled:
                found += [Violation("S2", f"after life {number}: {version}: {problem}") for problem in stored.problems]
    return found


def sealed_memory_is_intact(lives: Sequence[Life]) -> list[Violation]:
    """S5: what a header calls sealed has the digest that it names."""
    return [
        Violation(
            "S5", f"after life {number}: node {copy.node} calls {copy.version} {copy.bundle_id} sealed; it is torn"
        )
        for number, life in enumerate(lives, 1)
        if life.memory
        for copy in life.memory.copies
        if not copy.intact and copy.version not in life.spoiled
    ]


def snapshots_are_the_state(lives: Sequence[Life]) -> list[Violation]:
    """S12: sealed and stored bytes spell out the state at the call of save."""
    found = []
    states: dict[tuple[Version, int], str] = {}
    for number, life in enumerate(lives, 1):
        states.update(life.states)
        places: list[tuple[str, Version, Mapping[int, str]]] = []
        if life.memory:
            places += [("memory", version, contents) for version, contents in life.memory.contents.items()]
        if life.storage:
            places += [("storage", v, s.contents) for v, s in life.storage.versions.items() if s.manifest]
        for place, version, contents in places:
            for rank, digest in contents.items():
                if states.get((version, rank), digest) != digest:
                    what = f"after life {number}: {version} in {place} is not the state of rank {rank} at its save"
                    found.append(Violation("S12", what))
    return found


def newest_complete_is_kept_in_memory(lives: Sequence[Life]) -> list[Violation]:
    """S6: as long as no memory was lost, the newest captured version (or a newer one) is complete in it."""
    found = []
    for number, life in enumerate(lives, 1):
        captured = max((ack.version for ack in life.acks), default=None)
        if captured is None or life.memory is None or life.memory.lost:
            continue
        ranks = set(range(life.world_size))
        complete = [v for v, contents in life.memory.contents.items() if set(contents) == ranks]
        if not any(version >= captured for version in complete):
            held = ", ".join(map(str, sorted(complete))) or "nothing"
            found.append(Violation("S6", f"after life {number}: {captured} was captured, complete in memory is {held}"))
    return found


def levels_are_true(lives: Sequence[Life], *, keep_last: int) -> list[Violation]:
    """S13: a version called durable has its manifest, unless enough newer ones made it superfluous."""
    found = []
    for number, life in enumerate(lives, 1):
        if life.storage is None:
            continue
        committed = life.storage.committed
        for ack in life.acks:
            newer = sum(version > ack.version for version in committed)
            if ack.level is Level.DURABLE and ack.version not in committed and newer < keep_last:
                what = f"life {number}: rank {ack.rank} was told that {ack.version} is durable; it has no manifest"
                found.append(Violation("S13", what))
    return found


def history_is_never_rewritten(lives: Sequence[Life]) -> list[Violation]:
    """S7, S8: one manifest content per version, and the newest durable version never goes back."""
    found = []
    manifests: dict[Version, str] = {}
    newest: Version | None = None
    for number, life in enumerate(lives, 1):
        if life.storage is None:
            continue
        for version in life.storage.committed:
            content = life.storage.versions[version].manifest
            if manifests.setdefault(version, content) != content:
                found.append(Violation("S7", f"after life {number}: the manifest of {version} changed"))
        if newest is not None and newest not in life.storage.committed:
            later = [version for version in life.storage.committed if version > newest]
            if not later:
                found.append(Violation("S8", f"after life {number}: the newest durable version {newest} is gone"))
        newest = max((*life.storage.committed, *([newest] if newest else [])), default=None)
    return found


def retention_keeps(lives: Sequence[Life], *, keep_last: int) -> list[Violation]:
    """S11: of the living lineage the newest `keep_last` that were seen committed are there, and the one resumed from."""
    found = []
    ever: set[Version] = set()
    resumed: dict[int, Version | None] = {}
    for number, life in enumerate(lives, 1):
        if _all_resumed(life):
            resumed[life.resumed[0].incarnation] = life.resumed[0].version
        ever |= {ack.version for ack in life.acks if ack.level is Level.DURABLE}
        if life.storage is None:
            continue
        committed = set(life.storage.committed)
        ever = {version for version in ever | committed if not _is_dead(version, resumed)}
        must = set(sorted(ever)[-keep_last:])
        start = resumed[max(resumed)] if resumed else None
        if start is not None and start in ever and not any(version > start for version in ever):
            must.add(start)
        found += [
            Violation("S11", f"after life {number}: retention removed {version}, it must keep it")
            for version in sorted(must - committed)
        ]
        ever &= committed  # what is rightly gone is not asked for again, whatever lineage dies later
    return found


def _is_dead(version: Version, resumed: Mapping[int, Version | None]) -> bool:
    """Return whether a later incarnation resumed from before `version`."""
    later = (start for incarnation, start in resumed.items() if incarnation > version.incarnation)
    return any(start is None or version > start for start in later)


def suspects_never_replace(lives: Sequence[Life]) -> list[Violation]:
    """S16: a version whose twins differ is never committed, and never what a life comes back with."""
    found = []
    suspects: set[Version] = set()
    for number, life in enumerate(lives, 1):
        found += [
            Violation("S16", f"life {number}: rank {r.rank} resumed from {r.version}, whose twins differ")
            for r in life.resumed
            if r.version in suspects and life.wanted is None
        ]
        suspects |= life.suspects
        committed = life.storage.committed if life.storage else ()
        found += [
            Violation("S16", f"after life {number}: {v} is committed, its twins differ")
            for v in committed
            if v in suspects
        ]
    return found


def foreign_files_stay(lives: Sequence[Life]) -> list[Violation]:
    """S17: what holdfast did not write it neither changes nor removes."""
    found = []
    known: dict[str, str] = {}
    for number, life in enumerate(lives, 1):
        if life.storage is None:
            continue
        for name, digest in known.items():
            if life.storage.foreign.get(name) != digest:
                found.append(Violation("S17", f"after life {number}: the foreign file {name} was changed or removed"))
        known.update(life.storage.foreign)
    return found
