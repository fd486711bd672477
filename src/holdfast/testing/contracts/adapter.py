"""Lists what every door for a framework must do, as checks that any door can be put through.

A door is a training script that uses holdfast through one framework, and how it is started. The script knows nothing of
the checks; it trains, and prints one line per step with a digest of its state (`adapter_output.py` prints them, and a script
that must not import holdfast can print them itself):

    door {"rank": 0, "start": 3}                       once, before the first step: the step it goes on with
    door {"rank": 0, "step": 3, "digest": "9f..."}     after every step, when it is finished and reported to holdfast
    door {"rank": 0, "whole": "4c...", "at": 3}        where other layouts are promised: digest of the whole tensors,
                                                       before the first step (at = start) and after the last (at = steps)

`violations(door, workshop)` runs all checks and returns what was found, by the name of the check; with pytest,
parametrize over CHECKS and give all of them one Workshop, which keeps the undisturbed run that the others are compared
with. Processes, kills and files are real. That the suite finds faults is itself tested, with a planted one for each check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.base.errors import HoldfastError
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.testing.contracts.adapter_processes import Task, Told, Violation, Workshop
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.version_store import open_storage

__all__ = ["CHECKS", "Door", "Task", "Violation", "Workshop", "violations"]

# What is put over one byte of a file.
FLIP = 0xFF


@dataclass(frozen=True, slots=True)
class Door:
    """One way into holdfast.

    Attributes:
        start: the command line of a task. `task.plain`: under plain torchrun (or none), the same script; the suite sets
            HOLDFAST_DISABLE=1. `task.changed`: the script builds a model that the checkpoint does not fit.
        ranks: how many ranks the script is started with.
        steps: steps of a whole run; at least 6.
        twins: ranks that hold the same parameters: 2 for DDP of two ranks, 1 for what is only sharded.
        other_ranks: number of ranks that go on with what `ranks` saved; 0 where the framework cannot.
        behind: most finished steps that a kill of all processes may lose.
        resumes: whether a run that was killed is bit-equal to an undisturbed one; False leaves only the steps compared.
        refuses: a pattern that the output of a run with another model must hold.
        root: where the versions are, from the directory that the script was given.
        environment: variables for every run.
    """

    start: Callable[[Task], Sequence[str]]
    ranks: int = 2
    steps: int = 8
    twins: int = 1
    other_ranks: int = 0
    behind: int = 1
    refuses: str = "MismatchError|does not fit"
    root: Callable[[Path], Path] = lambda path: path
    environment: Mapping[str, str] = field(default_factory=dict)


Check = Callable[[Door, Workshop], None]


def violations(door: Door, workshop: Workshop) -> dict[str, str]:
    """Name of the check -> what went wrong, for every check that failed."""
    found: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            check(door, workshop)
        except (Violation, HoldfastError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def the_same_script_runs_without_holdfast(door: Door, workshop: Workshop) -> None:
    """Plain launcher and HOLDFAST_DISABLE=1: it trains from the start to the end, and holdfast leaves nothing."""
    task = Task(workshop.directory("plain"), door.ranks, door.steps, plain=True)
    told = _reference(door, workshop, task)
    _require(set(told.starts.values()) == {0}, f"it did not start at step 0: {told.starts}")
    _require(
        sorted(told.steps) == [(rank, step) for rank in range(door.ranks) for step in range(door.steps)],
        f"steps are missing: {sorted(told.steps)}",
    )
    left = sorted(path.name for path in door.root(task.checkpoints).rglob("*manifest*"))
    _require(not left, f"holdfast was switched off and left {left}")


def holdfast_changes_no_number(door: Door, workshop: Workshop) -> None:
    """An undisturbed run with holdfast makes the same steps, bit for bit."""
    told = workshop.run(door, Task(workshop.directory("undisturbed"), door.ranks, door.steps))
    _same_steps(told, _reference(door, workshop), door)
    _require(bool(_versions(door, workshop.directory("undisturbed"))), "the last step of a whole run is not durable")


def killed_in_the_middle_it_goes_on_bit_for_bit(door: Door, workshop: Workshop) -> None:
    """SIGKILL to launcher and ranks; the keepers live, and what they hold is not lost."""
    task = Task(workshop.directory("killed"), door.ranks, door.steps)
    struck = door.steps // 2
    before = workshop.run(door, task, kill_at=struck)
    _same_steps(before, _reference(door, workshop), door, whole=False)
    after = workshop.run(door, task)
    _same_steps(after, _reference(door, workshop), door)
    start = _start(after)
    _require(
        struck + 1 - door.behind <= start,
        f"killed when step {struck} was finished, it went on with step {start}; at most {door.behind} may be lost",
    )


def with_all_memory_lost_it_goes_on_from_storage(door: Door, workshop: Workshop) -> None:
    """A run that ended in good order, then new keepers: everything comes from files, bit for bit."""
    half = door.steps // 2
    root = workshop.directory("storage")
    workshop.run(door, Task(root, door.ranks, half))
    workshop.forget_memory()
    after = workshop.run(door, Task(root, door.ranks, door.steps))
    _require(_start(after) == half, f"after {half} steps it went on with step {_start(after)}")
    _same_steps(after, _reference(door, workshop), door)


def twins_are_known(door: Door, workshop: Workshop) -> None:
    """Check that what several ranks hold alike is stored once and listed for all of them."""
    root = workshop.directory("undisturbed")
    if not _versions(door, root):
        workshop.run(door, Task(root, door.ranks, door.steps))
    manifest = _newest(door, root)
    names = [bundle.file for bundle in manifest.bundles]
    _require(len(names) == len(set(names)), "a file is listed twice")
    by_group: dict[int, int] = {}
    for bundle in manifest.bundles:
        by_group[len(bundle.ref.ranks)] = by_group.get(len(bundle.ref.ranks), 0) + bundle.length
    most = max(by_group, key=lambda size: by_group[size])
    _require(most == door.twins, f"bytes by number of ranks that hold them: {by_group}; most should be at {door.twins}")


def another_number_of_ranks_goes_on(door: Door, workshop: Workshop) -> None:
    """The whole tensors are the same after the change of layout, and training goes on. Where the framework can."""
    if not door.other_ranks:
        return
    half = door.steps // 2
    root = workshop.directory("layouts")
    before = workshop.run(door, Task(root, door.ranks, half))
    after = workshop.run(door, Task(root, door.other_ranks, door.steps))
    _require(_start(after) == half, f"after {half} steps {door.other_ranks} ranks went on with step {_start(after)}")
    _require(half in before.wholes, "the script told no digest of whole tensors")
    _require(
        after.wholes.get(half) == before.wholes[half],
        f"whole tensors: {before.wholes[half]} were saved, {after.wholes.get(half)} were loaded",
    )
    _require(
        sorted(after.steps) == [(rank, step) for rank in range(door.other_ranks) for step in range(half, door.steps)],
        "it did not go on to the end",
    )


def another_model_is_refused_and_harms_nothing(door: Door, workshop: Workshop) -> None:
    """An error that says so, no step made, and the right model still finds its state."""
    half = door.steps // 2
    root = workshop.directory("refused")
    workshop.run(door, Task(root, door.ranks, half))
    there = _versions(door, root)
    wrong = workshop.run(door, Task(root, door.ranks, door.steps, changed=True), fails=True)
    _require(wrong.code != 0, "a model that does not fit was accepted")
    _require(not wrong.steps, f"a model that does not fit was trained: {sorted(wrong.steps)}")
    _require(
        re.search(door.refuses, wrong.output) is not None, f"nothing says {door.refuses!r}: {wrong.output[-2000:]}"
    )
    _require(set(there) <= set(_versions(door, root)), "versions are gone after a refused restore")
    _same_steps(workshop.run(door, Task(root, door.ranks, door.steps)), _reference(door, workshop), door)


def a_damaged_version_is_never_trained_with(door: Door, workshop: Workshop) -> None:
    """One byte of the newest version is wrong and memory is lost: an older version, or an error; never that byte."""
    half = door.steps // 2
    root = workshop.directory("damaged")
    workshop.run(door, Task(root, door.ranks, half - 1))
    workshop.run(door, Task(root, door.ranks, half))
    workshop.forget_memory()
    manifest = _newest(door, root)
    largest = max(manifest.bundles, key=lambda bundle: bundle.length)
    file = door.root(root) / str(manifest.version) / largest.file
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= FLIP
    file.write_bytes(data)
    after = workshop.run(door, Task(root, door.ranks, door.steps), fails=True)
    if after.code == 0:
        _require(_start(after) < half, "the damaged version was loaded")
        _same_steps(after, _reference(door, workshop), door)
    else:
        _require(not after.steps, "it trained although it failed to load")


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        the_same_script_runs_without_holdfast,
        holdfast_changes_no_number,
        killed_in_the_middle_it_goes_on_bit_for_bit,
        with_all_memory_lost_it_goes_on_from_storage,
        twins_are_known,
        another_number_of_ranks_goes_on,
        another_model_is_refused_and_harms_nothing,
        a_damaged_version_is_never_trained_with,
    )
}


def _reference(door: Door, workshop: Workshop, task: Task | None = None) -> Told:
    """The run without holdfast, made once per workshop."""
    if workshop.reference is None:
        task = task or Task(workshop.directory("plain"), door.ranks, door.steps, plain=True)
        workshop.reference = workshop.run(door, task)
    return workshop.reference


def _same_steps(told: Told, reference: Told, door: Door, *, whole: bool = True) -> None:
    """Every step that was made is that of the undisturbed run; `whole`: and none is missing until the end."""
    for place, digest in sorted(told.steps.items()):
        _require(
            reference.steps.get(place) == digest,
            f"rank {place[0]} step {place[1]}: {digest}, undisturbed {reference.steps.get(place)}",
        )
    if whole:
        wanted = [(rank, step) for rank in range(door.ranks) for step in range(_start(told), door.steps)]
        _require(sorted(told.steps) == wanted, f"steps from {_start(told)} on are missing: {sorted(told.steps)}")


def _start(told: Told) -> int:
    starts = set(told.starts.values())
    _require(len(starts) == 1, f"ranks started at different steps, or told none: {told.starts}\n{told.output[-2000:]}")
    return starts.pop()


def _versions(door: Door, root: Path) -> list[Version]:
    return open_storage(door.root(root), Events()).versions() if door.root(root).is_dir() else []


def _newest(door: Door, root: Path) -> Manifest:
    versions = _versions(door, root)
    _require(bool(versions), f"there is no version in {door.root(root)}")
    return open_storage(door.root(root), Events()).manifest(max(versions))


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)
