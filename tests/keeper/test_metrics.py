"""Metrics of a keeper: names that are promised, a port that serves nothing else and nobody who came through a browser."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.base.events import COUNTERS
from holdfast.core.model import Level
from holdfast.keeper.observe import metrics_port
from holdfast.keeper.observe.metrics import METRICS, PREFIX, render, unit_of
from holdfast.keeper.observe.metrics_port import MAX_CLIENTS, MAX_REQUEST_BYTES, MetricsPort
from keeper.rig import reached, rig_in, save_all

NASTY = 'a"b\\nc\nd</script>'  # a backslash before an n is no new line
FACTS: dict[str, Any] = {
    "node": NASTY,
    "job": "0123",
    "uptime_s": 1.5,
    "resident_bytes": 10,
    "memory": {"used_bytes": 5, "allowed_bytes": 20},
    "incarnation": 2,
    "nodes": ["a", "b"],
    "alarms": [{}],
    "suspects": {},
    "newest": {
        "captured": "i000002-s0000000120",
        "replicated": "i000002-s0000000110",
        "durable": "i000001-s0000000050",
    },
    "ranks": {"0": {"pid": 7, "slots": [{"slot": 1, "sealed_bytes": 9}]}, "1": {"pid": None, "slots": []}},
    "replicas": [{"rank": 5, "slot": 2, "sealed_bytes": 8}],
    "counters": {"storage_read_bytes": 123, "bad name": 1},
    "run": None,
}


def samples(text: str) -> dict[tuple[str, str], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k not in ("node", "job")}
            found[sample.name, ",".join(f"{k}={v}" for k, v in rest.items())] = sample.value
            assert sample.labels["job"] == "0123"
    return found


def test_the_page_is_what_prometheus_reads_and_names_are_escaped() -> None:
    text = render([FACTS])
    found = samples(text)
    assert found["holdfast_version_step", "level=captured"] == 120
    assert found["holdfast_lag_steps", "level=replicated"] == 10
    assert ("holdfast_lag_steps", "level=durable") not in found, "steps of two incarnations have no difference"
    assert found["holdfast_rank_up", "rank=1"] == 0
    assert found["holdfast_slot_sealed_bytes", "rank=5,replica=yes,slot=2"] == 8
    assert found["holdfast_storage_read_bytes_total", ""] == 123
    assert found["holdfast_bad_name_total", ""] == 1
    labels = {s.labels["node"] for family in text_string_to_metric_families(text) for s in family.samples}
    assert labels == {NASTY}


def test_every_sample_has_the_labels_that_are_declared_for_it() -> None:
    run = {"goodput": 0.5, "seconds": {"steps": 1.0}, "incidents": 1, "detection_s": 2.0, "recovery_s": {"T0": 1.0}}
    families = list(text_string_to_metric_families(render([FACTS | {"run": run}])))
    gauges = {family.name.removeprefix(PREFIX): family for family in families if family.type == "gauge"}
    assert set(gauges) == set(METRICS), "each is served, and none that is not declared"
    for name, family in gauges.items():
        assert family.documentation == METRICS[name].help
        assert all(tuple(sample.labels) == ("node", "job", *METRICS[name].labels) for sample in family.samples), name
    told = {family.name: family.documentation for family in families if family.type == "counter"}
    assert told["holdfast_storage_read_bytes"] == COUNTERS["storage_read_bytes"]
    assert (unit_of("holdfast_storage_read_bytes_total"), unit_of("nodes")) == ("bytes", "")


def test_several_keepers_make_one_page() -> None:
    text = render([FACTS, FACTS | {"node": "b"}])
    assert text.count("# TYPE holdfast_incarnation gauge") == 1
    assert text.count("\nholdfast_incarnation{") == 2
    assert render([]) == ""


JOURNAL = [
    {"event": "run", "t": 100.0, "wall": 0.0, "ranks": [0]},
    {"event": "progress", "t": 110.0, "step": 10, "spent": {"STEP": 6.0, "SAVING": 1.0}},
    {
        "event": "incident", "t": 116.0, "number": 1, "ranks": [0], "found_s": 2.0,
        "seconds": {"T0": 0.5, "T1": 0.25, "T2": 1.0, "T3": 1.5},
    },
    {"event": "progress", "t": 120.0, "step": 20, "spent": {"STEP": 9.0, "SAVING": 1.0}},
]  # fmt: skip


def test_goodput_and_the_parts_of_recoveries_come_from_the_launchers_journal(tmp_path: Path) -> None:
    with rig_in(tmp_path) as rig:
        rig.start()
        assert rig.status(0)["run"] is None
        journal = tmp_path / "rt" / "run-default-n0" / "journal.jsonl"
        journal.parent.mkdir()
        journal.write_text("".join(json.dumps(line) + "\n" for line in JOURNAL))
        found = samples(render([rig.status(0) | {"job": "0123"}]))
        steps = rig.status(0)["run"]["seconds"]["steps"]
    assert found["holdfast_incidents", ""] == 1
    assert found["holdfast_detection_seconds", ""] == 2.0
    assert [found["holdfast_recovery_seconds", f"part=T{n}"] for n in range(5)] == [0.5, 0.25, 1.0, 1.5, 0.0]
    assert found["holdfast_run_seconds", "what=stalls"] == pytest.approx(1.0)
    assert found["holdfast_goodput_ratio", ""] == pytest.approx(steps / 20.0)


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    served = MetricsPort(0, lambda: "page\n")
    yield served
    served.stop()


def ask(port: MetricsPort, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port.port), timeout=30) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65536):
            answer += part
    return answer


def test_only_the_page_is_served(port: MetricsPort) -> None:
    answer = ask(port, b"GET /metrics HTTP/1.1\r\nHost: localhost:9\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\npage\n")
    assert b"access-control" not in answer.lower()
    assert port._listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"403"),  # DNS rebinding
        (b"GET /metrics HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"403"),
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"405"),
        (b"GET /../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"GET /<script> HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"GET /" + b"a" * (MAX_REQUEST_BYTES - 5), b"431"),
        (b"\x16\x03\x01 a TLS hello", b"400"),
        (b"nonsense\r\nHost: localhost\r\n\r\n", b"400"),
    ],
)
def test_anything_else_is_refused_shortly(port: MetricsPort, request_bytes: bytes, status: bytes) -> None:
    answer = ask(port, request_bytes)
    assert answer.split(b" ")[1] == status
    assert answer.endswith(b"\r\n\r\n"), "nothing that was sent comes back"


def test_who_sends_a_byte_now_and_then_delays_nobody_and_no_end() -> None:
    """Longer than a request may take altogether, and more of them than are served at a time."""
    served = MetricsPort(0, lambda: "page\n")
    slow = [socket.create_connection(("127.0.0.1", served.port), timeout=30) for _ in range(2 * MAX_CLIENTS)]
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.1):
            for client in slow:
                with contextlib.suppress(OSError):
                    client.send(b"G")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        started = time.monotonic()
        for _ in range(3):
            assert b"page" in ask(served, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert time.monotonic() - started < 10  # at once on a quiet machine
        for client in slow:  # each is cut off, whatever it goes on to send
            with contextlib.suppress(ConnectionError):
                while client.recv(65536):
                    pass
        again = socket.create_connection(("127.0.0.1", served.port), timeout=30)
        again.send(b"G")
        served.stop()
        assert again.recv(1) == b""
        again.close()
    finally:
        ended.set()
        thread.join()
        for client in slow:
            client.close()


def test_stop_cuts_off_who_is_connected_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is in the middle of its request, one reads nothing of its answer; neither has met a deadline of its own."""
    monkeypatch.setattr(metrics_port, "REQUEST_TIMEOUT_S", 3600.0)
    started = threading.Event()

    def page() -> str:
        started.set()
        return "p" * (64 << 20)  # more than the sockets hold

    served = MetricsPort(0, page)
    place = ("127.0.0.1", served.port)
    ending = threading.Thread(target=served.stop)
    with socket.create_connection(place, timeout=60) as asking, socket.create_connection(place, timeout=60) as reading:
        asking.sendall(b"G")
        reading.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert started.wait(60), "who came later is served, so both were accepted"
        ending.start()
        ending.join(60)
        assert not ending.is_alive(), "it waits for a client"
        assert asking.recv(1) == b""
        with contextlib.suppress(ConnectionError):  # what was under way may still come
            while reading.recv(1 << 20):
                pass
    ending.join(60)


def test_a_keeper_serves_its_metrics_when_asked(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    with rig_in(tmp_path, metrics_port=number) as rig:
        trainers = rig.start()
        version = save_all(trainers, 7, durable=True)
        reached(trainers, version, Level.DURABLE)
        with urllib.request.urlopen(f"http://127.0.0.1:{number}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    assert 'holdfast_version_step{node="n0"' in text
    steps = {
        s.labels.get("level"): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
        if s.name == "holdfast_version_step"
    }
    assert steps["durable"] == 7
    assert "holdfast_storage_written_bytes_total" in text
