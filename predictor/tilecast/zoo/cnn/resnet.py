"""ResNet, ResNeXt, Wide ResNet and SE-ResNeXt: residual stages of basic or bottleneck blocks.

Sources: He et al., arXiv 1512.03385 (table 1; the stride of a bottleneck is in its 3x3 convolution, as in torchvision
and in MLPerf's "v1.5"); Xie et al., arXiv 1611.05431; Zagoruyko and Komodakis, arXiv 1605.07146; Hu et al.,
arXiv 1709.01507; for faces Deng et al., arXiv 1801.07698 (section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilecast import constants
from tilecast.graph import Block, CollectiveCall, Shards
from tilecast.model import numbered_field
from tilecast.spec import Workload
from tilecast.zoo import layers
from tilecast.zoo.cnn.builder import NetworkBuilder, Shape
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import build_uniform_block

_WINDOW = 9
"""Pixels under a convolution of 3x3."""
_NEIGHBOURS = 4.0
"""Number of pixels between which a sample is interpolated."""
_EMBEDDING = 512
"""Width of the embedding of a face."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ResidualStages(Images):
    """Dimensions of the residual stages of a ResNet."""

    stages: tuple[int, ...] = numbered_field("stage")
    """Blocks of each stage."""
    bottleneck: bool = False
    """Whether blocks have three convolutions, with a narrow one in the middle, rather than two."""
    stride_first: bool = False
    """Whether the stride of a bottleneck is in its first convolution, as in the authors' own networks."""
    groups: int = 1
    """Groups of a bottleneck's middle convolution (ResNeXt)."""
    group_width: int = 64
    """Channels of a group in the first stage (ResNeXt, Wide ResNet)."""
    excite: int = 0
    """Channel reduction of squeeze-and-excitation, or 0."""
    context: int = 0
    """Channel reduction of the global context after each block of the later stages (arXiv 1904.11492), or 0."""
    deep_stem: bool = False
    """Whether the stem has three 3x3 convolutions in place of one of 7x7."""
    shifts: bool = False
    """Whether blocks read some of their channels from the previous and the next image (TSM, arXiv 1811.08383)."""
    interlaces: bool = False
    """Whether learned offsets and weights also move a quarter of the channels in time (TIN, arXiv 2001.06499)."""
    deformable: bool = False
    """Whether the middle convolutions of the later stages read at predicted offsets (arXiv 1703.06211)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ResNet(ResidualStages):
    """Dimensions of a ResNet that classifies."""

    stages: tuple[int, int, int, int] = numbered_field("stage")
    classes: int = 1000
    small_stem: bool = False
    """Whether the stem is one 3x3 convolution without pooling, for images of 32 pixels."""
    frames: int = 1
    """Number of images per sample, a video, over which the class scores are averaged (TSN, arXiv 1608.00859)."""
    temporal_pyramid: bool = False
    """Whether a temporal pyramid joins the last two stages before the classifier (TPN, arXiv 2004.03548)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FaceResNet(Images):
    """Dimensions of a face recogniser."""

    stages: tuple[int, int, int, int] = numbered_field("stage")
    """Blocks of each stage."""
    identities: int
    """Number of people among whom it classifies in training."""
    sampled: float = 1.0
    """Share of the identities that each step uses."""


def build_resnet(net: NetworkBuilder, dims: ResNet) -> None:
    """Build a ResNet: a stem, four stages and a classifier."""
    net.batch = net.batch * dims.frames
    add_stem(net, small=dims.small_stem)
    features = []
    for number in range(1, 5):
        add_stage(net, dims, number)
        features.append(net.shape)
    if dims.temporal_pyramid:
        _add_temporal_pyramid(net, features[2], dims.classes)
    net.add_classifier_head(dims.classes)


_PYRAMID_FRAMES = 8.0
"""Images over which a temporal pyramid takes the maximum (mmaction2, configs/_base_/models/tpn_tsm_r50.py)."""
_PYRAMID_GROUPS = 32
"""Groups of its convolutions on single levels."""


def _add_temporal_pyramid(net: NetworkBuilder, early: Shape, classes: int) -> None:
    """Add the temporal pyramid over features of the shape `early` and the current tensor, and its own classifier.

    The earlier features get the shape of the later ones. Each level is convolved over time, here priced over the
    height, and the maximum over time is taken. What follows has few pixels: two fusions of the levels, with an exchange
    between them, and one fusion of both results (mmaction2, models/necks/tpn.py).
    """
    late = net.shape
    net.keep_output()
    net.continue_from(early)
    net.add_conv_norm_act(late[0], 3, 2)
    net.keep_output()
    net.add_classifier_head(classes, dropout=True)
    net.continue_from(early)
    net.add_conv_norm_act(late[0], 3, 2)
    for is_kept in (False, True):
        net.shape, net.is_kept = late, is_kept
        net.add_conv(late[0] // 2, (3, 1), groups=_PYRAMID_GROUPS)
        net.keep_output()
        net.add_pointwise("pool", writes=1 / _PYRAMID_FRAMES, absorbed=False, backward=(1 / _PYRAMID_FRAMES, 1.0))
    net.batch = net.batch / _PYRAMID_FRAMES
    net.add_conv(late[0] // 2, (3, 1))
    for _ in range(2):
        for _ in range(2):
            net.channels = late[0] // 2
            net.add_conv_norm_act(late[0] // 2, 1, groups=_PYRAMID_GROUPS)
        net.add_concatenation(late[0])
        net.add_conv_norm_act(late[0], 1)
    net.add_concatenation(2 * late[0])
    net.add_conv_norm_act(late[0], 1)


def add_stem(net: NetworkBuilder, *, small: bool = False, deep: bool = False) -> None:
    """Add the stem, a convolution and a pooling that divide each side by four.

    A `small` stem keeps the size of the image and has no pooling. A `deep` stem has three convolutions.
    """
    if deep:
        net.add_conv_norm_act(32, 3, 2)
        net.add_conv_norm_act(32, 3)
    net.add_conv_norm_act(64, 3 if small or deep else 7, 1 if small or deep else 2)
    if not small:
        net.add_pool(3, 2)


def add_stage(
    net: NetworkBuilder, dims: ResidualStages, number: int, *, stride: int = 2, dilated: bool = False
) -> None:
    """Add stage `number`, from 1 to 4. In all stages but the first, the first block has stride `stride`.

    If `dilated`, the 3x3 convolutions are dilated.
    """
    for index in range(dims.stages[number - 1]):
        step = stride if number > 1 and not index else 1
        add_block(net, dims, 64 * 2 ** (number - 1), step, is_later_stage=number > 1, dilated=dilated)


def add_block(
    net: NetworkBuilder,
    dims: ResidualStages,
    width: int,
    stride: int = 1,
    *,
    is_later_stage: bool = False,
    dilated: bool = False,
) -> None:
    """Add a residual block. `width` is its number of output channels, or of inner channels before 4x expansion.

    If `is_later_stage`, the block also gets the model's deformable convolutions and global context, if any.
    """
    entry = net.shape
    if dims.shifts:
        net.keep_elements(net.elements)
        # Forward, the moved eighths and their zeros are made, and all parts joined. Backward, each of three parts fills
        # a whole tensor with zeros and copies its gradient into it, and the three are added.
        net.add_pointwise("shift", reads=3 / 2, writes=3 / 2, absorbed=False, backward=(5.0, 6.0))
    if dims.interlaces:
        # The two images nearest to an offset are moved, weighted and added, and the sum is weighted: three products
        # keep a quarter each (mmaction2, resnet_tin.py, linear_sampler and TemporalInterlace).
        net.keep_elements(3 / 4 * net.elements)
        net.add_pointwise("interlace", 3 / 4 * net.elements, kernels=3, absorbed=False)
    if dims.bottleneck:
        groups = dims.groups
        inner = width * dims.group_width * groups // 64
        early = dims.stride_first
        net.add_conv_norm_act(inner, 1, stride if early else 1)
        if is_later_stage and dims.deformable:
            add_deformable_sampling(net, 1 if early else stride)
        is_sampled = is_later_stage and dims.deformable
        # Sampled pixels are multiplied as a matrix, which has no Winograd kernel either.
        net.add_conv_norm_act(inner, 3, 1 if early else stride, groups=groups, dilated=dilated or is_sampled)
        net.add_conv_norm_act(4 * width, 1, activation="none")
    else:
        net.add_conv_norm_act(width, 3, stride, dilated=dilated)
        net.add_conv_norm_act(width, 3, activation="none", dilated=dilated)
    if dims.excite:
        net.add_squeeze_excite(net.channels // dims.excite)
    if is_later_stage and dims.context:
        _add_context(net, dims.context)
    leave = net.shape
    if leave != entry:
        net.continue_from(entry)
        net.add_conv_norm_act(leave[0], 1, stride, activation="none")
    net.add_branch()
    net.add_activation()


_SAMPLED_IMAGES = 64.0
"""Number of images whose copies for a deformable convolution exist at once."""


def add_deformable_sampling(net: NetworkBuilder, stride: int) -> None:
    """Add the offsets of a 3x3 deformable convolution and the copy of the features at these offsets.

    The copy has nine values per pixel, each interpolated between four neighbours. The backward pass makes the copy
    again. It also adds gradients to the offsets and to the neighbours. The latter are atomic additions, each of which
    moves a sector (mmdet/ops/dcn/src/deform_conv_cuda.cpp).
    """
    entry = net.shape
    net.continue_from(entry)
    net.add_conv(2 * _WINDOW, 3, stride, bias=True)
    net.keep_output()
    samples = net.batch * (entry[0] * _WINDOW * net.size[1] * net.size[2])
    net.shape = entry
    sectors = constants.shipped_constants().kernels.sector_bytes / net.numerics.element
    net.add_pointwise("sample", samples, reads=_NEIGHBOURS, absorbed=False, backward=(9.0, 1.0 + _NEIGHBOURS * sectors))
    # The copies of up to 64 images, and their gradients, exist at a time (mmdet/ops/dcn/deform_conv.py: im2col_step).
    net.raise_peak(2 * samples * np.minimum(_SAMPLED_IMAGES / np.maximum(net.batch, 1.0), 1.0))
    net.add_branch_gradient_sums(2)


def _add_context(net: NetworkBuilder, reduction: int) -> None:
    """Add a global context block: a weighted mean over all pixels, two dense layers and a sum per channel."""
    shape = net.shape
    inner = shape[0] // reduction
    net.continue_from(shape)
    net.add_conv(1, 1, bias=True)
    net.add_pointwise("softmax", absorbed=False)
    net.shape = shape
    net.add_batched_matmul(float(shape[0]), 1.0, float(shape[1][1] * shape[1][2]))
    for inputs, outputs in ((shape[0], inner), (inner, shape[0])):
        net.ops += layers.linear("context", net.numerics, net.batch, inputs, outputs)
        net.parameters += inputs * outputs + outputs
    net.parameters += 2 * inner
    net.keep_elements(net.elements)
    net.add_pointwise("context.add", backward=(1.0, 0.0))


def build_face_resnet(net: NetworkBuilder, dims: FaceResNet) -> None:
    """Build a face recogniser: a stem, four stages whose first blocks have stride 2, and an embedding.

    Images have 112 pixels a side. `build_identity_classifier` reads the embedding, which has 512 numbers.
    """
    net.add_conv_norm_act(64, 3, activation="prelu")
    net.parameters += net.channels
    for number, depth in enumerate(dims.stages, 1):
        for index in range(depth):
            _add_face_block(net, 32 * 2**number, 1 if index else 2)
    net.add_channel_norm()
    net.add_dropout()
    net.add_dense(_EMBEDDING)
    net.add_channel_norm()


def _add_face_block(net: NetworkBuilder, width: int, stride: int) -> None:
    """Add a residual block of two 3x3 convolutions after a norm, with a PReLU between them."""
    entry = net.shape
    net.add_channel_norm()
    net.add_conv_norm_act(width, 3, activation="prelu")
    net.parameters += width
    net.add_conv_norm_act(width, 3, stride, activation="none")
    if net.shape != entry:
        net.continue_from(entry)
        net.add_conv_norm_act(width, 1, stride, activation="none")
    net.add_branch()


def build_identity_classifier(workload: Workload, shards: Shards) -> Block:
    """Return the classifier of a face recogniser, with one column of weights per identity.

    Weights and embeddings are normalised, and the true identity has a margin (Deng et al., arXiv 1801.07698, section
    3.1). A step may use only a sample of the identities (An et al., arXiv 2010.05222, section 3.2).

    Expert parallelism shards the identities. Each rank receives the embeddings of all samples and computes the logits
    of the identities in its shard. The softmax exchanges a maximum and a sum per sample.
    """
    dims, numerics = workload.model.get_dimensions(FaceResNet), Numerics.from_workload(workload)
    ranks = shards.expert.astype(float)
    rows = shards.micro_batch * ranks
    held = dims.identities / ranks
    share = dims.sampled
    seen = held * share
    ops = []
    if share < 1 and numerics.training:
        ops += layers.elementwise("sample", numerics, held, 4.0, 4.0, launches=4.0)
        ops += layers.embedding("sample.weights", numerics, seen, float(_EMBEDDING))
    ops += layers.pointwise("norm", numerics, seen * _EMBEDDING, kernels=2, absorbed=False)
    ops += layers.linear("logits", numerics, rows, _EMBEDDING, seen)
    ops += layers.pointwise("margin", numerics, rows * seen, kernels=2, backward=(1.0, 1.0))
    collectives = [CollectiveCall("embeddings", "all_gather", "expert", numerics.element * rows * _EMBEDDING)]
    if numerics.training:
        ops += layers.cross_entropy("loss", numerics, rows, seen)
        collectives.append(CollectiveCall("softmax", "all_reduce", "expert", 4.0 * rows, count=2.0))
        gradient = numerics.element * rows * _EMBEDDING
        collectives.append(CollectiveCall("embeddings.gradient", "reduce_scatter", "expert", gradient, "backward"))
    activation_bytes, scratch = layers.logit_bytes(numerics)
    activations = rows * seen * (activation_bytes + numerics.element)
    weights = held * _EMBEDDING
    return build_uniform_block(
        "classifier", len(shards), ops, weights, activations, collectives=tuple(collectives), expert_parameters=weights,
        working_bytes=scratch * rows * seen + 2 * numerics.element * seen * _EMBEDDING,
    )  # fmt: skip
