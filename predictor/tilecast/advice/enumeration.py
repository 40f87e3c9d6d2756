"""Enumerate the plans by which a pool can run a job, with the memory in bytes that each plan needs.

A job may leave its global batch and its precision open. Each combination is a variant, whose plans are enumerated
separately. A job that sets its plan gets the plans that agree with it, even plans that the search would skip.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from tilecast import frameworks, search, zoo
from tilecast.advice.values import Request, require
from tilecast.hardware import Pool
from tilecast.layout import find_schedule_costs, parse_layout
from tilecast.recomputation import Checkpointing, split_modules
from tilecast.search import NO_LIMITS, PlanLimits, PlanTable
from tilecast.spec import (
    PIPELINE_SCHEDULES,
    PRECISIONS,
    PartialPlan,
    Plan,
    Plans,
    SearchTooLargeError,
    SpecError,
    Workload,
)
from tilecast.step.blocks import has_attention_kernels

# Each operator takes 0.1 ms and 3 KB. The largest published model whose layers all differ may have 13 combinations.
MOST_KERNELS = 64_000
"""Most operators times combinations of global batch, precision and pool, if there are several combinations."""
# Each plan takes 2 us and 500 to 900 bytes. The largest search in the documentation prices 400,000.
MOST_PLANS = 500_000
"""Most plans of all pools that one search prices. Above it, node counts are left out first, then global batches."""
MAX_BATCHES = 8
"""Most global batches of a range that are tried: the ends, and batches with many factors of two."""
FEWER_BATCHES = (4, 2, 0)
"""Most global batches of a range, besides the job's own, while the search has too many plans."""


@dataclass(frozen=True, slots=True)
class PlanEnumeration:
    """All plans that a pool could run for a job, whether or not they meet the job's constraints."""

    pool: Pool
    variants: tuple[Workload, ...]
    """Variants of the job that the pool's GPU supports."""
    tables: tuple[tuple[int, PlanTable], ...]
    """Tables of plans, none of them empty, each with the index of its variant."""

    def __len__(self) -> int:
        return sum(len(table.plans) for _, table in self.tables)


def enumerate_pools(request: Request, pools: Sequence[Pool]) -> list[PlanEnumeration]:
    """Enumerate the plans of each pool, at most `MOST_PLANS` in total.

    Raises:
        SearchTooLargeError: there are more plans even with the fewest node counts and global batches, or too many
            operators.
    """
    variant_counts = [len(list_job_variants(request, pool)) for pool in pools]
    kernels_priced = sum(variant_counts) * zoo.count_operators(request.workload)
    if max(variant_counts, default=0) > 1 and kernels_priced > MOST_KERNELS:
        raise _make_too_large_error(
            request, kernels_priced, MOST_KERNELS, "operators in all batches, precisions and pools"
        )
    *wider_limits, narrowest = _list_search_limits(request, pools)
    for limits, batches in wider_limits:
        with suppress(SearchTooLargeError):
            return _enumerate_all_pools(request, pools, limits, batches)
    return _enumerate_all_pools(request, pools, *narrowest)


def _list_search_limits(request: Request, pools: Sequence[Pool]) -> list[tuple[PlanLimits, int]]:
    """Return pairs of search limits and a maximum number of global batches, from the widest search to the narrowest.

    The search takes the first pair that gives at most `MOST_PLANS` plans. The first pair sets no limits. The second
    limits the node counts. The later pairs also limit the global batches in the job's range.
    """
    search_limits = [(NO_LIMITS, MAX_BATCHES)]
    for batches in (MAX_BATCHES, *FEWER_BATCHES) if request.batches else (MAX_BATCHES,):
        variant_count = sum(len(list_job_variants(request, pool, batches)) for pool in pools)
        search_limits.append((PlanLimits(max_plans=MOST_PLANS // max(1, variant_count)), batches))
    return search_limits


def _enumerate_all_pools(
    request: Request, pools: Sequence[Pool], limits: PlanLimits, batches: int
) -> list[PlanEnumeration]:
    enumerations: list[PlanEnumeration] = []
    for pool in pools:
        before = sum(len(each) for each in enumerations)
        enumerations.append(_enumerate_pool(request, pool, limits, batches, before))
    return enumerations


def _make_too_large_error(request: Request, number: int, limit: int, noun: str) -> SearchTooLargeError:
    """Return the error for a job whose open inputs make the search too large."""
    is_range = request.batches is not None
    name = "globalBatchSizeRange" if is_range else "allowedPrecisions" if request.precisions else "globalBatchSize"
    remedy = "narrow globalBatchSizeRange and allowedPrecisions, or state constraints.gpus"
    return SearchTooLargeError.from_counts(f"spec.training.{name}", number, limit, noun, remedy)


def enumerate_plans(
    request: Request, pool: Pool, limits: PlanLimits, only_plans: Plans | None = None
) -> PlanEnumeration:
    """Return all plans that a pool could run for a job, whether or not they meet the job's constraints.

    If no limits are given and there are more than `MOST_PLANS` plans, some node counts and global batches are left out.

    Args:
        request: the job.
        pool: the pool.
        limits: bounds of the enumeration.
        only_plans: the only plans to consider. If None, consider the plan that the job sets, or else all plans.
    """
    *wider_limits, narrowest = _list_search_limits(request, [pool]) if limits == NO_LIMITS else [(limits, MAX_BATCHES)]
    for bounds, batches in wider_limits:
        with suppress(SearchTooLargeError):
            return _enumerate_pool(request, pool, bounds, batches, 0, only_plans)
    return _enumerate_pool(request, pool, *narrowest, None, only_plans)


def _enumerate_pool(
    request: Request, pool: Pool, limits: PlanLimits, batches: int, before: int | None, only_plans: Plans | None = None
) -> PlanEnumeration:
    """Enumerate the plans of a pool.

    Args:
        request: the job.
        pool: the pool.
        limits: bounds of the enumeration.
        batches: maximum number of global batches from the job's range, besides the job's present batch.
        before: number of plans already found on other pools. If None, the number of plans is not limited.
        only_plans: the only plans to consider.

    Raises:
        SearchTooLargeError: with the plans of other pools there are more than `MOST_PLANS`.
    """
    variants = list_job_variants(request, pool, batches)
    tables: list[tuple[int, PlanTable]] = []
    for index, workload in enumerate(variants):
        requested = _enumerate_requested_plans(request, workload, pool) if only_plans is None else only_plans
        if requested is not None:
            if len(requested):
                tables.append((index, search.tabulate_plans(workload, requested, pool)))
            continue
        listing = search.find(workload, pool, limits)
        tables.append((index, listing))
        exact = request.constraints.gpus
        if exact is not None and limits.gpus is None and not np.any(listing.plans.gpus == exact):
            tables.append((index, search.find(workload, pool, replace(limits, gpus=exact))))
        count = sum(len(table.plans) for _, table in tables)
        if before is not None and before + count > MOST_PLANS:
            raise _make_too_large_error(request, before + count, MOST_PLANS, "plans left")
    return PlanEnumeration(pool, variants, tuple(item for item in tables if len(item[1].plans)))


def describe_skipped_plans(request: Request, enumerations: Sequence[PlanEnumeration]) -> list[str]:
    """Return a list with one sentence on the node counts and batches that the search skipped, or an empty list."""
    parts = []
    if any(table.is_bounded for each in enumerations for _, table in each.tables):
        parts.append("some node counts, degrees of expert tensor parallelism (etp) or pipeline schedules were left out")
    possible_batches, searched_batches = (
        {item.global_batch for group in groups for item in group}
        for groups in (
            [list_job_variants(request, each.pool) for each in enumerations],
            [each.variants for each in enumerations],
        )
    )
    if len(searched_batches) < len(possible_batches):
        parts.append(f"{len(searched_batches)} of {len(possible_batches)} global batches were tried")
    return [f"The job has more plans than one search prices: {' and '.join(parts)}."] if parts else []


def list_job_variants(request: Request, pool: Pool, most_batches: int = MAX_BATCHES) -> tuple[Workload, ...]:
    """Return a copy of the job for every precision and global batch that the request allows and the pool supports.

    The job's own precision and batch come first. At most `most_batches` global batches of the range are taken.
    """
    own = request.workload
    supported = search.find_framework_features(own.framework).precisions if own.framework else PRECISIONS
    precisions = dict.fromkeys((own.precision, *(name for name in request.precisions if name in supported)))
    batches = (
        own.global_batch,
        *(item for item in _select_batches(_list_batches_in_range(request), most_batches) if item != own.global_batch),
    )
    return tuple(
        replace(own, precision=precision, global_batch=batch, steps=count_run_steps(request, batch))
        for precision in precisions
        if pool.gpu.supports(precision) and has_attention_kernels(own, pool.gpu)
        for batch in batches
    )


def _list_batches_in_range(request: Request) -> list[int]:
    """Return at most `MAX_BATCHES` global batches in the job's range, ascending, all multiples of its micro-batch."""
    if request.batches is None:
        return []
    low, high = request.batches
    micro = request.workload.micro_batch or 1
    sizes = {low, high}
    # Numbers with the most factors of two are the ones that ranks and micro-batches divide.
    for power in range(high.bit_length(), -1, -1):
        step = 1 << power
        sizes |= set(range(-(-low // step) * step, high + 1, step)[:MAX_BATCHES])
        if len(sizes) >= MAX_BATCHES:
            break
    divided = sorted(item for item in sizes if item % micro == 0)
    return divided[:: -(-len(divided) // MAX_BATCHES)] if divided else []


def _select_batches(sizes: list[int], limit: int) -> list[int]:
    """Return at most `limit` of the ascending sizes: both ends, then the sizes with the most factors of two."""
    if len(sizes) <= limit:
        return sizes
    inner = sorted(sizes[1:-1], key=lambda size: (-(size & -size), size))
    return sorted([sizes[0], sizes[-1], *inner][:limit])


def count_run_steps(request: Request, batch: int) -> int | None:
    """Return how many steps of `batch` samples complete the run. If the job's length is unknown, return None."""
    own = request.workload
    if request.tokens is not None:
        return -(-request.tokens // replace(own, global_batch=batch).tokens_per_step)
    return None if own.steps is None else -(-own.steps * own.global_batch // batch)


def _enumerate_requested_plans(request: Request, workload: Workload, pool: Pool) -> Plans | None:
    """Return the plans that agree with the plan set in the request. If the request sets no plan, return None.

    The plans use the number of GPUs in the request, or as many as the job may use. If the job's framework can run some
    of these plans, only those are returned.
    """
    given, limits = request.plan, request.constraints
    if given is None:
        return None
    most = min(pool.max_gpus, limits.gpus or limits.max_gpus or pool.max_gpus)
    gpus = given.data * given.tensor * given.pipeline * given.context if given.data else most
    _require_recomputation(workload, given.checkpointing, "plan")
    if not 0 < gpus <= pool.max_gpus:
        return Plans.from_plans()
    plans = enumerate_partial_plan(workload, gpus, given, "plan")
    executable = search.find_framework_features(workload.framework).executes(plans) if workload.framework else None
    return plans.take(executable) if executable is not None and executable.any() else plans


def enumerate_partial_plan(workload: Workload, gpus: int, partial_plan: PartialPlan, field: str) -> Plans:
    """Return every plan on `gpus` GPUs that agrees with a partly or fully set plan.

    Raises:
        SpecError: the degrees do not multiply to the number of GPUs, do not divide the model or the batch, or do not
            suit the groups and the offloading that the job states. Errors name `field`.
    """
    data = _compute_data_degree(gpus, partial_plan, field)
    if zoo.has_distributed_tables(workload.model) and partial_plan.expert == 1:
        partial_plan = replace(partial_plan, expert=data)
    _require_divisible(workload, data, partial_plan, field)
    share = workload.global_batch // data
    problem = f"dp={data} does not divide the global batch {workload.global_batch}"
    require(workload.global_batch % data == 0, field, problem, "choose a divisor")
    micro = partial_plan.micro_batch or workload.micro_batch
    if micro is not None:
        problem = f"mb={micro} does not divide the {share} samples of a data-parallel rank"
        require(share % micro == 0, field, problem, "choose a divisor")
        virtual, pipeline, repeats = partial_plan.virtual_stages, partial_plan.pipeline, share // micro
        problem = f"vp={virtual} needs micro-batches that pp={pipeline} divides, not {repeats}"
        require(virtual == 1 or repeats % pipeline == 0, field, problem, "change mb, or leave vp out")
        rounds = find_schedule_costs(partial_plan.schedule).least_rounds
        problem = f"{partial_plan.schedule} with pp={pipeline} needs {rounds * pipeline} micro-batches, not {repeats}"
        require(repeats >= rounds * pipeline, field, problem, "lower mb or pp, or leave the schedule out")
    micros = [micro] if micro is not None else [b for b in search.divisors(share) if b & (b - 1) == 0 or b == share]
    if workload.loss == "kto":
        micros = [size for size in micros if size > 1]
        problem = "loss kto compares the answers of one micro-batch, and none has 2"
        require(bool(micros), field, problem, "raise mb or lower dp")
    checkpointing = partial_plan.checkpointing or workload.checkpointing
    if checkpointing:
        zoo.refuse_useless_recomputation(workload.model, checkpointing, field)
    modes = (
        [checkpointing]
        if checkpointing
        else search.list_searched_recomputations(workload)[: None if workload.training else 1]
    )
    is_served = workload.gradient_sync == "parameterServer"
    problem = f"zero={partial_plan.zero_stage} spreads gradients that a parameter server sums whole"
    remedy = "leave zero out, or use training.gradientSync allReduce"
    require(not (is_served and partial_plan.zero_stage), field, problem, remedy)
    zeros = range(4) if data * partial_plan.context > 1 and workload.training and not is_served else range(1)
    stages = zeros if partial_plan.zero_stage is None else [partial_plan.zero_stage]
    can_spread = partial_plan.tensor > 1 and workload.sequence_length // partial_plan.context % partial_plan.tensor == 0
    problem = f"sp=1 finds no tokens that tp={partial_plan.tensor} divides"
    require(can_spread or not partial_plan.sequence_parallel, field, problem, "leave sp out")
    norms = (
        [False, True][: 1 + can_spread] if partial_plan.sequence_parallel is None else [partial_plan.sequence_parallel]
    )
    plans = Plans.from_plans(
        *(
            Plan(
                data=data,
                tensor=partial_plan.tensor,
                pipeline=partial_plan.pipeline,
                context=partial_plan.context,
                expert=partial_plan.expert,
                zero_stage=stage,
                micro_batch=size,
                gradient_accumulation=share // size,
                checkpointing=mode,
                sequence_parallel=split,
                virtual_stages=partial_plan.virtual_stages,
                expert_tensor=partial_plan.expert_tensor,
                schedule=partial_plan.schedule,
            )
            for size, stage, mode, split in itertools.product(micros, stages, modes, norms)
        )
    )
    return _keep_matching_plans(workload, plans, field)


def _keep_matching_plans(workload: Workload, plans: Plans, field: str) -> Plans:
    """Return the plans that agree with the job's settings of sharding groups, offloading and recomputation.

    Raises:
        SpecError: no plan agrees, or no framework has these options. Errors about plans name `field`.
    """
    if not frameworks.can_shard_frozen_weights(workload):
        whole = plans.zero_stage < 2
        problem = f"ZeRO {int(plans.zero_stage.max())} splits weights, which bitsandbytes does not do in INT8"
        require(bool(whole.any()), field, problem, "use zero=0 or zero=1, or training.quantization nf4")
        plans = plans.take(whole)
    degree = workload.shard_degree
    if degree is None and not workload.offloaded_activations and workload.recompute_layers is None:
        return plans
    able_frameworks = search.find_frameworks(workload)
    data = int(plans.data[0])
    if degree is not None:
        problem = f"training.shardDegree {degree} does not divide the {data} data-parallel ranks"
        remedy = f"let training.shardDegree divide {data}, or leave it out"
        require(bool(search.divides_into_shard_groups(degree, plans.data).all()), field, problem, remedy)
        kept = search.can_use_hybrid_sharding(plans.data, plans.zero_stage)
        problem = f"ZeRO {int(plans.zero_stage.max())} has no groups of training.shardDegree {degree} ranks"
        require(bool(kept.any()), field, problem, "use zero=2 or zero=3, or leave training.shardDegree out")
        plans = plans.take(kept)
    if workload.offloaded_activations:
        kept = np.any([framework.offloads(plans) for framework in able_frameworks], axis=0)
        problem = f"{workload.framework or 'the job'} offloads activations only without pipeline and recomputation"
        remedy = "write pp=1,ac=none, or leave training.offloadActivations out"
        require(bool(kept.any()), field, problem, remedy)
        plans = plans.take(kept)
    return plans


def _require_recomputation(workload: Workload, partial_plan: Checkpointing | None, field: str) -> None:
    """Raise SpecError if a plan's recomputation contradicts the job's list of recomputed layers or modules."""
    own = workload.checkpointing
    if partial_plan is None or own is None or partial_plan == own:
        return
    is_counted, modules = workload.recompute_layers is not None, split_modules(own)
    name = "training.recomputeLayers" if is_counted else "training.recomputeModules"
    problem = f"ac={partial_plan} contradicts {name} {workload.recompute_layers if is_counted else own}"
    remedy = f"write ac={own} or leave ac out, or leave {name} out"
    require(not (is_counted or modules), field, problem, remedy)


def _require_divisible(workload: Workload, data: int, partial_plan: PartialPlan, field: str) -> None:
    """Raise SpecError unless every parallel degree divides the dimension of the model that it splits."""
    model = workload.model
    tensor, pipeline, context, virtual = (
        partial_plan.tensor,
        partial_plan.pipeline,
        partial_plan.context,
        partial_plan.virtual_stages,
    )
    whole = {} if zoo.is_transformer(model) else {"tp": tensor, "cp": context}
    if whole and not model.trace:
        whole |= {"pp": pipeline, "vp": virtual}
    kind = "whose trace is cut into stages alone" if model.trace else "whose family is priced data parallel alone"
    for name, degree in whole.items():
        problem = f"{name}={degree} does not split {model.name}, {kind}"
        require(degree == 1, field, problem, f"leave {name} out")
    noun = f"the {model.heads} heads, {model.kv_heads} key/value heads and the MLP of {model.name}"
    require(search.can_split_heads(workload, tensor), field, f"tp={tensor} does not divide {noun}", "choose a divisor")
    if pipeline > 1 and workload.pipeline_layout is not None:
        pieces = len(parse_layout(workload.pipeline_layout).pieces)
        problem = f"pp={pipeline} with vp={virtual} has other than the {pieces} stages of training.pipelineLayout"
        require(pipeline * virtual == pieces, field, problem, f"let pp times vp be {pieces}")
    problem = f"pp={pipeline} is a pipeline, in which training.loss {workload.loss} is not priced"
    require(pipeline == 1 or workload.loss is None, field, problem, "leave pp out, or leave training.loss out")
    problem = f"pp={pipeline} leaves stages of {model.name} without a layer"
    require(pipeline == 1 or search.has_full_stages(workload, pipeline), field, problem, "lower it")
    problem = f"vp={virtual} with pp={pipeline} does not divide the {model.layers} layers of {model.name}"
    if frameworks.find_framework(workload).counts_ends:
        problem += ", with or without embedding and loss as layers"
    is_cut = virtual == 1 or (pipeline > 1 and search.has_equal_virtual_stages(workload, pipeline, virtual))
    require(is_cut, field, problem, "choose a divisor, or leave vp out")
    _require_schedule(workload, partial_plan, field)
    pieces = 2 * context if model.causal else context
    problem = f"cp={context} does not cut {workload.sequence_length} tokens into {pieces} pieces"
    require(context == 1 or workload.sequence_length % pieces == 0, field, problem, "choose a divisor")
    if zoo.has_row_shardable_weights(model):
        problem = f"ep={partial_plan.expert} does not spread the rows of {model.name} over {data} ranks"
        degrees = search.list_expert_degrees(model, np.array([data]))[0]
        require(partial_plan.expert in degrees, field, problem, f"write ep={data}")
        return
    experts = zoo.count_experts(model) or 1
    problem = f"ep={partial_plan.expert} spreads experts, of which {model.name} has none"
    require(partial_plan.expert == 1 or experts > 1, field, problem, "leave ep out")
    divides = experts % partial_plan.expert == 0 and data * tensor % partial_plan.expert == 0
    problem = f"ep={partial_plan.expert} does not divide {experts} experts over {data * tensor} ranks"
    require(divides, field, problem, "choose a divisor of both")
    sharers = partial_plan.expert_tensor
    problem = f"etp={sharers} shares experts, of which {model.name} has none"
    require(sharers == 1 or experts > 1, field, problem, "leave etp out")
    width = model.ffn_hidden
    divides = data * tensor % (partial_plan.expert * sharers) == 0 and width % sharers == 0
    problem = (
        f"etp={sharers} with ep={partial_plan.expert} does not divide {data * tensor} ranks and experts of {width}"
    )
    require(divides, field, problem, "choose a divisor of both, usually tp or 1")


def _require_schedule(workload: Workload, partial_plan: PartialPlan, field: str) -> None:
    """Raise SpecError unless the pipeline of a plan can run the schedule that the plan or the job sets."""
    own, stated, virtual = workload.pipeline_schedule, partial_plan.schedule, partial_plan.virtual_stages
    if stated is not None:
        remedy = "leave the schedule out"
        require(partial_plan.pipeline > 1, field, f"{stated} schedules a pipeline, and pp is 1", remedy)
        problem = f"{stated} contradicts training.pipelineSchedule {own}"
        require(own in (None, stated), field, problem, "leave one of them out")
        known = (
            search.find_framework_features(workload.framework).schedules if workload.framework else PIPELINE_SCHEDULES
        )
        problem, names = f"{workload.framework} has no {stated}", [name for name in PIPELINE_SCHEDULES if name in known]
        require(stated in known, field, problem, f"use {', '.join(names)}" if names else remedy)
    if partial_plan.pipeline > 1 and (schedule := stated or own) is not None:
        least, most = find_schedule_costs(schedule).virtual
        problem = (
            f"vp={virtual} does not suit " + f"training.pipelineSchedule {schedule}" * (not stated) + (stated or "")
        )
        remedy = f"write vp={least}" if least == most else f"write vp={least} or more"
        require(least <= virtual <= most, field, problem, remedy)


def _compute_data_degree(gpus: int, partial_plan: PartialPlan, field: str) -> int:
    """Return the data-parallel degree of a plan that the user set, on `gpus` GPUs.

    Raises:
        SpecError: the degrees do not multiply to the number of GPUs.
    """
    others = partial_plan.tensor * partial_plan.pipeline * partial_plan.context
    if partial_plan.data is None and gpus % others == 0:
        return gpus // others
    if partial_plan.data is None or partial_plan.data * others != gpus:
        text = f"{partial_plan.data} x {others}" if partial_plan.data else str(others)
        raise SpecError(field, f"degrees of {text} do not make {gpus} GPUs", "let them multiply to the GPU count")
    return partial_plan.data
