"""Tells which files were installed, and which a user may have written."""

from __future__ import annotations

import os
import sysconfig

_PACKAGES = {"site-packages", "dist-packages"}
_STANDARD = os.path.abspath(sysconfig.get_paths()["stdlib"]) + os.sep


def is_of_package(place: str) -> bool:
    """Return whether a path lies in a directory of installed packages."""
    return not _PACKAGES.isdisjoint(place.split(os.sep))


def is_standard(place: str) -> bool:
    """Return whether an absolute path lies in the standard library, and not in packages that were installed below it."""
    return place.startswith(_STANDARD) and not is_of_package(place)


def is_installed(place: str) -> bool:
    """Return whether an absolute path lies in a directory of installed packages, or in the standard library."""
    return place.startswith(_STANDARD) or is_of_package(place)


def is_users_own(place: str, home: str) -> bool:
    """Return whether a user wrote a file: it lies beside the script, or anywhere else where nothing is installed.

    Args:
        place: absolute path of the file.
        home: directory or archive that the script lies in. An installed package is the user's own if the script does.
    """
    if is_standard(place):
        return False
    if place.startswith(home + os.sep) and os.path.basename(home) not in _PACKAGES:
        return not is_of_package(place[len(home) :])
    return not is_installed(place) and not is_installed(os.path.realpath(place))
