"""MindSpore's files and answers, without MindSpore: who holds what, who saves what, what to load when a file is lost.

Functions are named as MindSpore names them and answer as it does (2.10); where it fails or its answer is wrong, the
function's text says so. Only `load_checkpoint`, `save_checkpoint` and their arrays need numpy, and load it when asked.
Guide: docs/mindspore.md.

| file | subject |
|---|---|
| `proto` | protocol buffers: bounded reading and exact writing by a schema |
| `files` | opening and replacing files |
| `groups` | `group_info.pb` and the names of communication groups |
| `layout` | one parameter on a box of devices: arithmetic |
| `strategy`, `strategy_json` | strategy files in their two spellings, and pipelines merged |
| `redundancy` | redundancy groups, shares, twins' files |
| `transform` | which source ranks a target rank needs |
| `extents` | layouts to and from boxes per rank, the words of `core.model` |
| `tensors`, `ckpt`, `safe`, `checkpoint` | checkpoints in their two formats |
| `aiturbo`, `front` | MindSpore's own training saves and loads through holdfast when AITURBO=1 |
| `rank_files` | own slices of a PyTorch job in a file per rank, and a twin's when one is lost; imports torch |
"""

from holdfast.adapters.mindspore.checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint
from holdfast.adapters.mindspore.extents import (
    Slice,
    extents_by_rank,
    layout_from_extents,
    shards_of_rank,
    slices_of,
    strategy_from_extents,
)
from holdfast.adapters.mindspore.formats.tensors import HostTensor, from_numpy, to_numpy
from holdfast.adapters.mindspore.groups import (
    GroupInfo,
    group_name,
    read_group_info,
    restore_group_info_list,
    write_group_info,
)
from holdfast.adapters.mindspore.layout import Layout
from holdfast.adapters.mindspore.redundancy import (
    get_ckpt_path_with_strategy,
    get_parameter_redundancy,
    group_info_of_shards,
    parameter_holders,
    rank_peers,
    redundancy_of_stages,
    remove_param_redundancy,
    restore_ranks,
    write_group_info_of_rank,
)
from holdfast.adapters.mindspore.strategy import (
    OperatorStrategy,
    Strategy,
    merge_pipeline_strategys,
    read_strategy,
    write_strategy,
)
from holdfast.adapters.mindspore.transform import rank_list_for_transform

__all__ = [
    "GroupInfo",
    "HostTensor",
    "Layout",
    "OperatorStrategy",
    "Slice",
    "Strategy",
    "convert_checkpoint",
    "extents_by_rank",
    "from_numpy",
    "get_ckpt_path_with_strategy",
    "get_parameter_redundancy",
    "group_info_of_shards",
    "group_name",
    "layout_from_extents",
    "load_checkpoint",
    "merge_pipeline_strategys",
    "parameter_holders",
    "rank_list_for_transform",
    "rank_peers",
    "read_group_info",
    "read_strategy",
    "redundancy_of_stages",
    "remove_param_redundancy",
    "restore_group_info_list",
    "restore_ranks",
    "save_checkpoint",
    "shards_of_rank",
    "slices_of",
    "strategy_from_extents",
    "to_numpy",
    "write_group_info",
    "write_group_info_of_rank",
    "write_strategy",
]
