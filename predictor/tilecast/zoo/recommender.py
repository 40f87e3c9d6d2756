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

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tilecast import frameworks
from tilecast.graph import Block, CollectiveCall, Graph, KernelTable, Op, Shards
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


@dataclass(frozen=True, slots=True)
class Recommender:
    """The function that writes a family, and the dimensions of `Model.extra` that it needs besides `_TABLES`."""

    write: Callable[[Walk, Mapping[str, float]], None]
    needs: tuple[str, ...] = ()


_TABLES = ("table_weights", "tables", "lookups", "width")


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of one block, data parallel except for tables that are spread."""
    extra = workload.model.extra
    batch = shards.micro_batch.astype(float)
    walk = Walk(Numerics.of(workload), batch, int(extra.get("dense_features", 0)), (1, 1, 1))
    ops, collectives = _tables(workload, batch)
    NETWORKS[workload.model.family].write(walk, extra)
    has_rows = bool(extra.get("spread_tables"))
    row_wise = has_rows and frameworks.of(workload).table_sharding == "row-wise"
    # With row-wise tables, a rank holds its part of the vectors, and scatters their gradients, for all ranks' samples.
    others = 2.0 * (shards.expert - 1) if row_wise else 0.0
    walk.keep(batch * (1.0 + others) * extra["tables"] * extra["width"])
    if walk.numerics.training:
        walk.ops += layers.pointwise("loss", walk.numerics, batch, kernels=4)
    weights = _table_weights(extra) / (shards.expert if has_rows else np.ones(len(shards)))
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
    features = extra["lookups"] + extra.get("dense_features", 0.0)
    return Graph((), (block,), (), np.zeros(len(shards)), len(shards), host_bytes_per_sample=4.0 * features)


def _table_weights(extra: Mapping[str, float]) -> float:
    """Return the weights of all tables, the wide ones among them if tables are spread."""
    return extra["table_weights"] + (extra.get("wide_weights", 0.0) if extra.get("spread_tables") else 0.0)


def _tables(workload: Workload, batch: Floats) -> tuple[list[Op], list[CollectiveCall]]:
    """Return the look-ups, their gradients, and the collectives of both between ranks.

    All ranks hold equal shares of the tables, so a rank answers as many keys as it requests.
    """
    extra, numerics = workload.model.extra, Numerics.of(workload)
    width, read, made = extra["width"], batch * extra["lookups"], batch * extra["tables"]
    differing = read * extra.get("distinct", 1.0)
    # Each row comes from memory once, however often a batch requests it, and one row is written for each table.
    ops = [Op("tables", KernelTable.of("embedding", "fp32", rows=(differing + made) / 2, cols=width, backward=0.0))]
    exchanged = [("keys", _KEY_BYTES * read, "forward"), ("vectors", numerics.element * made * width, "forward")]
    if numerics.training:
        exchanged.append(("vectors.gradient", numerics.element * made * width, "backward"))
        sort = KernelTable.of("elementwise", "fp32", elements=read, read_bytes=_KEY_BYTES, written_bytes=_KEY_BYTES)
        scatter = KernelTable.of("embedding", "fp32", rows=differing, cols=width, backward=1.0)
        ops += [Op("tables.sort", sort, "backward", count=_SORT_PASSES), Op("tables.gradient", scatter, "backward")]
    moments = _MOMENTS.get(workload.optimizer, 0.0)
    if numerics.training and moments and extra.get("spread_tables"):
        update = KernelTable.of(
            "elementwise",
            "fp32",
            elements=differing * width,
            read_bytes=4.0 * (1.0 + moments),
            written_bytes=4.0 * moments,
        )
        ops.append(Op("tables.update", update, "backward"))
    collectives = [CollectiveCall(name, "all_to_all", "expert", size, phase) for name, size, phase in exchanged]  # type: ignore[arg-type]
    return ops, collectives if extra.get("spread_tables") else []


def _dense(walk: Walk, extra: Mapping[str, float], name: str, *, output: bool = False, dropout: bool = False) -> None:
    """Write dense layers of `name`1, `name`2, ... outputs, each with a ReLU.

    The last layer has no ReLU if it is the network's `output`. With `dropout`, each layer has one after it, whose input
    is kept besides the input of the next layer.
    """
    number = 1
    while f"{name}{number}" in extra:
        walk.dense(int(extra[f"{name}{number}"]))
        number += 1
        if not output or f"{name}{number}" in extra:
            walk.activate()
        if dropout:
            walk.keep(walk.elements)
            walk.dropout()


def dlrm(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write DLRM or DCN v2.

    Dense features pass `bottom` layers, which end in the width of the tables' vectors. Then follow the products of all
    pairs of vectors, or `cross_layers` of rank `cross_rank` over all vectors side by side, and `top` layers.
    """
    _dense(walk, extra, "bottom")
    vectors = extra["tables"] + 1
    inputs = vectors * extra["width"]
    walk.concatenate(int(inputs))
    if "cross_layers" in extra:
        for _ in range(int(extra["cross_layers"])):
            walk.linear(int(extra["cross_rank"]))
            walk.dense(int(inputs))
            walk.ops += layers.pointwise("cross", walk.numerics, walk.elements, reads=3.0, backward=(4.0, 3.0))
    else:
        walk.products(vectors, vectors, extra["width"])
        pairs = int(vectors * (vectors - 1) / 2 + extra["width"])
        walk.keep(walk.batch * inputs)
        walk.concatenate(pairs)
    _dense(walk, extra, "top", output=True)


def wide_and_deep(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write Wide & Deep.

    Vectors and dense features side by side pass `deep` layers. Beside them stands one weight for each key of `wide`
    look-ups, from `wide_weights` in all, which are a table like the others.
    """
    walk.concatenate(int(extra["tables"] * extra["width"] + extra.get("dense_features", 0.0)))
    _dense(walk, extra, "deep", dropout=True)
    walk.dense(1)
    walk.ops += layers.embedding("wide", walk.numerics, walk.batch * extra["wide"], 1.0)
    if not extra.get("spread_tables"):
        walk.parameters += extra["wide_weights"]
    walk.add()


def autoencoder(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write a variational autoencoder of a user's items.

    A bag of the items (the look-ups) passes a dense layer to mean and variance of `latent` numbers; a sample of those
    is decoded to a multinomial over all `items`.
    """
    walk.channels = int(extra["width"])
    walk.activate("tanh")
    walk.dense(2 * int(extra["latent"]))
    walk.channels = int(extra["latent"])
    walk.ops += layers.pointwise("sample", walk.numerics, walk.elements, reads=3.0, kernels=3)
    walk.dense(int(extra["width"]))
    walk.activate("tanh")
    walk.dense(int(extra["items"]))
    walk.loss()
    walk.keep(walk.elements)


def search_interest(walk: Walk, extra: Mapping[str, float]) -> None:
    """Write SIM.

    The target item attends to `long` items of the user's history, and to the best `chosen` of them. A GRU, attention
    and a GRU of `state` cells run over the last `short` items (interest evolution), with an auxiliary network before
    each next item. Dense layers `first` and `second` classify after the first and the second stage.
    """
    item, batch = 2 * extra["width"], walk.batch
    # Each item is joined with its category, and the padding of histories is masked. Items that the user did not choose
    # are one more short history.
    for count in (extra["long"], extra["chosen"], extra["short"], extra["short"]):
        walk.concatenate(int(count * item))
        walk.keep(walk.elements)
        walk.ops += layers.pointwise("mask", walk.numerics, walk.elements, absorbed=False, backward=(1.0, 1.0))
    for count in (extra["long"], extra["chosen"], extra["short"]):
        walk.products(1.0, count, item)
        walk.products(1.0, item, count)
    walk.ops += layers.elementwise("best", walk.numerics, batch * extra["long"], 4.0, 4.0, launches=4.0)
    state = extra["state"]
    for inputs in (item, state):
        ops, parameters, activation_bytes = recurrent(
            "evolution", walk.numerics, batch=batch, steps=extra["short"], inputs=inputs, hidden=state, cell="gru"
        )
        walk.ops += ops
        walk.parameters += parameters
        walk.keep(activation_bytes)
    # Attention scales the update gate of the second GRU, which cuDNN does not support: its gates are separate kernels.
    gates = _GATE_KERNELS * extra["short"]
    for phase in ("forward", "backward") if walk.numerics.training else ("forward",):
        walk.ops += layers.elementwise("gates", walk.numerics, batch * state, 2.0, 1.0, count=gates, phase=phase)
    walk.batch = batch * 2.0 * (extra["short"] - 1.0)
    walk.concatenate(int(state + item))
    _dense(walk, extra, "auxiliary")
    walk.dense(1)
    walk.batch = batch
    for name, inputs in (("first", 2 * item + extra["width"]), ("second", 3 * item + state + extra["width"])):
        walk.channels = int(inputs)
        _dense(walk, extra, name)
        walk.dense(1)


NETWORKS: Mapping[str, Recommender] = {
    "dlrm": Recommender(dlrm, ("dense_features", "bottom1", "top1")),
    "wide-deep": Recommender(wide_and_deep, ("deep1", "wide", "wide_weights")),
    "vae-cf": Recommender(autoencoder, ("latent", "items")),
    "sim": Recommender(search_interest, ("long", "chosen", "short", "state", "first1", "second1", "auxiliary1")),
}
"""Families of recommenders by name."""


def needs(family: str) -> tuple[str, ...]:
    """Return the names of the dimensions that a family needs."""
    return (*_TABLES, *NETWORKS[family].needs)
