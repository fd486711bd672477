"""Scripts that zero lines refuse: the lines that are said are put in, the script is killed, and ends as if nothing had been."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forked
from holdfast.testing.contracts.adapter_processes import keepers_under
from sample_kit import MORE

LIFE = str(Path(__file__).with_name("zero_life.py"))
LINE = re.compile(r"holdfast:   (before|behind|lines?)(?: line)? (\d+)(?: to (\d+))?(?: becomes?)?: \|(.*)")

HEAD = """
import argparse, collections, copy, os, sys
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

def die(*at):
    if os.environ.get("DIE") == ",".join(map(str, at)) and not os.path.exists(os.environ["MARK"]):
        open(os.environ["MARK"], "w").close()
        os.kill(os.getpid(), 9)

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(28, 4), torch.randint(0, 3, (28,)))
"""
STEP = "loss = F.cross_entropy(net(x), y); opt.zero_grad(); loss.backward(); opt.step()"
TAIL = "\nprint('END', [p.tolist() for p in net.parameters()])\n"

# nanoGPT's own loop: a batch before the loop and one in it, `while True`, a dict of everything, and names that are read by their text.
NANO = """
max_iters, eval_interval = 12, 4
config = {k: v for k, v in globals().items() if isinstance(v, (int, float, bool, str)) and not k.startswith('_')}
exec("max_iters = 11")

def get_batch():
    i = torch.randint(0, 28, (4,))
    return data.tensors[0][i], data.tensors[1][i]

@torch.no_grad()
def estimate_loss():
    net.eval()
    found = F.cross_entropy(net(data.tensors[0]), data.tensors[1])
    net.train()
    return found

iter_num, best_val_loss, checkpoint = 0, 1e9, None
X, Y = get_batch()
local_iter_num, raw_model, running_mfu = 0, net, -1.0
while True:
    for group in opt.param_groups:
        group['lr'] = 0.1 / (1 + iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        if losses < best_val_loss:
            best_val_loss = losses
            checkpoint = {'model': raw_model.state_dict(), 'iter_num': iter_num, 'best_val_loss': best_val_loss}
    for micro_step in range(2):
        loss = F.cross_entropy(net(X), Y) / 2
        X, Y = get_batch()
        loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    die(iter_num)
    iter_num += 1
    local_iter_num += 1
    if iter_num > max_iters:
        break
print('END', iter_num, float(best_val_loss))
"""
# The same, with names that the loop reads by their text: then a dict of everything counts as read in the next turn.
BY_TEXT = NANO.replace("'best_val_loss': best_val_loss}", "'config': {k: globals()[k] for k in config}}")
REPLAY = f"""
buffer, state, eps = collections.deque(maxlen=6), torch.randn(4), 1.0
for step in range(16):
    state = torch.tanh(state + 0.1 * torch.randn(4))
    buffer.append((state, step % 3))
    eps *= 0.9
    x, y = torch.stack([part for part, _ in buffer]) * eps, torch.tensor([label for _, label in buffer])
    {STEP}
    die(step)
print('END', step, eps)
"""
ATTRIBUTES = f"""
class Trainer:
    def __init__(self):
        self.net, self.opt, self.history, self.count = net, opt, [], 0

    def run(self, epochs):
        for self.epoch in range(epochs):
            for x, y in DataLoader(data, batch_size=4, shuffle=True):
                {STEP}
                self.count += 1
                self.history.append(loss.item() * self.count)
            die(self.epoch)

trainer = Trainer()
trainer.run(4)
print('END', trainer.history, trainer.count)
"""
EVALUATES_FIRST = f"""
names = ['a', 'b', 'c', 'd']
for name in names:
    with torch.no_grad():
        print(name, net(data.tensors[0]).sum().item())
    for x, y in DataLoader(data, batch_size=4, shuffle=True):
        {STEP}
    die(name)
print('END', name, loss.item())
"""
SEVERAL = """
opts = [torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(net[3].parameters(), lr=0.01)]
for name in range(4):
    with torch.no_grad():
        print(name, net(data.tensors[0]).sum().item())
    for x, y in DataLoader(data, batch_size=4, shuffle=True):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        for o in opts:
            o.step()
            o.zero_grad()
    die(name)
print('END', name, loss.item())
"""
IMPORTED = """
import helper
helper.run(net, opt, data, die)
print('END', helper.COUNT)
"""
HELPER = f"""
import torch.nn.functional as F
from torch.utils.data import DataLoader

COUNT = 0

def one(net, opt, x, y):
    global COUNT
    COUNT += 1
    {STEP.replace("net(x), y)", "net(x), y) / COUNT")}

def run(net, opt, data, die):
    best = 1.0
    for epoch in range(4):
        for x, y in DataLoader(data, batch_size=4, shuffle=True):
            one(net, opt, x, y)
        else:  # which zero lines do not understand
            best *= 0.9
        die(epoch)
"""

TRACKED = f"""
args, average, loader = argparse.Namespace(tracks=False), None, DataLoader(data, batch_size=4, shuffle=True)
for epoch in range(4):
    if args.tracks:
        total = 0
    with torch.no_grad():
        print(epoch, net(data.tensors[0]).sum().item())
    for x, y in loader:
        {STEP}
        if args.tracks:
            total += loss.item()
        if average:
            average.seen += 1
    if args.tracks:
        print(total)
    die(epoch)
print('END', epoch)
"""

KEPT = {
    "a name that is set under a condition, an attribute of nothing": (TRACKED, "2"),
    "nanoGPT": (BY_TEXT, "7"),
    "nanoGPT, behind the last step": (BY_TEXT, "11"),
    "replay buffer": (REPLAY, "9"),
    "attributes and a loop that sets one": (ATTRIBUTES, "2"),
    "evaluates before it trains": (EVALUATES_FIRST, "c"),
    "behind the last epoch": (EVALUATES_FIRST, "d"),
    "optimizers in a list that is gone over": (SEVERAL, "2"),
    "loop of an imported module": (IMPORTED, "2"),
}
SAMPLE = {
    "a name that is set under a condition, an attribute of nothing",
    "nanoGPT",
    "loop of an imported module",
}
NONE = {
    "generator": (
        f"batches = iter(DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator()))\nfor step in range(7):\n    x, y = next(batches)\n    {STEP}\n",
        "'batches'",
    ),
    "file that is read": (
        f"open('rows', 'w').write('1\\n' * 9)\nrows = open('rows')\nfor step in range(9):\n    x, y = data[:]\n    x = x * int(rows.readline())\n    {STEP}\n",
        "'rows'",
    ),
    "file that is read, beside a table": (
        (f"import csv\nrows = open('rows', 'w+')\na = csv.writer(rows)\nfor step in range(9):\n    a.writerow([step])\n    rows.seek(0)\n    x, y = data[:]\n"
        f"    x = x * len(rows.read())\n    {STEP}\n"),
        "'rows'",
    ),
    "model that is made anew": (
        ("for fold in range(2):\n    net = torch.nn.Linear(4, 3)\n    opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        f"    for x, y in DataLoader(data, batch_size=4):\n        {STEP}\n    net.seen = [torch.ones(1)]\n"),
        "is made anew in the loop",
    ),
    "environment of a package": (
        ("class Room:\n    __module__, at = 'torch.rooms', 0\n    def reset(self): self.at = 0\n    def step(self): self.at += 1\n"
        "room = Room()\nroom.reset()\n"
        f"for step in range(9):\n    room.step()\n    x, y = data[:]\n    {STEP}\n    net.seen = [torch.ones(3, 2).t()]\n"),
        "'room', a Room, has a place, or a memory, of its own",
    ),
    "groups that are added": (
        ("extra = torch.nn.Linear(2, 2)\nfor epoch in range(3):\n    if epoch == 1:\n"
        "        opt.add_param_group({'params': extra.parameters()})\n"
        f"    for x, y in DataLoader(data, batch_size=4):\n        {STEP}\n"),
        "",
    ),
    "view of what is kept": (
        ("net.register_buffer('seen', torch.zeros(4))\nrow = torch.zeros(2)\nfor step in range(9):\n    if step == 3: row = net.seen[:2]\n"
        f"    x, y = data[:]\n    x = x + row.sum()\n    {STEP}\n    net.seen += 1\n"),
        "'row' lives from one turn to the next, and shares memory with",
    ),
    "view of a weight in every other turn": (
        ("row = torch.zeros(1)\nfor step in range(9):\n    x, y = data[:]\n    x = x + row.sum()\n"
        f"    row = next(net.parameters()).detach()[:1] if step % 2 else torch.zeros(1)\n    {STEP}\n"),
        "'row' lives from one turn to the next, and shares memory with",
    ),
    "views that are written, and another reason": (
        ("h = torch.zeros(2, 4)\nrow = h[0]\nfor step in range(9):\n    x, y = data[:]\n    x = x + row.sum()\n"
        f"    {STEP}\n    h += 0.1\n    row = row[:]\nelse:\n    print(len(h))\n"),
        "share memory, of which a restart would make two",
    ),
    "weights that are no copy": (
        f"best = None\nfor step in range(9):\n    x, y = data[:]\n    {STEP}\n    if step in (0, 2): best = net.state_dict()\nnet.load_state_dict(best)\n",
        "'best' and 'opt' share memory",
    ),
    "attribute of the model": (f"for step in range(9):\n    x, y = data[:]\n    {STEP}\n    net.seen = [torch.ones(3, step + 2).t()]\n", "net.seen"),
}  # fmt: skip


def live(text: str, home: Path, root: str, die: str = "") -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    (home / "train.py").write_text(text)
    if not (home / "helper.py").exists():
        (home / "helper.py").write_text(HELPER)
    environment = {
        **os.environ, "MARK": str(home / "mark"), "DIE": die, "PYTHONPATH": str(Path(LIFE).parent.parent),
        "HOLDFAST_DURABLE_EVERY": "1", "POCKET": "1",
    }  # fmt: skip
    command = [sys.executable, LIFE, root, str(home / "train.py")]
    return forked.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd=home)


def put_in(text: str, told: str, root: str, place: str) -> str:
    """The text with the lines that were said."""
    lines = text.splitlines()
    said = [found for found in map(LINE.fullmatch, told.splitlines()) if found]
    assert 4 <= len(said) <= 5, told
    new: list[str] = []
    skip = 0
    for number, line in enumerate(lines, 1):
        mine = [found for found in said if int(found[2]) == number]
        new += [found[4] for found in mine if found[1] == "before"]
        for found in mine:
            if found[1].startswith("line"):
                new.append(found[4])
                skip = int(found[3] or number)
        new += [line] if number > skip else []
        new += [found[4] for found in mine if found[1] == "behind"]
    return "\n".join(new).replace(repr(root), repr(place)) + "\n"


@pytest.fixture
def keepers(runtime_dir: Path) -> Iterator[None]:
    """What keepers hold is not needed behind a test."""
    yield
    for keeper in keepers_under(runtime_dir):
        keeper.kill()
        keeper.wait(20)
    shutil.rmtree(runtime_dir, ignore_errors=True)


def ends(told: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in told.stdout.splitlines() if line.startswith("END")]


@MORE
@pytest.mark.usefixtures("keepers")
@pytest.mark.timeout(240)
def test_the_loop_of_nanogpt_is_kept_without_a_line(tmp_path: Path) -> None:
    turns = NANO.replace("    die(iter_num)", "    sys.stderr.write(f'turn {iter_num}\\n')\n    die(iter_num)")
    text, root = HEAD + turns + TAIL, str(tmp_path / "zero")
    undisturbed = live(text, tmp_path / "undisturbed", "-")
    assert undisturbed.returncode == 0, undisturbed.stderr
    killed = live(text, tmp_path / "kept", root, "7")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = live(text, tmp_path / "kept", root, "7")
    assert again.returncode == 0, again.stderr
    assert "not kept" not in killed.stderr + again.stderr
    assert ends(again) == ends(undisturbed)
    assert "turn 11\n" in again.stderr
    assert "turn 0\n" not in again.stderr, "it began anew"


@pytest.mark.usefixtures("keepers")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.slow]) for name in KEPT]
)
def test_a_refused_script_is_kept_by_the_lines_that_are_said(name: str, tmp_path: Path) -> None:
    body, die = KEPT[name]
    text, root = HEAD + body + TAIL, str(tmp_path / "zero")
    refused = live(text, tmp_path / "refused", root)
    assert refused.returncode == 0, refused.stderr
    assert "these lines keep it" in refused.stderr, refused.stderr
    home = tmp_path / "lined"
    home.mkdir()
    if "of helper.py" in refused.stderr:
        (home / "helper.py").write_text(put_in(HELPER, refused.stderr, root, str(tmp_path / "root")))
        lined = text
    else:
        lined = put_in(text, refused.stderr, root, str(tmp_path / "root"))
    killed = live(lined, home, "-", die)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = live(lined, home, "-", die)
    assert again.returncode == 0, again.stderr
    assert ends(again) == ends(refused)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("generator", "file that is read") else [pytest.mark.slow])
        for name in NONE
    ],
)
def test_where_no_lines_can_be_given_it_is_said(name: str, tmp_path: Path) -> None:
    body, why = NONE[name]
    told = live(HEAD + body + TAIL, tmp_path / "refused", str(tmp_path / "zero"))
    assert told.returncode == 0, told.stderr
    assert "no lines can be given that would keep it" in told.stderr, told.stderr
    assert why in told.stderr.partition("no lines can be given")[2]
    assert not LINE.search(told.stderr)


def test_hooks_of_others_behind_a_step_are_called_when_the_lines_are_said(tmp_path: Path) -> None:
    """Torch goes over its hooks while one of them says the lines: none may be taken away then."""
    hooks = (
        "from torch.optim.optimizer import register_optimizer_step_post_hook\n"
        "register_optimizer_step_post_hook(lambda *_: print('before'))\n"
        "batches = iter(DataLoader(data, batch_size=4))\n"
        "x, y = next(batches)\n"
    )
    late = "    if step == 0: register_optimizer_step_post_hook(lambda *_: print('behind'))\n"
    body = f"{hooks}for step in range(7):\n    held = [batches]\n{late}    {STEP}\n"
    told = live(HEAD + body + TAIL, tmp_path / "refused", str(tmp_path / "zero"))
    assert told.returncode == 0, told.stderr
    assert "no lines can be given" in told.stderr
    assert (told.stdout.count("before"), told.stdout.count("behind")) == (7, 7)


ACCELERATED = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
loader = DataLoader(data, batch_size=4, shuffle=True)
schedule = torch.optim.lr_scheduler.StepLR(opt, 3)
net, opt, loader, schedule = accelerator.prepare(net, opt, loader, schedule)
done = 0
for epoch in range(4):
    net.eval()
    with torch.no_grad():
        print(epoch, net(data.tensors[0]).sum().item())
    net.train()
    for x, y in loader:
        with accelerator.accumulate(net):
            loss = F.cross_entropy(net(x), y)
            accelerator.backward(loss)
            opt.step()
            schedule.step()
            opt.zero_grad()
        done += 1
    die(epoch)
print('END', epoch, done)
"""


@pytest.mark.usefixtures("keepers")
@pytest.mark.timeout(240)
def test_the_lines_for_an_accelerator_wrap_what_it_has_prepared(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    root = str(tmp_path / "zero")
    text = HEAD + ACCELERATED + TAIL
    refused = live(text, tmp_path / "refused", root)
    assert refused.returncode == 0, refused.stderr
    assert "holdfast.adapters.huggingface.wrap(accelerator, " in refused.stderr, refused.stderr
    lined = put_in(text, refused.stderr, root, str(tmp_path / "root"))
    killed = live(lined, tmp_path / "lined", "-", "2")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = live(lined, tmp_path / "lined", "-", "2")
    assert again.returncode == 0, again.stderr
    assert ends(again) == ends(refused)
    assert not again.stdout.startswith("0 "), "it began anew"
