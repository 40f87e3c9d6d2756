"""Models as ONNX files and as traced modules: they have the same work and weights as Tilecast's own families."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilecast import search, zoo
from tilecast.advice import Request, advise
from tilecast.api import documents
from tilecast.cli import main
from tilecast.graph import Shards
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.model import Model
from tilecast.spec import SpecError, Workload
from tilecast.zoo import traced
from tilecast.zoo.traced import document, repeats, torch_build, torch_export
from traced_graphs import GRAPHS, activation_bytes, fixture, flops, graph, seconds, stored

GPT = Model("gpt", "decoder", 2, 128, 4, 4, 32, 512, 512, positions=64, dropout=True, dimensions=zoo.Transformer())
LLAMA = Model(
    "llama", "decoder", 2, 128, 4, 4, 32, 352, 512, gated_mlp=True, rms_norm=True, rotary=True, bias=False,
    tied_embeddings=False, dimensions=zoo.Transformer(),
)  # fmt: skip


BUILT_IN = {"transformer": (GPT, 64), "llama": (LLAMA, 64), "resnet": (zoo.find_preset("resnet-18"), 1)}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_traced_module_has_the_parameters_of_its_family(name: str) -> None:
    built_in, sequence = BUILT_IN[name]
    counts = [zoo.count_parameters(Workload(model, sequence, 8)) for model in (built_in, fixture(name))]
    assert counts[0] == pytest.approx(counts[1], abs=0.5)


@pytest.mark.parametrize(
    "how", [{}, {"training": False}, {"precision": "fp32"}, {"execution": "compiled"}, {"attention": "eager"}]
)
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_traced_module_does_the_work_of_its_family(name: str, how: dict[str, Any]) -> None:
    built_in, sequence = BUILT_IN[name]
    assert flops(fixture(name), sequence, **how) == pytest.approx(flops(built_in, sequence, **how), rel=0.01)


@pytest.mark.parametrize("how", [{}, {"precision": "fp32"}])
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_traced_module_keeps_the_activations_of_its_family(name: str, how: dict[str, Any]) -> None:
    built_in, sequence = BUILT_IN[name]
    assert activation_bytes(fixture(name), sequence, **how) == pytest.approx(
        activation_bytes(built_in, sequence, **how), rel=0.15
    )


@pytest.mark.parametrize("name", ["transformer", "resnet"])
@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_a_traced_module_takes_the_time_of_its_family(name: str, execution: str) -> None:
    built_in, sequence = BUILT_IN[name]
    # Only a trace shows where eager mixed precision casts; families count the casts around norms.
    how: dict[str, Any] = {"execution": execution, "precision": "fp32" if execution == "eager" else "bf16"}
    ours, theirs = (seconds(model, sequence, **how) for model in (fixture(name), built_in))
    assert ours == pytest.approx(theirs, rel=0.12)


def test_decomposed_layers_are_found_again() -> None:
    kinds = [one.kind for one in fixture("llama").trace.operators]  # type: ignore[union-attr]
    assert (kinds.count("rmsnorm"), kinds.count("attention")) == (5, 2)
    assert "softmax" not in kinds and "reciprocal-root" not in kinds


def test_a_compiler_fuses_chains_and_norms() -> None:
    eager, compiled = (
        sum(
            block.repeat * op.count
            for block in graph(fixture("resnet"), 1, execution=execution).blocks
            for op in block.ops
        )
        for execution in ("eager", "compiled")
    )
    assert compiled < 0.9 * eager


def test_twice_the_micro_batch_is_twice_the_work() -> None:
    batches = np.array([1, 2, 8])
    ones = np.ones_like(batches)
    built = zoo.build(Workload(fixture("transformer"), 64, 8), Shards(batches, ones, ones, ones, 0 * ones))
    # Weights are cast, and positions looked up, once, whatever the batch.
    ops = [(block.repeat * op.count, op) for block in built.blocks for op in block.ops if op.table.kind[0] <= 2]
    work = sum(count * op.table.flops() for count, op in ops)
    assert work == pytest.approx(batches * work[0], rel=1e-4)
    assert built.blocks[0].activation_bytes[0] == pytest.approx(batches * built.blocks[0].activation_bytes[0, 0])


def test_stages_are_cut_to_equal_cost() -> None:
    trace = fixture("resnet").trace
    assert trace is not None
    stages = graph(fixture("resnet"), 1).stages
    assert stages.cost[0] == pytest.approx(1.0)
    assert (np.diff(stages.cost) <= 1e-9).all()
    assert 0.5 <= stages.cost[1] < 0.6
    assert traced.count_pieces(trace) >= 4


def test_graphs_are_split_by_data_and_pipeline_but_not_by_tensor() -> None:
    gpu = find_gpu("t4")
    pool = Pool("t4", gpu, 8, 1, find_link(gpu.intra_link), find_link("ethernet-100"))
    plans = search.enumerate_plans(Workload(fixture("transformer"), 64, 64, "fp16"), pool)
    assert (plans.tensor == 1).all()
    assert {1, 2, 4} <= set(plans.pipeline.tolist()) and {0, 1, 3} <= set(plans.zero_stage.tolist())
    priced = search.price(Workload(fixture("transformer"), 64, 64, "fp16"), plans, pool)
    assert np.isfinite(priced.step_s).all() and (priced.step_s > 0).all()


def test_a_graph_too_large_for_every_gpu_says_why_tensor_parallelism_did_not_help() -> None:
    gpu = find_gpu("t4")
    pool = Pool("t4", gpu, 1, 1, find_link(gpu.intra_link), find_link("ethernet-100"))
    workload = Workload(fixture("resnet"), 1, 4096, "fp16", micro_batch=4096)
    (rejection,) = advise(Request("big", workload), [pool]).rejections
    assert rejection.code == "TensorParallelUnsupported"


def test_the_command_line_reads_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch", "256", "--gpus", "h100-sxm:8", "-o", "csv"]
    assert main(["advise", str(GRAPHS / "transformer.json"), *arguments]) == 0
    assert "h100-sxm" in capsys.readouterr().out
    assert main(["advise", str(GRAPHS / "transformer.json"), "--seq", "128", *arguments]) == 2
    assert "traced with 64 tokens" in capsys.readouterr().err


def _first(value: dict[str, Any], output: str) -> Any:
    return next(one for one in value["operators"] if output in one[2])


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda value: value.pop(key)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda value: value.update(format="tilecast-graph/9"), "is not tilecast-graph/1"),
        (_without("shapes"), "shapes: is missing"),
        (lambda value: value["shapes"].update(linear=[2**30, 2**30]), "'linear' is larger than any tensor"),
        (lambda value: _first(value, "layer_norm")[3].update(cols=0), "layernorm lacks the attribute cols"),
        (lambda value: _first(value, "transpose")[3].update(axis0=7), "transpose lacks the attribute axis0"),
        (lambda value: value.update(batch=0), "0 is no size"),
        (lambda value: value.update(batch=True), "True is no size"),
        (lambda value: value.update(batch=3), "batch: 3 is not the first dimension of 'ids', which is 2"),
        (lambda value: value["shapes"].update(ids=[]), "inputs: none has a batch dimension"),
        (lambda value: value.update(outputs=[]), "outputs: there are none"),
        (lambda value: value.update(outputs=["p_positions_weight"]), "outputs: none is computed from the inputs"),
        (lambda value: value.update(outputs=["ids"]), "outputs: none is computed from the inputs"),
        (lambda value: _first(value, "layer_norm")[3].update(cols=10**400), "is not a graph document"),
        (lambda value: value.update(operators=[]), "operators: there are 0"),
        (lambda value: value["operators"].append(["conv9", ["tokens"], ["y"], {}]), "unknown kind 'conv9'"),
        (lambda value: value["operators"].append(["relu", ["nowhere"], ["y"], {}]), "nothing makes its input"),
        (lambda value: value["operators"][0].pop(), "is not a graph document"),
        (lambda value: value["shapes"].pop("linear"), "shape of 'linear' is not given"),
    ],
)
def test_a_damaged_document_is_one_clear_error(damage: Callable[[dict[str, Any]], None], problem: str) -> None:
    value = json.loads((GRAPHS / "transformer.json").read_text())
    damage(value)
    with pytest.raises(SpecError, match=problem) as caught:
        document.read(value, "graph.json")
    assert "\n" not in str(caught.value)


def test_a_graph_of_views_alone_is_refused() -> None:
    shapes = {"x": [2], "y": [2]}
    head = {"format": document.FORMAT, "batch": 2, "sequence": 1, "inputs": ["x"], "parameters": [], "outputs": ["y"]}
    with pytest.raises(SpecError, match="outputs: none is computed from the inputs"):
        document.read({**head, "shapes": shapes, "operators": [["view", ["x"], ["y"], {}]]}, "graph.json")


def test_no_outputs_are_one_line_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({**json.loads((GRAPHS / "transformer.json").read_text()), "outputs": []}))
    assert main(["advise", str(path), "--batch", "256", "--gpus", "h100-sxm:8"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "outputs: there are none" in error


@pytest.mark.parametrize("groups", [0, 1.5, 2, 3, float("nan"), float("inf")])
def test_groups_divide_the_channels(groups: float) -> None:
    value = json.loads((GRAPHS / "resnet.json").read_text())
    _first(value, "conv2d")[3].update(groups=groups)
    with pytest.raises(SpecError, match="groups is no whole number that divides the channels"):
        document.read(value, "graph.json")


def test_a_document_says_what_the_trace_says() -> None:
    trace = fixture("llama").trace
    assert trace is not None
    again = document.read(json.loads(document.write(trace)), "again")
    assert again.operators == trace.operators and again.shapes == trace.shapes


torch_is_here = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is here")
def test_without_torch_the_tracer_says_how_to_get_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["trace", "modules:transformer", "-o", str(tmp_path / "graph.json")]) == 2
    assert "pip install torch" in capsys.readouterr().err


@torch_is_here
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_fixtures_are_what_the_tracer_writes(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(GRAPHS)
    assert main(["trace", f"modules:{name}", "-o", str(tmp_path / "graph.json")]) == 0
    now = document.read(json.loads((tmp_path / "graph.json").read_text()), name)
    then = fixture(name).trace
    assert then is not None
    assert [one.kind for one in now.operators] == [one.kind for one in then.operators]
    assert flops(traced.build_model(name, now), BUILT_IN[name][1]) == flops(fixture(name), BUILT_IN[name][1])


@torch_is_here
@pytest.mark.parametrize(("target", "built_in"), [("modules:deep_transformer", GPT), ("modules:deep_llama", LLAMA)])
def test_layers_that_repeat_are_copied(target: str, built_in: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GRAPHS)
    short = torch_export.trace(target)
    with monkeypatch.context() as patched:
        patched.setattr(repeats, "FEWEST_LAYERS", 1000)
        whole = torch_export.trace(target)
    assert [one.kind for one in short.operators] == [one.kind for one in whole.operators]
    for model in (traced.build_model("short", short), traced.build_model("whole", whole)):
        assert zoo.count_parameters(Workload(model, 64, 8)) == zoo.count_parameters(
            Workload(traced.build_model("", whole), 64, 8)
        )
        assert flops(model, 64) == flops(traced.build_model("", whole), 64)
        assert activation_bytes(model, 64) == activation_bytes(traced.build_model("", whole), 64)


@torch_is_here
@pytest.mark.parametrize(
    ("target", "kinds", "parameters"),
    [
        ("copied", ["convolution", "channelnorm"] * 2, 2 * (3 * 3 + 3 + 3 + 3)),
        ("in_contexts", ["matmul", "from-output", "from-input", "add", "matmul"], 8 * 16 + 16 + 16 * 8 + 8),
        ("values", ["matmul"], 8 * 10 + 10),
        ("grid", ["matmul", "add"], 8 * 12 + 12),
        ("resized", ["convolution", "add", "add"], 3 * 16 * 8 + 8 + 8 * 36),
    ],
)
def test_what_is_hard_to_build_or_runs_in_contexts_is_traced(
    target: str, kinds: list[str], parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(GRAPHS)
    trace = torch_export.trace(f"modules:{target}")
    varying = set(trace.inputs)
    varying.update(name for one in trace.operators if varying & set(one.inputs) for name in one.outputs)
    assert [one.kind for one in trace.operators if varying & set(one.inputs)] == kinds
    assert sum(prod(trace.shapes[name]) for name in trace.parameters) == parameters


@torch_is_here
@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("modules", "names no function"),
        ("nowhere:build", "cannot be imported"),
        ("modules:rotated", "build\\(\\) failed"),
        ("modules:sorting", r"linalg_inv \(2x\); supported: "),
        ("modules:branching", r"cond \(1x\); supported: "),
    ],
)
def test_what_cannot_be_traced_is_one_clear_error(target: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GRAPHS)
    with pytest.raises(SpecError, match=problem) as caught:
        torch_export.trace(target)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="needs timm")
@pytest.mark.parametrize(
    ("name", "image", "parameters"),
    [
        ("resnet18", 224, 11_689_512),  # counts: timm's results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv
        ("resnet18@64", 64, 11_689_512),
        ("vit_tiny_patch16_224@384", 384, 5_790_000),
        ("efficientnet_es_pruned", 224, 5_440_000),
        ("efficientvit_b0", 224, 3_410_000),
    ],
)
def test_a_model_of_timm_is_traced_by_name(name: str, image: int, parameters: int) -> None:
    trace = torch_export.trace(f"timm/{name}")
    assert trace.shapes[trace.inputs[0]] == (torch_build.TIMM_BATCH, 3, image, image)
    assert sum(prod(trace.shapes[one]) for one in trace.parameters) == pytest.approx(parameters, rel=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="needs timm")
@pytest.mark.parametrize(
    ("target", "problem"),
    [("timm/resnet18@0", "no size"), ("timm/resnet18@x", "no size"), ("timm/", "no such"), ("timm/resnet", "no such")],
)
def test_what_timm_has_not_is_one_clear_error(target: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        torch_export.trace(target)


@torch_is_here
def test_without_timm_the_tracer_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(SpecError, match=r"needs timm; .*tilecast\[vision\]"):
        torch_export.trace("timm/resnet18")


EXAMPLE = Path(__file__).parent.parent / "examples" / "graphs" / "transformer.yaml"


@pytest.mark.slow
def test_the_example_holds_a_traced_module_and_is_advised(capsys: pytest.CaptureFixture[str]) -> None:
    job, config_map = documents.load_documents(EXAMPLE.read_text())
    assert config_map["data"]["graph.json"] == (GRAPHS / "transformer.json").read_text()
    assert main(["advise", str(EXAMPLE), "--gpus", "a100-80:8", "-o", "json"]) == 0
    in_a_job = json.loads(capsys.readouterr().out)
    bare = [str(GRAPHS / "transformer.json"), "--batch", str(job["spec"]["training"]["globalBatchSize"])]
    assert main(["advise", *bare, "--gpus", "a100-80:8", "-o", "json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["recommendation"]["stepSeconds"] == in_a_job["recommendation"]["stepSeconds"]


def test_a_graph_in_a_job_says_its_sequence_length() -> None:
    content = (GRAPHS / "transformer.json").read_bytes()
    assert stored(content).workload.sequence_length == stored(content, sequenceLength=64).workload.sequence_length == 64
    with pytest.raises(SpecError, match=r"spec.training.sequenceLength: m was traced with 64 tokens.*leave it out"):
        stored(content, sequenceLength=128)


def test_adapters_do_not_go_into_a_graph() -> None:
    with pytest.raises(SpecError, match=r"training.loraRank: m is of family traced, which has no adapters"):
        stored((GRAPHS / "transformer.json").read_bytes(), loraRank=8)
