"""What a TrainingJob should say: pure functions from what it says and an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilecast.advise import Advice
from tilecast.api.status import Summary, TrainingJobStatus
from tilecast_operator.answer import Answer, Declined
from tilecast_operator.cluster.documents import OBSERVED, STARTED, Note
from tilecast_operator.cluster.view import View, annotations_digest, seconds, stamp
from tilecast_operator.controllers.targets import Target
from tilecast_operator.observed.learner import Score
from tilecast_operator.report import job_status
from tilecast_operator.report.advice import advice_annotations, note, recommendation_annotations
from tilecast_operator.report.job_status import Aspect, Fit

UNANNOTATED = annotations_digest({})


@dataclass(frozen=True, slots=True)
class Desired:
    """What an object should say."""

    status: TrainingJobStatus
    annotations: Mapping[str, str] | None
    """Ours, all of them; None leaves them as they are."""
    note: Note | None = None


def desired(
    view: View, before: TrainingJobStatus, answer: Answer, is_off: bool, fit: Fit, now: str,
    target: Target | None = None, refusal: str | None = None,
) -> Desired:  # fmt: skip
    """What a job that says `before` should say for an answer. In mode Off that is its status only."""
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
    """What a job should say that keeps its forecast: the same, but for what is free now, that it has started, how its
    measured steps compare, or why what was told of them does not count, and what became of its target. Annotations
    that somebody else wrote are put right; `products` has the GPU of each pool."""
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
        return Desired(status, None)  # what they were cannot be told
    return Desired(status, recommendation_annotations(best, before.inputs_hash or "", product))


def started(view: View, before: TrainingJobStatus, target: Target | None = None) -> str | None:
    """When the job began to run, as far as it says: a time, or an empty text where it says only that it did.

    A TrainingJob by itself runs nothing. It has started once whoever starts it says so in an annotation, once a
    measured step is there, or once the job that it names has; that one may be gone by now.
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
