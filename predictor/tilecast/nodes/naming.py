"""Names of discovered pools, and the labels that select their nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from tilecast.nodes.labels import label_table
from tilecast.nodes.objects import Node
from tilecast.nodes.report import FoundPool


def name_pools(unnamed: Sequence[FoundPool], taken: Iterable[str]) -> list[str]:
    """Return a short name for each pool: its GPU, then properties that distinguish pools of one GPU, then a number.

    Args:
        unnamed: the pools.
        taken: names that are in use.
    """
    pools = [item.pool for item in unnamed]
    base = [item.pool.gpu.name + ("-spot" if item.spot else "") for item in unnamed]
    shape = [f"{name}-{pool.gpus_per_node}x" for name, pool in zip(base, pools, strict=True)]
    typed = [
        f"{name}-{''.join(ch if ch.isalnum() else '-' for ch in (pool.node_type or pool.inter.name).lower())}"
        for name, pool in zip(base, pools, strict=True)
    ]
    used, out = set(taken), list[str]()
    for index in range(len(unnamed)):
        choices = (names[index] for names in (base, shape, typed) if names.count(names[index]) == 1)
        numbered = (f"{shape[index][:56]}-{number}" for number in range(2, len(unnamed) + len(used) + 3))
        short = (name[:63].rstrip("-.") for name in (*choices, *numbered))
        name = next(name for name in short if name not in used)
        used.add(name)
        out.append(name)
    return out


def select_groups(
    nodes: Sequence[Node], groups: Sequence[Sequence[int]], old: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    """Return labels that select each group of nodes: exactly its nodes where possible.

    The old labels of a group are kept while they select all of its nodes and no others. Otherwise the fewest labels
    that do so are used: first labels that describe nodes, then also labels that name their node pool. If no labels do
    so, all descriptive labels that its nodes share are used.

    Args:
        nodes: all nodes.
        groups: positions of the nodes of each group.
        old: labels that selected each group before; empty for a new group.
    """
    table = label_table()
    keys = [source.product for source in table.sources] + list(table.instance_type)
    keys += [key for source in table.sources for key in (source.count, source.memory_mib) if key]
    keys += [mark.label for mark in table.spot]
    telling = len(keys)
    keys += table.node_pool
    values = [tuple(item.labels.get(key) for key in keys) for item in nodes]
    home = {index: position for position, group in enumerate(groups) for index in group}
    kinds: dict[tuple[tuple[str | None, ...], int], None] = {
        (value, home.get(index, -1)): None for index, value in enumerate(values)
    }
    return [_select_group(keys, telling, kinds, position, old[position]) for position in range(len(groups))]


def _select_group(
    keys: Sequence[str],
    telling: int,
    kinds: Iterable[tuple[tuple[str | None, ...], int]],
    position: int,
    old: Mapping[str, str],
) -> dict[str, str]:
    """Return labels that select one group of nodes (`select_groups`).

    Args:
        keys: label keys in order of preference.
        telling: how many of the keys describe nodes; the others name their node pool.
        kinds: distinct pairs of label values and position of a group, -1 for none.
        position: position of the group.
        old: labels that selected the group before.
    """
    own = [value for value, owner in kinds if owner == position]
    others = [value for value, owner in kinds if owner != position]
    if old and old.keys() <= set(keys):
        old_slots = [keys.index(key) for key in old]
        chosen = [owner for value, owner in kinds if all(value[slot] == old[keys[slot]] for slot in old_slots)]
        if chosen and chosen.count(position) == len(own) == len(chosen):
            return dict(old)
    shared = [slot for slot, text in enumerate(own[0]) if text and all(value[slot] == text for value in own)]
    first = [slot for slot in shared if slot < telling]
    for candidates in (first, shared):
        for size in range(1, min(len(candidates), 3) + 1):
            for slots in combinations(candidates, size):
                if not any(all(value[slot] == own[0][slot] for slot in slots) for value in others):
                    return {keys[slot]: str(own[0][slot]) for slot in slots}
    return {keys[slot]: str(own[0][slot]) for slot in first}
