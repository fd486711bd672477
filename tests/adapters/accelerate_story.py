"""A loop with Accelerate that is killed once at a named moment, and what it ended with. Not a test itself.

accelerate_story.py ROOT FACTS --plan PLAN [--kill MOMENT:STEP] [--of RANK] [--term] [--ranks N] [--every CADENCE]

PLAN: where the order of rows comes from, and what else the loop does. MOMENT: begin (of a step), part (between two batches of one),
backward (before the optimizers' step), eval (in the evaluation behind a step), evaluated (behind it), within, saving (in Accelerate's own save, and behind it), step (reported
to holdfast), epoch (behind the last step of one), over (behind `close`); STEP: steps that were reported then. FACTS: a file, written
at the end. --of: the rank, or -1 for all. --term: SIGTERM instead of SIGKILL. With --serve instead of all that: see `story_server`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from story_sampler import Drawn
from story_server import serve
from story_strike import Strike

from holdfast.adapters.huggingface import wrap

ROWS, BATCH = 40, 4
# How loaders are configured.
PLANS: dict[str, dict[str, Any]] = {
    "process": {},
    "generator": {},
    "seedable": {"use_seedable_sampler": True},
    "stateful": {"use_stateful_dataloader": True},
    "both": {"use_stateful_dataloader": True, "use_seedable_sampler": True},
    "evaluates": {"use_seedable_sampler": True},
    "stops": {"use_seedable_sampler": True},
    "best": {},
    "every batch": {},
    "odd": {},
    "workers": {"use_stateful_dataloader": True},
    "stream": {"use_stateful_dataloader": True, "dispatch_batches": False},
    "limit": {"use_seedable_sampler": True},
    "compiled": {},
    "mixed": {},
    "plateau": {},
    "others": {},
    "drawn": {},
    "parts": {},
    "named": {},
}
# Batches of a step, and most steps; batches that are accumulated, where each is reported as a step.
NUMBERS = {
    "every batch": {"batches": 1},
    "odd": {"batches": 3},
    "limit": {"most": 7},
    "parts": {"batches": 1, "gathered": 2},
}
EVALUATED = ("others", "evaluates", "stops", "best", "limit", "plateau", "compiled")
PATIENT = ("stops", "plateau")  # those that end when three evaluations were no better


class Rows(torch.utils.data.Dataset):
    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(self.first + index))


class Stream(torch.utils.data.IterableDataset):
    """Rows in order, with a place of its own; the number is told to nobody."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < ROWS:
            self.place += 1
            yield torch.full((4,), float(self.place))
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Buckets(torch.utils.data.Sampler):  # type: ignore[type-arg]
    """Whole batches, in an order that is drawn from the process's random numbers."""

    def __len__(self) -> int:
        return ROWS // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        for first in torch.randperm(len(self)).tolist():
            yield list(range(first * BATCH, (first + 1) * BATCH))


class Best:
    """What a loop knows of its evaluations: registered for checkpointing, as Accelerate's own examples do."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.best, self.waited = float("inf"), 0
        self.weights: dict[str, torch.Tensor] = {}

    def add(self, loss: float, model: Any) -> None:
        self.losses.append(loss.hex())
        self.waited += 1
        if loss < self.best:
            self.best, self.waited = loss, 0
            self.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "best": self.best, "waited": self.waited, "weights": dict(self.weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.best = list(state["losses"]), state["best"]
        self.waited, self.weights = state["waited"], dict(state["weights"])


STRIKE = Strike()


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.blake2b(b"".join(one.detach().numpy().tobytes() for one in tensors), digest_size=8).hexdigest()


def made(plan: str) -> list[Any]:
    """Two models, their optimizers, a schedule, data to train with and data to evaluate with."""
    own = torch.Generator().manual_seed(5) if plan == "generator" else None
    shuffled = {} if plan == "stream" else {"shuffle": True, "generator": own, "num_workers": 2 * (plan == "workers")}
    loader: Any = torch.utils.data.DataLoader(Stream() if plan == "stream" else Rows(), batch_size=BATCH, **shuffled)
    if plan == "drawn":
        loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH, sampler=Drawn(ROWS))
    if plan == "others":
        loader = torch.utils.data.DataLoader(Rows(), batch_sampler=Buckets())
    checks: Any = torch.utils.data.DataLoader(Rows(7), batch_size=2 * BATCH)
    models: list[Any] = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(models[0].parameters(), 1e-2), torch.optim.SGD(models[1].parameters(), 1e-5)]
    if plan == "compiled":
        models[0] = torch.compile(models[0], backend="eager")
    kinds = torch.optim.lr_scheduler
    if plan == "plateau":
        return [
            *models,
            *optimizers,
            kinds.ReduceLROnPlateau(optimizers[0], patience=0, threshold=10.0),
            loader,
            checks,
        ]
    return [*models, *optimizers, kinds.StepLR(optimizers[0], 4, 0.5), loader, checks]


class Loop:
    """The script's own loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        numbers = NUMBERS.get(options.plan, {})
        self.plan, self.facts = options.plan, options.facts
        self.project = self.facts.with_suffix(".project")
        self.batches, self.most = numbers.get("batches", 2), numbers.get("most", 1 << 30)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=numbers.get("gathered", self.batches), mixed_precision="bf16" if self.plan == "mixed" else "no",
            dataloader_config=DataLoaderConfiguration(**PLANS[self.plan]),
            project_config=ProjectConfiguration(str(self.project), automatic_checkpoint_naming=self.plan == "named"),
        )  # fmt: skip
        prepared = self.accelerator.prepare(*made(self.plan))
        self.first, self.second, *self.optimizers, self.scheduler, self.loader, self.checks = prepared
        self.beside = self.accelerator.prepare(torch.utils.data.DataLoader(Rows(3), batch_size=BATCH, shuffle=True))
        self.best = Best()
        self.accelerator.register_for_checkpointing(self.best)
        self.accelerator.register_save_state_pre_hook(lambda *_: self.reached("within", self.step + 1))
        set_seed(100 + self.accelerator.process_index)
        self.checkpointer = wrap(self.accelerator, options.root, every=options.every)
        self.step = self.start = self.checkpointer.restore()
        length = ROWS // BATCH // self.accelerator.num_processes
        self.epochs = 3 if self.accelerator.num_processes == 1 else 4  # of two ranks an epoch is shorter
        self.accumulated = -(-length // self.batches)  # optimizer steps of an epoch; one is saved as one step
        self.seen = self.facts.with_suffix(f".rows{self.accelerator.process_index}")

    @property
    def is_over(self) -> bool:
        impatient = self.plan in PATIENT and self.best.waited >= 3
        return self.step >= min(self.most, self.epochs * self.accumulated) or impatient

    def run(self) -> None:
        for epoch in range(self.start // self.accumulated, self.epochs):
            if self.is_over:
                break
            if hasattr(self.loader, "set_epoch") and PLANS[self.plan] == {"use_seedable_sampler": True}:
                self.loader.set_epoch(epoch)
            for batch in self.rest_of_epoch():
                self.train(batch)
                if self.accelerator.sync_gradients or self.plan == "parts":
                    self.finish()
                    if self.is_over:
                        break
            self.reached("epoch", self.step)
        self.checkpointer.close()
        self.reached("over", self.step)

    def rest_of_epoch(self) -> Any:
        done = self.batches * (self.step % self.accumulated)
        if not done or PLANS[self.plan].get("use_stateful_dataloader", False):
            return self.loader if self.plan != "others" else map(torch.cat, zip(self.loader, self.beside, strict=False))
        rest = self.accelerator.skip_first_batches(self.loader, done)
        if self.plan != "others":
            return rest
        return map(torch.cat, zip(rest, self.accelerator.skip_first_batches(self.beside, done), strict=False))

    def train(self, batch: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.first, self.second), self.seen.open("a") as file:
            last = self.accelerator.sync_gradients
            self.reached("begin", self.step)
            file.write(json.dumps([f"{self.step}.{len(batch)}.{int(last)}", batch[:, 0].tolist()]) + "\n")
            self.accelerator.backward((self.second(self.first(batch / ROWS)) - batch).square().mean())
            self.reached("backward" if last else "part", self.step)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def finish(self) -> None:
        """What is done for a step, before it is reported."""
        loss = self.evaluated() if self.plan in EVALUATED and self.step % 2 == 1 else None
        if loss is not None:
            self.best.add(loss, self.first)
            self.reached("evaluated", self.step + 1)
        if self.plan != "plateau":
            self.scheduler.step()
        elif loss is not None:
            self.scheduler.step(loss)
        if self.plan == "best" and self.step % 4 == 3:
            self.accelerator.save_state(str(self.facts.with_suffix(f".own{self.step}")))
            self.reached("saving", self.step + 1)
        if self.plan == "named" and self.step % 4 == 3:
            self.accelerator.save_state()
            self.reached("saving", self.step + 1)
        self.checkpointer.step(self.step)
        self.step += 1
        self.reached("step", self.step)

    def evaluated(self) -> float:
        total = torch.zeros(())
        for batch in self.checks:
            self.reached("eval", self.step + 1)
            with torch.no_grad():  # with dropout, so that it draws
                total += (self.second(self.first(batch / ROWS)) - batch).square().mean()
            if self.plan == "others":  # an evaluation that is broken off
                break
        return float(self.accelerator.gather(total).sum()) + 1e3 * (self.plan == "stops") * self.step

    def reached(self, moment: str, step: int) -> None:
        STRIKE.reached(f"{moment}:{step}", self.accelerator.process_index, self.accelerator.wait_for_everyone)

    def told(self) -> dict[str, Any]:
        parameters = [one for model in (self.first, self.second) for one in model.parameters()]
        states = [per for optimizer in self.optimizers for per in optimizer.optimizer.state.values()]
        moments = [tensor for per in states for _, tensor in sorted(per.items()) if torch.is_tensor(tensor)]
        return {
            "step": self.step, "starts": [self.start], "parameters": digest(parameters), "optimizer": digest(moments),
            "rates": [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups],
            "losses": self.best.losses, "best": digest(list(self.best.weights.values())), "waited": self.best.waited,
            "rows": dict(map(json.loads, self.seen.read_text().splitlines())), "random": torch.rand(1).item().hex(),
            "own": sorted(path.name for path in self.facts.parent.iterdir() if ".own" in path.name),
            "named": sorted(path.name for path in self.project.glob("checkpoints/*")),
        }  # fmt: skip


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("facts", type=Path)
    parser.add_argument("--plan", choices=PLANS)
    parser.add_argument("--kill", default="")
    parser.add_argument("--of", type=int, default=0)
    parser.add_argument("--term", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--every", default="1")
    options = parser.parse_args(words)
    rank = int(os.environ.get("RANK", "0")) if options.ranks > 1 else 0
    STRIKE.aim(options.facts, rank, at=options.kill, of=options.of, term=options.term)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loop = Loop(options)
    loop.run()
    file = options.facts.with_suffix(f".{rank}") if rank else options.facts
    file.write_text(json.dumps(loop.told()))
    loop.accelerator.end_training()
    if options.ranks > 1:
        # At the end of a process torch 2.13 may wait for ever: the group's end holds the GIL and waits for Gloo's thread, which
        # wants it to give an all-reduce of DDP's away.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    serve(main) if sys.argv[1:] == ["--serve"] else main(sys.argv[1:])
