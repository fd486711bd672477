"""Defines what keepers and their clients say to each other: one tagged struct per message, msgpack on the wire.

A request carries an `id` and is answered by a reply with the same one, or by a Refusal that names an error class. `id` 0
is a statement that expects no reply. Unknown tags and wrong fields are refused. All messages: docs/spec/keeper.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, TypeVar

import msgspec

from holdfast.base.errors import HoldfastError, KeeperError, kind_of
from holdfast.core.layout.parity_stripes import Piece, PieceCopy
from holdfast.core.model import BundleRef, Level, RankLayout, Seal, Topology, Version
from holdfast.core.pipeline.idle_stats import Idle
from holdfast.core.rank_runs import Runs, spread
from holdfast.core.recovery.version_choice import Fetch, MemoryCopy, Source
from holdfast.core.scheduling.step_agreement import Appointment, Proposal
from holdfast.core.versions.coordinator_board import Announcement
from holdfast.core.versions.node_ledger import Reports

PROTOCOL = 5

T = TypeVar("T")

RANK, VIEWER, KEEPER, OPERATOR = "rank", "viewer", "keeper", "operator"


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image that the trainer finished in its slot: bytes [offset, offset + length) of the payload."""

    ref: BundleRef
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Assembly:
    """Holds what every rank agreed on when the job (of one incarnation) came together.

    Attributes:
        incarnation: registered beside the manifests, or arbitrated above everything the keepers have seen.
        root, job_id: checkpoint URL or absolute path; from the storage's claim.
        addresses: of the keepers, per node index (`unix:<path>` or `tcp:<host>:<port>`).
        keep_last, keep_every, keep_every_s: durable versions kept; of so many steps, and seconds, one; 0 for none.
        lineage: what is recorded of incarnations before this one: (incarnation, version it resumed from).
    """

    incarnation: int
    root: str
    job_id: str
    topology: Topology
    addresses: tuple[str, ...]
    keep_last: int = 2
    keep_every: int = 0
    keep_every_s: float = 0.0
    lineage: tuple[tuple[int, Version | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """Sealed bundles of one group of ranks in a slot, or the same bytes in one slot of each of many nodes.

    Attributes:
        nodes, ranks, preloaded: as in `MemoryCopy`.
        seals: of the bundles, packed: keepers compare them with those of other nodes, and need not look into them.
    """

    version: Version
    nodes: Runs
    ranks: Runs
    preloaded: bool
    seals: bytes

    def __post_init__(self) -> None:
        """Called for what came in a message.

        Raises:
            ValueError: the runs are none.
        """
        spread(self.nodes)
        spread(self.ranks)


@dataclass(frozen=True, slots=True)
class Inventory:
    """Holds what the keepers hold; the facts of core.recovery.

    Attributes:
        held: every sealed bundle, own slots and replicas.
        packed: every bundle of the job, where a keeper knows it, likewise packed; with the versions that have these.
        suspects: versions whose twins differ, with the reason.
        levels: versions and their level, as far as a keeper knows.
        reachable, silent: indices of the nodes whose keepers answered; (index, reason) of those that did not.
        unheard: those of `silent` that may answer later, and hold anything. Of the others nobody listens, or said no.
        parity: every piece of parity that stands.
        condemned: versions of which a copy was taken out of use.
    """

    held: tuple[Held, ...]
    packed: tuple[tuple[tuple[Version, ...], bytes], ...]
    suspects: tuple[tuple[Version, str], ...]
    levels: tuple[tuple[Version, Level], ...]
    reachable: tuple[int, ...]
    silent: tuple[tuple[int, str], ...] = ()
    unheard: tuple[int, ...] = ()
    parity: tuple[PieceCopy, ...] = ()
    condemned: tuple[Version, ...] = ()

    @property
    def copies(self) -> tuple[MemoryCopy, ...]:
        """Return what is held, by bundle."""
        return tuple(
            MemoryCopy(row.version, row.nodes, row.ranks, seal, row.preloaded)
            for row in self.held
            for seal in _unpack(row.seals, tuple[Seal, ...])
        )

    @property
    def tables(self) -> dict[Version, tuple[BundleRef, ...]]:
        """Return every bundle of the job per version, where a keeper knows it."""
        found = [(versions, _unpack(body, tuple[BundleRef, ...])) for versions, body in self.packed]
        return {version: table for versions, table in found for version in versions}


class Message(msgspec.Struct, frozen=True, tag_field="is", kw_only=True):
    """Base of all messages."""

    id: int = 0


# --- opening -----------------------------------------------------------------------------------------------------


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """First message of every connection, at most 1 KiB.

    Attributes:
        job_id: what a keeper serves; empty for the others.
        transfer: of a line of a keeper for bulk bytes: a number that those of one transfer share; 0: none.
    """

    job: str
    role: str
    protocol: int = PROTOCOL
    rank: int = -1
    node: int = -1
    incarnation: int = 0
    job_id: str = ""
    transfer: int = 0


class Welcome(Message, tag="welcome", frozen=True, kw_only=True):
    """Accepted; who the keeper is, where other nodes find it, and what it was told of which job (if of any)."""

    node: str
    pid: int
    incarnation: int
    address: str = ""
    job_id: str = ""
    lineage: tuple[tuple[int, Version | None], ...] = ()


class Ok(Message, tag="ok", frozen=True):
    """Done."""


class Refusal(Message, tag="refusal", frozen=True, kw_only=True):
    """The request failed. `kind` is the name of a class in base.errors."""

    kind: str
    what: str
    where: str = ""
    remedy: str = ""


# --- a trainer and its keeper ------------------------------------------------------------------------------------


class Assemble(Message, tag="assemble", frozen=True, kw_only=True):
    """Says who belongs to the job, in this incarnation, and where the key of its files comes from.

    Attributes:
        key, key_required, key_id: `tiers.storage.encryption.KeySource`: a keeper that served an earlier start of the job may have another one.
            None: it keeps what it has.
    """

    assembly: Assembly
    key: str | None = None
    key_required: bool = True
    key_id: str = ""


class Resume(Message, tag="resume", frozen=True, kw_only=True):
    """All ranks loaded `version` (None: a fresh start) and recorded it.

    Attributes:
        table: every bundle of the job at `version`, where it is known. A keeper that came later has heard it of nobody.
        read_bytes: of images, what this rank read of it from storage itself.
    """

    incarnation: int
    version: Version | None
    table: tuple[BundleRef, ...] = ()
    read_bytes: int = 0


class Prepare(Message, tag="prepare", frozen=True, kw_only=True):
    """Reserve this many slots of this size for my rank.

    Attributes:
        num_ready: the answer comes when so many are there; None: all. 0: at once, without any, when the budget allows them.
        put_off: no page is made before somebody waits for a slot: the rank in its next request, or what it restores.
        spare: refused unless the budget has room for the slot that is missing and twice as much again.
        mapped: slots that the client has. An answer may be lost on its way: the keeper sends the descriptors of all others.
    """

    num_bytes: int
    num_slots: int
    num_ready: int | None = None
    put_off: bool = False
    spare: bool = False
    mapped: tuple[int, ...] = ()


class Slots(Message, tag="slots", frozen=True, kw_only=True):
    """Numbers of slots.

    Attributes:
        sent: those that the client does not have; their descriptors come along in this order.
    """

    slot_ids: tuple[int, ...]
    sent: tuple[int, ...] = ()


class Adopt(Message, tag="adopt", frozen=True, kw_only=True):
    """Slots of a keeper that died; their descriptors come along."""

    num_slots: int


class Register(Message, tag="register", frozen=True, kw_only=True):
    """The rank's bundles.

    Attributes:
        shared: `GROUP/TENSOR` of what it shares with other ranks of its node, in the order of their spots (core.twins).
    """

    layout: RankLayout
    shared: tuple[str, ...] = ()


NO_SLOT = -1
# What helps a save that waits for one.
FREE_SLOTS = "save less often, or reserve a third slot (num_slots = 3)"


class Begin(Message, tag="begin", frozen=True, kw_only=True):
    """A slot for this version, please; wait up to `timeout_s` for one.

    Attributes:
        final: at the end of the time the version is abandoned; else the answer is NO_SLOT, and the rank may ask again.
        comes_back: abandoned it is only when the rank begins another one, or a few seconds later. The answer is NO_SLOT.
        waited_s: how long it has waited in requests before this one.
        mapped: slots that the client has.
    """

    version: Version
    num_bytes: int
    durable: bool
    timeout_s: float
    final: bool = True
    comes_back: bool = False
    waited_s: float = 0.0
    mapped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageThere:
    """An image of a rank that stands in a slot as it was sealed."""

    bundle_id: str
    offset: int
    length: int


class Begun(Message, tag="begun", frozen=True, kw_only=True):
    """The slot is yours; its header is invalid. Its descriptor comes along if the client does not have it.

    Attributes:
        slot_id: NO_SLOT: none became free in the time, and the version is not abandoned.
        version: what the rank saved there before, if that was sealed.
        there: its images. What is not written of them need not be hashed again (`Copied.kept`).
    """

    slot_id: int
    reason: str
    version: Version | None = None
    there: tuple[ImageThere, ...] = ()


class Copied(Message, tag="copied", frozen=True, kw_only=True):
    """The images of this version lie in the slot.

    Attributes:
        spots: of every tensor that was registered as shared, 8 bytes that follow from some of its elements at the save.
        kept: bundles whose images stood there when the slot was begun, and of which not a byte was written since.
    """

    version: Version
    images: tuple[ImageSpan, ...]
    spots: bytes = b""
    kept: tuple[str, ...] = ()


class Persist(Message, tag="persist", frozen=True, kw_only=True):
    """A version that was begun without `durable` is due for storage after all."""

    version: Version


class Abandon(Message, tag="abandon", frozen=True, kw_only=True):
    """This rank gives the version up."""

    version: Version
    reason: str


class TakeInventory(Message, tag="take-inventory", frozen=True, kw_only=True):
    """`wide`: ask the other keepers as well."""

    wide: bool


class InventoryReply(Message, tag="inventory", frozen=True, kw_only=True):
    """Says what the keepers hold."""

    inventory: Inventory


class Obtain(Message, tag="obtain", frozen=True, kw_only=True):
    """Make these bundles present on this node. `mapped`: slots that the client has."""

    version: Version
    fetches: tuple[Fetch, ...]
    timeout_s: float
    mapped: tuple[int, ...] = ()


class Found(Message, tag="found", frozen=True, kw_only=True):
    """Says where one bundle lies now: bytes [start, start + length) of the whole slot `slot_id`, header included
    (descriptor number `fd` of the frame, if the client has not mapped it), or this run (first, end) of its `chunks`,
    one of several.
    """

    bundle_id: str
    slot_id: int
    fd: int
    start: int
    length: int
    seal: Seal
    source: Source
    seconds: float
    chunks: tuple[int, int] | None = None


class Obtained(Message, tag="obtained", frozen=True, kw_only=True):
    """Says where the bundles are that were obtained; descriptors come along."""

    found: tuple[Found, ...]


class Release(Message, tag="release", frozen=True):
    """The client no longer reads what it obtained."""


class Condemn(Message, tag="quarantine", frozen=True, kw_only=True):
    """A copy failed its digest; `node` -1 is storage, -2 what was made of parity."""

    version: Version
    bundle_id: str
    node: int
    reason: str


class AskStatus(Message, tag="ask-status", frozen=True):
    """Asks a keeper for its status."""


class StatusReply(Message, tag="status", frozen=True, kw_only=True):
    """A map of plain values."""

    status: msgspec.Raw


class AskInside(Message, tag="ask-inside", frozen=True):
    """Asks a keeper what the job is made of."""


class InsideReply(Message, tag="inside", frozen=True, kw_only=True):
    """A map of plain values."""

    inside: msgspec.Raw


class Preload(Message, tag="preload", frozen=True, kw_only=True):
    """The trainers start: rank i on node `node_of[i]`, you are `node`. `addresses` of all keepers, or none of them."""

    node: int
    node_of: tuple[int, ...]
    addresses: tuple[str, ...]
    ranks_per_reader: int


class Goodbye(Message, tag="goodbye", frozen=True, kw_only=True):
    """This rank leaves; `finished`: for good."""

    finished: bool


class Progress(Message, tag="progress", frozen=True, kw_only=True):
    """Push: what is known of a version now.

    Attributes:
        due: it was ordered into storage.
    """

    version: Version
    reached: tuple[Level, ...]
    reason: str
    abandoned: bool
    due: bool = False


class Propose(Message, tag="propose", frozen=True, kw_only=True):
    """A rank asks for a save or a stop; a keeper passes it on to the coordinator."""

    proposal: Proposal


class Cadence(Message, tag="cadence", frozen=True, kw_only=True):
    """A rank found how often to save, or measured its waits; for the status."""

    reason: str = ""
    idle: Idle | None = None


class ShowWaits(Message, tag="show-waits", frozen=True):
    """The descriptors beside this are the page of the rank's waits and its bell (keeper.slots.idle_windows); they replace those before."""


class Appointed(Message, tag="appointed", frozen=True, kw_only=True):
    """Push: the step that the coordinator named for all ranks."""

    incarnation: int
    appointment: Appointment


class Alarm(Message, tag="alarm", frozen=True, kw_only=True):
    """Push: something an operator should know. `key` names the subject, so that repetitions replace each other."""

    key: str
    text: str


class Working(Message, tag="working", frozen=True, kw_only=True):
    """Push: how far something is that takes long. `rank`: for whom; -1 for all."""

    what: str
    version: Version
    rank: int
    done_bytes: int
    total_bytes: int
    seconds: float


# --- keepers among themselves ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TwinLayouts:
    """Layouts of ranks that list the same bundles, as all twins do.

    Attributes:
        bundles: packed. Those of other nodes may be the same.
        captures: by rank, its `RankLayout.captures`.
    """

    bundles: bytes
    captures: tuple[tuple[int, tuple[str, ...]], ...]


class Report(Message, tag="report", frozen=True, kw_only=True):
    """A node tells the coordinator; `whole` when it repeats everything it knows.

    Attributes:
        reports: without layouts.
        layouts: those, in the order in which they were registered.
    """

    node: int
    incarnation: int
    reports: Reports
    layouts: tuple[TwinLayouts, ...] = ()
    whole: bool = False

    @classmethod
    def of(cls, node: int, incarnation: int, facts: Reports, *, whole: bool) -> Report:
        """Return the message of these facts."""
        layouts = tuple(
            TwinLayouts(bytes(pack(refs)), tuple((layout.rank, layout.captures) for layout in twins))
            for refs, twins in groupby(facts.layouts, lambda layout: layout.bundles)
        )
        return cls(node=node, incarnation=incarnation, reports=replace(facts, layouts=()), layouts=layouts, whole=whole)

    @property
    def facts(self) -> Reports:
        """Return all that is reported. Twins share one list of their bundles, those of other nodes too.

        Raises:
            KeeperError: the lists are none.
        """
        each = ((_bundles(same.bundles), *own) for same in self.layouts for own in same.captures)
        layouts = tuple(RankLayout(rank, bundles, captures) for bundles, rank, captures in each)
        return replace(self.reports, layouts=layouts)


class News(Message, tag="news", frozen=True, kw_only=True):
    """The coordinator tells a node; the table comes along when an announcement names a layout."""

    incarnation: int
    announcement: Announcement
    table: tuple[BundleRef, ...] = ()


class Ping(Message, tag="ping", frozen=True):
    """Are you there? Answered with Ok."""


class Pull(Message, tag="pull", frozen=True, kw_only=True):
    """Send bytes [start, start + length) of a sealed image; the reply is Bulk and the bytes. `urgent`: without pacing."""

    version: Version
    bundle_id: str
    start: int
    length: int
    urgent: bool = False


class Bulk(Message, tag="bulk", frozen=True, kw_only=True):
    """This many raw bytes follow."""

    length: int


class AskLanding(Message, tag="ask-landing", frozen=True, kw_only=True):
    """Asks how far this bundle has come; answered when it has come beyond so many bytes, or after a moment."""

    version: Version
    bundle_id: str
    beyond: int


class Landed(Message, tag="landed", frozen=True, kw_only=True):
    """So many bytes are here and proved; `moved`: of all bundles that land here. The seal comes with the first."""

    ready: int
    moved: int
    seal: Seal | None = None


class PullLanding(Message, tag="pull-landing", frozen=True, kw_only=True):
    """Send bytes [start, start + length) of a bundle that may still be landing; the reply is Bulk and the bytes."""

    version: Version
    bundle_id: str
    start: int
    length: int


class AskSeals(Message, tag="ask-seals", frozen=True, kw_only=True):
    """Seals (with chunk digests) of these bundles, as far as this keeper holds them."""

    version: Version
    bundle_ids: tuple[str, ...]


class Seals(Message, tag="seals", frozen=True, kw_only=True):
    """The seals that were asked for; bundles that are not held are left out."""

    seals: tuple[Seal, ...]


class AskParity(Message, tag="ask-parity", frozen=True, kw_only=True):
    """Asks for the piece of parity of this name, which the bundle is in; `known`: for the bundle's seal alone."""

    version: Version
    bundle_id: str
    name: str
    known: bool = False


class ParityOf(Message, tag="parity-of", frozen=True, kw_only=True):
    """Says what the piece is of, and gives the bundle's seal with digests of chunks. Its bytes are pulled by its name."""

    piece: Piece | None
    seal: Seal


AnyMessage = (
    Hello | Welcome | Ok | Refusal | Assemble | Resume | Prepare | Slots | Adopt | Register | Begin | Begun | Copied | Persist | Abandon
    | TakeInventory | InventoryReply | Obtain | Obtained | Release | Condemn | AskStatus | StatusReply | AskInside | InsideReply | Goodbye | Progress
    | Propose | Cadence | ShowWaits | Appointed | Alarm | Working | Report | News | Ping | Pull | Bulk | AskSeals | Seals | AskLanding | Landed
    | PullLanding | Preload | AskParity | ParityOf
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_hello_decoder = msgspec.msgpack.Decoder(Hello)


class _AnyHello(msgspec.Struct, frozen=True):
    """Holds what a greeting says in every protocol."""

    protocol: int


_any_hello_decoder = msgspec.msgpack.Decoder(_AnyHello)


def encode(message: Message) -> bytes:
    """The body of a frame."""
    return _encoder.encode(message)


def pack(value: Any) -> msgspec.Raw:
    """A field of a message, encoded once for many: plain values, or what the field's type says."""
    return msgspec.Raw(_encoder.encode(value))


def together(tables: Mapping[Version, bytes]) -> tuple[tuple[tuple[Version, ...], bytes], ...]:
    """Tables of bundles, packed, each once with all its versions (`Inventory.packed`)."""
    versions: dict[bytes, list[Version]] = {}
    for version, body in tables.items():
        versions.setdefault(body, []).append(version)
    return tuple((tuple(found), body) for body, found in versions.items())


def _unpack(body: bytes, kind: type[T]) -> T:
    """The value of a field that is packed.

    Raises:
        KeeperError: it is something else.
    """
    with _of_this_protocol():
        return msgspec.msgpack.decode(body, type=kind)


@lru_cache(8)
def _bundles(body: bytes) -> tuple[BundleRef, ...]:
    return _unpack(body, tuple[BundleRef, ...])


@contextmanager
def _of_this_protocol() -> Iterator[None]:
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KeeperError(f"not a message of this protocol: {error}") from error


def decode(body: bytes) -> AnyMessage:
    """The message in a frame.

    Raises:
        KeeperError: not a message of this protocol.
    """
    with _of_this_protocol():
        return _decoder.decode(body)


def decode_hello(body: bytes) -> Hello:
    """The first message of a connection; only Hello is understood.

    Raises:
        KeeperError: something else, or a greeting in another protocol; says which.
    """
    try:
        protocol = _any_hello_decoder.decode(body).protocol
        if protocol != PROTOCOL:
            raise KeeperError(
                f"the keeper (process {os.getpid()}) and this process are of different versions of holdfast: it speaks "
                f"protocol {PROTOCOL}, this process {protocol}",
                remedy="use one version of holdfast on all nodes; a keeper that was left by an older job ends by itself "
                f"after linger_s, or now with `kill {os.getpid()}` (what it holds in memory goes with it)",
            )
        return _hello_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KeeperError(f"not a greeting of this protocol: {error}") from error


def superseded(incarnation: int) -> str:
    """The key of the alarm that nothing more of an incarnation becomes durable: a newer one is registered."""
    return f"incarnation {incarnation} is over"


def refusal(request: int, error: HoldfastError) -> Refusal:
    """`error` as a message."""
    return Refusal(
        id=request, kind=type(error).__name__, what=error.what[:4000], where=error.where[:1000], remedy=error.remedy
    )


def raise_refusal(message: Refusal) -> None:
    """Raises the error that the other side named; an unknown name becomes KeeperError."""
    raise kind_of(message.kind, KeeperError)(message.what, where=message.where, remedy=message.remedy)
