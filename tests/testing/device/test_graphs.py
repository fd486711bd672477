"""Graphs on the simulated device: captured work is not done, and is done again without Python."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="this PyTorch has no torch.accelerator.Graph"),
]


def test_captured_work_is_done_at_each_replay(sim: ModuleType) -> None:
    x = torch.zeros(4, device="sim")
    torch.accelerator.synchronize()  # the other stream does not wait for the zeros
    graph = torch.accelerator.Graph()
    with torch.Stream(device="sim"):
        graph.capture_begin()
        assert torch.get_device_module("sim").is_current_stream_capturing()
        x.add_(1)
        doubled = x * 2
        graph.capture_end()
        assert not torch.get_device_module("sim").is_current_stream_capturing()
        assert x.tolist() == [0] * 4
        for _ in range(3):
            graph.replay()
    torch.accelerator.synchronize()
    assert x.tolist() == [3] * 4
    assert doubled.tolist() == [6] * 4


def test_whole_step_replays_to_the_numbers_of_the_cpu(sim: ModuleType) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    torch.manual_seed(0)
    batch = torch.randn(4, 8)
    plain = nn.Linear(8, 8)
    captured = nn.Linear(8, 8)
    captured.load_state_dict(plain.state_dict())
    captured = captured.to("sim")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(7):
        step(plain, optimizer, batch)
    optimizer = torch.optim.AdamW(captured.parameters(), lr=1e-2, capturable=True)
    on_device = batch.to("sim")
    torch.accelerator.synchronize()
    with torch.Stream(device="sim"):
        for _ in range(3):
            step(captured, optimizer, on_device)
        graph = torch.accelerator.Graph()
        optimizer.zero_grad()
        graph.capture_begin()
        captured(on_device).square().mean().backward()
        optimizer.step()
        graph.capture_end()
        for _ in range(4):
            graph.replay()
    torch.accelerator.synchronize()
    assert torch.allclose(captured.weight.detach().cpu(), plain.weight.detach(), atol=2e-6)


def test_waiting_for_the_device_loses_the_capture(sim: ModuleType) -> None:
    x = torch.zeros(4, device="sim")
    outside = torch.Event("sim")
    outside.record()
    for wrong in (
        lambda: x.sum().item(),
        torch.accelerator.synchronize,
        lambda: torch.accelerator.current_stream().wait_event(outside),
        x.cpu,
    ):
        graph = torch.accelerator.Graph()
        with torch.Stream(device="sim"):
            graph.capture_begin()
            with pytest.raises(RuntimeError, match="not permitted while the stream is captured"):
                wrong()
            with pytest.raises(RuntimeError, match="the capture is lost"):
                graph.capture_end()
    assert x.add_(1).tolist() == [1] * 4


def test_random_numbers_differ_from_replay_to_replay(sim: ModuleType) -> None:
    x = torch.zeros(100, device="sim")
    torch.accelerator.synchronize()
    graph = torch.accelerator.Graph()
    with torch.Stream(device="sim"):
        graph.capture_begin()
        x.uniform_()
        graph.capture_end()
        graph.replay()
        first = x.cpu()
        graph.replay()
        assert not torch.equal(x.cpu(), first)


def test_memory_of_a_graph_is_its_own_until_it_goes(sim: ModuleType) -> None:
    graph = torch.accelerator.Graph()
    side = torch.Stream(device="sim")
    with side:
        x = torch.ones(1 << 20, device="sim")
        graph.capture_begin()
        address = (x * 2).data_ptr()  # freed at once, and written to by every replay
        graph.capture_end()
        assert torch.ones(1 << 20, device="sim").data_ptr() != address
        graph.reset()
        reused = [torch.ones(1 << 20, device="sim") for _ in range(2)]
        assert address in [tensor.data_ptr() for tensor in reused]
