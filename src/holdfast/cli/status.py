"""`holdfast status`: what the keepers of this machine say about themselves.

Finds every keeper beneath the runtime directory, asks each as a viewer (who may only look), and shows the answers. A
socket at which nobody answers is a problem: the keeper died, or hangs. No keeper at all is not.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.base import private
from holdfast.base.config import load
from holdfast.base.errors import HoldfastError
from holdfast.base.progress_report import progress_text
from holdfast.cli import console
from holdfast.keeper.observe import degraded_notice
from holdfast.keeper.observe.degraded_notice import DegradedNotice
from holdfast.keeper.observe.metrics import render
from holdfast.keeper.rpc.paths import RuntimePaths
from holdfast.keeper.rpc.viewer import KeeperViewer
from holdfast.keeper.slots.slot_pool import PARITY_RANK

ASK_TIMEOUT_S = 2.0
# Erases the screen and goes to its top (ECMA-48, 8.3.39 and 8.3.21).
CLEAR = "\x1b[2J\x1b[H"


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds what one keeper said, or why it did not."""

    place: RuntimePaths
    facts: dict[str, Any]
    error: HoldfastError | None = None


def status(*, runtime_dir: str | None, watch_s: float | None, as_json: bool, prometheus: bool = False) -> int:
    """Shows all keepers, once or every `watch_s` seconds until interrupted; the exit code."""
    try:
        while True:
            answers = [_ask(place) for place in places(runtime_dir)]
            notices = list(degraded_notice.posted(runtime_path(runtime_dir)))
            if prometheus:
                console.say(render([answer.facts for answer in answers if answer.error is None]), end="")
            elif as_json:
                documents = [_document(answer) for answer in answers]
                console.print_json({"keepers": documents, "durable_only": [_noticed(told) for told in notices]})
            else:
                _print_answers(answers, notices, clear=watch_s is not None)
            if watch_s is None:
                return console.PROBLEM if any(answer.error for answer in answers) else console.GOOD
            sys.stdout.flush()  # who reads it through a pipe sees each look when it was made
            time.sleep(watch_s)
    except KeyboardInterrupt:
        return console.GOOD


def runtime_path(runtime_dir: str | None) -> Path:
    """Return where keepers live, under the settings in force.

    Raises:
        ConfigError: it is not ours alone; what lies there is not believed.
    """
    path = load({"runtime_dir": runtime_dir}).runtime_path.absolute()
    with suppress(FileNotFoundError):  # nothing ran here
        private.prove(path)
    return path


def places(runtime_dir: str | None) -> Iterator[RuntimePaths]:
    """Every place beneath the runtime directory that has a socket."""
    runtime = runtime_path(runtime_dir)
    for socket in sorted(runtime.glob("*/*/s")):
        yield RuntimePaths(runtime, socket.parent.parent.name, socket.parent.name)


def _ask(place: RuntimePaths) -> Answer:
    try:
        viewer = KeeperViewer.connect(place.socket, job=place.job, timeout_s=ASK_TIMEOUT_S)
        with contextlib.closing(viewer):
            return Answer(place, viewer.status(timeout_s=ASK_TIMEOUT_S))
    except HoldfastError as error:
        return Answer(place, {}, error)


def _document(answer: Answer) -> dict[str, Any]:
    document: dict[str, Any] = {"job": answer.place.job, "node": answer.place.node, "socket": str(answer.place.socket)}
    if answer.error is not None:
        return document | {"alive": False, "error": console.error_document(answer.error)}
    return document | {"alive": True, "status": answer.facts}


def _noticed(told: DegradedNotice) -> dict[str, Any]:
    facts = {"job": told.place.job, "node": told.place.node, "pid": told.pid, "root": told.root}
    return facts | {"reason": told.reason, "durable": told.durable or None}


def _print_answers(answers: list[Answer], notices: list[DegradedNotice], *, clear: bool) -> None:
    if clear:
        sys.stdout.write(CLEAR)
    for told in notices:
        console.say(
            f"DURABLE-ONLY  node {told.place.node}, job {told.place.job}, process {told.pid}: no level in memory"
        )
        console.say(f"  root      {told.root}\n  safe      durable {told.durable or 'none'}\n  why       {told.reason}")
    if not answers and not notices:
        console.say("no keeper runs here")
    for answer in answers:
        console.say(f"keeper of node {answer.place.node}, job {answer.place.job}")
        if answer.error is not None:
            console.say(console.error_text(answer.error))
        else:
            for line in _lines(answer.facts):
                console.say(f"  {line}")


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield what a person wants to know; `--json` has everything. Field list: docs/spec/keeper.md."""
    memory, newest = facts["memory"], facts["newest"]
    yield f"process   {facts['pid']}, up {facts['uptime_s']:.0f} s, {console.size_text(facts['resident_bytes'])} resident"
    yield f"memory    {console.size_text(memory['used_bytes'])} of {console.size_text(memory['allowed_bytes'])} allowed"
    if early := facts["preloaded"]["version"]:
        sizes = ", ".join(f"{console.size_text(n)} from {source}" for source, n in facts["preloaded"]["bytes"].items())
        yield f"preloaded {early}: {sizes or 'nothing'} ({facts['preloaded']['reason']})"
    if not facts["root"]:
        yield "waits     for the ranks to come together"
        return
    yield f"root      {facts['root']}"
    resumed = facts["resumed_from"] or "nothing, or not yet"
    yield f"job       incarnation {facts['incarnation']} on {len(facts['nodes'])} nodes, resumed from {resumed}"
    # What this keeper heard itself: one that replaced another does not know what that one made durable.
    yield "safe      " + ", ".join(f"{level} {version or 'none since it began'}" for level, version in newest.items())
    yield from _trailing(facts)
    if run := facts["run"]:
        back = sum(run["recovery_s"].values())
        yield f"goodput   {100 * run['goodput']:.1f} % of {run['wall_s']:.0f} s, {run['incidents']} incidents ({back:.1f} s to come back)"
        yield f"watchdog  {run.get('watchdog') or 'not told'}"
        yield from (f"watchdog  {reason}" for reason in run.get("reports", ()))
    for reason in sorted({found["cadence"] for found in facts["ranks"].values()} - {""}):
        yield f"cadence   {reason}"
    backed = sorted({slot["rank"] for slot in facts["replicas"]} - {PARITY_RANK})
    if backed:
        yield f"backup    of rank{'s' if len(backed) > 1 else ''} {', '.join(map(str, backed))}"
    for rank, found in facts["ranks"].items():
        yield from _rank(rank, found)
    for slot in facts["replicas"]:
        of = f"of {facts['parity']['members'] - 1} nodes" if slot["rank"] == PARITY_RANK else f"of rank {slot['rank']}"
        yield f"{'parity ' if slot['rank'] == PARITY_RANK else 'replica'}   {of}: {_slot(slot)}"
    for work in facts["activities"]:
        whose = "" if work["rank"] < 0 else f" for rank {work['rank']}"
        how_far = progress_text(work["done_bytes"], work["total_bytes"], work["seconds"])
        yield f"{work['what']:<9} {work['version']}{whose}: {how_far}"
    for version, reason in facts["suspects"].items():
        yield f"SUSPECT   {version}: {reason}"
    for alarm in facts["alarms"]:
        yield f"ALARM     {alarm['text']} ({alarm['age_s']:.0f} s ago)"


def _rank(rank: str, found: dict[str, Any]) -> Iterator[str]:
    state = "finished" if found["finished"] else f"process {found['pid']}" if found["pid"] else "away"
    yield f"rank {rank:<4} {state}; " + "; ".join(map(_slot, found["slots"]))
    if waits := found["waits"]:
        yield f"          waits: {waits['reason']}"
    if back := found["restored"]:
        sizes = ", ".join(f"{console.size_text(size)} from {source}" for source, size in back["bytes"].items())
        yield f"          came back from {back['version']}: {sizes}"


def _trailing(facts: dict[str, Any]) -> Iterator[str]:
    """Yield what is behind, and what others had to do; nothing where all is as it should be."""
    replication, takeovers = facts["replication"], facts["counters"].get("takeovers", 0)
    if len(facts["nodes"]) > 1 and (count := replication["behind_versions"]):
        yield f"lag       {count} captured and not in two nodes yet, the oldest for {replication['lag_s']:.1f} s"
    if takeovers:
        yield f"takeovers {takeovers:.0f}: this node wrote what others should have written"


def _slot(slot: dict[str, Any]) -> str:
    held = f"{slot['version']} {slot['state']}" if slot["version"] else slot["state"]
    return (
        f"slot {slot['slot']} {held}, {console.size_text(slot['sealed_bytes'])} of {console.size_text(slot['bytes'])}"
    )
