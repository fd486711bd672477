"""Where MindSpore's samples are, and layouts drawn at random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from holdfast.adapters.mindspore import Layout, OperatorStrategy, Strategy

SAMPLES = Path(__file__).parent / "mindspore_samples"
GROUP_FILES = sorted(SAMPLES.glob("*/rank_*/group_info.pb"))
STRATEGY_FILES = sorted([*SAMPLES.glob("*/rank_0/strategy.*"), *SAMPLES.glob("stages/*.ckpt"), SAMPLES / "merged.ckpt"])


def golden(name: str) -> Any:
    return json.loads((SAMPLES / name).read_text())


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(SAMPLES)) for path in paths]


def layout(spelt: list[Any]) -> Layout:
    """A layout as `redundancy.json` and its neighbours spell it."""
    dev_matrix, tensor_map, step, size = spelt
    entries = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in tensor_map)
    return Layout(tuple(dev_matrix), entries, opt_weight_shard_step=step, opt_weight_shard_size=size)


def strategy(layouts: dict[str, Layout]) -> Strategy:
    return Strategy(1, (OperatorStrategy("MatMul", 0, ((1, 1),)),), layouts)


@st.composite
def layouts(draw: st.DrawFn, max_devices: int = 24, *, powers_of_two: bool = False) -> Layout:
    """Any layout: axes of any length in any order, several per dimension, some unused, optimizer sharding."""
    lengths = [n for n in range(1, max_devices + 1) if not (powers_of_two and n & (n - 1))]
    devices: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        room = max_devices
        for length in devices:
            room //= length
        devices.append(draw(st.sampled_from([n for n in lengths if n <= max(room, 1)])))
    axes = draw(st.permutations(range(len(devices))))
    num_dims = draw(st.integers(1, 3))
    owners = draw(st.lists(st.integers(-1, num_dims - 1), min_size=len(axes), max_size=len(axes)))
    maps = [tuple(axis for axis, owner in zip(axes, owners, strict=True) if owner == dim) for dim in range(num_dims)]
    if all(len(entry) <= 1 for entry in maps):
        tensor_map: tuple[Any, ...] = tuple(entry[0] if entry else -1 for entry in maps)
    else:
        tensor_map = tuple(entry or (-1,) for entry in maps)
    plain = Layout(tuple(devices), tensor_map)
    holders = plain.holders()[0]
    shards = draw(st.sampled_from([0, *(k for k in range(2, len(holders) + 1) if len(holders) % k == 0)]))
    step = (holders[-1] - holders[0]) // (len(holders) - 1) if shards else 0
    return Layout(tuple(devices), tensor_map, opt_weight_shard_step=step, opt_weight_shard_size=shards)
