"""Manifests of users: read as meant, or refused in one line that says where, what and how to correct it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import memory, search, zoo
from tilecast.advice import advise
from tilecast.api import documents, gpu_pool, training_job
from tilecast.api.training import Training
from tilecast.hardware import Pool, find_gpu, find_link
from tilecast.nodes.override import override_pool
from tilecast.spec import Plan, Plans, SpecError

EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "jobs").glob("*.yaml"))


def job(**spec: Any) -> dict[str, Any]:
    base = {
        "model": {"preset": "llama-2-7b"},
        "training": {"sequenceLength": 4096, "globalBatchSize": 64},
    }
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "a-job"},
        "spec": {**base, **spec},
    }


def training(**fields: Any) -> dict[str, Any]:
    return job(training={"sequenceLength": 4096, "globalBatchSize": 64, **fields})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_request(path: Path) -> None:
    (document,) = documents.load_documents(path.read_text(encoding="utf-8"))
    request = training_job.read_request(document)
    assert request.name == path.stem
    assert request.workload.global_batch == document["spec"]["training"]["globalBatchSize"]
    assert request.workload.model.name


def test_examples_are_plain_block_yaml() -> None:
    assert {path.stem for path in EXAMPLES} >= {"llama-7b-pretrain", "bert-large-pretrain", "resnet-50", "gpt2-xl-fp16"}
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        assert ("preset:" in text) != ("huggingFace:" in text)
        assert "globalBatchSize:" in text and "{" not in text


def test_defaults() -> None:
    workload = training_job.read_request(job()).workload
    assert (workload.precision, workload.optimizer, workload.checkpointing) == ("bf16", "adamw", None)
    assert workload.training and workload.steps is None


def test_tokens_become_steps_rounded_up() -> None:
    assert training_job.read_request(training(tokens=4096 * 64 * 10 + 1)).workload.steps == 11


def test_inference_has_neither_optimizer_nor_recomputation() -> None:
    workload = training_job.read_request(job(workload="inference")).workload
    assert (workload.training, workload.optimizer, workload.checkpointing) == (False, "none", "none")


def test_constraints_and_baseline_arrive() -> None:
    request = training_job.read_request(
        job(
            constraints={"gpus": 8, "maxNodes": 2, "maxTensorParallel": 4, "allowedPools": ["t4"]},
            baseline={"pool": "t4", "gpus": 4},
            objective="cost",
        )
    )
    limits = request.constraints
    assert (limits.gpus, limits.max_gpus, limits.max_nodes, limits.max_tensor) == (8, None, 2, 4)
    assert limits.allowed_pools == ("t4",)
    assert request.baseline is not None and (request.baseline.pool, request.baseline.gpus) == ("t4", 4)
    assert request.objective == "cost"


def test_explicit_dimensions_equal_the_preset() -> None:
    explicit = training_job.read_request(
        job(
            model={
                "transformer": {
                    "layers": 32,
                    "hiddenSize": 4096,
                    "attentionHeads": 32,
                    "feedForwardSize": 11008,
                    "vocabularySize": 32000,
                    "rotary": True,
                    "gatedFeedForward": True,
                    "rmsNorm": True,
                    "bias": False,
                    "tiedEmbeddings": False,
                }
            }
        )
    ).workload.model
    preset = training_job.read_request(job()).workload.model
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "gated_mlp", "rotary"):
        assert getattr(explicit, name) == getattr(preset, name), name


def test_quantized_weights_are_the_frozen_ones() -> None:
    lora, qlora = (
        training_job.read_request(training(loraRank=16, **more)).workload for more in ({}, {"quantization": "nf4"})
    )
    assert (lora.frozen_bits, qlora.frozen_bits) == (16, 4)
    plans = Plans.from_plans(Plan(data=8, micro_batch=1, zero_stage=3), Plan(data=8, micro_batch=1))
    gpu = find_gpu("a100-80")
    pool = Pool("a100-80", gpu, 8, 1, find_link(gpu.intra_link), find_link("ethernet-100"))
    whole, quarter = (search.price(job, plans, pool) for job in (lora, qlora))
    held = [memory.footprint(job, zoo.build_sharded_graph(job, plans), plans).parameters[0] for job in (lora, qlora)]
    assert held[1] < 0.4 * held[0]
    assert quarter.times.communication[0] < whole.times.communication[0]  # 4 bits are gathered
    assert quarter.times.compute[1] > whole.times.compute[1]  # and written in 16 bits, whether or not they are gathered


WRONG: list[tuple[dict[str, Any], str, str]] = [
    (training(globalBatchsize=1), "spec.training.globalBatchsize", "did you mean globalBatchSize?"),
    (job(objectiv="time"), "spec.objectiv", "did you mean objective?"),
    (training(globalBatchSize=0), "spec.training.globalBatchSize", "1 or more"),
    (training(globalBatchSize="64"), "spec.training.globalBatchSize", "samples of one optimizer step"),
    (training(globalBatchSize=True), "spec.training.globalBatchSize", "samples"),
    (training(globalBatchSize=1.5), "spec.training.globalBatchSize", "samples"),
    (training(globalBatchSize=2**40), "spec.training.globalBatchSize", "or less"),
    (training(globalBatchSize=None), "spec.training.globalBatchSize", "samples"),
    (training(precision="bf61"), "spec.training.precision", "did you mean bf16?"),
    (training(precision="int3"), "spec.training.precision", "use one of fp32, tf32, fp16, bf16, fp8"),
    (training(microBatchSize=7), "spec.training", "leave microBatchSize out"),
    (training(steps=1, tokens=1), "spec.training", "give one"),
    (job(training={"globalBatchSize": 8}), "spec.training.sequenceLength", "how many"),
    (job(training={"sequenceLength": 8}), "spec.training.globalBatchSize", "add it"),
    (job(training=None), "spec.training", "a mapping with globalBatchSize"),
    (job(training=[1]), "spec.training", "a mapping with globalBatchSize"),
    (job(model="gpt2"), "spec.model", "a mapping with preset or"),
    (job(model={"preset": "llama-2-7bb"}), "spec.model.preset", "did you mean llama-2-7b?"),
    (job(model={"preset": "me/My-9B"}), "spec.model.preset", "give its config.json as model.huggingFace"),
    (job(model={"preset": "x" * 64}), "spec.model.preset", "architecture"),
    (job(model={}), "spec.model", "preset: llama-2-7b"),
    (job(model={"transformer": {}}), "spec.model.transformer.layers", "add it"),
    (training(loraRank=0), "spec.training.loraRank", "1 or more"),
    (training(quantization="nf4"), "spec.training", "give loraRank"),
    (training(frameworkVersion="2.6"), "spec.training", "name the framework"),
    (training(framework="ddp", frameworkVersion="latest"), "spec.training.frameworkVersion", ""),
    (training(quantization="nf4", loraRank=8, allowedPrecisions=["bf16", "fp8"]), "spec.training", "use bf16 or fp16"),
    (training(quantization="int4", loraRank=8), "spec.training.quantization", "int8"),
    (training(quantization="nf4", loraRank=8, precision="fp32"), "spec.training", "use bf16 or fp16"),
    (job(model={"preset": "gpt2", "huggingFace": {"config": {}}}), "spec.model", "preset: llama-2-7b"),
    (job(model={"graphRef": {}}), "spec.model.graphRef.configMapKeyRef", "add it"),
    (
        job(model={"graphRef": {"configMapKeyRef": {"name": "m"}}}),
        "spec.model.graphRef.configMapKeyRef.name",
        "create it",
    ),
    (job(model={"huggingFace": {"config": []}}), "spec.model.huggingFace.config", "content of the model"),
    (job(model={"preset": "resnet-50"}), "spec.training.sequenceLength", "leave it out"),
    (job(model={"preset": "bert-large"}), "spec.training.sequenceLength", "shorten it"),
    (job(mode=False), "spec.mode", '"Off"'),
    (job(mode="Auto"), "spec.mode", "use one of Off, Advise"),
    (job(constraints={"gpus": 8, "maxGpus": 4}), "spec.constraints", "maxGpus"),
    (job(constraints={"allowedPools": ["a", 3]}), "spec.constraints.allowedPools[1]", "names of the pools"),
    (
        job(workload="inference", training={"sequenceLength": 8, "globalBatchSize": 8, "optimizer": "adam"}),
        "spec",
        "out",
    ),
    ({**job(), "kind": "PyTorchJob"}, "kind", "TrainingJob"),
    ({**job(), "apiVersion": "v1"}, "apiVersion", "tilecast.dev/v1alpha1"),
    ({**job(), "spce": {}}, "spce", "did you mean spec?"),
    ({**job(), "metadata": {}}, "metadata.name", "name"),
    ({**job(), "metadata": "x"}, "metadata.name", "name"),
    ({**job(), "spec": "x"}, "spec", "examples"),
    ({}, "apiVersion", "tilecast.dev/v1alpha1"),
]


@pytest.mark.parametrize(("document", "field", "remedy"), WRONG, ids=[f"{row[1]}-{i}" for i, row in enumerate(WRONG)])
def test_wrong_documents_name_field_and_remedy(document: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(SpecError) as caught:
        training_job.read_request(document)
    assert caught.value.field == field
    assert remedy in caught.value.remedy
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("rule", [*Training.rules, *training_job.JobConstraints.rules], ids=lambda rule: rule.cel)
def test_rules_read_as_problem_and_remedy(rule: Any) -> None:
    assert rule.problem[0].islower() and rule.problem[-1] != "." and rule.remedy


HOSTILE = {
    "deep flow": "[" * 100_000,
    "deep block": "\n".join(" " * level + "a:" for level in range(200)),
    "alias bomb": "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
    "deep aliases": "a0: &a0 " + "[" * 9 + "]" * 9 + "".join(f"\na{i}: &a{i} [[[[*a{i - 1}]]]]" for i in range(1, 40)),
    "alias of itself": "a: &a {b: [*a]}",
    "alias of nothing": "a: *a",
    "tabs": "a:\n\t- b",
    "not YAML": "%%% what",
    "unclosed": '{"a": [1, 2',
    "binary": "\x00\x01\x02",
    "python object": "!!python/object/apply:os.system ['true']",
    "a list": "- a\n- b",
    "plain text": "hello",
    "unhashable key": "? [a, b]\n: c",
    "impossible date": "a: 2001-99-99",
    "items no list": "kind: List\nitems: 3",
    "long": "a: " + "x" * documents.MAX_YAML_BYTES,
}


def test_anchors_and_merges_mean_what_they_name() -> None:
    text = "base: &base {seq: 1, mode: [a, b]}\njob:\n  <<: *base\n  seq: 2\nother: *base\n"
    (item,) = documents.load_documents(text)
    assert item["job"] == {"seq": 2, "mode": ["a", "b"]}
    assert item["other"] == item["base"]
    assert "*" not in documents.expand_aliases(text) and "&" not in documents.expand_aliases(text)
    assert documents.load_documents(documents.expand_aliases(text)) == [item]
    plain = "a: 1 # one\nb:   [2]\n"
    assert documents.expand_aliases(plain) == plain


@pytest.mark.parametrize("text", ["a: [1", "a: *b\nc: *d", "a: \x00", "a: &b 1\nc: *b\nd: {"])
def test_text_that_is_no_yaml_is_refused_where_aliases_are_written_out(text: str) -> None:
    with pytest.raises(SpecError, match=r"^job\.yaml: is not YAML.*; correct the syntax$"):
        documents.expand_aliases(text, "job.yaml")


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.timeout(5)
def test_hostile_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        documents.load_documents(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.timeout(10)
def test_a_megabyte_of_names_is_refused_by_bounds() -> None:
    document = job(constraints={"allowedPools": ["p" * 1000] * 1000})
    with pytest.raises(SpecError, match="allowedPools"):
        training_job.read_request(document)


def test_lists_and_streams_are_flattened() -> None:
    text = "kind: NodeList\nitems: [{metadata: {name: a}}]\n---\nkind: Node\n---\n"
    assert documents.load_documents(text) == [{"kind": "Node", "metadata": {"name": "a"}}, {"kind": "Node"}]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
PATHS = [
    ("spec",),
    ("metadata",),
    ("spec", "model"),
    ("spec", "model", "preset"),
    ("spec", "model", "transformer"),
    ("spec", "training"),
    ("spec", "training", "globalBatchSize"),
    ("spec", "training", "sequenceLength"),
    ("spec", "constraints"),
    ("spec", "baseline"),
    ("spec", "mode"),
    ("spec", "anything"),
]


@settings(max_examples=300)
@given(path=st.sampled_from(PATHS), value=PLAIN)
@pytest.mark.slow
def test_any_value_anywhere_is_read_or_refused(path: tuple[str, ...], value: Any) -> None:
    document = copy.deepcopy(job())
    inner: Any = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    try:
        training_job.read_request(document)
    except SpecError as error:
        assert "\n" not in str(error) and len(str(error)) < 500


def pool_alone(document: dict[str, Any]) -> Pool:
    """Return the pool of a GPUPool without nodes."""
    return override_pool(*gpu_pool.parse_gpu_pool(document))[0]


def pool_of(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "tilecast.dev/v1alpha1", "kind": "GPUPool", "metadata": {"name": "mine"}, "spec": spec}


def test_a_pool_scaled_to_zero_is_priced_from_its_type() -> None:
    pool = pool_alone(pool_of(nodeType="p5.48xlarge", maxNodes=4))
    assert (pool.name, pool.gpu.name, pool.gpus_per_node, pool.max_nodes) == ("mine", "h100-sxm", 8, 4)
    assert (pool.inter.name, pool.price_per_gpu_hour) == ("efa-3200", 6.88)
    assert pool.node_selector == {"node.kubernetes.io/instance-type": "p5.48xlarge"}


FACTS = {
    "product": "Example X1",
    "architecture": "example",
    "computeCapability": 9.0,
    "smCount": 100,
    "memoryGib": 64.0,
    "memoryBandwidthGbPerS": 2000.0,
    "l2Mib": 40.0,
    "l2BandwidthGbPerS": 4000.0,
    "boostClockMhz": 1500.0,
    "tdpW": 400.0,
    "intraLink": "pcie5",
    "peakTflops": {"fp32": 50.0, "bf16": 400.0},
}


def with_facts(name: str = "x1", **changes: Any) -> dict[str, Any]:
    gpu = {"name": name, "facts": {**FACTS, **changes}}
    return pool_of(gpu=gpu, gpusPerNode=4, maxNodes=2, links={"interNode": "ethernet-100"})


def test_inline_facts_make_a_new_gpu() -> None:
    pool = pool_alone(with_facts())
    assert pool.gpu.memory_bytes == 64 * 2**30
    assert pool.gpu.peak("bf16") == 400e12
    assert (pool.intra.name, pool.inter.name) == ("pcie5", "ethernet-100")
    assert pool.price_per_gpu_hour is None


@pytest.mark.parametrize("peaks", [{}, {"fp8": 100.0}, {"tf32": 100.0}], ids=str)
def test_a_gpu_without_fp32_is_refused(peaks: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="has no fp32") as caught:
        pool_alone(with_facts(peakTflops=peaks))
    assert caught.value.field == "spec.gpu.facts.peakTflops"


def test_a_gpu_of_fp32_alone_is_told_apart_from_what_the_job_wants() -> None:
    pool = pool_alone(with_facts(peakTflops={"fp32": 50.0}))
    advice = advise(training_job.read_request(job()), [pool])
    assert [(item.code, item.remedy) for item in advice.rejections] == [("PrecisionNotSupported", "train in fp32")]


@pytest.mark.parametrize("name", ["a", "0", "a.b-c", "x1" + "z" * 61])
def test_names_of_new_gpus(name: str) -> None:
    assert pool_alone(with_facts(name)).gpu.name == name


@pytest.mark.parametrize("name", [".abc", "-abc", "X1", "a b", "a_b", "\u00e4", "a\n"])
def test_wrong_names_of_new_gpus(name: str) -> None:
    with pytest.raises(SpecError, match="a new GPU's name") as caught:
        pool_alone(with_facts(name))
    assert caught.value.field == "spec.gpu" and "\n" not in str(caught.value)


@settings(max_examples=300)
@given(
    field=st.sampled_from([*FACTS, "name"]),
    value=st.one_of(PLAIN, st.dictionaries(st.sampled_from(["fp32", "tf32", "fp8"]), st.floats())),
)
@pytest.mark.slow
def test_any_fact_is_read_or_refused(field: str, value: Any) -> None:
    document = with_facts()
    inner = document["spec"]["gpu"]
    (inner if field == "name" else inner["facts"])[field] = value
    try:
        pool = pool_alone(document)
    except SpecError as error:
        assert "\n" not in str(error) and error.field.startswith("spec.gpu")
    else:
        assert pool.gpu.supports("fp32")


def test_facts_that_a_gpu_file_refuses_name_the_field() -> None:
    facts = gpu_pool.GpuFacts.model_validate(FACTS)
    for source, field in (
        (gpu_pool.GpuSource.model_construct(name=".abc", facts=facts), "spec.gpu.name"),
        (
            gpu_pool.GpuSource(name="x1", facts=facts.model_copy(update={"l2_mib": 0.0})),
            "spec.gpu.facts.l2Mib",
        ),
    ):
        with pytest.raises(SpecError) as caught:
            source.gpu()
        assert caught.value.field == field


def test_a_pool_may_be_free_and_empty() -> None:
    spec = {"nodeType": "p5.48xlarge", "price": {"perGpuHour": 0, "spot": 0}}
    free = pool_alone(pool_of(maxNodes=4, **spec))
    empty = pool_alone({**pool_of(maxNodes=0, **spec), "metadata": {"name": "empty"}})
    assert (free.price_per_gpu_hour, empty.price_per_gpu_hour, empty.max_gpus) == (0.0, 0.0, 0)
    for objective in ("time", "cost"):
        advice = advise(training_job.read_request(job(objective=objective)), [free, empty])
        assert [offer.cost_per_1000_steps for offer in advice.offers] == [0.0]
        assert [(item.pool, item.code) for item in advice.rejections] == [("empty", "EmptyPool")]


def test_a_price_of_ones_own_wins() -> None:
    document = pool_of(nodeType="p5.48xlarge", maxNodes=1, price={"perGpuHour": 1.5, "currency": "EUR"})
    pool = pool_alone(document)
    assert (pool.price_per_gpu_hour, pool.currency) == (1.5, "EUR")


WRONG_POOLS = [
    (pool_of(), "spec", "selector"),
    (pool_of(gpu={"name": "h101-sxm"}, gpusPerNode=8, maxNodes=1), "spec.gpu.name", "did you mean"),
    (pool_of(nodeType="z9.large", maxNodes=1), "spec.nodeType", "spec.gpu.name"),
    (with_facts(intraLink="nvlink9"), "spec.gpu.facts.intraLink", "did you mean nvlink5?"),
    (pool_of(gpu={"name": "t4"}, maxNodes=1), "spec.gpusPerNode", "how many"),
    (pool_of(gpu={"name": "t4"}, gpusPerNode=1), "spec.maxNodes", "how many"),
    (
        pool_of(nodeType="p5.48xlarge", maxNodes=1, links={"interNode": "carrier-pigeon"}),
        "spec.links.interNode",
        "`tilecast show links` lists them",
    ),
    (
        pool_of(nodeType="p5.48xlarge", maxNodes=1, links={"intraNode": "ethernet-100"}),
        "spec.links.intraNode",
        "use one of nvlink1",
    ),
    (
        pool_of(nodeType="p5.48xlarge", maxNodes=1, links={"interNode": "nvlink4"}),
        "spec.links.interNode",
        "efa-3200",
    ),
    (pool_of(gpu="h100-sxm"), "spec.gpu", "a mapping with name"),
    (pool_of(nodeType="p5.48xlarge", price={"perGpuHour": -1.0}), "spec.price.perGpuHour", "0 or more"),
    (
        pool_of(nodeType="p5.48xlarge", price={"perGpuHour": 1.0, "currency": "euro"}),
        "spec.price.currency",
        "4217",
    ),
]


@pytest.mark.parametrize(("document", "field", "remedy"), WRONG_POOLS, ids=[row[1] for row in WRONG_POOLS])
def test_wrong_pools_name_field_and_remedy(document: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(SpecError) as caught:
        pool_alone(document)
    assert caught.value.field == field
    assert remedy in caught.value.remedy
