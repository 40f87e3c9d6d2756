"""Models that torchtitan's own package defines, and layouts and hybrids of Megatron-Bridge, are read as syntax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilecast import readers
from tilecast.spec import SpecError
from tilecast.zoo import huggingface

LLAMA = """
from torchtitan.models.common import compute_ffn_hidden_dim, RMSNorm
from .model import Llama3Model

def _build_llama3_layers(*, n_layers, dim, n_heads, hidden_dim, n_kv_heads=None, attn_backend):
    raise RuntimeError

def _debugmodel(attn_backend: str) -> Llama3Model.Config:
    dim = 256
    return Llama3Model.Config(
        dim=dim,
        vocab_size=2048,
        layers=_build_llama3_layers(
            n_layers=6, dim=dim, n_heads=16, hidden_dim=compute_ffn_hidden_dim(dim, multiple_of=256),
            attn_backend=attn_backend,
        ),
    )

def _odd(attn_backend: str) -> Llama3Model.Config:
    return Llama3Model.Config(dim=256, vocab_size=2048, layers=_build_odd_layers(n_layers=6))

def _computed(attn_backend: str) -> Llama3Model.Config:
    return Llama3Model.Config(
        dim=read_dim(), vocab_size=2048, layers=_build_llama3_layers(n_layers=6, n_heads=16, hidden_dim=512),
    )

llama3_configs = {"debugmodel": _debugmodel, "odd": _odd, "computed": _computed}
"""
KIMI = """
from .model import KimiK25Model

def _vision_encoder_config(*, dim, ffn_dim, num_layers, num_heads, patch_size=14): ...
def _build_kimi_layers(**kwargs): ...

def _debugmodel(attn_backend: str) -> KimiK25Model.Config:
    return KimiK25Model.Config(
        dim=256, vocab_size=2048,
        vision_encoder=_vision_encoder_config(dim=256, ffn_dim=512, num_layers=4, num_heads=4),
        layers=_build_kimi_layers(
            n_layers=6, n_dense_layers=1, dim=256, n_heads=16, q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, dense_hidden_dim=1024, moe_hidden_dim=256, num_experts=8,
            num_shared_experts=2, router_top_k=3,
        ),
    )

kimi_configs = {"debugmodel": _debugmodel}
"""
REGISTRY = """
from dataclasses import dataclass
from torchtitan.trainer import Trainer
from . import model_registry

def small(flavor="{flavor}") -> Trainer.Config:
    return _Checked(
        model_spec=model_registry(flavor),
        training=TrainingConfig(local_batch_size=8, seq_len=2048),
        parallelism=ParallelismConfig(data_parallel_shard_degree=4),
    )

@dataclass
class _Checked(Trainer.Config):
    def __post_init__(self) -> None:
        Trainer.Config.__post_init__(self)
        if self.parallelism.tensor_parallel_degree > 1:
            raise ValueError("tensor parallelism is not " + "supported")
"""
BESIDE = """
from torchtitan.models.llama3.config_registry import small
from torchtitan.trainer import Trainer
from . import _spmd

def half() -> Trainer.Config:
    config = small()
    config.parallelism.data_parallel_shard_degree = 2
    _spmd(config, typechecking=True)
    return config
"""

SHARED = """
def _spmd(config, *, typechecking: bool) -> None:
    if typechecking:
        config.activation_checkpoint = None
"""


def put_packages(site: Path, flavor: str = "debugmodel", definition: str = LLAMA) -> None:
    """Write torchtitan's package with a family, and a package of recipes beside it."""
    files = {
        "torchtitan/__init__.py": "", "torchtitan/models/__init__.py": "",
        "torchtitan/models/llama3/__init__.py": definition,
        "torchtitan/models/llama3/config_registry.py": REGISTRY.replace("{flavor}", flavor),
        "recipes/__init__.py": "", "recipes/tests/__init__.py": SHARED, "recipes/tests/features.py": BESIDE,
        "other/models/llama3/config_registry.py": "raise SystemExit",
    }  # fmt: skip
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


def config_of(reading: readers.LaunchReading) -> dict[str, Any]:
    """Return the config.json of the model that was read."""
    assert reading.model is not None
    config: dict[str, Any] = reading.model["huggingFace"]["config"]
    return config


def test_a_model_of_the_package_is_read_by_its_dimensions(tmp_path: Path) -> None:
    put_packages(tmp_path)
    reading = readers.read_file(f"{tmp_path}/torchtitan/models/llama3/config_registry.py:small")
    config = config_of(reading)
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("llama", 6, 256)
    assert (config["intermediate_size"], config["num_key_value_heads"], config["vocab_size"]) == (768, 16, 2048)
    assert not config["tie_word_embeddings"]
    assert (reading.gpus, reading.plan.data, reading.training["globalBatchSize"]) == (4, 4, 32)
    model = huggingface.model(config, "model")
    assert (model.layers, model.hidden, model.ffn_hidden) == (6, 256, 768)


def test_a_recipe_beside_the_package_calls_its_configurations(tmp_path: Path) -> None:
    put_packages(tmp_path)
    reading = readers.read_file(f"{tmp_path}/recipes/tests/features.py:half")
    assert config_of(reading)["num_hidden_layers"] == 6
    assert reading.plan.data == 2
    assert (reading.plan.checkpointing, reading.unknown) == ("none", ())


def test_a_model_of_text_and_images_has_both_parts(tmp_path: Path) -> None:
    put_packages(tmp_path, definition=KIMI)
    config = config_of(readers.read_file(f"{tmp_path}/torchtitan/models/llama3/config_registry.py:small"))
    assert config["model_type"] == "kimi_vl"
    assert config["text_config"]["q_lora_rank"] is None
    assert config["text_config"]["n_routed_experts"] == 8
    assert config["vision_config"]["num_hidden_layers"] == 4
    assert huggingface.model(config, "model").towers


@pytest.mark.parametrize("flavor", ["odd", "computed", "missing"])
def test_a_model_that_dimensions_do_not_describe_is_refused(tmp_path: Path, flavor: str) -> None:
    put_packages(tmp_path, flavor)
    with pytest.raises(SpecError, match="is no model that is known"):
        readers.read_file(f"{tmp_path}/torchtitan/models/llama3/config_registry.py:small")


@pytest.mark.parametrize(
    ("stated", "other"),
    [
        ("n_layers=6", "n_layers='six'"),
        ("n_layers=6", "n_layers=[6]"),
        ("n_layers=6", "n_layers=True"),
        ("n_heads=16", "n_heads=None"),
        ("multiple_of=256", "multiple_of=0"),
        ("multiple_of=256", "multiple_of=256, ffn_dim_multiplier=1e999"),
        ("vocab_size=2048", "vocab_size=2048, vision_encoder=_vision_encoder_config(**TOWER)"),
    ],
)
def test_a_dimension_that_is_no_number_is_refused(tmp_path: Path, stated: str, other: str) -> None:
    tower = "TOWER = dict(dim=256, ffn_dim=512, num_layers=4, num_heads=4)\n"
    put_packages(tmp_path, definition=tower + LLAMA.replace(stated, other))
    with pytest.raises(SpecError, match="is no model that is known"):
        readers.read_file(f"{tmp_path}/torchtitan/models/llama3/config_registry.py:small")


def test_a_factor_of_none_changes_no_width(tmp_path: Path) -> None:
    stated = "multiple_of=256"
    put_packages(tmp_path, definition=LLAMA.replace(stated, f"{stated}, ffn_dim_multiplier=None"))
    reading = readers.read_file(f"{tmp_path}/torchtitan/models/llama3/config_registry.py:small")
    assert config_of(reading)["intermediate_size"] == 768


def test_a_model_whose_definition_is_elsewhere_is_named_by_the_user(tmp_path: Path) -> None:
    put_packages(tmp_path)
    (tmp_path / "torchtitan/models/llama3/__init__.py").unlink()
    recipe = tmp_path / "recipes/tests/features.py"
    recipe.write_text(
        REGISTRY.replace("{flavor}", "own").replace("from . import", "from torchtitan.models.llama3 import")
    )
    with pytest.raises(SpecError, match="name the model before --"):
        readers.read_file(f"{recipe}:small")


@pytest.mark.parametrize(
    "change",
    [
        "    extra: int = 3\n",
        "    def __init__(self): ...\n",
        "    def __post_init__(self):\n        self.training = None\n",
        "    def __post_init__(self):\n        change(self)\n",
    ],
)
def test_a_class_that_changes_its_fields_is_not_followed(tmp_path: Path, change: str) -> None:
    put_packages(tmp_path)
    path = tmp_path / "torchtitan/models/llama3/config_registry.py"
    text = path.read_text()
    path.write_text(text[: text.index("    def __post_init__")] + change)
    with pytest.raises(SpecError, match="only a run would know"):
        readers.read_file(f"{path}:small")


BRIDGE = """
from megatron.bridge.recipes.common import _pretrain_common

def _layout(pp, vp):
    known = {{(2, 2): [["embedding"] + ["decoder"] * 4] + [["decoder"] * 4] * 2 + [["decoder"] * 2 + ["loss"]]}}
    return list([list(stage) for stage in known[(pp, vp)]])

def small_pretrain_16gpu_h100_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = HybridModelProvider(
        hidden_size=2688, num_attention_heads=32, num_query_groups=2, kv_channels=128, ffn_hidden_size=1856,
        mamba_num_heads=64, num_moe_experts=128, moe_ffn_hidden_size=1856, moe_router_topk=6,
        moe_shared_expert_intermediate_size=3712, {more}
    )
    cfg.tokenizer.tokenizer_model = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    {rest}
    return cfg
"""


def read_bridge(folder: Path, more: str, rest: str = "pass") -> readers.LaunchReading:
    """Return what is read of a recipe with a hybrid."""
    (folder / "recipe.py").write_text(BRIDGE.format(more=more, rest=rest))
    return readers.read_file(f"{folder}/recipe.py:small_pretrain_16gpu_h100_config")


def test_a_hybrid_of_a_recipe_is_read_by_its_pattern(tmp_path: Path) -> None:
    config = config_of(read_bridge(tmp_path, 'hybrid_layer_pattern="MEM*E", num_layers=5'))
    model = huggingface.model(config, "model")
    assert (model.layers, model.hidden, model.vocab, model.kv_heads, model.head_dim) == (5, 2688, 131072, 2, 128)
    assert (config["n_routed_experts"], config["moe_shared_expert_intermediate_size"]) == (128, 3712)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ('hybrid_layer_pattern="MEM*E", num_layers=6', "has 5 layers"),
        ('hybrid_layer_pattern="ME|M*E"', "is not read"),
        ('hybrid_layer_pattern="MEM*E", mtp_num_layers=2', "not priced"),
        ('hybrid_layer_pattern="MEM*E", moe_latent_size=1024', "not priced"),
        ('hybrid_layer_pattern="MEM*E", mamba_head_dim=0', "0 is no count"),
    ],
)
def test_another_hybrid_is_refused(tmp_path: Path, more: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        read_bridge(tmp_path, more)


def test_a_layout_that_lists_stages_is_read(tmp_path: Path) -> None:
    rest = """cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Llama-3.1-8B").to_megatron_provider()
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_layout = _layout(getattr(cfg.model, "pipeline_model_parallel_size", 1), 2)"""
    reading = read_bridge(tmp_path, "", rest)
    assert reading.training["pipelineLayout"] == "Etttt|tttt|tttt|ttL"
    assert reading.plan.virtual_stages == 2


def test_a_branch_may_ask_for_membership_of_a_set(tmp_path: Path) -> None:
    rest = """scheme = "lora"
    cfg.peft = LoRA()
    if isinstance(scheme, str) and scheme.lower() in {"lora", "dora"}:
        cfg.peft.dim = 8
    if scheme in {"dora"}:
        cfg.peft.dim = 64
    """
    dense = BRIDGE.format(more='hybrid_layer_pattern="M-M*-"', rest=rest).replace("num_moe_experts=128,", "")
    (tmp_path / "recipe.py").write_text(dense)
    reading = readers.read_file(f"{tmp_path}/recipe.py:small_pretrain_16gpu_h100_config")
    assert reading.training["loraRank"] == 8


@pytest.mark.parametrize(("modules", "checkpointing"), [("[]", "none"), ("None", "selective"), ('["mlp"]', "mlp")])
def test_a_list_without_modules_recomputes_nothing(tmp_path: Path, modules: str, checkpointing: str) -> None:
    rest = 'cfg.model.recompute_granularity = "selective"; cfg.model.recompute_modules = ["moe"]\n'
    rest += f"    cfg.model.recompute_modules = {modules}"
    reading = read_bridge(tmp_path, 'hybrid_layer_pattern="MEM*E"', rest)
    assert reading.plan.checkpointing == checkpointing


STASH = """cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-30B-A3B").to_megatron_provider()
    cfg.model.moe_token_dispatcher_type = "flex"
    cfg.model.moe_flex_dispatcher_backend = "hybridep"
    cfg.model.moe_expert_rank_capacity_factor = 1.5
    cfg.model.moe_paged_stash = True
    cfg.model.moe_paged_stash_buffer_size_factor_cpu = 1.0
    """


@pytest.mark.parametrize(
    ("rest", "room", "stash", "unpriced"),
    [
        ("pass", 1.5, 1.1, False),
        ("cfg.model.moe_paged_stash_buffer_size_factor_cuda = 1.2", 1.5, 1.2, False),
        ("cfg.model.moe_paged_stash_buffer_size_factor_cuda = -1.2", 1.5, 1.2, False),
        ("cfg.model.moe_paged_stash_buffer_size_factor_cuda = 0.8", 1.5, 0.8, True),
        ("cfg.model.moe_paged_stash = False", 1.5, None, False),
        ("cfg.model.moe_expert_rank_capacity_factor = None; cfg.model.moe_paged_stash = False", None, None, False),
    ],
)
def test_room_for_tokens_and_the_stash_of_experts_are_read(
    tmp_path: Path, rest: str, room: float | None, stash: float | None, unpriced: bool
) -> None:
    reading = read_bridge(tmp_path, "", STASH + rest)
    assert reading.training["expertDispatch"] == "hybridEP"
    assert (reading.training.get("expertCapacity"), reading.training.get("expertStash")) == (room, stash)
    assert bool(reading.unpriced) == unpriced
    assert bool([note for note in reading.notes if "stash" in note]) == (stash is not None)
    dense = read_bridge(tmp_path, "", STASH.replace("Qwen3-30B-A3B", "Qwen3-8B") + rest)
    assert not {"expertCapacity", "expertStash", "expertDispatch"} & set(dense.training)


def test_shared_experts_beside_the_exchange_matter_where_there_are_experts(tmp_path: Path) -> None:
    rest = 'cfg.model = AutoBridge.from_hf_pretrained("moonshotai/Moonlight-16B-A3B").to_megatron_provider()\n'
    rest += '    cfg.model.moe_token_dispatcher_type = "alltoall"\n'
    rest += "    cfg.model.moe_shared_expert_overlap = True"
    beside = read_bridge(tmp_path, "", rest)
    assert not beside.unpriced
    assert (beside.training["expertOverlap"], beside.training["expertDispatch"]) == ("sharedExpert", "allToAll")
    for backend, dispatch in (("deepep", "deepEP"), ("hybridep", "hybridEP")):
        applied = read_bridge(tmp_path, "", f'{rest}\n    apply_flex_dispatcher_backend(cfg.model, "{backend}")')
        assert "expertOverlap" not in applied.training
        assert applied.training["expertDispatch"] == dispatch
        # What is set behind the call counts.
        later = f'{rest}\n    apply_flex_dispatcher_backend(cfg.model, "{backend}")\n'
        later += '    cfg.model.moe_token_dispatcher_type = "alltoall"; cfg.model.moe_flex_dispatcher_backend = None'
        assert read_bridge(tmp_path, "", later).training["expertDispatch"] == "allToAll"
    kept = read_bridge(tmp_path, "", f"{rest}\n    apply_flex_dispatcher_backend(cfg.model, None)")
    assert kept.training == beside.training
    named = read_bridge(tmp_path, "", rest.replace("moonshotai/Moonlight-16B-A3B", "meta-llama/Llama-3.1-8B"))
    assert not {"expertOverlap", "expertDispatch"} & set(named.training)
    (tmp_path / "dense").mkdir()
    dense = 'hybrid_layer_pattern="M-M*-", moe_shared_expert_overlap=True'
    text = BRIDGE.format(more=dense, rest="pass").replace("num_moe_experts=128,", "")
    (tmp_path / "dense/recipe.py").write_text(text)
    assert not readers.read_file(f"{tmp_path}/dense/recipe.py:small_pretrain_16gpu_h100_config").unpriced
