"""What a node knows of its versions: bounded, without forgetting what people and rules ask for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.core.model import BundleRef, Level, RankLayout, Seal, Topology, Version
from holdfast.core.versions import coordinator_board
from holdfast.core.versions.coordinator_board import Announcement, Board, CommitOrder, Kind, PartReport, RankReport
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import MAX_BEGUN, NodeLedger
from holdfast.core.versions.slot_guard import SlotView


def test_the_newest_of_each_level_is_known_however_many_versions_came_since() -> None:
    """A version in storage each minute and a save in each second leave many versions between."""
    ledger = NodeLedger(node=0, topology=Topology(("a", "b"), (0, 1)), incarnation=1, lineage=Lineage())
    many = 3 * coordinator_board.MAX_VERSIONS
    safe = Version(1, 0)
    for kind in (Kind.CAPTURED, Kind.REPLICATED, Kind.DURABLE):
        ledger.told(Announcement(kind, safe, "told"))
    for step in range(1, many):
        ledger.told(Announcement(Kind.CAPTURED, Version(1, step), "told"))

    assert ledger.newest(Level.CAPTURED) == Version(1, many - 1)
    assert ledger.newest(Level.REPLICATED) == safe
    assert ledger.newest(Level.DURABLE) == safe
    known = [step for step in range(many) if ledger.standing(Version(1, step)).reached]
    assert len(known) <= coordinator_board.MAX_VERSIONS + 1, "it is bounded all the same"


def test_what_is_written_is_known_however_many_versions_came_since() -> None:
    """Storage of minutes and a save at each step: a version that is forgotten on its way there would never be durable."""
    slow, many = Version(1, 0), 3 * coordinator_board.MAX_VERSIONS
    bundle = BundleRef("own0", (0,), num_bytes=8)
    layout = RankLayout(0, (bundle,), ("own0",))
    topology = Topology(("a",), (0,))
    ledger, board = NodeLedger(node=0, topology=topology, incarnation=1, lineage=Lineage()), Board(topology)
    board.register(layout)
    ordered: list[Version] = []

    def save(step: int, *, durable: bool) -> None:
        version, seal = Version(1, step), Seal("own0", "0" * 16, 8)
        for action in board.sealed([RankReport(version, 0, layout.fingerprint, (seal,), durable)]):
            assert isinstance(action, Announcement)
            ledger.told(action)
            ordered.extend([version] if action.kind is Kind.PERSIST else [])

    save(0, durable=True)
    assert ordered == [slow]
    for step in range(1, many):
        save(step, durable=False)
    assert Level.CAPTURED in ledger.standing(slow).reached
    assert board.being_written() == (slow,)
    part = PartReport(slow, 0, "manifest-0.json", 8, "0" * 16, ("own0",), 0)
    assert [action.version for action in board.written(part) if isinstance(action, CommitOrder)] == [slow]

    for step in range(many, 2 * many):  # and what storage never takes is bounded
        save(step, durable=True)
    assert len(board.being_written()) <= coordinator_board.MAX_VERSIONS + coordinator_board.MAX_WRITTEN


def test_what_is_on_its_way_to_a_second_copy_is_known_however_many_versions_were_left_out() -> None:
    """A line of minutes and a step of a second: what is forgotten on its way there would never be called replicated."""
    slow, newer, many = Version(1, 0), Version(1, 1), 3 * coordinator_board.MAX_VERSIONS
    topology = Topology(("a", "b"), (0, 1))
    bundles = [BundleRef(f"own{rank}", (rank,), num_bytes=8) for rank in (0, 1)]
    layouts = [RankLayout(rank, (bundles[rank],), (f"own{rank}",)) for rank in (0, 1)]
    board = Board(topology)
    for layout in layouts:
        board.register(layout)
    for version in (slow, newer):
        for rank, layout in enumerate(layouts):
            seal = Seal(f"own{rank}", "0" * 16, 8)
            board.sealed([RankReport(version, rank, layout.fingerprint, (seal,), False)])
    for step in range(2, many):
        board.abandoned(Version(1, step), 0, "left out")
    board.replicated(slow, 1, ("own0",))
    told = board.replicated(slow, 0, ("own1",))
    assert [(news.kind, news.version) for news in told if isinstance(news, Announcement)] == [(Kind.REPLICATED, slow)]


@pytest.mark.parametrize(
    "size", [lambda n: n, lambda n: n // 3, lambda n: n if n % 3 else 0], ids=["grows", "grows at times", "is emptied"]
)
@pytest.mark.parametrize("hosts", [("a",), ("a", "b")], ids=["one rank", "two ranks"])
def test_a_version_whose_rank_registers_a_newer_layout_before_its_seal_is_captured(
    hosts: tuple[str, ...], size: Callable[[int], int]
) -> None:
    """A carried value that changes its size has many layouts, and a seal comes behind the next call of the script."""
    ranks, many = range(len(hosts)), 3 * coordinator_board.MAX_VERSIONS
    topology = Topology(hosts, tuple(ranks))
    board = Board(topology)
    ledgers = [NodeLedger(node=rank, topology=topology, incarnation=1, lineage=Lineage()) for rank in ranks]

    def begin(rank: int, step: int) -> None:
        if step == 0 or size(step) != size(step - 1):
            layout = RankLayout(rank, (BundleRef(f"own{rank}", (rank,), fingerprint=str(size(step))),), (f"own{rank}",))
            ledgers[rank].register(layout)
            board.register(layout)
            board.sealed(())  # as of every report
        assert ledgers[rank].begin(rank, Version(1, step), [SlotView(1)]).value == 1

    def seal(rank: int, step: int) -> None:
        reports = ledgers[rank].seal(rank, Version(1, step), [Seal(f"own{rank}", "0" * 16, 8)], durable=False)
        for layout in reports.layouts:
            board.register(layout)
        board.sealed(reports.sealed)

    for rank in ranks:
        ledgers[rank].resume(None)
        begin(rank, 0)
    for step in range(many):
        for rank in ranks:
            begin(rank, step + 1)
        for rank in ranks:
            seal(rank, step)
        assert Level.CAPTURED in board.reached(Version(1, step)), f"step {step}"


def test_layouts_of_saves_that_find_no_slot_are_bounded() -> None:
    """Storage may take minutes, and with each step a value grew meanwhile: the layout was registered before the slot was asked for."""
    topology = Topology(("a",), (0,))
    board, ledger = Board(topology), NodeLedger(node=0, topology=topology, incarnation=1, lineage=Lineage())
    for size in range(10 * coordinator_board.MAX_VERSIONS):
        layout = RankLayout(0, (BundleRef("own0", (0,), fingerprint=str(size)),), ("own0",))
        board.register(layout)
        board.sealed(())
        ledger.register(layout)
    assert ledger.reports().layouts[-1] == layout
    assert len(ledger.reports().layouts) <= MAX_BEGUN + 1
    assert len(board._layouts) <= 2 * coordinator_board.MAX_VERSIONS


def test_a_new_coordinator_is_told_no_seals_of_what_is_captured_and_concludes_the_same() -> None:
    """It was told the seals of 32 versions and the table of each: of a large job more than a message can hold."""
    topology = Topology(("a", "b"), (0, 1))
    table = tuple(BundleRef(f"own{rank}", (rank,), num_bytes=8) for rank in (0, 1))
    older, due, newest, pending = (Version(1, step) for step in range(4))
    ledgers = []
    for rank in (0, 1):
        ledger = NodeLedger(node=rank, topology=topology, incarnation=1, lineage=Lineage())
        ledger.register(RankLayout(rank, table[rank : rank + 1], (f"own{rank}",)))
        ledger.resume(None)
        ledger.tables.learn("L", table)
        for version in (older, due, newest, pending):
            assert ledger.begin(rank, version, [SlotView(0)]).value == 0
            ledger.seal(rank, version, [Seal(f"own{rank}", 8, "0" * 32)], durable=version == due)
            # The coordinator ended before node 0 heard of the older one, and of what is due.
            if version == newest or (version != pending and rank):
                ledger.told(Announcement(Kind.CAPTURED, version, "all sealed it", layout="L"))
        ledgers.append(ledger)
    ledgers[1].told(Announcement(Kind.PERSIST, due, "due"))
    told = [ledger.reports() for ledger in ledgers]

    assert [[bool(report.seals) for report in facts.sealed] for facts in told] == [
        [True, True, False, True],
        [False, False, False, True],
    ]
    assert [[(fact.version, bool(fact.table)) for fact in facts.heard] for facts in told] == [
        [(newest, True)],
        [(due, True), (newest, False)],
    ]
    for order in (told, told[::-1]):
        board = Board(topology)
        said = []
        for facts in order:
            for layout in facts.layouts:
                board.register(layout)
            said += [*board.heard(facts.heard), *board.sealed(facts.sealed)]
        news = [(one.kind, one.version) for one in said if isinstance(one, Announcement)]
        captured = [(Kind.CAPTURED, version) for version in (older, due, newest, pending)]
        assert sorted(news, key=str) == sorted([*captured, (Kind.PERSIST, due)], key=str)


def test_no_version_is_called_captured_of_which_a_bundle_was_never_sealed() -> None:
    """Only who knows it to be captured leaves seals out."""
    topology = Topology(("a",), (0,))
    board = Board(topology)
    layout = RankLayout(0, (BundleRef("own0", (0,), num_bytes=8),), ("own0",))
    board.register(layout)
    (said,) = board.sealed([RankReport(Version(1, 1), 0, layout.fingerprint, (), False)])
    assert isinstance(said, Announcement)
    assert (said.kind, said.reason) == (Kind.ABANDONED, "no rank sealed bundle own0")
