"""Launch commands: each framework's options for a plan, reviewed as files, and plans that a framework cannot run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from tilecast import zoo
from tilecast.cli import main
from tilecast.launch_options.options_table import OptionTable
from tilecast.render.launch import (
    LAUNCHERS,
    LaunchScript,
    LaunchSetting,
    OwnCommand,
    carry_over,
    check_launchable,
    deepspeed,
    find_unsupported_feature,
    launch_document,
    launch_text,
    megatron,
    torchtitan,
    write_launch,
)
from tilecast.render.launch import huggingface as huggingface_launch
from tilecast.spec import Plan, SpecError, Workload
from tilecast.zoo import huggingface

GOLDEN = Path(__file__).resolve().parent / "launch"
LLAMA = Workload(zoo.find_preset("llama-3.1-8b"), 8192, 128, steps=1000)


def setting(workload: Workload, plan: Plan, gpus_per_node: int = 8) -> LaunchSetting:
    nodes = -(-plan.gpus // gpus_per_node)
    return LaunchSetting("job", workload, plan, "h100-sxm", nodes, min(plan.gpus, gpus_per_node), 1.5)


def plan(workload: Workload, data: int, micro: int, **degrees: object) -> Plan:
    accumulated = workload.global_batch // (data * micro)
    return Plan(data=data, micro_batch=micro, gradient_accumulation=accumulated, **degrees)  # type: ignore[arg-type]


MIXTRAL = Workload(zoo.find_preset("mixtral-8x7b"), 4096, 256)
DEEPSEEK = Workload(zoo.find_preset("deepseek-v3"), 4096, 4096, precision="fp8")
T5 = Workload(zoo.find_preset("t5-large"), 512, 128, steps=1000)
GPT3 = Workload(zoo.find_preset("gpt3-175b"), 2048, 1536, optimizer="adam")
CASES = {
    "torchrun": ("torchrun", setting(replace(LLAMA, execution="compiled"), plan(LLAMA, 16, 2))),
    "fsdp2": ("fsdp2", setting(LLAMA, plan(LLAMA, 16, 1, zero_stage=3, checkpointing="selective"))),
    "fsdp2-offload": (
        "fsdp2",
        setting(replace(LLAMA, offload="parameters", lora_rank=16), plan(LLAMA, 8, 1, zero_stage=2)),
    ),
    "deepspeed": ("deepspeed", setting(LLAMA, plan(LLAMA, 8, 1, tensor=2, zero_stage=2, checkpointing="full"))),
    "deepspeed-pipeline": (
        "deepspeed",
        setting(
            replace(LLAMA, precision="fp16", offload="optimizer"),
            plan(LLAMA, 4, 1, pipeline=4, zero_stage=1, checkpointing="full"),
        ),
    ),
    "megatron": (
        "megatron",
        setting(
            LLAMA,
            plan(LLAMA, 2, 1, tensor=4, pipeline=2, zero_stage=1, virtual_stages=2, sequence_parallel=True,
                 checkpointing="full"),
        ),
    ),
    "megatron-uneven": ("megatron", setting(GPT3, plan(GPT3, 2, 1, tensor=8, pipeline=10, checkpointing="selective"))),
    "megatron-experts": (
        "megatron",
        setting(MIXTRAL, plan(MIXTRAL, 8, 1, tensor=2, pipeline=2, expert=8, zero_stage=1, sequence_parallel=True)),
    ),
    "megatron-latent": (
        "megatron",
        setting(DEEPSEEK, plan(DEEPSEEK, 128, 1, pipeline=8, expert=64, zero_stage=1, checkpointing="full")),
    ),
    "torchtitan": ("torchtitan", setting(LLAMA, plan(LLAMA, 16, 1, zero_stage=3, checkpointing="selective"))),
    "torchtitan-pipeline": (
        "torchtitan",
        setting(
            replace(LLAMA, precision="fp8", execution="compiled"),
            plan(LLAMA, 4, 1, tensor=2, pipeline=2, virtual_stages=2, zero_stage=2, sequence_parallel=True),
        ),
    ),
    "megatron-t5": ("megatron", setting(T5, plan(T5, 8, 4))),
    "torchrun-images": (
        "torchrun",
        setting(
            Workload(zoo.find_preset("resnet-50"), 1, 256, "fp16", optimizer="momentum", memory_format="channelsLast"),
            Plan(data=8, micro_batch=32),
        ),
    ),
    "accelerate": ("accelerate", setting(LLAMA, plan(LLAMA, 16, 1, zero_stage=3, checkpointing="full"))),
    "accelerate-replicas": ("accelerate", setting(replace(T5, execution="compiled"), plan(T5, 8, 4))),
    "trainer": ("trainer", setting(LLAMA, plan(LLAMA, 16, 1, zero_stage=3, checkpointing="full"))),
    "trainer-replicas": (
        "trainer",
        setting(replace(T5, precision="tf32", optimizer="momentum"), plan(T5, 8, 4, checkpointing="full")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_framework_is_told_the_reviewed_way(name: str) -> None:
    """`tests/launch/` holds the reviewed commands; delete one and run the test once to regenerate it."""
    text = launch_text(*CASES[name])
    path = GOLDEN / f"{name}.txt"
    if not path.exists():
        path.write_text(text)
    assert text == path.read_text()


def typed(name: str) -> list[str]:
    """Return the words into which a shell splits the command."""
    lines = launch_text(*CASES[name]).split("\n\n")[0].splitlines()
    return shlex.split(" ".join(line.removesuffix(" \\") for line in lines if not line.startswith(("#", "export "))))


@pytest.mark.parametrize("name", CASES)
def test_a_shell_reads_the_words_that_programs_get(name: str) -> None:
    assert typed(name) == list(write_launch(*CASES[name]).command)


def test_every_framework_is_reviewed() -> None:
    assert {framework for framework, _ in CASES.values()} == set(LAUNCHERS)
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_command_is_one_command_on_all_gpus(name: str) -> None:
    _, given = CASES[name]
    lines = launch_text(*CASES[name]).split("\n\n")[0].splitlines()
    assert lines[1].startswith("# job on h100-sxm")
    assert all(len(line) <= 100 for line in lines[2:])
    ranks = {key: int(value) for word in typed(name) for key, _, value in [word.partition("=")] if value.isdecimal()}
    if typed(name)[0] == "accelerate":
        config = yaml.safe_load(write_launch(*CASES[name]).files["accelerate.yaml"])
        assert config["num_processes"] == given.plan.gpus
        assert given.nodes == config["num_machines"]
    else:
        assert ranks.get("--nnodes", 1) * ranks["--nproc-per-node"] == given.plan.gpus


def test_degrees_reach_megatron_and_multiply() -> None:
    _, given = CASES["megatron-experts"]
    text = " ".join(write_launch("megatron", given).command)
    degrees = {name: int(value) for name, value in re.findall(r"--([a-z-]+-size) (\d+)", text)}
    assert degrees["tensor-model-parallel-size"] * degrees["pipeline-model-parallel-size"] == 4
    assert degrees["global-batch-size"] == 256
    assert degrees["expert-model-parallel-size"] == 8


def test_the_files_are_what_they_say() -> None:
    config = json.loads(write_launch(*CASES["deepspeed"]).files["ds_config.json"])
    ranks = config["train_batch_size"] / config["train_micro_batch_size_per_gpu"]
    assert ranks == config["gradient_accumulation_steps"] * 8
    for name in ("torchtitan", "torchtitan-pipeline"):
        job = write_launch(*CASES[name]).files["job.py"]
        assert 'flavor="8B"' in job and "global_batch_size=128," in job
        degrees = [int(value) for value in re.findall(r"_degree=(\d+),", job)]
        assert int.__mul__(*sorted(degrees)[-2:]) in (16, 8)


@pytest.mark.parametrize(
    ("framework", "changes", "problem"),
    [
        ("ddp", {"tensor": 2}, "no tensor parallelism"),
        ("ddp", {"zero_stage": 1}, "no ZeRO stage 1"),
        ("fsdp2", {"zero_stage": 0}, "no ZeRO stage 0"),
        ("deepspeed", {"checkpointing": "selective"}, "no selective recomputation"),
        ("deepspeed", {"tensor": 2, "sequence_parallel": True}, "never splits norms"),
        ("deepspeed", {"pipeline": 2, "zero_stage": 3}, "no ZeRO stage 3"),
        ("megatron", {"zero_stage": 3}, "no ZeRO stage 3"),
        ("torchtitan", {"tensor": 2}, "always splits norms"),
        ("fsdp2", {"virtual_stages": 2, "zero_stage": 3}, "no virtual stages"),
    ],
)
def test_what_a_framework_cannot_run_is_named(framework: str, changes: dict[str, object], problem: str) -> None:
    assert problem in find_unsupported_feature(framework, LLAMA, plan(LLAMA, 8, 1, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("framework", "workload", "problem"),
    [
        ("deepspeed", replace(LLAMA, precision="fp8"), "no fp8"),
        ("torchrun", replace(LLAMA, offload="optimizer"), "does not offload optimizer"),
        ("megatron", replace(LLAMA, lora_rank=8), "no LoRA"),
        ("torchrun", replace(LLAMA, training=False), "forward pass"),
        ("megatron", Workload(zoo.find_preset("resnet-50"), 1, 256), "trains no resnet-50"),
        ("torchtitan", Workload(zoo.find_preset("bert-large"), 512, 256), "trains no bert-large"),
        ("megatron", replace(LLAMA, model=replace(LLAMA.model, towers=(zoo.find_preset("vit-large"),))), "has towers"),
        ("torchtitan", replace(LLAMA, model=LLAMA.model.with_dimensions(classes=9)), "a classifier as its head"),
        ("torchrun", replace(LLAMA, execution="xla"), "no execution xla"),
        ("megatron", replace(LLAMA, execution="compiled"), "no execution compiled; .* launch it by torchrun, fsdp2"),
        ("megatron", replace(LLAMA, optimizer="lamb"), "no optimizer lamb"),
        ("torchtitan", replace(LLAMA, optimizer="momentum"), "no optimizer momentum"),
        ("torchtitan", replace(LLAMA, attention="eager"), "no attention eager"),
        ("trainer", replace(LLAMA, optimizer="lamb"), "no optimizer lamb"),
        (
            "trainer",
            replace(LLAMA, model=replace(LLAMA.model, towers=(zoo.find_preset("vit-large"),))),
            "returns the loss",
        ),
        (
            "trainer",
            replace(LLAMA, model=replace(LLAMA.model, family="relative-encoder")),
            "no AutoModel that is known",
        ),
    ],
)
def test_jobs_that_a_framework_does_not_train_are_one_line(framework: str, workload: Workload, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        write_launch(framework, setting(workload, plan(workload, 1, 1)))
    assert caught.value.field == "--launch"


@pytest.mark.parametrize(
    ("launcher", "workload", "given", "problem"),
    [
        ("megatron", T5, plan(T5, 4, 4, pipeline=2), "no pipeline parallelism"),
        (
            "torchtitan",
            replace(LLAMA, recompute_layers=8),
            plan(LLAMA, 16, 1, zero_stage=3, checkpointing="full"),
            "all layers of a stage or none",
        ),
        ("accelerate", LLAMA, plan(LLAMA, 8, 1, zero_stage=1), "no ZeRO stage 1"),
        ("trainer", LLAMA, plan(LLAMA, 8, 1, tensor=2), "no tensor parallelism"),
    ],
)
def test_a_plan_that_would_run_otherwise_than_priced_is_refused(
    launcher: str, workload: Workload, given: Plan, problem: str
) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        write_launch(launcher, setting(workload, given))
    assert caught.value.field == "--launch"


def test_the_search_keeps_to_the_framework(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["advise", "llama-3.1-8b", "--seq", "8192", "--batch", "128", "--gpus", "h100-sxm:16"]
    assert main([*job, "--launch", "fsdp2"]) == 0
    assert "fully_shard" in capsys.readouterr().out
    assert main([*job, "--launch", "torchrun"]) == 3  # 8 billion parameters with Adam do not fit without sharding
    assert "No pool can run this job" in capsys.readouterr().out


def test_the_search_leaves_out_stages_whose_buckets_have_no_stated_size(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed without ZeRO once won such a search, and then the launch was refused."""
    job = ["advise", "gpt2", "--seq", "1024", "--batch", "64", "--gpus", "a100-80:8", "--launch", "deepspeed"]
    assert main(job) == 0
    assert '"stage": 0' in capsys.readouterr().out
    assert main([*job, "--bucket-mib", "100"]) == 0
    assert '"reduce_bucket_size": 52428800' in capsys.readouterr().out
    assert main([*job, "--plan", "dp8,mb8", "--bucket-mib", "100"]) == 2
    assert "a size of their own at ZeRO stage 0" in capsys.readouterr().err
    assert main([*job, "--max-gpus", "1", "--bucket-mib", "100"]) == 0


@pytest.mark.parametrize("launcher", ["trainer", "accelerate"])
def test_adapters_stand_beside_a_checkpoint(launcher: str) -> None:
    """With `from_config`, LoRA once trained adapters of random weights."""
    lora, whole = (
        launch_text(launcher, setting(one, plan(one, 8, 1))) for one in (replace(LLAMA, lora_rank=16), LLAMA)
    )
    assert "AutoModelForCausalLM.from_pretrained(" in lora and "from_config" not in lora
    assert "AutoModelForCausalLM.from_config(config, dtype=" in whole


@pytest.mark.parametrize(
    ("config", "architecture", "head"),
    [
        ("facebook/hubert-large-ll60k", None, "ForCTC"),
        ("facebook/wav2vec2-base", None, "ForPreTraining"),
        ("facebook/wav2vec2-base", "Wav2Vec2ForCTC", "ForCTC"),
        ("openai/clip-vit-base-patch32", None, "ForZeroShotImageClassification"),
        ("llava-hf/llava-1.5-7b-hf", None, "ForImageTextToText"),
        ("Qwen/Qwen2-Audio-7B", None, "ForMultimodalLM"),
        ("microsoft/trocr-base-handwritten", None, "ForImageTextToText"),
        ("facebook/vit-mae-base", None, "ForPreTraining"),
        ("microsoft/deberta-v3-base", None, "ForMaskedLM"),
        ("microsoft/deberta-v3-base", "DebertaV2ForSequenceClassification", "ForSequenceClassification"),
        ("bert-base-uncased", "BertForTokenClassification", "ForTokenClassification"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", None, "ForImageTextToText"),
    ],
)
def test_the_class_is_one_that_returns_the_loss(config: str, architecture: str | None, head: str) -> None:
    """Once HuBERT's class was not in Transformers, a classifier got that of masked words, and towers were refused."""
    published = json.loads((Path(__file__).parent / "configs.json").read_text())
    given = published.get(config, {"config": BERT})["config"]
    model = huggingface.model({**given, "architectures": [architecture]} if architecture else given)
    workload = Workload(model, 512, 64)
    text = launch_text("trainer", setting(workload, plan(workload, 8, 1)))
    assert f"model = AutoModel{head}.from_config(" in text


BERT = {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512}  # fmt: skip


@pytest.mark.parametrize("config", ["owlvit", "OpenGVLab/InternVL2-8B", "facebook/deit-base-distilled-patch16-224"])
def test_what_returns_no_loss_is_refused_by_the_trainer(config: str) -> None:
    published = json.loads((Path(__file__).parent / "configs.json").read_text())
    workload = Workload(huggingface.model(published[config]["config"]), 512, 64)
    with pytest.raises(SpecError, match="no AutoModel that is known here returns the loss"):
        check_launchable("trainer", workload)


PACKAGES = {"torchrun": "torch", "fsdp2": "torch", "megatron": "megatron-core", "trainer": "transformers"}
"""Package of a launcher, where its name is another."""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_first_comment_names_the_version_that_the_parsers_are_held_to(launcher: str) -> None:
    setting = next(setting for name, setting in CASES.values() if name == launcher)
    entry, document = LAUNCHERS[launcher], launch_document(launcher, setting)
    assert launch_text(launcher, setting).splitlines()[0] == f"# options of {entry.version} ({entry.source})"
    assert document["version"] == entry.version
    project = tomllib.loads((GOLDEN.parents[1] / "pyproject.toml").read_text())["project"]
    pins = [line.partition(" ;")[0].split("==") for line in project["optional-dependencies"]["launchers"]]
    pinned = [f"{version}." for name, version in pins if name == PACKAGES.get(launcher, launcher)]
    versions = entry.version.partition(" ")[2].split(" to ")
    assert pinned and all(one.startswith(f"{version}.") for one, version in zip(pinned, versions, strict=True))


MODULES = {
    "megatron": megatron._VALUES, "torchtitan-0.3": torchtitan._VALUES, "deepspeed": deepspeed._VALUES,
    "trainer": huggingface_launch._TRAINER, "accelerate": huggingface_launch._ACCELERATE,
    "fsdp": huggingface_launch._FSDP,
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_every_option_that_is_written_is_an_option_that_is_read(name: str) -> None:
    """The writer gives a value for each option of the table, and has no option of its own."""
    written = OptionTable.read(name).list_written()
    assert {one.value for one in written} == set(MODULES[name])
    assert len({one.option for one in written}) == len(written)


def test_a_value_is_written_as_it_is_read() -> None:
    table = OptionTable.read("megatron")
    for one in table.list_written():
        for value in (one.entry["is"],) if "is" in one.entry else one.entry.get("values", {}).values():
            text = one.format(value)
            if text is None or value == "":
                continue
            words = [one.option] if text is True else [one.option, str(text)]
            found = table.read_facts(table.split_words(words), "")
            assert found.values == {one.entry["to"]: value}, words


OWN = (
    "torchrun --nproc_per_node 8 my/run_clm.py --model_name_or_path gpt2 --per_device_train_batch_size 4 --bf16 "
    "--learning_rate 2e-5 --dataset_name c4 --train_file $HOME/data.json --run_name $(date) --block_size 1024 "
    "--output_dir /mine --mine 3 --gradient_checkpointing True --ddp_backend nccl --master_port $PORT"
)


def launch_of(command: str, launcher: str, capsys: pytest.CaptureFixture[str], output: str = "table") -> str:
    words = ["advise", "--gpus", "h100-sxm:8", "--launch", launcher, "-o", output, "--", f"{command}\n"]
    assert main(words) == 0
    return capsys.readouterr().out


def test_a_launch_keeps_the_user_s_script_model_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    """`--launch trainer` once dropped the model's name, the learning rate and the data of one's own script."""
    text = launch_of(OWN, "trainer", capsys)
    command = text.replace(" \\\n", " ").split("\n\n")[0].splitlines()[-1]
    for kept in (
        "my/run_clm.py --model_name_or_path gpt2", "--learning_rate 2e-5", "--dataset_name c4", "--block_size 1024",
        '--train_file "${HOME}/data.json"', "--output_dir /mine", "--mine 3", "--ddp_backend nccl",
    ):  # fmt: skip
        assert kept in command, kept
    words = [word for word in command.split() if word.startswith("--")]
    assert len(words) == len(set(words)), "an option is written twice"
    assert "--gradient_checkpointing" not in words and "--master_port" not in words
    (left,) = (line for line in text.splitlines() if "not carried over" in line)
    assert "--run_name (" in left and "--learning_rate" not in left
    assert "# in my/run_clm.py" in text
    document = json.loads(launch_of(OWN, "trainer", capsys, "json"))["launch"]
    assert "2e-5" in document["command"] and any("not carried over" in note for note in document["notes"])


def test_options_of_another_launcher_s_script_are_named_and_not_carried(capsys: pytest.CaptureFixture[str]) -> None:
    text = launch_of(OWN, "torchrun", capsys)
    (left,) = (line for line in text.splitlines() if line.startswith("# not carried over: "))
    assert "--learning_rate 2e-5" in left and "--dataset_name c4" in left
    assert "train.py" in text and "2e-5" not in text.replace(left, "")


def test_words_before_options_are_kept_and_a_configuration_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = launch_of(OWN.replace("run_clm.py ", "run_clm.py data "), "trainer", capsys)
    assert "my/run_clm.py data --model_name_or_path" in text
    own = OwnCommand("axolotl", "axolotl train", ("config.yaml",))
    line = LaunchScript(["torchrun", "train.py"])
    assert carry_over("trainer", line, own).notes == ("not carried over: config.yaml",)
    assert "your configuration" in carry_over("trainer", line, OwnCommand("axolotl")).notes[0]
    # This launcher's command names no script.
    own = OwnCommand("torchtitan", "a.py", ("--own", "1"))
    titan = carry_over("torchtitan", LaunchScript(["torchrun", "-m", "x"]), own)
    assert titan.notes == ("not carried over: --own 1",) and list(titan.command) == ["torchrun", "-m", "x"]
    evil = OwnCommand("trainer", "a`b`$c.py", ("--learning_rate", "1"))
    assert carry_over("trainer", line, evil).command == ["torchrun", "train.py"]


@pytest.mark.parametrize("value", ["'a $(b)'", "'`b`'", "'$x\"; b'", "'${HOME}\\'"])
def test_a_value_that_a_shell_would_run_is_not_carried(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = launch_of(f"{OWN} --evil {value}", "trainer", capsys)
    (left,) = (line for line in text.splitlines() if "not carried over" in line)
    assert ("--evil" in left) == ("--evil" not in text.replace(left, ""))
    if "$" in value:
        assert "--evil" in left
    else:
        assert f"--evil {value}" in text


def test_megatron_keeps_learning_rate_and_data_and_writes_the_plan_anew(capsys: pytest.CaptureFixture[str]) -> None:
    own = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 "
        "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64 --bf16 "
        "--tensor-model-parallel-size 2 --lr 1e-4 --data-path /data --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1"
    )
    text = launch_of(own, "megatron", capsys)
    assert "--lr 1e-4" in text and "--data-path /data" in text
    assert text.count("--tensor-model-parallel-size") == 1 and text.count("--num-layers") == 1
    assert "not carried over" not in text and "--recompute-granularity" not in text


def _run_by_shell(text: str) -> list[str]:
    """Return the arguments that a shell gives to the command of a printed launch."""
    lines = takewhile(lambda line: line.strip(), text.splitlines())
    script = "\n".join(["torchrun() { printf '%s\\0' \"$@\"; }", "MASTER_ADDR=main", *lines])
    run = subprocess.run(["bash", "-c", script], capture_output=True, check=True, text=True)
    assert not run.stderr
    return run.stdout.split("\0")[:-1]


_CODE = "printf 4%s 2"
_NAMES = (f"a$({_CODE})", f"a`{_CODE}`", f'a"; {_CODE}; "', f"a\n{_CODE};#", "a$HOME", "x.py", "../x")


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("launcher", ["torchrun", "trainer"])
def test_a_job_s_name_is_no_code_for_the_shell(name: str, launcher: str) -> None:
    """`metadata.name` once stood between double quotes in the option `--rdzv-id`, and broke comments."""
    plan = Plan(data=16, tensor=1, pipeline=1, micro_batch=1)
    workload = Workload(zoo.find_preset("gpt2-small"), global_batch=16, sequence_length=1024)
    setting = LaunchSetting(name, workload, plan, "h100", 2, 8, 1.0)
    text = launch_text(launcher, setting)
    words = _run_by_shell(text)
    assert "--rdzv-endpoint=main:29500" in words and "train.py" in words
    assert not any("42" in word or os.environ["HOME"] in word or ".." in word for word in words)
    own = OwnCommand("trainer", "own.py", ("--learning_rate", "1"))
    if launcher == "trainer":
        line = carry_over(launcher, write_launch(launcher, setting), own)
        assert "own.py" in line.command and "train.py" not in line.command


@pytest.mark.parametrize(
    ("word", "given"),
    [
        ("$(echo run)", "$(echo run)"), ("--x=`echo run`$(b)", "--x=`echo run`$(b)"), ("$((1+1))", "$((1+1))"),
        ("--x=$MASTER_ADDR`b`\"", "--x=main`b`\""), ("a'$1", "a'$1"), ("${MASTER_ADDR}:1", "main:1"),
        ("$(b)=$MASTER_ADDR!", "$(b)=main!"),
    ],
)  # fmt: skip
def test_only_variables_of_a_word_are_left_to_the_shell(word: str, given: str) -> None:
    text = LaunchScript(["torchrun", "train.py", word], notes=["a\x1b[31m\nb"]).text(["first"])
    assert _run_by_shell(text) == ["train.py", given]
    assert "\x1b" not in text


@pytest.mark.parametrize("value", ["'${HOME}'", "'${\u00e9}'", "'${1}'"])
def test_a_literal_dollar_sign_is_no_variable(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = launch_of(f"{OWN} --evil {value}", "trainer", capsys)
    (left,) = (line for line in text.splitlines() if "not carried over" in line)
    assert "--evil" in left and "--evil" not in text.replace(left, "")
