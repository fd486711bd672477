"""More scripts for `zero_zoo.py`: habits that show only where the first steps are not rehearsed. Not tests themselves.

Torch has two threads in each, so the rehearsal that would find some of them is left out, as it is with several ranks and on
an accelerator: that nothing is wrong rests on what is looked at.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from textwrap import indent

from adapters.zero_zoo import KEPT, STEP, Case

PACKAGE = """
import torch

_n = 1.0

def up():
    global _n
    _n += 1
    return _n

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.temperature = torch.nn.Linear(4, 4), 1.0

    def forward(self, x):
        self.temperature *= 0.95
        return self.body(x) / self.temperature

class Annealed:
    def __init__(self):
        self.weight = 0.0

    def __call__(self):
        self.weight = min(1.0, self.weight + 0.1)
        return self.weight

annealed = Annealed()

def weight():
    return annealed()
"""
BESIDE = 'sys.path.insert(0, os.path.join(os.path.dirname(os.environ["MARK"]), "src"))\n'

# A file and a directory that the script makes itself, as ones of its own.
LOG = "path = os.environ['MARK'] + '.log'\nlog = open(path, 'w')\n"
OUT = "import glob, shutil\nout = os.environ['MARK'] + '.d'\nshutil.rmtree(out, ignore_errors=True); os.makedirs(out)\n"
WRITES, TRAINS_BY = "log.write('row\\n'); log.flush()", "goes into the training"
CLOCK = "import time\nsince = time.time()\n"

DDP = (
    "from torch import distributed as dist\ndist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    "model = torch.nn.parallel.DistributedDataParallel(model)\n"
)

CASES: dict[str, Case] = {
    # What a restart is told otherwise, and goes into the training.
    "place in a log": Case(
        f"'log.tell()' (line 20) {TRAINS_BY} (line 22)", pre=LOG, body=WRITES, scale="(1 + log.tell() / 100)"
    ),
    "end of a log": Case(TRAINS_BY, pre=LOG, body=WRITES, scale="(1 + log.seek(0, 2) / 100)"),
    "size of a log": Case(TRAINS_BY, pre=LOG, body=WRITES, scale="(1 + os.path.getsize(path) / 100)"),
    "size of a log of a path": Case(
        TRAINS_BY,
        pre=f"import pathlib\n{LOG}def rows():\n    return pathlib.Path(path).stat().st_size // 4",
        body=WRITES,
        scale="(1 + rows())",
    ),
    "lines of a log that is read back": Case(
        "a file, is written before the loop and in it, and read",
        pre=LOG,
        step=f"{WRITES}\nrows = len(open(path).readlines())\n{STEP}",
        scale="rows",
        body="",
    ),
    "lines of csv": Case(
        pre="import csv\nrows = csv.writer(open(os.environ['MARK'] + '.csv', 'a'))\n"
        "more = csv.DictWriter(open(os.environ['MARK'] + '.more', 'a'), ['step'])",
        body="rows.writerow([step])\nmore.writerow({'step': step})",
    ),
    "lines of csv in memory": Case(
        "'rows', a writer",
        pre="import csv, io\ntext = io.StringIO()\nrows = csv.writer(text)",
        body="rows.writerow([step])",
        shown="text.getvalue()",
    ),
    "lines of csv to an object": Case(
        "'rows', a writer",
        pre="import csv\nclass Sink:\n    n = 0\n    def write(self, text):\n        self.n += 1\n        return self.n\nrows = csv.writer(Sink())",
        scale="rows.writerow([step])",
    ),
    "list of two names that changes late": Case(
        "another name of 'best'",
        pre="best = [0]\nt = argparse.Namespace(box=best)",
        body="if step == 100: best = [1]\nif step >= 7: best.append(1)",
        scale="len(t.box)",
        shown="t.box, best",
    ),
    "dict of tensors of two names that changes late": Case(
        "'best' has a part of it",
        pre="best = {'w': torch.ones(4)}\nt = argparse.Namespace(box=best)",
        body="if step == 100: best = {}\nif step >= 7: best['w'].add_(1)",
        scale="t.box['w'].sum()",
        shown="t.box, best",
    ),
    "tensor of two names that changes late": Case(
        pre="h, c = torch.zeros(4), torch.zeros(4)",
        body="if step == 3: c = h + 1; h = c\nif step >= 7: c.add_(1)",
        scale="(1 + h.sum())",
        shown="h, c",
    ),
    "views of one memory under two names": Case(
        "'row' live from one turn to the next, share memory",
        pre="h = torch.zeros(2, 4)\nrow = h[0]",
        body="if step == 3: h = torch.ones(2, 4); row = h[0]\nif step >= 7: row.add_(1)",
        scale="(1 + h.sum())",
        shown="h, row",
    ),
    "views of one memory, written by a function of torch": Case(
        "'row' live from one turn to the next, share memory",
        pre="from torch import nn\nh = torch.zeros(2, 4)\nrow = h[0]",
        body="if step == 3: h = torch.ones(2, 4); row = h[0]\nif step >= 7: nn.init.constant_(h, step)",
        scale="(1 + row.sum())",
        shown="h, row",
    ),
    "views of one memory, written under a third name": Case(
        "'row' live from one turn to the next, share memory",
        pre="from torch import nn\nh = torch.zeros(2, 4)\nrow = h[0]",
        body="if step == 3: h = torch.ones(2, 4); row = h[0]\nif step >= 7: flat = h.view(-1); flat += 1",
        scale="(1 + row.sum())",
        shown="h, row",
    ),
    "view of a buffer": Case(
        "'row' lives from one turn to the next, and shares memory with an object that is kept by itself",
        pre="class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__(); self.body = model\n        self.register_buffer('seen', torch.zeros(4))\n"
        "    def forward(self, x):\n        self.seen.add_(0.1)\n        return self.body(x)\nmodel, row = Net(), torch.zeros(2)",
        body="if step == 3: row = model.seen[:2]",
        scale="(1 + row.sum())",
        shown="row",
    ),
    "view of data": Case(
        pre="data = torch.randn(20, 4)\nlast = data[:2]",
        body="last = data[step : step + 2]",
        scale="(1 + last.sum() + data.sum())",
        shown="last",
    ),
    "view of data that is written": Case(
        "'last' lives from one turn to the next, and shares memory with an object that is kept by itself",
        pre="data = torch.randn(20, 4)\nlast = data[:2]",
        body="if step == 2: last = data[2:4]\nif step >= 7: data[3] += 1",
        scale="(1 + last.sum() + data.sum())",
        shown="last",
    ),
    "gradient that the next one is written to": Case(
        "'last' lives from one turn to the next, and shares memory with an object that is kept by itself",
        pre="last = torch.zeros(4)",
        step=STEP.replace("zero_grad()", "zero_grad(set_to_none=False)"),
        body="if step == 3: last = model[0].bias.grad",
        scale="(1 + last.sum())",
        shown="last",
    ),
    "gradient of the step before": Case(
        pre="last = torch.zeros(4)", body="last = model[0].bias.grad", scale="(1 + last.sum())", shown="last"
    ),
    "gradient of the step before, cleared to none": Case(
        pre="last = torch.zeros(4)",
        step=STEP.replace("zero_grad()", "zero_grad(set_to_none=True)"),
        body="last = model[0].bias.grad",
        scale="(1 + last.sum())",
        shown="last",
    ),
    "names that a function keeps by locals()": Case(
        "may keep what locals() returns" if sys.version_info < (3, 13) else KEPT,
        whole=f"""
def main(rate=1.0):
    settings = locals()
    for step in range(10):
        sys.stderr.write(f"made {{step}}\\n")
        {indent(STEP.replace("{scale}", "len(settings)"), 8 * " ").strip()}
        die(step)
    print("END", len(settings), [p.tolist() for p in model.parameters()])
main()
""",
    ),
    "names that a caller keeps by vars()": Case(
        "may keep what locals() returns" if sys.version_info < (3, 13) else KEPT,
        whole=f"""
def train():
    for step in range(10):
        sys.stderr.write(f"made {{step}}\\n")
        {indent(STEP.replace("{scale}", "1"), 8 * " ").strip()}
        die(step)
def main(rate=1.0):
    settings = vars()
    train()
    print("END", len(settings), [p.tolist() for p in model.parameters()])
main()
""",
    ),
    "names that a generator keeps by locals()": Case(
        "may keep what locals() returns" if sys.version_info < (3, 13) else KEPT,
        pre="def items(n):\n    held = locals()\n    for step in range(n):\n        yield step\n    print(len(held))",
        counts="items(10)",
    ),
    "names of a caller that a helper keeps": Case(
        "or the f_locals of a frame" if sys.version_info < (3, 13) else KEPT,
        whole=f"""
held = []
def keep():
    held.append(sys._getframe(1).f_locals)
def main(rate=1.0):
    keep()
    for step in range(10):
        sys.stderr.write(f"made {{step}}\\n")
        {indent(STEP.replace("{scale}", "len(held[0])"), 8 * " ").strip()}
        die(step)
    print("END", len(held[0]), [p.tolist() for p in model.parameters()])
main()
""",
    ),
    "names of a function that are copied": Case(
        whole=f"""
def main(rate=1.0):
    settings, told = dict(locals()), f"{{locals()}}" + "{{rate}}".format(**locals())
    for step in range(10):
        sys.stderr.write(f"made {{step}}\\n")
        {indent(STEP.replace("{scale}", "len(settings)"), 8 * " ").strip()}
        die(step)
    print("END", len(settings), told, [p.tolist() for p in model.parameters()])
main()
""",
    ),
    "hook of DDP around one of the script's": Case(
        pre=DDP
        + "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper\ndef made():\n    n = [1.0]\n"
        "    def hook(state, bucket):\n        n[0] += 1\n        done = torch.futures.Future()\n        done.set_result(bucket.buffer() * n[0])\n"
        "        return done\n    return hook\nmodel.register_comm_hook(None, fp16_compress_wrapper(made()))",
    ),
    "hook of DDP that compresses": Case(
        "'the communication hook of model[0]', a PowerSGDState",
        pre=DDP + "from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook\n"
        "model.register_comm_hook(PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook)",
    ),
    "hook of DDP with a number of the script's": Case(
        pre=DDP
        + "class Hook:\n    n = 1.0\n    def reduced(self, bucket):\n        self.n += 1\n        done = torch.futures.Future()\n"
        "        done.set_result(bucket.buffer() * self.n)\n        return done\nmodel.register_comm_hook(Hook(), Hook.reduced)",
    ),
    "views of one memory that nobody writes": Case(
        pre="h = torch.zeros(2, 4)\nrow = h[0]",
        body="if step >= 3: h = torch.ones(2, 4) * step; row = h[0]",
        scale="(1 + h.sum() + row.sum())",
        shown="h, row",
    ),
    "files in its own directory": Case(
        TRAINS_BY, pre=OUT, body="torch.save(step, f'{out}/{step}.pt')", scale="(1 + len(os.listdir(out)))"
    ),
    "files in its own directory, by glob": Case(
        TRAINS_BY, pre=OUT, body="torch.save(step, f'{out}/{step}.pt')", scale="(1 + len(glob.glob(out + '/*.pt')))"
    ),
    "file of its own that is there": Case(
        TRAINS_BY,
        pre="import pathlib\nmade = pathlib.Path(os.environ['MARK'] + '.pt')",
        scale="(2 if step and made.exists() else 1)",
        body="if step == 0: made.unlink(missing_ok=True)\nif step == 5: torch.save(step, made)",
    ),
    "time in a list, and an end by it": Case(
        f"what 'time.time()' (line 15) tells {TRAINS_BY}",
        pre="import time\nsince = [time.time()]",
        body="if time.time() - since[0] > 1000: break",
    ),
    "time in a dict, and a rate by it": Case(
        TRAINS_BY,
        pre="import time\nrun = {'since': time.time()}",
        body="for group in optimizer.param_groups: group['lr'] = 0.1 if time.time() - run['since'] < 1000 else 0.01",
    ),
    "time in a closure, and a loss by it": Case(
        TRAINS_BY,
        pre="from time import perf_counter\ndef clock():\n    since = perf_counter()\n    return lambda: perf_counter() - since\nspent = clock()",
        scale="(1 if spent() < 1000 else 2)",
    ),
    "time in an object, and a step by it": Case(
        TRAINS_BY,
        pre="import time\nclass Clock:\n    def __init__(self): self.since = time.time()\n    def is_late(self): return time.time() > self.since + 1000\nclock = Clock()",
        step="loss = model(torch.randn(2, 4)).square().mean()\nif clock.is_late(): continue\noptimizer.zero_grad(); loss.backward(); optimizer.step()\n",
    ),
    "seed of a time in a list": Case(
        TRAINS_BY, pre="import time\nsince = [time.time()]", body="random.seed(since[0] + step)"
    ),
    "number of the process": Case(TRAINS_BY, scale="(1 if os.getpid() else 2)"),
    "hash of a text": Case(TRAINS_BY, pre="word = 'abc'", scale="(1 if hash(word) % 7 < 7 else 2)"),
    "line of the standard input": Case(TRAINS_BY, scale="(1 + len(sys.stdin.readline()))"),
    "arguments that are taken": Case(
        "'sys.argv' changes in the loop", pre="sys.argv += list('abcdefghijkl')", scale="(1 + ord(sys.argv.pop()))"
    ),
    # And what is only told.
    "times that are told": Case(
        pre=f"{CLOCK}rows = open(os.environ['MARK'] + '.csv', 'a')\n"
        "class Meter:\n    def __init__(self): self.sum = self.n = 0\n    def update(self, value): self.sum += value; self.n += 1\nseconds, losses = Meter(), Meter()",
        body="spent = time.time() - since\nseconds.update(spent); losses.update(loss.item())\nrows.write(f'{step},{spent}\\n')\n"
        "if spent > 1000: print('late')\nsince = time.time()\noptimizer.param_groups[0]['lr'] = 0.1 / (1 + losses.sum / losses.n)",
        shown="losses.sum",
    ),
    "size of a log that is told": Case(
        pre=LOG,
        body=f"{WRITES}\nif os.path.getsize(path) > 1000: print('large')\nsys.stderr.write(f'{{log.tell()}} {{os.stat(path).st_size}}\\n')\n",
    ),
    "file that stops it": Case(
        pre="import pathlib\nstop = pathlib.Path(os.environ['MARK'] + '.stop')",
        body="if stop.exists(): break",
        shown="step",
    ),
    "directory that is made, and emptied": Case(
        pre=OUT,
        body="if not os.path.exists(out): os.mkdir(out)\ntorch.save(step, f'{out}/{step}.pt')\nfor old in sorted(os.listdir(out))[:-2]: os.remove(f'{out}/{old}')",
    ),
    "dropout that decays": Case(
        body="model[1].p *= 0.8",
        shown="model[1].p",
    ),
    "attribute of a module of torch's": Case(
        pre="model.temp = 1.0",
        body="model.temp *= 0.9",
        scale="model.temp",
        shown="model.temp",
    ),
    "label smoothing that decays": Case(
        pre="crit = torch.nn.CrossEntropyLoss(label_smoothing=0.5)",
        step="loss = crit(model(torch.randn(2,4)), torch.tensor([0,1]))\noptimizer.zero_grad()\nloss.backward()\noptimizer.step()\n",
        body="crit.label_smoothing *= 0.8",
        shown="crit.label_smoothing",
    ),
    "momentum of a norm that decays": Case(
        pre="bn = torch.nn.BatchNorm1d(4)\nmodel = torch.nn.Sequential(torch.nn.Linear(4,4), bn)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        body="bn.momentum *= 0.7",
        shown="bn.momentum, [b.tolist() for b in model.buffers()]",
    ),
    "attribute of an optimizer of torch's": Case(
        pre="optimizer.scale = 1.0",
        body="optimizer.scale *= 0.9",
        scale="optimizer.scale",
        shown="optimizer.scale",
    ),
    "list in the user's optimizer": Case(
        pre="class Mine(torch.optim.SGD):\n    def __init__(self, *a, **k):\n        super().__init__(*a, **k)\n        self.norms = []\n    def step(self, closure=None):\n        self.norms.append(1)\n        self.param_groups[0]['lr'] = 0.1 / len(self.norms)\n        return super().step(closure)\noptimizer = Mine(model.parameters(), lr=0.1)",
        shown="optimizer.norms",
    ),
    "loader of the user's with an iterator": Case(
        "loader._own",
        pre="class Batches(torch.utils.data.DataLoader):\n    def __init__(self, *a, **k):\n        super().__init__(*a, **k)\n        self._own = None\n    def get(self):\n        if self._own is None: self._own = iter(self)\n        try: return next(self._own)\n        except StopIteration:\n            self._own = iter(self); return next(self._own)\nloader = Batches([float(i) for i in range(7)], batch_size=1, shuffle=True)",
        scale="loader.get().item()",
        shown="loader.get()",
    ),
    "loader of the user's that counts": Case(
        pre="class Batches(torch.utils.data.DataLoader):\n    n = 0\n    def get(self):\n        self.__dict__['n'] = self.n + 1\n        return float(self.n)\nloader = Batches([float(i) for i in range(7)], batch_size=1)",
        scale="loader.get()",
        shown="loader.n",
    ),
    "row of many under another name": Case(
        pre="rows = [[0] for _ in range(9000)]",
        body="r = rows[17*step+1]; r.append(step)",
        shown="sum(map(sum, rows))",
    ),
    "row of many in a function": Case(
        pre="rows = [{'n': 0} for _ in range(9000)]\ndef bump(r):\n    r['n'] += 1",
        body="bump(rows[17*step+1])",
        shown="sum(r['n'] for r in rows)",
    ),
    "large array in a dataset": Case(
        "d.data",
        pre="class D(torch.utils.data.Dataset):\n    def __init__(self): self.data = np.zeros((2000, 1000), np.float32)\n    def __len__(self): return 2000\n    def __getitem__(self, i):\n        self.data[i, 3:9] += 1\n        return float(self.data[i].sum())\nd = D()",
        body="x = d[17*step+1]",
        shown="d.data.sum()",
    ),
    "large tensor through data": Case(
        "put().bank",
        pre="def make():\n    bank = torch.zeros(2000, 1000)\n    def put(i):\n        v = bank.data\n        v[i, 3:9] += 1\n        return bank.sum().item()\n    return put\nput = make()",
        body="x = put(17*step+1)",
        shown="put(0)",
    ),
    "zero_grad in an expression": Case(
        step="\nloss = model(torch.randn(2, 4)).square().mean() * {scale}\nstep % 4 == 0 and optimizer.zero_grad()\nloss.backward()\noptimizer.step()\n",
    ),
    "zero_grad of a part": Case(
        step="\nloss = model(torch.randn(2, 4)).square().mean() * {scale}\nmodel[1].zero_grad()\nloss.backward()\noptimizer.step()\n",
    ),
    "zero_grad if an expression says so": Case(
        step="\nloss = model(torch.randn(2, 4)).square().mean() * {scale}\noptimizer.zero_grad() if step % 4 == 0 else None\nloss.backward()\noptimizer.step()\n",
    ),
    "round robin of a set": Case(
        "'pool'",
        pre="pool = set(range(10))",
        body="x = pool.pop(); pool.add(x)",
        shown="pool.pop()",
    ),
    "member of an enumeration that counts": Case(
        pre="class P(enum.Enum):\n    A = 1\nP.A.hits = 1",
        body="P.A.hits += 1",
        scale="P.A.hits",
        shown="P.A.hits",
    ),
    "value shared with processes in a dataset": Case(
        "c_int",
        pre="import multiprocessing\nclass D(torch.utils.data.Dataset):\n    def __init__(self): self.n = multiprocessing.Value('i', 1)\n    def __len__(self): return 4\n    def __getitem__(self, i):\n        self.n.value += 1\n        return float(self.n.value)\nd = D()",
        scale="d[0]",
        shown="d[0]",
    ),
    "tensor that is resized": Case(
        "the shape of mem",
        pre="mem = torch.zeros(1)",
        body="mem.resize_(step+2).fill_(step)",
        scale="(1+mem.sum())",
        shown="mem",
    ),
    "tensor in an attribute of a module of torch's": Case(
        pre="model[0].mem = torch.ones(4)",
        body="model[0].mem = model[0].mem * 0.9",
        scale="model[0].mem.sum()",
        shown="model[0].mem",
    ),
    "list in an attribute of a module of torch's": Case(
        pre="model.seen = []",
        body="model.seen.append(step)",
        scale="(1+len(model.seen))",
        shown="model.seen",
    ),
    "UserDict in a dataset": Case(
        pre="class D(torch.utils.data.Dataset):\n    def __init__(self): self.c = collections.UserDict({'n': 1})\n    def __len__(self): return 2\n    def __getitem__(self, i):\n        self.c['n'] += 1; return self.c['n']\nd = D()",
        scale="d[0]",
        shown="d[0]",
    ),
    "tuple of lists": Case(
        pre="pair = ([1], [2])\ndef use():\n    pair[0].append(1)\n    return len(pair[0])",
        scale="use()",
        shown="use()",
    ),
    "entry of a history, changed later": Case(
        "another name of cur",
        pre="history, cur = [], None",
        body="if step % 4 == 0:\n    cur = {'n': 0}\n    history.append(cur)\ncur['n'] += 1",
        shown="history",
    ),
    "entry of a history, from step 5 on": Case(
        "another name of cur",
        pre="history, cur = [], {'n': 0}",
        body="if step % 5 == 0 and step:\n    cur = {'n': 0}\n    history.append(cur)\ncur['n'] += 1",
        shown="history",
        when=6,
    ),
    "carried name in a namespace too": Case(
        "another name of best",
        pre="best, t = {'n': 0}, argparse.Namespace(box={'n': 1})",
        body="if step == 4:\n    best = {'n': step}\n    t.box = best\nbest['n'] += 1",
        scale="t.box['n']",
        shown="t.box, best",
        when=6,
    ),
    "two carried names become one": Case(
        "another name of cur",
        pre="cur, kept = [0], [1]",
        body="if step == 4: kept = cur\ncur = cur if step else [0]\ncur.append(step)",
        scale="len(kept)",
        shown="cur, kept",
        when=6,
    ),
    "rows that are one": Case(
        "another name of 'grid[0]'",
        pre="grid = [[0.5] * 3] * 3",
        body="grid[0][step % 3] += 1",
        scale="grid[1][step % 3]",
        shown="grid",
    ),
    "dict and list with the same entries": Case(
        "another name of",
        pre="byname = {'a': {'n': 1}, 'b': {'n': 1}}\norder = [byname['a'], byname['b']]\ntable = {'byname': byname, 'order': order}",
        body="table['order'][0]['n'] += 1",
        scale="table['byname']['a']['n']",
        shown="table",
    ),
    "submodule in use changes": Case(
        "the modules of model",
        pre="class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))\n        self.active = self.blocks[0]\n    def forward(self, x): return self.active(x)\nmodel = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        body="if step == 4: model.active = model.blocks[1]",
        shown="model.active is model.blocks[1]",
        when=6,
    ),
    "submodules in use grow": Case(
        "model.used",
        pre="class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))\n        self.used = [self.blocks[0]]\n    def forward(self, x):\n        for b in self.used: x = b(x)\n        return x\nmodel = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        body="if step == 4: model.used.append(model.blocks[1])",
        shown="len(model.used)",
        when=6,
    ),
    "submodule of a list changes": Case(
        "model.used[0]",
        pre="class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))\n        self.used = [self.blocks[0]]\n    def forward(self, x):\n        for b in self.used: x = b(x)\n        return x\nmodel = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        body="if step == 4: model.used[0] = model.blocks[1]",
        shown="model.used[0] is model.blocks[1]",
        when=6,
    ),
    "dropout that changes late": Case(
        body="if step == 4: model[1].p = 0.7",
        shown="model[1].p",
        when=6,
    ),
    "model of a package beside the scripts": Case(
        pre=BESIDE + "from helper import Net\nmodel = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        shown="model.temperature",
        packaged="src",
        helper=PACKAGE,
    ),
    "function of a package that counts": Case(
        pre=BESIDE + "from helper import up", scale="up()", shown="up()", packaged="src", helper=PACKAGE
    ),
    "annealing in a package beside the scripts": Case(
        pre=BESIDE + "from helper import weight", scale="weight()", shown="weight()", packaged="src", helper=PACKAGE
    ),
    "function of a module of a package that counts": Case(
        pre=BESIDE + "import helper", scale="helper.up()", shown="helper.up()", packaged="src", helper=PACKAGE
    ),
    "function of an installed package that counts": Case(
        "installed package helper",
        pre=BESIDE.replace("src", "site-packages") + "from helper import up",
        scale="up()",
        shown="up()",
        packaged="site-packages",
        helper=PACKAGE,
    ),
    "object of an installed package that cannot say its state": Case(
        "'mean', a Mean, cannot hand out its state: NotImplementedError: not yet",
        pre=BESIDE.replace("src", "site-packages") + "from helper import Mean\nmean = Mean()",
        body="mean.sum += 1",
        shown="mean.sum",
        packaged="site-packages",
        helper=PACKAGE + "\nclass Mean:\n    sum = 0\n    def state_dict(self): raise NotImplementedError('not yet')\n"
        "    def load_state_dict(self, state): pass\n",
    ),
    "model of an installed package that counts": Case(
        "installed package helper",
        pre=BESIDE.replace("src", "site-packages")
        + "from helper import Net\nmodel = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        shown="model.temperature",
        packaged="site-packages",
        helper=PACKAGE,
    ),
    "dict whose order changes": Case(
        "the order of 'c'",
        pre="c = dict(a=1, b=2, f=len)",
        body="if step == 4: v = c.pop('a'); c['a'] = v",
        shown="list(c)",
        when=6,
    ),
    "parameter groups that change places": Case(
        "the parameter groups of optimizer",
        pre="optimizer = torch.optim.SGD([{'params': model[0].weight}, {'params': model[0].bias, 'lr': 0.01}], lr=0.1)",
        body="if step == 4: optimizer.param_groups.reverse()",
        when=6,
    ),
    "model that is compiled": Case(pre="model = torch.compile(model, backend='eager')"),
    "model under DDP": Case(
        pre="import torch.distributed as dist\n"
        "if not dist.is_initialized():\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "model = torch.nn.parallel.DistributedDataParallel(model)",
    ),
    "gradients that a function clears": Case(
        pre="def train(model, opt):\n    opt.zero_grad()\n    loss = model(torch.randn(2, 4)).square().mean()\n"
        "    loss.backward()\n    opt.step()\n    return loss",
        step="loss = train(model, optimizer)\n",
    ),
    "average whose state has other names": Case(
        pre="class Ema:\n    def __init__(self, m):\n        self.values, self.n = {k: v.clone() for k, v in m.state_dict().items()}, 0\n"
        "    def update(self, m):\n        self.n += 1\n        for k, v in m.state_dict().items():\n"
        "            self.values[k] = self.values[k] * 0.9 + v * 0.1\n"
        "    def state_dict(self): return {'shadow': self.values, 'n': self.n}\n"
        "    def load_state_dict(self, s): self.values, self.n = s['shadow'], s['n']\nema = Ema(model)",
        body="ema.update(model)",
        shown="ema.values, ema.n",
    ),
}
CASES = {name: replace(case, threads=2) for name, case in CASES.items()}
CASES["lines of csv, rehearsed"] = replace(CASES["lines of csv"], threads=1)
CASES["function of an installed package that counts, where the child is not allowed a file"] = replace(
    CASES["function of an installed package that counts"],
    threads=1,
    step=STEP + "open(os.environ['MARK'] + '.log', 'a').close()\n",
)
