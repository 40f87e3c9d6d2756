"""Advice as plain data, in the names of the TrainingJob's status: what JSON, YAML and the operator share."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from tilecast.advise import Advice, Offer, Rejection
from tilecast.render.table import table
from tilecast.spec import Plan


def document(advice: Advice) -> dict[str, Any]:
    """The whole advice, keys in a fixed order, absent values left out."""
    return _present(
        {
            "job": advice.request.name,
            "objective": advice.request.objective,
            "recommendation": recommendation(advice.best) if advice.best else None,
            "baseline": recommendation(advice.baseline) if advice.baseline else None,
            "uncapped": recommendation(advice.uncapped) if advice.uncapped else None,
            "alternatives": [recommendation(offer) for offer in advice.offers[1:]],
            "rejected": [rejection(item) for item in advice.rejections],
            "plansEvaluated": advice.plans_evaluated,
            "ties": advice.ties,
            "model": {"version": advice.model_version, "sha256": advice.model_sha256},
            "inputsHash": advice.inputs_hash,
        }
    )


def recommendation(offer: Offer) -> dict[str, Any]:
    """One offer as `status.recommendation` has it; seconds, bytes and rates rounded to six figures."""
    return _present(
        {
            "pool": offer.pool.name,
            "gpu": offer.pool.gpu.name,
            "nodeType": offer.pool.node_type or None,
            "nodeSelector": dict(offer.pool.node_selector) or None,
            "tolerations": [dict(item) for item in offer.pool.tolerations] or None,
            "nodes": offer.nodes,
            "gpusPerNode": offer.gpus_per_node,
            "gpus": offer.gpus,
            "parallelism": parallelism(offer.plan),
            "plan": str(offer.plan),
            "stepSeconds": {
                "target": figures(offer.step_s),
                "lowerBound": figures(offer.lower_s),
                "upperBound": figures(offer.upper_s),
            },
            "breakdown": {name: figures(value) for name, value in offer.breakdown.items()},
            "memoryBytes": {"used": round(offer.memory_bytes), "available": round(offer.memory_available_bytes)},
            "memory": {name: round(value) for name, value in offer.memory.items()},
            "tokensPerSecond": figures(offer.tokens_per_s),
            "costPer1000Steps": _money(offer.cost_per_1000_steps),
            "currency": offer.pool.currency if offer.cost_per_1000_steps is not None else None,
            "finishSeconds": figures(offer.finish_s) if offer.finish_s is not None else None,
            "costToFinish": _money(offer.cost_to_finish),
            "reason": offer.reason or None,
        }
    )


def parallelism(plan: Plan) -> dict[str, Any]:
    """A plan in the names of `status.recommendation.parallelism`."""
    return {
        "data": plan.data,
        "tensor": plan.tensor,
        "pipeline": plan.pipeline,
        "context": plan.context,
        "expert": plan.expert,
        "zeroStage": plan.zero_stage,
        "microBatchSize": plan.micro_batch,
        "gradientAccumulation": plan.gradient_accumulation,
        "activationCheckpointing": plan.checkpointing,
    }


def rejection(item: Rejection) -> dict[str, str]:
    """One rejection as `status.rejected` has it."""
    return {"pool": item.pool, "code": item.code, "message": item.message, "remedy": item.remedy}


def figures(value: float) -> float:
    """Six significant figures: more would be noise, and make equal advice differ between machines."""
    return float(f"{value:.6g}")


def _money(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _present(table_: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table_.items() if value is not None}


def to_json(advice: Advice) -> str:
    """The document as JSON, two spaces deep."""
    return json.dumps(document(advice), indent=2) + "\n"


def to_yaml(advice: Advice) -> str:
    """The document as YAML, keys in the document's order."""
    return yaml.safe_dump(document(advice), sort_keys=False)


def to_csv(advice: Advice) -> str:
    """One line per pool: the offers in rank order, then the rejections."""
    out = io.StringIO()
    names = (
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
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for offer in advice.offers:
        cost = "" if offer.cost_per_1000_steps is None else f"{offer.cost_per_1000_steps:.2f}"
        times = (f"{value:.6g}" for value in (offer.step_s, offer.lower_s, offer.upper_s))
        writer.writerow([offer.pool.name, offer.nodes, offer.gpus_per_node, offer.plan, *times, cost, offer.reason])
    for item in advice.rejections:
        writer.writerow([item.pool, "", "", "", "", "", "", "", f"{item.code}: {item.message}: {item.remedy}"])
    return out.getvalue()


FORMATS: Mapping[str, Callable[[Advice], str]] = {"table": table, "json": to_json, "yaml": to_yaml, "csv": to_csv}
"""Every output format of `tilecast advise`."""
