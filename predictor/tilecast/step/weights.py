"""Costs of the weights of a rank: copies and casts, the optimizer's update, the host's work once per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilecast import constants, frameworks, fuse, zoo
from tilecast.constants import Constants
from tilecast.graph import KIND_NAMES, Graph
from tilecast.hardware import Gpu
from tilecast.spec import Columns, Floats, Plans, Workload
from tilecast.step.blocks import host
from tilecast.step.passes import MicroBatch
from tilecast.zoo import Sharded


@dataclass(frozen=True, slots=True)
class Held(Columns):
    """Weights of a rank, (n,)."""

    parameters: Floats
    """Parameters of its stage."""
    own: Floats
    """Its share of these after ZeRO has spread them."""
    trainable: Floats
    """Share of either number that has gradients."""
    gathered_bytes: Floats
    """Bytes of one parameter as ranks gather it."""

    @classmethod
    def of(cls, workload: Workload, sharded: Sharded, plans: Plans) -> Held:
        """Return the weights of the fullest rank of each plan."""
        gathered = sharded.gathered_bytes(workload, plans)
        return cls(*sharded.held_parameters(plans), sharded.trainable_share(plans), gathered)


def copied_seconds(workload: Workload, held: Held, plans: Plans, bytes_per_s: float) -> Floats:
    """Return the seconds of a micro-batch in which weights and gradients are copied and summed, (n,).

    `bytes_per_s` is the share of the memory's bandwidth that copies reach.
    """
    return np.asarray(copied_bytes(workload, held, plans) / bytes_per_s)


def copied_bytes_per_s(gpu: Gpu, fitted: Constants) -> float:
    """Return the memory bandwidth of a GPU that copies and updates of weights reach."""
    return gpu.memory_bandwidth_bytes_per_s * fitted.optimizer_efficiency


def copied_bytes(workload: Workload, held: Held, plans: Plans) -> Floats:
    """Return the bytes that every micro-batch moves beside those of its operators, (n,).

    These are casts of weights, conversion and accumulation of gradients, and copies between shards and gathered
    weights. Accumulation that is fused with the product hides behind its arithmetic. A rank that keeps only its own
    share of the gradients accumulates only that.
    """
    if not workload.training or workload.optimizer == "none":
        return np.zeros(len(plans))
    cells, gradient = frameworks.of(workload), frameworks.gradient_bytes(workload)
    trained = held.parameters * held.trainable
    cast = 6.0 if workload.is_mixed and cells.weights == "autocast" else 0.0
    fused = cells.fused_accumulation
    is_widened = workload.is_mixed and gradient == 4.0 and not fused
    converted = np.where(plans.zero_stage < 3, 2.0 + gradient if is_widened else 0.0, 0.0)
    summed = 0.0 if fused else np.where(plans.gradient_accumulation > 1, 3 * gradient, 0.0)
    sums = np.where(plans.zero_stage >= cells.gradients_stage, held.own * held.trainable, trained) * summed
    # Copies out of a gather (read and written) for each pass, and into the scatter, which widens on the way.
    gathered = 2 * gathers(workload, plans) * held.gathered_bytes * held.parameters
    scattered = np.where(plans.zero_stage >= 3, workload.weight_bytes + gradient, 0.0)
    return np.asarray((cast + converted + scattered) * trained + sums + gathered)


def gathers(workload: Workload, plans: Plans) -> Floats:
    """Return how often a micro-batch gathers the weights that ZeRO spreads, (n,): for each pass under ZeRO 3."""
    return np.where(plans.zero_stage >= 3, 2.0, np.where(reshards_weights(workload, plans), 1.0, 0.0))


def reshards_weights(workload: Workload, plans: Plans) -> npt.NDArray[np.bool_]:
    """Return whether every micro-batch gathers the weights that its backward pass spreads again under ZeRO 2, (n,).

    Between the two passes they stay whole. Pipelines always keep them whole (PyTorch, distributed/pipelining/stage.py).
    """
    each = frameworks.of(workload).reshards_weights
    return np.asarray((plans.zero_stage == 2) & (plans.pipeline == 1) & each)


_FUSED_OPTIMIZER_BYTES: Mapping[str, float] = {
    "none": 0.0, "sgd": 8.0, "momentum": 16.0, "adam": 24.0, "adamw": 24.0, "lamb": 40.0,
}  # fmt: skip
"""Bytes that one optimizer step moves per parameter beside the gradient and the 16-bit copy, with states in FP32: the
weight in and out (8), each moment in and out (8), and for LAMB's two norms weight and update once more (16)."""


_STEPWISE_OPTIMIZER_BYTES: Mapping[str, float] = {
    "none": 0.0, "sgd": 8.0, "momentum": 28.0, "adam": 68.0, "adamw": 76.0, "lamb": 96.0,
}  # fmt: skip
"""Bytes per parameter where every arithmetic step of the update is a separate pass over FP32 arrays: 8 bytes to change
an array in place or to write one from another, 4 for each further one that is read; the first read of the gradient is
counted with the gradient. Momentum: decay (8), add (8), apply (12). Adam: first moment (8), second moment (8 + 12), its
root (8), corrected (8), epsilon (8), apply (16); AdamW also decays the weight (8). LAMB divides moment by root (12)
instead of applying, adds the decayed weight (12), takes two norms (8) and applies (12)."""


def optimizer_seconds(workload: Workload, held: Held, plans: Plans, gpu: Gpu, fitted: Constants) -> Floats:
    """Return the seconds of the weight update, (n,): bytes over bandwidth.

    Gradients are read, in FP32 where the framework casts them first. In FP16 they are scaled back (read and written),
    and where their norm is limited they are read once more and scaled. 16-bit weights are written beside their masters.
    Where the buckets of replicas are copies, gradients are copied there and back. With offloading, gradients and
    weights cross to the host and back, and the host's memory bounds the update.
    """
    if not workload.training or workload.optimizer == "none":
        return np.zeros(len(plans))
    own = np.where(plans.zero_stage >= 1, held.own, held.parameters) * held.trainable
    reduced = (plans.replicas > 1) & (plans.zero_stage < 1)  # gradients are summed over replicas as a whole
    states = _FUSED_OPTIMIZER_BYTES if "optimizer" in fuse.passes(workload) else _STEPWISE_OPTIMIZER_BYTES
    cells, gradient = frameworks.of(workload), frameworks.gradient_bytes(workload)
    passes = 1.0 + 2.0 * (workload.precision == "fp16") + 3.0 * cells.clips_gradients
    copies = np.where(reduced, 4.0 * (cells.gradient_copies - 1.0), 0.0)
    cast, read = (gradient + 4.0, 4.0) if workload.is_mixed and cells.casts_gradients else (0.0, gradient)
    copy = 2.0 if workload.is_mixed and cells.weights == "master" else 0.0
    state = states[workload.optimizer] * cells.state_bytes(workload) / 4.0
    moved = own * (state + cast + passes * read + copies * gradient + copy)
    if workload.offload == "none":
        return moved / copied_bytes_per_s(gpu, fitted)
    crossing = own * 2.0 * workload.weight_bytes
    return crossing / fitted.host.copy_bytes_per_s + moved / fitted.host.update_bytes_per_s


_CALLS: Mapping[str, float] = {"none": 1, "sgd": 2, "momentum": 4, "adam": 8, "adamw": 9, "lamb": 12}
"""Operators of one update of a list of tensors, as counted in `_STEPWISE_OPTIMIZER_BYTES`, and zeroing."""


_WEIGHTED = [KIND_NAMES.index(name) for name in ("gemm", "conv", "layernorm", "rmsnorm", "embedding")]


def once_seconds(workload: Workload, graph: Graph, fitted: Constants) -> float:
    """Return the host time once per step.

    A part of it is the same for every model; the rest is for each tensor of weights (the optimizer's lists, zeroing,
    limiting). `step_ms` of `constants.toml` is for Adam.
    """
    calls = _CALLS[workload.optimizer] / _CALLS["adam"]
    known, share = fitted.host_step, fitted.host_step.fixed_share
    if workload.training:
        share += (1.0 - share) * calls * min(_tensors(graph) / known.usual_tensors, known.most)
    return fitted.step_s[host(workload)] * share


def gradient_seconds(workload: Workload, graph: Graph, plans: Plans, fitted: Constants) -> Floats:
    """Return how long replicas wait for each other at the gradients of a step because their samples differ, (n,).

    They wait once per step at the gradient of every tensor of weights of a pipeline stage, if they are fed unequal
    samples. Hand-written kernels keep gradients in one buffer, asynchronous servers wait for no replica, and adapters
    were not measured: none of these waits.
    """
    waits = workload.training and not (workload.fused_kernels or zoo.has_equal_sequences(workload.model))
    if not waits or workload.lora_rank or workload.server_updates == "asynchronous":
        return np.zeros(len(plans))
    each_s = _tensors(graph) / plans.pipeline * fitted.gradient_s[host(workload)]
    return np.asarray(np.where(plans.replicas > 1, each_s, 0.0))


def _tensors(graph: Graph) -> float:
    """Return the number of tensors of weights.

    An operator with weights has one, or two with a bias. Products of attention that is not fused count too.
    """
    return constants.shipped().host_step.operator_tensors * sum(
        block.repeat * sum(op.phase == "forward" and op.table.kind[0] in _WEIGHTED for op in block.ops)
        for block in graph.blocks
    )


def fetch_seconds(held: Held, micro: MicroBatch) -> Floats:
    """Return the seconds in which a micro-batch waits for weights that live on the host, (4, n).

    They are for each ZeRO stage from 0 to 3. Weights come once for the forward and once for the backward pass, those of
    the next block while this one computes.
    """
    parameters = np.stack([held.parameters, held.parameters, held.parameters, held.own])
    crossing = 2.0 * held.gathered_bytes * parameters / constants.shipped().host.copy_bytes_per_s
    return np.maximum(crossing - micro.gpu_s, 0.0)
