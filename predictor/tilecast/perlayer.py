"""A strategy for each layer: degrees, ZeRO stage and recomputation where layers, or the room for them, are unlike.

All layers run on the same GPUs and see the same micro-batches, so a strategy of a layer is a plan without a pipeline,
and its price is `step`'s and `memory`'s of that block alone. Neighbours pay for each other in two ways:

* Between layouts activations move: where the tensor or context degree changes, so that t ranks and then u hold the same
  samples, the least common multiple of t and u ranks exchange the layer's input forward, its gradient backward.
* What a layer exchanges among its replicas hides behind its neighbour: its weights are gathered while the layer
  before runs forward, its gradients are reduced while that layer runs backward. The first layer's hide behind nothing.

`tilecast.chain` finds the best path. A plan that is the same everywhere is a path too, and what it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from tilecast import chain, collectives, constants, memory, models, overlap, search
from tilecast.chain import Chain
from tilecast.constants import Constants
from tilecast.graph import Block, Graph
from tilecast.hardware import Pool
from tilecast.models import Sharded
from tilecast.search import Dimension, Limits
from tilecast.spec import CHECKPOINTING, Floats, Ints, Plan, Plans, SpecError, Workload
from tilecast.step import blocks, passes, placement, replicas, weights
from tilecast.step.blocks import KernelSeconds

DIMENSIONS: Mapping[Dimension, tuple[str, ...]] = {
    "recomputation": ("checkpointing",),
    "zero": ("zero_stage",),
    "tensor": ("data", "tensor", "context", "sequence_parallel", "micro_batch"),
    "expert": ("expert",),
}
"""What may differ from layer to layer, and the columns of `Plans` that it moves. The number of micro-batches never
does."""

_NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks with one strategy. `layers` counts from 1 and is empty for a block that is no layer."""

    name: str
    layers: tuple[int, ...]
    plan: Plan


@dataclass(frozen=True, slots=True)
class PerLayer:
    """The best strategy of each layer on so many GPUs of a pool. Seconds of a step, bytes of a GPU."""

    pool: Pool
    gpus: int
    groups: tuple[Group, ...]
    step_s: float
    memory_bytes: float
    memory_available_bytes: float
    uniform: Plan | None
    """The best plan that is the same everywhere, priced alike; None where none fits."""
    uniform_s: float | None
    resharding_s: float
    """Seconds of the step in which activations move between layouts."""
    bound_s: float
    """No choice that fits takes less: within `TIDY` of `step_s` where that is proved."""
    varies: tuple[Dimension, ...]
    """What is not the same everywhere."""

    @property
    def saving(self) -> float | None:
        """Share of the uniform plan's step that is saved; None where no uniform plan fits."""
        return None if self.uniform_s is None else 1 - self.step_s / self.uniform_s

    @property
    def frameworks(self) -> tuple[str, ...]:
        """The frameworks that can vary all that varies."""
        return tuple(name for name, able in search.FRAMEWORKS.items() if set(self.varies) <= set(able.per_layer))


@dataclass(frozen=True, slots=True)
class Costs:
    """Blocks (K, in the graph's order) under strategies (S), columns (K, S). Seconds of a step where not said
    otherwise."""

    alone_s: Floats
    """What does not depend on neighbours."""
    forward_s: Floats
    backward_s: Floats
    """One micro-batch: what a neighbour's exchanges hide behind."""
    once: tuple[Floats, Floats]
    """Exchanges once a step, behind the forward and behind the backward pass."""
    each: tuple[Floats, Floats]
    """Exchanges of one micro-batch, likewise."""
    moved_bytes: Floats
    """What a rank holds of the input, and of what else it reads."""
    held_bytes: Floats
    working_bytes: Floats

    def rooms(self, block: int, *, pairs: bool = False) -> tuple[Floats, Floats]:
        """The passes of a block, (S,), or as a column, (S, 1)."""
        forward, backward = self.forward_s[block], self.backward_s[block]
        return (forward[:, None], backward[:, None]) if pairs else (forward, backward)

    def take(self, rows: Ints) -> Costs:
        """The chosen strategies."""
        return Costs(
            self.alone_s[:, rows], self.forward_s[:, rows], self.backward_s[:, rows],
            (self.once[0][:, rows], self.once[1][:, rows]), (self.each[0][:, rows], self.each[1][:, rows]),
            self.moved_bytes[:, rows], self.held_bytes[:, rows], self.working_bytes[:, rows],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """The strategies (S) that one plan may mix, and the chain of the model's blocks (N) under them. `moving` is the
    part of the changes in which activations move, (N - 1, S, S)."""

    plans: Plans
    chain: Chain
    moving: Floats


def best(
    workload: Workload,
    pool: Pool,
    gpus: int,
    limits: Limits = _NO_LIMITS,
    vary: tuple[Dimension, ...] | None = None,
) -> PerLayer | None:
    """The best strategy of each layer on exactly so many GPUs; None if nothing fits.

    Args:
        workload: the job.
        pool: where it runs.
        gpus: how many GPUs of the pool.
        limits: bounds of the strategies, as of plans.
        vary: what may differ between layers; if absent, what the job's framework varies, and without one all.

    Raises:
        SpecError: the workload does not train, or offloads; the pool's GPU cannot run its precision.
    """
    found: tuple[float, Family, Ints] | None = None
    uniform: tuple[float, Plan] | None = None
    limit = bound = np.inf
    graph, order = None, np.zeros(0, np.int64)
    every = Families.of(workload, pool, gpus, limits, vary)
    if every is None:
        return None
    graph, order = every.graph, every.order
    seconds = every.uniform_s()
    for rows in sorted(every.rows(), key=lambda rows: float(seconds[rows].min())):
        family = every.family(every.kept(rows, seconds))
        row, same_s = cheapest_uniform(family.chain)
        if row is not None and (uniform is None or same_s < uniform[0]):
            uniform = same_s, family.plans.row(row)
        for part in _tied(workload, graph, order, family):
            path = chain.cheapest(part, below=limit)
            if path is not None:
                bound, limit = min(bound, path.bound), path.cost
                found = path.cost, family, _tidied(part, order, path.strategies)
    if found is None:
        return None
    _, family, used = found
    cost_s, held_bytes = chain.price(family.chain, used)
    links = np.arange(len(used) - 1)
    groups = _groups(graph, order, family.plans, used)
    fixed_s = weights.once_seconds(workload, graph, constants.shipped())
    available = memory.usable_bytes(pool.gpu)
    return PerLayer(
        pool=pool,
        gpus=gpus,
        groups=groups,
        step_s=cost_s + fixed_s,
        memory_bytes=held_bytes + available - family.chain.budget,
        memory_available_bytes=available,
        uniform=uniform[1] if uniform else None,
        uniform_s=uniform[0] + fixed_s if uniform else None,
        resharding_s=float(family.moving[links, used[:-1], used[1:]].sum()),
        bound_s=bound + fixed_s,
        varies=_varies(groups),
    )


MOST_STRATEGIES = 32
"""Strategies that one plan may mix; of more, those that are fastest everywhere, and the leanest."""


@dataclass(frozen=True, slots=True)
class Families:
    """Every strategy (S) on so many GPUs, and which of them one plan may mix."""

    workload: Workload
    pool: Pool
    graph: Graph
    order: Ints
    """The blocks' numbers in the model's order, (N,)."""
    plans: Plans
    costs: Costs
    fitted: Constants
    vary: tuple[Dimension, ...]

    @classmethod
    def of(
        cls, workload: Workload, pool: Pool, gpus: int, limits: Limits, vary: tuple[Dimension, ...] | None
    ) -> Families | None:
        """None where there is nothing to choose.

        Raises:
            SpecError: as `best`.
        """
        if not workload.training:
            raise SpecError("spec.workload", "strategies per layer are for training", "price it without them")
        if workload.offload != "none":
            raise SpecError("spec.training.offload", "is not priced per layer", "price it without, or leave it out")
        if vary is None:
            named = workload.framework
            vary = tuple(DIMENSIONS) if named is None else search.abilities(named).per_layer
        plans = search.enumerate_plans(workload, pool, replace(limits, gpus=gpus))
        plans = plans.take(plans.pipeline == 1) if len(plans) else plans
        if not len(plans):
            return None
        fitted = constants.shipped()
        sharded = models.shard(workload, plans)
        graph = sharded.graph
        order = np.array([_number(graph.blocks, block) for block in graph.sequence()])
        if len(order) < 2:
            return None  # one block: no neighbour to differ from, or to hide behind
        priced = blocks.kernel_seconds(workload, sharded, pool.gpu, fitted)
        costs = block_costs(workload, sharded, plans, pool, priced, fitted)
        return cls(workload, pool, graph, order, plans, costs, fitted, vary)

    def rows(self) -> Iterator[Ints]:
        """The strategies of each family: those that differ in what may vary, and use the same kinds of groups."""
        fixed = [column for dimension in DIMENSIONS if dimension not in self.vary for column in DIMENSIONS[dimension]]
        key = np.column_stack([getattr(self.plans, column) for column in ("gradient_accumulation", *fixed)])
        used = np.column_stack([getattr(self.plans, name) > 1 for name in _COMMUNICATING])
        for value in np.unique(key, axis=0):
            same = (key == value).all(axis=1)
            # Communicators take memory: every set of dimensions that may have them is a family of its own.
            for may in product((False, True), repeat=len(_COMMUNICATING)):
                rows = np.flatnonzero(same & ~(used & ~np.array(may)).any(axis=1))
                if len(rows) and (used[rows].any(axis=0) == may).all():
                    yield rows

    def uniform_s(self) -> Floats:
        """Seconds of each strategy everywhere, whether it fits or not, (S,)."""
        workload, plans, costs, order = self.workload, self.plans, self.costs, self.order
        pairs, counts = np.unique(np.column_stack([order[:-1], order[1:]]), axis=0, return_counts=True)
        total = costs.alone_s[order].sum(axis=0) + _exposed(
            workload, plans, costs, None, int(order[0]), self.pool, self.fitted
        )
        for (one, other), count in zip(pairs.tolist(), counts.tolist(), strict=True):
            total = total + count * _exposed(workload, plans, costs, costs.rooms(one), other, self.pool, self.fitted)
        return np.asarray(total)

    def kept(self, rows: Ints, seconds: Floats) -> Ints:
        """Those of a family that are worth a place in the chain: the fastest everywhere, and the leanest."""
        if len(rows) <= MOST_STRATEGIES:
            return rows
        fast = rows[np.argsort(seconds[rows], kind="stable")][: MOST_STRATEGIES - 1]
        held = self.costs.held_bytes[self.order].sum(axis=0) + self.costs.working_bytes.max(axis=0)
        return np.unique(np.append(fast, rows[held[rows].argmin()]))

    def family(self, rows: Ints) -> Family:
        """The chain of the model's blocks under these strategies."""
        return _family(self.workload, self.plans.take(rows), self.costs.take(rows), self.order, self.pool, self.fitted)


_COMMUNICATING = ("data", "tensor", "context", "expert")


def cheapest_uniform(one: Chain) -> tuple[int | None, float]:
    """The cheapest strategy that fits everywhere, and its seconds; None if none does."""
    seconds = one.cost.sum(axis=0) + np.diagonal(one.change, axis1=1, axis2=2).sum(axis=0)
    held = one.memory.sum(axis=0) + one.working.max(axis=0)
    seconds = np.where(held <= one.budget, seconds, np.inf)
    row = int(seconds.argmin())
    return (row if np.isfinite(seconds[row]) else None), float(seconds[row])


def block_costs(
    workload: Workload, sharded: Sharded, plans: Plans, pool: Pool, priced: KernelSeconds, fitted: Constants
) -> Costs:
    """Each block of the graph, once, under each plan: `step`'s and `memory`'s prices of a graph of that block alone."""
    graph = sharded.graph
    repeats = plans.gradient_accumulation
    straggle = replicas.straggle(plans, fitted)
    copied_bytes_per_s, reshards = (
        weights.copied_bytes_per_s(pool.gpu, fitted),
        weights.reshards_weights(workload, plans),
    )
    one_bucket, ones, nil = overlap.Caps.whole(len(plans)), np.ones(len(plans)), np.zeros(len(plans))
    rows = []
    for times in priced.blocks:
        is_layer, alone = _alone(sharded, times.block)
        gpu_s, stall_s, exchange_s, backward_s = passes.block_seconds(
            workload, alone, plans, pool, times, fitted, recomputed=is_layer
        )
        update_s = weights.optimizer_seconds(workload, alone, plans, pool.gpu, fitted)
        whole = weights.Held.of(workload, alone, plans)
        copied_s = weights.copied_seconds(workload, whole, plans, copied_bytes_per_s)
        sync = replicas.sync_seconds(workload, alone, whole, plans, pool, one_bucket, ones, fitted)
        active = (plans.replicas > 1) & (alone.stage("parameters", plans) > 0)
        stage = np.where(active, plans.zero_stage, -1)
        bill = memory.footprint(workload, alone, plans, pool.gpu)
        inputs = times.block.activation_bytes[CHECKPOINTING.index("full")] if is_layer else graph.boundary_bytes
        rows.append((
            repeats * ((gpu_s + copied_s + exchange_s) * straggle + stall_s) + update_s,
            gpu_s + stall_s + exchange_s - backward_s,
            backward_s,
            np.where((stage == 1) | ((stage == 2) & ~reshards), sync.updated_s, nil),
            np.select([stage == 0, stage == 1], [sync.reduce_s, sync.scatter_s], nil),
            np.where((stage == 3) | ((stage == 2) & reshards), sync.gather_s, nil),
            np.select([stage == 2, stage == 3], [sync.scatter_s, sync.gather_s + sync.scatter_s], nil),
            sharded.gather(inputs + times.block.remembered_bytes),
            bill.parameters + bill.gradients + bill.optimizer + bill.activations * (1 + memory.FRAGMENTATION),
            bill.working * (1 + memory.FRAGMENTATION) + bill.buffers,
        ))  # fmt: skip
    alone_s, forward_s, backward_s, *exchanged, moved, held, working = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    once, each = (exchanged[0], exchanged[1]), (exchanged[2], exchanged[3])
    return Costs(alone_s, forward_s, backward_s, once, each, moved, held, working)


def _family(workload: Workload, plans: Plans, costs: Costs, order: Ints, pool: Pool, fitted: Constants) -> Family:
    straggle = replicas.straggle(plans, fitted)
    pairs, where = np.unique(np.column_stack([order[:-1], order[1:]]), axis=0, return_inverse=True)
    exposed = [
        _exposed(workload, plans, costs, costs.rooms(one, pairs=True), other, pool, fitted)
        for one, other in pairs.tolist()
    ]
    moving = [_resharding(plans, costs.moved_bytes[other], pool) * straggle for _, other in pairs]
    shape = (0, len(plans), len(plans))
    moves = np.array(moving).reshape(-1, *shape[1:])[where.ravel()]
    change = np.array(exposed).reshape(-1, *shape[1:])[where.ravel()] + moves
    cost = costs.alone_s[order].copy()
    cost[0] += _exposed(workload, plans, costs, None, int(order[0]), pool, fitted)
    budget = memory.usable_bytes(pool.gpu) - memory.shared_context_bytes(workload, plans, pool.gpu)
    whole = Chain(cost, change, costs.held_bytes[order], costs.working_bytes[order], budget)
    return Family(plans, whole, moves)


def _exposed(
    workload: Workload,
    plans: Plans,
    costs: Costs,
    rooms: tuple[Floats, Floats] | None,
    block: int,
    pool: Pool,
    fitted: Constants,
) -> Floats:
    """Seconds of a step that a block's exchanges add behind the block before it (none: behind nothing): what does not
    hide, and what hiding slows down. `rooms` are the passes of the block before, (S,) for the same strategies or (S, 1)
    for every pair of strategies; the result is of the shape they broadcast to with (S,)."""
    share = float(overlap.hides(workload))
    slowdown = fitted.slowdown * replicas.contention(pool)
    total = np.zeros(len(plans))
    for index in (0, 1):
        room = 0.0 if rooms is None else rooms[index] * share
        for times, busy in ((1, costs.once[index][block]), (plans.gradient_accumulation, costs.each[index][block])):
            visible = np.maximum(busy - room, 0.0)
            total = total + times * (visible + slowdown * (busy - visible))
    return np.asarray(total * replicas.straggle(plans, fitted))


def _resharding(plans: Plans, moved_bytes: Floats, pool: Pool) -> Floats:
    """Seconds of a step in which a block's input, and backward its gradient, move from the layout of the strategy
    before (row) to its own (column), (S, S).

    Spread over all ranks they are exchanged where the tensor or context degree changes. Where tensor ranks hold them
    whole (no sequence parallelism) they are gathered besides: forward on the way in, the gradient backward on the way
    out."""
    count = len(plans)
    before, after = np.repeat(np.arange(count), count), np.tile(np.arange(count), count)
    tensor = plans.tensor.astype(float)
    whole = (plans.tensor > 1) & (plans.sequence_parallel == 0)
    spread_bytes = (moved_bytes / np.where(whole, tensor, 1.0))[after]
    degree = (plans.tensor[before] != plans.tensor[after]) | (plans.context[before] != plans.context[after])
    differ = degree | (whole[before] != whole[after])

    def one(collective: str, ranks: Floats, size: Floats) -> Floats:
        group = placement.group_of(ranks, np.ones(count * count), plans.take(after), pool)
        return collectives.seconds(collective, size, group, pool.intra, pool.inter)

    holders = plans.tensor * plans.context
    ranks = np.lcm(holders[before], holders[after]).astype(float)
    seconds = np.where(degree, 2 * one("all_to_all", ranks, spread_bytes), 0.0)
    for end in (before, after):
        gathered = one("all_gather", tensor[end], spread_bytes * tensor[end])
        seconds = seconds + np.where(differ & whole[end], gathered, 0.0)
    return np.asarray(seconds * plans.gradient_accumulation[after], float).reshape(count, count)


def _tied(workload: Workload, graph: Graph, order: Ints, family: Family) -> Iterator[Chain]:
    """The chain; where embedding and head share their weights, once for each layout that both may have."""
    model = workload.model
    ends = np.isin(order, [_number(graph.blocks, block) for block in (*graph.first, *graph.last)])
    if not (model.vocab and model.tied_embeddings and graph.first and graph.last) or "classes" in model.extra:
        yield family.chain
        return
    layouts = np.column_stack([family.plans.tensor, family.plans.zero_stage])
    for layout in np.unique(layouts, axis=0):
        other = (layouts != layout).any(axis=1)
        yield replace(family.chain, cost=np.where(ends[:, None] & other, np.inf, family.chain.cost))


TIDY = 1e-4
"""Share of the step that equal strategies standing side by side may cost."""


def _tidied(one: Chain, order: Ints, used: Ints) -> Ints:
    """The same strategies, those of each run of equal blocks side by side where that costs next to nothing."""
    most = chain.price(one, used)[0] * (1 + TIDY)
    edges = [0, *(np.flatnonzero(np.diff(order)) + 1).tolist(), len(order)]
    for start, end in pairwise(edges):
        part = np.sort(used[start:end])
        trials = [np.concatenate([used[:start], wanted, used[end:]]) for wanted in (part, part[::-1])]
        priced = [chain.price(one, trial) for trial in trials]
        tidy = int(np.argmin([cost for cost, _ in priced]))
        if priced[tidy][0] <= most and priced[tidy][1] <= one.budget:
            used = trials[tidy]
    return used


def _groups(graph: Graph, order: Ints, plans: Plans, used: Ints) -> tuple[Group, ...]:
    found: dict[tuple[str, Plan], list[int]] = {}
    before = sum(block.repeat for block in graph.first)
    depth = sum(block.repeat for block in graph.layers)
    for link, (number, row) in enumerate(zip(order, used, strict=True)):
        plan = plans.row(int(row))
        if before <= link < before + depth:
            found.setdefault(("layers", plan), []).append(link - before + 1)
        else:  # nothing is recomputed outside the layers
            found.setdefault((graph.blocks[number].name, replace(plan, checkpointing="none")), [])
    return tuple(Group(name, tuple(layers), plan) for (name, plan), layers in found.items())


def _varies(groups: tuple[Group, ...]) -> tuple[Dimension, ...]:
    def differ(columns: tuple[str, ...], among: tuple[Group, ...]) -> bool:
        return len({tuple(getattr(group.plan, column) for column in columns) for group in among}) > 1

    layers = tuple(group for group in groups if group.layers)
    return tuple(
        dimension
        for dimension, columns in DIMENSIONS.items()
        if differ(columns, layers if dimension in ("recomputation", "expert") else groups)
    )


def _alone(sharded: Sharded, block: Block) -> tuple[bool, Sharded]:
    """Whether a block is a layer, and the graph of that block once and nothing else."""
    is_layer = _number(sharded.graph.layers, block) >= 0
    one = (replace(block, repeat=1, positions=()),)
    layers, last = (one, ()) if is_layer else ((), one)
    return is_layer, Sharded(replace(sharded.graph, first=(), layers=layers, last=last, stages=None), sharded.index)


def _number(blocks: tuple[Block, ...], block: Block) -> int:
    """The place of this very block; -1 where it is not among them."""
    return next((index for index, other in enumerate(blocks) if other is block), -1)


@dataclass(frozen=True, slots=True)
class Stages:
    """A pipeline cut where its stages cost most alike. `layers` counts those of each stage; `even_s` is the step of the
    cut with equally many layers, `step_s` of this one, both priced alike."""

    plan: Plan
    layers: tuple[int, ...]
    step_s: float
    even_s: float


def stages(workload: Workload, pool: Pool, plan: Plan) -> Stages | None:
    """The cut of a pipeline's layers whose costliest stage costs least, of those that fit.

    The first stage holds the embedding and the last one the head, and stage k of p keeps min(m, p - k) of m
    micro-batches. With T the costliest stage, the step is (m - 1) T + the sum of all, which no cut changes.

    Returns:
        None where nothing can be cut: one stage, interleaved stages, or nothing that fits.
    """
    if plan.pipeline == 1 or plan.virtual_stages > 1 or not workload.training:
        return None
    plans, whole = Plans.of(plan), Plans.of(replace(plan, pipeline=1))
    sharded, fitted = models.shard(workload, plans), constants.shipped()
    priced = blocks.kernel_seconds(workload, sharded, pool.gpu, fitted)
    graph = sharded.graph
    order = [_number(graph.blocks, block) for block in graph.sequence()]
    spread = 1 + memory.FRAGMENTATION
    copied_bytes_per_s = weights.copied_bytes_per_s(pool.gpu, fitted)
    seconds, static, kept, working = np.zeros((4, len(graph.blocks)))
    for number, times in enumerate(priced.blocks):
        is_layer, alone = _alone(sharded, times.block)
        parts = passes.block_seconds(workload, alone, plans, pool, times, fitted, recomputed=is_layer)
        copied_s = weights.copied_seconds(workload, weights.Held.of(workload, alone, whole), plans, copied_bytes_per_s)
        seconds[number] = (parts[0] + parts[1] + parts[2] + copied_s)[0]
        bill = memory.footprint(workload, alone, whole, pool.gpu)
        static[number] = (bill.parameters + bill.gradients + bill.optimizer)[0]
        kept[number], working[number] = bill.activations[0], (bill.working + bill.buffers / spread)[0]
    ends = sum(block.repeat for block in graph.first), sum(block.repeat for block in graph.last)
    depth = len(order) - sum(ends)

    def folded(column: Floats) -> Floats:
        """Of each layer, (L,); that of the ends added to the first and the last."""
        every = column[order]
        layers = every[ends[0] : ends[0] + depth].copy()
        layers[0] += every[: ends[0]].sum()
        layers[-1] += every[ends[0] + depth :].sum()
        return layers

    def between(column: Floats) -> Floats:
        upto = np.concatenate([[0.0], np.cumsum(folded(column))])
        return np.asarray(upto[None, :] - upto[:, None])

    count = plan.pipeline
    alive = np.minimum(plan.gradient_accumulation, count - np.arange(count))[:, None, None]
    room = memory.usable_bytes(pool.gpu) - memory.context_bytes(workload, plans, pool.gpu)[0] - working.max() * spread
    cost = folded(seconds)
    first = chain.cut(cost, between(static) + alive * between(kept) * spread <= room, count)
    if first is None or depth % count:
        return None
    straggle = float(replicas.straggle(plans, fitted)[0])
    repeats = plan.gradient_accumulation

    def slowest(starts: Ints) -> float:
        return float(np.add.reduceat(cost, starts).max())

    even = np.arange(count) * (depth // count)
    return Stages(
        plan=plan,
        layers=tuple(np.diff([*first, depth]).tolist()),
        step_s=((repeats - 1) * slowest(first) + cost.sum()) * straggle,
        even_s=((repeats - 1) * slowest(even) + cost.sum()) * straggle,
    )
