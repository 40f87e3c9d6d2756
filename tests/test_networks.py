"""Networks beyond plain transformers and classifiers: what they shard, freeze, repeat and attend to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast import memory, search, zoo
from tilecast.advice.enumeration import enumerate_partial_plan
from tilecast.graph import Shards
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.search import PlanLimits, list_expert_degrees
from tilecast.spec import PartialPlan, Plan, Plans, SpecError, Workload
from tilecast.zoo.cnn import resnet, sequence
from tilecast.zoo.cnn.builder import NetworkBuilder
from tilecast.zoo.numerics import Numerics
from tilecast_lab.validate import table

ONE = np.ones(1, dtype=np.int64)
WHOLE = Shards(ONE, ONE, ONE, ONE, ONE * 0)


@given(ranks=st.sampled_from([2, 4, 8, 64]), batch=st.integers(1, 64))
def test_identities_are_spread_and_their_work_is_not(ranks: int, batch: int) -> None:
    """A rank sees the samples of all ranks and its share of the identities: the same FLOPs, a share of the weights."""
    workload = Workload(zoo.find_preset("insightface-r50"), 1, batch, "fp16")
    whole, share = (
        resnet.build_identity_classifier(workload, Shards(ONE * batch, ONE, ONE, ONE * expert, ONE * 0))
        for expert in (1, ranks)
    )
    work = [sum(float(op.table.flops()[0]) for op in one.ops if op.table.kind[0] == 0) for one in (whole, share)]
    assert work[0] == pytest.approx(work[1])
    assert whole.parameters[0] == pytest.approx(ranks * share.parameters[0])
    assert whole.parameters[0] == 512 * 85742
    assert share.expert_parameters[0] == share.parameters[0]


@given(ranks=st.sampled_from([1, 2, 4, 8, 64]))
def test_tables_are_spread_over_all_ranks(ranks: int) -> None:
    """A rank holds a share of the table's weights and moments; keys and vectors are its own; no gradient is reduced."""
    workload = Workload(zoo.find_preset("dlrm-small"), 1, 64 * ranks, "fp16", optimizer="adam")
    plans = Plans.from_plans(Plan(data=ranks, expert=ranks, micro_batch=64))
    sharded = zoo.build_sharded_graph(workload, plans)
    held = 4_187_000_000 / ranks
    bill = memory.footprint(workload, sharded, plans)
    (block,) = sharded.graph.blocks
    assert block.table_parameters[0] == pytest.approx(held)
    assert bill.parameters[0] == pytest.approx(4 * held + 2 * block.parameters[0])
    assert bill.optimizer[0] == pytest.approx(8 * held + 12 * block.parameters[0])
    assert block.parameters[0] < 3e6
    sizes = {transfer.name: transfer.size_bytes[0] for transfer in block.collectives}
    assert sizes == {"keys": 64 * 26 * 8, "vectors": 64 * 26 * 256, "vectors.gradient": 64 * 26 * 256}


@given(share=st.floats(0.01, 1.0))
def test_rows_come_from_memory_once_and_travel_as_often_as_they_are_asked_for(share: float) -> None:
    model = zoo.find_preset("dlrm-small")
    workload = Workload(model.with_dimensions(distinct=share), 1, 64, "fp16", optimizer="adam")
    (block,) = zoo.build(workload, Shards(ONE * 64, ONE, ONE, ONE * 8, ONE * 0)).layers
    moved = {op.name: float(op.table.bytes()[0]) for op in block.ops if op.name.startswith("tables")}
    row = 128 * 4
    assert moved["tables"] == pytest.approx(64 * 26 * (share + 1) / 2 * (8 + 2 * row))
    assert moved["tables.gradient"] == pytest.approx(64 * 26 * share * (8 + 3 * row))
    assert moved["tables.update"] == pytest.approx(64 * 26 * share * 5 * row)
    assert moved["tables.sort"] == pytest.approx(64 * 26 * 16)
    assert {transfer.size_bytes[0] for transfer in block.collectives} == {64 * 26 * 8, 64 * 26 * 256}


def test_search_spreads_tables_over_all_ranks_and_identities_over_all_or_none() -> None:
    data = np.array([1, 2, 6])
    assert list_expert_degrees(zoo.find_preset("dlrm-small"), data).tolist() == [[1], [2], [6]]
    assert list_expert_degrees(zoo.find_preset("insightface-r50"), data).tolist() == [[1, 0], [1, 2], [1, 6]]
    assert list_expert_degrees(zoo.find_preset("resnet-50"), data).tolist() == [[1], [1], [1]]
    assert list_expert_degrees(zoo.find_preset("mixtral-8x7b"), data).tolist() == [
        [1, 0, 0, 0],
        [1, 2, 0, 0],
        [1, 2, 0, 0],
    ]


def test_a_diffusion_network_attends_to_pixels_and_text() -> None:
    """Each of two products takes 2 (s_q s_kv h) FLOPs: five layers at three sizes, one at an eighth of the size.

    The keys are the pixels', then the text's 77.
    """
    workload = Workload(zoo.find_preset("stable-diffusion-v2"), 1, 1, "fp16", training=False, attention="eager")
    (network,) = zoo.build(workload, WHOLE).layers
    flops = sum(
        op.count * float(op.table.flops()[0])
        for op in network.ops
        if op.table.kind[0] == 0 and op.name.startswith("attention.")
    )
    layers = [(4096, 320, 5), (1024, 640, 5), (256, 1280, 5), (64, 1280, 1)]
    closed = sum(count * 4 * pixels * (pixels + 77) * width for pixels, width, count in layers)
    assert flops == pytest.approx(closed)


def test_a_model_is_cut_to_its_first_layers() -> None:
    """The first layers of DeepSeek-V3 are dense and stay so; a model without layers, or with fewer, is not cut."""
    cut = zoo.find_preset("deepseek-v3 cut to 4 layers")
    assert (cut.layers, cut.hidden, cut.dimensions) == (4, 7168, zoo.find_preset("deepseek-v3").dimensions)
    blocks = zoo.build(Workload(cut, 4096, 1), WHOLE).layers
    assert {block.name: block.repeat for block in blocks} == {"layer": 3, "expert-layer": 1}
    assert zoo.is_preset("llama3-70b (cut to 12 layers)")
    for name in ("resnet-50 cut to 3 layers", "llama3-70b cut to 81 layers"):
        with pytest.raises(SpecError, match="layers, not"):
            zoo.find_preset(name)


@given(
    steps=st.integers(1, 64),
    batch=st.integers(1, 64),
    cells=st.sampled_from([128, 1024]),
    cell=st.sampled_from(list(sequence.GATES)),
)
def test_a_recurrent_layer_is_one_product_for_all_steps_and_one_for_each(
    steps: int, batch: int, cells: int, cell: str
) -> None:
    """There are 2 b s g h (i + h) FLOPs forward and twice that backward; products with the state run one by one."""
    numerics = Numerics.from_workload(Workload(zoo.find_preset("lstm-ptb"), 1, 1, "fp16"))
    net = NetworkBuilder(numerics, np.array([float(batch)]), 256, (1, 1, steps))
    sequence.add_recurrent(net, "layer", steps, 256, cells, cell=cell)
    products = [op for op in net.ops if op.table.kind[0] == 0]
    work = sum(op.count * float(op.table.flops()[0]) for op in products)
    gates = sequence.GATES[cell] * cells
    assert work == pytest.approx(3 * 2 * batch * steps * gates * (256 + cells))
    assert net.parameters == gates * (256 + cells + 2)
    chained = [op for op in products if op.count > 1]
    assert {op.count for op in chained} <= {steps} and len(chained) == (2 if steps > 1 else 0)


def test_fixed_norms_keep_nothing() -> None:
    """A detector's pretrained, frozen backbone keeps no input of a norm for the backward pass."""
    free, fixed = (
        zoo.build(Workload(model.with_dimensions(frozen=fixed), 1, 1, "fp16"), WHOLE)
        for fixed in (False, True)
        for model in (zoo.find_preset("retinanet-r50"),)
    )
    assert fixed.layers[0].activation_bytes[0, 0] < 0.7 * free.layers[0].activation_bytes[0, 0]
    assert fixed.layers[0].parameters[0] == free.layers[0].parameters[0]


@pytest.mark.parametrize(("name", "degrees"), [("dlrm-small", {8}), ("insightface-r50", {1, 8})])
def test_a_search_prices_only_what_the_model_can_spread(name: str, degrees: set[int]) -> None:
    link = find_link("nvlink3")
    pool = Pool("a100", find_gpu("a100-80"), gpus_per_node=8, max_nodes=1, intra=link, inter=link)
    plans = search.find(Workload(zoo.find_preset(name), 1, 1024, "fp16"), pool, PlanLimits(gpus=8))
    assert set(plans.plans.expert.tolist()) == degrees
    assert plans.fits.all()


ROW = {"gpu": "V100-SXM2-16GB", "gpus_per_node": "8", "n_gpus": "8", "precision": "fp32", "dp": "8", "tp": "1",
       "pp": "1", "micro_batch_per_gpu": "64", "global_batch": "512", "optimizer": "sgd"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "notes", "expected"),
    [
        ("InsightFace R100", 'Glint360k ("Partial FC, sample_ratio=0.1")', {"identities": 360232.0, "sampled": 0.1}),
        ("Wide&Deep Criteo", "vocabulary 3200000, embedding width 32, 7 hidden layers",
         {"table_weights": 102400000.0, "width": 32.0, "wide_weights": 3200000.0, "deep7": 1024.0}),
        ("D2 retinanet_R_50_FPN_1x", "multi-scale input (short side 640-800)", {"image": 800.0, "image_width": 1216.0}),
        ("D2 retinanet_R_50_FPN_1x", "short side 00-00", {"image": 800.0, "image_width": 1344.0}),
        ("GNMT", "", {"image_width": 50.0}),
    ],
)  # fmt: skip
def test_rows_state_dimensions_in_their_notes(name: str, notes: str, expected: dict[str, float]) -> None:
    extra = table.read_published_row(
        {**ROW, "model_name": name, "notes": notes, "seq_len": "50" if name == "GNMT" else ""}
    ).workload.model.document()["extra"]
    assert {key: extra[key] for key in expected} == expected


@pytest.mark.parametrize(("section", "expert"), [("Data Parallelism", 1), ("Model Parallelism", None)])
def test_a_section_says_whether_a_classifier_is_copied(section: str, expert: int | None) -> None:
    case = table.read_published_row({**ROW, "model_name": "InsightFace R100", "notes": f'("Face Emore > {section}")'})
    assert case.stated["expert"] == expert


def test_fewer_hidden_layers_replace_those_of_the_preset() -> None:
    extra = table.read_published_row(
        {**ROW, "model_name": "Wide&Deep Outbrain", "notes": "2 hidden layers"}
    ).workload.model.document()["extra"]
    assert [name for name in extra if name.startswith("deep")] == ["deep1", "deep2"]


def test_a_stated_plan_spreads_tables_without_being_told() -> None:
    workload = Workload(zoo.find_preset("dlrm-small"), 1, 1024, "fp16")
    assert set(enumerate_partial_plan(workload, 8, PartialPlan(data=8), "--plan").expert.tolist()) == {8}
    with pytest.raises(SpecError, match="ep=4 does not spread the rows of dlrm-small over 8 ranks; write ep=8"):
        enumerate_partial_plan(workload, 8, PartialPlan(data=8, expert=4), "--plan")
