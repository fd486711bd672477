"""`make fuzz`: each parser of foreign bytes for some seconds, with progress; what is found is kept as a file.

The same seed makes the same inputs. What was found can be read again: `python -m fuzz PARSER --read FILE`. Once mended, the
file belongs into tests/fuzz/corpus/PARSER, where every run reads it first; `--keep` puts one small input there for every
kind of answer that is not there yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fuzz.child import FOUND, HEAD, NOW_BYTES, judged
from fuzz.parsers import CORPUS, PARSERS

# An input that takes so long is a hang, even on a busy machine.
HANG_S = 60.0
MOST_FILES = 12


class Watched:
    """A child that feeds some parsers, and what it said.

    Attributes:
        findings: (parser, what is wrong, input).
        cases: how many inputs each parser read.
        kept: by parser, a small input per kind of answer.
    """

    def __init__(self, names: Sequence[str], *, seed: int, seconds: float, cases: int, quiet: bool = False) -> None:
        self.findings: list[tuple[str, str, bytes]] = []
        self.cases: dict[str, int] = {}
        self.kept: dict[str, dict[str, bytes]] = {}
        self._quiet = quiet
        with tempfile.NamedTemporaryFile(prefix="holdfast-fuzz-") as now:
            now.truncate(NOW_BYTES)
            command = [sys.executable, "-m", "fuzz.child", "--seed", str(seed), "--seconds", str(seconds)]
            command += ["--cases", str(cases), "--now", now.name, *names]
            with mmap.mmap(now.fileno(), NOW_BYTES) as page:
                self._run(command, page, names[0])

    def _run(self, command: list[str], page: mmap.mmap, at: str) -> None:
        here = Path(__file__).resolve().parent.parent
        with (
            tempfile.TemporaryFile("w+") as said,
            tempfile.TemporaryDirectory(prefix="holdfast-fuzz-", dir=_in_memory()) as home,
            subprocess.Popen(
                command, cwd=here, env={**os.environ, "TMPDIR": home}, stdout=subprocess.PIPE, stderr=said, text=True
            ) as child,
        ):
            watch = _Hang(child, page)
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    facts = json.loads(line)
                    at = facts["parser"]
                    self._take(facts)
                code = child.wait()
            finally:
                watch.end()
                child.kill()
            if code not in (0, FOUND):
                said.seek(0)
                what = f"no end of it after {HANG_S:.0f} s" if watch.hung else f"the process ended with {code}"
                self.findings.append((at, f"{what}\n{said.read()[-1500:]}", _current(page)))

    def _take(self, facts: dict[str, object]) -> None:
        name = str(facts["parser"])
        if "wrong" in facts:
            self.findings.append((name, str(facts["wrong"]), bytes.fromhex(str(facts["input"]))))
            return
        self.cases[name] = int(str(facts["cases"]))
        kept = facts.pop("kept", None)
        if isinstance(kept, dict):
            self.kept[name] = {answer: bytes.fromhex(data) for answer, data in kept.items()}
        if not self._quiet:
            print(json.dumps(facts), flush=True)


def _in_memory() -> str | None:
    """A place for small files that are written very often."""
    shared = "/dev/shm"
    return shared if os.access(shared, os.W_OK) else None


class _Hang:
    """Ends a child that reads one input for longer than HANG_S."""

    def __init__(self, child: subprocess.Popen[str], page: mmap.mmap) -> None:
        self.hung = False
        self._child, self._page = child, page
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fuzz watch")
        self._thread.start()

    def _watch(self) -> None:
        seen, since = b"", time.monotonic()
        while not self._over.wait(1.0):
            head = self._page[: HEAD.size]
            if head != seen:
                seen, since = head, time.monotonic()
            elif time.monotonic() - since > HANG_S and any(head):
                self.hung = True
                self._child.kill()
                return

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def _current(page: mmap.mmap) -> bytes:
    _, length = HEAD.unpack(page[: HEAD.size])
    return page[HEAD.size : HEAD.size + length]


def keep(found: dict[str, dict[str, bytes]]) -> int:
    """Adds inputs to the corpus that get an answer which none of its files gets; returns how many."""
    count = 0
    for name, answers in found.items():
        directory = CORPUS / name
        directory.mkdir(parents=True, exist_ok=True)
        known = {judged(PARSERS[name], data)[0] for data in PARSERS[name].samples()}
        for answer, data in sorted(answers.items()):
            if answer not in known and len(list(directory.iterdir())) < MOST_FILES:
                (directory / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
                count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each parser")
    parser.add_argument("--cases", type=int, default=1 << 60, help="for each parser")
    parser.add_argument("--seed", type=int, default=None, help="inputs follow from it; drawn, and told, by default")
    parser.add_argument("--keep", action="store_true", help="add to the corpus what gets an answer of a new kind")
    parser.add_argument("--read", metavar="FILE", help="let one parser read this file, and say what it answers")
    parser.add_argument("parsers", nargs="*", help=f"all of: {' '.join(PARSERS)}")
    given = parser.parse_args()
    names = given.parsers or list(PARSERS)
    if given.read:
        answer, wrong = judged(PARSERS[names[0]], Path(given.read).read_bytes())
        print(wrong or answer)
        return 1 if wrong else 0
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    failed = 0
    for name in names:
        seen = Watched([name], seed=seed, seconds=given.seconds, cases=given.cases)
        if given.keep:
            print(f"{name}: {keep(seen.kept)} inputs added to the corpus", flush=True)
        failed += len(seen.findings)
        for _, wrong, data in seen.findings:
            file = Path(tempfile.gettempdir()) / f"fuzz-{name}-{hashlib.sha256(data).hexdigest()[:12]}"
            file.write_bytes(data)
            print(f"WRONG {name} {file}\n{wrong}", flush=True)
    print(f"{len(names)} parsers, {failed} findings, seed {seed}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
