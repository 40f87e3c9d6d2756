"""Export of trained networks and ceilings to one ONNX file that describes itself.

The concave half of the units, min(z, 0) = -max(-z, 0), is written as ordinary ReLUs with flipped signs: the columns
that lead into those units and the rows that lead out of them are negated. Standardisation is folded into the weights.
Each row of a bias table has the biases of one (die, case) pair.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tilecast.kernels.utilization import FORMAT, ModelDescription
from tilecast.spec import Floats
from tilecast_lab.fit.network import ALGORITHMS, BOTTLENECKS, LARGEST_SHARE, MARGIN, SCALE, Trained, layer_biases

OPSET = 17


def _folded(net: Trained) -> dict[str, Floats]:
    w = net.weights
    width = w["w1"].shape[1]
    sign = np.where(np.arange(width) < width // 2, 1.0, -1.0)
    matrices = {
        "w1": w["w1"] / net.scale[:, None] * sign,
        "w2": SCALE * sign[:, None] * w["w2"],
        "s2": SCALE * w["s2"] / net.scale[:, None],
    }
    for layer, turn, columns in (("1", sign, "w1"), ("2", SCALE, "s2")):
        matrices[f"b{layer}"] = layer_biases(net, layer) * turn - net.mean @ matrices[columns]
    matrices["b3"] = SCALE * layer_biases(net, "3")[:, 0]
    if net.doubled:
        matrices["wt1"] = w["wt1"] / net.tower.scale[:, None]
        matrices["bt1"] = layer_biases(net, "t1") - net.tower.mean @ matrices["wt1"]
        matrices |= {
            "wt2": w["wt2"],
            "bt2": layer_biases(net, "t2"),
            "wt3": w["wt3"][:, 0],
            "bt3": layer_biases(net, "t3")[:, 0],
        }
        matrices |= {"low": net.tower.low, "high": net.tower.high}
        matrices |= {"margin": np.array(MARGIN), "least": np.array(0.0), "most": np.array(LARGEST_SHARE)}
    return matrices


def _nodes(kind: str, net: Trained) -> list[onnx.NodeProto]:
    """Return the operators of one network; every name has its kind as prefix."""
    made: list[onnx.NodeProto] = []

    def node(op: str, *names: str, **attributes: Any) -> None:
        full = [f"{kind}_{name}" for name in names]
        made.append(helper.make_node(op, full[:-1], full[-1:], **attributes))

    for layer in net.layers:
        node("Gather", f"b{layer}", "context", f"bias{layer}")
    node("MatMul", "columns", "w1", "xw1")
    node("Add", "xw1", "bias1", "z")
    node("Relu", "z", "h")
    node("MatMul", "h", "w2", "hw2")
    node("MatMul", "columns", "s2", "xs2")
    node("Add", "hw2", "xs2", "sum")
    node("Add", "sum", "bias2", "values")
    node("Reshape", "values", "grid", "bottlenecks")
    node("ReduceMax", "bottlenecks", "slowest", axes=[3], keepdims=0)
    node("ReduceMin", "slowest", "fastest", axes=[2], keepdims=0)
    node("Add", "fastest", "bias3", "totals")
    if net.doubled:
        _tower(node)
    else:
        node("Reshape", "totals", "flat", "log2_cycles")
    return made


def _tower(node: Callable[..., None]) -> None:
    """Add the operators of a refined family, which follow the totals of a kernel and of its doubles."""
    node("Gather", "totals", "first", "base", axis=0)
    node("Gather", "totals", "others", "doubles", axis=0)
    node("ReduceMin", "doubles", "grown", axes=[0], keepdims=0)
    node("Sub", "grown", "base", "growth")
    node("Sub", "growth", "margin", "kept")
    node("Clip", "kept", "least", "most", "room")
    node("Gather", "columns", "first", "own", axis=0)
    node("Concat", "own", "details", "wide", axis=1)
    node("Max", "wide", "low", "raised")
    node("Min", "raised", "high", "clipped")
    node("MatMul", "clipped", "wt1", "t1")
    node("Add", "t1", "biast1", "t1b")
    node("Relu", "t1b", "h1")
    node("MatMul", "h1", "wt2", "t2")
    node("Add", "t2", "biast2", "t2b")
    node("Relu", "t2b", "h2")
    node("MatMul", "h2", "wt3", "t3")
    node("Add", "t3", "biast3", "t3b")
    node("Sigmoid", "t3b", "share")
    node("Mul", "share", "room", "extra")
    node("Add", "base", "extra", "log2_cycles")


SHIPPED = files("tilecast.kernels").joinpath("weights", "utilization.onnx")


def write(
    path: Path, networks: Mapping[str, Trained], description: ModelDescription, *, shipped_kinds: Sequence[str] = ()
) -> None:
    """Write the model file.

    Args:
        path: file to create or replace.
        networks: trained networks by kind.
        description: description that is stored in the file; must name the same kinds, including `shipped_kinds`.
        shipped_kinds: kinds whose networks are copied from the shipped model.
    """
    nodes, weights, inputs, outputs = [], [], [], []
    for kind, net in networks.items():
        for name, values in _folded(net).items():
            weights.append(numpy_helper.from_array(values.astype(np.float32), f"{kind}_{name}"))
        stack: list[str | int | None] = [1 + net.doubled, "N_" + kind, len(net.names)]
        inputs.append(helper.make_tensor_value_info(f"{kind}_columns", TensorProto.FLOAT, stack))
        inputs.append(helper.make_tensor_value_info(f"{kind}_context", TensorProto.INT64, ["N_" + kind]))
        outputs.append(helper.make_tensor_value_info(f"{kind}_log2_cycles", TensorProto.FLOAT, ["N_" + kind]))
        shapes = {"grid": [1 + net.doubled, -1, ALGORITHMS, BOTTLENECKS]} | ({} if net.doubled else {"flat": [-1]})
        for name, shape in shapes.items():
            weights.append(numpy_helper.from_array(np.array(shape, np.int64), f"{kind}_{name}"))
        if net.doubled:
            inputs.append(
                helper.make_tensor_value_info(f"{kind}_details", TensorProto.FLOAT, ["N_" + kind, net.details])
            )
            for name, rows in (("first", np.array(0)), ("others", np.arange(1, 1 + net.doubled))):
                weights.append(numpy_helper.from_array(rows.astype(np.int64), f"{kind}_{name}"))
        nodes += _nodes(kind, net)
    shipped = onnx.load_from_string(SHIPPED.read_bytes()).graph
    for kind in shipped_kinds:
        nodes += [item for item in shipped.node if item.output[0].startswith(f"{kind}_")]
        for part, all_parts in ((weights, shipped.initializer), (inputs, shipped.input), (outputs, shipped.output)):
            part += [item for item in all_parts if item.name.startswith(f"{kind}_")]
    graph = helper.make_graph(nodes, "tilecast_utilization", inputs, outputs, weights)
    model = helper.make_model(graph, producer_name="tilecast_lab", opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = 8
    text = description.model_dump(exclude={"format"})
    helper.set_model_props(model, {"format": FORMAT, "description": json.dumps(text)})
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
