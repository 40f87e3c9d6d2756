"""Two operators with different settings over the same jobs of a real API server: their writes must end.

There are TrainingJobs, which each operator signs, and Jobs, which nobody signs.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import witness
from cluster import Cluster, wait_for
from hostile_objects import annotated_job
from operator_process import Operator

pytestmark = pytest.mark.cluster

WAIT_S = 120
NAMES = [f"j{number}" for number in range(10)]
MEASURED = NAMES[:6]
SETTINGS = {"learns": {"TILECAST_LEARNING": "true"}, "learns-not": {"TILECAST_LEARNING": "false"}}
OF_JOBS = {"TILECAST_JOBS": "true", "TILECAST_DISCOVERY": "false"}
WHERE = {
    "everywhere": OF_JOBS,
    "on-t4": {**OF_JOBS, "TILECAST_NODE_SELECTOR": "nvidia.com/gpu.product=Tesla-T4"},
}
"""Settings of operators that see different nodes, and so advise every Job differently from the start."""
QUICK = dict.fromkeys((f"TILECAST_{name}SETTLE_SECONDS" for name in ("", "CAPACITY_", "CALIBRATE_")), "0.1")
JOB_WRITES_AT_MOST = 8
"""Most writes of one Job by both operators: each writes its own answer, and once over the other's; some conflict."""
WRITES_AT_MOST = 40
"""Most writes of one job until the operators stop overwriting each other.

Each operator writes annotations and a status for its first answer, for each of six steps that it learns from, and once
over an answer of the other; some of these writes are lost to the other's. Without a stop there were 161 writes in half
a minute.
"""


@pytest.fixture(params=[SETTINGS])
def operators(bare_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[list[Operator]]:
    both = [
        Operator(bare_cluster, settings={**QUICK, **more, "TILECAST_INSTANCE": name})
        for name, more in request.param.items()
    ]
    try:
        yield both
    finally:
        for operator in both:
            operator.kill()
        kinds = "trainingjobs,poollearnings,gpupools,jobs,events"
        bare_cluster.kubectl("delete", kinds, "--all", "--all-namespaces", "--wait=false")


def writes(cluster: Cluster, since: int) -> Counter[str]:
    """Count the successful patches of each job, which leave out its creation."""
    return Counter(
        entry["objectRef"]["name"]
        for entry in witness.entries(cluster, since)
        if entry["objectRef"]["resource"] == "trainingjobs"
        and entry["verb"] == "patch"
        and entry["responseStatus"]["code"] == 200
    )


def job(name: str) -> dict[str, Any]:
    training = {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "fp16"}
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": {"preset": "gpt2"}, "training": training},
    }


def forecast_s(cluster: Cluster, name: str) -> float | None:
    status = json.loads(cluster.kubectl("get", "tjob", name, "-o", "json")).get("status", {})
    target_s = (status.get("recommendation") or {}).get("stepSeconds", {}).get("target")
    return None if target_s is None else float(target_s)


def test_two_operators_with_different_settings_leave_each_other_alone(
    bare_cluster: Cluster, operators: list[Operator], tmp_path: Path
) -> None:
    cluster = bare_cluster
    for operator in operators:
        operator.start()
    since = witness.mark(cluster)
    cluster.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": [job(name) for name in NAMES]}))
    step_s = wait_for(lambda: forecast_s(cluster, NAMES[-1]), "an answer", WAIT_S)
    for name in MEASURED:
        cluster.kubectl("annotate", "tjob", name, f"tilecast.dev/observed-step-seconds={step_s * 1.5}")

    def named(operator: Operator, other: str) -> bool:
        return f"{other} answers it too" in operator.log.read_text()

    (one, other), (first, second) = operators, SETTINGS
    wait_for(lambda: named(one, second) and named(other, first), "both to name the other", WAIT_S)
    messages = wait_for(lambda: told(cluster), "an Event that says so", WAIT_S)
    assert all(first in text and second in text for _, text in messages)
    wait_for(lambda: sum(map(contended, operators)) >= 1, "a metric that says so", WAIT_S)
    time.sleep(20)
    count = writes(cluster, since)
    assert set(count) == set(NAMES)
    assert max(count.values()) <= WRITES_AT_MOST


@pytest.mark.parametrize("operators", [WHERE], indirect=True)
def test_two_operators_leave_each_other_the_jobs_that_nobody_signs(
    bare_cluster: Cluster, operators: list[Operator]
) -> None:
    cluster = bare_cluster
    for operator in operators:
        operator.start()
    training = json.dumps({"sequenceLength": 1024, "globalBatchSize": 64, "precision": "fp16"})
    items = [annotated_job(name, model="gpt2", training=training) for name in NAMES]
    cluster.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    wait_for(lambda: sum(map(contended, operators)) >= len(NAMES), "every Job to be left to one of them", WAIT_S)
    wait_for(lambda: {name for name, _ in told(cluster)} == set(NAMES), "an Event about each Job", WAIT_S)
    assert all("another release answers it too" in text for _, text in told(cluster))
    assert any("another release answers it too" in operator.log.read_text() for operator in operators)
    written = sum(job_writes(operator) for operator in operators)
    time.sleep(20)
    assert sum(job_writes(operator) for operator in operators) == written <= JOB_WRITES_AT_MOST * len(NAMES)


def told(cluster: Cluster) -> list[tuple[str, str]]:
    """Return the name of the object and the message of each Event about contention."""
    items = json.loads(cluster.kubectl("get", "events", "--field-selector=reason=Contended", "-o", "json"))["items"]
    return [(item["involvedObject"]["name"], item["message"]) for item in items]


def contended(operator: Operator) -> float:
    """Return how many objects an operator leaves to another."""
    return metric(operator, "tilecast_contended_objects")


def job_writes(operator: Operator) -> float:
    """Return how many writes of Jobs an operator tried."""
    return metric(operator, 'tilecast_writes_total{outcome="ok",resource="jobs"}')


def metric(operator: Operator, name: str) -> float:
    """Return the sum of the samples of an operator's metric whose line begins with a name."""
    lines = operator.get("/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
