"""Graphs of convolutional networks, which run data-parallel only.

Each family is one function that adds convolutions, norms and poolings to a `NetworkBuilder`. Networks of one family,
such as ResNet-18 and ResNeXt-101, differ only in the numbers of their presets.

To add a family: write a dataclass of its dimensions and a function over a `NetworkBuilder` in a file here, and add a
line to `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tilecast.graph import Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo.cnn import (
    classifiers,
    convnext,
    csp,
    detection,
    detr,
    diffusion,
    efficientdet,
    forecasting,
    language,
    mobile,
    resnet,
    segformer,
    segmentation,
    speech,
    stylegan,
    two_stage,
    unet,
    video,
    vocoders,
)
from tilecast.zoo.cnn.builder import Architecture, NetworkBuilder
from tilecast.zoo.cnn.images import Classifier, Images
from tilecast.zoo.numerics import Numerics
from tilecast.zoo.parts import build_one_block_graph, build_uniform_block

ARCHITECTURES: Mapping[str, Architecture[Any]] = {
    "resnet": Architecture(resnet.ResNet, resnet.build_resnet),
    "face-resnet": Architecture(resnet.FaceResNet, resnet.build_face_resnet),
    "alexnet": Architecture(Classifier, classifiers.build_alexnet),
    "vgg": Architecture(classifiers.Vgg, classifiers.build_vgg),
    "densenet": Architecture(classifiers.DenseNet, classifiers.build_densenet),
    "googlenet": Architecture(Classifier, classifiers.build_googlenet),
    "inception-v3": Architecture(Classifier, classifiers.build_inception_v3),
    "mobilenet-v2": Architecture(Classifier, mobile.build_mobilenet_v2),
    "mobilenet-v3": Architecture(mobile.MobileNetV3, mobile.build_mobilenet_v3),
    "efficientnet": Architecture(mobile.EfficientNet, mobile.build_efficientnet),
    "efficientnet-v2": Architecture(mobile.EfficientNetV2, mobile.build_efficientnet_v2),
    "convnext": Architecture(convnext.ConvNext, convnext.build_convnext),
    "segformer": Architecture(segformer.Segformer, segformer.build_segformer),
    "unet": Architecture(unet.Unet, unet.build_unet),
    "vnet": Architecture(unet.Vnet, unet.build_vnet),
    "ssd": Architecture(detection.Ssd, detection.build_ssd),
    "retinanet": Architecture(detection.RetinaNet, detection.build_retinanet),
    "faster-rcnn": Architecture(two_stage.RegionCnn, two_stage.build_faster_rcnn),
    "rpn": Architecture(two_stage.TwoStage, two_stage.build_rpn),
    "keypoint-rcnn": Architecture(two_stage.RegionCnn, two_stage.build_keypoint_rcnn),
    "mask-rcnn": Architecture(two_stage.RegionCnn, two_stage.build_mask_rcnn),
    "efficientdet": Architecture(efficientdet.EfficientDet, efficientdet.build_efficientdet),
    "detr": Architecture(detr.Detr, detr.build_detr),
    "diffusion-unet": Architecture(
        diffusion.DiffusionUnet, diffusion.build_diffusion_unet, reads_images=False, latents=True
    ),
    "yolo-v3": Architecture(detection.YoloV3, detection.build_yolo_v3),
    "jasper": Architecture(speech.Jasper, speech.build_jasper, reads_images=False),
    "quartznet": Architecture(speech.Jasper, speech.build_quartznet, reads_images=False),
    "deepspeech2": Architecture(speech.DeepSpeech2, speech.build_deepspeech2, reads_images=False),
    "rnnt": Architecture(speech.Rnnt, speech.build_rnnt, reads_images=False),
    "wav2vec2": Architecture(speech.Wav2vec2, speech.build_wav2vec2, reads_images=False),
    "tacotron2": Architecture(speech.SpeechSynthesis, speech.build_tacotron2, reads_images=False),
    "fastpitch": Architecture(speech.SpeechSynthesis, speech.build_fastpitch, reads_images=False),
    "gnmt": Architecture(language.Gnmt, language.build_gnmt, reads_images=False),
    "lstm": Architecture(language.Lstm, language.build_lstm, reads_images=False),
    "hifi-gan": Architecture(vocoders.HifiGan, vocoders.build_hifigan, reads_images=False),
    "temporal-fusion": Architecture(forecasting.TemporalFusion, forecasting.build_temporal_fusion, reads_images=False),
    "waveglow": Architecture(vocoders.WaveGlow, vocoders.build_waveglow, reads_images=False),
    "video-resnet": Architecture(video.VideoResNet, video.build_video_resnet),
    "csp-detector": Architecture(csp.CspDetector, csp.build_csp_detector),
    "stylegan2": Architecture(stylegan.StyleGan, stylegan.build_stylegan),
    "c3d": Architecture(video.Clip, video.build_c3d),
    **segmentation.SEGMENTERS,
}
"""Families of convolutional networks by name."""


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of a convolutional network as one block.

    A face recogniser has a second block, the classifier of its identities.
    """
    dims = workload.model.get_dimensions(Images)
    depth, width = dims.image_depth, dims.width_pixels
    numerics, batch = Numerics.from_workload(workload), shards.micro_batch.astype(float)
    net = NetworkBuilder(numerics, batch, dims.image_channels, (depth, dims.image, width), flat=depth == 1)
    if numerics.keeps_wide_images:
        net.keep_elements(net.elements * 4.0 / numerics.element)
    ARCHITECTURES[workload.model.family].build(net, dims)
    block = build_uniform_block(
        "network",
        len(shards),
        net.ops,
        net.parameters,
        net.activation_bytes,
        working_bytes=net.working_bytes * np.ones(len(shards)),
        workspace_bytes=net.workspace * np.ones(len(shards)),
    )
    graph = build_one_block_graph(block, float(dims.image_channels * depth * dims.image * width))
    if isinstance(dims, resnet.FaceResNet):
        graph = replace(graph, last=(resnet.build_identity_classifier(workload, shards),))
    return graph
