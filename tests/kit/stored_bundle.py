"""A bundle in a directory, and tensors to load it into."""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast.base.errors import HoldfastError
from holdfast.base.events import Events
from holdfast.checkpoint.restore import tensor_fill
from holdfast.core.model import Version
from holdfast.core.recovery.version_choice import Source
from holdfast.keeper.rpc.client import Located
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.manifest import BundleFile
from holdfast.tiers.storage.unread_chunks import open_bundle
from holdfast.tiers.storage.version_store import open_storage
from kit.live_tensors import live
from tiers.samples import STAMP, bundle, piece, random_image, ref_of

V1 = Version(1, 10)
ROWS = {"a": (1 << 20, 3), "b": (700, 1000), "wide": (2000, 600), "c": (5 << 20,), "tiny": (3,)}


class Stored:
    """A bundle of some chunks in a directory, and tensors to load it into, one of them strided."""

    def __init__(self, path: Path, key: str = "") -> None:
        self.storage = open_storage(path / "job", Events(), encryption=KeySource(key))
        self.storage.claim()
        whole = bundle("g-1", *(piece(name, "F32", shape) for name, shape in ROWS.items()), has_values=True)
        self.bytes = random_image(whole, seed=3, stored_values={"lr": 0.5})
        self.seal = image_format.seal("g-1", self.bytes)
        ref = ref_of(whole)
        self.file: BundleFile = self.storage.bundles.write(V1, ref, self.seal, memoryview(self.bytes), stamp=STAMP)
        self.path = path / "job" / str(V1) / self.file.file
        self.tensors = {name: torch.zeros(shape) for name, shape in ROWS.items()}
        self.tensors["wide"] = torch.zeros(600, 2000).t()

    @property
    def num_chunks(self) -> int:
        return len(self.seal.chunk_digests)

    def open(self) -> tensor_fill.Source:
        view, unread = open_bundle(self.storage.bundles, V1, self.file)
        assert unread is not None
        located = Located(self.file.ref, self.file.seal, view, Source.STORAGE, 0.0, None, unread)
        return tensor_fill.read_sources([located])[0]

    def fill(self, source: tensor_fill.Source, **options: float) -> dict[str, HoldfastError]:
        return tensor_fill.fill(
            [source], {name: live(name, tensor) for name, tensor in self.tensors.items()}, **options
        )

    def expected(self) -> dict[str, torch.Tensor]:
        entries = image_format.read_image(memoryview(self.bytes), "here").entries
        return {
            entry.name: torch.frombuffer(self.bytes, dtype=torch.float32, count=(entry.end - entry.start) // 4,
                                         offset=entry.start).view(entry.shape)
            for entry in entries
        }  # fmt: skip

    def is_filled(self) -> bool:
        return all(raw(self.tensors[name]) == raw(found) for name, found in self.expected().items())


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
