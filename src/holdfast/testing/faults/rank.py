"""A rank of the matrix as a process of its own, so that it can be killed and stopped where it stands.

`RankProcess` is the driver's end: it says which step to save and where in it the rank is struck, and is told what came
of it, one line of JSON each. The other end is `main`: python -m holdfast.testing.faults.rank FD RIG, with the rig's
facts as JSON. It is a trainer of the rig (rig.Trainer) and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.base import program
from holdfast.base.errors import HoldfastError
from holdfast.core.model import Level, Version
from holdfast.testing.drill.shared import die_with
from holdfast.testing.faults.rig import Rig, Trainer

ANSWER_S = 1.0
START_S = 20.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class RankProcess:
    """A rank in a process of its own. `silent`: it did not answer, so it is not asked again before `wake`."""

    def __init__(self, rig: Rig, rank: int) -> None:
        self.rank = rank
        self._line, theirs = socket.socketpair()
        facts = {
            "base": str(rig.base), "num_nodes": len(rig.labels), "own_bytes": rig.own_bytes,
            "incarnation": rig.incarnation, "rank": rank,
        }  # fmt: skip
        command = program.command("holdfast.testing.faults.rank", str(theirs.fileno()), json.dumps(facts))
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        theirs.close()
        self._buffer = b""
        self.silent = False
        if self._answer(START_S) is None:
            raise AssertionError(f"the process of rank {rank} did not come up")

    def save(self, step: int, *, durable: bool, strike: str = "") -> None:
        """Saves the step, and is struck in it: `kill@copying`, `stop@idle` and the like."""
        self._ask({"step": step, "durable": durable, "strike": strike})

    def levels(self) -> dict[Version, tuple[frozenset[Level], bool]] | None:
        """Levels and whether it is abandoned, by version; None if it does not answer."""
        told = self._ask({"levels": True})
        if told is None:
            return None
        return {
            Version.parse(name) or Version(0, 0): (frozenset(Level(n) for n in reached), abandoned)
            for name, (reached, abandoned) in told.items()
        }

    def wake(self) -> None:
        """Lets it go on if it was stopped, and takes what it has to say."""
        if self._process.poll() is None and self.silent:
            self._process.send_signal(signal.SIGCONT)
            self.silent = self._answer(ANSWER_S) is None

    def close(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, what: dict[str, Any]) -> dict[str, Any] | None:
        if self.silent:
            return None
        try:
            self._line.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            self.silent = True
            return None
        answer = self._answer(ANSWER_S)
        self.silent = answer is None
        return answer

    def _answer(self, timeout_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._line.recv(1 << 16)
            except OSError:
                return None
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        return told


def main(arguments: Sequence[str]) -> int:
    """The rank; ends when its driver closes the line."""
    die_with(os.getppid())
    fd, facts = int(arguments[0]), json.loads(arguments[1])
    rig = Rig(Path(facts["base"]), num_nodes=facts["num_nodes"], own_bytes=facts["own_bytes"])
    rig.incarnation = facts["incarnation"]
    trainer = rig.trainer(facts["rank"])
    trainer.join(rig.assembly())
    trainer.client.resume(rig.incarnation, None)
    seen: set[Version] = set()
    with socket.socket(fileno=fd) as line, line.makefile("rwb") as lines:
        lines.write(b"{}\n")
        lines.flush()
        for request in lines:
            lines.write(json.dumps(_do(trainer, json.loads(request), seen)).encode() + b"\n")
            lines.flush()
    return 0


def _do(trainer: Trainer, what: dict[str, Any], seen: set[Version]) -> dict[str, Any]:
    if "levels" in what:
        known = {version: trainer.client.announced.known(version) for version in seen}
        return {str(v): (sorted(told.reached), told.abandoned) for v, told in known.items() if told is not None}
    step, strike = what["step"], what["strike"]
    seen.add(trainer.version(step))
    try:
        slot = trainer.begin(step, durable=what["durable"], timeout_s=0.5)
        spans = trainer.write(slot, step)
        if strike.endswith("@copying"):  # struck with half of it in the slot
            half, end = spans[0].offset + spans[0].length // 2, spans[-1].offset + spans[-1].length
            slot.view[half:end] = bytes(end - half)
            _strike(strike)
            trainer.write(slot, step)
        trainer.client.copied(trainer.version(step), spans)
        if strike:
            _strike(strike)
    except HoldfastError as error:
        return {"refused": error.what}
    return {"saved": step}


def _strike(strike: str) -> None:
    """Ends or stops this process; `idle` a moment after the save, when the keeper has done its part."""
    what, _, where = strike.partition("@")
    if where == "idle":
        time.sleep(0.3)  # the strike itself: a moment at which the rank does nothing
    os.kill(os.getpid(), SIGNALS[what])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
