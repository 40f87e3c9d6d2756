"""`tilecast advise`: the best pool and plan for a job.

What only some flags ask for is imported where they are read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilecast import search
from tilecast.advice import Advice, Baseline, Offer, Request, advise, measured
from tilecast.cli import EXIT_NO_RECOMMENDATION, EXIT_OK, inputs, measurements, pool_inputs, reading
from tilecast.frameworks import FRAMEWORKS
from tilecast.hardware import Pool
from tilecast.render import launch as launched
from tilecast.render.document import FORMATS, document, dump
from tilecast.render.launch import LAUNCHERS, Setting
from tilecast.render.wide import LEGEND, wide
from tilecast.search import engine
from tilecast.spec import Plans, SpecError, Stated

if TYPE_CHECKING:
    from tilecast.cli.existing import Source
    from tilecast.jobs.candidates import Candidates


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = LEGEND
    inputs.job_arguments(parser)
    pool_inputs.pool_arguments(parser)
    parser.add_argument(
        "--baseline",
        metavar="POOL:N[:PLAN][=STEP]",
        help="what you would run today, priced as a row of its own; PLAN for instance tp=2,dp=4,zero=1,mb=1; with a "
        "STEP as measured, what --measured POOL:N makes of it",
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="price this plan alone: tp=2,dp=8, or one as tables print it; keys dp (or fsdp), tp, pp, cp, ep, vp, mb, "
        "zero, ac, sp, of which degrees left out are 1 and dp takes the GPUs that remain; zero, ac and sp left out are "
        "off in a plan with mb, or else chosen (zero=auto and so on ask for that)",
    )
    parser.add_argument(
        "--measured",
        action="append",
        default=[],
        metavar="POOL:N[/PLAN]=STEP",
        help="a step of the job as measured (1.9s, 450ms), which corrects the forecast on every pool; may be repeated; "
        "@FILE.json brings many. SECONDS alone are of --baseline, or else of --plan, and name the line of the forecast "
        "that is most probably off",
    )
    parser.add_argument("--explain", action="store_true", help="operators, roofline, exchanges and memory of the plan")
    parser.add_argument(
        "--launch", choices=tuple(LAUNCHERS), help="what to type to run the best plan that the framework executes"
    )
    parser.add_argument(
        "--per-layer", action="store_true", help="also the best strategy of each layer, and the best cut of a pipeline"
    )
    parser.add_argument("-o", "--output", choices=(*FORMATS, *_MORE), default="table")


_MORE = ("wide", "html")
"""Formats of the command line alone, beside `FORMATS`, which the operator has too."""


def run(options: argparse.Namespace) -> int:
    job = inputs.job(options)
    try:
        return _run(options, job)
    except SpecError as error:
        raise job.by_flag(error) from None


def _run(options: argparse.Namespace, job: inputs.JobInput) -> int:
    request, pools = job.request(), pool_inputs.pools(options)
    options.seconds, stated = measurements.read(options.measured)
    if options.baseline:
        where, step = measurements.baseline(options.baseline)
        request = replace(request, baseline=_baseline(where))
        stated = [*stated, *step]
    own = measured.own_runs(request, measurements.resolved(stated, pools))
    pools = measured.corrected(request, pools, own)
    if options.plan is not None:
        request = _planned(request, options.plan)
    notes = pool_inputs.pool_notes(options, pools)
    requests = kept_to(request, options.launch) if options.launch else (request,)
    if job.source is None:
        advice = measured.with_notes(_noted(_best(requests, pools), notes), own)
        text = _text(options, advice, pools)
    else:
        from tilecast.jobs.candidates import settled

        labels, devices = pool_inputs.node_labels(options), pool_inputs.devices(options)
        narrowed = [job.source.narrowed(one, pools, labels, devices) for one in requests]
        candidates = narrowed[0][1]
        advice = measured.with_notes(
            _noted(settled(_best([one for one, _ in narrowed], candidates.pools), candidates), notes), own
        )
        is_manifest = options.output == "yaml"
        text = (
            _manifest(options, job.source, advice, candidates)
            if is_manifest
            else _text(options, advice, candidates.pools)
        )
    sys.stdout.write(text)
    return EXIT_OK if advice.best else EXIT_NO_RECOMMENDATION


def _noted(advice: Advice, notes: Sequence[str]) -> Advice:
    return replace(advice, notes=(*advice.notes, *notes))


_GAIN = 0.05
"""Least saving in the objective for which another framework of a launcher replaces the first one."""


def _best(requests: Sequence[Request], pools: Sequence[Pool]) -> Advice:
    """Return the advice for one of the requests, which differ in their frameworks.

    Advice whose framework executes the recommendation goes before all other. Of the rest the first is chosen, unless a
    later one has a recommendation that is better by more than `_GAIN` or the first has none.
    """
    advices = [_advise(request, pools) for request in requests]
    chosen, *others = [advice for advice in advices if _is_run(advice)] or advices
    for other in others:
        if other.best is None:
            continue
        if chosen.best is None or _value(other, other.best) < (1 - _GAIN) * _value(chosen, chosen.best):
            chosen = other
    return chosen


def _is_run(advice: Advice) -> bool:
    """Return whether the job's framework executes the recommendation, which is not certain for a stated plan."""
    best, framework = advice.best, advice.request.workload.framework
    if best is None or framework is None:
        return best is not None
    return bool(search.abilities(framework).executes(Plans.of(best.plan))[0])


def _value(advice: Advice, offer: Offer) -> float:
    """Return the value of an offer that the objective minimises: its GPUs, or the seconds or the price per sample."""
    goal = advice.request.goal
    if goal.fewest_gpus:
        return float(offer.gpus)
    price = offer.cost_per_1000_steps if goal.is_price else None
    return (offer.step_s if price is None else price) / offer.workload.global_batch


def _manifest(options: argparse.Namespace, source: Source, advice: Advice, candidates: Candidates) -> str:
    """Return the manifest with the advised fields, and with the command of the launcher if one is requested."""
    if advice.best is None or not options.launch:
        return source.committed(advice, candidates)
    launch = launched.launch(options.launch, _setting(advice.request, advice.best))
    return source.committed(advice, candidates, launch.running(source.program).shell())


def _advise(request: Request, pools: Sequence[Pool]) -> Advice:
    try:
        return advise(request, pools)
    except SpecError as error:
        if error.field != "plan":
            raise
        raise SpecError("--plan", error.problem, error.remedy) from None


def _baseline(text: str) -> Baseline:
    where, _, plan = text.partition(":")[2].partition(":")
    pool, gpus = reading.pair("--baseline", f"{text.partition(':')[0]}:{where}")
    return Baseline(pool, gpus, Stated.parse(plan, "--baseline") if plan else None)


def _planned(request: Request, text: str) -> Request:
    """Return the request for one stated plan; the product of its degrees is the number of GPUs.

    Raises:
        SpecError: the plan cannot be read, or contradicts the constraints on GPUs.
    """
    plan = Stated.parse(text, "--plan")
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


def kept_to(request: Request, launcher: str) -> tuple[Request, ...]:
    """Return the request for each framework that the launcher runs, or for the job's own framework alone.

    Raises:
        SpecError: the launcher cannot run the job, or not with the framework that the job names.
    """
    launched.refuse(launcher, request.workload)
    able, asked = LAUNCHERS[launcher].frameworks, request.workload.framework
    if asked is not None and (engine(asked) not in map(engine, able) or FRAMEWORKS[asked].host == "graph"):
        problem = f"{launcher} is not {asked}, which spec.training.framework names"
        raise SpecError("--launch", problem, "leave one of them out")
    named = able if asked is None else (asked,)
    if request.workload.bucket_mib is not None:
        named = tuple(name for name in named if FRAMEWORKS[name].has_buckets)
        if not named:
            problem = f"{launcher} has no buckets of a stated size"
            raise SpecError("training.bucketMiB", problem, "leave it out, or launch the job by another launcher")
    return tuple(replace(request, workload=replace(request.workload, framework=name)) for name in named)


def _page(advice: Advice, pools: Sequence[Pool], sections: Sequence[tuple[str, str]]) -> str:
    from tilecast.explain import explain
    from tilecast.render import html
    from tilecast.scaling import curves

    best = advice.best
    explanation = explain(best.workload, best.plan, best.pool, best.step_s) if best else None
    return html.page(advice, explanation, curves(advice.request, pools), sections)


def _text(options: argparse.Namespace, advice: Advice, pools: Sequence[Pool]) -> str:
    best = advice.best
    extras = _extras(options, advice, best) if best is not None else []
    if options.output == "csv":
        return FORMATS["csv"](advice)
    if options.output == "html":
        return _page(advice, pools, [(extra.title, extra.screen) for extra in extras if extra.key != "explanation"])
    if extras and options.output in ("json", "yaml"):
        return dump(options.output, {**document(advice), **{extra.key: extra.document for extra in extras}})
    if best is not None and options.launch and options.output == "table":
        return "\n".join(extra.screen for extra in extras)
    screen = wide(advice) if options.output == "wide" else FORMATS[options.output](advice)
    return "\n".join([screen, *(extra.screen for extra in extras)])


@dataclass(frozen=True, slots=True)
class _Extra:
    """Addition to the advice that a flag requests: a section for people, and a document under a key for programs."""

    key: str
    title: str
    screen: str
    document: object


def _extras(options: argparse.Namespace, advice: Advice, best: Offer) -> list[_Extra]:
    extras = []
    if options.seconds is not None:
        from tilecast.diagnose import diagnose
        from tilecast.render import diagnose as diagnosed

        ran = _that_ran(options, advice)
        held = diagnose(ran.workload, ran.plan, ran.pool, options.seconds)
        extras.append(_Extra("measured", "Measured", diagnosed.screen(held), diagnosed.document(held)))
    if options.explain:
        from tilecast.explain import explain
        from tilecast.render import explain as explained

        explanation = explain(best.workload, best.plan, best.pool, best.step_s)
        extras.append(
            _Extra("explanation", "Explanation", explained.screen(best, explanation), explained.document(explanation))
        )
    if options.per_layer:
        from tilecast import perlayer
        from tilecast.render import layers

        tensor = advice.request.constraints.max_tensor
        varied = perlayer.best(best.workload, best.pool, best.gpus, search.Limits(max_tensor=tensor))
        cut = perlayer.cut_pipeline(best.workload, best.pool, best.plan)
        screen = layers.screen(best, varied, cut)
        extras.append(_Extra("perLayer", "Layer by layer", screen, layers.document(varied, cut)))
    if options.launch:
        name, setting = options.launch, _setting(advice.request, best)
        extras.append(_Extra("launch", "Launch", launched.screen(name, setting), launched.document(name, setting)))
    return extras


def _that_ran(options: argparse.Namespace, advice: Advice) -> Offer:
    """Return the offer that the seconds of `--measured` belong to.

    Raises:
        SpecError: the seconds are no step time, or it is open which run took them.
    """
    if not 0 < options.seconds < 1e9:
        raise SpecError("--measured", f"{options.seconds:g} is no step time", "give seconds, more than 0")
    if options.baseline:
        if advice.baseline is None:
            raise SpecError("--measured", "the baseline cannot be priced", "see why without --measured")
        return advice.baseline
    if options.plan is None or len(advice.offers) != 1:
        raise SpecError("--measured", "which run took so long is open", "give --baseline POOL:N, or --plan on one pool")
    return advice.offers[0]


def _setting(request: Request, offer: Offer) -> Setting:
    return Setting(
        name=request.name,
        workload=offer.workload,
        plan=offer.plan,
        pool=offer.pool.name,
        nodes=offer.nodes,
        gpus_per_node=offer.gpus_per_node,
        step_s=offer.step_s,
        memory_bytes=(offer.memory_lower_bytes, offer.memory_upper_bytes, offer.memory_available_bytes),
    )
