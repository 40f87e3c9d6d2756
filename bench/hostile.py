"""Hostile objects of one tenant while honest jobs arrive: waiting times of the honest jobs, and the cost.

    python bench/hostile.py                       # 200 hostile objects, 100 honest jobs
    python bench/hostile.py --hostile 0           # the honest jobs alone, to compare

It runs on a control plane of its own, with the chart's settings for searches. The objects are those of
`tests/hostile_objects.py`; those that the API server refuses are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / name) for name in ("tools", "bench", "tests")]

from cluster import Cluster  # noqa: E402
from hostile_objects import JOBS, OTHERS, TENANT, honest, hostile  # noqa: E402
from operator_process import Operator, is_answered  # noqa: E402
from operator_scale import ApiServer, metric, nodes, run_on_control_plane, wait_until_idle  # noqa: E402

SETTINGS = {"TILECAST_JOBS": "true", "TILECAST_SEARCH_PROCESSES": "1"}
LIMIT_S = 600.0


def family_mib(pid: int | None) -> float:
    """Return the resident memory of a process and of its children, in MiB."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in (pid, *children))
    return pages * 4096 / 2**20


async def attack(api: ApiServer, count: int, seed: int) -> Counter[str]:
    """Create the hostile objects, and count the API server's answers."""
    outcomes = Counter[str]()
    for group in hostile(count, seed):
        for path, document in group:
            try:
                await api.create(path.format(TENANT), document)
                outcomes["created"] += 1
            except aiohttp.ClientResponseError as error:
                outcomes[f"refused with {error.status}"] += 1
        await asyncio.sleep(0)
    return outcomes


async def serve(api: ApiServer, count: int, every_s: float) -> list[float]:
    """Create the honest jobs one after the other, and return how long each waited for its answer, in seconds."""

    async def one(namespace: str, document: dict[str, Any]) -> float:
        path, began = JOBS.format(namespace), time.monotonic()
        await api.create(path, document)
        while not is_answered(await api.get(f"{path}/{document['metadata']['name']}")):
            if time.monotonic() - began > LIMIT_S:
                raise SystemExit(f"{document['metadata']['name']} was not answered within {LIMIT_S:.0f} s")
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    waiting = []
    for namespace, document in honest(count):
        waiting.append(asyncio.create_task(one(namespace, document)))
        await asyncio.sleep(every_s)
    return await asyncio.gather(*waiting)


async def highest_mib(operator: Operator, until: asyncio.Event) -> float:
    """Return the highest memory of operator and search process together, in MiB."""
    most = 0.0
    while not until.is_set():
        most = max(most, family_mib(operator.pid))
        await asyncio.sleep(0.25)
    return most


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Print the figures."""
    api = ApiServer(cluster)
    try:
        await api.create_all("/api/v1/nodes", nodes(arguments.nodes))
        for name in (TENANT, *OTHERS):
            await api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        with Operator(cluster, settings=SETTINGS) as operator:
            await wait_until_idle(operator)
            pid, done = operator.pid, asyncio.Event()
            memory = asyncio.create_task(highest_mib(operator, done))
            outcomes, waits = await asyncio.gather(
                attack(api, arguments.hostile, arguments.seed), serve(api, arguments.honest, arguments.every)
            )
            done.set()
            cuts = statistics.quantiles(waits, n=20)
            print(f"honest     {len(waits)} jobs, one each {arguments.every:g} s: answered after p50 {cuts[9]:.2f} s, "
                  f"p95 {cuts[18]:.2f} s, worst {max(waits):.2f} s")  # fmt: skip
            print(f"hostile    {json.dumps(dict(sorted(outcomes.items())))}")
            print(f"memory     {await memory:.0f} MiB at most, operator and search process")
            print(f"restarts   operator {int(operator.pid != pid)}, search process "
                  f"{metric(operator, 'tilecast_search_process_restarts_total'):.0f}")  # fmt: skip
    finally:
        await api.close()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure the operator while one tenant is hostile.")
    parser.add_argument("--hostile", type=int, default=200, help="hostile objects, or groups of them")
    parser.add_argument("--honest", type=int, default=100, help="honest jobs")
    parser.add_argument("--every", type=float, default=0.3, help="seconds between two honest jobs")
    parser.add_argument("--nodes", type=int, default=64, help="GPU nodes")
    parser.add_argument("--seed", type=int, default=1, help="of the hostile objects")
    arguments = parser.parse_args()
    run_on_control_plane(measure, arguments)


if __name__ == "__main__":
    main()
