"""`tilecast scan`: every GPU job of a folder or a cluster, and what would be cheaper."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from test_pod_launches import TRAINER, bash, batch_job, mounted, pod, pytorch_job
from tilecast.cli import main
from tilecast.inputs import scan as scan_inputs
from tilecast.inputs.pools import PoolOptions
from tilecast.inputs.scan import ScannedJob, select_jobs
from tilecast.public.scanning import JobScanner, ScanRow

EXAMPLES = Path(__file__).parents[1] / "examples"
GPUS = ("--gpus", "h100-sxm:16,a100-80:16")


def named(job: dict[str, Any], name: str, **metadata: Any) -> dict[str, Any]:
    """Return a copy of a job with another name."""
    return {**job, "metadata": {"name": name, "namespace": "team", **metadata}}


LLAMA = pytorch_job(bash(f"torchrun {TRAINER}"), nprocPerNode="8")
UNREAD = batch_job(bash("torchrun --nproc-per-node 8 mnist.py"))


MEGATRON = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 16 "
    "--seq-length 2048 --max-position-embeddings 2048 --bf16 --vocab-size 32000 --micro-batch-size 1 "
    "--global-batch-size 64"
)
"""A launch whose options say the dimensions of the model."""


def write(folder: Path, *objects: dict[str, Any]) -> str:
    """Write objects into a file of a folder. Return the folder."""
    (folder / "jobs.yaml").write_text(yaml.safe_dump_all(objects))
    return str(folder)


def scan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status of a scan, and its JSON."""
    status = main(["scan", *arguments, *GPUS, "-o", "json"])
    return status, json.loads(capsys.readouterr().out)


def test_equal_commands_are_priced_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = scan_json(capsys, write(tmp_path, named(LLAMA, "a")))[1]
    many = scan_json(capsys, write(tmp_path, *(named(LLAMA, f"job-{number}") for number in range(20))))[1]
    assert len(many["jobs"]) == 20
    assert many["searches"] == once["searches"] == 2
    other = pytorch_job(bash(f"torchrun {TRAINER} --seed 3"), nprocPerNode="8")
    assert scan_json(capsys, write(tmp_path, named(LLAMA, "a"), named(other, "b")))[1]["searches"] == 2


def test_equal_jobs_do_not_show_the_name_of_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, preset = batch_job(bash(MEGATRON)), {"tilecast.dev/model": "gpt2", "tilecast.dev/training": "seq: 1024"}
    folder = write(tmp_path, named(own, "first"), named(own, "second"), named(LLAMA, "llama-3.1-8b"))
    rows = {row["name"]: row["model"] for row in scan_json(capsys, folder)[1]["jobs"]}
    assert rows == {"first": "own dimensions", "second": "own dimensions", "llama-3.1-8b": "llama-3.1-8b"}
    bare = batch_job(bash("python x.py"))
    folder = write(tmp_path, *(named(bare, name, annotations=preset) for name in ("first", "second")))
    reasons = {row["name"]: row["reason"] for row in scan_json(capsys, folder)[1]["jobs"]}
    assert reasons["first"] == reasons["second"] != "" and "first" not in reasons["first"]


def test_a_saving_is_of_the_same_work_and_no_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = scan_json(capsys, write(tmp_path, named(LLAMA, "a")))
    (row,) = found["jobs"]
    assert (status, row["outcome"], row["gpus"]) == (3, "better", 16)
    assert row["betterStepSeconds"] <= row["stepSeconds"]
    used = row["gpus"] * 24 - row["betterGpus"] * 24 * row["betterStepSeconds"] / row["stepSeconds"]
    assert row["gpuHoursSavedPerDay"] == pytest.approx(used, rel=1e-4)
    assert row["moneySavedPerDay"] > 0
    assert row["poolAssumed"]


def test_the_whole_run_is_counted_where_its_steps_are_stated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = pytorch_job(bash(f"torchrun {TRAINER} --max_steps 10000"), nprocPerNode="8")
    (row,) = scan_json(capsys, write(tmp_path, named(job, "a")))[1]["jobs"]
    days = 10000 * row["stepSeconds"] / 86400
    assert row["moneySaved"] == pytest.approx(row["moneySavedPerDay"] * days, rel=1e-4)


def test_jobs_that_are_not_read_are_listed_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, named(UNREAD, "a"))
    assert main(["scan", folder, *GPUS]) == 0
    out = capsys.readouterr().out
    assert "1 were not read, and are not guessed:\n  team/a (Job): tilecast.dev/model: is missing" in out
    assert main(["scan", folder, *GPUS, "--strict"]) == 4
    assert main(["scan", folder, *GPUS, "--strict", "--exit-zero"]) == 0


def test_the_largest_saving_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = batch_job(bash(f"torchrun --nproc-per-node 8 {TRAINER}"))
    jobs = (named(UNREAD, "z"), named(small, "small"), named(LLAMA, "large"))
    rows = scan_json(capsys, write(tmp_path, *jobs))[1]["jobs"]
    assert [row["name"] for row in rows] == ["large", "small", "z"]


@pytest.mark.parametrize("least", ["0", "99"])
def test_the_least_saving_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str], least: str) -> None:
    status, _ = scan_json(capsys, write(tmp_path, named(LLAMA, "a")), "--least-saving", least)
    assert status == (3 if least == "0" else 0)


def test_a_saving_that_is_no_share_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scan", write(tmp_path, LLAMA), *GPUS, "--least-saving", "100"]) == 2
    assert "--least-saving: 100 is no share" in capsys.readouterr().err


def test_csv_and_html_have_every_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, named(LLAMA, "<a>"), named(UNREAD, "b"))
    main(["scan", folder, *GPUS, "-o", "csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["outcome"] for row in rows] == ["better", "notRead"]
    main(["scan", folder, *GPUS, "-o", "html"])
    page = capsys.readouterr().out
    assert "team/&lt;a&gt;" in page
    assert "<a>" not in page


def test_jobs_without_gpus_finished_and_owned_jobs_are_left_out() -> None:
    owned = named(LLAMA, "b", ownerReferences=[{"kind": "TrainJob", "controller": True}])
    finished = {**named(LLAMA, "c"), "status": {"conditions": [{"type": "Succeeded", "status": "True"}]}}
    plain = named(batch_job(bash("python x.py", gpus=0)), "d")
    assert [job.name for job in select_jobs([named(LLAMA, "a"), owned, finished, plain])] == ["a"]


@pytest.mark.parametrize(
    "resources",
    [
        {"claims": [{"name": "gpu"}]},
        {"limits": {"nvidia.com/mig-3g.40gb": 1}},
        {"limits": {"nvidia.com/gpu.shared": "1"}},
    ],
)
def test_jobs_with_other_devices_are_listed_and_not_guessed(resources: dict[str, Any]) -> None:
    job = named(batch_job(pod("bash", "-c", MEGATRON, gpus=0)), "a")
    job["spec"]["template"]["spec"]["containers"][0]["resources"] = resources
    job["spec"]["template"]["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "t"}]
    (row,) = JobScanner.from_options(PoolOptions(gpus=GPUS[1])).scan(select_jobs([job])).rows
    assert (row.name, row.outcome) == ("a", "notRead") and row.reason


def selecting(**fields: Any) -> dict[str, Any]:
    """Return a job whose pods have more fields."""
    template = bash(MEGATRON)
    return named(batch_job({"spec": {**template["spec"], **fields}}), "a")


def affine(operator: str, *values: str) -> dict[str, Any]:
    """Return the affinity of pods to GPUs by their product."""
    match = {"matchExpressions": [{"key": PRODUCT, "operator": operator, "values": list(values)}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [match]}}}


PRODUCT = "nvidia.com/gpu.product"
TYPE = "node.kubernetes.io/instance-type"


@pytest.mark.parametrize(
    ("fields", "pool"),
    [
        ({"nodeSelector": {PRODUCT: "Tesla-T4"}}, "t4"),
        ({"nodeSelector": {PRODUCT: "NVIDIA-H100-80GB-HBM3"}}, "h100-sxm"),
        ({"nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"}}, None),
        ({"nodeSelector": {PRODUCT: "Some-New-GPU"}}, None),
        ({"nodeSelector": {TYPE: "g4dn.metal"}}, "t4"),
        ({"nodeSelector": {TYPE: "p4d.24xlarge"}}, None),
        ({"nodeSelector": {TYPE: "our-own-machine"}}, "h100-sxm?"),
        ({"nodeSelector": {"zone": "a"}}, None),
        ({}, "h100-sxm?"),
        ({"affinity": affine("In", "Tesla-T4", "NVIDIA-A100-SXM4-80GB")}, "t4"),
        ({"affinity": affine("NotIn", "NVIDIA-H100-80GB-HBM3")}, "t4"),
    ],
)
def test_selectors_of_the_gpu_decide_among_stated_pools(fields: dict[str, Any], pool: str | None) -> None:
    scanner = JobScanner.from_options(PoolOptions(gpus="h100-sxm:16,t4:16"))
    (row,) = scanner.scan(select_jobs([selecting(**fields)])).rows
    if pool is None:
        assert row.outcome == "notRead" and "its selector names nodes that were not given" in row.reason
    else:
        assert row.pool + "?" * row.is_pool_assumed == pool


def test_selectors_of_kinds_that_advice_does_not_place_decide_too() -> None:
    spec = selecting(nodeSelector={PRODUCT: "Tesla-T4"})["spec"]["template"]["spec"]
    task = {"name": "a", "replicas": 1, "template": {"spec": spec}}
    job = {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": "a"}}
    found = select_jobs([{**job, "spec": {"tasks": [task]}}])
    pools = ("h100-sxm:16,t4:16", "h100-sxm:16")
    rows = [JobScanner.from_options(PoolOptions(gpus=gpus)).scan(found).rows[0] for gpus in pools]
    assert rows[0].pool == "t4"
    assert "its selector names nodes that were not given" in rows[1].reason


def test_an_instance_type_that_is_given_is_meant_alone() -> None:
    scanner = JobScanner.from_options(PoolOptions(gpus="p5.48xlarge:2,a3-highgpu-8g:2"))
    jobs = [selecting(nodeSelector={TYPE: name}) for name in ("a3-highgpu-8g", "p5.48xlarge")]
    assert [scanner.scan(select_jobs([job])).rows[0].pool for job in jobs] == ["a3-highgpu-8g", "p5.48xlarge"]


def test_nodes_that_no_pod_may_use_are_not_taken() -> None:
    options = PoolOptions(nodes=str(EXAMPLES / "clusters" / "mixed.yaml"))
    (row,) = JobScanner.from_options(options).scan(select_jobs([selecting(nodeSelector={PRODUCT: "Tesla-P4"})])).rows
    assert row.outcome == "notRead" and "its selector names nodes that were not given" in row.reason


def test_one_job_that_breaks_the_reader_does_not_end_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    scanner, read = JobScanner.from_options(PoolOptions(gpus=GPUS[1])), JobScanner._price_job

    def price(self: JobScanner, job: ScannedJob) -> ScanRow:
        if job.name == "broken":
            raise ValueError("Exceeds the limit (4300 digits)\nof a number")
        return read(self, job)

    monkeypatch.setattr(JobScanner, "_price_job", price)
    rows = scanner.scan(select_jobs([named(UNREAD, "broken"), named(LLAMA, "a")])).rows
    assert [row.outcome for row in rows] == ["better", "notRead"]
    assert rows[1].reason == "cannot be read: Exceeds the limit (4300 digits) of a number"


def test_config_maps_count_in_their_own_namespace() -> None:
    job = named(mounted("axolotl train /etc/train/run.yaml"), "a")
    here, there = ({"kind": "ConfigMap", "metadata": {"name": "c", "namespace": name}} for name in ("team", "other"))
    (read,) = select_jobs([job, here, there])
    assert read.objects == (here,)


def test_a_folder_is_read_with_its_subfolders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path / "below", named(LLAMA, "a"))
    (tmp_path / "chart.yaml").write_text("{{ template }}: [")
    main(["scan", str(tmp_path), *GPUS, "-o", "json"])
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["jobs"]) == 1
    assert "chart.yaml" in printed.err


def test_a_file_that_is_left_out_counts_as_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One broken document leaves out the jobs beside it, so a strict scan has to fail, and the note says where."""
    folder = write(tmp_path, named(batch_job(bash("python x.py", gpus=0)), "cpu"))
    assert main(["scan", folder, *GPUS, "--strict"]) == 0
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(named(LLAMA, "a")) + "---\nfoo: [\n")
    assert main(["scan", folder, *GPUS, "--strict"]) == 4
    error = capsys.readouterr().err
    assert "broken.yaml" in error and "line" in error and "no YAML or JSON objects" not in error
    assert main(["scan", folder, *GPUS]) == 0


def test_nothing_to_scan_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scan", *GPUS]) == 2
    assert "FILE: is missing" in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text("kind: Pod")
    assert main(["scan", str(tmp_path), *GPUS]) == 2


def test_a_cluster_is_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[tuple[str, ...]]()
    job = named(mounted("axolotl train /etc/train/run.yaml"), "a")

    def run(context: str | None, *arguments: str, remedy: str) -> str:
        calls.append(arguments)
        if arguments[0] == "api-resources":
            return "jobs.batch\npods\n"
        items = [{"kind": "ConfigMap", "metadata": {"name": "c", "namespace": "team"}}]
        return json.dumps({"kind": "List", "apiVersion": "v1", "items": items if "configmaps" in arguments else [job]})

    monkeypatch.setattr(scan_inputs, "run_kubectl", run)
    (read,) = scan_inputs.read_scanned_jobs([], "kind").jobs
    assert [item["kind"] for item in read.objects] == ["ConfigMap"]
    assert [call[0] for call in calls] == ["api-resources", "get", "get"]
    assert calls[1][1] == "jobs.batch"
    assert calls[2][-1] == "c"


def test_pools_without_prices_save_gpu_hours() -> None:
    from dataclasses import replace

    from tilecast.inputs.pools import read_pools

    pools = [replace(pool, price_per_gpu_hour=None) for pool in read_pools(PoolOptions(gpus=GPUS[1]))]
    (row,) = JobScanner(pools).scan(select_jobs([named(LLAMA, "a")])).rows
    assert row.money_saved is None
    assert row.gpu_hours_saved > 0


def test_a_better_plan_that_may_not_fit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in scan_json(capsys, str(EXAMPLES / "scan"))[1]["jobs"]}
    assert [rows[name]["betterMayNotFit"] for name in ("llama-finetune", "qlora")] == [True, False]
    main(["scan", str(EXAMPLES / "scan"), *GPUS])
    out = capsys.readouterr().out
    assert f"{rows['llama-finetune']['betterPlan']}! " in out
    assert f"{rows['qlora']['betterPlan']} " in out
    assert "A plan with ! may not fit into memory" in out
