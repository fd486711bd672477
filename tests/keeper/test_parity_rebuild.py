"""What is made of parity is what was sealed, or it is refused: pieces of other bytes, mistakes in the making, bad chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.base.errors import CorruptError, VersionNotFound
from holdfast.core.layout.parity_stripes import Piece, Striping
from holdfast.core.model import BundleRef, Seal, Version
from holdfast.core.recovery.parity_choice import REBUILT
from holdfast.core.recovery.version_choice import Fetch, Source
from holdfast.keeper.fetch.parity_rebuild import ParityReader
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.memory.xor import clear, xor_into

V = Version(1, 7)
SIZE = 3
LOST = 1


class Members:
    """The keepers of a group of three: every one has an image of two chunks and a small one, and its piece of parity."""

    def __init__(self, salt: int = 0) -> None:
        self.images: list[dict[str, bytearray]] = [
            {
                f"m{member}-big": bytearray(bytes([salt + 3 * member + 1]) * (CHUNK_BYTES + 4096 * (member + 1))),
                f"m{member}-small": bytearray(bytes([salt + 3 * member + 2]) * (100 * member + 50)),
            }
            for member in range(SIZE)
        ]
        self.covers = tuple(
            tuple(image_format.seal(name, memoryview(data)) for name, data in mine.items()) for mine in self.images
        )
        self.said = [Piece(V, member, self.covers) for member in range(SIZE)]
        self.pieces = [self.made(member) for member in range(SIZE)]
        self.sealed: dict[str, Seal] = {}
        self.asked: list[tuple[int, bool]] = []

    def made(self, keeper: int, *, missed: tuple[int, int] | None = None, turned: int = 0) -> bytearray:
        """The parity that a member makes; without one chunk of a row and member, or of the stripes beside the right ones."""
        striping = Striping(self.covers, CHUNK_BYTES)
        found = bytearray(striping.num_bytes(keeper))
        clear(memoryview(found))
        for at, row in enumerate(striping.rows(keeper)):
            for member, chunk in row.chunks.items():
                if (at, member) == missed:
                    continue
                if turned:
                    right = (keeper - member - 1) % SIZE
                    stripe = striping._stripes[member][(right + turned) % (SIZE - 1)]
                    chunk = stripe[at] if at < len(stripe) else chunk
                start = chunk.index * CHUNK_BYTES
                part = memoryview(self.images[member][chunk.bundle_id])[start : start + chunk.length]
                xor_into(memoryview(found)[row.offset : row.offset + row.length], part[: row.length])
        return found

    def reader(self) -> ParityReader:
        return ParityReader(lambda node: _Peer(self, node))  # type: ignore[arg-type,return-value]

    def rebuilt(self, name: str = f"m{LOST}-big", reader: ParityReader | None = None) -> bytes:
        """The lost member's image, made anew; its parity is sealed as it is now."""
        data = self.images[LOST][name]
        seal = next(seal for seal in self.covers[LOST] if seal.bundle_id == name)
        nodes = tuple(-1 if member == LOST else member for member in range(SIZE))
        brief = Seal(seal.bundle_id, seal.length, seal.digest)
        fetch = Fetch(BundleRef(name, (LOST,)), brief, Source.PARITY, REBUILT, parity=nodes, pieces=self.said[0].digest)
        found = bytearray(len(data))
        told: list[int] = []
        assert (reader or self.reader()).read(V, fetch, 0, memoryview(found), told.append) == seal
        assert sum(told) == len(found)
        return bytes(found)


class _Peer:
    """The connection to one member."""

    def __init__(self, members: Members, node: int) -> None:
        assert node != LOST, "it is gone"
        self._members = members
        self._node = node

    def parity(self, _: Version, bundle_id: str, __: str, *, known: bool = False) -> tuple[Piece | None, Seal]:
        piece = self._members.said[self._node]
        seal = next((s for seals in piece.covers for s in seals if s.bundle_id == bundle_id), None)
        if seal is None:
            raise VersionNotFound("there is none")
        self._members.asked.append((self._node, known))
        return None if known else piece.brief, seal

    def _bytes(self, name: str) -> bytearray:
        if name == self._members.said[self._node].name:
            return self._members.pieces[self._node]
        return self._members.images[self._node][name]

    def seals(self, _: Version, names: tuple[str, ...]) -> dict[str, Seal]:
        found = {}
        for name in names:
            covered = {seal.bundle_id: seal for seal in self._members.covers[self._node]}
            sealed = self._members.sealed.get(name) or covered.get(name)
            try:
                found[name] = sealed or image_format.seal(name, memoryview(self._bytes(name)))
            except KeyError:
                continue
        return found

    def read_chunks_into(self, _: Version, seal: Seal, first: int, view: memoryview) -> None:
        data = memoryview(self._bytes(seal.bundle_id))[first * CHUNK_BYTES : first * CHUNK_BYTES + len(view)]
        image_format.check_chunk(first, image_format.chunk_digest(data), seal, f"node {self._node}")
        view[:] = data


@pytest.mark.parametrize("name", [f"m{LOST}-big", f"m{LOST}-small"])
def test_every_image_of_a_lost_member_is_made_anew(name: str) -> None:
    members = Members()
    assert members.rebuilt(name) == bytes(members.images[LOST][name])


def test_what_all_members_said_of_one_image_is_asked_of_one_for_the_next() -> None:
    members = Members()
    reader = members.reader()
    for name in (f"m{LOST}-big", f"m{LOST}-small"):
        assert members.rebuilt(name, reader) == bytes(members.images[LOST][name])
    assert members.asked == [(0, False), (2, False), (0, True)]


def test_all_members_are_read_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    members, meet, here = Members(), threading.Barrier(SIZE - 1, timeout=60), threading.local()
    read = _Peer.read_chunks_into

    def together(peer: _Peer, *args: Any) -> None:
        if not hasattr(here, "met"):
            here.met = meet.wait()
        read(peer, *args)

    monkeypatch.setattr(_Peer, "read_chunks_into", together)
    assert members.rebuilt() == bytes(members.images[LOST][f"m{LOST}-big"])


def test_one_chunk_alone_is_made_anew() -> None:
    members = Members()
    name = f"m{LOST}-big"
    seal = members.covers[LOST][0]
    fetch = Fetch(BundleRef(name, (LOST,)), seal, Source.PARITY, REBUILT, parity=(0, -1, 2))
    found = bytearray(len(members.images[LOST][name]) - CHUNK_BYTES)
    members.reader().read(V, fetch, 1, memoryview(found), lambda _: None)
    assert found == members.images[LOST][name][CHUNK_BYTES:]


def missed_chunk(members: Members) -> None:
    members.pieces = [members.made(keeper, missed=(0, LOST)) for keeper in range(SIZE)]


def missed_chunk_of_another(members: Members) -> None:
    members.pieces = [members.made(keeper, missed=(0, 2 if keeper == 0 else 0)) for keeper in range(SIZE)]


def wrong_stripe(members: Members) -> None:
    members.pieces = [members.made(keeper, turned=1) for keeper in range(SIZE)]


def kept_from_the_version_before(members: Members) -> None:
    """The bytes are of other images, under the name of these."""
    members.pieces = Members(salt=100).pieces


def changed_image(members: Members) -> None:
    """A member's bytes are not those that the parity was made of, and are sealed anew."""
    name = "m2-big"
    members.images[2][name][:] = bytes(len(members.images[2][name]))
    members.sealed[name] = image_format.seal(name, memoryview(members.images[2][name]))


def rotten_piece(members: Members) -> None:
    for member in (0, 2):
        name = members.said[member].name
        members.sealed[name] = image_format.seal(name, memoryview(members.pieces[member]))
        members.pieces[member][7] ^= 1


def rotten_image(members: Members) -> None:
    for member in (0, 2):
        members.images[member][f"m{member}-big"][7] ^= 1


def short_piece(members: Members) -> None:
    members.pieces = [piece[: len(piece) // 4] for piece in members.pieces]


def mixed_versions(members: Members) -> None:
    members.said[2] = Piece(Version(1, 6), 2, members.covers)


def mixed_covers(members: Members) -> None:
    members.said[2] = Piece(V, 2, Members(salt=9).covers)


def another_place(members: Members) -> None:
    members.said[2] = Piece(V, 0, members.covers)


def another_content(members: Members) -> None:
    """All members agree, and on another image than all ranks do."""
    other = Members(salt=9)
    members.said = [Piece(V, member, other.covers) for member in range(SIZE)]
    members.pieces = other.pieces


@pytest.mark.parametrize(
    "mistake",
    [
        missed_chunk, missed_chunk_of_another, wrong_stripe, kept_from_the_version_before, changed_image, rotten_piece,
        rotten_image, short_piece, mixed_versions, mixed_covers, another_place, another_content,
    ],
    ids=lambda mistake: mistake.__name__,
)  # fmt: skip
def test_parity_of_anything_else_is_refused_and_never_believed(mistake: Callable[[Members], None]) -> None:
    members = Members()
    mistake(members)
    with pytest.raises(CorruptError, match=f"parity, bundle m{LOST}-big: "):
        members.rebuilt()


def test_a_member_that_has_no_parity_any_more_is_named() -> None:
    members = Members()
    members.said[2] = Piece(V, 2, ((), (), ()))
    with pytest.raises(VersionNotFound, match="parity, bundle m1-big: there is none"):
        members.rebuilt()
