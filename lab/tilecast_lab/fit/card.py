"""Model card of the utilization model: its training data, and its errors on seen and unseen shapes and GPUs.

`write` is the entry. The errors on unseen data are those of models trained without some of the data (`TRIALS`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tilecast import kernels
from tilecast.spec import Floats
from tilecast_lab.fit.samples import SOURCES, SampleTable
from tilecast_lab.fit.training import fit
from tilecast_lab.validate.kernel_readers import ONE_INPUT, TWO_INPUTS, read_kernels
from tilecast_lab.validate.kernel_table import MeasuredKernels
from tilecast_lab.validate.kernels import NEUSIGHT_ERRORS, Prediction, predict

HELD_OUT_FOLD = 0
UNSEEN = ("l40s", "h200")
UNSEEN_NAMES = ("NVIDIA L40S", "NVIDIA H200")
NEUSIGHT_TEST = "neusight/kernels_test.csv.gz"
COVERAGE = (
    ("GEMM, batched GEMM", "gemm",
     "FP32 on 8 GPUs, FP16 on T4 and V100 (there batched too), BF16 and FP8 on A100, L40S, H100 and H200; TF32 by the "
     "same law"),
    ("grouped GEMM of experts", "gemm, batched over the local experts",
     "BF16 on A100, forward and both backwards, the weights' added in FP32"),
    ("fused attention", "attention",
     "forward BF16 and FP8; backward on A100 and H200; FP16 and FP32 by the same law"),
    ("unfused attention", "gemm, softmax, elementwise", "each of its pieces"),
    ("softmax, layer norm, RMS norm", "softmax, layernorm, rmsnorm",
     "forward; backward of RMS norm on H200, of layer norm and softmax on V100; the other backwards by formula"),
    ("element-wise and fused chains, dropout, masks, rotary, casts, copies", "elementwise",
     "FP32 on 7 GPUs, FP16 on A100, by their bytes; the random numbers of dropout on V100"),
    ("embedding and its scatter-add, cross-entropy", "embedding, cross_entropy",
     "a few dozen rows on A100 and H100, else by formula"),
    ("convolution 2-D, forward and both backwards", "conv",
     "FP32 on 6 GPUs, FP16 on T4 and V100; elsewhere the implicit GEMM (arXiv 1410.0759)"),
    ("convolution 3-D, depthwise, grouped", "conv", "not measured: implicit GEMM, small groups packed together"),
    ("pooling, batch norm", "elementwise", "not measured: their passes over memory at the fitted bandwidth"),
    ("SGD, momentum, Adam, AdamW, LAMB", "bytes per parameter (step/weights.py)",
     "not measured by kernel: efficiency fitted to whole steps"),
    ("routing of experts", "gemm, softmax, elementwise", "not measured by itself"),
)  # fmt: skip
"""Operations of a training step, the kind of kernel that prices each, and the measurements of that kind."""
FEWEST = 5
"""Least number of measured rows for a line of the card."""

Mask: TypeAlias = npt.NDArray[np.bool_]
Chosen: TypeAlias = Callable[[MeasuredKernels], Mask]


@dataclass(frozen=True, slots=True)
class Trial:
    """Model that is trained without a part of the data, for an estimate of errors on unseen data."""

    title: str
    note: str
    file: str
    leave_out: tuple[str, ...] = ()
    hold_out: int | None = None
    protocol: str | None = None


TRIALS = (
    Trial(
        "Shapes never seen",
        f"Trained without fold {HELD_OUT_FOLD} of five (crc32 of the group), asked about that fold.",
        "held-out.onnx", hold_out=HELD_OUT_FOLD,
    ),
    Trial(
        "GPUs never seen", "Trained without any row of L40S or H200. H200 has the die of H100, L40S that of no other.",
        "left-out.onnx", leave_out=UNSEEN,
    ),
    Trial(
        "NeuSight's protocol",
        "Trained on NeuSight's kernels_train alone, asked about its kernels_test: A100 80GB, H100 and L4 were "
        "never seen. NeuSight's own errors in distribution / out of distribution stand beside.",
        "protocol.onnx", protocol="neusight",
    ),
)  # fmt: skip


def write(data: Path, output: Path, work: Path, effort: float, seed: int) -> None:
    """Train the models of the trials, predict with all models, and write the card.

    Args:
        data: folder with `kernels/` and `neusight/`.
        output: Markdown file to write.
        work: folder for the models of the trials; models that exist there are used as they are.
        effort: factor on the training steps of those models.
        seed: seed of everything random.

    Raises:
        SpecError: a table or the shipped model cannot be read.
    """
    work.mkdir(parents=True, exist_ok=True)
    for trial in TRIALS:
        if not (work / trial.file).exists():
            fit(
                data, work / trial.file, protocol=trial.protocol, leave_out=trial.leave_out, hold_out=trial.hold_out,
                effort=effort, seed=seed,
            )  # fmt: skip
    shapes, gpus, protocol = TRIALS
    measured = [source for source in SOURCES if source.file != NEUSIGHT_TEST]
    lines = [
        *_introduction(),
        *_section("Shipped model, on what it was trained on", "", _asked(data, SOURCES, None, _every)),
        *_section(
            shapes.title, shapes.note,
            _asked(data, measured, work / shapes.file, lambda table: table.fold() == HELD_OUT_FOLD),
        ),
        *_section(
            gpus.title, gpus.note,
            _asked(data, SOURCES[:1], work / gpus.file, lambda t: np.isin(np.array(t.gpu, object), UNSEEN_NAMES)),
        ),
        *_section(
            protocol.title, protocol.note,
            _asked(data, [SampleTable(NEUSIGHT_TEST, "MIT")], work / protocol.file, _every),
        ),
    ]  # fmt: skip
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _introduction() -> list[str]:
    version, digest = kernels.describe_model_file()
    return [
        f"# Utilization model {version}",
        "",
        f"`utilization.onnx`, SHA-256 `{digest}`.",
        "It prices kernels for `tilecast.kernels`; `tilecast_lab/fit/network.py` tells how it is built and trained.",
        "Errors are means of |predicted / measured - 1|; *in 90 %* is how often the measured time lies within the",
        "stated interval; *roofline* is the error of the data sheet alone.",
        "",
        "## Data",
        "",
        "| table | licence | rows used at most | kernels |",
        "|---|---|---|---|",
        *(f"| {s.file} | {s.licence} | {s.limit or 'all'} | {', '.join(s.variants) or 'all'} |" for s in SOURCES),
        "",
        "Only figures were taken, no code or text; the tables are not part of this repository. Sources, on GitHub:",
        "ai-dynamo/aiconfigurator, microsoft/apex_plus, baidu-research/DeepBench, NVIDIA/cudnn-frontend,",
        "sitar-lab/NeuSight, microsoft/vidur, linkedin/Liger-Kernel, microsoft/SuperScaler (Aceso) and",
        "MooreThreads/SimuMax.",
        "",
        "## Coverage",
        "",
        "| operation | priced as | measured |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in COVERAGE),
        "",
    ]


def _every(table: MeasuredKernels) -> Mask:
    return np.ones(len(table), bool)


def _asked(
    data: Path, sources: Sequence[SampleTable], model: Path | None, chosen: Chosen
) -> list[tuple[MeasuredKernels, Prediction, Mask]]:
    lines = []
    for source in sources:
        table = read_kernels(data / source.file)
        rows = chosen(table)
        if source.variants:
            named = [any(word in text for word in source.variants) for text in table.variant]
            rows = rows & np.array(named)
        lines.append((table, predict(table, model), rows))
    return lines


def _section(title: str, note: str, asked: Iterable[tuple[MeasuredKernels, Prediction, Mask]]) -> list[str]:
    cells: dict[tuple[str, str, str], list[Floats]] = {}
    for table, p, rows in asked:
        for i in np.flatnonzero(rows & np.isfinite(p.seconds) & (table.latency_s > 0)):
            measured = table.latency_s[i]
            inside = p.lower[i] <= measured <= p.upper[i]
            values = np.array([abs(p.seconds[i] / measured - 1), abs(p.roofline[i] / measured - 1), inside])
            op = "elementwise" if table.op[i] in TWO_INPUTS + ONE_INPUT else table.op[i]
            cells.setdefault((op, table.precision[i], table.gpu[i]), []).append(values)
    lines = [f"## {title}", "", *([note, ""] if note else [])]
    lines += [
        "| op | precision | GPU | rows | error | roofline | in 90 % | NeuSight |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in sorted(cells):
        if len(cells[key]) >= FEWEST:
            error, roofline, inside = np.mean(cells[key], axis=0)
            theirs = NEUSIGHT_ERRORS.get(key[0]) if key[1] == "fp32" else None
            beside = f"{theirs[0]:.1%} / {theirs[1]:.1%}" if theirs else ""
            shown = f"{len(cells[key]):,} | {error:.1%} | {roofline:.1%} | {inside:.0%} | {beside}"
            lines.append(f"| {' | '.join(key)} | {shown} |")
    return [*lines, ""]
