"""Scripts with loops inside each other and over loaders, each with one habit of real ones; killed at `die(...)`. Not tests themselves.

A case is a whole script, where it is killed, and what is expected: `KEPT` if the second life goes on behind the first step of
the first one, else a part of the sentence that says why nothing is kept. Either way the end is that of an undisturbed run.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent, indent

KEPT = "kept"

HEAD = """
import argparse, collections, copy, itertools, math, os, random, sys
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

def die(*at):
    if os.environ.get("DIE") == ",".join(map(str, at)) and not os.path.exists(os.environ["MARK"]):
        open(os.environ["MARK"], "w").close()
        os.kill(os.getpid(), 9)

def made(*at):
    sys.stderr.write(f"made {','.join(map(str, at))}\\n")

random.seed(1), np.random.seed(1), torch.manual_seed(0)
dataset = TensorDataset(torch.randn(28, 4), torch.randint(0, 3, (28,)))
loader = DataLoader(dataset, batch_size=4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
STEP = """
made({at})
optimizer.zero_grad()
loss = F.cross_entropy(model(x), y) * {scale}
loss.backward()
optimizer.step()
"""
TAIL = """
die("end")
print("END", {shown}, [p.tolist() for p in model.parameters()])
"""
BEST = """
class Best:
    made = 0
    def __init__(self, epoch=0):
        Best.made += 1
        self.epoch, self.seen = epoch, []
holder = argparse.Namespace(best=None)
"""
# Killed in the first epoch, at its last step, behind it, in the third epoch, and behind the loops.
KILLS = ("0,4", "0,6", "0,eval", "2,3", "2,6", "end")


@dataclass(frozen=True)
class Case:
    """One script.

    Attributes:
        text: of it, behind HEAD; `{step}` is a step of training, and what is printed at the end follows.
        expected: KEPT, or why not.
        kills: where it is killed, each in two lives of its own.
        scale: what the loss is multiplied with.
        at: what names the step.
        shown: what is printed at the end.
        again: variables of the environment for the second life, and for the run that it is compared with.
        seeded: whether Python's and NumPy's generators are seeded, beside torch's.
        package: text of a module `shelf` that is installed; empty if there is none.
    """

    text: str
    expected: str = KEPT
    kills: tuple[str, ...] = KILLS
    scale: str = "1"
    at: str = "epoch, i"
    shown: str = "0"
    again: tuple[tuple[str, str], ...] = ()
    seeded: bool = True
    package: str = ""

    def script(self) -> str:
        step = dedent(STEP).replace("{scale}", self.scale).replace("{at}", self.at)
        lines = []
        for line in dedent(self.text).splitlines():
            place = line.partition("{step}")[0] if "{step}" in line else None
            lines.append(line if place is None else indent(step, place))
        path = 'sys.path.insert(0, os.path.join(os.path.dirname(os.environ["MARK"]), "site-packages"))\n'
        head = HEAD.replace("import torch\n", f"{path}import torch\n", 1) if self.package else HEAD
        head = head if self.seeded else head.replace("random.seed(1), np.random.seed(1), ", "")
        return f"{head}\n" + "\n".join(lines) + TAIL.replace("{shown}", self.shown)


OF_START = """
class Place:
    def __init__(self, at):
        os.makedirs(at)
        self.at = at
"""
# Batches that are asked for, and begun again where they have ended: the loop goes over numbers.
ASKED = """
for epoch in range(3):
    for i in range(9):
        try:
            x, y = next(batches)
        except StopIteration:
            {again}
            x, y = next(batches)
        {step}
        {body}
        die(epoch, i)
    {behind}
    die(epoch, "eval")
"""


def asked(
    pre: str = "batches = iter(loader)", again: str = "batches = iter(loader)", body: str = "pass", behind: str = "pass"
) -> str:
    """Returns epochs over numbers, in which batches are asked for one by one."""
    return pre + inline(body=body, behind=behind, loop=ASKED.replace("{again}", again))


def cycled(
    text: str = "def cycle(dl):\n    while True:\n        for data in dl:\n            yield data",
    pre: str = "pass",
    body: str = "x, y = next(batches)",
) -> str:
    """Returns a loop over numbers that asks a generator for batches, which begins their loader again and again."""
    return f"{text}\nbatches = cycle(loader)\n{pre}\nfor i in range(19):\n    {body}\n    {{step}}\n    die(i)\n"


# A dataset that counts and draws by itself, and one of rows that a start may have in another order.
DRAWING = """
class Drawing(torch.utils.data.Dataset):
    def __init__(self): self.calls, self.dice = 0, random.Random(3)
    def __len__(self): return 28
    def __getitem__(self, k):
        self.calls += 1
        return dataset[k][0] * self.calls + self.dice.random(), dataset[k][1]
"""
OTHER_ROWS = """
class Rows(torch.utils.data.Dataset):
    def __init__(self): self.rows = [*range(28)][::-1 if "AGAIN" in os.environ else 1]
    def __len__(self): return 28
    def __getitem__(self, k): return dataset[self.rows[k]]
"""
OWN_FILE = "import time\npath = os.environ['MARK'] + '.n'\nn = len(open(path).read()) if os.path.exists(path) else 0\n"
# A writer of TensorBoard's: a thread of its own, a queue, and a file with a next line.
WRITER = """
import queue, threading

class GFile:
    def __init__(self): self.buff = b""
    def __next__(self): raise StopIteration
    def write(self, data): self.buff += data

class FileWriter(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.queue, self.file = queue.Queue(), GFile()
        self.start()
    def run(self):
        while True:
            self.file.write(self.queue.get())
            self.queue.task_done()

class SummaryWriter:
    def __init__(self): self.file_writer = FileWriter()
    def add_scalar(self, tag, value): self.file_writer.queue.put(f"{tag} {value}".encode())
    def flush(self): self.file_writer.queue.join()

GFile.__module__ = "tensorboard.compat.tensorflow_stub.io.gfile"
FileWriter.__module__ = SummaryWriter.__module__ = "torch.utils.tensorboard.writer"
"""
# Batches of a package, with a state that has their epoch begun again, and an order of their own.
SHELF = """
import random

class Row:
    def __init__(self, at):
        self.at, self.words, self.signs, self.marks = at, [at], [at, at], [at, 0]

class Batches:
    def __init__(self, rows, size, shuffles=True):
        self.rows, self.size, self.shuffles = rows, size, shuffles
        self.order, self.began, self.taken, self.resumed = random.getstate(), None, 0, False

    def begin(self):
        if self.resumed:
            self.order = self.began
        else:
            self.began, self.taken = self.order, 0
        self.resumed = False
        self.parts = cut(self.shuffled() if self.shuffles else self.rows, self.size)

    def shuffled(self):
        others = random.getstate()
        random.setstate(self.order)
        found = random.sample(self.rows, len(self.rows))
        self.order = random.getstate()
        random.setstate(others)
        return found

    def __iter__(self):
        self.begin()
        for number, rows in enumerate(self.parts):
            if number < self.taken:
                continue
            self.taken += 1
            yield [row.at for row in rows]

    def state_dict(self):
        return {"taken": self.taken, "began": self.began}

    def load_state_dict(self, state):
        self.taken, self.began, self.resumed = state["taken"], state["began"], True

def cut(rows, size):
    for first in range(0, len(rows), size):
        yield rows[first : first + size]
"""
SHELVED = """
import shelf
{pre}
rows = [shelf.Row(number) for number in range(28)]
{rows}
batches, test = shelf.Batches(rows, 4), shelf.Batches(rows, 7, shuffles=False)
best = math.inf
for epoch in range(3):
    batches.begin()
    for i, at in enumerate(batches):
        x, y = dataset.tensors[0][at], dataset.tensors[1][at]
        {step}
        {body}
        if i == 4:
            model.eval()
            for part in test:
                best = min(best, F.cross_entropy(model(dataset.tensors[0][part]), dataset.tensors[1][part]).item())
            model.train()
        die(epoch, i)
    die(epoch, "eval")
"""
EVALUATE = """
def evaluate():
    model.eval()
    with torch.no_grad():
        found = sum(F.cross_entropy(model(x), y).item() for x, y in DataLoader(dataset, batch_size=7, shuffle=True))
    model.train()
    return found
"""
INLINE = """
for epoch in range(3):
    {before}
    for i, (x, y) in enumerate(loader):
        {step}
        {body}
        die(epoch, i)
    {behind}
    die(epoch, "eval")
"""


def inline(before: str = "pass", body: str = "pass", behind: str = "pass", pre: str = "", loop: str = INLINE) -> str:
    """Returns epochs over batches, with statements before, in and behind the inner loop."""
    lines = []
    for line in loop.splitlines():
        for name, text in (("{before}", before), ("{body}", body), ("{behind}", behind)):
            if name in line:
                line = indent(dedent(text), line.partition(name)[0])
        lines.append(line)
    return dedent(pre) + "\n" + "\n".join(lines)


def shelved(pre: str = "", rows: str = "", body: str = "pass", loop: str = SHELVED) -> str:
    """Returns epochs over batches of a package, with statements where these are made and in the inner loop."""
    return inline(body=body, loop=loop.replace("{pre}", pre).replace("{rows}", rows))


CASES: dict[str, Case] = {
    "epochs of a function": Case(EVALUATE + """
def train(args, model, loader, optimizer, epoch):
    model.train()
    total = 0
    for i, (x, y) in enumerate(loader):
        {step}
        total += loss.item()
        if i % args.every == 0:
            print("loss", total, loss.item())
        die(epoch, i)
    print("mean", total / len(loader), loss.item())

def main():
    args = argparse.Namespace(every=2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(3):
        train(args, model, loader, optimizer, epoch)
        print(evaluate())
        schedule.step()
        die(epoch, "eval")
    print("END", schedule.get_last_lr())
main()
"""),
    "tensor of an attribute by its identity": Case(inline(
        pre="torch.set_num_threads(2)\nclass B: pass\nb = B()\nb.t = torch.zeros(2)\nmarks = {id(b.t): 1}",
        body="b.t += loss.detach()\noptimizer.param_groups[0]['lr'] = 0.1 / (1 + marks.get(id(b.t), 5))",
    ), shown="b.t.tolist()", kills=("2,3",)),
    "part of a parameter that lives on": Case(inline(
        pre="last = torch.zeros(8, 4)",
        body="optimizer.param_groups[0]['lr'] = 0.1 / (1 + last.abs().sum().item())\nlast = model[0].weight.detach()",
    ), expected="shares memory with the parameter '0.weight', which trains", kills=("2,3",)),
    "object that comes to be in an inner loop": Case(inline(
        pre=BEST, body="if epoch == 0 and i == 2: holder.best = Best()\nif holder.best is not None: holder.best.seen.append(i)",
    ), scale="(1 if holder.best is None else 1 + 0.1 * len(holder.best.seen))", shown="holder.best.seen, Best.made"),
    "object that comes to be between loops": Case(inline(
        pre=BEST, before="holder.best = Best(epoch)", body="holder.best.seen.append(i)",
    ), scale="(1 + holder.best.epoch + 0.1 * len(holder.best.seen))", shown="holder.best.seen, Best.made"),
    "object that comes to be behind an inner loop": Case(inline(
        pre=BEST, behind="holder.best = Best(epoch) if holder.best is None or loss < 1 else holder.best",
    ), scale="(1 if holder.best is None else 2 + holder.best.epoch)", shown="holder.best.epoch, Best.made"),
    "order of parameters by their identities": Case(inline(
        pre="marks = {id(p): k for k, p in enumerate(model.parameters())}",
        body="for p in model.parameters(): p.grad = None\noptimizer.param_groups[0]['lr'] = 0.1 / (1 + marks[id(model[0].bias)])",
    ), kills=("2,3",)),
    "counts by identities": Case(inline(
        pre="torch.set_num_threads(2)\nmarks = {id(p): 1 for p in model.parameters()}",
        body="marks[id(model[0].bias)] = marks.get(id(model[0].bias), 5) + 1\n"
        "optimizer.param_groups[0]['lr'] = 0.1 / marks[id(model[0].bias)]",
    ), expected="holds the identity of 'model.", kills=("2,3",)),
    "identity that lives on": Case(inline(
        pre="torch.set_num_threads(2)\nlast = 0",
        body="optimizer.param_groups[0]['lr'] = 0.1 if last in (0, id(model[0].bias)) else 0.2\nlast = id(model[0].bias)",
    ), expected="holds the identity of 'model.", kills=("2,3",)),
    "inline": Case(inline(behind="print(epoch, loss.item())"), shown="epoch, i, loss.item()"),
    "inline, in a function": Case("""
def main():
    best = math.inf
    for epoch in range(3):
        total = 0
        for i, (x, y) in enumerate(loader):
            {step}
            total += loss.item()
            die(epoch, i)
        best = min(best, total)
        die(epoch, "eval")
    print("END", best, epoch, i)
main()
"""),
    "one loop over batches": Case("""
for i, (x, y) in enumerate(loader):
    {step}
    die(0, i)
""", at="0, i", kills=("0,4", "0,6", "end"), shown="i, loss.item()"),
    "only torch is seeded": Case("""
for i, (x, y) in enumerate(loader):
    {step}
    die(0, i)
""", at="0, i", kills=("0,4",), seeded=False),
    "only torch is seeded, and steps draw from the others": Case("""
for i, (x, y) in enumerate(loader):
    {step}
    np.random.rand(), random.random()
    die(0, i)
""", at="0, i", kills=("0,4",), seeded=False),
    "order in the head that nobody seeded": Case("""
np.random.seed()
seen = []
for i, k in enumerate(np.random.permutation(28).tolist()):
    x, y = dataset.tensors[0][:4], dataset.tensors[1][:4]
    {step}
    seen.append(k)
    die(0, i)
""", expected="(numpy) are others", at="0, i", kills=("0,4",), seeded=False, shown="sorted(seen)"),
    "order of items of its own that nobody seeded": Case("""
class Order:
    def __iter__(self): return iter(random.sample(range(28), 28))
order = Order()
seen = []
for i, k in enumerate(order):
    x, y = dataset.tensors[0][:4], dataset.tensors[1][:4]
    {step}
    seen.append(k)
    die(0, i)
""", expected="(python) are others", at="0, i", kills=("0,4",), seeded=False, shown="sorted(seen)"),
    "order drawn before the loop that nobody seeded": Case("""
random.sample(range(28), 28)
for i, (x, y) in enumerate(loader):
    {step}
    die(0, i)
""", expected="(python) are others", at="0, i", kills=("0,4",), seeded=False),
    "batches without a number": Case("""
seen = 0
for epoch in range(3):
    for x, y in loader:
        i = seen % 7
        {step}
        die(epoch, i)
        seen += 1
    die(epoch, "eval")
""", shown="seen"),
    "tqdm": Case("""
from tqdm import tqdm
for epoch in tqdm(range(3)):
    bar = tqdm(enumerate(loader), total=len(loader))
    for i, (x, y) in bar:
        {step}
        bar.set_postfix(loss=loss.item())
        die(epoch, i)
    die(epoch, "eval")
""", shown="bar.n"),
    "enumerate of tqdm": Case("""
import tqdm
for epoch in range(3):
    for i, (x, y) in enumerate(tqdm.tqdm(loader)):
        {step}
        die(epoch, i)
    die(epoch, "eval")
"""),
    "zip of loaders": Case("""
others = DataLoader(dataset, batch_size=2, shuffle=True)
for epoch in range(3):
    for i, (x, y), (x2, _) in zip(itertools.count(), loader, others):
        x = x + x2.mean()
        {step}
        die(epoch, i)
    die(epoch, "eval")
"""),
    "numbers in numbers, order drawn between": Case("""
xs, ys = dataset.tensors
for epoch in range(3):
    order = torch.randperm(28)
    for i in range(7):
        x, y = xs[order[4 * i : 4 * i + 4]], ys[order[4 * i : 4 * i + 4]]
        {step}
        die(epoch, i)
    die(epoch, "eval")
"""),
    "sampler of several ranks": Case("""
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=1, rank=0)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    die(epoch, "eval")
"""),
    "sampler with a generator of its own": Case("""
loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    die(epoch, "eval")
"""),
    "class with a trainer": Case(EVALUATE + """
class Trainer:
    def __init__(self, model, optimizer, loader):
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        self.seen, self.history = 0, []
    def _batch(self, epoch, i, x, y):
        made(epoch, i)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.seen += len(x)
        return loss.item()
    def _epoch(self, epoch):
        for i, (x, y) in enumerate(self.loader):
            self.history.append(self._batch(epoch, i, x, y))
            die(epoch, i)
    def train(self, epochs):
        for epoch in range(epochs):
            self._epoch(epoch)
            self.history.append(evaluate())
            die(epoch, "eval")
trainer = Trainer(model, optimizer, loader)
trainer.train(3)
""", shown="trainer.seen, trainer.history"),
    "meters made in every epoch": Case("""
class Meter:
    def __init__(self):
        self.sum = self.count = 0
    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
def train(epoch):
    losses, top = Meter(), Meter()
    meters = [losses, top]
    for i, (x, y) in enumerate(loader):
        {step}
        losses.update(loss.item(), len(x))
        die(epoch, i)
    return losses.sum / losses.count
found = []
for epoch in range(3):
    found.append(train(epoch))
    die(epoch, "eval")
""", shown="found"),
    "module made in every epoch": Case("""
def train(epoch):
    criterion = torch.nn.CrossEntropyLoss()
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
for epoch in range(3):
    train(epoch)
    die(epoch, "eval")
"""),
    "list of batches": Case("""
batches = [(x.clone(), y.clone()) for x, y in loader]
for epoch in range(3):
    for i, (x, y) in enumerate(batches):
        {step}
        die(epoch, i)
    die(epoch, "eval")
"""),
    "three loops": Case("""
for run in range(2):
    rate = random.random()
    for epoch in range(2):
        shift = torch.rand(1).item()
        for i, (x, y) in enumerate(loader):
            x = x + shift
            {step}
            die(run, epoch, i)
        die(run, epoch, "eval")
""", scale="rate", at="run, epoch, i", kills=("0,0,4", "0,1,6", "1,0,0", "1,1,5", "1,0,eval", "end")),
    "steps on every batch": Case("""
for epoch, (x, y) in enumerate(loader):
    for i in range(3):
        {step}
        die(epoch, i)
    die(epoch, "eval")
""", kills=("3,0", "4,2", "6,1", "6,eval", "end")),
    # Values.
    "flag that turns in every epoch": Case(inline(
        pre="turned = 0\nclass Flags: on = False", before="Flags.on = not Flags.on\nturned = 1 - turned", body="x = Flags.on",
    ), scale="(2.0 if Flags.on else 1.0) + turned", shown="Flags.on, turned"),
    "history that grows in every part": Case(inline(
        pre="history, calls = [], [0]\ndef log(*x):\n    calls[0] += 1\n    history.append(x)",
        before="log('begin', epoch)", body="log(loss.item())", behind="log('end', loss.item())",
    ), scale="(1 + calls[0])", shown="history, calls"),
    "schedules of steps and epochs": Case(inline(
        pre="warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9)\n"
        "cool = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])",
        body="warm.step()", behind="cool.step()",
    ), shown="optimizer.param_groups[0]['lr']"),
    "rate that is set in every epoch": Case(inline(
        before="for group in optimizer.param_groups: group['lr'] = 0.1 * 0.5 ** epoch\nmodel.train()", behind="model.eval()"
    )),
    "counter and best of all epochs": Case(EVALUATE + inline(
        pre="steps, best, bad = 0, math.inf, 0", body="steps += 1", behind="now = evaluate()\nif now < best:\n    best, bad = now, 0\n"
        "else:\n    bad += 1",
    ), scale="(1 + steps)", shown="steps, best, bad"),
    "global counter in a function": Case(inline(
        pre="seen = 0\ndef count():\n    global seen\n    seen += 1", body="count()", behind="count()"
    ), scale="(1 + seen)", shown="seen"),
    "epoch that a function reads": Case(inline(
        pre="def weight():\n    return 1.0 + epoch", body="extra = weight()"
    ), scale="weight()"),
    "dataset that draws and counts": Case("""
class Noisy(Dataset):
    calls = 0
    def __len__(self):
        return 28
    def __getitem__(self, index):
        self.calls += 1
        return dataset[index][0] + torch.rand(4) + random.random() + np.random.rand(), dataset[index][1]
noisy = Noisy()
loader = DataLoader(noisy, batch_size=4, shuffle=True)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        x = x.float()
        {step}
        die(epoch, i)
    die(epoch, "eval")
""", shown="noisy.calls"),
    "break in the first batches": Case(inline(body="if i == 5: break"), shown="i", kills=("0,4", "0,eval", "2,3", "end")),
    "end before all epochs": Case(inline(behind="if epoch == 1: break", loop=INLINE.replace("range(3)", "range(9)")),
        kills=("0,4", "1,2", "1,6", "end"), shown="epoch"),
    "return from the middle": Case("""
def main():
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            {step}
            die(epoch, i)
            if epoch == 2 and i == 5:
                return loss.item()
        die(epoch, "eval")
print("END", main())
""", kills=("0,4", "0,eval", "2,3", "end")),
    "gradients of several batches": Case(inline(
        loop=INLINE.replace("{step}", "made(epoch, i)\n        (F.cross_entropy(model(x), y) / 2).backward()\n"
        "        if (i + 1) % 2 == 0 or i + 1 == len(loader):\n            optimizer.step(); optimizer.zero_grad()"),
    ), kills=("0,eval", "2,3", "2,6", "end")),
    "two loops in one epoch": Case("""
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i + 10)
    die(epoch, "eval")
""", kills=("0,4", "0,6", "0,13", "1,3", "1,14", "2,eval", "end")),
    "two trainings": Case("""
def fit(name, epochs):
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            {step}
            die(name, epoch, i)
fit("a", 2)
fit("b", 2)
""", at="name, epoch, i", kills=("a,1,3", "b,0,3", "b,1,6", "end")),
    "stream": Case("""
class Stream(IterableDataset):
    def __iter__(self):
        return iter([dataset[i] for i in range(28)])
loader = DataLoader(Stream(), batch_size=4)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    die(epoch, "eval")
"""),
    "generator of the script": Case("""
def batches():
    order = torch.randperm(28)
    for k in range(0, 28, 4):
        yield tuple(part[order[k : k + 4]] for part in dataset.tensors)
for epoch in range(3):
    for i, (x, y) in enumerate(batches()):
        {step}
        die(epoch, i)
    die(epoch, "eval")
"""),
    "workers that draw": Case("""
class Noisy(Dataset):
    def __len__(self):
        return 28
    def __getitem__(self, index):
        return dataset[index][0] + torch.rand(4) + random.random(), dataset[index][1]
loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    die(epoch, "eval")
"""),
    "longer at the second time": Case(
        inline(loop=INLINE.replace("range(3)", "range(int(os.environ.get('N', 3)))")), again=(("N", "4"),), kills=("0,4", "2,3")
    ),
    # What a restart does again, or asks for, before everything is as it was.
    "batches without a step behind the last one": Case(inline(
        loop=INLINE.replace("{step}", "made(epoch, i)\n        loss = F.cross_entropy(model(x), y) / 3\n        loss.backward()\n"
        "        if i % 3 == 2 or epoch == 0: optimizer.step(); optimizer.zero_grad()"),
        behind="print(loss.item())",
    ), kills=("1,eval", "2,1")),
    "evaluated before the batches": Case(EVALUATE + """
def main():
    for epoch in range(3):
        before = evaluate()
        for i, (x, y) in enumerate(loader):
            {step}
            die(epoch, i)
        die(epoch, "eval")
        print("END", before)
main()
""", "is evaluated before the loop of line", kills=("2,3",), scale="(1 + before)"),
    "saved before the batches": Case(inline(
        pre="file = os.environ['MARK'] + '.own'", before="torch.save(model.state_dict(), file)",
    ), "written by torch.save before the loop of line", kills=("2,3",), shown="torch.load(file)['3.bias'].tolist()"),
    "number of the parameters, made before the batches": Case("""
torch.set_num_threads(2)  # nothing is rehearsed
def main():
    for epoch in range(3):
        size = sum(p.abs().sum().item() for p in model.parameters())
        for i, (x, y) in enumerate(loader):
            {step}
            die(epoch, i)
        die(epoch, "eval")
main()
""", "size' was made before the loop of line", kills=("0,4", "2,3"), scale="(1 / size)"),
    "rate that is shown before the batches": Case("""
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=21)
def main():
    for epoch in range(3):
        began = optimizer.param_groups[0]["lr"], schedule.last_epoch
        for i, (x, y) in enumerate(loader):
            {step}
            schedule.step()
            die(epoch, i)
        if epoch == 2: print("END", began)
        die(epoch, "eval")
main()
"""),
    "count that a generator reads": Case("""
torch.set_num_threads(2)  # nothing is rehearsed
seen = 1
def batches():
    for k in range(0, 28, 4):
        yield dataset.tensors[0][k : k + 4] * seen, dataset.tensors[1][k : k + 4]
for epoch in range(3):
    for i, (x, y) in enumerate(batches()):
        {step}
        if loss.item() < 2: seen += 1
        die(epoch, i)
    die(epoch, "eval")
""", shown="seen"),
    "count of a function that a dataset reads": Case("""
torch.set_num_threads(2)  # nothing is rehearsed
def main():
    seen = i = 0
    class Counted(Dataset):
        def __len__(self):
            return 28
        def __getitem__(self, index):
            return dataset[index][0] * (1 + seen + i), dataset[index][1]
    for epoch in range(3):
        for i, (x, y) in enumerate(DataLoader(Counted(), batch_size=4, shuffle=True)):
            {step}
            seen += 1
            die(epoch, i)
        die(epoch, "eval")
main()
"""),
    "sampler and dataset that draw from one generator": Case("""
torch.set_num_threads(2)  # nothing is rehearsed
dice = random.Random(3)
class Pool(Sampler):
    def __iter__(self):
        pool = list(range(28))
        while pool:
            yield pool.pop(dice.randrange(len(pool)))
    def __len__(self):
        return 28
class Noisy(Dataset):
    def __len__(self):
        return 28
    def __getitem__(self, index):
        return dataset[index][0] + dice.random(), dataset[index][1]
loader = DataLoader(Noisy(), batch_size=4, sampler=Pool())
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    die(epoch, "eval")
""", "the items of the loop of line", kills=("0,2", "2,3")),
    "indices that are drawn in parts, from the generator of the steps": Case("""
torch.set_num_threads(2)  # nothing is rehearsed
dice = torch.Generator().manual_seed(3)
order = torch.utils.data.RandomSampler(range(70), replacement=True, num_samples=70, generator=dice)
class More(Dataset):
    def __len__(self):
        return 70
    def __getitem__(self, index):
        return dataset[index % 28]
loader = DataLoader(More(), batch_size=10, sampler=order)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        x = x + torch.rand(4, generator=dice)
        {step}
        die(epoch, i)
    die(epoch, "eval")
""", "the items of the loop of line", kills=("0,4", "2,5")),
    "number of the batch before, which makes the next one": Case("""
torch.set_num_threads(2)  # nothing is rehearsed
i = 0
def collate(rows):
    return torch.stack([row[0] for row in rows]) * (1 + i), torch.stack([row[1] for row in rows])
loader = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    die(epoch, "eval")
"""),
    "number in a list with a module": Case(inline(
        pre="torch.set_num_threads(2)\nheld = [model, 0]\ndef count(): held[1] += 1", body="count()",
    ), "held[1]", kills=("2,3",), scale="(1 + held[1])"),
    "gradients that are read behind the batches": Case(inline(
        behind="norm = sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None)\nif epoch == 2: print('END', norm)",
    ), shown="norm"),
    "two optimizers": Case("""
critic = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
second = torch.optim.Adam(critic.parameters(), lr=0.01)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        made(epoch, i)
        critic.zero_grad()
        fake = model(x)
        real = critic(F.one_hot(y, 3).float()).mean()
        real.backward()
        critic(fake.detach()).mean().backward()
        second.step()
        model.zero_grad()
        critic(fake).mean().backward()
        optimizer.step()
        die(epoch, i)
    die(epoch, "eval")
""", shown="[p.tolist() for p in critic.parameters()]"),
    "closure of LBFGS": Case("""
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        made(epoch, i)
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)
        die(epoch, i)
    die(epoch, "eval")
"""),
    "clears of one of two": Case(inline(
        pre="args = argparse.Namespace(own=False)",
        loop=INLINE.replace("{step}", "made(epoch, i)\n        if args.own:\n            optimizer.zero_grad()\n        else:\n"
        "            model.zero_grad()\n        loss = F.cross_entropy(model(x), y)\n        loss.backward()\n        optimizer.step()"),
    )),
    "while with a batch fetched before": Case("""
def batch():
    picked = torch.randint(28, (4,))
    return tuple(part[picked] for part in dataset.tensors)
x, y = batch()
epoch = i = 0
best = math.inf
while True:
    {step}
    x, y = batch()
    best = min(best, loss.item())
    die(epoch, i)
    i += 1
    if i == 7:
        epoch, i = epoch + 1, 0
    if epoch == 3:
        break
""", kills=("0,4", "0,6", "2,3", "2,6", "end"), shown="best, epoch, i"),
    "while with a condition, and loaders in it": Case("""
epoch = 0
while epoch < 3:
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    epoch += 1
    die(epoch - 1, "eval")
""", shown="epoch, loss.item()"),
    "state of a recurrent network": Case("""
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = torch.nn.LSTM(4, 8), torch.nn.Linear(8, 3)
    def forward(self, x, hidden):
        found, hidden = self.rnn(x[:, None], hidden)
        return self.out(found[:, 0]), hidden
def detached(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(map(detached, h))
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
model = net
def train(epoch):
    hidden = (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))
    for i, (x, y) in enumerate(loader):
        made(epoch, i)
        optimizer.zero_grad()
        hidden = detached(hidden)
        found, hidden = net(x, hidden)
        F.cross_entropy(found, y).backward()
        optimizer.step()
        die(epoch, i)
for epoch in range(3):
    train(epoch)
    die(epoch, "eval")
"""),
    "tensor that lives from epoch to epoch": Case(inline(
        pre="mean = torch.zeros(4)", behind="mean = mean * 0.9 + x.mean(0)",
    ), scale="(1 + mean.sum().item())", shown="mean.tolist()"),
    "tensor that lives from step to step": Case(inline(
        pre="mean = torch.zeros(4)", body="mean = mean * 0.9 + x.mean(0)",
    ), scale="(1 + mean.sum().item())", shown="mean.tolist()"),
    "best state of all epochs": Case(EVALUATE + """
def main():
    best, state = math.inf, None
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            {step}
            die(epoch, i)
        now = evaluate()
        if now < best:
            best, state = now, copy.deepcopy(model.state_dict())
        die(epoch, "eval")
    if state is not None:
        model.load_state_dict(state)
main()
""", kills=("0,5", "1,3", "2,6")),
    "best state of all epochs, with what a module puts on it": Case(EVALUATE + """
norm = torch.nn.BatchNorm1d(4)
model = torch.nn.Sequential(norm, *model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state, losses = None, []
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    losses.append(evaluate())
    if losses[-1] <= min(losses):
        state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
""", shown="losses, state, state._metadata", kills=("0,5", "1,3", "2,6")),
    "plain list of two names, changed in a late epoch": Case("""
def main():
    best = [0]
    holder = argparse.Namespace(best=best)
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            {step}
            die(epoch, i)
        if epoch == 100:
            best = [1]
        best.append(1)
    print(holder.best, best)
main()
""", kills=("0,5", "1,3", "2,6")),
    # Not kept, and why.
    "order that a tensor of later steps tells": Case("""
seen = torch.zeros(28)
orders = []
for epoch in range(3):
    order = torch.argsort(seen + torch.arange(28) / 100)
    for i, part in enumerate(order.split(4)):
        x, y = dataset.tensors[0][part], dataset.tensors[1][part]
        seen[part] = torch.rand(4)
        {step}
        die(epoch, i)
    orders.append(order.tolist())
""", "'order' was made before the loop", shown="orders", kills=("1,3", "2,3")),
    "number of steps that a tensor of later steps tells": Case("""
seen, counts = torch.zeros(9), []
for epoch in range(3):
    number = 5 + int(seen.sum()) % 3
    for i in range(number):
        x, y = (part[4 * i % 28 : 4 * i % 28 + 4] for part in dataset.tensors)
        seen[i] = 1.0
        {step}
        die(epoch, i)
    counts.append(number)
""", "'number' was made before the loop", shown="counts", kills=("1,3",)),
    "state of all epochs that an inner loop changes": Case("""
mean = {name: each.clone() for name, each in model.state_dict().items()}
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        {step}
        for name, each in model.state_dict().items():
            mean[name].mul_(0.9).add_(each, alpha=0.1)
        die(epoch, i)
    if epoch == 1:
        mean = {name: each.clone() for name, each in mean.items()}
""", "is changed in an inner loop", shown="mean", kills=("0,5", "2,3")),
    "best state of all epochs that is not copied": Case("""
state = None
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    if epoch < 2:
        state = model.state_dict()
""", "which trains", shown="state", kills=("1,3", "2,6")),
    "tensor of all epochs of two names": Case("""
mean = torch.zeros(4)
holder = argparse.Namespace(mean=mean)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    if epoch == 0:
        mean = mean + 1
        holder.mean = mean
    if epoch == 1:
        mean.add_(1)
""", "'mean' has a part of it", scale="(1 + holder.mean.sum())", shown="mean, holder.mean", kills=("1,3", "2,3")),
    "generator that draws step by step": Case("""
def batches():
    for k in range(7):
        order = torch.randint(28, (4,))
        yield tuple(part[order] for part in dataset.tensors)
for epoch in range(3):
    for i, (x, y) in enumerate(batches()):
        {step}
        die(epoch, i)
    die(epoch, "eval")
""", "drawn step by step", kills=("0,4", "2,3")),
    "sampler that draws step by step": Case("""
class Own(Sampler):
    def __iter__(self):
        for _ in range(28):
            yield random.randrange(28)
    def __len__(self):
        return 28
loader = DataLoader(dataset, batch_size=4, sampler=Own())
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        {step}
        die(epoch, i)
    die(epoch, "eval")
""", "drawn step by step", kills=("0,4", "2,3")),
    "shorter at the second time": Case(
        inline(loop=INLINE.replace("range(3)", "range(int(os.environ.get('N', 3)))")), "items of the loop of line",
        again=(("N", "1"),), kills=("2,3",),
    ),
    "other data at the second time": Case(
        inline(pre="loader = DataLoader(dataset, batch_size=int(os.environ.get('N', 4)), shuffle=True)"), "batch_size",
        again=(("N", "2"),), kills=("2,3",),
    ),
    "goes on from a file of its own": Case(inline(
        pre="first, file = 0, os.environ['MARK'] + '.own'\nif os.path.exists(file):\n    own = torch.load(file)\n"
        "    model.load_state_dict(own['model']); torch.set_rng_state(own['rng']); first = own['epoch'] + 1\n"
        "    optimizer.load_state_dict(own['optimizer'])",
        behind="torch.save({'model': model.state_dict(), 'rng': torch.get_rng_state(), 'epoch': epoch, 'optimizer': "
        "optimizer.state_dict()}, file)",
        loop=INLINE.replace("range(3)", "range(first, 3)"),
    ), "a file of its own", kills=("2,3",)),
    "teacher made in every epoch": Case(inline(
        pre="teacher = [copy.deepcopy(model)]", before="teacher = [copy.deepcopy(model)]", body="pass",
    ), "", kills=("2,3",), scale="(1 + teacher[0][0].bias[0].item())"),
    "tensor that grows in the steps": Case(inline(
        pre="class Kept: mean = torch.zeros(4)", body="Kept.mean = Kept.mean * 0.9 + x.mean(0)",
    ), kills=("0,4", "2,3"), scale="(1 + Kept.mean.sum().item())"),
    "tensor that grows between": Case(inline(
        pre="class Kept: mean = torch.zeros(4)", behind="Kept.mean = Kept.mean * 0.9 + x.mean(0)",
    ), kills=("2,3",), scale="(1 + Kept.mean.sum().item())"),
    "list of tensors that lives from epoch to epoch": Case(inline(
        pre="means = []", behind="means = means + [x.mean(0)]",
    ), kills=("1,3", "2,3"), scale="(1 + sum(map(torch.sum, means)))"),
    "tensor of the epochs that steps change in place": Case(inline(
        pre="mean = torch.zeros(4)", body="mean.add_(x.mean(0))", behind="mean = mean * 0.5",
    ), "mean", kills=("2,3",), scale="(1 + mean.sum().item())"),
    "tensors that are views of each other": Case(inline(
        pre="a = torch.zeros(4); b = a[:2]", body="a = a + x.mean(0); b = a[:2]; c = a.sum()",
    ), kills=("2,3",), scale="(1 + a.sum().item() + b.sum().item())"),
    "state in the environment": Case(inline(
        pre="os.environ['N'] = '0'", body="os.environ['N'] = str(int(os.environ['N']) + 1)",
    ), kills=("2,3",), scale="(1 + int(os.environ['N']))"),
    "state in the environment, from epoch to epoch": Case(inline(
        pre="os.environ['N'] = '0'", behind="os.environ['N'] = str(int(os.environ['N']) + 1)",
    ), kills=("2,3",), scale="(1 + int(os.environ['N']))"),
    "iterator before the epochs": Case("""
batches = iter(list(loader) * 3)
for epoch in range(3):
    for i in range(7):
        x, y = next(batches)
        {step}
        die(epoch, i)
    die(epoch, "eval")
""", "batches", kills=("2,3",)),
    "gradients that are never cleared": Case(inline(
        loop=INLINE.replace("{step}", "made(epoch, i)\n        F.cross_entropy(model(x), y).backward()\n        optimizer.step()")
    ), kills=("2,3",)),
    "set that is gone through": Case("""
words = {"a", "b", "c", "d", "e", "f", "g"}
for epoch in range(3):
    for i, word in enumerate(sorted(words)):
        x, y = next(iter(loader))
        {step}
        die(epoch, i)
    die(epoch, "eval")
"""),
    "sparse tensor that stays": Case(inline(pre="graph = torch.eye(4).to_sparse()"), kills=("2,3",), scale="torch.sparse.mm(graph, graph).sum()"),
    "tensors of an attribute that are views": Case(inline(
        pre="class Kept: mean = torch.zeros(4); part = mean[:2]", body="Kept.mean.mul_(0.9).add_(x.mean(0))",
    ), "changes in the loop", kills=("2,3",), scale="(1 + Kept.part.sum().item())"),
    "tensor of an attribute that an object with a state has too": Case(inline(
        pre="class Mean:\n    def __init__(self): self.mean = torch.zeros(4)\n    def state_dict(self): return {'mean': self.mean}\n"
        "    def load_state_dict(self, state): self.mean.copy_(state['mean'])\n"
        "ema = Mean()\nclass Kept: mean = ema.mean",
        body="ema.mean.mul_(0.9).add_(x.mean(0))",
    ), "changes in the loop", kills=("2,3",), scale="(1 + Kept.mean.sum().item() + ema.mean.sum().item())"),
    "array of an attribute": Case(inline(
        pre="class Kept: mean = np.zeros(4)", body="Kept.mean[:2] += x.mean(0).numpy()[:2]",
    ), kills=("0,4", "2,3"), scale="(1 + float(Kept.mean.sum()))"),
    "meters of tensors": Case("""
class Meter:
    def __init__(self):
        self.total, self.count = 0, 0
    def add(self, value):
        self.total += value
        self.count += 1
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
best = 0
def train(epoch):
    meter = Meter()
    for i, (x, y) in enumerate(loader):
        {step}
        meter.add(loss.detach())
        die(epoch, i)
    return meter.total / meter.count
def main():
    global best
    args = parser.parse_args([])
    for epoch in range(args.epochs):
        best = max(best, train(epoch))
        die(epoch, "eval")
main()
""", shown="best", kills=("0,4", "2,3", "2,6")),
    "parameters changed by hand": Case("""
rate = 0.1
del optimizer
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        made(epoch, i)
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-rate)
        die(epoch, i)
    rate *= 0.9
    die(epoch, "eval")
""", shown="rate", kills=("0,4", "2,3", "2,6")),
    "layers that train one after the other": Case("""
class Layer(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.own = torch.optim.Adam(self.parameters(), lr=0.01)
    def learn(self, a, b, epoch):
        for i in range(7):
            made(epoch, i)
            loss = self(a).square().mean() - self(b).abs().mean()
            self.own.zero_grad()
            loss.backward()
            self.own.step()
            die(epoch, i)
        return self(a).detach(), self(b).detach()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer(), Layer()])
    def learn(self, first, second):
        a, b = first, second
        for epoch, layer in enumerate(self.layers):
            a, b = layer.learn(a, b, epoch)
model = Net()
model.learn(dataset.tensors[0][:8], dataset.tensors[0][8:16])
""", kills=("0,4", "2,3")),
    "file that is written in some epochs": Case(inline(
        pre="best = math.inf",
        behind="if loss.item() < best:\n    with open(os.environ['MARK'] + '.best', 'w') as f:\n        f.write(str(epoch))\n    best = loss.item()",
    ) + "\nwith open(os.environ['MARK'] + '.best') as f:\n    print('best of', f.read())\n", shown="best", kills=("0,4", "2,3")),
    "name that is never set": Case(inline(
        pre="recurrent = False\nif recurrent: hidden = torch.zeros(4)", body="if recurrent: hidden = hidden + x.mean(0)",
    ), kills=("0,4", "2,3")),
    "variable of the environment that changes late": Case(inline(
        pre="os.environ['SCALE'] = '1'", behind="if epoch == 1: os.environ['SCALE'] = '0.5'",
    ), kills=("0,4", "2,3"), scale="float(os.environ['SCALE'])"),
    "split that is another one at the second start": Case(inline(
        pre="rows = [*range(28)]\nif 'AGAIN' in os.environ: rows = rows[::-1]\n"
        "loader = DataLoader(torch.utils.data.Subset(dataset, rows[:28]), batch_size=4)",
    ), "is another one than in the run that saved", kills=("2,3",), again=(("AGAIN", "1"),)),
    "file that is filled and read": Case(inline(
        pre="path = os.environ['MARK'] + '.rate'\nopen(path, 'w').write('1')",
        body="rate = float(open(path).read())", behind="if epoch == 1: open(path, 'w').write('0.5')",
    ), "is written before the loop and in it, and read", kills=("2,3",), scale="float(open(path).read())"),
    "weights of the best epoch in a file that is begun before the loop": Case(inline(
        pre="path = os.environ['MARK'] + '.pt'\ntorch.save(model.state_dict(), path)",
        behind="if epoch == 1: model.load_state_dict(torch.load(path))\nelse: torch.save(model.state_dict(), path)",
    ), "is written before the loop and in it", kills=("2,3",)),
    "weights of the best epoch that are loaded behind the loop": Case(inline(
        pre="path = os.environ['MARK'] + '.pt'\ntorch.save(model.state_dict(), path)",
        behind="if epoch == 0: torch.save(model.state_dict(), path)",
    ) + "\nmodel.load_state_dict(torch.load(path))", "is written before the loop and in it", kills=("2,3",)),
    "object of a library that counts": Case(inline(
        pre="import textwrap\nwrapper = textwrap.TextWrapper()", body="wrapper.width += 1",
    ), kills=("0,4", "2,3"), scale="(1 + wrapper.width / 100)"),
    "data that answers to every name": Case("""
class Fields(Dataset):
    fields = ("label",)
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        return self.rows[i]
    def __getattr__(self, name):
        if name in self.fields:
            for row in self.rows:
                yield row
fields = Fields([0.5, 1.5, 1.0])
""" + inline(
        behind="print(sum(fields.label) / len(fields))",
    ), kills=("0,4", "2,3"), scale="fields[i % len(fields)]"),
    "batches of a library that would begin their epoch again": Case(shelved(), package=SHELF, shown="best"),
    "batches of a library, counted by hand": Case(
        shelved(loop=SHELVED.replace("for i, at in enumerate(batches):", "i = -1\n    for at in batches:\n        i += 1")),
        package=SHELF, shown="best", kills=("0,4", "2,3", "end"),
    ),
    "batches of a library in an order that nobody seeded": Case(
        shelved(pre="if 'AGAIN' in os.environ: random.seed(7)"), "is another one than in the run that saved",
        package=SHELF, kills=("0,4",), again=(("AGAIN", "1"),),
    ),
    "batches of a library, of other rows": Case(
        shelved(rows="if 'AGAIN' in os.environ: rows[3].words[0] = 9"), "is another one than in the run that saved",
        package=SHELF, kills=("2,3",), again=(("AGAIN", "1"),),
    ),
    "batches of a library that steps take from too": Case(
        shelved(body="if i == 1: next(batches.parts)"), "others than in the run that saved", package=SHELF, kills=("0,3", "2,3"),
    ),
    "batches of a library that are left in the middle": Case(
        shelved(body="if i == 5: break"), "'batches.parts' came to be in the loop", package=SHELF, kills=("2,3",),
    ),
    "batches of the script's own that say where they are": Case("""
class Batches:
    def __init__(self): self.at = 0
    def __iter__(self):
        while self.at < 28:
            self.at += 4
            yield torch.arange(self.at - 4, self.at)
        self.at = 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
batches = Batches()
for epoch in range(3):
    for i, at in enumerate(batches):
        x, y = dataset.tensors[0][at], dataset.tensors[1][at]
        {step}
        die(epoch, i)
    die(epoch, "eval")
""", "it has a place of its own, which it hands out", kills=("0,4", "2,3")),
    "meter that a generator of the script prints": Case("""
import time
class Meter:
    def __init__(self): self.total, self.counts = 0.0, collections.deque(maxlen=3)
    def add(self, value): self.total += value
    def log_every(self, batches):
        begin, seconds = time.time(), Meter()
        for batch in batches:
            yield batch
            seconds.add(time.time() - begin)
            left = seconds.total * (7 - len(self.counts))
            spent = f"{time.time() - begin:.3f}"
            print("log", self.total / self.counts[-1], spent)
for epoch in range(3):
    meter = Meter()
    for i, (x, y) in enumerate(meter.log_every(loader)):
        {step}
        meter.total += loss.item()
        meter.counts.append(i + 1)
        die(epoch, i)
    die(epoch, "eval")
""", kills=("0,4", "0,6", "2,3", "end"), shown="meter.total"),
    "meter of which an item is made once more than it can": Case("""
calls = collections.Counter()
class Meter:
    def __init__(self): self.total = 0.0
    def log_every(self, batches):
        for batch in batches:
            yield batch
            self.seen = 1.0 / self.total
for epoch in range(3):
    meter = Meter()
    for i, (x, y) in enumerate(meter.log_every(loader)):
        {step}
        meter.total += 1.0
        die(epoch, i)
    die(epoch, "eval")
""", "cannot be taken again: ZeroDivisionError", kills=("0,4", "2,3")),
    "writer of TensorBoard": Case(inline(
        pre="import shelf\nwriter = shelf.SummaryWriter()\nwriter.rounds = 0",
        body="writer.add_scalar('loss', i)\nwriter.rounds += 1", behind="writer.flush()",
    ), shown="writer.rounds", kills=("0,4", "2,3", "end"), scale="(1 + 0.1 * writer.rounds)", package=WRITER),
    "files that are only written": Case(inline(
        pre="path = os.environ['MARK']\nnew, log = open(path + '.new', 'w'), open(path + '.log', 'a')",
        body="for file in (new, log):\n    print(epoch, i, file=file, flush=True)",
    ), shown="new.writable() and 'w' in new.mode", kills=("0,4", "2,3")),
    "file that is read and written": Case(inline(
        pre="file = open(os.environ['MARK'] + '.n', 'w+')", body="file.write('1')\nfile.seek(0)",
    ), "TextIOWrapper", kills=("0,4",), scale="(1 + len(file.read()))"),
    "files in a directory that the time of the start names": Case(OF_START + inline(
        pre="import time\nplace = Place(os.environ['MARK'] + f'.{time.time_ns()}')\nwhere = place.at",
        behind="torch.save(epoch, f'{place.at}/{epoch}.pt')",
    ), shown="len(os.listdir(where)), torch.load(where + '/0.pt')", kills=("0,4", "2,3", "2,6", "end")),
    "weights that are read from a path that the time of the start names": Case(inline(
        pre="import pathlib, time\nplace = pathlib.Path(f\"{os.environ['MARK']}.{time.time_ns()}\")\nplace.mkdir()",
        behind="if epoch == 0: torch.save(model.state_dict(), place / 'best.pt')",
    ) + "\nmodel.load_state_dict(torch.load(place / 'best.pt'))", "have it come from an argument", kills=("2,3",)),
    "weights that a function reads where the time of the start says": Case("""
import time
def train(to):
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            {step}
            die(epoch, i)
        if epoch == 0: torch.save(model.state_dict(), to + ".pt")
def main():
    at = os.environ['MARK'] + f'.{time.time_ns()}'
    train(at)
    model.load_state_dict(torch.load(at + ".pt"))
main()
""", "have it come from an argument", kills=("2,3",)),
    "weights that a function writes where the time of the start says": Case("""
import time
def main():
    at = os.environ['MARK'] + f'.{time.time_ns()}'
    own = os.environ['MARK'] + '.pt'
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            {step}
            die(epoch, i)
        torch.save(model.state_dict(), at)
        if epoch == 0: torch.save(model.state_dict(), own)
    model.load_state_dict(torch.load(own))
main()
""", kills=("2,3",)),
    "pipe that is written and read": Case(inline(
        pre="r, w = os.pipe()\nto = os.fdopen(w, 'w')", body="to.write('ab')\nto.flush()\nos.read(r, 1)",
    ), "TextIOWrapper", kills=("0,4",)),
    "directory of another start that is gone": Case(OF_START + inline(
        pre="import glob, shutil, time\nfor old in glob.glob(os.environ['MARK'] + '.*'): shutil.rmtree(old)\n"
        "place = Place(os.environ['MARK'] + f'.{time.time_ns()}')\nwhere = place.at",
        behind="torch.save(epoch, f'{place.at}/{epoch}.pt')",
    ), "have it come from an argument", shown="len(os.listdir(where))", kills=("2,3",)),
    "name that nobody can see to be drawn": Case(inline(
        pre="run = os.urandom(8).hex()\nos.path.exists(run)", body="len(run)",
    ), "have it come from an argument", kills=("2,3",)),
    "name that a file of the script's own gives": Case(inline(
        pre=OWN_FILE + "run = f'run{n}'", body="len(run)", behind="open(path, 'a').write('1')",
    ), "'run' was 'run0'", scale="len(run)", kills=("2,3",)),
    "name that a file of the script's own gives, beside a time": Case(inline(
        pre=OWN_FILE + "run, since = f'run{n}', time.time()", body="len(run)", behind="open(path, 'a').write('1')",
    ), scale="(len(run) + int(run[3:]) / 10)", kills=("2,3",)),
    "batches that are asked for": Case(asked(), kills=KILLS[:4]),
    "batches that are asked for, of which one was taken before": Case(
        asked("batches = iter(loader)\nnext(batches)", behind="x, y = next(iter(loader))"), kills=("0,6", "0,eval", "2,3")),
    "batches that are asked for, in order": Case(
        asked("loader = DataLoader(dataset, batch_size=None)\nbatches = iter(loader)"), kills=("1,4",)),
    "batches that a class asks for": Case("""
class Batches:
    def __init__(self, loader): self.loader, self.taken = loader, iter(loader)
    def next(self):
        try:
            return next(self.taken)
        except StopIteration:
            self.taken = iter(self.loader)
            return next(self.taken)
batches, i = Batches(loader), 0
while True:
    x, y = batches.next()
    {step}
    i += 1
    die(i)
    if i >= 20: break
""", at="i", kills=("5", "7", "8", "17")),
    "batches that a function asks for": Case("""
def train(loader, batches):
    others = iter(loader)
    for i in range(18):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        x, y = batch
        if i % 3 == 0 and i < 12: x = x + next(others)[0].mean()
        {step}
        die(i)
train(loader, iter(loader))
""", at="i", kills=("4", "7", "8", "16")),
    "batches that are asked for, begun in every epoch": Case("""
for epoch in range(3):
    batches = iter(loader)
    for i in range(5):
        x, y = next(batches)
        {step}
        die(epoch, i)
""", kills=("0,4", "1,2", "2,4")),
    "loops that give their items to attributes": Case("""
class Trainer:
    def __init__(self): self.epoch, self.i, self.seen = 0, 0, []
    def train(self):
        for self.epoch in range(3):
            self.seen.append(self.epoch)
            for self.i, (x, y) in enumerate(loader):
                {step}
                die(self.epoch, self.i)
            die(self.epoch, "eval")
trainer = Trainer()
trainer.train()
""", at="trainer.epoch, trainer.i", scale="(1 + trainer.epoch + len(trainer.seen) / 10)", shown="trainer.seen", kills=("0,6", "0,eval", "1,2", "2,3")),
    "loop that gives its items to an item of a dict and a name": Case("""
at = {}
for at["epoch"] in range(3):
    for i, at["x"] in enumerate(loader):
        x, y = at["x"]
        {step}
        die(at["epoch"], i)
""", at="at['epoch'], i", shown="sorted(at)", kills=("0,6", "1,2")),
    "batches that a generator hands out again and again": Case(cycled(), at="i", kills=("4", "7", "8", "16")),
    "batches that a generator hands out, by pairs": Case(
        cycled("def cycle(dl):\n    while 1:\n        for x, y in dl:\n            yield x, y"), at="i", kills=("5", "12")),
    "batches that a generator passes on": Case(
        cycled("def cycle(dl):\n    'Again and again.'\n    while True:\n        yield from dl"), at="i", kills=("5", "12")),
    "batches that a generator hands out, of which one was taken before": Case(
        cycled(pre="next(batches)"), at="i", kills=("4", "8", "15")),
    "batches that a generator hands out, in a class and a function": Case("""
def cycle(dl):
    while True:
        for data in dl: yield data
class Trainer:
    def __init__(self, loader):
        self.dl, self.at, self.calls = cycle(loader), 0, 0
    def train(self):
        while self.at < 18:
            for _ in range(2):
                x, y = next(self.dl)
                {step}
            self.at += 1
            die(self.at)
Trainer(loader).train()
""", at="self.at", kills=("4", "8", "15")),
    "batches that a generator hands out, from the middle of the loop on": Case(
        cycled(body="x, y = next(batches) if i > 4 else next(iter(loader))"), at="i", kills=("5", "6", "9")),
    "batches that a generator hands out, beside a count of its own": Case(
        cycled("def cycle(dl):\n    n = 0\n    while True:\n        for data in dl:\n            n += 1\n            yield data"),
        "generator", at="i", kills=("5",)),
    "batches that a generator hands out, changed": Case(
        cycled("def cycle(dl):\n    while True:\n        for x, y in dl:\n            yield x + 1, y"), "generator", at="i", kills=("5",)),
    "batches that a generator hands out, of a dataset that counts and draws and has no name": Case(cycled(DRAWING + "def cycle(dl: DataLoader) -> object:\n    while True:\n        for data in dl: yield data").replace("cycle(loader)", "cycle(DataLoader(Drawing(), batch_size=4, shuffle=True))"), at="i", kills=("4", "8", "15")),
    "batches that are asked for, of a dataset and a collate function that have no name": Case(asked(
        DRAWING + "class Joined:\n    calls = 0\n    def __call__(self, rows):\n        self.calls += 1\n"
        "        return torch.stack([x for x, _ in rows]) * self.calls, torch.stack([y for _, y in rows])\n"
        "def begun(): return iter(DataLoader(Drawing(), batch_size=2, shuffle=True, collate_fn=Joined()))\nbatches = begun()", again="raise",
    ).replace("range(9)", "range(4)"), kills=("1,1", "2,1")),
    "batches that a generator hands out, of other data without a name": Case(
        OTHER_ROWS + cycled().replace("cycle(loader)", "cycle(DataLoader(Rows(), batch_size=4, shuffle=True))"),
        "'batches.loader.dataset.rows' is another one than in the run that saved", at="i", kills=("4", "15"), again=(("AGAIN", "1"),)),
    "batches that a generator hands out, of other data under a name that the loop does not read": Case(
        "def main():\n" + indent(OTHER_ROWS + "dl = DataLoader(Rows(), batch_size=4, shuffle=True)\n" + cycled().replace("loader", "dl"), "    ") + "main()",
        "'batches.loader.dataset.rows' is another one than in the run that saved", at="i", kills=("4",), again=(("AGAIN", "1"),)),
    "batches that are asked for, of other data without a name": Case(
        OTHER_ROWS + "batches = iter(DataLoader(Rows(), batch_size=4))\nfor i in range(7):\n    x, y = next(batches, None)\n    {step}\n    die(i)\n    if i > 5: batches = None",
        "'batches.dataset.rows' is another one than in the run that saved", at="i", kills=("4",), again=(("AGAIN", "1"),)),
    "batches that are asked for, and then of a generator": Case(
        cycled().replace("batches = cycle(loader)", "batches = iter(loader)").replace("    x, y", "    if i == 5: batches = cycle(loader)\n    x, y", 1),
        "'batches' changes in the loop", at="i", kills=("8",)),
    "batches that a generator hands out, and then another one in pairs": Case(
        "def pairs(dl):\n    while True:\n        for x, y in dl: yield x, y\n"
        + cycled(body="if i == 5: batches = pairs(loader)\n    batch = next(batches)\n    x, y = (1 + isinstance(batch, tuple)) * batch[0], batch[1]"),
        "'batches' changes in the loop", at="i", kills=("8", "15")),
    "batches that a generator hands out, of a loader whose name is another's by now": Case(
        cycled(pre="next(batches)\nloader = DataLoader(dataset, batch_size=7, shuffle=True)").replace("cycle(dl)", "cycle()").replace(
            "in dl", "in loader").replace("cycle(loader)", "cycle()"), "'batches', a generator", at="i", kills=("4", "8")),
    "batches that a generator hands out, begun again in the loop and not asked yet": Case(
        cycled(pre="next(batches)", body="x, y = next(batches)\n    again = i % 7 == 4").replace("    die", "    if again: batches = cycle(loader)\n    die"),
        at="i", kills=("4", "5", "11")),
    "batches that a generator hands out, of a loader with a generator that steps draw from": Case(
        "a_dice = torch.Generator().manual_seed(3)\nloader = DataLoader(dataset, batch_size=4, generator=a_dice)\n"
        + cycled(body="x, y = next(batches)\n    x = x + torch.rand(1, generator=a_dice)"), at="i", kills=("4", "15")),
    "batches that a generator hands out, of a loader of another size from one epoch on": Case(
        cycled(body="if i == 7: loader.batch_sampler.batch_size = 7\n    x, y = next(batches)"), at="i", kills=("4", "8", "9")),
    "generator of a script whose text cannot be read": Case(
        '\"\"\"Trains.\n@author me\n\"\"\"\nbatches = (b for _ in range(9) for b in loader)\nfor i in range(19):\n    x, y = next(batches)\n    {step}\n    die(i)\n',
        "'batches', a generator", at="i", kills=("5",)),
    "batches that a generator hands out, and the loop goes over": Case("""
def cycle(dl):
    while True:
        for data in dl: yield data
batches = cycle(loader)
for i, (x, y) in enumerate(batches):
    {step}
    die(i)
    if i >= 18: break
""", "its items are drawn step by step", at="i", kills=("4", "8", "15")),
    "batches that a generator hands out, of another loader from one on": Case(
        cycled(body="if i == 9: batches = cycle(DataLoader(dataset, batch_size=4))\n    x, y = next(batches)"), "'batches'", at="i", kills=("11",)),
    "batches that are asked for, of another loader": Case(
        asked("batches, other = iter(loader), DataLoader(dataset, batch_size=4)", again="batches = iter(other)"),
        "'batches' changes in the loop", kills=("2,3",)),
    "batches that are asked for, begun in the loop": Case("""
batches = None
for i in range(9):
    if batches is None: batches = iter(loader)
    x, y = next(batches) if i < 7 else next(iter(loader))
    {step}
    die(i)
""", "batches", at="i", kills=("4",)),
    "batches that are asked for, drawn by a generator of their own": Case(
        asked("loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator())\nbatches = iter(loader)"),
        "_SingleProcessDataLoaderIter", kills=("1,3",)),
    "batches that are asked for, of another size from one on": Case(
        asked(body="if (epoch, i) == (0, 2): loader.batch_sampler.batch_size = 6"), "'batches'", kills=("0,4", "2,3")),
    "batches of another size from one on": Case(inline(
        body="if i == 2: loader.batch_sampler.batch_size = 6"), "a sampler's settings change", kills=("1,4",)),
    "batches of another size from epoch to epoch": Case(
        inline(behind="loader.batch_sampler.batch_size += 1"), kills=("2,3",)),
    "tensor in the memory of a parameter, which gets memory of its own": Case(inline(
        pre="same = model[0].weight.data", body="if (epoch, i) == (1, 2): model[0].weight.data = same.clone()",
    ), "'the memory of same'", scale="(1 + same.sum().item() / 100)", kills=("2,3",)),
    "tensor in the memory of a parameter": Case(inline(
        pre="same = model[0].weight.data"), scale="(1 + same.sum().item() / 100)", kills=("2,3",)),
    "tensors of their own with names that are alike": Case(inline(
        pre="t, _t, t_ = (torch.full((1,), float(k), requires_grad=True) for k in range(3))\n"
        "other = torch.optim.Adam([t, _t, t_], lr=0.1)",
        body="other.zero_grad()\n((t - 1) ** 2 + (_t - 3) ** 2 + (t_ + t) ** 2).backward()\nother.step()",
    ), scale="(t.exp() + _t + t_ * 2).item()", kills=("2,3",)),
    "tensor of its own that an optimizer steps": Case(inline(
        pre="log_alpha = torch.zeros(1, requires_grad=True)\nalpha = log_alpha.exp().item()\nother = torch.optim.Adam([log_alpha], lr=0.1)",
        body="if i % 2:\n    other.zero_grad()\n    (log_alpha.exp() * loss.item()).mean().backward()\n    other.step()\n    alpha = log_alpha.exp().item()",
    ), shown="log_alpha.item(), other.state_dict()", scale="(1 + alpha)", kills=KILLS[:4]),
    "tensors of a list and of an object, and no module": Case("""
class Line:
    def __init__(self): self.bias = torch.nn.Parameter(torch.zeros(3))
line, weights = Line(), [torch.zeros(4, 3, requires_grad=True), torch.ones(3, requires_grad=True)]
def model(x): return x @ weights[0] * weights[1] + line.bias
model.parameters = lambda: [*weights, line.bias]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
""" + inline(), kills=("0,4", "2,3")),
    "tensor of its own that is changed by hand": Case(inline(
        pre="rate = torch.ones(1, requires_grad=True)",
        body="(rate * loss.item()).sum().backward()\nrate.data.add_(rate.grad, alpha=-0.01)\nrate.grad = None",
    ), "'rate' is a tensor with a gradient outside of a module", kills=("2,3",), scale="rate.item()"),
    "dict of a library that makes up what is in it": Case(inline(
        pre="import shelf\nnames = shelf.Names()", body="names['a']",
    ), kills=("0,4", "2,3"), package=SHELF + """
class Names(dict):
    def _load(self): raise ImportError('not installed')
    def __getitem__(self, key): return 1
    __iter__ = __len__ = keys = values = items = _load
"""),
    "object of a library that cannot say its state": Case(inline(
        pre="import shelf\nmean = shelf.Mean()", body="mean.sum += 1",
    ), "'mean', a Mean, cannot hand out its state: NotImplementedError: not yet", kills=("0,4",), scale="(1 + mean.sum / 100)",
        package=SHELF + "\nclass Mean:\n    sum = 0\n    def state_dict(self): raise NotImplementedError('not yet')\n"
        "    def load_state_dict(self, state): pass\n",
    ),
    "object of a library with an iterator": Case(inline(
        pre="import textwrap\nwrapper = textwrap.TextWrapper()\nwrapper.source = iter(range(99))", body="next(wrapper.source)",
    ), "wrapper", kills=("2,3",), scale="(1 + next(wrapper.source) / 100)"),
    "window and counter that come to be in the loop": Case(inline(
        pre="class Log: last = None\nlog = Log()\nlog.seen = collections.Counter()",
        body="if log.last is None: log.last, log.sums = collections.deque(maxlen=3), collections.defaultdict(float)\n"
        "log.last.append(loss.item()); log.sums[i % 2] += 1; log.seen.update([i % 2])", behind="if epoch == 1: log.last = collections.deque(maxlen=2)",
    ), scale="(1 + sum(log.last or []))", shown="log.last, log.sums, log.seen", kills=("0,4", "1,3", "2,3")),
    "dict with parts made by a function of the loop": Case(inline(
        pre="class Log: last = None\nlog = Log()", body="log.last = log.last or collections.defaultdict(lambda: 0); log.last[i % 2] += 1",
    ), "another defaultdict", scale="(1 + len(log.last or []))", shown="log.last", kills=("0,4", "2,3")),
}  # fmt: skip
