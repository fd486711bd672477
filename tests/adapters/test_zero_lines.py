"""Scripts that know nothing of holdfast: which are kept, which are left alone, and why; then the contract of doors."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

import forked
from doors_kit import untouched
from holdfast.adapters.zero_lines import doubts
from holdfast.adapters.zero_lines.frameworks import Finder
from holdfast.adapters.zero_lines.launcher import ScriptLauncher
from holdfast.adapters.zero_lines.nested.nested_loop import KeptLoops
from holdfast.adapters.zero_lines.nested.nested_objects import collect
from holdfast.adapters.zero_lines.nested.nested_script import Nest, find_nested
from holdfast.adapters.zero_lines.nested.nested_state import NestedState
from holdfast.adapters.zero_lines.objects import Kept
from holdfast.adapters.zero_lines.reach.reach import Reach
from holdfast.adapters.zero_lines.script_text import HOOK
from holdfast.base.events import Events
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.liveness import group_timeouts, open_checkpointers
from holdfast.elastic.worker.agent_channel import RunOrder
from holdfast.testing.contracts.adapter import CHECKS, Check, Door, Task, Workshop
from holdfast.testing.contracts.adapter_processes import keepers_under
from holdfast.tiers.storage.version_store import open_storage
from ranks_kit import on_all
from sample_kit import MORE

SCRIPT = str(Path(__file__).with_name("zero_script.py"))
IS_OF_USER = Reach(used=(), kept=(), named={}).is_of_user

PLAIN = """
for step in range(10):
    loss = model(data).sum()
    loss.backward()
    optimizer.step()
"""

LEFT_ALONE = {
    "no loop": ("x = 1", "no loop"),
    "holdfast": ("import holdfast\n" + PLAIN, "uses holdfast itself"),
    "holdfast inside": ("def f():\n    from holdfast import Checkpointer\n" + PLAIN, "uses holdfast itself"),
    "while with an else": (
        PLAIN.replace("for step in range(10)", "while True") + "else:\n    pass\n",
        "is a while with an else",
    ),
}


@pytest.mark.parametrize(("source", "reason"), LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_a_script_whose_loop_cannot_be_kept_is_left_alone(source: str, reason: str) -> None:
    found = find_nested(source)
    assert isinstance(found, str)
    assert reason in found


def test_the_loop_is_found_with_what_lives_from_step_to_step() -> None:
    found = find_nested(
        "total, best, unused = 0, 9, 1\n"
        "def train(model):\n    loss = model(data).sum()\n    loss.backward()\n    optimizer.step()\n    return loss\n"
        "for step in range(10):\n    loss = train(net)\n    total += loss.item()\n    now = loss.item()\n"
        "    if now < best:\n        best = now\n        best_step = step\n    text = f'{now}'\n"
        "print(best_step)\n"
    )
    assert isinstance(found, Nest)
    (site,) = found.sites
    assert sorted(site.lives) == ["best", "best_step", "total"]
    assert {"net", "data", "optimizer", "train"} <= set(found.used)
    assert not {"now", "text"} & set(site.lives)


_STEP = "loss = model(data).sum() * weigh(rows)\n    loss.backward()\n    optimizer.step()\n"
_LOOP = f"scale = 1.0\nfor step in range(10):\n    {_STEP}    scale = 0.5**step\n"
_WEIGH = "def weigh(rows):\n    return scale\n"
_INNER = "    {head}:\n        if bad(loss):\n            break\n    else:\n        continue\n    scale = float(loss)\n"
READ_BEHIND_A_NAME = {
    "first of two methods": (
        "class A:\n    def forward(self, x):\n        return scale\n"
        "class B:\n    def forward(self, x):\n        return x\n" + _LOOP
    ),
    "function and method": _WEIGH + "class A:\n    def weigh(self, rows):\n        return 1\n" + _LOOP,
    "two helpers": "def first():\n"
    + "".join(f"    {line}\n" for line in (_WEIGH + _LOOP).splitlines())
    + "def second():\n    def weigh(rows):\n        return 1\n    return weigh\nfirst()\n",
    "function and lambda": _WEIGH + "def other():\n    weigh = lambda rows: 1\n    return weigh\n" + _LOOP,
    "argument of an inner lambda": (
        "def weigh(rows):\n    rows.sort(key=lambda scale: -scale)\n    return rows[0] * scale\n" + _LOOP
    ),
    "default of a lambda": _LOOP.replace("weigh(rows)", "call(lambda scale=scale: scale)"),
    "items of a comprehension": _LOOP.replace("weigh(rows)", "sum([scale for scale in scale])"),
    "continue in the else of a for": (
        f"for step in range(10):\n    {_STEP}" + _INNER.format(head="for row in rows") + "print(scale)\n"
    ),
    "continue in the else of a while": (
        f"for step in range(10):\n    {_STEP}" + _INNER.format(head="while loss > 1") + "print(scale)\n"
    ),
}


@pytest.mark.parametrize("source", READ_BEHIND_A_NAME.values(), ids=READ_BEHIND_A_NAME.keys())
def test_a_name_that_any_bearer_of_a_name_may_read_lives_from_step_to_step(source: str) -> None:
    found = find_nested(source)
    assert isinstance(found, Nest)
    assert "scale" in found.sites[0].lives


def test_names_of_classes_and_lambdas_do_not_live_from_step_to_step() -> None:
    inner = "    class Way:\n        size = 1\n        def weigh(self, rows):\n            return 1\n    rows.sort(key=lambda row: -row)\n"
    found = find_nested("for step in range(10):\n" + inner + f"    {_STEP}")
    assert isinstance(found, Nest)
    assert not {"weigh", "size", "row", "self"} & {*found.sites[0].lives}


@pytest.mark.parametrize(
    ("behind", "world", "is_alike"),
    [
        ("print(step, loss.item())", 2, True),
        ("print(seen)", 2, False),  # which one rank may have as a number and another as what cannot be carried
        ("print(seen)", 1, True),
        ("print(model.weight.grad)", 2, False),
    ],
)
def test_all_ranks_or_none_have_the_last_step_in_a_version(behind: str, world: int, is_alike: bool) -> None:
    """One rank that left it out would have the others wait for its part when they close, for minutes."""
    nest = find_nested(PLAIN + f"    loss = seen = look()\n{behind}\n")
    assert isinstance(nest, Nest)
    (site,) = nest.sites
    entry: Any = SimpleNamespace(site=site, drawn="", items=SimpleNamespace(size=10))
    group: Any = SimpleNamespace(rank=0, world_size=world)
    assert NestedState(nest, entry, {}, group).is_alike(entry) == is_alike


def named(**more: object) -> dict[str, object]:
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters()), **more}


SURE: dict[str, Callable[[], dict[str, object]]] = {
    "plain": named,
    "scheduler": lambda: (n := named()) | {"s": torch.optim.lr_scheduler.StepLR(n["optimizer"], 1)},  # type: ignore[arg-type]
    "text": lambda: named(s="x"),
    "list": lambda: named(s=[1, 2.5]),
    "tensor": lambda: named(s=torch.ones(2)),
    "batches": lambda: named(s=[torch.ones(2)]),
    "function": lambda: named(s=len),
}
UNSURE: dict[str, Callable[[], dict[str, object]]] = {
    "iterator": lambda: named(s=iter([1])),
    "generator": lambda: named(s=(x for x in ())),
    "foreign parameters": lambda: named(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])),
    "bare parameter": lambda: named(s=torch.ones(2, requires_grad=True)),
}


@pytest.mark.parametrize("scope", SURE.values(), ids=SURE.keys())
def test_what_can_be_restored_is_kept(scope: Callable[[], dict[str, object]]) -> None:
    names = scope()
    found = collect(names, names, IS_OF_USER)
    assert isinstance(found, Kept), found
    assert {"model", "optimizer"} <= found.objects.keys()


@pytest.mark.parametrize("scope", UNSURE.values(), ids=UNSURE.keys())
def test_what_nobody_can_be_sure_of_keeps_the_script_from_being_touched(scope: Callable[[], dict[str, object]]) -> None:
    names = scope()
    assert isinstance(collect(names, names, IS_OF_USER), str)


class Counting:
    """An object of the script with a state; `state_dict` is its own business."""

    def __init__(self) -> None:
        self.asked = 0
        self.named, self._other, self.extra = torch.zeros(2), torch.zeros(3), [torch.zeros(1)]

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"named": self.named, "values": [self._other]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_an_object_is_asked_for_its_state_only_where_it_has_something_new() -> None:
    """A `state_dict` may cost, count, or wait for other ranks: it is not called at every step to look at attributes."""
    thing = Counting()
    reach = Reach(used=("thing",), kept=[thing], named={id(thing): "thing"})

    def looked() -> set[str]:
        return {path for path in reach.look({"thing": thing}, []).fixed if path.startswith("thing.")}

    assert looked() == looked() == {"thing.extra"}
    assert thing.asked == 1
    thing.named = torch.ones(2)
    looked()
    assert thing.asked == 1, "it is handed out under its name"
    thing._other = torch.ones(3)
    assert "thing._other" not in looked()
    assert thing.asked == 2, "other memory may be in nobody's state"
    thing.late = torch.ones(1)  # type: ignore[attr-defined]
    assert "thing.late" in looked()
    looked()
    assert thing.asked == 3


TWO_LOOPS = """
if first:
    for step in range(2):
        model(data).sum().backward()
        optimizer.step()
for step in range(3):
    model(data).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def nothing_open() -> Iterator[None]:
    """As in a process that has just been started: whatever earlier tests left open is not the script's."""
    open_checkpointers.abandon_all()
    yield
    open_checkpointers.abandon_all()


def kept_by_two_ranks(
    script: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    trains: Callable[[int, Callable[[Mapping[str, object]], None]], None],
) -> list[object]:
    """What each rank keeps; `trains` is given its number, and runs the script with the names that it has."""
    nest = find_nested(script)
    assert isinstance(nest, Nest)
    code = compile(nest.tree, "train.py", "exec")
    mine = threading.local()
    monkeypatch.setattr(collectives, "ranks", lambda: mine.rank)
    # Two ranks of one process wrap the same function of torch, and take their wraps off in any order.
    loaders = torch.utils.data.DataLoader
    monkeypatch.setattr(loaders, "_get_iterator", loaders._get_iterator)

    def begin(rank: collectives.Ranks) -> object:
        mine.rank = rank
        hook = KeptLoops(nest, str(root))
        trains(rank.rank, lambda names: exec(code, {**names, HOOK: hook}))
        return hook._run

    return on_all(2, begin)


@pytest.mark.usefixtures("nothing_open")
def test_what_one_rank_is_not_sure_of_keeps_all_ranks_from_being_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:

    def trains(rank: int, run: Callable[[Mapping[str, object]], None]) -> None:
        names = named(data=torch.ones(2) if rank == 0 else iter([1]), model=torch.nn.Linear(2, 2))
        names["optimizer"] = torch.optim.SGD(names["model"].parameters())  # type: ignore[attr-defined]
        with pytest.raises(TypeError) if rank else contextlib.nullcontext():  # its model does not take this data
            run(names)

    assert kept_by_two_ranks(PLAIN, tmp_path / "root", monkeypatch, trains) == [None, None]
    assert "rank 1: nobody can be sure what 'data'" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("nothing_open")
def test_ranks_that_come_to_different_loops_are_kept_on_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 warms up alone, and the other one waits for it in the training of all: their steps do not belong together."""

    def trains(rank: int, run: Callable[[Mapping[str, object]], None]) -> None:
        run(named(data=torch.ones(2), first=rank == 0))

    assert kept_by_two_ranks(TWO_LOOPS, tmp_path / "root", monkeypatch, trains) == [None, None]
    assert "rank 0: another rank comes to the loop of line 6" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_loop_to_which_only_some_ranks_come_is_kept_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 trains while the others stand in a barrier of the script: nobody waits for them, and all have the same answer."""
    monkeypatch.setattr(doubts.dist, "is_initialized", lambda: True)

    def asked(come: int, patience_s: float) -> list[bool]:
        store = HashStore()
        monkeypatch.setattr(doubts.dist.distributed_c10d, "_get_default_store", lambda: store)

        def ask(rank: collectives.Ranks) -> bool | None:
            return doubts.have_all_come(rank, patience_s) if rank.rank < come else None

        return on_all(3, ask)

    assert asked(3, 60.0) == [True] * 3
    assert asked(2, 0.1) == [False, False, None]
    late = collectives.Alone()
    late.world_size = 3  # it comes when the others have gone on
    assert not doubts.have_all_come(late, 60.0)


@pytest.mark.parametrize(
    ("turns", "collectives_of_both", "belong"),
    [
        (
            [[[0, 8]], [[0, 9]]],
            [{"0": 40}, {"0": 45}],
            False,
        ),  # one left a step of its optimizer out, and averaged all the same
        ([[[0, 8]], [[0, 16]]], [{"0": 40}, {"0": 40}], True),  # one accumulates twice as many batches
        (
            [[[0, 1], [1, 8]], [[0, 1], [1, 8]]],
            [{"0": 40}, {"0": 43}],
            True,
        ),  # a thread of the script has a collective on its way
        ([[[0, 8]], [[0, 9]]], [{"0": 40, "1": 3}, {"0": 40, "2": 5}], True),  # groups of which only one is a member
    ],
)
def test_what_ranks_saved_at_different_points_of_the_job_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
    turns: list[list[list[int]]],
    collectives_of_both: list[dict[str, int]],
    belong: bool,
) -> None:
    store = HashStore()
    monkeypatch.setattr(doubts.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(doubts.dist.distributed_c10d, "_get_default_store", lambda: store)
    cuts = [{"turns": each, "collectives": made} for each, made in zip(turns, collectives_of_both, strict=True)]
    assert [doubts.belongs(7, cut) for cut in cuts] == [True, belong]
    assert all(doubts.belongs(8 + number, cut) for number, cut in enumerate(cuts)), "of another version each"


def test_what_ranks_sent_each_other_before_they_train_does_not_tell_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo counts it: after a `monitored_barrier` the first rank has a higher number than the others, and after a restore too."""
    made = [7, 3]

    class Counting:
        def _get_sequence_number_for_group(self) -> int:
            return made[rank]

    monkeypatch.setattr(doubts.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(doubts.dist.distributed_c10d, "_world", SimpleNamespace(pg_names={Counting(): "0"}))
    states = []
    for rank in range(2):
        state = NestedState(SimpleNamespace(), SimpleNamespace(drawn=""), {}, collectives.Alone())  # type: ignore[arg-type]
        state.all_are_here()
        made[rank] += 5
        states.append(doubts.collectives_made(state._made_before))
    assert states == [{"0": 5}, {"0": 5}]


def test_ranks_that_nobody_can_ask_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script may train before its process group is there, or with torch's fake one, whose collectives do nothing."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert doubts.ranks(Events()) is None
    assert "not kept, where its loop begins the launcher started 2 ranks" in capfd.readouterr().err
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        assert group_timeouts.limit_of(dist.group.WORLD) is None
        assert doubts.ranks(Events()) is None
    finally:
        dist.destroy_process_group()
    assert "torch's fake one" in capfd.readouterr().err


def test_other_ranks_are_waited_for_a_small_part_of_what_collectives_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(doubts.group_timeouts, "limit_of", lambda _: timedelta(seconds=20))
    assert doubts.patience() == 5.0
    monkeypatch.setattr(doubts.group_timeouts, "limit_of", lambda _: timedelta(minutes=30))
    assert doubts.patience() == 30.0


ACCUMULATES = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(1, 2)).sum().backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
print("through")
"""


@pytest.mark.usefixtures("nothing_open")
def test_versions_follow_optimizer_steps_and_script_ends_normally(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_DURABLE_EVERY", "1")
    script = tmp_path / "train.py"
    script.write_text(ACCUMULATES.replace("range(4)", "range(12)"))
    kept = ScriptLauncher(str(tmp_path / "root"))
    kept(RunOrder(1, arguments=(str(script),)))
    assert "through" in capfd.readouterr().out
    steps = [version.step for version in open_storage(tmp_path / "root", Events()).versions()]
    assert max(steps) == 5, "the last of six steps of the optimizer"
    open_checkpointers.abandon_all()
    kept(RunOrder(2, arguments=(str(script),)))
    told = capfd.readouterr()
    assert "the loop of line 7 has made all its steps" in told.err
    assert "through" in told.out


ENDS_EARLY = """
import torch

class Buckets(torch.utils.data.Sampler):
    def __len__(self):
        return 9
    def __iter__(self):
        return iter([[0, 1], [2], [3]])

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_sampler=Buckets())
for batch in loader:
    seen = model(batch.unsqueeze(1))
    loss = seen.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", READ)
"""


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize(("read", "is_carried"), [("loss.item()", True), ("[seen]", False), ("1", True)])
def test_what_is_read_behind_a_loop_that_ends_before_its_length_is_saved_or_refused(
    read: str,
    is_carried: bool,
    tmp_path: Path,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOLDFAST_DURABLE_EVERY", "1")
    (script := tmp_path / "train.py").write_text(ENDS_EARLY.replace("READ", read))
    kept = ScriptLauncher(str(tmp_path / "root"))
    kept(RunOrder(1, arguments=(str(script),)))
    first = capfd.readouterr()
    assert ("ends before the number of its items that was told" in first.err) is not is_carried
    if not is_carried:
        return
    open_checkpointers.abandon_all()
    kept(RunOrder(2, arguments=(str(script),)))
    again = capfd.readouterr()
    assert again.out == first.out
    assert again.out.startswith("END")
    assert "the loop of line 14 has made all its steps" in again.err


@pytest.mark.usefixtures("nothing_open")
@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x = 1\n", ["script_refused: no loop with backward() and step() was found"]),
        (ACCUMULATES, ["script_kept: model, optimizer"]),
        (
            ACCUMULATES.replace("for step", "data = iter([1])\nfor step").replace(
                "    model(", "    next(data, 0)\n    model("
            ),
            ["script_refused: nobody can be sure what 'data', a list_iterator, keeps from one step to the next"],
        ),
        (
            ACCUMULATES.replace("    model(", "    model.found = [torch.ones(3, 2).t()]\n    model("),
            [
                "script_kept: model, optimizer",
                "script_refused: 'model.found' came to be in the loop (line 8), and cannot be carried to a restart: it has a tensor that is a view, sparse or quantized, or has attributes in it",
            ],
        ),
    ],
)
def test_what_is_kept_or_refused_is_an_event(
    source: str, told: list[str], tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_DURABLE_EVERY", "1")
    events, heard = Events(), list[str]()
    events.subscribe(
        lambda event: heard.append(f"{event.name}: {event.fields.get('reason', event.fields.get('objects'))}")
    )
    script = tmp_path / "train.py"
    script.write_text(source)
    ScriptLauncher(str(tmp_path / "root"), events)(RunOrder(1, arguments=(str(script),)))
    lines = [line for line in heard if line.startswith("script_lines")]
    assert [line for line in heard if line.startswith("script_") and line not in lines] == told
    assert bool(lines) == ("optimizer.step()" in source and told[-1].startswith("script_refused"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"\xef\xbb\xbfx = '\xc3\xa9'\n", "no loop"),
        (b"# -*- coding: latin-1 -*-\nx = '\xe9'\n", "no loop"),
        (b"# one\n# two\nx = '\xe9'\n", "its text cannot be read: UnicodeDecodeError"),
        (b"# coding: none\n", "its text cannot be read: SyntaxError"),
        (b"x = '\0'\n", "its text cannot be read: "),
    ],
)
@pytest.mark.parametrize("by_order", [False, True])
def test_a_text_is_read_as_python_reads_it_and_refused_if_it_cannot_be(
    text: bytes, why: str, by_order: bool, tmp_path: Path
) -> None:
    (script := tmp_path / "train.py").write_bytes(text)
    events, heard = Events(), list[str]()
    events.subscribe(lambda event: heard.append(f"{event.name}: {event.fields.get('reason')}"))
    order = RunOrder(1, arguments=(str(script),), text=text.decode("latin-1") if by_order else "")
    with contextlib.nullcontext() if why == "no loop" else pytest.raises((SyntaxError, ValueError)):
        ScriptLauncher(str(tmp_path / "root"), events)(order)
    assert [line for line in heard if why in line] == heard != []


def test_a_script_with_a_trainer_is_not_frightened(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It has no loop of its own, and need not have one."""
    script = tmp_path / "train.py"
    script.write_text("x = 1\n")
    ScriptLauncher(str(tmp_path / "root"))(RunOrder(1, arguments=(str(script),)))
    (line,) = capfd.readouterr().err.splitlines()
    assert "no loop of this script is kept" not in line
    assert "a Trainer of transformers or Lightning is kept when it is built" in line
    assert "any other training begins anew at a restart" in line


@pytest.mark.parametrize("imported", [False, True])
def test_the_trainer_of_a_script_that_imports_holdfast_is_left_to_its_line(
    imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Even where the import is never made; and the script is told so."""
    place = tmp_path / "pytorch_lightning" / "trainer"
    place.mkdir(parents=True)
    (place / "trainer.py").write_text("class Trainer: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["pytorch_lightning", "pytorch_lightning.trainer", "pytorch_lightning.trainer.trainer"]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    script = tmp_path / "train.py"
    script.write_text(
        "if len('x') > 1:\n    import holdfast\n" * imported
        + f"from {names[-1]} import Trainer\nprint('changed', '__init__' in vars(Trainer))\n"
    )
    try:
        ScriptLauncher(str(tmp_path / "root"))(RunOrder(1, arguments=(str(script),)))
    finally:
        for name in names:
            sys.modules.pop(name, None)
    told = capfd.readouterr()
    assert told.out == f"changed {not imported}\n"
    assert ("nothing of this script is kept without a line" in told.err) is imported


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("deepspeed.runtime.engine", "checkpoint_engine"),
        ("megatron.core.dist_checkpointing.serialization", "strategies"),
    ],
)
def test_frameworks_that_decide_by_themselves_are_left_alone_and_their_line_is_said(
    module: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *packages, name = module.split(".")
    folder = tmp_path.joinpath(*packages)
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text("class Trainer: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for loaded in [each for each in sys.modules if each.split(".")[0] == packages[0]]:
        monkeypatch.delitem(sys.modules, loaded)
    for says in (True, False):
        finder = Finder("ckpts/run1", says=says)
        finder.install()
        try:
            kind = importlib.import_module(module).Trainer
        finally:
            finder.remove()
        told = capsys.readouterr().err
        assert (f'{line}("ckpts/run1")' in told or f'{line}(engine, "ckpts/run1")' in told) is says
        assert vars(kind).get("__init__") is None, "nothing of it is changed"
        for loaded in [each for each in sys.modules if each.split(".")[0] == packages[0]]:
            del sys.modules[loaded]


def start(task: Task) -> list[str]:
    script = [SCRIPT, "--steps", str(task.steps), *(["--wide"] if task.changed else [])]
    ranks = ["--standalone", "--nproc-per-node", str(task.ranks)]
    if task.plain:
        return [sys.executable, "-m", "torch.distributed.run", *ranks, *script]
    return [
        sys.executable,
        "-m",
        "holdfast.adapters.zero_lines.launcher",
        "--checkpoint-dir",
        str(task.checkpoints),
        *ranks,
        *script,
    ]


def popen(*args: object, **options: object) -> forked.Popen:
    return forked.Popen(*args, **options, warm_children=True)  # type: ignore[arg-type]


# Steps are quick here: so many that some are left when the kill comes, on a loaded machine too.
DOOR = Door(start, twins=2, steps=40)


def test_killed_in_the_middle_and_back_bit_for_bit(tmp_path: Path) -> None:
    with Workshop(tmp_path, popen=popen) as made:
        CHECKS["killed_in_the_middle_it_goes_on_bit_for_bit"](DOOR, made)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_contract_of_doors(check: Check, tmp_path: Path) -> None:
    with Workshop(tmp_path, popen=popen) as made:
        check(DOOR, made)


# The second one in the list is a view, which is not carried.
ONE_RANK_IS_UNSURE = """
import argparse, os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
args = argparse.Namespace(factor=[torch.ones(2), torch.ones(3, 2).t()])
for step in range(20):
    loss = model(torch.full((2, 4), float(step % 7))).square().mean() * args.factor[0].sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 1 and step == 6:
        args.factor[0].mul_(2)
    if rank == 0 and step == 12 and not os.path.exists(os.environ["MARK"]):
        open(os.environ["MARK"], "w").close()
        os.kill(os.getpid(), 9)
weights = [p.tolist() for p in model.parameters()]
print(f"END {rank} {args.factor[0].tolist()} {weights} {optimizer.state_dict()['state'][0]['step']}\\n", end="", flush=True)
dist.destroy_process_group()
"""


# A tensor that is kept by its name gets another shape, on all ranks: the version has another layout than the script.
ALL_RANKS_ARE_UNSURE = (
    ONE_RANK_IS_UNSURE.replace("args.factor[0]", "factor")
    .replace("args = argparse.Namespace(factor=[torch.ones(2), torch.ones(3, 2).t()])", "factor = torch.ones(2)")
    .replace("    if rank == 1 and step == 6:\n        factor.mul_(2)", "    factor.resize_(step + 3).fill_(2)")
)


@MORE
@pytest.mark.parametrize(
    ("source", "doubt"),
    [
        (ONE_RANK_IS_UNSURE, "'args.factor[0]' changes in the loop"),
        (ALL_RANKS_ARE_UNSURE, "'the shape of factor' changes in the loop"),
    ],
    ids=["one rank", "another shape on all ranks"],
)
def test_what_one_rank_must_not_take_is_loaded_by_none(
    source: str, doubt: str, tmp_path: Path, runtime_dir: Path
) -> None:
    """The ranks that would take it go on with what their script made, optimizer state included."""
    script = tmp_path / "train.py"
    script.write_text(source)

    def ends(mark: Path, module: list[str]) -> tuple[list[str], str]:
        environment = {**os.environ, "MARK": str(mark), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", *module, "--standalone", "--nproc-per-node", "2", str(script)]
        options: dict[str, Any] = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
        told = forked.run(command, warm_children=True, **options)
        assert told.returncode == 0, told.stderr
        lines = (line.partition("END ")[2] for line in told.stdout.splitlines())
        return sorted(filter(None, lines)), told.stderr

    (tmp_path / "never").touch()
    undisturbed, _ = ends(tmp_path / "never", ["torch.distributed.run"])
    assert len(undisturbed) == 2
    try:
        told, said = ends(
            tmp_path / "once", ["holdfast.adapters.zero_lines.launcher", "--checkpoint-dir", str(tmp_path / "root")]
        )
    finally:
        for keeper in keepers_under(runtime_dir):  # it holds what was saved, for a while
            keeper.kill()
            keeper.wait(20)
        shutil.rmtree(runtime_dir)
    assert f"rank 1: this script is not kept any more, {doubt}" in said
    assert "the run that saved was not sure of it" in said
    assert told == undisturbed


NESTED = """
import argparse, json, os
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
epochs = parser.parse_args().steps // 3
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("door", json.dumps({"rank": 0, "start": 0}), flush=True)
epoch = 0
while epoch < epochs:
    for batch in range(3):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("door", json.dumps({"rank": 0, "step": 3 * epoch + batch, "digest": loss.item().hex()}), flush=True)
    epoch += 1
"""
UNSURE_AT_THE_LOOP = (
    NESTED.replace("    epoch += 1\n", "")
    .replace("while epoch < epochs:\n", "batches = iter(range(999))\nif True:\n")
    .replace(
        "    for batch in range(3):\n",
        "    for step in range(3 * epochs):\n        next(batches); epoch, batch = divmod(step, 3)\n",
    )
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "reason"),
    [(NESTED + "else: pass", "is a while with an else"), (UNSURE_AT_THE_LOOP, "nobody can be sure what 'batches'")],
    ids=["a while with an else is seen in the text", "seen when the loop begins"],
)
def test_a_script_that_is_not_kept_runs_as_ever_and_is_told_what_that_means(
    source: str, reason: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    door = Door(untouched(script), ranks=1, steps=6)
    with Workshop(tmp_path, popen=popen) as made:
        plain = made.run(door, Task(made.directory("plain"), 1, 6, plain=True))
        for _ in range(2):  # the second time it begins anew, as was told
            told = made.run(door, Task(made.directory("not kept"), 1, 6))
            assert told.steps == plain.steps
            assert len(told.steps) == 6
            line, *lines = [line for line in told.output.splitlines() if reason in line]
            assert all("no lines can be given" in each for each in lines)
            assert "nothing of it is saved, and a restart begins it anew" in line
            assert "holdfast.Checkpointer" in line
        assert not list(made.directory("not kept").rglob("*manifest*"))
