"""Read the fields of objects that the pages show. A field of an unexpected type counts as absent."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilecast import hardware
from tilecast.api.fields import Document, as_mapping, list_mappings_in, value_at_path
from tilecast.objectives import OBJECTIVES
from tilecast_operator.kube.times import parse_time

LONGEST_TEXT = 300
"""Most characters that are kept of a text."""
MOST_COUNT = 10**9
LEAST_STEP_S = 1e-9
"""Shortest step that counts as one."""
_SHAPE = re.compile(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class PoolRow:
    """Row of a GPUPool: the fields of the object that the pages show."""

    name: str
    gpu: str
    shape: str
    """Nodes x GPUs per node."""
    price: str
    """Price of a GPU for an hour, with its currency."""
    link: str
    origin: str
    gpus: int | None
    """GPUs that pods may use."""
    free: int | None
    error_ratio: float | None
    """Median signed error of the forecasts for its runs, corrected."""
    is_ready: bool
    reason: str
    """Reason and message of the condition Ready."""
    form_gpus: str
    """The pool as `--gpus` takes it, empty if that cannot say it."""

    @classmethod
    def from_object(cls, body: Document) -> PoolRow:
        """Return the row of a GPUPool as the API server sent it."""
        status = as_mapping(body.get("status"))
        summary, gpus = as_mapping(status.get("summary")), as_mapping(status.get("gpus"))
        ready = _find_condition(status, "Ready")
        gpu, shape = _read_text(summary.get("gpu")), _read_text(summary.get("shape"))
        allocatable = read_count(gpus.get("allocatable"))
        return cls(
            name=_read_name(body),
            gpu=gpu,
            shape=shape,
            price=_read_text(summary.get("price")),
            link=_read_text(summary.get("link")),
            origin=_read_text(summary.get("origin")),
            gpus=read_count(gpus.get("total")) if allocatable is None else allocatable,
            free=read_count(gpus.get("free")),
            error_ratio=read_number(value_at_path(status, ("error", "calibratedRatio"))),
            is_ready=ready.get("status") == "True",
            reason=_describe_condition(ready),
            form_gpus=_write_form_gpus(as_mapping(body.get("spec")), gpu, shape),
        )


def _write_form_gpus(spec: Document, gpu: str, shape: str) -> str:
    has_own_facts = spec.get("mig") is not None or value_at_path(spec, ("gpu", "facts")) is not None
    return f"{gpu}:{shape}" if _SHAPE.fullmatch(shape) and gpu in hardware.list_gpus() and not has_own_facts else ""


@dataclass(frozen=True, slots=True)
class QueueSlot:
    """The place of a job in the plan of the queue. Times are Unix times in seconds."""

    pool: str
    gpus: int | None
    position: int | None
    start_s: float | None
    finish_s: float | None
    earliest_s: float | None
    latest_s: float | None
    run_lower_s: float | None
    run_upper_s: float | None
    reason: str

    @classmethod
    def from_document(cls, queue: Document) -> QueueSlot:
        """Return the slot that `status.queue` describes."""
        run = as_mapping(queue.get("runSeconds"))
        return cls(
            pool=_read_text(queue.get("pool")),
            gpus=read_count(queue.get("gpus")),
            position=read_count(queue.get("position")),
            start_s=_read_time(queue.get("start")),
            finish_s=_read_time(queue.get("finish")),
            earliest_s=_read_time(queue.get("earliestStart")),
            latest_s=_read_time(queue.get("latestStart")),
            run_lower_s=read_number(run.get("lowerBound"), 0.0),
            run_upper_s=read_number(run.get("upperBound"), 0.0),
            reason=_read_text(queue.get("reason")),
        )


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """A measured step and its forecast, in seconds."""

    pool: str
    """Pool that the job runs on, as far as is known."""
    step_s: float
    samples: int
    forecast_s: float
    lower_s: float
    upper_s: float
    error_ratio: float
    """(forecast - measured) / measured, of the forecast as it was given."""
    raw_ratio: float | None
    """The same of the forecast before any correction."""
    time: str

    @property
    def is_inside(self) -> bool:
        """Whether the step lies in the range of the forecast."""
        return self.lower_s <= self.step_s <= self.upper_s


@dataclass(frozen=True, slots=True)
class JobRow:
    """Row of a TrainingJob: the fields of the object that the pages show."""

    namespace: str
    name: str
    pool: str
    gpus: str
    plan: str
    step: str
    range: str
    cost: str
    """Price of 1000 steps."""
    objective: str
    reason: str
    """Reason of the condition Ready."""
    message: str
    """Its message, or why the recommended plan is best."""
    measured: MeasuredRow | None
    queue: QueueSlot | None

    @property
    def full_name(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"

    @classmethod
    def from_object(cls, body: Document) -> JobRow:
        """Return the row of a TrainingJob as the API server sent it."""
        status = as_mapping(body.get("status"))
        summary, advice = as_mapping(status.get("summary")), as_mapping(status.get("recommendation"))
        ready, objective = _find_condition(status, "Ready"), value_at_path(body, ("spec", "objective"))
        queue = status.get("queue")
        return cls(
            namespace=_read_text(value_at_path(body, ("metadata", "namespace"))),
            name=_read_name(body),
            pool=_read_text(summary.get("pool")),
            gpus=_read_text(summary.get("gpus")),
            plan=_read_text(summary.get("plan")),
            step=_read_text(summary.get("step")),
            range=_read_text(summary.get("range")),
            cost=_read_text(summary.get("costPer1000Steps")),
            objective=objective if isinstance(objective, str) and objective in OBJECTIVES else "",
            reason=_read_text(ready.get("reason")) or _read_text(summary.get("reason")),
            message=_read_text(advice.get("reason")) or _read_text(ready.get("message")),
            measured=_read_measured(status),
            queue=QueueSlot.from_document(queue) if isinstance(queue, Mapping) else None,
        )


def _read_measured(status: Document) -> MeasuredRow | None:
    """Return the measured step and its forecast in a status, or None if the status lacks one of them."""
    observed, forecast = as_mapping(status.get("observed")), as_mapping(status.get("forecast"))
    advised = as_mapping(status.get("recommendation"))
    step = as_mapping(forecast.get("stepSeconds")) or as_mapping(advised.get("stepSeconds"))
    step_s, forecast_s = (
        read_number(value, LEAST_STEP_S) for value in (observed.get("stepSeconds"), step.get("target"))
    )
    if step_s is None or forecast_s is None:
        return None
    lower_s, upper_s = read_number(step.get("lowerBound"), 0.0), read_number(step.get("upperBound"), 0.0)
    errors = as_mapping(status.get("error"))
    error_ratio = read_number(errors.get("calibratedRatio"))
    return MeasuredRow(
        pool=_read_text(forecast.get("pool")) or _read_text(advised.get("pool")),
        step_s=step_s,
        samples=read_count(observed.get("samples")) or 0,
        forecast_s=forecast_s,
        lower_s=forecast_s if lower_s is None else lower_s,
        upper_s=forecast_s if upper_s is None else upper_s,
        error_ratio=forecast_s / step_s - 1.0 if error_ratio is None else error_ratio,
        raw_ratio=read_number(errors.get("rawRatio")),
        time=_read_text(observed.get("time")),
    )


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """Totals of the queue under one policy."""

    name: str
    completion_s: float | None
    makespan_s: float | None
    missed: int | None


@dataclass(frozen=True, slots=True)
class QueueRow:
    """Row of a QueueAdvice: the fields of the object that the pages show."""

    name: str
    policy: str
    planned_at: str
    waiting: int | None
    running: int | None
    gap_ratio: float | None
    totals: PolicyRow | None
    references: tuple[PolicyRow, ...]
    refused: tuple[tuple[str, str, str], ...]
    """Job, message and remedy of the jobs that are left out."""
    reason: str

    @classmethod
    def from_object(cls, body: Document) -> QueueRow:
        """Return the row of a QueueAdvice as the API server sent it."""
        status = as_mapping(body.get("status"))
        counts, totals = as_mapping(status.get("jobs")), status.get("totals")
        return cls(
            name=_read_name(body),
            policy=_read_text(status.get("policy")),
            planned_at=_read_text(status.get("plannedAt")),
            waiting=read_count(counts.get("waiting")),
            running=read_count(counts.get("running")),
            gap_ratio=read_number(status.get("gapRatio")),
            totals=_read_policy("this plan", totals) if isinstance(totals, Mapping) else None,
            references=tuple(
                _read_policy(_read_text(item.get("name")), item)
                for item in list_mappings_in(status.get("references"))[:8]
            ),
            refused=tuple(
                (_read_text(item.get("job")), _read_text(item.get("message")), _read_text(item.get("remedy")))
                for item in list_mappings_in(status.get("refused"))[:32]
            ),
            reason=_describe_condition(_find_condition(status, "Ready")),
        )


def _read_policy(name: str, numbers: Document) -> PolicyRow:
    return PolicyRow(
        name,
        read_number(numbers.get("completionSeconds"), 0.0),
        read_number(numbers.get("makespanSeconds"), 0.0),
        read_count(numbers.get("missed")),
    )


def read_number(value: Any, least: float = -math.inf) -> float | None:
    """Return the value if it is a finite number from `least` to 1e12. Otherwise return None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and least <= value <= 1e12 and value >= -1e12 else None


def read_count(value: Any) -> int | None:
    """Return the value if it is a whole number from 0 to `MOST_COUNT`. Otherwise return None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT else None


def _read_text(value: Any) -> str:
    """Return the first `LONGEST_TEXT` characters of a text. For any other value, return an empty text."""
    return value[:LONGEST_TEXT] if isinstance(value, str) else ""


def _read_time(value: Any) -> float | None:
    try:
        return parse_time(value) if isinstance(value, str) else None
    except (OverflowError, ValueError):
        return None


def _read_name(body: Document) -> str:
    return _read_text(value_at_path(body, ("metadata", "name")))


def _find_condition(status: Document, name: str) -> Document:
    return next((item for item in list_mappings_in(status.get("conditions")) if item.get("type") == name), {})


def _describe_condition(condition: Document) -> str:
    reason, message = _read_text(condition.get("reason")), _read_text(condition.get("message"))
    return f"{reason}: {message}" if reason and message else reason or message
