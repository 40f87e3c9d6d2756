"""The plan of the whole queue against Kueue alone: 60 jobs on two flavors, the first of which suits only a third.

Kueue, the API server and the scheduler are real; kwok ends each pod after the time that it takes on the GPU that it
got.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, wait_for
from conftest import Helm, ensure_or_fail
from controllers import Controllers
from operator_process import Operator
from test_jobs_cluster import (
    ACCOUNT,
    H100,
    KUEUE,
    NAMESPACE,
    PATIENCE,
    PLACE_VALUES,
    PLACING,
    T4,
    WAIT_S,
    _applied,
    _is_release,
    _time,
    annotations,
    audited,
    create,
    granted,
)
from tilecast import nodes
from tilecast.api import training_job
from tilecast.jobs import (
    APPLIED,
    ENABLED,
    HOLD_QUEUE,
    MODE,
    MODEL,
    NEXT_QUEUE,
    QUEUE,
    RUN_ESTIMATE,
    RUN_RANGE,
    START_ESTIMATE,
    START_RANGE,
    TRAINING,
)
from tilecast.planner.options import list_job_options
from witness import kubeconfig_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
JOBS = 60
END_S = 240
"""Timeout in seconds, twice the length of the slower run."""
POLL_S = 2
GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists"}
QUOTAS = {"first-t4": 4, "second-h100": 6}
SMALL = {"globalBatchSize": 2, "precision": "fp16", "steps": 170}
"""A job that is hardly slower on a T4, because the host takes most of its time."""
LARGE = {"globalBatchSize": 256, "precision": "fp16", "steps": 60}
DEVIATIONS = (0.8, 0.9, 1.0, 1.1, 1.25)
"""Ratios of actual times to forecasts."""


@pytest.fixture(scope="module")
def cluster(binaries: Path) -> Iterator[Cluster]:
    """Yield a separate control plane with Kueue, whose pods take their forecast time."""
    for toolset in ("jobset", "kueue"):
        ensure_or_fail(toolset)
    files = ROOT / "tests" / "e2e"
    mixed = ROOT / "examples" / "clusters" / "mixed.yaml"
    with Cluster(nodes=mixed, audit_policy=files / "audit-jobs.yaml", stages=files / "stages-queue.yaml") as started:
        started.apply(ROOT / "crds")
        text = KUEUE
        for name, quota in QUOTAS.items():
            head, _, rest = text.partition(f"- name: {name}")
            text = f"{head}- name: {name}" + rest.replace(
                "nvidia.com/gpu, nominalQuota: 10k", f"nvidia.com/gpu, nominalQuota: {quota}", 1
            )
        with Controllers(started, "jobset", "kueue"):
            wait_for(lambda: _applied(started, text), "Kueue's webhooks", WAIT_S)
            yield started


def forecasts() -> dict[str, dict[str, float]]:
    """Return the seconds of both kinds of jobs on one GPU, by kind and pool."""
    every_node, own, slices = nodes.parse_objects((ROOT / "examples" / "clusters" / "mixed.yaml").read_text())
    pools = nodes.discover_pools([nodes.read_node(item) for item in every_node], own, slices).pools
    seconds = {}
    for kind, training in (("small", SMALL), ("large", LARGE)):
        spec = {"model": {"preset": "resnet-50"}, "training": training, "constraints": {"gpus": 1}}
        request = training_job.read_request(
            {"apiVersion": "tilecast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": kind}, "spec": spec}
        )
        seconds[kind] = {item.pool: item.seconds for item in list_job_options(request, pools)}
    return seconds


def jobs(prefix: str, *, is_advised: bool) -> list[dict[str, Any]]:
    """Return the jobs, small ones among large ones; in the queue, or held for Tilecast."""
    seconds, made = forecasts(), []
    for number in range(JOBS):
        kind, training = ("small", SMALL) if number % 3 == 0 else ("large", LARGE)
        took = {pool: s * DEVIATIONS[number % len(DEVIATIONS)] for pool, s in seconds[kind].items()}
        marks = {MODE: "Initial", MODEL: "resnet-50", TRAINING: json.dumps(training), NEXT_QUEUE: "team"}
        labels = {ENABLED: "true", QUEUE: HOLD_QUEUE} if is_advised else {QUEUE: "team"}
        asked = {"cpu": "1", "nvidia.com/gpu": "1"}
        runs = {"on-t4": f"{took['t4']:.2f}s", "on-h100": f"{took['h100-sxm']:.2f}s"}
        container = {"name": "train", "image": "train:1", "resources": {"requests": asked, "limits": asked}}
        made.append(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {
                    "name": f"{prefix}-{number:02}-{kind}",
                    "labels": labels,
                    "annotations": marks if is_advised else {},
                },
                "spec": {
                    "suspend": True,
                    "template": {
                        "metadata": {"annotations": runs},
                        "spec": {"restartPolicy": "Never", "tolerations": [GPU_TAINT], "containers": [container]},
                    },
                },
            }
        )
    return made


def every_job(cluster: Cluster) -> list[dict[str, Any]]:
    all_jobs: list[dict[str, Any]] = json.loads(cluster.kubectl("get", "jobs.batch", "-o", "json"))["items"]
    return all_jobs


def ended(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the jobs once all of them are complete."""
    for _ in range(END_S // POLL_S):
        time.sleep(POLL_S)  # polling takes processor time from the controllers
        all_jobs = every_job(cluster)
        if all(item.get("status", {}).get("completionTime") for item in all_jobs):
            return all_jobs
    left = [item["metadata"]["name"] for item in all_jobs if not item.get("status", {}).get("completionTime")]
    pytest.fail(f"{len(left)} jobs have not ended: {', '.join(left)}")


def holds_s(cluster: Cluster, names: set[str]) -> list[float]:
    """Return how long each job was held, from its creation to its one release."""
    entries = [entry for entry in audited(cluster) if entry["objectRef"].get("name") in names]
    born = {entry["objectRef"]["name"]: _time(entry) for entry in entries if entry["verb"] == "create"}
    let_go = [entry for entry in entries if entry["user"]["username"] == ACCOUNT and _is_release(entry)]
    assert Counter(entry["objectRef"]["name"] for entry in let_go) == dict.fromkeys(names, 1)
    return [_time(entry) - born[entry["objectRef"]["name"]] for entry in let_go]


def mean_s(all_jobs: list[dict[str, Any]]) -> float:
    """Return the mean time from creation to the end."""
    took = [
        _seconds(item["status"]["completionTime"]) - _seconds(item["metadata"]["creationTimestamp"])
        for item in all_jobs
    ]
    return sum(took) / len(took)


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def placed(all_jobs: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Count the jobs of each kind on each GPU."""
    return Counter(
        (
            item["metadata"]["name"].rpartition("-")[2],
            item["spec"]["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.product"],
        )
        for item in all_jobs
    )


def test_mean_completion_beats_kueue_alone_and_everybody_is_let_go_once(
    cluster: Cluster, helm: Helm, tmp_path: Path
) -> None:
    create(cluster, *jobs("alone", is_advised=False))
    alone = ended(cluster)
    cluster.kubectl("delete", "jobs.batch", "--all")

    cluster.apply(f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: {NAMESPACE}}}")
    cluster.apply(granted(helm, *PLACE_VALUES, "queue.enabled=true"))
    path = kubeconfig_of(cluster, "tilecast", NAMESPACE, tmp_path / "kubeconfig.yaml")
    settings = {**PLACING, "TILECAST_QUEUE": "true", "TILECAST_SEARCH_PROCESSES": "1"}
    with Operator(cluster, path, settings, patience=PATIENCE) as operator:
        create(cluster, *jobs("planned", is_advised=True))
        wait_for(lambda: _is_let_go(cluster), "all to be let go", WAIT_S)
        advice = wait_for(lambda: _planned(cluster), "the QueueAdvice", WAIT_S)
        assert "Traceback" not in operator.log_tail(100_000)
        operator.kill()
    planned = ended(cluster)

    held_s = holds_s(cluster, {item["metadata"]["name"] for item in planned})
    # The decision time of a busy machine says nothing about the plan.
    means = mean_s(alone), mean_s(planned) - sum(held_s) / len(held_s)
    sys.stderr.write(
        f"\nmean completion of {JOBS} jobs: Kueue alone {means[0]:.1f} s, planned {means[1]:.1f} s from when they "
        f"were let go; held for {max(held_s):.1f} s at most; {dict(placed(alone))}, {dict(placed(planned))}; "
        f"forecast {advice['totals']['completionSeconds']:.1f} s\n"
    )
    assert {annotations(item)[APPLIED] for item in planned} <= {"Placed", "Queued"}, (
        "none was too late by the operator's clock"
    )
    assert placed(planned)["large", T4] < placed(alone)["large", T4]
    assert placed(planned)["small", T4] > placed(planned)["small", H100]
    assert means[1] < means[0]


def test_the_workloads_of_waiting_jobs_say_when_they_start_and_kueue_leaves_that_alone(
    cluster: Cluster, helm: Helm, tmp_path: Path
) -> None:
    cluster.kubectl("delete", "jobs.batch", "--all")
    cluster.apply(f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: {NAMESPACE}}}")
    values = "jobs.enabled=true", "capacity.readKueue=true", "queue.enabled=true", "queue.estimates=true"
    cluster.apply(granted(helm, *values))
    path = kubeconfig_of(cluster, "tilecast", NAMESPACE, tmp_path / "kubeconfig.yaml")
    settings = {
        **PLACING,
        "TILECAST_PLACE": "false",
        "TILECAST_QUEUE": "true",
        "TILECAST_QUEUE_ESTIMATES": "true",
        "TILECAST_SEARCH_PROCESSES": "1",
    }
    long = json.dumps({**LARGE, "steps": 1_000_000})
    made = jobs("waits", is_advised=False)[:16]
    for item in made:
        item["metadata"]["labels"][ENABLED] = "true"
        item["metadata"]["annotations"] = {MODEL: "resnet-50", TRAINING: long}
        item["spec"]["template"]["metadata"]["annotations"] = {"on-t4": "9000s", "on-h100": "9000s"}
    with Operator(cluster, path, settings, patience=PATIENCE) as operator:
        create(cluster, *made)
        waiting = wait_for(lambda: _estimated(cluster), "estimates of all that wait", WAIT_S)
        assert len(waiting) == 16 - sum(QUOTAS.values())
        for said in waiting.values():
            earliest, latest = said[START_RANGE].split("/")
            assert earliest <= said[START_ESTIMATE] <= latest
            lower, upper = map(int, said[RUN_RANGE].split("-"))
            assert 0 < lower < int(said[RUN_ESTIMATE]) < upper
        time.sleep(3 * POLL_S)
        assert _estimated(cluster).keys() == waiting.keys(), "Kueue keeps them"
        assert "Traceback" not in operator.log_tail(100_000)
        operator.kill()
    cluster.kubectl("delete", "jobs.batch", "--all")


def _estimated(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Return the annotations of the Workloads without quota, once all of them have estimates."""
    time.sleep(POLL_S)
    found = {}
    for item in json.loads(cluster.kubectl("get", "workloads.kueue.x-k8s.io", "-o", "json"))["items"]:
        conditions = {one["type"]: one["status"] for one in item.get("status", {}).get("conditions", ())}
        if conditions.get("QuotaReserved") != "True":
            found[item["metadata"]["name"]] = item["metadata"].get("annotations", {})
    is_complete = all({START_ESTIMATE, START_RANGE, RUN_ESTIMATE, RUN_RANGE} <= said.keys() for said in found.values())
    return found if is_complete else {}


def _is_let_go(cluster: Cluster) -> bool:
    time.sleep(POLL_S)
    return all(APPLIED in annotations(item) for item in every_job(cluster))


def _planned(cluster: Cluster) -> dict[str, Any] | None:
    advices = json.loads(cluster.kubectl("get", "tqa", "-o", "json"))["items"]
    status: dict[str, Any] = advices[0].get("status", {}) if advices else {}
    counts = status.get("jobs", {})
    return status if counts.get("waiting", 0) + counts.get("running", 0) > 1 else None
