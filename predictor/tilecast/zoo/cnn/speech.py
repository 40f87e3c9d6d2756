"""Networks between speech and text: Jasper, QuartzNet, DeepSpeech 2, RNN-T, wav2vec 2.0, Tacotron 2 and FastPitch.

A sound is a flat image of height 1 whose columns are frames. The presets have the average lengths of the usual data
sets.

Sources: Li et al., arXiv 1904.03288 (table 1, dense residuals); Kriman et al., arXiv 1910.10261 (table 1); Amodei et
al., arXiv 1512.02595 (section 3); Graves, arXiv 1211.3711, with MLPerf's sizes (mlcommons/training,
rnn_speech_recognition); Shen et al., arXiv 1712.05884 (section 2); Łańcucki, arXiv 2006.06873 (section 2); Baevski et
al., arXiv 2006.11477 (section 2 and appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo import layers
from tilecast.zoo.cnn import attention, sequence
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.cnn.walk import Walk

_JASPER = ((256, 11), (384, 13), (512, 17), (640, 21), (768, 25))
_QUARTZNET = ((256, 33), (256, 39), (512, 51), (512, 63), (512, 75))
"""Channels and kernel of each of the five kinds of blocks."""
_LETTERS = 29
_SYMBOLS, _ALIGNED = 148, 128
"""Number of letters and signs that are spoken, and the width in which attention compares frames and letters."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Jasper(Images):
    """Dimensions of Jasper and QuartzNet."""

    repeats: int
    """Blocks of each of five kinds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DeepSpeech2(Images):
    """Dimensions of DeepSpeech 2; the height of its image is the number of frequencies."""

    layers_deep: int
    """Bidirectional LSTMs, one on the other."""
    cells: int
    """Cells of an LSTM in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Rnnt(Images):
    """Dimensions of RNN-T."""

    cells: int
    """Cells of an LSTM of the transcription network."""
    joint: int
    """Width of the joint and of the prediction network."""
    symbols: int
    """Symbols of the text of a sample."""
    vocabulary: int
    """Kinds of symbols."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Spoken(Images):
    """Dimensions of Tacotron 2 and FastPitch; the width of their image is the number of frames."""

    symbols: int
    """Letters of the text of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Wav2vec2(Images):
    """Dimensions of wav2vec 2.0; the width of its image is the number of values of sound."""

    layers_deep: int
    """Transformer layers."""
    width: int
    """Width of a layer."""
    attention_heads: int
    """Heads of an attention layer."""
    inner: int | None = None
    """Width of the MLP of a layer; None: four times `width`."""
    letters: int = 0
    """Letters as one of which every frame is classified; 0: frames are compared, as in pretraining."""
    sound_layers: int = 7
    """Convolutions over the sound. Other numbers are priced as seven."""
    sound_width: int = 512
    """Channels of these convolutions. Other numbers are priced as 512."""


def jasper(walk: Walk, dims: Jasper) -> None:
    """Write Jasper: `repeats` blocks of each of five kinds, of five convolutions each.

    A block adds the projected outputs of all earlier blocks to its own output.
    """
    walk.unit(256, (1, 11), 2)
    before = [walk.shape]
    for channels, kernel in _JASPER:
        for _ in range(dims.repeats):
            for _ in range(5):
                walk.unit(channels, (1, kernel))
                walk.dropout()
            leave = walk.shape
            for shape in before:
                walk.again(shape)
                walk.unit(channels, 1, activation="none")
                walk.add()
            walk.shape = leave
            before.append(leave)
    walk.unit(896, (1, 29))
    walk.unit(1024, 1)
    _letters(walk)


def quartznet(walk: Walk, dims: Jasper) -> None:
    """Write QuartzNet: `repeats` blocks of each of five kinds.

    A block has five separable convolutions and a projected residual.
    """
    _separable(walk, 256, 33, 2)
    for channels, kernel in _QUARTZNET:
        for _ in range(dims.repeats):
            entry = walk.shape
            for _ in range(5):
                _separable(walk, channels, kernel)
            walk.again(entry)
            walk.unit(channels, 1, activation="none")
            walk.add()
            walk.activate()
    _separable(walk, 512, 87)
    walk.unit(1024, 1)
    _letters(walk)


def _separable(walk: Walk, out: int, kernel: int, stride: int = 1) -> None:
    walk.conv(walk.channels, (1, kernel), stride, groups=walk.channels)
    walk.unit(out, 1)


def _letters(walk: Walk) -> None:
    """Write the prediction of a letter for every frame."""
    walk.conv(_LETTERS, 1, bias=True)
    _alignments(walk)


def _alignments(walk: Walk) -> None:
    """Write the loss over all alignments of letters and frames (CTC)."""
    walk.loss()
    if walk.numerics.training:
        walk.ops += layers.pointwise("alignments", walk.numerics, walk.elements, kernels=2, absorbed=False)


def deepspeech2(walk: Walk, dims: DeepSpeech2) -> None:
    """Write DeepSpeech 2: two convolutions over frequencies and frames, then `layers_deep` bidirectional LSTMs.

    The LSTMs have `cells` per direction. The two directions are summed, and there is a batch norm between LSTMs. The
    image's height is the number of frequencies.
    """
    walk.unit(32, (41, 11), 2)
    walk.unit(32, (21, 11), (2, 1))
    walk.shape = walk.channels * walk.size[1], (1, 1, walk.size[2])
    for number in range(dims.layers_deep):
        if number:
            walk.norm()
        sequence.recur(walk, dims.cells, directions=2)
        walk.channels = dims.cells
        walk.add()
    walk.norm()
    _letters(walk)


def rnnt(walk: Walk, dims: Rnnt) -> None:
    """Write RNN-T: a transcription, a prediction and a joint network.

    The transcription network has two LSTMs over the frames, and three more over pairs of frames. The prediction network
    has two LSTMs over `symbols` of the text. The joint network predicts one of `vocabulary` for every pair of frame and
    symbol.
    """
    cells, joint, symbols = dims.cells, dims.joint, dims.symbols
    _recurrent_stack(walk, cells, 2)
    walk.shape = 2 * walk.channels, (1, 1, walk.size[2] // 2)
    _recurrent_stack(walk, cells, 3)
    frames = walk.size[2]
    sequence.dense(walk, joint)
    sequence.embed(walk, dims.vocabulary, joint, symbols)
    _recurrent_stack(walk, joint, 2)
    sequence.dense(walk, joint)
    walk.shape = joint, (1, symbols, frames)
    walk.add()
    walk.activate()
    walk.dropout()
    sequence.dense(walk, dims.vocabulary)
    walk.loss()


def _recurrent_stack(walk: Walk, cells: int, depth: int) -> None:
    for _ in range(depth):
        sequence.recur(walk, cells)
        walk.dropout()


def tacotron2(walk: Walk, dims: Spoken) -> None:
    """Write Tacotron 2: an encoder of the letters, a loop over the frames, and five convolutions over all frames.

    The encoder has three convolutions and a bidirectional LSTM. Each step of the loop has two dense layers over the
    previous frame, an LSTM, attention to the letters by content and location, an LSTM, and a projection.
    """
    (bands, frames), letters = (walk.channels, walk.size), dims.symbols
    sequence.embed(walk, _SYMBOLS, 512, letters)
    for _ in range(3):
        walk.unit(512, (1, 5))
        walk.dropout()
    sequence.recur(walk, 256, directions=2)
    text = walk.channels
    sequence.dense(walk, _ALIGNED, bias=False)
    walk.shape = bands, frames
    for _ in range(2):
        sequence.dense(walk, 256, bias=False)
        walk.activate()
        walk.dropout()
    sequence.step_cell(walk, 256 + text, 1024)
    sequence.step_dense(walk, 1024, _ALIGNED)
    # Filters over the attention weights so far, the sum, its tanh, a product, a softmax, and the weighted letters.
    sequence.step_pointwise(walk, float(letters * _ALIGNED), 3)
    sequence.step_pointwise(walk, float(letters * text), 1)
    sequence.step_pointwise(walk, float(letters * 32), 6)
    walk.parameters += 2 * 32 * 31 + 32 * _ALIGNED + _ALIGNED
    sequence.step_cell(walk, 1024 + text, 1024)
    sequence.step_dense(walk, 1024 + text, bands + 1, bias=True)
    walk.shape = bands, frames
    for out in (512, 512, 512, 512, bands):
        walk.unit(out, (1, 5), activation="none" if out == bands else "tanh")
        walk.dropout()
    if walk.numerics.training:
        walk.ops += layers.pointwise("loss", walk.numerics, walk.elements, reads=2.0, kernels=6)


def fastpitch(walk: Walk, dims: Spoken) -> None:
    """Write FastPitch: six layers over `symbols` letters, three predictors, and six layers over all frames.

    A layer is attention and two convolutions. The predictors are of duration, pitch and energy.
    """
    bands, frames, letters, width = walk.channels, walk.size[2], dims.symbols, 384
    sequence.embed(walk, _SYMBOLS, width, letters)
    for count in (letters, frames):
        walk.shape = width, (1, 1, count)
        for _ in range(6):
            attention.linear(walk, count, width, 3 * 64)
            attention.core(walk, count, count, 64, 1)
            attention.linear(walk, count, 64, width, bias=False)
            attention.norm(walk, count, width)
            walk.conv(1536, (1, 3), bias=True)
            walk.activate()
            walk.conv(width, (1, 3), bias=True)
            walk.add()
            attention.norm(walk, count, width)
        if count == letters:
            for _ in ("duration", "pitch", "energy"):
                walk.shape = width, (1, 1, count)
                for _ in range(2):
                    walk.conv(256, (1, 3), bias=True)
                    walk.activate()
                    attention.norm(walk, count, 256)
                walk.conv(1, 1, bias=True)
    walk.shape = width, (1, 1, frames)
    walk.conv(bands, 1, bias=True)
    if walk.numerics.training:
        walk.ops += layers.pointwise("loss", walk.numerics, walk.elements, reads=2.0, kernels=6)


def wav2vec2(walk: Walk, dims: Wav2vec2) -> None:
    """Write wav2vec 2.0: seven convolutions of 512 channels over samples of sound, then transformer layers.

    The `layers_deep` layers are `width` wide, with `attention_heads` heads and `inner` (4 `width`) channels between
    their dense layers. With `letters` every frame is classified as one of them. Otherwise, in training, the vectors of
    half of the frames are compared with the right one and 100 others each.
    """
    for kernel, stride in ((10, 5), *[(3, 2)] * 4, *[(2, 2)] * 2):
        walk.conv(512, (1, kernel), stride)
        if kernel == 10:
            walk.norm()
        walk.activate("gelu")
    width, frames = dims.width, walk.size[2]
    attention.norm(walk, frames, 512)
    sequence.dense(walk, width)
    walk.conv(width, (1, 128), groups=16, bias=True)
    walk.activate("gelu")
    walk.add()
    for _ in range(dims.layers_deep):
        attention.attend(walk, frames, frames, width, dims.attention_heads)
        attention.norm(walk, frames, width)
        attention.feed_forward(walk, frames, width, dims.inner or 4 * width)
        attention.norm(walk, frames, width)
    attention.norm(walk, frames, width)
    if letters := dims.letters:
        sequence.dense(walk, letters)
        _alignments(walk)
    elif walk.numerics.training:
        walk.shape = width, (1, 1, -(-frames // 2))
        sequence.dense(walk, 256)
        walk.products(frames / 2, 101.0, 256.0)
        walk.channels = 101
        walk.loss()
