"""The script of the TorchTitan door: its Trainer with a tiny Llama 3 and bytes of text. Not a test itself.

torchrun torchtitan_worker.py ROOT --steps N --way fsdp|tp|ddp [--wide] [--interval N] [--keep N] [--load-step N] [--plain]
    [--accumulate N] [--kill N] [--moment batch|save|saved] [--term one|all|job]

--interval, --keep, --load-step: TorchTitan's `interval`, `keep_latest_k`, `load_step`. --plain: its own manager, without holdfast.
--accumulate: batches of a step. --kill: rank 1 kills itself with SIGKILL in this step, once: before its last batch, or around the save.
--term: SIGTERM instead, to rank 1, to both or to their launcher.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

# TorchTitan asks for a device when it is imported and takes CUDA where there is none; here it trains on the CPU.
torch._utils._get_available_device_type = lambda: "cpu"

from kill_once import strike  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm, compute_ffn_hidden_dim  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import (  # noqa: E402
    _EMBEDDING_INIT,
    _NORM_INIT,
    Llama3Model,
    Llama3StateDictAdapter,
    _build_llama3_layers,
    _output_linear_init,
    parallelize_llama,
)
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from holdfast.adapters.torchtitan import keep  # noqa: E402
from holdfast.testing.contracts import adapter_output  # noqa: E402

warnings.filterwarnings("ignore")
LENGTH, VOCABULARY = 32, 256
# Step, moment and marker of what happens to ranks, and who gets SIGTERM.
KILL: dict[str, Any] = {}


class Text(torch.utils.data.IterableDataset):
    """Bytes of Python's own documentation; every data-parallel rank takes its rows, and tells where it is."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        self.rank, self.ranks, self.row = rank, ranks, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            at = (self.row * self.ranks + self.rank) * LENGTH
            self.row += 1
            row = torch.tensor(list(self.text[at : at + LENGTH + 1]))
            yield {"input": row[:-1]}, row[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.row = state["row"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        super().__init__(Text(dp_rank, dp_world_size), dp_rank, dp_world_size, batch_size=local_batch_size)


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return VOCABULARY


class NoDevice:
    """In place of the monitor of a device's memory."""

    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


class Told(Trainer):
    """The trainer, with every step told."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data: Any) -> None:
        rank, parameters = torch.distributed.get_rank(), [p for part in self.model_parts for p in part.parameters()]
        if not hasattr(self, "told"):
            self.told = True
            adapter_output.start(rank, self.step - 1)
            adapter_output.whole(rank, self.step - 1, [p.detach() for p in parameters])
        self.batches = 0
        super().train_step(data)

    def forward_backward_step(self, **batch: Any) -> Any:
        self.batches += 1
        if self.batches == self.gradient_accumulation_steps:
            self.dies("batch")
        return super().forward_backward_step(**batch)

    def dies(self, moment: str) -> None:
        """Whom the test wants to; others go on."""
        if (self.step - 1, moment) == (KILL["step"], KILL["moment"]):
            strike(KILL["marker"], KILL["term"])


class Saved:
    """Says of a step that it is finished when the checkpointer has heard of it."""

    def __init__(self, trainer: Told) -> None:
        self.trainer, self.inner = trainer, trainer.checkpointer.save

    def __call__(self, step: int, last_step: bool = False) -> bool:
        self.trainer.dies("save")
        done = self.inner(step, last_step=last_step)
        self.trainer.dies("saved")
        parameters = [p for part in self.trainer.model_parts for p in part.parameters()]
        states = [each.state[p] for each in self.trainer.optimizers.optimizers for p in parameters if p in each.state]
        moments = [state[key] for state in states for key in sorted(state)]
        rank = torch.distributed.get_rank()
        adapter_output.step(rank, step - 1, [*parameters, *moments])
        if last_step:
            adapter_output.whole(rank, step, [p.detach() for p in parameters])
        return done


def llama(width: int) -> ModelSpec:
    rope = ComplexRoPE.Config(dim=width // 4, max_seq_len=1024, theta=500000, scaling="llama")
    layers = _build_llama3_layers(
        n_layers=2, dim=width, n_heads=4, hidden_dim=compute_ffn_hidden_dim(width, multiple_of=32), rope=rope,
        attn_backend="flex",
    )  # fmt: skip
    for layer in layers:  # the one kind of attention that needs no compiler
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = Llama3Model.Config(
        dim=width, vocab_size=VOCABULARY, layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=width, param_init=_EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=width, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=width, out_features=VOCABULARY, param_init=_output_linear_init(width)),
    )  # fmt: skip
    return ModelSpec(
        name="llama3", flavor="tiny", model=model, parallelize_fn=parallelize_llama, pipelining_fn=None,
        post_optimizer_build_fn=None, state_dict_adapter=Llama3StateDictAdapter,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--way", choices=("fsdp", "tp", "ddp"))
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--interval", type=int, default=100)
    parser.add_argument("--keep", type=int, default=10)
    parser.add_argument("--load-step", type=int, default=-1)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--kill", type=int, default=-1)
    parser.add_argument("--moment", choices=("batch", "save", "saved"), default="batch")
    parser.add_argument("--term", choices=("one", "all", "job"), default="")
    options = parser.parse_args()
    KILL.update(step=options.kill, moment=options.moment, term=options.term, marker=Path(options.root, "killed"))
    torch.set_num_threads(1)
    metrics.build_device_memory_monitor = NoDevice
    dist_utils.set_pg_timeouts = lambda **_: None  # it names a device to a barrier
    world = int(os.environ["WORLD_SIZE"])
    degrees = {
        "fsdp": {},
        "tp": {"tensor_parallel_degree": world},
        "ddp": {"data_parallel_replicate_degree": world, "data_parallel_shard_degree": 1},
    }[options.way]
    own = CheckpointManager.Config(
        enable=True, interval=options.interval, last_save_model_only=False, keep_latest_k=options.keep,
        load_step=options.load_step, folder=os.path.basename(options.root),
    )  # fmt: skip
    config = Told.Config(
        model_spec=llama(96 if options.wide else 64),
        dump_folder=os.path.dirname(options.root),
        debug=DebugConfig(seed=0),
        tokenizer=Bytes.Config(),
        dataloader=Loader.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=1e-3, implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=100),
        training=TrainingConfig(
            local_batch_size=4, global_batch_size=4 * options.accumulate * (1 if options.way == "tp" else world),
            seq_len=LENGTH, steps=options.steps, disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(spmd_backend="full_dtensor", **degrees),
        checkpoint=own if options.plain else keep(own),
    )  # fmt: skip
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has none that divides
    trainer.checkpointer.save = Saved(trainer)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
