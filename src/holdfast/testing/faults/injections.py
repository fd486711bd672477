"""Tells how a cell hurts its job: `arm` before the saves that are made meanwhile, `disarm` when everything heals.

What is wrong with a keeper stands in its control file (inject.py). Beside that: a trainer is struck in its save, files and
memory are damaged at rest, descriptors are taken away, strangers come to the socket, a rank leaves a save out.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from holdfast.base.errors import HoldfastError
from holdfast.core.model import Version
from holdfast.core.versions import writer_failover
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.caller import dial
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.testing.checks.corrupt import damage_memory
from holdfast.testing.checks.invariants import Violation
from holdfast.testing.faults.cells import Cell
from holdfast.testing.faults.inject import PLACES
from holdfast.testing.faults.ranks import Rank
from holdfast.testing.faults.rig import Rig, Trainer

FLOOD = 200
SALT = 7  # what a twin of another content adds to its bytes
SYSTEM_CALLS = ("write", "fsync", "rename", "link", "unlink", "storage")
AT_REST = ("file", "manifest", "memory")  # damaged when all is quiet; the others while the job saves

Step = Callable[[], None]


def _nothing() -> None:
    """Nothing has to be undone."""


def arm(cell: Cell, rig: Rig, pids: list[int], ranks: list[Rank]) -> Step:
    """Hurts the job as the cell says; what undoes it is returned."""
    if cell.where in PLACES or cell.where in (*SYSTEM_CALLS, "wire", "line"):
        rig.hurt(cell.node, f"{cell.what}@{cell.where}")
        return _nothing
    if cell.where == "takeover":
        _arm_takeover(cell, rig)
    elif cell.where == "descriptors":
        return _take_descriptors(pids[cell.node])
    elif cell.where == "node":
        for node in (0, 1) if cell.what == "both" else (cell.node,):
            os.kill(pids[node], signal.SIGKILL)
            ranks[node].close()
    return _nothing


def saves(cell: Cell, rank: int, step: int, *, first: int, last: int) -> tuple[int | None, str, int]:
    """Return what a rank saves instead of the step (None: nothing), how it is struck in it, and the salt of its bytes."""
    mine = rank == cell.node and step == first + 1
    strike = f"{cell.what}@{cell.where}" if cell.of_trainer and mine else ""
    if cell.what == "skip" and mine:
        return None, "", 0
    if cell.what == "apart" and rank == cell.node:
        return 10 * step, "", 0
    return step, strike, SALT if cell.where == "twins" and rank == cell.node and step == last else 0


def meanwhile(cell: Cell, rig: Rig) -> list[Violation]:
    """Return what strangers do to the socket while the job saves, and what they were granted that they must not be."""
    place = rig.keeper(cell.node)
    if cell.what == "garbage":
        for data in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\xff" * 64,
            b"\x00\x00\x00\x00",
            b"\x16\x03\x01\x02\x00",
            os.urandom(4096),
        ):
            with contextlib.suppress(OSError), contextlib.closing(_raw(place.socket)) as sock:
                sock.sendall(data)
    elif cell.what == "flood":
        socks = [socket.socket(socket.AF_UNIX) for _ in range(FLOOD)]
        for sock in socks:
            sock.setblocking(False)  # whoever finds the door full does not wait
            with contextlib.suppress(OSError):
                sock.connect(str(place.socket))
        for sock in socks:
            sock.close()
    elif cell.what == "stranger":
        return _stranger(place.socket)
    elif cell.what == "forged":
        return _forged(rig, place.socket, place.job)
    return []


def at_rest(cell: Cell, root: Path, pids: list[int]) -> Version | None:
    """Damages what lies there, once all is quiet; the version that may be passed over for it."""
    if cell.where == "memory":
        return damage_memory(pids)
    file = _newest(cell, root)
    newest, data = file.parent, bytearray(file.read_bytes())
    if cell.what == "gone":
        file.unlink()
    elif cell.what == "stale":  # the same bundle as another version had it, under this one's name
        name = file.name.rpartition("-")[0]
        older = next(path for path in root.glob(f"*/{name}-*.safetensors") if path.parent != newest)
        shutil.copyfile(older, file)
    else:
        data[len(data) // 2] ^= 0x10
        file.write_bytes(bytes({"flip": data, "cut": data[: len(data) // 2], "empty": bytearray()}[cell.what]))
    return Version.parse(newest.name)


def refuse(cell: Cell, root: Path) -> Step:
    """The newest version's file cannot be read, which says nothing of what is in it; what is returned brings it back."""
    file = _newest(cell, root)
    aside = root.with_name("aside")
    file.rename(aside)
    file.symlink_to("nowhere")  # links are not followed

    def relent() -> None:
        aside.replace(file)

    return relent


def _newest(cell: Cell, root: Path) -> Path:
    """A file of the newest version."""
    newest = max(
        (path.parent for path in root.glob("*/manifest.json")),
        key=lambda path: Version.parse(path.name) or Version(0, 0),
    )
    return newest / "manifest.json" if cell.where == "manifest" else max(newest.glob("*.safetensors"))


def heal(rig: Rig, pids: list[int]) -> None:
    """No keeper has a wound any more; who was stopped goes on."""
    for node, pid in enumerate(pids):
        rig.hurt(node, "")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _arm_takeover(cell: Cell, rig: Rig) -> None:
    """Somebody cannot write what it represents, and the cell's node, next in line for it, is struck when it takes over."""
    refs = {
        ref.bundle_id: ref for rank in range(rig.topology.world_size) for ref in Trainer.layout_of(rig, rank).bundles
    }
    lines = [part.line for part in writer_failover.parts(refs.values(), rig.topology)]
    before = next(line[0] for line in lines if len(line) > 1 and line[1] == cell.node)
    rig.hurt(before, "ENOSPC@write")
    rig.hurt(cell.node, f"{cell.what}@takeover")


def _take_descriptors(pid: int) -> Step:
    """The process may open nothing more than it has open now."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1, before[1]))

    def give_back() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    return give_back


def _raw(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5.0)
    sock.connect(str(path))
    return sock


def _stranger(path: Path) -> list[Violation]:
    """A trainer of another job, by name."""
    with contextlib.suppress(HoldfastError):
        KeeperClient.connect(path, job="0" * 32, rank=0).close()
        return [Violation("S18", "a trainer of another job was welcomed")]
    return []


def _forged(rig: Rig, path: Path, job: str) -> list[Violation]:
    """A viewer says what only ranks and keepers may."""
    version = Version(rig.incarnation, 10**6)
    said: list[messages.Message] = [
        messages.Resume(incarnation=rig.incarnation, version=version),
        messages.Assemble(assembly=rig.assembly()),
        messages.Condemn(version=Version(rig.incarnation, 0), bundle_id="x", node=0, reason="because"),
        messages.Goodbye(finished=True),
        messages.AskSeals(version=version, bundle_ids=("x",)),
    ]
    hello = messages.Hello(job=job, role=messages.VIEWER, rank=-1)
    dialled = dial(str(path), hello, timeout_s=5.0, on_push=lambda _: None, on_lost=lambda _: None)
    granted = []
    with contextlib.closing(dialled) as caller:
        for message in said:
            with contextlib.suppress(HoldfastError):
                caller.call(message, timeout_s=5.0)
                granted.append(Violation("S18", f"a viewer was granted {type(message).__name__}"))
    return granted
