"""`tilecast advise`: the best pool and plan for a job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from tilecast import perlayer, search
from tilecast.advise import Advice, Baseline, Offer, Request, advise
from tilecast.cli import EXIT_NO_RECOMMENDATION, EXIT_OK, inputs
from tilecast.diagnose import diagnose
from tilecast.explain import explain
from tilecast.hardware import Pool
from tilecast.manifests.candidates import settled
from tilecast.render import diagnose as diagnosed
from tilecast.render import explain as explained
from tilecast.render import layers
from tilecast.render.document import FORMATS, document, dump
from tilecast.render.launch import LAUNCHERS, Setting, launch
from tilecast.render.wide import LEGEND, wide
from tilecast.search import engine
from tilecast.spec import SpecError, Stated


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = LEGEND
    inputs.job_arguments(parser)
    inputs.pool_arguments(parser)
    parser.add_argument(
        "--baseline",
        metavar="POOL:N[:PLAN]",
        help="what you would run today, priced as a row of its own; PLAN for instance tp=2,dp=4,zero=1,mb=1",
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="price this plan alone: tp=2,dp=8, or one as tables print it; keys dp (or fsdp), tp, pp, cp, ep, vp, mb, "
        "zero, ac, sp, of which degrees left out are 1, dp takes the GPUs that remain, and the rest is chosen",
    )
    parser.add_argument(
        "--measured",
        type=float,
        metavar="SECONDS",
        help="a step as measured: of --baseline, or else of --plan; names the "
        "line of the forecast that is most probably off",
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
"""Formats beside those that the operator shares."""


def run(options: argparse.Namespace) -> int:
    job = inputs.job(options)
    request, pools = job.request(), inputs.pools(options)
    if options.baseline:
        request = replace(request, baseline=_baseline(options.baseline))
    if options.plan is not None:
        request = _planned(request, options.plan)
    if options.launch:
        request = kept_to(request, options.launch)
    notes = inputs.pool_notes(options, pools)
    if job.source is None:
        advice = _noted(_advise(request, pools), notes)
        text = _text(options, advice, pools)
    else:
        request, found = job.source.narrowed(request, pools, inputs.node_labels(options))
        advice = _noted(settled(_advise(request, found.pools), found), notes)
        is_manifest = options.output == "yaml"
        text = job.source.committed(advice, found) if is_manifest else _text(options, advice, found.pools)
    sys.stdout.write(text)
    return EXIT_OK if advice.best else EXIT_NO_RECOMMENDATION


def _noted(advice: Advice, notes: Sequence[str]) -> Advice:
    return replace(advice, notes=(*advice.notes, *notes))


def _advise(request: Request, pools: Sequence[Pool]) -> Advice:
    try:
        return advise(request, pools)
    except SpecError as error:
        if error.field != "plan":
            raise
        raise SpecError("--plan", error.problem, error.remedy) from None


def _baseline(text: str) -> Baseline:
    where, _, plan = text.partition(":")[2].partition(":")
    pool, gpus = inputs.pair("--baseline", f"{text.partition(':')[0]}:{where}")
    return Baseline(pool, gpus, Stated.parse(plan, "--baseline") if plan else None)


def _planned(request: Request, text: str) -> Request:
    """The request for one plan; what its degrees multiply to is all the GPUs it takes."""
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


def kept_to(request: Request, launcher: str) -> Request:
    """The request with plans that the framework executes only."""
    framework, asked = LAUNCHERS[launcher][0], request.workload.framework
    if asked is not None and engine(asked) != framework:
        problem = f"{launcher} is not {asked}, which spec.training.framework names"
        raise SpecError("--launch", problem, "leave one of them out")
    return replace(request, workload=replace(request.workload, framework=asked or framework))


def _page(advice: Advice, pools: Sequence[Pool]) -> str:
    from tilecast.render import html
    from tilecast.scaling import curves

    best = advice.best
    found = explain(best.workload, best.plan, best.pool, best.step_s) if best else None
    return html.page(advice, found, curves(advice.request, pools))


def _text(options: argparse.Namespace, advice: Advice, pools: Sequence[Pool]) -> str:
    if options.output == "html":
        return _page(advice, pools)
    best = advice.best
    if best is None:
        return wide(advice) if options.output == "wide" else FORMATS[options.output](advice)
    if options.launch:
        return launch(options.launch, _setting(advice.request, best))
    told, keys = [], {}
    if options.measured is not None:
        ran = _that_ran(options, advice)
        held = diagnose(ran.workload, ran.plan, ran.pool, options.measured)
        told.append(diagnosed.screen(held))
        keys["measured"] = diagnosed.document(held)
    if options.explain:
        found = explain(best.workload, best.plan, best.pool, best.step_s)
        told.append(explained.screen(best, found))
        keys["explanation"] = explained.document(found)
    if options.per_layer:
        tensor = advice.request.constraints.max_tensor
        varied = perlayer.best(best.workload, best.pool, best.gpus, search.Limits(max_tensor=tensor))
        cut = perlayer.stages(best.workload, best.pool, best.plan)
        told.append(layers.screen(best, varied, cut))
        keys["perLayer"] = layers.document(varied, cut)
    if keys and options.output in ("json", "yaml"):
        return dump(options.output, {**document(advice), **keys})
    screen = wide(advice) if options.output == "wide" else FORMATS[options.output](advice)
    return "\n".join([screen, *told])


def _that_ran(options: argparse.Namespace, advice: Advice) -> Offer:
    """The offer that `--measured` is about."""
    if not 0 < options.measured < 1e9:
        raise SpecError("--measured", f"{options.measured:g} is no step time", "give seconds, more than 0")
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
    )
