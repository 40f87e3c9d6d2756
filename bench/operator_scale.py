"""The operator on a real control plane: the time to answer one job, and the cost of ten thousand.

    python bench/operator_scale.py                                        # 10,000 jobs, 500 workloads, 5,000 nodes
    python bench/operator_scale.py --jobs 500 --distinct 20 --nodes 200   # a minute
    python bench/operator_scale.py --jobs 50000 --skip-pool-change        # as many as Kueue's largest run, an hour

etcd, the API server and the operator share the machine with this program; nodes have no controller. (A file named
operator.py here would hide the standard library's module of that name from every other program of this folder.)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tools"), str(ROOT / "predictor"), str(ROOT / "operator")]

from cluster import Cluster  # noqa: E402
from operator_process import Operator, is_answered  # noqa: E402
from tilecast import zoo  # noqa: E402

PRESETS = tuple(sorted({model.name for model in zoo.presets().values() if model.vocab}))
"""Models that read tokens, so that one training spec suits them all."""
JOBS = "/apis/tilecast.dev/v1alpha1/namespaces/default/trainingjobs"
CONNECTIONS = 8
POOLS = "/apis/tilecast.dev/v1alpha1/gpupools"
PAGE = 500
KUEUE = ((15_000, 30, 351), (50_000, 1_000, 1_179))
"""Workloads, ClusterQueues and seconds of a whole run in Kueue's own CI.

The figures are from its test/performance/scheduler/configs, for a scheduler alone with an API server without nodes.
"""
QUIET_S = 5.0
"""Idle time in seconds after which the operator has seen everything."""
POLL_S = 1.0
LIMIT_S = 7200.0


class ApiServer:
    """A client with the few requests of this program."""

    def __init__(self, cluster: Cluster) -> None:
        connector = aiohttp.TCPConnector(ssl=cluster.tls(as_administrator=True), limit=CONNECTIONS)
        self._server = cluster.server()
        self._session = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        await self._session.close()

    async def create(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(self._server + path, json=document) as answer:
            answer.raise_for_status()
            created: dict[str, Any] = await answer.json()
            return created

    async def create_all(self, path: str, documents: Iterable[dict[str, Any]]) -> None:
        left = iter(documents)

        async def work() -> None:
            for document in left:
                await self.create(path, document)

        await asyncio.gather(*(work() for _ in range(CONNECTIONS)))

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        async with self._session.get(self._server + path, params=query) as answer:
            answer.raise_for_status()
            document: dict[str, Any] = await answer.json()
            return document

    async def pages(self, path: str) -> AsyncIterator[list[dict[str, Any]]]:
        query = {"limit": str(PAGE)}
        while True:
            page = await self.get(path, **query)
            yield page["items"]
            if not page["metadata"].get("continue"):
                return
            query["continue"] = page["metadata"]["continue"]

    async def merge(self, path: str, patch: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/merge-patch+json"}
        async with self._session.patch(self._server + path, data=json.dumps(patch), headers=headers) as answer:
            answer.raise_for_status()

    async def delete(self, path: str) -> None:
        async with self._session.delete(self._server + path) as answer:
            answer.raise_for_status()

    async def touch(self, path: str, value: str) -> None:
        """Change an annotation, as a component on a node might."""
        await self.merge(path, {"metadata": {"annotations": {"bench": value}}})

    async def writes(self) -> dict[str, float]:
        """Return the operator's writing requests by resource, as the API server counts them."""
        async with self._session.get(self._server + "/metrics") as answer:
            text = await answer.text()
        counts = {"jobs": 0.0, "pools": 0.0, "events": 0.0}
        for labels, value in re.findall(r"^apiserver_request_total\{(.*)\} (\S+)$", text, re.MULTILINE):
            fields = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            match fields["verb"], fields["resource"]:
                case "APPLY" | "PATCH", "trainingjobs":
                    counts["jobs"] += float(value)
                case "APPLY" | "PATCH" | "DELETE", "gpupools":
                    counts["pools"] += float(value)
                case "POST", "events":
                    counts["events"] += float(value)
        return counts


def nodes(count: int) -> list[dict[str, Any]]:
    """Return nodes of the four GPU pools of the example cluster, alternating between the pools."""
    items = yaml.safe_load((ROOT / "examples" / "clusters" / "mixed.yaml").read_text())["items"]
    kinds = {node["metadata"]["labels"].get("nvidia.com/gpu.product"): node for node in items}
    kinds.pop(None, None)
    documents = []
    for number, kind in zip(range(count), itertools.cycle(kinds.values()), strict=False):
        node = json.loads(json.dumps(kind, default=str))
        name = f"node-{number}"
        node["metadata"] = {"name": name, "labels": {**node["metadata"]["labels"], "kubernetes.io/hostname": name}}
        documents.append(node)
    return documents


def job(name: str, workload: int) -> dict[str, Any]:
    """Return a job; equal numbers give equal workloads."""
    preset, batch = PRESETS[workload % len(PRESETS)], 64 * (1 + workload // len(PRESETS))
    training = {"sequenceLength": 512, "globalBatchSize": batch, "precision": "bf16"}
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"model": {"preset": preset}, "training": training},
    }


def metric(operator: Operator, name: str) -> float:
    """Return the sum of the samples of a metric."""
    text = operator.get("/metrics")
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


def resident_mb(operator: Operator) -> tuple[float, float]:
    """Return the memory of the operator in MB (10^6 bytes), now and at its highest."""
    status = Path(f"/proc/{operator.pid}/status").read_text()
    now, most = (int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) for field in ("VmRSS", "VmHWM"))  # type: ignore[index]
    return now * 1.024e-3, most * 1.024e-3


def operator_processor_s(operator: Operator) -> float:
    """Return the processor time of the operator so far, in seconds."""
    return processor_s(operator.pid)


def processor_s(pid: int | None) -> float:
    """Return the processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processor_s_of_all(cluster: Cluster, operator: Operator) -> dict[str, float]:
    """Return the processor time so far of every process that serves jobs, and of this program."""
    children = Path(f"/proc/{operator.pid}/task/{operator.pid}/children").read_text().split()
    return {
        "the operator": operator_processor_s(operator),
        "its search processes": sum(processor_s(int(child)) for child in children),
        "the API server": processor_s(cluster.pid("kube-apiserver")),
        "etcd": processor_s(cluster.pid("etcd")),
        "this program": processor_s(os.getpid()),
    }


async def wait_until_idle(operator: Operator) -> None:
    """Wait until the operator has had nothing to do for a while."""
    quiet_s = 0.0
    while quiet_s < QUIET_S:
        await asyncio.sleep(POLL_S)
        quiet_s = 0.0 if metric(operator, "tilecast_queue_keys") else quiet_s + POLL_S


async def answer_last(api: ApiServer, path: str = JOBS) -> float:
    """Create a job that every list has last, wait for its answer, and return the operator's writes meanwhile.

    An operator that has just started has no work before its first list of jobs, which looks like idleness. It has seen
    all jobs once this one is answered.
    """
    name, writes = f"zz-{time.time_ns()}", await api.writes()
    await api.create(path, job(name, 0))
    while not is_answered(await api.get(f"{path}/{name}")):
        await asyncio.sleep(0.1)
    after = await api.writes()
    return sum(after.values()) - sum(writes.values())


async def apply_one_by_one(api: ApiServer, count: int) -> None:
    """Apply jobs of different workloads one after the other, and print how soon each was answered."""
    times = []
    for number in range(count):
        name = f"single-{number}"
        began = time.monotonic()
        await api.create(JOBS, job(name, number))
        while not is_answered(await api.get(f"{JOBS}/{name}")):
            await asyncio.sleep(0.005)
        times.append(time.monotonic() - began)
    cuts = statistics.quantiles(times, n=20)
    print(f"one by one     {count} jobs, each another workload: apply to recommendation p50 {cuts[9]:.2f} s, "
          f"p95 {cuts[18]:.2f} s, worst {max(times):.2f} s", flush=True)  # fmt: skip


def wait_s(job: dict[str, Any]) -> float:
    """Return the seconds from the creation of a job to its answer; both times are in whole seconds."""
    (ready,) = (item for item in job["status"]["conditions"] if item["type"] == "Ready")
    times = (ready["lastTransitionTime"], job["metadata"]["creationTimestamp"])
    answered, created = (datetime.fromisoformat(text).timestamp() for text in times)
    return answered - created


async def create_all_at_once(api: ApiServer, cluster: Cluster, operator: Operator, count: int, distinct: int) -> None:
    """Create all jobs as fast as the API server accepts them, and print how long until the last is answered."""
    before, writes = metric(operator, "tilecast_recommendations_total"), await api.writes()
    earlier = processor_s_of_all(cluster, operator)
    began = time.monotonic()
    await api.create_all(JOBS, (job(f"bulk-{number}", number % distinct) for number in range(count)))
    created_s = time.monotonic() - began
    while metric(operator, "tilecast_recommendations_total") - before < count:
        if time.monotonic() - began > LIMIT_S:
            raise SystemExit(f"not all jobs were advised within {LIMIT_S:.0f} s")
        await asyncio.sleep(POLL_S)
    took_s = time.monotonic() - began
    counts, waits = Counter[str](), list[float]()
    async for page in api.pages(JOBS):
        counts.update(item["status"]["summary"]["reason"] if is_answered(item) else "Unanswered" for item in page)
        waits += [wait_s(item) for item in page if is_answered(item) and item["metadata"]["name"].startswith("bulk-")]
    cuts = statistics.quantiles(waits, n=20)
    after = await api.writes()
    per_job = sum(after[kind] - writes[kind] for kind in ("jobs", "events")) / count
    spent = {who: total_s - earlier[who] for who, total_s in processor_s_of_all(cluster, operator).items()}
    now, most = resident_mb(operator)
    print(f"all at once    {count} jobs of {distinct} workloads: created in {created_s:.0f} s, all advised after "
          f"{took_s:.0f} s; each after p50 {cuts[9]:.0f} s, p95 {cuts[18]:.0f} s", flush=True)  # fmt: skip
    print(f"answers        {', '.join(f'{count} {reason}' for reason, count in counts.most_common())}")
    print(f"processor      {', '.join(f'{1e3 * one_s / count:.1f} ms {who}' for who, one_s in spent.items())}; a job")
    print(f"writes         {per_job:.2f} a job, Events included; {after['pools']:.0f} to pools in all")
    print(f"memory         {now:.0f} MB resident, {most:.0f} MB at most", flush=True)


async def node_events(api: ApiServer, operator: Operator, nodes: int, count: int) -> None:
    """Change annotations of nodes, and print the operator's cost of an event that changes no pool."""
    before_s, writes = operator_processor_s(operator), await api.writes()
    for number in range(count):
        await api.touch(f"/api/v1/nodes/node-{number % nodes}", str(number))
    await wait_until_idle(operator)
    took_s, after = operator_processor_s(operator) - before_s, await api.writes()
    print(f"node events    {count}: {1e3 * took_s / count:.1f} ms of processor each, "
          f"{sum(after.values()) - sum(writes.values()):.0f} writes", flush=True)  # fmt: skip


async def pool_change(api: ApiServer, operator: Operator, jobs: int) -> None:
    """Change the price of the pool that is most often advised, and print the cost until all jobs are answered."""
    pools = Counter[str]()
    async for page in api.pages(JOBS):
        pools.update(item["status"]["summary"]["pool"] for item in page if is_answered(item))
    (name, _), before_s, writes = *pools.most_common(1), operator_processor_s(operator), await api.writes()
    began = time.monotonic()
    await api.merge(f"{POOLS}/{name}", {"spec": {"price": {"perGpuHour": 1.01}}})
    await wait_until_idle(operator)
    took_s, after = time.monotonic() - began - QUIET_S, await api.writes()
    wrote, spent = after["jobs"] - writes["jobs"], operator_processor_s(operator) - before_s
    print(f"pool change    another price of {name}: idle after {took_s:.0f} s, {wrote / jobs:.2f} writes and "
          f"{1e3 * spent / jobs:.1f} ms of the operator's processor a job", flush=True)  # fmt: skip


async def restart(api: ApiServer, operator: Operator) -> None:
    """Restart the operator, and print its writes beside those for one new job."""
    of_one_job = await answer_last(api)
    await wait_until_idle(operator)
    operator.stop()
    before = await api.writes()
    began = time.monotonic()
    operator.start()
    await answer_last(api)
    await wait_until_idle(operator)
    took_s, after = time.monotonic() - began - QUIET_S, await api.writes()
    now, most = resident_mb(operator)
    wrote = sum(after.values()) - sum(before.values()) - of_one_job
    print(f"restart        {wrote:.0f} writes, idle after {took_s:.0f} s; {now:.0f} MB resident, {most:.0f} MB at most")


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> None:
    api = ApiServer(cluster)
    try:
        began = time.monotonic()
        await api.create_all("/api/v1/nodes", nodes(arguments.nodes))
        print(f"nodes          {arguments.nodes} created in {time.monotonic() - began:.0f} s", flush=True)
        with Operator(cluster, settings=dict(text.split("=", 1) for text in arguments.setting)) as operator:
            await wait_until_idle(operator)
            await apply_one_by_one(api, arguments.one_by_one)
            await create_all_at_once(api, cluster, operator, arguments.jobs, arguments.distinct)
            await wait_until_idle(operator)
            await node_events(api, operator, arguments.nodes, arguments.node_events)
            if not arguments.skip_pool_change:
                await pool_change(api, operator, arguments.jobs + arguments.one_by_one)
            await restart(api, operator)
        for workloads, queues, whole_s in KUEUE:
            print(f"beside it      Kueue's CI: {workloads:,} workloads in {queues:,} queues, {whole_s:,} s")
    finally:
        await api.close()


def run_on_control_plane(
    measure: Callable[[Cluster, argparse.Namespace], Coroutine[Any, Any, None]], arguments: argparse.Namespace
) -> None:
    """Run a measurement on a control plane of its own with the CRDs."""
    with Cluster(components=("etcd", "kube-apiserver")) as cluster:
        cluster.apply(ROOT / "crds")
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        asyncio.run(measure(cluster, arguments))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure the operator on a control plane of its own.")
    parser.add_argument("--jobs", type=int, default=10_000, help="TrainingJobs created at once")
    parser.add_argument("--distinct", type=int, default=500, help="distinct workloads among them")
    parser.add_argument("--nodes", type=int, default=5_000, help="GPU nodes")
    parser.add_argument("--one-by-one", type=int, default=200, help="jobs applied one after the other beforehand")
    parser.add_argument("--node-events", type=int, default=2_000, help="changes of nodes afterwards")
    parser.add_argument("--skip-pool-change", action="store_true", help="change no price: every job is answered once")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="of the operator")
    arguments = parser.parse_args()
    run_on_control_plane(measure, arguments)


if __name__ == "__main__":
    main()
