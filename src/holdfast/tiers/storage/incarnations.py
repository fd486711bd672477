"""Tells who owns a root, which incarnations it has seen, and whose temporary files are dead.

A root belongs to one job for ever. An incarnation is registered by creating its file once, which fences every lower
one; what it resumed from is recorded once, before training goes on. These few small files are all that decides which
versions are dead lineage. Beside them stands which wish of an operator (`--from-version`) was fulfilled, so that it is once.
`Storage.incarnations` is the front of all this.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Annotated, Literal

import msgspec

from holdfast.base.errors import CorruptError, Fenced, ForeignDirectory, NewerFormat, StorageError, VersionNotFound
from holdfast.core.model import Version
from holdfast.tiers.backends.interface import TEMPORARY, Backend, Settling
from holdfast.tiers.format.strict_json import MAX_RECORD_BYTES, Record, decode_record, encode_record
from holdfast.tiers.memory.processes import has_ended, machine_id

logger = logging.getLogger(__name__)

JOB_FILE = "holdfast.json"
INCARNATIONS = "incarnations"
# What a directory may hold before it is ours: a fresh file system's own, and our own half-made start.
NOT_FOREIGN = frozenset({"lost+found/", f"{TEMPORARY}/"})

_STAMP = re.compile(r"i(\d{6,10})-t\d{6,10}-h([0-9a-f]{12})-p(\d{1,10})(?:\.[0-9a-f]+)?\Z")
_REGISTERED = re.compile(r"(\d{6,10})\.json\Z")
_RESUMED = re.compile(r"(\d{6,10})\.resumed\.json\Z")
_WISHED = re.compile(r"(\d{6,10})\.wished\.json\Z")

NOTHING: Mapping[int, Version | None] = {}

# The id of a place that versions are copied to begins with so many digits of the id of their job, which has no more.
KIN_DIGITS = 16

MAX_INCARNATION = 10**10 - 1
_Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_INCARNATION)]


class _Job(Record, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["holdfast"] = "holdfast"
    job_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16,64}$")]


class _Incarnation(Record, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["holdfast-incarnation"] = "holdfast-incarnation"
    incarnation: _Number


class _Resumed(Record, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["holdfast-resumed"] = "holdfast-resumed"
    incarnation: _Number
    resumed_from: str | None


class _Wished(Record, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["holdfast-wished"] = "holdfast-wished"
    incarnation: _Number
    version: str | None


def read_job(backend: Backend) -> str:
    """The id of the job that owns the root.

    Raises:
        VersionNotFound: nothing is there.
        ForeignDirectory: files are there, and none of them is ours.
        CorruptError: the job's record is damaged.
    """
    root = backend.properties.where
    try:
        data = backend.read(JOB_FILE, length=MAX_RECORD_BYTES + 1)
    except VersionNotFound:
        names = {name for name, _ in backend.listing("")} - NOT_FOREIGN
        if names and JOB_FILE not in names:
            what = f"the directory holds files that are not holdfast's ({', '.join(sorted(names)[:3])})"
            remedy = "choose an empty or a new directory"
            if f"{INCARNATIONS}/" in names:
                remedy = (
                    f"{JOB_FILE} is missing beside versions: put it back from a copy of this directory; else {remedy}"
                )
            raise ForeignDirectory(what, where=root, remedy=remedy) from None
        remedy = "check the path and that it is mounted"
        raise VersionNotFound("there are no checkpoints", where=root, remedy=remedy) from None
    try:
        return decode_record(data, _Job, f"{root}/{JOB_FILE}").job_id
    except NewerFormat:
        raise
    except CorruptError as error:  # no version can be looked at without it
        remedy = f"put {JOB_FILE} back from a copy of this directory; else choose an empty or a new one"
        raise CorruptError(error.what, where=error.where, remedy=remedy) from None


def are_kin(one: str, other: str) -> bool:
    """Return whether two ids are of a job and of a place that it is copied to, or of two such places."""
    return one[:KIN_DIGITS] == other[:KIN_DIGITS]


def claim_job(backend: Backend, *, kin: str = "") -> str:
    """The id of the job that owns the root, which is a new one if the root is empty. Any number may race.

    Args:
        backend: where the root lies.
        kin: the id of the job whose versions are copied to a new root; empty for a job that begins there.

    Raises:
        ForeignDirectory: someone else's files are there.
        CorruptError: the job's record is damaged.
    """
    try:
        return read_job(backend)
    except VersionNotFound:
        backend.prepare()
    try:
        backend.create(
            JOB_FILE, encode_record(_Job(job_id=kin[:KIN_DIGITS] + secrets.token_hex(8))), stamp=make_stamp(0)
        )
    except Fenced:
        logger.debug("another process made %s first", JOB_FILE)
    return read_job(backend)


class Incarnations:
    """The incarnations that were registered under one root, and what they resumed from."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._settled = 0  # the incarnation for which what is recorded was made durable here

    def register(self, *, above: int = 0) -> int:
        """Takes the next free incarnation. From then on everything of a lower one is dead.

        Args:
            above: the highest that somebody has seen which may not be registered; see `enlist`.

        Raises:
            StorageError: the highest number there can be is taken; a still higher one would fence nobody.
        """
        number = max(self.highest(), above) + 1
        while True:
            if number > MAX_INCARNATION:
                raise StorageError(
                    f"incarnation {MAX_INCARNATION} is taken, and there is no higher one",
                    where=f"{self._backend.properties.where}/{INCARNATIONS}",
                    remedy="somebody wrote that number by hand: remove its record or version, or take a new directory",
                )
            data = encode_record(_Incarnation(incarnation=number))
            try:
                if self._backend.create(f"{INCARNATIONS}/{number:06d}.json", data, stamp=make_stamp(number)):
                    return number
            except Fenced:
                logger.warning("the registration of incarnation %d is damaged; the next one is taken", number)
            number += 1  # someone else has it

    def highest(self) -> int:
        """Returns the highest incarnation that was ever registered, or that made a version which is there; 0 if none was.

        Whoever copied the versions without the records would else begin below them, and go back to them at every restart.
        """
        matches = (_REGISTERED.match(name) for name, _ in self._backend.listing(INCARNATIONS))
        made = (Version.parse(name.rstrip("/")) for name, _ in self._backend.listing(""))
        numbers = [
            *(int(match[1]) for match in matches if match),
            *(one.incarnation for one in made if one is not None),
        ]
        return max(numbers, default=0)

    def enlist(self, incarnation: int, resumed: Version | None, before: Mapping[int, Version | None] = NOTHING) -> int:
        """Makes up for what could not be written when an incarnation began: its number, and what it resumed from.

        So too for those `before` it of which the caller knows what they resumed from: one that made nothing durable here may
        stand between this one and its ancestors. Their records come first, so that the chain is never cut for a reader.

        Returns:
            the highest incarnation that is registered; nothing is written for one that is lower.

        Raises:
            Fenced: something else is recorded.
        """
        names = {name for name, _ in self._backend.listing(INCARNATIONS)}
        newest = max((int(match[1]) for match in map(_REGISTERED.match, names) if match), default=0)
        if newest > incarnation:
            return newest
        if newest < incarnation:
            data = encode_record(_Incarnation(incarnation=incarnation))
            self._backend.create(f"{INCARNATIONS}/{incarnation:06d}.json", data, stamp=make_stamp(incarnation))
        self._record_before(incarnation, before, names)
        if f"{incarnation:06d}.resumed.json" not in names:
            self.record_resumed(incarnation, resumed)
        if self._settled != incarnation and isinstance(self._backend, Settling):
            self._backend.settle(
                INCARNATIONS
            )  # whoever recorded what was found may have been killed before it was durable
        self._settled = incarnation
        return incarnation

    def _record_before(self, incarnation: int, before: Mapping[int, Version | None], names: Collection[str]) -> None:
        """Records what is missing of the incarnations before this one; `names` are those of the records that are there."""
        for number, version in sorted(before.items()):
            if number < incarnation and f"{number:06d}.resumed.json" not in names:
                self.record_resumed(number, version)

    def record_resumed(
        self, incarnation: int, version: Version | None, before: Mapping[int, Version | None] = NOTHING
    ) -> None:
        """Records what an incarnation started from, once, and what is missing of those `before` it.

        Raises:
            Fenced: something else is recorded.
        """
        if before:
            self._record_before(incarnation, before, {name for name, _ in self._backend.listing(INCARNATIONS)})
        record = _Resumed(incarnation=incarnation, resumed_from=str(version) if version else None)
        name = f"{INCARNATIONS}/{incarnation:06d}.resumed.json"
        self._backend.create(name, encode_record(record), stamp=make_stamp(incarnation))

    def lineage(self) -> dict[int, Version | None]:
        """Incarnation -> what it resumed from, for those that got so far as to record it.

        Raises:
            CorruptError: a record is damaged. To go on without it could bring dead lineage back.
        """
        found: dict[int, Version | None] = {}
        for name, _ in self._backend.listing(INCARNATIONS):
            if match := _RESUMED.match(name):
                where = f"{self._backend.properties.where}/{INCARNATIONS}/{name}"
                data = self._backend.read(f"{INCARNATIONS}/{name}", length=MAX_RECORD_BYTES + 1)
                record = decode_record(data, _Resumed, where)
                version = Version.parse(record.resumed_from or "")
                if record.incarnation != int(match[1]) or (version is None and record.resumed_from is not None):
                    raise CorruptError("the record is not what its name says", where=where)
                found[record.incarnation] = version
        return found

    def record_wished(self, incarnation: int, version: Version | None) -> None:
        """Records that an incarnation goes back to `version` by wish of the operator; None: it began without a wish.

        It counts once what the incarnation resumed from is recorded.
        """
        record = _Wished(incarnation=incarnation, version=str(version) if version else None)
        self._backend.create(
            f"{INCARNATIONS}/{incarnation:06d}.wished.json", encode_record(record), stamp=make_stamp(incarnation)
        )

    def fulfilled(self) -> tuple[int, Version] | None:
        """Returns the incarnation that fulfilled the last wish, and that wish; None: there was none, or a start without one since.

        Raises:
            CorruptError: the record is damaged. To go on without it could go back a second time.
        """
        names = {name for name, _ in self._backend.listing(INCARNATIONS)}
        numbers = (int(match[1]) for match in map(_WISHED.match, names) if match)
        done = max((number for number in numbers if f"{number:06d}.resumed.json" in names), default=0)
        if not done:
            return None
        name = f"{INCARNATIONS}/{done:06d}.wished.json"
        where = f"{self._backend.properties.where}/{name}"
        record = decode_record(self._backend.read(name, length=MAX_RECORD_BYTES + 1), _Wished, where)
        version = Version.parse(record.version or "")
        if record.incarnation != done or (version is None and record.version is not None):
            raise CorruptError("the record is not what its name says", where=where)
        return None if version is None else (done, version)

    def sweep(self, incarnation: int) -> list[str]:
        """Removes temporary files of dead writers: of incarnations below the one that runs, and of processes of this machine
        that are known to have ended. What is not named like ours stays.

        Returns:
            the names that were removed.
        """
        if not self._backend.properties.has_temporaries:
            return []
        dead = [name for name, _ in self._backend.listing(TEMPORARY) if is_dead(name, incarnation)]
        self._backend.delete(*(f"{TEMPORARY}/{name}" for name in dead))
        return dead


def make_stamp(incarnation: int, term: int = 0) -> str:
    """The mark of this process on its temporary files: incarnation, term, machine, process."""
    return f"i{incarnation:06d}-t{term:06d}-h{machine_id()}-p{os.getpid()}"


def is_dead(stamp: str, incarnation: int) -> bool:
    """Returns whether the process that a stamp names is known to be gone, or is of an incarnation below the one that runs.

    What is no stamp of ours is not dead.
    """
    match = _STAMP.match(stamp)
    # Incarnation 0 is a start that has no number yet, so its number says nothing about its age.
    return match is not None and (
        0 < int(match[1]) < incarnation or (match[2] == machine_id() and has_ended(int(match[3])))
    )
