"""Bandwidth ceilings of the kinds without a network, fitted by search over a small grid."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np

from tilecast.hardware import gpus
from tilecast.kernels import formulas
from tilecast.kernels.utilization import Ceiling, Spread
from tilecast.spec import Floats
from tilecast_fit.samples import Samples

GRID = {
    "ramp_s": (1.5e-6, 2.5e-6, 4e-6, 6e-6),
    "dram_share": tuple(np.arange(0.30, 1.0, 0.02)),
    "l2_share": (0.15, 0.25, 0.35, 0.5, 0.7, 0.9),
    "sm_bytes_per_clock": (4.0, 8.0, 16.0, 32.0),
}

UNMEASURED = Spread(seen=0.4, unseen=0.4)
DEFAULTS: Mapping[str, Ceiling] = {
    name: Ceiling(ramp_s=3e-6, dram_share=share, l2_share=0.5, sm_bytes_per_clock=8.0, spread=UNMEASURED)
    for name, share in (
        ("elementwise", 0.82), ("softmax", 0.75), ("softmax backward", 0.75), ("layernorm", 0.75),
        ("layernorm backward", 0.45), ("rmsnorm", 0.75), ("rmsnorm backward", 0.45), ("cross_entropy", 0.7),
        ("cross_entropy backward", 0.7), ("embedding", 0.7), ("embedding backward", 0.4),
    )
}  # fmt: skip
"""What stands in where nothing was measured: shares of the same order as the measured kinds."""


def fit(samples: Mapping[str, Samples]) -> dict[str, Ceiling]:
    """A ceiling for every case of the bandwidth-bound kinds, fitted where there are samples."""
    found = dict(DEFAULTS)
    for part in samples.values():
        if part.names:
            continue
        for case in sorted(set(part.case)):
            rows = part.take(part.case == case)
            if len(rows) > 4000:
                rows = rows.take(np.random.default_rng(0).choice(len(rows), 4000, replace=False))
            found[case] = _fit_one(rows)
    return found


def shown(rows: Samples, ceiling: Ceiling) -> Floats:
    """What the harness would show for those kernels under that ceiling, seconds, shape (N,)."""
    result = np.zeros(len(rows))
    for name in sorted(set(rows.gpu)):
        here = rows.gpu == name
        result[here] = formulas.bandwidth_bound_s(rows.moved[here], rows.row_bytes[here], gpus()[name], ceiling)
    result = np.maximum(result, rows.roofline_s)
    return np.maximum(result + rows.added_s, rows.least_s)


def _fit_one(rows: Samples) -> Ceiling:
    best, best_error = next(iter(DEFAULTS.values())), np.inf
    weight = rows.weight / rows.weight.sum()
    for values in product(*GRID.values()):
        trial = Ceiling(**dict(zip(GRID, values, strict=True)), spread=UNMEASURED)
        error = float(weight @ np.abs(np.log(shown(rows, trial) / rows.measured_s)))
        if error < best_error:
            best, best_error = trial, error
    miss = np.abs(rows.measured_s / shown(rows, best) - 1)
    spread = float(np.quantile(miss, 0.9))
    seen = tuple(sorted(set(rows.die)))
    return best.model_copy(update={"spread": Spread(seen=spread, unseen=1.3 * spread), "seen": seen})
