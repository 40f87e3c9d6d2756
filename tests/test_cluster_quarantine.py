"""An operator that dies at an object of a real API server is started anew, and then serves everybody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, ClusterError, wait_for
from hostile_objects import annotated_job
from operator_process import Operator, is_answered

pytestmark = pytest.mark.cluster

WAIT_S = 120
DEADLY, SLOW = 666, 8
"""Batches of the jobs whose reading kills the operator, and of an honest one that is being read at the first deaths."""
HONEST = [f"honest-{number}" for number in range(8)]
MOST_DEATHS = 8
"""Twice the expected deaths: at the first death each of two deadly jobs is read beside others, then alone."""
PRELUDE = f"""
import functools, signal, time
from tilecast.api import training_job
from tilecast_operator import main

def read(name, spec, stored):
    time.sleep(1.0 if spec.training.global_batch_size == {SLOW} else 0.2)
    if spec.training.global_batch_size == {DEADLY}:
        signal.raise_signal(signal.SIGSEGV)
    return training_job.to_request(name, spec, stored)

main.OperatorParts = functools.partial(main.OperatorParts, read=read)
"""


def training_job(name: str, batch: int) -> dict[str, Any]:
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": {"preset": "gpt2"}, "training": {"sequenceLength": 128, "globalBatchSize": batch}},
    }


def test_an_operator_that_dies_at_two_objects_serves_all_others_in_the_end(
    bare_cluster: Cluster, tmp_path: Path
) -> None:
    cluster = bare_cluster
    settings = {
        "TILECAST_JOBS": "true",
        "TILECAST_PLACE": "true",
        "TILECAST_SEARCH_PROCESSES": "0",
        "TILECAST_JOURNAL": str(tmp_path),
    }
    batches = {name: 8 * (1 + number) for number, name in enumerate(HONEST)} | {"bomb": DEADLY}
    operator = Operator(cluster, settings=settings, prelude=PRELUDE)

    def reasons() -> dict[str, str]:
        jobs = json.loads(cluster.kubectl("get", "tjob", "-o", "json"))["items"]
        return {job["metadata"]["name"]: job["status"]["summary"]["reason"] for job in jobs if is_answered(job)}

    def applied() -> str | None:
        job = json.loads(cluster.kubectl("get", "job", "held", "-o", "json"))
        outcome: str | None = job["metadata"]["annotations"].get("tilecast.dev/applied")
        return outcome

    def told() -> set[str]:
        """Return the names of the objects about which an Event says that they were set aside."""
        every = json.loads(cluster.kubectl("get", "events", "-o", "json"))["items"]
        told_of = (item for item in every if "InputQuarantined" in item["reason"] + item["message"])
        return {item["involvedObject"]["name"] for item in told_of}

    def settled_or_dead() -> bool:
        return operator.pid is None or (reasons().keys() == batches.keys() and applied() is not None)

    def apply(*items: dict[str, Any]) -> None:
        cluster.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))

    deaths = 0
    try:
        deadly = json.dumps({"sequenceLength": 128, "globalBatchSize": DEADLY})
        held = annotated_job("held", mode="Initial", model="gpt2", training=deadly)
        apply(*(training_job(name, batch) for name, batch in batches.items()), held)
        while True:
            try:
                if operator.pid is None:
                    operator.start()
                wait_for(settled_or_dead, "every answer or the end of the operator", WAIT_S)
            except ClusterError as error:
                assert "ended with status -11" in str(error)
            if operator.pid is not None:
                break
            deaths += 1
            assert deaths <= MOST_DEATHS, operator.log_tail()
        assert deaths >= 1
        assert reasons() == dict.fromkeys(HONEST, "Advised") | {"bomb": "InputQuarantined"}
        assert applied() == "InputQuarantined", "a held job is let go as it is"
        assert not json.loads(cluster.kubectl("get", "job", "held", "-o", "json"))["spec"]["suspend"]
        metrics = operator.get("/metrics")
        for kind in ("Job", "TrainingJob"):
            assert f'tilecast_quarantined_objects{{kind="{kind}"}} 1.0' in metrics
        wait_for(lambda: told() >= {"bomb", "held"}, "an Event about each", WAIT_S)
        assert operator.stop() == 0
    finally:
        operator.kill()
        cluster.kubectl("delete", "tjob,jobs,gpupools,events", "--all", "--wait=false")
