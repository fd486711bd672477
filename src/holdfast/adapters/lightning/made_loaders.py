"""Has the loaders of a loop made again with the random numbers that they were made with.

A hook that makes a loader may draw what is in it: `torch.randn` in `train_dataloader`, a `random_split` without a generator. A restart
calls the hook again at another time, and the run would go on with other data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.checkpoint.entries.rng import ProcessRandomness


class MadeLoaders:
    """The random numbers of the process when the newest loaders of one loop were made, as an object with a state.

    Args:
        loop: Lightning's, of the training or of the validation.
        is_due: whether its loaders are to be made anew in this epoch anyway.

    Attributes:
        were_due: whether the newest were, so that those of the run before are gone in an undisturbed run too.
    """

    def __init__(self, loop: Any, is_due: Callable[[], bool]) -> None:
        self._loop, self._is_due = loop, is_due
        self.were_due = False
        self._random: dict[str, Any] = {}  # nothing was made while we looked
        self._saved: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random numbers; empty if it is not known."""
        return self._saved or self._random

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The first loaders are made so."""
        self._saved = state

    def set_up(self, set_up: Callable[[], None]) -> None:
        """Around the loop's `setup_data`, which may make loaders. Behind loaders that are made again nothing has been drawn for them."""
        combined, now = self._loop._combined_loader, ProcessRandomness().state_dict()
        is_due = self._is_due()
        again = self._saved if combined is None and not is_due else {}
        if again:
            ProcessRandomness().load_state_dict(again)
        set_up()
        if again:
            ProcessRandomness().load_state_dict(now)
        if self._loop._combined_loader is not combined:
            self._random, self._saved, self.were_due = again or now, {}, is_due
