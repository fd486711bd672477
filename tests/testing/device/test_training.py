"""Numbers on the simulated device are those of the CPU, whatever the optimizer, precision or compiler."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from sample_kit import MORE

pytestmark = pytest.mark.device


def train(device: str, steps: int = 5, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randn(16, 64, generator=generator).to(device)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    "options",
    [{"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True}],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values()))),
)
def test_optimizer_comes_to_the_numbers_of_the_cpu(sim: ModuleType, options: dict[str, bool]) -> None:
    before = sim.counts()["waited"]
    assert torch.allclose(train("sim", **options), train("cpu"), atol=2e-6)
    assert sim.counts()["waited"] == before, "training waited for the device"


def test_normalization_in_half_the_precision_comes_to_the_numbers_of_the_cpu(sim: ModuleType) -> None:
    def gradients(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GroupNorm(4, 16), nn.LayerNorm(16, bias=False))
        model.to(device, torch.bfloat16)
        model(torch.randn(4, 16).to(device, torch.bfloat16)).square().mean().backward()
        return [parameter.grad.cpu() for parameter in model.parameters()]

    assert all(map(torch.equal, gradients("sim"), gradients("cpu")))


def test_convolution_and_its_gradients(sim: ModuleType) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))
    images = torch.randn(2, 3, 16, 16)
    plain(images).square().mean().backward()
    gradients = [parameter.grad for parameter in plain.parameters()]
    plain.zero_grad()
    ours = plain.to("sim")
    ours(images.to("sim")).square().mean().backward()
    for parameter, gradient in zip(ours.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad.cpu(), gradient, atol=1e-5)


def test_autocast_lowers_and_scaler_steps(sim: ModuleType) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=8.0)
    before = model.weight.detach().cpu().clone()
    with torch.autocast("sim", dtype=torch.bfloat16):
        output = model(torch.randn(4, 8, device="sim"))
        assert output.dtype == torch.bfloat16
        assert torch.softmax(output, -1).dtype == torch.float32
    scaler.scale(output.float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert not torch.equal(model.weight.detach().cpu(), before)


def test_random_numbers_follow_the_devices_own_seed(sim: ModuleType) -> None:
    torch.manual_seed(5)
    first = torch.randn(1000, device="sim")
    host = torch.randn(3)
    state = torch.get_device_module("sim").get_rng_state()
    second = torch.randn(1000, device="sim")
    torch.get_device_module("sim").set_rng_state(state)
    assert torch.equal(second, torch.randn(1000, device="sim"))
    torch.manual_seed(5)
    assert torch.equal(first, torch.randn(1000, device="sim"))
    assert torch.equal(host, torch.randn(3)), "the device drew from the host's generator"
    assert abs(first.mean().item()) < 0.2
    mask = torch.nn.functional.dropout(torch.ones(10_000, device="sim"), 0.25)
    assert abs(mask.mean().item() - 1) < 0.05
    assert sorted(mask.unique().tolist()) == [0, pytest.approx(4 / 3)]


def test_mistakes_in_a_call_reach_the_caller(sim: ModuleType) -> None:
    x = torch.zeros(4, device="sim")
    with pytest.raises(RuntimeError, match="size"):
        x.add_(torch.zeros(3, device="sim"))
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.zeros(4)
    assert (x + torch.tensor(2.0)).tolist() == [2] * 4
    assert torch.nonzero(torch.tensor([0, 1, 1], device="sim")).flatten().tolist() == [1, 2]


@MORE
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_trains(sim: ModuleType, backend: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    batch = torch.randn(4, 8)
    plain(batch).sum().backward()
    gradient = plain[0].weight.grad
    plain.zero_grad()
    compiled = torch.compile(plain.to("sim"), backend=backend)
    compiled(batch.to("sim")).sum().backward()
    assert torch.allclose(plain[0].weight.grad.cpu(), gradient, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_model_and_its_gradients(sim: ModuleType, kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = kind(4, 5, 2, batch_first=True)
    batch = torch.randn(2, 3, 4)
    plain = model(batch)[0]
    plain.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model.to("sim")
    ours = model(batch.to("sim"))[0]
    ours.sum().backward()
    assert torch.allclose(ours.cpu(), plain, atol=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad.cpu(), gradient, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_one_operator_and_has_its_gradients(sim: ModuleType, causal: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(2, 3, 7, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    ours = [each.detach().to("sim").requires_grad_() for each in whole]
    plain = nn.functional.scaled_dot_product_attention(*whole, is_causal=causal)
    told = nn.functional.scaled_dot_product_attention(*ours, is_causal=causal)
    assert "Efficient" in told.grad_fn.name()
    assert torch.equal(told.cpu(), plain)
    plain.square().sum().backward()
    told.square().sum().backward()
    assert all(torch.equal(each.grad.cpu(), other.grad) for each, other in zip(ours, whole, strict=True))


def test_attention_with_a_mask_or_dropout_is_made_of_operators(sim: ModuleType) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(3)]
    ours = [each.detach().to("sim").requires_grad_() for each in whole]
    mask = torch.rand(7, 7) > 0.3
    plain = nn.functional.scaled_dot_product_attention(*whole, attn_mask=mask)
    told = nn.functional.scaled_dot_product_attention(*ours, attn_mask=mask.to("sim"))
    assert torch.allclose(told.cpu(), plain, atol=1e-6)
    assert nn.functional.scaled_dot_product_attention(*ours, dropout_p=0.5).shape == plain.shape
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        assert "Efficient" not in nn.functional.scaled_dot_product_attention(*ours).grad_fn.name()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_kernels_that_resize_their_output_for_a_while(sim: ModuleType, reduction: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5), torch.randn(5)
    for loss in (nn.functional.mse_loss, nn.functional.smooth_l1_loss):
        ours = loss(x.to("sim"), y.to("sim"), reduction=reduction)
        assert torch.allclose(ours.cpu(), loss(x, y, reduction=reduction))
    told = torch.empty(0, device="sim")
    torch.add(x.to("sim"), 1, out=told)
    assert torch.equal(told.cpu(), x + 1)
    model = nn.BatchNorm1d(5).to("sim").eval()
    assert torch.allclose(model(x.to("sim")[None]).cpu(), nn.BatchNorm1d(5).eval()(x[None]), atol=1e-6)


def test_operators_whose_shapes_only_the_kernel_knows(sim: ModuleType) -> None:
    torch.manual_seed(0)
    bags = nn.EmbeddingBag(8, 3, mode="max")
    words, begins = torch.tensor([1, 2, 3, 1, 7]), torch.tensor([0, 2])
    plain = bags(words, begins)
    plain.sum().backward()
    gradient = bags.weight.grad
    bags.zero_grad()
    bags.to("sim")
    ours = bags(words.to("sim"), begins.to("sim"))
    ours.sum().backward()
    assert torch.equal(ours.cpu(), plain)
    assert torch.equal(bags.weight.grad.cpu(), gradient)
    solved = torch.linalg.lstsq(torch.eye(3, device="sim"), torch.ones(3, 1, device="sim"))
    assert torch.allclose(solved.solution.cpu(), torch.ones(3, 1))
    assert torch.masked_select(words.to("sim"), words.to("sim") > 2).tolist() == [3, 7]


def test_transformer_layer_trains_and_its_state_is_saved(sim: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    batch = torch.randn(2, 5, 16)
    plain = layer(batch)
    layer.to("sim")
    ours = layer(batch.to("sim"))
    ours.sum().backward()
    assert torch.allclose(ours.cpu(), plain, atol=1e-5)
    torch.save(layer.state_dict(), tmp_path / "state")
    assert next(iter(torch.load(tmp_path / "state").values())).device == torch.device("sim:0")
    moved = torch.load(tmp_path / "state", map_location="sim:2")
    host = torch.load(tmp_path / "state", map_location="cpu")
    for name, tensor in layer.state_dict().items():
        assert moved[name].device == torch.device("sim:2")
        assert torch.equal(host[name], tensor.cpu())
        assert torch.equal(moved[name].cpu(), tensor.cpu())


@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor:DeprecationWarning")  # torch 2.10 calls itself so
def test_workers_of_a_loader_are_forked_beside_the_device(sim: ModuleType) -> None:
    torch.ones(1, device="sim")
    data = torch.utils.data.TensorDataset(torch.arange(64.0).view(32, 2))
    loader = torch.utils.data.DataLoader(data, 8, num_workers=2, pin_memory=True, multiprocessing_context="fork")
    total = torch.zeros((), device="sim")
    for (batch,) in loader:
        assert batch.is_pinned()
        total += batch.to("sim", non_blocking=True).sum()
    assert total.item() == 63 * 32
