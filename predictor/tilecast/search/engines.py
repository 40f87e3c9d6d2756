"""Tell whether a training framework can execute a plan, from its table in `frameworks.toml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from tilecast import frameworks
from tilecast.recomputation import BY_CODE, CHECKPOINTING, MODULES, Checkpointing, encode_modules
from tilecast.spec import SCHEDULE_CODES, Framework, Plans, Schedule, Weights

Mask: TypeAlias = npt.NDArray[np.bool_]
Dimension = Literal["recomputation", "zero", "tensor", "expert"]
"""Properties of a plan in which its layers may differ."""


@dataclass(frozen=True, slots=True)
class FrameworkFeatures:
    """Plans and options that one training framework executes, read from its table in `frameworks.toml`."""

    parallelism: Sequence[str]
    """Degrees of parallelism that may exceed one, among data, tensor, pipeline, context, expert and virtual."""
    zero_stages: Mapping[str, Sequence[int]]
    """Allowed ZeRO stages, by the degree of parallelism that exceeds one. The key `alone` is for data parallelism and
    for every degree without a key."""
    checkpointing: Sequence[str]
    """Modes of recomputation that the framework has, without sets of modules."""
    precisions: Sequence[str]
    offload: Sequence[str]
    holds: Sequence[Weights]
    """Ways to store weights in 16-bit training, other than the framework's default."""
    source: str
    sequence_parallel: Sequence[bool] = (False,)
    """Allowed values of sequence parallelism (splitting norms and residuals) in plans with tensor parallelism."""
    schedules: frozenset[Schedule] = frozenset()
    """Schedules of its pipelines."""
    per_layer: tuple[Dimension, ...] = ()
    """Properties of a plan that may differ from layer to layer."""
    expert_dispatch: Sequence[str] = ("allToAll",)
    """Collectives that may send tokens to their experts."""
    expert_overlap: Sequence[str] = ("none",)
    """Computations that may overlap with sending tokens to their experts."""
    has_expert_capacity: bool = False
    """Whether buffers of experts can have room for more tokens than an even share, and a stash beside them."""
    experts_fold_over_tensor: bool = True
    """Whether expert parallelism may spread experts over tensor-parallel ranks too, not only over data ranks."""

    hybrid_shards: bool = False
    """Whether the framework has hybrid sharding (HSDP), in which every group of ranks together holds all shards."""
    offload_activations: Literal["none", "alone", "any"] = "none"
    """Kinds of plans in which the framework can offload activations to the host.

    `alone` means without pipeline and recomputation.
    """
    modules: Sequence[str] = ()
    """Modules of a layer that the framework can recompute without the rest of the layer, in any combination."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Sets of recomputed modules that the search tries, by the framework's name of the set."""

    def recomputes(self, setting: Checkpointing) -> bool:
        """Return whether the framework supports a mode of recomputation or a set of recomputed modules."""
        return bool(self._find_recomputed_codes()[encode_modules(setting)])

    def _find_recomputed_codes(self) -> Mask:
        """Return whether the framework supports each recomputation code, (codes,).

        Codes are indices into `recomputation.RECOMPUTED`.
        """
        supported = np.isin(MODULES, self.modules)
        named = np.asarray(~(BY_CODE & ~supported).any(axis=1))
        named[: len(CHECKPOINTING)] = [mode in self.checkpointing for mode in CHECKPOINTING]
        return named

    def offloads(self, plans: Plans) -> Mask:
        """Return whether the framework can offload the activations of each plan to the host, (n,)."""
        if self.offload_activations == "alone":
            return np.asarray((plans.pipeline == 1) & (plans.checkpointing == 0))
        return np.full(len(plans), self.offload_activations == "any")

    def executes(self, plans: Plans) -> Mask:
        """Return whether the framework executes each plan, (n,)."""
        fine: Mask = self._find_recomputed_codes()[plans.checkpointing] & (
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
        if plans.schedule.any():
            fine &= np.isin(plans.schedule, [0, *(SCHEDULE_CODES[name] for name in self.schedules)])
        return fine


_KEYS_OF_CELLS = ("cells", "since", "version", "engine")
"""Keys of a table of `frameworks.toml` that `frameworks.Framework` reads, and `FrameworkFeatures` does not have."""


def _read_features(name: str, table: Mapping[str, Any]) -> FrameworkFeatures:
    """Return the plans and options that a framework executes, from its table in `frameworks.toml`."""
    features = {name: value for name, value in table.items() if name not in _KEYS_OF_CELLS}
    schedules = (
        frameworks.FRAMEWORKS[name].schedules if "pipeline" in features["parallelism"] else frozenset[Schedule]()
    )
    return FrameworkFeatures(**{**features, "per_layer": tuple(features.get("per_layer", ())), "schedules": schedules})


def _list_own_features(name: str) -> dict[str, Any]:
    """Return the entries of a framework's own table that describe which plans it executes."""
    return {key: value for key, value in frameworks.TABLES[name].items() if key not in _KEYS_OF_CELLS}


_ABILITIES: Mapping[str, FrameworkFeatures] = {
    name: _read_features(name, {**frameworks.TABLES[frameworks.FRAMEWORKS[name].engine], **_list_own_features(name)})
    for name in get_args(Framework)
}
"""Plans and options of every framework by name, those of its engine but for what its own table says."""
FRAMEWORKS: Mapping[Framework, FrameworkFeatures] = {
    name: _ABILITIES[name] for name in get_args(Framework) if name in frameworks.ENGINES
}
"""Features of every framework that executes plans itself, by name.

Frameworks that run on another framework's engine are absent.
"""


def find_framework_features(framework: Framework) -> FrameworkFeatures:
    """Return the plans and options that a framework executes, itself or by the engine of another framework.

    A framework may run fewer degrees of parallelism than its engine.
    """
    return _ABILITIES[framework]


def find_engine(framework: Framework) -> Framework:
    """Return the framework whose code runs the plans of `framework`. For most frameworks, this is `framework`."""
    return cast("Framework", frameworks.FRAMEWORKS[framework].engine)
