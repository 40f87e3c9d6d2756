"""Break down the step time of one plan into operators, exchanges and sums.

All times come from `step`. `step` includes the synchronisation of gradients only in a sum, so its time is that sum
minus the other parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from tilecast import constants, frameworks, kernels, step, zoo
from tilecast.graph import KIND_NAMES, KINDS, Block, Graph, Op, Phase
from tilecast.hardware import Gpu, Pool
from tilecast.recomputation import split_modules
from tilecast.spec import PRECISIONS, Floats, GradientSync, Plan, Plans, ServerUpdates, Workload
from tilecast.step import blocks, passes, placement, weights
from tilecast.step.distinct import StepInputs
from tilecast.zoo import ShardedGraph
from tilecast.zoo.model_flops import count_model_flops
from tilecast.zoo.modules import is_repeated_in_full, list_modules_of_collective

Bound = Literal["compute", "memory"]


@dataclass(frozen=True, slots=True)
class PricedOperator:
    """An operator of the model on one rank. Equal operators of several blocks are counted together.

    Seconds and counts are those of one micro-batch through all stages.
    """

    name: str
    phase: Phase
    kind: str
    precision: str
    dims: Mapping[str, float]
    runs: float
    """Number of runs, including repetitions of its block and recomputation."""
    seconds: float
    """Seconds of all runs together."""
    flops: float
    """FLOPs of one run."""
    moved_bytes: float
    """Least memory traffic of one run."""
    roofline_s: float
    """Least time of one run that the GPU's peaks allow."""
    kernel_s: float
    """Forecast of one isolated run. `seconds` is `runs` times this times all corrections."""
    corrections: Mapping[str, float]
    """Factors between the isolated kernel and a run in a step, by name of constant."""
    bound: Bound
    tile: tuple[int, int]
    tiles: int
    waves: float

    @property
    def utilization(self) -> float:
        """Share of the roofline that a run reaches, in (0, 1]."""
        return self.roofline_s / self.kernel_s

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / max(self.moved_bytes, 1.0)


@dataclass(frozen=True, slots=True)
class PricedExchange:
    """Data that ranks exchange inside layers or between stages, for one micro-batch.

    Seconds are times on the wire, before overlap with computation.
    """

    name: str
    collective: str
    group: str
    ranks: int
    size_bytes: float
    """Bytes of the whole buffer of one rank."""
    runs: float
    seconds: float
    """Seconds of all exchanges together."""
    exposed: float
    """Share of the seconds that computation does not hide."""


@dataclass(frozen=True, slots=True)
class SyncForecast:
    """Forecast of a step if gradients are summed over data-parallel ranks in a given way."""

    gradient_sync: GradientSync
    server_updates: ServerUpdates | None
    """How servers wait for workers. None without servers."""
    servers: int
    """Number of parameter servers, or 0."""
    seconds: float
    """Seconds to transfer all gradients of a step, before computation hides any of them."""
    step_s: float
    """Forecast of the step with this way."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """Parts of one micro-batch that make up a step's compute and communication, in seconds.

    compute = (stage_s x micro-batches x waited + contended_s) x correction, and
    communication = (exchanged_s x micro-batches x waited + gradients_s) x correction.
    """

    stage_s: float
    """Operators and copies of a micro-batch on the fullest stage."""
    exchanged_s: float
    """Exchanges of a micro-batch, on that stage and with the next, that computation does not hide."""
    contended_s: float
    """Extra time of kernels that run during the synchronisation of gradients."""
    gradients_s: float
    """Synchronisation of gradients and weights that computation does not hide, plus waits for weights."""
    waited: float
    """Time of the slowest rank divided by the mean over ranks."""
    correction: float
    """Factor on the step, learned from runs on the cluster."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Breakdown of one plan on one pool."""

    gpu: Gpu
    precision: str
    plan: Plan
    operators: tuple[PricedOperator, ...]
    """Operators, the most expensive first."""
    exchanges: tuple[PricedExchange, ...]
    gradient_bytes: float
    """Bytes of one rank's gradients that are exchanged. 0 if no other rank holds the same weights."""
    sums_whole_gradients: bool
    """Whether ranks sum whole gradients and exchange them once per step, at any ZeRO stage."""
    gathers: int
    """Number of times that a micro-batch gathers weights. A gather once per step, after the update, does not count."""
    gathered_bytes: float
    """Bytes of the weights gathered each time, or 0."""
    syncs: tuple[SyncForecast, ...]
    """Ways in which ranks can sum gradients, the job's own way first. Empty if no rank sums whole gradients."""
    model_flops: float
    """FLOPs of one optimizer step over all ranks, without recomputation."""
    mfu: float
    """Model FLOPs utilization: `model_flops` over the FLOPs that all GPUs could do in a step at their peak."""
    copied_s: float
    """Seconds per micro-batch for copying and summing weights and gradients, which are not operators."""
    sums: StepSums

    @property
    def seconds(self) -> float:
        """GPU seconds of one micro-batch through every stage."""
        return sum(operator.seconds for operator in self.operators) + self.copied_s

    @property
    def balance(self) -> float:
        """FLOP per byte at which the GPU's peak and its memory bandwidth limit a kernel equally.

        A kernel with more FLOP per byte is bound by the peak, and a kernel with less by the bandwidth.
        """
        return self.gpu.peak(self.precision) / self.gpu.memory_bandwidth_bytes_per_s


def explain_plan(workload: Workload, plan: Plan, pool: Pool, step_s: float) -> Explanation:
    """Return the breakdown of a plan on a pool. `step_s` is the forecast step time in seconds.

    Raises:
        SpecError: the pool's GPU cannot run the workload's precision.
    """
    plans = Plans.from_plans(plan)
    sharded = zoo.build_sharded_graph(workload, plans)
    table, rows = sharded.graph.kernels()
    times = kernels.predict_kernel_times(table, pool.gpu)
    model_flops = count_model_flops(plan, sharded.graph, int(sharded.index[0]))
    held = sharded.sum_fullest_stage("parameters", plans) * sharded.trainable_fraction(plans)
    inputs = StepInputs.from_plans(sharded, plans, pool)
    steps = step.Steps.from_plans(workload, plans, inputs, pool, blocks.kernel_seconds(workload, sharded, pool.gpu))
    whole, copied = steps.held.values, steps.copied_s.values[plans.zero_stage[0]]
    gathers = int(weights.count_gathers_per_micro_batch(workload, plans)[0])
    wire = held * frameworks.gradient_bytes(workload) if workload.training and plan.data * plan.context > 1 else [0.0]
    return Explanation(
        gpu=pool.gpu,
        precision=workload.precision,
        plan=plan,
        operators=_price_operators(workload, plan, sharded, times, rows),
        exchanges=_price_exchanges(workload, plans, sharded, pool),
        gradient_bytes=float(wire[0]),
        sums_whole_gradients=bool(frameworks.sums_whole_gradients(workload, plans)[0]),
        gathers=gathers,
        gathered_bytes=float((whole.parameters * whole.gathered_bytes)[0]) if gathers else 0.0,
        syncs=_forecast_gradient_syncs(workload, plans, sharded, pool),
        model_flops=model_flops,
        mfu=model_flops / (plan.gpus * pool.gpu.peak(workload.precision) * step_s),
        copied_s=float(copied[0]) * plan.pipeline,
        sums=_build_step_sums(steps, plans, copied),
    )


def _build_step_sums(steps: step.Steps, plans: Plans, copied: Floats) -> StepSums:
    times, repeats = steps.rows(slice(None)), float(plans.gradient_accumulation[0])
    waited, correction = float(steps.straggler.values[0]), float(times.correction[0])
    micro, boundary_s = steps.micro.values, steps.boundary_s.values
    stage_s = float((micro.gpu_s + copied)[0])
    every_s = boundary_s * plans.virtual_stages
    sends_s = passes.visible_send_seconds(steps.workload, plans, micro, every_s, steps.send_share)
    exchanged_s = float((micro.communication_s + sends_s)[0])
    return StepSums(
        stage_s=stage_s,
        exchanged_s=exchanged_s,
        contended_s=float(times.compute[0]) / correction - stage_s * repeats * waited,
        gradients_s=float(times.communication[0]) / correction - exchanged_s * repeats * waited,
        waited=waited,
        correction=correction,
    )


_WAYS: Sequence[tuple[GradientSync, ServerUpdates]] = (
    ("allReduce", "synchronous"), ("parameterServer", "synchronous"), ("parameterServer", "asynchronous"),
)  # fmt: skip


def _forecast_gradient_syncs(
    workload: Workload, plans: Plans, sharded: ShardedGraph, pool: Pool
) -> tuple[SyncForecast, ...]:
    """Return the plan's forecast for each way to sum gradients.

    The result is empty without training, for a single replica, and for a ZeRO stage above 0.
    """
    if not workload.training or int(plans.replicas[0]) == 1 or int(plans.zero_stage[0]) > 0:
        return ()
    priced, inputs = blocks.kernel_seconds(workload, sharded, pool.gpu), StepInputs.from_plans(sharded, plans, pool)
    nodes = int(
        placement.build_communication_group(plans.replicas, plans.tensor.astype(float), plans.gpus, pool).nodes[0]
    )
    servers, own = workload.parameter_servers or nodes, (workload.gradient_sync, workload.server_updates)
    syncs = []
    for way, updates in sorted(_WAYS, key=lambda one: one != own):
        job = replace(workload, gradient_sync=way, server_updates=updates, parameter_servers=servers)
        steps = step.Steps.from_plans(job, plans, inputs, pool, priced)
        sync = steps.sync.values
        wire_s, step_s = (sync.first_s + sync.reduce_s)[0], steps.rows(slice(None)).total[0]
        served = way == "parameterServer"
        syncs.append(
            SyncForecast(way, updates if served else None, servers if served else 0, float(wire_s), float(step_s))
        )
    return tuple(syncs)


def _list_operators_with_blocks(graph: Graph) -> list[tuple[Block, Op]]:
    return [(block, op) for block in graph.blocks for op in block.ops]


def _count_runs_per_micro_batch(workload: Workload, plan: Plan, sharded: ShardedGraph, block: Block, op: Op) -> float:
    """Return the number of runs of an operator in a micro-batch, recomputation included.

    A recomputed operator runs twice. An operator of which a share is recomputed counts 1 plus that share.
    """
    if op.phase == "backward" or not workload.training or not any(block is layer for layer in sharded.graph.layers):
        return 1
    if modules := split_modules(plan.checkpointing):
        named = blocks.list_operator_modules(workload, op).intersection(modules, block.freed_bytes)
        return 1 + (bool(named) and is_repeated_in_full(workload, op.name))
    shares = {"full": 1.0, "selective": blocks.recomputed_fraction(workload)(op), "none": 0.0}
    layers = float(zoo.recomputed_layer_fraction(workload, sharded, Plans.from_plans(plan))[0])
    layers *= is_repeated_in_full(workload, op.name)
    return 1 + shares[plan.checkpointing] * (layers if plan.checkpointing == "full" else 1.0)


def _price_operators(
    workload: Workload,
    plan: Plan,
    sharded: ShardedGraph,
    times: kernels.KernelTimes,
    rows: Sequence[npt.NDArray[np.intp]],
) -> tuple[PricedOperator, ...]:
    graph, shard = sharded.graph, int(sharded.index[0])
    runs: dict[tuple[str, Phase, int], tuple[float, float]] = {}
    corrected: dict[tuple[str, Phase, int], dict[str, float]] = {}
    for (block, op), index in zip(_list_operators_with_blocks(graph), rows, strict=True):
        passes = block.repeat * _count_runs_per_micro_batch(workload, plan, sharded, block, op)
        key = (op.name, op.phase, int(index[shard]))
        count, seconds = runs.get(key, (0.0, 0.0))
        spent_s = passes * float(blocks.operator_seconds(workload, op, times, index)[shard])
        runs[key] = (count + passes * op.count, seconds + spent_s)
        factors = blocks.correction_factors(workload, op, times, index[shard : shard + 1])
        corrected[key] = {word: float(value[0]) for word, value in factors.items()}
    table, tiling = times.table, times.tiling()
    flops, moved = table.flops(), table.bytes()
    operators = []
    for (name, phase, row), (count, seconds) in runs.items():
        kind, precision = KIND_NAMES[table.kind[row]], PRECISIONS[table.precision[row]]
        compute_s = flops[row] / times.gpu.peak_flops.get(precision, np.inf)
        operators.append(
            PricedOperator(
                name=name,
                phase=phase,
                kind=kind,
                precision=precision,
                dims={dim: float(table.dims[row, place]) for place, dim in enumerate(KINDS[kind].dims)},
                runs=count,
                seconds=seconds,
                flops=float(flops[row]),
                moved_bytes=float(moved[row]),
                roofline_s=float(times.roofline_s[row]),
                kernel_s=float(times.seconds[row]),
                corrections=corrected[name, phase, row],
                bound="compute" if compute_s >= _NEARLY * times.roofline_s[row] else "memory",
                tile=(int(tiling.rows[row]), int(tiling.cols[row])),
                tiles=int(tiling.tiles[row]),
                waves=float(tiling.waves[row]),
            )
        )
    return tuple(sorted(operators, key=lambda one: -one.seconds))


_NEARLY = 1 - 1e-9
"""Relative tolerance for rounding between two computations of the same roofline."""


def _price_exchanges(workload: Workload, plans: Plans, sharded: ShardedGraph, pool: Pool) -> tuple[PricedExchange, ...]:
    plan, graph, fitted = plans.row(0), sharded.graph, constants.shipped_constants()
    factor, priced = fitted.factor["exchange"], passes.LayerCollectives(sharded, plans, pool)
    exchanges = []
    layers = float(zoo.recomputed_layer_fraction(workload, sharded, plans)[0])
    for block in graph.blocks:
        modules, layered = split_modules(plan.checkpointing), any(block is layer for layer in graph.layers)
        for call in block.collectives:
            again = layers * (plan.checkpointing == "full")
            if modules and list_modules_of_collective(call.name).intersection(modules, block.freed_bytes):
                again = 1.0
            again *= is_repeated_in_full(workload, call.name)
            alone_s = float(priced.seconds(call)[0])
            once_s = alone_s * factor
            if once_s == 0.0 or (call.phase == "backward" and not workload.training):
                continue
            times = 1 + (again if layered and workload.training and call.phase == "forward" else 0.0)
            runs = call.count * block.repeat * times
            size = float(sharded.expand_to_plans(call.size_bytes)[0])
            ranks = int(getattr(plan, call.group))
            exposed = passes.exposed_fraction(workload, call, fitted) / factor
            exchanges.append(
                PricedExchange(call.name, call.collective, call.group, ranks, size, runs, runs * once_s, exposed)
            )
    if plan.pipeline > 1:
        boundary_s = float(passes.boundary_seconds(workload, sharded, plans, pool)[0]) * plan.virtual_stages
        size = float(sharded.expand_to_plans(graph.boundary_bytes)[0])
        runs = plan.virtual_stages * (2 if workload.training else 1)
        overlaps = plan.virtual_stages > 1 and frameworks.find_framework(workload).overlaps_sends
        shown = 1.0 - fitted.send_share if overlaps else 1.0
        exchanges.append(
            PricedExchange("next stage and back", "send_recv", "pipeline", plan.pipeline, size, runs, boundary_s, shown)
        )
    return tuple(sorted(exchanges, key=lambda one: -one.seconds))
