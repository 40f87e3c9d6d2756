"""Fields of a job that advice changes."""

from __future__ import annotations

from tilecast.api.fields import Document, FieldChange, value_at_path
from tilecast.jobs.interface import Job, Placement
from tilecast.jobs.quantities import count_or_default, format_like


def compute_changes(
    document: Document, job: Job, placement: Placement, *, runtime_patches: bool = True
) -> list[FieldChange]:
    """Return the field changes that put a job on the nodes of a placement, without fields that have the value already.

    Labels that choose nodes are replaced, and every other label of a selector is kept. Tolerations are added.

    Args:
        document: the job's document.
        job: the job that `read_job` returned for the document.
        placement: nodes, pods and GPUs per pod to write.
        runtime_patches: whether the API of a TrainJob has `runtimePatches` (Trainer 2.2 and later) rather than
            `podTemplateOverrides`.
    """
    changed = list[FieldChange]()
    if placement.pods is not None:
        changed += job.kind.resize(document, placement.pods)
    if placement.gpus_per_pod is not None and placement.gpus_per_pod != job.gpus_per_pod:
        changed += job.kind.set_gpus(document, job, placement.gpus_per_pod)
        changed += _set_processes(document, job, placement.gpus_per_pod)
    changed += job.kind.place(document, job, placement, runtime_patches=runtime_patches)
    return [change for change in changed if value_at_path(document, change.path) != change.value]


def _set_processes(document: Document, job: Job, gpus: int) -> list[FieldChange]:
    """Return the change that sets one process per GPU, if the job states how many processes a pod has."""
    path = job.kind.processes
    given = None if path is None else value_at_path(document, path)
    return [FieldChange(path, format_like(given, gpus))] if path is not None and count_or_default(given, 0) else []
