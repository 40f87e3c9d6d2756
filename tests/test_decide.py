"""What jobs should say, decided from values alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from advice_values import advice
from operator_store import job
from tilecast import jobs
from tilecast.jobs import Job
from tilecast_operator.answer import Declined
from tilecast_operator.controllers import job_desired
from tilecast_operator.controllers.desired import Evidence, JobFacts, decide
from tilecast_operator.controllers.targets import Target
from tilecast_operator.objects.documents import POOL
from tilecast_operator.objects.view import View
from tilecast_operator.report import better_placement, job_status
from tilecast_operator.report.job_status import Aspect

NOW_S, LATER_S = 1_767_225_600.0, 1_767_229_200.0
BETTER = Aspect("True", "PlaceFree", "fsdp8 on 8 fast would take 1 s a step")


def facts(before: dict[str, Any] | None = None, **changes: Any) -> JobFacts:
    """Return the facts about a job with this status."""
    body = job()
    body["metadata"] |= {"uid": "u", "generation": 1, **changes.pop("metadata", {})}
    values = {"is_off": False, "now": NOW_S, **changes}
    return JobFacts(View.of(body), job_status.stored(json.dumps(before or {}).encode()), **values)


def answered() -> dict[str, Any]:
    """Return the status of a job that was advised and waits."""
    return decide(facts(answer=advice())).status.document()


def condition(status: Any, kind: str) -> tuple[str, str]:
    (item,) = (item for item in status.conditions if item.type == kind)
    return item.status, item.reason


def test_an_answer_is_said_in_status_annotations_and_event() -> None:
    want = decide(facts(answer=advice()))
    assert want.status.recommendation is not None and want.status.recommendation.pool == "h100-sxm"
    assert want.annotations is not None and want.annotations[POOL] == "h100-sxm"
    assert want.note is not None and want.note.type == "Normal" and want.news is None


def test_in_mode_off_the_status_alone_is_written() -> None:
    want = decide(facts(answer=advice(), is_off=True))
    assert want.status.recommendation is not None and want.annotations == {} and want.note is None


def test_a_job_that_is_set_aside_keeps_its_annotations() -> None:
    want = decide(facts(answer=Declined("InputQuarantined", "the operator died"), is_set_aside=True))
    assert condition(want.status, "Ready") == ("False", "InputQuarantined")
    assert want.annotations is None and want.note is None


def test_the_forecast_is_frozen_when_the_job_has_started() -> None:
    started = {"annotations": {"tilecast.dev/started": "true"}}
    assert not facts(answer=advice()).has_started
    running = facts(answered(), metadata=started)
    assert running.has_started and running.keeps_forecast
    assert decide(running).status.forecast is not None


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_target_that_is_gone_keeps_its_last_condition(is_gone: bool) -> None:
    target = Target("Job/x", advice(), Aspect("True", "Placed", "done"), has_started=True, is_gone=is_gone)
    want = decide(facts(answered(), evidence=Evidence(target)))
    assert any(item.type == "Applied" and item.reason == "Placed" for item in want.status.conditions) == (not is_gone)


def test_reports_that_do_not_count_are_said_to_be_refused() -> None:
    evidence = Evidence(refusal="-1 s is no step")
    for one in (facts(answer=advice(), evidence=evidence), facts(answered(), evidence=evidence)):
        assert condition(decide(one).status, "ObservationsAvailable") == ("False", "Refused")


def test_a_better_place_is_news_once() -> None:
    first = decide(facts(answered(), better=BETTER))
    assert condition(first.status, better_placement.KIND) == ("True", "PlaceFree")
    assert first.news is not None and first.news.reason == "PlaceFree" and first.note is None
    again = decide(facts(first.status.document(), better=BETTER, now=LATER_S))
    assert again.news is None and again.status.document() == first.status.document()
    assert decide(facts(answered(), better=BETTER, is_off=True)).news is None


def test_the_same_facts_decide_the_same() -> None:
    assert decide(facts(answered())) == decide(facts(answered(), now=LATER_S)), "no time is written anew"


def running_job(**annotations: str) -> Job:
    """Return a job that runs, with annotations of ours."""
    document = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "a", "namespace": "b", "uid": "c", "annotations": annotations},
        "spec": {"suspend": False, "template": {"spec": {"containers": []}}},
        "status": {"active": 1},
    }
    return jobs.read(document)


def test_a_job_is_annotated_and_told_once() -> None:
    want = job_desired.decide(running_job(), advice(), is_placed=False)
    assert want.annotations is not None and want.annotations[POOL] == "h100-sxm" and want.missed is None
    assert want.note is not None and not want.is_change
    again = job_desired.decide(running_job(**want.annotations), advice(), is_placed=False)
    assert (again.annotations, again.note) == (None, None)
    other = job_desired.decide(running_job(**want.annotations), advice(inputs_hash="ff" * 32), is_placed=False)
    assert other.annotations is not None and other.note is not None and other.is_change


def test_a_job_that_started_before_it_could_be_placed_is_told_why() -> None:
    want = job_desired.decide(running_job(), advice(), is_placed=True)
    assert want.missed is not None and want.missed.text.startswith("AlreadyStarted: ")
    assert want.annotations is not None and want.annotations[jobs.APPLIED] == "AlreadyStarted"
    again = job_desired.decide(running_job(**want.annotations), advice(), is_placed=True)
    assert (again.missed, again.annotations, again.note) == (None, None, None)


def test_a_job_without_advice_loses_its_annotations_and_is_told() -> None:
    shown = job_desired.decide(running_job(), advice(), is_placed=False).annotations
    assert shown is not None
    want = job_desired.decide(running_job(**shown), Declined("NoPools", "there is none"), is_placed=False)
    assert want.annotations == {} and want.note is not None and want.is_change
