"""Read the job that a TrainingJob names in `spec.targetRef`, and the advice for that job."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilecast import jobs
from tilecast.jobs import JOB_KINDS, Job
from tilecast_operator.controllers import patches
from tilecast_operator.controllers.admission import AdmissionController
from tilecast_operator.controllers.job_advice import AdviceRequest, JobAdvisor, read_job_leniently
from tilecast_operator.controllers.requests import JobRequestIndex, read_mode, read_target
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.discovery import ServedApis
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.objects.documents import OBSERVED
from tilecast_operator.objects.kinds import KINDS, make_object_path
from tilecast_operator.objects.view import MAX_INPUT
from tilecast_operator.outcome import AdviceOutcome, AdviceRefusal
from tilecast_operator.report.job_status import ConditionContent


@dataclass(frozen=True, slots=True)
class Target:
    """The job that a TrainingJob targets, with its advice outcome."""

    name: str
    """Kind and name of the target."""
    answer: AdviceOutcome
    applied: ConditionContent
    has_started: bool = False
    """Whether advice no longer matters, because the target runs or is placed."""
    is_gone: bool = False
    """Whether the target does not exist now."""
    is_finished: bool = False
    observed: str | None = None
    """Annotation of the target with a measured step, or None."""
    trainer: Document = field(default_factory=dict)
    """Status of a TrainJob. Empty for other kinds."""

    @property
    def lacks_trainer_status(self) -> bool:
        """Whether the target is a running TrainJob whose trainer reports nothing."""
        is_running = self.has_started and not (self.is_gone or self.is_finished)
        return is_running and self.name.startswith("TrainJob/") and not self.trainer.get("trainerStatus")


class TargetReader:
    """Reader of the jobs that TrainingJobs target."""

    def __init__(
        self,
        context: SharedContext,
        apis: ServedApis,
        requests: JobRequestIndex,
        advice: JobAdvisor,
        admission: AdmissionController,
    ) -> None:
        self._context = context
        self._apis = apis
        self._requests = requests
        self._advice = advice
        self._admission = admission

    async def find_target(self, key: Key, document: Document) -> Target | None:
        """Return the job that a TrainingJob targets, with the job's advice outcome. Return None if it targets no job.

        Args:
            key: Key of the TrainingJob.
            document: The TrainingJob.

        Raises:
            ApiError, OSError: The API server did not answer.
        """
        target = read_target(key.namespace, document)
        if target is None:
            return None
        name, first = f"{target.kind}/{target.name}", self._requests.find_requester(target)
        if first is not None and first[0] != key.name:
            text = f"TrainingJob {first[0]} names {target.kind} {target.name} too and is older"
            return _make_refused_target(
                name, AdviceRefusal("TargetConflict", f"{text}; delete one of them, or change spec.targetRef")
            )
        if (refusal := self._context.find_quarantine(target)) is not None:
            return _make_refused_target(name, refusal)
        seen = self._context.cache.jobs.get(target)
        value = seen.value if seen is not None else await self._fetch_target(target)
        if isinstance(value, AdviceRefusal):
            return _make_refused_target(name, value)
        job, mode = await self._advice.read_job(value), read_mode(document)
        request = AdviceRequest(document, mode, key.name)
        answer, _ = await self._advice.advise_job(job, request, writes_advice=mode == "Initial")
        observed = job.annotations.get(OBSERVED)
        return Target(
            name,
            answer,
            self._admission.get_applied_condition(target, job, mode),
            has_started=job.has_started or job.annotations.get(jobs.APPLIED) in (patches.PLACED, patches.QUEUED),
            is_finished=job.is_finished,
            observed=None if observed is None else observed[:MAX_INPUT],
            trainer=value.get("status") or {} if target.kind == "TrainJob" else {},
        )

    async def _fetch_target(self, key: Key) -> Document | AdviceRefusal:
        """Return the document of a target from the API server, or why it cannot be read."""
        try:
            return await self._context.client.get(make_object_path(key))
        except ApiError as error:
            if error.status == 403:
                text = f"the operator may not read {key.kind} {key.name}"
                return AdviceRefusal("TargetNotReadable", f"{text}; install the chart with jobs.enabled=true")
            if error.status != 404:
                raise
        if not await self._apis.serves_kind(KINDS[key.kind]):
            text = f"this cluster has no {key.kind} of {JOB_KINDS[key.kind].api_version}"
            return AdviceRefusal("TargetKindNotInstalled", f"{text}; install its controller, or correct spec.targetRef")
        text = f"there is no {key.kind} {key.name} in namespace {key.namespace}"
        return AdviceRefusal("TargetNotFound", f"{text}; create it, or correct spec.targetRef")


def _make_refused_target(name: str, refusal: AdviceRefusal) -> Target:
    applied = ConditionContent("False", refusal.reason, refusal.message)
    return Target(name, refusal, applied, is_gone=refusal.reason == "TargetNotFound")


def find_running_target(context: SharedContext, requests: JobRequestIndex, key: Key) -> Job | None:
    """Return the running target of a TrainingJob with a frozen forecast, or None.

    The result is also None if an older TrainingJob has the same target, or if one of the two objects is quarantined.
    The whole job is read only if it has not ended, so that ended jobs cost little.
    """
    seen = context.cache.training_jobs.get(key)
    status = {} if seen is None else seen.value.status
    if seen is None or not (status.get("recommendation") and status.get("forecast")):
        return None
    target = read_target(key.namespace, seen.value.document)
    if target is None:
        return None
    first, found = requests.find_requester(target), context.cache.jobs.get(target)
    is_set_aside = any(context.find_quarantine(item) is not None for item in (key, target))
    if first is None or first[0] != key.name or found is None or is_set_aside:
        return None
    if JOB_KINDS[target.kind].is_finished(found.value.get("status") or {}):
        return None
    job = read_job_leniently(found.value)
    return job if job.has_started else None
