"""The result of reading a launch: the job, its plan, and the ignored options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilecast.launch_options.options_table import Facts
from tilecast.spec import Framework, PartialPlan, SpecError


@dataclass(frozen=True, slots=True)
class LaunchReading:
    """The training job and the plan that a user's launch describes."""

    title: str
    """Name of the launcher or framework, such as "Megatron-LM"."""
    framework: Framework
    training: Mapping[str, Any]
    """Fields of `spec.training`, without those that belong to the plan."""
    plan: PartialPlan
    model: Mapping[str, Any] | None = None
    """`spec.model`, or None if the launch does not describe the model."""
    model_name: str = ""
    gpus: int | None = None
    gpus_per_node: int | None = None
    table: str = ""
    """Name of the table of options."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Option that set each target."""
    unpriced: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    program: str = field(default="", compare=False)
    """Training script of the command, or an empty text if a configuration was read."""
    words: tuple[str, ...] = field(default=(), compare=False)
    """Arguments of the training script."""

    def summary(self) -> tuple[str, ...]:
        """Return sentences on what was read from the launch and what was ignored."""
        gpus = f" on {self.gpus} GPUs" if self.gpus else ""
        lines = [f"Read as {self.title}: {self.plan_text()}{gpus}."]
        if self.unknown:
            lines.append(f"Not known, ignored: {', '.join(self.unknown[:20])}{' …' if len(self.unknown) > 20 else ''}.")
        if self.unpriced:
            lines.append("Ignored although they change speed or memory: " + ", ".join(self.unpriced) + ".")
        return (*lines, *self.notes)

    def plan_text(self) -> str:
        """Return the plan in the syntax of `--plan`."""
        plan = self.plan
        degrees = {
            "dp": plan.data, "tp": plan.tensor, "pp": plan.pipeline, "cp": plan.context, "ep": plan.expert,
            "etp": plan.expert_tensor, "vp": plan.virtual_stages, "zero": plan.zero_stage,
        }  # fmt: skip
        parts = [f"{key}={value}" for key, value in degrees.items() if value and (value > 1 or key in ("dp", "zero"))]
        parts += ["sp=1"] if plan.sequence_parallel else []
        parts += [f"mb={plan.micro_batch}"] if plan.micro_batch else []
        parts += [f"ac={plan.checkpointing}"] if plan.checkpointing not in (None, "none") else []
        return ",".join(parts)


def require_priced(reading: LaunchReading, where: str) -> None:
    """Raise SpecError if the forecast ignores an option that changes speed or memory.

    Raises:
        SpecError: there is such an option.
    """
    for option, reason in reading.unpriced.items():
        raise SpecError(f"{where}: {option}" if where else option, reason, "change it, or ignore it by --lenient")


def compute_data_degree(gpus: int | None, tensor: int, pipeline: int, context: int, where: str) -> int | None:
    """Return the data-parallel degree of a plan, or None if the number of GPUs is unknown.

    Raises:
        SpecError: the product of the other degrees does not divide the number of GPUs.
    """
    if gpus is None:
        return None
    shared = tensor * pipeline * context
    if gpus % shared:
        problem = (
            f"degrees of {tensor} (tensor) x {pipeline} (pipeline) x {context} (context) do not divide {gpus} GPUs"
        )
        raise SpecError(where or "plan", problem, "correct a degree or the number of processes")
    return gpus // shared


def check_batch(batch: int | None, micro: int | None, data: int | None, where: str, option: str) -> None:
    """Raise SpecError unless the global batch is a multiple of the micro-batch times the data-parallel degree.

    If any of the three is unknown, nothing is checked.

    Raises:
        SpecError: the global batch is not such a multiple.
    """
    if batch is not None and micro is not None and data is not None and batch % (micro * data):
        problem = f"{batch} is no multiple of {micro} (micro-batch) x {data} (data parallel)"
        raise SpecError(f"{where}: {option}" if where else option, problem, "correct one of them")


def drop_none(items: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dictionary of those items whose value is not None."""
    return {key: value for key, value in dict(items).items() if value is not None}


def list_common_fields(facts: Facts) -> dict[str, Any]:
    """Return the fields of a `LaunchReading` that are the same as in the facts."""
    return {
        "title": facts.table.title,
        "table": facts.table.name,
        "origins": dict(facts.origins),
        "unpriced": dict(facts.unpriced),
        "unknown": tuple(facts.unknown),
    }
