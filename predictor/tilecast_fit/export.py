"""Trained networks and ceilings as one ONNX file that describes itself.

The concave half of the units, min(z, 0) = -max(-z, 0), is written as ordinary ReLUs by turning signs: the
columns that lead into those units and the rows that lead out of them are negated. Standardisation is folded
into the weights, and every bias of a (die, case) pair is one row of a table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tilecast.kernels.utilization import FORMAT, Description
from tilecast.spec import Floats
from tilecast_fit.network import Trained

OPSET = 17


def _folded(net: Trained) -> dict[str, Floats]:
    w = net.weights
    width = w["w1"].shape[1]
    sign = np.where(np.arange(width) < width // 2, 1.0, -1.0)
    matrices = {
        "w1": w["w1"] / net.scale[:, None] * sign,
        "w2": sign[:, None] * w["w2"] * sign,
        "s2": w["s2"] / net.scale[:, None] * sign,
        "w3": sign[:, None] * w["w3"],
        "s3": w["s3"] / net.scale[:, None],
    }
    cases = len(net.cases)
    into = {"1": ("w1", sign), "2": ("s2", sign), "3": ("s3", np.ones(1))}
    for layer, (name, turn) in into.items():
        table = w[f"die{layer}"].copy()
        table[:cases] = 0.0
        table = table + w[f"b{layer}"] + np.tile(w[f"case{layer}"], (len(net.dies), 1))
        matrices[f"b{layer}"] = table * turn - net.mean @ matrices[name]
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
        weights.append(numpy_helper.from_array(np.array([-1], np.int64), f"{kind}_flat"))

        def node(op: str, *names: str, kind: str = kind) -> None:
            full = [f"{kind}_{name}" for name in names]
            nodes.append(helper.make_node(op, full[:-1], full[-1:]))

        node("Gather", "b1", "context", "bias1")
        node("Gather", "b2", "context", "bias2")
        node("Gather", "b3", "context", "bias3")
        node("MatMul", "columns", "w1", "xw1")
        node("Add", "xw1", "bias1", "z1")
        node("Relu", "z1", "h1")
        node("MatMul", "h1", "w2", "hw2")
        node("MatMul", "columns", "s2", "xs2")
        node("Add", "hw2", "xs2", "hx2")
        node("Add", "hx2", "bias2", "z2")
        node("Relu", "z2", "h2")
        node("MatMul", "h2", "w3", "hw3")
        node("MatMul", "columns", "s3", "xs3")
        node("Add", "hw3", "xs3", "hx3")
        node("Add", "hx3", "bias3", "z3")
        node("Reshape", "z3", "flat", "log2_cycles")
    graph = helper.make_graph(nodes, "tilecast_utilization", inputs, outputs, weights)
    model = helper.make_model(graph, producer_name="tilecast_fit", opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = 8
    text = description.model_dump(exclude={"format"})
    helper.set_model_props(model, {"format": FORMAT, "description": json.dumps(text)})
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
