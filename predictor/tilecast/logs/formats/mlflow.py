"""Runs in MLflow's file store, `mlruns/EXPERIMENT/RUN`: one file for each metric and each parameter."""

from collections import defaultdict
from itertools import islice
from pathlib import Path

from tilecast.logs.arguments import ARGUMENTS, RunFacts
from tilecast.logs.metrics import MetricRow, find_metric_run
from tilecast.logs.steps import MAX_STEPS, LoggedRun
from tilecast.logs.text import iterate_lines

NAME = "MLflow"
PATTERN = "meta.yaml"
MAX_METRICS = 256
"""Most metrics of a run that are read."""
MAX_POINTS = MAX_STEPS
"""Most points of a run that are read, with the same number for each metric."""


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run of the file store."""
    return (folder / "metrics").is_dir() and (folder / PATTERN).is_file()


def read(folder: Path) -> LoggedRun | None:
    """Return the run in a folder, or None if there are too few steps."""
    points: dict[tuple[float, int], dict[str, float]] = defaultdict(dict)
    root = folder / "metrics"
    found = (item for item in sorted(root.rglob("*")) if item.is_file() and not item.is_symlink())
    names = {file.relative_to(root).as_posix(): file for file in islice(found, MAX_METRICS)}
    files = {name: file for name, file in names.items() if not name.startswith("system/")}
    for name, file in files.items():
        for line in islice(iterate_lines(file), MAX_POINTS // len(files)):
            try:
                stamp, value, step = line.split()[:3]
                points[int(stamp) / 1e3, int(step)][name] = float(value)
            except (ValueError, OverflowError):
                continue
    rows = [MetricRow(step, time, values) for (time, step), values in sorted(points.items())[:MAX_STEPS]]
    facts = RunFacts()
    for argument in ARGUMENTS:
        file = folder / "params" / argument
        if file.is_file() and not file.is_symlink():
            facts.add_argument(argument, next(iter(iterate_lines(file)), ""))
    run = find_metric_run(rows, NAME)
    return run and LoggedRun(run.seconds, run.steps, NAME, facts.gpus, facts.gpu, facts.plan)
