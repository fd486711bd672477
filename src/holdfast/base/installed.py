"""Tells which files were installed, and which a user may have written."""

from __future__ import annotations

import os
import sysconfig

_PACKAGES = {"site-packages", "dist-packages"}
_STANDARD = os.path.abspath(sysconfig.get_paths()["stdlib"]) + os.sep


def is_of_package(place: str) -> bool:
    """Return whether a path lies in a directory of installed packages."""
    return not _PACKAGES.isdisjoint(place.split(os.sep))


def is_installed(place: str) -> bool:
    """Return whether an absolute path lies in one, or in the standard library."""
    return place.startswith(_STANDARD) or is_of_package(place)
