"""Choice of the implementation of fused attention, and its cost."""

from __future__ import annotations

import numpy as np
import pytest

from tilecast import constants, kernels, zoo
from tilecast.graph import KernelTable, Op
from tilecast.hardware import find_gpu, gpus
from tilecast.spec import Workload
from tilecast.step.blocks import fused_attention, operator_seconds


def workload(**facts: object) -> Workload:
    return Workload(zoo.preset("gpt2-xl"), 1024, 8, precision="fp16", **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpu", "facts", "name"),
    [
        ("v100-sxm", {}, "memory_efficient"),
        ("t4", {}, "memory_efficient"),
        ("t4", {"fused_kernels": True}, "memory_efficient"),
        ("a100-80", {}, "flash2"),
        ("a100-80", {"fused_kernels": True}, "flash2"),
        ("l40s", {}, "flash2"),
        ("h100-sxm", {}, "flash2"),
        ("h100-sxm", {"fused_kernels": True}, "native"),
        ("h100-sxm", {"execution": "xla"}, "native"),
        ("b200", {"fused_kernels": True}, "native"),
    ],
)
def test_a_gpu_and_its_framework_decide_what_runs(gpu, facts, name):
    kernel = fused_attention(workload(**facts), find_gpu(gpu), constants.shipped_constants())
    assert kernel is not None
    assert kernel.name == name


@pytest.mark.parametrize("gpu", list(gpus()))
def test_what_comes_first_is_never_slower(gpu):
    for phase in ("forward", "backward"):
        factors = [
            one.time_factor(find_gpu(gpu), phase)
            for one in constants.shipped_constants().attention
            if one.runs_on(find_gpu(gpu), native=True)
        ]
        assert factors[:1] == sorted(factors)[:1]


@pytest.mark.parametrize(
    ("name", "phase", "times"),
    [
        ("h100-sxm", "forward", 1.9),
        ("h100-sxm", "backward", 1.75),
        ("b200", "forward", 3.8),
        ("gb300", "backward", 3.5),
        ("rtx-5090", "forward", 1.0),
    ],
)
def test_an_operator_takes_as_much_longer_as_its_implementation(name, phase, times):
    gpu = find_gpu(name)
    dims = {"batch": 8, "heads": 25, "kv_heads": 25, "seq_q": 1024, "seq_kv": 1024, "head_dim": 64, "causal": 1}
    op = Op("attention", KernelTable.of("attention", "fp16", **dims, backward=float(phase == "backward")), phase)
    priced = kernels.predict_kernel_times(op.table, gpu)
    rows = np.arange(1)
    torch, own = (operator_seconds(workload(fused_kernels=fused), op, priced, rows) for fused in (False, True))
    assert torch == pytest.approx(times * own)


def test_the_first_flash_attention_uses_hopper_as_little_as_the_second() -> None:
    first, second = (
        next(one for one in constants.shipped_constants().attention if one.name == f"flash{n}") for n in (1, 2)
    )
    for phase in ("forward", "backward"):
        on = {gpu: first.time_factor(find_gpu(gpu), phase) for gpu in ("a100-80", "h100-sxm")}
        assert on["a100-80"] > 1
        assert on["h100-sxm"] / on["a100-80"] == pytest.approx(second.time_factor(find_gpu("h100-sxm"), phase))
