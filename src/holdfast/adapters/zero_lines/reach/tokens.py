"""Tokens of values: equal as long as a value is. Of large ones some elements are looked at."""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch
import xxhash

from holdfast.adapters.zero_lines.reach.plain_values import (
    CONTAINERS,
    MAX_BYTES,
    MAX_ELEMENTS,
    NUM_SPOTS,
    as_stored,
    is_vast,
    some_of,
)
from holdfast.base.errors import HoldfastError
from holdfast.checkpoint.entries.sharding import local_of
from holdfast.tiers.format import values as value_codec

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class TokenOfFunction:
    """Names a function of the script: equal if both have the same name and code, and the same text in every process."""

    def __init__(self, name: str, code: CodeType) -> None:
        self._name, self._code = name, code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenOfFunction) and (self._name, self._code) == (other._name, other._code)

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return self._name


def token_of(value: Any) -> object:
    """Returns the token of a plain value."""
    try:
        if isinstance(value, (*CONTAINERS, tuple, frozenset)) and len(value) > MAX_ELEMENTS:
            items = value.items() if isinstance(value, dict) else value
            if is_vast(value):
                return len(value), xxhash.xxh3_64_digest(value_codec.encode(list(some_of(items))))
            return tuple(items)  # one that is compared element by element, in no time where these are the same
        return xxhash.xxh3_64_digest(value_codec.encode(as_stored(value) if isinstance(value, CONTAINERS) else value))
    except HoldfastError:
        return repr(value)


def token_of_tensor(tensor: torch.Tensor) -> object:
    """Returns the token of a tensor: shape, dtype, device, and a digest of its elements or the count of its writes."""
    local = local_of(tensor)
    facts = (tuple(local.shape), str(local.dtype), str(local.device), local.requires_grad)
    if is_sparse(local):
        return (*facts, *(token_of_tensor(part) for part in parts_of_sparse(local)))
    if local.device.type != "cpu" or local.layout is not torch.strided or local.is_quantized or not local.numel():
        return (*facts, local._version)
    flat = local.detach().flatten()
    if flat.nbytes > MAX_BYTES:  # torch counts all writes but those through `.data` or an array
        facts = (*facts, local._version)  # type: ignore[assignment]
        flat = torch.cat([flat[:: max(1, flat.numel() // NUM_SPOTS)], flat[-NUM_SPOTS:]])
    data = flat.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy()
    return (*facts, xxhash.xxh3_64_digest(memoryview(data)))  # type: ignore[arg-type]  # an array has a buffer


def is_sparse(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is made of places and values: it is looked at, and never saved."""
    return tensor.layout in _SPARSE


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the places and the values of a sparse tensor, as they are: nothing is sorted."""
    plain = tensor.detach()
    if plain.layout is torch.sparse_coo:
        return plain._indices(), plain._values()
    by_rows = plain.layout in (torch.sparse_csr, torch.sparse_bsr)
    places = (plain.crow_indices(), plain.col_indices()) if by_rows else (plain.ccol_indices(), plain.row_indices())
    return (*places, plain.values())


def token_of_array(value: Any) -> object:
    """Returns the token of a NumPy array: shape, dtype, and a digest of its elements."""
    facts = (tuple(value.shape), str(value.dtype))
    if value.dtype.hasobject:
        return (*facts, repr(value))
    flat = value.reshape(-1)
    if flat.nbytes > MAX_BYTES:
        return (*facts, xxhash.xxh3_64_digest(flat[:: flat.size // NUM_SPOTS].tobytes() + flat[-NUM_SPOTS:].tobytes()))
    whole = memoryview(flat) if flat.flags.c_contiguous and value.dtype.kind in "biufc" else flat.tobytes()
    return (*facts, xxhash.xxh3_64_digest(whole))
