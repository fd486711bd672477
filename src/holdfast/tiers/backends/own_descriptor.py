"""A descriptor of ours, recognised before each use: a script may close it, and open a file of its own under its number.

Libraries that make daemons close all descriptors from 3 on (`os.closerange`), also those of ours in the same process.
What is written to the number then would land in a file of the user's. So who it is was noted at the beginning.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from holdfast.base.handler_errors import pass_on


@dataclass(frozen=True, slots=True)
class OwnDescriptor:
    """A number, and which open file was behind it."""

    number: int
    identity: tuple[int, int, int] | None

    @classmethod
    def of(cls, number: int) -> OwnDescriptor:
        """Note what is behind a descriptor of ours now."""
        return cls(number, identity(number))

    def is_ours(self) -> bool:
        """Return whether the same file, socket or memory is still behind the number."""
        return self.identity is not None and identity(self.number) == self.identity

    def close(self) -> None:
        """Close it, unless the number is somebody else's by now."""
        if self.is_ours():
            os.close(self.number)


def identity(number: int) -> tuple[int, int, int] | None:
    """Return device, inode and kind of what is behind a descriptor; None if there is nothing."""
    try:
        status = os.fstat(number)
    except (OSError, OverflowError, ValueError) as error:
        pass_on(error)
        return None
    return status.st_dev, status.st_ino, stat.S_IFMT(status.st_mode)
