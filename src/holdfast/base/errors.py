"""Every error that holdfast raises, as one tree.

HoldfastError
├── UsageError            a call in the wrong order or with a wrong argument
│   ├── ConfigError       a setting that is unknown, misspelt or out of range
│   └── MismatchError     the saved state does not fit the objects that should receive it
├── StorageError          the checkpoint path refuses (rights, full disk, vanished directory)
│   ├── StorageFull       no space or no quota left
│   ├── ForeignDirectory  the path holds files that are not ours
│   ├── StorageUnfit      the file system lacks what a safe commit needs
│   └── StorageBusy       an object store did not answer, or answered with an error that may pass
├── CorruptError          bytes are not what was sealed
│   ├── NewerFormat       written by a holdfast that knows more than this one
│   └── NotProved         nobody with the job's key made it
├── VersionNotFound       the version (or any version) is not there
├── MemoryRefused         the memory level does not fit into the budget
├── KeeperError           the keeper said no, or spoke nonsense
│   ├── KeeperLost        the keeper is gone; training goes on without the memory level
│   │   └── KeeperGone    nobody listens where it was: its process has ended
│   └── KeeperNotStarted  there is none, and none could be started; the job goes on durable-only
├── DeviceError           an accelerator has no memory left, or failed
├── InUse                 another job works on this path
├── Fenced                a higher incarnation or term exists; this process belongs to the past
└── LevelNotReached       a version did not reach the level that was asked for

Interrupted stands beside the tree: no fault of this process, and nothing that `except Exception` should swallow.

An error says *what* happened, *where*, and what the operator can do (`remedy`). `retryable` is a property of the
class: whether the same call may succeed later without anybody changing anything. So is `condemns`: whether the error
proves that the copy it speaks of is of no use (damaged, missing, another job's). Any other error says only that the copy
could not be reached: nothing may be passed over or removed because of it. `code` is stable across releases and is what
the troubleshooting page is sorted by. `assert` is for our own bugs only.
"""

from __future__ import annotations

from typing import ClassVar

from holdfast.base.terminal import shown


class HoldfastError(Exception):
    """Base of the tree. Raised only through a subclass.

    Args:
        what: one sentence, what happened.
        where: the path, version, entry, rank or address it concerns; empty if there is none.
        remedy: what the operator can do about it; the class's `advice` if it is not said.
    """

    code: ClassVar[str] = "HF000"
    retryable: ClassVar[bool] = False
    condemns: ClassVar[bool] = False
    advice: ClassVar[str] = ""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy or self.advice

    def __str__(self) -> str:
        place = f" [{self.where}]" if self.where else ""
        advice = f". Remedy: {self.remedy}" if self.remedy else ""
        return shown(f"{self.what}{place}{advice}")


class UsageError(HoldfastError):
    """A call in the wrong order or with a wrong argument. Correct the calling code."""

    code = "HF100"


class ConfigError(UsageError):
    """A setting that is unknown, misspelt or out of range. Correct the flag, variable or file that it names."""

    code = "HF101"


class MismatchError(UsageError):
    """The saved state does not fit the objects that should receive it. Build the same model, or pass `strict=False`."""

    code = "HF102"


class StorageError(HoldfastError):
    """The checkpoint path refuses. Check rights, mounts and quotas; memory levels go on meanwhile."""

    code = "HF200"
    retryable = True


class StorageFull(StorageError):
    """No space or no quota left on the checkpoint path. Free space; the version is written again from memory."""

    code = "HF201"


class ForeignDirectory(StorageError):
    """The path holds files that are not ours. Choose an empty directory; nothing unknown is ever deleted."""

    code = "HF202"
    retryable = False


class StorageUnfit(StorageError):
    """The file system lacks what a safe commit needs (create-once link, fsync). Choose another path."""

    code = "HF203"
    retryable = False


class StorageBusy(StorageError):
    """Storage did not answer in time, or with an error that may pass. It was tried again; check its health."""

    code = "HF204"
    advice = "check the health of the storage and the network; it is tried again"


class CorruptError(HoldfastError):
    """Bytes are not what was sealed. That copy is never loaded; another copy or an older version is used."""

    code = "HF300"
    condemns = True
    advice = "use another copy or an older version: `holdfast verify` tells which are good; remove what is damaged"


class NewerFormat(CorruptError):
    """Written by a newer holdfast. Upgrade this one. What was written may be good, so it is not passed over."""

    code = "HF301"
    condemns = False
    advice = "upgrade holdfast"


class NotProved(CorruptError):
    """Nobody with the job's key made the version, and a key is required. Nothing says that its bytes are damaged."""

    code = "HF303"
    advice = (
        "if the job began without a key: `encryption_required = false` in the settings, until a new version is there"
    )


class VersionNotFound(HoldfastError):
    """The version (or any version) is not there. `holdfast ls` shows what is."""

    code = "HF302"
    condemns = True
    advice = "`holdfast ls` shows which versions are there"


class MemoryRefused(HoldfastError):
    """The memory level does not fit into the budget. Raise the budget or accept durable-only saving."""

    code = "HF400"


class KeeperError(HoldfastError):
    """The keeper said no, or spoke nonsense. Its log is in the runtime directory."""

    code = "HF500"


class KeeperLost(KeeperError):
    """The keeper is gone. Training goes on; a new keeper adopts the memory of the living trainers."""

    code = "HF501"
    advice = "a new keeper is started at the next save or restart"
    retryable = True


class KeeperGone(KeeperLost):
    """Nobody listens where the keeper was: its process has ended, and what only its memory held is lost."""

    code = "HF503"
    condemns = True


class KeeperNotStarted(KeeperError):
    """No keeper runs and none could be started. The job goes on durable-only, unless `require_memory` is set."""

    code = "HF502"
    advice = "see its log; without a keeper there is no level in memory, and a restart goes back to storage"


class AnswerTooLong(KeeperError):
    """A keeper has more to tell than a message may hold. What it would have said is unknown, not absent."""

    code = "HF505"
    advice = "use fewer nodes for one job; a restore takes what storage has once all keepers of the job are ended"


class DeviceError(HoldfastError):
    """An accelerator has no memory left, or failed. The error of torch is its cause (`__cause__`)."""

    code = "HF504"
    advice = "end this process, and look at the device: what a failed one holds is lost to the process that used it"


class InUse(HoldfastError):
    """Another job works on this path, or wrote what stands there. Stop it, or choose another path."""

    code = "HF600"
    condemns = True


class Fenced(HoldfastError):
    """A higher incarnation or term exists; this process belongs to the past and must end."""

    code = "HF601"
    advice = "end this process: a newer one has taken its place"


class LevelNotReached(HoldfastError):
    """A version did not reach the level that was asked for. The message says which level it did reach, and why."""

    code = "HF700"


class Interrupted(BaseException):
    """Another process of the job failed and this one is healthy: it leaves the broken step and starts again.

    Raised by the worker runner in the script's main thread, at any line. The script need not know it: it ends, and is
    run again in the same process (or the function under `holdfast.resumable` is). Clean-up by `finally` and `with`
    runs; who catches it must raise it again. Derived from BaseException, like KeyboardInterrupt.
    """


_KINDS: dict[str, type[HoldfastError]] = {
    name: kind for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, HoldfastError)
}


def kind_of(name: str, default: type[HoldfastError] = HoldfastError) -> type[HoldfastError]:
    """Returns the class that another process named; `default` if this release has none of that name."""
    return _KINDS.get(name, default)
