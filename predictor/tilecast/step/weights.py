"""Seconds of work on a rank's weights: copies and casts, the optimizer's update, and host work once per step."""

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
from tilecast.step.blocks import find_launch_mode
from tilecast.step.passes import MicroBatch
from tilecast.zoo import ShardedGraph
from tilecast.zoo.modules import NO_GRADIENT


@dataclass(frozen=True, slots=True)
class HeldWeights(Columns):
    """Weights that the fullest rank of each plan holds, (n,)."""

    parameters: Floats
    """Parameters of the rank's pipeline stage."""
    own: Floats
    """Parameters that the rank stores if ZeRO shards them."""
    trainable: Floats
    """Share of the parameters that have gradients."""
    gathered_bytes: Floats
    """Bytes per parameter when ranks gather weights."""
    own_trainable: Floats
    """Share of the parameters in `own` that have gradients."""

    @classmethod
    def from_plans(cls, workload: Workload, sharded: ShardedGraph, plans: Plans) -> HeldWeights:
        """Return the weights of the fullest rank of each plan."""
        gathered = sharded.gathered_bytes(workload, plans)
        trainable, own_trainable = sharded.trainable_fraction(plans), sharded.trainable_fraction_of_shards(plans)
        return cls(*sharded.held_parameters(plans), trainable, gathered, own_trainable)


def copy_seconds(workload: Workload, held: HeldWeights, plans: Plans, bytes_per_s: float) -> Floats:
    """Return the seconds per micro-batch for copying and summing weights and gradients, (n,).

    `bytes_per_s` is the memory bandwidth that copies reach.
    """
    return np.asarray(weight_copy_bytes(workload, held, plans) / bytes_per_s)


def weight_copy_bytes_per_s(gpu: Gpu, fitted: Constants) -> float:
    """Return the memory bandwidth, in bytes per second, that copies and updates of weights reach on a GPU."""
    return gpu.memory_bandwidth_bytes_per_s * fitted.optimizer_efficiency


def weight_copy_bytes(workload: Workload, held: HeldWeights, plans: Plans) -> Floats:
    """Return the memory traffic of copies and conversions of weights and gradients in a micro-batch, in bytes, (n,).

    Weights are cast, and gradients are converted and accumulated. The traffic of the model's operators is not counted.
    ZeRO also copies weights out of a gather
    and gradients into a scatter. Accumulation that is fused with a matrix product moves no bytes. A rank that stores a
    share of the gradients accumulates only this share.
    """
    if not workload.training or workload.optimizer == "none":
        return np.zeros(len(plans))
    cells, gradient = frameworks.find_framework(workload), frameworks.gradient_bytes(workload)
    trained = held.parameters * held.trainable
    cast = 6.0 if workload.is_mixed and cells.weights == "autocast" else 0.0
    if workload.holds_reference or workload.preference.own_passes:
        # Each forward pass without gradients casts the weights that it reads.
        needs = workload.preference
        cast *= 1.0 + needs.own_passes + needs.reference_passes * workload.holds_reference
    fused = cells.has_fused_accumulation
    is_widened = workload.is_mixed and gradient == 4.0 and not fused
    converted = np.where(plans.zero_stage < 3, 2.0 + gradient if is_widened else 0.0, 0.0)
    summed = 0.0 if fused else np.where(plans.gradient_accumulation > 1, 3 * gradient, 0.0)
    keeps_part = (plans.zero_stage >= cells.gradient_sharding_stage) & ~frameworks.sums_whole_gradients(workload, plans)
    sums = np.where(keeps_part, held.own * held.own_trainable, trained) * summed
    # Copies out of a gather (read and written) for each pass, and into the scatter, which widens on the way.
    gathered = 2 * count_gathers_per_micro_batch(workload, plans) * held.gathered_bytes * held.parameters
    scattered = np.where(plans.zero_stage >= 3, workload.weight_bytes + gradient, 0.0)
    if not cells.copies_shards:
        gathered, scattered = np.zeros(len(plans)), np.zeros(len(plans))
    return np.asarray((cast + converted + scattered) * trained + sums + gathered)


def count_gathers_per_micro_batch(workload: Workload, plans: Plans) -> Floats:
    """Return the number of times that a micro-batch gathers the weights that ZeRO spreads, (n,).

    If weights stay whole from a backward pass to the next forward pass, a micro-batch gathers them once. One more
    gather in each step is left out.
    """
    gathers = np.where(plans.zero_stage >= 3, 2.0, np.where(reshards_weights(workload, plans), 1.0, 0.0))
    keeps = frameworks.keeps_gathered_weights(workload, plans) & (plans.gradient_accumulation > 1)
    return np.where(keeps, 1.0, gathers) + np.where(plans.zero_stage >= 3, count_forward_gathers(workload), 0.0)


def count_forward_gathers(workload: Workload) -> float:
    """Return how often a micro-batch gathers weights under ZeRO 3 for forward passes without gradients."""
    needs = workload.preference
    return float(needs.reference_passes + needs.own_passes)


def reshards_weights(workload: Workload, plans: Plans) -> npt.NDArray[np.bool_]:
    """Return whether every micro-batch gathers weights under ZeRO 2 and shards them again in its backward pass, (n,).

    From its forward to its backward pass, the weights stay whole. Pipelines never shard them again (PyTorch,
    distributed/pipelining/stage.py).
    """
    each = frameworks.find_framework(workload).reshards_weights
    return np.asarray((plans.zero_stage == 2) & (plans.pipeline == 1) & each)


# The weight in and out (8), each moment in and out (8), and for LAMB's two norms weight and update once more (16). A
# moment of 8-bit Adam takes two bytes, one of 4-bit Adam takes one. Adafactor and Muon have no fused update.
_FUSED_OPTIMIZER_BYTES: Mapping[str, float] = {
    "none": 0.0, "sgd": 8.0, "momentum": 16.0, "adam": 24.0, "adamw": 24.0, "lamb": 40.0, "adafactor": 92.0,
    "muon": 48.0, "adamw8bit": 12.0, "adamw4bit": 10.0,
}  # fmt: skip
"""Bytes that an update moves per parameter, besides the gradient and the 16-bit copy, with states in FP32."""


# An array is changed in place or written from another (8 bytes), and each further array is read (4); the first read of
# the gradient is counted with the gradient. Momentum: decay (8), add (8), apply (12). Adam: first moment (8), second
# moment (8 + 12), its root (8), corrected (8), epsilon (8), apply (16); AdamW also decays the weight (8). LAMB divides
# moment by root (12) instead of applying, adds the decayed weight (12), takes two norms (8) and applies (12). Adafactor
# squares the gradient (12), takes two means of that (8), multiplies means (8), takes the root (8), divides (12), limits
# the norm (20) and applies with a decay of the weight (24). Muon averages (12), looks ahead (12), normalises in 16 bits
# (12) and applies (12).
_STEPWISE_OPTIMIZER_BYTES: Mapping[str, float] = {
    "none": 0.0, "sgd": 8.0, "momentum": 28.0, "adam": 68.0, "adamw": 76.0, "lamb": 96.0, "adafactor": 92.0,
    "muon": 48.0, "adamw8bit": 12.0, "adamw4bit": 10.0,
}  # fmt: skip
"""Like `_FUSED_OPTIMIZER_BYTES`, if each arithmetic step of the update is a separate pass over FP32 arrays."""


def optimizer_seconds(workload: Workload, held: HeldWeights, plans: Plans, gpu: Gpu, fitted: Constants) -> Floats:
    """Return the seconds of the weight update, (n,): bytes over bandwidth.

    Gradients are read, in FP32 if the framework casts them first. In FP16 they are also unscaled (read and written). If
    their norm is clipped, they are read and scaled once more. If gradient buckets are copies, gradients are copied into
    them and back. 16-bit weights are written in addition to their FP32 master weights. With offloading, gradients and
    weights cross to the host and back, and the bandwidth of the host's memory bounds the update.
    """
    if not workload.training or workload.optimizer == "none":
        return np.zeros(len(plans))
    own = np.where(plans.zero_stage >= 1, held.own * held.own_trainable, held.parameters * held.trainable)
    reduced = (plans.replicas > 1) & (plans.zero_stage < 1)  # gradients are summed over replicas as a whole
    states = _FUSED_OPTIMIZER_BYTES if "optimizer" in fuse.passes(workload) else _STEPWISE_OPTIMIZER_BYTES
    cells, gradient = frameworks.find_framework(workload), frameworks.gradient_bytes(workload)
    passes = 1.0 + 2.0 * (workload.precision == "fp16") + 3.0 * cells.clips_gradients
    copies = np.where(reduced, 4.0 * (cells.gradient_copies - 1.0), 0.0)
    cast, read = (gradient + 4.0, 4.0) if workload.is_mixed and cells.casts_gradients else (0.0, gradient)
    copy = 2.0 if workload.is_mixed and cells.weights == "master" else 0.0
    state = states[workload.optimizer] * cells.state_bytes(workload) / 4.0
    moved = own * (state + cast + passes * read + copies * gradient + copy)
    if workload.offload == "none":
        return moved / weight_copy_bytes_per_s(gpu, fitted)
    crossing = own * 2.0 * workload.weight_bytes
    return crossing / fitted.host.copy_bytes_per_s + moved / fitted.host.update_bytes_per_s


_CALLS: Mapping[str, float] = {"none": 1, "sgd": 2, "momentum": 4, "adam": 8, "adamw": 9, "lamb": 12,
                              "adafactor": 18, "muon": 34, "adamw8bit": 2, "adamw4bit": 2}  # fmt: skip
"""Number of operators that update a list of tensors, as counted in `_STEPWISE_OPTIMIZER_BYTES`, plus zeroing."""


_WEIGHTED = [KIND_NAMES.index(name) for name in ("gemm", "conv", "layernorm", "rmsnorm", "embedding")]


def host_seconds_per_step(workload: Workload, graph: Graph, fitted: Constants) -> float:
    """Return the seconds that the host works once per step.

    A part is the same for every model. The rest grows with the number of weight tensors (optimizer lists, zeroing,
    clipping). `step_ms` of `constants.toml` is for Adam.
    """
    calls = _CALLS[workload.optimizer] / _CALLS["adam"]
    known, share = fitted.host_step, fitted.host_step.fixed_share
    if workload.training:
        share += (1.0 - share) * calls * min(_count_weight_tensors(graph) / known.usual_tensors, known.most)
    return fitted.step_s[find_launch_mode(workload)] * share


def gradient_wait_seconds(workload: Workload, graph: Graph, plans: Plans, fitted: Constants) -> Floats:
    """Return the seconds in which data-parallel ranks with unequal samples wait for each other at gradients, (n,).

    The ranks wait once per step at the gradient of every weight tensor of a pipeline stage. There is no wait with
    hand-written kernels, which keep gradients in one buffer, and with asynchronous servers. Adapters were not measured
    and have no wait here.
    """
    waits = workload.training and not (frameworks.has_fused_kernels(workload) or zoo.has_equal_samples(workload.model))
    if not waits or workload.lora_rank or workload.server_updates == "asynchronous":
        return np.zeros(len(plans))
    each_s = _count_weight_tensors(graph) / plans.pipeline * fitted.gradient_s[find_launch_mode(workload)]
    return np.asarray(np.where(plans.replicas > 1, each_s, 0.0))


def hook_seconds(workload: Workload, graph: Graph, plans: Plans, micro: MicroBatch) -> Floats:
    """Return the seconds in which a micro-batch waits for ZeRO's hooks on the host, at ZeRO 0 to 3, (4, n).

    Hooks run for each weight tensor, whatever its size. Under ZeRO 3 they surround the launches of every module, so
    that the GPU computes while they run. Adapters were not measured and have no wait here.
    """
    each_s = [1e-6 * cost for cost in frameworks.find_framework(workload).zero_tensor_us]
    if not workload.training or workload.lora_rank or not any(each_s):
        return np.zeros((len(each_s), len(plans)))
    tensors = _count_weight_tensors(graph) / plans.pipeline
    waits = np.outer(each_s, tensors)
    waits[3] = np.maximum(waits[3] - micro.gpu_s - micro.stall_s, 0.0)
    return waits


def _count_weight_tensors(graph: Graph) -> float:
    """Return the estimated number of weight tensors: a fitted number for each operator that may have weights."""
    return constants.shipped_constants().host_step.operator_tensors * sum(
        block.repeat
        * sum(
            op.phase == "forward" and op.table.kind[0] in _WEIGHTED and not op.name.startswith(NO_GRADIENT)
            for op in block.ops
        )
        for block in graph.blocks
    )


def weight_fetch_seconds(held: HeldWeights, micro: MicroBatch) -> Floats:
    """Return the seconds in which a micro-batch waits for weights stored on the host, at ZeRO 0 to 3, (4, n).

    Weights are fetched once for the forward and once for the backward pass. The pass of a block, with its waits for the
    host, hides the fetch of the next block's weights.
    """
    parameters = np.stack([held.parameters, held.parameters, held.parameters, held.own])
    crossing = 2.0 * held.gathered_bytes * parameters / constants.shipped_constants().host.copy_bytes_per_s
    return np.maximum(crossing - micro.slowest_s, 0.0)
