"""Count the launch configurations of a package that are read whole, and why the others are refused.

    pip download --no-deps torchtune
    python bench/recipes.py torchtune-0.6.1-py3-none-any.whl
    python bench/recipes.py ~/axolotl/examples --gpus 8 --rows rows.csv

Each argument is a folder, a wheel or a source archive. Archives are unpacked into a temporary folder. Nothing of them
is run. Counted are configurations that a launcher's keys or names give away, one by one for each function of a Python
file. Read whole means model, batch, precision and plan, with no option unpriced. A model that is named on the Hugging
Face Hub and is no preset counts as read, in a column of its own.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "predictor")]

from tilecast import readers  # noqa: E402
from tilecast.inputs import hub  # noqa: E402
from tilecast.readers import sources  # noqa: E402
from tilecast.spec import SpecError  # noqa: E402

MAX_GPUS = 4096
"""Most GPUs that are tried where a configuration says no number and its degrees do not divide fewer."""
PARTS = ("accelerate", "deepspeed")
"""Launchers whose files lie beside others, and are counted apart if they say no batch."""
ENDINGS = (*sources.SHELL, ".yaml", ".yml", ".json", ".toml", ".py")


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration, and whether it was read."""

    launcher: str
    name: str
    outcome: str
    """read, read with a model of the Hub, or refused."""
    detail: str
    """What was read, or why it was refused."""


def unpack(path: Path, folder: Path) -> Path:
    """Return the folder of a package. Archives are unpacked there, with names outside of it left out."""
    if path.is_dir():
        return path
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(ENDINGS)])  # noqa: S202
    else:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
    return folder


def find_configurations(root: Path) -> Iterator[tuple[str, str]]:
    """Yield launcher and name of each configuration of a folder."""
    for path in sorted(root.rglob("*")):
        if path.suffix not in ENDINGS or not path.is_file():
            continue
        try:
            yield from ((table, name) for table, name in sources.list_configurations(str(path)))
        except SpecError:
            continue


def read_row(launcher: str, name: str, root: Path, gpus: int | None) -> Row:
    """Return what is read of one configuration. `gpus` is used where the configuration does not say a number."""
    shown = str(Path(name).relative_to(root))
    try:
        reading = readers.read_file(name, gpus=gpus)
        readers.require_priced(reading, "")
    except SpecError as error:
        if gpus is not None and re.search(r" is not \d+ GPUs$", error.problem):
            # Its degrees say how many.
            return read_row(launcher, name, root, None)
        is_small = "do not divide" in error.problem or "is no multiple of" in error.problem
        if is_small and gpus is not None and gpus < MAX_GPUS:
            return read_row(launcher, name, root, 2 * gpus)
        if is_small and gpus == MAX_GPUS:
            # Its batch is that of one GPU.
            return read_row(launcher, name, root, 1)
        if launcher in PARTS and "is missing" in error.problem:
            return Row(launcher, shown, "part", "names no model and no batch: a part of another launch")
        return Row(launcher, shown, "refused", f"{error.field.replace(str(root), '')}: {error.problem}")
    training = reading.training
    detail = f"{reading.model_name}, {training.get('precision')}, batch {training.get('globalBatchSize')}, "
    detail += f"length {training.get('sequenceLength')}, {reading.plan_text()}"
    if reading.unknown:
        detail += f" (not known: {' '.join(reading.unknown)})"
    if reading.model is not None or readers.find_preset_in_name(reading.model_name) is not None:
        return Row(launcher, shown, "read", detail)
    if hub.is_hub_name(reading.model_name):
        return Row(launcher, shown, "hub", detail)
    return Row(launcher, shown, "refused", f"model {reading.model_name[:40]!r} is not known")


def cache_resolved_paths() -> None:
    """Resolve each path once. A configuration in Python looks for hundreds of files, and nothing moves meanwhile."""
    Path.resolve = cache(Path.resolve)  # type: ignore[method-assign,assignment]


def main() -> int:
    """Print the counts."""
    cache_resolved_paths()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("package", nargs="+", type=Path, help="a folder, a wheel or a source archive")
    parser.add_argument("--gpus", type=int, default=8, help="least GPUs of configurations that name none (8)")
    parser.add_argument("--rows", type=Path, help="write a line for each configuration into this CSV file")
    parser.add_argument("--reasons", type=int, default=8, help="most frequent reasons that are printed (8)")
    options = parser.parse_args()
    rows: list[Row] = []
    for package in options.package:
        with tempfile.TemporaryDirectory() as name:
            root = unpack(package, Path(name))
            rows += [read_row(table, path, root, options.gpus) for table, path in find_configurations(root)]
    for launcher in sorted({row.launcher for row in rows}):
        own = [row for row in rows if row.launcher == launcher and row.outcome != "part"]
        parts = [row for row in rows if row.launcher == launcher and row.outcome == "part"]
        if parts:
            print(f"{launcher}: {len(parts)} files that are part of another launch")
        if not own:
            continue
        counts = Counter(row.outcome for row in own)
        read = counts["read"] + counts["hub"]
        print(f"{launcher}: {read} of {len(own)} ({read / len(own):.0%}), {counts['hub']} with a model of the Hub")
        reasons = Counter(re.sub(r"\d+|'[^']*'", "…", row.detail) for row in own if row.outcome == "refused")
        for reason, count in reasons.most_common(options.reasons):
            print(f"    {count:4d}  {reason[:160]}")
    if options.rows:
        with options.rows.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["launcher", "name", "outcome", "detail"])
            writer.writerows((row.launcher, row.name, row.outcome, row.detail) for row in rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
