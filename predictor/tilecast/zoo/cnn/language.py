"""Recurrent networks over words: GNMT and a plain LSTM.

A sentence is a flat image of height 1 whose columns are words.

Sources: Wu et al., arXiv 1609.08144 (section 3, with four layers and attention as in MLPerf's version); Zaremba et al.,
arXiv 1409.2329.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo.cnn import attention, sequence
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.images import Images


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Gnmt(Images):
    """Dimensions of GNMT, a translation model.

    A sentence is stored as an image of height 1, whose width is the number of words.
    """

    cells: int
    vocabulary: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Lstm(Gnmt):
    """Dimensions of a stack of LSTMs."""

    layers_deep: int
    """Number of LSTMs in the stack."""


def build_gnmt(net: NetworkBuilder, dims: Gnmt) -> None:
    """Build GNMT: four LSTMs over a sentence, and four over a translation of equal length.

    The first encoder LSTM is bidirectional. The first decoder LSTM gives the queries of the attention, whose output is
    an input of the other decoder LSTMs.
    """
    words, cells, vocabulary = net.size[2], dims.cells, dims.vocabulary
    sequence.add_embedding(net, vocabulary, cells, words)
    for number in range(4):
        sequence.add_lstm(net, cells, directions=1 if number else 2)
        net.add_dropout()
        if number > 1:
            net.add_branch()
    weights = net.parameters
    sequence.add_embedding(net, vocabulary, cells, words)
    net.parameters = weights
    for number in range(4):
        sequence.add_lstm(net, cells)
        net.add_dropout()
        if number == 0:
            for _ in ("query", "keys"):
                attention.add_dense(net, words, cells, cells, bias=False)
            # The score of each pair of words takes a sum, a tanh and a product with one vector of weights.
            net.shape = cells, (1, words, words)
            net.add_activation("tanh")
            net.add_branch()
            net.add_batched_matmul(words, cells, words)
            net.shape = cells, (1, 1, words)
        elif number > 1:
            net.add_branch()
        if number < 3:
            net.add_concatenation(2 * cells)
    sequence.add_dense(net, vocabulary)
    net.add_cross_entropy()


def build_lstm(net: NetworkBuilder, dims: Lstm) -> None:
    """Build a stack of LSTMs over words that predicts the next word."""
    words, vocabulary = net.size[2], dims.vocabulary
    sequence.add_embedding(net, vocabulary, dims.cells, words)
    for _ in range(dims.layers_deep):
        net.add_dropout()
        sequence.add_lstm(net, dims.cells)
    net.add_dropout()
    sequence.add_dense(net, vocabulary)
    net.add_cross_entropy()
