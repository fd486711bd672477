"""One life of a script under zero lines, as a worker of `holdfast run` has it, without the launcher. Not a test itself.

python zero_life.py ROOT SCRIPT; ROOT `-` runs the script as it is. With POCKET in the environment versions are a file that
the process writes itself, of the state that a Checkpointer saves; there is no keeper then.
"""

import os
import sys
from pathlib import Path

import torch

from holdfast.adapters.zero_lines.launcher import ScriptLauncher
from holdfast.adapters.zero_lines.nested import nested_loop
from holdfast.checkpoint.state.training_state import State
from holdfast.elastic.worker.agent_channel import RunOrder
from holdfast.elastic.worker.worker_main import run_script
from state_kit import restore, save


class Pocket:
    """What the loop asks of a Checkpointer; a version is there, whole, or not."""

    def __init__(self, root, **objects):
        self._file = Path(root) / "pocket"
        self._file.parent.mkdir(exist_ok=True)
        self._state = State({name: thing for name, thing in objects.items() if thing is not None}, rank=0, world_size=1)

    def restore(self):
        self._state.trained()
        if not self._file.exists():
            return 0
        step, saved = torch.load(self._file, weights_only=False)
        restore(self._state, saved)
        return step + 1

    def step(self, step):
        new = self._file.with_suffix(".new")
        torch.save((step, save(self._state)), new)
        new.replace(self._file)

    def save(self, step, level):
        self.step(step)

    def close(self):
        pass

    abandon = settle = close

    def __exit__(self, *_):
        pass


torch.set_num_threads(1)
torch.set_num_threads(int(os.environ.get("THREADS", "1")))  # with more than one nothing is rehearsed
root, script = sys.argv[1:3]
order = RunOrder(1, arguments=(script,), environment=dict(os.environ))
sys.path.insert(0, os.path.dirname(script))
sys.argv = [script, *sys.argv[3:]]
if "POCKET" in os.environ:
    nested_loop.Checkpointer = Pocket
if root == "-":
    run_script(order)
else:
    ScriptLauncher(root)(order)
