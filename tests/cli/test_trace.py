"""The timeline of a run: tracks on one axis, a trace that Perfetto reads, a page that a browser shows."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.base.errors import CorruptError, UsageError
from holdfast.base.events import Events
from holdfast.base.trace import SUFFIX, TraceFile
from holdfast.cli.timeline import kind_of, read, trace


def track(home: Path, name: str, spans: list[tuple[str, float, float]]) -> Path:
    file = TraceFile(home, name)
    for what, start, end in spans:
        file.span(what, start, end, {"version": "i000001-s0000000001"})
    file.close()
    return file.path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    track(tmp_path, "rank 10", [("step", 5.0, 6.0)])
    track(tmp_path, "rank 2", [("0F0", 1.0, 1.5), ("wait", 1.5, 2.0), ("copy", 1.6, 1.9), ("fence", 2.0, 2.01)])
    track(tmp_path, "keeper </script>node", [("node.sealed", 2.0, 2.5)])
    run = tmp_path / "run-x"
    run.mkdir()
    rows = [
        {"event": "run", "t": 100.0, "wall": 200.0},
        {"event": "incident", "t": 103.0, "first_error": "rank 1 was killed", "found_s": 0.5, "seconds": {"T1": 1.0}},
    ]
    (run / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_tracks_stand_in_order_on_one_axis(home: Path) -> None:
    tracks = read([home])
    assert [one.name for one in tracks][:2] == ["rank 2", "rank 10"]
    assert {one.name for one in tracks} == {"rank 2", "rank 10", "keeper </script>node", "launcher run-x"}
    assert min(span.start for one in tracks for span in one.spans) == 0.0
    first, second = tracks[0], tracks[1]
    assert second.spans[0].start - first.spans[0].start == pytest.approx(4.0, abs=0.05)
    assert [span.kind for span in first.spans] == ["compute", "bubble", "copy", "fence"]
    launcher = next(one for one in tracks if one.name.startswith("launcher"))
    assert [(span.kind, round(span.end - span.start, 3)) for span in launcher.spans] == [
        ("fault", 0.5),
        ("recovery", 1.0),
    ]


def test_both_files_are_written_and_the_trace_is_chromes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace([str(home)], html=None, perfetto=None, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["spans"] == 8
    events = json.loads(Path(told["perfetto"]).read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 8
    copy, wait = (next(event for event in spans if event["name"] == name) for name in ("copy", "wait"))
    assert (copy["ts"] - wait["ts"], copy["dur"]) == pytest.approx((0.1e6, 0.3e6), abs=2.0), "microseconds"
    by_lane: dict[tuple[int, int], list[dict]] = {}
    for event in sorted(spans, key=lambda event: event["ts"]):
        by_lane.setdefault((event["pid"], event["tid"]), []).append(event)
    for lane in by_lane.values():
        ends = [event["ts"] + event["dur"] for event in lane]
        assert all(end <= after["ts"] + 1.0 for end, after in zip(ends, lane[1:], strict=False)), (
            "nothing hides another"
        )
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert "rank 2" in names
    page = Path(told["html"]).read_text()
    assert page.count("</script>") == 1, "a name from outside cannot end the script"
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(|\bfetch\(|XMLHttpRequest", page), (
        "the page needs no network"
    )


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ("3B12", "compute"), ("wait", "bubble"), ("copy", "copy"), ("copied", "copy"), ("fence", "fence"), ("saved", "save"),
        ("step", "step"), ("restored", "recovery"), ("node.sealed", "seal"), ("node.replicated", "replicate"),
        ("node.refilled", "replicate"), ("node.persisted", "persist"), ("node.committed", "persist"),
        ("node.takeover", "fault"), ("memory_level_lost", "fault"), ("memory_level_back", "recovery"),
    ],
)  # fmt: skip
def test_every_event_has_its_colour_and_somebody_emits_it(event: str, kind: str) -> None:
    assert kind_of(event) == kind
    source = Path(holdfast.__file__).parent
    told = [
        path
        for room in ("keeper", "checkpoint", "elastic")
        for path in (source / room).rglob("*.py")
        if f'"{event}"' in path.read_text()
    ]
    assert told or kind == "compute"


def test_events_with_seconds_become_spans(tmp_path: Path) -> None:
    events, file = Events(), TraceFile(tmp_path, "keeper a")
    events.subscribe(file)
    before = time.monotonic()
    events.emit("node.sealed", seconds=0.25, rank=3)
    head, span = (json.loads(line) for line in file.path.read_text().splitlines())
    assert head["track"] == "keeper a"
    assert span[2] - span[1] == pytest.approx(0.25)
    assert before - 0.001 <= span[2] <= time.monotonic(), "it ended when it was told"
    events.emit("memory_level_lost", reason="why")
    file.close()
    (one,) = read([tmp_path])
    assert {span.what: round(span.end - span.start, 3) for span in one.spans} == {
        "node.sealed": 0.25,
        "memory_level_lost": 0.0,
    }
    assert one.spans[0].fields == {"rank": 3}


def test_what_a_killed_process_left_is_read_and_other_damage_is_named(tmp_path: Path) -> None:
    path = track(tmp_path, "rank 0", [("step", 0.0, 1.0), ("step", 1.0, 2.0)])
    whole = path.read_text()
    path.write_text(whole[:-9])
    assert len(read([tmp_path])[0].spans) == 1
    path.write_text(whole.replace('["step", 0.0', '["step" 0.0'))
    with pytest.raises(CorruptError, match="line 2 is not a span"):
        read([tmp_path])


def test_a_process_that_began_again_goes_on_in_its_track(tmp_path: Path) -> None:
    for start in (0.0, 5.0):
        track(tmp_path, "rank 0", [("step", start, start + 1.0)])
    (one,) = read([tmp_path])
    assert [round(span.start) for span in one.spans] == [0, 5]


def test_a_track_is_private_and_what_cannot_be_written_ends_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = track(tmp_path / "new", "rank 0", [("step", 0.0, 1.0)])
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    (tmp_path / "file").write_text("in the way")
    path = track(tmp_path / "file", "rank 1", [("step", 0.0, 1.0)] * 2)
    assert "no trace" in caplog.text
    link = tmp_path / path.name.replace("rank-1", "rank-2")
    link.symlink_to(tmp_path / "elsewhere")
    track(tmp_path, "rank 2", [("step", 0.0, 1.0)])
    assert not (tmp_path / "elsewhere").exists(), "no link is followed"
    link.unlink()

    monkeypatch.setattr("holdfast.base.trace.MAX_BYTES", 2000)
    monkeypatch.setattr("holdfast.base.trace.BATCH_LINES", 4)
    path = track(tmp_path, "rank 3", [("step", float(n), n + 1.0) for n in range(100)])
    assert 1000 < path.stat().st_size <= 2000
    assert caplog.text.count("is full") == 1
    assert 10 < len(read([tmp_path])[-1].spans) < 100, "what was written is read"


def test_machines_whose_clocks_began_at_other_times_share_an_axis(tmp_path: Path) -> None:
    """What a process notes is its own monotonic time; at which wall time that was stands in the head of its file."""
    for name, monotonic, start in (("rank 0", 1000.0, 1010.0), ("rank 1", 50.0, 63.0)):
        head = {"track": name, "pid": 1, "monotonic": monotonic, "wall": 5000.0}
        (tmp_path / f"{name}.trace.jsonl").write_text(f'{json.dumps(head)}\n["step", {start}, {start + 1.0}]\n')
    assert [(track.name, track.spans[0].start) for track in read([tmp_path])] == [("rank 0", 0.0), ("rank 1", 3.0)]


@pytest.mark.timeout(60)
def test_a_directory_of_somebody_else_is_read_and_written_without_harm(home: Path, tmp_path: Path) -> None:
    """Who may write there makes links of the names that are written, and pipes and endless files of those that are read."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (home / "timeline.html").symlink_to(precious)
    (home / "timeline.json").symlink_to(precious)
    assert trace([str(home)], html=None, perfetto=None, as_json=True) == 0
    assert precious.read_text() == "mine"
    assert not (home / "timeline.html").is_symlink()
    planted = home / f"rank-9-9{SUFFIX}"

    def pipe() -> None:
        os.mkfifo(planted)

    def link() -> None:
        planted.symlink_to(precious)

    def endless() -> None:
        planted.touch()
        os.truncate(planted, 1 << 40)

    for plant in (pipe, link, endless):
        plant()
        with pytest.raises(CorruptError, match="cannot be read") as caught:
            read([home])
        assert caught.value.where == str(planted)
        planted.unlink()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("planted", ["pipe", "pipe with a reader", "another name of a file"])
def test_a_track_whose_name_is_taken_makes_nobody_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, planted: str
) -> None:
    file = TraceFile(tmp_path, "rank 0")
    reader, precious = -1, tmp_path / "precious"
    if planted == "another name of a file":
        precious.write_text("mine")
        file.path.hardlink_to(precious)
    else:
        os.mkfifo(file.path)
        if planted == "pipe with a reader":
            reader = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        file.span("step", 0.0, 1.0)
        file.close()
        assert reader < 0 or not os.read(reader, 100)
    finally:
        if reader >= 0:
            os.close(reader)
    assert "no trace" in caplog.text
    assert not precious.exists() or precious.read_text() == "mine"


def test_no_tracks_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tracks under") as caught:
        read([tmp_path])
    assert "--trace" in str(caught.value)
