"""Recurrent networks over words: GNMT and a plain LSTM.

A sentence is a flat image of height 1 whose columns are words.

Sources: Wu et al., arXiv 1609.08144 (section 3, with four layers and attention as in MLPerf's version); Zaremba et al.,
arXiv 1409.2329.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo.cnn import attention, sequence
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.walk import Walk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Gnmt(Images):
    """Dimensions of GNMT; the width of its image is the number of words."""

    cells: int
    """Cells of each LSTM."""
    vocabulary: int
    """Words."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Lstm(Gnmt):
    """Dimensions of a stack of LSTMs."""

    layers_deep: int
    """LSTMs, one on the other."""


def gnmt(walk: Walk, dims: Gnmt) -> None:
    """Write GNMT: four LSTMs of `cells` over a sentence and four over its translation, of equal length.

    The first LSTM of the encoder is bidirectional. The first of the decoder queries the attention, and the others also
    read its output.
    """
    words, cells, vocabulary = walk.size[2], dims.cells, dims.vocabulary
    sequence.embed(walk, vocabulary, cells, words)
    for number in range(4):
        sequence.recur(walk, cells, directions=1 if number else 2)
        walk.dropout()
        if number > 1:
            walk.add()
    weights = walk.parameters
    sequence.embed(walk, vocabulary, cells, words)
    walk.parameters = weights
    for number in range(4):
        sequence.recur(walk, cells)
        walk.dropout()
        if number == 0:
            for _ in ("query", "keys"):
                attention.linear(walk, words, cells, cells, bias=False)
            # The score of each pair of words takes a sum, a tanh and a product with one vector of weights.
            walk.shape = cells, (1, words, words)
            walk.activate("tanh")
            walk.add()
            walk.products(words, cells, words)
            walk.shape = cells, (1, 1, words)
        elif number > 1:
            walk.add()
        if number < 3:
            walk.concatenate(2 * cells)
    sequence.dense(walk, vocabulary)
    walk.loss()


def lstm(walk: Walk, dims: Lstm) -> None:
    """Write `layers_deep` LSTMs of `cells` over words of a `vocabulary`, and the prediction of the next word."""
    words, vocabulary = walk.size[2], dims.vocabulary
    sequence.embed(walk, vocabulary, dims.cells, words)
    for _ in range(dims.layers_deep):
        walk.dropout()
        sequence.recur(walk, dims.cells)
    walk.dropout()
    sequence.dense(walk, vocabulary)
    walk.loss()
