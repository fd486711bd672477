"""SIGTERM, or a file, as a wish: finish the step, save, leave with exit code 0.

The handler only sets a flag; the next `step` acts on it. A forked child (a data loader's worker) inherits the handler,
but not the wish: there the signal does what it did before. Only the main thread may install handlers; elsewhere the
launcher's signal keeps its effect.

Of several in a process, the newest hears the signal, and passes it on. The others act on it at their second look, so that where all
are asked in turn the newest ends the script.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` passes over a ValueError, which may be another handler's
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.base.handler_errors import pass_on
from holdfast.tiers.format.strict_json import parse_loose

# Any of these keys with a true value in the stop file; the second is that of another framework's jobs.
STOP_KEYS = ("stop", "GracefulExit")
MAX_FILE_BYTES = 64 << 10


class StopSignal:
    """Tells whether SIGTERM arrived in this process since `install`, or the stop file asks for the same.

    Args:
        file: JSON, an object with `"stop": true`; looked at when `wanted` is asked. Empty for none.
    """

    def __init__(self, file: str = "") -> None:
        self.arrived = False
        self._passed_on = False  # a newer one has it, and may end the script
        self._file = Path(file) if file else None
        self._owner = os.getpid()
        self._before: Any = None
        self._installed = self._is_over = False

    @property
    def wanted(self) -> bool:
        """Return whether the job is to stop."""
        arrived = self.arrived
        self.arrived = arrived or self._passed_on
        return arrived or (self._file is not None and self._asks(self._file))

    def _asks(self, file: Path) -> bool:
        """A file that is half written, or says something else, asks for nothing."""
        try:
            with file.open("rb") as stream:
                said = parse_loose(stream.read(MAX_FILE_BYTES))
        except (OSError, ValueError) as error:
            pass_on(error)
            return False
        return isinstance(said, dict) and any(said.get(key) in (True, 1) for key in STOP_KEYS)

    def install(self) -> None:
        """Takes over SIGTERM, once."""
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._before = _signal.signal(signal.SIGTERM, self._handle)
        self._installed = True

    def remove(self) -> None:
        """Gives SIGTERM back to whoever had it; if that was nobody, and it has arrived, another one is ignored.

        A scheduler may tell every process of a job, and so may a launcher: the second must not kill a rank on its way out.
        A handler that the script has set meanwhile stays. In another thread than the main one ours stays too, and hears nothing any more.
        """
        self._is_over = True
        if self._installed and threading.current_thread() is threading.main_thread():
            before = self._before if self._before is not None else _signal.SIG_DFL
            if (self.arrived or self._passed_on) and before == signal.SIG_DFL:
                # Ignored, not handled: the interpreter's end gives handlers up and would leave the default.
                before = _signal.SIG_IGN
            newer = _owner_of(_signal.getsignal(signal.SIGTERM))
            if newer is self:
                _signal.signal(signal.SIGTERM, before)
            while newer is not None and newer is not self:
                if _owner_of(newer._before) is self:
                    newer._before = before
                newer = _owner_of(newer._before)
            self._installed = False  # at the end: what a handler raises in between leaves the rest to the next call

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_on_its_way_out = self.arrived and self._before == signal.SIG_DFL
        if os.getpid() == self._owner and (not self._is_over or is_on_its_way_out):
            self.arrived = True
            older = _owner_of(self._before)
            while older is not None:
                older._passed_on = True
                older = _owner_of(older._before)
        elif callable(self._before):
            self._before(number, frame)
        elif self._before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _owner_of(handler: Any) -> StopSignal | None:
    """Return whose handler it is, if it is one of ours."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopSignal) else None
