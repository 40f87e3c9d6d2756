"""Models as ONNX files and as traced modules: the same work and weights as the families that Tilecast builds itself."""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilecast import models, search
from tilecast.advise import Request, advise
from tilecast.api import documents, training_job
from tilecast.cli import main
from tilecast.graph import Shards
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.models import traced
from tilecast.models.traced import document, onnx_file, repeats, torch_build, torch_export, torch_operators
from tilecast.models.traced.operators import OPERATORS
from tilecast.spec import Model, Plan, Plans, SpecError, Workload

GRAPHS = Path(__file__).parent / "graphs"
ONE = np.ones(1, dtype=np.int64)

GPT = Model("gpt", "decoder", 2, 128, 4, 4, 32, 512, 512, positions=64, dropout=True)
LLAMA = Model(
    "llama", "decoder", 2, 128, 4, 4, 32, 352, 512, gated_mlp=True, rms_norm=True, rotary=True, bias=False,
    tied_embeddings=False,
)  # fmt: skip
BUILT_IN = {"transformer": (GPT, 64), "llama": (LLAMA, 64), "resnet": (models.preset("resnet-18"), 1)}


def fixture(name: str) -> Model:
    return traced.model(name, document.read(json.loads((GRAPHS / f"{name}.json").read_text()), name))


def graph(model: Model, sequence: int, **how: Any) -> Any:
    return models.build(Workload(model, sequence, 8, **how), Shards(4 * ONE, ONE, ONE, ONE, 0 * ONE))


def flops(model: Model, sequence: int, **how: Any) -> float:
    blocks = graph(model, sequence, **how).blocks
    return sum(
        block.repeat * op.count * float(op.table.flops()[0])
        for block in blocks
        for op in block.ops
        if op.table.kind[0] <= 2
    )


def kept(model: Model, sequence: int, mode: int = 0, **how: Any) -> float:
    blocks = graph(model, sequence, **how).blocks
    return sum(block.repeat * float(np.broadcast_to(block.activation_bytes, (3, 1))[mode, 0]) for block in blocks)


def seconds(model: Model, sequence: int, **how: Any) -> float:
    gpu = find_gpu("a100-80")
    pool = Pool("a100", gpu, 1, 1, find_link(gpu.intra_link), find_link("ethernet-100"))
    priced = search.price(Workload(model, sequence, 64, **how), Plans.of(Plan(micro_batch=64)), pool)
    return float(priced.times.compute[0])


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_traced_module_has_the_parameters_of_its_family(name: str) -> None:
    built_in, sequence = BUILT_IN[name]
    counts = [models.parameters(Workload(model, sequence, 8)) for model in (built_in, fixture(name))]
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
    assert kept(fixture(name), sequence, **how) == pytest.approx(kept(built_in, sequence, **how), rel=0.15)


@pytest.mark.parametrize("name", ["transformer", "resnet"])
@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_a_traced_module_takes_the_time_of_its_family(name: str, execution: str) -> None:
    built_in, sequence = BUILT_IN[name]
    # Where eager mixed precision casts, only a trace tells; families count the casts around norms.
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
    built = models.build(Workload(fixture("transformer"), 64, 8), Shards(batches, ones, ones, ones, 0 * ones))
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
    assert traced.pieces(trace) >= 4


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
    ("damage", "told"),
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
def test_a_damaged_document_is_one_clear_error(damage: Callable[[dict[str, Any]], None], told: str) -> None:
    value = json.loads((GRAPHS / "transformer.json").read_text())
    damage(value)
    with pytest.raises(SpecError, match=told) as caught:
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


onnx = pytest.importorskip("onnx")


class Sketch:
    """An ONNX graph under construction; every method returns the name of its tensor."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        values = np.zeros(shape, np.float32)
        self.weights.append(onnx.numpy_helper.from_array(values, name))
        return name

    def constant(self, value: Any) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(onnx.numpy_helper.from_array(np.array(value), name))
        return name

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def save(self, path: Path, output: str, inputs: tuple[str, int, list[Any]]) -> Path:
        made = onnx.helper.make_graph(
            self.nodes, "sketch", [onnx.helper.make_tensor_value_info(*inputs)],
            [onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None)], self.weights,
        )  # fmt: skip
        model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 20)])
        onnx.save(model, str(path))
        return path


def gpt_in_onnx(path: Path, dims: list[Any], opening: str = "Gather") -> Path:
    """The GPT above as exporters write it: GELU by erf, attention by products, shapes computed from shapes."""
    s, hidden, heads = Sketch(), 128, 4
    table = s.weight(512, hidden)
    x = s.add("Add", s.add(opening, table, "ids"), s.weight(64, hidden))
    for _ in range(2):
        y = s.add("LayerNormalization", x, s.weight(hidden), s.weight(hidden))
        parts = []
        batch = s.add("Gather", s.add("Shape", y), s.constant(np.int64(0)))
        sizes = [s.add("Unsqueeze", batch, s.constant(np.array([0]))), s.constant(np.array([-1, heads, 32]))]
        shape = s.add("Concat", *sizes, axis=0)
        for order in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            linear = s.add("Add", s.add("MatMul", y, s.weight(hidden, hidden)), s.weight(hidden))
            parts.append(s.add("Transpose", s.add("Reshape", linear, shape), perm=order))
        scores = s.add("Div", s.add("MatMul", parts[0], parts[1]), s.constant(np.float32(5.66)))
        mask = s.constant(np.triu(np.full((64, 64), -1e9, np.float32), 1))
        y = s.add("MatMul", s.add("Softmax", s.add("Add", scores, mask)), parts[2])
        y = s.add("Reshape", s.add("Transpose", y, perm=[0, 2, 1, 3]), s.constant(np.array([0, 0, hidden])))
        x = s.add("Add", x, s.add("Add", s.add("MatMul", y, s.weight(hidden, hidden)), s.weight(hidden)))
        y = s.add("LayerNormalization", x, s.weight(hidden), s.weight(hidden))
        y = s.add("Add", s.add("MatMul", y, s.weight(hidden, 512)), s.weight(512))
        bell = s.add("Add", s.add("Erf", s.add("Div", y, s.constant(np.float32(1.4)))), s.constant(np.float32(1)))
        y = s.add("Mul", s.add("Mul", y, bell), s.constant(np.float32(0.5)))
        x = s.add("Add", x, s.add("Add", s.add("MatMul", y, s.weight(512, hidden)), s.weight(hidden)))
    x = s.add("LayerNormalization", x, s.weight(hidden), s.weight(hidden))
    logits = s.add("MatMul", x, s.add("Transpose", table, perm=[1, 0]))
    return s.save(path, logits, ("ids", onnx.TensorProto.INT64, dims))


def resnet_in_onnx(path: Path) -> Path:
    s = Sketch()

    def unit(x: str, inputs: int, outputs: int, kernel: int, stride: int) -> str:
        pads = [kernel // 2] * 4
        x = s.add("Conv", x, s.weight(outputs, inputs, kernel, kernel), strides=[stride] * 2, pads=pads)
        running = [s.constant(np.zeros(outputs, np.float32)) for _ in range(2)]
        return s.add("BatchNormalization", x, s.weight(outputs), s.weight(outputs), *running)

    x = s.add("Relu", unit("image", 3, 64, 7, 2))
    x = s.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    before = 64
    for width in (64, 64, 128, 128, 256, 256, 512, 512):
        stride = 1 if width == before else 2
        y = unit(s.add("Relu", unit(x, before, width, 3, stride)), width, width, 3, 1)
        x = s.add("Relu", s.add("Add", y, x if width == before else unit(x, before, width, 1, stride)))
        before = width
    x = s.add("Gemm", s.add("Flatten", s.add("GlobalAveragePool", x)), s.weight(1000, 512), s.weight(1000), transB=1)
    return s.save(path, x, ("image", onnx.TensorProto.FLOAT, ["batch", 3, 224, 224]))


@pytest.mark.parametrize(
    ("dims", "sequence"), [(["batch", 64], None), ([3, 64], None), (["batch", "tokens"], 64), (["batch", 64], 64)]
)
def test_an_onnx_transformer_does_the_work_of_its_family(tmp_path: Path, dims: list[Any], sequence: int | None) -> None:
    model = traced.model("gpt", onnx_file.read(gpt_in_onnx(tmp_path / "gpt.onnx", dims), sequence))
    plain = Model("gpt", "decoder", 2, 128, 4, 4, 32, 512, 512, positions=64)
    assert model.trace is not None
    assert model.trace.sequence == 64
    for how in ({}, {"training": False}, {"attention": "eager"}):
        assert flops(model, 64, **how) == pytest.approx(flops(plain, 64, **how), rel=0.01)
    assert models.parameters(Workload(model, 64, 8)) == models.parameters(Workload(plain, 64, 8))
    assert kept(model, 64) == pytest.approx(kept(plain, 64), rel=0.15)


def test_an_onnx_resnet_does_the_work_of_its_family(tmp_path: Path) -> None:
    model, preset = (
        traced.model("resnet", onnx_file.read(resnet_in_onnx(tmp_path / "r.onnx"))),
        models.preset("resnet-18"),
    )
    assert flops(model, 1) == pytest.approx(flops(preset, 1), rel=0.01)
    assert models.parameters(Workload(model, 1, 8)) == pytest.approx(models.parameters(Workload(preset, 1, 8)))


def test_the_command_line_reads_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(gpt_in_onnx(tmp_path / "gpt.onnx", ["batch", "tokens"]))
    arguments = ["advise", path, "--batch", "64", "--gpus", "a100-80:8", "-o", "csv"]
    assert main([*arguments, "--seq", "64"]) == 0
    assert "a100-80" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "leaves tokens open: say how many tokens" in capsys.readouterr().err


def test_what_cannot_be_read_as_onnx_is_one_clear_error(tmp_path: Path) -> None:
    text, empty = tmp_path / "text.onnx", tmp_path / "empty.onnx"
    text.write_text("this is no protobuf")
    empty.write_bytes(b"")
    for path in (text, empty):
        with pytest.raises(SpecError, match="is not an ONNX file"):
            onnx_file.read(path)
    with pytest.raises(SpecError, match="cannot be read"):
        onnx_file.read(tmp_path / "missing.onnx")
    with pytest.raises(SpecError, match="dynamic dimensions ids\\[2\\], tokens beside the batch"):
        onnx_file.read(gpt_in_onnx(tmp_path / "open.onnx", ["batch", "tokens", None]), 64)
    with pytest.raises(SpecError, match="is fixed at 64 tokens"):
        onnx_file.read(gpt_in_onnx(tmp_path / "fixed.onnx", ["batch", 64]), 128)


def test_a_size_below_one_is_symbolic(tmp_path: Path) -> None:
    found = onnx_file.read(gpt_in_onnx(tmp_path / "gpt.onnx", [-1, -1]), 64)
    assert (found.batch, found.sequence) == (onnx_file.BATCH, 64)
    with pytest.raises(SpecError, match=r"leaves ids\[1\] open"):
        onnx_file.read(tmp_path / "gpt.onnx")


@pytest.mark.parametrize(
    ("dims", "kind", "content"), [([0, 0], 1, b""), ([4], 1, b"123"), ([2, 2], 1, b"123"), ([4], 99, b"1234")]
)
def test_a_damaged_tensor_is_named(tmp_path: Path, dims: list[int], kind: int, content: bytes) -> None:
    s = Sketch()
    s.weights.append(onnx.TensorProto(name="w", dims=dims, data_type=kind, raw_data=content))
    path = s.save(tmp_path / "damaged.onnx", s.add("Add", "x", "w"), ("x", onnx.TensorProto.FLOAT, ["batch", 4]))
    with pytest.raises(SpecError, match="has a damaged tensor 'w'") as caught:
        onnx_file.read(path)
    assert "\n" not in str(caught.value)


def test_without_onnx_the_reader_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(SpecError, match=r"pip install tilecast\[onnx\]"):
        onnx_file.parse(b"", "any.onnx")


def test_an_unknown_onnx_operator_is_named_and_counted(tmp_path: Path) -> None:
    s = Sketch()
    x = s.add("NonMaxSuppression", s.add("NonMaxSuppression", "image", "image"), "image")
    path = s.save(tmp_path / "odd.onnx", x, ("image", onnx.TensorProto.FLOAT, ["batch", 4]))
    with pytest.raises(SpecError, match=r"NonMaxSuppression \(2x\); supported: Abs, ") as caught:
        onnx_file.read(path)
    assert "\n" not in str(caught.value)


def test_the_tables_of_operators_lead_to_kinds_that_exist() -> None:
    for table in (onnx_file._TABLE, torch_operators.KINDS):
        assert set(table.values()) <= OPERATORS.keys()


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
    assert flops(traced.model(name, now), BUILT_IN[name][1]) == flops(fixture(name), BUILT_IN[name][1])


@torch_is_here
@pytest.mark.parametrize(("target", "built_in"), [("modules:deep_transformer", GPT), ("modules:deep_llama", LLAMA)])
def test_layers_that_repeat_are_copied(target: str, built_in: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GRAPHS)
    short = torch_export.trace(target)
    with monkeypatch.context() as patched:
        patched.setattr(repeats, "FEWEST_LAYERS", 1000)
        whole = torch_export.trace(target)
    assert [one.kind for one in short.operators] == [one.kind for one in whole.operators]
    for model in (traced.model("short", short), traced.model("whole", whole)):
        assert models.parameters(Workload(model, 64, 8)) == models.parameters(Workload(traced.model("", whole), 64, 8))
        assert flops(model, 64) == flops(traced.model("", whole), 64)
        assert kept(model, 64) == kept(traced.model("", whole), 64)


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
    found = torch_export.trace(f"modules:{target}")
    varying = set(found.inputs)
    varying.update(name for one in found.operators if varying & set(one.inputs) for name in one.outputs)
    assert [one.kind for one in found.operators if varying & set(one.inputs)] == kinds
    assert sum(prod(found.shapes[name]) for name in found.parameters) == parameters


@torch_is_here
@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("modules", "names no function"),
        ("nowhere:build", "cannot be imported"),
        ("modules:rotated", "build\\(\\) failed"),
        ("modules:sorting", r"linalg_inv \(2x\); supported: "),
        ("modules:branching", r"cond \(1x\); supported: "),
    ],
)
def test_what_cannot_be_traced_is_one_clear_error(target: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GRAPHS)
    with pytest.raises(SpecError, match=told) as caught:
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
    found = torch_export.trace(f"timm/{name}")
    assert found.shapes[found.inputs[0]] == (torch_build.TIMM_BATCH, 3, image, image)
    assert sum(prod(found.shapes[one]) for one in found.parameters) == pytest.approx(parameters, rel=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="needs timm")
@pytest.mark.parametrize(
    ("target", "told"),
    [("timm/resnet18@0", "no size"), ("timm/resnet18@x", "no size"), ("timm/", "no such"), ("timm/resnet", "no such")],
)
def test_what_timm_has_not_is_one_clear_error(target: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        torch_export.trace(target)


@torch_is_here
def test_without_timm_the_tracer_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(SpecError, match=r"needs timm; .*tilecast\[vision\]"):
        torch_export.trace("timm/resnet18")


EXAMPLE = Path(__file__).parent.parent / "examples" / "graphs" / "transformer.yaml"


def test_the_example_holds_a_traced_module_and_is_advised(capsys: pytest.CaptureFixture[str]) -> None:
    job, config_map = documents.load(EXAMPLE.read_text())
    assert config_map["data"]["graph.json"] == (GRAPHS / "transformer.json").read_text()
    assert main(["advise", str(EXAMPLE), "--gpus", "a100-80:8", "-o", "json"]) == 0
    in_a_job = json.loads(capsys.readouterr().out)
    bare = [str(GRAPHS / "transformer.json"), "--batch", str(job["spec"]["training"]["globalBatchSize"])]
    assert main(["advise", *bare, "--gpus", "a100-80:8", "-o", "json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["recommendation"]["stepSeconds"] == in_a_job["recommendation"]["stepSeconds"]


def stored(content: bytes, **training: Any) -> Request:
    """What a job asks for whose graph is that."""
    model = {"graphRef": {"configMapKeyRef": {"name": "m", "key": "g"}}}
    spec = {"model": model, "training": {"globalBatchSize": 8, **training}}
    job = {"apiVersion": "tilecast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": spec}
    return training_job.read(job, {"m": {"binaryData": {"g": base64.b64encode(content).decode()}}})


def test_a_graph_in_a_job_says_its_sequence_length() -> None:
    content = (GRAPHS / "transformer.json").read_bytes()
    assert stored(content).workload.sequence_length == stored(content, sequenceLength=64).workload.sequence_length == 64
    with pytest.raises(SpecError, match=r"spec.training.sequenceLength: m was traced with 64 tokens.*leave it out"):
        stored(content, sequenceLength=128)


def test_adapters_do_not_go_into_a_graph() -> None:
    workload = stored((GRAPHS / "transformer.json").read_bytes(), loraRank=8).workload
    with pytest.raises(SpecError, match=r"training.loraRank: m is of family traced, which has no adapters"):
        models.build(workload, Shards(ONE, ONE, ONE, ONE, 0 * ONE))


def test_a_graph_in_a_job_may_be_an_onnx_file(tmp_path: Path) -> None:
    path = gpt_in_onnx(tmp_path / "gpt.onnx", ["batch", "tokens"])
    found = stored(path.read_bytes(), sequenceLength=64).workload.model
    assert flops(found, 64) == flops(traced.model("gpt", onnx_file.read(path, 64)), 64)
    with pytest.raises(SpecError, match=r"spec.training.sequenceLength: is missing; .* leaves tokens open"):
        stored(path.read_bytes())


def test_an_onnx_file_without_onnx_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = gpt_in_onnx(tmp_path / "gpt.onnx", ["batch", "tokens"]).read_bytes()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(SpecError) as caught:
        stored(content, sequenceLength=64)
    assert caught.value.field == "spec.model.graphRef.configMapKeyRef.key"
    assert "onnx, which is not installed" in caught.value.problem and "tilecast trace" in caught.value.remedy
    assert "\n" not in str(caught.value)


def test_an_onnx_file_becomes_a_graph_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = gpt_in_onnx(tmp_path / "gpt.onnx", ["batch", "tokens"]), tmp_path / "graph.json"
    assert main(["trace", str(path), "--seq", "64", "-o", str(out)]) == 0
    found, direct = stored(out.read_bytes()).workload.model, traced.model("gpt", onnx_file.read(path, 64))
    assert flops(found, 64) == flops(direct, 64)
    assert kept(found, 64) == kept(direct, 64)
    assert seconds(found, 64) == seconds(direct, 64)
    assert models.parameters(Workload(found, 64, 8)) == models.parameters(Workload(direct, 64, 8))
    assert main(["trace", "my_module:build", "--seq", "64", "-o", str(out)]) == 2
    assert "--seq: is for an ONNX file" in capsys.readouterr().err
