"""Where measured step times come from, and which of them count.

Four sources tell one `Report` each: a training pod by HTTP, an annotation, a Prometheus, a TrainJob's own status. What
they tell is believed if it could be the step of the plan that runs, and becomes part of a `Window`. The job's status
keeps the newest reports of it, so that a restart forgets none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Template
from typing import Any

import numpy as np
from pydantic import Field

from tilecast import calibration
from tilecast.api.base import MAX_GPUS, check
from tilecast.api.base import ApiModel as Door
from tilecast.api.training_job import BaselinePlan
from tilecast.spec import SpecError, Stated

AUDIENCE = "tilecast"
"""Of the tokens with which pods report."""
NODE_CLAIM = "authentication.kubernetes.io/node-name"
"""Where a TokenReview says on which node the pod of a bound token runs (Kubernetes 1.30)."""
RECENT = 32
"""Reports that a median is of."""
FAR = 100.0
"""A step this many times longer or shorter than forecast is another unit, or another job."""
MAX_BODY_BYTES = 16384
SOURCES = ("put", "annotation", "prometheus", "trainJob")
TRAINER_METRICS = ("step_time_seconds", "step_seconds", "train_step_time_seconds")
"""Names under which a TrainJob's trainer may publish its step."""


class Refused(Exception):  # noqa: N818  (an answer, not a failure)
    """A report that does not count. `outcome` is one of a closed list, `status` the HTTP status that says it."""

    def __init__(self, outcome: str, status: int, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.status = status


@dataclass(frozen=True, slots=True)
class Report:
    """One measured step in seconds, and what its source says of the run."""

    seconds: float
    source: str
    steps: int | None = None
    peak_memory_bytes: int | None = None
    gpu: str | None = None
    gpus: int | None = None
    node: str | None = None
    driver: str | None = None
    plan: Stated | None = None
    annotation: str | None = None
    input_seconds: float | None = None
    """What of the step went by waiting for data."""


class _Body(Door):
    """What a training pod PUTs; see `tilecast_observe`."""

    step_seconds: float = Field(description="Median step.")
    steps: int | None = Field(default=None, ge=1, le=10**9)
    input_seconds: float | None = Field(default=None, ge=0, lt=1e9)
    peak_memory_bytes: int | None = Field(default=None, ge=0, le=2**50)
    gpu: str | None = Field(default=None, max_length=128)
    gpus: int | None = Field(default=None, ge=1, le=MAX_GPUS)
    driver: str | None = Field(default=None, max_length=64)
    plan: BaselinePlan | None = None


def from_body(body: bytes, node: str | None) -> Report:
    """The report in the body of a PUT, from a pod on that node.

    Raises:
        Refused: the body is no report.
    """
    try:
        found = json.loads(body)
        if not isinstance(found, Mapping):
            raise ValueError("no object")
    except (ValueError, RecursionError):
        raise Refused("invalid", 400, 'the body is no JSON object; send {"stepSeconds": 1.23}') from None
    bare = found.get("stepSeconds")
    if isinstance(bare, float) and not math.isfinite(bare):
        raise Refused("invalid", 422, f"stepSeconds: {bare} is no time; send seconds above 0")
    try:
        one = check(_Body, found, "observation")
    except SpecError as error:
        raise Refused("invalid", 422, str(error).removeprefix("observation.")) from None
    if one.input_seconds is not None and one.input_seconds > one.step_seconds:
        raise Refused("invalid", 422, f"inputSeconds: {one.input_seconds:g} is more than stepSeconds; send its part")
    return Report(
        seconds=positive(one.step_seconds),
        source="put",
        input_seconds=one.input_seconds,
        steps=one.steps,
        peak_memory_bytes=one.peak_memory_bytes,
        gpu=one.gpu,
        gpus=one.gpus,
        node=node,
        driver=one.driver,
        plan=None if one.plan is None else one.plan.stated(),
    )


def from_annotation(text: str) -> Report:
    """The report that `kubectl annotate` wrote.

    Raises:
        Refused: the text is no time.
    """
    try:
        seconds = float(text)
    except ValueError:
        raise Refused("invalid", 422, f"the annotation {text[:32]!r} is no number; write seconds above 0") from None
    return Report(positive(seconds), "annotation", annotation=text[:32])


def from_prometheus(answer: Any) -> Report | None:
    """The report in the answer to an instant query; None where it has no sample. Of several series, one for each rank,
    the slowest counts, for all wait for it.

    Raises:
        Refused: the answer is no vector or scalar of times.
    """
    try:
        data = answer["data"]
        found = [data["result"]] if data["resultType"] == "scalar" else [item["value"] for item in data["result"]]
        seconds = [float(value) for _, value in found]
    except (KeyError, TypeError, ValueError):
        raise Refused("invalid", 422, "the query gives no instant vector; write one that gives seconds") from None
    known = [value for value in seconds if not math.isnan(value)]
    return Report(positive(max(known)), "prometheus") if known else None


def from_trainer(status: Mapping[str, Any]) -> Report | None:
    """The report in the status of a TrainJob (`status.trainerStatus.metrics`); None where it tells no step.

    Raises:
        Refused: it tells one that is no time.
    """
    for name, value in trainer_metrics(status):
        try:
            return Report(positive(float(value)), "trainJob")
        except ValueError:
            raise Refused("invalid", 422, f"the metric {name} is no number") from None
    return None


def trainer_metrics(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the metrics in the status of a TrainJob that tell its step."""
    trainer = status.get("trainerStatus")
    metrics = trainer.get("metrics") if isinstance(trainer, Mapping) else None
    return [
        (str(item["name"]), str(item.get("value")))
        for item in (metrics if isinstance(metrics, list) else [])
        if isinstance(item, Mapping) and item.get("name") in TRAINER_METRICS
    ]


def positive(seconds: float) -> float:
    """The same, if it is a time.

    Raises:
        Refused: it is not.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise Refused("invalid", 422, f"{seconds:g} s is no time of a step; report seconds above 0")
    return seconds


def plausible(seconds: float, forecast_s: float) -> None:
    """Refuse what cannot be the step that is forecast.

    Raises:
        Refused: it lies two orders of magnitude away.
    """
    factor = seconds / forecast_s
    if factor > FAR:
        text = (
            f"{seconds:g} s is {factor:,.0f} times the forecast of {forecast_s:.3g} s; report seconds, not milliseconds"
        )
        raise Refused("implausible", 422, text)
    if factor < 1 / FAR:
        text = f"{seconds:g} s is {1 / factor:,.0f} times shorter than the forecast of {forecast_s:.3g} s"
        raise Refused("implausible", 422, f"{text}; report whole optimizer steps in seconds")


def query(template: str, namespace: str, name: str) -> str:
    """A PromQL template with the job's namespace and name in it."""
    return Template(template).safe_substitute(namespace=namespace, name=name)


def reviewed(answer: Mapping[str, Any], namespace: str) -> str | None:
    """The node of the pod that a TokenReview vouches for, where it says so.

    Raises:
        Refused: the token is nobody's, for another audience, or of another namespace.
    """
    status = answer.get("status") or {}
    if not status.get("authenticated") or AUDIENCE not in (status.get("audiences") or ()):
        problem = f"the token is not valid for audience {AUDIENCE}; project one into the pod"
        raise Refused("unauthenticated", 401, problem)
    user = status.get("user") or {}
    kind, _, account = str(user.get("username", "")).partition(":serviceaccount:")
    if kind != "system" or account.partition(":")[0] != namespace:
        raise Refused("forbidden", 403, f"the token is not of a service account of namespace {namespace}")
    nodes = (user.get("extra") or {}).get(NODE_CLAIM) or [None]
    return None if nodes[0] is None else str(nodes[0])


@dataclass(frozen=True, slots=True)
class Window:
    """The measured steps of one job."""

    recent: tuple[float, ...]
    samples: int
    time: str
    latest: Report

    @classmethod
    def of(cls, observed: Mapping[str, Any]) -> Window | None:
        """What the status of a job keeps of them; None where that is nothing."""
        try:
            recent = tuple(float(item) for item in observed["recentStepSeconds"])[-RECENT:]
            latest = Report(
                recent[-1],
                str(observed["source"]),
                peak_memory_bytes=observed.get("peakMemoryBytes"),
                gpu=observed.get("gpu"),
                node=observed.get("node"),
                driver=observed.get("driver"),
                annotation=observed.get("annotation"),
                input_seconds=observed.get("inputSeconds"),
            )
            return cls(recent, max(int(observed["samples"]), len(recent)), str(observed["time"]), latest)
        except (KeyError, TypeError, ValueError, IndexError):
            return None

    @property
    def seconds(self) -> float:
        """The median of the newest reports, outliers left out."""
        return calibration.median(self.recent)

    def ends_with(self, report: Report) -> bool:
        """Whether this was the newest report, as far as the status of a job keeps it."""
        return self.latest.source == report.source and _figures(self.recent[-1]) == _figures(report.seconds)

    def status(self) -> dict[str, Any]:
        """The same as `status.observed`."""
        latest = self.latest
        found = {
            "stepSeconds": _figures(self.seconds),
            "inputSeconds": None if latest.input_seconds is None else _figures(latest.input_seconds),
            "samples": self.samples,
            "source": latest.source,
            "time": self.time,
            "recentStepSeconds": [_figures(item) for item in self.recent],
            "peakMemoryBytes": latest.peak_memory_bytes,
            "gpu": None if latest.gpu is None else latest.gpu[:63],
            "driver": None if latest.driver is None else latest.driver[:32],
            "node": None if latest.node is None else latest.node[:253],
            "annotation": latest.annotation,
        }
        return {key: value for key, value in found.items() if value is not None}


def added(window: Window | None, report: Report, now: str) -> Window:
    """The window with one report more. What a report does not say stays as it was said before."""
    if window is None:
        return Window((report.seconds,), 1, now, report)
    before = window.latest
    names = ("peak_memory_bytes", "gpu", "node", "driver", "annotation", "input_seconds")
    kept = {name: getattr(before, name) for name in names if getattr(report, name) is None}
    recent: Sequence[float] = (*window.recent, report.seconds)[-RECENT:]
    return Window(tuple(recent), window.samples + 1, now, replace(report, **kept))


def errors(forecast: Mapping[str, Any], window: Window) -> dict[str, float]:
    """`status.error` of a frozen forecast."""
    return {
        "rawRatio": error(forecast["rawSeconds"], window.seconds),
        "calibratedRatio": error(forecast["stepSeconds"]["target"], window.seconds),
    }


def error(predicted_s: float, observed_s: float) -> float:
    """The signed relative error, to four digits."""
    return round(float(calibration.relative_error(np.float64(predicted_s), np.float64(observed_s))), 4)


def _figures(value: float) -> float:
    return float(f"{value:.6g}")
