"""A worker and, in a thread of it, an agent whose first order names a store that is gone. Not a test itself.

Orders again as soon as the worker reaches for that store; ends well when the second order is finished.
"""

from __future__ import annotations

import socket
import sys
import threading
import traceback

from torch.distributed import TCPStore

from elastic.rerun_agent import SCRIPT, environment
from holdfast.checkpoint.liveness.heartbeat_page import make_page
from holdfast.elastic.worker.agent_channel import AgentChannel, RunOrder
from holdfast.elastic.worker.worker_main import serve


def reaches() -> bool:
    stacks = [traceback.extract_stack(frame) for frame in sys._current_frames().values()]
    return any(entry.name == "_create_c10d_store" for stack in stacks for entry in stack)


def main() -> None:
    ours, theirs = socket.socketpair()
    line = AgentChannel(ours)
    over = threading.Event()

    def agent() -> None:
        gone = socket.create_server(("localhost", 0))
        arguments = (SCRIPT, sys.argv[1], "end")
        line.order(RunOrder(1, environment(gone.getsockname()[1]), arguments))
        gone.close()
        while not reaches():
            over.wait(0.001)
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        line.order(RunOrder(2, environment(store.port), arguments))
        told: list[tuple[str, int]] = []
        while ("finished", 2) not in told:
            told += [(message["op"], message["number"]) for message in line.receive(wait=True) or []]
        assert ("finished", 1) not in told
        line.send("end")
        over.wait()  # the line stays open until the process ends

    threading.Thread(target=agent, daemon=True).start()
    sys.exit(serve(theirs, make_page(), looks=()))


if __name__ == "__main__":
    main()
