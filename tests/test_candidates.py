"""Pools that a job may use, changes to the job, and the manifest to commit."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from existing_jobs import (
    A100,
    EXAMPLES,
    EXISTING,
    H100,
    advised,
    cluster,
    codes,
    example,
    objects,
    runtime,
    usable,
)
from tilecast.api import documents
from tilecast.api.edit import edit_yaml
from tilecast.api.fields import FieldChange
from tilecast.cli import main
from tilecast.jobs import (
    Placement,
    compute_changes,
    kueue,
    read_job,
)
from tilecast.jobs.candidates import find_candidates, find_job_placement, find_placement_for_new_job
from tilecast.spec import SpecError


def test_a_queue_s_flavors_keep_their_order_and_their_quota() -> None:
    queue = kueue.find_queue(objects(("a", 16, A100), ("h", 8, H100), reserved={"a": 12}), "default", "team")
    assert [(item.name, item.quota, item.free) for item in queue.flavors] == [("a", 16, 4), ("h", 8, 8)]
    first = {gpus: getattr(queue.find_first_flavor(gpus), "name", None) for gpus in (4, 8, 16, 17)}
    assert first == {4: "a", 8: "h", 16: "a", 17: None}


@pytest.mark.parametrize(("limit", "quota", "free"), [(None, 24, 18), ("4", 20, 18), ("0", 16, 14)])
def test_a_cohort_lends_what_it_does_not_use(limit: str | None, quota: int, free: int) -> None:
    listing = objects(("a", 16, A100), reserved={"a": 2}, cohortName="both")
    other = objects(("a", 10, A100), reserved={"a": 4}, cohortName="both").cluster_queues["all"]
    other["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["lendingLimit"] = "8"
    own = listing.cluster_queues["all"]["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]
    if limit is not None:
        own["borrowingLimit"] = limit
    listing = replace(listing, cluster_queues={**listing.cluster_queues, "other": other})
    (flavor,) = kueue.find_queue(listing, "default", "team").flavors
    assert (flavor.quota, flavor.free) == (quota, free)


def test_a_queue_that_leads_nowhere_is_told_so() -> None:
    listing = objects(("a", 16, A100))
    with pytest.raises(
        SpecError, match=r"queue-name: there is no LocalQueue tea in namespace default; .*use one of team"
    ):
        kueue.find_queue(listing, "default", "tea")
    with pytest.raises(SpecError, match="names ClusterQueue all, which does not exist"):
        kueue.find_queue(replace(listing, cluster_queues={}), "default", "team")
    with pytest.raises(SpecError, match="names ResourceFlavor a, which does not exist; create it"):
        kueue.find_queue(replace(listing, flavors={}), "default", "team")
    listing.cluster_queues["all"]["spec"]["resourceGroups"][0]["coveredResources"] = ["cpu"]
    with pytest.raises(SpecError, match=r"has no quota of nvidia.com/gpu"):
        kueue.find_queue(listing, "default", "team")


@pytest.mark.parametrize(("text", "count"), [("16", 16), (16, 16), ("1k", 1000), ("8000m", 8), (None, 0), ("x", 0)])
def test_quantities_are_read(text: object, count: int) -> None:
    assert kueue.parse_gpu_count(text) == count


def test_a_pod_must_fit_the_nodes_it_is_placed_on() -> None:
    job = read_job(example("trainjob"))
    assert codes(usable(job)) == {"t4": "PodTooLarge"}
    assert codes(usable(job, writes_advice=False)) == {}


def test_selectors_that_are_no_choice_of_node_type_stay() -> None:
    document = example("job")
    pod = document["spec"]["template"]["spec"]
    pod["nodeSelector"] = {**A100, "topology.kubernetes.io/zone": "nowhere"}
    assert set(codes(usable(read_job(document))).values()) == {"NotSelected"}
    pod["nodeSelector"] = A100
    choice = usable(read_job(document))
    assert codes(choice) == {}
    assert choice.baseline and (choice.baseline.pool, choice.baseline.gpus) == ("a100-80", 8)


def test_required_affinity_limits_what_may_be_written() -> None:
    document = example("jobset")
    expression = {"key": "nvidia.com/gpu.product", "operator": "In", "values": [*A100.values(), *H100.values()]}
    term = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    pod = document["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]
    pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}
    assert [pool.name for pool in usable(read_job(document)).pools] == ["a100-80", "h100-sxm"]
    assert len(usable(read_job(document), writes_advice=False).pools) == 4, "advice may say what the job should change"


def test_a_taint_is_passed_by_only_with_the_job_s_own_toleration() -> None:
    pools, labels = cluster()
    taint = {"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"}
    usual = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    tainted = [replace(pool, tolerations=(taint, usual) if pool.name == "h100-sxm" else (usual,)) for pool in pools]
    document = example("job")
    choice = find_candidates(read_job(document), tainted, labels, None, writes_advice=True)
    assert codes(choice) == {"h100-sxm": "NotTolerated"}
    document["spec"]["template"]["spec"]["tolerations"] = [{"key": "team", "operator": "Exists"}]
    assert codes(find_candidates(read_job(document), tainted, labels, None, writes_advice=True)) == {}


def test_flavors_decide_which_pools_a_queue_reaches() -> None:
    queue = kueue.find_queue(objects(("a", 16, A100), ("h", 2, H100), reserved={"a": 16}), "default", "team")
    choice = usable(read_job(example("job-kueue")), queue)
    assert codes(choice) == {"h100-sxm": "QuotaTooSmall", "l4": "NoFlavor", "t4": "NoFlavor"}
    (one,) = choice.usable
    assert (one.pool.name, one.pool.max_nodes, one.has_room(4)) == ("a100-80", 2, False)
    assert choice.baseline and choice.baseline.pool == "a100-80"


def test_kueue_s_first_choice_is_the_baseline_and_the_better_flavor_wins() -> None:
    queue = kueue.find_queue(
        objects(("t4", 16, {"nvidia.com/gpu.product": "Tesla-T4"}), ("h", 16, H100)), "default", "team"
    )
    _, job, choice, advice = advised("job-kueue", queue)
    assert advice.baseline.pool.name == "t4" and advice.best.pool.name == "h100-sxm"
    assert advice.baseline.step_s > 2 * advice.best.step_s
    assert advice.best.gpus == advice.baseline.gpus == job.gpus
    made = find_job_placement(advice.best, job, choice)
    assert made and made.node_selector == H100 and made.pods is None


def test_quota_that_is_free_now_comes_first() -> None:
    queue = kueue.find_queue(objects(("h", 16, H100), ("a", 16, A100), reserved={"h": 14}), "default", "team")
    _, _, _, advice = advised("job-kueue", queue)
    assert [offer.pool.name for offer in advice.offers] == ["a100-80", "h100-sxm"]
    assert advice.offers[1].reason.endswith("waits for quota of h")


def test_pods_change_only_where_the_user_says_how_many() -> None:
    _, _, _, advice = advised("job")
    assert advice.best.gpus == 8
    document = example("job")
    document["metadata"]["annotations"]["tilecast.dev/constraints"] = '{"gpus": 16}'
    _, job, choice, advice = advised("job", metadata=document["metadata"])
    assert advice.best.gpus == 16
    made = find_job_placement(advice.best, job, choice)
    assert made and made.pods == 4
    assert FieldChange(("spec", "parallelism"), 4) in compute_changes(document, job, made)
    assert find_job_placement(replace(advice.best, nodes=1, gpus_per_node=6), job, choice) is None


@pytest.mark.parametrize("path", EXISTING, ids=lambda path: path.stem)
def test_a_changed_job_is_read_back_where_it_was_put(path: Path) -> None:
    text = path.read_text()
    (document,) = documents.load_documents(text)
    job = read_job(document)
    put = Placement(H100, ({"key": "nvidia.com/gpu", "operator": "Exists"},))
    text = edit_yaml(text, compute_changes(document, job, put))
    (document,) = documents.load_documents(text)
    again = read_job(document)
    assert all(H100.items() <= pods.node_selector.items() for pods in again.workers)
    assert all(put.tolerations[0] in pods.tolerations for pods in again.workers)
    assert compute_changes(document, again, put) == [], "once is enough"
    assert [pods for pods in again.pods if not pods.gpus] == [pods for pods in job.pods if not pods.gpus]


def test_older_trainers_are_given_overrides() -> None:
    document = example("trainjob")
    (change,) = compute_changes(document, read_job(document), Placement(H100), has_runtime_patches=False)
    assert change == FieldChange(
        ("spec", "podTemplateOverrides"), [{"targetJobs": [{"name": "node"}], "spec": {"nodeSelector": H100}}]
    )
    document["spec"]["podTemplateOverrides"] = change.value
    assert read_job(document).pods[0].node_selector == H100
    assert compute_changes(document, read_job(document), Placement(H100)) == []


def test_the_choice_replaces_a_choice_and_nothing_else() -> None:
    document = example("pytorchjob")
    worker = document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    worker["nodeSelector"] = {**A100, "disk": "fast"}
    values = {change.path[2]: change.value for change in compute_changes(document, read_job(document), Placement(H100))}
    assert values == {"Master": H100, "Worker": {**H100, "disk": "fast"}}


@pytest.mark.parametrize("path", EXISTING, ids=lambda path: path.stem)
def test_an_exported_manifest_differs_in_advised_fields_only(path: Path) -> None:
    text = path.read_text()
    document, job, options, advice = advised(path.stem, writes_advice=False)
    put = find_placement_for_new_job(advice.best, job, options)
    after = edit_yaml(text, compute_changes(document, job, put))
    (changed,) = documents.load_documents(after)
    again = read_job(changed)
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
@pytest.mark.slow
def test_the_command_line_prints_the_manifest_to_commit(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(path), "--nodes", NODES, "-o", "yaml"]) == 0
    text = capsys.readouterr().out
    assert text != path.read_text() and f"\n{path.read_text().splitlines()[0]}\n" in f"\n{text}"
    assert documents.load_documents(text)[0]["metadata"] == example(path.stem)["metadata"]
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
    message = capsys.readouterr().err
    assert all(word in message for word in words) and message.count("\n") == 1


def test_a_runtime_in_the_same_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beneath = {**runtime(), "apiVersion": "trainer.kubeflow.org/v1alpha1", "metadata": {"name": "torch-distributed"}}
    document = example("trainjob")
    document["spec"]["trainer"] = {"image": "x"}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all([beneath, document], sort_keys=False))
    assert main(["advise", str(path), "--nodes", NODES, "-o", "yaml"]) == 0
    first, second = documents.load_documents(capsys.readouterr().out)
    assert first == beneath
    assert second["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["name"]
