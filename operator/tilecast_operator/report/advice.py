"""Make the annotations of advised jobs, and Events about advice outcomes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tilecast.advice import Advice
from tilecast.api.status import Recommendation, Summary
from tilecast.render import units
from tilecast_operator.kube.documents import EventContent
from tilecast_operator.objects.documents import NODE_SELECTOR, AdviceAnnotations
from tilecast_operator.outcome import AdviceOutcome, AdviceRefusal, get_ready_message, get_ready_reason
from tilecast_operator.report.job_status import format_short_plan, get_advice_status

MAX_BYTES = 4096


def make_advice_annotations(advice: Advice) -> dict[str, str]:
    """Return the annotations that show an advice. If it has no recommendation, return an empty mapping."""
    best, shown = advice.best, get_advice_status(advice).recommendation
    if best is None or shown is None:
        return {}
    return make_recommendation_annotations(shown, advice.inputs_hash, best.pool.gpu.product)


def make_recommendation_annotations(
    best: Recommendation, inputs_hash: str, product: str | None = None
) -> dict[str, str]:
    """Return the annotations that show the recommendation in a status.

    Args:
        best: The recommendation.
        inputs_hash: Digest of the inputs of the advice.
        product: GPU of the pool, shown if the node type is unknown. If it is empty, the pool's name is shown.
    """
    step = best.step_seconds
    annotations: dict[str, str] = AdviceAnnotations.from_truncated_values(
        node_type=best.node_type or product or best.pool,
        pool=best.pool,
        node_selector=json.dumps(dict(sorted(best.node_selector.items())), separators=(",", ":")),
        gpus=str(best.gpus),
        parallelism=json.dumps(best.parallelism.document(), separators=(",", ":")),
        step_seconds=f"{step.target:g}",
        confidence=f"{step.lower_bound:g}-{step.upper_bound:g} s",
        advice_hash=inputs_hash,
    ).document()
    return annotations if size_bytes(annotations) <= MAX_BYTES else {**annotations, NODE_SELECTOR: "{}"}


def size_bytes(annotations: Mapping[str, str]) -> int:
    """Return the size of all keys and values in bytes, by the API server's rules."""
    return sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())


def make_event(outcome: AdviceOutcome, before: Summary, summary: Summary) -> EventContent | None:
    """Return the Event about a TrainingJob's advice outcome, or None if the status showed the outcome before.

    Args:
        outcome: The advice, or why there is none.
        before: The previous `status.summary`.
        summary: The new `status.summary`.
    """
    if _get_key_fields(before) == _get_key_fields(summary):
        return None
    best = None if isinstance(outcome, AdviceRefusal) else outcome.best
    if best is None:
        return EventContent(
            "Warning", "RecommendationUnavailable", f"{get_ready_reason(outcome)}: {get_ready_message(outcome)}"
        )
    was = f" (was {before.plan} on {before.gpus} {before.pool})" if before.plan else ""
    gpus = f"{best.nodes}x{best.gpus_per_node} {best.pool.name}"
    met = f", request {' and '.join(best.device_requests)}" if best.device_requests else ""
    text = f"{format_short_plan(best)} on {gpus}{met}, {units.format_duration(best.step_s)} a step{was}"
    return EventContent("Normal", "RecommendationUpdated", text)


def make_job_event(outcome: AdviceOutcome, applied: str | None = None) -> EventContent:
    """Return the Event about the advice outcome of a job of any kind except TrainingJob.

    Args:
        outcome: The advice, or why there is none.
        applied: Outcome of the job, if it was held.
    """
    first = make_event(outcome, Summary(), Summary(reason=get_ready_reason(outcome)))
    if first is None:
        return EventContent("Normal", get_ready_reason(outcome), "")
    # The Event of the release already says why there is no advice: under its reason, none is created twice.
    name = "NotPlaced" if applied == get_ready_reason(outcome) else first.reason
    return EventContent(first.type, name, first.text + describe_gain(outcome))


def describe_gain(outcome: AdviceOutcome) -> str:
    """Return a text that compares the best plan with the job's baseline, or "" if there is no baseline."""
    if isinstance(outcome, AdviceRefusal) or outcome.best is None or outcome.baseline is None:
        return ""
    own, best = outcome.baseline, outcome.best
    asked = f"{own.nodes}x{own.gpus_per_node} {own.pool.name}"
    factor = own.step_s / best.step_s
    if own.pool == best.pool and own.gpus == best.gpus:
        return f"; that is where it would have run by itself ({asked})"
    ratio = f"{factor:.1f}x faster than" if factor >= 1 else f"{1 / factor:.1f}x slower than"
    return f"; {ratio} the {asked} that it asks for"


def _get_key_fields(summary: Summary) -> tuple[str | None, ...]:
    return summary.reason, summary.pool, summary.gpus, summary.plan
