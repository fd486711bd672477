"""`holdfast prove` answers: is a script of yours the same after a kill, at every step of its optimizers?

    holdfast prove [--kills 5] [--seed 1] [--nproc-per-node 1] [--timeout 600] [--fresh-copy] [--keep DIR] [--json]
                   [-m] script.py [--] args...

1. The script runs twice undisturbed under `holdfast run`, without a checkpoint directory. Where these two differ nothing can be proved: it
   is said at which step and in what, and that is all.
2. It runs once for each kill, with a checkpoint directory of its own. A drawn rank gets SIGKILL at a drawn step of its optimizers, and
   `holdfast run` mends it. Every step of every optimizer, on every rank, is compared with the undisturbed run, and so is the exit code.

A script that saves by itself (`import holdfast`) needs a new place in each run: `{dir}` in its arguments is replaced by one.
Exit codes: 0 all is equal; 1 something is not; 2 wrong usage; 3 the script is not kept; 4 nothing can be proved, because the
undisturbed runs fail, differ, or make no step.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from holdfast.base.errors import UsageError
from holdfast.base.terminal import some_of
from holdfast.checkpoint.usage.loop_observer import NO_VERSION
from holdfast.testing.prove.run_notes import BEFORE, BEHIND
from holdfast.testing.prove.script_run import PLACE, Ended, Kill, ScriptRuns, Target, files_below, tail
from holdfast.testing.prove.step_comparison import Difference, Judged, Step, compare_undisturbed, judge
from holdfast.testing.prove.step_log import Life

EQUAL, DIFFERS, NOT_KEPT, ENDED, TIMED_OUT, NOT_KILLED = (
    "equal", "differs", "not kept", "ended otherwise", "timed out", "not killed",
)  # fmt: skip
UNPROVABLE = "cannot be proved"
EXIT_CODES = {EQUAL: 0, DIFFERS: 1, ENDED: 1, TIMED_OUT: 1, NOT_KILLED: 1, NOT_KEPT: 3, UNPROVABLE: 4}
# Lines of its standard error that are shown of a run that failed.
ERROR_LINES = 12
MAX_FILES_NAMED = 3
# What the lines of a Checkpointer's warning begin with, and how many lines and names are looked at.
_NAMED = re.compile(r"    ([\w.]+): ")
WARNING_LINES, MAX_NAMES = 1000, 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says what came of one kill.

    Attributes:
        number: of the kill, from 1.
        kill: who was killed, and when.
        outcome: one of the words above.
        why: what differs, or the reason that holdfast gave.
        difference: the first one.
        resumed_at: the step that was made first behind the restart, counted from 1.
        again: steps that were made a second time.
        notes: what is no fault, and worth knowing.
        seconds: how long the run took.
        lines: those that would keep the script, where it is not kept, or why there are none.
    """

    number: int
    kill: Kill
    outcome: str
    why: str = ""
    difference: Difference | None = None
    resumed_at: int | None = None
    again: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    lines: tuple[str, ...] = ()

    def line(self) -> str:
        """Return all of it as one line."""
        kill = self.kill
        found = [f"rank {kill.rank} {kill.moment} step {kill.step}: {self.outcome}{self.why and ', '}{self.why}"]
        if self.outcome == EQUAL:
            found.append(f"went on with step {self.resumed_at}, {self.again} made again")
        return "; ".join([*found, *self.notes])


class Unprovable(Exception):
    """Nothing can be proved of this script; the message says why."""


@dataclass(slots=True)
class Undisturbed:
    """The run that all others are compared with: its steps by rank, its code, its last lines."""

    steps: Mapping[int, Sequence[Step]]
    output: tuple[str, ...]


class Proof:
    """The proof of one script.

    Args:
        say: is told how far it is.
    """

    def __init__(self, runs: ScriptRuns, target: Target, say: Callable[[str], None]) -> None:
        self._runs, self._target, self._say = runs, target, say
        self.verdicts: list[Verdict] = []
        self.steps: dict[int, int] = {}

    def run(self, kills: int, seed: int) -> str:
        """All of it; returns the outcome of the whole.

        Raises:
            Unprovable: the undisturbed runs fail, differ, or make no step.
        """
        undisturbed = self._undisturbed()
        self.steps = {rank: len(steps) for rank, steps in undisturbed.steps.items()}
        drawn = draw(self.steps, kills, seed)
        for number, kill in enumerate(drawn, 1):
            name = f"kill-{number}"
            verdict = verdict_of(number, kill, undisturbed, self._runs.run(name, kill))
            self.verdicts.append(verdict)
            self._say(f"kill {number} of {len(drawn)}: {verdict.line()}")
            if verdict.outcome == EQUAL:
                self._runs.forget(name)
            if verdict.outcome == NOT_KEPT:
                break  # the others would say the same
        return self.outcome()

    def outcome(self) -> str:
        """The worst of the verdicts; restarts that all began anew have shown nothing."""
        outcomes = {verdict.outcome for verdict in self.verdicts}
        for bad in (DIFFERS, ENDED, TIMED_OUT, NOT_KILLED, NOT_KEPT):
            if bad in outcomes:
                return bad
        anew = all(verdict.resumed_at == 1 and verdict.kill.step > 1 for verdict in self.verdicts)
        return NOT_KEPT if anew else EQUAL

    def _undisturbed(self) -> Undisturbed:
        runs = []
        before = files_below(Path.cwd(), self._runs.home)
        for number in (1, 2):
            name = f"undisturbed-{number}"
            run = self._runs.run(name)
            self._runs.forget(name)
            _require_good(run, number)
            runs.append({rank: [life.steps for life in lives] for rank, lives in run.lives.items()})
            made = sum(len(lives[-1]) for lives in runs[-1].values())
            self._say(
                f"undisturbed run {number}: {made} steps of optimizers on {len(runs[-1])} ranks, {run.seconds:.1f} s"
            )
            if not made:
                raise Unprovable("no step of an optimizer of torch.optim was made")
            if number == 1:
                self._tell_files(before)
        if (found := compare_undisturbed(*runs)) is not None:
            raise Unprovable(
                f"two undisturbed runs differ: step {found.step} on rank {found.rank}, {found.what}. Set seeds "
                "(torch.manual_seed), or give --fresh-copy if the script goes on from files that it wrote"
            )
        return Undisturbed({rank: lives[-1] for rank, lives in runs[0].items()}, run.output)

    def _tell_files(self, before: Mapping[str, object]) -> None:
        after = files_below(Path.cwd(), self._runs.home)
        names = sorted(name for name, facts in after.items() if before.get(name) != facts)
        if names:
            self._say(
                f"note: the script writes into this directory: {some_of(names, MAX_FILES_NAMED)}; --fresh-copy gives "
                "each run a copy of its own"
            )


def draw(steps: Mapping[int, int], kills: int, seed: int) -> list[Kill]:
    """Returns kills at drawn steps of drawn ranks, no two alike; the first ones of a seed are the same for any number.

    Args:
        steps: how many each rank makes.
        kills: how many.
        seed: of the draw.
    """
    chance = random.Random(seed)
    ranks = sorted(rank for rank, count in steps.items() if count)
    possible = sum(2 * steps[rank] for rank in ranks)
    found: dict[Kill, None] = {}
    while len(found) < min(kills, possible):
        rank = chance.choice(ranks)
        found[Kill(rank, chance.randint(1, steps[rank]), chance.choice((BEFORE, BEHIND)))] = None
    return list(found)


def verdict_of(number: int, kill: Kill, undisturbed: Undisturbed, run: Ended) -> Verdict:
    """Returns what a run with a kill shows."""
    lives = {rank: [life.steps for life in each] for rank, each in run.lives.items()}
    judged = judge(undisturbed.steps, lives, killed=kill.rank, ended=run.code == 0)
    reason = refusal(run.lives)
    outcome, why = _outcome(kill, run, judged, reason)
    notes = []
    if judged.random_from is not None and outcome in (EQUAL, NOT_KEPT):
        notes.append(f"random numbers alone differ from step {judged.random_from} on")
    if outcome == EQUAL and (names := unkept_names(tail(run.directory / "errors", WARNING_LINES))):
        notes.append(f"holdfast warns that the script changes what is in no version: {some_of(names, MAX_NAMES)}")
    if run.code == 0 and run.output != undisturbed.output:
        notes.append(f"its last lines of output are others: {' / '.join(run.output)[-120:]!r}")
    return Verdict(
        number,
        kill,
        outcome,
        why,
        judged.difference,
        judged.resumed_at,
        judged.again,
        tuple(notes),
        round(run.seconds, 1),
        proposed(run.lives) if outcome == NOT_KEPT else (),
    )


def unkept_names(errors: Sequence[str]) -> list[str]:
    """Returns the names of which a Checkpointer has said that no version has them, of the lines of a standard error."""
    found: dict[str, None] = {}
    names_follow = False
    for line in errors:
        named = _NAMED.match(line) if names_follow else None
        if named:
            found[named[1]] = None
        names_follow = NO_VERSION in line or (names_follow and line.startswith("    "))
    return list(found)


def _outcome(kill: Kill, run: Ended, judged: Judged, reason: str) -> tuple[str, str]:
    if (found := judged.difference) is not None:
        when = "before the kill" if found.life == 0 else "after the restart"
        ended = "" if run.code == 0 else f"; {_ended(run)}"
        kept = f"; {reason}" if reason else ""
        return DIFFERS, f"{when}, first at step {found.step} on rank {found.rank}: {found.what}{ended}{kept}"
    if run.code is None:
        return (
            TIMED_OUT,
            f"all {sum(len(life.steps) for each in run.lives.values() for life in each)} steps it made are equal",
        )
    if run.code != 0:
        return ENDED, _ended(run)
    if len(run.lives.get(kill.rank, ())) < 2:
        return NOT_KILLED, "the step did not come"
    if reason and judged.resumed_at == 1:
        return NOT_KEPT, reason
    return EQUAL, ""


def refusal(lives: Mapping[int, Sequence[Life]]) -> str:
    """Returns why holdfast keeps nothing of the script, as its events say; empty if it keeps it, or says nothing."""
    for each in lives.values():
        for life in each:
            last = next((s for s in reversed(life.said) if s.name in ("script_kept", "script_refused")), None)
            if last is not None and last.name == "script_refused":
                return str(last.fields["reason"])
    return ""


def proposed(lives: Mapping[int, Sequence[Life]]) -> tuple[str, ...]:
    """Returns the lines that would keep the script, as its events say, or why there are none; nothing if they say nothing."""
    said = [s for each in lives.values() for life in each for s in life.said if s.name == "script_lines"]
    return tuple(str(said[0].fields["lines"]).splitlines()) if said else ()


def _ended(run: Ended) -> str:
    return (
        f"its exit code is {run.code}: {' / '.join(_errors(run))[-300:]}" if run.code is not None else "its time was up"
    )


def _require_good(run: Ended, number: int) -> None:
    foreign = [s for each in run.lives.values() for life in each for s in life.said if s.name == "foreign_root"]
    if foreign:
        raise Unprovable(
            f"the script keeps its checkpoints in {foreign[0].fields['root']}, where those of other runs may lie. Write {PLACE} "
            "in its arguments, which is a new directory in each run, or give --fresh-copy if the path is relative"
        )
    if run.code != 0:
        how = "did not end in time (--timeout)" if run.code is None else f"ended with exit code {run.code}"
        lines = "\n  ".join(_errors(run))
        raise Unprovable(f"undisturbed run {number} {how}:\n  {lines}")


def _errors(run: Ended) -> Sequence[str]:
    """Returns the last lines of standard error, without what the launcher sums up behind them."""
    lines = tail(run.directory / "errors", 10 * ERROR_LINES)
    end = next((at for at, line in enumerate(lines) if line.startswith(("=====", "+--"))), len(lines))
    return lines[:end][-ERROR_LINES:]


def imports_holdfast(path: Path) -> bool:
    """Tell whether a script imports holdfast anywhere; False where it cannot be read."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError, RecursionError):
        return False  # Python tells what is wrong with it
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] == "holdfast" for name in names)


def source_of(word: str, *, is_module: bool) -> Path | None:
    """Returns the file of a script or module, found without importing anything."""
    if not is_module:
        return Path(word)
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    origin: str | None = None
    for part in word.split("."):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
        origin = spec.origin
    if places is not None:
        spec = PathFinder.find_spec("__main__", places)
        origin = spec.origin if spec is not None else None
    return Path(origin) if origin else None


# --- the command --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None, *, popen: Callable[..., Any] = subprocess.Popen) -> int:
    """The command; returns the exit code.

    Args:
        arguments: of the command line.
        popen: as `subprocess.Popen`, for who starts processes in a quicker way.
    """
    options = _options(arguments)
    try:
        target = _target(options)
        home = _home(options.keep)
    except UsageError as error:
        sys.stderr.write(f"holdfast prove: {error}\n")
        return 2
    runs = ScriptRuns(home, target, timeout_s=options.timeout, fresh_copy=options.fresh_copy, popen=popen)
    proof = Proof(runs, target, _progress)
    outcome, why = UNPROVABLE, ""
    try:
        with _stoppable():
            outcome = proof.run(options.kills, options.seed)
    except Unprovable as error:
        why = str(error)
    except KeyboardInterrupt:
        _progress(f"stopped; nothing of it runs on. What there is: {home}")
        return 130
    finally:
        runs.close()
    kept = options.keep is not None or outcome != EQUAL
    if not kept:
        shutil.rmtree(home, ignore_errors=True)
    elif options.keep is None:
        for each in home.iterdir():
            runs.forget(each.name)
    _report(proof, target, outcome, why, home if kept else None, as_json=options.json)
    return EXIT_CODES[outcome]


def _report(proof: Proof, target: Target, outcome: str, why: str, home: Path | None, *, as_json: bool) -> None:
    equal = sum(verdict.outcome == EQUAL for verdict in proof.verdicts)
    if outcome == NOT_KEPT and equal == len(proof.verdicts):
        why = "every restart began anew, so nothing was restored"
    if as_json:
        facts = {
            "script": list(target.words), "ranks": target.ranks, "outcome": outcome, "why": why, "steps": proof.steps,
            "kills": [asdict(verdict) for verdict in proof.verdicts], "logs": str(home) if home else None,
        }  # fmt: skip
        sys.stdout.write(json.dumps(facts) + "\n")
        return
    lines = [f"{verdict.number}. {verdict.line()}" for verdict in proof.verdicts]
    count = f" ({equal} of {len(proof.verdicts)} kills equal at every step)" if proof.verdicts else ""
    lines.append(f"{outcome}{count}{why and ': '}{why}")
    lines += next((verdict.lines for verdict in proof.verdicts if verdict.lines), ())
    lines += [f"logs: {home}"] if home else []
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _progress(line: str) -> None:
    sys.stderr.write(f"holdfast prove: {line}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP stop it as Ctrl-C does."""

    def stop(_: int, __: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _home(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="holdfast-prove-"))
    keep = keep.expanduser().absolute()
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(
            f"{keep} is not an empty directory",
            remedy="give --keep a new one: earlier runs must not be mixed with these",
        )
    keep.mkdir(parents=True, exist_ok=True)
    return keep


def _target(options: argparse.Namespace) -> Target:
    words = [options.script, *options.arguments]
    if words[1:2] == ["--"]:
        del words[1]
    source = source_of(options.script, is_module=options.module)
    if source is None or not source.exists():
        raise UsageError(f"there is no {'module' if options.module else 'script'} {options.script}")
    if os.environ.get("HOLDFAST_DISABLE"):
        raise UsageError("HOLDFAST_DISABLE is set, so nothing would be kept", remedy="unset it")
    placed = any(PLACE in word for word in words)
    own = imports_holdfast(source)
    if own and not placed and not options.fresh_copy:
        raise UsageError(
            "the script imports holdfast, and its checkpoints must lie in a new directory in each run",
            where=str(source),
            remedy=f"write {PLACE} where its arguments name the directory, or give --fresh-copy if the path is relative",
        )
    return Target(tuple(words), options.module, options.nproc_per_node, keeps_itself=own or placed)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="holdfast prove",
        usage="%(prog)s [options] [-m] script.py [--] args...",
        description="Runs a script twice undisturbed, then with kills under `holdfast run`, and compares every step of every "
        "optimizer on every rank: all parameters, all that the optimizer keeps, all buffers.",
        epilog="Exit codes: 0 all is equal; 1 something differs, or ends otherwise; 2 wrong usage; 3 the script is not kept "
        "(the reason is said), or every restart began anew; 4 nothing can be proved: the undisturbed runs fail, differ or make "
        "no step. `{dir}` in the arguments of the script is a directory that is new in each run, for scripts that save by "
        "themselves. A run makes as many steps as the script does: give it arguments that make it short.",
    )
    parser.add_argument(
        "--kills", type=int, default=5, metavar="K", help="how many kills, each in a run of its own (5)"
    )
    parser.add_argument("--seed", type=int, default=1, help="the same seed draws the same kills (1)")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="ranks (1)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="how long one run may take (600)"
    )
    parser.add_argument(
        "--fresh-copy", action="store_true", help="each run in a copy of this directory; default: in this directory"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and checkpoints of all runs there")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script", help="a Python script, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    if options.kills < 1 or options.nproc_per_node < 1 or options.timeout <= 0:
        parser.error("there is at least one kill and one rank, and time is positive")
    return options


if __name__ == "__main__":
    sys.exit(main())
