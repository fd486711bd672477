"""What the kernel tells of a process: of one with a hostile name, of none, and where it tells nothing."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.tiers.memory.proc_stat import stat_fields


def test_a_name_with_parentheses_and_spaces_moves_no_field() -> None:
    code = "import sys; open('/proc/self/comm', 'w').write('a) Z 7 (b'); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(["/usr/bin/env", "python3", "-c", code], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        state, parent, *_ = stat_fields(child.pid)
    assert state in (b"R", b"S", b"D")
    assert int(parent) == os.getpid()


def test_a_process_that_is_gone_has_no_fields() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    assert stat_fields(child.pid) == []


def test_want_of_a_descriptor_is_an_error_and_no_end() -> None:
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        stat_fields(os.getpid())


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
