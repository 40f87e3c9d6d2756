"""Convolutions by the distance of their pixels, by version of the framework, and the bytes of Winograd's transforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tilecast import kernels, memory, zoo
from tilecast.graph import KIND_NAMES
from tilecast.hardware import find_gpu
from tilecast.model import Model
from tilecast.spec import Plan, Plans, Workload
from tilecast.step.blocks import correction_factors
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.cnn.csp import CspDetector, _add_conv
from tilecast.zoo.cnn.resnet import ResNet, add_block
from tilecast.zoo.cnn.stylegan import add_modulated_conv
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.reading import build_model

BATCH = np.array([2.0])
V100 = find_gpu("v100-sxm")


def network(channels: int, depth: int = 1) -> NetworkBuilder:
    numerics = Numerics.from_workload(Workload(zoo.find_preset("resnet-50"), 1, 2, "fp32"))
    return NetworkBuilder(numerics, BATCH, channels, (depth, 64, 64), flat=depth == 1)


def conv_seconds(build: Callable[[NetworkBuilder], None], **how: int) -> float:
    """Return the seconds of the forward convolution that `build` adds to a network of 256 channels."""
    net = network(256, **how)
    build(net)
    table = next(op.table for op in net.ops if KIND_NAMES[op.table.kind[0]] == "conv")
    return float(kernels.predict_kernel_times(table, V100).seconds[0])


def test_a_dilated_convolution_takes_longer_than_winograds() -> None:
    near = conv_seconds(lambda net: net.add_conv(256, 3))
    apart = conv_seconds(lambda net: net.add_conv(256, 3, dilated=True))
    assert 1.02 * near < apart < 4 * near


def test_dilation_changes_neither_size_nor_parameters() -> None:
    near, apart = network(64), network(64)
    near.add_conv(32, 3)
    apart.add_conv(32, 3, dilated=True)
    assert (near.shape, near.parameters) == (apart.shape, apart.parameters)


def test_flat_kernels_over_a_volume_have_no_winograd() -> None:
    """cuDNN has none for three-dimensional convolutions: four slices at once took as long as four images."""
    image = conv_seconds(lambda net: net.add_conv(256, 3))
    volume = conv_seconds(lambda net: net.add_conv(256, (1, 3, 3)), depth=4)
    assert volume > 4.5 * image


def test_a_window_over_volumes_runs_at_the_rate_of_volumes_whatever_its_depth() -> None:
    """I3D and R(2+1)D of MMAction2 on V100: windows of one image have cuDNN's kernels for volumes too."""
    image = conv_seconds(lambda net: net.add_conv(256, 3, dilated=True))
    flat = conv_seconds(lambda net: net.add_conv(256, (1, 3, 3)), depth=4)
    assert flat > 5.0 * image
    # A window of one pixel is a matrix product, with or without depth.
    point = conv_seconds(lambda net: net.add_conv(256, 1))
    assert conv_seconds(lambda net: net.add_conv(256, (1, 1, 1)), depth=4) < 4.5 * point


def test_shifting_channels_in_time_moves_several_whole_tensors() -> None:
    still, shifted = (shift_bytes(shifts=shifts) for shifts in (False, True))
    # MMAction2, backbones/resnet_tsm.py: three slices and their sum, whose gradients are whole tensors.
    assert still == 0.0 < 10 * 64 * 64 * 64 * 4 * 2 < shifted


def shift_bytes(*, shifts: bool) -> float:
    net = network(64)
    dims = replace(zoo.find_preset("resnet-50").get_dimensions(ResNet), shifts=shifts)
    add_block(net, dims, 64)
    return float(sum(op.table.bytes()[0] for op in net.ops if op.name.startswith("shift")))


def working_bytes(channels: int, dilated: bool) -> float:
    net = network(channels)
    net.add_conv(512, 3, dilated=dilated)
    return float(net.working_bytes[0])


@pytest.mark.parametrize(("channels", "copies"), [(512, 2.0), (2048, 5.0)])
def test_winograds_transforms_of_wide_convolutions_are_billed(channels: int, copies: float) -> None:
    """MMSegmentation's FCN, PSPNet and GCNet were billed 8 to 15 % below their peaks without them."""
    touched = 4 * 2 * 64 * 64 * (channels + 512)
    assert working_bytes(channels, dilated=False) == pytest.approx(copies * touched, rel=0.01)
    assert working_bytes(channels, dilated=True) == pytest.approx(2.0 * touched, rel=0.01)


def slowdowns(model: Model, version: str | None, precision: str = "fp32") -> set[float]:
    workload = Workload(model, 1, 2, precision, framework="ddp", framework_version=version)  # type: ignore[arg-type]
    graph = zoo.build_sharded_graph(workload, Plans.from_plans(Plan(micro_batch=2))).graph
    table, rows = graph.kernels()
    times = kernels.predict_kernel_times(table, V100)
    ops = [op for block in graph.blocks for op in block.ops]
    named = (correction_factors(workload, op, times, index) for op, index in zip(ops, rows, strict=True))
    return {float(item["framework.convolution"][0]) for item in named if "framework.convolution" in item}


def test_old_libraries_run_convolutions_slower() -> None:
    """PyTorch 1.1 came with cuDNN 7, whose grouped convolutions were far slower than its others."""
    assert len(slowdowns(zoo.find_preset("resnet-50"), "1.1")) == 1
    dense, grouped = sorted(slowdowns(zoo.find_preset("resnext101-64x4d"), "1.1"))
    assert 1.0 < dense < grouped
    assert not slowdowns(zoo.find_preset("resnext101-64x4d"), "1.4")
    assert not slowdowns(zoo.find_preset("resnext101-64x4d"), None)
    assert not slowdowns(zoo.find_preset("resnext101-64x4d"), "1.1", "fp16")


def test_a_softmax_keeps_its_input_before_pytorch_1_11() -> None:
    """Each of the two losses of a segmenter keeps the logits of every pixel once more."""
    model = zoo.find_preset("pspnet-r50-d8").with_dimensions(classes=150)
    kept = {}
    for version in ("1.6", "2.6"):
        job = Workload(model, 1, 4, "fp32", framework="ddp", framework_version=version)
        plans = Plans.from_plans(Plan(micro_batch=4))
        kept[version] = memory.footprint(job, zoo.build_sharded_graph(job, plans), plans).activations[0]
    logits = 4 * 150 * 512 * 1024 * 4
    assert kept["1.6"] - kept["2.6"] == pytest.approx(2 * logits)


@pytest.mark.parametrize("family", ["psanet", "apcnet", "dmnet"])
def test_heads_that_join_four_contexts_keep_more_than_the_pyramid_of_pspnet(family: str) -> None:
    base = zoo.find_preset("pspnet-r50-d8")
    plans = Plans.from_plans(Plan(micro_batch=2))
    kept = []
    for head in ("pspnet", family):
        job = Workload(replace(base, family=head), 1, 2, "fp32", framework="ddp")
        kept.append(memory.footprint(job, zoo.build_sharded_graph(job, plans), plans).activations[0])
    assert kept[1] > kept[0]


def test_overlaps_of_anchors_and_boxes_are_billed() -> None:
    """RetinaNet's anchors of one image, nine per pixel of each level, are compared with all boxes of the image."""
    sides = {"image": 640, "image_width": 640, "largest_image": 640, "largest_image_width": 640}
    base = zoo.find_preset("retinanet-r50").with_dimensions(**sides)
    plans, peaks = Plans.from_plans(Plan(micro_batch=2)), []
    for boxes in (1000, 2000):
        job = Workload(base.with_dimensions(largest_boxes=boxes), 1, 2, "fp32", framework="ddp")
        peaks.append(memory.footprint(job, zoo.build_sharded_graph(job, plans), plans).allocated[0])
    anchors = 9 * sum((640 // stride) ** 2 for stride in (8, 16, 32, 64, 128))
    assert peaks[1] - peaks[0] == pytest.approx(7 * 4 * 1000 * anchors)


def allocated(table: dict[str, object], **more: object) -> float:
    job = Workload(build_model({"name": "m", **table, **more}), 1, 2, "fp32", framework="ddp")
    plans = Plans.from_plans(Plan(micro_batch=2))
    return float(memory.footprint(job, zoo.build_sharded_graph(job, plans), plans).allocated[0])


def test_task_aligned_assignment_compares_whole_batches() -> None:
    """YOLOX, whose towers are equally wide, assigns image by image and holds fewer numbers of a pair."""
    table = {"family": "csp-detector", "image": 640, "width": 0.25, "depth": 0.33, "towers": 2}
    pixels = sum((640 // stride) ** 2 for stride in (8, 16, 32))
    assert allocated(table) - allocated(table, tower_width=64) > (22 - 8 - 2) * 2 * pixels * 100 * 4


def test_task_aligned_assignment_holds_a_row_of_integers_for_each_candidate() -> None:
    """One-hot rows have 8 bytes for each pixel; with 13 candidates YOLOv6-n was billed 19 % below its peak."""
    table = {"family": "csp-detector", "image": 640, "width": 0.25, "depth": 0.33, "towers": 1}
    pairs = 2 * 100 * sum((640 // stride) ** 2 for stride in (8, 16, 32))
    assert allocated(table, candidates=13) - allocated(table, candidates=10) == pytest.approx(3 * 8 * pairs)
    more = allocated(table, largest_boxes=200) - allocated(table)
    assert more == pytest.approx((6 + 20) * 4 * pairs)


def test_the_norm_of_an_identity_branch_keeps_nothing() -> None:
    """Its input is that of the convolutions beside it (RepVGG)."""
    kept = []
    for branched in (False, True):
        net = network(32)
        _add_conv(net, CspDetector(image=64, partial=False, branched=branched), 32, 3)
        kept.append(net.activation_bytes[0])
    # The input and the output of the 3x3 convolution, and SiLU's input; with branches the output of another one.
    assert kept == [3 * 4 * 2 * 64 * 64 * 32] * 2


@pytest.mark.parametrize(("version", "kept"), [("1.6", 4), ("1.7", 3)])
def test_a_hard_swish_of_several_kernels_keeps_its_clipped_sum(version: str, kept: int) -> None:
    """MMCV writes x * relu6(x + 3) / 6 before PyTorch 1.7; LR-ASPP was billed 18 % below its peak."""
    job = Workload(zoo.find_preset("mobilenet-v3-large"), 1, 2, "fp32", framework="ddp", framework_version=version)
    net = NetworkBuilder(Numerics.from_workload(job), BATCH, 32, (1, 64, 64))
    net.add_conv_norm_act(32, 1, activation="hard-swish")
    assert net.activation_bytes[0] == kept * 4 * 2 * 64 * 64 * 32
    swish = [op for op in net.ops if op.name.startswith("hard-swish") and op.only is None]
    assert sum(op.count for op in swish) == {3: 2, 4: 9}[kept]


def test_a_temporal_pyramid_has_the_parameters_of_the_published_network() -> None:
    """82,445,724 of tpn_tsm_r50 for 174 classes (MMAction2, configs/recognition/tpn/metafile.yml)."""
    dims = zoo.find_preset("resnet-50").with_dimensions(shifts=True, frames=8, classes=174, temporal_pyramid=True)
    assert zoo.count_parameters(Workload(dims, 1, 8, precision="fp32")) == 82_445_724


def test_modulated_weights_of_stylegan_are_kept_for_every_image() -> None:
    net = network(64)
    add_modulated_conv(net, 32, doubles_side=False)
    pixels = 2 * 64 * 64 * 4
    assert net.activation_bytes[0] == pixels * (64 + 64 + 32) + 2 * 64 * 32 * 9 * 4
