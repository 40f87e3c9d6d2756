"""Deviations that the runs of one job share: the figures of `[job]` in predictor/tilecast/learning/calibration.toml.

python lab/bench/transfer.py RUNS.csv ...

One deviation after the other moves over a grid, three times, as long as that lowers the macro errors of the corrected
forecasts against the raw ones. Errors of rows on another GPU count fully, those of other GPU counts and plans half.
Then each eighth of the sources is forecast with deviations that were fitted without it.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tilecast.learning.job_calibration import LEVELS, shipped_deviations
from tilecast.spec import Floats
from tilecast.validate.transfer import TransferRuns, pair_corrections, pair_runs, shared_pair_levels
from tilecast_lab.validate import transfer
from tilecast_lab.validate.transfer import GroupMean

FACTORS = (0.4, 0.6, 0.8, 1.25, 1.6, 2.2)
LEAST, MOST = 0.03, 0.3
WEIGHTS = {"other GPU": 1.0, "other count": 0.5, "other plan": 0.5}
FOLDS = 8


class LeftOutFit:
    """Pairs of runs of every kind, with the levels of deviations that they share."""

    def __init__(self, subjects: TransferRuns) -> None:
        self.pairs = pair_runs(subjects)
        self.shared = {kind: shared_pair_levels(subjects, *both) for kind, both in self.pairs.items()}
        self.macro = {kind: GroupMean.of(asked, subjects) for kind, (_, asked) in self.pairs.items()}
        self.deviation, self.usual = subjects.deviation, subjects.usual
        self.source = np.array(subjects.source)

    def errors(self, known: Mapping[str, float]) -> dict[str, tuple[Floats, Floats]]:
        """Return the absolute errors of every pair by kind, raw and corrected."""
        out = {}
        for kind, (seen, asked) in self.pairs.items():
            ratio, _ = pair_corrections(self.shared[kind], self.deviation[seen], self.usual[asked], known)
            raw = np.exp(self.deviation[asked])
            out[kind] = (np.abs(raw - 1), np.abs(raw * ratio - 1))
        return out

    def gains(self, errors: Mapping[str, tuple[Floats, Floats]], counts: Callable[[str], float]) -> dict[str, float]:
        """Return corrected errors over raw ones, with each source weighted by `counts`."""
        out = {}
        for kind, both in errors.items():
            drawn = np.array([counts(name) for name in self.macro[kind].sources])
            raw, corrected = (self.macro[kind](column, drawn) for column in both)
            out[kind] = corrected / raw
        return out

    def best(self, counts: Callable[[str], float], rounds: int = 3) -> dict[str, float]:
        """Return the deviations that suit the sources best, weighted by `counts`."""
        known = dict(shipped_deviations())

        def loss(tried: Mapping[str, float]) -> float:
            return sum(WEIGHTS[kind] * gain for kind, gain in self.gains(self.errors(tried), counts).items())

        least = loss(known)
        for _ in range(rounds):
            for name in LEVELS:
                for value in np.clip(known[name] * np.array(FACTORS), LEAST, MOST):
                    tried = {**known, name: float(value)}
                    if (reached := loss(tried)) < least - 1e-4:
                        least, known = reached, tried
        return known

    def left_out(self) -> dict[str, float]:
        """Return the gains where each part of the sources is forecast with deviations fitted without it."""
        names = np.random.default_rng(0).permutation(np.unique(self.source))
        fold = {str(name): number % FOLDS for number, name in enumerate(names)}
        errors = self.errors(shipped_deviations())
        for number in range(FOLDS):
            known = self.best(lambda name, number=number: float(fold[name] != number), rounds=2)  # type: ignore[misc]
            for kind, (_, corrected) in self.errors(known).items():
                own = np.array([fold[name] == number for name in self.source[self.pairs[kind][1]]])
                errors[kind][1][own] = corrected[own]
        return self.gains(errors, lambda name: 1.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    fit = LeftOutFit(transfer.read_subjects(parser.parse_args().files))
    known = fit.best(lambda name: 1.0)
    for name in LEVELS:
        print(f"{name:<14}{known[name]:7.3f}")
    for title, gains in (
        ("as they are", fit.gains(fit.errors(shipped_deviations()), lambda name: 1.0)),
        ("found anew", fit.gains(fit.errors(known), lambda name: 1.0)),
        ("left out", fit.left_out()),
    ):
        print(f"{title:<14}" + "".join(f"{kind:>14} {gain:.3f}" for kind, gain in gains.items()))
