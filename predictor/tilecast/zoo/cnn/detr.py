"""DETR: a transformer over the features of a ResNet, with learned queries as the decoder's tokens.

Source: Carion et al., arXiv 2005.12872, section 3.2 and appendix A.4. Predictions are matched to boxes on the host,
after every decoder layer (facebookresearch/detr, models/matcher.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo.cnn import attention
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.detection import Detector, add_backbone

_WIDTH, _HEADS, _INNER = 256, 8, 2048


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Detr(Detector):
    """Dimensions of DETR."""

    encoders: int
    """Number of encoder layers, over the pixels of the last stage."""
    decoders: int
    """Number of decoder layers, over the queries."""
    queries: int
    """Number of queries, each of which looks for one object."""
    classes: int = 91
    """Number of categories, without the one for no object."""


def build_detr(net: NetworkBuilder, dims: Detr) -> None:
    """Build DETR: a ResNet, encoder layers over the pixels of its last stage, and decoder layers over queries.

    Each query predicts a class with one dense layer and a box with three. In training the prediction is repeated after
    every decoder layer. The norms, the stem and the first stage of the ResNet are frozen.
    """
    add_backbone(net, dims, frozen=True)
    net.add_conv(_WIDTH, 1, bias=True)
    pixels, queries = float(net.size[1] * net.size[2]), dims.queries
    positions = net.elements
    for _ in range(dims.encoders):
        net.add_pointwise("positions", positions, reads=2.0, backward=(1.0, 1.0))
        _keep_tokens_without_positions(net, pixels)
        attention.add_multi_head_attention(net, pixels, pixels, _WIDTH, _HEADS)
        _add_feed_forward(net, pixels)
    _keep_tokens_without_positions(net, pixels)
    net.parameters += queries * _WIDTH
    for _ in range(dims.decoders):
        _keep_tokens_without_positions(net, queries)
        attention.add_multi_head_attention(net, queries, queries, _WIDTH, _HEADS)
        attention.add_layer_norm(net, queries, _WIDTH)
        net.add_pointwise("positions", positions, reads=2.0, backward=(1.0, 1.0))
        net.keep_elements(positions)
        attention.add_multi_head_attention(net, queries, pixels, _WIDTH, _HEADS)
        _add_feed_forward(net, queries)
    attention.add_layer_norm(net, queries, _WIDTH)
    asked = queries * (dims.decoders if net.numerics.training else 1.0)
    attention.add_dense(net, asked, _WIDTH, dims.classes + 1)
    for outputs in (_WIDTH, _WIDTH, 4):
        attention.add_dense(net, asked, _WIDTH, outputs)
    net.shape = 1, (1, 1, int(asked))
    net.add_cross_entropy(1)
    for _ in range(dims.decoders):
        # Costs and losses of a layer; copies and assignments of each image on the host (models/matcher.py, detr.py).
        net.add_host_operator("match", 115.0 + 8.0 * net.batch, 40.0 + net.batch)


def _keep_tokens_without_positions(net: NetworkBuilder, tokens: float) -> None:
    """Count as saved the tokens before position embeddings are added, which the value projection reads."""
    net.keep_elements(net.batch * tokens * _WIDTH)


def _add_feed_forward(net: NetworkBuilder, tokens: float) -> None:
    """Add the two dense layers of a transformer layer, with a layer norm before and after them."""
    attention.add_layer_norm(net, tokens, _WIDTH)
    attention.add_feed_forward(net, tokens, _WIDTH, _INNER)
    attention.add_layer_norm(net, tokens, _WIDTH)
