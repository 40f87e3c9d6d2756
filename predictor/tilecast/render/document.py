"""Turn advice into plain data, in the names of the TrainingJob's status. JSON, YAML and the operator share it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic.alias_generators import to_camel

from tilecast import zoo
from tilecast.advice import Advice, Change, Offer, Rejection, WhyNot
from tilecast.advice.incumbent import Incumbent
from tilecast.api.status import Parallelism
from tilecast.plan_columns import PLAN_COLUMNS
from tilecast.render.columns import csv_text
from tilecast.render.table import table
from tilecast.sharing import Share, Sharing
from tilecast.spec import Plan, Workload

SCHEMA_VERSION = "1"
"""Version of `schemas/advice.schema.json`; it changes when a key changes its meaning or is removed."""


def document(advice: Advice) -> dict[str, Any]:
    """Return the whole advice, keys in a fixed order, absent values left out."""
    return _present(
        {
            "schemaVersion": SCHEMA_VERSION,
            "job": advice.request.name,
            "objective": advice.request.objective,
            "workload": workload(advice.request.workload),
            "recommendation": _detailed(advice.best),
            "baseline": _detailed(advice.baseline),
            "uncapped": _detailed(advice.uncapped),
            "alternatives": [_detailed(offer) for offer in advice.offers[1:]],
            "pareto": [alternative(offer) for offer in advice.pareto],
            "rejected": [rejection(item) for item in advice.rejections],
            "sharing": sharing(advice.sharing),
            "whyNot": [why_not(item) for item in advice.why_not],
            "ties": advice.ties,
            "tieRatio": figures(advice.tie_ratio),
            "notes": list(advice.notes),
            "confidence": advice.confidence,
            "plansEvaluated": advice.plans_evaluated,
            "model": model(advice),
            "provenance": provenance(advice),
            "inputsHash": advice.inputs_hash,
        }
    )


def workload(trained: Workload) -> dict[str, Any]:
    """Return the model of a job, with the number of parameters that it has without adapters."""
    whole = zoo.parameters(replace(trained, lora_rank=0))
    return {"model": trained.model.name, "family": trained.model.family, "parameters": round(whole)}


def recommendation(offer: Offer) -> dict[str, Any]:
    """Return one offer in the form of `status.recommendation`."""
    pool = offer.pool
    return _present(
        {
            "pool": pool.name,
            "nodeType": pool.node_type or None,
            "nodeSelector": dict(pool.node_selector),
            "tolerations": [dict(item) for item in pool.tolerations] or None,
            "nodes": offer.nodes,
            "gpusPerNode": offer.gpus_per_node,
            "gpus": offer.gpus,
            "deviceRequests": list(offer.device_requests) or None,
            "parallelism": parallelism(offer.plan),
            "globalBatchSize": offer.workload.global_batch,
            "precision": offer.workload.precision,
            "stepSeconds": step_seconds(offer),
            "breakdown": {name: figures(value) for name, value in offer.breakdown.items()},
            "bottleneck": offer.bottleneck,
            "memoryBytes": memory_bytes(offer),
            "tokensPerSecond": figures(offer.tokens_per_s),
            "costPer1000Steps": _known(offer.cost_per_1000_steps),
            "currency": pool.currency if offer.cost_per_1000_steps is not None else None,
            "finishSeconds": _known(offer.finish_s),
            "costToFinish": _known(offer.cost_to_finish),
            "fitsNow": offer.fits_now,
            "reason": offer.reason,
        }
    )


def alternative(offer: Offer) -> dict[str, Any]:
    """Return one offer in the form of `status.alternatives`."""
    return _present(
        {
            "pool": offer.pool.name,
            "nodes": offer.nodes,
            "gpusPerNode": offer.gpus_per_node,
            "gpus": offer.gpus,
            "plan": str(offer.plan),
            "globalBatchSize": offer.workload.global_batch,
            "precision": offer.workload.precision,
            "stepSeconds": step_seconds(offer),
            "costPer1000Steps": _known(offer.cost_per_1000_steps),
            "finishSeconds": _known(offer.finish_s),
            "fitsNow": offer.fits_now,
            "rawStepSeconds": figures(offer.step_s / offer.carried) if offer.pool.own.runs else None,
            "ownRunsRatio": figures(offer.carried) if offer.pool.own.runs else None,
            "reason": offer.reason,
        }
    )


def step_seconds(offer: Offer | Share) -> dict[str, float]:
    """Return the forecast of a step and its 90 % range."""
    return {
        "target": figures(offer.step_s),
        "lowerBound": figures(offer.lower_s),
        "upperBound": figures(offer.upper_s),
    }


def memory_bytes(offer: Offer) -> dict[str, Any]:
    """Return the memory of a GPU.

    The keys are what the plan cannot do without, the range of what it takes, what is available, and whether all of the
    range fits.
    """
    return {
        "used": round(offer.memory_bytes),
        "lowerBound": round(offer.memory_lower_bytes),
        "upperBound": round(offer.memory_upper_bytes),
        "available": round(offer.memory_available_bytes),
        "fit": "tight" if offer.is_tight else "fits",
    }


def _detailed(offer: Offer | None) -> dict[str, Any] | None:
    """Return an offer with the facts that a program without a cluster needs: short plan, GPU and memory bill."""
    if offer is None:
        return None
    more = {
        "plan": str(offer.plan),
        "gpu": offer.pool.gpu.name,
        "memory": {name: round(value) for name, value in offer.memory.items()},
        "ownRunsRatio": figures(offer.carried) if offer.pool.own.runs else None,
    }
    return recommendation(offer) | _present(more)


def parallelism(plan: Plan) -> dict[str, Any]:
    """Return a plan in the names of `status.recommendation.parallelism`."""
    names = {column.key: name for name, column in PLAN_COLUMNS.items()}
    return {key: getattr(plan, names[key]) for key in map(to_camel, Parallelism.model_fields)}


def incumbent(recommendation: Mapping[str, Any]) -> Incumbent | None:
    """Read what a `status.recommendation` recommends; None if `recommendation` did not write it."""
    try:
        split = recommendation["parallelism"]
        kinds = {name: type(getattr(Plan(), name)) for name in PLAN_COLUMNS}
        plan = Plan(**{name: kind(split[PLAN_COLUMNS[name].key]) for name, kind in kinds.items()})
        return Incumbent(
            str(recommendation["pool"]), plan, int(recommendation["globalBatchSize"]), recommendation["precision"]
        )
    except (KeyError, TypeError, ValueError):
        return None


def rejection(item: Rejection) -> dict[str, Any]:
    """Return one rejection in the form of `status.rejected`, with the change that was tried."""
    row = {"pool": item.pool, "code": item.code, "message": item.message, "remedy": item.remedy}
    return _present({**row, "change": change(item.change)})


def sharing(share: Sharing | None) -> dict[str, Any] | None:
    """Return the ways to share a GPU, and the best of them if one is worthwhile."""
    if share is None:
        return None
    return _present(
        {
            "pool": share.pool.name,
            "wholeStepSeconds": figures(share.whole_s),
            "best": _share(share.best) if share.best else None,
            "options": [_share(option) for option in share.options],
        }
    )


def _share(option: Share) -> dict[str, Any]:
    return _present(
        {
            "kind": option.kind,
            "profile": option.profile or None,
            "resource": option.resource,
            "jobsPerGpu": option.jobs,
            "gpuShare": figures(option.share),
            "plan": str(option.plan),
            "stepSeconds": step_seconds(option),
            "slowdown": figures(option.slowdown),
            "memoryBytes": {"used": round(option.memory_bytes), "available": round(option.memory_available_bytes)},
            "costPer1000Steps": _known(option.cost_per_1000_steps),
        }
    )


def why_not(item: WhyNot) -> dict[str, Any]:
    """Return one plan that is not the recommendation."""
    return _present(
        {
            "subject": item.subject,
            "pool": item.pool,
            "plan": str(item.plan),
            "code": item.code,
            "message": item.message,
            "value": _known(item.value),
            "change": change(item.change),
        }
    )


def change(item: Change | None) -> dict[str, Any] | None:
    """Return a change that was tried: the input, the value it must have, and whether the plan then fits or wins."""
    if item is None:
        return None
    value = figures(item.value) if isinstance(item.value, float) else item.value
    return {"input": item.input, "value": value, "effect": item.effect, "text": item.text}


def model(advice: Advice) -> dict[str, str]:
    """Return the predictor in the form of `status.model`."""
    return {"version": advice.provenance.model_version, "sha256": advice.provenance.model_sha256}


def provenance(advice: Advice) -> dict[str, Any]:
    """Return the sources that the advice rests on besides the predictor."""
    source = advice.provenance
    return _present(
        {
            "version": source.version,
            "constantsSha256": source.constants_sha256,
            "dataSha256": source.data_sha256,
            "layers": {pool: dict(layers) for pool, layers in source.layers.items()},
            "calibrationRuns": dict(source.runs) or None,
        }
    )


def figures(value: float) -> float:
    """Round to six significant figures: more would be noise, and make equal advice differ between machines."""
    return float(f"{value:.6g}")


def _known(value: float | None) -> float | None:
    return None if value is None else figures(value)


def _present(table_: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table_.items() if value is not None}


def dump(syntax: str, value: Mapping[str, Any]) -> str:
    """Format a document as "json" with an indent of two, or as "yaml" with its keys in order."""
    if syntax == "json":
        return json.dumps(value, indent=2) + "\n"
    import yaml

    return yaml.safe_dump(dict(value), sort_keys=False)


def to_json(advice: Advice) -> str:
    """Format the document as JSON."""
    return dump("json", document(advice))


def to_csv(advice: Advice) -> str:
    """Format one line per pool: the offers in rank order, then the rejections."""
    rows: list[Sequence[object]] = [
        (
            "pool",
            "nodes",
            "gpusPerNode",
            "plan",
            "stepSeconds",
            "lowerBound",
            "upperBound",
            "costPer1000Steps",
            "reason",
        )
    ]
    for offer in advice.offers:
        cost = "" if offer.cost_per_1000_steps is None else f"{offer.cost_per_1000_steps:.2f}"
        times = (f"{value:.6g}" for value in (offer.step_s, offer.lower_s, offer.upper_s))
        rows.append([offer.pool.name, offer.nodes, offer.gpus_per_node, offer.plan, *times, cost, offer.reason])
    rows += [[item.pool, *[""] * 7, f"{item.code}: {item.message}: {item.remedy}"] for item in advice.rejections]
    return csv_text(rows)


FORMATS: Mapping[str, Callable[[Advice], str]] = {
    "table": table,
    "json": to_json,
    "yaml": lambda advice: dump("yaml", document(advice)),
    "csv": to_csv,
}
"""Functions for every output format of `tilecast advise`."""
