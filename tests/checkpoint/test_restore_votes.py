"""The vote of a restore: one bad copy is a no of all ranks, and all leave it out; one out of reach is held against nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.base.errors import CorruptError, HoldfastError, KeeperLost, NewerFormat, StorageError, VersionNotFound
from holdfast.checkpoint.job.collectives import Ranks
from holdfast.checkpoint.restore import restorer, version_decision
from holdfast.checkpoint.restore.fetcher import Fault, Fetcher
from holdfast.checkpoint.restore.version_decision import Decisions
from holdfast.core.model import Topology, Version
from holdfast.core.recovery.version_choice import Fetch, Source
from holdfast.keeper.rpc.client import Located
from holdfast.tiers.format import image as image_format
from ranks_kit import on_all
from tiers.samples import random_image, ref_of, sample_bundle

VERSION = Version(1, 3)
CHOICE: Any = SimpleNamespace(version=VERSION)


def decisions_of(group: Ranks, condemned: list[tuple[object, ...]]) -> Decisions:
    def quarantine(version: Version, bundle_id: str, *, node: int | None, reason: str) -> None:
        condemned.append((group.rank, version, bundle_id, node, reason))

    job: Any = SimpleNamespace(group=group, topology=Topology(("a", "b", "c"), (0, 1, 2)))
    client: Any = SimpleNamespace(quarantine=quarantine, alive=True)
    nothing: Any = None
    return Decisions(job, client, nothing, timeout_s=1)


def test_one_bad_copy_is_a_no_of_all_ranks_and_all_leave_it_out() -> None:
    condemned: list[tuple[object, ...]] = []

    def work(group: Ranks) -> tuple[Any, ...]:
        decisions = decisions_of(group, condemned)
        first = decisions.vote(CHOICE, [])
        found = [Fault("g1", 1, "differs from its seal")] if group.rank == 1 else []
        second = decisions.vote(CHOICE, found)
        return first, second, decisions._out.quarantine.copies, tuple(decisions.refused)

    told = on_all(3, work)
    said = (f"{VERSION} bundle g1 from b (rank 1): differs from its seal",)
    assert told == [(True, False, frozenset({(VERSION, "g1", 1)}), said)] * 3
    assert condemned == [(1, VERSION, "g1", 1, "differs from its seal")], "its keeper hears of it once"


def test_a_version_is_not_given_up_for_the_number_of_its_bad_copies() -> None:
    """Each of them is left out, and nothing else: as long as a good copy is left it is this version."""

    def work(group: Ranks) -> tuple[Any, ...]:
        decisions = decisions_of(group, [])
        for attempt in range(9):
            decisions.vote(CHOICE, [Fault(f"g{attempt}", 1, "damaged")] if group.rank == attempt % 3 else [])
        return dict(decisions._out.quarantine.versions), len(decisions._out.quarantine.copies)

    assert on_all(3, work) == [({}, 9)] * 3


def test_bad_copies_without_an_end_are_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_decision, "MAX_ROUNDS", 3)

    def work(group: Ranks) -> None:
        decisions = decisions_of(group, [])
        for attempt in range(4):
            decisions.vote(CHOICE, [Fault(f"g{attempt}", 1, "damaged")])

    assert [type(error) for error in on_all(2, work)] == [CorruptError] * 2


def test_storage_is_read_twice_before_its_copy_counts_as_damaged() -> None:
    condemned: list[tuple[object, ...]] = []

    def work(group: Ranks) -> list[frozenset[Any]]:
        decisions, seen = decisions_of(group, condemned), []
        for _ in range(2):
            decisions.vote(CHOICE, [Fault("g1", None, "damaged")] if group.rank == 2 else [])
            seen.append(decisions._out.quarantine.copies)
        return seen

    assert on_all(3, work) == [[frozenset(), frozenset({(VERSION, "g1", None)})]] * 3
    first, second = condemned
    assert first == (2, VERSION, "g1", 2, "damaged"), "what was read is not found again in memory"
    assert second == (2, VERSION, "g1", None, "damaged")


@pytest.mark.parametrize("kind", [StorageError, KeeperLost])
def test_a_copy_out_of_reach_is_left_out_and_not_condemned(kind: type[HoldfastError]) -> None:
    condemned: list[tuple[object, ...]] = []

    def work(group: Ranks) -> tuple[Any, ...]:
        decisions = decisions_of(group, condemned)
        found = [Fault("g1", 1, "no answer", kind)] if group.rank == 1 else []
        votes = [decisions.vote(CHOICE, found) for _ in range(5)]
        facts = decisions._out
        return votes, facts.quarantine.copies, {copy: type(error) for copy, error in facts.away.items()}

    assert on_all(3, work) == [([False] * 5, frozenset(), {(VERSION, "g1", 1): kind})] * 3
    assert condemned == [], "no keeper hears anything against it"


def test_a_durable_version_that_one_node_does_not_see_is_out_of_reach_and_not_damaged() -> None:
    """Rank 0 has read its manifest. A cache of a network file system, or a replica of it, may be behind."""
    condemned: list[tuple[object, ...]] = []

    def work(group: Ranks) -> tuple[Any, ...]:
        decisions = decisions_of(group, condemned)
        found = [Fault("g1", None, "it is not there (any more)", VersionNotFound)] if group.rank == 1 else []
        votes = [decisions.vote(CHOICE, found) for _ in range(3)]
        (error,) = decisions._out.away.values()
        return votes, decisions._out.quarantine.copies, type(error), error.retryable

    assert on_all(2, work) == [([False] * 3, frozenset(), StorageError, True)] * 2
    assert condemned == []


def test_only_proof_of_damage_condemns_a_copy() -> None:
    condemning = {kind for kind in _all_kinds(HoldfastError) if kind.condemns}
    names = {"CorruptError", "NotProved", "VersionNotFound", "InUse", "KeeperGone"}
    assert {kind.__name__ for kind in condemning} == names
    assert not any(issubclass(kind, StorageError) for kind in condemning)
    assert not NewerFormat.condemns


def _all_kinds(kind: type[HoldfastError]) -> list[type[HoldfastError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _all_kinds(child))]


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (StorageError("EIO"), StorageError), (KeeperLost("silent"), KeeperLost), (CorruptError("bad"), CorruptError),
        (VersionNotFound("gone"), VersionNotFound), (NewerFormat("too new"), None), (HoldfastError("?"), None),
    ],
)  # fmt: skip
def test_what_no_other_copy_can_mend_is_raised(error: HoldfastError, becomes: type[HoldfastError] | None) -> None:
    def obtain(*_: Any, **__: Any) -> Any:
        raise error

    client: Any = SimpleNamespace(obtain=obtain, alive=True, answers=lambda _: True)
    fetch: Any = SimpleNamespace(ref=SimpleNamespace(bundle_id="g1"), node=None)
    faults: list[Fault] = []
    if becomes is None:
        with pytest.raises(type(error)):
            Fetcher(client, timeout_s=1).obtain(VERSION, [fetch], faults)
    else:
        assert Fetcher(client, timeout_s=1).obtain(VERSION, [fetch], faults) == []
        assert [fault.kind for fault in faults] == [becomes]


def test_a_keeper_that_hangs_is_no_fault_of_the_copy() -> None:
    """The own one: nobody could bring any copy, so no version may be given up for it."""

    def obtain(*_: Any, **__: Any) -> Any:
        raise KeeperLost("the keeper did not answer within 65 s")

    client: Any = SimpleNamespace(obtain=obtain, alive=True, answers=lambda _: False)
    fetch: Any = SimpleNamespace(ref=SimpleNamespace(bundle_id="g1"), node=0)
    faults: list[Fault] = []
    with pytest.raises(KeeperLost):
        Fetcher(client, timeout_s=1).obtain(VERSION, [fetch], faults)
    assert faults == []


def test_a_copy_that_is_whole_and_not_the_one_agreed_on_is_a_fault() -> None:
    """The keeper would not hand it out (tests/keeper/test_nodes.py); whoever does, the rank looks for itself."""
    made = [sample_bundle(), sample_bundle()]
    images = [random_image(bundle, seed) for seed, bundle in enumerate(made)]
    seals = [image_format.seal(bundle.bundle_id, image) for bundle, image in zip(made, images, strict=True)]
    ref, faults = ref_of(made[0]), list[Fault]()
    fetch = Fetch(ref, seals[0], Source.PEER, 2)
    right, wrong = (
        Located(ref, seal, memoryview(image), Source.PEER, 0.0) for seal, image in zip(seals, images, strict=True)
    )
    assert [source.located for source in restorer._readable([fetch], [right], faults)] == [right]
    assert list(restorer._readable([fetch], [wrong], faults)) == []
    assert faults == [Fault(ref.bundle_id, 2, "the copy is not the one that was agreed on")]


def test_a_report_has_a_word_for_every_source() -> None:
    for source in Source:
        name = source.name.lower()
        assert restorer.RestoreReport(Version(1, 1), "", bytes={name: 1}).source
