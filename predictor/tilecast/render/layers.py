"""Format the best strategy of each layer and the best pipeline split, as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilecast.advice import Offer
from tilecast.perlayer import REORDERING_TOLERANCE, LayerGroup, PerLayer, PipelineCut
from tilecast.render.units import format_duration, format_gibibytes

_WORTH = 0.005
"""Fraction of the step time below which a saving is not reported."""


def layers_text(offer: Offer, per_layer: PerLayer | None, cut: PipelineCut | None) -> str:
    """Return text on how much per-layer strategies and an uneven pipeline split save, ending in a newline."""
    where = f"{offer.pool.name} {offer.nodes}x{offer.gpus_per_node}"
    return "\n".join([*_strategy_lines(where, per_layer), *_cut_lines(cut)]) + "\n"


def layers_document(per_layer: PerLayer | None, cut: PipelineCut | None) -> dict[str, Any]:
    """Return per-layer strategies and pipeline split as JSON-compatible data. Layers are counted from 1."""
    values: dict[str, Any] = {}
    if per_layer is not None:
        values["strategies"] = {
            "groups": [
                {"name": group.name, "layers": list(group.layers), "plan": str(group.plan)}
                for group in per_layer.groups
            ],
            "stepSeconds": per_layer.step_s,
            "boundSeconds": per_layer.bound_s,
            "reshardingSeconds": per_layer.resharding_s,
            "memoryBytes": {"used": per_layer.memory_bytes, "available": per_layer.memory_available_bytes},
            "varies": list(per_layer.varies),
            "frameworks": list(per_layer.frameworks),
        }
        if per_layer.uniform is not None:
            values["strategies"]["uniform"] = {"plan": str(per_layer.uniform), "stepSeconds": per_layer.uniform_s}
    if cut is not None:
        values["stages"] = {
            "layers": list(cut.layers), "stepSeconds": cut.step_s, "evenStepSeconds": cut.even_s
        }  # fmt: skip
    return values


def _strategy_lines(location: str, per_layer: PerLayer | None) -> list[str]:
    if per_layer is None:
        return [f"Per layer on {location}: no choice without a pipeline fits, or the model is priced as one block."]
    memory = f"{format_gibibytes(per_layer.memory_bytes)}/{format_gibibytes(per_layer.memory_available_bytes)} GiB"
    if not per_layer.varies or (per_layer.saving is not None and per_layer.saving < _WORTH):
        same = (
            f"{per_layer.uniform}, {format_duration(per_layer.uniform_s)}"
            if per_layer.uniform_s is not None
            else "none fits"
        )
        return [f"Per layer on {location}: the same everywhere is best without a pipeline ({same})."]
    if per_layer.uniform_s is None:
        text = "no plan without a pipeline fits that is the same everywhere"
    else:
        text = f"{per_layer.saving:.1%} less than the best that is the same everywhere ({per_layer.uniform})"
    lines = [f"Per layer on {location}: {format_duration(per_layer.step_s)}, {text}"]
    depth = max((layer for group in per_layer.groups for layer in group.layers), default=0)
    names = [_name_group(group, depth) for group in per_layer.groups]
    width = max(len(name) for name in names)
    lines += [f"  {name.ljust(width)}  {group.plan}" for name, group in zip(names, per_layer.groups, strict=True)]
    gap = per_layer.step_s / per_layer.bound_s - 1
    proof = "no choice is better" if gap < 2 * REORDERING_TOLERANCE else f"at most {gap:.1%} above the best choice"
    lines.append(
        f"  {memory}; {format_duration(per_layer.resharding_s)} of it moves activations between layouts; {proof}"
    )
    able = (
        ", ".join(per_layer.frameworks)
        if per_layer.frameworks
        else "none of the known frameworks; Alpa and Galvatron do"
    )
    lines.append(f"  varies: {', '.join(per_layer.varies)}; can be run by: {able}")
    return lines


def _name_group(group: LayerGroup, depth: int) -> str:
    """Return the name of a layer group, such as `embedding` or `layers 1-12,25-32 of 32`, up to layer `depth`."""
    if not group.layers:
        return group.name
    return f"layer{'s' if len(group.layers) > 1 else ''} {_format_ranges(group.layers)} of {depth}"


def _format_ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: `1-12,25-32`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _cut_lines(cut: PipelineCut | None) -> list[str]:
    if cut is None or cut.step_s > cut.even_s * (1 - _WORTH):
        return []
    layers = "+".join(str(count) for count in cut.layers)
    saved = f"{1 - cut.step_s / cut.even_s:.1%}"
    return [
        f"Uneven pipeline: {layers} layers instead of equally many make a step {saved} shorter",
        "  can be run by: megatron (--pipeline-model-parallel-layout), torchtitan (module_fqns_per_model_part)",
    ]
