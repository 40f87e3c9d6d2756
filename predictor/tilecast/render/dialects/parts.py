"""Parts that several dialects share: comments about the ranked pools, names of objects, and facts about a pool."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict

from tilecast import shipped
from tilecast.advice import Advice, Offer, advise
from tilecast.hardware import Gpu, Pool, list_gpus, read_gpu_file
from tilecast.hardware.products import MIG_INFIX
from tilecast.nodes.labels import read_label_table
from tilecast.render.risk import describe_memory
from tilecast.render.units import format_duration


class GpuNames(BaseModel):
    """Names of a GPU in the formats of Ray, SkyPilot and Slurm."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ray: str
    skypilot: str
    slurm: str


@cache
def read_gpu_names() -> Mapping[str, GpuNames]:
    """Return the table in `names.toml` of the names that schedulers have for GPUs, by name of the GPU."""
    table = shipped.read_table("tilecast.render.dialects", "names.toml")
    return {name: GpuNames.model_validate(row) for name, row in table["gpus"].items()}


def find_gpu_names(gpu: Gpu) -> GpuNames:
    """Return the names that schedulers use for a GPU.

    A board derived from a shipped GPU, and a MIG slice, have the names of that GPU. Any other GPU has its own name.
    """
    own = gpu.name.partition(MIG_INFIX)[0]
    return read_gpu_names().get(gpu.sibling or own) or GpuNames(ray=own, skypilot=own, slurm=own)


def list_products(pool: Pool) -> list[str]:
    """Return the product names that the driver may report for the GPUs of a pool. Spaces are replaced by dashes.

    If a label of the pool's nodes contains the product name, return only that name.
    """
    label = pool.node_selector.get("nvidia.com/gpu.product")
    if label:
        # GPU Feature Discovery adds these endings for shared and sliced GPUs.
        return [re.sub(r"(-SHARED|-MIG-.*)+$", "", label)]
    whole = pool.gpu.name.partition(MIG_INFIX)[0]
    known = read_gpu_file(whole) if whole in list_gpus() else None
    aliases = [name for name in known.aliases if name.startswith(("NVIDIA", "Tesla"))] if known else []
    first = known.product if known else pool.gpu.product
    return list(dict.fromkeys(name.replace(" ", "-") for name in (first, *aliases)))


def name_gpu_resource(pool: Pool) -> str:
    """Return the Kubernetes resource by which a pod requests a GPU of a pool, or a MIG slice if the pool has slices."""
    table = read_label_table()
    return f"{table.mig_resource_prefix}{pool.gpu.mig}" if pool.gpu.mig else table.gpu_resource


def is_spot(pool: Pool) -> bool:
    """Return whether a label of the pool's nodes says that they are spot capacity."""
    return any(pool.node_selector.get(mark.label) == mark.value for mark in read_label_table().spot)


def is_in_cluster(pool: Pool) -> bool:
    """Return whether a pool was discovered from cluster nodes, rather than given by GPU or instance type and count."""
    return bool(pool.node_selector) or "gpu" in pool.layers


def find_instance_type(pool: Pool) -> str:
    """Return the instance type of a pool's nodes, or an empty text if it is unknown or assumed."""
    return "" if "assumed" in pool.layers.values() else pool.node_type


def to_dns_label(text: str, length: int = 63) -> str:
    """Return a text as a DNS label (RFC 1123): lower-case letters, digits and dashes, at most `length` characters."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:length].strip("-") or "x"


def name_offers(offers: Sequence[Offer], length: int = 63) -> list[str]:
    """Return a distinct DNS label for each offer, derived from its pool's name."""
    names = list[str]()
    for offer in offers:
        name, count = to_dns_label(offer.pool.name, length), 2
        while name in names:
            end = f"-{count}"
            name, count = to_dns_label(offer.pool.name, length - len(end)) + end, count + 1
        names.append(name)
    return names


def describe_shape(offer: Offer) -> str:
    """Return the node count of an offer and the GPUs of each node, as a phrase."""
    gpus = "1 GPU" if offer.gpus_per_node == 1 else f"{offer.gpus_per_node} GPUs"
    return f"1 node of {gpus}" if offer.nodes == 1 else f"{offer.nodes} nodes of {gpus}"


def describe_offer(offer: Offer) -> str:
    """Return the nodes, plan and step time of an offer as a phrase. If its memory is tight, add the memory."""
    text = f"{describe_shape(offer)}, plan {offer.plan}, {format_duration(offer.step_s)} a step"
    return f"{text}, {describe_memory(offer)}" if offer.is_tight else text


def find_safer(advice: Advice, offer: Offer) -> Offer | None:
    """Return the advice's plan with memory to spare, if an offer's memory is tight and that plan is on its pool.

    Otherwise return None.
    """
    safer = advice.safer
    return safer if safer is not None and offer.is_tight and safer.pool.name == offer.pool.name else None


def list_offers_of_same_shape(advice: Advice, is_alike: Callable[[Offer, Offer], bool]) -> tuple[Offer, ...]:
    """Return offers, best first, that all have the shape of the best offer, at most one for each pool.

    A scheduler that only replaces the GPUs keeps the number of pods or nodes. So if any pool's best plan has another
    shape, all pools are searched again with as many GPUs as the best offer has. A pool without a plan of that shape is
    absent.

    Args:
        advice: advice with at least one offer.
        is_alike: function of two offers that returns whether they have the same shape. Its second argument is the best
            offer.
    """
    best = advice.offers[0]
    if all(is_alike(one, best) for one in advice.offers):
        return advice.offers
    limits = replace(advice.request.constraints, gpus=best.gpus, max_gpus=None, max_nodes=best.nodes)
    request = replace(advice.request, constraints=limits, baseline=None)
    again = advise(request, [one.pool for one in advice.offers]).offers
    alike = tuple(one for one in again if is_alike(one, best))
    return alike if any(one.pool.name == best.pool.name for one in alike) else (best, *alike)


def describe_ranking(advice: Advice, dialect: str, shown: Sequence[Offer] | None = None) -> list[str]:
    """Return lines that list the pools that can run the job, best first, and the pools that cannot.

    Args:
        advice: the advice.
        dialect: name of the dialect.
        shown: offers that the dialect writes. If absent, all offers of the advice.
    """
    offers = advice.offers if shown is None else shown
    if not offers:
        lines = [f"{advice.request.name}: no pool can run it as a scheduler of this kind asks, so nothing is written."]
    else:
        lines = [f"{advice.request.name}: one of these, best first, by `tilecast advise -o {dialect}`."]
    lines += [
        f"  {rank}. {one.pool.name}: {describe_offer(one)}" + "; may run out of memory" * one.is_tight
        for rank, one in enumerate(offers, 1)
    ]
    if offers and (safer := find_safer(advice, offers[0])) is not None:
        lines.append(f"  Safer on {safer.pool.name}: {describe_offer(safer)}; memory to spare")
    names = {one.pool.name for one in offers}
    lines += [
        f"  -  {one.pool.name}: {_explain_left_out(one, offers)}" for one in advice.offers if one.pool.name not in names
    ]
    return [*lines, *(f"  x  {item.pool}: {item.message}: {item.remedy}" for item in advice.rejections)]


def _explain_left_out(offer: Offer, shown: Sequence[Offer]) -> str:
    """Return the reason why an offer is not in the text that a dialect writes."""
    if shown and (offer.nodes, offer.gpus_per_node) == (shown[0].nodes, shown[0].gpus_per_node):
        return "the scheduler cannot tell its GPUs or nodes from those of a better pool, or does not know them"
    return f"its best plan has {describe_shape(offer)}, which cannot stand beside the others"


def write_comments(lines: Iterable[str]) -> str:
    """Return lines as comments, each ending in a newline. Newlines within a line become spaces.

    Other characters that are not printable are left out, because YAML does not allow them.
    """
    joined = (" ".join(line.splitlines()) for line in lines)
    return "".join(f"# {''.join(filter(str.isprintable, line))}".rstrip() + "\n" for line in joined)


def write_documents(comments: Iterable[str], documents: Sequence[Mapping[str, Any]]) -> str:
    """Return YAML documents after some comments."""
    import yaml

    texts = [yaml.safe_dump(dict(item), sort_keys=False, width=10_000, allow_unicode=True) for item in documents]
    return write_comments(comments) + "---\n".join(texts)
