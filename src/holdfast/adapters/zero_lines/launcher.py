"""`holdfast run` with scripts that are kept without a line: the launcher of `elastic.launch.run_command`, and what workers run.

Called as `python -m holdfast.adapters.zero_lines.launcher`, by the command and by tests. Without `--checkpoint-dir` no script is touched,
for there is no place to keep it. The workers are forked from this process, so they have what is set up here.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import decode_source
from pathlib import Path

from torch import distributed as dist

from holdfast.adapters import singletons
from holdfast.adapters.zero_lines.doubts import UNKEPT, say
from holdfast.adapters.zero_lines.files_read_back import FileWatch
from holdfast.adapters.zero_lines.frameworks import Finder
from holdfast.adapters.zero_lines.nested.nested_loop import KeptLoops, Unfit
from holdfast.adapters.zero_lines.nested.nested_script import Nest
from holdfast.adapters.zero_lines.own_modules import OwnFinder, OwnLoops, find_in_modules, find_in_script
from holdfast.adapters.zero_lines.proposed_lines import Proposer
from holdfast.adapters.zero_lines.script_text import HOOK, ITSELF, NO_LOOP
from holdfast.base import config
from holdfast.base.errors import MismatchError
from holdfast.base.events import Events
from holdfast.base.handler_errors import pass_on
from holdfast.elastic.launch import run_command, run_flags
from holdfast.elastic.worker import main_module
from holdfast.elastic.worker.agent_channel import RunOrder
from holdfast.elastic.worker.worker_main import run_script


class ScriptLauncher:
    """Runs a script, kept if that is safe.

    Args:
        root: directory or URL of the checkpoints.
        events: told `script_kept`, or `script_refused` with the reason, in the worker.
    """

    def __init__(self, root: str, events: Events | None = None) -> None:
        self._root = root
        self._events = events or Events()

    def __call__(self, order: RunOrder) -> None:
        """Runs the order's script as `__main__`."""
        if order.is_module or config.disabled():
            reason = "a module run by `-m` is not looked at" if order.is_module else "holdfast is switched off"
            self._events.emit("script_refused", reason=reason)
            run_script(order)
            return
        path = order.arguments[0]
        found: Nest | OwnLoops | str
        says = order.environment.get("RANK", "0") == "0"
        try:
            source = decode_source(order.text.encode("latin-1") if order.text else Path(path).read_bytes())
            found = find_in_script(path, source)
            if found == NO_LOOP:
                found = find_in_modules(path, source) or found
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            pass_on(error)
            found = ""
            reason = f"its text cannot be read: {type(error).__name__}: {error}"
            self._events.emit("script_refused", reason=reason)
            if says and (not isinstance(error, OSError | SyntaxError) or main_module.is_bundle(path)):
                say(_said(reason))  # of all else Python tells what is wrong
        if isinstance(found, str) and found:
            self._events.emit("script_refused", reason=found)
            if says:
                say(_said(found))
                if found != ITSELF:
                    Proposer(self._root, say, self._events, found)
        finder = Finder(self._root, says=says, events=self._events)
        if found != ITSELF:
            finder.install()
        if isinstance(found, str):
            try:
                run_script(order)
            finally:
                Proposer.end_all()
                finder.remove()
            return
        files = FileWatch(self._root, loads=(found.nest if isinstance(found, OwnLoops) else found).reads_files)
        try:
            self._run_nest(path, found, order, files)
        finally:
            files.end()
            Proposer.end_all()
            finder.remove()

    def _run_nest(self, path: str, found: Nest | OwnLoops, order: RunOrder, files: FileWatch) -> None:
        finder: OwnFinder | None = None
        nest, modules = (found.nest, found.modules) if isinstance(found, OwnLoops) else (found, frozenset())
        kept = KeptLoops(nest, self._root, self._events, files, modules)
        unfit = False
        try:
            if isinstance(found, OwnLoops):
                finder = OwnFinder(found, kept)
                finder.install()
                run_script(order)
                return
            main_module.run_path(path, tree=found.tree, names={HOOK: kept})
            return
        except Unfit as error:
            reason, unfit = str(error), True
            self._events.emit("script_refused", reason=reason)
            if finder is not None:
                finder.forget()
        finally:
            kept.end(unfit=unfit)
            if finder is not None:
                finder.remove()
        remedy = f"to begin anew with it, give another --checkpoint-dir, or remove {self._root}"
        if dist.is_available() and dist.is_initialized():
            raise MismatchError(f"this script cannot go on where it was: {reason}", remedy=remedy)
        say(
            f"this script is not kept, {reason}; it runs again from its beginning, and nothing of it is saved; {remedy}"
        )
        run_script(order)


def _said(reason: str) -> str:
    """Returns what a script is told that has no loop to keep, for this reason."""
    if reason == NO_LOOP:
        return (
            "this script shows no training loop in its text; a Trainer of transformers or Lightning is kept when it is built, and any "
            "other training begins anew at a restart: holdfast.Checkpointer in the script keeps it"
        )
    if reason == ITSELF:
        return f"nothing of this script is kept without a line: {reason}"
    return f"no loop of this script is kept: {reason}; {UNKEPT}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; returns the exit code."""
    root = run_flags.checkpoint_dir(argv)
    return run_command.main(argv, script=ScriptLauncher(root) if root else run_script, looks=[singletons.left])


if __name__ == "__main__":
    run_command.leave(main())
