"""Names of vision models in published tables, as the zoos of OpenMMLab and others write them.

`vision_table` returns the dimensions that a name means, as a preset states them. Each source has a reader of its names;
what a row's notes state about images is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tilecast.validate.cells import Row

Table = dict[str, Any]
"""Dimensions by name, as `zoo.model_from` reads them."""

_STAGES: Mapping[str, list[int]] = {
    "18": [2, 2, 2, 2], "34": [3, 4, 6, 3], "50": [3, 4, 6, 3], "101": [3, 4, 23, 3], "152": [3, 8, 36, 3],
}  # fmt: skip


def vision_table(row: Row) -> Table | None:
    """Return the dimensions that a row's name means, or None if no reader knows the name."""
    name = row.get("model_name", "")
    for pattern, read in _READERS:
        if match := pattern.match(name):
            table = read(name[match.end() :].strip(), row)
            return None if table is None else {"name": name, **table}
    return None


def _resnet(depth: str, kind: str = "") -> Table:
    """Return the stages of a ResNet by its depth, or of a ResNeXt by its groups too, such as "32x4d"."""
    table: Table = {"stages": _STAGES[depth], "bottleneck": int(depth) >= 50}
    if groups := re.fullmatch(r"(\d+)x(\d+)d", kind):
        table |= {"groups": int(groups[1]), "group_width": int(groups[2])}
    return table


# --- MMDetection ---------------------------------------------------------------------------------------------------

_BACKBONE = re.compile(r"\b(?:R-)?([RX])-?(50|101)(?:-(\d+x\d+d))?\b")
_FEATURES = re.compile(r"-C4\b")
_LARGE = {"image": 800, "image_width": 1216, "largest_image": 800, "largest_image_width": 1344}
"""COCO with a short side of 800 and a long one of at most 1333 pixels; of 16 images the widest is 3/2 as wide as high.

Sides are padded to multiples of 32.
"""
_CITY = {"image": 1024, "image_width": 2048, "largest_boxes": 100}
"""Cityscapes, whose streets have up to about 100 objects."""


def _read_mmdetection(name: str, row: Row) -> Table | None:
    """Read a detector of MMDetection, such as "Mask R-CNN R-50-FPN 1x (caffe)"."""
    words = name.lower()
    if ssd := re.search(r"ssd(300|512)(?: (voc))?", words):
        return {"family": "ssd", "image": int(ssd[1]), "classes": 21 if ssd[2] else 81}
    if not (backbone := _BACKBONE.search(name)):
        return None
    is_caffe = "(caffe)" in words or " gn " in words or words.endswith(" gn")
    dims = _resnet(backbone[2], backbone[3] or ("64x4d" if "fcos" in words else "32x4d") if backbone[1] == "X" else "")
    dims |= _CITY if "cityscapes" in words else _LARGE
    dims |= {"trained_norms": True, "stride_first": is_caffe and backbone[1] == "R"}
    dims["deformable"] = "dconv" in words
    dims["guided"] = words.startswith("ga-")
    dims["head_norm"] = words.startswith("mask r-cnn gn")
    if ratio := re.search(r"gc\(c3-c5, r(\d+)\)", words):
        dims["context"] = int(ratio[1])
    if re.search(r"retinanet|atss|fcos|foveabox", words):
        is_single = re.search(r"atss|fcos|foveabox", words) is not None
        normed = "atss" in words or (is_single and " gn" in words)
        del dims["head_norm"]
        return {
            "family": "retinanet", "frozen": True, "classes": 80, "from_backbone": not is_single, **dims,
            "anchors": 1 if is_single or dims["guided"] else 9, "tower_norm": normed, "centered": is_single,
            "fused_loss": "freeanchor" not in words,
        }  # fmt: skip
    if _FEATURES.search(name):
        dims["region_stage"] = True
    if "rpn" in words:
        return {"family": "rpn", **dims}
    if "rcnn" in words.replace("-", ""):
        cascade = {"cascade": 3} if "cascade" in words else {}
    elif words.startswith("htc"):
        cascade = {"cascade": 3, "semantic_classes": 183, "hybrid": True}
    else:
        return None
    masks = "mask" in words or words.startswith("htc")
    head = {"mask_heads": 3 if cascade else 1, "scored_masks": "scoring" in words} if masks else {}
    given = "precomputed" in words or re.search(r"\bfast rcnn|fast r-cnn", words) is not None
    head |= {"balanced": "libra" in words, "pooling_branches": 2 * ("mdpool" in words) or int("dpool" in words)}
    family = "mask-rcnn" if masks else "faster-rcnn"
    return {"family": family, "proposals": 512, "given_proposals": given, **dims, **cascade, **head}


# --- MMSegmentation ------------------------------------------------------------------------------------------------

_HEADS: Mapping[str, str] = {
    "deeplabv3+": "deeplab-v3-plus", "deeplabv3": "deeplab-v3", "pspnet": "pspnet", "upernet": "upernet", "fcn": "fcn",
    "fpn": "semantic-fpn", "pointrend": "semantic-fpn", "ocrnet": "ocrnet", "nonlocal": "nonlocal", "dnl": "dnl",
    "gcnet": "gcnet", "ccnet": "ccnet", "danet": "danet", "ann": "ann", "psanet": "psanet", "emanet": "emanet",
    "encnet": "encnet", "apcnet": "apcnet", "dmnet": "dmnet", "lraspp": "lraspp", "dnlnet": "dnl",
}  # fmt: skip
_SEGMENTS: Mapping[str, int] = {
    "ade20k": 150, "cityscapes": 19, "pascal voc": 21, "voc": 21, "pascal context 59": 59, "pascal context": 60,
    "coco-stuff": 171, "drive": 2, "stare": 2, "chase": 2, "hrf": 2, "loveda": 7, "potsdam": 6, "vaihingen": 6,
    "isaid": 16,
}  # fmt: skip
"""Categories of a pixel by a word in the notes (mmseg/datasets)."""
_CROP = re.compile(r"\b(\d{2,4})x(\d{2,4})\b")
_UNSTRIDED = re.compile(r"\b[rs]-(18|34|50|101|152)(b?)(?:-d(8|16|32))?\b")
_HRNET = re.compile(r"\bhrnetv2p?-w(\d+)(-small)?")
_MOBILE = re.compile(r"\bm-v([23])-d(8|16)")


def _read_mmsegmentation(name: str, row: Row) -> Table | None:
    """Read a segmenter of MMSegmentation, such as "DeepLabV3+ R-101-D8 512x1024"."""
    words, notes = name.lower(), row.get("notes", "").lower()
    head = next((family for word, family in _HEADS.items() if word in words.split()), None)
    size = _CROP.search(words) or _CROP.search(notes)
    if head is None or size is None:
        return None
    classes = next((count for word, count in _SEGMENTS.items() if word in notes), 19)
    table: Table = {"family": head, "image": int(size[1]), "image_width": int(size[2]), "classes": classes}
    table["auxiliary"] = head != "semantic-fpn"
    if "unet" in words:
        return table | {"base": 64, "head_width": 64 if head == "fcn" else 16}
    if hrnet := _HRNET.search(words):
        small = {"branch_blocks": 2, "modules": [1, 3, 2]} if hrnet[2] else {}
        return table | {"branch_width": int(hrnet[1]), "auxiliary": False, **small}
    if (mobile := _MOBILE.search(words)) and mobile[1] == "3":
        return table | {"mobile_v3": True, "output_stride": int(mobile[2]), "head_width": 128, "auxiliary": False}
    if mobile:
        return table | {"mobile": True, "output_stride": int(mobile[2])}
    if not (resnet := _UNSTRIDED.search(words)):
        return None
    split = {"excite": 4} if re.search(r"\bs-\d", words) else {}
    width = 512 if int(resnet[1]) >= 50 else 128
    stem = {"deep_stem": not resnet[2], "output_stride": int(resnet[3] or 32), "head_width": width}
    return table | _resnet(resnet[1]) | split | stem


# --- MMAction2 -----------------------------------------------------------------------------------------------------

_CLIP = re.compile(r"\b(\d+)x(\d+)(?:x(\d+))?\b")
_FRAMES = re.compile(r"\b(\d+) frames")
_PLAIN_FRAMES = ("tsn", "tsm", "trn", "tin", "tanet", "tpn_tsm")
_SHIFTED = ("tsm", "tin", "tanet", "tpn_tsm")
_ACTIONS: Mapping[str, int] = {
    "kinetics400": 400, "kinetics600": 600, "kinetics700": 700, "sthv1": 174, "sthv2": 174, "ucf101": 101, "hmdb51": 51,
    "diving48": 48, "mmit": 313, "mit": 339, "activitynet": 200, "jester": 27, "gym99": 99,
}  # fmt: skip
"""Categories by data set (configurations of MMAction2)."""


def _read_mmaction(name: str, row: Row) -> Table | None:
    """Read a recogniser of MMAction2, such as "tsn_r50_1x1x3_75e_ucf101_rgb" (images, interval, clips) or "I3D"."""
    words, notes = name.lower().replace("(2+1)", "2plus1"), row.get("notes", "").lower()
    words = re.sub(r"[-_]", " ", words)
    depth = re.search(r"\br(18|34|50|101|152)\b", words) or re.search(r"\br(18|34|50|101|152)\b", notes)
    clip = _CLIP.search(words) or re.search(r"\b(\d+)x(\d+)x(\d+)\b", notes)
    side = re.search(r"crop (\d{2,3})x\1", notes)
    classes = next((count for word, count in _ACTIONS.items() if word in words), 400)
    flow = {"image_channels": 10 if "tsn" in words else 2} if words.endswith("flow") else {}
    table: Table = {"image": int(side[1]) if side else 224, "classes": classes, **flow}
    kind = words.split(" ")[0] if not words.startswith("tpn tsm") else "tpn_tsm"
    if kind in _PLAIN_FRAMES:
        clips, frames = int(clip[3] or 1) if clip else 8, 1 if flow or not clip else int(clip[1])
        frames = int(stated[1]) if (stated := _FRAMES.search(notes)) else clips * frames
        resnet = _resnet(depth[1] if depth else "50")
        moves = {"shifts": kind in _SHIFTED, "interlaces": kind == "tin", "temporal_pyramid": kind == "tpn_tsm"}
        return {"family": "resnet", **table, **resnet, "frames": frames, **moves}
    if not clip:
        return None
    images = int(clip[1]) * int(clip[3] or 1)
    if kind == "c3d":
        return {"family": "c3d", "classes": classes, "image": 112, "image_depth": 16}
    video = {"family": "video-resnet", **table, **_resnet(depth[1] if depth else "50"), "image_depth": images}
    if kind == "i3d":
        attends = 1 if " nl " in words else 0
        return video | {"stem_depth": 5, "stem_stride": 2, "inflated": [1, 2, 2, 2], "attends": attends}
    if kind in ("slowonly", "tpn"):
        return video | {"attends": 1 if " nl " in words else 0}
    if kind == "slowfast":
        return video | {"fast": 8 if images == 4 else 4}
    if kind == "r2plus1d":
        return video | {"factored": True, "image_depth": int(clip[1]), **_resnet("34")}
    if kind in ("ircsn", "csn", "ipcsn"):
        return video | {"depthwise": True, "stem_depth": 3, "image_depth": int(clip[1])}
    return None


# --- MMYOLO and StyleGAN ------------------------------------------------------------------------------------------

_SIZES: Mapping[str, tuple[float, float]] = {
    "n": (0.33, 0.25), "t": (0.33, 0.375), "tiny": (0.33, 0.375), "s": (0.33, 0.5), "m": (0.67, 0.75), "l": (1.0, 1.0),
    "x": (1.33, 1.25),
}  # fmt: skip
"""Depth and width of a variant, over those of the large one (configurations of MMYOLO)."""
_YOLOS: Mapping[str, Table] = {
    "yolov5": {"anchors": 3},
    "yolov6": {"blocks": [6, 12, 18, 6], "branched": True, "towers": 1, "neck_share": 0.5, "candidates": 13},
    "yolov8": {"blocks": [3, 6, 6, 3], "dense_joins": True, "towers": 2, "box_values": 64},
    "yolox": {"blocks": [3, 9, 9, 3], "towers": 2, "tower_width": 256},
    "rtmdet": {"blocks": [3, 6, 6, 3], "kernel": 5, "towers": 2, "tower_width": 256},
    "ppyoloe+": {
        "blocks": [3, 6, 6, 3], "branched": True, "towers": 1, "box_values": 68, "neck_share": 0.75, "candidates": 13
    },
}  # fmt: skip
_YOLO = re.compile(r"(yolov5|yolov6|yolov8|yolox|rtmdet|ppyoloe\+) ?-(tiny|[ntsmlx])\b\S* (\d+)\b")
_RESIZED: Mapping[str, int] = {"yolox": 800, "ppyoloe+": 768}
"""Side of the largest batch, of detectors whose batches are resized at random (BatchSyncRandomResize)."""
_DOTA_BOXES = 2000
"""Objects of the fullest aerial image of 1024 pixels ("more than 2000": Chasel-Tsui/mmrotate-dcfl, issue 28)."""
_YOLOV8_CHANNELS: Mapping[str, int] = {"m": 768, "l": 512, "x": 512}


def _read_mmyolo(name: str, row: Row) -> Table | None:
    """Read a detector of MMYOLO, such as "YOLOv5-s 640" or "RTMDet-tiny 1024 DOTA rotated"."""
    if not (match := _YOLO.match(words := name.lower())):
        return None
    kind, size, image = match[1], match[2], int(match[3])
    depth, width = _SIZES[size]
    if kind == "rtmdet" and size == "tiny":
        depth = 0.167
    table: Table = {"family": "csp-detector", "image": image, "depth": depth, "width": width, **_YOLOS[kind]}
    table["large"] = kind == "yolov5" and image > 1000
    table["prototypes"] = "instance-seg" in words
    table["keypoints"] = 17 if "pose" in words else 0
    table["classes"] = 20 if " voc" in words else 15 if " dota" in words else 1 if "pose" in words else 80
    if " dota" in words:
        table["largest_boxes"] = _DOTA_BOXES
    if largest := _RESIZED.get(kind):
        table |= {"largest_image": max(largest, image), "largest_image_width": max(largest, image)}
    if kind == "yolov8":
        table["most_channels"] = _YOLOV8_CHANNELS.get(size, 1024)
    if kind == "yolov6":
        table |= {"partial": size in "ml", "branched": size != "l"}
    return table


def _read_stylegan(name: str, row: Row) -> Table | None:
    """Read StyleGAN2-ADA of the automatic configuration (train.py: half the channels below 512 pixels)."""
    size = re.match(r"(\d+)x\1 cfg=auto", name)
    if not size:
        return None
    return {"family": "stylegan2", "image": int(size[1]), "base": 32768 if int(size[1]) >= 512 else 16384}


# --- Others --------------------------------------------------------------------------------------------------------


def _read_resnet(name: str, row: Row) -> Table | None:
    depth = re.fullmatch(r"ResNet-(\d+)", name)
    return {"family": "resnet", "image": 224, **_resnet(depth[1])} if depth and depth[1] in _STAGES else None


_VITS: Mapping[str, tuple[int, int, int]] = {"b": (12, 768, 12), "l": (24, 1024, 16), "h": (32, 1280, 16)}
"""Layers, width and heads of a ViT (Dosovitskiy et al., arXiv 2010.11929, table 1)."""


def _read_mae(name: str, row: Row) -> Table | None:
    """Read a ViT that MAE fine-tunes (He et al., arXiv 2111.06377); its decoder and its linear probe are not read."""
    vit = re.search(r"ViT-([BLH])/(\d+) (\d+)", name)
    if not vit or not name.startswith("fine-tune"):
        return None
    layers, hidden, heads = _VITS[vit[1].lower()]
    return {
        "family": "vit", "image": int(vit[3]), "patch": int(vit[2]), "layers": layers, "hidden": hidden, "heads": heads
    }  # fmt: skip


def _read_latent_unet(name: str, row: Row) -> Table | None:
    """Read the U-Net of Stable Diffusion 2 for images of some pixels, whose latents have an eighth of the side."""
    pixels = re.search(r"UNet (\d+)px", name)
    return {
        "family": "diffusion-unet", "image": int(pixels[1]) // 8, "image_channels": 4, "base": 320, "blocks": 2,
        "head_width": 64, "text_tokens": 77, "text_width": 1024,
    } if pixels else None  # fmt: skip


_COGVIDEO: Mapping[str, tuple[int, int]] = {"2b": (30, 30), "5b": (42, 48)}
"""Blocks, and heads of 64 channels, of CogVideoX (arXiv 2408.06072, table 1)."""


def _read_cogvideo(name: str, row: Row) -> Table | None:
    """Read CogVideoX over 49 frames of 480 x 720 pixels: 13 latent frames of 60 x 90, in patches of 2 x 2."""
    if not (size := re.match(r"(2b|5b)\b", name)):
        return None
    blocks, heads = _COGVIDEO[size[1]]
    width = 64 * heads
    return {
        "family": "diffusion-transformer", "blocks": blocks, "width": width, "attention_heads": heads,
        "inner": 4 * width, "image_tokens": 13 * 30 * 45, "patch_values": 64, "output_values": 64, "text_tokens": 226,
        "text_width": 4096, "joined": True, "query_key_norm": True, "norm_weights": True, "own_modulations": 2,
        "time_width": width, "vector_width": 512, "rotates": size[1] == "5b",
    }  # fmt: skip


def _read_flux2(name: str, row: Row) -> Table | None:
    """Read FLUX.2 [klein] 4B over images of 512 pixels (black-forest-labs/flux2, src/flux2/model.py: Klein4BParams)."""
    if not name.startswith("4B"):
        return None
    return {
        "family": "flux", "double_layers": 5, "single_layers": 20, "width": 3072, "attention_heads": 24,
        "image_tokens": 1024, "patch_values": 128, "text_tokens": 512, "text_width": 7680, "gated_ratio": 3,
        "shared_scales": True,
    }  # fmt: skip


_READERS: tuple[tuple[re.Pattern[str], Callable[[str, Row], Table | None]], ...] = (
    (re.compile(r"mmdet (?:v\d+ )?"), _read_mmdetection),
    (re.compile(r"(?:mmseg|CSAILVision|vedaseg) "), _read_mmsegmentation),
    (re.compile(r"(?:mmaction2|MMAction2|TSM repo) "), _read_mmaction),
    (re.compile(r"mmyolo "), _read_mmyolo),
    (re.compile(r"stylegan2-ada "), _read_stylegan),
    (re.compile(r"(?:tensorpack|tf_cnn_benchmarks) "), _read_resnet),
    (re.compile(r"MAE "), _read_mae),
    (re.compile(r"Stable Diffusion 2 base "), _read_latent_unet),
    (re.compile(r"CogVideoX-"), _read_cogvideo),
    (re.compile(r"black-forest-labs/FLUX\.2-klein-base-"), _read_flux2),
)
