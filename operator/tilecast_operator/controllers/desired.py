"""Pure functions that return what a TrainingJob should say, given what it says now and an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilecast.advice import Advice
from tilecast.api.status import Summary, TrainingJobStatus
from tilecast_operator.answer import Answer, Declined
from tilecast_operator.controllers.targets import Target
from tilecast_operator.kube.documents import Note
from tilecast_operator.kube.times import seconds, stamp
from tilecast_operator.objects.documents import OBSERVED, STARTED
from tilecast_operator.objects.view import View, annotations_digest
from tilecast_operator.observed.calibrator import Score
from tilecast_operator.report import job_status
from tilecast_operator.report.advice import advice_annotations, note, recommendation_annotations
from tilecast_operator.report.job_status import Aspect, Fit

UNANNOTATED = annotations_digest({})


@dataclass(frozen=True, slots=True)
class Desired:
    """Status, annotations and Event that an object should have."""

    status: TrainingJobStatus
    annotations: Mapping[str, str] | None
    """All annotations of ours; None leaves them as they are."""
    note: Note | None = None


def desired(
    view: View, before: TrainingJobStatus, answer: Answer, is_off: bool, fit: Fit, now: str,
    target: Target | None = None, refusal: str | None = None,
) -> Desired:  # fmt: skip
    """Return what a job with status `before` should say for an answer.

    In mode Off that is its status only: there is no Event, and our annotations are removed.

    Args:
        view: The job.
        before: The status that it has.
        answer: The answer to it.
        is_off: Whether it is in mode Off.
        fit: Whether the recommendation could start now.
        now: The current time as Kubernetes writes it.
        target: The job of another kind that it names.
        refusal: Why reports of its step do not count, if they do not.
    """
    applied = None if target is None else target.applied
    conditions = job_status.conditions(answer, is_off, view.generation, now, before.conditions, fit, applied)
    status = job_status.fitted(job_status.status(answer, view.generation, conditions), fit)
    if refusal is not None:
        refused = {"ObservationsAvailable": Aspect("False", "Refused", refusal)}
        status = job_status.amended(status, view.generation, now, refused)
    summary = status.summary or Summary()
    if target is not None:
        summary = summary.model_copy(update={"target": target.name})
        status = status.model_copy(update={"summary": summary})
    if isinstance(answer, Advice) and answer.best is not None and (since := started(view, before, target)) is not None:
        status = job_status.started(status, since or now)
    if is_off:
        return Desired(status, {})
    annotations = {} if isinstance(answer, Declined) else advice_annotations(answer)
    return Desired(status, annotations, note(answer, before.summary or Summary(), summary))


def amended(
    view: View,
    before: TrainingJobStatus,
    is_off: bool,
    fit: Fit,
    now: str,
    products: Mapping[str, str],
    score: Score | None = None,
    refusal: str | None = None,
    target: Target | None = None,
) -> Desired:
    """Return what a job that keeps its forecast should say.

    Its status stays the same, except for the capacity that is free now, whether it has started, what became of its
    target, and how its measured steps compare with the forecast or why reports of them do not count. Annotations of
    ours that somebody else wrote are corrected.

    Args:
        view: The job.
        before: The status that it has.
        is_off: Whether it is in mode Off.
        fit: Whether the recommendation could start now.
        now: The current time as Kubernetes writes it.
        products: The GPU of each pool, by name of the pool.
        score: The measured steps and the forecast that they are compared with.
        refusal: Why reports of its step do not count, if they do not.
        target: The job of another kind that it names.
    """
    since = started(view, before, target)
    aspects = {"CapacityAvailable": fit.aspect}
    if target is not None and not target.is_gone:
        aspects["Applied"] = target.applied
    status = job_status.fitted(before, fit)
    if score is not None:
        status = job_status.scored(status, score)
        aspects["ObservationsAvailable"] = job_status.observed_aspect(score)
    else:
        if status.observed is not None:
            aspects["ObservationsAvailable"] = job_status.UNOBSERVED
        status = job_status.unscored(status)
        if since is not None:
            status = job_status.started(status, since or now)
        if refusal is not None:
            aspects["ObservationsAvailable"] = Aspect("False", "Refused", refusal)
    status = job_status.amended(status, view.generation, now, aspects)
    best = before.recommendation
    if is_off or best is None:
        return Desired(status, {} if is_off else None)
    product = products.get(best.pool)
    if view.annotations_digest != UNANNOTATED and not (best.node_type or product):
        return Desired(status, None)  # what they were is not known
    return Desired(status, recommendation_annotations(best, before.inputs_hash or "", product))


def started(view: View, before: TrainingJobStatus, target: Target | None = None) -> str | None:
    """Return when the job began to run, as far as it says; None if it has not started.

    An empty text means that it has started at an unknown time. A TrainingJob runs nothing by itself. It has started
    once whoever starts it says so in an annotation, once a measured step is there, or once the job that it names has
    started; that job may be gone by now.
    """
    inputs = dict(view.inputs)
    text = inputs.get(STARTED, "").strip()
    if text.lower() not in ("", "false"):
        since_s = seconds(text) if len(text) <= 40 else None
        return "" if since_s is None else stamp(since_s)
    if OBSERVED in inputs:
        return ""
    if target is None:
        return None
    is_over = target.is_gone and before.forecast is not None
    return "" if target.has_started or target.observed is not None or is_over else None
