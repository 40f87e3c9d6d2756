"""Compute the advice for one job: read the job and its pools, apply measured steps, and search for a plan.

The command line and the Python API share this module, so that they give equal advice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, get_args

from tilecast import constants, fuse, search, zoo
from tilecast.advice import Advice, Baseline, Change, Offer, Request, advise, measured
from tilecast.frameworks import FRAMEWORKS, UNSET, assumed_version, find_versioned_product, with_framework
from tilecast.hardware import Pool
from tilecast.inputs import job as job_inputs
from tilecast.inputs import launches, measurements, reading
from tilecast.inputs import pools as pool_inputs
from tilecast.inputs.job import JobInput
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.recomputation import describe
from tilecast.render import launch as launched
from tilecast.render.launch import LAUNCHERS, LaunchSetting
from tilecast.render.units import format_duration
from tilecast.spec import Framework, PartialPlan, Plans, SpecError
from tilecast.step.blocks import find_fused_attention

if TYPE_CHECKING:
    from tilecast.jobs.candidates import JobCandidates


@dataclass(frozen=True, slots=True)
class AdviceInputs:
    """A user's request for advice: the job, the pools and the options, from the command line or the Python API."""

    job: JobOptions
    pools: PoolOptions
    baseline: str | None = None
    """Configuration in use today: POOL:N[:PLAN][=STEP]."""
    plan: str | None = None
    """Plan to price instead of searching for one."""
    measured: Sequence[str] = field(default_factory=tuple)
    """Measured steps. Each is POOL:N[/PLAN]=STEP, @FILE.json, or only the seconds of a step."""
    launch: str | None = None
    """Launcher that must be able to run the plan."""
    seeks_fewest: bool = False
    """Whether to search for the fewest GPUs that hold the job, whatever the job's objective is."""


@dataclass(frozen=True, slots=True)
class AdviceResult:
    """The advice for `AdviceInputs`, with the job and the pools it was computed from."""

    job: JobInput
    advice: Advice
    pools: Sequence[Pool]
    """Pools that the job may use."""
    candidates: JobCandidates | None = None
    """Pools that an annotated job may use, and why it may not use the others. None for a TrainingJob."""
    seconds: float | None = None
    """Step time from `measured` that was given without a pool, in seconds."""


def compute_advice(inputs: AdviceInputs) -> AdviceResult:
    """Read the job and the pools of the inputs, and return the advice for them.

    Raises:
        SpecError: the job, the pools or an option cannot be read, or they contradict each other.
    """
    try:
        job = job_inputs.read_job(_add_launch_gpus(inputs))
        try:
            return _compute_job_advice(inputs, job)
        except SpecError as error:
            if inputs.baseline and error.field.startswith("spec.baseline"):
                raise error.at("--baseline") from None
            raise job.name_flag_in_error(error) from None
    except SpecError as error:
        if len(missing := _list_missing(inputs, error)) < 2:
            raise
        example = " ".join(f"{flag} {_EXAMPLES[flag]}" for flag in missing)
        names = f"{', '.join(missing[:-1])} and {missing[-1]}"
        raise SpecError(names, "are missing", f"add for instance {example}") from None


def _add_launch_gpus(inputs: AdviceInputs) -> JobOptions:
    """Return the options of the job, with a GPU count added if the job is a launch command.

    The count is that of the baseline, or of the first pool if there is no baseline.
    """
    if not launches.is_launch(inputs.job):
        return inputs.job
    if inputs.baseline:
        return replace(inputs.job, gpus=_parse_baseline(measurements.split_baseline(inputs.baseline)[0]).gpus)
    pools = pool_inputs.read_pools(inputs.pools)
    return replace(inputs.job, gpus=pools[0].max_gpus if pools else None)


def _add_launch_notes(
    advice: Advice, job: JobInput, request: Request, pools: Sequence[Pool], explained: bool = False
) -> Advice:
    """Return the advice with notes on the job's launch command: how it was read, and which options to change.

    With these options, the launch runs the best plan on the same GPUs. If `explained`, a note gives the reason for the
    baseline's pool.
    """
    reading = job.launch
    if reading is None:
        return advice
    baseline, notes = request.baseline, list((job.reading or reading).summary())
    if baseline is not None:
        after = advice.best
        if after is None or (after.pool.name, after.gpus) != (baseline.pool, baseline.gpus):
            limits = replace(request.constraints, gpus=baseline.gpus, max_gpus=None)
            theirs = [pool for pool in pools if pool.name == baseline.pool]
            after = advise(replace(request, constraints=limits, baseline=None), theirs).best if theirs else None
        if after is not None:
            notes.append(launches.describe_changes(reading, advice.baseline, after))
    if explained and (why := launches.explain_baseline(reading, pools)):
        notes.append(why)
    return _add_notes(advice, notes)


_EXAMPLES = {"--batch": "128", "--seq": "8192", "--gpus": "h100-sxm:16"}


def _list_missing(inputs: AdviceInputs, error: SpecError) -> list[str]:
    """Return all required flags that are missing from the inputs.

    Return an empty list if `error` is about something else.

    Args:
        inputs: the user's inputs.
        error: the error that the inputs raised.
    """
    pools = inputs.pools
    has_pools = pools.nodes is not None or pools.gpus is not None or pools.context is not None
    if not (error.problem == "is missing" or (error.field == "--nodes" and not has_pools)):
        return []
    missing, values = [], dict(inputs.job.values)
    # Fill in each missing value, so that the next error names the next missing flag.
    for flag, value in (("--batch", 1), ("--seq", 1)):
        try:
            job_inputs.read_job(replace(inputs.job, values=values)).request()
        except SpecError as found:
            if found.field == flag and found.problem == "is missing":
                missing.append(flag)
                values[flag.removeprefix("--")] = value
    return missing if has_pools else [*missing, "--gpus"]


def _compute_job_advice(inputs: AdviceInputs, job: JobInput) -> AdviceResult:
    request, pools = job.request(), pool_inputs.read_pools(inputs.pools)
    if inputs.seeks_fewest:
        request = replace(request, objective="fewestGpus", deadline_s=None, budget=None, target_step_s=None)
    seconds, runs = measurements.parse_measurements(
        inputs.measured, has_offer=bool(inputs.baseline or inputs.plan is not None or job.launch is not None)
    )
    step = list[measurements.UnresolvedRun]()
    if inputs.baseline:
        where, step = measurements.split_baseline(inputs.baseline)
        request = replace(request, baseline=_parse_baseline(where))
        runs = [*runs, *step]
    if job.launch is not None and (launched := launches.find_baseline(job.launch, pools, request.baseline)):
        runs = launches.add_launch_plan(runs, launched)
        if job.source is None:
            request = replace(request, baseline=launched)
    own = measured.forecast_earlier_runs(request, measurements.find_measured_pools(runs, pools))
    if request.baseline is not None and request.baseline.plan is None and inputs.baseline and own and step:
        # The measured step of the baseline, the last run, is that of the plan which the baseline shows.
        plan = PartialPlan.parse(str(own[-1].plan), "--baseline")
        request = replace(request, baseline=replace(request.baseline, plan=plan))
    pools, assumed = measured.correct_pools(request, pools, own), ""
    if request.baseline and request.baseline.pool not in {pool.name for pool in pools}:
        field = "--baseline" if inputs.baseline else "spec.baseline.pool"
        usual = measurements.build_pool_for_run(request.baseline.pool, request.baseline.gpus, field)
        (elsewhere,) = measured.correct_pools(request, [usual], own)
        request = replace(request, baseline=replace(request.baseline, elsewhere=elsewhere))
        assumed = f"Assumed of your baseline: {pool_inputs.describe_nodes(elsewhere)}."
    if inputs.plan is not None:
        request = _limit_request_to_plan(request, inputs.plan)
        request = replace(request, plan=_complete_requested_plan(request, inputs))
    notes = (*pool_inputs.list_pool_notes(inputs.pools, pools), *([assumed] if assumed else []))
    requests = build_launcher_requests(request, inputs.launch) if inputs.launch else (request,)
    if job.source is None:
        advice = _choose_advice(requests, pools)
        advice = _add_notes(advice, (*notes, *job.notes, *_list_attention_notes(advice), *_list_launcher_notes(advice)))
        advice = measured.add_run_notes(advice, own)
        if job.launch is not None:
            advice = _add_launch_notes(advice, job, request, pools, explained=not inputs.baseline)
        return AdviceResult(job, _replace_fields_by_flags(job, advice), pools, seconds=seconds)
    from tilecast.jobs.candidates import order_offers_by_quota

    labels, devices = pool_inputs.read_node_labels(inputs.pools), pool_inputs.read_devices(inputs.pools)
    narrowed = [job.source.narrow_request(one, pools, labels, devices) for one in requests]
    candidates = narrowed[0][1]
    if job.launch is not None:
        usable, launch = candidates.pools, job.launch
        narrowed = [
            (replace(one, baseline=launches.find_baseline(launch, usable, one.baseline)), choice)
            for one, choice in narrowed
        ]
    best = _choose_advice([one for one, _ in narrowed], candidates.pools)
    best = order_offers_by_quota(best, candidates)
    advice = measured.add_run_notes(_add_notes(best, (*notes, *job.notes, *_list_launcher_notes(best))), own)
    advice = _add_launch_notes(advice, job, narrowed[0][0], candidates.pools)
    return AdviceResult(job, advice, candidates.pools, candidates, seconds)


def find_measured_offer(inputs: AdviceInputs, result: AdviceResult) -> Offer:
    """Return the offer to compare with a measured step that names no pool: the baseline or the only plan.

    Raises:
        SpecError: the measured step is not a duration, or it is unclear to which offer it belongs.
    """
    if result.seconds is None or not 0 < result.seconds < 1e9:
        raise SpecError("--measured", f"{result.seconds or 0:g} is no step time", "give seconds, more than 0")
    if inputs.baseline or (result.job.launch is not None and inputs.plan is None):
        if result.advice.baseline is None:
            raise SpecError("--measured", "the baseline cannot be priced", "see why without --measured")
        return result.advice.baseline
    if inputs.plan is None or len(result.advice.offers) != 1:
        remedy = f"write POOL:N=STEP, for instance h100-sxm:8={result.seconds:g}s, or add --baseline POOL:N"
        raise SpecError("--measured", f"{result.seconds:g} s does not say of which GPUs and plan it is", remedy)
    return result.advice.offers[0]


def _list_attention_notes(advice: Advice) -> tuple[str, ...]:
    """Return a note that names the assumed attention library, if other frameworks have faster or slower libraries.

    The result is empty for a model without attention.
    """
    best = advice.best
    if best is None or best.workload.framework is not None or best.workload.attention != "auto":
        return ()
    if not zoo.runs_fused_attention(best.workload):
        return ()
    gpu, known = best.pool.gpu, constants.shipped_constants()
    mine = find_fused_attention(best.workload, gpu, known) if "attention" in fuse.passes(best.workload) else None
    others = {
        library.time_factor(gpu, "forward")
        for name in get_args(Framework)
        if (library := find_fused_attention(with_framework(best.workload, name), gpu, known)) is not None
    }
    if mine is None or len(others) < 2:
        return ()
    version = f"{find_versioned_product(UNSET)} {assumed_version(UNSET)}"
    return (
        f"Assumed: attention by {mine.title}, as {version} runs it on {gpu.name}; --framework, --framework-version "
        "or --attention say otherwise.",
    )


def _list_launcher_notes(advice: Advice) -> tuple[str, ...]:
    """Return a note that lists the launchers that run the recommended plan, each with its step time.

    There is no note if the job names a framework. Without one, a plan may combine features that no single framework
    has.
    """
    best = advice.best
    if best is None or best.workload.framework is not None or not best.workload.training:
        return ()
    plans, steps = Plans.from_plans(best.plan), dict[str, float]()
    plain = float(search.price(best.workload, plans, best.pool).step_s[0])
    setting = LaunchSetting.from_offer(advice.request.name, best)
    for name, framework in launched.list_launchers(setting).items():
        priced = search.price(with_framework(best.workload, framework), plans, best.pool)
        if priced.fits[0]:
            steps[name] = best.step_s * float(priced.step_s[0]) / plain
    if not steps and (best.workload.loss is not None or best.workload.frozen_parts):
        return ("No launcher of --launch trains on preferences or freezes parts of a model.",)
    if not steps:
        return ("No framework is stated, and no launcher runs this plan: --launch NAME finds the best plan of one.",)
    texts = (f"{name} ({format_duration(steps[name])})" for name in sorted(steps, key=lambda one: steps[one]))
    return (
        f"No framework is stated: of --launch, {', '.join(texts)} can run this plan; each has a best plan of its own.",
    )


def _replace_fields_by_flags(job: JobInput, advice: Advice) -> Advice:
    """Return the advice with command-line flags in its sentences, in place of the spec's field names."""

    def renamed(change: Change | None) -> Change | None:
        return None if change is None else replace(change, text=job.replace_fields_by_flags(change.text))

    rejections = (
        replace(
            item,
            message=job.replace_fields_by_flags(item.message),
            remedy=job.replace_fields_by_flags(item.remedy),
            change=renamed(item.change),
        )
        for item in advice.rejections
    )
    why_not = (
        replace(item, message=job.replace_fields_by_flags(item.message), change=renamed(item.change))
        for item in advice.why_not
    )
    notes = tuple(map(job.replace_fields_by_flags, advice.notes))
    return replace(advice, notes=notes, rejections=tuple(rejections), why_not=tuple(why_not))


def _add_notes(advice: Advice, notes: Sequence[str]) -> Advice:
    return replace(advice, notes=(*advice.notes, *notes))


_GAIN = 0.05
"""Least share of the objective that another framework of the same launcher must save to be chosen."""


def _choose_advice(requests: Sequence[Request], pools: Sequence[Pool]) -> Advice:
    """Return the best advice among requests that differ only in their framework.

    Advice is preferred if its framework can run the recommended plan. A later request replaces an earlier one if only
    the later one has a recommendation, if it improves the objective by more than `_GAIN`, or if it improves the
    objective with memory to spare while the earlier plan is tight.
    """
    advices = [_advise_on_plan(request, pools) for request in requests]
    chosen, *others = [advice for advice in advices if _is_executable(advice)] or advices
    for other in others:
        if other.best is None:
            continue
        # Memory to spare is worth the wrapping without any gain.
        is_roomier = chosen.best is not None and chosen.best.is_tight and not other.best.is_tight
        least = 1.0 if is_roomier else 1 - _GAIN
        if chosen.best is None or _objective_value(other, other.best) < least * _objective_value(chosen, chosen.best):
            chosen = other
    return replace(chosen, safer=_find_safer_offer(chosen, advices))


def _find_safer_offer(chosen: Advice, advices: Sequence[Advice]) -> Offer | None:
    """Return the best plan with memory to spare under any framework, on the pool of the recommended plan.

    If the recommended plan is not tight, or no such plan exists, return the safer plan of the chosen advice.
    """
    best = chosen.best
    if best is None or not best.is_tight:
        return chosen.safer
    shown = [chosen, *(advice for advice in advices if advice is not chosen and _is_executable(advice))]
    roomy = [
        offer
        for advice in shown
        for offer in (advice.safer, advice.best)
        if offer is not None and not offer.is_tight and offer.pool.name == best.pool.name
    ]
    return min(roomy, key=lambda offer: _objective_value(chosen, offer), default=chosen.safer)


def _is_executable(advice: Advice) -> bool:
    """Return whether the job's framework can run the recommended plan.

    If no plan is recommended, return False. If the job names no framework, return True.
    """
    best, framework = advice.best, advice.request.workload.framework
    if best is None or framework is None:
        return best is not None
    return bool(search.find_framework_features(framework).executes(Plans.from_plans(best.plan))[0])


def _objective_value(advice: Advice, offer: Offer) -> float:
    """Return an offer's amount of what the objective minimises: GPUs, or time, cost or energy per sample."""
    goal = advice.request.objective_record
    if goal.fewest_gpus:
        return float(offer.gpus)
    return goal.quantity.amount(offer.pool, offer.gpus, offer.step_s) / offer.workload.global_batch


def _advise_on_plan(request: Request, pools: Sequence[Pool]) -> Advice:
    try:
        return advise(request, pools)
    except SpecError as error:
        if error.field != "plan":
            raise
        raise SpecError("--plan", error.problem, error.remedy) from None


def _parse_baseline(text: str) -> Baseline:
    where, _, plan = text.partition(":")[2].partition(":")
    pool, gpus = reading.parse_name_and_count("--baseline", f"{text.partition(':')[0]}:{where}")
    return Baseline(pool, gpus, PartialPlan.parse(plan, "--baseline") if plan else None)


def _limit_request_to_plan(request: Request, text: str) -> Request:
    """Return the request limited to the plan in `text`. A plan with a data degree also fixes the number of GPUs.

    Raises:
        SpecError: the plan cannot be read, or contradicts the constraints on GPUs.
    """
    plan = PartialPlan.parse(text, "--plan")
    if plan.data is None:
        return replace(request, plan=plan)
    gpus, limits = plan.data * plan.tensor * plan.pipeline * plan.context, request.constraints
    if limits.gpus not in (None, gpus):
        problem = f"its degrees multiply to {gpus} GPUs, constraints.gpus says {limits.gpus}"
        raise SpecError("--plan", problem, "change one of them")
    if limits.max_gpus is not None and gpus > limits.max_gpus:
        problem = f"its degrees multiply to {gpus} GPUs, above {limits.max_gpus}, the most that may be used"
        raise SpecError("--plan", problem, "lower a degree or raise --max-gpus")
    return replace(request, plan=plan, constraints=replace(limits, gpus=gpus))


_RECOMPUTATION = ("activation_checkpointing", "recompute_modules", "recompute_layers")
"""Names of the job options that set recomputation."""


def _complete_requested_plan(request: Request, inputs: AdviceInputs) -> PartialPlan | None:
    """Return the request's plan. If the plan does not state recomputation, it is taken from the job's options.

    Raises:
        SpecError: the plan states another recomputation or micro-batch than the job's options.
    """
    plan, workload, given = request.plan, request.workload, inputs.job.values
    if plan is None:
        return None
    micro_batch = given.get("micro_batch_size")
    if micro_batch is not None and plan.micro_batch not in (None, micro_batch):
        problem = f"mb={plan.micro_batch} contradicts --micro-batch-size {micro_batch}"
        raise SpecError("--plan", problem, "leave one of them out")
    option = next((name for name in _RECOMPUTATION if name in given), None)
    if option is None or workload.checkpointing is None:
        return plan
    if plan.checkpointing in (None, workload.checkpointing):
        return plan
    if re.search(r"(^|[, ])ac *[=-]", (inputs.plan or "").lower()):
        if option != "activation_checkpointing":
            return plan  # the search names the contradiction
        stated = f"ac={describe(plan.checkpointing or 'none')}"
        problem = f"{stated} contradicts --activation-checkpointing {workload.checkpointing}"
        raise SpecError("--plan", problem, "leave one of them out")
    return replace(plan, checkpointing=workload.checkpointing)


def build_launcher_requests(request: Request, launcher: str) -> tuple[Request, ...]:
    """Return a request for each framework of the launcher, or only for the framework that the job names.

    Raises:
        SpecError: the launcher cannot run the job, or cannot run the framework that the job names.
    """
    launched.check_launchable(launcher, request.workload)
    supported, asked = LAUNCHERS[launcher].frameworks, request.workload.framework
    if asked is not None and not LAUNCHERS[launcher].runs(asked):
        able = " or ".join(name for name, entry in LAUNCHERS.items() if entry.runs(asked))
        problem = f"{launcher} is not written for {asked}, the job's framework"
        raise SpecError(
            "--launch", problem, f"use --launch {able}, or leave one of them out" if able else "leave it out"
        )
    named = supported if asked is None else (asked,)
    if request.workload.bucket_mib is not None:
        named = tuple(name for name in named if FRAMEWORKS[name].has_buckets)
        if not named:
            problem = f"{launcher} has no buckets of a stated size"
            raise SpecError("training.bucketMiB", problem, "leave it out, or launch the job by another launcher")
    return tuple(replace(request, workload=with_framework(request.workload, name)) for name in named)
