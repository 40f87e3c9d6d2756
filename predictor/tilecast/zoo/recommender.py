"""Recommenders: DLRM and DCN v2, Wide & Deep, a variational autoencoder of a user's items, SIM, and NCF.

Embedding tables are read row by row. A sample reads `lookups` rows of `width` numbers on average. These rows are pooled
into one vector for each of the `tables`. `distinct` is the number of different rows that a batch reads, as a fraction
of all its reads.

With `spread_tables`, the tables are divided among the ranks, and every rank serves the samples of all ranks (hybrid
parallelism). An all-to-all sends keys to the tables, and another returns the vectors. Gradients go the opposite way,
and only the rows that were read are updated. If a framework shards tables by rows (`Framework.table_sharding`), each
rank computes a partial sum of the vectors of all samples. Without `spread_tables`, every rank has a copy of all tables,
and their gradients are dense.

Sources: Naumov et al., arXiv 1906.00091 (figures 1 and 4); Wang et al., arXiv 2008.13535 (section 3.4, low rank); Cheng
et al., arXiv 1606.07792; Liang et al., arXiv 1802.05814 (section 2); Pi et al., arXiv 2006.05639 (section 3), with the
interest evolution of Zhou et al., arXiv 1809.03672 (section 4); He et al., arXiv 1708.05031 (section 3.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tilecast import frameworks
from tilecast.graph import CollectiveCall, Graph, KernelTable, Op, Shards
from tilecast.model import Dimensions, numbered_field
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers
from tilecast.zoo.cnn import sequence
from tilecast.zoo.cnn.builder import Architecture, NetworkBuilder
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import build_one_block_graph, build_uniform_block

_KEY_BYTES = 8.0
_SORT_PASSES = 4.0
"""Passes of a radix sort over the 32 bits of row numbers, one byte per pass."""
_ATTENTION_UNIT = (80, 40)
"""Outputs of the dense layers that score a state (arXiv 1809.03672, section 4.3, as its code has them)."""
_GATE_KERNELS = 10.0
"""Kernels for the gates of a GRU without cuDNN: three sums, two sigmoids, a tanh, three products and a difference."""
_MOMENTS: Mapping[str, float] = {"momentum": 1.0, "adam": 2.0, "adamw": 2.0, "lamb": 2.0}
"""Numbers that an optimizer stores per weight.

An update of rows reads and writes them besides the gradient. Plain SGD adds gradients to the rows directly.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EmbeddingTables(Dimensions):
    """Dimensions of the embedding tables of a recommender."""

    table_weights: int
    tables: int
    """Number of tables. Each gives a sample one vector."""
    lookups: float
    """Number of rows that a sample reads on average."""
    width: float
    """Mean number of values per row."""
    distinct: float = 1.0
    """Number of different rows that a batch reads, divided by its number of lookups."""
    spread_tables: bool = False
    """Whether the tables are divided among the ranks. Otherwise every rank has a copy of them."""
    dense_features: int = 0
    """Number of a sample's inputs that are not keys of tables."""
    wide_weights: int = 0
    """Number of weights of the wide branch, one per key."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Dlrm(EmbeddingTables):
    """Dimensions of DLRM and DCN v2."""

    dense_features: int
    bottom: tuple[int, ...] = numbered_field("bottom")
    """Outputs of the dense layers over the dense features. The last has the width of a row."""
    top: tuple[int, ...] = numbered_field("top")
    """Outputs of the dense layers over all vectors."""
    cross_layers: int = 0
    """Number of layers that cross all concatenated vectors (DCN v2). 0 if pairs of vectors are multiplied."""
    cross_rank: int = 0
    """Rank of the factorised weight of a cross layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WideDeep(EmbeddingTables):
    """Dimensions of Wide & Deep."""

    deep: tuple[int, ...] = numbered_field("deep")
    """Outputs of the dense layers."""
    wide: float
    """Number of keys that the wide branch looks up for a sample."""
    wide_weights: int
    """Number of weights of the wide branch, one per key."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Autoencoder(EmbeddingTables):
    """Dimensions of a variational autoencoder of a user's items."""

    latent: int
    """Size of the latent vector of a user."""
    items: int
    """Number of items that are scored."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SearchInterest(EmbeddingTables):
    """Dimensions of SIM."""

    long: int
    """Items of a user's history that the target attends to."""
    chosen: int
    """Number of best matching items among them, which the target attends to again."""
    short: int
    """Number of most recent items, over which two GRUs run."""
    state: int
    """Cells of a GRU."""
    first: tuple[int, ...] = numbered_field("first")
    """Outputs of the dense layers after the first stage."""
    second: tuple[int, ...] = numbered_field("second")
    """Outputs of the dense layers after the second stage."""
    auxiliary: tuple[int, ...] = numbered_field("auxiliary")
    """Outputs of the dense layers before each next item."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a recommender. It runs data-parallel, except for tables that are spread over ranks."""
    dims = workload.model.get_dimensions(EmbeddingTables)
    batch = shards.micro_batch.astype(float)
    net = NetworkBuilder(Numerics.from_workload(workload), batch, dims.dense_features, (1, 1, 1))
    ops, collectives = _build_look_ups(workload, batch)
    ARCHITECTURES[workload.model.family].build(net, dims)
    has_rows = dims.spread_tables
    row_wise = has_rows and frameworks.find_framework(workload).table_sharding == "row-wise"
    # With row-wise tables, a rank holds its part of the vectors, and scatters their gradients, for all ranks' samples.
    others = 2.0 * (shards.expert - 1) if row_wise else 0.0
    net.keep_elements(batch * (1.0 + others) * dims.tables * dims.width)
    net.add_training_pointwise("loss", batch, kernels=4)
    # Tables that are spread include those of the wide branch.
    weights = dims.table_weights + (dims.wide_weights if has_rows else 0.0)
    spread = weights / shards.expert
    block = build_uniform_block(
        "network",
        len(shards),
        (*ops, *net.ops),
        net.parameters + (0.0 if has_rows else weights),
        net.activation_bytes,
        collectives=tuple(collectives),
        working_bytes=net.working_bytes * np.ones(len(shards)),
        table_parameters=spread if has_rows else np.zeros(1),
    )
    return build_one_block_graph(block, 4.0 * (dims.lookups + dims.dense_features))


def _build_look_ups(workload: Workload, batch: Floats) -> tuple[list[Op], list[CollectiveCall]]:
    """Return the operators and collectives of the embedding look-ups and of the updates of the rows.

    All ranks hold equally many rows of the tables, so a rank serves as many keys as it requests.
    """
    dims, numerics = workload.model.get_dimensions(EmbeddingTables), Numerics.from_workload(workload)
    width, read, made = dims.width, batch * dims.lookups, batch * dims.tables
    differing = read * dims.distinct
    # Each row comes from memory once, however often a batch requests it, and one row is written for each table.
    ops = [
        Op(
            "tables",
            KernelTable.from_dimensions("embedding", "fp32", rows=(differing + made) / 2, cols=width, backward=0.0),
        )
    ]
    exchanged = [("keys", _KEY_BYTES * read, "forward"), ("vectors", numerics.element * made * width, "forward")]
    if numerics.training:
        exchanged.append(("vectors.gradient", numerics.element * made * width, "backward"))
        sort = layers.memory_pass("tables.sort", "fp32", read, _KEY_BYTES, _KEY_BYTES, "backward", count=_SORT_PASSES)
        scatter = KernelTable.from_dimensions("embedding", "fp32", rows=differing, cols=width, backward=1.0)
        ops += [sort, Op("tables.gradient", scatter, "backward")]
    moments = _MOMENTS.get(workload.optimizer, 0.0)
    if numerics.training and moments and dims.spread_tables:
        moved = 4.0 * (1.0 + moments), 4.0 * moments
        ops.append(layers.memory_pass("tables.update", "fp32", differing * width, *moved, "backward"))
    collectives = [CollectiveCall(name, "all_to_all", "expert", size, phase) for name, size, phase in exchanged]  # type: ignore[arg-type]
    return ops, collectives if dims.spread_tables else []


def _add_dense_layers(
    net: NetworkBuilder, outputs: Sequence[int], *, output: bool = False, dropout: bool = False
) -> None:
    """Add dense layers with these `outputs`, each followed by a ReLU.

    If the last layer is the `output` of the network, it has no ReLU. With `dropout`, a dropout follows each layer, and
    its input is saved in addition to the input of the next layer.
    """
    for number, width in enumerate(outputs, 1):
        net.add_dense(width)
        if not output or number < len(outputs):
            net.add_activation()
        if dropout:
            net.keep_elements(net.elements)
            net.add_dropout()


def build_dlrm(net: NetworkBuilder, dims: Dlrm) -> None:
    """Add the layers of DLRM or DCN v2.

    Dense features pass the `bottom` layers, whose last output is as wide as a row. DLRM multiplies all pairs of
    vectors. DCN v2 runs cross layers over the concatenated vectors. The `top` layers follow.
    """
    _add_dense_layers(net, dims.bottom)
    vectors = dims.tables + 1
    inputs = vectors * dims.width
    net.add_concatenation(int(inputs))
    if dims.cross_layers:
        for _ in range(dims.cross_layers):
            net.add_dense(dims.cross_rank, bias=False)
            net.add_dense(int(inputs))
            net.add_pointwise("cross", reads=3.0, backward=(4.0, 3.0))
    else:
        net.add_batched_matmul(vectors, vectors, dims.width)
        pairs = int(vectors * (vectors - 1) / 2 + dims.width)
        net.keep_elements(net.batch * inputs)
        net.add_concatenation(pairs)
    _add_dense_layers(net, dims.top, output=True)


def build_wide_and_deep(net: NetworkBuilder, dims: WideDeep) -> None:
    """Add the layers of Wide & Deep.

    The `deep` layers run over the concatenated vectors and dense features. In the wide branch, each of the `wide` keys
    of a sample selects one weight from a table.
    """
    net.add_concatenation(int(dims.tables * dims.width + dims.dense_features))
    _add_dense_layers(net, dims.deep, dropout=True)
    net.add_dense(1)
    net.ops += layers.embedding("wide", net.numerics, net.batch * dims.wide, 1.0)
    if not dims.spread_tables:
        net.parameters += dims.wide_weights
    net.add_branch()


def build_autoencoder(net: NetworkBuilder, dims: Autoencoder) -> None:
    """Add the layers of a variational autoencoder of a user's items.

    A dense layer maps the sum of the rows of the user's items to the mean and variance of `latent` numbers. A decoder
    maps a random sample of these numbers to one score for each of all `items`.
    """
    net.channels = int(dims.width)
    net.add_activation("tanh")
    net.add_dense(2 * dims.latent)
    net.channels = dims.latent
    net.add_pointwise("sample", reads=3.0, kernels=3)
    net.add_dense(int(dims.width))
    net.add_activation("tanh")
    net.add_dense(dims.items)
    net.add_cross_entropy()
    net.keep_elements(net.elements)


def _attend_to_items(net: NetworkBuilder, elements: Floats) -> None:
    """Add attention of a target item to a history of items with `elements` numbers: scores and a weighted sum.

    Both are an element-wise product and a sum along an axis (DeepLearningExamples, TensorFlow2 SIM,
    layers/item_item_interaction.py and item_sequence_interaction.py).
    """
    for name in ("scores", "weighted"):
        net.keep_elements(elements)
        net.add_pointwise(name, elements, writes=0.5, kernels=2, backward=(2.0, 3 / 2))


def _add_attention_unit(net: NetworkBuilder, dims: SearchInterest) -> None:
    """Add the network that scores each state of the first GRU against the target item.

    Its inputs are the target, the state, and their difference and product.

    The target is repeated for every state (DeepLearningExamples, TensorFlow2 SIM, DIENAttentionUnit).
    """
    batch, state = net.batch, dims.state
    net.channels = int(2 * dims.width)
    net.add_dense(state)
    net.add_activation("prelu")
    net.batch = batch * dims.short
    joined = net.batch * state
    net.keep_elements(4.0 * joined)
    net.add_pointwise("compare", joined, reads=2.0, writes=7 / 4, kernels=4, backward=(7 / 2, 9 / 4))
    net.channels = 4 * state
    for width in _ATTENTION_UNIT:
        net.add_dense(width)
        net.add_activation("sigmoid")
    net.add_dense(1)
    net.batch = batch


def build_search_interest(net: NetworkBuilder, dims: SearchInterest) -> None:
    """Add the layers of SIM, which searches the long history of a user.

    The target item attends to `long` items of the user's history, and to the best `chosen` of them. A GRU, attention
    and a second GRU run over the last `short` items (interest evolution), with an auxiliary network before each next
    item. Dense layers classify after the first and after the second stage.
    """
    item, batch = 2 * dims.width, net.batch
    # Each item is joined with its category, and the padding of histories is masked. Items that the user did not choose
    # are one more short history.
    for count in (dims.long, dims.chosen, dims.short, dims.short):
        net.add_concatenation(int(count * item))
        net.keep_elements(net.elements)
        net.add_pointwise("mask", absorbed=False, backward=(1.0, 1.0))
    for count in (dims.long, dims.chosen):
        _attend_to_items(net, batch * count * item)
    # The best items are gathered, averaged, and their gradient is scattered into zeros.
    best = batch * dims.chosen * item
    net.add_pointwise("gather", best, backward=(1.0, dims.long / dims.chosen))
    net.add_pointwise("average", best, writes=0.5, kernels=2, backward=(0.5, 1.0))
    net.ops += layers.elementwise("best", net.numerics, batch * dims.long, 4.0, 4.0, launches=4.0)
    state = dims.state
    sequence.add_recurrent(net, "evolution", dims.short, item, state, cell="gru")
    _add_attention_unit(net, dims)
    sequence.add_recurrent(net, "evolution", dims.short, state, state, cell="gru")
    # Attention scales the update gate of the second GRU, which cuDNN does not support: its gates are separate kernels.
    gates = _GATE_KERNELS * dims.short
    for phase in net.numerics.phases:
        net.ops += layers.elementwise("gates", net.numerics, batch * state, 2.0, 1.0, count=gates, phase=phase)
    net.batch = batch * 2.0 * (dims.short - 1.0)
    net.add_concatenation(int(state + item))
    _add_dense_layers(net, dims.auxiliary)
    net.add_dense(1)
    net.batch = batch
    for outputs, inputs in ((dims.first, 2 * item + dims.width), (dims.second, 3 * item + state + dims.width)):
        net.channels = int(inputs)
        _add_dense_layers(net, outputs)
        net.add_dense(1)


ARCHITECTURES: Mapping[str, Architecture[Any]] = {
    "dlrm": Architecture(Dlrm, build_dlrm, reads_images=False),
    "wide-deep": Architecture(WideDeep, build_wide_and_deep, reads_images=False),
    "vae-cf": Architecture(Autoencoder, build_autoencoder, reads_images=False),
    "sim": Architecture(SearchInterest, build_search_interest, reads_images=False),
}
"""Families of recommenders by name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Ncf(Dimensions):
    """Dimensions of neural collaborative filtering."""

    users: int
    items: int
    factors: int
    """Width of the product, and outputs of the last dense layer."""
    dense: tuple[int, int, int] = numbered_field("dense")
    """Inputs of the dense layers."""


def build_ncf(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of neural collaborative filtering, where a sample is a pair of user and item.

    The embeddings of the dense branch are half as wide as the inputs of its first layer.
    """
    dims, numerics = workload.model.get_dimensions(Ncf), Numerics.from_workload(workload)
    pairs = shards.micro_batch.astype(float)
    factors = dims.factors
    widths = [*dims.dense, factors]
    ops: list[Op] = []
    for branch, cols in (("product", factors), ("dense", widths[0] / 2)):
        for side in ("user", "item"):
            ops += layers.embedding(f"{branch}.{side}", numerics, pairs, cols)
    parameters = (dims.users + dims.items) * (factors + widths[0] / 2)
    ops += layers.pointwise("product", numerics, pairs * factors, reads=2.0, backward=(3.0, 2.0))
    ops += layers.pointwise("concatenate", numerics, pairs * widths[0])
    activation_bytes = 3 * pairs * factors + pairs * widths[0]
    for inputs, outputs in pairwise(widths):
        ops += layers.linear("dense", numerics, pairs, inputs, outputs, bias=True)
        ops += layers.pointwise("relu", numerics, pairs * outputs)
        if numerics.training:
            ops += layers.pointwise("dropout", numerics, pairs * outputs, mask_bytes=1.0, backward=(1.0, 1.0))
        parameters += inputs * outputs + outputs
        activation_bytes = activation_bytes + 2 * pairs * outputs
    ops += layers.linear("score", numerics, pairs, 2 * factors, 1.0, bias=True)
    parameters += 2 * factors + 1
    if numerics.training:
        ops += layers.pointwise("loss", numerics, pairs, kernels=3)
    block = build_uniform_block("network", len(shards), ops, parameters, numerics.element * activation_bytes)
    return build_one_block_graph(block, 20.0)
