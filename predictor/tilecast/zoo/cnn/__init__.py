"""Graphs of convolutional networks, data parallel only, built from a few numbers each.

A family of networks is written once, as a function over a walk (`tilecast.zoo.cnn.walk`) that carries channels and
size and appends convolutions, norms and poolings. The numbers that tell ResNet-18 from ResNeXt-101 are in the presets.

To add a network: write a function over a `Walk` in a file here and add a line to `NETWORKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tilecast.graph import Block, Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo.cnn import (
    convnext,
    densenet,
    detection,
    detr,
    diffusion,
    efficientdet,
    forecasting,
    hifigan,
    identities,
    inception,
    language,
    mobile,
    resnet,
    segformer,
    speech,
    two_stage,
    unet,
    vgg,
    waveglow,
)
from tilecast.zoo.cnn.walk import Walk
from tilecast.zoo.numerics import Numerics


@dataclass(frozen=True, slots=True)
class Network:
    """A family of networks: the function that writes it, and the entries of `Model.extra` that the function needs.

    Every family also needs `image`.
    """

    walk: Callable[[Walk, Mapping[str, float]], None]
    needs: tuple[str, ...] = ()
    images: bool = True
    """Whether samples are decoded from pictures. Others are sound, words, series, or latents made in advance."""


_FOUR_STAGES = ("stage1", "stage2", "stage3", "stage4")

NETWORKS: Mapping[str, Network] = {
    "resnet": Network(resnet.resnet, _FOUR_STAGES),
    "face-resnet": Network(resnet.face_resnet, (*_FOUR_STAGES, "identities")),
    "alexnet": Network(vgg.alexnet),
    "vgg": Network(vgg.vgg, (*_FOUR_STAGES, "stage5")),
    "densenet": Network(densenet.densenet, (*_FOUR_STAGES, "growth")),
    "googlenet": Network(inception.googlenet),
    "inception-v3": Network(inception.inception_v3),
    "mobilenet-v2": Network(mobile.mobilenet_v2),
    "mobilenet-v3": Network(mobile.mobilenet_v3),
    "efficientnet": Network(mobile.efficientnet, ("width", "depth")),
    "efficientnet-v2": Network(mobile.efficientnet_v2, ("millions",)),
    "convnext": Network(convnext.convnext, convnext.NEEDS),
    "segformer": Network(segformer.segformer, segformer.NEEDS),
    "unet": Network(unet.unet, ("base", "depth")),
    "vnet": Network(unet.vnet, ("base", "depth", "convolutions")),
    "ssd": Network(detection.ssd, _FOUR_STAGES[:3]),
    "retinanet": Network(detection.retinanet, _FOUR_STAGES),
    "faster-rcnn": Network(two_stage.faster_rcnn, (*_FOUR_STAGES, "proposals")),
    "rpn": Network(two_stage.rpn, _FOUR_STAGES),
    "keypoint-rcnn": Network(two_stage.keypoint_rcnn, (*_FOUR_STAGES, "proposals")),
    "mask-rcnn": Network(two_stage.mask_rcnn, (*_FOUR_STAGES, "proposals")),
    "efficientdet": Network(
        efficientdet.efficientdet, ("width", "depth", "pyramids", "pyramid_channels", "head_layers")
    ),
    "detr": Network(detr.detr, (*_FOUR_STAGES, "encoders", "decoders", "queries")),
    "diffusion-unet": Network(diffusion.diffusion_unet, ("base", "blocks"), images=False),
    "yolo-v3": Network(detection.yolo_v3),
    "jasper": Network(speech.jasper, ("repeats",), images=False),
    "quartznet": Network(speech.quartznet, ("repeats",), images=False),
    "deepspeech2": Network(speech.deepspeech2, ("layers_deep", "cells"), images=False),
    "rnnt": Network(speech.rnnt, ("cells", "joint", "symbols", "vocabulary"), images=False),
    "wav2vec2": Network(speech.wav2vec2, ("layers_deep", "width", "attention_heads"), images=False),
    "tacotron2": Network(speech.tacotron2, ("symbols",), images=False),
    "fastpitch": Network(speech.fastpitch, ("symbols",), images=False),
    "gnmt": Network(language.gnmt, ("cells", "vocabulary"), images=False),
    "lstm": Network(language.lstm, ("layers_deep", "cells", "vocabulary"), images=False),
    "hifi-gan": Network(hifigan.hifigan, ("base",), images=False),
    "temporal-fusion": Network(
        forecasting.temporal_fusion,
        ("width", "history", "observed", "known", "static", "static_rows", "attention_heads", "quantiles"),
        images=False,
    ),
    "waveglow": Network(waveglow.waveglow, ("channels",), images=False),
}
"""Families of convolutional networks by name."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a convolutional network.

    It is one block, data parallel only, followed by a classifier where the model has `identities`.

    `Model.extra` holds what the family needs, `image`, the height of an image in pixels (and its width, unless there is
    `image_width`), `image_depth` for volumes, and `image_channels` (3). Where images differ in size, it also has
    `largest_image` and `largest_image_width`, which the memory bill reads.
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
        activation_bytes=np.stack([walk.activation_bytes * np.ones(len(shards))] * 3),
        working_bytes=walk.working * np.ones(len(shards)),
        workspace_bytes=walk.workspace * np.ones(len(shards)),
    )
    return Graph(
        first=(),
        layers=(block,),
        last=(identities.classifier(workload, shards),) if "identities" in extra else (),
        boundary_bytes=np.zeros(len(shards)),
        shards=len(shards),
        host_bytes_per_sample=float(channels * depth * image * width),
    )
