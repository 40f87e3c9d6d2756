"""Kernel tables: measured durations of single kernels, read, predicted and compared.

`read` tells the kind of a table from its columns and turns every row into kernels of the house; the fitting
tool trains on the same reading, so a shape means the same on both sides. A row may be several kernels (a
forward and a backward pass timed together). A row that cannot be expressed keeps a reason and no prediction.

Some tables were timed on the host, so that their durations hold the harness's own cost, which is no part of
a kernel: `harness` states it per table kind, and it is added before a prediction is compared.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilecast import kernels
from tilecast.graph import KernelTable
from tilecast.hardware import Gpu, find_gpu
from tilecast.spec import PRECISIONS, Floats, Ints, SpecError
from tilecast.validate import Track, csvfile, untracked

Columns = Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class Harness:
    """What a way of measuring adds to a kernel's own time."""

    added_s: float = 0.0
    """Added to every kernel: the events and the launch around it."""
    least_s: float = 0.0
    """The shortest time it can show, as the host or the kernel's code cannot go faster."""
    times: float = 1.0
    """How much slower the kernel that ran is than the one that is priced."""


HARNESS_SPREAD = 0.2
"""Relative half-width of what a harness adds: hosts differ, and so do their moods."""
NEUSIGHT_LEAST_S: Mapping[str, float] = {
    "bmm": 31e-6, "linear": 53e-6, "softmax": 33e-6, "ln": 46e-6, "add": 26e-6, "mul": 26e-6, "div": 26e-6,
    "pow": 26e-6, "addu": 31e-6, "mulu": 31e-6, "divu": 31e-6, "powu": 29e-6, "relu": 31e-6, "gelu": 30e-6,
    "tanh": 25.5e-6,
}  # fmt: skip
"""The shortest durations of NeuSight's tables by op: one eager PyTorch call between two events."""
NEUSIGHT_HOSTS: Mapping[str, float] = {"Tesla P100-PCIE-16GB": 1.65, "Tesla V100-PCIE-32GB": 1.25}
"""How much slower than the others the hosts of two of its GPUs are."""
NEUSIGHT_EXCEPTIONS: Mapping[tuple[str, str], float] = {
    ("Tesla P100-PCIE-16GB", "gelu"): 30e-6, ("Tesla P100-PCIE-16GB", "ln"): 46e-6,
}  # fmt: skip
"""Two ops that were evidently measured on another host."""
NEUSIGHT_ADDED_SHARE = 0.6
"""Share of the shortest duration that remains as an offset once kernels are long, read off its large copies."""
VIDUR_SM_BYTES_PER_CLOCK: Mapping[str, float] = {
    "silu_and_mul": 6.6, "rope_qk": 5.7, "rmsnorm": 4.6, "layernorm": 6.4, "gelu": 8.6,
}  # fmt: skip
"""What one SM streams per clock in the kernels that vidur profiled (vLLM's of 2023 and eager PyTorch's). They load
half-precision words one by one, so that the SMs and not the DRAM bound them where DRAM is fast."""
VIDUR_RAMP_S = 2e-6
HOPPER_FA2_TIMES: Mapping[str, float] = {"attention": 1.9, "attention backward": 1.75}
"""FlashAttention-2 on Hopper against cuDNN's and FlashAttention-3's kernels, which use its asynchronous units and are
what the house prices there: the ratio in cudnn-frontend's own table."""
VLLM_FLASH = "vllm_flash_attn_fa"
VLLM_FLASH_ADDED_S = 1.5e-6
VLLM_FLASH_TIMES = 1.04
"""What aiconfigurator's later runs of vLLM's FlashAttention 2 and 3 take beyond its other flash kernels, for the same
shapes on L40S, H100 and H200."""
VLLM_A100_TIMES = 1.11
"""The same for vLLM's FlashAttention on A100, against SGLang's."""
APEX_LEAST_S = 14e-6
"""apex_plus times a loop of launches, which its host issues every 14 microseconds."""


def harness(kind: str, op: str, gpu: str, variant: str = "", moved_bytes: float = 0.0) -> Harness:
    """What a kind of table adds to an op on a GPU of that name, for a row of that many least bytes."""
    if kind == "neusight":
        usual_s = NEUSIGHT_LEAST_S.get(op, 0.0) * NEUSIGHT_HOSTS.get(gpu, 1.0)
        least_s = NEUSIGHT_EXCEPTIONS.get((gpu, op), usual_s)
        return Harness(NEUSIGHT_ADDED_SHARE * least_s, least_s)
    if kind == "vidur" and op in VIDUR_SM_BYTES_PER_CLOCK and (known := gpu_of(gpu)):
        rate = known.sm_count * known.boost_clock_hz * VIDUR_SM_BYTES_PER_CLOCK[op]
        return Harness(least_s=VIDUR_RAMP_S + moved_bytes / rate)
    if VLLM_FLASH in variant:
        return Harness(VLLM_FLASH_ADDED_S, times=VLLM_FLASH_TIMES)
    if variant == "vllm:vllm_flash_attn" and (known := gpu_of(gpu)) and known.architecture == "ampere":
        return Harness(times=VLLM_A100_TIMES)
    if "FA2" in variant and (known := gpu_of(gpu)) and known.architecture == "hopper":
        return Harness(times=HOPPER_FA2_TIMES.get(op, 1.0))
    return Harness(least_s=APEX_LEAST_S) if kind == "apex_plus" else Harness()


@dataclass(frozen=True, slots=True)
class Table:
    """A measured table of R rows as K kernels; kernel `i` belongs to row `owner[i]`.

    `group` names the held-out unit of a row ("n,k" of a GEMM; batch, heads and queries of attention).
    """

    path: Path
    header: list[str]
    cells: list[list[str]]
    op: list[str]
    precision: list[str]
    gpu: list[str]
    latency_s: Floats
    harness: list[Harness]
    group: list[str]
    variant: list[str]
    reason: list[str]
    kernels: KernelTable
    owner: Ints

    def __len__(self) -> int:
        return len(self.cells)

    def fold(self) -> Ints:
        """The fold of five that each row's group falls into, shape (R,)."""
        return np.array([zlib.crc32(text.encode()) % 5 for text in self.group], np.int64)


@dataclass(slots=True)
class _Builder:
    """Rows of a table while they are read."""

    columns: Columns
    rows: int
    op: list[str] = field(default_factory=list)
    precision: list[str] = field(default_factory=list)
    group: list[str] = field(default_factory=list)
    variant: list[str] = field(default_factory=list)
    harness: str = ""
    reason: list[str] = field(default_factory=list)
    tables: list[KernelTable] = field(default_factory=list)
    owners: list[Ints] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reason = [""] * self.rows
        self.op = [""] * self.rows
        self.precision = [""] * self.rows
        self.group = [""] * self.rows
        self.variant = [""] * self.rows

    def number(self, name: str, default: float = np.nan) -> Floats:
        """A column as numbers; what is none becomes NaN, an empty cell the default."""

        def read(text: str) -> float:
            try:
                return float(text) if text else default
            except ValueError:
                return np.nan

        if name not in self.columns:
            return np.full(self.rows, default)
        return np.array([read(text) for text in self.columns[name]])

    def text(self, name: str) -> np.ndarray:
        """A column as strings, empty where it is absent."""
        return np.array(self.columns.get(name, [""] * self.rows), dtype=object)

    def refuse(self, rows: np.ndarray, reason: str) -> None:
        """Give those rows a reason, unless they have one."""
        for row in np.flatnonzero(rows):
            self.reason[row] = self.reason[row] or reason

    def add(self, chosen_rows: np.ndarray, kind: str, precision: str, /, **dims: npt.ArrayLike) -> None:
        """Kernels for those rows (a mask), whose dimensions are whole columns."""
        chosen = {
            name: np.broadcast_to(np.asarray(value, float), self.rows)[chosen_rows] for name, value in dims.items()
        }
        sound = np.ones(int(chosen_rows.sum()), bool)
        for name, column in chosen.items():
            low = 0.0 if name in kernels.FLAGS else 1.0
            sound &= np.isfinite(column) & (column >= low) & (column <= kernels.LARGEST)
        where = np.flatnonzero(chosen_rows)
        self.refuse(np.isin(np.arange(self.rows), where[~sound]), "bad-number")
        if sound.any():
            self.tables.append(KernelTable.of(kind, precision, **{name: c[sound] for name, c in chosen.items()}))
            self.owners.append(where[sound])


def _each_precision(b: _Builder, aliases: Mapping[str, str] | None = None) -> list[tuple[str, np.ndarray]]:
    """(precision, mask of its rows); rows of another dtype are refused."""
    text = b.text("dtype")
    named = np.array([(aliases or {}).get(value, value) for value in text], dtype=object)
    b.precision = [str(value) for value in named]
    b.refuse(~np.isin(named, PRECISIONS), "unknown-precision")
    return [(name, named == name) for name in PRECISIONS if (named == name).any()]


def _gemm(b: _Builder) -> None:
    m, n, k, batch = (b.number(name, 1.0) for name in ("m", "n", "k", "batch"))
    for precision, rows in _each_precision(b, {"fp8_block": "fp8"}):
        b.add(rows, "gemm", precision, m=m, n=n, k=k, batch=batch)
    b.op = ["gemm"] * b.rows
    b.group = [f"{x},{y}" for x, y in zip(b.text("n"), b.text("k"), strict=True)]
    b.variant = [str(text) for text in b.text("kernel")]
    if b.rows and b.columns.get("source", [""])[0] == "apex_plus":
        b.harness = "apex_plus"


def _attention(b: _Builder) -> None:
    names = ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim")
    dims = {name: b.number(name) for name in names}
    value_dim = b.number("head_dim_v")
    dims["head_dim"] = np.where(np.isfinite(value_dim), (dims["head_dim"] + value_dim) / 2, dims["head_dim"])
    dims["causal"] = b.number("causal", 0.0)
    dims["backward"] = (b.text("pass") == "bwd").astype(float)
    window = b.number("sliding_window", np.inf)
    b.refuse(window < dims["seq_kv"], "sliding-window")
    for precision, rows in _each_precision(b):
        b.add(rows & ~(window < dims["seq_kv"]), "attention", precision, **dims)
    b.op = ["attention backward" if back else "attention" for back in dims["backward"]]
    b.group = [",".join(cells) for cells in zip(b.text("batch"), b.text("heads"), b.text("seq_q"), strict=True)]
    b.variant = [str(text) for text in b.text("kernel")]


def _rowwise(b: _Builder) -> None:
    rows, cols = b.number("rows"), b.number("cols")
    op, backward = b.text("op"), b.text("pass") == "bwd"
    norms = {"rmsnorm": "rmsnorm", "rms_norm": "rmsnorm", "layernorm": "layernorm", "layer_norm": "layernorm"}
    norms |= {"softmax": "softmax"}
    pointwise = {"add": (2, 1), "silu_and_mul": (2, 1), "gelu": (1, 1), "relu": (1, 1), "rope_qk": (1, 1)}
    pointwise |= {"mul": (2, 1), "copy": (1, 1), "sgd": (2, 1), "momentum": (3, 2), "adam": (4, 3), "adamw": (4, 3)}
    b.refuse(~np.isin(op, [*norms, *pointwise]), "unknown-op")
    for precision, chosen in _each_precision(b):
        size = ELEMENT[precision]
        for name, kind in norms.items():
            b.add(chosen & (op == name), kind, precision, rows=rows, cols=cols, backward=backward.astype(float))
        for name, (reads, writes) in pointwise.items():
            here = chosen & (op == name)
            b.add(
                here,
                "elementwise",
                precision,
                elements=rows * cols,
                read_bytes=size * reads,
                written_bytes=size * writes,
            )
    b.op = [f"{name} backward" if back else str(name) for name, back in zip(op, backward, strict=True)]
    b.harness = "vidur" if "vidur" in b.text("source") else ""
    b.group = [",".join(cells) for cells in zip(b.text("rows"), b.text("cols"), strict=True)]
    b.variant = [str(text) for text in b.text("impl")]


ELEMENT = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
PASSES = {"forward": (0.0,), "backward": (1.0,), "full": (0.0, 1.0)}


def _liger(b: _Builder) -> None:
    """One row of the Liger benchmark: the swept size is `x_value`, the rest stands in `config_json`."""
    x = b.number("x_value")
    configs: list[dict[str, float]] = []
    for text in b.text("config_json"):
        try:
            found = json.loads(text)
            configs.append({key: float(value) for key, value in found.items() if isinstance(value, int | float)})
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
        if name not in shapes or dtype not in ELEMENT or not passes:
            b.refuse(here, "composite-op" if name not in shapes else "unknown-precision")
            continue
        kind, rows, cols = shapes[name]
        for backward in passes:
            if kind == "elementwise":
                reads = ELEMENT[dtype] * (2 if backward else 1)
                wanted = {"elements": rows * cols, "read_bytes": reads, "written_bytes": ELEMENT[dtype]}
            else:
                wanted = {"rows": rows, "cols": cols, "backward": backward}
            b.add(here, kind, dtype, **{dim: np.full(b.rows, value) for dim, value in wanted.items()})


def _conv_dims(
    b: _Builder,
    image: Floats,
    side: tuple[Floats, Floats],
    pad: tuple[Floats, Floats],
    stride: tuple[Floats, Floats],
    kernel: tuple[Floats, Floats],
) -> dict[str, Floats]:
    one = np.ones(b.rows)
    out = [np.floor((s + 2 * p - k) / q) + 1 for s, p, q, k in zip(side, pad, stride, kernel, strict=True)]
    return {
        "batch": image,
        "c_in": b.number("c_in"),
        "c_out": b.number("c_out"),
        "groups": b.number("groups", 1.0),
        "in_d": one,
        "in_h": side[0],
        "in_w": side[1],
        "k_d": one,
        "k_h": kernel[0],
        "k_w": kernel[1],
        "out_d": one,
        "out_h": out[0],
        "out_w": out[1],
    }


def _conv(b: _Builder) -> None:
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
    for precision, rows in _each_precision(b):
        for name, code in codes.items():
            b.add(rows & (direction == name), "conv", precision, direction=np.full(b.rows, code), **dims)
    b.op = [f"conv {text}" for text in direction]
    b.group = [
        ",".join(cells)
        for cells in zip(*(b.text(name) for name in ("batch", "c_in", "h", "w", "c_out", "kh")), strict=True)
    ]
    b.variant = [str(text) for text in b.text("fwd_algo")]


def _neusight_conv(b: _Builder) -> None:
    side, pad, stride, kernel = (b.number(name) for name in ("in_hw", "padding", "stride", "kernel_size"))
    dims = _conv_dims(b, b.number("batch"), (side, side), (pad, pad), (stride, stride), (kernel, kernel))
    b.add(np.ones(b.rows, bool), "conv", "fp32", direction=np.zeros(b.rows), **dims)
    b.op, b.precision, b.harness = ["conv fwd"] * b.rows, ["fp32"] * b.rows, "neusight"
    b.group = [",".join(cells) for cells in zip(b.text("c_in"), b.text("c_out"), strict=True)]


TWO_INPUTS = ("add", "mul", "div", "pow")
ONE_INPUT = ("addu", "mulu", "divu", "powu", "relu", "gelu", "tanh")


def _neusight(b: _Builder) -> None:
    op = b.text("op")
    batch, m, n, k, h = (b.number(name) for name in "bmnkh")
    b.refuse(~np.isin(op, ["bmm", "linear", "ln", "softmax", *TWO_INPUTS, *ONE_INPUT]), "unknown-op")
    b.add(op == "bmm", "gemm", "fp32", batch=batch, m=m, n=n, k=k)
    b.add(op == "linear", "gemm", "fp32", batch=np.where(np.isfinite(batch), batch, 1.0), m=m, n=n, k=k)
    for name, kind in (("ln", "layernorm"), ("softmax", "softmax")):
        b.add(op == name, kind, "fp32", rows=batch, cols=h, backward=np.zeros(b.rows))
    for names, read in ((TWO_INPUTS, 8.0), (ONE_INPUT, 4.0)):
        elements = batch * h
        b.add(
            np.isin(op, names),
            "elementwise",
            "fp32",
            elements=elements,
            read_bytes=np.full(b.rows, read),
            written_bytes=np.full(b.rows, 4.0),
        )
    b.op = [str(name) for name in op]
    b.precision, b.harness = ["fp32"] * b.rows, "neusight"
    b.group = [
        f"{b.columns['n'][i]},{b.columns['k'][i]}" if b.columns["n"][i] else f"{b.columns['b'][i]},{b.columns['h'][i]}"
        for i in range(b.rows)
    ]


def _no_kernels(b: _Builder) -> None:
    b.refuse(np.ones(b.rows, bool), "not-a-kernel-table")
    b.op = ["-"] * b.rows


READERS: tuple[tuple[frozenset[str], Callable[[_Builder], None]], ...] = (
    (frozenset({"seq_q", "seq_kv", "heads", "head_dim", "latency_us"}), _attention),
    (frozenset({"kh", "kw", "c_in", "c_out", "latency_us"}), _conv),
    (frozenset({"kernel_size", "in_hw", "latency_us"}), _neusight_conv),
    (frozenset({"op", "b", "m", "n", "k", "h", "latency_us"}), _neusight),
    (frozenset({"op", "x_value", "config_json", "latency_us"}), _liger),
    (frozenset({"op", "rows", "cols", "latency_us"}), _rowwise),
    (frozenset({"m", "n", "k", "latency_us"}), _gemm),
    (frozenset({"gpu"}), _no_kernels),
)
"""Columns that a kind of table must have, and its reader; the first that fits is taken."""


def read(path: Path) -> Table:
    """A measured table, plain or gzipped.

    Raises:
        SpecError: the file cannot be read, is not CSV, or has the columns of no known kind of table.
    """
    header, cells = csvfile.read(path)
    reader = next((how for needed, how in READERS if needed <= set(header)), None)
    if reader is None:
        raise SpecError(str(path), "has the columns of no known kernel table", "see docs for the columns of each kind")
    columns = {name: [line[i] for line in cells] for i, name in enumerate(header)}
    b = _Builder(columns, len(cells))
    reader(b)
    latency = b.number("latency_us") * 1e-6
    empty = KernelTable.of("gemm", "fp32", m=[], n=[], k=[], batch=[])
    table = KernelTable.concatenate(b.tables) if b.tables else empty
    owner = np.concatenate(b.owners) if b.owners else np.zeros(0, np.int64)
    gpu = [str(name) for name in b.text("gpu")]
    moved = np.bincount(owner, table.bytes(), len(cells))
    costs = [harness(b.harness, *row) for row in zip(b.op, gpu, b.variant, moved, strict=True)]
    return Table(
        path, header, cells, b.op, b.precision, gpu, latency, costs, b.group, b.variant, b.reason, table, owner
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictions for the R rows of a table; NaN where `reason` says why. All columns (R,), seconds."""

    seconds: Floats
    lower: Floats
    upper: Floats
    roofline: Floats
    reason: list[str]


def predict(table: Table, model: Path | None = None) -> Prediction:
    """Price every row that can be expressed, GPU by GPU, and add what its harness adds.

    Raises:
        SpecError: the model file is damaged.
    """
    kernels.model_info(model)
    total, spread, roofline = np.zeros((3, len(table)))
    reason = list(table.reason)
    names = np.array(table.gpu, dtype=object)
    for name in dict.fromkeys(table.gpu):
        rows = np.flatnonzero(names == name)
        try:
            gpu = find_gpu(name)
        except SpecError:
            for row in rows:
                reason[row] = reason[row] or "unknown-gpu"
            continue
        mine = np.flatnonzero(names[table.owner] == name)
        able = np.array([gpu.supports(precision) for precision in PRECISIONS])[table.kernels.precision[mine]]
        for row in table.owner[mine[~able]]:
            reason[row] = reason[row] or "no-such-precision"
        mine = mine[able]
        if len(mine):
            part = _take(table.kernels, mine)
            distinct, inverse = part.distinct()
            times = kernels.seconds(distinct, gpu, model=model)
            np.add.at(total, table.owner[mine], times.seconds[inverse])
            np.add.at(spread, table.owner[mine], (times.seconds * times.spread)[inverse])
            np.add.at(roofline, table.owner[mine], times.roofline_s[inverse])
    blank = np.array([bool(text) for text in reason]) | (total == 0)
    added = np.array([cost.added_s for cost in table.harness])
    least = np.array([cost.least_s for cost in table.harness])
    slower = np.array([cost.times for cost in table.harness])
    predicted = np.maximum(total * slower + added, least)
    spread = spread * slower + HARNESS_SPREAD * (predicted - total * slower)
    nothing = np.where(blank, np.nan, 0.0)
    return Prediction(
        predicted + nothing,
        predicted**2 / np.maximum(predicted + spread, np.finfo(float).tiny) + nothing,
        predicted + spread + nothing,
        roofline + nothing,
        [text or ("not-expressible" if empty else "") for text, empty in zip(reason, blank, strict=True)],
    )


def _take(table: KernelTable, rows: Ints) -> KernelTable:
    return KernelTable(table.kind[rows], table.precision[rows], table.dims[rows])


def gpu_of(name: str) -> Gpu | None:
    """The GPU of that name, or None where nobody knows it."""
    try:
        return find_gpu(name)
    except SpecError:
        return None


NEUSIGHT_OPS = {"bmm": "bmm", "linear": "linear", "softmax": "softmax", "ln": "ln"}
NEUSIGHT_ERRORS = {
    "bmm": (0.260, 0.138),
    "linear": (0.200, 0.139),
    "elementwise": (0.140, 0.193),
    "softmax": (0.193, 0.139),
    "ln": (0.201, 0.567),
}
"""NeuSight's own mean absolute errors per op, in and out of distribution (Lee et al., ASPLOS 2025)."""


def run(files: Sequence[Path], rows: Path | None, model: Path | None, track: Track = untracked) -> str:
    """Predict kernel tables, write a row for each of theirs where `rows` says, and summarise the errors.

    Args:
        files: measured tables of any known kind, plain or gzipped.
        rows: CSV to write: the columns of the input in its order, plus `predicted_us`, `lower_us`,
            `upper_us` and `reason`. Several inputs share the union of their columns.
        model: a file written by `tilecast_fit`; None takes the one that ships.
        track: sees the tables.

    Returns:
        A table of mean absolute errors by op, precision and GPU, beside the roofline's.

    Raises:
        SpecError: a file cannot be read, is no known table, or the model is damaged.
    """
    tables = [read(path) for path in files]
    predictions = [predict(table, model) for table in track(tables, "tables of kernels")]
    if rows is not None:
        forecasts = ((p.seconds, p.lower, p.upper, p.reason) for p in predictions)
        csvfile.write(rows, ((t.header, t.cells, f) for t, f in zip(tables, forecasts, strict=True)))
    return _summary(tables, predictions, model)


def _summary(tables: Sequence[Table], predictions: Sequence[Prediction], model: Path | None) -> str:
    cells: dict[tuple[str, str, str], list[Floats]] = {}
    reasons: dict[str, int] = {}
    for table, p in zip(tables, predictions, strict=True):
        scored = np.isfinite(p.seconds) & np.isfinite(table.latency_s) & (table.latency_s > 0)
        inside = (p.lower <= table.latency_s) & (table.latency_s <= p.upper)
        measured = np.where(scored, table.latency_s, 1.0)
        error, plain = np.abs(p.seconds / measured - 1), np.abs(p.roofline / measured - 1)
        for i in np.flatnonzero(scored):
            values = np.array([error[i], plain[i], inside[i]])
            cells.setdefault((table.op[i], table.precision[i], table.gpu[i]), []).append(values)
        for text in p.reason:
            reasons[text] = reasons.get(text, 0) + 1
    version, digest = kernels.model_info(model)
    lines = [f"utilization model {version} ({digest[:12]})", ""]
    lines.append(
        f"{'op':<20}{'precision':<11}{'GPU':<30}{'rows':>8}{'error':>9}{'roofline':>10}{'in 90 %':>9}  NeuSight"
    )
    for key in sorted(cells):
        mean = np.mean(cells[key], axis=0)
        family = key[0] if key[0] in NEUSIGHT_OPS else "elementwise" if key[0] in TWO_INPUTS + ONE_INPUT else ""
        theirs = NEUSIGHT_ERRORS.get(family) if key[1] == "fp32" else None
        note = f"  {theirs[0]:.1%} / {theirs[1]:.1%}" if theirs else ""
        lines.append(
            f"{key[0]:<20}{key[1]:<11}{key[2]:<30}{len(cells[key]):>8}{mean[0]:>9.1%}{mean[1]:>10.1%}{mean[2]:>9.1%}{note}"
        )
    empty = {text: count for text, count in sorted(reasons.items()) if text}
    lines += ["", "NeuSight's published errors: in distribution / out of distribution."] if cells else [""]
    if empty:
        lines.append("not predicted: " + ", ".join(f"{text} {count}" for text, count in empty.items()))
    return "\n".join(lines)
