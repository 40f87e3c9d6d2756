"""The kinds of jobs that can be advised: the one table that the API, the CLI and the operator take them from.

To add a kind, write its module in `tilecast/jobs/` and its line in `JOB_APIS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field

from tilecast.api.base import OBJECT_NAME, ApiModel, ValidationRule


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

if TYPE_CHECKING:
    KindName: TypeAlias = str
else:
    KindName = Literal[tuple(JOB_APIS)]

_VERSIONS = json.dumps({kind: api.version for kind, api in JOB_APIS.items()}).replace('"', "'")


class TargetRef(ApiModel):
    """A job of another kind in the same namespace."""

    api_version: str = Field(min_length=1, max_length=63, description="API version of the kind, for instance batch/v1.")
    kind: KindName = Field(description="Kind of the job.")
    name: str = Field(min_length=1, max_length=253, pattern=OBJECT_NAME, description="Name of the job.")

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            f"{_VERSIONS}[self.kind] == self.apiVersion",
            lambda m: JOB_APIS[m.kind].version == m.api_version,
            "apiVersion is not that of kind",
            f"write one of {', '.join(f'{api.version} {kind}' for kind, api in JOB_APIS.items())}",
        ),
    )
