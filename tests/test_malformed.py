"""Malformed inputs: each is answered on one line that names the place, the problem and a remedy, with exit status 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tilecast.cli import main

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
JOB = """\
apiVersion: tilecast.dev/v1alpha1
kind: TrainingJob
metadata: {name: a}
spec:
  model: {preset: gpt2}
  training: {globalBatchSize: 64, sequenceLength: 1024}
"""
GPT2 = ("gpt2", "--seq=1024", "--batch=64")
L4 = "--gpus=l4:8"

CONFIGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "negative": ({"num_hidden_layers": -3}, "num_hidden_layers: '-3' is no size", "give a whole number from 1"),
    "zero": ({"num_hidden_layers": 0}, "num_hidden_layers: must be positive", "llama-3-8b"),
    "null": ({"num_hidden_layers": None}, "num_hidden_layers: is missing", "a config of llama states it"),
    "text": ({"hidden_size": "4096"}, "hidden_size: '4096' is no size", "4096 instead of '4096'"),
    "truth": ({"hidden_size": True}, "hidden_size: 'True' is no size", "give a whole number"),
    "fraction": ({"hidden_size": 4096.5}, "hidden_size: 4096.5 is not a whole number", "correct the config"),
    "huge": ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1e+09", "correct the config"),
    "heads": ({"num_attention_heads": 7}, "num_attention_heads: hidden 4096 is not divisible", "32 instead of 7"),
    "groups": ({"num_key_value_heads": 5}, "num_key_value_heads: heads 32 is not divisible", "8 instead of 5"),
    "type": ({"model_type": "xlstm"}, "model_type: 'xlstm' is not supported", "tilecast trace"),
    "experts": ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 8},
                "num_experts_per_tok: 8 is not from 1 to the 2", "choose a number"),
}  # fmt: skip
"""Changes of a config.json, what the answer has to say of the place and the problem, and of the remedy."""

FILES: dict[str, tuple[str, str, str]] = {
    "empty.json": ("", "empty.json: holds no jobs", "name a preset"),
    "list.json": ("[1, 2]", "list.json: document 1 is a list", "write a mapping"),
    "broken.json": ('{"model_type": ', "broken.json: is not YAML at line 2", "correct the syntax"),
    "other.json": ('{"hidden_size": 8}', "other.json: is neither a job", "model_type"),
    "kind.yaml": (JOB.replace("TrainingJob", "Deployment"), "Deployment is not a kind", "give a TrainingJob"),
    "version.yaml": (JOB.replace("v1alpha1", "v9"), "apiVersion: 'tilecast.dev/v9'", "write apiVersion"),
    "field.yaml": (JOB.replace("BatchSize", "Batchsize"), "globalBatchsize: unknown", "did you mean globalBatchSize?"),
    "preset.yaml": (JOB.replace("gpt2", "gpt22"), "spec.model.preset: unknown model", "did you mean gpt2?"),
    "negative.yaml": (JOB.replace("64", "-64"), "globalBatchSize: -64 is out of range", "use 1 or more"),
    "text.yaml": (JOB.replace("64", "many"), "globalBatchSize: 'many' is not a whole number", "samples"),
    "model.yaml": (JOB.replace("  model: {preset: gpt2}\n", ""), "spec.model: is missing", "add it"),
    "two.yaml": (f"{JOB}---\n{JOB}", "two.yaml: holds 2 jobs", "one TrainingJob"),
    "off.yaml": (f"{JOB}  mode: Off\n", "spec.mode: YAML reads a bare Off", "in quotes"),
    "length.yaml": (JOB.replace("1024}", "1024, steps: 5, tokens: 9}"), "spec.training: steps and tokens", "give one"),
    "weights.bin": ("x", "weights.bin: holds weights", "config.json"),
}
"""Files as jobs."""

FLAGS: dict[str, tuple[str, str]] = {
    "--gpus=l4": ("--gpus: cannot read 'l4'", "NAME:COUNT"),
    "--gpus=l4:0": ("--gpus: 'l4:0' has no GPU", "NAME:COUNT"),
    "--gpus=l4:1.5": ("--gpus: cannot read 'l4:1.5'", "NAME:COUNT"),
    "--gpus=l4:8,": ("--gpus: cannot read ''", "NAME:COUNT"),
    "--gpus=l4:8,l4:8": ("--gpus: l4:8,l4:8 names a GPU twice", "add its counts up"),
    "--gpus=mi300x:8": ("--gpus: unknown GPU 'mi300x'", "it is AMD's"),
    "--gpus=p5.48xlrge:2": ("--gpus: unknown GPU", "did you mean p5.48xlarge?"),
    "--gpus=p5.48xlarge:2x4": ("--gpus: p5.48xlarge has 8 GPUs", "write p5.48xlarge:2"),
    "--gpus=l4:8@": ("--gpus: unknown link ''", "tilecast show links"),
    "--gpus=h100-sxm-mig-9g:1": ("--gpus: h100-sxm has no profile", "use one of 1g"),
    "--link=fast": ("--link: unknown link 'fast'", "tilecast show links"),
    "--batch=0": ("--batch: 0 is out of range", "use 1 or more"),
    "--batch=many": ("--batch: cannot read 'many'", "write samples"),
    "--batch=1.5": ("--batch: cannot read '1.5'", "whole number"),
    "--batch=5000tokens": ("--batch: '5000tokens' is no whole number of samples", "for instance 5"),
    "--seq=-1": ("--seq: cannot read '-1'", "whole number"),
    "--seq=4M": ("--seq: 4194304 is above the 1024 positions", "shorten it"),
    "--steps=0": ("--steps: 0 is out of range", "use 1 or more"),
    "--tokens=lots": ("--tokens: cannot read 'lots'", "whole number"),
    "--max-nodes=x": ("--max-nodes: cannot read 'x'", "whole number"),
    "--precision=int8": ("--precision: 'int8' is not allowed", "use one of fp32"),
    "--framework=megatorn": ("--framework: 'megatorn' is not allowed", "did you mean megatron?"),
    "--framework-version=2.6": ("--framework-version: says nothing without framework", "name the framework"),
    "--objective=timeToFinish": ("--steps: the objective needs", "give --steps or --tokens"),
    "--deadline=tomorrow": ("--deadline: cannot read 'tomorrow'", "36h"),
    "--deadline=36h": (
        "--deadline: says nothing without the length of the run",
        "give --steps or --tokens",
    ),
    "--budget=much": ("--budget: cannot read 'much'", "5000EUR"),
    "--offload-activations=2": ("--offload-activations: 2.0 is out of range", "use 1.0 or less"),
    "--quantization=nf4": ("--quantization: needs --lora-rank", "give --lora-rank"),
    "--micro-batch-size=7": ("--batch: is not a multiple of --micro-batch-size", "correct one of them"),
    "--global-batch-size-range=9": ("--global-batch-size-range: cannot read '9'", "MIN..MAX"),
    "--allowed-precisions=bf61": ("--allowed-precisions: 'bf61' is not allowed", "did you mean bf16?"),
    "--recompute-modules=foo": ("--recompute-modules: 'foo' is not allowed", "use one of core_attn"),
    "--allowed-pools=h100": ("--allowed-pools: there is no pool 'h100'", "known: l4"),
    "--parameter-servers=2": ("--parameter-servers: and --server-updates say nothing", "--gradient-sync"),
    "--pipeline-layout=xyz": ("--pipeline-layout: 'xyz' is no layout", "Et*3"),
    "--plan=tp=3": ("--plan: degrees of 3 do not make 8 GPUs", "multiply to the GPU count"),
    "--plan=xp=2": ("--plan: 'xp' is unknown", "known: dp"),
    "--plan=mb=7": ("--plan: mb=7 does not divide", "choose a divisor"),
    "--baseline=x:8": ("--baseline: there is no pool or GPU 'x'", "tilecast show gpus"),
    "--baseline=l4:8:tp=3": ("--baseline: degrees of 3 do not make 8 GPUs", "multiply"),
    "--measured=l4:8=fast": ("--measured: 'fast' is no step time", "1.9s"),
    "--measured=@": ("--measured: @ names no file", "@FILE.json"),
    "--calibration=missing.json": ("missing.json: cannot be read", "check the path"),
    "--launch=slurm": ("--launch: 'slurm' is not allowed", "use one of torchrun"),
}
"""Flags of `tilecast advise`."""

VERBS: dict[str, tuple[str, str]] = {
    "advise missing.yaml --gpus=l4:8": ("missing.yaml: cannot be read", "check the path"),
    "advise gpt22 --seq=8 --batch=8 --gpus=l4:8": ("model.preset: unknown model 'gpt22'", "did you mean gpt2?"),
    "advise gpt2": ("--batch, --seq and --gpus: are missing", "add for instance"),
    "sweep gpt2 --seq=8 --batch=8 --gpus=l4:8 --over=foo=1": ("--over: 'foo' is no number", "write pool.gpus"),
    "sweep gpt2 --seq=8 --batch=8 --gpus=l4:8 --over=pool.gpus=x": ("--over: '' is no number", "write for instance"),
    "queue missing --gpus=l4:8": ("missing: cannot be read", "check the path"),
    "show gpus foo": ("gpu: unknown GPU 'foo'", "tilecast show gpus"),
    "validate runs missing.csv": ("missing.csv: cannot be read", "check the path"),
}
"""Other command lines."""


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line that a command line with a malformed input prints."""
    try:
        status = main(words)
    except SystemExit as left:
        status = int(left.code or 0)
    screen = capsys.readouterr()
    assert status == 2, screen
    assert not screen.out
    assert screen.err.startswith("tilecast: ")
    assert screen.err.count("\n") == 1, screen.err
    return screen.err.removeprefix("tilecast: ").rstrip("\n")


def check(line: str, problem: str, remedy: str) -> None:
    before, semicolon, after = line.partition("; ")
    assert problem in before, line
    assert semicolon and remedy in after, line


def test_there_are_enough() -> None:
    assert len(CONFIGS) + len(FILES) + len(FLAGS) + len(VERBS) >= 60


@pytest.mark.parametrize("name", CONFIGS)
def test_a_malformed_config(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, problem, remedy = CONFIGS[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    line = answer(["advise", str(path), *GPT2[1:], L4], capsys)
    assert line.startswith(f"{path}.{problem}")
    check(line, problem, remedy)


@pytest.mark.parametrize("name", FILES)
def test_a_malformed_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, problem, remedy = FILES[name]
    (tmp_path / name).write_text(text)
    flags = [] if name.endswith(".yaml") else GPT2[1:]
    check(answer(["advise", str(tmp_path / name), *flags, L4], capsys), problem, remedy)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_malformed_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    problem, remedy = FLAGS[flag]
    line = answer(["advise", *GPT2, L4, flag], capsys)
    assert line.startswith(problem)
    check(line, problem, remedy)


@pytest.mark.parametrize("command", VERBS)
def test_a_malformed_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check(answer(command.split(), capsys), *VERBS[command])
