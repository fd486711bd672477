"""One rank that calls the interface as MindSpore does; run by test_aiturbo.py. No test."""

from __future__ import annotations

import binascii
import hashlib
import json
import sys
from types import ModuleType

import numpy as np

NAME = "m-1_7.ckpt"


def main() -> None:
    root, rank, what, dedup = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    # What MindSpore's get_group_size answers here.
    mindspore, communication = ModuleType("mindspore"), ModuleType("mindspore.communication")
    communication.get_group_size = lambda: 2  # type: ignore[attr-defined]
    sys.modules.update({"mindspore": mindspore, "mindspore.communication": communication})

    from aiturbo.checkpoint import aiturbo_mindspore as aiturbo

    if what == "save":
        layout = {
            "stage_num": 1,
            "stage_rank_num": 2,
            "stage_layout": {"shared": ((0, 1),), "own": ((0,), (1,))},
        }
        aiturbo.init(f"{root}/rank_{rank}", rank, layout, {0: ["shared", "own"], 1: ["own"]}, dedup == "dedup", 2)
        arrays = {
            "shared": np.arange(1000, dtype=np.float32),
            "own": np.full((4, 5), rank, dtype=np.float16),
            "note": np.array(f"of rank {rank}"),
        }
        aiturbo.save_ckpt(NAME, 7, {name: [a, binascii.crc32(a.tobytes())] for name, a in arrays.items()}, True)
    found = aiturbo.load_ckpt(f"{root}/rank_{rank}", NAME, rank, True)
    said = {"note": str(found["note"][0])}
    for name in ("shared", "own"):
        array, crc = found[name]
        assert crc == binascii.crc32(array.tobytes())
        said[name] = hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest() + str(array.shape) + str(array.dtype)
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
