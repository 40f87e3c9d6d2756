"""Speech recognition and synthesis: Jasper, QuartzNet, DeepSpeech 2, RNN-T, wav2vec 2.0, Tacotron 2 and FastPitch.

A sound is stored as an image of height 1 whose columns are frames. The presets have the average lengths of the usual
data sets.

Sources: Li et al., arXiv 1904.03288 (table 1, dense residuals); Kriman et al., arXiv 1910.10261 (table 1); Amodei et
al., arXiv 1512.02595 (section 3); Graves, arXiv 1211.3711, with MLPerf's sizes (mlcommons/training,
rnn_speech_recognition); Shen et al., arXiv 1712.05884 (section 2); Łańcucki, arXiv 2006.06873 (section 2); Baevski et
al., arXiv 2006.11477 (section 2 and appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.zoo.cnn import attention, sequence
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.images import Images

_JASPER = ((256, 11), (384, 13), (512, 17), (640, 21), (768, 25))
_QUARTZNET = ((256, 33), (256, 39), (512, 51), (512, 63), (512, 75))
"""Channels and kernel of each of the five kinds of blocks."""
_LETTERS = 29
_SYMBOLS, _ALIGNED = 148, 128
"""Number of distinct letters and signs of a text, and the width in which attention compares frames and letters."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Jasper(Images):
    """Dimensions of Jasper and QuartzNet."""

    repeats: int
    """Blocks of each of five kinds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DeepSpeech2(Images):
    """Dimensions of DeepSpeech 2. The height of its image is the number of frequencies."""

    layers_deep: int
    """Number of bidirectional LSTMs in the stack."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SpeechSynthesis(Images):
    """Dimensions of Tacotron 2 and FastPitch.

    Their spectrogram is treated as an image whose width is the number of frames.
    """

    symbols: int
    """Letters of the text of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Wav2vec2(Images):
    """Dimensions of wav2vec 2.0. The width of its image is the number of audio samples."""

    layers_deep: int
    """Transformer layers."""
    width: int
    attention_heads: int
    inner: int | None = None
    """Width of the MLP of a layer; None: four times `width`."""
    letters: int = 0
    """Number of letters as which frames are classified. 0 for pretraining, which compares frames."""
    sound_layers: int = 7
    """Number of convolutions over the sound. Any number is priced as seven."""
    sound_width: int = 512
    """Channels of these convolutions. Any number is priced as 512."""


def build_jasper(net: NetworkBuilder, dims: Jasper) -> None:
    """Build Jasper: blocks of five convolutions, with dense residuals.

    Each block adds the projected outputs of all earlier blocks to its output.
    """
    net.add_conv_norm_act(256, (1, 11), 2)
    before = [net.shape]
    for channels, kernel in _JASPER:
        for _ in range(dims.repeats):
            for _ in range(5):
                net.add_conv_norm_act(channels, (1, kernel))
                net.add_dropout()
            leave = net.shape
            for shape in before:
                net.continue_from(shape)
                net.add_conv_norm_act(channels, 1, activation="none")
                net.add_branch()
            net.shape = leave
            before.append(leave)
    net.add_conv_norm_act(896, (1, 29))
    net.add_conv_norm_act(1024, 1)
    _add_letter_classifier(net)


def build_quartznet(net: NetworkBuilder, dims: Jasper) -> None:
    """Build QuartzNet: blocks of five separable convolutions and a projected residual."""
    _add_separable_conv(net, 256, 33, 2)
    for channels, kernel in _QUARTZNET:
        for _ in range(dims.repeats):
            entry = net.shape
            for _ in range(5):
                _add_separable_conv(net, channels, kernel)
            net.continue_from(entry)
            net.add_conv_norm_act(channels, 1, activation="none")
            net.add_branch()
            net.add_activation()
    _add_separable_conv(net, 512, 87)
    net.add_conv_norm_act(1024, 1)
    _add_letter_classifier(net)


def _add_separable_conv(net: NetworkBuilder, out: int, kernel: int, stride: int = 1) -> None:
    """Add a depthwise convolution over the frames, a 1x1 convolution, a norm and an activation."""
    net.add_conv(net.channels, (1, kernel), stride, groups=net.channels)
    net.add_conv_norm_act(out, 1)


def _add_letter_classifier(net: NetworkBuilder) -> None:
    """Add the prediction of a letter for every frame and the CTC loss."""
    net.add_conv(_LETTERS, 1, bias=True)
    _add_ctc_loss(net)


def _add_ctc_loss(net: NetworkBuilder) -> None:
    """Add the connectionist temporal classification (CTC) loss over all alignments of letters and frames."""
    net.add_cross_entropy()
    net.add_training_pointwise("alignments", kernels=2, absorbed=False)


def build_deepspeech2(net: NetworkBuilder, dims: DeepSpeech2) -> None:
    """Build DeepSpeech 2: two convolutions over frequencies and frames, then bidirectional LSTMs.

    The outputs of an LSTM's two directions are summed. A batch norm separates consecutive LSTMs.
    """
    net.add_conv_norm_act(32, (41, 11), 2)
    net.add_conv_norm_act(32, (21, 11), (2, 1))
    net.shape = net.channels * net.size[1], (1, 1, net.size[2])
    for number in range(dims.layers_deep):
        if number:
            net.add_channel_norm()
        sequence.add_lstm(net, dims.cells, directions=2)
        net.channels = dims.cells
        net.add_branch()
    net.add_channel_norm()
    _add_letter_classifier(net)


def build_rnnt(net: NetworkBuilder, dims: Rnnt) -> None:
    """Build RNN-T: a transcription, a prediction and a joint network.

    The transcription network has two LSTMs over the frames, and three more over pairs of frames. The prediction network
    has two LSTMs over the symbols of the text. The joint network predicts a symbol for every pair of frame and symbol.
    """
    cells, joint, symbols = dims.cells, dims.joint, dims.symbols
    _add_lstm_stack(net, cells, 2)
    net.shape = 2 * net.channels, (1, 1, net.size[2] // 2)
    _add_lstm_stack(net, cells, 3)
    frames = net.size[2]
    sequence.add_dense(net, joint)
    sequence.add_embedding(net, dims.vocabulary, joint, symbols)
    _add_lstm_stack(net, joint, 2)
    sequence.add_dense(net, joint)
    net.shape = joint, (1, symbols, frames)
    net.add_branch()
    net.add_activation()
    net.add_dropout()
    sequence.add_dense(net, dims.vocabulary)
    net.add_cross_entropy()


def _add_lstm_stack(net: NetworkBuilder, cells: int, depth: int) -> None:
    """Add `depth` LSTMs of `cells` cells with dropout."""
    for _ in range(depth):
        sequence.add_lstm(net, cells)
        net.add_dropout()


def build_tacotron2(net: NetworkBuilder, dims: SpeechSynthesis) -> None:
    """Build Tacotron 2: an encoder of letters, a loop over frames, and five convolutions over all frames.

    The encoder has three convolutions and a bidirectional LSTM. Each loop step has two dense layers over the previous
    frame, an LSTM, attention to the letters by content and location, another LSTM, and a projection.
    """
    (bands, frames), letters = (net.channels, net.size), dims.symbols
    sequence.add_embedding(net, _SYMBOLS, 512, letters)
    for _ in range(3):
        net.add_conv_norm_act(512, (1, 5))
        net.add_dropout()
    sequence.add_lstm(net, 256, directions=2)
    text = net.channels
    sequence.add_dense(net, _ALIGNED, bias=False)
    net.shape = bands, frames
    for _ in range(2):
        sequence.add_dense(net, 256, bias=False)
        net.add_activation()
        net.add_dropout()
    sequence.add_stepwise_lstm(net, 256 + text, 1024)
    sequence.add_stepwise_dense(net, 1024, _ALIGNED)
    # Filters over the attention weights so far, the sum, its tanh, a product, a softmax, and the weighted letters.
    sequence.add_stepwise_pointwise(net, float(letters * _ALIGNED), 3)
    sequence.add_stepwise_pointwise(net, float(letters * text), 1)
    sequence.add_stepwise_pointwise(net, float(letters * 32), 6)
    net.parameters += 2 * 32 * 31 + 32 * _ALIGNED + _ALIGNED
    sequence.add_stepwise_lstm(net, 1024 + text, 1024)
    sequence.add_stepwise_dense(net, 1024 + text, bands + 1, bias=True)
    net.shape = bands, frames
    for out in (512, 512, 512, 512, bands):
        net.add_conv_norm_act(out, (1, 5), activation="none" if out == bands else "tanh")
        net.add_dropout()
    net.add_training_pointwise("loss", reads=2.0, kernels=6)


def build_fastpitch(net: NetworkBuilder, dims: SpeechSynthesis) -> None:
    """Build FastPitch: six layers over the letters, three predictors, and six layers over all frames.

    A layer has attention and two convolutions. The predictors estimate duration, pitch and energy.
    """
    bands, frames, letters, width = net.channels, net.size[2], dims.symbols, 384
    sequence.add_embedding(net, _SYMBOLS, width, letters)
    for count in (letters, frames):
        net.shape = width, (1, 1, count)
        for _ in range(6):
            attention.add_dense(net, count, width, 3 * 64)
            attention.add_dot_product_attention(net, count, count, 64, 1)
            attention.add_dense(net, count, 64, width, bias=False)
            attention.add_layer_norm(net, count, width)
            net.add_conv(1536, (1, 3), bias=True)
            net.add_activation()
            net.add_conv(width, (1, 3), bias=True)
            net.add_branch()
            attention.add_layer_norm(net, count, width)
        if count == letters:
            for _ in ("duration", "pitch", "energy"):
                net.shape = width, (1, 1, count)
                for _ in range(2):
                    net.add_conv(256, (1, 3), bias=True)
                    net.add_activation()
                    attention.add_layer_norm(net, count, 256)
                net.add_conv(1, 1, bias=True)
    net.shape = width, (1, 1, frames)
    net.add_conv(bands, 1, bias=True)
    net.add_training_pointwise("loss", reads=2.0, kernels=6)


def build_wav2vec2(net: NetworkBuilder, dims: Wav2vec2) -> None:
    """Build wav2vec 2.0: seven convolutions of 512 channels over a sound, then transformer layers.

    If `letters` is set, every frame is classified as a letter with a CTC loss. Otherwise training compares the vectors
    of half of the frames with their targets and 100 distractors each.
    """
    for kernel, stride in ((10, 5), *[(3, 2)] * 4, *[(2, 2)] * 2):
        net.add_conv(512, (1, kernel), stride)
        if kernel == 10:
            net.add_channel_norm()
        net.add_activation("gelu")
    width, frames = dims.width, net.size[2]
    attention.add_layer_norm(net, frames, 512)
    sequence.add_dense(net, width)
    net.add_conv(width, (1, 128), groups=16, bias=True)
    net.add_activation("gelu")
    net.add_branch()
    for _ in range(dims.layers_deep):
        attention.add_multi_head_attention(net, frames, frames, width, dims.attention_heads)
        attention.add_layer_norm(net, frames, width)
        attention.add_feed_forward(net, frames, width, dims.inner or 4 * width)
        attention.add_layer_norm(net, frames, width)
    attention.add_layer_norm(net, frames, width)
    if letters := dims.letters:
        sequence.add_dense(net, letters)
        _add_ctc_loss(net)
    elif net.numerics.training:
        net.shape = width, (1, 1, -(-frames // 2))
        sequence.add_dense(net, 256)
        net.add_batched_matmul(frames / 2, 101.0, 256.0)
        net.channels = 101
        net.add_cross_entropy()
