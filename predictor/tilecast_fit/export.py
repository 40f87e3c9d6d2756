"""Trained networks and ceilings as one ONNX file that describes itself.

The concave half of the units, min(z, 0) = -max(-z, 0), is written as ordinary ReLUs by turning signs: the
columns that lead into those units and the rows that lead out of them are negated. Standardisation is folded
into the weights, and every bias of a (die, case) pair is one row of a table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tilecast.kernels.utilization import FORMAT, Description
from tilecast.spec import Floats
from tilecast_fit.network import ALGORITHMS, BOTTLENECKS, SCALE, Trained, biases

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
    for layer, turn, columns in (("1", sign, "w1"), ("2", SCALE, "s2"), ("3", SCALE, None)):
        table = biases(net, layer) * turn
        matrices[f"b{layer}"] = table - net.mean @ matrices[columns] if columns else table
    return matrices


def write(path: Path, networks: Mapping[str, Trained], description: Description) -> None:
    """Write the model file.

    Args:
        path: file to create or replace.
        networks: trained networks by kind.
        description: what the file says of itself; must name the same kinds.
    """
    nodes, weights, inputs, outputs = [], [], [], []
    for kind, net in networks.items():
        for name, values in _folded(net).items():
            weights.append(numpy_helper.from_array(values.astype(np.float32), f"{kind}_{name}"))
        inputs.append(
            helper.make_tensor_value_info(f"{kind}_columns", TensorProto.FLOAT, ["N_" + kind, len(net.names)])
        )
        inputs.append(helper.make_tensor_value_info(f"{kind}_context", TensorProto.INT64, ["N_" + kind]))
        outputs.append(helper.make_tensor_value_info(f"{kind}_log2_cycles", TensorProto.FLOAT, ["N_" + kind]))
        for name, shape in (("flat", [-1]), ("grid", [-1, ALGORITHMS, BOTTLENECKS])):
            weights.append(numpy_helper.from_array(np.array(shape, np.int64), f"{kind}_{name}"))

        def node(op: str, *names: str, kind: str = kind, **attributes: Any) -> None:
            full = [f"{kind}_{name}" for name in names]
            nodes.append(helper.make_node(op, full[:-1], full[-1:], **attributes))

        for layer in "123":
            node("Gather", f"b{layer}", "context", f"bias{layer}")
        node("MatMul", "columns", "w1", "xw1")
        node("Add", "xw1", "bias1", "z")
        node("Relu", "z", "h")
        node("MatMul", "h", "w2", "hw2")
        node("MatMul", "columns", "s2", "xs2")
        node("Add", "hw2", "xs2", "sum")
        node("Add", "sum", "bias2", "values")
        node("Reshape", "values", "grid", "bottlenecks")
        node("ReduceMax", "bottlenecks", "slowest", axes=[2], keepdims=0)
        node("ReduceMin", "slowest", "fastest", axes=[1], keepdims=1)
        node("Add", "fastest", "bias3", "total")
        node("Reshape", "total", "flat", "log2_cycles")
    graph = helper.make_graph(nodes, "tilecast_utilization", inputs, outputs, weights)
    model = helper.make_model(graph, producer_name="tilecast_fit", opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = 8
    text = description.model_dump(exclude={"format"})
    helper.set_model_props(model, {"format": FORMAT, "description": json.dumps(text)})
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
