"""A process that is a worker, and in a thread of it an agent that orders the script again and again. Not a test itself.

rerun_agent.py COUNT LOSSES [SCRIPT]: prints one JSON line per run: resident bytes, open descriptors, threads, after it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path

import psutil
from torch.distributed import TCPStore

from holdfast.checkpoint.liveness.heartbeat_page import make_page
from holdfast.elastic.worker.agent_channel import AgentChannel, RunOrder
from holdfast.elastic.worker.worker_main import serve

SCRIPT = str(Path(__file__).with_name("rerun_script.py"))
STARTED_WITH = dict(os.environ)  # what the script changes is not what its launcher has


def main() -> None:
    ours, theirs = socket.socketpair()
    line = AgentChannel(ours)
    count, losses, script = int(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else SCRIPT
    thread = threading.Thread(target=order_again_and_again, args=(line, count, losses, script), daemon=True)
    thread.start()
    code = serve(theirs, make_page(), looks=())
    assert code == 0, code


def order_again_and_again(line: AgentChannel, count: int, losses: str, script: str) -> None:
    me = psutil.Process()
    told = list(line.receive(wait=True) or [])
    for number in range(1, count + 1):
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        last = number == count
        line.order(RunOrder(number, environment(store.port), (script, losses, "end" if last else "raise")))
        wanted = ("finished" if last else "raised", number)
        while wanted not in [(message["op"], message["number"]) for message in told]:
            told += line.receive(wait=True) or []
        row = {"rss": me.memory_info().rss, "fds": me.num_fds(), "threads": me.num_threads()}
        sys.stdout.write(json.dumps(row) + "\n")
    line.send("end")
    threading.Event().wait()  # the line stays open until the process ends


def environment(port: int) -> dict[str, str]:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {
        **STARTED_WITH,
        **ranks,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


if __name__ == "__main__":
    main()
