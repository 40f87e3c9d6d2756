"""A kind of job is one module: the fifth kind, of docs/extending.md, is found everywhere."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import job_kinds
from repository_copy import RepositoryCopy
from test_docs import worked
from tilecast.api.job_kinds import JOB_APIS, list_job_kinds
from tilecast.jobs import JOB_KINDS
from tilecast.jobs.interface import JobKind
from tilecast.jobs.kinds.batch_job import BatchJob

ROOT = Path(__file__).resolve().parent.parent
KINDS = [
    name
    for _, name in sorted(
        [("kubeflow.org", "MPIJob"), *((kind.group, name) for name, kind in JOB_KINDS.items())], reverse=True
    )
]
"""Names of all kinds with that of the page, in the order of messages."""
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
import contextlib, io, json
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

given = json.load(open('given.json'))
document, target = given["job"], given["training_job"]
job = jobs.read_job(document)
started = jobs.read_job({**document, "status": {"replicaStatuses": {"Worker": {"active": 2}}}})
ended = jobs.read_job({**document, "status": {"conditions": [{"type": "Succeeded", "status": "True"}]}})
placed = jobs.compute_changes(document, job, jobs.Placement(given["selector"]))
wrong = {**target, "spec": {**target["spec"], "targetRef": {**target["spec"]["targetRef"], "apiVersion": "batch/v1"}}}
print(json.dumps({
    "kinds": list(jobs.JOB_KINDS),
    "path": job.kind.path("team", "a"),
    "gpus": [job.gpus, job.gpus_per_pod],
    "states": [job.is_suspended, job.has_started, started.has_started, ended.is_finished, job.is_countable],
    "asked": jobs.read_training_spec(job.annotations)["model"],
    "program": commands.find_program(document, job),
    "placed": [[list(change.path), change.value] for change in placed],
    "target": training_job.parse_training_job(target).target_ref.kind,
    "wrong": refused(training_job.parse_training_job, wrong),
    "unknown": refused(jobs.read_job, {**document, "kind": "XGBoostJob"}),
    "crd": crds.crd_text(crds.TRAINING_JOB),
    "help": " ".join(run("advise", "--help").split()),
    "advised": run("advise", "mpijob.yaml", "--nodes", given["nodes"], "-o", "yaml"),
    "not_read": run("advise", "deployment.yaml", "--nodes", given["nodes"]),
}))
"""


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> RepositoryCopy:
    """Return a copy of the repository that has a fifth kind of job."""
    grown = RepositoryCopy(tmp_path_factory.mktemp("fifth"))
    (grown.package / "jobs" / "kinds" / "mpi_job.py").write_text(worked("kind"))
    grown.generate()
    return grown


@pytest.fixture(scope="module")
def fifth(grown: RepositoryCopy) -> dict[str, Any]:
    """Return the output of a program in that copy."""
    grown.write("mpijob.yaml", JOB)
    grown.write("deployment.yaml", {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}})
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
        "nodes": "examples/clusters/mixed.yaml",
    }
    grown.write("given.json", given)
    document: dict[str, Any] = json.loads(grown.python(PROGRAM))
    return document


@pytest.mark.slow
def test_a_fifth_kind_is_in_the_list_of_kinds(fifth: dict[str, Any]) -> None:
    assert fifth["kinds"] == KINDS
    assert fifth["path"] == "/apis/kubeflow.org/v2beta1/namespaces/team/mpijobs/a"
    assert f"use one of {', '.join(KINDS)}" in fifth["unknown"]
    for sentence in (fifth["help"], fifth["not_read"]):
        assert f"{', '.join(KINDS[:-1])} or {KINDS[-1]}" in sentence and list_job_kinds() not in sentence


@pytest.mark.slow
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
    assert target["properties"]["kind"]["enum"] == KINDS
    assert "'MPIJob': 'kubeflow.org/v2beta1'" in target["x-kubernetes-validations"][0]["rule"]


def test_a_fifth_kind_is_advised_and_placed(fifth: dict[str, Any]) -> None:
    path = ["spec", "mpiReplicaSpecs", "Worker", "template", "spec", "nodeSelector"]
    assert fifth["placed"] == [[path, H100]], "the launcher has no GPU"
    advised = yaml.safe_load(fifth["advised"])
    workers = advised["spec"]["mpiReplicaSpecs"]["Worker"]
    assert workers["template"]["spec"].pop("nodeSelector")
    workers["template"]["spec"].pop("tolerations", None)
    assert advised == copy.deepcopy(JOB), "nothing else is changed"


def test_the_chart_reads_a_fifth_kind_and_makes_its_jobs_wait(grown: RepositoryCopy) -> None:
    templates = grown.read("charts/tilecast/templates/_kinds.tpl")
    assert "- apiGroups: [kubeflow.org]\n  resources: [mpijobs]\n" in templates
    rule = "apiGroups: [kubeflow.org], apiVersions: [v2beta1], operations: [CREATE], resources: [mpijobs]"
    assert f"- {{{rule}}}\n" in templates
    assert suspension(templates) == suspension(job_kinds.TEMPLATES.read_text()), "it waits as a PyTorchJob does"


def test_the_pages_name_a_fifth_kind(grown: RepositoryCopy) -> None:
    for name in job_kinds.MARKED:
        assert re.search("mpijob", grown.read(name), re.IGNORECASE), name
    assert "| MPIJob | `spec.runPolicy.suspend` | pod templates | fixed |\n" in grown.read("docs/jobs.md")


def suspension(templates: str) -> list[str]:
    """Return the lines of CEL by which a job waits without Kueue."""
    _, _, after = templates.partition('{{- define "tilecast.suspension" -}}\n')
    return after.partition("\n{{- end -}}")[0].splitlines()


class Stub(BatchJob):
    """A kind that waits in another way."""

    def __init__(self, kind: str, group: str, *suspend: str, waits: bool = True) -> None:
        self.kind, self.plural, self.api_version, self.suspend = kind, f"{kind.lower()}s", f"{group}/v1", suspend  # type: ignore[misc]
        self.waits_from_creation = waits  # type: ignore[misc]


def test_jobs_of_every_kind_wait_by_the_field_of_their_kind() -> None:
    plain = Stub("Plain", "a.dev", "spec", "suspend")
    assert suspension(job_kinds.templates([plain])) == [
        ": [JSONPatch{op: 'add', path: '/spec/suspend', value: true}]",
    ]
    kinds = [
        plain,
        Stub("Deep", "b.dev", "spec", "x", "y", "halt"),
        Stub("Flat", "c.dev", "spec", "halt"),
        Stub("Same", "a.dev", "spec", "halt"),
        Stub("Never", "d.dev", "spec", "z", "halt", waits=False),
    ]
    assert suspension(job_kinds.templates(kinds)) == [
        ": !object.apiVersion.startsWith('c.dev/') && !(object.kind == 'Same')"
        " && !object.apiVersion.startsWith('b.dev/')",
        "? [JSONPatch{op: 'add', path: '/spec/suspend', value: true}]",
        ": (object.apiVersion.startsWith('c.dev/') || (object.kind == 'Same'))",
        "? [JSONPatch{op: 'add', path: '/spec/halt', value: true}]",
        ": has(object.spec.x) && has(object.spec.x.y)",
        "? [JSONPatch{op: 'add', path: '/spec/x/y/halt', value: true}]",
        ": has(object.spec.x)",
        "? [JSONPatch{op: 'add', path: '/spec/x/y', value: {'halt': true}}]",
        ": [JSONPatch{op: 'add', path: '/spec/x', value: {'y': {'halt': true}}}]",
    ]
    assert "nevers" in job_kinds.templates(kinds) and "resources: [nevers]}" not in job_kinds.templates(kinds)


def test_what_follows_from_the_kinds_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert job_kinds.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_check_notices_drift(grown: RepositoryCopy) -> None:
    page = grown.folder / "docs" / "jobs.md"
    text = page.read_text()
    page.write_text(text.replace("| MPIJob |", "| MPI |"))
    done = grown.run("tools/job_kinds.py", "--check")
    page.write_text(text)
    assert done.returncode == 1 and done.stderr == "docs/jobs.md differs from the kinds of jobs; run `make crds`\n"


def test_every_module_of_kinds_is_a_kind_that_ends() -> None:
    assert {name: kind.api_version for name, kind in JOB_KINDS.items()} == JOB_APIS
    assert list(JOB_APIS) == list(JOB_KINDS)
    for name, kind in JOB_KINDS.items():
        assert kind.kind == name
        assert kind.finished or type(kind).is_finished is not JobKind.is_finished, f"{name} never ends"


def test_no_two_modules_are_one_kind() -> None:
    names = [path.stem for path in (ROOT / "predictor" / "tilecast" / "jobs" / "kinds").glob("[!_]*.py")]
    assert len(names) == len(JOB_KINDS), "a kind has the name of another"
