"""`holdfast prove` on scripts that are right, wrong, not deterministic and not kept; with kills of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import forked
from holdfast.base import program
from holdfast.testing.prove import prove
from holdfast.testing.prove.run_notes import RunNotes
from holdfast.testing.prove.script_run import strays
from holdfast.testing.prove.step_digests import OptimizerParts, digest
from holdfast.testing.prove.step_log import Made, Parts, Said, StepLog, read_lives
from sample_kit import MORE

PLAIN = """
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(12):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"ends with {loss.item():.4f}")
"""

# The lines of the README, and a value that lives on and is in no version.
FORGETS = """
import sys
import torch
import holdfast

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
average = torch.zeros(4)
ckpt = holdfast.Checkpointer(sys.argv[1], model=model, optimizer=optimizer)
for step in range(ckpt.restore(), 12):
    data = torch.randn(8, 4)
    average = 0.9 * average + data.mean(0)
    loss = (model(data - average) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.step(step)
ckpt.close()
"""

TWO_RANKS = """
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
torch.manual_seed(dist.get_rank())
for step in range(12):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""

TWO_OPTIMIZERS = """
import sys
import torch
import holdfast

torch.manual_seed(0)
torch.set_num_threads(1)
maker, judge = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
makers, judges = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
ckpt = holdfast.Checkpointer(sys.argv[1], model=[maker, judge], optimizer=[makers, judges])
for step in range(ckpt.restore(), 8):
    made = maker(torch.randn(8, 2))
    judges.zero_grad()
    (judge(made.detach()).mean() - judge(torch.randn(8, 4)).mean()).backward()
    judges.step()
    makers.zero_grad()
    (-judge(made).mean()).backward()
    makers.step()
    ckpt.step(step)
ckpt.close()
"""


# A function that is entered again: one process makes its first steps and those behind the restart.
RESUMABLE = """
import sys
import torch
import torch.distributed as dist
import holdfast

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
torch.manual_seed(dist.get_rank())


@holdfast.resumable
def train():
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ckpt = holdfast.Checkpointer(sys.argv[1], model=ddp, optimizer=optimizer)
    for step in range(ckpt.restore(), 12):
        loss = ddp(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.step(step)
    ckpt.close()


train()
dist.destroy_process_group()
"""


def popen(*args: Any, **options: Any) -> Any:
    return forked.Popen(*args, **options, warm_children=True)


class Bench:
    """One directory with one script, and `holdfast prove` in it."""

    def __init__(self, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._place, self._capfd = place, capfd

    def script(self, text: str, name: str = "train.py") -> str:
        (self._place / name).write_text(text)
        return name

    def prove(self, *words: str, keep: str = "kept") -> tuple[int, dict[str, Any]]:
        """Exit code and facts."""
        code = prove.main(["--json", "--keep", keep, "--timeout", "200", *words], popen=popen)
        told = self._capfd.readouterr()
        return code, json.loads(told.out) if told.out else {"told": told.err}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Bench:
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path, capfd)


# A value that lives on, is in no version, and that no parameter depends on.
SHOWS = FORGETS.replace("model(data - average)", "model(data)")


@pytest.mark.timeout(600)
def test_what_holdfast_warned_of_is_told_where_every_step_is_equal(bench: Bench) -> None:
    code, facts = bench.prove("--kills", "1", "--seed", "3", bench.script(SHOWS), "{dir}")
    assert (code, facts["outcome"]) == (0, "equal"), facts
    assert "holdfast warns that the script changes what is in no version: average" in facts["kills"][0]["notes"]


@pytest.mark.timeout(600)
def test_a_forgotten_value_is_found_at_the_step_behind_the_restart(bench: Bench) -> None:
    code, facts = bench.prove("--kills", "1", "--seed", "3", bench.script(FORGETS), "{dir}")
    assert (code, facts["outcome"]) == (1, "differs"), facts
    (kill,) = facts["kills"]
    assert "weight" in kill["difference"]["what"]
    assert kill["difference"]["life"] == 1
    assert kill["difference"]["step"] == kill["resumed_at"] > 1


def test_a_daemon_of_the_script_is_found_by_its_environment(tmp_path: Path) -> None:
    log, other = tmp_path / "kill-1" / "steps", tmp_path / "kill-11" / "steps"
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    environment = {**os.environ, **RunNotes(str(log), []).variable()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    daemon = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    try:
        daemon.stdout.readline()  # the kernel shows no environment of a process that has only begun
        assert strays(log) == [daemon.pid]
        assert strays(other) == []
    finally:
        daemon.kill()
        daemon.communicate()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_plain_loop_is_equal(bench: Bench) -> None:
    code, facts = bench.prove("--kills", "1", "--seed", "3", bench.script(PLAIN))
    assert (code, facts["outcome"]) == (0, "equal"), facts
    (kill,) = facts["kills"]
    assert facts["steps"] == {"0": 12}
    assert kill["resumed_at"] > 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_kills_of_two_ranks(bench: Bench) -> None:
    code, facts = bench.prove("--kills", "6", "--nproc-per-node", "2", bench.script(TWO_RANKS))
    assert (code, facts["outcome"]) == (0, "equal"), facts
    assert {kill["kill"]["rank"] for kill in facts["kills"]} == {0, 1}
    assert sum(kill["resumed_at"] > 1 for kill in facts["kills"]) > 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_of_two_optimizers_is_compared(bench: Bench) -> None:
    code, facts = bench.prove("--kills", "4", bench.script(TWO_OPTIMIZERS), "{dir}")
    assert (code, facts["outcome"], facts["steps"]) == (0, "equal", {"0": 16}), facts
    forgets = TWO_OPTIMIZERS.replace("[makers, judges]", "judges")
    code, facts = bench.prove("--kills", "1", "--seed", "4", bench.script(forgets), "{dir}", keep="forgets")
    (kill,) = facts["kills"]
    assert (code, facts["outcome"]) == (1, "differs"), facts
    assert kill["difference"]["step"] % 2 == 0, "the optimizer that was not given makes the even steps"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_function_that_is_entered_again_is_a_life_of_its_own(bench: Bench, tmp_path: Path) -> None:
    code, facts = bench.prove("--kills", "1", "--nproc-per-node", "2", bench.script(RESUMABLE), "{dir}")
    assert (code, facts["outcome"]) == (0, "equal"), facts
    lives = {path.name for path in (tmp_path / "kept" / "kill-1" / "steps").iterdir()}
    assert lives == {f"rank{rank}-life{life}.steps" for rank in (0, 1) for life in (0, 1)}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_script_that_differs_by_itself_is_not_proved(bench: Bench) -> None:
    code, facts = bench.prove(
        bench.script(PLAIN.replace("    loss =", "    if step == 6:\n        torch.seed()\n    loss ="))
    )
    assert (code, facts["outcome"], facts["kills"]) == (4, "cannot be proved", [])
    assert "two undisturbed runs differ: step 7 on rank 0" in facts["why"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("words", [(), ("-m",)], ids=["script", "module"])
def test_a_script_that_is_not_kept_is_told_with_the_reason(words: tuple[str, ...], bench: Bench) -> None:
    script = bench.script(
        PLAIN.replace("    loss =", "    if step == 3:\n        model.seen = [torch.ones(1)]\n    loss =")
    )
    code, facts = bench.prove("--seed", "5", *words, script.removesuffix(".py") if words else script)
    assert (code, facts["outcome"]) == (3, "not kept"), facts
    assert len(facts["kills"]) == 1, "the others would say the same"
    assert ("model.seen", "-m")[len(words)] in facts["kills"][0]["why"]
    assert words or "no lines can be given" in facts["kills"][0]["lines"][0]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_script_that_fails_or_hangs_is_told(bench: Bench) -> None:
    code, facts = bench.prove(bench.script("raise ValueError('no data')"))
    assert (code, facts["outcome"]) == (4, "cannot be proved")
    assert "no data" in facts["why"]
    code, facts = bench.prove(bench.script("print(1)"), keep="no-steps")
    assert (code, facts["why"]) == (4, "no step of an optimizer of torch.optim was made")
    code, facts = bench.prove("--timeout", "15", bench.script("import time\ntime.sleep(600)"), keep="hangs")
    assert code == 4
    assert "did not end in time" in facts["why"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_copy_of_the_directory_keeps_runs_apart(bench: Bench, tmp_path: Path) -> None:
    """A script that goes on from its own file is proved in copies, and not in its directory."""
    goes_on = PLAIN.replace(
        "for step in range(12)", "import os\nfor step in range(2 if os.path.exists('model.pt') else 12)"
    )
    script = bench.script(goes_on + "torch.save(model.state_dict(), 'model.pt')\n")
    code, facts = bench.prove("--kills", "1", "--seed", "3", "--fresh-copy", script)
    assert facts["outcome"] == "equal", facts
    assert code == 0
    assert not (tmp_path / "model.pt").exists()
    code, facts = bench.prove("--kills", "1", script, keep="in-place")
    assert code == 4
    assert "one run made 12 steps, the other 2" in facts["why"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_checkpoints_of_other_runs_are_not_touched(bench: Bench, tmp_path: Path) -> None:
    """The script does not import holdfast itself, and what it imports has a path of its own."""
    bench.script(FORGETS.replace("sys.argv[1]", "'ckpts'"), "helper.py")
    code, facts = bench.prove(bench.script("import helper"))
    assert code == 4
    assert str(tmp_path / "ckpts") in facts["why"]
    assert not [path for path in tmp_path.rglob("*.safetensors") if "kept" not in path.parts]


def test_wrong_usage_is_told_before_anything_runs(bench: Bench, tmp_path: Path) -> None:
    script = bench.script(FORGETS)
    code, facts = bench.prove(script, "ckpts")
    assert code == 2
    assert "write {dir} where its arguments name the directory" in facts["told"]
    assert bench.prove("nothing.py")[0] == 2
    assert bench.prove("-m", "no.such.module")[0] == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    code, facts = bench.prove(script, "{dir}", keep="full")
    assert code == 2
    assert "is not an empty directory" in facts["told"]


def test_a_module_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "__main__.py").write_text("import holdfast.base")
    (package / "train.py").write_text("import torch")
    for word, own in (("mine", True), ("mine.train", False)):
        source = prove.source_of(word, is_module=True)
        assert source is not None
        assert prove.imports_holdfast(source) is own
    assert prove.source_of("mine.other", is_module=True) is None


@MORE
@pytest.mark.timeout(120)
def test_ctrl_c_ends_everything_and_says_where_the_logs_are(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)")
    command = program.command("holdfast.testing.prove.prove", "--keep", "kept", "train.py")
    with (tmp_path / "told").open("w") as told:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=told, stderr=told)
    output = tmp_path / "kept" / "undisturbed-1" / "output"
    deadline = time.monotonic() + 90
    while not (output.exists() and "begun" in output.read_text()):
        assert process.poll() is None, (tmp_path / "told").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) > 1
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert not [each for each in psutil.wait_procs(family, timeout=20)[1] if each.status() != psutil.STATUS_ZOMBIE]
    assert f"What there is: {tmp_path / 'kept'}" in (tmp_path / "told").read_text()


def test_steps_are_written_so_that_a_kill_cuts_the_last_one_only(tmp_path: Path) -> None:
    log = StepLog(tmp_path, 3)
    log.write(Parts(0, "SGD", ["weight"]))
    log.write(Made(0, bytes(8), b"r" * 8))
    log.write(Said("script_refused", {"reason": "no loop"}))
    log.write(Made(0, bytes([1] * 8), b"r" * 8))
    log.close()
    second = StepLog(tmp_path, 3)
    second.close()
    assert second.life == 1
    path = tmp_path / "rank3-life0.steps"
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        life, empty = read_lives(tmp_path)[3]
        assert len(life.steps) == (2 if length == len(whole) else len(life.steps))
        assert [step.digests[0] for step in life.steps] == list(range(len(life.steps)))
        assert not empty.steps
    assert prove.refusal(read_lives(tmp_path)) == "no loop"


def test_a_digest_is_of_everything_that_a_step_leaves_and_changes_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    parts = OptimizerParts(optimizer)
    before = dict(parts.look(optimizer))
    assert {"0.weight", "exp_avg of 1.bias", "step of 0.bias", "buffer 1.running_mean"} <= before.keys()
    assert dict(parts.look(optimizer)) == before
    random = torch.get_rng_state()
    changes = {
        "1.weight": lambda: model[1].weight.data.add_(1),
        "exp_avg_sq of 0.weight": lambda: optimizer.state[model[0].weight]["exp_avg_sq"].add_(1),
        "step of 0.bias": lambda: optimizer.state[model[0].bias].update(step=torch.tensor(9.0)),
        "buffer 1.num_batches_tracked": lambda: model[1].num_batches_tracked.add_(1),
    }
    for name, change in changes.items():
        change()
        after = dict(parts.look(optimizer))
        assert {each for each in after if after[each] != before[each]} == {name}
        before = after
    optimizer.param_groups[0]["lr"] = 0.2
    (changed,) = (each for each, found in parts.look(optimizer) if found != before[each])
    assert changed.startswith("settings of group 0")
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    "value", [torch.zeros(0), torch.tensor(1.0), torch.ones(2, dtype=torch.bfloat16).t(), torch.eye(2).to_sparse()]
)
def test_any_tensor_has_a_digest_of_its_bytes(value: torch.Tensor) -> None:
    assert digest(value) == digest(value.clone())
    assert digest(value) != digest(value.to(torch.float64))
    if value.numel():
        assert digest(value) != digest(value * 2)


def test_the_command_is_a_program_of_its_own() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", "from holdfast.cli.cli import app; app(['prove', '--help'])"],
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    for flag in ("--kills", "--seed", "--nproc-per-node", "--timeout", "--keep", "--fresh-copy", "--json", "{dir}"):
        assert flag in answer.stdout
    assert "3 the script is not kept" in " ".join(answer.stdout.split())
