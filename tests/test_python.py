"""The Python API: its documentation runs, it answers as the command line does, and it stands in nobody's way."""

from __future__ import annotations

import argparse
import dataclasses
import doctest
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import tilecast
from tilecast.cli import build_parser, main
from tilecast.inputs.job_options import JOB_OPTIONS, NOT_OPTIONS
from tilecast.public import api

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "examples" / "jobs" / "llama-7b-pretrain.yaml"
MIXED = ROOT / "examples" / "clusters" / "mixed.yaml"
GPT2: dict[str, Any] = {"seq": 1024, "batch": 64, "gpus": "h100-sxm:8,l4:8"}
BY_FLAGS = ["gpt2", "--seq=1024", "--batch=64", "--gpus=h100-sxm:8,l4:8"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
}


class TransformersConfig:
    """Stands in for a config of Transformers, which is one dictionary behind `to_dict`."""

    def to_dict(self) -> dict[str, Any]:
        return LLAMA


def run(*code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_page_and_the_docstrings_run() -> None:
    page = doctest.testfile(str(ROOT / "docs" / "python.md"), module_relative=False)
    assert page.attempted > 10 and not page.failed
    functions = doctest.testmod(api)
    assert functions.attempted > 5 and not functions.failed


def test_the_import_is_light() -> None:
    loaded = set(run("import sys, tilecast", "print(*sys.modules)").split())
    assert loaded.isdisjoint({"numpy", "onnxruntime", "pydantic", "yaml", "tilecast.public"})


@pytest.mark.slow
def test_no_submodule_hides_a_function() -> None:
    out = run(
        "import importlib, pkgutil, tilecast",
        "for module in pkgutil.walk_packages(tilecast.__path__, 'tilecast.'):",
        "    if not module.name.endswith('__main__'): importlib.import_module(module.name)",
        "assert set(tilecast.__all__) <= set(dir(tilecast))",
        "functions = [name for name in tilecast.__all__ if name.islower() and not name.startswith('_')]",
        "assert all(callable(getattr(tilecast, name)) for name in functions), functions",
        "advice = tilecast.advise('gpt2', seq=128, batch=8, gpus='l4:1')",
        "print(advice.best.gpus, len(tilecast.links()) > 3, *functions)",
    )
    assert out.startswith("1 True ")
    assert {"advise", "queue", "models", "sweep"} <= set(out.split())


OUTPUT = {"help", "output", "explain", "per_layer", "plot", "quiet"}
"""Options that say how an answer is shown; the values that the API returns have all of it."""
NAMES = {"job": "model", "launch": "launcher", "jobs": "jobs"}


@pytest.mark.parametrize("verb", ["advise", "sweep", "queue"])
def test_no_verb_knows_more_than_its_function(verb: str) -> None:
    (verbs,) = [action for action in build_parser((verb,))._actions if isinstance(action, argparse._SubParsersAction)]
    options = {action.dest for action in verbs.choices[verb]._actions} - OUTPUT
    parameters = set(inspect.signature(getattr(tilecast, verb)).parameters)
    known = parameters | (set(api.JobSettings.__annotations__) if "settings" in parameters else set())
    assert {NAMES.get(option, option) for option in options} <= known


@pytest.mark.slow
def test_advice_is_what_the_command_line_prints(capsys: pytest.CaptureFixture[str]) -> None:
    advice = tilecast.advise("gpt2", **GPT2)
    assert f"{advice}\n" == shown(capsys, "advise", *BY_FLAGS)
    assert advice.to_dict() == json.loads(shown(capsys, "advise", *BY_FLAGS, "-o", "json"))
    limited = tilecast.advise("gpt2", **GPT2, baseline="l4:8", objective="cost", max_gpus=4, steps=100)
    flags = ["--baseline=l4:8", "--objective=cost", "--max-gpus=4", "--steps=100"]
    assert f"{limited}\n" == shown(capsys, "advise", *BY_FLAGS, *flags)
    planned = tilecast.advise("gpt2", seq=1024, batch=64, gpus="l4:8", plan="dp=4", measured={"l4:8": 1.5})
    flags = ["--seq=1024", "--batch=64", "--gpus=l4:8", "--plan=dp=4", "--measured=l4:8=1.5s"]
    assert f"{planned}\n" == shown(capsys, "advise", "gpt2", *flags)


@pytest.mark.slow
def test_sweeps_queues_and_lists_are_what_the_command_line_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    over = "training.globalBatchSize=32,64"
    sweep = tilecast.sweep("gpt2", **GPT2, over=over)
    assert f"{sweep}\n" == shown(capsys, "sweep", *BY_FLAGS, f"--over={over}")
    assert sweep.to_dict() == json.loads(shown(capsys, "sweep", *BY_FLAGS, f"--over={over}", "-o", "json"))
    for name in ("bert-large-pretrain.yaml", "resnet-18-small.yaml"):
        (tmp_path / name).write_text((ROOT / "examples" / "jobs" / name).read_text())
    jobs, asked = str(tmp_path), ["--at=2026-11-02T08:15:04Z", "--policy=cost"]
    queue = tilecast.queue(jobs, nodes=str(MIXED), at="2026-11-02T08:15:04Z", policy="cost")
    assert f"{queue}\n" == shown(capsys, "queue", jobs, f"--nodes={MIXED}", *asked)
    assert queue.to_dict() == json.loads(shown(capsys, "queue", jobs, f"--nodes={MIXED}", *asked, "-o", "json"))
    assert len(queue.rows) + len(queue.unplanned) == 2
    assert f"{tilecast.gpus()}\n" == shown(capsys, "show", "gpus")
    for name in ("gpus", "models", "links"):
        assert getattr(tilecast, name)().rows == json.loads(shown(capsys, "show", name, "-o", "json"))
    assert json.loads(json.dumps(tilecast.gpus("l4"))) == json.loads(shown(capsys, "show", "gpus", "l4", "-o", "json"))


@pytest.mark.slow
def test_a_model_comes_in_many_forms(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    settings: dict[str, Any] = {"seq": 4096, "batch": 64, "gpus": {"a100-80": 8}}
    by_path = tilecast.advise(str(path), **settings)
    assert tilecast.advise(LLAMA, **settings).inputs_hash == by_path.inputs_hash
    assert tilecast.advise(path, **settings).inputs_hash == by_path.inputs_hash
    assert tilecast.advise(TransformersConfig(), **settings).inputs_hash == by_path.inputs_hash
    assert tilecast.advise(LLAMA, seq=np.int64(4096), batch=np.int64(64), gpus="a100-80:8") == by_path
    job, nodes = yaml.safe_load(JOB.read_text()), list(yaml.safe_load_all(MIXED.read_text()))
    items = [item for document in nodes for item in document.get("items", [document])]
    by_files = tilecast.advise(str(JOB), nodes=str(MIXED))
    assert tilecast.advise(job, nodes=items).inputs_hash == by_files.inputs_hash


def test_nodes_are_read_anew_by_each_call(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text(MIXED.read_text())
    assert len(tilecast.advise(JOB, nodes=nodes).rows) > 1
    nodes.write_text((ROOT / "examples" / "clusters" / "mixed.yaml").read_text().replace("NVIDIA-L4", "NVIDIA-Riddle"))
    with pytest.warns(tilecast.InputWarning, match="left out"):
        assert "l4" not in {row["pool"] for row in tilecast.advise(JOB, nodes=nodes).rows}


def test_a_module_of_pytorch_is_traced() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    module = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024))
    with pytest.raises(tilecast.SpecError, match="inputs: is missing"):
        tilecast.advise(module, batch=64, gpus="l4:1")
    assert tilecast.advise(module, inputs=torch.zeros(8, 1024), batch=64, gpus="l4:1").best


def test_results_are_frozen_and_their_rows_are_plain() -> None:
    advice = tilecast.advise("gpt2", **GPT2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        advice.notes = ()  # type: ignore[misc]
    assert json.loads(json.dumps(advice.rows)) == advice.rows
    assert [row["pool"] for row in advice.rows] == ["h100-sxm", "l4"] and advice.rows[0]["best"]
    assert "<table>" in advice._repr_html_() and "&lt;" not in advice._repr_html_()
    refused = tilecast.advise("llama-3.1-405b", seq=8192, batch=64, gpus="t4:8")
    assert refused.best is None
    assert refused.rows[0]["pool"] == "t4" and "BF16" in str(refused)
    assert "torchrun" in advice.launch("torchrun")
    with pytest.raises(tilecast.SpecError, match="launcher: 'nobody' is not known"):
        advice.launch("nobody")
    assert {"torchrun", "megatron"} <= set(tilecast.launchers())


def test_a_forecast_explains_itself() -> None:
    forecast = tilecast.forecast("gpt2", seq=1024, batch=64, gpus="h100-sxm:8", plan="dp=8")
    assert sum(forecast.breakdown.values()) == pytest.approx(forecast.step_s)
    assert forecast.to_dict()["gpus"] == 8 and forecast.explain().operators
    assert forecast.diagnose(2 * forecast.step_s).ratio == pytest.approx(2)
    with pytest.raises(tilecast.SpecError, match="2 pools"):
        tilecast.forecast("gpt2", **GPT2)
    with pytest.raises(tilecast.SpecError, match="too much"):
        tilecast.forecast("llama-2-70b", seq=4096, batch=64, gpus="l4:8", plan="dp=8,zero=0")


def test_fits_says_what_is_missing() -> None:
    answer = tilecast.fits("llama-3.1-70b", seq=8192, batch=64, gpus="l4:8,h100-sxm:64")
    small = next(one for one in answer.pools if one.pool == "l4")
    assert answer and not small.fits and small.remedy
    assert small.memory_bytes is None or small.available_bytes is None or small.memory_bytes > small.available_bytes
    assert not tilecast.fits("llama-3.1-70b", seq=8192, batch=64, gpus="l4:8")


def test_fits_finds_the_fewest_gpus_whatever_the_objective() -> None:
    (pool,) = tilecast.fits("llama-3.1-8b", seq=8192, batch=64, gpus="h100-sxm:64", objective="time").pools
    assert pool.fits and pool.gpus is not None and pool.gpus < 64
    fewest = tilecast.advise("llama-3.1-8b", seq=8192, batch=64, gpus="h100-sxm:64", objective="fewestGpus").best
    assert fewest is not None and fewest.gpus == pool.gpus
    fewer = tilecast.fits("llama-3.1-8b", seq=8192, batch=64, gpus=f"h100-sxm:{pool.gpus // 2}")
    assert not fewer or pool.gpus == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"seq": 1024, "gpus": "l4:1"}, "batch: is missing"),
        ({"seq": 1024, "batch": 8}, "nodes: no pools are given; give nodes FILE"),
        ({"seq": 1024, "batch": 8, "gpus": "l4:1", "precision": "bf17"}, "precision"),
        ({"seq": 1024, "batch": 8, "gpus": "l5:1"}, "l5"),
        ({"seq": 1024, "batch": 8, "gpus": "l4:1", "context": "a"}, "gpus: context is given too"),
        ({"seq": 1024, "batch": 8, "gpus": "l4:1", "launcher": "nobody"}, "launcher: 'nobody' is not known"),
        ({"seq": 1024, "batch": 8, "gpus": "l4:1", "measured": "soon"}, "measured: cannot read 'soon'"),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(tilecast.SpecError) as caught:
        tilecast.advise("gpt2", **arguments)
    assert text in str(caught.value) and "--" not in str(caught.value)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(tilecast.SpecError, match="model: int is no model"):
        tilecast.advise(7, batch=8, gpus="l4:1")
    with pytest.raises(TypeError, match="'sequence'"):
        tilecast.advise("gpt2", sequence=8)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        tilecast.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_what_is_left_out_is_a_warning() -> None:
    config = LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.warns(tilecast.InputWarning, match="quantization_config"):
        tilecast.advise(config, seq=4096, batch=64, gpus="a100-80:8")


def test_what_the_spec_can_say_is_a_keyword_and_a_flag() -> None:
    from tilecast.api.training import Training
    from tilecast.api.training_job import JobConstraints, TrainingJobSpec

    schemas = {"training.": Training, "constraints.": JobConstraints, "": TrainingJobSpec}
    fields = {f"{prefix}{item.alias}" for prefix, one in schemas.items() for item in one.model_fields.values()}
    paths = {option.path for option in JOB_OPTIONS.values()}
    assert fields - {"training", "constraints"} == paths | set(NOT_OPTIONS)
    assert not paths & set(NOT_OPTIONS)
    names = {one for name, option in JOB_OPTIONS.items() for one in (name, *option.aliases)}
    of_pools = {"inputs", "gpus", "nodes", "context", "calibration", "link", "command", "lenient"}
    assert set(api.JobSettings.__annotations__) - of_pools == names
    (verbs,) = [item for item in build_parser(("advise",))._actions if isinstance(item, argparse._SubParsersAction)]
    flags = {flag for action in verbs.choices["advise"]._actions for flag in action.option_strings}
    assert {f"--{name.replace('_', '-')}" for name in names} <= flags


@pytest.mark.parametrize("option", JOB_OPTIONS)
def test_an_option_has_the_name_of_its_field(option: str) -> None:
    own, others = JOB_OPTIONS[option].path.rpartition(".")[2], JOB_OPTIONS[option].aliases
    letters = own.lower()
    spelled = {name.replace("_", "") for name in (option, *others)}
    assert letters in spelled or option == "exact_gpus"


def test_a_keyword_has_two_spellings_and_reads_texts() -> None:
    one = tilecast.advise("gpt2", seq=1024, batch=64, steps=1000, gpus="l4:8")
    assert (
        one.to_dict()
        == tilecast.advise(
            "gpt2", sequence_length="1k", global_batch_size="64ktokens", steps="1k", gpus="l4:8"
        ).to_dict()
    )
    with pytest.raises(tilecast.SpecError, match=r"^batch: cannot read 'many'"):
        tilecast.advise("gpt2", seq=1024, batch="many", gpus="l4:8")
