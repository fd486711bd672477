"""What tests/elastic/test_flags.py launches: writes down how it was started. Not a test itself.

seen_worker.py OUT [FIRST]: OUT/<rank>.json; FIRST is done by rank 1 when the job starts: `die` or `leave`
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

# A new interpreter has these too; all else that the worker finds was given to it.
rank = os.environ["RANK"]
facts = {"environment": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "name": __name__, "cwd": os.getcwd()}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(facts))
print(f"said by rank {rank} in life {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
print(f"complained by rank {rank}", file=sys.stderr, flush=True)
if sys.argv[2:] == ["die"] and rank == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2:] == ["leave"] and rank == "1":
    sys.exit(7)
