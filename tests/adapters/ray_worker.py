"""The script of the Ray Train door: a TorchTrainer of two workers, a byte-level model under DDP. Not a test itself.

python ray_worker.py ROOT --steps N [--workers N] [--wide] [--kill STEP [--term WHOM]] [--drain STEP]

--kill: worker 1 kills itself with SIGKILL behind that step, the first time. --term: SIGTERM instead, to worker 1 ("one"), to both
("all"), or to the process that called `fit` ("driver"); they make no step more. --drain: Ray is told that the node will be taken away
when that step is made, and training goes on until the notice has come and for one step more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from pydoc_data import topics
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train.torch import TorchTrainer

from holdfast.adapters.ray import keep
from holdfast.testing.contracts import adapter_output

warnings.filterwarnings("ignore")
LENGTH = 32
REPORT = ray.train.report


def train(config: dict[str, Any]) -> None:
    # Ray hands on what its workers print, later; who kills at a step must hear of it at once.
    sys.stdout = open(f"/proc/{config['driver']}/fd/1", "w")  # noqa: SIM115
    ray.train.report = checked
    torch.set_num_threads(1)
    rank, workers = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    torch.manual_seed(0)
    width = 80 if config["wide"] else 64
    model: Any = torch.nn.Sequential(
        torch.nn.Embedding(256, width),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(width, width),
        torch.nn.Linear(width, 256),
    )
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    options = {"durable_every": config["durable_every"]} if config["durable_every"] else {}
    checkpointer = keep(config["root"] or None, model=model, optimizer=optimizer, look_every=1, **options)
    start = checkpointer.restore()
    adapter_output.start(rank, start)
    adapter_output.whole(rank, start, list(model.parameters()))
    step, warned = start, 0
    while step < config["steps"] or (config["drain"] >= 0 and warned < 2):
        at = (step % 100 * workers + rank) * LENGTH
        row = torch.tensor(list(text[at : at + LENGTH + 1]))
        loss = torch.nn.functional.cross_entropy(model(row[:-1]), row[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(step, {"step": step, "loss": loss.item()})
        warned += checkpointer.notice is not None
        moments = [optimizer.state[p][key] for p in model.parameters() for key in sorted(optimizer.state[p])]
        adapter_output.step(rank, step, [loss.detach(), *model.parameters(), *moments])
        if step == config["kill"]:
            ended(rank, config)
        if rank == 0 and step == config["drain"]:
            drain()
        step += 1
    adapter_output.whole(rank, step, list(model.parameters()))
    checkpointer.close()
    sys.stdout.flush()


def checked(metrics: dict[str, Any], checkpoint: Any = None, **options: Any) -> None:
    """Ray's own report; what a pointer names is durable when Ray hears of it."""
    if checkpoint is not None:
        named = json.loads((Path(checkpoint.path) / "holdfast.json").read_text())
        assert (Path(named["path"]) / named["version"] / "manifest.json").exists(), f"{named} is not durable"
    REPORT(metrics, checkpoint=checkpoint, **options)


def ended(rank: int, config: dict[str, Any]) -> None:
    """Sends the signal that was asked for, once; who has sent SIGTERM, or stands beside it, waits for its end."""
    marker, whom = Path(f"{config['marker']}{rank}"), config["term"]
    if marker.exists():
        return
    marker.touch()
    if whom == "driver":
        if rank == 0:
            os.kill(config["driver"], signal.SIGTERM)
    elif rank == 1 or whom == "all":
        os.kill(os.getpid(), signal.SIGTERM if whom else signal.SIGKILL)
    if whom == "driver" or (whom and (rank == 1 or whom == "all")):
        threading.Event().wait(300)


def drain() -> None:
    """As a provider's agent would: this node is taken away in a minute."""
    client = ray._raylet.GcsClient(ray.get_runtime_context().gcs_address)
    reason = ray.core.generated.autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int(time.time() * 1000) + 60_000
    taken, why = client.drain_node(ray.get_runtime_context().get_node_id(), reason, "test", deadline_ms)
    assert taken, why


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--kill", type=int, default=-1)
    parser.add_argument("--term", choices=("one", "all", "driver"), default="")
    parser.add_argument("--drain", type=int, default=-1)
    parser.add_argument("--durable-every", default="")
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    ray.init(
        num_cpus=options.workers + 1, include_dashboard=False, logging_level="ERROR", object_store_memory=80 << 20,
        _temp_dir=str(Path(os.environ["HOLDFAST_RUNTIME_DIR"]).parent / "ray"),
    )  # fmt: skip
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "driver": os.getpid(), "root": "", "steps": options.steps, "wide": options.wide, "kill": options.kill,
            "term": options.term, "drain": options.drain, "durable_every": options.durable_every, "marker": str(options.root / "killed"),
        },
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(options.root), failure_config=ray.train.FailureConfig(max_failures=2)
        ),
    )  # fmt: skip
    result = trainer.fit()
    if result.checkpoint is not None:
        pointer = json.loads((Path(result.checkpoint.path) / "holdfast.json").read_text())
        print("pointer", json.dumps({**pointer, "step": result.metrics["step"]}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
