"""Training samples from measured tables: columns, context and duration of each kernel, by family of kernels.

`SOURCES` has the tables of the shipped model; `read_samples` reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilecast import kernels
from tilecast.graph import Dims, KernelType
from tilecast.hardware import Gpu, find_gpu
from tilecast.kernels import features, utilization
from tilecast.spec import PRECISIONS, Floats, Ints, SpecError
from tilecast_lab.validate.kernel_readers import read_kernels
from tilecast_lab.validate.kernel_table import MeasuredKernels


@dataclass(frozen=True, slots=True)
class SampleTable:
    """File of the data folder, and which of its rows are used.

    `limit` bounds the number of rows (a seeded subset). `weight` is the weight of a row in the loss, so that a small
    table of a rare kind still counts beside a large one.
    """

    file: str
    licence: str
    limit: int | None = None
    weight: float = 1.0
    variants: tuple[str, ...] = ()
    """Words of which the name of a row's kernel must contain one; empty takes all rows."""
    without: tuple[str, ...] = ()
    """Words that the name of a row's kernel must not contain.

    They exclude encoder kernels on Hopper that take twice as long as those of FlashAttention-3 and cuDNN for the same
    shapes.
    """
    except_on: tuple[tuple[str, str], ...] = ()
    """Pairs of op and GPU whose rows are not used."""
    precisions: tuple[str, ...] = ()
    """Precisions of the rows that are used; empty takes all."""
    general: bool = True
    """Whether the general law learns from it, or only the measured GPU: Aceso's norms are Apex's of 2021."""
    protocol: bool = False
    """Whether NeuSight's protocol trains on this file."""


THROTTLED_W = 80.0
"""Power in watts up to which cards (P4, T4, L4) change their clock with their temperature.

The same product takes up to four times longer in one of NeuSight's campaigns than in the other. Only their own biases
are learned from products on these cards.
"""
CLEAR_OF_HARNESS = 1.15
"""Least ratio of a row's time to the shortest time of its harness for the row to be used."""
P4_LINEAR = (("linear", "Tesla P4"),)
"""Rows that are left out of the faster of NeuSight's two campaigns.

The campaigns measured the linear layers of P4 at a fifth and at four fifths of the peak; in the models of the same data
set they run at half of it. Without the faster campaign they follow the law of the other products.
"""
FUSED = ("cudnn", "liger", "torch_compile", "megatron-fused", "pytorch")
SOURCES: tuple[SampleTable, ...] = (
    SampleTable("kernels/aiconfigurator/gemm_bf16.csv.gz", "Apache-2.0"),
    SampleTable(
        "kernels/aiconfigurator/gemm_fp8.csv.gz",
        "Apache-2.0",
        limit=60_000,
        weight=0.5,
        variants=("scaled_mm", "ScaledMMLinear"),
    ),
    SampleTable("kernels/apex_plus/gemm_fp16_v100pcie.csv.gz", "MIT", limit=20_000, weight=0.5),
    SampleTable("kernels/deepbench/gemm.csv", "Apache-2.0", weight=20.0),
    SampleTable("kernels/deepbench/conv2d.csv", "Apache-2.0", weight=20.0),
    SampleTable(
        "kernels/aiconfigurator/attention.csv.gz",
        "Apache-2.0",
        limit=120_000,
        variants=("sglang:fa3", "sglang:flash_attention", "vllm:vllm_flash_attn", "vllm_vit_flash_attn_fa"),
        without=("flash_attention_v3",),
    ),
    SampleTable("kernels/cudnn_frontend/attention.csv", "MIT", weight=40.0, variants=("cudnn",)),
    SampleTable("second/kernels/aceso_gemm.csv", "MIT", weight=8.0, precisions=("fp16",)),
    SampleTable("second/kernels/aceso_ops_fwd_bwd.csv.gz", "MIT", variants=("layernorm", "softmax"), general=False),
    SampleTable("second/kernels/simumax_gemm.csv", "Apache-2.0", weight=10.0),
    SampleTable("second/kernels/simumax_grouped_gemm.csv", "Apache-2.0", weight=20.0),
    SampleTable("second/kernels/simumax_attention.csv", "Apache-2.0", weight=40.0),
    SampleTable("neusight/kernels_train.csv.gz", "MIT", protocol=True),
    SampleTable("neusight/kernels_test.csv.gz", "MIT", weight=4.0, except_on=P4_LINEAR),
    SampleTable("neusight/conv_train.csv.gz", "MIT"),
    SampleTable("kernels/vidur/elementwise_fp16.csv.gz", "MIT"),
    SampleTable("kernels/cudnn_frontend/norm.csv", "MIT", variants=FUSED),
    SampleTable("kernels/liger/elementwise.csv", "BSD-2-Clause", variants=FUSED),
)
"""Tables that the shipped model is trained on.

Tables whose times include a framework's own overheads (XLA's matmul table), or only the best shapes (ml-engineering),
serve for validation and not for training.
"""


@dataclass(frozen=True, slots=True)
class Samples:
    """N measured kernels of one family.

    `columns` is (N, D), `larger` (N, J, D) the columns with one of J dimensions doubled, `details` (N, E); all others
    are (N,). `added_s` and `least_s` are those of the harness. If a slower kernel ran than the one that is priced, its
    times are divided by the ratio of the two.
    """

    columns: Floats
    larger: npt.NDArray[np.float32]
    details: Floats
    names: tuple[str, ...]
    case: npt.NDArray[np.object_]
    die: npt.NDArray[np.object_]
    gpu: npt.NDArray[np.object_]
    clock_hz: Floats
    roofline_s: Floats
    moved: Floats
    rows: Floats
    written_share: Floats
    """Share of the bytes that an element-wise kernel writes; 1 for other kernels."""
    measured_s: Floats
    added_s: Floats
    least_s: Floats
    weight: Floats
    general: npt.NDArray[np.bool_]
    """Whether the general law learns from the sample too."""
    fold: Ints

    def __len__(self) -> int:
        return len(self.measured_s)

    def stacked(self) -> Floats:
        """Return the columns of the kernels and of their doubles, (1 + J, N, D)."""
        return np.concatenate([self.columns[None], np.moveaxis(self.larger, 1, 0)])

    def all_inputs(self) -> Floats:
        """Return columns and details side by side, (N, D + E)."""
        return np.concatenate([self.columns, self.details], axis=1)

    def take(self, rows: npt.NDArray[np.bool_] | Ints) -> Samples:
        """Return the samples of the chosen rows, given as a mask or as indices."""
        chosen = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "names"}
        return replace(self, **chosen)

    @classmethod
    def concatenate(cls, parts: Sequence[Samples]) -> Samples:
        """Return all samples of the parts, whose columns must be the same."""
        names = [f.name for f in fields(cls) if f.name != "names"]
        joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return replace(parts[0], **joined)


DIE_ROWS = 40
"""Least number of samples for a die to have a correction or a width of its own."""


def symmetric_error(ratio: Floats) -> Floats:
    """Return how far off a ratio is, the same in both directions: 2 and 1/2 are both off by 1."""
    result: Floats = np.maximum(ratio, 1.0 / ratio) - 1.0
    return result


def error_by_die(die: npt.NDArray[np.object_], errors: Floats) -> dict[str, float]:
    """Return the 90 % quantile of the errors of every die with enough samples."""
    counts = {name: int((die == name).sum()) for name in sorted(set(die))}
    return {name: float(np.quantile(errors[die == name], 0.9)) for name, n in counts.items() if n >= DIE_ROWS}


def read_samples(
    data: Path, sources: Iterable[SampleTable], leave_out: Sequence[str] = (), seed: int = 0
) -> dict[str, Samples]:
    """Return samples by family of kernels from the files of the data folder.

    Args:
        data: folder that holds `kernels/` and `neusight/`.
        sources: files to read; all must exist.
        leave_out: names of GPUs whose rows are dropped.
        seed: seed of the subsets that limits take.

    Raises:
        SpecError: a file is missing or no table, or a GPU to leave out is unknown.
    """
    dropped = {find_gpu(name).name for name in leave_out}
    samples: dict[str, list[Samples]] = {}
    for source in sources:
        table = read_kernels(data / source.file)
        keep = _usable(table, source)
        if source.limit and keep.sum() > source.limit:
            rng = np.random.default_rng(seed)
            keep = np.isin(np.arange(len(table)), rng.choice(np.flatnonzero(keep), source.limit, replace=False))
        for family, part in _samples(table, keep, source, dropped):
            samples.setdefault(family, []).append(part)
    return {family: Samples.concatenate(parts) for family, parts in samples.items()}


def _usable(table: MeasuredKernels, source: SampleTable) -> npt.NDArray[np.bool_]:
    single = np.bincount(table.owner, minlength=len(table)) == 1
    least = np.array([cost.least_s for cost in table.harness])
    keep: npt.NDArray[np.bool_] = (
        single & np.isfinite(table.latency_s) & (table.latency_s > 0) & np.array([not r for r in table.reason])
    )
    if source.variants:
        keep &= np.array([any(word in text for word in source.variants) for text in table.variant])
    if source.without:
        keep &= ~np.array([any(word in text for word in source.without) for text in table.variant])
    if source.precisions:
        keep &= np.isin(np.array(table.precision, object), source.precisions)
    if source.except_on:
        keep &= ~np.array([pair in source.except_on for pair in zip(table.op, table.gpu, strict=True)])
    return np.asarray(keep & (table.latency_s > CLEAR_OF_HARNESS * least), np.bool_)


def _samples(
    table: MeasuredKernels, keep: npt.NDArray[np.bool_], source: SampleTable, dropped: set[str]
) -> Iterable[tuple[str, Samples]]:
    names = np.array(table.gpu, dtype=object)
    row_of = table.owner
    fold = table.fold()
    for name in dict.fromkeys(table.gpu):
        try:
            gpu = find_gpu(name)
        except SpecError:
            continue
        if gpu.name in dropped:
            continue
        here = np.flatnonzero((names[row_of] == name) & keep[row_of])
        kernel_table = table.kernels.take(here)
        for kind, places, dims in kernel_table.groups():
            codes, rows = kernel_table.precision[places], row_of[here[places]]
            for code in np.unique(codes):
                part, precision = codes == code, PRECISIONS[code]
                if gpu.supports(precision):
                    d = {dim: column[part] for dim, column in dims.items()}
                    sampled = _one(table, kind, precision, d, rows[part], gpu, source, fold)
                    yield features.find_network_family(kind.name, precision, gpu), sampled


def _one(
    table: MeasuredKernels,
    kind: KernelType,
    precision: str,
    d: Dims,
    rows: Ints,
    gpu: Gpu,
    source: SampleTable,
    fold: Ints,
) -> Samples:
    work = features.compute_work(kind, precision, d)
    asked = features.compute_network_inputs(
        features.find_network_family(kind.name, precision, gpu), work, gpu, precision
    )
    is_product = kind.name in features.PRODUCTS
    compute = work.flops / gpu.peak(precision) if is_product else np.zeros(len(rows))
    count, moved = len(rows), work.moved_bytes
    times = np.array([table.harness[row].times for row in rows])
    return Samples(
        columns=asked.columns[0], larger=np.moveaxis(asked.columns[1:], 0, 1).astype(np.float32),
        details=asked.details, names=asked.names, case=kernels.list_case_names(kind, precision, d, gpu).astype(object),
        die=np.full(count, utilization.name_die(gpu), object), gpu=np.full(count, gpu.name, object),
        clock_hz=np.full(count, gpu.boost_clock_hz),
        roofline_s=np.maximum(compute, kernels.formulas.memory_floor_s(moved, gpu)), moved=moved,
        rows=kernels.formulas.count_rows(d, moved),
        written_share=kernels.formulas.compute_written_share(d, moved), measured_s=table.latency_s[rows] / times,
        added_s=np.array([table.harness[row].added_s for row in rows]) / times,
        least_s=np.array([table.harness[row].least_s for row in rows]) / times,
        weight=np.full(count, source.weight),
        general=np.full(count, source.general and (gpu.tdp_w > THROTTLED_W or not is_product)),
        fold=fold[rows],
    )  # fmt: skip
