"""Write the page "How good is it?": plots of errors, and what was measured of each GPU, precision and family.

    python -m tilecast_lab support --data DIR     # takes some minutes

The page is `docs/support.md`, and its pictures are in `docs/figures`. Every number comes from forecasts of measured
training steps; an error is |forecast - measured| / measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from tilecast import hardware
from tilecast.spec import SpecError
from tilecast.validate import Track, iterate_without_progress
from tilecast.validate.cells import Row
from tilecast.validate.scores import has_trusted_step, name_gpu_count_range, read_measured_seconds
from tilecast_lab.validate.residuals import source_of
from tilecast_lab.validate.runs import forecast

DOCS = Path(__file__).parents[2] / "docs"
LEAST_ROWS = 3
"""Fewest measured steps of a row of a plot or of a cell of the matrix."""
LEAST_ROWS_OF_SOURCE = 8
"""Fewest measured steps of a source that the plot of sources shows."""
GRADES = (("A", 0.10, 2), ("B", 0.20, 1), ("C", float("inf"), 1))
"""Grades with the largest mean error and the fewest sources of each, best first."""
FAMILIES: Mapping[str, str] = {
    "language": "Dense language models",
    "moe": "Mixtures of experts",
    "vision": "Vision",
    "other": "Diffusion, recommenders, speech and others",
}
"""Titles of the tables of the matrix, by kind of model."""
_KINDS = {
    "decoder": "language", "encoder": "language", "encdec": "language",
    "moe": "moe", "cnn": "vision", "vision": "vision",
}  # fmt: skip
"""Kind of model of each family of the measured tables. Other families are "other"."""
_LABEL, _PLOT, _RIGHT, _ROW, _TOP, _BOTTOM = 250, 420, 60, 18, 12, 40


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step with its forecast: who measured it and on what, its relative error, and the 90 % range."""

    source: str
    model: str
    gpu: str
    precision: str
    family: str
    gpus: str
    """Range of the number of GPUs, such as "2-8"."""
    error: float
    """(forecast - measured) / measured."""
    is_in_range: bool


def read_steps(rows: Sequence[Row], track: Track = iterate_without_progress) -> list[MeasuredStep]:
    """Return the rows that have a trusted measurement and a forecast.

    Raises:
        SpecError: a row names a damaged graph.
    """
    steps = []
    for row, item in zip(rows, forecast(rows, track), strict=True):
        measured = read_measured_seconds(row)
        if measured is None or item.seconds is None or not has_trusted_step(row):
            continue
        steps.append(
            MeasuredStep(
                source=source_of(row),
                model=row.get("model_name", ""),
                gpu=_name_gpu(row["gpu"]),
                precision=row["precision"],
                family=_KINDS.get(row.get("family", ""), "other"),
                gpus=name_gpu_count_range(row),
                error=item.seconds / measured - 1,
                is_in_range=(item.lower_s or 0.0) <= measured <= (item.upper_s or 0.0),
            )
        )
    return steps


def _name_gpu(name: str) -> str:
    """Return the name by which the command line knows a GPU. Return an unknown name unchanged."""
    try:
        return hardware.find_gpu(name).name
    except SpecError:
        return name


@dataclass(frozen=True, slots=True)
class GroupErrors:
    """Errors of some measured steps. Every model of a source counts equally in the mean."""

    steps: int
    sources: int
    mean: float
    median: float
    largest_tenth: float
    """Error that a tenth of the steps exceeds."""
    covered: float
    """Fraction of the steps inside the 90 % range."""

    @classmethod
    def from_steps(cls, steps: Sequence[MeasuredStep]) -> GroupErrors:
        """Return the errors of at least one step."""
        errors = np.array([abs(step.error) for step in steps])
        by_model: dict[tuple[str, str], list[float]] = defaultdict(list)
        for step, error in zip(steps, errors.tolist(), strict=True):
            by_model[step.source, step.model].append(error)
        return cls(
            steps=len(steps),
            sources=len({step.source for step in steps}),
            mean=float(np.mean([np.mean(group) for group in by_model.values()])),
            median=float(np.median(errors)),
            largest_tenth=float(np.percentile(errors, 90)),
            covered=float(np.mean([step.is_in_range for step in steps])),
        )

    @property
    def grade(self) -> str:
        """Letter of `GRADES`."""
        shown = round(self.mean, 2)
        return next(letter for letter, error, sources in GRADES if shown <= error and self.sources >= sources)


def group_errors(
    steps: Iterable[MeasuredStep], key: Callable[[MeasuredStep], str], least: int = LEAST_ROWS
) -> dict[str, GroupErrors]:
    """Return the errors of each group with at least `least` steps, the smallest median first."""
    groups: dict[str, list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        groups[key(step)].append(step)
    errors = {name: GroupErrors.from_steps(group) for name, group in groups.items() if len(group) >= least}
    return dict(sorted(errors.items(), key=lambda item: (item[1].median, item[0])))


def draw_errors(title: str, groups: Mapping[str, GroupErrors]) -> str:
    """Return an SVG with a row for each group: a dot at the median, and a line to the error a tenth exceeds."""
    end = min(max([0.2, *(group.largest_tenth for group in groups.values())]), 1.0)
    height = _TOP + _ROW * len(groups) + _BOTTOM
    width = _LABEL + _PLOT + _RIGHT

    def place(error: float) -> float:
        return _LABEL + _PLOT * min(error / end, 1.0)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        "<style>text{font:11px system-ui,sans-serif;fill:#333}line{stroke:#bbb}.range{stroke:#2563a8;stroke-width:3;"
        "stroke-opacity:.4}circle{fill:#2563a8}@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#555}"
        ".range{stroke:#7fb2ea}circle{fill:#7fb2ea}}</style>",
    ]
    step = 0.05 if end <= 0.4 else 0.1 if end <= 0.7 else 0.2
    for number in range(int(end / step + 1e-9) + 1):
        x, bottom = place(number * step), height - _BOTTOM
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{number * step:.0%}</text>')
    parts.append(
        f'<text x="{_LABEL + _PLOT / 2}" y="{height - 6}" text-anchor="middle">error of a step: dot = median,'
        " line = up to the error that one step in ten exceeds</text>"
    )
    for index, (name, group) in enumerate(groups.items()):
        y = _TOP + _ROW * (index + 0.5)
        tip = f"{name}: median {group.median:.1%}, 90 % within {group.largest_tenth:.1%}, {group.steps:,} steps"
        parts.append(
            f"<g><title>{escape(tip)}</title>"
            f'<text x="{_LABEL - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(_shorten(name))}</text>'
            f'<line class="range" x1="{place(group.median):.1f}" y1="{y:.1f}" x2="{place(group.largest_tenth):.1f}"'
            f' y2="{y:.1f}"/><circle cx="{place(group.median):.1f}" cy="{y:.1f}" r="4"/>'
            f'<text x="{_LABEL + _PLOT + 8}" y="{y + 4:.1f}">{group.steps:,}</text></g>'
        )
    return "\n".join((*parts, "</svg>", ""))


def _shorten(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"


def format_matrix(steps: Sequence[MeasuredStep]) -> str:
    """Return a Markdown table of each group of families: a row for each GPU, a column for each precision."""
    parts = []
    for family, title in FAMILIES.items():
        own = [step for step in steps if step.family == family]
        cells = group_errors(own, lambda step: f"{step.gpu} {step.precision}")
        found = [(gpu, precision) for gpu, precision in (name.rsplit(" ", 1) for name in cells)]
        precisions = sorted({precision for _, precision in found})
        parts += [f"### {title}", "", f"| GPU | {' | '.join(precisions)} |", "|---|" + "---|" * len(precisions)]
        for gpu in sorted({gpu for gpu, _ in found}):
            row = [_format_cell(cells.get(f"{gpu} {precision}")) for precision in precisions]
            parts.append(f"| {gpu} | {' | '.join(row)} |")
        parts.append("")
    return "\n".join(parts)


def _format_cell(errors: GroupErrors | None) -> str:
    if errors is None:
        return ""
    return f"**{errors.grade}** {errors.mean:.0%} ({errors.steps:,}; {errors.sources})"


_PAGE = """\
# How good is it?

{count:,} measured training steps of {sources} sources were forecast by this version. `python -m tilecast_lab support`
writes this page from the tables that [Accuracy](accuracy.md) names. Some constants were fitted to some of these rows.
With whole sources left out of the fit, the errors of the collections are up to a point larger.

All steps: the median error is {total.median:.1%}, and the mean over models is {total.mean:.1%}. {total.covered:.1%}
of the steps lie inside the 90 % range.

## By source

Sources with at least {least_of_source} steps.

![Error by source](figures/error-by-source.svg)

## By GPU

![Error by GPU](figures/error-by-gpu.svg)

## By kind of model

![Error by kind of model](figures/error-by-family.svg)

## By number of GPUs

![Error by number of GPUs](figures/error-by-count.svg)

## Support matrix

A cell has a grade, the mean error over models, and in parentheses the measured steps and their sources. **A**: at most
10 %, two sources or more. **B**: at most 20 %. **C**: more. An empty cell was forecast by the same laws, but fewer than
{least} measured steps judge it. Precisions are those of the tables: `amp_fp16` is 16-bit
autocast with FP32 weights.

{matrix}"""


def write_page(rows: Sequence[Row], docs: Path = DOCS, track: Track = iterate_without_progress) -> None:
    """Write the page and its pictures into a folder of documentation."""
    steps = read_steps(rows, track)
    figures = docs / "figures"
    figures.mkdir(exist_ok=True)
    plots: tuple[tuple[str, str, Callable[[MeasuredStep], str], int], ...] = (
        ("source", "Error by source", lambda step: step.source, LEAST_ROWS_OF_SOURCE),
        ("gpu", "Error by GPU", lambda step: step.gpu, LEAST_ROWS),
        ("family", "Error by kind of model", lambda step: FAMILIES[step.family], LEAST_ROWS),
        ("count", "Error by number of GPUs", lambda step: step.gpus, LEAST_ROWS),
    )
    for name, title, key, least in plots:
        picture = draw_errors(title, group_errors(steps, key, least))
        (figures / f"error-by-{name}.svg").write_text(picture, encoding="utf-8")
    text = _PAGE.format(
        count=len(steps),
        sources=len({step.source for step in steps}),
        total=GroupErrors.from_steps(steps),
        least=LEAST_ROWS,
        least_of_source=LEAST_ROWS_OF_SOURCE,
        matrix=format_matrix(steps),
    )
    (docs / "support.md").write_text(text, encoding="utf-8")
