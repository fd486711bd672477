"""Checkpoints in a bucket, against a real HTTP S3 server, with every fault that a network and a store can add."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.errors import (
    ConfigError,
    CorruptError,
    Fenced,
    ForeignDirectory,
    InUse,
    StorageBusy,
    StorageError,
    StorageUnfit,
    VersionNotFound,
)
from holdfast.base.events import Events
from holdfast.checkpoint.restore import version_vote
from holdfast.cli import doctor
from holdfast.core.model import Level, Topology, Version
from holdfast.keeper.rpc.messages import Assembly, Inventory
from holdfast.keeper.storage.retention import RetentionRunner
from holdfast.testing.contracts.backend import CHECKS
from holdfast.tiers.backends import object_store
from holdfast.tiers.backends.concurrency_limit import Limited
from holdfast.tiers.backends.interface import TEMPORARY, Backend
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.backends.object_store import INSTALLED, PART_BYTES, ObjectStoreBackend
from holdfast.tiers.backends.retry import Policy, Retrying
from holdfast.tiers.storage.bucket_lease import LOCKS, LeaseLock
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage
from keeper.rig import reached, rig_in, save_all
from sample_kit import MORE, sampled
from tiers.s3 import BUCKET, Request, Server, bucket, s3_server, times
from tiers.samples import STAMP, save, verify

V1, V2, V3 = Version(1, 10), Version(1, 20), Version(1, 30)
QUICK = Policy(first_pause_s=0.001, max_pause_s=0.01)
_prefixes = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture
def prefix() -> str:
    return f"run-{next(_prefixes)}"


def stacked(prefix: str, *, timeout_s: float = 10.0) -> Backend:
    return Retrying(Limited(bucket(prefix, timeout_s=timeout_s), 4), QUICK)


def claimed(prefix: str, **options: float) -> Storage:
    store = Storage(stacked(prefix, **options), Events())
    store.claim()
    store.incarnations.register()
    return store


def proved(prefix: str) -> Backend:
    """A backend whose probe is behind it, so that a plan counts only what the test does."""
    backend = stacked(prefix)
    backend.prepare()
    return backend


# The contract.


def _in_memory(_: Path) -> Backend:
    """The clients of all three stores share everything but the last inch; this one has no server behind it."""
    from obstore.store import MemoryStore

    return ObjectStoreBackend(MemoryStore(), "memory")


MAKERS: dict[str, Callable[[Path], Backend]] = {
    "directory": lambda path: LocalBackend(path / "root"),
    "s3": lambda path: bucket(f"contract-{path.name}"),
    "memory": _in_memory,
    "memory with wrappers": lambda path: Retrying(Limited(_in_memory(path), 2), QUICK),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_backend_keeps_the_contract(server: Server, tmp_path: Path, kind: str) -> None:
    for index, (name, check) in enumerate(CHECKS.items()):
        place = tmp_path / f"{kind.replace(' ', '-')}-{index}"
        place.mkdir()
        backend = MAKERS[kind](place)
        backend.prepare()
        try:
            check(backend)
        except Exception as error:
            raise AssertionError(f"{kind}: {name}") from error


# A job in a bucket.


def test_a_version_in_a_bucket_is_written_listed_read_and_retired(server: Server, prefix: str) -> None:
    store = claimed(prefix)
    for version in (V1, V2):
        save(store, version)
        assert verify(store, version) > 0
    assert store.versions() == [V1, V2]
    store.marks.pin(V1)
    assert store.marks.pins() == {V1}
    store.marks.unpin(V1)
    store.retire(V1)
    assert store.versions() == [V2]
    assert store._backend.listing(str(V1)) == []
    again = open_storage(f"s3://{BUCKET}/{prefix}", Events())
    assert again.job_id() == store.job_id()
    assert verify(again, V2) > 0


def test_objects_are_removed_several_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of a large job has thousands, each removal takes as long as a reply, and not every store takes many in one request."""
    backend, names = _in_memory(tmp_path), [f"v/{number}" for number in range(4)]
    for name in names:
        backend.put(name, [memoryview(b"x")], stamp=STAMP)
    meeting, delete = threading.Barrier(len(names), timeout=30), object_store.obstore.delete

    def met(store: Any, name: Any) -> None:
        if not isinstance(name, str):
            raise NotImplementedError
        meeting.wait()
        delete(store, name)

    monkeypatch.setattr(object_store.obstore, "delete", met)
    backend.delete(*names)
    assert backend.listing("v") == []


def test_a_thousand_objects_are_removed_by_one_request(server: Server, prefix: str) -> None:
    backend, names = proved(prefix), [f"v/{number}" for number in range(1500)]  # most were removed before
    for given, refused in ((names, 0), (names[:3], 1)):
        for name in (*names[:2], "v/other", "w/0"):
            backend.put(name, [memoryview(b"x")], stamp=STAMP)
        with server.planned(times(refused, "501")) as seen:
            backend.delete(*given, "v/")
            asked = len(seen)
        assert asked == (refused + len(given) if refused else 2), "a store takes 1,000 names in one request"
        assert backend.listing("v") == [("other", 1)]
        assert backend.listing("w") == [("0", 1)]


def test_objects_that_cannot_be_removed_are_told(server: Server, prefix: str) -> None:
    backend, names = proved(prefix), [f"v/{number}" for number in range(3)]
    for name in names:
        backend.put(name, [memoryview(b"x")], stamp=STAMP)
    with server.planned(lambda _: "403"), pytest.raises(StorageError, match="refuses"):
        backend.delete(*names)
    assert len(backend.listing("v")) == len(names)
    backend.delete(*names)
    assert backend.listing("v") == []


def test_what_proves_whose_files_they_are_goes_behind_them(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects are removed in any order, and who removes them may die in between."""
    store = claimed(prefix)
    save(store, V1)
    manifest, calls, delete = store.manifest(V1), [], store._backend.delete

    def told(*names: str) -> None:
        calls.append({name.partition("/")[2] for name in names})
        delete(*names)

    monkeypatch.setattr(store._backend, "delete", told)
    store.retire(V1)
    files, parts = {bundle.file for bundle in manifest.bundles}, set(manifest.parts)
    assert files
    assert parts
    assert [call for call in calls if call & (files | parts)] == [files, parts]


def test_manifests_are_read_several_at_once(server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = claimed(prefix)
    for version in (V1, V2, V3):
        save(store, version)
    meeting, read = threading.Barrier(3, timeout=30), store.manifest

    def met(version: Version) -> Manifest:
        meeting.wait()
        if version == V2:
            raise StorageBusy("it does not answer")
        return read(version)

    monkeypatch.setattr(store, "manifest", met)
    moved: list[int] = []
    found = version_vote._find_stored(Inventory((), (), (), (), ()), store, moved.append)
    assert set(found.stored) == {V1, V3}
    assert set(found.unread) == {V2}
    assert moved == [1, 1, 1]


def test_incarnations_fence_in_a_bucket(server: Server, prefix: str) -> None:
    store = claimed(prefix)
    assert store.incarnations.register() == 2
    with pytest.raises(Fenced, match="newer incarnation"):
        save(store, V1)
    store.incarnations.record_resumed(2, None)
    with pytest.raises(Fenced):
        store.incarnations.record_resumed(2, V1)
    assert store.incarnations.lineage() == {2: None}


def test_what_is_left_of_an_uncommitted_version_is_discarded(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = claimed(prefix)
    with monkeypatch.context() as patched:
        patched.setattr(Storage, "commit", lambda *_, **__: None)
        with pytest.raises(VersionNotFound):
            save(store, V1)
    assert store.unfinished() == [V1]
    store.discard(V1)
    assert store.unfinished() == []


def test_a_bucket_that_holds_other_things_is_refused(server: Server, prefix: str) -> None:
    backend = bucket(prefix)
    backend.put("thesis", [memoryview(b"text")], stamp=STAMP)
    with pytest.raises(ForeignDirectory, match="thesis"):
        Storage(backend, Events()).claim()


# Faults between us and the store.


@pytest.mark.parametrize("action", sampled(["500", "429", "lost", "reset"], "lost"))
def test_a_version_is_saved_through_failing_requests(server: Server, prefix: str, action: str) -> None:
    store = claimed(prefix)
    with server.planned(lambda request: action if request.number % 3 == 1 else "") as seen:
        save(store, V1)
        assert verify(store, V1) > 0
    assert len(seen) > 10
    assert store.versions() == [V1]


@pytest.mark.parametrize("action", sampled(["lost", "409"], "409"))
def test_a_commit_whose_reply_is_lost_or_conflicts_is_a_commit(server: Server, prefix: str, action: str) -> None:
    backend = proved(prefix)
    with server.planned(times(1, action, where=lambda request: request.conditional)) as seen:
        first = backend.create("v/manifest", b"content", stamp=STAMP)
    # After a lost reply the object is found with our bytes; after a conflict with nobody it is made anew.
    assert first is (action == "409")
    assert sum(request.conditional for request in seen) == 2
    assert backend.create("v/manifest", b"content", stamp=STAMP) is False
    with pytest.raises(Fenced):
        backend.create("v/manifest", b"other", stamp=STAMP)


def test_a_registration_whose_reply_is_lost_takes_some_free_number(server: Server, prefix: str) -> None:
    store = claimed(prefix)
    with server.planned(times(1, "lost", where=lambda request: request.conditional)):
        number = store.incarnations.register()
    assert number in (2, 3)
    assert store.incarnations.highest() == number


def test_a_stalled_request_ends_and_is_made_again(server: Server, prefix: str) -> None:
    backend = stacked(prefix, timeout_s=0.5)
    backend.prepare()
    backend.put("v/file", [memoryview(b"content")], stamp=STAMP)
    with server.planned(times(1, "stall")) as seen:
        assert backend.read("v/file") == b"content"
    assert len(seen) >= 2


@pytest.mark.parametrize("action", ["cut", "short"])
def test_a_body_that_is_cut_short_is_never_taken_for_the_whole(server: Server, prefix: str, action: str) -> None:
    backend = proved(prefix)
    data = os.urandom(100_000)
    backend.put("v/file", [memoryview(data)], stamp=STAMP)
    with server.planned(times(2, action, where=lambda request: request.method == "GET")) as seen:
        assert backend.read("v/file", length=200_000) == data
    assert len(seen) == 3


def test_a_bit_that_flips_on_the_way_is_found_by_the_digest(server: Server, prefix: str) -> None:
    store = claimed(prefix)
    manifest = save(store, V1)
    with server.planned(times(1, "flip", where=lambda request: request.name.endswith(".safetensors"))):
        with pytest.raises(CorruptError, match="chunk"):
            store.bundles.verify(V1, manifest.bundles[0])
    store.bundles.verify(V1, manifest.bundles[0])


def test_what_fails_for_ever_ends_with_a_reason(server: Server, prefix: str) -> None:
    backend = proved(prefix)
    with server.planned(lambda _: "503") as seen:
        with pytest.raises(StorageBusy, match="given up after 6 attempts"):
            backend.put("v/file", [memoryview(b"x")], stamp=STAMP)
    assert len(seen) == 6
    with pytest.raises(VersionNotFound):
        backend.read("v/file")


def test_what_will_not_pass_is_not_tried_again(server: Server, prefix: str) -> None:
    backend = proved(prefix)
    with server.planned(lambda _: "403") as seen:
        with pytest.raises(StorageError, match="credentials"):
            backend.put("v/file", [memoryview(b"x")], stamp=STAMP)
    assert len(seen) == 1


def test_a_part_that_fails_leaves_no_object(server: Server, prefix: str) -> None:
    backend = bucket(prefix)
    data = memoryview(bytes(2 * PART_BYTES + 1))
    with server.planned(lambda request: "500" if "partNumber=2" in request.path else ""):
        with pytest.raises(StorageBusy):
            backend.put("v/large", [data], stamp=STAMP)
    assert backend.listing("v") == []
    backend.put("v/large", [data], stamp=STAMP)
    assert backend.listing("v") == [("large", len(data))]


def test_a_store_that_ignores_the_condition_is_refused_at_the_start(server: Server, prefix: str) -> None:
    with server.planned(lambda _: "unconditional"):
        with pytest.raises(StorageUnfit, match="exactly once"):
            Storage(stacked(prefix), Events()).claim()
    assert bucket(prefix).listing("") == []


def test_probe_that_shows_late_is_made_again(server: Server, prefix: str) -> None:
    late = ["404"]

    def plan(request: Request) -> str:
        return late.pop() if late and request.method == "GET" and "/probe-" in request.path else ""

    with server.planned(plan):
        Storage(stacked(prefix), Events()).claim()
    assert not late
    assert bucket(prefix).listing(TEMPORARY) == []


def test_a_bucket_that_is_not_there_is_named(server: Server) -> None:
    with pytest.raises(StorageError, match="bucket is not there"):
        open_storage("s3://no-such-bucket/run", Events()).claim()


def test_a_newer_writer_wins_the_race_for_the_commit(server: Server, prefix: str) -> None:
    """Two committers with different content, the reply to the first is lost: one manifest, the other is fenced."""
    backend = proved(prefix)
    answers: list[object] = []

    def commit(data: bytes) -> None:
        try:
            answers.append(backend.create("v/manifest.json", data, stamp=STAMP))
        except Fenced as error:
            answers.append(error)

    with server.planned(lambda request: "lost" if request.conditional and request.number < 2 else ""):
        threads = [threading.Thread(target=commit, args=(data,)) for data in (b"one", b"two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sum(isinstance(answer, Fenced) for answer in answers) == 1
    assert backend.read("v/manifest.json") in (b"one", b"two")


def test_a_commit_whose_reply_was_lost_is_taken_back_if_the_version_was_retired(server: Server, prefix: str) -> None:
    """The committer was paused; others committed the version and retired it. Its own commit then stands alone, and the
    request that is made again is told "the same was there before": by itself.
    """
    store, other = claimed(prefix), Storage(stacked(prefix), Events())
    manifest = save(store, V1)
    store._backend.delete(f"{V1}/manifest.json")
    paused: list[Request] = []

    def plan(request: Request) -> str:
        if request.method == "PUT" and request.name == "manifest.json" and not paused:
            paused.append(request)
            other.commit(manifest, stamp=STAMP)
            other.retire(V1)
            return "lost"
        return ""

    with server.planned(plan), pytest.raises(Fenced, match="retired while we were paused"):
        store.commit(manifest, stamp=STAMP)
    assert paused
    assert store.versions() == []
    assert store._backend.listing(str(V1)) == []


def test_a_bucket_that_is_gone_is_not_an_empty_one(server: Server) -> None:
    backend = object_store.open_bucket("s3://no-such-bucket/prefix")
    for look in (lambda: backend.read("v/file", length=1), lambda: backend.listing("v"), lambda: backend.listing("")):
        with pytest.raises(StorageError, match="bucket is not there"):
            look()


def test_a_listing_that_is_not_found_is_not_an_empty_one(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gateways answer for a bucket that they cannot reach: of a prefix that is empty a store says that it is."""
    backend = proved(prefix)
    backend.put("v/file", [memoryview(b"x")], stamp=STAMP)
    for directory in ("v", ""):
        with server.planned(lambda _: "404"), pytest.raises(StorageBusy, match="given up after"):
            backend.listing(directory)
    assert backend.listing("v") == [("file", 1)]
    assert backend.listing("w") == []

    def not_found(*_: object) -> None:
        raise FileNotFoundError("no such listing")

    monkeypatch.setattr(object_store.obstore, "list_with_delimiter", not_found)
    with pytest.raises(StorageBusy, match="what it holds"):  # as other stores' clients may say the same
        backend.listing("v")


# One job at a time.


def test_a_second_job_on_a_prefix_is_refused_and_told_by_whom(server: Server, prefix: str) -> None:
    first, second = (Storage(stacked(prefix), Events()) for _ in range(2))
    first.claim()
    first.run_lock.take("first")
    first.run_lock.take("first", timeout_s=0.1)  # again is fine
    with pytest.raises(InUse, match=f"process {os.getpid()} .*'first'"):
        second.run_lock.take("second", timeout_s=0.1)
    first.run_lock.release()
    second.run_lock.take("second", timeout_s=0.1)
    second.run_lock.release()


@MORE
def test_the_lock_of_a_dead_process_of_this_machine_is_taken_over(server: Server, prefix: str) -> None:
    code = (
        "import sys; from holdfast.base.events import Events; from holdfast.tiers.storage.version_store import open_storage\n"
        "store = open_storage(sys.argv[1], Events()); store.claim(); store.run_lock.take('dead'); import os; os._exit(1)"
    )
    url = f"s3://{BUCKET}/{prefix}"
    assert subprocess.run([sys.executable, "-c", code, url], timeout=60).returncode == 1
    store = open_storage(url, Events())
    store.claim()
    assert [name for name, _ in store._backend.listing(LOCKS)] == ["000001"]
    store.run_lock.take("next", timeout_s=5)
    assert [name for name, _ in store._backend.listing(LOCKS)] == ["000002"]
    store.run_lock.release()
    assert store._backend.listing(LOCKS) == [("000002", 0)], "it stays taken, and is free"


def test_a_holder_elsewhere_is_dead_when_its_beat_stands_still(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = proved(prefix)
    away = LeaseLock(backend, renew_s=0.05)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("holdfast.tiers.storage.bucket_lease.machine_id", lambda: "another")
        away.take("away", timeout_s=1)
    here = LeaseLock(backend, renew_s=0.05, lease_s=1.0)
    with pytest.raises(InUse, match="away"):
        here.take("here", timeout_s=0.1)  # its beats go on
    away._stop.set()  # its process ends without a word, and without a request that is still on its way
    assert away._thread is not None
    away._thread.join(30)
    here.take("here", timeout_s=0.1)
    away.release()  # a zombie gives back what is no longer its own
    ((name, size),) = backend.listing(LOCKS)
    assert (name, size > 0) == ("000002", True)
    here.release()
    assert backend.listing(LOCKS) == [("000002", 0)]


def dead_lock(backend: Backend) -> None:
    """The lock of a job whose machine is gone."""
    words = b'{"pid": 1, "machine": "elsewhere", "host": "gone", "run_id": "dead", "key": "k", "beat": 7}\n'
    backend.put(f"{LOCKS}/000001", [memoryview(words)], stamp=STAMP)


class Challenger:
    """A job that asks for the lock in a thread of its own."""

    def __init__(self, prefix: str, run_id: str) -> None:
        self.lock = LeaseLock(stacked(prefix, timeout_s=30.0), renew_s=0.05, lease_s=0.3)
        self.answer: object = None
        self.thread = threading.Thread(target=self._take, args=(run_id,), daemon=True)
        self.thread.start()

    def _take(self, run_id: str) -> None:
        try:
            self.lock.take(run_id, timeout_s=0.1)
            self.answer = True
        except InUse as error:
            self.answer = error

    def end(self) -> object:
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.lock.release()
        return self.answer


def held_back(name: str, arrived: threading.Event, go_on: threading.Event) -> Callable[[Request], str]:
    """The first request that writes `name`, or removes it, is on its way until it may go on."""
    taken: list[Request] = []

    def plan(request: Request) -> str:
        if request.name == name and request.method in ("PUT", "DELETE") and not taken:
            taken.append(request)
            arrived.set()
            assert go_on.wait(30)
        return ""

    return plan


def test_of_two_challengers_of_a_dead_holder_one_gets_the_lock(server: Server, prefix: str) -> None:
    """The request of the first is slow, or was lost and is made again: by then the second is there."""
    backend = proved(prefix)
    dead_lock(backend)
    arrived, go_on = threading.Event(), threading.Event()
    with server.planned(held_back("000002", arrived, go_on)):
        slow = Challenger(prefix, "slow")
        assert arrived.wait(30)
        quick = LeaseLock(stacked(prefix), renew_s=0.05, lease_s=0.3)
        quick.take("quick", timeout_s=0.1)
        go_on.set()
        answer = slow.end()
    assert isinstance(answer, InUse)
    assert "run 'quick'" in answer.what
    assert b'"quick"' in backend.read(f"{LOCKS}/000002")
    quick.release()


def test_who_slept_over_several_holders_does_not_get_the_lock(server: Server, prefix: str) -> None:
    """The name that it was about to create was taken, given back and removed meanwhile."""
    backend = proved(prefix)
    dead_lock(backend)
    arrived, go_on = threading.Event(), threading.Event()
    with server.planned(held_back("000002", arrived, go_on)):
        slow = Challenger(prefix, "slow")
        assert arrived.wait(30)
        for run_id in ("second", "third"):
            lock = LeaseLock(stacked(prefix), renew_s=0.05, lease_s=0.3)
            lock.take(run_id, timeout_s=0.1)
            if run_id == "second":
                lock.release()
        assert [name for name, _ in backend.listing(LOCKS)] == ["000003"]
        go_on.set()
        answer = slow.end()
    assert isinstance(answer, InUse)
    assert "run 'third'" in answer.what
    lock.release()


def test_a_lock_is_taken_once_though_its_reply_is_lost(server: Server, prefix: str) -> None:
    backend = proved(prefix)
    dead_lock(backend)
    with server.planned(times(1, "lost", where=lambda r: r.method == "PUT" and r.name == "000002")):
        lock = LeaseLock(stacked(prefix), renew_s=0.05, lease_s=0.3)
        lock.take("mine", timeout_s=0.1)
    lock.take("mine", timeout_s=0.1)
    lock.release()
    assert backend.listing(LOCKS) == [("000002", 0)]


@pytest.mark.parametrize("how", sampled(["taken", "removed"], "taken"))
def test_a_holder_that_lost_its_lock_says_so_and_writes_nothing(
    server: Server, prefix: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = proved(prefix)
    sleeper = LeaseLock(backend, renew_s=30.0)
    sleeper.take("sleeper", timeout_s=0.1)
    if how == "taken":
        backend.create(f"{LOCKS}/000002", b'{"pid": 7, "host": "h", "run_id": "next"}\n', stamp=STAMP)
    else:
        backend.delete(f"{LOCKS}/000001")
    sleeper._renew_s = 0.01
    sleeper._renew(1, {"beat": 0})  # what its thread does when it wakes; it ends
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert ("taken by process 7 on h, run 'next'" if how == "taken" else "was removed") in record.getMessage()
    before = backend.listing(LOCKS)
    sleeper.release()
    assert backend.listing(LOCKS) == before


# The whole house on a bucket.


def test_keepers_persist_to_a_bucket_and_commands_look_at_it_without_torch(
    server: Server, prefix: str, tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/{prefix}"
    with rig_in(tmp_path, num_nodes=2, root=url) as rig:
        trainers = rig.start()
        version = save_all(trainers, 7, durable=True)
        reached(trainers, version, Level.DURABLE)
    code = (
        "import sys; from holdfast.cli.cli import app\n"
        "for words in (['ls'], ['inspect'], ['verify'], ['doctor']):\n"
        "    app([*words, sys.argv[1], '--json'], standalone_mode=False)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    listed, inspected, verified, checked = _documents(answer.stdout)
    assert [row["version"] for row in listed["versions"]] == [str(version)]
    assert inspected["version"] == str(version)
    assert verified["healthy"] is True
    assert {check["name"]: check["state"] for check in checked["checks"]}["create once"] == "good"


def test_the_doctor_refuses_a_store_without_conditional_puts(
    server: Server, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server.planned(lambda _: "unconditional"):
        assert doctor.doctor(f"s3://{BUCKET}/{prefix}", as_json=True) == 1
    states = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert states["create once"]["state"] == "problem"
    assert "If-None-Match" in states["create once"]["remedy"]


def _documents(text: str) -> list[dict[str, Any]]:
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        document, at = decoder.raw_decode(text, at)
        found.append(document)
        at += 1
    return found


# Addresses.


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///prefix", "s3://key:secret@bucket/prefix", "s3://bucket/prefix?X-Amz-Signature=secret"]
)
def test_addresses_with_secrets_or_without_a_bucket_are_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage(url, Events())
    assert "?" not in str(caught.value)


def test_without_obstore_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert INSTALLED
    monkeypatch.setattr("holdfast.tiers.backends.object_store.INSTALLED", False)
    with pytest.raises(ConfigError, match="pip install obstore"):
        open_storage("s3://bucket/prefix", Events())


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "az://container/prefix"])
def test_google_and_azure_are_opened_by_the_same_door(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened only: their clients are obstore's, and no server of theirs ran here."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    assert open_storage(url, Events()).where == url


def test_requests_are_bounded_by_what_was_asked_for_and_made_again_by_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a stand-in for obstore's door: how long a stalled request takes is not asserted where a machine may be slow."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(object_store, "from_url", lambda _, **options: asked.append(options))
    object_store.open_bucket("s3://bucket/prefix", timeout_s=0.5)
    object_store.open_bucket("s3://bucket/prefix")
    assert [options["client_options"]["timeout"] for options in asked] == [
        "0.5s", f"{object_store.REQUEST_TIMEOUT_S}s"
    ]  # fmt: skip
    assert all(options["retry_config"] == {"max_retries": 0} for options in asked)


def test_a_signature_never_reaches_a_message() -> None:
    words = object_store._words(ValueError("PUT https://a.blob.core.windows.net/c/x?sig=SECRET&se=1 in 3ms"))
    assert "SECRET" not in words
    assert "3ms" in words


def requests_of_a_durable_version(server: Server, prefix: str, kept: int) -> list[Request]:
    """What is asked of the bucket for one more version, retention included, where `kept` are kept for good beside the newest."""
    store = claimed(prefix)
    retirement, assembly = (
        RetentionRunner(Events()),
        Assembly(1, "x", store.job_id(), Topology(("n",), (0,)), (), keep_every=1),
    )
    for step in range(1, kept + 1):
        save(store, Version(1, step))
    with server.planned(lambda _: "") as seen:
        for step in (kept + 1, kept + 2):  # the first after a start looks at all of them
            seen.clear()
            save(store, Version(1, step))
            retirement.after(store, Version(1, step), assembly, None)
        asked = list(seen)
    assert len(store.versions()) == kept + 2
    return asked


def test_a_durable_version_costs_as_many_requests_however_many_are_kept(server: Server) -> None:
    few, many = (requests_of_a_durable_version(server, f"kept-{kept}", kept) for kept in (2, 14))
    assert len(many) == len(few), [f"{request.method} {request.path}" for request in many]
    assert sum("list-type" in request.path for request in many) <= 16
