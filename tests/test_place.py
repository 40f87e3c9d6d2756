"""Writes of mode Initial: patches that change what they should, and release only what Tilecast holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from existing_jobs import ONE_OF_EACH, set_suspend
from operator_store import patched
from tilecast.api import documents
from tilecast.jobs import (
    ADMISSION_GATES,
    ADVISOR,
    APPLIED,
    MODE,
    NEXT_QUEUE,
    QUEUE,
    Placement,
    compute_changes,
    read_job,
)
from tilecast_operator.controllers import patches

EXISTING = sorted((Path(__file__).parent.parent / "examples" / "existing").glob("*.yaml"))
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def example(name: str, **annotations: str) -> dict[str, Any]:
    path = next(item for item in EXISTING if item.stem == name)
    (document,) = documents.load_documents(path.read_text())
    document["metadata"] |= {"resourceVersion": "7", "namespace": "default", "uid": "u"}
    document["metadata"]["annotations"] |= annotations
    return document


@pytest.mark.parametrize("path", EXISTING, ids=lambda path: path.stem)
def test_a_patch_makes_the_changes_of_the_version_it_was_computed_from(path: Path) -> None:
    document = example(path.stem)
    operations = patches.make_placing_patch(
        document, compute_changes(document, read_job(document), Placement(H100, (TOLERATION,)))
    )
    assert operations[0] == {"op": "add", "path": "/metadata/resourceVersion", "value": "7"}
    after = read_job(patched(document, operations))
    assert all(H100.items() <= pods.node_selector.items() and TOLERATION in pods.tolerations for pods in after.workers)
    assert patches.make_placing_patch(document, []) == []


def test_letting_go_takes_our_name_off_and_leaves_the_others() -> None:
    document = example("job-gated", **{ADMISSION_GATES: f"a.example/x,{ADVISOR},b.example/y"})
    after = patched(document, patches.make_release_patch(document, read_job(document), patches.PLACED))
    assert after["metadata"]["annotations"][ADMISSION_GATES] == "a.example/x,b.example/y"
    assert after["metadata"]["annotations"][APPLIED] == "Placed"
    assert after["spec"] == document["spec"], "Kueue resumes its jobs itself"
    assert patches.make_release_patch(after, read_job(after), patches.PLACED) == []
    alone = example("job-gated")
    after = patched(alone, patches.make_release_patch(alone, read_job(alone), "TooLate"))
    assert ADMISSION_GATES not in after["metadata"]["annotations"]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_letting_go_resumes_a_job_once(name: str) -> None:
    document = set_suspend(example(name, **{MODE: "Initial"}))
    after = patched(document, patches.make_release_patch(document, read_job(document), "NoFittingPlan"))
    assert not read_job(after).is_suspended and after["metadata"]["annotations"][APPLIED] == "NoFittingPlan"
    set_suspend(after)
    assert patches.make_release_patch(after, read_job(after), patches.PLACED) == [], "suspended anew, by somebody else"


@settings(max_examples=200)
@given(
    gates=st.lists(st.sampled_from([ADVISOR, "a.example/x", "b.example/y"]), max_size=3, unique=True),
    mode=st.sampled_from([None, "Off", "Advise", "Initial"]),
    queue=st.sampled_from(["", "team", "tilecast-hold"]),
    moves=st.booleans(),
    suspend=st.booleans(),
    applied=st.booleans(),
    started=st.booleans(),
)
@pytest.mark.slow
def test_nothing_is_let_go_that_we_do_not_hold(
    gates: list[str], mode: str | None, queue: str, moves: bool, suspend: bool, applied: bool, started: bool
) -> None:
    document = example("job")
    marks = {ADMISSION_GATES: ",".join(gates), MODE: mode, APPLIED: "Placed" if applied else None}
    marks[NEXT_QUEUE] = "team" if moves else None
    document["metadata"]["annotations"] = {key: value for key, value in marks.items() if value}
    document["metadata"]["labels"] = {QUEUE: queue} if queue else {}
    document["spec"]["suspend"] = suspend
    document["status"] = {"active": 1} if started else {}
    operations = patches.make_release_patch(document, read_job(document), patches.PLACED)
    is_ours = mode == "Initial" and suspend and not queue and not applied and not started
    is_parked = moves and queue == "tilecast-hold" and suspend and not started
    holds = ADVISOR in gates or is_ours or is_parked
    assert bool(operations) is holds
    if holds:
        after = patched(document, operations)
        left = after["metadata"]["annotations"].get(ADMISSION_GATES, "")
        assert left == ",".join(gate for gate in gates if gate != ADVISOR)
        assert after["spec"]["suspend"] is (suspend and not is_ours)
        assert read_job(after).current_queue == ("team" if is_parked else queue)
        assert not read_job(after).is_held


def workload(*pod_sets: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    pod_sets_of_workload = [{"name": name, "count": 1, "template": {"spec": spec}} for name, spec in pod_sets]
    return {"metadata": {"resourceVersion": "3"}, "spec": {"podSets": pod_sets_of_workload}}


def test_a_workload_is_made_to_ask_for_the_same_nodes() -> None:
    put = Placement(H100, (TOLERATION,))
    asked = workload(("coordinator", {}), ("workers", {"nodeSelector": {"disk": "fast"}}))
    document = example("jobset")
    document["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["nodeSelector"] = {"disk": "fast"}
    after = patched(asked, patches.make_workload_patch(asked, read_job(document), put))
    first, second = (item["template"]["spec"] for item in after["spec"]["podSets"])
    assert first == {} and second == {"nodeSelector": {**H100, "disk": "fast"}, "tolerations": [TOLERATION]}
    assert patches.make_workload_patch(after, read_job(document), put) == []
    main = workload(("main", {}))
    assert patched(main, patches.make_workload_patch(main, read_job(example("job-gated")), put))["spec"] != main["spec"]
    roles = workload(("master", {}), ("worker", {}))
    assert len(patches.make_workload_patch(roles, read_job(example("pytorchjob")), put)) == 5


@pytest.mark.parametrize(
    ("kind", "state", "is_reserved"), [("QuotaReserved", "True", True), ("QuotaReserved", "False", False)]
)
def test_what_kueue_has_decided_is_left_alone(kind: str, state: str, is_reserved: bool) -> None:
    assert patches.is_reserved({"status": {"conditions": [{"type": kind, "status": state}]}}) is is_reserved
    assert not patches.is_reserved({})
