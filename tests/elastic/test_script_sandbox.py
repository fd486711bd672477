"""What a script finds when it is run again in the same process: nothing that the run before chose for all that comes."""

from __future__ import annotations

import ast
import asyncio
import decimal
import gc
import importlib.util
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from holdfast.checkpoint.device import accelerator
from holdfast.elastic.worker import library_settings
from holdfast.elastic.worker import script_sandbox as stages
from holdfast.elastic.worker.agent_channel import RunOrder
from holdfast.elastic.worker.script_sandbox import ScriptSandbox
from sample_kit import MORE


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ScriptSandbox]:
    before, path, argv, seed = dict(os.environ), list(sys.path), list(sys.argv), torch.get_rng_state()
    threads, made = torch.get_num_threads(), ScriptSandbox()
    yield made
    made.torch_import.end()
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)
    sys.path[:], sys.argv[:] = path, argv
    torch.set_rng_state(seed)


def again(stage: ScriptSandbox) -> None:
    stage.enter(RunOrder(2, dict(os.environ), ("script.py",)))


def test_where_and_how_tensors_are_made_is_as_in_a_new_process(stage: ScriptSandbox) -> None:
    torch.set_default_device("meta")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_cache_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    again(stage)
    assert torch.empty(1).device.type == "cpu"
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert not torch.is_anomaly_enabled()


def test_each_rank_that_seeds_nothing_draws_its_own_numbers(stage: ScriptSandbox) -> None:
    """As new processes do; and each its own again when it runs again."""
    drawn = []
    for rank in ("0", "1", "7", "1"):
        stage.enter(RunOrder(2, {**os.environ, "RANK": rank}, ("script.py",)))
        drawn.append(torch.rand(1).item())
    assert len(set(drawn[:3])) == 3
    assert drawn[3] == drawn[1]


# How a switch is read and set, and what no other test sets it to.
SWITCHED: tuple[tuple[Any, Any, Any], ...] = (
    (lambda: torch.get_autocast_dtype("cpu"), lambda other: torch.set_autocast_dtype("cpu", other), torch.float16),
    (lambda: sys.float_info.min * 0.5 == 0, torch.set_flush_denormal, True),
    (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda other: setattr(torch.utils.deterministic, "fill_uninitialized_memory", other), False,
    ),
    (torch.sparse.check_sparse_tensor_invariants.is_enabled, lambda _: torch.sparse.check_sparse_tensor_invariants.enable(), True),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    (torch.is_warn_always_enabled, torch.set_warn_always, True),
    (torch.__future__.get_overwrite_module_params_on_conversion, torch.__future__.set_overwrite_module_params_on_conversion, True),
    (lambda: torch.distributions.Distribution._validate_args, torch.distributions.Distribution.set_default_validate_args, False),
    (sys.getswitchinterval, sys.setswitchinterval, 0.5),
    (gc.get_threshold, lambda other: gc.set_threshold(*other), (10, 3, 3)),
)  # fmt: skip


def test_switches_of_libraries_are_as_in_a_new_process(stage: ScriptSandbox) -> None:
    """Those that change numbers, and those that change how long it takes or what is allowed."""
    settings = library_settings.LibrarySettings()
    try:
        for _, write, other in SWITCHED:
            write(other)
        asyncio.run(asyncio.sleep(0))
        assert [read() for read, *_ in SWITCHED] == [other for *_, other in SWITCHED]
        again(stage)
        assert library_settings.LibrarySettings().switches == settings.switches
        assert torch.tensor(1e-42).mul(1.0).item() > 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later make the loop, and say so
            asyncio.get_event_loop_policy().get_event_loop().close()
    finally:
        settings.put_back()


@pytest.mark.parametrize("told", [":lib", "lib:", "lib::other/../lib", ".", "lib"])
def test_the_parts_of_pythonpath_are_where_python_finds_them(stage: ScriptSandbox, tmp_path: Path, told: str) -> None:
    """An empty part is the working directory, and a relative one does not follow the script into another directory."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/script.py").write_text("import sys; print(sys.path)")
    command, environment = ("scripts/script.py",), {**os.environ, "PYTHONPATH": told}
    plain = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    stage.directory = str(tmp_path)
    stage.enter(RunOrder(2, environment, command))
    number = 1 + len(dict.fromkeys(map(os.path.abspath, told.split(":"))))
    assert sys.path[:number] == ast.literal_eval(plain.stdout)[:number]


def test_kernels_are_chosen_as_in_a_new_process(stage: ScriptSandbox) -> None:
    backends = torch.backends
    backends.cudnn.benchmark = backends.cudnn.deterministic = True
    backends.cudnn.enabled = False
    backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    again(stage)
    assert (backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.enabled) == (False, False, True)
    assert backends.cuda.matmul.allow_bf16_reduced_precision_reduction is True


def test_numbers_are_rounded_checked_and_printed_as_in_a_new_process(
    stage: ScriptSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings() -> tuple[object, ...]:
        rounded = str(decimal.Decimal(1) / 3)
        return rounded, np.geterr(), str(np.float64(1) / np.arange(1, 4)), str(torch.ones(3) / 3), time.tzname

    monkeypatch.delenv("TZ", raising=False)
    time.tzset()
    before = settings()
    decimal.getcontext().prec = 5
    np.seterr(divide="raise")
    np.set_printoptions(precision=2)
    torch.set_printoptions(precision=2, sci_mode=True)
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()
    del os.environ["TZ"]
    assert all(one != other for one, other in zip(settings(), before, strict=True))
    again(stage)
    assert settings() == before


def begins(stage: ScriptSandbox, **variables: str) -> tuple[int, object, int]:
    """Return threads, debug level and level of a logger after a script that sets variables and then imports torch."""
    again(stage)
    os.environ.update(variables)
    found = importlib.import_module("torch")
    assert found is torch
    assert importlib.util.find_spec("torch") is torch.__spec__
    return torch.get_num_threads(), dist.get_debug_level(), logging.getLogger("torch._dynamo").level


def test_variables_that_a_script_sets_before_it_imports_torch_are_read(
    stage: ScriptSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"OMP_NUM_THREADS": "3", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_LOGS": "+dynamo"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    before = begins(stage)
    first = begins(stage, **names)
    for name in names:
        del os.environ[name]
    assert first == (3, dist.DebugLevel.DETAIL, logging.DEBUG)
    assert begins(stage) == before, "the next run has set none"


def test_a_variable_that_torch_refuses_fails_the_import_as_in_a_new_process(stage: ScriptSandbox) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        begins(stage, TORCH_LOGS="nonsense")
    del os.environ["TORCH_LOGS"]
    begins(stage)


def test_a_script_that_never_imports_torch_may_still_look_for_it(stage: ScriptSandbox) -> None:
    again(stage)
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin == torch.__file__
    assert "torch" not in sys.modules, "looking is no import"
    stage.torch_import.end()
    assert sys.modules["torch"] is torch


@pytest.mark.parametrize("warn_only", [False, True])
def test_algorithms_are_chosen_as_in_a_new_process(stage: ScriptSandbox, *, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    again(stage)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not sys.modules["torch._inductor.config"].deterministic


@MORE
def test_a_script_begins_without_the_import_of_torchs_compiler() -> None:
    """It takes seconds, which every new process of a job lost before its script's first line."""
    begins = (
        "import os, sys; from holdfast.elastic.worker.agent_channel import RunOrder; from holdfast.elastic.worker.script_sandbox import ScriptSandbox;"
        " ScriptSandbox().enter(RunOrder(1, dict(os.environ), ('script.py',)));"
        " sys.exit(str([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules]))"
    )
    ended = subprocess.run([sys.executable, "-c", begins], capture_output=True, text=True, timeout=100, check=False)
    assert ended.stderr.strip().endswith("[]"), ended.stderr


def test_precision_of_matrix_products_is_as_in_a_new_process(stage: ScriptSandbox) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        again(stage)
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_device_of_the_process_is_reset_too(stage: ScriptSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Device:
        kind = "cpu"

        def reset(self) -> None:
            said.append("reset")

    monkeypatch.setattr(accelerator, "in_use", Device)
    again(stage)
    assert said == ["reset"]


def test_a_script_that_sets_up_logging_is_heard_and_ours_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher has a handler of its own, and workers are its forks."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("holdfast"), "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    logging.basicConfig(format="ours %(message)s", level=logging.WARNING)
    stages.leave_logging_to_the_script()
    logging.getLogger("holdfast.elastic").warning("one")
    logging.basicConfig(format="theirs %(message)s", level=logging.INFO)
    logging.getLogger("script").info("two")
    logging.getLogger("holdfast.elastic").warning("three")
    assert capsys.readouterr().err.splitlines() == ["ours one", "theirs two", "theirs three"]


def test_the_package_that_is_run_is_made_anew_although_it_was_installed(stage: ScriptSandbox) -> None:
    """`pip install .` and `-m project.train`: what is under work is the user's own, and no library."""
    module = ModuleType("project.data")
    module.__file__ = "/opt/lib/python3.11/site-packages/project/data.py"
    stage.enter(RunOrder(1, dict(os.environ), ("project.train",), is_module=True))
    assert stage._is_users("project.data", module)
    stage.enter(RunOrder(2, dict(os.environ), ("script.py",)))
    assert not stage._is_users("project.data", module)
