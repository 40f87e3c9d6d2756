"""Reading of rows of measured training runs into workloads, plans and pools; `read_published_row` is the entry.

Only the description of a run is read: never its metric, its measured value, another predictor's column, or a
time, throughput or utilisation that its notes may mention.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

from tilecast import zoo
from tilecast.frameworks import FRAMEWORKS, UNSET, find_versioned_product
from tilecast.hardware import find_gpu
from tilecast.model import Model
from tilecast.recomputation import Checkpointing, encode_modules, join_modules
from tilecast.spec import (
    EXECUTIONS,
    QUANTIZED,
    Attention,
    Execution,
    ExpertOverlap,
    Framework,
    LoraTargets,
    MemoryFormat,
    Offload,
    Precision,
    SpecError,
    Weights,
    Workload,
)
from tilecast.validate.cells import Row, UnreadableRow, read_integer
from tilecast.validate.reading import (
    RunCase,
    compute_global_batch,
    read_optimizer,
    read_partial_plan,
    read_sequence_length,
    read_version,
)
from tilecast_lab.validate.graphs import Graphs
from tilecast_lab.validate.models import model_of, noted_number
from tilecast_lab.validate.networks import pool_of

_PRECISION: Mapping[str, Precision] = {
    "fp32": "fp32", "tf32": "tf32", "fp16": "fp16", "amp_fp16": "fp16", "bf16": "bf16", "amp_bf16": "bf16",
    "fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4",
}  # fmt: skip


def read_published_row(row: Row, graphs: Graphs | None = None) -> RunCase:
    """Return the case that a row describes; its model comes from the folder of graphs if that has one for it.

    Raises:
        UnreadableRow: the row cannot be expressed; the error has the reason's code.
        SpecError: the graph that the row names is damaged or contradicts what the row states.
    """
    try:
        name = row["gpu"].split("(")[0].strip()
        gpu = find_gpu(ASSUMED.get(name, name))
    except SpecError:
        raise UnreadableRow("unknown-gpu") from None
    precision = _precision(row)
    if precision is None:
        raise UnreadableRow("unknown-precision")
    if not gpu.supports(precision):
        raise UnreadableRow("precision-not-supported")
    model = (graphs.model(row) if graphs else None) or model_of(row)
    gpus = _gpus(row)
    if not gpus:
        raise UnreadableRow("no-gpus")
    stated = _plan(row, model, gpus)
    batch = read_integer(row, "global_batch") or compute_global_batch(stated)
    if not batch:
        raise UnreadableRow("no-batch")
    sequence = read_sequence_length(row, model)
    notes = row.get("notes", "").lower()
    workload = Workload(
        model=model,
        sequence_length=sequence,
        global_batch=batch,
        precision=precision,
        training=row.get("mode", "train") != "inference",
        optimizer=read_optimizer(row, model),
        weights=_held_weights(row),
        gradient_precision="fp32" if "gradients all-reduced in fp32" in notes or _is_mlperf_diffusion(row) else None,
        fused_optimizer=not any(word in row.get("optimizer", "") for word in ("foreach", "loop"))
        and "foak" not in notes
        and _LOOPED_OPTIMIZER not in notes
        and "peft" not in row.get("framework", "").lower(),
        attention=_attention(row),
        execution=execution(row),
        memory_format=_memory_format(row),
        fused_loss=any(word in row.get("framework", "").lower() for word in _FUSED_LOSS) or _FUSED_LOSS_NOTE in notes,
        fused_kernels=_fused_kernels(row) and not _lacks_patches(row, notes),
        lora_rank=_lora_rank(row, notes),
        lora_targets=_lora_targets(row, notes),
        compiled_loss=not _EAGER_LOSS.search(row.get("framework", "").lower()),
        frozen_bits=4 if row.get("task", "") == "qlora" else 16,
        framework=framework(row),
        framework_version=framework_version(row),
        expert_overlap=_expert_overlap(row),
        offload=_offload(notes),
        shard_degree=noted_number(r"fsdp group (\d+)", notes),
        offloaded_activations=_offloaded_activations(notes),
        recompute_layers=noted_number(_RECOMPUTED_LAYERS, notes) or None,
        loss_chunks=_CHUNKS if "chunked cross entropy" in notes else 1,
        overlap=not any(words in notes for words in _SAID_NOT),
        pipeline_layout=_stage_cuts(notes, model.layers),
    )
    return RunCase(workload, pool_of(row, gpu, gpus), gpus, stated)


def _offload(notes: str) -> Offload:
    """Return the states that notes say are on the CPU."""
    if _OPTIMIZER_AWAY in notes:
        return "optimizer"
    return "parameters" if "cpu offload" in notes else "none"


_OPTIMIZER_AWAY = "offloads the optimizer to the cpu"
"""Words in the notes of runs with Transformers' test configuration for DeepSpeed (ds_config_zero2.json)."""


_STAGE_CUTS = re.compile(r"stage cuts over (\d+) pipeline entries [^:]*: \[([\d ]+)\]")


def _stage_cuts(notes: str, layers: int) -> str | None:
    """Return the pipeline layout that notes state as cuts of all pipeline entries, or None if they state none.

    The list is that of Megatron-LM on DeepSpeed's pipeline engine: embedding, transposition, the layers, transposition,
    norm, product with the vocabulary, conversion (DeepSpeedExamples, Megatron-LM-v1.1.5-3D_parallelism: GPT2ModelPipe).
    """
    found = _STAGE_CUTS.search(notes)
    if found is None or int(found[1]) != layers + 6:
        return None
    entries = "E" + "-" + "t" * layers + "-" + "-" + "L" + "-"
    cuts = [int(cut) for cut in found[2].split()]
    if (cuts[0], cuts[-1]) != (0, layers + 6) or any(start >= stop for start, stop in pairwise(cuts)):
        return None
    return "|".join(entries[start:stop].replace("-", "") for start, stop in pairwise(cuts)) if len(cuts) > 2 else None


ASSUMED: Mapping[str, str] = {"A100": "a100-80", "H100": "h100-sxm", "V100": "v100-sxm"}
"""Variant of a GPU that is assumed if a table does not state it."""


def _precision(row: Row) -> Precision | None:
    """Return the precision of a row; rows in FP8 may say in their notes that it is MXFP8.

    BitsAndBytesConfig dequantizes weights to FP32 unless it is told otherwise, and so computes in it.
    """
    stated, notes = _PRECISION.get(row.get("precision", "").lower()), row.get("notes", "").lower()
    if row.get("task", "") == "qlora" and row.get("source", "").lower() in _OWN_LOOPS:
        return "fp32"
    return "mxfp8" if stated == "fp8" and "mxfp8" in notes else stated


def _gpus(row: Row) -> int | None:
    """Return the number of GPUs that a run used, or None if it is not stated.

    LitGPT uses no more GPUs than its global batch has micro-batches: its files set the number of devices, whatever the
    machine has (config_hub/finetune, `devices`).
    """
    gpus, micro, batch = (read_integer(row, column) for column in ("n_gpus", "micro_batch_per_gpu", "global_batch"))
    if not (gpus and micro and batch and framework(row) == "litgpt"):
        return gpus
    return min(gpus, max(1, batch // micro))


_EAGER, _FUSED_ATTENTION = ("0", "0.0"), ("1", "1.0")
_LIBRARIES: tuple[tuple[re.Pattern[str], Attention], ...] = (
    (re.compile(r"\b(?:fa-?|flash-?attention[- ]?)3\b"), "flash3"),
    (re.compile(r"\bcudnn (?:sdpa|attention)\b"), "cudnn"),
    (re.compile(r"\bnanotron\b"), "flash2"),
)
"""Libraries of fused attention, by words of a framework or of notes.

nanotron/models/llama.py imports flash_attn.
"""


_UNFUSED = re.compile(r"\bpytorch 1\.(?:\d|1[0-3])\b|\btimm 0\.[3-8]\b")
"""Versions of PyTorch before 2.0, which brought fused attention, and of timm before 0.9, which uses it."""


def _attention(row: Row) -> Attention:
    """Return what ran a row's attention. Most tables say whether it was fused, but not by which library."""
    stated, words = row.get("flash_attention", ""), row.get("framework", "").lower()
    is_unfused = _UNFUSED.search(words) or _runs_own_t5x_layers(row) or _runs_launcher_defaults(row)
    if stated in _EAGER or (stated not in _FUSED_ATTENTION and is_unfused) or _lacks_latent_kernel(row):
        return "eager"
    text = f"{words} {row.get('notes', '').lower()}"
    if library := next((library for pattern, library in _LIBRARIES if pattern.search(text)), None):
        return library
    if framework(row) == "megatron" and not _fused_kernels(row):
        return "flash2"  # Megatron-LM before it ran Transformer Engine: --use-flash-attn
    is_usual = _precision(row) in ("fp16", "bf16", *QUANTIZED)
    is_fused = is_usual and bool(FRAMEWORKS[framework(row) or UNSET].attention)
    return "flash" if stated in _FUSED_ATTENTION and not is_fused else "auto"


def _runs_own_t5x_layers(row: Row) -> bool:
    """Return whether a row trains T5X's own layers, whose attention is two products (t5x/examples/t5/layers.py).

    In FP8 Transformer Engine replaces them.
    """
    return "/t5x/" in row.get("url_or_repo_path", "") and _precision(row) not in QUANTIZED


def _runs_launcher_defaults(row: Row) -> bool:
    """Return whether a row ran NeMo's launcher of 2023, whose models of GPT run without Transformer Engine.

    Their attention is two products around a fused softmax (launcher_scripts/conf/training/gpt3/5b.yaml:
    transformer_engine is False, masked_softmax_fusion is True, and use_flash_attention is not set). FP8 needs it.
    """
    is_launcher = "nemo-framework-launcher" in row.get("url_or_repo_path", "").lower()
    return is_launcher and _precision(row) not in QUANTIZED


def _lacks_latent_kernel(row: Row) -> bool:
    """Return whether the libraries of a row had no fused kernel for the backward pass of its latent attention.

    On Blackwell, cuDNN 9.11 brought the heads of DeepSeek-V3, 192 wide for queries and 128 for values (Transformer
    Engine, common/fused_attn/fused_attn.cpp). Before release 25.09 NeMo's recipe for GB200 recomputes `core_attn`.
    """
    is_latent = "deepseek-v3" in row.get("model_name", "").lower() and framework(row) == "nemo"
    is_blackwell = re.match(r"g?b[23]00", row.get("gpu", "").lower()) is not None
    return is_latent and is_blackwell and (framework_version(row) or "26.04") < "25.09"


def execution(row: Row) -> Execution:
    """Return how a row's kernels were launched, as the row states it or else as its framework implies."""
    compiled: Execution = "xla" if framework(row) in _BY_XLA else "compiled"
    stated = next((mode for mode in EXECUTIONS if mode == row.get("execution")), None)
    if stated is not None:
        return compiled if stated == "compiled" else stated
    if "xla" in row.get("framework", "").lower() or framework(row) == "jax":
        return "xla"
    if _captures_iterations(row):
        return "cudaGraphs"
    return compiled if row.get("compiled", "") in ("1", "1.0") else "eager"


def _captures_iterations(row: Row) -> bool:
    """Return whether CUDA graphs hold whole iterations of a row.

    Since its release 26.06 Megatron-Bridge captures them where it trains mixtures of experts in MXFP8 on NVL72
    (scripts/performance/configs/deepseek and gpt_oss, cuda_graph_impl full_iteration).
    """
    release = framework_version(row) if framework(row) == "nemo" else None
    is_wide = row.get("gpu", "").lower().startswith(("gb200", "gb300")) and "MXFP8" in row.get("notes", "")
    return is_wide and row.get("family") == "moe" and release is not None and release >= "26.06"


def _expert_overlap(row: Row) -> ExpertOverlap | None:
    """Return beside what tokens get to their experts in a row, or None for what its framework does.

    Megatron-Bridge's configurations for H100 turn on the overlap with another micro-batch where a pipeline has experts
    on several nodes (scripts/performance/configs: moe_a2a_overlap of Qwen3-235B and DeepSeek-V3).
    """
    ranks, per_node = read_integer(row, "ep") or 1, read_integer(row, "gpus_per_node") or 8
    is_spread = ranks > per_node and (read_integer(row, "pp") or 1) > 1
    if framework(row) != "nemo" or not is_spread or "h100" not in row.get("gpu", "").lower():
        return None
    return "microBatch" if (framework_version(row) or "26.04") >= "25.09" else None


_BY_XLA = ("tensorflow", "jax")
"""Frameworks whose compiler is XLA."""


_FUSED_LOSS = ("composer",)
"""Words in a framework's name that mean a fused loss: llm-foundry's default is flash-attn's cross-entropy."""
_EAGER_LOSS = re.compile(r"\btorchtitan \+ torchao 0\.(?:\d|10)\b")
"""Versions of torchtitan that leave the loss out of compilation.

train.py said: "compiling loss function causes CUDA errors, turning off for now". Since the spring of 2025
components/loss.py compiles it.
"""
_FUSED_LOSS_NOTE = "cross-entropy fusion"
"""Words in the notes of runs with Megatron's option of that name."""
_FUSED = ("megatron", "nemo", "flash-attn", "transformer engine")
"""Words in the names of frameworks whose own kernels fuse bias, activation, dropout, mask and softmax.

Tables may state 0 for `fused_kernels` where such kernels ran.
"""


_CHANNELS_LAST = re.compile(r"\b(?:nhwc|channels[- ]last)\b")
_CONTIGUOUS = re.compile(r"\b(?:nchw|contiguous)\b")
_USUALLY_LAST = ("mlperf", "tensorflow", "mxnet", "oneflow", "apex amp, dali")
"""Words in the names of frameworks in which images of 16 bits are stored channels last.

TensorFlow's layout optimizer converts them. The scripts of MXNet, OneFlow (OneFlow-Benchmark: channel_last), MLPerf and
NVIDIA's classifiers in PyTorch (ConvNets/configs.yml) request it, but GluonCV's networks read channels first. PyTorch
keeps the format of its input, commonly NCHW.
"""


def _memory_format(row: Row) -> MemoryFormat:
    notes, framework = row.get("notes", "").lower(), row.get("framework", "").lower()
    if _CHANNELS_LAST.search(notes):
        return "channelsLast"
    if _CONTIGUOUS.search(notes):
        return "contiguous"
    is_narrow = "16" in row.get("precision", "") and "gluon-cv" not in framework
    return "channelsLast" if is_narrow and any(word in framework for word in _USUALLY_LAST) else "contiguous"


def _fused_kernels(row: Row) -> bool:
    words, stated = row.get("framework", "").lower(), row.get("fused_kernels", "")
    if stated == "0" and "megatron" in words and "transformere" not in words and row.get("gated_mlp", "") == "1":
        # Megatron-LM fused bias and GELU, scale, mask and softmax years before it fused RMS norms and gates.
        return False
    own = any(word in words for word in _FUSED) or _FUSED_BUILD.search(words) is not None
    return own or (stated == "1" and _BOOK not in words)


_BOOK = "book code"
"""Words of scripts whose fused kernels are those of PyTorch: AdamW and scaled_dot_product_attention."""


_FUSED_BUILD = re.compile(r"\bmxnet\b.*\bngc\b")
"""Builds that have fused kernels of their own, whatever a table states.

NVIDIA's MXNet fuses sums and ReLU with its norms (DeepLearningExamples, MxNet/Classification/RN50v1.5: fuse-bn-relu,
fuse-bn-add-relu).
"""


def framework(row: Row) -> Framework | None:
    """Return the framework that ran a row, or None if its text names none that is known.

    MLPerf's references for large language models are NeMo's (mlcommons/training,
    large_language_model_pretraining/nemo), and submissions follow them. Those of Stable Diffusion train with NeMo as
    well (mlcommons/training_results, stable_diffusion, main.py).
    """
    words = row.get("framework", "").lower()
    if "mlperf" in words and row.get("family") in ("decoder", "diffusion"):
        return "nemo"
    is_example = "pytorch" in words and "ngc" in words and not any(name in words for name in _TRAINERS)
    if is_example and _APEX.search(row.get("model_name", "").lower()):
        return None
    if row.get("source", "").lower() in _OWN_LOOPS:
        return "ddp"
    if "hf trainer" in words and "+ zero-" in words:
        return "huggingface-deepspeed"
    named = next((name for word, name in _FRAMEWORKS if word in words), None)
    # Accelerate without its plugin for FSDP wraps models in DistributedDataParallel under autocast.
    return "huggingface" if named == "accelerate" and "fsdp" not in words else named


_OWN_LOOPS = ("ljm565/universal-llm-trainer",)
"""Sources that train Transformers' models in a loop of their own.

They apply torch.nn.CrossEntropyLoss to the logits as they are (src/models/llama3.py), whereas a model that gets labels
converts its logits to FP32 first. They load weights in four bits without a type for computing.
"""
_APEX = re.compile(r"\b(?:bert|transformer-?xl)")
"""Models that NVIDIA's examples train in PyTorch with Apex at level O2.

That level stores FP16 weights with FP32 masters, like a job that names no framework (DeepLearningExamples,
PyTorch/LanguageModeling, BERT run_squad.py and Transformer-XL train.py).
"""


_TRAINERS = ("hf trainer", "lightning", "accelerate")
"""Words of frameworks that also run in NVIDIA's containers, by autocast."""


_FRAMEWORKS: tuple[tuple[str, Framework | None], ...] = (
    ("neox", "megatron-deepspeed"), ("composer", "composer"), ("litgpt", "litgpt"), ("torchtune", "torchtune"),
    ("torchtitan", "torchtitan"), ("detectron", "detectron2"), ("megatron-deepspeed", "megatron-deepspeed"),
    ("hf trainer + deepspeed", "deepspeed"), ("deepspeed 0.3 + megatron", "megatron-deepspeed"),
    ("deepspeed", "deepspeed"), ("automodel", "fsdp2"), ("fsdp2", "fsdp2"),
    ("megatron-bridge", "nemo"), ("nemo", "nemo"), ("megatron", "megatron"), ("flagscale", "megatron"),
    ("nanotron", "megatron"), ("hf trainer", "huggingface"), ("llama-factory", "huggingface"),
    ("axolotl", "huggingface"), ("transformers", "huggingface"), ("accelerate", "accelerate"), ("fsdp", "fsdp2"),
    ("lightning", "lightning"), ("jax", "jax"), ("maxtext", "jax"), ("flax", "jax"), ("paxml", "jax"), ("t5x", "jax"),
    ("tensorflow", "tensorflow"), ("keras", "tensorflow"), ("paddle", "paddle"), ("oneflow", "oneflow"),
    ("libai", "oneflow"), ("mxnet", "mxnet"), ("mindspore", "mindspore"), ("cs336", "ddp"), ("eager", None),
    ("pytorch", "ddp"), ("torchvision", "ddp"),
)  # fmt: skip
"""Words that sources use for a framework, and what each means; the first match is used.

None means no framework: such runs are measured in one process.
"""


def framework_version(row: Row) -> str | None:
    """Return the version of a row's framework, in what `frameworks.toml` counts for it.

    Published rows on top of PyTorch that state none ran before 2026. None is the version that Tilecast assumes.
    """
    named, words = framework(row), row.get("framework", "").lower()
    if stated := read_version(row.get("framework_version", "")):
        return stated
    counted = find_versioned_product(named or UNSET)
    if counted == "NeMo" and (found := _MLPERF.search(words)):
        return _MLPERF_RELEASES.get(found[1])
    if counted == "Megatron-Core" and _EARLY_2024.search(words):
        return "0.5"
    if counted == "Megatron-Core" and (found := _YEAR.search(row.get("commit_or_date", ""))):
        return _LAST_OF_2023 if int(found[1]) < 2024 else None
    found = _VERSIONS[counted].search(words) if counted in _VERSIONS else None
    if found:
        return found[1]
    if counted == "PyTorch" and (release := next((one for word, one in _RELEASES.items() if word in words), None)):
        return release
    return _UNSTATED.get(counted) if row.get("url_or_repo_path") else None


_RELEASES: Mapping[str, str] = {"mmsegmentation 0": "1.6"}
"""Versions of PyTorch that releases were trained with, by words of the framework."""
_EARLY_2024 = re.compile(r"\bjan[- ](?:\d+ )?2024\b")
"""Words of frameworks that are Megatron-LM with Megatron-Core 0.5."""
_YEAR = re.compile(r"\b(20\d\d)-\d\d")
_LAST_OF_2023 = "0.4"
"""Last version of Megatron-Core in 2023. Older rows of Megatron-LM are read as this version."""
_UNSTATED: Mapping[str, str] = {"PyTorch": "2.6"}
"""Versions of rows that state none, by what `frameworks.toml` counts."""
_VERSIONS = {
    "PyTorch": re.compile(r"\bpytorch ([12]\.\d+)"),
    "NeMo": re.compile(r"\bnemo \(?(?:release )?(2\d\.\d\d)"),
    "TensorFlow": re.compile(r"\btensorflow ([12]\.\d+)"),
    "PaddlePaddle": re.compile(r"\bpaddlepaddle ([1-3]\.\d+)"),
    "OneFlow": re.compile(r"\boneflow ([01]\.\d+)"),
    "MXNet": re.compile(r"\bmxnet ([12]\.\d+)\b(?! *ngc)"),
}
"""Versions in the text of a framework, by what `frameworks.toml` counts. Images of NGC, such as "PyTorch 21.04 NGC",
are dated and match none but NeMo's."""
_MLPERF = re.compile(r"\bmlperf v(\d\.\d)")
_MLPERF_RELEASES = {
    "3.0": "23.03", "3.1": "23.09", "4.0": "24.03", "4.1": "24.09", "5.0": "25.03", "5.1": "25.09",
}  # fmt: skip
"""NeMo's release of the month in which the submissions to a round of MLPerf Training were due."""


_SAID_NOT = ("no gradient bucketing", "no tp/dp overlap", "no compute/communication overlap", "overlap_comm false")
"""Words in the notes of runs that reduce their gradients only after the backward pass, without overlap."""


_LOOPED_OPTIMIZER = "per-parameter python loop"
"""Words in the notes of runs whose optimizer updates one tensor after the other by separate operators."""


_PURE = re.compile(
    r"\bpure[- ](?:bf16|fp16)|\bbf16-true\b|\bno fp32 master|\bweights bf16\b|\bbase 16-bit\b|\bbase 4-bit\b"
)
"""Words in the notes of runs that hold weights and optimizer states in 16 bits alone.

A model for adapters is loaded in 16 bits: fms-hf-tuning, without mixed precision.
"""


_PREPARED = "baseline-peft-bnb"
"""Words in the notes of QLoRA runs in which PEFT casts all weights that are not quantized to FP32.

TRL has PEFT do so unless FSDP shards the weights (trl/trainer/sft_trainer.py, prepare_model_for_kbit_training). The
plug-in of fms-acceleration leaves them in 16 bits.
"""


_AUTOCAST = re.compile(r"(?<!no )(?<!without )\bautocast\b")
"""Word in the notes of runs without a framework that hold FP32 weights and cast them in every pass."""


def _lacks_patches(row: Row, notes: str) -> bool:
    """Return whether fms-acceleration's fused kernels (FOAK) are installed without effect.

    Peaks of adapters of Mistral and Mixtral under FSDP are as high with them as without: read off its rows.
    """
    unpatched = "fsdp" in row.get("framework", "").lower() and "santacoder" not in row.get("model_name", "").lower()
    return "foak" in notes and "lora" in row.get("task", "") and unpatched


_CHUNKS = 64
"""Pieces of a loss that notes call chunked."""


def _offloaded_activations(notes: str) -> float:
    """Return the share of activations that notes say are offloaded to the host; whole if they state no ratio."""
    if not re.search(r"\bactivations? offload|\bactivations offloaded\b", notes):
        return 0.0
    ratio = re.search(r"\bratio ([01]\.\d+)", notes)
    return min(float(ratio[1]), 1.0) if ratio else 1.0


_NO_UPCAST = "2026-03"
"""Month from which Accelerate no longer converts what FSDP2 shards to FP32 (huggingface/accelerate 1.13, issue 3979).

TRL loads models in BF16.
"""
_LOADED = "torch_dtype bf16"
"""Words in the notes of runs whose weights are loaded in 16 bits and trained in mixed precision.

Autocast leaves such weights as they are; Accelerate upcasts what FSDP shards to FP32 (accelerator.py, prepare_model).
PEFT's method_comparison loads models in bfloat16.
"""


def _held_weights(row: Row) -> Weights | None:
    """Return the storage of weights that a row states, or None if that of its framework."""
    notes, words = row.get("notes", "").lower(), row.get("framework", "").lower()
    if "16" not in row.get("precision", ""):
        return None
    if "trl" in words and "fsdp2" in words and row.get("commit_or_date", "") >= _NO_UPCAST:
        return "pure"
    if _LOADED in notes:
        return "sharded" if "fsdp" in words else "pure"
    if _PREPARED in notes and "fsdp" not in words:
        return None
    if _PURE.search(notes) or ("peft" in words and row["precision"] == "bf16"):
        return "pure"
    return "autocast" if _AUTOCAST.search(notes) and framework(row) is None else None


_ATTENTION_ALONE = re.compile(r"\bon q(?: k)? v(?: o)?\b|\bpeft\b")
"""Words of runs with adapters beside projections of attention alone, which is PEFT's default for most models."""


_LITGPT_ADAPTS_ALL = ("gemma", "phi", "tiny")
"""Models whose files in LitGPT's config_hub/finetune set lora_mlp; others adapt projections of attention."""


def _lora_targets(row: Row, notes: str) -> LoraTargets:
    words = f"{row.get('framework', '')} {notes}".lower()
    named = row.get("model_name", "").lower()
    if framework(row) == "litgpt":
        return "all" if named.startswith(_LITGPT_ADAPTS_ALL) else "attention"
    is_alone = _ATTENTION_ALONE.search(words) and "target-mlp" not in named
    return "attention" if is_alone else "all"


def _lora_rank(row: Row, notes: str) -> int:
    if "lora" not in row.get("task", ""):
        return 0
    named = row.get("model_name", "").lower()
    return noted_number(r"rank (\d+)", notes) or noted_number(r"\blora r(?:ank)?(\d+)\b", named) or 8


def _plan(row: Row, model: Model, gpus: int) -> dict[str, int | None]:
    ranks = read_integer(row, "dp")
    if framework(row) == "litgpt" and ranks:
        row = {**row, "dp": str(min(ranks, gpus))}
    stated = read_partial_plan(row, model, gpus)
    copied = re.search(r"\bdata parallelism\b", row.get("notes", "").lower()) and not zoo.has_distributed_tables(model)
    if zoo.has_row_shardable_weights(model) and copied:
        stated["expert"] = 1
    if stated["zero_stage"] is None and _spreads_optimizer(row):
        stated["zero_stage"] = 1
    if (value := _noted_recomputation(model, row.get("notes", "").lower())) is not None:
        stated["checkpointing"] = encode_modules(value)
    stated["expert_tensor"] = _expert_tensor(row, stated["tensor"] or 1)
    stated["virtual_stages"] = _virtual_stages(row, model, stated["pipeline"] or 1)
    if "flagscale" in row.get("framework", "").lower():
        stated["sequence_parallel"] = 0
    return stated


_RECOMPUTED_LAYERS = r"activation checkpointing on (\d+) of \d+ layers"
_RECOMPUTED_PARTS = "recompute of norms and mlp activation functions only"
_REMAT_OF_RECIPE = "remat policy not restated"
"""Words of rows of NVIDIA/dgxc-benchmarking with MaxText, whose recipe states it.

maxtext/configure.sh has POLICY=save_qkv_proj, which keeps the projections of queries, keys and values alone.
"""


def _noted_recomputation(model: Model, notes: str) -> Checkpointing | None:
    """Return the recomputation that notes state more exactly than the column does, if they do."""
    if (layers := noted_number(_RECOMPUTED_LAYERS, notes)) is not None:
        return "full" if layers else "none"
    own = zoo.list_modules(model)
    if _RECOMPUTED_PARTS in notes and own:
        return join_modules({"layernorm", "mlp_act", "moe_act"} & own)
    if _REMAT_OF_RECIPE in notes and own:
        return join_modules({"layernorm", "mlp", "attn_out"} & own)
    return None


def _spreads_optimizer(row: Row) -> bool:
    """Return whether a run's optimizer is distributed.

    The row says so, or is MLPerf's Stable Diffusion.
    """
    return _is_mlperf_diffusion(row) or "distributed optimizer" in row.get("optimizer", "")


def _is_mlperf_diffusion(row: Row) -> bool:
    """Return whether a run is MLPerf's Stable Diffusion, with NeMo's distributed_fused_adam.

    It spreads the states of the optimizer, and holds gradients in FP32 by default (mlcommons/training_results,
    stable_diffusion, main.py; apex, contrib/optimizers/distributed_fused_adam.py: dtype, grad_sync_dtype).
    """
    return row.get("family", "") == "diffusion" and "mlperf" in row.get("framework", "").lower()


def _expert_tensor(row: Row, tensor: int) -> int:
    """Return the number of ranks that share each expert.

    Megatron-Core takes the tensor-parallel ranks by default, and NeMo's recipes leave it so but for DeepSeek
    (collections/llm/recipes/deepseek_v3.py). Those of Megatron-Bridge write 1 (scripts/performance/configs).
    """
    if (noted := noted_number(r"\bETP ?=? ?(\d+)", row.get("notes", ""))) is not None:
        return noted
    words = " ".join(row.get(name, "") for name in ("framework", "url_or_repo_path", "model_name")).lower()
    is_default = framework(row) == "nemo" and "bridge" not in words and "deepseek" not in words
    return tensor if row.get("family") == "moe" and is_default else 1


_CHUNK = 2
"""Layers per chunk of an interleaved pipeline if a NeMo recipe does not state it (collections/llm/recipes: 1 to 4)."""


def _virtual_stages(row: Row, model: Model, stages: int) -> int:
    """Return the number of chunks per pipeline stage that a row states.

    NeMo's recipes interleave every pipeline unless the notes say otherwise.
    """
    notes = row.get("notes", "")
    if (
        (stated := noted_number(r"\bVP ?=? ?(\d+)", notes))
        or "VP n/a" in notes
        or stages == 1
        or framework(row) != "nemo"
    ):
        return stated or 1
    return max(1, -(-model.layers // stages) // _CHUNK)
