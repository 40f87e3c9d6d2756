"""Convolutional networks as graphs, data parallel only, from a few numbers each.

A network is written once as a walk (`tilecast.models.cnn.walk`) that carries channels and size and appends
convolutions, norms and poolings; the numbers that tell ResNet-18 from ResNeXt-101 stand in the presets.

To add a network: write a function over a `Walk` in a file here and add a line to `NETWORKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tilecast.graph import Block, Graph, Shards
from tilecast.models.cnn import densenet, detection, inception, mobile, resnet, unet, vgg, waveglow
from tilecast.models.cnn.walk import Walk
from tilecast.models.layers import Numerics
from tilecast.spec import Workload


@dataclass(frozen=True, slots=True)
class Network:
    """How a family is walked, and the dimensions of `Model.extra` without which it cannot be, besides `image`."""

    walk: Callable[[Walk, Mapping[str, float]], None]
    needs: tuple[str, ...] = ()


_FOUR_STAGES = ("stage1", "stage2", "stage3", "stage4")

NETWORKS: Mapping[str, Network] = {
    "resnet": Network(resnet.resnet, _FOUR_STAGES),
    "alexnet": Network(vgg.alexnet),
    "vgg": Network(vgg.vgg, (*_FOUR_STAGES, "stage5")),
    "densenet": Network(densenet.densenet, (*_FOUR_STAGES, "growth")),
    "googlenet": Network(inception.googlenet),
    "inception-v3": Network(inception.inception_v3),
    "mobilenet-v2": Network(mobile.mobilenet_v2),
    "mobilenet-v3": Network(mobile.mobilenet_v3),
    "efficientnet": Network(mobile.efficientnet, ("width", "depth")),
    "efficientnet-v2": Network(mobile.efficientnet_v2, ("millions",)),
    "unet": Network(unet.unet, ("base", "depth")),
    "vnet": Network(unet.vnet, ("base", "depth", "convolutions")),
    "ssd": Network(detection.ssd, _FOUR_STAGES[:3]),
    "retinanet": Network(detection.retinanet, _FOUR_STAGES),
    "mask-rcnn": Network(detection.mask_rcnn, (*_FOUR_STAGES, "proposals")),
    "yolo-v3": Network(detection.yolo_v3),
    "waveglow": Network(waveglow.waveglow, ("channels",)),
}
"""Families of convolutional networks by name."""


def build(workload: Workload, shards: Shards) -> Graph:
    """The graph of a convolutional network: one block, data parallel only.

    `Model.extra` holds `image`, the height of an image in pixels (and its width, unless `image_width`), `image_depth`
    for volumes, `image_channels` (3) and what the family needs.
    """
    extra = workload.model.extra
    image = int(extra["image"])
    depth, width = int(extra.get("image_depth", 1)), int(extra.get("image_width", image))
    channels = int(extra.get("image_channels", 3))
    size = (depth, image, width)
    walk = Walk(Numerics.of(workload), shards.micro_batch.astype(float), channels, size, flat=depth == 1)
    NETWORKS[workload.model.family].walk(walk, extra)
    block = Block(
        "network",
        1,
        tuple(walk.ops),
        parameters=np.full(len(shards), walk.parameters),
        activation_bytes=np.stack([walk.kept * np.ones(len(shards))] * 3),
        workspace_bytes=walk.workspace * np.ones(len(shards)),
    )
    return Graph(
        first=(),
        layers=(block,),
        last=(),
        boundary_bytes=np.zeros(len(shards)),
        shards=len(shards),
        host_bytes_per_sample=float(channels * depth * image * width),
    )
