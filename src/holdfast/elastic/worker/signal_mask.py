"""Keeps the signals of a process from the threads that begin in a block, for the script may block one and wait for it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

# What a thread does to itself.
_OF_A_THREAD = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Threads that begin in the block get no signal of the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OF_A_THREAD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
