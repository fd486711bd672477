"""A training with Megatron Core as its users write it, with three lines of holdfast; run by test_megatron.py. No test.

Megatron Core puts its buffers on "cuda" and asks tensors whether they are of CUDA. `OnCpu` answers both for a CPU;
nothing else of Megatron is touched.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """What asks for a CUDA device gets the CPU, and tensors of the CPU say that they are of CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        answer = func(*args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else answer


torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment,return-value]  # 0.19 asks for it, to wait for events

from kill_once import strike  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch.distributed.nn.functional import all_gather  # noqa: E402

import holdfast.adapters.megatron as hf  # noqa: E402
from holdfast.testing.contracts import adapter_output  # noqa: E402

vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 names it only with Transformer Engine
TRACKER = "latest_checkpointed_iteration.txt"


class WholeSequence(DotProductAttention):
    """Megatron's own attention, for a part of the sequence: Megatron leaves it to Transformer Engine to bring keys and values together."""

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(dataclasses.replace(config, context_parallel_size=1), **options)

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        if parallel_state.get_context_parallel_world_size() > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (torch.cat(all_gather(each.contiguous(), group)) for each in (key, value))
        return super().forward(query, key, value, attention_mask, **options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--native", action="store_true", help="without holdfast, from Megatron's own files")
    parser.add_argument("--kill", type=int, default=-1, help="rank 1 kills itself with SIGKILL in this step, once")
    parser.add_argument("--moment", choices=("gradients", "save", "saved"), default="gradients", help="of --kill")
    parser.add_argument("--term", choices=("one", "all", "job"), default="", help="SIGTERM instead, to whom")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tp, pipeline_model_parallel_size=options.pp,
        expert_model_parallel_size=options.ep, context_parallel_size=options.cp,
    )  # fmt: skip
    # There is no dropout here, so nothing draws from the generators of CUDA.
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: nullcontext()  # type: ignore[method-assign]
    torch.manual_seed(1)  # every rank draws whole weights and keeps its part
    config = TransformerConfig(
        num_layers=2, hidden_size=options.width, num_attention_heads=4, use_cpu_initialization=True,
        tensor_model_parallel_size=options.tp, hidden_dropout=0.0, attention_dropout=0.0, pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False, pipeline_model_parallel_size=options.pp,
        expert_model_parallel_size=options.ep, num_moe_experts=2 if options.ep > 1 else None,
        moe_token_dispatcher_type="allgather", add_bias_linear=options.ep == 1, context_parallel_size=options.cp,
    )  # fmt: skip
    layers = get_gpt_layer_local_spec(num_experts=2 if options.ep > 1 else None)
    layers.submodules.self_attention.submodules.core_attention = WholeSequence
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    gpt = GPTModel(config, layers, vocab_size=64, max_sequence_length=16, **ends)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp_config, gpt)
    settings = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [model])

    def state(*, loading: bool = False) -> dict[str, object]:
        weights = gpt.sharded_state_dict()
        kind = {"distrib_optim_sharding_type": "dp_reshardable"}
        return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, loading, metadata=kind)}

    save_strategy = load_strategy = None
    if not options.native:
        save_strategy, load_strategy = hf.strategies(options.root)
    start, rank, queue = 0, dist.get_rank(), AsyncCallsQueue()
    tracker = options.root / TRACKER
    if tracker.exists():
        start = int(tracker.read_text())
        place = str(options.root / f"iter_{start:07d}")
        prepare(optimizer)
        loaded = dist_checkpointing.load(state(loading=True), place, sharded_strategy=load_strategy)
        with torch.no_grad():  # the master copy of fp32 weights is a view of them
            gpt.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        count_on(optimizer, start)
        print(
            f"from {rank} {json.dumps(getattr(load_strategy, 'loaded_from', ''))}\n", end="", flush=True
        )  # one write: ranks share the pipe

    def dies(moment: str) -> None:
        if (step, moment) == (options.kill, options.moment):
            strike(options.root / "killed", options.term)

    adapter_output.start(rank, start)
    for step in range(start, options.steps):
        source = torch.Generator().manual_seed(100 * step + parallel_state.get_data_parallel_rank())
        tokens = torch.randint(0, 64, (2, 16), generator=source)
        positions = torch.arange(16).expand(2, 16)
        mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        first, length = parallel_state.get_context_parallel_rank() * 16 // options.cp, 16 // options.cp
        mine = slice(first, first + length)  # of the sequence
        batch = (tokens[:, mine], positions[:, mine], mask[:, :, mine])
        loss = step_of_pipeline(model, batch) if options.pp > 1 else model(*batch, labels=batch[0]).mean()
        if options.pp == 1:
            loss.backward()
        dies("gradients")
        model.finish_grad_sync()
        optimizer.step()
        place = options.root / f"iter_{step + 1:07d}"
        if rank == 0:
            place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dies("save")
        request = dist_checkpointing.save(
            state(), str(place), sharded_strategy=save_strategy, async_sharded_save=options.async_save
        )
        if request is not None:  # the tracker names it when it stands, as Megatron-LM has it
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
        dies("saved")
        if rank == 0:
            temporary = tracker.with_suffix(".new")
            temporary.write_text(str(step + 1))
            os.replace(temporary, tracker)
        dist.barrier()
        adapter_output.step(rank, step, [loss.detach(), *tensors(gpt, optimizer)])
    print(
        f"state {rank} {adapter_output.digest(tensors(gpt, optimizer))}\n", end="", flush=True
    )  # one write: ranks share the pipe
    queue.close()
    if hasattr(save_strategy, "close"):
        save_strategy.close()
    dist.destroy_process_group()


def step_of_pipeline(model: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Forward and backward of two micro-batches by Megatron's own schedule; the loss, on the last stage."""

    def forward(_: object, part: Any) -> tuple[torch.Tensor, Any]:
        return part(*batch, labels=batch[0]), lambda output: (output.mean(), {"loss": output.mean().detach()})

    losses = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=None, model=[model], num_microbatches=2, seq_length=16,
        micro_batch_size=2, forward_only=False,
    )  # fmt: skip
    return torch.stack([each["loss"] for each in losses]).mean() if losses else torch.zeros(())


def prepare(optimizer: object) -> None:
    """Megatron Core 0.16 expects that the state of torch's Adam exists when it loads; that of Apex need not."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                one.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}


def count_on(optimizer: object, steps: int) -> None:
    """Megatron Core 0.16 does not bring back the step that torch's Adam counts per parameter; Apex's counts per group."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for kept in one.optimizer.state.values():
            kept["step"] = torch.tensor(float(steps))


def tensors(gpt: torch.nn.Module, optimizer: object) -> list[torch.Tensor]:
    """Everything of this rank that training changes."""
    found = [parameter.detach() for parameter in gpt.parameters()]
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                found.append(parameter.detach())
                kept = one.optimizer.state[parameter]
                found += [kept[key] for key in sorted(kept) if isinstance(kept[key], torch.Tensor)]
    return found


if __name__ == "__main__":
    with OnCpu():
        main()
