"""One contestant of benchmarks.rivals: saves and loads the state that it is told, one line of JSON per order.

Runs in the environment of its library, so it imports nothing of holdfast unless it is holdfast's turn:
python rivals_worker.py CONTESTANT DIRECTORY SHAPES. Orders on standard input: `save`, `load`, `end`. Each save is stamped,
so that a load shows which save it is; a load that shows another one, or a mixed one, is an error.

A contestant is a class with `save` (returns when the tensors may change again), `safe` (waits until the state would
survive SIGKILL of this process; None if that is only so with `done`), `done` (waits until the library calls it complete)
and `load` (into the tensors of the training, copying included).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

Tensors = dict[str, torch.Tensor]
WAIT_S = 120.0


class TorchSave:
    """torch.save into a temporary file, fsync, rename."""

    synced = True

    def __init__(self, tensors: Tensors, home: Path) -> None:
        self.tensors, self.home = tensors, home

    def save(self, step: int) -> None:
        with (self.home / "new.pt").open("wb") as file:
            torch.save(self.tensors, file)
            os.fsync(file.fileno())
        (self.home / "new.pt").rename(self.home / "state.pt")

    def safe(self) -> bool | None:
        return True

    def done(self) -> None:
        """It is when `save` returns."""

    def load(self) -> None:
        found = torch.load(self.home / "state.pt", weights_only=True, mmap=True)
        _copy_in(self.tensors, found)

    def close(self) -> None:
        """Nothing runs."""


class Dcp:
    """torch.distributed.checkpoint.async_save, with a stager that is kept; files are synchronised, its default."""

    synced = True
    in_process = False

    def __init__(self, tensors: Tensors, home: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.tensors, self.home, self.step = tensors, home, 0
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.in_process,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self.pending: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.step = step
        kind = AsyncCheckpointerType.PROCESS if self.in_process else AsyncCheckpointerType.THREAD
        path = self.home / f"step{step}"
        self.pending = dcp.async_save(
            self.tensors,
            checkpoint_id=str(path),
            storage_writer=dcp.FileSystemWriter(path),
            async_checkpointer_type=kind,
            async_stager=self.stager,
        )

    def safe(self) -> bool | None:
        return None

    def done(self) -> None:
        getattr(self.pending, "upload_completion", self.pending).result(WAIT_S)
        _forget(self.home, self.step)

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.tensors, checkpoint_id=str(self.home / f"step{self.step}"))

    def close(self) -> None:
        import torch.distributed.checkpoint._async_process_executor as executor

        if executor._CHECKPOINT_PROCESS is not None:
            executor._CHECKPOINT_PROCESS._save_process.kill()


class DcpProcess(Dcp):
    """The same in a process of its own, through shared memory."""

    in_process = True


class Snapshot:
    """torchsnapshot.Snapshot.async_take."""

    synced = False

    def __init__(self, tensors: Tensors, home: Path) -> None:
        self.tensors, self.home, self.step = tensors, home, 0
        self.pending: Any = None

    def _app(self) -> Any:
        from torchsnapshot import StateDict

        return {"state": StateDict(**self.tensors)}

    def save(self, step: int) -> None:
        from torchsnapshot import Snapshot as Library

        self.step = step
        self.pending = Library.async_take(str(self.home / f"step{step}"), self._app())

    def safe(self) -> bool | None:
        return None

    def done(self) -> None:
        self.pending.wait()
        _forget(self.home, self.step)

    def load(self) -> None:
        from torchsnapshot import Snapshot as Library

        Library(str(self.home / f"step{self.step}")).restore(self._app())

    def close(self) -> None:
        """Nothing runs."""


class Nvrx:
    """nvidia-resiliency-ext: LocalCheckpointManager with its asynchronous queue; calls of CUDA do nothing here."""

    synced = False

    def __init__(self, tensors: Tensors, home: Path) -> None:
        torch.cuda.synchronize = lambda *_, **__: None
        torch.cuda.current_device = lambda: "cpu"
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        self.tensors = tensors
        self.manager = LocalCheckpointManager(str(home))
        self.queue = AsyncCallsQueue(persistent=False)
        self.wrapped = _nvrx_state()

    def save(self, step: int) -> None:
        request = self.manager.save(self.wrapped(dict(self.tensors)), step, is_async=True)
        self.queue.schedule_async_request(request)

    def safe(self) -> bool | None:
        return None

    def done(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True)

    def load(self) -> None:
        self.manager.latest_iteration = -1
        self.manager.find_latest()
        found, _ = self.manager.load()
        _copy_in(self.tensors, found.state_dict)

    def close(self) -> None:
        """Nothing runs."""


class CpuState:
    """Stands for the class that `_nvrx_state` makes: it is written to files by name."""


def _nvrx_state() -> type:
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
        BasicTensorAwareStateDict,
        dict_list_map_inplace,
    )

    class State(BasicTensorAwareStateDict):
        """Its own one copies from a GPU; on CPU it would hand out the training's tensors."""

        def __init__(self, state: Tensors) -> None:
            self.state_dict, self._is_hollow = state, False

        def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
            dict_list_map_inplace(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, self.state_dict)

        def restore_tensor_device(self, non_blocking: bool = True) -> None:
            """They are where they belong."""

    State.__qualname__ = State.__name__ = "CpuState"
    State.__module__ = __name__
    globals()["CpuState"] = State
    return State


class Dlrover:
    """dlrover's flash checkpoint to memory and disk, with the process that saves for its launcher."""

    synced = False
    AGENT = (
        "import logging, sys, time, ctypes; logging.disable(logging.INFO); ctypes.CDLL(None).prctl(1, 9)\n"
        "from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver as S\n"
        "S.start_async_saving_ckpt(); print('up', flush=True)\n"
        "while True: time.sleep(1)\n"
    )

    def __init__(self, tensors: Tensors, home: Path) -> None:
        job = f"rivals{os.getpid()}"
        names = {"ELASTIC_JOB_NAME": job, "TORCHELASTIC_RUN_ID": job, "NODE_RANK": "0", "DLROVER_LOG_LEVEL": "ERROR"}
        os.environ.update(names)
        self.agent = subprocess.Popen([sys.executable, "-c", self.AGENT], stdout=subprocess.PIPE, text=True)
        assert self.agent.stdout is not None
        while self.agent.stdout.readline() not in ("up\n", ""):
            pass
        os.environ["ROLE_NAME"] = "dlrover-trainer"
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self.tensors, self.home, self.step, self.disk = tensors, home, 0, StorageType.DISK
        self.library = DdpCheckpointer(str(home), local_shard_num=1, global_shard_num=1)

    def save(self, step: int) -> None:
        self.step = step
        self.library.save_checkpoint(step, dict(self.tensors), storage_type=self.disk)

    def safe(self) -> bool | None:
        return True  # `save` ends with the copy in memory that the other process holds

    def done(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while self._tracked() < self.step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self.step} was not written in {WAIT_S:.0f} s")
            time.sleep(0.002)

    def _tracked(self) -> int:
        try:
            return int((self.home / "dlrover_latest.txt").read_text() or 0)
        except (FileNotFoundError, ValueError):
            return 0

    def load(self) -> None:
        found = self.library._engine._load_from_storage()
        _copy_in(self.tensors, found)

    def load_memory(self) -> None:
        _, found = self.library._engine.get_state_dict_from_memory()
        _copy_in(self.tensors, next(iter(found.values())) if "model_states" in found else found)

    def close(self) -> None:
        self.agent.kill()


class TorchCheckpointing:
    """torch_checkpointing.CheckpointManager, asynchronous, as its documentation says for processes without a GPU."""

    synced = False

    def __init__(self, tensors: Tensors, home: Path) -> None:
        from torch_checkpointing import CheckpointManager, CheckpointStagerConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        saving = AsyncCheckpointSaverConfig(staging_config=staging)
        self.tensors, self.home, self.step = tensors, home, 0
        plain = LocalFileSystemStorageConfig(use_direct_io=False)  # direct writes of this size fail with EINVAL here
        self.library = CheckpointManager(CheckpointManager.Config(save=saving, storage_config=plain))
        self.pending: Any = None

    def save(self, step: int) -> None:
        self.step = step
        self.pending = self.library.save(str(self.home / f"step{step}"), {"state": self.tensors})
        with self.library.lock():  # until then nothing may be changed
            pass

    def safe(self) -> bool | None:
        return None

    def done(self) -> None:
        if self.pending is not None:
            self.pending.result(WAIT_S)
        _forget(self.home, self.step)

    def load(self) -> None:
        self.library.load(str(self.home / f"step{self.step}"), into={"state": self.tensors})

    def close(self) -> None:
        self.library.close()


class LmResiliency:
    """lm-resiliency's manager of checkpoints in memory; each is flushed to its directory at once. One rank: no replica."""

    synced = False

    def __init__(self, tensors: Tensors, home: Path) -> None:
        self.tensors, self.home, self.step = tensors, home, 0
        self.library = self._open()

    def _open(self) -> Any:
        from lm_resiliency.checkpointing.config import InMemoryCkptConfig
        from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

        config = InMemoryCkptConfig(
            interval=1, disk_flush_interval=0, disk_folder=str(self.home), run_id="rivals", verify_integrity=True
        )
        return InMemoryCheckpointManager(config)

    def save(self, step: int) -> None:
        self.step = step
        self.library.save(self.tensors, step)
        self.library.maybe_wait()

    def safe(self) -> bool | None:
        return None  # its memory is that of the process that trains

    def done(self) -> None:
        self.library.flush_to_disk(self.step)

    def load_memory(self) -> None:
        _copy_in(self.tensors, self.library.load()[0])

    def before_load(self) -> None:
        """Another manager, which has nothing in memory."""
        self.library.close()
        self.library = self._open()

    def load(self) -> None:
        _copy_in(self.tensors, self.library.load()[0])

    def close(self) -> None:
        self.library.close()


class Holdfast:
    """holdfast.Checkpointer with a plain module that holds the tensors; both levels."""

    synced = True

    def __init__(self, tensors: Tensors, home: Path) -> None:
        import holdfast

        self.module = torch.nn.Module()
        for name, tensor in tensors.items():
            self.module.register_buffer(name.replace(".", "_"), tensor)
        never = "1000000000"
        config = holdfast.Config(every=never, durable_every=never, runtime_dir=str(home / "run"), linger_s=30.0)
        self.open = lambda: holdfast.Checkpointer(home / "ck", model=self.module, config=config)
        self.library = self.open()
        self.library.restore()
        self.handle: Any = None

    def save(self, step: int) -> None:
        self.handle = self.library.save(step, level="durable")

    def safe(self) -> bool | None:
        self.handle.wait("captured", timeout_s=WAIT_S)
        return True

    def done(self) -> None:
        self.handle.wait("durable", timeout_s=WAIT_S)

    def load_memory(self) -> None:
        self.library.restore()

    def before_load(self) -> None:
        """The job ends, and its keeper with it: no memory holds anything."""
        self.library.close()
        self.library = self.open()

    def load(self) -> None:
        """From storage; a new keeper is started within the time."""
        self.library.restore()

    def close(self) -> None:
        self.library.close()


CONTESTANTS: dict[str, type] = {
    "holdfast": Holdfast,
    "torch_save": TorchSave,
    "dcp_thread": Dcp,
    "dcp_process": DcpProcess,
    "torchsnapshot": Snapshot,
    "nvidia_resiliency_ext": Nvrx,
    "dlrover": Dlrover,
    "torch_checkpointing": TorchCheckpointing,
    "lm_resiliency": LmResiliency,
}


def _copy_in(tensors: Tensors, found: Any) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(found[name])


def _forget(home: Path, step: int) -> None:
    """As everybody's retention would: the newest two stay."""
    shutil.rmtree(home / f"step{step - 2}", ignore_errors=True)


def _sync_all(home: Path) -> None:
    """What a library did not do itself before it called the checkpoint complete."""
    for path in [home, *home.rglob("*")]:
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # removed meanwhile
        os.fsync(fd)
        os.close(fd)


def _stamp(tensors: Tensors, step: int) -> None:
    for tensor in tensors.values():
        flat = tensor.view(-1)
        flat[0] = flat[-1] = step


def _require_stamp(tensors: Tensors, step: int) -> None:
    found = {float(t.view(-1)[0]) for t in tensors.values()} | {float(t.view(-1)[-1]) for t in tensors.values()}
    if found != {float(step)}:
        raise AssertionError(f"the load shows {sorted(found)[:4]}, not step {step}")


class Worker:
    """The tensors, a plain copy of them, and the contestant."""

    def __init__(self, name: str, home: Path, shapes: dict[str, list[int]]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {key: torch.empty(shape).normal_(0, 0.02, generator=generator) for key, shape in shapes.items()}
        self.plain = {key: tensor.clone() for key, tensor in self.tensors.items()}
        self.home, self.step = home, 0
        self.contestant: Any = CONTESTANTS[name](self.tensors, home)

    def save(self) -> dict[str, float | None]:
        """Seconds of a plain copy, and from the call on until each is reached."""
        self.step += 1
        _stamp(self.tensors, self.step)
        copy = _timed(lambda: _copy_in(self.plain, self.tensors))
        started = time.perf_counter()
        self.contestant.save(self.step)
        stall = time.perf_counter() - started
        in_memory = self.contestant.safe() is not None
        safe = time.perf_counter() - started
        self.contestant.done()
        done = time.perf_counter() - started
        if not self.contestant.synced:
            _sync_all(self.home)
        durable = time.perf_counter() - started
        return {"copy": copy, "stall": stall, "safe": safe if in_memory else done, "done": done, "durable": durable}

    def load(self) -> dict[str, float | None]:
        """Seconds of loading the newest save, each proved by its stamp."""
        found: dict[str, float | None] = {"load_memory": None, "load": None}
        for name in found:
            loader = getattr(self.contestant, name, None)
            if loader is not None:
                getattr(self.contestant, f"before_{name}", lambda: None)()
                _stamp(self.tensors, -1)
                found[name] = _timed(loader)
                _require_stamp(self.tensors, self.step)
        return found


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _group() -> None:
    """A process group of one: most of them ask for it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    facts = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**facts, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    dist.init_process_group("gloo")


def main() -> None:
    name, home, shapes = sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes elsewhere
    torch.set_num_threads(1)
    _group()
    worker = Worker(name, home, shapes)
    answers.write(json.dumps({"ready": name}) + "\n")
    orders = {"save": worker.save, "load": worker.load}
    for line in sys.stdin:
        if line.strip() == "end":
            break
        answers.write(json.dumps(orders[line.strip()]()) + "\n")
    worker.contestant.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
