"""Sources of measured steps, and the rules for which reports count.

Each of `SOURCES` gives a `StepReport`: a training pod by HTTP, an annotation, Prometheus, a log, or the metrics or the
progress in a TrainJob's status. A report counts if it could be a step of the running plan. It then becomes part of a
`StepWindow`. The job's status stores the newest reports of the window, so that a restart loses none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from tilecast import untrusted
from tilecast.advice.measured import ROUNDING
from tilecast.api.base import MAX_GPUS, round_to_six_digits, validate_model
from tilecast.api.parts import PartSeconds, to_part_fields
from tilecast.api.status import ErrorRatio, FrozenForecast, ObservedStep, StepSeconds
from tilecast.api.training_job import BaselinePlan
from tilecast.learning import calibration
from tilecast.learning.job_calibration import NO_PARTS, MeasuredParts
from tilecast.spec import PartialPlan, SpecError

AUDIENCE = "tilecast"
"""Audience of the tokens with which pods report."""
NODE_CLAIM = "authentication.kubernetes.io/node-name"
"""Claim in a TokenReview with the node of the pod to which a token is bound (Kubernetes 1.30)."""
RECENT = 32
"""Number of newest reports over which the median is taken."""
GROUP = 5
"""Number of parts in the key of a forecast's group."""
MAX_PLAUSIBLE_RATIO = 100.0
"""Largest ratio of step and forecast, either way. Beyond it, the step is in another unit or of another job."""
MAX_BODY_BYTES = 16384
PARTS_RECENT = 8
"""Number of reports in the running mean of a step's parts."""
TRAINER_METRICS = ("step_time_seconds", "step_seconds", "train_step_time_seconds")
"""Names under which a TrainJob's trainer may publish its step."""


LOG = "podLog"
"""Source of steps that a pod has logged. Every other source takes precedence over it."""
SOURCE_WEIGHTS: Mapping[str, float] = {
    "put": 1.0,
    "annotation": 1.0,
    "prometheus": 1.0,
    "trainJob": 1.0,
    "trainJobProgress": 0.5,
    LOG: 0.5,
}
"""Number of observations that a report of each source counts for when runs correct the forecasts of others.

Progress counts less, because it includes evaluations and checkpoints. So does a log, because two reports may share
steps.
"""
SOURCES = tuple(SOURCE_WEIGHTS)
OUTCOMES = (
    "accepted", "invalid", "implausible", "no_advice", "unknown_job", "unknown_pool", "unauthenticated", "forbidden",
    "unavailable", "limited",
)  # fmt: skip


class RefusedReport(Exception):  # noqa: N818  (an answer, not a failure)
    """Error that a report of a measured step is refused.

    Attributes:
        outcome: one of `OUTCOMES`.
        status: HTTP status of the response.
        retry_after_s: seconds after which the client may report again, or None.
    """

    def __init__(self, outcome: str, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class StepReport:
    """One measured step in seconds, and what its source says about the run."""

    seconds: float
    source: str
    steps: int | None = None
    peak_memory_bytes: int | None = None
    gpu: str | None = None
    gpus: int | None = None
    node: str | None = None
    driver: str | None = None
    plan: PartialPlan | None = None
    annotation: str | None = None
    parts: MeasuredParts = NO_PARTS
    """Parts of the step."""
    account: str | None = None
    """Service account of the pod, if a token proves it."""
    rounding_ratio: float | None = None
    """Share by which rounding may have changed the step, or None if it is negligible."""


class _ReportBody(PartSeconds):
    """JSON body of a report, which `tilecast_observe` sends from a training pod."""

    step_seconds: float = Field(description="Median step.")
    steps: int | None = Field(default=None, ge=1, le=10**9)
    peak_memory_bytes: int | None = Field(default=None, ge=0, le=2**50)
    gpu: str | None = Field(default=None, max_length=128)
    gpus: int | None = Field(default=None, ge=1, le=MAX_GPUS)
    driver: str | None = Field(default=None, max_length=64)
    plan: BaselinePlan | None = None


def parse_body_report(body: bytes, node: str | None, account: str | None = None) -> StepReport:
    """Return the report in the JSON body of a PUT, sent by a pod on `node` as service account `account`.

    Raises:
        RefusedReport: the body is not a report.
    """
    try:
        document = untrusted.parse_json(body, max_bytes=MAX_BODY_BYTES)
        if not isinstance(document, Mapping):
            raise ValueError("no object")
    except ValueError:
        raise RefusedReport("invalid", 400, 'the body is no JSON object; send {"stepSeconds": 1.23}') from None
    bare = document.get("stepSeconds")
    if isinstance(bare, float) and not math.isfinite(bare):
        raise RefusedReport("invalid", 422, f"stepSeconds: {bare} is no time; send seconds above 0")
    try:
        one = validate_model(_ReportBody, document, "observation")
    except SpecError as error:
        raise RefusedReport("invalid", 422, str(error).removeprefix("observation.")) from None
    if one.parts.sum_s > one.step_seconds * (1 + ROUNDING) > 0:
        problem = f"inputSeconds and the other parts take {one.parts.sum_s:g} s, more than stepSeconds"
        raise RefusedReport("invalid", 422, f"{problem}; send what each takes of the step")
    return StepReport(
        seconds=require_positive(one.step_seconds),
        source="put",
        parts=one.parts,
        steps=one.steps,
        peak_memory_bytes=one.peak_memory_bytes,
        gpu=one.gpu,
        gpus=one.gpus,
        node=node,
        driver=one.driver,
        account=account,
        plan=None if one.plan is None else one.plan.to_partial_plan(),
    )


def parse_annotation_report(text: str) -> StepReport:
    """Return the report in the text of an annotation, as written by `kubectl annotate`.

    Raises:
        RefusedReport: the text is not a time.
    """
    try:
        seconds = float(text)
    except ValueError:
        raise RefusedReport(
            "invalid", 422, f"the annotation {text[:32]!r} is no number; write seconds above 0"
        ) from None
    return StepReport(require_positive(seconds), "annotation", annotation=text[:32])


def parse_prometheus_report(outcome: Any) -> StepReport | None:
    """Return the report in a response to an instant query. If the response has no sample, return None.

    Of several series, one for each rank, the slowest is used, because all ranks wait for it.

    Raises:
        RefusedReport: the response is not a vector or scalar of times.
    """
    try:
        data = outcome["data"]
        values = [data["result"]] if data["resultType"] == "scalar" else [item["value"] for item in data["result"]]
        seconds = [float(value) for _, value in values]
    except (KeyError, TypeError, ValueError):
        raise RefusedReport("invalid", 422, "the query gives no instant vector; write one that gives seconds") from None
    known = [value for value in seconds if not math.isnan(value)]
    return StepReport(require_positive(max(known)), "prometheus") if known else None


def parse_trainer_report(status: Mapping[str, Any]) -> StepReport | None:
    """Return the step time that a TrainJob reports in `status.trainerStatus.metrics`, or None.

    Raises:
        RefusedReport: the reported step time is not a finite, positive number.
    """
    for name, value in list_step_metrics(status):
        try:
            return StepReport(require_positive(float(value)), "trainJob")
        except ValueError:
            raise RefusedReport("invalid", 422, f"the metric {name} is no number") from None
    return None


def list_step_metrics(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the name and the value of each metric in a TrainJob's status that gives the duration of a step."""
    trainer = status.get("trainerStatus")
    metrics = trainer.get("metrics") if isinstance(trainer, Mapping) else None
    return [
        (str(item["name"]), str(item.get("value")))
        for item in (metrics if isinstance(metrics, list) else [])
        if isinstance(item, Mapping) and item.get("name") in TRAINER_METRICS
    ]


def require_positive(seconds: float) -> float:
    """Return a step's seconds if they are finite and positive.

    Raises:
        RefusedReport: they are not.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise RefusedReport("invalid", 422, f"{seconds:g} s is no time of a step; report seconds above 0")
    return seconds


def require_plausible(seconds: float, forecast_s: float) -> None:
    """Refuse a measured step that is too far from the forecast to be of the same job and plan.

    Raises:
        RefusedReport: step and forecast differ by more than `MAX_PLAUSIBLE_RATIO`.
    """
    factor = seconds / forecast_s
    if factor > MAX_PLAUSIBLE_RATIO:
        text = (
            f"{seconds:g} s is {factor:,.0f} times the forecast of {forecast_s:.3g} s; report seconds, not milliseconds"
        )
        raise RefusedReport("implausible", 422, text)
    if factor < 1 / MAX_PLAUSIBLE_RATIO:
        text = f"{seconds:g} s is {1 / factor:,.0f} times shorter than the forecast of {forecast_s:.3g} s"
        raise RefusedReport("implausible", 422, f"{text}; report whole optimizer steps in seconds")


def read_review_node(outcome: Mapping[str, Any], namespace: str) -> str | None:
    """Return the node of the pod that a TokenReview confirms, or None if it names no node.

    Raises:
        RefusedReport: the token is invalid, for another audience, or from another namespace.
    """
    status = outcome.get("status") or {}
    if not status.get("authenticated") or AUDIENCE not in (status.get("audiences") or ()):
        problem = f"the token is not valid for audience {AUDIENCE}; project one into the pod"
        raise RefusedReport("unauthenticated", 401, problem)
    user = status.get("user") or {}
    kind, _, account = str(user.get("username", "")).partition(":serviceaccount:")
    if kind != "system" or account.partition(":")[0] != namespace:
        raise RefusedReport("forbidden", 403, f"the token is not of a service account of namespace {namespace}")
    nodes = (user.get("extra") or {}).get(NODE_CLAIM) or [None]
    return None if nodes[0] is None else str(nodes[0])


def read_review_account(outcome: Mapping[str, Any]) -> str | None:
    """Return the service account in a TokenReview, or None."""
    username = str(((outcome.get("status") or {}).get("user") or {}).get("username", ""))
    return username.rpartition(":")[2][:253] or None


def _list_kept_fields(report: StepReport | ObservedStep) -> dict[str, Any]:
    """Return the fields of a report that a job's status stores, except the times of the report."""
    return {
        name: getattr(report, name)
        for name in ("peak_memory_bytes", "gpu", "node", "driver", "annotation", "rounding_ratio")
    }


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Newest measured steps of one job."""

    recent: tuple[float, ...]
    samples: int
    time: str
    latest: StepReport

    @classmethod
    def from_status(cls, observed: ObservedStep | None) -> StepWindow | None:
        """Return the window stored in a job's status, or None."""
        if observed is None or not observed.recent_step_seconds:
            return None
        recent = tuple(observed.recent_step_seconds)
        latest = StepReport(recent[-1], observed.source, parts=observed.parts, **_list_kept_fields(observed))
        return cls(recent, max(observed.samples, len(recent)), observed.time, latest)

    @property
    def seconds(self) -> float:
        """Median step of the newest reports, without outliers, in seconds."""
        return calibration.robust_median(self.recent)

    @property
    def parts(self) -> MeasuredParts:
        """Seconds of each part of the median step: the parts of the latest report, scaled to the median step."""
        return self.latest.parts.scale_by(self.seconds / max(self.latest.seconds, self.latest.parts.sum_s))

    @property
    def observations(self) -> int:
        """Number of observations in learning: the reports times the weight of their source, at least 1."""
        return max(1, int(self.samples * SOURCE_WEIGHTS.get(self.latest.source, 1.0)))

    def has_newest_report(self, report: StepReport) -> bool:
        """Return whether the newest report equals `report` in source and in the digits that a status stores."""
        return self.latest.source == report.source and round_to_six_digits(self.recent[-1]) == round_to_six_digits(
            report.seconds
        )

    def status(self) -> ObservedStep:
        """Return the window as `status.observed`."""
        latest = self.latest
        return ObservedStep.from_truncated_values(
            step_seconds=round_to_six_digits(self.seconds),
            **to_part_fields(latest.parts),
            samples=self.samples,
            source=latest.source,
            time=self.time,
            recent_step_seconds=[round_to_six_digits(item) for item in self.recent],
            **_list_kept_fields(latest),
        )


def add_report(window: StepWindow | None, report: StepReport, now: str) -> StepWindow:
    """Return the window with one more report. Values missing in the report stay unchanged.

    A report of another source replaces those of a log.
    """
    if window is None or (window.latest.source == LOG and report.source != LOG):
        return StepWindow((report.seconds,), 1, now, report)
    before = window.latest
    earlier = before.parts.scale_by(report.seconds / before.seconds)
    report = replace(report, parts=earlier.blend_with(report.parts, 1 / min(window.samples + 1, PARTS_RECENT)))
    kept = _list_kept_fields(before)
    missing = {
        name: kept[name]
        for name, value in _list_kept_fields(report).items()
        if value is None and name != "rounding_ratio"
    }
    recent: Sequence[float] = (*window.recent, report.seconds)[-RECENT:]
    return StepWindow(tuple(recent), window.samples + 1, now, replace(report, **missing))


class CompleteForecast(FrozenForecast):
    """Stored forecast with every field that a comparison with measured steps needs."""

    pool: str
    gpus: int
    plan: str
    raw_seconds: float
    step_seconds: StepSeconds
    group: list[str] = Field(min_length=GROUP)
    followed: bool

    @classmethod
    def from_stored(cls, stored: FrozenForecast | None) -> CompleteForecast | None:
        """Return the forecast stored in a status, or None if no plan was priced yet."""
        try:
            return None if stored is None else cls.model_validate(stored, from_attributes=True)
        except ValidationError:
            return None

    @property
    def pool_gpus_plan(self) -> tuple[str, int, str]:
        """Pool, GPU count and plan, which distinguish the runs of a job."""
        return self.pool, self.gpus, self.plan

    def error_ratios(self, window: StepWindow) -> ErrorRatio:
        """Return the relative errors of the forecast, raw and calibrated, for `status.error`."""
        seconds = window.seconds
        raw, calibrated = (relative_error(value, seconds) for value in (self.raw_seconds, self.step_seconds.target))
        return ErrorRatio(raw_ratio=raw, calibrated_ratio=calibrated)


def relative_error(predicted_s: float, observed_s: float) -> float:
    """Return the signed error of a predicted step relative to the observed step, rounded to four decimals."""
    return round(float(calibration.relative_error(np.float64(predicted_s), np.float64(observed_s))), 4)
