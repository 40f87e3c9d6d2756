"""Find the size of gradient buckets that makes the recommended plan clearly faster than its own size does."""

from __future__ import annotations

import numpy as np

from tilecast import frameworks, overlap, step
from tilecast.advice.choose import Choice
from tilecast.spec import Plans, Workload
from tilecast.step import blocks

SIZES_MIB = (1, 2, 5, 10, 25, 50, 100, 200, 400, 800)
"""Bucket sizes that are tried, in MiB."""
LEAST_GAIN = 0.01
"""Share of the step below which a gain does not count: the framework's own size is as good."""


def best_bucket_size(best: Choice) -> str | None:
    """Return a sentence on the fastest of `SIZES_MIB` for the recommendation, if it gains more than `LEAST_GAIN`.

    None if the plan has no buckets that hide behind a backward pass, or if `training.framework` does not name a
    framework with buckets.
    """
    candidates, row = best.candidates, best.row
    workload, plan = candidates.variants[candidates.variant[row]], candidates.plans.row(row)
    has_buckets = workload.training and workload.framework is not None and frameworks.of(workload).has_buckets
    if not (has_buckets and overlap.hides(workload)) or plan.zero_stage > 1 or plan.data * plan.context == 1:
        return None
    sharded = candidates.tables[candidates.table[row]].sharded.take(candidates.origin[row : row + 1])
    priced = blocks.kernel_seconds(workload, sharded, candidates.pool.gpu)
    seconds = step.bucketed(workload, sharded, Plans.of(plan), candidates.pool, priced, SIZES_MIB)
    fastest = int(np.argmin(seconds))
    gain = 1 - float(seconds[fastest] / candidates.step_s[row])
    if gain <= LEAST_GAIN:
        return None
    return (
        f"Gradient buckets of {SIZES_MIB[fastest]} MiB instead of {_own(workload)} would take {gain:.0%} off the step "
        "(training.bucketMiB)."
    )


def _own(workload: Workload) -> str:
    """Return the current size of the job's buckets, in words."""
    if workload.bucket_mib is not None:
        return f"{workload.bucket_mib}"
    size = frameworks.of(workload).bucket_mib[1]
    return f"{size:g}" if size else f"{workload.framework}'s own"
