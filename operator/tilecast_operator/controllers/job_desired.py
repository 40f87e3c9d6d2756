"""Pure function that returns the annotations and Events that a job should have for an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilecast import jobs
from tilecast.jobs import Job
from tilecast_operator.answer import Answer, Declined
from tilecast_operator.controllers.admission import OUTCOMES
from tilecast_operator.kube.documents import Note
from tilecast_operator.objects.documents import HASH
from tilecast_operator.objects.view import own_annotations
from tilecast_operator.report.advice import advice_annotations, make_job_event

ALREADY_STARTED = "AlreadyStarted"


@dataclass(frozen=True, slots=True)
class DesiredJob:
    """Annotations and Events that a job should have, in the order in which they are written."""

    missed: Note | None
    """Event about a job that had started before it could be placed; its outcome is `ALREADY_STARTED`."""
    annotations: Mapping[str, str] | None
    """All annotations of ours; None leaves them as they are."""
    note: Note | None
    """Event about the answer."""
    is_change: bool = False
    """Whether the job showed another answer before."""


def decide_job(job: Job, answer: Answer, *, is_placed: bool) -> DesiredJob:
    """Return the annotations and Events that a job should have.

    Args:
        job: The job as it was seen.
        answer: The answer about the job.
        is_placed: Whether the job should be placed.
    """
    own, applied = own_annotations(job.annotations), job.annotations.get(jobs.APPLIED)
    advised = {} if isinstance(answer, Declined) else advice_annotations(answer)
    is_missed = is_placed and job.has_started and applied is None
    outcome = ALREADY_STARTED if is_missed else applied
    is_marked = outcome is not None and (is_missed or bool(own or advised))
    marked = {**advised, jobs.APPLIED: outcome} if outcome is not None and is_marked else advised
    is_other = own.get(HASH) != advised.get(HASH)
    is_news = is_other or isinstance(answer, Declined) or answer.best is None
    return DesiredJob(
        missed=Note("Warning", "NotPlaced", f"{outcome}: {OUTCOMES[ALREADY_STARTED]}") if is_missed else None,
        annotations=None if own == advised else marked,
        note=make_job_event(answer, applied) if is_news else None,
        is_change=is_other and HASH in own,
    )
