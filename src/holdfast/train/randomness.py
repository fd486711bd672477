"""States of random number generators as objects with `state_dict` and `load_state_dict`.

`ProcessRandomness` is everything a training step may draw from: Python, NumPy (if the process has imported it), torch
on the CPU and on every CUDA device (if CUDA is in use; a save must not be what starts it). Reading a CUDA generator's
state does not wait for the device: seed and offset live in host memory.
"""

from __future__ import annotations

import array
import random
import sys
from typing import Any

import torch


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
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = {str(i): gen.get_state() for i, gen in enumerate(torch.cuda.default_generators)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues every sequence. A device that is not here is skipped: nothing can be drawn from it."""
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy  # noqa: ICN001, PLC0415 - only a process that drew from it has such a state

            numpy.random.set_state(state["numpy"])  # noqa: NPY002 - the generator behind numpy.random.*
        for index, words in state.get("cuda", {}).items():
            if torch.cuda.is_available() and int(index) < torch.cuda.device_count():
                torch.cuda.set_rng_state(words, int(index))


class GeneratorState:
    """One `torch.Generator` that the user owns, for example a sampler's."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """The generator's state."""
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the sequence."""
        self._generator.set_state(state["state"])
