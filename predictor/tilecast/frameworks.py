"""Properties of training frameworks, from `frameworks.toml`, such as their storage of weights and fused kernels.

`step`, `memory` and the models all read the same record, so that all of them price the same behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tilecast import shipped
from tilecast.spec import STATE_BYTES, PassName, Plans, StatePrecision, Weights, Workload

Gradients = Literal["weights", "fp32", "fp32-with-bf16"]
Loss = Literal["eager", "parallel", "upcast", "fused"]
Composed = Literal["rmsnorm", "layernorm", "channelnorm", "gelu", "tanh-gelu", "dropout"]

UNSET = "unset"
"""Name of the table for a job that names no framework: the states of arXiv 1910.02054."""


@dataclass(frozen=True, slots=True)
class Framework:
    """Properties of one framework. Types are for jobs in 16 bit; a job in FP32 holds everything in FP32."""

    name: str
    weights: Weights
    """Storage of a weight: 16 bit with an FP32 master (`master`), FP32 with a 16-bit cast (`autocast`), FP32 shards
    that are gathered in 16 bit (`sharded`), or 16 bit alone, with its optimizer states (`pure`)."""
    gradients: Gradients
    """Type of a gradient: that of the held weight, FP32, or FP32 unless the job is in FP16."""
    gradient_copies: float
    """Copies of a gradient that replicas hold: 2 if gradients are copied into buckets and out of them."""
    holds_gradients: bool
    """Whether gradients stay allocated between steps. Others are allocated in the backward pass, as activations are
    freed, and freed by the update."""
    shards_gradients: bool
    """Whether a rank keeps only its part of the gradients under ZeRO 2. Each micro-batch scatters them in any case."""
    reshards_weights: bool
    """Whether ZeRO 2 gathers weights before every forward pass, rather than once after the update of the step."""
    bucket_elements: float
    """Elements of the buckets that reduce gradients and gather weights, unless `bucket_mib` states their size."""
    bucket_elements_per_replica: float
    """Elements of a bucket per replica, used if that gives more elements."""
    bucket_mib: tuple[float, ...]
    """Size of the first bucket and of the others, in MiB, infinite for one bucket. Without a size and a number of
    elements, a bucket holds the gradients of a block."""
    sized_stages: tuple[int, ...]
    """ZeRO stages whose buckets can have a stated size."""
    bucket_copies: tuple[float, ...]
    """Number of buckets that are held beside the gradients, by ZeRO stage."""
    gathered_blocks: float
    """Number of blocks of a ZeRO-3 model that are whole at once."""
    wgrad_placeholders: bool
    """Whether weights get an unused gradient beside the accumulated one."""
    composed: frozenset[Composed]
    """Operators written as chains of element-wise ones, unless a compiler fuses them: `zoo.layers.CHAINS`."""
    fuses: frozenset[PassName]
    """Passes of `fuse.PASSES` that run with any execution."""
    loss: Loss
    """Tensors that the cross-entropy keeps; `zoo.layers.logit_bytes` explains each value."""
    loss_chunks: float
    """Number of chunks into which the logits are cut; one of them is in the loss at a time."""
    upcasts_logits: bool
    """Whether the loss reads logits in FP32 where weights are in 16 bits alone, as it does in mixed precision."""
    unties_embeddings: bool
    """Whether the output layer has a separate weight although the published model shares that of the embedding."""
    quantized_input_bytes: float
    """Bytes that a product with a quantized weight keeps of each element of its input."""
    quantized_bits: float
    """Bits of a frozen weight of a layer that is quantized to 4 bits, with its scales."""
    attention: Literal["auto", "flash", "flash1", "eager"]
    selective: Literal["attention", "operators"]
    """Operators of selective recomputation: the attention core, or all but attention and every second product."""
    optimizer: Literal["fused", "foreach"]
    """Whether the update is one kernel for many tensors, or one kernel for each operation on lists of tensors, which
    needs a temporary of every weight's square root. A job can choose otherwise (`fuse.passes`)."""
    updates_in_backward: bool
    """Whether, on one GPU without accumulation, weights are updated in the backward pass, with states paged to the
    host."""
    casts_gradients: bool
    """Whether an FP32 copy of each gradient in 16 bit is held for the update, spread like the optimizer's states."""
    upcasts_gradients: bool
    """Whether the update of masters makes FP32 copies of gradients in 16 bit, and frees them at its end."""
    moments: StatePrecision | None
    """Type of the optimizer's moments; None for that of the weights that it updates."""
    context_bytes: float
    """Bytes that loaded libraries and their workspaces take outside the allocator, without any communicator."""
    table_gradients: Literal["rows", "whole"]
    """Whether the gradient of a shared embedding table has only the rows of the batch, or those of the whole table."""
    table_sharding: Literal["table-wise", "row-wise"]
    """How ranks share embedding tables; row-wise, each rank looks up a part of the vectors of all samples."""
    allocator: Literal["caching", "expandable", "planned"]
    """Whether memory is allocated block by block, which leaves gaps, in segments that grow, or planned ahead."""
    memory_error: float
    """Half the width of the range of a run's memory, as a share of the bill."""
    fp8_weight_bytes: float
    """Bytes of the FP8 copies of a weight of the layers, beside the weight itself."""
    fp8_weights_alone: bool
    """Whether, in an FP8 job, the two bytes held per weight of the layers are FP8 by rows and FP8 by columns."""
    fp8_inputs: bool
    """Whether an FP8 job keeps the inputs of its matrix products in FP8."""
    overlap: bool
    """Whether gradients are reduced behind the backward pass below ZeRO 3, which always gathers ahead."""
    tensor_overlap: Literal["none", "backward", "both"]
    """Passes that hide exchanges of tensor parallelism; without sequence parallelism at most the backward pass."""
    host: Literal["python", "graph"]
    """Program that launches kernels in eager execution: Python code for each operator, or a compiled executor."""
    clips_gradients: bool
    """Whether the norm of all gradients is computed and limited in every step."""
    grouped_products: Literal["one", "each"]
    """Whether the products of all experts of a rank are one kernel, or one kernel for each expert."""
    engine: str
    """Name of the framework whose plans it runs: itself, or another."""
    sources: Mapping[str, str]
    """Source of each cell."""

    @property
    def has_buckets(self) -> bool:
        """Whether gradients are reduced in buckets of a size that can be chosen, rather than block by block."""
        return self.bucket_elements > 0 or self.bucket_mib[1] > 0

    def sizes_buckets(self, plans: Plans) -> npt.NDArray[np.bool_]:
        """Return whether each plan's buckets can have a stated size, (n,).

        It is true also if no replica exchanges any gradients.
        """
        return np.asarray(np.isin(plans.zero_stage, self.sized_stages) | (plans.data * plans.context == 1))

    @property
    def gradients_stage(self) -> int:
        """ZeRO stage from which on a rank keeps and sums only its part of the gradients."""
        return 2 if self.shards_gradients else 3

    @property
    def fused_accumulation(self) -> bool:
        """Whether the product that computes the gradient of a weight adds it to the accumulated one."""
        return self.wgrad_placeholders

    def has_fp32_gradients(self, workload: Workload) -> bool:
        """Return whether gradients of a job in 16 bit are kept in FP32."""
        if self.gradients == "weights":
            return HELD_BYTES[self.weights] == 4.0
        return self.gradients == "fp32" or workload.precision != "fp16"

    def state_bytes(self, workload: Workload) -> float:
        """Return the bytes of a weight that the update reads and writes: its own, or those of its master."""
        return 2.0 if workload.is_mixed and self.weights == "pure" else 4.0

    def moment_bytes(self, workload: Workload) -> float:
        """Return the bytes of a moment that an optimizer keeps in full precision."""
        return self.state_bytes(workload) if self.moments is None else STATE_BYTES[self.moments]


HELD_BYTES: Mapping[Weights, float] = {"master": 2.0, "autocast": 4.0, "sharded": 4.0, "pure": 2.0}
"""Bytes of a weight as a framework holds it in 16-bit training, by `Framework.weights`."""


def gradient_bytes(workload: Workload) -> float:
    """Return the bytes of a gradient that is summed over micro-batches, held and sent."""
    return 4.0 if not workload.is_mixed or find_framework(workload).has_fp32_gradients(workload) else 2.0


def holds_fp8_alone(workload: Workload) -> bool:
    """Return whether an FP8 job has no 16-bit copy of the weights of its layers.

    The framework determines it. Without a framework, it is true with hand-written kernels, which are Transformer
    Engine's as in MLPerf's code.
    """
    own = workload.framework is None and workload.fused_kernels
    return workload.precision == "fp8" and (own or find_framework(workload).fp8_weights_alone)


TABLES: Mapping[str, Mapping[str, Any]] = shipped.read_table("tilecast", "frameworks.toml")
"""Tables of the file, by name."""
_CELLS = tuple(item.name for item in fields(Framework) if item.name not in ("name", "engine", "moments", "sources"))


def _read_framework(name: str) -> Framework:
    table = TABLES[name]
    engine = table.get("engine", name)
    cells = {**TABLES[UNSET]["cells"], **TABLES[engine]["cells"], **table.get("cells", {})}
    values = {cell: cells[cell][0] for cell in _CELLS}
    values |= {cell: frozenset(values[cell]) for cell in ("composed", "fuses")}
    values |= {cell: tuple(values[cell]) for cell in ("bucket_copies", "bucket_mib", "sized_stages")}
    sources = {cell: cells[cell][1] for cell in _CELLS}
    return Framework(name=name, engine=engine, moments=None, sources=sources, **values)


FRAMEWORKS: Mapping[str, Framework] = {name: _read_framework(name) for name in TABLES}
"""Every framework by name, and `UNSET`."""
ENGINES: tuple[str, ...] = tuple(name for name, item in FRAMEWORKS.items() if item.engine == name and name != UNSET)
"""Frameworks that do not run on top of another one."""


def find_framework(workload: Workload) -> Framework:
    """Return the framework of a workload with the recipe of the workload, or the defaults if it names none."""
    name = workload.framework or UNSET
    if not (workload.is_mixed and workload.training):
        return FRAMEWORKS[name]
    return _with_recipe(name, workload.weights, workload.gradient_precision, workload.moment_precision)


@cache
def _with_recipe(
    name: str, weights: Weights | None, gradients: StatePrecision | None, moments: StatePrecision | None
) -> Framework:
    """Return a framework that holds weights, gradients and moments as a job says, else as it does by itself."""
    own = FRAMEWORKS[name]
    summed = own.gradients if weights in (None, own.weights) else "weights"
    if gradients is not None:
        summed = "fp32" if gradients == "fp32" else "weights"
    return replace(own, weights=weights or own.weights, gradients=summed, moments=moments)
