"""Choose a strategy for each layer: degrees, ZeRO stage and recomputation, where layers or their memory differ.

All layers run on the same GPUs and see the same micro-batches. So a strategy of a layer is a plan without a pipeline,
and its price is the one that `step` and `memory` give for that block alone. Neighbours affect each other's cost in two
ways:

* Between layouts activations move: where the tensor or context degree changes, so that t ranks and then u ranks hold
  the same samples, the least common multiple of t and u ranks exchange the layer's input forward and its gradient
  backward.
* The exchanges of a layer among its replicas hide behind its neighbour: its weights are gathered while the layer before
  runs forward, its gradients are reduced while that layer runs backward. Those of the first layer hide behind nothing.

`tilecast.chain` finds the best path. A plan that is the same everywhere is a path too, and the baseline of the
comparison. `best` is the entry point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from tilecast import chain, constants, memory, search, zoo
from tilecast.chain import Chain
from tilecast.constants import Constants
from tilecast.graph import Graph
from tilecast.hardware import Pool
from tilecast.perlayer.costs import Costs, block_costs, exposed_seconds, number_of, resharding_seconds
from tilecast.perlayer.cut import PipelineCut, cut_pipeline
from tilecast.search import NO_LIMITS, Dimension, Limits
from tilecast.spec import Floats, Ints, Plan, Plans, SpecError, Workload
from tilecast.step import blocks, replicas, weights

__all__ = [
    "DIMENSIONS",
    "REORDERING_TOLERANCE",
    "Families",
    "LayerGroup",
    "PerLayer",
    "PipelineCut",
    "best",
    "block_costs",
    "cheapest_uniform",
    "cut_pipeline",
]

DIMENSIONS: Mapping[Dimension, tuple[str, ...]] = {
    "recomputation": ("checkpointing",),
    "zero": ("zero_stage",),
    "tensor": ("data", "tensor", "context", "sequence_parallel", "micro_batch"),
    "expert": ("expert",),
}
"""Properties that may differ from layer to layer, and the columns of `Plans` that each one changes. The number of
micro-batches never differs."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Blocks with one strategy. `layers` counts from 1 and is empty for a block that is no layer."""

    name: str
    layers: tuple[int, ...]
    plan: Plan


@dataclass(frozen=True, slots=True)
class PerLayer:
    """The best strategy of each layer on `gpus` GPUs of a pool, with seconds of a step and bytes of a GPU."""

    pool: Pool
    gpus: int
    groups: tuple[LayerGroup, ...]
    step_s: float
    memory_bytes: float
    memory_available_bytes: float
    uniform: Plan | None
    """Best plan that is the same everywhere, priced in the same way; None where none fits."""
    uniform_s: float | None
    resharding_s: float
    """Seconds of the step in which activations move between layouts."""
    bound_s: float
    """Lower bound for every choice that fits: within `REORDERING_TOLERANCE` of `step_s` if that is proved optimal."""
    varies: tuple[Dimension, ...]
    """Dimensions that are not the same everywhere."""

    @property
    def saving(self) -> float | None:
        """Share of the uniform plan's step that is saved; None where no uniform plan fits."""
        return None if self.uniform_s is None else 1 - self.step_s / self.uniform_s

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Frameworks that can vary all these dimensions."""
        return tuple(name for name, able in search.FRAMEWORKS.items() if set(self.varies) <= set(able.per_layer))


@dataclass(frozen=True, slots=True)
class StrategyChain:
    """Strategies (S) that one plan may mix, and the chain of the model's blocks (N) under them.

    `moving` is the part of the changes in which activations move, (N - 1, S, S).
    """

    plans: Plans
    chain: Chain
    moving: Floats


def best(
    workload: Workload,
    pool: Pool,
    gpus: int,
    limits: Limits = NO_LIMITS,
    vary: tuple[Dimension, ...] | None = None,
) -> PerLayer | None:
    """Return the best strategy of each layer on exactly `gpus` GPUs; None if nothing fits.

    Args:
        workload: the job.
        pool: where it runs.
        gpus: number of GPUs of the pool.
        limits: bounds of the strategies, as of plans.
        vary: dimensions that may differ between layers; by default those that the job's framework can vary, or all
            without a framework.

    Raises:
        SpecError: the workload does not train, or offloads; the pool's GPU cannot run its precision.
    """
    best_path: tuple[float, StrategyChain, Ints] | None = None
    uniform: tuple[float, Plan] | None = None
    limit = bound = np.inf
    every = Families.of(workload, pool, gpus, limits, vary)
    if every is None:
        return None
    graph, order = every.graph, every.order
    seconds = every.uniform_s()
    for rows in sorted(every.rows(), key=lambda rows: float(seconds[rows].min())):
        family = every.family(every.worthwhile(rows, seconds))
        row, same_s = cheapest_uniform(family.chain)
        if row is not None and (uniform is None or same_s < uniform[0]):
            uniform = same_s, family.plans.row(row)
        for part in _tied(workload, graph, order, family):
            path = chain.cheapest(part, below=limit)
            if path is not None:
                bound, limit = min(bound, path.bound), path.cost
                best_path = path.cost, family, _grouped(part, order, path.strategies)
    if best_path is None:
        return None
    _, family, used = best_path
    cost_s, held_bytes = chain.price(family.chain, used)
    links = np.arange(len(used) - 1)
    groups = _groups(graph, order, family.plans, used)
    fixed_s = weights.host_seconds_per_step(workload, graph, constants.shipped())
    available = memory.usable_bytes(pool.gpu)
    return PerLayer(
        pool=pool,
        gpus=gpus,
        groups=groups,
        step_s=float(cost_s) + fixed_s,
        memory_bytes=float(held_bytes) + available - family.chain.budget,
        memory_available_bytes=available,
        uniform=uniform[1] if uniform else None,
        uniform_s=uniform[0] + fixed_s if uniform else None,
        resharding_s=float(family.moving[links, used[:-1], used[1:]].sum()),
        bound_s=bound + fixed_s,
        varies=_varies(groups),
    )


MOST_STRATEGIES = 32
"""Most strategies that one plan may mix. If there are more, the fastest everywhere and the leanest are kept."""


@dataclass(frozen=True, slots=True)
class Families:
    """Every strategy (S) on a number of GPUs, and which of them one plan may mix."""

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
        """Return the strategies of a job; None where there is nothing to choose.

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
        sharded = zoo.shard(workload, plans)
        graph = sharded.graph
        order = np.array([number_of(graph.blocks, block) for block in graph.sequence()])
        if len(order) < 2:
            return None  # one block: no neighbour to differ from, or to hide behind
        priced = blocks.kernel_seconds(workload, sharded, pool.gpu, fitted)
        costs = block_costs(workload, sharded, plans, pool, priced, fitted)
        return cls(workload, pool, graph, order, plans, costs, fitted, vary)

    def rows(self) -> Iterator[Ints]:
        """Yield the strategies of each family.

        A family has equal values in all that may not vary, and uses the same kinds of groups.
        """
        fixed = [column for dimension in DIMENSIONS if dimension not in self.vary for column in DIMENSIONS[dimension]]
        key = np.column_stack([getattr(self.plans, column) for column in ("gradient_accumulation", *fixed)])
        used = np.column_stack([getattr(self.plans, name) > 1 for name in _COMMUNICATING])
        for value in np.unique(key, axis=0):
            same = (key == value).all(axis=1)
            # Communicators take memory, so every set of dimensions that may have them is a separate family.
            for may in product((False, True), repeat=len(_COMMUNICATING)):
                rows = np.flatnonzero(same & ~(used & ~np.array(may)).any(axis=1))
                if len(rows) and (used[rows].any(axis=0) == may).all():
                    yield rows

    def uniform_s(self) -> Floats:
        """Return the seconds of each strategy used everywhere, whether it fits or not, (S,)."""
        workload, plans, costs, order = self.workload, self.plans, self.costs, self.order
        pairs, counts = np.unique(np.column_stack([order[:-1], order[1:]]), axis=0, return_counts=True)
        total = costs.alone_s[order].sum(axis=0) + exposed_seconds(
            workload, plans, costs, None, int(order[0]), self.pool, self.fitted
        )
        for (one, other), count in zip(pairs.tolist(), counts.tolist(), strict=True):
            total = total + count * exposed_seconds(
                workload, plans, costs, costs.rooms(one), other, self.pool, self.fitted
            )
        return np.asarray(total)

    def worthwhile(self, rows: Ints, seconds: Floats) -> Ints:
        """Return the strategies of a family that enter the chain: the fastest everywhere, and the leanest."""
        if len(rows) <= MOST_STRATEGIES:
            return rows
        fast = rows[np.argsort(seconds[rows], kind="stable")][: MOST_STRATEGIES - 1]
        held = self.costs.held_bytes[self.order].sum(axis=0) + self.costs.working_bytes.max(axis=0)
        return np.unique(np.append(fast, rows[held[rows].argmin()]))

    def family(self, rows: Ints) -> StrategyChain:
        """Return the chain of the model's blocks under these strategies."""
        return _family(self.workload, self.plans.take(rows), self.costs.take(rows), self.order, self.pool, self.fitted)


_COMMUNICATING = ("data", "tensor", "context", "expert")


def cheapest_uniform(one: Chain) -> tuple[int | None, float]:
    """Return the cheapest strategy that fits everywhere, and its seconds; None if none does."""
    seconds = one.cost.sum(axis=0) + np.diagonal(one.change, axis1=1, axis2=2).sum(axis=0)
    held = one.memory.sum(axis=0) + one.working.max(axis=0)
    seconds = np.where(held <= one.budget, seconds, np.inf)
    row = int(seconds.argmin())
    return (row if np.isfinite(seconds[row]) else None), float(seconds[row])


def _family(
    workload: Workload, plans: Plans, costs: Costs, order: Ints, pool: Pool, fitted: Constants
) -> StrategyChain:
    straggle = replicas.straggler_factor(workload, plans, fitted)
    pairs, where = np.unique(np.column_stack([order[:-1], order[1:]]), axis=0, return_inverse=True)
    exposed = [
        exposed_seconds(workload, plans, costs, costs.rooms(one, pairs=True), other, pool, fitted)
        for one, other in pairs.tolist()
    ]
    moving = [resharding_seconds(plans, costs.moved_bytes[other], pool) * straggle for _, other in pairs]
    shape = (0, len(plans), len(plans))
    moves = np.array(moving).reshape(-1, *shape[1:])[where.ravel()]
    change = np.array(exposed).reshape(-1, *shape[1:])[where.ravel()] + moves
    cost = costs.alone_s[order].copy()
    cost[0] += exposed_seconds(workload, plans, costs, None, int(order[0]), pool, fitted)
    budget = memory.usable_bytes(pool.gpu) - memory.shared_context_bytes(workload, plans, pool.gpu)
    whole = Chain(cost, change, costs.held_bytes[order], costs.working_bytes[order], budget)
    return StrategyChain(plans, whole, moves)


def _tied(workload: Workload, graph: Graph, order: Ints, family: StrategyChain) -> Iterator[Chain]:
    """Yield the chain; where embedding and head share their weights, once for each layout that both may have."""
    model = workload.model
    ends = np.isin(order, [number_of(graph.blocks, block) for block in (*graph.first, *graph.last)])
    if not (model.vocab and model.tied_embeddings and graph.first and graph.last) or model.own(zoo.Transformer).classes:
        yield family.chain
        return
    layouts = np.column_stack([family.plans.tensor, family.plans.zero_stage])
    for layout in np.unique(layouts, axis=0):
        other = (layouts != layout).any(axis=1)
        yield replace(family.chain, cost=np.where(ends[:, None] & other, np.inf, family.chain.cost))


REORDERING_TOLERANCE = 1e-4
"""Share of the step that it may cost to put equal strategies side by side."""


def _grouped(one: Chain, order: Ints, used: Ints) -> Ints:
    """Return the strategies, with equal ones side by side where that costs almost nothing.

    They are reordered only within each run of equal blocks.
    """
    most = chain.price(one, used)[0] * (1 + REORDERING_TOLERANCE)
    edges = [0, *(np.flatnonzero(np.diff(order)) + 1).tolist(), len(order)]
    for start, end in pairwise(edges):
        part = np.sort(used[start:end])
        trials = np.array([np.concatenate([used[:start], strategy, used[end:]]) for strategy in (part, part[::-1])])
        cost_s, held_bytes = chain.price(one, trials)
        tidy = int(np.argmin(cost_s))
        if cost_s[tidy] <= most and held_bytes[tidy] <= one.budget:
            used = trials[tidy]
    return used


def _groups(graph: Graph, order: Ints, plans: Plans, used: Ints) -> tuple[LayerGroup, ...]:
    groups: dict[tuple[str, Plan], list[int]] = {}
    before = sum(block.repeat for block in graph.first)
    depth = sum(block.repeat for block in graph.layers)
    for link, (number, row) in enumerate(zip(order, used, strict=True)):
        plan = plans.row(int(row))
        if before <= link < before + depth:
            groups.setdefault(("layers", plan), []).append(link - before + 1)
        else:  # nothing is recomputed outside the layers
            groups.setdefault((graph.blocks[number].name, replace(plan, checkpointing="none")), [])
    return tuple(LayerGroup(name, tuple(layers), plan) for (name, plan), layers in groups.items())


def _varies(groups: tuple[LayerGroup, ...]) -> tuple[Dimension, ...]:
    def differ(columns: tuple[str, ...], among: tuple[LayerGroup, ...]) -> bool:
        return len({tuple(getattr(group.plan, column) for column in columns) for group in among}) > 1

    layers = tuple(group for group in groups if group.layers)
    return tuple(
        dimension
        for dimension, columns in DIMENSIONS.items()
        if differ(columns, layers if dimension in ("recomputation", "expert") else groups)
    )
