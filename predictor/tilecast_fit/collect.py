"""Measures kernels on one GPU and writes them as tables that `tilecast validate kernels` reads.

Runs as `python -m tilecast_fit collect`, or alone as `python collect.py` on a GPU node: it imports nothing but
the standard library and, once it measures, PyTorch with CUDA.

A seeded plan draws shapes log-uniformly and interleaves the kinds, so that a run which its budget cuts off is
balanced. A duration is the median of repeated bursts between two CUDA events. Before a burst the L2 is filled
with other data, and the GPU is kept busy until the host has queued the whole burst, so that no launch of the
host is timed; the calls of a burst rotate over buffers that hold more than twice the L2. All data is random. Rows
reach their file as they are measured; what a GPU or a PyTorch cannot do is skipped and counted.

The plan, the budget, the tables and the choice of bursts are tested. `Device` and `LAUNCHERS`, all that touches
PyTorch, have never run on a GPU: compare the first table of a new machine with one you trust.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, Protocol, TextIO

Words = Mapping[str, str]
Sizes = Mapping[str, int]

DIRECTION = "pass"
"""Column that tells a forward pass from a backward one."""
ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
LARGEST_BYTES = 4e9
"""Least traffic of the largest kernel that is drawn."""
LARGEST_FLOPS: Mapping[str, float] = {"fp32": 2e12, "tf32": 1e13, "fp16": 1e13, "bf16": 1e13, "fp8": 1e13}
"""Work of the largest kernel that is drawn: half a second on the slowest GPU of interest."""
BURST_S = 4e-3
"""Length that a burst aims at: long against the half microsecond that an event resolves."""
MOST_CALLS = 40
"""Calls of the longest burst; a GPU queues about a thousand kernels, and one call may be ten of them."""
REPEATS_S = 0.5
"""Time spent on the bursts of one kernel, within 3 to 15 of them."""
FIRST_SLEEP_CYCLES = 3_000_000
"""How long the GPU first waits for the host, about two milliseconds, before `settled` doubles it."""
SLEEP_DOUBLINGS = 7
MEMORY_SHARE = 0.8
"""Share of the free device memory that the traffic of one call may fill."""


class CollectError(Exception):
    """The run cannot start or go on; the message is one line with the remedy."""


class SkippedError(Exception):
    """One kernel cannot be measured here. `reason` is counted, `detail` is shown once per reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of kernel, measured into the table `<name>.csv`."""

    name: str
    share: int
    """How many of its cases one round of the plan holds."""
    columns: tuple[str, ...]
    """Columns of its table between `gpu` and `latency_us`."""
    strata: tuple[Words, ...]
    """What the draws cycle through: dtype, op, pass and other words."""
    sizes: Callable[[Random, Words], Sizes]
    moved_bytes: Callable[[Words, Sizes], int]
    """Least traffic of one call: every input read once, every output written once."""
    flops: Callable[[Words, Sizes], float] = lambda words, sizes: 0.0
    labels: tuple[str, ...] = ()
    """Columns of its table behind `latency_us`."""
    swept: str = ""
    """Where the table keeps one size as `x_value` and the others as `config_json`: the name of the one."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel to measure."""

    kind: Kind
    words: Words
    sizes: Sizes

    @property
    def moved_bytes(self) -> int:
        return self.kind.moved_bytes(self.words, self.sizes)

    def fits(self) -> bool:
        """Whether it is within the largest traffic and work that are measured."""
        flops = self.kind.flops(self.words, self.sizes)
        return self.moved_bytes <= LARGEST_BYTES and flops <= LARGEST_FLOPS[self.words["dtype"]]

    def cells(self) -> dict[str, str | int]:
        """The values of its row that are known before it is measured, by column."""
        cells: dict[str, str | int] = {**self.words, **self.sizes, "bytes": self.moved_bytes}
        if swept := self.kind.swept:
            others = {name: size for name, size in self.sizes.items() if name != swept}
            cells |= {"x_name": swept, "x_value": self.sizes[swept], "config_json": json.dumps(others)}
        return cells

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{self.kind.name:<14}{'/'.join(self.words.values()):<44}{sizes}  ({self.moved_bytes / 1e6:.3g} MB)"


def log_uniform(rng: Random, low: int, high: int, step: int = 1) -> int:
    """A multiple of `step` in [low, high] whose logarithm is uniform; both ends are multiples of it."""
    value = math.exp(rng.uniform(math.log(low), math.log(high)))
    return min(max(round(value / step) * step, low), high)


def _strata(**choices: Sequence[str]) -> tuple[Words, ...]:
    return tuple(dict(zip(choices, words, strict=True)) for words in product(*choices.values()))


def _gemm_sizes(rng: Random, words: Words) -> Sizes:
    if words["form"] == "batched":
        sides = {name: log_uniform(rng, 16, 4096, 8) for name in "mnk"}
        return {**sides, "batch": log_uniform(rng, 2, 1024)}
    # The three products of a linear layer: its output, the gradients of its input and of its weight.
    tokens, wide, deep = log_uniform(rng, 1, 65536), log_uniform(rng, 64, 65536, 16), log_uniform(rng, 64, 65536, 16)
    roles = {"output": (tokens, wide, deep), "input-gradient": (tokens, wide, deep)}
    m, n, k = roles.get(words["form"], (wide, deep, tokens))
    return {"m": m, "n": n, "k": k, "batch": 1}


def _gemm_bytes(words: Words, sizes: Sizes) -> int:
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    element = ELEMENT_BYTES[words["dtype"]]
    return sizes["batch"] * (element * (m * k + k * n) + max(element, 2) * m * n)


def _gemm_flops(words: Words, sizes: Sizes) -> float:
    return 2.0 * sizes["batch"] * sizes["m"] * sizes["n"] * sizes["k"]


GEMM_FORMS: tuple[Words, ...] = (
    {"form": "output", "trans_a": "N", "trans_b": "T", "kernel": "torch matmul"},
    {"form": "input-gradient", "trans_a": "N", "trans_b": "N", "kernel": "torch matmul"},
    {"form": "weight-gradient", "trans_a": "T", "trans_b": "N", "kernel": "torch matmul"},
    {"form": "batched", "trans_a": "N", "trans_b": "N", "kernel": "torch bmm"},
    {"form": "batched", "trans_a": "N", "trans_b": "T", "kernel": "torch bmm"},
)
FP8_FORM: Words = {"dtype": "fp8", **GEMM_FORMS[0], "kernel": "torch scaled_mm (fast accumulation)"}
"""The one layout of FP8 matrix units, accumulated as training frameworks do forward."""


def _attention_sizes(rng: Random, words: Words) -> Sizes:
    kv_heads, queries_per_key = log_uniform(rng, 1, 32), rng.choice((1, 1, 1, 2, 4, 8))
    seq_q = log_uniform(rng, 16, 32768, 8)
    # PyTorch aligns a causal mask to the first key, so only square ones mean the same everywhere.
    square = words["causal"] == "1" or rng.random() < 0.5
    return {
        "batch": log_uniform(rng, 1, 64), "heads": kv_heads * queries_per_key, "kv_heads": kv_heads,
        "seq_q": seq_q, "seq_kv": seq_q if square else log_uniform(rng, 16, 32768, 8),
        "head_dim": rng.choice((32, 64, 64, 80, 96, 128, 128, 256)),
    }  # fmt: skip


def _attention_bytes(words: Words, sizes: Sizes) -> int:
    query = sizes["batch"] * sizes["heads"] * sizes["seq_q"] * sizes["head_dim"]
    key = sizes["batch"] * sizes["kv_heads"] * sizes["seq_kv"] * sizes["head_dim"]
    statistics = 4 * sizes["batch"] * sizes["heads"] * sizes["seq_q"]
    if words[DIRECTION] == "bwd":
        return ELEMENT_BYTES[words["dtype"]] * (5 * query + 4 * key) + 2 * statistics
    return ELEMENT_BYTES[words["dtype"]] * (2 * query + 2 * key) + statistics


def _attention_flops(words: Words, sizes: Sizes) -> float:
    # Two products forward, five backward (FlashAttention-2, arXiv 2307.08691, section 3); causal ones are square.
    visible = (sizes["seq_kv"] + 1) / 2 if words["causal"] == "1" else sizes["seq_kv"]
    scores = sizes["batch"] * sizes["heads"] * sizes["seq_q"] * visible * sizes["head_dim"]
    return scores * (10.0 if words[DIRECTION] == "bwd" else 4.0)


def _matrix_sizes(rng: Random, words: Words) -> Sizes:
    return {"rows": log_uniform(rng, 1, 2**18), "cols": log_uniform(rng, 64, 2**16, 8)}


def _rowwise_bytes(words: Words, sizes: Sizes) -> int:
    return ELEMENT_BYTES[words["dtype"]] * sizes["rows"] * sizes["cols"] * (3 if words[DIRECTION] == "bwd" else 2)


POINTWISE_INPUTS: Mapping[str, int] = {"add": 2, "mul": 2, "gelu": 1, "relu": 1, "copy": 1}


def _pointwise_bytes(words: Words, sizes: Sizes) -> int:
    return ELEMENT_BYTES[words["dtype"]] * sizes["rows"] * sizes["cols"] * (POINTWISE_INPUTS[words["op"]] + 1)


def _logits_sizes(rng: Random, words: Words) -> Sizes:
    return {"B": log_uniform(rng, 1, 32), "T": log_uniform(rng, 64, 8192), "V": log_uniform(rng, 1000, 262144)}


def _logits_bytes(words: Words, sizes: Sizes) -> int:
    logits = sizes["B"] * sizes["T"] * sizes["V"]
    return ELEMENT_BYTES[words["dtype"]] * logits * (2 if words[DIRECTION] == "backward" else 1)


def _embedding_sizes(rng: Random, words: Words) -> Sizes:
    return {**_logits_sizes(rng, words), "D": log_uniform(rng, 64, 8192, 8)}


def _embedding_bytes(words: Words, sizes: Sizes) -> int:
    rows, table = 2 * sizes["B"] * sizes["T"] * sizes["D"], sizes["V"] * sizes["D"]
    return ELEMENT_BYTES[words["dtype"]] * (rows + table if words[DIRECTION] == "backward" else rows)


def _conv_sizes(rng: Random, words: Words) -> Sizes:
    kernel, stride = rng.choice((1, 1, 3, 3, 3, 5, 7)), rng.choice((1, 1, 1, 2))
    c_in, c_out = log_uniform(rng, 8, 2048, 8), log_uniform(rng, 8, 2048, 8)
    groups = 1
    if words["form"] == "depthwise":
        c_out = groups = c_in
    elif words["form"] == "image":
        c_in = 3
    side = log_uniform(rng, 7, 256)
    return {
        "batch": log_uniform(rng, 1, 256), "c_in": c_in, "h": side, "w": side, "c_out": c_out,
        "kh": kernel, "kw": kernel, "pad_h": kernel // 2, "pad_w": kernel // 2,
        "stride_h": stride, "stride_w": stride, "groups": groups,
    }  # fmt: skip


def _conv_outputs(sizes: Sizes) -> int:
    side = (sizes["h"] + 2 * sizes["pad_h"] - sizes["kh"]) // sizes["stride_h"] + 1
    return sizes["batch"] * sizes["c_out"] * side**2


def _conv_bytes(words: Words, sizes: Sizes) -> int:
    inputs = sizes["batch"] * sizes["c_in"] * sizes["h"] * sizes["w"]
    weights = sizes["c_out"] * sizes["c_in"] // sizes["groups"] * sizes["kh"] * sizes["kw"]
    return ELEMENT_BYTES[words["dtype"]] * (inputs + weights + _conv_outputs(sizes))


def _conv_flops(words: Words, sizes: Sizes) -> float:
    return 2.0 * _conv_outputs(sizes) * sizes["c_in"] / sizes["groups"] * sizes["kh"] * sizes["kw"]


OPTIMIZER_TENSORS: Mapping[str, int] = {"sgd": 3, "momentum": 5, "adam": 7, "adamw": 7}
"""Reads and writes per parameter: itself, its gradient and the moments."""


def _optimizer_sizes(rng: Random, words: Words) -> Sizes:
    return {"rows": log_uniform(rng, 1, 256), "cols": log_uniform(rng, 2**8, 2**26, 8)}


def _optimizer_bytes(words: Words, sizes: Sizes) -> int:
    return ELEMENT_BYTES[words["dtype"]] * sizes["rows"] * sizes["cols"] * OPTIMIZER_TENSORS[words["op"]]


ROWWISE = ("dtype", "op", DIRECTION, "rows", "cols", "bytes")
SWEPT = ("dtype", "op", DIRECTION, "x_name", "x_value", "config_json")
HALVES = ("fp16", "bf16")
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "gemm", 6, ("dtype", "m", "n", "k", "batch"),
            tuple({"dtype": dtype, **form} for dtype in ("fp32", "tf32", "fp16", "bf16") for form in GEMM_FORMS)
            + (FP8_FORM,) * 3,
            _gemm_sizes, _gemm_bytes, _gemm_flops, labels=("trans_a", "trans_b", "kernel"),
        ),
        Kind(
            "attention", 6,
            ("dtype", DIRECTION, "batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "causal"),
            _strata(
                dtype=HALVES, causal=("0", "1"), **{DIRECTION: ("fwd", "bwd")},
                kernel=("torch SDPA flash_attention (FA2)", "torch SDPA cudnn", "torch SDPA efficient"),
            ),
            _attention_sizes, _attention_bytes, _attention_flops, labels=("kernel",),
        ),
        Kind(
            "norm", 4, ROWWISE,
            _strata(
                dtype=("fp32", *HALVES), op=("layer_norm", "rms_norm", "softmax"), **{DIRECTION: ("fwd", "bwd")},
                impl=("pytorch",),
            ),
            _matrix_sizes, _rowwise_bytes, labels=("impl",),
        ),
        Kind(
            "elementwise", 2, ROWWISE,
            _strata(dtype=("fp32", *HALVES), op=tuple(POINTWISE_INPUTS), **{DIRECTION: ("fwd",)}, impl=("pytorch",)),
            _matrix_sizes, _pointwise_bytes, labels=("impl",),
        ),
        Kind(
            "cross_entropy", 2, SWEPT,
            _strata(
                dtype=("fp32", "bf16"), op=("cross_entropy",), **{DIRECTION: ("forward", "backward")},
                impl=("composite",),
            ),
            _logits_sizes, _logits_bytes, labels=("impl",), swept="V",
        ),
        Kind(
            "embedding", 2, SWEPT,
            _strata(dtype=("fp32", "bf16"), op=("embedding",), **{DIRECTION: ("forward",)}, impl=("pytorch",))
            + _strata(dtype=("fp32", "bf16"), op=("embedding",), **{DIRECTION: ("backward",)}, impl=("composite",)),
            _embedding_sizes, _embedding_bytes, labels=("impl",), swept="V",
        ),
        Kind(
            "conv2d", 4,
            (
                "dtype", DIRECTION, "batch", "c_in", "h", "w", "c_out", "kh", "kw", "pad_h", "pad_w",
                "stride_h", "stride_w",
            ),
            _strata(
                dtype=("fp32", "tf32", *HALVES), **{DIRECTION: ("fwd", "bwd_data", "bwd_weight")},
                form=("dense", "dense", "depthwise", "image"), layout=("nchw", "nhwc"), fwd_algo=("cudnn.benchmark",),
            ),
            _conv_sizes, _conv_bytes, _conv_flops, labels=("groups", "layout", "fwd_algo"),
        ),
        Kind(
            "optimizer", 2, ROWWISE,
            _strata(
                dtype=("fp32", "bf16"), op=tuple(OPTIMIZER_TENSORS), **{DIRECTION: ("step",)}, impl=("pytorch fused",)
            ),
            _optimizer_sizes, _optimizer_bytes, labels=("impl",),
        ),
    )
}  # fmt: skip
"""Every kind that is measured. `impl` is `composite` where PyTorch runs several kernels for what a fused
implementation does in one; an optimizer's `rows` are its tensors, `cols` the elements of each."""


def draw(kind: Kind, seed: int) -> Iterator[Case]:
    """Cases of one kind without end: its strata in turn, shuffled anew each time round, with fresh sizes."""
    rng = Random(f"{seed}/{kind.name}")  # noqa: S311 shapes are no secret
    strata = list(kind.strata)
    while True:
        rng.shuffle(strata)
        for words in strata:
            case = Case(kind, words, kind.sizes(rng, words))
            while not case.fits():
                case = Case(kind, words, kind.sizes(rng, words))
            yield case


def plan(names: Sequence[str], seed: int) -> Iterator[Case]:
    """Cases of those kinds without end, interleaved: each kind has its share of every round, evenly spread.

    The cases of a kind do not depend on which others are measured.
    """
    kinds = [KINDS[name] for name in names]
    turns = sorted(((turn + 0.5) / kind.share, kind.name) for kind in kinds for turn in range(kind.share))
    drawn = {kind.name: draw(kind, seed) for kind in kinds}
    while True:
        for _, name in turns:
            yield next(drawn[name])


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call, over the bursts of a kernel."""

    median_s: float
    least_s: float
    most_s: float
    runs: int

    @classmethod
    def of(cls, bursts_s: Sequence[float]) -> Timing:
        return cls(statistics.median(bursts_s), min(bursts_s), max(bursts_s), len(bursts_s))


@dataclass(frozen=True, slots=True)
class Environment:
    """What a table was measured with, as its columns say it."""

    gpu: str
    driver: str
    cuda: str
    pytorch: str


MEASURED = ("n_runs", "latency_min_us", "latency_max_us", "driver", "cuda", "pytorch")


def header(kind: Kind) -> list[str]:
    """The columns of a kind's table."""
    return ["source", "gpu", *kind.columns, "latency_us", *kind.labels, *MEASURED]


def row(case: Case, timing: Timing, environment: Environment) -> list[str]:
    """The row of a measured case, in the order of `header`."""
    cells = case.cells() | {
        "source": "tilecast", "gpu": environment.gpu, "latency_us": f"{timing.median_s * 1e6:.4f}",
        "n_runs": timing.runs, "latency_min_us": f"{timing.least_s * 1e6:.4f}",
        "latency_max_us": f"{timing.most_s * 1e6:.4f}", "driver": environment.driver, "cuda": environment.cuda,
        "pytorch": environment.pytorch,
    }  # fmt: skip
    return [str(cells[name]) for name in header(case.kind)]


class _Echo:
    """A text stream that repeats every line on another, behind a prefix."""

    def __init__(self, file: TextIO, copy: TextIO | None, prefix: str) -> None:
        self.file, self.copy, self.prefix = file, copy, prefix

    def write(self, line: str) -> int:
        if self.copy is not None:
            self.copy.write(self.prefix + line)
            self.copy.flush()
        written = self.file.write(line)
        self.file.flush()
        return written


class Tables:
    """The tables of a run: `<kind>.csv` in one folder, started with the first row, flushed with every row."""

    def __init__(self, folder: Path, environment: Environment, copy: TextIO | None = None) -> None:
        """Args: `copy` gets every line too, as `<kind>.csv:LINE`, for machines that keep a log but no files.

        Raises:
            CollectError: the folder holds a table already, or cannot be made.
        """
        if found := [name for name in KINDS if (folder / f"{name}.csv").exists()]:
            raise CollectError(f"--output: {folder} has {found[0]}.csv already; name a new folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CollectError(f"--output: {folder} cannot be made ({error.strerror}); name another folder") from None
        self.folder, self.environment, self.copy = folder, environment, copy
        self.started: set[str] = set()

    def write(self, case: Case, timing: Timing) -> None:
        """Append the row of a measured case."""
        name = f"{case.kind.name}.csv"
        with (self.folder / name).open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(_Echo(file, self.copy, f"{name}:"), lineterminator="\n")
            if name not in self.started:
                writer.writerow(header(case.kind))
                self.started.add(name)
            writer.writerow(row(case, timing, self.environment))


@dataclass(slots=True)
class Tally:
    """What a run has done so far."""

    measured: Counter[str] = field(default_factory=Counter)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By kind and reason."""
    details: dict[tuple[str, str], str] = field(default_factory=dict)
    """What PyTorch said the first time."""

    def __str__(self) -> str:
        lines = [f"measured {self.measured.total()}: " + ", ".join(f"{k} {n}" for k, n in self.measured.items())]
        for (kind, reason), count in sorted(self.skipped.items()):
            detail = self.details.get((kind, reason), "")
            lines.append(f"skipped {count} {kind}: {reason}" + (f" (first: {detail})" if detail else ""))
        return "\n".join(lines)


class Measure(Protocol):
    """What turns a case into seconds."""

    def __call__(self, case: Case) -> Timing:
        """Raises `SkippedError` where the case cannot be measured, `CollectError` where no further one can."""


def collect(
    cases: Iterable[Case], measure: Measure, tables: Tables, tally: Tally, *, budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Measure cases in order until they end or the budget does; a case that has begun is finished.

    Args:
        cases: what to measure.
        measure: times one case.
        tables: where rows go.
        tally: counts what was measured and what was skipped, also when the run breaks off.
        budget_s: no case begins after that many seconds.
        clock: seconds since any moment.

    Raises:
        CollectError: the device fails; rows written until then are whole.
    """
    begin = clock()
    for number, case in enumerate(cases):
        spent_s = clock() - begin
        if spent_s >= budget_s:
            break
        if number and number % 100 == 0:
            done = f"{spent_s / 60:.1f} of {budget_s / 60:g} min: {tally.measured.total()} rows"
            print(f"{done}, {tally.skipped.total()} skipped", file=sys.stderr, flush=True)
        try:
            tables.write(case, measure(case))
        except SkippedError as skip:
            key = (case.kind.name, skip.reason)
            tally.skipped[key] += 1
            tally.details.setdefault(key, skip.detail)
        else:
            tally.measured[case.kind.name] += 1


def bursts(first_s: float) -> tuple[int, int]:
    """(calls of a burst, bursts) for a kernel whose first call took that long."""
    calls = min(max(round(BURST_S / first_s), 1), MOST_CALLS)
    return calls, min(max(round(REPEATS_S / (calls * first_s)), 3), 15)


def rotation(calls: int, moved_bytes: int, l2_bytes: int) -> int:
    """Sets of buffers that a burst rotates over: each call its own, until they hold more than twice the L2."""
    return min(calls, 2 * l2_bytes // moved_bytes + 2)


def settled(burst: Callable[[int], tuple[float, bool]]) -> float:
    """Seconds of a burst that was queued whole before the GPU began it.

    Args:
        burst: sleeping cycles -> (seconds of one call, whether the GPU began before the host was done).

    Raises:
        SkippedError: even the longest sleep is too short: the call waits for the GPU.
    """
    for doubling in range(SLEEP_DOUBLINGS):
        seconds, early = burst(FIRST_SLEEP_CYCLES << doubling)
        if not early:
            return seconds
    raise SkippedError("host-bound", "the call waits for the GPU, so its launches would be timed")


LEAST_CAPABILITY: Mapping[str, tuple[int, int]] = {
    "fp32": (0, 0), "fp16": (5, 3), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9),
}  # fmt: skip
"""Compute capability from which a dtype has units of its own; PyTorch would emulate it or ignore the wish before."""
LEAST_PYTORCH: Mapping[str, tuple[int, int]] = {"rms_norm": (2, 9)}
"""PyTorch version from which an op is one kernel."""


def missing(case: Case, capability: tuple[int, int], pytorch: str) -> str:
    """Why a GPU of that capability or a PyTorch of that version cannot run a case; empty where it can."""
    if capability < LEAST_CAPABILITY[case.words["dtype"]]:
        return f"no {case.words['dtype']} units"
    version = tuple(int(part) for part in re.findall(r"\d+", pytorch)[:2])
    least = LEAST_PYTORCH.get(case.words.get("op", ""), (0, 0))
    return f"not fused before PyTorch {least[0]}.{least[1]}" if version < least else ""


def driver_version(text: str) -> str:
    """The version in the text of /proc/driver/nvidia/version; empty where there is none."""
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else ""


# What follows touches PyTorch, and only that.

Call = Callable[[], Any]


def _tensor(torch: ModuleType, dtype: str, *shape: int, learns: bool = False) -> Any:
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    return torch.randn(shape, device="cuda", dtype=kind, requires_grad=learns)


def _indices(torch: ModuleType, high: int, *shape: int) -> Any:
    return torch.randint(high, shape, device="cuda")


def _direction(torch: ModuleType, forward: Call, inputs: Sequence[Any], backward: bool) -> Call:
    """The forward pass, or the backward pass alone of one that runs now."""
    if not backward:
        return forward
    output = forward()
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def _gemm(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    batch, m, n, k = sizes["batch"], sizes["m"], sizes["n"], sizes["k"]
    lead = (batch,) if words["form"] == "batched" else ()
    a = _tensor(torch, words["dtype"], *lead, *((k, m) if words["trans_a"] == "T" else (m, k)))
    b = _tensor(torch, words["dtype"], *lead, *((n, k) if words["trans_b"] == "T" else (k, n)))
    if words["dtype"] == "fp8":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    a = a.transpose(-2, -1) if words["trans_a"] == "T" else a
    b = b.transpose(-2, -1) if words["trans_b"] == "T" else b
    return lambda: torch.matmul(a, b)


SDPA_BACKENDS = {"flash_attention": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


def _attention(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    module = importlib.import_module("torch.nn.attention")
    backend = getattr(module.SDPBackend, SDPA_BACKENDS[words["kernel"].split()[2]])
    batch, head_dim, dtype = sizes["batch"], sizes["head_dim"], words["dtype"]
    q = _tensor(torch, dtype, batch, sizes["heads"], sizes["seq_q"], head_dim, learns=True)
    k, v = (_tensor(torch, dtype, batch, sizes["kv_heads"], sizes["seq_kv"], head_dim, learns=True) for _ in range(2))
    grouped = {"enable_gqa": True} if sizes["heads"] > sizes["kv_heads"] else {}
    attention = torch.nn.functional.scaled_dot_product_attention

    def forward() -> Any:
        with module.sdpa_kernel(backend):
            return attention(q, k, v, is_causal=words["causal"] == "1", **grouped)

    return _direction(torch, forward, (q, k, v), words[DIRECTION] == "bwd")


def _norm(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    cols, functional = sizes["cols"], torch.nn.functional
    x = _tensor(torch, words["dtype"], sizes["rows"], cols, learns=True)
    weight, bias = (_tensor(torch, words["dtype"], cols, learns=True) for _ in range(2))
    forward, inputs = {
        "layer_norm": (lambda: functional.layer_norm(x, (cols,), weight, bias), (x, weight, bias)),
        "rms_norm": (lambda: functional.rms_norm(x, (cols,), weight), (x, weight)),
        "softmax": (lambda: torch.softmax(x, -1), (x,)),
    }[words["op"]]
    return _direction(torch, forward, inputs, words[DIRECTION] == "bwd")


def _elementwise(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    shape = (sizes["rows"], sizes["cols"])
    inputs = [_tensor(torch, words["dtype"], *shape) for _ in range(POINTWISE_INPUTS[words["op"]])]
    function = {
        "add": torch.add, "mul": torch.mul, "copy": torch.clone, "gelu": torch.nn.functional.gelu, "relu": torch.relu,
    }[words["op"]]  # fmt: skip
    return lambda: function(*inputs)


def _cross_entropy(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    tokens = sizes["B"] * sizes["T"]
    logits = _tensor(torch, words["dtype"], tokens, sizes["V"], learns=True)
    labels = _indices(torch, sizes["V"], tokens)
    return _direction(
        torch, lambda: torch.nn.functional.cross_entropy(logits, labels), (logits,), words[DIRECTION] == "backward"
    )


def _embedding(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    table = _tensor(torch, words["dtype"], sizes["V"], sizes["D"], learns=True)
    tokens = _indices(torch, sizes["V"], sizes["B"], sizes["T"])
    return _direction(
        torch, lambda: torch.nn.functional.embedding(tokens, table), (table,), words[DIRECTION] == "backward"
    )


def _conv2d(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    layout = torch.channels_last if words["layout"] == "nhwc" else torch.contiguous_format
    dtype, groups = words["dtype"], sizes["groups"]
    x = _tensor(torch, dtype, sizes["batch"], sizes["c_in"], sizes["h"], sizes["w"]).to(memory_format=layout)
    shape = (sizes["c_out"], sizes["c_in"] // groups, sizes["kh"], sizes["kw"])
    weight = _tensor(torch, dtype, *shape).to(memory_format=layout)
    stride, pad = (sizes["stride_h"], sizes["stride_w"]), (sizes["pad_h"], sizes["pad_w"])

    def forward() -> Any:
        return torch.nn.functional.conv2d(x, weight, stride=stride, padding=pad, groups=groups)

    if words[DIRECTION] == "fwd":
        return forward
    gradient = torch.randn_like(forward())
    wanted = [words[DIRECTION] == "bwd_data", words[DIRECTION] == "bwd_weight", False]
    backward = torch.ops.aten.convolution_backward
    return lambda: backward(gradient, x, weight, None, stride, pad, (1, 1), False, (0, 0), groups, wanted)


def _optimizer(torch: ModuleType, words: Words, sizes: Sizes) -> Call:
    parameters = [_tensor(torch, words["dtype"], sizes["cols"], learns=True) for _ in range(sizes["rows"])]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    kind, options = {
        "sgd": ("SGD", {}), "momentum": ("SGD", {"momentum": 0.9}), "adam": ("Adam", {}), "adamw": ("AdamW", {}),
    }[words["op"]]  # fmt: skip
    step: Call = getattr(torch.optim, kind)(parameters, lr=1e-4, fused=True, **options).step
    return step


LAUNCHERS: Mapping[str, Callable[[ModuleType, Words, Sizes], Call]] = {
    "gemm": _gemm, "attention": _attention, "norm": _norm, "elementwise": _elementwise,
    "cross_entropy": _cross_entropy, "embedding": _embedding, "conv2d": _conv2d, "optimizer": _optimizer,
}  # fmt: skip
"""By kind: random buffers on the GPU, and the call on them that is timed."""


class Device:
    """The GPU, through PyTorch: a `Measure`."""

    def __init__(self) -> None:
        """Open the current CUDA device.

        Raises:
            CollectError: PyTorch or a CUDA device is missing.
        """
        try:
            self.torch = torch = importlib.import_module("torch")
        except ImportError:
            raise CollectError(
                "torch: not installed; run this where PyTorch with CUDA is, for instance in a pytorch/pytorch image"
            ) from None
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise CollectError(
                f"CUDA: PyTorch {torch.__version__} finds no CUDA GPU; run on a GPU node with a CUDA build of PyTorch"
            )
        facts = torch.cuda.get_device_properties(0)
        self.capability = (int(facts.major), int(facts.minor))
        self.l2_bytes = int(getattr(facts, "L2_cache_size", 0)) or 64 * 2**20
        driver = Path("/proc/driver/nvidia/version")
        self.environment = Environment(
            gpu=str(torch.cuda.get_device_name(0)),
            driver=driver_version(driver.read_text()) if driver.exists() else "",
            cuda=str(torch.version.cuda),
            pytorch=str(torch.__version__),
        )
        torch.backends.cudnn.benchmark = True
        self.flush = torch.zeros(2 * self.l2_bytes // 4, device="cuda")

    def __call__(self, case: Case) -> Timing:
        """Measure one case.

        Raises:
            SkippedError: it does not fit, is not supported, or cannot be timed without the host.
            CollectError: CUDA failed in a way that spoils every later kernel.
        """
        if reason := missing(case, self.capability, self.environment.pytorch):
            raise SkippedError(reason)
        # The error keeps the frames of the failed call, and with them its buffers, until its handler is left.
        try:
            return self._timing(case)
        except self.torch.cuda.OutOfMemoryError:
            skip = SkippedError("out of memory")
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
            skip = SkippedError("unsupported", (str(error).splitlines() or [type(error).__name__])[0][:200])
        try:
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
        except RuntimeError as error:
            raise CollectError(f"CUDA: {case} broke the device ({str(error).splitlines()[0]}); start anew") from None
        raise skip

    def _timing(self, case: Case) -> Timing:
        torch = self.torch
        if case.moved_bytes > MEMORY_SHARE * (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()):
            raise SkippedError("out of memory")
        tf32 = case.words["dtype"] == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        launcher = LAUNCHERS[case.kind.name]
        calls = [launcher(torch, case.words, case.sizes)]
        self._warm(calls)
        count, repeats = bursts(settled(lambda cycles: self._burst(calls, 1, cycles)))
        sets = rotation(count, case.moved_bytes, self.l2_bytes)
        calls += [launcher(torch, case.words, case.sizes) for _ in range(sets - 1)]
        self._warm(calls)
        return Timing.of([settled(lambda cycles: self._burst(calls, count, cycles)) for _ in range(repeats)])

    def _warm(self, calls: Sequence[Call]) -> None:
        """Run every call twice: libraries choose their kernels, the allocator gets its blocks."""
        for _ in range(2):
            kept = [call() for call in calls]
            self.torch.cuda.synchronize()
            del kept

    def _burst(self, calls: Sequence[Call], count: int, cycles: int) -> tuple[float, bool]:
        """`count` calls behind a sleep of that many cycles: seconds of one, and whether the sleep ended too early.

        Results are kept for one turn of the rotation, so that outputs rotate as the inputs do. The L2 is filled by
        reading, for what is written would be written back during the burst.
        """
        cuda = self.torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        kept: list[Any] = [None] * len(calls)
        self.flush.sum()
        cuda._sleep(cycles)
        start.record()
        for turn in range(count):
            kept[turn % len(calls)] = calls[turn % len(calls)]()
        end.record()
        early = bool(start.query())
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / count, early


def arguments() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog="collect", description="Measure kernels on one GPU into CSV tables.")
    parser.add_argument("-o", "--output", type=Path, default=Path("measured"), help="new folder for the tables")
    parser.add_argument("--budget-minutes", type=float, default=60.0, help="stop after that long (default: 60)")
    parser.add_argument("--cases", type=int, default=5000, help="stop after that many kernels (default: 5000)")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="what to measure")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes (default: 0)")
    parser.add_argument("--echo", action="store_true", help="print every row too, as FILE:ROW")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; needs neither PyTorch nor a GPU")
    return parser


def run(given: argparse.Namespace) -> int:
    """Run the command on parsed arguments; returns the exit status."""
    try:
        if not 0 < given.budget_minutes < math.inf:
            raise CollectError(f"--budget-minutes: {given.budget_minutes:g} measures nothing; give a positive number")
        if given.cases < 1:
            raise CollectError(f"--cases: {given.cases} leaves nothing to measure; give a positive number")
        cases = islice(plan(list(dict.fromkeys(given.kinds)), given.seed), given.cases)
        if given.dry_run:
            counts: Counter[str] = Counter()
            for case in cases:
                print(case)
                counts[case.kind.name] += 1
            print(f"{given.cases} kernels: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
            return 0
        device = Device()
        tables = Tables(given.output, device.environment, sys.stdout if given.echo else None)
        print(f"{device.environment} -> {given.output}", file=sys.stderr)
        tally = Tally()
        try:
            collect(cases, device, tables, tally, budget_s=given.budget_minutes * 60)
        finally:
            print(tally, file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    except CollectError as refusal:
        print(refusal, file=sys.stderr)
        return 2
    return 0


def main() -> int:
    """Run the command on the arguments of the process."""
    return run(arguments().parse_args())


if __name__ == "__main__":
    sys.exit(main())
