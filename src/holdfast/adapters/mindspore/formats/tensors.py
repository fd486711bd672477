"""Tensors as checkpoint files hold them: a dtype, a shape and bytes; and their way from and to numpy.

Dtypes are named as in safetensors (`core.model.DTYPE_BYTES`); MindSpore's names are translated at the border. numpy is
loaded only where arrays are asked for. It has no bfloat16: those tensors are given as their bits (uint16), and taken
from them if the dtype is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.adapters.mindspore.formats.files import Buffer
from holdfast.base.errors import UsageError
from holdfast.core.model import DTYPE_BYTES

if TYPE_CHECKING:
    import numpy as np

# MindSpore's name of a dtype by ours.
MINDSPORE_NAMES = {
    "F64": "Float64", "F32": "Float32", "F16": "Float16", "BF16": "BFloat16", "C64": "Complex64",
    "I64": "Int64", "I32": "Int32", "I16": "Int16", "I8": "Int8",
    "U64": "UInt64", "U32": "UInt32", "U16": "UInt16", "U8": "UInt8", "BOOL": "Bool",
}  # fmt: skip
# numpy's name of a dtype by ours; where numpy has none, that of the bits.
_NUMPY_NAMES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_BITS = {1: "|u1", 2: "<u2"}


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in host memory.

    Attributes:
        dtype: a key of `core.model.DTYPE_BYTES`.
        shape: () for a scalar.
        data: its bytes, row-major, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(f"there is no dtype {self.dtype!r}", remedy=f"one of {', '.join(DTYPE_BYTES)}")
        if any(length < 0 for length in self.shape):
            raise UsageError(f"{self.shape} is no shape")
        if memoryview(self.data).nbytes != self.num_bytes:
            raise UsageError(f"{self.dtype}{list(self.shape)} does not take {memoryview(self.data).nbytes} bytes")

    @property
    def num_bytes(self) -> int:
        """Length of its bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def view(self) -> memoryview:
        """Its bytes, not copied."""
        return memoryview(self.data).cast("B")

    def array(self) -> np.ndarray[Any, Any]:
        """Its elements as numpy sees them, not copied; bfloat16 and eight-bit floats as their bits."""
        import numpy as np  # noqa: PLC0415 - who only asks for ranks does not pay for it

        kind = _NUMPY_NAMES.get(self.dtype) or _BITS[DTYPE_BYTES[self.dtype]]
        return np.frombuffer(self.data, dtype=kind).reshape(self.shape)


# What stands under a name in a checkpoint: a tensor, or text (MindSpore's `append_info`).
Entry: TypeAlias = HostTensor | str
# What may be given to be stored there; numpy arrays and Python numbers become tensors.
EntryLike: TypeAlias = Any


def as_entry(value: EntryLike, dtype: str | None = None) -> Entry:
    """A tensor or text from what it may be given as.

    Args:
        value: a `HostTensor`, text, a numpy array, or a Python number (int64, float32 and bool, as MindSpore).
        dtype: what the bits of an array mean, where numpy has no such dtype ("BF16" of uint16).

    Raises:
        UsageError: MindSpore's files cannot hold that.
    """
    if isinstance(value, HostTensor | str):
        return value
    import numpy as np  # noqa: PLC0415 - as above

    if isinstance(value, float):
        value = np.float32(value)
    array = np.asarray(value)
    array = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    found = next((ours for ours, theirs in _NUMPY_NAMES.items() if array.dtype == np.dtype(theirs)), None)
    if found is None and array.dtype.name == "bfloat16":  # of the package ml_dtypes, which numpy does not know
        found = "BF16"
    if found is None or (dtype and DTYPE_BYTES.get(dtype) != array.dtype.itemsize):
        raise UsageError(f"{dtype or 'a tensor'} cannot be made of {array.dtype}", remedy="convert it before")
    return HostTensor(dtype or found, array.shape, array.tobytes())


def from_numpy(arrays: Mapping[str, EntryLike], *, bfloat16: Iterable[str] = ()) -> dict[str, Entry]:
    """Entries from arrays by name.

    Args:
        arrays: what `as_entry` takes.
        bfloat16: names of those whose uint16 are the bits of bfloat16.
    """
    bits = set(bfloat16)
    return {name: as_entry(value, "BF16" if name in bits else None) for name, value in arrays.items()}


def to_numpy(entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Arrays (and texts) by name, not copied; bfloat16 as its bits."""
    return {name: entry if isinstance(entry, str) else entry.array() for name, entry in entries.items()}
