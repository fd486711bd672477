"""What a script's loops train by that a restart is told otherwise, found in their text; what is only told of is none."""

from __future__ import annotations

import ast
from textwrap import indent

import pytest

from holdfast.adapters.zero_lines.nested.nested_script import Nest, find_nested
from holdfast.adapters.zero_lines.script_text import HOOK

HEAD = "import datetime, glob, os, random, socket, sys, time, uuid\nfrom pathlib import Path\nimport torch\n"
STEP = "optimizer.zero_grad()\nloss = model(x).mean()\nloss.backward()\noptimizer.step()\n"
RATE = "for group in optimizer.param_groups:\n    group['lr'] = rate\n"
METER = (
    "class Meter:\n    def __init__(self):\n        self.sum, self.n = 0.0, 0\n    def update(self, value):\n        self.sum += value\n        self.n += 1\n"
    "    @property\n    def avg(self):\n        return self.sum / self.n\n"
)


def found(before: str, body: str, others: str = "") -> Nest:
    script = f"{HEAD}{before}\nfor step, x in enumerate(batches):\n{indent(STEP + body, '    ')}"
    nest = find_nested(script, [ast.parse(others)] if others else [])
    assert isinstance(nest, Nest)
    return nest


def watched(nest: Nest) -> list[str]:
    calls = [
        node for node in ast.walk(nest.tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    return [
        ast.unparse(node.args[0]) for node in calls if node.func.attr == "asks" and ast.unparse(node.func.value) == HOOK
    ]


@pytest.mark.parametrize(
    ("before", "body", "text"),
    [
        ("since = time.time()", "if time.time() - since > 60: break", "time.time()"),
        ("since = {'at': time.time()}", "rate = 0.1 / (time.time() - since['at'])\n" + RATE, "time.time()"),
        ("times = []", "times.append(time.time())\nif times[-1] - times[0] > 60: break", "time.time()"),
        ("from time import monotonic as now\nsince = now()", "if now() > since + 60:\n    rate = 0.1\nelse:\n    rate = 0.2\n" + RATE, "now()"),
        ("def spent():\n    return time.time() - since", "scheduler.step(spent())", "time.time()"),
        ("def late():\n    if time.time() > 60:\n        return True\n    return False", "if late(): break", "time.time()"),
        (
            "class Clock:\n    def __init__(self): self.last = 0\n    def tick(self): self.last = time.time()\n    def out(self): return self.last > 60\nclock = Clock()",
            "clock.tick()\nif clock.out(): break", "time.time()",
        ),
        (f"{METER}seconds = Meter()", "seconds.update(time.time())\nscheduler.step(seconds.avg)", "time.time()"),
        ("since = time.time()", "if time.time() - since > 60:\n    torch.save(model.state_dict(), 'last.pt')\n    sys.exit(0)", "time.time()"),
        ("since = time.time()\ndef check():\n    if time.time() - since > 60: exit()", "check()", "time.time()"),
        ("since = time.time()", "optimizer.param_groups[0].update(lr=0.1 / (time.time() - since))", "time.time()"),
        ("", "g = optimizer.param_groups[0]\ng.update({'lr': 0.1 / time.time()})", "time.time()"),
        ("", "[g.update(lr=0.1 / time.time()) for g in optimizer.param_groups]", "time.time()"),
        ("since = time.time()", "time.time() - since > 60 and sys.exit()", "time.time()"),
        ("since = time.time()", "if time.time() - since > 60: os.kill(os.getpid(), 15)", "time.time()"),
        ("", "torch.manual_seed(int(datetime.datetime.now().timestamp()))", "datetime.datetime.now()"),
        ("", "random.seed()", "random.seed()"),
        ("", "random.seed(hash(name))", "hash(name)"),
        ("", "(model(x).mean() * (os.getpid() % 3)).backward()", "os.getpid()"),
        ("", "x = x[len(socket.gethostname()):]\nmodel(x).mean().backward()", "socket.gethostname()"),
        ("", "tries = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nif tries > 2: break", "os.environ['TORCHELASTIC_RESTART_COUNT']"),
        ("schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / time.time())", "schedule.step()", "time.time()"),
    ],
)  # fmt: skip
def test_what_goes_into_the_training_is_found(before: str, body: str, text: str) -> None:
    assert repr(text) in found(before, body).outside


@pytest.mark.parametrize(
    ("before", "body"),
    [
        ("since = time.time()", "print(step, time.time() - since)\nsince = time.time()"),
        ("since = time.time()", "if time.time() - since > 60:\n    print(loss.item())\n    since = time.time()"),
        ("since = time.time()", "if time.time() - since > 60:\n    torch.save(model.state_dict(), f'{time.time()}.pt')"),
        ("run = {'at': time.time()}", "run['loss'] = loss.item()\nscheduler.step(run['loss'])\nrun['took'] = time.time() - run['at']"),
        (f"{METER}seconds, losses = Meter(), Meter()", "seconds.update(time.time())\nlosses.update(loss.item())\nscheduler.step(losses.avg)"),
        ("def evaluate(model):\n    since = time.time()\n    return model(x).mean(), time.time() - since", "value, took = evaluate(model)\nscheduler.step(value)"),
        ("def evaluate(model):\n    return {'loss': 1, 'took': time.time()}", "held = evaluate(model)\nscheduler.step(held['loss'])\nfor name in held: print(name)"),
        ("def evaluate(model):\n    return results() | {'took': time.time()}", "held = evaluate(model)\nscheduler.step(held[monitor])"),
        ("def evaluate(model):\n    held = {'took': time.time()}\n    if monitor in held: return held\n    raise KeyError", "scheduler.step(evaluate(model)[monitor])"),
        ("def log(value):\n    if time.time() < 60: return\n    print(value)", "log(loss.item())"),
        ("t = time.time()", "print(time.time() - t)\nt = torch.randint(0, 9, (1,))\nmodel(x, t).mean().backward()"),
        ("", "speed = model.speed(1, time.time())\nprint(speed)"),
        ("writer = SummaryWriter(f'runs/{time.time()}')", "writer.add_scalar('seconds', time.time(), step)"),
        ("def arguments():\n    parser.add_argument('--name', default=str(time.time()))\n    return parser.parse_args()\nargs = arguments()", "rate = args.lr\n" + RATE),
        ("", "seen[id(model)] = loss\nmodel(seen[id(model)]).backward()"),
        ("", "if id(model) in seen: break"),
        ("log = open('log', 'a')", "log.write('row')\nlog.seek(0, 2)\nprint(log.tell(), os.path.getsize('log'))"),
        ("", "for old in sorted(glob.glob('*.pt'))[:-3]: os.remove(old)"),
        ("", "if not os.path.exists('out'): os.makedirs('out')"),
        ("since = time.time()", "if step > 60: sys.exit(0)\nprint(time.time() - since)"),
        ("row = {}", "row.update({'lr': 0.1, 'at': time.time()})\nlate = row and time.time()\nprint(late)"),
        ("since, meter_group = time.time(), {}", "meter_group.update(seconds=time.time() - since)"),
    ],
)  # fmt: skip
def test_what_is_only_told_or_logged_is_not(before: str, body: str) -> None:
    nest = found(before, body)
    assert not nest.outside
    assert not watched(nest)


def test_calls_that_ask_of_files_are_watched_where_their_answer_trains() -> None:
    nest = found(
        "log = open('log', 'a')",
        "rate = 0.1 / log.tell()\n"
        + RATE
        + "print(os.path.getsize('log'))\nif Path('stop').exists(): break\nif Path('end').exists(): sys.exit()",
    )
    assert not nest.outside
    assert set(watched(nest)) == {"log.tell", "Path('stop').exists", "Path('end').exists"}


def test_functions_of_other_modules_are_followed() -> None:
    other = "import time\ndef late(since):\n    return time.time() - since > 60"
    assert "'time.time()'" in found("from other import late", "if late(0): break", other).outside
    assert not found("from other import late", "print(late(0))", other).outside
    for imports, call in (
        ("import other", "other"),
        ("from package import other as o", "o"),
        ("from . import other", "other"),
        ("import a.b", "a.b"),
    ):
        assert "'time.time()'" in found(imports, f"if {call}.late(0): break", other).outside
        assert not found(imports, f"print({call}.late(0))", other).outside
    assert not found("", "if torch.late(0): break", other).outside
    files = "import os\ndef size():\n    return os.path.getsize('log')\ndef stops():\n    return os.path.exists('stop')"
    assert "getsize" in found("from other import size, stops", "rate = size()\n" + RATE, files).outside
    assert not found("from other import size, stops", "if stops(): break", files).outside
