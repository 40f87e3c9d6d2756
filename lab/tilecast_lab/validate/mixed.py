"""Linear mixed model that separates the error of a part of the forecast from the error of a whole source.

    y = X b + u[source] + e,   u ~ N(0, between^2),   e ~ N(0, within^2 / weight),   b ~ N(0, prior^2)

This is the mixed model of Henderson (Biometrics 31, 1975) with a Gaussian prior on the fixed effects. The ratio of the
two variances maximises the restricted likelihood on a grid. Outliers count less: weights follow Student's t with four
degrees of freedom (Lange et al., JASA 84, 1989).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilecast.spec import Floats, Rows

_RATIOS = np.geomspace(1e-3, 30.0, 16)
"""Ratios of the variance between sources to the variance within them that are tried."""
_FREEDOM = 4.0
"""Degrees of freedom of Student's t."""
_ROUNDS = 8
"""Rounds of reweighting."""


@dataclass(frozen=True, slots=True)
class MixedModelEstimates:
    """Estimates of the mixed model.

    `fixed` are the fixed effects `b` and `error` their standard errors, both (k,). `sources` has the effect of each
    source; `between` and `within` are the standard deviations between and within sources.
    """

    fixed: Floats
    error: Floats
    sources: dict[str, float]
    between: float
    within: float


def balanced_weights(sources: Sequence[str]) -> Floats:
    """Return weights (n,) with a mean of one under which all sources count the same."""
    names, index, count = np.unique(np.asarray(sources), return_inverse=True, return_counts=True)
    return np.asarray(len(index) / len(names) / count[index], dtype=float)


def estimate_effects(
    y: Floats,
    x: Floats,
    sources: Sequence[str],
    weight: Floats,
    prior: Floats,
    ratios: Sequence[float] = tuple(_RATIOS),
) -> MixedModelEstimates:
    """Estimate the effects of the columns of `x` on `y`.

    Args:
        y: dependent variable, (n,).
        x: explanatory columns, (n, k).
        sources: the source of each row, (n,).
        weight: how much a row counts, (n,), 1 on average.
        prior: standard deviation of each effect before any row is seen, (k,).
        ratios: ratios of the variance between sources to the variance within them that are tried.
    """
    names, index = np.unique(np.asarray(sources), return_inverse=True)
    robust = np.ones(len(y))

    def best() -> MixedModelEstimates:
        fits = [_given(ratio, y, x, index, len(names), weight * robust, prior) for ratio in ratios]
        return max(fits, key=lambda fit: fit[0])[1]

    effects = best()
    for _ in range(_ROUNDS):
        left = y - x @ effects.fixed - np.array([effects.sources[str(i)] for i in index])
        robust = (_FREEDOM + 1) / (_FREEDOM + (left / max(effects.within, 1e-9)) ** 2)
        effects = best()
    return MixedModelEstimates(
        effects.fixed,
        effects.error,
        {str(name): effects.sources[str(i)] for i, name in enumerate(names)},
        effects.between,
        effects.within,
    )


def _given(
    ratio: float, y: Floats, x: Floats, index: Rows, groups: int, weight: Floats, prior: Floats
) -> tuple[float, MixedModelEstimates]:
    """Return the restricted log-likelihood and the effects for one ratio of the variances between and within sources.

    `index` (n,) is the source of each row as a number below `groups`.
    """
    n, k = x.shape
    total = np.bincount(index, weight, groups)
    shrink = ratio / (1.0 + ratio * total)
    sums = (
        np.stack([np.bincount(index, weight * column, groups) for column in x.T], axis=1)
        if k
        else np.zeros((groups, 0))
    )
    sum_y = np.bincount(index, weight * y, groups)
    normal = x.T @ (weight[:, None] * x) - sums.T @ (shrink[:, None] * sums)
    right = x.T @ (weight * y) - sums.T @ (shrink * sum_y)
    square = float(y @ (weight * y) - sum_y @ (shrink * sum_y))
    scale = max(float(np.var(y)), 1e-8)
    within = 0.25 * scale
    for _ in range(3):
        inverse = np.linalg.inv(normal + np.diag(within / prior**2))
        fixed = inverse @ right
        within = max((square - 2 * fixed @ right + fixed @ normal @ fixed) / max(n - k, 1), 1e-8)
    likelihood = -0.5 * ((n - k) * np.log(within) + np.log1p(ratio * total).sum() - np.linalg.slogdet(inverse)[1])
    effect = shrink * (sum_y - sums @ fixed)
    error = np.sqrt(np.diag(inverse) * within)
    sources = {str(i): float(value) for i, value in enumerate(effect)}
    return float(likelihood), MixedModelEstimates(
        fixed, error, sources, float(np.sqrt(ratio * within)), float(np.sqrt(within))
    )
