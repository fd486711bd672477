"""Strategy files: both spellings byte for byte, merged pipelines, and what no file can say."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.mindspore_kit import SAMPLES, STRATEGY_FILES, golden, ids, layouts
from holdfast.adapters.mindspore import (
    Layout,
    OperatorStrategy,
    Strategy,
    get_parameter_redundancy,
    merge_pipeline_strategys,
    read_strategy,
    write_strategy,
)
from holdfast.adapters.mindspore.strategy import (
    decode_json_strategy,
    decode_strategy,
    encode_json_strategy,
    encode_strategy,
)
from holdfast.base.errors import CorruptError, UsageError
from sample_kit import MORE

STAGES = SAMPLES / "stages"


@pytest.mark.parametrize("path", STRATEGY_FILES, ids=ids(STRATEGY_FILES))
def test_a_real_file_is_written_back_byte_for_byte(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "new" / path.name
    write_strategy(copy, read_strategy(path))
    assert copy.read_bytes() == path.read_bytes()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600


@pytest.mark.parametrize("case", ["seed", "seed2", "full", "optfull", "dp4mp2"])
def test_layouts_are_what_mindspore_reads(case: str) -> None:
    read = read_strategy(SAMPLES / case / "rank_0" / "strategy.ckpt")
    seen = {
        name: [list(x.dev_matrix), list(x.tensor_map), x.opt_weight_shard_step, x.opt_weight_shard_size]
        for name, x in read.layouts.items()
    }
    assert seen == golden("golden.json")[case]["0"]["layout[dev_matrix,tensor_map,opt_shard_step,opt_shard_size]"]


def test_both_spellings_say_the_same() -> None:
    proto = read_strategy(SAMPLES / "seed" / "rank_0" / "strategy.ckpt")
    text = read_strategy(SAMPLES / "seed_json" / "rank_0" / "strategy.json")
    assert {o.name: o for o in proto.operators} == {o.name: o for o in text.operators}
    assert {n: (x.dev_matrix, x.axes) for n, x in proto.layouts.items()} == {
        n: (x.dev_matrix, x.axes) for n, x in text.layouts.items()
    }
    assert text.layouts["n.w1"].tensor_shape == (64, 32)


@pytest.mark.parametrize("suffix", ["ckpt", "json"])
def test_stages_merge_as_mindspore_merges_them(suffix: str, tmp_path: Path) -> None:
    theirs = SAMPLES / f"merged.{suffix}"
    # MindSpore takes the files as the directory lists them; the order of its result says which that was.
    stages = dict.fromkeys(name.partition("-")[0] for name in read_strategy(theirs).layouts)
    out = tmp_path / "made" / f"merged.{suffix}"
    merge_pipeline_strategys([STAGES / f"{stage}.{suffix}" for stage in stages], out)
    if suffix == "ckpt":
        assert out.read_bytes() == theirs.read_bytes()
    else:
        assert json.loads(out.read_text()) == json.loads(theirs.read_text())


def test_a_directory_of_stages_merges_in_order_and_each_stage_once(tmp_path: Path) -> None:
    for rank, stage in enumerate([0, 0, 1, 1, 2, 2]):
        (tmp_path / f"strategy_{rank}.ckpt").write_bytes((STAGES / f"{stage}.ckpt").read_bytes())
    merged = merge_pipeline_strategys(str(tmp_path), tmp_path / "merged.ckpt")
    assert merged.current_stage == 1
    assert list(dict.fromkeys(name[:2] for name in merged.layouts)) == ["0-", "1-", "2-"]
    assert [operator.stage for operator in merged.operators] == [0, 0, 1, 1, 2, 2]
    assert read_strategy(tmp_path / "merged.ckpt") == merged


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.ckpt"
    write_strategy(tmp_path / "none.ckpt", Strategy(1, (), {}))
    with pytest.raises(NotADirectoryError):
        merge_pipeline_strategys(str(tmp_path / "missing"), out)
    for paths in ([], [tmp_path / "none.ckpt"], [STAGES / "0.ckpt", STAGES / "0.json"], [tmp_path / "missing.ckpt"]):
        with pytest.raises(ValueError):
            merge_pipeline_strategys(paths, out)
    assert not out.exists()


NAMES = st.text('aZ.-_0é漢😀\n"', min_size=1, max_size=8)
SPLITS = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=3).map(tuple)
OPERATORS = st.lists(
    st.builds(OperatorStrategy, NAMES, st.integers(0, 3), SPLITS), max_size=4, unique_by=lambda o: o.name
)
STRATEGIES = st.builds(
    Strategy, st.integers(0, 2**32 - 1), OPERATORS.map(tuple), st.dictionaries(NAMES, layouts(), max_size=4)
)


@given(STRATEGIES)
def test_what_is_written_is_read(strategy: Strategy) -> None:
    assert decode_strategy(encode_strategy(strategy), "here") == strategy
    assert decode_json_strategy(encode_json_strategy(strategy), "here") == strategy


def test_a_single_dimension_of_several_axes_is_told_from_several_dimensions() -> None:
    one = Strategy(1, (), {"w": Layout((2, 4), ((1, 0),))})
    two = Strategy(1, (), {"w": Layout((2, 4), (1, 0))})
    assert encode_strategy(one) != encode_strategy(two)
    assert decode_strategy(encode_strategy(one), "here") == one
    assert decode_strategy(encode_strategy(two), "here") == two


def test_other_words_of_a_json_file_are_kept() -> None:
    text = b'{"current_stage":2,"parallel_layout_value_item":{"op":{"0":{"tensor_map":[[0],[-1]]}}}}'
    read = decode_json_strategy(text, "here")
    assert encode_json_strategy(read) == text
    with pytest.raises(UsageError, match="only JSON"):
        encode_strategy(read)


def test_an_operator_of_two_stages_needs_protocol_buffers() -> None:
    twice = Strategy(1, (OperatorStrategy("op", 0, ()), OperatorStrategy("op", 1, ())), {})
    assert decode_strategy(encode_strategy(twice), "here") == twice
    with pytest.raises(UsageError, match="twice"):
        encode_json_strategy(twice)


@pytest.mark.parametrize(
    "bad",
    [
        {"dev_matrix": (0, 2), "tensor_map": (-1,)},
        {"dev_matrix": (2,), "tensor_map": (1,)},
        {"dev_matrix": (2,), "tensor_map": (-2,)},
        {"dev_matrix": (2, 2), "tensor_map": (0, 0)},
        {"dev_matrix": (2, 2), "tensor_map": ((1, 0), (1,))},
        {"dev_matrix": (1 << 20,), "tensor_map": (-1,)},
        {"dev_matrix": (2,), "tensor_map": (-1,), "opt_weight_shard_size": -2},
    ],
)
def test_what_is_no_layout_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Layout(**bad)  # type: ignore[arg-type]


@MORE
def test_a_job_of_many_parameters_fits_into_a_file(tmp_path: Path) -> None:
    layouts = [Layout((8, 2), (axis, -1), 2, 4) for axis in (0, -1)]
    names = [f"backbone.blocks.layers.{i}.attention.projection.weight" for i in range(60_000)]
    big = Strategy(1, (), {name: layouts[i % 2] for i, name in enumerate(names)})
    write_strategy(tmp_path / "big.ckpt", big)
    started = time.process_time()
    assert read_strategy(tmp_path / "big.ckpt") == big
    assert len(get_parameter_redundancy(big)) == len(names)
    assert time.process_time() - started < 5.0


def test_a_file_with_no_layout_in_it_names_the_parameter() -> None:
    text = b'{"parallel_layout_item":{"n.w":{"dev_matrix":[2],"field":0,"tensor_map":[5]}}}'
    with pytest.raises(CorruptError, match=r"here, n\.w"):
        decode_json_strategy(text, "here")


def test_missing_and_empty_files_are_refused_as_mindspore_does(tmp_path: Path) -> None:
    (tmp_path / "empty.ckpt").touch()
    for name in ("missing.ckpt", "empty.ckpt", "."):
        with pytest.raises(ValueError):
            read_strategy(tmp_path / name)
