"""Read all waiting and running jobs as rows of the queue plan. Unchanged rows are cached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Sequence

from tilecast import jobs
from tilecast.advice import Request
from tilecast.api.fields import as_mapping
from tilecast.hardware import Pool
from tilecast.jobs import Job
from tilecast.planner.options import list_job_options, scale_options, separate_length
from tilecast.planner.problem import JobOption, UnplannedJob
from tilecast.spec import SpecError
from tilecast_operator.controllers import patches
from tilecast_operator.controllers.job_advice import AdviceRequest, JobAdvisor, JobSearchInputs
from tilecast_operator.controllers.requests import read_mode, read_target
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.client import UNREACHABLE, ApiError
from tilecast_operator.kube.controller_state import StateTable
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.times import parse_time
from tilecast_operator.objects.view import View
from tilecast_operator.outcome import AdviceOutcome, AdviceRefusal, get_ready_message
from tilecast_operator.queue_rows import Place, QueueRow, make_plan_name
from tilecast_operator.report import job_status
from tilecast_operator.result_cache import ResultCache
from tilecast_operator.search_inputs import SearchInputs

AT_ONCE = 64
"""Number of jobs that are read before other tasks of the event loop may run."""
MOST_TEXT = 400
"""Maximum length of the reason why a job is left out, in characters."""
UNREADABLE = "what it asks cannot be read now"
"""Reason why a job is left out of one plan, but not necessarily of the next."""

log = logging.getLogger("tilecast")


class QueueJobReader:
    """Reader of the jobs in the queue plan. Belongs to one event loop."""

    def __init__(self, context: SharedContext, advice: JobAdvisor) -> None:
        self._context = context
        self.answers = advice.answers
        self._advice = advice
        self._rows: StateTable[tuple[Hashable, QueueRow | UnplannedJob | None]] = context.records.add_table()
        """Cached row of each job, with the state of the job from which it was read."""
        self._options: ResultCache[tuple[JobOption, ...]] = ResultCache(context.settings.advice_cache)
        self._since: StateTable[float] = context.records.add_table()
        """Time at which a job was first seen running, if the job does not say when it started."""

    def clear_rows(self) -> None:
        """Drop the cached rows of all jobs, because pools, quotas or namespaces have changed."""
        self._rows.clear()
        self._options.clear()

    def drop_row(self, key: Key) -> None:
        """Drop the cached row of a job."""
        self._rows.pop(key, None)

    async def read_rows(self) -> tuple[list[QueueRow], list[UnplannedJob]]:
        """Return the row of each waiting or running job, and the jobs that are left out, with reasons."""
        rows, refused = list[QueueRow](), list[UnplannedJob]()
        cache = self._context.cache
        for number, key in enumerate((*cache.training_jobs, *cache.jobs)):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            row = await self._context.journal.await_recorded(key, self._read_row(key))
            if isinstance(row, QueueRow):
                rows.append(row)
            elif row is not None:
                refused.append(row)
        return rows, refused + self._list_namespaces_with_invalid_weight()

    async def _read_row(self, key: Key) -> QueueRow | UnplannedJob | None:
        """Return the row of a job, or why it is left out. Return None if the job requests no advice."""
        cache = self._context.cache
        if (refusal := self._context.find_quarantine(key)) is not None:
            return UnplannedJob(make_plan_name(key), refusal.message[:MOST_TEXT], "")
        view, seen = cache.training_jobs.get(key), cache.jobs.get(key)
        if view is not None:
            made_of: Hashable = (view.uid, view.value.packed_document, view.value.inputs, view.value.digest)
        elif seen is not None:
            made_of = (seen.uid, seen.resource_version)
        else:
            return None
        known = self._rows.get(key)
        if known is not None and known[0] == made_of:
            return known[1]
        row: QueueRow | UnplannedJob | None
        try:
            row = await (self._read_training_job(key, view.value) if view is not None else self._read_job(key, seen))
        except SpecError as error:
            row = UnplannedJob(make_plan_name(key), f"{error.field}: {error.problem}", error.remedy)
        except (ApiError, *UNREACHABLE) as error:
            log.warning("%s: left out of the queue: %s", key, error)
            return UnplannedJob(make_plan_name(key), UNREADABLE, "")
        self._rows[key] = made_of, row
        return row

    async def _read_training_job(self, key: Key, view: View) -> QueueRow | UnplannedJob | None:
        """Return the row of a TrainingJob. Return None if its mode is Off or it has a target."""
        document, before = view.document, job_status.parse_status(view.status_json)
        if read_mode(document) == "Off" or read_target(key.namespace, document) is not None:
            return None
        question = await self.answers.read_search_inputs([key], document)
        if isinstance(question.request, AdviceRefusal):
            return UnplannedJob(make_plan_name(key), question.request.message[:MOST_TEXT], "")
        options = await self._price_options(question, question.request, self.answers.advisor.list_pools(question))
        if not options:
            return _make_unplanned_job(key, await self.answers.find_advice(question))
        forecast, best = before.forecast, before.recommendation
        place = None
        if forecast is not None and best is not None:
            place = forecast.pool or best.pool, forecast.gpus or best.gpus
        return QueueRow(
            key,
            options,
            parse_time(view.created) or self._context.clock(),
            self._read_namespace_weight(key.namespace),
            jobs.read_weight(dict(view.inputs)),
            self._context.cache.priorities.find_priority("", ""),
            deadline_s=question.request.deadline_s,
            place=place,
            began_s=None if forecast is None or place is None else parse_time(forecast.frozen_at),
            is_endless=True,
        )

    async def _read_job(self, key: Key, seen: CachedObject[Document] | None) -> QueueRow | UnplannedJob | None:
        """Return the row of a job of any kind except TrainingJob."""
        if seen is None:
            return None
        job = await self._advice.read_job(seen.value)
        advice_request = None if job.is_finished or job.is_owned else self._advice.find_advice_request(key, job)
        if advice_request is None or (not isinstance(advice_request, AdviceRefusal) and advice_request.mode == "Off"):
            return None
        if isinstance(advice_request, AdviceRefusal):
            return UnplannedJob(make_plan_name(key), advice_request.message[:MOST_TEXT], "")
        question = await self._advice.read_search_inputs(job, advice_request, writes_advice=True)
        if isinstance(question, AdviceRefusal):
            return UnplannedJob(make_plan_name(key), question.message[:MOST_TEXT], "")
        options = await self._price_options(question.question, question.request, question.choice.pools)
        if not options:
            return _make_unplanned_job(key, (await self._advice.advise_job(job, advice_request, writes_advice=True))[0])
        baseline, is_placed = question.choice.baseline, job.annotations.get(jobs.APPLIED) in _PLACED
        place = (baseline.pool, baseline.gpus) if baseline and (is_placed or job.has_started) else None
        if job.has_started and place is None:
            return UnplannedJob(
                make_plan_name(key), "it runs, and nothing says on which pool", "select its nodes in its pods"
            )
        return QueueRow(
            key,
            options,
            parse_time(seen.value["metadata"].get("creationTimestamp")) or self._context.clock(),
            self._read_namespace_weight(key.namespace),
            jobs.read_weight(job.annotations),
            self._context.cache.priorities.find_priority(job.workload_priority_class, job.pod_priority_class),
            question.request.deadline_s,
            question.queue,
            _list_quotas(question),
            job.gpus if self._is_placed_by_kueue(job, advice_request, question, place) else 0,
            place,
            self._find_start_time(key, seen.value) if job.has_started else None,
        )

    def _is_placed_by_kueue(
        self, job: Job, advice_request: AdviceRequest, question: JobSearchInputs, place: Place | None
    ) -> bool:
        """Return whether Kueue chooses the pool of a job, because Tilecast neither has placed it nor will place it.

        Without estimates this does not matter, and the result is False.
        """
        settings = self._context.settings
        is_ours = job.is_held and advice_request.mode == "Initial" and settings.place
        return settings.queue_estimates and bool(question.queue) and place is None and not is_ours

    def _read_namespace_weight(self, namespace: str) -> float:
        """Return the weight of each job of a namespace, from the Namespace's annotation."""
        seen = self._context.cache.namespaces.get(Key("Namespace", "", namespace))
        try:
            return 1.0 if seen is None else jobs.read_weight(seen.value.annotations)
        except SpecError:
            return 1.0  # `_list_namespaces_with_invalid_weight` reports it

    def _list_namespaces_with_invalid_weight(self) -> list[UnplannedJob]:
        """Return the namespaces with an invalid weight in their annotation."""
        odd = list[UnplannedJob]()
        for key, namespace in self._context.cache.namespaces.items():
            try:
                jobs.read_weight(namespace.annotations)
            except SpecError as error:
                odd.append(
                    UnplannedJob(f"Namespace/{key.name}", str(error), "its jobs count 1 each", is_left_out=False)
                )
        return odd

    def _find_start_time(self, key: Key, document: Document) -> float:
        """Return the Unix time at which a running job started, or at which it was first seen running."""
        start_s = parse_time(as_mapping(document.get("status")).get("startTime"))
        return self._since.setdefault(key, self._context.clock()) if start_s is None else start_s

    async def _price_options(
        self, search_inputs: SearchInputs, request: Request, pools: Sequence[Pool]
    ) -> tuple[JobOption, ...]:
        """Return the pools and plans from which the queue plan may choose for a job. Equal jobs share the result.

        Raises:
            SpecError: The length of the run is unknown.
        """
        is_common = self.answers.has_common_pools(search_inputs.namespace)
        shapes = tuple((pool.name, pool.max_nodes, pool.gpus_per_node) for pool in pools)
        namespace = "" if is_common else search_inputs.namespace
        one_step, steps = separate_length(request)
        key = (one_step, namespace, search_inputs.own.own, shapes)
        options = await self._options.get(
            key, lambda: self.answers.advisor.run_in_thread(list_job_options, one_step, pools)
        )
        return scale_options(options, steps)


_PLACED = (patches.PLACED, patches.QUEUED)


def _list_quotas(search_inputs: JobSearchInputs) -> tuple[tuple[str, int], ...]:
    """Return the quota of each pool that a job may use, in the order in which Kueue tries the pools."""
    quotas = [(item.pool.name, item.flavor) for item in search_inputs.choice.usable if item.flavor is not None]
    order = sorted(quotas, key=lambda entry: search_inputs.flavors.index(entry[1].name))
    return tuple((pool, flavor.quota) for pool, flavor in order)


def _make_unplanned_job(key: Key, outcome: AdviceOutcome) -> UnplannedJob:
    """Return the entry of a job in the list of unplanned jobs, with the reason from its advice outcome."""
    return UnplannedJob(make_plan_name(key), get_ready_message(outcome)[:MOST_TEXT], "")
