"""Decides which tensors may be copied late: those of which three saves proved that nothing but the optimizer's step
changes them.

Parameters and optimizer state should not change between a save and the next step, but hooks, weight norms or averages
may write to them, and version counters do not see every write. So a tensor that an optimizer owns is first copied at
once, and compared with its copy at the fence, three saves long. One difference, then or later (`checkpoint.capture.late_copy_check` goes on
looking), and it is copied at once for ever.

With `verify_capture` a digest of everything, taken at the call, is compared with the copy when that is complete. Called
by `checkpoint.save.memory_saver` and `checkpoint.save.save_completion`; knows nothing of slots or keepers.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash

from holdfast.base.terminal import some_of
from holdfast.checkpoint.capture.copy_plan import cut
from holdfast.checkpoint.entries.tensor_words import same_memory
from holdfast.checkpoint.entries.types import LiveTensor

logger = logging.getLogger(__name__)

# Saves that a tensor is watched before it is trusted. One could be luck with a hook that runs every other step.
NUM_PROOFS = 3

# A tensor on a device is compared in blocks of about this size, which the device needs three times: put in order, from the
# slot, and as a mask. Torch's allocator on CUDA takes 20 MiB at a time for these.
BLOCK_BYTES = 6 << 20


class MutationHistory:
    """Holds what is known of each tensor of one structure; forgotten when the structure changes.

    Args:
        overlap: whether anything may be copied late at all.

    Attributes:
        generation: rises whenever `late` or `watched` may answer differently.
    """

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap
        self._proofs: dict[str, int] = {}
        self._refused: set[str] = set()
        self.generation = 0

    def stop(self, reason: str) -> None:
        """Nothing is copied late any more, for `reason`; said once."""
        if self._overlap:
            logger.warning("everything is copied in the call from now on: %s", reason)
            self._overlap = False
            self.generation += 1

    def forget(self) -> None:
        """The structure changed: every tensor has to prove itself again; refusals stay."""
        self._proofs.clear()
        self.generation += 1

    def late(self, tensors: Mapping[str, LiveTensor]) -> set[str]:
        """Names that may be copied after the call."""
        return {name for name in self._candidates(tensors) if self._proofs.get(name, 0) >= NUM_PROOFS}

    def watched(self, tensors: Mapping[str, LiveTensor]) -> set[str]:
        """Names that are copied at once now and compared at the fence."""
        return {name for name in self._candidates(tensors) if self._proofs.get(name, 0) < NUM_PROOFS}

    def seen(self, tensors: Mapping[str, LiveTensor]) -> tuple[set[str], set[str]]:
        """Returns the names of what an optimizer's step alone should write, and which of them something else was seen to write."""
        names = {name for name, live in tensors.items() if live.late and _is_plain(live.local)}
        return names, names & self._refused

    def judge(self, unchanged: Iterable[str], changed: Iterable[str]) -> None:
        """Judge by what the fence saw: bytes equal, or different, since the call."""
        for name in unchanged:
            self._proofs[name] = self._proofs.get(name, 0) + 1
            self.generation += 1
        fresh = sorted(set(changed) - self._refused)
        self._refused.update(fresh)
        self.generation += len(fresh)
        if fresh:
            logger.warning(
                "copied in the call from now on, because something other than an optimizer's step changes it: %s. Whoever "
                "swaps weights for a while calls settle() of the Checkpointer before, and keeps fast saves",
                some_of(fresh),
            )

    def _candidates(self, tensors: Mapping[str, LiveTensor]) -> Iterable[str]:
        if not self._overlap:
            return ()
        return (
            name for name, live in tensors.items() if live.late and name not in self._refused and _has_bits(live.local)
        )


def same_bits(live: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return whether a live tensor on any device equals its copy in host memory bit for bit (NaN equals itself)."""
    if live.numel() and not live.data_ptr():  # its memory was taken away
        return False
    if live.device.type == "cpu" and live.is_contiguous():
        return same_memory(live.data_ptr(), copy.data_ptr(), live.nbytes)
    if live.device.type == "cpu" or not live.dim() or not live.numel():
        return torch.equal(_bits(live.contiguous()), _bits(copy.to(live.device)))
    # Before a step a device may have no memory left for a whole tensor: block by block.
    return all(
        torch.equal(_bits(mine.contiguous()), _bits(theirs.to(live.device)))
        for mine, theirs in cut(live, copy, BLOCK_BYTES)
    )


def differing(pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> set[str]:
    """Names whose (name, live, copy) differ in at least one piece."""
    return {name for name, live, copy in pairs if not same_bits(live, copy)}


def digest(tensor: torch.Tensor) -> int:
    """Fingerprint of a contiguous tensor in host memory; releases the interpreter's lock."""
    return digest_at(tensor.data_ptr(), tensor.nbytes)


def digest_at(address: int, num_bytes: int) -> int:
    """The same of so many bytes."""
    if not num_bytes:
        return 0
    return xxhash.xxh3_64_intdigest(memoryview((ctypes.c_char * num_bytes).from_address(address)))


def can_digest(tensor: torch.Tensor) -> bool:
    """Return whether `digest` reads it where it is."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _has_bits(tensor: torch.Tensor) -> bool:
    """Return whether its bytes are its value, so that they can be compared."""
    return not (tensor.is_conj() or tensor.is_neg())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its elements lie where its strides say, as they are."""
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return is_strided and type(tensor) in {torch.Tensor, torch.nn.Parameter} and _has_bits(tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have any stride
