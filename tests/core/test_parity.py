"""Groups, stripes and the choice by parity: any number of nodes, any sizes; one lost member is made anew, never wrongly."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.layout import parity_groups
from holdfast.core.layout.parity_stripes import Covers, Piece, PieceCopy, Striping
from holdfast.core.model import BundleRef, Level, RankLayout, Seal, Topology, Version
from holdfast.core.recovery.parity_choice import REBUILT
from holdfast.core.recovery.version_choice import (
    Choice,
    Facts,
    MemoryCopy,
    Quarantine,
    Source,
    Stored,
    cheapest,
    choose_version,
)
from holdfast.core.versions.coordinator_board import Announcement, Board, Kind, RankReport
from holdfast.core.versions.lineage import Lineage

CASES = settings(max_examples=150, deadline=None)
CHUNK = 16
V = Version(1, 5)
NOTHING_BAD = Quarantine()


def topology_of(num_nodes: int, redundancy: str, racks: tuple[str, ...] = ()) -> Topology:
    return Topology(tuple(f"n{i}" for i in range(num_nodes)), tuple(range(num_nodes)), racks, redundancy=redundancy)


# --- groups


@CASES
@given(st.integers(1, 60), st.integers(3, 12))
def test_every_node_is_in_one_group_of_the_size_that_was_asked_for(num_nodes: int, wanted: int) -> None:
    topology = topology_of(num_nodes, f"parity:{wanted}")
    groups = parity_groups.groups(topology)
    if num_nodes < 3:
        assert groups == ()
        assert parity_groups.keeps_replicas(topology) == (num_nodes == 2)
        return
    assert sorted(node for group in groups for node in group) == list(range(num_nodes))
    sizes = {len(group) for group in groups}
    assert max(sizes) - min(sizes) <= 1
    if num_nodes >= wanted:
        assert wanted <= min(sizes) <= max(sizes) < 2 * wanted
    else:
        assert len(groups) == 1
        assert f"fewer than the {wanted}" in parity_groups.in_words(topology)
    assert not parity_groups.keeps_replicas(topology)


@CASES
@given(st.lists(st.integers(1, 6), min_size=2, max_size=8), st.integers(3, 6), st.randoms())
def test_a_rack_takes_as_few_of_one_group_as_possible(sizes: list[int], wanted: int, random: object) -> None:
    racks = [f"r{rack}" for rack, count in enumerate(sizes) for _ in range(count)]
    random.shuffle(racks)  # type: ignore[attr-defined]
    if len(racks) < wanted:
        return
    groups = parity_groups.groups(topology_of(len(racks), f"parity:{wanted}", tuple(racks)))
    for rack, count in enumerate(sizes):
        most = max(sum(racks[node] == f"r{rack}" for node in group) for group in groups)
        assert most <= -(-count // len(groups))


@pytest.mark.parametrize("redundancy", ["", "parity", "parity:2", "parity:0", "parity:-3", "replicas", "parity:99999"])
def test_what_is_no_redundancy_is_refused(redundancy: str) -> None:
    with pytest.raises(ValueError, match="parity"):
        parity_groups.members_wanted(redundancy)


# --- stripes


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


Images = list[dict[str, bytes]]


@st.composite
def images(draw: st.DrawFn) -> Images:
    """By member, its images: 3 to 9 members, some with nothing, some with many small images."""
    return [
        {
            f"m{member}-b{index}": draw(st.binary(min_size=1, max_size=5 * CHUNK))
            for index in range(draw(st.integers(0, 5)))
        }
        for member in range(draw(st.integers(3, 9)))
    ]


def covers_of(images: Images) -> Covers:
    return tuple(tuple(Seal(name, len(data), digest(data)) for name, data in sorted(mine.items())) for mine in images)


def chunk_of(images: Images, member: int, bundle_id: str, index: int) -> bytes:
    return images[member][bundle_id][index * CHUNK : (index + 1) * CHUNK]


def xored(parts: list[bytes], length: int) -> bytes:
    found = 0
    for part in parts:
        found ^= int.from_bytes(part.ljust(length, b"\0")[:length], "big")
    return found.to_bytes(length, "big")


def parity_of(striping: Striping, images: Images, keeper: int) -> bytes:
    rows = striping.rows(keeper)
    assert [row.offset for row in rows] == [sum(other.length for other in rows[:at]) for at in range(len(rows))]
    return b"".join(
        xored([chunk_of(images, m, c.bundle_id, c.index) for m, c in row.chunks.items()], row.length) for row in rows
    )


@CASES
@given(images())
def test_any_lost_member_is_made_anew_from_the_others(images: Images) -> None:
    striping = Striping(covers_of(images), CHUNK)
    pieces = [parity_of(striping, images, keeper) for keeper in range(len(images))]
    for lost, mine in enumerate(images):
        for name, data in mine.items():
            found = b""
            for index in range(-(-len(data) // CHUNK)):
                keeper, row = striping.row_of(lost, name, index)
                assert keeper != lost, "what a member keeps would be lost with it"
                others = [chunk_of(images, m, c.bundle_id, c.index) for m, c in row.chunks.items() if m != lost]
                parity = pieces[keeper][row.offset : row.offset + row.length]
                found += xored([parity, *others], row.length)[: row.chunks[lost].length]
            assert found == data


@CASES
@given(images())
def test_every_chunk_is_in_one_row_and_no_row_has_two_of_a_member(images: Images) -> None:
    striping = Striping(covers_of(images), CHUNK)
    seen = []
    for keeper in range(len(images)):
        assert striping.num_bytes(keeper) == sum(row.length for row in striping.rows(keeper))
        for row in striping.rows(keeper):
            assert keeper not in row.chunks
            assert row.length == max(chunk.length for chunk in row.chunks.values()) <= CHUNK
            seen += [(member, chunk.bundle_id, chunk.index) for member, chunk in row.chunks.items()]
    chunks = [
        (member, name, index)
        for member, mine in enumerate(images)
        for name, data in mine.items()
        for index in range(-(-len(data) // CHUNK))
    ]
    assert sorted(seen) == sorted(chunks)


@pytest.mark.parametrize("size", range(3, 10))
def test_a_member_keeps_one_part_in_k_less_one(size: int) -> None:
    num_chunks = 40 * (size - 1)
    covers = tuple((Seal(f"b{member}", num_chunks * CHUNK, "d"),) for member in range(size))
    striping = Striping(covers, CHUNK)
    assert {striping.num_bytes(keeper) for keeper in range(size)} == {40 * CHUNK}


@CASES
@given(st.lists(st.lists(st.integers(1, 20 * CHUNK), max_size=4), min_size=3, max_size=9))
def test_nodes_of_any_sizes_keep_what_the_largest_would_and_a_chunk(sizes: list[list[int]]) -> None:
    covers = tuple(tuple(Seal(f"m{m}-{i}", size, "d") for i, size in enumerate(mine)) for m, mine in enumerate(sizes))
    striping = Striping(covers, CHUNK)
    most = max(sum(-(-size // CHUNK) for size in mine) for mine in sizes)
    for keeper in range(len(sizes)):
        assert striping.num_bytes(keeper) <= -(-most // (len(sizes) - 1)) * CHUNK


def test_pieces_of_other_bytes_have_other_names() -> None:
    covers = ((Seal("a", 9, "x"),), (Seal("b", 9, "y"),), ())
    other = ((Seal("a", 9, "z"),), (Seal("b", 9, "y"),), ())
    names = {Piece(V, member, each).name for member in (0, 1, 2) for each in (covers, other)}
    assert len(names) == 6
    with_chunks = tuple(tuple(Seal(s.bundle_id, s.length, s.digest, ("c",)) for s in row) for row in covers)
    assert Piece(V, 0, with_chunks).name == Piece(V, 0, covers).name
    assert Piece(V, 0, with_chunks).brief == Piece(V, 0, covers)


# --- the choice


class Group:
    """Four nodes, each with two bundles of its own and its piece; node `i` is member `i`."""

    def __init__(self, size: int = 4) -> None:
        self.topology = topology_of(size, f"parity:{size}")
        self.table = tuple(
            BundleRef(f"b{node}-{part}", (node,), part, 2, 9, "f") for node in range(size) for part in range(2)
        )
        self.covers = tuple(
            tuple(Seal(ref.bundle_id, 9, f"d {ref.bundle_id}") for ref in self.table if ref.ranks == (node,))
            for node in range(size)
        )
        self.memory = [MemoryCopy.at(V, n, n, seal) for n, seals in enumerate(self.covers) for seal in seals]
        self.pieces = [PieceCopy.of(node, Piece(V, node, self.covers)) for node in range(size)]
        self.stored: dict[Version, Stored] = {}

    def lose(self, *nodes: int) -> None:
        self.memory = [copy for copy in self.memory if copy.without(nodes).nodes]
        self.pieces = [copy for copy in self.pieces if copy.node not in nodes]

    def store(self) -> None:
        seals = {seal.bundle_id: seal for seals in self.covers for seal in seals}
        self.stored[V] = Stored(V, len(self.covers), self.table, seals)

    def facts(self, quarantine: Quarantine = NOTHING_BAD) -> Facts:
        return Facts(
            self.memory,
            {V: self.table},
            self.stored,
            Lineage(),
            self.topology,
            quarantine=quarantine,
            parity=self.pieces,
        )

    def sources(self, facts: Facts) -> Mapping[str, Source]:
        choice = choose_version(facts).value
        assert isinstance(choice, Choice), choose_version(facts).reason
        return {ref.bundle_id: cheapest(ref, choice, ref.ranks[0], facts).source for ref in choice.bundles}


@pytest.mark.parametrize("lost", range(4))
def test_one_lost_node_is_made_of_parity(lost: int) -> None:
    group = Group()
    group.lose(lost)
    facts = group.facts()
    for name, source in group.sources(facts).items():
        assert source is (Source.PARITY if name.startswith(f"b{lost}") else Source.SLOT)
    choice = choose_version(facts).value
    assert isinstance(choice, Choice)
    fetch = cheapest(group.table[2 * lost], choice, lost, facts)
    assert fetch.parity == tuple(-1 if node == lost else node for node in range(4))
    assert fetch.node == REBUILT


def test_two_lost_nodes_are_refused_with_the_reason_and_come_from_storage() -> None:
    group = Group()
    group.lose(1, 3)
    decision = choose_version(group.facts())
    assert decision.value is None
    assert "2 of the 4 nodes of its parity group lack what they had" in decision.reason
    group.store()
    assert {name for name, source in group.sources(group.facts()).items() if source is Source.STORAGE} == {
        "b1-0", "b1-1", "b3-0", "b3-1",
    }  # fmt: skip


@pytest.mark.parametrize("what", ["piece", "image", "other image", "other piece"])
def test_one_thing_more_that_is_missing_or_different_makes_no_parity(what: str) -> None:
    group = Group()
    group.lose(0)
    if what == "piece":
        group.pieces = [copy for copy in group.pieces if copy.node != 2]
    elif what == "image":
        group.memory = [copy for copy in group.memory if copy.seal.bundle_id != "b2-1"]
    elif what == "other image":
        bad = MemoryCopy.at(V, 2, 2, Seal("b2-1", 9, "another digest"))
        group.memory = [bad if copy.seal.bundle_id == "b2-1" else copy for copy in group.memory]
    else:
        covers = (*group.covers[:3], (Seal("b3-0", 9, "another digest"), group.covers[3][1]))
        group.pieces = [PieceCopy.of(c.node, Piece(V, c.node, covers)) if c.node == 2 else c for c in group.pieces]
    assert choose_version(group.facts()).value is None


def test_a_piece_that_a_node_keeps_from_another_place_hides_no_whole_one() -> None:
    """Nodes changed places: one has an old piece of another member, whose images it no longer has."""
    group = Group()
    group.lose(0)
    group.pieces.append(PieceCopy.of(3, Piece(V, 2, group.covers)))
    choice = choose_version(group.facts()).value
    assert isinstance(choice, Choice)
    assert {made.nodes[2] for made in choice.rebuilt.values()} == {2}


def test_pieces_of_another_version_make_nothing() -> None:
    group = Group()
    group.lose(0)
    group.pieces = [PieceCopy.of(c.node, Piece(Version(1, 4), c.node, group.covers)) for c in group.pieces]
    assert choose_version(group.facts()).value is None


def test_a_bad_copy_of_a_living_node_is_made_anew_too() -> None:
    group = Group()
    facts = group.facts(Quarantine(frozenset({(V, "b1-0", 1)})))
    assert {name for name, source in group.sources(facts).items() if source is Source.PARITY} == {"b1-0"}


def test_parity_that_proved_bad_gives_way_to_storage() -> None:
    group = Group()
    group.lose(1)
    bad = Quarantine(frozenset({(V, "b1-0", REBUILT)}))
    assert choose_version(group.facts(bad)).value is None
    group.store()
    sources = group.sources(group.facts(bad))
    assert (sources["b1-0"], sources["b1-1"]) == (Source.STORAGE, Source.PARITY)


# --- the level


class Job:
    """One rank a node; every rank has a bundle of its own, and all share one."""

    def __init__(self, num_nodes: int, redundancy: str) -> None:
        self.topology = topology_of(num_nodes, redundancy)
        self.board = Board(self.topology)
        everyone = tuple(range(num_nodes))
        self.layouts = []
        for rank in everyone:
            refs = (BundleRef(f"own{rank}", (rank,), 0, 1, 9, "f"), BundleRef("shared", everyone, 0, 1, 9, "f"))
            self.layouts.append(RankLayout(rank, refs, tuple(ref.bundle_id for ref in refs)))
            self.board.register(self.layouts[-1])

    def capture(self, version: Version) -> list[Kind]:
        reports = [
            RankReport(
                version, layout.rank, layout.fingerprint, tuple(Seal(name, 9, name) for name in layout.captures), False
            )
            for layout in self.layouts
        ]
        return self.kinds(self.board.sealed(reports))

    def parity(self, version: Version, node: int) -> list[Kind]:
        return self.kinds(self.board.replicated(version, node, [parity_groups.STANDS]))

    @staticmethod
    def kinds(actions: object) -> list[Kind]:
        return [action.kind for action in actions if isinstance(action, Announcement)]  # type: ignore[attr-defined]


def test_a_version_is_replicated_when_every_piece_of_every_group_stands() -> None:
    job = Job(7, "parity:3")
    assert Kind.REPLICATED not in job.capture(V)
    for node in range(6):
        assert job.parity(V, node) == []
    assert job.parity(V, 6) == [Kind.REPLICATED]


def test_pieces_that_stand_before_the_version_is_captured_count_then() -> None:
    job = Job(3, "parity:3")
    for node in range(3):
        assert job.parity(V, node) == []
    assert job.capture(V) == [Kind.CAPTURED, Kind.REPLICATED]


@pytest.mark.parametrize("dropped", range(3))
def test_a_member_that_gives_its_copies_up_takes_the_level_back(dropped: int) -> None:
    job = Job(3, "parity:3")
    job.capture(V)
    for node in range(3):
        job.parity(V, node)
    assert Level.REPLICATED in job.board.reached(V)
    (told,) = job.board.dropped(dropped, V)
    assert isinstance(told, Announcement)
    assert told.lost
    assert Level.REPLICATED not in job.board.reached(V)


def test_a_keeper_that_is_gone_before_the_level_has_to_make_its_piece_again() -> None:
    job = Job(3, "parity:3")
    job.capture(V)
    job.parity(V, 0)
    job.board.left(0)
    assert job.parity(V, 1) == job.parity(V, 2) == []
    assert job.parity(V, 0) == [Kind.REPLICATED]


@pytest.mark.parametrize("redundancy", ["none", "parity:3", "replica"])
def test_nothing_is_called_replicated_because_of_what_nobody_made(redundancy: str) -> None:
    job = Job(3, redundancy)
    assert job.capture(V) == [Kind.CAPTURED]
    if redundancy != "parity:3":
        for node in range(3):
            assert job.parity(V, node) == [], "parity counts only where the job keeps it"


def test_twins_on_several_nodes_need_nothing_whatever_is_kept() -> None:
    for redundancy in ("none", "parity:3", "replica"):
        topology = topology_of(3, redundancy)
        board = Board(topology)
        ref = BundleRef("shared", (0, 1, 2), 0, 1, 9, "f")
        layouts = [RankLayout(rank, (ref,), ("shared",)) for rank in range(3)]
        for layout in layouts:
            board.register(layout)
        reports = [RankReport(V, lay.rank, lay.fingerprint, (Seal("shared", 9, "d"),), False) for lay in layouts]
        assert Kind.REPLICATED in Job.kinds(board.sealed(reports))
