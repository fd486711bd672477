"""Steps that a graph of a device replays: no hook sees them. What is captured is told by a stand-in for the device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.base.events import Events
from holdfast.checkpoint.capture.mutation_check import NUM_PROOFS, MutationHistory
from holdfast.checkpoint.capture.optimizer_fence import Fence, LateCopyJob
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.save.memory_saver import Saver, _Late
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.survivors import step_snapshot, survivor_state
from holdfast.checkpoint.survivors.survivor_state import Survivor
from holdfast.core.model import Version
from kit.live_tensors import live


class Graph:
    """A device that is recording a graph, or not."""

    def __init__(self) -> None:
        self.records = False

    def __enter__(self) -> None:
        self.records = True

    def __exit__(self, *_: object) -> None:
        self.records = False


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    made = Graph()
    monkeypatch.setattr(accelerator, "capturing", lambda: made.records)
    return made


def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    return torch.optim.SGD([weight], lr=0.1)


def trusted() -> MutationHistory:
    trust = MutationHistory(overlap=True)
    for _ in range(NUM_PROOFS):
        trust.judge({"w"}, ())
    return trust


def saver(fence: Any, trust: MutationHistory, last: _Late | None, given_up: list[str]) -> Any:
    """As much of a saver as looks for graphs."""
    config = SimpleNamespace(close_timeout_s=1.0)
    made: Any = SimpleNamespace(_last_late=last, fence=fence, _trust=trust, _config=config)
    made.give_up = lambda _, reason: given_up.append(reason)
    return made


def test_a_capture_is_not_broken_and_nothing_is_copied_late_ever_after(graph: Graph) -> None:
    steps = optimizer()
    fence, reasons, trust, tensors = (
        Fence(timeout_s=30.0, events=Events()),
        [],
        trusted(),
        {"w": live("w", torch.ones(4))},
    )
    fence.guard([steps])
    never = SimpleNamespace(
        passed=lambda: False, hold_current_streams=lambda: pytest.fail("a capture was made to wait")
    )
    fence._open = job = LateCopyJob([], never, reasons.append)  # type: ignore[arg-type]
    try:
        assert trust.late(tensors) == {"w"}
        with graph:
            steps.step()
        assert fence.num_steps == 0, "nothing ran"
        assert "graph" in job.stop_reason, "the first replay may come while it is copied"
        assert fence.captured
        Saver._look_for_graphs(saver(fence, trust, None, reasons))
        assert trust.late(tensors) == trust.watched(tensors) == set()
    finally:
        fence._open = None
        fence.close()


@pytest.mark.parametrize("replays", [False, True])
def test_a_graph_that_was_captured_before_is_found_by_what_it_does(
    replays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source, given_up, trust = torch.ones(4), [], trusted()
    last = _Late(SimpleNamespace(given_up=""), 7, [("w", source, source.clone())])  # type: ignore[arg-type]
    if replays:
        source.mul_(2)
    fence = SimpleNamespace(captured=False, num_steps=7)
    Saver._look_for_graphs(saver(fence, trust, last, given_up))
    assert bool(given_up) is replays
    assert (trust.late({"w": live("w", source)}) == set()) is replays
    assert ("copied in the call from now on" in caplog.text) is replays


@pytest.fixture
def page() -> Iterator[None]:
    step_snapshot.attach(step_snapshot.make_page())
    yield
    step_snapshot.attach(-1)
    survivor_state.remains.forget()


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize(
    "way",
    [
        "recorded",
        "unseen",
        "seen",
        "accumulated",
        "replayed",
        "replayed at once",
        "replayed and saved",
        "unseen and saved",
    ],
)
def test_a_state_is_live_only_if_its_steps_are_seen(way: str, graph: Graph) -> None:
    """Within an accumulation none is made. Whether a graph makes one there is seen by what is small."""
    model = torch.nn.Linear(2, 2)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    survivor = Survivor(
        State({"model": model, "optimizer": steps}, rank=0, world_size=1), job="job", rank=0, world_size=1
    )
    for number in [2] if way == "replayed at once" else range(3):
        if way == "seen" or (number == 0 and "unseen" not in way):
            steps.step()
        elif way == "recorded" and number == 1:
            with graph:
                steps.step()
        survivor.note(Version(1, number))
    if "saved" in way:  # a save notes its step once more
        survivor.note(Version(1, 2))
    if "replayed" in way:
        survivor._still.why_not = lambda: ""  # type: ignore[method-assign]  # of a device no spots are read
        model.bias.detach().numpy()[1] += 1.0
    survivor.leave()
    is_live = way in ("seen", "accumulated")
    assert (survivor_state.remains.version == Version(1, 2)) is is_live
    assert ("graph" in survivor_state.remains.why) is not is_live
