"""Advice as written to objects: its sizes and shapes, and no change where the answer is unchanged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advice_values import advice, offer, pool, refused
from tilecast import constants, nodes, zoo
from tilecast.advice import Advice, Request, advise
from tilecast.api.base import API_VERSION, round_to_six_digits
from tilecast.api.calibration import PoolCalibration
from tilecast.api.gpu_pool import GPUPoolStatus
from tilecast.api.status import Condition, Summary, TrainingJobStatus
from tilecast.learning.calibration import Calibration, Correction
from tilecast.render import units
from tilecast.spec import SpecError, Workload
from tilecast_operator.assembly import ALTERNATIVES
from tilecast_operator.free_gpus import FreeGpus
from tilecast_operator.kube.documents import EventContent, WriterIdentity, make_event_document
from tilecast_operator.kube.kinds import Key
from tilecast_operator.metrics import Metrics
from tilecast_operator.objects.documents import ADVICE_KEYS, GPUS, NODE_SELECTOR, PARALLELISM, POOL, STEP_SECONDS
from tilecast_operator.outcome import AdviceOutcome, AdviceRefusal
from tilecast_operator.report import better_placement, job_status, pools
from tilecast_operator.report.advice import MAX_BYTES, make_advice_annotations, make_event, size_bytes

FREE = job_status.CapacityStatus(
    job_status.ConditionContent("True", "GpusFree", "the GPUs are free now, as Kueue shows"), True
)
NOW, LATER = "2026-01-02T03:04:05Z", "2027-01-02T03:04:05Z"
TYPES = ["Ready", "RecommendationProvided", "LowConfidence", "CapacityAvailable", "Applied", "ObservationsAvailable"]
VERDICTS: dict[str, AdviceOutcome] = {
    "advised": advice(),
    "nothing fits": advice(offers=(), baseline=None),
    "refused": refused(),
}


def whole(verdict: AdviceOutcome, is_off: bool = False) -> dict[str, Any]:
    return job_status.make_status(verdict, 3, job_status.make_conditions(verdict, is_off, 3, NOW, (), FREE)).document()


@pytest.mark.parametrize("verdict", VERDICTS.values(), ids=VERDICTS.keys())
def test_every_status_satisfies_the_schema(verdict: AdviceOutcome) -> None:
    TrainingJobStatus.model_validate(json.loads(json.dumps(whole(verdict), allow_nan=False)))


@pytest.mark.parametrize("verdict", VERDICTS.values(), ids=VERDICTS.keys())
def test_every_condition_is_always_there(verdict: AdviceOutcome) -> None:
    conditions = job_status.make_conditions(verdict, False, 3, NOW, (), FREE)
    assert [item.type for item in conditions] == TYPES
    assert {item.observed_generation for item in conditions} == {3}
    assert all(item.reason.isalnum() and item.message for item in conditions)


def test_the_crds_name_every_condition() -> None:
    of_jobs, of_pools = (
        model.model_fields["conditions"].description or "" for model in (TrainingJobStatus, GPUPoolStatus)
    )
    assert [name for name in (*TYPES, better_placement.KIND) if name not in of_jobs] == []
    entry = nodes.discover_pools([], [_gpu_pool(nodeType="p5.48xlarge", maxNodes=4)]).entries[0]
    written = pools.make_pool_status(entry, 1, NOW, (), learnt=(PoolCalibration(), None)).conditions
    assert len(written) == 4
    assert [item.type for item in written if item.type not in of_pools] == []


def test_conditions_keep_their_time_while_their_status_stays() -> None:
    first = job_status.make_conditions(advice(), False, 1, NOW, (), FREE)
    again = job_status.make_conditions(advice(), False, 2, LATER, first, FREE)
    assert {item.last_transition_time for item in again} == {NOW}
    fallen = {item.type: item for item in job_status.make_conditions(refused(), False, 2, LATER, first, FREE)}
    assert fallen["Ready"].last_transition_time == LATER
    assert fallen["Applied"].last_transition_time == NOW


def test_a_refusal_is_reason_and_message_and_nothing_else() -> None:
    status = whole(refused())
    assert status.keys() == {"observedGeneration", "conditions", "summary"}
    assert status["summary"] == {"reason": "InvalidSpec"}
    ready = status["conditions"][0]
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert ready["message"] == "spec.training.globalBatchSize: 0 is out of range; use 1 or more"


def test_nothing_fits_says_why_for_each_pool() -> None:
    ready = whole(VERDICTS["nothing fits"])["conditions"][0]
    assert ready["reason"] == "NoFittingPlan"
    assert "t4: no BF16 units; allow fp16" in ready["message"]


def test_recommendation_and_summary() -> None:
    status = whole(advice())
    recommendation = status["recommendation"]
    assert (recommendation["pool"], recommendation["gpus"], recommendation["gpusPerNode"]) == ("h100-sxm", 16, 8)
    assert recommendation["parallelism"]["data"] * recommendation["parallelism"]["tensor"] == 16
    assert sum(recommendation["breakdown"].values()) == pytest.approx(recommendation["stepSeconds"]["target"], rel=1e-5)
    assert status["summary"] == {
        "pool": "h100-sxm",
        "gpus": "2x8",
        "plan": "fsdp8,tp2",
        "step": "8.2s",
        "range": "7.6-9s",
        "speedup": "5.5x",
        "costPer1000Steps": "251 USD",
        "finish": "22.8h",
        "memory": "58-70/79 GiB",
        "confidence": "-7/+10 %",
        "reason": "Advised",
    }


def test_what_is_not_known_is_absent() -> None:
    bare = offer(cost_per_1000_steps=None, finish_s=None)
    status = whole(advice(offers=(bare,), baseline=None, uncapped=None, rejections=()))
    assert not status.keys() & {"baseline", "uncapped", "rejected"}
    assert not status["recommendation"].keys() & {"costPer1000Steps", "currency", "finishSeconds"}
    assert not status["summary"].keys() & {"speedup", "costPer1000Steps", "finish", "error", "fitsNow", "target"}


MEASURED = Calibration((Correction(runs=5, own=5, observations=50),))


def low_confidence(verdict: AdviceOutcome) -> Condition:
    return next(
        item for item in job_status.make_conditions(verdict, False, 1, NOW, (), FREE) if item.type == "LowConfidence"
    )


@pytest.mark.parametrize("preset", ["llama-2-7b", "bert-large", "resnet-50", "vit-l-16"])
def test_low_confidence_is_a_range_wider_than_the_familys(preset: str) -> None:
    family = (model := zoo.find_preset(preset)).family
    asked = Request("a-job", Workload(model=model, sequence_length=512, global_batch=64))
    usual = constants.shipped_widths().unstated.get(family, constants.shipped_widths().unstated["other"])
    for factor, expected in ((1.0, "False"), (1.14, "False"), (1.16, "True"), (2.0, "True")):
        ratio = math.exp(factor * usual)
        ranged = offer(pool=pool(calibration=MEASURED), lower_s=8.2 / ratio, upper_s=8.2 * ratio)
        verdict = low_confidence(advice(request=asked, offers=(ranged,)))
        assert (verdict.status, verdict.reason) == (expected, "WideRange" if expected == "True" else "UsualRange")
        assert ("widen it" in verdict.message) == (expected == "True")
        assert f"family {family}" in verdict.message and advice().confidence in verdict.message


def test_an_ordinary_job_is_not_low_confidence_once_its_like_was_measured() -> None:
    asked = Request("a-job", Workload(model=zoo.find_preset("llama-2-7b"), sequence_length=4096, global_batch=64))
    assert low_confidence(advise(asked, [pool(max_nodes=1, calibration=MEASURED)])).status == "False"
    unproven = low_confidence(advise(asked, [pool(max_nodes=1)]))
    assert (unproven.status, unproven.reason) == ("True", "FewObservations")
    assert "0 of 3 runs" in unproven.message


def test_a_free_pool_costs_nothing_and_says_so() -> None:
    status = whole(advice(offers=(offer(pool=pool(price_per_gpu_hour=0.0), cost_per_1000_steps=0.0),)))
    assert status["summary"]["costPer1000Steps"] == "0 USD"
    assert status["recommendation"]["costPer1000Steps"] == 0
    TrainingJobStatus.model_validate(status)
    free = _gpu_pool(nodeType="p5.48xlarge", maxNodes=0, price={"perGpuHour": 0})
    pool_status = pools.make_pool_status(nodes.discover_pools([], [free]).entries[0], 1, NOW, ()).document()
    assert pool_status["summary"]["price"] == "0 USD" and "free" not in pool_status["summary"]


def test_a_pool_says_what_holds_for_some_of_its_nodes_only() -> None:
    amount = {"nvidia.com/gpu": "8"}
    everyone = [
        {
            "metadata": {"name": name, "labels": {"node.kubernetes.io/instance-type": "p5.48xlarge"}},
            "spec": {"unschedulable": name == "b"},
            "status": {"capacity": amount, "allocatable": amount},
        }
        for name in ("a", "b")
    ]
    status = pools.make_pool_status(nodes.discover_pools(everyone).entries[0], 1, NOW, ()).document()
    assert status["conditions"][0]["message"] == "2 nodes with 16 GPUs; 1 of 2 nodes (b) is cordoned"
    assert (status["nodes"], status["summary"]["shape"]) == (2, "2x8"), "the operator counts what the cluster has"


def test_lists_and_texts_stay_in_bounds() -> None:
    long = "x" * 5000
    rejections = tuple(replace(advice().rejections[0], message=long, remedy=long) for _ in range(200))
    offers = tuple(offer(reason=long) for _ in range(50))
    for verdict in (advice(offers=offers, rejections=rejections), advice(offers=(), rejections=rejections)):
        TrainingJobStatus.model_validate(whole(verdict))
    TrainingJobStatus.model_validate(whole(AdviceRefusal("InvalidSpec", long)))


def test_annotations_name_the_plan_and_stay_small() -> None:
    annotations = make_advice_annotations(advice())
    assert tuple(annotations) == ADVICE_KEYS
    assert annotations[POOL] == "h100-sxm" and annotations[GPUS] == "16"
    assert json.loads(annotations[NODE_SELECTOR]) == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert json.loads(annotations[PARALLELISM])["tensor"] == 2
    assert float(annotations[STEP_SECONDS]) == 8.2
    crowded = pool(node_selector={f"example.com/{'k' * 200}{i}": "v" * 63 for i in range(16)})
    big = make_advice_annotations(advice(offers=(offer(pool=crowded),)))
    assert size_bytes(annotations) < 1024 and size_bytes(big) < MAX_BYTES


@pytest.mark.parametrize("verdict", [VERDICTS["nothing fits"]])
def test_no_recommendation_no_annotations(verdict: Advice) -> None:
    assert make_advice_annotations(verdict) == {}


def test_events_on_change_only() -> None:
    summary = Summary.model_validate(whole(advice())["summary"])
    first = make_event(advice(), Summary(), summary)
    assert first is not None and (first.type, first.reason) == ("Normal", "RecommendationUpdated")
    assert make_event(advice(), summary, summary) is None
    moved = make_event(advice(), summary.model_copy(update={"pool": "t4", "plan": "dp4"}), summary)
    assert moved is not None and "(was dp4 on 2x8 t4)" in moved.text
    lost = make_event(refused(), summary, Summary(reason="InvalidSpec"))
    assert lost is not None and (lost.type, lost.reason) == ("Warning", "RecommendationUnavailable")


def test_the_same_event_has_the_same_name() -> None:
    first_note, about = EventContent("Normal", "RecommendationUpdated", "text"), Key("TrainingJob", "ns", "job")
    first = make_event_document(first_note, WriterIdentity("c", "me", ()), about, API_VERSION, "uid", NOW)
    again = make_event_document(first_note, WriterIdentity("c", "another", ()), about, API_VERSION, "uid", LATER)
    other = make_event_document(
        replace(first_note, text="other"), WriterIdentity("c", "me", ()), about, API_VERSION, "uid", NOW
    )
    assert first["metadata"]["name"] == again["metadata"]["name"] != other["metadata"]["name"]
    assert first["involvedObject"] == {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "namespace": "ns",
        "name": "job",
        "uid": "uid",
    }


def test_events_that_differ_in_alternatives_only_have_the_same_name() -> None:
    author = WriterIdentity("c", "me", (), ALTERNATIVES)
    texts = ("pool: there is no 'x'; known: a, b", "pool: there is no 'x'; known: a", "pool: there is no 'y'; known: a")
    bodies = [
        make_event_document(EventContent("Warning", "R", text), author, Key("Job", "ns", "j"), "v1", "uid", NOW)
        for text in texts
    ]
    assert [body["message"] for body in bodies] == list(texts)
    first, second, third = (body["metadata"]["name"] for body in bodies)
    assert first == second != third


@given(st.floats(min_value=1e-9, max_value=1e12))
def test_durations_are_short_and_lose_little(seconds: float) -> None:
    text = units.format_duration(seconds)
    named = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    unit = next(name for name in ("us", "ms", "min", "s", "h", "d") if text.endswith(name))
    assert float(text.removesuffix(unit)) * named[unit] == pytest.approx(seconds, rel=6e-3)


@given(st.floats(min_value=0, max_value=1e15))
def test_rounding_is_idempotent_and_close(value: float) -> None:
    once = round_to_six_digits(value)
    assert round_to_six_digits(once) == once
    assert once == pytest.approx(value, rel=1e-5)


def test_pool_status() -> None:
    entry = nodes.discover_pools([], [_gpu_pool(nodeType="p5.48xlarge", maxNodes=4)]).entries[0]
    first = pools.make_pool_status(entry, 2, NOW, ())
    status = first.document()
    GPUPoolStatus.model_validate(status)
    assert status["conditions"][0]["reason"] == "NoNodesNow"
    assert status["summary"] == {
        "gpu": "h100-sxm",
        "shape": "0x8",
        "link": "efa-3200",
        "price": "6.88 USD",
        "origin": "User",
        "reason": "NoNodesNow",
    }
    assert [item["reason"] for item in status["conditions"]] == ["NoNodesNow", "FewerNodes", "NotObserved"]
    assert "free" not in status["gpus"], "what is not known is absent, not zero"
    assert status["facts"]["price"] == {"value": "6.88 USD", "layer": "instance type"}
    wrong = pools.make_pool_status(
        SpecError("spec.gpu.name", "unknown", "write a known one"), 2, LATER, first.conditions
    ).document()
    GPUPoolStatus.model_validate(wrong)
    assert wrong["conditions"][0]["lastTransitionTime"] == LATER
    assert wrong["conditions"][0]["message"] == "spec.gpu.name: unknown; write a known one"


def _gpu_pool(**spec: object) -> dict[str, object]:
    return {"apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": {"name": "mine"}, "spec": spec}


def test_metrics_carry_no_job_names_and_forget_pools_that_are_gone() -> None:
    metrics = Metrics()
    metrics.count_advice(advice(), is_changed=True)
    metrics.count_search(advice(), 0.05)
    report = nodes.discover_pools([], [_gpu_pool(nodeType="p5.48xlarge", maxNodes=4)])
    metrics.set_pool_metrics(report, {"mine": FreeGpus(3, "Pods")})
    value = metrics.registry.get_sample_value
    assert value("tilecast_recommendations_total", {"result": "Advised"}) == 1
    assert value("tilecast_recommendation_changes_total", {"reason": "Advised"}) == 1
    assert value("tilecast_predicted_step_seconds_sum", {"gpu": "h100-sxm"}) == 8.2
    assert value("tilecast_plans_evaluated_total") == 1000
    assert value("tilecast_gpu_capacity", {"pool": "mine", "state": "total"}) == 0
    assert value("tilecast_gpu_capacity", {"pool": "mine", "state": "free"}) == 3
    metrics.set_pool_metrics(nodes.discover_pools([]), {})
    assert value("tilecast_gpu_capacity", {"pool": "mine", "state": "total"}) is None
    names = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    assert all(name.startswith("tilecast_") for name in names)
    used = {label for family in metrics.registry.collect() for sample in family.samples for label in sample.labels}
    assert not used & {"job", "name", "namespace", "uid", "node"}
