"""Bytes on the fullest GPU of a plan, itemised: does it fit, and by how much.

Static bytes per parameter follow ZeRO (arXiv 1910.02054, section 3 and 5): weights and gradients in the
compute type, and the optimizer's FP32 master weight and moments; stage 1 spreads the optimizer over the
data-parallel ranks, stage 2 the gradients too, stage 3 the weights. Activations are those of the graph
(arXiv 2205.05198), times the micro-batches in flight: min(m, p) on the first of p 1F1B stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tilecast.hardware import Gpu
from tilecast.models import Sharded
from tilecast.spec import Floats, Plans, Workload

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
    graph = sharded.graph
    stages = plans.pipeline.astype(float)
    share = sharded.layer_share(plans, "activations")

    parameters, own = sharded.held_parameters(plans)
    trainable = sharded.trainable_share(plans)
    weight = workload.weight_bytes

    def spread(stage_from: int) -> Floats:
        """Parameters after ZeRO spread them, from the stage on that spreads this kind of state."""
        return np.where(plans.zero_stage >= stage_from, own, parameters)

    held = spread(3) * weight
    if workload.offload == "parameters":
        held = np.zeros(len(plans))
    gradients = optimizer = np.zeros(len(plans))
    if workload.training:
        gradients = spread(2) * trainable * weight
    if workload.training and workload.optimizer != "none" and workload.offload == "none":
        master = 4.0 if workload.is_mixed else 0.0
        optimizer = spread(1) * trainable * (master + _MOMENT_BYTES[workload.optimizer])
    # A sharded model is gathered a block at a time, this one and the next; the embedding and the head are blocks too.
    block = _largest(sharded, [item.parameters for item in graph.blocks], len(plans))
    gathered = np.where(plans.zero_stage >= 3, 2 * np.minimum(block, parameters) * weight, 0.0)

    code = plans.checkpointing
    # 1F1B keeps p micro-batches on the first stage; interleaving v stages a little more
    # (Megatron-LM, theoretical_memory_usage.py: 1 + (p - 1) / (p v)).
    interleaved = np.where(plans.virtual_stages > 1, 1 + (stages - 1) / (stages * plans.virtual_stages), 1.0)
    in_flight = np.minimum(plans.gradient_accumulation, stages) * interleaved
    kept = np.zeros(len(plans))
    for item in graph.layers:
        by_mode = np.stack([sharded.gather(column) for column in np.broadcast_to(
            item.activation_bytes, (3, graph.shards))])  # fmt: skip
        kept = kept + item.repeat * np.take_along_axis(by_mode, code[None, :], axis=0)[0]
    first = sum((sharded.gather(item.activation_bytes[0]) for item in graph.first), np.zeros(len(plans)))
    last = sum((sharded.gather(item.activation_bytes[0]) for item in graph.last), np.zeros(len(plans)))
    layer_working = _largest(sharded, [item.working_bytes for item in graph.layers], len(plans))
    head_working = _largest(sharded, [item.working_bytes for item in graph.last], len(plans))
    # The one layer being recomputed is whole again while its backward pass runs.
    whole = _largest(
        sharded, [np.broadcast_to(item.activation_bytes, (3, graph.shards))[0] for item in graph.layers], len(plans)
    )
    layer_working = np.where(code == 2, whole, np.where(code == 1, np.minimum(whole, layer_working * 2), layer_working))
    if workload.training:
        early = (kept * share + first) * in_flight
        late = kept * share + last
        activations = np.where(stages > 1, np.maximum(early, late), kept + first + last)
        working = np.maximum(layer_working, head_working)
    else:
        activations = np.zeros(len(plans))
        working = 2 * layer_working + head_working + first
    dynamic = activations + working + gathered
    groups = sum((degree > 1).astype(float) for degree in (plans.data, plans.tensor, plans.pipeline, plans.expert))
    reserve = CONTEXT_BYTES + COMMUNICATOR_BYTES * groups + FRAGMENTATION * dynamic
    return Footprint(held, gradients, optimizer, activations, working + gathered, reserve)


def _largest(sharded: Sharded, columns: list[Floats], rows: int) -> Floats:
    found = [sharded.gather(column) for column in columns]
    return np.maximum.reduce(found) if found else np.zeros(rows)
