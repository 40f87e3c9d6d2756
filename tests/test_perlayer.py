"""Strategies per layer: their prices follow the step's formulas, and they never lose to a uniform plan.

They gain where layers or memory differ.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import chain, constants, memory, perlayer, search, zoo
from tilecast.api import training_job
from tilecast.cli import main
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.model import Model
from tilecast.search import Dimension
from tilecast.spec import Plan, Plans, SpecError, Workload
from tilecast.step.weights import host_seconds_per_step

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "jobs" / "gpt2-xl-fp16.yaml"


def pool(gpu: str, per_node: int = 8, nodes: int = 4) -> Pool:
    facts = find_gpu(gpu)
    return Pool(facts.name, facts, per_node, nodes, find_link(facts.intra_link), find_link("ethernet-100"))


def families(
    workload: Workload, on: Pool, gpus: int, vary: tuple[Dimension, ...] = tuple(perlayer.DIMENSIONS)
) -> perlayer.StrategyFamilies:
    result = perlayer.StrategyFamilies.from_job(workload, on, gpus, search.PlanLimits(), vary)
    assert result is not None
    return result


def small(**dimensions: float) -> Model:
    table = {"name": "small", "family": "decoder", "layers": 3, "hidden": 512, "heads": 8, "vocab": 8000}
    return zoo.build_model({**table, "tied_embeddings": False, **dimensions})


@pytest.mark.parametrize(
    ("name", "sequence", "gpu", "gpus"),
    [
        ("llama-2-7b", 4096, "a100-80", 8),
        ("llama-3.1-8b", 8192, "h100-sxm", 16),
        ("gpt2-xl", 1024, "t4", 8),
        ("t5-v1.1-large", 512, "a100-40", 8),
        ("mixtral-8x7b", 4096, "h100-sxm", 32),
        ("bert-large", 512, "l4", 1),
        ("bert-large", 128, "h100-sxm", 4),
    ],
)
@pytest.mark.slow
def test_the_same_strategy_everywhere_costs_what_the_step_says(name: str, sequence: int, gpu: str, gpus: int) -> None:
    workload = Workload(zoo.find_preset(name), sequence, 128, "fp16")
    on = pool(gpu)
    ratios, over = [], []
    every = families(workload, on, gpus)
    once_s = host_seconds_per_step(workload, every.graph, constants.shipped_constants())
    for rows in every.iterate_families():
        family = every.price_family(rows[:40])
        one, plans = family.chain, family.plans
        priced = search.price(workload, plans, on)
        for row in range(len(plans)):
            cost, held = chain.price_strategies(one, np.full(len(one.cost), row))
            ratios.append((cost + once_s) / priced.step_s[row])
            over.append(held + priced.usable_bytes - one.budget - priced.memory_bytes[row])
    ratios = np.array(ratios)
    # A chain hides exchanges behind neighbouring layers only, the step behind the whole pass.
    assert np.median(np.abs(ratios - 1)) < 0.03
    assert np.quantile(ratios, 0.02) > 0.94
    # It reserves the communicators of every strategy, and never needs the largest gathered block and scratch
    # of different blocks at once, nor that of a layer beside the activations of the loss.
    last = max(float(np.max(item.activation_bytes)) for item in every.graph.last)
    opened, peers = memory.channel_buffers(find_gpu(gpu)), min(every.plans.expert.max(), 8) - 1
    assert np.quantile(over, 0.98) < last + 2.1 * opened.communicator_bytes + peers * opened.peer_bytes
    assert np.quantile(over, 0.02) > -0.05 * find_gpu(gpu).memory_bytes
    if gpus == 1:
        assert ratios == pytest.approx(1, rel=1e-9)


@settings(max_examples=12)
@given(
    layers=st.integers(1, 3),
    experts=st.sampled_from([0, 4]),
    vocab=st.sampled_from([1000, 200_000]),
    shrink=st.sampled_from([1.0, 0.05, 0.02]),
    gpus=st.sampled_from([2, 4]),
)
@pytest.mark.slow
def test_it_is_the_best_of_all_assignments(layers: int, experts: int, vocab: int, shrink: float, gpus: int) -> None:
    extra = {"experts": experts, "top_k": 2, "moe_every": 2, "family": "moe"} if experts else {}
    workload = Workload(small(layers=layers, vocab=vocab, **extra), 512, 8, "bf16", micro_batch=2)
    gpu = find_gpu("a100-40")
    on = replace(pool("l4"), gpu=replace(gpu, memory_bytes=gpu.memory_bytes * shrink))
    vary = ("recomputation", "zero") if layers > 1 else ("zero", "tensor")
    best = np.inf
    every = families(workload, on, gpus, vary)
    seconds = every.uniform_s()
    for rows in every.iterate_families():
        family = every.price_family(every.select_promising_strategies(rows, seconds))
        one = family.chain
        paths = np.array(list(itertools.product(range(len(family.plans)), repeat=len(one.cost))))
        cost, held = chain.price_strategies(one, paths)
        best = min(best, cost[held <= one.budget].min(initial=np.inf))
    per_layer = perlayer.find_best_strategies(workload, on, gpus, vary=vary)
    assert (per_layer is None) == (best == np.inf)
    if per_layer is not None:
        fixed_s = host_seconds_per_step(workload, every.graph, constants.shipped_constants())
        assert best <= (per_layer.step_s - fixed_s) * (1 + 1e-11)
        assert per_layer.step_s - fixed_s <= best * (1 + 1.1 * perlayer.REORDERING_TOLERANCE)
        assert per_layer.bound_s - fixed_s == pytest.approx(best, rel=1e-9)
        assert per_layer.memory_bytes <= per_layer.memory_available_bytes
        assert per_layer.uniform_s is None or per_layer.uniform_s >= best + fixed_s - 1e-9


@pytest.mark.parametrize(("gpu", "batch"), [("h100-sxm", 64), ("a100-40", 48)])
def test_waits_for_gradients_count_before_strategies_are_chosen(gpu: str, batch: int) -> None:
    workload = Workload(zoo.find_preset("bert-large"), 128, batch, "fp16")
    per_layer = perlayer.find_best_strategies(workload, pool(gpu), 2)
    assert per_layer is not None and per_layer.saving is not None
    assert per_layer.saving >= -1e-9
    assert per_layer.bound_s <= per_layer.step_s * (1 + 1e-9)


@pytest.mark.slow
def test_the_example_gains_more_than_half_a_percent(capsys: pytest.CaptureFixture[str]) -> None:
    workload = training_job.read_request(yaml.safe_load(EXAMPLE.read_text())).workload
    per_layer = perlayer.find_best_strategies(workload, pool("t4", nodes=1), 8)
    assert per_layer is not None
    assert per_layer.saving is not None
    assert per_layer.saving >= 0.005
    assert per_layer.memory_bytes <= per_layer.memory_available_bytes
    assert set(per_layer.varies) <= {"recomputation", "zero"}
    assert "fsdp2" in per_layer.frameworks
    assert sum(len(group.layers) for group in per_layer.groups) == workload.model.layers
    assert main(["advise", str(EXAMPLE), "--gpus", "t4:8", "--per-layer"]) == 0
    screen = capsys.readouterr().out
    assert f"{per_layer.saving:.1%} less than the best that is the same everywhere" in screen
    section = screen.split("Per layer on", 1)[1]
    assert "ac-full" in section
    assert re.search(rf"^  layers? [\d,-]+ of {workload.model.layers} ", section, re.MULTILINE)


def test_a_framework_limits_what_varies() -> None:
    workload = Workload(zoo.find_preset("gpt2-xl"), 1024, 512, "fp16", fused_loss=True)  # the fused loss keeps as much
    free = perlayer.find_best_strategies(workload, pool("t4", nodes=1), 8)
    bound = perlayer.find_best_strategies(replace(workload, framework="megatron"), pool("t4", nodes=1), 8)
    assert free is not None
    assert bound is not None
    assert set(bound.varies) <= {"recomputation"}
    assert bound.uniform_s is not None
    assert bound.step_s <= bound.uniform_s * (1 + perlayer.REORDERING_TOLERANCE)
    assert replace(free, varies=("recomputation",)).frameworks == ("ddp", "fsdp2", "megatron", "torchtitan")
    assert replace(free, varies=("recomputation", "zero")).frameworks == ("fsdp2",)
    assert replace(free, varies=("tensor",)).frameworks == ()


def test_layers_that_alternate_stand_where_they_are() -> None:
    model = small(family="moe", layers=6, experts=4, top_k=2, moe_every=2, tied_embeddings=True)
    workload = Workload(model, 512, 64, "bf16")
    sharded = zoo.build_sharded_graph(workload, Plans.from_plans(Plan()))
    names = [block.name for block in sharded.graph.list_repetitions()]
    assert names == ["embedding", *["layer", "expert-layer"] * 3, "head"]
    every = families(workload, pool("a100-40"), 4)
    family = every.price_family(max(every.iterate_families(), key=len))
    assert [every.graph.blocks[number].name for number in every.order] == names
    assert (np.diagonal(family.resharding_s, axis1=1, axis2=2) == 0).all()
    assert family.resharding_s[0].max() > 0


def test_tied_weights_share_a_layout() -> None:
    workload = Workload(small(vocab=200_000, tied_embeddings=True), 512, 64, "bf16")
    per_layer = perlayer.find_best_strategies(workload, pool("l4"), 8)
    assert per_layer is not None
    ends = {group.name: group.plan for group in per_layer.groups if not group.layers}
    assert ends["embedding"].tensor == ends["head"].tensor
    assert ends["embedding"].zero_stage == ends["head"].zero_stage


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    workload = Workload(small(layers=16, vocab=200_000), 2048, 256, "bf16")
    plan = Plan(data=1, tensor=2, pipeline=4, micro_batch=4, gradient_accumulation=64, sequence_parallel=True)
    cut = perlayer.cut_pipeline(workload, pool("a100-80"), plan)
    assert cut is not None
    assert sum(cut.layers) == 16
    assert cut.layers[-1] < 4
    assert cut.step_s < 0.9 * cut.even_s


def test_stages_sum_their_gradients_as_the_step_does() -> None:
    """With short micro-batches the exchange takes a fifth of the step; the bubble is short beside so many of them."""
    workload = Workload(small(layers=8, hidden=4096, heads=32), 512, 256, "bf16", execution="compiled")
    plan, on = Plan(pipeline=4, micro_batch=1, gradient_accumulation=256), pool("a100-80")
    prices, times = perlayer.cut_pipeline(workload, on, plan), search.price(workload, Plans.from_plans(plan), on).times
    assert prices is not None
    parts = times.parts(0)
    assert prices.even_s == pytest.approx(parts["compute"] + parts["communication"] + parts["bubble"], rel=0.01)


@pytest.mark.parametrize("plan", [Plan(data=8), Plan(pipeline=4, virtual_stages=2, gradient_accumulation=8)])
def test_nothing_is_cut_without_stages_to_cut(plan: Plan) -> None:
    assert perlayer.cut_pipeline(Workload(small(layers=16), 512, 8, "bf16"), pool("a100-80"), plan) is None


def test_what_has_no_strategies_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="for training"):
        perlayer.find_best_strategies(Workload(small(), 512, 8, "bf16", training=False), pool("a100-80"), 8)
    with pytest.raises(SpecError, match="offload"):
        perlayer.find_best_strategies(Workload(small(), 512, 8, "bf16", offload="optimizer"), pool("a100-80"), 8)
    assert main(["advise", "resnet-50", "--batch", "256", "--gpus", "t4:8", "--precision", "fp16", "--per-layer"]) == 0
    assert "priced as one block" in capsys.readouterr().out


def test_programs_read_it_as_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(EXAMPLE), "--gpus", "t4:8", "--per-layer", "-o", "json"]) == 0
    section = json.loads(capsys.readouterr().out)["perLayer"]["strategies"]
    assert section["boundSeconds"] <= section["stepSeconds"] < 0.995 * section["uniform"]["stepSeconds"]
    assert sorted(layer for group in section["groups"] for layer in group["layers"]) == list(range(1, 49))
