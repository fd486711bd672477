"""A file system of its own for one trial, whose power can be cut: an image behind a loop device.

A cut is the file system's own shutdown call: from that instant nothing reaches the device any more, and what lay in
memory only is gone when it is mounted again. Two kinds are needed, because they lose different things. In the harsh one
the journal stays in memory, so all that no fsync asked for is lost; in the other the journal is written and the data is
not, so names stand whose bytes never came. Both need root. The number is that of EXT4_IOC_SHUTDOWN (Linux,
fs/ext4/ext4.h) and of XFS_IOC_GOINGDOWN (fs/xfs/libxfs/xfs_fs.h).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

_SHUTDOWN = 0x8004587D
JOURNAL_LOST, JOURNAL_WRITTEN = 2, 1
_TIMEOUT_S = 60

# Size of the image (a sparse file) and the command that makes the file system. XFS refuses less than 300 MiB.
_MAKERS = {
    "ext4": (24 << 20, ("mkfs.ext4", "-q", "-F")),
    "xfs": (300 << 20, ("mkfs.xfs", "-q", "-f")),
}
# Copies of one image have one name, which XFS would not mount twice.
_OPTIONS = {"ext4": "loop", "xfs": "loop,nouuid"}
KINDS = tuple(_MAKERS)


class Disk:
    """A mounted file system of one trial. `close` takes it away.

    Args:
        kind: one of KINDS.
        template: an empty file system of that kind, see `make_template`; it is copied.
        image: the file to be made.
        place: the directory to mount at; it is made.

    Raises:
        RuntimeError: it cannot be mounted here.
    """

    def __init__(self, kind: str, template: Path, image: Path, place: Path) -> None:
        self._kind = kind
        self._image = image
        self._place = place
        _call("cp", "--sparse=always", str(template), str(image))
        place.mkdir()
        self._mount()

    def power_on(self) -> None:
        """Mounts it again after a cut, as a machine does that starts: the journal is played back."""
        _call("umount", str(self._place))
        self._mount()

    def close(self) -> None:
        """Unmounts it and removes the image."""
        _call("umount", str(self._place))
        self._image.unlink()

    def _mount(self) -> None:
        _call("mount", "-t", self._kind, "-o", _OPTIONS[self._kind], str(self._image), str(self._place))


def make_template(kind: str, path: Path) -> Path:
    """An empty file system in a file.

    Raises:
        RuntimeError: its program is missing or failed.
    """
    size_bytes, command = _MAKERS[kind]
    with path.open("wb") as file:
        file.truncate(size_bytes)
    _call(*command, str(path))
    return path


def cut_power(place: str, how: int) -> None:
    """Cut the power: from now on nothing beneath `place` reaches the device; JOURNAL_LOST or JOURNAL_WRITTEN."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", how))
    finally:
        os.close(descriptor)


def why_not(kind: str) -> str:
    """The reason why power cannot be cut here, or `""`: a file system is made, mounted, cut and mounted again."""
    if os.geteuid() != 0:
        return "it needs root, to mount file systems and to shut them down"
    directory = Path(tempfile.mkdtemp(prefix="hfp-"))
    try:
        template = make_template(kind, directory / "template")
        with contextlib.closing(Disk(kind, template, directory / "image", directory / "c")) as disk:
            cut_power(str(directory / "c"), JOURNAL_LOST)
            disk.power_on()
    except (RuntimeError, OSError) as error:
        return f"{kind} cannot be mounted and cut here: {error}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return ""


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not installed") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
