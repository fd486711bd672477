"""The pod of the JobSet as a process tree: its containers' own programs, in a network and process namespace of their own.

No kubelet is here, and no control group: a container is a tree of processes that is killed as one. What the manifest says is
used as it stands, but for fewer nodes and ranks, and other places for its volumes.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from examples.namespaces import SEARCHED, Space

HERE = Path(__file__).resolve().parent
MANIFEST = HERE.parents[1] / "examples" / "clusters" / "jobset.yaml"
NAME, ADDRESS = "train-node-0-0", "10.78.0.2"
LACKS = [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name, path=SEARCHED) is None]
WAIT_S = 200.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(LACKS), reason=f"programs are missing: {', '.join(LACKS)}"),
]


class Pod:
    """The containers of one pod.

    Args:
        here: a directory for the volumes, with a short name.
    """

    def __init__(self, here: Path) -> None:
        text = (
            MANIFEST.read_text().replace("--nnodes 4", "--nnodes 1").replace("--nproc-per-node 8", "--nproc-per-node 2")
        )
        for volume in ("/ckpts", "/etc/holdfast", "/run/holdfast"):
            (here / volume[1:]).mkdir(parents=True)
            text = text.replace(volume, str(here / volume[1:]))
        script = f"{HERE / 'slurm_worker.py'} {here / 'marks'} 0.1"
        (node,) = yaml.safe_load(text.replace("train.py", script))["spec"]["replicatedJobs"]
        self.spec: dict[str, Any] = node["template"]["spec"]["template"]["spec"]
        self.here, self.marks = here, here / "marks"
        secret = here / "etc" / "holdfast" / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o400)
        (here / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {NAME} {NAME}.train\n")
        self.space = Space(NAME, f"mount --bind {here}/hosts /etc/hosts", f"ip addr add {ADDRESS}/32 dev lo")

    def start(self, container: dict[str, Any]) -> subprocess.Popen[bytes]:
        told = {"status.podIP": ADDRESS, "metadata.name": NAME}
        given = {
            row["name"]: row.get("value") or told[row["valueFrom"]["fieldRef"]["fieldPath"]] for row in container["env"]
        }
        path = os.pathsep.join([str(Path(sys.executable).parent), SEARCHED])
        more = {
            "PATH": path,
            "ROOT": f"{self.here}/ckpts/run1",
            "HOLDFAST_EVERY": "1",
            "HOLDFAST_DURABLE_EVERY": "1000s",
        }
        return self.space.start(
            *container["command"], *container["args"], environment={**os.environ, **more, **given},
            log=f"{self.here}/{container['name']}.log", here=str(self.here),
        )  # fmt: skip

    def ranks(self) -> list[tuple[int, int]]:
        """(process id, step) of each rank that has marked one."""
        rows = [path.read_text().split() for path in sorted(self.marks.glob("rank?"))]
        return [(int(pid), int(step)) for pid, step in rows]

    def named(self, name: str) -> list[psutil.Process]:
        return [process for process in self.space.processes() if process.name() == name]

    def said(self) -> str:
        return "\n".join(path.read_text()[-6000:] for path in sorted(self.here.glob("*.log")))

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}\n{self.said()}"
            time.sleep(0.05)


@pytest.fixture
def pod() -> Iterator[Pod]:
    with tempfile.TemporaryDirectory(prefix="hp") as here:
        made = Pod(Path(here))
        try:
            yield made
        finally:
            made.space.close()


def kill_container(first: subprocess.Popen[bytes]) -> None:
    """All of a container and nothing else: what it started in sessions of their own too."""
    for process in [*psutil.Process(first.pid).children(recursive=True), first]:
        process.kill()
    first.wait(30)


def test_the_keepers_container_outlives_that_of_the_trainers(pod: Pod) -> None:
    """State that no storage has comes back to the next container; nothing is left when the pod ends."""
    assert pod.spec["shareProcessNamespace"]
    ((keeper,), (trainers,)) = pod.spec["initContainers"], pod.spec["containers"]
    beside = pod.start(keeper)
    pod.wait(lambda: pod.named("hf-keeper"), "the keeper")
    (first_keeper,) = pod.named("hf-keeper")
    first = pod.start(trainers)
    pod.wait(lambda: len(pod.ranks()) == 2 and all(step >= 10 for _, step in pod.ranks()), "steps")
    before = pod.ranks()
    kill_container(first)
    assert not pod.named("hf-agent")
    assert [p.pid for p in pod.named("hf-keeper")] == [first_keeper.pid]
    second = pod.start(trainers)
    pod.wait(
        lambda: all(pid not in {old for old, _ in before} for pid, _ in pod.ranks()), "ranks of the next container"
    )
    starts = [int(step) for step in re.findall(r"rank 0 starts at step (\d+)", pod.said())]
    assert starts[0] == 0
    assert starts[1] >= min(step for _, step in before)
    first_keeper.kill()  # and its container starts another, which living trainers hand their memory
    pod.wait(lambda: any(p.pid != first_keeper.pid for p in pod.named("hf-keeper")), "the next keeper")
    (pod.marks / "go").touch()
    pod.wait(lambda: len(list(pod.marks.glob("end?"))) == 2, "the end")
    second.wait(WAIT_S)
    assert beside.poll() is None
