"""Token mixers: the sublayers that replace attention in state-space and hybrid models.

The mixers are state-space layers, linear attention, gated recurrences and short convolutions.

Sources: Mamba, arXiv 2312.00752 (section 3.3: one fused scan that reads its inputs and writes its output once, and
computes the states again in the backward pass); Mamba-2, arXiv 2405.21060 (section 6: the scan as matrix products
inside chunks and a recurrence over chunks); Lightning Attention-2, arXiv 2401.04658 (the same without decay by token);
Gated DeltaNet, arXiv 2412.06464 (section 3.3: two further products for each chunk); Griffin, arXiv 2402.19427 (section
2.4); RWKV, arXiv 2305.13048 (section 3); LFM2's short convolutions as in transformers.

Scans are priced by the memory they move. The exponentials of Mamba's scan, one for each element and state, are not
priced. Tensor parallelism splits channels and heads as Megatron's Mamba layers do (arXiv 2406.07887, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tilecast.graph import Op
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import (
    Linear,
    RankSizes,
    Sublayer,
    build_residual_sum,
    count_norm_parameters,
    list_tensor_parallel_collectives,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Hybrid(Transformer):
    """Dimensions of a state-space model or of a hybrid with attention.

    A dimension is 0 if no layer of the model needs it.
    """

    pattern: tuple[str, ...] = ()
    """Kind of each layer. `tilecast.zoo.hybrid` explains the words."""
    window: int = 0
    """Tokens that local attention reaches."""
    inner: int = 0
    """Channels of a mixer."""
    inner_head: int = 0
    """Channels per head of a mixer. 0 if it has no heads."""
    groups: int = 0
    """Groups of heads that share inputs and outputs."""
    state: int = 0
    """Size of the state of a channel, or width of a key."""
    step_rank: int = 0
    """Width of the vector from which step sizes are computed."""
    key_heads: int = 0
    """Heads of keys of a mixer."""
    kernel: int = 0
    """Number of tokens that a convolution reads."""
    chunk: int = 0
    """Tokens per chunk of a recurrence. 0 for the usual number."""
    shared_blocks: int = 0
    """Number of copies of the shared layer's weights."""
    mlp_adapter: int = 0
    """Rank of the MLP adapter at each place of the shared layer. 0 if there is none."""
    attention_adapter: int = 0
    """Rank of the attention adapter at each place of the shared layer. 0 if there is none."""


@dataclass(slots=True)
class Mixer:
    """A token mixer under construction: its operators, its parameters, and the bytes saved for the backward pass.

    Parameters and bytes have one value for each of the S distinct shards of the plans, (S,).
    """

    name: str
    workload: Workload
    rank: RankSizes
    dims: Hybrid = field(init=False)
    numerics: Numerics = field(init=False)
    ops: list[Op] = field(init=False)
    parameters: Floats = field(init=False)
    activation_bytes: Floats = field(init=False)
    linears: list[Linear] = field(default_factory=list)

    def __post_init__(self) -> None:
        model, self.numerics = self.workload.model, Numerics.from_workload(self.workload)
        self.dims = model.get_dimensions(Hybrid)
        outer = self.rank.outer_tokens
        self.ops = layers.norm(f"{self.name}.norm", self.numerics, outer, model.hidden, rms=model.rms_norm)
        self.parameters = count_norm_parameters(model) * np.ones_like(self.rank.tensor)
        self.activation_bytes = (2 * self.numerics.element + self.numerics.norm_extra) * outer * model.hidden

    def add_linear(self, label: str, inputs: Floats | float, outputs: Floats | float) -> None:
        """Add a dense layer over the tokens. The bytes of its input are not counted: call `keep_tensor` for that."""
        name = f"{self.name}.{label}"
        self.ops += layers.linear(name, self.numerics, self.rank.tokens, inputs, outputs)
        self.parameters = self.parameters + inputs * outputs
        self.linears.append(Linear(name, self.rank.tokens, inputs, outputs))

    def keep_tensor(self, width: Floats | float) -> None:
        """Count a tensor of `width` numbers per token as saved for the backward pass."""
        self.activation_bytes = self.activation_bytes + self.numerics.element * self.rank.tokens * width

    def add_pointwise(self, label: str, width: Floats | float, *, reads: float = 1.0, kernels: int = 1) -> None:
        """Add an element-wise pass over `width` numbers per token."""
        name, backward = f"{self.name}.{label}", (reads + 1.0, reads)
        elements = self.rank.tokens * width
        self.ops += layers.pointwise(name, self.numerics, elements, reads=reads, kernels=kernels, backward=backward)

    def add_convolution(self, width: Floats | float, kernel: float) -> None:
        """Add a causal depthwise convolution over the tokens, with a bias and an activation in the same kernel."""
        self.add_pointwise("convolution", width)
        self.parameters = self.parameters + width * (kernel + 1.0)
        self.keep_tensor(width)

    def add_norm(self, width: Floats | float) -> None:
        """Add a norm over `width` numbers per token."""
        self.ops += layers.norm(f"{self.name}.inner-norm", self.numerics, self.rank.tokens, width, rms=True)  # type: ignore[arg-type]
        self.parameters = self.parameters + width
        self.keep_tensor(width)

    def add_chunked_recurrence(
        self, chunk: float, heads: Floats, groups: Floats, state: float, value: float, delta: bool
    ) -> None:
        """Add a linear recurrence over `heads` states of `state` x `value` numbers, as matrix products within chunks.

        The products are: keys with the queries of each group; their scores with the values; the state of the chunk; and
        the previous state with the queries. With `delta`, two more products compute the change of each token.
        """
        chunk = min(chunk, self.rank.sequence)
        chunks = self.rank.tokens / chunk
        shapes = [
            ("scores", groups, chunk, chunk, state),
            ("values", heads, chunk, value, chunk),
            ("state", heads, state, value, chunk),
            ("read", heads, chunk, value, state),
        ]
        if delta:
            shapes += [("keys", heads, chunk, chunk, state), ("solve", heads, chunk, value + state, chunk)]
        for label, batch, m, n, k in shapes:
            self.ops += layers.matrix_products(
                f"{self.name}.{label}",
                self.numerics.unquantized,
                chunks * batch,
                ("", m, n, k),
                (".left-gradient", m, k, n),
                (".right-gradient", k, n, m),
            )
        states = chunks * heads * state * value
        self.ops += layers.pointwise(f"{self.name}.carry", replace(self.numerics, element=4.0), states)

    def build_sublayer(self) -> Sublayer:
        """Return the sublayer, with the residual sum after it and the collectives of tensor parallelism."""
        h, outer = self.workload.model.hidden, self.rank.outer_tokens
        ops = [*self.ops, *build_residual_sum(f"{self.name}.residual", self.numerics, outer * h, dropout=False)]
        collectives = list_tensor_parallel_collectives(self.name, self.workload, self.rank)
        kept, linears = self.activation_bytes, tuple(self.linears)
        return Sublayer(ops, collectives, self.parameters, kept, selected=kept, linears=linears)


def _add_mamba(mixer: Mixer) -> None:
    """Add Mamba: `inner` channels with `state` numbers each, and step sizes from a vector of `step_rank`."""
    dims, h = mixer.dims, float(mixer.workload.model.hidden)
    inner, state, rank = dims.inner / mixer.rank.tensor, dims.state, dims.step_rank
    mixer.add_linear("input", h, 2 * inner)
    mixer.keep_tensor(2 * inner)
    mixer.add_convolution(inner, dims.kernel)
    mixer.add_linear("step-input-output", inner, rank + 2 * state)
    mixer.add_linear("step", rank, inner)
    mixer.keep_tensor(inner + rank + 2 * state)
    mixer.add_pointwise("scan", inner, reads=3.0)
    mixer.keep_tensor(inner)
    mixer.parameters = mixer.parameters + inner * (state + 2.0)
    mixer.add_linear("output", inner, h)


def _add_mamba2(mixer: Mixer) -> None:
    """Add Mamba-2: `inner` channels in heads of `inner_head`.

    The channels of a head share a step size. The heads of a group share inputs and outputs of `state` numbers.
    """
    dims, h, t = mixer.dims, float(mixer.workload.model.hidden), mixer.rank.tensor
    inner, width = dims.inner / t, dims.inner_head
    heads, groups, state = inner / width, np.maximum(dims.groups / t, 1.0), dims.state
    mixed = inner + 2 * groups * state
    mixer.add_linear("input", h, inner + mixed + heads)
    mixer.keep_tensor(inner + mixed)
    mixer.add_convolution(mixed, dims.kernel)
    mixer.add_chunked_recurrence(dims.chunk or 256, heads, groups, state, width, delta=False)
    mixer.keep_tensor(inner)
    mixer.add_pointwise("gate", inner, reads=2.0)
    mixer.add_norm(inner)
    mixer.parameters = mixer.parameters + 3 * heads
    mixer.add_linear("output", inner, h)


def _add_linear_attention(mixer: Mixer) -> None:
    """Add Lightning attention: queries, keys and values of every head, and a gate after their norm."""
    model, h = mixer.workload.model, float(mixer.workload.model.hidden)
    heads = model.heads / mixer.rank.tensor
    width = heads * model.head_dim
    mixer.add_linear("qkv", h, 3 * width)
    mixer.keep_tensor(3 * width)
    mixer.add_chunked_recurrence(mixer.dims.chunk or 256, heads, heads, model.head_dim, model.head_dim, False)
    mixer.add_norm(width)
    mixer.add_linear("gate", h, width)
    mixer.keep_tensor(2 * width)
    mixer.add_pointwise("gated", width, reads=2.0)
    mixer.add_linear("output", width, h)


def _add_delta(mixer: Mixer) -> None:
    """Add Gated DeltaNet.

    Keys have `key_heads` heads of width `state`. Values have `inner` channels, in heads of width `inner_head`.
    """
    dims, h, t = mixer.dims, float(mixer.workload.model.hidden), mixer.rank.tensor
    values, width, state = dims.inner / t, dims.inner_head, dims.state
    heads, keys = values / width, dims.key_heads / t
    mixed = 2 * keys * state + values
    mixer.add_linear("input", h, mixed + values + 2 * heads)
    mixer.keep_tensor(mixed + values)
    mixer.add_convolution(mixed, dims.kernel)
    mixer.add_chunked_recurrence(dims.chunk or 64, heads, keys, state, width, delta=True)
    mixer.add_norm(values)
    mixer.add_pointwise("gated", values, reads=2.0)
    mixer.keep_tensor(values)
    mixer.parameters = mixer.parameters + 2 * heads
    mixer.add_linear("output", values, h)


def _add_recurrent(mixer: Mixer) -> None:
    """Add the recurrent block of Griffin, which has two branches of `inner` channels.

    One branch has a convolution and a gated linear recurrence. The gates are block-diagonal by head.
    """
    model, h = mixer.workload.model, float(mixer.workload.model.hidden)
    inner = mixer.dims.inner / mixer.rank.tensor
    mixer.add_linear("input", h, 2 * inner)
    mixer.keep_tensor(2 * inner)
    mixer.add_convolution(inner, mixer.dims.kernel)
    mixer.add_linear("gates", inner, 2 * mixer.dims.inner / model.heads)
    mixer.keep_tensor(2 * inner)
    mixer.add_pointwise("scan", inner, reads=3.0, kernels=2)
    mixer.keep_tensor(2 * inner)
    mixer.add_pointwise("gated", inner, reads=2.0)
    mixer.add_linear("output", inner, h)


def _add_short_convolution(mixer: Mixer) -> None:
    """Add a convolution over few tokens between two gates.

    The convolution and the gates are as wide as the hidden state.
    """
    h, width = float(mixer.workload.model.hidden), mixer.workload.model.hidden / mixer.rank.tensor
    mixer.add_linear("input", h, 3 * width)
    mixer.keep_tensor(3 * width)
    mixer.add_pointwise("gates", width, reads=2.0, kernels=2)
    mixer.add_convolution(width, mixer.dims.kernel)
    mixer.keep_tensor(width)
    mixer.add_linear("output", width, h)


def _add_rwkv(mixer: Mixer) -> None:
    """Add RWKV: receptance, keys and values, a scan, and a further receptance that gates the following MLP.

    Receptance, keys and values are computed from each token mixed with the previous token.
    """
    h, inner = float(mixer.workload.model.hidden), mixer.dims.inner / mixer.rank.tensor
    mixer.add_pointwise("shift", h, reads=2.0, kernels=3)
    mixer.keep_tensor(3 * h)
    mixer.add_linear("receptance-key-value", h, 3 * inner)
    mixer.keep_tensor(3 * inner)
    mixer.add_pointwise("scan", inner, reads=3.0)
    mixer.keep_tensor(2 * inner)
    mixer.add_linear("output", inner, h)
    mixer.add_linear("mlp-receptance", h, h / mixer.rank.tensor)
    mixer.parameters = mixer.parameters + 5 * h + 2 * inner


MIXERS: Mapping[str, Callable[[Mixer], None]] = {
    "mamba": _add_mamba,
    "mamba2": _add_mamba2,
    "linear": _add_linear_attention,
    "delta": _add_delta,
    "recurrent": _add_recurrent,
    "convolution": _add_short_convolution,
    "rwkv": _add_rwkv,
}
"""Functions that add the operators of each kind of mixer, by name."""


def build_mixer(kind: str, name: str, workload: Workload, rank: RankSizes) -> Sublayer:
    """Return the sublayer of a mixer. `kind` is a key of `MIXERS`, and `name` is the name of the sublayer."""
    mixer = Mixer(name, workload, rank)
    MIXERS[kind](mixer)
    return mixer.build_sublayer()
