"""Says of a script why it is not kept, why it is not kept any more, or why a version of it is not taken: once, to who started the job.

All ranks are asked before anything is touched, and the first reason is told. A version that does not fit the loops that ask for
it is refused before anything of it is loaded: the script then runs as it was written.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from holdfast.adapters.zero_lines.changes import Changes
from holdfast.adapters.zero_lines.files_read_back import FileWatch
from holdfast.adapters.zero_lines.nested.texts_of_start import are_alike
from holdfast.adapters.zero_lines.proposed_lines import Proposer
from holdfast.base.errors import MismatchError, UsageError
from holdfast.base.events import Events
from holdfast.base.handler_errors import forgive
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.liveness import group_timeouts

# A rank that is later than this at the loop, behind the first one, has none: then no rank's is kept. So it is with the last step.
PATIENCE_S = 30.0
# What it means that a loop which trains is not kept, and what to do.
UNKEPT = (
    "it runs as under torchrun: nothing of it is saved, and a restart begins it anew; "
    "holdfast.Checkpointer in the script keeps it"
)


def ranks(events: Events) -> collectives.Ranks | None:
    """Returns the ranks of the job; None, and the reason told, if they cannot be asked."""
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "fake":
        reason = "its process group is torch's fake one, with nobody to ask"
    else:
        try:
            return collectives.ranks()
        except UsageError as error:
            reason = f"where its loop begins {error.what}"
    say(f"this script is not kept, {reason}; {UNKEPT}")
    events.emit("script_refused", reason=reason)
    return None


def patience() -> float:
    """Returns for how many seconds other ranks are waited for: a small part of what the script lets its collectives wait."""
    limit = group_timeouts.limit_of(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else None
    return PATIENCE_S if limit is None else min(PATIENCE_S, limit.total_seconds() / 4)


def have_all_come(group: collectives.Ranks, patience_s: float) -> bool:
    """Tell whether all ranks come to a loop that trains; the answer is the same on all.

    The store of the process group is asked. A collective would wait without a limit, or meet one of the script's own, where a rank
    has none to train: it stands in a barrier until another one has trained.
    """
    if group.world_size == 1 or not dist.is_initialized():
        return True
    store = dist.distributed_c10d.PrefixStore("holdfast/loop", dist.distributed_c10d._get_default_store())
    if store.add("come", 1) >= group.world_size:
        return store.compare_set("all", "", "yes") == b"yes"
    with forgive(RuntimeError):  # nobody has answered in time
        store.wait(["all"], timedelta(seconds=patience_s))
    return store.compare_set("all", "", "no") == b"yes"


def different(group: collectives.Ranks, line: int) -> int:
    """Returns the line of a loop that another rank comes to; that of this rank if all come to the same."""
    return next((each for each in collectives.gather_json(group, line) if each != line), line)


def collectives_made(before: Mapping[str, int]) -> dict[str, int]:
    """Returns how many collectives each process group of this rank has made, by its name; without those whose backend does not count.

    Args:
        before: what it had made at a point to which all ranks came. Some backends count what ranks send each other too, which is not
            alike on all: a script may have done that before it trains, and so does a restore.
    """
    made: dict[str, int] = {}
    if dist.is_available() and dist.is_initialized():
        group: Any
        for group, name in dist.distributed_c10d._world.pg_names.items():
            with forgive(RuntimeError):
                made[str(name)] = group._get_sequence_number_for_group() - before.get(str(name), 0)
    return made


def belongs(number: int, cut: Mapping[str, Any]) -> bool:
    """Tell whether what this rank saved as a step was saved at the same point of the job as what the first rank that asks has.

    A rank that leaves out a step of its optimizer counts steps otherwise than its peers. It is elsewhere then if it took part in
    other collectives too. Who is not is at the same point: a rank may accumulate more batches than others for each step.
    """
    if not dist.is_available() or not dist.is_initialized():
        return True
    store = dist.distributed_c10d.PrefixStore("holdfast/cut", dist.distributed_c10d._get_default_store())
    first = json.loads(store.compare_set(str(number), "", json.dumps(dict(cut))))
    mine, other = cut["collectives"], first["collectives"]
    return list(cut["turns"]) == first["turns"] or all(other.get(name, made) == made for name, made in mine.items())


def is_refused(group: collectives.Ranks, reason: str, events: Events, root: str) -> bool:
    """Tell whether any rank has a reason not to keep the script; says the first one."""
    told = collectives.gather_json(group, reason)
    reasons = [f"rank {rank}: {reason}" if len(told) > 1 else reason for rank, reason in enumerate(told) if reason]
    if reasons:
        events.emit("script_refused", reason=reasons[0])
        if group.rank == 0:
            say(f"this script is not kept, {reasons[0]}; {UNKEPT}")
            Proposer(root, say, events, reasons[0])
    return bool(reasons)


def is_foreign(group: collectives.Ranks, reason: str, root: str, events: Events) -> bool:
    """Tell whether any rank has a reason not to take a version that was found; says the first one."""
    reasons = [each for each in collectives.gather_json(group, reason) if each]
    if reasons:
        events.emit("script_refused", reason=reasons[0])
        if group.rank == 0:
            say(
                f"this script is not kept, {reasons[0]}; it runs as it is written, and nothing of it is saved. To begin "
                f"anew with it, give another --checkpoint-dir, or remove {root}"
            )
    return bool(reasons)


def differs(name: str) -> str:
    """Returns what is told of a value that a rehearsal did not make again; empty if there is none."""
    if not name:
        return ""
    return f"a rehearsal of a restart differs in {name!r}: some state that its steps depend on is in no version"


def unknown(changes: Changes, reason: str) -> str:
    """Returns why an object that nobody can look into is in the way where nothing is rehearsed."""
    (path, kind), *_ = changes.before.unknown
    return (
        f"nobody can be sure what {path!r}, a {kind}, keeps from one step to the next, and the first steps are not rehearsed: "
        f"{reason}"
    )


class Doubts(ABC):
    """Tells the person who started the job, once, what makes the versions of a run unsure.

    Args:
        began: numbers and texts that the loops read, as they were when they began; empty if the script reads no files.

    Attributes:
        refused: why a version was not taken.
        unsure: why no version of this run can be right any more; empty as long as nothing says so.
        unrehearsed: why its first steps are not rehearsed.
        alone: whether this rank is the job.
        who: number of this rank, and of all.
        events: told why no version can be right any more.
        files: watches which files the script opens; None if nobody does.
        spoiled: whether what was saved before is not right any more either.
        root: directory or URL of the checkpoints; empty: no lines are proposed.
        put_back: texts that hold the time of the start, and are again what they were in the run that saved.
    """

    holdfast_saves_gradients = True

    def __init__(self, group: collectives.Ranks, began: Mapping[str, str]) -> None:
        self._rank, self._began = group.rank, began
        self._noted: dict[str, Any] = {}
        self.refused = ""
        self.alone = group.world_size == 1
        self.who = [group.rank, group.world_size]
        self.events = Events()
        self.files: FileWatch | None = None
        self.spoiled = False
        self.root = ""
        self.put_back: list[str] = []
        self.unsure = self.unrehearsed = ""

    def doubt(self, reason: str) -> None:
        """Says a reason why no version of this run can be right any more, once; nothing if it is empty."""
        if reason and not self.unsure:
            self.unsure = reason
            self.events.emit("script_refused", reason=reason)
            who = "" if self.alone else f"rank {self._rank}: "
            say(f"{who}this script is not kept any more, {reason}; {UNKEPT}")
            if self._rank == 0 and self.root:
                Proposer(self.root, say, self.events, reason)

    def state_dict(self) -> dict[str, Any]:
        """Returns what was noted last."""
        return self._noted

    def holdfast_accepts(self, state: Any) -> None:
        """Looks at a version before anything of it is loaded.

        Raises:
            MismatchError: it is not of these loops, or cannot be right.
        """
        self.refused = self._why_not(state) if isinstance(state, dict) else ""
        if self.refused:
            raise MismatchError(self.refused, where=self._loop_name())

    @abstractmethod
    def _why_not(self, state: Mapping[str, Any]) -> str:
        """Returns why a version does not fit; empty if it does."""

    @abstractmethod
    def _loop_name(self) -> str: ...

    def _why_not_begun(self, state: Mapping[str, Any]) -> str:
        """Returns why a version does not fit where the loops begin; empty if it does."""
        self.put_back = []
        for path, token in state["began"].items():
            if self._began.get(path, token) == token:
                continue
            if self._is_of_start(path, state):
                self.put_back.append(path)
                continue
            of_start = are_alike(token, self._began[path]) and "'" in token.replace('"', "'")
            return (
                f"{path!r} was {token} when the loop began that was saved, and is {self._began[path]}: the script may "
                f"have gone on from a file of its own"
            ) + ("; if it is a name that the start gives it, have it come from an argument" if of_start else "")
        return ""

    @abstractmethod
    def _is_of_start(self, path: str, state: Mapping[str, Any]) -> bool:
        """Tell whether a text holds the time of the start, and a version has it as it was."""

    def judge_files(self) -> None:
        """Looks at what the script has read and written since the step before, behind a step."""
        if self.files is not None:
            reason, warning = self.files.step_made()
            self.spoiled = self.spoiled or bool(
                reason and not self.unsure
            )  # the file has gone on, and nothing brings it back
            self.doubt(reason)
            if warning and self._rank == 0:
                say(f"warning: {warning}")

    def rehearses(self, reason: str) -> None:
        """Says once why the first steps are not rehearsed; nothing if it is empty."""
        if reason and not self.unrehearsed:
            self.unrehearsed = reason
            if self._rank == 0:
                say(
                    f"warning: the first steps are not rehearsed, {reason}; state that holdfast cannot see would not be missed"
                )


def say(what: str) -> None:
    """Writes one line for the person who started the job."""
    sys.stderr.write(f"holdfast: {what}\n")
