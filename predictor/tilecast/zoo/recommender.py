"""Recommenders: DLRM and DCN v2, Wide & Deep, a variational autoencoder of a user's items, and SIM.

Embedding tables are read row by row. A sample reads `lookups` rows of `width` numbers on average, which become one
vector for each of `tables`; a share `distinct` (1) of the rows that a batch reads differ from each other.

With `spread_tables` every rank holds a share of the tables and serves the samples of all ranks (hybrid parallelism). An
all-to-all sends keys to the tables and vectors back, gradients go the same way, and only the rows that were read are
updated. Where a framework shards tables by rows (`Framework.table_sharding`), each rank holds a part of the vectors of
all ranks' samples. Without `spread_tables`, tables are copied on every rank and have whole gradients.

Sources: Naumov et al., arXiv 1906.00091 (figures 1 and 4); Wang et al., arXiv 2008.13535 (section 3.4, low rank); Cheng
et al., arXiv 1606.07792; Liang et al., arXiv 1802.05814 (section 2); Pi et al., arXiv 2006.05639 (section 3), with the
interest evolution of Zhou et al., arXiv 1809.03672 (section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from tilecast import frameworks
from tilecast.graph import Block, CollectiveCall, Graph, KernelTable, Op, Shards
from tilecast.model import Dimensions, DimensionsT, numbered
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers
from tilecast.zoo.cnn.walk import Walk
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.recurrent import recurrent

_KEY_BYTES = 8.0
_SORT_PASSES = 4.0
"""Passes of a radix sort over the 32 bits of row numbers, one byte per pass."""
_GATE_KERNELS = 10.0
"""Kernels for the gates of a GRU without cuDNN: three sums, two sigmoids, a tanh, three products and a difference."""
_MOMENTS: Mapping[str, float] = {"momentum": 1.0, "adam": 2.0, "adamw": 2.0, "lamb": 2.0}
"""Numbers that an optimizer holds beside each weight. An update of rows reads and writes them besides the gradient;
plain SGD adds gradients to the rows directly."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Tables(Dimensions):
    """Dimensions of the embedding tables of a recommender."""

    table_weights: int
    """Weights of all tables."""
    tables: int
    """Tables, each of which gives a sample one vector."""
    lookups: float
    """Rows that a sample reads on average."""
    width: float
    """Numbers of a row, as a mean over tables."""
    distinct: float = 1.0
    """Share of the rows that a batch reads which differ from each other."""
    spread_tables: bool = False
    """Whether every rank holds a share of the tables, not a copy of them."""
    dense_features: int = 0
    """Numbers of a sample that are no keys of tables."""
    wide_weights: int = 0
    """Weights of keys that are looked up one by one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Dlrm(Tables):
    """Dimensions of DLRM and DCN v2."""

    dense_features: int
    """Numbers of a sample that are no keys of tables."""
    bottom: tuple[int, ...] = numbered("bottom")
    """Outputs of the dense layers over the dense features; the last has the width of a row."""
    top: tuple[int, ...] = numbered("top")
    """Outputs of the dense layers over all vectors."""
    cross_layers: int = 0
    """Layers that cross all vectors side by side (DCN v2); 0: pairs of vectors are multiplied."""
    cross_rank: int = 0
    """Rank of such a layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WideDeep(Tables):
    """Dimensions of Wide & Deep."""

    deep: tuple[int, ...] = numbered("deep")
    """Outputs of the dense layers."""
    wide: float
    """Keys of a sample that are looked up one by one."""
    wide_weights: int
    """Weights of such keys."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Autoencoder(Tables):
    """Dimensions of a variational autoencoder of a user's items."""

    latent: int
    """Numbers that stand for a user."""
    items: int
    """Items that are scored."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SearchInterest(Tables):
    """Dimensions of SIM."""

    long: int
    """Items of a user's history that the target attends to."""
    chosen: int
    """The best of these, which the target attends to again."""
    short: int
    """Last items, which two GRUs run over."""
    state: int
    """Cells of a GRU."""
    first: tuple[int, ...] = numbered("first")
    """Outputs of the dense layers after the first stage."""
    second: tuple[int, ...] = numbered("second")
    """Outputs of the dense layers after the second stage."""
    auxiliary: tuple[int, ...] = numbered("auxiliary")
    """Outputs of the dense layers before each next item."""


@dataclass(frozen=True, slots=True)
class Recommender(Generic[DimensionsT]):
    """A family of recommenders: the dimensions that only it has, and the function that writes it."""

    dimensions: type[DimensionsT]
    write: Callable[[Walk, DimensionsT], None]


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of one block, data parallel except for tables that are spread."""
    dims = workload.model.own(Tables)
    batch = shards.micro_batch.astype(float)
    walk = Walk(Numerics.of(workload), batch, dims.dense_features, (1, 1, 1))
    ops, collectives = _tables(workload, batch)
    NETWORKS[workload.model.family].write(walk, dims)
    has_rows = dims.spread_tables
    row_wise = has_rows and frameworks.of(workload).table_sharding == "row-wise"
    # With row-wise tables, a rank holds its part of the vectors, and scatters their gradients, for all ranks' samples.
    others = 2.0 * (shards.expert - 1) if row_wise else 0.0
    walk.keep(batch * (1.0 + others) * dims.tables * dims.width)
    if walk.numerics.training:
        walk.ops += layers.pointwise("loss", walk.numerics, batch, kernels=4)
    weights = _table_weights(dims) / (shards.expert if has_rows else np.ones(len(shards)))
    block = Block(
        "network",
        1,
        (*ops, *walk.ops),
        walk.parameters + (0.0 if has_rows else 1.0) * weights,
        np.stack([walk.activation_bytes * np.ones(len(shards))] * 3),
        tuple(collectives),
        working_bytes=walk.working * np.ones(len(shards)),
        table_parameters=weights if has_rows else np.zeros(1),
    )
    features = dims.lookups + dims.dense_features
    return Graph((), (block,), (), np.zeros(len(shards)), len(shards), host_bytes_per_sample=4.0 * features)


def _table_weights(dims: Tables) -> float:
    """Return the weights of all tables, the wide ones among them if tables are spread."""
    return dims.table_weights + (dims.wide_weights if dims.spread_tables else 0.0)


def _tables(workload: Workload, batch: Floats) -> tuple[list[Op], list[CollectiveCall]]:
    """Return the look-ups, their gradients, and the collectives of both between ranks.

    All ranks hold equal shares of the tables, so a rank answers as many keys as it requests.
    """
    dims, numerics = workload.model.own(Tables), Numerics.of(workload)
    width, read, made = dims.width, batch * dims.lookups, batch * dims.tables
    differing = read * dims.distinct
    # Each row comes from memory once, however often a batch requests it, and one row is written for each table.
    ops = [Op("tables", KernelTable.of("embedding", "fp32", rows=(differing + made) / 2, cols=width, backward=0.0))]
    exchanged = [("keys", _KEY_BYTES * read, "forward"), ("vectors", numerics.element * made * width, "forward")]
    if numerics.training:
        exchanged.append(("vectors.gradient", numerics.element * made * width, "backward"))
        sort = KernelTable.of("elementwise", "fp32", elements=read, read_bytes=_KEY_BYTES, written_bytes=_KEY_BYTES)
        scatter = KernelTable.of("embedding", "fp32", rows=differing, cols=width, backward=1.0)
        ops += [Op("tables.sort", sort, "backward", count=_SORT_PASSES), Op("tables.gradient", scatter, "backward")]
    moments = _MOMENTS.get(workload.optimizer, 0.0)
    if numerics.training and moments and dims.spread_tables:
        update = KernelTable.of(
            "elementwise",
            "fp32",
            elements=differing * width,
            read_bytes=4.0 * (1.0 + moments),
            written_bytes=4.0 * moments,
        )
        ops.append(Op("tables.update", update, "backward"))
    collectives = [CollectiveCall(name, "all_to_all", "expert", size, phase) for name, size, phase in exchanged]  # type: ignore[arg-type]
    return ops, collectives if dims.spread_tables else []


def _dense(walk: Walk, outputs: Sequence[int], *, output: bool = False, dropout: bool = False) -> None:
    """Write dense layers of these `outputs`, each with a ReLU.

    The last layer has no ReLU if it is the network's `output`. With `dropout`, each layer has one after it, whose input
    is kept besides the input of the next layer.
    """
    for number, width in enumerate(outputs, 1):
        walk.dense(width)
        if not output or number < len(outputs):
            walk.activate()
        if dropout:
            walk.keep(walk.elements)
            walk.dropout()


def dlrm(walk: Walk, dims: Dlrm) -> None:
    """Write DLRM or DCN v2.

    Dense features pass `bottom` layers, which end in the width of the tables' vectors. Then follow the products of all
    pairs of vectors, or `cross_layers` of rank `cross_rank` over all vectors side by side, and `top` layers.
    """
    _dense(walk, dims.bottom)
    vectors = dims.tables + 1
    inputs = vectors * dims.width
    walk.concatenate(int(inputs))
    if dims.cross_layers:
        for _ in range(dims.cross_layers):
            walk.linear(dims.cross_rank)
            walk.dense(int(inputs))
            walk.ops += layers.pointwise("cross", walk.numerics, walk.elements, reads=3.0, backward=(4.0, 3.0))
    else:
        walk.products(vectors, vectors, dims.width)
        pairs = int(vectors * (vectors - 1) / 2 + dims.width)
        walk.keep(walk.batch * inputs)
        walk.concatenate(pairs)
    _dense(walk, dims.top, output=True)


def wide_and_deep(walk: Walk, dims: WideDeep) -> None:
    """Write Wide & Deep.

    Vectors and dense features side by side pass `deep` layers. Beside them stands one weight for each key of `wide`
    look-ups, from `wide_weights` in all, which are a table like the others.
    """
    walk.concatenate(int(dims.tables * dims.width + dims.dense_features))
    _dense(walk, dims.deep, dropout=True)
    walk.dense(1)
    walk.ops += layers.embedding("wide", walk.numerics, walk.batch * dims.wide, 1.0)
    if not dims.spread_tables:
        walk.parameters += dims.wide_weights
    walk.add()


def autoencoder(walk: Walk, dims: Autoencoder) -> None:
    """Write a variational autoencoder of a user's items.

    A bag of the items (the look-ups) passes a dense layer to mean and variance of `latent` numbers; a sample of those
    is decoded to a multinomial over all `items`.
    """
    walk.channels = int(dims.width)
    walk.activate("tanh")
    walk.dense(2 * dims.latent)
    walk.channels = dims.latent
    walk.ops += layers.pointwise("sample", walk.numerics, walk.elements, reads=3.0, kernels=3)
    walk.dense(int(dims.width))
    walk.activate("tanh")
    walk.dense(dims.items)
    walk.loss()
    walk.keep(walk.elements)


def search_interest(walk: Walk, dims: SearchInterest) -> None:
    """Write SIM.

    The target item attends to `long` items of the user's history, and to the best `chosen` of them. A GRU, attention
    and a GRU of `state` cells run over the last `short` items (interest evolution), with an auxiliary network before
    each next item. Dense layers `first` and `second` classify after the first and the second stage.
    """
    item, batch = 2 * dims.width, walk.batch
    # Each item is joined with its category, and the padding of histories is masked. Items that the user did not choose
    # are one more short history.
    for count in (dims.long, dims.chosen, dims.short, dims.short):
        walk.concatenate(int(count * item))
        walk.keep(walk.elements)
        walk.ops += layers.pointwise("mask", walk.numerics, walk.elements, absorbed=False, backward=(1.0, 1.0))
    for count in (dims.long, dims.chosen, dims.short):
        walk.products(1.0, count, item)
        walk.products(1.0, item, count)
    walk.ops += layers.elementwise("best", walk.numerics, batch * dims.long, 4.0, 4.0, launches=4.0)
    state = dims.state
    for inputs in (item, state):
        ops, parameters, activation_bytes = recurrent(
            "evolution", walk.numerics, batch=batch, steps=dims.short, inputs=inputs, hidden=state, cell="gru"
        )
        walk.ops += ops
        walk.parameters += parameters
        walk.keep(activation_bytes)
    # Attention scales the update gate of the second GRU, which cuDNN does not support: its gates are separate kernels.
    gates = _GATE_KERNELS * dims.short
    for phase in ("forward", "backward") if walk.numerics.training else ("forward",):
        walk.ops += layers.elementwise("gates", walk.numerics, batch * state, 2.0, 1.0, count=gates, phase=phase)
    walk.batch = batch * 2.0 * (dims.short - 1.0)
    walk.concatenate(int(state + item))
    _dense(walk, dims.auxiliary)
    walk.dense(1)
    walk.batch = batch
    for outputs, inputs in ((dims.first, 2 * item + dims.width), (dims.second, 3 * item + state + dims.width)):
        walk.channels = int(inputs)
        _dense(walk, outputs)
        walk.dense(1)


NETWORKS: Mapping[str, Recommender[Any]] = {
    "dlrm": Recommender(Dlrm, dlrm),
    "wide-deep": Recommender(WideDeep, wide_and_deep),
    "vae-cf": Recommender(Autoencoder, autoencoder),
    "sim": Recommender(SearchInterest, search_interest),
}
"""Families of recommenders by name."""
