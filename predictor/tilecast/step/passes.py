"""Passes of a micro-batch through the blocks of each pipeline stage: computation, launch stalls and exchanges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilecast import collectives, frameworks
from tilecast.collectives import Algorithm, Group
from tilecast.constants import Constants
from tilecast.graph import CollectiveCall
from tilecast.hardware import Pool
from tilecast.spec import CHECKPOINTING, Columns, Floats, Plans, Rows, Workload, distinct
from tilecast.step.blocks import BlockTimes, KernelSeconds, host
from tilecast.step.placement import group_of, joined
from tilecast.zoo import Sharded

_FULL = CHECKPOINTING.index("full")


_SELECTIVE = CHECKPOINTING.index("selective")


@dataclass(frozen=True, slots=True)
class Passes(Columns):
    """Passes of a micro-batch through some blocks, forward and backward, in seconds, (n,)."""

    gpu_s: Floats
    stall_s: Floats
    communication_s: Floats
    backward_s: Floats

    @property
    def total_s(self) -> Floats:
        return self.gpu_s + self.stall_s + self.communication_s


@dataclass(frozen=True, slots=True)
class ModelPasses(Columns):
    """Passes through the blocks before the layers, through all layers, and through the blocks after them, (n,)."""

    first: Passes
    layers: Passes
    last: Passes


class Exchanges:
    """Exchanges of the plans of a table inside layers.

    Each transfer is priced once for all blocks that send the same, and for all plans that send the same. Ranks are
    placed with tensor innermost, then context, data; experts fold over tensor and data ranks.
    """

    def __init__(self, sharded: Sharded, plans: Plans, pool: Pool, speed: Floats | float = 1.0) -> None:
        """Set up prices on the pool's links, or on links `speed` times as fast, (n,)."""
        degrees = (plans.tensor, plans.context, plans.expert)
        senders = distinct(sharded.index, *degrees, joined(plans.gpus, pool))
        self._index, self._speed, self._pool = senders.index, speed, pool
        self._sharded, self._plans = sharded.take(senders.first), plans.take(senders.first)
        self._groups: dict[str, tuple[Rows, Group]] = {}
        self._priced: dict[tuple[str, tuple[Algorithm, ...], float, bytes], Floats] = {}

    def seconds(self, transfer: CollectiveCall) -> Floats:
        """Return the seconds of one transfer inside a layer, (n,)."""
        laws = (*collectives.COLLECTIVES[transfer.collective].algorithms.values(),)
        key = (transfer.group, laws, transfer.fanout, transfer.size_bytes.tobytes())
        if key not in self._priced:
            self._priced[key] = self._distinct_seconds(transfer)[self._index] / self._speed
        return self._priced[key]

    def _distinct_seconds(self, transfer: CollectiveCall) -> Floats:
        pool, seconds = self._pool, np.zeros(len(self._plans))
        if transfer.group not in self._groups:
            self._groups[transfer.group] = self._group(transfer.group)
        rows, group = self._groups[transfer.group]
        size = self._sharded.gather(transfer.size_bytes)[rows]
        if not size.any():
            return seconds
        if transfer.collective == "all_to_all":
            active = collectives.dispatch(size, group, pool.intra, pool.inter, transfer.fanout)
        else:
            active = collectives.seconds(transfer.collective, size, group, pool.intra, pool.inter)
        seconds[rows] = np.where(size > 0, active, 0.0)
        return seconds

    def _group(self, name: str) -> tuple[Rows, Group]:
        """Return the rows that have such a group of several ranks, and their groups."""
        plans, ranks = self._plans, getattr(self._plans, name)
        rows = np.flatnonzero(ranks > 1)
        inner = plans.tensor if name == "context" else np.ones_like(ranks)
        return rows, group_of(ranks[rows].astype(float), inner[rows].astype(float), plans.gpus[rows], self._pool)


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

    `speed`, (n,), is how many times as fast as the pool's the links of each plan are.
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
    return ModelPasses(*passes)


@dataclass(frozen=True, slots=True)
class MicroBatch(Columns):
    """One micro-batch: the slowest stage (its parts, and the whole), and all stages in sequence, in seconds, (n,)."""

    gpu_s: Floats
    stall_s: Floats
    communication_s: Floats
    backward_s: Floats
    slowest_s: Floats
    all_s: Floats
    spread: Floats
    roofline_s: Floats
    """All kernels at the peak of compute or memory, with the stages in sequence."""


def micro_batch(sharded: Sharded, plans: Plans, priced: KernelSeconds, passes: ModelPasses) -> MicroBatch:
    """Return a micro-batch of each plan.

    A stage of a pipeline has a share of the layers, and the slowest one the heavier end of the model.
    """
    share = sharded.layer_share(plans)
    first, layers, last = passes.first, passes.layers, passes.last
    heavier = first.total_s > last.total_s

    def slowest(column: str) -> Floats:
        before, inside, after = (getattr(one, column) for one in (first, layers, last))
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
    """Return the seconds of one repetition, (n,) each: GPU, launch stalls, communication, and whole backward pass."""
    again = np.zeros(len(plans))
    core = np.zeros(len(plans))
    if recomputed and workload.training:
        again = (plans.checkpointing == _FULL).astype(float)
        core = (plans.checkpointing == _SELECTIVE).astype(float)

    def column(get: str) -> tuple[Floats, Floats]:
        forward = sharded.gather(getattr(times.forward, get))
        backward = sharded.gather(getattr(times.backward, get)) + again * forward
        return forward, backward + core * sharded.gather(getattr(times.core, get))

    forward_gpu, backward_gpu = column("gpu_s")
    forward_host, backward_host = column("host_s")
    exchanged = {"forward": np.zeros(len(plans)), "backward": np.zeros(len(plans))}
    for transfer in times.block.collectives:
        if transfer.phase == "backward" and not workload.training:
            continue
        one = exchanges.seconds(transfer) * exposed_share(workload, transfer, fitted)
        call_s = np.where(one > 0, fitted.collective_s[host(workload)], 0.0)
        exchanged[transfer.phase] = exchanged[transfer.phase] + transfer.count * one
        if transfer.phase == "forward":
            exchanged["backward"] = exchanged["backward"] + again * transfer.count * one
            forward_host = forward_host + transfer.count * call_s
            backward_host = backward_host + again * transfer.count * call_s
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
    """Return the factor from a collective alone to the part of a transfer inside a layer that stays visible.

    Tensor parallelism hides transfers where the framework does, context parallelism hides them behind attention, and
    experts exchange beside computation. Only gathers and scatters are cut into pieces and pipelined. So an all-reduce,
    which tensor ranks use without sequence parallelism, hides behind the weight's gradient at most (Megatron-LM,
    training/arguments.py: tp_comm_overlap needs sequence_parallel; Transformer Engine, module/linear.py: the reduction
    of the input's gradient is asynchronous).
    """
    hidden, overlap = 0.0, frameworks.of(workload).tensor_overlap
    if transfer.group == "expert":
        hidden = fitted.expert_share
    elif transfer.group == "tensor" and overlap == "both" and transfer.collective != "all_reduce":
        hidden = fitted.pipelined_share
    elif transfer.group == "context" or (overlap != "none" and transfer.phase == "backward"):
        hidden = fitted.tensor_share
    return fitted.factor["exchange"] * (1.0 - hidden)


def boundary_seconds(workload: Workload, sharded: Sharded, plans: Plans, pool: Pool) -> Floats:
    """Return the seconds in which activations go to the next stage and gradients come back, (n,).

    They are on the critical path of 1F1B, per micro-batch and virtual stage.
    """
    if not np.any(plans.pipeline > 1):
        return np.zeros(len(plans))
    inner = (plans.tensor * plans.context * plans.data).astype(float)
    group = group_of(plans.pipeline.astype(float), inner, plans.gpus, pool)
    size = sharded.gather(sharded.graph.boundary_bytes)
    one = collectives.seconds("send_recv", size, group, pool.intra, pool.inter)
    return np.where(plans.pipeline > 1, one * (2.0 if workload.training else 1.0), 0.0)
