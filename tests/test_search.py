"""The search is exhaustive, exact under its own model, and agrees with pricing one plan alone."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import kernels, memo, search, zoo
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.inputs.gpu_list import parse_gpu_list
from tilecast.overlap import BucketLimits
from tilecast.recomputation import CHECKPOINTING
from tilecast.search import PlanLimits
from tilecast.spec import Plan, Plans, Schedule, SpecError, Workload, distinct_rows
from tilecast.step import PARTS, placement


def pool(gpu: str = "a100-80", nodes: int = 2, per_node: int = 8) -> Pool:
    facts = find_gpu(gpu)
    return Pool(facts.name, facts, per_node, nodes, find_link(facts.intra_link), find_link("infiniband-hdr-8x200"))


def _is_crowded(micro: int, share: int, pipeline: int) -> bool:
    """Return whether the search leaves out this micro-batch between two powers of two.

    It does if the lower power, or a larger size below the next power, also divides the share.
    """
    low = 1 << (micro.bit_length() - 1)
    others = [low, *range(micro + 1, 2 * low)]
    return micro != low and any(share % other == 0 and share // other >= pipeline for other in others)


def _has_equal_pieces(layers: int, pipeline: int, virtual: int) -> bool:
    """Return whether all pieces are equal if no end, the loss, or embedding and loss count as layers.

    No end counts if stages are equal without it, except that two stages stay equal if each of them has an end.
    """
    ends = (0, 2)[: 1 + (pipeline == 2)] if layers % pipeline == 0 else (2,) if (layers + 2) % pipeline == 0 else (1,)
    return any((layers + one) % (pipeline * virtual) == 0 for one in ends)


def _list_schedules(workload: Workload, plan: Plan) -> list[Schedule]:
    """Return the schedules of torchtitan, other than 1F1B, that a plan can have."""
    if workload.framework != "torchtitan" or plan.virtual_stages == 1:
        return []
    if plan.virtual_stages > 2:
        return ["interleavedZeroBubble"]
    is_fed = plan.gradient_accumulation >= 2 * plan.pipeline
    return ["interleavedZeroBubble", "zbv", "dualPipeV"] if is_fed else ["interleavedZeroBubble", "zbv"]


def naive(workload: Workload, where: Pool, experts: int = 1) -> list[Plan]:
    """Return every plan of a small pool, by nested loops that check one condition at a time."""
    model, plans = workload.model, []
    counts = range(1, where.max_gpus + 1)
    frameworks = [search.FRAMEWORKS[workload.framework]] if workload.framework else list(search.FRAMEWORKS.values())
    able = [one for one in frameworks if workload.precision in one.precisions and workload.offload in one.offload]
    for tensor, context, pipeline, data in itertools.product(counts, repeat=4):
        gpus = tensor * context * pipeline * data
        if gpus > where.max_gpus:
            continue
        part = max(size for size in range(1, where.gpus_per_node + 1) if gpus % size == 0)
        is_spread = gpus > where.gpus_per_node
        if is_spread and (2 * part < where.gpus_per_node or gpus // part > where.max_nodes):
            continue
        if tensor > where.gpus_per_node or (is_spread and part % tensor):
            continue
        if model.heads % tensor or model.kv_heads % tensor or model.ffn_hidden % tensor:
            continue
        if workload.global_batch % data or -(-model.layers // pipeline) * (pipeline - 1) >= model.layers:
            continue
        tokens = workload.sequence_length // context
        if context > 1 and (workload.sequence_length % (2 * context) or tokens < search.enumeration.MIN_CONTEXT_TOKENS):
            continue
        share = workload.global_batch // data
        for micro, expert, zero, mode, virtual, spread in itertools.product(
            range(1, share + 1), range(1, experts + 1), range(4), CHECKPOINTING, (1, 2, 3, 4), (False, True)
        ):
            repeats = share // micro
            if share % micro or (repeats < pipeline and micro > 1) or _is_crowded(micro, share, pipeline):
                continue
            if experts % expert or data * tensor % expert or (zero and data * context == 1):
                continue
            if virtual > 1 and (pipeline == 1 or not _has_equal_pieces(model.layers, pipeline, virtual)):
                continue
            other = {3: 2}.get(virtual)  # of two in an octave the power of two is taken
            if other and _has_equal_pieces(model.layers, pipeline, other):
                continue
            if virtual > 1 and repeats % pipeline:
                continue
            if (spread and (tensor == 1 or tokens % tensor)) or workload.checkpointing not in (None, mode):
                continue
            for sharers in {1, tensor} if experts > 1 and data % expert == 0 else {1}:
                plan = Plan(
                    data, tensor, pipeline, context, expert, zero, micro, repeats, mode, spread, virtual, sharers
                )
                kinds = [plan, *(replace(plan, schedule=name) for name in _list_schedules(workload, plan))]
                plans += [one for one in kinds if any(able_one.executes(Plans.from_plans(one))[0] for able_one in able)]
    return plans


SMALL = [
    ("gpt2", 2048, 8, {}, 1),
    ("gpt2", 2048, 12, {"framework": "megatron"}, 1),
    ("gpt2", 2048, 12, {"framework": "torchtitan"}, 1),
    ("gpt2", 1024, 12, {"framework": "deepspeed", "checkpointing": "full"}, 1),
    ("mixtral-8x7b", 2048, 4, {"checkpointing": "none"}, 8),
]


@pytest.mark.parametrize(("name", "sequence", "batch", "job", "experts"), SMALL)
@pytest.mark.slow
def test_what_is_found_is_every_plan_and_its_best_is_the_best(
    name: str, sequence: int, batch: int, job: dict[str, Any], experts: int
) -> None:
    workload, where = Workload(zoo.find_preset(name), sequence, batch, **job), pool("h100-sxm", nodes=2, per_node=3)
    plans, expected = search.find(workload, where), naive(workload, where, experts)
    assert len(plans) == len(expected) == len(set(plans.plans))
    assert set(plans.plans) == set(expected)
    alone = [search.price(workload, Plans.from_plans(plan), where) for plan in expected]
    best = min((float(one.step_s[0]) for one in alone if one.fits[0]), default=np.inf)
    assert plans.step_s[plans.fits].min(initial=np.inf) == best
    assert not plans.is_bounded


@pytest.mark.long
def test_a_thousand_plans_alone_cost_what_they_cost_among_all() -> None:
    jobs: list[tuple[str, int, int, Pool, dict[str, Any]]] = [
        ("gpt3-175b", 2048, 1536, pool("h100-sxm", nodes=64), {}),
        ("llama-2-7b", 16384, 64, pool("l4", nodes=8, per_node=4), {}),
        ("mixtral-8x7b", 4096, 96, pool(nodes=4), {}),
        ("deepseek-v3", 4096, 480, pool("h100-sxm", nodes=32), {"framework": "torchtitan"}),
        ("t5-v1.1-large", 512, 64, pool(), {}),
        ("resnet-50", 1, 256, pool("t4"), {"precision": "fp16"}),
        ("llama-2-7b", 2048, 64, pool(), {"offload": "optimizer", "framework": "deepspeed"}),
        ("qwen3-8b", 8192, 64, pool("h100-sxm", nodes=8), {"lora_rank": 16, "execution": "compiled"}),
        ("bert-large", 512, 60, pool("h100-sxm"), {"framework": "megatron", "precision": "fp8"}),
        ("vit-l-16", 1, 512, pool("a100-40"), {"framework": "fsdp2"}),
    ]
    rng, compared = np.random.default_rng(0), 0
    for name, sequence, batch, where, job in jobs:
        workload = Workload(zoo.find_preset(name), sequence, batch, **job)
        plans = search.find(workload, where)
        for row in rng.permutation(len(plans))[:130].tolist():
            alone = search.price(workload, Plans.from_plans(plans.plans.row(row)), where)
            assert alone.step_s[0] == plans.step_s[row], plans.plans.row(row)
            assert alone.memory_bytes[0] == plans.memory_bytes[row], plans.plans.row(row)
            compared += 1
    assert compared >= 1000


def test_a_batch_that_no_gpu_holds_at_once_is_no_error() -> None:
    plans = search.find(Workload(zoo.find_preset("llama-3.1-8b"), 8192, 1 << 24), pool(nodes=1))
    assert plans.fits.any()
    assert (plans.plans.micro_batch.astype(float) * 8192).max() <= search.enumeration.MAX_MICRO_TOKENS


def test_too_many_plans_leave_out_node_counts_and_say_so() -> None:
    workload, where = Workload(zoo.find_preset("gpt2"), 1024, 1024), pool(nodes=32)
    whole = search.find(workload, where)
    few = search.find(workload, where, PlanLimits(max_plans=len(whole) - 1))
    assert few.is_bounded
    assert len(few) < len(whole)
    assert set(few.plans) < set(whole.plans)
    assert few.plans.gpus.max() == whole.plans.gpus.max()
    fewest = search.find(workload, where, PlanLimits(max_plans=1))
    assert set((fewest.plans.gpus // 8).tolist()) == {0, 1, 2, 4, 8, 16, 32}


@settings(max_examples=50)
@given(st.data())
def test_distinct_rows_are_the_distinct_rows(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 40))
    values = st.integers(-3, 3) | st.integers(-(10**12), 10**12)
    columns = [
        np.array(data.draw(st.lists(values, min_size=rows, max_size=rows)), dtype=np.int64)
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    table, groups = np.column_stack(columns), distinct_rows(*columns)
    assert (table[groups.first][groups.index] == table).all()
    assert len(np.unique(table, axis=0)) == len(groups)
    assert table[groups.first].tolist() == sorted(table[groups.first].tolist())
    assert all((table[:row] != table[row]).any(axis=1).all() for row in groups.first)


def test_columns_with_one_value_are_stored_once_and_taken_as_before() -> None:
    plain = BucketLimits(np.full(5, 2.5), np.arange(5.0))
    once = plain.collapse_constants()
    assert once.first.strides == (0,) and once.rest.strides != (0,)
    for rows in (np.array([4, 0, 0, 3, 1, 2]), slice(1, 3), np.array([True, False, True, False, False]), slice(0)):
        taken, expected = once.take(rows), plain.take(rows)
        assert taken.first.tolist() == expected.first.tolist() and taken.rest.tolist() == expected.rest.tolist()
    with pytest.raises(ValueError, match="read-only"):
        once.take(np.array([0, 1])).first[0] = 1.0
    assert len(plain.take(slice(0)).collapse_constants().first) == 0


def test_a_node_holds_the_most_members_of_a_group_that_fit_and_divide_it() -> None:
    rng = np.random.default_rng(0)
    ranks, inner, gpus = rng.integers(1, 40, 300), rng.choice([1, 2, 3, 4, 8, 16], 300), rng.choice([4, 8, 16, 64], 300)
    local = placement.build_communication_group(ranks.astype(float), inner.astype(float), gpus, pool(nodes=8)).local
    for size, apart, total, members in zip(ranks.tolist(), inner.tolist(), gpus.tolist(), local.tolist(), strict=True):
        fitting = max(min(total, 8) // apart, 1)
        assert members == max(count for count in range(1, fitting + 1) if size % count == 0)


@pytest.mark.parametrize("name", ["llama-2-7b", "bert-large", "mixtral-8x7b", "t5-v1.1-large", "resnet-50"])
@pytest.mark.slow
def test_rows_of_a_table_equal_the_single_plan_bit_for_bit(name: str) -> None:
    model = zoo.find_preset(name)
    workload = Workload(model, 1024 if model.vocab else 1, 256, "bf16")
    plans = search.enumerate_plans(workload, pool(nodes=4))
    chosen = plans.take(np.random.default_rng(0).permutation(len(plans))[:200])
    table = search.price(workload, chosen, pool(nodes=4))
    for index, plan in enumerate(chosen):
        alone = search.price(workload, Plans.from_plans(plan), pool(nodes=4))
        assert alone.step_s[0] == table.step_s[index], plan
        assert alone.memory_bytes[0] == table.memory_bytes[index], plan
        assert alone.times.spread[0] == table.times.spread[index], plan


def test_rows_are_distinct_and_use_the_gpus_they_say() -> None:
    plans = search.enumerate_plans(Workload(zoo.find_preset("llama-2-7b"), 4096, 128), pool(), PlanLimits(gpus=16))
    assert (plans.gpus == 16).all()
    rows = np.column_stack([getattr(plans, item.name) for item in fields(Plans)])
    assert len(np.unique(rows, axis=0)) == len(plans)
    assert (plans.micro_batch * plans.gradient_accumulation * plans.data == 128).all()


@settings(max_examples=25)
@given(
    gpu=st.sampled_from(["h100-sxm", "a100-80", "l4", "t4"]),
    name=st.sampled_from(["gpt2", "llama-3.2-1b", "bert-base", "resnet-50", "mixtral-8x7b"]),
    precision=st.sampled_from(["fp32", "fp16"]),
    batch=st.sampled_from([8, 64, 96]),
)
@pytest.mark.slow
def test_steps_are_finite_positive_and_sum(gpu: str, name: str, precision: str, batch: int) -> None:
    model = zoo.find_preset(name)
    workload = Workload(model, 512 if model.vocab else 1, batch, precision)  # type: ignore[arg-type]
    priced = search.price(workload, search.enumerate_plans(workload, pool(gpu)), pool(gpu))
    parts = np.array([getattr(priced.times, part) for part in PARTS])
    assert np.isfinite(parts).all()
    assert (parts >= 0).all()
    assert np.allclose(parts.sum(axis=0), priced.step_s)
    flops = 6 * zoo.count_parameters(workload) if model.vocab and not model.dimensions.stated else 0.0
    least = flops * workload.tokens_per_step / priced.plans.gpus / find_gpu(gpu).peak(precision)
    assert (priced.step_s > least * 0.9).all()


@pytest.mark.parametrize("name", ["llama-2-7b", "mixtral-8x7b", "resnet-50"])
def test_a_faster_network_never_makes_a_step_slower(name: str) -> None:
    model = zoo.find_preset(name)
    workload = Workload(model, 1024 if model.vocab else 1, 256, "bf16")
    slow, fast = (replace(pool(nodes=4), inter=find_link(link)) for link in ("ethernet-25", "infiniband-ndr-8x400"))
    plans = search.enumerate_plans(workload, slow)
    assert np.all(search.price(workload, plans, fast).step_s <= search.price(workload, plans, slow).step_s)


def test_a_number_of_gpus_need_not_fill_a_node() -> None:
    workload = Workload(zoo.find_preset("gpt2"), 1024, 840)

    def counts(where: Pool, limits: PlanLimits = search.NO_LIMITS) -> set[int]:
        return set(search.find(workload, where, limits).plans.gpus.tolist())

    assert counts(pool(nodes=1)) == {*range(1, 9)}
    assert counts(pool(nodes=1), PlanLimits(gpus=6)) == {6}
    assert counts(pool(nodes=2)) == {*range(1, 9), 12, 16}
    assert counts(pool(nodes=2), PlanLimits(gpus=12)) == {12}
    assert not counts(pool(nodes=2), PlanLimits(gpus=14)), "a part is at least half of a node and divides it"
    assert counts(replace(pool(nodes=1), spare_gpus=6)) == {*range(1, 9), 12}
    # Of three nodes that lost a GPU each, equal parts are used.
    assert counts(pool(nodes=3, per_node=7)) == {*range(1, 9), 10, 12, 14, 15, 18, 21}


def test_a_part_of_a_node_is_a_node_of_that_size() -> None:
    plans = search.enumerate_plans(
        Workload(zoo.find_preset("llama-2-7b"), 2048, 24), pool(nodes=2), PlanLimits(gpus=12)
    )
    assert set(plans.tensor.tolist()) == {1, 2, 4}
    where, gpus = pool(nodes=2), np.array([3, 8, 12, 16, 20])
    assert placement.count_gpus_on_each_node(gpus, where).tolist() == [3, 8, 4, 8, 4]
    group = placement.build_communication_group(gpus.astype(float), np.ones(5), gpus, where)
    assert group.local.tolist() == [3, 8, 4, 8, 4]
    assert group.node_ranks.tolist() == [3, 8, 8, 8, 8], "halves of a node share its network"


@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=2, unique=True), batch=st.sampled_from([24, 32, 60, 84]))
@settings(max_examples=25)
@pytest.mark.slow
def test_more_gpus_offer_every_plan_that_fewer_offer(sizes: list[int], batch: int) -> None:
    workload = Workload(zoo.find_preset("llama-3.2-1b"), 2048, batch, framework="megatron", micro_batch=1)
    few, many = (set(search.enumerate_plans(workload, parse_gpu_list(f"h100-sxm:{size}")[0])) for size in sorted(sizes))
    assert few <= many


def test_tensor_groups_stay_inside_nodes() -> None:
    plans = search.enumerate_plans(Workload(zoo.find_preset("gpt2"), 1024, 24), pool(nodes=3), PlanLimits(gpus=24))
    assert set(plans.tensor.tolist()) == {1, 2, 4}
    wider = PlanLimits(gpus=24, max_tensor=16)
    assert len(search.enumerate_plans(Workload(zoo.find_preset("gpt2"), 1024, 24), pool(nodes=3), wider)) == len(plans)


def test_recomputation_costs_time() -> None:
    workload = Workload(zoo.find_preset("llama-2-7b"), 4096, 16)
    plans = Plans.from_plans(
        *(
            Plan(data=8, zero_stage=3, gradient_accumulation=2, checkpointing=mode)
            for mode in ("none", "selective", "full")
        )
    )
    assert np.all(np.diff(search.price(workload, plans, pool()).step_s) > 0)


def test_more_micro_batches_shrink_the_share_of_the_bubble() -> None:
    workload = Workload(zoo.find_preset("llama-2-7b"), 4096, 64)
    plans = Plans.from_plans(*(Plan(pipeline=8, gradient_accumulation=m) for m in (8, 16, 64)))
    priced = search.price(workload, plans, pool())
    share = priced.times.bubble / priced.step_s
    assert np.all(np.diff(share) < 0)
    # 1F1B: (p - 1) / m of the ideal time, if all stages were alike.
    assert share[1] == pytest.approx(7 / 16 / (1 + 7 / 16), rel=0.15)


def test_layers_that_do_not_divide_still_make_stages() -> None:
    workload = Workload(zoo.find_preset("deepseek-v3"), 4096, 512)
    plans = search.enumerate_plans(workload, pool("h100-sxm", nodes=32), PlanLimits(gpus=256))
    uneven = plans.pipeline > 1
    assert uneven.any()
    assert (plans.virtual_stages[uneven] == 1).all()
    assert set(plans.pipeline) <= {p for p in range(1, 257) if -(-61 // p) * (p - 1) < 61}


def test_offloading_trades_memory_for_time() -> None:
    plan = Plans.from_plans(Plan(data=8, zero_stage=3, micro_batch=1, gradient_accumulation=8))
    here, optimizer, everything = (
        search.price(Workload(zoo.find_preset("llama-2-7b"), 2048, 64, offload=where), plan, pool())
        for where in ("none", "optimizer", "parameters")
    )
    assert here.memory_bytes[0] > optimizer.memory_bytes[0] > everything.memory_bytes[0]
    assert here.step_s[0] < optimizer.step_s[0] <= everything.step_s[0]
    assert optimizer.footprint.optimizer[0] == 0 < optimizer.footprint.parameters[0]


def test_more_tokens_take_no_less_time_while_weights_come_from_the_host() -> None:
    """A pair of preferences once took 0.87 of the time of one answer: waits for the host hid no fetch of weights."""
    job = Workload(
        zoo.find_preset("llama-3.2-1b"), 2048, 32, framework="fsdp2", offload="parameters", lora_rank=8, dora=True,
        shard_degree=2,
    )  # fmt: skip
    plan, h100 = Plans.from_plans(Plan(data=8, zero_stage=3, micro_batch=1, gradient_accumulation=4)), pool("h100-sxm")
    one, pair = (search.price(replace(job, loss=loss), plan, h100).step_s[0] for loss in (None, "cpo"))  # type: ignore[arg-type]
    assert pair >= one * (1 - 1e-9)


def test_parameters_on_the_host_need_zero_three() -> None:
    workload = Workload(zoo.find_preset("llama-2-7b"), 2048, 64, offload="parameters")
    plans = search.enumerate_plans(workload, pool(), PlanLimits(gpus=8))
    assert len(plans)
    assert set(plans.zero_stage) == {3}
    assert set(plans.pipeline) == {1}


def test_a_framework_limits_the_plans_to_what_it_executes() -> None:
    workload = Workload(zoo.find_preset("llama-2-7b"), 2048, 64)
    whole = search.find(workload, pool()).plans
    tables = {name: search.find(replace(workload, framework=name), pool()).plans for name in search.FRAMEWORKS}
    assert all(0 < len(table) < len(whole) for table in tables.values())
    assert (tables["ddp"].gpus == tables["ddp"].data).all()
    assert (tables["ddp"].zero_stage == 0).all()
    alone = tables["fsdp2"].data == 1
    assert set(tables["fsdp2"].zero_stage[~alone]) <= {2, 3}
    assert (tables["deepspeed"].virtual_stages == 1).all()
    assert set(tables["megatron"].zero_stage) == {0, 1}
    split = tables["torchtitan"].tensor > 1
    assert split.any()
    assert (tables["torchtitan"].sequence_parallel[split] == 1).all()


def test_a_framework_refuses_what_it_has_not() -> None:
    workload = Workload(zoo.find_preset("llama-2-7b"), 2048, 64, framework="ddp")
    for changes in ({"precision": "fp8"}, {"offload": "optimizer"}):
        with pytest.raises(SpecError, match="ddp has no"):
            search.find(replace(workload, **changes), pool("h100-sxm"))
    with pytest.raises(SpecError, match="deepspeed has no selective"):
        search.find(replace(workload, framework="deepspeed", checkpointing="selective"), pool())


def test_what_is_found_is_what_pricing_says() -> None:
    workload = Workload(zoo.find_preset("gpt2"), 1024, 32)
    plans = search.find(workload, pool())
    rows = np.random.default_rng(1).permutation(len(plans))[:100]
    priced = search.price(workload, plans.plans.take(rows), pool())
    assert (priced.step_s == plans.step_s[rows]).all()
    assert (priced.memory_bytes == plans.memory_bytes[rows]).all()
    assert (priced.fits == plans.fits[rows]).all()


def test_slices_do_not_borrow_the_plans_of_whole_gpus() -> None:
    workload = Workload(zoo.find_preset("bert-base"), 128, 64)
    whole, part = pool("a100-80"), pool("a100-80-mig-7g.80gb")
    assert search.find(workload, whole).plans.gpus.max() == 16
    assert search.find(workload, part).plans.gpus.max() == 1


def test_what_fits_is_known_without_pricing_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, where = Workload(zoo.find_preset("llama-2-7b"), 4096, 64), pool("l4")
    memo.clear_all_memos()
    monkeypatch.delattr(kernels, "predict_kernel_times")
    plans = search.find(workload, where)
    assert 0 < plans.fits.sum() < len(plans)
    assert (plans.itemize_memory(np.arange(3)).total == plans.memory_bytes[:3]).all()


def rack(nodes: int, per_node: int = 4, gpus: int = 72, network: str = "infiniband-ndr-4x400") -> Pool:
    """Return a pool of GB200 in nodes of that size, on a network whose ports grow with it."""
    gpu, each = find_gpu("gb200"), find_link(network)
    wide = replace(each, bandwidth_bytes_per_s=each.bandwidth_bytes_per_s * per_node / 4, nics=per_node)
    return Pool("gb200", gpu, per_node, nodes, replace(find_link(gpu.intra_link), domain=gpus), wide)


RACK_JOBS = [("llama-2-7b", 4096, 144, {}), ("mixtral-8x7b", 4096, 144, {"framework": "megatron", "precision": "fp8"})]


@pytest.mark.parametrize(("name", "sequence", "batch", "job"), RACK_JOBS)
@pytest.mark.parametrize("gpus", [8, 72, 144])
def test_nodes_of_one_nvlink_domain_cost_what_one_node_of_its_size_costs(
    name: str, sequence: int, batch: int, job: dict[str, Any], gpus: int
) -> None:
    workload, limits = Workload(zoo.find_preset(name), sequence, batch, **job), PlanLimits(gpus=gpus)
    trays, whole = rack(36), rack(2, per_node=72)
    plans, expected = search.find(workload, trays, limits), search.find(workload, whole, limits)
    assert len(plans) == len(expected) > 0
    assert plans.step_s == pytest.approx(expected.step_s, rel=1e-9)


def test_a_job_inside_an_nvlink_domain_does_not_feel_the_network() -> None:
    workload = Workload(zoo.find_preset("llama-2-7b"), 4096, 144)
    plans = search.enumerate_plans(workload, rack(18), PlanLimits(gpus=72))
    slow = rack(18, network="ethernet-10")
    assert np.array_equal(search.price(workload, plans, rack(18)).step_s, search.price(workload, plans, slow).step_s)
    alone = search.price(workload, plans, rack(18, gpus=4)).step_s
    assert (search.price(workload, plans, rack(18)).step_s <= alone).all()


@given(st.integers(1, 40), st.sampled_from([1, 2, 4]), st.integers(0, 80))
def test_a_job_takes_equally_many_whole_nodes_of_each_domain(nodes: int, per_node: int, domain: int) -> None:
    where = rack(40, per_node=per_node, gpus=domain)
    gpus = nodes * per_node
    taken = int(placement.count_joined_gpus(np.array([gpus]), where)[0])
    assert gpus % taken == 0
    assert taken % per_node == 0
    assert per_node <= taken <= max(where.domain, per_node)
    assert taken == gpus or gpus > where.domain


def test_blocks_of_diffusion_transformers_are_recomputed_where_memory_asks() -> None:
    workload = Workload(zoo.find_preset("flux.1"), 256, 64)
    plans = search.find(workload, pool("a100-40", nodes=1))
    modes = set(plans.plans.checkpointing[plans.fits])
    assert CHECKPOINTING.index("full") in modes
    plain = search.find(replace(workload, checkpointing="none"), pool("a100-40", nodes=1))
    assert plans.plans.micro_batch[plans.fits].max() > plain.plans.micro_batch[plain.fits].max()


@pytest.mark.parametrize(
    ("batch", "micros"), [(1000, {1, 5, 25, 125}), (96, {1, 2, 4, 12}), (512, {1, 2, 4, 8, 16, 32, 64})]
)
def test_a_share_without_powers_of_two_has_micro_batches_between(batch: int, micros: set[int]) -> None:
    """1000 samples over eight GPUs once ran 1 or 125 at once; 125 needed recomputation and took 1.4x as long as 25."""
    workload = Workload(zoo.find_preset("roberta-large"), 512, batch)
    plans = search.enumerate_plans(workload, pool("h100-sxm", nodes=1), PlanLimits(gpus=8))
    alone = (plans.data == 8) & (plans.tensor == 1)
    assert set(plans.micro_batch[alone].tolist()) == micros
