"""Capture: what lies in the slot is the image that the format defines, and copying it costs little more than a copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from holdfast.base.events import Events
from holdfast.checkpoint.capture import copy_plan
from holdfast.checkpoint.capture.copy_plan import Copies, SlotView, Split, Structure
from holdfast.checkpoint.capture.mutation_check import NUM_PROOFS, MutationHistory, differing, digest, same_bits
from holdfast.checkpoint.capture.optimizer_fence import Fence, LateCopyJob
from holdfast.checkpoint.entries.types import Gathered, LiveTensor, LiveTensors
from holdfast.checkpoint.restore import tensor_fill
from holdfast.checkpoint.save.save_completion import ImmediatePiece, SaveCompletion
from holdfast.core.model import Topology
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values as value_codec
from holdfast.tiers.memory.slots import Slot
from kit.live_tensors import live

ALONE = Topology(("n0",), (0,))


@contextmanager
def slot_of(num_bytes: int) -> Iterator[Slot]:
    slot = Slot.create(num_bytes)
    try:
        yield slot
    finally:
        slot.close()


def gathered(tensors: dict[str, torch.Tensor], *, ranks: tuple[int, ...] = (0,)) -> Gathered:
    rows = {name: live(name, tensor, ranks=ranks) for name, tensor in tensors.items()}
    return Gathered(rows, {ranks: {"lr": 0.5, "name": "x"}}, 1, 1)


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    wide = torch.randn(64, 96, dtype=torch.float64)
    return {
        "scalar": torch.tensor(3.5),
        "bool": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "transposed": wide.t(),
        "strided": wide[:, ::2],
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "complex": torch.randn(4, dtype=torch.complex64),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "long": torch.arange(300_000, dtype=torch.int64),
    }


def structure_of(state: Gathered, *, rank: int = 0, topology: Topology = ALONE) -> Structure:
    return Structure([row.shard for row in state.tensors.values()], state.values, rank=rank, topology=topology)


def save_into(slot: Slot, state: Gathered, *, rank: int = 0, topology: Topology = ALONE) -> SlotView:
    structure = structure_of(state, rank=rank, topology=topology)
    values = structure.encode(state)
    view = SlotView(slot, structure.plan(values))
    view.write_frames(values)
    now, _ = view.assign(state.tensors, Split(tuple(range(len(view.plan.parts))), ()))
    copy_plan.copy(now.targets, now.sources)
    return view


def test_images_hold_every_kind_of_tensor_bit_for_bit() -> None:
    tensors = odd_tensors()
    with slot_of(8 << 20) as slot:
        view = save_into(slot, gathered(tensors))
        found: dict[str, bytes] = {}
        for image in view.plan.images:
            memory = slot.view[image.start : image.start + image.plan.length]
            read = image_format.read_image(memory, "slot")
            for entry in read.entries:
                found[entry.name] = bytes(memory[entry.start : entry.end])
            assert read.values is not None
            assert value_codec.decode(bytes(memory[read.values.start : read.values.end])) == {"lr": 0.5, "name": "x"}
        assert found == {name: raw(tensor) for name, tensor in tensors.items()}
        del view, memory


def test_ranks_of_a_node_divide_their_twins_state_and_every_row_is_captured_once() -> None:
    topology = Topology(("a", "b"), (0, 0, 1, 1))
    tensors = {f"w{i}": torch.arange(i * 7, i * 7 + 900_000, dtype=torch.float32).view(900, 1000) for i in range(3)}
    everyone = (0, 1, 2, 3)
    for node in (0, 1):
        seen = {name: torch.zeros(900) for name in tensors}
        for rank in topology.ranks_on(node):
            with slot_of(16 << 20) as slot:
                view = save_into(slot, gathered(tensors, ranks=everyone), rank=rank, topology=topology)
                assert sum(p.piece.num_bytes for p in view.plan.parts) < 0.7 * sum(t.nbytes for t in tensors.values())
                for part, target in zip(view.plan.parts, view.targets, strict=True):
                    first, last = part.piece.start_row, part.piece.start_row + part.piece.num_rows
                    assert torch.equal(target, tensors[part.name][first:last])
                    seen[part.name][first:last] += 1
                del view, target
        assert all(bool((rows == 1).all()) for rows in seen.values())


def test_what_was_captured_fills_other_tensors_and_a_flipped_bit_is_named() -> None:
    tensors = odd_tensors()
    with slot_of(8 << 20) as slot:
        view = save_into(slot, gathered(tensors))
        sources = [located_in(slot, image) for image in view.plan.images]
        fresh = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        targets = {name: live(name, tensor) for name, tensor in fresh.items()}
        assert tensor_fill.fill(sources, targets) == {}
        assert {name: raw(tensor) for name, tensor in fresh.items()} == {n: raw(t) for n, t in tensors.items()}
        slot.view[view.plan.images[0].start + view.plan.images[0].plan.length - 2000] ^= 1
        faults = tensor_fill.fill(sources, targets)
        assert list(faults) == [view.plan.images[0].ref.bundle_id]
        assert "differs from its seal" in faults[view.plan.images[0].ref.bundle_id].what
        del view, sources


def test_a_fill_cuts_at_steps_and_chunks_and_names_the_bad_chunk() -> None:
    """Tensors that cross steps and chunks, one of them strided here; all are filled as one look finds the bad chunk."""
    torch.manual_seed(0)
    tensors = {f"w{i}": torch.randn(700_001 + i) for i in range(9)} | {"wide": torch.randn(600, 2000)}
    with slot_of(40 << 20) as slot:
        view = save_into(slot, gathered(tensors))
        sources = [located_in(slot, image) for image in view.plan.images]
        fresh = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        fresh["wide"] = torch.zeros(2000, 600).t()
        assert not fresh["wide"].is_contiguous()
        targets = {name: live(name, tensor) for name, tensor in fresh.items()}
        versions = {name: tensor._version for name, tensor in fresh.items()}
        assert tensor_fill.fill(sources, targets) == {}
        assert {name: raw(tensor) for name, tensor in fresh.items()} == {n: raw(t) for n, t in tensors.items()}
        assert all(tensor._version > versions[name] for name, tensor in fresh.items()), "autograd must notice"
        slot.view[view.plan.images[0].start + 2 * image_format.CHUNK_BYTES + 5_000_000] ^= 1
        (fault,) = tensor_fill.fill(sources, targets).values()
        assert "chunk 2 of image" in fault.what
        del view, sources


def test_present_chunks_are_proved_without_their_image_and_uncopied() -> None:
    """As in another layout, where a rank gets only those chunks that hold a box of its own."""
    with slot_of(40 << 20) as slot:
        view = save_into(slot, gathered({"w": torch.randn(5 << 20)}))
        (image,) = view.plan.images
        whole = located_in(slot, image)
        assert len(whole.chunks) == 3
        for index, chunk in whole.chunks:
            part = tensor_fill.Source(whole.located, whole.image, ((index, chunk),), whole=False)
            assert tensor_fill.fill_with([part], [[]]) == {}
            slot.view[image.start + index * image_format.CHUNK_BYTES + 5000] ^= 1
            (fault,) = tensor_fill.fill_with([part], [[]]).values()
            assert f"chunk {index} of image" in fault.what
        del view, whole, part, chunk


def test_pieces_of_rows_and_lazily_conjugated_memory_are_filled_as_values_not_as_bytes() -> None:
    rows, numbers = torch.randn(900, 1000), torch.randn(50, dtype=torch.complex64)
    target, other = torch.zeros(900, 1000), torch.zeros(50, dtype=torch.complex64)
    topology = Topology(("a",), (0, 0))
    targets = {"rows": live("rows", target, ranks=(0, 1)), "conj": live("conj", other.conj(), ranks=(0, 1))}
    for rank in (0, 1):  # each captured its part of the rows
        with slot_of(8 << 20) as slot:
            state = gathered({"rows": rows, "conj": numbers}, ranks=(0, 1))
            view = save_into(slot, state, rank=rank, topology=topology)
            sources = [located_in(slot, image) for image in view.plan.images]
            assert tensor_fill.fill(sources, targets) == {}
            del view, sources
    assert torch.equal(target, rows)
    assert torch.equal(other.conj(), numbers)


def located_in(slot: Slot, image: copy_plan.PlacedImage) -> tensor_fill.Source:
    from holdfast.core.recovery.version_choice import Source
    from holdfast.keeper.rpc.client import Located

    memory = slot.view[image.start : image.start + image.plan.length].toreadonly()
    seal = image_format.seal(image.ref.bundle_id, memory)
    return tensor_fill.read_sources([Located(image.ref, seal, memory, Source.SLOT, 0.0)])[0]


def test_a_large_tensor_is_cut_into_batches_that_make_up_the_whole() -> None:
    big = torch.arange(30 << 20, dtype=torch.float32)  # 120 MiB
    target = torch.zeros_like(big)
    batches = copy_plan.batches([target], [big])
    assert len(batches) == 4
    assert all(batch.num_bytes <= copy_plan.BATCH_BYTES for batch in batches)
    for batch in batches:
        copy_plan.copy(batch.targets, batch.sources)
    assert torch.equal(target, big)


def test_the_step_waits_for_the_copy_and_not_longer_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    events = Events()
    fence = Fence(timeout_s=0.3, events=events)
    fence.guard([optimizer])
    ends: list[str] = []
    first, second = torch.zeros(1000), torch.zeros(1000)

    def job() -> LateCopyJob:
        return LateCopyJob(
            [copy_plan.Batch([t], [parameter.detach()], t.nbytes) for t in (first, second)], None, ends.append
        )

    try:
        fence.start(job())
        optimizer.step()
        assert ends == [""]
        assert torch.equal(second, torch.ones(1000)), "the state before the step"
        assert torch.equal(parameter.detach(), torch.zeros(1000))

        gate = threading.Event()
        fast = copy_plan.copy
        monkeypatch.setattr(copy_plan, "copy", lambda *batch: (gate.wait(10.0), fast(*batch)))
        fence.start(job())
        started = time.monotonic()
        optimizer.step()
        assert 0.25 < time.monotonic() - started < 8.0
        assert events.counters()["fence_wait_seconds"] > 0.25, "it is reported"
        assert not fence.idle(0.01), "the copy still writes; nobody may have the slot"
        gate.set()
        assert fence.idle(5.0)
        assert "the step goes on" in ends[1]
        assert torch.equal(second, torch.ones(1000)), "a copy that was given up ends between two batches"
    finally:
        fence.close()
    assert not [t for t in threading.enumerate() if t.name == "holdfast-capture"]


def test_three_proofs_make_a_tensor_late_and_one_difference_never(caplog: pytest.LogCaptureFixture) -> None:
    trust = MutationHistory(overlap=True)
    tensors = {"good": live("good", torch.ones(4)), "bad": live("bad", torch.ones(4))}
    tensors["buffer"] = live("buffer", torch.ones(4), late=False)
    for _ in range(3):  # the promise, whatever the constant says
        assert trust.late(tensors) == set()
        assert trust.watched(tensors) == {"good", "bad"} or trust.watched(tensors) == {"good"}
        trust.judge({"good"}, {"bad"})
    assert trust.late(tensors) == {"good"}
    assert trust.watched(tensors) == set()
    assert [r.getMessage() for r in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "bad" in caplog.records[0].getMessage()
    trust.forget()
    assert trust.watched(tensors) == {"good"}
    assert MutationHistory(overlap=False).watched(tensors) == set()


def test_only_a_fence_before_a_step_proves_anything() -> None:
    """A read point waits for the copy as a step does; that nothing changed until then says nothing of the step's hooks."""
    trust, tensor = MutationHistory(overlap=True), torch.ones(4)
    tensors = {"w": live("w", tensor)}
    watched = [ImmediatePiece("w", tensor, tensor.clone())]
    ending = SaveCompletion(None, None, None, trust, lambda *_: None, watched)  # type: ignore[arg-type]
    for _ in range(NUM_PROOFS):
        ending.at_fence(False)
    assert trust.watched(tensors) == {"w"}
    for _ in range(NUM_PROOFS):
        ending.at_fence(True)
    assert trust.late(tensors) == {"w"}


def test_comparison_is_bitwise_on_any_layout() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    wide = torch.randn(5, 7)
    assert same_bits(wide.t(), wide.t().contiguous())
    other = wide.t().contiguous()
    other[3, 2] += 1
    assert differing([("same", wide, wide.clone()), ("other", wide.t(), other)]) == {"other"}
    assert digest(wide) == digest(wide.clone())
    assert digest(wide) != digest(wide + 1)


@pytest.mark.gpu
def test_copies_from_a_gpu_hold_the_state_at_the_call_whatever_the_stream_does_next(card: str) -> None:
    from holdfast.checkpoint.capture.side_stream_copy import SideStreams

    streams = SideStreams()
    source = torch.ones(8 << 20, device=card)
    with slot_of(source.nbytes) as slot:
        streams.pin(slot, source.device)
        target = torch.frombuffer(slot.view, dtype=torch.float32)[: source.numel()]
        for value in range(5):
            source.fill_(value)
            copy = streams.queue([target], [source])
            copy.hold_current_streams()
            source.fill_(-1)  # the next optimizer step
            copy.wait(lambda: False)
            assert bool((target == value).all())
        assert streams.unpin(20.0)
        del target


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_what_several_threads_copy_is_what_one_copies(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    monkeypatch.setattr(copy_plan, "SHARED_BYTES", 0)
    calls, copy = [], copy_plan.copy

    def counted(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        calls.append(threading.get_ident())
        copy(targets, sources)

    monkeypatch.setattr(copy_plan, "copy", counted)
    shapes = [(1000, 7), (3,), (), (0, 4), (50, 50), (17, 1, 5), (20_000,)]
    sources = [torch.randn(shape) for shape in shapes] + [torch.randn(300, 200).t(), torch.arange(9, dtype=torch.int8)]
    targets = [torch.full(source.shape, 77, dtype=source.dtype) for source in sources]
    copy_plan.copy_at_once(Copies.of(targets, sources, range(len(sources))), num_threads)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert (len(calls) > num_threads) is (num_threads > 1)


def test_a_copy_that_fails_in_another_thread_fails_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    came = threading.Event()

    def refuses(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if threading.current_thread() is not threading.main_thread():
            came.set()
            raise RuntimeError("no")
        assert came.wait(60.0)

    monkeypatch.setattr(copy_plan, "SHARED_BYTES", 0)
    monkeypatch.setattr(copy_plan, "copy", refuses)
    tensors = [torch.ones(100) for _ in range(8)]
    with pytest.raises(RuntimeError, match="no"):
        copy_plan.copy_at_once(Copies.of(tensors, [tensor.clone() for tensor in tensors], range(8)), 2)


@pytest.mark.parametrize("most", [64, 1000, 1 << 20])
def test_saves_deal_batches_once_and_copy_what_objects_made_anew(most: int) -> None:
    """States of random generators are other tensors at every save; here one is whole in its batch, one may be cut."""
    tensors = {
        name: torch.randn(count) for name, count in (("a", 40), ("b", 5), ("none", 0), ("rng", 9), ("large", 400))
    }
    with slot_of(1 << 20) as slot:
        view = save_into(slot, state := gathered(tensors))
        split = Split(tuple(range(len(view.plan.parts))), ())
        dealt = view.assign(state.tensors, split)[0].batches(most)
        for name in ("rng", "large", "a"):
            rows = {**state.tensors, name: live(name, torch.randn_like(tensors[name]))}
            state = Gathered(rows, state.values, 1, 1)
            now, _ = view.assign(rows, split)
            whole = tensors[name].nbytes <= most
            assert (now.batches(most) is dealt) is whole
            dealt = now.batches(most)
            assert sum(batch.num_bytes for batch in dealt) == now.num_bytes
            assert all(batch.num_bytes <= most for batch in dealt)
            assert sum(batch.num_bytes for batch in dealt) == sum(target.nbytes for target in now.targets)
            for target in now.targets:
                target.fill_(77)
            for batch in dealt:
                copy_plan.copy(batch.targets, batch.sources)
            for part, target in zip(view.plan.parts, view.targets, strict=True):
                assert torch.equal(target, rows[part.name].local), f"{part.name} after {name} was made anew"
        del view, now, dealt, batch, target


class Asked(dict[str, LiveTensor]):
    """Counts how often one of its tensors is looked up."""

    num_looks = 0

    def __getitem__(self, name: str) -> LiveTensor:
        self.num_looks += 1
        return super().__getitem__(name)


def test_what_lasts_is_looked_up_once_and_what_is_fresh_at_every_save() -> None:
    state = gathered({name: torch.randn(40) for name in ("a", "b", "rng")})
    rng = state.tensors["rng"]
    with slot_of(1 << 20) as slot:
        view = save_into(slot, state)
        split = Split(tuple(range(len(view.plan.parts))), ())

        def sources(view: SlotView, fresh: dict[str, LiveTensor], lasting: Asked) -> dict[str, torch.Tensor]:
            now, _ = view.assign(LiveTensors(lasting, fresh), split)
            return {part.name: now.sources[place] for place, part in enumerate(view.plan.parts)}

        lasting = Asked({name: state.tensors[name] for name in ("a", "b")})
        expected = {name: each.local for name, each in state.tensors.items()}
        for number in range(3):
            made = live("rng", torch.full((40,), float(number)))
            found = sources(view, {"rng": made}, lasting)
            assert all(found[name] is each for name, each in {**expected, "rng": made.local}.items())
        assert lasting.num_looks <= 2, "they were looked up again"
        copy = live("b", torch.zeros(40))
        assert sources(view, {"rng": rng, "b": copy}, lasting)["b"] is copy.local, "what is fresh comes first"
        assert sources(view, {"rng": rng}, lasting)["b"] is expected["b"]
        other = Asked({**lasting, "a": live("a", torch.ones(40))})
        assert sources(view, {"rng": rng}, other)["a"] is other["a"].local
        view.forget()
        assert sources(view, {"rng": rng}, lasting)["a"] is expected["a"]
        del view


def test_what_was_made_anew_while_another_slot_had_its_turn_is_copied_too() -> None:
    """Sources are found once for all slots: what changed at any save since a slot's last one is put in."""
    state = gathered({name: torch.randn(40) for name in ("a", "b", "c")})
    structure = structure_of(state)
    plan = structure.plan(structure.encode(state))
    split = Split(tuple(range(len(plan.parts))), ())
    with slot_of(1 << 20) as one, slot_of(1 << 20) as other:
        views = [SlotView(slot, plan) for slot in (one, other)]
        rows = dict(state.tensors)
        for number, name in enumerate(["", "a", "b", "b", "", "c", "a"]):
            if name:
                rows[name] = live(name, torch.full((40,), float(number)))
            for most in (64, 1 << 20):
                now, _ = views[number % 2].assign(rows, split)
                for batch in now.batches(most):
                    copy_plan.copy(batch.targets, batch.sources)
                for part, target in zip(plan.parts, views[number % 2].targets, strict=True):
                    assert torch.equal(target, rows[part.name].local), f"{part.name} at save {number}"
        del views, now, batch, target


def test_a_source_elsewhere_or_of_another_part_is_not_put_in() -> None:
    targets, sources = [torch.zeros(4) for _ in range(3)], [torch.ones(4) for _ in range(3)]
    copies = Copies.of(targets, sources, (0, 2))
    assert not copies.replace(1, targets[1], torch.zeros(4)), "not chosen"
    assert not copies.replace(0, targets[2], torch.zeros(4)), "another part's place"
    assert not copies.replace(0, targets[0], torch.zeros(4, device="meta")), "its source was in host memory"
    assert [source is mine for source, mine in zip(copies.sources, (sources[0], sources[2]), strict=True)] == [True] * 2
