"""Loops with the lines of the README: one habit each, and what is to be said of it. Not a test itself.

Each is a file of its own that a test runs with a Checkpointer of its own class, under the name `Checkpointer`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import dedent, indent

HEAD = """
import torch, random, itertools, time
import numpy as np
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
rows = torch.utils.data.TensorDataset(torch.randn(40, 4))
def batch():
    return torch.randn(3, 4)
def train(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
class Loader:
    def __init__(self):
        self.place = 0
    def __iter__(self):
        return self
    def __next__(self):
        self.place += 1
        return torch.full((3, 4), float(self.place))
    def state_dict(self):
        return {"place": self.place}
    def load_state_dict(self, state):
        self.place = state["place"]
"""


@dataclass(frozen=True)
class Case:
    """One script.

    Attributes:
        before: its lines before the Checkpointer.
        between: those behind `restore()`.
        loop: the loop.
        names: what is told, by name; empty: nothing at all.
        given: arguments of the Checkpointer besides model and optimizer.
        early: lines between the Checkpointer and `restore()`.
    """

    loop: str
    before: str = ""
    between: str = ""
    names: tuple[str, ...] = ()
    given: str = ""
    early: str = ""
    in_function: bool = True

    def text(self) -> str:
        body = "\n".join(
            dedent(part).strip("\n")
            for part in (
                self.before,
                f"ckpt = Checkpointer('x', model=model, optimizer=optimizer{self.given})",
                self.early,
                "start = ckpt.restore()",
                self.between,
                self.loop,
            )
        )
        text = re.sub(" *FIRST COLUMN", "FIRST COLUMN", indent(body, "    "))
        return HEAD + (f"def main():\n{text}\nmain()\n" if self.in_function else body + "\n")


PLAIN = """
for step in range(start, 8):
    x = batch()
    loss = train(x)
    ckpt.step(step)
"""
CASES = {
    "the readme": Case(PLAIN),
    "a script without functions": Case(PLAIN, in_function=False),
    "objects that raise when they are asked": Case(
        """
        for step in range(start, 8):
            settings.n = step
            odd.seen = step
            train(batch())
            ckpt.step(step)
        """,
        before="""
        class Settings(dict):
            __getattr__ = dict.__getitem__
            __setattr__ = dict.__setitem__
        class Odd:
            seen = 0
            __hash__ = None
            def __getattr__(self, name):
                raise RuntimeError(name)
            def __eq__(self, other):
                raise TypeError
            __bool__ = __len__ = __repr__ = __eq__
        settings, odd = Settings(n=1), Odd()
        """,
    ),
    "callbacks in a list, and one by its index": Case(
        """
        for step in range(start, 8):
            loss = train(batch())
            for callback in callbacks:
                callback.on_step(loss.item())
            callbacks[0].note(loss)
            ckpt.step(step)
        """,
        before="""
        class Patience:
            best, bad = float("inf"), 0
            def on_step(self, loss):
                self.bad = 0 if loss < self.best else self.bad + 1
                self.best = min(loss + step_size, self.best + step_size)
        class Average(Patience):
            def __init__(self):
                self.mean = {"loss": torch.zeros(())}
            def note(self, loss):
                self.mean["loss"].mul_(0.9).add_(loss.detach())
            def on_step(self, loss):
                pass
        class Teacher:
            def __init__(self):
                self.model = nn.Linear(4, 2)
            def on_step(self, loss):
                with torch.no_grad():
                    self.model.weight.add_(loss)
        class Count:
            def __init__(self):
                self.count = 0
            def on_step(self, loss):
                self.count += 1
            def state_dict(self):
                return {"count": self.count}
            def load_state_dict(self, state):
                self.count = state["count"]
        step_size = 1.0
        callbacks = [Average(), Patience(), Teacher(), Count()]
        """,
        given=", count=callbacks[3]",
        names=("callbacks[0].mean", "callbacks[1].best", "callbacks[2].model"),
    ),
    "callbacks in a dict of an object": Case(
        """
        trainer.run(start)
        """,
        before="""
        class Patience:
            bad = 0
            def on_step(self, loss):
                self.bad += 1
        class Trainer:
            def __init__(self, hooks):
                self.hooks = hooks
            def run(self, start):
                for step in range(start, 8):
                    loss = train(batch())
                    for hook in self.hooks.values():
                        hook.on_step(loss.item())
                    ckpt.step(step)
        trainer = Trainer({"stop": Patience()})
        """,
        in_function=False,
        names=("self.hooks['stop'].bad",),
    ),
    "callbacks that keep nothing for the next step": Case(
        """
        for step in range(start, 8):
            loss = train(batch())
            for meter in meters:
                meter.reset()
                meter.update(loss.item())
            ckpt.step(step)
        """,
        before="""
        class Meter:
            def __init__(self):
                self.reset()
            def reset(self):
                self.total, self.began = 0.0, time.time()
            def update(self, loss):
                self.total += loss
                self.last = loss
                self.took = time.time() - self.began
        meters = [Meter(), Meter()]
        """,
    ),
    "a function that keeps a number": Case(
        """
        for step in range(start, 8):
            rate = decayed()
            train(batch() * rate * count())
            ckpt.step(step)
        """,
        before="""
        def counter():
            n = 0
            def inc():
                nonlocal n
                n += 1
                return n
            return inc
        count, scale = counter(), 1.0
        def decayed():
            nonlocal scale
            scale *= 0.9
            return scale
        """,
        names=("count", "scale"),
    ),
    "objects of odd classes beside what is told": Case(
        """
        for step in range(start, 8):
            mean = 0.9 * mean + train(batch()).item()
            for hook in hooks:
                hook.on_step(mean)
            quiet(mean)
            ckpt.step(step)
        """,
        before="""
        class Counts:
            '''Counts.
            FIRST COLUMN
            '''
            n = 0
            def on_step(self, mean):
                self.n += 1
        class Kind(type):
            __hash__ = None
            def __eq__(self, other):
                return self is other
        class Strange(metaclass=Kind):
            n = 0
            def on_step(self, mean):
                self.n += 1
        class Closed(Counts):
            def __getattribute__(self, name):
                if name == "__dict__":
                    raise RuntimeError(name)
                return object.__getattribute__(self, name)
        def silenced():
            def quiet(mean):
                nonlocal late
                if mean == "no":
                    late = late + 1
                return mean
            if step_size > 1:
                late = 0
            return quiet
        step_size = 1.0
        mean, quiet = 0.0, silenced()
        hooks = [Counts(), Closed(), Strange()]
        """,
        names=("mean", "hooks[0].n", "hook.n"),
    ),
    "callbacks by the members of enumerations": Case(
        """
        for step in range(start, 8):
            loss = train(batch())
            for hook in hooks.values():
                hook.on_step(loss.item())
            ckpt.step(step)
        """,
        before="""
        import enum
        class Phase(str, enum.Enum):
            TRAIN = "train"
        class Place(enum.Enum):
            FIRST = 1
        class Count:
            n = 0
            def on_step(self, loss):
                self.n += 1
        hooks = {Phase.TRAIN: Count(), Place.FIRST: Count()}
        """,
        names=("hooks[Phase.TRAIN].n", "hooks[Place.FIRST].n"),
    ),
    "callbacks that only the inner loop has a name for": Case(
        """
        for step in range(start, 8):
            loss = train(batch())
            for hook in hooks:
                hook.on_step(loss.item())
            ckpt.step(step)
        """,
        before="""
        class Count:
            n = 0
            def on_step(self, loss):
                self.n += 1
        hooks = [Count() for _ in range(30)]
        """,
        names=("hook.n",),
    ),
    "callbacks of names that are alike": Case(
        """
        for step in range(start, 8):
            loss = train(batch())
            for hook in hooks.values():
                hook.on_step(loss.item())
            größe = größe + 1
            ckpt.step(step)
        """,
        before="""
        class Count:
            n = 0
            def on_step(self, loss):
                self.n += 1
        größe = 0.0
        hooks = {"a-b": Count(), "a_b": Count(), -1: Count(), 1: Count(), "損失": Count(), "it's": Count()}
        """,
        names=(
            "größe",
            "hooks['a-b'].n",
            "hooks['a_b'].n",
            "hooks[-1].n",
            "hooks[1].n",
            "hooks['損失'].n",
            'hooks["it\'s"].n',
        ),
    ),
    "callbacks that are carried, by its place": Case(
        """
        for step in range(start, 8):
            loss = train(batch())
            for hook in hooks:
                hook.on_step(loss.item())
            ckpt.step(step, n=hooks[0].n)
        """,
        before="""
        class Count:
            n = 0
            def on_step(self, loss):
                self.n += 1
        hooks = [Count()]
        """,
        between="""
        hooks[0].n = ckpt.carry('n', hooks[0].n)
        """,
    ),
    "callbacks that are carried, by a name of its own": Case(
        """
        for step in range(start, 8):
            loss = train(batch())
            for hook in hooks:
                hook.on_step(loss.item())
            ckpt.step(step, n=stop.n)
        """,
        before="""
        class Count:
            n = 0
            def on_step(self, loss):
                self.n += 1
        hooks = [Count()]
        """,
        between="""
        stop = hooks[0]
        stop.n = ckpt.carry('n', stop.n)
        """,
    ),
    "callbacks that are carried, all of them": Case(
        """
        for step in range(start, 8):
            loss = train(batch())
            for hook in hooks:
                hook.on_step(loss.item())
            ckpt.step(step, n=[hook.n for hook in hooks])
        """,
        before="""
        class Count:
            n = 0
            def on_step(self, loss):
                self.n += 1
        hooks = [Count()]
        """,
        between="""
        for hook, n in zip(hooks, ckpt.carry('n', [0])):
            hook.n = n
        """,
    ),
    "callbacks that are carried, as a whole": Case(
        """
        for step in range(start, 8):
            loss = train(batch())
            for hook in hooks:
                hook.on_step(loss.item())
            ckpt.step(step, n=vars(hooks[0]))
        """,
        before="""
        class Count:
            n = 0
            def on_step(self, loss):
                self.n += 1
        hooks = [Count()]
        """,
        between="""
        vars(hooks[0]).update(ckpt.carry('n', {'n': 0}))
        """,
    ),
    "callbacks of which one is carried": Case(
        """
        trainer.run(start)
        """,
        before="""
        class Count:
            n = 0
            def on_step(self, loss):
                self.n += 1
        class Trainer:
            def __init__(self):
                self.hooks = [Count(), Count()]
            def run(self, start):
                self.hooks[0].n = ckpt.carry("n", self.hooks[0].n)
                for step in range(start, 8):
                    loss = train(batch())
                    for hook in self.hooks:
                        hook.on_step(loss.item())
                    ckpt.step(step, n=self.hooks[0].n)
        trainer = Trainer()
        """,
        in_function=False,
        names=("self.hooks[1].n",),
    ),
    "a while loop": Case(
        """
        while step < 8:
            train(batch())
            ckpt.step(step)
            step += 1
        """,
        between="step = start",
    ),
    "batch fetched one ahead": Case(
        """
        for step in range(start, 8):
            train(x)
            x = batch()
            ckpt.step(step)
        """,
        between="x = batch()",
        names=("x",),
    ),
    "batch fetched one ahead, in an inner loop": Case(
        """
        step = start
        while True:
            for micro in range(2):
                loss = model(x).mean()
                x, y = batch(), 0
                loss.backward()
            optimizer.step()
            ckpt.step(step)
            step += 1
            if step > 7:
                break
        """,
        between="x, y = batch(), 0",
        names=("x",),
    ),
    "loss read behind an inner loop": Case(
        """
        for step in range(start, 8):
            for micro in range(2):
                loss = model(batch()).mean() / 2
                loss.backward()
            optimizer.step()
            if step % 2 == 0:
                said = loss.item()
            ckpt.step(step)
        """
    ),
    "running mean": Case(
        """
        for step in range(start, 8):
            mean = 0.9 * mean + 0.1 * train(batch()).item()
            ckpt.step(step)
        """,
        between="mean = 0.0",
        names=("mean",),
    ),
    "best loss": Case(
        """
        for step in range(start, 8):
            loss = train(batch())
            if loss < best:
                best = loss.item()
            ckpt.step(step)
        """,
        before="best = 1e9",
        names=("best",),
    ),
    "hidden state": Case(
        """
        for step in range(start, 8):
            hidden = torch.tanh(hidden + train(batch()).detach())
            ckpt.step(step)
        """,
        between="hidden = torch.zeros(2)",
        names=("hidden",),
    ),
    "counter of its own": Case(
        """
        for step in range(start, 8):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + count)
            train(batch())
            count += 1
            ckpt.step(step)
        """,
        between="count = 0",
        names=("count",),
    ),
    "counter that restore begins": Case(
        """
        for step in range(start, 8):
            train(batch())
            count += 1
            ckpt.step(step)
        """,
        between="count = 2 * start",
    ),
    "clock": Case(
        """
        for step in range(start, 8):
            train(batch())
            t1 = time.time()
            dt = t1 - t0
            total = total + dt
            t0 = t1
            ckpt.step(step)
        """,
        between="t0 = time.time(); total = 0.0",
    ),
    "a value that never changes": Case(
        """
        for step in range(start, 8):
            if step > 100:
                factor = factor / 2
            train(batch() * factor)
            ckpt.step(step)
        """,
        between="factor = 1.0",
    ),
    "total of an epoch": Case(
        """
        step = start
        for epoch in range(2):
            total = 0.0
            for _ in range(4):
                total += train(batch()).item()
                ckpt.step(step)
                step += 1
        """,
        names=("total",),
    ),
    "kept by carry": Case(
        """
        for step in range(start, 8):
            train(x)
            x = batch()
            ckpt.step(step, x=x)
        """,
        between="x = ckpt.carry('x', batch())",
    ),
    "iterator of a loader that is given": Case(
        """
        for step in range(start, 8):
            train(next(it))
            ckpt.step(step)
        """,
        before="loader = Loader()",
        given=", loader=loader",
        between="it = iter(loader)",
    ),
    "iterator made before restore": Case(
        """
        for step in range(start, 8):
            train(next(it))
            ckpt.step(step)
        """,
        before="loader = Loader()",
        early="it = map(lambda x: 2 * x, loader)",
        given=", loader=loader",
        names=("it",),
    ),
    "iterator over nothing that is given": Case(
        """
        for step in range(start, 8):
            train(next(it)[0])
            ckpt.step(step)
        """,
        between="it = iter(torch.utils.data.DataLoader(rows, batch_size=3))",
        names=("it",),
    ),
    "generator that only draws": Case(
        """
        for step in range(start, 8):
            train(next(batches))
            ckpt.step(step)
        """,
        before="""
        def endless():
            while True:
                yield torch.randn(3, 4)
        """,
        between="batches = endless()",
    ),
    "generator with a place": Case(
        """
        for step in range(start, 8):
            train(next(batches))
            ckpt.step(step)
        """,
        before="""
        def endless():
            place = 0
            while True:
                place = place + 1
                yield torch.full((3, 4), place / 9)
        """,
        between="batches = endless()",
        names=("batches",),
    ),
    "generator of a loader that is given": Case(
        """
        for step in range(start, 8):
            train(next(batches))
            ckpt.step(step)
        """,
        before="""
        loader = Loader()
        def endless(loader):
            while True:
                yield from loader
        """,
        given=", loader=loader",
        between="batches = endless(loader)",
    ),
    "log file": Case(
        """
        for step in range(start, 8):
            train(batch())
            print(step, file=log)
            ckpt.step(step)
        """,
        before="import sys; log = sys.stderr",
    ),
    "loop over a loader": Case(
        """
        step = start
        for x, in loader:
            train(x)
            ckpt.step(step)
            step += 1
        """,
        between="loader = torch.utils.data.DataLoader(rows, batch_size=5)",
        names=("loader",),
    ),
    "index that decides when the optimizer steps": Case(
        """
        for epoch in range(first, 2):
            for i, (x,) in enumerate(loader):
                model(x).mean().backward()
                last = (i + 1) % 4 == 0
                if last or i + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
                ckpt.step(start, epoch=epoch)
                start += 1
        """,
        before="loader = torch.utils.data.DataLoader(rows, 4)",
        between="first = ckpt.carry('epoch', 0)",
        given=", loader=loader",
        names=("i",),
    ),
    "index that is shown, and one that goes on": Case(
        """
        for epoch in range(first, 2):
            for i, (x,) in enumerate(loader):
                loss = train(x)
                if i % 4 == 0:
                    print(i, loss)
                ckpt.step(start, epoch=epoch)
                start += 1
            for i, (x,) in enumerate(loader, start):
                if i > 30:
                    break
        """,
        before="loader = torch.utils.data.DataLoader(rows, 4)",
        between="first = ckpt.carry('epoch', 0)",
        given=", loader=loader",
    ),
    "index that decides about reports, and loops of its own": Case(
        """
        for epoch in range(first, 2):
            for i, (x,) in enumerate(loader):
                loss = train(x)
                if i % 4 == 0:
                    for j, (y,) in enumerate(loader2):
                        if j > 2:
                            break
                    def show():
                        for _ in range(3):
                            continue
                        optimizer.zero_grad()
                if i % 2 == 0:
                    ckpt.step(start, epoch=epoch)
                start += 1
                if i % 4:
                    continue
                print(i, loss.item())
        """,
        before="loader, loader2 = torch.utils.data.DataLoader(rows, 4), torch.utils.data.DataLoader(rows, 4)",
        between="first = ckpt.carry('epoch', 0)",
        given=", loader=loader",
    ),
    "index that decides which batches are skipped": Case(
        """
        for epoch in range(first, 2):
            for i, (x,) in enumerate(loader):
                if i < 2:
                    continue
                train(x)
                ckpt.step(start, epoch=epoch)
                start += 1
        """,
        before="loader = torch.utils.data.DataLoader(rows, 4)",
        between="first = ckpt.carry('epoch', 0)",
        given=", loader=loader",
        names=("i",),
    ),
    "epochs of the number of a step": Case(
        """
        for epoch in range(start // len(loader), 2):
            for x, in loader:
                train(x)
                ckpt.step(start)
                start += 1
        """,
        before="loader = torch.utils.data.DataLoader(rows, 4)",
        given=", loader=loader",
        names=("epoch",),
    ),
    "epochs of the number of the last step": Case(
        """
        for epoch in range(max(start - 1, 0) // len(loader), 2):
            for x, in loader:
                train(x)
                ckpt.step(start)
                start += 1
        """,
        before="loader = torch.utils.data.DataLoader(rows, 4)",
        given=", loader=loader",
    ),
    "loss that is read behind an epoch": Case(
        """
        for epoch in range(first, 2):
            best = 0
            for x, in loader:
                loss = train(x)
                best = max(best, loss.item())
                ckpt.step(start, epoch=epoch)
                start += 1
            print(epoch, best, loss.item())
            loss = 0
        """,
        before="loader = torch.utils.data.DataLoader(rows, 4)",
        between="first = ckpt.carry('epoch', 0)",
        given=", loader=loader",
        names=("best", "loss"),
    ),
    "loss that is carried to the end of an epoch": Case(
        """
        for epoch in range(first, 2):
            for x, in loader:
                loss = train(x)
                ckpt.step(start, epoch=epoch, loss=loss)
                start += 1
            print(epoch, loss.item())
        """,
        before="loader = torch.utils.data.DataLoader(rows, 4)",
        between="first, loss = ckpt.carry('epoch', 0), ckpt.carry('loss', None)",
        given=", loader=loader",
    ),
    "a loader that is gone over in a cycle": Case(
        """
        for (x,), (y,) in zip(itertools.cycle(loader), other):
            train(x + y[:1])
            ckpt.step(start)
            start += 1
        """,
        before="loader, other = torch.utils.data.DataLoader(rows, 20), torch.utils.data.DataLoader(rows, 4)",
        given=", loader=loader, other=other",
        names=("loader",),
    ),
    "a cycle that is drawn from": Case(
        """
        for step in range(start, 8):
            x, = next(cycle)
            train(x)
            ckpt.step(step)
        """,
        before="loader = torch.utils.data.DataLoader(rows, 20)",
        between="cycle = itertools.cycle(loader)",
        given=", loader=loader",
        names=("cycle",),
    ),
    "weights of a sampler that is given with its loader": Case(
        """
        for step in range(start, 8):
            for x, in loader:
                loss = train(x)
                sampler.weights[0] += loss.item() + 1
            ckpt.step(step)
        """,
        before="sampler = torch.utils.data.WeightedRandomSampler(torch.ones(40), 8)\nloader = torch.utils.data.DataLoader(rows, 4, sampler=sampler)",
        given=", loader=loader",
        names=("sampler.weights",),
    ),
    "random numbers of the process": Case(
        """
        for step in range(start, 8):
            train(batch() * random.random() * np.random.rand())
            ckpt.step(step)
        """
    ),
    "generator of torch's": Case(
        """
        for step in range(start, 8):
            train(torch.randn(3, 4, generator=own))
            ckpt.step(step)
        """,
        before="own = torch.Generator().manual_seed(1)",
        names=("own",),
    ),
    "generator of NumPy's, in a function": Case(
        """
        for step in range(start, 8):
            train(sample())
            ckpt.step(step)
        """,
        before="""
        rng = np.random.default_rng(0)
        def sample():
            return torch.from_numpy(rng.standard_normal((3, 4))).float()
        """,
        names=("rng",),
        in_function=False,
    ),
    "generators that are given": Case(
        """
        for step in range(start, 8):
            train(torch.randn(3, 4, generator=own) * rng.random() * die.random())
            ckpt.step(step)
        """,
        before="own = torch.Generator(); rng = np.random.default_rng(0); die = random.Random(1)",
        given=", own=own, rng=rng, die=die",
    ),
    "scheduler that was forgotten": Case(
        """
        for step in range(start, 8):
            train(batch())
            scheduler.step()
            ckpt.step(step)
        """,
        before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)",
        names=("scheduler",),
    ),
    "schedulers in one that is given": Case(
        """
        for step in range(start, 8):
            train(batch())
            scheduler.step()
            ckpt.step(step)
        """,
        before="""
        first = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        then = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[4])
        """,
        given=", scheduler=scheduler",
    ),
    "second model and optimizer": Case(
        """
        for step in range(start, 8):
            train(batch())
            judge(batch()).mean().backward()
            judges.step()
            ckpt.step(step)
        """,
        before="judge = nn.Linear(4, 1); judges = torch.optim.SGD(judge.parameters(), lr=0.1)",
        names=("judge", "judges"),
    ),
    "averaged model": Case(
        """
        for step in range(start, 8):
            train(batch())
            averaged.update_parameters(model)
            ckpt.step(step)
        """,
        before="averaged = torch.optim.swa_utils.AveragedModel(model)",
        names=("averaged",),
    ),
    "teacher that stays": Case(
        """
        for step in range(start, 8):
            x = batch()
            with torch.no_grad():
                y = teacher(x)
            train(x + y.mean())
            ckpt.step(step)
        """,
        before="teacher = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).eval()",
    ),
    "state in an object that is given": Case(
        """
        for step in range(start, 8):
            train(batch())
            kept.scheduler.step()
            ckpt.step(step)
        """,
        before="""
        class Kept:
            def __init__(self):
                self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            def state_dict(self):
                return self.scheduler.state_dict()
            def load_state_dict(self, state):
                self.scheduler.load_state_dict(state)
        kept = Kept()
        """,
        given=", kept=kept",
    ),
    "attributes of an object": Case(
        """
        for step in range(start, 8):
            train(batch())
            bag.scheduler.step()
            ckpt.step(step)
        """,
        before="""
        from types import SimpleNamespace
        bag = SimpleNamespace(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2), rate=1)
        """,
        names=("bag.scheduler",),
    ),
    "evaluation with a loop of its own": Case(
        """
        for step in range(start, 8):
            train(batch())
            if step % 2 == 0:
                evaluate()
            ckpt.step(step)
        """,
        before="""
        loader = torch.utils.data.DataLoader(rows, batch_size=20)
        @torch.no_grad()
        def evaluate():
            total = 0.0
            for x, in loader:
                total += model(x).mean().item()
            return total
        """,
    ),
    "every fourth step": Case(
        """
        for step in range(start, 16):
            train(batch())
            if step % 4 == 3:
                ckpt.step(step)
        """
    ),
    "progress bar": Case(
        """
        for step in bar:
            loss = train(batch())
            bar.said = loss.item()
            ckpt.step(step)
        """,
        before="""
        class Bar:
            def __init__(self, steps):
                self.steps = steps
            def __iter__(self):
                yield from self.steps
        """,
        between="bar = Bar(range(start, 8))",
    ),
    "list that grows": Case(
        """
        for step in range(start, 8):
            losses.append(train(batch()).item())
            ckpt.step(step)
        """,
        between="losses = []",
        names=("losses",),
    ),
    "a defaultdict that grows": Case(
        """
        for step in range(start, 8):
            losses["train"].append(train(batch()).item())
            ckpt.step(step)
        """,
        before="import collections\nlosses = collections.defaultdict(list)",
        names=("losses",),
    ),
    "list of this step": Case(
        """
        for step in range(start, 8):
            losses = []
            for _ in range(2):
                losses.append(train(batch()).item())
            ckpt.step(step)
        """
    ),
    "list of times": Case(
        """
        for step in range(start, 8):
            begun = time.time()
            train(batch())
            times.append(time.time() - begun)
            ckpt.step(step)
        """,
        between="times = []",
    ),
    "replay buffer": Case(
        """
        for step in range(start, 8):
            seen.append(batch())
            train(random.choice(seen))
            ckpt.step(step)
        """,
        before="from collections import deque",
        between="seen = deque(maxlen=4)",
        names=("seen",),
    ),
    "tensor written in place": Case(
        """
        for step in range(start, 8):
            x = batch()
            hidden.mul_(0.9).add_(x.mean(0))
            train(x + hidden)
            ckpt.step(step)
        """,
        between="hidden = torch.zeros(4)",
        names=("hidden",),
    ),
    "tensor of this step written in place": Case(
        """
        for step in range(start, 8):
            x = batch()
            x.mul_(2)
            x[0] = 1
            train(x)
            ckpt.step(step)
        """
    ),
    "element of a tensor": Case(
        """
        for step in range(start, 8):
            total[0] += train(batch()).item()
            ckpt.step(step)
        """,
        between="total = torch.zeros(1)",
        names=("total",),
    ),
    "item of a dict": Case(
        """
        for step in range(start, 8):
            train(batch())
            stats["seen"] = stats["seen"] + 3
            ckpt.step(step)
        """,
        between="stats = {'seen': 0}",
        names=("stats",),
    ),
    "list kept by carry": Case(
        """
        for step in range(start, 8):
            losses.append(train(batch()).item())
            ckpt.step(step, losses=losses)
        """,
        between="losses = ckpt.carry('losses', [])",
    ),
    "weights written in place": Case(
        """
        for step in range(start, 8):
            train(batch())
            with torch.no_grad():
                weight.mul_(0.9)
                model.bias.data.clamp_(-1, 1)
                for parameter in model.parameters():
                    parameter.add_(0.1)
            ckpt.step(step)
        """,
        before="weight = model.weight",
    ),
    "rate set by hand": Case(
        """
        for step in range(start, 8):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            for group in optimizer.param_groups:
                group["weight_decay"] *= 0.9
            train(batch())
            ckpt.step(step)
        """
    ),
    "attribute that lives on": Case(
        """
        for step in range(start, 8):
            bag.mean = 0.9 * bag.mean + train(batch()).item()
            bag.count += 1
            ckpt.step(step)
        """,
        before="from types import SimpleNamespace; bag = SimpleNamespace(mean=0.0, count=0)",
        names=("bag.mean", "bag.count"),
    ),
    "attribute that every step sets first": Case(
        """
        for step in range(start, 8):
            bag.loss = train(batch()).item()
            bag.said = f"{bag.loss}"
            ckpt.step(step)
        """,
        before="from types import SimpleNamespace; bag = SimpleNamespace()",
    ),
    "attribute that restore begins": Case(
        """
        while bag.step < 8:
            train(batch())
            ckpt.step(bag.step)
            bag.step += 1
        """,
        before="from types import SimpleNamespace",
        between="bag = SimpleNamespace(); bag.step = start",
    ),
    "attribute kept by carry": Case(
        """
        for step in range(start, 8):
            bag.mean = 0.9 * bag.mean + train(batch()).item()
            ckpt.step(step, bag_mean=bag.mean)
        """,
        before="from types import SimpleNamespace; bag = SimpleNamespace(mean=0.0)",
        between="bag.mean = ckpt.carry('bag_mean', bag.mean)",
    ),
    "attributes in a method": Case(
        """
        for step in range(start, 8):
            trainer.one(batch())
            ckpt.step(step)
        """,
        before="""
        class Trainer:
            def __init__(self):
                self.mean, self.last, self.seen = torch.zeros(4), 0.0, []
            def one(self, x):
                self.note(x)
                self.last = train(x - self.mean).item()
                self.seen.append(self.last)
            def note(self, x):
                self.mean = 0.9 * self.mean + x.mean(0)
        trainer = Trainer()
        """,
        names=("trainer.mean", "trainer.seen"),
        in_function=False,
    ),
    "a trainer with its loop": Case(
        """
        Trainer(start, ckpt).run()
        """,
        before="""
        class Trainer:
            def __init__(self, start, ckpt):
                self.mean, self.last, self.ckpt, self.step = torch.zeros(4), 0.0, ckpt, start
            def run(self):
                while self.step < 8:
                    self.one(batch())
                    self.ckpt.step(self.step)
                    self.step += 1
            def one(self, x):
                self.mean.mul_(0.9).add_(x.mean(0))
                self.last = train(x - self.mean).item()
        """,
        names=("self.mean",),
        in_function=False,
    ),
    "function that is handed a list": Case(
        """
        for step in range(start, 8):
            one(batch(), history, [])
            ckpt.step(step)
        """,
        before="""
        def one(x, seen, mine):
            mine.append(1)
            seen.append(train(x).item())
        history = []
        """,
        names=("history",),
        in_function=False,
    ),
    "global of a function": Case(
        """
        for step in range(start, 8):
            one(batch())
            ckpt.step(step)
        """,
        before="""
        count = 0
        def one(x):
            global count
            train(x / (1 + count))
            count += 1
        """,
        names=("count",),
        in_function=False,
    ),
    "attribute of a model that is given": Case(
        """
        for step in range(start, 8):
            train(batch())
            model.seen += 1
            ckpt.step(step)
        """,
        before="model.seen = 0",
        names=("model.seen",),
    ),
    "attribute of an object that is given": Case(
        """
        for step in range(start, 8):
            train(batch())
            kept.place += 1
            ckpt.step(step)
        """,
        before="kept = Loader()",
        given=", kept=kept",
    ),
    "a meter that every epoch begins anew": Case(
        """
        step = start
        for epoch in range(2):
            meter = Meter()
            for _ in range(4):
                meter.update(train(batch()).item())
                ckpt.step(step)
                step += 1
        """,
        before="""
        class Meter:
            def __init__(self):
                self.sum = self.count = self.mean = 0
            def update(self, value):
                self.sum += value
                self.count += 1
                self.mean = self.sum / self.count
        """,
        names=("meter.sum", "meter.count"),
        in_function=False,
    ),
    "weights of the best epoch, read behind the loop": Case(
        """
        for step in range(start, 8):
            loss = train(batch()).item()
            if loss < best:
                best = loss
                best_state = {name: value.clone() for name, value in model.state_dict().items()}
            ckpt.step(step, best=best)
        ckpt.settle()
        model.load_state_dict(best_state)
        """,
        before="best_state = {'bias': torch.zeros(2)}",
        between="best = ckpt.carry('best', 1e9); ckpt.settle = lambda: None",
        names=("best_state",),
    ),
    "names that every step sets, read behind the loop": Case(
        """
        for step in range(start, 8):
            for micro in range(2):
                loss = train(batch())
            if step % 2:
                shown = loss.item()
            else:
                shown = 0
            ckpt.step(step)
        print(loss.item(), shown)
        """
    ),
    "copy of the best model": Case(
        """
        for step in range(start, 8):
            train(batch())
            if step % 2:
                best_model = copy.deepcopy(model)
            ckpt.step(step)
        best_model(batch())
        """,
        before="import copy; best_model = copy.deepcopy(model)",
        names=("best_model",),
    ),
    "an object that is called": Case(
        """
        for step in range(start, 8):
            loss = train(batch()).item()
            if stop(loss, model):
                break
            ckpt.step(step)
        stop.load(model)
        """,
        before="""
        class Stop:
            def __init__(self, patience):
                self.patience, self.bad, self.best, self.weights = patience, 0, 1e9, None
            def __call__(self, loss, model):
                self.bad += 1
                if loss < self.best:
                    self.best, self.weights = loss, {name: value.clone() for name, value in model.state_dict().items()}
                return self.bad > self.patience
            def load(self, model):
                model.load_state_dict(self.weights)
        stop = Stop(99)
        """,
        names=("stop.bad", "stop.best", "stop.weights"),
        in_function=False,
    ),
    "counter of a forward pass": Case(
        """
        for step in range(start, 8):
            net(batch()).mean().backward()
            optimizer.step()
            ckpt.step(step)
        """,
        before="""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.calls, self.seen = model, 0, None
            def forward(self, x):
                self.calls += 1
                self.seen = x
                return self.inner(x) / self.calls
        net = Net()
        """,
        names=("net.calls",),
        in_function=False,
    ),
    "scheduler that steps behind step()": Case(
        """
        for step in range(start, 8):
            train(batch())
            ckpt.step(step)
            scheduler.step()
        """,
        before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)",
        given=", scheduler=scheduler",
        names=("scheduler",),
    ),
    "scheduler that steps behind step(), if it is time": Case(
        """
        step = start
        while step < 8:
            train(batch())
            if step % 2 == 0:
                ckpt.step(step)
            step += 1
            if step % 2 == 0:
                scheduler.step()
        """,
        before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)",
        given=", scheduler=scheduler",
        names=("scheduler",),
    ),
    "average that is updated behind step()": Case(
        """
        for step in range(start, 8):
            train(batch())
            ckpt.step(step)
            average.update_parameters(model)
            model.train()
        """,
        before="average = torch.optim.swa_utils.AveragedModel(model)",
        given=", average=average",
        names=("average",),
    ),
    "best loss that is found behind step()": Case(
        """
        for step in range(start, 8):
            loss = train(batch())
            ckpt.step(step, best=best, losses=losses, seen=seen + 1)
            seen += 1
            best = min(best, loss.item())
            losses.append(best)
        """,
        between="best, losses, seen = ckpt.carry('best', 1e9), ckpt.carry('losses', []), ckpt.carry('seen', 0)",
        names=("best", "losses"),
    ),
    "a step that is told by the next one": Case(
        """
        done = start - 1
        for step in range(start, 8):
            if step > start:
                ckpt.step(step - 1, best=best)
            best = min(best, train(batch()).item())
            scheduler.step()
        """,
        before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)",
        between="best = ckpt.carry('best', 1e9)",
        given=", scheduler=scheduler",
    ),
    "what a turn that is over shows, and lets go": Case(
        """
        for epoch in range(2):
            for number in range(4):
                loss = train(batch())
                ckpt.step(start, loss=loss)
                start += 1
                print(loss.item())
                loss = None
            scheduler.step()
        """,
        before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)",
        between="loss = ckpt.carry('loss', None)",
        given=", scheduler=scheduler",
    ),
    "state of an environment in arrays": Case(
        """
        for step in range(start, 8):
            seen = 0.9 * seen + np.ones(3) * train(batch()).item()
            top = np.float32(max(top, seen.max()))
            last = np.zeros(3)
            ckpt.step(step)
        """,
        between="seen, top = np.zeros(3), np.float32(0)",
        names=("seen", "top"),
    ),
    "generator of a dataset": Case(
        """
        for step in range(start, 3):
            for x in loader:
                train(x)
            ckpt.step(step)
        """,
        before="""
        class Noise(torch.utils.data.Dataset):
            def __init__(self):
                self.rng, self.own = np.random.default_rng(3), random.Random(1)
            def __len__(self):
                return 6
            def __getitem__(self, at):
                return torch.from_numpy(self.rng.normal(size=4)).float() * self.own.random()
        data = Noise()
        loader = torch.utils.data.DataLoader(data, 3)
        """,
        given=", loader=loader, own=data.own",
        names=("loader.dataset.rng",),
    ),
    "counts of a dataset": Case(
        """
        for step in range(start, 3):
            for x in loader:
                train(x)
            ckpt.step(step)
        """,
        before="""
        class Ramp(torch.utils.data.Dataset):
            def __init__(self):
                self.taken, self.asked = 0, 0
            def __len__(self):
                self.asked += 1
                return 6
            def __getitem__(self, at):
                self.taken += 1
                return torch.full((4,), 0.1 * self.taken)
        loader = torch.utils.data.DataLoader(Ramp(), 3)
        """,
        given=", loader=loader",
        names=("loader.dataset.taken",),
    ),
    "generator of a sampler": Case(
        """
        for step in range(start, 3):
            for x, in loader:
                train(x)
            ckpt.step(step)
        """,
        before="""
        class Order(torch.utils.data.Sampler):
            def __init__(self):
                self.rng = random.Random(3)
            def __len__(self):
                return 6
            def __iter__(self):
                return iter(self.rng.sample(range(40), 6))
        loader = torch.utils.data.DataLoader(rows, 3, sampler=Order())
        """,
        given=", loader=loader",
        names=("loader.sampler.rng",),
    ),
    "another loader from one epoch on": Case(
        """
        for epoch in range(start, 4):
            if epoch == 2:
                loader = torch.utils.data.DataLoader(rows, 8)
            for x, in loader:
                train(x)
            ckpt.step(epoch)
        """,
        before="loader = torch.utils.data.DataLoader(rows, 4)",
        given=", loader=loader",
        names=("loader",),
    ),
    "another loader by the number of the epoch": Case(
        """
        for epoch in range(start, 4):
            if epoch >= 2:
                loader = torch.utils.data.DataLoader(rows, 8)
            for x, in loader:
                train(x)
            ckpt.step(epoch)
        """,
        before="loader = torch.utils.data.DataLoader(rows, 4)",
        given=", loader=loader",
    ),
    "layers that are freed in one step": Case(
        """
        for step in range(start, 8):
            if step == 3:
                free(model)
            train(batch())
            ckpt.step(step)
        """,
        before="""
        model.bias.requires_grad = False
        def free(module):
            for parameter in module.parameters():
                parameter.requires_grad = True
        """,
        names=("requires_grad",),
    ),
    "layers that are freed by the number of the step": Case(
        """
        for step in range(start, 8):
            model.bias.requires_grad_(step >= 3)
            if step == start:
                model.weight.requires_grad_(True)
            if step % 2 == 0:
                model.weight.requires_grad_(True)
            train(batch())
            ckpt.step(step)
        """
    ),
    "batches that are left out twice": Case(
        """
        for step, (x,) in enumerate(itertools.islice(loader, start, None), start):
            train(x)
            ckpt.step(step)
        """,
        before="loader = torch.utils.data.DataLoader(rows, 4)",
        given=", loader=loader",
        names=("loader",),
    ),
    "the first batches of a loader": Case(
        """
        for step, (x,) in enumerate(itertools.islice(loader, 8 - start), start):
            train(x)
            ckpt.step(step)
        """,
        before="loader = torch.utils.data.DataLoader(rows, 4)",
        given=", loader=loader",
    ),
    "what the first step alone has changed": Case(
        """
        for step in range(start, 8):
            train(batch())
            if step < best.at:
                best.at, weights = step, model.weight.clone()
            ckpt.step(step)
        print(best.at, weights)
        """,
        before="""
        class Best:
            at = 99
            def __init__(self):
                self.at = 99
        best, weights = Best(), None
        """,
        names=("best.at", "weights"),
        in_function=False,
    ),
    "what is set between restore() and the loop": Case(
        """
        for step in range(start, 8):
            if step > 99:
                rate = rate / 2
            train(batch() * rate)
            ckpt.step(step)
        """,
        between="rate = 0.1",
    ),
    "what the first step alone has changed, set behind restore()": Case(
        """
        for step in range(start, 8):
            train(batch())
            if step < at:
                at, weights = step, model.weight.clone()
            ckpt.step(step)
        print(at, weights)
        """,
        between="at = float('inf'); weights = None; step = 0",
        names=("at", "weights"),
    ),
    "a step that is told by a callback": Case(
        """
        for trainer.epoch in range(2):
            for number in range(4):
                loss = train(batch()).item()
                trainer.best = min(trainer.best, loss)
                trainer.mean = 0.9 * trainer.mean + loss
                scheduler.step()
                for callback in callbacks:
                    callback.behind(trainer)
        """,
        before="""
        class Trainer:
            best, mean = 1e9, 0.0
        class Saves:
            def behind(self, trainer):
                ckpt.step(trainer.number, best=trainer.best)
                trainer.number += 1
        trainer, callbacks = Trainer(), [Saves()]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        """,
        between="trainer.best, trainer.mean, trainer.number = ckpt.carry('best', trainer.best), 0.0, start",
        names=("trainer.mean", "scheduler"),
        in_function=False,
    ),
    "a step that is told by a method of the one with the loop": Case(
        """
        class Trainer:
            def __init__(self):
                self.number, self.losses, self.shown = start, [], 0
            def behind(self, loss):
                self.shown = loss
                ckpt.step(self.number)
                self.number += 1
            def fit(self):
                while self.number < 8:
                    loss = train(batch()).item()
                    self.losses.append(loss)
                    self.behind(loss)
        Trainer().fit()
        """,
        names=("self.losses",),
        in_function=False,
    ),
    "epochs in the function that calls the one with the batches": Case(
        """
        def epoch(loader, step):
            total = 0
            for x, in loader:
                total += train(x).item()
                ckpt.step(step)
                step += 1
            return step, total
        def fit(step):
            best, history, shown = 1e9, [], 0
            for number in range(2):
                step, value = epoch(loader, step)
                best = min(best, value)
                scheduler.step()
                shown = value
                for _ in range(2):
                    print(shown, best)
        fit(start)
        """,
        before="""
        loader = torch.utils.data.DataLoader(rows, 8)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        """,
        given=", loader=loader",
        names=("total", "best", "scheduler"),
        in_function=False,
    ),
    "trainings one after the other, each with lines of its own": Case(
        """
        def fit(rate):
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            ckpt = Checkpointer("y", model=model, optimizer=optimizer)
            for step in range(ckpt.restore(), 4):
                loss = model(batch()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step(step)
            return loss.item()
        best, results, number = None, [], 0
        for rate in (0.1, 0.2, 0.3):
            found = fit(rate)
            if best is None or found < best[0]:
                best = found, rate
            results.append(found)
            number += 1
        last = None
        for fold in range(3):
            own = Checkpointer("z", model=model, optimizer=optimizer)
            for step in range(own.restore(), 4):
                train(batch())
                own.step(step)
            last = fold if last is None else last + fold
        """,
        in_function=False,
    ),
    "order that is shuffled in place": Case(
        """
        for epoch in range(start, 4):
            random.shuffle(order)
            np.random.shuffle(places)
            fresh = list(range(9))
            random.shuffle(fresh)
            for at in order:
                train(batch() * at)
            ckpt.step(epoch)
        """,
        between="order, places = [1, 2, 3, 4, 5, 6, 7, 8], np.arange(9)",
        names=("order", "places"),
    ),
    "labels and weights that an epoch leaves to the next one": Case(
        """
        for epoch in range(start, 4):
            data.epoch = epoch
            for x, label, at in loader:
                train(x * label)
            data.labels = torch.rand(8)
            sampler.weights = sampler.weights * torch.rand(8)
            data.shown = torch.rand(2)
            ckpt.step(epoch, shown=data.shown)
        """,
        before="""
        class Data(torch.utils.data.Dataset):
            def __init__(self):
                self.labels, self.epoch, self.shown = torch.ones(8), 0, torch.zeros(2)
            def __len__(self):
                return 8
            def __getitem__(self, at):
                return torch.ones(4), self.labels[at], at + self.epoch
        data, sampler = Data(), torch.utils.data.WeightedRandomSampler(torch.ones(8), 8)
        loader = torch.utils.data.DataLoader(data, 4, sampler=sampler)
        """,
        between="data.shown = ckpt.carry('shown', data.shown)",
        given=", loader=loader",
        names=("data.labels", "sampler.weights"),
        in_function=False,
    ),
    "momenta that a loop of their own changes": Case(
        """
        for step in range(start, 8):
            model.zero_grad()
            model(batch()).square().mean().backward()
            with torch.no_grad():
                for parameter, momentum in zip(weights, momenta):
                    momentum.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(0.1 * momentum)
                for value in [torch.zeros(1)]:
                    value.add_(1)
            ckpt.step(step)
        """,
        before="weights = list(model.parameters()); momenta = [torch.zeros_like(p) for p in weights]",
        names=("momenta",),
    ),
    "sampler that counts its epochs": Case(
        """
        for epoch in range(start, 4):
            settable.set_epoch(epoch)
            for (x,), (y,) in zip(loader, other):
                train(x)
            ckpt.step(epoch)
        """,
        before="""
        class Order(torch.utils.data.Sampler):
            def __init__(self):
                self.epoch, self.asked = 0, 0
            def __len__(self):
                self.asked += 1
                return 6
            def __iter__(self):
                self.epoch += 1
                return iter(random.Random(self.epoch).sample(range(40), 6))
        class Settable(Order):
            def set_epoch(self, epoch):
                self.epoch = epoch
        settable = Settable()
        loader = torch.utils.data.DataLoader(rows, 3, sampler=Order())
        other = torch.utils.data.DataLoader(rows, 3, sampler=settable)
        """,
        given=", loader=loader, other=other",
        names=("loader.sampler.epoch",),
    ),
}
