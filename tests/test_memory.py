"""The memory bill against the closed forms of arXiv 2205.05198 and arXiv 1910.02054."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast import memory, models
from tilecast.spec import CHECKPOINTING, Model, Plan, Plans, Workload

GIB = 2**30
GPT_22B = Model("gpt-22b", "decoder", 48, 6144, 64, 64, 96, 24576, 51200, positions=2048, dropout=True)


def layer_activations(workload: Workload, plan: Plan) -> float:
    """Bytes that all layers keep for one micro-batch."""
    sharded = models.shard(workload, Plans.of(plan))
    mode = CHECKPOINTING.index(plan.checkpointing)
    return float(sum(block.repeat * block.activation_bytes[mode][0] for block in sharded.graph.layers))


@pytest.mark.parametrize(
    ("checkpointing", "sequence_parallel", "gib"),
    [
        # Table 2 of arXiv 2205.05198 for L 48, h 6144, a 64, s 2048, b 4, t 8.
        ("none", False, 59.25),
        ("none", True, 39.56),
        ("selective", False, 29.25),
        ("selective", True, 9.56),
        ("full", False, 4.50),
    ],
)
def test_activations_of_the_22b_example(checkpointing: str, sequence_parallel: bool, gib: float) -> None:
    workload = Workload(GPT_22B, 2048, 4, "fp16", attention="eager")
    plan = Plan(tensor=8, micro_batch=4, checkpointing=checkpointing, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
    assert layer_activations(workload, plan) / GIB == pytest.approx(gib, rel=0.01)


def bill(workload: Workload, plan: Plan) -> memory.Footprint:
    plans = Plans.of(plan)
    return memory.footprint(workload, models.shard(workload, plans), plans)


@pytest.mark.parametrize(
    ("zero_stage", "bytes_per_parameter"),
    # ZeRO, figure 1: 16 without, 4 + 12/d, 2 + 14/d, 16/d with stages 1, 2, 3.
    [(0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)],
)
def test_model_states_are_those_of_zero(zero_stage: int, bytes_per_parameter: float) -> None:
    workload = Workload(models.preset("gpt2-xl"), 1024, 8, "bf16", optimizer="adam")
    found = bill(workload, Plan(data=8, zero_stage=zero_stage))
    states = float((found.parameters + found.gradients + found.optimizer)[0])
    assert states == pytest.approx(bytes_per_parameter * models.parameters(workload), rel=1e-6)


def test_fp32_adam_takes_sixteen_bytes_a_parameter_and_momentum_twelve() -> None:
    for optimizer, each in (("adam", 16.0), ("momentum", 12.0)):
        workload = Workload(models.preset("resnet-50"), 1, 8, "fp32", optimizer=optimizer)  # type: ignore[arg-type]
        found = bill(workload, Plan(micro_batch=8))
        states = float((found.parameters + found.gradients + found.optimizer)[0])
        assert states == pytest.approx(each * models.parameters(workload))


def test_the_bill_sums_to_its_total() -> None:
    found = bill(Workload(models.preset("llama-2-7b"), 4096, 8), Plan(data=8, zero_stage=3))
    assert sum(found.items(0).values()) == pytest.approx(float(found.total[0]))


@given(
    micro=st.sampled_from([1, 2, 4, 8]),
    data=st.sampled_from([1, 2, 4, 8]),
    stage=st.sampled_from([0, 1, 2]),
    mode=st.sampled_from(["none", "selective", "full"]),
)
def test_more_sharding_and_more_recomputation_never_need_more(micro: int, data: int, stage: int, mode: str) -> None:
    workload = Workload(models.preset("llama-2-7b"), 2048, 64)
    one = Plan(data=data, zero_stage=stage, micro_batch=micro, checkpointing=mode)  # type: ignore[arg-type]
    other = Plan(data=data, zero_stage=stage + 1, micro_batch=micro, checkpointing="full")
    states = [
        found.parameters + found.gradients + found.optimizer for found in (bill(workload, one), bill(workload, other))
    ]
    assert states[1][0] <= states[0][0] * (1 + 1e-12)
    assert bill(workload, other).activations[0] <= bill(workload, one).activations[0]


@pytest.mark.parametrize(
    ("name", "plan", "gpu_gib"),
    [
        ("llama-2-7b", Plan(), 80),
        ("llama-2-70b", Plan(data=8, zero_stage=3), 80),
        ("gpt3-175b", Plan(tensor=8, pipeline=2), 80),
        ("llama-2-13b", Plan(data=8), 40),
        ("gpt2-xl", Plan(), 15),
        ("llama-3.1-405b", Plan(data=64, zero_stage=3, checkpointing="full"), 80),
    ],
)
def test_plans_that_nobody_could_run_do_not_fit(name: str, plan: Plan, gpu_gib: float) -> None:
    workload = Workload(models.preset(name), 2048, 512)
    assert float(bill(workload, plan).total[0]) > gpu_gib * GIB


@pytest.mark.parametrize(
    ("name", "sequence", "plan", "gpu_gib"),
    [
        ("gpt2", 1024, Plan(micro_batch=4), 40),
        ("llama-2-7b", 4096, Plan(data=8, zero_stage=3, checkpointing="full"), 80),
        ("bert-large", 512, Plan(micro_batch=8), 40),
        ("llama-2-70b", 4096, Plan(data=64, zero_stage=3, checkpointing="full"), 80),
    ],
)
def test_plans_that_people_run_fit(name: str, sequence: int, plan: Plan, gpu_gib: float) -> None:
    workload = Workload(models.preset(name), sequence, 512)
    assert float(bill(workload, plan).total[0]) < gpu_gib * GIB


def test_a_table_is_its_rows() -> None:
    workload = Workload(models.preset("llama-2-7b"), 2048, 64)
    rows = [Plan(data=8, zero_stage=stage, micro_batch=micro) for stage in (0, 1, 3) for micro in (1, 2, 4)]
    plans = Plans.of(*rows)
    table = memory.footprint(workload, models.shard(workload, plans), plans).total
    assert np.array_equal(table, np.array([bill(workload, plan).total[0] for plan in rows]))
