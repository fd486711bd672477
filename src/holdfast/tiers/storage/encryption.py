"""Encryption of bundle files: AES-256-GCM per chunk, under a key that belongs to one file alone.

Whoever writes a bundle must write the same bytes, for writers race and take over from each other. So nothing is random:
the key of a file is derived (HKDF-SHA256) from the job's key and from everything that names the file's content (job,
version, bundle, length, digest), and the nonce of a chunk from its content: a keyed MAC (HMAC-SHA256, under a second key
of the file) of its number and its plain text. The same key and nonce never meet two plain texts, even if somebody makes
two contents with one digest, or a rank seals other bytes than its twin under one name. The same names and the chunk's
place are authenticated with every chunk, so a chunk that was moved, left out or taken from another file or version does
not open.

Files of format 2 are read still. There the nonce is the number of the chunk (docs/security.md tells what that leaves).

The root of a manifest is authenticated (HMAC-SHA256 under another key that is derived), and with it all that it lists: a
version that somebody without the key made is refused.

The package `cryptography` is imported where the first key is used: a job without one does not load it.

Specification: docs/spec/format.md, section 6. The key comes from a file or a command, and never into argv or a log.
"""

from __future__ import annotations

import hmac
import os
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.base import private
from holdfast.base.config import Config
from holdfast.base.errors import ConfigError, CorruptError
from holdfast.base.handler_errors import pass_on

KEY_BYTES = 32
TAG_BYTES = 16
NONCE_BYTES = 12
# What a trailer says of a chunk: in format 2 its tag, since then its nonce and its tag.
LOCK_BYTES = NONCE_BYTES + TAG_BYTES
COMMAND_TIMEOUT_S = 30.0
_MAX_KEY_FILE = 4096


@dataclass(frozen=True, slots=True)
class KeySource:
    """Says where the key of a job comes from.

    Attributes:
        setting: as in Config, a file by its absolute path; empty for no key.
        required: as `Config.encryption_required`.
        expected: the id of the key that the job began with; empty where that is not known.
    """

    setting: str = ""
    required: bool = True
    expected: str = ""

    @classmethod
    def of(cls, config: Config) -> KeySource:
        """Return what the settings of a process say."""
        return cls(config.encryption_key, config.encryption_required)


@dataclass(frozen=True, slots=True)
class Name:
    """Says what a file is, as its key and every chunk are bound to it."""

    job: str
    version: str
    bundle: str
    length: int
    digest: str

    def text(self, *more: object) -> bytes:
        """One spelling for each content: no word contains a zero byte."""
        return b"\0".join(
            str(word).encode() for word in (self.job, self.version, self.bundle, self.length, self.digest, *more)
        )


class Key:
    """The secret of a job. Shows its id, which tells nothing of it."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise ConfigError(
                f"an encryption key has {KEY_BYTES} bytes, not {len(secret)}",
                remedy="make one with `openssl rand -hex 32 > key; chmod 600 key`",
            )
        self._secret = secret
        self._manifests = _derive(secret, b"holdfast manifest key", b"", KEY_BYTES)
        self.id = _derive(secret, b"holdfast key id", b"", 8).hex()

    def __repr__(self) -> str:
        return f"Key({self.id})"

    def authenticate(self, texts: Iterable[bytes]) -> str:
        """Returns the HMAC-SHA256 of texts in their order, each with its length before it, as hex digits."""
        made = hmac.new(self._manifests, digestmod="sha256")
        for text in texts:
            made.update(len(text).to_bytes(8, "little"))
            made.update(text)
        return made.hexdigest()

    def of_file(self, name: Name) -> FileKey:
        """Return the keys of one file."""
        keys = _derive(self._secret, b"holdfast file keys", name.text(), 2 * KEY_BYTES)
        return FileKey(keys[:KEY_BYTES], keys[KEY_BYTES:], name)

    def of_older_file(self, name: Name) -> OlderFileKey:
        """Return the key of one file of format 2."""
        return OlderFileKey(_derive(self._secret, b"holdfast file key", name.text(), KEY_BYTES), name)


class OlderFileKey:
    """Opens the chunks of one file of format 2, whose nonces are the chunks' numbers. Any thread."""

    def __init__(self, secret: bytes, name: Name) -> None:
        from cryptography.hazmat.primitives.ciphers.algorithms import AES  # noqa: PLC0415

        self._cipher = AES(secret)
        self._name = name

    def decrypt(self, index: int, stored: memoryview, lock: bytes, into: memoryview) -> None:
        """Decrypts chunk `index` into memory of the same length.

        Args:
            index: which chunk.
            stored: its ciphertext.
            lock: what the trailer says of it: here the tag.
            into: where the plain text goes.

        Raises:
            CorruptError: it is not the chunk that was encrypted; what `into` holds is worth nothing.
        """
        self._open(index, stored, _number(index), lock, into)

    def _open(self, index: int, stored: memoryview, nonce: bytes, tag: bytes, into: memoryview) -> None:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415
        from cryptography.hazmat.primitives.ciphers import Cipher, modes  # noqa: PLC0415

        made = Cipher(self._cipher, modes.GCM(nonce, tag)).decryptor()
        made.authenticate_additional_data(self._name.text(index))
        made.update_into(stored, into)
        try:
            made.finalize()
        except InvalidTag:
            where = f"{self._name.version}/{self._name.bundle}"
            raise CorruptError(f"encrypted chunk {index} was changed, or belongs elsewhere", where=where) from None


class FileKey(OlderFileKey):
    """Closes and opens the chunks of one file. Any thread."""

    def __init__(self, secret: bytes, mac_secret: bytes, name: Name) -> None:
        super().__init__(secret, name)
        self._mac = hmac.new(mac_secret, digestmod="sha256")

    def encrypt(self, index: int, chunk: memoryview) -> bytes:
        """Encrypts chunk `index` where it lies; returns its lock: nonce and tag.

        The chunk is the caller's own copy: where it changed after the nonce was made, the nonce would be that of another.
        """
        from cryptography.hazmat.primitives.ciphers import Cipher, modes  # noqa: PLC0415

        made = self._mac.copy()
        made.update(_number(index))
        made.update(chunk)
        nonce = made.digest()[:NONCE_BYTES]
        closing = Cipher(self._cipher, modes.GCM(nonce)).encryptor()
        closing.authenticate_additional_data(self._name.text(index))
        closing.update_into(chunk, chunk)
        closing.finalize()
        return nonce + closing.tag

    def decrypt(self, index: int, stored: memoryview, lock: bytes, into: memoryview) -> None:
        """Decrypts chunk `index`, given its lock; see OlderFileKey."""
        self._open(index, stored, lock[:NONCE_BYTES], lock[NONCE_BYTES:], into)


def key_of(source: KeySource) -> Key | None:
    """Return the key of a job; None if it has none.

    Raises:
        ConfigError: as `load_key`, or it is another one than the job began with: no key would open what both wrote.
    """
    key = load_key(source.setting)
    if key is not None and source.expected not in ("", key.id):
        raise ConfigError(
            f"the encryption key is another one by now: {key.id}, and the job began with {source.expected}",
            where=_source(source.setting),
            remedy="put the job's key back; nothing is written until then",
        )
    return key


def load_key(setting: str) -> Key | None:
    """The key that `Config.encryption_key` names: a private file, or `!command` that prints it; None if it is empty.

    Raises:
        ConfigError: there is none, it is open to others, or it is no key. Never tells what was read.
    """
    if not setting:
        return None
    text = _run(setting[1:]) if setting.startswith("!") else _read(Path(setting))
    if len(text) == KEY_BYTES:
        return Key(text)
    try:
        return Key(bytes.fromhex(text.decode("ascii").strip()))
    except ValueError as error:
        pass_on(error)
        raise ConfigError(
            "the encryption key is neither 64 hex digits nor 32 bytes", where=_source(setting), remedy="make a new one"
        ) from None


def _read(path: Path) -> bytes:
    remedy = "give a file that only you can read (chmod 600), or `!command`"
    where = _source(str(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not private.is_secret(os.fstat(descriptor)):
                raise ConfigError(
                    "the key's file is open to others, another user's, or no file", where=where, remedy=remedy
                )
            return os.read(descriptor, _MAX_KEY_FILE)
        finally:
            os.close(descriptor)
    except OSError as error:
        pass_on(error)
        raise ConfigError(f"the key cannot be read: {error.strerror}", where=where, remedy=remedy) from None


def _run(command: str) -> bytes:
    where = _source(f"!{command}")
    try:
        words = shlex.split(command)
        answer = subprocess.run(
            words, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT_S
        )
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        pass_on(error)
        what = f"the command for the key failed: {type(error).__name__}"
        raise ConfigError(what, where=where, remedy="run it by hand") from None
    if answer.returncode:
        what = f"the command for the key ended with {answer.returncode}"
        raise ConfigError(what, where=where, remedy="run it by hand")
    return answer.stdout


def _source(setting: str) -> str:
    """Return where a key comes from, without arguments that could be a secret."""
    if private.looks_secret(setting.split(maxsplit=1)[0] if setting.startswith("!") else setting):
        return "encryption_key: it seems to be the key itself, where the name of its file belongs"
    return setting.split(maxsplit=1)[0] if setting.startswith("!") else setting


def _derive(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415

    return HKDF(algorithm=hashes.SHA256(), length=length, salt=salt, info=info).derive(secret)


def _number(index: int) -> bytes:
    return index.to_bytes(NONCE_BYTES, "big")
