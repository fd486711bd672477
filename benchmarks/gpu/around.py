"""Checks of what stands around a training: the card itself, graphs, waits of a pipeline, compiled code, faults that stay."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch
from benchmarks.gpu.card import MIB, Card, Figure, host_seconds
from benchmarks.gpu.state import Training
from benchmarks.gpu.training import _environment

from holdfast.checkpoint.device import accelerator

ROOT = Path(__file__).resolve().parents[2]
# All files that have tests marked gpu.
TESTS = (
    "tests/checkpoint/test_training_state.py",
    "tests/checkpoint/test_copy_plan.py",
    "tests/checkpoint/test_paced_copy.py",
)


def card_itself(card: Card) -> list[Figure]:
    """What is here; and the tests that need a card."""
    before = card.free_bytes()
    torch.ones(1, device=card.device).add_(1)
    card.synchronize()
    passed, failed = _tests(card, *TESTS[:2])
    return [
        Figure("first_kernel_bytes", (before - card.free_bytes()) / MIB, "MiB"),
        Figure("gpu_tests_passed", passed, "tests", ">= 4"),
        Figure("gpu_tests_failed", failed, "tests", "<= 0"),
    ]


def _tests(card: Card, *files: str) -> tuple[float, float]:
    """How many tests of these files that need a card pass on it, and how many fail."""
    # The project's own settings name plugins that a machine with a card need not have.
    settings = ["-oaddopts=--import-mode=importlib", "-ofilterwarnings=default", "-pno:timeout", "-pno:xdist"]
    command = [sys.executable, "-m", "pytest", "-q", *settings, "-pno:cacheprovider", "-m", "gpu", "--card", card.kind]
    done = subprocess.run(
        [*command, *files],
        cwd=ROOT, capture_output=True, text=True, timeout=150, check=False, env=_environment(card.directory),
    )  # fmt: skip
    counted = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    if not counted or not (done.returncode == 0 or counted.get("failed") or counted.get("error")):
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-500:])
    return float(counted.get("passed", 0)), float(counted.get("failed", 0) + counted.get("error", 0))


def graphs(card: Card) -> list[Figure]:
    """A step that is captured beside a Checkpointer: the capture works, and what it replays is never copied late."""
    training = Training(card, card.directory, num_bytes=card.size(64 * MIB, MIB), num_tensors=8)
    training.prove()
    late = training.checkpointer.events.counters().get("late_copied_bytes", 0)
    graph = card.captured(training.step)
    wrong = 0
    for _ in range(5):
        expected = [tensor.clone() for tensor in training.state()]
        handle = training.save()
        graph.replay()
        try:
            handle.wait("captured")
        except Exception:  # noqa: BLE001 - given up is right as well
            continue
        training.checkpointer.restore(handle.version)
        wrong += not all(map(torch.equal, training.state(), expected))
    after = training.checkpointer.events.counters().get("late_copied_bytes", 0)
    training.end()
    return [
        Figure("torn_versions", float(wrong), "versions", "<= 0"),
        Figure("late_bytes_after_the_capture", float(after - late), "B", "<= 0"),
    ]


def pace(card: Card) -> list[Figure]:
    """Copies inside the waits of a pipeline: the test that needs a card for it."""
    passed, failed = _tests(card, *TESTS[2:])
    return [
        Figure("pace_tests_passed", passed, "tests", ">= 1"),
        Figure("pace_tests_failed", failed, "tests", "<= 0"),
    ]


COMPILE = """
import sys, time, torch
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256), torch.nn.GELU()] * 8).to(sys.argv[1])
began = time.perf_counter()
torch.compile(model)(torch.randn(8, 256, device=sys.argv[1])).sum().backward()
print(time.perf_counter() - began)
"""


def compiled(card: Card) -> list[Figure]:
    """Compiled code comes back from the archive. Nobody compiles kernels for the simulated device: there it is the host's."""
    from holdfast.elastic.launch.compile_cache import CompileCache  # noqa: PLC0415

    def seconds(place: str) -> float:
        environ = _environment(card.directory)
        cache = CompileCache(str(card.directory / "archive"), card.directory / place, environ)
        cache.fetch()
        command = [sys.executable, "-c", COMPILE, "cpu" if card.is_simulated else card.kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environ)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        cache.keep()
        return float(done.stdout.split()[-1])

    first, second, warm = seconds("a"), seconds("b"), seconds("b")
    return [
        Figure("second_over_first_compile", second / first, "ratio"),
        Figure("first_compile", first, "s"),
        # Against torch's own next compile, with nothing fetched.
        Figure("second_over_warm_compile", second / warm, "ratio", "<= 1.25" if not card.small else ""),
    ]


FAULT = """
import sys, torch
if sys.argv[1] == "sim":
    from holdfast.testing import device
    device.load()
from holdfast.checkpoint.device import accelerator
x = torch.zeros(4, device=sys.argv[1])
assert accelerator.healthy(20.0)
try:
    x[torch.tensor([1 << 40], device=x.device)]
    torch.accelerator.synchronize()
except RuntimeError:
    pass
sys.exit(0 if not accelerator.healthy(20.0) else 3)
"""


def fault(card: Card) -> list[Figure]:
    """A device whose fault stays is told from a healthy one, so that its process is replaced."""
    healthy = accelerator.healthy(20.0)
    command = [sys.executable, "-c", FAULT, card.kind]
    code: list[int] = []
    seconds = host_seconds(
        lambda: code.append(
            subprocess.run(command, timeout=90, check=False, env=_environment(card.directory)).returncode
        )
    )
    return [
        Figure("healthy_device_refused", float(not healthy), "devices", "<= 0"),
        Figure("faulted_device_believed", float(code[0] != 0), "devices", "<= 0"),
        Figure("probe_and_start", seconds, "s"),
    ]
