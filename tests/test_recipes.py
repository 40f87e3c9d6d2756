"""Recipes of training in 16 bits: the types of weights, gradients and moments, and the optimizers, in memory."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilecast import memory, zoo
from tilecast.api.training_job import TrainingJobSpec, to_request
from tilecast.render.launch import write_launch
from tilecast.render.launch.setting import LaunchSetting
from tilecast.spec import Framework, Plan, Plans, SpecError, Workload
from tilecast.validate import runs
from tilecast_lab.validate.memory import measure_peaks
from tilecast_lab.validate.table import read_published_row

LLAMA = zoo.find_preset("llama-2-7b")
TABLE = Path(__file__).parent.parent / "lab" / "measured" / "h100-pytorch-2.11.csv"
TWICE = Plan(gradient_accumulation=2)


def bill(framework: Framework | None, plan: Plan = TWICE, **job: Any) -> memory.Footprint:
    workload = Workload(LLAMA, 2048, 64, framework=framework, **job)
    plans = Plans.from_plans(plan)
    return memory.footprint(workload, zoo.build_sharded_graph(workload, plans), plans)


def states(footprint: memory.Footprint) -> float:
    """Return the bytes of weights, gradients and optimizer states per parameter."""
    held = footprint.parameters + footprint.gradients + footprint.optimizer
    return float(held[0]) / zoo.count_parameters(Workload(LLAMA, 2048, 64))


@pytest.mark.parametrize(
    ("framework", "recipe", "each"),
    [
        # Megatron-LM: weight 2, gradient 4, master 4 and moments 8; gradients or moments in 16 bit take half.
        ("megatron", {}, 18.0),
        ("megatron", {"gradient_precision": "bf16"}, 16.0),
        ("megatron", {"moment_precision": "bf16"}, 14.0),
        ("megatron", {"moment_precision": "fp8"}, 12.0),
        ("nemo", {}, 16.0),
        ("nemo", {"gradient_precision": "fp32"}, 18.0),
        # Pure BF16: weight, gradient and two moments of 2 bytes each.
        ("huggingface", {"weights": "pure"}, 8.0),
        ("fsdp2", {"weights": "pure"}, 8.0),
        ("megatron", {"optimizer": "momentum"}, 14.0),
        ("megatron", {"optimizer": "adafactor"}, 10.0),
        # Two moments of a byte, with FP32 scales for blocks of 256.
        ("megatron", {"optimizer": "adamw8bit"}, 12 + 8 / 256),
        # Two moments of half a byte, with FP32 scales for blocks of 128.
        ("megatron", {"optimizer": "adamw4bit"}, 11 + 8 / 128),
    ],
)
def test_states_take_what_the_recipe_says(framework: Framework, recipe: dict[str, Any], each: float) -> None:
    footprint = bill(framework, **{"optimizer": "adam", **recipe})
    assert states(footprint) == pytest.approx(each, rel=1e-6)


def test_muon_keeps_a_second_moment_of_what_is_outside_the_layers() -> None:
    ends = 2 * 32000 * 4096 + 4096
    share = ends / zoo.count_parameters(Workload(LLAMA, 2048, 64))
    assert states(bill("megatron", optimizer="muon")) == pytest.approx(14 + 4 * share, rel=1e-6)


def test_fp32_jobs_have_no_recipe() -> None:
    one, other = (bill("ddp", precision="fp32", weights=weights).total[0] for weights in (None, "pure"))
    assert one == other


def test_gradients_of_one_micro_batch_take_the_place_of_activations() -> None:
    """They stand beside all activations if a second micro-batch adds to them."""
    plans = Plan(micro_batch=8), Plan(micro_batch=8, gradient_accumulation=2)
    once, twice = (bill("ddp", plan, weights="pure", optimizer="sgd") for plan in plans)
    assert once.gradients[0] == 0
    assert twice.allocated[0] - once.allocated[0] == pytest.approx(float(once.parameters[0]))


def test_a_step_of_few_tokens_is_fullest_in_its_update() -> None:
    footprint = bill("ddp", Plan(), optimizer="adamw")
    assert footprint.activations[0] == 0 < footprint.gradients[0]
    # Square roots of the second moments, in FP32, beside weights, gradients and moments.
    assert footprint.working[0] == pytest.approx(4 * zoo.count_parameters(Workload(LLAMA, 2048, 64)))


WHOLE = ("llama-0.3b", "llama-0.3b-128k", "llama-3.2-1b", "llama-3.2-3b", "gpt2", "gpt2-medium", "gpt2-xl")


@pytest.mark.slow
def test_measured_peaks_of_decoders_are_met() -> None:
    """Steps of Hugging Face's models on one H100, in pure BF16, under autocast and in FP32, some recomputed.

    The bill counts the logits that a loop may hold, which these steps free: up to an eighth more.
    """
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model_name"] in WHOLE and not row["failure"]]
    # One kind of recomputation, a compiler of single layers and a masked kernel have no words here.
    odd = ("select", '"compiled": "layer', '"attention": "math"', '"attention": "eager"')
    rows = [row for row in rows if not any(word in row["case"] for word in odd)]
    peaks = measure_peaks(rows, *runs.group_runs(rows, read_published_row))
    assert len(peaks.measured) >= 30
    ratio = peaks.billed / peaks.measured
    assert abs(ratio - 1).mean() < 0.05
    assert ratio.min() > 0.9
    assert ratio.max() < 1.13


def job(**training: Any) -> Workload:
    table = {"sequenceLength": 2048, "globalBatchSize": 64, **training}
    spec = {"model": {"preset": "llama-2-7b"}, "training": table}
    return to_request("job", TrainingJobSpec.model_validate(spec)).workload


def test_a_job_states_its_recipe() -> None:
    workload = job(framework="megatron", gradientPrecision="bf16", momentPrecision="bf16", optimizer="muon")
    assert (workload.gradient_precision, workload.moment_precision, workload.optimizer) == ("bf16", "bf16", "muon")
    assert job(framework="huggingface", weights="pure").weights == "pure"


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"framework": "megatron", "weights": "pure"}, "megatron does not hold weights as pure; use master"),
        ({"precision": "fp32", "weights": "pure"}, "holds everything in FP32"),
        ({"framework": "ddp", "gradientPrecision": "bf16"}, "gradients of bf16 jobs with weights autocast are in fp32"),
        ({"precision": "fp16", "gradientPrecision": "bf16"}, "are in fp32 or fp16"),
        ({"framework": "fsdp2", "momentPrecision": "bf16"}, "moments of weights sharded have the type of the weights"),
    ],
)
def test_a_recipe_that_the_framework_lacks_is_refused(training: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        job(**training)


@pytest.mark.parametrize(
    ("launcher", "framework", "recipe", "word"),
    [
        ("torchrun", "ddp", {"weights": "pure"}, "model.to(torch.bfloat16)"),
        ("megatron", "megatron", {"gradient_precision": "bf16"}, "--grad-reduce-in-bf16"),
        *(
            ("megatron", "megatron", {"precision": precision, "gradient_precision": "bf16"}, "--grad-reduce-in-bf16")
            for precision in ("fp8", "mxfp8", "nvfp4")
        ),
        ("megatron", "megatron", {"moment_precision": "bf16"}, "--exp-avg-dtype bf16"),
        ("megatron", "megatron", {"optimizer": "muon"}, None),
        ("trainer", "huggingface", {"weights": "pure"}, None),
        ("fsdp2", "fsdp2", {"optimizer": "adafactor"}, None),
    ],
)
def test_a_launch_requests_the_recipe_or_is_refused(
    launcher: str, framework: Framework, recipe: dict[str, Any], word: str | None
) -> None:
    workload = Workload(LLAMA, 2048, 64, framework=framework, **recipe)
    stage = 3 if framework == "fsdp2" else int(framework == "megatron")
    plan = Plan(data=8, gradient_accumulation=8, zero_stage=stage)
    setting = LaunchSetting("job", workload, plan, "h100-sxm", 1, 8, 1.0)
    if word is None:
        with pytest.raises(SpecError, match=f"{launcher} (has no|is not told)"):
            write_launch(launcher, setting)
        return
    written = write_launch(launcher, setting)
    assert word in " ".join([*written.command, *written.script, *written.files.values()])


def test_offloaded_activations_wait_on_the_host() -> None:
    """Only those of one layer are on their way while the next one runs."""
    plan = Plan(micro_batch=4, gradient_accumulation=2)
    kept, half, none = (bill("megatron", plan, offloaded_activations=share) for share in (0.0, 0.5, 1.0))
    layers = (kept.activations - none.activations)[0]
    assert layers > 0.5 * kept.activations[0]
    assert (kept.activations - half.activations)[0] == pytest.approx(layers / 2)
    assert none.working[0] <= kept.working[0] + layers / 32 + 1


def test_a_loss_in_pieces_has_the_logits_of_one() -> None:
    plan = Plan(micro_batch=4, gradient_accumulation=2, checkpointing="full")
    whole, cut = (bill(None, plan, loss_chunks=pieces) for pieces in (1, 8))
    logits = 4 * 2048 * LLAMA.vocab
    assert (whole.activations - cut.activations)[0] == 6 * logits
    assert cut.working[0] <= whole.working[0]


def test_rows_say_their_recipe_in_notes() -> None:
    row = {
        "gpu": "H100 SXM", "framework": "HF Trainer", "model_name": "llama-2-7b", "family": "decoder", "n_gpus": "8",
        "seq_len": "4096", "global_batch": "8", "precision": "bf16", "dp": "8", "tp": "1", "pp": "1",
        "micro_batch_per_gpu": "1", "optimizer": "adamw8bit", "gpus_per_node": "8",
        "notes": "Weights and AdamW state in pure bf16. Activation offload to host, ratio 0.25, overlapped.",
    }  # fmt: skip
    workload = read_published_row(row).workload
    assert (workload.weights, workload.optimizer, workload.offloaded_activations) == ("pure", "adamw8bit", 0.25)
    plain = read_published_row({**row, "notes": "", "optimizer": "muon"}).workload
    assert (plain.weights, plain.optimizer, plain.offloaded_activations) == (None, "muon", 0.0)
    short = {
        **row, "model_name": "own T5", "family": "encdec", "n_layers": "24", "hidden": "768", "n_heads": "12",
        "ffn_hidden": "2048", "vocab": "32128", "seq_len": "512", "notes": "encoder length 512, decoder length 114",
    }  # fmt: skip
    dimensions = read_published_row(short).workload.model.dimensions
    assert isinstance(dimensions, zoo.Transformer)
    assert dimensions.decoder_length == 114


@pytest.mark.parametrize("framework", ["huggingface", "fsdp2", "megatron", "lightning"])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_no_item_of_a_bill_is_negative(framework: str, batch: int, optimizer: str) -> None:
    job = Workload(LLAMA, 128, batch, "bf16", framework=framework, optimizer=optimizer)  # type: ignore[arg-type]
    for mode in ("none", "full"):
        plans = Plans.from_plans(Plan(micro_batch=batch, checkpointing=mode))
        bill = memory.footprint(job, zoo.build_sharded_graph(job, plans), plans).items(0)
        assert all(size >= 0 for size in bill.values()), (mode, bill)


def test_layers_that_are_kept_keep_their_copies() -> None:
    job = Workload(LLAMA, 8192, 4, "bf16", framework="lightning")
    plans = Plans.from_plans(Plan(data=4, checkpointing="full"))
    some = replace(job, recompute_layers=1)
    one, every = (memory.footprint(item, zoo.build_sharded_graph(item, plans), plans).total[0] for item in (some, job))
    none = Plans.from_plans(Plan(data=4))
    assert every < one < memory.footprint(job, zoo.build_sharded_graph(job, none), none).total[0]
