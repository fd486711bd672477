"""A forked process shuts itself in: from then on it can compute, read files and speak on one descriptor, and nothing else.

    shut_in(keep=descriptor, parent=pid)

Whatever would reach outside (a file written or removed, a socket, another process, an inherited file or pipe) ends the process
at the system call, before it happens: a seccomp filter that lists what is allowed. Standard output and standard error lead
nowhere. Linux on x86-64; elsewhere `available()` is False. What it cannot see are writes to memory that is shared with others:
`shares_memory` tells before the fork whether there is any that is not ours.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys
from collections.abc import Iterable, Iterator

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_FILTER_MODE = 2
_ARCH_X86_64 = 0xC000003E
# struct seccomp_data: number, architecture, instruction pointer, six arguments of 64 bits.
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
# BPF: load a word, jump if equal, jump if any bit is set, return.
_LOAD, _EQUAL, _ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
_KILL, _ALLOW = 0x80000000, 0x7FFF0000

# read close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sig* pread64 readv access select sched_yield mremap madvise dup
# dup2 nanosleep getpid getsockname (Python names a socket that nobody closed) exit uname fcntl getcwd readlink gettimeofday getrlimit getrusage sysinfo times get*id arch_prctl gettid futex
# sched_getaffinity getdents64 restart_syscall clock_* exit_group newfstatat readlinkat faccessat pselect6 ppoll getcpu getrandom
# membarrier statx rseq faccessat2
_FREE = (
    0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 21, 23, 24, 25, 28, 32, 33, 35, 39, 51, 60, 63, 72, 79, 89, 96, 97, 98, 99,
    100, 102, 104, 107, 108, 110, 131, 158, 186, 202, 204, 217, 219, 228, 229, 230, 231, 262, 267, 269, 270, 271, 309, 318, 324,
    332, 334, 439,
)  # fmt: skip
_WRITES = (1, 20)  # write, writev: the first argument is the descriptor
_OPENS = ((2, 1), (257, 2))  # open, openat: number, and which argument has the flags
_IOCTL, _ASKS = 16, (0x5401, 0x5451)  # TCGETS and FIOCLEX, with which Python opens a file
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Shared memory that is ours: pages and slots have no name but that of their making.
_OURS = "/memfd:holdfast"


def available() -> bool:
    """Tell whether this machine has what a process needs to shut itself in."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def shares_memory() -> bool:
    """Tell whether this process can write to memory that others, but for holdfast's own, or files see."""
    return any(True for _ in shared_memory())


def shared_memory() -> Iterator[tuple[int, int]]:
    """Yields where memory begins and ends that others, but for holdfast's own, or files see, and this process can write to."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            name = fields[5].strip() if len(fields) > 5 else ""
            if fields[1][1] == "w" and fields[1][3] == "s" and not name.startswith(_OURS):
                first, _, end = fields[0].partition("-")
                yield int(first, 16), int(end, 16)


def shut_in(*, keep: int, parent: int) -> None:
    """Shuts the calling process in; there is no way out.

    Args:
        keep: the descriptor that it may write to; all others are closed.
        parent: it ends when this process does.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    program = b"".join(struct.pack("HBBI", *line) for line in _program((1, 2, keep)))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.create_string_buffer(header, len(header)))


def _program(writable: Iterable[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yields the lines of the filter: code, lines to skip if so, lines to skip if not, operand."""
    yield _LOAD, 0, 0, _ARCH
    yield _EQUAL, 1, 0, _ARCH_X86_64
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    for number in _FREE:
        yield _EQUAL, 0, 1, number
        yield _RETURN, 0, 0, _ALLOW
    for number in _WRITES:
        yield from _if_one_of(number, 0, writable)
    yield from _if_one_of(_IOCTL, 1, _ASKS)
    for number, argument in _OPENS:
        yield _EQUAL, 0, 4, number
        yield _LOAD, 0, 0, _ARGUMENTS + 8 * argument
        yield _ANY, 0, 1, _WRITE_FLAGS
        yield _RETURN, 0, 0, _KILL
        yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, _KILL


def _if_one_of(number: int, argument: int, values: Iterable[int]) -> Iterator[tuple[int, int, int, int]]:
    lines: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
    for value in values:
        lines += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    lines.append((_RETURN, 0, 0, _KILL))
    yield _EQUAL, 0, len(lines), number
    yield from lines


def _prctl(option: int, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *arguments, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
