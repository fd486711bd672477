"""The first FSDP (`FullyShardedDataParallel`): which part of which parameter this rank holds, without a collective.

It lays the parameters of a unit end to end and cuts that row of numbers into equal parts, one per rank; a part begins and
ends anywhere in a parameter. With `use_orig_params=True` a parameter is, between two steps, a flat view of what this rank
holds of it (PyTorch, documentation of `FullyShardedDataParallel`), and an optimizer's state of it has the same shape. So an
entry is the whole parameter as a row of numbers, and this rank's part of it lies where FSDP itself says.

Nothing here calls `state_dict()` of a wrapped module: that would gather every parameter on every rank.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed import get_process_group_ranks

from holdfast.base.errors import UsageError
from holdfast.checkpoint.entries.sharding import Piece
from holdfast.checkpoint.entries.types import Group
from holdfast.core.model import Extent

EXTRA = "_extra_state"


def pieces(name: str, module: nn.Module, rank: int) -> dict[int, Piece] | None:
    """Return what this rank holds of every parameter that FSDP cuts, by the parameter's id. `name`: of the module, for
    errors.

    Returns:
        None if the first FSDP wraps neither the module nor one inside it.

    Raises:
        UsageError: parameters are not to be seen by themselves (`use_orig_params=False`).
    """
    units = units_of(module)
    if not units:
        return None
    found: dict[int, Piece] = {}
    for unit in units:
        handle = unit._handle
        if handle is None:  # a unit whose parameters all belong to units inside it
            continue
        flat = handle.flat_param
        if flat._params is None:
            raise UsageError(
                "FullyShardedDataParallel hides the parameters in flat ones; they cannot be saved by name",
                where=name,
                remedy="wrap the model with use_orig_params=True, or with torch.distributed.fsdp.fully_shard",
            )
        ranks = _holders(unit, rank, cut=handle.uses_sharded_strategy)
        for parameter, numel, info in zip(flat._params, flat._numels, flat._shard_param_infos, strict=True):
            if not handle.uses_sharded_strategy:
                shape = tuple(parameter.shape)
                found[id(parameter)] = Piece(shape, Extent((0,) * len(shape), shape), ranks)
                continue
            box = Extent((info.intra_param_start_idx or 0,), (info.numel_in_shard or 0,))
            found[id(parameter)] = Piece((int(numel),), box, ranks)
    return found


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return what `state_dict(keep_vars=True)` names, with this rank's parts in it; hooks of modules are not asked.

    Returns:
        Parameters and persistent buffers, and None in place of the extra state of modules that have some.
    """
    found: dict[str, Any] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        kept = {name: t for name, t in inner._buffers.items() if name not in inner._non_persistent_buffers_set}
        found |= {f"{prefix}{name}": t for name, t in {**inner._parameters, **kept}.items() if t is not None}
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            found[f"{prefix}{EXTRA}"] = None
    return found


def units_of(module: nn.Module) -> list[Any]:
    """Return the modules in a module, itself included, that the first FSDP wraps."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [m for m in module.modules() if isinstance(m, fsdp.FullyShardedDataParallel)]


def _holders(unit: Any, rank: int, *, cut: bool) -> Group:
    """Return who holds the same: nobody else, the same place in the other replicas (hybrid), or everybody (no
    sharding).
    """
    replicas = getattr(unit, "_inter_node_pg", None)
    if not cut:
        return tuple(sorted(get_process_group_ranks(unit.process_group)))
    return (rank,) if replicas is None else tuple(sorted(get_process_group_ranks(replicas)))
