"""Mutual TLS between the nodes of one job, out of one secret: who does not hold it is nobody.

    secret (256 bits) --HKDF-SHA256, job digest--> Ed25519 key of the job's authority, the same on every node
    authority --signs--> certificate of this process: a fresh key, and `holdfast:<role>:<job>:<node>` as its name

TLS 1.3 only, both ends prove themselves, no tickets (nothing to resume, nothing to replay). The authority of another
job, or of another secret of the same job, is another key, so an old secret is refused like a wrong one, by a signature
check and not by comparing anything secret. Certificates never expire: no decision rests on a clock, and a secret lasts
as long as its job. Keys never touch a disk or an argument list.

Before the proof a peer may send 2 KiB at most (its hello, its certificate, and the first frame that may follow at
once), and what does not begin like TLS is cut off at its first byte.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import select
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.base import private
from holdfast.base.errors import ConfigError, KeeperError
from holdfast.base.handler_errors import pass_on
from holdfast.tiers.wire.frames import Blocked, Principal

SECRET_BYTES = 32
MAX_UNPROVED_BYTES = 2 << 10
_HANDSHAKE_RECORD = 0x16
_BYTES_RECEIVED = struct.Struct("=Q")  # tcpi_bytes_received of linux/tcp.h
_BYTES_RECEIVED_AT = 128
_NAME = re.compile(r"holdfast:([a-z]{1,16}):([0-9a-f]{1,64}):([A-Za-z0-9._-]{1,128})\Z")
_HEX = re.compile(rb"\s*([0-9A-Fa-f]{64})\s*\Z")
# Far enough on both sides that no clock of any node matters.
_SINCE = dt.datetime(1970, 1, 2, tzinfo=dt.timezone.utc)
_UNTIL = dt.datetime(9999, 12, 31, tzinfo=dt.timezone.utc)


def read_secret(source: str) -> bytes:
    """The job's secret from a file of ours alone (0600), or from the inherited descriptor `fd:<number>`.

    Raises:
        ConfigError: it cannot be read, others may read it too, or it is not 64 hexadecimal digits.
    """
    remedy = "make one with `(umask 077; openssl rand -hex 32 > job.secret)` and copy it to every node"
    inherited, where = source.startswith("fd:"), source
    if private.looks_secret(source):
        where = "secret_file: it seems to be the secret itself, where the name of its file belongs"
    try:
        fd = os.dup(int(source[3:])) if inherited else os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not inherited and not private.is_secret(os.fstat(fd)):
                raise ConfigError(
                    "the secret is not a file of ours alone (owner, mode 0600)", where=where, remedy=remedy
                )
            text = os.read(fd, 4 * SECRET_BYTES)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        pass_on(error)
        what = error.strerror if isinstance(error, OSError) else "not a descriptor"
        raise ConfigError(f"cannot read the job's secret: {what}", where=where, remedy=remedy) from None
    match = _HEX.match(text)
    if not match:  # not a word of what stands there
        raise ConfigError("the job's secret is not 64 hexadecimal digits", where=where, remedy=remedy)
    return bytes.fromhex(match[1].decode())


class Credentials:
    """Proof of one process's role in one job. Implements wire.Security.

    Args:
        role: what this process is; a peer may do what its role allows.
        job: digest of the job (Place.job).
    """

    def __init__(self, secret: bytes, *, role: str, job: str, node: str) -> None:
        if len(secret) != SECRET_BYTES:
            raise ConfigError(f"the job's secret has {len(secret)} bytes, not {SECRET_BYTES}")
        self._job = job
        root, own = _issue(secret, job, f"holdfast:{role}:{job}:{node}")
        self._contexts = {server: _context(server, root, own) for server in (True, False)}

    def take(self, sock: socket.socket, *, server: bool) -> TlsLink:
        """A TLS link in place of the plain socket, which is used up.

        Raises:
            KeeperError: what came does not begin like TLS.
        """
        if server and (begun := _peek(sock)) and begun[0] != _HANDSHAKE_RECORD:
            raise KeeperError("the peer does not speak TLS")
        wrapped = self._contexts[server].wrap_socket(
            sock, server_side=server, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        return TlsLink(wrapped, self._job, server=server)


class TlsLink:
    """Bytes under TLS. OpenSSL takes one caller at a time, so a lock is held for the moment of each call."""

    def __init__(self, sock: ssl.SSLSocket, job: str, *, server: bool) -> None:
        self.sock = sock
        self._job = job
        self._server = server
        self._lock = threading.Lock()

    def advance(self) -> Principal:
        """Goes on with the handshake.

        Raises:
            Blocked, OSError. KeeperError: too much came before the proof, or it is for something else.
        """
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            if self._server and _received(self.sock) > MAX_UNPROVED_BYTES:
                raise KeeperError(f"more than {MAX_UNPROVED_BYTES} bytes came before any proof") from None
            raise Blocked(select.POLLIN) from None
        except ssl.SSLWantWriteError:
            raise Blocked(select.POLLOUT) from None
        return self._principal()

    def _principal(self) -> Principal:
        certificate: dict[str, Any] = dict(self.sock.getpeercert() or {})
        names = [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
        match = _NAME.match(names[0]) if len(names) == 1 else None
        if match is None or match[2] != self._job:
            raise KeeperError("the peer's certificate is not of this job")
        return Principal(match[1], match[2], match[3])

    @property
    def has_more(self) -> bool:
        with self._lock:
            return self.sock.pending() > 0

    def send(self, data: memoryview, fds: Sequence[int]) -> int:
        """Send as wire.Link does."""
        if fds:
            raise KeeperError("descriptors do not travel between nodes")
        try:
            with self._lock:
                return self.sock.send(data)
        except ssl.SSLWantWriteError:
            raise Blocked(select.POLLOUT) from None
        except ssl.SSLWantReadError:
            raise Blocked(select.POLLIN) from None

    def receive(self, num_bytes: int) -> tuple[bytes, list[int], bool]:
        head = bytearray(num_bytes)
        count = self.receive_into(memoryview(head))
        return bytes(head[:count]), [], False

    def receive_into(self, view: memoryview) -> int:
        """Receive as wire.Link does. A connection that was cut without a goodbye ends like any other: frames know their
        length.
        """
        try:
            with self._lock:
                return self.sock.recv_into(view)
        except ssl.SSLWantReadError:
            raise Blocked(select.POLLIN) from None
        except ssl.SSLWantWriteError:
            raise Blocked(select.POLLOUT) from None


def _peek(sock: socket.socket) -> bytes:
    """Return what came first, as far as it came."""
    try:
        return sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


def _received(sock: socket.socket) -> int:
    """All bytes that the kernel took from the peer, read by us or not."""
    facts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + _BYTES_RECEIVED.size)
    if len(facts) < _BYTES_RECEIVED_AT + _BYTES_RECEIVED.size:
        return 0  # Linux before 4.1
    return int(_BYTES_RECEIVED.unpack_from(facts, _BYTES_RECEIVED_AT)[0])


def _issue(secret: bytes, job: str, name: str) -> tuple[bytes, bytes]:
    """The authority's certificate (DER), and our own with its key (PEM)."""
    # Only keepers, and only those that listen, need it; it takes as long to import as all else that they do.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415
    from cryptography.x509.oid import NameOID  # noqa: PLC0415

    seed = HKDF(hashes.SHA256(), 32, b"holdfast authority 1", job.encode()).derive(secret)
    authority, key = Ed25519PrivateKey.from_private_bytes(seed), Ed25519PrivateKey.generate()
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])

    def sign(subject: x509.Name, of: Ed25519PrivateKey, uri: str) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(of.public_key())
            .serial_number(x509.random_serial_number() if uri else 1)
            .not_valid_before(_SINCE)
            .not_valid_after(_UNTIL)
            .add_extension(x509.BasicConstraints(ca=not uri, path_length=None if uri else 0), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(of.public_key()), critical=False)
            .add_extension(_usage(x509, is_authority=not uri), critical=True)
        )
        if uri:
            names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(authority, None)

    root = sign(issuer, authority, "")
    own = sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "holdfast")]), key, name)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return root.public_bytes(serialization.Encoding.DER), own.public_bytes(serialization.Encoding.PEM) + private


def _usage(x509: Any, *, is_authority: bool) -> Any:
    others = ("crl_sign", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not is_authority, key_cert_sign=is_authority, **unused)


def _context(server: bool, root: bytes, own: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate names a node of a job, not a host; see TlsLink._principal
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=root)
    if server:
        context.num_tickets = 0
    fd = os.memfd_create("holdfast-key", os.MFD_CLOEXEC)  # ssl reads keys from files only; this one has no name
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, own)
        context.load_cert_chain(str(Path("/proc/self/fd") / str(fd)))
    finally:
        os.close(fd)
    return context
