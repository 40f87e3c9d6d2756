"""`--measured POOL:N=STEP`: a user's measured run corrects the forecast on every pool."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tilecast import search, zoo
from tilecast.cli import main
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.learning.calibration import Calibration, Correction
from tilecast.learning.job_calibration import JobRun, JobRuns, RunSetting
from tilecast.spec import Plan, Plans, Workload

JOB = ["advise", "gpt2-xl", "--seq", "1024", "--batch", "64"]
POOLS = ["--gpus", "h100-sxm:16,l4:8"]
ALIKE = ("--gpus", "a800-80:8")
"""A pool with another GPU of the architecture on which the runs of these tests were measured."""
ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json.loads((ROOT / "schemas" / "advice.schema.json").read_text())


def advised(capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert main([*JOB, *POOLS, *more, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)
    return document


def by_pool(document: Any) -> dict[str, Any]:
    return {one["pool"]: one for one in (document["recommendation"], *document["alternatives"])}


@pytest.mark.slow
def test_a_slow_run_elsewhere_makes_every_forecast_slower_and_surer(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = by_pool(advised(capsys)), by_pool(advised(capsys, "--measured", "a100-80:8=0.8s"))
    for pool in ("h100-sxm", "l4"):
        old, new = before[pool], after[pool]
        assert new["plan"] == old["plan"]
        assert 1.02 < new["ownRunsRatio"] < 1.2, "little carries over to another architecture"
        assert new["stepSeconds"]["target"] == pytest.approx(
            old["stepSeconds"]["target"] * new["ownRunsRatio"], rel=1e-3
        )
        assert sum(new["breakdown"].values()) == pytest.approx(new["stepSeconds"]["target"], rel=1e-3)
        widths = [one["stepSeconds"]["upperBound"] / one["stepSeconds"]["lowerBound"] for one in (old, new)]
        assert widths[1] < widths[0]
        assert f"{new['ownRunsRatio']:.2f}x its forecast by your run on 8 a100-80" in new["reason"]
        assert "ownRunsRatio" not in old


def test_the_step_that_was_measured_is_forecast_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    document = advised(capsys, "--baseline", "h100-sxm:8:dp8,mb8=0.4s")
    assert document["baseline"]["plan"] == "dp8,mb8"
    assert document["baseline"]["stepSeconds"]["target"] == pytest.approx(0.4, rel=0.05)


LAUNCH = (
    *("advise", "llama-3.1-8b", "--seq", "4096", "--gpus", "a100-80:2x8"),
    *("--", "torchrun", "--nnodes", "2", "--nproc-per-node", "8", "train.py", "--fsdp", "full_shard", "--bf16"),
    *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "8", "--gradient_checkpointing"),
)
"""A launch of 16 GPUs whose plan is not the fastest."""


@pytest.mark.parametrize("measured", ["--baseline=a100-80:2x8=20s", "--measured=a100-80:16=20s"])
def test_the_measured_step_of_a_launch_is_that_of_its_plan(measured: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAUNCH[:2], measured, "-o", "json", *LAUNCH[2:]]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["baseline"]["plan"] == "fsdp16,mb2,ac-full" != document["recommendation"]["plan"]
    assert document["baseline"]["stepSeconds"]["target"] == pytest.approx(20, rel=0.05)
    assert any("Your run on 16 a100-80 (fsdp16,mb2,ac-full) took 20 s" in note for note in document["notes"])


def test_a_bare_measured_step_of_a_launch_is_that_of_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAUNCH[:2], "--measured=30s", "-o", "json", *LAUNCH[2:]]) == 0
    document = json.loads(capsys.readouterr().out)
    forecast_s = document["baseline"]["stepSeconds"]["target"]
    assert document["measured"]["ratio"] == pytest.approx(30 / forecast_s, rel=1e-3)


def test_a_measured_baseline_without_a_plan_is_the_plan_that_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    document = advised(capsys, "--baseline", "a100-80:8=0.7s")
    assert document["baseline"]["stepSeconds"]["target"] == pytest.approx(0.7, rel=0.05)
    assert any(f"a100-80 ({document['baseline']['plan']}) took 0.7 s" in note for note in document["notes"])


def test_a_plan_that_ran_says_less_of_one_that_is_cut_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    any_plan = by_pool(advised(capsys, *ALIKE, "--measured", "a100-80:8=0.95s"))["a800-80"]["ownRunsRatio"]
    cut = ("--measured", "a100-80:8/fsdp8,mb1=1.9s")
    other = by_pool(advised(capsys, *ALIKE, *cut))["a800-80"]["ownRunsRatio"]
    assert 1 < other < any_plan


def test_a_loader_stays_as_slow_on_every_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "measured.json"
    run = {"pool": "a100-80", "gpus": 8, "plan": "zero1-dp8,mb8", "stepSeconds": 0.97, "inputSeconds": 0.4}
    path.write_text(json.dumps({"runs": [run]}))
    peaks = by_pool(advised(capsys, "--measured", f"@{path}", "--max-gpus", "8"))
    for one in peaks.values():
        assert one["breakdown"]["input"] == pytest.approx(0.4, rel=0.01)
        assert one["ownRunsRatio"] == pytest.approx(1.0, abs=0.03), "the rest was as forecast"
    assert peaks["h100-sxm"]["stepSeconds"]["target"] < 0.75


def measured(tmp_path: Path, **run: float) -> list[str]:
    path = tmp_path / "measured.json"
    known = {"pool": "a100-80", "gpus": 8, "plan": "dp8,mb8", "stepSeconds": 0.6}
    path.write_text(json.dumps({"runs": [{**known, **run}]}))
    return ["--measured", f"@{path}", "--max-gpus", "8"]


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Return the forecast parts of the run that `--measured` names, and their sum as its step."""
    assert main([*JOB, "--gpus", "a100-80:8", "--baseline", "a100-80:8:dp8,mb8", "-o", "json"]) == 0
    forecast = json.loads(capsys.readouterr().out)["baseline"]
    return {**forecast["breakdown"], "step": sum(forecast["breakdown"].values())}


ELSEWHERE = (*ALIKE, "--baseline", "a800-80:8:dp8,mb8", "--max-gpus", "8")


@pytest.mark.parametrize(("part", "more"), [("communication", 0.2), ("communication", 0.6), ("optimizer", 0.2)])
@pytest.mark.slow
def test_what_a_part_took_longer_stays_with_that_part(
    part: str, more: float, ran: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = advised(capsys, *ELSEWHERE)["baseline"]["breakdown"]
    step = {"stepSeconds": ran["step"] + more, f"{part}Seconds": ran[part] + more}
    after = advised(capsys, *ELSEWHERE, *measured(tmp_path, **step))["baseline"]
    gained = {name: value - before[name] for name, value in after["breakdown"].items()}
    assert sum(after["breakdown"].values()) == pytest.approx(after["stepSeconds"]["target"], rel=1e-3)
    assert gained.pop(part) > 0.01 * sum(before.values())
    assert list(gained.values()) == pytest.approx([0.0] * 5, abs=1e-3 * before["compute"])


def test_a_measured_step_with_parts_is_forecast_as_it_was(
    ran: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step_s = 1.5 * ran["step"]
    parts = {"communicationSeconds": 0.4 * ran["step"], "optimizerSeconds": ran["optimizer"]}
    asked = ("--gpus", "a100-80:8", "--baseline", "a100-80:8:dp8,mb8", "--max-gpus", "8")
    after = advised(capsys, *asked, *measured(tmp_path, stepSeconds=step_s, **parts))["baseline"]
    assert after["stepSeconds"]["target"] == pytest.approx(step_s, rel=0.08)
    assert after["breakdown"]["communication"] == pytest.approx(parts["communicationSeconds"], rel=0.2)
    assert after["breakdown"]["optimizer"] == pytest.approx(parts["optimizerSeconds"], rel=1e-3)


@pytest.mark.slow
def test_one_gpu_waits_for_no_links(ran: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = ("--baseline", "h100-sxm:1:dp1,mb8", "--max-gpus", "8")
    before = advised(capsys, *alone)["baseline"]["breakdown"]
    step = {"stepSeconds": ran["step"] + 0.3, "communicationSeconds": ran["communication"] + 0.3}
    after = advised(capsys, *alone, *measured(tmp_path, **step))["baseline"]["breakdown"]
    assert after == pytest.approx(before, rel=1e-4) and after["communication"] == 0


def test_what_is_told_as_it_was_forecast_changes_no_forecast(
    ran: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {f"{part}Seconds": ran[part] for part in ("communication", "optimizer", "input")}
    passes = {"forwardSeconds": 0.3 * ran["compute"], "backwardSeconds": 0.7 * ran["compute"]}
    for one in by_pool(advised(capsys, *measured(tmp_path, stepSeconds=ran["step"], **parts, **passes))).values():
        assert one["ownRunsRatio"] == pytest.approx(1.0, abs=1e-4)


def test_the_screen_tells_the_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = measured(tmp_path, stepSeconds=0.9, optimizerSeconds=0.1, inputSeconds=0.1)
    assert main([*JOB, *POOLS, *flags]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "beside 0.1 s of waiting for its loader, which stay on every pool" in screen
    assert "of that 0.1 s for optimizer (" in screen


def test_where_a_step_cannot_be_faster_than_its_kernels_no_run_makes_it_so() -> None:
    workload = Workload(zoo.find_preset("gpt2-xl"), sequence_length=1024, global_batch=64)
    gpu = find_gpu("h100-sxm")
    pool = Pool("p", gpu, 8, 1, find_link(gpu.intra_link), find_link("infiniband-ndr-8x400"))
    plan = Plan(data=8, micro_batch=8)
    own = JobRun(RunSetting.from_workload(gpu.name, gpu.architecture, workload), plan, deviation=3.0, reports=30)
    raw = search.price(workload, Plans.from_plans(plan), pool)
    fast = search.price(workload, Plans.from_plans(plan), replace(pool, own=JobRuns((own,))))
    assert fast.step_s[0] == pytest.approx(max(raw.times.least[0], raw.step_s[0] / 3), rel=1e-6)
    assert fast.times.correction[0] == pytest.approx(fast.times.carried[0])


def test_runs_of_the_cluster_and_of_the_job_count_both() -> None:
    workload = Workload(zoo.find_preset("gpt2-xl"), sequence_length=1024, global_batch=64)
    gpu = find_gpu("h100-sxm")
    table = Calibration((Correction(("h100-sxm",), ratio=1.2, width=0.5, runs=7, own=7),))
    pool = Pool("p", gpu, 8, 1, find_link(gpu.intra_link), find_link("infiniband-ndr-8x400"))
    plan = Plan(data=8, micro_batch=8)
    own = JobRuns(
        (JobRun(RunSetting.from_workload(gpu.name, gpu.architecture, workload), plan, deviation=-0.2, reports=30),)
    )
    raw, seen, both = (
        search.price(workload, Plans.from_plans(plan), one)
        for one in (pool, replace(pool, calibration=table), replace(pool, calibration=table, own=own))
    )
    assert both.step_s[0] == pytest.approx(raw.step_s[0] * 1.2 * both.times.carried[0])
    assert 1.1 < both.times.carried[0] < 1.23
    assert both.times.width[0] < seen.times.width[0] == 0.5


def test_the_screen_tells_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *POOLS, "--measured", "a100-80:8=700ms", "--measured", "l4:8=4s"]) == 0
    screen = capsys.readouterr().out
    assert "by your 2 runs" in screen
    assert "How sure?  your 2 runs; 0 runs seen on this cluster: " in screen
    assert "Your run on 8 a100-80 (" in screen and "took 0.7 s" in screen and "Your run on 8 l4 (" in screen


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (["a100-80:8=1ms"], "faster than the roofline"),
        (["a100-80:8=1900"], "times the forecast"),
        (["a100-80:8=0s"], "no step time"),
        (["a100-80:8=fast"], "no step time"),
        (["a100-80=2s"], "cannot read"),
        (["sofa:8=2s"], "no pool or GPU"),
        (["a100-80:8/tp=3=2s"], "do not make 8 GPUs"),
        (["a100-80:8/dp8,mb8=0.7s", "a100-80:8/dp8,mb8=1.9s"], "take 1.9 s here and 0.7 s there"),
        (["a100-80:8=0.7s", "0.7"], "names no pool"),
        (["@/nowhere.json"], "nowhere.json"),
        (["@"], "names no file"),
    ],
)
def test_an_impossible_measurement_is_one_line(
    problem: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for one in problem for word in ("--measured", one)]
    assert main([*JOB, *POOLS, *flags]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"forwardSeconds": 0.2, "backwardSeconds": 0.5}, "the parts of a step of 0.6 s take 0.7 s"),
        ({"inputSeconds": 0.6}, "the parts of a step of 0.6 s take 0.6 s"),
        ({"communicationSeconds": 0.55}, "faster than the roofline: "),
        ({"optimizerSeconds": 1e-5}, "times the forecast update"),
        ({"optimizerSeconds": -1}, "optimizerSeconds"),
    ],
)
def test_parts_that_cannot_be_are_one_line(
    parts: dict[str, float], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB, *POOLS, *measured(tmp_path, **parts)]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["", "[]", '{"runs": []}', '{"runs": [{"pool": "l4", "gpus": 0, "stepSeconds": 1}]}', '[{"pool": "l4"}]']
)
def test_a_file_of_something_else_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "measured.json"
    path.write_text(text)
    assert main([*JOB, *POOLS, "--measured", f"@{path}"]) == 2
    error = capsys.readouterr().err
    assert "measured.json" in error and error.count("\n") == 1
