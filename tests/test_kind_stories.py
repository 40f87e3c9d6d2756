"""Stories that need real kubelets: killed and drained pods, a memory limit, training pods that report their steps."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import Cluster, ClusterError, wait_for
from conftest import ROOT
from kind_cluster import VALUES, WORKERS, ChartRelease, installed
from kind_node import OPERATOR
from story import TEAM, Scene

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

WAIT_S = 120


@pytest.fixture(scope="module")
def pair(kind_cluster: Cluster) -> Iterator[ChartRelease]:
    """Yield two replicas on two nodes."""
    with installed(kind_cluster, "pair", {"replicas": 2}) as release:
        yield release


def leader(release: ChartRelease) -> str:
    """Return the name of the pod that holds the Lease."""
    lease = json.loads(release.kubectl("get", "lease", f"{release.name}-tilecast", "-o", "json"))
    return str(lease["spec"].get("holderIdentity", "")).rpartition("_")[0]


def node_of(release: ChartRelease, pod: str) -> str:
    (node,) = (item["spec"]["nodeName"] for item in release.pods() if item["metadata"]["name"] == pod)
    return str(node)


def ready(release: ChartRelease) -> list[str]:
    """Return the nodes of the ready pods."""
    return sorted(
        item["spec"]["nodeName"]
        for item in release.pods()
        if any(each["type"] == "Ready" and each["status"] == "True" for each in item["status"].get("conditions", ()))
    )


def on_node(node: str, script: str) -> str:
    """Run a shell script in the container that is a node, and return its output."""
    command = ["docker", "exec", node, "sh", "-euc", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill(release: ChartRelease, pod: str) -> None:
    """Kill the operator's process in a pod with SIGKILL."""
    container = f"$(crictl ps --quiet --name '^operator$' --label io.kubernetes.pod.name={pod})"
    process = f"crictl inspect --output go-template --template '{{{{.info.pid}}}}' {container}"
    on_node(node_of(release, pod), f"kill -9 $({process})")


def events(cluster: Cluster) -> Counter[str]:
    """Count the Events about each TrainingJob."""
    items = json.loads(cluster.kubectl("get", "events", f"--namespace={TEAM}", "-o", "json"))["items"]
    return Counter(item["involvedObject"]["name"] for item in items if item["involvedObject"]["kind"] == "TrainingJob")


def test_a_leader_that_is_killed_is_followed_and_nothing_is_said_twice(pair: ChartRelease, team: Scene) -> None:
    assert ready(pair) == sorted(WORKERS)
    first = wait_for(lambda: leader(pair), "a leader", WAIT_S)
    names = [f"of-the-killed-{number}" for number in range(20)]
    for name in names[:10]:
        team.create(name)
    kill(pair, first)
    for name in names[10:]:
        team.create(name)
    wait_for(lambda: leader(pair) not in ("", first), "the other to lead", WAIT_S)
    for name in names:
        wait_for(lambda name=name: team.with_field(name, "recommendation"), f"advice for {name}", WAIT_S)
    assert events(pair.cluster) == dict.fromkeys(names, 1)
    wait_for(lambda: len(ready(pair)) == 2, "the killed one to be ready again", WAIT_S)
    restarts = {
        item["metadata"]["name"]: item["status"]["containerStatuses"][0]["restartCount"] for item in pair.pods()
    }
    assert restarts.pop(first) == 1 and set(restarts.values()) == {0}


def test_a_drain_moves_the_leader_and_somebody_is_always_ready(pair: ChartRelease, team: Scene) -> None:
    first = wait_for(lambda: leader(pair), "a leader", WAIT_S)
    node = node_of(pair, first)
    words = ["drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=4m"]
    program = str(pair.cluster.folder / "programs" / "kubectl")
    drain = subprocess.Popen(
        [program, f"--kubeconfig={pair.cluster.kubeconfig}", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        at_once = [len(ready(pair))]
        while drain.poll() is None:
            at_once.append(len(ready(pair)))
        assert drain.returncode == 0, drain.communicate()[0]
        assert min(at_once) >= 1
        wait_for(lambda: len(ready(pair)) == 2, "two ready pods elsewhere", WAIT_S)
        assert node not in ready(pair)
        wait_for(lambda: leader(pair) not in ("", first), "another to lead", WAIT_S)
        team.apply("created-after-the-drain")
    finally:
        drain.kill()
        drain.communicate()
        pair.kubectl("uncordon", node)


def test_an_operator_whose_memory_is_spent_is_restarted_and_goes_on(pair: ChartRelease, team: Scene) -> None:
    """The chart's limit applies to the container: a process that exceeds it is killed, and the pod recovers."""
    first = wait_for(lambda: leader(pair), "a leader", WAIT_S)
    eat = "whole = bytearray(2 << 30); whole[::4096] = b'x' * len(whole[::4096])"
    (pod,) = (item for item in pair.pods() if item["metadata"]["name"] == first)
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == "1Gi"
    with pytest.raises(ClusterError, match="exit code 137"):
        pair.kubectl("exec", first, "--container=operator", "--", "python3", "-c", eat)
    team.apply("after-the-limit")


def training(job: str, url: str) -> dict[str, Any]:
    """Return a Job whose pod trains for some steps, as the README of tilecast-observe describes, and ends."""
    script = (
        "import time\n"
        "from tilecast_observe import StepTimer\n"
        "with StepTimer(warmup_steps=2, interval_s=3600) as timer:\n"
        "    for _ in range(12):\n"
        "        time.sleep(0.05)\n"
        "        timer.step()\n"
    )
    container = {
        "name": "train",
        "image": OPERATOR,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", script],
        "env": [
            {"name": "TILECAST_JOB", "value": job},
            {"name": "TILECAST_URL", "value": url},
            {"name": "TILECAST_NAMESPACE", "value": TEAM},
            {"name": "PYTHONPATH", "value": "/observe"},
        ],
        "volumeMounts": [
            {"name": "token", "mountPath": "/var/run/secrets/tilecast"},
            {"name": "observe", "mountPath": "/observe/tilecast_observe"},
        ],
    }
    token = {"serviceAccountToken": {"audience": "tilecast", "path": "token", "expirationSeconds": 3600}}
    pod = {
        "restartPolicy": "Never",
        "nodeSelector": VALUES["nodeSelector"],
        "containers": [container],
        "volumes": [
            {"name": "token", "projected": {"sources": [token]}},
            {"name": "observe", "configMap": {"name": "tilecast-observe"}},
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job, "namespace": TEAM},
        "spec": {"backoffLimit": 0, "template": {"spec": pod}},
    }


def test_training_pods_report_their_steps_and_end(pair: ChartRelease, team: Scene) -> None:
    forecast = team.apply("trains")["recommendation"]["stepSeconds"]["target"]
    sources = sorted((ROOT / "predictor" / "tilecast_observe").glob("*.py"))
    files = [f"--from-file={path}" for path in sources]
    pair.cluster.kubectl("create", "configmap", "tilecast-observe", f"--namespace={TEAM}", *files)
    url = f"http://{pair.name}-tilecast.{pair.namespace}:8080"
    pair.cluster.apply(json.dumps(training("trains", url)))
    pair.cluster.kubectl("wait", "--for=condition=Complete", "--timeout=3m", "job/trains", f"--namespace={TEAM}")
    log = pair.cluster.kubectl("logs", "job/trains", f"--namespace={TEAM}")
    status = wait_for(lambda: team.with_field("trains", "observed"), f"a report ({log})", WAIT_S)
    assert status["observed"]["samples"] == 1
    assert status["observed"]["stepSeconds"] == pytest.approx(0.05, rel=0.9)
    assert status["error"]["rawRatio"] == pytest.approx(forecast / status["observed"]["stepSeconds"] - 1, abs=0.02)
