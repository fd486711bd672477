"""Every parser of bytes that somebody else may have written: samples, form, documented errors, what must hold.

Samples are made by our own writers, so they are always of the present format, and joined by the files of the corpus:
what was found once, and an input for every kind of answer. An error that is not listed is a finding.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import xxhash

from fuzz import forms
from fuzz.forms import Form
from holdfast.adapters.aiturbo import engine
from holdfast.adapters.lightning import checkpoint_io
from holdfast.adapters.mindspore import groups, rank_proofs, strategy
from holdfast.adapters.mindspore.formats import ckpt, safetensors
from holdfast.base import config
from holdfast.base.errors import (
    ConfigError,
    CorruptError,
    ForeignDirectory,
    KeeperError,
    KeeperLost,
    MemoryRefused,
    StorageError,
    UsageError,
)
from holdfast.checkpoint.checkpointer import stop_signal
from holdfast.checkpoint.liveness import heartbeat_page
from holdfast.checkpoint.survivors import step_snapshot
from holdfast.cli import timeline
from holdfast.cli.planning import job_file
from holdfast.core.model import BundleRef, Version
from holdfast.elastic.launch import compile_cache
from holdfast.keeper.observe import degraded_notice as node_notice
from holdfast.keeper.observe import metrics_port
from holdfast.keeper.observe import run_summary as node_journal
from holdfast.keeper.rpc import messages
from holdfast.tiers.backends.own_descriptor import OwnDescriptor
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values
from holdfast.tiers.memory import memory_budget
from holdfast.tiers.storage import bucket_lease, encryption, incarnations, manifest, run_lock
from holdfast.tiers.storage.bundle_files import Trailer
from holdfast.tiers.wire import frames, tls
from tiers import samples

CORPUS = Path(__file__).parent / "corpus"
MINDSPORE = Path(__file__).parents[1] / "adapters" / "mindspore_samples"


def _nothing(data: bytes, value: Any) -> None:
    """Accepted is accepted."""


@dataclass(frozen=True)
class Parser:
    """One reader of foreign bytes.

    Attributes:
        errors: all that it may raise.
        check: what must hold of the bytes and the value that was accepted; raises AssertionError.
    """

    name: str
    form: Form
    made: Callable[[], list[bytes]]
    read: Callable[[bytes], Any]
    errors: tuple[type[BaseException], ...]
    check: Callable[[bytes, Any], None] = _nothing

    def samples(self) -> list[bytes]:
        """Valid inputs, and the files of the corpus."""
        kept = CORPUS / self.name
        files = sorted(kept.iterdir()) if kept.is_dir() else []
        return [*self.made(), *(file.read_bytes() for file in files)]


# What is written down and read back: manifests, registrations, values, images.

_FILE = manifest.BundleFile.of(BundleRef("b0", (0, 2, 4), 0, 1, 16, "f" * 16), image_format.seal("b0", bytes(4096)))
_CLOSED = manifest.BundleFile.of(BundleRef("b1", (1,), 0, 2, 4, "0" * 16), image_format.seal("b1", b"abcd"), "1" * 16)


def _roots() -> list[bytes]:
    part = manifest.part_entry(manifest.encode_part([_FILE]))
    plain = manifest.Manifest(Version(3, 10), "ab" * 8, 8, "0" * 16, None, {"manifest-0.json": part})
    more = {"manifest-0.json": part, "manifest-12.json": (77, "0" * 32)}
    proved = manifest.Manifest(Version(1, 7), "ab" * 8, 5, "", Version(1, 2), more, mac="a" * 64)
    return [manifest.encode_root(plain), manifest.encode_root(proved)]


def _same(write: Callable[[Any], bytes]) -> Callable[[bytes, Any], None]:
    def check(data: bytes, value: Any) -> None:
        assert write(value) == data, "what was accepted is written otherwise"

    return check


def _same_value(data: bytes, value: Any) -> None:
    once = values.encode(value)
    assert values.encode(values.decode(once)) == once, "a value does not come back"


def _fits(data: bytes, image: image_format.Image) -> None:
    for entry in image.entries:
        assert 0 <= entry.start <= entry.end <= len(data), "an entry lies outside"


def _images() -> list[bytes]:
    pieces = [
        samples.piece("w", "F32", (2, 3)),
        samples.piece("e", "BF16", (0, 4), offsets=(2, 0), global_shape=(2, 4)),
    ]
    shard = samples.piece("a.b", "I64", (2,), offsets=(2,), global_shape=(4,))
    one = samples.bundle("b0", *pieces, shard, has_values=True)
    found = bytes(samples.build(one, {"w": bytes(24), "e": b"", "a.b": bytes(16)}, {"step": 3, "lr": [0.5]}))
    return [found, bytes(samples.build(samples.bundle("b1", samples.piece("x", "U8", ())), {"x": b"1"}))]


def _valued() -> list[bytes]:
    many = {"a": [1, -2.5, None, True], "t": (1, "x"), "s": {1, 2}, "f": frozenset({"q"}), "b": b"\0\xff", 3: 2**70}
    deep: Any = 1
    for _ in range(99):
        deep = [deep]
    return [values.encode(v) for v in (many, float("nan"), 1 + 2j, values.TensorRef("w"), deep, "\ud800", {"$x": 1})]


class _OneFile:
    """A backend in which every file has the same bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.properties = _Properties()

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self._data[offset:][:length]

    def listing(self, name: str) -> list[tuple[str, int]]:
        return [(f"000001{kind}.json", len(self._data)) for kind in ("", ".resumed", ".wished")]


@dataclass(frozen=True)
class _Properties:
    where: str = "somewhere"
    lags: bool = False


def _registry(data: bytes) -> Any:
    return incarnations.read_job(_OneFile(data))  # type: ignore[arg-type]


def _lineage(data: bytes) -> Any:
    return incarnations.decode_record(data, incarnations._Resumed, "f")


_RECORDS = [incarnations.encode_record(incarnations._Job(job_id="ab" * 8))]
_RESUMED = [
    incarnations.encode_record(incarnations._Resumed(incarnation=2, resumed_from="1-7")),
    incarnations.encode_record(incarnations._Resumed(incarnation=1, resumed_from=None)),
]
_WISHED = [
    incarnations.encode_record(incarnations._Wished(incarnation=1, version=version))
    for version in ("i000001-s0000000007", None)
]
_TRAILERS = (
    Trailer("1" * 16, 9 << 20, (b"t" * 28, b"u" * 28), b"d" * 16),
    Trailer("1" * 16, 9 << 20, (b"t" * 16, b"u" * 16), b"d" * 16, older=True),
)


def _archive() -> list[bytes]:
    with tempfile.TemporaryDirectory() as home:
        files = {name: Path(home, name.replace("/", "_")) for name in ("inductor/ab/x.py", "triton/k.so")}
        for name, file in files.items():
            file.write_text(name)
        return [compile_cache.pack(files)]


def _stays(data: bytes, found: list[tuple[str, bytes, bool]]) -> None:
    assert sum(len(content) for _, content, _ in found) <= len(data), "more bytes than there were"
    for name, _, _ in found:
        parts = PurePosixPath(name).parts
        assert parts, "a file without a name"
        assert not {"..", "/"} & set(parts), f"{name!r} leads elsewhere"
        assert "\0" not in name, f"{name!r} is no name"


# What comes over a line.


def _frame(data: bytes) -> Any:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = frames.Channel(ours, where="test")
    try:
        theirs.setblocking(False)
        theirs.send(data[: 64 << 10])
        theirs.shutdown(socket.SHUT_WR)
        return channel.receive(timeout_s=5, limit=32 << 10)[0]
    finally:
        channel.close()
        theirs.close()


def _frames() -> list[bytes]:
    return [struct.pack(">I", len(body)) + body for body in (b"", b"abc", bytes(5000))]


def _in_frame(data: bytes, body: bytes) -> None:
    assert data[4:].startswith(body), "another body than was sent"


def _said() -> list[bytes]:
    """A message of every kind; each field has a plain value of its type."""
    kinds = messages.AnyMessage.__args__  # type: ignore[attr-defined]
    return [msgspec.msgpack.encode(_plain(msgspec.inspect.type_info(kind))) for kind in kinds]


def _greeting() -> list[bytes]:
    return [messages.encode(messages.Hello(job="j", role=messages.VIEWER))]


def _same_message(data: bytes, value: Any) -> None:
    once = messages.encode(value)
    assert messages.encode(messages.decode(once)) == once, "a message does not come back"


def _plain(kind: Any) -> Any:
    match kind:
        case msgspec.inspect.StructType():
            tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
            return tag | {field.encode_name: _plain(field.type) for field in kind.fields}
        case msgspec.inspect.DataclassType():
            return {field.encode_name: _plain(field.type) for field in kind.fields}
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType() | msgspec.inspect.FrozenSetType():
            return [_plain(kind.item_type)]
        case msgspec.inspect.TupleType():
            return [_plain(item) for item in kind.item_types]
        case msgspec.inspect.DictType():
            return {_plain(kind.key_type): _plain(kind.value_type)}
        case msgspec.inspect.UnionType():
            return _plain(next((each for each in kind.types if not isinstance(each, msgspec.inspect.NoneType)), None))
        case msgspec.inspect.EnumType():
            return next(iter(kind.cls)).value
        case msgspec.inspect.LiteralType():
            return kind.values[0]
        case msgspec.inspect.RawType():
            return {"x": 1}
    words = {"IntType": 1, "FloatType": 0.5, "StrType": "x", "BoolType": True, "BytesType": b"b", "NoneType": None}
    return words.get(type(kind).__name__)


def _reply(data: bytes) -> bytes:
    return metrics_port._reply(data, lambda: "page")


def _is_answer(data: bytes, value: bytes) -> None:
    assert value.startswith(b"HTTP/1.1 ")
    if b" 200 OK" in value[:20]:
        assert data.startswith(b"GET /metrics HTTP/1."), "a page for another question"


_REQUESTS = [
    b"GET /metrics HTTP/1.1\r\nHost: localhost:9100\r\n\r\n",
    b"POST / HTTP/1.0\r\nHost: 127.0.0.1\r\nX: y\r\n\r\n",
]


# Small files beside a job, of other processes or a person.


@functools.cache
def _home() -> Path:
    """A directory of this process; a child's lies in one of who watches it."""
    made = tempfile.mkdtemp(prefix="holdfast-fuzz-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _as_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    def answer(data: bytes) -> Any:
        path = _home() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(data)
        return read(path)

    return answer


def _settings(path: Path) -> Any:
    return config.load(environ={"HOLDFAST_CONFIG": str(path)})


def _notice(path: Path) -> Any:
    return list(node_notice.posted(_home() / "runtime"))


def _asks(path: Path) -> bool:
    return stop_signal.StopSignal(str(path)).wanted


def _pages() -> list[bytes]:
    # Whatever follows the first six fields: one of each kind there is.
    rest = heartbeat_page._HEAD.unpack(bytes(heartbeat_page._HEAD.size))[6:]
    filled = [{bytes: b"all", int: 3, float: 8.0}[type(value)] for value in rest]
    return [bytes(heartbeat_page.PAGE_BYTES), heartbeat_page._HEAD.pack(heartbeat_page.MAGIC, 7, 10, 1, 0, 1, *filled)]


def _noted() -> list[bytes]:
    note = msgspec.msgpack.encode(
        {"job": "j", "rank": 0, "world_size": 1, "rows": [], "values": [[[0], values.encode({"a": 1})]], "small": {}}
    )
    return [note]


def _note(data: bytes) -> Any:
    """A page that holds this note twice, with a digest that fits."""
    descriptor = os.memfd_create("fuzz")
    try:
        head = step_snapshot._HEAD.pack(step_snapshot.MAGIC, 1, 2, len(data), xxhash.xxh3_128_digest(data))
        half = -(-(len(head) + len(data)) // 4096) * 4096
        os.ftruncate(descriptor, 2 * half)
        os.pwrite(descriptor, head + data, half)
        found = step_snapshot.SnapshotPage(OwnDescriptor.of(descriptor)).read()
    finally:
        os.close(descriptor)
    for note in found.values():
        note.tensors()
        note.decoded()
    return found


def _proof(path: Path) -> Any:
    return rank_proofs.read_proof(path.with_suffix(".slices"), (1, 2), "0" * 32, 1 << 20)


def _proofs() -> list[bytes]:
    told = {"epoch": 1, "step": 2, "slices": "0" * 32, "length": 4, "digest": "1" * 32, "chunks": ["2" * 32]}
    return [msgspec.json.encode(rank_proofs.Proof(**told))]


def _journal(path: Path) -> Any:
    return node_journal.RunFacts(path)()


_JOURNAL = [
    {"event": "run", "t": 1.0, "wall": 5.0, "watchdog": "on"},
    {"event": "progress", "t": 2.0, "step": 3, "spent": {"STEP": 1.0, "DATA": 0.5}},
    {"event": "incident", "t": 4.0, "number": 1, "found_s": 0.5, "seconds": {"T1": 0.1, "T3": 1.0}, "what": "x"},
    {"event": "restored", "t": 4.5, "step": 2},
    {"event": "report", "t": 5.0, "ranks": [1], "reason": "slow"},
    {"event": "end", "t": 9.0, "code": 0},
]
_TRACK = [{"track": "rank 0", "pid": 7, "wall": 9.5, "monotonic": 1.5}, ["save", 1.0, 2.0, {"step": 3}], ["x", 2, 3]]


def _trace(path: Path) -> Any:
    (path.parent / f"rank-1{timeline.SUFFIX}").write_bytes(forms.LINES.close(_TRACK))
    found = timeline.read([path.parent])
    return json.dumps(list(timeline._chrome(found))), timeline.page(found, "x")


def _files(*patterns: str) -> Callable[[], list[bytes]]:
    return lambda: [file.read_bytes() for pattern in patterns for file in sorted(MINDSPORE.glob(pattern))[:4]]


def _written(encode: Callable[[Any], bytes], decode: Callable[[bytes, str], Any]) -> Callable[[bytes, Any], None]:
    def check(data: bytes, value: Any) -> None:
        assert decode(encode(value), "again") == value, "what was accepted does not come back"

    return check


def _tensors(tensors: dict[str, Any]) -> list[tuple[str, str, Any, bytes]]:
    return [
        (n, "", (), t.encode(errors="surrogatepass")) if isinstance(t, str) else (n, t.dtype, t.shape, bytes(t.view()))
        for n, t in sorted(tensors.items())
    ]


def _safe_again(data: bytes, value: Any) -> None:
    again = b"".join(safetensors.encode_safetensors(value[0], crc_check=False, remove_redundancy=None))
    assert _tensors(safetensors.decode_safetensors(again, "again", crc_check=False)[0]) == _tensors(value[0])


def _ckpt_again(data: bytes, value: Any) -> None:
    again = b"".join(ckpt.encode_ckpt(value, crc_check=True))
    assert _tensors(ckpt.decode_ckpt(again, "again", crc_check=True)) == _tensors(value)


_DESCRIPTION = b"""ranks_per_node = 8
[mesh]
pp = 2
tp = 4
[[tensors]]
name = "model.layers.{i}.w"
repeat = 4
stage = "pp"
dtype = "BF16"
shape = [16, 8]
place = { tp = "shard(0)" }
[optimizer]
states = ["exp_avg"]
scalars = ["step"]
"""
_SETTINGS = [
    b'every = "10"\nkeep_last = 3\nmemory_budget = "1GiB"\nlisten_unsafe = true\n',
    b'linger_s = 0x5\nnode_label = "a"\n',
]
_BROKEN = (CorruptError,)

PARSERS = {
    parser.name: parser
    for parser in (
        Parser("root", forms.RECORD, _roots, lambda d: manifest.decode_root(d, "f"), _BROKEN, _same(manifest.encode_root)),
        Parser(
            "part", forms.RECORD, lambda: [manifest.encode_part([_FILE, _CLOSED]), manifest.encode_part([])],
            lambda d: manifest.decode_part(d, "f"), _BROKEN, _same(manifest.encode_part),
        ),
        Parser("job", forms.RECORD, lambda: _RECORDS, _registry, (CorruptError, ForeignDirectory)),
        Parser("resumed", forms.RECORD, lambda: _RESUMED, _lineage, _BROKEN, _same(incarnations.encode_record)),
        Parser("wished", forms.RECORD, lambda: _WISHED, lambda d: incarnations.Incarnations(_OneFile(d)).fulfilled(), _BROKEN),  # type: ignore[arg-type]
        Parser("values", forms.JSON, _valued, values.decode, _BROKEN, _same_value),
        Parser("image", forms.IMAGE, _images, lambda d: image_format.read_image(d, "f"), _BROKEN, _fits),
        Parser(
            "trailer", forms.trailer(b"n"), lambda: [each.encode("n") for each in _TRAILERS], lambda d: Trailer.decode(d, "n"), _BROKEN,
            _same(lambda value: value.encode("n")),
        ),
        Parser("archive", forms.ARCHIVE, _archive, compile_cache.unpack, (), _stays),
        Parser("frame", forms.BARE, _frames, _frame, (KeeperError, KeeperLost), _in_frame),
        Parser(
            "message", forms.MSGPACK, _said, messages.decode, (KeeperError,),
            _same_message,
        ),
        Parser("hello", forms.MSGPACK, _greeting, messages.decode_hello, (KeeperError,)),
        Parser("request", forms.BARE, lambda: _REQUESTS, _reply, (), _is_answer),
        Parser("strategy", forms.PROTO, _files("*/strategy.ckpt", "stages/*.ckpt", "merged.ckpt"),
            lambda d: strategy.decode_strategy(d, "f"), _BROKEN, _written(strategy.encode_strategy, strategy.decode_strategy),
        ),
        Parser("strategy-json", forms.JSON, _files("*/strategy.json", "stages/*.json", "merged.json"),
            lambda d: strategy.decode_json_strategy(d, "f"), _BROKEN,
            _written(strategy.encode_json_strategy, strategy.decode_json_strategy),
        ),
        Parser("group-info", forms.PROTO, _files("*/*/group_info.pb"), lambda d: groups.decode_group_info(d, "f"), _BROKEN,
            _written(groups.encode_group_info, groups.decode_group_info),
        ),
        Parser("ckpt", forms.PROTO, _files("ckpt/*.ckpt"), lambda d: ckpt.decode_ckpt(d, "f", crc_check=False),
            (CorruptError, UsageError), _ckpt_again,
        ),
        Parser("safetensors", forms.SAFETENSORS, _files("ckpt/*.safetensors"),
            lambda d: safetensors.decode_safetensors(d, "f", crc_check=True), _BROKEN, _safe_again,
        ),
        Parser("slices-proof", forms.JSON, _proofs, _as_file("p" + rank_proofs.PROOF, _proof), _BROKEN),
        Parser("aiturbo-name", forms.JSON, lambda: [b'{"holdfast": "1-7"}\n'], _as_file("name", engine._read_name), (StorageError,)),
        Parser("lightning-pointer", forms.JSON, lambda: [b'{"holdfast": "/x", "versions": ["1-7"]}'],
            _as_file("pointer", lambda path: checkpoint_io._pointed(str(path))), (),
        ),
        Parser("settings", forms.TEXT, lambda: _SETTINGS, _as_file("settings.toml", _settings), (ConfigError,)),
        Parser("key", forms.BARE, lambda: [b"ab" * 32 + b"\n", b"k" * 32], _as_file("key", lambda p: encryption.load_key(str(p))), (ConfigError,)),
        Parser("secret", forms.BARE, lambda: [b"ab" * 32 + b"\n"], _as_file("secret", lambda p: tls.read_secret(str(p))), (ConfigError,)),
        Parser("description", forms.TEXT, lambda: [_DESCRIPTION], _as_file("job.toml", job_file.load), (UsageError,)),
        Parser("description-json", forms.JSON,
            lambda: [b'{"mesh":{"dp":2},"tensors":[{"name":"w","dtype":"F32","shape":[4],"place":{"dp":"shard(0)"}}]}'],
            _as_file("job.json", job_file.load), (UsageError,),
        ),
        Parser("run-lock", forms.JSON, lambda: [b'{"pid": 7, "host": "a", "run_id": "r"}\n'], run_lock._describe, ()),
        Parser("lease", forms.JSON, lambda: [bucket_lease._encode(bucket_lease._words("r"))],
            lambda d: (bucket_lease._describe(bucket_lease._decode(d)), bucket_lease._is_dead(bucket_lease._decode(d))), (),
        ),
        Parser("budget", forms.JSON, lambda: [f'{{"a:{os.getpid()}:1": 5}}'.encode()], memory_budget._parse, (MemoryRefused,)),
        Parser("notice", forms.JSON,
            lambda: [json.dumps({"pid": os.getpid(), "since": None, "root": "/x", "reason": "r", "durable": ""}).encode()],
            _as_file("runtime/j/n/durable-only.json", _notice), (),
        ),
        Parser("stop", forms.JSON, lambda: [b'{"stop": true}'], _as_file("stop", _asks), ()),
        Parser("journal", forms.LINES, lambda: [forms.LINES.close(_JOURNAL)], _as_file("journal.jsonl", _journal), ()),
        Parser("track", forms.LINES, lambda: [forms.LINES.close(_TRACK)], _as_file(f"t/rank-0{timeline.SUFFIX}", _trace), (CorruptError, UsageError)),
        Parser("traced-journal", forms.LINES, lambda: [forms.LINES.close(_JOURNAL)], _as_file("j/journal.jsonl", _trace), ()),
        Parser("page", forms.BARE, _pages, lambda d: heartbeat_page.Reading(d[: heartbeat_page.PAGE_BYTES].ljust(heartbeat_page.PAGE_BYTES, b"\0")), ()),
        Parser("note", forms.MSGPACK, _noted, _note, _BROKEN),
    )
}  # fmt: skip
