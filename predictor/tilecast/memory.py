"""Bytes on the fullest GPU of a plan, itemised: does it fit, and by how much.

Static bytes per parameter follow ZeRO (arXiv 1910.02054, section 3 and 5): weights and gradients in the
compute type, and the optimizer's FP32 master weight and moments; stage 1 spreads the optimizer over the
data-parallel ranks, stage 2 the gradients too, stage 3 the weights. Embedding tables that are updated row by row have
no gradients, and their weights and moments are in FP32. Activations are those of the graph
(arXiv 2205.05198), times the micro-batches in flight: min(m, p) on the first of p 1F1B stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tilecast.hardware import Gpu
from tilecast.models import Sharded
from tilecast.spec import Columns, Distinct, Floats, Plans, Rows, Workload, distinct

CONTEXT_BYTES = 0.5e9
"""CUDA context, loaded kernels and library workspaces, without any communicator."""
COMMUNICATOR_BYTES = 0.25e9
"""NCCL buffers of each parallel dimension that communicates."""
FRAGMENTATION = 0.02
"""Share of the dynamic bytes that a caching allocator cannot use."""

_MOMENT_BYTES: Mapping[str, float] = {"none": 0, "sgd": 0, "momentum": 4, "adam": 8, "adamw": 8, "lamb": 8}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of the fullest rank of each plan, every column (n,). `total` is their sum."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    working: Floats
    reserve: Floats

    @property
    def total(self) -> Floats:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working + self.reserve

    def items(self, row: int) -> dict[str, float]:
        """One plan's bill, in bytes."""
        names = ("parameters", "gradients", "optimizer", "activations", "working", "reserve")
        return {name: float(getattr(self, name)[row]) for name in names}


def usable_bytes(gpu: Gpu) -> float:
    """What an allocator can hand out of a GPU: its memory less what the driver keeps."""
    return gpu.memory_bytes * 0.985


def footprint(workload: Workload, sharded: Sharded, plans: Plans) -> Footprint:
    """The bill of each plan's fullest rank."""
    return Bills.of(workload, sharded, plans).rows(slice(None))


@dataclass(frozen=True, slots=True)
class Bills:
    """The bills of a plan table but for what is each plan's own. Plans share most of their bytes, so each formula is
    evaluated once for every distinct row of the columns it reads, and `rows` puts plans together."""

    training: bool
    plans: Plans
    state: Distinct
    """Rows alike in degrees and ZeRO stage: those share weights, gradients and optimizer states."""
    states: _States
    kept: Distinct
    """Rows alike in shard, recomputation and pipeline: those share what a micro-batch keeps."""
    micro: _Micro

    @classmethod
    def of(cls, workload: Workload, sharded: Sharded, plans: Plans) -> Bills:
        """What the plans of a table share."""
        state = distinct(plans.zero_stage, plans.tensor, plans.expert, plans.context, plans.pipeline, plans.data)
        kept = distinct(sharded.index, plans.checkpointing, plans.pipeline)

        def at(rows: Rows) -> tuple[Sharded, Plans]:
            return sharded.take(rows), plans.take(rows)

        states, micro = _states(workload, *at(state.first)), _micro(workload, *at(kept.first))
        return cls(workload.training, plans, state, states, kept, micro)

    def rows(self, rows: slice) -> Footprint:
        """The bills of these rows of the table."""
        plans = self.plans.take(rows)
        states = self.states.take(self.state.index[rows])
        micro = self.micro.take(self.kept.index[rows])
        activations = np.zeros(len(plans))
        if self.training:
            # 1F1B keeps p micro-batches on the first stage; interleaving v stages a little more
            # (Megatron-LM, theoretical_memory_usage.py: 1 + (p - 1) / (p v)).
            stages = plans.pipeline.astype(float)
            interleaved = np.where(plans.virtual_stages > 1, 1 + (stages - 1) / (stages * plans.virtual_stages), 1.0)
            in_flight = np.minimum(plans.gradient_accumulation, stages) * interleaved
            activations = np.maximum(micro.early * in_flight, micro.late)
        dynamic = activations + micro.working + states.gathered
        reserve = states.reserve + FRAGMENTATION * dynamic
        working = micro.working + states.gathered
        return Footprint(states.parameters, states.gradients, states.optimizer, activations, working, reserve)


@dataclass(frozen=True, slots=True)
class _States(Columns):
    """Bytes that plans of equal degrees and ZeRO stage share, (n,)."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    gathered: Floats
    reserve: Floats
    """The context and communicators."""


def _states(workload: Workload, sharded: Sharded, plans: Plans) -> _States:
    parameters, own = sharded.held_parameters(plans)
    trainable = sharded.trainable_share(plans)
    weight = workload.weight_bytes

    def spread(stage_from: int) -> Floats:
        """Parameters after ZeRO spread them, from the stage on that spreads this kind of state."""
        return np.where(plans.zero_stage >= stage_from, own, parameters)

    held = spread(3) * weight
    if workload.offload == "parameters":
        held = np.zeros(len(plans))
    tables = sharded.stage("table_parameters", plans)
    held = held + 4.0 * tables
    gradients = optimizer = np.zeros(len(plans))
    if workload.training:
        gradients = spread(2) * trainable * weight
    if workload.training and workload.optimizer != "none" and workload.offload == "none":
        master = 4.0 if workload.is_mixed else 0.0
        moments = _MOMENT_BYTES[workload.optimizer]
        optimizer = spread(1) * trainable * (master + moments) + tables * moments
    # A sharded model is gathered a block at a time, this one and the next; the embedding and the head are blocks too.
    block = _largest(sharded, [item.parameters for item in sharded.graph.blocks], len(plans))
    gathered = np.where(plans.zero_stage >= 3, 2 * np.minimum(block, parameters) * weight, 0.0)
    degrees = (plans.data, plans.tensor, plans.pipeline, plans.context, plans.expert)
    groups = np.sum([degree > 1 for degree in degrees], axis=0, dtype=float)
    return _States(held, gradients, optimizer, gathered, CONTEXT_BYTES + COMMUNICATOR_BYTES * groups)


@dataclass(frozen=True, slots=True)
class _Micro(Columns):
    """Bytes of one micro-batch, (n,): what the first and the last stage keep of it (all of it, without a pipeline), and
    scratch."""

    early: Floats
    late: Floats
    working: Floats


def _micro(workload: Workload, sharded: Sharded, plans: Plans) -> _Micro:
    graph, code = sharded.graph, plans.checkpointing
    kept = np.zeros(len(plans))
    for item in graph.layers:
        modes = np.broadcast_to(item.activation_bytes, (3, graph.shards))
        kept = kept + item.repeat * modes[code, sharded.index]
    first = sum((sharded.gather(item.activation_bytes[0]) for item in graph.first), np.zeros(len(plans)))
    last = sum((sharded.gather(item.activation_bytes[0]) for item in graph.last), np.zeros(len(plans)))
    layer_working = _largest(sharded, [item.working_bytes for item in graph.layers], len(plans))
    head_working = _largest(sharded, [item.working_bytes for item in graph.last], len(plans))
    if not workload.training:
        return _Micro(np.zeros(len(plans)), np.zeros(len(plans)), 2 * layer_working + head_working + first)
    # The one layer being recomputed is whole again while its backward pass runs.
    whole = _largest(
        sharded, [np.broadcast_to(item.activation_bytes, (3, graph.shards))[0] for item in graph.layers], len(plans)
    )
    layer_working = np.where(code == 2, whole, np.where(code == 1, np.minimum(whole, layer_working * 2), layer_working))
    share = sharded.layer_share(plans, "activations")
    everything, staged = kept + first + last, plans.pipeline > 1
    early = np.where(staged, kept * share + first, everything)
    late = np.where(staged, kept * share + last, everything)
    return _Micro(early, late, np.maximum(layer_working, head_working))


def _largest(sharded: Sharded, columns: list[Floats], rows: int) -> Floats:
    found = [sharded.gather(column) for column in columns]
    return np.maximum.reduce(found) if found else np.zeros(rows)
