"""Read the steps that the pods of running jobs log, if the settings allow it."""

from __future__ import annotations

import asyncio
import hashlib
import logging

from tilecast.jobs import Job
from tilecast.spec import SpecError
from tilecast_operator.controllers.job_advice import JobAdvisor
from tilecast_operator.controllers.observations import StepReportReceiver
from tilecast_operator.controllers.requests import JobRequestIndex
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.controllers.targets import find_running_target
from tilecast_operator.kube.client import UNREACHABLE, ApiError
from tilecast_operator.kube.controller_state import StateTable
from tilecast_operator.kube.kinds import Key
from tilecast_operator.observed import pod_logs
from tilecast_operator.observed.pod_logs import LoggingPod

log = logging.getLogger("tilecast")

JOB_S = 15.0
"""Longest time for the requests of one job, in seconds."""


class PodLogReader:
    """Reader of the logs of jobs that TrainingJobs target, one job at a time. Belongs to one event loop.

    Args:
        context: Objects that all controllers share.
        requests: Index of the jobs that TrainingJobs target.
        observations: Receiver of the steps.
        advice: Reader of whole jobs, including pods of their runtimes.
    """

    def __init__(
        self,
        context: SharedContext,
        requests: JobRequestIndex,
        observations: StepReportReceiver,
        advice: JobAdvisor,
    ) -> None:
        self._context = context
        self._requests = requests
        self._observations = observations
        self._advice = advice
        self._read: StateTable[bytes] = context.records.add_table()
        """Digest of the last part read of each job's log."""

    async def run_polls(self) -> None:
        """Read the logs of all running jobs, once in each interval, without end."""
        while True:
            await asyncio.sleep(self._context.settings.log_poll_s)
            await self.read_logs()

    async def read_logs(self) -> None:
        """Read the log of each running job once. A log that cannot be read changes nothing."""
        for key in list(self._context.cache.training_jobs):
            if not self._context.leadership.is_leader:
                return
            target = find_running_target(self._context, self._requests, key)
            if target is None or not target.kind.pod_label or not self._observations.needs_pod_log(key):
                continue
            try:
                async with asyncio.timeout(JOB_S):
                    await self._read_job(key, target)
            except SpecError as error:
                log.warning("%s: its log was not read: %s", key, error)
            except ApiError as error:
                hint = "; the chart's observations.logs.enabled grants it" if error.status == 403 else ""
                log.warning("%s: its log was not read: %s%s", key, error, hint)
            except UNREACHABLE as error:
                log.warning("%s: its log was not read: %s", key, error or "no answer in time")
            except Exception:
                log.exception("%s: its log was not read", key)

    async def _read_job(self, key: Key, target: Job) -> None:
        """Record the step in the log of a running job. The pod of rank 0 is tried first, then the last one."""
        seen = self._context.cache.jobs.get(Key(target.kind.kind, target.namespace, target.name))
        job = target if seen is None else await self._advice.read_job(seen.value)
        folder = f"/api/v1/namespaces/{job.namespace}/pods"
        query = pod_logs.make_list_query(job.kind, job.name)
        pods = pod_logs.find_pods(await self._context.client.get(folder, query), job)
        heads, known = list[bytes](), hashlib.sha256()
        for pod in pods.candidates:
            head, tail = await self._read_pod(folder, pod)
            heads.append(head)
            known.update(head + tail)
            if self._read.get(key) == known.digest():
                return
            run = await asyncio.to_thread(pod_logs.read_run, heads, tail)
            report = None if run is None else pod_logs.make_report(run, pod.node, pods.gpus)
            if report is not None:
                self._read[key] = known.digest()
                await self._observations.record_log_report(key, report)
            if run is not None:
                return

    async def _read_pod(self, folder: str, pod: LoggingPod) -> tuple[bytes, bytes]:
        """Return the beginning and the end of a pod's log. The end is empty if the beginning is the whole log."""
        path, client = f"{folder}/{pod.name}/log", self._context.client
        head_query, tail_query = (pod_logs.make_log_query(pod.container, is_tail=is_tail) for is_tail in (False, True))
        head = await client.read_bytes(path, head_query, pod_logs.HEAD_BYTES)
        if len(head) < pod_logs.HEAD_BYTES:
            return head, b""
        return head, await client.read_bytes(path, tail_query, pod_logs.TAIL_BYTES)
