"""Every plan of a pool as columns. No formula lives here: `step` and `memory` price what this enumerates.

The space is pools x GPU counts x tensor x pipeline x data x expert x micro-batch x ZeRO stage x
recomputation x virtual stages, under exact divisibility: tensor divides heads and key/value heads (or
replicates them) and stays inside a node unless the job allows more, pipeline divides the layers, data divides
the global batch, micro-batches divide a rank's share. The order of rows is fixed, so that equal prices always
choose the same plan.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tilecast import memory, models, step
from tilecast.hardware import Pool
from tilecast.kernels import KernelTimes
from tilecast.memory import Footprint
from tilecast.models import Sharded, traced
from tilecast.spec import CHECKPOINTING, Floats, Framework, Plans, Precision, SpecError, Workload
from tilecast.step import Constants, StepTimes

Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the enumeration; None is no bound."""

    gpus: int | None = None
    max_gpus: int | None = None
    max_tensor: int | None = None
    tensor_across_nodes: bool = False
    """Whether tensor parallelism may leave the node, as measured runs sometimes do."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan table with its prices on one pool, every column (n,)."""

    plans: Plans
    times: StepTimes
    footprint: Footprint
    usable_bytes: float

    @property
    def step_s(self) -> Floats:
        return self.times.total

    @property
    def memory_bytes(self) -> Floats:
        return self.footprint.total

    @property
    def fits(self) -> Mask:
        return self.footprint.total <= self.usable_bytes


@dataclass(frozen=True, slots=True)
class Found:
    """Every plan of a pool with its price, as columns of shape (n,); `price` tells any of the rows in full."""

    plans: Plans
    step_s: Floats
    memory_bytes: Floats
    usable_bytes: float

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def fits(self) -> Mask:
        return self.memory_bytes <= self.usable_bytes


Dimension = Literal["recomputation", "zero", "tensor", "expert"]
"""What layers of one plan may differ in."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a training framework executes; a table of `frameworks.toml`."""

    parallelism: Sequence[str]
    """Degrees that may exceed one: data, tensor, pipeline, context, expert, virtual."""
    zero_stages: Mapping[str, Sequence[int]]
    """ZeRO stages of data parallelism `alone`, and those that go with each other degree; absent, any of `alone`."""
    checkpointing: Sequence[str]
    precisions: Sequence[str]
    offload: Sequence[str]
    source: str
    sequence_parallel: Sequence[bool] = (False,)
    """How norms and residuals may be split where tensor parallelism is on."""
    per_layer: tuple[Dimension, ...] = ()
    """What may differ from layer to layer."""

    def executes(self, plans: Plans) -> Mask:
        """Whether it can run each plan, (n,)."""
        modes = [CHECKPOINTING.index(mode) for mode in self.checkpointing]
        fine: Mask = np.isin(plans.checkpointing, modes) & (
            np.isin(plans.sequence_parallel, self.sequence_parallel) | (plans.tensor == 1)
        )
        ranks = plans.data * plans.context
        fine &= np.isin(plans.zero_stage, self.zero_stages["alone"]) | (ranks == 1)
        for name in ("data", "tensor", "pipeline", "context", "expert", "virtual"):
            used = getattr(plans, "virtual_stages" if name == "virtual" else name) > 1
            stages = self.zero_stages.get(name, self.zero_stages["alone"])
            allowed = (np.isin(plans.zero_stage, stages) | (ranks == 1)) if name in self.parallelism else False
            fine &= ~used | allowed
        return fine


def _frameworks() -> dict[Framework, Abilities]:
    text = files("tilecast").joinpath("frameworks.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return {
        name: Abilities(**{**table[name], "per_layer": tuple(table[name].get("per_layer", ()))})
        for name in get_args(Framework)
    }


FRAMEWORKS: Mapping[Framework, Abilities] = _frameworks()
"""Every training framework by name."""


def find(workload: Workload, pool: Pool, limits: Limits = Limits()) -> Found:
    """Every plan of a pool that divides and that the workload's framework executes, priced.

    Raises:
        SpecError: the pool's GPU or the framework cannot run the workload's precision, or the framework cannot offload
            as the workload asks.
    """
    plans = enumerate_plans(workload, pool, limits)
    if not len(plans):
        return Found(plans, np.zeros(0), np.zeros(0), memory.usable_bytes(pool.gpu))
    priced = price(workload, plans, pool)
    return Found(plans, priced.step_s, priced.memory_bytes, priced.usable_bytes)


def variants(workload: Workload, precisions: Sequence[Precision]) -> tuple[Workload, ...]:
    """The workload in each precision that its user allows, its own first."""
    others = [name for name in dict.fromkeys(precisions) if name != workload.precision]
    return (workload, *(replace(workload, precision=name) for name in others))


def _require_framework(workload: Workload) -> None:
    if workload.framework is None:
        return
    able = FRAMEWORKS[workload.framework]
    for field, value, known in (
        ("training.precision", workload.precision, able.precisions),
        ("training.offload", workload.offload, able.offload),
        ("training.activationCheckpointing", workload.checkpointing or able.checkpointing[0], able.checkpointing),
    ):
        if value not in known:
            raise SpecError(
                field, f"{workload.framework} has no {value}", f"use one of {', '.join(known)}, or another framework"
            )


MAX_VIRTUAL = 4
"""More virtual stages than this send more than they save."""


def price(workload: Workload, plans: Plans, pool: Pool) -> Priced:
    """Step time and memory of every plan on a pool.

    Raises:
        SpecError: the pool's GPU cannot run the workload's precision.
    """
    sharded = models.shard(workload, plans)
    return price_sharded(workload, sharded, plans, pool)


def price_sharded(
    workload: Workload,
    sharded: Sharded,
    plans: Plans,
    pool: Pool,
    fitted: Constants | None = None,
    timed: KernelTimes | None = None,
) -> Priced:
    """As `price`, with what is at hand already: the graph (which does not depend on the pool), other constants,
    kernel times."""
    priced = step.kernel_seconds(workload, sharded, pool.gpu, fitted, timed)
    times = step.step(workload, sharded, plans, pool, priced, fitted)
    return Priced(plans, times, memory.footprint(workload, sharded, plans), memory.usable_bytes(pool.gpu))


def enumerate_plans(workload: Workload, pool: Pool, limits: Limits = Limits()) -> Plans:
    """Every divisible plan of a pool that the workload's framework executes, as one table; empty if there is none.

    Raises:
        SpecError: the framework cannot run the workload's precision, offloading or recomputation.
    """
    _require_framework(workload)
    tables = [
        _expand(workload, data, tensor, pipeline)
        for gpus in gpu_counts(pool, limits)
        for tensor, pipeline, data in _splits(workload, pool, gpus, limits)
    ]
    if not any(map(len, tables)):
        return Plans.of()
    plans = Plans.concatenate([table for table in tables if len(table)])
    return plans if workload.framework is None else plans.take(FRAMEWORKS[workload.framework].executes(plans))


def gpu_counts(pool: Pool, limits: Limits) -> list[int]:
    """GPU counts worth trying: powers of two inside a node, then whole nodes."""
    most = min(pool.max_gpus, limits.max_gpus or pool.max_gpus)
    if limits.gpus is not None:
        whole = limits.gpus <= pool.gpus_per_node or limits.gpus % pool.gpus_per_node == 0
        return [limits.gpus] if limits.gpus <= most and whole else []
    inside = [n for n in (1, 2, 4, 8, 16) if n < pool.gpus_per_node]
    nodes = range(1, pool.max_nodes + 1)
    # Beyond eight nodes, multiples of ever larger powers of two: what schedulers and rings like.
    chosen = [n for n in nodes if n <= 8 or n % (1 << (n.bit_length() - 4)) == 0 or n == pool.max_nodes]
    return [n for n in inside + [n * pool.gpus_per_node for n in chosen] if n <= most]


def divisors(number: int) -> list[int]:
    """The divisors of a positive integer, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _splits(workload: Workload, pool: Pool, gpus: int, limits: Limits) -> Iterator[tuple[int, int, int]]:
    model = workload.model
    inside = gpus if limits.tensor_across_nodes else min(gpus, pool.gpus_per_node)
    most = min(limits.max_tensor or inside, inside)
    splittable = model.hidden > 0
    tensors = [t for t in divisors(gpus) if t <= most and splittable and model.heads % t == 0] if splittable else [1]
    for tensor in tensors or [1]:
        if tensor > 1 and model.kv_heads % tensor and tensor % model.kv_heads:
            continue
        if gpus > pool.gpus_per_node and inside % tensor:
            continue  # a group would straddle two nodes
        for pipeline in divisors(gpus // tensor):
            if pipeline > 1 and not _stages_are_full(workload, pipeline):
                continue
            data = gpus // (tensor * pipeline)
            if workload.global_batch % data == 0:
                yield tensor, pipeline, data


def _stages_are_full(workload: Workload, pipeline: int) -> bool:
    """Whether every one of so many stages has something to do. Traced models are cut by cost; of others layers are
    counted, have to be of a single kind, and the last stage may hold fewer of them."""
    model = workload.model
    if model.trace is not None:
        return pipeline <= traced.pieces(model.trace)
    fullest = -(-model.layers // pipeline)
    return model.hidden > 0 and fullest * (pipeline - 1) < model.layers and model.family != "encdec"


def _expand(workload: Workload, data: int, tensor: int, pipeline: int) -> Plans:
    """The plans of one (data, tensor, pipeline): micro-batch x ZeRO x recomputation x expert x virtual stages."""
    model = workload.model
    per_rank = workload.global_batch // data
    if workload.micro_batch is not None:
        micro = [workload.micro_batch] if per_rank % workload.micro_batch == 0 else []
    else:
        micro = [b for b in divisors(per_rank) if b & (b - 1) == 0 or b == per_rank]
        micro = [b for b in micro if per_rank // b >= pipeline or b == 1]
    zero = [0] if data == 1 or not workload.training else ([0, 1] if pipeline > 1 else [0, 1, 3])
    if workload.offload == "parameters":
        zero = [3] if pipeline == 1 else []
    if workload.checkpointing is not None:
        recompute = [CHECKPOINTING.index(workload.checkpointing)]
    else:
        is_in_layers = model.hidden > 0 or model.trace is not None
        recompute = list(range(len(CHECKPOINTING))) if is_in_layers and workload.training else [0]
    experts = int(model.extra.get("experts", 1))
    expert = [e for e in divisors(experts) if data * tensor % e == 0] if experts > 1 else [1]
    is_even = pipeline > 1 and model.layers % pipeline == 0
    virtual = [v for v in divisors(max(1, model.layers // pipeline)) if v <= MAX_VIRTUAL] if is_even else [1]
    columns = np.meshgrid(micro, zero, recompute, expert, virtual, indexing="ij")
    grid = np.array(columns, dtype=np.int64).reshape(len(columns), -1)
    # Interleaving needs the micro-batches to divide by the stages (arXiv 2104.04473, section 2.2).
    grid = grid[:, (grid[4] == 1) | (per_rank // np.maximum(grid[0], 1) % pipeline == 0)]
    rows = grid.shape[1]

    def constant(value: int) -> npt.NDArray[np.int64]:
        return np.full(rows, value, dtype=np.int64)

    return Plans(
        data=constant(data),
        tensor=constant(tensor),
        pipeline=constant(pipeline),
        context=constant(1),
        expert=grid[3],
        zero_stage=grid[1],
        micro_batch=grid[0],
        gradient_accumulation=per_rank // grid[0] if rows else grid[0],
        checkpointing=grid[2],
        sequence_parallel=constant(int(tensor > 1)),
        virtual_stages=grid[4],
    )
