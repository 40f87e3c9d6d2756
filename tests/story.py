"""The story of a forecast that was 30 % too slow and of its corrected successor, for any cluster with the operator.

The same steps run on the local control plane and on kind; `sites.py` holds the differences between those clusters.
"""

from __future__ import annotations

import json
import math
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster import wait_for
from tilecast_observe import StepTimer
from tilecast_observe.reporter import ReporterSettings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import dashboards
import scraper
from scraper import DIRECT

TEAM = "team"
GROUP = 'gpu="h100-sxm",precision="bf16",family="decoder"'
TOO_SLOW = 1.3
"""Ratio of the raw forecast to the measured step."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A cluster with H100 nodes, the operator in it, and a Prometheus that scrapes it."""

    kubectl: Callable[..., str]
    operator: Callable[[], str]
    """Returns the current URL of the operator."""
    prometheus: str

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Return the series and values with which Prometheus answers a query now."""
        return [(item["metric"], float(item["value"][1])) for item in scraper.query(self.prometheus, query)]

    def value(self, query: str) -> float | None:
        """Return the value of the only series, or None where there is not exactly one."""
        job = self.ask(query)
        return job[0][1] if len(job) == 1 else None

    def create(self, name: str, **spec: Any) -> None:
        """Create a small job of this name."""
        given = {
            "model": {"preset": "gpt2-xl"},
            "training": {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "bf16"},
            "constraints": {"gpus": 8, "allowedPools": ["h100-sxm"]},
        } | spec
        job = {"apiVersion": "tilecast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": given}
        self.kubectl("create", f"--namespace={TEAM}", "-f", "-", input=json.dumps(job))

    def apply(self, name: str, **spec: Any) -> dict[str, Any]:
        """Create a small job of this name, and return its status once it has its advice."""
        self.create(name, **spec)
        return wait_for(lambda: self.with_field(name, "recommendation"), f"advice for {name}", 120)

    def with_field(self, name: str, field: str) -> dict[str, Any] | None:
        """Return the status of a job, or None while it lacks this field."""
        document = json.loads(self.kubectl("get", "tjob", name, f"--namespace={TEAM}", "-o", "json"))
        status: dict[str, Any] = document.get("status") or {}
        return status if field in status else None

    def token(self) -> str:
        """Return a token with which a pod of the team would report."""
        return self.kubectl("create", "token", "default", f"--namespace={TEAM}", "--audience=tilecast").strip()

    def put(self, token: str, name: str, body: bytes) -> tuple[int, str]:
        """Send a report, and return its HTTP status and outcome."""
        url = f"{self.operator()}/observations/{TEAM}/{name}"
        request = urllib.request.Request(url, body, {"Authorization": f"Bearer {token}"}, method="PUT")  # noqa: S310
        try:
            with DIRECT.open(request, timeout=30) as answer:
                return answer.status, json.load(answer)["outcome"]
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["outcome"]


def from_advice_to_a_better_forecast(scene: Scene, folder: Path) -> None:
    """Follow a job from its advice to a better forecast for a second one.

    The first job reports 20 measured steps, which show the error of its forecast and lead to a correction.
    """
    token = scene.token()
    first = scene.apply("first")
    raw = first["recommendation"]["stepSeconds"]["target"]
    count = 'tilecast_prediction_relative_error_ratio_count{gpu="h100-sxm",stage="raw"}'
    # A panel shows the growth between two scrapes.
    wait_for(lambda: scene.value(count) == 0, "a scrape before the first report", 60)
    for _ in range(20):
        report = json.dumps({"stepSeconds": raw / TOO_SLOW, "steps": 50, "gpus": 8}).encode()
        assert scene.put(token, "first", report) == (202, "accepted")

    def observed() -> dict[str, Any] | None:
        status = scene.with_field("first", "observed")
        return status if status and status["observed"]["samples"] == 20 else None

    status = wait_for(observed, "20 observations", 120)
    assert status["error"]["rawRatio"] == pytest.approx(0.3, abs=1e-3)
    assert "+30%" in scene.kubectl("get", "tjob", "first", f"--namespace={TEAM}")

    wait_for(lambda: scene.value(count) == 20, "the raw error series", 120)
    raw_bias = f'tilecast_prediction_bias_ratio{{{GROUP},stage="raw"}}'
    assert wait_for(lambda: scene.value(raw_bias), "the bias", 120) == pytest.approx(0.3, abs=1e-3)
    below = 'tilecast_prediction_relative_error_ratio_bucket{stage="raw",le="%s"}'
    assert scene.value(below % "0.25") == 0
    assert scene.value(below % "0.5") == 20
    assert scene.value('tilecast_observations_total{source="put",outcome="accepted"}') == 20

    def corrected() -> float | None:
        status = json.loads(scene.kubectl("get", "gpupool", "h100-sxm", "-o", "json"))["status"]
        corrections = status.get("calibration", {}).get("corrections", [])
        ratios = [item["ratio"] for item in corrections if "scale" in item]
        return ratios[0] if ratios else None

    assert wait_for(corrected, "a correction in the pool's status", 120) < 1
    wait_for(lambda: scene.value(f"tilecast_calibration_ratio{{{GROUP}}}"), "the calibration series", 120)

    second = scene.apply("second")
    forecast = second["recommendation"]["stepSeconds"]
    assert forecast["target"] == pytest.approx(raw / TOO_SLOW, rel=0.05)
    assert forecast["upperBound"] / forecast["lowerBound"] < (
        first["recommendation"]["stepSeconds"]["upperBound"] / first["recommendation"]["stepSeconds"]["lowerBound"]
    )

    _report_as_a_script_does(scene, folder, raw / TOO_SLOW)
    status = scene.with_field("second", "error") or {}
    assert status["error"]["rawRatio"] == pytest.approx(0.3, abs=0.01)
    assert abs(status["error"]["calibratedRatio"]) < 0.05
    near = 'tilecast_prediction_absolute_relative_error_ratio_bucket{stage="calibrated",le="0.05"}'
    wait_for(lambda: scene.value(near) == 1, "the calibrated series", 120)
    left = f'tilecast_prediction_bias_ratio{{{GROUP},stage="calibrated"}}'
    wait_for(lambda: abs(scene.value(left) or 1) < 0.05, "the bias that calibration leaves", 120)


def _report_as_a_script_does(scene: Scene, folder: Path, step_s: float) -> None:
    """Report the steps of the second job with the library."""
    (folder / "token").write_text(scene.token())
    place = {"url": scene.operator(), "namespace": TEAM, "token_file": str(folder / "token")}
    settings = ReporterSettings(job="second", gpus=8, **place)
    seconds = iter(range(100))
    with StepTimer(warmup_steps=2, interval_s=3600, settings=settings, clock=lambda: next(seconds) * step_s) as timer:
        for _ in range(12):
            timer.step()
    wait_for(lambda: scene.with_field("second", "error"), "the second error", 120)


EXPECTED: Mapping[str, Mapping[tuple[str, ...], Any]] = {
    "Median absolute error": {("raw",): pytest.approx(0.3, abs=0.1)},
    "Bias": {("raw",): pytest.approx(0.3, abs=0.02), ("calibrated",): pytest.approx(0, abs=0.05)},
    "Measurements scored": {(): pytest.approx(24, abs=3)},
    "Calibration": {("decoder", "h100-sxm", "bf16"): pytest.approx((1 + 1 / TOO_SLOW) / 2, abs=(1 - 1 / TOO_SLOW) / 2)},
    "Advice followed": {("true",): pytest.approx(3, abs=0.5)},
    "Capacity by pool": {("h100-sxm", "total"): 16, ("h100-sxm", "allocatable"): 16},
    "GPU nodes without a pool": {("UnknownAccelerator",): 1},
}
"""Values that some panels must show, keyed by the label values in the order of the labels' names."""

EMPTY = {
    "Jobs held now": "none waits in this story",
    "Longest wait now": "none waits in this story",
    "Time until let go": "none waits in this story",
    "Outcomes": "none waits in this story",
    "Search under way": "none takes as long as the time between two scrapes",
    "Memory of searches": "they run in threads",
    "Oldest job without an answer": "none waits when it is scraped",
    "Namespaces over their budget": "one team asks for little",
    "Set aside": "nothing kills it in this story",
    "Search processes replaced": "they run in threads",
    "Retries per minute": "nothing fails in this story",
    "Keys waiting": "it keeps up, so that none waits when it is scraped",
}
"""Panels that the story cannot fill, with the reason: their queries may answer with zero, but must answer."""
_SCRAPES = "count_over_time(tilecast_build_info[1h])"
_SUBSTITUTES = {"$__range": "1h", "$__rate_interval": "1m"}


def shown(scene: Scene, query: str) -> dict[tuple[str, ...], float]:
    """Return the values of a panel's query by label values, as Grafana asks it with every variable set to all."""
    for name, value in _SUBSTITUTES.items():
        query = query.replace(name, value)
    query = re.sub(r"\$\w+", ".*", query)
    of_scraping = ("__name__", "instance", "job")
    return {
        tuple(labels[name] for name in sorted(labels) if name not in of_scraping): value
        for labels, value in scene.ask(query)
    }


def fill_the_dashboards(scene: Scene) -> None:
    """Create the rest of what a cluster sees in a week.

    This means refusals, changed prices, unknown GPUs, and runs that follow the advice.
    """
    refused = {"constraints": {"gpus": 8, "allowedPools": ["nowhere"]}}
    baseline = {"pool": "a100-80", "gpus": 8}
    third = scene.apply("third-with-baseline", baseline=baseline)
    token = scene.token()
    cheapest = {"objective": "cost", "constraints": {"maxGpus": 8}}
    pool = scene.apply("thrifty", **cheapest)["recommendation"]["pool"]
    planned = {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "bf16", "steps": 1000}
    for turn in range(3):
        # Prometheus must see a series before it can see it grow.
        scene.create(f"refused-{turn}", **refused)
        scene.create(f"planned-{turn}", training=planned)
        price = 1e-3 if turn % 2 == 0 else 1e3
        document = {
            "apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": {"name": "bargain"},
            "spec": {"selector": {"node.kubernetes.io/instance-type": "g6.48xlarge"},
                     "price": {"perGpuHour": price, "currency": "USD"}},
        }  # fmt: skip
        scene.kubectl("apply", "-f", "-", input=json.dumps(document))

        def moved(cheap: bool = turn % 2 == 0) -> bool:
            status = scene.with_field("thrifty", "recommendation") or {}
            return (status["recommendation"]["pool"] == "bargain") == cheap

        wait_for(moved, f"another pool than {pool}", 120)
        seconds = third["recommendation"]["stepSeconds"]["target"]
        report = json.dumps({"stepSeconds": seconds, "steps": 50, "gpus": 8}).encode()
        assert scene.put(token, "third-with-baseline", report) == (202, "accepted")
        wait_for(lambda turn=turn: scene.with_field(f"refused-{turn}", "conditions"), "a refusal", 120)
        scrapes = scene.value(_SCRAPES) or 0
        wait_for(lambda seen=scrapes: (scene.value(_SCRAPES) or 0) > seen + 1, "a scrape", 60)


def unfilled(scene: Scene) -> list[str]:
    """Return the errors of the panels: queries without a value, and values that differ from the story's."""
    wrong = []
    for board, title, legend, query in panels():
        series = shown(scene, query)
        has_value = any(math.isfinite(value) and value for value in series.values())
        if not (has_value or (title in EMPTY and series)):
            wrong.append(f"{board}: {title}: {legend} shows {series}")
        wrong += [
            f"{board}: {title} shows {series.get(labels)} for {labels} of {list(series)}"
            for labels, expected in EXPECTED.get(title, {}).items()
            if series.get(labels) != expected
        ]
    return wrong


def panels() -> list[tuple[str, str, str, str]]:
    """Return board, title, legend and query of every query on the dashboards."""
    return [
        (name, panel.title, legend, query)
        for name, board in dashboards.BOARDS.items()
        for panel in board.panels
        for legend, query in ((legend, dashboards.scoped(query)) for legend, query in panel.queries.items())
    ]
