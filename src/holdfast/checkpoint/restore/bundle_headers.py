"""Reads what a version says of itself: headers and values of all its bundles, read once by the job and told to every
rank.

Each head is read by one rank: of a node that holds the bundle, or, if only storage has it, by whoever's turn it is. The
chunks in which a head lies are proved before a word of it is believed; those that came from storage need not be read
again for the tensors in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from holdfast.base.errors import CorruptError
from holdfast.checkpoint.job.collectives import Ranks
from holdfast.checkpoint.restore.catalog import BundleHeader, Catalogue
from holdfast.checkpoint.restore.fetcher import Fault, Fetcher, Loaded, by_bundle, chunks_of, fetch_of, prove_seal
from holdfast.core.layout import reshard
from holdfast.core.layout.reshard import Runs
from holdfast.core.model import BundleRef
from holdfast.core.rank_runs import spread
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import Choice, Facts, Source
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values as value_codec
from holdfast.tiers.format.image import CHUNK_BYTES, Image

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[str, bytes, bytes]])


class BundleHeaders:
    """The heads of one version, for one attempt.

    Args:
        fetcher: brings chunks to this node.
        facts: what every rank knows of the job and of bad copies.
        choice: the version, and where its bundles are.
    """

    def __init__(self, group: Ranks, fetcher: Fetcher, facts: Facts, choice: Choice) -> None:
        self._group = group
        self._fetcher = fetcher
        self._facts = facts
        self._choice = choice
        self._readers = self._deal()

    def read(self, loaded: Loaded) -> bytes:
        """Return what this rank has to tell all of them; bad copies are noted in `loaded`."""
        mine = [ref for ref, rank in self._readers.items() if rank == self._group.rank]
        return _encoder.encode(self._read(mine, loaded))

    def understand(self, told: Iterable[bytes]) -> list[BundleHeader]:
        """The heads of all bundles, from what every rank told.

        Raises:
            CorruptError: not a header, or not values, although the bytes are those that were saved.
        """
        refs = {ref.bundle_id: ref for ref in self._choice.bundles}
        rows = (row for data in told for row in _decoder.decode(data))
        return [self._head(refs[name], header, raw) for name, header, raw in rows]

    def read_before(self, catalogue: Catalogue) -> dict[str, dict[int, int]]:
        """Chunks of headers and values that came from storage, and who read them: bundle -> chunk -> rank."""
        found: dict[str, dict[int, int]] = {}
        for ref, rank in self._readers.items():
            if version_choice.cheapest(ref, self._choice, rank, self._facts).source is not Source.STORAGE:
                continue
            image = catalogue.heads[ref.bundle_id].image
            spans = [(0, _header_bytes(image))]
            if image.values is not None:
                spans.append((image.values.start, image.values.end))
            runs = reshard.chunk_runs(spans, CHUNK_BYTES)
            found[ref.bundle_id] = {chunk: rank for first, end in runs for chunk in range(first, end)}
        return found

    def _deal(self) -> dict[BundleRef, int]:
        """Return who reads the header of each bundle: a rank of a node that holds it, else all ranks alike."""
        topology, choice = self._facts.topology, self._choice
        far = {ref.bundle_id: ref.num_bytes for ref in choice.bundles if not choice.holders[ref.bundle_id]}
        dealt = reshard.deal(far, topology.world_size)
        found: dict[BundleRef, int] = {}
        for number, ref in enumerate(choice.bundles):
            if ref.bundle_id in dealt:
                found[ref] = dealt[ref.bundle_id]
            else:
                nodes = spread(choice.holders[ref.bundle_id][0].nodes)
                near = topology.ranks_on(nodes[number % len(nodes)])
                found[ref] = near[number % len(near)]
        return found

    def _read(self, refs: Sequence[BundleRef], loaded: Loaded) -> list[tuple[str, bytes, bytes]]:
        """(bundle id, header, values) of these bundles: the first chunks, and those with the values."""
        seals = self._choice.seals
        names = [ref.bundle_id for ref in refs]
        prefixes = self._bytes([(name, ((0, 1),)) for name in names], dict.fromkeys(names, (0, 8)), loaded)
        lengths = {
            name: image_format.header_length(prefix, seals[name].length, name) for name, prefix in prefixes.items()
        }
        more = [(name, reshard.chunk_runs([(0, length)], CHUNK_BYTES)) for name, length in lengths.items()]
        headers = self._bytes(more, {name: (0, lengths[name]) for name, _ in more}, loaded)
        images = {name: image_format.read_header(header, seals[name].length, name) for name, header in headers.items()}
        spans = {name: (i.values.start, i.values.end) for name, i in images.items() if i.values is not None}
        runs = [(name, reshard.chunk_runs([span], CHUNK_BYTES)) for name, span in spans.items()]
        values = self._bytes(runs, spans, loaded)
        return [(name, header, values.get(name, b"")) for name, header in headers.items()]

    def _bytes(
        self, runs: Iterable[tuple[str, Runs]], spans: Mapping[str, tuple[int, int]], loaded: Loaded
    ) -> dict[str, bytes]:
        """These bytes of images, from chunks that are proved here once more."""
        choice, me = self._choice, self._group.rank
        refs = {ref.bundle_id: ref for ref in choice.bundles}
        fetches = [fetch_of(choice, refs[name], me, self._facts, chunks) for name, chunks in runs]
        found: dict[str, bytes] = {}
        for name, parts in by_bundle(self._fetcher.obtain(choice.version, fetches, loaded.faults)).items():
            start, end = spans[name]
            wanted = reshard.chunk_runs([spans[name]], CHUNK_BYTES)
            chunks = chunks_of(parts, wanted)
            try:
                prove_seal(choice, parts[0])
                for index, view in chunks.items():
                    image_format.check_chunk(index, image_format.chunk_digest(view), parts[0].seal, name)
            except CorruptError as error:
                node = version_choice.cheapest(refs[name], choice, me, self._facts).node
                loaded.faults.append(Fault(name, node, error.what))
                continue
            whole = b"".join(chunks.values())
            begin = wanted[0][0] * CHUNK_BYTES
            found[name] = whole[start - begin : end - begin]
        return found

    def _head(self, ref: BundleRef, header: bytes, raw: bytes) -> BundleHeader:
        seal = self._choice.seals[ref.bundle_id]
        image = image_format.read_header(header, seal.length, ref.bundle_id)
        values = value_codec.decode(raw, where=ref.bundle_id) if raw else {}
        return BundleHeader(ref, seal, image, values)


def _header_bytes(image: Image) -> int:
    """Bytes of an image's header: everything else lies behind it."""
    return min([e.start for e in (*image.entries, *([image.values] if image.values else []))], default=image.length)
