"""Read memory, activity and power of a job's GPUs. DCGM measures them, and Prometheus stores them.

The metrics are those of dcgm-exporter. One query asks for all values. It finds a job's pods by the pattern of their
names, so it needs no permission to read pods.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Template
from typing import Any

from tilecast.api.base import round_to_six_digits
from tilecast.jobs import Job
from tilecast.jobs.interface import make_name_pattern

WINDOW_S = 600
"""Longest time over which a query aggregates values, in seconds."""
END_S = 60
"""Seconds after a job's creation in which metrics may still show pods of an earlier job with the same name."""
MIB = 1 << 20
MAX_MIB = 1 << 24
MAX_W = 10_000.0
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
QUERIES: Mapping[str, str] = {
    "memory": "max(max_over_time(DCGM_FI_DEV_FB_USED{%s}[%s]))",
    "tensor": "avg(avg_over_time(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{%s}[%s]))",
    "power": "avg(avg_over_time(DCGM_FI_DEV_POWER_USAGE{%s}[%s]))",
}
"""Query for each value: MiB of the GPU that uses most memory, share of active cycles, and watts per GPU."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Memory, activity and power of a job's GPUs at one time."""

    memory_bytes: int | None
    tensor_ratio: float | None
    power_w: float | None
    time: str
    job_uid: str
    """UID of the job."""


def find_window_s(created_s: float | None, now_s: float) -> int | None:
    """Return the seconds over which a query may aggregate values, or None if the job was created just now.

    The seconds exclude values of an earlier job with the same name, whose pods had the same names.

    Args:
        created_s: Unix time of the job's creation. None if it is unknown.
        now_s: Unix time of the query.
    """
    if created_s is None:
        return None
    window_s = min(WINDOW_S, int(now_s - created_s) - END_S)
    return window_s if window_s > 0 else None


def make_query(selector: str, job: Job, window_s: int = WINDOW_S) -> str | None:
    """Return the query for the GPUs of a job's pods, or None if the pattern of its pods' names is unknown.

    Args:
        selector: labels that select the metrics, with `$namespace` and `$pods`.
        job: the job.
        window_s: seconds over which the query aggregates values, from `find_window_s`.
    """
    pattern, groups = job.pod_names, list[str]()
    if has_groups := "$groups" in pattern:
        groups = [item.name for item in job.pods if item.gpus] or [item.name for item in job.pods]
    names = [job.name, *groups]
    is_known = bool(groups) if has_groups else bool(pattern)
    if not selector or not is_known or not all(map(_NAME.fullmatch, (job.namespace, *names))):
        return None
    # A dot in a name is a character of its own; a backslash would have to be escaped twice.
    literal = [make_name_pattern(name) for name in names]
    pods = Template(pattern).substitute(name=literal[0], groups="|".join(literal[1:]))
    labels = Template(selector).safe_substitute(namespace=job.namespace, pods=pods)
    parts = (
        f'label_replace({text % (labels, f"{window_s}s")}, "value", "{name}", "", "")' for name, text in QUERIES.items()
    )
    return " or ".join(parts)


def parse_use(outcome: Any, time: str, job_uid: str) -> DeviceUse | None:
    """Return the values in the response to a query, or None if it has no plausible values.

    Args:
        outcome: the response.
        time: time of the response (RFC 3339).
        job_uid: UID of the job.
    """
    try:
        found = {str(item["metric"]["value"]): float(item["value"][1]) for item in outcome["data"]["result"]}
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    memory = _get_if_sound(found, "memory", lambda value: 0 < value <= MAX_MIB)
    tensor = _get_if_sound(found, "tensor", lambda value: 0 <= value <= 1)
    power = _get_if_sound(found, "power", lambda value: 0 < value <= MAX_W)
    if memory is None and tensor is None and power is None:
        return None
    return DeviceUse(
        None if memory is None else round(memory * MIB),
        None if tensor is None else round(tensor, 4),
        None if power is None else round_to_six_digits(power),
        time,
        job_uid,
    )


def _get_if_sound(found: Mapping[str, float], name: str, is_sound: Callable[[float], bool]) -> float | None:
    value = found.get(name, math.nan)
    return value if is_sound(value) else None
