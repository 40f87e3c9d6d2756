"""Stages of pipelines: how layers are split, and what each stage holds, computes and keeps."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast import frameworks, memory, search, zoo
from tilecast.advice.enumeration import enumerate_partial_plan
from tilecast.cli import main
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.launch_options.options_table import OptionTable
from tilecast.layout import SCHEDULES, choose_end_layers, count_virtual_stage_end_layers, parse_layout, split_layers
from tilecast.render.launch import write_launch
from tilecast.render.launch.setting import LaunchSetting
from tilecast.spec import PartialPlan, Plan, Plans, Schedule, SpecError, Workload
from tilecast.zoo import stages

LLAMA = Workload(zoo.find_preset("llama-3.1-405b"), 8192, 2048, framework="megatron")
QWEN = Workload(zoo.find_preset("qwen3-235b-a22b"), 4096, 2048, framework="megatron")


def pool(name: str, nodes: int = 1) -> Pool:
    gpu = find_gpu(name)
    return Pool(gpu.name, gpu, 8, nodes, find_link(gpu.intra_link), find_link("infiniband-ndr-8x400"))


@given(st.integers(1, 300), st.integers(1, 64), st.booleans())
def test_stages_hold_all_layers(layers: int, pipeline: int, ends: bool) -> None:
    split = split_layers(layers, pipeline, counts_ends=ends)
    assert len(split) == pipeline
    assert sum(split) == layers
    if ends and choose_end_layers(layers, pipeline):
        assert max(split) - min(split) <= 1
        assert split[-1] == max(split) - 1


@given(st.integers(1, 200), st.integers(2, 32), st.integers(2, 16))
def test_pieces_leave_a_stage_the_layers_that_it_has_without_them(layers: int, pipeline: int, virtual: int) -> None:
    ends = count_virtual_stage_end_layers(layers, pipeline, virtual)
    if ends is None:
        return
    full = (layers + ends) // pipeline
    split = [full - (ends == 2), *[full] * (pipeline - 2), full - (ends > 0)]
    assert tuple(split) == split_layers(layers, pipeline, counts_ends=True)


@pytest.mark.parametrize(
    ("workload", "gpus", "plan"),
    [
        (LLAMA, 16384, PartialPlan(tensor=8, pipeline=16, virtual_stages=8, micro_batch=1, zero_stage=1)),
        (QWEN, 256, PartialPlan(tensor=2, pipeline=8, virtual_stages=4, expert=32, micro_batch=1, zero_stage=1)),
    ],
)
def test_layers_that_divide_with_embedding_and_loss_can_be_interleaved(
    workload: Workload, gpus: int, plan: PartialPlan
) -> None:
    plans = enumerate_partial_plan(workload, gpus, plan, "plan")
    assert (plans.virtual_stages == plan.virtual_stages).all()
    with pytest.raises(SpecError, match="does not divide the"):
        enumerate_partial_plan(replace(workload, framework="deepspeed"), gpus, plan, "plan")
    with pytest.raises(SpecError, match="with or without embedding and loss as layers"):
        enumerate_partial_plan(workload, gpus, replace(plan, virtual_stages=5), "plan")


def test_the_search_finds_layouts_in_which_embedding_and_loss_count() -> None:
    plans = search.enumerate_plans(QWEN, pool("h100-sxm", nodes=32), search.PlanLimits(gpus=256))
    found = (plans.pipeline == 8) & (plans.virtual_stages == 4) & (plans.expert == 32)
    assert found.any()


def test_a_stage_with_fewer_layers_and_an_end_is_priced_as_it_is() -> None:
    plans = Plans.from_plans(Plan(tensor=8, pipeline=16, gradient_accumulation=16, sequence_parallel=True))
    sharded = zoo.build_sharded_graph(LLAMA, plans)
    layer, embedding = sharded.graph.layers[0].parameters[0], sharded.graph.first[0].parameters[0]
    assert sharded.sum_fullest_stage("parameters", plans)[0] == pytest.approx(max(8 * layer, 7 * layer + embedding))
    even = replace(LLAMA, framework="deepspeed")
    assert zoo.build_sharded_graph(even, plans).sum_fullest_stage("parameters", plans)[0] == pytest.approx(
        8 * layer + embedding
    )


def test_layers_of_unlike_kinds_are_counted_stage_by_stage() -> None:
    # DeepSeek-V3 has 3 dense layers, all of them in the first of 16 stages: others have 4 layers with experts.
    workload = Workload(zoo.find_preset("deepseek-v3"), 4096, 512)
    plans = Plans.from_plans(Plan(pipeline=16, data=2, expert=2))
    sharded = zoo.build_sharded_graph(workload, plans)
    expert = next(block for block in sharded.graph.layers if "expert" in block.name)
    assert sharded.sum_fullest_stage("expert_parameters", plans)[0] == pytest.approx(4 * expert.expert_parameters[0])


@given(st.integers(2, 16), st.integers(1, 8), st.integers(1, 8))
def test_micro_batches_in_flight_are_those_of_the_schedule(pipeline: int, virtual: int, rounds: int) -> None:
    count = pipeline * rounds
    plan = Plan(pipeline=pipeline, virtual_stages=virtual, gradient_accumulation=count)
    flights = [float(one[0]) for one in memory.micro_batches_in_flight(Plans.from_plans(plan))]
    for stage, flight in zip((0, 1), flights, strict=True):
        warmup = (pipeline - stage - 1) * (2 if virtual > 1 else 1) + (virtual - 1) * pipeline
        assert flight == pytest.approx(min(warmup + 1, count * virtual) / virtual)


def test_no_stage_keeps_more_micro_batches_than_there_are() -> None:
    plans = Plans.from_plans(Plan(pipeline=8, virtual_stages=4, gradient_accumulation=8))
    assert max(float(one[0]) for one in memory.micro_batches_in_flight(plans)) == 8.0


def test_a_plan_alone_costs_what_it_costs_among_pipelines_of_other_degrees() -> None:
    plans = [Plan(pipeline=p, gradient_accumulation=32, sequence_parallel=False) for p in (1, 2, 8, 16, 18)]
    workload = replace(LLAMA, global_batch=32)
    together = search.price(workload, Plans.from_plans(*plans), pool("h100-sxm"))
    alone = [search.price(workload, Plans.from_plans(plan), pool("h100-sxm")) for plan in plans]
    assert together.step_s.tolist() == [float(one.step_s[0]) for one in alone]
    assert np.all(together.memory_bytes == [float(one.memory_bytes[0]) for one in alone])


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_launch_lines_say_which_ends_count(
    framework: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "apiVersion: tilecast.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: a}\nspec:\n"
        "  model: {preset: llama-3.1-405b}\n"
        f"  training: {{sequenceLength: 512, globalBatchSize: 2048, framework: {framework}}}\n"
    )
    zero = "1" if framework == "megatron" else "2"
    plan = f"tp=8,pp=16,vp=8,mb=1,zero={zero},sp=1"
    assert main(["advise", str(path), "--gpus", "b200:1024", "--plan", plan, "--launch", framework]) == 0
    text = capsys.readouterr().out
    expected = {
        "megatron": ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"],
        "torchtitan": [
            "pipeline_parallel_first_stage_less_layers=1",
            "pipeline_parallel_last_stage_less_layers=1",
            "pipeline_parallel_layers_per_stage=1",
        ],
    }
    for words in expected[framework]:
        assert words in text


def test_interleaved_stages_hide_gradients_behind_as_many_micro_batches_as_there_are_stages() -> None:
    plans = Plans.from_plans(
        *(
            Plan(data=16, tensor=8, pipeline=6, zero_stage=1, gradient_accumulation=12, virtual_stages=virtual)
            for virtual in (1, 7)
        )
    )
    workload = replace(LLAMA, global_batch=192)
    times = search.price(workload, plans, pool("h100-sxm", nodes=96)).times
    assert times.hidden[1] > 1.5 * times.hidden[0]
    assert times.communication[1] < times.communication[0]


def test_sends_of_interleaved_stages_hide_behind_computation_where_the_framework_overlaps_them() -> None:
    plans = Plans.from_plans(
        *(Plan(pipeline=6, gradient_accumulation=12, virtual_stages=virtual) for virtual in (1, 7))
    )
    where, batch = pool("h100-sxm", nodes=1), {"global_batch": 12, "sequence_length": 4096}
    shown = {
        name: search.price(replace(LLAMA, framework=name, **batch), plans, where).times.communication
        for name in ("megatron", "torchtitan")
    }
    grows = {name: seconds[1] / seconds[0] for name, seconds in shown.items()}
    assert grows["torchtitan"] > 1.5 * grows["megatron"]


DEEPSEEK_LAYOUT = "Et*3|(tt|)*29,m|L"


def test_a_layout_in_megatrons_words_has_its_stages() -> None:
    layout = parse_layout(DEEPSEEK_LAYOUT)
    assert len(layout.pieces) == 32
    assert layout.layers == 61
    assert layout.predicted == 1
    assert layout.pieces[:3] + layout.pieces[-2:] == (3, 2, 2, 1, 0)
    assert parse_layout("Ett|tt|tL").pieces == (2, 2, 1)


@pytest.mark.parametrize(
    "text", ["", "tt|tt", "Ett|tt", "tt|ttL", "Ett|xL", "Et*99999|L", "E(t*9000)*9000L", "EtLt", "Et|E|L"]
)
def test_what_is_no_layout_is_refused_with_field_and_remedy(text: str) -> None:
    with pytest.raises(SpecError, match="pipelineLayout") as refused:
        parse_layout(text)
    assert refused.value.remedy


def test_a_stated_layout_gives_each_rank_its_pieces() -> None:
    workload = Workload(
        zoo.find_preset("deepseek-v3"), 4096, 512, framework="megatron", pipeline_layout=DEEPSEEK_LAYOUT
    )
    plans = Plans.from_plans(Plan(pipeline=16, virtual_stages=2, gradient_accumulation=32))
    sharded = zoo.build_sharded_graph(workload, plans)
    kinds = stages.find_stage_kinds(sharded.graph, plans.pipeline, stages.is_folded_by_plan(sharded.graph, plans))
    layers = kinds.layers.sum(axis=0)[:, 0]
    # The first rank has three dense layers and two with experts, the last one two and the loss.
    assert layers[kinds.first[:, 0] == 1.0].tolist() == [5.0] * int(kinds.first.sum())
    assert layers[kinds.last[:, 0] == 1.0].tolist() == [2.0] * int(kinds.last.sum())
    assert sum(block.repeat for block in sharded.graph.layers) == 62
    plain = zoo.build_sharded_graph(replace(workload, pipeline_layout=None), plans)
    assert any(block.name.startswith("mtp.") for block in sharded.graph.last)
    assert not any(block.name.startswith("mtp.") for block in plain.graph.blocks)


def test_the_search_keeps_to_a_stated_layout() -> None:
    workload = Workload(
        zoo.find_preset("gpt3-175b"), 2048, 96, framework="megatron", pipeline_layout="Et*11|(t*12|)*6t*13L"
    )
    plans = search.enumerate_plans(workload, pool("h100-sxm", nodes=8), search.PlanLimits(gpus=64))
    assert set(plans.pipeline * plans.virtual_stages) == {1, 8}


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ("pipelineSchedule: zbv, framework: megatron", "spec.training.pipelineSchedule: megatron has no zbv; use 1f1b"),
        ("pipelineSchedule: zbv, framework: megatron", "use 1f1b, interleaved, or use framework torchtitan\n"),
        ("pipelineSchedule: 1f1b, framework: ddp",
         "pipelineSchedule: ddp has no pipeline parallelism; leave it out, or use framework deepspeed, megatron, "),
        ("pipelineSchedule: dualPipe, framework: fsdp2", "fsdp2 has no pipeline parallelism; leave it out\n"),
        ("pipelineLayout: Ett|ttL, framework: megatron", "lays out 4 layers t, llama-3.1-405b has 126; write 126"),
        ("pipelineLayout: Ett|ttL, framework: torchtitan", "torchtitan splits layers by its own rule; leave it out"),
        ("pipelineLayout: Exx, framework: megatron", "spec.training.pipelineLayout: 'Exx' is no layout; write"),
        ("pipelineSchedule: gpipe", "spec.training.pipelineSchedule"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_pipelines_that_do_not_exist_are_refused_in_one_line(
    training: str, message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "apiVersion: tilecast.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: a}\nspec:\n"
        "  model: {preset: llama-3.1-405b}\n"
        f"  training: {{sequenceLength: 512, globalBatchSize: 2048, {training}}}\n"
    )
    assert main(["advise", str(path), "--gpus", "b200:1024"]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_a_stated_plan_has_the_pieces_of_its_schedule_and_its_layout() -> None:
    plan = PartialPlan(tensor=8, pipeline=16, virtual_stages=8, micro_batch=1, zero_stage=1)
    with pytest.raises(SpecError, match="vp=8 does not suit"):
        enumerate_partial_plan(replace(LLAMA, pipeline_schedule="1f1b"), 16384, plan, "plan")
    layout = "Et*7|(t*8|)*14,t*7L"
    with pytest.raises(SpecError, match="let pp times vp be 16"):
        enumerate_partial_plan(replace(LLAMA, pipeline_layout=layout), 16384, plan, "plan")
    assert enumerate_partial_plan(
        replace(LLAMA, pipeline_layout=layout), 16384, replace(plan, virtual_stages=1), "plan"
    )


SCHEDULED = Plan(pipeline=8, gradient_accumulation=32)


def scheduled(schedule: Schedule, virtual: int = 1) -> search.PricedPlans:
    workload = Workload(zoo.find_preset("gpt3-175b"), 2048, 32, pipeline_schedule=schedule)
    return search.price(workload, Plans.from_plans(replace(SCHEDULED, virtual_stages=virtual)), pool("b200"))


def test_schedules_order_bubbles_and_memory_as_their_papers_do() -> None:
    usual, filled, both = (scheduled(name) for name in ("1f1b", "zeroBubble", "dualPipe"))
    pieces, zbv = scheduled("interleaved", 2), scheduled("zbv", 2)
    assert zbv.times.bubble[0] < filled.times.bubble[0] < usual.times.bubble[0]
    assert zbv.times.bubble[0] < pieces.times.bubble[0] < usual.times.bubble[0]
    assert both.times.bubble[0] < filled.times.bubble[0]
    assert usual.memory_bytes[0] <= filled.memory_bytes[0] < pieces.memory_bytes[0]
    assert zbv.memory_bytes[0] < pieces.memory_bytes[0]
    # DualPipe holds the weights of two stages, and one more micro-batch.
    assert both.memory_bytes[0] > filled.memory_bytes[0] + 175e9 / 8 * 2


def test_every_schedule_of_a_framework_is_known_and_torchtitan_launches_its_own() -> None:
    for name, cells in frameworks.FRAMEWORKS.items():
        assert cells.schedules <= set(SCHEDULES), name
    values = OptionTable.read("torchtitan").options["parallelism.pipeline-parallel-schedule"]["values"]
    assert set(values.values()) == frameworks.FRAMEWORKS["torchtitan"].schedules


@pytest.mark.parametrize(
    ("pipeline", "layout", "words"),
    [
        (1, None, "--mtp-num-layers 1"),
        (2, "Et*31|t*30mL", "--mtp-num-layers 1"),
        (2, "Et*31|t*30mmL", "--mtp-num-layers 2"),
        (2, "Et*31|t*30L", "m in training.pipelineLayout"),
    ],
)
def test_megatron_predicts_the_further_tokens_of_a_model(pipeline: int, layout: str | None, words: str) -> None:
    workload = Workload(zoo.find_preset("deepseek-v3-mtp"), 4096, 64, framework="megatron", pipeline_layout=layout)
    plan = Plan(data=8, pipeline=pipeline, expert=8, zero_stage=1, gradient_accumulation=8)
    setting = LaunchSetting("job", workload, plan, "h100-sxm", pipeline, 8, 1.0)
    if not words.startswith("--"):
        with pytest.raises(SpecError, match=words):
            write_launch("megatron", setting)
        return
    assert words in " ".join(write_launch("megatron", setting).command)
