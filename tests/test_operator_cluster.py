"""The operator as its own process against a real API server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster, ClusterError, free_ports, wait_for

from tilecast_operator.report.annotations import GPUS, KEYS, POOL

ROOT = Path(__file__).parent.parent
LIMIT_S = 2.0
"""From apply to annotated."""

pytestmark = pytest.mark.cluster


class Operator:
    """One operator process; `kill` is SIGKILL."""

    def __init__(self, cluster: Cluster, log: Path) -> None:
        self.port = free_ports(1)[0]
        environment = cluster.environment() | {
            "KUBECONFIG": str(cluster.kubeconfig),
            "TILECAST_LISTEN_HOST": "127.0.0.1",
            "TILECAST_LISTEN_PORT": str(self.port),
            "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("operator", "predictor")),
        }
        command = [sys.executable, "-m", "kopf", "run", "--standalone", "-A", "-m", "tilecast_operator.handlers"]
        self.log = log.open("a")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log, cwd=log.parent)
        wait_for(lambda: self.get("readyz") == "ok", f"the operator to be ready; see {log}", 60)

    def get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=5) as answer:
                return answer.read().decode()
        except (urllib.error.URLError, OSError):
            return None

    def writes(self) -> float:
        lines = (self.get("metrics") or "").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tilecast_writes_total"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        self.log.close()
        return code


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operator") / "operator.log"


@pytest.fixture(scope="module")
def operators(cluster: Cluster, log: Path) -> Iterator[list[Operator]]:
    """Those that were started; the last one is stopped at the end."""
    started: list[Operator] = []
    yield started
    for item in started:
        if item.process.poll() is None:
            assert item.stop() == 0
    assert "Traceback" not in log.read_text()


@pytest.fixture
def operator(cluster: Cluster, log: Path, operators: list[Operator]) -> Operator:
    """One that runs, started anew only if the last was killed."""
    if not operators or operators[-1].process.poll() is not None:
        operators.append(Operator(cluster, log))
    return operators[-1]


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.kubectl("delete", "trainingjobs,events", "--all")
    cluster.kubectl("delete", "gpupools", "--all")


def get(cluster: Cluster, name: str, kind: str = "tjob") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cluster.kubectl("get", kind, name, "-o", "json"))
    return found


def condition(found: dict[str, Any], kind: str = "Ready") -> dict[str, Any]:
    conditions = found.get("status", {}).get("conditions", [])
    return next((item for item in conditions if item["type"] == kind), {})


def job(name: str, **spec: Any) -> str:
    base = {
        "model": {"preset": "gpt2"},
        "training": {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "fp16"},
    }
    return yaml.safe_dump(
        {
            "apiVersion": "tilecast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": {**base, **spec},
        }
    )


def advised(cluster: Cluster, name: str) -> dict[str, Any]:
    def probe() -> dict[str, Any] | None:
        found = get(cluster, name)
        is_current = condition(found).get("observedGeneration") == found["metadata"]["generation"]
        return found if is_current else None

    return wait_for(probe, f"{name} to be advised", 30)


def test_examples_are_advised_within_two_seconds(cluster: Cluster, operator: Operator) -> None:
    for path in sorted((ROOT / "examples" / "jobs").glob("*.yaml")):
        cluster.apply(path)
        began = time.monotonic()
        found = advised(cluster, path.stem)
        assert time.monotonic() - began < LIMIT_S
        marks = found["metadata"]["annotations"]
        assert set(KEYS) <= set(marks) and marks[POOL] and int(marks[GPUS]) >= 1
        assert condition(found)["status"] == "True"
        assert "finalizers" not in found["metadata"]
        assert not any("kopf" in key for key in marks)
    table = cluster.kubectl("get", "tjob")
    head = ["NAME", "POOL", "GPUS", "PLAN", "STEP", "RANGE", "SPEEDUP", "COST/1K", "ERROR", "REASON", "AGE"]
    assert table.split("\n")[0].split() == head
    assert table.count("Advised") == len(list((ROOT / "examples" / "jobs").glob("*.yaml")))
    events = cluster.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}").split()
    assert events.count("RecommendationUpdated") == table.count("Advised")


def test_kill_and_restart_write_nothing(cluster: Cluster, operator: Operator, log: Path) -> None:
    for number in range(5):
        cluster.apply(job(f"job-{number}", training={"sequenceLength": 512, "globalBatchSize": 8 * (number + 1)}))
    for number in range(5):
        advised(cluster, f"job-{number}")
    versions = cluster.kubectl("get", "tjob", "-o", "jsonpath={.items[*].metadata.resourceVersion}")
    operator.kill()
    again = Operator(cluster, log)
    try:
        wait_for(
            lambda: "tilecast_advice_duration_seconds_count 5.0" in (again.get("metrics") or ""), "five searches", 30
        )
        time.sleep(1.0)
        assert again.writes() == 0
        assert again.get("healthz") == "ok"
    finally:
        assert again.stop() == 0
    assert cluster.kubectl("get", "tjob", "-o", "jsonpath={.items[*].metadata.resourceVersion}") == versions


def test_killed_amid_its_writes_nothing_is_lost_or_doubled(cluster: Cluster, operator: Operator, log: Path) -> None:
    names = [f"job-{number}" for number in range(12)]
    cluster.apply("\n---\n".join(job(name) for name in names))
    operator.kill()
    for delay_s in (0.0, 0.05, 0.2):
        again = Operator(cluster, log)
        time.sleep(delay_s)
        again.kill()
    last = Operator(cluster, log)
    try:
        for name in names:
            assert condition(advised(cluster, name))["reason"] == "Advised"
    finally:
        last.stop()
    events = json.loads(cluster.kubectl("get", "events", "-o", "json"))["items"]
    about = sorted(item["involvedObject"]["name"] for item in events if item["reason"] == "RecommendationUpdated")
    assert about == sorted(names)


def test_a_deletion_never_waits_for_the_operator(cluster: Cluster, operator: Operator) -> None:
    cluster.apply(job("short-lived"))
    advised(cluster, "short-lived")
    operator.kill()
    cluster.kubectl("delete", "tjob", "short-lived", "--timeout=5s")


def test_an_unknown_model_is_a_condition_and_mending_it_helps(cluster: Cluster, operator: Operator) -> None:
    cluster.apply(job("typo", model={"preset": "gtp2"}))
    found = advised(cluster, "typo")
    assert condition(found)["reason"] == "InvalidSpec"
    assert condition(found)["message"].startswith("spec.model.preset: unknown model 'gtp2'; did you mean")
    assert POOL not in found["metadata"].get("annotations", {})
    cluster.apply(job("typo"))
    assert condition(advised(cluster, "typo"))["reason"] == "Advised"


def test_mode_off_writes_the_status_only(cluster: Cluster, operator: Operator) -> None:
    cluster.apply(job("quiet"))
    assert POOL in advised(cluster, "quiet")["metadata"]["annotations"]
    cluster.apply(job("quiet", mode="Off"))
    wait_for(lambda: POOL not in get(cluster, "quiet")["metadata"]["annotations"], "annotations to go", 10)
    assert advised(cluster, "quiet")["status"]["recommendation"]["pool"]


def test_a_users_pool_changes_the_advice(cluster: Cluster, operator: Operator) -> None:
    cluster.apply(job("mover", objective="cost"))
    before = advised(cluster, "mover")["metadata"]["annotations"][POOL]
    pool = {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "GPUPool",
        "metadata": {"name": "bargain"},
        "spec": {
            "nodeType": "p4de.24xlarge",
            "selector": {"no": "node"},
            "maxNodes": 2,
            "price": {"perGpuHour": 0.001},
        },
    }
    cluster.apply(yaml.safe_dump(pool))
    wait_for(lambda: get(cluster, "mover")["metadata"]["annotations"][POOL] == "bargain", "the bargain", 10)
    assert condition(get(cluster, "bargain", "gpupool"))["reason"] == "NoNodesNow"
    cluster.kubectl("delete", "gpupool", "bargain")
    wait_for(lambda: get(cluster, "mover")["metadata"]["annotations"][POOL] == before, "the old advice", 10)


REFUSED = [
    ({"training": {"globalBatchSize": 0}}, "should be greater than or equal to 1"),
    ({"training": {"globalBatchSize": 8, "microBatchSize": 3}}, "leave microBatchSize out"),
    ({"training": {"globalBatchSize": 8, "sequenceLength": 8, "steps": 1, "tokens": 1}}, "keep one of them"),
    ({"training": {"globalBatchSize": 8, "tokens": 1}}, "tokens needs sequenceLength"),
    ({"model": {}}, "exactly one of preset and transformer"),
    ({"model": {"transformer": {"layers": 1, "hiddenSize": 9, "attentionHeads": 2, "vocabularySize": 9}}}, "headSize"),
    ({"constraints": {"gpus": 9, "maxGpus": 8}}, "gpus is above maxGpus"),
    ({"workload": "inference", "training": {"globalBatchSize": 8, "optimizer": "adam"}}, "inference has no optimizer"),
    ({"objectiv": "cost"}, "unknown field"),
    ({"mode": "Auto"}, "Unsupported value"),
]


@pytest.mark.parametrize(("spec", "message"), REFUSED, ids=[row[1] for row in REFUSED])
def test_the_api_server_refuses_what_cannot_be_meant(cluster: Cluster, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        cluster.apply(job("refused", **spec))


@pytest.mark.parametrize(
    "field", ["tjob.spec.training.globalBatchSize", "tjob.status.conditions", "gpupool.spec.price"]
)
def test_kubectl_explains_fields(cluster: Cluster, field: str) -> None:
    assert "DESCRIPTION:\n    <empty>" not in cluster.kubectl("explain", field)
