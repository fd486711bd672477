"""The demo's own demands: whatever is not as promised ends it with exit code 1, however well the rest went."""

from __future__ import annotations

import io
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from holdfast.elastic.launch import worker_eviction
from holdfast.testing.demo import demo
from holdfast.testing.demo.cluster import DemoFailure
from holdfast.testing.demo.demo import OTHER_NODE, OWN_MEMORY, QUICK, STORAGE, Demo, Outcome, Promise
from holdfast.testing.demo.facts import Comparison

Bytes = dict[str, int]
BEFORE, NEWEST = "i000001-s0000000011", "i000001-s0000000017"
KILLED_AT = 5.0


@pytest.fixture
def story(tmp_path: Path) -> Demo:
    """A demo whose cluster does nothing; what ranks log is written by the tests."""
    for name in ("reference", "facts", "checkpoints"):
        (tmp_path / name).mkdir()
    cluster: Any = SimpleNamespace(
        home=tmp_path,
        checkpoints=tmp_path / "checkpoints",
        check=lambda: None,
        kill_node=lambda _: 7,
        new_rendezvous=lambda: None,
        start_node=lambda *_, **__: None,
        wait_port=lambda: None,
    )
    return Demo(cluster, QUICK, Console(file=io.StringIO()))


def came_back(
    home: Path, sources: list[Bytes], *, versions: tuple[str, ...] = (NEWEST,) * 4, pids: tuple[int, ...] = ()
) -> None:
    """Every rank finished step 19, was interrupted, and goes on with step 18; `pids`: of processes that are new."""
    for rank, (found, version) in enumerate(zip(sources, versions, strict=True)):
        rows: list[dict[str, Any]] = [
            {"event": "start", "time": 1.0, "pid": rank + 1},
            {"event": "step", "time": 4.0, "step": 19, "loss": 2.0},
        ]
        if pids and pids[rank]:
            rows.append({"event": "start", "time": 8.0, "pid": pids[rank]})
        rows += [
            {"event": "restored", "time": 9.0, "start": 18, "report": {"version": version, "bytes": found}},
            {"event": "step", "time": 10.0 + rank, "step": 18, "loss": 2.0},
        ]
        (home / "facts" / f"rank{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recovered(story: Demo, promised: Promise, *ranks: int) -> Outcome:
    return story.recovered("a fault", KILLED_AT, 6.5, ranks=ranks, promised=promised)


def test_a_row_of_the_table_is_what_the_ranks_logged(story: Demo) -> None:
    slot = {"slot": 100, "storage": 0}
    came_back(story.cluster.home, [slot, slot, slot, {"slot": 60, "node": 40}], pids=(0, 0, 0, 44))
    outcome = recovered(story, OWN_MEMORY, 3)
    assert outcome == Outcome("a fault", 1.5, {"slot": 60, "node": 40}, NEWEST, 2, 8.0, (0, 1, 2))
    assert story.outcomes == [outcome]
    story.must_have_kept(outcome, 0, 1, 2)
    with pytest.raises(DemoFailure, match="kept their processes"):
        story.must_have_kept(outcome, 0, 3)


def test_a_survivor_that_gloo_does_not_wake_is_told_and_nothing_else_excuses_one(story: Demo) -> None:
    came_back(story.cluster.home, [{"slot": 100}] * 3 + [{"peer": 100}], pids=(41, 42, 0, 44))
    logs = story.cluster.home / "logs"
    logs.mkdir()
    (logs / "node-a.log").write_text(f"process 1 {worker_eviction.STANDS}: it is killed\n")
    outcome = recovered(story, OTHER_NODE, 3)
    assert (outcome.kept, outcome.unwakeable) == ((2,), (0,))
    story.must_have_kept(outcome, 0, 2)
    assert "rank 0 was replaced too" in story.console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(DemoFailure, match="kept their processes"):
        story.must_have_kept(outcome, 0, 1)


SLOT, PEER, STORED = {"slot": 100}, {"peer": 100}, {"storage": 100}


@pytest.mark.parametrize(
    ("promised", "ranks", "sources"),
    [
        (OWN_MEMORY, (3,), [SLOT, SLOT, SLOT, STORED]),
        (OWN_MEMORY, (3,), [SLOT, SLOT, SLOT, PEER]),
        (OWN_MEMORY, (3,), [STORED, SLOT, SLOT, SLOT]),  # one that lost nothing read from storage
        (OTHER_NODE, (2, 3), [SLOT, SLOT, SLOT, PEER]),
        (OTHER_NODE, (2, 3), [SLOT, SLOT, PEER, {"peer": 99, "storage": 1}]),
        (STORAGE, (0, 1, 2, 3), [STORED, STORED, STORED, SLOT]),
    ],
)
def test_state_from_elsewhere_than_promised_ends_the_demo(
    story: Demo, promised: Promise, ranks: tuple[int, ...], sources: list[Bytes]
) -> None:
    came_back(story.cluster.home, sources)
    with pytest.raises(DemoFailure, match=f"promised: {promised.text}"):
        recovered(story, promised, *ranks)


def test_ranks_that_go_on_from_different_versions_end_the_demo(story: Demo) -> None:
    came_back(story.cluster.home, [SLOT] * 4, versions=(NEWEST, NEWEST, BEFORE, NEWEST))
    with pytest.raises(DemoFailure, match="disagree"):
        recovered(story, OWN_MEMORY, 3)


@pytest.mark.parametrize(
    ("code", "said", "good"), [(1, "damaged: {}", True), (0, "damaged: {}", False), (1, "something is damaged", False)]
)
def test_verify_has_to_name_the_file(story: Demo, code: int, said: str, good: bool) -> None:
    file = Path("g0x2-aaaa-0.safetensors")
    answer = subprocess.CompletedProcess((), code, said.format(file.name), "")
    story.cluster.command = lambda *_: answer  # type: ignore[method-assign]
    if good:
        story.verify_names(file)
    else:
        with pytest.raises(DemoFailure, match="did not name"):
            story.verify_names(file)


@pytest.mark.parametrize("restored", ["i000001-s0000000005", BEFORE, NEWEST])
def test_after_the_damage_the_version_before_has_to_be_used(
    story: Demo, monkeypatch: pytest.MonkeyPatch, restored: str
) -> None:
    for version in ("i000001-s0000000005", BEFORE, NEWEST):
        directory = story.cluster.checkpoints / version
        directory.mkdir()
        (directory / "manifest.json").write_text("{}")
        (directory / "g0.safetensors").write_bytes(bytes(100))
    verified: list[Path] = []
    monkeypatch.setattr(story, "verify_names", verified.append)
    outcome = Outcome("3", None, STORED, restored, 0, 1.0)
    monkeypatch.setattr(story, "recovered", lambda *_, **__: outcome)
    if restored == BEFORE:
        story.lose_everything()
    else:
        with pytest.raises(DemoFailure, match=f"{BEFORE} is the newest undamaged"):
            story.lose_everything()
    assert [path.parent.name for path in verified] == [NEWEST]
    assert verified[0].read_bytes().count(0) == 99, "one byte is another"


@pytest.fixture
def interrupts() -> Iterator[None]:
    """The end of a demo ignores Ctrl-C from then on; the tests after it do not."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("differences", [(), ("parameter:w of rank 0",)])
def test_the_exit_code_is_that_of_the_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], differences: tuple[str, ...]
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(demo, "Cluster", lambda *_: SimpleNamespace(close=lambda: closed.append(True)))
    result = Comparison(1, 6, 24, 3, differences)
    monkeypatch.setattr(
        demo, "Demo", lambda *_: SimpleNamespace(run=lambda: result, outcomes=[], torchrun_s=1.0, timeline={})
    )
    assert demo.main(["--json"]) == (1 if differences else 0)
    assert json.loads(capsys.readouterr().out)["equal"] is not bool(differences)
    assert closed == [True]


@pytest.mark.usefixtures("interrupts")
def test_a_broken_promise_is_exit_code_1_and_everything_is_cleaned_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        raise DemoFailure("rank 0 read from storage")

    closed: list[bool] = []
    monkeypatch.setattr(demo, "Cluster", lambda *_: SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(demo, "Demo", lambda *_: SimpleNamespace(run=run))
    assert demo.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"equal": False, "failure": "rank 0 read from storage"}
    assert closed == [True]


def test_a_timeline_that_lacks_something_ends_the_demo(story: Demo) -> None:
    kinds = dict.fromkeys(demo.SHOWN, 1)
    story.cluster.keep = None
    story.cluster.timeline = lambda: {"kinds": kinds, "tracks": [], "spans": 9}  # type: ignore[method-assign]
    story.draw()
    del kinds["recovery"]
    with pytest.raises(DemoFailure, match="does not show: recovery"):
        story.draw()
