"""Seconds of the passes of a micro-batch through the model: computation, launch stalls and exchanges."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast import collectives, frameworks, zoo
from tilecast.collectives import Algorithm, RankGroup
from tilecast.constants import Constants
from tilecast.graph import CollectiveCall
from tilecast.hardware import Pool
from tilecast.recomputation import BY_CODE, CHECKPOINTING, MODULES, names_modules
from tilecast.spec import Columns, Floats, Plans, Rows, Workload, distinct_rows
from tilecast.step.blocks import BlockTimes, KernelSeconds, launch_host
from tilecast.step.placement import communication_group, joined_gpus
from tilecast.zoo import Sharded
from tilecast.zoo.modules import modules_of_exchange, repeats_in_full

_FULL = CHECKPOINTING.index("full")


_SELECTIVE = CHECKPOINTING.index("selective")


@dataclass(frozen=True, slots=True)
class Passes(Columns):
    """Seconds of a micro-batch's forward and backward passes through some blocks, (n,)."""

    gpu_s: Floats
    stall_s: Floats
    communication_s: Floats
    backward_s: Floats

    @property
    def total_s(self) -> Floats:
        return self.gpu_s + self.stall_s + self.communication_s


@dataclass(frozen=True, slots=True)
class ModelPasses(Columns):
    """Passes through the blocks before the layers, through all layers, and through the blocks after the layers."""

    first: Passes
    layers: Passes
    last: Passes


class Exchanges:
    """Prices of the collectives that n plans run inside layers.

    A collective is priced once for all blocks and all plans with equal bytes and equal groups. Ranks are placed with
    tensor innermost, then context, then data; experts fold over tensor and data ranks.
    """

    def __init__(self, sharded: Sharded, plans: Plans, pool: Pool, speed: Floats | float = 1.0) -> None:
        """Prepare prices on the pool's links, or on links `speed` times as fast, (n,)."""
        degrees = (plans.tensor, plans.context, plans.expert)
        senders = distinct_rows(sharded.index, *degrees, joined_gpus(plans.gpus, pool))
        self._index, self._speed, self._pool = senders.index, speed, pool
        self._sharded, self._plans = sharded.take(senders.first), plans.take(senders.first)
        self._groups: dict[str, tuple[Rows, RankGroup]] = {}
        self._priced: dict[tuple[str, tuple[Algorithm, ...], float, bytes], Floats] = {}

    def seconds(self, transfer: CollectiveCall) -> Floats:
        """Return the seconds of a collective inside a layer, (n,)."""
        laws = (*collectives.COLLECTIVES[transfer.collective].algorithms.values(),)
        key = (transfer.group, laws, transfer.fanout, transfer.size_bytes.tobytes())
        if key not in self._priced:
            self._priced[key] = self._distinct_seconds(transfer)[self._index] / self._speed
        return self._priced[key]

    def _distinct_seconds(self, transfer: CollectiveCall) -> Floats:
        """Return the seconds of a collective for the distinct plans."""
        pool, seconds = self._pool, np.zeros(len(self._plans))
        if transfer.group not in self._groups:
            self._groups[transfer.group] = self._group(transfer.group)
        rows, group = self._groups[transfer.group]
        size = self._sharded.gather(transfer.size_bytes)[rows]
        if not size.any():
            return seconds
        if transfer.collective == "all_to_all":
            active = collectives.dispatch_s(size, group, pool.intra, pool.inter, transfer.fanout)
        else:
            active = collectives.fastest_collective_s(transfer.collective, size, group, pool.intra, pool.inter)
        seconds[rows] = np.where(size > 0, active, 0.0)
        return seconds

    def _group(self, name: str) -> tuple[Rows, RankGroup]:
        """Return the rows of the distinct plans with several ranks in the named dimension, and their groups."""
        plans, ranks = self._plans, getattr(self._plans, name)
        rows = np.flatnonzero(ranks > 1)
        inner = plans.tensor if name == "context" else np.ones_like(ranks)
        return rows, communication_group(
            ranks[rows].astype(float), inner[rows].astype(float), plans.gpus[rows], self._pool
        )


def block_passes(
    workload: Workload,
    sharded: Sharded,
    plans: Plans,
    pool: Pool,
    priced: KernelSeconds,
    fitted: Constants,
    speed: Floats | float = 1.0,
) -> ModelPasses:
    """Return the passes of a micro-batch through the whole model.

    Args:
        workload: the job.
        sharded: its graph under the plans' shards.
        plans: the plans, (n,).
        pool: the pool.
        priced: seconds of the graph's kernels on the pool's GPU.
        fitted: the constants.
        speed: factor on the speed of all links of each plan, (n,).
    """
    graph, nil = sharded.graph, np.zeros(len(plans))
    passes, exchanges = [], Exchanges(sharded, plans, pool, speed)
    for blocks in (graph.first, graph.layers, graph.last):
        sums = [nil, nil, nil, nil]
        for times in priced.blocks:
            if any(times.block is block for block in blocks):
                layered = blocks is graph.layers
                parts = block_seconds(workload, sharded, plans, times, fitted, exchanges, recomputed=layered)
                sums = [old + new * times.block.repeat for old, new in zip(sums, parts, strict=True)]
        passes.append(Passes(*sums))
    if workload.offloaded_activations and workload.training:
        passes[1] = _wait_for_host(workload, sharded, plans, pool, passes[1], fitted)
    return ModelPasses(*passes)


def _wait_for_host(
    workload: Workload, sharded: Sharded, plans: Plans, pool: Pool, layers: Passes, fitted: Constants
) -> Passes:
    """Return the passes through the layers with the seconds in which they wait for activations to reach the host.

    Activations leave behind the forward pass and come back behind the backward pass.
    """
    moved = workload.offloaded_activations * zoo.kept_bytes(workload, sharded, plans)
    crossing_s = moved / fitted.host_link.bytes_per_s(pool.gpu)
    back_s = np.maximum(crossing_s - layers.backward_s, 0.0)
    away_s = np.maximum(crossing_s - (layers.total_s - layers.backward_s), 0.0)
    return replace(
        layers, communication_s=layers.communication_s + away_s + back_s, backward_s=layers.backward_s + back_s
    )


@dataclass(frozen=True, slots=True)
class MicroBatch(Columns):
    """Seconds of a micro-batch on the slowest stage, by part and as a whole, and on all stages in sequence, (n,)."""

    gpu_s: Floats
    stall_s: Floats
    communication_s: Floats
    backward_s: Floats
    slowest_s: Floats
    all_s: Floats
    spread: Floats
    roofline_s: Floats
    """Seconds of all kernels of all stages at the peak of compute or memory."""


def micro_batch(sharded: Sharded, plans: Plans, priced: KernelSeconds, passes: ModelPasses) -> MicroBatch:
    """Return the seconds of a micro-batch of each plan.

    The slowest stage of a pipeline has its share of the layers and the slower end of the model.
    """
    share = sharded.layer_share(plans)
    first, layers, last = passes.first, passes.layers, passes.last
    heavier = first.total_s > last.total_s

    def slowest(column: str) -> Floats:
        before, inside, after = (getattr(part, column) for part in (first, layers, last))
        ends = np.where(plans.pipeline > 1, np.where(heavier, before, after), before + after)
        return np.asarray(inside * share + ends)

    gpu_s, stall_s, communication_s = slowest("gpu_s"), slowest("stall_s"), slowest("communication_s")
    return MicroBatch(
        gpu_s,
        stall_s,
        communication_s,
        slowest("backward_s"),
        gpu_s + stall_s + communication_s,
        first.total_s + layers.total_s + last.total_s,
        sharded.gather(priced.spread),
        sharded.gather(priced.roofline_s),
    )


def block_seconds(
    workload: Workload,
    sharded: Sharded,
    plans: Plans,
    times: BlockTimes,
    fitted: Constants,
    exchanges: Exchanges,
    *,
    recomputed: bool,
) -> list[Floats]:
    """Return the seconds of a block, (n,) each: GPU, launch stalls, communication, and the whole backward pass.

    Args:
        workload: the job.
        sharded: its graph under the plans' shards.
        plans: the plans, (n,).
        times: kernels of one repetition of the block.
        fitted: the constants.
        exchanges: prices of the block's collectives.
        recomputed: whether the plans' recomputation applies to the block.
    """
    again = np.zeros(len(plans))
    core = np.zeros(len(plans))
    named: dict[str, Floats] = {}
    if recomputed and workload.training:
        again = (plans.checkpointing == _FULL) * zoo.recomputed_layers(workload, sharded, plans)
        core = (plans.checkpointing == _SELECTIVE).astype(float)
        if names_modules(plans.checkpointing).any():
            columns = BY_CODE[plans.checkpointing].T.astype(float)
            named = {name: columns[MODULES.index(name)] for name in times.modules}

    def both_passes(name: str) -> tuple[Floats, Floats]:
        forward = sharded.gather(getattr(times.forward, name))
        backward = sharded.gather(getattr(times.backward, name))
        backward = backward + again * sharded.gather(getattr(times.repeated, name))
        backward = backward + core * sharded.gather(getattr(times.core, name))
        for module, share in named.items():
            backward = backward + share * sharded.gather(getattr(times.modules[module], name))
        return forward, backward

    forward_gpu, backward_gpu = both_passes("gpu_s")
    forward_host, backward_host = both_passes("host_s")
    exchanged = {"forward": np.zeros(len(plans)), "backward": np.zeros(len(plans))}
    for transfer in times.block.collectives:
        if transfer.phase == "backward" and not workload.training:
            continue
        exposed_s = exchanges.seconds(transfer) * exposed_share(workload, transfer, fitted)
        call_s = np.where(exposed_s > 0, fitted.collective_s[launch_host(workload)], 0.0)
        exchanged[transfer.phase] = exchanged[transfer.phase] + transfer.count * exposed_s
        if transfer.phase == "forward":
            repeated = again * repeats_in_full(workload, transfer.name)
            for module in modules_of_exchange(transfer.name) & named.keys():
                repeated = repeated + named[module]
            exchanged["backward"] = exchanged["backward"] + repeated * transfer.count * exposed_s
            forward_host = forward_host + transfer.count * call_s
            backward_host = backward_host + repeated * transfer.count * call_s
        else:
            backward_host = backward_host + transfer.count * call_s
    # The host launches kernels and collectives: a pass takes no less than all of its launches.
    waits = [
        np.maximum(host - gpu - exchanged[phase], 0.0)
        for phase, host, gpu in (("forward", forward_host, forward_gpu), ("backward", backward_host, backward_gpu))
    ]
    return [
        forward_gpu + backward_gpu,
        waits[0] + waits[1],
        exchanged["forward"] + exchanged["backward"],
        backward_gpu + waits[1] + exchanged["backward"],
    ]


def exposed_share(workload: Workload, transfer: CollectiveCall, fitted: Constants) -> float:
    """Return the factor from a collective alone to the part of it inside a layer that computation does not hide.

    Tensor parallelism hides collectives where the framework does so. Context parallelism hides them behind attention.
    Experts exchange beside computation. Only gathers and scatters are cut into pieces and pipelined. So an all-reduce,
    which tensor ranks use without sequence parallelism, hides at most behind the gradient of the weight (Megatron-LM,
    training/arguments.py: tp_comm_overlap needs sequence_parallel; Transformer Engine, module/linear.py: the reduction
    of the input's gradient is asynchronous).
    """
    hidden, overlap = 0.0, frameworks.find_framework(workload).tensor_overlap
    if transfer.group == "expert":
        hidden = fitted.expert_share
    elif transfer.group == "tensor" and overlap == "both" and transfer.collective != "all_reduce":
        hidden = fitted.pipelined_share
    elif transfer.group == "context" or (overlap != "none" and transfer.phase == "backward"):
        hidden = fitted.tensor_share
    return fitted.factor["exchange"] * (1.0 - hidden)


def boundary_seconds(workload: Workload, sharded: Sharded, plans: Plans, pool: Pool) -> Floats:
    """Return the seconds in which activations go to the next stage and gradients come back, (n,).

    They are per micro-batch and virtual stage, and on the critical path of 1F1B.
    """
    if not np.any(plans.pipeline > 1):
        return np.zeros(len(plans))
    inner = (plans.tensor * plans.context * plans.data).astype(float)
    group = communication_group(plans.pipeline.astype(float), inner, plans.gpus, pool)
    size = sharded.gather(sharded.graph.boundary_bytes)
    sent_s = collectives.fastest_collective_s("send_recv", size, group, pool.intra, pool.inter)
    return np.where(plans.pipeline > 1, sent_s * (2.0 if workload.training else 1.0), 0.0)
