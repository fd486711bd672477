"""What tests of several keepers ask of their nodes."""

from __future__ import annotations

from holdfast.core.model import Version
from holdfast.core.recovery.version_choice import Facts, Source, Stored, choose_version, fetches
from holdfast.core.versions.lineage import Lineage
from holdfast.keeper.rpc.client import Inventory
from keeper.rig import Rig, Trainer, image_of


def facts_of(rig: Rig, inventory: Inventory, *, with_storage: bool = False) -> Facts:
    stored = {}
    for version in rig.storage.versions() if with_storage else ():
        files = rig.storage.manifest(version).bundles
        seals = {file.ref.bundle_id: file.seal for file in files}
        stored[version] = Stored(version, rig.topology.world_size, tuple(f.ref for f in files), seals)
    return Facts(
        memory=inventory.copies,
        tables=inventory.tables,
        stored=stored,
        lineage=Lineage(rig.storage.incarnations.lineage()),
        topology=rig.topology,
        suspects=frozenset(version for version, _ in inventory.suspects),
        parity=inventory.parity,
    )


def restored(trainer: Trainer, facts: Facts) -> tuple[Version, dict[str, Source]]:
    """Obtains what the rank needs, checks every byte, and says where each bundle came from."""
    choice = choose_version(facts).value
    assert choice is not None
    plan = fetches(choice, trainer.rank, facts)
    located = trainer.client.obtain(choice.version, plan, timeout_s=10)
    expected = {bundle.bundle_id: image_of(bundle, choice.version.step) for bundle in trainer.bundles}
    assert {item.ref.bundle_id: bytes(item.view) for item in located} == expected
    return choice.version, {item.ref.bundle_id: item.source for item in located}


def reborn(rig: Rig, rank: int) -> Trainer:
    """A new process of the rank, joined to the present incarnation with its slots."""
    trainer = rig.trainer(rank)
    trainer.join(rig.assembly())
    return trainer
