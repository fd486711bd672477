"""DeepSpeed: a checkpoint engine, assigned in one line.

    engine, *_ = deepspeed.initialize(...)
    engine.checkpoint_engine = holdfast.adapters.deepspeed.checkpoint_engine(engine, "ckpts/run1")
    engine.load_checkpoint("ckpts/run1")      # as before: None, {} on a first start
    ...
    engine.save_checkpoint("ckpts/run1")      # as before: returns when everything that may change is copied

Every `save_checkpoint` makes a version of holdfast in `<save_dir>/holdfast`: captured in the keepers' memory at once,
replicated and durable behind it. `load_checkpoint` without a tag brings the newest version back that is complete
anywhere, from memory first; with a tag the version of that tag. DeepSpeed's own files of that directory are pickles and may be
older: they are loaded only where `own_files=True` asks for it. Where they are all there is, a load without that is an error, and nothing is begun anew.
A directory of another name is loaded as DeepSpeed does. Beside it DeepSpeed's own
tree (`<tag>/mp_rank_*`, `<tag>/*zero_pp_rank_*`, `latest`) is written in the background, so that DeepSpeed without holdfast
loads it; `latest` names a tag only when every file of all ranks stands. The call `engine.destroy()`, or `close()` of
the object, ends it in good order.

ZeRO 0 to 3 of one model-parallel rank know their twins (the module's weights are stored once); with tensor or pipeline
parallelism every rank keeps its own. MoE checkpoints and NVMe offload write files past the engine and are refused.
Nothing is unpickled by us; loading DeepSpeed's own files is DeepSpeed's `torch.load`.

Tested with deepspeed 0.19.8 and torch 2.13.0, ZeRO 2 and 3 on CPU.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from holdfast.adapters.native_tree import MAX_WAITING, Classes, Native, NativeWriter, copied, live, plain
from holdfast.adapters.save_only import SaveOnly
from holdfast.base import config as settings
from holdfast.base.config import Config
from holdfast.base.errors import MismatchError, UsageError
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.save.save_handle import SaveHandle

logger = logging.getLogger(__name__)

# Below the directory that the script gives to DeepSpeed.
OWN = "holdfast"
LATEST = "latest"
MAX_TAG_BYTES = 4096
MAX_DIGITS = 18
_MODULE, _OPTIMIZER = ".module.", ".optimizer."
_PARTITIONED = 3  # the ZeRO stage at which every rank holds parts of the weights only


def checkpoint_engine(
    engine: Any,
    save_dir: str | Path,
    *,
    durable_every: int = 1,
    native: bool = True,
    own_files: bool = False,
    config: Config | None = None,
) -> Any:
    """Return what is to be assigned to `engine.checkpoint_engine`. Collective: every rank calls it.

    Args:
        engine: what `deepspeed.initialize` returned.
        save_dir: the directory that `save_checkpoint` and `load_checkpoint` are given.
        durable_every: of so many saves one goes to storage; the others stay in memory.
        native: write DeepSpeed's own files and `latest` too, for every save that goes to storage.
        own_files: load DeepSpeed's own files in that directory, which are pickles, where there is no version of holdfast, or
            where `latest` names a later step.
        config: the settings; default: file and environment.

    Raises:
        UsageError: MoE or NVMe offload, which write past the engine.
    """
    if settings.disabled():
        logger.warning("%s is set: DeepSpeed saves and loads by itself", settings.DISABLE_VARIABLE)
        return engine.checkpoint_engine
    if engine.has_moe_layers or engine.zero_nvme_offload_optimizer():
        raise UsageError(
            "checkpoints of MoE layers and of NVMe offload are not written through DeepSpeed's checkpoint engine alone",
            remedy="keep DeepSpeed's own engine for this job",
        )
    return CheckpointEngine(
        engine, Path(save_dir), durable_every=durable_every, native=native, own_files=own_files, config=config
    )


class _Files:
    """Holds what one rank holds of a checkpoint: base name of a file -> its tree. The object that is saved.

    Args:
        shared: whether all ranks hold the same weights.
    """

    def __init__(self, shared: tuple[str, ...], everyone: tuple[int, ...], classes: Classes) -> None:
        self.trees: dict[str, Any] = {}
        self.tag = ""
        self._shared = shared
        self._everyone = everyone
        self._classes = classes

    def holders(self, path: str) -> tuple[int, ...] | None:
        """The ranks known to hold the tensor of this name alike."""
        return self._everyone if any(part in path for part in self._shared) else None

    def state_dict(self) -> dict[str, Any]:
        return {"tag": self.tag, "files": {name: plain(tree, self._classes) for name, tree in self.trees.items()}}

    def holdfast_accepts(self, state: Any) -> None:
        """Looks at the names in a version before anything of it is loaded: files are made under them.

        Raises:
            MismatchError: a name leads out of the directory that it belongs in.
        """
        for name in (state["tag"], *state["files"]) if state["files"] else ():
            if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).name:
                raise MismatchError(
                    f"the version names a file {name!r}, which leads out of the checkpoint's directory",
                    where="DeepSpeed's files in the version",
                    remedy="do not load this checkpoint: DeepSpeed wrote no such name, so somebody changed it",
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tag = state["tag"]
        self.trees = {name: live(tree, self._classes) for name, tree in state["files"].items()}


class CheckpointEngine:
    """Takes the place of DeepSpeed's checkpoint engine; see `checkpoint_engine` and DeepSpeed's class of this name.

    Says that it is decoupled, because then `latest` is its own business.
    """

    def __init__(
        self, engine: Any, save_dir: Path, *, durable_every: int, native: bool, own_files: bool, config: Config | None
    ) -> None:
        self.name = "holdfast"
        self._own_wanted = own_files
        self._engine = engine
        self._default: Any = engine.checkpoint_engine
        self._save_dir = save_dir
        self._durable_every = durable_every
        self._group = collectives.ranks()
        self._writes = engine.save_non_zero_checkpoint  # DeepSpeed's own choice of who writes the module
        self._files = _Files(_shared(engine), tuple(range(self._group.world_size)), _classes())
        self._timeout_s = (config or settings.load()).close_timeout_s
        self._native = NativeWriter(self._timeout_s) if native else None
        self._recent: deque[str] = deque(maxlen=MAX_WAITING + 1)  # tags whose files may be waiting or in work
        self._checkpointer = SaveOnly(save_dir / OWN, config=config, deepspeed=self._files)
        self._started = False
        self._saves = 0
        self._kept: tuple[SaveHandle | None, str] = (None, "")  # the last save, and its tag
        self._dir = save_dir
        self._shown: list[str] = []  # while a version is loaded that memory holds
        if native:
            mine = [Path(name).name for name in self._names(Path("d"), "t") if name.parts[-2:-1] == ("t",)]
            self._all_names = sorted({n for names in collectives.gather_json(self._group, mine) for n in names})
        # Every rank holds what it needs to go on; DeepSpeed would have one rank save the module for all.
        engine.save_non_zero_checkpoint = True
        self._save, self._load = engine.save_checkpoint, engine.load_checkpoint
        self._get_all_names: Callable[..., list[str]] = engine._get_all_ckpt_names
        engine.save_checkpoint, engine.load_checkpoint = self._save_checkpoint, self._load_checkpoint
        engine._get_all_ckpt_names = self._all_ckpt_names

    # What DeepSpeed calls.

    def create(self, info: Any) -> None:
        """A checkpoint begins."""
        if not self._started:  # saved without having loaded: a run of its own, whatever lies there
            self._checkpointer.restore(fresh=True)
            self._started = True
        self._files.tag, self._files.trees, self._dir = info.tag, {}, Path(info.save_dir)

    def save(self, state_dict: Any, path: str) -> None:
        """Notes a file; it is copied when the last one is known, before DeepSpeed goes on."""
        self._files.trees[Path(path).name] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """A file: of the version that was brought back, else DeepSpeed's own.

        Raises:
            UsageError: DeepSpeed's own files were not asked for.
        """
        name = Path(path).name
        if self._files.tag == Path(path).parent.name and name in self._files.trees:
            return self._files.trees[name]
        if not self._own_wanted and self._save_dir.resolve() in Path(path).resolve().parents:
            raise self._unasked(Path(path).parent.name)
        return self._default.load(path, map_location=map_location)

    def commit(self, info: Any) -> bool:  # noqa: ARG002 - DeepSpeed's interface
        """Everything happens in `save_checkpoint`."""
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Directories of DeepSpeed's own tree, if it is written at all."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:  # noqa: ARG002 - DeepSpeed's interface
        """Every rank hands over what it holds; who writes what is holdfast's business."""
        return True

    def is_decoupled(self) -> bool:
        """`latest` is not DeepSpeed's to write."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Views are saved as what they show, not as the memory they look into."""
        return False

    def get_commit_info(self) -> None:
        """Nothing is left for DeepSpeed to commit."""

    def set_commit_info(self, info: Any) -> None:
        """Not needed."""

    def cleanup(self) -> None:
        """`engine.destroy()` was called."""
        self.close()

    # Ours.

    def flush(self) -> None:
        """Waits until all that is due for storage is there, DeepSpeed's own files included.

        Raises:
            LevelNotReached: names what is not.
        """
        if self._started:
            self._checkpointer.flush()
        if self._native is not None:
            self._native.flush()

    def close(self) -> None:
        """The last save is durable, and DeepSpeed's own files of it stand. Every rank calls it; again does nothing.

        Raises:
            LevelNotReached: says what is missing.
        """
        try:
            if self._native is not None:
                self._native.flush()
        finally:
            self._checkpointer.close()

    def _save_checkpoint(self, save_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> bool:
        done = bool(self._save(save_dir, tag, *args, **kwargs))
        self._saves += 1
        durable = self._saves % self._durable_every == 0
        self._tell_if_dropped(
            self._checkpointer.save(self._engine.global_steps - 1, "durable" if durable else "captured")
        )
        if durable and self._native is not None:
            self._write_own(self._native, kwargs.get("save_latest", args[1] if len(args) > 1 else True))
        self._files.trees = {}
        return done

    def _tell_if_dropped(self, handle: SaveHandle) -> None:
        """Warn of a second save in one step: a step has one version, of its first save."""
        kept, tag = self._kept
        if handle is not kept:
            self._kept = handle, self._files.tag
        elif tag == self._files.tag:
            logger.warning(
                "step %d was saved under the tag %r already, which is what holdfast loads: what has changed since, as client_state or "
                "weights that were swapped, is in no version. Save once in a step",
                self._engine.global_steps, tag,
            )  # fmt: skip
        else:
            logger.warning(
                "what is saved under the tag %r has no version: step %d was saved under %r already, which is what holdfast loads. "
                "Save once in a step, under the tag that is to be loaded",
                self._files.tag, self._engine.global_steps, tag,
            )  # fmt: skip

    def _write_own(self, native: NativeWriter, save_latest: bool) -> None:
        """Queues DeepSpeed's own files of this save. Collective."""
        directory, tag = self._dir, self._files.tag
        mine = [
            (directory / tag / name, tree)
            for name, tree in self._files.trees.items()
            if self._writes or "zero_pp_rank" in name
        ]
        free, named = self._made_room(native, [path for path, _ in mine])
        if not free:
            native.leave_out(
                f"those of an earlier save under the tag {tag!r} cannot be taken away, or are still being written"
            )
            return
        first = self._group.rank == 0 and (save_latest or named)
        awaited = [directory / tag / name for name in self._all_names] if first else []
        tracker = (directory / LATEST, tag) if first else None
        files = {path: copied(tree) for path, tree in mine}
        native.put(Native(files, awaited, tracker, time.time() - self._timeout_s))

    def _made_room(self, native: NativeWriter, mine: Sequence[Path]) -> tuple[bool, bool]:
        """Removes the files of another save under this tag, `latest` first: it never names files of two saves. Collective.

        Returns:
            Whether there are none on any rank, and whether `latest` named them (rank 0 knows).
        """
        tag, everyone, latest = self._files.tag, self._group, self._dir / LATEST
        again = collectives.share(everyone, lambda: b"1" if tag in self._recent or self._have_files(tag) else b"")
        self._recent.append(tag)
        if not again:
            return True, False
        settled = collectives.unanimous(everyone, native.settle())
        named = everyone.rank == 0 and _text_of(latest) in (tag, None)
        free = (
            settled
            and collectives.unanimous(everyone, not named or _are_gone([latest]))
            and collectives.unanimous(everyone, _are_gone(mine))
        )
        return free, named

    def _have_files(self, tag: str) -> bool:
        try:
            return any((self._dir / tag / name).exists() for name in self._all_names)
        except OSError as error:  # it says nothing: look closer
            pass_on(error)
            return True

    def _names(self, directory: Path, tag: str) -> list[Path]:
        """The files of DeepSpeed's own tree that this rank writes."""
        names = [self._engine._get_ckpt_name(str(directory), tag)] if self._writes else []
        if self._engine.save_zero_checkpoint:
            names.append(self._engine._get_zero_ckpt_name(str(directory), tag))
        return [Path(name) for name in names]

    def _load_checkpoint(self, load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        if Path(load_dir).resolve() != self._save_dir.resolve():
            return self._load(load_dir, tag, *args, **kwargs)  # somebody else's, in DeepSpeed's own form
        random = ProcessRandomness().state_dict()
        theirs = self._latest() if tag is None else str(tag)
        found = self._bring_back(None if tag is None else theirs)
        if found and (self._is_later(theirs) if tag is None else not self._files.trees):
            # `latest` names a later step, or what is asked for is not ours.
            self._check_own(theirs, named=tag is not None)
            self._require_files(theirs, found)
            self._files.trees = {}
            self._checkpointer.restore(fresh=True)
            ProcessRandomness().load_state_dict(random)
        if not self._files.trees:
            self._check_own(theirs, named=tag is not None)
            return self._load(load_dir, theirs or tag, *args, **kwargs)
        try:
            with tempfile.TemporaryDirectory(prefix="holdfast-") as place:
                self._shown = self._stand_ins(Path(place, self._files.tag))
                path, told = self._load(load_dir, self._files.tag, *args, **kwargs)
            return (path and str(Path(load_dir, self._files.tag, Path(path).name))), told
        finally:
            self._files.trees, self._shown = {}, []

    def _bring_back(self, tag: str | None) -> str:
        """Brings back the newest version, or with a tag what was saved under it: of the step that it names, if that is durable, or the newest.

        Returns:
            The tag of the version that was looked at, empty if there is none.
        """
        step = _step_of(tag or "")
        self._checkpointer.restore(None if step is None else self._checkpointer.version_of(step - 1))
        self._started = True
        found = self._files.tag if self._files.trees else ""
        if tag not in (None, found):
            self._files.trees = {}
        return found

    def _require_files(self, tag: str, found: str) -> None:
        """Looks whether there are files of DeepSpeed's own under a tag that no version was found by.

        Raises:
            UsageError: there are none; on every rank.
        """
        if not self._stand(tag):
            raise UsageError(
                f"neither holdfast nor DeepSpeed has what was saved under the tag {tag!r}",
                where=str(self._save_dir),
                remedy=f"a call without a tag loads the newest version; {found!r} was looked at. Older versions are found by tags of the form "
                "global_step<n>. To begin anew, give another directory",
            )

    def _stand(self, tag: str) -> bool:
        """Return whether there are files of DeepSpeed's own under a tag. Rank 0 looks for all."""
        place = self._save_dir / tag
        return bool(collectives.share(self._group, lambda: b"1" if place.is_dir() and any(place.iterdir()) else b""))

    def _latest(self) -> str:
        """The tag that DeepSpeed's own `latest` names; empty if there is none. Rank 0 looks for all."""
        names = [LATEST, f"{LATEST}_universal"]
        if self._engine.load_universal_checkpoint():
            names.reverse()

        def read() -> bytes:
            for name in names:
                if (self._save_dir / name).is_file():
                    return (self._save_dir / name).read_bytes()[:MAX_TAG_BYTES]
            return b""

        return collectives.share(self._group, read).decode(errors="replace").strip()

    def _is_later(self, latest: str) -> bool:
        """Return whether `latest` names a later step than the version that was brought back, and is to be loaded instead."""
        theirs, ours = _step_of(latest), _step_of(self._files.tag)
        if theirs is None or ours is None or theirs <= ours:
            return False
        logger.warning(
            "DeepSpeed's own checkpoint %s in %s is of a later step than holdfast's newest, %s%s",
            latest, self._save_dir, self._files.tag,
            "" if self._own_wanted else ": holdfast's is loaded; checkpoint_engine(..., own_files=True) loads the later one",
        )  # fmt: skip
        return self._own_wanted

    def _check_own(self, tag: str, *, named: bool) -> None:
        """Looks whether DeepSpeed's own files were asked for: those that `latest` names, or, where there are any, of a tag that is named.

        Raises:
            UsageError: they were not; on every rank.
        """
        if self._own_wanted or not tag:
            return
        if not named or self._stand(tag):
            raise self._unasked(tag)

    def _unasked(self, tag: str) -> UsageError:
        return UsageError(
            f"holdfast has no version of {tag!r}, and DeepSpeed's own files were not asked for",
            where=str(self._save_dir),
            remedy="give checkpoint_engine own_files=True to load them, which may run code that is pickled in them; or look why "
            f"the versions in {self._save_dir / OWN} are gone",
        )

    def _stand_ins(self, directory: Path) -> list[str]:
        """Empty files under the names of the model files that are held.

        DeepSpeed looks whether they exist before it asks us for them, and of what only memory held none was written.
        """
        held = [directory / name for name in self._files.trees if "model_states" in name]
        for path in held:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return [str(path) for path in held]

    def _all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        """The model files of a tag: those that are held, else those that stand."""
        return self._shown or self._get_all_names(checkpoints_path, tag)


def _shared(engine: Any) -> tuple[str, ...]:
    """Parts of names under which all ranks hold the same tensors."""
    if engine.mp_world_size > 1 or engine.zero_optimization_stage() >= _PARTITIONED or _has_pipeline(engine):
        return ()
    return (_MODULE,) if engine.zero_optimization() else (_MODULE, _OPTIMIZER)


def _step_of(tag: str) -> int | None:
    """The step of a tag in DeepSpeed's own form."""
    number = tag.removeprefix("global_step")
    return int(number) if number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS else None


def _text_of(path: Path) -> str | None:
    """Return what a small file says: empty if there is none, None if nobody can tell."""
    try:
        return path.read_bytes()[:MAX_TAG_BYTES].decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        pass_on(error)
        return None


def _are_gone(paths: Iterable[Path]) -> bool:
    """Removes files; returns whether none of them is there any more."""
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        pass_on(error)
        logger.warning("a file of an earlier save cannot be removed", exc_info=True)
        return False
    return True


def _has_pipeline(engine: Any) -> bool:
    return type(engine).__name__ == "PipelineEngine"


def _classes() -> Classes:
    """DeepSpeed's own objects that lie in its state."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # noqa: PLC0415
    from deepspeed.utils.tensor_fragment import fragment_address  # noqa: PLC0415

    return {"LossScaler": LossScaler, "DynamicLossScaler": DynamicLossScaler, "fragment_address": fragment_address}
