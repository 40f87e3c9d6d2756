"""Operators that one rank runs, with FLOPs and bytes that follow from their shapes.

A model is a short list of blocks (embedding, layer, head …), each of which repeats. A block has operators. Every
dimension of an operator is a column over the distinct shards of the plan table, (S,), so that one graph describes
thousands of plans.

`KINDS` lists all kinds of kernels with the names of their dimensions and the formulas of their FLOPs and bytes.
`tilecast.kernels` forecasts the seconds of a `KernelTable` of any kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from tilecast.recomputation import BY_CODE, MODULES
from tilecast.spec import ELEMENT_BYTES, PRECISIONS, ExpertDispatch, Floats, Ints, PassName, SearchTooLargeError

Phase = Literal["forward", "backward"]
Dims: TypeAlias = Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of kernel, with the names of its dimensions and the formulas of its FLOPs and DRAM bytes.

    `flops(dims)` counts a multiply-add as two. `bytes(dims, element)` is the least DRAM traffic: every input is read
    once and every output written once; `element` is the bytes of one element, shape (n,). `optional` dimensions are
    zero where a table does not state them.
    """

    name: str
    dims: tuple[str, ...]
    flops: Callable[[Dims], Floats]
    bytes: Callable[[Dims, Floats], Floats]
    optional: tuple[str, ...] = ()


def _attention_flops(dims: Dims) -> Floats:
    # Two products of 2·s_q·s_kv·head_dim each forward, five backward (FlashAttention-2, arXiv 2307.08691, sec. 3).
    # With a causal mask the queries, last of the sequence, see their own prefixes: on average s_kv - (s_q - 1) / 2
    # keys.
    queries = np.minimum(dims["seq_q"], dims["seq_kv"])
    visible = np.where(dims["causal"] > 0, dims["seq_kv"] - (queries - 1) / 2, dims["seq_kv"])
    forward = 4.0 * dims["batch"] * dims["heads"] * dims["seq_q"] * visible * dims["head_dim"]
    return np.where(dims["backward"] > 0, 2.5 * forward, forward)


def _attention_bytes(dims: Dims, element: Floats) -> Floats:
    query = dims["batch"] * dims["heads"] * dims["seq_q"] * dims["head_dim"]
    key = dims["batch"] * dims["kv_heads"] * dims["seq_kv"] * dims["head_dim"]
    statistics = 4.0 * dims["batch"] * dims["heads"] * dims["seq_q"]
    forward = element * (2 * query + 2 * key) + statistics
    return np.where(dims["backward"] > 0, element * (5 * query + 4 * key) + 2 * statistics, forward)


def gemm_output_bytes(dims: Dims, element: Floats | float) -> Floats:
    """Return the bytes of DRAM traffic of one output of each matrix product, (n,).

    An output is written once; where it is added to an FP32 buffer, it is read and written. The 16 bits that an FP8
    product writes count as one byte, like its operands, and so do the bytes of such a buffer. The same holds for MXFP8
    and NVFP4.
    """
    written = np.where(np.asarray(element) < 2.0, 1.0, element)
    return np.asarray(np.where(dims["accumulated"] > 0, np.minimum(8.0, 4.0 * written), written))


def _gemm_bytes(dims: Dims, element: Floats) -> Floats:
    inputs = element * (dims["m"] * dims["k"] + dims["k"] * dims["n"])
    return dims["batch"] * (inputs + gemm_output_bytes(dims, element) * dims["m"] * dims["n"])


def _conv_flops(dims: Dims) -> Floats:
    outputs = dims["batch"] * dims["c_out"] * dims["out_d"] * dims["out_h"] * dims["out_w"]
    return 2.0 * outputs * dims["c_in"] / dims["groups"] * dims["k_d"] * dims["k_h"] * dims["k_w"]


def _conv_bytes(dims: Dims, element: Floats) -> Floats:
    inputs = dims["batch"] * dims["c_in"] * dims["in_d"] * dims["in_h"] * dims["in_w"]
    outputs = dims["batch"] * dims["c_out"] * dims["out_d"] * dims["out_h"] * dims["out_w"]
    weights = dims["c_out"] * dims["c_in"] / dims["groups"] * dims["k_d"] * dims["k_h"] * dims["k_w"]
    return element * (inputs + outputs + weights)


_CONV = (
    "batch", "c_in", "c_out", "in_d", "in_h", "in_w", "k_d", "k_h", "k_w", "out_d", "out_h", "out_w", "groups",
    "direction",
)  # fmt: skip


def _row_kind(name: str, forward_flops: float, backward_flops: float, forward: float, backward: float) -> Kind:
    """Return the kind of a reduction along rows.

    Args:
        name: name of the kind.
        forward_flops: FLOPs per element of the forward pass.
        backward_flops: FLOPs per element of the backward pass.
        forward: elements read and written per element in the forward pass.
        backward: elements read and written per element in the backward pass.
    """

    def flops(dims: Dims) -> Floats:
        return dims["rows"] * dims["cols"] * np.where(dims["backward"] > 0, backward_flops, forward_flops)

    def moved(dims: Dims, element: Floats) -> Floats:
        return element * dims["rows"] * dims["cols"] * np.where(dims["backward"] > 0, backward, forward)

    return Kind(name, ("rows", "cols", "backward"), flops, moved)


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "gemm",
            ("batch", "m", "n", "k", "accumulated"),
            lambda dims: 2.0 * dims["batch"] * dims["m"] * dims["n"] * dims["k"],
            _gemm_bytes,
            optional=("accumulated",),
        ),
        Kind(
            "attention",
            ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "causal", "backward"),
            _attention_flops,
            _attention_bytes,
        ),
        Kind("conv", _CONV, _conv_flops, _conv_bytes),
        _row_kind("softmax", 5.0, 4.0, 2.0, 3.0),
        _row_kind("layernorm", 8.0, 14.0, 2.0, 3.0),
        _row_kind("rmsnorm", 4.0, 10.0, 2.0, 3.0),
        _row_kind("cross_entropy", 5.0, 3.0, 1.0, 2.0),
        Kind(
            "embedding",
            ("rows", "cols", "backward"),
            lambda dims: dims["rows"] * dims["cols"] * np.where(dims["backward"] > 0, 1.0, 0.0),
            lambda dims, element: (
                dims["rows"] * (8.0 + element * dims["cols"] * np.where(dims["backward"] > 0, 3.0, 2.0))
            ),
        ),
        Kind(
            "elementwise",
            ("elements", "read_bytes", "written_bytes", "drawn"),
            lambda dims: dims["elements"],
            lambda dims, element: dims["elements"] * (dims["read_bytes"] + dims["written_bytes"]),
            optional=("drawn",),
        ),
        Kind("direct_conv", _CONV, _conv_flops, _conv_bytes),
    )
}
"""Every kind of kernel. A `gemm` with a `batch` is a batched product or the grouped product of experts; where
`accumulated` is 1 it adds to an FP32 output, as the gradient of a weight does over micro-batches. `conv.direction` is 0
forward, 1 gradient of the input, 2 gradient of the weight; `direct_conv` is a grouped convolution that a library has
only for the CUDA cores. `read_bytes` and `written_bytes` of `elementwise` are per element, so mixed dtypes and byte
masks are exact, and where `drawn` is 1 each element takes a random number (dropout). `attention` is a fused (flash)
kernel; unfused attention is two batched `gemm` and a `softmax`."""

KIND_NAMES: tuple[str, ...] = tuple(KINDS)
WIDTH = max(len(kind.dims) for kind in KINDS.values())
"""Columns of a kernel table: the most dimensions that any kind has."""


@dataclass(frozen=True, slots=True)
class KernelTable:
    """N kernels of any kinds.

    `kind` indexes `KIND_NAMES` and `precision` indexes `PRECISIONS`, both (N,). `dims` is (N, WIDTH), in the order of
    each kind's `dims`, with zeros in unused columns.
    """

    kind: npt.NDArray[np.int8]
    precision: npt.NDArray[np.int8]
    dims: Floats

    def __len__(self) -> int:
        return len(self.kind)

    def groups(self) -> Sequence[tuple[Kind, npt.NDArray[np.intp], Dims]]:
        """Return every kind in the table with its rows, and the dimensions of these rows by name."""
        groups = []
        for code, name in enumerate(KIND_NAMES):
            rows = np.flatnonzero(self.kind == code)
            if len(rows):
                names = KINDS[name].dims
                part = self.dims[rows]
                groups.append((KINDS[name], rows, {dim: part[:, i] for i, dim in enumerate(names)}))
        return groups

    @property
    def element_bytes(self) -> Floats:
        """Bytes of one element of each kernel, shape (N,)."""
        return np.array([ELEMENT_BYTES[name] for name in PRECISIONS])[self.precision]

    def flops(self) -> Floats:
        """Return the floating-point operations of each kernel, shape (N,)."""
        result = np.zeros(len(self))
        for kind, rows, dims in self.groups():
            result[rows] = kind.flops(dims)
        return result

    def bytes(self) -> Floats:
        """Return the least DRAM traffic of each kernel in bytes, shape (N,)."""
        result = np.zeros(len(self))
        for kind, rows, dims in self.groups():
            result[rows] = kind.bytes(dims, self.element_bytes[rows])
        return result

    @classmethod
    def of(cls, kind: str, precision: str, **dims: npt.ArrayLike) -> KernelTable:
        """Return kernels of one kind and precision; the dimensions broadcast against each other.

        Raises:
            KeyError: a dimension is missing, or unknown to the kind.
        """
        names = KINDS[kind].dims
        dims = dict.fromkeys(KINDS[kind].optional, 0.0) | dims
        if unknown := set(dims) - set(names):
            raise KeyError(f"{kind} has no dimension {sorted(unknown)}")
        columns = [np.asarray(dims[name], float) for name in names]
        lengths = {column.size for column in columns if column.ndim} - {1}
        table = np.zeros((lengths.pop() if lengths else 1, WIDTH))
        for place, column in enumerate(columns):
            table[:, place] = column
        code = np.full(len(table), KIND_NAMES.index(kind), np.int8)
        return cls(code, np.full(len(table), PRECISIONS.index(precision), np.int8), table)

    @classmethod
    def concatenate(cls, tables: Sequence[KernelTable]) -> KernelTable:
        """Return all kernels of all tables, in order."""
        return cls(
            np.concatenate([table.kind for table in tables]),
            np.concatenate([table.precision for table in tables]),
            np.concatenate([table.dims for table in tables]),
        )

    def distinct(self) -> tuple[KernelTable, npt.NDArray[np.intp]]:
        """Return the distinct kernels, and for each row of this table the index of its distinct kernel, (N,)."""
        width = max(len(KINDS[KIND_NAMES[code]].dims) for code in np.flatnonzero(np.bincount(self.kind)))
        key = np.column_stack([self.kind * float(len(PRECISIONS)) + self.precision, self.dims[:, :width] + 0.0])
        # Equal rows are found by a hash of their bits and then compared, since numbers sort faster than rows.
        hashes = np.concatenate([_hash_rows(key[start : start + _CHUNK]) for start in range(0, len(key), _CHUNK)])
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        if not np.array_equal(key[first[inverse]], key):
            _, first, inverse = np.unique(key, axis=0, return_index=True, return_inverse=True)
        return self.take(first), inverse.ravel()

    def take(self, rows: npt.NDArray[np.intp]) -> KernelTable:
        """Return the chosen rows, in the given order."""
        return KernelTable(self.kind[rows], self.precision[rows], self.dims[rows])


def _hash_rows(rows: Floats) -> npt.NDArray[np.uint64]:
    """Return a hash of each row, (N,). Equal rows have equal hashes."""
    bits = rows.view(np.uint64)
    mixed = (bits ^ (bits >> np.uint64(29))) * _MIX[: rows.shape[1]]
    hashes: npt.NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(32))).sum(axis=1)
    return hashes


_MIX = np.random.default_rng(0).integers(1, 1 << 63, WIDTH + 1, dtype=np.uint64) | np.uint64(1)
"""Odd numbers that spread the bits of a kernel's dimensions."""
_CHUNK = 1 << 12
"""Rows that are hashed at once: their bits stay in the processor's second-level cache."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operator of a block on one rank. Its `table` of kernels has one row per shard, (S,)."""

    name: str
    table: KernelTable
    phase: Phase = "forward"
    count: float = 1.0
    """Number of times that one repetition of the block runs the operator."""
    launches: Floats | float = 1.0
    """CUDA kernels that an eager framework launches for the operator, (S,) or one number."""
    selective: bool = False
    """Whether selective recomputation repeats the operator in the backward pass, as it does the core of attention."""
    unless: PassName | None = None
    """Fusion pass that removes the operator."""
    only: PassName | None = None
    """Fusion pass that adds the operator."""
    host_paced: bool = False
    """Whether the host reads results of the GPU between the kernels, as where boxes are matched. The GPU then waits for
    every launch: the operator takes no less than its launches do, and no other kernel hides them."""


# The largest published model, the U-Net of Stable Diffusion XL, has 4,851.
MOST_OPERATORS = 12_000
"""Most distinct operators of a model, where layers that repeat count once."""


def require_few_operators(count: int) -> None:
    """Raise SearchTooLargeError if a model has more than `MOST_OPERATORS` distinct operators."""
    if count > MOST_OPERATORS:
        remedy = "name a model with fewer layers, or lower the depths in its config"
        raise SearchTooLargeError.from_counts(
            "spec.model", count, MOST_OPERATORS, "distinct operators of the model", remedy
        )


class OperatorList(list[Op]):
    """List of operators that raises SearchTooLargeError when more than `MOST_OPERATORS` are added."""

    def __iadd__(self, more: Iterable[Op]) -> Self:  # type: ignore[override,misc]  # `+` makes a list without a limit
        super().__iadd__(more)
        require_few_operators(len(self))
        return self


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective inside a block. `size_bytes` is the whole buffer of one rank, as nccl-tests counts it, (S,)."""

    name: str
    collective: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
    group: Literal["tensor", "context", "expert"]
    size_bytes: Floats
    phase: Phase = "forward"
    count: float = 1.0
    fanout: float = 1.0
    """Number of ranks that one item of an all-to-all goes to, such as the experts of a token."""
    groups: float = 1.0
    """Number of equal groups of neighbouring ranks that the router chooses from."""
    top_groups: float = 1.0
    """Number of these groups that one item may go to (node-limited routing)."""
    dispatch: ExpertDispatch = "allToAll"
    """How an all-to-all of tokens runs."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the model that repeats; all columns are per repetition and per rank, (S,).

    `activation_bytes` are the bytes of one micro-batch that stay from the forward to the backward pass, for each
    recomputation mode of `spec.CHECKPOINTING`, (3, S).
    """

    name: str
    repeat: int
    ops: tuple[Op, ...]
    parameters: Floats
    activation_bytes: Floats
    collectives: tuple[CollectiveCall, ...] = ()
    expert_parameters: Floats = field(default_factory=lambda: np.zeros(1))
    """Parameters among `parameters` that expert parallelism spreads over ranks."""
    working_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """Scratch memory that exists only while the block runs, such as logits and unfused scores."""
    copied_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes of the largest weight whose copy in another type exists only during its matrix product, (S,)."""
    workspace_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes that a library allocates while one of its kernels runs, (S,)."""
    frozen_parameters: Floats = field(default_factory=lambda: np.zeros(1))
    """Parameters among `parameters` that have neither gradient nor optimizer state (LoRA's base weights)."""
    positions: tuple[int, ...] = ()
    """Positions of the repetitions among the layers, from 0; empty if they follow the previous block in a row."""
    table_parameters: Floats = field(default_factory=lambda: np.zeros(1))
    """Parameters of embedding tables in FP32, not counted in `parameters`. A step reads and updates only the rows of
    its samples, as operators of the block, so no gradient of the whole table exists."""
    remembered_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes that the block reads of earlier layers besides its input, such as the output of an encoder."""
    freed_bytes: Mapping[str, Floats] = field(default_factory=dict)
    """Bytes among `activation_bytes` that recomputing each module of `recomputation.MODULES` frees, (S,) each."""

    def kept_bytes(self, code: int) -> Floats:
        """Return the activations that stay under a value of recomputation, `RECOMPUTED[code]`, (S,)."""
        if code < len(self.activation_bytes):
            return np.asarray(self.activation_bytes[code])
        freed = (size for name, size in self.freed_bytes.items() if BY_CODE[code, MODULES.index(name)])
        return np.asarray(np.maximum(self.activation_bytes[0] - sum(freed, np.zeros(1)), self.activation_bytes[-1]))


@dataclass(frozen=True, slots=True)
class Stages:
    """Largest fraction of cost, parameters and activations in one pipeline stage if layers are cut by cost.

    Each column has an entry for 1, 2, … stages, (most stages,).
    """

    cost: Floats
    parameters: Floats
    activations: Floats


@dataclass(frozen=True, slots=True)
class Graph:
    """A model under S distinct shards: blocks before the layers, the layers, and blocks after the layers.

    Pipeline stages split `layers` as `zoo.stages` says, or a traced graph's as `stages` says. `first` blocks run on the
    first stage, `last` blocks on the last one. `boundary_bytes` are the bytes that one rank sends to the next stage per
    micro-batch, (S,): every tensor-parallel rank sends its part of the activations (arXiv 2104.04473, section 4.1).
    """

    first: tuple[Block, ...]
    layers: tuple[Block, ...]
    last: tuple[Block, ...]
    boundary_bytes: Floats
    shards: int
    host_bytes_per_sample: float = 0.0
    """Bytes of one input sample as the data loader hands it to the GPU."""
    stages: Stages | None = None
    counts_ends: bool = False
    """Whether embedding and loss count as layers of the pipeline where the layers alone do not divide."""
    layout: tuple[int, ...] = ()
    """Layers of each piece of a pipeline whose layout is stated, in the order of a pass; empty without one."""
    stage_kinds: dict[int, Floats] = field(init=False, default_factory=dict, compare=False, repr=False)
    """Cache of `zoo.stages` by number of stages."""
    fullest_stages: list[Any] = field(init=False, default_factory=list, compare=False, repr=False)
    """Cache of `zoo.stages.FullestStages` for the last plans that were asked for."""

    @property
    def has_stages(self) -> bool:
        """Whether pipelines cut the layers one by one, rather than a traced graph by cost."""
        return self.stages is None and bool(self.boundary_bytes.any())

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.first + self.layers + self.last

    def sequence(self) -> tuple[Block, ...]:
        """Return every repetition of every block, in the order of a forward pass."""
        layers = (self.layers[place] for place in self.layer_order())
        return (*_repeat_blocks(self.first), *layers, *_repeat_blocks(self.last))

    def layer_order(self) -> list[int]:
        """Return for each layer the index of its block in `layers`, in the order of a forward pass."""
        placed, end = [], 0
        for place, block in enumerate(self.layers):
            positions = block.positions or range(end, end + block.repeat)
            placed += [(position, place) for position in positions]
            end = max(end, max(positions) + 1)
        placed.sort(key=lambda item: item[0])
        return [place for _, place in placed]

    def kernels(self) -> tuple[KernelTable, list[npt.NDArray[np.intp]]]:
        """Return the distinct kernels of all operators, and the rows of each operator, (S,), in the order of blocks."""
        ops = [op for block in self.blocks for op in block.ops]
        distinct, inverse = KernelTable.concatenate([op.table for op in ops]).distinct()
        ends = np.cumsum([len(op.table) for op in ops])
        return distinct, np.split(inverse, ends[:-1])


def _repeat_blocks(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks for _ in range(block.repeat)]


@dataclass(frozen=True, slots=True)
class Shards:
    """Distinct (micro-batch, tensor, context, expert, sequence-parallel) shares of a plan table, each (S,)."""

    micro_batch: Ints
    tensor: Ints
    context: Ints
    expert: Ints
    sequence_parallel: Ints

    def __len__(self) -> int:
        return len(self.micro_batch)
