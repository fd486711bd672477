"""Things of which known libraries have one per process, and which a second run of a script would meet as the first left them.

A library that is loaded is asked whether it was set up; none is imported. Whoever was set up keeps groups, handlers or
definitions of the run that is over, so the script does not run again in that process (`core.elastic.rerun`).

Used by `adapters.zero_lines.launcher`, which hands it to the workers.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.base.handler_errors import pass_on
from holdfast.core.elastic.rerun import Leftover


def _any_group(module: Any) -> bool:
    return any(value is not None for name, value in vars(module).items() if name.endswith("_GROUP"))


def _own_metrics(module: Any) -> bool:
    """Return whether metrics were defined besides those that the library defines for every process."""
    names = getattr(module.REGISTRY, "_names_to_collectors", {})
    return any(not name.startswith(("python_", "process_")) for name in names)


# Module -> what it is called, and how it is asked whether it is set up.
KNOWN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    # It counts how often it was begun, and ranks that count otherwise never meet: a shutdown does not begin anew.
    "torch.distributed.rpc": ("the RPC of torch", lambda it: getattr(it, "_init_counter", 0)),
    "accelerate.state": ("the state of Accelerate", lambda it: it.PartialState._shared_state),
    "megatron.core.parallel_state": ("the groups of Megatron", _any_group),
    "megatron.training.global_vars": ("the arguments of Megatron", operator.attrgetter("_GLOBAL_ARGS")),
    "deepspeed.comm.comm": ("the communication of DeepSpeed", operator.attrgetter("cdb")),
    "absl.flags": ("the flags of absl", lambda it: it.FLAGS.is_parsed()),
    "wandb": ("the run of wandb", operator.attrgetter("run")),
    "hydra.core.global_hydra": ("Hydra", lambda it: it.GlobalHydra.instance().is_initialized()),
    "ray": ("Ray", lambda it: it.is_initialized()),
    "prometheus_client.registry": ("metrics of Prometheus", _own_metrics),
    "mlflow.tracking.fluent": ("the run of MLflow", lambda it: it.active_run()),
}


def left() -> Iterator[Leftover]:
    """Yield what is set up now."""
    found = []
    for module, (name, is_set_up) in KNOWN.items():
        loaded = sys.modules.get(module)
        if loaded is None:
            continue
        try:
            if is_set_up(loaded):
                found.append(name)
        except Exception as error:  # noqa: BLE001 - another release than those that we know: not proven clean
            pass_on(error)
            found.append(f"{name} (cannot be asked: {type(error).__name__}: {error})")
    if found:
        yield Leftover("libraries that are set up once per process", found)
