"""A pod on a real kubelet prints what Megatron-LM prints, and its log becomes the measured step of its job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cluster import Cluster, wait_for
from kind_cluster import VALUES, WORKERS, installed
from kind_node import OPERATOR
from story import TEAM, Scene

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

WAIT_S = 120
SLOWDOWN = 1.25
"""Ratio of the step that is printed to the forecast."""
LABELS = {
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.memory": "81559",
    "nvidia.com/gpu.count": "8",
    "node.kubernetes.io/instance-type": "p5.48xlarge",
}
SETTINGS = {"TILECAST_LOG_POLL_SECONDS": 1, "TILECAST_OBSERVE_SETTLE_SECONDS": 0.1}
SCRIPT = """
import os, time
seconds = float(os.environ["PACE"])
for step in range(1, 100000):
    slow = 20 if step == 1 else 1
    print(f" iteration {step:8d}/  500000 | consumed samples: {step * 64:12d} | elapsed time per iteration (ms): "
          f"{1000 * seconds * slow:.1f} | global batch size:    64 | lm loss: 2.1E+00 |", flush=True)
    time.sleep(0.02)
"""


@contextmanager
def gpus_on(cluster: Cluster, node: str) -> Iterator[None]:
    """Give a node with a real kubelet the labels and the GPUs of a p5.48xlarge, and take them away afterwards."""

    def set_gpus(verb: str) -> None:
        paths = [f"/status/{part}/nvidia.com~1gpu" for part in ("capacity", "allocatable")]
        change = json.dumps([{"op": verb, "path": path, "value": "8"} for path in paths])
        cluster.kubectl("patch", "node", node, "--subresource=status", "--type=json", f"--patch={change}")

    cluster.kubectl("label", "node", node, *(f"{key}={value}" for key, value in LABELS.items()))
    set_gpus("add")
    try:
        yield
    finally:
        cluster.kubectl("label", "node", node, *(f"{key}-" for key in LABELS))
        set_gpus("remove")


def printing(name: str) -> dict[str, Any]:
    """Return a suspended Job whose pod prints steps that take as long as a ConfigMap says."""
    pace = {"configMapKeyRef": {"name": name, "key": "pace"}}
    container = {
        "name": "train",
        "image": OPERATOR,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", SCRIPT],
        "env": [{"name": "PACE", "valueFrom": pace}],
        "resources": {"limits": {"nvidia.com/gpu": "8"}},
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "nodeSelector": VALUES["nodeSelector"],
        "containers": [container],
    }
    spec = {"backoffLimit": 0, "suspend": True, "template": {"spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": TEAM}, "spec": spec}


def test_the_log_of_a_running_pod_is_the_measured_step_of_its_job(kind_cluster: Cluster, team: Scene) -> None:
    values = {"jobs": {"enabled": True}, "observations": {"logs": {"enabled": True}}, "settings": SETTINGS}
    with gpus_on(kind_cluster, WORKERS[1]), installed(kind_cluster, "reads", values):
        kind_cluster.apply(json.dumps(printing("prints")))
        target = {"apiVersion": "batch/v1", "kind": "Job", "name": "prints"}
        forecast = team.apply("for-prints", targetRef=target)["recommendation"]["stepSeconds"]["target"]
        pace = f"--from-literal=pace={SLOWDOWN * forecast}"
        kind_cluster.kubectl("create", "configmap", "prints", pace, f"--namespace={TEAM}")
        start = '--patch={"spec":{"suspend":false}}'
        kind_cluster.kubectl("patch", "job", "prints", "--type=merge", start, f"--namespace={TEAM}")
        kind_cluster.kubectl(
            "wait", "--for=jsonpath={.status.ready}=1", "job/prints", f"--namespace={TEAM}", "--timeout=2m"
        )
        status = wait_for(lambda: team.with_field("for-prints", "error"), "a step from the log", WAIT_S)
        observed = status["observed"]
        assert (observed["source"], observed["node"]) == ("podLog", WORKERS[1])
        assert observed["stepSeconds"] == pytest.approx(SLOWDOWN * forecast, rel=0.01)
        assert status["error"]["rawRatio"] == pytest.approx(1 / SLOWDOWN - 1, abs=0.01)
        # A later job of the same kind is forecast slower.
        later = team.apply("later")["recommendation"]["stepSeconds"]["target"]
        assert forecast < later < 1.1 * SLOWDOWN * forecast
