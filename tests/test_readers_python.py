"""Configurations in Python are read as syntax: torchtitan 0.3, Megatron-Bridge and NeMo 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilecast import readers
from tilecast.inputs.job import read_job
from tilecast.inputs.job_options import JobOptions
from tilecast.layout import parse_layout
from tilecast.readers.python import find_functions, read_function
from tilecast.spec import SpecError

TITAN = '''
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer
from . import model_registry

LENGTH = 4 * 1024

def llama3_8b() -> Trainer.Config:
    """Return a configuration."""
    spec = model_registry("8B", converters=[Float8LinearConverter.Config(emulate=False)])
    return Trainer.Config(
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=LENGTH, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=4),
        activation_checkpoint=FullAC.Config(),
    )

def llama3_8b_long() -> Trainer.Config:
    config = llama3_8b()
    config.training.seq_len = 32768
    config.parallelism.context_parallel_degree = 2
    if config.compile.enable:
        config.training.local_batch_size = 1
    return config
'''
BRIDGE = """
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common

def llama31_8b_pretrain_16gpu_h100_bf16_config(scheme: str = "lora") -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Llama-3.1-8B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 8192
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    cfg.model.recompute_granularity = None
    if isinstance(scheme, str) and scheme.lower() == "lora":
        cfg.mixed_precision = "bf16_with_mxfp8_mixed"
    cfg.mixed_precision.grad_reduce_in_fp32 = False
    return cfg
"""
NEMO = """
import nemo_run as run
from nemo import lightning as nl
from base import model

def trainer(tensor_parallelism: int = 4, num_nodes: int = 1, num_gpus_per_node: int = 8) -> run.Config[nl.Trainer]:
    strategy = run.Config(nl.MegatronStrategy, tensor_model_parallel_size=tensor_parallelism, sequence_parallel=True)
    plugins = bf16_mixed()
    return run.Config(nl.Trainer, devices=num_gpus_per_node, num_nodes=num_nodes, plugins=plugins, strategy=strategy)

def pretrain_recipe(dir=None, num_nodes: int = 2, fn=pretrain) -> run.Partial:
    return run.Partial(
        fn,
        model=model(),
        trainer=trainer(num_nodes=num_nodes),
        data=run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1),
        optim=distributed_fused_adam_with_cosine_annealing(max_lr=3e-4),
    )
"""
BASE = "def model():\n    return run.Config(LlamaModel, config=run.Config(Llama31Config8B))\n"


def put(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_registry_of_torchtitan_is_read(tmp_path: Path) -> None:
    name = put(tmp_path, "llama3/config_registry.py", TITAN)
    first = readers.read_file(f"{name}:llama3_8b", gpus=8)
    assert first.plan_text() == "dp=2,tp=4,zero=3,sp=1,mb=2,ac=full"
    assert first.model_name == "llama-3.1-8b" and first.unknown == () and first.unpriced == {}
    assert first.training["precision"] == "fp8" and first.training["globalBatchSize"] == 4
    assert (first.training["sequenceLength"], first.training["steps"]) == (4096, 1000)
    request = read_job(JobOptions(f"{name}:llama3_8b", gpus=8)).request()
    assert (request.workload.model.name, request.workload.sequence_length) == ("llama-3.1-8b", 4096)


JOB = """
from torchtitan.models.qwen3 import model_registry

def train() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        optimizer=OptimizersContainer.Config(
            implementation="fused_opt_states_bf16",
            param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": 3e-4})],
        ),
        activation_checkpoint=None,
    )
"""


def test_a_job_of_torchtitan_beside_its_models_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is the one whose registry it imports; None switches recomputation off."""
    put(tmp_path, "job.py", JOB)
    monkeypatch.chdir(tmp_path)
    words = ["torchrun", "--nproc-per-node", "8", "-m", "torchtitan.train", "--module", "job", "--config", "train"]
    found = readers.read_words(words)
    assert (found.model_name, found.plan_text()) == ("qwen3-8b", "dp=8,zero=3,mb=8")
    assert (found.training["optimizer"], found.training["momentPrecision"]) == ("adam", "bf16")
    assert found.training["attention"] == "flex"
    varlen = put(tmp_path, "varlen.py", JOB.replace('"8B"', '"8B", attn_backend="varlen"'))
    assert readers.read_file(f"{varlen}:train", gpus=8).training["attention"] == "flash"
    mixed = JOB.replace("param_groups=[", 'param_groups=[ParamGroupConfig(pattern="x", optimizer_name="Own"), ')
    read = readers.read_file(put(tmp_path, "other.py", mixed) + ":train", gpus=8)
    assert read.unpriced == {"optimizer.param_groups.optimizer_name": "'Own Adam' is not priced"}


def test_what_only_a_run_would_know_is_refused(tmp_path: Path) -> None:
    name = put(tmp_path, "llama3/config_registry.py", TITAN)
    with pytest.raises(
        SpecError, match=r"local_batch_size: its value is that of local_batch_size, which is not literal"
    ):
        readers.read_file(f"{name}:llama3_8b_long", gpus=8)
    assert readers.read_file(put(tmp_path, "llama3/b.py", TITAN.replace("config.compile.enable", "False")) +
                             ":llama3_8b_long", gpus=8).plan.context == 2  # fmt: skip


def test_a_file_of_several_configurations_asks_for_one(tmp_path: Path) -> None:
    name = put(tmp_path, "llama3/config_registry.py", TITAN)
    with pytest.raises(SpecError, match=r"holds 2 configurations \(llama3_8b, llama3_8b_long\)"):
        readers.read_file(name)
    with pytest.raises(SpecError, match=r"has no configuration 'llama4'"):
        readers.read_file(f"{name}:llama4")


def test_a_command_of_torchtitan_names_a_function_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    put(tmp_path, "torchtitan/models/llama3/config_registry.py", TITAN)
    monkeypatch.chdir(tmp_path)
    words = [
        "torchrun",
        "--nproc-per-node",
        "8",
        "-m",
        "torchtitan.train",
        "--module",
        "llama3",
        "--config",
        "llama3_8b",
    ]
    found = readers.read_words([*words, "--training.local_batch_size", "4", "--parallelism.tensor_parallel_degree=2"])
    assert found.plan_text() == "dp=4,tp=2,zero=3,sp=1,mb=4,ac=full"
    with pytest.raises(SpecError, match=r"its config_registry.py is not in this folder"):
        readers.read_words([*words[:-3], "qwen3", "--config", "qwen3_8b"])


SHARED = """
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer, precision
from megatron.bridge.perf_recipes.llama.b200 import later
from ....outside import secret

def base() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Llama-3.1-8B").to_megatron_provider(load_weights=False)
    cfg.mixed_precision = precision("bf16_mixed")
    cfg.train.global_batch_size = secret()
    return cfg
"""
PERF = """
from megatron.bridge.perf_recipes.llama.common import base
from ..common import base as same

def llama31_8b_pretrain_8gpu_b200_bf16_config() -> ConfigContainer:
    cfg = base() if base is not None else same()
    cfg.mixed_precision = "bf16_mixed"
    cfg.train.global_batch_size = 128
    cfg.train.micro_batch_size = 2
    cfg.model.seq_length = 8192
    cfg.model.recompute_modules = []
    cfg.model.bf16 = True
    return cfg

def other_config() -> ConfigContainer:
    return base()
"""


def package_of_recipes(folder: Path) -> str:
    root = folder / "megatron" / "bridge"
    for one in (root, root / "perf_recipes", root / "perf_recipes/llama", root / "perf_recipes/llama/b200"):
        put(one, "__init__.py", "")
    put(root, "perf_recipes/llama/common.py", SHARED)
    put(root, "training/config.py", "def precision(name):\n    return 'fp16_mixed'\n")
    put(folder, "outside.py", "def secret():\n    return 4096\n")
    put(folder / "megatron", "outside.py", "def secret():\n    return 4096\n")
    return put(root, "perf_recipes/llama/b200/llama.py", PERF)


def test_a_recipe_is_read_with_the_recipes_of_its_package(tmp_path: Path) -> None:
    name = package_of_recipes(tmp_path)
    found = readers.read_file(f"{name}:llama31_8b_pretrain_8gpu_b200_bf16_config")
    assert (found.model_name, found.gpus) == ("meta-llama/Llama-3.1-8B", 8)
    assert (found.plan_text(), found.training["globalBatchSize"]) == ("dp=8,zero=1,mb=2", 128)
    assert found.unknown == () and found.unpriced == {}


def test_what_lies_outside_a_package_or_its_recipes_is_not_read(tmp_path: Path) -> None:
    name = package_of_recipes(tmp_path)
    with pytest.raises(SpecError, match="'secret' is no count"):
        readers.read_file(f"{name}:other_config", gpus=8)
    (tmp_path / "megatron/bridge/perf_recipes/llama/common.py").write_text(SHARED.replace("secret()", "64"))
    found = readers.read_file(f"{name}:other_config", gpus=8)
    # What a library's function returns is named after it.
    assert found.unpriced == {"mixed_precision": "'precision' is not priced"}


def test_modules_that_import_each_other_end(tmp_path: Path) -> None:
    name = package_of_recipes(tmp_path)
    put(tmp_path, "megatron/bridge/perf_recipes/llama/common.py", "from .b200.llama import base\n")
    put(tmp_path, "megatron/bridge/perf_recipes/llama/b200/llama.py", PERF)
    with pytest.raises(SpecError, match=r"is missing|returns nothing"):
        readers.read_file(f"{name}:other_config", gpus=8)


def test_a_recipe_of_megatron_bridge_is_read(tmp_path: Path) -> None:
    found = readers.read_file(put(tmp_path, "llama3.py", BRIDGE))
    assert found.plan_text() == "dp=8,tp=2,zero=1,sp=1,mb=1" and found.gpus == 16
    assert found.model_name == "meta-llama/Llama-3.1-8B" and found.unknown == ()
    assert found.training["precision"] == "mxfp8" and found.training["gradientPrecision"] == "bf16"
    assert (found.training["globalBatchSize"], found.training["sequenceLength"]) == (512, 8192)
    assert found.origins["plan.tensor"] == "model.tensor_model_parallel_size"


def test_a_recipe_of_nemo_is_read_with_the_files_beside_it(tmp_path: Path) -> None:
    put(tmp_path, "base.py", BASE)
    found = readers.read_file(put(tmp_path, "llama31_8b.py", NEMO) + ":pretrain_recipe")
    assert found.plan_text() == "dp=4,tp=4,zero=1,sp=1,mb=1" and found.gpus == 16
    assert found.model_name == "llama-3.1-8b" and found.training["precision"] == "bf16" and found.unknown == ()


def test_a_file_in_a_relative_folder_finds_those_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "recipes/base.py", BASE)
    put(tmp_path, "recipes/llama31_8b.py", NEMO)
    monkeypatch.chdir(tmp_path)
    assert readers.read_file("recipes/llama31_8b.py").model_name == "llama-3.1-8b"


def test_nothing_is_run_and_nothing_outside_is_read(tmp_path: Path) -> None:
    put(tmp_path, "base.py", BASE)
    text = "import os\nos.system('touch ran')\nopen('ran', 'w')\n" + NEMO
    inner = put(tmp_path / "inner", "llama31_8b.py", text.replace("from base", "from ..base"))
    with pytest.raises(SpecError, match=r"is no model that is known|is missing|not literal"):
        readers.read_file(f"{inner}:pretrain_recipe")
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def f() -> Trainer.Config:\n    return Trainer.Config(", "is not Python"),
        ("def f() -> Trainer.Config:\n    return " + "(" * 3000, "is not Python"),
        ("def f() -> Trainer.Config:\n    return " + "1+" * 50_000 + "1", "deeply|nothing|long"),
        ("def f() -> Trainer.Config:\n    return g()\ndef g():\n    return g()", "returns nothing"),
        ("def f() -> Trainer.Config:\n    x = [0]\n" + "    x = x + x\n" * 99 + "    return C(x=x)", "is missing"),
        (
            "def f() -> Trainer.Config:\n    a = C()\n" + "    a = C(x=a, y=a)\n" * 60 + "    return a",
            "more than can be read",
        ),
        ("def f() -> Trainer.Config:\n    a = C()\n    a.b = a\n    a.c = a\n    return a", "more than can be read"),
        (
            "def f() -> Trainer.Config:\n    y = []\n    for a in [0] * 4000:\n        for b in [0] * 4000:\n"
            "            y = y + [a]\n    return C(y=y)",
            "steps to follow",
        ),
        ("def f() -> Trainer.Config:\n    x = 9 ** 9 ** 9 ** 9\n    return C(x='a' * 10 ** 12)", "is missing"),
    ],
)  # fmt: skip
def test_bad_python_is_refused_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as error:
        readers.read_file(put(tmp_path, "config_registry.py", text) + ":f", gpus=8)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_functions_with_arguments_are_no_configurations() -> None:
    text = "def a(x) -> C: ...\ndef b(x=1, *, y=2) -> C.D: ...\ndef _c() -> C: ...\ndef d(): ...\n"
    assert find_functions(text, "x.py") == {"b": "C.D"}


def test_the_statements_of_configurations_are_followed() -> None:
    text = """
def size(kind="b", *, scale=2, **rest):
    table = {("b", 2): 8, ("b", 4): 16}
    return table[(kind, scale)] if (kind, scale) in table else None

def f(**kw) -> C:
    base = dict(a=1, b=2)
    both = {**base, "b": 3, **kw}
    first, second = build(lr=1)
    out = C(x=size(scale=4), z=[D(), D.E()], first=first, **both)
    for name in ("p", "q"):
        out.name = name
    out.deep.er = "v"
    other = deepcopy(out)
    other.x = 0
    apply(out, "how")
    return out
"""

    def refuse(name: str) -> str:
        raise SpecError(name, "cannot be read", "")

    found = {one.option: one.values for one in read_function(text, "x.py", "f", refuse, {"build": {"wd": 0.1}})}
    assert found == {
        "x": (16,), "z": ("D", "D.E"), "first": ("build",), "first.wd": (0.1,), "first.lr": (1,), "a": (1,), "b": (3,),
        "name": ("q",), "deep.er": ("v",), "apply()": ("how",),
    }  # fmt: skip


LIGHTNING = """
trainer:
  devices: 8
  num_nodes: 2
  strategy: {strategy}
  precision: bf16-mixed
  accumulate_grad_batches: 4
model:
  class_path: own.Model
  init_args: {{model_name: meta-llama/Llama-3.1-8B}}
data:
  class_path: own.Data
  init_args: {{batch_size: 2, block_size: 4096}}
"""
LITGPT = """
checkpoint_dir: checkpoints/meta-llama/Llama-2-7b-hf
precision: bf16-true
quantize: bnb.nf4
devices: 1
lora_r: 32
train: {global_batch_size: 8, micro_batch_size: 2, max_seq_length: 512}
"""
NEMO_YAML = """
trainer: {devices: 8, num_nodes: 4, precision: bf16, max_steps: 10}
exp_manager: {exp_dir: null}
model:
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  hidden_dropout: 0.0
  attention_dropout: 0.0
  activation: fast-swiglu
  normalization: rmsnorm
  position_embedding_type: rope
  bias: false
  share_embeddings_and_output_weights: false
  sequence_parallel: true
  activations_checkpoint_granularity: selective
  tokenizer: {library: huggingface, type: meta-llama/Meta-Llama-3-8B}
  optim: {name: distributed_fused_adam, lr: 1.0e-4}
"""
MEGATRON_YAML = """
language_model:
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  hidden_dropout: 0.0
  attention_dropout: 0.0
  activation_func: swiglu
  add_bias_linear: false
  normalization: RMSNorm
  recompute_granularity: selective
model_parallel: {tensor_model_parallel_size: 2, sequence_parallel: true, pipeline_model_parallel_size: 1}
bf16: true
micro_batch_size: 2
global_batch_size: 64
seq_length: 4096
use_distributed_optimizer: true
position_embedding_type: rope
untie_embeddings_and_output_weights: true
vocab_size: 128256
"""
BRIDGE_YAML = """
model: {hf_model_id: meta-llama/Llama-3.1-8B, tensor_model_parallel_size: 2, seq_length: 4096}
train: {micro_batch_size: 1, global_batch_size: 64}
ddp: {use_distributed_optimizer: true}
mixed_precision: bf16_mixed
"""


@pytest.mark.parametrize(
    ("text", "framework", "plan", "model", "training"),
    [
        (LIGHTNING.format(strategy="ddp"), "lightning", "dp=16,mb=2", "Llama-3.1-8B", (128, 4096, "bf16")),
        (LIGHTNING.format(strategy="fsdp"), "fsdp2", "dp=16,zero=3,mb=2", "Llama-3.1-8B", (128, 4096, "bf16")),
        (
            LIGHTNING.format(strategy="deepspeed_stage_2"), "deepspeed", "dp=16,zero=2,mb=2", "Llama-3.1-8B",
            (128, 4096, "bf16"),
        ),
        (
            LIGHTNING.format(
                strategy="{class_path: lightning.pytorch.strategies.FSDPStrategy, init_args: "
                "{sharding_strategy: SHARD_GRAD_OP, activation_checkpointing_policy: [own.Block]}}"
            ), "fsdp2", "dp=16,zero=2,mb=2,ac=full", "Llama-3.1-8B", (128, 4096, "bf16"),
        ),
        (LITGPT, "litgpt", "dp=1,mb=2", "Llama-2-7b-hf", (8, 512, "bf16")),
        (NEMO_YAML, "nemo", "dp=4,tp=4,pp=2,zero=1,sp=1,mb=1,ac=selective", "llama-3-8b", (128, 4096, "bf16")),
        (MEGATRON_YAML, "megatron", "dp=4,tp=2,zero=1,sp=1,mb=2,ac=selective", "llama-3-8b", (64, 4096, "bf16")),
        (BRIDGE_YAML, "nemo", "dp=4,tp=2,zero=1,mb=1", "Llama-3.1-8B", (64, 4096, "bf16")),
    ],
)  # fmt: skip
def test_configurations_in_yaml_are_read(
    tmp_path: Path, text: str, framework: str, plan: str, model: str, training: tuple[int, int, str]
) -> None:
    name = put(tmp_path, "config.yaml", text)
    assert readers.is_launch_file(name)
    found = readers.read_file(name, gpus=8)
    assert (found.framework, found.plan_text(), found.model_name.rpartition("/")[2]) == (framework, plan, model)
    assert found.unknown == () and found.unpriced == {}
    assert tuple(found.training[key] for key in ("globalBatchSize", "sequenceLength", "precision")) == training


def test_a_strategy_that_is_not_known_is_refused(tmp_path: Path) -> None:
    found = readers.read_file(put(tmp_path, "config.yaml", LIGHTNING.format(strategy="own.Strategy")))
    with pytest.raises(SpecError, match=r"trainer.strategy: 'Strategy' is not priced"):
        readers.require_priced(found, "")


def test_commands_of_lightning_and_litgpt_name_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    put(tmp_path, "a.yaml", LIGHTNING.format(strategy="ddp"))
    put(tmp_path, "b.yaml", LITGPT)
    monkeypatch.chdir(tmp_path)
    first = readers.read_words(["python", "main.py", "fit", "--config", "a.yaml", "--trainer.devices=4"])
    assert first.gpus == 8 and first.framework == "lightning"
    second = readers.read_words(["litgpt", "finetune_lora", "--config", "b.yaml"])
    assert second.training["loraRank"] == 32 and second.training["quantization"] == "nf4"


LLAMA_3 = "meta-llama/Meta-Llama-3-8B"


@pytest.mark.parametrize(
    ("command", "plan", "training"),
    [
        (
            f"finetune_lora {LLAMA_3} --devices 4 --train.global_batch_size 64 --train.micro_batch_size 2"
            " --precision bf16-true", "dp=4,zero=3,mb=2,ac=full", (64, 8, None, "pure"),
        ),
        (f"finetune {LLAMA_3} --lora_r 32", "dp=1,mb=1", (16, 32, None, "autocast")),
        (f"finetune_full {LLAMA_3} --devices 2 --num_nodes 2", "dp=4,zero=3,mb=1,ac=full", (16, None, None, "sharded")),
        (f"finetune_qlora {LLAMA_3}", "dp=1,mb=1", (16, 8, "nf4", "pure")),
        (f"finetune qlora --checkpoint_dir {LLAMA_3}", "dp=1,mb=1", (16, 8, "nf4", "pure")),
        (f"pretrain {LLAMA_3} --devices 8", "dp=8,zero=3,mb=4", (512, None, None, "sharded")),
    ],
)  # fmt: skip
def test_commands_of_litgpt_are_read_with_the_defaults_of_their_subcommand(
    command: str, plan: str, training: tuple[object, ...]
) -> None:
    found = readers.read_words(["litgpt", *command.split()])
    assert (found.framework, found.model_name, found.plan_text()) == ("litgpt", LLAMA_3, plan)
    assert found.unknown == () and found.unpriced == {}
    assert training == tuple(
        found.training.get(key) for key in ("globalBatchSize", "loraRank", "quantization", "weights")
    )


def test_pretraining_of_litgpt_shards_within_nodes() -> None:
    found = readers.read_words(["litgpt", "pretrain", LLAMA_3, "--devices", "8", "--num_nodes", "2"])
    assert found.plan_text() == "dp=16,zero=3,mb=4" and found.training["shardDegree"] == 8


def test_a_file_of_litgpt_beats_the_defaults_of_the_subcommand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "b.yaml", LITGPT.replace("lora_r: 32", "").replace("quantize: bnb.nf4", ""))
    monkeypatch.chdir(tmp_path)
    found = readers.read_words(["litgpt", "finetune_lora", "--config", "b.yaml", "--devices", "2"])
    assert (found.training["loraRank"], found.training["globalBatchSize"], found.gpus) == (8, 8, 2)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"litgpt finetune_adapter {LLAMA_3}", "LitGPT's adapter is not priced; give lora, qlora, full or pretrain"),
        ("tune run full_finetune_distributed --config llama2/13B_full", "tune cp llama2/13B_full recipe.yaml"),
    ],
)
def test_what_is_not_read_names_the_remedy(command: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        readers.read_words(command.split())


def test_a_script_of_an_unknown_program_names_the_program() -> None:
    script = "export NPROC_PER_NODE=8\nCUDA_VISIBLE_DEVICES=0 swift sft --model a --dataset b --lora_rank 8\n"
    with pytest.raises(SpecError, match="holds no launch line: 'swift sft' is no training program that is known"):
        readers.read_words([script])


def read_body(body: str, before: str = "") -> dict[str, tuple[object, ...]]:
    """Return the settings of a function of these lines."""

    def refuse(name: str) -> str:
        raise SpecError(name, "cannot be read", "")

    text = before + "def f() -> C:\n" + "".join(f"    {line}\n" for line in body.split("\n"))
    return {one.option: one.values for one in read_function(text, "x.py", "f", refuse, {})}


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("c = C(x=1)\nif os.environ.get('LONG'): c.x = 2\nreturn c", ("\0x\0",)),
        ("c = C()\nfor b in [1, 2, 4]:\n    if b >= 2:\n        c.x = b\n        break\nreturn c", (2,)),
        ("c = C()\nfor b in [1, 2]:\n    c.x = b\n    if foo(): break\nreturn c", ("\0x\0",)),
        ("d = dict(x=1)\nif foo(): d.update(x=2)\nreturn C(**d)", ("\0x\0",)),
        ("l = ['a']\nif foo(): l.append('b')\nreturn C(x=l)", ("\0a list\0",)),
        ("g = lambda: 3\nreturn C(x=g())", ("\0a call\0",)),
        ("l = [1]\nl[0] = 5\nreturn C(x=l)", (5,)),
        ("c = C(x=1)\nmatch foo():\n    case 1: c.x = 2\nreturn c", ("\0x\0",)),
        (f"return C(x=0x{'f' * 6000})", ("\0a number\0",)),
        (f"return C(x=f'{{0x{'f' * 6000}}}')", ("\0a number\0",)),
    ],
)
def test_values_that_only_a_run_would_know_become_marks(body: str, values: tuple[object, ...]) -> None:
    assert read_body(body)["x"] == values


@pytest.mark.parametrize("remove", ["del d['y']", "d.pop('y')"])
def test_removed_items_are_gone(remove: str) -> None:
    assert read_body(f"d = dict(x=1, y=2)\n{remove}\nreturn C(**d)") == {"x": (1,)}


@pytest.mark.parametrize(
    ("body", "before"),
    [
        ("return C(x=1, **foo())", ""),
        ("return D()", "class D(C):\n    x: int = 4096\n"),
        ("s = ['a'] * 4096\nl = [s] * 4096\nreturn C(" + ", ".join(f"x{i}=l" for i in range(20)) + ")", ""),
        ("if foo(): return C(x=1)\nreturn C(x=2)", ""),
    ],
)
def test_what_cannot_be_read_is_refused(body: str, before: str) -> None:
    with pytest.raises(SpecError, match=r"only a run would know|more than can be read|nothing that can be read"):
        read_body(body, before)


def test_sections_that_say_nothing_of_the_job_may_be_unknown() -> None:
    assert read_body("c = C(x=1)\nc.env_vars = {**foo(), 'A': '1'}\nreturn c")["x"] == (1,)


def test_copies_and_comparisons_take_bounded_time() -> None:
    assert read_body("d = {}\nd['a'] = d\nd['b'] = d\ne = deepcopy(d)\nreturn C(x=1)") == {"x": (1,)}
    grow = "a = 1\nb = 1\nfor i in [0] * 40:\n    a = [a] * 5\n    b = [b] * 5\nx = a\nif foo: x = b\nreturn C(x=1)"
    assert read_body(grow) == {"x": (1,)}


@pytest.mark.parametrize("key", ["[1]", "{}", "None", "1"])
def test_an_attribute_that_no_text_names_is_unknown(key: str) -> None:
    assert read_body(f"c = C(x=1)\nreturn C(x=2, y=getattr(c, {key}, 3))")["x"] == (2,)


@pytest.mark.parametrize(
    "more",
    [
        "z = [[0 for b in [0]] for c in [0] * 4000]",
        "def inner():\n    return 0\nfor c in [0] * 4000:\n    inner()",
    ],
)  # fmt: skip
def test_copies_of_many_variables_count_as_steps(more: str) -> None:
    many = "\n".join(f"{', '.join(f'a{line}_{place}' for place in range(1024))} = [0] * 1024" for line in range(16))
    with pytest.raises(SpecError, match="steps to follow"):
        read_body(f"{many}\n{more}\nreturn C(x=1)")


def test_a_comprehension_assigns_to_variables_around_it() -> None:
    assert read_body("y = n = 1\nx = [(y := n) for n in [4, 5]]\nreturn C(x=x, y=y, n=n)") == {
        "x": (4, 5), "y": (5,), "n": (1,),
    }  # fmt: skip


def test_a_class_of_a_class_with_fields_is_not_followed() -> None:
    before = "class D(C):\n    x: int = 4096\nclass E(D):\n    pass\n"
    with pytest.raises(SpecError, match="only a run would know"):
        read_body("return E()", before)
    assert read_body("return F(x=1)", "class E(C):\n    pass\nclass F(E):\n    pass\n")["x"] == (1,)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    name = put(tmp_path, "llama3/config_registry.py", "\ufeff" + TITAN)
    assert readers.read_file(f"{name}:llama3_8b", gpus=8).model_name == "llama-3.1-8b"


VLM = """
from megatron.bridge.recipes.common import _pretrain_common

def qwen3_vl_235b_pretrain_64gpu_b200_bf16_config() -> ConfigContainer:
    cfg = _pretrain_common()
    name = "Qwen/Qwen3-VL-235B-A22B-Instruct"
    cfg.model = AutoBridge.from_hf_pretrained(name).to_megatron_provider(load_weights=False)
    cfg.model.pipeline_model_parallel_size = 8
    cfg.model.expert_model_parallel_size = 8
    cfg.model.freeze_language_model = True
    cfg.model.freeze_vision_model = True
    cfg.model.freeze_vision_projection = False
    cfg.model.num_layers_in_first_pipeline_stage = 10
    cfg.model.num_layers_in_last_pipeline_stage = 12
    cfg.train.global_batch_size = 1024
    return cfg
"""


def test_parts_that_megatron_bridge_freezes_and_stages_of_their_own_length_are_read(tmp_path: Path) -> None:
    """The vision model is frozen without its projection (models/qwen_vl/modelling_qwen3_vl/model.py: freeze)."""
    found = readers.read_file(put(tmp_path, "qwen3_vl.py", VLM))
    assert found.training["frozenParts"] == ["vision", "language"] and found.unpriced == {} and found.unknown == ()
    layout = found.training["pipelineLayout"]
    assert parse_layout(layout).pieces == (10, *[12] * 7) and found.plan_text() == "dp=8,pp=8,ep=8,zero=1,mb=2"
    pieces = VLM.replace("pipeline_model_parallel_size = 8", "pipeline_model_parallel_size = 8\n    "
                         "cfg.model.virtual_pipeline_model_parallel_size = 2")  # fmt: skip
    layout = readers.read_file(put(tmp_path, "qwen3_vl.py", pieces)).training["pipelineLayout"]
    assert parse_layout(layout).pieces == (5, *[6] * 7) * 2
    trained = VLM.replace("= True", "= False")
    assert "frozenParts" not in readers.read_file(put(tmp_path, "qwen3_vl.py", trained)).training


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("first_pipeline_stage = 10", "first_pipeline_stage = 11", "does not leave 94 layers to 8 stages"),
        ("last_pipeline_stage = 12", "last_pipeline_stage = 90", "does not leave 94 layers to 8 stages"),
        ("Qwen3-VL-235B-A22B-Instruct", "Qwen3-VL-9000B", "splits layers whose number is not known"),
        ("projection = False", "projection = False\n    cfg.model.freeze_audio_projection = True", "one projection"),
        ("projection = False", 'projection = False\n    cfg.peft = "lora"', "is set beside adapters"),
    ],
)
def test_frozen_parts_and_stages_that_are_not_clear_are_refused(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        readers.read_file(put(tmp_path, "qwen3_vl.py", VLM.replace(old, new)))
    assert "\n" not in str(caught.value)


def test_frozen_layers_that_predict_further_tokens_are_named(tmp_path: Path) -> None:
    further = VLM.replace("freeze_vision_projection = False", "freeze_mtp_model = True")
    assert list(readers.read_file(put(tmp_path, "qwen3_vl.py", further)).unpriced) == ["model.freeze_mtp_model"]
