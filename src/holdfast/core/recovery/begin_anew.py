"""Decides whether a job may begin anew although it saved versions: only where all of them were in memory alone, and lost.

A node that is lost before anything is durable takes with it what had no second copy. Nobody can bring that back, so an
error would only end the job a few restarts later. But wherever a version may be found again, or be had by a repair, the
error stays: what storage holds, what is damaged or was refused, what a keeper may hold that does not answer. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.core.model import Decision, Level, Version
from holdfast.core.recovery.version_choice import Facts


def may_begin_anew(
    facts: Facts, levels: Mapping[Version, Level], *, in_storage: bool, silent: bool, condemned: Collection[Version]
) -> Decision[bool]:
    """Return whether to begin anew, with what is lost, or why not. Called where no version can be chosen.

    Args:
        facts: what is known.
        levels: of versions, as far as a keeper knows.
        in_storage: storage holds a version, be it damaged or unread.
        silent: a keeper of the job did not answer.
        condemned: versions of which a keeper took a copy out of use.
    """
    if not facts.memory:
        return Decision(False, "no version is known")
    if in_storage:
        return Decision(False, "storage holds versions")
    if silent or facts.unreachable.keepers:
        return Decision(False, "a keeper does not answer")
    if facts.quarantine.copies or facts.quarantine.versions or facts.suspects or condemned:
        return Decision(False, "copies were refused")
    if facts.unreachable.copies or facts.unreachable.manifests:
        return Decision(False, "copies could not be reached")
    if facts.lineage.cut is not None:
        return Decision(False, f"nothing is recorded of incarnation {facts.lineage.cut}")
    durable = [version for version, level in levels.items() if level >= Level.DURABLE]
    if durable:
        return Decision(False, f"{max(durable)} was durable, and storage does not hold it")
    digests: dict[tuple[Version, str], str] = {}
    for copy in facts.memory:
        name = copy.version, copy.seal.bundle_id
        if digests.setdefault(name, copy.seal.digest) != copy.seal.digest:
            return Decision(False, f"copies of bundle {name[1]} of {name[0]} differ")
    newest = max(copy.version for copy in facts.memory)
    return Decision(True, f"all versions up to {newest} were in memory alone, and no node that is here has the rest")
