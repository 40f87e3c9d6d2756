"""Training steps to measure: the models with their dimensions, the recipes, and the ordered plan over them.

`plan_steps` returns the cases, `table_row` the row of a case in a table that `tilecast validate runs` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from .kernel_kinds import KINDS

Library = Literal["transformers", "torchvision"]
Recipe = Literal["amp-bf16", "amp-fp16", "pure-bf16", "fp32", "tf32"]
"""Types of a step: autocast with FP32 weights, everything in BF16, FP32, or FP32 with products in TF32."""
Optimizer = Literal["adamw-fused", "adamw-foreach", "adamw-loop", "sgd", "adafactor", "muon"]
AttentionKernel = Literal["eager", "sdpa", "flash", "cudnn", "efficient", "math", "flex", "own"]
"""Attention of a model: PyTorch's SDPA with its own choice (`sdpa`) or a forced backend, FlexAttention, or products and
a softmax (`eager`); `own` leaves it to the model."""
Compiled = Literal["none", "layers", "model"]
Checkpointing = Literal["none", "selective", "full"]
Loss = Literal["own", "compiled"]
Layout = Literal["contiguous", "channels_last"]

FRAMEWORKS: Mapping[Library, str] = {
    "transformers": "transformers {transformers}, PyTorch {torch}",
    "torchvision": "torchvision {torchvision}, PyTorch {torch}",
}
"""Framework of a row by the library that has the model."""
PRECISIONS: Mapping[Recipe, str] = {
    "amp-bf16": "amp_bf16", "amp-fp16": "amp_fp16", "pure-bf16": "bf16", "fp32": "fp32", "tf32": "tf32",
}  # fmt: skip
CLIPPED = 1.0
"""Largest norm of the gradients of language models, as in Hugging Face's Trainer; vision models do not clip."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Model that is measured, with its dimensions as columns of a runs table."""

    name: str
    library: Library
    builder: str
    """Key of `step_models.BUILDERS`."""
    family: str
    dimensions: Mapping[str, int] = field(default_factory=dict)
    """Cells by column: `n_layers`, `hidden`, `n_heads`, `n_kv_heads`, `ffn_hidden`, `gated_mlp`, `vocab`."""
    options: Mapping[str, int] = field(default_factory=dict)
    """Further arguments of its builder."""
    notes: str = ""


def _decoder(name: str, *sizes: int, tied: bool = False) -> TrainedModel:
    columns = ("n_layers", "hidden", "n_heads", "n_kv_heads", "ffn_hidden", "vocab")
    cells = dict(zip(columns, sizes, strict=True)) | {"gated_mlp": 1}
    return TrainedModel(name, "transformers", "llama", "decoder", cells, {"tied": int(tied)})


def _gpt2(name: str, layers: int, hidden: int, heads: int, vocabulary: int = 50257) -> TrainedModel:
    cells = {
        "n_layers": layers, "hidden": hidden, "n_heads": heads, "n_kv_heads": heads, "ffn_hidden": 4 * hidden,
        "vocab": vocabulary, "gated_mlp": 0,
    }  # fmt: skip
    return TrainedModel(name, "transformers", "gpt2", "decoder", cells, notes="dropout 0.1")


def _mixture(name: str, builder: str, *sizes: int, experts: int, top_k: int) -> TrainedModel:
    model = _decoder(name, *sizes)
    options, notes = {"experts": experts, "top_k": top_k}, f"{experts} experts, top_k {top_k}"
    return replace(model, builder=builder, family="moe", options=options, notes=notes)


MODELS: Mapping[str, TrainedModel] = {
    model.name: model
    for model in (
        _decoder("llama-0.3b", 16, 1024, 16, 8, 4096, 32000),
        _decoder("llama-0.3b-128k", 16, 1024, 16, 8, 4096, 128256),
        _decoder("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, tied=True),
        _decoder("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, tied=True),
        _gpt2("gpt2", 12, 768, 12),
        _gpt2("gpt2-medium", 24, 1024, 16),
        _gpt2("gpt2-xl", 48, 1600, 25),
        _gpt2("gpt2-padded", 12, 768, 12, 50304),
        TrainedModel("bert-large-classifier", "transformers", "bert", "encoder", notes="two classes, dropout 0.1"),
        TrainedModel(
            "t5-base", "transformers", "t5", "encdec", notes="encoder and decoder of equal length, dropout 0.1"
        ),
        _mixture("mixtral-0.8b", "mixtral", 8, 1024, 16, 4, 3584, 32000, experts=8, top_k=2),
        _mixture("qwen3-moe-1.3b", "qwen3_moe", 12, 1024, 16, 4, 512, 32000, experts=64, top_k=8),
        TrainedModel(
            "mamba2-0.4b", "transformers", "mamba2", "other", notes="Mamba-2, 24 layers, hidden 1024, state 128"
        ),
        TrainedModel("vit-l-16", "torchvision", "vit_l_16", "encoder"),
        TrainedModel("swin-t", "torchvision", "swin_t", "encoder"),
        TrainedModel("swin-b", "torchvision", "swin_b", "encoder"),
        TrainedModel("convnext-base", "torchvision", "convnext_base", "cnn"),
        TrainedModel("resnet-50", "torchvision", "resnet50", "cnn"),
    )
}  # fmt: skip
"""Models by name."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """Training step to measure."""

    model: str
    """Key of `MODELS`."""
    batch: int
    """Samples of a micro-batch."""
    sequence: int = 0
    """Tokens of a sample, 0 for images of 224 x 224 pixels."""
    recipe: Recipe = "amp-bf16"
    optimizer: Optimizer = "adamw-fused"
    attention: AttentionKernel = "sdpa"
    compiled: Compiled = "none"
    checkpointing: Checkpointing = "none"
    accumulation: int = 1
    loss: Loss = "own"
    layout: Layout = "contiguous"
    experts: Literal["own", "eager", "grouped_mm"] = "own"
    """Products of experts: one after the other, grouped, or as the library chooses."""
    control: int = 0
    """Number of the repetition of an equal case."""

    def __str__(self) -> str:
        options = {item.name: getattr(self, item.name) for item in fields(self)[4:]}
        usual = {item.name: item.default for item in fields(self) if item.name != "optimizer"}
        return " ".join([
            self.model, f"b{self.batch}", *([f"s{self.sequence}"] if self.sequence else []), self.recipe,
            *(f"{name}={value}" for name, value in options.items() if value != usual.get(name)),
        ])  # fmt: skip


COLUMNS = (
    "id", "source", "url_or_repo_path", "commit_or_date", "gpu", "gpus_per_node", "n_gpus", "interconnect_intra",
    "interconnect_inter", "framework", "model_name", "family", "mode", "n_layers", "hidden", "n_heads", "n_kv_heads",
    "ffn_hidden", "gated_mlp", "vocab", "params_b", "seq_len", "micro_batch_per_gpu", "grad_accum", "global_batch",
    "precision", "dp", "tp", "pp", "cp", "ep", "zero_stage", "activation_checkpointing", "flash_attention", "compiled",
    "optimizer", "metric", "value", "step_time_s_derived", "notes", "trust", "task", "split_group", "execution",
    "fused_kernels", "input_pipeline", "peak_mem_gb_per_gpu",
)  # fmt: skip
"""Columns of a runs table (`shared/data/e2e/README.md` of the project, and those of the second collection)."""
MEASURED = (
    "peak_reserved_gib", "weights_gib", "states_gib", "forward_gib", "peak_forward_gib", "peak_backward_gib",
    "peak_update_gib", "wall_s", "fastest_s", "slowest_s", "steps", "host_s", "busy_s", "kernels_per_step",
    "parameters", "clock_mhz", "power_w", "temperature_c", "driver", "cuda", "pytorch",
    *(f"{kind}_s" for kind in KINDS), "case", "failure",
)  # fmt: skip
"""Further columns: GiB that tensors take after the model is built (`weights`), after the first update (`states`, with
gradients), after a forward pass, and the peak of each part of a step; seconds by the wall clock, of the host alone
(`host_s`), in which a kernel ran (`busy_s`), and of each kind of kernel; the case as JSON; and why nothing was
measured."""


def describe_run(case: StepCase) -> dict[str, str]:
    """Return the case as the columns of a runs table describe a run."""
    model = MODELS[case.model]
    unfused = case.attention in ("eager", "math", "own") or _lacks_fused_attention(case)
    compiled = case.compiled != "none"
    return {
        "source": "tilecast", "gpus_per_node": "1", "n_gpus": "1", "model_name": model.name, "family": model.family,
        "mode": "train", **{column: str(size) for column, size in model.dimensions.items()},
        "seq_len": str(case.sequence or ""), "micro_batch_per_gpu": str(case.batch),
        "grad_accum": str(case.accumulation), "global_batch": str(case.batch * case.accumulation),
        "precision": PRECISIONS[case.recipe],
        "dp": "1", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "zero_stage": "0",
        "activation_checkpointing": case.checkpointing,
        "flash_attention": "" if not case.sequence and model.family == "cnn" else str(int(not unfused)),
        "compiled": str(int(compiled)), "optimizer": case.optimizer, "metric": "step_time_s", "task": "pretrain",
        "execution": "compiled" if compiled else "eager", "fused_kernels": "0", "input_pipeline": "synthetic",
        "split_group": f"tilecast|{model.name}", "notes": _write_notes(case),
        "case": json.dumps({item.name: getattr(case, item.name) for item in fields(case)}),
    }  # fmt: skip


def _lacks_fused_attention(case: StepCase) -> bool:
    """Return whether PyTorch's attention has no fused kernel for a case.

    In FP32 the only fused kernel takes no grouped heads, and with the learned bias of T5 none has a gradient.
    """
    model = MODELS[case.model]
    grouped = model.dimensions.get("n_heads") != model.dimensions.get("n_kv_heads")
    return (grouped and case.recipe in ("fp32", "tf32")) or model.builder == "t5"


def _write_notes(case: StepCase) -> str:
    model = MODELS[case.model]
    layout = " Images and weights channels last." if case.layout == "channels_last" else ""
    loss = " Compiled cross-entropy fusion." if case.loss == "compiled" else ""
    clipped = f" Norm of gradients limited to {CLIPPED:g}." if model.library == "transformers" else ""
    about = f" Model: {model.notes}." if model.notes else ""
    return (
        f"{case}.{about}{layout}{loss}{clipped} Random weights and data on the device. Median of steps between events, "
        "after warm-up. Peak: torch.cuda.max_memory_allocated."
    )


def plan_steps() -> Sequence[StepCase]:
    """Return the cases in the order in which they are measured: the most informative first, equal models together."""
    groups = (
        _small_llamas(), _resnets(), _gpt2s(), _large_llamas(), _encoders_and_vision(), _mixtures_of_experts(),
        _compiled_models(), _variants(),
    )  # fmt: skip
    return tuple(dict.fromkeys(case for group in groups for case in group))


def _small_llamas() -> list[StepCase]:
    base = StepCase("llama-0.3b", 8, 2048)
    small, long = replace(base, batch=2), replace(base, batch=2, sequence=8192)
    host = replace(base, batch=1, sequence=512)
    wide = replace(base, model="llama-0.3b-128k", batch=4)
    pure: Recipe = "pure-bf16"
    return [
        host,
        base,
        replace(base, recipe=pure),
        replace(base, batch=4, recipe="tf32"),
        replace(base, batch=4, recipe="fp32"),
        replace(base, optimizer="adamw-foreach"),
        replace(base, optimizer="adamw-loop"),
        replace(base, optimizer="sgd"),
        replace(base, optimizer="adafactor"),
        replace(base, optimizer="muon"),
        replace(base, attention="flash"),
        replace(base, attention="cudnn"),
        replace(base, attention="efficient"),
        small,
        replace(small, attention="eager"),
        replace(small, attention="math"),
        replace(small, attention="eager", recipe=pure),
        long,
        replace(long, attention="flash"),
        replace(long, attention="cudnn"),
        replace(base, checkpointing="full"),
        replace(base, checkpointing="selective"),
        replace(base, batch=2, accumulation=4),
        replace(base, loss="compiled"),
        wide,
        replace(wide, loss="compiled"),
        replace(wide, recipe=pure),
        replace(base, recipe=pure, optimizer="adamw-foreach"),
        replace(base, recipe=pure, optimizer="adafactor"),
        replace(host, recipe=pure),
        replace(host, optimizer="adamw-foreach"),
        replace(host, control=1),
    ]


def _resnets() -> list[StepCase]:
    base = StepCase("resnet-50", 256, recipe="amp-fp16", optimizer="sgd", attention="own", layout="channels_last")
    contiguous = replace(base, layout="contiguous")
    return [
        base,
        replace(base, recipe="amp-bf16"),
        replace(contiguous, recipe="amp-bf16"),
        contiguous,
        replace(contiguous, recipe="tf32"),
        replace(base, recipe="tf32"),
        replace(contiguous, batch=128, recipe="fp32"),
        replace(base, recipe="pure-bf16"),
        replace(base, batch=64),
        replace(contiguous, batch=64, recipe="amp-bf16"),
    ]


def _gpt2s() -> list[StepCase]:
    small, medium = StepCase("gpt2", 16, 1024), StepCase("gpt2-medium", 8, 1024)
    large = StepCase("gpt2-xl", 4, 1024)
    return [
        small,
        replace(small, recipe="pure-bf16"),
        replace(small, batch=8, recipe="tf32"),
        replace(small, batch=8, recipe="fp32"),
        replace(small, batch=8, attention="eager"),
        replace(small, batch=1),
        medium,
        replace(medium, recipe="pure-bf16"),
        replace(medium, checkpointing="full"),
        replace(medium, batch=2, accumulation=4),
        replace(medium, optimizer="adamw-foreach"),
        large,
        replace(large, recipe="pure-bf16"),
        replace(large, batch=16, checkpointing="full"),
        replace(large, batch=32),
    ]


def _large_llamas() -> list[StepCase]:
    one, three = StepCase("llama-3.2-1b", 2, 2048), StepCase("llama-3.2-3b", 1, 2048)
    pure: Recipe = "pure-bf16"
    return [
        one,
        replace(one, recipe=pure, batch=4),
        replace(one, recipe=pure, batch=1, sequence=8192),
        replace(one, batch=1, sequence=8192),
        replace(one, batch=2, checkpointing="full", sequence=8192, recipe=pure),
        replace(one, optimizer="adamw-foreach"),
        replace(one, recipe=pure, optimizer="adamw-foreach"),
        replace(one, optimizer="muon"),
        three,
        replace(three, recipe=pure),
        replace(three, recipe=pure, sequence=8192, checkpointing="full"),
        replace(three, recipe=pure, optimizer="sgd"),
        replace(three, batch=8),
    ]


def _encoders_and_vision() -> list[StepCase]:
    bert, t5 = StepCase("bert-large-classifier", 16, 512), StepCase("t5-base", 16, 512)
    vit, swin = StepCase("vit-l-16", 64), StepCase("swin-b", 64, attention="own")
    convnext = replace(swin, model="convnext-base", optimizer="adamw-foreach")
    return [
        bert,
        replace(bert, recipe="amp-fp16"),
        replace(bert, recipe="pure-bf16"),
        replace(bert, attention="eager"),
        replace(bert, batch=64, sequence=128),
        replace(bert, batch=8, recipe="tf32"),
        t5,
        replace(t5, recipe="pure-bf16"),
        replace(t5, recipe="tf32", batch=8),
        vit,
        replace(vit, recipe="pure-bf16"),
        replace(vit, recipe="tf32", batch=32),
        replace(vit, optimizer="adamw-foreach"),
        swin,
        replace(swin, recipe="tf32"),
        replace(swin, model="swin-t", batch=128),
        convnext,
        replace(convnext, layout="channels_last"),
        replace(convnext, recipe="tf32"),
    ]


def _mixtures_of_experts() -> list[StepCase]:
    mixtral, qwen = StepCase("mixtral-0.8b", 4, 2048), StepCase("qwen3-moe-1.3b", 4, 2048)
    return [
        mixtral,
        replace(mixtral, recipe="pure-bf16"),
        replace(mixtral, experts="eager"),
        replace(mixtral, batch=1),
        qwen,
        replace(qwen, recipe="pure-bf16"),
        replace(qwen, experts="eager"),
        StepCase("mamba2-0.4b", 2, 1024, attention="own"),
    ]


def _compiled_models() -> list[StepCase]:
    base = StepCase("llama-0.3b", 8, 2048, compiled="layers")
    return [
        base,
        replace(base, recipe="pure-bf16"),
        StepCase("gpt2", 16, 1024, compiled="model"),
        StepCase("resnet-50", 256, recipe="amp-fp16", optimizer="sgd", attention="own", layout="channels_last",
                 compiled="model"),
        replace(base, compiled="model"),
        replace(base, batch=2, sequence=8192, compiled="none", attention="flex"),
        replace(base, checkpointing="full"),
        StepCase("bert-large-classifier", 16, 512, compiled="layers"),
        StepCase("vit-l-16", 64, compiled="layers"),
        replace(base, batch=1, sequence=512),
    ]  # fmt: skip


def _variants() -> list[StepCase]:
    base = StepCase("llama-0.3b", 8, 2048)
    return [
        replace(base, control=1),
        replace(base, batch=16),
        replace(base, batch=32, checkpointing="full"),
        StepCase("gpt2-padded", 16, 1024),
        StepCase("gpt2", 16, 1024, attention="efficient"),
        StepCase("gpt2", 16, 1024, attention="flash"),
        replace(base, recipe="pure-bf16", optimizer="muon"),
        replace(base, recipe="pure-bf16", optimizer="sgd"),
        replace(base, batch=4, sequence=512),
        replace(base, batch=4, sequence=512, recipe="pure-bf16"),
        StepCase("gpt2-medium", 8, 1024, recipe="amp-fp16"),
        StepCase("gpt2-medium", 8, 1024, optimizer="muon"),
        StepCase("resnet-50", 32, recipe="amp-fp16", optimizer="sgd", attention="own", layout="channels_last"),
        StepCase("bert-large-classifier", 4, 128),
        StepCase("llama-0.3b", 8, 2048, compiled="layers", loss="compiled"),
    ]


def table_row(
    case: StepCase, number: int, environment: Mapping[str, str], measured: Mapping[str, object]
) -> dict[str, str]:
    """Return the cells of a measured case by column.

    Args:
        case: the case.
        number: its place in the plan.
        environment: `gpu`, `driver`, `cuda`, the versions of `torch`, `transformers` and `torchvision`, and the `date`.
        measured: columns of `MEASURED` and `step_s` and `peak_gib`; empty but for `failure` where it failed.
    """
    seconds, peak = measured.get("step_s", ""), measured.get("peak_gib", "")
    framework = FRAMEWORKS[MODELS[case.model].library].format(**environment)
    parameters = measured.get("parameters", "")
    billions = f"{parameters / 1e9:.4f}" if isinstance(parameters, int) else ""
    found = describe_run(case) | {
        "id": f"S{number:03}", "url_or_repo_path": "lab/tilecast_lab/collect/steps.py", "gpu": environment["gpu"],
        "commit_or_date": environment["date"], "framework": framework, "params_b": billions, "value": seconds,
        "step_time_s_derived": seconds, "peak_mem_gb_per_gpu": peak, "trust": "A" if seconds else "C",
        "driver": environment["driver"], "cuda": environment["cuda"], "pytorch": environment["torch"],
    }  # fmt: skip
    found |= {name: value for name, value in measured.items() if name in MEASURED}
    return {name: _format_cell(found.get(name, "")) for name in (*COLUMNS, *MEASURED)}


def _format_cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
