"""What must hold of bundles, lineage, recovery and retention whatever the job looks like."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from holdfast.core.layout import bundles, replica_placement, reshard
from holdfast.core.layout.bundles import MIN_CUT_BYTES
from holdfast.core.model import (
    DTYPE_BYTES,
    Bundle,
    BundleRef,
    Extent,
    Piece,
    RankLayout,
    Seal,
    Shard,
    Topology,
    Version,
)
from holdfast.core.rank_runs import runs_of, spread
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import (
    Choice,
    ChoiceDeferred,
    Facts,
    MemoryCopy,
    Quarantine,
    Stored,
    Unreachable,
)
from holdfast.core.versions import retention
from holdfast.core.versions.lineage import Lineage

# The same cases in every run, twice as many with `--slow`; a failure is kept as a test of its own, not in a database.
NUM_CASES = settings().max_examples * 3 // 5
CASES = settings(
    max_examples=NUM_CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """Who runs where, and every rank's shards."""

    topology: Topology
    shards: dict[int, tuple[Shard, ...]]
    values_of: frozenset[Ranks]
    still: frozenset[str] = frozenset()

    @functools.cached_property
    def plans(self) -> dict[int, tuple[Bundle, ...]]:
        """What each rank plans from its own shards, without asking anybody."""
        return {
            rank: bundles.plan_bundles(
                own,
                values_of=[ranks for ranks in self.values_of if rank in ranks],
                topology=self.topology,
                still=self.still,
            )
            for rank, own in self.shards.items()
        }

    @functools.cached_property
    def layouts(self) -> dict[int, RankLayout]:
        return {rank: bundles.rank_layout(plan, rank, self.topology) for rank, plan in self.plans.items()}

    @property
    def groups(self) -> set[Ranks]:
        return {shard.ranks for own in self.shards.values() for shard in own} | self.values_of


def topologies(max_ranks: int = 12) -> st.SearchStrategy[Topology]:
    def build(homes: list[int]) -> Topology:
        order = list(dict.fromkeys(homes))
        return Topology(tuple(f"n{i}" for i in range(len(order))), tuple(order.index(home) for home in homes))

    return st.lists(st.integers(0, 4), min_size=1, max_size=max_ranks).map(build)


@st.composite
def shard_forms(draw: st.DrawFn, name: str, ranks: Ranks) -> Shard:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    lengths = draw(
        st.one_of(
            st.just(()),
            st.tuples(st.integers(0, 5)),
            st.tuples(st.integers(0, 300), st.sampled_from([0, 1, 7, 4096, 65_536])),
            st.tuples(st.integers(0, 2_000_000)),
            st.tuples(st.just(1), st.just(10_000_000)),
        )
    )
    offset = draw(st.integers(0, 100)) if lengths else 0
    offsets = (offset, *(0 for _ in lengths[1:])) if lengths else ()
    whole = (offset + lengths[0] + draw(st.integers(0, 9)), *lengths[1:]) if lengths else ()
    return Shard(name, dtype, whole, Extent(offsets, lengths), ranks)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    topology = draw(topologies())
    everyone = range(topology.world_size)
    groups = draw(st.lists(st.sets(st.sampled_from(everyone), min_size=1).map(sorted).map(tuple), max_size=4))
    groups += [(rank,) for rank in everyone if draw(st.booleans())]
    held: dict[int, list[Shard]] = {rank: [] for rank in everyone}
    for number, ranks in enumerate(groups):
        for index in range(draw(st.integers(0, 5))):
            shard = draw(shard_forms(f"t{number}.{index}", ranks))
            for rank in ranks:
                held[rank].append(shard)
    mixed = {rank: tuple(draw(st.permutations(own))) for rank, own in held.items()}
    values_of = frozenset(ranks for ranks in groups if draw(st.booleans()))
    return Job(topology, mixed, values_of)


@st.composite
def jobs_that_freeze(draw: st.DrawFn) -> Job:
    """Jobs in which some tensors may stay as they are: twins know the same of them."""
    job = draw(jobs())
    names = sorted({shard.name for own in job.shards.values() for shard in own})
    return replace(job, still=frozenset(name for name in names if draw(st.booleans())))


def shares(job: Job, ranks: Ranks) -> tuple[Bundle, ...]:
    """The bundles of one group, as its first member plans them."""
    return tuple(bundle for bundle in job.plans[ranks[0]] if bundle.ranks == ranks)


@CASES
@given(st.one_of(jobs(), jobs_that_freeze()))
def test_every_row_lies_in_exactly_one_piece(job: Job) -> None:
    for rank, own in job.shards.items():
        rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for bundle in job.plans[rank]:
            for piece in bundle.pieces:
                assert piece.shard.ranks == bundle.ranks
                rows[piece.shard.name].append((piece.start_row, piece.start_row + piece.num_rows))
        assert set(rows) == {shard.name for shard in own}
        for shard in own:
            position = 0
            for first, last in sorted(rows[shard.name]):
                assert first == position
                assert last > first or shard.extent.lengths[:1] == (0,)
                position = last
            assert position == (shard.extent.lengths[0] if shard.extent.lengths else 1)
            assert sum(p.num_bytes for b in job.plans[rank] for p in b.pieces if p.shard is shard) == shard.num_bytes


@CASES
@given(st.one_of(jobs(), jobs_that_freeze()))
def test_a_bundle_holds_a_name_once_and_is_not_empty(job: Job) -> None:
    for rank in job.shards:
        planned = job.plans[rank]
        assert len({bundle.bundle_id for bundle in planned}) == len(planned)
        for bundle in planned:
            names = [piece.shard.name for piece in bundle.pieces]
            assert len(set(names)) == len(names)
            assert bundle.pieces or bundle.has_values


@CASES
@given(jobs_that_freeze())
def test_what_may_stay_lies_apart_and_is_known_again(job: Job) -> None:
    for rank, own in job.shards.items():
        for bundle in job.plans[rank]:
            names = {piece.shard.name for piece in bundle.pieces}
            if bundles.kind_of(bundle.bundle_id):
                assert names <= job.still
                assert not bundle.has_values
                assert {name.partition(".")[0] for name in names} == {next(iter(names)).partition(".")[0]}
            else:  # what is left of them is too little
                left = [piece.shard for piece in bundle.pieces if piece.shard.name in job.still]
                assert sum(s.num_bytes for s in left if s.num_bytes >= bundles.MIN_STILL_TENSOR_BYTES) < sum(
                    (s.num_bytes for s in own), bundles.MIN_STILL_BYTES
                )
        refs = [ref for ref in job.layouts[rank].bundles if any(shard.ranks == ref.ranks for shard in own)]
        assert reshard.is_layout(refs, own, job.still)
        apart = any(bundles.kind_of(ref.bundle_id) for ref in refs)
        assert reshard.is_layout(refs, own) is not apart, "another layout for who takes nothing apart"


@CASES
@given(jobs())
def test_shares_are_equal_up_to_what_cannot_be_cut(job: Job) -> None:
    for ranks in job.groups:
        own = [shard for shard in job.shards[ranks[0]] if shard.ranks == ranks]
        total = sum(shard.num_bytes for shard in own)
        planned = shares(job, ranks)
        if not planned:
            continue
        count = planned[0].count
        assert 1 <= count <= len(ranks)
        unit = max((_unit(shard) for shard in own), default=0)
        sizes = [bundle.num_bytes for bundle in planned] + [0] * (count - len(planned))
        assert sum(sizes) == total
        assert all(abs(size - total / count) <= unit + 1 for size in sizes)


def _unit(shard: Shard) -> int:
    """Bytes that stay together: a row, or a tensor that is not cut."""
    rows = shard.extent.lengths[0] if shard.extent.lengths else 1
    return shard.num_bytes if shard.num_bytes < MIN_CUT_BYTES or rows < 2 else shard.num_bytes // rows


@CASES
@given(jobs())
def test_values_travel_in_the_first_share(job: Job) -> None:
    for ranks in job.groups:
        carriers = [bundle.index for bundle in shares(job, ranks) if bundle.has_values]
        assert carriers == ([0] if ranks in job.values_of else [])


@CASES
@given(jobs())
def test_within_a_node_each_bundle_is_copied_exactly_once(job: Job) -> None:
    copied: Counter[tuple[int, str]] = Counter()
    for rank in job.shards:
        copied.update((job.topology.node_of[rank], bundle_id) for bundle_id in job.layouts[rank].captures)
    expected = {(job.topology.node_of[rank], ref.bundle_id) for rank in job.shards for ref in job.layouts[rank].bundles}
    assert copied == Counter(expected)


@CASES
@given(jobs())
def test_all_members_of_a_group_plan_the_same(job: Job) -> None:
    seen: dict[str, BundleRef] = {}
    for rank in job.shards:
        layout = job.layouts[rank]
        assert all(rank in ref.ranks for ref in layout.bundles)
        for ref in layout.bundles:
            assert seen.setdefault(ref.bundle_id, ref) == ref
    backwards = dict(reversed(job.layouts.items()))
    assert bundles.layout_fingerprint(job.layouts) == bundles.layout_fingerprint(backwards)


@CASES
@given(jobs())
def test_a_replica_is_kept_of_what_lives_in_one_node_only(job: Job) -> None:
    table = {ref.bundle_id: ref for layout in job.layouts.values() for ref in layout.bundles}
    placed = replica_placement.place(table.values(), job.topology)
    for rank in job.shards:
        for ref in job.layouts[rank].bundles:
            homes = {job.topology.node_of[member] for member in ref.ranks}
            backup = placed.get(ref.bundle_id)
            if len(homes) == 1 and len(job.topology.nodes) > 1:
                assert backup is not None
                assert backup not in homes
            else:
                assert backup is None
            assert bundles.representative(ref) in ref.ranks


@CASES
@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 6), st.integers(1, 40))
def test_every_node_of_a_mesh_writes_about_the_same(nodes: int, per_node: int, shards_per_node: int, rows: int) -> None:
    """HSDP: each node holds all shards, its ranks one shard each; twins across nodes. And DDP: everybody holds all."""
    assume(per_node % shards_per_node == 0)
    world = nodes * per_node
    topology = Topology(tuple(f"n{i}" for i in range(nodes)), tuple(rank // per_node for rank in range(world)))
    written: Counter[int] = Counter()
    largest = 0
    for first in range(shards_per_node):
        ranks = tuple(range(first, world, shards_per_node))
        shard = Shard("w", "F32", (rows * shards_per_node, 65_536), Extent((0, 0), (rows, 65_536)), ranks)
        for bundle in bundles.plan_bundles([shard], values_of=(), topology=topology):
            written[topology.node_of[bundles.representative(bundle)]] += bundle.num_bytes
            largest = max(largest, bundle.num_bytes)
    sizes = [written[node] for node in range(nodes)]
    assert max(sizes) - min(sizes) <= 2 * largest


@CASES
@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 400))
def test_equal_nodes_that_hold_the_same_write_the_same(nodes: int, per_node: int, mib: int) -> None:
    """DDP over equal nodes: nobody writes a tenth more than the mean, however many pieces of 4 MiB there would be."""
    assume(mib >= 2 * nodes)
    world = nodes * per_node
    topology = Topology(tuple(f"n{i}" for i in range(nodes)), tuple(rank // per_node for rank in range(world)))
    ranks = tuple(range(world))
    shard = Shard("w", "F32", (mib * 1024, 256), Extent((0, 0), (mib * 1024, 256)), ranks)
    written: Counter[int] = Counter()
    for bundle in bundles.plan_bundles([shard], values_of=(), topology=topology):
        written[topology.node_of[bundles.representative(bundle)]] += bundle.num_bytes
    assert sum(written.values()) == mib << 20
    assert max(written.values()) <= 1.1 * (mib << 20) / nodes


# --- lineage


@st.composite
def histories(draw: st.DrawFn) -> tuple[Lineage, set[Version]]:
    """Incarnations that resume from versions that are alive at their time; and what is alive in the end."""
    living: set[Version] = set()
    resumed: dict[int, Version | None] = {}
    for incarnation in range(1, draw(st.integers(1, 5)) + 1):
        if draw(st.integers(0, 4)) == 0:
            continue  # it died before it trained
        start = draw(st.sampled_from([None, *sorted(living)])) if living else None
        resumed[incarnation] = start
        living = {version for version in living if start is not None and version <= start}
        first = start.step + 1 if start else 0
        living |= {Version(incarnation, step) for step in range(first, first + draw(st.integers(0, 4)))}
    return Lineage(resumed), living


@CASES
@given(histories(), st.integers(1, 5), st.integers(0, 20))
def test_alive_is_what_the_newest_incarnation_descends_from(
    history: tuple[Lineage, set[Version]], incarnation: int, step: int
) -> None:
    lineage, living = history
    assert all(lineage.is_live(version) for version in living)
    version = Version(incarnation, step)
    newest = max(lineage.resumed, default=0)
    if version not in living and incarnation < newest and lineage.is_live(version):
        # A step that its incarnation did not save, before the point where the line left it.
        assert any(other.incarnation == incarnation and other.step > step for other in living)


@CASES
@given(histories())
def test_a_record_is_written_once(history: tuple[Lineage, set[Version]]) -> None:
    lineage, _ = history
    for incarnation, start in lineage.resumed.items():
        other = Version(1, 99) if start is None else None
        assert lineage.with_(incarnation, other) == lineage


# --- recovery


@st.composite
def situations(draw: st.DrawFn) -> Facts:
    """A job that lost some of its memory and some of its storage."""
    topology = draw(topologies(max_ranks=5))
    everyone = range(topology.world_size)
    refs = [BundleRef(f"own{rank}", (rank,), 0, 1, 1, "f") for rank in everyone]
    refs.append(BundleRef("all", tuple(everyone), 0, 1, 1, "f"))
    lineage, _ = draw(histories())
    versions = draw(st.lists(st.builds(Version, st.integers(1, 5), st.integers(0, 8)), unique=True, max_size=5))
    memory: list[MemoryCopy] = []
    stored: dict[Version, Stored] = {}
    quarantine: set[tuple[Version, str, int | None]] = set()
    for version in versions:
        usual = st.sampled_from(["good"] * 9 + ["other"])
        for ref in refs:
            for rank in ref.ranks:
                node = topology.node_of[rank]
                if draw(st.integers(0, 7)):
                    holder = draw(st.sampled_from([rank, rank, None]))
                    memory.append(MemoryCopy.at(version, node, holder, Seal(ref.bundle_id, 1, draw(usual))))
                if not draw(st.integers(0, 9)):
                    quarantine.add((version, ref.bundle_id, draw(st.sampled_from([node, None]))))
        if draw(st.booleans()):
            seals = {ref.bundle_id: Seal(ref.bundle_id, 1, "good") for ref in refs}
            size = draw(st.sampled_from([topology.world_size] * 5 + [topology.world_size + 1]))
            stored[version] = Stored(version, size, tuple(refs), seals)
    tables = {version: tuple(refs) for version in versions if draw(st.integers(0, 5))}
    suspects = frozenset(version for version in versions if version not in stored and not draw(st.integers(0, 5)))
    bad = Quarantine(frozenset(quarantine), {v: "passed over" for v in versions if not draw(st.integers(0, 9))})
    return Facts(memory, tables, stored, lineage, topology, suspects, bad)


@CASES
@given(situations())
def test_what_is_chosen_can_be_loaded_by_every_rank(facts: Facts) -> None:
    decision = version_choice.choose_version(facts)
    assert decision.reason
    choice = decision.value
    if choice is None:
        return
    assert isinstance(choice, Choice), "everything answers, so nothing is waited for"
    assert facts.lineage.is_live(choice.version)
    assert choice.version not in facts.suspects | set(facts.quarantine.versions)
    assert {ref.bundle_id for ref in choice.bundles} == set(choice.seals) == set(choice.holders)
    for rank in range(facts.topology.world_size):
        fetches = version_choice.fetches(choice, rank, facts)
        assert {fetch.ref for fetch in fetches} == {ref for ref in choice.bundles if rank in ref.ranks}
        for fetch in fetches:
            at = (choice.version, fetch.ref.bundle_id, fetch.node)
            assert at not in facts.quarantine.copies
            assert fetch.seal == choice.seals[fetch.ref.bundle_id]
            if fetch.node is None:
                assert facts.stored[choice.version].seals[fetch.ref.bundle_id] == fetch.seal
            else:
                held = {(*spread(copy.nodes), copy.seal) for copy in facts.memory if copy.version == choice.version}
                assert (fetch.node, fetch.seal) in held
            assert (fetch.node == facts.topology.node_of[rank]) == (fetch.source <= version_choice.Source.NODE)


@CASES
@given(situations())
def test_the_newest_usable_version_is_chosen(facts: Facts) -> None:
    """Whatever is newer than the choice is refused even when the user asks for it by name, or is dead lineage."""
    choice = chosen(facts)
    candidates = {copy.version for copy in facts.memory} | set(facts.stored)
    for version in candidates:
        if choice is not None and version <= choice.version:
            continue
        usable = version_choice.choose_version(facts, wanted=version).value is not None
        assert not usable or not facts.lineage.is_live(version)


@CASES
@given(situations(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_answers(facts: Facts, dice: object) -> None:
    shuffled = list(facts.memory)
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    other = Facts(shuffled, facts.tables, facts.stored, facts.lineage, facts.topology, facts.suspects, facts.quarantine)
    first, second = chosen(facts), chosen(other)
    assert (first is None) == (second is None)
    if first and second:
        assert first.version == second.version
        assert first.seals == second.seals


@CASES
@given(situations())
def test_copies_that_are_told_together_decide_as_those_told_one_by_one(facts: Facts) -> None:
    """Keepers tell of twins' copies as runs of nodes."""
    groups: dict[tuple[Version, Seal, bool], list[MemoryCopy]] = {}
    for copy in facts.memory:
        groups.setdefault((copy.version, copy.seal, bool(copy.ranks)), []).append(copy)
    together = replace(
        facts,
        memory=[
            MemoryCopy(
                version,
                runs_of(sorted({node for copy in copies for node in spread(copy.nodes)})),
                runs_of(sorted({rank for copy in copies for rank in spread(copy.ranks)})),
                seal,
            )
            for (version, seal, _), copies in groups.items()
        ],
    )
    one_by_one, decided = version_choice.choose_version(facts), version_choice.choose_version(together)
    assert decided.reason == one_by_one.reason
    if isinstance(one_by_one.value, Choice):
        assert isinstance(decided.value, Choice)
        for rank in range(facts.topology.world_size):
            plan = version_choice.fetches(one_by_one.value, rank, facts)
            assert version_choice.fetches(decided.value, rank, together) == plan
    else:
        assert decided.value == one_by_one.value


@CASES
@given(situations(), st.data())
def test_what_cannot_be_reached_delays_the_choice_and_never_changes_it(facts: Facts, data: st.DataObject) -> None:
    """Whatever of the same job does not answer: the same version is chosen, or it is waited for."""
    facts = replace(facts, memory=[replace(copy, seal=replace(copy.seal, digest="good")) for copy in facts.memory])
    everything = version_choice.choose_version(facts).value
    unread = data.draw(st.sets(st.sampled_from(sorted(facts.stored)))) if facts.stored else set()
    known = {(copy.version, copy.seal.bundle_id, *spread(copy.nodes)) for copy in facts.memory}
    known |= {(version, name, None) for version, stored in facts.stored.items() for name in stored.seals}
    away = data.draw(st.sets(st.sampled_from(sorted(known, key=str)))) if known else set()
    silent = data.draw(st.sets(st.integers(0, len(facts.topology.nodes) - 1)))
    partial = replace(
        facts,
        memory=[copy for copy in facts.memory if not silent.intersection(spread(copy.nodes))],
        stored={version: stored for version, stored in facts.stored.items() if version not in unread},
        unreachable=Unreachable(
            dict.fromkeys(unread, "refuses"),
            dict.fromkeys(away, "refuses"),
            tuple(facts.topology.nodes[node] for node in sorted(silent)),
        ),
    )
    found = version_choice.choose_version(partial).value
    if isinstance(found, ChoiceDeferred):
        assert unread or away or silent
        assert not found.durable or found.version in facts.stored
    else:
        assert (found.version if found else None) == (everything.version if everything else None)
        assert not silent


def chosen(facts: Facts) -> Choice | None:
    found = version_choice.choose_version(facts).value
    assert not isinstance(found, ChoiceDeferred), "everything answers"
    return found


# --- retention


@CASES
@given(histories(), st.integers(0, 4), st.integers(0, 4), st.data())
def test_retention_never_removes_what_must_stay(
    history: tuple[Lineage, set[Version]], keep_last: int, keep_every: int, data: st.DataObject
) -> None:
    lineage, living = history
    dead = {Version(v.incarnation, v.step + 50) for v in living if v.incarnation < max(lineage.resumed, default=0)}
    durable = data.draw(st.lists(st.sampled_from(sorted(living | dead)), unique=True)) if living else []
    pinned = data.draw(st.lists(st.sampled_from(durable), unique=True)) if durable else []
    kept = {"keep_last": keep_last, "keep_every": keep_every}
    gone = retention.to_retire(durable, **kept, protected=pinned, lineage=lineage)
    assert list(gone) == sorted(set(gone) & set(durable))
    assert not set(gone) & set(pinned)
    alive = sorted(version for version in durable if lineage.is_live(version))
    assert not set(gone) & set(alive[-2:])
    assert not set(gone) & set(sorted(durable)[-max(2, keep_last) :])
    numbers = sorted(lineage.resumed)
    for before, number in zip([0, *numbers], [*numbers, 99], strict=True):
        past = Lineage({n: start for n, start in lineage.resumed.items() if n <= before})
        line = sorted(v for v in durable if v.incarnation < number and past.is_live(v))
        if number == 99 or lineage.resumed[number] is None:  # the living run, and those that a fresh start ended
            assert not set(gone) & set(line[-max(2, keep_last) :])
        if keep_every:
            buckets = [(version.step + 1) // keep_every for version in line]
            assert not set(gone) & {version for at, version in enumerate(line) if buckets[at] not in buckets[:at]}
    left = [version for version in durable if version not in gone]
    assert retention.to_retire(left, **kept, protected=pinned, lineage=lineage) == ()
    firm = retention.rests_on(gone, durable, **kept, lineage=lineage)
    assert not firm & set(gone)
    others = sorted(set(left) - firm)
    missing = data.draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    there = [version for version in durable if version not in missing]
    assert retention.to_retire(there, **kept, protected=pinned, lineage=lineage) == gone, "whatever else is not there"


def test_a_fingerprint_tells_everything_apart_that_a_tensor_is() -> None:
    """But not its content: two layouts of one fingerprint are read into each other without a look."""
    shard = Shard("w", "F32", (4, 8), Extent((0, 0), (2, 8)), (0,))
    others = [
        replace(shard, name="v"),
        replace(shard, dtype="BF16"),
        replace(shard, global_shape=(8, 8)),
        replace(shard, extent=Extent((2, 0), (2, 8))),
        replace(shard, extent=Extent((0, 0), (2, 4))),
    ]
    made = [Bundle("b", (0,), 0, 1, (Piece(one, 0, 2),), has_values=False) for one in (shard, *others, replace(shard))]
    told = [bundles.fingerprint(one) for one in made]
    assert len(set(told)) == len(others) + 1
    assert told[-1] == told[0]
