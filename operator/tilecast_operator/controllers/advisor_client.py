"""Advice for jobs of all kinds. Earlier runs of the jobs correct the forecasts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Final, TypeVar

from tilecast.advice import Advice, Request
from tilecast.api import training_job
from tilecast.api.status import Summary, TrainingJobStatus
from tilecast.hardware import Pool
from tilecast.nodes import FoundPool
from tilecast_operator.advisor import Advisor
from tilecast_operator.controllers.learning import PoolLearningController
from tilecast_operator.controllers.pools import PoolController
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.objects.view import View
from tilecast_operator.outcome import AdviceOutcome
from tilecast_operator.report import job_status
from tilecast_operator.report.job_status import ConditionContent
from tilecast_operator.search_inputs import SearchInputs

ResultT = TypeVar("ResultT")


QUEUED: Final = "Queued"


class BudgetNoticeWriter:
    """Writer of a notice on jobs that wait for advice while searches of other namespaces go first."""

    def __init__(self, context: SharedContext, advisor: Advisor) -> None:
        self._context = context
        self._advisor = advisor

    async def advise_with_notices(
        self, key: Key, seen: CachedObject[View], search_inputs: SearchInputs, known_outcome: AdviceOutcome | None
    ) -> tuple[AdviceOutcome, CachedObject[View]]:
        """Return the advice outcome of a job, and the job with the notices written while it waited.

        If the outcome is `known_outcome` already, return it at once. Raise the errors of `Writer.write_status`.
        """
        if known_outcome is not None:
            return known_outcome, seen
        timings = self._context.timings
        again_s = timings.tell_again_s
        while not seen.value.status:
            left_s = max(timings.tell_after_s - self._context.answers.get_waiting_seconds(key), again_s)
            try:
                async with asyncio.timeout(left_s):
                    return await self._advisor.find_advice(search_inputs), seen
            except TimeoutError:
                seen = await self._write_notice(key, seen)
                again_s = min(2 * again_s, timings.tell_again_most_s)
        return await self._advisor.find_advice(search_inputs), seen

    async def _write_notice(self, key: Key, seen: CachedObject[View]) -> CachedObject[View]:
        """Write the notice if jobs of other namespaces go first. Return the updated job."""
        used_s = self._advisor.find_namespaces_behind_others().get(key.namespace)
        if used_s is None or not self._context.leadership.is_leader:
            return seen
        count = self._context.answers.count_waiting(training_job.KIND, key.namespace)
        used = f"its namespace used {used_s:.0f} s of searches in the last minute"
        text = f"{used}, and jobs of others go first; {count} of its jobs wait"
        status = make_waiting_status(text, seen.value.generation, self._context.timestamp())
        return await self._context.writer.write_status(key, seen, status.document())


def make_waiting_status(text: str, generation: int, now: str) -> TrainingJobStatus:
    """Return the status of a job that still waits for its first advice. `text` says why."""
    aspect = ConditionContent("Unknown", QUEUED, text)
    kinds = ("Ready", "RecommendationProvided")
    conditions = [job_status.make_condition(kind, aspect, generation, now, ()) for kind in kinds]
    return TrainingJobStatus(conditions=conditions, summary=Summary.from_truncated_values(reason=QUEUED))


class AdvisorClient:
    """Interface to the advisor for one job. It adds the current pools and the corrections learned from runs.

    One event loop uses an instance.
    """

    def __init__(
        self, context: SharedContext, advisor: Advisor, pools: PoolController, learning: PoolLearningController
    ) -> None:
        self.advisor = advisor
        self.pools = pools
        self._learning = learning
        self.notices = BudgetNoticeWriter(context, advisor)

    @property
    def is_ready(self) -> bool:
        """Whether the pools of the cluster are known."""
        return self.pools.report is not None

    @property
    def found_pools(self) -> Sequence[FoundPool]:
        """Pools of the cluster. The sequence is empty until they are known."""
        return () if self.pools.report is None else self.pools.report.entries

    @property
    def gpu_by_pool(self) -> dict[str, str]:
        """Name of the GPU of each pool, by name of the pool."""
        return {} if self.pools.report is None else {one.name: one.gpu.product for one in self.pools.report.pools}

    def has_common_pools(self, namespace: str) -> bool:
        """Return whether a namespace uses the default pools, because no runs of its own correct them."""
        return self.pools.find_report(namespace) is self.pools.report

    async def read_search_inputs(
        self, keys: Sequence[Key], document: Document, skip_digest: str | None = None, *, is_held: bool = False
    ) -> SearchInputs:
        """Return the inputs of the search for a job's plans, including the earlier runs that correct its forecasts.

        Args:
            keys: Key of the job, and key of its TrainingJob if there is one.
            document: TrainingJob document with the request for advice.
            skip_digest: Digest of runs that are known already. No forecast is made for them.
            is_held: Whether the job is held until the advice is known.
        """
        namespace = keys[0].namespace
        question = await self.advisor.read_search_inputs(namespace, document, is_held=is_held)
        return await self.advisor.add_runs(question, partial(self._learning.find_runs, namespace, keys), skip_digest)

    async def search(
        self,
        search_inputs: SearchInputs,
        request: Request,
        pools: Sequence[Pool],
        usable_pools: Sequence[Pool],
        namespace: str,
    ) -> AdviceOutcome:
        """Return the advice outcome of a search with a limited request and limited pools.

        Args:
            search_inputs: Inputs of the search from `read_search_inputs`.
            request: The request, within the limits of the job.
            pools: The pools to search.
            usable_pools: The pools that the job may use.
            namespace: Namespace of the job.
        """
        version = self.advisor.versions.get_version(namespace)
        asks = repr((search_inputs.key, repr(request.constraints), repr(request.baseline)))
        texts = (asks, repr((asks, version, repr(usable_pools))))
        key, everything = (hashlib.sha256(text.encode()).digest() for text in texts)
        return await self.advisor.search(everything, key, request, pools, search_inputs.permit_request)

    async def is_answered(self, search_inputs: SearchInputs, before: TrainingJobStatus) -> bool:
        """Return whether a status already shows the advice for these inputs. Digests of the inputs are compared."""
        digest = await self.advisor.hash_inputs(search_inputs)
        return digest is not None and digest == before.inputs_hash

    async def find_advice(self, search_inputs: SearchInputs) -> AdviceOutcome:
        """Return the advice outcome for these inputs, with notes that name the earlier runs that corrected it."""
        return add_run_notes(search_inputs, await self.advisor.find_advice(search_inputs))

    async def keep_incumbent(
        self, search_inputs: SearchInputs, outcome: AdviceOutcome, before: TrainingJobStatus
    ) -> AdviceOutcome:
        """Return the advice outcome with the plan of `before` first, unless the new best plan is clearly better."""
        best = before.recommendation
        return outcome if best is None else await self.advisor.keep_incumbent(search_inputs, outcome, best.incumbent())


def add_run_notes(search_inputs: SearchInputs, outcome: AdviceOutcome) -> AdviceOutcome:
    """Return the advice outcome with notes that name the earlier runs that corrected it."""
    return search_inputs.own.add_notes(outcome) if isinstance(outcome, Advice) else outcome
