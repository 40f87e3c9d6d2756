"""Graphs of traced modules and ONNX files, and counts over them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from tilecast import search, zoo
from tilecast.advice import Request
from tilecast.api import training_job
from tilecast.graph import Shards
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.model import Model
from tilecast.spec import Plan, Plans, Workload
from tilecast.zoo import traced
from tilecast.zoo.traced import document

GRAPHS = Path(__file__).parent / "graphs"
ONE = np.ones(1, dtype=np.int64)


def fixture(name: str) -> Model:
    return traced.build_model(name, document.read(json.loads((GRAPHS / f"{name}.json").read_text()), name))


def graph(model: Model, sequence: int, **how: Any) -> Any:
    return zoo.build(Workload(model, sequence, 8, **how), Shards(4 * ONE, ONE, ONE, ONE, 0 * ONE))


def flops(model: Model, sequence: int, **how: Any) -> float:
    blocks = graph(model, sequence, **how).blocks
    return sum(
        block.repeat * op.count * float(op.table.flops()[0])
        for block in blocks
        for op in block.ops
        if op.table.kind[0] <= 2
    )


def activation_bytes(model: Model, sequence: int, mode: int = 0, **how: Any) -> float:
    blocks = graph(model, sequence, **how).blocks
    return sum(block.repeat * float(np.broadcast_to(block.activation_bytes, (3, 1))[mode, 0]) for block in blocks)


def seconds(model: Model, sequence: int, **how: Any) -> float:
    gpu = find_gpu("a100-80")
    pool = Pool("a100", gpu, 1, 1, find_link(gpu.intra_link), find_link("ethernet-100"))
    priced = search.price(Workload(model, sequence, 64, **how), Plans.from_plans(Plan(micro_batch=64)), pool)
    return float(priced.times.compute[0])


def stored(content: bytes, **training: Any) -> Request:
    """Return the request of a job whose graph has this content."""
    model = {"graphRef": {"configMapKeyRef": {"name": "m", "key": "g"}}}
    spec = {"model": model, "training": {"globalBatchSize": 8, **training}}
    job = {"apiVersion": "tilecast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}, "spec": spec}
    return training_job.read_request(job, {"m": {"binaryData": {"g": base64.b64encode(content).decode()}}})
