"""Readers of measured kernel tables: `read_kernels` finds a table's kind by its columns and turns rows into kernels.

The fitting tool trains on the output of the same readers, so a shape means the same on both sides. A row may become
several kernels (a forward and a backward pass timed together). A row that cannot be expressed gets a reason and no
prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tilecast import untrusted
from tilecast.graph import KernelTable
from tilecast.spec import ELEMENT_BYTES, Floats, SpecError
from tilecast_lab.validate import csvfile, megatron
from tilecast_lab.validate.harness import harness_of, is_hopper
from tilecast_lab.validate.kernel_table import Builder, MeasuredKernels, add_copy_kernels, each_precision


def _gemm(b: Builder) -> None:
    m, n, k, batch = (b.number(name, 1.0) for name in ("m", "n", "k", "batch"))
    accumulated = np.array([text == "True" for text in b.text("accumulate")], float)
    aceso = np.array(["Aceso" in text for text in b.text("source")], bool)
    split = aceso & (batch == 1) & np.isin(n / k, SPLIT_WIDTHS)
    for precision, rows in each_precision(b, {"fp8_block": "fp8"}):
        b.add(rows, "gemm", precision, m=m, n=n, k=k, batch=batch, accumulated=accumulated)
        add_copy_kernels(b, rows & split, precision, m * n)
    b.op = ["gemm accumulating" if added else "gemm" for added in accumulated]
    b.grouped("n", "k")
    # TensorRT-LLM's rows name no kernel, so the dtype says whether the scales are per tensor or per block.
    named = zip(b.text("kernel"), b.text("dtype"), strict=True)
    b.variant = [f"{kernel} {dtype}" if kernel == "torch_flow" else str(kernel) for kernel, dtype in named]
    if b.rows and b.columns.get("source", [""])[0] == "apex_plus":
        b.harness = "apex_plus"
    if aceso.any():
        b.harness = "megatron"


SPLIT_WIDTHS = (3.0, 1.5, 0.75, 0.375)
"""Outputs over inputs of the product that yields queries, keys and values, on 1, 2, 4 and 8 tensor-parallel ranks.

In Aceso's tables its time includes the copy into three tensors.
"""


ATTENTION_DIMS: Mapping[str, tuple[str, ...]] = {
    "batch": ("batch",),
    "heads": ("heads",),
    "kv_heads": ("kv_heads",),
    "seq_q": ("seq_q", "seq"),
    "seq_kv": ("seq_kv", "seq"),
    "head_dim": ("head_dim", "qk_head_dim"),
}
"""Dimensions of attention and the columns that may state each; the first one that a table has is read."""
ATTENTION_GROUP = ("batch", "heads", "seq_q")


def _names(b: Builder, dims: Sequence[str]) -> list[str]:
    """Return the table's columns that state the given dimensions of attention."""
    return [next((name for name in ATTENTION_DIMS[dim] if name in b.columns), dim) for dim in dims]


def _attention(b: Builder) -> None:
    dims = {dim: b.number(name) for dim, name in zip(ATTENTION_DIMS, _names(b, list(ATTENTION_DIMS)), strict=True)}
    dims["causal"] = b.number("causal", 0.0)
    dims["backward"] = (b.text("pass") == "bwd").astype(float)
    width = dims["head_dim"]
    value_dim = b.number("head_dim_v" if "head_dim_v" in b.columns else "v_head_dim")
    # One of the two forward products and two of the five backward products have the width of the values.
    share = np.where(dims["backward"] > 0, 2 / 5, 1 / 2)
    dims["head_dim"] = np.where(np.isfinite(value_dim), width + share * (value_dim - width), width)
    window = b.number("sliding_window", np.inf)
    b.refuse(window < dims["seq_kv"], "sliding-window")
    whole = np.array(["trtllm" in text for text in b.text("kernel")], bool)
    # FlashAttention-3 packs the query heads that share keys into one block, which TensorRT-LLM's kernels do not.
    unpacked = whole & np.array([is_hopper(str(name)) for name in b.text("gpu")], bool)
    dims["kv_heads"] = np.where(unpacked, dims["heads"], dims["kv_heads"])
    for precision, rows in each_precision(b):
        b.add(rows & ~(window < dims["seq_kv"]), "attention", precision, **dims)
    b.op = ["attention backward" if back else "attention" for back in dims["backward"]]
    b.grouped(*_names(b, ATTENTION_GROUP))
    encoder = whole & (dims["causal"] == 0)
    named = zip(b.text("kernel"), encoder, strict=True)
    b.variant = [f"{kernel} encoder" if plain else str(kernel) for kernel, plain in named]


def _rowwise(b: Builder) -> None:
    rows, cols = b.number("rows"), b.number("cols")
    op, backward = b.text("op"), b.text("pass") == "bwd"
    norms = {"rmsnorm": "rmsnorm", "rms_norm": "rmsnorm", "layernorm": "layernorm", "layer_norm": "layernorm"}
    norms |= {"softmax": "softmax"}
    pointwise = {"add": (2, 1), "silu_and_mul": (2, 1), "gelu": (1, 1), "relu": (1, 1), "rope_qk": (1, 1)}
    pointwise |= {"mul": (2, 1), "copy": (1, 1), "sgd": (2, 1), "momentum": (3, 2), "adam": (4, 3), "adamw": (4, 3)}
    b.refuse(~np.isin(op, [*norms, *pointwise]), "unknown-op")
    vidur = np.array(["vidur" in text for text in b.text("source")], bool)
    added_twice = vidur & (op == "add") & (cols == PHI_2_WIDTH)
    for precision, chosen in each_precision(b):
        size = ELEMENT_BYTES[precision]
        for name, kind in norms.items():
            b.add(chosen & (op == name), kind, precision, rows=rows, cols=cols, backward=backward)
        for name, (reads, writes) in pointwise.items():
            moved = {"read_bytes": size * reads, "written_bytes": size * writes}
            b.add(chosen & (op == name), "elementwise", precision, elements=rows * cols, **moved)
        sums = {"read_bytes": 2 * size, "written_bytes": size}
        b.add(chosen & added_twice, "elementwise", precision, elements=rows * cols, **sums)
    b.op = [f"{name} backward" if back else str(name) for name, back in zip(op, backward, strict=True)]
    b.harness = "vidur" if vidur.any() else ""
    b.grouped("rows", "cols")
    b.varied("impl")


PHI_2_WIDTH = 2560.0
"""Width of Phi-2, which adds the outputs of attention and MLP to the residual in two kernels; vidur times both."""


PASSES = {"forward": (0.0,), "backward": (1.0,), "full": (0.0, 1.0)}
"""Values of the kernel dimension `backward` for each pass of the Liger benchmark."""


def _liger(b: Builder) -> None:
    """Add the kernels of a table of the Liger benchmark: `x_value` is the swept size, `config_json` has the others."""
    x = b.number("x_value")
    configs: list[dict[str, float]] = []
    for text in b.text("config_json"):
        try:
            words = untrusted.parse_json(text)
            configs.append({key: float(value) for key, value in words.items() if isinstance(value, int | float)})
        except (ValueError, AttributeError):
            configs.append({})
    for row in range(b.rows):
        name = b.columns["op"][row]
        dtype = b.columns["dtype"][row] or ("bf16" if name.startswith("megatron") else "fp32")
        size, config = x[row], configs[row]
        b.op[row], b.precision[row] = name, dtype
        b.variant[row] = b.columns["impl"][row]
        b.group[row] = f"{name},{size:g}"
        shapes: dict[str, tuple[str, float, float]] = {
            "rms_norm": ("rmsnorm", config.get("M", np.nan), size),
            "layer_norm": ("layernorm", config.get("M", np.nan), size),
            "megatron_rms_norm": ("rmsnorm", config.get("B", np.nan) * config.get("S", np.nan), size),
            "cross_entropy": ("cross_entropy", config.get("B", np.nan) * config.get("T", np.nan), size),
            "megatron_cross_entropy": ("cross_entropy", config.get("B", np.nan) * config.get("S", np.nan), size),
            "embedding": ("embedding", config.get("B", np.nan) * config.get("T", np.nan), config.get("D", np.nan)),
            "relu_squared": ("elementwise", config.get("M", np.nan), size),
        }
        here = np.arange(b.rows) == row
        passes = PASSES.get(b.columns["pass"][row], ())
        if name not in shapes or dtype not in ELEMENT_BYTES or not passes:
            b.refuse(here, "composite-op" if name not in shapes else "unknown-precision")
            continue
        kind, rows, cols = shapes[name]
        for backward in passes:
            if kind == "elementwise":
                reads = ELEMENT_BYTES[dtype] * (2 if backward else 1)
                dims = {"elements": rows * cols, "read_bytes": reads, "written_bytes": ELEMENT_BYTES[dtype]}
            else:
                dims = {"rows": rows, "cols": cols, "backward": backward}
            b.add(here, kind, dtype, **dims)


def _conv_dims(
    b: Builder,
    image: Floats,
    side: tuple[Floats, Floats],
    pad: tuple[Floats, Floats],
    stride: tuple[Floats, Floats],
    kernel: tuple[Floats, Floats],
) -> dict[str, Floats | float]:
    out = [np.floor((s + 2 * p - k) / q) + 1 for s, p, q, k in zip(side, pad, stride, kernel, strict=True)]
    return {
        "batch": image,
        "c_in": b.number("c_in"),
        "c_out": b.number("c_out"),
        "groups": b.number("groups", 1.0),
        "in_d": 1.0,
        "in_h": side[0],
        "in_w": side[1],
        "k_d": 1.0,
        "k_h": kernel[0],
        "k_w": kernel[1],
        "out_d": 1.0,
        "out_h": out[0],
        "out_w": out[1],
    }


def _conv(b: Builder) -> None:
    pairs = [
        tuple(b.number(f"{name}{axis}", default) for axis in axes)
        for name, axes, default in (
            ("", ("h", "w"), np.nan),
            ("pad_", ("h", "w"), 0.0),
            ("stride_", ("h", "w"), 1.0),
            ("k", ("h", "w"), np.nan),
        )
    ]
    dims = _conv_dims(b, b.number("batch"), *pairs)  # type: ignore[arg-type]
    direction = b.text("pass")
    codes = {"fwd": 0.0, "bwd_data": 1.0, "bwd_weight": 2.0}
    b.refuse(~np.isin(direction, list(codes)), "unknown-pass")
    for precision, rows in each_precision(b):
        for name, code in codes.items():
            b.add(rows & (direction == name), "conv", precision, direction=code, **dims)
    b.op = [f"conv {text}" for text in direction]
    b.grouped("batch", "c_in", "h", "w", "c_out", "kh")
    b.varied("fwd_algo")


def _neusight_conv(b: Builder) -> None:
    side, pad, stride, kernel = (b.number(name) for name in ("in_hw", "padding", "stride", "kernel_size"))
    dims = _conv_dims(b, b.number("batch"), (side, side), (pad, pad), (stride, stride), (kernel, kernel))
    b.add(np.ones(b.rows, bool), "conv", "fp32", direction=0.0, **dims)
    b.op, b.precision, b.harness = ["conv fwd"] * b.rows, ["fp32"] * b.rows, "neusight"
    b.grouped("c_in", "c_out")


TWO_INPUTS = ("add", "mul", "div", "pow")
ONE_INPUT = ("addu", "mulu", "divu", "powu", "relu", "gelu", "tanh")


def _neusight(b: Builder) -> None:
    op = b.text("op")
    batch, m, n, k, h = (b.number(name) for name in "bmnkh")
    b.refuse(~np.isin(op, ["bmm", "linear", "ln", "softmax", *TWO_INPUTS, *ONE_INPUT]), "unknown-op")
    b.add(op == "bmm", "gemm", "fp32", batch=batch, m=m, n=n, k=k)
    b.add(op == "linear", "gemm", "fp32", batch=np.where(np.isfinite(batch), batch, 1.0), m=m, n=n, k=k)
    for name, kind in (("ln", "layernorm"), ("softmax", "softmax")):
        b.add(op == name, kind, "fp32", rows=batch, cols=h, backward=0.0)
    for names, read in ((TWO_INPUTS, 8.0), (ONE_INPUT, 4.0)):
        b.add(np.isin(op, names), "elementwise", "fp32", elements=batch * h, read_bytes=read, written_bytes=4.0)
    b.op = [str(name) for name in op]
    b.precision, b.harness = ["fp32"] * b.rows, "neusight"
    b.group = [
        f"{b.columns['n'][i]},{b.columns['k'][i]}" if b.columns["n"][i] else f"{b.columns['b'][i]},{b.columns['h'][i]}"
        for i in range(b.rows)
    ]


def _no_kernels(b: Builder) -> None:
    b.refuse(np.ones(b.rows, bool), "not-a-kernel-table")
    b.op = ["-"] * b.rows


READERS: tuple[tuple[frozenset[str], Callable[[Builder], None]], ...] = (
    (frozenset({"seq_q", "seq_kv", "heads", "head_dim", "latency_us"}), _attention),
    (frozenset({"seq", "heads", "qk_head_dim", "v_head_dim", "latency_us"}), _attention),
    (frozenset({"groups", "stage", "m", "n", "k", "latency_us"}), megatron.grouped),
    (frozenset({"op", "pass", "m", "n", "k", "rows", "cols", "latency_us"}), megatron.operators),
    (frozenset({"kh", "kw", "c_in", "c_out", "latency_us"}), _conv),
    (frozenset({"kernel_size", "in_hw", "latency_us"}), _neusight_conv),
    (frozenset({"op", "b", "m", "n", "k", "h", "latency_us"}), _neusight),
    (frozenset({"op", "x_value", "config_json", "latency_us"}), _liger),
    (frozenset({"op", "rows", "cols", "latency_us"}), _rowwise),
    (frozenset({"m", "n", "k", "latency_us"}), _gemm),
    (frozenset({"gpu"}), _no_kernels),
)
"""Columns that a kind of table must have, and its reader; the first entry that fits is used."""


def read_kernels(path: Path) -> MeasuredKernels:
    """Read a measured table of kernels, plain or gzipped.

    Raises:
        SpecError: the file cannot be read, is not CSV, or has the columns of no known kind of table.
    """
    header, cells = csvfile.read_csv(path)
    reader = next((how for needed, how in READERS if needed <= set(header)), None)
    if reader is None:
        raise SpecError(str(path), "has the columns of no known kernel table", "see docs for the columns of each kind")
    columns = {name: [line[i] for line in cells] for i, name in enumerate(header)}
    b = Builder(columns, len(cells))
    reader(b)
    latency = b.number("latency_us") * 1e-6
    empty = KernelTable.from_dimensions("gemm", "fp32", m=[], n=[], k=[], batch=[])
    table = KernelTable.concatenate(b.tables) if b.tables else empty
    owner = np.concatenate(b.owners) if b.owners else np.zeros(0, np.int64)
    gpu = [str(name) for name in b.text("gpu")]
    moved = np.bincount(owner, table.bytes(), len(cells))
    costs = [harness_of(b.harness, *row) for row in zip(b.op, gpu, b.variant, moved, strict=True)]
    return MeasuredKernels(
        path, header, cells, b.op, b.precision, gpu, latency, costs, b.group, b.variant, b.reason, table, owner
    )
