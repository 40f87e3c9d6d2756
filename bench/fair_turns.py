"""Waiting times of one namespace's jobs while another sweeps hundreds of workloads, on a real control plane.

    python bench/fair_turns.py                                    # 800 workloads; a job and a held job every 2 s
    python bench/fair_turns.py --sweep 150 --every 1 --nodes 50   # a minute

The held jobs are batch Jobs in mode Initial, which are placed only if they are answered in time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from operator_scale import (
    ApiServer,
    Cluster,
    Operator,
    is_answered,
    job,
    metric,
    nodes,
    run_on_control_plane,
    wait_until_idle,
)

SWEEP, OTHER = "sweep", "other"
SETTINGS = {"TILECAST_SEARCH_PROCESSES": "1", "TILECAST_JOBS": "true", "TILECAST_PLACE": "true"}
APPLIED = "tilecast.dev/applied"
POLL_S = 0.01
LIMIT_S = 900.0


def jobs(namespace: str) -> str:
    """Return the path of the TrainingJobs of a namespace."""
    return f"/apis/tilecast.dev/v1alpha1/namespaces/{namespace}/trainingjobs"


def held(name: str, batch: int) -> dict[str, Any]:
    """Return a Job that waits to be placed."""
    limits = {"nvidia.com/gpu": 4}
    container = {"name": "train", "image": "registry.example.com/train:1", "resources": {"limits": limits}}
    annotations = {
        "tilecast.dev/model": "resnet-50",
        "tilecast.dev/training": f'{{"globalBatchSize": {batch}, "precision": "fp16"}}',
        "tilecast.dev/mode": "Initial",
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"tilecast.dev/enabled": "true"}, "annotations": annotations},
        "spec": {
            "suspend": True,
            "completionMode": "Indexed",
            "parallelism": 2,
            "completions": 2,
            "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
        },
    }


async def waited_s(
    api: ApiServer, path: str, document: dict[str, Any], is_over: Callable[[Mapping[str, Any]], bool]
) -> tuple[float, dict[str, Any]]:
    """Create an object, and return how long it took until it was answered, and the answered object."""
    began = time.monotonic()
    await api.create(path, document)
    while time.monotonic() < began + LIMIT_S:
        body = await api.get(f"{path}/{document['metadata']['name']}")
        if is_over(body):
            return time.monotonic() - began, body
        await asyncio.sleep(POLL_S)
    raise SystemExit(f"{document['metadata']['name']} was not answered within {LIMIT_S:.0f} s")


def quantiles(times: list[float]) -> str:
    """Return the quantiles of some waits as text."""
    if len(times) < 2:
        return f"{max(times, default=0.0):.2f} s"
    cuts = statistics.quantiles(times, n=20, method="inclusive")
    return f"p50 {cuts[9]:.2f} s, p95 {cuts[18]:.2f} s, worst {max(times):.2f} s"


async def measure(api: ApiServer, operator: Operator, arguments: argparse.Namespace) -> None:
    before = metric(operator, "tilecast_recommendations_total")
    began = time.monotonic()
    create = asyncio.create_task(
        api.create_all(jobs(SWEEP), (job(f"sweep-{number}", number) for number in range(arguments.sweep)))
    )
    others, waiting = list[asyncio.Task[Any]](), list[asyncio.Task[Any]]()
    for number in range(arguments.sweep):
        await asyncio.sleep(arguments.every)
        answered = metric(operator, "tilecast_recommendations_total") - before
        if answered - sum(task.done() for task in (*others, *waiting)) >= arguments.sweep:
            break
        one = job(f"other-{number}", arguments.sweep + number)
        others.append(asyncio.create_task(waited_s(api, jobs(OTHER), one, is_answered)))
        one = held(f"held-{number}", 64 * (1 + number))
        path = f"/apis/batch/v1/namespaces/{OTHER}/jobs"
        waiting.append(asyncio.create_task(waited_s(api, path, one, lambda body: APPLIED in annotations_of(body))))
    await create
    waits = [seconds for seconds, _ in await asyncio.gather(*others)]
    let_go = await asyncio.gather(*waiting)
    while metric(operator, "tilecast_recommendations_total") - before < arguments.sweep + len(others):
        await asyncio.sleep(0.5)
    outcomes = Counter(annotations_of(body)[APPLIED] for _, body in let_go)
    print(f"sweep          {arguments.sweep} workloads answered after {time.monotonic() - began:.0f} s", flush=True)
    print(f"other jobs     {len(waits)} of another namespace meanwhile: {quantiles(waits)}")
    print(f"held jobs      {len(let_go)} of it meanwhile: {quantiles([seconds for seconds, _ in let_go])}; "
          f"{', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())}", flush=True)  # fmt: skip


def annotations_of(body: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the annotations of an object."""
    return body["metadata"].get("annotations") or {}


async def run(cluster: Cluster, arguments: argparse.Namespace) -> None:
    api = ApiServer(cluster)
    try:
        for name in (SWEEP, OTHER):
            await api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        await api.create_all("/api/v1/nodes", nodes(arguments.nodes))
        with Operator(cluster, settings=SETTINGS | dict(text.split("=", 1) for text in arguments.setting)) as operator:
            await wait_until_idle(operator)
            await measure(api, operator, arguments)
    finally:
        await api.close()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure what a sweep of one namespace does to another's jobs.")
    parser.add_argument("--sweep", type=int, default=800, help="TrainingJobs of one namespace, each another workload")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two jobs of the other namespace")
    parser.add_argument("--nodes", type=int, default=200, help="GPU nodes")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="of the operator")
    arguments = parser.parse_args()
    run_on_control_plane(run, arguments)


if __name__ == "__main__":
    main()
