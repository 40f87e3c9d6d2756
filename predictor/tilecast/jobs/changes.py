"""The fields of a job that an advice changes."""

from __future__ import annotations

from tilecast.api.fields import Document, FieldChange, value_at
from tilecast.jobs.interface import Job, Placement
from tilecast.jobs.quantities import like, whole_count


def changes(document: Document, job: Job, placement: Placement, *, runtime_patches: bool = True) -> list[FieldChange]:
    """The fields that put a job where the placement says, each with its whole new value; only those that differ.

    Labels that choose nodes are replaced, every other label of a selector is kept; tolerations are added.

    Args:
        document: the job.
        job: what `read` made of it.
        placement: where it shall run.
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
    return [change for change in changed if value_at(document, change.path) != change.value]


def _set_processes(document: Document, job: Job, gpus: int) -> list[FieldChange]:
    """One process for each GPU, where the job says how many a pod has."""
    path = job.kind.processes
    given = None if path is None else value_at(document, path)
    return [FieldChange(path, like(given, gpus))] if path is not None and whole_count(given, 0) else []
