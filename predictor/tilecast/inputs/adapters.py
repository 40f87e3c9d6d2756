"""Read the base model and the rank of a LoRA adapter from PEFT's `adapter_config.json` (as PEFT 0.17 writes it)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilecast import zoo
from tilecast.api.base import format_value
from tilecast.spec import SpecError

FILE = "adapter_config.json"
INSTEAD = "save the adapter anew, or give its base's preset or config.json with --lora-rank R"
"""Remedy in the error about an adapter file without contents."""
MAX_RANK = 4096
"""Largest rank, as in `spec.training.loraRank`."""
_UNPRICED = (
    "use_dora",
    "rank_pattern",
    "layers_to_transform",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "lora_bias",
)
"""Fields that change the time or memory of a step but are not priced. A note names those that are set.

Fields that only scale (`lora_alpha`, `alpha_pattern`, `use_rslora`) cost nothing.
"""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter: the preset of its base model, and the rank of its dense layers."""

    base: str
    rank: int
    unpriced: tuple[str, ...]
    """Fields set in the file that are not priced."""


def is_adapter(document: Mapping[str, Any]) -> bool:
    """Return whether a parsed document is an `adapter_config.json`."""
    return "peft_type" in document


def read_adapter(config: Mapping[str, Any], file: str) -> LoraAdapter:
    """Return the adapter that a parsed `adapter_config.json` describes. `file` names the document in errors.

    Raises:
        SpecError: the adapter is not a LoRA, or also trains whole layers. The base model is not a preset, or the family
            of the preset does not support adapters.
    """
    kind, rank, whole = (config.get(key) for key in ("peft_type", "r", "modules_to_save"))
    plain = "give its base's preset or config.json with --lora-rank R for what a LoRA of rank R takes"
    if kind != "LORA":
        problem = "adapters are not priced" if isinstance(kind, str) else "is no type of adapter"
        raise SpecError(f"{file}.peft_type", f"{format_value(kind)} {problem}", plain)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        problem = "is missing" if rank is None else f"{format_value(rank)} is no rank"
        raise SpecError(f"{file}.r", problem, f"write a whole number from 1 to {MAX_RANK}")
    if whole:
        remedy = f"give its base's preset or config.json with --lora-rank {rank} for the adapters alone"
        raise SpecError(
            f"{file}.modules_to_save", f"{format_value(whole)} is trained whole, which is not priced", remedy
        )
    base = _find_base_preset(config.get("base_model_name_or_path"), f"{file}.base_model_name_or_path", rank)
    return LoraAdapter(base, rank, tuple(key for key in _UNPRICED if config.get(key)))


def _find_base_preset(name: object, field: str, rank: int) -> str:
    """Return the name of the preset for an adapter's base model `name`. Errors name `field`, and suggest `rank`.

    Raises:
        SpecError: there is no such preset, or its family does not support adapters.
    """
    remedy = f"give the base's config.json, or a preset, with --lora-rank {rank}"
    if not isinstance(name, str) or not name:
        problem = "is missing" if not name else f"{format_value(name)} is no name of a model"
        raise SpecError(field, problem, remedy)
    try:
        preset = zoo.find_preset(name)
    except SpecError as error:
        raise SpecError(field, f"{format_value(name)} is no preset", f"{remedy}; {error.remedy}") from None
    if preset.family not in zoo.ADAPTED:
        problem = f"{preset.name} is of family {preset.family}, which has no adapters"
        raise SpecError(field, problem, f"name a model of family {', '.join(zoo.ADAPTED)}")
    return preset.name
