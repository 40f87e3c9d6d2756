"""A target for a step, and the fewest GPUs before a deadline, by the forecast or by the upper end of its range."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilecast import zoo
from tilecast.advice import Request, advise
from tilecast.advice.what_if.changes import apply_change
from tilecast.api.training_job import read_request, training_job_document
from tilecast.inputs.gpu_list import parse_gpu_list
from tilecast.spec import SpecError, Workload

WORKLOAD = Workload(zoo.find_preset("llama-3.1-8b"), 8192, 128, steps=10_000)
POOLS = parse_gpu_list("h100-sxm:64")
TARGET = Request("x", WORKLOAD, "fewestGpus", target_step_s=3.0)


def test_the_fewest_gpus_for_a_step() -> None:
    best = advise(TARGET, POOLS).best
    assert best is not None and best.step_s <= 3.0
    fewer = advise(replace(TARGET, target_step_s=None, objective="time"), parse_gpu_list(f"h100-sxm:{best.gpus - 8}"))
    assert fewer.best is not None and fewer.best.step_s > 3.0


def test_the_upper_end_of_the_range_may_have_to_meet_the_target() -> None:
    plain, safe = advise(TARGET, POOLS).best, advise(replace(TARGET, limits_at="upperBound"), POOLS).best
    assert plain is not None and safe is not None
    assert safe.upper_s <= 3.0 < plain.upper_s and safe.gpus > plain.gpus
    assert "may miss the target" in plain.reason and "may miss" not in safe.reason


@pytest.mark.parametrize("limits_at", ["forecast", "upperBound"])
@pytest.mark.slow
def test_a_target_that_nobody_meets_is_told_with_more_nodes(limits_at: str) -> None:
    request = replace(TARGET, target_step_s=1.0, limits_at=limits_at)  # type: ignore[arg-type]
    (rejection,) = advise(request, POOLS).rejections
    assert rejection.code == "TargetMissed" and rejection.change is not None
    after, pool = apply_change(rejection.change, request, POOLS[0])
    best = advise(after, [pool]).best
    assert best is not None and (best.step_s if limits_at == "forecast" else best.upper_s) <= 1.0
    limited = replace(request, constraints=replace(request.constraints, max_gpus=64))
    (rejection,) = advise(limited, POOLS).rejections
    assert rejection.change is not None and rejection.change.input == "targetStepSeconds"
    assert advise(apply_change(rejection.change, limited, POOLS[0])[0], POOLS).best is not None


def test_the_cheapest_plan_for_a_step() -> None:
    best = advise(replace(TARGET, objective="cost", target_step_s=1.76), POOLS).best
    free = advise(replace(TARGET, objective="cost", target_step_s=None), POOLS).best
    assert best is not None and free is not None and best.step_s <= 1.76 < free.step_s
    assert (best.cost_per_1000_steps or 0.0) <= 1.1 * (free.cost_per_1000_steps or 0.0)


def test_the_fewest_gpus_before_a_deadline() -> None:
    request = Request("x", WORKLOAD, "fewestGpusBeforeDeadline", deadline_s=86_400.0)
    plain, safe = advise(request, POOLS).best, advise(replace(request, limits_at="upperBound"), POOLS).best
    assert plain is not None and safe is not None
    assert (plain.finish_s or 0.0) <= 86_400 < (plain.finish_s or 0.0) * plain.upper_s / plain.step_s
    assert (safe.finish_s or 0.0) * safe.upper_s / safe.step_s <= 86_400 and safe.gpus > plain.gpus


def test_a_job_states_a_target() -> None:
    training = {"globalBatchSize": 8, "sequenceLength": 1024}
    spec = {"model": {"preset": "gpt2"}, "training": training, "targetStepSeconds": 2, "limitsAt": "upperBound"}
    request = read_request(training_job_document("x", spec))
    assert (request.target_step_s, request.limits_at) == (2.0, "upperBound")
    for wrong in ({"targetStepSeconds": 0}, {"limitsAt": "never"}, {"objective": "fewestGpusBeforeDeadline"}):
        with pytest.raises(SpecError):
            read_request(training_job_document("x", {**spec, **wrong}))


@pytest.mark.parametrize("objective", ["time", "cost", "fewestGpus", "timeToFinish"])
@pytest.mark.parametrize("limits_at", ["forecast", "upperBound"])
@pytest.mark.slow
def test_a_deadline_goes_with_every_objective_and_a_late_run_says_what_would_be_on_time(
    objective: str, limits_at: str
) -> None:
    pools = [replace(pool, price_per_gpu_hour=3.0) for pool in parse_gpu_list("h100-sxm:64,a100-80:64")]
    free = Request("x", WORKLOAD, objective)
    easy = replace(free, deadline_s=1e9, limits_at=limits_at)  # type: ignore[arg-type]
    assert advise(easy, pools).notes == advise(free, pools).notes
    for deadline_s, can_be_met in ((30_000.0, True), (60.0, False)):
        request = replace(easy, deadline_s=deadline_s)
        advice, plain = advise(request, pools), advise(free, pools)
        assert advice.best is not None and plain.best is not None
        assert (advice.best.plan, advice.best.gpus) == (plain.best.plan, plain.best.gpus)
        ratio = advice.best.upper_s / advice.best.step_s if limits_at == "upperBound" else 1.0
        is_late = (advice.best.finish_s or 0.0) * ratio > deadline_s
        notes = [note for note in advice.notes if " late" in note]
        assert bool(notes) == is_late
        if is_late:
            ahead = advise(replace(request, objective="fewestGpusBeforeDeadline"), pools).best
            assert (ahead is not None) == can_be_met
            wanted = f"on time would be {ahead.gpus} GPUs of {ahead.pool.name}" if ahead else "no plan is on time"
            assert wanted in notes[0] and len(notes[0]) <= 256
    assert "misses the deadline" in (advice.best.reason if advice.best else "")


def test_a_deadline_needs_the_length_of_the_run() -> None:
    unknown = Request("x", replace(WORKLOAD, steps=None), deadline_s=60.0)
    with pytest.raises(SpecError, match="deadlineSeconds: says nothing without the length of the run"):
        advise(unknown, POOLS)
    with pytest.raises(SpecError, match="needs deadlineSeconds"):
        spec = {"model": {"preset": "gpt2"}, "training": {"globalBatchSize": 8, "steps": 5}}
        read_request(training_job_document("x", {**spec, "objective": "cheapestBeforeDeadline"}))
