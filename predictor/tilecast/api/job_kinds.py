"""API versions of the supported kinds of jobs, for schemas and error messages.

`make crds` writes `JOB_APIS` from the kinds in `tilecast.jobs.kinds`, which imports this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

JOB_APIS: Mapping[str, str] = {
    # kinds: apis
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "PyTorchJob": "kubeflow.org/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "Job": "batch/v1",
    # end of kinds
}
"""API version of every kind of job, in the order in which messages list them."""


def list_job_kinds() -> str:
    """Return the supported kinds of jobs as a phrase: "A, B or C"."""
    *others, last = JOB_APIS
    return f"{', '.join(others)} or {last}"


def list_kinds_in_plural(kinds: Iterable[str] = JOB_APIS) -> str:
    """Return kinds of jobs as a phrase in the plural: "As, Bs and Cs"."""
    *others, last = (f"{kind}s" for kind in kinds)
    return f"{', '.join(others)} and {last}"
