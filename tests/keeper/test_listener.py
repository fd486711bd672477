"""Nodes that meet over TCP: proved by the job's secret, or turned away; who is in is served whatever stands outside."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.base.errors import ConfigError, Fenced, HoldfastError, KeeperError, KeeperLost
from holdfast.base.events import Events
from holdfast.checkpoint.job.keeper_link import KeeperLink, Origin
from holdfast.core.model import Level, Version
from holdfast.core.rank_runs import spread
from holdfast.core.recovery.version_choice import Facts, choose_version, fetches
from holdfast.core.versions.coordinator_board import Announcement, Kind
from holdfast.core.versions.node_ledger import Reports
from holdfast.keeper.rpc import messages, server
from holdfast.keeper.rpc.caller import Caller, dial
from holdfast.keeper.rpc.client import Located
from holdfast.keeper.rpc.listener import Network
from holdfast.tiers.wire import frames, tcp, tls
from holdfast.tiers.wire.tls import MAX_UNPROVED_BYTES, Credentials, read_secret
from keeper.rig import Rig, Trainer, eventually, image_of, reached, save_all
from keepers_kit import open_files
from kit.nodes import facts_of, reborn, restored
from kit.secrets import SECRET
from sample_kit import MORE, sampled

MakeRig = Callable[..., Rig]
MAX_STRANGERS = frames.MAX_CONNECTIONS


@pytest.fixture
def remote_rig(make_rig: MakeRig, secret_file: Path) -> MakeRig:
    """Rigs whose keepers meet over TCP on loopback."""

    def make(**options: object) -> Rig:
        return make_rig(listen="127.0.0.1", secret_file=str(secret_file), **options)

    return make


def proof(rig: Rig, *, role: str = messages.KEEPER, secret: bytes = SECRET, job: str | None = None) -> Credentials:
    return Credentials(secret, role=role, job=job or rig.keeper(0).job, node="n9")


def keeper_hello(rig: Rig, **fields: object) -> messages.Hello:
    facts = {"role": messages.KEEPER, "node": 1, "incarnation": rig.incarnation, "job_id": rig.job_id}
    return messages.Hello(job=rig.keeper(0).job, **{**facts, **fields})


@contextlib.contextmanager
def caller_to(address: str, hello: messages.Hello, security: frames.Security | None) -> Iterator[Caller]:
    caller = dial(address, hello, timeout_s=5, on_push=lambda _: None, on_lost=lambda _: None, security=security)
    try:
        yield caller
    finally:
        caller.close()


def plain(address: str) -> socket.socket:
    return socket.create_connection(tcp.parse(address), timeout=30)


def until_cut_off(sock: socket.socket) -> bytes:
    seen = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while part := sock.recv(4096):
            seen += part
    return seen


def test_a_lost_node_comes_back_over_the_network(remote_rig: MakeRig) -> None:
    rig = remote_rig(num_nodes=3, per_node=2, own_bytes=1 << 20)
    trainers = rig.start()
    assert all(address.startswith("tcp:127.0.0.1:") for address in rig.assembly().addresses)
    for step in range(3):
        version = save_all(trainers, step, durable=step == 2)
        reached(trainers, version, Level.REPLICATED)
    reached(trainers, version, Level.DURABLE)

    lost = [trainer for trainer in trainers if trainer.node == 1]
    os.kill(lost[0].client.welcome.pid, signal.SIGKILL)
    for trainer in trainers:
        trainer.client.close()
    rig.next_incarnation(version)
    back = [reborn(rig, rank) for rank in range(6)]

    facts = facts_of(rig, back[0].client.inventory())
    assert all(restored(trainer, facts)[0] == version for trainer in back)


def test_a_keeper_in_the_place_of_a_killed_one_listens_on_the_same_port(remote_rig: MakeRig) -> None:
    rig = remote_rig(num_nodes=2)
    rig.start()
    before = rig.address(1)
    os.kill(rig.pid_of(rig.keeper(1)), signal.SIGKILL)
    eventually(lambda: rig.address(1) == before)


STRANGER = """
import socket, sys
with socket.socket() as sock:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", int(sys.argv[1])))
        sock.listen()
        print("taken", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def stranger(port: int) -> Iterator[str]:
    """A process that has nothing to do with us tries to get the port, and keeps it; what became of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", STRANGER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()


@pytest.mark.parametrize("lost", sampled([0, 1], 0), ids=["the coordinator", "another node"])
def test_nobody_gets_the_port_of_a_killed_keeper_while_its_ranks_live(remote_rig: MakeRig, lost: int) -> None:
    rig = remote_rig(num_nodes=2)
    rig.next_incarnation()
    assembly = rig.assembly()
    trainers, links = [rig.trainer(rank) for rank in range(2)], []
    for trainer in trainers:
        trainer.client.close()
        links.append(
            KeeperLink(
                rig.root, rig.config_of(trainer.node), rank=trainer.rank, events=Events(), on_appointment=lambda _: None
            )
        )
        trainer.client = links[-1].open()
        trainer.join(assembly)
        trainer.client.resume(rig.incarnation, None)
        links[-1].assembly, links[-1].layout, links[-1].resumed = (
            assembly,
            trainer.layout,
            Origin(rig.incarnation, None),
        )
    reached(trainers, save_all(trainers, 0), Level.REPLICATED)
    port = tcp.parse(assembly.addresses[lost])[1]

    os.kill(trainers[lost].client.welcome.pid, signal.SIGKILL)
    eventually(lambda: not trainers[lost].client.alive)
    with stranger(port) as became:
        assert links[lost].wait_mended(20)
        trainers[lost].client = links[lost].require()
        rig.pids.add(trainers[lost].client.welcome.pid)
        reached(trainers, save_all(trainers, 1), Level.REPLICATED)  # each pulls from the other, at the old address
        assert became == os.strerror(errno.EADDRINUSE)
    for link in links:
        link.close(finished=True)

    def is_free() -> bool:
        with stranger(port) as became:
            return became == "taken"

    eventually(is_free)  # who is gone holds nothing; the keeper that was mended ends by itself


def test_a_port_on_which_another_keeper_listens_is_not_shared() -> None:
    with tcp.listen("127.0.0.1") as first:
        port = first.getsockname()[1]
        with tcp.listen("127.0.0.1", (port, 0)) as second:
            assert second.getsockname()[1] != port


# --- who is not let in


def test_without_a_secret_nothing_listens_and_all_interfaces_are_asked_for_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs the job's secret"):
        Network(listen="127.0.0.1")
    for address in ("0.0.0.0", "::", "*"):
        with pytest.raises(ConfigError, match="every interface") as told:
            Network(listen=address, secret=SECRET)
        assert "--" not in told.value.remedy, "it is a setting, and no flag of a command"
        Network(listen=address, secret=SECRET, unsafe=True)
    assert SECRET.hex() not in repr(Network(secret=SECRET))


def test_a_keeper_without_an_address_has_no_tcp_socket(make_rig: MakeRig) -> None:
    rig = make_rig()
    pid = rig.pid_of(rig.keeper(0))
    inodes = open_files(pid)
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    assert not [line for line in lines if f"socket:[{line[9]}]" in inodes]


def test_a_secret_is_of_ours_alone_or_refused_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET.hex())
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="ours alone"):
        read_secret(str(path))
    path.chmod(0o600)
    assert read_secret(str(path)) == SECRET
    path.write_text("zz" + SECRET.hex()[2:])
    with pytest.raises(ConfigError) as caught:
        read_secret(str(path))
    assert SECRET.hex()[2:10] not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_secret(str(tmp_path / "none"))
    reader, writer = os.pipe()
    os.write(writer, SECRET.hex().encode())
    assert read_secret(f"fd:{reader}") == SECRET
    os.close(reader)
    os.close(writer)


def test_the_secret_is_in_no_argument_environment_or_log(remote_rig: MakeRig) -> None:
    rig = remote_rig()
    place = rig.keeper(0)
    process = Path(f"/proc/{rig.pid_of(place)}")
    for text in (process / "cmdline", process / "environ", place.log):
        assert SECRET.hex().encode() not in text.read_bytes()


def test_the_keys_command_is_in_no_argument_or_log(make_rig: MakeRig) -> None:
    """It may have the key among its words. The keeper gets it, for what it writes is encrypted."""
    key = "ab" * 32
    rig = make_rig(encryption_key=f"!sh -c 'echo {key}' --token=t0ken")
    place = rig.keeper(0)
    process = Path(f"/proc/{rig.pid_of(place)}")
    for text in (process / "cmdline", place.log):
        assert key.encode() not in text.read_bytes()
        assert b"t0ken" not in text.read_bytes()
    trainers = rig.start()
    version = save_all(trainers, 7, durable=True)
    reached(trainers, version, Level.DURABLE)
    assert list(Path(rig.root).glob("*/*.encrypted2"))
    limits = (process / "limits").read_text()
    assert re.search(r"Max core file size +1 +1 ", limits), "a core dump would hold the key"


def test_who_answers_must_be_a_keeper(remote_rig: MakeRig) -> None:
    rig = remote_rig()
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        channel = frames.Channel(sock, where="a viewer")
        with contextlib.suppress(HoldfastError):
            channel.secure(proof(rig, role=messages.VIEWER), server=True, timeout_s=5)
        channel.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(KeeperError, match="no keeper, but a viewer"):
            with caller_to(f"tcp:127.0.0.1:{listener.getsockname()[1]}", keeper_hello(rig), proof(rig)):
                pass
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # in case that nobody came
        thread.join()
        listener.close()


# A server in a PID namespace of its own: the kernel names no process for a client outside of it.
IN_A_NAMESPACE = """
import socket, struct, sys
from holdfast.tiers.wire.frames import Channel
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
client, _ = listener.accept()
pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
print(pid, Channel(client, where="here").is_remote, flush=True)
"""


@pytest.mark.root
def test_a_process_of_another_pid_namespace_is_local(tmp_path: Path) -> None:
    """It is let in at the Unix socket all the same, as one of this machine: it need not prove itself as strangers do."""
    path = str(tmp_path / "socket")
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", IN_A_NAMESPACE, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        if not server.stdout.readline():
            assert "unshare failed" in server.communicate()[1]
            pytest.skip("no PID namespaces here")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            assert server.communicate(timeout=60)[0].split() == ["0", "False"]


def misnamed(rig: Rig) -> Credentials:
    """Signed by this job's authority, in the name of another job."""
    made = proof(rig)
    root, own = tls._issue(SECRET, rig.keeper(0).job, f"holdfast:{messages.KEEPER}:{'0' * 16}:n9")
    made._contexts = {server: tls._context(server, root, own) for server in (True, False)}
    return made


def strangers(rig: Rig) -> dict[str, frames.Security]:
    return {
        "another secret": proof(rig, secret=bytes(32)),
        "the same secret in another job": proof(rig, job="0" * 16),
        "another job's name": misnamed(rig),
    }


def test_who_does_not_hold_the_secret_is_nobody(remote_rig: MakeRig) -> None:
    rig = remote_rig()
    rig.start()
    address = rig.address(0)
    for security in strangers(rig).values():
        with pytest.raises(KeeperLost), caller_to(address, keeper_hello(rig), security):
            pass
    with pytest.raises(KeeperLost, match="secret only"), caller_to(address, keeper_hello(rig), None):
        pass
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    with plain(address) as sock, anonymous.wrap_socket(sock) as wrapped, pytest.raises(ssl.SSLError):
        wrapped.recv(1)  # in TLS 1.3 the refusal of a missing certificate arrives after the handshake
    with caller_to(address, keeper_hello(rig), proof(rig)) as caller:
        assert isinstance(caller.call(messages.Ping(), timeout_s=5)[0], messages.Ok)


def test_the_role_is_the_one_in_the_certificate(remote_rig: MakeRig) -> None:
    rig = remote_rig()
    rig.start()
    address, place = rig.address(0), rig.keeper(0)
    for role in (messages.RANK, messages.VIEWER, messages.OPERATOR):
        with pytest.raises(KeeperError, match="the greeting of a keeper"):
            with caller_to(address, keeper_hello(rig), proof(rig, role=role)):
                pass
    with pytest.raises(KeeperError, match="the greeting of a operator"):
        with caller_to(address, keeper_hello(rig, role=messages.OPERATOR), proof(rig, role=messages.VIEWER)):
            pass
    with pytest.raises(KeeperError, match="own node"):
        with caller_to(address, keeper_hello(rig, role=messages.RANK, rank=0), proof(rig, role=messages.RANK)):
            pass
    with pytest.raises(KeeperError, match="proves itself"):
        with caller_to(place.address, keeper_hello(rig), None):
            pass


FORBIDDEN = {
    messages.RANK: (
        messages.Report(node=0, incarnation=1, reports=Reports()),
        messages.Pull(version=Version(1, 1), bundle_id="x", start=0, length=1),
        messages.AskSeals(version=Version(1, 1), bundle_ids=()),
        messages.News(incarnation=1, announcement=Announcement(Kind.DURABLE, Version(1, 1), "says a rank")),
    ),
    messages.OPERATOR: (messages.Report(node=0, incarnation=1, reports=Reports()), messages.Goodbye(finished=True)),
    messages.VIEWER: (messages.Condemn(version=Version(1, 1), bundle_id="x", node=0, reason=""), messages.Ping()),
    messages.KEEPER: (messages.Goodbye(finished=True), messages.Abandon(version=Version(1, 1), reason="")),
}


def test_no_role_speaks_for_another(remote_rig: MakeRig) -> None:
    rig = remote_rig()
    rig.start()[0].client.close()
    address, place = rig.address(0), rig.keeper(0)
    for role, forbidden in FORBIDDEN.items():
        remote = role != messages.RANK
        hello = keeper_hello(rig, role=role, rank=0)
        with caller_to(
            address if remote else place.address, hello, proof(rig, role=role) if remote else None
        ) as caller:
            for message in forbidden:
                with pytest.raises(KeeperError, match="may not say"):
                    caller.call(message, timeout_s=5)
            assert caller.call(messages.AskStatus(), timeout_s=5)


NONSENSE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    struct.pack(">I", 20) + b"\x82\xa2is\xa5hello",
    os.urandom(4096),
    b"\x16\x03\x01\x00\x05hello",
    b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb" + bytes(MAX_UNPROVED_BYTES),  # a hello of 16 KiB, of which 2 arrive
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=["http", "frame", "noise", "not-a-hello", "long-hello"])
def test_nonsense_is_cut_off_at_once(remote_rig: MakeRig, nonsense: bytes) -> None:
    rig = remote_rig()
    started = time.monotonic()
    with plain(rig.address(0)) as sock:
        sock.sendall(nonsense)
        assert b"welcome" not in until_cut_off(sock)
    assert time.monotonic() - started < frames.HELLO_TIMEOUT_S  # not by the clock
    assert rig.status(0)["node"] == "n0"


@pytest.mark.slow
def test_who_trickles_before_the_proof_is_cut_off_in_time(remote_rig: MakeRig) -> None:
    rig = remote_rig()
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            for byte in b"\x16\x03\x01\x01\x00" + bytes(256):
                slow.sendall(bytes([byte]))
                if stop.wait(0.2):
                    return

    with plain(rig.address(0)) as slow:
        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert until_cut_off(slow) == b""
        finally:
            stop.set()
            thread.join()
    assert rig.status(0)["node"] == "n0"


def test_recorded_bytes_are_worth_nothing(remote_rig: MakeRig) -> None:
    """A man in the middle keeps what a keeper said, and says it again."""
    rig = remote_rig()
    rig.start()
    said: list[bytes] = []
    with relay(rig.address(0), said) as address, caller_to(address, keeper_hello(rig), proof(rig)) as caller:
        caller.call(messages.Ping(), timeout_s=5)
    assert sum(map(len, said)) > 500
    with plain(rig.address(0)) as sock:
        for part in said:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(part)
        assert b"welcome" not in until_cut_off(sock)
    assert rig.status(0)["node"] == "n0"


@contextlib.contextmanager
def relay(address: str, said: list[bytes]) -> Iterator[str]:
    """Passes on one connection, and keeps what the client said."""
    listener = tcp.listen("127.0.0.1")
    listener.setblocking(True)
    listener.settimeout(10)

    def pump(source: socket.socket, target: socket.socket, keep: list[bytes] | None) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                if keep is not None:
                    keep.append(part)
                target.sendall(part)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        client, _ = listener.accept()
        with client, plain(address) as server:
            back = threading.Thread(target=pump, args=(server, client, None))
            back.start()
            pump(client, server, said)
            back.join()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield tcp.name(*listener.getsockname()[:2])
    finally:
        thread.join(15)
        listener.close()


def test_a_flood_of_strangers_delays_nobody_who_is_proved(remote_rig: MakeRig) -> None:
    rig = remote_rig(num_nodes=2)
    trainers = rig.start()
    address = rig.address(0)
    with caller_to(address, keeper_hello(rig), proof(rig)) as caller:
        crowd = [plain(address) for _ in range(4 * frames.MAX_CONNECTIONS)]
        try:
            caller.call(messages.Ping(), timeout_s=5)
            reached(trainers, save_all(trainers, 1), Level.REPLICATED)  # new lines between the keepers, too
            with caller_to(address, keeper_hello(rig), proof(rig)) as late:
                late.call(messages.Ping(), timeout_s=5)
        finally:
            for sock in crowd:
                sock.close()
    assert "turned away" not in rig.keeper(0).log.read_text(), "the oldest of the strangers gives up its place"


def test_each_stranger_beyond_the_places_costs_another_one_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come faster than those that were cut off are noticed to be."""
    monkeypatch.setattr(server.ThreadPool, "lend", lambda *_: None)
    keeper = server.Server(tmp_path / "s", None)  # type: ignore[arg-type]
    strangers = [frames.Channel(socket.socket(socket.AF_INET), where="a stranger") for _ in range(MAX_STRANGERS + 9)]
    for stranger in strangers:
        assert keeper._accept(lambda taken=stranger: taken)  # type: ignore[misc]
    assert [stranger.is_cut for stranger in strangers] == [True] * 9 + [False] * MAX_STRANGERS
    for stranger in strangers:
        stranger.close()
    keeper._listener.close()
    keeper._poll.close()
    os.close(keeper._wake)


def test_two_thousand_late_reports_of_a_dead_incarnation_have_no_effect(remote_rig: MakeRig) -> None:
    """What queued in a partition arrives after it healed."""
    rig = remote_rig()
    (trainer,) = rig.start()
    with caller_to(rig.address(0), keeper_hello(rig), proof(rig)) as caller:
        old = rig.incarnation
        rig.next_incarnation()
        trainer.client.assemble(rig.assembly())
        trainer.client.resume(rig.incarnation, None)
        before = rig.status(0)["versions"]
        fenced = 0
        for step in range(1000):
            late = Version(old, step)
            reports = Reports(replicas=((late, ("x",)),), abandoned=((late, 0, "late"),), due=(late,))
            for message in (
                messages.Report(node=1, incarnation=old, reports=reports),
                messages.AskSeals(version=late, bundle_ids=("x",)),
            ):
                with pytest.raises(Fenced):
                    caller.call(message, timeout_s=5)
                fenced += 1
        assert fenced == 2000
        assert rig.status(0)["versions"] == before
    with pytest.raises(Fenced), caller_to(rig.address(0), keeper_hello(rig, incarnation=old), proof(rig)):
        pass


# --- replicas


def test_after_a_restore_every_bundle_is_in_two_nodes_again_without_being_asked(remote_rig: MakeRig) -> None:
    rig = remote_rig(num_nodes=3, per_node=2, own_bytes=3 << 20)
    trainers = rig.start()
    for step in range(2):
        version = save_all(trainers, step)
        reached(trainers, version, Level.REPLICATED)
    os.kill(rig.pid_of(rig.keeper(1)), signal.SIGKILL)
    for trainer in trainers:
        trainer.client.close()
    rig.next_incarnation(version)
    back = [reborn(rig, rank) for rank in range(6)]
    facts = facts_of(rig, back[0].client.inventory())
    assert all(restored(trainer, facts)[0] == version for trainer in back)
    for trainer in back:
        trainer.client.release()
        trainer.client.resume(rig.incarnation, version)

    bundles = {bundle.bundle_id for trainer in back for bundle in trainer.bundles}

    def whole() -> bool:
        copies = {
            (c.seal.bundle_id, node)
            for c in back[0].client.inventory().copies
            if c.version == version
            for node in spread(c.nodes)
        }
        return all(sum(name == bundle for name, _ in copies) >= 2 for bundle in bundles)

    eventually(whole)
    assert rig.status(0)["replication"]["pulled_bytes"] > 0  # of the node that came back empty: it saved nothing yet


def test_what_is_sent_is_what_one_node_holds_and_the_status_says_so(remote_rig: MakeRig) -> None:
    rig = remote_rig(num_nodes=3, per_node=2, own_bytes=1 << 20)
    trainers = rig.start()
    for step in range(3):
        version = save_all(trainers, step)
        reached(trainers, version, Level.REPLICATED)
    lonely = 2 * rig.own_bytes  # two ranks a node; what they share has twins
    facts = [rig.status(node)["replication"] for node in range(3)]
    images = {bundle.bundle_id: image_of(bundle, 0) for trainer in trainers for bundle in trainer.bundles}
    sent = sum(len(image) for trainer in trainers for bundle in trainer.mine for image in [images[bundle.bundle_id]]
               if len(bundle.ranks) == 1)  # fmt: skip
    assert [row["unique_bytes"] for row in facts] == [lonely] * 3
    assert [row["kept_bytes"] for row in facts] == [lonely] * 3
    assert sum(row["sent_bytes"] for row in facts) == 3 * sent
    assert sum(row["pulled_bytes"] for row in facts) == 3 * sent
    assert [row["behind_versions"] for row in facts] == [0] * 3


def obtained(trainer: Trainer, facts: Facts) -> list[Located]:
    choice = choose_version(facts).value
    assert choice is not None
    return trainer.client.obtain(choice.version, fetches(choice, trainer.rank, facts), timeout_s=20)


@MORE
def test_a_bound_on_replicas_delays_them_and_no_restore(remote_rig: MakeRig) -> None:
    rig = remote_rig(num_nodes=2, own_bytes=6 << 20, replicate_bandwidth="4MiB")
    trainers = rig.start()
    version = save_all(trainers, 1)
    reached(trainers, version, Level.CAPTURED)
    reached(trainers, version, Level.REPLICATED)
    paced_s = rig.status(0)["replication"]["last_seconds"]
    assert paced_s > 1.0  # 6 MiB at 4 MiB/s, a burst allowed
    os.kill(rig.pid_of(rig.keeper(1)), signal.SIGKILL)
    for trainer in trainers:
        trainer.client.close()
    rig.next_incarnation(version)
    back = [reborn(rig, rank) for rank in range(2)]
    located = obtained(back[1], facts_of(rig, back[1].client.inventory()))
    assert sum(item.seconds for item in located) < 0.8 * paced_s


@pytest.mark.root
def test_another_user_reaches_neither_the_socket_nor_the_memory_nor_the_secret(remote_rig: MakeRig) -> None:
    """A second uid on the same machine, which may pass the directories above ours."""
    rig = remote_rig()
    (trainer,) = rig.start()
    reached([trainer], trainer.save(1), Level.CAPTURED)
    place, pid = rig.keeper(0), rig.pid_of(rig.keeper(0))
    rig.base.chmod(0o755)
    secret = rig.base / "secret"
    secret.touch(0o600)

    def refused(attempt: Callable[[], object]) -> bool:
        try:
            attempt()
        except PermissionError:
            return True
        return False

    attempts = (
        lambda: plain_unix(place.socket),
        lambda: os.listdir(place.directory),
        place.log.read_text,
        lambda: os.listdir(f"/proc/{pid}/fd"),
        lambda: Path(f"/proc/{pid}/environ").read_bytes(),
        secret.read_text,
        lambda: os.kill(pid, signal.SIGTERM),
    )
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os._exit(sum(1 << index for index, attempt in enumerate(attempts) if not refused(attempt)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # One who got hold of a descriptor of the socket's directory still meets the socket's mode, and then the kernel's word on
    # who he is: a whole hello, to which our own user has an answer, gets none.
    hello = frames._framed(messages.encode(messages.Hello(job=place.job, role=messages.VIEWER)))
    assert answer_to(plain_unix(place.socket), hello), "our own user has one"
    for directory in (place.directory, place.directory.parent, place.runtime):
        directory.chmod(0o711)
    for is_open in (False, True):
        if is_open:
            place.socket.chmod(0o666)
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            if is_open:
                os._exit(bool(answer_to(plain_unix(place.socket), hello)))
            os._exit(not refused(lambda: plain_unix(place.socket)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, is_open
    for directory in (place.directory, place.directory.parent, place.runtime):
        directory.chmod(0o700)


def plain_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    return sock


def answer_to(sock: socket.socket, said: memoryview) -> bytes:
    """The first bytes that come back, or none where the line is cut off."""
    sock.settimeout(60)
    with sock, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.sendall(said)
        return sock.recv(4096)
    return b""
