"""A TrainingJob that was stored under an older, laxer CRD is told so, and no write is retried for ever."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import witness
from cluster import Cluster, ClusterError, wait_for
from operator_process import Operator, is_answered

pytestmark = pytest.mark.cluster

WAIT_S = 120
QUICK = {"TILECAST_RETRY_FIRST_SECONDS": "0.1", "TILECAST_SETTLE_SECONDS": "0.1"}
CRD = yaml.safe_load((Path(__file__).resolve().parent.parent / "crds" / "trainingjobs.yaml").read_text())
TRAINING = {"sequenceLength": "many", "globalBatchSize": 64}
JOB: dict[str, Any] = {
    "apiVersion": "tilecast.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {
        "name": "stored",
        "namespace": "default",
        "annotations": {"tilecast.dev/recommended-pool": "a100-80", "mine": "stays"},
    },
    "spec": {"model": {"preset": "gpt2"}, "training": TRAINING},
}


def lenient(crd: dict[str, Any]) -> dict[str, Any]:
    """Return the CRD with a spec of any shape."""
    crd = copy.deepcopy(crd)
    for version in crd["spec"]["versions"]:
        shape = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version["schema"]["openAPIV3Schema"]["properties"]["spec"] = shape
    return crd


@pytest.fixture
def cluster(bare_cluster: Cluster) -> Iterator[Cluster]:
    """Yield a cluster that has such a job, and then the strict CRD."""

    def stored() -> bool:
        try:
            return bool(bare_cluster.kubectl("create", "-f", "-", input=json.dumps(JOB)))
        except ClusterError:
            return False

    def is_strict() -> bool:
        other = {**JOB, "metadata": {"name": "other", "namespace": "default"}}
        try:
            bare_cluster.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(other))
        except ClusterError:
            return True
        return False

    bare_cluster.kubectl("replace", "-f", "-", input=json.dumps(lenient(CRD)))
    wait_for(stored, "a CRD that takes anything", WAIT_S)
    bare_cluster.kubectl("replace", "-f", "-", input=json.dumps(CRD))
    wait_for(is_strict, "the CRD as it is", WAIT_S)
    yield bare_cluster
    bare_cluster.kubectl("delete", "trainingjobs.tilecast.dev", "stored", "--wait=false")


def read(cluster: Cluster) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(cluster.kubectl("get", "tjob", "stored", "-o", "json"))
    return document


def test_an_invalid_job_that_is_stored_is_told_so_once(cluster: Cluster) -> None:
    since = witness.mark(cluster)
    with Operator(cluster, settings=QUICK) as operator:
        wait_for(lambda: is_answered(read(cluster)), "an answer", WAIT_S)
        wait_for(lambda: read(cluster)["metadata"]["annotations"].keys() == {"mine"}, "its annotation to go", WAIT_S)
        document = read(cluster)
        assert operator.get("/healthz") == "ok"
    ready = next(item for item in document["status"]["conditions"] if item["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    refused = [
        entry["responseStatus"]["code"]
        for entry in witness.entries(cluster, since)
        if entry["objectRef"]["resource"] == "trainingjobs" and entry["responseStatus"]["code"] >= 500
    ]
    assert len(refused) <= 2, "one for its annotations and one for its status"
