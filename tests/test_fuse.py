"""Fusion passes: each removes what it states and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilecast import fuse, search, zoo
from tilecast.graph import Graph, Shards
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.spec import EXECUTIONS, Plan, Plans, Workload

ONE = np.ones(1, dtype=np.int64)


def workload(name: str, **how: Any) -> Workload:
    model = zoo.find_preset(name)
    return Workload(model, 512 if model.vocab else 1, 8, **how)


def graph(name: str, **how: Any) -> Graph:
    return zoo.build(workload(name, **how), Shards(ONE, ONE, ONE, ONE, 0 * ONE))


def names(built: Graph) -> set[str]:
    return {op.name for block in built.blocks for op in block.ops}


def moved(built: Graph) -> float:
    return sum(block.repeat * op.count * float(op.table.bytes()[0]) for block in built.blocks for op in block.ops)


def test_every_execution_has_its_passes() -> None:
    for execution in EXECUTIONS:
        assert fuse.passes(workload("gpt2", execution=execution)) <= fuse.PASSES.keys()
    assert fuse.passes(workload("gpt2", precision="fp32", fused_optimizer=False)) == frozenset()
    assert fuse.passes(workload("gpt2", fused_loss=True)) == {"attention", "loss", "optimizer"}
    written = {"elementwise", "norm", "batchnorm", "attention", "optimizer"}
    assert fuse.passes(workload("gpt2", fused_kernels=True)) == written
    assert fuse.passes(workload("gpt2", execution="compiled")) == fuse.PASSES.keys()


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "resnet-50", "t5-base"])
def test_every_pass_moves_fewer_bytes_or_as_many(name: str) -> None:
    eager, compiled = (graph(name, execution=execution) for execution in ("eager", "compiled"))
    assert moved(compiled) < moved(eager)


def test_a_compiler_drops_casts_copies_and_the_fp32_loss() -> None:
    eager, compiled = (
        names(graph("gpt2", framework="ddp", execution=execution)) for execution in ("eager", "compiled")
    )
    assert {"attention.norm.cast", "head.loss.to-fp32", "mlp.residual.dropout"} <= eager - compiled
    layout = {name for name in names(graph("resnet-50", precision="tf32")) if name.endswith(".layout")}
    assert layout
    assert not layout & names(graph("resnet-50", precision="tf32", execution="compiled"))


def test_hand_written_kernels_keep_the_frameworks_loss() -> None:
    kernels = names(graph("gpt2", framework="ddp", fused_kernels=True))
    assert "head.loss.to-fp32" in kernels and "attention.norm.cast" not in kernels


@pytest.mark.parametrize("name", ["gpt2", "bert-large", "llama-3.1-8b"])
def test_autocast_moves_more_than_pure_16_bits_and_less_than_fp32(name: str) -> None:
    """It keeps norms, softmax and the residual stream in FP32, and casts what products read."""
    facts = [{"precision": "bf16", "weights": "pure"}, {"precision": "bf16"}, {"precision": "fp32"}]
    graphs = [graph(name, framework="ddp", attention="eager", **each) for each in facts]
    pure, mixed, whole = (moved(one) for one in graphs)
    assert pure < mixed < whole
    casts = [{op for op in names(one) if op.endswith(".cast")} for one in graphs]
    assert not casts[0] and not casts[2] and "mlp.norm.cast" in casts[1]


def test_each_product_casts_what_it_reads() -> None:
    job = graph("llama-3.1-8b", framework="ddp", precision="bf16")
    count = {op.name: op.count for op in job.layers[0].ops if op.name.endswith(".cast")}
    assert count == {"attention.norm.cast": 3.0, "mlp.norm.cast": 2.0}


def test_fused_attention_never_writes_the_scores() -> None:
    flash, eager = (graph("gpt2", attention=kind) for kind in ("flash", "eager"))
    assert "attention.softmax" in names(eager) - names(flash)
    assert flash.layers[0].activation_bytes[0] < eager.layers[0].activation_bytes[0]


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw", "lamb"])
def test_a_fused_optimizer_moves_less(optimizer: str) -> None:
    gpu = find_gpu("a100-80")
    pool = Pool("a100", gpu, 1, 1, find_link(gpu.intra_link), find_link("ethernet-100"))
    fused, stepwise = (
        float(
            search.price(
                workload("gpt2", optimizer=optimizer, fused_optimizer=is_fused),
                Plans.from_plans(Plan(micro_batch=8)),
                pool,
            ).times.optimizer[0]
        )
        for is_fused in (True, False)
    )
    assert 1.3 < stepwise / fused < 3.0
