"""Pure functions that return the status, annotations and Events that a TrainingJob should have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilecast import jobs
from tilecast.advice import Advice
from tilecast.api.status import Summary, TrainingJobStatus
from tilecast.jobs import Job
from tilecast_operator.controllers.admission import OUTCOMES
from tilecast_operator.controllers.capacity import NOTHING_TO_FIT
from tilecast_operator.controllers.targets import Target
from tilecast_operator.kube.documents import EventContent
from tilecast_operator.kube.times import format_time, parse_time
from tilecast_operator.objects.documents import HASH, OBSERVED, STARTED
from tilecast_operator.objects.view import View, annotations_digest, select_operator_annotations
from tilecast_operator.observed import progress
from tilecast_operator.observed.calibrator import MeasuredForecast
from tilecast_operator.observed.devices import DeviceUse
from tilecast_operator.outcome import AdviceOutcome, AdviceRefusal
from tilecast_operator.report import better_placement, job_status
from tilecast_operator.report.advice import (
    make_advice_annotations,
    make_event,
    make_job_event,
    make_recommendation_annotations,
)
from tilecast_operator.report.job_status import CapacityStatus, ConditionContent

UNANNOTATED = annotations_digest({})


@dataclass(frozen=True, slots=True)
class DesiredTrainingJob:
    """Status, annotations and Events that a TrainingJob should have."""

    status: TrainingJobStatus
    annotations: Mapping[str, str] | None
    """All annotations that Tilecast writes. None leaves the annotations unchanged."""
    note: EventContent | None = None
    news: EventContent | None = None
    """Event about a better place to run. It is written before the rest."""


@dataclass(frozen=True, slots=True)
class TargetWithMeasurements:
    """The job that a TrainingJob targets, with its measured steps."""

    target: Target | None = None
    """The target."""
    score: MeasuredForecast | None = None
    """Measured steps, and the forecast to compare them with."""
    refusal: str | None = None
    """Why step reports are refused, or None."""
    use: DeviceUse | None = None
    """Memory, activity and power of the target's GPUs. None if nothing is new."""


NOTHING_KNOWN = TargetWithMeasurements()


@dataclass(frozen=True, slots=True)
class TrainingJobInputs:
    """Input of `decide_training_job`: a TrainingJob and everything else that its status depends on, except the time."""

    view: View
    before: TrainingJobStatus
    """Present status."""
    is_off: bool
    """Whether the mode of the job is Off."""
    evidence: TargetWithMeasurements = NOTHING_KNOWN
    """Target and measured steps."""
    fit: CapacityStatus = NOTHING_TO_FIT
    """Whether the GPUs of the recommendation are free now."""
    answer: AdviceOutcome | None = None
    """New advice outcome. None if the job keeps its recommendation."""
    current: TrainingJobStatus | None = None
    """Present status with updated alternatives. None if there is no update."""
    products: Mapping[str, str] = field(default_factory=dict)
    """Name of the GPU of each pool, by name of the pool."""
    better: ConditionContent | None = None
    """Condition BetterPlacementAvailable. None leaves the condition unchanged."""
    is_set_aside: bool = False
    """Whether the job is quarantined."""

    @property
    def has_started(self) -> bool:
        """Whether the job has started."""
        return (
            self.evidence.score is not None or find_start_time(self.view, self.before, self.evidence.target) is not None
        )

    @property
    def keeps_forecast(self) -> bool:
        """Whether the forecast must not change, because a job with a recommendation has started."""
        return self.has_started and self.before.recommendation is not None


def decide_training_job(inputs: TrainingJobInputs, now_s: float) -> DesiredTrainingJob:
    """Return the status, annotations and Events that a TrainingJob should have at `now_s`, a Unix time."""
    return (
        _keep_forecast(inputs, now_s)
        if inputs.answer is None
        else _describe_outcome(inputs, inputs.answer, format_time(now_s))
    )


def _describe_outcome(inputs: TrainingJobInputs, outcome: AdviceOutcome, now: str) -> DesiredTrainingJob:
    """Return the status, annotations and Event that show a new advice outcome. `now` is the time (RFC 3339).

    In mode Off there is no Event, and the annotations of Tilecast are removed. A quarantined job keeps its annotations.
    """
    view, before, is_off, fit = inputs.view, inputs.before, inputs.is_off, inputs.fit
    target, refusal = inputs.evidence.target, inputs.evidence.refusal
    applied = None if target is None else target.applied
    conditions = job_status.make_conditions(outcome, is_off, view.generation, now, before.conditions, fit, applied)
    status = job_status.set_fit(job_status.make_status(outcome, view.generation, conditions), fit)
    if refusal is not None:
        refused = {"ObservationsAvailable": ConditionContent("False", "Refused", refusal)}
        status = job_status.update_conditions(status, view.generation, now, refused)
    summary = status.summary or Summary()
    if target is not None:
        summary = summary.model_copy(update={"target": target.name})
        status = status.model_copy(update={"summary": summary})
    if (
        isinstance(outcome, Advice)
        and outcome.best is not None
        and (since := find_start_time(view, before, target)) is not None
    ):
        status = job_status.freeze_forecast(status, since or now)
    if inputs.is_set_aside or is_off:
        return DesiredTrainingJob(status, None if inputs.is_set_aside else {})
    annotations = {} if isinstance(outcome, AdviceRefusal) else make_advice_annotations(outcome)
    return DesiredTrainingJob(status, annotations, make_event(outcome, before.summary or Summary(), summary))


def _keep_forecast(inputs: TrainingJobInputs, now_s: float) -> DesiredTrainingJob:
    """Return the status, annotations and Event of a job that keeps its recommendation.

    The status changes only in free capacity, start, target, measured steps and better placement. Annotations of
    Tilecast that another client has changed are corrected.
    """
    view, is_off, fit, now = inputs.view, inputs.is_off, inputs.fit, format_time(now_s)
    before = inputs.before if inputs.current is None else inputs.current
    target, score, refusal = inputs.evidence.target, inputs.evidence.score, inputs.evidence.refusal
    since = find_start_time(view, before, target)
    aspects = {"CapacityAvailable": fit.aspect}
    if target is not None and not target.is_gone:
        aspects["Applied"] = target.applied
    status = job_status.set_fit(before, fit)
    if score is not None:
        status = job_status.add_score(status, score)
        aspects["ObservationsAvailable"] = job_status.make_observed_aspect(score)
    else:
        if status.observed is not None:
            aspects["ObservationsAvailable"] = job_status.UNOBSERVED
        status = job_status.remove_score(status)
        if since is not None:
            status = job_status.freeze_forecast(status, since or now)
        if target is not None and target.lacks_trainer_status:
            text = progress.MISSING.format(name=target.name)
            aspects["ObservationsAvailable"] = ConditionContent("False", "NotObserved", text)
        if refusal is not None:
            aspects["ObservationsAvailable"] = ConditionContent("False", "Refused", refusal)
    if inputs.evidence.use is not None:
        status = job_status.add_gpu_use(status, inputs.evidence.use)
    status = job_status.update_conditions(status, view.generation, now, aspects)
    news = None
    if inputs.better is not None:
        status = job_status.update_conditions(status, view.generation, now, {better_placement.KIND: inputs.better})
        is_news = better_placement.is_event_due(better_placement.find_condition(inputs.before), inputs.better, now_s)
        news = EventContent("Normal", inputs.better.reason, inputs.better.message) if is_news and not is_off else None
    return DesiredTrainingJob(status, _keep_annotations(inputs, before), news=news)


def _keep_annotations(inputs: TrainingJobInputs, status: TrainingJobStatus) -> Mapping[str, str] | None:
    """Return the annotations of a job that keeps its recommendation, or None if they must not be written."""
    best = status.recommendation
    if inputs.is_off or best is None:
        return {} if inputs.is_off else None
    product = inputs.products.get(best.pool)
    if inputs.view.annotations_digest != UNANNOTATED and not (best.node_type or product):
        return None  # the former node type and GPU are unknown
    return make_recommendation_annotations(best, status.inputs_hash or "", product)


def find_start_time(view: View, before: TrainingJobStatus, target: Target | None = None) -> str | None:
    """Return when a job started (RFC 3339). Return "" if only the time is unknown, and None if it has not started.

    A TrainingJob has started if an annotation says so, if a step was measured, or if the target has started. A target
    that no longer exists counts as started if the status has a frozen forecast.
    """
    inputs = dict(view.inputs)
    text = inputs.get(STARTED, "").strip()
    if text.lower() not in ("", "false"):
        since_s = parse_time(text) if len(text) <= 40 else None
        return "" if since_s is None else format_time(since_s)
    if OBSERVED in inputs:
        return ""
    if target is None:
        return None
    is_over = target.is_gone and before.forecast is not None
    return "" if target.has_started or target.observed is not None or is_over else None


ALREADY_STARTED = "AlreadyStarted"


@dataclass(frozen=True, slots=True)
class DesiredJob:
    """Annotations and Events that a job should have, in the order of writing."""

    missed: EventContent | None
    """Event about a job that had started before it could be placed (outcome `ALREADY_STARTED`)."""
    annotations: Mapping[str, str] | None
    """All annotations that Tilecast writes. None leaves the annotations unchanged."""
    note: EventContent | None
    """Event about the advice outcome."""
    is_change: bool = False
    """Whether the job showed another advice outcome before."""


def decide_job(job: Job, advice: AdviceOutcome, *, writes_advice: bool) -> DesiredJob:
    """Return the annotations and Events that a job should have.

    Args:
        job: The job as it was seen.
        advice: The advice outcome of the job.
        writes_advice: Whether the job should be placed.
    """
    own, applied = select_operator_annotations(job.annotations), job.annotations.get(jobs.APPLIED)
    advised = {} if isinstance(advice, AdviceRefusal) else make_advice_annotations(advice)
    is_missed = writes_advice and job.has_started and applied is None
    outcome = ALREADY_STARTED if is_missed else applied
    is_marked = outcome is not None and (is_missed or bool(own or advised))
    marked = {**advised, jobs.APPLIED: outcome} if outcome is not None and is_marked else advised
    is_other = own.get(HASH) != advised.get(HASH)
    is_news = is_other or isinstance(advice, AdviceRefusal) or advice.best is None
    return DesiredJob(
        missed=EventContent("Warning", "NotPlaced", f"{outcome}: {OUTCOMES[ALREADY_STARTED]}") if is_missed else None,
        annotations=None if own == advised else marked,
        note=make_job_event(advice, applied) if is_news else None,
        is_change=is_other and HASH in own,
    )
