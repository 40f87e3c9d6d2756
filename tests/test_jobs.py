"""Jobs of other kinds: what is read of them, which pools they may use, and what an advice changes in their text."""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import nodes
from tilecast.advise import advise
from tilecast.api import documents, training_job
from tilecast.api.base import check
from tilecast.api.edit import edited
from tilecast.api.fields import FieldChange
from tilecast.cli import main
from tilecast.hardware import Pool
from tilecast.jobs import (
    ADMISSION_GATES,
    ADVISOR,
    APPLIED,
    ENABLED,
    IGNORE,
    JOB_KINDS,
    MODE,
    MODEL,
    QUEUE,
    TRAINING,
    Job,
    Placement,
    changes,
    described,
    in_annotations,
    is_job,
    kueue,
    mode_of,
    read,
    require_gpus,
    runtime_of,
)
from tilecast.jobs.candidates import Candidates, candidates, exported, placement, request, settled
from tilecast.spec import SpecError

EXAMPLES = Path(__file__).parent.parent / "examples"
EXISTING = sorted((EXAMPLES / "existing").glob("*.yaml"))
A100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


@cache
def cluster() -> tuple[tuple[Pool, ...], list[dict[str, str]]]:
    found, own, slices = nodes.parse((EXAMPLES / "clusters" / "mixed.yaml").read_text())
    return nodes.pools(found, own, slices).pools, [item["metadata"]["labels"] for item in found]


def example(name: str) -> dict[str, Any]:
    (document,) = documents.load((EXAMPLES / "existing" / f"{name}.yaml").read_text())
    return document


def runtime(**trainer: Any) -> dict[str, Any]:
    container = {"name": "node", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    return {
        "kind": "ClusterTrainingRuntime",
        "spec": {
            "mlPolicy": {"numNodes": 3},
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {"name": "dataset-initializer", "template": {}},
                        {
                            "name": "trainer",
                            "template": {
                                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                "spec": {"template": {"spec": {"containers": [container], **trainer}}},
                            },
                        },
                    ]
                }
            },
        },
    }


# --- reading


@pytest.mark.parametrize(
    ("name", "pods", "gpus", "per_pod", "is_suspended", "is_resizable"),
    [
        ("trainjob", [("node", 2)], 16, 8, False, False),
        ("pytorchjob", [("Master", 1), ("Worker", 1)], 16, 8, False, True),
        ("jobset", [("coordinator", 1), ("workers", 4)], 16, 4, False, False),
        ("job", [("", 2)], 8, 4, True, True),
        ("job-kueue", [("", 1)], 4, 4, True, False),
    ],
)
def test_each_kind_is_read(
    name: str, pods: list[tuple[str, int]], gpus: int, per_pod: int, is_suspended: bool, is_resizable: bool
) -> None:
    job = read(example(name))
    assert [(item.name, item.count) for item in job.pods] == pods
    assert (job.gpus, job.gpus_per_pod) == (gpus, per_pod)
    assert (job.is_suspended, job.has_started) == (is_suspended, not is_suspended)
    assert job.is_resizable is is_resizable
    assert not job.is_finished and not job.is_owned
    assert job.is_enabled({})


def test_a_train_job_takes_from_its_runtime_what_it_leaves_out() -> None:
    document = example("trainjob")
    assert runtime_of(document) == ("ClusterTrainingRuntime", "torch-distributed")
    document["spec"]["trainer"] = {"image": "x"}
    (pods,) = read(document, runtime(nodeSelector=A100)).pods
    assert (pods.name, pods.count, pods.gpus, pods.pinned) == ("trainer", 3, 4, A100)
    assert read(document).gpus == 0
    with pytest.raises(SpecError, match=r"asks for no GPU; .*resourcesPerNode"):
        require_gpus(read(document))


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("job", {"startTime": "2026-01-01T00:00:00Z"}),
        ("job", {"active": 1}),
        ("jobset", {"replicatedJobsStatus": [{"name": "workers", "succeeded": 1}]}),
        ("trainjob", {"jobsStatus": [{"name": "node", "active": 2}]}),
        ("pytorchjob", {"replicaStatuses": {"Worker": {"active": 1}}}),
    ],
)
def test_a_suspended_job_that_ran_has_started(kind: str, status: dict[str, Any]) -> None:
    document = example(kind)
    place = JOB_KINDS[document["kind"]].suspend
    node = document
    for key in place[:-1]:
        node = node.setdefault(key, {})
    node[place[-1]] = True
    assert not read(document).has_started
    assert read({**document, "status": status}).has_started


@pytest.mark.parametrize(
    ("kind", "condition"),
    [
        ("job", "Complete"),
        ("job", "Failed"),
        ("jobset", "Completed"),
        ("trainjob", "Failed"),
        ("pytorchjob", "Succeeded"),
    ],
)
def test_finished_jobs_are_finished(kind: str, condition: str) -> None:
    document = example(kind)
    for state, wanted in (("False", False), ("True", True)):
        assert (
            read({**document, "status": {"conditions": [{"type": condition, "status": state}]}}).is_finished is wanted
        )


def test_a_job_made_by_another_kind_is_owned() -> None:
    document = example("job")
    document["metadata"]["ownerReferences"] = [{"kind": "JobSet", "name": "x", "controller": True}]
    assert read(document).is_owned
    document["metadata"]["ownerReferences"] = [{"kind": "CronJob", "name": "x", "controller": True}]
    assert not read(document).is_owned


def test_labels_of_the_job_win_over_those_of_the_namespace() -> None:
    document = example("job")
    on = {ENABLED: "true"}
    document["metadata"]["labels"] = {}
    assert read(document).is_enabled(on) and not read(document).is_enabled({})
    document["metadata"]["labels"] = {ENABLED: "false"}
    assert not read(document).is_enabled(on)
    document["metadata"] = {"labels": on, "annotations": {IGNORE: "true"}}
    assert not read(document).is_enabled(on)


def held(marks: dict[str, str], labels: dict[str, str], **spec: Any) -> bool:
    document = example("job")
    document["metadata"] = {"name": "x", "annotations": marks, "labels": labels}
    document["spec"] |= spec
    return read(document).is_held


def test_only_our_gates_hold_a_job() -> None:
    initial, gate = {MODE: "Initial"}, {ADMISSION_GATES: f"other.example/x, {ADVISOR}"}
    queue = {QUEUE: "team"}
    assert held(gate, queue) and held({**gate, MODE: "Advise"}, queue)
    assert held(initial, {})
    assert not held({}, {}) and not held({MODE: "Advise"}, {})
    assert not held(initial, queue), "Kueue suspends its jobs itself"
    assert not held(initial, {}, suspend=False)
    assert not held({**initial, APPLIED: "True"}, {}), "released once already"
    assert not held({ADMISSION_GATES: "other.example/x"}, queue)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kind": "Deployment"}, ("kind", "is no job", "TrainJob")),
        ({"apiVersion": "batch/v1beta1"}, ("apiVersion", "batch/v1")),
        ({"spec": {}}, ("spec", "is not that of a Job", "kubectl explain jobs")),
        ({"spec": None}, ("spec", "is not that of a Job")),
        ({"spec": {"template": {"spec": {"containers": "x"}}}}, ("spec.template.spec.containers", "'x' is not a list")),
        ({"metadata": "x"}, ("metadata", "is not a mapping")),
    ],
)
def test_what_is_no_job_is_told_so(changed: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as raised:
        read({**example("job"), **changed})
    assert all(word in str(raised.value) for word in words) and "\n" not in str(raised.value)


POD_PATHS = {
    "job": ("spec", "template", "spec"),
    "jobset": ("spec", "replicatedJobs", 1, "template", "spec", "template", "spec"),
    "pytorchjob": ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec"),
}
SHAPES: list[tuple[str, tuple[str | int, ...], Any, str]] = [
    *((name, (*path, "nodeSelector"), "x", "is not a mapping") for name, path in POD_PATHS.items()),
    *((name, (*path, "nodeSelector"), {"a": 1}, "is not text") for name, path in POD_PATHS.items()),
    *((name, (*path, "tolerations"), [1], "is not a mapping") for name, path in POD_PATHS.items()),
    *((name, (*path, "containers", 0, "command"), -1, "is not a list") for name, path in POD_PATHS.items()),
    *((name, (*path, "containers", 0, "args"), [None], "is not text") for name, path in POD_PATHS.items()),
    ("job", ("spec", "parallelism"), -1, "is no number of pods"),
    ("job", ("spec", "completions"), float("nan"), "is no number of pods"),
    ("jobset", ("spec", "replicatedJobs", 1, "replicas"), "x", "is no number of pods"),
    ("jobset", ("spec", "network"), True, "is not a mapping"),
    ("pytorchjob", ("spec", "pytorchReplicaSpecs", "Worker", "replicas"), [], "is no number of pods"),
    ("trainjob", ("spec", "trainer", "command"), "torchrun train.py", "is not a list"),
    ("trainjob", ("spec", "trainer", "resourcesPerNode"), 8, "is not a mapping"),
    ("trainjob", ("spec", "trainer", "numNodes"), 0.5, "is no number of pods"),
    ("trainjob", ("spec", "podTemplateOverrides"), [{"spec": {"nodeSelector": "x"}}], "is not a mapping"),
    ("trainjob", ("spec", "runtimePatches"), [None], "is not a mapping"),
]


@pytest.mark.parametrize(("name", "path", "value", "problem"), SHAPES)
def test_a_field_of_another_shape_is_named(
    name: str, path: tuple[str | int, ...], value: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = example(name)
    place = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    status = main(["advise", str(file), "--gpus", "a100-80:16", "-o", "yaml", "--launch", "torchrun"])
    told = capsys.readouterr().err
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    assert status == 2 and told.startswith(f"tilecast: {where}") and problem in told and told.count("\n") == 1, told


def test_resources_without_gpus_are_kept_beside_the_gpus_that_are_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, file = example("trainjob"), tmp_path / "job.yaml"
    document["spec"]["trainer"]["resourcesPerNode"] = {"a": 1}
    file.write_text(yaml.safe_dump(document))
    assert main(["advise", str(file), "--gpus", "a100-80:16", "-o", "yaml"]) == 0
    resources = yaml.safe_load(capsys.readouterr().out)["spec"]["trainer"]["resourcesPerNode"]
    assert resources == {"a": 1, "limits": {"nvidia.com/gpu": 8}}


def test_a_job_without_gpus_is_not_printed_as_one_to_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, file = example("jobset"), tmp_path / "job.yaml"
    del document["spec"]["replicatedJobs"][1]
    file.write_text(yaml.safe_dump(document))
    assert main(["advise", str(file), "--gpus", "a100-80:16", "-o", "yaml", "--launch", "torchrun"]) == 2
    assert "the job asks for no GPU" in capsys.readouterr().err


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["spec", "template", "containers", "replicatedJobs", "pytorchReplicaSpecs", "Worker", "resources", "limits",
         "nvidia.com/gpu", "metadata", "annotations", "labels", "status", "conditions", "name", "suspend", "trainer",
         "runtimePatches", "podTemplateOverrides", "parallelism", "affinity", "ownerReferences"]), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300)
@given(st.sampled_from(sorted(JOB_KINDS)), st.dictionaries(st.sampled_from(["spec", "metadata", "status"]), JSON), JSON)
def test_hostile_documents_never_crash(kind: str, parts: dict[str, Any], beneath: Any) -> None:
    document = {"apiVersion": JOB_KINDS[kind].api_version, "kind": kind, **parts}
    try:
        job = read(document, beneath if isinstance(beneath, dict) else None)
    except SpecError as error:
        assert "\n" not in str(error)
    else:
        assert job.gpus >= 0 and job.is_held in (True, False)


# --- what is asked


def advice_spec(job: Job) -> training_job.TrainingJobSpec:
    """The spec that a job's annotations are, checked as the CLI checks it."""
    try:
        return check(training_job.TrainingJobSpec, described(job), "spec")
    except SpecError as error:
        raise in_annotations(error) from None


def asked(**marks: str) -> training_job.TrainingJobSpec:
    document = example("job")
    own = {key.replace("_", "/"): value for key, value in marks.items()}
    document["metadata"]["annotations"] = {"tilecast.dev/" + key: value for key, value in own.items()}
    return advice_spec(read(document))


TOLD = '{"globalBatchSize": 8, "sequenceLength": 128}'


def test_annotations_are_the_spec_of_a_training_job() -> None:
    spec = asked(model="llama-2-7b", training=TOLD, constraints='{"maxGpus": 8}', objective="cost")
    assert spec.model.preset == "llama-2-7b" and spec.objective == "cost"
    assert spec.training.global_batch_size == 8 and spec.constraints and spec.constraints.max_gpus == 8
    hub = asked(model="openai-community/gpt2-xl", training=TOLD)
    assert training_job.request("x", hub).workload.model.name == "gpt2-xl"
    config = training_job.reference(asked(model="configmap:mine/config.json", training=TOLD))
    assert config and (config.name, config.key) == ("mine", "config.json") and "huggingFace" in config.field
    graph = training_job.reference(asked(model="configmap:mine/model.onnx", training=TOLD))
    assert graph and "graphRef" in graph.field


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ({}, (MODEL, "is missing", "annotate")),
        ({"model": "gpt2"}, (TRAINING, "is missing", "globalBatchSize")),
        ({"model": "gpt2", "training": "{"}, (TRAINING, "no JSON mapping")),
        ({"model": "gpt2", "training": "[]"}, (TRAINING, "no JSON mapping")),
        ({"model": "gpt2", "training": '{"globalBatchSiz": 8}'}, (f"{TRAINING}.globalBatchSiz", "did you mean")),
        ({"model": "configmap:mine", "training": TOLD}, (MODEL, "names no key", "NAME/KEY")),
        ({"model": "gpt2", "training": TOLD, "objective": "speed"}, ("tilecast.dev/objective", "speed")),
    ],
)
def test_a_wrong_annotation_is_named(marks: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as raised:
        asked(**marks)
    assert all(word in str(raised.value) for word in words)


def test_an_unknown_mode_is_told_so() -> None:
    document = example("job")
    assert mode_of(read(document)) == "Initial"
    document["metadata"]["annotations"][MODE] = "Auto"
    with pytest.raises(SpecError, match=r"tilecast.dev/mode: 'Auto' is no mode; use one of Off, Advise, Initial"):
        mode_of(read(document))


# --- Kueue


def objects(
    *quotas: tuple[str, int, dict[str, str]], reserved: dict[str, int] | None = None, **more: Any
) -> kueue.Objects:
    gpu = "nvidia.com/gpu"
    flavors = [{"name": name, "resources": [{"name": gpu, "nominalQuota": str(quota)}]} for name, quota, _ in quotas]
    used = [
        {"name": name, "resources": [{"name": gpu, "total": str(count)}]} for name, count in (reserved or {}).items()
    ]
    group = {"coveredResources": ["cpu", gpu], "flavors": flavors}
    return kueue.Objects(
        {("default", "team"): {"spec": {"clusterQueue": "all"}}},
        {"all": {"spec": {"resourceGroups": [group], **more}, "status": {"flavorsReservation": used}}},
        {name: {"spec": {"nodeLabels": labels}} for name, _, labels in quotas},
    )


def test_a_queue_s_flavors_keep_their_order_and_their_quota() -> None:
    found = kueue.queue(objects(("a", 16, A100), ("h", 8, H100), reserved={"a": 12}), "default", "team")
    assert [(item.name, item.quota, item.free) for item in found.flavors] == [("a", 16, 4), ("h", 8, 8)]
    first = {gpus: getattr(found.first(gpus), "name", None) for gpus in (4, 8, 16, 17)}
    assert first == {4: "a", 8: "h", 16: "a", 17: None}


@pytest.mark.parametrize(("limit", "quota", "free"), [(None, 24, 18), ("4", 20, 18), ("0", 16, 14)])
def test_a_cohort_lends_what_it_does_not_use(limit: str | None, quota: int, free: int) -> None:
    found = objects(("a", 16, A100), reserved={"a": 2}, cohortName="both")
    other = objects(("a", 10, A100), reserved={"a": 4}, cohortName="both").cluster_queues["all"]
    other["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["lendingLimit"] = "8"
    own = found.cluster_queues["all"]["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]
    if limit is not None:
        own["borrowingLimit"] = limit
    found = replace(found, cluster_queues={**found.cluster_queues, "other": other})
    (flavor,) = kueue.queue(found, "default", "team").flavors
    assert (flavor.quota, flavor.free) == (quota, free)


def test_a_queue_that_leads_nowhere_is_told_so() -> None:
    found = objects(("a", 16, A100))
    with pytest.raises(
        SpecError, match=r"queue-name: there is no LocalQueue tea in namespace default; .*use one of team"
    ):
        kueue.queue(found, "default", "tea")
    with pytest.raises(SpecError, match="names ClusterQueue all, which does not exist"):
        kueue.queue(replace(found, cluster_queues={}), "default", "team")
    with pytest.raises(SpecError, match="names ResourceFlavor a, which does not exist; create it"):
        kueue.queue(replace(found, flavors={}), "default", "team")
    found.cluster_queues["all"]["spec"]["resourceGroups"][0]["coveredResources"] = ["cpu"]
    with pytest.raises(SpecError, match=r"has no quota of nvidia.com/gpu"):
        kueue.queue(found, "default", "team")


@pytest.mark.parametrize(("text", "count"), [("16", 16), (16, 16), ("1k", 1000), ("8000m", 8), (None, 0), ("x", 0)])
def test_quantities_are_read(text: object, count: int) -> None:
    assert kueue.whole(text) == count


# --- candidates


def usable(job: Job, queue: kueue.Queue | None = None, *, is_placed: bool = True) -> Candidates:
    pools, labels = cluster()
    return candidates(job, pools, labels, queue, is_placed=is_placed)


def codes(found: Candidates) -> dict[str, str]:
    return {item.pool: item.code for item in found.rejections}


def test_a_pod_must_fit_the_nodes_it_is_placed_on() -> None:
    job = read(example("trainjob"))
    assert codes(usable(job)) == {"t4": "PodTooLarge"}
    assert codes(usable(job, is_placed=False)) == {}


def test_selectors_that_are_no_choice_of_node_type_stay() -> None:
    document = example("job")
    pod = document["spec"]["template"]["spec"]
    pod["nodeSelector"] = {**A100, "topology.kubernetes.io/zone": "nowhere"}
    assert set(codes(usable(read(document))).values()) == {"NotSelected"}
    pod["nodeSelector"] = A100
    found = usable(read(document))
    assert codes(found) == {}
    assert found.baseline and (found.baseline.pool, found.baseline.gpus) == ("a100-80", 8)


def test_required_affinity_limits_what_may_be_written() -> None:
    document = example("jobset")
    expression = {"key": "nvidia.com/gpu.product", "operator": "In", "values": [*A100.values(), *H100.values()]}
    term = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    pod = document["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]
    pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}
    assert [pool.name for pool in usable(read(document)).pools] == ["a100-80", "h100-sxm"]
    assert len(usable(read(document), is_placed=False).pools) == 4, "advice may say what the job should change"


def test_a_taint_is_passed_by_only_with_the_job_s_own_toleration() -> None:
    pools, labels = cluster()
    taint = {"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"}
    usual = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    tainted = [replace(pool, tolerations=(taint, usual) if pool.name == "h100-sxm" else (usual,)) for pool in pools]
    document = example("job")
    found = candidates(read(document), tainted, labels, None, is_placed=True)
    assert codes(found) == {"h100-sxm": "NotTolerated"}
    document["spec"]["template"]["spec"]["tolerations"] = [{"key": "team", "operator": "Exists"}]
    assert codes(candidates(read(document), tainted, labels, None, is_placed=True)) == {}


def test_flavors_decide_which_pools_a_queue_reaches() -> None:
    queue = kueue.queue(objects(("a", 16, A100), ("h", 2, H100), reserved={"a": 16}), "default", "team")
    found = usable(read(example("job-kueue")), queue)
    assert codes(found) == {"h100-sxm": "QuotaTooSmall", "l4": "NoFlavor", "t4": "NoFlavor"}
    (one,) = found.usable
    assert (one.pool.name, one.pool.max_nodes, one.has_room(4)) == ("a100-80", 2, False)
    assert found.baseline and found.baseline.pool == "a100-80"


def advised(name: str, queue: kueue.Queue | None = None, *, is_placed: bool = True, **changed: Any) -> Any:
    document = example(name) | changed
    job = read(document)
    found = usable(job, queue, is_placed=is_placed)
    wanted = request(training_job.request("x", advice_spec(job)), job, found, is_placed=is_placed)
    return document, job, found, settled(advise(wanted, found.pools), found)


def test_kueue_s_first_choice_is_the_baseline_and_the_better_flavor_wins() -> None:
    queue = kueue.queue(objects(("t4", 16, {"nvidia.com/gpu.product": "Tesla-T4"}), ("h", 16, H100)), "default", "team")
    _, job, found, advice = advised("job-kueue", queue)
    assert advice.baseline.pool.name == "t4" and advice.best.pool.name == "h100-sxm"
    assert advice.baseline.step_s > 2 * advice.best.step_s
    assert advice.best.gpus == advice.baseline.gpus == job.gpus
    made = placement(advice.best, job, found)
    assert made and made.node_selector == H100 and made.pods is None


def test_quota_that_is_free_now_comes_first() -> None:
    queue = kueue.queue(objects(("h", 16, H100), ("a", 16, A100), reserved={"h": 14}), "default", "team")
    _, _, _, advice = advised("job-kueue", queue)
    assert [offer.pool.name for offer in advice.offers] == ["a100-80", "h100-sxm"]
    assert advice.offers[1].reason.endswith("waits for quota of h")


def test_pods_change_only_where_the_user_says_how_many() -> None:
    _, _, _, advice = advised("job")
    assert advice.best.gpus == 8
    document = example("job")
    document["metadata"]["annotations"]["tilecast.dev/constraints"] = '{"gpus": 16}'
    _, job, found, advice = advised("job", metadata=document["metadata"])
    assert advice.best.gpus == 16
    made = placement(advice.best, job, found)
    assert made and made.pods == 4
    assert FieldChange(("spec", "parallelism"), 4) in changes(document, job, made)
    assert placement(replace(advice.best, nodes=1, gpus_per_node=6), job, found) is None


# --- what changes


@pytest.mark.parametrize("path", EXISTING, ids=lambda path: path.stem)
def test_a_changed_job_is_read_back_where_it_was_put(path: Path) -> None:
    text = path.read_text()
    (document,) = documents.load(text)
    job = read(document)
    put = Placement(H100, ({"key": "nvidia.com/gpu", "operator": "Exists"},))
    text = edited(text, changes(document, job, put))
    (document,) = documents.load(text)
    again = read(document)
    assert all(H100.items() <= pods.node_selector.items() for pods in again.workers)
    assert all(put.tolerations[0] in pods.tolerations for pods in again.workers)
    assert changes(document, again, put) == [], "once is enough"
    assert [pods for pods in again.pods if not pods.gpus] == [pods for pods in job.pods if not pods.gpus]


def test_older_trainers_are_given_overrides() -> None:
    document = example("trainjob")
    (change,) = changes(document, read(document), Placement(H100), runtime_patches=False)
    assert change == FieldChange(
        ("spec", "podTemplateOverrides"), [{"targetJobs": [{"name": "node"}], "spec": {"nodeSelector": H100}}]
    )
    document["spec"]["podTemplateOverrides"] = change.value
    assert read(document).pods[0].node_selector == H100
    assert changes(document, read(document), Placement(H100)) == []


def test_the_choice_replaces_a_choice_and_nothing_else() -> None:
    document = example("pytorchjob")
    worker = document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    worker["nodeSelector"] = {**A100, "disk": "fast"}
    found = {change.path[2]: change.value for change in changes(document, read(document), Placement(H100))}
    assert found == {"Master": H100, "Worker": {**H100, "disk": "fast"}}


# --- export


@pytest.mark.parametrize("path", EXISTING, ids=lambda path: path.stem)
def test_an_exported_manifest_differs_in_advised_fields_only(path: Path) -> None:
    text = path.read_text()
    document, job, found, advice = advised(path.stem, is_placed=False)
    put = exported(advice.best, job, found)
    after = edited(text, changes(document, job, put))
    (changed,) = documents.load(after)
    again = read(changed)
    assert again.gpus == advice.best.gpus
    assert all(put.node_selector.items() <= pods.node_selector.items() for pods in again.workers)
    lines = [line for line in difflib.ndiff(text.splitlines(), after.splitlines()) if line[0] in "+-"]
    numbers = ("numNodes", "nproc", "numProc", "gpu", "parallelism", "completions", "replicas")
    choice = (
        "nodeSelector",
        "replicatedJobs",
        "runtimePatches",
        "manager",
        "trainingRuntimeSpec",
        "template",
        "spec:",
        "name:",
    )
    choice += ("tolerations:", "key:", "operator:", "value:", "effect:")
    assert lines and all(any(word in line for word in (*numbers, *choice)) for line in lines), lines
    assert [line for line in text.splitlines() if "#" in line] == [line for line in after.splitlines() if "#" in line]


NODES = str(EXAMPLES / "clusters" / "mixed.yaml")


@pytest.mark.parametrize("path", EXISTING, ids=lambda path: path.stem)
def test_the_command_line_prints_the_manifest_to_commit(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(path), "--nodes", NODES, "-o", "yaml"]) == 0
    text = capsys.readouterr().out
    assert text != path.read_text() and text.startswith(path.read_text().split("\n")[0])
    assert documents.load(text)[0]["metadata"] == example(path.stem)["metadata"]
    assert main(["advise", str(path), "--nodes", NODES]) == 0
    assert "h100-sxm" in capsys.readouterr().out


def test_a_manifest_is_exported_for_pools_without_labels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(EXAMPLES / "existing" / "jobset.yaml"), "--gpus", "a100-80:16", "-o", "yaml"]) == 0
    changed = capsys.readouterr().out
    assert "nodeSelector" not in changed and "nvidia.com/gpu: 8" in changed


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tilecast.dev/model: resnet-50", "tilecast.dev/other: x", ("tilecast.dev/model: is missing", "annotate")),
        ("model: resnet-50", "model: resnet-5", ("tilecast.dev/model", "resnet-5", "did you mean")),
        ('"globalBatchSize"', '"batch"', ("tilecast.dev/training.batch", "unknown field")),
    ],
)
def test_a_wrong_file_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text((EXAMPLES / "existing" / "job.yaml").read_text().replace(old, new))
    assert main(["advise", str(path), "--nodes", NODES]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in words) and told.count("\n") == 1


def test_a_runtime_in_the_same_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beneath = {**runtime(), "apiVersion": "trainer.kubeflow.org/v1alpha1", "metadata": {"name": "torch-distributed"}}
    document = example("trainjob")
    document["spec"]["trainer"] = {"image": "x"}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all([beneath, document], sort_keys=False))
    assert main(["advise", str(path), "--nodes", NODES, "-o", "yaml"]) == 0
    first, second = documents.load(capsys.readouterr().out)
    assert first == beneath
    assert second["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["name"]


HAND = """\
# top
a:   1   # one
list:
- x
# between
- {k: 'v', n: [1,2]}
deep:
    inner:  # why
        "quoted": yes
        empty:
    block: |
      text

    last: 3

# end
"""


@pytest.mark.parametrize(
    ("path", "value", "before", "after"),
    [
        (("a",), 22, "a:   1   # one", "a:   22   # one"),
        (("a",), "1", "a:   1   # one", "a:   '1'   # one"),
        (("list", 0), "y", "- x", "- y"),
        (("list", 1, "k"), "w", "{k: 'v', n: [1,2]}", "{k: w, n: [1,2]}"),
        (("list", 1, "z"), 3, "- {k: 'v', n: [1,2]}", "- {k: v, n: [1, 2], z: 3}"),
        (("deep", "inner", "new"), {"x": 1}, "        empty:\n", "        empty:\n        new:\n          x: 1\n"),
        (("deep", "block"), "t", "    block: |\n      text\n", "    block: t\n"),
        (("deep", "more", "yet"), [1], "    last: 3\n", "    last: 3\n    more:\n      yet:\n      - 1\n"),
        (("deep", "inner"), {"quoted": False}, '        "quoted": yes\n        empty:\n', '        "quoted": false\n'),
        (("list",), ["x", {"k": "v", "n": [1, 2]}, "z"], "n: [1,2]}\n", "n: [1,2]}\n- z\n"),
    ],
)  # fmt: skip
def test_an_edit_touches_its_place_only(path: tuple[str | int, ...], value: Any, before: str, after: str) -> None:
    assert HAND.count(before) == 1
    assert edited(HAND, [FieldChange(path, value)]) == HAND.replace(before, after)


KEYS = st.sampled_from(["a", "b c", "nvidia.com/gpu.product", "8"])
VALUES = st.recursive(
    st.integers(0, 9) | st.booleans() | st.text(alphabet="ab:#-'\" {}1", max_size=6),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(KEYS, inner, min_size=1, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(
    st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), st.lists(KEYS, min_size=1, max_size=3), VALUES, st.booleans()
)
def test_an_edited_text_means_what_the_edited_value_means(
    old: dict[str, Any], path: list[str], new: Any, flow: bool
) -> None:
    text = yaml.safe_dump(old, default_flow_style=flow, sort_keys=False)
    wanted = node = yaml.safe_load(text)
    for key in path[:-1]:
        if not isinstance(node.get(key), dict):
            node[key] = {}
        node = node[key]
    node[path[-1]] = new
    assert yaml.safe_load(edited(text, [FieldChange(tuple(path), new)])) == wanted


def test_every_example_is_a_job() -> None:
    assert {example(path.stem)["kind"] for path in EXISTING} == set(JOB_KINDS)
    assert all(is_job(example(path.stem)) for path in EXISTING)
