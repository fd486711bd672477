"""Reads a stack dump of the fault handler: where the main thread stands, and what it waits for by its own choice. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.core.elastic.worker_facts import DEBUGGER, Phase

_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')
INNERMOST = 3
_RUNS_SCRIPT = "/holdfast/elastic/worker/main_module.py"
# Modules whose frames, innermost first, say what a rank has chosen to wait for. A name with a dot is one of Python's own.
_PYTHONS_OWN = re.compile(r'/python3[^/"]*/(?P<module>[a-z_]+(?:\.py|/))')
_CHOSEN: tuple[tuple[tuple[str, ...], str], ...] = (
    (("concurrent/", "asyncio/"), "a future"),
    (("urllib/", "http/", "/urllib3/", "/requests/", "/httpx/", "/httpcore/", "/aiohttp/", "/grpc/"), "an answer"),
    (("/botocore/", "/boto3/", "/s3transfer/", "/google/cloud/", "/azure/", "/fsspec/", "/huggingface_hub/"), "a store"),
    (("ssl.py", "socket.py", "socketserver.py"), "a connection"),
    (("subprocess.py",), "a child"),
    (("multiprocessing/", "queue.py", "selectors.py"), "another process or a queue"),
)  # fmt: skip
# Of these a loader is made: what the script's own data set waits for, further in, is another thing.
_OF_LOADERS = ("/torch/utils/data/", "multiprocessing/", "queue.py", "selectors.py", "threading.py")
# Waiting for the end or a sign of a thread; a lock says nothing.
_JOINS = re.compile(r"in (join|wait|_wait_for_tstate_lock)$")
_DEBUGGERS = ("pdb.py", "bdb.py", "code.py", "/IPython/", "/ipdb/", "/pudb/", "/debugpy/", "/pydevd")
# The fault handler tells of a hundred threads at most, and of the main one last.
_CUT_OFF = "\n\n...\n"
# Waiting for an accelerator, which may wait for other ranks.
_DEVICE_WAITS = re.compile(r"(synchronize|wait_event|wait_stream|wait)$")


@dataclass(frozen=True, slots=True)
class Stack:
    """Holds what a dump shows of the main thread.

    Attributes:
        stands: the phase that it shows; None if nothing is known of its kind.
        waits_in: what it waits for, see core.elastic.worker_facts.WorkerSample; empty if nothing is known.
        place: its innermost frames; empty without a dump.
        explained: whether the phase accounts for whatever it waits in: a collective, a loader that waits for its workers.
    """

    stands: Phase | None = None
    waits_in: str = ""
    place: str = ""
    explained: bool = False


UNKNOWN = Stack()


def read_stack(dump: str) -> Stack:
    """The main thread's stack: in a dump of the fault handler it comes last, innermost frame first."""
    blocks = [block for block in dump.split("\n\n") if "File " in block]
    if not blocks or dump.endswith(_CUT_OFF):
        return UNKNOWN
    frames = _of_script([line.strip() for line in blocks[-1].splitlines() if line.strip().startswith("File ")])
    if not frames:
        return UNKNOWN
    stands = _stands(frames)
    own = stands is None or (stands is Phase.DATA and not _is_of(frames[0], _OF_LOADERS))
    explained = stands is Phase.COLLECTIVE or (stands is Phase.DATA and not own)
    waits_in = "" if stands is Phase.COLLECTIVE else _waits_in(frames, own)
    return Stack(stands, waits_in, _place(frames), explained)


def _of_script(frames: list[str]) -> list[str]:
    """Return the frames of the script, without what runs it: an import system that runs it is no import of the script's."""
    below = next((index for index, frame in enumerate(frames) if _RUNS_SCRIPT in frame), len(frames))
    if below < len(frames):
        while below and "<frozen importlib._bootstrap" in frames[below - 1]:
            below -= 1
    return frames[:below]


def _stands(frames: list[str]) -> Phase | None:
    inner, whole = " ".join(frames[:INNERMOST]), " ".join(frames)
    if any(place in whole for place in ("torch/_dynamo/", "torch/_inductor/", "/triton/")):
        return Phase.COMPILE
    waits_in_c = "torch/autograd/graph.py" in frames[0] and "_engine_run_backward" in frames[0]
    functional = "torch/_ops.py" in frames[0] and "torch/distributed" in inner
    for_device = ("torch/cuda/" in frames[0] or "torch_npu/npu/" in frames[0]) and _DEVICE_WAITS.search(frames[0])
    # The collectives of torch.distributed.checkpoint have frames further in; its own read and write files.
    plain = "torch/distributed/" in frames[0] and "torch/distributed/checkpoint/" not in frames[0]
    if waits_in_c or functional or for_device or plain or "checkpoint/liveness/heartbeat.py" in frames[0]:
        return Phase.COLLECTIVE
    if "torch/utils/data/" in whole:
        return Phase.DATA
    if "torch/serialization.py" in whole or "torch/distributed/checkpoint/" in whole:
        return Phase.LOADING if "load" in whole else Phase.SAVING
    if "<frozen importlib._bootstrap>" in whole:
        return Phase.START
    return None


def _waits_in(frames: list[str], own: bool) -> str:
    if any(_is_of(frame, _DEBUGGERS) for frame in frames):
        return DEBUGGER
    if not own:  # its phase has the patience for what it does
        return ""
    joins = any(_is_of(frame, ("threading.py",)) and _JOINS.search(frame) for frame in frames[:INNERMOST])
    return next(
        (waits_in for frame in frames for names, waits_in in _CHOSEN if _is_of(frame, names)),
        "a thread" if joins else "",
    )


def _is_of(frame: str, names: tuple[str, ...]) -> bool:
    """Return whether a frame is of one of the modules: a user may call a file `queue.py` too."""
    own = _PYTHONS_OWN.search(frame)
    return any(name in frame if name.startswith("/") else own and own["module"] == name for name in names)


def _place(frames: list[str]) -> str:
    found = [_FRAME.search(frame) for frame in frames[:INNERMOST]]
    return " < ".join(f"{match['name']} ({match['file'].rsplit('/', 1)[-1]})" for match in found if match)
