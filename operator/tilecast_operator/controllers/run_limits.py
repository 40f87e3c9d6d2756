"""Limits of runs that Kueue enforces, for jobs whose owners ask for one by an annotation.

Other jobs get no limit, because a wrong forecast would end a run. The limit is the owner's factor times the job's
longest run in the queue plan, on any pool where Kueue might admit the job. Kueue takes it from a label of the job,
which can be changed only while the job is suspended. A label that the owner wrote stays as it is.

Kueue counts the time of all admissions of a Workload. A forecast covers only a whole run, so the time that an evicted
job has already run is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tilecast import jobs
from tilecast.api.fields import Document, as_mapping, value_at_path
from tilecast.spec import SpecError

DEFAULT_FACTOR = 2.0
"""Factor of an annotation without a value."""
LEAST_FACTOR, MOST_FACTOR = 1.0, 100.0
MOST_S = 2**31 - 1
"""Longest limit that Kueue reads, in seconds."""
_PAST_S = ("accumulatedPastExecutionTimeSeconds", "accumulatedPastExexcutionTimeSeconds")
"""Fields of a Workload's status with the seconds of its earlier admissions, in v1beta2 and before."""


def read_factor(annotations: Mapping[str, object]) -> float | None:
    """Return the factor by which a job's owner limits its run. Without the annotation, return None.

    Raises:
        SpecError: the annotation is not a number from `LEAST_FACTOR` to `MOST_FACTOR`.
    """
    text = annotations.get(jobs.RUN_LIMIT_FACTOR)
    if text is None:
        return None
    if text == "":
        return DEFAULT_FACTOR
    try:
        factor = float(str(text)[:40])
    except ValueError:
        factor = math.nan
    if not LEAST_FACTOR <= factor <= MOST_FACTOR:
        remedy = f"write a number from {LEAST_FACTOR:g} to {MOST_FACTOR:g}, or nothing for {DEFAULT_FACTOR:g}"
        raise SpecError(f"annotation {jobs.RUN_LIMIT_FACTOR}", f"{str(text)[:40]!r} is no factor", remedy)
    return factor


def find_past_seconds(workloads: Iterable[Document]) -> int:
    """Return the seconds of a job's earlier admissions, which Kueue counts against the limit of its run."""
    found = (as_mapping(workload.get("status")).get(name) for workload in workloads for name in _PAST_S)
    return max((value for value in found if isinstance(value, int)), default=0)


def decide_limit(document: Document, longest_s: float | None, past_s: int = 0) -> dict[str, str | None] | None:
    """Return the label and the annotation of a waiting job's limit, by key. If nothing changes, return None.

    A label or annotation with the value None must be removed.

    Args:
        document: the job, which waits.
        longest_s: seconds of the job's longest run on any pool. None if unknown.
        past_s: seconds that Kueue has already counted against the limit.

    Raises:
        SpecError: the owner's factor is invalid.
    """
    metadata = as_mapping(document.get("metadata"))
    labels, annotations = as_mapping(metadata.get("labels")), as_mapping(metadata.get("annotations"))
    label, ours = labels.get(jobs.RUN_LIMIT_LABEL), annotations.get(jobs.RUN_LIMIT)
    if label != ours:
        return None  # the owner wrote the label, or changed or removed ours
    factor = read_factor(annotations)
    if factor is None:
        wanted = None
    elif longest_s is None or not math.isfinite(longest_s):
        return None
    else:
        wanted = f"{min(max(math.ceil(past_s + longest_s * factor), 1), MOST_S)}"
    return None if wanted == label else {jobs.RUN_LIMIT_LABEL: wanted, jobs.RUN_LIMIT: wanted}


def is_suspended(document: Document) -> bool:
    """Return whether a job of a known kind is suspended, so that Kueue lets its label change."""
    kind = jobs.JOB_KINDS.get(str(document.get("kind")))
    return kind is not None and value_at_path(document, kind.suspend) is True
