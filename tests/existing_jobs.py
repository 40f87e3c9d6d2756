"""Readers for the examples of existing jobs, and the pools that an example cluster offers them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tilecast import nodes
from tilecast.advice import advise
from tilecast.api import documents, fields, training_job
from tilecast.api.base import validate_model
from tilecast.hardware import Pool
from tilecast.jobs import (
    JOB_KINDS,
    Job,
    kueue,
    move_error_to_annotation,
    read_job,
    read_training_spec,
)
from tilecast.jobs.candidates import JobCandidates, build_job_request, find_candidates, order_offers_by_quota
from tilecast.spec import SpecError

EXAMPLES = Path(__file__).parent.parent / "examples"
EXISTING = sorted((EXAMPLES / "existing").glob("*.yaml"))
ONE_OF_EACH = tuple(kind.lower() for kind in JOB_KINDS)
"""Names of the examples, one of each kind."""
FACTS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((Path(__file__).parent / "existing").glob("*.yaml"))
}
"""What tests expect of every example."""
A100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


@cache
def cluster() -> tuple[tuple[Pool, ...], list[dict[str, str]]]:
    members, own, slices = nodes.parse_objects((EXAMPLES / "clusters" / "mixed.yaml").read_text())
    return nodes.discover_pools(members, own, slices).pools, [item["metadata"]["labels"] for item in members]


def example(name: str) -> dict[str, Any]:
    (document,) = documents.load_documents((EXAMPLES / "existing" / f"{name}.yaml").read_text())
    return document


def pod_path(name: str) -> fields.Path:
    """Return the path of the pod spec of the last pods with GPUs in an example; empty if another object holds it."""
    return read_job(example(name)).workers[-1].path


def set_suspend(document: dict[str, Any]) -> dict[str, Any]:
    """Set the field that suspends a job, and return the job."""
    *above, last = JOB_KINDS[document["kind"]].suspend
    place: Any = document
    for key in above:
        place = place.setdefault(key, {})
    place[last] = True
    return document


def runtime(**trainer: Any) -> dict[str, Any]:
    container = {"name": "node", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    return {
        "kind": "ClusterTrainingRuntime",
        "spec": {
            "mlPolicy": {"numNodes": 3},
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {"name": "dataset-initializer", "template": {}},
                        {
                            "name": "trainer",
                            "template": {
                                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                "spec": {"template": {"spec": {"containers": [container], **trainer}}},
                            },
                        },
                    ]
                }
            },
        },
    }


def advice_spec(job: Job) -> training_job.TrainingJobSpec:
    """Return the spec that a job's annotations describe, checked as the CLI checks it."""
    try:
        return validate_model(training_job.TrainingJobSpec, read_training_spec(job.annotations), "spec")
    except SpecError as error:
        raise move_error_to_annotation(error) from None


def objects(
    *quotas: tuple[str, int, dict[str, str]], reserved: dict[str, int] | None = None, **more: Any
) -> kueue.KueueObjects:
    gpu = "nvidia.com/gpu"
    flavors = [{"name": name, "resources": [{"name": gpu, "nominalQuota": str(quota)}]} for name, quota, _ in quotas]
    used = [
        {"name": name, "resources": [{"name": gpu, "total": str(count)}]} for name, count in (reserved or {}).items()
    ]
    group = {"coveredResources": ["cpu", gpu], "flavors": flavors}
    return kueue.KueueObjects(
        {("default", "team"): {"spec": {"clusterQueue": "all"}}},
        {"all": {"spec": {"resourceGroups": [group], **more}, "status": {"flavorsReservation": used}}},
        {name: {"spec": {"nodeLabels": labels}} for name, _, labels in quotas},
    )


def usable(job: Job, queue: kueue.LocalQueue | None = None, *, writes_advice: bool = True) -> JobCandidates:
    pools, labels = cluster()
    return find_candidates(job, pools, labels, queue, writes_advice=writes_advice)


def codes(candidates: JobCandidates) -> dict[str, str]:
    return {item.pool: item.code for item in candidates.rejections}


def advised(name: str, queue: kueue.LocalQueue | None = None, *, writes_advice: bool = True, **changed: Any) -> Any:
    document = example(name) | changed
    job = read_job(document)
    choice = usable(job, queue, writes_advice=writes_advice)
    question = build_job_request(
        training_job.to_request("x", advice_spec(job)), job, choice, writes_advice=writes_advice
    )
    return document, job, choice, order_offers_by_quota(advise(question, choice.pools), choice)
