"""The kinds of jobs that can be advised: the one table that the API, the CLI and the operator take them from.

To add a kind, write its module in `tilecast/jobs/` and its line in `JOB_APIS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class JobApi(NamedTuple):
    """The API of a kind of job."""

    version: str
    """Group and version, or the version alone in the core group."""
    module: str
    """The module whose `KIND` reads and changes such jobs (`tilecast.jobs.interface.JobKind`)."""


JOB_APIS: Mapping[str, JobApi] = {
    "TrainJob": JobApi("trainer.kubeflow.org/v1alpha1", "tilecast.jobs.train_job"),
    "PyTorchJob": JobApi("kubeflow.org/v1", "tilecast.jobs.pytorch_job"),
    "JobSet": JobApi("jobset.x-k8s.io/v1alpha2", "tilecast.jobs.job_set"),
    "Job": JobApi("batch/v1", "tilecast.jobs.batch_job"),
}
"""Every kind of job, in the order in which messages name them."""


def listed() -> str:
    """The kinds as a sentence names them: "A, B or C"."""
    *others, last = JOB_APIS
    return f"{', '.join(others)} or {last}"
