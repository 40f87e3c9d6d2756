"""Advice outcome of a job: advice, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tilecast.advice import Advice
from tilecast.nodes import NodesReport
from tilecast.spec import SearchTooLargeError, SpecError

MAX_MESSAGE = 1024
INTERNAL_ERROR = "InternalError"
SEARCH_INTERRUPTED = "SearchInterrupted"
SEARCH_TOO_LARGE = "SearchTooLarge"
INPUT_QUARANTINED = "InputQuarantined"
REASONS = (
    "Advised", "NoFittingPlan", "InvalidSpec", SEARCH_TOO_LARGE, "NoPools", "ModelNotFound", "ModelNotReadable",
    INTERNAL_ERROR, SEARCH_INTERRUPTED, INPUT_QUARANTINED,
)  # fmt: skip
"""Reasons of the Ready condition of a TrainingJob."""


@dataclass(frozen=True, slots=True)
class AdviceRefusal:
    """Refusal of advice on a job. `reason` is stable CamelCase. `message` has the problem and the remedy."""

    reason: str
    message: str
    again_s: float = 0.0
    """Seconds after which a new attempt may succeed. 0 if that does not depend on time."""


AdviceOutcome: TypeAlias = Advice | AdviceRefusal


def get_ready_reason(outcome: AdviceOutcome) -> str:
    """Return the reason of the condition Ready for an advice outcome."""
    if isinstance(outcome, AdviceRefusal):
        return outcome.reason
    return "Advised" if outcome.best else "NoFittingPlan"


def get_ready_message(outcome: AdviceOutcome) -> str:
    """Return the message of the condition Ready for an advice outcome."""
    if isinstance(outcome, AdviceRefusal):
        return outcome.message[:MAX_MESSAGE]
    best = outcome.best
    if best is not None:
        return f"{best.plan} on {best.nodes} x {best.gpus_per_node} of {best.pool.name}: {best.reason}"[:MAX_MESSAGE]
    causes = [f"{item.pool}: {item.message}; {item.remedy}" for item in outcome.rejections]
    return ("no pool can run the job. " + " | ".join(causes))[:MAX_MESSAGE]


def is_internal_error(outcome: AdviceOutcome) -> bool:
    """Return whether an advice outcome is an internal error, which a new attempt may avoid."""
    return isinstance(outcome, AdviceRefusal) and outcome.reason == INTERNAL_ERROR


def find_interruption(outcome: AdviceOutcome) -> AdviceRefusal | None:
    """Return the outcome if it says that the search was interrupted, otherwise None."""
    return outcome if isinstance(outcome, AdviceRefusal) and outcome.reason == SEARCH_INTERRUPTED else None


def decline_invalid(error: SpecError) -> AdviceRefusal:
    """Return the refusal of an invalid job, or of a job whose search would be too large."""
    is_too_large = isinstance(error, SearchTooLargeError)
    return AdviceRefusal(SEARCH_TOO_LARGE if is_too_large else "InvalidSpec", str(error))


def decline_failed(error: Exception) -> AdviceRefusal:
    """Return the refusal that reports an internal error."""
    return AdviceRefusal(INTERNAL_ERROR, f"advice failed with {type(error).__name__}; the operator's log has the rest")


def decline_without_pools(report: NodesReport | None) -> AdviceRefusal:
    """Return the refusal of a job because the cluster has no known pool."""
    if report is None:
        return AdviceRefusal("NoPools", "nodes are not read yet")
    try:
        return AdviceRefusal("NoPools", f"{len(report.require_pools())} pools")
    except SpecError as error:
        return AdviceRefusal("NoPools", str(error))
