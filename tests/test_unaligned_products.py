"""Products on tensor cores whose rows are no whole number of words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilecast import kernels, zoo
from tilecast.constants import shipped_constants
from tilecast.hardware import find_gpu
from tilecast.spec import Execution, Framework, Plan, Plans, Precision, Workload
from tilecast.step.blocks import correction_factors

ALIGNED, PAIRS, ODD = 50304, 50258, 50257


def factors(
    vocabulary: int,
    *,
    framework: Framework | None = "huggingface",
    precision: Precision = "bf16",
    execution: Execution = "eager",
    gpu: str = "h100-sxm",
) -> list[float]:
    """Return the factors on the three products of the output layer of GPT-2 with some vocabulary."""
    model = replace(zoo.find_preset("gpt2"), vocab=vocabulary)
    workload = Workload(
        model, sequence_length=1024, global_batch=16, precision=precision, framework=framework, execution=execution
    )
    sharded = zoo.build_sharded_graph(workload, Plans.from_plans(Plan(micro_batch=16)))
    table, rows = sharded.graph.kernels()
    times = kernels.predict_kernel_times(table, find_gpu(gpu))
    ops = [op for block in sharded.graph.blocks for op in block.ops]
    found = [
        correction_factors(workload, op, times, index).get("alignment.unaligned", np.ones(1))
        for op, index in zip(ops, rows, strict=True)
        if op.name.startswith("head.logits") and op.table.kind[0] == 0
    ]
    return [float(factor[0]) for factor in found]


def test_each_product_of_an_odd_vocabulary_takes_longer() -> None:
    odd = factors(ODD)
    assert len(odd) == 3
    assert min(odd) > 3.0
    assert max(factors(ALIGNED)) == 1.0
    assert all(1.0 <= pair < single for pair, single in zip(factors(PAIRS), odd, strict=True))


@pytest.mark.parametrize("framework", ["megatron", "nemo", "megatron-deepspeed", None])
def test_frameworks_that_pad_the_vocabulary_are_not_slowed(framework: Framework | None) -> None:
    assert max(factors(ODD, framework=framework)) == 1.0


@pytest.mark.parametrize("execution", ["compiled", "xla"])
def test_compilers_pad_products(execution: Execution) -> None:
    assert max(factors(ODD, execution=execution)) == 1.0


def test_products_without_tensor_cores_are_not_slowed() -> None:
    assert max(factors(ODD, precision="fp32")) == 1.0


def test_unaligned_rate_is_that_of_the_constant() -> None:
    gpu, known = find_gpu("h100-sxm"), shipped_constants().unaligned
    model = replace(zoo.find_preset("gpt2"), vocab=ODD)
    workload = Workload(model, sequence_length=1024, global_batch=16, precision="bf16", framework="huggingface")
    sharded = zoo.build_sharded_graph(workload, Plans.from_plans(Plan(micro_batch=16)))
    table, rows = sharded.graph.kernels()
    times = kernels.predict_kernel_times(table, gpu)
    ops = [op for block in sharded.graph.blocks for op in block.ops]
    op, index = next((op, index) for op, index in zip(ops, rows, strict=True) if op.name == "head.logits")
    seconds = times.seconds[index] * correction_factors(workload, op, times, index)["alignment.unaligned"]
    flops = 2.0 * 16 * 1024 * ODD * 768
    assert flops / seconds[0] / gpu.sm_count / gpu.boost_clock_hz == pytest.approx(known)
