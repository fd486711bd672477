"""The ranks of one life of the matrix, whatever process they are: they save, and tell which levels they heard of."""

from __future__ import annotations

import contextlib

from holdfast.base.errors import HoldfastError
from holdfast.core.model import Level, Version
from holdfast.testing.faults.rank import RankProcess
from holdfast.testing.faults.rig import Trainer


class Here:
    """A rank in this process."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.rank = trainer.rank

    def save(self, step: int, *, durable: bool, strike: str = "", salt: int = 0) -> None:
        """Saves as well as it can; what goes wrong is told by the levels."""
        del strike
        trainer = self.trainer
        with contextlib.suppress(HoldfastError):
            slot = trainer.begin(step, durable=durable, timeout_s=0.5)
            trainer.client.copied(trainer.version(step), trainer.write(slot, step, salt))

    def standing(self, version: Version) -> tuple[frozenset[Level], bool] | None:
        """Levels that it heard of, and whether the version is abandoned; None if it or its keeper is gone."""
        known = self.trainer.client.announced.known(version)
        if known is None:
            return (frozenset(), False) if self.trainer.client.alive else None
        settled = known.abandoned or Level.DURABLE in known.reached
        return (known.reached, known.abandoned) if settled or self.trainer.client.alive else None

    def told(self, version: Version) -> frozenset[Level]:
        """Levels that were named to it, whoever lives by now."""
        known = self.trainer.client.announced.known(version)
        return known.reached if known else frozenset()

    def wake(self) -> None:
        """It goes on, if it was stopped."""

    def close(self) -> None:
        self.trainer.client.close()


class Apart:
    """A rank in a process of its own."""

    def __init__(self, process: RankProcess) -> None:
        self.process = process
        self.rank = process.rank
        self._heard: dict[Version, tuple[frozenset[Level], bool]] = {}

    def save(self, step: int, *, durable: bool, strike: str = "", salt: int = 0) -> None:
        """Saves, and is struck in it; see RankProcess."""
        del salt
        self.process.save(step, durable=durable, strike=strike)

    def standing(self, version: Version) -> tuple[frozenset[Level], bool] | None:
        """Levels that it heard of, and whether the version is abandoned; None if it or its keeper is gone."""
        levels = self.process.levels()
        if levels is None:
            return None
        self._heard |= levels
        return self._heard.get(version, (frozenset(), False))

    def told(self, version: Version) -> frozenset[Level]:
        """Levels that were named to it, as far as it could say so."""
        return self._heard.get(version, (frozenset(), False))[0]

    def wake(self) -> None:
        """It goes on, if it was stopped."""
        self.process.wake()

    def close(self) -> None:
        self.process.close()


Rank = Here | Apart
