"""A sweep on a real API server, and the operator as a process: jobs of another namespace are answered during it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import witness
from cluster import Cluster, wait_for
from conftest import Helm
from operator_process import Operator, is_answered
from tilecast import zoo
from tilecast.jobs import APPLIED, TRAINING

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"TILECAST_JOBS": "true", "TILECAST_PLACE": "true", "TILECAST_SEARCH_PROCESSES": "1"}
SWEEP, BEGUN = 150, 10
LATER = 50
"""Most jobs of the sweep answered while the other jobs are applied, seen and answered.

A search takes a few hundredths of a second, and kubectl alone many times that.
"""
MEANWHILE = 12
"""Most jobs of the sweep answered between the creation of a held job and its release.

These are searches and writes that were under way.
"""
PRESETS = tuple(sorted(model.name for model in zoo.presets().values() if model.vocab))


def job(namespace: str, name: str, number: int) -> dict[str, Any]:
    """Return a TrainingJob; equal numbers give equal workloads."""
    training = {"sequenceLength": 512, "globalBatchSize": 64 * (1 + number // len(PRESETS)), "precision": "bf16"}
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"preset": PRESETS[number % len(PRESETS)]}, "training": training},
    }


def held(namespace: str, name: str) -> dict[str, Any]:
    """Return a Job that waits to be placed."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "existing" / "job.yaml").read_text())
    document["metadata"] |= {"name": name, "namespace": namespace}
    document["metadata"]["annotations"][TRAINING] = json.dumps({"globalBatchSize": 1536, "precision": "fp16"})
    return document


def apply(cluster: Cluster, *documents: dict[str, Any]) -> None:
    cluster.apply(yaml.safe_dump_all(documents))


@pytest.fixture
def operator(bare_cluster: Cluster, helm: Helm, tmp_path: Path) -> Iterator[Operator]:
    values = ("jobs.enabled=true", "jobs.place=true")
    account = witness.account_kubeconfig(bare_cluster, helm, tmp_path / "kubeconfig.yaml", *values)
    running = Operator(bare_cluster, account, SETTINGS)
    yield running
    running.stop()


def events(cluster: Cluster, since: int) -> list[str]:
    """Return creations, answers and releases in the order of the audit log."""
    order = list[str]()
    for entry in witness.entries(cluster, since):
        asked, is_ours = entry["objectRef"], entry["user"]["username"] == witness.ACCOUNT
        place = f"{asked.get('namespace')}/{asked.get('name')}"
        if asked["resource"] == "trainingjobs" and entry["verb"] == "create":
            order.append(f"created {place}")
        elif not is_ours or entry["verb"] != "patch":
            continue
        elif (asked["resource"] == "jobs" and place not in order) or (
            asked["resource"] == "trainingjobs" and "observedGeneration" in entry["requestObject"].get("status", {})
        ):
            order.append(place)
    return order


def answers(cluster: Cluster, since: int) -> list[str]:
    """Return the TrainingJobs that were answered, in order."""
    return [item for item in events(cluster, since) if not item.startswith("created") and item != "other/waits"]


def test_others_are_answered_amid_a_sweep(bare_cluster: Cluster, operator: Operator) -> None:
    namespaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in ("sweep", "other")]
    apply(bare_cluster, *namespaces, *(job("sweep", f"s{number}", number) for number in range(SWEEP)))
    mark = witness.mark(bare_cluster)
    operator.start()
    wait_for(lambda: len(answers(bare_cluster, mark)) >= BEGUN, "the sweep to begin", 120)
    before = len(answers(bare_cluster, mark))
    apply(bare_cluster, job("other", "j", SWEEP), held("other", "waits"))
    try:
        read = ("-n", "other", "-o", "json")
        wait_for(
            lambda: is_answered(json.loads(bare_cluster.kubectl("get", "trainingjob", "j", *read))), "the job", 120
        )

        def outcome() -> str | None:
            annotations = json.loads(bare_cluster.kubectl("get", "job", "waits", *read))["metadata"]["annotations"]
            return annotations.get(APPLIED)

        became = wait_for(outcome, "the held job", 120)
        wait_for(lambda: len(answers(bare_cluster, mark)) > SWEEP, "everything", 300)
        order = answers(bare_cluster, mark)
    finally:
        bare_cluster.kubectl("delete", "job", "waits", "-n", "other", "--wait=false")
    assert order.index("other/j") <= before + LATER < SWEEP
    everything = events(bare_cluster, mark)
    created, let_go = everything.index("created other/j"), everything.index("other/waits")
    assert let_go - created <= MEANWHILE
    assert became in ("Placed", "TooLate"), "on a busy machine its own search may take too long"
    assert "InternalError" not in operator.log_tail(100_000)
