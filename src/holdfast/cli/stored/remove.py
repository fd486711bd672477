"""`holdfast rm`: removes versions as retention does, the commit first, so that no reader meets half of one.

For what retention leaves alone for good: versions of runs that a fresh start ended. What a restart would go on from is
refused, and so is what is pinned, or held by a process that copies it. A restart goes on from the newest version that is
whole, so versions of the living run are read from the newest down until one is: to be committed is not enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.base.errors import HoldfastError, InUse, UsageError
from holdfast.base.events import Events
from holdfast.cli import console
from holdfast.cli.stored.versions import NOT_PROVED, examine, not_durable, parse
from holdfast.core.model import Version
from holdfast.core.versions.lineage import Lineage
from holdfast.tiers.storage.version_store import Storage, open_storage

AGAIN = "look with `holdfast ls`, then remove again"


def remove(root: str, names: Sequence[str], *, abandoned: bool, as_json: bool) -> int:
    """Removes these versions, and with `abandoned` all of runs that a fresh start ended; returns the exit code.

    Raises:
        UsageError: nothing is named, a restart would go on from one that is, or it is not known which runs ended.
        VersionNotFound: one is not there.
    """
    storage = open_storage(root, Events())
    storage.job_id()
    began = storage.incarnations.highest()

    def permit() -> None:
        if storage.incarnations.highest() > began:
            raise InUse(
                "a restart began meanwhile, which may go on from any version", where=storage.where, remedy=AGAIN
            )

    storage.marks.break_holds(began)
    chosen = _chosen(storage, names, abandoned=abandoned)
    faults: dict[Version, HoldfastError] = {}
    for version in chosen:
        try:
            storage.retire(version, permit=permit)
        except HoldfastError as error:
            faults[version] = error
    gone = [version for version in chosen if version not in faults]
    if as_json:
        problems = [{"version": str(v), "error": console.error_document(fault)} for v, fault in faults.items()]
        console.print_json({"root": storage.where, "removed": [str(version) for version in gone], "problems": problems})
    else:
        for version in gone:
            console.say(f"{version}: removed")
        for version, fault in faults.items():
            console.say(f"{version}: not removed\n{console.error_text(fault)}")
        if not chosen:
            console.say("nothing to remove")
    return console.PROBLEM if faults else console.GOOD


def _chosen(storage: Storage, names: Sequence[str], *, abandoned: bool) -> list[Version]:
    if not names and not abandoned:
        raise UsageError("no version is named", remedy="name one, as `holdfast ls` shows it, or give --abandoned")
    there = storage.versions()
    lineage = Lineage(storage.incarnations.lineage())
    lines = lineage.lines(there)
    living = lines[-1]
    chosen = {parse(name) for name in names}
    if missing := sorted(chosen - set(there)):
        raise not_durable(storage, missing[0])
    for version in _needed(storage, living.versions) if chosen & set(living.versions) else ():
        if version in chosen:
            raise UsageError(
                f"a restart would go on from {version}",
                where=storage.where,
                remedy='go back first: restore(version=".."), or `holdfast run --from-version`; then retention removes it',
            )
    if abandoned:
        if lineage.cut is not None:
            raise UsageError(
                f"nothing is recorded of incarnation {lineage.cut}, so it is not known which runs a fresh start ended",
                where=storage.where,
                remedy="name the versions that shall go",
            )
        ended = {version for line in lines if line.first != living.first for version in line.versions}
        chosen |= ended - set(living.versions) - storage.marks.pins() - set(storage.marks.held())
    return sorted(chosen)


def _needed(storage: Storage, versions: Sequence[Version]) -> list[Version]:
    """Returns the newest of these versions that is whole, and newer ones that a restart would wait for.

    One that is damaged is not needed, unless all are: then the newest stays, for its bundles may have copies in memory.
    """
    needed: list[Version] = []
    for version in sorted(versions, reverse=True):
        verdict = examine(storage, version)
        if verdict.state not in {"damaged", NOT_PROVED}:
            needed.append(version)
        if verdict.state == "good" and storage.is_durable(version):
            return needed
    return needed or list(versions[-1:])
