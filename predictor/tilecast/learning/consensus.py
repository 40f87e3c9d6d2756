"""Estimate random effects from measurements of several contributors, each with bounded influence.

A contributor is a namespace that reports runs, possibly false ones. Effects are independent standard normal variables
u, (m,). A contributor has measured y = Z u + e, where e has covariance R. Without a bound, the posterior mean u would
be the sum of the pulls g = Z' R^-1 (y - Z u) of all contributors.

Here every contributor may also deviate by a shift s, which costs `limit` times its length. So no pull is longer than
`limit`, while contributors with honest noise keep full weight (Huber's function, as an infimal convolution). The
problem is strongly convex with modulus 1. So, whatever a contributor reports, it moves the estimate of l'u by at most
`limit` times the length of l.

A shift with this cost is equivalent to a shift of variance nu = length / limit. The search finds the variances with
which every pull is within the limit (iteratively reweighted least squares).

`find_consensus` is the entry point.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilecast.spec import Floats, Ints

ROUNDS = 300
CONVERGENCE = 1e-6
"""Change of the estimate, in standard deviations of an effect, below which the search stops."""
PULL_TOLERANCE = 1e-4
"""Largest accepted excess of a pull over the limit, relative to the limit."""
MIN_SHIFT = 0.01
"""Variance of a shift at which its search begins. It is above 0, because the search multiplies it."""
DISAGREEMENT_LIMIT = 2.5
"""Least root mean square of a contributor's shift, in units of the limit, at which it disagrees with the others."""
MIN_INFORMATION = 1e-3
"""Information about a direction, in units of the prior information, up to which the direction is ignored."""


@dataclass(frozen=True, slots=True)
class ContributorEstimate:
    """One contributor's measurements of its k effects, compressed to r independent directions."""

    names: tuple[Hashable, ...]
    """Names of the effects, (k,)."""
    directions: Floats
    """Orthonormal directions, (r, k)."""
    information: Floats
    """Information along each direction: the inverse of the variance of the measurement, (r,)."""
    whitened: Floats
    """Measurement along each direction times the root of the information, (r,)."""

    @classmethod
    def from_deviations(
        cls, names: Sequence[Hashable], effects: Floats, noise: Floats, deviation: Floats
    ) -> ContributorEstimate:
        """Return the measurements of a contributor from the deviations of its n runs.

        Args:
            names: names of the effects, (k,).
            effects: coefficient of each effect in the deviation of each run, (n, k).
            noise: covariance of the rest of the deviations, (n, n).
            deviation: deviations of the runs, (n,).
        """
        root = np.linalg.cholesky(noise)
        whitened = np.linalg.solve(root, np.column_stack([effects, deviation]))
        rotation, size, directions = np.linalg.svd(whitened[:, :-1], full_matrices=False)
        enough = size**2 > MIN_INFORMATION
        seen = rotation.T @ whitened[:, -1]
        return cls(tuple(names), directions[enough], size[enough] ** 2, seen[enough])

    def find_pull_length(self, mean: Floats, shift: float) -> float:
        """Return the length of this contributor's pull on the estimate, which the module's docstring defines.

        Args:
            mean: mean of the contributor's effects, (k,).
            shift: variance of the contributor's own shift.
        """
        return float(np.linalg.norm(self._compute_pull(mean, shift)))

    def find_shift_length(self, mean: Floats, shift: float) -> float:
        """Return the size of this contributor's estimated deviation from the mean of all contributors.

        It is the root mean square over the directions that its measurements determine, weighted by their information.

        Args:
            mean: mean of the contributor's effects, (k,).
            shift: variance of the contributor's own shift.
        """
        if not len(self.information):
            return 0.0
        own = shift * self._compute_pull(mean, shift)
        return float(np.sqrt(np.average(own**2, weights=self.information)))

    def _compute_pull(self, mean: Floats, shift: float) -> Floats:
        residual = np.sqrt(self.information) * self.whitened - self.information * (self.directions @ mean)
        return np.asarray(residual / (1.0 + shift * self.information))


@dataclass(frozen=True, slots=True)
class Consensus:
    """Estimate of m effects from p contributors: mean, (m,), and covariance, (m, m)."""

    index: Mapping[Hashable, int]
    mean: Floats
    covariance: Floats
    shifts: Floats
    """Variance of each contributor's shift, (p,). It is 0 if its pull is within the limit."""
    contributors: tuple[ContributorEstimate, ...] = ()
    disagrees: tuple[bool, ...] = ()
    """Whether each contributor disagrees with the others by more than its bounded pull can express, (p,)."""

    @property
    def is_at_limit(self) -> Sequence[bool]:
        """Whether each contributor's pull has been cut to the limit, (p,)."""
        return [shift > MIN_SHIFT for shift in self.shifts.tolist()]

    def extend_to(self, count: int) -> tuple[Floats, Floats]:
        """Return the mean, (count,), and covariance, (count, count), with further effects appended up to `count`.

        The further effects have the prior mean 0 and variance 1.
        """
        mean, covariance, known = np.zeros(count), np.eye(count), len(self.mean)
        mean[:known], covariance[:known, :known] = self.mean, self.covariance
        return mean, covariance

    def find_unconfirmed_variance(self, covariance: Floats, targets: Floats) -> Floats:
        """Return the variance to add to k targets because too few contributors confirm their estimates, (k,).

        It is the variance that removing some contributors would add: those that disagree (`disagrees`), and, for each
        target, the one other contributor that explains most of it. So no contributor can narrow a range alone.

        Args:
            covariance: covariance of the effects, given all measurements, (m, m).
            targets: covariance of the effects with each target, given all measurements, (m, k).
        """
        outliers = [number for number, is_outlier in enumerate(self.disagrees) if is_outlier]
        more = np.zeros(targets.shape[1])
        if outliers:
            seen, crossed, left = self._build_woodbury_terms(outliers, covariance, targets)
            of_targets, of_effects = np.linalg.solve(left, seen), np.linalg.solve(left, crossed.T)
            more = (seen * of_targets).sum(0)
            covariance, targets = covariance + crossed @ of_effects, targets + crossed @ of_targets
        most = np.zeros(targets.shape[1])
        for number, is_outlier in enumerate(self.disagrees):
            if not is_outlier:
                seen, _, left = self._build_woodbury_terms([number], covariance, targets)
                most = np.maximum(most, (seen * np.linalg.solve(left, seen)).sum(0))
        return more + most

    def _build_woodbury_terms(
        self, numbers: Sequence[int], covariance: Floats, targets: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return the matrices of Woodbury's identity, by which measurements of some contributors are removed.

        Args:
            numbers: indices of the contributors, with r directions in all.
            covariance: covariance of the effects, (m, m).
            targets: covariance of the effects with each target, (m, k).

        Returns:
            Covariance of directions and targets, (r, k), covariance of effects and directions, (m, r), and the matrix
                to invert, (r, r).
        """
        sizes = [len(self.contributors[number].information) for number in numbers]
        directions = np.zeros((sum(sizes), len(covariance)))
        variance, row = np.zeros(sum(sizes)), 0
        for number, size in zip(numbers, sizes, strict=True):
            contributor = self.contributors[number]
            columns = np.array([self.index[name] for name in contributor.names], dtype=np.int64)
            directions[row : row + size, columns] = contributor.directions
            variance[row : row + size] = 1.0 / contributor.information + self.shifts[number]
            row += size
        crossed = covariance @ directions.T
        return directions @ targets, crossed, np.diag(variance) - directions @ crossed


def find_consensus(
    contributors: Sequence[ContributorEstimate],
    limit: float,
    excluded: ContributorEstimate | None = None,
    start: Floats | None = None,
) -> Consensus:
    """Return the estimate of effects from contributors with bounded influence.

    Args:
        contributors: the contributors, (p,).
        limit: largest length of the pull of a contributor.
        excluded: measurements of the namespace that the estimate is for. They affect the bounds, but not the estimate.
        start: variances of shifts at which the search begins, (p,). None for a new search.
    """
    everyone = (*contributors, *((excluded,) if excluded is not None and contributors else ()))
    index = {name: number for number, name in enumerate(dict.fromkeys(n for one in everyone for n in one.names))}
    count = len(index)
    if not contributors:
        return Consensus(index, np.zeros(count), np.eye(count), np.zeros(0))
    columns: list[Ints] = [np.array([index[name] for name in one.names], dtype=np.int64) for one in everyone]
    shifts: Floats = np.zeros(len(everyone))
    mean: Floats = np.zeros(count)
    bounds = np.array([limit] * len(contributors) + [np.inf] * (len(everyone) - len(contributors)))
    for number in range(ROUNDS):
        before, mean = mean, _solve_for_mean(*_build_normal_equations(everyone, columns, shifts, count))
        length = np.array(
            [
                one.find_pull_length(mean[excluded], shift)
                for one, excluded, shift in zip(everyone, columns, shifts, strict=True)
            ]
        )
        is_within = (length <= bounds * (1 + PULL_TOLERANCE)).all()
        if is_within and (number == 0 or np.abs(mean - before).max(initial=0.0) < CONVERGENCE):
            break
        if number == 0:
            shifts[: len(contributors)] = np.maximum(
                length[: len(contributors)] / limit if start is None else start, MIN_SHIFT
            )
        else:
            shifts = shifts * length / bounds
    rests = [
        one.find_shift_length(mean[excluded], shift)
        for one, excluded, shift in zip(everyone, columns, shifts, strict=True)
    ]
    disagrees = tuple(rest > DISAGREEMENT_LIMIT * limit for rest in rests[: len(contributors)])
    shifts = shifts[: len(contributors)]
    precision, seen = _build_normal_equations(contributors, columns[: len(contributors)], shifts, count)
    covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
    return Consensus(index, _solve_for_mean(precision, seen), covariance, shifts, tuple(contributors), disagrees)


def _solve_for_mean(precision: Floats, seen: Floats) -> Floats:
    return np.asarray(np.linalg.solve(precision, seen), dtype=np.float64)


def _build_normal_equations(
    contributors: Sequence[ContributorEstimate], columns: Sequence[Ints], shifts: Floats, count: int
) -> tuple[Floats, Floats]:
    """Return the normal equations of the effects: the inverse covariance, (m, m), and its product with the mean, (m,).

    Args:
        contributors: the contributors, (p,).
        columns: for each contributor, the indices of its k effects among the m effects, (k,).
        shifts: variance of the shift of each contributor, (p,).
        count: the number m of effects.
    """
    precision, seen = np.eye(count), np.zeros(count)
    for one, own, shift in zip(contributors, columns, shifts, strict=True):
        left = 1.0 / (1.0 + shift * one.information)
        precision[np.ix_(own, own)] += (one.directions.T * (one.information * left)) @ one.directions
        seen[own] += (np.sqrt(one.information) * left * one.whitened) @ one.directions
    return precision, seen
