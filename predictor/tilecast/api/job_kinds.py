"""Kinds of jobs that can be advised, in one table for the API, the CLI and the operator.

To add a kind, write its module in `tilecast/jobs/` and add a line to `JOB_APIS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class JobApi(NamedTuple):
    """API of a kind of job."""

    version: str
    """Group and version; in the core group, the version alone."""
    module: str
    """Module whose `KIND` reads and changes such jobs (`tilecast.jobs.interface.JobKind`)."""


JOB_APIS: Mapping[str, JobApi] = {
    "TrainJob": JobApi("trainer.kubeflow.org/v1alpha1", "tilecast.jobs.train_job"),
    "PyTorchJob": JobApi("kubeflow.org/v1", "tilecast.jobs.pytorch_job"),
    "JobSet": JobApi("jobset.x-k8s.io/v1alpha2", "tilecast.jobs.job_set"),
    "Job": JobApi("batch/v1", "tilecast.jobs.batch_job"),
}
"""Every kind of job, in the order in which messages name them."""


def listed() -> str:
    """Return the kinds as a list for a sentence: "A, B or C"."""
    *others, last = JOB_APIS
    return f"{', '.join(others)} or {last}"
