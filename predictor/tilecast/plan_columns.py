"""The columns of a plan, with their names in tables, documents and flags, and their descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanColumn:
    """One column of `spec.Plans`, which is also a field of `spec.Plan`: its names, description and allowed values."""

    name: str
    """Name of the column in Python."""
    key: str
    """Key of the value in documents, in camelCase."""
    description: str
    """Meaning of the value, for schemas."""
    detail: str = ""
    """Text that the schema of a complete plan adds to `description`."""
    flag: str = ""
    """Short key on the command line, such as `tp` in `tp=2`. It is empty if users cannot set the column."""
    words: str = ""
    """Name of the column in sentences."""
    example: str = ""
    """Example of the value in the short text of a plan."""
    legend: str = ""
    """Explanation of `example`."""
    least: int = 1
    """Smallest allowed value."""
    most: int = 2**20
    """Largest allowed value."""
    off: int | str | bool | None = None
    """Value that a complete plan has if its text leaves out the column. None if the text never leaves it out."""


PLAN_COLUMNS: Mapping[str, PlanColumn] = {
    column.name: column
    for column in (
        PlanColumn(
            "data", "data", "Replicas that see different samples", flag="dp",
            example="dp16", legend="data parallel over 16 replicas",
        ),
        PlanColumn(
            "zero_stage", "zeroStage", "What data-parallel ranks shard", ": 1 optimizer, 2 gradients, 3 weights",
            flag="zero", words="ZeRO stage", least=0, most=3, off=0,
            example="zero1, zero2, fsdp", legend="ZeRO stage 1, 2 or 3 over them",
        ),
        PlanColumn(
            "tensor", "tensor", "GPUs that share each layer", flag="tp", example="tp2", legend="tensor parallel",
        ),
        PlanColumn(
            "sequence_parallel", "sequenceParallel", "Whether tensor ranks also share what lies between layers",
            flag="sp", least=0, most=1, off=False,
            example="sp", legend="norms and residuals split by sequence over the tensor ranks",
        ),
        PlanColumn(
            "pipeline", "pipeline", "Stages of consecutive layers", flag="pp", example="pp2", legend="pipeline stages",
        ),
        PlanColumn(
            "virtual_stages", "virtualStages", "Pieces of the model that each stage holds", flag="vp",
            example="vp2", legend="virtual stages of each pipeline rank",
        ),
        PlanColumn(
            "schedule", "pipelineSchedule", "Order of the passes in the pipeline",
            "; absent is 1F1B, interleaved where stages have several pieces, or the job's",
            flag="schedule", words="pipeline schedule", example="zbv, dualPipeV",
            legend="order of the passes in the pipeline, other than 1F1B",
        ),
        PlanColumn(
            "context", "context", "GPUs that share one sequence", flag="cp", example="cp2", legend="context parallel",
        ),
        PlanColumn(
            "expert", "expert", "GPUs that share the experts", flag="ep", example="ep8", legend="expert parallel",
        ),
        PlanColumn(
            "expert_tensor", "expertTensor", "GPUs that share each expert", flag="etp",
            example="etp2", legend="expert tensor parallel",
        ),
        PlanColumn(
            "micro_batch", "microBatchSize", "Samples of one forward pass", " on one GPU", flag="mb",
            words="micro-batch", example="mb2", legend="samples of one micro-batch",
        ),
        PlanColumn(
            "gradient_accumulation", "gradientAccumulation", "Micro-batches of one rank and optimizer step",
        ),
        PlanColumn(
            "checkpointing", "activationCheckpointing", "What is recomputed", flag="ac", words="recomputation",
            off="none", example="ac-sel, ac-full, ac-layernorm+moe_act",
            legend="attention, every layer, or the named modules computed again in the backward pass",
        ),
    )
}  # fmt: skip
"""Every column of a plan by name, in the order in which tables print them."""

BY_FLAG: Mapping[str, PlanColumn] = {column.flag: column for column in PLAN_COLUMNS.values() if column.flag}
"""Columns that users can set, by their short key on the command line."""
