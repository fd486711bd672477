"""The recipe for Slurm with Slurm itself: a controller and two nodes of Debian's packages, in namespaces of this machine.

Every job ends with the bits of an undisturbed run, whatever Slurm or a fault does to it. What is not here: GPUs, cgroups
(`proctrack/linuxproc` finds the processes of a job), nodes of their own machines.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.slurm_cluster import Cluster, missing

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parents[1] / "examples" / "clusters" / "slurm.sbatch"
WORKER = HERE / "slurm_worker.py"
LACKS = missing()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(LACKS), reason=f"apt-get install slurmctld slurmd slurm-client munge: {', '.join(LACKS)} missing"
    ),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The digest of the same training by one launcher, without Slurm and without a fault."""

    def run(task: int) -> str:
        here = tmp_path_factory.mktemp(f"undisturbed{task}")
        marks = here / f"marks{task}"
        marks.mkdir()
        (marks / "go").touch()
        environment = {
            **os.environ, "ROOT": str(here / "ckpts"), "HOLDFAST_RUNTIME_DIR": str(here / "run"), "SLURM_ARRAY_TASK_ID": str(task),
        }  # fmt: skip
        launch = [sys.executable, "-m", "holdfast.elastic.launch.run_command", "--standalone", "--nproc-per-node=2"]
        command = [*launch, str(WORKER), str(here / "marks"), "0"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        return ends(marks)

    return run


def ends(marks: Path) -> str:
    """The digest that both ranks ended with."""
    first, second = ((marks / f"end{rank}").read_text() for rank in range(2))
    assert first == second
    return first


class Training:
    """One job of the recipe.

    Args:
        here: a directory of its own.
        durable: seconds or steps between saves to storage.
        flags: for sbatch.
    """

    def __init__(self, cluster: Cluster, here: Path, *flags: str, durable: str = "1000s") -> None:
        self.cluster, self.here, self.marks, self.flags, self.durable = cluster, here, here / "marks", flags, durable
        self.job = self.submit()

    def submit(self) -> str:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        variables = {
            "ROOT": str(self.here / "ckpts"), "SECRET": str(self.here / "secret"), "PATH": path,
            "HOLDFAST_RUNTIME_DIR": str(self.cluster.runtime), "HOLDFAST_DURABLE_EVERY": self.durable, "SLURM_WAIT": "30",
        }  # fmt: skip
        size = (
            "--nodes=2",
            "--gpus-per-node=0",
            "--cpus-per-task=1",
            "--time=20",
            f"--output={self.cluster.here}/{self.here.name}.out",
        )
        name = f"--job-name={self.here.name}"
        return self.cluster.submit(
            name, *size, *self.flags, str(RECIPE), str(WORKER), str(self.marks), "0.1", **variables
        )

    def ranks(self, marks: Path | None = None) -> list[tuple[int, int]] | None:
        """(process id on its node, step) of each rank."""
        try:
            rows = [((marks or self.marks) / f"rank{rank}").read_text().split() for rank in range(2)]
        except FileNotFoundError:
            return None
        return [(int(pid), int(step)) for pid, step in rows]

    def past(self, step: int, *, since: list[tuple[int, int]] = [], marks: Path | None = None) -> list[tuple[int, int]]:  # noqa: B006
        """Waits until both ranks are past a step, in processes that are not those of `since`."""

        def there() -> list[tuple[int, int]] | None:
            rows = self.ranks(marks)
            old = {pid for pid, _ in since}
            return rows if rows and all(at >= step and pid not in old for pid, at in rows) else None

        return self.cluster.wait(there, f"step {step} of {self.here.name}")  # type: ignore[return-value]

    def go(self) -> None:
        """Lets the ranks run to their end."""
        (self.marks / "go").touch()

    def finish(self) -> None:
        """Lets the ranks run to their end, and waits for it."""
        self.go()
        self.reach("COMPLETED")

    def reach(self, *states: str) -> None:
        self.cluster.wait(lambda: self.cluster.state(self.job) in states, f"{states} of {self.here.name}")

    def said(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.cluster.here.glob(f"{self.here.name}.out"))

    def starts(self) -> list[int]:
        """The steps at which rank 0 began, in their order."""
        return [int(step) for step in re.findall(r"rank 0 starts at step (\d+)", self.said())]

    def restarts(self) -> int:
        """How often Slurm queued the job again."""
        shown = self.cluster.run("scontrol", "show", "job", self.job, "-o")
        return int(re.search(r"Restarts=(\d+)", shown)[1])  # type: ignore[index]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="hs") as here:
        made = Cluster(Path(here))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def expected(undisturbed: Callable[[int], str]) -> str:
    return undisturbed(0)


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path) -> Training:
    return Training(cluster, tmp_path)


def test_a_rank_is_killed(cluster: Cluster, training: Training, expected: str) -> None:
    before = training.past(10)
    (rank,) = cluster.processes("n1", "hf-rank-1")
    rank.kill()
    after = training.past(before[1][1] + 5, since=[before[1]])
    assert after[0][0] == before[0][0], "the other rank keeps its process"
    training.finish()
    assert (ends(training.marks), training.restarts()) == (expected, 0)


def test_a_launcher_is_killed(cluster: Cluster, training: Training, expected: str) -> None:
    before = training.past(10)
    (launcher,) = cluster.processes("n1", "hf-agent")
    launcher.kill()
    training.past(before[1][1] + 5, since=[before[1]])
    training.finish()
    assert (ends(training.marks), training.restarts()) == (expected, 0)


def test_the_daemon_of_a_step_is_killed(cluster: Cluster, training: Training, expected: str) -> None:
    training.past(10)
    (daemon,) = [p for p in cluster.processes("n1", "slurmstepd") if p.cmdline()[0].endswith(".0]")]
    daemon.kill()
    training.finish()  # Slurm never hears how the task ended: srun gives up after SLURM_WAIT
    assert ends(training.marks) == expected


def test_the_daemon_of_a_node_is_killed_and_comes_back(cluster: Cluster, training: Training, expected: str) -> None:
    training.past(10)
    (daemon,) = [p for p in cluster.processes("n1", "slurmd") if p.name() == "slurmd"]
    daemon.kill()
    cluster.run("slurmd", node="n1")
    training.finish()
    assert (ends(training.marks), training.restarts()) == (expected, 0)


def test_scancel_with_sigterm_saves_in_time(cluster: Cluster, training: Training, expected: str) -> None:
    before = training.past(10)
    cluster.run("scancel", "--signal=TERM", training.job)
    training.past(before[0][1] + 5, since=before)
    training.finish()
    assert training.starts()[1] > before[0][1]
    assert (ends(training.marks), training.restarts()) == (expected, 1)


def test_a_job_that_is_cancelled_has_saved_and_stays_away(cluster: Cluster, training: Training, expected: str) -> None:
    before = training.past(10)
    cluster.run("scancel", training.job)
    training.reach("CANCELLED")
    training.job = training.submit()
    training.past(before[0][1] + 5, since=before)
    training.finish()
    assert training.starts()[1] > before[0][1]
    assert ends(training.marks) == expected


def test_shortly_before_the_time_is_over_it_saves_and_is_queued_again(
    cluster: Cluster, training: Training, expected: str
) -> None:
    before = training.past(10)
    cluster.run("scancel", "--batch", "--signal=USR1", training.job)
    training.past(before[0][1] + 5, since=before)
    training.finish()
    assert training.starts()[1] > before[0][1]
    assert (ends(training.marks), training.restarts()) == (expected, 1)


def test_a_preemption_with_grace_saves_in_time(cluster: Cluster, training: Training, expected: str) -> None:
    before = training.past(10)
    urgent = cluster.submit(
        "--partition=high", "--nodes=2", "--exclusive", "--wrap=true", f"--output={cluster.here}/urgent.out"
    )
    cluster.wait(lambda: cluster.state(urgent) == "COMPLETED", "the urgent job")
    training.past(before[0][1] + 5, since=before)
    training.finish()
    assert training.starts()[1] > before[0][1]
    assert ends(training.marks) == expected


def test_a_requeue_saves_in_time(cluster: Cluster, training: Training, expected: str) -> None:
    before = training.past(10)
    cluster.run("scontrol", "requeue", training.job)
    training.past(before[0][1] + 5, since=before)
    training.finish()
    assert training.starts()[1] > before[0][1]
    assert (ends(training.marks), training.restarts()) == (expected, 1)


def test_tasks_of_an_array_do_not_mix(cluster: Cluster, tmp_path: Path, undisturbed: Callable[[int], str]) -> None:
    training = Training(cluster, tmp_path, "--array=1-2")
    marks = [tmp_path / f"marks{task}" for task in (1, 2)]
    before = [training.past(10, marks=each) for each in marks]
    cluster.run("scontrol", "requeue", f"{training.job}_1")
    training.past(before[0][0][1] + 5, since=before[0], marks=marks[0])
    for each in marks:
        (each / "go").touch()
    cluster.wait(lambda: cluster.run("squeue", "--noheader", f"--job={training.job}", check=False) == "", "both tasks")
    found = [ends(each) for each in marks]
    assert found == [undisturbed(task) for task in (1, 2)]
    assert found[0] != found[1]
    assert sorted(path.name for path in tmp_path.glob("ckpts*")) == ["ckpts.1", "ckpts.2"]


def test_a_node_that_is_drained_ends_its_job_first(cluster: Cluster, training: Training, expected: str) -> None:
    training.past(10)
    cluster.run("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
    training.finish()
    cluster.run("scontrol", "update", "nodename=n1", "state=resume")
    assert (ends(training.marks), training.restarts()) == (expected, 0)


def test_a_lost_node_costs_a_requeue(tmp_path: Path, expected: str) -> None:
    with tempfile.TemporaryDirectory(prefix="hs") as here:
        cluster = Cluster(Path(here), num_nodes=3)
        try:
            training = Training(cluster, tmp_path, durable="5")
            before = training.past(10)
            cluster.lose("n1")
            training.past(before[0][1] + 5, since=before)
            training.finish()
            assert training.starts()[1] > 0
            assert (ends(training.marks), training.restarts()) == (expected, 1)
        finally:
            cluster.close()


def test_signals_are_what_the_recipe_says() -> None:
    """Slurm sends a script USR1 as `--signal` says, and this is what the shell has a trap for."""
    text = RECIPE.read_text()
    (name,) = re.findall(r"^#SBATCH --signal=B:(\w+)@", text, re.MULTILINE)
    assert re.search(rf"^trap '.*' {name}$", text, re.MULTILINE)
    assert signal.Signals[f"SIG{name}"] != signal.SIGTERM
