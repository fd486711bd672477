"""Tells where the keeper of one job on one node lives: `<runtime>/<job digest>/<node label>/`.

The directory belongs to us alone (0700) or is refused. It holds the socket, the lock that elects the keeper, the lock
that lets one of several starters spawn, and the log. The keeper removes all of it when it ends. Computing RuntimePaths
follows the links of the root and touches nothing; `make` creates it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.base import private
from holdfast.base.config import Config
from holdfast.base.errors import ConfigError
from holdfast.base.handler_errors import forgive, pass_on
from holdfast.tiers.memory.processes import boot_id, take_lock
from holdfast.tiers.storage.read_limit import ReadLimit
from holdfast.tiers.wire.frames import unix_path

# How long the links of a root are followed by those who have no settings at hand.
LINKS_S = 60.0
# The file in a keeper's directory that it holds locked for life, with its process number in it.
KEEPER_LOCK = "keeper.lock"
# How often a directory that vanishes is made anew before we give up.
_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class RuntimePaths:
    """The runtime directory of one job on one node.

    Attributes:
        runtime: the directory that all jobs of this user share.
        job: digest of checkpoint root and run id.
    """

    runtime: Path
    job: str
    node: str

    @property
    def directory(self) -> Path:
        return self.runtime / self.job / self.node

    @property
    def socket(self) -> Path:
        return self.directory / "s"

    def identity(self) -> str:
        """Return what ranks share whose keeper is the same: machine and directory; empty if it is not known."""
        with forgive(OSError):
            found = os.stat(self.directory)
            return f"{boot_id().strip()}/{found.st_dev}/{found.st_ino}"
        return ""

    @property
    def address(self) -> str:
        """Return what other keepers connect to."""
        return f"unix:{self.socket}"

    @property
    def log(self) -> Path:
        return self.directory / "keeper.log"

    @property
    def port(self) -> Path:
        """The TCP port of the keeper, if it listens for other nodes."""
        return self.directory / "port"

    @property
    def notice(self) -> Path:
        """Return the path of the notice of ranks that go on without a keeper; see keeper.observe.degraded_notice."""
        return self.directory / "durable-only.json"

    @property
    def keeper_lock(self) -> Path:
        return self.directory / KEEPER_LOCK

    @property
    def start_lock(self) -> Path:
        return self.directory / "start.lock"

    @property
    def budget(self) -> Path:
        """Shared by all keepers of this runtime directory."""
        return self.runtime / "memory.json"

    def lock(self, file: Path, *, blocking: bool) -> int | None:
        """A lock in the directory, which is made if a keeper that ended removed it meanwhile.

        Raises:
            ConfigError: as `make`. OSError: the file cannot be created.
        """
        for _ in range(_ATTEMPTS):
            self.make()
            try:
                return take_lock(file, blocking=blocking)
            except FileNotFoundError:
                continue
        return None

    def make(self) -> None:
        """Creates the directory, or checks the existing one.

        Raises:
            ConfigError: the path is too long for a socket, not ours, open to others, or cannot be created.
        """
        unix_path(str(self.socket))
        try:
            private.make(self.directory, below=self.runtime)
        except OSError as error:
            pass_on(error)
            raise ConfigError(
                f"cannot create the runtime directory: {error.strerror}",
                where=str(self.directory),
                remedy="set HOLDFAST_RUNTIME_DIR to a directory of your own on a local disk",
            ) from error


def place_of(root: str, config: Config) -> RuntimePaths:
    """The place of the job that saves to `root` under these settings. `root` is made absolute unless it is a URL."""
    return RuntimePaths(
        Path(os.path.abspath(config.runtime_path)),
        job_digest(root, config.run_id, timeout_s=config.close_timeout_s),
        config.node,
    )


def absolute_root(root: str) -> str:
    """Return `root` as everyone must name it: a URL as it is, a path absolute, `~` as the user's home; empty names nothing."""
    return root if "://" in root or not root else os.path.abspath(os.path.expanduser(root))


def _real_root(root: str, timeout_s: float) -> str:
    """Return a directory as it is called without links: who starts again by another name finds what is in memory."""
    path = absolute_root(root.removeprefix("file://"))
    if "://" in path or not path:
        return path
    return ReadLimit(timeout_s, 0, path).run(lambda: os.path.realpath(path))


def job_digest(root: str, run_id: str, *, timeout_s: float = LINKS_S) -> str:
    """Identity of the job: 16 hex digits of blake2b over the root and the run id, however the root is spelt (links, `file://`).

    Raises:
        StorageBusy: a file system on the way to the root does not answer for this time.
    """
    text = f"{_real_root(root, timeout_s)}\n{run_id}".encode(errors="surrogateescape")  # a link may lead to any bytes
    return hashlib.blake2b(text, digest_size=8).hexdigest()
