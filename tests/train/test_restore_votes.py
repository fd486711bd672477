"""The vote of a restore: one bad copy is a no of all ranks, all leave it out, and a version is tried three times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from holdfast.core.model import Topology, Version
from holdfast.core.recovery import Fetch, Source
from holdfast.node.client import Located
from holdfast.tiers import format as image_format
from holdfast.train import restore
from holdfast.train.agree import Ranks
from holdfast.train.fetched import Fault
from holdfast.train.restore import Restorer
from ranks_kit import on_all
from tiers.samples import random_image, ref_of, sample_bundle

VERSION = Version(1, 3)
CHOICE: Any = SimpleNamespace(version=VERSION)


def restorer_of(group: Ranks, condemned: list[tuple[object, ...]]) -> Restorer:
    def quarantine(version: Version, bundle_id: str, *, node: int | None, reason: str) -> None:
        condemned.append((group.rank, version, bundle_id, node, reason))

    job: Any = SimpleNamespace(group=group, topology=Topology(("a", "b", "c"), (0, 1, 2)))
    client: Any = SimpleNamespace(quarantine=quarantine)
    nothing: Any = None
    return Restorer(job, client, state=nothing, storage=nothing, strict=True, timeout_s=1)


def test_one_bad_copy_is_a_no_of_all_ranks_and_all_leave_it_out() -> None:
    condemned: list[tuple[object, ...]] = []

    def work(group: Ranks) -> tuple[Any, ...]:
        restorer = restorer_of(group, condemned)
        first = restorer._all_good(CHOICE, [])
        found = [Fault("g1", 1, "differs from its seal")] if group.rank == 1 else []
        second = restorer._all_good(CHOICE, found)
        return first, second, restorer._quarantine.copies, tuple(restorer._refused)

    told = on_all(3, work)
    said = (f"{VERSION} bundle g1 from b (rank 1): differs from its seal",)
    assert told == [(True, False, frozenset({(VERSION, "g1", 1)}), said)] * 3
    assert condemned == [(1, VERSION, "g1", 1, "differs from its seal")], "its keeper hears of it once"


def test_a_version_is_given_up_on_all_ranks_after_three_attempts() -> None:
    def work(group: Ranks) -> list[frozenset[Version]]:
        restorer = restorer_of(group, [])
        worn_out = []
        for attempt in range(3):
            restorer._all_good(CHOICE, [Fault(f"g{attempt}", None, "damaged")] if group.rank == attempt else [])
            worn_out.append(restorer._quarantine.versions)
        return worn_out

    assert on_all(3, work) == [[frozenset(), frozenset(), frozenset({VERSION})]] * 3


def test_attempts_are_counted_for_each_version() -> None:
    older = Version(1, 2)

    def work(group: Ranks) -> list[frozenset[Version]]:
        restorer = restorer_of(group, [])
        worn_out = []
        for attempt, version in enumerate((VERSION, VERSION, older, older, VERSION)):
            choice: Any = SimpleNamespace(version=version)
            restorer._all_good(choice, [Fault(f"g{attempt}", None, "damaged")] if group.rank == 0 else [])
            worn_out.append(restorer._quarantine.versions)
        return worn_out

    assert on_all(2, work) == [[frozenset()] * 4 + [frozenset({VERSION})]] * 2


def test_a_copy_that_is_whole_and_not_the_one_agreed_on_is_a_fault() -> None:
    """The keeper would not hand it out (tests/node/test_nodes.py); whoever does, the rank looks for itself."""
    made = [sample_bundle(), sample_bundle()]
    images = [random_image(bundle, seed) for seed, bundle in enumerate(made)]
    seals = [image_format.seal(bundle.bundle_id, image) for bundle, image in zip(made, images, strict=True)]
    ref, faults = ref_of(made[0]), list[Fault]()
    fetch = Fetch(ref, seals[0], Source.PEER, 2)
    right, wrong = (
        Located(ref, seal, memoryview(image), Source.PEER, 0.0) for seal, image in zip(seals, images, strict=True)
    )
    assert [source.located for source in restore._readable([fetch], [right], faults)] == [right]
    assert list(restore._readable([fetch], [wrong], faults)) == []
    assert faults == [Fault(ref.bundle_id, 2, "the copy is not the one that was agreed on")]
