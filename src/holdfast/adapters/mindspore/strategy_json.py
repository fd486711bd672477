"""The JSON spelling of a strategy file: text to plain values and back.

MindSpore writes it without white space, names in sorted order (https://json.nlohmann.me); a merged file has them as
they came. Whatever order a file has is kept. Values are checked for type and range here, for sense in `layout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from holdfast.base.errors import CorruptError
from holdfast.base.handler_errors import pass_on

_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_UInt32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A layout; fields in the order in which MindSpore writes them."""

    dev_matrix: tuple[_UInt32, ...]
    field: _Int32
    indices_offset: tuple[_Int64, ...] = ()
    opt_weight_shard_size: _Int32 | msgspec.UnsetType = msgspec.UNSET
    opt_weight_shard_step: _Int32 | msgspec.UnsetType = msgspec.UNSET
    param_split_shape: tuple[_Int64, ...] = ()
    tensor_map: tuple[_Int32 | tuple[_Int32, ...], ...] = ()
    tensor_shape: tuple[_Int64, ...] | msgspec.UnsetType = msgspec.UNSET


class _Operator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parallel_strategy: tuple[tuple[_UInt32, ...], ...]
    stage: _UInt32


@dataclass(frozen=True, slots=True)
class Text:
    """Holds what a JSON strategy file says, as plain values.

    Attributes:
        operators: (stage, splits) by operator.
        layouts: keyword arguments of `Layout` by parameter.
        extras: all else at the top level.
    """

    current_stage: int
    operators: Mapping[str, tuple[int, tuple[tuple[int, ...], ...]]]
    layouts: Mapping[str, dict[str, Any]]
    extras: Mapping[str, Any]


def decode(data: bytes, where: str) -> Text:
    """Reads the text. Raises CorruptError."""
    try:
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        stage = msgspec.json.decode(parts.pop("current_stage", msgspec.Raw(b"0")), type=_UInt32)
        operators = _decode_named(parts.pop("parallel_strategy_item", None), _Operator)
        layouts = _decode_named(parts.pop("parallel_layout_item", None), _Layout)
        extras = {name: msgspec.json.decode(raw) for name, raw in parts.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        pass_on(error)
        raise CorruptError(f"not a strategy in JSON: {error}", where=where) from error
    return Text(
        stage,
        {name: (item.stage, item.parallel_strategy) for name, item in operators.items()},
        {name: _arguments(item) for name, item in layouts.items()},
        extras,
    )


def _decode_named(raw: msgspec.Raw | None, kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = {} if raw is None else msgspec.json.decode(raw, type=dict[str, kind])
    return found


def _arguments(layout: _Layout) -> dict[str, Any]:
    values = {name: getattr(layout, name) for name in layout.__struct_fields__}
    return {name: value for name, value in values.items() if value is not msgspec.UNSET}


def encode(text: Text) -> bytes:
    """The text, with names in sorted order at the top level."""
    values: dict[str, Any] = dict(text.extras)
    values["current_stage"] = text.current_stage
    if text.operators:
        values["parallel_strategy_item"] = {n: _Operator(inputs, s) for n, (s, inputs) in text.operators.items()}
    if text.layouts:
        values["parallel_layout_item"] = {name: _spelt(arguments) for name, arguments in text.layouts.items()}
    return msgspec.json.encode(dict(sorted(values.items())))


def _spelt(arguments: dict[str, Any]) -> _Layout:
    shape = arguments["tensor_shape"]
    return _Layout(**{**arguments, "tensor_shape": msgspec.UNSET if shape is None else shape})
