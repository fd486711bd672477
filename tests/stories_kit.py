"""Stories of frameworks: scripts that kill themselves once at a named moment, and tell what they ended with.

A story is run as `STORY ROOT FACTS --plan PLAN [--kill MOMENT]`. It writes FACTS (FACTS.N on rank N) when it is over, and makes
lives with `--serve`: `adapters/story_server.py`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from doors_kit import SOURCE, launching
from holdfast.testing.contracts.adapter_processes import keepers_under

ALL = -1  # ranks
KEEPER_END_S = 60.0  # generous: it writes what storage lacks, on a machine with other work


def drawn(matrix: Mapping[str, str], number: int) -> list[Any]:
    """Plans with each of their moments, as parameters: all but a few, drawn once, are slow."""
    cases = [(plan, moment) for plan, moments in matrix.items() for moment in moments.split()]
    default = set(random.Random(30).sample(cases, number))
    return [pytest.param(*case, marks=() if case in default else pytest.mark.slow) for case in cases]


def same(facts: dict[str, Any], undisturbed: dict[str, Any], *, more: str = "") -> None:
    """Everything but where lives began. Under the name `more` there may be some besides those of the undisturbed life."""
    for name, value in undisturbed.items():
        if name == more:
            assert set(value) <= set(facts[name])
        elif name != "starts":
            assert facts[name] == value, (name, facts[name], value)


@dataclass
class Stories:
    """Makes lives of one story, each in a directory of its own; undisturbed ones once."""

    script: Path
    place: Path
    server: Any
    environment: dict[str, str]
    known: dict[object, Any] = field(default_factory=dict)
    came: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    count: int = 0

    def undisturbed(self, plan: str) -> dict[str, Any]:
        """Facts of a life without holdfast."""
        if plan not in self.known:
            place = self._directory()
            assert self._live(place, "--plan", plan, HOLDFAST_DISABLE="1") == 0, self.told(place)
            self.known[plan] = json.loads((place / "facts").read_text())
        return dict(self.known[plan])

    def killed(
        self, plan: str, moment: str, *words: str, plain: bool = False, then: Sequence[str] = ()
    ) -> tuple[dict[str, Any], str]:
        """Two lives: the first ends at the moment, the second is what the launcher would start then.

        Args:
            plan: of the story.
            moment: at which the first life ends.
            words: more of both command lines.
            plain: without holdfast.
            then: more of the second one's.
        """
        place = self._directory()
        disabled = {"HOLDFAST_DISABLE": "1"} if plain else {}
        ended = self._live(place, "--plan", plan, "--kill", moment, *words, **disabled)
        assert ended == (0 if "--term" in words else -9), self.told(place)
        assert not (place / "facts").exists(), "the training was over before the moment"
        again = self._live(place, "--plan", plan, *words, *then, TORCHELASTIC_RESTART_COUNT="1", **disabled)
        assert again == 0, self.told(place)
        return json.loads((place / "facts").read_text()), self.told(place)

    def again(self, plan: str, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Facts of two whole lives, the second in the directory of the first."""
        place = self._directory()
        facts = []
        for _ in range(2):
            assert self._live(place, "--plan", plan, *words) == 0, self.told(place)
            facts.append(json.loads((place / "facts").read_text()))
        return facts[0], facts[1]

    def ranks(
        self, number: int, plan: str, moment: str = "", of: int = 0, launch: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Facts of every rank under the launcher, which starts again what was killed; without a moment undisturbed, and once.

        Args:
            number: of ranks.
            plan: of the story.
            moment: at which ranks are killed.
            of: the rank that is killed, or -1 for all.
            launch: the command of another launcher than `holdfast run`, as far as the script.
        """
        if not moment and (number, plan) in self.known:
            return [dict(facts) for facts in self.known[number, plan]]
        place = self._directory()
        words = ("--kill", moment, "--of", str(of)) if moment else ()
        self._launch(place, number, plan, *words, launch=launch, plain=not moment)
        facts = self._facts(place, number)
        if moment:
            self._require_kill(place, number, of)
        else:
            self.known[number, plan] = [dict(each) for each in facts]
            of_ranks = [(place / f"facts.moments{rank}").read_text().split() for rank in range(number)]
            self.came[number, plan] = [one for one in of_ranks[0] if all(one in each for each in of_ranks)]
        return facts

    def moments(self, number: int, plan: str) -> list[str]:
        """The moments that every rank of an undisturbed life comes to, in their order."""
        self.ranks(number, plan)
        return self.came[number, plan]

    def stopped(self, plan: str, moment: str) -> tuple[dict[str, Any], str]:
        """One rank that gets SIGTERM at the moment, and what is started behind it, unless no step was left."""
        place = self._directory()
        words = ("--plan", plan, "--kill", moment, "--term", "--every", "100")
        ended = self._live(place, *words)
        is_closed = moment.startswith(("end", "over"))  # then perhaps nobody waits for SIGTERM any more
        assert ended == 0 or (ended == -15 and is_closed), self.told(place)
        self._require_kill(place, 1, 0)
        if not (place / "facts").exists():
            assert self._live(place, *words) == 0, self.told(place)
        return json.loads((place / "facts").read_text()), self.told(place)

    def ranks_told_to_stop(
        self, number: int, plan: str, moment: str, of: int, *, is_end: bool | None = False
    ) -> list[dict[str, Any]]:
        """Facts of every rank of a second launch. In the first, rank `of` got SIGTERM at the moment, and nothing is saved by cadence.

        Args:
            number: of ranks.
            plan: of the story.
            moment: at which ranks get SIGTERM.
            of: the rank that gets it, or -1 for all.
            is_end: no step is left at the moment, so the first launch is the last one. None: so it may be.
        """
        place = self._directory()
        words = ("--term", "--every", "100")
        self._launch(place, number, plan, *words, "--kill", moment, "--of", str(of))
        self._require_kill(place, number, of)
        is_over = (place / "facts").exists()
        assert is_end in (None, is_over), "the training was over before the moment, or not at its end"
        if not is_over:
            self._launch(place, number, plan, *words)
        facts = self._facts(place, number)
        assert is_over or all(each["starts"][-1] > 0 for each in facts), "it began anew"
        return facts

    def _require_kill(self, place: Path, number: int, of: int) -> None:
        """A moment that a plan never comes to would prove nothing."""
        assert len(list(place.glob("facts.killed*"))) == (number if of == ALL else 1), "the moment never came"

    def _launch(
        self, place: Path, number: int, plan: str, *words: str, launch: Sequence[str] = (), plain: bool = False
    ) -> None:
        launch = launch or [*launching(number), "--max-restarts", "2"]
        command = [*launch, str(self.script), str(place / "root"), str(place / "facts"), "--plan", plan]
        command += ["--ranks", str(number), *words]
        variables = {**self.environment, **({"HOLDFAST_DISABLE": "1"} if plain else {})}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def _facts(self, place: Path, number: int) -> list[dict[str, Any]]:
        names = ["facts", *(f"facts.{rank}" for rank in range(1, number))]
        return [json.loads((place / name).read_text()) for name in names]

    def told(self, place: Path) -> str:
        """What the lives in this place printed."""
        return (place / "told").read_text() if (place / "told").exists() else ""

    def _directory(self) -> Path:
        self.count += 1
        place = self.place / str(self.count)
        place.mkdir()
        return place

    def _live(self, place: Path, *words: str, **environment: str) -> int:
        line = [[str(place / "root"), str(place / "facts"), *words], environment, str(place / "told")]
        self.server.stdin.write(json.dumps(line) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())


@contextmanager
def stories(script: Path, place: Path) -> Iterator[Stories]:
    """Stories of a script. Behind the last one every keeper has to end by itself.

    One thread each: with more, which Accelerate sets where OMP_NUM_THREADS is not, the first step of a process may differ at
    rounding size, of a cause that is not known. torchrun shares the store of its rendezvous with the workers, where a group that
    is made again finds the addresses of the one before; it has a store for each group where that is switched off.
    """
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"), "1")
    environment = {**os.environ, **SOURCE, **single, "HOLDFAST_RUNTIME_DIR": str(place / "runtime")}
    command = [sys.executable, "-W", "ignore", str(script), "--serve"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield Stories(script, place, server, environment)
    _require_end_of_keepers(place)


def _require_end_of_keepers(place: Path) -> None:
    """A keeper that waits for a rank that said goodbye is told with what it wrote, and ended."""
    _, left = psutil.wait_procs(keepers_under(place), timeout=KEEPER_END_S)
    told = [file.read_text(errors="replace")[-4000:] for file in place.glob("runtime/*/*/keeper.log")]
    for keeper in left:
        with suppress(psutil.NoSuchProcess):
            keeper.kill()
    assert not left, "\n".join(told)


def both_stop_behind_one_step(lives: Stories, plan: str, moment: str, step: int, of: int, *, more: str = "") -> None:
    """Of two ranks `of` gets SIGTERM at the moment; both stop behind one step, `step` or soon after, and end undisturbed."""
    killed = lives.ranks_told_to_stop(2, plan, moment, of)
    (start,) = {facts["starts"][0] for facts in killed}
    assert step <= start
    for facts, undisturbed in zip(killed, lives.ranks(2, plan), strict=True):
        same(facts, undisturbed, more=more)


def both_end_undisturbed_when_stopped(
    lives: Stories, plan: str, moment: str, step: int, of: int, *, is_end: bool, more: str = ""
) -> None:
    """Of two ranks `of` gets SIGTERM at the moment, behind which no step is left if `is_end`; else each goes on from `step` or later.

    A rank may be past the step that they agree on before it hears of it: then they agree anew, perhaps on the last one.
    """
    killed = lives.ranks_told_to_stop(2, plan, moment, of, is_end=is_end or None)
    for facts, undisturbed in zip(killed, lives.ranks(2, plan), strict=True):
        assert facts["starts"][0] == 0 or facts["starts"][0] >= step  # 0: the first launch came to the end
        same(facts, undisturbed, more=more)


def both_end_undisturbed_when_killed(lives: Stories, plan: str, moment: str, of: int, *, more: str = "") -> None:
    """Of two ranks `of` is killed at the moment; both go on from a version, and end undisturbed."""
    for facts, undisturbed in zip(lives.ranks(2, plan, moment, of), lives.ranks(2, plan), strict=True):
        assert facts["starts"][-1] > 0
        same(facts, undisturbed, more=more)


# Who of two ranks is struck, and with what.
WHOM = {"one killed": (1, False), "all killed": (ALL, False), "one stopped": (1, True), "all stopped": (ALL, True)}


def both_end_undisturbed_at_a_drawn_moment(
    lives: Stories, plan: str, whom: str, *, least: int = 2, more: str = ""
) -> None:
    """Two ranks are struck at a moment of this plan, drawn once for each of `WHOM` behind `least` steps; both end undisturbed."""
    of, is_stop = WHOM[whom]
    undisturbed = lives.ranks(2, plan)
    behind = [moment for moment in lives.moments(2, plan) if _step(moment) >= least]
    moment = random.Random(f"{plan}, {whom}").choice(behind)
    print("struck at", moment)  # told with a failure
    facts = lives.ranks_told_to_stop(2, plan, moment, of, is_end=None) if is_stop else lives.ranks(2, plan, moment, of)
    for each, whole in zip(facts, undisturbed, strict=True):
        if is_stop:
            assert each["starts"][-1] == 0 or each["starts"][-1] >= _step(moment)
            if _goes_on(each, whole, plan):
                return
        else:
            assert each["starts"][-1] > 0
        same(each, whole, more=more)


def ends_undisturbed_when_stopped(lives: Stories, plan: str, moment: str, *, more: str = "") -> None:
    """One rank gets SIGTERM at the moment, and nothing is saved by cadence; no step is lost, and it ends undisturbed."""
    facts, told = lives.stopped(plan, moment)
    undisturbed = lives.undisturbed(plan)
    start, soon = facts["starts"][-1], range(_step(moment), _step(moment) + 3)
    assert start in soon or (start == 0 and undisturbed["step"] in soon), (start, told)
    if not _goes_on(facts, undisturbed, plan):
        same(facts, undisturbed, more=more)


def _goes_on(facts: dict[str, Any], undisturbed: dict[str, Any], plan: str) -> bool:
    """Return whether this is a new launch of a run that had stopped early: it trains on, as the pages say."""
    return plan == "stops" and facts["starts"][-1] == undisturbed["step"] < facts["step"]


def _step(moment: str) -> int:
    return int(moment.partition(":")[2])
