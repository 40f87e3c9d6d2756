"""One tenant creates hostile objects of every kind while others' honest jobs arrive, on a real API server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster, ClusterError, wait_for
from hostile_objects import BATCH, OTHERS, TENANT, honest, hostile
from operator_process import Operator, is_answered

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"TILECAST_JOBS": "true", "TILECAST_PLACE": "true", "TILECAST_SEARCH_PROCESSES": "1"}
HOSTILE, HONEST, WAIT_S = 200, 100, 300


@pytest.fixture
def cluster(binaries: Path) -> Iterator[Cluster]:
    """Yield a separate control plane, because hostile objects would disturb every other test."""
    with Cluster(nodes=ROOT / "examples" / "clusters" / "mixed.yaml") as started:
        started.apply(ROOT / "crds")
        started.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        for name in (TENANT, *OTHERS):
            started.kubectl("create", "namespace", name)
        yield started


def create(cluster: Cluster, documents: list[dict[str, Any]]) -> int:
    """Create objects in one call of kubectl, and return how many the API server refused."""
    text = "\n---\n".join(json.dumps(item) for item in documents)
    try:
        cluster.kubectl("create", "--validate=false", "-f", "-", input=text)
    except ClusterError as error:
        return str(error).count("rror")
    return 0


def test_hostile_objects_stop_nobody(cluster: Cluster) -> None:
    with Operator(cluster, settings=SETTINGS) as operator:
        pid, good = operator.pid, list(honest(HONEST))
        groups = list(hostile(HOSTILE, seed=1))
        for start in range(0, HOSTILE, 50):
            bad = [
                {"apiVersion": "v1", **document, "metadata": {**document["metadata"], "namespace": TENANT}}
                for group in groups[start : start + 50]
                for _, document in group
            ]
            create(cluster, bad)
            share = slice(start * HONEST // HOSTILE, (start + 50) * HONEST // HOSTILE)
            create(cluster, [{**job, "metadata": {**job["metadata"], "namespace": name}} for name, job in good[share]])

        def answered() -> list[dict[str, Any]] | None:
            items = json.loads(cluster.kubectl("get", "tjob", "--all-namespaces", "-o", "json"))["items"]
            others = [item for item in items if item["metadata"]["namespace"] != TENANT]
            return others if len(others) == HONEST and all(map(is_answered, others)) else None

        jobs = wait_for(answered, "every honest job to be answered", WAIT_S)
        reasons = Counter(item["status"]["summary"]["reason"] for item in jobs)
        assert set(reasons) == {"Advised"}, reasons
        assert operator.pid == pid, operator.log_tail()

        def released() -> bool:
            items = json.loads(cluster.kubectl("get", "jobs", f"--namespace={TENANT}", "-o", "json"))["items"]
            held = [item for item in items if item["metadata"]["annotations"].get("tilecast.dev/mode") == "Initial"]
            return bool(held) and all("tilecast.dev/applied" in item["metadata"]["annotations"] for item in held)

        wait_for(released, "every hostile job that is held to be let go", WAIT_S)
        assert operator.get("/healthz") and operator.pid == pid
        assert "Traceback" not in operator.log_tail(100_000)


def test_the_generator_reaches_every_door() -> None:
    paths = Counter(path for group in hostile(80, seed=1) for path, _ in group)
    assert set(paths.values()) >= {10} and paths[BATCH] == 30 and len(paths) == 3
    assert yaml.safe_load(json.dumps([document for group in hostile(8, seed=2) for _, document in group]))
