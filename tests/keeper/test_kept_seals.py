"""Images that a trainer did not copy again keep their seals, as far as the keeper can answer for it. Real keepers, trainers without torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.base.errors import LevelNotReached
from holdfast.core.model import Level, Version
from holdfast.keeper.rpc.client import Begun, ImageSpan, Slot
from holdfast.testing.faults.rig import Trainer
from keeper.rig import Rig, image_of, reached

MakeRig = Callable[..., Rig]
OWN_BYTES = 256 << 10


class Saves:
    """Saves of all ranks of a rig in which each one's own bundle stays as it is, and what the keepers said of the slots."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.trainers = rig.start()
        self.said: list[Begun] = []

    @staticmethod
    def own(trainer: Trainer) -> str:
        return next(bundle.bundle_id for bundle in trainer.mine if len(bundle.ranks) == 1)

    def begin(self, trainer: Trainer, step: int) -> Slot:
        version = trainer.version(step)
        return trainer.client.begin(version, trainer.num_bytes, durable=False, timeout_s=1.0, told=self.said.append)

    def there(self, trainer: Trainer) -> bool:
        return self.own(trainer) in [image.bundle_id for image in self.said[-1].there]

    def write(self, trainer: Trainer, slot: Slot, step: int, *, keeps: bool) -> list[ImageSpan]:
        """Copies the step's images; the own one, which is that of step 0, only if it is not kept."""
        before = bytes(slot.view)
        spans = trainer.write(slot, step)
        for span in spans:
            if span.ref.bundle_id == self.own(trainer):
                bundle = next(bundle for bundle in trainer.mine if bundle.bundle_id == span.ref.bundle_id)
                place = slice(span.offset, span.offset + span.length)
                slot.view[place] = before[place] if keeps else image_of(bundle, 0)
        return spans

    def save(self, step: int) -> list[bool]:
        """Saves a step; returns which ranks kept theirs."""
        kept = []
        for trainer in self.trainers:
            slot = self.begin(trainer, step)
            kept.append(self.there(trainer))
            spans = self.write(trainer, slot, step, keeps=kept[-1])
            trainer.client.copied(trainer.version(step), spans, kept=[self.own(trainer)] if kept[-1] else [])
        return kept

    def version(self, step: int) -> Version:
        return self.trainers[0].version(step)

    def counters(self, node: int) -> dict[str, float]:
        found: dict[str, float] = self.rig.status(node)["counters"]
        return found


def test_two_nodes_hash_and_send_what_changed_alone(make_rig: MakeRig) -> None:
    saves = Saves(make_rig(num_nodes=2, own_bytes=OWN_BYTES))
    sums = []
    for step in range(1, 6):
        assert saves.save(step) == [step > 2] * 2
        reached(saves.trainers, saves.version(step), Level.REPLICATED)
        assert saves.said[-1].version == (saves.version(step - 2) if step > 2 else None)
        counted = saves.counters(1)
        sums.append([counted.get(name, 0) for name in ("hashed_bytes", "hash_kept_bytes", "replicated_bytes")])
    own = sums[-1][2]
    assert own >= OWN_BYTES
    changes = [[now - then for now, then in zip(*pair, strict=True)] for pair in zip(sums[1:], sums, strict=False)]
    assert [kept for _, kept, _ in changes] == [0, own, own, own]
    assert [sent for _, _, sent in changes] == [0] * 4
    assert len({hashed for hashed, _, _ in changes[1:]}) == 1
    assert changes[0][0] == changes[1][0] + own


def abandoned(saves: Saves, step: int, reason: str) -> None:
    with pytest.raises(LevelNotReached, match=reason):
        saves.trainers[0].client.announced.wait(saves.version(step), Level.CAPTURED, 30)
    assert any(reason in alarm["text"] for alarm in saves.rig.status(0)["alarms"])


def test_what_was_written_although_it_was_to_be_kept_is_found(make_rig: MakeRig) -> None:
    """The bug itself: the seal of what stood there is used for what was written over it."""
    saves = Saves(make_rig(num_nodes=1, own_bytes=OWN_BYTES))
    (trainer,) = saves.trainers
    for step in (1, 2):
        saves.save(step)
        reached(saves.trainers, saves.version(step), Level.CAPTURED)
    slot = saves.begin(trainer, 3)
    spans = saves.write(trainer, slot, 3, keeps=True)
    own = next(span for span in spans if span.ref.bundle_id == saves.own(trainer))
    slot.view[own.offset + own.length - 1] ^= 1
    trainer.client.copied(trainer.version(3), spans, kept=[saves.own(trainer)])
    abandoned(saves, 3, "has changed in memory")
    assert saves.save(4) == [False], "nothing of that slot stands"
    reached(saves.trainers, saves.version(4), Level.CAPTURED)
    assert saves.save(5) == [True]
    reached(saves.trainers, saves.version(5), Level.CAPTURED)


def test_what_does_not_stand_there_cannot_be_kept(make_rig: MakeRig) -> None:
    saves = Saves(make_rig(num_nodes=1, own_bytes=OWN_BYTES))
    (trainer,) = saves.trainers
    slot = saves.begin(trainer, 1)
    assert not saves.said[-1].there
    trainer.client.copied(trainer.version(1), saves.write(trainer, slot, 1, keeps=False), kept=[saves.own(trainer)])
    abandoned(saves, 1, "was not copied, and does not stand there")


def test_of_a_version_that_was_given_up_nothing_stands(make_rig: MakeRig) -> None:
    saves = Saves(make_rig(num_nodes=1, own_bytes=OWN_BYTES))
    (trainer,) = saves.trainers
    for step in (1, 2):
        saves.save(step)
        reached(saves.trainers, saves.version(step), Level.CAPTURED)
    saves.begin(trainer, 3)
    assert saves.there(trainer)
    trainer.client.abandon(trainer.version(3), "half-way")
    saves.begin(trainer, 4)
    assert not saves.said[-1].there
    assert saves.said[-1].version is None
