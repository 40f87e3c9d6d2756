"""Jobs of other kinds under their real controllers: Kueue, JobSet, Kubeflow Trainer and the training operator.

kube-scheduler runs below them, and Tilecast has the chart's own rights.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster, ClusterError, wait_for
from conftest import Helm, ensure_or_fail
from controllers import Controllers
from operator_process import Operator
from tilecast.jobs import ADMISSION_GATES, ADVISOR, APPLIED, JOB_KINDS, MODE, MODEL, TRAINING
from tilecast_operator.objects.documents import ADVICE_KEYS, HASH, NODE_SELECTOR, POOL
from witness import kubeconfig_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
EXISTING = ROOT / "examples" / "existing"
NAMESPACE = "tilecast-system"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:tilecast"
PROMISE_S = 10.0
"""Longest time that a job waits for the operator, in seconds."""
PATIENCE = 6.0
"""Factor by which an operator on a busy machine may decide later, where a story is about the decision itself."""
WAIT_S = 90
KINDS = ("trainjob", "pytorchjob", "jobset", "job")
PLACING = {"TILECAST_JOBS": "true", "TILECAST_PLACE": "true", "TILECAST_READ_KUEUE": "true"}
ADVISING = {**PLACING, "TILECAST_PLACE": "false"}
H100, T4 = "NVIDIA-H100-80GB-HBM3", "Tesla-T4"

KUEUE = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: first-t4}
spec: {nodeLabels: {nvidia.com/gpu.product: Tesla-T4}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: second-h100}
spec: {nodeLabels: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: everything}
spec:
  namespaceSelector: {}
  resourceGroups:
    - coveredResources: [cpu, nvidia.com/gpu]
      flavors:
        - name: first-t4
          resources: [{name: cpu, nominalQuota: 10k}, {name: nvidia.com/gpu, nominalQuota: 10k}]
        - name: second-h100
          resources: [{name: cpu, nominalQuota: 10k}, {name: nvidia.com/gpu, nominalQuota: 10k}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: team, namespace: default}
spec: {clusterQueue: everything}
"""


@pytest.fixture(scope="module")
def cluster(binaries: Path) -> Iterator[Cluster]:
    """Yield a separate control plane, because the controllers' webhooks would judge the jobs of every other test."""
    for toolset in ("jobset", "trainer", "training-operator", "kueue"):
        ensure_or_fail(toolset)
    nodes, policy = ROOT / "examples" / "clusters" / "mixed.yaml", ROOT / "tests" / "e2e" / "audit-jobs.yaml"
    with Cluster(nodes=nodes, audit_policy=policy) as started:
        started.apply(ROOT / "crds")
        # Its feature gate AdmissionGatedBy is on as it ships; tests/test_kueue_cluster.py has it off too.
        with Controllers(started, "trainer", "training-operator", "kueue"):
            wait_for(lambda: _applied(started, KUEUE), "Kueue's webhooks", WAIT_S)
            yield started


def _applied(cluster: Cluster, text: str) -> bool:
    try:
        cluster.apply(text)
    except ClusterError:
        return False
    return True


def granted(helm: Helm, *values: str) -> str:
    """Return the chart's account and role for some values."""
    shown = [f"--show-only=templates/{name}.yaml" for name in ("rbac", "serviceaccount")]
    chosen = [f"--set={value}" for value in values]
    return helm("template", "tilecast", str(ROOT / "charts" / "tilecast"), f"--namespace={NAMESPACE}", *shown, *chosen)


ADVISE_VALUES = ("jobs.enabled=true", "capacity.readKueue=true")
PLACE_VALUES = (*ADVISE_VALUES, "jobs.place=true")


@pytest.fixture(scope="module")
def account(cluster: Cluster, helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a kubeconfig of the chart's service account, with the rights that mode Initial needs."""
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.apply(granted(helm, *PLACE_VALUES))
    return kubeconfig_of(cluster, "tilecast", NAMESPACE, tmp_path_factory.mktemp("account") / "kubeconfig.yaml")


@pytest.fixture(scope="module")
def operator(cluster: Cluster, account: Path) -> Iterator[Operator]:
    with Operator(cluster, account, PLACING, patience=PATIENCE) as started:
        yield started
        log = started.log_tail(100_000)
        # An API server that has just started again forbids everything for a moment, so rights have tests of their own.
        assert "Traceback" not in log


@contextmanager
def stopped(operator: Operator) -> Iterator[None]:
    operator.kill()
    try:
        yield
    finally:
        operator.start()


def example(
    name: str, new_name: str, annotations: Mapping[str, str | None] | None = None, **spec: Any
) -> dict[str, Any]:
    """Return an example under another name, with other annotations (None removes one) and fields of its spec."""
    document: dict[str, Any] = yaml.safe_load((EXISTING / f"{name}.yaml").read_text())
    document["metadata"]["name"] = new_name
    for mark, value in (annotations or {}).items():
        document["metadata"]["annotations"].pop(mark, None)
        if value is not None:
            document["metadata"]["annotations"][mark] = value
    document["spec"] |= spec
    return document


def initial(name: str, new_name: str) -> dict[str, Any]:
    """Return an example in mode Initial, created suspended."""
    suspend = {"runPolicy": {"suspend": True}} if name == "pytorchjob" else {"suspend": True}
    return example(name, new_name, {MODE: "Initial"}, **suspend)


def queued(new_name: str, annotations: Mapping[str, str | None] | None = None, **spec: Any) -> dict[str, Any]:
    return example("job-gated", new_name, annotations, **spec)


def create(cluster: Cluster, *documents: Mapping[str, Any]) -> None:
    cluster.kubectl("create", "-f", "-", input="\n---\n".join(json.dumps(document) for document in documents))


def get(cluster: Cluster, kind: str, name: str) -> dict[str, Any]:
    """Return an object; `kind` may be the name that an example has."""
    resource = {"job": "jobs.batch"}.get(kind, kind)
    document: dict[str, Any] = json.loads(cluster.kubectl("get", resource, name, "-o", "json"))
    return document


def annotations(document: Mapping[str, Any]) -> dict[str, str]:
    return dict(document["metadata"].get("annotations", {}))


def until(
    cluster: Cluster, kind: str, name: str, holds: Callable[[dict[str, Any]], object], what: str
) -> dict[str, Any]:
    """Return the object once `holds` is true of it.

    Raises:
        ClusterError: there was no such object in time; the message ends with the last one and its Workloads.
    """
    document: dict[str, Any] = {}

    def probe() -> dict[str, Any] | None:
        nonlocal document
        document = get(cluster, kind, name)
        return document if holds(document) else None

    try:
        return wait_for(probe, f"{kind} {name}: {what}", WAIT_S)
    except ClusterError as error:
        workloads = json.loads(cluster.kubectl("get", "workloads.kueue.x-k8s.io", "-o", "json"))["items"]
        own = [item for item in workloads if item["metadata"].get("ownerReferences", [{}])[0].get("name") == name]
        raise ClusterError(f"{error}; {json.dumps([document, *own])}") from None


def applied(document: Mapping[str, Any]) -> str | None:
    """Return the outcome of a job; None while it has none, or while Kueue has yet to admit it."""
    outcome = annotations(document).get(APPLIED)
    return None if outcome == "Queued" else outcome


def is_complete(document: Mapping[str, Any]) -> bool:
    done = {item["type"] for item in document.get("status", {}).get("conditions", ()) if item["status"] == "True"}
    return bool(done & {"Complete", "Completed", "Succeeded"})


def pods(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    """Return the pods of a job of any kind that request GPUs."""
    document = json.loads(cluster.kubectl("get", "pods", "-o", "json"))["items"]
    return [
        pod
        for pod in document
        if pod["metadata"]["name"].startswith(f"{name}-")
        and pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("nvidia.com/gpu")
    ]


def nodes_of(cluster: Cluster, selector: Mapping[str, str]) -> set[str]:
    chosen = ",".join(f"{key}={value}" for key, value in selector.items())
    return set(cluster.kubectl("get", "nodes", "-o", "name", "-l", chosen).replace("node/", "").split())


def events(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    document = json.loads(cluster.kubectl("get", "events", "-o", "json"))["items"]
    return [item for item in document if item["involvedObject"]["name"] == name and item["source"].get("component")]


def event_message(cluster: Cluster, name: str, reason: str) -> str:
    """Return the message of the Event with that reason about an object."""

    def probe() -> str | None:
        return next((item["message"] for item in events(cluster, name) if item["reason"] == reason), None)

    return wait_for(probe, f"an Event {reason} about {name}", WAIT_S)


def audited(cluster: Cluster) -> list[dict[str, Any]]:
    lines = cluster.audit_log.read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line)).get("objectRef")]


def _time(entry: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(entry["stageTimestamp"].replace("Z", "+00:00")).timestamp()


def _is_release(entry: Mapping[str, Any]) -> bool:
    """Return whether a write removed our gate; such a write also states the outcome of the job."""
    done = entry["responseStatus"].get("code") == 200 and entry["verb"] == "patch"
    paths = [item.get("path", "") for item in body] if isinstance(body := entry.get("requestObject"), list) else []
    return done and "/metadata/annotations/" + APPLIED.replace("/", "~1") in paths


def releases(cluster: Cluster) -> Counter[str]:
    """Count how often each job was released."""
    ours = (entry for entry in audited(cluster) if entry["user"]["username"] == ACCOUNT and _is_release(entry))
    return Counter(entry["objectRef"]["name"] for entry in ours)


def held_s(cluster: Cluster, name: str, since: float | None = None) -> float:
    """Return how long a job was held, in seconds, from its creation or from `since` if that is later."""
    entries = [entry for entry in audited(cluster) if entry["objectRef"].get("name") == name]
    born = next(_time(entry) for entry in entries if entry["verb"] == "create")
    gone = next(_time(entry) for entry in entries if _is_release(entry))
    return gone - max(born, since or 0.0)


# --- mode Initial


@pytest.fixture(scope="module")
def placed(cluster: Cluster, operator: Operator) -> dict[str, dict[str, Any]]:
    """Return a job of every kind, created suspended in mode Initial, once all are complete."""
    create(cluster, *(initial(kind, f"placed-{kind}") for kind in KINDS))

    def running() -> bool:
        own_pods = pods(cluster, "placed-pytorchjob")
        return len(own_pods) == 2 and all(pod["status"].get("phase") == "Running" for pod in own_pods)

    wait_for(running, "the pods of the PyTorchJob", WAIT_S)
    for pod in pods(cluster, "placed-pytorchjob"):
        # kwok ends the pods of Jobs by itself, others run for ever.
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]["name"]
        ended = {"name": container, "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
        status = {"phase": "Succeeded", "containerStatuses": [{**pod["status"]["containerStatuses"][0], **ended}]}
        patch = json.dumps({"status": status})
        cluster.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)
    return {kind: until(cluster, kind, f"placed-{kind}", is_complete, "is complete") for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_an_initial_job_runs_on_the_recommended_pool(
    cluster: Cluster, placed: dict[str, dict[str, Any]], kind: str
) -> None:
    job = placed[kind]
    assert applied(job) == "Placed" and annotations(job)[POOL] == "h100-sxm"
    assert set(ADVICE_KEYS) <= set(annotations(job))
    names = nodes_of(cluster, json.loads(annotations(job)[NODE_SELECTOR]))
    ran = pods(cluster, f"placed-{kind}")
    assert ran and {pod["spec"]["nodeName"] for pod in ran} <= names
    assert "finalizers" not in job["metadata"] or not any("tilecast" in item for item in job["metadata"]["finalizers"])
    assert "ownerReferences" not in job["metadata"]
    assert "placed on h100-sxm" in event_message(cluster, f"placed-{kind}", "Placed")
    assert releases(cluster)[f"placed-{kind}"] == 1


def test_only_gpu_pods_are_placed(cluster: Cluster, placed: dict[str, dict[str, Any]]) -> None:
    coordinator, workers = placed["jobset"]["spec"]["replicatedJobs"]
    assert "nodeSelector" not in coordinator["template"]["spec"]["template"]["spec"]
    assert workers["template"]["spec"]["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.product"] == H100


# --- mode Advise


@pytest.mark.parametrize("kind", KINDS)
def test_advice_leaves_the_spec_as_it_is(cluster: Cluster, operator: Operator, kind: str) -> None:
    suspend = {"runPolicy": {"suspend": True}} if kind == "pytorchjob" else {"suspend": True}
    create(cluster, example(kind, f"advised-{kind}", {MODE: None}, **suspend))
    before = get(cluster, kind, f"advised-{kind}")
    job = until(cluster, kind, f"advised-{kind}", lambda job: HASH in annotations(job), "is annotated")
    assert job["spec"] == before["spec"]
    shown = cluster.kubectl(
        "get", JOB_KINDS[job["kind"]].plural, job["metadata"]["name"], "-o", "json", "--show-managed-fields"
    )
    ours = [item for item in json.loads(shown)["metadata"]["managedFields"] if "tilecast" in item["manager"]]
    assert [set(item["fieldsV1"]) for item in ours] == [{"f:metadata"}]
    assert set(ours[0]["fieldsV1"]["f:metadata"]) == {"f:annotations"}
    assert "h100-sxm" in event_message(cluster, f"advised-{kind}", "RecommendationUpdated")


def test_a_job_that_takes_its_label_back_loses_the_advice(cluster: Cluster, operator: Operator) -> None:
    until(cluster, "job", "advised-job", lambda job: HASH in annotations(job), "is annotated")
    cluster.kubectl("label", "jobs.batch", "advised-job", "tilecast.dev/enabled-")
    job = until(cluster, "job", "advised-job", lambda job: HASH not in annotations(job), "is not annotated")
    assert not set(ADVICE_KEYS) & set(annotations(job)) and MODEL in annotations(job)


def test_a_namespace_asks_for_all_its_jobs(cluster: Cluster, operator: Operator) -> None:
    cluster.kubectl("create", "namespace", "lab")
    document = example("job", "in-the-lab", {MODE: None})
    document["metadata"] |= {"namespace": "lab", "labels": {}}
    create(cluster, document)
    cluster.kubectl("label", "namespace", "lab", "tilecast.dev/enabled=true")

    def annotated() -> bool:
        document = json.loads(cluster.kubectl("get", "jobs.batch", "in-the-lab", "-n", "lab", "-o", "json"))
        return HASH in annotations(document)

    wait_for(annotated, "advice on a job of a labelled namespace", WAIT_S)


def test_annotations_that_somebody_else_writes_are_put_right(cluster: Cluster, operator: Operator) -> None:
    names = {"job": "tampered-job", "pytorchjob": "tampered-pytorchjob"}
    create(
        cluster, example("job", names["job"], {MODE: None}), example("pytorchjob", names["pytorchjob"], {MODE: None})
    )
    create(cluster, training_job("tampered", target("tampered-job")))
    names["tjob"] = "tampered"
    for kind, name in names.items():
        until(cluster, kind, name, lambda document: HASH in annotations(document), "is annotated")

    def tamper() -> None:
        for kind, name in names.items():
            resource = "jobs.batch" if kind == "job" else kind
            cluster.kubectl("annotate", resource, name, f"{POOL}=evil", f"{HASH}-", "--overwrite")

    def repaired() -> None:
        for kind, name in names.items():
            until(cluster, kind, name, lambda document: HASH in annotations(document), "is whole")
            assert annotations(get(cluster, kind, name))[POOL] == "h100-sxm"

    until(
        cluster, "pytorchjob", names["pytorchjob"], lambda document: document.get("status", {}).get("startTime"), "runs"
    )
    tamper()
    repaired()
    with stopped(operator):
        cluster.kubectl("annotate", "jobs.batch", names["job"], f"{POOL}=evil", f"{HASH}-", "--overwrite")
        cluster.kubectl("annotate", "tjob", "tampered", f"{POOL}=evil", f"{HASH}-", "--overwrite")
        cluster.kubectl("annotate", "pytorchjob", names["pytorchjob"], f"{POOL}=evil", "--overwrite")
    for kind, name in names.items():
        until(cluster, kind, name, lambda document: annotations(document)[POOL] == "h100-sxm", "is repaired")
        assert HASH in annotations(get(cluster, kind, name))


# --- Kueue


def flavor(cluster: Cluster, name: str) -> str:
    """Return the flavor that Kueue admitted a job to."""

    def probe() -> str | None:
        for item in json.loads(cluster.kubectl("get", "workloads", "-o", "json"))["items"]:
            owned = item["metadata"].get("ownerReferences", [{}])[0].get("name") == name
            if owned and (admission := item.get("status", {}).get("admission")):
                return str(admission["podSetAssignments"][-1]["flavors"]["nvidia.com/gpu"])
        return None

    return wait_for(probe, f"Kueue to admit {name}", WAIT_S)


def test_kueue_alone_takes_the_first_flavor_and_with_advice_the_better(cluster: Cluster, operator: Operator) -> None:
    alone = queued("by-order", {ADMISSION_GATES: None, MODE: None})
    alone["metadata"]["labels"].pop("tilecast.dev/enabled")
    create(cluster, alone, queued("by-advice"))
    assert flavor(cluster, "by-order") == "first-t4"
    assert flavor(cluster, "by-advice") == "second-h100"
    for name, product in (("by-order", T4), ("by-advice", H100)):
        until(cluster, "job", name, is_complete, "is complete")
        assert {pod["spec"]["nodeName"] for pod in pods(cluster, name)} <= nodes_of(
            cluster, {"nvidia.com/gpu.product": product}
        )
    assert "faster than the 1x4 t4 that it asks for" in event_message(cluster, "by-advice", "Placed")


def test_a_queued_job_set_is_steered_too(cluster: Cluster, operator: Operator) -> None:
    document = example("jobset", "queued-set", {MODE: "Initial", ADMISSION_GATES: f"{ADVISOR}"})
    document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
    for item in document["spec"]["replicatedJobs"]:
        container = item["template"]["spec"]["template"]["spec"]["containers"][0]
        container.setdefault("resources", {})["requests"] = {"cpu": "1"}
    create(cluster, document)
    until(cluster, "jobset", "queued-set", is_complete, "is complete")
    assert {pod["spec"]["nodeName"] for pod in pods(cluster, "queued-set")} <= nodes_of(
        cluster, {"nvidia.com/gpu.product": H100}
    )


# --- always released


def impossible(name: str) -> dict[str, Any]:
    return queued(name, {MODEL: "llama-3.1-405b", TRAINING: '{"sequenceLength": 8192, "globalBatchSize": 64}'})


NOT_PLACED = {
    "no-advice": (impossible, "NoFittingPlan"),
    "unknown-model": (lambda name: queued(name, {MODEL: "llama-2-7"}), "InvalidSpec"),
    "no-model": (lambda name: queued(name, {MODEL: None}), "InvalidAnnotations"),
    "no-such-mode": (lambda name: queued(name, {MODE: "Auto"}), "InvalidAnnotations"),
    "advise-only": (lambda name: queued(name, {MODE: None}), "ModeAdvise"),
    "no-gpus": (lambda name: _without_gpus(queued(name)), "InvalidSpec"),
    "nobody-asks": (lambda name: _unlabelled(queued(name)), "NotAsked"),
}


def _without_gpus(document: dict[str, Any]) -> dict[str, Any]:
    document["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1"}}
    return document


def _unlabelled(document: dict[str, Any]) -> dict[str, Any]:
    document["metadata"]["labels"].pop("tilecast.dev/enabled")
    return document


def test_a_job_is_let_go_whatever_is_wrong_with_it(cluster: Cluster, operator: Operator, record_property: Any) -> None:
    create(cluster, *(make(name) for name, (make, _) in NOT_PLACED.items()))
    for name, (_, reason) in NOT_PLACED.items():
        job = until(cluster, "job", name, applied, "is let go")
        assert applied(job) == reason and ADMISSION_GATES not in annotations(job)
        assert "nodeSelector" not in job["spec"]["template"]["spec"] or applied(job) != "Placed"
        assert reason in event_message(cluster, name, "NotPlaced")
        assert held_s(cluster, name) <= PROMISE_S
        record_property(f"held_{name}_s", round(held_s(cluster, name), 2))
    assert "annotate the job" in event_message(cluster, "no-model", "NotPlaced")
    assert "did you mean" in event_message(cluster, "unknown-model", "NotPlaced")


def test_a_gate_of_somebody_else_stays(cluster: Cluster, operator: Operator) -> None:
    create(cluster, queued("two-gates", {ADMISSION_GATES: f"example.com/budget,{ADVISOR}"}))
    job = until(cluster, "job", "two-gates", lambda document: APPLIED in annotations(document), "is let go")
    assert annotations(job)[ADMISSION_GATES] == "example.com/budget" and annotations(job)[APPLIED] == "Queued"


def test_what_nobody_asked_us_to_hold_stays_suspended(cluster: Cluster, operator: Operator) -> None:
    plain = example("job", "suspended-by-hand", {MODE: None})
    again = example("job", "released-before", {APPLIED: "Placed"})
    create(cluster, plain, again)
    until(cluster, "job", "suspended-by-hand", lambda job: HASH in annotations(job), "is annotated")
    create(cluster, example("job", "later"))
    until(cluster, "job", "later", applied, "is let go")
    for name in ("suspended-by-hand", "released-before"):
        assert get(cluster, "job", name)["spec"]["suspend"] is True
        assert releases(cluster)[name] == 0


def test_a_started_job_is_never_changed(cluster: Cluster, operator: Operator) -> None:
    create(cluster, example("job", "started", suspend=False))
    before = get(cluster, "job", "started")["spec"]
    job = until(cluster, "job", "started", applied, "is told")
    assert applied(job) == "AlreadyStarted" and job["spec"] == before
    assert "create it suspended" in event_message(cluster, "started", "NotPlaced")
    assert releases(cluster)["started"] == 0


def test_a_job_that_came_while_the_operator_was_away_is_let_go_when_it_returns(
    cluster: Cluster, operator: Operator
) -> None:
    half_done = queued("half-done")
    half_done["spec"]["template"]["spec"]["nodeSelector"] = {"nvidia.com/gpu.product": H100}
    with stopped(operator):
        create(cluster, queued("latecomer"), half_done, example("job", "latecomer-plain"))
        time.sleep(2.0)
        assert applied(get(cluster, "job", "latecomer")) is None
        since = time.time()
    for name in ("latecomer", "half-done", "latecomer-plain"):
        assert applied(until(cluster, "job", name, applied, "is let go")) == "Placed"
        print(f"{name}: let go {held_s(cluster, name, since):.1f} s after the operator began to start")  # noqa: T201
        assert releases(cluster)[name] == 1
    assert flavor(cluster, "half-done") == "second-h100"


def test_an_operator_that_is_killed_amid_its_work_leaves_nothing_held(cluster: Cluster, operator: Operator) -> None:
    names = [f"killed-{number}" for number in range(8)]
    create(cluster, *(queued(name) for name in names))
    for delay_s in (0.3, 0.1):
        time.sleep(delay_s)
        operator.kill()
        operator.start()
    for name in names:
        assert applied(until(cluster, "job", name, applied, "is let go")) == "Placed"
        assert flavor(cluster, name) == "second-h100"
    # Each was released, as it states. The audit log may show no success for a write whose client was killed.
    assert {releases(cluster)[name] for name in names} <= {0, 1}


def test_an_edit_meanwhile_is_kept_and_the_job_let_go(cluster: Cluster, operator: Operator) -> None:
    names = [f"edited-{number}" for number in range(6)]
    for name in names:
        create(cluster, queued(name))
        for turn in range(3):
            cluster.kubectl("label", "jobs.batch", name, f"turn=t{turn}", "--overwrite")
    for name in names:
        job = until(cluster, "job", name, applied, "is let go")
        assert job["metadata"]["labels"]["turn"] == "t2" and applied(job) == "Placed"
        assert releases(cluster)[name] == 1


def test_two_operators_let_go_once(cluster: Cluster, operator: Operator, account: Path) -> None:
    names = [f"shared-{number}" for number in range(6)]
    with Operator(cluster, account, PLACING, patience=PATIENCE):
        create(cluster, *(queued(name) for name in names))
        for name in names:
            assert applied(until(cluster, "job", name, applied, "is let go")) == "Placed"
    assert {releases(cluster)[name] for name in names} == {1}


def test_a_job_is_let_go_across_a_restart_of_the_api_server(cluster: Cluster, operator: Operator) -> None:
    names = [f"outage-{number}" for number in range(6)]
    create(cluster, *(queued(name) for name in names))
    cluster.kill("kube-apiserver")
    since = time.time()
    cluster.revive()
    for name in names:
        assert applied(until(cluster, "job", name, applied, "is let go"))
    # The audit log may lack a write that succeeded while the server went down, but has none twice.
    counted = releases(cluster)
    assert {counted[name] for name in names} <= {0, 1}
    for name in names:
        if counted[name]:
            print(f"{name}: let go {held_s(cluster, name, since):.1f} s after the API server fell")  # noqa: T201


def test_two_hundred_jobs_at_once_are_all_let_go_once(
    cluster: Cluster, operator: Operator, record_property: Any
) -> None:
    names = [f"crowd-{number}" for number in range(200)]
    create(cluster, *(queued(name) for name in names))

    def all_gone() -> bool:
        document = json.loads(cluster.kubectl("get", "jobs.batch", "-o", "json"))["items"]
        return sum(item["metadata"]["name"] in names and APPLIED in annotations(item) for item in document) == len(
            names
        )

    wait_for(all_gone, "200 jobs to be let go", 2 * WAIT_S)
    counted = releases(cluster)
    assert {counted[name] for name in names} == {1}
    document = json.loads(cluster.kubectl("get", "jobs.batch", "-o", "json"))["items"]
    outcomes = Counter(annotations(item)[APPLIED] for item in document if item["metadata"]["name"] in names)
    longest = max(held_s(cluster, name) for name in names)
    print(f"200 jobs: {dict(outcomes)}, held at most {longest:.1f} s")  # noqa: T201
    record_property("crowd_longest_held_s", round(longest, 2))
    cluster.kubectl("delete", "jobs.batch", *names, "--wait=false")


# --- a TrainingJob that names a job


def training_job(name: str, target: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    training = {"globalBatchSize": 1024, "precision": "fp16"}
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"model": {"preset": "resnet-50"}, "training": training, "targetRef": dict(target), **spec},
    }


def target(name: str, kind: str = "Job") -> dict[str, str]:
    return {"apiVersion": JOB_KINDS[kind].api_version, "kind": kind, "name": name}


def condition(document: Mapping[str, Any], kind: str) -> tuple[str, str, str]:
    status = next((item for item in document.get("status", {}).get("conditions", ()) if item["type"] == kind), None)
    return ("", "", "") if status is None else (status["status"], status["reason"], status["message"])


def test_a_training_job_places_the_job_that_it_names(cluster: Cluster, operator: Operator) -> None:
    document = queued("named", {MODE: None, MODEL: None, TRAINING: None})
    document["metadata"]["labels"].pop("tilecast.dev/enabled")
    create(cluster, document, training_job("for-named", target("named"), mode="Initial"))
    tjob = until(cluster, "tjob", "for-named", lambda item: condition(item, "Applied")[0] == "True", "is applied")
    assert condition(tjob, "Applied")[1] == "Placed"
    assert tjob["status"]["summary"]["target"] == "Job/named"
    assert tjob["status"]["recommendation"]["pool"] == "h100-sxm"
    assert flavor(cluster, "named") == "second-h100"
    assert HASH in annotations(get(cluster, "job", "named"))


def test_the_progress_that_a_train_job_reports_corrects_its_forecast(cluster: Cluster, operator: Operator) -> None:
    """No annotation says a step: the status alone does, as Transformers writes it through Trainer."""
    document = example("trainjob", "reports", {MODE: None, MODEL: None, TRAINING: None}, suspend=True)
    document["metadata"].get("labels", {}).pop("tilecast.dev/enabled", None)
    create(cluster, document, training_job("for-reports", target("reports", "TrainJob")))
    tjob = until(cluster, "tjob", "for-reports", lambda item: condition(item, "Ready")[0] == "True", "is advised")
    seconds, steps = tjob["status"]["recommendation"]["stepSeconds"]["target"] * 1.25, 10**9
    # Every report is a minute later. The operator may miss some of them.
    done = [steps // 10]

    def report_again(item: Mapping[str, Any]) -> bool:
        if item.get("status", {}).get("observed"):
            return True
        done[0] += int(60 / seconds)
        stamp = datetime.fromtimestamp(1.8e9 + done[0] * seconds - steps // 10 * seconds, UTC)
        trainer = {
            "progressPercentage": 10,
            "lastUpdatedTime": stamp.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "metrics": [{"name": "current_step", "value": str(done[0])}, {"name": "total_steps", "value": str(steps)}],
        }
        change = json.dumps({"status": {"trainerStatus": trainer}})
        cluster.kubectl("patch", "trainjob", "reports", "--subresource=status", "--type=merge", f"--patch={change}")
        return False

    observed = until(cluster, "tjob", "for-reports", report_again, "is measured")["status"]
    assert observed["observed"]["source"] == "trainJobProgress"
    assert observed["observed"]["stepSeconds"] == pytest.approx(seconds, rel=0.05)
    assert observed["error"]["rawRatio"] == pytest.approx(-0.2, abs=0.04)


def test_what_is_wrong_with_a_target_is_told(cluster: Cluster, operator: Operator) -> None:
    create(cluster, training_job("for-nobody", target("nobody")), example("job", "wanted", {MODE: None}))
    tjob = until(cluster, "tjob", "for-nobody", lambda item: condition(item, "Ready")[0], "is answered")
    assert condition(tjob, "Ready")[1] == "TargetNotFound" and "create it" in condition(tjob, "Ready")[2]
    create(cluster, training_job("for-wanted", target("wanted")))
    until(cluster, "tjob", "for-wanted", lambda item: condition(item, "Ready")[0] == "True", "is advised")
    time.sleep(1.1)  # the older one is known by its creation time, in whole seconds
    create(cluster, training_job("for-wanted-too", target("wanted")))
    tjob = until(cluster, "tjob", "for-wanted-too", lambda item: condition(item, "Ready")[0], "is answered")
    assert condition(tjob, "Ready")[1] == "TargetConflict"
    assert "for-wanted names Job wanted too" in condition(tjob, "Ready")[2]
    cluster.kubectl("delete", "tjob", "for-wanted")
    until(cluster, "tjob", "for-wanted-too", lambda item: condition(item, "Ready")[0] == "True", "takes its turn")
    create(cluster, example("job", "nobody", {MODE: None}))
    until(cluster, "tjob", "for-nobody", lambda item: condition(item, "Ready")[0] == "True", "finds its job")


def test_a_target_that_is_suspended_by_hand_is_not_resumed(cluster: Cluster, operator: Operator) -> None:
    document = example("job", "not-ours", {MODE: None})
    create(cluster, document, training_job("for-not-ours", target("not-ours"), mode="Initial"))
    tjob = until(cluster, "tjob", "for-not-ours", lambda item: condition(item, "Applied")[1] == "NotGated", "is told")
    assert ADMISSION_GATES in condition(tjob, "Applied")[2]
    assert get(cluster, "job", "not-ours")["spec"]["suspend"] is True


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"targetRef": {"apiVersion": "batch/v1", "kind": "JobSet", "name": "x"}}, "apiVersion is not that of kind"),
        ({"targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "x"}}, "Unsupported value"),
        ({"targetRef": None, "mode": "Initial"}, "mode Initial has no job to place"),
    ],
)
def test_the_api_server_refuses_a_target_that_cannot_be(
    cluster: Cluster, changed: dict[str, Any], message: str
) -> None:
    document = deepcopy(training_job("refused", target("x")))
    document["spec"] |= changed
    document["spec"] = {key: value for key, value in document["spec"].items() if value is not None}
    with pytest.raises(ClusterError, match=message):
        cluster.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(document))


# --- the policy that gates at creation


def test_the_policy_gates_jobs_in_mode_initial_at_creation(cluster: Cluster, operator: Operator, helm: Helm) -> None:
    served = "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"
    chosen = (*PLACE_VALUES, "jobs.gate=true", "jobs.kueue.admissionGate=present")
    values = [f"--set={value}" for value in chosen]
    chart = str(ROOT / "charts" / "tilecast")
    policy = helm("template", "tilecast", chart, served, *values, "--show-only=templates/gate.yaml")
    cluster.apply(policy)
    documents = [example(kind, f"gated-{kind}", {MODE: "Initial"}) for kind in KINDS]
    for document in documents:
        document["spec"].pop("suspend", None)
    documents.append(queued("gated-queued", {ADMISSION_GATES: None}))
    try:

        def made(document: Mapping[str, Any]) -> dict[str, Any]:
            shown = cluster.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", input=json.dumps(document))
            answer: dict[str, Any] = json.loads(shown)
            return answer

        wait_for(lambda: made(documents[3])["spec"].get("suspend"), "the policy to be in force", WAIT_S)
        by_name = {document["metadata"]["name"]: made(document) for document in documents}
        assert annotations(by_name["gated-queued"])[ADMISSION_GATES] == ADVISOR
        assert all(by_name[f"gated-{kind}"]["spec"]["suspend"] for kind in ("trainjob", "jobset", "job"))
        assert by_name["gated-pytorchjob"]["spec"]["runPolicy"]["suspend"]
        assert made(example("job", "not-gated", {MODE: None}, suspend=False))["spec"]["suspend"] is False
        create(cluster, documents[3], documents[4])
        for name in ("gated-job", "gated-queued"):
            assert applied(until(cluster, "job", name, applied, "is let go")) == "Placed"
    finally:
        cluster.kubectl("delete", "-f", "-", input=policy)


# --- rights


def rights(text: str) -> set[tuple[str, str, str]]:
    """Return group, resource and verb of everything that a chart's ClusterRole grants."""
    roles = (document for document in yaml.safe_load_all(text) if document and document["kind"] == "ClusterRole")
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(cluster: Cluster, since: int) -> set[tuple[str, str, str]]:
    """Return group, resource and verb of every request of the account that succeeded."""
    return {
        (entry["objectRef"].get("apiGroup", ""), entry["objectRef"]["resource"], entry["verb"])
        for entry in audited(cluster)[since:]
        if entry["user"]["username"] == ACCOUNT and entry["responseStatus"].get("code", 200) < 300
    }


def test_what_is_granted_for_jobs_is_what_is_used(
    cluster: Cluster, operator: Operator, account: Path, helm: Helm, placed: dict[str, dict[str, Any]]
) -> None:
    without = rights(granted(helm, "capacity.readKueue=true"))
    in_place, in_advice = rights(granted(helm, *PLACE_VALUES)), rights(granted(helm, *ADVISE_VALUES))
    assert in_place - in_advice == {("kueue.x-k8s.io", "workloads", verb) for verb in ("list", "patch")}
    # Cases that earlier tests may not have reached: a Workload older than the node choice, a missing job, and a runtime
    # of a namespace. Kueue copies new tolerations by itself, and a node selector with them, but not a node selector
    # alone.
    known = queued("known-to-kueue")
    toleration = {"key": "nvidia.com/gpu", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    known["spec"]["template"]["spec"]["tolerations"] = [toleration]
    with stopped(operator):
        create(cluster, known)
        wait_for(lambda: "known-to-kueue" in cluster.kubectl("get", "workloads"), "Kueue's Workload", WAIT_S)
    assert applied(until(cluster, "job", "known-to-kueue", applied, "is let go")) == "Placed"
    assert flavor(cluster, "known-to-kueue") == "second-h100"
    for number, kind in enumerate(JOB_KINDS):
        create(cluster, training_job(f"absent-{number}", target("absent", kind)))
        until(cluster, "tjob", f"absent-{number}", lambda item: condition(item, "Ready")[0], "is answered")
    local = example("trainjob", "local-runtime", suspend=True)
    local["spec"]["runtimeRef"] = {"kind": "TrainingRuntime", "name": "own"}
    cluster_runtime = get(cluster, "clustertrainingruntime", "torch-distributed")
    own = {**cluster_runtime, "kind": "TrainingRuntime", "metadata": {"name": "own", "namespace": "default"}}
    create(cluster, own, local)
    until(cluster, "trainjob", "local-runtime", lambda job: HASH in annotations(job), "is annotated")
    observed = used(cluster, 0)
    # tests/test_cluster_pools.py covers a job that claims its GPUs.
    claims = {right for right in in_place if right[0] == "resource.k8s.io"}
    assert in_place - without - claims <= observed, "granted in vain"
    assert {right for right in observed if right in in_place} == observed, "used without being granted"


def test_advice_alone_needs_no_more_than_its_values_grant(
    cluster: Cluster, operator: Operator, account: Path, helm: Helm
) -> None:
    operator.kill()
    cluster.apply(granted(helm, *ADVISE_VALUES))
    try:
        since = len(audited(cluster))
        with Operator(cluster, account, ADVISING) as alone:
            create(cluster, queued("not-allowed"), *(example(kind, f"alone-{kind}", {MODE: None}) for kind in KINDS))
            job = until(cluster, "job", "not-allowed", applied, "is let go")
            chosen = job["spec"]["template"]["spec"].get("nodeSelector", {})
            assert applied(job) == "NotAllowed" and chosen.get("nvidia.com/gpu.product") != H100
            assert "jobs.place=true" in event_message(cluster, "not-allowed", "NotPlaced")
            for kind in KINDS:
                until(cluster, kind, f"alone-{kind}", lambda job: HASH in annotations(job), "is annotated")
            assert "is forbidden" not in alone.log_tail(100_000)
        asked = used(cluster, since)
        assert ("kueue.x-k8s.io", "workloads", "patch") not in asked
        assert asked <= rights(granted(helm, *ADVISE_VALUES))
    finally:
        cluster.apply(granted(helm, *PLACE_VALUES))
        operator.start()
