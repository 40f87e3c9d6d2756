"""Half layers that replace attention in state-space and hybrid models.

They are state-space layers, linear attention, gated recurrences and short convolutions.

Sources: Mamba, arXiv 2312.00752 (section 3.3: one fused scan that reads its inputs and writes its output once, and
computes the states again in the backward pass); Mamba-2, arXiv 2405.21060 (section 6: the scan as matrix products
inside chunks and a recurrence over chunks); Lightning Attention-2, arXiv 2401.04658 (the same without decay by token);
Gated DeltaNet, arXiv 2412.06464 (section 3.3: two further products for each chunk); Griffin, arXiv 2402.19427 (section
2.4); RWKV, arXiv 2305.13048 (section 3); LFM2's short convolutions as transformers writes them.

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
from tilecast.zoo.parts import Linear, Part, Rank, norm_parameters, residual, tensor_collectives


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Hybrid(Transformer):
    """Dimensions of a state-space model or of a hybrid with attention.

    Those that no kind of layer in its pattern needs are 0.
    """

    pattern: tuple[str, ...] = ()
    """Composition of each layer; `tilecast.zoo.hybrid` explains the words."""
    window: int = 0
    """Tokens that local attention reaches."""
    inner: int = 0
    """Channels of a mixer."""
    inner_head: int = 0
    """Channels of a head of a mixer; 0: it has no heads."""
    groups: int = 0
    """Groups of heads that share inputs and outputs."""
    state: int = 0
    """Numbers of the state of a channel, or width of a key."""
    step_rank: int = 0
    """Width of the vector that step sizes are made from."""
    key_heads: int = 0
    """Heads of keys of a mixer."""
    kernel: int = 0
    """Tokens that a convolution reads."""
    chunk: int = 0
    """Tokens of a chunk of a recurrence; 0: the usual number of its kind."""
    shared_blocks: int = 0
    """Copies of the weights of a layer that many places share."""
    mlp_adapter: int = 0
    """Rank of the adapter that each such place has of its own in the MLP; 0: it has none."""
    attention_adapter: int = 0
    """Rank of the adapter that each such place has of its own in attention; 0: it has none."""


@dataclass(slots=True)
class Mixer:
    """A half layer under construction, after its norm.

    It collects operators, the parameters of a rank, (S,), and the bytes that are kept for the backward pass, (S,).
    """

    name: str
    workload: Workload
    rank: Rank
    dims: Hybrid = field(init=False)
    numerics: Numerics = field(init=False)
    ops: list[Op] = field(init=False)
    parameters: Floats = field(init=False)
    activation_bytes: Floats = field(init=False)
    selected: Floats = field(default_factory=lambda: np.zeros(1))
    linears: list[Linear] = field(default_factory=list)

    def __post_init__(self) -> None:
        model, self.numerics = self.workload.model, Numerics.of(self.workload)
        self.dims = model.own(Hybrid)
        outer = self.rank.outer_tokens
        self.ops = layers.norm(f"{self.name}.norm", self.numerics, outer, model.hidden, rms=model.rms_norm)
        self.parameters = norm_parameters(model) * np.ones_like(self.rank.tensor)
        self.activation_bytes = (2 * self.numerics.element + self.numerics.norm_extra) * outer * model.hidden

    @property
    def tokens(self) -> Floats:
        return self.rank.tokens

    def linear(self, label: str, inputs: Floats | float, outputs: Floats | float) -> None:
        """Add a dense layer over the tokens; its input counts as kept where it is written."""
        name = f"{self.name}.{label}"
        self.ops += layers.linear(name, self.numerics, self.tokens, inputs, outputs)
        self.parameters = self.parameters + inputs * outputs
        self.linears.append(Linear(name, self.tokens, inputs, outputs))

    def written(self, width: Floats | float) -> None:
        """Keep a tensor of `width` numbers per token until the backward pass."""
        self.activation_bytes = self.activation_bytes + self.numerics.element * self.tokens * width

    def pass_over(self, label: str, width: Floats | float, *, reads: float = 1.0, kernels: int = 1) -> None:
        """Add an element-wise pass over `width` numbers per token."""
        name = f"{self.name}.{label}"
        self.ops += layers.pointwise(name, self.numerics, self.tokens * width, reads=reads, kernels=kernels,
                                     backward=(reads + 1.0, reads))  # fmt: skip

    def convolve(self, width: Floats | float, kernel: float) -> None:
        """Add a causal depthwise convolution over the tokens, with a bias and an activation in the same kernel."""
        self.pass_over("convolution", width)
        self.parameters = self.parameters + width * (kernel + 1.0)
        self.written(width)

    def normed(self, width: Floats | float) -> None:
        """Add a norm over `width` numbers per token."""
        self.ops += layers.norm(f"{self.name}.inner-norm", self.numerics, self.tokens, width, rms=True)  # type: ignore[arg-type]
        self.parameters = self.parameters + width
        self.written(width)

    def chunked(self, chunk: float, heads: Floats, groups: Floats, state: float, value: float, delta: bool) -> None:
        """Add a linear recurrence over `heads` states of `state` x `value` numbers, as products inside chunks.

        The products are keys with the queries of each group, those scores with the values, the chunk's own state, and
        what the previous state adds to the chunk's output. With `delta`, two more products solve for what each token
        changes.
        """
        chunk = min(chunk, self.rank.sequence)
        chunks = self.tokens / chunk
        shapes = [
            ("scores", groups, chunk, chunk, state),
            ("values", heads, chunk, value, chunk),
            ("state", heads, state, value, chunk),
            ("read", heads, chunk, value, state),
        ]
        if delta:
            shapes += [("keys", heads, chunk, chunk, state), ("solve", heads, chunk, value + state, chunk)]
        for label, batch, m, n, k in shapes:
            self.ops += layers.products(
                f"{self.name}.{label}",
                self.numerics.unquantized,
                chunks * batch,
                ("", m, n, k),
                (".left-gradient", m, k, n),
                (".right-gradient", k, n, m),
            )
        states = chunks * heads * state * value
        self.ops += layers.pointwise(f"{self.name}.carry", replace(self.numerics, element=4.0), states)

    def part(self) -> Part:
        """Return the half layer, with the residual sum after it and the collectives of tensor parallelism."""
        h, outer = self.workload.model.hidden, self.rank.outer_tokens
        ops = [*self.ops, *residual(f"{self.name}.residual", self.numerics, outer * h, dropout=False)]
        collectives = tensor_collectives(self.name, self.workload, self.rank)
        activation_bytes, linears = self.activation_bytes, tuple(self.linears)
        return Part(ops, collectives, self.parameters, activation_bytes, selected=activation_bytes, linears=linears)


def _mamba(mix: Mixer) -> None:
    """Write Mamba: `inner` channels with `state` numbers each, and step sizes from a vector of `step_rank`."""
    dims, h = mix.dims, float(mix.workload.model.hidden)
    inner, state, rank = dims.inner / mix.rank.tensor, dims.state, dims.step_rank
    mix.linear("input", h, 2 * inner)
    mix.written(2 * inner)
    mix.convolve(inner, dims.kernel)
    mix.linear("step-input-output", inner, rank + 2 * state)
    mix.linear("step", rank, inner)
    mix.written(inner + rank + 2 * state)
    mix.pass_over("scan", inner, reads=3.0)
    mix.written(inner)
    mix.parameters = mix.parameters + inner * (state + 2.0)
    mix.linear("output", inner, h)


def _mamba2(mix: Mixer) -> None:
    """Write Mamba-2: `inner` channels in heads of `inner_head`.

    The channels of a head share a step size; in each of `groups` they share inputs and outputs of `state` numbers.
    """
    dims, h, t = mix.dims, float(mix.workload.model.hidden), mix.rank.tensor
    inner, width = dims.inner / t, dims.inner_head
    heads, groups, state = inner / width, np.maximum(dims.groups / t, 1.0), dims.state
    mixed = inner + 2 * groups * state
    mix.linear("input", h, inner + mixed + heads)
    mix.written(inner + mixed)
    mix.convolve(mixed, dims.kernel)
    mix.chunked(dims.chunk or 256, heads, groups, state, width, delta=False)
    mix.written(inner)
    mix.pass_over("gate", inner, reads=2.0)
    mix.normed(inner)
    mix.parameters = mix.parameters + 3 * heads
    mix.linear("output", inner, h)


def _linear_attention(mix: Mixer) -> None:
    """Write Lightning attention: queries, keys and values of every head, and a gate after their norm."""
    model, h = mix.workload.model, float(mix.workload.model.hidden)
    heads = model.heads / mix.rank.tensor
    width = heads * model.head_dim
    mix.linear("qkv", h, 3 * width)
    mix.written(3 * width)
    mix.chunked(mix.dims.chunk or 256, heads, heads, float(model.head_dim), float(model.head_dim), False)
    mix.normed(width)
    mix.linear("gate", h, width)
    mix.written(2 * width)
    mix.pass_over("gated", width, reads=2.0)
    mix.linear("output", width, h)


def _delta(mix: Mixer) -> None:
    """Write Gated DeltaNet.

    It has `key_heads` of width `state`, and values of `inner` channels in heads of `inner_head`.
    """
    dims, h, t = mix.dims, float(mix.workload.model.hidden), mix.rank.tensor
    values, width, state = dims.inner / t, dims.inner_head, dims.state
    heads, keys = values / width, dims.key_heads / t
    mixed = 2 * keys * state + values
    mix.linear("input", h, mixed + values + 2 * heads)
    mix.written(mixed + values)
    mix.convolve(mixed, dims.kernel)
    mix.chunked(dims.chunk or 64, heads, keys, state, width, delta=True)
    mix.normed(values)
    mix.pass_over("gated", values, reads=2.0)
    mix.written(values)
    mix.parameters = mix.parameters + 2 * heads
    mix.linear("output", values, h)


def _recurrent(mix: Mixer) -> None:
    """Write the recurrent block of Griffin.

    It has two branches of `inner` channels. One passes a convolution and a gated linear recurrence, whose gates are
    block-diagonal by head.
    """
    model, h = mix.workload.model, float(mix.workload.model.hidden)
    inner = mix.dims.inner / mix.rank.tensor
    mix.linear("input", h, 2 * inner)
    mix.written(2 * inner)
    mix.convolve(inner, mix.dims.kernel)
    mix.linear("gates", inner, 2 * mix.dims.inner / model.heads)
    mix.written(2 * inner)
    mix.pass_over("scan", inner, reads=3.0, kernels=2)
    mix.written(2 * inner)
    mix.pass_over("gated", inner, reads=2.0)
    mix.linear("output", inner, h)


def _short_convolution(mix: Mixer) -> None:
    """Write a convolution over few tokens between two gates, as wide as the hidden state."""
    h, width = float(mix.workload.model.hidden), mix.workload.model.hidden / mix.rank.tensor
    mix.linear("input", h, 3 * width)
    mix.written(3 * width)
    mix.pass_over("gates", width, reads=2.0, kernels=2)
    mix.convolve(width, mix.dims.kernel)
    mix.written(width)
    mix.linear("output", width, h)


def _rwkv(mix: Mixer) -> None:
    """Write RWKV: receptance, keys and values, a scan, and the receptance that gates the MLP after it.

    Receptance, keys and values are computed from each token mixed with the previous one.
    """
    h, inner = float(mix.workload.model.hidden), mix.dims.inner / mix.rank.tensor
    mix.pass_over("shift", h, reads=2.0, kernels=3)
    mix.written(3 * h)
    mix.linear("receptance-key-value", h, 3 * inner)
    mix.written(3 * inner)
    mix.pass_over("scan", inner, reads=3.0)
    mix.written(2 * inner)
    mix.linear("output", inner, h)
    mix.linear("mlp-receptance", h, h / mix.rank.tensor)
    mix.parameters = mix.parameters + 5 * h + 2 * inner


MIXERS: Mapping[str, Callable[[Mixer], None]] = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "linear": _linear_attention,
    "delta": _delta,
    "recurrent": _recurrent,
    "convolution": _short_convolution,
    "rwkv": _rwkv,
}
"""Functions that write each kind of mixer, by name."""


def mix(kind: str, name: str, workload: Workload, rank: Rank) -> Part:
    """Build the half layer of a kind of mixer in `MIXERS`."""
    mixer = Mixer(name, workload, rank)
    MIXERS[kind](mixer)
    return mixer.part()
