"""Decides how much memory the slots may take: per cgroup, shared by all keepers of it, replicas included.

The kernel's answer to too much memory is the OOM killer, so the budget is checked with numbers before anything is
allocated. All keepers of one runtime directory keep their reservations in one small file under a lock; entries of
processes that are gone are dropped by whoever looks next.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.base.config import parse_size
from holdfast.base.errors import MemoryRefused
from holdfast.base.handler_errors import pass_on
from holdfast.tiers.format.strict_json import parse_loose
from holdfast.tiers.memory.control_groups import groups_above
from holdfast.tiers.memory.processes import has_ended, start_time, take_lock

# A quarter by default: the trainer, its data loader and the page cache need the rest.
DEFAULT_SHARE = 4
# A limit above this is how cgroup v1 writes "none".
_NO_LIMIT = 1 << 60
_MAX_FILE_BYTES = 1 << 20
# Python makes no number of more than 4,300 digits, or of digits beyond ASCII such as superscripts.
_NUMBER = re.compile(r"[0-9]{1,20}\Z")
# Ends the name of an entry of what is reserved and not allocated yet.
_TO_COME = ":to come"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, as the kernel states them.

    Attributes:
        limit: the tightest cgroup limit above this process, or the machine's memory.
        available: what can be had now without pushing anybody out.
        group: name of the memory cgroup.
    """

    limit: int
    available: int
    group: str


def read_limits(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Limits:
    """The limits of this process; cgroup v2 or v1, or none."""
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    limit, available = (int(meminfo[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    group = ""
    for name, directories in groups_above("memory", proc=proc, cgroup=cgroup):
        group = group or name
        for directory in directories:
            ceiling, used = _group_numbers(directory)
            limit, available = min(limit, ceiling), min(available, max(0, ceiling - used))
    return Limits(limit, available, group)


def allowed_bytes(budget: str, limits: Limits) -> int:
    """Return what all keepers of the cgroup may take: the configured size, else a quarter of the limit."""
    return parse_size(budget) if budget else limits.limit // DEFAULT_SHARE


class Budget:
    """This process's share of the reservations in `path`."""

    def __init__(self, path: Path, budget: str) -> None:
        self._path = path
        limits = read_limits()
        self.allowed = allowed_bytes(budget, limits)
        self.used = 0
        self._to_come = 0  # of it, what the kernel does not know of yet
        # Keepers in different cgroups may share a runtime directory; each cgroup has a budget of its own.
        self._group = hashlib.blake2b(limits.group.encode(), digest_size=6).hexdigest()
        self._me = f"{self._group}:{os.getpid()}:{start_time(os.getpid())}"

    def check(self, num_bytes: int, what: str) -> None:
        """Refuse unless `num_bytes` could be reserved now.

        Raises:
            MemoryRefused: as `reserve` does.
        """
        with self._ledger() as ledger:
            self._check(num_bytes, what, ledger)

    def reserve(self, num_bytes: int, what: str, *, to_come: bool = False) -> None:
        """Takes `num_bytes` out of the budget.

        With `to_come` the memory is allocated later; until `came` the kernel counts it as free, and nobody else may.

        Raises:
            MemoryRefused: with what is needed, used, allowed and available, and what to change.
        """
        with self._ledger() as ledger:
            self._check(num_bytes, what, ledger)
            self._add(ledger, num_bytes, num_bytes if to_come else 0)

    def came(self, num_bytes: int) -> None:
        """Count as allocated what was to come."""
        with self._ledger() as ledger:
            self._add(ledger, 0, -num_bytes)

    def release(self, num_bytes: int, *, to_come: bool = False) -> None:
        """Gives `num_bytes` back; `to_come`: of what never came."""
        with self._ledger() as ledger:
            self._add(ledger, -num_bytes, -num_bytes if to_come else 0)

    def close(self) -> None:
        """Gives everything back; the last one removes the file."""
        with self._ledger() as ledger:
            self._add(ledger, -self.used, -self._to_come)

    def _add(self, ledger: dict[str, int], used: int, to_come: int) -> None:
        """Under the lock. An entry of nothing is dropped."""
        self.used, self._to_come = self.used + used, self._to_come + to_come
        ledger[self._me], ledger[self._me + _TO_COME] = self.used, self._to_come

    def _check(self, num_bytes: int, what: str, ledger: dict[str, int]) -> None:
        group = {name: size for name, size in ledger.items() if name.startswith(self._group + ":")}
        others = sum(size for name, size in group.items() if name != self._me and not name.endswith(_TO_COME))
        to_come = sum(size for name, size in group.items() if name.endswith(_TO_COME))
        available = max(0, read_limits().available - to_come)
        needed = others + self.used + num_bytes
        if needed <= self.allowed and num_bytes <= available:
            return
        told = (
            f"{what} needs {num_bytes} bytes; of {self.allowed} allowed, {self.used} are used here and {others} by "
            "other keepers"
        )
        if num_bytes > available:
            raise MemoryRefused(
                f"{told}; {available} are available on this node",
                remedy="free memory on this node or raise the cgroup's limit",
            )
        # Without what is available: that changes from one moment to the next, and an alarm that repeats is told once.
        raise MemoryRefused(told, remedy=f"set HOLDFAST_MEMORY_BUDGET to {needed} bytes or more")

    @contextmanager
    def _ledger(self) -> Iterator[dict[str, int]]:
        """The reservations of living keepers, under the lock; written back at the end of the block."""
        fd = take_lock(self._path, blocking=True)  # held by others for microseconds only
        if fd is None:
            raise MemoryRefused("the memory budget's file cannot be locked", where=str(self._path))
        try:
            ledger = _parse(os.pread(fd, _MAX_FILE_BYTES, 0))
            yield ledger
            living = {name: size for name, size in ledger.items() if size > 0 and _lives(name)}
            if living:
                data = json.dumps(living).encode()
                os.pwrite(fd, data, 0)
                os.ftruncate(fd, len(data))
            else:
                self._path.unlink()
        finally:
            os.close(fd)


def _parse(data: bytes) -> dict[str, int]:
    """Return what is readable; a file cut short by a crash only forgets reservations, and its owners write them again."""
    try:
        found = parse_loose(data or b"{}")
    except ValueError as error:
        pass_on(error)
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: size for name, size in found.items() if isinstance(size, int) and _lives(name)}


def _lives(name: str) -> bool:
    parts = name.removesuffix(_TO_COME).split(":")
    if len(parts) != 3 or not _NUMBER.match(parts[1]):
        return False
    return not has_ended(int(parts[1]), int(parts[2]) if _NUMBER.match(parts[2]) else None)


def _group_numbers(directory: Path) -> tuple[int, int]:
    """(limit, bytes in use that cannot simply be dropped) of one cgroup; no limit if it says nothing."""
    limit = _number(directory / "memory.max", directory / "memory.limit_in_bytes")
    if limit is None or limit >= _NO_LIMIT:
        return _NO_LIMIT, 0
    used = _number(directory / "memory.current", directory / "memory.usage_in_bytes") or 0
    return limit, max(0, used - _file_cache(directory / "memory.stat"))


def _number(*files: Path) -> int | None:
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError as error:
            pass_on(error)
            continue
        return int(text) if text.isdigit() else None
    return None


def _file_cache(file: Path) -> int:
    try:
        rows = dict(line.split(" ", 1) for line in file.read_text().splitlines())
    except (OSError, ValueError) as error:
        pass_on(error)
        return 0
    return int(rows.get("total_inactive_file", rows.get("inactive_file", "0")))
