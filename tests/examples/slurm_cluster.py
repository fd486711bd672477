"""A Slurm cluster of one machine: a controller and nodes, each in namespaces of its own, with Debian's programs.

Debian builds `slurmd` without --enable-multiple-slurmd, so a node is a network namespace (with an address on a bridge), a
host name, a process namespace and a runtime directory. Killing the first process of a node is the loss of the node.
Nothing is left in the host's network; all of it ends with `close`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from examples.namespaces import SEARCHED, Space

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "munged", "unshare", "nsenter", "ip")
WAIT_S = 300.0
# Seconds. What Slurm waits between SIGTERM and SIGKILL, and after a node has gone silent.
KILL_WAIT_S = 30
NODE_TIMEOUT_S = 10
GRACE_S = 120
CONF = """
ClusterName=test
SlurmctldHost=ctl(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket,cred_expire=5
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool.%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={node_timeout}
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing() -> list[str]:
    """Programs that a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]


class Cluster:
    """A controller and its nodes; starts them.

    Args:
        here: a directory of its own with a short name, for sockets.
        num_nodes: they are called n0, n1 and so on.
    """

    def __init__(self, here: Path, num_nodes: int = 2) -> None:
        self.here = here
        self.nodes = {f"n{k}": f"10.77.0.{k + 10}" for k in range(num_nodes)}
        self.runtime = here / "runtime"
        self._spaces: dict[str, Space] = {}
        try:
            self._write()
            self._start()
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, node: str = "ctl", check: bool = True) -> str:
        """Runs a program on a node and returns what it prints."""
        inside = [
            "nsenter",
            f"--target={self._spaces[node]}",
            "--net",
            "--uts",
            "--mount",
            "--pid",
            f"--wd={self.here}",
            "--",
        ]
        environment = {**os.environ, "SLURM_CONF": str(self.here / "slurm.conf"), "PATH": SEARCHED}
        inside = self._spaces[node].inside(*command, here=str(self.here))
        done = subprocess.run(inside, capture_output=True, text=True, timeout=WAIT_S, env=environment)
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, *command: str, **variables: str) -> str:
        """Queues a job and returns its id; variables are its environment's."""
        given = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
        return self.run("sbatch", "--parsable", f"--export={given}", *command)

    def state(self, job: str) -> str:
        """The state of a job in Slurm's words, and "gone" if Slurm no longer knows it."""
        fields = dict(
            part.split("=", 1)
            for part in self.run("scontrol", "show", "job", job, "-o", check=False).split()
            if "=" in part
        )
        return fields.get("JobState", "gone")

    def wait(self, condition: Callable[[], object], what: str, *, limit_s: float = WAIT_S) -> object:
        """Asks until a condition holds, and returns what it returned."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.1)
        raise AssertionError(f"waited {limit_s} s for {what}\n{self.logs()}")

    def processes(self, node: str, *words: str) -> list[psutil.Process]:
        """Processes of a node whose command line has all of the words; not its first one."""
        found = []
        for process in self._spaces[node].processes():
            try:
                if all(word in " ".join(process.cmdline()) or word == process.name() for word in words):
                    found.append(process)
            except psutil.Error:
                pass  # it ended
        return found

    def lose(self, node: str) -> None:
        """Kills all of a node at once."""
        self._spaces[node].lose()

    def logs(self) -> str:
        """The ends of what jobs and daemons said."""
        said = [*sorted(self.here.glob("*.out")), self.here / "slurmctld.log", *self.here.glob("slurmd.*.log")]
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in said if path.exists()
        )

    def close(self) -> None:
        """Ends everything: a process namespace dies with its first process."""
        for space in self._spaces.values():
            space.close()

    def _write(self) -> None:
        for name in ("state", "runtime", *(f"{kind}.{node}" for kind in ("spool", "runtime") for node in self.nodes)):
            (self.here / name).mkdir(mode=0o700)
        key = self.here / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        hosts = {"localhost": "127.0.0.1", "ctl": "10.77.0.1", **self.nodes}
        (self.here / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        lines = [f"NodeName={name} NodeAddr={address} CPUs=8 State=UNKNOWN" for name, address in self.nodes.items()]
        conf = CONF.format(
            here=self.here, nodes="\n".join(lines), kill_wait=KILL_WAIT_S, node_timeout=NODE_TIMEOUT_S, grace=GRACE_S
        )
        (self.here / "slurm.conf").write_text(conf)

    def _start(self) -> None:
        for name in ("ctl", *self.nodes):
            self._space(name)
        self.run(
            "sh", "-c", "ip link add name hfbr type bridge; ip addr add 10.77.0.1/24 dev hfbr; ip link set hfbr up"
        )
        for name in self.nodes:
            self._connect(name)
        here = str(self.here)
        files = [f"--{flag}={here}/munge.{flag[:-5]}" for flag in ("key-file", "pid-file", "log-file", "seed-file")]
        self.run("munged", "--force", f"--socket={here}/munge.socket", *files)
        self.run("slurmctld")
        for name in self.nodes:
            self.run("slurmd", node=name)
        self.wait(self.is_up, "the nodes of the cluster")

    def is_up(self) -> bool:
        """Whether all nodes are free."""
        return self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%t", check=False).split() == [
            "idle"
        ] * len(self.nodes)

    def _space(self, name: str) -> None:
        """Make a node's namespaces and their first process."""
        here = self.here
        private = f"mount --bind {here}/runtime.{name} {here}/runtime" if name in self.nodes else ":"
        self._spaces[name] = Space(name, f"mount --bind {here}/hosts /etc/hosts", private)

    def _connect(self, name: str) -> None:
        self.run("ip", "link", "add", "name", name, "type", "veth", "peer", "name", "up0")
        move = ["nsenter", f"--target={self._spaces['ctl'].pid}", "--net", "ip", "link", "set", "up0", "netns"]
        subprocess.run([*move, str(self._spaces[name].pid)], check=True, timeout=WAIT_S)
        self.run("sh", "-c", f"ip link set {name} master hfbr; ip link set {name} up")
        address = self.nodes[name]
        self.run(
            "sh", "-c", f"ip link set up0 name eth0; ip addr add {address}/24 dev eth0; ip link set eth0 up", node=name
        )
