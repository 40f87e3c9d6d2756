"""State-space models and their hybrids with attention.

Mamba, Jamba, Zamba, Falcon-H1, Bamba, Nemotron-H, Griffin, MiniMax, Qwen3-Next, LFM2 and RWKV.

`Hybrid.pattern` says for every layer what mixes its tokens and what follows: `mamba`, `mamba+mlp`, `attention+moe`,
`+mlp`. A mixer is one of `mixers.MIXERS`, `attention`, `local` (attention in a window of `window` tokens), or
`parallel` (attention and Mamba-2 on the same input: Falcon-H1, arXiv 2507.22448). `shared` is Zamba's (arXiv
2405.16712): one layer of attention and MLP that reads the hidden state concatenated with the embedding. All places of
this layer in the model share `shared_blocks` copies of its weights. Each place has its own dense layer.
"""

from __future__ import annotations

from dataclasses import replace

from tilecast.graph import Block, Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import layers, mixers, self_attention, transformer
from tilecast.zoo.mixers import Hybrid
from tilecast.zoo.parts import RankSizes, Sublayer, zeros
from tilecast.zoo.self_attention import count_sequences
from tilecast.zoo.transformer import AttentionBuilder


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a hybrid model, with one block for each kind of layer in its pattern."""
    rank = RankSizes.from_shards(shards, workload.sequence_length)
    pattern = workload.model.get_dimensions(Hybrid).pattern
    blocks = []
    for kind in dict.fromkeys(pattern):
        positions = tuple(place for place, other in enumerate(pattern) if other == kind)
        blocks.append(replace(_build_layer(kind, workload, rank, len(positions)), positions=positions))
    return transformer.build_graph(workload, rank, rank, tuple(blocks))


LETTERS = {"M": "mamba2", "*": "attention", "-": "+mlp", "E": "+moe"}
"""Kinds of layers by the letters of NVIDIA's patterns (Megatron-Core, ssm/mamba_hybrid_layer_allocation.py)."""


def read_pattern(written: str | list[str], layers: int) -> tuple[str, ...]:
    """Return the kind of each of `layers` layers from a pattern of letters or of words.

    A pattern with fewer entries than layers is repeated.
    """
    kinds = [LETTERS[letter] for letter in written] if isinstance(written, str) else written
    return tuple(kinds[place % len(kinds)] for place in range(layers))


def _build_layer(kind: str, workload: Workload, rank: RankSizes, repeat: int) -> Block:
    """Return the block of one kind of layer, such as `mamba+mlp`, which occurs `repeat` times in the model."""
    mixer, _, follower = kind.partition("+")
    dims = workload.model.get_dimensions(Hybrid)
    if mixer == "local":
        workload = replace(workload, model=workload.model.with_dimensions(sliding_window=dims.window))
    return transformer.build_layer(
        f"{kind}-layer",
        workload,
        rank,
        repeat=repeat,
        causal=True,
        experts=dims.experts if follower == "moe" else 0,
        attend=_choose_mixer(mixer, repeat),
        has_mlp=bool(follower),
    )


def _choose_mixer(mixer: str, places: int) -> AttentionBuilder | None:
    """Return the function that builds a token mixer of the given kind, or None for ordinary attention."""

    def build(name: str, workload: Workload, rank: RankSizes, *, key_rank: RankSizes, causal: bool) -> Sublayer:
        """Return the sublayer of the token mixer."""
        if not mixer:
            return Sublayer.from_kept_bytes(zeros())
        if mixer == "parallel":
            attention = self_attention.build_attention(name, workload, rank, key_rank=key_rank, causal=causal)
            return Sublayer.join([attention, mixers.build_mixer("mamba2", "mamba2", workload, rank)])
        if mixer == "shared":
            return _build_shared_layer(workload, rank, places)
        return mixers.build_mixer(mixer, mixer, workload, rank)

    return None if mixer in ("attention", "local") else build


def _build_shared_layer(workload: Workload, rank: RankSizes, places: int) -> Sublayer:
    """Return Zamba's shared layer and the Mamba layer after it, as one sublayer.

    The shared layer occurs at `places` places in the model. At each place, an equal fraction of the shared weights is
    counted, and the adapters are separate.
    """
    model, dims = workload.model, workload.model.get_dimensions(Hybrid)
    t, h, f = rank.tensor, float(model.hidden), model.ffn_hidden / rank.tensor
    heads, width = model.heads / t, model.heads / t * model.head_dim
    mixer = mixers.Mixer("shared", workload, rank)
    mixer.keep_tensor(2 * h)
    mixer.add_linear("qkv", 2 * h, 3 * width)
    mixer.keep_tensor(4 * width)
    sequences = count_sequences(workload, rank, rank, causal=True)
    mixer.ops += layers.attention("shared", mixer.numerics, sequences, heads, heads, model.head_dim, causal=True)
    mixer.add_linear("output", width, h)
    mixer.add_linear("up", h, 2 * f)
    mixer.keep_tensor(h + 4 * f)
    mixer.add_pointwise("activation", f, reads=2.0)
    mixer.add_linear("down", f, h)
    mixer.parameters = mixer.parameters * dims.shared_blocks / places
    for adapter, inner, copies, inputs, outputs in (
        ("mlp_adapter", dims.mlp_adapter, 1, h, 2 * f),
        ("attention_adapter", dims.attention_adapter, 3, 2 * h, 3 * width),
    ):
        if inner:
            mixer.add_linear(f"{adapter}-down", inputs, inner * copies)
            mixer.add_linear(f"{adapter}-up", inner, outputs)
            mixer.keep_tensor(inner)
    mixer.add_linear("place", h, h)
    kind = "mamba2" if dims.inner_head else "mamba"
    return Sublayer.join([mixer.build_sublayer(), mixers.build_mixer(kind, "mamba", workload, rank)])


def list_required_dimensions(pattern: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the dimensions that a model must state for the layers of its pattern."""
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
