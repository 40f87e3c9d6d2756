"""Graphs of convolutional networks, data parallel only, built from a few numbers each.

A family of networks is written once, as a function over a walk (`tilecast.zoo.cnn.walk`) that carries channels and
size and appends convolutions, norms and poolings. The numbers that tell ResNet-18 from ResNeXt-101 are in the presets.

To add a network: write a dataclass of its dimensions and a function over a `Walk` in a file here, and add a line to
`NETWORKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from tilecast.graph import Block, Graph, Shards
from tilecast.model import DimensionsT
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
from tilecast.zoo.cnn.images import Classifier, Images
from tilecast.zoo.cnn.walk import Walk
from tilecast.zoo.numerics import Numerics


@dataclass(frozen=True, slots=True)
class Network(Generic[DimensionsT]):
    """Family of networks: the class of its dimensions, and the function that adds its operators to a walk."""

    dimensions: type[DimensionsT]
    write: Callable[[Walk, DimensionsT], None]
    images: bool = True
    """Whether samples are decoded from pictures. Others are sound, words, series, or latents made in advance."""


NETWORKS: Mapping[str, Network[Any]] = {
    "resnet": Network(resnet.ResNet, resnet.resnet),
    "face-resnet": Network(resnet.FaceResNet, resnet.face_resnet),
    "alexnet": Network(Classifier, vgg.alexnet),
    "vgg": Network(vgg.Vgg, vgg.vgg),
    "densenet": Network(densenet.DenseNet, densenet.densenet),
    "googlenet": Network(Classifier, inception.googlenet),
    "inception-v3": Network(Classifier, inception.inception_v3),
    "mobilenet-v2": Network(Classifier, mobile.mobilenet_v2),
    "mobilenet-v3": Network(mobile.MobileNetV3, mobile.mobilenet_v3),
    "efficientnet": Network(mobile.EfficientNet, mobile.efficientnet),
    "efficientnet-v2": Network(mobile.EfficientNetV2, mobile.efficientnet_v2),
    "convnext": Network(convnext.ConvNext, convnext.convnext),
    "segformer": Network(segformer.Segformer, segformer.segformer),
    "unet": Network(unet.Unet, unet.unet),
    "vnet": Network(unet.Vnet, unet.vnet),
    "ssd": Network(detection.Ssd, detection.ssd),
    "retinanet": Network(detection.RetinaNet, detection.retinanet),
    "faster-rcnn": Network(two_stage.RegionCnn, two_stage.faster_rcnn),
    "rpn": Network(two_stage.TwoStage, two_stage.rpn),
    "keypoint-rcnn": Network(two_stage.RegionCnn, two_stage.keypoint_rcnn),
    "mask-rcnn": Network(two_stage.RegionCnn, two_stage.mask_rcnn),
    "efficientdet": Network(efficientdet.EfficientDet, efficientdet.efficientdet),
    "detr": Network(detr.Detr, detr.detr),
    "diffusion-unet": Network(diffusion.DiffusionUnet, diffusion.diffusion_unet, images=False),
    "yolo-v3": Network(detection.YoloV3, detection.yolo_v3),
    "jasper": Network(speech.Jasper, speech.jasper, images=False),
    "quartznet": Network(speech.Jasper, speech.quartznet, images=False),
    "deepspeech2": Network(speech.DeepSpeech2, speech.deepspeech2, images=False),
    "rnnt": Network(speech.Rnnt, speech.rnnt, images=False),
    "wav2vec2": Network(speech.Wav2vec2, speech.wav2vec2, images=False),
    "tacotron2": Network(speech.Spoken, speech.tacotron2, images=False),
    "fastpitch": Network(speech.Spoken, speech.fastpitch, images=False),
    "gnmt": Network(language.Gnmt, language.gnmt, images=False),
    "lstm": Network(language.Lstm, language.lstm, images=False),
    "hifi-gan": Network(hifigan.HifiGan, hifigan.hifigan, images=False),
    "temporal-fusion": Network(forecasting.TemporalFusion, forecasting.temporal_fusion, images=False),
    "waveglow": Network(waveglow.WaveGlow, waveglow.waveglow, images=False),
}
"""Families of convolutional networks by name."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a convolutional network.

    It is one block, data parallel only, followed by a classifier where the model has identities.
    """
    dims = workload.model.own(Images)
    depth, width = dims.image_depth, dims.width_pixels
    walk = Walk(
        Numerics.of(workload), shards.micro_batch.astype(float), dims.image_channels, (depth, dims.image, width),
        flat=depth == 1,
    )  # fmt: skip
    NETWORKS[workload.model.family].write(walk, dims)
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
        last=(identities.classifier(workload, shards),) if isinstance(dims, resnet.FaceResNet) else (),
        boundary_bytes=np.zeros(len(shards)),
        shards=len(shards),
        host_bytes_per_sample=float(dims.image_channels * depth * dims.image * width),
    )
