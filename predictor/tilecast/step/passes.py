"""Seconds of the passes of a micro-batch through the model: computation, launch stalls and exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tilecast import collectives, frameworks, zoo
from tilecast.collectives import Algorithm, RankGroup, TokenCopies
from tilecast.constants import Constants
from tilecast.graph import Block, CollectiveCall
from tilecast.hardware import Pool
from tilecast.recomputation import BY_CODE, FULL, MODULES, SELECTIVE, is_module_set
from tilecast.spec import Columns, Floats, Plans, Rows, Workload, distinct_rows
from tilecast.step.blocks import BlockTimes, KernelSeconds, find_launch_mode
from tilecast.step.placement import build_communication_group, classify_by_links
from tilecast.zoo import ShardedGraph
from tilecast.zoo.modules import is_repeated_in_full, list_modules_of_collective
from tilecast.zoo.stages import find_stage_kinds, is_folded_by_plan


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


_PASSES = ("gpu_s", "stall_s", "communication_s", "backward_s")


@dataclass(frozen=True, slots=True)
class ModelPasses(Columns):
    """Passes through three parts of the model: the blocks before the layers, all layers, and the blocks after them."""

    first: Passes
    layers: LayerPasses
    last: Passes


@dataclass(frozen=True, slots=True)
class LayerPasses(Columns):
    """Passes through one repetition of each block in the stack of layers."""

    each: tuple[Passes, ...]
    repeats: tuple[int, ...]

    def take(self, rows: Rows | npt.NDArray[np.bool_] | slice) -> LayerPasses:
        """Return the chosen rows of every block."""
        return LayerPasses(tuple(one.take(rows) for one in self.each), self.repeats)

    def total(self, column: str) -> Floats:
        """Return a column of `Passes`, or its `total_s`, summed over all layers, (n,)."""
        pairs = zip(self.each, self.repeats, strict=True)
        return np.asarray(np.sum([repeat * getattr(one, column) for one, repeat in pairs], axis=0))


class LayerCollectives:
    """Seconds of the collectives that n plans run inside layers.

    The seconds are computed once for all blocks and plans with equal bytes and equal groups. Ranks are placed with
    tensor innermost, then context, then data. Experts are spread over tensor and data ranks. Ranks that share an expert
    are neighbours.
    """

    def __init__(self, sharded: ShardedGraph, plans: Plans, pool: Pool, speed: Floats | float = 1.0) -> None:
        """Prepare to compute the seconds of the plans' collectives on the pool's links.

        All seconds are divided by `speed`: one number, or one for each plan, (n,).
        """
        degrees = (plans.tensor, plans.context, plans.expert, plans.expert_tensor)
        senders = distinct_rows(sharded.index, *degrees, classify_by_links(plans.gpus, pool))
        self._index, self._speed, self._pool = senders.index, speed, pool
        self._sharded, self._plans = sharded.take(senders.first), plans.take(senders.first)
        self._groups: dict[str, tuple[Rows, RankGroup]] = {}
        self._priced: dict[tuple[str, tuple[Algorithm, ...], TokenCopies, str, bytes], Floats] = {}

    def seconds(self, transfer: CollectiveCall) -> Floats:
        """Return the seconds of a collective inside a layer, (n,)."""
        laws = (*collectives.COLLECTIVES[transfer.collective].algorithms.values(),)
        copies = TokenCopies(transfer.fanout, transfer.groups, transfer.top_groups)
        key = (transfer.group, laws, copies, transfer.dispatch, transfer.size_bytes.tobytes())
        if key not in self._priced:
            self._priced[key] = self._distinct_seconds(transfer, copies)[self._index] / self._speed
        return self._priced[key]

    def _distinct_seconds(self, transfer: CollectiveCall, copies: TokenCopies) -> Floats:
        """Return the seconds of a collective for each of the k distinct plans found in `__init__`, (k,)."""
        pool, seconds = self._pool, np.zeros(len(self._plans))
        if transfer.group not in self._groups:
            self._groups[transfer.group] = self._group(transfer.group)
        rows, group = self._groups[transfer.group]
        size = self._sharded.expand_to_plans(transfer.size_bytes)[rows]
        if not size.any():
            return seconds
        if transfer.collective == "all_to_all":
            active = collectives.dispatch_s(size, group, pool.intra, pool.inter, copies, transfer.dispatch)
        else:
            active = collectives.fastest_collective_s(transfer.collective, size, group, pool.intra, pool.inter)
        seconds[rows] = np.where(size > 0, active, 0.0)
        return seconds

    def _group(self, name: str) -> tuple[Rows, RankGroup]:
        """Return the distinct plans with more than one rank in a dimension, as rows, and the rank group of each."""
        plans, ranks = self._plans, getattr(self._plans, name)
        rows = np.flatnonzero(ranks > 1)
        inner = {"context": plans.tensor, "expert": plans.expert_tensor}.get(name, np.ones_like(ranks))
        return rows, build_communication_group(
            ranks[rows].astype(float), inner[rows].astype(float), plans.gpus[rows], self._pool
        )


def block_passes(
    workload: Workload,
    sharded: ShardedGraph,
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
    graph, exchanges = sharded.graph, LayerCollectives(sharded, plans, pool, speed)
    times_of = {id(times.block): times for times in priced.blocks}

    def compute_passes(block: Block) -> Passes:
        recomputed = any(block is layer for layer in graph.layers)
        return Passes(
            *block_seconds(workload, sharded, plans, times_of[id(block)], fitted, exchanges, recomputed=recomputed)
        )

    def sum_passes(blocks: Sequence[Block]) -> Passes:
        sums = [np.zeros(len(plans))] * 4
        for block in blocks:
            one = compute_passes(block)
            sums = [old + getattr(one, name) * block.repeat for old, name in zip(sums, _PASSES, strict=True)]
        return Passes(*sums)

    layers = [compute_passes(block) for block in graph.layers] if graph.has_stages else [sum_passes(graph.layers)]
    repeats = [block.repeat for block in graph.layers] if graph.has_stages else [1]
    if workload.offloaded_activations and workload.training:
        kept = zoo.list_layer_saved_bytes(workload, sharded, plans)
        if not graph.has_stages:
            kept = [np.sum([block.repeat * one for block, one in zip(graph.layers, kept, strict=True)], axis=0)]
        layers = [_wait_for_host(workload, one, held, pool, fitted) for one, held in zip(layers, kept, strict=True)]
    return ModelPasses(sum_passes(graph.first), LayerPasses((*layers,), (*repeats,)), sum_passes(graph.last))


def _wait_for_host(workload: Workload, layers: Passes, kept: Floats, pool: Pool, fitted: Constants) -> Passes:
    """Return the passes of some layers with the seconds in which they wait for offloaded activations, (n,).

    Activations move to the host during the forward pass and back during the backward pass. `kept` has the bytes of
    activations that the layers save for the backward pass, (n,). The job offloads a share of them.
    """
    crossing_s = workload.offloaded_activations * kept / fitted.host_link.bytes_per_s(pool.gpu)
    back_s = np.maximum(crossing_s - layers.backward_s, 0.0)
    away_s = np.maximum(crossing_s - (layers.total_s - layers.backward_s), 0.0)
    return replace(
        layers, communication_s=layers.communication_s + away_s + back_s, backward_s=layers.backward_s + back_s
    )


@dataclass(frozen=True, slots=True)
class StageSeconds(Columns):
    """Seconds of a micro-batch on the slowest stage, and on all stages in sequence, (n,).

    `MicroBatch` has the other columns.
    """

    communication_s: Floats
    backward_s: Floats
    slowest_s: Floats
    all_s: Floats


@dataclass(frozen=True, slots=True)
class MicroBatch(StageSeconds):
    """Seconds of a micro-batch on the slowest stage, by part and as a whole, and on all stages in sequence, (n,)."""

    gpu_s: Floats
    stall_s: Floats
    spread: Floats
    roofline_s: Floats
    """Seconds of all kernels of all stages at peak compute or memory bandwidth."""

    def stage_seconds(self) -> StageSeconds:
        """Return the columns of `StageSeconds` alone."""
        return StageSeconds(self.communication_s, self.backward_s, self.slowest_s, self.all_s)


def compute_micro_batch(sharded: ShardedGraph, plans: Plans, priced: KernelSeconds, passes: ModelPasses) -> MicroBatch:
    """Return the seconds of a micro-batch of each plan.

    A pipeline stage runs its layers. The first stage also runs the blocks before the layers, and the last the blocks
    after.
    """
    first, layers, last = passes.first, passes.layers, passes.last
    graph = sharded.graph
    kinds = find_stage_kinds(graph, plans.pipeline, is_folded_by_plan(graph, plans)) if graph.has_stages else None

    def select_stages(column: str) -> Floats:
        """Return a column of the passes through each of K different stages, (K, n)."""
        before, after = getattr(first, column), getattr(last, column)
        if kinds is not None:
            inside = kinds.sum_layers([getattr(one, column) for one in layers.each])
            return kinds.add_ends(before, after, inside)
        heavier = first.total_s > last.total_s
        ends = np.where(plans.pipeline > 1, np.where(heavier, before, after), before + after)
        return np.asarray(layers.total(column) * sharded.largest_layer_fraction(plans) + ends)[None]

    columns = [select_stages(name) for name in _PASSES]
    slowest = np.argmax(columns[0] + columns[1] + columns[2], axis=0)[None]
    gpu_s, stall_s, communication_s, backward_s = (np.take_along_axis(column, slowest, axis=0)[0] for column in columns)
    return MicroBatch(
        communication_s,
        backward_s,
        gpu_s + stall_s + communication_s,
        first.total_s + layers.total("total_s") + last.total_s,
        gpu_s,
        stall_s,
        sharded.expand_to_plans(priced.spread),
        sharded.expand_to_plans(priced.roofline_s),
    )


def block_seconds(
    workload: Workload,
    sharded: ShardedGraph,
    plans: Plans,
    times: BlockTimes,
    fitted: Constants,
    exchanges: LayerCollectives,
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
        exchanges: seconds of the block's collectives.
        recomputed: whether the plans' recomputation applies to the block.
    """
    again = np.zeros(len(plans))
    core = np.zeros(len(plans))
    named: dict[str, Floats] = {}
    if recomputed and workload.training:
        again = (plans.checkpointing == FULL) * zoo.recomputed_layer_fraction(workload, sharded, plans)
        core = (plans.checkpointing == SELECTIVE).astype(float)
        if is_module_set(plans.checkpointing).any():
            columns = BY_CODE[plans.checkpointing].T.astype(float)
            named = {name: columns[MODULES.index(name)] for name in times.modules}

    def both_passes(name: str) -> tuple[Floats, Floats]:
        forward = sharded.expand_to_plans(getattr(times.forward, name))
        backward = sharded.expand_to_plans(getattr(times.backward, name))
        backward = backward + again * sharded.expand_to_plans(getattr(times.repeated, name))
        backward = backward + core * sharded.expand_to_plans(getattr(times.core, name))
        for module, share in named.items():
            backward = backward + share * sharded.expand_to_plans(getattr(times.modules[module], name))
        return forward, backward

    forward_gpu, backward_gpu = both_passes("gpu_s")
    forward_host, backward_host = both_passes("host_s")
    exchanged = {"forward": np.zeros(len(plans)), "backward": np.zeros(len(plans))}
    dispatched = {"forward": np.zeros(len(plans)), "backward": np.zeros(len(plans))}
    overlaps_experts = frameworks.expert_overlap(workload) == "microBatch"
    halves = times.shared_s if frameworks.expert_overlap(workload) == "sharedExpert" else {}
    shared_s = {half: sharded.expand_to_plans(seconds) for half, seconds in halves.items()}
    for transfer in times.block.collectives:
        if transfer.phase == "backward" and not workload.training:
            continue
        is_beside = overlaps_experts and transfer.group in ("expert", "expert_tensor")
        seconds = exchanges.seconds(transfer)
        exposed_s = seconds * exposed_fraction(workload, transfer, fitted)
        call_s = np.where(exposed_s > 0, fitted.collective_s[find_launch_mode(workload)], 0.0)
        if is_beside:
            exposed_s = np.zeros(len(plans))
            sent_s = transfer.count * fitted.factor["exchange"] * seconds
            dispatched[transfer.phase] = dispatched[transfer.phase] + sent_s
        if (beside_s := shared_s.get((transfer.phase, transfer.name))) is not None:
            # Each half of the shared MLP runs beside one exchange, which takes multiprocessors from it.
            exposed_s = exposed_s - (1.0 - fitted.dispatch_share) * np.minimum(exposed_s, beside_s)
        exchanged[transfer.phase] = exchanged[transfer.phase] + transfer.count * exposed_s
        if transfer.phase == "forward":
            repeated = again
            for module in list_modules_of_collective(transfer.name) & named.keys():
                repeated = repeated + named[module]
            repeated = repeated * is_repeated_in_full(workload, transfer.name)
            exchanged["backward"] = exchanged["backward"] + repeated * transfer.count * exposed_s
            if is_beside:
                dispatched["backward"] = dispatched["backward"] + repeated * sent_s
            forward_host = forward_host + transfer.count * call_s
            backward_host = backward_host + repeated * transfer.count * call_s
        else:
            backward_host = backward_host + transfer.count * call_s
    if overlaps_experts:
        for phase, gpu in (("forward", forward_gpu), ("backward", backward_gpu)):
            hidden_s = np.minimum(dispatched[phase], gpu)
            # The exchange takes multiprocessors from the computation beside it.
            lost_s = fitted.dispatch_share * hidden_s
            exchanged[phase] = exchanged[phase] + dispatched[phase] - hidden_s + lost_s
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


def exposed_fraction(workload: Workload, transfer: CollectiveCall, fitted: Constants) -> float:
    """Return the factor from a collective's seconds to its exposed seconds, which computation does not hide.

    Tensor parallelism hides collectives if the framework does so. Context parallelism hides them behind attention.
    Expert exchanges run beside computation. If they run beside another micro-batch, the factor is a lower limit, which
    `block_seconds` raises if the exchange takes longer than the computation. If they run beside the shared MLP, it is
    an upper limit, which `block_seconds` lowers by what that hides. Only gathers and scatters are cut into
    chunks and pipelined. An all-reduce, which tensor ranks use without sequence parallelism, hides at most behind the
    gradient of the weight (Megatron-LM, training/arguments.py: tp_comm_overlap needs sequence_parallel; Transformer
    Engine, module/linear.py: the reduction of the input's gradient is asynchronous).
    """
    hidden, overlap = 0.0, frameworks.find_framework(workload).tensor_overlap
    if transfer.group in ("expert", "expert_tensor"):
        is_beside = frameworks.expert_overlap(workload) == "microBatch"
        hidden = 1.0 - fitted.dispatch_share if is_beside else fitted.expert_share
    elif transfer.group == "tensor" and overlap == "both" and transfer.collective != "all_reduce":
        hidden = fitted.pipelined_share
    elif transfer.group == "context" or (overlap != "none" and transfer.phase == "backward"):
        hidden = fitted.tensor_share
    return fitted.factor["exchange"] * (1.0 - hidden)


def visible_send_seconds(
    workload: Workload, plans: Plans, micro: StageSeconds, sends_s: Floats, share: float
) -> Floats:
    """Return the seconds by which a micro-batch's sends lengthen a step between warm-up and cool-down, (n,).

    With interleaved stages, some frameworks send the activations of one virtual stage while they compute the next one.
    Computation hides at most `share` of the sends.
    """
    if not frameworks.find_framework(workload).overlaps_sends:
        return sends_s
    hidden_s = np.minimum(share * sends_s, micro.slowest_s)
    return np.where(plans.virtual_stages > 1, sends_s - hidden_s, sends_s)


def boundary_seconds(workload: Workload, sharded: ShardedGraph, plans: Plans, pool: Pool) -> Floats:
    """Return the seconds to send activations to the next stage and gradients back, (n,).

    The seconds are per micro-batch and virtual stage. `visible_send_seconds` says how much of them computation hides.
    """
    if not np.any(plans.pipeline > 1):
        return np.zeros(len(plans))
    inner = (plans.tensor * plans.context * plans.data).astype(float)
    group = build_communication_group(plans.pipeline.astype(float), inner, plans.gpus, pool)
    size = sharded.expand_to_plans(sharded.graph.boundary_bytes)
    sent_s = collectives.fastest_collective_s("send_recv", size, group, pool.intra, pool.inter)
    return np.where(plans.pipeline > 1, sent_s * (2.0 if workload.training else 1.0), 0.0)
