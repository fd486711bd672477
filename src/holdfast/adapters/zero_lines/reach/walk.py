"""One walk through everything that can be reached, in which each thing is noted by its first path."""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import datetime as dt
import decimal
import enum
import functools
import inspect
import io
import logging
import os
import pathlib
import re
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.adapters.zero_lines.reach import (
    arrow,
    container_kinds,
    growing_lists,
    held_arrays,
    identities,
    loader_places,
)
from holdfast.adapters.zero_lines.reach.attributes import (
    added_to,
    attributes_of,
    global_names,
    is_attributes,
    is_iterator,
    is_of_python,
    is_output,
    loaded_names,
    names_of_wrappers,
    slots_of,
)
from holdfast.adapters.zero_lines.reach.look import (
    ENDED,
    Leaf,
    Look,
    Owner,
    freeze,
    itself,
    owner_of,
    put_cell,
    refill,
    set_still,
)
from holdfast.adapters.zero_lines.reach.memory import addresses_in, spans_of
from holdfast.adapters.zero_lines.reach.plain_values import (
    ATOM_SET,
    ATOMS,
    CONTAINERS,
    MAX_BYTES,
    MAX_DEPTH,
    NUM_SPOTS,
    as_stored,
    is_plain,
    is_vast,
    makes_up_parts,
    some_of,
    texts_in,
)
from holdfast.adapters.zero_lines.reach.tokens import (
    TokenOfFunction,
    is_sparse,
    parts_of_sparse,
    token_of,
    token_of_array,
    token_of_tensor,
)
from holdfast.base import config
from holdfast.checkpoint.containers import items_of, length_of, standard_of
from holdfast.checkpoint.entries import living_gradients
from holdfast.checkpoint.entries.rng import random_state
from holdfast.checkpoint.entries.sharding import local_of

# The token of what was reached before, by the path that follows.
ANOTHER = "another name of"
# What has a part of a tensor, where nobody knows more of it.
SAVED = "an object that is saved"
# What variables of the environment are held by.
ENVIRONMENT = "the environment"
# Never changed in place, and not storable: another one in its place is seen by what it is called.
_NAMED = (
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, range, slice, pathlib.PurePath, enum.Enum,
    types.BuiltinFunctionType, types.BuiltinMethodType, types.MethodWrapperType, type(vars(collections.namedtuple("_", "a"))["a"]),
)  # fmt: skip
# Objects of libraries that keep nothing from one step to the next.
STANDING = (
    *_NAMED, types.ModuleType, types.FunctionType, types.MethodType, type, logging.Logger, argparse.Namespace, DeviceMesh,
    dist.ProcessGroup, functools.partial, Sampler, DataLoader, nn.modules.loss._Loss, contextlib.nullcontext, torch.autocast, re.Pattern, dt.date, dt.time,
    dt.timedelta, dt.tzinfo,
)  # fmt: skip
# Parts of classes and modules that keep nothing, and locks.
_STILL = (
    types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType, types.CodeType, types.EllipsisType,
    types.NotImplementedType, typing.TypeVar, decimal.Decimal, weakref.ref, type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip
_MODULE_KEYS = frozenset(vars(nn.Module()))
_MODULE_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
# How much is asked of a thing: nothing, that it is no place in a sequence, that it is known to keep nothing.
NOTHING, NO_PLACE, ALL = 0, 1, 2
# Packages whose functions and modules keep nothing that a step depends on, but what they hand out or are seen to hold.
_KNOWN = sys.stdlib_module_names | {
    "torch", "torchvision", "torchaudio", "torchdata", "torchmetrics", "torchao", "functorch", "numpy", "scipy",
    "pandas", "sklearn", "skimage", "PIL", "cv2", "einops", "timm", "transformers", "tokenizers", "datasets",
    "safetensors", "accelerate", "peft", "huggingface_hub", "diffusers", "sentencepiece", "tiktoken", "lightning",
    "pytorch_lightning", "triton", "flash_attn", "xformers", "bitsandbytes", "matplotlib", "seaborn", "tqdm", "rich",
    "boto3", "botocore", "fsspec", "s3fs", "gcsfs", "smart_open", "yaml", "click", "typer", "omegaconf", "hydra", "absl", "attr", "attrs", "pydantic", "msgspec", "packaging",
    "psutil", "requests", "wandb", "tensorboard", "tensorboardX", "mlflow", "h5py", "zarr", "pyarrow", "lmdb",
    "numba", "xxhash", "holdfast",
}  # fmt: skip
# Attributes that torch itself gives modules and parameters: of compiled ones, and of `fully_shard`, `replicate` and their like.
# These follow the steps too; but for gradients that are not reduced yet, which are looked at.
_OF_TORCH = ("_torchdynamo", "_dynamo_", "__composable_api_")
# Functions that read names which no text shows.
_BY_TEXT = {"eval", "exec", "globals", "locals", "vars"}
# What an optimizer hands out by its `state_dict`, or does not read in a step.
_OPTIMIZER_KEYS = {"defaults", "state", "param_groups", "step"}


# Of things that are kept, which stay where they are.
_is_shared = functools.lru_cache(maxsize=256)(held_arrays.is_shared)


def _none_of_torchs(hook: Any) -> list[Any]:
    """Returns what a communication hook is that is none of torch's own; one of torch's may be made around it."""
    if type(hook) is not types.FunctionType or not hook.__module__.startswith("torch."):
        return [hook]
    held = [cell.cell_contents for cell in hook.__closure__ or ()]
    return [part for each in held for part in _none_of_torchs(each)]


def workers_stay(_: DataLoader[Any]) -> str:
    """Returns why workers of a loader that stay cannot be taken up, where nobody looks at them."""
    return "its workers stay, with all that they keep"


@dataclass(frozen=True, slots=True)
class Told:
    """The last answer of an object's `state_dict`.

    Attributes:
        thing: the object, which is kept, or another could get its number.
        names, memory: keys of what it handed out, and where the tensors in it lie.
        places: attributes that were there and are not named -> where the tensors in them lay.
    """

    thing: Any
    names: frozenset[str]
    memory: set[int]
    places: dict[str, set[int]]

    def named(self, held: Iterable[str]) -> set[str]:
        """Returns those of these attributes that are handed out under their name."""
        return {key for key in held if key in self.names or key.lstrip("_") in self.names}


def _has_dict(value: Any, depth: int = 0) -> bool:
    """Tell whether a container is a dict, or has one in it that is not plain."""
    if isinstance(value, dict) or depth > MAX_DEPTH:
        return True
    within = (part for part in value if isinstance(part, dict | list | tuple) and not is_plain(part))
    return any(_has_dict(part, depth + 1) for part in within)


class Walk:
    """One walk."""

    def __init__(
        self,
        is_users: Callable[[str], bool],
        hidden: frozenset[str],
        kept: Iterable[Any],
        local: Mapping[str, Any],
        told: dict[int, Told],
    ) -> None:
        self._told = told
        self.found = Look()
        self.hidden = hidden
        self.carried: frozenset[str] = frozenset()
        self.counted: Container[
            int
        ] = ()  # generators that come to where they are when items are counted, by their `id`
        self.may_begin = False  # whether a generator that has not begun is what a restart makes again
        # Why the workers of a loader that stay cannot be taken up; empty if they can.
        self.why_not_staying: Callable[[DataLoader[Any]], str] = workers_stay
        # What containers were at the beginning, by path: the container if it can be carried whole from there on, else None.
        self.began: dict[str, Any] | None = None
        self.is_first = False  # whether this is the beginning
        self.strict = False  # whether no rehearsal tells what is not seen: caches of `functools`, classes made of C
        self._local = local
        self._is_users = is_users
        self._kept = {id(thing) for thing in kept}
        self._seen: dict[int, Any] = {}  # keeps what it has seen, or another object could get its number
        self._paths: dict[int, str] = {}
        self._roots: dict[
            str, str
        ] = {}  # path of a tensor or array in a container that is carried whole -> that of the container
        self._holders: dict[int, tuple[str, str]] = {}  # mutable part of a plain value -> its path, and the value's
        self._alive: list[Any] = []
        self._waiting: list[tuple[str, Any, int, tuple[str, str | int]]] = []  # iterators of loaders, see `iterators`
        self._made: list[tuple[str, Any]] = []  # plain values that are noted as data, with their paths
        self._spans: list[tuple[held_arrays.Span, str]] = []  # memory of tensors and arrays that cannot be carried
        self.sets: list[str] = []
        self.pops = False  # whether a function of the user's pops something
        self._users_kinds: dict[type, bool] = {}
        self._depth = 0

    def visit(self, path: str, value: Any, *, asks: int, hold: tuple[str, str | int] | None = None) -> None:
        """Looks at a value that is held under `hold`, if it is held where another can be put.

        Args:
            path: how it is reached.
            value: what it is.
            asks: how much is asked of it.
            hold: path of the owner, and the key.
        """
        is_atom = type(value) in ATOMS
        is_number = type(value).__module__ == "numpy" and type(value).__qualname__ != "ndarray"
        if hold is not None and (
            is_atom
            or ((is_number or type(value) in (tuple, frozenset)) and is_plain(value) and hold[0] in self.found.owners)
        ):
            put = functools.partial(self.found.owners[hold[0]].put, hold[1])
            token = repr(value) if is_atom else token_of(value)
            self.found.leaves[path] = Leaf((type(value), token), *hold, functools.partial(itself, value), put)
            if type(value) is tuple:
                self._note_data(path, value, token)
            self.share(path, value)
            return
        if is_atom:
            return
        if self._depth > MAX_DEPTH:
            return
        if id(value) in self._seen:
            if self._paths.get(id(value), path) != path:
                self._let_go(self._paths[id(value)], path)
                self.found.fixed[path] = f"{ANOTHER} {self._paths[id(value)]}"
            return
        self._seen[id(value)] = value
        self._paths[id(value)] = path
        self._depth += 1
        try:
            self._open(path, value, asks, hold or (path, ""))
        finally:
            self._depth -= 1

    def share(self, path: str, value: Any, root: str = "") -> None:
        """Notes every part of a plain value that can change, and where it is a part of another value, or twice of this one."""
        root = root or path
        if isinstance(value, set):
            self.sets.append(root)
        if isinstance(value, CONTAINERS):
            if id(value) in self._holders:
                first, other = self._holders[id(value)]
                if first == path:
                    return
                self.found.fixed[path] = f"{ANOTHER} {first}"
                for name in (root, other):
                    self.found.shared.setdefault(name, f"{path!r} is {ANOTHER} {first!r}")
                return
            self._holders[id(value)] = (path, root)
            self._alive.append(value)
        if isinstance(value, dict | list | tuple | collections.deque):
            parts = value.values() if isinstance(value, dict) else value
            if not ATOM_SET.issuperset(map(type, parts)):
                for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                    if not (
                        isinstance(part, (*ATOMS, torch.Tensor))
                        or (type(part) is tuple and ATOM_SET.issuperset(map(type, part)))
                    ):
                        self.share(f"{path}[{key!r}]", part, root)

    def keys(self, path: str, items: Mapping[Any, Any], owner: Owner, *, asks: int, dot: bool = True) -> None:
        """Looks at everything that has a key in one owner."""
        self.found.owners[path] = owner
        for key, value in list(items.items()):
            if type(key) is str or type(key) is int:
                self.visit(f"{path}.{key}" if dot else f"{path}[{key!r}]", value, asks=asks, hold=(path, key))

    def inside(self, path: str, thing: Any) -> None:
        """Looks at what a kept object does not hand out."""
        if id(thing) in self._seen:
            return
        self._seen[id(thing)], self._paths[id(thing)] = thing, path
        if isinstance(thing, torch.Tensor):
            self.marks(path, thing)
            self.found.fixed[f"the shape of {path}"] = (tuple(thing.shape), str(thing.dtype), str(thing.device))
            if type(thing) is torch.Tensor and thing.device.type == "cpu" and _is_shared(held_arrays.span(thing)):
                self.found.fixed[path] = token_of_tensor(thing)
                self.found.parts[path] = "another process"
        elif isinstance(thing, nn.Module):
            self._model(path, thing, kept=True)
        elif isinstance(thing, Optimizer):
            self.found.fixed[f"the parameter groups of {path}"] = [
                [self._paths.get(id(p)) for p in group["params"]] for group in thing.param_groups
            ]
            self._hooks(path, thing)
            hooks = {name for name in vars(thing) if name.endswith("_hooks")}
            self._attributes(path, thing, _OPTIMIZER_KEYS | hooks)
        elif self._is_users_object(thing):
            self._attributes(path, thing, set())
        else:
            self._each(f"{path}.lr_lambdas", enumerate(getattr(thing, "lr_lambdas", ())), asks=ALL)
            for number, inner in enumerate(getattr(thing, "_schedulers", ())):
                self.inside(f"{path}._schedulers[{number}]", inner)

    def _attributes(self, path: str, thing: Any, without: set[str]) -> None:
        """Looks at the attributes of an object that hands out its state: it may forget one."""
        if not hasattr(thing, "__dict__"):
            return
        known = self._handed_out(thing) if self._is_users_object(thing) else set()
        shown = {key: value for key, value in vars(thing).items() if key not in without and key not in known}
        self.keys(path, shown, owner_of(thing), asks=NO_PLACE)

    def _handed_out(self, thing: Any) -> set[str]:
        """Returns the attributes that an object of the user's hands out.

        Its `state_dict` may cost, count, or wait for other ranks. So it is asked again only where there is something else than
        before that the last answer does not name.
        """
        held = {key: value for key, value in vars(thing).items() if type(value) not in ATOMS}
        told = self._told.get(id(thing))
        named = told.named(held) if told is not None else set()
        places = {key: addresses_in(value) for key, value in held.items() if key not in named}
        if told is None or any(told.places.get(key) != place for key, place in places.items()):
            state = thing.state_dict()
            told = Told(
                thing, frozenset(map(str, state)) if isinstance(state, dict) else frozenset(), addresses_in(state), {}
            )
            named = told.named(held)
            told.places.update({key: addresses_in(value) for key, value in held.items() if key not in named})
            self._told[id(thing)] = told
        return named | {key for key, place in places.items() if place & told.memory}

    def _hooks(self, path: str, thing: Any, names: Iterable[str] = ()) -> None:
        """Looks at the functions of the user's that somebody else calls."""
        held = vars(thing)
        for name in names or [name for name in held if name.endswith("_hooks")]:
            hooks = held.get(name)
            if hooks and isinstance(hooks, dict):
                users = [hook for hook in hooks.values() if self._is_users(getattr(hook, "__module__", "") or "")]
                self._each(f"{name} of {path}", enumerate(users), asks=ALL)

    def _is_users_object(self, value: Any) -> bool:
        """Tell whether its class, or one that this is made from, is the user's."""
        known = self._users_kinds.get(type(value))
        if known is None:
            known = self._users_kinds[type(value)] = any(
                self._is_users(kind.__module__) for kind in type(value).__mro__
            )
        return known

    def foreign(self, path: str, value: Any) -> None:
        """Notes a function, a class or a module of a package that nobody knows: it may keep something."""
        if isinstance(value, types.FunctionType):
            home = str(value.__globals__.get("__name__", ""))
        elif isinstance(value, types.ModuleType):
            home = value.__name__
        else:
            home = value.__module__ if isinstance(value, type) else ""
        top = home.partition(".")[0]
        if top in sys.modules and top not in _KNOWN and not self._is_users(home):
            self.found.unknown.append((path, f"part of the installed package {top}"))

    def settings(self) -> None:
        """Looks at what holds for the whole process."""
        self.found.fixed["torch's settings"] = repr((
            torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(),
        ))  # fmt: skip
        self.found.fixed["the working directory"] = os.getcwd()
        self.found.fixed["sys.argv"] = repr(sys.argv)
        environment = config.variables()
        self.found.owners[ENVIRONMENT] = Owner(environment.__setitem__, environment.__delitem__)
        for key, value in environment.items():
            put = functools.partial(environment.__setitem__, key)
            leaf = Leaf((str, value), ENVIRONMENT, key, functools.partial(itself, value), put)
            self.found.leaves[f"{ENVIRONMENT}[{key!r}]"] = leaf
        for place in (nn.modules.module, optimizer):
            self._hooks("torch", place)

    def _open(self, path: str, value: Any, asks: int, hold: tuple[str, str | int]) -> None:
        kind = type(value)
        if id(value) in self._kept:
            return
        if isinstance(value, torch.Tensor):
            self._tensor(path, value, asks, hold)
        elif isinstance(value, CONTAINERS):
            self._container(path, value, asks, hold)
        elif isinstance(value, tuple | frozenset):
            plain = is_plain(value)
            self.found.fixed[path] = (kind.__qualname__, token_of(value) if plain else length_of(value))
            if plain:
                self._note_data(path, value, self.found.fixed[path])
            parts = ((key, part) for key, part in items_of(value) if not plain or type(part) not in ATOMS)
            self._each(path, parts, asks=asks)
        elif kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            self._array(path, value, hold)
            if asks and value.nbytes > MAX_BYTES and getattr(value, "mode", "") != "r":
                self.found.unsure.append((path, "array that is too large to be looked at whole,"))
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            self.found.fixed[path] = (kind.__qualname__, value.__qualname__)
            if not isinstance(value.__self__, types.ModuleType):  # `history.append`, `batches.__next__`
                self.visit(f"{path}.__self__", value.__self__, asks=asks)
        elif isinstance(value, _NAMED):
            self.found.fixed[path] = (kind.__qualname__, repr(value))
            self._extra(path, value, asks)
        elif not (self._bytes(path, value) or self._random(path, value, hold) or self._code(path, value, asks)):
            self._object(path, value, asks, hold)

    def _extra(self, path: str, value: Any, asks: int) -> None:
        """Looks at what a class of the user's adds to one of a library."""
        if self._is_users_object(value) and getattr(value, "__dict__", None):
            shown = {key: part for key, part in vars(value).items() if not key.startswith("__")}
            self.keys(f"the attributes of {path}", shown, owner_of(value), asks=min(asks, NO_PLACE))
            self.visit(type(value).__qualname__, type(value), asks=NO_PLACE)

    def _bytes(self, path: str, value: Any) -> bool:
        """Looks at bytes that can change, and at numbers and texts of a class of their own; False if it is none."""
        found = isinstance(value, bytearray | array.array | int | float | complex | str | bytes)
        if found:
            self.found.fixed[path] = (type(value).__qualname__, repr(value))
            self._extra(path, value, NO_PLACE)
        return found

    def _random(self, path: str, value: Any, hold: tuple[str, str | int]) -> bool:
        """Looks at a generator of random numbers; False if it is none."""
        found = random_state(value)
        if found is not None:
            self.found.leaves[path] = Leaf(token_of(found[0]()), *hold, *found, lasts=True)
            seeds = getattr(getattr(value, "bit_generator", None), "seed_seq", None)
            if spawned := getattr(seeds, "n_children_spawned", 0):  # it would spawn again what it has spawned
                self.found.fixed[f"what was spawned of {path}"] = spawned
            self._extra(path, value, NO_PLACE)
        return found is not None

    def _code(self, path: str, value: Any, asks: int) -> bool:
        """Looks at functions, classes and modules; False if it is none of these."""
        if isinstance(value, types.FunctionType):
            self._function(path, value, asks)
        elif isinstance(value, functools.partial):
            self._each(path, enumerate((value.func, *value.args, *value.keywords.values())), asks=asks)
            self._extra(path, value, asks)
        elif isinstance(value, types.MethodType):
            self._each(path, (("self", value.__self__), ("function", value.__func__)), asks=asks)
        elif isinstance(value, type):
            self._class(path, value, asks)
        elif isinstance(value, types.ModuleType):
            if self._is_users(value.__name__) and value.__name__ != "__main__":
                shown = {k: v for k, v in vars(value).items() if not k.startswith("__")}
                self.keys(path, shown, owner_of(value), asks=min(asks, NO_PLACE))
        else:
            return False
        return True

    def _object(self, path: str, value: Any, asks: int, hold: tuple[str, str | int]) -> None:
        kind = type(value)
        self.found.fixed[path] = repr(value) if kind.__qualname__ == "ufunc" else kind.__qualname__
        if self.strict and self._is_users_object(value) and not is_of_python(kind):
            self.found.unknown.append((path, kind.__qualname__))
        within = min(asks, NO_PLACE)
        if isinstance(value, nn.Module):
            self._model(path, value, kept=False)
        elif isinstance(value, DataLoader):
            self._loader(path, value, asks)
        elif isinstance(value, Optimizer):
            self._optimizer(path, value)
        elif isinstance(value, LRScheduler | GradScaler):
            self._stateful(path, value, asks)
        elif is_output(value):
            self.keys(path, added_to(value), owner_of(value), asks=within)
        elif is_iterator(value) or isinstance(value, io.IOBase):
            self._iterator(path, value, asks, hold)
        elif isinstance(value, Dataset | Sampler):
            self._instance(path, value, within)
        elif isinstance(value, argparse.Namespace | types.SimpleNamespace) or self._is_users_object(value):
            self._note_born(path, value, hold)
            self._instance(path, value, asks)
        elif arrow.is_data(value):
            self.found.fixed[path] = arrow.token_of(value)
            self.found.data[path] = (self.found.fixed[path], arrow.may_hold_times(value))
        elif not issubclass(type(value), STANDING):
            self._of_library(path, value, asks, hold)

    def _loader(self, path: str, value: DataLoader[Any], asks: int) -> None:
        if value.num_workers and value.persistent_workers:
            self.found.loaders[path] = weakref.ref(value)
            why = self.why_not_staying(value)
            if asks and why:
                self.found.unsure.append((path, f"DataLoader that cannot be taken up ({why})"))
        # What its workers keep is looked at in them.
        shown = {key: part for key, part in attributes_of(value).items() if key != "_iterator"}
        self.keys(path, shown, owner_of(value), asks=min(asks, NO_PLACE))
        self.visit(type(value).__qualname__, type(value), asks=min(asks, NO_PLACE))

    def _iterator(self, path: str, value: Any, asks: int, hold: tuple[str, str | int]) -> None:
        """Looks at what has a next item: a generator that has ended has none, and one that a loop goes over is counted there."""
        if id(value) not in self.counted and loader_places.has_place(value):
            self._waiting.append((path, value, asks, hold))
        elif type(value) is types.GeneratorType and value.gi_frame is None:
            self.found.fixed[path] = ENDED
            self.found.kinds[ENDED] = types.GeneratorType
            if hold[0] in self.found.owners:
                self.found.born[path] = (ENDED, *hold)
        elif type(value) is types.GeneratorType and hold[0] in self.found.owners and self._begins(value):
            self.found.begins[path] = value
        elif asks and id(value) not in self.counted:
            self.found.unsure.append((path, type(value).__qualname__))

    def iterators(self) -> None:
        """Looks at what iterators of loaders lead to, where nothing that was seen has it, and notes their places: they are put behind it."""
        for path, value, asks, hold in self._waiting:
            for name, part in loader_places.parts(value).items():
                if id(part) not in self._seen:
                    self.visit(f"{path}.{name}", part, asks=min(asks, NO_PLACE))
            found, self.found.fixed[path] = loader_places.place(value), loader_places.Source(value)
            told, put = functools.partial(itself, found), functools.partial(loader_places.put, value)
            self.found.leaves[path] = Leaf(tuple(found), *hold, told, put)
        self._waiting.clear()

    def _begins(self, value: types.GeneratorType[Any, Any, Any]) -> bool:
        return self.may_begin and inspect.getgeneratorstate(value) == inspect.GEN_CREATED

    def _note_born(self, path: str, value: Any, hold: tuple[str, str | int]) -> None:
        """Notes an object of which another one with the same attributes can be made and put in its place."""
        kind = type(value)
        if not is_attributes(value):
            return
        name = self._note_kind(kind)
        if hold[0] in self.found.owners:
            self.found.born[path] = (name, *hold)

    def _note_kind(self, kind: type) -> str:
        name = f"{kind.__module__}:{kind.__qualname__}"
        if self.found.kinds.setdefault(name, kind) is not kind:
            self.found.kinds[name] = None
        return name

    def _of_library(self, path: str, value: Any, asks: int, hold: tuple[str, str | int]) -> None:
        """Looks at an object of an unknown class of a library, if there is nothing in it but attributes."""
        kind = type(value)
        if self.strict and kind is functools._lru_cache_wrapper:
            self.found.fixed[f"the cache of {path}"] = tuple(value.cache_info())[1:]
            self.visit(f"{path}.__wrapped__", value.__wrapped__, asks=asks)
        if asks and is_attributes(value):
            self._note_born(path, value, hold)
            self._instance(path, value, NO_PLACE)
            if asks == ALL and kind.__module__.partition(".")[0] not in sys.stdlib_module_names:
                self.found.unknown.append((path, kind.__qualname__))
        elif asks == ALL:
            self.found.unsure.append((path, kind.__qualname__))
        elif asks and not isinstance(value, _STILL) and kind.__qualname__ not in ("ufunc", "_lru_cache_wrapper"):
            self.found.unknown.append((path, kind.__qualname__))

    def _optimizer(self, path: str, value: Optimizer) -> None:
        """One that is not kept: it must not train."""
        groups = [{key: part for key, part in group.items() if key != "params"} for group in value.param_groups]
        steps = [repr(state.get("step")) for state in list(value.state.values())[:NUM_SPOTS]]
        self.found.fixed[f"the state of {path}"] = (len(value.state), steps, repr(groups))

    def _stateful(self, path: str, value: Any, asks: int) -> None:
        """One that is not kept by name, as a function of the script has it: its state is carried."""
        state = value.state_dict()
        if is_plain(state):
            self.found.leaves[path] = Leaf(token_of(state), path, "", value.state_dict, value.load_state_dict)
        elif asks:
            self.found.unsure.append((path, type(value).__qualname__))

    def _instance(self, path: str, value: Any, asks: int) -> None:
        self.keys(path, attributes_of(value), owner_of(value), asks=asks)
        self.visit(type(value).__qualname__, type(value), asks=asks)

    def _container(self, path: str, value: Any, asks: int, hold: tuple[str, str | int]) -> None:
        if makes_up_parts(type(value)):
            self._made_up(path, value, asks)
            return
        if asks and is_vast(value):
            self.found.unsure.append((path, f"{type(value).__qualname__} that is too large to be looked at whole,"))
        if self._is_users_object(value) and getattr(value, "__dict__", None):
            self.keys(f"the attributes of {path}", vars(value), owner_of(value), asks=asks)
        if is_plain(value):
            if self.is_first and self.began is not None:
                self.began[path] = value
            put = functools.partial(refill, self.found.owners, value, hold)
            kind, told = container_kinds.kind_of(value), functools.partial(as_stored, value)
            self.found.leaves[path] = Leaf(token_of(value), *hold, told, put, kind=kind)
            self._note_data(path, value, self.found.leaves[path].token)
            self.share(path, value)
        elif self._grows(path, value, hold):
            return
        elif isinstance(value, dict):
            self._dict(path, value, Owner(value.__setitem__, value.pop), asks)
        else:
            self.found.fixed[f"the length of {path}"] = len(value)
            self._each(path, enumerate(some_of(value)), asks=asks)

    def _grows(self, path: str, value: Any, hold: tuple[str, str | int]) -> bool:
        """Tell whether a container of tensors and arrays is carried whole.

        Who has dicts with such when the loop begins is looked into: what changes in them is carried item by item.
        """
        if self.began is None or (path in self.began and self.began[path] is None):
            return False
        found: growing_lists.Grown | str = "it has a dict in it"
        if not self.is_first or not _has_dict(value):
            found = self._why_not_whole(path, value, hold) or growing_lists.grown(value)
        if isinstance(found, growing_lists.Grown):
            other = next((self._paths.get(id(part), SAVED) for part in found.parts if id(part) in self._seen), "")
            found = f"{other!r} is a part of it" if other else found
        if isinstance(found, str):
            if self.is_first:
                self.began[path] = None
            else:
                self.found.fixed[path], self.found.why[path] = type(value).__qualname__, found
            return False
        if self.is_first:
            self.began[path] = value
        for number, part in enumerate(found.parts):
            place = f"{path}[{number}]"
            self._seen[id(part)], self._paths[id(part)], self._roots[place] = part, place, path
        put = functools.partial(refill, self.found.owners, value, hold)
        self.found.leaves[path] = Leaf(found.token, *hold, found.stored, put, found, container_kinds.kind_of(value))
        self.found.data[path] = (found.data_token, False)
        self.share(path, value)
        return True

    def _why_not_whole(self, path: str, value: Any, hold: tuple[str, str | int]) -> str:
        """Returns why a container of this class is not made again where it stands; empty if it is."""
        kind = type(value)
        assert self.began is not None
        is_refilled = kind in (list, dict) and type(self.began.get(path, value)) in (list, dict)
        if is_refilled or (kind is collections.OrderedDict and hold[0] in self.found.owners):
            return ""
        known = self.is_first or self.began.get(path) is value
        return "" if known and kind is not collections.OrderedDict else f"it is another {kind.__qualname__}"

    def _dict(self, path: str, items: Mapping[Any, Any], owner: Owner, asks: int) -> None:
        self.found.orders[path] = list(items)
        self.keys(path, items, owner, asks=asks, dot=False)
        for key, part in items.items():
            if type(key) is str or type(key) is int:
                continue
            self.found.fixed[f"{path}[{key!r}]"] = token_of(part) if is_plain(part) else type(part).__qualname__
            self.visit(f"the value of {path}[{key!r}]", part, asks=asks)

    def _made_up(self, path: str, value: Any, asks: int) -> None:
        """Looks at what a container really has in it, and at its attributes: its own methods may load modules, count, or draw."""
        self.found.fixed[path] = type(value).__qualname__
        parts = dict(items_of(value))
        if isinstance(value, dict):
            put, drop = (functools.partial(getattr(standard_of(value), name), value) for name in ("__setitem__", "pop"))
            self._dict(path, parts, Owner(put, drop), asks)
        else:
            self.found.fixed[f"the length of {path}"] = len(parts)
            self._each(path, parts.items(), asks=asks)
        self.keys(
            f"the attributes of {path}", getattr(value, "__dict__", {}), owner_of(value), asks=min(asks, NO_PLACE)
        )
        self.visit(type(value).__qualname__, type(value), asks=min(asks, NO_PLACE))

    def _tensor(self, path: str, value: torch.Tensor, asks: int, hold: tuple[str, str | int]) -> None:
        self.marks(path, value)
        if self._holds(path, value, hold):
            return
        self.found.fixed[path] = token_of_tensor(value)
        local = local_of(value)
        if local.device.type == "cpu":
            self.found.data[path] = (self.found.fixed[path], False)
        memory = parts_of_sparse(local) if is_sparse(local) else (local,)
        if asks and local.device.type == "cpu" and max(part.nbytes for part in memory) > MAX_BYTES:
            self.found.unsure.append((path, "tensor that is too large to be looked at whole,"))

    def _array(self, path: str, value: Any, hold: tuple[str, str | int]) -> None:
        if value.shape == () and is_plain(value) and hold[0] in self.found.owners:
            put = functools.partial(self.found.owners[hold[0]].put, hold[1])
            self.found.leaves[path] = Leaf(token_of(value), *hold, functools.partial(itself, value), put)
        elif not self._holds(path, value, hold):
            self.found.fixed[path] = token_of_array(value)
            if not value.dtype.hasobject:
                self.found.data[path] = (self.found.fixed[path], False)

    def _holds(self, path: str, value: Any, hold: tuple[str, str | int]) -> bool:
        """Tell whether a tensor or an array is one that can be carried; notes its memory in either case."""
        if hold[0] not in self.found.owners or not held_arrays.is_held(value, with_graph=True):
            self._spans.append((held_arrays.span(value), path))
            return False
        token = token_of_tensor(value) if isinstance(value, torch.Tensor) else token_of_array(value)
        put = functools.partial(self.found.owners[hold[0]].put, hold[1])
        self.found.leaves[path] = Leaf(token, *hold, functools.partial(held_arrays.stored, value), put, value)
        self.found.data[path] = (token, False)
        return True

    def _note_data(self, path: str, value: Any, token: object) -> None:
        """Notes a list, a tuple or a dict of plain values that a script makes the same at every start, if it is one."""
        texts = texts_in(value)
        if texts is not None:
            self.found.data[path] = (token, texts)
            self._made.append((path, value))

    def places(self, *, data: bool = True) -> None:
        """Notes where everything lies, and compares data that is made of identities by the objects that they are of, if `data`."""
        self.found.places = self._paths
        for path, value in self._made if data else ():
            named = identities.named(value, self._paths)
            if named is not value:
                self.found.data[path] = (token_of(named), self.found.data[path][1])

    def marks(self, path: str, tensor: torch.Tensor) -> None:
        """Looks at what the script has put on a tensor as attributes: `p.average = ...`."""
        held = getattr(tensor, "__dict__", None)
        if not held or held.get("_is_flat_param"):  # what the first FSDP keeps is work memory
            return
        shown = {
            key: value
            for key, value in held.items()
            if not key.startswith(_OF_TORCH)
            and (
                isinstance(value, (*ATOMS, *CONTAINERS, tuple, torch.Tensor))
                or type(value).__module__ == "numpy"
                or self._is_users_object(value)
            )
        }
        self.keys(path, shown, owner_of(tensor), asks=NO_PLACE)

    def _let_go(self, path: str, other: str) -> None:
        """Takes a held value for one that must stay as it is: something else has a part of it."""
        path = self._roots.get(path, path)
        leaf = self.found.leaves.get(path)
        if leaf is not None and isinstance(leaf.held, growing_lists.Grown):
            del self.found.leaves[path]
            self.found.fixed[path] = leaf.token
            self._spans += [(held_arrays.span(part), path) for part in leaf.held.parts]
            self.found.parts[path] = other
        elif leaf is not None and (value := leaf.held) is not None:
            del self.found.leaves[path]
            self.found.fixed[path] = (
                token_of_tensor(value) if isinstance(value, torch.Tensor) else token_of_array(value)
            )
            self._spans.append((held_arrays.span(value), path))
            self.found.parts[path] = other

    def common(self, kept: Sequence[Any]) -> None:
        """Notes which tensors that are kept lie in the memory of a parameter: a restart has them there as the script makes them."""
        tensors = [thing for thing in kept if isinstance(thing, torch.Tensor)]
        params = [p for thing in kept if isinstance(thing, nn.Module) for p in thing.parameters()] if tensors else []
        names = {held_arrays.span(local_of(p)): self._paths.get(id(p), SAVED) for p in params}
        for tensor in tensors:
            place = held_arrays.span(local_of(tensor))
            if place[0] and place in names:
                self.found.fixed[f"the memory of {self._paths.get(id(tensor), SAVED)}"] = names[place]

    def lone(self, kept: Iterable[Any], carried: Mapping[str, Any]) -> None:
        """Leaves as plain values only those tensors and arrays whose memory nothing else has, of these and of what was seen."""
        held = [
            (path, held_arrays.span(part))
            for path, leaf in self.found.leaves.items()
            if leaf.held is not None
            for part in (leaf.held.parts if isinstance(leaf.held, growing_lists.Grown) else (leaf.held,))
        ]
        if not held:
            return
        spans = [(span, self._paths.get(id(thing), SAVED)) for thing in kept for span in spans_of(thing)]
        spans += [(span, name) for name, thing in carried.items() for span in spans_of(thing)]
        seen = (part for part in self._seen.values() if type(part) is not torch.Tensor)
        params = [part for part in seen if isinstance(part, nn.Parameter)]
        spans += [(span, self._paths.get(id(part), SAVED)) for part in params for span in spans_of(part)]
        spans += [((place, place + 1), SAVED) for told in self._told.values() for place in told.memory if place]
        for path, other in held_arrays.overlapping(held, [*self._spans, *spans]).items():
            self._let_go(path, other)

    def _function(self, path: str, value: types.FunctionType, asks: int) -> None:
        self.found.fixed[path] = name = f"{value.__module__}.{value.__qualname__}"
        home = value.__globals__.get("__name__", "")  # a decorator of a library has the name of what it decorates
        if self._is_users(home):
            self.found.fixed[path] = TokenOfFunction(name, value.__code__)
        else:
            self.visit(f"{path}.__wrapped__", getattr(value, "__wrapped__", None), asks=asks)
            return
        self.pops = self.pops or "pop" in global_names(value.__code__)
        self.keys(path, vars(value), owner_of(value), asks=asks)
        self._each(f"the defaults of {path}", enumerate(value.__defaults__ or ()), asks=asks)
        self._each(f"the defaults of {path}", (value.__kwdefaults__ or {}).items(), asks=asks)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            self._cell(f"{path}().{name}", cell, asks)
        for name in sorted(global_names(value.__code__) & value.__globals__.keys()) if asks else ():
            self.foreign(f"{path}().{name}", value.__globals__[name])
        if home != "__main__":
            self.visit(home, sys.modules.get(home), asks=asks)
        else:
            names = global_names(value.__code__)
            if value.__code__.co_filename != value.__globals__.get("__file__"):
                self._made_of_text(path, value.__code__)
            for name in sorted((names & value.__globals__.keys()) - self.hidden):
                if not name.startswith("__"):
                    self.visit(name, value.__globals__[name], asks=asks, hold=("", name))

    def _made_of_text(self, path: str, code: types.CodeType) -> None:
        """Notes a function that `exec` made, if it reads a name that a loop sets: the text of the script does not show that."""
        read = loaded_names(code) & (self.hidden - self.carried | _BY_TEXT)
        if self.hidden and read:
            self.found.unsure.append((path, f"function made of text that reads {min(read)!r},"))

    def _cell(self, path: str, cell: types.CellType, asks: int) -> None:
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell
        try:
            value = cell.cell_contents
        except ValueError:  # empty as yet
            return
        if self._local.get(path.rpartition(".")[2], self) is value:  # the loop's own name
            return
        put = functools.partial(put_cell, cell)
        self.found.owners[f"cell {path}"] = Owner(put, functools.partial(put_cell, cell, new=None))
        self.visit(path, value, asks=asks, hold=(f"cell {path}", ""))

    def _class(self, path: str, value: type, asks: int) -> None:
        self.found.fixed[path] = value.__qualname__
        if not self._is_users(value.__module__):
            return
        if issubclass(value, enum.Enum):
            members = value.__members__
            others = {key: part for key, part in vars(value).items() if key[:1] != "_" and key not in members}
            self.keys(path, {**others, **members}, owner_of(value), asks=asks)
            return
        if is_of_python(value):
            self._note_kind(value)
        shown: dict[str, Any] = {}
        for key, part in vars(value).items():
            if isinstance(part, staticmethod | classmethod):
                shown[key] = part.__func__
            elif isinstance(part, property):
                shown[key] = part.fget
            elif isinstance(part, types.MemberDescriptorType) and key in slots_of(value):
                continue  # of `__slots__`: what an object has there is looked at with it
            elif isinstance(part, types.FunctionType) or not key.startswith(("__", "_abc_")):
                shown[key] = part
        self.keys(path, shown, owner_of(value), asks=asks)
        for base in value.__bases__:
            self.visit(base.__qualname__, base, asks=asks)

    def _model(self, path: str, model: nn.Module, *, kept: bool) -> None:
        params, modules = dict(model.named_parameters()), dict(model.named_modules())
        parts = [*model.named_modules(remove_duplicate=False)]
        first: dict[int, str] = {}
        self.found.fixed[f"the modules of {path}"] = [
            (name, first.setdefault(id(part), name), type(part).__qualname__) for name, part in parts
        ]
        tensors = {**params, **dict(model.named_buffers())}
        self.found.fixed[f"the tensors of {path}"] = [(name, t.shape, t.dtype) for name, t in tensors.items()]
        for name, tensor in tensors.items():
            for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
                if hooks:
                    self._each(f"hooks of {path}.{name}", enumerate(hooks.values()), asks=ALL)
            self._spans.append((held_arrays.span(local_of(tensor)), f"{path}.{name}"))
            if id(tensor) not in self._seen and not kept:
                self.found.fixed[f"{path}.{name}"] = token_of_tensor(tensor)
            self._seen[id(tensor)] = tensor
            self._paths.setdefault(id(tensor), f"{path}.{name}")
        for name, tensor in tensors.items():  # behind all of them: one may hold another
            self.marks(f"{path}.{name}", tensor)
        frozen = [name for name, p in params.items() if not p.requires_grad]
        still = [name for name, part in modules.items() if not part.training]
        for what, value, put in (
            (f"requires_grad of {path}", frozen, functools.partial(freeze, params)),
            (f"train() or eval() of {path}", still, functools.partial(set_still, modules)),
        ):
            self.found.leaves[what] = Leaf(tuple(value), what, "", functools.partial(itself, value), put)
        for name, part in modules.items():
            self._seen[id(part)] = part
            self._paths.setdefault(id(part), f"{path}.{name}" if name else path)
        for name, part in modules.items():
            self._module(f"{path}.{name}" if name else path, part)

    def _module(self, path: str, part: nn.Module) -> None:
        for key in part._non_persistent_buffers_set:
            if (buffer := part._buffers.get(key)) is not None:
                self.found.fixed[f"{path}.{key}"] = token_of_tensor(buffer)
        self._hooks(path, part, _MODULE_HOOKS)
        for hook, state in vars(part).get("_comm_hooks", ()) if isinstance(part, DistributedDataParallel) else ():
            kept = [*_none_of_torchs(hook), *([] if isinstance(state, dist.ProcessGroup) else [state])]
            self._each(f"the communication hook of {path}", enumerate(kept), asks=ALL)
        self.foreign(f"the class of {path}", type(part))
        own = _MODULE_KEYS | names_of_wrappers(type(part))
        shown = {key: value for key, value in vars(part).items() if key not in own and not key.startswith(_OF_TORCH)}
        self.found.fixed[f"gradients of {path} that no rank has reduced yet"] = living_gradients.has_unreduced(part)
        self.keys(path, shown, owner_of(part), asks=NO_PLACE)
        if self._is_users_object(part):
            self.visit(type(part).__qualname__, type(part), asks=NO_PLACE)

    def _each(self, path: str, items: Iterable[tuple[Any, Any]], *, asks: int) -> None:
        for key, value in items:
            if type(value) in ATOMS:
                self.found.fixed[f"{path}[{key!r}]"] = (type(value), repr(value))
            self.visit(f"{path}[{key!r}]", value, asks=asks)
