"""Two operators with different settings over the same jobs of a real API server: their writes must end."""

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
from operator_process import Operator

pytestmark = pytest.mark.cluster

WAIT_S = 120
NAMES = [f"j{number}" for number in range(10)]
MEASURED = NAMES[:6]
SETTINGS = {"learns": {"TILECAST_LEARNING": "true"}, "learns-not": {"TILECAST_LEARNING": "false"}}
QUICK = dict.fromkeys((f"TILECAST_{name}SETTLE_SECONDS" for name in ("", "CAPACITY_", "CALIBRATE_")), "0.1")
WRITES_AT_MOST = 40
"""Most writes of one job until the operators stop overwriting each other.

Each operator writes annotations and a status for its first answer, for each of six steps that it learns from, and once
over an answer of the other; some of these writes are lost to the other's. Without a stop there were 161 writes in half
a minute.
"""


@pytest.fixture
def operators(bare_cluster: Cluster) -> Iterator[list[Operator]]:
    both = [
        Operator(bare_cluster, settings={**QUICK, **more, "TILECAST_INSTANCE": name}) for name, more in SETTINGS.items()
    ]
    try:
        yield both
    finally:
        for operator in both:
            operator.kill()
        bare_cluster.kubectl("delete", "trainingjobs,poollearnings", "--all", "--all-namespaces", "--wait=false")


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
    messages = wait_for(lambda: events(cluster), "an Event that says so", WAIT_S)
    assert all(first in text and second in text for text in messages)
    wait_for(lambda: sum(map(contended, operators)) >= 1, "a metric that says so", WAIT_S)
    time.sleep(20)
    count = writes(cluster, since)
    assert set(count) == set(NAMES)
    assert max(count.values()) <= WRITES_AT_MOST


def contended(operator: Operator) -> float:
    """Return how many objects an operator leaves to another."""
    (value,) = (
        line.rpartition(" ")[2]
        for line in operator.get("/metrics").splitlines()
        if line.startswith("tilecast_contended_objects ")
    )
    return float(value)


def events(cluster: Cluster) -> list[str]:
    """Return the messages of the Events about contention."""
    items = json.loads(cluster.kubectl("get", "events", "--field-selector=reason=Contended", "-o", "json"))["items"]
    return [item["message"] for item in items]
