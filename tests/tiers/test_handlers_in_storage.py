"""What a signal's handler raises while files are written, listed and read, or the machine is asked, is no fault of theirs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.memory import memory_budget, processes
from kit.strikes import strikes
from sample_kit import sampled

ASKS: dict[str, Callable[[LocalBackend], object]] = {
    "put": lambda backend: backend.put("a", [memoryview(b"x")], stamp="s"),
    "create": lambda backend: backend.create("b", b"x", stamp="s"),
    "list": lambda backend: list(backend.listing("")),
    "read": lambda backend: backend.read_into("there", memoryview(bytearray(1))),
    "limits": lambda _: memory_budget._number(Path("/proc/sys/kernel/pid_max")),
    "machine": lambda _: processes.machine_id(),
}


@pytest.mark.parametrize("name", sampled(ASKS, *(name for name in ASKS if name != "create")))
def test_what_a_handler_raises_at_any_moment_is_raised_as_it_is(tmp_path: Path, name: str) -> None:
    def fails() -> None:
        raise TimeoutError

    def counts(frame: FrameType, event: str) -> bool:
        return event in ("call", "return") and frame.f_code.co_filename != pathlib.__file__  # it leaves files open

    backend = LocalBackend(tmp_path)
    backend.put("there", [memoryview(b"x")], stamp="s")
    struck = 0
    for strike in strikes(fails, counts=counts):
        with suppress(TimeoutError), strike:
            ASKS[name](backend)
        struck += strike.came
    assert struck > 2
