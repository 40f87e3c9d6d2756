"""An operator that dies of a signal while it reads a batch of 666: `python doomed_operator.py JOURNAL RESULT`.

It serves the same objects at every start. Once there is nothing left to do, it writes its results to RESULT.
"""

from __future__ import annotations

import asyncio
import copy
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from job_store import PLACING, JobStore
from operator_store import JOBS, job, node, on_first_pool, settled
from tilecast.advice import Request
from tilecast.api import training_job
from tilecast.jobs import APPLIED
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.metrics import Metrics

DEADLY, SLOW = 666, 8
"""Batches of the jobs whose reading kills the operator, and of an honest one that is being read at the first deaths."""
HONEST = 20


def deadly(name: str, spec: training_job.TrainingJobSpec, stored: bytes | None) -> Request:
    time.sleep(1.0 if spec.training.global_batch_size == SLOW else 0.2)
    if spec.training.global_batch_size == DEADLY:
        signal.raise_signal(signal.SIGSEGV)
    return training_job.to_request(name, spec, stored)


def store() -> JobStore:
    """Return a store with honest jobs, a deadly TrainingJob, and a deadly Job that is held."""
    objects = JobStore()
    batches = {f"honest-{number}": 8 * (1 + number) for number in range(HONEST)} | {"bomb": DEADLY}
    for name, batch in batches.items():
        objects.put(f"{JOBS}/{name}", job(name, training={"sequenceLength": 128, "globalBatchSize": batch}))
    training = json.dumps({"sequenceLength": 128, "globalBatchSize": DEADLY})
    objects.job(new_name="held", training=training)
    return objects


async def serve(journal: str, result: Path) -> None:
    objects = store()
    running = OperatorParts(replace(PLACING, journal=journal), objects, Metrics(), on_first_pool, read=deadly)
    objects.node_count = 1
    running.cache.put_object(node())
    for path in sorted(objects.objects):
        running.cache.put_object(copy.deepcopy(objects.objects[path]))
    running.start()
    await settled(running)
    while APPLIED not in objects.annotations("held"):
        await asyncio.sleep(0.05)
    await settled(running)
    await running.quarantined.check_objects()
    answers = {
        path.removeprefix(f"{JOBS}/"): next(
            item["reason"] for item in body["status"]["conditions"] if item["type"] == "Ready"
        )
        for path, body in objects.objects.items()
        if path.startswith(JOBS)
    }
    counted = {
        sample.labels["kind"]: sample.value
        for metric in running.metrics.quarantined.collect()
        for sample in metric.samples
    }
    events = sorted(
        (item["involvedObject"]["name"], item["reason"])
        for item in objects.events.values()
        if item["type"] == "Warning"
    )
    await running.stop()
    outcome = {
        "answers": answers,
        "applied": objects.annotations("held")[APPLIED],
        "counted": counted,
        "events": events,
    }
    result.write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
