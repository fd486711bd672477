"""Property tests of this room have no deadline per example: the machine is shared, and pytest's own limit holds."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
