"""The lock of a bucket by a clock of the test: a holder that beats is never taken for dead, however slow the store is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.errors import InUse
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.storage import bucket_lease
from holdfast.tiers.storage.bucket_lease import LEASE_S, LOCKS, LeaseLock
from tiers.samples import STAMP


class Place:
    """A directory whose answers take their time, beside a clock that stands still otherwise.

    Args:
        late: seconds by number of the read; an answer is made at once and delivered so much later.
        beats: whether the holder lives; it beats every three seconds.
    """

    def __init__(self, root: Path, late: dict[int, float], *, beats: bool = True) -> None:
        self._backend = LocalBackend(root)
        self._backend.prepare()
        self._late, self._beats, self._reads, self.now = late, beats, 0, 1000.0
        self._beat()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _beat(self) -> None:
        beat = int(self.now // 3) if self._beats else 0
        words = {"pid": 7, "machine": "elsewhere", "host": "away", "run_id": "holder", "key": "k", "beat": beat}
        self._backend.put(f"{LOCKS}/000001", [memoryview(json.dumps(words).encode())], stamp=STAMP)

    def read(self, name: str, *, length: int | None = None) -> bytes:
        data = self._backend.read(name, length=length)
        self._reads += 1
        self.sleep(self._late.get(self._reads, 0.0))
        return data

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if [name for name, _ in self._backend.listing(LOCKS)] == ["000001"]:
            self._beat()


@pytest.mark.parametrize("late", [{1: 60.0}, {2: LEASE_S + 1}, dict.fromkeys(range(1, 100), LEASE_S + 1)])
def test_a_late_answer_does_not_make_a_living_holder_dead(
    tmp_path: Path, late: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path / "root", late)
    monkeypatch.setattr(bucket_lease, "time", place)
    with pytest.raises(InUse, match="process 7 on away"):
        LeaseLock(place).take("challenger", timeout_s=1.0)


def test_a_holder_whose_beat_stands_still_is_dead_after_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path / "root", {1: 2.0}, beats=False)
    monkeypatch.setattr(bucket_lease, "time", place)
    lock = LeaseLock(place)
    lock.take("challenger", timeout_s=1.0)
    assert LEASE_S <= place.now - 1002.0 <= LEASE_S + 2
    lock.release()
