"""`tilecast advise`: print the best pool and plan for a job.

Modules that only some flags need are imported inside functions.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from tilecast import search
from tilecast.advice import Advice, Offer
from tilecast.cli import EXIT_NO_RECOMMENDATION, EXIT_OK
from tilecast.cli.arguments import add_job_arguments, add_pool_arguments
from tilecast.cli.screen import write_screen
from tilecast.hardware import Pool
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.public.advising import AdviceInputs, AdviceResult, compute_advice, find_measured_offer
from tilecast.render import launch as launched
from tilecast.render.dialects import DIALECTS, write_dialect
from tilecast.render.document import FORMATS, build_document, dump_document
from tilecast.render.launch import LAUNCHERS, OwnCommand
from tilecast.render.launch.setting import list_launch_settings
from tilecast.render.risk import describe_risk
from tilecast.render.wide import LEGEND, wide_text
from tilecast.spec import SpecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = LEGEND
    add_job_arguments(parser)
    add_pool_arguments(parser)
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
        "@FILE.json brings many, POOL:N=@FILE or @FILE a log. SECONDS alone are of --baseline, or else of --plan, and "
        "name the line of the forecast that is most probably off",
    )
    parser.add_argument("--explain", action="store_true", help="operators, roofline, exchanges and memory of the plan")
    parser.add_argument(
        "--launch", choices=tuple(LAUNCHERS), help="what to type to run the best plan that the framework executes"
    )
    parser.add_argument(
        "--per-layer", action="store_true", help="also the best strategy of each layer, and the best cut of a pipeline"
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=(*FORMATS, *_MORE, *DIALECTS),
        default="table",
        help="how to print it; or, for a scheduler: "
        + "; ".join(f"{name}, {dialect.purpose}" for name, dialect in DIALECTS.items()),
    )


_MORE = ("wide", "html")
"""Output formats that only the command line has, besides `FORMATS`."""


def run(options: argparse.Namespace) -> int:
    question = AdviceInputs(
        JobOptions.from_values(options.job, vars(options)),
        PoolOptions.from_attributes(options),
        baseline=options.baseline,
        plan=options.plan,
        measured=options.measured,
        launch=options.launch,
    )
    answer = compute_advice(question)
    try:
        text = _format_manifest(options, answer) if answer.candidates and options.output == "yaml" else None
        text = _format_output(options, question, answer) if text is None else text
        write = write_screen if options.output in ("table", "wide") and not options.launch else sys.stdout.write
        write(text)
    except SpecError as error:
        raise answer.job.name_flag_in_error(error) from None
    return EXIT_OK if answer.advice.best else EXIT_NO_RECOMMENDATION


def _format_manifest(options: argparse.Namespace, result: AdviceResult) -> str:
    """Return the text of the job's manifest with advised fields, and the launcher's command if `--launch` is given."""
    from tilecast.render.dialects.parts import write_comments

    source, advice, candidates = result.job.source, result.advice, result.candidates
    assert source is not None and candidates is not None  # noqa: S101 (only jobs of other kinds have a manifest)
    if advice.best is None:
        return source.edit_manifest(advice, candidates)
    if not options.launch:
        return write_comments(describe_risk(advice)) + source.edit_manifest(advice, candidates)
    tight, safer = list_launch_settings(advice, advice.best)
    setting, risk = launched.choose_setting(options.launch, tight, safer, options.plan is not None)
    launch = launched.write_launch(options.launch, setting)
    if setting is not tight and advice.safer is not None:
        advice = replace(advice, offers=(advice.safer, *advice.offers[1:]))
    script = launch.with_program(source.program).format_bash_script()
    return write_comments(risk) + source.edit_manifest(advice, candidates, script)


def _format_html(
    advice: Advice, pools: Sequence[Pool], sections: Sequence[tuple[str, str]], words: Sequence[str]
) -> str:
    from tilecast.explain import explain_plan
    from tilecast.render import html
    from tilecast.scaling import find_scaling_curves

    best = advice.best
    explanation = explain_plan(best.workload, best.plan, best.pool, best.step_s) if best else None
    curves = find_scaling_curves(advice.request, pools)
    command = shlex.join(("tilecast", *words))
    return html.advice_page(advice, explanation, curves, sections, command, f"{date.today():%d %B %Y}")


def _format_output(options: argparse.Namespace, inputs: AdviceInputs, result: AdviceResult) -> str:
    advice, best = result.advice, result.advice.best
    if options.output in DIALECTS:
        _refuse_sections(options)
        return write_dialect(options.output, advice)
    extras = _build_requested_sections(options, inputs, result, best) if best is not None else []
    if options.output == "csv":
        return FORMATS["csv"](advice)
    if options.output == "html":
        sections = [(extra.title, extra.screen) for extra in extras if extra.key != "explanation"]
        return _format_html(advice, result.pools, sections, options.words)
    if extras and options.output in ("json", "yaml"):
        document = build_document(advice) | {extra.key: extra.document for extra in extras}
        return dump_document(options.output, document)
    if best is not None and options.launch and options.output == "table":
        return "\n".join(extra.screen for extra in extras)
    screen = wide_text(advice) if options.output == "wide" else FORMATS[options.output](advice)
    return "\n".join([screen, *(extra.screen for extra in extras)])


def _find_own_command(result: AdviceResult) -> OwnCommand | None:
    """Return the launch that the user has today, or None if the job is described by a model."""
    reading = result.job.launch
    return None if reading is None else OwnCommand(reading.table, reading.program, reading.words)


def _refuse_sections(options: argparse.Namespace) -> None:
    """Raise SpecError if a flag requests a section while the output is for a scheduler, which has no sections."""
    for flag, is_given in (("--explain", options.explain), ("--per-layer", options.per_layer)):
        if is_given:
            raise SpecError(flag, f"has no place in -o {options.output}", "leave it out")


@dataclass(frozen=True, slots=True)
class _AdviceSection:
    """An addition to the advice that a flag requests: a text section, and a document under a key of the JSON."""

    key: str
    title: str
    screen: str
    document: object


def _build_requested_sections(
    options: argparse.Namespace, inputs: AdviceInputs, result: AdviceResult, best: Offer
) -> list[_AdviceSection]:
    advice, extras = result.advice, []
    if result.seconds is not None:
        from tilecast.diagnose import diagnose_step
        from tilecast.render import diagnose as diagnosed

        ran = find_measured_offer(inputs, result)
        held = diagnose_step(ran.workload, ran.plan, ran.pool, result.seconds)
        extras.append(
            _AdviceSection("measured", "Measured", diagnosed.diagnosis_text(held), diagnosed.diagnosis_document(held))
        )
    if options.explain:
        from tilecast.explain import explain_plan
        from tilecast.render import explain as explained

        explanation = explain_plan(best.workload, best.plan, best.pool, best.step_s)
        extras.append(
            _AdviceSection(
                "explanation",
                "Explanation",
                explained.explanation_text(best, explanation),
                explained.explanation_document(explanation),
            )
        )
    if options.per_layer:
        from tilecast import perlayer
        from tilecast.render import layers

        tensor = advice.request.constraints.max_tensor
        varied = perlayer.find_best_strategies(
            best.workload, best.pool, best.gpus, search.PlanLimits(max_tensor=tensor)
        )
        cut = perlayer.cut_pipeline(best.workload, best.pool, best.plan)
        screen = layers.layers_text(best, varied, cut)
        extras.append(_AdviceSection("perLayer", "Layer by layer", screen, layers.layers_document(varied, cut)))
    if options.launch:
        name, setting, safer = options.launch, *list_launch_settings(advice, best)
        own = _find_own_command(result)
        text = launched.launch_text(name, setting, safer, is_stated=options.plan is not None, own=own)
        extras.append(_AdviceSection("launch", "Launch", text, launched.launch_document(name, setting, safer, own)))
    return extras
