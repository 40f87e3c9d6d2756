"""The classifier of a face recogniser, with one column of weights per identity.

Weights and embeddings are normalised, and the true identity has a margin (Deng et al., arXiv 1801.07698, section 3.1).
A step may use a sample of the identities only (An et al., arXiv 2010.05222, section 3.2).

Expert parallelism shards the identities. Every rank then receives the embeddings of all ranks' samples and holds the
logits of its own identities, and the softmax exchanges a maximum and a sum per sample.
"""

from __future__ import annotations

import numpy as np

from tilecast.graph import Block, CollectiveCall, Shards
from tilecast.spec import Workload
from tilecast.zoo import layers
from tilecast.zoo.cnn.resnet import FaceResNet
from tilecast.zoo.numerics import Numerics

WIDTH = 512
"""Width of an embedding."""


def classifier(workload: Workload, shards: Shards) -> Block:
    """Return the block behind the network for `identities`; each step uses the share `sampled` of them."""
    dims, numerics = workload.model.own(FaceResNet), Numerics.of(workload)
    ranks = shards.expert.astype(float)
    rows = shards.micro_batch * ranks
    held = dims.identities / ranks
    share = dims.sampled
    seen = held * share
    ops = []
    if share < 1 and numerics.training:
        ops += layers.elementwise("sample", numerics, held, 4.0, 4.0, launches=4.0)
        ops += layers.embedding("sample.weights", numerics, seen, float(WIDTH))
    ops += layers.pointwise("norm", numerics, seen * WIDTH, kernels=2, absorbed=False)
    ops += layers.linear("logits", numerics, rows, WIDTH, seen)
    ops += layers.pointwise("margin", numerics, rows * seen, kernels=2, backward=(1.0, 1.0))
    collectives = [CollectiveCall("embeddings", "all_gather", "expert", numerics.element * rows * WIDTH)]
    if numerics.training:
        ops += layers.cross_entropy("loss", numerics, rows, seen)
        collectives.append(CollectiveCall("softmax", "all_reduce", "expert", 4.0 * rows, count=2.0))
        gradient = numerics.element * rows * WIDTH
        collectives.append(CollectiveCall("embeddings.gradient", "reduce_scatter", "expert", gradient, "backward"))
    activation_bytes, scratch = layers.logit_bytes(numerics)
    activations = rows * seen * (activation_bytes + numerics.element)
    weights = held * WIDTH
    return Block(
        "classifier",
        1,
        tuple(ops),
        weights,
        np.stack([activations] * 3),
        tuple(collectives),
        expert_parameters=weights,
        working_bytes=scratch * rows * seen + 2 * numerics.element * seen * WIDTH,
    )
