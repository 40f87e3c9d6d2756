"""Operators that one rank runs, with FLOPs and bytes that follow from their shapes.

A model is a short list of blocks, such as embedding, layer and head. A block holds operators and may repeat. Many plans
give a rank the same shard of the model. So every dimension of an operator is a column with one entry per distinct
shard, (S,), and one graph describes thousands of plans.

`KINDS` lists all kinds of kernels, with the names of their dimensions and the formulas of their FLOPs and bytes.
`tilecast.kernels` forecasts the seconds of a `KernelTable`.
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
class KernelType:
    """A kind of kernel, with the names of its dimensions and the formulas of its FLOPs and DRAM bytes."""

    name: str
    dims: tuple[str, ...]
    """Names of the dimensions, such as `m`, `n` and `k`."""
    flops: Callable[[Dims], Floats]
    """Function from the dimensions of n kernels to their FLOPs, (n,). A multiply-add counts as two."""
    bytes: Callable[[Dims, Floats], Floats]
    """Function from the dimensions and the bytes per element of n kernels, (n,), to their least DRAM traffic in bytes,
    (n,). Every input is read once and every output is written once."""
    optional: tuple[str, ...] = ()
    """Names of the dimensions that a table may leave out. They are then zero."""


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
    """Return the DRAM traffic in bytes of one output element of each matrix product, (n,).

    Each output element is written once. If it is added to an FP32 buffer, it is also read. An FP8, MXFP8 or NVFP4
    product counts one byte for the 16 bits that it writes, and at most four bytes for an FP32 buffer.

    Args:
        dims: dimensions of the products.
        element: bytes of one element of the inputs, (n,).
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


def _build_rowwise_kernel(
    name: str, forward_flops: float, backward_flops: float, forward_moves: float, backward_moves: float
) -> KernelType:
    """Return a kind of kernel that reduces each row of a matrix, such as softmax.

    Args:
        name: name of the kind.
        forward_flops: FLOPs per element of the matrix in the forward pass.
        backward_flops: FLOPs per element of the matrix in the backward pass.
        forward_moves: reads and writes per element of the matrix in the forward pass.
        backward_moves: reads and writes per element of the matrix in the backward pass.
    """

    def flops(dims: Dims) -> Floats:
        return dims["rows"] * dims["cols"] * np.where(dims["backward"] > 0, backward_flops, forward_flops)

    def moved(dims: Dims, element: Floats) -> Floats:
        return element * dims["rows"] * dims["cols"] * np.where(dims["backward"] > 0, backward_moves, forward_moves)

    return KernelType(name, ("rows", "cols", "backward"), flops, moved)


KINDS: Mapping[str, KernelType] = {
    kind.name: kind
    for kind in (
        KernelType(
            "gemm",
            ("batch", "m", "n", "k", "accumulated"),
            lambda dims: 2.0 * dims["batch"] * dims["m"] * dims["n"] * dims["k"],
            _gemm_bytes,
            optional=("accumulated",),
        ),
        KernelType(
            "attention",
            ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "causal", "backward"),
            _attention_flops,
            _attention_bytes,
        ),
        KernelType("conv", _CONV, _conv_flops, _conv_bytes),
        _build_rowwise_kernel("softmax", 5.0, 4.0, 2.0, 3.0),
        _build_rowwise_kernel("layernorm", 8.0, 14.0, 2.0, 3.0),
        _build_rowwise_kernel("rmsnorm", 4.0, 10.0, 2.0, 3.0),
        _build_rowwise_kernel("cross_entropy", 5.0, 3.0, 1.0, 2.0),
        KernelType(
            "embedding",
            ("rows", "cols", "backward"),
            lambda dims: dims["rows"] * dims["cols"] * np.where(dims["backward"] > 0, 1.0, 0.0),
            lambda dims, element: (
                dims["rows"] * (8.0 + element * dims["cols"] * np.where(dims["backward"] > 0, 3.0, 2.0))
            ),
        ),
        KernelType(
            "elementwise",
            ("elements", "read_bytes", "written_bytes", "drawn"),
            lambda dims: dims["elements"],
            lambda dims, element: dims["elements"] * (dims["read_bytes"] + dims["written_bytes"]),
            optional=("drawn",),
        ),
        KernelType("direct_conv", _CONV, _conv_flops, _conv_bytes),
    )
}
"""Every kind of kernel, by name.

- `gemm` with a `batch` is a batched product, or the grouped product of experts. If `accumulated` is 1, it adds to an
  FP32 output, as the gradient of a weight does over micro-batches.
- `attention` is a fused (flash) kernel. Unfused attention is two batched `gemm` and a `softmax`.
- `conv.direction` is 0 for the forward pass, 1 for the gradient of the input and 2 for the gradient of the weight.
- `direct_conv` is a grouped convolution that a library runs only on the CUDA cores.
- `elementwise` has `read_bytes` and `written_bytes` per element, so mixed dtypes and byte masks are exact. If `drawn`
  is 1, each element takes a random number (dropout).
"""

KIND_NAMES: tuple[str, ...] = tuple(KINDS)
WIDTH = max(len(kind.dims) for kind in KINDS.values())
"""Number of dimension columns in a kernel table, which is the largest number of dimensions of a kind."""


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Table of N kernels of any kinds and precisions. A kernel is a row."""

    kind: npt.NDArray[np.int8]
    """Index into `KIND_NAMES` of each kernel, (N,)."""
    precision: npt.NDArray[np.int8]
    """Index into `PRECISIONS` of each kernel, (N,)."""
    dims: Floats
    """Dimensions of each kernel in the order of its `Kind.dims`, (N, WIDTH). Unused columns are zero."""

    def __len__(self) -> int:
        return len(self.kind)

    def groups(self) -> Sequence[tuple[KernelType, npt.NDArray[np.intp], Dims]]:
        """Return, for each kind of kernel in the table, the kind, the indices of its kernels and their dimensions."""
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
        """Return the floating-point operations of each kernel, (N,)."""
        result = np.zeros(len(self))
        for kind, rows, dims in self.groups():
            result[rows] = kind.flops(dims)
        return result

    def bytes(self) -> Floats:
        """Return the least DRAM traffic of each kernel in bytes, (N,)."""
        result = np.zeros(len(self))
        for kind, rows, dims in self.groups():
            result[rows] = kind.bytes(dims, self.element_bytes[rows])
        return result

    @classmethod
    def from_dimensions(cls, kind: str, precision: str, **dims: npt.ArrayLike) -> KernelTable:
        """Return a table of kernels of one kind and precision.

        Each dimension is a number or a column. Numbers and columns broadcast against each other.

        Raises:
            KeyError: a dimension of the kind is missing, or the kind has no such dimension.
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
        """Return one table with the rows of all tables, in order."""
        return cls(
            np.concatenate([table.kind for table in tables]),
            np.concatenate([table.precision for table in tables]),
            np.concatenate([table.dims for table in tables]),
        )

    def distinct(self) -> tuple[KernelTable, npt.NDArray[np.intp]]:
        """Return a table of the distinct kernels, and the index into it of each row of this table, (N,)."""
        width = max(len(KINDS[KIND_NAMES[code]].dims) for code in np.flatnonzero(np.bincount(self.kind)))
        parts = [slice(start, start + _CHUNK) for start in range(0, len(self), _CHUNK)]
        # Equal rows are found by a hash of their bits and then compared, since numbers sort faster than rows. Equal
        # neighbours count once.
        hashes = np.concatenate([_hash_columns(self._key(part, width)) for part in parts])
        heads = np.flatnonzero(np.diff(hashes, prepend=~hashes[:1]))
        _, first, inverse = np.unique(hashes[heads], return_index=True, return_inverse=True)
        first, inverse = heads[first], np.repeat(inverse, np.diff(heads, append=len(self)))
        if not all(np.array_equal(self._key(first[inverse[part]], width), self._key(part, width)) for part in parts):
            key = self._key(slice(None), width).T
            _, first, inverse = np.unique(key, axis=0, return_index=True, return_inverse=True)
        return self.take(first), inverse.ravel()

    def _key(self, rows: slice | npt.NDArray[np.intp], width: int) -> Floats:
        """Return a column for each of k rows, (1 + width, k).

        A column has a number for kind and precision, and then the first `width` dimensions.
        """
        key = np.empty((1 + width, len(self.kind[rows])))
        key[0] = self.kind[rows] * float(len(PRECISIONS)) + self.precision[rows]
        key[1:] = self.dims[rows, :width].T
        key[1:] += 0.0  # one bit pattern for both zeros
        return key

    def take(self, rows: npt.NDArray[np.intp]) -> KernelTable:
        """Return the kernels at the indexes `rows`, in the order of `rows`."""
        return KernelTable(self.kind[rows], self.precision[rows], self.dims[rows])


def _hash_columns(key: Floats) -> npt.NDArray[np.uint64]:
    """Return a hash of each column of a matrix, (k,). Equal columns have equal hashes."""
    bits = key.view(np.uint64)
    mixed = (bits ^ (bits >> np.uint64(29))) * _MIX[: len(key), None]
    mixed ^= mixed >> np.uint64(32)
    hashes: npt.NDArray[np.uint64] = mixed.sum(axis=0)
    return hashes


_MIX = np.random.default_rng(0).integers(1, 1 << 63, WIDTH + 1, dtype=np.uint64) | np.uint64(1)
"""Odd numbers that spread the bits of a kernel's dimensions."""
_CHUNK = 1 << 12
"""Number of rows that are hashed at once. Their bits fit the processor's second-level cache."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operator of a block on one rank, under S shards of the model."""

    name: str
    table: KernelTable
    """Kernel of the operator under each shard, (S,)."""
    phase: Phase = "forward"
    count: float = 1.0
    """Number of times that one repetition of the block runs the operator."""
    launches: Floats | float = 1.0
    """CUDA kernels that an eager framework launches for the operator, (S,) or one number."""
    selective: bool = False
    """Whether selective recomputation repeats the operator in the backward pass, as for the core of attention."""
    unless: PassName | None = None
    """Fusion pass that removes the operator. None if no pass removes it."""
    only: PassName | None = None
    """Fusion pass that adds the operator. None if the operator is part of eager execution."""
    host_paced: bool = False
    """Whether the host reads GPU results between the kernels, for instance to match boxes.

    Then the GPU waits for every launch: the operator takes at least as long as its launches, and no other kernel hides
    them.
    """


# The largest published model, the U-Net of Stable Diffusion XL, has 4,851.
MOST_OPERATORS = 12_000
"""Most distinct operators of a model. A layer that repeats counts once."""


def require_few_operators(count: int) -> None:
    """Raise SearchTooLargeError if `count`, a model's distinct operators, exceeds `MOST_OPERATORS`."""
    if count > MOST_OPERATORS:
        remedy = "name a model with fewer layers, or lower the depths in its config"
        raise SearchTooLargeError.from_counts(
            "spec.model", count, MOST_OPERATORS, "distinct operators of the model", remedy
        )


class OperatorList(list[Op]):
    """A list of operators. `+=` raises SearchTooLargeError if the list then has more than `MOST_OPERATORS`."""

    def __iadd__(self, more: Iterable[Op]) -> Self:  # type: ignore[override,misc]  # `+` makes a list without a limit
        super().__iadd__(more)
        require_few_operators(len(self))
        return self


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective that a block runs, under S shards of the model."""

    name: str
    collective: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
    group: Literal["tensor", "context", "expert", "expert_tensor"]
    """Dimension of parallelism whose ranks take part."""
    size_bytes: Floats
    """Bytes of the whole buffer of one rank, as nccl-tests counts them, (S,)."""
    phase: Phase = "forward"
    count: float = 1.0
    """Number of times that one repetition of the block runs the collective."""
    fanout: float = 1.0
    """Number of copies of each token that an all-to-all sends, for instance one copy per chosen expert."""
    groups: float = 1.0
    """Number of equal groups of neighbouring ranks from which the router chooses."""
    top_groups: float = 1.0
    """Number of groups to which the router may send the copies of one token (node-limited routing)."""
    dispatch: ExpertDispatch = "allToAll"
    """Collective that sends tokens to their experts."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a model that repeats, such as a layer.

    Columns are over the S distinct shards of a table of plans, (S,). They describe one repetition on one rank.
    """

    name: str
    repeat: int
    ops: tuple[Op, ...]
    parameters: Floats
    activation_bytes: Floats
    """Activations of one micro-batch that stay until the backward pass, in bytes, for each recomputation mode of
    `spec.CHECKPOINTING`, (3, S)."""
    collectives: tuple[CollectiveCall, ...] = ()
    expert_parameters: Floats = field(default_factory=lambda: np.zeros(1))
    """Parameters among `parameters` that expert parallelism spreads over ranks."""
    working_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes of scratch memory that exists only while the block runs, such as logits and unfused scores."""
    copied_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes that exist only while a layer runs, however it is recomputed, (S,).

    They are the largest copy of a weight in another type, and the buffers of experts beside a stash.
    """
    workspace_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes that a library allocates while one of its kernels runs, (S,)."""
    frozen_parameters: Floats = field(default_factory=lambda: np.zeros(1))
    """Parameters among `parameters` that have neither gradient nor optimizer state (LoRA's base, frozen parts)."""
    positions: tuple[int, ...] = ()
    """Positions of the repetitions among the layers of the model, from 0.

    Empty if the repetitions directly follow the previous block.
    """
    table_parameters: Floats = field(default_factory=lambda: np.zeros(1))
    """Parameters of FP32 embedding tables, which `parameters` does not count.

    A step reads and updates only the rows of its samples, by operators of the block. So the table has no dense
    gradient.
    """
    remembered_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """Bytes that the block reads from earlier blocks in addition to its input, such as an encoder's output."""
    freed_bytes: Mapping[str, Floats] = field(default_factory=dict)
    """Bytes of `activation_bytes` that recomputing a module frees, (S,), by name in `recomputation.MODULES`."""

    @property
    def trained_parameters(self) -> Floats:
        """Parameters with a gradient, (S,)."""
        return np.asarray(self.parameters - self.frozen_parameters)

    @property
    def trained_expert_parameters(self) -> Floats:
        """Parameters with a gradient among those that expert parallelism spreads over ranks, (S,).

        It is for blocks that are trained or frozen as a whole.
        """
        return np.asarray(np.minimum(self.expert_parameters, self.trained_parameters))

    def kept_bytes(self, code: int) -> Floats:
        """Return the bytes of activations that are saved for the backward pass under a recomputation code, (S,).

        `code` is an index into `recomputation.RECOMPUTED`.
        """
        if code < len(self.activation_bytes):
            return np.asarray(self.activation_bytes[code])
        freed = (size for name, size in self.freed_bytes.items() if BY_CODE[code, MODULES.index(name)])
        return np.asarray(np.maximum(self.activation_bytes[0] - sum(freed, np.zeros(1)), self.activation_bytes[-1]))


@dataclass(frozen=True, slots=True)
class LargestStage:
    """Largest share of a traced model that a pipeline stage holds, if the model is cut into stages of similar cost.

    The fields are the shares of cost, parameters and activations. Entry k of each array is for k + 1 stages.
    """

    cost: Floats
    parameters: Floats
    activations: Floats


@dataclass(frozen=True, slots=True)
class Graph:
    """Blocks of a model on one rank, under S distinct shards of the model."""

    first: tuple[Block, ...]
    """Blocks before the layers, which run on the first pipeline stage."""
    layers: tuple[Block, ...]
    """Layers, which `zoo.stages` splits over pipeline stages."""
    last: tuple[Block, ...]
    """Blocks after the layers, which run on the last pipeline stage."""
    boundary_bytes: Floats
    """Bytes of a micro-batch that one rank sends to the next pipeline stage, (S,). Every tensor-parallel rank sends its
    fraction of the activations (arXiv 2104.04473, section 4.1)."""
    shards: int
    """Number S of distinct shards."""
    host_bytes_per_sample: float = 0.0
    """Bytes of one input sample that the data loader copies to the GPU."""
    stages: LargestStage | None = None
    """Pipeline stages of a traced model. None for a model with layers."""
    counts_ends: bool = False
    """Whether embedding and loss may count as layers when layers are split over stages (`layout.split_layers`)."""
    is_folded: bool = False
    """Whether the job's pipeline schedule puts both the first and the last piece of the model on the first rank."""
    layout: tuple[int, ...] = ()
    """Layers of each virtual stage, in the order of a forward pass. Empty if the job sets no pipeline layout."""
    stage_kinds: dict[tuple[int, bool], Floats] = field(init=False, default_factory=dict, compare=False, repr=False)
    """Cache of `zoo.stages` by number of stages, and by whether the first stage holds the last piece too."""
    fullest_stages: list[Any] = field(init=False, default_factory=list, compare=False, repr=False)
    """Cache of `zoo.stages.FullestStages` for the most recent plans."""

    @property
    def has_stages(self) -> bool:
        """Whether a pipeline splits the model by layers. A traced model is split by cost instead."""
        return self.stages is None and bool(self.boundary_bytes.any())

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in the order of the model, each of them once."""
        return self.first + self.layers + self.last

    def list_repetitions(self) -> tuple[Block, ...]:
        """Return the blocks in the order of a forward pass, with a block that repeats listed once per repetition."""
        layers = (self.layers[place] for place in self.list_layer_indexes())
        return (*_expand_repeats(self.first), *layers, *_expand_repeats(self.last))

    def list_layer_indexes(self) -> list[int]:
        """Return the index into `layers` of each layer's block, in the order of a forward pass."""
        placed, end = [], 0
        for place, block in enumerate(self.layers):
            positions = block.positions or range(end, end + block.repeat)
            placed += [(position, place) for position in positions]
            end = max(end, max(positions) + 1)
        placed.sort(key=lambda item: item[0])
        return [place for _, place in placed]

    def kernels(self) -> tuple[KernelTable, list[npt.NDArray[np.intp]]]:
        """Return the distinct kernels of all operators, and the indices of these kernels for each operator, (S,).

        Operators are in the order of `blocks`.
        """
        ops = [op for block in self.blocks for op in block.ops]
        distinct, inverse = KernelTable.concatenate([op.table for op in ops]).distinct()
        ends = np.cumsum([len(op.table) for op in ops])
        return distinct, np.split(inverse, ends[:-1])


def _expand_repeats(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks for _ in range(block.repeat)]


@dataclass(frozen=True, slots=True)
class Shards:
    """The S distinct combinations of the plan columns that determine a rank's shard of the model, as columns (S,)."""

    micro_batch: Ints
    tensor: Ints
    context: Ints
    expert: Ints
    sequence_parallel: Ints
    expert_tensor: Ints = field(default_factory=lambda: np.ones(1, np.int64))

    def __len__(self) -> int:
        return len(self.micro_batch)
