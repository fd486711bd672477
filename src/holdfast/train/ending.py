"""How one save ends: the keeper is told that the bytes are complete, or the version is given up, exactly once.

Between the call and the fence lies the proof of decision 7. Tensors that are still watched were copied at once, so the
version is right whatever the comparison says; a difference only costs them their trust. Tensors that were copied late
under `verify_capture` have a digest from the call; if their copy differs the version is wrong and is given up.

Called in the copying thread (`copied`) and in the trainer's thread at the fence (`at_fence`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.base.errors import KeeperLost
from holdfast.node.client import ImageSpan, KeeperClient
from holdfast.train.handle import SaveHandle
from holdfast.train.trust import Trust, differing, digest


@dataclass(frozen=True, slots=True)
class Watched:
    """A piece that was copied at once; to be compared with the live tensor at the fence."""

    name: str
    live: torch.Tensor
    copy: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pledged:
    """A piece that is copied late, with its digest at the call."""

    name: str
    digest: int
    copy: torch.Tensor


@dataclass(frozen=True, slots=True)
class Ending:
    """What is left to do for one version.

    Attributes:
        give_up: called with the handle and the reason if the version cannot be completed.
    """

    handle: SaveHandle
    client: KeeperClient
    images: tuple[ImageSpan, ...]
    trust: Trust
    watched: Sequence[Watched]
    pledged: Sequence[Pledged]
    give_up: Callable[[SaveHandle, str], None]

    @property
    def needs_fence(self) -> bool:
        """Whether there is something to compare."""
        return bool(self.watched or self.pledged)

    def copied(self, reason: str) -> None:
        """The last byte was copied, or none will be any more, for `reason`. Does not raise."""
        if reason:
            self.give_up(self.handle, reason)
        elif not self.pledged:
            self._tell()

    def at_fence(self, stepping: bool) -> None:
        """All bytes are copied; nothing may have changed since the call. Only a fence before a step counts as proof."""
        changed = differing([(piece.name, piece.live, piece.copy) for piece in self.watched])
        unchanged = {piece.name for piece in self.watched} - changed if stepping else set()
        wrong = {piece.name for piece in self.pledged if digest(piece.copy) != piece.digest}
        self.trust.judge(unchanged, changed | wrong)
        if wrong:
            self.give_up(self.handle, f"changed between the save and the step: {', '.join(sorted(wrong))}")
        elif self.pledged:
            self._tell()

    def _tell(self) -> None:
        try:
            self.client.copied(self.handle.version, self.images)
        except KeeperLost as error:
            self.give_up(self.handle, f"the keeper is lost: {error.what}")
