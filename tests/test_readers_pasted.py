"""Commands as people paste them: what the reader cannot price is refused, and not read as another job."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tilecast import readers
from tilecast.spec import SpecError

TRAINER = "torchrun --nproc_per_node 8 train.py --model_name_or_path gpt2-xl --per_device_train_batch_size 4 --bf16"

RETRO = (
    "pretrain_retro.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048"
    " --max-position-embeddings 2048"
)
T5 = TRAINER.replace("gpt2-xl", "t5-large")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("trl sft --model_name_or_path gpt2-xl --loss_type sigmoid", "--loss_type"),
        (f"{TRAINER} --num_generations 8", "--num_generations"),
        ("deepspeed main.py --model_name_or_path gpt2-xl --zero_stage 2 --deepspeed", "--zero_stage"),
        ("deepspeed main.py --model_name_or_path gpt2-xl --deepspeed", "--deepspeed"),
        ("deepspeed main.py --model_name_or_path gpt2-xl --only_optimize_lora --lora_dim 128", "--lora_dim"),
        ("accelerate launch sft.py --model_name gpt2-xl --batch_size 1", "--batch_size"),
        (f"{TRAINER} --lora_r 8 --lora_alpha 16", "--lora_r"),
        (f"{TRAINER} --lora_r 64 --bits 4 --double_quant", "--bits"),
        (f"{TRAINER} --lora_enable True --lora_r 128", "--lora_enable"),
        (f"{TRAINER} --tune_mm_mlp_adapter True", "--tune_mm_mlp_adapter"),
        (f"{TRAINER} --vision_tower openai/clip-vit-large-patch14-336", "--vision_tower"),
        (f"{TRAINER} --freeze_backbone True", "--freeze_backbone"),
        (f"{TRAINER} --use_lora", "--use_lora"),
        (f"{TRAINER} --use_lora --lora_r 8", "--use_lora"),
        (f"{TRAINER} --use_peft_lora True --lora_target_modules all-linear", "--use_peft_lora"),
        (f"{TRAINER} --max_source_length 64", "--max_source_length"),
        (f"{T5} --max_source_length 64 --max_target_length 9", "--max_source_length"),
        (f"{TRAINER} --train_group_size 8", "--train_group_size"),
        (f"{TRAINER} --sequence_parallel_size 4", "--sequence_parallel_size"),
        (f"{TRAINER} --mm_vision_select_layer -2", "--mm_vision_select_layer"),
        (f"{TRAINER} --use_unsloth True", "--use_unsloth"),
        (f"torchrun --nproc_per_node 8 {RETRO} --micro-batch-size 2 --retro-add-retriever", "--retro-add-retriever"),
        (TRAINER.replace("train.py", "run_glue.py"), "run_glue.py"),
        (TRAINER.replace("train.py", "examples/run_qa.py"), "examples/run_qa.py"),
        (TRAINER.replace("train.py", "run_audio_classification.py"), "run_audio_classification.py"),
        ("accelerate launch --use_megatron_lm run_clm.py --model_name_or_path gpt2-xl", "--use-megatron-lm"),
        ("llamafactory-cli train --model_name_or_path gpt2-xl --max_source_length 64", "--max_source_length"),
    ],
)
def test_a_job_that_is_not_priced_is_not_read_as_another(command: str, option: str) -> None:
    reading = readers.read_words(shlex.split(command), gpus=8)
    assert option in reading.unpriced
    with pytest.raises(SpecError) as caught:
        readers.require_priced(reading, "")
    assert "\n" not in str(caught.value)


def test_training_that_generates_text_is_refused() -> None:
    with pytest.raises(SpecError, match="TRL's grpo is not priced"):
        readers.read_words(shlex.split("torchrun --nproc_per_node 8 train_grpo.py --model_name_or_path gpt2-xl"))


@pytest.mark.parametrize("option", ["--freeze_backbone False", "--tune_mm_mlp_adapter False", "--bits 16"])
def test_an_option_that_is_off_costs_nothing(option: str) -> None:
    assert not readers.read_words(shlex.split(f"{TRAINER} {option}")).unpriced


def test_qlora_of_a_script_is_read_where_it_says_so() -> None:
    reading = readers.read_words(shlex.split(f"{TRAINER} --use_lora --q_lora --lora_r 8 --lora_target_modules c_attn"))
    assert not reading.unpriced
    assert (reading.training["loraRank"], reading.training["quantization"]) == (8, "nf4")


QWEN = TRAINER.replace("train.py", "finetune.py").replace("gpt2-xl", "Qwen/{}") + " --use_lora"


@pytest.mark.parametrize(
    ("model", "flags", "fields"),
    [
        ("Qwen2.5-7B", "", {"loraRank": 64, "loraTargets": "all"}),
        ("Qwen2.5-7B", "False", {}),
        ("Qwen1.5-7B-Chat", "--lora_r 8", {"loraRank": 8, "loraTargets": "all"}),
        ("Qwen-7B-Chat", "--q_lora", {"loraRank": 64, "loraTargets": "all", "quantization": "nf4"}),
        ("Qwen-7B", "", {"loraRank": 64, "loraTargets": "all", "trainEmbeddings": True}),
        ("Qwen-7B", "--q_lora True", {"loraRank": 64, "loraTargets": "all", "quantization": "nf4"}),
        ("Qwen-7B-Chat", "--lora_target_modules c_attn", {"loraRank": 64, "loraTargets": "attention"}),
    ],
)
def test_what_qwens_script_adapts_by_default_is_read(model: str, flags: str, fields: dict[str, object]) -> None:
    reading = readers.read_words(shlex.split(f"{QWEN.format(model)} {flags}"))
    keys = ("loraRank", "loraTargets", "quantization", "trainEmbeddings")
    assert {key: reading.training[key] for key in keys if key in reading.training} == fields
    assert not reading.unpriced


@pytest.mark.parametrize("names", [("max_source_length", "max_target_length"), ("source_max_len", "target_max_len")])
def test_a_decoder_reads_source_and_target_as_one_sequence(names: tuple[str, str]) -> None:
    reading = readers.read_words(shlex.split(f"{TRAINER} --{names[0]} 512 --{names[1]} 128"))
    assert reading.training["sequenceLength"] == 640
    assert not reading.unpriced


def test_a_script_whose_batch_is_not_known_has_a_note() -> None:
    command = "accelerate launch --num_processes 4 nlp_example.py"
    note = "The micro-batch of 8 is Trainer's default: that of the script is not known."
    assert readers.read_words(command.split()).notes == (note,)
    assert not readers.read_words([*command.split(), "--per_device_train_batch_size", "4"]).notes


def test_a_command_of_litgpt_says_so() -> None:
    text = "litgpt finetune gpt2-xl --data JSON --data.json_path train.json --train.max_seq_length 512 --devices 4"
    reading = readers.read_words(shlex.split(text))
    assert reading.summary()[0].startswith("Read as LitGPT: ")
    assert (reading.gpus, reading.training["sequenceLength"]) == (4, 512)


def test_a_file_behind_an_option_is_not_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    words = "llamafactory-cli train --deepspeed ds.json --stage sft --model_name_or_path gpt2-xl --cutoff_len 1024"
    reading = readers.read_words(words.split(), gpus=8)
    assert (reading.plan.zero_stage, reading.unpriced) == (3, {})


def test_the_last_configuration_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rank in (("a.yaml", 8), ("b.yaml", 16)):
        text = f"model_name_or_path: gpt2-xl\nmax_length: 512\nuse_peft: true\nlora_r: {rank}\n"
        (tmp_path / name).write_text(text)
    stated = ("--config a.yaml --config b.yaml", "--config=a.yaml --config b.yaml", "--config a.yaml --config=b.yaml")
    for words in stated:
        assert readers.read_words(["trl", "sft", *words.split()]).training["loraRank"] == 16


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("--n 1 --n 2", "2"), ("--n=1 --n 2", "2"), ("--n 1 --n=2", "2"), ("--n", None), ("--n 1 --n", "1"),
        ("--nn 1", None), ("", None), ("--n=", ""),
    ],
)  # fmt: skip
def test_the_last_value_of_an_option_counts(text: str, value: str | None) -> None:
    assert readers.find_last_value(text.split(), "--n") == value


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu"),
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
    ],
)
def test_a_deepspeed_file_that_contradicts_trainer_is_refused(
    values: dict[str, object], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, **values}))
    words = shlex.split(f"{TRAINER} --deepspeed ds.json")
    with pytest.raises(SpecError, match=f"ds.json: {field}: says .* make them equal"):
        readers.read_words(words)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, **dict.fromkeys(values, "auto")}))
    assert readers.read_words(words).plan.micro_batch == 4


CLM = "run_clm.py --model_name_or_path gpt2-xl --per_device_train_batch_size 4 --block_size 1024 --bf16"
MEGATRON = "pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --bf16"


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        (f"CUDA_VISIBLE_DEVICES=0,1,2,3 deepspeed {CLM}", 4),
        (f"env CUDA_VISIBLE_DEVICES=2,5 accelerate launch {CLM}", 2),
        (f"CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=gpu {CLM}", 2),
        (f"CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=2 {CLM}", 2),
        (f"CUDA_VISIBLE_DEVICES=0 python {CLM}", 1),
        (f"CUDA_VISIBLE_DEVICES=0,1 python {CLM}", None),
        (f"CUDA_VISIBLE_DEVICES=0,1 deepspeed --hostfile hosts {CLM}", None),
        (f"CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 8 {CLM}", 8),
        (f"deepspeed --include localhost:4,5,6,7 {CLM}", 4),
        (f"deepspeed --include host1:0,1@host2:0,1 {CLM}", 4),
        (f"deepspeed --include host1@host2 {CLM}", None),
        (f"accelerate launch --gpu_ids 0,1,2 {CLM}", 3),
        (f"accelerate launch --gpu_ids all {CLM}", None),
        (f"mpirun -np 16 --hostfile h python {MEGATRON} --micro-batch-size 2", 16),
        (f"mpirun --hostfile h python {MEGATRON} --micro-batch-size 2", None),
    ],
)
def test_devices_count_where_the_launcher_is_not_told_a_number(command: str, gpus: int | None) -> None:
    assert readers.read_words(shlex.split(command)).gpus == gpus
    assert readers.read_words([f"set -e\n{command}\n"]).gpus == gpus


def test_exported_devices_count() -> None:
    text = f"export CUDA_VISIBLE_DEVICES=0,1,2,3\ndeepspeed {CLM}\n"
    assert readers.read_words([text]).gpus == 4
    assert readers.read_words([text.replace("0,1,2,3", "$DEVICES")], gpus=8).gpus == 8
