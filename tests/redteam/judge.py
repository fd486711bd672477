"""Runs the two lives of a case and says what is wrong with them; nothing is wrong if the list is empty."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import forked
import holdfast
from holdfast.base.errors import HoldfastError
from holdfast.base.events import Events
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.version_store import open_storage
from redteam.case import Case

HERE = Path(__file__).resolve().parent.parent
# A life that takes longer waits for ever.
LIFE_S = 60.0
# How long ranks go on after one of them died.
OTHERS_S = 3.0
# Keepers end when nobody has come for their time to linger.
END_S = 12.0
# Exit codes of a first life, by fault; None: any.
ENDS: dict[str, tuple[int, ...]] = {"kill": (-9,), "term": (0, -15), "interrupt": (1, -2, 130), "exception": (1,)}


def wrongs(case: Case, *, plant: str = "") -> list[str]:
    """What a case shows to be wrong."""
    root = Path(tempfile.mkdtemp(prefix="rt-"))
    try:
        return _wrongs(case, root, plant)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _wrongs(case: Case, root: Path, plant: str) -> list[str]:
    (root / "case.json").write_text(json.dumps(dataclasses.asdict(case)))
    (root / "r").mkdir(mode=0o700)
    (root / "key").write_text(secrets.token_hex(32))
    (root / "key").chmod(0o600)
    found: list[str] = []
    codes = _life(1, case, root, plant, found)
    allowed = (*ENDS.get(case.fault, (0,)), *((0,) if case.moment == "in the call" and case.fault != "kill" else ()))
    expected = codes if case.victims == "all" else codes[:1]
    if not found and not set(expected) <= {*allowed, *((-9,) if set(codes) & set(allowed) - {0} else ())}:
        found.append(f"the first life ended with {codes}: {_last_words(root, 1)}")
    codes = _life(2, case, root, plant, found)
    if not found and any(codes):
        found.append(f"the second life ended with {codes}: {_last_words(root, 2)}")
    if not found:
        found += _judged(case, root)
        found += _verified(case, root)
    found += _left_behind(root)
    return found


def _life(life: int, case: Case, root: Path, plant: str, found: list[str]) -> list[int]:
    """Runs all ranks of a life; where one dies the others are ended, as a launcher does."""
    env = {
        **os.environ, "REDTEAM_ROOT": str(root), "REDTEAM_PLANT": plant, "WORLD_SIZE": str(case.world),
        "LOCAL_WORLD_SIZE": str(case.world), "PYTHONPATH": f"{HERE}{os.pathsep}{HERE / 'kit' / 'slow_disk'}",
        "HELD": str(root / "held"), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    ranks = []
    for rank in range(case.world):
        log = (root / f"log-{life}-{rank}").open("w")
        mine = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            forked.Popen([sys.executable, "-m", "redteam.script", str(life)], env=mine, stdout=log, stderr=log)
        )
        log.close()
    deadline, failed = time.monotonic() + LIFE_S, False
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if not failed and any(rank.poll() for rank in ranks):  # the others may wait for it, until a launcher ends them
            deadline, failed = min(deadline, time.monotonic() + OTHERS_S), True
        time.sleep(0.02)
    if not failed and any(rank.poll() is None for rank in ranks):
        found.append(f"life {life} waited for ever: {_last_words(root, life)}")
    for rank in ranks:
        rank.kill()
        rank.wait(30)
    return [rank.returncode or 0 for rank in ranks]


def _lines(root: Path, life: int, rank: int) -> list[dict[str, Any]]:
    path = root / f"oracle-{life}-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _judged(case: Case, root: Path) -> list[str]:
    found: list[str] = []
    came_back = set()
    for rank in range(case.world):
        notes, then = _lines(root, 1, rank), _lines(root, 2, rank)
        restored = next(line for line in then if "restored" in line)
        version = restored["restored"]
        came_back.add(version)
        states = {line["saved"]: line["state"] for line in notes if "saved" in line}
        if version:
            if version not in states:
                found.append(f"rank {rank} came back to {version}, which was never saved")
                continue
            was = states[version]
            differ = [key for key in {**was, **restored["state"]} if was.get(key) != restored["state"].get(key)]
            if differ:
                found.append(f"rank {rank}: {version} is not the state at its call: {differ[:6]}")
        kept = ("durable",) if case.fault == "keeper killed" else ("durable", "captured", "replicated")
        acked = {line["acked"] for line in notes if line.get("level") in kept}
        lost = [name for name in acked if name > version]
        if lost:
            found.append(f"rank {rank}: {max(lost)} was announced, and {version or 'nothing'} was found")
    if len(came_back) > 1:
        found.append(f"ranks came back to different versions: {sorted(came_back)}")
    return found


def _verified(case: Case, root: Path) -> list[str]:
    config = holdfast.Config(encryption_key=str(root / "key") if case.encrypted else "")
    storage = open_storage(str(root / "job"), Events(), encryption=KeySource.of(config))
    found = []
    for version in storage.versions():
        try:
            for bundle in storage.manifest(version).bundles:
                storage.bundles.verify(version, bundle)
        except HoldfastError as error:
            found.append(f"{version} is durable and cannot be read: {error}")
    if not storage.versions():
        found.append("nothing is durable after a close")
    return found


def _left_behind(root: Path) -> list[str]:
    """Processes of the case that did not end."""
    for process in _processes(root / "job.second"):  # nobody takes that one up: its keeper lingers, as it should
        process.kill()
    deadline = time.monotonic() + END_S
    while (left := _processes(root)) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended just now
            found.append(f"left behind: {' '.join(process.cmdline())[:120]}")
            process.kill()
    return found


def _processes(root: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and str(root) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _last_words(root: Path, life: int) -> str:
    said = [line for log in sorted(root.glob(f"log-{life}-*")) for line in log.read_text().splitlines() if line.strip()]
    return " | ".join(said[-3:])[-600:]
