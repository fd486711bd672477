"""Sources of a reader's versions: storage alone, or the whole job's memory and storage. See `reader.py`.

Both choose a version, tell what it holds, and fill boxes of its tensors with bytes that were proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from holdfast.adapters.dcp.dcp_job import DcpJob
from holdfast.adapters.dcp.items import MAPPING
from holdfast.base.config import Config
from holdfast.base.errors import CorruptError, VersionNotFound
from holdfast.base.events import Events
from holdfast.checkpoint.entries.types import LiveTensor, torch_dtype
from holdfast.checkpoint.job.bootstrap import RestoreRequest
from holdfast.checkpoint.restore.catalog import BundleHeader, Catalogue, Place
from holdfast.checkpoint.restore.restorer import Restorer
from holdfast.checkpoint.state.training_state import State
from holdfast.core.layout import reshard
from holdfast.core.model import Extent, Version
from holdfast.core.recovery.version_choice import Choice
from holdfast.tiers.format import values as value_codec
from holdfast.tiers.format.values import TensorRef
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.manifest import BundleFile
from holdfast.tiers.storage.version_store import open_storage

# A tensor to fill, and where its pieces are.
Wanted: TypeAlias = tuple[LiveTensor, Sequence[Place]]


class SingleProcessSource:
    """Storage only, for this process."""

    def __init__(self, root: str, config: Config) -> None:
        self._storage = open_storage(root, Events(), encryption=KeySource.of(config))
        self._version: Version | None = None
        self._files: dict[str, BundleFile] = {}

    def choose(self, given: Version | None, step: int | None) -> Version | None:
        """The version to read; None if there is none.

        Raises:
            VersionNotFound: the one that is wanted is not there.
        """
        there = self._storage.versions()
        fit = [v for v in there if (given is None or v == given) and (step is None or v.step == step)]
        if not fit and (given is not None or step is not None):
            wanted = given if given is not None else f"step {step}"
            raise VersionNotFound(
                f"there is no {wanted}; there are {', '.join(map(str, there[-5:])) or 'none'}",
                where=self._storage.where,
                remedy="older versions are removed by retention (keep_last, keep_every); pin() keeps one",
            )
        self._version = max(fit, default=None)
        return self._version

    def catalogue(self) -> Catalogue:
        """Return what the chosen version holds.

        Raises:
            HoldfastError: its manifest or a header cannot be read.
        """
        assert self._version is not None
        manifest = self._storage.manifest(self._version)
        self._files = {file.ref.bundle_id: file for file in manifest.bundles}
        heads = [self._head(self._version, file) for file in manifest.bundles]
        return Catalogue(heads, world_size=manifest.world_size, random=())

    def _head(self, version: Version, file: BundleFile) -> BundleHeader:
        image = self._storage.bundles.image(version, file)
        raw = self._storage.bundles.read_entry(version, file, image.values) if image.values is not None else b""
        values = value_codec.decode(raw, where=file.file) if raw else {}
        return BundleHeader(file.ref, file.seal, image, values)

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fills the tensors; an entry that is needed by several is read once per neighbour.

        Raises:
            CorruptError: bytes are missing or damaged.
        """
        assert self._version is not None
        last: tuple[Place | None, torch.Tensor] = (None, torch.empty(0, device="cpu"))
        for live, places in wanted:
            parts = reshard.cover(live.shard.extent, [place.entry.extent for place in places])
            if parts is None:
                raise CorruptError("parts of the tensor are missing", where=live.shard.name)
            for part in parts:
                place = places[part.piece]
                if place != last[0]:
                    last = (place, self._entry(place))
                _copy_box(live, part.box, place, last[1])

    def _entry(self, place: Place) -> torch.Tensor:
        assert self._version is not None
        raw = bytearray(self._storage.bundles.read_entry(self._version, self._files[place.bundle_id], place.entry))
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
        return flat.view(torch_dtype(place.entry.dtype)).view(place.entry.shape)

    def loaded(self) -> Version | None:
        """Return what was read."""
        return self._version


class JobSource:
    """All ranks of a job: memory first, storage read once."""

    def __init__(self, job: DcpJob) -> None:
        self._job = job
        self._restorer = Restorer(
            job.job,
            job.link.require(),
            state=State({}, rank=job.group.rank, world_size=job.group.world_size),
            storage=job.storage,
            asked=RestoreRequest(),
            timeout_s=job.config.close_timeout_s,
        )
        self._wanted: Version | None = None
        self._choice: Choice | None = None
        self._catalogue: Catalogue | None = None

    def choose(self, given: Version | None, step: int | None) -> Version | None:
        """The version to read; None if there is none. Collective.

        Raises:
            HoldfastError: versions exist, and none can be used, or not the wanted one.
        """
        self._restorer.decisions.look_again()
        wanted = given
        if wanted is None and step is None:
            wanted = self._job.wished()
        if wanted is None and step is not None:
            found = self._restorer.decisions.versions_of(step)
            if not found:
                raise VersionNotFound(
                    f"there is no step {step}",
                    where=self._job.storage.where,
                    remedy="older versions are removed by retention (keep_last, keep_every); pin() keeps one",
                )
            wanted = max(found)
        self._wanted = wanted
        self._choice = self._restorer.choose(wanted)
        return None if self._choice is None else self._choice.version

    def catalogue(self) -> Catalogue:
        """Return what the chosen version holds, told to all by ranks that have it near. Collective.

        If no good copy of its headers is left, and nobody asked for just this version, an older one is chosen.

        Raises:
            CorruptError: no good copy is left.
        """
        while self._choice is not None:
            found = self._restorer.reading(self._choice).catalogue(self._choice)
            if found is not None:
                self._catalogue = found
                return found
            self._choice = self._restorer.choose(
                self._wanted
            )  # another copy each time, until an error says that none is left
        raise CorruptError("no version can be read", where=self._job.storage.where)

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fills the tensors from the nearest good copies. Collective.

        Raises:
            HoldfastError: no good copy is left, or what is left cannot be reached.
        """
        while True:
            assert self._choice is not None
            assert self._catalogue is not None
            try:
                if self._restorer.reading(self._choice).take(self._choice, self._catalogue, wanted):
                    return
            finally:
                self._job.link.require().release()
            # The same version from other copies: what was told of it must stay true.
            self._choice = self._restorer.choose(self._choice.version)

    @property
    def chosen(self) -> Version:
        """The version that was chosen last."""
        assert self._choice is not None
        return self._choice.version

    def loaded(self) -> Version | None:
        """Return what was read; the next versions come from it. Collective."""
        assert self._choice is not None
        self._job.came_from(self._choice.version, self._choice.bundles)
        return self._choice.version


def _copy_box(live: LiveTensor, box: Extent, place: Place, entry: torch.Tensor) -> None:
    """The elements of `box`, out of an entry into the tensor that wants them."""
    into, out_of = live.local, entry
    for dim, (first, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        into = into.narrow(dim, first - live.shard.extent.offsets[dim], length)
        out_of = out_of.narrow(dim, first - place.entry.extent.offsets[dim], length)
    with torch.no_grad():
        into.copy_(out_of)


def values_of(catalogue: Catalogue) -> dict[str, Any]:
    """The values of a version by name, without those that a rank or the writer keeps for itself."""
    found: dict[str, Any] = {}
    for head in catalogue.heads.values():
        for name, tree in head.values.items():
            if not name.endswith(f"/{MAPPING}") and type(tree) is not TensorRef:  # another name of a tied tensor
                found.setdefault(name, tree)
    return found
