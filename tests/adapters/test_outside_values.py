"""What a script's loops train by that a restart is told otherwise, found in their text; what is only told of is none."""

from __future__ import annotations

import ast
import sys
from textwrap import indent

import pytest

from holdfast.adapters.zero_lines import outside_values
from holdfast.adapters.zero_lines.nested.nested_script import Nest, find_nested
from holdfast.adapters.zero_lines.script_text import HOOK

HEAD = "import datetime, glob, os, random, socket, sys, time, uuid\nfrom pathlib import Path\nimport torch\n"
STEP = "optimizer.zero_grad()\nloss = model(x).mean()\nloss.backward()\noptimizer.step()\n"
RATE = "for group in optimizer.param_groups:\n    group['lr'] = rate\n"
TIMER = "class T:\n    def __init__(self, now): self.now, self.t0 = now, now()\n    def spent(self): return self.now() - self.t0\n"
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
        (TIMER + "t = T(time.time)", "if t.spent() > 60: break"),
        (TIMER + "t = T(now=time.time)", "scheduler.step(t.spent())"),
        ("from other import Timer\nt = Timer(time.time)", "if t.spent() > 60: break"),
        ("fns = [lambda: time.time(), len]", "rate = fns[0]()\n" + RATE),
        ("fns = [lambda: time.time(), len]", "rate = fns[step % 2]()\n" + RATE),
        ("fns = {'now': time.time}", "rate = fns['now']()\n" + RATE),
        ("fns = {'now': time.time}", "rate = fns[name]()\n" + RATE),
        ("import functools\nnow = functools.partial(time.time)", "if now() > 60: break"),
        ("clock = time.time if x else time.monotonic", "if clock() > 60: break"),
        ("def late(now=time.time):\n    return now() > 60", "if late(): break"),
        ("def late(now=time.time()):\n    return now", "scheduler.step(late())"),
        ("clock = types.SimpleNamespace(now=time.time)", "if clock.now() > 60: break"),
        ("clock = types.SimpleNamespace()\nclock.now = time.time", "if clock.now() > 60: break"),
        ("", "rate = sum(map(lambda _: time.time(), range(3)))\n" + RATE),
        ("times = list(map(lambda _: time.time(), range(3)))", "rate = times[0]\n" + RATE),
        ("stopper = Stopper(callback=lambda: time.time() > 60)", "if stopper.stops(): break"),
        ("def late():\n    return time.time() > 60\nstopper = Stopper(late)", "if stopper.stops(): break"),
        ("def late():\n    return time.time() > 60\ndef go(f): return f()", "if go(late): break"),
        ("clock = getattr(args, 'clock', time.time)", "if clock() > 60: break"),
        ("try:\n    clock = time.perf_counter\nexcept AttributeError:\n    clock = time.time", "if clock() > 60: break"),
        ("import signal\ndef stop(*_): sys.exit()\nsignal.signal(signal.SIGALRM, stop)\nsignal.alarm(60)", ""),
        ("import signal\ndone = False\ndef stop(*_):\n    global done\n    done = True\nsignal.signal(signal.SIGALRM, stop)\nsignal.setitimer(signal.ITIMER_REAL, 60)", "if done: break"),
        ("import signal\ndef stop(*_): raise TimeoutError\nsignal.signal(signal.SIGALRM, stop)\nsignal.alarm(60)", ""),
        ("import signal\nsignal.alarm(60)", ""),
        ("import threading\nthreading.Timer(60, sys.exit).start()", ""),
        ("import threading\nthreading.Timer(60, lambda: os._exit(0)).start()", ""),
        ("import threading\ndone = []\nthreading.Timer(60, lambda: done.append(1)).start()", "if done: break"),
        ("import threading\ndone = threading.Event()\nthreading.Timer(60, done.set).start()", "if done.is_set(): break"),
        ("import threading\nclass Run:\n    stop = False\n    def end(self): self.stop = True\n    def go(self): threading.Timer(60, self.end).start()\nrun = Run()", "if run.stop: break"),
        ("import threading\nstate = {'stop': False}\ndef end(): state['stop'] = True\nt = threading.Timer(interval=60, function=end)", "if state['stop']: break"),
        ("import threading\nstate = {'stop': False}\ndef end():\n    time.sleep(60)\n    state['stop'] = True\nt = threading.Thread(target=end)", "if state['stop']: break"),
        ("", "assert time.time() - t0 < 60"),
        ("def check():\n    assert time.time() - t0 < 60", "check()"),
        ("def check():\n    if time.time() - t0 > 60: raise TimeoutError", "check()"),
        ("done = False\ndef check():\n    global done\n    if time.time() > 60: done = True", "check()\nif done: break"),
        ("from time import *", "if monotonic() > 60: break"),
        ("", "if time.clock_gettime(0) > 60: break"),
        ("class T:\n    now = staticmethod(time.time)", "if T.now() > 60: break"),
        ("from dataclasses import dataclass, field\n@dataclass\nclass S:\n    at: float = field(default_factory=time.time)\ns = S()", "rate = s.at\n" + RATE),
        ("class T:\n    @classmethod\n    def now(cls): return time.time()\n    @staticmethod\n    def late(t): return t > 60", "if T.late(T.now()): break"),
        ("import threading\nclass W(threading.Thread):\n    def run(self):\n        time.sleep(60); self.over = True\nw = W(); w.start()", "if w.over: break"),
        ("import threading\nover = threading.Event()\nclass W(threading.Thread):\n    def run(self):\n        time.sleep(60); over.set()\nW().start()", "if over.is_set(): break"),
        ("def timed(f):\n    def g(*a):\n        t = time.time(); r = f(*a); return r, time.time() - t\n    return g\n@timed\ndef run(m): return 1", "r, took = run(model)\nscheduler.step(took)"),
        ("def rates():\n    while True: yield time.time()\nit = rates()", "rate = next(it)\n" + RATE),
        ("class S(torch.optim.lr_scheduler.LRScheduler):\n    def get_lr(self): return [time.time()]\nscheduler = S(optimizer)", "scheduler.step()"),
        ("times = {}", "times['a'] = time.time()\nif max(times.values()) > 60: break"),
        ("gen = torch.Generator()", "gen.seed()"),
        ("", "setattr(optimizer, 'lr', time.time())"),
        ("", "setattr(optimizer, name, time.time())"),
        ("", "optimizer.param_groups[0].setdefault('lr', time.time())"),
        ("", "optimizer.param_groups[0].update(lr=time.time())"),
        ("", "optimizer.param_groups[0] |= {'lr': time.time()}"),
        ("", "p = optimizer.param_groups[0]\np['lr'] = time.time()"),
        ("", "vars(scheduler)[\"gamma\"] = time.time()\nscheduler.step()"),
        ("", "vars(args)['rate'] = time.time()\nrate = args.rate\n" + RATE),
        ("", "args.__dict__.update(rate=time.time())\nrate = args.rate\n" + RATE),
        ("", "args.__dict__['rate'] = time.time()\nrate = args.rate\n" + RATE),
        ("import operator", "operator.setitem(optimizer.param_groups[0], 'lr', time.time())"),
        ("", "optimizer.param_groups[0].__setitem__('lr', time.time())"),
        ("", "args.__setattr__('rate', time.time())\nrate = args.rate\n" + RATE),
        ("", "object.__setattr__(args, 'rate', time.time())\nrate = args.rate\n" + RATE),
        ("", "globals()['rate'] = time.time()\n" + RATE),
        ("", "globals().update({'rate': time.time()})\n" + RATE),
        ("def until(n):\n    while time.time() < n: yield 1", "for _ in until(60): model(x).mean().backward(); optimizer.step()"),
        ("class Late:\n    def __init__(self, n): self.end = time.time() + n\n    def __call__(self): return time.time() > self.end\nlate = Late(60)", "if late(): break"),
        ("class Set(torch.utils.data.Dataset):\n    def __getitem__(self, i):\n        random.seed(time.time())\n        return i", ""),
        ("def init(i): random.seed(int(time.time()) + i)\nloader = DataLoader(ds, worker_init_fn=init)", ""),
        ("class Net(torch.nn.Module):\n    def forward(self, x): return x * time.time()", ""),
        ("import numpy as np", "rng = np.random.default_rng()\nx = x[rng.permutation(4)]\nmodel(x).mean().backward()"),
        ("class C:\n    def __init__(self): self.now = time.time\n    def run(self):\n        for x in y:\n            loss = model(x)\n            loss.backward(); optimizer.step()\n            if self.now() > 60: break", ""),
        ("stop = threading.Event()", "if time.time() > 60: stop.set()\nif stop.is_set(): break"),
        ("import signal\ndef main():\n    done = False\n    def stop(*_):\n        nonlocal done\n        done = True\n    signal.signal(signal.SIGALRM, stop)\n    signal.alarm(60)\n    for x in y:\n        loss = model(x)\n        loss.backward(); optimizer.step()\n        if done: break", ""),
    ],
)  # fmt: skip
def test_what_comes_by_functions_alarms_and_calls_that_set_something_is_found(before: str, body: str) -> None:
    assert "goes into the training" in found(before, body).outside


LIMIT = (
    "class Limit:\n    def __init__(self, s): self.s, self.since = s, time.time()\n    def on_step_end(self, trainer):\n"
    "        if time.time() - self.since > self.s: trainer.should_stop = True\n"
)
TRAINER = (
    "class Trainer:\n    def __init__(self, callbacks): self.callbacks, self.should_stop = callbacks, False\n    def fit(self):\n"
    "        for x in batches:\n            loss = model(x).mean()\n            loss.backward(); optimizer.step()\n"
    "            for callback in self.callbacks: CALL\n            if self.should_stop: break\n"
)


@pytest.mark.parametrize(
    ("before", "body"),
    [
        (LIMIT + TRAINER.replace("CALL", "callback.on_step_end(self)") + "Trainer([Limit(60)]).fit()", ""),
        (LIMIT + TRAINER.replace("CALL", "getattr(callback, event)(self)") + "Trainer([Limit(60)]).fit()", ""),
        (LIMIT + "limit = Limit(60)", "limit.on_step_end(runs[step])\nif runs[step].should_stop: break"),
        (LIMIT + "limit = Limit(60)", "limit.on_step_end(run())\nif trainer.should_stop: break"),
        ("class Limit:\n    def __call__(self, state): state.stop = time.time() > 60\nlimit = Limit()", "limit(state)\nif state.stop: break"),
        ("class Limit:\n    def set(self, s): s.stop = time.time() > 60\nlimits = [Limit()]", "for limit in limits: limit.set(s=s)\nif s.stop: break"),
        ("def check(state):\n    if time.time() - t0 > 60: state['stop'] = True\nstate = {}", "check(state)\nif state['stop']: break"),
        ("def check(state, t0):\n    state.stop = time.time() - t0 > 60", "check(state, time.time())\nif state.stop: break"),
        ("def check(out):\n    out.append(time.time() > 60)\nout = []", "check(out)\nif out[-1]: break"),
        ("def check(state):\n    state.update(stop=time.time() > 60)", "check(state)\nif state['stop']: break"),
        ("def check(state):\n    state.update({'stop': time.time() > 60})", "check(state)\nif state['stop']: break"),
    ],
)  # fmt: skip
def test_what_a_function_stores_on_its_argument_is_found(before: str, body: str) -> None:
    assert "goes into the training" in found(before, body).outside


VALIDATE = (
    "def validate(net, batches):\n    total = 0.0\n    with torch.no_grad():\n"
    "        for x, y in batches: total += f(x, y)\n    return total\n"
)
LATE = "if time.time() - t0 > 60:\n    t0 = time.time()\n    "


@pytest.mark.parametrize(
    ("before", "body"),
    [
        (VALIDATE + "loader = DataLoader(data)", LATE + "print(validate(model, loader))"),
        ("held = DataLoader(data)\n" + VALIDATE, LATE + "print(validate(model, batches=held))"),
        ("", LATE + "print([f(x) for x in val_loader])"),
        ("", LATE + "for i, x in enumerate(val_loader): print(x)"),
        ("from package import validate", LATE + "validate(model, loader)"),
        ("def sample(net, z):\n    return net(z)\nmodel.train()", LATE + "save_image(sample(model, z), 'a.png')"),
        ("model.train()", LATE + "print(model(z))"),
        ("model.train()", LATE + "print(model.generate(z))"),
        ("class Net(torch.nn.Module):\n    def forward(self, x): return x\nnet = Net()", LATE + "print(net(z))"),
        ("class Run:\n    def __init__(self, model): self.net = model\n    def show(self): print(self.net(z))\nmodel.train()\nrun = Run(model)", LATE + "run.show()"),
        ("", LATE + "model.train()"),
        ("", LATE + "net.eval()"),
        ("", LATE + "torch.randn(3)"),
        ("", LATE + "print(random.random())"),
        ("from random import choice", LATE + "print(choice(words))"),
        ("import numpy as np", LATE + "print(np.random.permutation(3))"),
        ("", LATE + "noise.normal_()"),
        ("", LATE + "next(batches_of)"),
        ("", LATE + "print(next(iter(val_loader)))"),
        ("", LATE + "head = torch.nn.Linear(2, 2)"),
        ("", "for _ in range(int(time.time()) % 3): torch.randn(1)"),
        ("", "time.time() > 60 and model.eval()"),
        ("import threading\nthreading.Timer(60, model.eval).start()", ""),
    ],
)  # fmt: skip
def test_draws_and_modes_that_hang_on_a_clock_are_found(before: str, body: str) -> None:
    assert "goes into the training" in found(f"t0 = time.time()\n{before}", body).outside


@pytest.mark.parametrize(
    ("before", "body"),
    [
        ("", "match step:\n    case 1 if time.time() > 60: break"),
        ("", "match step:\n    case 1 if time.time() > 60: pass\n    case _: break"),
        ("", "match time.time():\n    case t: pass\nif t > 60: break"),
        pytest.param(
            "", "try:\n    late = time.time() > 60\nexcept* OSError:\n    pass\nif late: break",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="`except*` is of Python 3.11"),
        ),
        ("import two\nclass A(two.B): pass\nclass B(two.A):\n    def late(self): return time.time() > 60\na = A()", "if B().late(): break"),
    ],
)  # fmt: skip
def test_a_clock_in_seldom_statements_is_found(before: str, body: str) -> None:
    assert "'time.time()' (line" in found(before, body).outside


def test_a_text_that_cannot_be_gone_through_is_refused_only_if_it_reads_a_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr(outside_values.DrawingCalls, "__init__", fails)
    for told in ("print(time.time())", "from time import perf_counter as now"):
        assert "cannot be told from the text" in found("", told).outside
    assert not found("", "time.sleep(0)").outside


@pytest.mark.parametrize(
    "head", ["match step:\n    case 1:", "try:\n    import missing\nexcept ImportError:", "if step:"]
)
def test_a_clock_above_a_loop_that_stands_in_a_block_is_found(head: str) -> None:
    inside = f"rate = time.time()\nfor x in batches:\n{indent(STEP + RATE, '    ')}"
    nest = find_nested(f"{HEAD}step = 1\n{head}\n{indent(inside, '        ' if 'case' in head else '    ')}")
    assert isinstance(nest, Nest)
    assert "'time.time()'" in nest.outside


@pytest.mark.parametrize(
    "head",
    [
        "for epoch in iter(lambda: time.time() < 60, False):",
        "for epoch in itertools.takewhile(lambda _: time.time() < 60, itertools.count()):",
        "while time.time() < 60:",
        "def until(n):\n    while time.time() < n: yield 1\nfor _ in until(60):",
        "def until(n):\n    for i in range(n):\n        yield i\n        if time.time() > n: break\nfor _ in until(60):",
        "def until(n):\n    for i in range(n):\n        yield i\n        if time.time() > n: return\nfor _ in until(60):",
        "class U:\n    def __iter__(self): return self\n    def __next__(self):\n        if time.time() > 60: raise StopIteration\n        return 1\nfor _ in U():",
        "class U:\n    def __iter__(self):\n        while time.time() < 60: yield 1\nu = U()\nfor _ in u:",
    ],
)  # fmt: skip
def test_a_loop_that_a_clock_ends_is_found(head: str) -> None:
    nest = find_nested(f"{HEAD}import itertools\n{head}\n{indent(STEP, '    ')}")
    assert isinstance(nest, Nest)
    assert "'time.time()'" in nest.outside


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
        ("def evaluate():\n    return dict(loss=1, took=time.time())", "held = evaluate()\nscheduler.step(held['loss'])\nif 'error' in held: break"),
        ("def log(f): print(f())", "log(time.time)"),
        ("import threading\ndef beat():\n    print(time.time())\n    threading.Timer(30, beat).start()\nbeat()\nthreading.Timer(30, beat).start()", ""),
        ("times = []\nmodel.register_forward_hook(lambda *a: times.append(time.time()))", ""),
        ("times = []\ndef hook(*a): times.append(time.time())\nmodel.register_forward_hook(hook)", "print(times[-1])"),
        (TIMER + "t = T(time.time)", "print(t.spent())"),
        ("fns = {'now': time.time, 'rate': lambda: 0.1}", "rate = fns['rate']()\n" + RATE),
        ("import signal\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit())\nsignal.alarm(0)", ""),
        ("for x in tqdm(y, desc=str(time.time())): pass", ""),
        ("import torch.profiler", "with torch.profiler.profile(on_trace_ready=lambda p: p.export(f'{time.time()}')) as p:\n    p.step()"),
        ("def closure():\n    t0 = time.time()\n    loss = model(x)\n    loss.backward()\n    print(time.time() - t0)\n    return loss", "optimizer.step(closure)"),
        ("class Net(torch.nn.Module):\n    def forward(self, x):\n        t0 = time.time()\n        y = self.f(x)\n        self.took = time.time() - t0\n        return y\nmodel = Net()", ""),
        ("def main():\n    random.seed(time.time())\n    for x in y:\n        model(x).mean().backward(); optimizer.step()\nif __name__ == '__main__': mp.spawn(main, nprocs=2)", ""),
        ("class E:\n    def __call__(self, x): return x\ne = E()", "model(e(x)).backward()"),
        ("logger.converter = time.gmtime", "logger.info('%s', time.time())"),
        ("def now(): return time.time()\nformat = {'time': now, 'loss': lambda: 1}", "for name, f in format.items(): print(name, f())"),
        ("import atexit\natexit.register(lambda: print(time.time() - t0))", ""),
        ("meter = Meter(timer=time.time)", "meter.update(loss)\nprint(meter.rate())"),
        ("def log(row):\n    row['at'] = time.time()\n    row['loss'] = 1", "log(row)\nscheduler.step(row['loss'])"),
        ("def log(row):\n    row.update(at=time.time(), loss=1)", "log(row)\nscheduler.step(row['loss'])"),
        ("def log(row):\n    row = str(time.time())\n    print(row)", "log(x)\nscheduler.step(x)"),
        ("def log(meters):\n    meters['at'].update(time.time())\n    meters['loss'].update(1)", "log(meters)\nscheduler.step(meters['loss'].avg)"),
        ("class Speed:\n    def on_step_end(self, trainer): trainer.seconds = time.time()\n" + TRAINER.replace("CALL", "callback.on_step_end(self)"), "print(trainer.seconds)"),
        ("def save(model, path): torch.save({'model': model.state_dict(), 'step': step}, path)\nmodel.train()", LATE + "save(model, 'last.pt')"),
        ("class Run:\n    def save(self):\n        torch.save(self.model.state_dict(), 'last.pt')\nrun = Run()\nmodel.train()", LATE + "run.save()\n    model.save_pretrained('last')"),
        ("def timed(f):\n    def g(*a):\n        t = time.time(); r = f(*a); return r, time.time() - t\n    return g\n@timed\ndef run(m): return 1", "r, took = run(model)\nscheduler.step(r)\nprint(took)"),
        ("import threading\nclass Beat(threading.Thread):\n    def run(self):\n        while True:\n            time.sleep(60); print(self.name)\nBeat().start()", ""),
        ("class T:\n    at = time.time()\n    n = 0\nt = T()", "if t.n > 9: break\nprint(time.time() - t.at)"),
        ("row = {}", "row['at'] = time.time()\nfor name, value in row.items(): print(name, value)\nprint(sum(row.values()))"),
        ("norms = []", LATE + "norms.append(sum(p.norm().item() for p in model.parameters()))\n    print(next(model.parameters()).device, norms[-1])"),
        ("writer = SummaryWriter()", LATE + "for n, p in model.named_parameters(): writer.add_histogram(n, p, step)"),
        ("", LATE + "print(f'{step / len(train_loader):.0%} of {len(train_loader.dataset)}', loss.item(), optimizer.param_groups[0]['lr'])"),
        ("", LATE + "torch.cuda.synchronize()\n    print(torch.cuda.memory_allocated(), sorted(times)[0], len(list(range(3))))"),
        ("import wandb", LATE + "wandb.log({'loss': loss.item(), 'rate': scheduler.get_last_lr()[0]}, step=step)"),
        ("import matplotlib.pyplot as plt", LATE + "plt.plot(losses)\n    plt.savefig('a.png')\n    plt.close()"),
        ("import logging\nlog = logging.getLogger()", LATE + "log.info('%d steps', step)\n    sys.stdout.flush()\n    log.handlers[0].flush()"),
        ("def every(seconds, f):\n    if time.time() - t0 > seconds: f()", "every(60, lambda: print(loss.item()))"),
        ("pbar = tqdm(train_loader)", LATE + "pbar.set_postfix(loss=loss.item())\n    pbar.update(1)\n    pbar.refresh()"),
        ("", "if step % 9 == 0:\n    model.eval()\n    print(model(z), time.time())\n    model.train()"),
        ("", "took = time.time() - t0\nfor x in val_loader: f(model(x))\nprint(took)"),
        ("class Net(torch.nn.Module):\n    def forward(self, x): return x\n    def size(self): return sum(p.numel() for p in self.parameters())\nnet = Net()", LATE + "print(net.size() / (time.time() - t0))"),
        ("", LATE + "with open('last.txt', 'w') as f: f.write(str(loss.item()))\n    shutil.copy('last.txt', 'old.txt')\n    gc.collect()"),
        ("def key(p): return time.time()\n", "for p in sorted(paths, key=os.path.getmtime): os.remove(p)"),
    ],
)  # fmt: skip
def test_what_is_only_told_or_logged_is_not(before: str, body: str) -> None:
    nest = found(f"t0 = time.time()\n{before}", body)
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


def test_many_methods_that_nobody_calls_hide_nothing() -> None:
    many = "".join(f"    def on_{number}(self, run): pass\n" for number in range(3001))
    late = "class Clock:\n    def late(self): return time.time() > 60\nclock = Clock()"
    assert "goes into the training" in found(f"class Hooks:\n{many}{late}", "if clock.late(): break").outside
