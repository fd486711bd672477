"""XORs bytes into a buffer, at the speed of memory: what parity is made with, and undone."""

from __future__ import annotations


def xor_into(target: memoryview, part: memoryview) -> None:
    """XORs the bytes of `part`, of which there are as many or fewer, into the beginning of `target`."""
    import numpy as np  # noqa: PLC0415 - only jobs that keep parity pay for the import

    into = np.frombuffer(target, np.uint8)[: part.nbytes]
    np.bitwise_xor(into, np.frombuffer(part, np.uint8), out=into)


def clear(target: memoryview) -> None:
    """Fills `target` with zeros."""
    import numpy as np  # noqa: PLC0415 - as above

    np.frombuffer(target, np.uint8)[:] = 0
