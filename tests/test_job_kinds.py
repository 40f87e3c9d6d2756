"""A kind of job is one module and one line: the fifth kind, of docs/extending.md, is found everywhere."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from test_docs import worked
from tilecast.api.job_kinds import JOB_APIS, listed
from tilecast.jobs import JOB_KINDS
from tilecast.jobs.interface import JobKind

ROOT = Path(__file__).resolve().parent.parent
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
POD = {
    "containers": [
        {
            "name": "mpi",
            "image": "registry.example.com/gpt2:2.0",
            "command": ["mpirun", "train.py", "--data", "/mnt"],
            "resources": {"limits": {"nvidia.com/gpu": 8}},
        }
    ]
}
LAUNCHER = {"containers": [{"name": "launcher", "image": "registry.example.com/gpt2:2.0"}]}
JOB: dict[str, Any] = {
    "apiVersion": "kubeflow.org/v2beta1",
    "kind": "MPIJob",
    "metadata": {
        "name": "gpt2-xl-mpijob",
        "labels": {"tilecast.dev/enabled": "true"},
        "annotations": {
            "tilecast.dev/model": "gpt2-xl",
            "tilecast.dev/training": json.dumps({"sequenceLength": 1024, "globalBatchSize": 512}),
        },
    },
    "spec": {
        "runPolicy": {"suspend": True},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "template": {"spec": LAUNCHER}},
            "Worker": {"replicas": 2, "template": {"spec": POD}},
        },
    },
}

PROGRAM = """
import contextlib, io, json, sys
from tilecast.api.job_kinds import JOB_APIS, JobApi
JOB_APIS["MPIJob"] = JobApi("kubeflow.org/v2beta1", "mpi_job")

from tilecast import jobs
from tilecast.api import crds, training_job
from tilecast.cli import main
from tilecast.jobs import commands
from tilecast.spec import SpecError

def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        main(list(arguments))
    return out.getvalue() + err.getvalue()

def refused(function, *arguments):
    try:
        function(*arguments)
    except SpecError as error:
        return str(error)

given = json.load(sys.stdin)
document, target = given["job"], given["training_job"]
job = jobs.read(document)
started = jobs.read({**document, "status": {"replicaStatuses": {"Worker": {"active": 2}}}})
ended = jobs.read({**document, "status": {"conditions": [{"type": "Succeeded", "status": "True"}]}})
placed = jobs.changes(document, job, jobs.Placement(given["selector"]))
wrong = {**target, "spec": {**target["spec"], "targetRef": {**target["spec"]["targetRef"], "apiVersion": "batch/v1"}}}
print(json.dumps({
    "kinds": list(jobs.JOB_KINDS),
    "path": job.kind.path("team", "a"),
    "gpus": [job.gpus, job.gpus_per_pod],
    "states": [job.is_suspended, job.has_started, started.has_started, ended.is_finished, job.is_countable],
    "asked": jobs.described(job)["model"],
    "program": commands.program(document, job),
    "placed": [[list(change.path), change.value] for change in placed],
    "target": training_job.parse(target).target_ref.kind,
    "wrong": refused(training_job.parse, wrong),
    "unknown": refused(jobs.read, {**document, "kind": "XGBoostJob"}),
    "crd": crds.text(crds.TRAINING_JOB),
    "help": " ".join(run("advise", "--help").split()),
    "advised": run("advise", "mpijob.yaml", "--nodes", given["nodes"], "-o", "yaml"),
    "not_read": run("advise", "deployment.yaml", "--nodes", given["nodes"]),
}))
"""


@pytest.fixture(scope="module")
def fifth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of a process that has a fifth kind of job."""
    folder = tmp_path_factory.mktemp("fifth")
    (folder / "mpi_job.py").write_text("from __future__ import annotations\n" + worked("kind"))
    (folder / "mpijob.yaml").write_text(yaml.safe_dump(JOB, sort_keys=False))
    (folder / "deployment.yaml").write_text("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\n")
    target = {"apiVersion": JOB["apiVersion"], "kind": "MPIJob", "name": "a"}
    spec = {"model": {"preset": "gpt2-xl"}, "training": {"sequenceLength": 1024, "globalBatchSize": 8}}
    given = {
        "job": JOB,
        "training_job": {
            "apiVersion": "tilecast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "a"},
            "spec": {**spec, "targetRef": target},
        },
        "selector": H100,
        "nodes": str(ROOT / "examples" / "clusters" / "mixed.yaml"),
    }
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(given),
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_fifth_kind_is_in_the_list_of_kinds(fifth: dict[str, Any]) -> None:
    assert fifth["kinds"] == [*JOB_KINDS, "MPIJob"]
    assert fifth["path"] == "/apis/kubeflow.org/v2beta1/namespaces/team/mpijobs/a"
    assert "use one of" in fifth["unknown"] and "Job, MPIJob" in fifth["unknown"]
    for sentence in (fifth["help"], fifth["not_read"]):
        assert f"{', '.join(JOB_APIS)} or MPIJob" in sentence and listed() not in sentence


def test_a_fifth_kind_is_read(fifth: dict[str, Any]) -> None:
    assert fifth["gpus"] == [16, 8]
    assert fifth["states"] == [True, False, True, True, False]
    assert fifth["asked"] == {"preset": "gpt2-xl"}
    assert fifth["program"] == ["train.py", "--data", "/mnt"]


def test_a_fifth_kind_may_be_the_target_of_a_training_job(fifth: dict[str, Any]) -> None:
    assert fifth["target"] == "MPIJob"
    assert "apiVersion is not that of kind" in fifth["wrong"] and "kubeflow.org/v2beta1 MPIJob" in fifth["wrong"]
    schema = yaml.safe_load(fifth["crd"])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    target = schema["properties"]["spec"]["properties"]["targetRef"]
    assert target["properties"]["kind"]["enum"] == [*JOB_KINDS, "MPIJob"]
    assert "'MPIJob': 'kubeflow.org/v2beta1'" in target["x-kubernetes-validations"][0]["rule"]


def test_a_fifth_kind_is_advised_and_placed(fifth: dict[str, Any]) -> None:
    path = ["spec", "mpiReplicaSpecs", "Worker", "template", "spec", "nodeSelector"]
    assert fifth["placed"] == [[path, H100]], "the launcher has no GPU"
    advised = yaml.safe_load(fifth["advised"])
    workers = advised["spec"]["mpiReplicaSpecs"]["Worker"]
    assert workers["template"]["spec"].pop("nodeSelector")
    workers["template"]["spec"].pop("tolerations", None)
    assert advised == copy.deepcopy(JOB), "nothing else is changed"


@pytest.mark.parametrize("kind", JOB_KINDS.values(), ids=list(JOB_KINDS))
def test_the_chart_may_read_every_kind_and_gates_it(kind: Any) -> None:
    templates = ROOT / "charts" / "tilecast" / "templates"
    for role in ("rbac.yaml", "_release.tpl"):
        assert re.search(
            rf"- apiGroups: \[{kind.group}\]\n +resources: \[{kind.plural}\]", (templates / role).read_text()
        )
    gated = (
        f"apiGroups: [{kind.group}], apiVersions: [{kind.version}], operations: [CREATE], resources: [{kind.plural}]"
    )
    assert f"{{{gated}}}" in (templates / "gate.yaml").read_text()


def test_every_line_of_the_table_names_the_module_of_its_kind() -> None:
    assert list(JOB_KINDS) == list(JOB_APIS)
    for name, kind in JOB_KINDS.items():
        assert kind.kind == name
        assert type(kind).__module__ == JOB_APIS[name].module
        assert kind.finished or type(kind).is_finished is not JobKind.is_finished, f"{name} never ends"
