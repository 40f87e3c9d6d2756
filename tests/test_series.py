"""The number of series in /metrics stays bounded, whatever users do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from advice_values import advice, offer, pool, request
from tilecast.api.calibration import ObservedRun
from tilecast.learning.calibration import Run
from tilecast_operator.metrics import MOST_GROUPS, Metrics
from tilecast_operator.metrics.groups import DAY_S, OTHER, SCRAPES
from tilecast_operator.observed.calibrator import Calibrator, FittedCalibration, MeasuredForecast
from tilecast_operator.observed.reports import CompleteForecast, StepReport, StepWindow
from tilecast_operator.observed.run_store import RunStore

GPUS = ("h100-sxm", "a100-80", "l4", "t4")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
FAMILIES = tuple(f"family-{number}" for number in range(51))
JOBS = 10_000
MOST_SERIES = 2_000


class StoppedClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def count(metrics: Metrics) -> int:
    return sum(len(family.samples) for family in metrics.registry.collect())


def score(gpu: str, precision: str, family: str, samples: int = 3) -> MeasuredForecast:
    forecast = CompleteForecast.model_validate(
        {
            "pool": gpu,
            "gpus": 8,
            "plan": "fsdp8",
            "rawSeconds": 1.0,
            "stepSeconds": {"target": 1.0, "lowerBound": 0.8, "upperBound": 1.2},
            "group": [gpu, precision, family, "2-8", "w"],
            "followed": True,
            "frozenAt": "2027-01-01T00:00:00Z",
        }
    )
    return MeasuredForecast(
        forecast, StepWindow((1.1,) * samples, samples, "2027-01-01T00:00:00Z", StepReport(1.1, "put"))
    )


def advise_and_report(metrics: Metrics, store: RunStore, jobs: int) -> None:
    """Record advice, measurements and learning for `jobs` jobs, alternating GPU, precision and family."""
    groups = list(product(GPUS, PRECISIONS, FAMILIES))
    pools = {name: pool(name=name, gpu=replace(pool().gpu, name=name)) for name in GPUS}
    plain = request()
    for number in range(jobs):
        gpu, precision, family = groups[number % len(groups)]
        model = replace(plain.workload.model, family=family)
        asked = replace(plain, workload=replace(plain.workload, precision=precision, model=model))
        metrics.count_advice(
            advice(request=asked, offers=(offer(pool=pools[gpu], workload=asked.workload),)), is_changed=False
        )
        metrics.count_observation(score(gpu, precision, family), 1.1, None, None)
        run = Run(gpu, gpu, precision, family, "2-8", "w", 1.0, 1.1, 3, "ddp", "team")
        store.store_run(
            ObservedRun(f"uid-{number}", "2027-01-01T00:00:00Z", run, f"job-{number}", "trainer", "put", "", 8, "dp8")
        )


@pytest.mark.slow
def test_ten_thousand_jobs_of_a_thousand_groups_have_few_series() -> None:
    """165 series once became 77,369 with a job of each group, and never fell."""
    clock = StoppedClock()
    metrics, store = Metrics(clock), RunStore()
    empty = count(metrics)
    advise_and_report(metrics, store, JOBS)
    calibrator = Calibrator(store)
    calibrator.adopt_fit(FittedCalibration.fit(*calibrator.make_fit_arguments()))
    metrics.set_calibration_metrics(calibrator)
    for _ in range(SCRAPES):
        count(metrics)
    full = count(metrics)
    assert empty + 4 * MOST_GROUPS < full < MOST_SERIES, f"{empty} series became {full}"
    clock.now_s += DAY_S + 1
    for item in store.list_all_runs():
        store.drop_run(item.uid)
    calibrator.adopt_fit(FittedCalibration.fit(*calibrator.make_fit_arguments()))
    metrics.set_calibration_metrics(calibrator)
    count(metrics)
    assert count(metrics) == empty


def test_a_group_is_zero_for_two_scrapes_and_then_has_what_was_counted() -> None:
    metrics = Metrics()
    metrics.count_observation(score("t4", "fp16", "cnn"), 1.1, None, None)
    labels = {"gpu": "t4", "precision": "fp16", "family": "cnn", "covered": "true"}
    name = "tilecast_prediction_interval_observations_total"

    def scraped() -> float | None:
        samples = [sample for family in metrics.registry.collect() for sample in family.samples]
        return next((sample.value for sample in samples if (sample.name, sample.labels) == (name, labels)), None)

    assert [scraped() for _ in range(3)] == [0, 0, 1]
    metrics.count_observation(score("t4", "fp16", "cnn"), 1.1, None, None)
    assert scraped() == 2


def test_what_there_is_no_room_for_is_counted_as_other() -> None:
    metrics = Metrics()
    for number in range(MOST_GROUPS + 5):
        metrics.count_observation(score("t4", "fp16", f"family-{number}"), 1.1, None, None)
    for _ in range(SCRAPES + 1):
        count(metrics)
    labels = {"gpu": OTHER, "precision": OTHER, "family": OTHER, "covered": "true"}
    assert metrics.registry.get_sample_value("tilecast_prediction_interval_runs_total", labels) == 5


def test_groups_that_still_report_stay() -> None:
    clock = StoppedClock()
    metrics = Metrics(clock)
    for _ in range(4):
        clock.now_s += DAY_S / 2
        metrics.count_observation(score("t4", "fp16", "cnn"), 1.1, None, None)
        count(metrics)
    labels = {"gpu": "t4", "precision": "fp16", "family": "cnn", "covered": "true"}
    assert metrics.registry.get_sample_value("tilecast_prediction_interval_observations_total", labels) == 4
