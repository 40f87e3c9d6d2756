"""Values of recomputation in the backward pass: modes, and sets of modules of a layer by name.

A plan either recomputes nothing, the core of attention (`selective`, or the operators that its framework chooses),
every layer, or some modules of a layer. Modules have the names of Megatron-Core (`--recompute-modules`). A set of
modules is written with plus signs, in the order of `MODULES`: `layernorm+moe_act`.
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
"""Modes of recomputation. Their indexes are the first codes of `Plans.checkpointing`, and those of `RECOMPUTED` all."""
SELECTIVE, FULL = CHECKPOINTING.index("selective"), CHECKPOINTING.index("full")
"""Codes of two modes."""

RecomputedModule = Literal[
    "core_attn", "layernorm", "mla_up_proj", "mlp_act", "moe_act", "mlp", "moe", "shared_experts"
]
MODULES: tuple[RecomputedModule, ...] = get_args(RecomputedModule)
"""Modules of a layer that can be recomputed on their own, with the names of Megatron-Core (transformer_config.py,
recompute_modules). `mlp_act` is the activation of a dense MLP alone, which policies of MaxText and forks of Megatron-LM
recompute."""

PARTS: Mapping[str, frozenset[str]] = {
    "mlp": frozenset({"mlp_act"}),
    "moe": frozenset({"moe_act", "shared_experts"}),
}
"""Modules inside another one, which recomputes them too."""


def _is_minimal(names: frozenset[str]) -> bool:
    """Return whether no module of a set contains another module of the set."""
    return not any(PARTS.get(name, frozenset()) & names for name in names)


_SETS: tuple[frozenset[str], ...] = tuple(
    names
    for chosen in product((False, True), repeat=len(MODULES))
    if any(chosen) and _is_minimal(names := frozenset(name for name, used in zip(MODULES, chosen, strict=True) if used))
)


def _join(names: Iterable[str]) -> Checkpointing:
    chosen = frozenset(names)
    return "+".join(name for name in MODULES if name in chosen)


RECOMPUTED: tuple[Checkpointing, ...] = (*CHECKPOINTING, *map(_join, _SETS))
"""Every value of recomputation; the index is the code in `Plans.checkpointing`."""
_CODES: Mapping[Checkpointing, int] = {name: code for code, name in enumerate(RECOMPUTED)}

BY_CODE: npt.NDArray[np.bool_] = np.array(
    [*[[False] * len(MODULES)] * len(CHECKPOINTING), *[[name in names for name in MODULES] for names in _SETS]]
)
"""Whether each code recomputes each module by name, (codes, modules). The first rows are modes and name none."""


def join_modules(names: Iterable[str]) -> Checkpointing:
    """Return the recomputation mode that stands for some modules. A module inside another one is left out.

    Raises:
        KeyError: a name is no module, or there is none.
    """
    chosen = frozenset(names)
    if not chosen or chosen - set(MODULES):
        raise KeyError(next(iter(chosen - set(MODULES)), ""))
    return _join(name for name in chosen if not any(name in PARTS.get(other, ()) for other in chosen))


def split_modules(value: Checkpointing) -> tuple[str, ...]:
    """Return the modules that a value of recomputation names, empty for a mode."""
    return () if value in CHECKPOINTING else tuple(value.split("+"))


def code_of(value: Checkpointing) -> int:
    """Return the code of a value of recomputation in `Plans.checkpointing`."""
    return _CODES[value]


def names_modules(codes: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.bool_]:
    """Return whether each code stands for a set of modules, (n,). False marks a mode."""
    return codes >= len(CHECKPOINTING)


PATTERN = rf"^(none|selective|full|({'|'.join(MODULES)})(\+({'|'.join(MODULES)}))*)$"
"""Regular expression of the values, in documents."""


def describe(value: Checkpointing) -> str:
    """Return the short form of a value that plans print after `ac-`: `sel`, `full` or the modules."""
    return {"selective": "sel"}.get(value, value)
