"""Two-stage detectors: Faster R-CNN, Mask R-CNN and their variants, over a feature pyramid or over one level.

Matching of anchors and regions, sampling and non-maximum suppression run image by image, as in one-stage detectors.

Sources: Ren et al., arXiv 1506.01497; Lin et al., arXiv 1612.03144; He et al., arXiv 1703.06870 (figure 4: a head of
the fourth stage, "C4", or of two dense layers); detectron2's configurations of the same names, including "DC5".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tilecast import constants
from tilecast.zoo.cnn import attention, resnet
from tilecast.zoo.cnn.builder import NetworkBuilder, Shape
from tilecast.zoo.cnn.detection import (
    MATCHING,
    PYRAMID,
    Detector,
    add_backbone,
    add_feature_pyramid,
    add_guided_anchors,
    add_pyramid_conv,
    add_shared_head,
    join_levels,
    raise_peak_to_overlaps,
)

_SIZES = 5
"""Number of anchor sizes. A pyramid has one per level, and a single level has all."""
_SHAPES = 3
"""Number of aspect ratios of anchors."""
_REGION = 14
"""Side of a typical region, in pixels of the features."""
_PER_OBJECT_REGION = 4.0
"""Regions that training samples for each one with an object."""
_NEIGHBOURS = 4
_PROPOSING = 40.0
"""Number of kernels that clip, select and suppress the proposals of one image (detectron2, proposal_utils.py)."""
_JOINED = 50.0
"""Number of kernels of a head over all images of a batch: decoding, ranking or assigning of levels, and losses."""
_CROPPING = 16.0
"""Number of kernels that select one image's regions with objects and crop their masks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TwoStage(Detector):
    """Dimensions of detectors with a region proposal network."""

    region_stage: bool = False
    """Whether the fourth stage of the ResNet runs on every region rather than on the image."""
    balanced: bool = False
    """Whether the levels of the pyramid are joined, refined by attention of all pixels, and added back (Libra R-CNN,
    arXiv 1904.02701, section 3.2)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RegionCnn(TwoStage):
    """Dimensions of detectors that also classify the proposed regions."""

    proposals: int
    """Regions of an image that are classified in training."""
    given_proposals: bool = False
    """Whether regions are given rather than proposed by the network."""
    cascade: int | None = None
    """Number of heads that each refine the boxes of the head before. None for one head, with boxes per class."""
    classes: int = 81
    """Categories, one of which is the background."""
    mask_heads: int = 1
    """Number of mask heads. Each follows one of the first box heads."""
    scored_masks: bool = False
    """Whether a further head predicts how good a mask is (arXiv 1903.00241)."""
    semantic_classes: int = 0
    """Number of categories for every pixel of the image. 0 if pixels are not classified."""
    hybrid: bool = False
    """Whether regions also read features of classified pixels, and each head for masks those of the heads before it
    (HTC, arXiv 1901.07518)."""
    pooling_branches: int = 0
    """Predictions that shape the pooling of a region: 1 is offsets of its samples (arXiv 1703.06211, section 2.2), 2
    also their weights (arXiv 1811.11168, section 3.2)."""


def build_rpn(net: NetworkBuilder, dims: TwoStage) -> None:
    """Build a region proposal network alone, on the features of a frozen ResNet."""
    _add_region_proposals(net, dims, _add_feature_levels(net, dims))


def build_faster_rcnn(net: NetworkBuilder, dims: RegionCnn) -> None:
    """Build Faster R-CNN. If `given_proposals`, leave out the region proposal network."""
    levels = _add_feature_levels(net, dims)
    if not dims.given_proposals:
        _add_region_proposals(net, dims, levels)
    _add_box_head(net, dims, levels)


def build_mask_rcnn(net: NetworkBuilder, dims: RegionCnn) -> None:
    """Build Mask R-CNN: Faster R-CNN and `mask_heads` heads that predict masks.

    Mask heads run on a quarter of the regions in training and on 100 regions otherwise. A head has four convolutions,
    unless the fourth ResNet stage runs on the regions (`region_stage`), and then doubles each side. If
    `semantic_classes` is set, another head classifies every pixel of the image or, if `hybrid`, of the second level.
    """
    levels = _add_feature_levels(net, dims)
    if not dims.given_proposals:
        _add_region_proposals(net, dims, levels)
    if dims.hybrid:
        _add_fused_semantics(net, levels, dims.semantic_classes)
    _add_box_head(net, dims, levels)
    net.add_host_operator("crop", dims.mask_heads * _CROPPING * net.batch)
    with _repeat_per_object_region(net, dims):
        for before in range(dims.mask_heads):
            _add_mask_head(net, dims, levels, before)
    if dims.semantic_classes and not dims.hybrid:
        _add_segmentation_head(net, levels[:4], dims.semantic_classes)


def _add_mask_head(net: NetworkBuilder, dims: RegionCnn, levels: list[Shape], before: int) -> None:
    """Add a head that predicts a mask per class for each region and, if `scored_masks`, a score of the mask.

    If `hybrid` is true, the convolutions of the `before` earlier heads run again. Each of these heads reads the sum of
    the region and the previous head's output (arXiv 1901.07518, section 3.2; mmdet, HTCMaskHead).
    """
    if dims.region_stage:
        net.shape = 2048, (1, 7, 7)
        # Regions with objects are an index into the features of all. Its gradient fills a tensor of them all, beside
        # that of the boxes, and the two are summed.
        net.raise_peak(3.0 * (net.batch * _PER_OBJECT_REGION) * (2048 * 7 * 7))
    else:
        _add_roi_align(net, levels[0][0], 14)
        if dims.hybrid:
            _add_roi_align(net, levels[0][0], 14)
            net.add_branch()
        for head in range(before + 1 if dims.hybrid else 1):
            weights = net.parameters
            if head:
                net.add_conv(PYRAMID, 1, bias=True)
                net.add_activation()
                net.keep_output()
                net.add_branch()
            for _ in range(4):
                add_pyramid_conv(net, 3, normed=dims.head_norm)
                net.add_activation()
            if dims.hybrid and head < before:
                net.parameters = weights  # they are counted with the head that has them
    features = net.shape
    net.add_up_conv(PYRAMID)
    net.add_activation()
    net.add_conv(dims.classes, 1, bias=True)
    net.add_cross_entropy(2)
    if dims.scored_masks:
        net.continue_from(features)
        for stride in (1, 1, 1, 2):
            net.add_conv(PYRAMID, 3, stride, bias=True)
            net.add_activation()
        for outputs in (1024, 1024, dims.classes):
            net.add_dense(outputs)


def build_keypoint_rcnn(net: NetworkBuilder, dims: RegionCnn) -> None:
    """Build Keypoint R-CNN: Faster R-CNN and a head that predicts a heat map for each of 17 body keypoints.

    The head has eight convolutions. It runs on a quarter of the regions in training and on 100 regions otherwise.
    """
    levels = _add_feature_levels(net, dims)
    if not dims.given_proposals:
        _add_region_proposals(net, dims, levels)
    _add_box_head(net, dims, levels)
    with _repeat_per_object_region(net, dims):
        _add_roi_align(net, levels[0][0], 14)
        for _ in range(8):
            net.add_conv(512, 3, bias=True)
            net.add_activation()
        net.add_up_conv(17)
        net.add_upsample()
        net.add_cross_entropy(net.size[1] * net.size[2])


def _add_box_head(net: NetworkBuilder, dims: RegionCnn, levels: list[Shape]) -> None:
    """Add a head that predicts a class and a box for each proposal, or `cascade` such heads.

    If `region_stage`, the fourth ResNet stage runs on every region. Otherwise the head has convolutions or dense
    layers.
    """
    images = net.batch
    for _ in range(dims.cascade or 1):
        net.add_host_operator("match", _JOINED + MATCHING * images)
    net.batch = images * dims.proposals
    for _ in range(dims.cascade or 1):
        if dims.region_stage:
            _add_roi_align(net, levels[0][0], 14)
            net.fixed_norms = not dims.trained_norms
            resnet.add_stage(net, dims, 4)
            net.fixed_norms = False
            net.add_global_mean()
        else:
            if dims.pooling_branches:
                _add_pooling_branches(net, dims, levels)
            _add_roi_align(net, levels[0][0], 7)
            if dims.hybrid:
                _add_roi_align(net, levels[0][0], 14)
                net.keep_output()  # the mean of each 2 x 2 pixels reads it again
                net.shape = levels[0][0], (1, 7, 7)
                net.add_pointwise("mean", reads=4.0, absorbed=False, backward=(1.0, 4.0))
                net.add_branch()
            for _ in range(4 * dims.head_norm):
                add_pyramid_conv(net, 3, normed=True)
                net.add_activation()
            for _ in range(1 if dims.head_norm else 2):
                net.add_dense(1024)
                net.add_activation()
        entry, classes = net.shape, dims.classes
        net.add_dense(4 if dims.cascade else classes * 4)
        net.shape = entry
        net.add_dense(classes)
        net.add_cross_entropy()
        net.shape = entry
    net.batch = images


def _add_pooling_branches(net: NetworkBuilder, dims: RegionCnn, levels: list[Shape]) -> None:
    """Add the dense layers that predict offsets and weights for the samples of a region, from a plain pooling of it.

    Each of the four levels from which regions are cropped has its own layers, and a quarter of the regions is assumed
    to be on each (mmdet, DeformRoIPoolingPack and ModulatedDeformRoIPoolingPack).
    """
    regions = net.batch
    net.batch = regions / len(levels[:4])
    for _ in levels[:4]:
        _add_roi_align(net, levels[0][0], 7)
        entry, samples = net.shape, net.size[1] * net.size[2]
        for hidden, outputs in ((2, 2 * samples), (1, samples))[: dims.pooling_branches]:
            net.shape = entry
            for _ in range(hidden):
                net.add_dense(1024)
                net.add_activation()
            net.add_dense(outputs)
    net.batch = regions


@contextmanager
def _repeat_per_object_region(net: NetworkBuilder, dims: RegionCnn) -> Iterator[None]:
    """Run the layers added inside this context once per region that contains an object.

    There are a quarter of `proposals` such regions per image in training and 100 otherwise.
    """
    images = net.batch
    net.batch = images * (dims.proposals / _PER_OBJECT_REGION if net.numerics.training else 100.0)
    yield
    net.batch = images


def _add_segmentation_head(net: NetworkBuilder, levels: list[Shape], classes: int) -> None:
    """Add a head that predicts a class for every pixel (Kirillov et al., arXiv 1901.02446, section 3).

    Convolutions and upsampling bring every level to the size of the finest level, and the results are summed.
    """
    join_levels(net, levels)
    net.add_conv(classes, 1, bias=True)
    net.add_upsample()
    net.add_upsample()
    net.add_cross_entropy()


def _add_fused_semantics(net: NetworkBuilder, levels: list[Shape], classes: int) -> None:
    """Add a head that classifies pixels of the second level and returns features for the regions.

    All levels are resized to the second one, projected and summed. Four convolutions follow (arXiv 1901.07518, section
    3.3; mmdet, FusedSemanticHead).
    """
    size = levels[1][1]
    for index, level in enumerate(levels):
        if index == 1:
            net.continue_from(level)
        else:
            net.shape = PYRAMID, size
            net.add_resize(level[1][1] * level[1][2] / (size[1] * size[2]))
        net.add_conv(PYRAMID, 1, bias=True)
        net.add_activation()
        net.keep_output()
        if index:
            net.add_branch()
    for _ in range(4):
        net.add_conv(PYRAMID, 3, bias=True)
        net.add_activation()
    features = net.shape
    net.add_conv(classes, 1, bias=True)
    net.add_cross_entropy()
    net.continue_from(features)
    net.add_conv(PYRAMID, 1, bias=True)
    net.add_activation()


def _balance_levels(net: NetworkBuilder, levels: list[Shape]) -> None:
    """Add the mean of all levels at the size of the third level, refine it by attention, and add it to each level.

    Finer levels are reduced by maximum pooling, which saves its input and the index of each maximum (mmdet, BFP).
    """
    middle = levels[2]
    for index, level in enumerate(levels):
        net.shape = level
        if index < 2:
            net.keep_output()
        net.shape = middle
        net.add_pointwise("pool" if index < 2 else "resize")
        net.add_branch()
    pixels = middle[1][1] * middle[1][2]
    attention.add_pixel_attention(net, float(pixels), PYRAMID)
    net.add_conv(PYRAMID, 1, bias=True)
    net.add_branch()
    for level in levels:
        net.shape = level
        net.add_resize(pixels / (level[1][1] * level[1][2]))
        net.add_branch()


def _add_feature_levels(net: NetworkBuilder, dims: TwoStage) -> list[Shape]:
    """Add the ResNet and return the shapes of the feature maps from which regions are cropped.

    By default these are the levels of a feature pyramid. If `dilated`, it is the fourth stage. If `region_stage`, it is
    the third stage.
    """
    if dims.region_stage:
        add_backbone(net, dims, frozen=True, stages=3)
        return [net.shape]
    levels = add_backbone(net, dims, frozen=True)
    if dims.dilated:
        return levels[-1:]
    pyramid = add_feature_pyramid(net, levels, normed=dims.head_norm)
    channels, (_, height, width) = pyramid[-1]
    levels = [*pyramid, (channels, (1, -(-height // 2), -(-width // 2)))]
    if dims.balanced:
        _balance_levels(net, levels)
    return levels


def _add_region_proposals(net: NetworkBuilder, dims: TwoStage, levels: list[Shape]) -> None:
    """Add the region proposal network: a 3x3 convolution per level, then a score and a box for each anchor."""
    anchors = _SHAPES * (_SIZES if len(levels) == 1 else 1)

    def add_level_head() -> None:
        """Add the proposal head on one feature level: a shared convolution, then scores and boxes of the anchors."""
        net.add_conv(net.channels, 3, bias=True)
        net.add_activation()
        if dims.guided:
            add_guided_anchors(net)
        entry = net.shape
        net.add_conv(anchors, 1, bias=True)
        net.continue_from(entry)
        net.add_conv(anchors * 4, 1, bias=True)

    add_shared_head(net, levels, add_level_head)
    raise_peak_to_overlaps(net, dims, levels, anchors)
    net.add_host_operator("propose", _JOINED + (MATCHING + _PROPOSING) * net.batch)


def _add_roi_align(net: NetworkBuilder, channels: int, side: int) -> None:
    """Add RoIAlign, which crops each region from the features and resizes it to `side` x `side` pixels.

    Each output pixel is the mean of samples, and each sample is interpolated between four neighbours. There is one
    sample for each feature pixel under a region (detectron2, layers/roi_align.py: sampling_ratio 0). A region is
    assumed to be 14 feature pixels wide, like a region of 224 pixels on features of stride 16 (arXiv 1612.03144,
    equation 1). The backward pass adds the gradient of each sample to its four neighbours with atomic additions. Unless
    the layout is channels last, each addition moves a whole sector.
    """
    net.shape = (channels, (1, side, side))
    numerics = net.numerics
    added = _NEIGHBOURS * max(_REGION / side, 1.0) ** 2
    sector_bytes = constants.shipped_constants().kernels.sector_bytes
    written = added if numerics.channels_last else added * sector_bytes / numerics.element
    net.add_pointwise("align", reads=float(_NEIGHBOURS), absorbed=False, backward=(1.0, written))
