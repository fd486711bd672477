"""The page that a worker writes its beats into and its launcher reads: 4 KiB of shared memory, no thread, no lock.

Layout (little endian): a head with the present (see `_HEAD`), seconds spent per phase, histograms of what passes between
two signs of progress, per phase and for whole steps, and the longest of those pauses per phase. A bucket is a fifth
wider than the one before, so a p99 is right within that. What lies behind the page is text: stack dumps, which the worker's fault handler appends.

The writer is the worker's main thread alone. A reader may see a head half written; the next look, 50 ms later, sees it
whole, and nothing is decided on one look. No torch.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time

from holdfast.base.handler_errors import pass_on
from holdfast.core.elastic.worker_facts import Beat, Phase

PAGE_BYTES = 4096
MAGIC = 0x48464231
# magic, pid, signal that dumps the stacks, phase, inside, settled, changes, step, sequence, name of the collective, the
# thread that may take the signal for the main one, seconds that the script gave its groups, the descriptor of the stacks
_HEAD = struct.Struct("<IIIBBBxQQQ32sIdi")
_SPENT_AT, _HISTOGRAMS_AT = 128, 256
NUM_BUCKETS = 80
LEAST_S = 0.001
_PER_OCTAVE = 4
# Who makes no optimizer step steps all the same after so many collectives, and has settled after so long: before training
# many short ones are made, and then one rank prepares the data alone.
_STARTED, SETTLED_S = 16, 600.0
_ROWS = len(Phase) + 1  # the last row is that of whole steps
_NUM_PHASES = len(Phase)
_LONGEST_AT = _HISTOGRAMS_AT + 4 * NUM_BUCKETS * _ROWS


def make_page() -> int:
    """A descriptor of a new page, all zero; inherited only by a fork.

    Raises:
        OSError: there is none now; EFBIG: there will be none, as the user allows no file of its size.
    """
    fd = os.memfd_create("holdfast-beats", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, PAGE_BYTES)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Writer:
    """The worker's side.

    Args:
        fd: of the page; may be closed afterwards.
        dump_signal: makes this process append its stacks behind the page; 0 for none.
        dump_thread: id of a thread that does so as well as the main one; 0 for none.
        dump_fd: descriptor of the page that they are appended to, in this process.
    """

    def __init__(self, fd: int, *, dump_signal: int = 0, dump_thread: int = 0, dump_fd: int = -1) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._counts = memoryview(self._map)[_HISTOGRAMS_AT : _HISTOGRAMS_AT + 4 * NUM_BUCKETS * _ROWS].cast("I")
        self._spent = memoryview(self._map)[_SPENT_AT : _SPENT_AT + 8 * _NUM_PHASES].cast("d")
        self._longest = memoryview(self._map)[_LONGEST_AT : _LONGEST_AT + 8 * _NUM_PHASES].cast("d")
        before = _HEAD.unpack_from(self._map)
        self._map[_SPENT_AT:PAGE_BYTES] = bytes(PAGE_BYTES - _SPENT_AT)
        self._signal, self._thread, self._dump_fd = dump_signal, dump_thread, dump_fd
        self._changes, self._step, self._sequence = before[6], before[7], 0
        self._collective, self._inside, self._group_s = b"", 0, 0.0
        self.phase = Phase.START
        self._at_s, self._stepped_at_s = time.monotonic(), 0.0
        self._began_s, self._settled = self._at_s, 0
        self._progressed()

    def close(self) -> None:
        """Leaves the page as it is."""
        self._counts.release()
        self._spent.release()
        self._longest.release()
        self._map.close()

    def _progressed(self) -> None:
        self._changes += 1
        self._write()

    def _write(self) -> None:
        head = (MAGIC, os.getpid(), self._signal, self.phase, self._inside, self._settled)
        tail = (self._step, self._sequence, self._collective, self._thread, self._group_s, self._dump_fd)
        self._map[: _HEAD.size] = _HEAD.pack(*head, self._changes, *tail)  # pack_into makes all of it zero first

    def turn(self, phase: Phase) -> None:
        """Count what was done until now as the time since the last sign; from now on it is `phase`."""
        now = time.monotonic()
        passed = now - self._at_s
        self._at_s = now
        self._count(self.phase, passed)
        self._spent[self.phase] += passed
        if passed > self._longest[self.phase]:
            self._longest[self.phase] = passed
        self.phase = phase
        self._progressed()

    def stepped(self) -> None:
        """A step is finished. The first one of a process is not counted: it makes buffers and compiles."""
        self._step += 1
        self._settled = 1
        now = time.monotonic()
        if self._stepped_at_s:
            self._count(_NUM_PHASES, now - self._stepped_at_s)
        self._stepped_at_s = now
        self.turn(Phase.STEP)

    def enter(self, collective: bytes) -> Phase:
        """The rank waits in a collective from here on; returns the phase to come back to."""
        before = self.phase
        self._collective, self._inside = collective[:31], 1
        self._sequence += 1
        self.turn(Phase.COLLECTIVE)
        return before

    def at_step(self, step: int) -> None:
        """The number of the step that was finished last, shown at once; no sign of progress by itself."""
        self._step = step + 1
        self._write()

    def may_wait(self, seconds: float) -> None:
        """The script gave a group this time limit; the longest one counts. No sign of progress by itself."""
        if seconds > self._group_s:
            self._group_s = seconds
            self._write()

    def leave(self, before: Phase) -> None:
        """The collective is over. Who waits for many without an optimizer has started all the same."""
        self._inside = 0
        if self._sequence > _STARTED:
            before = Phase.STEP if before is Phase.START else before
            self._settled |= time.monotonic() - self._began_s > SETTLED_S
        self.turn(before)

    def _count(self, row: int, seconds: float) -> None:
        place = int(_PER_OCTAVE * math.log2(seconds / LEAST_S)) + 1 if seconds > LEAST_S else 0
        self._counts[row * NUM_BUCKETS + (place if place < NUM_BUCKETS else NUM_BUCKETS - 1)] += 1


class Reading:
    """Holds what a page says at one moment.

    Attributes:
        beat: for the verdicts.
        pid: of the process that wrote it; 0 if nobody did.
        dump_signal: what makes it append its stacks; 0 if nothing does.
        dump_thread: the thread that may get that signal instead of the main one; 0 for none.
        dump_fd: the descriptor that it appends them to, in its process.
        spent_s: per phase.
        num_steps: steps of this record, the first left out.
    """

    def __init__(self, content: bytes) -> None:
        (
            magic,
            self.pid,
            self.dump_signal,
            phase,
            inside,
            settled,
            *numbers,
            name,
            self.dump_thread,
            group_s,
            self.dump_fd,
        ) = _HEAD.unpack_from(content)
        if magic != MAGIC or phase >= _NUM_PHASES:
            self.pid = self.dump_signal = self.dump_thread = 0
            self.beat, self.spent_s, self.num_steps = Beat(), dict.fromkeys(Phase, 0.0), 0
            return
        self.spent_s = dict(zip(Phase, struct.unpack_from(f"<{_NUM_PHASES}d", content, _SPENT_AT), strict=True))
        rows = [
            struct.unpack_from(f"<{NUM_BUCKETS}I", content, _HISTOGRAMS_AT + 4 * NUM_BUCKETS * row)
            for row in range(_ROWS)
        ]
        self.num_steps = sum(rows[-1])
        longest = struct.unpack_from(f"<{_NUM_PHASES}d", content, _LONGEST_AT)
        self.beat = Beat(
            changes=numbers[0],
            step=numbers[1],
            phase=Phase(phase),
            collective=name.rstrip(b"\0").decode(errors="replace"),
            sequence=numbers[2],
            inside=bool(inside),
            settled=bool(settled),
            p99_s={p: _p99(rows[p]) for p in Phase},
            samples={p: sum(rows[p]) for p in Phase},
            step_p99_s=_p99(rows[-1]),
            longest_s=dict(zip(Phase, longest, strict=True)),
            group_s=group_s,
        )


def read(fd: int) -> Reading:
    """The page behind a descriptor; empty if it cannot be read."""
    try:
        content = os.pread(fd, PAGE_BYTES, 0)
    except OSError as error:
        pass_on(error)
        content = b""
    return Reading(content.ljust(PAGE_BYTES, b"\0"))


def is_dumped_to(fd: int, pid: int, dump_fd: int) -> bool:
    """Return whether a process with this `Reading.dump_fd` would append its stacks to the page behind our `fd`, and not to a file of its script.

    A script may close all descriptors and open others under their numbers; the fault handler cannot look.
    """
    try:
        theirs, ours = os.stat(f"/proc/{pid}/fd/{dump_fd}"), os.fstat(fd)
    except OSError as error:
        pass_on(error)
        return False
    return os.path.samestat(theirs, ours)


def take_dump(fd: int) -> str:
    """The stack dumps that were appended since the last call."""
    try:
        size = os.fstat(fd).st_size
        text = os.pread(fd, min(size - PAGE_BYTES, 1 << 20), PAGE_BYTES) if size > PAGE_BYTES else b""
        if text:
            os.ftruncate(fd, PAGE_BYTES)
    except OSError as error:
        pass_on(error)
        return ""
    return text.decode(errors="replace")


def _p99(counts: tuple[int, ...]) -> float:
    """The upper edge of the bucket below which 99 of 100 lie."""
    total = sum(counts)
    if not total:
        return 0.0
    above = 0
    for place in range(NUM_BUCKETS - 1, -1, -1):
        above += counts[place]
        if above > total // 100:
            return float(LEAST_S * 2.0 ** (place / _PER_OCTAVE))
    return LEAST_S
