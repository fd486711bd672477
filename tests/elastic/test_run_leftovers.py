"""What a run leaves is put back or found: a script runs again in its process only where the process is clean."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import forked
from holdfast.base.installed import is_users_own

# A run of a script in a process of its own, and what is left of it then.
RUN = """
import os, sys
import psutil
from holdfast.core.elastic.rerun import why_not
from holdfast.elastic.worker import main_module
from holdfast.elastic.worker.agent_channel import RunOrder
from holdfast.elastic.worker.script_sandbox import ScriptSandbox
stage, order = ScriptSandbox(), RunOrder(1, dict(os.environ), (sys.argv[1],))
for _ in range(2):
    stage.enter(order)
    main_module.run_path(order.arguments[0])
    left = stage.clear(None)
    print("LEFT", why_not(left))
    if left:
        break
for child in psutil.Process().children():
    child.kill()
"""

SETUP = """
import atexit, builtins, logging, os, signal, subprocess, sys, tempfile, threading, time, typing, warnings
import torch
from torch import distributed as dist
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.layer(x)
model = Model()
"""

PUT_BACK = {
    "an exit handler": "atexit.register(lambda: model)",
    "handlers of logs": "logging.basicConfig(); logging.getLogger('mine').addHandler(logging.StreamHandler(sys.stdout))",
    "a tee": """
class Tee:
    def __init__(self, inner): self.inner = inner
    def write(self, text): return self.inner.write(text)
    def flush(self): self.inner.flush()
sys.stdout = Tee(sys.stdout); assert not isinstance(sys.stdout.inner, Tee) and type(sys.stdout.inner).__name__ != "Tee"
""",
    "an alarm": "signal.signal(signal.SIGALRM, lambda *_: model); signal.alarm(100)",
    "a print of its own": "before = builtins.print; builtins.print = lambda *a: before(*a)",
    "annotations": "Wanted = typing.Optional[Model]; Several = typing.Dict[str, Model]",
    "a start method": "torch.multiprocessing.set_start_method('spawn')",
    "defaults of torch": """
assert torch.get_default_device().type == "cpu" and torch.get_default_dtype() == torch.float32
torch.set_default_device('meta'); torch.set_default_dtype(torch.float64); torch.autograd.set_detect_anomaly(True)
""",
    "threads and children that ended": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool: list(pool.map(len, ["a", "b"]))
subprocess.run(["true"], check=True)
tempfile.TemporaryDirectory()
""",
    "a loader and its workers": """
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor(i)
for batch in torch.utils.data.DataLoader(Numbers(), num_workers=1): break
""",
    "wrappers of groups": """
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
DistributedDataParallel(Model())(torch.ones(1, 4)).sum().backward()
sharded = fully_shard(Model()); optimizer = torch.optim.AdamW(sharded.parameters())
sharded(torch.ones(1, 4)).sum().backward(); optimizer.step()
""",
    "a hook of one module": "model.register_forward_hook(lambda *_: None); model(torch.ones(1, 4))",
}  # fmt: skip

FOUND = {
    "locks on files": "import fcntl; fcntl.flock(os.open(sys.argv[0] + '.lock', os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)",
    "threads": "threading.Thread(target=time.sleep, args=(60,), daemon=True, name='saver').start()",
    "child processes": "child = subprocess.Popen(['sleep', '20'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)",
    "global hooks": "from torch.optim.optimizer import register_optimizer_step_post_hook as hang; hang(lambda *_: None)",
    "its priority": "os.nice(1)",
    "redirected files: standard error": "os.dup2(os.open('/dev/null', os.O_WRONLY), 2)",
    "something still holds: __main__": "torch.Tensor.mine = lambda self: model",
    "threads between operations": "torch.set_num_interop_threads(3)",
    "imports that were interrupted: wsgiref": "import wsgiref.util; del sys.modules['wsgiref']",
    "the processors": "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}) or len(os.sched_getaffinity(0))",
}


def run(tmp_path: Path, text: str) -> list[str]:
    """Return what was left after each of two runs; after the first that left something there is no second."""
    script = tmp_path / "script.py"
    script.write_text(SETUP + text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(
        [sys.executable, "-c", RUN, str(script)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return [line[5:] for line in done.stdout.splitlines() if line.startswith("LEFT ")]


@pytest.mark.parametrize("what", PUT_BACK)
def test_what_can_be_put_back_is_and_the_script_runs_again(tmp_path: Path, what: str) -> None:
    assert run(tmp_path, PUT_BACK[what]) == ["", ""]


@pytest.mark.parametrize("what", FOUND)
def test_what_cannot_be_put_back_is_found(tmp_path: Path, what: str) -> None:
    if what == "the processors" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor cannot be made fewer")
    (left,) = run(tmp_path, FOUND[what])
    assert what in left


# Counts the runs in modules that lie elsewhere than the script.
ELSEWHERE = """
import sys
sys.path.insert(0, sys.argv[0] + ".lib")
import state, space.counts
for module in (state, space.counts):
    module.SEEN.append(1)
    assert len(module.SEEN) == 1, module.__name__
"""


def test_modules_of_the_users_are_made_anew_wherever_they_lie(tmp_path: Path) -> None:
    """A library of a project lies beside the scripts, not below them; a namespace has no file of its own."""
    home = tmp_path / "script.py.lib"
    (home / "space").mkdir(parents=True)
    for name in ("state.py", "space/counts.py"):
        (home / name).write_text("SEEN = []")
    assert run(tmp_path, ELSEWHERE) == ["", ""]


def test_compiled_modules_of_the_users_are_found(tmp_path: Path) -> None:
    """What a module of C keeps is not made anew with it, and few can be loaded twice."""
    import _bisect
    import shutil

    home = tmp_path / "script.py.lib"
    home.mkdir()
    shutil.copy(_bisect.__file__, home / ("_mine" + "".join(Path(_bisect.__file__).suffixes)))
    text = """
import importlib.machinery, importlib.util, glob
spec = importlib.util.spec_from_file_location("_bisect", glob.glob(sys.argv[0] + ".lib/_mine*")[0])
sys.modules["_mine"] = importlib.util.module_from_spec(spec)
"""
    (left,) = run(tmp_path, text)
    assert "compiled modules of its own: _mine" in left


@pytest.mark.parametrize(
    ("place", "home", "expected"),
    [
        ("/w/scripts/utils.py", "/w/scripts", True),
        ("/w/src/project/data.py", "/w/scripts", True),
        ("/w/scripts/.venv/lib/python3.11/site-packages/library/a.py", "/w/scripts", False),
        ("/opt/lib/python3.11/site-packages/library/a.py", "/w/scripts", False),
        ("/opt/lib/python3.11/site-packages/project/data.py", "/opt/lib/python3.11/site-packages/project", True),
        ("/opt/lib/python3.11/site-packages/library/a.py", "/opt/lib/python3.11/site-packages", False),
        ("/train.py", "/", True),
        (os.__file__, os.path.dirname(os.path.dirname(os.__file__)), False),
    ],
)
def test_a_file_is_the_users_own_unless_it_was_installed(place: str, home: str, expected: bool) -> None:
    assert is_users_own(place, home) is expected
