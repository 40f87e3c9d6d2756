"""Transformers over spectrograms: Whisper (Radford et al., arXiv 2212.04356, section 2.2).

The encoder also serves alone, as the tower of a language model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast.graph import Block, Graph, KernelTable, Op, Phase, Shards
from tilecast.spec import Floats, Workload
from tilecast.zoo import layers, transformer
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import Rank, frozen_parameters

_KERNEL, _STRIDES = 3, (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Spectrogram(Transformer):
    """Dimensions of a transformer over a spectrogram."""

    frames: int
    """Tokens of a sample; each stands for two columns of the spectrogram."""
    bands: int
    """Numbers of a column."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of the encoder.

    Two convolutions read two columns of the spectrogram for each frame; then layers run over the frames.
    """
    dims = workload.model.own(Spectrogram)
    heard = replace(workload, sequence_length=dims.frames)
    rank = Rank.of(shards, heard.sequence_length)
    blocks = transformer.stack("layer", heard, rank, heard.model.layers, causal=False)
    graph = transformer.graph(heard, rank, rank, blocks)
    return replace(
        graph, first=(_stem(heard, shards),), last=(), host_bytes_per_sample=4.0 * _columns(heard)
    )  # fmt: skip


def build_encoder_decoder(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of encoder and decoder.

    `positions` are those of the decoder.
    """
    model, dims = workload.model, workload.model.own(Spectrogram)
    decoding = dims.decoding(model)
    heard, target = Rank.of(shards, dims.frames), Rank.of(shards, workload.sequence_length)
    start = model.layers - decoding
    blocks = transformer.stack("encoder-layer", workload, heard, start, causal=False)
    blocks += transformer.stack("decoder-layer", workload, target, decoding, causal=True, memory=heard, start=start)
    graph = transformer.graph(workload, heard, target, blocks)
    first = (_stem(workload, shards), transformer.embedding(workload, target))
    return replace(graph, first=first, host_bytes_per_sample=graph.host_bytes_per_sample + 4.0 * _columns(workload))


def _columns(workload: Workload) -> float:
    """Return how many numbers the spectrogram of a sample has."""
    dims = workload.model.own(Spectrogram)
    return 2.0 * dims.frames * dims.bands


def _stem(workload: Workload, shards: Shards) -> Block:
    """Build two convolutions over time, each followed by a GELU, and the sum with positions.

    The second convolution halves the number of columns.
    """
    model, own, numerics = workload.model, workload.model.own(Spectrogram), Numerics.of(workload)
    width, frames = float(model.hidden), float(own.frames)
    batch = shards.micro_batch.astype(float)
    ops: list[Op] = []
    parameters, activation_bytes = frames * width, np.zeros(1)
    channels, columns = float(own.bands), 2 * frames
    for number, stride in enumerate(_STRIDES):
        after = columns / stride
        dims: dict[str, Floats | float] = {
            "batch": batch, "c_in": channels, "c_out": width, "in_d": 1.0, "in_h": 1.0, "in_w": columns,
            "k_d": 1.0, "k_h": 1.0, "k_w": float(_KERNEL), "out_d": 1.0, "out_h": 1.0, "out_w": after, "groups": 1.0,
        }  # fmt: skip
        directions: list[tuple[str, float, Phase]] = [("", 0.0, "forward")]
        if numerics.training and not numerics.frozen:
            directions += [(".weight-gradient", 2.0, "backward")]
        if numerics.training and number:
            directions += [(".input-gradient", 1.0, "backward")]
        for label, direction, phase in directions:
            table = KernelTable.of("conv", numerics.matrix, **dims, direction=direction)
            ops.append(Op(f"convolution{number + 1}{label}", table, phase))
        ops += layers.pointwise("gelu", numerics, batch * after * width)
        parameters += _KERNEL * channels * width + width
        activation_bytes = activation_bytes + numerics.element * batch * (columns * channels + after * width)
        channels, columns = width, after
    ops += layers.pointwise("positions", numerics, batch * frames * width, reads=2.0, backward=(1.0, 0.0))
    whole = np.full(len(shards), parameters)
    return Block(
        "spectrogram",
        1,
        tuple(ops),
        whole,
        np.stack([activation_bytes] * 3),
        frozen_parameters=frozen_parameters(workload, whole),
    )
