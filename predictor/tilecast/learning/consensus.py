"""Estimate effects that several parties share and have measured, with a bound on the influence of each party.

Parties need not be honest. Effects are independent standard normal variables u, (m,). A party has measured y = Z u + e.
Without a bound, the posterior mean would be the sum of one pull per party, g = Z' R^-1 (y - Z u).

Here every party may differ from the others by a shift s of its own, which costs `limit` times its length. So no pull is
longer than the limit, and parties with honest noise still agree (Huber's function on parties, as an infimal
convolution). The whole problem is convex with modulus 1. So one party, whatever and however much it reports, moves the
estimate of l'u by at most `limit` times the length of l.

A shift of that cost is equivalent to a shift of variance nu = length / limit. The search finds the variances with which
every pull is within the limit (iteratively reweighted least squares).

`find_consensus` is the entry point.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilecast.spec import Floats, Ints

ROUNDS = 300
CONVERGENCE = 1e-6
"""Change of the estimate below which it is final, in standard deviations of an effect."""
PULL_TOLERANCE = 1e-4
"""Relative excess of a pull over the limit that is accepted."""
MIN_SHIFT = 0.01
"""Least variance of a shift, at which its search begins; it is not 0, because the search multiplies it."""
DISAGREEMENT_LIMIT = 2.5
"""Least root mean square of a party's shift, in limits of a pull, with which it disagrees with the others."""
MIN_INFORMATION = 1e-3
"""Largest information about a direction that is ignored, in units of the prior information."""


@dataclass(frozen=True, slots=True)
class Party:
    """Measurements of one party, along the directions in which it has measured effects."""

    names: tuple[Hashable, ...]
    """Names of the effects, (k,)."""
    directions: Floats
    """Orthonormal directions, (r, k)."""
    information: Floats
    """Information along each direction: the inverse of the variance of the measurement, (r,)."""
    whitened: Floats
    """Measurement along each direction times the root of the information, (r,)."""

    @classmethod
    def from_deviations(cls, names: Sequence[Hashable], effects: Floats, noise: Floats, deviation: Floats) -> Party:
        """Return the party that has measured some deviations.

        Args:
            names: names of the effects, (k,).
            effects: share of each effect in a run, (n, k).
            noise: covariance of all other parts of the deviations, (n, n).
            deviation: deviations of the runs, (n,).
        """
        root = np.linalg.cholesky(noise)
        whitened = np.linalg.solve(root, np.column_stack([effects, deviation]))
        rotation, size, directions = np.linalg.svd(whitened[:, :-1], full_matrices=False)
        enough = size**2 > MIN_INFORMATION
        seen = rotation.T @ whitened[:, -1]
        return cls(tuple(names), directions[enough], size[enough] ** 2, seen[enough])

    def pull_length(self, mean: Floats, shift: float) -> float:
        """Return the length of the party's pull on the mean.

        Args:
            mean: mean of the party's effects, (k,).
            shift: variance of the party's own shift.
        """
        return float(np.linalg.norm(self._pull(mean, shift)))

    def own_shift(self, mean: Floats, shift: float) -> float:
        """Return the length of the party's own shift: the root mean square over its `directions`.

        Each direction is weighted by its `information`.

        Args:
            mean: mean of the party's effects, (k,).
            shift: variance of the party's own shift.
        """
        if not len(self.information):
            return 0.0
        own = shift * self._pull(mean, shift)
        return float(np.sqrt(np.average(own**2, weights=self.information)))

    def _pull(self, mean: Floats, shift: float) -> Floats:
        residual = np.sqrt(self.information) * self.whitened - self.information * (self.directions @ mean)
        return np.asarray(residual / (1.0 + shift * self.information))


@dataclass(frozen=True, slots=True)
class Consensus:
    """Estimate of all parties together: mean and covariance of the effects, (m,) and (m, m)."""

    index: Mapping[Hashable, int]
    mean: Floats
    covariance: Floats
    shifts: Floats
    """Variance of each party's shift; 0 if its pull is within the limit, (p,)."""
    parties: tuple[Party, ...] = ()
    disagrees: tuple[bool, ...] = ()
    """Whether each party disagrees with all others by more than its bounded pull can express, (p,)."""

    @property
    def is_at_limit(self) -> Sequence[bool]:
        """Whether each party's pull is at the limit, (p,)."""
        return [shift > MIN_SHIFT for shift in self.shifts.tolist()]

    def extend_to(self, count: int) -> tuple[Floats, Floats]:
        """Return mean and covariance of `count` effects, (count,) and (count, count).

        The first are the effects of the consensus; the others are unknown.
        """
        mean, covariance, known = np.zeros(count), np.eye(count), len(self.mean)
        mean[:known], covariance[:known, :known] = self.mean, self.covariance
        return mean, covariance

    def unconfirmed_variance(self, covariance: Floats, targets: Floats) -> Floats:
        """Return the variance to add to some targets because only unconfirmed parties explain it, (k,).

        These parties are the ones that disagree with the others (`disagrees`) and, for each target, the one other party
        that explains most of it. A party that may not move an estimate is no reason to be sure of it. A single party is
        none either: if it reports the expected values, it has much information and no pull.

        Args:
            covariance: covariance of the effects, given all measurements, (m, m).
            targets: covariance of the effects with each target, given the same, (m, k).
        """
        outliers = [number for number, is_outlier in enumerate(self.disagrees) if is_outlier]
        more = np.zeros(targets.shape[1])
        if outliers:
            seen, crossed, left = self._woodbury_terms(outliers, covariance, targets)
            of_targets, of_effects = np.linalg.solve(left, seen), np.linalg.solve(left, crossed.T)
            more = (seen * of_targets).sum(0)
            covariance, targets = covariance + crossed @ of_effects, targets + crossed @ of_targets
        most = np.zeros(targets.shape[1])
        for number, is_outlier in enumerate(self.disagrees):
            if not is_outlier:
                seen, _, left = self._woodbury_terms([number], covariance, targets)
                most = np.maximum(most, (seen * np.linalg.solve(left, seen)).sum(0))
        return more + most

    def _woodbury_terms(
        self, numbers: Sequence[int], covariance: Floats, targets: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return the parts of Woodbury's identity that remove the information of some parties, r directions in all.

        Returns:
            Covariances of the directions with the targets, (r, k), and of the effects with the directions, (m, r), and
                the matrix to invert, (r, r).
        """
        sizes = [len(self.parties[number].information) for number in numbers]
        directions = np.zeros((sum(sizes), len(covariance)))
        variance, row = np.zeros(sum(sizes)), 0
        for number, size in zip(numbers, sizes, strict=True):
            party = self.parties[number]
            columns = np.array([self.index[name] for name in party.names], dtype=np.int64)
            directions[row : row + size, columns] = party.directions
            variance[row : row + size] = 1.0 / party.information + self.shifts[number]
            row += size
        crossed = covariance @ directions.T
        return directions @ targets, crossed, np.diag(variance) - directions @ crossed


def find_consensus(
    parties: Sequence[Party], limit: float, own: Party | None = None, start: Floats | None = None
) -> Consensus:
    """Return the consensus of parties about the effects, for a reader that has measurements of its own.

    Args:
        parties: each with a pull of at most the limit, (p,).
        limit: largest length of a pull, given that the reader's measurements count too.
        own: the reader's measurements, which have no bound and are no part of the result.
        start: shifts of a similar question, at which the search begins, (p,).
    """
    everyone = (*parties, *((own,) if own is not None and parties else ()))
    index = {name: number for number, name in enumerate(dict.fromkeys(n for one in everyone for n in one.names))}
    count = len(index)
    if not parties:
        return Consensus(index, np.zeros(count), np.eye(count), np.zeros(0))
    columns: list[Ints] = [np.array([index[name] for name in one.names], dtype=np.int64) for one in everyone]
    shifts: Floats = np.zeros(len(everyone))
    mean: Floats = np.zeros(count)
    bounds = np.array([limit] * len(parties) + [np.inf] * (len(everyone) - len(parties)))
    for number in range(ROUNDS):
        before, mean = mean, _solve_mean(*_normal_equations(everyone, columns, shifts, count))
        length = np.array(
            [one.pull_length(mean[own], shift) for one, own, shift in zip(everyone, columns, shifts, strict=True)]
        )
        is_within = (length <= bounds * (1 + PULL_TOLERANCE)).all()
        if is_within and (number == 0 or np.abs(mean - before).max(initial=0.0) < CONVERGENCE):
            break
        if number == 0:
            shifts[: len(parties)] = np.maximum(length[: len(parties)] / limit if start is None else start, MIN_SHIFT)
        else:
            shifts = shifts * length / bounds
    rests = [one.own_shift(mean[own], shift) for one, own, shift in zip(everyone, columns, shifts, strict=True)]
    disagrees = tuple(rest > DISAGREEMENT_LIMIT * limit for rest in rests[: len(parties)])
    shifts = shifts[: len(parties)]
    precision, seen = _normal_equations(parties, columns[: len(parties)], shifts, count)
    covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
    return Consensus(index, _solve_mean(precision, seen), covariance, shifts, tuple(parties), disagrees)


def _solve_mean(precision: Floats, seen: Floats) -> Floats:
    return np.asarray(np.linalg.solve(precision, seen), dtype=np.float64)


def _normal_equations(
    parties: Sequence[Party], columns: Sequence[Ints], shifts: Floats, count: int
) -> tuple[Floats, Floats]:
    """Return the normal equations of the effects: the inverse covariance, (m, m), and its product with the mean, (m,).

    `columns` has the columns of the effects of each party among the m, (k,) each.
    """
    precision, seen = np.eye(count), np.zeros(count)
    for one, own, shift in zip(parties, columns, shifts, strict=True):
        left = 1.0 / (1.0 + shift * one.information)
        precision[np.ix_(own, own)] += (one.directions.T * (one.information * left)) @ one.directions
        seen[own] += (np.sqrt(one.information) * left * one.whitened) @ one.directions
    return precision, seen
