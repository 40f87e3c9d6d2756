"""Compare the pools on which a running TrainingJob could run instead."""

from __future__ import annotations

import logging

from tilecast.api.fields import as_mapping
from tilecast.api.status import TrainingJobStatus
from tilecast.objectives import OBJECTIVES
from tilecast_operator.controllers.advisor_client import AdvisorClient
from tilecast_operator.controllers.capacity import Destination, FreeGpuCounter
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.controllers.targets import Target
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.observed.calibrator import MeasuredForecast
from tilecast_operator.outcome import AdviceRefusal
from tilecast_operator.report import better_placement, job_status
from tilecast_operator.report.better_placement import BetterPlacement, MoveCost
from tilecast_operator.report.job_status import ConditionContent

log = logging.getLogger("tilecast")


class BetterPoolFinder:
    """Finder of pools with free GPUs on which running TrainingJobs would run better.

    One event loop uses an instance.
    """

    def __init__(self, context: SharedContext, answers: AdvisorClient, capacity: FreeGpuCounter) -> None:
        self._context = context
        self._answers = answers
        self.capacity = capacity

    async def update_alternatives(
        self,
        key: Key,
        document: Document,
        before: TrainingJobStatus,
        score: MeasuredForecast | None,
        target: Target | None,
    ) -> TrainingJobStatus:
        """Return the status of a running job, with new alternatives if measured steps have changed the forecasts."""
        if score is None and before.alternatives_hash is None:
            return before
        if target is not None:
            answer, is_own = target.answer, True
            digest = "" if isinstance(answer, AdviceRefusal) else answer.inputs_hash
        else:
            try:
                question = await self._answers.read_search_inputs([key], document, before.alternatives_hash)
            except (ApiError, OSError) as error:  # the measured steps are written all the same
                log.warning("%s: alternatives stay as they are: %s", key, error)
                return before
            digest, is_own = question.runs_hash, bool(question.own.items)
            if digest == (before.alternatives_hash or ""):
                return before
            answer = await self._answers.find_advice(question)
        if isinstance(answer, AdviceRefusal) or answer.best is None:
            return before
        is_own = is_own and bool(answer.best.pool.own.runs)
        if not is_own and before.alternatives_hash is None:
            return before
        return job_status.update_alternatives(before, answer, digest if is_own else None)

    def compare_alternatives(
        self,
        key: Key,
        document: Document,
        before: TrainingJobStatus,
        current: TrainingJobStatus,
        score: MeasuredForecast | None,
        target: Target | None,
    ) -> ConditionContent | None:
        """Return the condition BetterPlacementAvailable of a running job, or None if the job needs none.

        Args:
            key: Key of the job.
            document: The job.
            before: The current status.
            current: The current status with updated alternatives.
            score: The measured steps and the frozen forecast.
            target: The target of the job.
        """
        report, is_over = self._answers.pools.report, target is not None and (target.is_finished or target.is_gone)
        known = better_placement.find_condition(before)
        if is_over or score is None or current.alternatives_hash is None or report is None:
            self.capacity.stop_tracking_fit(key)
            without = better_placement.JOB_ENDED if is_over else better_placement.UNKNOWN
            return None if known is None else without
        spec = document.get("spec") or {}
        goal = OBJECTIVES[str(spec.get("objective") or "time")]
        least = better_placement.get_least_gain(known)
        moving = MoveCost.from_job(as_mapping(spec.get("training")), before, score, self._context.clock())
        pools = {pool.name: pool for pool in report.pools}
        places = better_placement.find_better_placements(current, score, goal, pools, least, moving)
        worth = [item for item in places if item.is_worth_it]
        free = next((item for item in worth if self.capacity.check_fit(key, _get_destination(item)).fits), None)
        if free is None:
            self.capacity.check_fit(key, _get_destination(places[0]) if places else None)
        return better_placement.make_aspect(known, free, places)


def _get_destination(place: BetterPlacement) -> Destination:
    return Destination(place.alternative.pool, place.alternative.nodes, place.alternative.gpus_per_node)
