"""A job that requests more than one search prices is refused by counts, before it costs anything."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from operator_store import JOBS, Store, job, operator, ready, settled
from tilecast import graph, zoo
from tilecast.advice import Advice, Request, advise, enumeration
from tilecast.advice.enumeration import list_job_variants
from tilecast.advice.pricing import find_candidates
from tilecast.api import training_job
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.jobs import move_message_to_annotation
from tilecast.spec import SearchTooLargeError, SpecError, Workload
from tilecast.trace import Trace, TraceOperator
from tilecast.zoo import huggingface, traced

TRAINING = {"globalBatchSize": 256}
DEPTHS = [1000] * 4
TALL: dict[str, dict[str, Any]] = {
    "resnet": {
        "model_type": "resnet",
        "depths": DEPTHS,
        "hidden_sizes": [64] * 4,
        "embedding_size": 64,
        "layer_type": "bottleneck",
        "architectures": ["ResNetForImageClassification"],
    },
    "convnext": {"model_type": "convnext", "depths": DEPTHS, "hidden_sizes": [96] * 4},
    "segformer": {
        "model_type": "segformer",
        "depths": DEPTHS,
        "hidden_sizes": [32, 64, 160, 256],
        "num_attention_heads": [1, 2, 5, 8],
        "sr_ratios": [8, 4, 2, 1],
        "decoder_hidden_size": 256,
    },
    "efficientnet": {
        "model_type": "efficientnet",
        "width_coefficient": 1.0,
        "depth_coefficient": 10_000.0,
        "image_size": 224,
    },
}

LEFT_OUT = "some node counts, degrees of expert tensor parallelism (etp) or pipeline schedules were left out"


def asked(config: dict[str, Any], **training: Any) -> Request:
    spec = {"model": {"huggingFace": {"config": config}}, "training": TRAINING | training}
    return training_job.read_request(training_job.training_job_document("a", spec))


def pool(name: str, gpu: str = "h100-sxm") -> Pool:
    facts = find_gpu(gpu)
    return Pool(name, facts, 8, 16, find_link(facts.intra_link), find_link("infiniband-ndr-8x400"))


@pytest.mark.parametrize("config", TALL.values(), ids=TALL.keys())
@pytest.mark.slow
def test_a_network_of_too_many_layers_is_refused_as_it_is_read(config: dict[str, Any]) -> None:
    with pytest.raises(SearchTooLargeError) as error:
        asked(config)
    assert error.value.field == "spec.model"
    assert "distinct operators of the model are more than the 12,000 that one search prices" in error.value.problem
    assert isinstance(pickle.loads(pickle.dumps(error.value)), SearchTooLargeError)  # noqa: S301
    assert move_message_to_annotation(str(error.value)).startswith("tilecast.dev/model: ")


@pytest.mark.slow
def test_the_largest_published_models_are_read_with_a_wide_margin() -> None:
    configs = json.loads((Path(__file__).parent / "configs.json").read_text())
    names = ("stabilityai/stable-diffusion-xl-base-1.0/unet", "nvidia/segformer-b5-finetuned-ade-640-640")
    largest = [huggingface.model(configs[name].get("config", configs[name])) for name in names] + [
        zoo.find_preset("densenet-201")
    ]
    counts = [zoo.count_operators(Workload(model, 1, 1)) for model in largest]
    assert counts[0] == max(counts) and 2 * counts[0] < graph.MOST_OPERATORS, counts


def test_a_graph_of_too_many_operators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {
        "x": (1, 64),
        **{f"w{n}": (64 + n, 65 + n) for n in range(40)},
        **{f"y{n}": (1, 65 + n) for n in range(40)},
    }
    operators = tuple(
        TraceOperator(
            "matmul",
            (f"y{n - 1}" if n else "x", f"w{n}"),
            (f"y{n}",),
            {"batch": 1.0, "rows": 1.0, "columns": 65.0 + n, "depth": 64.0 + n},
        )
        for n in range(40)
    )
    trace = Trace(1, 1, ("x",), tuple(f"w{n}" for n in range(40)), ("y39",), shapes, operators)
    workload = Workload(traced.build_model("a", trace), 1, 8)
    assert zoo.count_operators(workload) > 40
    monkeypatch.setattr(graph, "MOST_OPERATORS", 39)
    with pytest.raises(SearchTooLargeError, match="40 distinct operators"):
        advise(Request("a", workload), [pool("a")])


@pytest.mark.slow
def test_what_a_job_leaves_open_is_counted_with_the_models_operators() -> None:
    config = TALL["resnet"] | {"depths": [60, 60, 60, 60]}
    one = advise(asked(config), [pool("a")])
    assert one.best is not None
    request = asked(
        config,
        globalBatchSizeRange={"min": 1, "max": 2**24},
        allowedPrecisions=["fp32", "tf32", "bf16", "fp16"],
        precision="bf16",
    )
    with pytest.raises(SearchTooLargeError) as error:
        advise(request, [pool("a")])
    assert error.value.field == "spec.training.globalBatchSizeRange"
    assert "more than the 64,000 that one search prices" in str(error.value)


def test_where_there_are_too_many_plans_fewer_node_counts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("a", Workload(zoo.find_preset("llama-2-7b"), 4096, 720, micro_batch=1))
    everything = advise(request, [pool("a"), pool("b")])
    monkeypatch.setattr(enumeration, "MOST_PLANS", everything.plans_evaluated - 1)
    fewer = advise(request, [pool("a"), pool("b")])
    assert fewer.best is not None and 0 < fewer.plans_evaluated < everything.plans_evaluated
    note = f"The job has more plans than one search prices: {LEFT_OUT}."
    assert note in fewer.notes and note not in everything.notes
    monkeypatch.setattr(enumeration, "MOST_PLANS", 10)
    with pytest.raises(
        SearchTooLargeError, match=r"spec\.training\.globalBatchSize: .* plans left are more than the 10 "
    ):
        advise(request, [pool("a"), pool("b")])


@pytest.mark.slow
def test_where_there_are_still_too_many_plans_fewer_global_batches_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(zoo.find_preset("llama-2-7b"), 4096, 720)
    request = Request("a", workload, batches=(720, 5040), precisions=("tf32", "bf16", "fp16"))
    pools = [pool("a"), pool("b")]
    advice = advise(request, pools)
    assert advice.best is not None and advice.plans_evaluated <= enumeration.MOST_PLANS
    note = f"The job has more plans than one search prices: {LEFT_OUT} and 2 of 5 global batches"
    assert f"{note} were tried." in advice.notes
    assert advise(request, pools) == advice
    tried = {item.global_batch for each in enumeration.enumerate_pools(request, pools) for item in each.variants}
    assert tried == {720, 4608}
    monkeypatch.setattr(enumeration, "MOST_PLANS", 230_000)
    advice = advise(request, pools)
    assert advice.best is not None and advice.best.workload.global_batch == 720
    assert f"{LEFT_OUT} and 1 of 5 global batches were tried." in " ".join(advice.notes)
    assert len(find_candidates(request, pool("a"))) <= 230_000


def test_global_batches_are_thinned_to_both_ends_and_the_most_factors_of_two() -> None:
    request = Request("a", Workload(zoo.find_preset("gpt2"), 1024, 40), batches=(3, 50))
    batches = {most: [item.global_batch for item in list_job_variants(request, pool("a"), most)] for most in (4, 2, 0)}
    assert batches == {4: [40, 3, 16, 32, 50], 2: [40, 3, 50], 0: [40]}


@pytest.mark.slow
async def test_the_operator_says_so_in_the_status_and_does_not_try_again() -> None:
    store, searched = Store(), list[str]()

    def counting(request: Request, pools: Sequence[Pool]) -> Advice:
        searched.append(request.name)
        if len(searched) > 1:
            raise SearchTooLargeError.from_counts(
                "spec.training.globalBatchSizeRange", 11, 10, "plans left", "narrow it"
            )
        return advise(request, pools)

    tall = {"huggingFace": {"config": TALL["resnet"]}}
    store.put(f"{JOBS}/a", {**job("a"), "spec": {**job("a")["spec"], "model": tall, "training": TRAINING}})
    store.put(f"{JOBS}/b", job("b"))
    async with operator(store, counting) as running:
        await settled(running)
        for name in ("a", "b"):
            state = ready(store.objects[f"{JOBS}/{name}"])
            assert (state["status"], state["reason"]) == ("False", "SearchTooLarge"), state
        assert "11 plans left are more than the 10 that one search prices; narrow it" in state["message"]
        assert searched == ["warm-up", ""]
        assert running.metrics.registry.get_sample_value("tilecast_retries_total") == 0


def test_an_error_keeps_its_kind_about_another_field() -> None:
    error = SearchTooLargeError("spec.model", "is too large", "make it smaller").at("annotation")
    assert isinstance(error, SearchTooLargeError) and str(error) == "annotation: is too large; make it smaller"
    assert type(SpecError("a", "b", "c").at("d", "e")) is SpecError
