"""A mount over a directory that never answers, as one of a server that is gone: by the kernel's own FUSE, which needs root.

The server is this process: it answers the greeting and nothing else. Whoever looks below waits in the kernel until `end`.
The messages are those of linux/fuse.h, version 7.31.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

_INIT = 26
_MNT_DETACH = 2
_REQUEST = struct.Struct("<IIQ")  # bytes, operation, number
_GREETING = struct.Struct("<IIII")  # major and minor version, read-ahead, flags; behind the header
_HEADER_BYTES = 40
_ANSWER = struct.Struct("<IiQ")  # bytes, error, number
_WELCOME = struct.Struct("<IIIIHHIIHH32x")
_libc = ctypes.CDLL(None, use_errno=True)


class HangingMount:
    """Covers `path` from now on; a context manager.

    Raises:
        OSError: there is no FUSE here, or it is not allowed.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.fsencode(path)
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        if _libc.mount(b"hanging", self._path, b"fuse", 0, options.encode()):
            os.close(self._device)
            raise OSError(ctypes.get_errno(), "a FUSE mount is refused")
        request = os.read(self._device, 1 << 20)
        _, operation, number = _REQUEST.unpack_from(request)
        assert operation == _INIT
        _, minor, read_ahead, _ = _GREETING.unpack_from(request, _HEADER_BYTES)
        welcome = _WELCOME.pack(7, min(minor, 31), read_ahead, 0, 16, 12, 1 << 17, 1, 32, 0)
        os.write(self._device, _ANSWER.pack(_ANSWER.size + len(welcome), 0, number) + welcome)

    def __enter__(self) -> HangingMount:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Uncovers the path; all calls that hang fail."""
        _libc.umount2(self._path, _MNT_DETACH)
        os.close(self._device)
