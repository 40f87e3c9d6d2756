"""Properties of training frameworks, from `frameworks.toml`, such as storage of weights and fused kernels.

`step`, `memory` and the models all read the same record, so that all of them price the same behaviour. Behaviour may
change with a version. `find_framework` returns the record of the version that a job states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tilecast import shipped
from tilecast.spec import (
    STATE_BYTES,
    ExpertDispatch,
    ExpertOverlap,
    PassName,
    Plans,
    Schedule,
    SpecError,
    StatePrecision,
    Weights,
    Workload,
)
from tilecast.spec import Framework as FrameworkName

Gradients = Literal["weights", "fp32", "fp32-with-bf16", "fp32-in-bf16"]
Loss = Literal["eager", "parallel", "upcast", "fused"]
UpcastLogits = Literal["none", "llama", "all"]
"""Models whose logits a framework casts to FP32: none, Llama-like ones (with RMS norm), or all."""
Composed = Literal["rmsnorm", "layernorm", "channelnorm", "gelu", "tanh-gelu", "hard-swish", "dropout"]


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A library of fused attention (a name in `constants.toml`), and the GPUs on which a framework uses the library."""

    library: str
    least: float
    """Smallest compute capability."""
    most: float = np.inf
    """Largest compute capability."""

    def is_tried_on(self, compute_capability: float) -> bool:
        """Return whether a framework tries the library on GPUs of a compute capability."""
        return self.least <= compute_capability <= self.most


UNSET = "unset"
"""Name of the table for jobs without a framework. It has the states of arXiv 1910.02054."""


@dataclass(frozen=True, slots=True)
class Framework:
    """Properties of one framework. Data types are those of jobs in 16 bits. A job in FP32 keeps everything in FP32."""

    name: str
    weights: Weights
    """Storage of a weight: 16 bit with an FP32 master (`master`), FP32 with a 16-bit cast (`autocast`), FP32 shards
    that are gathered in 16 bit (`sharded`), or 16 bit alone, with its optimizer states (`pure`)."""
    gradients: Gradients
    """Type of a gradient: that of the stored weight, FP32, FP32 unless the job is in FP16, or FP32 only in BF16 jobs.
    """
    gradient_copies: float
    """Copies of a gradient on a data-parallel rank. It is 2 if gradients are copied into buckets and back."""
    keeps_softmax_input: bool
    """Whether a softmax keeps its input for the backward pass, besides its output."""
    holds_gradients: bool
    """Whether gradients stay allocated between steps.

    Otherwise they are allocated in the backward pass, while activations are freed, and freed by the update.
    """
    shards_gradients: bool
    """Whether a rank keeps only its part of the gradients under ZeRO 2. Each micro-batch scatters them in any case."""
    sums_in_pipelines: bool
    """Whether each pipeline stage sums the whole gradients of all micro-batches and exchanges them once per step.

    If so, it does at any ZeRO stage.
    """
    reshards_weights: bool
    """Whether ZeRO 2 gathers weights before every forward pass, rather than once after the update of the step."""
    bucket_elements: float
    """Elements per bucket in which gradients are reduced and weights gathered, unless `bucket_mib` sets a size."""
    bucket_elements_per_replica: float
    """Elements per bucket and data-parallel rank, used if that gives larger buckets."""
    bucket_mib: tuple[float, ...]
    """Size of the first bucket and of the others, in MiB. Infinite means one bucket for all gradients.

    Without a size and a number of elements, a bucket holds the gradients of a block.
    """
    sized_stages: tuple[int, ...]
    """ZeRO stages at which users can set the bucket size."""
    bucket_copies: tuple[float, ...]
    """Number of buckets that exist in addition to the gradients, by ZeRO stage."""
    gathered_blocks: float
    """Number of blocks of a ZeRO-3 model whose weights are gathered at once."""
    wgrad_placeholders: bool
    """Whether weights have an unused gradient tensor in addition to the accumulated gradient."""
    pads_vocabulary: bool
    """Whether the vocabulary is padded, so that tensor cores can read logits and the output layer in whole words."""
    composed: frozenset[Composed]
    """Operators (`zoo.layers.CHAINS`) that run as chains of element-wise operators, unless a compiler fuses them."""
    fuses: frozenset[PassName]
    """Passes of `fuse.PASSES` that run in every execution."""
    fused_kernels: bool
    """Whether its hand-written kernels fuse bias, activation, dropout, mask and softmax, unless the workload says
    otherwise.
    """
    loss: Loss
    """Tensors that the cross-entropy keeps. `zoo.layers.logit_bytes` explains each value."""
    loss_chunks: float
    """Number of chunks into which the logits are cut. Only one chunk at a time is in the loss."""
    upcasts_logits: UpcastLogits
    """Models whose loss reads FP32 logits even if weights exist only in 16 bits. With mixed precision, all do."""
    converts_outputs: bool
    """Whether logits that autocast leaves in 16 bits are copied to FP32 when the model returns them."""
    adds_bias: bool
    """Whether the bias of a dense layer is added by a kernel of its own."""
    adds_mask: bool
    """Whether the attention mask of an encoder is added by a kernel of its own, in FP32 under autocast."""
    casts_model: bool
    """Whether a job whose weights are stored as `master` runs its whole model, and so the loss, in 16 bits."""
    scores_all_tokens: bool
    """Whether the head of an encoder scores every token, although the loss reads only the masked ones."""
    unties_embeddings: bool
    """Whether the output layer has its own weight even if the published model shares the embedding's."""
    quantized_input_bytes: float
    """Bytes per input element that a product with a quantized weight keeps for the backward pass."""
    adapters_of_each: bool
    """Whether dense layers that read the same input have an adapter each, as queries, keys and values do."""
    adapter_dropout: bool
    """Whether dropout precedes LoRA adapters, unless a job says otherwise."""
    quantized_bits: float
    """Bits per frozen weight of a layer in 4-bit quantization, including scales."""
    quantizes_head: bool
    """Whether the projection to logits is quantized too. Otherwise its frozen weight stays in 16 bits."""
    dequantized_copies: float
    """Copies in 16 bits of a weight that is dequantized for a product."""
    attention: tuple[AttentionChoice, ...]
    """Attention libraries in the order in which they are tried. Empty if attention is two products around a softmax."""
    flash: tuple[AttentionChoice, ...]
    """Like `attention`, if a job asks for FlashAttention."""
    selective: Literal["attention", "operators"]
    """Operators that selective recomputation repeats: the attention core, or all but attention and every second
    product.
    """
    recomputes_last_product: bool
    """Whether full recomputation of a layer repeats its last product too, although no gradient needs its output."""
    layers_in_transfer: float
    """Number of layers whose activations are on the GPU while they are copied to or from the host, if all layers are
    recomputed and their activations offloaded."""
    copies_shards: bool
    """Whether ZeRO copies weights out of the gather buffer, and gradients into the scatter buffer."""
    fuses_norms: bool
    """Whether a norm is part of the dense product after it, so that it is not recomputed separately."""
    optimizer: Literal["fused", "fused-adam", "foreach"]
    """Kernels of the weight update.

    It is one kernel for many tensors, or one kernel per operation on lists of tensors, which needs a temporary of every
    weight's square root. With "fused-adam" only Adam's update is one kernel. A job can choose otherwise
    (`fuse.passes`).
    """
    updates_in_backward: bool
    """Whether, on one GPU without accumulation, the backward pass updates weights, with states paged to the host."""
    casts_gradients: bool
    """Whether the update keeps an FP32 copy of each 16-bit gradient, sharded like the optimizer's states."""
    upcasts_gradients: bool
    """Whether the update makes temporary FP32 copies of 16-bit gradients."""
    moments: StatePrecision | None
    """Type of the optimizer's moments. None for the type of the weights that it updates."""
    context_bytes: float
    """Bytes that loaded libraries and their workspaces use outside the allocator, without communicators."""
    table_gradients: Literal["rows", "whole"]
    """Whether the gradient of a shared embedding table has only the rows of the batch, or all rows."""
    table_sharding: Literal["table-wise", "row-wise"]
    """How ranks share embedding tables. If row-wise, each rank looks up a part of the vectors of all samples."""
    allocator: Literal["caching", "expandable", "planned"]
    """How memory is allocated: block by block, which leaves gaps, in segments that grow, or planned ahead."""
    memory_error: float
    """Half-width of the range of a run's memory, as a share of the forecast."""
    fp8_weight_bytes: float
    """Bytes per weight of the FP8 copies of layers' weights, in addition to the weight itself."""
    fp8_weights_alone: bool
    """Whether, in an FP8 job, layers' weights exist only as two FP8 copies, by rows and by columns."""
    nvfp4_layers_in_bf16: float
    """Number of layers whose products stay in BF16 in an NVFP4 job."""
    fp8_products: Literal["cublas", "cutlass"]
    """Library that runs the products of an FP8 job."""
    fp8_inputs: bool
    """Whether an FP8 job keeps the inputs of its matrix products in FP8."""
    fp8_cast_launches: float
    """Host time of casting one operand to FP8 on GPUs without MXFP8, in kernel launches."""
    overlap: bool
    """Whether gradients are reduced during the backward pass at ZeRO stages below 3. ZeRO 3 always overlaps."""
    tensor_overlap: Literal["none", "backward", "both"]
    """Passes that hide tensor-parallel exchanges. Without sequence parallelism, at most the backward pass does."""
    host: Literal["python", "graph"]
    """Program that launches kernels in eager execution: Python code for each operator, or a compiled executor."""
    clips_gradients: bool
    """Whether every step computes and clips the norm of all gradients."""
    dense_convolution: float
    """Factor on the time of FP32 convolutions with one group, relative to the kernels that cuDNN picks today."""
    grouped_convolution: float
    """Like `dense_convolution`, with several groups."""
    image_loss_launches: tuple[float, ...]
    """Kernels per image, forward and backward, in the loss of a one-stage detector."""
    zero_tensor_us: tuple[float, ...]
    """Host time per weight tensor and micro-batch in microseconds, by ZeRO stage.

    That of stage 2 adds to the step. That of stage 3 includes all launches, and the GPU computes meanwhile.
    """
    grouped_products: Literal["one", "each"]
    """Whether the products of all experts of a rank are one kernel. Otherwise each expert has its own."""
    overlaps_sends: bool
    """Whether the sends of interleaved stages run during computation."""
    schedules: frozenset[Schedule]
    """Schedules of pipelines."""
    states_layouts: bool
    """Whether a job can set the layers of every stage."""
    counts_ends: bool
    """Whether embedding and loss count as layers of the pipeline if the layers alone do not divide evenly."""
    autocasts_experts: bool
    """Whether autocast casts the inputs of experts' products, if weights are stored in FP32."""
    expert_dispatch: ExpertDispatch
    """How tokens are sent to the ranks of their experts. A job can choose otherwise (`expert_dispatch`)."""
    expert_overlap: ExpertOverlap
    """Computation during which tokens are sent to their experts. A job can choose otherwise (`expert_overlap`)."""
    router_launches: tuple[float, ...]
    """Number of kernels that choose experts after the router's product, forward and backward."""
    router_group_launches: tuple[float, ...]
    """Number of further kernels if experts are chosen within groups, forward and backward."""
    latent_rotary_launches: tuple[float, ...]
    """Number of kernels that rotate queries and keys of latent attention, forward and backward."""
    permutation_launches: tuple[float, ...]
    """Number of kernels that sort tokens by expert and back, forward and backward."""
    engine: str
    """Name of the framework whose plans it runs: itself or another."""
    sources: Mapping[str, str]
    """Source of each value."""

    @property
    def has_buckets(self) -> bool:
        """Whether gradients are reduced in buckets of a chosen size, rather than block by block."""
        return self.bucket_elements > 0 or self.bucket_mib[1] > 0

    def allows_bucket_size(self, plans: Plans) -> npt.NDArray[np.bool_]:
        """Return whether users can set the bucket size of each plan, (n,).

        The result is also True for plans that exchange no gradients.
        """
        return np.asarray(np.isin(plans.zero_stage, self.sized_stages) | (plans.data * plans.context == 1))

    @property
    def gradient_sharding_stage(self) -> int:
        """Lowest ZeRO stage at which a rank keeps and sums only its part of the gradients."""
        return 2 if self.shards_gradients else 3

    @property
    def has_fused_accumulation(self) -> bool:
        """Whether the product that computes a weight's gradient also adds it to the accumulated gradient."""
        return self.wgrad_placeholders

    def has_fp32_gradients(self, workload: Workload) -> bool:
        """Return whether gradients of a 16-bit job are kept in FP32."""
        if self.gradients == "weights":
            return HELD_BYTES[self.weights] == 4.0
        if self.gradients == "fp32-in-bf16":
            return workload.precision == "bf16"
        return self.gradients == "fp32" or workload.precision != "fp16"

    def state_bytes(self, workload: Workload) -> float:
        """Return the bytes per weight of the copy that the optimizer updates: the master copy, if there is one.

        These are 2 bytes for a 16-bit job with pure weights, and otherwise 4.
        """
        return 2.0 if workload.is_mixed and self.weights == "pure" else 4.0

    def moment_bytes(self, workload: Workload) -> float:
        """Return the bytes per moment for an optimizer that does not quantize its moments."""
        return self.state_bytes(workload) if self.moments is None else STATE_BYTES[self.moments]


HELD_BYTES: Mapping[Weights, float] = {"master": 2.0, "autocast": 4.0, "sharded": 4.0, "pure": 2.0}
"""Bytes of a weight in 16-bit training, by `Framework.weights`."""


def has_fused_kernels(workload: Workload) -> bool:
    """Return whether the job or its framework uses hand-written kernels that fuse element-wise operators."""
    stated = workload.fused_kernels
    return find_framework(workload).fused_kernels if stated is None else stated


def list_attention_choices(workload: Workload) -> tuple[AttentionChoice, ...]:
    """Return the libraries of fused attention that a workload's framework tries, in its order.

    A job may name one library. Under XLA, the libraries are those that XLA runs for JAX. If the job has hand-written
    kernels but its framework has none, the libraries are Megatron's.
    """
    if workload.attention not in ("auto", "flash", "eager"):
        return (AttentionChoice(workload.attention, 0.0),)
    own = find_framework(workload)
    if workload.attention == "flash":
        return own.flash
    if workload.execution == "xla":
        return FRAMEWORKS["jax"].attention
    if has_fused_kernels(workload) and not own.fused_kernels:
        return FRAMEWORKS["megatron"].attention
    return own.attention


def gradient_bytes(workload: Workload) -> float:
    """Return the bytes of one element of a gradient that is summed over micro-batches, stored and sent."""
    return 4.0 if not workload.is_mixed or find_framework(workload).has_fp32_gradients(workload) else 2.0


def can_shard_frozen_weights(workload: Workload) -> bool:
    """Return whether ranks can shard frozen weights (ZeRO 2 and 3). bitsandbytes cannot shard INT8 weights."""
    return workload.frozen_bits != 8


def frozen_weight_bits(workload: Workload) -> float:
    """Return the bits per frozen, quantized weight of a layer, including scales.

    The scales of INT8, an FP32 number for each row of a weight (bitsandbytes, nn/modules.py Int8Params), are left out.
    """
    return find_framework(workload).quantized_bits if workload.frozen_bits < 8 else float(workload.frozen_bits)


def sums_whole_gradients(workload: Workload, plans: Plans) -> npt.NDArray[np.bool_]:
    """Return, for each plan, whether whole gradients are summed and exchanged once per step at any ZeRO stage, (n,)."""
    return np.asarray((plans.pipeline > 1) & find_framework(workload).sums_in_pipelines)


def keeps_gathered_weights(workload: Workload, plans: Plans) -> npt.NDArray[np.bool_]:
    """Return whether a ZeRO-3 plan keeps gathered weights from a backward pass to the next forward pass, (n,).

    In this case, only forward passes shard the weights again (PyTorch, distributed/pipelining/stage.py
    backward_maybe_with_nosync: set_reshard_after_backward(False)).
    """
    return np.asarray((plans.zero_stage >= 3) & sums_whole_gradients(workload, plans))


def has_only_fp8_weights(workload: Workload) -> bool:
    """Return whether an FP8 or MXFP8 job has no 16-bit copy of its layers' weights.

    The framework decides. A job without a framework has no such copy if it uses hand-written kernels, because these are
    Transformer Engine's, as in MLPerf's code.
    """
    own = workload.framework is None and has_fused_kernels(workload)
    return workload.precision in ("fp8", "mxfp8") and (own or find_framework(workload).fp8_weights_alone)


TABLES: Mapping[str, Mapping[str, Any]] = shipped.read_table("tilecast", "frameworks.toml")
"""Tables of the file, by name."""
_CELLS = tuple(item.name for item in fields(Framework) if item.name not in ("name", "engine", "moments", "sources"))


_TUPLES = (
    "bucket_copies",
    "bucket_mib",
    "sized_stages",
    "router_launches",
    "router_group_launches",
    "latent_rotary_launches",
    "permutation_launches",
    "image_loss_launches",
    "zero_tensor_us",
)
"""Properties that are lists."""


def find_versioned_product(framework: str) -> str:
    """Return the product by whose versions a framework is identified, such as "PyTorch"."""
    return str(TABLES[framework]["version"]["of"])


def assumed_version(framework: str) -> str:
    """Return the version that is assumed for a job that names a framework without a version."""
    return str(TABLES[framework]["version"]["assumed"])


def find_first_version(framework: str, precision: str) -> str | None:
    """Return the first version of a framework that supports a precision, or None if every version does."""
    found = TABLES[framework]["version"].get("brought", {}).get(precision)
    return None if found is None else str(found)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: (25, 4) for "25.04". Trailing zeros are dropped.

    Raises:
        SpecError: the text is not a version.
    """
    parts = text.split(".")
    if not (
        parts and len(parts) <= 4 and all(part.isascii() and part.isdecimal() and len(part) <= 4 for part in parts)
    ):
        problem = f"{text[:40]!r} is no version"
        raise SpecError("spec.training.frameworkVersion", problem, 'write numbers and dots, such as "2.6" or "25.04"')
    numbers = [int(part) for part in parts]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _list_changes_until(name: str, version: str | None) -> list[Mapping[str, Any]]:
    """Return all changes of a framework up to a version. If `version` is None, use the assumed version."""
    stated = parse_version(TABLES[name]["version"]["assumed"] if version is None else version)
    return [change for change in TABLES[name].get("since", ()) if parse_version(change["version"]) <= stated]


def _get_properties_at(name: str, version: str | None) -> dict[str, Any]:
    """Return the properties of a framework at a version. If `version` is None, use the assumed version."""
    changes = _list_changes_until(name, version)
    return dict(item for part in (TABLES[name], *changes) for item in part.get("cells", {}).items())


def _find_engine_version(name: str, version: str | None) -> str | None:
    """Return the engine version that a framework's version includes. None means the engine's assumed version."""
    if find_versioned_product(name) == find_versioned_product(TABLES[name].get("engine", name)):
        return version
    return next((change["engine"] for change in _list_changes_until(name, version)[::-1] if "engine" in change), None)


@cache
def read_framework(name: str, version: str | None = None) -> Framework:
    """Return the record of a framework at a version. If `version` is None, use the assumed version.

    Raises:
        SpecError: the text is not a version.
    """
    engine = TABLES[name].get("engine", name)
    cells = _get_properties_at(
        UNSET, version if find_versioned_product(name) == find_versioned_product(UNSET) else None
    )
    if name != UNSET:
        cells |= _get_properties_at(engine, _find_engine_version(name, version))
        if engine != name:
            cells |= _get_properties_at(name, version)
    values = {cell: cells[cell][0] for cell in _CELLS}
    values |= {cell: frozenset(values[cell]) for cell in ("composed", "fuses", "schedules")}
    values |= {cell: tuple(values[cell]) for cell in _TUPLES}
    values |= {cell: tuple(AttentionChoice(*choice) for choice in values[cell]) for cell in ("attention", "flash")}
    sources = {cell: cells[cell][1] for cell in _CELLS}
    return Framework(name=name, engine=engine, moments=None, sources=sources, **values)


FRAMEWORKS: Mapping[str, Framework] = {name: read_framework(name) for name in TABLES}
"""Every framework by name, and `UNSET`, each at its assumed version."""
ENGINES: tuple[str, ...] = tuple(name for name, item in FRAMEWORKS.items() if item.engine == name and name != UNSET)
"""Frameworks that do not run on top of another one."""


def find_framework(workload: Workload) -> Framework:
    """Return the framework of a workload, at its version and with its precisions.

    Without a framework, return the defaults.
    """
    name = workload.framework or UNSET
    if not (workload.is_mixed and workload.training):
        return read_framework(name, workload.framework_version)
    recipe = workload.weights, workload.gradient_precision, workload.moment_precision
    return _with_job_precisions(name, workload.framework_version, *recipe)


@cache
def _with_job_precisions(
    name: str,
    version: str | None,
    weights: Weights | None,
    gradients: StatePrecision | None,
    moments: StatePrecision | None,
) -> Framework:
    """Return a framework record with a job's precisions. A precision that is None stays that of the framework.

    If `weights` differ from the framework's, gradients without a precision have the precision of the weights.
    """
    own = read_framework(name, version)
    summed = own.gradients if weights in (None, own.weights) else "weights"
    if gradients is not None:
        summed = "fp32" if gradients == "fp32" else "weights"
    return replace(own, weights=weights or own.weights, gradients=summed, moments=moments)


def expert_dispatch(workload: Workload) -> ExpertDispatch:
    """Return how tokens are sent to the ranks of their experts. If the job does not say, its framework decides."""
    return workload.expert_dispatch or find_framework(workload).expert_dispatch


def expert_overlap(workload: Workload) -> ExpertOverlap:
    """Return which computation hides the exchange of tokens. If the job does not say, its framework decides."""
    return workload.expert_overlap or find_framework(workload).expert_overlap


def with_framework(workload: Workload, name: FrameworkName) -> Workload:
    """Return the workload with another framework.

    The version is kept only if both frameworks are identified by versions of one product, such as PyTorch.
    """
    before = workload.framework
    keeps = before is not None and find_versioned_product(before) == find_versioned_product(name)
    return replace(workload, framework=name, framework_version=workload.framework_version if keeps else None)
