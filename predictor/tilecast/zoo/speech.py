"""Transformers over spectrograms: Whisper (Radford et al., arXiv 2212.04356, section 2.2).

The encoder can also run alone, in front of a language model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilecast.graph import Block, Graph, KernelTable, Op, Phase, Shards
from tilecast.spec import Workload
from tilecast.zoo import layers, transformer
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import RankSizes, build_uniform_block

_KERNEL, _STRIDES = 3, (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Spectrogram(Transformer):
    """Dimensions of a transformer over a spectrogram."""

    frames: int
    """Number of tokens per sample. Each stands for two columns of the spectrogram."""
    bands: int
    """Numbers per column."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of the encoder: two convolutions over the spectrogram, then layers over its frames."""
    frames = workload.model.get_dimensions(Spectrogram).frames
    workload = replace(workload, sequence_length=frames, model=replace(workload.model, causal=False))
    host_bytes = 4.0 * _count_inputs(workload)
    graph = transformer.build(workload, shards)
    return replace(graph, first=(_build_stem(workload, shards),), last=(), host_bytes_per_sample=host_bytes)


def build_encoder_decoder(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of an encoder of sound and a decoder of text with `positions` positions."""
    frames = workload.model.get_dimensions(Spectrogram).frames
    encoder, decoder = RankSizes.from_shards(shards, frames), RankSizes.from_shards(shards, workload.sequence_length)
    blocks = transformer.build_encoder_decoder_layers(workload, encoder, decoder)
    graph = transformer.build_graph(workload, encoder, decoder, blocks)
    first = (_build_stem(workload, shards), transformer.build_embedding(workload, decoder))
    host_bytes = graph.host_bytes_per_sample + 4.0 * _count_inputs(workload)
    return replace(graph, first=first, host_bytes_per_sample=host_bytes)


def _count_inputs(workload: Workload) -> float:
    """Return the number of values in the spectrogram of a sample."""
    dims = workload.model.get_dimensions(Spectrogram)
    return 2.0 * dims.frames * dims.bands


def _build_stem(workload: Workload, shards: Shards) -> Block:
    """Return the block of two convolutions over the spectrogram's columns, with GELUs and position embeddings.

    The second convolution halves the number of columns.
    """
    model, own, numerics = workload.model, workload.model.get_dimensions(Spectrogram), Numerics.from_workload(workload)
    width, frames = float(model.hidden), float(own.frames)
    batch = shards.micro_batch.astype(float)
    ops: list[Op] = []
    parameters, activation_bytes = frames * width, np.zeros(1)
    channels, columns = float(own.bands), 2 * frames
    for number, stride in enumerate(_STRIDES):
        after = columns / stride
        dims = layers.conv_dims(batch, (channels, 1, 1, columns), (1, 1, _KERNEL), (width, 1, 1, after))
        passes: list[tuple[str, float, Phase]] = [("", 0.0, "forward")]
        passes += [(".weight-gradient", 2.0, "backward")] * (numerics.training and not numerics.frozen)
        passes += [(".input-gradient", 1.0, "backward")] * (numerics.training and number > 0)
        for label, direction, phase in passes:
            table = KernelTable.from_dimensions("conv", numerics.matrix, **dims, direction=direction)
            ops.append(Op(f"convolution{number + 1}{label}", table, phase))
        ops += layers.pointwise("gelu", numerics, batch * after * width)
        parameters += _KERNEL * channels * width + width
        activation_bytes = activation_bytes + numerics.element * batch * (columns * channels + after * width)
        channels, columns = width, after
    ops += layers.pointwise("positions", numerics, batch * frames * width, reads=2.0, backward=(1.0, 0.0))
    return build_uniform_block("spectrogram", len(shards), ops, parameters, activation_bytes, frozen=numerics.frozen)
