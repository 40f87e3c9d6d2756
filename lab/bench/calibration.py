"""Improvement of forecasts by observations of their pool, and the size of the deviations that runs share.

python lab/bench/calibration.py RUNS.csv ...          # errors after 0, 3, 10, 30 observations
python lab/bench/calibration.py --fit RUNS.csv ...    # the figures of predictor/tilecast/learning/calibration.toml
python lab/bench/calibration.py --unrelated RUNS.csv ...    # what ten runs of other jobs do to a job's forecast
"""

import argparse
from pathlib import Path

import numpy as np

from tilecast.learning import calibration
from tilecast.learning.calibration import LEVELS, Run
from tilecast.validate.calibration import calibration_report
from tilecast.validate.runs import read_table
from tilecast_lab.validate.calibration import errors_from_unrelated_runs, measured


def deviations(runs: list[Run]) -> dict[str, tuple[float, int]]:
    """Return for each level the spread of its groups' medians, and the number of groups.

    The spread is 1.4826 times the median size of a group's median around that of the enclosing group. A source
    plays the part of a cluster.
    """
    keys = [(one.pool.rsplit(" ", 1)[0], *calibration.name_group(one)) for one in runs]
    rest = np.array([one.deviation for one in runs])
    widths = {}
    for name, depth in LEVELS:
        group = np.unique(["|".join(key[: depth + 1]) for key in keys], return_inverse=True)[1]
        counts = np.bincount(group)
        middle = np.array([np.median(rest[group == number]) for number in range(len(counts))])
        large = middle[counts >= calibration.MIN_OBSERVATIONS]
        widths[name] = (1.4826 * float(np.median(np.abs(large))), len(large))
        rest = rest - np.where(counts >= calibration.MIN_OBSERVATIONS, middle, 0.0)[group]
    widths["run"] = (1.4826 * float(np.median(np.abs(rest))), len(rest))
    return widths


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--unrelated", action="store_true")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    sample = measured([row for path in options.files for row in read_table(path)])
    if options.fit:
        for name, (spread, groups) in deviations(list(sample.runs)).items():
            print(f"{name:<10}{spread:7.3f}  {groups} groups")
    elif options.unrelated:
        for spread in (0.0, 0.03, 0.06, 0.08, 0.1, 0.12):
            known = {**calibration.shipped_deviations(), calibration.SOFTWARE: spread}
            sources, raw, corrected = errors_from_unrelated_runs(sample, known=known)
            print(f"software {spread:.2f}: {sources} sources, error {raw:.2%} without, {corrected:.2%} with ten runs")
    else:
        print(calibration_report(sample))
