"""Choose parallelism degrees, ZeRO stage and recomputation for each layer of a model.

All layers run on the same GPUs and have the same micro-batches. So the strategy of a layer is a plan without a
pipeline. Its cost is what `step` and `memory` forecast for the block alone. Consecutive layers affect each other's cost
in two ways:

* Activations are resharded if two layers have different tensor or context degrees. If t ranks hold a sample in the
  first layer and u ranks in the second, the least common multiple of t and u ranks exchange it. The layer's input is
  exchanged forward, and its gradient backward.
* The data-parallel communication of a layer overlaps with the previous layer. Weights are gathered during the forward
  pass of the previous layer, and gradients are reduced during its backward pass. The first layer overlaps with none.

`tilecast.chain` finds the cheapest sequence of strategies. The best plan with one strategy for all layers is the
baseline. `find_best_strategies` is the entry point.
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
from tilecast.perlayer.costs import BlockCosts, block_costs, exposed_seconds, find_block_index, resharding_seconds
from tilecast.perlayer.cut import PipelineCut, cut_pipeline
from tilecast.recomputation import is_module_set
from tilecast.search import NO_LIMITS, Dimension, PlanLimits
from tilecast.spec import Floats, Ints, Plan, Plans, SpecError, Workload
from tilecast.step import blocks, replicas, weights

__all__ = [
    "DIMENSIONS",
    "REORDERING_TOLERANCE",
    "LayerGroup",
    "PerLayer",
    "PipelineCut",
    "StrategyFamilies",
    "block_costs",
    "cut_pipeline",
    "find_best_strategies",
    "find_fastest_uniform",
]

DIMENSIONS: Mapping[Dimension, tuple[str, ...]] = {
    "recomputation": ("checkpointing",),
    "zero": ("zero_stage",),
    "tensor": ("data", "tensor", "context", "sequence_parallel", "micro_batch"),
    "expert": ("expert",),
}
"""Dimensions that may differ between layers, with the columns of `Plans` that each dimension changes.

The number of micro-batches is equal in all layers.
"""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a strategy, by their numbers counted from 1.

    A block that is not a layer, such as the head, is a group of its own, without numbers.
    """

    name: str
    layers: tuple[int, ...]
    plan: Plan


@dataclass(frozen=True, slots=True)
class PerLayer:
    """The best strategy of each layer on a number of GPUs, with the step time and the memory of a GPU."""

    pool: Pool
    gpus: int
    groups: tuple[LayerGroup, ...]
    step_s: float
    memory_bytes: float
    memory_available_bytes: float
    uniform: Plan | None
    """Best plan with one strategy for all layers, or None if no such plan fits."""
    uniform_s: float | None
    """Seconds of a step with the plan `uniform`."""
    resharding_s: float
    """Seconds of a step that resharding of activations takes."""
    bound_s: float
    """Lower bound on the step seconds of every choice that fits in memory.

    `step_s` is optimal if it exceeds the bound by at most the fraction `REORDERING_TOLERANCE`.
    """
    varies: tuple[Dimension, ...]
    """Dimensions in which the strategies of layers differ."""

    @property
    def saving(self) -> float | None:
        """Fraction of the uniform plan's step time that is saved, or None if no uniform plan fits."""
        return None if self.uniform_s is None else 1 - self.step_s / self.uniform_s

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Names of the frameworks that can vary all dimensions in `varies` between layers."""
        return tuple(name for name, able in search.FRAMEWORKS.items() if set(self.varies) <= set(able.per_layer))


@dataclass(frozen=True, slots=True)
class StrategyFamilyCosts:
    """Costs of each of a model's N blocks under the S strategies of one family. Only these may be mixed in a plan.

    `chain` has all costs. They include `resharding_s`, (N - 1, S, S): the seconds in which activations move between the
    layouts of neighbouring blocks.
    """

    plans: Plans
    chain: Chain
    resharding_s: Floats


def find_best_strategies(
    workload: Workload,
    pool: Pool,
    gpus: int,
    limits: PlanLimits = NO_LIMITS,
    vary: tuple[Dimension, ...] | None = None,
) -> PerLayer | None:
    """Return the best strategy of each layer on exactly `gpus` GPUs, or None if no strategy fits in memory.

    Args:
        workload: the job.
        pool: the pool that it runs on.
        gpus: number of GPUs.
        limits: bounds on the strategies.
        vary: dimensions that may differ between layers. None means all that the job's framework supports, or all
            dimensions if the job names no framework.

    Raises:
        SpecError: the job does not train, the job offloads, or the GPU does not support its precision.
    """
    best_path: tuple[float, StrategyFamilyCosts, Ints] | None = None
    uniform: tuple[float, Plan] | None = None
    limit = bound = np.inf
    every = StrategyFamilies.from_job(workload, pool, gpus, limits, vary)
    if every is None:
        return None
    graph, order = every.graph, every.order
    seconds = every.uniform_s()
    for rows in sorted(every.iterate_families(), key=lambda rows: float(seconds[rows].min())):
        family = every.price_family(every.select_promising_strategies(rows, seconds))
        row, same_s = find_fastest_uniform(family.chain)
        if row is not None and (uniform is None or same_s < uniform[0]):
            uniform = same_s, family.plans.row(row)
        for part in _iterate_chains_with_tied_ends(workload, graph, order, family):
            path = chain.find_cheapest_path(part, limit_s=limit)
            if path is not None:
                bound, limit = min(bound, path.bound), path.cost
                best_path = path.cost, family, _group_equal_strategies(part, order, path.strategies)
    if best_path is None:
        return None
    _, family, used = best_path
    cost_s, held_bytes = chain.price_strategies(family.chain, used)
    links = np.arange(len(used) - 1)
    groups = _make_layer_groups(graph, order, family.plans, used)
    fixed_s = weights.host_seconds_per_step(workload, graph, constants.shipped_constants())
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
        resharding_s=float(family.resharding_s[links, used[:-1], used[1:]].sum()),
        bound_s=bound + fixed_s,
        varies=_find_varying_dimensions(groups),
    )


MOST_STRATEGIES = 32
"""Most strategies that layers may mix. Of more strategies, keep the fastest ones and the one with least memory."""


@dataclass(frozen=True, slots=True)
class StrategyFamilies:
    """All S strategies on a number of GPUs with their costs. Layers may mix only strategies of one family."""

    workload: Workload
    pool: Pool
    graph: Graph
    order: Ints
    """Index into `graph.blocks` of each block in the order of the model, (N,)."""
    plans: Plans
    costs: BlockCosts
    fitted: Constants
    vary: tuple[Dimension, ...]

    @classmethod
    def from_job(
        cls, workload: Workload, pool: Pool, gpus: int, limits: PlanLimits, variable: tuple[Dimension, ...] | None
    ) -> StrategyFamilies | None:
        """Return the strategies of a job, or None if it has no plan or its model has a single block.

        Raises:
            SpecError: the job does not train, or it offloads.
        """
        if not workload.training:
            raise SpecError("spec.workload", "strategies per layer are for training", "price it without them")
        if workload.offload != "none":
            raise SpecError("spec.training.offload", "is not priced per layer", "price it without, or leave it out")
        if variable is None:
            named = workload.framework
            variable = tuple(DIMENSIONS) if named is None else search.find_framework_features(named).per_layer
        plans = search.enumerate_plans(workload, pool, replace(limits, gpus=gpus))
        # No framework recomputes modules of some layers and whole other layers.
        plans = plans.take((plans.pipeline == 1) & ~is_module_set(plans.checkpointing)) if len(plans) else plans
        if not len(plans):
            return None
        fitted = constants.shipped_constants()
        sharded = zoo.build_sharded_graph(workload, plans)
        graph = sharded.graph
        order = np.array([find_block_index(graph.blocks, block) for block in graph.list_repetitions()])
        if len(order) < 2:
            return None  # a single block has no neighbour
        priced = blocks.kernel_seconds(workload, sharded, pool.gpu, fitted)
        costs = block_costs(workload, sharded, plans, pool, priced, fitted)
        return cls(workload, pool, graph, order, plans, costs, fitted, variable)

    def iterate_families(self) -> Iterator[Ints]:
        """Yield, for each family, the row indices of its strategies in `plans`.

        The strategies of a family have equal values in every dimension that is the same for all layers, and the family
        uses one set of communicators.
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
        """Return the step seconds, (S,), of each strategy if all blocks use it. Memory is ignored."""
        workload, plans, costs, order = self.workload, self.plans, self.costs, self.order
        pairs, counts = np.unique(np.column_stack([order[:-1], order[1:]]), axis=0, return_counts=True)
        total = costs.alone_s[order].sum(axis=0) + exposed_seconds(
            workload, plans, costs, None, int(order[0]), self.pool, self.fitted
        )
        for (before, block), count in zip(pairs.tolist(), counts.tolist(), strict=True):
            total = total + count * exposed_seconds(
                workload, plans, costs, costs.pass_seconds(before), block, self.pool, self.fitted
            )
        return np.asarray(total)

    def select_promising_strategies(self, rows: Ints, seconds: Floats) -> Ints:
        """Return at most `MOST_STRATEGIES` rows: the fastest strategies and the one with least memory.

        Args:
            rows: row indices of a family.
            seconds: result of `uniform_s`, (S,).
        """
        if len(rows) <= MOST_STRATEGIES:
            return rows
        fast = rows[np.argsort(seconds[rows], kind="stable")][: MOST_STRATEGIES - 1]
        held = self.costs.held_bytes[self.order].sum(axis=0) + self.costs.working_bytes.max(axis=0)
        return np.unique(np.append(fast, rows[held[rows].argmin()]))

    def price_family(self, rows: Ints) -> StrategyFamilyCosts:
        """Return the costs of the model's blocks under the strategies at the indexes `rows` of `plans`."""
        plans, costs, order, pool = self.plans.take(rows), self.costs.take(rows), self.order, self.pool
        straggle = replicas.straggler_factor(self.workload, plans, self.fitted)
        pairs, where = np.unique(np.column_stack([order[:-1], order[1:]]), axis=0, return_inverse=True)

        def exposed(before: Floats | None, block: int) -> Floats:
            return exposed_seconds(self.workload, plans, costs, before, block, pool, self.fitted)

        moving = [resharding_seconds(plans, costs.moved_bytes[block], pool) * straggle for _, block in pairs]
        moves = np.array(moving)[where.ravel()]
        pass_s = [exposed(costs.pass_seconds(before)[:, :, None], block) for before, block in pairs.tolist()]
        cost = costs.alone_s[order].copy()
        cost[0] += exposed(None, int(order[0]))
        budget = memory.usable_bytes(pool.gpu) - memory.shared_context_bytes(self.workload, plans, pool.gpu)
        change = np.array(pass_s)[where.ravel()] + moves
        whole = Chain(cost, change, costs.held_bytes[order], costs.working_bytes[order], budget)
        return StrategyFamilyCosts(plans, whole, moves)


_COMMUNICATING = ("data", "tensor", "context", "expert")


def find_fastest_uniform(links: Chain) -> tuple[int | None, float]:
    """Return the fastest strategy that fits in memory if all blocks use it.

    Returns:
        Index and seconds of the strategy. If no strategy fits, None and infinity.
    """
    seconds = links.cost.sum(axis=0) + np.diagonal(links.change, axis1=1, axis2=2).sum(axis=0)
    held = links.memory.sum(axis=0) + links.working.max(axis=0)
    seconds = np.where(held <= links.budget, seconds, np.inf)
    row = int(seconds.argmin())
    return (row if np.isfinite(seconds[row]) else None), float(seconds[row])


def _iterate_chains_with_tied_ends(
    workload: Workload, graph: Graph, order: Ints, family: StrategyFamilyCosts
) -> Iterator[Chain]:
    """Yield the chains to solve for a family: one, or one for each layout if embedding and head share their weights.

    A layout is a tensor degree with a ZeRO stage. In each chain, embedding and head use only strategies of that layout.
    """
    model = workload.model
    ends = np.isin(order, [find_block_index(graph.blocks, block) for block in (*graph.first, *graph.last)])
    if (
        not (model.vocab and model.tied_embeddings and graph.first and graph.last)
        or model.get_dimensions(zoo.Transformer).classes
    ):
        yield family.chain
        return
    layouts = np.column_stack([family.plans.tensor, family.plans.zero_stage])
    for layout in np.unique(layouts, axis=0):
        other = (layouts != layout).any(axis=1)
        yield replace(family.chain, cost=np.where(ends[:, None] & other, np.inf, family.chain.cost))


REORDERING_TOLERANCE = 1e-4
"""Largest fraction of the step time that grouping layers of equal strategy may add."""


def _group_equal_strategies(links: Chain, order: Ints, strategies: Ints) -> Ints:
    """Return the strategy of each block, reordered so that equal strategies are adjacent.

    Only consecutive equal blocks swap strategies. The new order is used if it fits in memory and adds at most
    `REORDERING_TOLERANCE` to the step time.
    """
    most = chain.price_strategies(links, strategies)[0] * (1 + REORDERING_TOLERANCE)
    edges = [0, *(np.flatnonzero(np.diff(order)) + 1).tolist(), len(order)]
    for start, end in pairwise(edges):
        part = np.sort(strategies[start:end])
        trials = np.array(
            [np.concatenate([strategies[:start], strategy, strategies[end:]]) for strategy in (part, part[::-1])]
        )
        cost_s, held_bytes = chain.price_strategies(links, trials)
        tidy = int(np.argmin(cost_s))
        if cost_s[tidy] <= most and held_bytes[tidy] <= links.budget:
            strategies = trials[tidy]
    return strategies


def _make_layer_groups(graph: Graph, order: Ints, plans: Plans, strategies: Ints) -> tuple[LayerGroup, ...]:
    """Group layers by strategy. Embedding, head and other blocks are groups without layer numbers.

    Args:
        graph: blocks of the model.
        order: index into `graph.blocks` of each of N consecutive blocks, (N,).
        plans: all strategies.
        strategies: row in `plans` of each block's strategy, (N,).
    """
    groups: dict[tuple[str, Plan], list[int]] = {}
    before = sum(block.repeat for block in graph.first)
    depth = sum(block.repeat for block in graph.layers)
    for link, (number, row) in enumerate(zip(order, strategies, strict=True)):
        plan = plans.row(int(row))
        if before <= link < before + depth:
            groups.setdefault(("layers", plan), []).append(link - before + 1)
        else:  # nothing is recomputed outside the layers
            groups.setdefault((graph.blocks[number].name, replace(plan, checkpointing="none")), [])
    return tuple(LayerGroup(name, tuple(layers), plan) for (name, plan), layers in groups.items())


def _find_varying_dimensions(groups: tuple[LayerGroup, ...]) -> tuple[Dimension, ...]:
    """Return the dimensions in which the plans of layer groups differ."""

    def is_varying(columns: tuple[str, ...], among: tuple[LayerGroup, ...]) -> bool:
        return len({tuple(getattr(group.plan, column) for column in columns) for group in among}) > 1

    layers = tuple(group for group in groups if group.layers)
    return tuple(
        dimension
        for dimension, columns in DIMENSIONS.items()
        if is_varying(columns, layers if dimension in ("recomputation", "expert") else groups)
    )
