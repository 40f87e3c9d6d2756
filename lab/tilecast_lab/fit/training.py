"""Training of the whole utilization model, from a data folder to a model file; `fit` is the entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tilecast.kernels import utilization
from tilecast.kernels.utilization import FORMAT, BandwidthCeiling, ModelDescription, Spread, TrainedNetwork
from tilecast.spec import Floats, SpecError
from tilecast_lab.fit import ceilings, export, network
from tilecast_lab.fit.samples import SOURCES, Samples, error_by_die, read_samples, symmetric_error

VERSION = "0.3.0"
STEPS = {"gemm_tensor": 30_000, "gemm_simt": 24_000, "attention": 30_000, "conv_simt": 15_000, "rows": 12_000}
"""Training steps by family of kernels; other families have formulas."""
STEEPEST = {"gemm_tensor": 1.6}
"""Largest exponent with which time may grow, for families whose samples reach far beyond the L2.

It must be large enough for the drop in speed when data leaves the L2.
"""
STEEPEST_ELSEWHERE = 1.05
"""Largest exponent for families with small samples, whose forecasts are larger: utilization hardly falls with size."""
CASE_SAMPLES = 500
"""Least number of samples for a row-wise case to be in the network; the others use formulas."""
SEEN_MARGIN = 1.1
"""Factor from the errors on training samples to the errors on other shapes of the same kind."""
REGULAR = "simt"
"""Case of regular products without tensor cores."""
REACH = 1.0
"""Octaves of work by which regular products may fall short of irregular ones and still be a case of their own."""
UNSEEN_MARGIN = 2.0
"""Factor from the error of the general law on known GPUs to its spread on an unknown one (L40S left out)."""


def shown_durations(samples: Samples, net: network.Trained, *, hide_die: bool = False) -> Floats:
    """Return the durations that the harness would show for the samples, in seconds, (N,)."""
    case = np.array([net.cases.index(text) for text in samples.case])
    die = np.array([0 if hide_die else net.dies.index(name) for name in samples.die])
    cycles = network.predict(net, samples, die * len(net.cases) + case)
    seconds = np.maximum(np.exp2(cycles) / samples.clock_hz, samples.roofline_s)
    return np.maximum(seconds + samples.added_s, samples.least_s)


def spread_by_case(samples: Samples, net: network.Trained) -> dict[str, Spread]:
    """Return the half-widths that cover 90 % of the samples of each case, with the die shown and hidden."""
    shown_s, hidden_s = shown_durations(samples, net), shown_durations(samples, net, hide_die=True)
    deviations = {}
    for text in net.cases:
        here = samples.case == text
        seen, unseen = (
            float(np.quantile(symmetric_error(samples.measured_s[here] / times[here]), 0.9))
            for times in (shown_s, hidden_s)
        )
        unseen = UNSEEN_MARGIN * max(seen, unseen)
        widths = error_by_die(samples.die[here], symmetric_error(samples.measured_s[here] / shown_s[here]))
        dies = {name: SEEN_MARGIN * width for name, width in widths.items()}
        deviations[text] = Spread(seen=SEEN_MARGIN * seen, unseen=unseen, dies=dies)
    return deviations


def describe_fit(
    networks: dict[str, network.Trained], samples: dict[str, Samples], fitted: dict[str, BandwidthCeiling]
) -> ModelDescription:
    """Return the description that is stored in the model file."""
    return ModelDescription(
        format=FORMAT,
        version=VERSION,
        networks={
            kind: TrainedNetwork(
                columns=net.names, mean=tuple(net.mean), scale=tuple(net.scale), low=tuple(net.low),
                high=tuple(net.high), cases=net.cases, dies=net.dies, seen=net.seen,
                spread=spread_by_case(samples[kind], net), doubled=net.doubled, details=net.details,
            )
            for kind, net in networks.items()
        },
        ceilings=fitted,
    )  # fmt: skip


def fit(
    data: Path, output: Path, *, protocol: str | None = None, leave_out: Sequence[str] = (),
    hold_out: int | None = None, effort: float = 1.0, seed: int = 0, only: Sequence[str] = (),
) -> None:  # fmt: skip
    """Train on the tables of a data folder and write the model file.

    Args:
        data: folder with `kernels/` and `neusight/`.
        output: ONNX file to write.
        protocol: `neusight` trains on NeuSight's kernels_train alone.
        leave_out: names of GPUs whose rows are not used.
        hold_out: which of five folds of the shapes is not used.
        effort: factor on the training steps.
        seed: seed of everything random.
        only: families of kernels and cases of ceilings to fit; the rest is taken from the shipped model. Empty fits
            all.

    Raises:
        SpecError: a table is missing, or a GPU or a name of `only` is unknown.
    """
    _require_known(only)
    sources = [source for source in SOURCES if source.protocol or protocol is None]
    samples = read_samples(data, sources, leave_out, seed)
    if hold_out is not None:
        samples = {kind: part.take(part.fold != hold_out) for kind, part in samples.items()}
    families = [family for family in STEPS if family in samples and (not only or family in only)]
    learned = {family: _plenty(samples[family], family) for family in families}
    learned = {family: part for family, part in learned.items() if len(part)}
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    networks = {}
    with bar:
        tasks = {
            family: bar.add_task(f"{family} ({len(part):,} kernels)", total=int(STEPS[family] * effort), start=False)
            for family, part in learned.items()
        }
        for family, part in learned.items():
            bar.start_task(tasks[family])
            advance = partial(bar.advance, tasks[family])
            networks[family] = network.train(
                part, steps=int(STEPS[family] * effort), steepest=STEEPEST.get(family, STEEPEST_ELSEWHERE), seed=seed,
                report=advance,
            )  # fmt: skip
    fitted = ceilings.fit(samples)
    if not only:
        export.write(output, networks, describe_fit(networks, learned, fitted))
        return
    base = utilization.load_model().description
    fresh = describe_fit(
        networks, learned, {**base.ceilings, **{case: fitted[case] for case in only if case in fitted}}
    )
    others = {family: network for family, network in base.networks.items() if family not in networks}
    export.write(
        output,
        networks,
        fresh.model_copy(update={"networks": others | dict(fresh.networks)}),
        shipped_kinds=tuple(others),
    )


def _require_known(only: Sequence[str]) -> None:
    known = [*STEPS, *ceilings.DEFAULTS]
    for name in only:
        if name not in known:
            raise SpecError("only", f"{name} is neither a family nor a ceiling", f"choose from {', '.join(known)}")


def _plenty(samples: Samples, family: str) -> Samples:
    """Return the samples of a family that its network is trained on: those of cases with enough samples."""
    if family == "gemm_simt":
        return _pooled(samples)
    if family != "rows":
        return samples
    counts = {text: int((samples.case == text).sum()) for text in set(samples.case)}
    return samples.take(np.array([counts[text] >= CASE_SAMPLES for text in samples.case]))


def _pooled(samples: Samples) -> Samples:
    """Return the samples with regular products merged into the irregular case, unless they are about as large.

    Nothing about large products can be learned from small regular ones alone.
    """
    compute = samples.columns[:, samples.names.index("compute_cycles")]
    regular = samples.case == REGULAR
    if regular.any() and not regular.all():
        reach, other = (float(np.quantile(compute[part], 0.99)) for part in (regular, ~regular))
        if reach < other - REACH:
            return replace(samples, case=np.full(len(samples), f"{REGULAR} irregular", object))
    return samples
