"""The PoolLearning resource: runs measured on one pool, the jobs that reported them, and requests to forget runs.

The operator keeps one PoolLearning for each GPUPool that has had a run. It is separate from the pool's status, so that
readers of pools cannot see who ran a job. Only the operator and administrators may read it. To make the operator forget
runs, delete the object or set its annotation `FORGET`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field

from tilecast.api.base import API_VERSION, GROUP, MAX_GPUS, StatusModel, list_field, optional_field, round_to_six_digits
from tilecast.api.calibration import ObservedRun, RunRecord, run_from_record
from tilecast.api.fields import value_at_path
from tilecast.api.parts import PartSeconds, to_part_fields
from tilecast.spec import SpecError

KIND = "PoolLearning"
FORGET = f"{GROUP}/forget"
"""Annotation with the runs that the operator must forget: `all`, `namespace/NAME` or `job/UID`."""
MAX_KEPT = 1024
"""Most runs of a pool that are kept. They take less than half of the API server's limit on an object."""
MAX_FORGOTTEN = 64


class LearntRun(RunRecord, PartSeconds):
    """A run, with the job and the service account that reported it."""

    gpu: str = Field(min_length=1, max_length=63, description="GPU of the pool.")
    namespace: str = Field(default="", max_length=63, description="Namespace of the job; none is of unknown origin.")
    namespace_uid: str = Field(default="", max_length=64, description="UID of the namespace, where it was known.")
    job: str = Field(default="", max_length=253, description="Name of the job.")
    service_account: str = Field(
        default="",
        max_length=253,
        description="Service account of the newest report; none where no token came with it.",
    )
    source: str = Field(default="", max_length=16, description="Where the newest report came from.")
    gpus: int | None = optional_field("GPUs that it ran on.", ge=1, le=MAX_GPUS)
    plan: str | None = optional_field("How it was split.", max_length=128)

    @classmethod
    def from_run(cls, observed: ObservedRun) -> Self:
        """Return the record of a run, with the job and the service account that reported it."""
        run = observed.run
        names = ("precision", "family", "scale", "workload", "observations", "framework", "gpu", "namespace")
        origin = ("uid", "time", "namespace_uid", "job", "source", "gpus", "plan")
        return cls.from_truncated_values(
            **{name: getattr(run, name) for name in names},
            **{name: getattr(observed, name) for name in origin},
            predicted_seconds=round_to_six_digits(run.predicted_s),
            observed_seconds=round_to_six_digits(run.observed_s),
            service_account=observed.account,
            **to_part_fields(observed.parts),
        )


class ForgottenRuns(StatusModel):
    """Runs that calibration ignores, even if the status of a job still contains them."""

    namespace: str | None = optional_field("Those of this namespace; absent is all.", max_length=63)
    uid: str | None = optional_field("That of this job; absent is all.", max_length=64)
    before: str = Field(max_length=32, description="When it was forgotten; what is reported later counts again.")


class PoolLearningSpec(StatusModel):
    """The measured runs of a pool. Written by the operator only."""

    runs: list[LearntRun] = list_field("Runs, oldest first.", max_length=MAX_KEPT)
    forgotten: list[ForgottenRuns] = list_field("What was forgotten, oldest first.", max_length=MAX_FORGOTTEN)


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """Request to forget runs of a pool: all runs, or the runs of one namespace or one job."""

    namespace: str | None = None
    uid: str | None = None

    @classmethod
    def parse(cls, text: str) -> ForgetRequest:
        """Return the request in the text of the annotation `FORGET`.

        The text `namespace/` without a name selects the runs whose namespace is unknown.

        Raises:
            SpecError: the value is not `all`, `namespace/NAME` or `job/UID`.
        """
        part, slash, name = text.strip().partition("/")
        if part == "all" and not slash:
            return cls()
        if part in ("namespace", "job") and re.fullmatch(r"[A-Za-z0-9.-]{1,253}", name):
            return cls(namespace=name) if part == "namespace" else cls(uid=name)
        if (part, slash, name) == ("namespace", "/", ""):
            return cls(namespace="")
        raise SpecError(FORGET, f"{text[:64]!r} names nothing", "write all, namespace/NAME or job/UID")

    def __str__(self) -> str:
        if self.namespace is None:
            return "all" if self.uid is None else f"job/{self.uid}"
        return f"namespace/{self.namespace}"

    def matches(self, observed: ObservedRun) -> bool:
        """Return whether the request selects a run."""
        return self.namespace in (None, observed.run.namespace) and self.uid in (None, observed.uid)


def read_learnt_runs(pool: str, document: Mapping[str, Any]) -> list[ObservedRun]:
    """Return the valid runs in a PoolLearning, oldest first."""
    parsed = []
    for one in LearntRun.parse_valid_items(value_at_path(document, ("spec", "runs"))):
        run = run_from_record(pool, one.gpu, one, one.namespace)
        origin = (one.job, one.service_account, one.source, one.namespace_uid)
        parsed.append(ObservedRun(one.uid, one.time, run, *origin, one.gpus, one.plan, one.parts))
    return parsed


def read_forget_requests(document: Mapping[str, Any]) -> list[tuple[ForgetRequest, str]]:
    """Return the requests to forget runs that a PoolLearning contains, with the time of each."""
    records = ForgottenRuns.parse_valid_items(value_at_path(document, ("spec", "forgotten")))
    return [(ForgetRequest(one.namespace, one.uid), one.before) for one in records]


def pool_learning_document(
    pool: str, observed: Iterable[ObservedRun], requests: Iterable[tuple[ForgetRequest, str]]
) -> dict[str, Any]:
    """Return the PoolLearning object of a pool, with the newest `MAX_KEPT` runs and `MAX_FORGOTTEN` requests."""
    rows = [LearntRun.from_run(item) for item in observed]
    gone = [
        ForgottenRuns.from_truncated_values(namespace=what.namespace, uid=what.uid, before=before)
        for what, before in requests
    ]
    spec = PoolLearningSpec(runs=rows[-MAX_KEPT:], forgotten=gone[-MAX_FORGOTTEN:])
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": pool}, "spec": spec.document()}
