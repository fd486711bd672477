"""The checks for a card, tried on the simulated device with small sizes: that they run, and that their goals can be met.

By default those that need no process of their own. All of them, one after the other as a card would run them, are slow;
their Python has what a machine with a card is said to have, and nothing else.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
import tempfile
import venv
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import forked
from sample_kit import MORE, sampled

ROOT = Path(__file__).resolve().parents[2]
# What torch needs, what `python -m benchmarks.gpu --help` names, and what that needs.
TORCH = "torch torchgen functorch sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions.py setuptools _distutils_hack"
NAMED = (
    "numpy* msgspec xxhash cryptography cffi _cffi_backend* pycparser psutil typer rich pytest _pytest py.py hypothesis"
)
THEIRS = (
    "click shellingham annotated_doc pygments markdown_it mdurl pluggy iniconfig packaging sortedcontainers attr attrs"
    " _hypothesis_*"
)
# Without processes of their own but for the last, and quick.
HERE = (2, 3, 4, 5, 6, 8, 9, 10, 14, 16, 19)
GRAPHS = 16
TOLD_APART = "torn_versions_without_the_wait"

pytestmark = pytest.mark.device
NO_GRAPHS = not hasattr(torch.accelerator, "Graph")
WHY = "this PyTorch has no torch.accelerator.Graph"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu.__main__")


@pytest.mark.parametrize("number", sampled(HERE, 3, 4, 8, 9, 10, 14, 16))
def test_a_check_meets_its_goals(number: int, script: Any, sim: ModuleType) -> None:
    if number == GRAPHS and NO_GRAPHS:
        pytest.skip(WHY)
    from benchmarks import measure
    from benchmarks.gpu.card import Card

    _, module, function, _ = script.CHECKS[number - 1]
    with tempfile.TemporaryDirectory(prefix="hf-gpu-", ignore_cleanup_errors=True) as directory:
        card = Card("sim", small=True, directory=Path(directory))
        figures = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(card)
    assert figures
    for figure in figures:
        assert not figure.goal or measure.met(figure.value, figure.goal), figure
        assert figure.metric != TOLD_APART or figure.value > 0, "or nothing was tried"


def test_every_file_with_tests_for_a_card_is_run_on_it(script: Any) -> None:
    files = importlib.import_module("benchmarks.gpu.around").TESTS
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "@pytest.mark.gpu\n" in path.read_text()]
    assert {str(path.relative_to(ROOT)) for path in marked} == set(files)


@pytest.mark.skipif(NO_GRAPHS, reason=WHY)
def test_what_is_called_by_other_names_on_cuda_does_the_same(
    script: Any, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that lasts, and a graph: the lines that only a card reaches, with torch's names for CUDA answered here."""
    from benchmarks.gpu.card import Card

    made = []

    class Graph(torch.accelerator.Graph):
        pass

    @contextmanager
    def recording(graph: Graph) -> Any:
        made.append(graph)
        graph.capture_begin()
        yield
        graph.capture_end()

    assert all(hasattr(torch.cuda, name) for name in ("_sleep", "CUDAGraph", "graph", "set_sync_debug_mode"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: sim.sleep(cycles / 1e9))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    card = Card("sim", small=True, directory=tmp_path)
    card._simulated, card.kind = None, "cuda"
    assert not card.is_simulated
    assert card.seconds(lambda: card.sleep(0.05)) >= 0.04
    ones = torch.ones(4, device=card.device)
    graph = card.captured(lambda: ones.add_(1))
    graph.replay()
    graph.replay()
    assert made == [graph]
    assert ones.tolist() == [3.0] * 4


def test_a_check_that_does_not_end_is_ended_and_told(script: Any, tmp_path: Path) -> None:
    options = Namespace(device="sim", small=True)
    line = script.supervised(15, options, 2.0)
    assert (line["state"], line["why"]) == ("late", "not done after 2 s")


def run(interpreter: str, out: Path, *words: object) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of the script, and its lines."""
    command = [interpreter, "-m", "benchmarks.gpu", "--device", "sim", "--small", "--out", str(out), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    done = forked.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]


def test_each_check_writes_a_line_and_what_has_no_time_left_is_told(tmp_path: Path) -> None:
    code, lines = run(sys.executable, tmp_path, "--seconds", 60, "--only", 3)
    assert [(line["check"], line["state"]) for line in lines] == [(3, "met")]
    assert {"figures", "card", "machine", "seconds"} <= set(lines[0])
    assert code == 0
    assert run(sys.executable, tmp_path, "--seconds", 1, "--only", 3)[1][1]["state"] == "not begun"


@MORE
def test_a_device_that_is_not_there_is_told_in_a_line(script: Any, sim: ModuleType, tmp_path: Path) -> None:
    from benchmarks.gpu.card import Card, NoDevice

    for kind in ("cuda", "bogus"):
        with pytest.raises(NoDevice, match=f"no device '{kind}' here: its accelerator is 'sim'; --device"):
            Card(kind, small=True, directory=tmp_path)
    line = script.supervised(3, Namespace(device="bogus", small=True), 60.0)
    assert line["state"] == "failed"
    assert line["why"].endswith("it has no accelerator; --device names another")


@pytest.mark.parametrize("number", ["0", "-1", "25", "x"])
def test_a_check_that_does_not_exist_is_refused(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", number])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "argument --only" in capsys.readouterr().err


def bare(directory: Path) -> str:
    """A Python that has what a machine with a card is said to have, and nothing else."""
    venv.create(directory, symlinks=True)
    names = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages = Path(sysconfig.get_paths()["purelib"])
    for name in f"{TORCH} {NAMED} {THEIRS}".split():
        found = list(packages.glob(name))
        assert found or name.endswith("*"), name
        for path in found:
            (directory / names / path.name).symlink_to(path)
    return str(directory / "bin" / "python")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_checks_meet_their_goals_where_nothing_else_is_installed(script: Any, tmp_path: Path) -> None:
    numbers = [number for number in range(1, len(script.CHECKS) + 1) if number != GRAPHS or not NO_GRAPHS]
    code, lines = run(bare(tmp_path / "bare"), tmp_path, "--seconds", 1400, "--only", *numbers)
    assert [line["check"] for line in lines] == numbers
    states = {line["check"]: (line["state"], str(line.get("why", ""))[-800:], line.get("figures")) for line in lines}
    assert {state for state, *_ in states.values()} == {"met"}, states
    assert code == 0
    figures = {figure["metric"]: figure["value"] for line in lines for figure in line["figures"]}
    assert figures[TOLD_APART] > 0, "or nothing was tried"
