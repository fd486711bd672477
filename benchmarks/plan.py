"""What it costs to plan a large job: python -m benchmarks.plan [--quick] [--json]

`plan_seconds` and `plan_peak_mib`: from a description of 1,000 tensors on 16,384 ranks to every rank's and node's bytes,
the interchangeable ranks, and the names of what any lost node takes along. The job mixes a pipeline of 16 stages,
hybrid sharding and tensor parallelism, with shapes that do not divide evenly. The peak is that of a fresh process
(its resident memory, interpreter included), so it is taken in one; the seconds are the median of several plans there.
Told besides: the same for strategies with extreme groups (one of all ranks, or each rank its own).

`answer_seconds`: wall time of `holdfast plan FILE` as a user types it, next to that of an interpreter that does nothing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from holdfast.core.layout.cost_plan import JobPlan, uniform
from holdfast.core.layout.job_layout import JobLayout, Mesh, Tensor
from holdfast.core.layout.placement import REPLICATE, Placement, only, shard

RANKS, TENSORS, RANKS_PER_NODE = 16_384, 1_000, 8
JOBS = ("", "ddp", "fsdp", "hsdp")


def mixed() -> JobLayout:
    """Pipeline x replicas x shards x tensor parallelism; three quarters of the tensors do not divide evenly."""
    mesh = Mesh(("pp", "replicate", "fsdp", "tp"), (16, 4, 32, 8))
    kinds: list[tuple[tuple[int, ...], Placement, Placement]] = [
        ((4097, 4099), shard(0), shard(1)),
        ((4096,), shard(0), REPLICATE),
        ((11_008, 1021), shard(0), REPLICATE),
        ((30, 4096), shard(0), shard(1)),
    ]
    tensors = []
    for number in range(TENSORS):
        shape, fsdp, tp = kinds[number % len(kinds)]
        stage = only(number * 16 // TENSORS)
        tensors.append(Tensor(f"model.{number}.weight", "F32", shape, (stage, REPLICATE, fsdp, tp)))
    return JobLayout(RANKS, [mesh], tensors)


def simple(strategy: str) -> JobLayout:
    """All tensors placed alike, with a few different shapes."""
    mesh, placements = {
        "ddp": (Mesh(("dp",), (RANKS,)), (REPLICATE,)),
        "fsdp": (Mesh(("fsdp",), (RANKS,)), (shard(0),)),
        "hsdp": (Mesh(("dp", "fsdp"), (128, 128)), (REPLICATE, shard(0))),
    }[strategy]
    shapes = [(4096 + 37 * number, 1024) for number in range(20)]
    return JobLayout(
        RANKS, [mesh], [Tensor(f"w{i}", "F32", shapes[i % len(shapes)], placements) for i in range(TENSORS)]
    )


def plan(strategy: str) -> None:
    """Everything that a plan says."""
    layout = simple(strategy) if strategy else mixed()
    costs = JobPlan(layout, uniform(RANKS, RANKS_PER_NODE))
    twins = costs.census.twins()
    names = [costs.alone_on(alike[0]) for alike in costs.nodes_alike()]
    assert len(twins) == RANKS
    assert len(names) >= 1
    assert sum(costs.nodes.written) == costs.unique_bytes


def measured(strategy: str, rounds: int) -> None:
    """In a process of its own: prints the figures as JSON."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        plan(strategy)
        seconds.append(time.perf_counter() - started)
    # Not ru_maxrss, which a process takes over from the one that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak_mib = int(status.split("VmHWM:")[1].split()[0]) / 1024
    print(json.dumps({"seconds": statistics.median(seconds), "first": seconds[0], "peak_mib": peak_mib}))


FILE = """
ranks_per_node = 4
mesh = { dp = 8 }
[[tensors]]
name = "w"
dtype = "F32"
shape = [4096, 4096]
[optimizer]
states = ["exp_avg"]
"""


def answers(rounds: int) -> tuple[list[float], list[float]]:
    """Wall seconds of the command and of an idle interpreter, in turn."""
    from benchmarks import measure  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as directory:
        job = Path(directory, "job.toml")
        job.write_text(FILE, encoding="utf-8")
        command = [str(Path(sys.executable).with_name("holdfast")), "plan", str(job)]
        subprocess.run(command, capture_output=True, check=True)  # compiled, and in the page cache

        def once(words: list[str]) -> float:
            return measure.timed(lambda: subprocess.run(words, capture_output=True, check=True))

        return measure.paired(lambda: once(command), lambda: once([sys.executable, "-c", "pass"]), rounds)


def main() -> None:
    from benchmarks import measure  # it loads torch, which must not count into the peak  # noqa: PLC0415

    options = measure.options("plan", "What it costs to plan a large job.").parse_args()
    report = measure.Report("plan", options.quick, options.json)
    for strategy in JOBS:
        command = [sys.executable, "-m", "benchmarks.plan", "--alone", strategy, "3" if options.quick else "15"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        found = json.loads(answer.stdout)
        suffix = f":{strategy}" if strategy else ""
        goals = ("", "") if strategy else ("<= 1", "<= 200")
        report.figure(f"plan_seconds{suffix}", found["seconds"], "s", goals[0], ranks=RANKS, tensors=TENSORS)
        report.figure(f"plan_peak_mib{suffix}", found["peak_mib"], "MiB", goals[1])
    taken, idle = answers(5 if options.quick else 21)
    report.figure("answer_seconds", statistics.median(taken), "s", "<= 0.5", interpreter_s=statistics.median(idle))
    report.save()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:
        measured(sys.argv[2], int(sys.argv[3]))
    else:
        main()
