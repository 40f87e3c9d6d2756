"""State-space models and their hybrids with attention.

Mamba, Jamba, Zamba, Falcon-H1, Bamba, Nemotron-H, Griffin, MiniMax, Qwen3-Next, LFM2 and RWKV.

`Hybrid.pattern` says for every layer what mixes its tokens and what follows: `mamba`, `mamba+mlp`, `attention+moe`,
`+mlp`. Mixers are those of `mixers.MIXERS`, `attention`, `local` (attention in a window of `window` tokens), and
`parallel` (attention and Mamba-2 on the same input: Falcon-H1, arXiv 2507.22448). `shared` is Zamba's (arXiv
2405.16712): one layer of attention and MLP over the hidden state and the embedding side by side. All its places in the
model share `shared_blocks` copies of its weights; each place has its own dense layer.
"""

from __future__ import annotations

from dataclasses import replace

from tilecast.graph import Block, Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import layers, mixers, self_attention, transformer
from tilecast.zoo.mixers import Hybrid
from tilecast.zoo.parts import Part, Rank, zeros
from tilecast.zoo.self_attention import Span
from tilecast.zoo.transformer import Attend


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph: a block for each kind of layer in the pattern, and the usual embedding and head."""
    rank = Rank.of(shards, workload.sequence_length)
    pattern = workload.model.own(Hybrid).pattern
    blocks = []
    for kind in dict.fromkeys(pattern):
        positions = tuple(place for place, other in enumerate(pattern) if other == kind)
        blocks.append(replace(_layer(kind, workload, rank, len(positions)), positions=positions))
    return transformer.graph(workload, rank, rank, tuple(blocks))


def _layer(kind: str, workload: Workload, rank: Rank, repeat: int) -> Block:
    mixer, _, follower = kind.partition("+")
    dims = workload.model.own(Hybrid)
    seen = replace(workload, model=workload.model.having(sliding_window=dims.window))
    return transformer.layer(
        f"{kind}-layer",
        seen if mixer == "local" else workload,
        rank,
        repeat=repeat,
        causal=True,
        experts=dims.experts if follower == "moe" else 0,
        attend=_attend(mixer, repeat),
        feeds=bool(follower),
    )


def _attend(mixer: str, places: int) -> Attend | None:
    """Return the function that builds the first half of a layer; None for the usual attention."""

    def build(name: str, workload: Workload, rank: Rank, *, key_rank: Rank, causal: bool) -> Part:
        if not mixer:
            return Part.keeping(zeros())
        if mixer == "parallel":
            attention = self_attention.attention(name, workload, rank, key_rank=key_rank, causal=causal)
            return Part.joined([attention, mixers.mix("mamba2", "mamba2", workload, rank)])
        if mixer == "shared":
            return _shared(workload, rank, places)
        return mixers.mix(mixer, mixer, workload, rank)

    return None if mixer in ("attention", "local") else build


def _shared(workload: Workload, rank: Rank, places: int) -> Part:
    """Build Zamba's shared layer at one of its `places`, and the Mamba layer after it.

    The part holds its share of the shared weights. Each place has its own adapters.
    """
    model, dims = workload.model, workload.model.own(Hybrid)
    t, h, f = rank.tensor, float(model.hidden), model.ffn_hidden / rank.tensor
    heads, width = model.heads / t, model.heads / t * model.head_dim
    mix = mixers.Mixer("shared", workload, rank)
    mix.written(2 * h)
    mix.linear("qkv", 2 * h, 3 * width)
    mix.written(4 * width)
    seen = Span.of(workload, rank, rank, True)
    mix.ops += layers.attention(
        "shared", mix.numerics, batch=seen.batch, heads=heads, kv_heads=heads, seq_q=seen.queries, seq_kv=seen.keys,
        head_dim=model.head_dim, causal=True, dropout=False,
    )  # fmt: skip
    mix.linear("output", width, h)
    mix.linear("up", h, 2 * f)
    mix.written(h + 4 * f)
    mix.pass_over("activation", f, reads=2.0)
    mix.linear("down", f, h)
    mix.parameters = mix.parameters * dims.shared_blocks / places
    for adapter, inner, copies, inputs, outputs in (
        ("mlp_adapter", dims.mlp_adapter, 1, h, 2 * f),
        ("attention_adapter", dims.attention_adapter, 3, 2 * h, 3 * width),
    ):
        if inner:
            mix.linear(f"{adapter}-down", inputs, inner * copies)
            mix.linear(f"{adapter}-up", inner, outputs)
            mix.written(inner)
    mix.linear("place", h, h)
    kind = "mamba2" if dims.inner_head else "mamba"
    return Part.joined([mix.part(), mixers.mix(kind, "mamba", workload, rank)])


def needs(pattern: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the dimensions that the layers of a pattern need."""
    names: list[str] = []
    for kind in dict.fromkeys(pattern):
        mixer, _, follower = kind.partition("+")
        names += _NEEDS.get(mixer, ())
        names += ("experts",) * (follower == "moe")
    return tuple(dict.fromkeys(names))


_SSD = ("inner", "inner_head", "groups", "state", "kernel")
_NEEDS = {
    "mamba": ("inner", "state", "step_rank", "kernel"),
    "mamba2": _SSD,
    "parallel": _SSD,
    "shared": ("shared_blocks", "inner", "state", "kernel"),
    "delta": ("inner", "inner_head", "state", "key_heads", "kernel"),
    "recurrent": ("inner", "kernel"),
    "convolution": ("kernel",),
    "rwkv": ("inner",),
    "local": ("window",),
}
