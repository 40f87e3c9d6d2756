"""Traced models: a list of operators from an ONNX file or from `torch.export`, instead of dimensions.

`onnx_file` and `torch_export` return a `Trace`, whose operators are of the kinds in `operators.OPERATORS`. Exporters
split some layers into several operators, and `normal.normalize` joins these again. `document` writes and reads a trace
as JSON. `build` returns the graph of a trace. Traced models can use data parallelism, ZeRO and pipeline parallelism
with stages of similar cost. Tensor parallelism is not possible, because a trace does not name the layers.

To add an operator, add its name to the tables of `onnx_file` and `torch_operators`. If none of the kinds in `OPERATORS`
fits, add a kind with its `Rule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from tilecast import fuse
from tilecast.graph import Block, Graph, KernelTable, LargestStage, Op, Shards, require_few_operators
from tilecast.model import Model
from tilecast.spec import Floats, Workload
from tilecast.trace import Trace
from tilecast.zoo import layers
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.traced.flow import DataFlow, OperatorGroup, trace_flow
from tilecast.zoo.traced.operators import OPERATORS, Operand, TraceScaling

FAMILY = "traced"
MOST_STAGES = 64
BALANCE = 100.0
"""FLOPs that take as long as moving one byte, to weigh operators when the model is cut. GPUs have 60 to 300."""
UNEVEN = 2.0
"""Largest ratio of a piece's cost to the mean cost when the model is cut into pieces."""


def build_model(name: str, trace: Trace) -> Model:
    """Return the model called `name` that runs the operators of `trace`."""
    return Model(name=name, family=FAMILY, trace=trace)


def count_pieces(trace: Trace) -> int:
    """Return the number of pieces of similar cost into which a traced model can be cut.

    The model can have at most that many pipeline stages, and it has that many FSDP units.
    """
    cost = np.array(_compute_stage_fractions(trace).cost)
    even = cost * np.arange(1, len(cost) + 1) <= UNEVEN
    return int(np.flatnonzero(even).max()) + 1


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a traced model.

    The graph has `count_pieces` equal layers, each with an equal fraction of all traced operators. In training, a
    cross-entropy over the last dimension of the first output follows, unless the trace already has a loss.
    """
    trace = workload.model.trace
    assert trace is not None  # noqa: S101 (a model of this family has one)
    flow, numerics = trace_flow(trace), Numerics.from_workload(workload)
    require_few_operators(sum(len(unit.calls) for unit in flow.units))
    ratio = shards.micro_batch.astype(float) / trace.batch
    count = count_pieces(trace)
    ops = tuple(
        replace(op, count=op.count * times / count)
        for unit, times in flow.units.items()
        for op in _emit_unit(unit, TraceScaling(numerics, ratio))
    )
    activations = flow.activations
    e = numerics.element
    scores = (activations.scores * e + activations.dropped_scores * (2 * e + 1)) * ratio
    core = 4.0 * activations.statistics * ratio if numerics.flash else scores
    outer = e * (activations.batched * ratio + activations.fixed) + activations.bytes * ratio
    boundary = e * ratio * float(np.mean([segment.boundary for segment in flow.segments[:-1]] or [0.0]))
    mild = outer + (core if numerics.flash else 0.0)
    body = Block(
        FAMILY,
        count,
        ops,
        parameters=np.full(len(shards), flow.parameters / count),
        activation_bytes=np.stack([(outer + core) / count, mild / count, boundary]),
        working_bytes=0.5 * (outer + core) / count,
    )
    last: tuple[Block, ...] = ()
    if flow.output is not None and workload.training:
        last = (_build_loss(flow.output, TraceScaling(numerics, ratio)),)
    inputs = sum(float(np.prod(trace.shapes[name])) for name in trace.inputs) / trace.batch
    return Graph(
        first=(),
        layers=(body,),
        last=last,
        boundary_bytes=boundary,
        shards=len(shards),
        host_bytes_per_sample=(8.0 if trace.sequence > 1 else 1.0) * inputs,
        stages=_compute_stage_fractions(trace),
    )


def _build_loss(output: Operand, emission: TraceScaling) -> Block:
    """Return the block of a cross-entropy over the last dimension of an output."""
    numerics, count, cols = emission.numerics, emission.count_elements(output), float(output.shape[-1])
    ops = layers.cross_entropy("loss", numerics, count / cols, np.full(1, cols))
    activation_bytes, working = layers.logit_bytes(numerics)
    kept = np.stack([activation_bytes * count] * 3)
    return Block("loss", 1, tuple(ops), np.zeros(1), kept, working_bytes=working * count)


def _emit_unit(unit: OperatorGroup, emission: TraceScaling) -> list[Op]:
    """Return the kernels of a unit, which is one operator or a chain of element-wise operators.

    Fusion replaces the element-wise operators of a chain with one kernel. In the forward pass, this kernel reads the
    tensors from outside the chain and writes the last output. In the backward pass, it reads the output's gradient and
    the tensors from outside, and writes the gradients of those tensors that need one. If a norm begins the chain, the
    norm's kernel already moves the chain's main tensor, and only the traffic of the tensors from outside is added.
    """
    emitted = [OPERATORS[call.kind].emit(call, emission) for call in unit.calls]
    leads = OPERATORS[unit.calls[0].kind].leads
    alone, chain = emitted[0] if leads or len(emitted) == 1 else [], [op for ops in emitted[leads:] for op in ops]
    if len(emitted) == 1:
        return alone
    output, training = unit.calls[-1].output, emission.numerics.training
    reads, writes = float(len(unit.outside)), 0.0
    if not leads:
        reads, writes = max(1.0, reads), 1.0
    trained = float(sum(operand.trained for operand in unit.outside))
    fused = emission.elementwise("chain", output, reads, writes) if reads + writes else []
    if training and output.trained and reads + writes:
        fused += emission.elementwise("chain.gradient", output, writes + reads, trained, phase="backward")
    return alone + layers.replace_when_fused("elementwise", chain, fused)


@lru_cache(maxsize=64)
def _compute_stage_fractions(trace: Trace) -> LargestStage:
    """Return the largest fraction of the cost, the parameters and the saved elements in any stage, for 1, 2, … stages.

    The stages are cut so that the costliest stage is as cheap as possible.
    """
    flow = trace_flow(trace)
    workload = Workload(build_model("", trace), trace.sequence, trace.batch)
    numerics, names = Numerics.from_workload(workload), fuse.passes(workload)
    costs: dict[OperatorGroup, float] = {}
    for unit in flow.units:
        ops = [op for op in _emit_unit(unit, TraceScaling(numerics, np.ones(1))) if fuse.is_kept(op, names)]
        table = KernelTable.concatenate([op.table for op in ops]) if ops else None
        work = table.flops() + BALANCE * table.bytes() if table else np.zeros(0)
        costs[unit] = float(work @ np.array([op.count for op in ops])) if ops else 0.0
    columns = _compute_segment_fractions(flow, costs)
    stages = [_cut_stages(columns[0], number) for number in range(1, min(MOST_STAGES, len(flow.segments)) + 1)]
    shares = np.array([[float(np.add.reduceat(column, starts).max()) for starts in stages] for column in columns])
    return LargestStage(*shares)


def _compute_segment_fractions(flow: DataFlow, costs: Mapping[OperatorGroup, float]) -> Floats:
    """Return the cost, parameters and saved elements of each segment as fractions of their totals, (3, segments)."""
    rows = [
        (sum(costs[unit] * times for unit, times in segment.units.items()), segment.parameters, segment.activations)
        for segment in flow.segments
    ]
    columns = np.array(rows).T
    shares: Floats = columns / np.maximum(columns.sum(axis=1, keepdims=True), 1e-30)
    return shares


def _cut_stages(costs: Floats, stages: int) -> list[int]:
    """Return the index of the first segment of each stage, for at most `stages` stages.

    The cuts make the costliest stage as cheap as possible. Bisection finds the smallest limit on the cost of a stage
    under which greedy filling needs at most `stages` stages.
    """
    ends = np.cumsum(costs)

    def fill(limit: float) -> list[int]:
        starts, spent = [0], 0.0
        while (reach := int(np.searchsorted(ends, spent + limit, side="right"))) < len(ends):
            starts.append(max(reach, starts[-1] + 1))
            if starts[-1] >= len(ends) or len(starts) > stages:
                break
            spent = float(ends[starts[-1] - 1])
        return starts

    low, high = float(costs.max()), 1.0 + 1e-9
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if len(fill(middle)) <= stages else (middle, high)
    return [start for start in fill(high) if start < len(ends)]
