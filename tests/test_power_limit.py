"""Products on cards whose power limit bounds a step, but not a single kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilecast import kernels, zoo
from tilecast.constants import shipped_constants
from tilecast.hardware import Gpu, find_gpu
from tilecast.spec import Plan, Plans, Precision, Workload
from tilecast.step.blocks import correction_factors


def factor(gpu: Gpu, precision: Precision = "fp16") -> float:
    """Return the factor for power on a matrix product of a small GPT-2."""
    workload = Workload(zoo.find_preset("gpt2"), sequence_length=1024, global_batch=4, precision=precision)
    sharded = zoo.build_sharded_graph(workload, Plans.from_plans(Plan(micro_batch=4)))
    table, rows = sharded.graph.kernels()
    times = kernels.predict_kernel_times(table, gpu)
    ops = [op for block in sharded.graph.blocks for op in block.ops]
    op, index = next((op, index) for op, index in zip(ops, rows, strict=True) if op.name == "mlp.up")
    found = correction_factors(workload, op, times, index)
    return float(found["power.turing"][0]) if "power.turing" in found else 1.0


def test_power_limit_bounds_the_rate_of_tensor_cores() -> None:
    t4 = find_gpu("t4")
    alone = t4.peak("fp16") * t4.sustained_ratio["fp16"]
    assert alone / factor(t4) * shipped_constants().joules_per_flop["turing"] == pytest.approx(t4.tdp_w)


def test_a_card_of_more_power_is_not_slowed() -> None:
    t4 = find_gpu("t4")
    assert factor(t4) > factor(replace(t4, name="t4-80w", tdp_w=80.0)) > 1.0
    assert factor(replace(t4, name="t4-150w", tdp_w=150.0)) == 1.0


@pytest.mark.parametrize(("name", "precision"), [("t4", "fp32"), ("v100-sxm", "fp16"), ("l4", "fp16")])
def test_other_units_and_architectures_have_no_such_limit(name: str, precision: Precision) -> None:
    assert factor(find_gpu(name), precision) == 1.0
