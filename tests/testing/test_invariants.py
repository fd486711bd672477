"""The checker library: what is right passes, and each wrong course of a job is named by its invariant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.core.model import Level, Version
from holdfast.testing.checks import write_order
from holdfast.testing.checks.invariants import (
    Ack,
    Course,
    Life,
    MemoryView,
    Resumed,
    SealedCopy,
    StorageView,
    StoredVersion,
    judge,
)
from holdfast.testing.checks.write_order import FileOp, NamedDurable

A, B, C = Version(1, 3), Version(1, 5), Version(2, 4)


def stored(*versions: Version, **changes: object) -> StorageView:
    return replace(
        StorageView(
            {v: StoredVersion(v, f"manifest of {v}", (), {0: f"state {v}"}, ("manifest.json",)) for v in versions},
            tuple(sorted({v.incarnation for v in versions})),
        ),
        **changes,
    )


def remembered(*versions: Version, lost: bool = False) -> MemoryView:
    copies = tuple(SealedCopy(0, v, "b", intact=True) for v in versions)
    return MemoryView(copies, {v: {0: f"state {v}"} for v in versions}, frozenset({0} if lost else ()))


def first() -> Life:
    """One rank saves A (durable) and B (captured); the trainer dies."""
    life = Life(1)
    life.resumed = [Resumed(0, 1, None, "new")]
    life.states = {(A, 0): f"state {A}", (B, 0): f"state {B}"}
    life.acks = [Ack(A, Level.DURABLE, 0), Ack(B, Level.CAPTURED, 0)]
    life.storage, life.memory = stored(A), remembered(A, B)
    return life


def second(version: Version | None = B, incarnation: int = 2, digest: str | None = None) -> Life:
    """It comes back."""
    life = Life(1)
    life.resumed = [Resumed(0, incarnation, version, digest or f"state {version}")]
    life.storage = stored(A, incarnations=tuple(sorted({1, incarnation})))
    life.memory = remembered(lost=True)
    return life


def names(*lives: Life, left: tuple[str, ...] = ()) -> set[str]:
    return {violation.invariant for violation in judge(Course(2, list(lives), left))}


def test_a_right_course_violates_nothing() -> None:
    assert judge(Course(2, [first(), second()])) == []


def test_captured_may_be_lost_with_the_memory_and_durable_may_not() -> None:
    gone = first()
    gone.memory = remembered(lost=True)
    assert names(gone, second(A)) == set()
    assert names(gone, second(None)) >= {"S1"}


def test_an_acknowledged_version_that_is_not_found_again_is_s1() -> None:
    assert names(first(), second(A)) == {"S1"}


def test_a_replicated_version_survives_one_node_and_not_two() -> None:
    life = Life(2)
    life.resumed = [Resumed(rank, 1, None, "new") for rank in (0, 1)]
    life.states = {(A, rank): f"state {rank}" for rank in (0, 1)}
    life.acks = [Ack(A, Level.REPLICATED, 0)]
    life.memory = MemoryView((), {}, frozenset({1}))
    back = Life(2)
    back.resumed = [Resumed(rank, 2, None, "new") for rank in (0, 1)]
    assert names(life, back) == {"S1"}
    life.memory = MemoryView((), {}, frozenset({0, 1}))
    assert names(life, back) == set()


WRONG_TURNS: list[tuple[str, Callable[[Life, Life], None]]] = [
    ("S5", lambda _, two: setattr(two, "resumed", [Resumed(0, 2, B, "other bytes")])),
    ("S5", lambda one, _: setattr(one, "memory", MemoryView((SealedCopy(0, B, "b", False),), {B: {0: f"state {B}"}}))),
    ("S6", lambda one, _: setattr(one, "memory", remembered(A))),
    ("S7", lambda _, two: setattr(two, "resumed", [Resumed(0, 1, B, f"state {B}")])),
    ("S7", lambda _, two: setattr(two, "storage", stored(A, incarnations=(1,)))),
    ("S7", lambda _, two: setattr(two, "storage", rewritten(two, StoredVersion(A, "another manifest")))),
    ("S2", lambda one, _: setattr(one, "storage", rewritten(one, StoredVersion(A, "m", ("a file is torn",))))),
    ("S12", lambda one, _: setattr(one, "storage", rewritten(one, StoredVersion(A, "m", (), {0: "stale"})))),
    ("S13", lambda one, _: one.acks.append(Ack(B, Level.DURABLE, 0))),
    ("S8", lambda _, two: setattr(two, "storage", stored(incarnations=(1, 2)))),
    ("S11", lambda _, two: setattr(two, "storage", stored(C, incarnations=(1, 2)))),
    ("S16", lambda one, _: setattr(one, "suspects", frozenset({A}))),
    ("S17", lambda one, _: setattr(one, "storage", stored(A, foreign={"notes": "digest"}))),
]


def rewritten(life: Life, version: StoredVersion) -> StorageView:
    assert life.storage is not None
    return replace(life.storage, versions={**life.storage.versions, version.version: version})


@pytest.mark.parametrize(("expected", "change"), WRONG_TURNS)
def test_each_wrong_turn_is_named(expected: str, change: Callable[[Life, Life], None]) -> None:
    one, two = first(), second()
    change(one, two)
    assert expected in names(one, two)


def test_ranks_that_start_from_different_versions_are_s10() -> None:
    life = Life(2)
    life.resumed = [Resumed(0, 2, A, f"state {A}"), Resumed(1, 2, B, f"state {B}")]
    assert "S10" in names(first(), life)


def test_dead_lineage_is_s4() -> None:
    back = second(A)
    back.wanted = A  # the user orders it; B is dead from here on
    back.states = {(C, 0): f"state {C}"}
    third = second(B, incarnation=3)
    assert names(first(), back, third) == {"S4"}
    assert names(first(), back, second(C, incarnation=3)) == set()


def test_what_is_left_behind_is_v5() -> None:
    assert names(first(), second(), left=("process k0",)) == {"V5"}


# --- the order of writes


ROOT = "/r"
FILE, MANIFEST = f"{ROOT}/{A}/b.safetensors", f"{ROOT}/{A}/manifest.json"


def written(path: str, *, call: str = "rename") -> list[FileOp]:
    """The whole sequence that makes one file durable."""
    temporary = f"{ROOT}/.tmp/{path.rsplit('/', 1)[1]}"
    parent = path.rsplit("/", 1)[0]
    made = [] if parent == ROOT else [FileOp("mkdir", parent)]
    return [
        FileOp("open", temporary), FileOp("pwrite", temporary), FileOp("fsync", temporary), *made,
        FileOp(call, path, source=temporary), FileOp("fsync", parent), FileOp("fsync", ROOT),
    ]  # fmt: skip


COMMIT = [*written(FILE), *written(MANIFEST, call="link"), NamedDurable(A)]


def broken(history: list[FileOp | NamedDurable]) -> set[str]:
    return {violation.invariant for violation in write_order.check(ROOT, history)}


def test_the_full_sequence_violates_nothing() -> None:
    assert write_order.check(ROOT, COMMIT) == []


def test_leaving_out_any_fsync_that_a_promise_needs_is_found() -> None:
    needed = []
    for at, step in enumerate(COMMIT):
        if isinstance(step, FileOp) and step.call == "fsync":
            left_out = COMMIT[:at] + COMMIT[at + 1 :]
            needed.append(bool(write_order.check(ROOT, left_out)))
    # Of the root only the first is: the version's directory was made before it.
    assert needed == [True, True, False, True, True, False]


def test_a_failed_file_must_not_be_used_or_synced_again() -> None:
    temporary = f"{ROOT}/.tmp/b.safetensors"
    failed = [FileOp("open", temporary), FileOp("pwrite", temporary), FileOp("fsync", temporary, failed=True)]
    assert broken([*failed, FileOp("fsync", temporary)]) == {"S14"}
    assert "S14" in broken([*failed, FileOp("rename", FILE, source=temporary)])


def test_a_manifest_that_replaces_is_found_and_one_with_the_same_bytes_is_not() -> None:
    assert broken([*written(FILE), *written(MANIFEST, call="rename"), NamedDurable(A)]) == {"S7"}


def test_writing_a_durable_file_again_while_the_version_is_committed_again_violates_nothing() -> None:
    again = [op for op in written(FILE) if op.call != "mkdir"]
    renamed = again[:4]
    commit_again = [replace(op, replaces=op.call == "rename") for op in written(MANIFEST, call="rename")[:3]]
    assert renamed[-1].call == "rename"
    taken = [FileOp("link", MANIFEST, source=f"{ROOT}/.tmp/manifest.json", failed=True)]
    replaced = [FileOp("rename", MANIFEST, source=f"{ROOT}/.tmp/manifest.json", replaces=True)]
    rest = [*commit_again, *taken, *replaced, FileOp("fsync", f"{ROOT}/{A}"), NamedDurable(A)]
    assert write_order.check(ROOT, [*COMMIT, *renamed, *rest]) == []
    # The first writing of it was never made durable: then its name may be lost.
    never_synced = [op for op in COMMIT if op != FileOp("fsync", f"{ROOT}/{A}")][:-1]
    assert "S2" in broken([*never_synced, *renamed, *rest])


def test_a_removal_whose_record_died_with_its_writer_is_known_from_the_name_that_is_absent() -> None:
    newer = [replace(op, path=op.path.replace(str(A), str(B))) for op in COMMIT if isinstance(op, FileOp)]
    gone = FileOp("unlink", MANIFEST, failed=True, absent=True)
    rest = [FileOp("fsync", f"{ROOT}/{A}"), FileOp("unlink", FILE)]
    assert write_order.check(ROOT, [*COMMIT, *newer, gone, *rest]) == []
    # Not durably gone yet, or never looked for.
    assert broken([*COMMIT, *newer, gone, rest[1]]) == {"S11"}
    assert broken([*COMMIT, *newer, *rest]) == {"S11"}
    assert broken([*COMMIT, *newer, replace(gone, absent=False), *rest]) == {"S11"}


def test_retention_removes_the_manifest_first_durably_and_only_after_a_newer_commit() -> None:
    newer = [
        replace(op, path=op.path.replace(str(A), str(B)), source=op.source)
        if isinstance(op, FileOp)
        else NamedDurable(B)
        for op in COMMIT
    ]
    remove = [FileOp("unlink", MANIFEST), FileOp("fsync", f"{ROOT}/{A}"), FileOp("unlink", FILE)]
    assert broken([*COMMIT, *newer, *remove]) == set()
    assert broken([*COMMIT, *remove]) == {"S11"}
    assert broken([*COMMIT, *newer, remove[0], remove[2]]) == {"S11"}
    assert broken([*COMMIT, *newer, remove[2], *remove[:2]]) == {"S11"}
