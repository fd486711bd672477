"""A MindSpore training as its users write it, not a line of holdfast in it; run by test_aiturbo.py. No test."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Model, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, CheckpointConfig, ModelCheckpoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()
    ms.set_seed(1)
    net = nn.SequentialCell(nn.Dense(8, options.width), nn.ReLU(), nn.Dense(options.width, 4))
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)
    options.root.mkdir(exist_ok=True)
    names = sorted(options.root.glob("m*.ckpt"), key=steps_of)
    start = 0
    if names:
        saved = ms.load_checkpoint(str(names[-1]), crc_check=True)
        start = int(saved["finished"].asnumpy())
        missing, _ = ms.load_param_into_net(net, saved)
        missing += ms.load_param_into_net(optimizer, saved)[0]
        assert not missing, missing
    say(rank=0, start=start)

    def batches() -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        for step in range(start, options.steps):
            source = np.random.default_rng(step)
            yield source.standard_normal((4, 8), np.float32), source.standard_normal((4, 4), np.float32)

    finished = ms.Parameter(ms.Tensor(start), name="finished", requires_grad=False)

    class Count(Callback):
        def on_train_step_begin(self, run_context: Any) -> None:
            finished.set_data(ms.Tensor(start + run_context.original_args().cur_step_num))

    class Tell(Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            step = start + run_context.original_args().cur_step_num - 1
            state = hashlib.blake2b(digest_size=8)
            for parameter in [*net.trainable_params(), *optimizer.get_parameters()]:
                state.update(parameter.asnumpy().tobytes())
            say(rank=0, step=step, digest=state.hexdigest())

    net.insert_param_to_cell("finished", finished, check_name_contain_dot=False)
    config = CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=2, integrated_save=False, crc_check=True)
    checkpoints = ModelCheckpoint(f"m{start}", str(options.root), config)
    data = GeneratorDataset(batches, ["x", "y"], shuffle=False)
    model = Model(net, loss_fn=nn.MSELoss(), optimizer=optimizer)
    if start < options.steps:
        model.train(1, data, callbacks=[Count(), checkpoints, Tell()], dataset_sink_mode=False)


def steps_of(path: Path) -> int:
    """Finished steps by the name `m<start>-<epoch>_<step>.ckpt`."""
    before, _, after = path.stem.partition("-")
    return int(before.removeprefix("m").split("_")[0]) + int(after.split("_")[1])


def say(**facts: object) -> None:
    sys.stdout.write(f"door {json.dumps(facts)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
