"""`tilecast advise`: the best pool and plan for a job.

What only some flags ask for is imported where they are read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tilecast import search
from tilecast.advice import Advice, Offer
from tilecast.api.advice import AdviceDocument
from tilecast.cli import EXIT_NO_RECOMMENDATION, EXIT_OK
from tilecast.cli.arguments import job_arguments, pool_arguments
from tilecast.hardware import Pool
from tilecast.inputs.job import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.public.asking import Answer, Question, ask, measured_offer
from tilecast.render import launch as launched
from tilecast.render.document import FORMATS, dump
from tilecast.render.launch import LAUNCHERS, Setting
from tilecast.render.wide import LEGEND, wide
from tilecast.spec import SpecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = LEGEND
    job_arguments(parser)
    pool_arguments(parser)
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
    question = Question(
        JobOptions.of(options),
        PoolOptions.of(options),
        baseline=options.baseline,
        plan=options.plan,
        measured=options.measured,
        launch=options.launch,
    )
    answer = ask(question)
    try:
        text = _manifest(options, answer) if answer.candidates and options.output == "yaml" else None
        sys.stdout.write(_text(options, question, answer) if text is None else text)
    except SpecError as error:
        raise answer.job.by_flag(error) from None
    return EXIT_OK if answer.advice.best else EXIT_NO_RECOMMENDATION


def _manifest(options: argparse.Namespace, answer: Answer) -> str:
    """Return the manifest with what is advised, and with the command of the launcher that was asked for."""
    source, advice, candidates = answer.job.source, answer.advice, answer.candidates
    assert source is not None and candidates is not None  # noqa: S101 (only jobs of other kinds have a manifest)
    if advice.best is None or not options.launch:
        return source.committed(advice, candidates)
    launch = launched.launch(options.launch, Setting.of(advice.request.name, advice.best))
    return source.committed(advice, candidates, launch.running(source.program).shell())


def _page(advice: Advice, pools: Sequence[Pool], sections: Sequence[tuple[str, str]]) -> str:
    from tilecast.explain import explain
    from tilecast.render import html
    from tilecast.scaling import curves

    best = advice.best
    explanation = explain(best.workload, best.plan, best.pool, best.step_s) if best else None
    return html.page(advice, explanation, curves(advice.request, pools), sections)


def _text(options: argparse.Namespace, question: Question, answer: Answer) -> str:
    advice, best = answer.advice, answer.advice.best
    extras = _extras(options, question, answer, best) if best is not None else []
    if options.output == "csv":
        return FORMATS["csv"](advice)
    if options.output == "html":
        return _page(
            advice, answer.pools, [(extra.title, extra.screen) for extra in extras if extra.key != "explanation"]
        )
    if extras and options.output in ("json", "yaml"):
        return dump(
            options.output, AdviceDocument.of(advice).document() | {extra.key: extra.document for extra in extras}
        )
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


def _extras(options: argparse.Namespace, question: Question, answer: Answer, best: Offer) -> list[_Extra]:
    advice, extras = answer.advice, []
    if answer.seconds is not None:
        from tilecast.diagnose import diagnose
        from tilecast.render import diagnose as diagnosed

        ran = measured_offer(question, answer)
        held = diagnose(ran.workload, ran.plan, ran.pool, answer.seconds)
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
        name, setting = options.launch, Setting.of(advice.request.name, best)
        extras.append(_Extra("launch", "Launch", launched.screen(name, setting), launched.document(name, setting)))
    return extras
