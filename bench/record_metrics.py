"""Record the metrics of a running operator, once a minute, as a fixture for the tests of the alert rules.

    python bench/record_metrics.py idle tests/recorded/idle.json               # an hour in which nothing happens
    python bench/record_metrics.py busy tests/recorded/busy.json
    python bench/record_metrics.py busy /tmp/busy.json --minutes 3

It runs on a control plane of its own, with one operator with the settings of the chart, `jobs.enabled` and `jobs.gate`.
In a busy hour a TrainingJob and a batch Job in mode Initial arrive every twenty seconds, jobs report their steps, and a
node comes or goes every minute. An idle hour has only jobs that were answered before. Values are in promtool's
notation.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from fair_turns import held
from operator_scale import (
    JOBS,
    POLL_S,
    ApiServer,
    Cluster,
    Operator,
    is_answered,
    job,
    nodes,
    run_on_control_plane,
    wait_until_idle,
)

SETTINGS = {
    "TILECAST_SEARCH_PROCESSES": "1",
    "TILECAST_JOBS": "true",
    "TILECAST_PLACE": "true",
    "TILECAST_LEASE": "default/tilecast",
}
"""Settings of the chart with `jobs.enabled` and `jobs.gate`."""
INTERVAL_S = 60.0
ARRIVAL_S = 20.0
WORKLOADS = 40
SPREAD = 0.08
"""Standard deviation of measured steps about their forecasts, as a logarithm."""
BATCH_JOBS = "/apis/batch/v1/namespaces/default/jobs"
STEP = "tilecast.dev/observed-step-seconds"
VOLATILE = re.compile(r"_created(\{|$)")


def scraped(operator: Operator) -> dict[str, str]:
    """Return the value of every exported series, by its name with its labels in order."""
    values = dict[str, str]()
    for family in text_string_to_metric_families(operator.get("/metrics")):
        for sample in family.samples:
            pairs = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            values[f"{sample.name}{{{pairs}}}"] = f"{sample.value:.12g}"
    return {name: value for name, value in values.items() if not VOLATILE.search(name)}


def compressed(column: list[str]) -> str:
    """Return values in promtool's notation, with equal neighbours as `VALUExTIMES`."""
    runs = ((value, len(list(group))) for value, group in itertools.groupby(column))
    return " ".join(value if count == 1 else f"{value}x{count - 1}" for value, count in runs)


async def arrive(api: ApiServer, rng: random.Random) -> None:
    """Create a TrainingJob and a held Job, and report the step of an earlier job, again and again."""
    for number in itertools.count():
        await api.create(JOBS, job(f"busy-{number}", number % WORKLOADS))
        await api.create(BATCH_JOBS, held(f"held-{number}", 64 * (1 + number % WORKLOADS)))
        earlier = f"{JOBS}/busy-{max(number - 3, 0)}"
        document = await api.get(earlier)
        if is_answered(document) and (best := document["status"].get("recommendation")):
            step_s = best["stepSeconds"]["target"] * rng.lognormvariate(0.0, SPREAD)
            await api.merge(earlier, {"metadata": {"annotations": {STEP: f"{step_s:.6g}"}}})
        await asyncio.sleep(ARRIVAL_S)


async def scale(api: ApiServer, count: int) -> None:
    """Delete the last node, and create it again a minute later, again and again."""
    document = nodes(count)[-1]
    for number in itertools.count():
        await asyncio.sleep(INTERVAL_S)
        if number % 2:
            await api.create("/api/v1/nodes", document)
        else:
            await api.delete(f"/api/v1/nodes/{document['metadata']['name']}")


async def record(operator: Operator, minutes: int) -> tuple[float, dict[str, list[str]]]:
    """Return the time of the first scrape, and the value of each series in every minute; `_` where there was none."""
    columns, began_s, began = dict[str, list[str]](), time.time(), time.monotonic()
    for number in range(minutes + 1):
        await asyncio.sleep(max(began + number * INTERVAL_S - time.monotonic(), 0.0))
        values = await asyncio.to_thread(scraped, operator)
        for name in values.keys() - columns.keys():
            columns[name] = ["_"] * number
        for name, column in columns.items():
            column.append(values.get(name, "_"))
    return began_s, columns


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Write the fixture."""
    api, is_busy = ApiServer(cluster), arguments.kind == "busy"
    background: list[asyncio.Task[None]] = []
    try:
        await api.create_all("/api/v1/nodes", nodes(arguments.nodes))
        with Operator(cluster, settings=SETTINGS) as operator:
            await api.create_all(JOBS, (job(f"early-{number}", number) for number in range(20)))
            while not all(map(is_answered, (await api.get(JOBS))["items"])):
                await asyncio.sleep(POLL_S)
            await wait_until_idle(operator)
            if is_busy:
                rng = random.Random(1)  # noqa: S311
                background = [asyncio.create_task(work) for work in (arrive(api, rng), scale(api, arguments.nodes))]
                await asyncio.sleep(INTERVAL_S)
            recording = asyncio.create_task(record(operator, arguments.minutes))
            done, _ = await asyncio.wait([recording, *background], return_when=asyncio.FIRST_COMPLETED)
            began_s, columns = next(iter(done)).result()  # type: ignore[misc]
        document: dict[str, Any] = {
            "kind": arguments.kind,
            "interval": f"{INTERVAL_S:.0f}s",
            "minutes": arguments.minutes,
            "began": began_s,
            "settings": SETTINGS,
            "series": {name: compressed(column) for name, column in sorted(columns.items())},
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{arguments.output}: {len(columns)} series over {arguments.minutes} minutes")
    finally:
        for task in background:
            task.cancel()
        await api.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Record what a running operator exports.")
    parser.add_argument("kind", choices=["idle", "busy"], help="whether something happens meanwhile")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--minutes", type=int, default=60, help="length of the recording")
    parser.add_argument("--nodes", type=int, default=16, help="GPU nodes")
    run_on_control_plane(measure, parser.parse_args())


if __name__ == "__main__":
    main()
