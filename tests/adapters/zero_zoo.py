"""Scripts that know nothing of holdfast, each with one habit of real ones; killed once at `die(...)`. Not tests themselves.

A case is what stands before the loop, in it and behind it, what the loop counts, and what is expected: `KEPT` if the second
life goes on where the first was killed, else a part of the sentence that says why nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent, indent

KEPT = "kept"

HEAD = """
import argparse, collections, copy, enum, functools, itertools, math, os, random, sys
import numpy as np
import torch

def die(at, when=5):
    if at == when and not os.path.exists(os.environ["MARK"]):
        open(os.environ["MARK"], "w").close()
        os.kill(os.getpid(), 9)

random.seed(1), np.random.seed(1), torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
STEP = """
loss = model(torch.randn(2, 4)).square().mean() * {scale}
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""
TAIL = """
print("END", {shown}, [p.tolist() for p in model.parameters()])
"""

# A class whose objects are made in the loop.
BEST = (
    "class Best:\n    made = 0\n    def __init__(self, loss):\n        Best.made += 1\n"
    "        self.loss, self.steps, self.rows = loss, 1, [loss]\n"
)

# A module with a loop, and a script that calls it.
TRAINER = """
import os, sys
import torch

trained, seen = 0, 1

def count():
    global seen
    seen += 1
    return seen

class Trainer:
    def __init__(self, model, optimizer, loader, die, note=None):
        self.model, self.optimizer, self.loader, self.die, self.note = model, optimizer, loader, die, note

    def batch(self, x, epoch):
        loss = self.model(x).square().mean() * SCALE
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def epoch(self, epoch):
        number = 1
        for i, (x,) in enumerate(self.loader):
            sys.stderr.write(f"made {4 * epoch + i}\\n")
            self.batch(x, epoch * number)
            self.die(4 * epoch + i, 5)

    def train(self):
        global trained
        trained += 1
        for epoch in range(3):
            self.epoch(epoch)
"""
TRAINS = """
import helper
from torch.utils.data import DataLoader, TensorDataset
note = globals().get("note")
trainer = helper.Trainer(model, optimizer, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2, shuffle=True), die, note)
trainer.train()
print("END", [p.tolist() for p in model.parameters()])
"""


@dataclass(frozen=True)
class Case:
    """One script.

    Attributes:
        expected: KEPT, or why not.
        pre, body, post: before, in and behind the loop.
        head, step: of the body, instead of the usual ones.
        scale: what the loss is multiplied with.
        shown: what is printed at the end.
        counts: what the loop counts.
        when: the step at whose end the script is killed; -1: it kills itself elsewhere.
        whole: the script, if it is none of this shape; `die` stands before it.
        again: variables of the environment for the second life, and for the run that it is compared with.
        helper: text of a module of the user's, `helper.py`.
        packaged: the directory of that module, with the script in `scripts` beside it; empty if both lie together.
        threads: of torch; with more than one nothing is rehearsed.
    """

    expected: str = KEPT
    pre: str = ""
    body: str = ""
    post: str = ""
    head: str = HEAD
    step: str = STEP
    scale: str = "1"
    shown: str = "0"
    counts: str = "range(10)"
    when: int = 5
    whole: str = ""
    again: tuple[tuple[str, str], ...] = ()
    helper: str = ""
    packaged: str = ""
    threads: int = 1

    def text(self) -> str:
        if self.whole:
            return HEAD + dedent(self.whole)
        body = 'sys.stderr.write(f"made {step}\\n")\n' + dedent(self.step.replace("{scale}", self.scale))
        body += dedent(self.body) + f"\ndie(step, {self.when})\n"
        loop = f"for step in {self.counts}:\n" + indent(body, "    ")
        return f"{self.head}{dedent(self.pre)}\n{loop}\n{dedent(self.post)}{TAIL.replace('{shown}', self.shown)}"


CASES: dict[str, Case] = {
    "plain": Case(shown="step, loss.item()"),
    # Names that functions change.
    "global counter": Case(
        pre="seen, scale = 0, 1.0\ndef count():\n    global seen, scale\n    seen += 2; scale *= 0.9",
        body="count()", scale="scale", shown="seen, scale",
    ),
    "global in nested calls": Case(
        pre="n = 1\ndef inner():\n    global n\n    n *= 2\ndef outer():\n    inner()", body="outer()", scale="n", shown="n"
    ),
    "global by globals()": Case(pre="n = 1.0", body='globals()["n"] = n + 1', scale="n", shown="n"),
    "global set in the loop, read in a function": Case(
        pre="rate = 1.0\ndef loss_of(x):\n    return x.square().mean() * rate",
        step=STEP.replace("model(torch.randn(2, 4)).square().mean()", "loss_of(model(torch.randn(2, 4)))"),
        body="rate = 1.0 / (step + 1)", shown="rate",
    ),
    "global read in a lambda": Case(
        pre="rate = 1.0\nweigh = lambda x: x * rate", scale="weigh(1.0)", body="rate = 0.5 + step", shown="rate"
    ),
    "tensor of which another one is a part": Case(
        "and cannot be carried to a restart: 'holder.a' has a part of it",
        pre="holder = argparse.Namespace(a=torch.zeros(2))\nholder.b = holder.a[:1]", body="holder.a += 1",
        scale="(1 + holder.b.item())", shown="holder.b",
    ),
    # Text that is executed before the loop.
    "settings by exec": Case(
        pre="rate, best = 0.1, None\nexec('rate = 0.2')\nsettings = {k: globals()[k] for k in [k for k, v in globals().items() if k == 'rate']}",
        body="best = [p.detach().clone() for p in model.parameters()]", scale="(rate + settings['rate'])", shown="settings",
    ),
    "function made by exec that reads what the loop sets": Case(
        "function made of text that reads 'best'", pre="best = None\nexec('def scale():\\n    return 1.0 if best is None else 1 + best[0]')",
        body="best = [step]", scale="scale()",
    ),
    "function made by exec that evaluates": Case(
        "function made of text that reads 'eval'", pre="best = None\nexec('def scale():\\n    return 1.0 if eval(\"best\") is None else 1 + eval(\"best\")[0]')",
        body="best = [step]", scale="scale()",
    ),
    "lambda made by eval": Case(
        pre="best = 1.0\nscale = eval('lambda: best')", body="best = 1.0 + step", scale="scale()", shown="best",
    ),
    "dataclass with a field of a name of the loop": Case(
        pre="from dataclasses import dataclass\n@dataclass\nclass Result:\n    loss: float = 1.0\n    x: int = 2\nresult = Result()",
        body="x = step\nresult.loss = loss.item()", scale="(1 + result.loss)", shown="result.loss, x",
    ),
    "name that was read before the loop": Case(
        pre="best = {'n': torch.zeros(1)}\nstart = best['n']\nbest = None",
        body="if step % 3 == 1:\n    best = {'state': {k: v.clone() for k, v in model.state_dict().items()}}\n    seen = len(best)",
        when=6,
    ),
    "name that a generator made before the loop reads": Case(
        pre="best = {'n': torch.zeros(1)}\nlater = (best for _ in range(9))",
        body="if step == 2:\n    best = {'n': torch.ones(1)}", post="print('END', next(later)['n'].item())", when=6,
    ),
    # Loops in a module beside the script.
    "loop of a module": Case(helper=TRAINER.replace("SCALE", "1"), whole=TRAINS),
    "loop of a module, with a number of its own": Case(
        helper=TRAINER.replace("SCALE", "count()"), whole=TRAINS + "print('END', helper.seen)\n"
    ),
    "loop of a module, with a function of the script": Case(
        helper=TRAINER.replace("SCALE", "self.note(epoch)"),
        whole="total = 1.0\ndef note(epoch):\n    global total\n    total += 0.25\n    return total\n" + TRAINS + "print('END', total)\n",
    ),
    "loop of a module, with a list of a function of the script": Case(
        helper=TRAINER.replace("SCALE", "len(self.rows.append(epoch) or self.rows)"),
        whole=TRAINS.replace("trainer = ", "def main():\n    rows = []\n    global trainer\n    trainer = ").replace(
            "trainer.train()", "    trainer.rows = rows\n    trainer.train()\n    print('END', rows)\nmain()"
        ),
    ),
    "loop of a package on the path": Case(
        helper=TRAINER.replace("SCALE", "count()"), whole=TRAINS + "print('END', helper.seen)\n", packaged="src"
    ),
    "loop of a module, with an iterator of the module": Case(
        "nobody can be sure what 'scales', a count",
        helper="import itertools\nscales = itertools.count(1)\n" + TRAINER.replace("SCALE", "next(scales)"), whole=TRAINS,
    ),
    "loop of a module, with data of the module that is another at the second start": Case(
        "'order' is another one than in the run that saved",
        helper="import random\norder = random.Random().sample(range(100), 100)\n" + TRAINER.replace("SCALE", "len(order)"), whole=TRAINS,
    ),
    "loop of a module, whose version does not fit": Case(
        "was made before the loop", helper=TRAINER.replace("SCALE", "(1 + epoch)").replace("        number = 1\n", "        number = int(os.environ.get('N', 1))\n"),
        whole=TRAINS + "print('END', helper.trained)\n", again=(("N", "2"),),
    ),
    # Tensors with a graph in attributes.
    "loss with its graph in an attribute": Case(
        pre="holder = argparse.Namespace()", body="holder.loss = loss", shown="holder.loss.item(), holder.loss.requires_grad", when=5
    ),
    "loss with its graph in an attribute, summed": Case(
        pre="holder = argparse.Namespace(loss=0, seen=0.0)", body="holder.seen += float(holder.loss); holder.loss = loss", scale="(1 + holder.seen)",
        shown="holder.seen",
    ),
    "loss with its graph in an attribute, not rehearsed": Case(
        "lives from one turn to the next with its graph, and the first steps are not rehearsed",
        pre="holder = argparse.Namespace()", body="holder.loss = loss", shown="holder.loss.item()", threads=2,
    ),
    "loss with its graph in an attribute, graphs are retained": Case(
        "and the script retains graphs", pre="holder = argparse.Namespace()",
        step=STEP.replace("backward()", "backward(retain_graph=True)"), body="holder.loss = loss", shown="holder.loss.item()",
    ),
    "hidden state with its graph, that is cut by who reads it": Case(
        pre="holder = argparse.Namespace(h=torch.zeros(4))", step=STEP.replace("loss = model(torch.randn(2, 4))", "holder.h = model(torch.randn(2, 4) + holder.h.detach()).sum(0)\nloss = holder.h"),
        shown="holder.h.tolist()",
    ),
    "output that keeps its gradient for the next turn": Case(
        "cannot be carried to a restart", pre="holder = argparse.Namespace(out=None)", scale="(1 if holder.out is None else 1 + holder.out.grad.sum().item())",
        step="scale = {scale}\nholder.out = model(torch.randn(2, 4)); holder.out.retain_grad()\nloss = holder.out.square().mean() * scale\n"
        "optimizer.zero_grad()\nloss.backward()\noptimizer.step()\n",
    ),
    "sum of losses with all their graphs": Case(
        pre="holder = argparse.Namespace(total=0.0)", body="holder.total = holder.total + loss", shown="float(holder.total)",
    ),
    "penalty of the turn before in an attribute": Case(
        "lives from one turn to the next with its graph", pre="holder = argparse.Namespace(penalty=0)",
        step=STEP.replace("* {scale}", "* {scale} + holder.penalty"), body="holder.penalty = (model[0].weight * 0.1).sum()",
    ),
    "penalty of the turn before under a name, with a file that is written": Case(
        "lives from one turn to the next with its graph", pre="penalty = 0",
        step=STEP.replace("* {scale}", "* {scale} + penalty") + "open(os.environ['MARK'] + '.log', 'a').close()\n", body="penalty = (model[0].weight * 0.1).sum()",
    ),
    # Objects that come to be in the loop.
    "object that comes to be": Case(
        pre=BEST + "holder = argparse.Namespace(best=None)",
        body="if step == 3:\n    holder.best = Best(loss.item())\nif step > 3:\n    holder.best.steps += 1; holder.best.rows.append(step)",
        scale="(1 if holder.best is None else holder.best.steps + len(holder.best.rows))",
        shown="vars(holder.best), Best.made", when=6,
    ),
    "object that is made anew in every step": Case(
        pre=BEST + "holder = argparse.Namespace(best=None)", body="holder.best = Best(loss.item())",
        scale="(1 if holder.best is None else 1 + holder.best.loss)", shown="vars(holder.best), Best.made",
    ),
    "object in an object that comes to be": Case(
        pre=BEST + "holder = argparse.Namespace(best=None)",
        body="if step == 3:\n    holder.best = Best(1.0); holder.best.inner = Best(2.0)\nif step > 3:\n    holder.best.inner.loss += 1",
        scale="(1 if holder.best is None else holder.best.inner.loss)", shown="vars(holder.best.inner), Best.made",
    ),
    "object with slots that comes to be": Case(
        pre="class Best:\n    __slots__ = ('loss',)\nholder = argparse.Namespace(best=None)",
        body="if step == 3:\n    holder.best = Best(); holder.best.loss = 2.0",
        scale="(1 if holder.best is None else holder.best.loss)", shown="holder.best.loss",
    ),
    "object that comes to be and goes": Case(
        pre=BEST + "holder = argparse.Namespace(best=None)",
        body="holder.best = Best(1.0) if step % 4 == 1 else None", scale="(2 if holder.best is None else 1)", shown="Best.made",
        when=6,
    ),
    "object that comes to be under two names": Case(
        "another name of", pre=BEST + "holder = argparse.Namespace(best=None, last=None)",
        body="if step == 3:\n    holder.best = holder.last = Best(1.0)\nif step > 3:\n    holder.best.loss += 1",
        scale="(1 if holder.last is None else holder.last.loss)", shown="holder.last.loss", when=6,
    ),
    "object that comes to be, of a class made in the loop": Case(
        "'holder.best' came to be in the loop", pre="holder = argparse.Namespace(best=None)\ndef make():\n    class Best: loss = 3\n    return Best()",
        body="if step == 3:\n    holder.best = make()", scale="(1 if holder.best is None else holder.best.loss)", when=6,
    ),
    "object that comes to be with a model": Case(
        "came to be in the loop", pre=BEST + "holder = argparse.Namespace(best=None)",
        body="if step == 3:\n    holder.best = Best(1.0); holder.best.model = copy.deepcopy(model)",
        scale="(1 if holder.best is None else holder.best.model[0].weight.abs().sum().item())", when=6,
    ),
    "object that comes to be with a list of somebody else": Case(
        "restart would make two of one", pre=BEST + "rows = [1.0]\nholder = argparse.Namespace(best=None)",
        body="if step == 3:\n    holder.best = Best(1.0); holder.best.rows = rows\nif step > 3:\n    rows.append(1.0)",
        scale="(1 if holder.best is None else len(holder.best.rows))", when=6,
    ),
    "object that comes to be with a hook": Case(
        "hook", pre="class Scale:\n    def __init__(self, n): self.n = n\n    def __call__(self, m, i, o): return o * self.n\n"
        "holder = argparse.Namespace(scale=None)",
        body="if step == 3:\n    holder.scale = Scale(2.0); model.register_forward_hook(holder.scale)", when=6,
    ),
    "identity that lives on": Case(
        "holds the identity of 'model.", pre="last = 0", threads=2,
        body="optimizer.param_groups[0]['lr'] = 0.1 if last in (0, id(model[0].bias)) else 0.2\nlast = id(model[0].bias)",
    ),
    "closure with nonlocal": Case(
        pre="def make():\n    n = 1.0\n    def scale():\n        nonlocal n\n        n += 0.5\n        return n\n    return scale\n"
        "scale = make()",
        scale="scale()", shown="scale()",
    ),
    "closure over a list": Case(
        pre="def make():\n    seen = []\n    def add(x):\n        seen.append(x)\n        return len(seen)\n    return add\n"
        "add = make()",
        scale="add(step)", shown="add(0)",
    ),
    "closure over an iterator": Case(
        "iterator", pre="def make():\n    it = iter(range(99))\n    return lambda: next(it)\nnext_one = make()", scale="next_one()"
    ),
    "default argument that grows": Case(
        pre="def f(x, seen=[]):\n    seen.append(x)\n    return len(seen)", scale="f(step)", shown="f(0)"
    ),
    "default argument that counts": Case(
        pre='def f(*, c={"n": 0}):\n    c["n"] += 1\n    return c["n"]', scale="f()", shown="f()"
    ),
    "default argument that is an iterator": Case("range_iterator", pre="def f(it=iter(range(99))):\n    return next(it)", scale="f()"),
    "attribute of a function": Case(
        pre="def f():\n    f.calls += 1\n    return f.calls\nf.calls = 0", scale="f()", shown="f.calls"
    ),
    "attribute of a function that comes late": Case(
        pre="def f():\n    f.calls = getattr(f, 'calls', 0) + 1\n    return f.calls", scale="f()", shown="f.calls"
    ),
    "lambda over a dict": Case(
        pre='state = {"n": 1}\nbump = lambda: state.update(n=state["n"] + 1)', body="bump()", scale='state["n"]', shown="state"
    ),
    "partial over a dict": Case(
        pre='def bump(s):\n    s["n"] += 1\nstate = {"n": 1}\nbump_it = functools.partial(bump, state)',
        body="bump_it()", scale='state["n"]', shown="state",
    ),
    "partial over an iterator": Case("iterator", pre="take = functools.partial(next, iter([*range(99)]))", scale="take()"),
    "method of a list under a name": Case(
        pre="history = []\nlog = history.append", body="log(loss.item())", shown="history"
    ),
    "counter in a hook of the model": Case(
        pre="calls = [0]\ndef hook(*_):\n    calls[0] += 1\nmodel.register_forward_hook(hook)",
        scale="calls[0]", shown="calls",
    ),
    "counter in a hook of a parameter": Case(
        pre="def make():\n    n = 0\n    def hook(g):\n        nonlocal n\n        n += 1\n        return g * n\n    return hook\n"
        "model[0].weight.register_hook(make())",
    ),
    "counter in a hook of all optimizers": Case(
        pre="def make():\n    n = [0]\n    def hook(o, *_):\n        n[0] += 1\n        o.param_groups[0]['lr'] = 0.1 / (1 + n[0])\n"
        "    return hook\nfrom torch.optim.optimizer import register_optimizer_step_post_hook\n"
        "register_optimizer_step_post_hook(make())",
    ),
    "optimizer of the user's with a number": Case(
        pre="class Mine(torch.optim.SGD):\n    n = 0\n    def step(self, closure=None):\n        self.n += 1\n"
        "        self.param_groups[0]['lr'] = 0.1 / self.n\n        return super().step(closure)\n"
        "optimizer = Mine(model.parameters(), lr=0.1)", shown="optimizer.n",
    ),
    "counter in a hook of the optimizer": Case(
        pre="def make():\n    n = 0\n    def hook(*_):\n        nonlocal n\n        n += 1\n        for g in optimizer.param_groups:\n"
        "            g['lr'] = 0.1 / (1 + n)\n    return hook\noptimizer.register_step_post_hook(make())",
        shown="optimizer.param_groups[0]['lr']",
    ),
    # What is taken for a constant.
    "namespace that counts": Case(
        pre="args = argparse.Namespace(global_step=0, scale=1.0)",
        body="args.global_step += 1; args.scale *= 0.9", scale="args.scale", shown="args",
    ),
    "namespace by setattr": Case(
        pre="args = argparse.Namespace(n=1)", body='setattr(args, "n", args.n + 1)', scale="args.n", shown="args"
    ),
    "namespace with a new attribute": Case(
        pre="args = argparse.Namespace()", body="args.last = step", scale="getattr(args, 'last', 1)", shown="args"
    ),
    "namespace with a tuple": Case(pre="args = argparse.Namespace(p=(1, 2))", body="args.p = (step, 3)", scale="args.p[0]", shown="args"),
    "namespace with an iterator": Case("range_iterator", pre="args = argparse.Namespace(it=iter(range(99)))", scale="next(args.it)"),
    "namespace with a tensor": Case(
        pre="args = argparse.Namespace(ema=torch.zeros(4))", body="args.ema += model[0].bias.detach()",
        scale="(1 + args.ema.sum().item())",
    ),
    "namespace in a namespace": Case(
        pre="args = argparse.Namespace(run=argparse.Namespace(n=1))", body="args.run.n += 1", scale="args.run.n", shown="args"
    ),
    "item of a dict": Case(pre='cfg = {"n": 1}', body='cfg["n"] += 1', scale='cfg["n"]', shown="cfg"),
    "item of a dict in a dict, beside a function": Case(
        pre='cfg = {"opt": {"n": 1}, "f": len}', body='cfg["opt"]["n"] += 1', scale='cfg["opt"]["n"]', shown='cfg["opt"]'
    ),
    "dict that loses a key": Case(
        pre='cfg = {"warm": 1, "f": len}', body='cfg.pop("warm", None)', scale='(2 if "warm" in cfg else 1)', shown='"warm" in cfg'
    ),
    "class attribute": Case(pre="class C:\n    n = 1", body="C.n += 1", scale="C.n", shown="C.n"),
    "class attribute by a class method": Case(
        pre="class C:\n    n = 1\n    @classmethod\n    def up(cls):\n        cls.n += 1", body="C.up()", scale="C.n", shown="C.n"
    ),
    "class attribute that is a list": Case(
        pre="class C:\n    seen = []\n    @staticmethod\n    def add(x):\n        C.seen.append(x)",
        body="C.add(step)", scale="(1 + len(C.seen))", shown="C.seen",
    ),
    "object of the user's class": Case(
        pre="class Meter:\n    n = 0\nmeter = Meter()", body="meter.n += 1", scale="(1 + meter.n)"
    ),
    "phase that is an enumeration": Case(
        "args.phase", pre="class P(enum.Enum):\n    A = 1\n    B = 2\nargs = argparse.Namespace(phase=P.A)",
        body="if step == 3: args.phase = P.B", scale="args.phase.value",
    ),
    "rare change that cannot be carried": Case(
        "args.t", pre="args = argparse.Namespace(t=[torch.ones(2), torch.ones(2, 2).t()])", body="if step == 7: args.t[0].mul_(2)", scale="args.t[0].sum()", when=8
    ),
    "rare change of a constant": Case(
        pre="args = argparse.Namespace(scale=1.0)", body="if step == 4: args.scale = 0.5", scale="args.scale", shown="args"
    ),
    # Containers.
    "list that grows": Case(pre="history = [0.5]", body="history.append(loss.item())", scale="history[-1]", shown="history"),
    "long list that grows": Case(pre="history = [0] * 5000", body="history.append(step)", scale="len(history)", shown="history[-9:]"),
    "list beside another name for it": Case(
        pre='history = []\nstate = {"h": history, "f": len}', body="history.append(step)", shown='state["h"]'
    ),
    "two lists become one": Case(
        "another name of a", pre="a, b = [1], [1]\ndef join():\n    global b\n    b = a", body="if step == 3: join()\nb.append(step)", scale="len(a)"
    ),
    "list that another one takes the place of": Case(
        pre="a, b = [1], [2]\ndef swap():\n    global b\n    b = [*b, step]", body="swap()", scale="len(b)", shown="a, b"
    ),
    "dict with tuples for keys": Case(
        "seen", pre="seen = {(0, 0): 0, (1, 1): 0}\ndef see():\n    seen[(1, 1)] += 1", body="see()", scale="(1 + seen[(1, 1)])"
    ),
    "flag in a long list": Case(pre="seen = [False] * 9000", body="seen[17 * step + 1] = True", scale="(1 + sum(seen))", shown="sum(seen)"),
    "row in a long list of lists": Case(
        "too large", pre="rows = [[0] for _ in range(20000)]", body="rows[step + 1].append(1)\nrows.reverse()\nrows.reverse()",
        scale="(1 + sum(map(len, rows)))",
    ),
    "long list of rows that nobody changes": Case(pre="rows = [{'x': i} for i in range(9000)]", scale="rows[step]['x']"),
    "dict of the user's with attributes": Case(
        pre="class Cfg(dict):\n    pass\ncfg = Cfg(a=1)\ncfg.n = 1", body="cfg.n += 1\ncfg['a'] += 1", scale="(cfg.n + cfg['a'])",
        shown="cfg.n, cfg",
    ),
    "number of a class of its own": Case(
        "args.n", pre="class N(int):\n    pass\nargs = argparse.Namespace(n=N(1))", body="args.n = N(args.n + 1)", scale="args.n"
    ),
    "array in a namespace, one element": Case(
        "args.a", pre="args = argparse.Namespace(a=np.zeros(20000))", body="args.a[step * 7 + 3] = 1", scale="(1 + args.a.sum())"
    ),
    "bytes that change": Case(
        "args.b", pre="args = argparse.Namespace(b=bytearray(3), f=len)", body="args.b[0] += 1", scale="(1 + args.b[0])"
    ),
    "deque": Case(pre="last = collections.deque([1.0], maxlen=3)", body="last.append(loss.item())", scale="sum(last)", shown="last"),
    "defaultdict": Case(pre="c = collections.defaultdict(int)", body='c["n"] += 1', scale='(1 + c["n"])', shown="dict(c)"),
    "counter": Case(pre="c = collections.Counter()", body="c.update([step % 3])", scale="(1 + c[0])", shown="c"),
    "set": Case(pre="c = {1}", body="c.add(step)", scale="len(c)", shown="sorted(c)"),
    "list of tensors that grows": Case(
        pre="kept_losses = []", body="kept_losses.append(loss.detach())", scale="(1 + len(kept_losses))"
    ),
    "averaged weights in a dict": Case(
        pre="ema = {k: v.clone() for k, v in model.state_dict().items()}",
        body="for k, v in model.state_dict().items(): ema[k].mul_(0.9).add_(v, alpha=0.1)", scale="(1 + ema['0.bias'].sum())",
    ),
    "tensor changed in place": Case(pre="total = torch.zeros(4)", body="total.add_(model[0].bias.detach())", scale="(1 + total.sum())", shown="total"),
    "tensor added to": Case(
        pre="total = torch.zeros(4)", body="total += model[0].bias.detach()", scale="(1 + total.sum())"
    ),
    "tensor made anew": Case(pre="ema = torch.zeros(4)", body="ema = 0.9 * ema + model[0].bias.detach()", scale="(1 + ema.sum())"),
    "array changed in place": Case(
        pre="total = np.zeros(3)\ndef add():\n    total[step % 3] += 1", body="add()", scale="(1 + total.sum())"
    ),
    # Places in sequences.
    "generator": Case("generator", pre="batches = (i for i in range(99))", scale="next(batches)"),
    "iterator": Case("iterator", pre="batches = iter([*range(99)])", scale="next(batches)"),
    "counter of itertools": Case("count", pre="ids = itertools.count()", scale="(1 + next(ids))"),
    "cycle": Case("cycle", pre="batches = itertools.cycle([1.0, 2.0, 3.0])", scale="next(batches)"),
    "next of an iterator under a name": Case("iterator", pre="take = iter([*range(99)]).__next__", scale="take()"),
    "method of random.Random under a name": Case(pre="rand = random.Random(3).random", scale="rand()", shown="rand()"),
    "method of a hidden list under a name": Case(
        pre="def make():\n    seen = []\n    return seen.append, seen.__len__\nadd, count = make()", body="add(1)", scale="(1 + count())",
        shown="count()",
    ),
    "file": Case("TextIOWrapper", pre="lines = open(__file__)", body="lines.readline()"),
    "loader with a generator of its own": Case(
        pre="g = torch.Generator().manual_seed(3)\ndata = torch.utils.data.TensorDataset(torch.arange(8.0))\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=g)",
        scale="next(iter(loader))[0][0]", shown="g.get_state().sum()",
    ),
    "sampler with an epoch": Case(
        pre="data = torch.utils.data.TensorDataset(torch.arange(8.0))\n"
        "sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)",
        body="if step % 4 == 3: sampler.set_epoch(step)", scale="(1 + next(iter(sampler)))",
    ),
    "dataset with a counter": Case(
        pre="class D(torch.utils.data.Dataset):\n    n = 0\n    def __len__(self): return 4\n    def __getitem__(self, i):\n"
        "        self.n += 1\n        return self.n\ndata = D()",
        scale="data[0]", shown="data.n",
    ),
    "random numbers of all kinds": Case(scale="(random.random() + np.random.rand())", shown="random.random(), np.random.rand()"),
    "random.Random": Case(pre="r = random.Random(3)", scale="r.random()", shown="r.random()"),
    "RandomState": Case(pre="r = np.random.RandomState(3)", scale="r.rand()", shown="r.rand()"),
    "default_rng": Case(pre="r = np.random.default_rng(3)", scale="r.random()", shown="r.random()"),
    "torch.Generator": Case(
        pre="g = torch.Generator().manual_seed(3)", scale="torch.rand(1, generator=g)", shown="torch.rand(1, generator=g).item()"
    ),
    "torch.Generator in a closure": Case(
        pre="def make():\n    g = torch.Generator().manual_seed(3)\n    return lambda: torch.rand(1, generator=g).item()\nnoise = make()",
        scale="noise()", shown="noise()",
    ),
    # Statements.
    "walrus": Case(pre="n = 0", body="if (n := n + 1) > 3: pass", scale="(1 + n)", shown="n"),
    "walrus in a comprehension": Case(pre="n = 0", body="[n := n + i for i in range(3)]", scale="(1 + n)", shown="n"),
    "del of a name of the step": Case(body="extra = loss.item(); del extra"),
    "del of an earlier name": Case(pre="warm = 2", body="if step == 4: del warm", scale="(globals().get('warm', 1))"),
    "comprehension over an earlier name": Case(pre="n = 1", body="m = [n + i for i in range(2)]\nn = m[-1]", scale="n", shown="n"),
    "try and finally": Case(pre="n = 0", body="try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    n += len(str(e))\nfinally:\n    n += 1", scale="(1 + n)", shown="n"),
    "with": Case(pre="n = 0", body="with torch.no_grad():\n    n += model[0].bias.sum().item()", scale="(1 + n)", shown="n"),
    "match": Case(pre="last = 0", body="match step % 3:\n    case 0:\n        last = step\n    case other:\n        pass", scale="(1 + last)", shown="last"),
    "continue before a name": Case(pre="even = 0", body="die(step)\nif step % 2:\n    continue\neven = step", shown="even"),
    "name that only some steps set": Case(body="if step % 4 == 0: rare = step", shown="rare"),
    "name that no step set, read behind the loop": Case(
        body="if loss.item() < -1: rare = step", when=-1, post="die(0, 0)\ntry:\n    shown = rare\nexcept NameError:\n    shown = 'none'", shown="shown",
    ),
    "name of a function that no step has set yet": Case(
        whole="def main():\n    for step in range(10):\n        sys.stderr.write(f\"made {step}\\n\")\n"
        "        loss = model(torch.randn(2, 4)).square().mean()\n        optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "        if step == 7: rare = step\n        die(step)\n        try:\n            seen = rare\n        except UnboundLocalError:\n"
        "            seen = 'none'\n        print(step, seen) if step > 6 else None\n"
        "    print('END', seen, 'rare' in locals(), [p.tolist() for p in model.parameters()])\nmain()\n",
    ),
    "import in the loop": Case(body="import math as m\nn = m.sqrt(step)", shown="n"),
    "early break": Case(body="if step == 7: break", shown="step, loss.item()"),
    "early stopping": Case(
        pre="best, patience, bad = math.inf, 6, 0",
        body="if loss.item() < best:\n    best, bad = loss.item(), 0\nelse:\n    bad += 1\n    if bad > patience: break",
        shown="best, bad",
    ),
    "numbers that are no numbers": Case(pre="a, b, c = math.nan, -0.0, 1j", body="a, b, c = -a, -b, c * 1j", shown="repr(a), b, c"),
    "scalar of numpy": Case(pre="best = np.float64(9)", body="best = min(best, np.float64(loss.item()))", shown="best"),
    "text": Case(pre="told = ''", body="told += str(step)", scale="(1 + len(told))", shown="told"),
    "best loss as a tensor": Case(pre="best = 9.0", body="if loss < best: best = loss", scale="1", shown="float(best)"),
    "cached function": Case("_lru_cache_wrapper", pre="@functools.lru_cache\ndef f(x):\n    return x * 2", scale="f(step)"),
    # Behind the loop.
    "while behind the loop": Case(post="n = 3\nwhile n: n -= 1", shown="n, step"),
    "killed behind the loop": Case(post="die(0, 0)", when=-1),
    "killed behind the loop, number of the loss": Case(post="die(0, 0)", when=-1, shown="step, loss.item(), f'{loss:.9f}'"),
    "killed behind the loop, loss as it is": Case(post="die(0, 0)", when=-1, shown="loss"),
    "killed behind the loop with carried names": Case(
        pre="n = 0\ncfg = {'n': 0}", body="n += 1; cfg['n'] += 2", post="die(0, 0)", when=-1, shown="n, cfg"
    ),
    "killed behind a break": Case(body="if step == 7: break", post="die(0, 0)", when=-1, shown="step, loss.item()"),
    "killed in training behind the loop": Case(
        post="for _ in range(3): model(torch.randn(2, 4))\ndie(0, 0)\nprint('random', torch.rand(1))", when=-1
    ),
    # Where the loop begins and ends.
    "stride": Case(counts="range(0, 20, 2)", when=8, shown="step"),
    "backwards": Case(counts="range(10, 0, -1)", when=5, shown="step"),
    "from three on": Case(counts="range(3, 13)", when=7, shown="step"),
    "longer at the second time": Case(counts="range(int(os.environ.get('N', 10)))", again=(("N", "14"),), shown="step"),
    "shorter at the second time": Case("were done, and there are 4", counts="range(int(os.environ.get('N', 10)))", again=(("N", "4"),)),
    "other stride at the second time": Case("a range from 0 by 2", counts="range(0, 10, int(os.environ.get('N', 1)))", again=(("N", "2"),)),
    "resumes by itself": Case(
        "a range from 5 by 1",
        pre="first, file = 0, os.environ['MARK'] + '.own'\nif os.path.exists(file):\n    own = torch.load(file)\n"
        "    model.load_state_dict(own['model']); torch.set_rng_state(own['rng']); first = own['step'] + 1",
        body="if step == 4: torch.save({'model': model.state_dict(), 'rng': torch.get_rng_state(), 'step': step}, file)",
        counts="range(first, 10)", shown="step",
    ),
    "resumes by itself, far": Case(
        "a range from 5 by 1",
        pre="first, file = 0, os.environ['MARK'] + '.own'\nif os.path.exists(file):\n    own = torch.load(file)\n"
        "    model.load_state_dict(own['model']); torch.set_rng_state(own['rng']); first = own['step'] + 1",
        body="if step == 4: torch.save({'model': model.state_dict(), 'rng': torch.get_rng_state(), 'step': step}, file)",
        counts="range(first, 40)", when=25, shown="step",
    ),
    "resumes by itself and skips": Case(
        "'first' was 0",
        pre="first, file = 0, os.environ['MARK'] + '.own'\nif os.path.exists(file):\n    own = torch.load(file)\n"
        "    model.load_state_dict(own['model']); torch.set_rng_state(own['rng']); first = own['step'] + 1",
        step="if step < first: continue\n" + STEP.lstrip(),
        body="if step == 4: torch.save({'model': model.state_dict(), 'rng': torch.get_rng_state(), 'step': step}, file)",
        shown="step",
    ),
    "resumes a phase by itself": Case(
        "'args.phase' was 0",
        pre="args, file = argparse.Namespace(phase=0, first=0), os.environ['MARK'] + '.own'\nif os.path.exists(file):\n"
        "    own = torch.load(file)\n    model.load_state_dict(own['model']); torch.set_rng_state(own['rng'])\n"
        "    args.phase, args.first = 1, 5",
        step="if step < args.first: continue\n" + STEP.lstrip(),
        body="if step == 4:\n    args.phase = 1\n"
        "    torch.save({'model': model.state_dict(), 'rng': torch.get_rng_state(), 'step': step}, file)",
        shown="args.phase",
    ),
    "loop in a generator": Case("in a generator", whole="""
        def fit():
            for step in range(10):
                sys.stderr.write(f"made {step}\\n")
                loss = model(torch.randn(2, 4)).square().mean()
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                yield loss.item()
                die(step)
        def main():
            total = 0
            for loss in fit():
                total += loss
            print("END", total)
        main()
        """),
    "loop in a function that declares a global": Case(whole="""
        last = None
        def fit():
            global last
            for step in range(10):
                sys.stderr.write(f"made {step}\\n")
                loss = model(torch.randn(2, 4)).square().mean()
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                last = loss.item()
        fit()
        die(0, 0)
        print("END", last)
        """),
    "loop in a function": Case(whole="""
        def main():
            total = 0
            for step in range(10):
                sys.stderr.write(f"made {step}\\n")
                loss = model(torch.randn(2, 4)).square().mean() * (1 + total)
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                total += 1
                die(step)
            print("END", total, step, loss.item(), [p.tolist() for p in model.parameters()])
        main()
        """),
    "loop in a function with nonlocal": Case(whole="""
        def main():
            seen = 0
            history = []
            def count():
                nonlocal seen
                seen += 1
                history.append(seen)
            for step in range(10):
                sys.stderr.write(f"made {step}\\n")
                loss = model(torch.randn(2, 4)).square().mean() * (1 + seen)
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                count()
                die(step)
            die(0, 0)
            return seen, history, step
        print("END", main(), [p.tolist() for p in model.parameters()])
        """),
    "loop in a function that returns": Case(whole="""
        def fit(history, n):
            for step in range(n):
                sys.stderr.write(f"made {step}\\n")
                loss = model(torch.randn(2, 4)).square().mean()
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                history.append(loss.item())
                die(step)
            return loss.item()
        def main():
            history = []
            last = fit(history, 10)
            die(0, 0)
            print("END", history, last)
        main()
        """),
    "loop in a method": Case(whole="""
        class Trainer:
            n = 0
            def fit(self):
                for step in range(10):
                    sys.stderr.write(f"made {step}\\n")
                    loss = model(torch.randn(2, 4)).square().mean() * (1 + self.n)
                    optimizer.zero_grad(); loss.backward(); optimizer.step()
                    self.n += 1
                    die(step)
                print("END", self.n, [p.tolist() for p in model.parameters()])
        Trainer().fit()
        """),
    # Models and optimizers.
    "counter in forward": Case(
        pre="class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.body, self.calls = model, 0\n"
        "    def forward(self, x):\n        self.calls += 1\n        return self.body(x) * self.calls\n"
        "net = Net()",
        step=STEP.replace("model(", "net("), shown="net.calls",
    ),
    "tensor in forward": Case(
        pre="class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.body, self.memory = model, torch.zeros(4)\n"
        "    def forward(self, x):\n        self.memory = self.memory + x.detach().sum(0)\n        return self.body(x + self.memory)\n"
        "net = Net()",
        step=STEP.replace("model(", "net("),
    ),
    "buffer that is not saved": Case(
        "memory",
        pre="class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.body = model\n"
        "        self.register_buffer('memory', torch.zeros(4), persistent=False)\n"
        "    def forward(self, x):\n        self.memory += x.detach().sum(0)\n        return self.body(x + self.memory)\n"
        "net = Net()",
        step=STEP.replace("model(", "net("),
    ),
    "layer that is frozen later": Case(body="if step == 3: model[0].bias.requires_grad_(False)", shown="model[0].bias.requires_grad"),
    "dropout that is switched off later": Case(body="if step == 3: model.eval()", shown="model.training"),
    "parameters that come later": Case(
        "parameter groups", pre="more = torch.nn.Linear(4, 4)\n",
        body="if step == 3: optimizer.add_param_group({'params': list(more.parameters())})\nmore(torch.ones(4)).sum().backward()",
    ),
    "optimizer that keeps a number where it kept a tensor": Case(
        pre="torch.manual_seed(0)\nmodel = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()\n"
        "optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn='strong_wolfe')\n"
        "x = torch.randn(30, 3).double()\ny = (x ** 2).sum(1, keepdim=True)\ndef closure():\n    optimizer.zero_grad()\n"
        "    loss = (model(x) - y).square().mean() + 1e-4 * sum(p.square().sum() for p in model.parameters())\n"
        "    loss.backward()\n    return loss",
        step="loss = optimizer.step(closure)", shown="step, loss.item()",
    ),
    "settings whose attributes are their items": Case(
        pre="class Settings(dict):\n    __getattr__ = dict.__getitem__\n    __setattr__ = dict.__setitem__\n"
        "settings = Settings(n=1, of=Settings(m=2))",
        body="settings.n += 1\nsettings.of.m += step", scale="settings.n + settings.of.m", shown="settings",
    ),
    "gradients that are never cleared": Case(step=STEP.replace("optimizer.zero_grad()\n", "")),
    "gradients that are cleared late": Case(
        step="loss = model(torch.randn(2, 4)).square().mean() * {scale}\nloss.backward()\n"
        "if step % 2:\n    optimizer.step()\n    optimizer.zero_grad()\n", counts="range(14)", when=10,
    ),
    "gradients that are cleared sometimes": Case(
        step="loss = model(torch.randn(2, 4)).square().mean() * {scale}\nif step % 3 == 0:\n    optimizer.zero_grad()\n"
        "loss.backward()\noptimizer.step()\n",
    ),
    **{
        f"head that is used at times, zeroed {where} the step": Case(
            pre="model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
            step="loss = model[0](torch.randn(2, 4)).square().mean()\nif step < 6:\n"
            "    loss = loss + model[1](torch.randn(2, 4)).square().mean()\n"
            f"{before}loss.backward()\noptimizer.step()\n{behind}", when=8,
        )
        for where, before, behind in [
            ("before", "optimizer.zero_grad(set_to_none=False)\n", ""), ("behind", "", "optimizer.zero_grad(set_to_none=False)\n")
        ]
    },
    "zeroed gradients are read behind the loop": Case(
        step=STEP.replace("optimizer.zero_grad()\n", "") + "optimizer.zero_grad(set_to_none=False)\n", when=-1,
        post="die(0, 0)", shown="[p.grad.tolist() for p in model.parameters()]",
    ),
    "schedule in a closure": Case(
        pre="def make():\n    s = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)\n    return lambda: s.step()\nturn = make()",
        body="turn()", shown="optimizer.param_groups[0]['lr']",
    ),
    "schedule with a lambda that counts": Case(
        pre="n = [1]\ndef rate(step):\n    n[0] += 1\n    return 1 / n[0]\n"
        "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)",
        body="schedule.step()", shown="optimizer.param_groups[0]['lr'], n",
    ),
    "second optimizer in a closure": Case(
        "net.weight", pre="def make():\n    net = torch.nn.Linear(4, 1)\n    second = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)\n"
        "    def train(x):\n        second.zero_grad(); out = net(x).square().mean(); out.backward(); second.step()\n"
        "        return out.item()\n    return train\ntrain = make()",
        scale="(1 + train(torch.ones(2, 4)))",
    ),
    "sparse tensor that stays": Case(pre="graph = torch.eye(4).to_sparse()", scale="torch.sparse.mm(graph, graph).sum()"),
    "sparse tensor that changes": Case(
        "graph", pre="graph = torch.eye(4).to_sparse_csr()", body="graph.values().mul_(0.9)", scale="graph.sum().item()"
    ),
    # Other modules, and the process.
    "counter in a module of the user's": Case(
        helper="n = 1\ndef up():\n    global n\n    n += 1\n    return n\n", pre="import helper", scale="helper.up()", shown="helper.n"
    ),
    "function of a module of the user's": Case(
        helper="_n = 1\ndef up():\n    global _n\n    _n += 1\n    return _n\n", pre="from helper import up", scale="up()", shown="up()"
    ),
    "iterator in a module of the user's": Case(
        "helper", helper="_it = iter([*range(99)])\ndef up():\n    return next(_it)\n", pre="import helper", scale="helper.up()"
    ),
    "iterator behind a function of the user's": Case(
        "_it", helper="_it = iter([*range(99)])\ndef up():\n    return next(_it)\n", pre="from helper import up", scale="up()"
    ),
    "variable of the environment": Case(
        threads=2, pre="os.environ['N'] = '0'",
        body="os.environ['N'] = str(int(os.environ['N']) + 1)", scale="(1 + int(os.environ['N']))",
    ),
    "number in a module of a library": Case(
        "rehearsal of a restart differs in", pre="math.n = 0", body="math.n += 1", scale="(1 + math.n)"
    ),
    "clock that is read": Case(pre="import time\nlast = time.time()", body="took = time.time() - last; last = time.time()", shown="step"),
    "script that writes in its steps": Case(body="open(os.environ['MARK'] + '.log', 'a').write(f'{step}\\n')", shown="step"),
    # What the first steps do not show, where nothing is rehearsed.
    "attribute of a parameter": Case(
        threads=2, pre="def average(keep):\n    for p in model.parameters():\n"
        "        p.average = keep * getattr(p, 'average', torch.zeros_like(p)) + 1\naverage(0)", body="average(0.9)",
        scale="(1 + model[0].weight.average.sum().item())",
    ),
    "slots, one of them private": Case(
        threads=2, pre="class Meter:\n    __slots__ = ('n', '__m')\n    def __init__(self):\n        self.n = self.__m = 0\n"
        "    def up(self):\n        self.n += 1; self.__m += 2\n        return self.n + self.__m\nmeter = Meter()",
        scale="meter.up()", shown="meter.up()",
    ),
    "array as data": Case(pre="data = np.random.randn(8, 2).astype('float32')", scale="torch.from_numpy(data)[step % 8].sum()"),
    "list in another order at the second start": Case(
        "'letters' is another one than in the run that saved", again=(("AGAIN", "1"),),
        pre="letters = list('abc' if 'AGAIN' not in os.environ else 'cab')", scale="(1 + letters.index('b'))",
    ),
    "array that is another one at the second start": Case(
        "'data' is another one than in the run that saved", again=(("AGAIN", "1"),),
        pre="data = np.ones(4) * (2 if 'AGAIN' in os.environ else 1)", scale="data.sum()",
    ),
    "file that counts steps": Case(
        "is read in the loop and then written", threads=2, pre="path = os.environ['MARK'] + '.n'\nopen(path, 'w').write('0')",
        body="n = int(open(path).read())\nopen(path, 'w').write(str(n + 1))", scale="(1 + int(open(path).read()))",
    ),
    "working directory": Case("working directory", body="if step == 3: os.chdir('/')", shown="os.getcwd()"),
}  # fmt: skip
