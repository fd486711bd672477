"""Strategy files: how operators are split and how parameters lie on the devices of a pipeline stage.

Two spellings of the same: protocol buffers (message `mindspore.straspb.ParallelStrategyMap` of
https://gitee.com/mindspore/mindspore, node_strategy.proto), and JSON when the name ends in `.json`. Pipelines have one
file per stage; the merged file names each parameter `<stage>-<name>`.

What MindSpore wrote is written back byte for byte, except that merged JSON is spelt like the JSON of one stage.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.adapters.mindspore import strategy_json
from holdfast.adapters.mindspore.formats.files import PathLike, read_file, replace_file
from holdfast.adapters.mindspore.formats.protobuf import Field, Message, Source, decode, encode, numbers
from holdfast.adapters.mindspore.layout import Layout
from holdfast.base.errors import CorruptError, UsageError

# A parameter takes about 300 bytes; the number of fields is what bounds the time.
MAX_BYTES = 64 << 20
MAX_JSON_BYTES = 16 << 20
JSON_SUFFIX = ".json"

_DIMS = Message("ParallelStrategy", Field(1, "dim", "uint32", "repeated"))
_STRATEGYS = Message("ParallelStrategys", Field(1, "stage", "uint32"), Field(2, "parallel_strategy", _DIMS, "repeated"))
_OPERATOR = Message("ParallelStrategyItem", Field(1, "node_name", "text"), Field(2, "parallel_strategys", _STRATEGYS))
_LAYOUTS = Message(
    "ParallelLayouts",
    Field(1, "dev_matrix", Message("DevMatrix", Field(1, "dim", "uint32", "repeated")), "repeated"),
    Field(2, "tensor_map", Message("TensorMap", Field(1, "dim", "int32", "repeated")), "repeated"),
    Field(3, "param_split_shape", Message("ParamSplitShape", Field(1, "dim", "int64", "repeated")), "repeated"),
    Field(4, "indices_offset", Message("IndicesOffset", Field(1, "dim", "int64", "repeated")), "repeated"),
    Field(5, "field", "int32"),
    Field(6, "opt_weight_shard_step", "int32"),
    Field(7, "opt_weight_shard_size", "int32"),
)
_PARAMETER = Message("ParallelLayoutItem", Field(1, "param_name", "text"), Field(2, "parallel_layouts", "span"))
_MAP = Message(
    "ParallelStrategyMap",
    Field(1, "current_stage", "uint32"),
    Field(2, "parallel_strategy_item", _OPERATOR, "repeated"),
    Field(3, "parallel_layout_item", _PARAMETER, "repeated"),
)
_WHAT = "strategy file"


@dataclass(frozen=True, slots=True)
class OperatorStrategy:
    """Tells how one operator's inputs are split: per input the number of slices along each dimension."""

    name: str
    stage: int
    inputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """Holds what a strategy file says.

    Attributes:
        operators: in file order.
        layouts: by parameter name (in a merged file `<stage>-<name>`), in file order.
        extras: what else a JSON file says at its top level; written back, not interpreted.
    """

    current_stage: int
    operators: tuple[OperatorStrategy, ...]
    layouts: Mapping[str, Layout]
    extras: Mapping[str, Any] = field(default_factory=dict)


def read_strategy(path: PathLike) -> Strategy:
    """Reads a strategy file: JSON if its name ends in `.json`, else protocol buffers.

    Raises:
        ValueError: no such file, or an empty one.
        CorruptError: not a strategy file.
    """
    limit, decoded = (MAX_JSON_BYTES, decode_json_strategy) if _is_json(path) else (MAX_BYTES, decode_strategy)
    return decoded(read_file(path, what=_WHAT, limit=limit), os.fspath(path))


def write_strategy(path: PathLike, strategy: Strategy) -> None:
    """Writes a strategy file in the spelling that its name asks for (mode 0600), whole or not at all.

    Raises:
        UsageError: what a file of this kind cannot say.
    """
    replace_file(path, [encode_json_strategy(strategy) if _is_json(path) else encode_strategy(strategy)])


def merge_pipeline_strategys(paths: PathLike | Iterable[PathLike], out: PathLike) -> Strategy:
    """Joins the strategy files of all pipeline stages, as MindSpore's function of this name.

    Args:
        paths: the files in the order of stages, or the directory with them (MindSpore's way). A file that says the
            same as one before, or that is of the same stage, counts once.
        out: the merged file; protocol buffers or JSON by its name.

    Returns:
        What was written.

    Raises:
        NotADirectoryError, ValueError: nothing to merge, both spellings side by side, or a file without layouts.
        CorruptError: one is not a strategy file.
    """
    stages: dict[int, Strategy] = {}
    for path in _stage_files(paths):
        strategy = read_strategy(path)
        if not strategy.operators or not strategy.layouts:
            raise ValueError(f"the strategy file {os.fspath(path)} is empty")
        stages.setdefault(strategy.operators[0].stage, strategy)
    merged = Strategy(
        current_stage=1,
        operators=tuple(operator for strategy in stages.values() for operator in strategy.operators),
        layouts={f"{stage}-{name}": layout for stage, s in stages.items() for name, layout in s.layouts.items()},
    )
    write_strategy(out, merged)
    return merged


def _stage_files(paths: PathLike | Iterable[PathLike]) -> list[PathLike]:
    if isinstance(paths, str | os.PathLike):
        if not os.path.isdir(paths):
            raise NotADirectoryError(f"{os.fspath(paths)} is not a directory")
        files: list[PathLike] = [*sorted(p for p in Path(paths).iterdir() if p.suffix in {".ckpt", JSON_SUFFIX})]
    else:
        files = list(paths)
    if not files:
        raise ValueError("no strategy files to merge")
    if len({_is_json(path) for path in files}) > 1:
        raise ValueError("strategy files to be merged are all protocol buffers or all JSON")
    return files


def _is_json(path: PathLike) -> bool:
    return os.fspath(path).endswith(JSON_SUFFIX)


def decode_strategy(data: bytes, where: str) -> Strategy:
    """Return what these bytes say, read as protocol buffers. Raises CorruptError."""
    source = Source(data, where)
    values = decode(_MAP, source)
    layouts: dict[str, Layout] = {}
    known: dict[bytes, Layout] = {}  # thousands of parameters lie in a handful of ways; each is read once
    for item in values["parallel_layout_item"]:
        name, (start, stop) = item["param_name"], item["parallel_layouts"]
        if name in layouts:
            raise source.damage(f"parameter {name!r} is there twice", start)
        spelt = data[start:stop]
        if spelt not in known:
            known[spelt] = _layout_of(decode(_LAYOUTS, source, start, stop), f"{where}, {name}")
        layouts[name] = known[spelt]
    operators = tuple(
        OperatorStrategy(item["node_name"], split["stage"], tuple(tuple(i["dim"]) for i in split["parallel_strategy"]))
        for item in values["parallel_strategy_item"]
        for split in [item["parallel_strategys"]]
    )
    return Strategy(values["current_stage"], operators, layouts)


def _layout_of(values: dict[str, Any], where: str) -> Layout:
    lists = {
        name: [tuple(item["dim"]) for item in values[name]]
        for name in ("dev_matrix", "tensor_map", "param_split_shape", "indices_offset")
    }
    for name in ("dev_matrix", "param_split_shape", "indices_offset"):
        if len(lists[name]) > 1:
            raise CorruptError(f"{name} is there {len(lists[name])} times", where=where)
    if not lists["dev_matrix"] or not lists["tensor_map"]:
        raise CorruptError("a layout without dev_matrix or tensor_map", where=where)
    maps = lists["tensor_map"]
    # One list: an axis per dimension. Several: a list of axes per dimension (and an empty one after a single list).
    tensor_map = maps[0] if len(maps) == 1 else tuple(axes for axes in maps if axes)
    try:
        return Layout(
            dev_matrix=lists["dev_matrix"][0],
            tensor_map=tensor_map,
            param_split_shape=sum(lists["param_split_shape"], ()),
            indices_offset=sum(lists["indices_offset"], ()),
            **{name: values[name] for name in ("opt_weight_shard_step", "opt_weight_shard_size", "field")},
        )
    except UsageError as error:
        raise CorruptError(error.what, where=where) from error


def encode_strategy(strategy: Strategy) -> bytes:
    """The bytes of the file as protocol buffers. Raises UsageError for extras, which only JSON can say."""
    if strategy.extras:
        raise UsageError(f"only JSON can say {', '.join(strategy.extras)}", remedy="give the file a name in `.json`")
    operators = [
        {
            "node_name": operator.name,
            "parallel_strategys": {"stage": operator.stage, "parallel_strategy": [*map(numbers, operator.inputs)]},
        }
        for operator in strategy.operators
    ]
    layouts = [
        {"param_name": name, "parallel_layouts": encode(_LAYOUTS, _values_of(layout))}
        for name, layout in strategy.layouts.items()
    ]
    values = {"current_stage": strategy.current_stage}
    return encode(_MAP, {**values, "parallel_strategy_item": operators, "parallel_layout_item": layouts})


def _values_of(layout: Layout) -> dict[str, Any]:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in layout.tensor_map]
    if all(isinstance(entry, int) for entry in layout.tensor_map):
        maps = [tuple(axis for entry in entries for axis in entry)]
    else:
        # MindSpore leaves empty lists out, so no axis is spelt -1; and a single list would read as one axis each.
        maps = [entry or (-1,) for entry in entries] + [()] * (len(entries) == 1)
    return {
        "dev_matrix": [numbers(layout.dev_matrix)],
        "tensor_map": [*map(numbers, maps)],
        "param_split_shape": [numbers(layout.param_split_shape)],
        "indices_offset": [numbers(layout.indices_offset)],
        "field": layout.field,
        "opt_weight_shard_step": layout.opt_weight_shard_step,
        "opt_weight_shard_size": layout.opt_weight_shard_size,
    }


def decode_json_strategy(data: bytes, where: str) -> Strategy:
    """Return what these bytes say, read as JSON. Raises CorruptError."""
    text = strategy_json.decode(data, where)
    layouts = {}
    for name, item in text.layouts.items():
        try:
            layouts[name] = Layout(**item)
        except UsageError as error:
            raise CorruptError(error.what, where=f"{where}, {name}") from error
    operators = tuple(OperatorStrategy(name, stage, inputs) for name, (stage, inputs) in text.operators.items())
    return Strategy(text.current_stage, operators, layouts, text.extras)


def encode_json_strategy(strategy: Strategy) -> bytes:
    """The bytes of the file as JSON. Raises UsageError for two operators of one name, which only the other can say."""
    operators = {operator.name: (operator.stage, operator.inputs) for operator in strategy.operators}
    if len(operators) < len(strategy.operators):
        raise UsageError("JSON cannot name an operator twice", remedy="give the file a name that ends in `.ckpt`")
    layouts = {
        name: {slot: getattr(layout, slot) for slot in layout.__slots__} for name, layout in strategy.layouts.items()
    }
    return strategy_json.encode(strategy_json.Text(strategy.current_stage, operators, layouts, strategy.extras))


def stage_layouts(strategy: Strategy) -> list[tuple[int, str, Layout]]:
    """The layouts with their stage and their name within it.

    A name is `<stage>-<name>` in a merged file. In the file of one stage all have the stage of its operators.
    """
    own = strategy.operators[0].stage if strategy.operators else 0
    found = []
    for name, layout in strategy.layouts.items():
        stage, dash, rest = name.partition("-")
        prefixed = bool(dash) and stage.isascii() and stage.isdigit() and len(stage) < 10
        found.append((int(stage), rest, layout) if prefixed else (own, name, layout))
    return found
