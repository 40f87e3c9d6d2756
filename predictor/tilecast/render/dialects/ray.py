"""Write the options of a Ray task or actor: a label selector for the best pool, and fallback selectors for the others.

https://docs.ray.io/en/latest/ray-core/scheduling/labels.html
"""

from __future__ import annotations

import json

from tilecast.advice import Advice, Offer
from tilecast.render.dialects.parts import (
    describe_ranking,
    find_gpu_names,
    is_spot,
    list_offers_of_same_shape,
    write_comments,
)


def write_options(advice: Advice) -> str:
    """Return Python text that sets OPTIONS, for `.options(**OPTIONS)` of the task or actor that each node runs."""
    alike = list_offers_of_same_shape(advice, _has_same_shape) if advice.offers else ()
    shown = {json.dumps(_write_selector(one)): one for one in reversed(alike)}
    offers = [one for one in alike if one in shown.values()]
    lines = describe_ranking(advice, "ray", offers)
    if not offers:
        return write_comments(lines)
    selectors = [_write_selector(one) for one in offers]
    options = {"num_gpus": offers[0].gpus_per_node, "label_selector": selectors[0]}
    fallback = {"fallback_strategy": [{"label_selector": one} for one in selectors[1:]]} if selectors[1:] else {}
    lines += [
        f"{one.pool.name}: Ray's own labels do not tell its GPUs from a better pool's; add labels of your own."
        for one in alike
        if one not in offers
    ]
    lines.append(f"Start {offers[0].nodes} of them: Worker.options(**OPTIONS).remote(). Each falls back by itself.")
    # JSON without true, false and null is Python.
    return write_comments(lines) + f"OPTIONS = {json.dumps(options | fallback, indent=4)}\n"


def _has_same_shape(offer: Offer, best: Offer) -> bool:
    return (offer.nodes, offer.gpus_per_node) == (best.nodes, best.gpus_per_node)


def _write_selector(offer: Offer) -> dict[str, str]:
    """Return the labels that Ray itself sets on nodes like those of an offer's pool."""
    market = {"ray.io/market-type": "spot"} if is_spot(offer.pool) else {}
    return {"ray.io/accelerator-type": find_gpu_names(offer.pool.gpu).ray, **market}
