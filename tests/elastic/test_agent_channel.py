"""The line between an agent and a worker that may not read for a while."""

from __future__ import annotations

import os
import threading

from holdfast.elastic.worker.agent_channel import AgentChannel, RunOrder, order_of, pair


def test_an_order_to_a_worker_that_does_not_read_arrives_whole_once_it_does() -> None:
    """More than the socket holds: it was cut off after a second, and spoilt whatever came behind it."""
    line, theirs = pair()
    worker, page = AgentChannel(theirs), os.memfd_create("page")
    text = "x" * (4 << 20)
    for number in range(1, 4):
        assert line.order(RunOrder(number, {"A": "b"}, notes=True, text=text), page), "somebody is there"
    line.send("end")
    told = []
    try:
        while not told or told[-1]["op"] != "end":
            line.flush()
            told += worker.receive(wait=True) or []
        orders = [order_of(message) for message in told if message["op"] == "run"]
        assert [order.number for order in orders] == [1, 3], "one that was not begun gives way to the newest"
        assert {order.text for order in orders} == {text}
        assert len(worker.descriptors) == 2, "each order with its page"
    finally:
        os.close(page)
        worker.close()
        line.close()


def test_a_word_to_a_worker_that_is_gone_is_told_and_kept_for_nobody() -> None:
    line, theirs = pair()
    theirs.close()
    assert not line.order(RunOrder(1, text="x" * (1 << 20)))
    line.flush()
    line.close()


def test_a_worker_that_reads_slowly_gets_all_within_one_send() -> None:
    line, theirs = pair()
    worker = AgentChannel(theirs)
    told: list[object] = []

    def read() -> None:
        while not told:
            told.extend(worker.receive(wait=True) or [])

    reader = threading.Thread(target=read)
    reader.start()
    line.send("end", text="y" * (1 << 20))
    while reader.is_alive():
        line.flush()
        reader.join(0.01)
    assert len(told) == 1
    worker.close()
    line.close()
