"""Mode Initial behind Kueue with its feature gate AdmissionGatedBy off, as 0.18 ships, and on, as 0.19 does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, wait_for
from conftest import Helm, ensure_or_fail
from controllers import Controllers
from operator_process import Operator
from test_jobs_cluster import (
    ACCOUNT,
    H100,
    KUEUE,
    NAMESPACE,
    PATIENCE,
    PLACE_VALUES,
    PLACING,
    T4,
    WAIT_S,
    _applied,
    annotations,
    applied,
    audited,
    condition,
    create,
    event_message,
    events,
    example,
    flavor,
    get,
    granted,
    is_complete,
    nodes_of,
    pods,
    target,
    training_job,
    until,
)
from tilecast.jobs import ADMISSION_GATES, ADVISOR, APPLIED, HOLD_QUEUE, MODE, MODEL, NEXT_QUEUE, QUEUE, TRAINING
from witness import kubeconfig_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
GATE = "AdmissionGatedBy"
WEBHOOK = "until a webhook answers"
OUTAGE_S = 8.0
"""Length of an outage in seconds, enough for several tries at every job."""
HELD = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "LocalQueue",
    "metadata": {"name": "tilecast-hold", "namespace": "default"},
    "spec": {"clusterQueue": "everything", "stopPolicy": "Hold"},
}


@pytest.fixture(scope="module")
def cluster(binaries: Path) -> Iterator[Cluster]:
    """Yield a separate control plane, because Kueue's webhooks would judge the jobs of every other test."""
    for toolset in ("jobset", "trainer", "training-operator", "kueue"):
        ensure_or_fail(toolset)
    nodes, policy = ROOT / "examples" / "clusters" / "mixed.yaml", ROOT / "tests" / "e2e" / "audit-kueue.yaml"
    with Cluster(nodes=nodes, audit_policy=policy) as started:
        started.apply(ROOT / "crds")
        with Controllers(started, "trainer", "training-operator"):
            yield started


@pytest.fixture(scope="module", params=[False, True], ids=["no-gate", "gate"])
def has_gate(request: pytest.FixtureRequest) -> bool:
    """Return whether Kueue has its feature gate on."""
    return bool(request.param)


@pytest.fixture(scope="module")
def kueue(cluster: Cluster, has_gate: bool) -> Iterator[Controllers]:
    """Yield Kueue with its feature gate off, as 0.18 ships, and then on, as 0.19 ships."""
    with Controllers(cluster, "kueue", feature_gates={} if has_gate else {GATE: False}) as running:
        wait_for(lambda: _applied(cluster, KUEUE), "Kueue's webhooks", WAIT_S)
        yield running


@pytest.fixture(scope="module")
def operator(
    cluster: Cluster, kueue: Controllers, helm: Helm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    """Yield the operator with the chart's account."""
    _applied(cluster, f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: {NAMESPACE}}}")
    cluster.apply(granted(helm, *PLACE_VALUES))
    path = kubeconfig_of(cluster, "tilecast", NAMESPACE, tmp_path_factory.mktemp("account") / "kubeconfig.yaml")
    settings = PLACING | {"TILECAST_WATCH_CHECK_SECONDS": "2"}
    with Operator(cluster, path, settings, patience=PATIENCE) as started:
        yield started
        assert "Traceback" not in started.log_tail(100_000)


@pytest.fixture
def prefix(has_gate: bool) -> str:
    """Return the prefix of the names of this Kueue's jobs."""
    return "gate" if has_gate else "no-gate"


def held(name: str, **marks: str | None) -> dict[str, Any]:
    """Return the shipped example of a job in Kueue's queue."""
    return example("job-kueue", name, marks)


def by_name(document: dict[str, Any]) -> dict[str, Any]:
    """Return the job without its own request for advice, so that a TrainingJob can name it."""
    document["metadata"]["labels"].pop("tilecast.dev/enabled")
    for mark in (MODE, MODEL, TRAINING):
        document["metadata"]["annotations"].pop(mark)
    return document


def test_the_shipped_example_is_steered_to_the_better_flavor(cluster: Cluster, operator: Operator, prefix: str) -> None:
    create(cluster, held(f"{prefix}-held"))
    job = until(cluster, "job", f"{prefix}-held", is_complete, "is complete")
    assert flavor(cluster, f"{prefix}-held") == "second-h100"
    assert job["metadata"]["labels"][QUEUE] == "team" and NEXT_QUEUE not in annotations(job)
    job = until(cluster, "job", f"{prefix}-held", applied, "is told")
    assert applied(job) == "Placed"
    assert "placed on h100-sxm" in event_message(cluster, f"{prefix}-held", "Placed")


def test_a_gated_job_is_placed_where_kueue_heeds_the_gate_and_else_runs_as_it_is(
    cluster: Cluster, operator: Operator, has_gate: bool, prefix: str
) -> None:
    names, outcomes = [f"{prefix}-gated-{number}" for number in range(12)], set[str]()
    create(cluster, *(example("job-gated", name) for name in names))
    for name in names:
        until(cluster, "job", name, is_complete, "is complete, and not lost")
        job = until(cluster, "job", name, applied, "is told")
        assert flavor(cluster, name) == ("second-h100" if applied(job) == "Placed" else "first-t4")
        outcomes.add(str(applied(job)))
    assert outcomes <= ({"Placed"} if has_gate else {"AdmissionGateOff", "QuotaReserved"}), outcomes
    if not has_gate:
        assert any(
            "stopPolicy" in (text := event_message(cluster, name, "NotPlaced")) or GATE in text for name in names
        )


def test_of_a_burst_in_the_held_queue_no_job_is_lost(cluster: Cluster, operator: Operator, prefix: str) -> None:
    names = [f"{prefix}-burst-{number}" for number in range(24)]
    create(cluster, *(held(name) for name in names))
    for name in names:
        until(cluster, "job", name, is_complete, "is complete")
        assert applied(until(cluster, "job", name, applied, "is told")) == "Placed"
        assert flavor(cluster, name) == "second-h100"
    workloads = json.loads(cluster.kubectl("get", "workloads", "-o", "json"))["items"]
    ends = [item["reason"] for each in workloads for item in each["status"]["conditions"] if item["type"] == "Finished"]
    assert set(ends) == {"Succeeded"}


def waiting(kind: str, name: str, *, is_gated: bool) -> dict[str, Any]:
    """Return a job of another kind in mode Initial, created behind Kueue's gate or in the held queue."""
    marks = {MODE: "Initial"} | ({ADMISSION_GATES: ADVISOR} if is_gated else {NEXT_QUEUE: "team"})
    document = example(kind, name, marks)
    document["metadata"]["labels"][QUEUE] = "team" if is_gated else HOLD_QUEUE
    return document


def first_write(cluster: Cluster, name: str, holds: Callable[[Mapping[str, Any]], object]) -> int | None:
    """Return the position in the audit log of the first write for which `holds` is true.

    Only writes to objects whose name starts with `name` count. Return None if there is none.
    """
    for number, entry in enumerate(audited(cluster)):
        body = entry.get("requestObject")
        if str(entry["objectRef"].get("name")).startswith(name) and isinstance(body, dict) and holds(body):
            return number
    return None


def is_admitted(workload: Mapping[str, Any]) -> bool:
    conditions = workload.get("status", {}).get("conditions", ())
    return any((item["type"], item["status"]) == ("Admitted", "True") for item in conditions)


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob", "jobset"])
def test_a_job_of_another_kind_goes_to_the_better_flavor(
    cluster: Cluster, operator: Operator, has_gate: bool, prefix: str, kind: str
) -> None:
    for is_gated in (False, True) if has_gate else (False,):
        name = f"{prefix}-{kind}-{'gated' if is_gated else 'held'}"
        create(cluster, waiting(kind, name, is_gated=is_gated))
        assert applied(until(cluster, kind, name, applied, "is told")) == "Placed"
        assert flavor(cluster, name) == "second-h100"
        admitted = first_write(cluster, f"{kind}-{name}-", is_admitted)
        placed = first_write(cluster, name, lambda body: annotations(body).get(APPLIED) == "Placed")
        assert admitted is not None and placed is not None and admitted < placed
        chosen = nodes_of(cluster, {"nvidia.com/gpu.product": H100})
        if kind == "pytorchjob":  # kwok ends only the pods of Jobs

            def running(of: str = name) -> bool:
                own = pods(cluster, of)
                return len(own) == 2 and all(pod["status"].get("phase") == "Running" for pod in own)

            wait_for(running, f"the pods of {name} to run", WAIT_S)
        else:
            until(cluster, kind, name, is_complete, "is complete, and not lost")
        ran = pods(cluster, name)
        assert ran and {pod["spec"]["nodeName"] for pod in ran} <= chosen
        document = get(cluster, kind, name)
        assert document["metadata"]["labels"][QUEUE] == "team" and NEXT_QUEUE not in annotations(document)
        cluster.kubectl("delete", kind, name)  # the next asks for the same GPUs
        wait_for(lambda of=name: not pods(cluster, of), f"the pods of {name} to go", WAIT_S)


def test_a_queue_with_stop_policy_holds_and_one_without_is_refused(
    cluster: Cluster, operator: Operator, prefix: str
) -> None:
    cluster.apply(json.dumps(HELD))
    create(cluster, held(f"{prefix}-stopped"))
    assert applied(until(cluster, "job", f"{prefix}-stopped", applied, "is told")) == "Placed"
    assert flavor(cluster, f"{prefix}-stopped") == "second-h100"
    running = {**HELD, "spec": {"clusterQueue": "everything", "stopPolicy": "None"}}
    cluster.apply(json.dumps(running))
    try:
        create(cluster, held(f"{prefix}-open"))
        job = until(cluster, "job", f"{prefix}-open", applied, "is told")
        assert applied(job) in ("QueueNotHeld", "QuotaReserved", "AlreadyStarted")
        until(cluster, "job", f"{prefix}-open", is_complete, "is complete")
    finally:
        cluster.kubectl("delete", "localqueue", "tilecast-hold")


def test_placed_is_said_once_kueue_has_admitted_the_job(cluster: Cluster, operator: Operator, prefix: str) -> None:
    name = f"{prefix}-later"
    stop, go = (json.dumps({"spec": {"stopPolicy": policy}}) for policy in ("Hold", "None"))
    cluster.kubectl("patch", "clusterqueue", "everything", "--type=merge", "-p", stop)
    try:
        create(cluster, by_name(held(name)), training_job(f"for-{name}", target(name), mode="Initial"))
        job = until(cluster, "job", name, lambda document: APPLIED in annotations(document), "is let go")
        assert annotations(job)[APPLIED] == "Queued" and job["spec"]["template"]["spec"]["nodeSelector"]
        waiting = until(
            cluster, "tjob", f"for-{name}", lambda document: condition(document, "Applied")[1] == "Queued", "waits"
        )
        assert condition(waiting, "Applied")[0] == "False" and not [
            item for item in events(cluster, name) if item["reason"] == "Placed"
        ]
        operator.kill()
        operator.start()
    finally:
        cluster.kubectl("patch", "clusterqueue", "everything", "--type=merge", "-p", go)
    until(
        cluster,
        "tjob",
        f"for-{name}",
        lambda document: condition(document, "Applied")[:2] == ("True", "Placed"),
        "is placed",
    )
    assert applied(get(cluster, "job", name)) == "Placed" and flavor(cluster, name) == "second-h100"


def test_the_condition_names_the_gate_and_the_remedy(
    cluster: Cluster, operator: Operator, has_gate: bool, prefix: str
) -> None:
    name = f"{prefix}-named"
    document = by_name(example("job-gated", name))
    document["metadata"]["labels"][QUEUE] = "nowhere-yet"
    cluster.apply(json.dumps({**HELD, "metadata": {"name": "nowhere-yet", "namespace": "default"}}))
    create(cluster, document, training_job(f"for-{name}", target(name), mode="Initial"))
    if has_gate:
        job = until(cluster, "job", name, lambda document: APPLIED in annotations(document), "is let go")
        assert annotations(job)[APPLIED] == "Queued"
        return
    document = until(
        cluster, "tjob", f"for-{name}", lambda item: condition(item, "Applied")[1] == "AdmissionGateOff", "is refused"
    )
    text = condition(document, "Applied")[2]
    assert GATE in text and f"{QUEUE}: tilecast-hold" in text and NEXT_QUEUE in text
    assert "nodeSelector" not in get(cluster, "job", name)["spec"]["template"]["spec"]


def test_no_job_whose_workload_has_quota_is_patched_but_for_its_annotations(
    cluster: Cluster, operator: Operator, has_gate: bool, prefix: str
) -> None:
    with_quota: dict[str, int] = {}
    for number, entry in enumerate(audited(cluster)):
        body = json.dumps(entry.get("requestObject") or {})
        if entry["objectRef"]["resource"] == "workloads" and '"QuotaReserved"' in body and '"True"' in body:
            with_quota.setdefault(entry["objectRef"]["name"], number)
    assert with_quota, "the audit log has what Kueue writes"
    for number, entry in enumerate(audited(cluster)):
        name, ours = str(entry["objectRef"].get("name")), entry["user"]["username"] == ACCOUNT
        start = f"{entry['objectRef']['resource'].removesuffix('s')}-{name}-"
        since = min((at for each, at in with_quota.items() if each.startswith(start)), default=None)
        # A job of the other Kueue may have lost its quota since then and been requeued.
        is_other = not name.startswith(f"{prefix}-")
        if is_other or not ours or entry["verb"] != "patch" or since is None or number < since:
            continue
        body = entry.get("requestObject") or {}
        paths = [item["path"] for item in body] if isinstance(body, list) else []
        assert not any(path.startswith("/spec") for path in paths) and "spec" not in body, entry


def test_what_kueue_can_do_is_in_a_metric_and_an_event(cluster: Cluster, operator: Operator, has_gate: bool) -> None:
    gate = "present" if has_gate else "absent"

    def shown() -> str | None:
        return next((line for line in operator.get("/metrics").splitlines() if f'gate="{gate}"' in line), None)

    line = wait_for(shown, "the metric", WAIT_S)
    assert 'served="v1beta2"' in line and 'stop_policy="true"' in line
    text = "the feature gate AdmissionGatedBy is " + ("on" if has_gate else "off")

    def posted() -> bool:
        return any(text in item["message"] for item in events(cluster, "workloads.kueue.x-k8s.io"))

    wait_for(posted, "the Event", WAIT_S)


def set_queue(cluster: Cluster, h100: str, stop_policy: str) -> None:
    """Set the better flavor's quota of GPUs and the queue's stop policy."""
    path = "/spec/resourceGroups/0/flavors/1/resources/1/nominalQuota"
    changes = [
        {"op": "add", "path": path, "value": h100},
        {"op": "add", "path": "/spec/stopPolicy", "value": stop_policy},
    ]
    cluster.kubectl("patch", "clusterqueue", "everything", "--type=json", "-p", json.dumps(changes))


@pytest.fixture
def impatient(cluster: Cluster, operator: Operator) -> Iterator[Operator]:
    """Yield the operator with a limit of two seconds for a placed job to get quota."""
    operator.stop()
    before = dict(operator.environment)
    operator.environment |= {"TILECAST_REQUEUE_SECONDS": "2"}
    operator.start()
    yield operator
    operator.stop()
    operator.environment = before
    set_queue(cluster, "10k", "None")
    operator.start()


def modest(kind: str, name: str) -> dict[str, Any]:
    """Return a job of any kind in the held queue that a T4 can run as well."""
    document = json.dumps(waiting(kind, name, is_gated=False)).replace('"nvidia.com/gpu": 8', '"nvidia.com/gpu": 4')
    asked: dict[str, Any] = json.loads(document.replace('"numProcPerNode": 8', '"numProcPerNode": 4'))
    training = json.dumps({"globalBatchSize": 1024, "precision": "fp16"})
    asked["metadata"]["annotations"] |= {MODEL: "resnet-50", TRAINING: training}
    return asked


@pytest.mark.parametrize("kind", ["job", "jobset", "pytorchjob", "trainjob"])
def test_a_job_whose_flavor_has_no_quota_any_more_runs_on_another(
    cluster: Cluster, impatient: Operator, prefix: str, kind: str
) -> None:
    name = f"{prefix}-{kind}-requeued"
    set_queue(cluster, "10k", "Hold")
    create(cluster, modest(kind, name))
    until(cluster, kind, name, lambda document: APPLIED in annotations(document), "is let go")
    assert annotations(get(cluster, kind, name))[APPLIED] in ("Queued", "Requeued")
    set_queue(cluster, "0", "None")
    until(cluster, kind, name, lambda document: annotations(document)[APPLIED] == "Requeued", "is released")
    wait_for(lambda: pods(cluster, name), f"pods of {name}", WAIT_S)
    assert flavor(cluster, name) == "first-t4"
    wait_for(lambda: {pod["spec"].get("nodeName") for pod in pods(cluster, name)} - {None}, "them to run", WAIT_S)
    chosen = nodes_of(cluster, {"nvidia.com/gpu.product": T4})
    assert {pod["spec"]["nodeName"] for pod in pods(cluster, name) if pod["spec"].get("nodeName")} <= chosen
    assert "may run on" in event_message(cluster, name, "Requeued")
    assert_requeued_once(cluster, impatient, name)
    cluster.kubectl("delete", kind, name)
    wait_for(lambda: not pods(cluster, name), f"the pods of {name} to go", WAIT_S)


def test_a_job_that_is_preempted_after_it_was_placed_runs_on_another_flavor(
    cluster: Cluster, impatient: Operator, prefix: str
) -> None:
    name = f"{prefix}-preempted"
    create(cluster, modest("pytorchjob", name))
    assert applied(until(cluster, "pytorchjob", name, applied, "is told")) == "Placed"
    assert flavor(cluster, name) == "second-h100"
    set_queue(cluster, "0", "None")
    (workload,) = (
        item["metadata"]["name"]
        for item in json.loads(cluster.kubectl("get", "workloads", "-o", "json"))["items"]
        if item["metadata"]["ownerReferences"][0]["name"] == name
    )
    for is_active in ("false", "true"):
        cluster.kubectl("patch", "workload", workload, "--type=merge", "-p", f'{{"spec":{{"active":{is_active}}}}}')
        suspended = until(
            cluster, "pytorchjob", name, lambda document: document["spec"]["runPolicy"]["suspend"], "is suspended"
        )
    until(cluster, "pytorchjob", name, lambda document: annotations(document)[APPLIED] == "Requeued", "is released")
    until(cluster, "pytorchjob", name, lambda document: not document["spec"]["runPolicy"]["suspend"], "runs again")
    assert flavor(cluster, name) == "first-t4"
    replicas = suspended["spec"]["pytorchReplicaSpecs"]
    now = get(cluster, "pytorchjob", name)["spec"]["pytorchReplicaSpecs"]
    assert {role: item["replicas"] for role, item in now.items()} == {
        role: item["replicas"] for role, item in replicas.items()
    }
    assert_requeued_once(cluster, impatient, name)
    cluster.kubectl("delete", "pytorchjob", name)


def assert_requeued_once(cluster: Cluster, operator: Operator, name: str) -> None:
    """Check that one Event says so, and that the metrics count it; jobs of earlier tests may be requeued too."""
    assert [item["reason"] for item in events(cluster, name)].count("Requeued") == 1
    metrics = operator.get("/metrics")
    for series in ("tilecast_requeued_total", 'tilecast_placements_total{outcome="Requeued"}'):
        assert float(metrics.partition(f"\n{series} ")[2].partition("\n")[0]) >= 1, series


def test_jobs_that_are_held_wait_for_a_kueue_that_starts_anew(
    cluster: Cluster, operator: Operator, kueue: Controllers, has_gate: bool, prefix: str
) -> None:
    operator.kill()
    names = [f"{prefix}-restart-{number}" for number in range(4)]
    documents = [held(name) for name in names]
    if has_gate:
        documents[2:] = [example("job-gated", name) for name in names[2:]]
    create(cluster, *documents)
    # Kueue may hear of the other jobs only when it is back.
    wait_for(lambda: names[0] in cluster.kubectl("get", "workloads"), "Kueue's Workload", WAIT_S)
    before = operator.log_tail(1_000_000).count(WEBHOOK)
    kueue.kill("kueue")
    try:
        operator.start()
        wait_for(lambda: operator.log_tail(1_000_000).count(WEBHOOK) > before, "the outage to be told", WAIT_S)
        time.sleep(OUTAGE_S)
        assert not any(APPLIED in annotations(get(cluster, "job", name)) for name in names)
    finally:
        kueue.revive("kueue")
    for name in names:
        assert applied(until(cluster, "job", name, applied, "is told")) == "Placed"
        assert flavor(cluster, name) == "second-h100"
    assert operator.log_tail(1_000_000).count(WEBHOOK) == before + 1, "one warning for all jobs and tries"


def test_the_charts_policy_has_jobs_wait_in_the_held_queue(
    cluster: Cluster, operator: Operator, has_gate: bool, prefix: str, helm: Helm
) -> None:
    served = "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"
    chosen = "present" if has_gate else "auto"
    values = [f"--set={value}" for value in (*PLACE_VALUES, "jobs.gate=true", f"jobs.kueue.admissionGate={chosen}")]
    chart = str(ROOT / "charts" / "tilecast")
    policy = helm("template", "tilecast", chart, served, *values, "--show-only=templates/gate.yaml")
    cluster.apply(policy)
    name = f"{prefix}-policy"
    document = example("job-gated", name, {"kueue.x-k8s.io/admission-gated-by": None})
    try:

        def held_at_creation() -> bool:
            shown = cluster.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", input=json.dumps(document))
            metadata = json.loads(shown)["metadata"]
            by_queue = (
                metadata["labels"][QUEUE] == "tilecast-hold" and metadata["annotations"].get(NEXT_QUEUE) == "team"
            )
            return by_queue if not has_gate else "kueue.x-k8s.io/admission-gated-by" in metadata["annotations"]

        wait_for(held_at_creation, "the policy to be in force", WAIT_S)
        create(cluster, document)
        assert applied(until(cluster, "job", name, applied, "is told")) == "Placed"
        assert flavor(cluster, name) == "second-h100"
    finally:
        cluster.kubectl("delete", "-f", "-", input=policy)
