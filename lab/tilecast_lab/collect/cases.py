"""Kernels to measure: the kinds with their strata and sizes, and the seeded plan over them.

`KINDS` has all kinds, `plan_cases` draws cases of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

Words = Mapping[str, str]


Sizes = Mapping[str, int]


DIRECTION = "pass"
"""Column that says whether a row is a forward or a backward pass."""


ELEMENT_BYTES: Mapping[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


LARGEST_BYTES = 4e9
"""Largest traffic of a kernel that is drawn, counted as in `KernelKind.moved_bytes`."""


LARGEST_FLOPS: Mapping[str, float] = {"fp32": 2e12, "tf32": 1e13, "fp16": 1e13, "bf16": 1e13, "fp8": 1e13}
"""Largest FLOPs of a kernel that is drawn, by dtype: half a second on the slowest GPU of interest."""


@dataclass(frozen=True, slots=True)
class KernelKind:
    """Kind of kernel, measured into the table `<name>.csv`."""

    name: str
    share: int
    """Number of its cases in one round of the plan."""
    columns: tuple[str, ...]
    """Columns of its table between `gpu` and `latency_us`."""
    strata: tuple[Words, ...]
    """Combinations of dtype, op, pass and other words that the draws cycle through."""
    sizes: Callable[[Random, Words], Sizes]
    moved_bytes: Callable[[Words, Sizes], int]
    """Least traffic of one call: every input read once, every output written once."""
    flops: Callable[[Words, Sizes], float] = lambda words, sizes: 0.0
    labels: tuple[str, ...] = ()
    """Columns of its table after `latency_us`."""
    swept: str = ""
    """Name of the size that the table has as `x_value`, with the others in `config_json`; empty for other tables."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """Kernel to measure."""

    kind: KernelKind
    words: Words
    sizes: Sizes

    @property
    def moved_bytes(self) -> int:
        return self.kind.moved_bytes(self.words, self.sizes)

    def fits(self) -> bool:
        """Return whether the kernel is within the largest traffic and FLOPs that are measured."""
        flops = self.kind.flops(self.words, self.sizes)
        return self.moved_bytes <= LARGEST_BYTES and flops <= LARGEST_FLOPS[self.words["dtype"]]

    def cells(self) -> dict[str, str | int]:
        """Return the cells of its row that are known before it is measured, by column."""
        cells: dict[str, str | int] = {**self.words, **self.sizes, "bytes": self.moved_bytes}
        if swept := self.kind.swept:
            others = {name: size for name, size in self.sizes.items() if name != swept}
            cells |= {"x_name": swept, "x_value": self.sizes[swept], "config_json": json.dumps(others)}
        return cells

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{self.kind.name:<14}{'/'.join(self.words.values()):<44}{sizes}  ({self.moved_bytes / 1e6:.3g} MB)"


def log_uniform(rng: Random, low: int, high: int, step: int = 1) -> int:
    """Draw a multiple of `step` in [low, high] with a uniform logarithm; both ends must be multiples of `step`."""
    value = math.exp(rng.uniform(math.log(low), math.log(high)))
    return min(max(round(value / step) * step, low), high)


def _strata(**choices: Sequence[str]) -> tuple[Words, ...]:
    return tuple(dict(zip(choices, words, strict=True)) for words in product(*choices.values()))


def _gemm_sizes(rng: Random, words: Words) -> Sizes:
    if words["form"] == "batched":
        sides = {name: log_uniform(rng, 16, 4096, 8) for name in "mnk"}
        return {**sides, "batch": log_uniform(rng, 2, 1024)}
    # A linear layer has three products: its output, the gradient of its input and the gradient of its weight.
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
"""FP8 product in the only layout that FP8 matrix units take, accumulated as in forward passes of frameworks."""


def _attention_sizes(rng: Random, words: Words) -> Sizes:
    kv_heads, queries_per_key = log_uniform(rng, 1, 32), rng.choice((1, 1, 1, 2, 4, 8))
    seq_q = log_uniform(rng, 16, 32768, 8)
    # PyTorch aligns a causal mask to the first key, so only square masks mean the same in all implementations.
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
    # Two products forward, five backward (FlashAttention-2, arXiv 2307.08691, section 3); causal cases are square.
    visible = (sizes["seq_kv"] + 1) / 2 if words["causal"] == "1" else sizes["seq_kv"]
    scores = sizes["batch"] * sizes["heads"] * sizes["seq_q"] * visible * sizes["head_dim"]
    return scores * (10.0 if words[DIRECTION] == "bwd" else 4.0)


def _matrix_sizes(rng: Random, words: Words) -> Sizes:
    return {"rows": log_uniform(rng, 1, 2**18), "cols": log_uniform(rng, 64, 2**16, 8)}


def _rowwise_bytes(words: Words, sizes: Sizes) -> int:
    return ELEMENT_BYTES[words["dtype"]] * sizes["rows"] * sizes["cols"] * (3 if words[DIRECTION] == "bwd" else 2)


POINTWISE_INPUTS: Mapping[str, int] = {"add": 2, "mul": 2, "gelu": 1, "relu": 1, "copy": 1}
"""Tensors that an element-wise op reads."""


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
"""Reads and writes per parameter: of the parameter, its gradient and its moments."""


def _optimizer_sizes(rng: Random, words: Words) -> Sizes:
    return {"rows": log_uniform(rng, 1, 256), "cols": log_uniform(rng, 2**8, 2**26, 8)}


def _optimizer_bytes(words: Words, sizes: Sizes) -> int:
    return ELEMENT_BYTES[words["dtype"]] * sizes["rows"] * sizes["cols"] * OPTIMIZER_TENSORS[words["op"]]


ROWWISE = ("dtype", "op", DIRECTION, "rows", "cols", "bytes")


SWEPT = ("dtype", "op", DIRECTION, "x_name", "x_value", "config_json")


HALVES = ("fp16", "bf16")


KINDS: Mapping[str, KernelKind] = {
    kind.name: kind
    for kind in (
        KernelKind(
            "gemm", 6, ("dtype", "m", "n", "k", "batch"),
            tuple({"dtype": dtype, **form} for dtype in ("fp32", "tf32", "fp16", "bf16") for form in GEMM_FORMS)
            + (FP8_FORM,) * 3,
            _gemm_sizes, _gemm_bytes, _gemm_flops, labels=("trans_a", "trans_b", "kernel"),
        ),
        KernelKind(
            "attention", 6,
            ("dtype", DIRECTION, "batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "causal"),
            _strata(
                dtype=HALVES, causal=("0", "1"), **{DIRECTION: ("fwd", "bwd")},
                kernel=("torch SDPA flash_attention (FA2)", "torch SDPA cudnn", "torch SDPA efficient"),
            ),
            _attention_sizes, _attention_bytes, _attention_flops, labels=("kernel",),
        ),
        KernelKind(
            "norm", 4, ROWWISE,
            _strata(
                dtype=("fp32", *HALVES), op=("layer_norm", "rms_norm", "softmax"), **{DIRECTION: ("fwd", "bwd")},
                impl=("pytorch",),
            ),
            _matrix_sizes, _rowwise_bytes, labels=("impl",),
        ),
        KernelKind(
            "elementwise", 2, ROWWISE,
            _strata(dtype=("fp32", *HALVES), op=tuple(POINTWISE_INPUTS), **{DIRECTION: ("fwd",)}, impl=("pytorch",)),
            _matrix_sizes, _pointwise_bytes, labels=("impl",),
        ),
        KernelKind(
            "cross_entropy", 2, SWEPT,
            _strata(
                dtype=("fp32", "bf16"), op=("cross_entropy",), **{DIRECTION: ("forward", "backward")},
                impl=("composite",),
            ),
            _logits_sizes, _logits_bytes, labels=("impl",), swept="V",
        ),
        KernelKind(
            "embedding", 2, SWEPT,
            _strata(dtype=("fp32", "bf16"), op=("embedding",), **{DIRECTION: ("forward",)}, impl=("pytorch",))
            + _strata(dtype=("fp32", "bf16"), op=("embedding",), **{DIRECTION: ("backward",)}, impl=("composite",)),
            _embedding_sizes, _embedding_bytes, labels=("impl",), swept="V",
        ),
        KernelKind(
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
        KernelKind(
            "optimizer", 2, ROWWISE,
            _strata(
                dtype=("fp32", "bf16"), op=tuple(OPTIMIZER_TENSORS), **{DIRECTION: ("step",)}, impl=("pytorch fused",)
            ),
            _optimizer_sizes, _optimizer_bytes, labels=("impl",),
        ),
    )
}  # fmt: skip
"""All kinds that are measured, by name.

`impl` is `composite` if PyTorch runs several kernels where a fused implementation runs one. An optimizer's `rows` are
its tensors, its `cols` the elements of each.
"""


def draw_cases(kind: KernelKind, seed: int) -> Iterator[KernelCase]:
    """Yield cases of one kind without end: all its strata per round, shuffled anew each round, with fresh sizes."""
    rng = Random(f"{seed}/{kind.name}")  # noqa: S311 shapes are no secret
    strata = list(kind.strata)
    while True:
        rng.shuffle(strata)
        for words in strata:
            case = KernelCase(kind, words, kind.sizes(rng, words))
            while not case.fits():
                case = KernelCase(kind, words, kind.sizes(rng, words))
            yield case


def plan_cases(names: Sequence[str], seed: int) -> Iterator[KernelCase]:
    """Yield cases of the named kinds without end, interleaved; each kind has its share of every round, evenly spread.

    The cases of a kind do not depend on which other kinds are measured.
    """
    kinds = [KINDS[name] for name in names]
    turns = sorted(((turn + 0.5) / kind.share, kind.name) for kind in kinds for turn in range(kind.share))
    drawn = {kind.name: draw_cases(kind, seed) for kind in kinds}
    while True:
        for _, name in turns:
            yield next(drawn[name])
