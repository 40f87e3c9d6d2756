"""List all training plans of a GPU pool that divide the model, the batch and the GPUs without remainder.

The search space is pools x nodes x GPUs of a node x tensor x context x pipeline x data x expert x expert tensor x
micro-batch x ZeRO stage x recomputation x sequence parallelism x virtual stages x pipeline schedule, under exact
divisibility:

- a GPU count is a part of one node, or fills nodes or equal parts of nodes;
- tensor divides heads, key/value heads (or replicates them) and the MLP, and stays inside a node unless the job
  allows more;
- an expert is whole on a rank, or shared by a tensor-parallel group;
- context divides the sequence, and every pipeline stage has layers;
- data divides the global batch, and micro-batches divide a rank's share.

The job's framework must be able to execute a plan. If the job names none, some framework must. Each precision and
global batch is a separate workload. Overlap is not a dimension of the space, because a step without overlap is never
faster. The order of rows is fixed, so that equal prices always choose the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np

from tilecast import frameworks, fuse, zoo
from tilecast.hardware import Pool
from tilecast.layout import count_virtual_stage_end_layers, find_schedule_costs, parse_layout, split_layers
from tilecast.memo import Memo
from tilecast.model import Model
from tilecast.recomputation import Checkpointing, encode_modules, is_module_set, split_modules
from tilecast.search.engines import FRAMEWORKS, FrameworkFeatures, Mask, find_framework_features
from tilecast.spec import (
    PIPELINE_SCHEDULES,
    PREFERENCE_FRAMEWORKS,
    SCHEDULE_CODES,
    DistinctRows,
    Ints,
    Plans,
    Rows,
    Schedule,
    SpecError,
    Workload,
    distinct_rows,
    repeat_number,
    stage_holding_codes,
)
from tilecast.step import placement
from tilecast.zoo import traced
from tilecast.zoo.families import FAMILIES


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Upper bounds of a search for plans. None sets no bound."""

    gpus: int | None = None
    max_gpus: int | None = None
    max_tensor: int | None = None
    tensor_across_nodes: bool = False
    """Whether tensor parallelism may span several nodes."""
    max_plans: int = 1_000_000
    """Number of plans above which the search leaves out node counts, at most until only powers of two remain."""


NO_LIMITS = PlanLimits()
VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8, 12)
"""Numbers of virtual stages per pipeline rank that the search tries. The most in a published plan is 12 (Nemotron-4).

Of 2 and 3, 4 and 6, and 8 and 12, the search takes the power of two if the layers divide by it, else the other.
"""
USUAL_VIRTUAL = 4
"""Most virtual stages per pipeline rank that are tried for models with few layers, or if there are too many plans."""
DEEP = 64
"""Fewest layers for which the search tries more than `USUAL_VIRTUAL` virtual stages, as published plans do."""
MOST_PLANS_TO_SHARE = 25_000
"""Most plans of a pool for which the search adds plans whose experts are shared by tensor-parallel groups."""
MOST_PLANS_TO_SCHEDULE = 50_000
"""Most plans of a pool for which the search adds the framework's pipeline schedules other than 1F1B."""
MOST_PARTED = 32
"""Most nodes of which a job may use parts. A job on more nodes uses whole ones."""
MAX_MICRO_TOKENS = 1 << 22
"""Most tokens of a micro-batch. No GPU has memory for the activations of more tokens."""
# With down to 128 tokens allowed, no best plan of six models from 2,048 to 8,192 tokens on H100 and L4 had fewer.
MIN_CONTEXT_TOKENS = 1024
"""Fewest tokens of a context-parallel rank. With fewer tokens, communication costs more than the rank saves."""


def enumerate_plans(workload: Workload, pool: Pool, limits: PlanLimits = NO_LIMITS) -> Plans:
    """Return all plans of a workload on a pool, which may be none.

    A plan divides the model, the batch and the GPUs without remainder, and the workload's framework executes it.

    Raises:
        SpecError: the workload's framework cannot run the precision, the offloading or the recomputation. If the
            workload names no framework, no framework can.
    """
    return enumerate_bounded(workload, pool, limits).plans


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive integer, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


_Table: TypeAlias = dict[str, Ints]
"""Columns of plans by name. Some columns are still missing."""
_DECIDING = (
    *("training", "precision", "framework", "framework_version", "checkpointing", "recompute_layers", "offload"),
    *("offloaded_activations", "gradient_sync", "bucket_mib", "pipeline_layout", "expert_dispatch", "expert_overlap"),
    *("shard_degree", "frozen_bits", "expert_capacity", "loss"),
)
"""Workload fields on which `_enumerate_combinations` depends, besides recomputation and virtual stages."""
_WAYS: Memo[tuple[_Table, Mask]] = Memo(8)


@dataclass(frozen=True, slots=True)
class EnumeratedPlans:
    """The plans that a search enumerated, and whether the search was bounded."""

    plans: Plans
    is_bounded: bool
    """Whether plans were left out to respect `limits.max_plans`."""
    splits: DistinctRows
    """The result of `plans.distinct_splits()`."""


def enumerate_bounded(workload: Workload, pool: Pool, limits: PlanLimits) -> EnumeratedPlans:
    """Return the plans of `enumerate_plans`, and whether some were left out to respect `limits.max_plans`.

    The search leaves out, in this order: shared experts (from `MOST_PLANS_TO_SHARE` plans on), pipeline schedules other
    than 1F1B (from `MOST_PLANS_TO_SCHEDULE` plans on), some node counts, recomputation of single modules, and more than
    four virtual stages.
    """
    deciding = (
        list_searched_recomputations(workload),
        tuple(_list_virtual_stages(workload)),
        schedules := list_searched_schedules(workload),
        *(getattr(workload, name) for name in _DECIDING),
    )
    ways, scheduled = _WAYS.get(deciding, lambda: _enumerate_combinations(workload))
    allowed = scheduled & (ways["schedule"] == 0) if schedules else scheduled
    usual = ways["virtual_stages"] <= USUAL_VIRTUAL
    if workload.checkpointing is None:
        usual &= ~is_module_set(ways["checkpointing"])

    def list_rows(digits: int, some: Mask, *, shares_experts: bool) -> tuple[_Table, Ints, Mask, Ints]:
        outer = _add_batches(workload, _enumerate_splits(workload, pool, limits, digits))
        outer = _add_split_experts(outer) if shares_experts else outer
        kinds, mask = _allow_combinations(workload, outer, ways, some)
        return outer, kinds, mask, np.count_nonzero(mask, axis=1)[kinds]

    for digits, some in (*((digits, allowed) for digits in (64, 4, 3, 2, 1)), (1, allowed & usual)):
        outer, kinds, mask, counts = list_rows(digits, some, shares_experts=False)
        if counts.sum() <= limits.max_plans:
            break
    is_bounded = digits < 64
    if schedules:
        most = min(MOST_PLANS_TO_SCHEDULE, limits.max_plans // (1 + len(schedules)))
        if counts.sum() <= most and not is_bounded:
            outer, kinds, mask, counts = list_rows(64, scheduled, shares_experts=False)
        else:
            is_bounded = is_bounded or bool((outer["pipeline"] > 1).any())
    if _can_split_experts(workload):
        # Shared experts double the rows of tensor parallelism, so only a small search has them.
        if counts.sum() <= min(MOST_PLANS_TO_SHARE, limits.max_plans // 4) and not is_bounded:
            outer, kinds, mask, counts = list_rows(64, allowed, shares_experts=True)
        else:
            is_bounded = True
    # Each row of `outer` is repeated once for each of its ways. The ways of row i are those of its kind, which are
    # consecutive in `flat` from `starts[kinds[i]]` on.
    flat = np.nonzero(mask)[1]
    starts = np.cumsum(np.count_nonzero(mask, axis=1)) - np.count_nonzero(mask, axis=1)
    ends = np.cumsum(counts)
    places = np.arange(counts.sum()) + np.repeat(starts[kinds] - ends + counts, counts)
    chosen = flat[places]
    columns = {name: np.repeat(column, counts) for name, column in outer.items()} | {
        name: column.take(chosen) for name, column in ways.items()
    }
    if not schedules or not columns["schedule"].any():
        columns["schedule"] = repeat_number(np.zeros(1, np.int32), len(chosen))
    plans = Plans(*(columns[item.name] for item in fields(Plans)))
    return EnumeratedPlans(plans, is_bounded, _find_splits(ways, flat, places, ends - counts, counts))


def _find_splits(ways: _Table, flat: Rows, places: Rows, begins: Rows, counts: Ints) -> DistinctRows:
    """Return `Plans.distinct_splits` of the enumerated plans, without comparing their columns.

    Args:
        ways: the W combinations of `_enumerate_combinations`.
        flat: for each kind of row, indices of its combinations in `ways`, concatenated.
        places: index into `flat` of each plan, (n,).
        begins: first plan of each row of degrees and micro-batches.
        counts: number of plans of each such row.
    """
    same = [ways[name][flat] for name in ("sequence_parallel", "checkpointing")]
    same.append(stage_holding_codes(ways["schedule"])[flat])
    is_head = np.ones(len(flat), bool)
    is_head[1:] = np.any([column[1:] != column[:-1] for column in same], axis=0)
    heads = is_head[places]
    heads[begins[counts > 0]] = True
    return DistinctRows(np.flatnonzero(heads), np.cumsum(heads) - 1)


def _enumerate_splits(workload: Workload, pool: Pool, limits: PlanLimits, digits: int) -> _Table:
    """Return the tensor, context, pipeline and data degrees of every split of the pool's GPUs, as columns.

    A GPU count is any part of one node, or it fills nodes or equal parts of nodes that are at least half of a node. If
    `digits` is below 64, a GPU count divides a node or fills whole nodes. Plain data parallelism may then also use the
    largest number of GPUs in one node that divides the batch.

    A node count is tried if its binary form has only zeros after the first `digits` digits. With 4 digits, these are
    all counts up to 16 and every second count up to 32. The node count of the whole pool is always tried.
    """
    most_gpus = 1 if pool.gpu.mig else pool.max_gpus  # slices do not reach each other
    most = min(most_gpus, limits.max_gpus or most_gpus, limits.gpus or most_gpus)
    widest = most if limits.tensor_across_nodes else min(most, pool.domain)

    def select_dividing(degrees: Iterable[int]) -> list[int]:
        return [degree for degree in degrees if limits.gpus is None or limits.gpus % degree == 0]

    tensors = select_dividing(
        t for t in range(1, min(limits.max_tensor or widest, widest) + 1) if can_split_heads(workload, t)
    )
    stages = range(1, min(most, _max_pipeline_stages(workload)) + 1)
    pipelines = select_dividing(p for p in stages if p == 1 or has_full_stages(workload, p))
    contexts = [c for c in divisors(workload.sequence_length) if c <= most]
    contexts = select_dividing(c for c in contexts if c == 1 or _can_split_sequence(workload, c))
    datas = select_dividing(d for d in divisors(workload.global_batch) if d <= most)
    grid = np.meshgrid(tensors, contexts, pipelines, datas, indexing="ij")
    tensor, context, pipeline, data = (column.ravel() for column in grid)
    gpus = tensor * context * pipeline * data
    nodes = gpus // pool.gpus_per_node
    inside = gpus if limits.tensor_across_nodes else placement.count_joined_gpus(gpus, pool)
    # If there are several nodes, each node, or each NVLink domain of nodes, holds whole tensor-parallel groups.
    keep = (gpus <= most) & ((gpus <= pool.gpus_per_node) | (_fills_nodes(gpus, pool) & (inside % tensor == 0)))
    if digits < 64 and limits.gpus is None:
        # A search with too many plans has no parts of nodes, except those that divide a node.
        size, most_data = pool.gpus_per_node, max((count for count in datas if count <= pool.gpus_per_node), default=0)
        keep &= (gpus % size == 0) | (size % gpus == 0) | ((gpus == most_data) & (data == most_data))
    length = np.frexp(nodes)[1]
    keep &= (nodes <= 1) | (nodes % (1 << np.maximum(length - digits, 0)) == 0) | (nodes == pool.max_nodes)
    if limits.gpus is not None:
        keep &= gpus == limits.gpus
    rows = np.flatnonzero(keep)
    rows = rows[np.argsort(gpus[rows], kind="stable")]
    kind = np.int32 if workload.global_batch < 1 << 31 else np.int64
    names = ("tensor", "context", "pipeline", "data")
    return {name: column.ravel()[rows].astype(kind) for name, column in zip(names, grid, strict=True)}


def _fills_nodes(gpus: Ints, pool: Pool) -> Mask:
    """Return whether each GPU count fills nodes of the pool, or equal parts of at most `MOST_PARTED` nodes, (n,).

    A part is at least half of a node.
    """
    size = pool.gpus_per_node
    part = placement.count_gpus_on_each_node(gpus, pool)
    are_few = gpus <= MOST_PARTED * size
    if size & (size - 1) == 0:
        # Equal parts that divide a node can be packed into any nodes that have as many GPUs in total.
        return np.asarray((part == size) | ((2 * part >= size) & are_few))
    nodes = pool.max_nodes + (pool.spare_gpus >= part)
    return np.asarray((part == size) | ((2 * part >= size) & are_few & (gpus // part <= nodes)))


def can_split_heads(workload: Workload, tensor: int) -> bool:
    """Return whether `tensor` ranks can split a workload's attention heads and MLPs evenly.

    If there are more ranks than key and value heads, ranks hold copies of these heads.
    """
    model = workload.model
    if tensor == 1:
        return True
    is_whole = zoo.is_transformer(model) and model.heads % tensor == 0 and model.ffn_hidden % tensor == 0
    return is_whole and (model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0)


def _can_split_sequence(workload: Workload, context: int) -> bool:
    """Return whether `context` ranks can split the sequences of a workload. Only training with fused attention can.

    A rank takes one chunk of each sequence, or two with a causal mask (zig-zag). Chunks must be equally long, and a
    rank must have at least `MIN_CONTEXT_TOKENS` tokens.
    """
    model = workload.model
    can_split = model.family in FAMILIES and FAMILIES[model.family].splits_sequence
    if not can_split or "attention" not in fuse.passes(workload) or not workload.training:
        return False
    pieces = 2 * context if model.causal else context
    return workload.sequence_length % pieces == 0 and workload.sequence_length // context >= MIN_CONTEXT_TOKENS


def _max_pipeline_stages(workload: Workload) -> int:
    """Return the largest number of pipeline stages such that every stage has work."""
    model = workload.model
    return max(traced.count_pieces(model.trace) if model.trace is not None else model.layers, 1)


def has_full_stages(workload: Workload, pipeline: int) -> bool:
    """Return whether a workload's model can be split into `pipeline` stages that all have work.

    A traced model is cut into stages of similar cost. Any other model needs a stack of layers, of which the first and
    last stages may hold fewer.
    """
    model = workload.model
    if model.trace is not None:
        return pipeline <= traced.count_pieces(model.trace)
    if not zoo.is_transformer(model) or not FAMILIES[model.family].has_stages:
        return False
    if workload.pipeline_layout is not None:
        return len(parse_layout(workload.pipeline_layout).pieces) % pipeline == 0
    return min(split_layers(model.layers, pipeline, counts_ends=_counts_end_layers(workload))) > 0


def has_equal_virtual_stages(workload: Workload, pipeline: int, virtual: int) -> bool:
    """Return whether each of `pipeline` stages can hold `virtual` virtual stages of equally many layers.

    Embedding and loss may count as layers. If the job sets a pipeline layout, return whether the layout has `pipeline *
    virtual` virtual stages.
    """
    if workload.pipeline_layout is not None:
        return len(parse_layout(workload.pipeline_layout).pieces) == pipeline * virtual
    ends = count_virtual_stage_end_layers(workload.model.layers, pipeline, virtual)
    return ends == 0 or (ends is not None and _counts_end_layers(workload))


def can_split_virtual_stages(workload: Workload, pipeline: int, virtual: int) -> bool:
    """Return whether a job's layers, layout and schedule allow `pipeline` stages of `virtual` virtual stages each."""
    if pipeline == 1:
        return virtual == 1
    fits = virtual == 1 and workload.pipeline_layout is None
    return can_schedule_virtual_stages(workload, virtual) and (
        fits or has_equal_virtual_stages(workload, pipeline, virtual)
    )


def can_schedule_virtual_stages(workload: Workload, virtual: int) -> bool:
    """Return whether the workload's pipeline schedule can run `virtual` virtual stages on each pipeline rank."""
    least, most = find_schedule_costs(workload.pipeline_schedule).virtual
    return least <= virtual <= most


def list_searched_schedules(workload: Workload) -> tuple[Schedule, ...]:
    """Return the pipeline schedules that the search tries in addition to 1F1B.

    They are those of the job's framework. There are none if the job names a schedule or no framework.
    """
    is_open = workload.framework is not None and workload.pipeline_schedule is None and workload.training
    if not is_open or workload.model.trace is not None or workload.framework is None:
        return ()
    own = find_framework_features(workload.framework).schedules - {"1f1b", "interleaved"}
    return tuple(name for name in PIPELINE_SCHEDULES if name in own)


def _list_virtual_stages(workload: Workload) -> list[int]:
    """Return the numbers of virtual stages per pipeline rank that the search tries, ascending."""
    if workload.pipeline_layout is not None:
        return divisors(len(parse_layout(workload.pipeline_layout).pieces))
    return [pieces for pieces in VIRTUAL_STAGES if pieces <= USUAL_VIRTUAL or workload.model.layers >= DEEP]


def _counts_end_layers(workload: Workload) -> bool:
    return frameworks.find_framework(workload).counts_ends


def _add_batches(workload: Workload, splits: _Table) -> _Table:
    """Return every combination of a split, an expert-parallel degree and a micro-batch size, as columns.

    From each power of two up to the next, at most one micro-batch size is tried. It is the power of two if that divides
    the samples of a rank, otherwise the largest size that does.
    """
    batch = workload.global_batch
    share = batch // splits["data"][:, None]
    micro = np.array([workload.micro_batch] if workload.micro_batch else divisors(batch), np.int64)
    keep = share % micro == 0
    if workload.loss == "kto":
        keep &= micro > 1  # its answers are compared within a micro-batch
    if workload.micro_batch is None:
        keep &= (share // micro >= splits["pipeline"][:, None]) | (micro == 1)
        keep &= (micro * workload.sequence_length <= MAX_MICRO_TOKENS) | (micro == 1)
        keep = _keep_one_per_octave(micro, keep)
    rows, chosen = np.nonzero(keep)
    columns = {name: column[rows] for name, column in splits.items()}
    columns["micro_batch"] = micro[chosen].astype(splits["data"].dtype)
    columns["gradient_accumulation"] = share[rows, 0] // micro[chosen]
    ranks = columns["data"] * (columns["tensor"] if _experts_fold_over_tensor(workload) else 1)
    degrees = list_expert_degrees(workload.model, ranks)
    rows, chosen = np.nonzero(degrees)
    columns = {name: column[rows] for name, column in columns.items()} | {"expert": degrees[rows, chosen]}
    return {**columns, "expert_tensor": np.ones_like(columns["tensor"])}


def _can_split_experts(workload: Workload) -> bool:
    """Return whether the model has experts and the framework has expert tensor parallelism."""
    has_degree = (
        workload.framework is None or "expert_tensor" in find_framework_features(workload.framework).parallelism
    )
    return has_degree and zoo.count_experts(workload.model) > 0


def _add_split_experts(splits: _Table) -> _Table:
    """Return each split with whole experts, and with each expert shared by a tensor-parallel group, as columns."""
    tensor = splits["tensor"]
    shares = (tensor > 1) & (splits["data"] % splits["expert"] == 0)
    rows = np.repeat(np.arange(len(tensor)), 1 + shares)
    table = {name: column[rows] for name, column in splits.items()}
    is_shared = np.diff(rows, prepend=-1) == 0
    return {**table, "expert_tensor": np.where(is_shared, table["tensor"], table["expert_tensor"])}


def _keep_one_per_octave(micro: Ints, allowed: Mask) -> Mask:
    """Return a mask, (n, m), of the sizes that each row tries: at most one from each power of two up to the next.

    A row tries the power of two if it is allowed. Otherwise it tries the largest allowed size before the next power.

    Args:
        micro: sizes in ascending order, such as samples of a micro-batch, (m,).
        allowed: whether each row can have each size, (n, m).
    """
    octave = np.frexp(micro)[1]
    starts = np.flatnonzero(np.diff(octave, prepend=-1))
    if len(starts) == len(micro):
        return allowed
    worth = allowed * np.where(micro & (micro - 1) == 0, 2 * micro, micro)
    most = np.maximum.reduceat(worth, starts, axis=1)
    return np.asarray(allowed & (worth == most[:, np.searchsorted(octave[starts], octave)]))


def list_expert_degrees(model: Model, ranks: Ints) -> Ints:
    """Return the possible expert-parallel degrees of a model on each number of ranks, (n, degrees), padded with 0.

    A degree divides both the ranks and the experts. Distributed embedding tables are always spread over all ranks. A
    row-sharded classifier is spread over all ranks or none.
    """
    if zoo.has_distributed_tables(model):
        return ranks[:, None]
    if zoo.has_row_shardable_weights(model):
        return np.stack([np.ones_like(ranks), np.where(ranks > 1, ranks, 0)], axis=1)
    degrees = np.array(divisors(zoo.count_experts(model) or 1), ranks.dtype)
    return np.where(ranks[:, None] % degrees == 0, degrees, 0)


def _experts_fold_over_tensor(workload: Workload) -> bool:
    return workload.framework is None or find_framework_features(workload.framework).experts_fold_over_tensor


def _enumerate_combinations(workload: Workload) -> tuple[_Table, Mask]:
    """Return all W combinations of plan columns that are neither degrees of parallelism nor the micro-batch.

    The columns are ZeRO stage, recomputation, sequence parallelism, virtual stages and pipeline schedule. The mask, (2
    ** 6, W), says which combinations are allowed for each set of `_DEGREES` that are above one.
    """
    model = workload.model
    # Servers hold whole gradients, and give each replica all of them.
    is_whole = not workload.training or workload.gradient_sync == "parameterServer"
    zero = [0] if is_whole else [3] if workload.offload == "parameters" else [0, 1, 2, 3]
    recompute = [0]
    if workload.checkpointing is not None:
        zoo.refuse_useless_recomputation(model, workload.checkpointing, "training.activationCheckpointing")
        recompute = [encode_modules(workload.checkpointing)]
    elif workload.training:
        recompute = [encode_modules(value) for value in list_searched_recomputations(workload)]
    schedules = list_searched_schedules(workload)
    codes = [0, *(SCHEDULE_CODES[name] for name in schedules)]
    virtual = np.array(_list_virtual_stages(workload), np.int32)
    # Frameworks tell one virtual stage from several alone.
    few = 1 + np.unique(virtual > 1)
    ways, some = (_combine_settings(codes, recompute, zero, numbers) for numbers in (virtual, few))
    kinds = np.arange(1 << len(_DEGREES), dtype=np.int32)
    degrees = {name: 1 + (kinds >> place & 1) for place, name in enumerate(_DEGREES)}
    count = len(some["zero_stage"])
    one = np.ones(count * len(kinds), np.int32)
    table = Plans(
        **{name: np.repeat(column, count) for name, column in degrees.items()},
        **{name: np.tile(column, len(kinds)) for name, column in some.items()},
        micro_batch=one,
        gradient_accumulation=one,
    )
    able = find_frameworks(workload)
    allowed = np.any([framework.executes(table) for framework in able], axis=0)
    if workload.offloaded_activations:
        allowed &= np.any([framework.executes(table) & framework.offloads(table) for framework in able], axis=0)
    if workload.bucket_mib is not None and not is_whole:
        allowed &= frameworks.find_framework(workload).allows_bucket_size(table)
    allowed &= frameworks.can_shard_frozen_weights(workload) | (table.zero_stage < 2)
    allowed &= (table.sequence_parallel == 0) | (table.tensor > 1)
    allowed &= (table.virtual_stages == 1) | (table.pipeline > 1)
    allowed &= (table.schedule == 0) | (table.pipeline > 1)
    if workload.loss is not None:
        allowed &= table.pipeline == 1
    if workload.offload == "parameters":
        allowed &= table.pipeline == 1
    else:
        allowed &= (table.zero_stage == 0) | (table.replicas > 1)
    by_virtual = allowed.reshape(-1, len(few))
    allowed = by_virtual[:, np.searchsorted(few, 1 + (virtual > 1))].reshape(len(kinds), -1)
    for name in schedules:
        least, most = find_schedule_costs(name).virtual
        fits = (ways["virtual_stages"] >= least) & (ways["virtual_stages"] <= most)
        allowed &= (ways["schedule"] != SCHEDULE_CODES[name]) | fits
    return ways, allowed


def _combine_settings(schedules: list[int], recompute: list[int], zero: list[int], virtual: Ints) -> _Table:
    """Return every combination of the arguments with and without sequence parallelism, as columns."""
    sizes = (schedules, [0, 1], recompute, zero, virtual)
    names = ("schedule", "sequence_parallel", "checkpointing", "zero_stage", "virtual_stages")
    grid = np.meshgrid(*(np.array(size, np.int32) for size in sizes), indexing="ij")
    return {name: column.ravel() for name, column in zip(names, grid, strict=True)}


def list_searched_recomputations(workload: Workload) -> tuple[Checkpointing, ...]:
    """Return the recomputation modes that the search tries: those of the model, and policies of the framework.

    A policy is left out if the model lacks a module that the policy recomputes.
    """
    model = workload.model
    own = zoo.list_modules(model)
    able = list(FRAMEWORKS.values()) if workload.framework is None else [find_framework_features(workload.framework)]
    named = dict.fromkeys(value for one in able for value in one.policies.values())
    return (*zoo.list_recomputation_modes(model), *(value for value in named if own >= {*split_modules(value)}))


_DEGREES = ("data", "tensor", "pipeline", "context", "expert", "expert_tensor")


def _allow_combinations(workload: Workload, outer: _Table, ways: _Table, allowed: Mask) -> tuple[Rows, Mask]:
    """Return which of the W combinations in `ways` each row of `outer` may have.

    Rows with the same allowed combinations form a kind. The result is the index of each row's kind, (rows,), and a mask
    of the combinations that each kind may have, (kinds, W). `allowed` is the mask of `_enumerate_combinations`.
    """
    # Tables and classifiers are spread by the model's own code, whatever framework runs the rest.
    degrees = _DEGREES if zoo.count_experts(workload.model) else _DEGREES[:-2]
    used = np.sum([(outer[name] > 1) << place for place, name in enumerate(degrees)], axis=0)
    pipeline = outer["pipeline"]
    divides = outer["gradient_accumulation"] % pipeline == 0
    spread = workload.sequence_length // outer["context"] % outer["tensor"] == 0
    groups = [outer["data"]] if workload.shard_degree is not None else []
    laws = {SCHEDULE_CODES[name]: find_schedule_costs(name) for name in list_searched_schedules(workload)}
    most_rounds = max((law.least_rounds for law in laws.values()), default=0)
    rounds = np.minimum(outer["gradient_accumulation"] // pipeline, most_rounds)
    if most_rounds:
        groups.append(rounds)
    kinds = distinct_rows(used, pipeline, divides.astype(int), spread.astype(int), *groups)
    used, pipeline, divides, spread = (column[kinds.first] for column in (used, pipeline, divides, spread))
    # Interleaving needs equal pieces, and micro-batches that divide by the stages (arXiv 2104.04473, section 2.2).
    virtual = _list_virtual_stages(workload)
    pieces = np.zeros((int(pipeline.max(initial=1)) + 1, 2, len(virtual)), bool)
    for degree in np.flatnonzero(np.bincount(pipeline)).tolist():
        pieces[degree] = [can_split_virtual_stages(workload, degree, number) for number in virtual]
        pieces[degree, 0] &= np.array(virtual) == 1
    interleaves = _keep_one_per_octave(np.array(virtual), pieces[pipeline, divides.astype(int)])
    mask: Mask = allowed[used] & interleaves[:, np.searchsorted(virtual, ways["virtual_stages"])]
    mask &= spread[:, None] | (ways["sequence_parallel"] == 0)
    for code, law in laws.items():
        if law.least_rounds:
            mask &= (ways["schedule"] != code) | (rounds[kinds.first, None] >= law.least_rounds)
    if workload.shard_degree is not None:
        data = outer["data"][kinds.first, None]
        mask &= divides_into_shard_groups(workload.shard_degree, data) & can_use_hybrid_sharding(
            data, ways["zero_stage"]
        )
    return kinds.index, mask


def divides_into_shard_groups(shard_degree: int, data: Ints) -> Mask:
    """Return whether each number of data-parallel ranks divides into HSDP groups of `shard_degree`, (n,).

    Fewer ranks than `shard_degree` form one group.
    """
    return np.asarray((data % shard_degree == 0) | (data < shard_degree))


def can_use_hybrid_sharding(data: Ints, zero_stage: Ints) -> Mask:
    """Return whether each plan can use HSDP, in which every group of ranks together holds all shards, (n,).

    HSDP needs ZeRO stage 2 or 3, unless there is a single data-parallel rank.
    """
    return np.asarray((zero_stage >= 2) | (data == 1))


_ABILITIES: Mapping[str, tuple[Callable[[FrameworkFeatures], bool], str]] = {
    "shardDegree": (lambda one: one.hybrid_shards, "shards over all replicas"),
    "expertCapacity": (lambda one: one.has_expert_capacity, "has room for what arrives"),
    "offloadActivations": (lambda one: one.offload_activations != "none", "keeps activations on the GPU"),
}
"""Whether a framework supports a field of the training, and what one does that does not."""


def find_frameworks(workload: Workload) -> list[FrameworkFeatures]:
    """Return the frameworks that support a workload's loss, precision, offloading, hybrid sharding and recomputation.

    If the workload names a framework, return only that framework.

    Raises:
        SpecError: no framework, or not the named framework, supports them.
    """
    candidates = (
        list(FRAMEWORKS.values()) if workload.framework is None else [find_framework_features(workload.framework)]
    )
    if workload.loss is not None:
        priced = [find_framework_features(name) for name in PREFERENCE_FRAMEWORKS]
        candidates = [one for one in candidates if one in priced]
        if not candidates:
            problem = f"{workload.framework} trains on no preferences"
            raise SpecError("training.loss", problem, f"leave it out, or use one of {', '.join(PREFERENCE_FRAMEWORKS)}")
    for field, value, names in (
        ("training.precision", workload.precision, "precisions"),
        ("training.offload", workload.offload, "offload"),
        ("training.activationCheckpointing", workload.checkpointing, "checkpointing"),
        ("training.expertDispatch", workload.expert_dispatch, "expert_dispatch"),
        ("training.expertOverlap", workload.expert_overlap, "expert_overlap"),
    ):
        modules = names == "checkpointing" and value is not None and bool(split_modules(value))
        supporting = [
            one
            for one in candidates
            if value is None or (one.recomputes(value) if modules else value in getattr(one, names))
        ]
        if not supporting:
            listed = [*getattr(candidates[0], names), *(candidates[0].modules if modules else ())]
            known = ", ".join(dict.fromkeys([*listed, *(name for one in candidates for name in getattr(one, names))]))
            field = "training.recomputeModules" if modules else field
            who = workload.framework or "no framework with the rest of the job"
            problem = f"{who} has no {value}" if workload.framework else f"{who} has {value}"
            raise SpecError(field, problem, f"use one of {known}, or another framework")
        candidates = supporting
    needed = {
        "shardDegree": workload.shard_degree is not None,
        "expertCapacity": workload.expert_capacity is not None,
        "offloadActivations": bool(workload.offloaded_activations),
    }
    for field in (field for field, is_needed in needed.items() if is_needed):
        is_able, lacking = _ABILITIES[field]
        candidates = [one for one in candidates if is_able(one)]
        if not candidates:
            problem = f"{workload.framework or 'no framework with the rest of the job'} {lacking}"
            able = ", ".join(name for name, one in FRAMEWORKS.items() if is_able(one))
            raise SpecError(f"training.{field}", problem, f"leave it out, or use one of {able}")
    if workload.recompute_layers is not None:
        candidates = [one for one in candidates if "recomputation" in one.per_layer]
        if not candidates:
            problem = f"{workload.framework or 'no framework with the rest of the job'} recomputes all layers or none"
            raise SpecError("training.recomputeLayers", problem, "leave it out, or use another framework")
    return candidates
