"""The command line: commands as people type them, and the answers to mistyped ones."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import yaml

from tilecast.cli import main

ROOT = Path(__file__).resolve().parent.parent
JOB = str(ROOT / "examples" / "jobs" / "llama-7b-pretrain.yaml")
MIXED = str(ROOT / "examples" / "clusters" / "mixed.yaml")
GPUS = "h100-sxm:16,a100-80:8,a100-40:8,l4:8,t4:8"


def test_a_job_file_on_a_node_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", JOB, "--nodes", MIXED]) == 0
    screen = capsys.readouterr().out
    assert all(name in screen for name in ("h100-sxm", "a100-80", "l4", "t4", "How sure?"))
    assert next(line for line in screen.splitlines() if line.startswith(">")).split()[1] == "h100-sxm"


def test_a_model_by_name_and_no_file_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "llama-3.1-8b", "--seq", "8192", "--batch", "128", "--gpus", GPUS, "-o", "json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["recommendation"]["pool"] == "h100-sxm"
    assert {item["pool"] for item in advice["rejected"]} >= {"t4"}


def test_trade_offs_name_the_plan_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["advise", "llama-2-7b", "--seq", "4096", "--batch", "64", "--gpus", "a100-80:16"]
    assert main([*asked, "-o", "json"]) == 0
    offers = json.loads(capsys.readouterr().out)["pareto"]
    assert main(asked) == 0
    screen = capsys.readouterr().out
    lines = screen[screen.index("Trade-offs") : screen.index("Prices per GPU")].splitlines()
    items = [item.strip() for line in lines for item in line.removeprefix("Trade-offs").split("|") if item.strip()]
    assert len(items) == len(offers) >= 3, "no line ends within an item"
    for item, offer in zip(items, offers, strict=True):
        assert item.startswith(f"{offer['pool']} {offer['nodes']}x{offer['gpusPerNode']} {offer['plan']} ")


def test_nodes_from_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(Path(MIXED).read_text()))
    assert main(["advise", JOB, "--nodes", "-", "-o", "csv"]) == 0
    assert capsys.readouterr().out.startswith("pool,nodes,")


def test_no_recommendation_is_status_three(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "llama-3.1-405b", "--seq", "8192", "--batch", "64", "--gpus", "t4:8,a100-80:8"]) == 3
    screen = capsys.readouterr().out
    assert "No pool can run this job" in screen
    assert "too much" in screen


def test_a_baseline_that_cannot_be_split_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", "gpt2", "--seq", "1024", "--batch", "64", "--gpus", "h100-sxm:8,l4:8"]
    assert main([*arguments, "--framework", "ddp", "--baseline", "l4:7"]) == 0
    assert "your baseline of 7" in capsys.readouterr().out


def test_a_baseline_that_is_the_recommendation_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", "gpt2-xl", "--seq", "1024", "--batch", "64", "--gpus", "a100-80:8"]
    assert main([*arguments, "--baseline", "a100-80:8"]) == 0
    screen = capsys.readouterr().out
    assert "Your baseline is what is recommended.\n" in screen and "less cost" not in screen


@pytest.mark.parametrize("kind", ["Pod", "Deployment", "RayJob"])
def test_what_is_no_job_is_not_asked_for_another_api_version(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "it.yaml"
    path.write_text(f"apiVersion: v1\nkind: {kind}\nmetadata: {{name: x}}\nspec: {{}}\n")
    assert main(["advise", str(path), "--gpus", GPUS]) == 2
    _one_line(capsys, f"{kind} is not a kind of job that is read; give a TrainingJob")


def test_more_gpus_than_there_are_are_told_only_where_they_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--seq", "2048", "--batch", "64", "--gpus", "rtx-4090:8", "--plan", "fsdp8,ac=full"]
    asked = ["advise", "llama-3.1-8b", *given]
    assert main([*asked, "-o", "json"]) == 0
    codes = {item["code"]: item for item in json.loads(capsys.readouterr().out)["whyNot"]}
    assert codes["PoolTooSmall"]["value"] > 1 and "change" not in codes["PoolTooSmall"]
    assert main(asked) == 0
    assert "but the pool has" not in capsys.readouterr().out


LIMITED = ["advise", "llama-2-7b", "--seq", "4096", "--batch", "64", "--gpus", "h100-sxm:8", "--steps", "10000"]


def test_a_plan_that_is_slower_and_beyond_the_budget_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*LIMITED, "--objective", "fastestWithinBudget", "--budget", "490"]
    assert main([*asked, "-o", "json"]) == 0
    assert "OverBudget" in {item["code"] for item in json.loads(capsys.readouterr().out)["whyNot"]}
    assert main(asked) == 0
    assert "beyond the job's own limit" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "deadline", "problem"),
    [("10000", "1h", r"takes 7\.\d h, not 1\.0 h:"), ("100", "40s", r"takes 4\.\d min, not 40 s:")],
)
def test_a_missed_deadline_is_told_in_its_own_unit(
    steps: str, deadline: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--objective", "cheapestBeforeDeadline", "--deadline", deadline]
    assert main([*LIMITED[:-1], steps, *asked]) == 3
    assert re.search(problem, capsys.readouterr().out)


@pytest.mark.parametrize(("zero", "priced"), [("0", "huggingface"), ("2", "accelerate"), ("3", "accelerate")])
@pytest.mark.parametrize("launcher", ["trainer", "accelerate"])
def test_a_stated_plan_is_priced_by_the_framework_of_the_launcher_that_runs_it(
    launcher: str, zero: str, priced: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZeRO 2 was once priced as plain replicas, and then refused."""
    asked = ["--seq", "1024", "--batch", "64", "--gpus", "a100-80:8", "--plan", f"dp=8,zero={zero}"]
    assert main(["advise", "gpt2-xl", *asked, "--launch", launcher]) == 0
    assert f"# priced as {priced}:" in capsys.readouterr().out


def test_one_gpu_is_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--seq", "1024", "--batch", "64", "--gpus", "h100-sxm:8,a100-80:8", "--objective", "cost"]
    assert main(["advise", "gpt2-xl", *given, "--precision", "fp16"]) == 0
    assert re.search(r"a100-80: 1\.\d\dx the price on 1 GPU; would be ahead with", capsys.readouterr().out)


def test_a_prime_batch_asks_for_no_pool_of_as_many_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """The next degree of data parallelism that divides 97 is 97; the advice once asked for 97 nodes instead of 1."""
    asked = ["--seq", "1024", "--batch", "97", "--gpus", "t4:2", "--precision", "fp16", "--plan", "pp=2"]
    assert main(["advise", "gpt2-large", *asked]) == 0
    assert "97 nodes" not in capsys.readouterr().out


JOB_TEXT = Path(JOB).read_text()
BAD_JOBS = {
    "typo": (JOB_TEXT.replace("globalBatchSize", "globalBatchsize"), "globalBatchSize"),
    "impossible-batch": (JOB_TEXT.replace("globalBatchSize: 1024", "globalBatchSize: -3"), "globalBatchSize"),
    "unknown-model": (JOB_TEXT.replace("llama-2-7b", "lama-2-7b"), "did you mean llama-2-7b"),
    "not-yaml": ("kind: [TrainingJob\n  : :", "YAML"),
    "not-a-mapping": ("- 1\n- 2\n", ""),
    "wrong-type": (JOB_TEXT.replace("globalBatchSize: 1024", "globalBatchSize: lots"), "globalBatchSize"),
    "empty": ("", "jobs"),
}


@pytest.mark.parametrize("name", BAD_JOBS)
def test_a_bad_job_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, expected = BAD_JOBS[name]
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert main(["advise", str(path), "--nodes", MIXED]) == 2
    _one_line(capsys, expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["advise", JOB, "--nodes", "no-such-file.yaml"], "no-such-file.yaml"),
        (["advise", "no-such-job.yaml", "--nodes", MIXED], "no-such-job.yaml"),
        (["advise", JOB], "--nodes"),
        (["advise", JOB, "--gpus", "h1000:8"], "unknown GPU"),
        (["advise", JOB, "--gpus", "h100-sxm"], "--gpus"),
        (["advise", JOB, "--gpus", "h100-sxm:0"], "--gpus"),
        (["advise", JOB, "--gpus", "h100-sxm:8,h100-sxm:8"], "twice"),
        (["advise", "llama-2-7b", "--gpus", GPUS, "--seq", "4096"], "--batch"),
        (["advise", "llama-2-7b", "--gpus", GPUS, "--batch", "64"], "--seq"),
        (["advise", "gnmt", "--gpus", GPUS, "--batch", "64", "--seq", "50"], "gnmt takes samples of one length"),
        (["advise", "resnet-50", "--gpus", GPUS, "--batch", "64", "--seq", "224"], "resnet-50 reads images"),
        (["advise", "llama-2-7b", "--gpus", GPUS, "--batch", "-1", "--seq", "4096"], "--batch"),
        (["advise", JOB, "--gpus", GPUS, "--baseline", "b3000:8"], "no pool or GPU 'b3000'"),
        (["advise", JOB, "--gpus", GPUS, "--precision", "fp16"], "--precision"),
        (["advise", JOB, "--gpus", GPUS, "--steps", "-5"], "--steps"),
        (["advise", JOB, "--gpus", "t4:" + "9" * 5000], "--gpus"),
        (["advise", "a" * 300, "--gpus", GPUS, "--seq", "1", "--batch", "1"], "unknown model"),
        (["advise", "gpt2", "--gpus", GPUS, "--seq", "1000000", "--batch", "1"], "positions"),
        (["advise", "resnet-50", "--gpus", GPUS, "--seq", "128", "--batch", "8"], "--seq: resnet-50 reads images"),
        (["advise", "gpt2", "--gpus", GPUS, "--seq", "128", "--batch", "8", "--steps", "0"], "--steps: 0"),
        (["advise", "gpt2", "--gpus", GPUS, "--seq", "128", "--batch", "8", "--lora-rank", "0"], "--lora-rank: 0"),
        (["advise", "gpt2", "--gpus", GPUS, "--seq=128", "--batch=8", "--quantization", "nf4"], "give --lora-rank"),
        (["validate", "runs", "no-such-file.csv"], "no-such-file.csv"),
        (["validate", "runs", MIXED], "lacks the columns"),
    ],
)
def test_a_bad_argument_is_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    _one_line(capsys, expected)


def test_an_empty_node_list_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text("apiVersion: v1\nkind: List\nitems: []\n")
    assert main(["advise", JOB, "--nodes", str(path)]) == 2
    _one_line(capsys, "nodes")


def test_an_unknown_verb_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["advice"])
    assert caught.value.code == 2
    _one_line(capsys, "did you mean advise?")


def _one_line(capsys: pytest.CaptureFixture[str], expected: str) -> None:
    error = capsys.readouterr().err
    assert error.startswith("tilecast: ")
    assert error.count("\n") == 1, error
    assert expected in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gpus"], ["h100-sxm", "989.4"]),
        (["models"], ["llama-2-7b", "6,738M"]),
        (["links"], ["nvlink4", "450"]),
        (["gpus", "NVIDIA H100 80GB HBM3"], ["sm_count", "132", "sources", "data sheet"]),
        (["models", "llama-3.1-8b"], ["ffn_hidden", "14336", "8,030,261,248"]),
        (["links", "nvlink4"], ["bandwidth_gb_per_s", "900 GB/s both directions"]),
        (["pools", "--nodes", MIXED], ["a100-80", "4x8", "nvlink3", "USD"]),
        (["pools", "l4", "--nodes", MIXED], ["g6.48xlarge", "gpu-feature-discovery", "NVIDIA-L4"]),
        (["pools", "--gpus", GPUS], ["h100-sxm", "2x8", "nvlink4", "USD"]),
        (["pools", "l4", "--gpus", GPUS], ["g2-standard-96", "pcie4", "gpusPerNode"]),
    ],
)
@pytest.mark.slow
def test_show_lists_what_is_known(
    arguments: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *arguments]) == 0
    screen = capsys.readouterr().out
    assert all(word in screen for word in expected)
    assert main(["show", *arguments, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gpus", "h1000"], "unknown GPU"),
        (["models", "lama-2-7b"], "did you mean llama-2-7b"),
        (["links", "string"], "unknown link"),
        (["pools"], "no pools are given"),
        (["pools", "l4", "--gpus", "t4:4"], "there is no pool 'l4'"),
        (["pools", "b300", "--nodes", MIXED], "there is no pool"),
        (["gpus", "--nodes", MIXED], "says nothing of gpus"),
    ],
)
def test_show_of_what_is_not_there_is_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *arguments]) == 2
    _one_line(capsys, expected)


def test_show_pools_says_why_a_node_is_not_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = tmp_path / "nodes.yaml"
    label = "nvidia.com/gpu.product: NVIDIA-A100-SXM4-80GB\n    nvidia.com/mig.strategy: mixed"
    resources = "{nvidia.com/mig-1g.10gb: 4, nvidia.com/mig-3g.40gb: 1}"
    nodes.write_text(
        f"apiVersion: v1\nkind: Node\nmetadata:\n  name: sliced\n  labels:\n    {label}\nspec: {{}}\n"
        f"status: {{capacity: {resources}, allocatable: {resources}}}\n"
    )
    assert main(["show", "pools", "--nodes", str(nodes)]) == 0
    assert "1 node not priced (MigPartitioned)" in capsys.readouterr().out
    assert main(["show", "pools", "sliced", "--nodes", str(nodes)]) == 0
    assert "MIG" in capsys.readouterr().out


def test_a_config_without_its_type_is_told_what_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 4096}')
    assert main(["advise", str(path), "--seq", "4096", "--batch", "64", "--gpus", "h100-sxm:8"]) == 2
    assert "model_type of a Hugging Face config.json" in capsys.readouterr().err


ADAPTER = {"base_model_name_or_path": "meta-llama/Llama-3.1-8B", "peft_type": "LORA", "r": 16}
ASKED = ["--seq", "512", "--batch", "16", "--gpus", "a100-80:1", "-o", "json"]


def test_an_adapter_is_priced_as_lora_on_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(ADAPTER))
    (tmp_path / "config.json").write_text("{}")
    assert main(["advise", "llama-3.1-8b", "--lora-rank", "16", *ASKED]) == 0
    meant = capsys.readouterr().out
    for job in (path, tmp_path):
        assert main(["advise", str(job), *ASKED]) == 0
        output = capsys.readouterr()
        assert output.out == meant
        assert output.err == f"tilecast: {path}: priced as llama-3.1-8b with --lora-rank 16, on every dense layer\n"
    assert main(["advise", str(path), "--lora-rank", "64", *ASKED]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"base_model_name_or_path": "me/mine"}, ".base_model_name_or_path: 'me/mine' is no preset; give the base's"),
        ({"base_model_name_or_path": None}, ".base_model_name_or_path: is missing; give the base's config.json"),
        (
            {"base_model_name_or_path": 7},
            ".base_model_name_or_path: 7 is no name of a model; give the base's config.json",
        ),
        (
            {"base_model_name_or_path": "resnet-50"},
            ".base_model_name_or_path: resnet-50 is of family resnet, which has",
        ),
        ({"base_model_name_or_path": "google/gemma-3"}, "did you mean gemma-3-1b"),
        ({"peft_type": "PREFIX_TUNING"}, ".peft_type: 'PREFIX_TUNING' adapters are not priced; give its base's preset"),
        ({"peft_type": "IA3"}, ".peft_type: 'IA3' adapters are not priced"),
        ({"peft_type": 5}, ".peft_type: 5 is no type of adapter"),
        ({"peft_type": None}, ".peft_type: None is no type of adapter"),
        ({"r": "16"}, ".r: '16' is no rank; write a whole number from 1"),
        ({"r": 10**6}, ".r: 1000000 is no rank"),
        ({"r": None}, ".r: is missing"),
        ({"modules_to_save": ["lm_head"]}, ".modules_to_save: ['lm_head'] is trained whole, which is not priced; give"),
    ],
)
def test_an_adapter_that_is_not_priced_says_how_its_base_is(
    changed: dict[str, object], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**ADAPTER, **changed}))
    assert main(["advise", str(path), *ASKED]) == 2
    _one_line(capsys, problem)


@pytest.mark.parametrize(("text", "problem"), [("", "holds no jobs and no model"), ("{}", "is neither a job")])
def test_an_adapter_file_that_says_nothing_asks_for_its_base(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error once named the remedy for a TrainingJob."""
    (tmp_path / "adapter_config.json").write_text(text)
    assert main(["advise", str(tmp_path), "--gpus", "h100-sxm:8"]) == 2
    error = capsys.readouterr().err
    assert problem in error and "save the adapter anew, or give its base's preset" in error
    assert len(error.splitlines()) == 1


def test_what_an_adapter_has_beyond_its_rank_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "adapter_config.json"
    plain = {**ADAPTER, "modules_to_save": None, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {"q_proj": 32}}
    sentence = f"tilecast: {path}: priced as llama-3.1-8b with --lora-rank 16, on every dense layer"
    for more, left_out in (
        ({}, ""),
        ({"use_dora": True}, "; without use_dora, which is not priced"),
        ({"use_dora": True, "rank_pattern": {"q_proj": 8}}, "; without use_dora, rank_pattern, which are not priced"),
    ):
        path.write_text(json.dumps({**plain, **more}))
        assert main(["advise", str(path), *ASKED]) == 0
        assert capsys.readouterr().err == f"{sentence}{left_out}\n"


@pytest.mark.parametrize("verb", ["advise", "sweep"])
def test_adapters_on_a_model_without_any_name_the_flag(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--over", "pool.gpus=8"] if verb == "sweep" else []
    assert main([verb, "resnet-50", "--batch", "64", "--lora-rank", "8", "--gpus", "h100-sxm:8", *more]) == 2
    _one_line(capsys, "tilecast: --lora-rank: resnet-50 is of family resnet, which has no adapters")


def test_a_folder_does_not_hide_the_preset_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["advise", "gpt2", *ASKED]
    assert main(arguments) == 0
    meant = capsys.readouterr().out
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    assert capsys.readouterr().out == meant


def test_a_folder_without_a_config_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(tmp_path), *ASKED]) == 2
    _one_line(capsys, "is a folder without adapter_config.json or config.json")


@pytest.mark.slow
def test_a_quantized_config_is_priced_unquantized_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000}
    config = {"model_type": "llama", "intermediate_size": 1024, **sizes}
    arguments = ["advise", str(path), "--seq", "512", "--batch", "8", "--gpus", "h100-sxm:8", "-o", "json"]
    path.write_text(json.dumps(config))
    assert main(arguments) == 0
    plain = capsys.readouterr()
    assert plain.err == ""
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert main(arguments) == 0
    quantized = capsys.readouterr()
    assert quantized.out == plain.out
    assert "quantization_config (gptq) is not priced" in quantized.err
    assert "give --lora-rank and --quantization nf4 for QLoRA" in quantized.err and "fp8" not in quantized.err
    assert main([*arguments, "--lora-rank", "8", "--quantization", "nf4"]) == 0
    assert capsys.readouterr().err == ""
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert main(arguments) == 0
    assert "give --precision fp8" in capsys.readouterr().err


def test_a_job_from_standard_input_takes_its_steps_from_the_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(JOB_TEXT))
    assert main(["advise", "-", "--nodes", MIXED, "--steps", "10", "-o", "json"]) == 0
    best = json.loads(capsys.readouterr().out)["recommendation"]
    assert best["finishSeconds"] == pytest.approx(10 * best["stepSeconds"]["target"], rel=1e-4)


@pytest.mark.slow
def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tilecast", "show", "links"], capture_output=True, text=True, check=True
    )
    assert "nvlink4" in done.stdout
    done = subprocess.run([sys.executable, "-m", "tilecast"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, "tilecast advise " in done.stdout) == (2, "", True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["gpus"],
        ["models"],
        ["links"],
        ["models", "gpt2"],
        ["pools", "--nodes", MIXED],
        ["pools", "l4", "--nodes", MIXED],
        ["pools", "--gpus", GPUS],
        ["pools", "l4", "--gpus", GPUS],
    ],
)
@pytest.mark.slow
def test_numbers_in_json_are_numbers(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *arguments, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)

    def walk(value: object) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)
        elif isinstance(value, str):
            assert re.fullmatch(r"[\d,.]+ *(%|[kKMGT]?B?|[A-Z]{3}|x\d+)?", value) is None, value

    walk(document)


FLAGS = ["--explain", "--per-layer", "--baseline", "t4:2", "--measured", "1.5", "--launch", "torchrun"]
SMALL = ["advise", "gpt2", "--seq", "512", "--batch", "64", "--gpus", "t4:4", "--precision", "fp16"]


@pytest.mark.parametrize("flags", [FLAGS[:1], FLAGS[1:2], FLAGS[2:6], FLAGS[6:], FLAGS])
def test_csv_is_csv_with_every_flag(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *flags, "-o", "csv"]) == 0
    lines = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert lines[0][:4] == ["pool", "nodes", "gpusPerNode", "plan"]
    assert lines[1][0] == "t4"
    assert {len(line) for line in lines} == {9}


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_launch_is_a_key_for_programs(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *FLAGS, "-o", output]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert {"launch", "explanation", "measured", "perLayer"} <= set(document)
    assert document["launch"]["launcher"] == "torchrun"
    assert document["launch"]["framework"] == "ddp"
    assert document["launch"]["command"][0] == "torchrun"


def test_launch_is_a_part_of_the_page_and_of_the_wide_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--launch", "torchrun", "-o", "html"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert "DistributedDataParallel(model" in page
    assert main([*SMALL, "--launch", "torchrun", "-o", "wide"]) == 0
    screen = capsys.readouterr().out
    assert "How sure?" in screen
    assert "torchrun --standalone" in screen


PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "advise --help",
        "advise gpt2 --seq 512 --batch 64 --gpus t4:4 --precision fp16 -o html",
        "sweep gpt2 --seq 512 --batch 64 --gpus t4:4 --precision fp16 --over training.globalBatchSize=64,128",
        "advise - --gpus h100-sxm:8",
        "advise JOB --gpus h100-sxm:8",
        "advise missing-é.yaml --gpus h100-sxm:8",
        "completion fish",
    ],
)
@pytest.mark.slow
def test_a_locale_without_utf_8_ends_without_traceback(words: str, tmp_path: Path) -> None:
    text = JOB_TEXT.replace("llama-7b-pretrain", "llama-é")
    path = tmp_path / "job-ü.yaml"
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "tilecast", *(str(path) if word == "JOB" else word for word in words.split())]
    environment = {**os.environ, **PLAIN}
    done = subprocess.run(command, input=text.encode(), capture_output=True, env=environment, check=False)
    assert b"Traceback" not in done.stderr
    assert done.returncode == (2 if "missing" in words else 0)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "| head -c 1 > /dev/null"])
@pytest.mark.parametrize("words", ["show gpus -o json", "--help", "completion bash"])
@pytest.mark.slow
def test_closed_streams_end_without_traceback(words: str, closed: str) -> None:
    shell = f"{shlex.quote(sys.executable)} -m tilecast {words} {closed}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_manifest_with_anchors_is_advised_and_committed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "examples" / "existing" / "pytorchjob.yaml").read_text()
    first, _, second = text.partition("    Worker:\n")
    shared = first.replace("    Master:\n", "    Master: &replica\n") + "    Worker: *replica\n"
    assert second and shared != first
    path = tmp_path / "job.yaml"
    path.write_text(shared)
    assert main(["advise", str(path), "--nodes", MIXED, "-o", "yaml"]) == 0
    replicas = yaml.safe_load(capsys.readouterr().out)["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert replicas["Master"]["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [
        # 7 billion parameters do not fit without sharding, and torchtitan has neither BERT nor FP16.
        *product(["trainjob"], ["fsdp2", "deepspeed", "megatron", "torchtitan", "accelerate", "trainer"]),
        *product(["pytorchjob"], ["torchrun", "deepspeed", "megatron", "torchtitan", "accelerate", "trainer"]),
        *product(["jobset"], ["torchrun", "deepspeed", "megatron", "fsdp2", "accelerate", "trainer"]),
    ],
)
def test_a_manifest_carries_the_command(kind: str, launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = ROOT / "examples" / "existing" / f"{kind}.yaml"
    arguments = ["advise", str(source), "--nodes", MIXED, "--launch", launcher]
    assert main([*arguments, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)["launch"]
    # A plan that may run out of memory is not committed where a safer one is known.
    document = document.get("safer", document)
    assert main([*arguments, "-o", "yaml"]) == 0
    spec = yaml.safe_load(capsys.readouterr().out)["spec"]
    containers = {
        "trainjob": lambda: [spec["trainer"]],
        "pytorchjob": lambda: [
            spec["pytorchReplicaSpecs"][role]["template"]["spec"]["containers"][0] for role in ("Master", "Worker")
        ],
        "jobset": lambda: [spec["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["containers"][0]],
    }[kind]()
    for container in containers:
        assert container["command"] == ["bash", "-c"]
        (script,) = container["args"]
        assert subprocess.run(["bash", "-n", "-c", script], capture_output=True, check=True).stderr == b""
        run = script.split("\nexec ")[-1].removeprefix("exec ").replace("\\\n", " ")
        assert shlex.split(run) == document["command"]
        for name, content in document.get("files", {}).items():
            assert f"cat > {name} <<'END'\n{content}END\n" in script
        for name, value in document.get("environment", {}).items():
            assert f"export {name}={value}" in script
        if kind == "trainjob" and "$MASTER_ADDR" in script:
            assert script.startswith('export MASTER_ADDR="$PET_MASTER_ADDR"\n')
        if kind == "jobset" and "$MASTER_ADDR" in script:
            assert "bert-large-jobset-workers-0-0.bert-large-jobset" in script.splitlines()[0]


def test_a_manifest_warns_of_a_tight_plan_and_carries_the_safer_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", str(ROOT / "examples" / "existing" / "pytorchjob.yaml"), "--nodes", MIXED]
    assert main([*arguments, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    safer = document["safer"]["plan"]
    assert main([*arguments, "-o", "yaml"]) == 0
    head = capsys.readouterr().out.partition("apiVersion")[0]
    assert "may run out of memory" in head and f"Safer: {safer}" in head
    arguments[1] = str(ROOT / "examples" / "existing" / "trainjob.yaml")
    assert main([*arguments, "-o", "yaml", "--launch", "trainer"]) == 0
    head, _, rest = capsys.readouterr().out.partition("apiVersion")
    assert "may run out of memory" in head and "this is the safer plan" in head and "torchrun" in rest


def test_a_manifest_keeps_its_program_and_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "examples" / "existing" / "trainjob.yaml").read_text()
    path = tmp_path / "job.yaml"
    path.write_text(text.replace("[torchrun, train.py]", "[torchrun, --nnodes=2, src/main.py, --data, /mnt/data]"))
    assert main(["advise", str(path), "--nodes", MIXED, "--launch", "trainer", "-o", "yaml"]) == 0
    (script,) = yaml.safe_load(capsys.readouterr().out)["spec"]["trainer"]["args"]
    words = shlex.split(script.split("exec ")[-1].replace("\\\n", " "))
    place = words.index("src/main.py")
    assert words[place : place + 4] == ["src/main.py", "--data", "/mnt/data", "--output_dir"]
    assert words.count("torchrun") == 1


@pytest.mark.slow
def test_a_preset_on_gpus_imports_nothing_that_reads_files() -> None:
    advise = "advise bert-large --seq 512 --batch 256 --gpus h100-sxm:8"
    readers = (
        "yaml", "tilecast.nodes", "tilecast.jobs", "tilecast.explain", "tilecast.perlayer", "tilecast.logs",
        "tilecast.api.advice",
    )  # fmt: skip
    code = f"import sys; from tilecast.cli import main; main({advise.split()!r}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "tilecast.api.training_job" in loaded
    assert loaded.isdisjoint(readers), loaded.intersection(readers)


@pytest.mark.slow
def test_a_preset_on_gpus_parses_only_the_files_of_its_gpu_and_its_links() -> None:
    advise = "advise llama-3.1-8b --seq 8192 --batch 128 --gpus h100-sxm:16"
    code = f"""
import sys, tomllib
parsed, parse = [], tomllib.loads
tomllib.loads = lambda text: parsed.append(text) or parse(text)
from tilecast.cli import main
main({advise.split()!r})
print(*("sm_count =" in text for text in parsed), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    of_gpus = done.stderr.split()
    assert 1 <= of_gpus.count("True") < 5, "one GPU, and a larger one where memory is short"
    assert len(of_gpus) < 50, "the files of all GPUs and links are 96"


def test_everything_that_is_missing_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for words, flags in (
        (["llama-3.1-8b"], "--batch, --seq and --gpus: are missing; add for instance --batch 128 --seq 8192 --gpus"),
        (["llama-3.1-8b", "--seq", "8192"], "--batch and --gpus: are missing"),
        (["resnet-50"], "--batch and --gpus: are missing"),
        (["llama-3.1-8b", "--gpus", "l4:8"], "--batch and --seq: are missing"),
        (["llama-3.1-8b", "--gpus", "l4:8", "--batch", "8"], "--seq: is missing"),
    ):
        assert main(["advise", *words]) == 2
        assert flags in capsys.readouterr().err, words


def test_a_bare_command_shows_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = [line.split("   ")[0].split() for line in capsys.readouterr().out.splitlines() if "tilecast " in line]
    commands = [words[1:] for words in shown if words[0] == "tilecast"]
    assert len(commands) == 3
    for words in commands:
        assert main(words) == 0, words
