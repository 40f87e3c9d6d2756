"""Failures that the operator must not cause in a cluster: lost answers, duplicates, and interference."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster, ClusterError, wait_for
from operator_process import Operator, is_answered
from tilecast_operator.objects.documents import ADVICE_KEYS, GPUS, POOL

EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "jobs").glob("*.yaml"))

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[Operator]:
    with Operator(cluster) as started:
        yield started
        assert "Traceback" not in started.log_tail(100_000)
    cluster.kubectl("delete", "trainingjobs,events,gpupools", "--all")


def get(cluster: Cluster, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(cluster.kubectl("get", "tjob", name, "-o", "json"))
    return document


def answered(cluster: Cluster, name: str) -> dict[str, Any]:
    def probe() -> dict[str, Any] | None:
        document = get(cluster, name)
        return document if is_answered(document) else None

    return wait_for(probe, f"an answer to {name}", 60)


def job(name: str, **spec: Any) -> str:
    training = {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "fp16"}
    return yaml.safe_dump(
        {
            "apiVersion": "tilecast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": {"model": {"preset": "gpt2"}, "training": training, **spec},
        }
    )


def test_every_example_is_advised(cluster: Cluster, operator: Operator) -> None:
    for path in EXAMPLES:
        cluster.apply(path)
        job = answered(cluster, path.stem)
        marks = job["metadata"]["annotations"]
        assert set(ADVICE_KEYS) <= set(marks) and marks[POOL] and int(marks[GPUS]) >= 1
        assert "finalizers" not in job["metadata"]
    head, *rows = cluster.kubectl("get", "tjob", *(path.stem for path in EXAMPLES)).strip().split("\n")
    columns = ["NAME", "POOL", "GPUS", "PLAN", "STEP", "RANGE", "SPEEDUP", "COST/1K", "ERROR", "REASON", "AGE"]
    assert head.split() == columns
    assert all("Advised" in row for row in rows)


def test_killed_amid_its_writes_nothing_is_lost_or_doubled(cluster: Cluster, operator: Operator) -> None:
    names = [f"burst-{number}" for number in range(12)]
    cluster.apply("\n---\n".join(job(name) for name in names))
    for delay_s in (0.0, 0.05, 0.2):
        operator.kill()
        operator.start()
        time.sleep(delay_s)
    for name in names:
        assert answered(cluster, name)["status"]["summary"]["reason"] == "Advised"
    events = json.loads(cluster.kubectl("get", "events", "-o", "json"))["items"]
    about = sorted(item["involvedObject"]["name"] for item in events if item["reason"] == "RecommendationUpdated")
    assert [name for name in about if name in names] == sorted(names)


def test_two_operators_write_once(cluster: Cluster, operator: Operator) -> None:
    with Operator(cluster) as second:
        cluster.apply(job("shared"))
        answered(cluster, "shared")
        time.sleep(1.0)
        version = get(cluster, "shared")["metadata"]["resourceVersion"]
        time.sleep(1.0)
        assert get(cluster, "shared")["metadata"]["resourceVersion"] == version
        assert second.get("/healthz") == operator.get("/healthz") == "ok"
    events = json.loads(cluster.kubectl("get", "events", "-o", "json"))["items"]
    assert sum(item["involvedObject"]["name"] == "shared" for item in events) == 1


def test_a_deletion_never_waits_for_the_operator(cluster: Cluster, operator: Operator) -> None:
    cluster.apply(job("short-lived"))
    answered(cluster, "short-lived")
    operator.kill()
    try:
        cluster.kubectl("delete", "tjob", "short-lived", "--timeout=5s")
    finally:
        operator.start()


def test_jobs_and_nodes_that_are_replaced_under_their_names_are_not_forgotten(
    cluster: Cluster, operator: Operator
) -> None:
    node = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"][0]
    del node["metadata"]["uid"], node["metadata"]["resourceVersion"]
    for _ in range(5):
        cluster.kubectl("replace", "--force", "-f", "-", input=job("reborn"))
        cluster.kubectl("replace", "--force", "-f", "-", input=json.dumps(node))
    assert answered(cluster, "reborn")["status"]["summary"]["reason"] == "Advised"
    names = {item["metadata"]["name"] for item in json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]}
    pools = json.loads(cluster.kubectl("get", "gpupools", "-o", "json"))["items"]
    assert node["metadata"]["name"] in names
    assert all(item["status"]["summary"]["reason"] == "NodesFound" for item in pools)


def test_mode_off_takes_the_annotations_back(cluster: Cluster, operator: Operator) -> None:
    cluster.apply(job("quiet"))
    assert POOL in answered(cluster, "quiet")["metadata"]["annotations"]
    cluster.apply(job("quiet", mode="Off"))
    answer = answered(cluster, "quiet")
    assert not set(ADVICE_KEYS) & set(answer["metadata"]["annotations"])
    assert answer["status"]["recommendation"]["pool"]


REFUSED = [
    ({"training": {"globalBatchSize": 8, "sequenceLength": 8, "steps": 1, "tokens": 1}}, "give one"),
    ({"training": {"globalBatchSize": 8, "tokens": 1}}, "tokens needs sequenceLength"),
    ({"model": {"transformer": {"layers": 1, "hiddenSize": 9, "attentionHeads": 2, "vocabularySize": 9}}}, "headSize"),
    ({"constraints": {"gpus": 9, "maxGpus": 8}}, "gpus is above maxGpus"),
    ({"workload": "inference", "training": {"globalBatchSize": 8, "optimizer": "adam"}}, "inference has no optimizer"),
    (
        {"workload": "inference", "training": {"globalBatchSize": 8, "activationCheckpointing": "full"}},
        "no backward pass",
    ),
    (
        {"model": {"huggingFace": {"configMapKeyRef": {"name": "../../kube-system/configmaps/x"}}}},
        "configMapKeyRef.name",
    ),
    ({"targetRef": {"apiVersion": "batch/v1", "kind": "Job", "name": "../../other/jobs/x"}}, "targetRef.name"),
]


@pytest.mark.parametrize(("spec", "message"), REFUSED, ids=[row[1] for row in REFUSED])
def test_the_api_server_knows_the_rules_across_fields(cluster: Cluster, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        cluster.kubectl("create", "--dry-run=server", "-f", "-", input=job("refused", **spec))


def test_the_api_server_refuses_a_pool_that_says_nothing(cluster: Cluster) -> None:
    document = {"apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": {"name": "empty"}, "spec": {}}
    with pytest.raises(ClusterError, match="give selector, nodeType or gpu"):
        cluster.kubectl("create", "--dry-run=server", "-f", "-", input=yaml.safe_dump(document))
