"""List the launch options to change to get another plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tilecast.launch_options.options_table import OptionTable
from tilecast.readers.reading import LaunchReading
from tilecast.recomputation import describe
from tilecast.search import find_engine
from tilecast.spec import Plan

_DERIVED = ("data",)
"""Plan columns that follow from the number of processes."""
_TARGETS = {"gradient_accumulation": "accumulation"}
"""Target of a plan column if it is not `plan.` and the column's name."""


def list_changes(reading: LaunchReading, before: Plan, after: Plan) -> list[str]:
    """Return a text for each option to change between two plans, such as `--micro-batch-size 1 -> 2`.

    If the launcher has no option for a column of the plan, the text names the column in words.
    """
    table = OptionTable.read(reading.table)
    changes = []
    for name in (item.name for item in fields(Plan)):
        old, new = getattr(before, name), getattr(after, name)
        target = _TARGETS.get(name, f"plan.{name}")
        if old == new or name in _DERIVED:
            continue
        option, entry = _find_option(table, reading, target, new)
        if entry is not None:
            is_written = reading.origins.get(target) is not None
            if "is" in entry and new == entry.get("else") and table.defaults.get(target) == entry["is"]:
                # Without the option, the launcher's default stays on.
                changes.append(f"{option} true -> false" if is_written else f"add {option} false")
                continue
            changes.append(_format_change(option, entry, old, new, is_written))
        elif name == "expert_tensor" and after.expert_tensor == after.tensor:
            continue
        elif name == "zero_stage" and (change := _format_shards(reading, old, new)):
            changes.append(change)
        elif name != "gradient_accumulation":
            changes.append(f"{name.replace('_', ' ')} {_format_changed_value(old)} -> {_format_changed_value(new)}")
    return changes


_SHARDS = (None, None, ("shard_grad_op", "hybrid_shard_zero2", "false"), ("full_shard", "hybrid_shard", "true"))
"""Word of `--fsdp` by ZeRO stage, that of hybrid sharding, and the value of `reshard_after_forward`."""


def _format_shards(reading: LaunchReading, old: object, new: object) -> str:
    """Return the change of FSDP's own option that goes from one ZeRO stage to another, or "" for other engines."""
    before, after = (_SHARDS[stage] if isinstance(stage, int) else None for stage in (old, new))
    if reading.framework == "litgpt" or find_engine(reading.framework) != "fsdp2" or before is None or after is None:
        return ""
    if (config := reading.origins.get("fsdp_config")) is not None:
        return f"reshard_after_forward {before[2]} -> {after[2]} in {config}"
    if (option := reading.origins.get("fsdp")) is not None:
        place = int("shardDegree" in reading.training)
        return f"{option} {before[place]} -> {after[place]}"
    return f"fsdp_reshard_after_forward {before[2]} -> {after[2]}"


_BESIDE = ("deepspeed", "accelerate", "fsdp")
"""Tables of files that accompany the main one."""


def _find_option(
    table: OptionTable, reading: LaunchReading, target: str, new: object
) -> tuple[str, Mapping[str, Any] | None]:
    """Return the option that sets a target, and its entry in the table of options.

    An option that the user wrote is preferred. Among flags that the user did not write, the one with the new value is
    preferred, or else one that is switched off for it. If no option sets the target, return ("", None). LitGPT sets
    its strategy in its own code, and the micro-batch alone by an option.
    """
    if reading.framework == "litgpt" and target != "plan.micro_batch":
        return "", None
    if (origin := reading.origins.get(target)) is not None:
        tables = (table, *map(OptionTable.read, _BESIDE))
        return origin, next((one.options[key] for one in tables if (key := one.find_key(origin)) in one.options), None)
    found = [
        (table.names[key], entry)
        for key, entry in table.options.items()
        if entry["to"] == target and not entry.get("weak")
    ]
    exact = [(option, entry) for option, entry in found if "is" in entry and entry["is"] == new]
    off = [(option, entry) for option, entry in found if "is" in entry and entry.get("else") == new]
    return (exact or off[-1:] or found)[0] if found else ("", None)


def _format_change(option: str, entry: Mapping[str, Any], old: object, new: object, is_written: bool) -> str:
    """Return the change of one option as text, such as `--micro-batch-size 1 -> 2`. A flag is added or removed."""
    if "is" in entry:
        if new == entry["is"]:
            return f"add {option}"
        return (
            f"remove {option}"
            if old == entry["is"]
            else f"{option} {_format_changed_value(old)} -> {_format_changed_value(new)}"
        )
    values: Mapping[str, object] = entry.get("values", {})

    def format_value(value: object) -> str:
        return next((word for word, meant in values.items() if meant == value), _format_changed_value(value))

    if new == "none" and "none" not in values.values():
        return f"remove {option} {format_value(old)}"
    also = f" {entry['also'][new]}" if isinstance(new, str) and new in entry.get("also", {}) else ""
    if not is_written:
        return f"add {option} {format_value(new)}{also}"
    return f"{option} {format_value(old)} -> {format_value(new)}{also}"


def _format_changed_value(value: object) -> str:
    return describe(value) if isinstance(value, str) and value != "none" else str(value).lower()
