"""Make the condition BetterPlacementAvailable: whether a running job would be clearly faster or cheaper elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilecast import cost
from tilecast.api.status import Alternative, Condition, TrainingJobStatus
from tilecast.api.training import RESTART_S
from tilecast.hardware import Pool
from tilecast.objectives import PRICE, SECONDS, ObjectiveRecord, Quantity
from tilecast.render import units
from tilecast_operator.kube.times import parse_time
from tilecast_operator.observed.calibrator import MeasuredForecast
from tilecast_operator.report.job_status import ConditionContent

KIND = "BetterPlacementAvailable"
LEAST, LEAST_AFTER = 0.20, 0.15
"""Relative saving of time or price at which the condition becomes true, and above which it stays true."""
EVENT_COOLDOWN_S = 600.0
"""Seconds for which the condition must have been false before it gets an Event again."""
UNKNOWN = ConditionContent(
    "Unknown", "NotObserved", "no step of the job was measured that its alternatives could be held against"
)

JOB_ENDED = ConditionContent("False", "JobEnded", "the job runs no longer")


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Time that moving a running job costs, and the number of its remaining steps."""

    restart_s: float = RESTART_S
    checkpoint_s: float | None = None
    """Seconds between two checkpoints. None if unknown."""
    left: float | None = None
    """Number of remaining steps. None if the total is unknown."""

    @classmethod
    def from_job(
        cls, training: Mapping[str, Any], status: TrainingJobStatus, score: MeasuredForecast, clock_s: float
    ) -> MoveCost:
        """Return the cost of moving a job. The measured step time is assumed to have been constant since the start.

        Args:
            training: `spec.training` of the job.
            status: Status of the job.
            score: Measured steps of the job and the frozen forecast.
            clock_s: Unix time, in seconds.
        """
        restart_s, checkpoint_s = training.get("restartSeconds"), training.get("checkpointSeconds")
        best, since_s, left = status.recommendation, parse_time(score.forecast.frozen_at), None
        if best is not None and best.finish_seconds is not None and since_s is not None:
            done = (clock_s - since_s) / score.window.seconds
            left = max(best.finish_seconds / best.step_seconds.target - max(done, 0.0), 0.0)
        restart_s = RESTART_S if restart_s is None else float(restart_s)
        return cls(restart_s, None if checkpoint_s is None else float(checkpoint_s), left)

    def estimate_move_seconds(self, step_s: float, measured_s: float) -> float:
        """Return the seconds that a move takes.

        The job must restart, and on average repeats half of a checkpoint interval.

        Args:
            step_s: Step time on the other pool, in seconds.
            measured_s: Measured step time where the job runs, in seconds.
        """
        return self.restart_s + (self.checkpoint_s or 0.0) / 2 / measured_s * step_s

    def describe_cost(self, moving_s: float, steps: int) -> str:
        """Return a text on how long a move takes and after how many steps it pays off."""
        lost = "the steps since the last checkpoint, which training.checkpointSeconds would tell"
        if self.checkpoint_s is not None:
            lost = f"half of the {units.format_duration(self.checkpoint_s)} between checkpoints on average"
        beside = "and" if self.checkpoint_s is not None else "beside"
        restart = f"a restart of {units.format_duration(self.restart_s)} {beside} {lost}"
        moving, count = units.format_duration(moving_s), units.format_count(steps)
        return f"moving costs {moving} ({restart}), which {count} steps make up for"


@dataclass(frozen=True, slots=True)
class BetterPlacement:
    """A placement of a running job that is clearly better than its present one."""

    alternative: Alternative
    gain: float
    """Fraction that the move saves of the quantity that the job's objective minimises."""
    text: str
    pays_after: int
    """Number of steps after which the move has paid off."""
    is_worth_it: bool = True
    """Whether more than `pays_after` steps remain. True if that is unknown."""


def find_condition(status: TrainingJobStatus) -> Condition | None:
    """Return the condition BetterPlacementAvailable of a status, or None."""
    return next((item for item in status.conditions if item.type == KIND), None)


def get_least_gain(condition: Condition | None) -> float:
    """Return the least relative saving with which the condition becomes or stays true."""
    return LEAST_AFTER if condition is not None and condition.status == "True" else LEAST


def find_better_placements(
    status: TrainingJobStatus,
    score: MeasuredForecast,
    goal: ObjectiveRecord,
    pools: Mapping[str, Pool],
    least_gain: float,
    moving: MoveCost,
) -> list[BetterPlacement]:
    """Return the clearly better placements of a running job on other pools, best first.

    A better placement saves at least the fraction `least_gain` of the quantity that the objective minimises. It is no
    worse in the objective's second quantity. Placements that make up for the cost of moving come first. Time and price
    are compared per sample, because global batches may differ. The step time elsewhere is the larger of two values: the
    corrected forecast, and the raw forecast times the ratio of measured to forecast step.

    Args:
        status: Status with alternatives that the runs of the job correct.
        score: Measured steps of the job and the frozen forecast.
        goal: Objective of the job.
        pools: Pools of the cluster, by name.
        least_gain: Fraction that an alternative must save.
        moving: Cost of moving.
    """
    ran, best = score.forecast, status.recommendation
    batch = None if best is None else best.global_batch_size
    measured_s = score.window.seconds
    scale = measured_s / ran.step_seconds.target
    better = []
    for item in status.alternatives:
        share = (batch or 1) / (item.global_batch_size or batch or 1)
        step_s = max(item.step_seconds.target, (item.raw_step_seconds or 0.0) * scale)
        quantities = dict.fromkeys((SECONDS, PRICE, goal.quantity))
        amounts = {one: _compare_amounts(one, score, item, step_s, share, pools) for one in quantities}
        saved = {one: None if both is None else 1 - both[1] / both[0] for one, both in amounts.items()}
        gain, rest, used = saved[goal.quantity], saved[goal.counterpart], amounts[goal.quantity]
        is_small = not goal.fewest_gpus or item.gpus <= ran.gpus
        is_better = gain is not None and gain >= least_gain and (rest is None or rest >= 0)
        if used is not None and gain is not None and is_better and item.pool != ran.pool and is_small:
            own_s = step_s * share
            moving_s = moving.estimate_move_seconds(own_s, measured_s)
            here, there = used
            # A second there takes as much of the quantity as a step there, divided by its duration.
            pays_after = math.ceil(moving_s * (there / own_s) / (gain * here))
            better_text = _describe_alternative(item, step_s, score, saved)
            text = f"{better_text}; {moving.describe_cost(moving_s, pays_after)}"
            is_worth_it = moving.left is None or pays_after < moving.left
            better.append(BetterPlacement(item, gain, text, pays_after, is_worth_it))
    return sorted(better, key=lambda place: (not place.is_worth_it, -place.gain))


def _compare_amounts(
    quantity: Quantity,
    score: MeasuredForecast,
    alternative: Alternative,
    step_s: float,
    batch_ratio: float,
    pools: Mapping[str, Pool],
) -> tuple[float, float] | None:
    """Return how much of a quantity a step uses now, and how much the same samples would use elsewhere.

    Args:
        quantity: Quantity to compare, such as seconds or price.
        score: Measured steps of the job.
        alternative: The alternative.
        step_s: Step time of the alternative, in seconds.
        batch_ratio: Global batch of the job divided by the global batch of the alternative.
        pools: Pools of the cluster, by name.

    Returns:
        The two amounts. None if an amount is unknown or the first is 0.
    """
    ran, measured_s = score.forecast, score.window.seconds
    if quantity is SECONDS:
        return measured_s, step_s * batch_ratio
    pool, other = pools.get(ran.pool), pools.get(alternative.pool)
    if pool is None or other is None:
        return None
    if quantity is not PRICE:
        here, there = (
            quantity.amount(pool, ran.gpus, measured_s),
            quantity.amount(other, alternative.gpus, step_s * batch_ratio),
        )
        return (here, there) if here > 0 else None
    if not pool.price_per_gpu_hour or alternative.cost_per1000_steps is None or pool.currency != other.currency:
        return None
    price = cost.price_of_1000_steps(pool.price_per_gpu_hour * ran.gpus, measured_s)
    return price, alternative.cost_per1000_steps * step_s / alternative.step_seconds.target * batch_ratio


def make_aspect(
    condition: Condition | None, free: BetterPlacement | None, better: Sequence[BetterPlacement]
) -> ConditionContent:
    """Return status, reason and message of the condition BetterPlacementAvailable.

    Args:
        condition: The present condition, or None.
        free: The best alternative with free GPUs for which moving is worth it.
        better: All clearly better alternatives.
    """
    if free is not None:
        return ConditionContent("True", "PlaceFree", f"{free.text}; those GPUs are free now")
    was_true = condition is not None and (condition.status == "True" or condition.reason == "NoLongerBetter")
    reason = "NoLongerBetter" if was_true else "NoneBetter"
    if better and not better[0].is_worth_it:
        text = f"{better[0].text}, and fewer remain"
        return ConditionContent("False", reason if was_true else "NotWorthMoving", text)
    if better:
        return ConditionContent("False", reason, f"{better[0].text}, but those GPUs are not known to be free now")
    return ConditionContent("False", reason, "no alternative saves enough and is no worse otherwise")


def is_event_due(condition: Condition | None, now: ConditionContent, clock_s: float) -> bool:
    """Return whether to write an Event, because the condition is true and was false for long enough before."""
    if now.status != "True" or (condition is not None and condition.status == "True"):
        return False
    if condition is None or condition.reason != "NoLongerBetter":
        return True
    since_s = parse_time(condition.last_transition_time)
    return since_s is None or clock_s - since_s >= EVENT_COOLDOWN_S


def _describe_alternative(
    alternative: Alternative, step_s: float, score: MeasuredForecast, saved: Mapping[Quantity, float | None]
) -> str:
    step = units.format_duration(step_s)
    known = [(one, gain) for one, gain in saved.items() if gain is not None]
    than = " and ".join(f"{abs(gain):.0%} {one.less if gain >= 0 else one.more}" for one, gain in known)
    where, measured = (
        f"{alternative.plan} on {alternative.gpus} {alternative.pool}",
        units.format_duration(score.window.seconds),
    )
    return f"{where} would take {step} a step by forecast, {than} than the {measured} measured"
