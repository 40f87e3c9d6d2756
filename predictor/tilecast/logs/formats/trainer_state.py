"""`trainer_state.json` of Transformers, and of TRL, axolotl and LLaMA-Factory, which use its Trainer.

It has only the duration of the whole run. Evaluations are subtracted. Warm-up is part of the mean.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilecast import untrusted
from tilecast.logs.steps import MAX_NUMBER, LoggedRun

NAME = "Transformers"
MAX_BYTES = 64 * 2**20


def recognise(path: Path, head: bytes) -> bool:
    """Return whether a file is a JSON object."""
    return head.lstrip()[:1] == b"{" and path.suffix in (".json", "")


def read(path: Path) -> LoggedRun | None:
    """Return the mean step of a finished run, or None for another file or an unfinished run.

    For a resumed run, only the part since its last start counts.
    """
    try:
        state = untrusted.parse_json(path.read_bytes()[: MAX_BYTES + 1], max_bytes=MAX_BYTES)
    except ValueError:
        return None
    history = state.get("log_history") if isinstance(state, Mapping) else None
    if not isinstance(history, Sequence):
        return None
    entries = [item for item in history if isinstance(item, Mapping)]
    ends = [
        row for row, item in enumerate(entries) if _get_positive_number(item.get("train_runtime")) and _get_step(item)
    ]
    if not ends:
        return None
    last, before = ends[-1], ends[-2] if len(ends) > 1 else -1
    first = _get_step(entries[before]) if before >= 0 else 0
    rows = entries[before + 1 : last]
    evaluated_s = sum(_get_positive_number(item.get("eval_runtime")) for item in rows)
    seconds, steps = (
        _get_positive_number(entries[last]["train_runtime"]) - evaluated_s,
        _get_step(entries[last]) - first,
    )
    return LoggedRun(seconds / steps, steps, NAME) if seconds > 0 and steps > 0 else None


def _get_step(item: Mapping[str, Any]) -> int:
    step = item.get("step")
    return step if isinstance(step, int) and 0 < step < MAX_NUMBER else 0


def _get_positive_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 1e9 else 0.0
