"""Training steps measured on one GPU: the plan, the rows, and the table in `lab/measured`, without PyTorch."""

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilecast.validate.cells import UnreadableRow
from tilecast.validate.runs import read_table
from tilecast.validate.scores import has_trusted_step, read_measured_seconds
from tilecast_lab.collect import steps
from tilecast_lab.collect.kernel_kinds import KINDS, kind_of, seconds_by_kind
from tilecast_lab.collect.step_cases import COLUMNS, MEASURED, MODELS, StepCase, plan_steps, table_row
from tilecast_lab.validate import memory, runs, table

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "lab" / "measured" / "h100-pytorch-2.11.csv"
ENVIRONMENT = {
    "gpu": "NVIDIA H100 80GB HBM3", "driver": "580.159.04", "cuda": "13.0", "torch": "2.11.0",
    "transformers": "5.17.0", "torchvision": "0.26.0", "date": "2026-11-26",
}  # fmt: skip


@pytest.mark.slow
def test_every_measured_row_is_scored_or_says_why_not() -> None:
    rows = read_table(TABLE)
    assert list(rows[0]) == [*COLUMNS, *MEASURED]
    groups, refused = runs.prepare(rows)
    forecasts = runs.forecast_prepared(rows, groups, refused)
    reasons = {
        row["id"]: item.reason or row["failure"]
        for row, item in zip(rows, forecasts, strict=True)
        if item.seconds is None or not has_trusted_step(row)
    }
    unknown = {row["id"] for row in rows if row["model_name"] in ("convnext-base", "mamba2-0.4b")}
    assert all(reasons[name] == "unknown-model" for name in unknown)
    assert all(reasons.values())
    assert sum(reason == "out of memory" for reason in reasons.values()) == 2
    assert len(rows) - len(reasons) == 94
    peaks = memory.measure_peaks(rows, groups, refused)
    assert not peaks.warnings
    assert set(peaks.figures) == {"allocated"}
    assert len(peaks.rows) == 94


def test_kernels_belong_to_measured_rows() -> None:
    measured = {row["id"]: row for row in read_table(TABLE) if row["busy_s"]}
    with gzip.open(TABLE.with_name(f"{TABLE.stem}-kernels.csv.gz"), "rt", encoding="utf-8", newline="") as file:
        kernels = list(csv.DictReader(file))
    assert {kernel["id"] for kernel in kernels} == measured.keys()
    for name, row in measured.items():
        listed = sum(float(kernel["seconds"]) for kernel in kernels if kernel["id"] == name)
        assert 0.7 * float(row["busy_s"]) < listed < 1.02 * float(row["busy_s"])


def test_measured_rows_are_consistent() -> None:
    for row in read_table(TABLE):
        case = StepCase(**json.loads(row["case"]))
        assert case.model == row["model_name"]
        if (seconds := read_measured_seconds(row)) is None:
            assert row["failure"]
            assert row["trust"] == "C"
            continue
        busy = float(row["busy_s"])
        assert busy <= 1.05 * seconds
        assert sum(float(row[f"{kind}_s"]) for kind in KINDS) == pytest.approx(busy, rel=0.02)
        weights, states, peak = (float(row[name]) for name in ("weights_gib", "states_gib", "peak_mem_gb_per_gpu"))
        assert weights < states <= peak <= 80


@pytest.mark.parametrize("number", range(len(plan_steps())))
def test_every_case_of_the_plan_gives_a_row_that_is_read_or_refused(number: int) -> None:
    case = plan_steps()[number]
    row = table_row(case, number, ENVIRONMENT, {"step_s": 0.1, "peak_gib": 10.0, "parameters": 1_000_000})
    assert list(row) == [*COLUMNS, *MEASURED]
    if case.model.startswith(("convnext", "mamba")):
        with pytest.raises(UnreadableRow):
            table.read_published_row(row)
        return
    read = table.read_published_row(row)
    assert read.workload.global_batch == case.batch * case.accumulation
    assert read.workload.precision == case.recipe.removeprefix("amp-").removeprefix("pure-")
    assert read.workload.framework == ("huggingface" if MODELS[case.model].library == "transformers" else "ddp")
    assert (read.workload.execution == "compiled") == (case.compiled != "none")
    assert (read.workload.memory_format == "channelsLast") == (case.layout == "channels_last")
    assert read.workload.fused_loss == (case.loss == "compiled")


def test_a_failed_case_has_its_reason_and_is_not_graded() -> None:
    row = table_row(plan_steps()[0], 0, ENVIRONMENT, {"failure": "out of memory"})
    assert (row["failure"], row["step_time_s_derived"], row["trust"]) == ("out of memory", "", "C")
    assert not has_trusted_step(row)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32", "convolution"),
        (
            "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata",
            "optimizer",
        ),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>", "elementwise"),
        ("void at::native::batch_norm_backward_kernel<c10::BFloat16, float, float, int>", "norm"),
        ("triton_red_fused__to_copy_add_mul_0", "compiled"),
        ("void vectorized_gather_kernel<16, long>", "other"),
    ],
)
def test_kernels_have_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_kernels_that_are_not_listed_count_as_others() -> None:
    found = seconds_by_kind([("nvjet_sm90", 2, 0.5), ("Memset (Device)", 1, 0.25)], 1.0)
    assert (found["gemm"], found["copy"], found["other"]) == (0.5, 0.25, 0.25)


def test_the_plan_is_printed_without_pytorch() -> None:
    folder = Path(steps.__file__).parent
    command = [sys.executable, "-E", "-s", "-S", "-m", folder.name, "steps", "--dry-run", "--only", "gpt2-xl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder.parent)
    lines = done.stdout.splitlines()
    assert lines[-1] == "4 cases"
    assert lines[0].endswith("gpt2-xl b4 s1024 amp-bf16 optimizer=adamw-fused")


def test_a_budget_that_measures_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert steps.main(["--budget-minutes", "0"]) == 2
    assert capsys.readouterr().err.startswith("--budget-minutes: 0 measures nothing")
