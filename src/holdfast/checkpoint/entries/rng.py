"""States of random number generators as objects with `state_dict` and `load_state_dict`.

`ProcessRandomness` is everything a training step may draw from: Python, NumPy (if the process has imported it), torch
on the CPU and on the devices that the process uses: has memory on, or has drawn from (a save must not be what starts one). A rank
that comes back on another device of its node goes on with the same sequence there; of several devices each goes on with that of its
place in their order, and where some are not used yet, with that of its number. Reading a generator's state waits for no device: seed and offset live in host memory.
"""

from __future__ import annotations

import array
import logging
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.device.accelerator import Device

logger = logging.getLogger(__name__)

_SPAWNED = "spawned"


class ProcessRandomness:
    """The process-wide generators."""

    def state_dict(self) -> dict[str, Any]:
        """All states; words of Python's and NumPy's generators as tensors, they are long."""
        version, words, gauss = random.getstate()
        python = {
            "version": version,
            "gauss": gauss,
            "words": torch.frombuffer(array.array("q", words), dtype=torch.int64),
        }
        state: dict[str, Any] = {"python": python, "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        device = accelerator.in_use()
        words = device.random_state() if device is not None else None
        if device is not None and words is not None:
            current = device.current().index
            state["device"] = {"kind": device.kind, "words": words, "current": current}
            used = [other.index for other in device.used()] if device.count() > 1 else []
            if used and used != [current]:
                state["device"]["used"] = used
                state["device"]["all"] = [device.random_state(index) for index in used]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues every sequence. A device that is not here is skipped: nothing can be drawn from it."""
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy  # noqa: ICN001, PLC0415 - only a process that drew from it has such a state

            numpy.random.set_state(state["numpy"])  # noqa: NPY002 - the generator behind numpy.random.*
        self._load_device(state)

    def _load_device(self, state: dict[str, Any]) -> None:
        saved = state.get("device")
        device = accelerator.in_use() or (_begun(saved["kind"]) if saved is not None else None)
        if device is None:
            return
        if saved is not None and saved["kind"] == device.kind:
            each, then = saved.get("all", [saved["words"]]), saved.get("used", [saved.get("current", 0)])
            here, is_as_then = [used.index for used in device.used()], device.current().index == saved.get("current")
            if len(each) == len(here):
                places = here
            elif is_as_then and set(here) <= set(then) and max(then) < device.count():
                places = then  # the others are used later
            else:
                places = []
            for index, words in zip(places, each, strict=True) if places else ():
                device.set_random_state(words, index)
            if not places:
                device.set_random_state(each[0] if len(each) == 1 else saved["words"])
            if not places and len(each) > 1:
                logger.warning(
                    "random numbers of %d devices were saved, and this process uses %d: only its current one goes on with them",
                    len(each),
                    len(here),
                )
        for index, words in state.get("cuda", {}).items() if device.kind == "cuda" else ():
            if int(index) < device.count():  # as versions before saved it: every device by its number
                device.set_random_state(words, int(index))


def _begun(kind: str) -> Device | None:
    """Returns the accelerator that a save drew from, for a script that uses it behind its restore; it is used from here on."""
    device = accelerator.offered(kind)
    try:
        if device is not None:
            device.begin()
    except RuntimeError as error:  # a child that was forked, a driver that failed
        pass_on(error)
        logger.warning("random numbers of %s do not go on: %s", kind, error)
        return None
    return device


class GeneratorState:
    """One `torch.Generator` that the user owns, for example a sampler's."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the sequence."""
        self._generator.set_state(state["state"])


class OwnRandomness:
    """One generator of Python's or NumPy's that the user owns: `random.Random`, `numpy.random.Generator`, `RandomState`.

    Args:
        read, write: how its place is read and set, as `random_state` tells.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._read, self._write = read, write

    def state_dict(self) -> dict[str, Any]:
        """The generator's state, of plain values."""
        return {"state": self._read()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the sequence."""
        self._write(state["state"])


def random_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Returns how the place of a generator of random numbers is read and set; None for anything else."""
    if isinstance(value, torch.Generator):
        return lambda: value.get_state().numpy().tobytes(), lambda state: _set_torch(value, state)
    if isinstance(value, random.Random):
        if type(value).getstate is not random.Random.getstate:  # of the system, or with more of its own
            return None
        return value.getstate, value.setstate
    numpy = sys.modules.get("numpy")
    if numpy is None or "random" not in vars(numpy):
        return None
    if isinstance(value, numpy.random.Generator | numpy.random.BitGenerator):
        bits = getattr(value, "bit_generator", value)
        return lambda: _bits_of(bits), lambda state: _set_bits(bits, state)
    if isinstance(value, numpy.random.RandomState):
        return lambda: _lists(value.get_state(legacy=False)), lambda state: value.set_state(_arrays(state))
    return None


def process_generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Returns by name how the generators of the process on the CPU are read and set, as `random_state` tells."""
    python = getattr(random.getstate, "__self__", None)  # the generator behind the functions of the module
    found = {"generator python": random_state(python), "generator torch": random_state(torch.default_generator)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and "random" in vars(numpy):
        found["generator numpy"] = random_state(numpy.random.get_state.__self__)
    return {name: each for name, each in found.items() if each is not None}


def _set_torch(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _bits_of(bits: Any) -> dict[str, Any]:
    """Returns the state of a bit generator of NumPy, and how many children it has spawned (`Generator.spawn`), if any."""
    spawned = getattr(getattr(bits, "seed_seq", None), "n_children_spawned", 0)
    return {**_lists(bits.state), **({_SPAWNED: spawned} if spawned else {})}


def _set_bits(bits: Any, state: dict[str, Any]) -> None:
    bits.state = _arrays({key: value for key, value in state.items() if key != _SPAWNED})
    seeds = getattr(bits, "seed_seq", None)
    more = state.get(_SPAWNED, 0) - getattr(seeds, "n_children_spawned", 0)
    if seeds is not None and more > 0:
        seeds.spawn(more)  # NumPy counts them upwards alone
    elif more:
        logger.warning(
            "a generator of NumPy has spawned %s children than when it was saved, and that cannot be set: what it spawns next differs",
            f"{-more} more" if more < 0 else f"{more} fewer",
        )


def _lists(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _lists(part) for key, part in tree.items()}
    return {"array": tree.tolist(), "dtype": str(tree.dtype)} if hasattr(tree, "tolist") and tree.ndim else tree


def _arrays(tree: Any) -> Any:
    if isinstance(tree, dict) and tree.keys() == {"array", "dtype"}:
        import numpy  # noqa: ICN001, PLC0415 - only a process that has such a generator comes here

        return numpy.array(tree["array"], dtype=tree["dtype"])
    return {key: _arrays(part) for key, part in tree.items()} if isinstance(tree, dict) else tree
