"""Tells how one save ends: the keeper is told that the bytes are complete, or the version is given up, exactly once.

Before the keeper is told, late copies are checked against what was seen at the call (`checkpoint.capture.late_copy_check`), and under
`verify_capture` against a digest of everything; a version that is not the state at the call is given up.

Tensors that are still watched were copied at once, so the version is right whatever the comparison at the fence says; a
difference only costs them their trust. That is so as well of a live tensor that changed after the copy was complete.

Called in the copying thread (`copied`) and in the thread that steps or saves next (`at_fence`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.base.errors import KeeperLost
from holdfast.base.handler_errors import pass_on
from holdfast.base.terminal import some_of
from holdfast.checkpoint.capture.copy_plan import SlotView
from holdfast.checkpoint.capture.late_copy_check import CopyCheck, DeviceCheck
from holdfast.checkpoint.capture.mutation_check import MutationHistory, differing, digest
from holdfast.checkpoint.capture.unchanged_images import Look
from holdfast.checkpoint.save.save_handle import SaveHandle
from holdfast.keeper.rpc.client import KeeperClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImmediatePiece:
    """A piece that was copied at once; to be compared with the live tensor at the fence."""

    name: str
    live: torch.Tensor
    copy: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatePiece:
    """A piece that is copied late, with its digest at the call."""

    name: str
    digest: int
    copy: torch.Tensor


@dataclass(frozen=True, slots=True)
class SaveCompletion:
    """Holds what is left to do for one version.

    Attributes:
        check: what late parts in host memory were at the call; None if nothing was copied late.
        on_devices: the same of those on devices, which a step need not wait for.
        spots: of what ranks of this node share, for the keeper to compare.
        unchanged: what was not copied; None if nothing was looked at.
        give_up: called with the handle and the reason if the version cannot be completed.
    """

    handle: SaveHandle
    client: KeeperClient
    view: SlotView
    trust: MutationHistory
    give_up: Callable[[SaveHandle, str], None]
    watched: Sequence[ImmediatePiece] = ()
    pledged: Sequence[LatePiece] = ()
    check: CopyCheck | None = None
    on_devices: DeviceCheck | None = None
    spots: bytes = b""
    unchanged: Look | None = None

    @property
    def needs_fence(self) -> bool:
        """Return whether there is something to compare before the next step."""
        return bool(self.watched or self.check is not None)

    def copied(self, reason: str) -> None:
        """The last byte was copied, or none will be any more, for `reason`. Raises only what a signal's handler raises."""
        if not reason:
            reason = self._wrong()
        if reason:
            self.give_up(self.handle, reason)
            return
        kept = self.unchanged.kept if self.unchanged is not None else ()
        try:
            self.client.copied(self.handle.version, self.view.plan.spans, self.spots, kept=kept)
        except KeeperLost as error:
            pass_on(error)
            self.give_up(self.handle, f"the keeper is lost: {error.what}")
            return
        if self.unchanged is not None:
            try:
                self.unchanged.note(self.view, self.client, self.handle.version)
            except Exception as error:  # noqa: BLE001 - the version stands; the next one is copied whole
                pass_on(error)
                logger.info("%s: what lies in the slot is not remembered: %s", self.handle.version, error)

    def at_fence(self, stepping: bool) -> None:
        """Nothing may have changed since the call. Only a fence before a step counts as proof."""
        try:
            changed = differing([(piece.name, piece.live, piece.copy) for piece in self.watched])
            looks = self.check is not None and (self.check.looks or not stepping)
            moved = self.check.moved() if self.check is not None and looks else set()
        except Exception as error:  # noqa: BLE001 - whatever it is (no memory on a device, say), the step is the user's
            pass_on(error)
            logger.info("%s: live tensors were not compared with their copies: %s", self.handle.version, error)
            return
        unchanged = {piece.name for piece in self.watched} - changed if stepping else set()
        self.trust.judge(unchanged, changed | moved)

    def _wrong(self) -> str:
        """Return why the copy is not the state at the call; empty if it is."""
        try:
            wrong = {piece.name for piece in self.pledged if digest(piece.copy) != piece.digest}
            if self.check is not None:
                wrong |= self.check.torn(self.view)
            if self.on_devices is not None:
                wrong |= self.on_devices.torn(self.view)
        except Exception as error:
            pass_on(error)
            logger.exception("the late copy of %s was not checked", self.handle.version)
            return f"the late copy was not checked: {type(error).__name__}: {error}"
        self.trust.judge((), wrong)
        return f"written while it was copied: {some_of(sorted(wrong))}" if wrong else ""
