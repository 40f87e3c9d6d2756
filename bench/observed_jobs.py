"""The operator on a real control plane with many measured jobs: the delay and cost of one more report, and restarts.

    python bench/observed_jobs.py                             # 3,000 jobs of 500 workloads in 50 namespaces
    python bench/observed_jobs.py --jobs 100 --distinct 10 --namespaces 5 --reports 5   # two minutes

Every job states its measured step in an annotation. Then some report another step by HTTP, as their pods would.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import time
from typing import Any

import aiohttp
import numpy as np

from operator_scale import (
    LIMIT_S,
    POLL_S,
    QUIET_S,
    ApiServer,
    Cluster,
    Operator,
    answer_last,
    job,
    metric,
    nodes,
    operator_processor_s,
    resident_mb,
    run_on_control_plane,
    wait_until_idle,
)

GROUP = "/apis/tilecast.dev/v1alpha1"
STEP = "tilecast.dev/observed-step-seconds"
SPREAD = 0.1
"""Standard deviation of measured steps about their forecasts, as a logarithm."""
LONGER = 1.5
LOOK_S, LATE_S = 0.02, 60.0
LOADED = re.compile(r"job\d+-1")


def path(number: int, namespaces: int) -> str:
    """Return the path of the jobs in a job's namespace; jobs alternate between namespaces."""
    return f"{GROUP}/namespaces/team-{number % namespaces}/trainingjobs"


async def forecasts(api: ApiServer, distinct: int) -> list[float]:
    """Return the raw step of each workload in seconds, requested in a namespace where nothing runs."""
    where = f"{GROUP}/namespaces/default/trainingjobs"
    await api.create_all(where, (job(f"plain-{number}", number) for number in range(distinct)))
    steps = []
    for number in range(distinct):
        while not (status := (await api.get(f"{where}/plain-{number}")).get("status", {})).get("summary"):
            await asyncio.sleep(POLL_S)
        best = status.get("recommendation")
        steps.append(best["stepSeconds"]["target"] if best else 0.0)
    return steps


async def load(api: ApiServer, operator: Operator, arguments: argparse.Namespace) -> list[int]:
    """Create measured jobs, and return the numbers of those that have a forecast, once all are corrected."""
    steps, rng, began = await forecasts(api, arguments.distinct), np.random.default_rng(0), time.monotonic()
    numbers = [number for number in range(arguments.jobs) if steps[number % arguments.distinct]]

    async def create(turn: int) -> None:
        for number in numbers[turn :: arguments.namespaces]:
            document = job(f"job{number}-1", number % arguments.distinct)
            seconds = steps[number % arguments.distinct] * rng.lognormal(0.0, SPREAD)
            document["metadata"]["annotations"] = {STEP: f"{seconds:.6g}"}
            await api.create(path(number, arguments.namespaces), document)

    await asyncio.gather(*(create(turn) for turn in range(arguments.namespaces)))
    while metric(operator, "tilecast_own_runs_jobs") < len(numbers):
        if time.monotonic() - began > LIMIT_S:
            raise SystemExit(f"only {metric(operator, 'tilecast_own_runs_jobs'):.0f} jobs were corrected in time")
        await asyncio.sleep(POLL_S)
    took_s, (now, most) = time.monotonic() - began, resident_mb(operator)
    print(f"load           {len(numbers)} jobs measured and corrected after {took_s:.0f} s; "
          f"{now:.0f} MB resident, {most:.0f} MB at most", flush=True)  # fmt: skip
    return numbers


async def token(api: ApiServer, namespace: int) -> str:
    """Return a token with which pods of a namespace report, for a new account."""
    accounts = f"/api/v1/namespaces/team-{namespace}/serviceaccounts"
    account = await api.create(accounts, {"metadata": {"generateName": "trainer-"}})
    name = account["metadata"]["name"]
    body = await api.create(f"{accounts}/{name}/token", {"spec": {"audiences": ["tilecast"]}})
    return str(body["status"]["token"])


def ratio(document: dict[str, Any]) -> float:
    """Return the correction that measured runs give a job's first alternative."""
    rows = document.get("status", {}).get("alternatives") or [{}]
    return float(rows[0].get("ownRunsRatio") or 0.0)


async def report(
    api: ApiServer, operator: Operator, bearer: str, number: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Report a longer step of a job; return the seconds until its status, and that of a successor, show it."""
    where, name, successor = path(number, options.namespaces), f"job{number}-1", f"job{number}-2"
    await api.create(where, job(successor, number % options.distinct))
    while not (known := {successor: ratio(await api.get(f"{where}/{successor}"))})[successor]:
        await asyncio.sleep(POLL_S)
    mine = await api.get(f"{where}/{name}")
    known[name] = ratio(mine)
    sent = {"stepSeconds": LONGER * mine["status"]["observed"]["stepSeconds"]}
    url = f"{operator.url}/observations/team-{number % options.namespaces}/{name}"
    began, took = time.monotonic(), dict[str, float]()
    headers = {"Authorization": f"Bearer {bearer}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.put(url, json=sent) as answer:
        answer.raise_for_status()
    while len(took) < len(known):
        for which in known.keys() - took.keys():
            if ratio(await api.get(f"{where}/{which}")) != known[which]:
                took[which] = time.monotonic() - began
        if time.monotonic() - began > LATE_S:
            raise SystemExit(f"{known.keys() - took.keys()} were not corrected within {LATE_S:.0f} s")
        await asyncio.sleep(LOOK_S)
    return took[name], took[successor]


async def reports(api: ApiServer, operator: Operator, numbers: list[int], options: argparse.Namespace) -> None:
    """Report steps of jobs one after the other; print the delays and the number of writes."""
    chosen = [int(number) for number in np.random.default_rng(1).choice(numbers, options.reports, replace=False)]
    bearers = {number: await token(api, number % options.namespaces) for number in chosen}
    await wait_until_idle(operator)
    spent_s, writes = operator_processor_s(operator), await api.writes()
    took = [await report(api, operator, bearers[number], number, options) for number in chosen]
    await wait_until_idle(operator)
    spent_s, after = operator_processor_s(operator) - spent_s, await api.writes()
    for who, times in zip(("its job", "a successor"), zip(*took, strict=True), strict=True):
        cuts = statistics.quantiles(times, n=20, method="inclusive")
        print(f"one report     {who} corrected after p50 {cuts[9]:.2f} s, p95 {cuts[18]:.2f} s, "
              f"worst {max(times):.2f} s", flush=True)  # fmt: skip
    per_report = (sum(after.values()) - sum(writes.values())) / len(chosen)
    now, most = resident_mb(operator)
    print(f"each           {per_report:.1f} writes and {spent_s / len(chosen):.2f} s of processor, a new successor "
          f"included; {now:.0f} MB resident, {most:.0f} MB at most", flush=True)  # fmt: skip


async def recorded(api: ApiServer) -> tuple[dict[str, str], int]:
    """Return the resource versions of the loaded jobs by UID, and the number of runs in the PoolLearnings."""
    jobs = dict[str, str]()
    async for page in api.pages(f"{GROUP}/trainingjobs"):
        metadata = [item["metadata"] for item in page if LOADED.fullmatch(item["metadata"]["name"])]
        jobs |= {item["uid"]: item["resourceVersion"] for item in metadata}
    learnings = (await api.get(f"{GROUP}/poollearnings"))["items"]
    return jobs, sum(len(item["spec"].get("runs", ())) for item in learnings)


async def restart(api: ApiServer, operator: Operator, namespaces: int) -> None:
    """Restart the operator, and print what it lost."""
    corrected, (jobs, runs) = metric(operator, "tilecast_own_runs_jobs"), await recorded(api)
    operator.stop()
    began = time.monotonic()
    operator.start()
    await answer_last(api, max(path(number, namespaces) for number in range(namespaces)))
    await wait_until_idle(operator)
    took_s, (jobs_now, runs_now) = time.monotonic() - began - QUIET_S, await recorded(api)
    other, (now, most) = sum(jobs_now[uid] != version for uid, version in jobs.items()), resident_mb(operator)
    corrected_now = metric(operator, "tilecast_own_runs_jobs")
    print(f"restart        idle after {took_s:.0f} s; {corrected:.0f} jobs were corrected and {corrected_now:.0f} are, "
          f"{other} of {len(jobs)} that run were written anew; {runs} runs were kept and {runs_now} are; "
          f"{now:.0f} MB resident, {most:.0f} MB at most", flush=True)  # fmt: skip


async def measure(cluster: Cluster, options: argparse.Namespace) -> None:
    api = ApiServer(cluster)
    try:
        await api.create_all("/api/v1/nodes", nodes(options.nodes))
        names = (f"team-{number}" for number in range(options.namespaces))
        await api.create_all("/api/v1/namespaces", ({"metadata": {"name": name}} for name in names))
        with Operator(cluster, settings=dict(text.split("=", 1) for text in options.setting)) as operator:
            numbers = await load(api, operator, options)
            await wait_until_idle(operator)
            await reports(api, operator, numbers, options)
            await restart(api, operator, options.namespaces)
    finally:
        await api.close()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure the operator with jobs that were measured.")
    for name, value in (("jobs", 3000), ("distinct", 500), ("namespaces", 50), ("nodes", 400), ("reports", 30)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="of the operator")
    run_on_control_plane(measure, parser.parse_args())


if __name__ == "__main__":
    main()
