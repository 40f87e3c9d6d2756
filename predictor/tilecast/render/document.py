"""Format advice for programs, as JSON, YAML or CSV.

The schema of the document is imported inside a function, because a table does not need it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilecast.advice import Advice
from tilecast.render.columns import format_csv
from tilecast.render.table import advice_text


def dump_document(syntax: str, value: Mapping[str, Any]) -> str:
    """Return a document as JSON if `syntax` is "json", otherwise as YAML. Keys keep their order."""
    if syntax == "json":
        return json.dumps(value, indent=2) + "\n"
    import yaml

    return yaml.safe_dump(dict(value), sort_keys=False)


def build_document(advice: Advice) -> dict[str, Any]:
    """Return the advice document, by key."""
    from tilecast.api.advice import AdviceDocument

    return AdviceDocument.from_advice(advice).document()


def advice_json(advice: Advice) -> str:
    """Return the advice document as JSON text."""
    return dump_document("json", build_document(advice))


def advice_csv(advice: Advice) -> str:
    """Return the advice as CSV with one line per pool. Pools with an offered plan come first, in rank order."""
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
    return format_csv(rows)


FORMATS: Mapping[str, Callable[[Advice], str]] = {
    "table": advice_text,
    "json": advice_json,
    "yaml": lambda advice: dump_document("yaml", build_document(advice)),
    "csv": advice_csv,
}
"""Formatting function of each output format of `tilecast advise`."""
