"""Plans that each training framework executes, from the tables of `frameworks.toml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from tilecast import frameworks
from tilecast.recomputation import BY_CODE, CHECKPOINTING, MODULES, Checkpointing, code_of
from tilecast.spec import Framework, Plans, Weights

Mask: TypeAlias = npt.NDArray[np.bool_]
Dimension = Literal["recomputation", "zero", "tensor", "expert"]
"""Dimensions in which the layers of one plan may differ."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """Plans and options that a training framework executes, as a table of `frameworks.toml` has them."""

    parallelism: Sequence[str]
    """Degrees that may exceed one, among data, tensor, pipeline, context, expert, expert_tensor and virtual."""
    zero_stages: Mapping[str, Sequence[int]]
    """ZeRO stages allowed with data parallelism `alone`, and with each other degree; the default is `alone`."""
    checkpointing: Sequence[str]
    """Modes of recomputation."""
    precisions: Sequence[str]
    offload: Sequence[str]
    holds: Sequence[Weights]
    """Ways to store weights in 16-bit training, besides that of the framework itself."""
    source: str
    sequence_parallel: Sequence[bool] = (False,)
    """Allowed values of sequence parallelism (splitting norms and residuals) where tensor parallelism is on."""
    per_layer: tuple[Dimension, ...] = ()
    """Dimensions that may differ from layer to layer."""
    expert_dispatch: Sequence[str] = ("allToAll",)
    """Ways in which tokens may get to their experts."""
    expert_overlap: Sequence[str] = ("none",)
    """Computation that may run beside that."""
    experts_fold_over_tensor: bool = True
    """Whether tensor ranks may hold different experts, or only data ranks."""

    hybrid_shards: bool = False
    """Whether groups of ranks may each hold all shards (HSDP), rather than all ranks together."""
    offload_activations: Literal["none", "alone", "any"] = "none"
    """Plans whose activations it keeps in the host's memory: none, those without pipeline and recomputation, or any."""
    modules: Sequence[str] = ()
    """Modules of a layer that it can recompute on their own, in any combination."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Sets of modules that the search tries, by the name that the framework or its users have for each."""

    def recomputes(self, value: Checkpointing) -> bool:
        """Return whether the framework has a value of recomputation."""
        return bool(self._recomputed()[code_of(value)])

    def _recomputed(self) -> Mask:
        """Return which codes of `recomputation.RECOMPUTED` the framework has, (codes,)."""
        own = np.isin(MODULES, self.modules)
        named = np.asarray(~(BY_CODE & ~own).any(axis=1))
        named[: len(CHECKPOINTING)] = [mode in self.checkpointing for mode in CHECKPOINTING]
        return named

    def offloads(self, plans: Plans) -> Mask:
        """Return which plans can keep activations in the host's memory, (n,)."""
        if self.offload_activations == "alone":
            return np.asarray((plans.pipeline == 1) & (plans.checkpointing == 0))
        return np.full(len(plans), self.offload_activations == "any")

    def executes(self, plans: Plans) -> Mask:
        """Return which plans the framework executes, (n,)."""
        fine: Mask = self._recomputed()[plans.checkpointing] & (
            np.isin(plans.sequence_parallel, self.sequence_parallel) | (plans.tensor == 1)
        )
        alone = self.zero_stages["alone"]
        # Most degrees allow the same stages.
        shards = {
            stages: np.isin(plans.zero_stage, stages) | (plans.data * plans.context == 1)
            for stages in {(*stages,) for stages in self.zero_stages.values()}
        }
        fine &= shards[*alone]
        for name in ("data", "tensor", "pipeline", "context", "expert", "expert_tensor", "virtual"):
            used = getattr(plans, "virtual_stages" if name == "virtual" else name) > 1
            allowed = shards[*self.zero_stages.get(name, alone)] if name in self.parallelism else False
            fine &= ~used | allowed
        return fine


_OF_CELLS = ("cells", "since", "version")
"""Keys of a table of `frameworks.toml` that `frameworks.Framework` reads."""


def _read_abilities(table: Mapping[str, Any]) -> Abilities:
    """Return the abilities in a table of `frameworks.toml`."""
    abilities = {name: value for name, value in table.items() if name not in _OF_CELLS}
    return Abilities(**{**abilities, "per_layer": tuple(abilities.get("per_layer", ()))})


FRAMEWORKS: Mapping[Framework, Abilities] = {
    name: _read_abilities(frameworks.TABLES[name]) for name in get_args(Framework) if name in frameworks.ENGINES
}
"""Abilities of every training framework that is its own engine, by name."""


def abilities(framework: Framework) -> Abilities:
    """Return the abilities of a framework's engine."""
    return FRAMEWORKS[engine(framework)]


def engine(framework: Framework) -> Framework:
    """Return the framework whose engine executes a framework's plans. Most frameworks are their own engine."""
    return cast("Framework", frameworks.FRAMEWORKS[framework].engine)
