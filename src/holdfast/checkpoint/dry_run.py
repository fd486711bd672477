"""Tells what a script will hold, before anything is allocated: the script itself, once per rank, with tensors without
memory.

    python -m holdfast.checkpoint.dry_run --world-size 8 --ranks-per-node 4 train.py --lr 3e-4

Every rank is a process of its own, forked from one that has torch loaded. In it process groups are torch's `fake` ones,
which talk to nobody, and every tensor is torch's FakeTensor: a shape, a dtype and a placement. The script runs until it
calls `Checkpointer.restore()`; there its state is looked at, optimizer state to come included, and the process ends.
So nothing is trained, saved, connected or read, but for what the script itself does until then.

The answer is one JSON document on standard output: each different part of each tensor once. What the script prints goes
to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import runpy
import select
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, BinaryIO, NoReturn

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.base.errors import HoldfastError, UsageError
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.state.training_state import State
from holdfast.core.model import Shard

logger = logging.getLogger(__name__)

# A script that has not come to its restore() by then waits for something that a rehearsal does not have.
RANK_TIMEOUT_S = 300.0
# Ranks at a time.
MAX_AT_ONCE = os.cpu_count() or 1

Told = Callable[[State], None]


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of the job that is rehearsed."""

    rank: int
    world_size: int
    ranks_per_node: int


class _Seen(BaseException):
    """The state was looked at; the script ends here. Not an Exception: no handler of the script may keep it."""


def rehearse(work: Callable[[Told], None], *, world_size: int, ranks_per_node: int) -> list[list[Shard]]:
    """Does `work` on every rank; for each state that it tells of the parts of all its tensors, each once.

    Call it in a process without threads: ranks are forked.

    Args:
        work: builds the objects of a rank and tells of their state; in a child, with tensors without memory. Ranks tell
            of equally many states.
        world_size: ranks of the job.
        ranks_per_node: what the script is told of its node.

    Raises:
        UsageError: on a rank the work failed, took too long, or told nothing; with its last words.
    """
    waiting = [Place(rank, world_size, ranks_per_node) for rank in reversed(range(world_size))]
    running: dict[int, _Running] = {}
    found: list[list[Shard]] = []
    try:
        while waiting or running:
            while waiting and len(running) < MAX_AT_ONCE:
                place = waiting.pop()
                child = _fork(work, place)
                running[child.descriptor] = child
            for answer in _collect(running):
                found += [[] for _ in range(len(answer) - len(found))]
                for shards, told in zip(found, answer, strict=False):
                    shards += told
    finally:
        for child in running.values():
            os.close(child.descriptor)
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
    return found


@dataclass(slots=True)
class _Running:
    """A rank at work."""

    place: Place
    pid: int
    descriptor: int  # it tells through this
    deadline_s: float
    answer: bytearray = field(default_factory=bytearray)


def _collect(running: dict[int, _Running]) -> Iterator[list[list[Shard]]]:
    """Reads what ranks tell; the whole answer of each that is done."""
    ready, _, _ = select.select(list(running), [], [], 1.0)
    for child in list(running.values()):
        if child.descriptor in ready:
            data = os.read(child.descriptor, 1 << 16)
            child.answer += data
            if not data:
                del running[child.descriptor]
                os.close(child.descriptor)
                os.waitpid(child.pid, 0)
                yield _told(child)
        elif time.monotonic() > child.deadline_s:
            raise UsageError(f"rank {child.place.rank} has not come to restore() after {RANK_TIMEOUT_S:.0f} s")


def _told(child: _Running) -> list[list[Shard]]:
    documents = [json.loads(line) for line in child.answer.splitlines()]
    if not documents:
        documents = [{"error": "it ended without calling Checkpointer.restore()"}]
    for document in documents:
        if "error" in document:
            raise UsageError(
                f"rank {child.place.rank} of the rehearsal: {document['error']}",
                remedy="a rehearsal runs the script until Checkpointer.restore() with tensors that have no memory: what "
                "reads numbers of a tensor, or needs a device that is not here, must come after it",
            )
    return [[Shard.of_row(row) for row in document["shards"]] for document in documents]


def _fork(work: Callable[[Told], None], place: Place) -> _Running:
    """Starts a rank."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _child(work, place, writer)
    os.close(writer)
    return _Running(place, pid, reader, time.monotonic() + RANK_TIMEOUT_S)


def _child(work: Callable[[Told], None], place: Place, descriptor: int) -> NoReturn:
    with open(descriptor, "wb") as out:
        try:
            os.dup2(2, 1)  # the answer on standard output is the parent's alone
            with _without_memory(place):
                work(lambda state: _tell(out, place.rank, state))
        except _Seen:
            pass
        except BaseException as error:  # noqa: BLE001 - top of the process: the parent says why it ended
            if not isinstance(error, SystemExit) or error.code:
                traceback.print_exc()
                out.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode())
    os._exit(0)  # nothing of the parent's may be flushed or cleaned up here


def _tell(out: BinaryIO, rank: int, state: State) -> None:
    """Tells what the rank holds of which it is the lowest holder."""
    with unset_fake_temporarily():
        shards = state.predict()
        if shards is None:
            logger.warning("state of an optimizer that is not of torch.optim is not counted")
            shards = {name: live.shard for name, live in state.gather().tensors.items()}
        rows = [shard.row() for shard in shards.values() if shard.ranks[0] == rank]
    out.write(json.dumps({"shards": rows}).encode() + b"\n")


@contextlib.contextmanager
def _without_memory(place: Place) -> Iterator[None]:
    """This process is the rank of a job that does not exist. Never undone: the process ends afterwards."""
    os.environ.update(
        RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.rank % place.ranks_per_node),
        LOCAL_WORLD_SIZE=str(place.ranks_per_node), GROUP_RANK=str(place.rank // place.ranks_per_node),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    really = dist.init_process_group

    def init_process_group(*_: Any, **__: Any) -> None:
        if not dist.is_initialized():
            really("fake", store=FakeStore(), rank=place.rank, world_size=place.world_size)

    for module in (dist, distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
    _keep_meshes_real()
    _without_reducer()
    _let_modules_change()
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::scatter_", "Meta"):
        from torch.distributed._tools import fake_collectives  # noqa: F401, PLC0415 - it registers them for torch 2.10
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _keep_meshes_real() -> None:
    """A mesh is a tensor of rank numbers, which must be read."""
    make = DeviceMesh.__init__

    @wraps(make)
    def init(self: DeviceMesh, *arguments: Any, _rank_map: Any = None, **more: Any) -> None:
        with unset_fake_temporarily():
            if isinstance(_rank_map, FakeTensor):  # init_device_mesh: 0, 1, 2, ...
                _rank_map = torch.arange(_rank_map.numel(), dtype=torch.int, device="cpu")
            make(self, *arguments, _rank_map=_rank_map, **more)

    DeviceMesh.__init__ = init  # type: ignore[method-assign]
    for name in ("__getitem__", "_flatten", "get_coordinate", "get_local_rank"):
        setattr(DeviceMesh, name, _real(getattr(DeviceMesh, name)))


def _real(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*arguments: Any, **more: Any) -> Any:
        with unset_fake_temporarily():
            return method(*arguments, **more)

    return called


def _let_modules_change() -> None:
    """`model.to(...)` swaps tensors without memory, and torch refuses what has a weak reference: its own notes of them have one."""
    swap = torch.utils.swap_tensors

    def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
        seen = weakref.getweakrefs
        weakref.getweakrefs = lambda _: []
        try:
            swap(one, other)  # type: ignore[no-untyped-call]
        finally:
            weakref.getweakrefs = seen

    torch.utils.swap_tensors = swap_tensors


def _without_reducer() -> None:
    """DDP compares and sends parameters when it is made, and makes buckets for gradients: memory, for no step here."""
    distributed._verify_param_shape_across_processes = lambda *_, **__: None  # type: ignore[attr-defined]
    distributed._sync_module_states = lambda *_, **__: None  # type: ignore[attr-defined]
    DistributedDataParallel._ddp_init_helper = lambda *_, **__: None  # type: ignore[method-assign]


def run_script(path: str, arguments: Sequence[str]) -> Callable[[Told], None]:
    """The work that is a script: it runs as if it were started, up to its `Checkpointer.restore()`."""

    def work(tell: Told) -> None:
        def restore(self: Checkpointer, *_: Any, **__: Any) -> NoReturn:
            rank = dist.get_rank() if dist.is_initialized() else 0
            size = dist.get_world_size() if dist.is_initialized() else 1
            patterns, names = self._replicated, self._exclude
            tell(State(self._objects, rank=rank, world_size=size, replicated=patterns, exclude=names, allocated=False))
            raise _Seen

        Checkpointer.restore = restore  # type: ignore[method-assign]
        sys.argv = [path, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        runpy.run_path(path, run_name="__main__")

    return work


def _warm() -> None:
    """Loads what torch loads at first use, once instead of on every rank."""
    parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    torch.optim.AdamW([parameter]).step()


def main(arguments: Sequence[str]) -> int:
    """Rehearses a script and prints what it will hold; the exit code."""
    parser = argparse.ArgumentParser(prog="holdfast plan")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    _warm()
    work = run_script(options.script, options.arguments)
    try:
        (shards,) = rehearse(work, world_size=options.world_size, ranks_per_node=options.ranks_per_node)
    except HoldfastError as error:
        document: dict[str, Any] = {"error": [error.what, error.remedy]}
    else:
        document = {"shards": [shard.row() for shard in shards]}
    sys.stdout.write(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
