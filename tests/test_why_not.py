"""Every change that an advice suggests is applied here, and has the stated effect."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilecast import search, zoo
from tilecast.advice import Advice, Budget, Change, Constraints, Request, advise
from tilecast.advice.what_if.changes import CHANGES, apply_change, describe_larger_memory
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.objectives import Objective
from tilecast.spec import PartialPlan, Plan, Plans, Workload
from tilecast.step import step_on_faster_links
from tilecast.step.blocks import kernel_seconds


def pool(gpu: str, nodes: int, price: float | None, link: str = "infiniband-hdr-8x200", per_node: int = 8) -> Pool:
    facts = find_gpu(gpu)
    inter = find_link(link)
    return Pool(facts.name, facts, per_node, nodes, find_link(facts.intra_link), inter, price_per_gpu_hour=price)


POOLS = [pool("h100-sxm", 2, 6.9), pool("a100-80", 2, 3.4), pool("l4", 2, 0.8, "ethernet-25"), pool("t4", 2, 0.5)]
LLAMA = Workload(zoo.find_preset("llama-3.2-1b"), 2048, 64, steps=1000)
LARGE = Workload(zoo.find_preset("llama-2-7b"), 4096, 64, steps=1000)
GPT = Workload(zoo.find_preset("gpt2-xl"), 1024, 64, "fp16", steps=1000)
RESNET = Workload(zoo.find_preset("resnet-50"), 1, 61, "fp16", optimizer="momentum", steps=1000)
MOE = Workload(zoo.find_preset("mixtral-8x7b"), 4096, 64, steps=100)

REQUESTS: dict[str, Request] = {
    "time": Request("time", LLAMA),
    "cost": Request("cost", LARGE, "cost"),
    "finish": Request("finish", GPT, "timeToFinish"),
    "deadline": Request("deadline", LARGE, "cheapestBeforeDeadline", deadline_s=3000.0),
    "late": Request("late", LARGE, "cheapestBeforeDeadline", deadline_s=30.0),
    "budget": Request("budget", LARGE, "fastestWithinBudget", budget=Budget(60.0)),
    "poor": Request("poor", LARGE, "fastestWithinBudget", budget=Budget(1.0)),
    "few": Request("few", LARGE, "fewestGpus"),
    "capped": Request("capped", LARGE, constraints=Constraints(max_gpus=4, max_tensor=1)),
    "one node": Request("one node", LARGE, constraints=Constraints(max_nodes=1)),
    "exact": Request("exact", LARGE, constraints=Constraints(gpus=8, max_tensor=2)),
    "uneven": Request("uneven", LARGE, constraints=Constraints(gpus=12)),
    "indivisible": Request("indivisible", RESNET, constraints=Constraints(gpus=16)),
    "many": Request("many", LARGE, constraints=Constraints(gpus=32)),
    "allowed": Request("allowed", LARGE, constraints=Constraints(allowed_pools=("a100-80",))),
    "large": Request("large", MOE),
    "fixed": Request("fixed", replace(LARGE, micro_batch=32, checkpointing="none")),
}


def given(name: str) -> tuple[Advice, list[tuple[str, Plan | None, Change]]]:
    """Return the advice, and every change that it suggests, with its pool and its plan."""
    advice = advise(REQUESTS[name], POOLS)
    changes = [(item.pool, item.plan, item.change) for item in advice.why_not if item.subject != "pool" and item.change]
    changes += [(item.pool, None, item.change) for item in advice.why_not if item.subject == "pool" and item.change]
    return advice, [*changes, *((item.pool, None, item.change) for item in advice.rejections if item.change)]


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.slow
def test_changes_do_what_they_say(name: str) -> None:
    advice, changes = given(name)
    for where, plan, change in changes:
        before = next(item for item in POOLS if item.name == where)
        if plan is not None:
            check_plan(advice, before, plan, change)
            continue
        request, after = apply_change(change, advice.request, before)
        again = advise(request, [after if item.name == where else item for item in POOLS])
        offered = [offer.pool.name for offer in again.offers]
        assert where in offered, change
        if change.effect == "wins":
            assert offered[0] == where, change


def check_plan(advice: Advice, before: Pool, plan: Plan, change: Change) -> None:
    """Check the change for a neighbouring plan: with it the plan fits, or beats the recommended one."""
    best = advice.best
    assert best is not None
    if change.input == "plan":
        plans = search.find(best.workload, before)
        row = next(index for index, one in enumerate(plans.plans) if str(one) == change.value and plans.fits[index])
        one = plans.plans.row(row)
        assert (one.data, one.tensor, one.pipeline) == (plan.data, plan.tensor, plan.pipeline)
        return
    _, after = apply_change(change, advice.request, before)
    priced = search.price(best.workload, Plans.from_plans(best.plan, plan), after)
    assert priced.fits[1], change
    if change.effect == "wins":
        costs = advice.request.objective in ("cost", "cheapestBeforeDeadline")
        weights = (best.plan.gpus, plan.gpus) if costs else (1, 1)
        values = priced.step_s * weights
        assert values[1] < values[0], change


@pytest.mark.slow
def test_where_one_change_is_not_enough_the_first_is_told_with_what_remains() -> None:
    """A T4 has no BF16 units, and is also too small or too slow; every other rejection here needs one change."""
    for name in REQUESTS:
        for item in given(name)[0].rejections:
            if item.change is None:
                assert item.pool == "t4"
                assert ", and then: " in item.remedy, item


@pytest.mark.parametrize("name", ["deadline", "budget", "late", "poor"])
@pytest.mark.slow
def test_just_less_than_the_change_is_not_enough(name: str) -> None:
    advice, changes = given(name)
    for where, _, change in changes:
        if change.input in ("deadlineSeconds", "budget.amount"):
            request, _ = apply_change(replace(change, value=float(change.value) - 2), advice.request, POOLS[0])
            assert where not in [offer.pool.name for offer in advise(request, POOLS).offers]


FEWER = {
    "tight": (Request("tight", LARGE), [pool("h100-sxm", 2, 6.9), pool("a100-80", 2, 3.4)]),
    "odd": (Request("odd", replace(LARGE, global_batch=96)), [pool("h100-sxm", 2, 6.9), pool("a100-80", 3, 3.4)]),
    "large": (Request("large", replace(MOE, model=zoo.find_preset("llama-3.1-405b"))), [pool("a100-80", 2, 3.4)]),
}


@pytest.mark.parametrize("name", FEWER)
@pytest.mark.slow
def test_one_node_less_than_the_change_is_not_enough(name: str) -> None:
    """The number of nodes was once doubled until it sufficed."""
    request, pools = FEWER[name]
    advice = advise(request, pools)
    changes = [(item.pool, item.change) for item in advice.rejections if item.change]
    changes += [(item.pool, item.change) for item in advice.why_not if item.change]
    nodes = [
        (where, change)
        for where, change in changes
        if change.input == "pool.maxNodes" and (advice.best is None or where != advice.best.pool.name)
    ]
    assert nodes
    for where, change in nodes:
        for value, is_enough in ((float(change.value), True), (float(change.value) - 1, False)):
            changed = [
                apply_change(replace(change, value=value), request, one)[1] if one.name == where else one
                for one in pools
            ]
            best = advise(request, changed).best
            assert (best is not None and best.pool.name == where) == is_enough, (change, value)


def test_slightly_slower_links_than_the_change_do_not_win() -> None:
    request = Request("links", replace(LARGE, global_batch=16), constraints=Constraints(gpus=16))
    pools = [pool("a100-80", 2, 3.4), pool("h100-sxm", 2, 6.9, "ethernet-10")]
    advice = advise(request, pools)
    (change,) = [item.change for item in advice.why_not if item.subject == "pool" and item.change]
    assert change.input == "pool.links"
    # The factor is that of the plan that is best on the pool's own links; another plan wins a little below it.
    for factor, winner in ((1.0, "h100-sxm"), (0.6, "a100-80")):
        _, faster = apply_change(replace(change, value=float(change.value) * factor), request, pools[1])
        best = advise(request, [pools[0], faster]).best
        assert best is not None and best.pool.name == winner


def test_the_least_memory_that_would_do_is_told() -> None:
    request = Request("one", replace(LARGE, global_batch=1), constraints=Constraints(gpus=1))
    where = replace(pool("l4", 1, 0.8), max_nodes=1)
    (rejection,) = advise(request, [where]).rejections
    change = describe_larger_memory(where, float(rejection.memory_bytes or 0))
    for less, fits in ((0, True), (1, False)):
        changed = apply_change(replace(change, value=float(change.value) - less), request, where)[1]
        assert (advise(request, [changed]).best is not None) == fits


def test_a_price_just_above_the_change_does_not_win() -> None:
    advice, changes = given("cost")
    prices = [(where, change) for where, plan, change in changes if change.input == "pool.price.perGpuHour"]
    assert prices
    for where, change in prices:
        dearer = replace(change, value=float(change.value) * 1.02)
        request, after = apply_change(dearer, advice.request, next(item for item in POOLS if item.name == where))
        again = advise(request, [after if item.name == where else item for item in POOLS])
        assert again.best is not None and again.best.pool.name != where


def test_an_unpriced_pool_is_told_the_price_at_which_it_would_win() -> None:
    pools = [pool("h100-sxm", 2, None), pool("a100-80", 2, 3.4)]
    advice = advise(Request("cost", LARGE, "cost"), pools)
    assert [offer.pool.name for offer in advice.offers] == ["a100-80"]
    (rejection,) = advice.rejections
    assert rejection.code == "PriceUnknown" and rejection.change is not None
    request, after = apply_change(rejection.change, advice.request, pools[0])
    best = advise(request, [after, pools[1]]).best
    assert best is not None and best.pool.name == "h100-sxm"


@pytest.mark.parametrize("objective", ["cost", "cheapestBeforeDeadline", "fastestWithinBudget"])
def test_no_price_at_all_is_advice_without_a_recommendation(objective: Objective) -> None:
    more = {"cheapestBeforeDeadline": {"deadline_s": 1e9}, "fastestWithinBudget": {"budget": Budget(1e9)}}
    advice = advise(Request("x", LARGE, objective, **more.get(objective, {})), [pool("h100-sxm", 2, None)])  # type: ignore[arg-type]
    assert advice.best is None
    assert [item.code for item in advice.rejections] == ["PriceUnknown"]
    assert "price" in advice.rejections[0].remedy


INPUTS = {
    "training.precision": "fp16",
    "training.globalBatchSize": 128,
    "training.sequenceLength": 1024,
    "training.microBatchSize": 4,
    "training.activationCheckpointing": "full",
    "training.fusedLoss": 1,
    "training.offload": "optimizer",
    "training.framework": "fsdp2",
    "targetStepSeconds": 2.5,
    "plan": "fsdp8,mb1,ac-full",
    "training.gradientSync": "parameterServer",
    "plan.zeroStage": 2,
    "constraints.gpus": 8,
    "constraints.maxGpus": 8,
    "constraints.maxNodes": 1,
    "constraints.maxTensorParallel": 2,
    "constraints.allowedPools": "a100-80",
    "constraints.allowSharing": "true",
    "deadlineSeconds": 60.0,
    "budget.amount": 5.0,
    "pool.gpus": 128,
    "pool.maxNodes": 9,
    "pool.price.perGpuHour": 1.5,
    "pool.gpu.memoryGib": 141,
    "pool.links": 2.0,
}


def test_every_input_of_the_table_changes_and_nothing_else_does() -> None:
    assert INPUTS.keys() == CHANGES.keys()
    plan = PartialPlan.parse("dp8,mb2", "plan")
    request = Request("x", LLAMA, "fastestWithinBudget", budget=Budget(1.0), deadline_s=1.0, plan=plan)
    for name, value in INPUTS.items():
        after, changed = apply_change(Change(name, value, "fits", ""), request, POOLS[0])
        assert (after != request) != (changed != POOLS[0]), name
        assert (changed != POOLS[0]) == name.startswith("pool."), name


@pytest.mark.parametrize(
    ("model", "gpus", "items"),
    [
        ("llama-3.1-8b", 1, "1 node of 2 GPUs instead of 1"),
        ("llama-3-70b", 1, "2 nodes of 8 GPUs instead of 1 node of 1"),
        ("llama-3-70b", 8, "2 nodes instead of 1"),
    ],
)
def test_a_part_of_a_node_grows_to_a_whole_one_before_there_are_more(model: str, gpus: int, items: str) -> None:
    whole = pool("h100-sxm", 1, 6.9)
    part = replace(whole, gpus_per_node=gpus, usual_gpus_per_node=8)
    request = Request("x", Workload(zoo.find_preset(model), 4096, 64))
    (rejection,) = advise(request, [part]).rejections
    assert rejection.change is not None and rejection.remedy == items
    after, grown = apply_change(rejection.change, request, part)
    assert advise(after, [grown]).best is not None
    assert (grown.gpus_per_node, grown.max_nodes) == ((2, 1) if model == "llama-3.1-8b" else (8, 2))


def test_a_faster_plan_of_more_gpus_fills_the_node_first() -> None:
    part = replace(pool("h100-sxm", 1, 6.9), gpus_per_node=2, usual_gpus_per_node=8)
    advice = advise(Request("x", Workload(zoo.find_preset("gpt2-xl"), 1024, 64)), [part])
    (change,) = [item.change for item in advice.why_not if item.code == "PoolTooSmall" and item.change]
    assert (change.input, change.text) == ("pool.gpus", "1 node of 4 GPUs instead of 2")


@pytest.mark.parametrize("gpus", [3, 5, 6])
@pytest.mark.slow
def test_a_change_names_sizes_that_can_be_had(gpus: int) -> None:
    """Three GPUs would once have won as "1 node of 6", five as "2 nodes of 5"."""
    part = replace(pool("h100-sxm", 1, 6.9), gpus_per_node=gpus, usual_gpus_per_node=8)
    for model in ("gpt2-xl", "llama-3-70b"):
        for batch in (15 * 8, 64):
            request = Request("x", Workload(zoo.find_preset(model), 1024, batch))
            advice = advise(request, [part, pool("a100-80", 2, 4.1)])
            for change in (*(item.change for item in advice.why_not), *(item.change for item in advice.rejections)):
                if change is not None and change.input == "pool.gpus":
                    assert int(change.value) in (4, 8, 16, 24, 32, 40, 48, 56, 64), change
                    _, after = apply_change(change, request, part)
                    assert (after.gpus_per_node, after.max_gpus) == (min(8, int(change.value)), int(change.value))


def test_a_precision_helps_a_batch_that_few_counts_divide() -> None:
    """Seven samples fit on one of six V100, though not on two, three or six."""
    gpu_pool = pool("v100-sxm-32", 1, 3.1)
    request = Request("x", Workload(zoo.find_preset("t5-small"), 512, 7))
    (rejection,) = advise(request, [replace(gpu_pool, gpus_per_node=6)]).rejections
    assert rejection.remedy == "train in fp16"


def test_a_limit_on_nodes_counts_nodes_not_parts_of_one() -> None:
    part = replace(pool("h100-sxm", 1, 6.9), gpus_per_node=1, usual_gpus_per_node=8)
    request = Request("x", Workload(zoo.find_preset("gpt2-xl"), 1024, 64), constraints=Constraints(max_nodes=1))
    items = [item for item in advise(request, [part, pool("a100-80", 1, 4.1)]).why_not if item.subject == "pool"]
    (change,) = [item.change for item in items if item.pool == part.name]
    assert change is not None and change.input == "pool.gpus" and int(change.value) <= 8


def test_faster_links_are_faster_and_leave_the_rest() -> None:
    workload = replace(LARGE, global_batch=16)
    _, fast = apply_change(Change("pool.links", 4.0, "wins", ""), Request("x", workload), POOLS[2])
    plans = search.enumerate_plans(workload, POOLS[2])
    slow_times, fast_times = (search.price(workload, plans, item).times for item in (POOLS[2], fast))
    assert (fast_times.communication <= slow_times.communication).all()
    assert fast_times.communication.sum() < 0.5 * slow_times.communication.sum()


@pytest.mark.parametrize("workload", [LARGE, replace(LARGE, gradient_sync="parameterServer"), MOE])
def test_plans_on_several_speeds_at_once_take_what_they_do_on_each(workload: Workload) -> None:
    factors = np.array([1.0, 1.35, 4.0])
    plans = search.enumerate_plans(workload, POOLS[2])
    plans = plans.take(np.arange(0, len(plans), 7))
    sharded = zoo.build_sharded_graph(workload, plans)
    kernels = kernel_seconds(workload, sharded, POOLS[2].gpu)
    together = step_on_faster_links(workload, sharded, plans, POOLS[2], kernels, factors)
    for factor, column in zip(factors, together.T, strict=True):
        _, fast = apply_change(Change("pool.links", factor, "wins", ""), Request("x", workload), POOLS[2])
        np.testing.assert_allclose(column, search.price(workload, plans, fast).step_s, rtol=1e-12)


def test_a_job_with_servers_is_told_to_shard_without_them() -> None:
    served = replace(LARGE, gradient_sync="parameterServer")
    request = Request("served", served, plan=PartialPlan.parse("dp=16", "plan"), constraints=Constraints(gpus=16))
    inputs = {item.change.input for item in advise(request, POOLS).rejections if item.change}
    assert "training.gradientSync" in inputs and not inputs & {"plan.zeroStage", "training.framework"}


def test_a_framework_that_cannot_shard_is_told_one_that_can() -> None:
    advice = advise(Request("ddp", replace(LARGE, framework="ddp")), POOLS)
    changes = {item.change.input: item for item in advice.rejections if item.change and item.code == "OutOfMemory"}
    assert "training.framework" in changes
    rejection = changes["training.framework"]
    assert rejection.remedy == "fsdp2 instead of ddp"


def test_a_precision_that_the_framework_lacks_is_no_remedy() -> None:
    advice = advise(Request("titan", replace(LARGE, framework="torchtitan")), [POOLS[0], POOLS[3]])
    (rejection,) = advice.rejections
    assert rejection.code == "PrecisionNotSupported" and "fp16" not in rejection.remedy


@pytest.mark.parametrize(
    ("plan", "changed", "remedy"),
    [
        ("fsdp8,ac=none", "training.activationCheckpointing", "recompute every layer (full)"),
        ("fsdp8,mb2", "training.microBatchSize", "micro-batch 2 -> 1"),
        ("dp8,zero=0,ac-full", "plan.zeroStage", "ZeRO stage 0 -> 1"),
    ],
)
def test_a_plan_that_does_not_fit_is_told_what_of_it_to_change(plan: str, changed: str, remedy: str) -> None:
    """Shorter sequences are not suggested where the plan itself can be made to fit."""
    lora = replace(LARGE, model=zoo.find_preset("qwen3-8b"), sequence_length=8192, lora_rank=16)
    workload = lora if plan == "fsdp8,ac=none" else LARGE
    request = Request("x", workload, plan=PartialPlan.parse(plan, "plan"), constraints=Constraints(gpus=8))
    (rejection,) = advise(request, [pool("a100-40", 1, 3.4)]).rejections
    assert rejection.change is not None
    assert (rejection.change.input, rejection.remedy) == (changed, remedy)
    after, where = apply_change(rejection.change, request, pool("a100-40", 1, 3.4))
    assert advise(after, [where]).best is not None
