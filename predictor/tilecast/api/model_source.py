"""Models of `spec.model` in a TrainingJob, the architecture of the trained network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from tilecast import zoo
from tilecast.api.base import MAX_SEQUENCE, OBJECT_NAME, ApiModel, ValidationRule, optional_field
from tilecast.model import Model

MAX_CONFIG_BYTES = 2**18
MAX_CONFIG_DEPTH = 32
"""Deepest nesting of a config.json within a job. `MAX_CONFIG_BYTES` is its largest size.

The largest ones on the Hugging Face Hub, with a name for each of 21,000 labels, belong in a ConfigMap.
"""
KEY_NAME = r"^[-._a-zA-Z0-9]+$"
"""Pattern of the keys of a ConfigMap that the API server allows."""


class Transformer(ApiModel):
    """Dimensions of a dense transformer, for a model that no preset describes."""

    family: Literal["decoder", "encoder"] = Field(
        default="decoder", description="decoder attends to earlier tokens only (GPT, Llama), encoder to all (BERT)."
    )
    layers: int = Field(ge=1, le=1024, description="Transformer blocks.")
    hidden_size: int = Field(ge=1, le=2**18, description="Width of the residual stream.")
    attention_heads: int = Field(ge=1, le=4096, description="Query heads of one block.")
    key_value_heads: int | None = optional_field(
        "Key and value heads; fewer than attentionHeads is grouped-query attention.", ge=1, le=4096
    )
    head_size: int | None = optional_field("Width of one head; hiddenSize / attentionHeads if absent.", ge=1, le=4096)
    feed_forward_size: int | None = optional_field(
        "Inner width of the MLP; four times hiddenSize if absent.", ge=1, le=2**20
    )
    vocabulary_size: int = Field(ge=1, le=2**22, description="Rows of the embedding and columns of the output layer.")
    learned_positions: int = Field(
        default=0, ge=0, le=MAX_SEQUENCE, description="Rows of a learned position embedding; 0 if there is none."
    )
    rotary: bool = Field(default=False, description="Whether queries and keys are rotated by position (RoPE).")
    gated_feed_forward: bool = Field(default=False, description="Whether the MLP has a gate (SwiGLU and its kin).")
    rms_norm: bool = Field(default=False, description="RMSNorm instead of LayerNorm.")
    bias: bool = Field(default=True, description="Whether linear layers add a bias.")
    tied_embeddings: bool = Field(default=True, description="Whether the output layer shares the embedding's weights.")
    dropout: bool = Field(default=False, description="Whether the training run uses dropout.")

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            "has(self.headSize) || self.hiddenSize % self.attentionHeads == 0",
            lambda m: m.head_size is not None or m.hidden_size % m.attention_heads == 0,
            "hiddenSize is not a multiple of attentionHeads",
            "correct one of them, or give headSize",
        ),
        ValidationRule(
            "!has(self.keyValueHeads) || self.attentionHeads % self.keyValueHeads == 0",
            lambda m: m.key_value_heads is None or m.attention_heads % m.key_value_heads == 0,
            "attentionHeads is not a multiple of keyValueHeads",
            "let every key/value head serve the same number of query heads",
        ),
    )

    def to_model(self, name: str) -> Model:
        """Return a `Model` with these dimensions and a name."""
        return zoo.build_model(
            {
                "name": name,
                "family": self.family,
                "layers": self.layers,
                "hidden": self.hidden_size,
                "heads": self.attention_heads,
                "kv_heads": self.key_value_heads or self.attention_heads,
                "head_dim": self.head_size or self.hidden_size // self.attention_heads,
                "ffn_hidden": self.feed_forward_size or 4 * self.hidden_size,
                "vocab": self.vocabulary_size,
                "positions": self.learned_positions,
                "gated_mlp": self.gated_feed_forward,
                "rms_norm": self.rms_norm,
                "rotary": self.rotary,
                "causal": self.family == "decoder",
                "bias": self.bias,
                "tied_embeddings": self.tied_embeddings,
                "dropout": self.dropout,
            }
        )


class ConfigMapKeyRef(ApiModel):
    """A key of a ConfigMap in the job's namespace."""

    name: str = Field(min_length=1, max_length=253, pattern=OBJECT_NAME, description="Name of the ConfigMap.")
    key: str = Field(
        default="config.json",
        min_length=1,
        max_length=253,
        pattern=KEY_NAME,
        description="Key whose value is the text of a config.json.",
    )


class HuggingFace(ApiModel):
    """A model as the Hugging Face Hub describes it. Exactly one of the fields is set."""

    config: dict[str, Any] | None = optional_field(
        "Content of the model's config.json; keys that do not decide a dimension are ignored.",
        max_length=512,
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    config_map_key_ref: ConfigMapKeyRef | None = optional_field("Where that content is kept, in the job's namespace.")

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            "has(self.config) != has(self.configMapKeyRef)",
            lambda m: (m.config is None) != (m.config_map_key_ref is None),
            "needs exactly one of config and configMapKeyRef",
            "write for instance configMapKeyRef: {name: my-model}",
        ),
    )

    @field_validator("config")
    @classmethod
    def _check_config(cls, config: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return a config.json unchanged, or raise an error if it is nested too deeply or too large."""
        problem = None
        if _is_deeper(config, MAX_CONFIG_DEPTH):
            problem = f"is nested more than {MAX_CONFIG_DEPTH} deep"
        elif len(json.dumps(config, default=str)) > MAX_CONFIG_BYTES:
            problem = f"is larger than {MAX_CONFIG_BYTES // 1024} KiB"
        if problem:
            remedy = "keep the keys that decide dimensions, or keep it in a ConfigMap and name that in configMapKeyRef"
            raise PydanticCustomError("rule", "{problem}", {"problem": problem, "remedy": remedy})
        return config


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether a JSON value has more than `levels` levels of nested lists and mappings."""
    level = [value]
    for _ in range(levels + 1):
        inner = [
            each.values() if isinstance(each, Mapping) else each for each in level if isinstance(each, Mapping | list)
        ]
        level = [each for children in inner for each in children]
        if not level:
            return False
    return True


class GraphKeyRef(ConfigMapKeyRef):
    """A key of a ConfigMap in the job's namespace that holds a graph."""

    key: str = Field(
        default="graph.json",
        min_length=1,
        max_length=253,
        pattern=KEY_NAME,
        description="Key that holds what `tilecast trace` wrote (under data), or an ONNX file (under binaryData).",
    )


class GraphRef(ApiModel):
    """A model as the graph of its operators, without weights."""

    config_map_key_ref: GraphKeyRef = Field(description="Where the graph is kept, in the job's namespace.")


class ModelSource(ApiModel):
    """The architecture: a preset by name, its dimensions, a config, or a graph. Exactly one of the fields is set."""

    preset: str | None = optional_field(
        "Name of an architecture that Tilecast knows, for instance llama-2-7b, bert-large or resnet-50.",
        min_length=1,
        max_length=63,
    )
    transformer: Transformer | None = optional_field("Dimensions of a dense transformer.")
    hugging_face: HuggingFace | None = optional_field("The config.json of a Hugging Face model.")
    graph_ref: GraphRef | None = optional_field("A graph of operators in a ConfigMap.")

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            "[has(self.preset), has(self.transformer), has(self.huggingFace), has(self.graphRef)]"
            ".filter(x, x).size() == 1",
            lambda m: [m.preset, m.transformer, m.hugging_face, m.graph_ref].count(None) == 3,
            "needs exactly one of preset, transformer, huggingFace and graphRef",
            "write for instance preset: llama-2-7b",
        ),
    )
