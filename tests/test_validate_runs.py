"""`tilecast validate runs`: each row in gives a row out, and no measurement enters a forecast."""

from __future__ import annotations

import csv
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tilecast import constants
from tilecast.advice import Request
from tilecast.advice.choose import choose_plan
from tilecast.advice.pricing import find_candidates
from tilecast.cli import main
from tilecast.hardware import find_gpu, find_link
from tilecast.spec import Plans
from tilecast.step import PARTS
from tilecast.validate.cells import REASONS, Row
from tilecast.validate.reading import read_version
from tilecast.validate.runs import read_table
from tilecast.validate.scores import mean_over_groups, rank_plans
from tilecast_lab.validate import report, runs, scores, table
from tilecast_lab.validate.constants import with_values
from tilecast_lab.validate.models import model_of
from tilecast_lab.validate.networks import intra_link, network_link
from tilecast_lab.validate.table import ASSUMED

ROW = {
    "id": "r1", "gpu": "A100-SXM4-80GB", "gpus_per_node": "8", "n_gpus": "8", "interconnect_intra": "NVSwitch",
    "interconnect_inter": "", "framework": "x", "model_name": "m", "family": "decoder", "mode": "train",
    "n_layers": "24", "hidden": "2048", "n_heads": "16", "n_kv_heads": "16", "ffn_hidden": "8192", "gated_mlp": "0",
    "vocab": "51200", "seq_len": "2048", "micro_batch_per_gpu": "2", "grad_accum": "4", "global_batch": "64",
    "precision": "bf16", "dp": "8", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "zero_stage": "1",
    "activation_checkpointing": "none", "flash_attention": "1", "compiled": "0", "optimizer": "adamw",
    "metric": "step_time_s", "value": "1.0", "step_time_s_derived": "1.0", "notes": "", "trust": "A",
    "task": "pretrain", "split_group": "g",
}  # fmt: skip


def test_a_row_is_forecast_with_parts_that_sum() -> None:
    (item,) = runs.forecast([ROW])
    assert item.seconds is not None and item.parts is not None
    assert sum(item.parts.values()) == pytest.approx(item.seconds)
    assert item.lower_s is not None and item.upper_s is not None
    assert item.lower_s < item.seconds < item.upper_s
    assert item.fits is True
    # 6 N D for 1.3 billion parameters over eight A100 at their peak is 0.42 s; good runs reach 40 to 60 % of it.
    assert 0.6 < item.seconds < 1.2


BRIDGE = {
    **ROW, "framework": "Megatron-Bridge (NeMo 26.04)", "gpu": "H100-SXM-80GB", "model_name": "llama-3-70b",
    "n_layers": "", "hidden": "", "n_heads": "", "n_kv_heads": "", "ffn_hidden": "", "vocab": "", "seq_len": "8192",
    "n_gpus": "64", "dp": "4", "tp": "4", "pp": "4", "micro_batch_per_gpu": "1", "grad_accum": "16",
    "global_batch": "64",
    "activation_checkpointing": "", "notes": "VP 5",
}  # fmt: skip


def test_as_many_layers_are_recomputed_as_memory_asks() -> None:
    none, full = (runs.forecast([{**BRIDGE, "activation_checkpointing": mode}])[0] for mode in ("none", "full"))
    assert none.seconds and full.seconds and none.memory_bytes and full.memory_bytes
    assert not none.fits and full.fits
    (some,) = runs.forecast([BRIDGE])
    assert some.seconds and some.memory_bytes and some.parts and some.fits
    assert none.seconds < some.seconds < full.seconds
    assert full.memory_bytes < some.memory_bytes < none.memory_bytes
    assert 0.97 < some.memory_bytes / find_gpu("h100-sxm").memory_bytes < 1  # all of it but the driver's share
    assert sum(some.parts.values()) == pytest.approx(some.seconds)
    # DeepSpeed recomputes all layers or none.
    whole = {**BRIDGE, "framework": "DeepSpeed", "pp": "1", "dp": "16", "grad_accum": "4", "zero_stage": "3", "tp": "1"}
    whole |= {"n_gpus": "16", "notes": ""}
    (open_,), (stated,) = (runs.forecast([{**whole, "activation_checkpointing": mode}]) for mode in ("", "full"))
    assert open_.seconds == stated.seconds


def test_a_pipeline_of_nemo_is_interleaved_unless_it_says_otherwise() -> None:
    rows = [{**BRIDGE, "notes": notes} for notes in ("VP 5", "", "VP n/a", "VP=1")]
    plans = [item.plan.virtual_stages for item in runs.forecast(rows) if item.plan]
    assert plans == [5, 10, 1, 1]
    (other,) = runs.forecast([{**BRIDGE, "framework": "Megatron-LM", "notes": ""}])
    assert other.plan and other.plan.virtual_stages == 1


def test_language_models_of_mlperf_are_nemo_s() -> None:
    assert table.framework({**ROW, "framework": "MLPerf v5.0"}) == "nemo"
    assert table.framework({**ROW, "framework": "MLPerf v5.0", "family": "cnn"}) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Megatron-Bridge (NeMo 26.04.01)", "26.04"), ("NeMo (release 25.05)", "25.05"), ("MLPerf v5.0", "25.03"),
        ("PyTorch 1.7 (NGC 20.10), Lightning 1.0", "1.7"), ("torchtitan + torchao 0.13", "2.6"),
        ("TensorFlow 2.3", "2.3"), ("PyTorch 21.04 NGC", "2.6"), ("TensorFlow 20.06 NGC (XLA)", None),
        ("Megatron-LM (NGC 20.12)", None),
    ],
)  # fmt: skip
def test_the_version_of_a_framework_is_read(text: str, version: str | None) -> None:
    row = {**ROW, "framework": text, "url_or_repo_path": "https://example.org/runs"}
    assert table.read_published_row(row).workload.framework_version == version
    assert read_version(" 25.04 ") == "25.04" and read_version("nightly") is None


@pytest.mark.parametrize(
    ("framework", "link"),
    [("TensorFlow 2.3", "grpc"), ("TensorFlow 2.3 (Horovod)", ""), ("TensorFlow2 21.02 NGC (XLA)", ""), ("MXNet", "")],
)
def test_old_tensorflow_exchanges_gradients_over_grpc(framework: str, link: str) -> None:
    named = network_link("InfiniBand 100 Gb/s", find_gpu("a100-80"), 8)
    job = {**ROW, "framework": framework, "interconnect_inter": "InfiniBand 100 Gb/s"}
    assert table.read_published_row(job).pool.inter == (find_link(link) if link else named)


@pytest.mark.parametrize(
    ("words", "link"),
    [
        ("Slingshot-11 without CXI hook (TCP-like)", "slingshot-tcp"),
        ("Slingshot 11", "slingshot-4x200"),
        ("TCP", "ethernet-100"),
    ],
)
def test_sockets_over_slingshot_are_a_network_of_their_own(words: str, link: str) -> None:
    assert network_link(words, find_gpu("a100-80"), 4).name == link


def test_megatron_s_own_kernels_are_fused_and_tensorflow_s_compiler_is_xla() -> None:
    row = {**ROW, "fused_kernels": "0", "execution": "compiled"}
    assert table.read_published_row({**row, "framework": "Megatron-LM"}).workload.fused_kernels
    assert not table.read_published_row({**row, "framework": "PyTorch"}).workload.fused_kernels
    assert table.execution({**row, "framework": "TensorFlow 2.3"}) == "xla"
    assert table.execution({**row, "framework": "PyTorch"}) == "compiled"


def test_deepspeed_reduces_after_the_backward_pass() -> None:
    job = {**ROW, "framework": "DeepSpeed", "zero_stage": "1", "grad_accum": "1", "global_batch": "16"}
    (usual,), (unbucketed,) = (runs.forecast([{**job, "notes": notes}]) for notes in ("", "no gradient bucketing"))
    assert usual.parts and unbucketed.parts
    assert usual.parts["communication"] == unbucketed.parts["communication"]


@pytest.mark.parametrize(
    ("cuts", "layout"),
    [
        ("[0  8  14  20  30]", "Etttttt|tttttt|tttttt|ttttttL"),
        ("[0  15  30]", "Ettttttttttttt|tttttttttttL"),
        ("[0  30]", None),
    ],
)
def test_notes_state_the_cuts_of_a_deepspeed_pipeline(cuts: str, layout: str | None) -> None:
    notes = "Gradients all-reduced in fp32. Stage cuts over 30 pipeline entries (24 transformer layers + ends): "
    row = {**ROW, "framework": "DeepSpeed 0.3 + Megatron-LM v1.1.5", "n_layers": "24", "notes": notes + cuts}
    workload = table.read_published_row(row).workload
    assert (workload.framework, workload.gradient_precision) == ("megatron-deepspeed", "fp32")
    assert workload.pipeline_layout == layout


@pytest.mark.parametrize("cuts", ["28 pipeline entries (ends): [0 14 28]", "30 pipeline entries (ends): [0 14 14 30]",
                                  "30 pipeline entries (ends): [2 14 30]"])  # fmt: skip
def test_cuts_that_do_not_span_the_entries_are_ignored(cuts: str) -> None:
    notes = f"Stage cuts over {cuts}"
    assert table.read_published_row({**ROW, "n_layers": "24", "notes": notes}).workload.pipeline_layout is None


@pytest.mark.parametrize(
    ("change", "attention"),
    [
        ({}, "auto"),
        ({"framework": "PyTorch compile, FA3"}, "flash3"),
        ({"notes": "FlashAttention-3"}, "flash3"),
        ({"framework": "FSDP2", "notes": "Ring attention through cuDNN SDPA."}, "cudnn"),
        ({"framework": "nanotron"}, "flash2"),
        ({"notes": "cuDNN SDPA", "flash_attention": "0"}, "eager"),
        ({"framework": "JAX", "url_or_repo_path": "a/t5x/README.md", "flash_attention": "unknown"}, "eager"),
        (
            {
                "framework": "NeMo/Megatron-Core",
                "url_or_repo_path": "NVIDIA/NeMo-Framework-Launcher:README.md",
                "flash_attention": "unknown",
            },
            "eager",
        ),
        (
            {
                "framework": "JAX",
                "url_or_repo_path": "a/t5x/README.md",
                "flash_attention": "",
                "gpu": "H100-SXM-80GB",
                "precision": "fp8",
            },
            "auto",
        ),
        ({"notes": "cudnn.benchmark on"}, "auto"),
    ],
)
def test_a_row_may_name_the_library_of_attention(change: dict[str, str], attention: str) -> None:
    assert table.read_published_row({**ROW, "framework": "PyTorch 2.6", **change}).workload.attention == attention


@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama-3-8b", "attention"), ("falcon-7b", "attention"), ("gemma-2-2b", "all"), ("phi-2", "all")],
)
def test_files_of_litgpt_adapt_the_mlp_of_gemma_and_phi_alone(name: str, targets: str) -> None:
    row = {**ROW, "framework": "LitGPT", "model_name": name, "task": "lora"}
    assert table.read_published_row(row).workload.lora_targets == targets


@pytest.mark.parametrize(("family", "gradients"), [("diffusion", "fp32"), ("decoder", None)])
def test_the_optimizer_of_mlperf_s_diffusion_holds_gradients_in_fp32(family: str, gradients: str | None) -> None:
    name = "Stable Diffusion v2 (MLPerf)" if family == "diffusion" else ROW["model_name"]
    row = {**ROW, "framework": "MLPerf v5.0", "family": family, "model_name": name}
    assert table.read_published_row(row).workload.gradient_precision == gradients


@pytest.mark.parametrize(
    ("gpu", "framework", "attention"),
    [
        ("GB200-NVL72", "NeMo (release 25.05)", "eager"),
        ("GB200-NVL72", "Megatron-Bridge (NeMo 25.09)", "auto"),
        ("H100-SXM-80GB", "NeMo (release 25.05)", "auto"),
    ],
)
def test_latent_attention_is_fused_on_blackwell_from_nemo_25_09_on(gpu: str, framework: str, attention: str) -> None:
    sizes = {"n_layers": "61", "hidden": "7168", "n_heads": "128", "n_kv_heads": "128", "vocab": "129280"}
    row = {**ROW, **sizes, "model_name": "DeepSeek-V3-671B", "family": "moe", "gpu": gpu, "framework": framework,
           "gated_mlp": "1", "ffn_hidden": "2048", "notes": "MoE 256 experts top-8 + 1 shared, MLA."}  # fmt: skip
    assert table.read_published_row(row).workload.attention == attention


@pytest.mark.parametrize(
    ("framework", "date", "version"),
    [
        ("Megatron-LM (NGC 20.12)", "c89430b (2022-01-21)", "0.4"),
        ("Megatron-LM", "937571cfd4 (table of 2021-04)", "0.4"),
        ("Megatron-LM 2bc6cd3 (Jan 1 2024)", "b2646e4d (2024-05-13)", "0.5"),
        ("Megatron-LM", "b2646e4d (2024-05-13)", None),
        ("Megatron-LM", "1b5a030398ab719e406f77877eb34c", None),
    ],
)
def test_early_megatron_is_read_as_its_megatron_core(framework: str, date: str, version: str | None) -> None:
    row = {**ROW, "framework": framework, "commit_or_date": date}
    assert table.read_published_row(row).workload.framework_version == version


@pytest.mark.parametrize(
    ("name", "notes", "side"),
    [
        ("timm/efficientnet_b4", "synthetic data, image size 320, layout nchw", 320),
        ("timm/efficientnet_b4", "synthetic data", 380),
        ("timm/vit_base_patch16_224", "image size 384", 384),
        ("timm/efficientnet_b4", "image size 2", 380),
    ],
)
def test_a_row_may_state_the_size_of_its_images(name: str, notes: str, side: int) -> None:
    row = {**ROW, "model_name": name, "family": "vision", "notes": notes, "n_layers": "", "hidden": "", "n_heads": "",
           "n_kv_heads": "", "ffn_hidden": "", "vocab": "", "seq_len": ""}  # fmt: skip
    dimensions: Any = table.read_published_row(row).workload.model.dimensions
    assert dimensions.image == side


@pytest.mark.parametrize(
    ("change", "framework", "weights"),
    [
        ({"framework": "PyTorch 21.04 NGC"}, None, None),
        ({"framework": "HF Trainer, PyTorch 1.13 (NGC 22.07)"}, "huggingface", None),
        ({"framework": "PyTorch 2.6 eager", "notes": "Autocast to BF16."}, None, "autocast"),
        ({"framework": "PyTorch 2.6 eager"}, None, None),
        ({"framework": "PyTorch 2.6", "notes": "Pure BF16, no autocast."}, "ddp", "pure"),
        ({"framework": "PyTorch 2.0, Accelerate"}, "huggingface", None),
        ({"framework": "Accelerate, FSDP"}, "accelerate", None),
        ({"framework": "HF Trainer", "notes": "accelerated-peft-bnb, base 4-bit"}, "huggingface", "pure"),
        ({"framework": "HF Trainer", "notes": "baseline-peft-bnb, base 4-bit"}, "huggingface", None),
        ({"framework": "HF Trainer + FSDP1", "notes": "baseline-peft-bnb, base 4-bit"}, "huggingface", "pure"),
        ({"framework": "HF Trainer, PyTorch 1.13 + ZeRO-2"}, "huggingface-deepspeed", None),
        ({"framework": "TRL SFTTrainer, FSDP2", "commit_or_date": "2026-08-21"}, "fsdp2", "pure"),
        ({"framework": "TRL SFTTrainer, FSDP2", "commit_or_date": "2025-08-21"}, "fsdp2", None),
    ],
)
def test_mixed_precision_is_that_of_the_trainer(
    change: dict[str, str], framework: str | None, weights: str | None
) -> None:
    job = table.read_published_row({**ROW, "model_name": "bert-large", "family": "encoder", **change}).workload
    assert (job.framework, job.weights) == (framework, weights)


def test_an_encoder_may_classify_samples() -> None:
    row = {**ROW, "family": "encoder", "model_name": "m (sequence classification)"}
    dimensions: Any = table.read_published_row(row).workload.model.dimensions
    assert (dimensions.classes, dimensions.pooler, dimensions.head_transform) == (2, True, False)
    scoring: Any = table.read_published_row({**row, "model_name": "m"}).workload.model.dimensions
    assert (scoring.classes, scoring.head_transform) == (0, True)


@pytest.mark.parametrize(
    ("notes", "offload"),
    [
        ("DeepSpeed test config, which offloads the optimizer to the CPU and may set its own precision.", "optimizer"),
        ("FSDP with CPU offload.", "parameters"),
        ("", "none"),
    ],
)
def test_notes_state_what_is_on_the_cpu(notes: str, offload: str) -> None:
    assert table.read_published_row({**ROW, "notes": notes}).workload.offload == offload


def test_a_loop_over_tensors_is_no_fused_optimizer() -> None:
    notes = ("optimiser a plain per-parameter Python loop", "")
    assert [table.read_published_row({**ROW, "notes": note}).workload.fused_optimizer for note in notes] == [
        False,
        True,
    ]


def test_t4_have_no_peer_access() -> None:
    assert intra_link("PCIe (AWS g4dn.12xlarge)", find_gpu("t4")) == find_link("pcie3-host")
    assert intra_link("PCIe 3.0 x16", find_gpu("t4")) == find_link("pcie3")


def test_a_run_that_reduces_at_the_end_says_so() -> None:
    job = {**ROW, "framework": "Megatron-LM", "grad_accum": "1", "global_batch": "16"}
    late, usual = (runs.forecast([{**job, "notes": notes}])[0].parts for notes in ("no TP/DP overlap", ""))
    assert late and usual
    assert late["communication"] > usual["communication"]


def test_whole_experts_are_spread_rather_than_gathered() -> None:
    sparse = {
        **BRIDGE, "framework": "NeMo AutoModel (PyTorch FSDP2 + TE)", "model_name": "qwen3-30b-a3b", "family": "moe",
        "dp": "64", "tp": "1", "pp": "1", "ep": "", "grad_accum": "1", "activation_checkpointing": "full", "notes": "",
    }  # fmt: skip
    sharded, copied = (runs.forecast([{**sparse, "zero_stage": stage}])[0].plan for stage in ("3", "2"))
    assert sharded and copied
    assert (sharded.expert, copied.expert) == (64, 8)


MEASURED = ("metric", "value", "step_time_s_derived", "neusight_s", "roofline_s", "trust", "split_group")


def test_nothing_measured_is_read() -> None:
    notes = "Measured step_time 0.2 s (sync_time 0.1 s), 300 TFLOP/s per GPU, MFU 55%, 12000 tok/s"
    other = {**ROW, **dict.fromkeys(MEASURED, "7.25"), "notes": notes}
    assert runs.forecast([other]) == runs.forecast([ROW])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"gpu": "Gaudi 3"}, "unknown-gpu"),
        ({"precision": "int4"}, "unknown-precision"),
        ({"gpu": "T4"}, "precision-not-supported"),
        ({"n_layers": "", "hidden": ""}, "unknown-model"),
        ({"seq_len": ""}, "no-sequence"),
        ({"n_gpus": ""}, "no-gpus"),
        ({"tp": "4"}, "impossible-plan"),
        ({"micro_batch_per_gpu": "", "global_batch": ""}, "no-batch"),
        ({"n_gpus": "nan"}, "no-gpus"),
        ({"global_batch": "-4", "micro_batch_per_gpu": ""}, "no-batch"),
    ],
)
def test_a_row_that_cannot_be_expressed_has_a_code(change: dict[str, str], code: str) -> None:
    (item,) = runs.forecast([{**ROW, **change}])
    assert item.seconds is None
    assert item.reason == code
    assert code in REASONS


NUMBERS = ("0", "-1", "3", "7.5", "1e308", "nan", "abc", "1099511627775", "9" * 400, "")
NOTES = ("9" * 400 + " experts", "head_dim 0", "head_dim " + "9" * 400, "rank " + "9" * 400, "VP" + "9" * 30, "top-0")
SHAPES = (
    "n_gpus", "gpus_per_node", "n_layers", "hidden", "n_heads", "n_kv_heads", "ffn_hidden", "vocab", "params_b",
    "seq_len", "micro_batch_per_gpu", "grad_accum", "global_batch", "dp", "tp", "pp", "cp", "ep", "zero_stage",
)  # fmt: skip


@pytest.mark.parametrize("column", SHAPES)
@pytest.mark.slow
def test_no_number_in_a_row_loses_the_others(column: str) -> None:
    rows = [ROW] + [{**ROW, column: value, "family": family} for value in NUMBERS for family in ("decoder", "moe")]
    forecasts = runs.forecast(rows)
    assert len(forecasts) == len(rows)
    assert forecasts[0] == runs.forecast([ROW])[0]
    for item in forecasts:
        assert (item.seconds is None) == (item.reason in REASONS)
        assert item.seconds is None or 0 < item.seconds < float("inf")


@pytest.mark.parametrize("notes", NOTES)
def test_no_note_in_a_row_loses_the_others(notes: str) -> None:
    changes: list[dict[str, str]] = [{}, {"family": "moe"}, {"task": "lora"}]
    forecasts = runs.forecast([{**ROW, **change, "notes": notes} for change in changes])
    assert all((item.seconds is None) == (item.reason in REASONS) for item in forecasts)


@pytest.mark.parametrize("measured", ["n/a", "0", "nan", "-1", ""])
def test_a_row_without_a_measured_step_is_forecast_and_not_scored(measured: str) -> None:
    rows = [{**ROW, "step_time_s_derived": measured}]
    forecasts = runs.forecast(rows)
    assert forecasts[0].seconds is not None
    assert "no graded row" in scores.summary(rows, forecasts)


def test_a_byte_order_mark_does_not_hide_the_first_column(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text(",".join(ROW) + "\n" + ",".join(ROW.values()) + "\n", encoding="utf-8-sig")
    assert read_table(path)[0]["id"] == "r1"


def test_the_rows_file_has_a_line_per_row_in_order(tmp_path: Path) -> None:
    rows = [
        {**ROW, "id": "a"},
        {**ROW, "id": "b", "gpu": "?"},
        {**ROW, "id": "c", "micro_batch_per_gpu": "1", "grad_accum": "8"},
    ]
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    with source.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, ROW)
        writer.writeheader()
        writer.writerows(rows)
    assert main(["validate", "runs", str(source), "--rows", str(out)]) == 0
    with out.open(newline="") as handle:
        written = list(csv.DictReader(handle))
    assert [row["id"] for row in written] == ["a", "b", "c"]
    assert list(written[0]) == ["id", "predicted_s", "lower_s", "upper_s", "fits", "memory_bytes"] + [
        f"{part}_s" for part in PARTS
    ] + ["reason"]
    assert written[1]["predicted_s"] == "" and written[1]["reason"] == "unknown-gpu"
    for row in (written[0], written[2]):
        assert sum(float(row[f"{part}_s"]) for part in PARTS) == pytest.approx(float(row["predicted_s"]), rel=1e-6)
        assert row["fits"] in ("true", "false")


def data(name: str) -> Path:
    folder = os.environ.get("TILECAST_DATA")
    if not folder:
        pytest.skip("TILECAST_DATA does not point to the measured tables")
    return Path(folder) / "e2e" / name


@cache
def forecast(name: str) -> tuple[list[Row], list[runs.PublishedForecast]]:
    """Return the rows of a measured table and their forecasts."""
    rows = read_table(data(name))
    return rows, runs.forecast(rows)


@pytest.mark.data
@pytest.mark.parametrize("name", ["vtrain_dev.csv", "published_dev.csv", "neusight_dev.csv"])
def test_most_graded_rows_are_predicted_and_the_baselines_beaten(name: str) -> None:
    rows, forecasts = forecast(name)
    scored = scores.score_forecasts(rows, forecasts)
    assert len(scored.measured_s) >= 0.95 * scored.graded
    assert {item.reason for item in forecasts} <= {"", *REASONS}
    ours = mean_over_groups(abs(scored.predicted_s / scored.measured_s - 1), scored.rows)
    for baseline in (scored.roofline_s, scored.one_mfu_s):
        assert ours < mean_over_groups(abs(baseline / scored.measured_s - 1), scored.rows)


# Ceilings of the macro error with the shipped model and constants, somewhat above the measured values.
CEILINGS = {"vtrain_dev.csv": 0.095, "published_dev.csv": 0.145, "neusight_dev.csv": 0.072}


def test_a_source_that_moves_a_constant_has_its_own() -> None:
    assert all(one != constants.shipped_constants() for one in runs.constants_without_source().values())
    with pytest.raises(KeyError):
        with_values({"overlap.unheard.of": 1.0})


@pytest.mark.data
@pytest.mark.parametrize("name", CEILINGS)
def test_the_error_stays_below_its_ceiling(name: str) -> None:
    scored = scores.score_forecasts(*forecast(name))
    assert mean_over_groups(abs(scored.predicted_s / scored.measured_s - 1), scored.rows) < CEILINGS[name]
    assert scored.covered.mean() >= 0.9
    assert mean_over_groups(abs(scored.left_out_s / scored.measured_s - 1), scored.rows) < 1.25 * CEILINGS[name]
    assert scored.fits.mean() >= 0.98


@pytest.mark.data
def test_every_gpu_of_the_tables_is_known() -> None:
    folder = data("").parent
    paths = [*folder.glob("e2e/*.csv"), *folder.glob("second/e2e/*.csv")]
    names = {row["gpu"].split("(")[0].strip() for path in paths for row in read_table(path)}
    assert len(names) >= 15
    assert all(find_gpu(ASSUMED.get(name, name)) for name in names)


@pytest.mark.data
def test_plans_are_ranked_as_measured() -> None:
    """When the limits were set, Kendall tau was 0.88, and the top-1 regret over 47 groups of plans 1.8 %.

    That regret is for the order of advice; by the forecast alone it was 3.9 %.
    """
    scored = scores.score_forecasts(*forecast("vtrain_dev.csv"))
    tau, regret, groups = rank_plans(scored.rows, scored.predicted_s, scored.measured_s)
    assert groups >= 40
    assert tau > 0.84
    assert regret <= 0.04
    assert rank_plans(scored.rows, scored.predicted_s, scored.measured_s, scored.cautious_s)[1] < 0.03


@pytest.mark.data
def test_the_choice_of_advice_among_measured_plans_is_near_the_fastest() -> None:
    """The choice was 2.7 % behind over 47 groups, without the rules on plans that practitioners use.

    Those rules (`keep_sensible_plans`) replicate small models, though vTrain measured no plan with whole batches.
    """
    rows, forecasts = forecast("vtrain_dev.csv")
    regrets = []
    for group in runs.prepare(rows)[0]:
        measured_s = {forecasts[one.index].plan: float(rows[one.index]["step_time_s_derived"]) for one in group.members}
        plans = [plan for plan in measured_s if plan is not None]
        if len(plans) < 4:
            continue
        request = Request("group", group.workload)
        candidates = find_candidates(request, group.pool, only_plans=Plans.from_plans(*plans))
        choice = choose_plan(request, candidates, candidates.fits)
        assert choice is not None
        regrets.append(measured_s[candidates.plans.row(choice.row)] / min(measured_s.values()) - 1)
    assert len(regrets) >= 40
    assert sum(regrets) / len(regrets) <= 0.03


@pytest.mark.data
def test_the_summary_names_every_gpu_of_the_table() -> None:
    path = data("published_dev.csv")
    text = report.text(report.make_report([path]))
    names = {row["gpu"] for row in read_table(path) if row["trust"] in "AB" and row["step_time_s_derived"]}
    assert [name for name in names if not re.search(rf"^gpu {re.escape(name[:20])}", text, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("cells", "is_hand_written"),
    [
        ({"notes": "FP32, TF32 off. LayerNorm and GELU hand written. Dropout 0.1."}, True),
        ({"framework": "PyTorch 2.6 eager (CS336 code)"}, True),
        ({"notes": "Attention materialised. Dropout 0.1."}, False),
    ],
)
def test_rows_say_that_norms_and_activations_are_hand_written(cells: Row, is_hand_written: bool) -> None:
    dims = model_of({"model_name": "gpt2", **cells}).dimensions
    assert getattr(dims, "hand_written", False) is is_hand_written
