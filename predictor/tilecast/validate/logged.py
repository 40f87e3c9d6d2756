"""Fill rows of runs tables from the logs that they name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tilecast.logs import read_log
from tilecast.spec import SpecError
from tilecast.validate.cells import Row

STEP = "step_time_s_derived"
_PLAN: Mapping[str, str] = {
    "dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "zero_stage": "zero_stage",
    "micro_batch_per_gpu": "micro_batch",
}  # fmt: skip
"""Column of a runs table for each column of a plan."""


def fill_from_log(row: Row, folder: Path) -> Row:
    """Return a row with its step read from the log that it names as `@train.log`, relative to a folder.

    A row that names no log is returned unchanged. Empty cells for GPU, GPUs and plan are filled from the log. The log's
    plan is used only if the row states no column of the plan.

    Raises:
        SpecError: the log is outside the folder or cannot be read, or it contradicts the row's number of GPUs.
    """
    name = row.get(STEP, "").strip()
    if not name.startswith("@"):
        return row
    try:
        path, root = (folder / name[1:]).resolve(), folder.resolve()
    except (OSError, ValueError, RuntimeError):
        raise SpecError(name[:80], "is no path", "name a log") from None
    if not path.is_relative_to(root):
        raise SpecError(name[:80], "is outside the folder of the table", "put the log beside the table")
    log = read_log(str(path))
    filled = {**row, STEP: repr(log.seconds)}
    if log.gpus is not None and (row.get("n_gpus", "") or log.gpus) not in (log.gpus, str(log.gpus)):
        problem = f"ran on {log.gpus} GPUs, and its row says {row['n_gpus']}"
        raise SpecError(name[:80], problem, "correct the row")
    known: dict[str, object] = {"gpu": log.gpu, "n_gpus": log.gpus}
    if log.plan is not None and not any(row.get(column) for column in _PLAN):
        known |= {column: getattr(log.plan, field) for column, field in _PLAN.items()}
        if log.gpus is not None and log.plan.data is None:
            known["dp"] = log.gpus // (log.plan.tensor * log.plan.pipeline * log.plan.context)
    for column, value in known.items():
        if value is not None and not filled.get(column):
            filled[column] = str(value)
    return filled
