"""What jobs should say, decided from values alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from advice_values import advice
from operator_store import job, node
from tilecast import jobs, nodes
from tilecast.jobs import Job
from tilecast.planner.problem import JobOption, UnplannedJob
from tilecast.spec import SpecError
from tilecast_operator.controllers.desired import (
    TargetWithMeasurements,
    TrainingJobInputs,
    decide_job,
    decide_training_job,
)
from tilecast_operator.controllers.targets import Target
from tilecast_operator.kube.kinds import Key
from tilecast_operator.objects.documents import POOL
from tilecast_operator.objects.view import View
from tilecast_operator.outcome import AdviceRefusal
from tilecast_operator.queue_rows import PlannedQueue, QueueRow, QueueState, make_capacities
from tilecast_operator.report import better_placement, job_status
from tilecast_operator.report.job_status import ConditionContent
from tilecast_operator.report.pools import PoolInputs, decide_pool
from tilecast_operator.report.queue_advice import QueueAdviceInputs, QueuePlanInputs, decide_queue_advice, plan_queue

NOW_S, LATER_S = 1_767_225_600.0, 1_767_229_200.0
BETTER = ConditionContent("True", "PlaceFree", "fsdp8 on 8 fast would take 1 s a step")


def facts(before: dict[str, Any] | None = None, **changes: Any) -> TrainingJobInputs:
    """Return the facts about a job with this status."""
    body = job()
    body["metadata"] |= {"uid": "u", "generation": 1, **changes.pop("metadata", {})}
    values = {"is_off": False, **changes}
    return TrainingJobInputs(
        View.from_object(body), job_status.parse_status(json.dumps(before or {}).encode()), **values
    )


def answered() -> dict[str, Any]:
    """Return the status of a job that was advised and waits."""
    return decide_training_job(facts(answer=advice()), NOW_S).status.document()


def condition(status: Any, kind: str) -> tuple[str, str]:
    (item,) = (item for item in status.conditions if item.type == kind)
    return item.status, item.reason


def test_an_answer_is_said_in_status_annotations_and_event() -> None:
    want = decide_training_job(facts(answer=advice()), NOW_S)
    assert want.status.recommendation is not None and want.status.recommendation.pool == "h100-sxm"
    assert want.annotations is not None and want.annotations[POOL] == "h100-sxm"
    assert want.note is not None and want.note.type == "Normal" and want.news is None


def test_in_mode_off_the_status_alone_is_written() -> None:
    want = decide_training_job(facts(answer=advice(), is_off=True), NOW_S)
    assert want.status.recommendation is not None and want.annotations == {} and want.note is None


def test_a_job_that_is_set_aside_keeps_its_annotations() -> None:
    want = decide_training_job(
        facts(answer=AdviceRefusal("InputQuarantined", "the operator died"), is_set_aside=True), NOW_S
    )
    assert condition(want.status, "Ready") == ("False", "InputQuarantined")
    assert want.annotations is None and want.note is None


def test_the_forecast_is_frozen_when_the_job_has_started() -> None:
    started = {"annotations": {"tilecast.dev/started": "true"}}
    assert not facts(answer=advice()).has_started
    running = facts(answered(), metadata=started)
    assert running.has_started and running.keeps_forecast
    assert decide_training_job(running, NOW_S).status.forecast is not None


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_target_that_is_gone_keeps_its_last_condition(is_gone: bool) -> None:
    target = Target("Job/x", advice(), ConditionContent("True", "Placed", "done"), has_started=True, is_gone=is_gone)
    want = decide_training_job(facts(answered(), evidence=TargetWithMeasurements(target)), NOW_S)
    assert any(item.type == "Applied" and item.reason == "Placed" for item in want.status.conditions) == (not is_gone)


def test_reports_that_do_not_count_are_said_to_be_refused() -> None:
    evidence = TargetWithMeasurements(refusal="-1 s is no step")
    for one in (facts(answer=advice(), evidence=evidence), facts(answered(), evidence=evidence)):
        assert condition(decide_training_job(one, NOW_S).status, "ObservationsAvailable") == ("False", "Refused")


def test_a_better_place_is_news_once() -> None:
    first = decide_training_job(facts(answered(), better=BETTER), NOW_S)
    assert condition(first.status, better_placement.KIND) == ("True", "PlaceFree")
    assert first.news is not None and first.news.reason == "PlaceFree" and first.note is None
    again = decide_training_job(facts(first.status.document(), better=BETTER), LATER_S)
    assert again.news is None and again.status.document() == first.status.document()
    assert decide_training_job(facts(answered(), better=BETTER, is_off=True), NOW_S).news is None


def test_the_same_facts_decide_the_same() -> None:
    assert decide_training_job(facts(answered()), NOW_S) == decide_training_job(facts(answered()), LATER_S), (
        "no time is written anew"
    )


def running_job(**annotations: str) -> Job:
    """Return a job that runs, with annotations of ours."""
    document = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "a", "namespace": "b", "uid": "c", "annotations": annotations},
        "spec": {"suspend": False, "template": {"spec": {"containers": []}}},
        "status": {"active": 1},
    }
    return jobs.read_job(document)


def test_a_job_is_annotated_and_told_once() -> None:
    want = decide_job(running_job(), advice(), writes_advice=False)
    assert want.annotations is not None and want.annotations[POOL] == "h100-sxm" and want.missed is None
    assert want.note is not None and not want.is_change
    again = decide_job(running_job(**want.annotations), advice(), writes_advice=False)
    assert (again.annotations, again.note) == (None, None)
    other = decide_job(running_job(**want.annotations), advice(inputs_hash="ff" * 32), writes_advice=False)
    assert other.annotations is not None and other.note is not None and other.is_change


def test_a_job_that_started_before_it_could_be_placed_is_told_why() -> None:
    want = decide_job(running_job(), advice(), writes_advice=True)
    assert want.missed is not None and want.missed.text.startswith("AlreadyStarted: ")
    assert want.annotations is not None and want.annotations[jobs.APPLIED] == "AlreadyStarted"
    again = decide_job(running_job(**want.annotations), advice(), writes_advice=True)
    assert (again.missed, again.annotations, again.note) == (None, None, None)


def test_a_job_without_advice_loses_its_annotations_and_is_told() -> None:
    shown = decide_job(running_job(), advice(), writes_advice=False).annotations
    assert shown is not None
    want = decide_job(running_job(**shown), AdviceRefusal("NoPools", "there is none"), writes_advice=False)
    assert want.annotations == {} and want.note is not None and want.is_change


FOUND = nodes.discover_pools([nodes.read_node(node("n1")), nodes.read_node(node("n2"))]).entries[0]


def pool_view(document: dict[str, Any], status: Any = None) -> View:
    """Return the view of a GPUPool with this status."""
    metadata = document["metadata"] | {"uid": "u", "resourceVersion": "1", "generation": 1}
    return View.from_object({**document, "metadata": metadata, "status": status or {}})


def test_a_discovered_pool_is_written_and_then_gets_its_status() -> None:
    want = decide_pool(PoolInputs(FOUND), NOW_S)
    assert want.document is not None and want.status is None and not want.is_deleted
    again = decide_pool(PoolInputs(FOUND, pool_view(want.document)), NOW_S)
    assert again.document is None and again.status is not None and again.status.nodes == 2
    assert again.missing_since_s is None
    later = pool_view(want.document, again.status.document())
    assert decide_pool(PoolInputs(FOUND, later), LATER_S).status == again.status, "no time is written anew"
    without = decide_pool(PoolInputs(FOUND, is_discovering=False), NOW_S)
    assert (without.document, without.status) == (None, None)


def test_a_pool_whose_nodes_went_says_since_when() -> None:
    document = nodes.gpupool_document(FOUND)
    assert document is not None
    fewer = nodes.discover_pools([nodes.read_node(node("n1"))], [document]).entries[0]
    first = decide_pool(PoolInputs(fewer, pool_view(document)), NOW_S)
    assert first.status is not None and first.missing_since_s == NOW_S
    second = decide_pool(PoolInputs(fewer, pool_view(document, first.status.document())), LATER_S)
    assert second.missing_since_s == NOW_S


def test_an_obsolete_pool_is_deleted_and_an_invalid_one_says_why() -> None:
    document = nodes.gpupool_document(FOUND)
    assert document is not None
    view = pool_view(document)
    assert decide_pool(PoolInputs(None, view, is_obsolete=True), NOW_S).is_deleted
    assert not decide_pool(PoolInputs(None, view, is_obsolete=True, is_discovering=False), NOW_S).is_deleted
    assert not decide_pool(PoolInputs(None, None, is_obsolete=True), NOW_S).is_deleted
    wrong = decide_pool(PoolInputs(SpecError("gpu", "there is none", "name one"), view), NOW_S)
    assert wrong.document is None and condition(wrong.status, "Ready") == ("False", "InvalidSpec")


ROW = QueueRow(Key("Job", "default", "a"), (JobOption("h100-sxm", 8, 3600.0, 3000.0, 4000.0, 1.0, "fsdp8"),), NOW_S)


def test_a_plan_gives_each_job_its_position_or_the_reason_why_it_has_none() -> None:
    refused = (
        UnplannedJob("Job/default/b", "it asks too much", "ask less"),
        UnplannedJob("Namespace/x", "odd", "none"),
    )
    state = QueueState((ROW,), refused, make_capacities([FOUND], {}, [ROW]))
    plan, positions, _ = plan_queue(QueuePlanInputs(state, "completion", {}), NOW_S)
    assert plan.report is not None and positions.keys() == {ROW.key, Key("Job", "default", "b")}
    assert positions[ROW.key].pool == "h100-sxm" and positions[Key("Job", "default", "b")].pool is None
    again = plan_queue(QueuePlanInputs(state, "completion", positions), NOW_S + 1)
    assert again.positions == positions, "the time that passes changes no position"


def test_the_queue_advice_is_written_with_its_spec_and_then_its_status() -> None:
    facts = QueueAdviceInputs(PlannedQueue(), "completion", 2.0, None)
    first = decide_queue_advice(facts, NOW_S)
    assert first.spec is not None and first.status is None
    body = {"kind": "QueueAdvice", "metadata": {"name": "cluster", "generation": 3}, "spec": first.spec}
    second = decide_queue_advice(replace(facts, view=View.from_object(body)), NOW_S)
    assert second.spec is None and second.status is not None and second.status.observed_generation == 3
    third = decide_queue_advice(
        replace(facts, view=View.from_object({**body, "status": second.status.document()})), LATER_S
    )  # fmt: skip
    assert third.status == second.status, "no time is written anew"
