"""Compute the changes of a job's fields that move the job to the advised nodes."""

from __future__ import annotations

from tilecast.api.fields import Document, FieldChange, value_at_path
from tilecast.jobs.interface import Job, Placement
from tilecast.jobs.quantities import count_or_default, format_quantity_like


def compute_changes(
    document: Document, job: Job, placement: Placement, *, has_runtime_patches: bool = True
) -> list[FieldChange]:
    """Return the field changes that move a job to the nodes of a placement.

    In node selectors, only labels that describe kinds of GPU nodes are replaced. Tolerations are added to the present
    ones. A field that already has the new value is not changed.

    Args:
        document: the job's document.
        job: the job that `read_job` returned for the document.
        placement: the node selector, tolerations, pod count and GPUs per pod to write.
        has_runtime_patches: whether the API of a TrainJob has `runtimePatches` (Trainer 2.2 and later) rather than
            `podTemplateOverrides`.
    """
    changed = list[FieldChange]()
    if placement.pods is not None:
        changed += job.kind.list_resize_changes(document, placement.pods)
    if placement.gpus_per_pod is not None and placement.gpus_per_pod != job.gpus_per_pod:
        changed += job.kind.list_gpu_changes(document, job, placement.gpus_per_pod)
        changed += _change_process_count(document, job, placement.gpus_per_pod)
    changed += job.kind.list_placement_changes(document, job, placement, has_runtime_patches=has_runtime_patches)
    return [change for change in changed if value_at_path(document, change.path) != change.value]


def _change_process_count(document: Document, job: Job, gpus: int) -> list[FieldChange]:
    """Return the change that sets one process per GPU. If the job sets no process count, return an empty list."""
    path = job.kind.processes
    given = None if path is None else value_at_path(document, path)
    return (
        [FieldChange(path, format_quantity_like(given, gpus))]
        if path is not None and count_or_default(given, 0)
        else []
    )
