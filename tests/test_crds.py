"""The CRDs are generated, structural, described and bounded, and share their rules with the models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tilecast.api import crds, gpu_pool, model_source, queue_advice, training, training_job
from tilecast.api.base import ApiModel
from tilecast.planner.policies import POLICIES

ROOT = Path(__file__).parent.parent
JOBS = sorted((ROOT / "examples" / "jobs").glob("*.yaml"))


def walk(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for key, value in schema.get("properties", {}).items():
        yield from walk(value, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from walk(schema[key], f"{path}[{key}]")


def every_node() -> list[tuple[str, dict[str, Any]]]:
    models = {resource.kind: resource for resource in crds.RESOURCES}
    return [
        row
        for kind, resource in models.items()
        for part in ("spec", "status")
        if (model := getattr(resource, part)) is not None
        for row in walk(crds.structural_schema(model), f"{kind}.{part}")
    ]


def test_files_are_what_the_models_say(tmp_path: Path) -> None:
    """`make crds` regenerates the files."""
    assert crds.main(["--output-dir", str(tmp_path)]) == 0
    for resource in crds.RESOURCES:
        name = f"{resource.plural}.yaml"
        assert (ROOT / "crds" / name).read_text() == (tmp_path / name).read_text(), name


@pytest.mark.parametrize(("path", "schema"), every_node(), ids=[path for path, _ in every_node()])
def test_every_field_is_typed_described_and_bounded(path: str, schema: dict[str, Any]) -> None:
    assert schema.get("type") in {"object", "array", "string", "integer", "number", "boolean"}
    assert not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf", "title", "const", "$defs"}
    assert not ("properties" in schema and "additionalProperties" in schema)
    if not path.endswith("]"):
        assert schema.get("description", "").strip().endswith("."), "kubectl explain prints it"
    if schema["type"] == "string":
        assert "maxLength" in schema or "enum" in schema
    if schema["type"] == "array":
        assert "maxItems" in schema
    if "additionalProperties" in schema:
        assert "maxProperties" in schema
    if path.split(".")[1] == "spec" and schema["type"] in ("integer", "number"):
        assert "minimum" in schema and "maximum" in schema


def test_columns_are_those_of_the_design() -> None:
    columns = [column.to_crd() for column in crds.TRAINING_JOB.columns]
    always = [column["name"].upper() for column in columns if "priority" not in column]
    wide = [column["name"].upper() for column in columns if column.get("priority") == 1]
    assert always == ["POOL", "GPUS", "PLAN", "STEP", "RANGE", "SPEEDUP", "COST/1K", "ERROR", "REASON", "AGE"]
    assert wide == ["FITS-NOW", "FINISH", "MEMORY", "CONFIDENCE", "TARGET", "QUEUE", "POSITION", "STARTS"]


@pytest.mark.parametrize("resource", crds.RESOURCES, ids=lambda resource: resource.kind)
def test_columns_point_at_fields(resource: crds.CustomResource) -> None:
    summary = (
        {}
        if resource.status is None
        else crds.structural_schema(resource.status)["properties"]["summary"]["properties"]
    )
    for column in resource.columns:
        if column.path.startswith(".status.summary."):
            assert column.path.rsplit(".", 1)[1] in summary


def test_names() -> None:
    job, pool, learning, queue = (crds.crd_document(resource)["spec"] for resource in crds.RESOURCES)
    assert job["names"]["shortNames"] == ["tjob"] and job["names"]["categories"] == ["tilecast"]
    assert (job["scope"], pool["scope"], learning["scope"]) == ("Namespaced", "Cluster", "Cluster")
    assert "subresources" not in learning["versions"][0]
    assert (queue["scope"], queue["names"]["shortNames"]) == ("Cluster", ["tqa"])
    assert set(POLICIES) == set(crds.structural_schema(queue_advice.QueueAdviceSpec)["properties"]["policy"]["enum"])
    assert job["versions"][0]["subresources"] == {"status": {}}


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_examples_satisfy_the_schema(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    schema = crds.structural_schema(training_job.TrainingJobSpec)
    jsonschema.Draft4Validator(schema).validate(document["spec"])


PASSING: dict[type[ApiModel], dict[str, Any]] = {
    model_source.Transformer: {
        "layers": 2, "hiddenSize": 64, "attentionHeads": 4, "keyValueHeads": 2, "vocabularySize": 9
    },
    model_source.ModelSource: {"preset": "gpt2"},
    model_source.HuggingFace: {"configMapKeyRef": {"name": "my-model"}},
    training.Training: {
        "globalBatchSize": 8, "globalBatchSizeRange": {"min": 4, "max": 16}, "microBatchSize": 2, "sequenceLength": 4,
        "tokens": 64, "allowedPrecisions": ["fp16", "bf16"],
    },
    training.BatchRange: {"min": 4, "max": 8},
    training_job.JobBaseline: {"pool": "a100-80", "gpus": 8, "plan": {"data": 4, "tensor": 2}},
    training_job.JobConstraints: {"gpus": 8, "maxGpus": 8},
    training_job.TargetRef: {"apiVersion": "batch/v1", "kind": "Job", "name": "train"},
    training_job.TrainingJobSpec: {
        "workload": "inference", "model": {"preset": "gpt2"}, "training": {"globalBatchSize": 1, "optimizer": "none"}
    },
    gpu_pool.Rates: {"fp32": 60.0, "bf16": 990.0},
    gpu_pool.GpuSource: {"name": "h100-sxm"},
    gpu_pool.Price: {"perGpuHour": 2.0, "spot": 1.0},
    gpu_pool.GPUPoolSpec: {"nodeType": "p5.48xlarge"},
}  # fmt: skip
FACTS = {
    "product": "x", "architecture": "x", "computeCapability": 9.0, "smCount": 1, "memoryGib": 1.0,
    "memoryBandwidthGbPerS": 1.0, "l2Mib": 1.0, "l2BandwidthGbPerS": 1.0, "boostClockMhz": 1.0, "tdpW": 1.0,
    "intraLink": "pcie4", "peakTflops": {"fp32": 1.0},
}  # fmt: skip
FAILING: dict[type[ApiModel], list[dict[str, Any]]] = {
    model_source.Transformer: [{"hiddenSize": 65}, {"keyValueHeads": 3}],
    model_source.ModelSource: [{"graphRef": {"configMapKeyRef": {"name": "my-model"}}}],
    model_source.HuggingFace: [{"config": {"model_type": "gpt2"}}],
    training.BatchRange: [{"min": 9}],
    training_job.JobBaseline: [{"gpus": 16}],
    training.Training: [
        {"microBatchSize": 3},
        {"frameworkVersion": "2.6"},
        {"recomputeModules": ["moe"], "activationCheckpointing": "full"},
        {"recomputeLayers": 4, "activationCheckpointing": "selective"},
        {"steps": 5},
        {"sequenceLength": None},
        {"loraTargets": "attention"},
        {"dora": True},
        {"precomputedReference": True},
        {"loss": "kto", "microBatchSize": 1},
        {"trainEmbeddings": True},
        {"frozenParts": ["vision"], "loraRank": 8},
        {"quantization": "nf4"},
        {"quantization": "nf4", "loraRank": 8, "precision": "fp32"},
        {"serverUpdates": "asynchronous"},
        {"globalBatchSize": 32},
        {"precision": "fp32"},
    ],
    training_job.JobConstraints: [{"gpus": 9}],
    training_job.TargetRef: [{"kind": "JobSet"}],
    training_job.TrainingJobSpec: [
        {"mode": "Initial"},
        {"training": {"globalBatchSize": 1, "optimizer": "adam"}},
        {"training": {"globalBatchSize": 1, "activationCheckpointing": "full"}},
        {"objective": "timeToFinish"},
        {"objective": "fewestGpusBeforeDeadline", "training": {"globalBatchSize": 1, "steps": 5}},
        {"deadlineSeconds": 3600},
        {"budget": {"amount": 5.0}},
    ],
    gpu_pool.Rates: [{"fp32": None}],
    gpu_pool.GpuSource: [{"name": ".abc", "facts": FACTS}],
    gpu_pool.Price: [{"spot": 3.0}],
    gpu_pool.GPUPoolSpec: [{"nodeType": None}],
}


def with_rules(model: type[ApiModel]) -> set[type[ApiModel]]:
    return {item for item in crds.list_models_in(model) if item.rules}


def test_every_rule_has_a_sample() -> None:
    everything = {model for resource in crds.RESOURCES for model in with_rules(resource.spec)}
    assert everything == PASSING.keys() == FAILING.keys()
    for model in everything:
        assert len(FAILING[model]) == len(model.rules)


@pytest.mark.parametrize("model", PASSING, ids=lambda model: model.__name__)
def test_each_rule_fails_alone(model: type[ApiModel]) -> None:
    model.model_validate(PASSING[model])
    for rule, change in zip(model.rules, FAILING[model], strict=True):
        with pytest.raises(ValueError, match="1 validation error") as caught:
            model.model_validate({**PASSING[model], **change})
        assert rule.problem in str(caught.value)
