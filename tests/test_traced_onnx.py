"""Models read from ONNX files, alone and in a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilecast import zoo
from tilecast.cli import main
from tilecast.model import Model
from tilecast.spec import SpecError, Workload
from tilecast.zoo import traced
from tilecast.zoo.traced import onnx_file, torch_operators
from tilecast.zoo.traced.operators import OPERATORS
from traced_graphs import activation_bytes, flops, seconds, stored

onnx = pytest.importorskip("onnx")


class Sketch:
    """An ONNX graph under construction; its methods return the names of tensors."""

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
    """Write a small GPT as exporters do: GELU by erf, attention by products, shapes computed from shapes."""
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
    model = traced.build_model("gpt", onnx_file.read(gpt_in_onnx(tmp_path / "gpt.onnx", dims), sequence))
    plain = Model("gpt", "decoder", 2, 128, 4, 4, 32, 512, 512, positions=64, dimensions=zoo.Transformer())
    assert model.trace is not None
    assert model.trace.sequence == 64
    for how in ({}, {"training": False}, {"attention": "eager"}):
        assert flops(model, 64, **how) == pytest.approx(flops(plain, 64, **how), rel=0.01)
    assert zoo.count_parameters(Workload(model, 64, 8)) == zoo.count_parameters(Workload(plain, 64, 8))
    assert activation_bytes(model, 64) == pytest.approx(activation_bytes(plain, 64), rel=0.15)


def test_an_onnx_resnet_does_the_work_of_its_family(tmp_path: Path) -> None:
    model, preset = (
        traced.build_model("resnet", onnx_file.read(resnet_in_onnx(tmp_path / "r.onnx"))),
        zoo.find_preset("resnet-18"),
    )
    assert flops(model, 1) == pytest.approx(flops(preset, 1), rel=0.01)
    assert zoo.count_parameters(Workload(model, 1, 8)) == pytest.approx(zoo.count_parameters(Workload(preset, 1, 8)))


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
    trace = onnx_file.read(gpt_in_onnx(tmp_path / "gpt.onnx", [-1, -1]), 64)
    assert (trace.batch, trace.sequence) == (onnx_file.BATCH, 64)
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


def test_a_graph_in_a_job_may_be_an_onnx_file(tmp_path: Path) -> None:
    path = gpt_in_onnx(tmp_path / "gpt.onnx", ["batch", "tokens"])
    model = stored(path.read_bytes(), sequenceLength=64).workload.model
    assert flops(model, 64) == flops(traced.build_model("gpt", onnx_file.read(path, 64)), 64)
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
    trace, direct = stored(out.read_bytes()).workload.model, traced.build_model("gpt", onnx_file.read(path, 64))
    assert flops(trace, 64) == flops(direct, 64)
    assert activation_bytes(trace, 64) == activation_bytes(direct, 64)
    assert seconds(trace, 64) == seconds(direct, 64)
    assert zoo.count_parameters(Workload(trace, 64, 8)) == zoo.count_parameters(Workload(direct, 64, 8))
    assert main(["trace", "my_module:build", "--seq", "64", "-o", str(out)]) == 2
    assert "--seq: is for an ONNX file" in capsys.readouterr().err
