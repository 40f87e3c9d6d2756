"""What training frameworks are like, read from `frameworks.toml`: how they hold weights and gradients, what they fuse.

`step`, `memory` and the models read one record, so that what is priced is what is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tilecast import shipped
from tilecast.spec import PassName, Plans, Workload

Weights = Literal["master", "autocast", "sharded", "pure"]
Gradients = Literal["weights", "fp32", "fp32-with-bf16"]
Loss = Literal["eager", "parallel", "fused"]
Composed = Literal["rmsnorm", "layernorm", "channelnorm", "gelu", "tanh-gelu", "dropout"]

UNSET = "unset"
"""The table that holds for a job that names no framework: the states of arXiv 1910.02054."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework's cells. Types are those of a job in 16 bit; a job in FP32 holds everything in FP32."""

    name: str
    weights: Weights
    """What is held of a weight: 16 bit with an FP32 master (`master`); FP32 with a 16-bit cast (`autocast`); FP32
    shards that are gathered in 16 bit (`sharded`); 16 bit alone, the optimizer's states too (`pure`)."""
    gradients: Gradients
    """The type of a gradient: that of the weight as held, FP32, or FP32 unless the job is in FP16."""
    gradient_copies: float
    """How often replicas hold a gradient: twice where buckets are copies, into which and out of which it is copied."""
    shards_gradients: bool
    """Whether a rank keeps its part of the gradients alone under ZeRO 2. Every micro-batch scatters them there either
    way."""
    reshards_weights: bool
    """Whether ZeRO 2 spreads weights after every backward pass and gathers them before the next forward pass, rather
    than once the step has updated them."""
    bucket_elements: float
    """Elements of the buckets in which gradients are reduced and weights are gathered, unless `bucket_mib` says it."""
    bucket_elements_per_replica: float
    """Elements of a bucket for each replica, where that is more."""
    bucket_mib: tuple[float, ...]
    """The size of the bucket that is reduced first and of the others, in MiB, infinite for one bucket; where there is
    none and no number of elements either, a bucket is what a block holds."""
    sized_stages: tuple[int, ...]
    """ZeRO stages whose buckets can have a stated size."""
    bucket_copies: tuple[float, ...]
    """How many buckets are held beside the gradients, by ZeRO stage."""
    gathered_blocks: float
    """Blocks of a ZeRO-3 model that are whole at once."""
    wgrad_placeholders: bool
    """Whether weights get an unused gradient of their own beside the accumulated one."""
    composed: frozenset[Composed]
    """Operators that it writes as chains of element-wise ones, unless a compiler fuses them: `models.layers.CHAINS`."""
    fuses: frozenset[PassName]
    """Passes of `fuse.PASSES` that it runs whatever the execution."""
    loss: Loss
    """What the cross-entropy keeps; `models.layers.logit_bytes` says what each is."""
    loss_chunks: float
    """Into how many chunks the logits are cut, one of which is in the loss at a time."""
    unties_embeddings: bool
    """Whether the output layer has a weight of its own where the published model shares that of the embedding."""
    quantized_input_bytes: float
    """Bytes that a product with a quantized weight keeps of each element of its input."""
    quantized_bits: float
    """Bits of a frozen weight of a layer that is quantized to 4 bits, its scales included."""
    attention: Literal["auto", "flash", "flash1", "eager"]
    selective: Literal["attention", "operators"]
    """What selective recomputation runs again: the attention core, or all but attention and every second product."""
    optimizer: Literal["fused", "foreach"]
    """Whether the update is one kernel for many tensors, or a kernel for each operation on lists of tensors, which
    needs a temporary of every weight's square root; a job chooses otherwise (`fuse.passes`)."""
    updates_in_backward: bool
    """Whether a job of one GPU without accumulation updates each weight as soon as its gradient is there, by an
    optimizer whose states are paged out to the host."""
    casts_gradients: bool
    """Whether the update reads an FP32 copy of each gradient in 16 bit, spread as the optimizer's states are."""
    context_bytes: float
    """What loaded libraries and their workspaces take outside the allocator, without any communicator."""
    table_gradients: Literal["rows", "whole"]
    """Whether the gradient of an embedding table that ranks share has the rows of the batch alone, or those of the
    table."""
    table_sharding: Literal["table-wise", "row-wise"]
    """How ranks share embedding tables. Row-wise each of them looks up a part of the vectors of all samples."""
    allocator: Literal["caching", "expandable", "planned"]
    """Whether memory is handed out block by block, which leaves gaps, in segments that grow, or planned ahead."""
    memory_error: float
    """Half the width of the range of what a run takes, as a share of the bill."""
    fp8_weight_bytes: float
    """Bytes of the FP8 copies of a weight of the layers, beside what is held."""
    fp8_weights_alone: bool
    """Whether the two bytes that are held of a weight of the layers are FP8 by rows and by columns, in an FP8 job."""
    fp8_inputs: bool
    """Whether an FP8 job keeps the inputs of its matrix products in FP8."""
    overlap: bool
    """Whether gradients are reduced behind the backward pass below ZeRO 3, which always gathers ahead."""
    tensor_overlap: Literal["none", "backward", "both"]
    """In which passes the exchanges of tensor parallelism run behind matrix products; without sequence parallelism it
    is the backward pass at most."""
    host: Literal["python", "graph"]
    """Who launches kernels where execution is eager: Python code, operator by operator, or a compiled executor."""
    clips_gradients: bool
    """Whether the norm of all gradients is taken and limited in every step."""
    grouped_products: Literal["one", "each"]
    """Whether the products of all experts of a rank are one kernel, or each expert's is launched by itself."""
    engine: str
    """The framework whose plans it runs: itself, or another."""
    sources: Mapping[str, str]
    """Where each cell comes from."""

    @property
    def has_buckets(self) -> bool:
        """Whether gradients are reduced in buckets of a size that can be chosen, rather than block by block."""
        return self.bucket_elements > 0 or self.bucket_mib[1] > 0

    def sizes_buckets(self, plans: Plans) -> npt.NDArray[np.bool_]:
        """Whether each plan's buckets can have a stated size, or no replica exchanges any, (n,)."""
        return np.asarray(np.isin(plans.zero_stage, self.sized_stages) | (plans.data * plans.context == 1))

    @property
    def gradients_stage(self) -> int:
        """The ZeRO stage from which a rank keeps and sums its part of the gradients alone."""
        return 2 if self.shards_gradients else 3

    @property
    def fused_accumulation(self) -> bool:
        """Whether the product for the gradient of a weight adds to what is there."""
        return self.wgrad_placeholders

    def has_fp32_gradients(self, workload: Workload) -> bool:
        """Whether gradients of a job in 16 bit are kept in FP32."""
        if self.gradients == "weights":
            return HELD_BYTES[self.weights] == 4.0
        return self.gradients == "fp32" or workload.precision != "fp16"

    def state_bytes(self, workload: Workload) -> float:
        """Bytes of each state of a weight that the update reads and writes: the weight or its master, and moments."""
        return 2.0 if workload.is_mixed and self.weights == "pure" else 4.0


HELD_BYTES: Mapping[Weights, float] = {"master": 2.0, "autocast": 4.0, "sharded": 4.0, "pure": 2.0}
"""Bytes of a weight as a framework holds it in 16-bit training, by `Framework.weights`."""


def gradient_bytes(workload: Workload) -> float:
    """Bytes of a gradient as it is summed over micro-batches, held and on the wire."""
    return 4.0 if not workload.is_mixed or of(workload).has_fp32_gradients(workload) else 2.0


def holds_fp8_alone(workload: Workload) -> bool:
    """Whether an FP8 job has no 16-bit copy of the weights of its layers: by its framework, or by kernels of its own,
    which are Transformer Engine's as in MLPerf's code."""
    own = workload.framework is None and workload.fused_kernels
    return workload.precision == "fp8" and (own or of(workload).fp8_weights_alone)


TABLES: Mapping[str, Mapping[str, Any]] = shipped.table("tilecast", "frameworks.toml")
"""The tables as they stand in the file, by name."""
_CELLS = tuple(item.name for item in fields(Framework) if item.name not in ("name", "engine", "sources"))


def _read(name: str) -> Framework:
    table = TABLES[name]
    engine = table.get("engine", name)
    cells = {**TABLES[UNSET]["cells"], **TABLES[engine]["cells"], **table.get("cells", {})}
    values = {cell: cells[cell][0] for cell in _CELLS}
    values |= {cell: frozenset(values[cell]) for cell in ("composed", "fuses")}
    values |= {cell: tuple(values[cell]) for cell in ("bucket_copies", "bucket_mib", "sized_stages")}
    return Framework(name=name, engine=engine, sources={cell: cells[cell][1] for cell in _CELLS}, **values)


FRAMEWORKS: Mapping[str, Framework] = {name: _read(name) for name in TABLES}
"""Every framework by name, and `UNSET`."""
ENGINES: tuple[str, ...] = tuple(name for name, item in FRAMEWORKS.items() if item.engine == name and name != UNSET)
"""Frameworks that are none over another."""


def of(workload: Workload) -> Framework:
    """The framework of a workload, or what holds where it names none."""
    return FRAMEWORKS[workload.framework or UNSET]
