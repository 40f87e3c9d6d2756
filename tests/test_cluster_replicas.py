"""Two operators with one Lease on a real API server; its audit log shows which of them writes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import witness
from cluster import Cluster, wait_for
from conftest import Helm
from operator_process import Operator, is_answered
from story import TEAM, Scene

pytestmark = pytest.mark.cluster

WAIT_S = 120
NAMES = ("red", "blue")
LEASE = f"{witness.NAMESPACE}/tilecast"
STOPPED_S = 30.0
QUICK = {"TILECAST_SETTLE_SECONDS": "0.1", "TILECAST_RETRY_FIRST_SECONDS": "0.1", "TILECAST_RETRY_MOST_SECONDS": "2"}


@pytest.fixture(scope="module")
def cluster(bare_cluster: Cluster) -> Cluster:
    return bare_cluster


@pytest.fixture(scope="module")
def accounts(cluster: Cluster, helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return kubeconfigs of two accounts with the chart's rights, so that the audit log tells the replicas apart."""
    folder = tmp_path_factory.mktemp("accounts")
    config = yaml.safe_load(witness.account_kubeconfig(cluster, helm, folder / "chart.yaml").read_text())
    inside, paths = f"--namespace={witness.NAMESPACE}", dict[str, Path]()
    for name in NAMES:
        account = f"--serviceaccount={witness.NAMESPACE}:{name}"
        cluster.kubectl("create", "serviceaccount", name, inside)
        cluster.kubectl("create", "clusterrolebinding", f"replicas-{name}", "--clusterrole=tilecast", account)
        cluster.kubectl("create", "rolebinding", f"replicas-{name}", inside, "--role=tilecast-lease", account)
        token = cluster.kubectl("create", "token", name, inside, "--duration=2h").strip()
        config["users"][0]["user"] = {"token": token}
        paths[name] = folder / f"{name}.yaml"
        paths[name].write_text(yaml.safe_dump(config))
    return paths


@pytest.fixture
def replicas(cluster: Cluster, accounts: dict[str, Path]) -> Iterator[dict[str, Operator]]:
    """Yield two replicas that started without a lease; the first leads."""
    cluster.kubectl("delete", "lease", "tilecast", f"--namespace={witness.NAMESPACE}", "--ignore-not-found")
    operators = {
        name: Operator(
            cluster,
            accounts[name],
            {**QUICK, "TILECAST_LEASE": LEASE, "TILECAST_POD_IP": "127.0.0.1", "TILECAST_INSTANCE": name},
        )
        for name in NAMES
    }
    try:
        for operator in operators.values():
            operator.start()
            wait_for(lambda: holder(cluster), "a leader", WAIT_S)
        yield operators
    finally:
        for operator in operators.values():
            operator.kill()
        cluster.kubectl("delete", "trainingjobs.tilecast.dev", "--all", "--all-namespaces", "--wait=false")


def holder(cluster: Cluster) -> str:
    """Return the holder of the lease; empty if there is none."""
    shown = cluster.kubectl("get", "lease", f"--namespace={witness.NAMESPACE}", "-o", "json")
    held = [item["spec"].get("holderIdentity", "") for item in json.loads(shown)["items"]]
    return str(held[0]).partition("_")[0] if held else ""


def create(cluster: Cluster, names: Sequence[str]) -> None:
    training = {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "fp16"}
    items = [
        {
            "apiVersion": "tilecast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"model": {"preset": "gpt2"}, "training": {**training, "globalBatchSize": 32 * (1 + number % 5)}},
        }
        for number, name in enumerate(names)
    ]
    cluster.kubectl("create", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


def writes(cluster: Cluster, name: str, since: int) -> list[dict[str, Any]]:
    """Return the writes of an operator, except those of leases and token reviews."""
    user = f"system:serviceaccount:{witness.NAMESPACE}:{name}"
    return [
        entry
        for entry in witness.entries(cluster, since)
        if entry["user"]["username"] == user
        and entry["verb"] in witness.WRITING
        and entry["objectRef"]["resource"] not in ("leases", "tokenreviews")
    ]


def answered(cluster: Cluster, names: Sequence[str]) -> Callable[[], bool]:
    def are_answered() -> bool:
        jobs = json.loads(cluster.kubectl("get", "trainingjobs.tilecast.dev", "--namespace=default", "-o", "json"))
        by_name = {item["metadata"]["name"]: item for item in jobs["items"]}
        return all(is_answered(by_name[name]) for name in names)

    return are_answered


def prove_said_once(cluster: Cluster, names: Sequence[str], since: int) -> None:
    wait_for(answered(cluster, names), f"answers to {len(names)} jobs", WAIT_S)
    events = json.loads(cluster.kubectl("get", "events", "--namespace=default", "-o", "json"))["items"]
    events_by_job = Counter(item["involvedObject"]["name"] for item in events)
    assert {name: events_by_job[name] for name in names} == dict.fromkeys(names, 1)


def test_the_one_that_follows_writes_nothing_until_the_leader_is_killed(
    cluster: Cluster, replicas: dict[str, Operator]
) -> None:
    leader, follower = replicas.values()
    assert "tilecast_leader 1.0" in leader.get("/metrics") and "tilecast_leader 0.0" in follower.get("/metrics")
    since, names = witness.mark(cluster), [f"of-the-killed-{number}" for number in range(60)]
    create(cluster, names)
    wait_for(lambda: len(writes(cluster, "red", since)) > 20, "some writes", WAIT_S)
    assert holder(cluster) == "red" and writes(cluster, "blue", 0) == []
    leader.kill()
    wait_for(lambda: holder(cluster) == "blue", "the other to lead", WAIT_S)
    prove_said_once(cluster, names, since)
    assert "tilecast_leader 1.0" in follower.get("/metrics")
    assert follower.get("/healthz") == "ok"


def test_a_leader_that_was_stopped_writes_no_more_when_it_goes_on(
    cluster: Cluster, replicas: dict[str, Operator]
) -> None:
    leader = replicas["red"]
    since, names = witness.mark(cluster), [f"stopped-{number}" for number in range(120)]
    create(cluster, names)
    wait_for(lambda: len(writes(cluster, "red", since)) > 20, "some writes", WAIT_S)
    assert leader.pid is not None
    os.kill(leader.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        wait_for(lambda: holder(cluster) == "blue", "the other to lead", WAIT_S)
        taken = witness.mark(cluster)
        time.sleep(max(0.0, began_s + STOPPED_S - time.monotonic()))
    finally:
        os.kill(leader.pid, signal.SIGCONT)
    prove_said_once(cluster, names, since)
    late = [f"late-{number}" for number in range(20)]
    create(cluster, late)
    prove_said_once(cluster, late, since)
    # What was in transit when the process was stopped may arrive late, and is refused.
    late_writes = writes(cluster, "red", taken)
    assert [entry for entry in late_writes if entry["responseStatus"]["code"] != 409] == []
    assert holder(cluster) == "blue"
    wait_for(lambda: "tilecast_leader 0.0" in leader.get("/metrics"), "its word that it follows", WAIT_S)
    assert leader.get("/healthz") == leader.get("/readyz") == "ok"


def test_twenty_reports_are_twenty_whoever_takes_them_and_whoever_ends(
    cluster: Cluster, replicas: dict[str, Operator]
) -> None:
    for kind, name in (("Namespace", TEAM), ("ServiceAccount", "default")):
        place = {"namespace": TEAM} if kind == "ServiceAccount" else {}
        cluster.apply(json.dumps({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, **place}}))
    red, blue = (Scene(cluster.kubectl, lambda one=one: one.url, "") for one in replicas.values())
    token = red.token()
    step_s = red.apply("twenty")["recommendation"]["stepSeconds"]["target"]
    report = json.dumps({"stepSeconds": step_s, "steps": 10, "gpus": 8}).encode()

    def put(scene: Scene) -> bool:
        return scene.put(token, "twenty", report) == (202, "accepted")

    wait_for(lambda: put(blue), "the follower to have seen the leader", WAIT_S)
    assert all(put(scene) for _ in range(6) for scene in (red, blue))
    assert replicas["red"].stop() == 0
    taken = 0
    while taken < 7:
        taken += put(blue)

    def has_twenty() -> bool:
        status = blue.with_field("twenty", "observed")
        return status is not None and status["observed"]["samples"] == 20

    wait_for(has_twenty, "20 reports in the status", WAIT_S)
    assert 'tilecast_observations_total{outcome="accepted",source="put"} 7.0' in replicas["blue"].get("/metrics")
