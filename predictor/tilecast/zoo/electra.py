"""ELECTRA pretraining: a small generator fills in masked tokens, and a discriminator detects replaced ones.

Clark et al., arXiv 2003.10555, section 2; sizes in appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast.graph import Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import transformer
from tilecast.zoo.dimensions import Transformer

_HEAD_DIM = 64
"""Width of a head in the generators of every published size."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Electra(Transformer):
    """Dimensions of the discriminator, and of the generator where they differ."""

    generator_hidden: int
    """Width of the generator."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of both networks.

    The generator has as many layers as the discriminator. It runs before the discriminator's layers and shares its
    token embedding, of width `hidden`. It predicts `head_share` of the tokens; the discriminator's head has one output
    and scores all tokens.
    """
    model = workload.model
    width = model.own(Electra).generator_hidden
    heads = width // _HEAD_DIM
    generator = replace(
        model.having(embedding_hidden=model.hidden), hidden=width, heads=heads, kv_heads=heads, head_dim=_HEAD_DIM,
        ffn_hidden=4 * width,
    )  # fmt: skip
    discriminator = model.having(head_share=1.0, head_vocab=1)
    small = transformer.build(replace(workload, model=generator), shards)
    large = transformer.build(replace(workload, model=discriminator), shards)
    prediction = transformer.build(workload, shards).last
    (embedding,) = small.first
    projection = float(model.hidden * width + width)
    embedding = replace(embedding, parameters=np.full_like(embedding.parameters, projection))
    generating = (embedding, *small.layers, *prediction)
    named = tuple(replace(block, name=f"generator-{block.name}") for block in generating)
    return replace(large, first=(*named, *large.first))
