"""Deviations that the runs of one job share: the figures of `[job]` in predictor/tilecast/learning/calibration.toml.

python lab/bench/transfer.py RUNS.csv ...

One figure after the other moves over a grid, as long as that lowers the errors of the corrected forecasts against the
raw ones, summed over the kinds of pairs. Every source counts alike. Then each eighth of the sources is forecast with
figures that were fitted without it. Beside the corrected forecasts are the raw ones, and the measured step scaled by
the ratio of the two raw forecasts.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tilecast.learning.job_calibration import LEVELS, shipped_deviations
from tilecast.spec import Floats, Ints
from tilecast.validate.transfer import pair_corrections, pair_errors, pair_runs, shared_pair_levels
from tilecast_lab.validate import transfer

FACTORS = (0.5, 0.7, 0.85, 1.2, 1.4, 2.0)
LEAST, MOST = 0.03, 0.3
ODD, ODD_SHARES = (0.4, 0.6, 0.8, 1.0), (0.02, 0.05, 0.1, 0.2)
FOLDS = 8


class SourceMean:
    """Mean of a column of pairs: over the pairs of a row, over the rows of a source, then over sources."""

    def __init__(self, asked: Ints, source: np.ndarray) -> None:
        rows, row, pairs = np.unique(asked, return_inverse=True, return_counts=True)
        self.sources, place, size = np.unique(source[rows], return_inverse=True, return_counts=True)
        self._place = place[row]
        self._weight = 1.0 / pairs[row] / size[self._place]

    def __call__(self, column: Floats, counts: Callable[[str], float] = lambda name: 1.0) -> float:
        """Return the mean of a column (P,), with each source weighted by `counts`."""
        weights = np.array([counts(name) for name in self.sources])
        return float(np.average(np.bincount(self._place, self._weight * column, len(self.sources)), weights=weights))


class LeftOutFit:
    """Pairs of runs of every kind, with the levels of deviations that they share."""

    def __init__(self, subjects: transfer.TransferRuns) -> None:
        self.subjects = subjects
        self.source = np.array(subjects.source)
        self.pairs = pair_runs(subjects)
        self.shared = {kind: shared_pair_levels(subjects, *both) for kind, both in self.pairs.items()}
        self.mean = {kind: SourceMean(asked, self.source) for kind, (_, asked) in self.pairs.items()}

    def errors(self, known: Mapping[str, float]) -> dict[str, tuple[Floats, Floats]]:
        """Return the absolute errors of every pair by kind, raw and corrected."""
        out, deviation = {}, self.subjects.deviation
        for kind, (seen, asked) in self.pairs.items():
            ratio, _ = pair_corrections(self.shared[kind], deviation[seen], known)
            raw = np.exp(deviation[asked])
            out[kind] = (np.abs(raw - 1), np.abs(raw * ratio - 1))
        return out

    def best(self, counts: Callable[[str], float], rounds: int = 4) -> dict[str, float]:
        """Return the figures that suit the sources best, weighted by `counts`."""
        known = dict(shipped_deviations())

        def loss(tried: Mapping[str, float]) -> float:
            return sum(
                self.mean[kind](corrected, counts) / self.mean[kind](raw, counts)
                for kind, (raw, corrected) in self.errors(tried).items()
                if sum(counts(name) for name in self.mean[kind].sources)
            )

        least = loss(known)
        for _ in range(rounds):
            for name in (*LEVELS, "odd", "odd_share"):
                grid = {"odd": ODD, "odd_share": ODD_SHARES}.get(name)
                for value in grid or np.clip(known[name] * np.array(FACTORS), LEAST, MOST):
                    tried = {**known, name: float(value)}
                    if (reached := loss(tried)) < least - 1e-4:
                        least, known = reached, tried
        return known

    def left_out(self) -> dict[str, tuple[Floats, Floats]]:
        """Return the errors where each part of the sources is forecast with figures that were fitted without it."""
        names = np.random.default_rng(0).permutation(np.unique(self.source))
        fold = {str(name): number % FOLDS for number, name in enumerate(names)}
        errors = self.errors(shipped_deviations())
        for number in range(FOLDS):
            known = self.best(lambda name, number=number: float(fold[name] != number), rounds=2)  # type: ignore[misc]
            for kind, (_, corrected) in self.errors(known).items():
                own = np.array([fold[name] == number for name in self.source[self.pairs[kind][1]]])
                errors[kind][1][own] = corrected[own]
        return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    fit = LeftOutFit(transfer.read_subjects(parser.parse_args().files))
    known = fit.best(lambda name: 1.0)
    print("found anew:", ", ".join(f"{name} {known[name]:.3f}" for name in (*LEVELS, "odd", "odd_share")))
    columns = {"shipped": fit.errors(shipped_deviations()), "anew": fit.errors(known), "left out": fit.left_out()}
    print(f"{'':<12}{'sources':>8}{'raw':>8}" + "".join(f"{title:>9}" for title in (*columns, "scaled", "covered")))
    for kind, (seen, asked) in fit.pairs.items():
        item, mean = pair_errors(fit.subjects, kind, seen, asked), fit.mean[kind]
        found = [mean(column[kind][1]) for column in columns.values()]
        print(
            f"{kind:<12}{len(mean.sources):8d}{mean(item.errors['raw']):8.1%}"
            + "".join(f"{error:9.1%}" for error in (*found, mean(item.errors["scaled"])))
            + f"{mean(item.covered[1]):9.0%}"
        )
