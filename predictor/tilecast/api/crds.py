"""Generate the CustomResourceDefinitions from the pydantic models: `python -m tilecast.api.crds`.

The API server requires a structural schema, without references and unions and with one type per node. The models use
only features that can be translated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from tilecast import __version__
from tilecast.api import gpu_pool, pool_learning, queue_advice, training_job
from tilecast.api.base import GROUP, VERSION, ApiModel
from tilecast.api.status import TrainingJobStatus

Schema = dict[str, Any]

RELEASE = f"{GROUP}/release"
"""Annotation of a CRD with the release that installed it. The chart refuses an upgrade that needs newer CRDs."""


@dataclass(frozen=True, slots=True)
class PrinterColumn:
    """A column of `kubectl get`. If `wide` is true, the column appears only in `kubectl get -o wide`."""

    name: str
    path: str
    description: str
    wide: bool = False
    type: str = "string"

    def to_crd(self) -> dict[str, Any]:
        """Return the column as an entry of a CRD's `additionalPrinterColumns`."""
        priority = {"priority": 1} if self.wide else {}
        names = {"name": self.name, "type": self.type, "description": self.description, "jsonPath": self.path}
        return {**names, **priority}


@dataclass(frozen=True, slots=True)
class CustomResource:
    """A custom resource: its names, the models of its spec and status, and its columns in `kubectl get`."""

    kind: str
    plural: str
    short_names: tuple[str, ...]
    scope: str
    description: str
    spec: type[ApiModel]
    status: type[ApiModel] | None
    """Model of the status. None if the resource has no status."""
    columns: tuple[PrinterColumn, ...]


def _summary_column(name: str, field: str, description: str, wide: bool = False) -> PrinterColumn:
    return PrinterColumn(name, f".status.summary.{field}", description, wide)


_AGE = PrinterColumn("Age", ".metadata.creationTimestamp", "Time since creation.", type="date")

TRAINING_JOB = CustomResource(
    kind=training_job.KIND,
    plural="trainingjobs",
    short_names=("tjob",),
    scope="Namespaced",
    description="A training run to be advised: which GPU pool to use and how to split the job.",
    spec=training_job.TrainingJobSpec,
    status=TrainingJobStatus,
    columns=(
        _summary_column("Pool", "pool", "Recommended pool."),
        _summary_column("GPUs", "gpus", "Nodes x GPUs per node."),
        _summary_column("Plan", "plan", "How to split the job."),
        _summary_column("Step", "step", "Forecast of one step."),
        _summary_column("Range", "range", "Its 90 % range."),
        _summary_column("Speedup", "speedup", "Against the baseline."),
        _summary_column("Cost/1k", "costPer1000Steps", "Price of 1000 steps."),
        _summary_column("Error", "error", "Measured against forecast."),
        _summary_column("Reason", "reason", "Reason of the Ready condition."),
        _AGE,
        _summary_column("Fits-Now", "fitsNow", "Whether the GPUs are free now.", wide=True),
        _summary_column("Finish", "finish", "Time of the whole run.", wide=True),
        _summary_column(
            "Memory", "memory", "GiB taken of available; tight where only the middle of the range fits.", wide=True
        ),
        _summary_column("Confidence", "confidence", "Half-width of the range.", wide=True),
        _summary_column("Target", "target", "The job this advice is for.", wide=True),
        PrinterColumn("Queue", ".status.queue.pool", "Pool by the plan of the whole queue.", wide=True),
        PrinterColumn("Position", ".status.queue.position", "Its place in line there.", wide=True, type="integer"),
        PrinterColumn("Starts", ".status.queue.start", "When it starts by that plan.", wide=True),
    ),
)

GPU_POOL = CustomResource(
    kind=gpu_pool.KIND,
    plural="gpupools",
    short_names=("gpupool",),
    scope="Cluster",
    description="Nodes with one kind of GPU: discovered, or as a user knows them better than their labels do.",
    spec=gpu_pool.GPUPoolSpec,
    status=gpu_pool.GPUPoolStatus,
    columns=(
        _summary_column("GPU", "gpu", "GPU of the pool."),
        _summary_column("Nodes", "shape", "Nodes x GPUs per node."),
        _summary_column("Link", "link", "Link between nodes."),
        _summary_column("Price", "price", "Price of one GPU for one hour."),
        _summary_column("Free", "free", "Free GPUs of all, where known."),
        _summary_column("Origin", "origin", "Discovered, or written by a user."),
        _summary_column("Reason", "reason", "Reason of the Ready condition."),
        _AGE,
    ),
)

POOL_LEARNING = CustomResource(
    kind=pool_learning.KIND,
    plural="poollearnings",
    short_names=("learning",),
    scope="Cluster",
    description="What was measured on a GPUPool and by whom. Written by the operator; for administrators.",
    spec=pool_learning.PoolLearningSpec,
    status=None,
    columns=(_AGE,),
)

QUEUE_ADVICE = CustomResource(
    kind=queue_advice.KIND,
    plural="queueadvices",
    short_names=("tqa",),
    scope="Cluster",
    description="The plan of the whole queue in numbers, beside what would be without it. Written by the operator.",
    spec=queue_advice.QueueAdviceSpec,
    status=queue_advice.QueueAdviceStatus,
    columns=(
        PrinterColumn("Policy", ".status.policy", "What the plan minimizes."),
        _summary_column("Jobs", "jobs", "Jobs that wait and that run."),
        _summary_column("Mean", "mean", "Mean completion time by the plan."),
        _summary_column("Own-Best", "ownBest", "The same with every job on its own best pool."),
        _summary_column("Flavors", "flavors", "The same by Kueue's order of flavors."),
        _summary_column("Gap", "gap", "How far from the best plan it is at most."),
        _summary_column("Reason", "reason", "Reason of the Ready condition."),
        PrinterColumn("Planned", ".status.plannedAt", "Time since the plan was made.", type="date"),
        _AGE,
    ),
)

RESOURCES = (TRAINING_JOB, GPU_POOL, POOL_LEARNING, QUEUE_ADVICE)


def crd_document(resource: CustomResource) -> Schema:
    """Return the CustomResourceDefinition of a resource as a dictionary."""
    singular = resource.kind.lower()
    short_names = [name for name in resource.short_names if name != singular]
    status = {} if resource.status is None else {"status": structural_schema(resource.status)}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{GROUP}", "annotations": {RELEASE: __version__}},
        "spec": {
            "group": GROUP,
            "scope": resource.scope,
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": singular,
                **({"shortNames": short_names} if short_names else {}),
                "categories": ["tilecast"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    **({"subresources": {"status": {}}} if status else {}),
                    "additionalPrinterColumns": [column.to_crd() for column in resource.columns],
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "description": resource.description,
                            "required": ["spec"],
                            "properties": {
                                "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
                                "kind": {"type": "string", "description": f"{resource.kind}."},
                                "metadata": {"type": "object"},
                                "spec": structural_schema(resource.spec),
                                **status,
                            },
                        }
                    },
                }
            ],
        },
    }


def structural_schema(model: type[ApiModel]) -> Schema:
    """Return a model's structural schema, with references resolved, unions with null removed, and rules in CEL."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return _to_structural(raw, raw.get("$defs", {}), {item.__name__: item for item in list_models_in(model)})


def crd_text(resource: CustomResource) -> str:
    """Return the YAML text of a resource's CustomResourceDefinition, as in the files under `crds/`."""
    head = "# Generated by `make crds` from the models in predictor/tilecast/api; do not edit.\n"
    # Starts with a document marker, because `helm show crds` prints the files without a marker between them.
    return head + yaml.safe_dump(
        crd_document(resource), sort_keys=False, width=120, allow_unicode=True, explicit_start=True
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the CustomResourceDefinitions of all resources into folders, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, action="append", help="where the files go; repeatable")
    options = parser.parse_args(arguments)
    for folder, resource in product(options.output_dir or [Path("crds")], RESOURCES):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{resource.plural}.yaml").write_text(crd_text(resource), encoding="utf-8")
    return 0


_SCHEMA_KEYS = (
    *("type", "format", "description", "enum", "default", "pattern", "required"),
    *("minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength"),
    *("minItems", "maxItems", "minProperties", "maxProperties"),
)


def _to_structural(
    node: Mapping[str, Any], definitions: Mapping[str, Any], models_by_name: Mapping[str, type[ApiModel]]
) -> Schema:
    merged: Schema = dict(node)
    rules: Schema = {}
    if "anyOf" in merged:
        (branch,) = (item for item in merged.pop("anyOf") if item.get("type") != "null")
        merged = {**branch, **merged}
    if "$ref" in merged:
        name = merged.pop("$ref").rsplit("/", 1)[-1]
        merged = {**definitions[name], **merged}
        rules = _build_validation_rules(models_by_name[name])
    elif merged.get("title") in models_by_name and "properties" in merged:
        rules = _build_validation_rules(models_by_name[merged["title"]])
    out: Schema = {
        key: merged[key] for key in _SCHEMA_KEYS if key in merged and (key != "default" or merged[key] is not None)
    }
    if "const" in merged:
        out |= {"type": "string", "enum": [merged["const"]]}
    if "exclusiveMinimum" in out:
        out |= {"minimum": out["exclusiveMinimum"], "exclusiveMinimum": True}
    if out.get("type") == "integer" and out.get("maximum", 2**63) >= 2**31:
        out["format"] = "int64"
    if "properties" in merged:
        out["properties"] = {
            key: _to_structural(value, definitions, models_by_name) for key, value in merged["properties"].items()
        }
    if isinstance(merged.get("additionalProperties"), Mapping):
        out["additionalProperties"] = _to_structural(merged["additionalProperties"], definitions, models_by_name)
        if out["additionalProperties"] == {"type": "string"}:
            out["additionalProperties"]["maxLength"] = 253
    if "items" in merged:
        out["items"] = _to_structural(merged["items"], definitions, models_by_name)
        if out["items"] == {"type": "string"}:
            out["items"]["maxLength"] = 253
    return out | {key: value for key, value in merged.items() if key.startswith("x-kubernetes-")} | rules


def _build_validation_rules(model: type[ApiModel]) -> Schema:
    validations = [{"rule": rule.cel, "message": f"{rule.problem}; {rule.remedy}"} for rule in model.rules]
    return {"x-kubernetes-validations": validations} if validations else {}


def list_models_in(model: type[ApiModel]) -> list[type[ApiModel]]:
    """Return a model and, recursively, all models that appear in the types of its fields."""
    used = [model]
    for field in model.model_fields.values():
        pending = [field.annotation]
        while pending:
            annotation: Any = pending.pop()
            if isinstance(annotation, type) and issubclass(annotation, ApiModel):
                used += list_models_in(annotation)
            pending += getattr(annotation, "__args__", ())
    return used


if __name__ == "__main__":
    sys.exit(main())
