"""`tilecast queue`: documents it reads, its output, and refusals."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tilecast.advice import Request
from tilecast.api.training_job import read_request, training_job_document
from tilecast.cli import main
from tilecast.hardware import Pool
from tilecast.inputs import queue
from tilecast.inputs.pools import PoolOptions, read_pools
from tilecast.planner.options import list_job_options, scale_options, separate_length
from tilecast.planner.problem import JobOption

ROOT = Path(__file__).resolve().parent.parent
JOBS = str(ROOT / "examples" / "queue" / "jobs.yaml")
MIXED = str(ROOT / "examples" / "clusters" / "mixed.yaml")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["queue", *words]) == 0
    return capsys.readouterr().out


def training_job(name: str, **spec: Any) -> dict[str, Any]:
    training = {"globalBatchSize": 256, "precision": "fp16", "steps": 1000}
    body = {"model": {"preset": "resnet-18"}, "training": training, "constraints": {"gpus": 1}, **spec}
    return {"apiVersion": "tilecast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": body}


def written(folder: Path, *documents: dict[str, Any]) -> str:
    file = folder / "jobs.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    return str(file)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    document = json.loads(shown(capsys, *words, "-o", "json"))
    assert isinstance(document, dict)
    return document


@pytest.mark.slow
def test_the_first_screen_has_jobs_totals_and_who_pays(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, JOBS, "--nodes", MIXED, "--what-if", "h100-sxm:+2")
    lines = out.splitlines()
    assert lines[0].startswith("12 jobs on ")
    assert lines[2].split()[:6] == ["JOB", "NOW", "ADVISED", "GPUS", "PLAN", "START"]
    for name in ("this plan", "first come first served", "finish first", "Kueue's order of flavors", "cheapest pool"):
        assert name in out
    assert "pays" in out
    assert "With +2 nodes of h100-sxm: mean completion" in out
    assert "A plan in Kueue's order is at most" in out


def test_one_job_and_one_node_are_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, written(tmp_path, training_job("one")), "--gpus", "t4:1", "--what-if", "t4:+1")
    assert out.startswith("1 job on ") and "\n1 job planned, " in out and "With +1 node of t4: " in out


@pytest.mark.slow
def test_a_late_job_is_named_with_what_would_help_and_both_orders_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = written(tmp_path, training_job("late", deadlineSeconds=1), training_job("other"))
    words = jobs, "--gpus", "t4:1"
    document = planned(capsys, *words, "--order", "free")
    assert document["order"] == "free"
    assert set(document["orders"]) == {"kueue", "free"}
    assert [(item["job"], item["onTime"]["latestStartSeconds"] < 0) for item in document["late"]] == [("late", True)]
    out = shown(capsys, *words)
    assert "late ends" in out
    assert "No pool is fast enough" in out
    assert "this plan, Kueue's order" in out
    assert "a plan, free order" in out


@pytest.mark.slow
def test_the_plan_is_better_than_every_reference_by_its_policy(capsys: pytest.CaptureFixture[str]) -> None:
    totals = planned(capsys, JOBS, "--nodes", MIXED)["totals"]
    plan = totals.pop("plan")
    assert len(totals) == 4
    assert all(plan["completionSeconds"] <= 1.03 * other["completionSeconds"] for other in totals.values())


@pytest.mark.slow
def test_csv_has_a_line_a_job_with_times_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(shown(capsys, JOBS, "--nodes", MIXED, "-o", "csv"))))
    assert len(rows) == 12
    for row in rows:
        assert float(row["start_s"]) < float(row["finish_s"])
        assert float(row["lower_s"]) <= float(row["finish_s"]) <= float(row["upper_s"])


class _Page(HTMLParser):
    VOID = ("meta", "link", "path", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.bars = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.bars += tag == "rect"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.bars += tag == "rect"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.slow
def test_the_page_draws_a_bar_for_each_job(capsys: pytest.CaptureFixture[str]) -> None:
    page = _Page()
    page.feed(shown(capsys, JOBS, "--nodes", MIXED, "-o", "html"))
    assert page.open == []
    assert page.bars == 12


def test_a_job_that_cannot_be_planned_is_named_and_the_rest_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = training_job("endless")
    del endless["spec"]["training"]["steps"]
    heavy = training_job("heavy", model={"preset": "llama-2-7b"})
    heavy["spec"]["training"] = {"globalBatchSize": 8, "sequenceLength": 4096, "steps": 10, "precision": "fp16"}
    wrong = training_job("wrong", constraints={"gpus": 1, "allowedPools": ["a100-80"]})
    file = written(tmp_path, training_job("fits"), endless, heavy, wrong)
    document = planned(capsys, file, "--gpus", "t4:4")
    assert [job["name"] for job in document["jobs"]] == ["fits"]
    problems = {item["job"]: item["problem"] for item in document["unplanned"]}
    assert problems.keys() == {"endless", "heavy", "wrong"}
    assert "how long the job runs is not known" in problems["endless"]
    assert "GiB too much" in problems["heavy"]


def test_where_nothing_can_be_planned_the_status_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = training_job("large", constraints={"gpus": 64})
    assert main(["queue", written(tmp_path, large), "--gpus", "t4:4"]) == 3
    assert capsys.readouterr().out.startswith("x  large  ")


def batch_job(name: str, **others: Any) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((ROOT / "examples" / "existing" / "job-kueue.yaml").read_text())
    training = '{"globalBatchSize": 1024, "precision": "fp16", "steps": 1000}'
    document["metadata"]["name"] = name
    document["metadata"]["annotations"]["tilecast.dev/training"] = training
    return {**document, **others}


def kueue(quota: int) -> list[dict[str, Any]]:
    label = {"node.kubernetes.io/instance-type": "g4dn.12xlarge"}
    flavors = [{"name": "t4", "resources": [{"name": "nvidia.com/gpu", "nominalQuota": quota}]}]
    return [
        {"kind": "ResourceFlavor", "metadata": {"name": "t4"}, "spec": {"nodeLabels": label}},
        {
            "kind": "ClusterQueue",
            "metadata": {"name": "everyone"},
            "spec": {"resourceGroups": [{"coveredResources": ["nvidia.com/gpu"], "flavors": flavors}]},
        },
        {"kind": "LocalQueue", "metadata": {"name": "team"}, "spec": {"clusterQueue": "everyone"}},
    ]


def test_a_quota_of_kueue_is_kept_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [batch_job(f"job-{index}") for index in range(3)]
    document = planned(capsys, written(tmp_path, *jobs, *kueue(quota=4)), "--nodes", MIXED)
    assert {job["pool"] for job in document["jobs"]} == {"t4"}
    ends = sorted((job["startSeconds"], job["finishSeconds"]["target"]) for job in document["jobs"])
    assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(ends))


def test_jobs_start_by_the_priority_of_their_pods_where_kueue_s_class_is_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classes = [
        {"kind": "PriorityClass", "metadata": {"name": "low"}, "value": -5},
        {"kind": "PriorityClass", "metadata": {"name": "usual"}, "value": 10, "globalDefault": True},
        {"kind": "PriorityClass", "metadata": {"name": "high"}, "value": 50},
        {"kind": "WorkloadPriorityClass", "metadata": {"name": "high"}, "value": 20},
    ]
    jobs = [batch_job(name) for name in ("by-low-pods", "by-default", "by-label", "by-high-pods")]
    for job, name in zip((jobs[0], jobs[2], jobs[3]), ("low", "low", "high"), strict=True):
        job["spec"]["template"]["spec"]["priorityClassName"] = name
    jobs[2]["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "high"
    document = planned(capsys, written(tmp_path, *jobs, *classes, *kueue(quota=4)), "--nodes", MIXED)
    starts = {job["name"]: job["startSeconds"] for job in document["jobs"]}
    assert sorted(starts, key=starts.__getitem__) == ["by-high-pods", "by-label", "by-default", "by-low-pods"]


def test_a_quota_that_is_too_small_names_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["queue", written(tmp_path, batch_job("job"), *kueue(quota=0)), "--nodes", MIXED]) == 3
    assert "x  job" in capsys.readouterr().out


@pytest.mark.slow
def test_a_job_that_runs_stays_and_has_less_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pinned = batch_job("running", status={"active": 1, "startTime": "2026-11-02T08:00:00Z"})
    pinned["spec"]["suspend"] = False
    pinned["spec"]["template"]["spec"]["nodeSelector"] = {"node.kubernetes.io/instance-type": "g4dn.12xlarge"}
    waiting = batch_job("waiting")
    file = written(tmp_path, pinned, waiting)
    document = planned(capsys, file, "--nodes", MIXED, "--at", "2026-11-02T08:00:00Z")
    later = planned(capsys, file, "--nodes", MIXED, "--at", "2026-11-02T08:01:00Z")
    (before,), (after,) = ([job for job in held["jobs"] if job["running"]] for held in (document, later))
    assert before["pool"] == after["pool"] == "t4"
    assert after["finishSeconds"]["target"] == pytest.approx(before["finishSeconds"]["target"] - 60, abs=1)


def test_gpus_of_pods_that_are_of_none_of_the_jobs_are_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def pod(number: int, node: str, phase: str = "Running") -> dict[str, Any]:
        limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
        spec = {"nodeName": node, "containers": [limits]}
        return {"kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": spec, "status": {"phase": phase}}

    names = [item["metadata"]["name"] for item in yaml.safe_load(Path(MIXED).read_text())["items"] if is_h100(item)]
    job = training_job("only", constraints={"gpus": 1, "allowedPools": ["h100-sxm"]})
    ended = [pod(number, name, "Succeeded") for number, name in enumerate(names)]
    assert planned(capsys, written(tmp_path, job, *ended), "--nodes", MIXED)["jobs"][0]["startSeconds"] == 0
    others = [pod(number, name) for number, name in enumerate(names)]
    assert main(["queue", written(tmp_path, job, *others), "--nodes", MIXED]) == 3
    assert "h100-sxm has no GPU free of others" in capsys.readouterr().out


def is_h100(document: dict[str, Any]) -> bool:
    return "H100" in document["metadata"]["labels"].get("nvidia.com/gpu.product", "")


def test_jobs_of_one_name_are_told_apart_and_what_ended_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = batch_job("ended", status={"conditions": [{"type": "Complete", "status": "True"}]})
    other = training_job("same")
    other["metadata"]["namespace"] = "research"
    document = planned(capsys, written(tmp_path, training_job("same"), other, ended), "--gpus", "t4:4")
    assert [job["name"] for job in document["jobs"]] == ["default/same", "research/same"]


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (["--what-if", "h200:+1"], "--what-if: there is no pool 'h200'"),
        (["--what-if", "h100-sxm:2"], "--what-if: cannot read 'h100-sxm:2'"),
        (["--what-if", "h100-sxm:-9"], "take away no more than there are"),
        (["--horizon", "soon"], "--horizon: cannot read 'soon'"),
        (["--at", "soon"], "--at: cannot read 'soon'"),
    ],
)
def test_a_bad_flag_is_one_line(words: list[str], problems: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["queue", JOBS, "--nodes", MIXED, *words]) == 2
    error = capsys.readouterr().err
    assert problems in error
    assert error.count("\n") == 1


def test_a_file_without_a_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["queue", written(tmp_path, {"kind": "ConfigMap"}), "--gpus", "t4:4"]) == 2
    assert "no job" in capsys.readouterr().err
    assert main(["queue", str(tmp_path / "none.yaml"), "--gpus", "t4:4"]) == 2


def test_jobs_that_differ_in_length_alone_are_priced_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[dict[str, Any]] = [{"steps": 1000}, {"steps": 3000}, {"steps": 70}]
    objectives = [{}, {"deadlineSeconds": 9000, "objective": "cheapestBeforeDeadline"}, {}]
    every = [
        training_job(f"j{number}", training={"globalBatchSize": 256, "precision": "fp16", **length}, **objective)
        for number, (length, objective) in enumerate(zip(lengths, objectives, strict=True))
    ]
    priced: list[Request] = []

    def counted(request: Request, pools: Sequence[Pool]) -> tuple[JobOption, ...]:
        priced.append(request)
        return list_job_options(request, pools)

    monkeypatch.setattr(queue, "list_job_options", counted)
    rows = {item["name"]: item for item in planned(capsys, written(tmp_path, *every), "--gpus", "t4:4")["jobs"]}
    assert len(priced) == 1
    took = [rows[f"j{number}"]["finishSeconds"]["target"] - rows[f"j{number}"]["startSeconds"] for number in range(3)]
    assert took[1] == pytest.approx(3 * took[0])
    assert took[2] == pytest.approx(0.07 * took[0])


@pytest.mark.parametrize("length", [{"steps": 1234}, {"tokens": 10**9 + 1}])
def test_options_of_one_step_scaled_are_those_of_the_run(length: dict[str, int]) -> None:
    training = {"globalBatchSize": 64, "sequenceLength": 512, "precision": "fp16", **length}
    spec = {"model": {"preset": "gpt2"}, "training": training, "constraints": {"maxGpus": 8}}
    request = read_request(training_job_document("job", spec))
    pools = read_pools(PoolOptions(gpus="t4:4,h100-sxm:8"))
    one_step, steps = separate_length(request)
    for ours, whole in zip(
        scale_options(list_job_options(one_step, pools), steps), list_job_options(request, pools), strict=True
    ):
        assert (ours.pool, ours.gpus, ours.plan, ours.step_s) == (whole.pool, whole.gpus, whole.plan, whole.step_s)
        for name in ("seconds", "lower_s", "upper_s", "cost"):
            assert getattr(ours, name) == pytest.approx(getattr(whole, name), rel=1e-9)


def test_a_range_of_batches_keeps_the_length() -> None:
    training = {"globalBatchSizeRange": {"min": 32, "max": 128}, "globalBatchSize": 64, "precision": "fp16", "steps": 9}
    request = read_request(training_job_document("job", {"model": {"preset": "resnet-18"}, "training": training}))
    assert separate_length(request)[1] == 1
    assert separate_length(request)[0].workload.steps == 9
