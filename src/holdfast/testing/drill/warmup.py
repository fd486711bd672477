"""Does what makes the processes of a drill cheap to fork: one life of a job is lived before the first fork.

The fork server lives it as a trainer, the lane as its keeper, both in their own process. After that the caches that Python
and PyTorch fill at first use are full (patterns, message types, lazy imports), and every child starts with them. Then
memory is arranged so that forking copies little: all objects leave the collector's sight, the collector is off (its
marks would have every page copied), and pages are joined to huge ones, of which a fork copies one entry instead of 512.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.base.config import Config
from holdfast.keeper.rpc import spawn
from holdfast.keeper.rpc.paths import RuntimePaths, place_of
from holdfast.keeper.service.keeper import Keeper, KeeperOptions, become_keeper, clean
from holdfast.testing.drill.drill_keeper import options_of
from holdfast.testing.drill.shared import LOG_FORM, Setup
from holdfast.testing.drill.trial_plan import LAST_LIFE, NO_STRIKE, SOLO, LifePlan, Trial, saves

# Each job has a first life and one that comes back from storage.
NUM_LIVES = 2
HUGE_BYTES = 2 << 20
LINGER_S = 30.0
# Threads that were joined are on their way out of the kernel.
THREADS_END_S = 5.0
_MADV_COLLAPSE = 25
_POLL_S = 0.002


def setups(sandbox: str) -> Iterator[Setup]:
    """The lives, those of a job in a directory of its own; one with a small model and one with a large one."""
    lives = (LifePlan(saves(random.Random(0), 4), ends="close"), LAST_LIFE)
    for number, large in enumerate((False, True)):
        trial = Trial(number, 0, SOLO, NO_STRIKE, lives, large=large)
        place = f"{sandbox}/{number}"
        os.makedirs(place, exist_ok=True)
        yield from (Setup(trial, life, 0, place) for life in range(NUM_LIVES))


def keep(setup: Setup) -> None:
    """The keeper of one life, in this process; ends when its only rank has closed."""
    place = place_of(setup.root, setup.config)
    place.make()
    lock = become_keeper(place)
    if lock is None:
        raise RuntimeError(f"another keeper is at {place.directory}")
    options = options_of(setup, -1)
    Keeper(KeeperOptions(place, options.root, options.memory_budget, LINGER_S)).run(lambda: None)
    clean(place)
    os.close(lock)


def await_end(setup: Setup) -> None:
    """Waits until the keeper of a life is gone."""
    place = place_of(setup.root, setup.config)
    deadline = time.monotonic() + 2 * LINGER_S
    while place.socket.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def await_keeper(place: RuntimePaths, root: str, config: Config, deadline: float) -> bool:
    """Instead of `start._spawn`: the lane is about to be the keeper."""
    del root, config
    while not (found := spawn._answers(place)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Sets the log up as children have it, and throws away what is logged here."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=LOG_FORM, force=True)
    shown = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        os.close(nowhere)


def settle() -> None:
    """Call it when everything is loaded, right before the first fork."""
    deadline = time.monotonic() + THREADS_END_S
    while (threads := len(os.listdir("/proc/self/task"))) != 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"a process with {threads} threads cannot be forked safely")
        time.sleep(_POLL_S)
    gc.collect()
    gc.disable()
    gc.freeze()
    collapse()


def collapse() -> None:
    """Joins the anonymous memory of this process to huge pages, where the kernel can (Linux 6.1, madvise(2))."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split()
        if words[1] != "rw-p" or (len(words) > 5 and words[5] != "[heap]"):
            continue
        first, last = (int(word, 16) for word in words[0].split("-"))
        first += -first % HUGE_BYTES
        last -= last % HUGE_BYTES
        if first < last:  # an error only means that forks stay slow
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)
