"""From a data folder to a model file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tilecast.kernels.utilization import FORMAT, Description, Network, Spread
from tilecast.spec import Floats
from tilecast_fit import ceilings, export, network
from tilecast_fit.samples import SOURCES, Samples, gather

VERSION = "0.1.0"
STEPS = {"gemm": 20_000, "attention": 8_000, "conv": 6_000}


def shown(samples: Samples, net: network.Trained, *, hide_die: bool = False) -> Floats:
    """Durations that the harness would show for those samples, seconds, shape (N,)."""
    case = np.array([net.cases.index(text) for text in samples.case])
    known = [
        0 if hide_die or die not in net.seen.get(text, ()) else net.dies.index(die)
        for die, text in zip(samples.die, samples.case, strict=True)
    ]
    cycles = network.predict(net, samples.columns, case, np.array(known) * len(net.cases) + case)
    seconds = np.maximum(np.exp2(cycles) / samples.clock_hz, samples.roofline_s)
    return np.maximum(seconds + samples.added_s, samples.least_s)


def spreads(samples: Samples, net: network.Trained) -> dict[str, Spread]:
    """Half-widths that cover 90 % of the samples of each case, with the die shown and hidden."""
    found = {}
    for text in net.cases:
        rows = samples.take(samples.case == text)
        seen, unseen = (
            float(np.quantile(np.abs(rows.measured_s / shown(rows, net, hide_die=hide) - 1), 0.9))
            for hide in (False, True)
        )
        found[text] = Spread(seen=1.1 * seen, unseen=1.5 * max(seen, unseen))
    return found


def describe(networks: dict[str, network.Trained], samples: dict[str, Samples]) -> Description:
    """What the file says of itself."""
    return Description(
        format=FORMAT,
        version=VERSION,
        networks={
            kind: Network(
                columns=net.names, mean=tuple(net.mean), scale=tuple(net.scale), low=tuple(net.low),
                high=tuple(net.high), cases=net.cases, dies=net.dies, seen=net.seen, spread=spreads(samples[kind], net),
            )
            for kind, net in networks.items()
        },
        ceilings=ceilings.fit(samples),
    )  # fmt: skip


def fit(
    data: Path, output: Path, *, protocol: str | None = None, leave_out: Sequence[str] = (),
    hold_out: int | None = None, effort: float = 1.0, seed: int = 0,
) -> None:  # fmt: skip
    """Train on the tables of a data folder and write the model file.

    Args:
        data: folder with `kernels/` and `neusight/`.
        output: ONNX file to write.
        protocol: `neusight` trains on its kernels_train alone.
        leave_out: names of GPUs whose rows are not used.
        hold_out: fold of five of the shapes that is not used.
        effort: factor on the training steps.
        seed: of everything random.

    Raises:
        SpecError: a table is missing or a GPU unknown.
    """
    sources = [source for source in SOURCES if source.protocol or protocol is None]
    samples = gather(data, sources, leave_out, seed)
    if hold_out is not None:
        samples = {kind: part.take(part.fold != hold_out) for kind, part in samples.items()}
    learned = [kind for kind in STEPS if kind in samples]
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    networks = {}
    with bar:
        for kind in learned:
            steps = int(STEPS[kind] * effort)
            task = bar.add_task(f"{kind} ({len(samples[kind]):,} kernels)", total=steps)
            networks[kind] = network.train(
                samples[kind], steps=steps, seed=seed, report=lambda count, task=task: bar.advance(task, count)
            )
    export.write(output, networks, describe(networks, samples))
