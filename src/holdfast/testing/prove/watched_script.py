"""The program of one run: `holdfast run` with a hook behind every step of every optimizer, the same in every run.

Called as `python -m holdfast.testing.prove.watched_script`, with the arguments of `holdfast run`. What it has to do besides
stands in one variable of the environment (`RunNotes`): where the steps are written, which rank is killed, and where checkpoints may
lie. The script is run as `adapters.zero_lines.launcher` runs it. The hook lies in a module of its own: what the program itself holds
(`__main__`) is taken for the user's.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.adapters import singletons
from holdfast.adapters.zero_lines.launcher import ScriptLauncher
from holdfast.base.events import Events
from holdfast.elastic.launch import run_command, run_flags
from holdfast.elastic.worker.worker_main import run_script
from holdfast.testing.prove.step_watch import WatchedScript


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; returns the exit code."""
    root = run_flags.checkpoint_dir(argv)
    events = Events()
    script = ScriptLauncher(root, events) if root else run_script
    return run_command.main(argv, script=WatchedScript(script, events), looks=[singletons.left])


if __name__ == "__main__":
    run_command.leave(main())
