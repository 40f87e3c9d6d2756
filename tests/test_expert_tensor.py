"""Expert tensor parallelism: neighbouring ranks that share each expert."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilecast import memory, search, zoo
from tilecast.advice.enumeration import enumerate_partial_plan
from tilecast.cli import main
from tilecast.graph import Graph, Shards
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.search.enumeration import PlanLimits
from tilecast.spec import PartialPlan, Plan, Plans, SpecError, Workload
from tilecast.step.passes import LayerCollectives
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.modules import list_modules_of_collective

H100, GB200 = find_gpu("h100-sxm"), find_gpu("gb200")
POOL = Pool("h100", H100, 8, 16, find_link(H100.intra_link), find_link("infiniband-ndr-8x400"))
GROK = Workload(zoo.find_preset("grok-1"), 8192, 1024, framework="megatron")
WHOLE = Plan(data=32, tensor=4, expert=8, sequence_parallel=True, gradient_accumulation=32)
SHARED = replace(WHOLE, expert_tensor=4)
JOB = ["advise", "qwen3-30b-a3b", "--seq", "4096", "--batch", "64", "--gpus", "h100-sxm:16", "--max-gpus", "16"]
REST = "zero=1,sp=1,mb=1,ac=full"


def graphs() -> tuple[zoo.ShardedGraph, Graph]:
    sharded = zoo.build_sharded_graph(GROK, Plans.from_plans(WHOLE, SHARED))
    return sharded, sharded.graph


def products(place: int) -> dict[str, np.ndarray]:
    sharded, graph = graphs()
    row = sharded.index[place]
    return {
        op.name: op.table.dims[row]
        for op in graph.layers[0].ops
        if op.name in ("experts.up", "experts.down", "experts.activation")
    }


def test_a_shared_expert_multiplies_a_slice_of_the_weights_with_the_tokens_of_all_sharers() -> None:
    whole, shared = products(0), products(1)
    assert np.prod(whole["experts.up"]) == np.prod(shared["experts.up"])
    batch, m, n, k = whole["experts.up"][:4]
    assert shared["experts.up"][:4].tolist() == [batch, 4 * m, n / 4, k]
    batch, m, n, k = whole["experts.down"][:4]
    assert shared["experts.down"][:4].tolist() == [batch, 4 * m, n, k / 4]
    np.testing.assert_array_equal(whole["experts.activation"], shared["experts.activation"])


def test_sharers_hold_a_slice_each_and_as_many_replicas_less() -> None:
    sharded, graph = graphs()
    whole, shared = graph.layers[0].expert_parameters[sharded.index]
    assert whole == 4 * shared
    plans = Plans.from_plans(WHOLE, SHARED)
    assert plans.expert_replicas.tolist() == [16, 4]
    bill = memory.footprint(GROK, sharded, plans)
    assert bill.parameters[1] < bill.parameters[0] / 3


def test_tokens_are_gathered_and_scattered_in_both_passes() -> None:
    sharded, graph = graphs()
    calls = [call for call in graph.layers[0].collectives if call.group == "expert_tensor"]
    both = ("all_gather", "reduce_scatter")
    assert [(call.phase, call.collective) for call in calls] == [
        (phase, collective) for phase in ("forward", "backward") for collective in both
    ]
    sent = next(call for call in graph.layers[0].collectives if call.group == "expert").size_bytes
    assert all(call.size_bytes[sharded.index[1]] == 4 * sent[sharded.index[1]] for call in calls)
    priced = LayerCollectives(sharded, Plans.from_plans(WHOLE, SHARED), POOL)
    assert all(priced.seconds(call)[0] == 0 < priced.seconds(call)[1] for call in calls)


def test_sharers_are_neighbours_so_that_the_experts_of_a_token_lie_on_other_nodes() -> None:
    sharded, graph = graphs()
    priced = LayerCollectives(sharded, Plans.from_plans(WHOLE, SHARED), POOL)
    sent = next(call for call in graph.layers[0].collectives if call.group == "expert")
    inside, across = priced.seconds(sent)
    assert across > 2 * inside


def test_the_shared_expert_is_split_over_tensor_ranks_as_a_dense_layer() -> None:
    """Every tensor rank was once billed the whole weights (Megatron-Core: SharedExpertMLP)."""
    job = Workload(zoo.find_preset("deepseek-v3"), 4096, 256, framework="megatron")
    one, two = np.ones(3, np.int64), 2 * np.ones(3, np.int64)
    tensor = np.array([1, 2, 4], np.int64)
    shards = Shards(two, tensor, one, one, sequence_parallel=(tensor > 1).astype(np.int64))
    without = replace(job, model=job.model.with_dimensions(shared_ffn_hidden=0))
    block, rest = (zoo.build(one, shards).layers[-1] for one in (job, without))
    dims, hidden = job.model.get_dimensions(Transformer), job.model.hidden
    whole = 3.0 * hidden * dims.shared_ffn_hidden
    np.testing.assert_allclose(block.parameters - rest.parameters, whole / tensor)
    kept = np.asarray(block.activation_bytes) - np.asarray(rest.activation_bytes)
    np.testing.assert_allclose(kept[0] * tensor, kept[0][0])
    ups = next(op for op in block.ops if op.name == "experts.shared-up" and op.phase == "forward")
    np.testing.assert_allclose(ups.table.dims[:, 1], 2 * 4096)
    np.testing.assert_allclose(ups.table.dims[:, 2] * tensor, 2 * dims.shared_ffn_hidden)
    calls = {call.name.removeprefix("experts.shared.") for call in block.collectives if "shared" in call.name}
    assert {"gather", "scatter", "gather.gradient", "scatter.gradient"} < calls
    assert list_modules_of_collective("experts.shared.gather") == {"moe", "shared_experts"}
    assert not any("shared" in call.name for call in rest.collectives)


@pytest.mark.parametrize(("framework", "found"), [("megatron", {1, 4}), ("torchtitan", {1}), ("deepspeed", {1})])
def test_the_search_shares_experts_where_the_framework_does(framework: str, found: set[int]) -> None:
    job = replace(GROK, framework=framework)
    plans = search.enumerate_plans(job, POOL, PlanLimits(gpus=16, max_tensor=4))
    assert {*plans.expert_tensor[plans.tensor == 4].tolist()} == found
    shared = plans.take(plans.expert_tensor > 1)
    assert not np.any(shared.data * shared.tensor % (shared.expert * shared.expert_tensor))
    dense = replace(job, model=zoo.find_preset("llama-3-8b"))
    assert {*search.enumerate_plans(dense, POOL, PlanLimits(gpus=64)).expert_tensor.tolist()} == {1}


def test_eight_large_experts_fit_where_their_slices_do() -> None:
    pool = Pool("gb200", GB200, 4, 32, find_link(GB200.intra_link), find_link("infiniband-ndr-4x400"))
    plans = Plans.from_plans(replace(WHOLE, zero_stage=1), replace(SHARED, zero_stage=1))
    priced = search.price(GROK, plans, pool)
    assert priced.fits.tolist() == [False, True]


def test_a_stated_degree_is_kept_printed_and_read_again() -> None:
    stated = PartialPlan.parse("dp=4,tp=4,ep=8,etp=2,mb=1", "--plan")
    assert stated.expert_tensor == 2
    plans = enumerate_partial_plan(replace(GROK, global_batch=64), 16, replace(stated, expert=4, data=4), "--plan")
    assert {*plans.expert_tensor.tolist()} == {2}
    text = str(SHARED)
    assert text == "dp32,tp4,sp,ep8,etp4,mb1"
    assert PartialPlan.parse(text, "--plan").expert_tensor == 4


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        ("qwen3-30b-a3b", "tp=4,ep=4,etp=8", "etp=8 with ep=4 does not divide 16 ranks"),
        ("qwen3-30b-a3b", "tp=4,ep=4,etp=3", "etp=3 with ep=4 does not divide 16 ranks"),
        ("llama-3-8b", "tp=4,etp=4", "etp=4 shares experts, of which llama-3-8b has none; leave etp out"),
    ],
)
def test_impossible_degrees_are_refused_in_one_line(
    model: str, plan: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([JOB[0], model, *JOB[2:], "--plan", plan]) == 2
    assert message in capsys.readouterr().err


def test_a_framework_without_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--plan", f"tp=2,ep=4,etp=2,{REST}", "--launch", "deepspeed"]) == 2
    assert "it has no expert tensor parallelism" in capsys.readouterr().err


@pytest.mark.parametrize(("tensor", "degree"), [(2, 1), (2, 2), (1, 2)])
def test_the_launch_line_of_megatron_states_the_degree(
    tensor: int, degree: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = f"tp={tensor},ep=4,etp={degree},{REST if tensor > 1 else REST.replace('sp=1,', '')}"
    assert main([*JOB, "--framework", "megatron", "--plan", plan, "--launch", "megatron"]) == 0
    assert f"--expert-tensor-parallel-size {degree}" in capsys.readouterr().out


def test_a_degree_is_at_least_one() -> None:
    with pytest.raises(SpecError, match="etp=0"):
        PartialPlan.parse("etp=0", "--plan")


BUFFERS = Workload(zoo.find_preset("deepseek-v3"), 4096, 2048, precision="mxfp8", framework="nemo")


@pytest.mark.parametrize("checkpointing", ["none", "mla_up_proj+moe_act", "moe"])
def test_buffers_of_experts_hold_their_room_and_a_stash_holds_its_own_size(checkpointing: str) -> None:
    plan = Plan(data=64, pipeline=4, expert=64, zero_stage=1, gradient_accumulation=32)
    plans = Plans.from_plans(replace(plan, checkpointing=checkpointing))  # type: ignore[arg-type]

    def held(room: float | None, stash: float | None = None) -> tuple[float, float]:
        job = replace(BUFFERS, expert_dispatch="hybridEP", expert_capacity=room, expert_stash=stash)
        bill = memory.footprint(job, zoo.build_sharded_graph(job, plans), plans)
        return float(bill.activations[0]), float(bill.working[0])

    plain, even, some, more = (held(room) for room in (None, 1.0, 1.5, 2.0))
    assert plain == even
    assert more[0] - even[0] == pytest.approx(2 * (some[0] - even[0]))
    assert (some[0] > even[0]) == (checkpointing != "moe")
    # What waits lies in the stash, and one layer at a time in its own buffers.
    small, wide = held(2.0, 1.5), held(3.0, 1.5)
    assert small[0] == wide[0] == pytest.approx(some[0])
    # The first stage has 13 layers of experts behind three dense ones, and four micro-batches in flight.
    slots = (more[0] - even[0]) / (4 * 13)
    if checkpointing == "none":
        assert wide[1] - small[1] == pytest.approx(slots)
    assert wide[1] > small[1] > some[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--expert-capacity", "1.5"], ("expert-capacity", "add expertDispatch: hybridEP")),
        (["--expert-dispatch", "deepEP", "--expert-capacity", "1.5"], ("expert-capacity", "hybridEP")),
        (["--expert-dispatch", "hybridEP", "--expert-stash", "1.5"], ("expert-stash", "expertCapacity")),
        (["--expert-dispatch", "hybridEP", "--expert-capacity", "0.5"], ("expert-capacity", "1")),
        (["--expert-dispatch", "hybridEP", "--expert-capacity", "nan"], ("expert-capacity", "")),
        (["--expert-dispatch", "allGather", "--expert-overlap", "sharedExpert"], ("expert-overlap", "allGather")),
        (["--expert-overlap", "sharedExpert", "--recompute-modules", "shared_experts"], ("overlap", "shared_experts")),
    ],
)
def test_conflicts_of_experts_are_one_line(
    options: list[str], words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB, "--framework", "megatron", *options]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert all(word in error for word in words)


def test_a_framework_without_room_for_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--expert-dispatch", "hybridEP", "--expert-capacity", "1.5"]
    assert main([*JOB, "--framework", "deepspeed", *options]) == 2
    assert main([*JOB, "--framework", "megatron", *options]) == 0
