"""The recipes for clusters: well formed, of the kinds they say, and with flags that `holdfast run` and the keeper take."""

from __future__ import annotations

import ast
import configparser
import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast
from holdfast.base.config import ENVIRONMENT, Config
from holdfast.elastic.launch.run_command import build_parser
from holdfast.keeper.rpc.spawn import ensure_keeper

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "clusters"
# Per kind: the paths that its controller requires.
REQUIRED = {
    "ConfigMap": ("data",),
    "RayJob": (
        "spec.entrypoint",
        "spec.rayClusterSpec.headGroupSpec.template.spec.containers",
        "spec.rayClusterSpec.workerGroupSpecs",
    ),
    "TrainJob": ("spec.runtimeRef.name", "spec.trainer.numNodes"),
    "ClusterTrainingRuntime": ("spec.mlPolicy.numNodes", "spec.template.spec.replicatedJobs"),
    "JobSet": ("spec.replicatedJobs",),
    "NetworkPolicy": ("spec.podSelector.matchLabels", "spec.policyTypes", "spec.ingress"),
    "PodDisruptionBudget": ("spec.minAvailable", "spec.selector.matchLabels"),
    "DaemonSet": ("spec.selector.matchLabels", "spec.template.metadata.labels", "spec.template.spec.containers"),
}


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.name}: {document['kind']}", document)
        for path in sorted(RECIPES.glob("*.yaml"))
        if path.name != "skypilot.yaml"
        for document in yaml.safe_load_all(path.read_text())
    ]


def everything(node: Any) -> list[Any]:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [node, *(found for child in inner for found in everything(child))]


@pytest.mark.parametrize(("name", "document"), documents(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_manifest_has_what_its_kind_requires(name: str, document: dict[str, Any]) -> None:
    assert re.fullmatch(r"([a-z0-9.-]+/)?v\d\w*", document["apiVersion"])
    assert re.fullmatch(r"[a-z0-9-]{1,63}", document["metadata"]["name"])
    for path in REQUIRED[document["kind"]]:
        node: Any = document
        for key in path.split("."):
            node = node[key]
        assert node, path
    for pod in (n for n in everything(document) if isinstance(n, dict) and "containers" in n):
        containers = [*pod["containers"], *pod.get("initContainers", [])]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        mounted = {mount["name"] for container in containers for mount in container.get("volumeMounts", [])}
        assert mounted <= volumes, f"{name}: mounts without a volume"
        assert all(container["image"] and container["name"] for container in containers)


def test_every_kind_of_recipe_is_there() -> None:
    kinds = {document["kind"] for _, document in documents()}
    assert kinds == set(REQUIRED)
    for kind in ("JobSet", "ClusterTrainingRuntime", "RayJob"):
        (recipe,) = (document for _, document in documents() if document["kind"] == kind)
        pods = [n for n in everything(recipe) if isinstance(n, dict) and "initContainers" in n]
        assert [c["restartPolicy"] for pod in pods for c in pod["initContainers"] if c["name"] == "keeper"] == [
            "Always"
        ]
        assert all(pod["shareProcessNamespace"] for pod in pods), "a keeper knows trainers by their process ids"
        for pod in pods:  # one keeper is found by the trainers of its own pod only if all of this is the same
            (keeper,), (trainers,) = pod["initContainers"], pod["containers"]
            assert (keeper["env"], keeper["volumeMounts"]) == (trainers["env"], trainers["volumeMounts"])


def commands() -> list[str]:
    found = [text for _, document in documents() for text in everything(document) if isinstance(text, str)]
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(RECIPES / "holdfast-job.service")
    lines = (RECIPES / "slurm.sbatch").read_text().splitlines()
    slurm = " ".join(line for line in lines if not line.startswith("#"))
    sky = skypilot()["run"].replace("\\\n", " ")
    return [text for text in [*found, unit["Service"]["ExecStart"], slurm, sky] if "holdfast" in text and "--" in text]


def test_every_flag_is_one_that_exists() -> None:
    run_flags = set(build_parser()._option_string_actions)
    launches = 0
    for command in commands():
        for part in re.split(r"(?=holdfast run)", command):
            if part.startswith("holdfast run"):
                launches += 1
                assert set(re.findall(r"(?<=\s)--[a-z][a-z-]+", re.split("srun|scancel", part)[0])) <= run_flags, part
    assert launches == 5


def test_keepers_of_their_own_are_programs_that_start_one() -> None:
    programs = [
        text for _, d in documents() for text in everything(d) if isinstance(text, str) and "ensure_keeper" in text
    ]
    assert len(programs) == 4
    for text in programs:
        program = ast.parse(text)
        keys = [key.value for n in ast.walk(program) if isinstance(n, ast.Dict) for key in n.keys if key is not None]
        assert set(keys) <= set(Config.__dataclass_fields__)
        assert list(inspect.signature(ensure_keeper).parameters)[:2] == ["root", "config"], "the recipe calls it so"


def skypilot() -> dict[str, Any]:
    return dict(yaml.safe_load((RECIPES / "skypilot.yaml").read_text()))


def test_the_skypilot_task_has_its_fields_and_its_scripts_are_scripts() -> None:
    """Fields of a task, and variables that a node gets: docs.skypilot.co, reference/yaml-spec and running-jobs."""
    task = skypilot()
    assert set(task) <= {"name", "num_nodes", "resources", "workdir", "envs", "secrets", "setup", "run", "file_mounts"}
    assert set(task["resources"]["job_recovery"]) == {"strategy", "max_restarts_on_errors"}
    for part in ("setup", "run"):
        checked = subprocess.run(["bash", "-n"], input=task[part], capture_output=True, text=True, timeout=30)
        assert (checked.returncode, checked.stderr) == (0, "")
    used = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", task["run"]))
    told = {f"SKYPILOT_{name}" for name in ("NODE_IPS", "NODE_RANK", "NUM_NODES", "NUM_GPUS_PER_NODE", "TASK_ID")}
    assert used <= told | set(task["envs"]) | set(task["secrets"]) | {"HOME"} | {"SKYPILOT_NODE_RANK"}


def test_secrets_of_recipes_are_read_by_their_user_alone_and_are_in_no_environment() -> None:
    run = skypilot()["run"]
    commands = (r'^\(umask 077 && echo "\$JOB_SECRET" > ', r"^unset JOB_SECRET\b", r"^exec holdfast run ")
    told, forgotten, started = ([found.start() for found in re.finditer(line, run, re.MULTILINE)] for line in commands)
    assert len(told) == len(forgotten) == len(started) == 1
    assert told < forgotten < started, "ranks and their children would have it in their environment"
    assert re.search(r'\(umask 077 && openssl rand -hex 32 >"\$SECRET"\)', (RECIPES / "slurm.sbatch").read_text())
    (daemon,) = (document for _, document in documents() if document["kind"] == "DaemonSet")
    pod = daemon["spec"]["template"]["spec"]
    (mode,) = (v["secret"]["defaultMode"] for v in pod["volumes"] if "secret" in v)
    user = pod["securityContext"]
    assert mode == 0o440
    assert user["fsGroup"] == user["runAsGroup"], "the group of the files, which are root's"
    assert user["runAsUser"] != 0


def test_no_recipe_has_a_runtime_directory_where_others_may_write() -> None:
    for path in RECIPES.iterdir():
        told = re.findall(r"(?:HOLDFAST_RUNTIME_DIR|--runtime-dir)[^\w/]*(?:value: )?(\S+)", path.read_text())
        assert not [place for place in told if re.match(r"/tmp|/var/tmp|/dev/shm|\$\{?TMPDIR", place)], path.name


def test_the_script_of_the_ray_job_calls_what_exists() -> None:
    (script,) = (document["data"]["train.py"] for _, document in documents() if document["kind"] == "ConfigMap")
    program = ast.parse(script)
    calls = {n.func.id: n for n in ast.walk(program) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    known = set(inspect.signature(holdfast.Checkpointer.__init__).parameters) | {"look_every"}
    assert {keyword.arg for keyword in calls["keep"].keywords} <= known
    (settings,) = calls["load"].args
    assert isinstance(settings, ast.Dict)
    keys = {key.value for key in settings.keys if isinstance(key, ast.Constant)}
    assert keys <= set(Config.__dataclass_fields__)
    kept = {ast.literal_eval(calls["keep"].args[0])}
    (job,) = (document for _, document in documents() if document["kind"] == "RayJob")
    kept |= {
        path
        for text in everything(job)
        if isinstance(text, str)
        for path in re.findall(r'ensure_keeper\("(.*?)"', text)
    }
    assert len(kept) == 1, "sidecar and script must mean the same directory"


def test_variables_are_ours() -> None:
    text = "".join(path.read_text() for path in RECIPES.iterdir())
    assert set(re.findall(r"HOLDFAST_[A-Z_]+", text)) <= set(ENVIRONMENT)


def test_the_slurm_script_is_a_script() -> None:
    script = RECIPES / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=30).stderr == ""
    options = re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(), re.MULTILINE)
    assert {"nodes", "requeue", "signal", "time"} <= set(options)
    (launcher,) = re.findall(r"^launcher='(.*?)'", script.read_text(), re.DOTALL | re.MULTILINE)
    within = subprocess.run(
        ["bash", "-n"], input=launcher.replace("\n", " "), capture_output=True, text=True, timeout=30
    )
    assert (within.returncode, within.stderr) == (0, "")


def test_the_unit_stops_with_time_to_save_and_leaves_the_keeper() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.read(RECIPES / "holdfast-job.service")
    service = unit["Service"]
    assert (service["KillMode"], service["KillSignal"]) == ("process", "SIGTERM")
    assert int(service["TimeoutStopSec"]) >= 300
    assert {"Unit", "Service", "Install"} <= set(unit.sections())


def test_the_guards_are_those_of_the_jobset() -> None:
    """They choose its pods, and an eviction leaves as many nodes as hold a whole state."""
    kinds = {document["kind"]: document for name, document in documents() if name.startswith(("guards", "jobset"))}
    policy, budget, job = kinds["NetworkPolicy"]["spec"], kinds["PodDisruptionBudget"]["spec"], kinds["JobSet"]
    label = {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}
    (sender,) = policy["ingress"][0]["from"]
    for selector in (policy["podSelector"], sender["podSelector"], budget["selector"]):
        assert selector["matchLabels"] == label
    (node,) = job["spec"]["replicatedJobs"]
    assert budget["minAvailable"] == node["template"]["spec"]["parallelism"] - 1
