"""One process that feeds parsers, under limits; what it does can be seen from outside at every moment.

It prints a JSON line per finding, one every few seconds, and one at the end of each parser. The input that is being read
stands in the file `--now`, behind its number and length: a process that died or hangs has left it there.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import mmap
import random
import re
import resource
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from fuzz.mutate import MAX_INPUT_BYTES, drawn
from fuzz.parsers import PARSERS, Parser

LIMIT_S = 2.0
LIMIT_BYTES = 256 << 20
HEAD = struct.Struct("<QQ")
NOW_BYTES = HEAD.size + MAX_INPUT_BYTES
TELL_S = 5.0
MOST_KEPT = 400
MOST_KEPT_BYTES = 8 << 10
# The exit code of a child that has findings; of Python itself is 1.
FOUND = 3
_VARIABLE = re.compile(r"0x[0-9a-f]+|[0-9]+|'[^']*'|\"[^\"]*\"|\[.*|\$\S*")


def judged(parser: Parser, data: bytes) -> tuple[str, str]:
    """What a parser answers, as (kind of answer, what is wrong); nothing is wrong in most cases."""
    began = time.process_time()
    try:
        value = parser.read(data)
        spent_s = time.process_time() - began
        parser.check(data, value)
        size = len(value).bit_length() if hasattr(value, "__len__") else bool(value)
        answer = f"accepted {type(value).__name__} {size}"
    except parser.errors as error:
        spent_s = time.process_time() - began
        answer = f"{type(error).__name__} {_VARIABLE.sub('?', str(error))[:80]}"
    except BaseException as error:  # noqa: BLE001 - a finding, whatever it is
        told = "".join(traceback.format_exception(error)[-6:])[-1500:]
        return "wrong", f"{type(error).__name__}: {str(error)[:200]}\n{told}"
    if spent_s > LIMIT_S:
        return "wrong", f"{spent_s:.1f} s of processor time for {len(data)} bytes"
    return answer, ""


def inputs(parser: Parser, seed: int) -> Iterator[bytes]:
    """Endless inputs: the kept ones first, then changed ones. Send the kind of answer that each got."""
    pick = random.Random(f"{seed} {parser.name}")
    pool = parser.samples()
    known: set[str] = set()
    for data in list(pool):
        known.add((yield data))
    first = len(pool)
    while True:
        data = drawn(pick, pool, parser.form)
        answer = yield data
        if len(data) > MOST_KEPT_BYTES:
            continue
        if answer not in known and len(known) < MOST_KEPT:
            known.add(answer)
            pool.append(data)
        elif answer.startswith("accepted") and pick.random() < 0.02:
            if len(pool) < MOST_KEPT + first:
                pool.append(data)
            else:
                pool[pick.randrange(first, len(pool))] = data


def fuzz(parser: Parser, seed: int, *, seconds: float, cases: int, now: mmap.mmap) -> int:
    """Feeds one parser until the time is over, or the cases are; returns how many answers were wrong."""
    began = told = time.monotonic()
    source = inputs(parser, seed)
    data, number, wrong = next(source), 0, 0
    answers: dict[str, bytes] = {}
    while True:
        now[HEAD.size : HEAD.size + len(data)] = data
        now[: HEAD.size] = HEAD.pack(number, len(data))
        answer, what = judged(parser, data)
        if what:
            wrong += 1
            _tell(parser=parser.name, case=number, wrong=what, input=data.hex())
        elif answer not in answers or len(data) < len(answers[answer]):
            answers[answer] = data
        number += 1
        spent_s = time.monotonic() - began
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            _tell(parser=parser.name, cases=number, seconds=round(spent_s), answers=len(answers), found=wrong)
        if number >= cases or spent_s > seconds or wrong >= 20:
            break
        data = source.send(answer)
    kept = {answer: data.hex() for answer, data in answers.items() if len(data) <= 2048}
    _tell(parser=parser.name, over=True, cases=number, answers=len(answers), found=wrong, kept=kept)
    return wrong


def _tell(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def limit(num_bytes: int) -> None:
    """Lets this process have so much more memory than it has now, no core file, and few large files."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.child", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--cases", type=int, default=1 << 60)
    parser.add_argument("--now", required=True)
    parser.add_argument("parsers", nargs="+")
    given = parser.parse_args()
    logging.disable()
    faulthandler.enable()
    with open(given.now, "r+b") as file:
        now = mmap.mmap(file.fileno(), NOW_BYTES)
    for name in given.parsers:
        PARSERS[name].samples()  # all that is imported late is imported now
    limit(LIMIT_BYTES)
    wrong = 0
    for name in given.parsers:
        wrong += fuzz(PARSERS[name], given.seed, seconds=given.seconds, cases=given.cases, now=now)
    return FOUND if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
