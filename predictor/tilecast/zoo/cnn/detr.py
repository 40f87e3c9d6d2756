"""DETR: a transformer over the features of a ResNet, with learned queries as the decoder's tokens.

Source: Carion et al., arXiv 2005.12872, section 3.2 and appendix A.4. Matching of predictions to boxes runs on the host
and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo import layers
from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.detection import Detector, backbone
from tilecast.zoo.cnn.walk import Walk

_WIDTH, _HEADS, _INNER = 256, 8, 2048


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Detr(Detector):
    """Dimensions of DETR."""

    encoders: int
    """Layers over the pixels of the last stage."""
    decoders: int
    """Layers over the queries."""
    queries: int
    """Objects that are looked for."""
    classes: int = 91
    """Categories, without that of no object."""


def detr(walk: Walk, dims: Detr) -> None:
    """Write `encoders` layers over the last stage's pixels, then `decoders` layers over `queries`.

    For every query there is a class and a box (three dense layers): behind every decoder layer in training, behind the
    last one otherwise. Norms, stem and first stage of the ResNet are frozen.
    """
    backbone(walk, dims, frozen=True)
    walk.conv(_WIDTH, 1, bias=True)
    pixels, queries = float(walk.size[1] * walk.size[2]), dims.queries
    positions = walk.elements
    for _ in range(dims.encoders):
        walk.ops += layers.pointwise("positions", walk.numerics, positions, reads=2.0, backward=(1.0, 1.0))
        _placeless(walk, pixels)
        attention.attend(walk, pixels, pixels, _WIDTH, _HEADS)
        _rest(walk, pixels)
    _placeless(walk, pixels)
    walk.parameters += queries * _WIDTH
    for _ in range(dims.decoders):
        _placeless(walk, queries)
        attention.attend(walk, queries, queries, _WIDTH, _HEADS)
        attention.norm(walk, queries, _WIDTH)
        walk.ops += layers.pointwise("positions", walk.numerics, positions, reads=2.0, backward=(1.0, 1.0))
        walk.keep(positions)
        attention.attend(walk, queries, pixels, _WIDTH, _HEADS)
        _rest(walk, queries)
    attention.norm(walk, queries, _WIDTH)
    asked = queries * (dims.decoders if walk.numerics.training else 1.0)
    attention.linear(walk, asked, _WIDTH, dims.classes + 1)
    for outputs in (_WIDTH, _WIDTH, 4):
        attention.linear(walk, asked, _WIDTH, outputs)
    walk.shape = 1, (1, 1, int(asked))
    walk.loss(1)


def _placeless(walk: Walk, tokens: float) -> None:
    """Keep the tokens without positions.

    Values are projected from tokens without positions, queries and keys from tokens with positions, so both are kept.
    """
    walk.keep(walk.batch * tokens * _WIDTH)


def _rest(walk: Walk, tokens: float) -> None:
    attention.norm(walk, tokens, _WIDTH)
    attention.feed_forward(walk, tokens, _WIDTH, _INNER)
    attention.norm(walk, tokens, _WIDTH)
