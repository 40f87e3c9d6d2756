"""Two releases that share the namespaces of a real API server, each with the rights that the chart gives it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import witness
from cluster import Cluster, wait_for
from conftest import Helm
from operator_process import Operator, is_answered

pytestmark = pytest.mark.cluster

WAIT_S = 120
QUICK = {"TILECAST_SETTLE_SECONDS": "0.1", "TILECAST_POD_IP": "127.0.0.1"}
SHARDS = {
    "tilecast-one": {"namespaceSelector": {"matchLabels": {"shard": "one"}}, "ownsPools": True},
    "tilecast-rest": {
        "namespaceSelector": {"matchExpressions": [{"key": "shard", "operator": "DoesNotExist"}]},
        "ownsPools": False,
    },
}
TEAMS = {"shards-left": "tilecast-one", "shards-right": "tilecast-rest", "shards-moves": "tilecast-rest"}
"""Release that answers each namespace at first."""


@pytest.fixture(scope="module")
def cluster(bare_cluster: Cluster) -> Cluster:
    return bare_cluster


@pytest.fixture(scope="module")
def releases(cluster: Cluster, helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Operator]]:
    """Yield both releases at work, with the role, the account and the settings that the chart renders."""
    cluster.apply(json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": witness.NAMESPACE}}))
    cluster.kubectl("delete", "gpupools", "--all")
    operators = dict[str, Operator]()
    for name, shard in SHARDS.items():
        text = helm(
            "template", name, str(witness.CHART), f"--namespace={witness.NAMESPACE}",
            "--set-json", f"shard={json.dumps(shard)}",
        )  # fmt: skip
        documents = [item for item in yaml.safe_load_all(text) if item]
        kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
        for document in documents:
            if document["kind"] in kinds and "helm.sh/hook" not in document["metadata"].get("annotations", {}):
                cluster.apply(json.dumps(document))
        folder = tmp_path_factory.mktemp(name)
        path = witness.kubeconfig_of(cluster, name, witness.NAMESPACE, folder / "kubeconfig.yaml")
        (deployment,) = (item for item in documents if item["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        settings = {item["name"]: item["value"] for item in container["env"] if "value" in item}
        operators[name] = Operator(cluster, path, {**settings, **QUICK})
    for team, release in TEAMS.items():
        labels = {"shard": "one"} if release == "tilecast-one" else {}
        metadata = {"name": team, "labels": labels}
        cluster.apply(json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}))
    try:
        for operator in operators.values():
            operator.start()
        yield operators
        for operator in operators.values():
            assert "is forbidden" not in operator.log_tail(100_000)
    finally:
        for operator in operators.values():
            operator.stop()
        cluster.kubectl("delete", "gpupools", "--all")


def create(cluster: Cluster, team: str, count: int, prefix: str) -> list[str]:
    training = {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "fp16"}
    names = [f"{prefix}-{number}" for number in range(count)]
    items = [
        {
            "apiVersion": "tilecast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": team},
            "spec": {"model": {"preset": "gpt2"}, "training": training},
        }
        for name in names
    ]
    cluster.kubectl("create", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    return names


def are_answered(cluster: Cluster, team: str) -> bool:
    jobs = json.loads(cluster.kubectl("get", "trainingjobs.tilecast.dev", f"--namespace={team}", "-o", "json"))
    return all(is_answered(item) for item in jobs["items"])


def written(cluster: Cluster, release: str, since: int) -> list[dict[str, Any]]:
    """Return the objects that a release wrote, from the audit log."""
    user = f"system:serviceaccount:{witness.NAMESPACE}:{release}"
    return [
        entry["objectRef"]
        for entry in witness.entries(cluster, since)
        if entry["user"]["username"] == user and entry["verb"] in witness.WRITING
    ]


def test_each_job_is_answered_once_and_pools_have_one_owner(cluster: Cluster, releases: dict[str, Operator]) -> None:
    for team in TEAMS:
        create(cluster, team, 20, "job")
    for team in TEAMS:
        wait_for(lambda team=team: are_answered(cluster, team), f"answers in {team}", WAIT_S)
        events = json.loads(cluster.kubectl("get", "events", f"--namespace={team}", "-o", "json"))["items"]
        events_by_job = Counter(item["involvedObject"]["name"] for item in events)
        assert events_by_job == dict.fromkeys((f"job-{number}" for number in range(20)), 1)
    for release in releases:
        objects = written(cluster, release, 0)
        teams = {item["namespace"] for item in objects if item["resource"] == "trainingjobs"} & TEAMS.keys()
        assert teams == {team for team, answering in TEAMS.items() if answering == release}
        writes_pools = any(item["resource"] == "gpupools" for item in objects)
        assert writes_pools == SHARDS[release]["ownsPools"]
    owner, reader = (operator.get("/metrics") for operator in releases.values())
    assert "tilecast_gpu_capacity{" in owner and "tilecast_gpu_capacity{" not in reader


def test_a_namespace_whose_label_changes_goes_over(cluster: Cluster, releases: dict[str, Operator]) -> None:
    wait_for(lambda: are_answered(cluster, "shards-moves"), "answers before", WAIT_S)
    cluster.kubectl("label", "namespace", "shards-moves", "shard=one")
    names = create(cluster, "shards-moves", 5, "moved")
    wait_for(lambda: are_answered(cluster, "shards-moves"), "answers afterwards", WAIT_S)
    since = witness.mark(cluster)
    edited = '{"spec":{"training":{"globalBatchSize":128}}}'
    for name in ("job-0", names[0]):
        cluster.kubectl(
            "patch", "trainingjobs.tilecast.dev", name, "--namespace=shards-moves", "--type=merge", "-p", edited
        )
    wait_for(lambda: are_answered(cluster, "shards-moves"), "answers to what was edited", WAIT_S)
    one, rest = (written(cluster, release, since) for release in releases)
    assert {"job-0", names[0]} <= {item.get("name") for item in one}
    assert [item for item in rest if item.get("namespace") == "shards-moves"] == []


def test_the_selector_reaches_the_policy_that_gates_jobs(helm: Helm, tmp_path: Path) -> None:
    selector = {"matchLabels": {"shard": "one"}}
    text = helm(
        "template", "tilecast", str(witness.CHART), "--set=jobs.enabled=true,jobs.gate=true",
        "--set-json", f"shard.namespaceSelector={json.dumps(selector)}",
        "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy",
    )  # fmt: skip
    (policy,) = (item for item in yaml.safe_load_all(text) if item and item["kind"] == "MutatingAdmissionPolicy")
    assert policy["spec"]["matchConstraints"]["namespaceSelector"] == selector
