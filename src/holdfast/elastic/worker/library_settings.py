"""Remembers how libraries that a process shares were set, and sets them so again: how numbers are rounded, checked, printed.

Used by `elastic.worker.script_sandbox`, in the main thread: contexts of `decimal` and of NumPy belong to a thread.
"""

from __future__ import annotations

import contextlib
import decimal
import locale
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch


def _of_numpy() -> dict[str, Any] | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    return {"err": numpy.geterr(), "call": numpy.geterrcall(), "print": numpy.get_printoptions()}


@dataclass(slots=True)
class LibrarySettings:
    """Remembers the settings of the moment in which it is made."""

    decimals: decimal.Context = field(default_factory=lambda: decimal.getcontext().copy())
    locales: str = field(default_factory=lambda: locale.setlocale(locale.LC_ALL))
    numpy: dict[str, Any] | None = field(default_factory=_of_numpy)

    def put_back(self) -> None:
        """Set all of it as it was; the time zone is that of the environment."""
        decimal.setcontext(self.decimals.copy())
        with contextlib.suppress(locale.Error):  # it was removed from the machine
            locale.setlocale(locale.LC_ALL, self.locales)
        time.tzset()
        torch.set_printoptions(profile="default")  # type: ignore[no-untyped-call]
        if self.numpy is not None:
            numpy: Any = sys.modules["numpy"]
            numpy.seterr(**self.numpy["err"])
            numpy.seterrcall(self.numpy["call"])
            numpy.set_printoptions(**self.numpy["print"])
