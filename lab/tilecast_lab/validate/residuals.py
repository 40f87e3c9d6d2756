"""Residuals of forecasts: the ratio of forecast to measured step by every input, and a factor for each part of a step.

The ratio of a bin is the median over its rows; its standard error takes the source as the unit. The factor of a part is
the factor on its seconds that fits the measured steps best, with all other parts and an effect of each source held
equal (`mixed`). It is 1 if the part is forecast well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilecast.learning import calibration
from tilecast.spec import Floats
from tilecast.step.blocks import FACTORS
from tilecast.validate.cells import Row, read_integer
from tilecast_lab.validate import mixed
from tilecast_lab.validate.constants import scaled_values
from tilecast_lab.validate.table import execution

PARTS: Mapping[str, tuple[str, ...]] = {
    **{name: (f"factor.{name}",) for name in FACTORS},
    "memory": ("memory",),
    "implicit convolution": ("implicit",),
    "launches": ("launch_us", "collective_us"),
    "once per step": ("step_ms",),
    "optimizer": ("optimizer.efficiency",),
}
"""Parts of a step and the constants that scale each; the name of a section means all constants in it."""
FALLING = ("optimizer",)
"""Parts whose seconds fall as their constants grow."""
SPAN = 1.08
"""Factor by which constants are moved to find how a step depends on them."""
LEAST_ROWS, LEAST_SOURCES = 10, 2
"""Least rows and sources of a bin for it to be marked as off."""
TOLERANCE = 0.08
"""Distance of a bin's ratio from 1 beyond which the bin is marked as off."""


def source_of(row: Row) -> str:
    """Return who measured a row; MLPerf is split by round and submitter, some collections by framework."""
    source, path = row.get("source", ""), row.get("url_or_repo_path", "")
    if submitter := re.match(r"mlcommons/training_results_(v[\d.]+):([^/]+)", path):
        return f"MLPerf {submitter[1]} {submitter[2]}"
    return f"{source} {framework_of(row)}" if source.endswith(_OF_SEVERAL) else source


_OF_SEVERAL = ("/DeepLearningExamples", "/DLPerf")
"""Ends of the names of sources that run several frameworks in many versions each."""


def framework_of(row: Row) -> str:
    """Return the framework as the row states it, without the version if the source runs many versions."""
    name = row.get("framework", "")
    return re.split(r"[ 0-9]", name)[0] if row.get("source", "").endswith(_OF_SEVERAL) else name


def _power_of_two(column: str) -> Callable[[Row], str]:
    def of(row: Row) -> str:
        value = read_integer(row, column)
        return str(2 ** round(np.log2(value))) if value else ""

    return of


COVARIATES: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("sequence", _power_of_two("seq_len")),
    ("GPUs", _power_of_two("n_gpus")),
    ("accumulation", _power_of_two("grad_accum")),
    ("micro-batch", _power_of_two("micro_batch_per_gpu")),
    ("hidden", _power_of_two("hidden")),
    ("precision", lambda row: row.get("precision", "")),
    ("family", lambda row: row.get("family", "")),
    ("execution", execution),
    ("framework", framework_of),
    ("GPU", lambda row: row["gpu"].split("(")[0].strip()),
)
"""Inputs that residuals are shown against, and the function that returns a row's value."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Rows that share a value of an input."""

    value: str
    rows: int
    sources: int
    ratio: float
    error: float
    """Standard error of the ratio's logarithm with the source as the unit; NaN with one source."""

    @property
    def is_off(self) -> bool:
        """Whether the bin has enough rows and sources, and its ratio is further than `TOLERANCE` from 1."""
        return self.rows >= LEAST_ROWS and self.sources >= LEAST_SOURCES and abs(self.ratio - 1) > TOLERANCE


def bins(key: Callable[[Row], str], rows: Sequence[Row], ratio: Floats) -> list[Bin]:
    """Return the rows grouped by the value of an input; numbers come first, in ascending order."""
    values = np.array([key(row) for row in rows])
    sources = np.array([source_of(row) for row in rows])
    items = []
    for value in sorted(
        set(values) - {""}, key=lambda text: (not text.isdigit(), int(text) if text.isdigit() else 0, text)
    ):
        mask = values == value
        own = np.log(ratio[mask])
        means = [own[sources[mask] == name].mean() for name in set(sources[mask])]
        error = float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan")
        items.append(Bin(str(value), int(mask.sum()), len(means), float(np.exp(np.median(own))), error))
    return items


def table(rows: Sequence[Row], ratio: Floats) -> str:
    """Return the ratio of forecast to measured step by every input as text; bins that are off are marked."""
    lines = ["forecast / measured      rows sources   ratio  +-"]
    for name, key in COVARIATES:
        for item in bins(key, rows, ratio):
            mark = "  off" if item.is_off else ""
            error = f"{item.error:5.2f}" if np.isfinite(item.error) else "    -"
            lines.append(
                f"{name + ' ' + item.value:24.24s} {item.rows:5d} {item.sources:7d} {item.ratio:7.2f} {error}{mark}"
            )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class StepPart:
    """Part of a step: its mean share of the step, and the factor fitted to measured steps with its standard error."""

    name: str
    share: float
    factor: float
    error: float

    @property
    def is_off(self) -> bool:
        """Whether the factor is outside of 0.9 to 1.1 and more than two standard errors from 1."""
        return abs(self.factor - 1) > max(0.1, 2 * self.error)


def shares(price: Callable[[Mapping[str, float]], Floats], step_s: Floats) -> Floats:
    """Return the share of each of `PARTS` in every step, (n, parts).

    A share is the growth of the step's logarithm per growth of the part's logarithm.

    Args:
        price: returns the steps in seconds, (n,), with some constants at other values, given by their paths.
        step_s: the steps with all constants as they are, (n,).
    """
    moved_s = (price(scaled_values(places, SPAN)) for places in PARTS.values())
    sign = np.array([-1.0 if name in FALLING else 1.0 for name in PARTS])
    return np.asarray(slopes(moved_s, step_s) * sign)


def slopes(moved_s: Iterable[Floats], step_s: Floats) -> Floats:
    """Return the derivative of the logarithm of every step by that of groups of constants, (n, groups).

    Args:
        moved_s: the steps in seconds with the constants of one group times `SPAN`, (n,), for every group.
        step_s: the steps with all constants as they are, (n,).
    """
    return np.asarray(np.stack([np.log(seconds / step_s) for seconds in moved_s], axis=1) / np.log(SPAN))


def parts(rows: Sequence[Row], ratio: Floats, share: Floats) -> list[StepPart]:
    """Fit the factor of each part of a step to the rows, for parts with a mean share of more than 0.2 %."""
    sources = [source_of(row) for row in rows]
    held = share.mean(axis=0) > 0.002
    effects = mixed.estimate_effects(
        -np.log(ratio), share[:, held], sources, mixed.balanced_weights(sources), np.full(int(held.sum()), 0.5)
    )
    names = [name for name, is_open in zip(PARTS, held, strict=True) if is_open]
    return [
        StepPart(name, float(mean), float(np.exp(effect)), float(error))
        for name, mean, effect, error in zip(
            names, share[:, held].mean(axis=0), effects.fixed, effects.error, strict=True
        )
    ]


def parts_table(parts: Sequence[StepPart]) -> str:
    """Return the parts as text."""
    lines = ["part of a step       share  factor  +-"]
    for part in parts:
        mark = "  off" if part.is_off else ""
        lines.append(f"{part.name:20s} {part.share:5.1%} {part.factor:7.2f} {part.error:5.2f}{mark}")
    return "\n".join(lines)


def ratio_of(predicted: Floats, measured: Floats) -> Floats:
    """Return forecast over measured, (n,)."""
    return np.asarray(1.0 + calibration.relative_error(predicted, measured))
