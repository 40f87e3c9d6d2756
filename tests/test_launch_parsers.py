"""Launch commands and files as their launchers read them, through the parser of each package itself.

The packages are those of the extra `launchers`, with which `make launchers` runs these tests. Elsewhere a test whose
package is missing is skipped and says so.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import need
from test_launch import CASES, setting
from test_launch_priced import JOBS, PLANS, STAGE, WORKLOADS, base
from tilecast import zoo
from tilecast.launch_options.options_table import OptionTable, spell_option
from tilecast.overlap import hides_gradients
from tilecast.render.launch import LAUNCHERS, LaunchScript, LaunchSetting, write_launch
from tilecast.spec import Plan, SpecError, Workload
from tilecast.zoo import huggingface

pytestmark = [pytest.mark.launchers, pytest.mark.filterwarnings("ignore")]


def package(name: str) -> Any:
    """Return a module of a launcher's package, or skip the test if it is missing where nothing requires it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        need("launchers", f"{error.name} is not installed")


def launches(launcher: str) -> Iterator[tuple[LaunchSetting, LaunchScript]]:
    """Yield every reviewed setting, and every other choice of a job that the launcher accepts."""
    for name, given in CASES.values():
        if name == launcher:
            yield given, write_launch(name, given)
    for job in JOBS.values():
        choices = [(replace(job, **one), base(launcher)) for one in WORKLOADS]  # type: ignore[arg-type]
        choices += [(job, replace(base(launcher), **one)) for one in PLANS]  # type: ignore[arg-type]
        for workload, plan in choices:
            accumulated = workload.global_batch // (plan.data * plan.micro_batch)
            given = setting(workload, replace(plan, gradient_accumulation=accumulated))
            try:
                yield given, write_launch(launcher, given)
            except SpecError:
                continue


def written(line: LaunchScript, folder: Path) -> None:
    for name, text in line.files.items():
        (folder / name).write_text(text)


def test_every_launcher_has_settings() -> None:
    assert set(STAGE) == set(LAUNCHERS)
    for launcher in LAUNCHERS:
        assert sum(1 for _ in launches(launcher)) > 10


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "accelerate"])
def test_torchrun_reads_the_command(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = package("torch.distributed.run")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for given, line in launches(launcher):
        words = [word.replace("$MASTER_ADDR", "node-0") for word in line.command]
        assert words[0] == "torchrun"
        read = run.parse_args(words[1:])
        config, program, arguments = run.config_from_args(read)
        assert config.max_nodes == config.min_nodes == given.nodes
        assert config.nproc_per_node == given.gpus_per_node
        assert config.nproc_per_node * config.max_nodes == given.plan.gpus
        command = [program, *arguments] if isinstance(program, str) else arguments
        assert any("train" in str(word) for word in command)


def test_accelerate_reads_the_command_and_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = package("accelerate.commands.launch")
    monkeypatch.chdir(tmp_path)
    for given, line in launches("accelerate"):
        written(line, tmp_path)
        read = command.launch_command_parser().parse_args(list(line.command[2:]))
        read, config, _ = command._validate_launch_command(read)
        assert read.num_processes == given.plan.gpus
        assert read.num_machines == given.nodes
        workload = given.workload
        assert read.mixed_precision == (workload.precision if workload.is_mixed else "no")
        sharded = given.plan.zero_stage > 1
        assert (bool(read.use_fsdp), bool(read.multi_gpu)) == (sharded, not sharded and given.plan.gpus > 1)
        if sharded:
            assert int(read.fsdp_version) == 2
            assert str(read.fsdp_reshard_after_forward).lower() == str(given.plan.zero_stage == 3).lower()
            assert str(read.fsdp_offload_params).lower() == str(workload.offload == "parameters").lower()
        if workload.execution == "compiled":
            assert str(read.dynamo_backend).lower() == "inductor"
        assert config is not None


def test_accelerate_takes_the_objects_of_the_script() -> None:
    accelerate = package("accelerate")
    torch = package("torch")
    from accelerate.utils import (  # type: ignore[import-not-found]
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
    )
    from torch.distributed.fsdp import MixedPrecisionPolicy  # type: ignore[import-not-found]

    known = {
        "torch": torch,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "FullyShardedDataParallelPlugin": accelerate.FullyShardedDataParallelPlugin,
        "GradientAccumulationPlugin": GradientAccumulationPlugin,
        "DistributedDataParallelKwargs": DistributedDataParallelKwargs,
    }
    for given, lines in launches("accelerate"):
        names: dict[str, Any] = {}
        for line in lines.script:
            name, _, value = line.partition(" = ")
            if name in ("policy", "plugin", "accumulation", "ddp"):
                names[name] = eval(value, {**known, **names})  # noqa: S307
        assert names["accumulation"].num_steps == given.plan.gradient_accumulation
        assert names["accumulation"].sync_each_batch is (given.plan.zero_stage > 1)
        if "plugin" in names:
            assert names["plugin"].mixed_precision_policy.reduce_dtype is torch.float32


def test_transformers_reads_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = package("transformers")
    package("accelerate")
    monkeypatch.chdir(tmp_path)
    for given, line in launches("trainer"):
        written(line, tmp_path)
        words = list(line.command[line.command.index("train.py") + 1 :])
        if "--tf32" in words:  # refused where there is no GPU to ask
            place = words.index("--tf32")
            assert words.pop(place + 1) == str(given.workload.precision == "tf32")
            words.pop(place)
        parser = transformers.HfArgumentParser(transformers.TrainingArguments)
        (read,) = parser.parse_args_into_dataclasses([*words, "--use_cpu"])
        plan, workload = given.plan, given.workload
        assert read.per_device_train_batch_size == plan.micro_batch
        assert read.gradient_accumulation_steps == plan.gradient_accumulation
        assert (read.bf16, read.fp16) == (workload.precision == "bf16", workload.precision == "fp16")
        assert read.torch_compile is (workload.execution == "compiled")
        recomputes = (read.fsdp_plugin_args or {}).get("activation_checkpointing", read.activation_checkpointing)
        assert bool(recomputes) is (plan.checkpointing == "full")
        assert bool(read.fsdp) is (plan.zero_stage > 1)
        if read.fsdp:
            assert read.fsdp_plugin_args["fsdp_version"] == 2
            assert read.fsdp_plugin_args["reshard_after_forward"] is (plan.zero_stage == 3)
            assert bool(read.fsdp_plugin_args.get("cpu_offload")) is (workload.offload == "parameters")
        assert read.max_grad_norm == 1.0
        if plan.zero_stage > 1 and plan.gradient_accumulation > 1:
            assert read.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}


PUBLISHED = json.loads((Path(__file__).parent / "configs.json").read_text())
LABELS = {
    "AutoModelForPreTraining": ("labels", "sampled_negative_indices", "noise", "bool_masked_pos"),
    "AutoModelForQuestionAnswering": ("start_positions",),
    "AutoModelForZeroShotImageClassification": ("return_loss",),
}
"""Arguments that a forward pass takes for its loss, where that is not `labels`."""


SHORTENED = ("LGAI-EXAONE/EXAONE-4.0-32B", "tencent/Hunyuan-A13B-Instruct")
"""Configs that lack a key without which Transformers cannot build the model."""


OWN_CODE = {
    "arctic", "baichuan", "chatglm", "deepseek", "hf_olmo", "internlm", "internlm2", "kimi_k2", "minicpm",
    "minimax_text_01", "qwen", "stablelm_epoch", None,
}  # fmt: skip
"""Types of models whose code comes with their weights; None are those of timm and of the first Mamba."""


def test_code_of_their_own_is_not_in_transformers() -> None:
    assert not OWN_CODE & set(package("transformers").CONFIG_MAPPING)


BUILT = [
    name
    for name, published in PUBLISHED.items()
    if name not in SHORTENED
    and published["config"].get("model_type") not in OWN_CODE
    and zoo.auto_model_suffix(huggingface.model(published["config"]))
]
"""Configs that the `Trainer` can train."""


@pytest.mark.parametrize("name", BUILT)
def test_transformers_builds_the_class_that_is_printed(name: str) -> None:
    """Build each config with the class of `--launch trainer`, on the meta device.

    Its forward pass must accept what the loss is computed from.
    """
    transformers = package("transformers")
    torch = package("torch")
    given = PUBLISHED[name]["config"]
    kind = f"AutoModel{zoo.auto_model_suffix(huggingface.model(given))}"
    written = {key: value for key, value in given.items() if key != "model_type"}
    config = transformers.CONFIG_MAPPING[given["model_type"]](**written)
    with torch.device("meta"):
        model = getattr(transformers, kind).from_config(config)
    assert set(LABELS.get(kind, ("labels",))) & set(inspect.signature(model.forward).parameters)


WRAPPED = {
    "llava-hf/llava-1.5-7b-hf": {"CLIPEncoderLayer", "LlamaDecoderLayer"},
    "microsoft/deberta-v3-base": {"DebertaV2Layer"},
    "facebook/hubert-large-ll60k": {"HubertEncoderLayerStableLayerNorm", "HubertLayerNormConvLayer"},
    "openai/clip-vit-base-patch32": {"CLIPEncoderLayer"},
}


@pytest.mark.parametrize("launcher", ["accelerate", "trainer"])
@pytest.mark.parametrize("name", WRAPPED)
def test_accelerate_wraps_the_layers(launcher: str, name: str) -> None:
    """The plugin would wrap only the root of DeBERTa, and fail at classes that LLaVA and HuBERT list but lack."""
    transformers = package("transformers")
    torch = package("torch")
    accelerate = package("accelerate")
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy  # type: ignore[import-not-found]
    from transformers.modeling_layers import GradientCheckpointingLayer  # type: ignore[import-not-found]

    given = PUBLISHED[name]["config"]
    workload = Workload(huggingface.model(given), 512, 16)
    plan = Plan(data=8, zero_stage=3, micro_batch=2)
    lines = write_launch(launcher, setting(workload, plan)).script
    config = transformers.CONFIG_MAPPING[given["model_type"]](
        **{key: value for key, value in given.items() if key != "model_type"}
    )
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    state = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    names = {
        "torch": torch,
        "config": config,
        "accelerator": state,
        "trainer": SimpleNamespace(accelerator=state),
        "GradientCheckpointingLayer": GradientCheckpointingLayer,
        **{line.split()[2].partition(".")[0]: getattr(transformers, line.split()[2].partition(".")[0])
           for line in lines if line.startswith("model = AutoModel")},
    }  # fmt: skip
    with torch.device("meta"):
        exec("\n".join(line for line in lines if "AutoModel" in line or "layer" in line), names)  # noqa: S102
    wraps = fsdp2_prepare_auto_wrap_policy(plugin, names["model"])
    assert {type(module).__name__ for module in names["model"].modules() if wraps(module)} == WRAPPED[name]


def test_deepspeed_reads_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    package("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig  # type: ignore[import-not-found]

    class Mpu:
        """The object that DeepSpeed asks for the number of data-parallel ranks."""

        def __init__(self, ranks: int) -> None:
            self.ranks = ranks

        def get_data_parallel_world_size(self) -> int:
            return self.ranks

        def get_model_parallel_world_size(self) -> int:
            return 1

    monkeypatch.setattr("deepspeed.runtime.config.dist.get_rank", lambda: 0)
    for given, line in launches("deepspeed"):
        settings = json.loads(line.files["ds_config.json"])
        read = DeepSpeedConfig(settings, Mpu(given.plan.data))
        plan, workload = given.plan, given.workload
        assert read.train_batch_size == workload.global_batch
        assert read.train_micro_batch_size_per_gpu == plan.micro_batch
        assert read.gradient_accumulation_steps == plan.gradient_accumulation
        assert int(read.zero_optimization_stage) == plan.zero_stage
        hidden = hides_gradients(replace(workload, framework="deepspeed"))
        assert read.zero_config.overlap_comm is (hidden or plan.zero_stage == 3)
        offloaded = read.zero_config.offload_optimizer
        assert (offloaded is not None and offloaded.device == "cpu") is (workload.offload != "none")
        assert (read.bfloat16_config.enabled, read.float16_config.enabled) == (
            workload.precision == "bf16",
            workload.precision == "fp16",
        )
        assert read.gradient_clipping == 1.0
        assert read.optimizer_name is not None
        assert read.tensor_parallel_config.autotp_size == (plan.tensor if plan.tensor > 1 else 0)
        if workload.is_mixed:
            assert read.grad_accum_dtype == workload.precision


def test_torchtitan_reads_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed function is called by torchtitan's own manager; it refuses a field that it does not have."""
    manager = package("torchtitan.config.manager")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    count, converted = 0, []
    for given, line in launches("torchtitan"):
        written(line, tmp_path)
        sys.modules.pop("job", None)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        named = re.search(r"from torchtitan\.models\.(\w+) import", line.files["job.py"])
        assert named is not None
        models = package(f"torchtitan.models.{named[1]}")
        registry = models.model_registry
        if f'flavor="{given.model.name}"' in line.files["job.py"]:
            continue  # A model that the user adds.
        # A converter wants a GPU of its precision: it is made, and not called.
        with monkeypatch.context() as patched:
            patched.setattr(
                models,
                "model_registry",
                lambda converters=(), registry=registry, **own: (converted.extend(converters), registry(**own))[1],
            )
            read = manager.ConfigManager().parse_args(list(line.command[line.command.index("torchtitan.train") + 1 :]))
        plan, degrees = given.plan, read.parallelism
        ranks = degrees.data_parallel_replicate_degree * degrees.data_parallel_shard_degree
        ranks *= degrees.tensor_parallel_degree * degrees.pipeline_parallel_degree * degrees.context_parallel_degree
        assert ranks == plan.gpus
        assert read.training.global_batch_size == given.workload.global_batch
        own = type(read.activation_checkpoint).__qualname__.partition(".")[0]
        assert {"FullAC": "full", "SelectiveAC": "selective", "NoneType": "none"}[own] == plan.checkpointing
        assert read.compile.enable is (given.workload.execution == "compiled")
        (group,) = read.optimizer.param_groups
        assert group.optimizer_name.lower() == given.workload.optimizer
        count += 1
    assert count > 10 and {type(one).__qualname__ for one in converted} == {
        "Float8LinearConverter.Config", "MXFP8LinearConverter.Config"
    }  # fmt: skip


def test_torchtitan_has_the_flavors() -> None:
    package("torchtitan.models")
    from tilecast.render.launch.torchtitan import _list_flavors

    for preset, (name, flavor) in _list_flavors().items():
        registry = importlib.import_module(f"torchtitan.models.{name}").model_registry
        config = registry(flavor, attn_backend="varlen").model
        own = zoo.find_preset(preset)
        assert (len(config.layers), config.vocab_size) == (own.layers, own.vocab)


def test_the_fields_of_megatron_are_those_of_its_package() -> None:
    core = package("megatron.core")
    from megatron.core.distributed import DistributedDataParallelConfig  # type: ignore[import-not-found]
    from megatron.core.optimizer import OptimizerConfig  # type: ignore[import-not-found]
    from megatron.core.transformer import (  # type: ignore[import-not-found]
        MLATransformerConfig,
        TransformerConfig,
    )

    known = tomllib.loads((Path(__file__).parent / "megatron.toml").read_text())["core"][core.__version__]
    fields = [
        field
        for kind in (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(kind)
        if not field.name.startswith("_")
    ]
    values = {field.name for field in fields if field.type not in (bool, "bool")}
    assert set(known["values"]) == values
    assert set(known["flags"]) == {field.name for field in fields} - values


@pytest.mark.skipif(sys.version_info < (3, 12), reason="megatron-core 0.19, which has the parser, is for Python 3.12")
def test_megatron_parses_its_options() -> None:
    """Options of every launch are those of its own parser, with values that it accepts."""
    package("megatron.core")
    arguments = package("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False))
    count = 0
    for given, line in launches("megatron"):
        words = list(line.command)
        script = next(place for place, word in enumerate(words) if word.endswith(".py"))
        read = parser.parse_args(words[script + 1 :])
        plan = given.plan
        degrees = (read.tensor_model_parallel_size, read.pipeline_model_parallel_size, read.context_parallel_size)
        assert degrees == (plan.tensor, plan.pipeline, plan.context)
        assert (read.micro_batch_size, read.global_batch_size) == (plan.micro_batch, given.workload.global_batch)
        assert (read.recompute_granularity or "none") == plan.checkpointing
        assert read.use_distributed_optimizer is (plan.zero_stage > 0)
        count += 1
    assert count > 10
    # What is read is an option of some version: these have gone.
    known = {spell_option(word) for action in parser._actions for word in action.option_strings}
    table = OptionTable.read("megatron")
    assert set(table.options) - known == {"tokenizer-name-or-path", "fp8-hybrid"}
    assert set(table.unpriced) - known == {
        "use-custom-fsdp", "decoder-pipeline-manual-split-list", "pipeline-model-parallel-split-rank",
        "moe-extended-tp", "deepspeed", "retro-add-retriever",
    }  # fmt: skip


def chains(tree: ast.AST) -> Iterator[str]:
    """Yield every dotted name `a.b.c` of a program in full."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield ast.unparse(node)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_a_script_calls_is_there(launcher: str) -> None:
    """Names below torch and deepspeed must exist, and accept the keywords that the script gives them."""
    import contextlib
    import functools

    torch = package("torch")
    deepspeed = package("deepspeed")
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    importlib.import_module("deepspeed.pipe")
    importlib.import_module("deepspeed.moe.layer")
    known = {
        "torch": torch,
        "deepspeed": deepspeed,
        "SDPBackend": SDPBackend,
        "contextlib": contextlib,
        "functools": functools,
    }
    named = {
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "CPUOffloadPolicy": CPUOffloadPolicy,
        "fully_shard": fully_shard,
        "sdpa_kernel": sdpa_kernel,
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
        "DataLoader": torch.utils.data.DataLoader,
        "checkpoint": torch.utils.checkpoint.checkpoint,
        "init_device_mesh": torch.distributed.device_mesh.init_device_mesh,
    }
    for _, line in launches(launcher):
        tree = ast.parse("\n".join(line.script))
        for chain in chains(tree):
            root, *rest = chain.split(".")
            if root in known:
                assert functools.reduce(getattr, rest, known[root]) is not None, chain
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            target = named.get(called) or (
                functools.reduce(getattr, called.split(".")[1:], known["torch"])
                if called.startswith("torch.")
                else None
            )
            if isinstance(node, ast.Call) and target is not None:
                takes = inspect.signature(target).parameters
                for keyword in node.keywords:
                    assert keyword.arg is None or keyword.arg in takes or "kwargs" in takes, (called, keyword.arg)
