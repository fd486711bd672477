"""Nouns of the trainer's side: a live tensor and where it belongs, all that a save sees, what a restore offers.

Values without behaviour. `checkpoint.state.training_state` makes them, capture and restore use them; nothing here knows a module, an
optimizer, a slot or a file. Names of dtypes are those of safetensors headers.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from holdfast.base.errors import UsageError
from holdfast.core.model import Extent, Shard

# A redundancy group: ranks that hold the same bytes, ascending.
Group: TypeAlias = tuple[int, ...]

_BY_DTYPE: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64", torch.complex64: "C64",
    torch.float32: "F32", torch.int32: "I32", torch.uint32: "U32",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int16: "I16", torch.uint16: "U16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in _BY_DTYPE.items()}


def dtype_name(dtype: torch.dtype, *, where: str) -> str:
    """The name of a dtype in a safetensors header.

    Raises:
        UsageError: the format has no such dtype; `where` is the entry that has it.
    """
    name = _BY_DTYPE.get(dtype)
    if name is None:
        raise UsageError(
            f"tensors of {dtype} cannot be saved",
            where=where,
            remedy="give its bytes as tensor.view(torch.uint8), or convert it to one of "
            + ", ".join(str(known).removeprefix("torch.") for known in _BY_DTYPE),
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a safetensors header calls `name`."""
    return _BY_NAME[name]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor of the training state where it lives now.

    Attributes:
        shard: what it is and who else holds it.
        local: this rank's part, detached, sharing memory with the live tensor; any device, any strides.
        late: an optimizer owns it: a parameter it steps or a tensor of its state. Only its step changes the bytes.
        still: it may stay as it is for many versions: frozen, a buffer, an average. Nothing is taken for granted of it: it only lies
            in bundles of its own. The same on all ranks that hold it, and for good from the first look on.
    """

    shard: Shard
    local: torch.Tensor
    late: bool
    still: bool = False


class LiveTensors(Mapping):  # type: ignore[type-arg]
    """The tensors of a state by entry name, in two parts, so that a save of thousands need not copy a dict of them.

    Attributes:
        lasting: those that stay from save to save. The same object: none of them is another one.
        fresh: those that were made for this look; one of a name that lasts stands in for that.
    """

    def __init__(self, lasting: Mapping[str, LiveTensor], fresh: Mapping[str, LiveTensor]) -> None:
        self.lasting, self.fresh = lasting, fresh
        self._all: dict[str, LiveTensor] | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, LiveTensor]) -> LiveTensors:
        """Returns the same; of another mapping it is not known what lasts."""
        return tensors if isinstance(tensors, LiveTensors) else cls({}, tensors)

    def __getitem__(self, name: str) -> LiveTensor:
        return self.fresh[name] if name in self.fresh else self.lasting[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._joined())

    def __len__(self) -> int:
        return len(self._joined())

    def keys(self) -> KeysView[str]:
        return self._joined().keys()

    def values(self) -> ValuesView[LiveTensor]:
        return self._joined().values()

    def items(self) -> ItemsView[str, LiveTensor]:
        return self._joined().items()

    def _joined(self) -> dict[str, LiveTensor]:
        if self._all is None:
            self._all = {**self.lasting, **self.fresh}
        return self._all


@dataclass(frozen=True, slots=True)
class Gathered:
    """The state at one moment.

    Attributes:
        tensors: by entry name; `local` shares memory with training, nothing is copied.
        values: group -> path -> value for `tiers.format.values.encode`, with TensorRef where a tensor is an entry. Their
            containers are new (`flatten`): they are the state at the call although training goes on.
        structure: rises when a name, dtype, shape, extent, group, device, `late`, or the set of groups with values
            changes. Equal: a plan made from the shards still holds.
        storages: rises when moreover the memory, the strides or the identity of a parameter, buffer or optimizer
            state changes. Tensors that objects make anew at every call (RNG, loader) do not count.
    """

    tensors: Mapping[str, LiveTensor]
    values: Mapping[Group, Mapping[str, Any]]
    structure: int
    storages: int

    @property
    def still(self) -> set[str]:
        """Return the names of the tensors that may stay as they are for many versions."""
        return {name for name, live in self.tensors.items() if live.still}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """An entry of a checkpoint as far as this rank is offered it.

    Attributes:
        dtype: name as in a safetensors header.
        global_shape: shape of the whole tensor.
        pieces: the boxes that are there; together they must make up what this rank holds.
    """

    dtype: str
    global_shape: tuple[int, ...]
    pieces: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """Says what a restore left out; of one that was strict only `left_out` may have something.

    Attributes:
        not_loaded: entries and values of the objects that the checkpoint lacks; they keep what they have.
        not_used: entries and values of the checkpoint that no object takes.
        misfit: entries that both have and that differ, each with the difference; they keep what they have.
        left_out: parameters and buffers that are not saved (`exclude`), and are as the script made them.
        patterns: by which the save left entries out.
    """

    not_loaded: tuple[str, ...]
    not_used: tuple[str, ...]
    misfit: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
