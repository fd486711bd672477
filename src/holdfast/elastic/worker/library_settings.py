"""Remembers how libraries that a process shares were set, and sets them so again: how numbers are rounded, checked, printed.

Used in the main thread: contexts of `decimal` and of NumPy belong to a thread.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import gc
import locale
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# How a switch is read, and how it is set.
_Switch = tuple[Callable[[], Any], Callable[[Any], object]]


def _attribute(owner: Any, name: str) -> _Switch:
    return functools.partial(getattr, owner, name, None), functools.partial(setattr, owner, name)


_backends: Any = torch.backends
_sparse: Any = torch.sparse.check_sparse_tensor_invariants
_SWITCHES: tuple[_Switch, ...] = (
    (sys.getswitchinterval, sys.setswitchinterval),
    (gc.get_threshold, lambda found: gc.set_threshold(*found)),
    (threading.stack_size, threading.stack_size),
    (sys.getdlopenflags, sys.setdlopenflags),
    _attribute(sys, "dont_write_bytecode"),
    # Late releases of Python 3.10 have it, earlier ones have not.
    *([(sys.get_int_max_str_digits, sys.set_int_max_str_digits)] if hasattr(sys, "get_int_max_str_digits") else []),
    (lambda: torch.get_autocast_dtype("cpu"), lambda found: torch.set_autocast_dtype("cpu", found)),
    # Nobody tells whether small numbers are taken for zero, but half of the smallest normal one does.
    (lambda: not sys.float_info.min * 0.5, torch.set_flush_denormal),
    _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    _attribute(_backends.opt_einsum, "enabled"),
    (_backends.cuda.flash_sdp_enabled, _backends.cuda.enable_flash_sdp),
    (_backends.cuda.mem_efficient_sdp_enabled, _backends.cuda.enable_mem_efficient_sdp),
    (_backends.cuda.math_sdp_enabled, _backends.cuda.enable_math_sdp),
    (_backends.cuda.cudnn_sdp_enabled, _backends.cuda.enable_cudnn_sdp),
    (_sparse.is_enabled, lambda found: _sparse.enable() if found else _sparse.disable()),
    *(
        (getattr(torch.__future__, f"get_{name}"), getattr(torch.__future__, f"set_{name}"))
        for name in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion")
    ),
    _attribute(torch.distributions.Distribution, "_validate_args"),
    _attribute(torch.hub, "_hub_dir"),
)


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
    switches: list[Any] = field(default_factory=lambda: [read() for read, _ in _SWITCHES])

    def put_back(self) -> None:
        """Set all of it as it was; the time zone is that of the environment."""
        decimal.setcontext(self.decimals.copy())
        with contextlib.suppress(locale.Error):  # it was removed from the machine
            locale.setlocale(locale.LC_ALL, self.locales)
        time.tzset()
        torch.set_printoptions(profile="default")  # type: ignore[no-untyped-call]
        for (read, write), found in zip(_SWITCHES, self.switches, strict=True):
            if read() != found:
                write(found)
        events: Any = sys.modules.get("asyncio.events")
        if hasattr(
            events, "_event_loop_policy"
        ):  # a loop that was closed would be found, and none is made in its place
            events._event_loop_policy = None
        if self.numpy is not None:
            numpy: Any = sys.modules["numpy"]
            numpy.seterr(**self.numpy["err"])
            numpy.seterrcall(self.numpy["call"])
            numpy.set_printoptions(**self.numpy["print"])
