"""Has what MindSpore calls when AITURBO=1: checkpoints of its own training through holdfast's keepers and storage.

MindSpore imports `aiturbo.checkpoint.aiturbo_mindspore` and `...aiturbo_mindspore_ckpt` then; the folder `front` beside
this file holds packages of these names, which lead here. With that folder on PYTHONPATH a MindSpore script runs
unchanged:

    export AITURBO=1 PYTHONPATH=$(python -m holdfast.adapters.aiturbo.front)

`ModelCheckpoint` then makes a version of holdfast for every checkpoint, in `<directory>/holdfast`, captured in the
keepers' memory before training goes on and durable behind it; `load_checkpoint` brings it back from memory first, verified.
Beside it stands a small file of the checkpoint's name that says which version it is, so that names are listed, counted
and removed as MindSpore does; how many versions are kept is the setting `keep_last`.

Interfaces: mindspore 2.10 (`train/callback/_checkpoint.py`, `train/serialization.py`). Which ranks hold the same slice is what
MindSpore says in `stage_layout`; with its redundancy switched on every rank keeps its own. Several ranks find each
other at MASTER_ADDR and MASTER_PORT, else at MindSpore's scheduler, one port above its own.
"""

from __future__ import annotations

import atexit
import binascii
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from holdfast.adapters.save_only import SaveOnly
from holdfast.base import config as settings
from holdfast.base.errors import LevelNotReached, MismatchError, StorageError, UsageError, VersionNotFound
from holdfast.base.handler_errors import pass_on
from holdfast.base.replacing import replacing
from holdfast.core.model import Version
from holdfast.tiers.format.strict_json import parse_loose

logger = logging.getLogger(__name__)

# Below the directory that MindSpore is given.
OWN = "holdfast"
MAX_NAME_BYTES = 4096
JOIN_S = 300.0
# dtypes that tensors have; the bytes of others are kept with the dtype's name.
_PLAIN = frozenset(["bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64", "complex64"])

# parameter -> groups of ranks that hold the same slice
Redundancy = Mapping[str, Sequence[Sequence[int]]]
# What MindSpore gives and takes: name -> [array] or [array, CRC32 of its bytes].
Entries = Mapping[str, list[Any]]


class Ckpt:
    """Holds what one rank holds of a checkpoint; the object that is saved.

    Attributes:
        name: as MindSpore names the checkpoint.
        entries: its arrays.
        groups: parameter -> the ranks that hold this rank's slice of it; others are this rank's own.
    """

    def __init__(self) -> None:
        self.name = ""
        self.entries: dict[str, list[Any]] = {}
        self.groups: dict[str, tuple[int, ...]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "entries": {self._key(n): _stored(n, v) for n, v in self.entries.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.name = state["name"]
        self.entries = dict(_restored(item) for item in state["entries"].values())

    def holders(self, path: str) -> tuple[int, ...] | None:
        """The ranks that hold the array of this name alike."""
        key = path.removeprefix("ckpt.entries.").removesuffix(".data")
        name, mark, _ = key.rpartition("@")
        return self.groups.get(name) if mark else None

    def _key(self, name: str) -> str:
        """Two slices of one parameter must not have one name."""
        group = self.groups.get(name)
        return name if group is None else f"{name}@{group[0]}"


def _stored(name: str, value: Sequence[Any]) -> dict[str, Any]:
    array = np.asarray(value[0])
    if array.dtype.kind == "U":
        data: Any = str(array)
    elif array.dtype.name in _PLAIN:
        data = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    else:
        data = torch.from_numpy(np.frombuffer(array.tobytes(), dtype=np.uint8).copy())
    row = {"name": name, "data": data, "dtype": array.dtype.name, "shape": list(array.shape)}
    return {**row, "crc": int(value[1])} if len(value) > 1 else row


def _restored(item: Mapping[str, Any]) -> tuple[str, list[Any]]:
    data = item["data"]
    if isinstance(data, str):
        array: Any = np.array(data)
    elif item["dtype"] in _PLAIN:
        array = data.numpy()
    else:
        array = np.frombuffer(data.numpy().tobytes(), dtype=_dtype(item["dtype"])).reshape(item["shape"])
    return item["name"], [array, item["crc"]] if "crc" in item else [array]


def _dtype(name: str) -> Any:
    try:
        return np.dtype(name)
    except TypeError:
        from mindspore.common import np_dtype  # noqa: PLC0415 - registers what numpy lacks: bfloat16

        return np.dtype(getattr(np_dtype, name))


class Front:
    """The checkpoints of one directory.

    Args:
        root: the directory, the same on every rank.
        rank, world_size: of MindSpore's job.
    """

    def __init__(self, root: Path, rank: int, world_size: int) -> None:
        self.root = root
        self._rank = rank
        self._ckpt = Ckpt()
        _join(rank, world_size)
        self._checkpointer = SaveOnly(root / OWN, ckpt=self._ckpt)
        self._started = False
        # Of two saves in one step each has a version: a number of its own.
        self._asked, self._number = ("", -1), -1

    def layout(self, stage_layout: Redundancy | None, *, dedup: bool) -> None:
        """Takes over which ranks hold the same."""
        groups = {}
        for name, of_ranks in (stage_layout or {}).items() if dedup else ():
            groups[name] = next(tuple(sorted(group)) for group in of_ranks if self._rank in group)
        self._ckpt.groups = groups

    def save(self, name: str, step: int, entries: Entries) -> None:
        """A version; returns when everything is copied. What holdfast cannot do never ends the training."""
        if not self._started:  # nothing was loaded: a run of its own, whatever lies there
            self._checkpointer.restore(fresh=True)
            self._started = True
        self._ckpt.name, self._ckpt.entries = name, dict(entries)
        if self._asked != (name, step):
            self._asked, self._number = (name, step), max(step, self._number + 1)
        handle = self._checkpointer.save(self._number, "durable")
        self._ckpt.entries = {}
        if handle.given_up:
            logger.warning("%s was not saved: %s", name, handle.given_up)
        elif self._rank == 0:
            _write_name(self.root / name, handle.version)

    def load(self, name: str, *, crc_check: bool) -> Entries:
        """The arrays of a checkpoint, verified.

        Raises:
            VersionNotFound: there is none of this name. CorruptError: it is damaged and nobody has another copy.
        """
        if self._started:
            self._settle()
        self._checkpointer.restore(_read_name(self.root / name))
        self._started = True
        self._asked, self._number = ("", -1), -1
        found, self._ckpt.entries = self._ckpt.entries, {}
        if not found:
            raise VersionNotFound("there are no checkpoints", where=str(self.root), remedy="check the path")
        if self._ckpt.name != name:
            raise MismatchError(f"{name} is not the newest checkpoint, and no file says which version it is; the newest is "
                                f"{self._ckpt.name}", where=str(self.root), remedy="load that one")  # fmt: skip
        if crc_check:  # of bytes that passed holdfast's own digest, where none was saved with them
            return {key: value if len(value) > 1 else [*value, _crc(value[0])] for key, value in found.items()}
        return found

    def _settle(self) -> None:
        """Send what was saved before a load in the same process to storage first: the load begins a new incarnation."""
        try:
            self._checkpointer.flush()
        except LevelNotReached as error:
            pass_on(error)
            logger.warning("%s", error)

    def close(self) -> None:
        """The last save is durable."""
        self._checkpointer.close()


def _crc(array: Any) -> int:
    return binascii.crc32(array.tobytes())


class _State:
    """The one directory that this process works on; MindSpore's interface is a module."""

    front: Front | None = None


def init(
    path: str,
    rank_id: int,
    layout: Mapping[str, Any],
    single_params: Mapping[int, Sequence[str]] | None,
    dedup: bool,
    dp: int | None,
) -> None:
    """Training begins to save. Called once by `ModelCheckpoint`, after the graph is compiled. Every rank calls it.

    Args:
        path: directory of the checkpoints.
        rank_id: this rank.
        layout: `stage_num`, `stage_rank_num`, and `stage_layout`: parameter -> groups of ranks that hold the same slice.
        single_params: rank -> parameters that MindSpore would have it save; holdfast divides by bytes instead.
        dedup: what several ranks hold is stored once.
        dp: replicas of the data-parallel dimension; follows from the layout.
    """
    del single_params, dp
    front = _front(Path(path), rank_id, layout["stage_num"] * layout["stage_rank_num"])
    front.layout(layout["stage_layout"], dedup=bool(dedup))


def save_ckpt(ckpt_name: str, global_step_num: int, data_list: Entries, crc_check: bool) -> None:
    """Saves this rank's parameters; `crc_check` says that every value is `[array, CRC32]`.

    Raises:
        UsageError: before `init`.
    """
    del crc_check
    if _State.front is None:
        raise UsageError("aiturbo.init was not called", remedy="save with MindSpore's ModelCheckpoint")
    _State.front.save(ckpt_name, global_step_num, data_list)


def load_ckpt(ckpt_path: str, ckpt_name: str, rank_id: int, crc_check: bool) -> Entries:
    """This rank's parameters of a checkpoint: name -> `[array]`, with `crc_check` `[array, CRC32]`. Every rank calls it.

    Raises:
        VersionNotFound: there is none of this name. CorruptError: it is damaged.
    """
    return _front(Path(ckpt_path), rank_id, _world_size()).load(ckpt_name, crc_check=crc_check)


def _front(path: Path, rank: int, world_size: int) -> Front:
    # MindSpore's guides give every rank a directory of its own in a common one.
    root = (path.parent if path.name == f"rank_{rank}" else path).resolve()
    if _State.front is None or _State.front.root != root:
        if _State.front is not None:
            _State.front.close()
        else:
            atexit.register(_close)
        _State.front = Front(root, rank, world_size)
    return _State.front


def _close() -> None:
    front, _State.front = _State.front, None
    if front is not None:
        front.close()


def _world_size() -> int:
    from mindspore.communication import get_group_size  # noqa: PLC0415 - the framework, only where it runs

    return int(get_group_size())


def _join(rank: int, world_size: int) -> None:
    """The ranks of the job as holdfast sees them: a process group of PyTorch on CPU."""
    if world_size == 1 or dist.is_initialized():
        return
    host, port = settings.meeting_place()
    if not port:
        raise UsageError(
            f"{world_size} ranks cannot find each other",
            remedy="set MASTER_ADDR and MASTER_PORT, or start with msrun, which sets MS_SCHED_HOST and MS_SCHED_PORT",
        )
    timeout = timedelta(seconds=JOIN_S)
    store = TCPStore(host, port, world_size, rank == 0, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _write_name(path: Path, version: Version) -> None:
    with replacing(path) as file:
        file.write(json.dumps({"holdfast": str(version)}).encode() + b"\n")


def _read_name(path: Path) -> Version | None:
    """The version behind a checkpoint's name; None if no file says so.

    Raises:
        StorageError: another file has that name.
    """
    try:
        with path.open("rb") as file:
            found = parse_loose(file.read(MAX_NAME_BYTES))
        return Version.parse(found["holdfast"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        pass_on(error)
        raise StorageError(
            "this file was not saved through holdfast", where=str(path), remedy="load it without AITURBO=1"
        ) from error


class CheckpointShmManager:
    """The names of checkpoints in a directory, as MindSpore counts and removes them.

    The names are the small files that `save_ckpt` makes. Removing one leaves the version to holdfast's retention.
    """

    def __init__(self) -> None:
        self._names: list[Path] = []

    @property
    def ckpoint_filelist(self) -> list[str]:
        """Paths, oldest first."""
        return [str(path) for path in self._names]

    @property
    def ckpoint_num(self) -> int:
        """Return how many there are."""
        return len(self._names)

    def update_ckpoint_filelist(self, directory: str, prefix: str) -> None:
        """Looks for `<prefix>-<epoch>_<step>.*` in the directory."""
        found = []
        for path in Path(directory).glob(f"{prefix}-*"):
            middle = path.stem.removeprefix(f"{prefix}-")
            if middle.replace("_", "").isdigit() and path.is_file():
                found.append((path.stat().st_mtime_ns, path))
        self._names = [path for _, path in sorted(found)]

    def remove_ckpoint_file(self, file_name: str) -> None:
        path = Path(file_name)
        path.unlink(missing_ok=True)
        self._names = [name for name in self._names if name != path]

    def remove_oldest_ckpoint_file(self) -> None:
        if self._names:
            self.remove_ckpoint_file(str(self._names[0]))

    def keep_one_ckpoint_per_minutes(self, minutes: float, cur_time: float) -> None:
        """Keep only the oldest of the names made in the last `minutes`."""
        recent = [path for path in self._names if cur_time - path.stat().st_mtime < 60 * minutes]
        for path in recent[1:]:
            self.remove_ckpoint_file(str(path))
