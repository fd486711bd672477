"""Decides who holds the same bytes, who saves what, and whose file replaces a lost one: MindSpore's rules.

From layouts come redundancy groups per parameter; their intersection over all parameters is the list that
`group_info.pb` carries; dealing the parameters of equal groups round decides who saves what. Names and answers are
MindSpore's (https://gitee.com/mindspore/mindspore, train/_utils.py and train/serialization.py); where it asks its
communication for a rank, the rank is an argument here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from holdfast.adapters.mindspore.formats.files import PathLike
from holdfast.adapters.mindspore.groups import GroupInfo, named_groups, write_group_info
from holdfast.adapters.mindspore.layout import Layout
from holdfast.adapters.mindspore.strategy import Strategy, read_strategy, stage_layouts
from holdfast.base.config import GROUP_INFO_VARIABLE
from holdfast.base.errors import StorageError, UsageError
from holdfast.base.handler_errors import pass_on
from holdfast.core.model import Shard

Groups: TypeAlias = tuple[tuple[int, ...], ...]
Redundancy: TypeAlias = Mapping[str, Sequence[Sequence[int]]]
# What stands for a strategy: its file, what was read from it, or layouts by parameter (also as MindSpore's tuples).
StrategyLike: TypeAlias = PathLike | Strategy | Mapping[str, Any]

_RANK_IN_PATH = re.compile(r"rank_(\d+)")
# Not state of the network: sums of gradients within a step, and inputs.
_NOT_RESTORED = ("accu_grads", "inputs")
# Where the tuple of `parameter_layout_dict` has the name of its optimizer sharding group.
_GROUP_SLOT = 5
_STEP_AND_SIZE = 4


def get_parameter_redundancy(strategy: StrategyLike, initial_rank: int = 0) -> dict[str, Groups]:
    """The redundancy groups of every parameter: ranks that hold the same bytes.

    Args:
        strategy: a strategy file or what was read from it; or layouts by parameter: `Layout`s, or sequences that start
            with dev_matrix and tensor_map and go on as in MindSpore's `parameter_layout_dict`, or with optimizer shard
            step and size.
        initial_rank: first global rank of the pipeline stage, added to every rank.

    Returns:
        By parameter, names in sorted order. MindSpore's own answer, also where it is that nobody holds a parameter:
        under full optimizer sharding, when the devices that share a slice are fewer than all divided by the step.
        `parameter_holders` says who holds it. In the file of a merged pipeline every stage starts at `initial_rank`, as
        in MindSpore; `redundancy_of_stages` gives global ranks there.

    Raises:
        ValueError: no such file, or an empty one.
        UsageError, CorruptError: no such layout; not a strategy file.
    """
    layouts = _layouts(strategy)
    holders = parameter_holders(layouts, initial_rank)
    return {name: () if layouts[name].is_lost_to_mindspore else groups for name, groups in holders.items()}


def parameter_holders(strategy: StrategyLike, initial_rank: int = 0) -> dict[str, Groups]:
    """The ranks that really hold the same bytes of every parameter: arguments and errors of `get_parameter_redundancy`,
    and its answer wherever MindSpore's is that anybody holds it.
    """
    layouts = _layouts(strategy)
    known: dict[tuple[Any, ...], Groups] = {}  # thousands of parameters lie in a handful of ways
    return {name: _groups_from(layouts[name], initial_rank, known) for name in sorted(layouts)}


def redundancy_of_stages(strategy: PathLike | Strategy) -> dict[str, Groups]:
    """The redundancy groups of every parameter in global ranks: each stage's ranks follow those of the stage before.

    A parameter that several stages have under one name (a shared embedding) has the groups of all of them.
    """
    read = strategy if isinstance(strategy, Strategy) else read_strategy(strategy)
    found: dict[str, Groups] = {}
    known: dict[tuple[Any, ...], Groups] = {}
    for stage, name, layout in stage_layouts(read):
        found[name] = found.get(name, ()) + _groups_from(layout, stage * layout.num_devices, known)
    return dict(sorted(found.items()))


def _layouts(strategy: StrategyLike) -> Mapping[str, Layout]:
    if isinstance(strategy, Strategy):
        return strategy.layouts
    if isinstance(strategy, Mapping):
        return {name: as_layout(value) for name, value in strategy.items()}
    return read_strategy(strategy).layouts


def as_layout(value: Layout | Sequence[Any]) -> Layout:
    """A layout from MindSpore's sequences.

    Args:
        value: (dev_matrix, tensor_map), the same with optimizer shard step and size, or an entry of
            `parameter_layout_dict` (dev_matrix, tensor_map, slice shape, field, uniform split, group, ...), whose
            group's name `<size>-<hash>` says the shard size.
    """
    if isinstance(value, Layout):
        return value
    dev_matrix = tuple(value[0])
    tensor_map = tuple(entry if isinstance(entry, int) else tuple(entry) for entry in value[1])
    step = size = 0
    if len(value) == _STEP_AND_SIZE:
        step, size = value[2], value[3]
    elif len(value) > _GROUP_SLOT and value[_GROUP_SLOT]:
        members = str(value[_GROUP_SLOT]).partition("-")[0]
        if not members.isdigit():
            raise UsageError(f"the name of group {value[_GROUP_SLOT]!r} does not say how many ranks it has")
        size = int(members)
    return Layout(dev_matrix, tensor_map, opt_weight_shard_step=step, opt_weight_shard_size=size)


def _groups_from(layout: Layout, first_rank: int, known: dict[tuple[Any, ...], Groups]) -> Groups:
    """The layout's groups as global ranks; `known` are those that were asked for before."""
    sharding = (layout.opt_weight_shard_step, layout.opt_weight_shard_size)
    key = (layout.dev_matrix, layout.tensor_map, sharding, first_rank)
    if key not in known:
        known[key] = tuple(tuple(device + first_rank for device in group) for group in layout.groups())
    return known[key]


def remove_param_redundancy(redundancy: Redundancy, keep_redundancy: int = 1) -> dict[int, set[str]]:
    """Return who saves what, so that each parameter is saved by `keep_redundancy` ranks of each of its groups.

    Parameters with equal groups are dealt round the ranks of each group, in the order of `redundancy`; each further
    copy begins one rank later.

    Returns:
        Parameters by rank; a rank that saves nothing is not there.
    """
    dealt: dict[tuple[int, ...], list[str]] = {}
    for name, groups in redundancy.items():
        for group in groups:
            dealt.setdefault(tuple(group), []).append(name)
    savers: dict[int, set[str]] = {}
    for copy in range(keep_redundancy):
        for group, names in dealt.items():
            for index, name in enumerate(names):
                savers.setdefault(group[(index + copy) % len(group)], set()).add(name)
    return savers


def restore_ranks(redundancy: Redundancy, rank: int) -> tuple[int, ...]:
    """The ranks whose whole state equals that of `rank`: the intersection of its groups over all parameters.

    This is the list in `group_info.pb`. Parameters that the rank does not hold do not count, sums of gradients neither.
    """
    common: set[int] | None = None
    for group in _groups_of(redundancy, rank):
        common = set(group) if common is None else common & set(group)
    return tuple(sorted(common)) if common else (rank,)


def rank_peers(redundancy: Redundancy, rank: int) -> tuple[int, ...]:
    """The same as MindSpore's twin lookup sees it: the smallest group, or the rank alone if the groups are not nested."""
    smallest: tuple[int, ...] = ()
    for group in _groups_of(redundancy, rank):
        if smallest and not (set(group) <= set(smallest) or set(smallest) <= set(group)):
            return (rank,)
        if not smallest or len(group) < len(smallest):
            smallest = tuple(group)
    return smallest


def _groups_of(redundancy: Redundancy, rank: int) -> Iterable[Sequence[int]]:
    for name, groups in redundancy.items():
        if not name.startswith(_NOT_RESTORED):
            yield from (group for group in groups if rank in group)


def get_ckpt_path_with_strategy(
    path: str, strategy: StrategyLike, rank: int | None = None, *, accept: Callable[[str], bool] = os.path.isfile
) -> str | None:
    """The file to load for a rank: its own, or that of a rank that holds the same slices.

    Args:
        path: the rank's own checkpoint; `rank_<n>` in it tells the ranks' files apart.
        strategy: the strategy of the rank's stage.
        rank: the rank that loads (MindSpore asks its communication); by default the one that `path` names.
        accept: which file will do. MindSpore asks only whether it is there; digest, step and layout can be asked here.

    Returns:
        The first path that `accept` takes, or None.

    Raises:
        UsageError: no rank is given, and `path` names none.
        ValueError, CorruptError: the strategy file is missing, empty or damaged.
    """
    named = _RANK_IN_PATH.findall(path)
    if rank is None:
        if not named:
            raise UsageError("the path names no rank", where=path, remedy="pass the rank that loads")
        rank = int(named[-1])
    if named[-1:] == [str(rank)] and accept(path):
        return path
    # MindSpore replaces every number; a directory above that only looks like a rank's is left alone here.
    own = re.compile(rf"rank_{named[-1]}(?!\d)") if named else _RANK_IN_PATH
    peers = rank_peers(_redundancy_around(strategy, rank), rank)
    candidates = (own.sub(f"rank_{peer}", path) for peer in peers)
    return next((candidate for candidate in candidates if accept(candidate)), None)


def _redundancy_around(strategy: StrategyLike, rank: int) -> dict[str, Groups]:
    """The groups of the stage of `rank`, in global ranks, whether the file is of that stage or of all of them."""
    if isinstance(strategy, str | os.PathLike):
        strategy = read_strategy(strategy)
    if isinstance(strategy, Strategy) and len({stage for stage, _, _ in stage_layouts(strategy)}) > 1:
        return redundancy_of_stages(strategy)
    layouts = _layouts(strategy)
    num_devices = next((layout.num_devices for layout in layouts.values()), 1)
    return parameter_holders(layouts, rank // num_devices * num_devices)


def write_group_info_of_rank(
    path: str | None, redundancy: Redundancy, rank: int, *, groups: Iterable[Sequence[int]] = ()
) -> GroupInfo | None:
    """Writes the group information file of one rank, as MindSpore does before the first step.

    Args:
        path: what the environment says in GROUP_INFO_FILE; nothing is written for None or "". Ranks that share an
            environment tell their files apart by `{rank}` in it.
        redundancy: groups by parameter, in global ranks.
        rank: whose file it is.
        groups: further communication groups that this rank made (model parallel), in their order. The groups among
            which its parameters are replicated follow; the group of all ranks is not listed.

    Returns:
        What was written, or None.
    """
    if not path:
        return None
    world = {member for found in redundancy.values() for group in found for member in group}
    made = [tuple(group) for group in (*groups, *_groups_of(redundancy, rank))]
    listed = [group for group in dict.fromkeys(made) if 1 < len(group) < len(world)]
    info = GroupInfo(named_groups(listed), list(restore_ranks(redundancy, rank)))
    write_group_info(path.replace("{rank}", str(rank)), info)
    return info


def group_info_of_shards(shards: Iterable[Shard], rank: int, world_size: int) -> GroupInfo:
    """The group information of a rank from what it holds, in the words of `core.model`.

    Args:
        shards: what the rank holds of all that is trained; what is a rank's own counts as held by nobody else.
        rank: whose.
        world_size: ranks of the job; the group of all of them is not listed.
    """
    made = dict.fromkeys(shard.ranks for shard in shards)
    common = set[int].intersection(*map(set, made)) if made else {rank}
    return GroupInfo(named_groups(g for g in made if 1 < len(g) < world_size), sorted(common))


def write_group_info_of_shards(path: str, shards: Iterable[Shard], rank: int, world_size: int) -> None:
    """Write the group information file of a rank from what it holds; `{rank}` in the path is its number.

    Raises:
        StorageError: the file cannot be written.
    """
    path = path.replace("{rank}", str(rank))
    try:
        write_group_info(path, group_info_of_shards(shards, rank, world_size))
    except OSError as error:
        pass_on(error)
        raise StorageError(
            f"the group information cannot be written: {error.strerror}",
            where=path,
            remedy=f"correct or unset {GROUP_INFO_VARIABLE}",
        ) from error
