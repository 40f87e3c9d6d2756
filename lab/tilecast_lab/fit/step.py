"""Fit the constants of a training step (`tilecast/constants.toml`) to measured runs.

    python -m tilecast_lab.fit.step --data DIR [--graphs DIR] [-o constants.toml] [--left-out left_out.toml]

All tables share one set of constants, keyed by how kernels are executed, never by source. The logarithm of a forecast
is close to linear in the logarithm of a constant; its slope is the share of the part that the constant scales. So each
round solves

    ln(measured / forecast) = sum over constants of share x ln(factor) + effect of the source + noise

as a mixed model (`tilecast_lab.validate.mixed`). Every constant is drawn to its physical value (`PRIORS`), every source
has an effect of its own, all sources count the same, and outliers count less. Then the round moves the constants by at
most `REACH` and prices again. A constant that few rows contain stays near its physical value.

`--left-out` writes for every source the constants that the model of the last round gives without the rows of that
source. `tilecast validate runs` prices the rows of the source with them, to show the error of forecasts for a source
that was not fitted.
"""

from __future__ import annotations

import argparse
import json
import tomllib
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilecast.constants import Constants
from tilecast.spec import Floats
from tilecast.validate.cells import Row
from tilecast.validate.runs import RunGroup, forecast_group, interpret_plan, read_table
from tilecast_lab.validate import mixed, residuals, runs
from tilecast_lab.validate.constants import scaled_values, with_values
from tilecast_lab.validate.graphs import Graphs

TABLES = ("e2e/*.csv", "second/e2e/*.csv", "third/e2e/*.csv")
"""Patterns of the tables to fit, below the data folder; rows of `timm.csv` need graphs (`tilecast_lab.fit.graphs`)."""
WEIGHTS: Mapping[str, float] = {"vtrain_dev.csv": 0.4, "neusight_dev.csv": 0.3, "timm.csv": 0.4}
"""Weights of the tables with rows of one source only; all others have weight 1."""
_TABLE = "table"
MOST_ROWS = 24
"""Largest number of rows of one source that are fitted, chosen by a hash of their ids."""
MORE_ROWS: Mapping[str, int] = {"timm.csv": 72}
"""Largest number of rows for tables of one source with many families of models."""
OUTLIER = 0.8
"""Error, as a logarithm, beyond which a row is not fitted: it lacks something that no constant can correct."""
REACH = 1.33
"""Largest factor by which a constant moves in a round."""
MOVED = 0.01
"""Least change, as a logarithm, for a constant fitted without a source to be written."""


@dataclass(frozen=True, slots=True)
class Prior:
    """Prior of a constant.

    `places` are its paths in the file, which move together, `value` its physical value, `spread` the standard deviation
    of its logarithm around that value, `low` and `high` its bounds.
    """

    places: tuple[str, ...]
    value: float
    spread: float
    low: float
    high: float


def _both(path: str) -> tuple[str, ...]:
    return (f"{path}.forward", f"{path}.backward")


PRIORS: tuple[Prior, ...] = (
    # Kernels measured alone run at the clocks of short bursts, with their inputs in the caches.
    Prior(("factor.matrix",), 1.04, 0.02, 0.9, 1.25),
    Prior(("factor.attention",), 1.05, 0.05, 0.8, 1.8),
    Prior(("factor.convolution",), 1.08, 0.03, 0.8, 1.5),
    Prior(("implicit.convolution",), 1.15, 0.06, 0.8, 2.0),
    Prior(("attention.flash1.times.any.forward",), 1.3, 0.2, 1.0, 2.5),
    Prior(("attention.flash1.times.any.backward",), 1.3, 0.2, 1.0, 2.5),
    # Frameworks copy and add tensors beside the operators of the model.
    Prior(("memory.eager",), 1.25, 0.04, 0.9, 2.5),
    Prior(("memory.listed",), 1.0, 0.02, 0.9, 1.5),
    Prior(("memory.fused",), 1.02, 0.12, 0.8, 2.5),
    Prior(("memory.graph",), 1.35, 0.12, 0.9, 2.5),
    Prior(("memory.compiled",), 1.2, 0.12, 0.9, 2.5),
    Prior(("memory.cudaGraphs",), 1.2, 0.12, 0.9, 2.5),
    Prior(("memory.xla",), 1.5, 0.12, 0.9, 2.5),
    # Collectives in a step wait for ranks and share their links.
    Prior(("factor.exchange",), 1.0, 0.05, 0.8, 3.0),
    Prior(("factor.gradients",), 1.05, 0.1, 0.7, 3.0),
    Prior(("overlap.slowdown",), 0.35, 0.15, 0.02, 0.8),
    Prior(("overlap.tensor_share",), 0.4, 0.3, 0.05, 0.9),
    Prior(("overlap.pipelined_share",), 0.8, 0.1, 0.4, 0.98),
    Prior(("overlap.expert_share",), 0.3, 0.5, 0.02, 0.9),
    Prior(("scale.jitter",), 0.012, 0.4, 0.002, 0.05),
    Prior(("scale.uneven_jitter",), 0.03, 0.4, 0.002, 0.15),
    # The host launches operators one by one from Python, or from C++ in the other modes.
    Prior(("launch_us.eager.forward",), 50.0, 0.08, 4.0, 120.0),
    Prior(("launch_us.eager.backward",), 60.0, 0.08, 3.0, 120.0),
    Prior(_both("launch_us.graph"), 10.0, 0.5, 1.0, 60.0),
    Prior(_both("launch_us.compiled"), 5.0, 0.5, 1.0, 30.0),
    Prior(_both("launch_us.xla"), 3.0, 0.5, 0.5, 20.0),
    Prior(("collective_us.eager",), 20.0, 0.5, 2.0, 100.0),
    Prior(("step_ms.eager",), 10.0, 0.3, 0.5, 40.0),
    Prior(("step_ms.graph",), 5.0, 0.7, 0.5, 40.0),
    Prior(("step_ms.compiled",), 6.0, 0.7, 0.5, 40.0),
    Prior(("step_ms.xla",), 3.0, 0.7, 0.1, 40.0),
    Prior(("step_ms.cudaGraphs",), 2.0, 0.7, 0.1, 40.0),
    Prior(("gradient_us.eager", "gradient_us.graph"), 100.0, 0.3, 10.0, 400.0),
    Prior(("gradient_us.xla",), 50.0, 0.3, 5.0, 400.0),
    # Measured alone: the fit used to put here what steps take longer for other reasons.
    Prior(("optimizer.efficiency",), 0.8, 0.02, 0.3, 0.95),
)
"""Priors of all fitted constants.

Spreads are narrow where the tables disagree: wide ones lower the error of the second collection by 0.3 points, and
raise those of vTrain, timm and the first collection by 2, 4 and 0.5.
"""

LEFT_OUT_TITLE = """# Constants of a step that are fitted without the rows of a source.
# Written by `python -m tilecast_lab.fit.step --left-out`; read by `tilecast validate runs`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows that are fitted: groups for pricing, and columns over the rows in the order of the groups' members."""

    groups: tuple[RunGroup, ...]
    measured_s: Floats
    source: tuple[str, ...]
    weight: Floats
    """Weight of each row, 1 on average: by table as in `WEIGHTS`, the same for all split groups of a table."""

    @classmethod
    def of(cls, paths: Sequence[Path], graphs: Graphs | None = None) -> Sample:
        """Read the rows of grade A and B, at most `MOST_ROWS` of each source (see `MORE_ROWS`).

        Models come from `graphs` if it has one for a row.
        """
        rows: list[Row] = [{**row, _TABLE: path.name} for path in paths for row in read_table(path)]
        rows = [row for row in rows if row.get("trust") in ("A", "B") and row.get("step_time_s_derived")]
        of_source: dict[str, list[Row]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: zlib.crc32(row["id"].encode())):
            of_source[residuals.source_of(row)].append(row)
        rows = [
            row for members in of_source.values() for row in members[: MORE_ROWS.get(members[0][_TABLE], MOST_ROWS)]
        ]
        groups, _ = runs.prepare(rows, graphs)
        order = [member.index for group in groups for member in group.members]
        measured = np.array([float(rows[index]["step_time_s_derived"]) for index in order])
        tables = np.array([rows[index][_TABLE] for index in order])
        weight = np.zeros(len(order))
        for name in set(tables):
            own = tables == name
            split = [rows[index].get("split_group", "") for index, is_own in zip(order, own, strict=True) if is_own]
            weight[own] = mixed.balanced_weights(split) / own.sum() * WEIGHTS.get(name, 1.0)
        sources = tuple(residuals.source_of(rows[index]) for index in order)
        return cls(tuple(groups), measured, sources, weight / weight.mean())

    def steps(self, tables: Sequence[Constants], processes: int = 1) -> Floats:
        """Return the forecast of every row with each of some tables of constants, in seconds, (tables, n)."""
        if processes == 1:
            return np.concatenate([_group_steps(group, tables) for group in self.groups], axis=1)
        with ProcessPoolExecutor(processes) as pool:
            return np.concatenate(list(pool.map(_group_steps, self.groups, repeat(tables), chunksize=8)), axis=1)


def _group_steps(group: RunGroup, tables: Sequence[Constants]) -> Floats:
    """Return the forecasts of a group's rows with each of some tables of constants, in seconds, (tables, n)."""
    steps = []
    for fitted in tables:
        priced = forecast_group(group, fitted)
        plans = [interpret_plan(group.workload, priced, member) for member in group.members]
        steps.append([plan.interpolate_layers(priced.step_s) for plan in plans])
    return np.array(steps)


@dataclass(frozen=True, slots=True)
class LinearizedModel:
    """Linear model of the forecasts' errors around one set of constants."""

    off: Floats
    """Logarithm of measured over forecast seconds of each row."""
    left: Floats
    """`off` as it would be with every constant at the value of its prior."""
    shares: Floats
    """Slope of the logarithm of each step by that of each constant, (n, constants)."""
    mask: npt.NDArray[np.bool_]
    """Rows that are no outliers."""
    source: tuple[str, ...]
    weight: Floats

    @classmethod
    def at(cls, table: Mapping[str, Any], sample: Sample, processes: int = 1) -> LinearizedModel:
        """Return the model around a table of constants."""
        moved = [with_values(scaled_values(prior.places, residuals.SPAN, table), table) for prior in PRIORS]
        step_s, *moved_s = sample.steps([Constants.from_table(table), *moved], processes)
        shares = residuals.slopes(moved_s, step_s)
        off = np.log(sample.measured_s / step_s)
        already = np.log([_get(table, prior.places[0]) / prior.value for prior in PRIORS])
        return cls(off, off + shares @ already, shares, np.abs(off) < OUTLIER, sample.source, sample.weight)

    def solve(self, without: str = "") -> Floats:
        """Return the constants that fit the rows best, (constants,); `without` names a source to leave out."""
        source = np.array(self.source)
        rows = self.mask & (source != without)
        names = [str(name) for name in source[rows]]
        spread = np.array([prior.spread for prior in PRIORS])
        effects = mixed.estimate_effects(
            self.left[rows], self.shares[rows], names, mixed.balanced_weights(names), spread, ratios=SHRUNKEN
        )
        return np.array([prior.value for prior in PRIORS]) * np.exp(effects.fixed)


SHRUNKEN = (0.3,)
"""Ratio of the variance between sources to the variance within them that the fit assumes.

With a larger one the sources' own effects explain what constants should explain.
"""


def fit(
    table: Mapping[str, Any], sample: Sample, rounds: int = 3, processes: int = 1
) -> tuple[dict[str, Any], LinearizedModel]:
    """Return the table with every constant of `PRIORS` fitted to the rows, and the model around the result."""
    best: dict[str, Any] = deepcopy(dict(table))
    model = LinearizedModel.at(best, sample, processes)
    for turn in range(rounds):
        for prior, value in zip(PRIORS, model.solve(), strict=True):
            for place in prior.places:
                old = _get(best, place)
                _set(best, place, _rounded(np.clip(value, max(prior.low, old / REACH), min(prior.high, old * REACH))))
        model = LinearizedModel.at(best, sample, processes)
        error = float(np.median(np.abs(np.expm1(-model.off))))
        print(f"round {turn + 1}: median error {error:.1%}", flush=True)
    return best, model


def fit_without_each_source(table: Mapping[str, Any], model: LinearizedModel) -> dict[str, dict[str, float]]:
    """Return for every source the paths and values of the constants that change if its rows are left out."""
    every = model.solve()
    values: dict[str, dict[str, float]] = {}
    for name in sorted(set(model.source)):
        moved: dict[str, float] = {}
        for prior, value, usual in zip(PRIORS, model.solve(name), every, strict=True):
            if abs(np.log(value / usual)) >= MOVED:
                for place in prior.places:
                    moved[place] = _rounded(np.clip(_get(table, place) * value / usual, prior.low, prior.high))
        if moved:
            values[name] = moved
    return values


def _rounded(value: float | Floats) -> float:
    return float(f"{float(value):.3g}")


def _get(table: Mapping[str, Any], path: str) -> float:
    value: Any = table
    for key in path.split("."):
        value = value[key]
    return float(value)


def _set(table: dict[str, Any], path: str, value: float) -> None:
    *sections, name = path.split(".")
    for key in sections:
        table = table[key]
    table[name] = value


def rewrite_constants(text: str, table: Mapping[str, Any]) -> str:
    """Return the text of the constants file with the table's values; its comments are kept."""
    here: Any = table
    lines = []
    for line in text.splitlines():
        key, equals, _ = line.partition(" = ")
        if line.startswith("["):
            here = table
            for name in line.strip("[]").split("."):
                here = here[name]
        if equals and not line.startswith("#"):
            line = f"{key} = {_written(here[key])}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _written(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {_written(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | list | bool) else str(value)


def main() -> None:
    """Fit the constants and write the files."""
    parser = argparse.ArgumentParser(prog="python -m tilecast_lab.fit.step", description="Fit the constants of a step.")
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds e2e/ and second/")
    parser.add_argument("--graphs", type=Path, help="graphs of models, as `python -m tilecast_lab graphs` writes them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="processes that price rows at the same time")
    parser.add_argument("--left-out", type=Path, help="write the constants without each source there")
    parser.add_argument("-o", "--output", type=Path, default=Path("constants.toml"))
    options = parser.parse_args()
    paths = [path for pattern in TABLES for path in sorted(options.data.glob(pattern))]
    sample = Sample.of(paths, Graphs(options.graphs) if options.graphs else None)
    text = files("tilecast").joinpath("constants.toml").read_text(encoding="utf-8")
    table, model = fit(tomllib.loads(text), sample, options.rounds, options.processes)
    options.output.write_text(rewrite_constants(text, table), encoding="utf-8")
    if options.left_out:
        lines = [LEFT_OUT_TITLE]
        for name, moved in fit_without_each_source(table, model).items():
            lines += ["", f'["{name}"]', *(f'"{path}" = {value}' for path, value in moved.items())]
        options.left_out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
