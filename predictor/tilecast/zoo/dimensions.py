"""Dimensions of transformers, which several families share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilecast.model import Dimensions, Model, Problem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Transformer(Dimensions):
    """Dimensions of a stack of transformer layers: a decoder, an encoder, an encoder-decoder, or a tower."""

    experts: int = 0
    """Number of experts in a layer that has experts. 0 if no layer has."""
    top_k: int = 1
    """Number of experts to which each token is routed."""
    expert_groups: int = 1
    """Equal groups of neighbouring experts."""
    top_groups: int = 1
    """Number of groups from which the experts of a token are chosen (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    capacity_factor: float = 1.0
    """Ratio of the tokens for which experts have room to the tokens routed to them."""
    moe_every: int = 1
    """Distance between layers with experts. 1 if each has experts."""
    first_dense: int = 0
    """Number of layers without experts at the beginning."""
    dense_ffn_hidden: int | None = None
    """Width of the MLP in layers without experts. None for `Model.ffn_hidden`."""
    expert_hidden: int = 0
    """Width of the tokens that experts read and write. 0 for `Model.hidden`.

    Two projections of all tokens surround such experts (latent experts of Nemotron 3).
    """
    prediction_layers: int = 0
    """Number of further layers that predict later tokens (multi-token prediction).

    Each has its own projection, and shares the model's embedding and head (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """
    shared_ffn_hidden: int = 0
    """Width of the shared MLP that all tokens pass, in addition to their experts."""
    sliding_window: int = 0
    """Number of tokens that local attention reaches. 0 for all."""
    attention_chunk: int = 0
    """Tokens per chunk of the sequence outside which local attention does not reach. 0 for no chunks."""
    global_every: int | None = None
    """Distance between layers that attend to all tokens, if the others are local. None if no layer does."""
    global_projections: int = 0
    """Further dense layers for queries, keys and values of those encoder tokens that see all others.

    Source: Longformer, arXiv 2004.05150, section 3.1.
    """
    memory_width: int | None = None
    """Width of the tokens that cross-attention reads. None for `Model.hidden`."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias. It is not priced."""
    qk_norm: bool = False
    """Whether queries and keys are normed. It is not priced."""
    capped_scores: bool = False
    """Whether a tanh caps the scores of attention."""
    capped_logits: bool = False
    """Whether a tanh caps the logits."""
    output_norms: bool = False
    """Whether the outputs of attention and MLP are also normed, not only their inputs."""
    activation_clamp: float = 0.0
    """Limit on the inputs of an activation. 0 for none."""
    tanh_gelu: bool = False
    hand_written: bool = False
    """Whether norms and activations are written in element-wise operators, as in teaching code."""
    embedding_norm: bool = False
    """Whether a norm follows the embedding."""
    embedding_hidden: int | None = None
    """Width of the embedding; None: `Model.hidden`."""
    token_types: int = 0
    """Kinds of segments, each with an embedding."""
    final_norm: bool = True
    """Whether a norm follows the last layer."""
    head_share: float = 1.0
    """Share of the tokens for which the head computes scores."""
    head_vocab: int | None = None
    """Number of outputs of the head per token. None for `Model.vocab`."""
    head_transform: bool = False
    """Whether the head has a dense layer, an activation and a norm before its projection."""
    pooler: bool = False
    """Whether a dense layer reads one token per sample."""
    classes: int = 0
    """Number of outputs of a head that classifies samples. 0 if the head scores tokens."""
    decoder_layers: int | None = None
    """Number of decoder layers in an encoder-decoder. None for half of all layers."""
    encoder_length: float | None = None
    """Tokens that an encoder-decoder encodes; None: the sequence length."""
    decoder_length: int | None = None
    """Tokens that an encoder-decoder decodes; None: the sequence length."""
    text_length: int = 0
    """Number of tokens to which every text is padded. 0 if texts are not padded."""

    @property
    def caps_scores(self) -> bool:
        return self.capped_scores

    def problems(self, model: Model) -> Iterator[Problem]:
        """Yield dimensions that contradict each other, each with the problem and a remedy."""
        if self.experts and not 1 <= self.top_k <= self.experts:
            yield "top_k", f"{self.top_k} is not from 1 to the {self.experts} experts", "choose a number in between"
        if self.experts and not (1 <= self.top_groups <= self.expert_groups <= self.experts):
            problem = f"{self.top_groups} of {self.expert_groups} groups of the {self.experts} experts is impossible"
            yield "top_groups", problem, "choose at most the groups, and at most the experts as groups"
        if self.first_dense > model.layers:
            problem = f"{self.first_dense} is more than the {model.layers} layers"
            yield "first_dense", problem, "choose at most the layers"

    def count_decoder_layers(self, model: Model) -> int:
        """Return the number of decoder layers of an encoder-decoder."""
        return model.layers // 2 if self.decoder_layers is None else self.decoder_layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Experts(Transformer):
    """Dimensions of a transformer with a mixture of experts."""

    experts: int
