"""Settings of activation recomputation: modes, and sets of modules of a layer.

A mode is `none`, `selective` or `full`. `selective` recomputes the core of attention, or the operators that the
framework chooses. `full` recomputes every layer. Modules have the names of Megatron-Core (`--recompute-modules`). A set
of modules is written with plus signs, in the order of `MODULES`: `layernorm+moe_act`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

Checkpointing: TypeAlias = str
"""A mode of `CHECKPOINTING`, or modules of `MODULES` joined by plus signs."""

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""Modes of recomputation. Their indexes are their codes in `Plans.checkpointing`."""
SELECTIVE, FULL = CHECKPOINTING.index("selective"), CHECKPOINTING.index("full")
"""Codes of the modes `selective` and `full`."""

RecomputedModule = Literal[
    "core_attn", "layernorm", "mla_up_proj", "mlp_act", "moe_act", "mlp", "moe", "shared_experts", "attn_out"
]
MODULES: tuple[RecomputedModule, ...] = get_args(RecomputedModule)
"""Modules of a layer that can be recomputed without the rest of the layer, by their names in Megatron-Core
(transformer_config.py, recompute_modules). Two are not in Megatron-Core. `mlp_act` is the activation function of a
dense MLP, which policies of MaxText and forks of Megatron-LM recompute. `attn_out` is what follows the projections of
queries, keys and values: the core of attention, the output projection and the residual sum. Policies of MaxText that
keep the three projections alone recompute it."""

PARTS: Mapping[str, frozenset[str]] = {
    "attn_out": frozenset({"core_attn"}),
    "mlp": frozenset({"mlp_act"}),
    "moe": frozenset({"moe_act", "shared_experts"}),
}
"""Modules inside another module, by the name of the outer module. Recomputing the outer module recomputes them too."""


def _has_no_nested_module(names: frozenset[str]) -> bool:
    """Return whether no module of a set lies inside another module of the set."""
    return not any(PARTS.get(name, frozenset()) & names for name in names)


_SETS: tuple[frozenset[str], ...] = tuple(
    names
    for chosen in product((False, True), repeat=len(MODULES))
    if any(chosen)
    and _has_no_nested_module(names := frozenset(name for name, used in zip(MODULES, chosen, strict=True) if used))
)


def _join_names(names: Iterable[str]) -> Checkpointing:
    """Return names of modules joined by plus signs, in the order of `MODULES`."""
    chosen = frozenset(names)
    return "+".join(name for name in MODULES if name in chosen)


RECOMPUTED: tuple[Checkpointing, ...] = (*CHECKPOINTING, *map(_join_names, _SETS))
"""Every setting of recomputation. The index of a setting is its code in `Plans.checkpointing`."""
_CODES: Mapping[Checkpointing, int] = {name: code for code, name in enumerate(RECOMPUTED)}

BY_CODE: npt.NDArray[np.bool_] = np.array(
    [*[[False] * len(MODULES)] * len(CHECKPOINTING), *[[name in names for name in MODULES] for names in _SETS]]
)
"""Whether each code's set of modules contains each module, (codes, modules). Rows of modes are False."""


def join_modules(names: Iterable[str]) -> Checkpointing:
    """Return the setting that recomputes some modules, for instance `layernorm+moe_act`.

    A module inside another of the given modules is left out, because the outer module recomputes it.

    Raises:
        KeyError: a name is not a module of `MODULES`, or `names` is empty.
    """
    chosen = frozenset(names)
    if not chosen or chosen - set(MODULES):
        raise KeyError(next(iter(chosen - set(MODULES)), ""))
    return _join_names(name for name in chosen if not any(name in PARTS.get(other, ()) for other in chosen))


def split_modules(setting: Checkpointing) -> tuple[str, ...]:
    """Return the names of the modules in a setting of recomputation. If the setting is a mode, return no names."""
    return () if setting in CHECKPOINTING else tuple(setting.split("+"))


def encode_modules(setting: Checkpointing) -> int:
    """Return the code in `Plans.checkpointing` of a setting of recomputation.

    Raises:
        KeyError: the setting does not exist.
    """
    return _CODES[setting]


def is_module_set(codes: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.bool_]:
    """Return whether each code stands for a set of modules rather than a mode, (n,)."""
    return codes >= len(CHECKPOINTING)


PATTERN = rf"^(none|selective|full|({'|'.join(MODULES)})(\+({'|'.join(MODULES)}))*)$"
"""Regular expression of a setting of recomputation, for the schemas of documents."""


def describe(setting: Checkpointing) -> str:
    """Return the short form that a plan's text uses for a recomputation setting, such as `sel` in `ac-sel`."""
    return {"selective": "sel"}.get(setting, setting)
