"""What several parties that need not be honest teach of effects that they share, each with a bounded pull.

Effects are independent standard normal variables u, (m,). A party has seen y = Z u + e of them. Together they would
give the posterior mean u = sum of pulls, one a party, g = Z' R^-1 (y - Z u). Here every party may differ from the
others by a shift s of its own that costs `limit` times its length: the robust estimate with which parties of honest
noise agree, and in which no pull is longer than the limit (Huber's function on parties, as an infimal convolution). The
whole is convex with modulus 1, so that what one party says, however much and whatever it is, moves the estimate of l'u
by at most `limit` times the length of l. A shift of that cost is one of variance nu = length / limit, which is how it
is found: the variances are those under which every pull is within the limit (iteratively reweighed least squares).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilecast.spec import Floats, Ints

ROUNDS = 300
CLOSE = 1e-6
"""Change of the estimate below which it is final, in standard deviations of an effect."""
TIGHT = 1e-4
"""What a pull may be longer than the limit, relative to it."""
SMALL = 0.01
"""The shift from which the search for a party's begins, at least: it grows and falls by factors."""
APART = 2.5
"""How much of what a party saw is its own shift, in limits of a pull, where it says something else than all."""
SLIGHT = 1e-3
"""Information about a direction that is left aside, in units of what is known of it beforehand."""


@dataclass(frozen=True, slots=True)
class Party:
    """What one party saw, along directions in which it saw something."""

    names: tuple[Hashable, ...]
    """The effects, (k,)."""
    directions: Floats
    """Orthonormal, (r, k)."""
    information: Floats
    """Along each of them: the inverse of the variance with which it was seen, (r,)."""
    seen: Floats
    """What was seen along them times the root of the information, (r,)."""

    @classmethod
    def of(cls, names: Sequence[Hashable], effects: Floats, noise: Floats, deviation: Floats) -> Party:
        """A party that saw a deviation.

        Args:
            names: of the effects, (k,).
            effects: how much of each a run has, (n, k).
            noise: covariance of what else there is in the deviations, (n, n).
            deviation: of the runs, (n,).
        """
        root = np.linalg.cholesky(noise)
        whitened = np.linalg.solve(root, np.column_stack([effects, deviation]))
        rotation, size, directions = np.linalg.svd(whitened[:, :-1], full_matrices=False)
        enough = size**2 > SLIGHT
        seen = rotation.T @ whitened[:, -1]
        return cls(tuple(names), directions[enough], size[enough] ** 2, seen[enough])

    def pull(self, mean: Floats, shift: float) -> float:
        """Length of the party's pull where its effects are (k,) and its own shift has a variance."""
        return float(np.linalg.norm(self._pull(mean, shift)))

    def unexplained(self, mean: Floats, shift: float) -> float:
        """The root mean square of the party's own shift over what it saw, each by its information."""
        if not len(self.information):
            return 0.0
        own = shift * self._pull(mean, shift)
        return float(np.sqrt(np.average(own**2, weights=self.information)))

    def _pull(self, mean: Floats, shift: float) -> Floats:
        apart = np.sqrt(self.information) * self.seen - self.information * (self.directions @ mean)
        return np.asarray(apart / (1.0 + shift * self.information))


@dataclass(frozen=True, slots=True)
class Consensus:
    """What the parties teach: mean and covariance of the effects, (m,) and (m, m)."""

    index: Mapping[Hashable, int]
    mean: Floats
    covariance: Floats
    shifts: Floats
    """Variance of each party's own shift in units of the effects'; 0 where its pull is within the limit, (p,)."""
    parties: tuple[Party, ...] = ()
    apart: tuple[bool, ...] = ()
    """Whether each party says something else than all together, by more than its pull may say, (p,)."""

    @property
    def bounded(self) -> Sequence[bool]:
        """Whether each party's pull is at the limit, (p,)."""
        return [shift > SMALL for shift in self.shifts.tolist()]

    def of(self, count: int) -> tuple[Floats, Floats]:
        """Mean and covariance of these effects and of others after them, `count` in all, (m,) and (m, m)."""
        mean, covariance, known = np.zeros(count), np.eye(count), len(self.mean)
        mean[:known], covariance[:known, :known] = self.mean, self.covariance
        return mean, covariance

    def unconfirmed(self, covariance: Floats, targets: Floats) -> Floats:
        """How much more would be left open of some targets without the parties that lie apart, and without the one
        other party that each target rests on most, (k,).

        What may not move an estimate is no reason to be sure of it. Neither is what one party alone says, which has
        much information and no pull where it says what everybody expects.

        Args:
            covariance: what all that is known leaves open of the effects, (m, m).
            targets: covariance of the effects with each target by the same, (m, k).
        """
        apart = [number for number, is_apart in enumerate(self.apart) if is_apart]
        more = np.zeros(targets.shape[1])
        if apart:
            seen, crossed, left = self._taken(apart, covariance, targets)
            of_targets, of_effects = np.linalg.solve(left, seen), np.linalg.solve(left, crossed.T)
            more = (seen * of_targets).sum(0)
            covariance, targets = covariance + crossed @ of_effects, targets + crossed @ of_targets
        most = np.zeros(targets.shape[1])
        for number, is_apart in enumerate(self.apart):
            if not is_apart:
                seen, _, left = self._taken([number], covariance, targets)
                most = np.maximum(most, (seen * np.linalg.solve(left, seen)).sum(0))
        return more + most

    def _taken(self, numbers: Sequence[int], covariance: Floats, targets: Floats) -> tuple[Floats, Floats, Floats]:
        """The parts of Woodbury's identity by which some parties' information, r directions in all, is taken out:
        covariances of the directions with the targets, (r, k), and of the effects with them, (m, r), and what is to be
        inverted, (r, r)."""
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


def agree(parties: Sequence[Party], limit: float, own: Party | None = None, start: Floats | None = None) -> Consensus:
    """What the parties teach together to one that has seen something itself.

    Args:
        parties: each with a pull of at most the limit, (p,).
        limit: of the length of a pull, once one's own say counts too.
        own: one's own, which is bounded by nothing and is no part of what is returned.
        start: shifts of a similar question, from which the search for them begins, (p,).
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
        before, mean = mean, _solved(*_normal(everyone, columns, shifts, count))
        length = np.array(
            [one.pull(mean[own], shift) for one, own, shift in zip(everyone, columns, shifts, strict=True)]
        )
        is_within = (length <= bounds * (1 + TIGHT)).all()
        if is_within and (number == 0 or np.abs(mean - before).max(initial=0.0) < CLOSE):
            break
        if number == 0:
            shifts[: len(parties)] = np.maximum(length[: len(parties)] / limit if start is None else start, SMALL)
        else:
            shifts = shifts * length / bounds
    rests = [one.unexplained(mean[own], shift) for one, own, shift in zip(everyone, columns, shifts, strict=True)]
    apart = tuple(rest > APART * limit for rest in rests[: len(parties)])
    shifts = shifts[: len(parties)]
    precision, seen = _normal(parties, columns[: len(parties)], shifts, count)
    covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
    return Consensus(index, _solved(precision, seen), covariance, shifts, tuple(parties), apart)


def _solved(precision: Floats, seen: Floats) -> Floats:
    return np.asarray(np.linalg.solve(precision, seen), dtype=np.float64)


def _normal(parties: Sequence[Party], columns: Sequence[Ints], shifts: Floats, count: int) -> tuple[Floats, Floats]:
    """Inverse covariance of the effects and what was seen in their units, (m, m) and (m,); a party's effects stand in
    its columns, (k,)."""
    precision, seen = np.eye(count), np.zeros(count)
    for one, own, shift in zip(parties, columns, shifts, strict=True):
        left = 1.0 / (1.0 + shift * one.information)
        precision[np.ix_(own, own)] += (one.directions.T * (one.information * left)) @ one.directions
        seen[own] += (np.sqrt(one.information) * left * one.seen) @ one.directions
    return precision, seen
