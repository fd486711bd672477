"""holdfast keeps distributed PyTorch training alive.

The public door. Names are loaded at first use, so that importing the package costs neither torch nor time; commands
and keepers rely on that. A test freezes the list: a new name needs a reason there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.base.config import Config
    from holdfast.base.errors import HoldfastError
    from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
    from holdfast.checkpoint.restore.restorer import RestoreReport
    from holdfast.checkpoint.save.save_handle import SaveHandle
    from holdfast.core.model import Level, Version
    from holdfast.elastic.worker.resumable import resumable

__version__ = "0.2.0.dev0"

__all__ = ["Checkpointer", "Config", "HoldfastError", "Level", "RestoreReport", "SaveHandle", "Version", "resumable"]

_HOMES = {
    "Checkpointer": "holdfast.checkpoint.checkpointer.checkpointer",
    "Config": "holdfast.base.config",
    "HoldfastError": "holdfast.base.errors",
    "Level": "holdfast.core.model",
    "RestoreReport": "holdfast.checkpoint.restore.restorer",
    "SaveHandle": "holdfast.checkpoint.save.save_handle",
    "Version": "holdfast.core.model",
    "resumable": "holdfast.elastic.worker.resumable",
    # What the checkpointer asks for where GROUP_INFO_FILE is set.
    "write_group_info_of_shards": "holdfast.adapters.mindspore.redundancy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
