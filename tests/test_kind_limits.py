"""Limits that a cluster sets for the operator, on real kubelets: exhausted memory and closed networks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster import Cluster, wait_for
from kind_cluster import VALUES, ChartRelease, installed
from kind_node import OPERATOR
from story import TEAM, Scene

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

WAIT_S = 180
MONITORING = "monitoring"
LARGE = {
    "model": {"preset": "mixtral-8x7b"},
    "training": {
        "sequenceLength": 4096,
        "globalBatchSize": 5040,
        "precision": "bf16",
        "allowedPrecisions": ["bf16", "fp16", "fp32"],
    },
    "constraints": {},
}
"""A job whose search takes about 600 MiB."""
PROBE = """
import json, socket, sys
def answers(host, port):
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True
print(json.dumps([answers(*each.split(":")) for each in sys.argv[1:]]))
"""


def test_a_search_that_the_kernel_kills_is_set_aside_and_others_are_answered(
    kind_cluster: Cluster, team: Scene
) -> None:
    """The operator's own limit is set above the memory limit of the pod, so that the kernel ends the search.

    With control groups of version 2 the kernel ends the whole container; then the object that was read is
    quarantined.
    """
    values = {
        "resources": {"limits": {"memory": "400Mi"}},
        "settings": {"TILECAST_SEARCH_MEMORY_MIB": 4096},
    }
    with installed(kind_cluster, "small", values) as release:
        team.apply("answered-before")
        team.create("large", **LARGE)

        def reason() -> str | None:
            conditions = (team.with_field("large", "conditions") or {}).get("conditions", [])
            return next((item["reason"] for item in conditions if item["type"] == "Ready"), None)

        assert wait_for(reason, "an answer to the large job", WAIT_S) in ("SearchInterrupted", "InputQuarantined")
        team.apply("answered-after", training={"sequenceLength": 512, "globalBatchSize": 64, "precision": "bf16"})
        assert "Traceback" not in release.kubectl("logs", release.deployment)


def probe(cluster: Cluster, namespace: str) -> None:
    """Start a pod from which `reached` connects."""
    container = {"name": "probe", "image": OPERATOR, "imagePullPolicy": "Never"}
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {
            "nodeSelector": VALUES["nodeSelector"],
            "containers": [container | {"command": ["python3", "-c", "import signal; signal.pause()"]}],
            "terminationGracePeriodSeconds": 0,
        },
    }
    cluster.apply(json.dumps(pod))
    cluster.kubectl("wait", "--for=condition=Ready", "--timeout=2m", "pod/probe", f"--namespace={namespace}")


def reached(cluster: Cluster, namespace: str, pod: str, *targets: str) -> list[bool]:
    """Return for each `HOST:PORT` whether a pod can connect to it."""
    words = ["exec", f"--namespace={namespace}", pod, "--", "python3", "-c", PROBE, *targets]
    answers: list[bool] = json.loads(cluster.kubectl(*words))
    return answers


def test_a_network_policy_lets_in_and_out_what_the_operator_needs_and_no_more(
    kind_cluster: Cluster, team: Scene
) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": MONITORING}}}]
    values = {"networkPolicy": {"enabled": True, "from": peers}, "replicas": 2}
    kind_cluster.kubectl("create", "namespace", MONITORING)
    try:
        for namespace in (TEAM, MONITORING):
            probe(kind_cluster, namespace)
        with installed(kind_cluster, "closed", values) as release:
            check_the_closed_release(release, team)
    finally:
        kind_cluster.kubectl("delete", "namespace", MONITORING)


def check_the_closed_release(release: ChartRelease, team: Scene) -> None:
    cluster, (pod, _) = release.cluster, [item["metadata"]["name"] for item in release.pods()]
    operator, names = f"{release.name}-tilecast.{release.namespace}:8080", "kube-dns.kube-system:9153"

    def is_closed() -> bool:
        """Return whether the cluster's network plugin enforces the policy."""
        return reached(cluster, TEAM, "probe", operator) == [False] and reached(
            cluster, release.namespace, pod, names
        ) == [False]

    wait_for(is_closed, "a network plugin that enforces the policy", WAIT_S)
    assert reached(cluster, TEAM, "probe", names) == [True], "the port that is closed to the operator is open to others"
    assert reached(cluster, MONITORING, "probe", operator) == [True]
    api_server, others = (
        "kubernetes.default:443",
        [f"{item['status']['podIP']}:8080" for item in release.pods() if item["metadata"]["name"] != pod],
    )
    assert reached(cluster, release.namespace, pod, api_server, *others) == [True, True]
    assert "Phase:          Succeeded" in release.helm("test")
    team.apply("asked-behind-the-policy")
    restarts = [item["status"]["containerStatuses"][0]["restartCount"] for item in release.pods()]
    assert restarts == [0, 0], "probes of the kubelet are let in"
