"""Choose the names of discovered pools, and the labels that select their nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from tilecast.nodes.labels import read_label_table
from tilecast.nodes.objects import Node
from tilecast.nodes.report import FoundPool


def choose_pool_names(pools: Sequence[FoundPool], used_names: Iterable[str]) -> list[str]:
    """Return a short unused name for each pool.

    The name is the GPU's. If this is not unique, GPUs per node, node type or a number are appended.

    Args:
        pools: the pools to name.
        used_names: names that are in use.
    """
    base = [item.pool.gpu.name + ("-spot" if item.spot else "") for item in pools]
    shape = [f"{name}-{item.pool.gpus_per_node}x" for name, item in zip(base, pools, strict=True)]
    typed = [
        f"{name}-{''.join(ch if ch.isalnum() else '-' for ch in (item.pool.node_type or item.pool.inter.name).lower())}"
        for name, item in zip(base, pools, strict=True)
    ]
    used, out = set(used_names), list[str]()
    for index in range(len(pools)):
        choices = (names[index] for names in (base, shape, typed) if names.count(names[index]) == 1)
        numbered = (f"{shape[index][:56]}-{number}" for number in range(2, len(pools) + len(used) + 3))
        short = (name[:63].rstrip("-.") for name in (*choices, *numbered))
        name = next(name for name in short if name not in used)
        used.add(name)
        out.append(name)
    return out


def choose_selectors(
    nodes: Sequence[Node], groups: Sequence[Sequence[int]], old_selectors: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    """Return a node selector for each group of nodes, which selects exactly the nodes of the group if possible.

    A group's old selector is used again as long as it is exact. Otherwise the exact selector with the fewest labels is
    used. Labels that name a node pool are used only if labels that describe nodes do not suffice. If no selector is
    exact, all descriptive labels that the nodes share are used.

    Args:
        nodes: all nodes.
        groups: positions in `nodes` of the nodes of each group.
        old_selectors: the previous selector of each group. Empty for a new group.
    """
    table = read_label_table()
    keys = [source.product for source in table.sources] + list(table.instance_type)
    keys += [key for source in table.sources for key in (source.count, source.memory_mib) if key]
    keys += [mark.label for mark in table.spot]
    descriptive_count = len(keys)
    keys += table.node_pool
    values = [tuple(item.labels.get(key) for key in keys) for item in nodes]
    home = {index: position for position, group in enumerate(groups) for index in group}
    kinds: dict[tuple[tuple[str | None, ...], int], None] = {
        (value, home.get(index, -1)): None for index, value in enumerate(values)
    }
    return [
        _choose_selector(keys, descriptive_count, kinds, position, old_selectors[position])
        for position in range(len(groups))
    ]


def _choose_selector(
    keys: Sequence[str],
    descriptive_count: int,
    kinds: Iterable[tuple[tuple[str | None, ...], int]],
    group_index: int,
    old_selector: Mapping[str, str],
) -> dict[str, str]:
    """Return the node selector of one group of nodes. `choose_selectors` describes the rules.

    Args:
        keys: label keys in order of preference.
        descriptive_count: number of keys, from the first on, that describe nodes. The others name node pools.
        kinds: distinct pairs of a node's label values and the index of its group; -1 for no group.
        group_index: index of the group.
        old_selector: the previous selector of the group. Empty for a new group.
    """
    own = [value for value, owner in kinds if owner == group_index]
    others = [value for value, owner in kinds if owner != group_index]
    if old_selector and old_selector.keys() <= set(keys):
        old_slots = [keys.index(key) for key in old_selector]
        chosen = [owner for value, owner in kinds if all(value[slot] == old_selector[keys[slot]] for slot in old_slots)]
        if chosen and chosen.count(group_index) == len(own) == len(chosen):
            return dict(old_selector)
    shared = [slot for slot, text in enumerate(own[0]) if text and all(value[slot] == text for value in own)]
    first = [slot for slot in shared if slot < descriptive_count]
    for candidates in (first, shared):
        for size in range(1, min(len(candidates), 3) + 1):
            for slots in combinations(candidates, size):
                if not any(all(value[slot] == own[0][slot] for slot in slots) for value in others):
                    return {keys[slot]: str(own[0][slot]) for slot in slots}
    return {keys[slot]: str(own[0][slot]) for slot in first}
