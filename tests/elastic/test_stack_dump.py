"""A dump of the fault handler: where a rank stands, and what it has chosen to wait for."""

from __future__ import annotations

import pytest

from holdfast.core.elastic.worker_facts import Phase
from holdfast.elastic.watchdog.stack_dump import UNKNOWN, read_stack

PYTHON = "/usr/lib/python3.11"


def dump(*frames: str) -> str:
    """Of a process with two threads; the main one, innermost frame first, comes last."""
    other = f'Thread 0x1 (most recent call first):\n  File "{PYTHON}/queue.py", line 1 in get\n\n'
    return f"{other}Current thread 0x2 (most recent call first):\n" + "".join(f"  File {frame}\n" for frame in frames)


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (['"/x/torch/autograd/graph.py", line 1 in _engine_run_backward', '"/x/train.py", line 2 in f'], Phase.COLLECTIVE),
        (['"/x/torch/distributed/rendezvous.py", line 1 in g'], Phase.COLLECTIVE),
        (['"/x/torch/cuda/__init__.py", line 1 in synchronize', '"/x/train.py", line 2 in f'], Phase.COLLECTIVE),
        (['"/x/torch/cuda/memory.py", line 1 in empty_cache'], None),
        (['"/usr/lib/threading.py", line 1 in wait', '"/x/torch/utils/data/dataloader.py", line 9 in n'], Phase.DATA),
        (['"/x/a.py", line 1 in g', '"/x/torch/_inductor/codecache.py", line 1 in h'], Phase.COMPILE),
        (['"/x/torch/serialization.py", line 1 in _save'], Phase.SAVING),
        (['"/x/torch/distributed/checkpoint/filesystem.py", line 1 in _write_item'], Phase.SAVING),
        (['"<frozen importlib._bootstrap>", line 1 in _load'], Phase.START),
        (['"/x/train.py", line 1 in g', '"/x/torch/nn/parallel/distributed.py", line 1 in forward'], None),
    ],
)  # fmt: skip
def test_where_a_stack_stands(frames: list[str], phase: Phase | None) -> None:
    assert read_stack(dump(*frames)).stands is phase


# What runs a script under the launcher, as it stands in every dump.
RUNS = ['"<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed',
    '"<frozen importlib._bootstrap_external>", line 940 in exec_module',
    '"/x/holdfast/elastic/worker/main_module.py", line 52 in run_path', '"/x/holdfast/elastic/worker/worker_main.py", line 314 in run_script']  # fmt: skip


def test_a_script_that_is_run_is_no_import_and_one_that_imports_is() -> None:
    script = '"/x/train.py", line 33 in <module>'
    assert read_stack(dump(script, *RUNS)).stands is None
    imports = '"<frozen importlib._bootstrap>", line 1 in _find_and_load'
    assert read_stack(dump('"/x/slow.py", line 1 in <module>', imports, script, *RUNS)).stands is Phase.START
    assert read_stack(dump(*RUNS)).stands is None


@pytest.mark.parametrize(
    ("frames", "waits_in"),
    [
        ([f'"{PYTHON}/threading.py", line 1 in wait', f'"{PYTHON}/concurrent/futures/_base.py", line 1 in result'], "a future"),
        ([f'"{PYTHON}/socket.py", line 1 in readinto', f'"{PYTHON}/http/client.py", line 1 in begin'], "a connection"),
        ([f'"{PYTHON}/ssl.py", line 1 in read', '"/x/urllib3/connection.py", line 1 in g'], "a connection"),
        (['"/x/botocore/endpoint.py", line 1 in send'], "a store"),
        ([f'"{PYTHON}/subprocess.py", line 1 in _wait', '"/x/train.py", line 1 in build'], "a child"),
        ([f'"{PYTHON}/multiprocessing/connection.py", line 1 in _recv'], "another process or a queue"),
        ([f'"{PYTHON}/selectors.py", line 1 in select', '"/x/train.py", line 1 in f'], "another process or a queue"),
        ([f'"{PYTHON}/cmd.py", line 1 in cmdloop', f'"{PYTHON}/pdb.py", line 1 in interaction'], "a debugger"),
        (['"/x/IPython/core/debugger.py", line 1 in f'], "a debugger"),
        (['"/x/train.py", line 1 in f', f'"{PYTHON}/bdb.py", line 1 in trace_dispatch'], "a debugger"),
        ([f'"{PYTHON}/threading.py", line 1 in _wait_for_tstate_lock', f'"{PYTHON}/threading.py", line 1 in join'], "a thread"),
        # A user's own files may have these names, and a lock says nothing.
        (['"/x/queue.py", line 1 in get', '"/x/code.py", line 1 in train'], ""),
        ([f'"{PYTHON}/threading.py", line 1 in acquire', '"/x/train.py", line 1 in f'], ""),
        # What stands in a collective waits for others, and a loader has the patience of its phase.
        (['"/x/torch/distributed/store.py", line 1 in get', f'"{PYTHON}/subprocess.py", line 1 in run'], ""),
        ([f'"{PYTHON}/multiprocessing/connection.py", line 1 in w', '"/x/torch/utils/data/dataloader.py", line 9 in n'], ""),
        # A data set that is read in the rank's own process waits for what it likes.
        ([f'"{PYTHON}/ssl.py", line 1 in read', '"/x/torch/utils/data/dataloader.py", line 9 in n'], "a connection"),
    ],
)  # fmt: skip
def test_what_a_stack_waits_for(frames: list[str], waits_in: str) -> None:
    assert read_stack(dump(*frames)).waits_in == waits_in


@pytest.mark.parametrize(
    ("frames", "explained"),
    [
        (['"/x/torch/utils/data/dataloader.py", line 9 in next'], True),
        ([f'"{PYTHON}/selectors.py", line 1 in select', '"/x/torch/utils/data/dataloader.py", line 9 in n'], True),
        (['"/x/objects.py", line 1 in __getitem__', '"/x/torch/utils/data/dataloader.py", line 9 in n'], False),
        (['"/x/torch/distributed/store.py", line 1 in get'], True),
        (['"/x/train.py", line 1 in receive'], False),
    ],
)
def test_a_collective_and_a_loader_account_for_the_call_that_they_wait_in(frames: list[str], explained: bool) -> None:
    assert read_stack(dump(*frames)).explained is explained


def test_a_dump_that_does_not_reach_the_main_thread_tells_nothing() -> None:
    """The fault handler stops after a hundred threads, and the main one comes last."""
    assert read_stack(dump('"/x/torch/distributed/store.py", line 1 in get') + "\n...\n") == UNKNOWN


def test_the_place_is_that_of_the_innermost_frames_without_lines() -> None:
    """A loop moves from line to line."""
    one, other = (read_stack(dump(f'"/x/a.py", line {n} in f', '"/x/b.py", line 7 in g')) for n in (3, 4))
    assert one.place == other.place == "f (a.py) < g (b.py)"
    assert read_stack("") == read_stack("no stack at all")
