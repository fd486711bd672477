"""Real faults for the tests of this room: failing system calls, full and cut-off file systems."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.errors import StorageError
from holdfast.testing.checks.power_cut_disk import JOURNAL_LOST, cut_power

CALLS = ("open", "mkdir", "pwrite", "ftruncate", "fsync", "rename", "link", "close")


class Calls:
    """Stands before the system calls: notes them, and makes the n-th fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] = CALLS) -> None:
        self.seen: list[str] = []
        self.fail_at = -1
        self.code = 0
        self.synced: list[str] = []
        for name in names:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(self.seen)
            self.seen.append(name)
            if number == self.fail_at:
                if name == "close":
                    real(*args)  # a failing close closes
                raise OSError(self.code, os.strerror(self.code))
            if name == "fsync":
                self.synced.append(os.readlink(f"/proc/self/fd/{args[0]}"))
            return real(*args, **kwargs)

        return call


def every_failure(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[], object], code: int, names: tuple[str, ...] = CALLS
) -> Iterator[tuple[str, bool]]:
    """Runs `action` with the n-th call failing, for every n; yields that call's name, and whether `action` raised."""
    number = 0
    while True:
        with monkeypatch.context() as patched:
            calls = Calls(patched, names)
            calls.fail_at, calls.code = number, code
            try:
                action()
                noticed = False
            except StorageError:
                noticed = True
        if number >= len(calls.seen):
            return  # it never came to the n-th call
        yield calls.seen[number], noticed
        number += 1


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    result = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True, timeout=30)
    if result.returncode:
        pytest.skip(f"cannot mount here: {result.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=30)


@contextmanager
def ext4(tmp_path: Path) -> Iterator[Path]:
    image = tmp_path / "disk"
    with image.open("wb") as disk:
        disk.truncate(24 << 20)
    try:
        made = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("mkfs.ext4 is not installed")
    assert made.returncode == 0, made.stderr
    with mounted(tmp_path / "mnt", "-o", "loop", str(image)) as place:
        yield place


def power_cut(place: Path) -> None:
    """Shuts a file system down without flushing its journal."""
    cut_power(str(place), JOURNAL_LOST)


def damage(path: Path, how: str) -> None:
    """Damages a file: removed, empty, truncated, extended, zeroed, swapped or flipped."""
    data = path.read_bytes()
    if how == "removed":
        path.unlink()
        return
    changes: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda _: b"",
        "truncated": lambda d: d[:-1],
        "extended": lambda d: d + b"\0",
        "zeroed": lambda d: bytes(len(d)),
        "swapped": lambda d: d[len(d) // 2 :] + d[: len(d) // 2],
        "flipped": lambda d: d[:-3] + bytes([d[-3] ^ 1]) + d[-2:],
    }
    path.write_bytes(changes[how](data))
