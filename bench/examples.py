"""Example manifests in the Go modules of job controllers: how many are read, and why the others are refused.

    python bench/examples.py            # downloads modules that are missing by `go mod download`
    python bench/examples.py --list     # each refused GPU job with its reason

The manifests of `tests/pod_manifests` are held against the CRDs of these modules.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tilecast.manifests import find_training_runtime, is_readable_job, may_request_gpus, read_manifest
from tilecast.spec import SpecError

MODULES = {
    "Trainer": "github.com/kubeflow/trainer/v2@v2.3.0",
    "training-operator": "github.com/kubeflow/training-operator@v1.9.3",
    "Kueue": "sigs.k8s.io/kueue@v0.19.0",
    "JobSet": "sigs.k8s.io/jobset@v0.12.0",
    "KubeRay": "github.com/ray-project/kuberay/ray-operator@v1.6.2",
}
MANIFESTS = Path(__file__).parent.parent / "tests" / "pod_manifests"
_TEMPLATE = re.compile(r"\{\{|\$\{")


def find_module(module: str) -> Path:
    """Return the folder of a Go module."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["go", "mod", "download", "-json", module]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603
    return Path(json.loads(done.stdout)["Dir"])


def read_objects(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the objects of all YAML files below a folder with their file. Templates are left out."""
    for file in sorted(folder.rglob("*.y*ml")):
        text = file.read_text(errors="replace")
        if "kind:" not in text or _TEMPLATE.search(text.split("spec:")[0]):
            continue
        try:
            items = list(yaml.load_all(text, yaml.CSafeLoader))
        except yaml.YAMLError:
            continue
        yield from ((file, item) for item in items if isinstance(item, dict))


def count_examples(name: str, folder: Path, *, lists: bool) -> None:
    """Print how many jobs of a module's examples are read."""
    objects = list(read_objects(folder))
    beside = {(str(item.get("kind")), str((item.get("metadata") or {}).get("name"))): item for _, item in objects}
    config_maps = {key[1]: item for key, item in beside.items() if key[0] == "ConfigMap"}
    jobs = [(file, item) for file, item in objects if is_readable_job(item)]
    reasons, found = Counter[str](), list[str]()
    gpu_jobs = 0
    for file, item in jobs:
        runtime = beside.get(find_training_runtime(item) or ("", ""))
        if not may_request_gpus(item, runtime):
            continue
        gpu_jobs += 1
        where = f"{file.relative_to(folder)}: {(item.get('metadata') or {}).get('name')}"
        try:
            read = read_manifest(item, runtime, config_maps)
            found.append(f"{where}: {read.launch.model_name}, {read.launch.plan_text()}")
        except SpecError as error:
            reasons[error.problem[:70]] += 1
            if lists:
                print(f"    {where}: {error}")
    print(f"{name}: {len(jobs)} jobs, {gpu_jobs} with GPUs, {len(found)} read, {gpu_jobs - len(found)} refused")
    for line in found:
        print(f"  read: {line}")
    for reason, count in reasons.most_common(6):
        print(f"  {count} refused: {reason}")


def find_schemas(folders: list[Path]) -> dict[tuple[str, str], Any]:
    """Return the schemas of CRDs by kind and version."""
    schemas = dict[tuple[str, str], Any]()
    for folder in folders:
        for _, item in read_objects(folder):
            if item.get("kind") == "CustomResourceDefinition" and "versions" in (item.get("spec") or {}):
                spec = item["spec"]
                for version in spec["versions"]:
                    key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                    schemas.setdefault(key, version["schema"]["openAPIV3Schema"])
    return schemas


def list_errors(value: Any, schema: Any, where: str = "") -> Iterator[str]:
    """Yield what of a value a CRD's schema does not allow: unknown and missing fields, and other types."""
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        return
    if kind == "object" and isinstance(value, dict):
        yield from (f"{where}.{key} is missing" for key in schema.get("required", ()) if key not in value)
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or others or not known
        for key, item in value.items():
            if where == "" and key in ("metadata", "apiVersion", "kind"):
                continue
            if key in known:
                yield from list_errors(item, known[key], f"{where}.{key}")
            elif isinstance(others, dict):
                yield from list_errors(item, others, f"{where}.{key}")
            elif not is_open:
                yield f"{where}.{key} is unknown"
    elif kind == "array" and isinstance(value, list):
        for index, item in enumerate(value):
            yield from list_errors(item, schema.get("items", {}), f"{where}[{index}]")
    else:
        types = {"string": str, "integer": int, "boolean": bool, "number": (int, float), "object": dict, "array": list}
        if kind in types and not isinstance(value, types[kind]):
            yield f"{where} is no {kind}"
        elif "enum" in schema and value not in schema["enum"]:
            yield f"{where} is none of {schema['enum']}"


def check_manifests(folders: list[Path]) -> None:
    """Print how many of the tests' manifests are valid by the CRDs that are at hand."""
    schemas, valid, without, wrong = find_schemas(folders), Counter[str](), Counter[str](), list[str]()
    for file, item in read_objects(MANIFESTS):
        key = str(item.get("apiVersion")), str(item.get("kind"))
        if key not in schemas:
            if item.get("kind") != "ConfigMap":
                without["/".join(key)] += 1
            continue
        errors = list(list_errors(item, schemas[key]))
        valid["/".join(key)] += not errors
        wrong += [f"{file.name} {item['metadata']['name']}: {error}" for error in errors[:3]]
    print(f"valid by their CRDs: {dict(valid)}, without a CRD here: {dict(without)}")
    for line in wrong:
        print(f"  not valid: {line}")


def main() -> None:
    """Print the counts of each module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    folders = {name: find_module(module) for name, module in MODULES.items()}
    for name, folder in folders.items():
        count_examples(name, folder, lists=options.list)
    check_manifests([*folders.values(), find_module("github.com/kubeflow/mpi-operator@v0.8.2")])


if __name__ == "__main__":
    main()
