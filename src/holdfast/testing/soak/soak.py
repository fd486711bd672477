"""`holdfast drill soak`: one job for as long as you like, a fault every so often, and memory that must stay flat.

    holdfast drill soak [--minutes 30] [--every 30] [--seed 1] [--oddities FILE] [--json]

Two ranks under `holdfast run`. Faults are drawn: a rank gets SIGKILL or SIGSTOP, raises or exits; both at once; a second one
while the first is mended; the keeper gets SIGKILL; the launcher does, and is started again. After each, both ranks must
make steps again. At the end every step that was ever made, however often, must be bit for bit that of a run without
holdfast, and neither launcher, keeper nor ranks may have grown. With a file of healthy oddities one rank does one of them
behind every fault, while the other waits: both must be the same processes when it ends. Exit code 0: all of this held; 1:
it did not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from holdfast.base import program
from holdfast.testing.contracts.adapter_processes import keepers_under

WORKER = str(Path(__file__).with_name("soak_train.py"))
RANKS = (0, 1)
BACK_S = 120.0
ODDITY_S = 1200.0  # the longest that an oddity may last
SAMPLE_S = 2.0
# What a role may have grown by from the second quarter of the run to the last: a share, and some pages.
MAX_GROWTH, SLACK_BYTES, SLACK_DESCRIPTORS = 0.1, 16 << 20, 8
KINDS = {"kill": 5, "stop": 2, "raise": 2, "exit": 2, "both": 2, "twice": 2, "keeper": 3, "launcher": 1}


class SoakFailure(Exception):
    """Something did not hold."""


@dataclass
class Soak:
    """One run."""

    home: Path
    chance: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    oddities: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, int]] = field(default_factory=list)
    launcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """The launcher; it goes on from what there is."""
        command = program.command("holdfast.elastic.launch.run_command", "--standalone", "--nproc-per-node=2")
        command += ["--max-restarts=1000000", "--run-id=soak", f"--runtime-dir={self.home}/run", WORKER, str(self.home)]
        with (self.home / "launcher.log").open("ab") as log:
            self.launcher = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def newest(self) -> dict[int, tuple[int, float]]:
        """Return, of every rank, process and time of its newest step."""
        found = {}
        for rank in RANKS:
            with contextlib.suppress(OSError, ValueError, IndexError):
                with (self.home / f"steps-{rank}").open("rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - 200))
                    _, _, pid, at = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2].split()
                found[rank] = (int(pid), float(at))
        return found

    def pids(self) -> dict[int, int]:
        """Return, of every rank, the process that made its newest step."""
        return {rank: pid for rank, (pid, _) in self.newest().items()}

    def wait(self, since: float, gone: Sequence[int] = ()) -> None:
        """Until both ranks have made steps after that moment, in processes that are not `gone`."""
        deadline = time.monotonic() + BACK_S
        while True:
            newest = self.newest()
            if len(newest) == len(RANKS) and all(at > since and pid not in gone for pid, at in newest.values()):
                return
            if self.launcher is not None and self.launcher.poll() is not None:
                raise SoakFailure(f"the launcher ended with {self.launcher.returncode}; see {self.home}/launcher.log")
            if time.monotonic() > deadline:
                raise SoakFailure(f"no steps for {BACK_S:.0f} s; see {self.home}/launcher.log")
            time.sleep(0.05)

    def strike(self) -> str:
        """One fault, until the job trains again; its kind."""
        kind = self.chance.choices(list(KINDS), list(KINDS.values()))[0]
        rank, at = self.chance.choice(RANKS), time.time()
        pids = self.pids()
        victims = [pids[rank]]
        if kind in ("raise", "exit"):
            unfinished = self.home / f".hit-{rank}"
            unfinished.write_text(kind)
            unfinished.rename(self.home / f"hit-{rank}")
        elif kind in ("kill", "twice", "stop"):
            os.kill(pids[rank], signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        elif kind == "both":
            victims = list(pids.values())
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        elif kind == "keeper":
            victims = []
            for keeper in self._roles()["keeper"]:
                keeper.kill()
        else:
            victims = list(pids.values())
            assert self.launcher is not None
            self.launcher.kill()
            self.launcher.wait()
            self.start()
        if kind == "twice":  # the other one, while the first is mended
            time.sleep(self.chance.uniform(0.05, 0.8))
            other = pids[1 - rank]
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
            victims.append(other)
        self.wait(at, victims)
        self.faults[kind] += 1
        self.seconds.append(time.time() - at)
        return kind

    def do_oddity(self, path: Path, names: Sequence[str]) -> str:
        """One rank does what is healthy and looks odd; returns its name when both train on, as the processes they were."""
        name, rank = names[sum(self.oddities.values()) % len(names)], self.chance.choice(RANKS)
        self.wait(time.time())  # a survivor of the last fault may be renewed after its last step
        before = self.pids()
        lived = self.home / f"lived-{rank}"
        lived.unlink(missing_ok=True)
        unfinished = self.home / f".oddity-{rank}"
        unfinished.write_text(f"{path}\n{name}\n")
        unfinished.rename(self.home / f"oddity-{rank}")
        deadline = time.monotonic() + ODDITY_S
        while not lived.exists():
            now = self.pids()
            dead = [pid for pid in before.values() if not psutil.pid_exists(pid)]
            if now != before or dead or time.monotonic() > deadline:
                raise SoakFailure(
                    f"rank {rank} did {name!r}: the ranks were processes {before} and are {now}, gone: {dead}; "
                    f"see {self.home}/launcher.log"
                )
            time.sleep(0.2)
            if self.chance.random() < 0.1:
                self.sample()
        self.wait(time.time())
        now = self.pids()
        if now != before:
            raise SoakFailure(f"rank {rank} did {name!r}: the ranks were processes {before} and are {now}")
        self.oddities[name] += 1
        return name

    def sample(self) -> None:
        """Resident bytes and descriptors of each role."""
        row: dict[str, int] = {}
        for role, processes in self._roles().items():
            with contextlib.suppress(psutil.Error, ValueError):  # it ended this moment, or nobody has the role
                row[f"{role} bytes"] = max(process.memory_info().rss for process in processes)
                row[f"{role} descriptors"] = max(process.num_fds() for process in processes)
        self.samples.append(row)

    def _roles(self) -> dict[str, list[psutil.Process]]:
        assert self.launcher is not None
        roles: dict[str, list[psutil.Process]] = {"launcher": [psutil.Process(self.launcher.pid)]}
        roles["rank"] = [psutil.Process(pid) for pid in self.pids().values() if psutil.pid_exists(pid)]
        roles["keeper"] = keepers_under(self.home / "run")
        return roles

    def grown(self) -> dict[str, tuple[int, int]]:
        """Return, of everything that was sampled, its median in the second quarter and in the last."""
        quarter = len(self.samples) // 4
        found = {}
        for name in sorted({name for row in self.samples for name in row}):
            early = [row[name] for row in self.samples[quarter : 2 * quarter] if name in row]
            late = [row[name] for row in self.samples[3 * quarter :] if name in row]
            if early and late:
                found[name] = (int(statistics.median(early)), int(statistics.median(late)))
        return found

    def finish(self) -> None:
        """The job ends by itself."""
        (self.home / "stop").touch()
        assert self.launcher is not None
        if self.launcher.wait(BACK_S) != 0:
            raise SoakFailure(f"the job ended with {self.launcher.returncode}; see {self.home}/launcher.log")

    def judge(self) -> tuple[int, int]:
        """(steps, steps that were made more than once), if every one is that of the yardstick."""
        rows = {
            rank: [line.split()[:2] for line in (self.home / f"steps-{rank}").read_text().splitlines()]
            for rank in RANKS
        }
        steps = 1 + max(int(step) for step, _ in rows[0])
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        told = subprocess.run(
            [*command, WORKER, str(self.home), str(steps)], capture_output=True, text=True, check=False
        )
        if told.returncode:
            raise SoakFailure(f"the yardstick ended with {told.returncode}: {told.stderr[-4000:]}")
        for rank in RANKS:
            expected = dict(line.split() for line in (self.home / f"reference-{rank}").read_text().splitlines())
            wrong = [step for step, digest in rows[rank] if expected[step] != digest]
            missing = set(expected) - {step for step, _ in rows[rank]}
            if wrong or missing:
                raise SoakFailure(
                    f"rank {rank}: {len(wrong)} steps differ, {len(missing)} are missing, first {wrong[:1]}"
                )
        return steps, len(rows[0]) - steps

    def close(self) -> None:
        """Kills the launcher, and the keepers, that are left."""
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()
        if self.launcher is not None:
            for keeper in keepers_under(self.home / "run"):
                keeper.kill()


def too_fat(grown: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return what has grown by more than it may."""
    return {
        name: (early, late)
        for name, (early, late) in grown.items()
        if late > early * (1 + MAX_GROWTH) + (SLACK_BYTES if "bytes" in name else SLACK_DESCRIPTORS)
    }


def soak(
    home: Path, *, minutes: float, every_s: float, seed: int, say: Callable[[str], None], oddities: Path | None = None
) -> dict[str, object]:
    """Runs it; returns what is to be told.

    Args:
        home: an empty directory of its own.
        minutes: how long it lasts, up to the end of what was begun.
        every_s: seconds between the beginnings of two faults, at least.
        seed: of the draw.
        say: is told of each fault and oddity.
        oddities: a Python file whose `HEALTHY` names functions of a model, as `tests/oddity_jobs.py` does.

    Raises:
        SoakFailure: something did not hold.
    """
    run = Soak(home, random.Random(seed))
    names = list(runpy.run_path(str(oddities))["HEALTHY"]) if oddities else []
    run.chance.shuffle(names)
    try:
        run.start()
        run.wait(0.0)
        end = time.monotonic() + 60 * minutes
        strike_at = time.monotonic() + every_s
        while time.monotonic() < end:
            time.sleep(max(0.0, min(SAMPLE_S, strike_at - time.monotonic())))
            run.sample()
            if time.monotonic() >= strike_at:
                kind = run.strike()
                say(f"{sum(run.faults.values())} faults, the last one {kind}, back after {run.seconds[-1]:.1f} s")
                if oddities:
                    say(f"{run.do_oddity(oddities, names)!r} lived, number {sum(run.oddities.values())}")
                strike_at = max(strike_at + every_s, time.monotonic() + 1.0)
        run.finish()
        steps, again = run.judge()
    finally:
        run.close()
    grown = run.grown()
    if fat := too_fat(grown):
        raise SoakFailure(f"something grew: {fat}")
    return {
        "minutes": minutes, "faults": dict(run.faults), "steps": steps, "made_again": again, "different": 0,
        "back_median_s": round(statistics.median(run.seconds), 2) if run.seconds else None,
        "oddities_lived": sum(run.oddities.values()),
        "back_max_s": round(max(run.seconds, default=0.0), 2),
        "grown": {name: list(pair) for name, pair in grown.items()},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="holdfast drill soak", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    parser.add_argument("--every", type=float, default=30.0, metavar="SECONDS", help="between two faults (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default 1)")
    parser.add_argument(
        "--oddities", type=Path, metavar="FILE", help="a Python file whose HEALTHY names functions of a model"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    if options.oddities and not options.oddities.is_file():
        parser.error(f"--oddities: there is no file {options.oddities}")
    if options.minutes <= 0 or options.every <= 0:
        parser.error("time is positive")
    home = Path(tempfile.mkdtemp(prefix="hf-soak-"))

    def say(text: str) -> None:
        if not options.json:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    try:
        told = soak(
            home,
            minutes=options.minutes,
            every_s=options.every,
            seed=options.seed,
            say=say,
            oddities=options.oddities and options.oddities.resolve(),
        )
    except SoakFailure as failure:
        sys.stdout.write(f"{json.dumps({'failure': str(failure)}) if options.json else failure}\n")
        return 1
    shutil.rmtree(home, ignore_errors=True)
    sys.stdout.write(json.dumps(told) + "\n" if options.json else "".join(f"{k:14} {v}\n" for k, v in told.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
