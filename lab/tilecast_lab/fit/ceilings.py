"""Fitting of bandwidth ceilings of the kinds without a network, one parameter at a time over small grids."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilecast.hardware import list_gpus
from tilecast.kernels import formulas
from tilecast.kernels.utilization import BandwidthCeiling, Spread
from tilecast.spec import Floats
from tilecast_lab.fit.samples import DIE_ROWS, Samples, error_by_die

GRID: Mapping[str, tuple[float, ...]] = {
    "dram_share": tuple(np.round(np.arange(0.20, 0.98, 0.02), 2)),
    "ramp_s": (1.5e-6, 2e-6, 2.5e-6, 3e-6, 4e-6, 5e-6, 7e-6),
    "row_cycles": (0.0, 50.0, 100.0, 200.0, 300.0, 400.0, 500.0, 700.0, 1000.0, 1400.0, 2000.0, 2800.0),
    "sm_bytes_per_clock": (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0),
    "l2_share": (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "reuse_share": (0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0),
}
ROWWISE = ("row_cycles", "sm_bytes_per_clock", "reuse_share")
"""Parameters that only kinds with rows have."""
EXTRA_PASSES: Mapping[str, float] = {"softmax": 1.0, "layernorm": 0.5, "rmsnorm": 0.5, "cross_entropy": 1.0}
"""Reads of a row beyond the least traffic, as a factor on that traffic.

PyTorch's wide softmax reads a row for its maximum, its sum and its result, and writes it once. A norm reads a row for
the statistics and again for the result.
"""
RESIDENT_ROW_BYTES: Mapping[str, float] = {"softmax": 8192.0}
"""Largest row in bytes that stays in registers (PyTorch's warp softmax: 1,024 FP32 elements read and written)."""
SWEEPS = 4
"""Passes over all parameters in a fit."""
ROWS = 6000
"""Largest number of samples of a case that a fit uses."""

UNMEASURED = Spread(seen=0.4, unseen=0.4)
DEFAULTS: Mapping[str, BandwidthCeiling] = {
    name: BandwidthCeiling(
        ramp_s=3e-6, dram_share=share, l2_share=0.6, sm_bytes_per_clock=16.0, row_cycles=200.0,
        extra_passes=EXTRA_PASSES.get(name, 0.0),
        resident_row_bytes=RESIDENT_ROW_BYTES.get(name, 0.0), reuse_share=0.1, spread=UNMEASURED,
    )
    for name, share in (
        ("elementwise", 0.82), ("softmax", 0.75), ("softmax backward", 0.75), ("layernorm", 0.75),
        ("layernorm backward", 0.45), ("rmsnorm", 0.75), ("rmsnorm backward", 0.45), ("cross_entropy", 0.7),
        ("cross_entropy backward", 0.7), ("embedding", 0.7), ("embedding backward", 0.4),
    )
}  # fmt: skip
"""Start of each fit, and the ceiling of cases without measurements: their shares are like those of measured kinds."""


def fit(samples: Mapping[str, Samples]) -> dict[str, BandwidthCeiling]:
    """Return a ceiling for every case of the bandwidth-bound kinds, fitted if there are samples of it."""
    values = dict(DEFAULTS)
    for part in samples.values():
        for case in sorted(set(part.case) & set(DEFAULTS)):
            values[case] = _fit_one(part.take(part.case == case), DEFAULTS[case])
    return values


def shown_durations(rows: Samples, ceiling: BandwidthCeiling) -> Floats:
    """Return the durations that the harness would show for the samples under a ceiling, in seconds, (N,)."""
    result = np.zeros(len(rows))
    for name in sorted(set(rows.gpu)):
        here = rows.gpu == name
        gpu, written_share = list_gpus()[name], rows.written_share[here]
        result[here] = formulas.bandwidth_bound_s(
            rows.moved[here], rows.rows[here], gpu, ceiling, written_share=written_share
        )
    return np.maximum(np.maximum(result, rows.roofline_s) + rows.added_s, rows.least_s)


def _miss(rows: Samples, ceiling: BandwidthCeiling) -> Floats:
    return np.abs(np.log(shown_durations(rows, ceiling) / rows.measured_s))


def _fit_one(rows: Samples, start: BandwidthCeiling) -> BandwidthCeiling:
    rng = np.random.default_rng(0)
    few = rows.take(np.sort(rng.choice(len(rows), ROWS, replace=False))) if len(rows) > ROWS else rows
    known, few = few, few.take(few.general) if few.general.any() else few
    # A GPU counts by the square root of its samples' weight, so that the largest table does not decide alone.
    share = few.weight / np.sqrt([few.weight[few.gpu == name].sum() for name in few.gpu])
    best = start
    error = float(share @ _miss(few, best))
    tunable = [name for name in GRID if name not in ROWWISE or few.rows.any()]
    for _ in range(SWEEPS):
        for name in tunable:
            for value in GRID[name]:
                trial = best.model_copy(update={name: float(value)})
                trial_error = float(share @ _miss(few, trial))
                if trial_error < error:
                    best, error = trial, trial_error
    return _calibrated(rows, _corrected(known, best))


def _corrected(rows: Samples, ceiling: BandwidthCeiling) -> BandwidthCeiling:
    """Return the ceiling with a fitted factor on the share of DRAM bandwidth for every die with enough samples.

    The factor is 1 for dies with fewer than `DIE_ROWS` samples.
    """
    factors: dict[str, float] = {}
    for name in sorted(set(rows.die)):
        part = rows.take(rows.die == name)
        if len(part) < DIE_ROWS:
            factors[name] = 1.0
            continue
        trials = np.round(np.arange(0.70, 1.31, 0.02), 2)
        errors = [_miss(part, ceiling.model_copy(update={"dies": {name: float(f)}})).mean() for f in trials]
        factors[name] = float(trials[int(np.argmin(errors))])
    return ceiling.model_copy(update={"dies": factors})


def _calibrated(rows: Samples, ceiling: BandwidthCeiling) -> BandwidthCeiling:
    errors = np.expm1(_miss(rows, ceiling))
    seen = float(np.quantile(errors, 0.9))
    general = ceiling.model_copy(update={"dies": {}})
    unseen = float(np.quantile(np.expm1(_miss(rows, general)), 0.9))
    spread = Spread(seen=seen, unseen=1.2 * max(seen, unseen), dies=error_by_die(rows.die, errors))
    return ceiling.model_copy(update={"spread": spread})
