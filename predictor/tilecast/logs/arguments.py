"""Read the GPUs and the plan of a run from the program arguments in its log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilecast.spec import PartialPlan

_MAX_COUNT = 2**20


def _to_count(value: object) -> int | None:
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdecimal() and 0 < len(text) <= 7 and int(text) <= _MAX_COUNT else None


def _to_degree(value: object) -> int | None:
    return _to_count(value) or None


def _to_bool(value: object) -> bool | None:
    return {"true": True, "false": False}.get(str(value).strip().lower())


def _to_megatron_zero_stage(value: object) -> int | None:
    return None if (is_on := _to_bool(value)) is None else int(is_on)


def _to_zero_stage(value: object) -> int | None:
    return stage if (stage := _to_count(value)) is not None and stage <= 3 else None


ARGUMENTS: Mapping[str, tuple[str, Callable[[object], object]]] = {
    "world_size": ("gpus", _to_degree),
    "tensor_model_parallel_size": ("tensor", _to_degree),
    "tensor_parallel_degree": ("tensor", _to_degree),
    "pipeline_model_parallel_size": ("pipeline", _to_degree),
    "pipeline_parallel_degree": ("pipeline", _to_degree),
    "context_parallel_size": ("context", _to_degree),
    "context_parallel_degree": ("context", _to_degree),
    "expert_model_parallel_size": ("expert", _to_degree),
    "expert_parallel_degree": ("expert", _to_degree),
    "expert_tensor_parallel_size": ("expert_tensor", _to_degree),
    "micro_batch_size": ("micro_batch", _to_degree),
    "train_micro_batch_size_per_gpu": ("micro_batch", _to_degree),
    "sequence_parallel": ("sequence_parallel", _to_bool),
    "use_distributed_optimizer": ("zero_stage", _to_megatron_zero_stage),
    "zero_optimization_stage": ("zero_stage", _to_zero_stage),
}
"""Arguments of training programs, each with its plan column (or `gpus`) and the function that parses its value."""
_DEGREES = ("tensor", "pipeline", "context", "expert")


@dataclass(slots=True)
class RunFacts:
    """Facts that a log states about a run, except its steps."""

    gpus: int | None = None
    gpu: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns of the plan by name."""

    def add_argument(self, name: str, value: object) -> None:
        """Record an argument of the training program. Unknown names, and later values of the same name, are ignored."""
        column, read = ARGUMENTS.get(name.strip().lower().replace("-", "_"), ("", _to_count))
        if not column or (known := read(value)) is None:
            return
        if column == "gpus":
            self.gpus = self.gpus or _to_count(known)
        else:
            self.columns.setdefault(column, known)

    def add_values(self, values: Mapping[str, object]) -> None:
        """Record GPUs (`gpus`), their product name (`gpu`) and columns of the plan by name."""
        for name, value in values.items():
            if name == "gpus":
                self.gpus = self.gpus or _to_count(value)
            elif name == "gpu":
                self.gpu = self.gpu or str(value).strip()[:128]
            elif (known := _to_zero_stage(value) if name == "zero_stage" else _to_count(value)) is not None:
                self.columns.setdefault(name, known)

    @property
    def plan(self) -> PartialPlan | None:
        """The plan, if the log states one of its degrees. Columns that it does not state stay open."""
        if not any(name in self.columns for name in _DEGREES):
            return None
        columns = dict(self.columns)
        if columns.get("tensor", 1) == 1:
            columns.pop("sequence_parallel", None)
        if columns.get("expert", 1) == 1:
            columns.pop("expert_tensor", None)
        return PartialPlan(**columns)
