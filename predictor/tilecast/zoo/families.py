"""The table of all families of models, with the function that builds the graph of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tilecast.graph import Graph, Shards
from tilecast.model import Dimensions
from tilecast.recomputation import CHECKPOINTING, Checkpointing
from tilecast.spec import Workload
from tilecast.zoo import (
    cnn,
    deepseek,
    diffusion,
    encoders,
    flux,
    hybrid,
    recommender,
    sam,
    speech,
    towers,
    transformer,
    transformer_xl,
    vision,
)
from tilecast.zoo.dimensions import Experts, Transformer
from tilecast.zoo.mixers import Hybrid

Builder = Callable[[Workload, Shards], Graph]

_TRANSFORMER = ("layers", "hidden", "heads")
_LANGUAGE = (*_TRANSFORMER, "vocab")


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a family of models: how to build its graph and what its models support."""

    build: Builder
    dimensions: type[Dimensions] = Transformer
    """Dimensions that only this family has."""
    needs: tuple[str, ...] = _LANGUAGE
    """General dimensions that a model must state."""
    adapts: bool = False
    """Whether LoRA can train models of this family."""
    splits_sequence: bool = False
    """Whether queries and keys of each layer are from one sequence, which context-parallel ranks can split."""
    has_stages: bool = True
    """Whether a pipeline can cut its layers into stages."""
    reads_images: bool = False
    """Whether a sample is decoded from images."""
    packs: bool = False
    """Whether samples are cut from one stream of tokens, so that all ranks get sequences of equal length."""
    latents: bool = False
    """Whether a sample is a latent of fixed size, encoded before training."""
    recomputes: tuple[Checkpointing, ...] = CHECKPOINTING
    """Recomputation modes that save memory."""
    auto: str | None = ""
    """Suffix of the `AutoModel…` class of Transformers that computes the priced loss.

    Empty if no such class does. None if Transformers has no such model.
    """
    blocks: tuple[str, ...] = ("layers",)
    """Names of a model's attributes that hold its lists of layers."""


_IMAGES = "ForImageClassification"
_AUTO_SUFFIXES = {
    **dict.fromkeys(("resnet", "convnext", "efficientnet", "mobilenet-v2"), _IMAGES),
    "segformer": "ForSemanticSegmentation",
    "detr": "ForObjectDetection",
    "wav2vec2": "ForPreTraining",
}
"""Suffixes of `AutoModel…` classes, for the networks that Transformers builds."""
_DECODER = Family(transformer.build, adapts=True, splits_sequence=True, packs=True, auto="ForCausalLM")
_DIFFUSION = Family(
    diffusion.build, diffusion.DiffusionTransformer, (), adapts=True, recomputes=("none", "full"), auto=None,
    blocks=("transformer_blocks",), latents=True,
)  # fmt: skip
"""A family of diffusion transformers.

The names in `blocks` are those of diffusers: models/transformers/dit_transformer_2d.py, pixart_transformer_2d.py,
cogvideox_transformer_3d.py, transformer_flux.py, transformer_sd3.py, transformer_wan.py.
"""
_CNN = Family(cnn.build, needs=(), recomputes=("none",), auto=None)

FAMILIES: Mapping[str, Family] = {
    "decoder": _DECODER,
    "encoder": replace(_DECODER, packs=False, auto="ForMaskedLM"),
    "moe": replace(_DECODER, dimensions=Experts),
    "encdec": replace(
        _DECODER, build=transformer.build_encoder_decoder, splits_sequence=False, has_stages=False, auto="ForSeq2SeqLM"
    ),
    "deepseek": replace(_DECODER, build=deepseek.build, dimensions=deepseek.Deepseek),
    "hybrid": Family(hybrid.build, Hybrid, adapts=True, packs=True, auto="ForCausalLM"),
    "transformer-xl": Family(transformer_xl.build, transformer_xl.TransformerXl, packs=True),
    "albert": Family(encoders.build_albert, auto="ForMaskedLM"),
    "electra": Family(encoders.build_electra, encoders.Electra),
    "relative-encoder": Family(encoders.build_relative, encoders.RelativeEncoder),
    "vit": Family(vision.build, vision.Vision, _TRANSFORMER, reads_images=True, auto=_IMAGES),
    "swin": Family(vision.build_swin, vision.Swin, _TRANSFORMER, reads_images=True, auto=_IMAGES),
    "sam": Family(sam.build, sam.SegmentAnything, _TRANSFORMER, reads_images=True),
    "query-encoder": Family(towers.build_queries, towers.QueryEncoder, _TRANSFORMER),
    "speech-encoder": Family(speech.build, speech.Spectrogram, _TRANSFORMER),
    "speech-encdec": Family(speech.build_encoder_decoder, speech.Spectrogram, auto="ForSpeechSeq2Seq"),
    "flux": replace(
        _DIFFUSION, build=flux.build, dimensions=flux.Flux, blocks=("transformer_blocks", "single_transformer_blocks")
    ),
    "sd3": replace(_DIFFUSION, build=flux.build, dimensions=flux.Flux),
    "diffusion-transformer": _DIFFUSION,
    "wan": replace(_DIFFUSION, blocks=("blocks",)),
    "ncf": replace(_CNN, build=recommender.build_ncf, dimensions=recommender.Ncf),
    **{
        name: replace(_CNN, build=recommender.build, dimensions=kind.dimensions)
        for name, kind in recommender.ARCHITECTURES.items()
    },
    **{
        name: replace(
            _CNN,
            dimensions=kind.dimensions,
            reads_images=kind.reads_images,
            latents=kind.latents,
            auto=_AUTO_SUFFIXES.get(name),
        )
        for name, kind in cnn.ARCHITECTURES.items()
    },
}
"""Every family by name."""

ADAPTED = tuple(name for name, family in FAMILIES.items() if family.adapts)
"""Families that LoRA can train."""
