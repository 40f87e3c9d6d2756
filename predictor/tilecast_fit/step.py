"""Fit the constants of a training step (`tilecast/constants.toml`) to measured runs.

    python -m tilecast_fit.step --data DIR [-o constants.toml]
    python -m tilecast_fit.step --data DIR --left-out [-o left_out.toml]

All tables share one set of constants, keyed by execution mode alone. Of a table of plans (vTrain's) a tenth of
the rows takes part, chosen by a rule on the row's id; groups of rows weigh equally, however many rows they
have, and so do tables. The loss is the mean absolute relative error, minimised one constant
at a time on a geometric grid that narrows, within bounds that physics and the frameworks' documentation suggest.

With `--left-out` every source is left out once: each constant moves, by itself, to where the loss of the other sources'
rows is least. `tilecast validate runs` prices a source's rows with these to show what the fit owes to the rows it saw.
"""

from __future__ import annotations

import argparse
import tomllib
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilecast.spec import Floats
from tilecast.step import Constants
from tilecast.validate import runs
from tilecast.validate.runs import Group

BOUNDS: Mapping[tuple[str, ...], tuple[float, float]] = {
    ("alignment", "irregular"): (1.0, 1.8),
    ("overlap", "expert_share"): (0.05, 0.9),
    ("launch_us", "eager", "forward"): (4.0, 80.0),
    ("launch_us", "eager", "backward"): (3.0, 70.0),
    ("launch_us", "compiled", "forward"): (1.0, 20.0),
    ("launch_us", "compiled", "backward"): (1.0, 15.0),
    ("launch_us", "xla", "forward"): (0.5, 8.0),
    ("launch_us", "xla", "backward"): (0.5, 8.0),
    ("collective_us", "eager"): (5.0, 80.0),
    ("step_ms", "eager"): (0.5, 20.0),
    ("step_ms", "compiled"): (0.5, 20.0),
    ("step_ms", "xla"): (0.1, 10.0),
    ("overlap", "hidden_share"): (0.3, 1.0),
    ("overlap", "slowdown"): (0.02, 0.6),
    ("overlap", "tensor_share"): (0.05, 0.8),
    ("scale", "jitter"): (0.002, 0.04),
    ("compute_efficiency", "eager"): (0.75, 1.12),
    ("compute_efficiency", "compiled"): (0.75, 1.12),
    ("compute_efficiency", "xla"): (0.6, 1.12),
    ("optimizer", "efficiency"): (0.3, 0.95),
}
"""Each fitted constant by its path in the file, and its bounds. Kernels in a step may run a little faster than the
same kernel repeated alone, which heats the card to its power limit."""

GAIN = 1e-3
"""Least gain in the loss for which a constant moves: less is within the tables' own noise."""
STEPS_ASIDE = np.array([0.5, 0.65, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0])
"""Where a constant may move to when a source is left out, relative to its fitted value."""
SAMPLED = {"vtrain_dev.csv": 10}
"""Tables of which only one row in so many takes part."""


LEFT_OUT_TITLE = """# Constants of a step that move when the rows of a source are left out of the fit, each by itself.
# Written by `python -m tilecast_fit.step --left-out`; read by `tilecast validate runs`."""


@dataclass(frozen=True, slots=True)
class Target:
    """One group of rows with what was measured, and each row's weight in the loss."""

    group: Group
    measured_s: Mapping[int, float]
    weight: Mapping[int, float]
    source: Mapping[int, str]


def targets(paths: Sequence[Path]) -> list[Target]:
    """The rows of grade A and B that take part, grouped for pricing. Tables weigh equally, and in each the split
    groups do."""
    return [target for path in paths for target in _targets_of(path)]


def _targets_of(path: Path) -> list[Target]:
    every = SAMPLED.get(path.name, 1)
    rows = [row for row in runs.read_table(path) if zlib.crc32(row["id"].encode()) % every == 0]
    rows = [row for row in rows if row.get("trust") in ("A", "B") and row.get("step_time_s_derived")]
    groups, refused = runs.prepare(rows)
    members: dict[str, int] = defaultdict(int)
    for index, row in enumerate(rows):
        if index not in refused:
            members[row.get("split_group", "")] += 1
    found = []
    for group in groups:
        indexes = [member.index for member in group.members]
        measured = {index: float(rows[index]["step_time_s_derived"]) for index in indexes}
        weight = {index: 1.0 / members[rows[index].get("split_group", "")] / len(members) for index in indexes}
        found.append(Target(group, measured, weight, {index: rows[index].get("source", "") for index in indexes}))
    return found


def loss(table: Mapping[str, Any], found: Sequence[Target]) -> float:
    """Weighted mean absolute relative error."""
    return float(np.average(_errors(table, found), weights=_column(found, lambda t, i: t.weight[i])))


def _errors(table: Mapping[str, Any], found: Sequence[Target]) -> Floats:
    """Absolute relative error of every row, in the order of `_column`."""
    fitted = Constants.of(table)
    errors = []
    for target in found:
        priced = runs.price(target.group, fitted)
        for member in target.group.members:
            predicted = priced.step_s[runs.chosen(priced, member)]
            errors.append(abs(predicted / target.measured_s[member.index] - 1.0))
    return np.array(errors)


def _column(found: Sequence[Target], value: Callable[[Target, int], Any]) -> npt.NDArray[Any]:
    return np.array([value(target, member.index) for target in found for member in target.group.members])


def left_out(table: Mapping[str, Any], found: Sequence[Target]) -> dict[str, dict[str, float]]:
    """For every source the constants that move when its rows are left out of the fit: path and value."""
    weight, source = _column(found, lambda t, i: t.weight[i]), _column(found, lambda t, i: t.source[i])
    moved: dict[str, dict[str, float]] = {name: {} for name in sorted(set(source))}
    fitted = _errors(table, found)
    for path, (low, high) in BOUNDS.items():
        value = _get(table, path)
        values = sorted({float(f"{v:.3g}") for v in np.clip(value * STEPS_ASIDE, low, high)} - {value})
        trials = {value: fitted}
        for candidate in values:
            tried = deepcopy(dict(table))
            _set(tried, path, candidate)
            trials[candidate] = _errors(tried, found)
        for name, own in moved.items():
            others = source != name
            means = {v: float(np.average(e[others], weights=weight[others])) for v, e in trials.items()}
            best = min(means, key=lambda v: means[v])
            if means[best] < means[value] - GAIN:
                own[".".join(path)] = best
        print(f"{'.'.join(path):28s} {value:8.3g}", flush=True)
    return {name: own for name, own in moved.items() if own}


def fit(table: Mapping[str, Any], found: Sequence[Target], rounds: int = 3) -> dict[str, Any]:
    """The table with every bounded constant moved to where the loss is least, one after the other."""
    best: dict[str, Any] = deepcopy(dict(table))
    least = loss(best, found)
    for turn in range(rounds):
        for path, (low, high) in BOUNDS.items():
            value = _get(best, path)
            reach = (high / low) ** (0.5 ** (turn + 1))
            for candidate in np.clip(value * np.geomspace(1 / reach, reach, 9), low, high):
                tried = deepcopy(best)
                _set(tried, path, float(f"{candidate:.3g}"))
                if (reached := loss(tried, found)) < least - GAIN:
                    best, least = tried, reached
            print(f"round {turn + 1}  {'.'.join(path):28s} {_get(best, path):8.3g}  loss {least:.4f}", flush=True)
    return best


def _get(table: Mapping[str, Any], path: tuple[str, ...]) -> float:
    value: Any = table
    for key in path:
        value = value[key]
    return float(value)


def _set(table: dict[str, Any], path: tuple[str, ...], value: float) -> None:
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value


def rewritten(text: str, table: Mapping[str, Any]) -> str:
    """The constants file with the table's values and the file's own comments."""
    section = ""
    lines = []
    for line in text.splitlines():
        key, equals, _ = line.partition(" = ")
        if line.startswith("["):
            section = line.strip("[]")
        if equals and not line.startswith("#"):
            value = table[section][key]
            inner = ", ".join(f"{k} = {v}" for k, v in value.items()) if isinstance(value, dict) else ""
            line = f"{key} = {{ {inner} }}" if inner else f"{key} = {value}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit and write the file."""
    parser = argparse.ArgumentParser(prog="python -m tilecast_fit.step", description="Fit the constants of a step.")
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds e2e/")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--left-out", action="store_true", help="write what moves when each source is left out")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    found = targets(sorted((options.data / "e2e").glob("*.csv")))
    text = files("tilecast").joinpath("constants.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    if options.left_out:
        lines = [LEFT_OUT_TITLE]
        for name, moved in left_out(table, found).items():
            lines += ["", f'["{name}"]', *(f'"{path}" = {value}' for path, value in moved.items())]
        output, written = options.output or Path("left_out.toml"), "\n".join(lines) + "\n"
    else:
        output, written = options.output or Path("constants.toml"), rewritten(text, fit(table, found, options.rounds))
    output.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
