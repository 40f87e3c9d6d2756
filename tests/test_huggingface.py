"""A config.json becomes the model that its authors published; a wrong one gives an error that names the key."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast import zoo
from tilecast.api import training_job
from tilecast.cli import main
from tilecast.graph import Graph, Shards
from tilecast.spec import Floats, SpecError, Workload
from tilecast.zoo import huggingface, reading


def llama(**keys: Any) -> dict[str, Any]:
    """Return the keys that most decoders share; `sizes` are layers, width, heads, key/value heads, MLP, words."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return dict(zip((*names, "vocab_size"), keys.pop("sizes"), strict=True)) | keys


# Keys of published configs that decide the graph, by model on huggingface.co, and the preset whose parameters they must
# have.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_inner": None, "vocab_size": 50257,
                      "n_positions": 1024, "resid_pdrop": 0.1}),
    "gptj": ("gpt-j-6b", {"n_layer": 28, "n_embd": 4096, "n_head": 16, "n_inner": None, "vocab_size": 50400,
                          "n_positions": 2048, "resid_pdrop": 0.0, "tie_word_embeddings": False}),
    "opt": ("opt-1.3b", {"num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32, "ffn_dim": 8192,
                         "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 2048,
                         "dropout": 0.1}),
    "bloom": ("bloom-560m", {"n_layer": 24, "hidden_size": 1024, "n_head": 16, "vocab_size": 250880}),
    "gpt_neox": ("gpt-neox-20b", {"num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64,
                                  "intermediate_size": 24576, "vocab_size": 50432, "tie_word_embeddings": False}),
    "falcon": ("falcon-7b", {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
                             "vocab_size": 65024, "multi_query": True, "new_decoder_architecture": False,
                             "alibi": False, "bias": False, "hidden_dropout": 0.0}),
    "llama": ("llama-3-8b", llama(sizes=(32, 4096, 32, 8, 14336, 128256), tie_word_embeddings=False)),
    "mistral": ("mistral-7b", llama(sizes=(32, 4096, 32, 8, 14336, 32000), sliding_window=4096)),
    "qwen2": ("qwen2.5-7b", llama(sizes=(28, 3584, 28, 4, 18944, 152064), use_sliding_window=False,
                                  sliding_window=131072)),
    "qwen3": ("qwen3-8b", llama(sizes=(36, 4096, 32, 8, 12288, 151936), head_dim=128)),
    "gemma": ("gemma-2b", llama(sizes=(18, 2048, 8, 1, 16384, 256000), head_dim=256)),
    "gemma2": ("gemma-2-9b", llama(sizes=(42, 3584, 16, 8, 14336, 256000), head_dim=256, sliding_window=4096)),
    "gemma3_text": ("gemma-3-1b", llama(sizes=(26, 1152, 4, 1, 6912, 262144), head_dim=256, sliding_window=512,
                                        sliding_window_pattern=6)),
    "gemma3": ("gemma-3-4b", {"text_config": llama(sizes=(34, 2560, 8, 4, 10240, 262208), head_dim=256,
                                                   sliding_window=1024)}),
    "phi": ("phi-2", llama(sizes=(32, 2560, 32, 32, 10240, 51200), tie_word_embeddings=False)),
    "phi3": ("phi-3-mini", llama(sizes=(32, 3072, 32, 32, 8192, 32064), sliding_window=2047)),
    "mixtral": ("mixtral-8x7b", llama(sizes=(32, 4096, 32, 8, 14336, 32000), sliding_window=None,
                                      num_local_experts=8, num_experts_per_tok=2)),
    "phimoe": ("phi-3.5-moe", llama(sizes=(32, 4096, 32, 8, 6400, 32064), num_local_experts=16,
                                    num_experts_per_tok=2)),
    "qwen2_moe": ("qwen1.5-moe-a2.7b", llama(sizes=(24, 2048, 16, 16, 5632, 151936), moe_intermediate_size=1408,
                                             shared_expert_intermediate_size=5632, num_experts=60,
                                             num_experts_per_tok=4, decoder_sparse_step=1)),
    "qwen3_moe": ("qwen3-30b-a3b", llama(sizes=(48, 2048, 32, 4, 6144, 151936), head_dim=128, num_experts=128,
                                         moe_intermediate_size=768, num_experts_per_tok=8, decoder_sparse_step=1)),
    "gpt_oss": ("gpt-oss-20b", llama(sizes=(24, 2880, 64, 8, 2880, 201088), head_dim=64, num_local_experts=32,
                                     num_experts_per_tok=4, attention_bias=True, sliding_window=128)),
    "deepseek_v2": ("deepseek-v2-lite", llama(sizes=(27, 2048, 16, 16, 10944, 102400), moe_intermediate_size=1408,
                                              n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
                                              first_k_dense_replace=1, moe_layer_freq=1, q_lora_rank=None,
                                              kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                                              v_head_dim=128)),
    "deepseek_v3": ("deepseek-v3", llama(sizes=(61, 7168, 128, 128, 18432, 129280), moe_intermediate_size=2048,
                                         n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
                                         first_k_dense_replace=3, moe_layer_freq=1, q_lora_rank=1536,
                                         kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                                         v_head_dim=128, num_nextn_predict_layers=1)),
    "llama4": ("llama-4-maverick", {"text_config": llama(
        sizes=(48, 5120, 40, 8, 8192, 202048), head_dim=128, intermediate_size_mlp=16384, num_local_experts=128,
        num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=8192)}),
    "llama4_text": ("llama-4-scout", llama(
        sizes=(48, 5120, 40, 8, 8192, 202048), head_dim=128, intermediate_size_mlp=16384, num_local_experts=16,
        num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=8192)),
    "transfo-xl": ("transformer-xl-large", {"n_layer": 18, "d_model": 1024, "n_head": 16, "d_head": 64,
                                            "d_inner": 4096, "vocab_size": 267735, "mem_len": 1600, "adaptive": True,
                                            "cutoffs": [20000, 40000, 200000], "div_val": 4, "dropatt": 0.0,
                                            "dropout": 0.1}),
    "bert": ("bert-large", {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16,
                            "intermediate_size": 4096, "vocab_size": 30522, "max_position_embeddings": 512,
                            "type_vocab_size": 2, "hidden_dropout_prob": 0.1,
                            "architectures": ["BertForPreTraining"]}),
    "roberta": ("roberta-base", {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
                                 "intermediate_size": 3072, "vocab_size": 50265, "max_position_embeddings": 514,
                                 "type_vocab_size": 1, "architectures": ["RobertaForMaskedLM"]}),
    "xlm-roberta": ("xlm-roberta-base", {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
                                         "intermediate_size": 3072, "vocab_size": 250002,
                                         "max_position_embeddings": 514, "type_vocab_size": 1}),
    "distilbert": ("distilbert-base", {"n_layers": 6, "dim": 768, "n_heads": 12, "hidden_dim": 3072,
                                       "vocab_size": 30522, "max_position_embeddings": 512, "dropout": 0.1,
                                       "architectures": ["DistilBertForMaskedLM"]}),
    "albert": ("albert-base", {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
                               "intermediate_size": 3072, "vocab_size": 30000, "max_position_embeddings": 512,
                               "embedding_size": 128, "architectures": ["AlbertForSequenceClassification"]}),
    "t5": ("t5-v1.1-large", {"num_layers": 24, "num_decoder_layers": 24, "d_model": 1024, "num_heads": 16,
                             "d_kv": 64, "d_ff": 2816, "vocab_size": 32128, "dropout_rate": 0.1,
                             "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5-small", {"num_layers": 8, "num_decoder_layers": 8, "d_model": 512, "num_heads": 6, "d_kv": 64,
                          "d_ff": 1024, "vocab_size": 250112, "feed_forward_proj": "gated-gelu",
                          "tie_word_embeddings": False}),
    "switch_transformers": ("switch-base-8", {"num_layers": 12, "num_decoder_layers": 12, "d_model": 768,
                                              "num_heads": 12, "d_kv": 64, "d_ff": 3072, "vocab_size": 32128,
                                              "num_experts": 8, "encoder_sparse_step": 2,
                                              "feed_forward_proj": "relu"}),
    "bart": ("bart-large", {"encoder_layers": 12, "decoder_layers": 12, "d_model": 1024,
                            "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "vocab_size": 50265,
                            "max_position_embeddings": 1024, "dropout": 0.1}),
    "mbart": ("mbart-large-50", {"encoder_layers": 12, "decoder_layers": 12, "d_model": 1024,
                                 "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "vocab_size": 250054,
                                 "max_position_embeddings": 1024}),
    "pegasus": ("pegasus-large", {"encoder_layers": 16, "decoder_layers": 16, "d_model": 1024,
                                  "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "vocab_size": 96103,
                                  "max_position_embeddings": 1024}),
    "vit": ("vit-b-16", {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
                         "intermediate_size": 3072, "image_size": 224, "patch_size": 16,
                         "id2label": {str(label): "" for label in range(1000)}}),
}  # fmt: skip


def config(kind: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": kind, **CONFIGS[kind][1], **changes}


def size(model: Any) -> float:
    return zoo.count_parameters(Workload(model, 128 if model.vocab else 1, 1))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_is_the_preset_of_its_model(kind: str) -> None:
    preset, model = zoo.find_preset(CONFIGS[kind][0]), huggingface.model(config(kind))
    assert size(model) == pytest.approx(size(preset), rel=0.004)
    names = ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "causal", "rotary")
    assert {name: getattr(model, name) for name in names} == {name: getattr(preset, name) for name in names}
    sizes = ("experts", "top_k", "moe_every", "latent", "first_dense", "shared_ffn_hidden", "decoder_layers",
            "attention_chunk", "global_every", "cutoff1")  # fmt: skip
    own, known = model.document()["extra"], preset.document()["extra"]
    for name in sizes:
        assert own.get(name, 0) == pytest.approx(known.get(name, own.get(name, 0)), rel=0.001)


PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "configs.json").read_text())
"""Published configs by name on the Hub, with the model's parameters and their source."""


def published(name: str) -> dict[str, Any]:
    row = PUBLISHED[name]
    labels = {"id2label": {str(place): f"label {place}" for place in range(row["labels"])}} if "labels" in row else {}
    return {**row["config"], **labels}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.slow
def test_a_published_config_has_the_published_parameters(name: str) -> None:
    """The parameters match within 2 %, whether or not the config has the names of its labels."""
    for document in (published(name), huggingface.remove_label_tables(published(name))):
        assert size(huggingface.model(document)) == pytest.approx(PUBLISHED[name]["parameters"], rel=0.02)


@pytest.mark.parametrize("kind", huggingface.list_supported_types())
@pytest.mark.slow
def test_every_type_is_read_from_its_defaults_and_built(kind: str) -> None:
    """With the keys that transformers fills in, stated or not, each type is a model that can be priced.

    Types that transformers lacks are among the published configs.
    """
    defaults = huggingface.find_defaults(kind)
    held = {row["config"].get("model_type", row["config"].get("_class_name")) for row in PUBLISHED.values()}
    nested: dict[str, Any] = {
        "text_config": {},
        "vision_config": {},
        "audio_config": {},
        "qformer_config": {},
        "thinker_config": {},
    }
    try:
        model = huggingface.model({**nested, **defaults, "model_type": kind})
    except SpecError:
        assert kind in held or kind in ("glm4v_moe", "glm4v_moe_text", "transfo-xl", "whisper_encoder")
        return
    assert size(model) > 1e6


CHANGES: dict[str, tuple[dict[str, Any], float]] = {
    # The same model in another spelling, and one whose dimensions differ, with its parameters counted by hand.
    "HuggingFaceTB/SmolLM3-3B": ({"vocab_size": 64128}, -64128 * 2048),
    "Zyphra/Zamba2-2.7B": ({"layers_block_type": None}, 0),
    "ai21labs/Jamba-v0.1": ({"num_experts": 1}, -15 * 16 * 3 * 4096 * 14336 - 16 * 16 * 4096),
    "ibm-granite/granite-4.0-h-tiny": (
        {"layer_types": ["full_attention" if place in (5, 15, 25, 35) else "linear_attention" for place in range(40)]},
        0,
    ),
    "mosaicml/mpt-7b": ({"attn_config": {"kv_n_heads": 8, "alibi": True}}, -32 * 2 * 24 * 128 * 4096),
    "facebook/dinov2-base": ({"num_hidden_layers": 6}, -6 * (12 * 768**2)),
    "microsoft/swin-tiny-patch4-window7-224": ({"depths": [2, 2, 4, 2]}, -2 * 12 * 384**2),
    "openai/clip-vit-large-patch14": ({"text_config_dict": None, "vision_config": {}}, -216e6),
    "stable-diffusion-v1-5/unet": ({"sample_size": [96, 96]}, 0),
    "bigcode/starcoder": ({"multi_query": False}, 40 * 2 * 47 * 128 * 6144),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_config_has_the_parameters_that_follow(name: str) -> None:
    changes, more = CHANGES[name]
    before = size(huggingface.model(published(name)))
    after = size(huggingface.model({**published(name), **changes}))
    assert after - before == pytest.approx(more, rel=0.02, abs=0.002 * before)


def test_kimi_vl_sees() -> None:
    """MoonViT has 400 M parameters (arXiv 2504.07491, section 2.1), and a projector from four patches."""
    vision = {"model_type": "moonvit", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
              "num_attention_heads": 16, "patch_size": 14}  # fmt: skip
    text = config("deepseek_v3", num_hidden_layers=4)
    whole = huggingface.model({"model_type": "kimi_vl", "text_config": text, "vision_config": vision})
    projector = 4608 * 4608 + 4608 * text["hidden_size"]
    assert size(whole) - size(replace(whole, towers=())) == pytest.approx(413e6 + projector, rel=0.02)
    assert "one image of 448 x 448 pixels" in whole.notes[-1]


def test_keys_under_an_old_name_go_before_defaults_of_the_new() -> None:
    old = huggingface.model({"model_type": "bloom", "n_layer": 3, "n_embed": 64, "n_head": 4, "vocab_size": 100})
    assert (old.layers, old.hidden, old.heads) == (3, 64, 4)


def test_a_config_without_its_type_is_known_by_its_class() -> None:
    stated = {key: value for key, value in config("bert").items() if key != "model_type"}
    assert size(huggingface.model(stated)) == size(huggingface.model(config("bert")))
    assert huggingface.model({**config("llama"), "model_type": "LLaMA"}).family == "decoder"


def test_a_decoder_of_no_known_type_is_read_by_its_keys_and_says_so() -> None:
    model = huggingface.model({**config("llama"), "model_type": "notyet"})
    assert size(model) == size(huggingface.model(config("llama")))
    assert "notyet is not known: it is read by its keys" in model.notes[-1]
    sparse = huggingface.model({**config("deepseek_v3"), "model_type": "notyet"})
    assert size(sparse) == size(huggingface.model(config("deepseek_v3")))


def test_towers_are_part_of_the_model_and_what_is_left_out_is_said() -> None:
    whole = huggingface.model(published("llava-hf/llava-1.5-7b-hf"))
    assert [tower.family for tower in whole.towers] == ["vit"]
    assert any("one image of 336 x 336 pixels" in note for note in whole.notes)
    unknown = {"model_type": "sonar_vision", "hidden_size": 8}
    blind = huggingface.model({**published("llava-hf/llava-1.5-7b-hf"), "vision_config": unknown})
    assert not blind.towers and any("sonar_vision, is not priced" in note for note in blind.notes)
    assert size(whole) - size(blind) == pytest.approx(325e6, rel=0.02)
    original = {**published("liuhaotian/llava-v1.5-7b"), "mm_vision_tower": "someone/their-tower"}
    assert "does not describe someone/their-tower, which is not priced" in huggingface.model(original).notes[0]
    assert "predict further tokens" in huggingface.model(published("zai-org/GLM-4.5")).notes[0]


def test_where_a_config_is_refused_and_a_preset_has_its_dimensions_the_error_names_it() -> None:
    with pytest.raises(SpecError, match=r"llama-3-8b, which differs in num_key_value_heads alone, 8 instead of 5$"):
        huggingface.model(config("llama", num_key_value_heads=5))
    with pytest.raises(SpecError, match=r"preset llama-3-8b, which has these dimensions$"):
        huggingface.model(config("llama", head_dim=-1))
    with pytest.raises(SpecError, match=r"choose a divisor$"):  # two dimensions differ
        huggingface.model(config("llama", num_key_value_heads=5, vocab_size=77))
    with pytest.raises(SpecError, match=r"phi-4, which differs in num_attention_heads alone, 40 instead of 7$"):
        huggingface.model(config("phi3", hidden_size=5120, intermediate_size=17920, num_hidden_layers=40,
                                 num_attention_heads=7, num_key_value_heads=10, vocab_size=100352))  # fmt: skip
    with pytest.raises(SpecError, match="or use the preset dbrx"):
        huggingface.model({"model_type": "sth", "_name_or_path": "databricks/dbrx", "architectures": ["X"]})
    text_encoder = {"num_layers": 12, "d_model": 768, "num_heads": 12, "vocab_size": 32128}
    parts = {"text_encoder": {"model_type": "t5", **text_encoder}, "decoder": {"num_attention_heads": 24}}
    with pytest.raises(SpecError, match=r"name a preset$"):  # a T5 inside does not make it a T5
        huggingface.model({"model_type": "musicgen", **parts})


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        (
            {"num_hidden_layers": ...},
            "The config lacks sizes. Priced are Transformers' defaults: num_hidden_layers",
        ),
        ({"intermediate_size": None}, "In the config, intermediate_size is null, and 16384 is priced."),
        ({"num_mtp_modules": 3}, "Layers that predict further tokens are not priced (num_mtp_modules 3)."),
        ({"n_routed_experts": 64}, "Not read from the config: n_routed_experts 64."),
        (
            {"intermediate_size": None, "model_type": "notyet"},
            "The config states no width of the MLP: 16384",
        ),
        ({"num_key_value_heads": None}, None),
        ({"head_dim": None}, None),
        ({}, None),
    ],
)
def test_no_size_of_a_config_is_guessed_or_dropped_silently(changes: dict[str, Any], note: str | None) -> None:
    stated = {key: value for key, value in {**config("llama"), **changes}.items() if value is not ...}
    notes = huggingface.model(stated).notes
    assert notes[:1] == () if note is None else notes[0].startswith(note)


def test_defaults_of_a_part_are_noted_under_its_name() -> None:
    notes = huggingface.model(published("google/gemma-3-4b-it")).notes
    assert "text_config lacks sizes. Priced are Transformers' defaults: num_attention_heads 8," in notes[0]
    towers = huggingface.model(published("openai/clip-vit-base-patch32")).notes
    assert [note.split()[0] for note in towers if "lacks sizes" in note] == ["text_config", "vision_config"]


def test_hardly_any_published_decoder_has_a_note_on_its_sizes() -> None:
    """A note that most configs had would be read by nobody."""
    models = {name: huggingface.model(published(name)) for name in PUBLISHED}
    noted = {
        name
        for name, model in models.items()
        if model.family in ("decoder", "hybrid") and not model.towers
        for note in model.notes
        if "lacks sizes" in note or "Not read" in note or "is null" in note
    }
    assert noted == {"Zyphra/Zamba-7B-v1"}


def test_a_value_that_is_no_size_is_called_by_the_key_it_stands_under() -> None:
    with pytest.raises(SpecError, match="is no size") as caught:
        huggingface.model(config("llama", model_type="gemma9n_text", intermediate_size=[8192] * 32))
    assert caught.value.field.endswith(".intermediate_size")


def test_an_electra_is_its_discriminator() -> None:
    """The base model has 110 M parameters (arXiv 2003.10555, table 1); the small one projects an embedding of 128."""
    base = config("bert", model_type="electra", embedding_size=768) | {
        "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
        "architectures": ["ElectraForQuestionAnswering"],
    }  # fmt: skip
    assert size(huggingface.model(base)) == pytest.approx(108.9e6, rel=0.004)
    small = base | {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "embedding_size": 128}
    assert size(huggingface.model(small)) == pytest.approx(13.5e6, rel=0.01)


def test_the_head_follows_the_architecture() -> None:
    def extra(kind: str, task: str, **changes: Any) -> dict[str, float]:
        return dict(huggingface.model(config(kind, architectures=[task], **changes)).document()["extra"])

    assert extra("bert", "BertForQuestionAnswering")["head_vocab"] == 2
    assert extra("bert", "BertForTokenClassification", id2label={"0": "a", "1": "b", "2": "c"})["head_vocab"] == 3
    assert extra("bert", "BertForSequenceClassification")["classes"] == 2
    assert extra("bert", "BertForMaskedLM")["pooler"] == 0
    assert extra("llama", "LlamaForSequenceClassification")["classes"] == 2
    assert "classes" not in extra("llama", "LlamaForCausalLM")


def test_a_window_that_is_switched_off_is_none() -> None:
    assert "sliding_window" not in huggingface.model(config("qwen2")).document()["extra"]
    assert huggingface.model(config("qwen2", use_sliding_window=True)).document()["extra"]["sliding_window"] == 131072
    assert "sliding_window" not in huggingface.model(config("mistral", sliding_window=None)).document()["extra"]


def test_falcons_share_heads_in_three_ways() -> None:
    changes: list[dict[str, Any]] = [
        {"new_decoder_architecture": True, "num_kv_heads": 71}, {"multi_query": True}, {"multi_query": False},
    ]  # fmt: skip
    assert [huggingface.model(config("falcon", **change)).kv_heads for change in changes] == [71, 1, 71]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "config.json.model_type", "is missing; trace the model"),
    ({"model_type": "sonar"}, "config.json.model_type", "'sonar' is not supported; trace the model"),
    ({"model_type": "mamba"}, "config.json.num_hidden_layers", "a config of mamba states it"),
    ({"architecture": "no_such_net"}, "config.json.architecture", "no preset is called 'no_such_net'"),
    (published("LiquidAI/LFM2-1.2B") | {"layer_types": ["fourier"]}, "config.json.layer_types", "'fourier' is no kind"),
    ({"model_type": 3}, "config.json.model_type", "'3' is not supported"),
    (config("llama", model_type="xlstm"), "config.json.model_type", "cells with matrix memory, not attention; trace"),
    (config("llama", model_type="lilt", architectures=["LiltModel"]), "config.json.model_type", "'lilt' is not supp"),
    ({"model_type": "perceiver"}, "config.json.model_type", "up to its preprocessors, which the config does not desc"),
    ({"model_type": "mask2former"}, "config.json.model_type", "sampled points, a kernel that is not priced; trace"),
    ({"model_type": "rt_detr"}, "config.json.model_type", "sampled points, a kernel that is not priced; trace the"),
    (
        {**published("microsoft/trocr-base-handwritten"), "encoder": {"model_type": "hiera"}},
        "config.json",
        "its encoder or its decoder is of a type that is not known; trace it",
    ),
    (
        {**published("microsoft/trocr-base-handwritten"), "encoder": {"model_type": "resnet"}},
        "config.json.encoder",
        "hands on neither patches of an image nor frames of a sound; trace",
    ),
    (
        {**published("microsoft/trocr-base-handwritten"), "encoder": {"model_type": "gpt2"}},
        "config.json.encoder",
        "hands on neither patches of an image nor frames of a sound; trace",
    ),
    ({"model_type": "llama"}, "config.json.num_hidden_layers", "a config of llama states it"),
    (config("llama", hidden_size="wide"), "config.json.hidden_size", "'wide' is no size"),
    (config("llama", hidden_size=[4096]), "config.json.hidden_size", "is no size"),
    (config("llama", hidden_size=4096.5), "config.json.hidden_size", "is not a whole number"),
    (config("llama", hidden_size=-1), "config.json.hidden_size", "is no size"),
    (config("llama", hidden_size=0), "config.json.hidden_size", "must be positive"),
    (config("llama", hidden_size=float("nan")), "config.json.hidden_size", "is no size"),
    (config("llama", hidden_size=10**400), "config.json.hidden_size", "is no size"),
    (config("llama", head_dim=0), "config.json.head_dim", "must be positive"),
    (config("mixtral", num_experts_per_tok=0), "config.json.num_experts_per_tok", "0 is not from 1 to the 8 experts"),
    (config("mixtral", num_experts_per_tok=9), "config.json.num_experts_per_tok", "9 is not from 1 to the 8 experts"),
    (config("deepseek_v3", first_k_dense_replace=62), "config.json.first_k_dense_replace", "more than the 61 layers"),
    (config("llama", num_hidden_layers=10**9), "config.json.num_hidden_layers", "up to 1024"),
    (config("llama", num_attention_heads=7, num_key_value_heads=7), "config.json.num_attention_heads", "divisible"),
    (config("llama", num_key_value_heads=0), "config.json.num_key_value_heads", "divisible"),
    (config("llama", num_key_value_heads=5), "config.json.num_key_value_heads", "divisible"),
    (config("deepseek_v3", kv_lora_rank=None), "config.json.kv_lora_rank", "is missing"),
    (config("mixtral", num_local_experts=None), "config.json.num_local_experts", "is missing"),
    (config("qwen2_moe", decoder_sparse_step=0), "config.json.decoder_sparse_step", "must be positive"),
    (config("transfo-xl", cutoffs=[20000, 10000, 200000]), "config.json.cutoffs", "ascend"),
    (config("transfo-xl", cutoffs=[20000, 40000, 300000]), "config.json.vocab_size", "ascend"),
    (config("llama4", text_config=None), "config.json.text_config", "holds its model there"),
    (
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": "x"}},
        "config.json.text_config.num_hidden_layers",
        "is no size",
    ),
]


@pytest.mark.parametrize(("document", "field", "rest"), WRONG, ids=[f"{row[1]}-{i}" for i, row in enumerate(WRONG)])
def test_a_wrong_config_names_the_key(document: dict[str, Any], field: str, rest: str) -> None:
    with pytest.raises(SpecError) as caught:
        huggingface.model(document)
    assert caught.value.field == field
    assert rest in str(caught.value)
    assert "\n" not in str(caught.value)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())


@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_any_value_anywhere_is_read_or_refused(kind: str, data: st.DataObject) -> None:
    document = config(kind)
    key = data.draw(st.sampled_from(sorted(document)))
    try:
        model = huggingface.model({**document, key: data.draw(VALUES)})
    except SpecError:
        return
    assert zoo.count_parameters(Workload(model, 128 if model.vocab else 1, 1)) >= 0


GPUS = ["--gpus", "h100-sxm:8,a100-80:8"]


@pytest.mark.slow
def test_a_config_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config("llama", architectures=["LlamaForCausalLM"], torch_dtype="bfloat16")))
    sizes = ["--seq", "4096", "--batch", "64"]
    outputs = []
    for job in (str(path), "llama-3-8b"):
        assert main(["advise", job, *sizes, *GPUS, "-o", "json"]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["recommendation"]["stepSeconds"])
    assert outputs[0] == outputs[1]
    assert main(["advise", str(path), *sizes, *GPUS, "--lora-rank", "16", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommendation"]["stepSeconds"]["target"] < outputs[0]["target"]
    assert main(["advise", str(path), "--seq", "4096", *GPUS]) == 2
    assert "--batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "tokens", "width", "steps"),
    [
        ("microsoft/trocr-base-handwritten", 24 * 24, 768, 0),
        ("naver-clova-ix/donut-base", 80 * 60, 1024, 0),
        ("speech/wav2vec2-base-bart-large", 781, 768, 1),
    ],
)
def test_a_decoder_looks_at_the_tokens_of_its_encoder(name: str, tokens: int, width: int, steps: int) -> None:
    """Keys and values of cross-attention come from the encoder's tokens, in its width or after a dense layer."""
    built = graph(name, [1], [1])
    (decoder,) = built.layers
    assert decoder.name == "decoder-layer"
    (made,) = (op for op in decoder.ops if op.name == "cross-attention.key-value")
    assert made.table.dims[0, :4].tolist() == [1, tokens, 2 * 1024, 1024 if steps else width]
    assert bool([block for block in built.first if block.name == "tower1-projector"]) is bool(steps)


def test_a_video_is_masked_in_pretraining_alone() -> None:
    """VideoMAE (arXiv 2203.12602, section 4.1) has 8 x 14 x 14 tokens, of which the encoder sees a tenth."""
    small, whole = (graph(f"MCG-NJU/videomae-base{rest}", [1], [1]) for rest in ("", "-finetuned-kinetics"))
    seen = []
    for built in (small, whole):
        (made,) = (op for op in built.layers[0].ops if op.name == "attention.qkv")
        seen.append(int(made.table.dims[0, 1]))
    assert seen == [157, 1568]
    assert small.first[0].name.startswith("tower1-") and len(whole.first) == 1
    assert whole.host_bytes_per_sample == 16 * 224 * 224 * 3


def test_a_config_of_another_family_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "sonar"}')
    assert main(["advise", str(path), "--seq", "1", "--batch", "1", *GPUS]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "model_type: 'sonar' is not supported; trace" in error


@pytest.mark.parametrize("name", ["Config (2).JSON", "größe_1.json", "-.json", "模型.json"])
def test_a_file_of_any_name_is_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(published("openai/clip-vit-large-patch14")))
    assert main(["advise", str(path), "--batch", "64", *GPUS, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["workload"] == {
        "model": "clip",
        "family": "decoder",
        "parameters": pytest.approx(427.6e6, rel=0.001),
    }
    assert any("one image of 224 x 224 pixels" in note for note in document["notes"])
    assert main(["advise", str(path), "--batch", "64", *GPUS]) == 0
    assert "428M parameters" in capsys.readouterr().out.splitlines()[0]


def test_a_config_of_many_labels_fits_into_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published("microsoft/swin-large-patch4-window12-384-in22k"), indent=2))
    assert path.stat().st_size > 256 * 1024
    assert main(["advise", str(path), "--batch", "64", *GPUS]) == 0
    assert "228M parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("whisper", "unknown model 'whisper'; give its config.json"),
        ("openai/whisper-large-v3", "whisper-large-v3': it is no preset"),
        ("facebook/dinov2-large", "dinov2-large': it is no preset"),
        ("my_model", "unknown model 'my_model'; `tilecast show models` lists them"),
        ("model.safetensors", "holds weights, not what is computed with them; give the model's config.json"),
        ("Llama3", "did you mean llama-3-8b, llama-3.1-8b, llama-3-70b"),
        ("gemma3", "did you mean gemma-3-1b, gemma-3-4b, gemma-3-12b or gemma-3-27b?"),
        ("opt", "did you mean opt-125m, "),
        ("mamba", "unknown model 'mamba'; give its config.json"),
    ],
)
def test_a_name_that_is_no_model_is_told_what_helps(name: str, rest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", name, "--batch", "1", *GPUS]) == 2
    assert rest in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ai21labs/Jamba-v0.1", "tiiuae/Falcon-H1-0.5B-Base", "Qwen/Qwen2.5-VL-3B-Instruct"])
def test_adapters_stand_beside_hybrids_and_towers(name: str) -> None:
    model = huggingface.model(published(name))
    adapted = zoo.count_parameters(Workload(model, 128, 1, lora_rank=16)) / size(model)
    assert 1.0005 < adapted < 1.05


NEW = [
    "state-spaces/mamba-130m", "ai21labs/Jamba-v0.1", "Zyphra/Zamba2-1.2B", "tiiuae/Falcon-H1-0.5B-Base",
    "google/recurrentgemma-2b", "Qwen/Qwen3-Next-80B-A3B-Instruct", "LiquidAI/LFM2-1.2B", "RWKV/rwkv-4-430m-pile",
    "microsoft/deberta-v3-base", "xlnet/xlnet-base-cased", "openai/whisper-small", "facebook/sam-vit-base",
    "Salesforce/blip2-opt-2.7b", "Qwen/Qwen2.5-VL-3B-Instruct", "facebook/convnext-tiny-224",
    "nvidia/segformer-b0-finetuned-ade-512-512", "MiniMaxAI/MiniMax-Text-01",
]  # fmt: skip
"""One published config for each kind of layer that no preset has."""


def graph(name: str, micro: list[int], tensor: list[int]) -> Graph:
    """Return the graph of a published config over shards with these micro-batches and tensor-parallel sizes."""
    model = huggingface.model(published(name))
    ones = np.ones(len(micro), np.int64)
    shards = Shards(np.array(micro), np.array(tensor), ones, ones, 0 * ones)
    return zoo.build(Workload(model, 256 if model.vocab else 1, 1), shards)


def work(built: Graph, column: str = "flops") -> Floats:
    """Return FLOPs or bytes of one micro-batch, a number per shard."""
    return sum(
        (block.repeat * op.count * getattr(op.table, column)() for block in built.blocks for op in block.ops),
        np.zeros(built.shards),
    )


@pytest.mark.parametrize("name", NEW)
@pytest.mark.slow
def test_a_column_of_shards_is_each_shard_alone(name: str) -> None:
    splits = [1, 1, 2] if huggingface.model(published(name)).heads % 2 == 0 else [1, 1, 1]
    table = graph(name, [1, 4, 2], splits)
    for place, (micro, tensor) in enumerate(zip([1, 4, 2], splits, strict=True)):
        alone = graph(name, [micro], [tensor])
        for column in ("flops", "bytes"):
            assert work(table, column)[place] == pytest.approx(work(alone, column)[0], rel=1e-12)
        for block, other in zip(table.blocks, alone.blocks, strict=True):
            for key in ("parameters", "working_bytes"):
                rows = np.broadcast_to(getattr(block, key), 3)
                assert rows[place] == pytest.approx(getattr(other, key)[0], rel=1e-12)


@pytest.mark.parametrize("name", NEW)
def test_twice_the_samples_are_twice_the_work_and_two_ranks_halve_it(name: str) -> None:
    model = huggingface.model(published(name))
    once, twice = work(graph(name, [8, 16], [1, 1]))
    assert twice == pytest.approx(2 * once, rel=0.03)
    if model.vocab and model.heads % 2 == 0 and not model.towers:
        whole, half = work(graph(name, [8, 8], [1, 2]))
        assert half == pytest.approx(whole / 2, rel=0.05)


DENSE = [
    "state-spaces/mamba-2.8b-hf", "state-spaces/mamba2-2.7b", "mistralai/Mamba-Codestral-7B-v0.1",
    "tiiuae/Falcon-H1-7B-Base", "ibm-ai-platform/Bamba-9B-v1", "google/recurrentgemma-9b",
    "nvidia/Nemotron-H-8B-Base-8K", "LiquidAI/LFM2-1.2B", "RWKV/rwkv-4-430m-pile",
]  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_a_hybrid_takes_six_flops_for_each_parameter_that_multiplies(name: str) -> None:
    """arXiv 2001.08361, section 2.1, counts each weight except the input embedding; chunks and attention add to it."""
    model = huggingface.model(published(name))
    weights = size(model) - (0.0 if model.tied_embeddings else model.vocab * model.hidden)
    assert 0.99 <= work(graph(name, [1], [1]))[0] / (6 * weights * 256) < 1.15


@pytest.mark.parametrize(
    ("name", "forward"),
    [("facebook/convnext-tiny-224", 4.5e9), ("microsoft/swin-tiny-patch4-window7-224", 4.5e9),
     ("facebook/convnext-large-224", 34.4e9), ("facebook/sam-vit-base", 486e9)],
)  # fmt: skip
def test_networks_of_images_do_the_published_products(name: str, forward: float) -> None:
    """Multiply-adds of a forward pass are from arXiv 2201.03545, table 1, 2103.14030, table 1, and segment-anything.

    The last figure is that of its image encoder. Training takes three times as many multiply-adds, of two FLOPs
    each.
    """
    assert work(graph(name, [1], [1]))[0] == pytest.approx(6 * forward, rel=0.1)


def job(**source: Any) -> dict[str, Any]:
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "a"},
        "spec": {"model": {"huggingFace": source}, "training": {"sequenceLength": 128, "globalBatchSize": 8}},
    }


STORED = {"data": {"config.json": json.dumps(config("llama")), "broken": "{", "list": "[]"}}


def test_a_job_holds_its_config_or_says_where_it_is() -> None:
    inline = training_job.read_request(job(config=config("llama"))).workload.model
    stored = training_job.read_request(job(configMapKeyRef={"name": "m"}), {"m": STORED}).workload.model
    assert inline == stored == huggingface.model(config("llama"))


@pytest.mark.parametrize(
    ("source", "field", "rest"),
    [
        ({}, "spec.model.huggingFace", "exactly one of config and configMapKeyRef"),
        ({"configMapKeyRef": {"name": "n"}}, "spec.model.huggingFace.configMapKeyRef.name", "no ConfigMap n; create"),
        ({"configMapKeyRef": {"name": "m", "key": "x"}}, "spec.model.huggingFace.configMapKeyRef.key", "it holds bro"),
        ({"configMapKeyRef": {"name": "m", "key": "broken"}}, "spec.model.huggingFace.configMapKeyRef.key", "no JSON"),
        ({"configMapKeyRef": {"name": "m", "key": "list"}}, "spec.model.huggingFace.configMapKeyRef.key", "no JSON"),
        ({"config": {"model_type": "sonar"}}, "spec.model.huggingFace.config.model_type", "trace the model"),
    ],
)
def test_a_model_that_is_not_there_names_field_and_remedy(source: dict[str, Any], field: str, rest: str) -> None:
    with pytest.raises(SpecError) as caught:
        training_job.read_request(job(**source), {"m": STORED})
    assert caught.value.field == field
    assert rest in str(caught.value)


def test_a_job_and_its_config_map_in_one_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}, **STORED}
    text = "\n---\n".join(json.dumps(item, indent=1) for item in (config_map, job(configMapKeyRef={"name": "m"})))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"---\n{text}"))
    assert main(["advise", "-", *GPUS, "-o", "csv"]) == 0
    assert "h100-sxm" in capsys.readouterr().out


def test_gpt_oss_clamps_its_activations_by_default() -> None:
    """GptOssConfig fills in 7.0 where a config lacks `swiglu_limit`."""
    given = {"model_type": "gpt_oss", "num_hidden_layers": 24}
    assert huggingface.model(given).document()["extra"]["activation_clamp"] == 7.0
    assert huggingface.model({**given, "swiglu_limit": 0}).document()["extra"].get("activation_clamp", 0.0) == 0.0


def test_every_table_names_dimensions_of_its_family() -> None:
    """A misspelt dimension in a table of types is no dimension of the family that the table reads."""
    apart = {"family", "read", "pattern", *huggingface._NOT_DIMENSIONS}
    for kind, table in huggingface._complete_type_tables().items():
        if "family" in table:
            names = {*table, *table["read"]} - apart
            assert not [name for name in names if not reading.find_dimension_type(table["family"], name)], kind


def test_a_classifier_of_sound_is_priced_as_its_encoder() -> None:
    known = {"model_type": "wav2vec2", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
    named = {**known, "architectures": ["Wav2Vec2ForSequenceClassification"]}
    assert huggingface.model(named).dimensions == huggingface.model(known).dimensions


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "convnext", "patch_size": 0}, "patch_size"),
        ({"model_type": "segformer", "mlp_ratios": [0, 0, 0, 0]}, "mlp_ratios"),
        ({"model_type": "audio-spectrogram-transformer", "time_stride": 0}, "time_stride"),
    ],
)
def test_a_size_of_zero_is_refused(config: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError, match="must be positive, got 0; state one or more") as error:
        huggingface.model(huggingface.find_defaults(config["model_type"]) | config)
    assert key in error.value.field
