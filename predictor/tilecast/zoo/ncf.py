"""Neural collaborative filtering (He et al., arXiv 1708.05031, section 3.4).

Embeddings of a user and an item are multiplied in one branch and read by dense layers in the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tilecast.graph import Block, Graph, Op, Shards
from tilecast.model import Dimensions, numbered
from tilecast.spec import Workload
from tilecast.zoo import layers
from tilecast.zoo.numerics import Numerics


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Ncf(Dimensions):
    """Dimensions of neural collaborative filtering."""

    users: int
    items: int
    factors: int
    """Width of the product, and outputs of the last dense layer."""
    dense: tuple[int, int, int] = numbered("dense")
    """Inputs of the dense layers."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of one block, data parallel only; a sample is a pair of user and item.

    The embeddings of the dense branch are half as wide as the inputs of its first layer.
    """
    dims, numerics = workload.model.own(Ncf), Numerics.of(workload)
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
    count = len(shards)
    block = Block(
        "network", 1, tuple(ops), np.full(count, parameters), np.stack([numerics.element * activation_bytes] * 3)
    )  # fmt: skip
    return Graph((), (block,), (), np.zeros(count), count, host_bytes_per_sample=20.0)
