"""One interface for all accelerators: what needs no accelerator to be proven. Stand-ins answer for torch's modules."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.device.accelerator import Device
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.pipeline.timers import DeviceClock, HostClock, clock_of
from holdfast.elastic.worker import group_teardown

SOURCE = Path(accelerator.__file__).resolve().parents[2]


def test_cuda_is_named_in_one_file() -> None:
    """In the one that keeps torchrun's own questions from beginning a driver in the launcher."""
    wrong = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "device_questions.py" and "cuda" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda")
    ]
    assert not wrong, "\n".join(wrong)


class Module:
    """A stand-in for torch.npu and its like: two devices, each with a generator."""

    def __init__(self) -> None:
        self.words = {0: torch.tensor([1, 2], dtype=torch.uint8), 1: torch.tensor([3, 4], dtype=torch.uint8)}
        self.device = 0

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.device

    def device_count(self) -> int:
        return 2

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.words[device.index]

    def set_rng_state(self, words: torch.Tensor, device: torch.device) -> None:
        self.words[device.index] = words


@pytest.fixture(params=["cuda", "xpu"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Module:
    """The process uses such devices, as far as it is asked by torch's generic names."""
    made, interface = Module(), Device(request.param)
    monkeypatch.setattr(Device, "_module", lambda _: made)
    monkeypatch.setattr(accelerator, "_accelerator", str)  # a torch that is built for CUDA names it without a card too
    monkeypatch.setattr(accelerator, "in_use", lambda: interface)
    monkeypatch.setattr(accelerator, "device_of", lambda _: interface)
    return made


def test_rank_on_another_device_keeps_its_random_sequence(module: Module) -> None:
    module.device = 1
    random.seed(5)
    saved = ProcessRandomness().state_dict()
    drawn = random.random()
    module.words = {0: torch.zeros(2, dtype=torch.uint8), 1: torch.zeros(2, dtype=torch.uint8)}
    module.device = 0  # three ranks were there, and two are now
    ProcessRandomness().load_state_dict(saved)
    assert (module.words[0].tolist(), module.words[1].tolist(), random.random()) == ([3, 4], [0, 0], drawn)


def test_devices_that_are_used_later_go_on_by_their_number(
    module: Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used = [torch.device("cpu", 0), torch.device("cpu", 1)]
    monkeypatch.setattr(Device, "used", lambda _: used)
    saved, blank = ProcessRandomness().state_dict(), torch.zeros(2, dtype=torch.uint8)
    module.words = {0: blank, 1: blank}
    del used[1]
    ProcessRandomness().load_state_dict(saved)
    assert [module.words[index].tolist() for index in range(2)] == [[1, 2], [3, 4]]
    module.words, module.device = {0: blank, 1: blank}, 1  # another one: it may have moved, and so may the rest
    ProcessRandomness().load_state_dict(saved)
    assert [module.words[index].tolist() for index in range(2)] == [[0, 0], [1, 2]]
    assert "only its current one goes on" in caplog.text


def test_an_accelerator_that_was_used_is_begun_by_a_restore(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, begun = ProcessRandomness().state_dict(), list[str]()
    module.words[0] = torch.zeros(2, dtype=torch.uint8)
    interface = accelerator.in_use()
    monkeypatch.setattr(accelerator, "in_use", lambda: None)
    ProcessRandomness().load_state_dict(saved)
    assert module.words[0].tolist() == [0, 0], "there is no such accelerator"
    assert interface is not None
    monkeypatch.setattr(accelerator, "_accelerator", lambda: interface.kind)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    module.init = lambda: begun.append("begun")  # type: ignore[attr-defined]
    ProcessRandomness().load_state_dict(saved)
    assert (module.words[0].tolist(), begun) == ([1, 2], ["begun"])


def test_what_older_versions_saved_is_read(module: Module) -> None:
    state = ProcessRandomness().state_dict()
    del state["device"]
    state["cuda"] = {str(index): torch.tensor([7, index], dtype=torch.uint8) for index in range(3)}
    before = {index: words.tolist() for index, words in module.words.items()}
    ProcessRandomness().load_state_dict(state)
    expected = {0: [7, 0], 1: [7, 1]} if accelerator.in_use().kind == "cuda" else before  # type: ignore[union-attr]
    assert {index: words.tolist() for index, words in module.words.items()} == expected


def test_another_kind_of_device_is_left_alone(module: Module) -> None:
    state = ProcessRandomness().state_dict()
    state["device"]["kind"] = "another"
    module.words[0] = torch.zeros(2, dtype=torch.uint8)
    ProcessRandomness().load_state_dict(state)
    assert module.words[0].tolist() == [0, 0]


def test_without_a_device_nothing_of_it_is_saved() -> None:
    assert accelerator.in_use() is None
    assert "device" not in ProcessRandomness().state_dict()
    assert accelerator.healthy(0.0), "there is nothing that could be out of order"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda:1"),
        ("npu:hccl", "npu:1"),
        ("xpu:xccl", "xpu:1"),
    ],
)
def test_collectives_run_where_the_group_can(config: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    kinds: list[str] = []

    def interface(kind: str) -> Any:
        kinds.append(kind)
        return SimpleNamespace(current=lambda: f"{kind}:1")

    monkeypatch.setattr(collectives, "device_of", interface)
    assert str(collectives._device()) == expected
    assert kinds == ([] if expected == "cpu" else [config.partition(":")[0]])


def test_presets_are_those_of_the_devices_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = {"TORCH_NCCL": "0", "MORE": "0"}
    presets = {str(tmp_path / "davinci[0-9]*"): {"HCCL": "0"}, str(tmp_path / "nvidiactl"): nccl}
    monkeypatch.setattr(accelerator, "_PRESETS", presets)
    assert accelerator.presets({}) == {}
    (tmp_path / "davinci3").touch()
    assert accelerator.presets({}) == {"HCCL": "0"}
    (tmp_path / "nvidiactl").touch()
    for name in ("TORCH_NCCL", "NCCL"):  # torch reads both, and ours would win
        assert accelerator.presets({name: "1"}) == {"HCCL": "0", "MORE": "0"}, "what the user set stays"


def test_every_vendor_is_found_by_a_file_of_its_driver() -> None:
    paths = set(accelerator._PRESETS)
    assert {"/dev/nvidiactl", "/dev/dxg", "/dev/kfd"} < paths
    assert any("davinci" in path for path in paths)


def test_a_stage_on_any_accelerator_reads_the_devices_clock() -> None:
    for kind in ("cuda", "xpu", "privateuseone"):
        assert isinstance(clock_of(torch.device(kind, 0)), DeviceClock)
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    assert isinstance(clock_of(None), HostClock)


@pytest.mark.parametrize("answer", [False, None, 712, RuntimeError("no")])
def test_memory_that_a_driver_does_not_register_is_no_error(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def register(*_: object) -> Any:
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr(Device, "_module", lambda _: SimpleNamespace(register_host_memory=register))
    assert Device("xpu").register(torch.device("xpu", 0), 4096, 10) is False
    monkeypatch.setattr(Device, "_module", lambda _: SimpleNamespace())
    assert Device("xpu").register(torch.device("xpu", 0), 4096, 10) is False


def test_what_a_vendors_module_calls_register_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may register something else."""
    called = []
    vendors = SimpleNamespace(register=lambda *given: called.append(given), unregister=called.append)
    monkeypatch.setattr(Device, "_module", lambda _: vendors)
    assert Device("xpu").register(torch.device("xpu", 0), 4096, 10) is False
    Device("xpu").unregister(torch.device("xpu", 0), 4096)
    assert not called


def test_memory_is_registered_with_the_driver_and_not_with_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime would keep the error of a registration that failed for the next launch of the user's."""
    asked: list[tuple[str, str]] = []
    codes = {"cuMemHostRegister_v2": 712, "cuMemHostUnregister": 713}

    class Library:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, name: str) -> Any:
            def call(*_: object) -> int:
                asked.append((self.name, name))
                return codes.get(name, 0)

            return call

    monkeypatch.setattr(accelerator.ctypes, "CDLL", Library)
    monkeypatch.setattr(accelerator, "_accelerator", str)  # a torch that is built for CUDA names it without a card too
    monkeypatch.setattr(Device, "current_stream", lambda *_: SimpleNamespace(query=lambda: True))
    device, interface = torch.device("cuda", 0), accelerator.device_of("cuda")
    assert interface.register(device, 4096, 10) is False
    interface.unregister(device, 4096)
    codes.clear()
    assert interface.register(device, 4096, 10) is True
    assert {library for library, _ in asked} == {"libcuda.so.1"}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    asked.clear()
    codes["hipHostRegister"] = 1
    assert interface.register(device, 4096, 10) is False
    assert asked == [("libamdhip64.so", "hipHostRegister"), ("libamdhip64.so", "hipGetLastError")]


class Backend:
    """NCCL's, as far as calls are taken together."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def _group_start(self) -> None:
        self._said.append("start")

    def _group_end(self) -> None:
        self._said.append("end")


class Group:
    """A device group whose library takes several calls as one."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._device_types = [torch.device("cuda")]
        self._name, self._said = name, said

    def _get_backend(self, _: torch.device) -> Backend:
        return Backend(self._said)

    def abort(self) -> None:
        self._said.append(self._name)


def test_groups_are_aborted_once_and_inside_one_call_of_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    groups = {Group("first", said): None, Group("second", said): None}
    monkeypatch.setattr(group_teardown.c10d, "_world", SimpleNamespace(pg_map=groups))
    aborts = group_teardown.Aborts()
    for _ in range(3):
        aborts.begin()
    assert aborts.ended(20)
    assert said == ["start", "second", "first", "end"]
    groups[Group("third", said)] = None  # it was being made when the order came
    aborts.begin()
    assert aborts.ended(20)
    assert said[4:] == ["start", "third", "end"]
