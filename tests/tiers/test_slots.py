"""Slots: shared by descriptor, headers last, nothing torn is believed."""

from __future__ import annotations

import contextlib
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.base.errors import CorruptError, KeeperError, MemoryRefused
from holdfast.core.layout import bundles
from holdfast.core.model import BundleRef, Extent, Seal, Shard, Topology, Version
from holdfast.core.rank_runs import runs_of
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.memory import slots
from holdfast.tiers.memory.slots import ImagePlace, Slot, SlotHeader


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot.create(100_000, slot_id=1)
    yield made
    made.close()


def header(**changes: object) -> SlotHeader:
    ref = BundleRef("g0x1-00-0", (0,), 0, 1, 4096, "ff")
    values = {
        "job": "j", "rank": 0, "version": Version(1, 2), "layout": "l", "durable": True,
        "images": (ImagePlace(ref, 4096, Seal("g0x1-00-0", 5000, "d" * 32, ("c" * 32,))),),
    }  # fmt: skip
    return SlotHeader(**{**values, **changes})


def test_two_mappings_see_the_same_bytes(slot: Slot) -> None:
    other = Slot.adopt(os.dup(slot.fd))
    slot.view[10:15] = b"hello"

    assert bytes(other.view[10:15]) == b"hello"
    assert other.num_bytes == slot.num_bytes >= 100_000
    assert slot.num_bytes % slots.PAGE == 0
    other.close()


def test_every_page_is_there_and_mapped_before_the_first_byte_is_written(slot: Slot) -> None:
    assert os.fstat(slot.fd).st_blocks * 512 >= slot.total_bytes
    mapped = resident_kib(slot)
    assert mapped * 1024 >= slot.total_bytes


def test_writing_to_an_adopted_slot_costs_no_page_fault() -> None:
    made = Slot.create(64 << 20)
    slot = Slot.adopt(os.dup(made.fd))
    data = b"x" * slot.num_bytes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    slot.view[:] = data
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    slot.close()
    made.close()
    assert faults < 200, "of 16384 pages that were written"


def resident_kib(slot: Slot) -> int:
    inode = str(os.fstat(slot.fd).st_ino)
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            found = line.split()[4] == inode
        elif found and line.startswith("Rss:"):
            return int(line.split()[1])
    return 0


def test_memory_outlives_the_slot_object_that_made_it() -> None:
    first = Slot.create(4096)
    first.view[:3] = b"abc"
    second = Slot.adopt(os.dup(first.fd))
    first.close()

    assert bytes(second.view[:3]) == b"abc"
    second.close()


def test_a_header_is_read_back_and_gone_after_invalidation(slot: Slot) -> None:
    assert slots.read_header(slot) is None
    slots.write_header(slot, header())
    assert slots.read_header(slot) == header()

    slots.invalidate(slot)

    assert slots.read_header(slot) is None


def test_a_header_without_its_length_reads_as_empty(slot: Slot) -> None:
    slots.write_header(slot, header())
    length = bytes(slot.window(64, 8))
    slots.invalidate(slot)
    slots.write_header(slot, header(version=Version(1, 3)))
    slot.window(64, 8)[:] = bytes(8)  # killed before the last word

    assert slots.read_header(slot) is None
    assert struct.unpack("<Q", length)[0] > 0


def test_the_word_that_seals_a_header_is_written_after_all_the_rest(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    window = Slot.window

    def noted(self: Slot, start: int, length: int) -> memoryview:
        written.append(start)
        return window(self, start, length)

    monkeypatch.setattr(Slot, "window", noted)
    slots.write_header(slot, header())

    assert written.index(64) == len(written) - 1
    assert len(written) == 3


@pytest.mark.parametrize("at", [64, 72, 88, 100, 150])
def test_a_changed_byte_of_the_header_is_found(slot: Slot, at: int) -> None:
    slots.write_header(slot, header())
    slot.window(at, 1)[0] ^= 0x40

    with pytest.raises(CorruptError):
        slots.read_header(slot)


def test_an_image_outside_the_slot_is_refused(slot: Slot) -> None:
    place = header().images[0]
    bad = ImagePlace(place.ref, slot.num_bytes - 10, place.seal)
    slots.write_header(slot, header(images=(bad,)))

    with pytest.raises(CorruptError, match="outside"):
        slots.read_header(slot)


def test_a_header_that_does_not_fit_is_refused_and_the_slot_stays_empty(slot: Slot) -> None:
    with pytest.raises(KeeperError, match="needs"):
        slots.write_header(slot, header(layout="x" * 200_000))

    assert slots.read_header(slot) is None


def test_what_is_not_a_slot_is_refused() -> None:
    plain = os.memfd_create("x")
    os.write(plain, b"HFSLOT01" + struct.pack("<QQ", 1 << 40, 1 << 50))
    with pytest.raises(KeeperError):
        Slot.adopt(plain)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(plain)  # it took the descriptor over, also when it fails


def test_a_slot_can_be_neither_shrunk_nor_grown(slot: Slot) -> None:
    for size in (0, slot.total_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(slot.fd, size)


def test_a_read_only_view_cannot_change_the_slot(slot: Slot) -> None:
    slot.view[5000:5003] = b"abc"
    view = slots.map_readonly(slot.readonly_fd, slot.header_bytes + 5000, 3)

    assert bytes(view) == b"abc"
    assert view.readonly
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(slot.readonly_fd, b"x")


def test_closing_gives_everything_back() -> None:
    slot = Slot.create(1 << 20)
    memory = os.fstat(slot.readonly_fd).st_ino
    assert _descriptors_of(memory) >= 2
    slot.close()
    slot.close()
    assert _descriptors_of(memory) == 0


def _descriptors_of(memory: int) -> int:
    """How many descriptors of this process are of that memory file; threads of other tests may close theirs meanwhile."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            is_memory = os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:")
            found += is_memory and os.fstat(int(number)).st_ino == memory
    return found


def test_a_view_that_is_still_read_survives_closing() -> None:
    slot = Slot.create(4096)
    slot.view[:2] = b"ok"
    part = slot.view[:2]

    slot.close()

    assert bytes(part) == b"ok"


def test_a_slot_for_which_no_descriptor_is_left_is_refused_and_none_leaks() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    for allowed in range(2):  # one for the memory, one that its mapping keeps
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + allowed, hard))
        try:
            with pytest.raises(MemoryRefused, match="ulimit -n"):
                Slot.create(100_000)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("num_nodes", "per_node", "gib"), [(40, 8, 2), (64, 8, 10), (128, 8, 10), (512, 1, 1), (1024, 8, 4)]
)
def test_a_header_of_all_that_a_rank_of_a_large_job_brings_back_fits(num_nodes: int, per_node: int, gib: int) -> None:
    """A node that holds nothing fetches all shares of what its rank needs into one slot; a job of 320 ranks could not."""
    world, rows = num_nodes * per_node, (gib << 30) // 4096
    topology = Topology(
        tuple(f"n{node}" for node in range(num_nodes)), tuple(rank // per_node for rank in range(world))
    )
    shape = (rows, 1024)
    shard = Shard("model.w", "F32", shape, Extent((0, 0), shape), tuple(range(world)))
    planned = bundles.plan_bundles([shard], values_of=[tuple(range(world))], topology=topology)
    assert len(planned) >= min(world, 256)
    runs, places, offset = runs_of(tuple(range(world))), list[ImagePlace](), 0
    for bundle in planned:
        size = bundle.num_bytes + 4096
        print_of = bundles.fingerprint(bundle)
        ref = BundleRef(bundle.bundle_id, (), bundle.index, bundle.count, bundle.num_bytes, print_of, runs=runs)
        seal = Seal(bundle.bundle_id, size, "d" * 32, ("c" * 32,) * -(-size // CHUNK_BYTES))
        places.append(ImagePlace(ref, offset, seal))
        offset += -(-size // 4096) * 4096
    with contextlib.closing(Slot.promise(offset)) as slot:  # addresses, and no pages but the header's
        header = SlotHeader("0" * 16, 0, Version(1, 1), "", False, tuple(places))
        slots.write_header(slot, header)
        assert slots.read_header(slot) == header
        assert slot.header_bytes <= 0.002 * offset + slots.HEADER_BYTES
