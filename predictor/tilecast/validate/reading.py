"""Read rows of measured training runs as workloads, plans and pools.

`read_run` is the entry point. It does not read the columns with measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from tilecast import zoo
from tilecast.frameworks import parse_version
from tilecast.hardware import Gpu, Pool, find_gpu, find_link
from tilecast.model import Model
from tilecast.recomputation import RECOMPUTED, encode_modules
from tilecast.spec import PRECISIONS, Framework, Optimizer, SpecError, Workload
from tilecast.validate.cells import Row, UnreadableRow, read_integer
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.vision import Vision


@dataclass(frozen=True, slots=True)
class RunCase:
    """Workload, pool and plan that a row of a runs table describes."""

    workload: Workload
    pool: Pool
    gpus: int
    stated: Mapping[str, int | None]
    """Columns of `Plans` by name. None for those that the row leaves open."""


def read_run(row: Row) -> RunCase:
    """Return the workload, pool and plan of a row.

    Raises:
        UnreadableRow: a value is missing or unknown. `code` says which.
    """
    try:
        gpu = find_gpu(row["gpu"].strip())
    except SpecError:
        raise UnreadableRow("unknown-gpu") from None
    precision = next((name for name in PRECISIONS if name == row["precision"].strip().lower()), None)
    if precision is None:
        raise UnreadableRow("unknown-precision")
    if not gpu.supports(precision):
        raise UnreadableRow("precision-not-supported")
    try:
        model = with_sample_length(zoo.find_preset(row.get("model_name", "")), read_integer(row, "seq_len"))
    except SpecError:
        raise UnreadableRow("unknown-model") from None
    gpus = read_integer(row, "n_gpus")
    if not gpus:
        raise UnreadableRow("no-gpus")
    stated = read_partial_plan(row, model, gpus)
    batch = read_integer(row, "global_batch") or compute_global_batch(stated)
    if not batch:
        raise UnreadableRow("no-batch")
    framework = next((name for name in get_args(Framework) if name == row.get("framework", "").lower()), None)
    workload = Workload(
        model=model,
        sequence_length=read_sequence_length(row, model),
        global_batch=batch,
        precision=precision,
        optimizer=read_optimizer(row, model),
        execution="compiled" if row.get("compiled", "") in ("1", "1.0") else "eager",
        framework=framework,
        framework_version=read_version(row.get("framework_version", "")) if framework else None,
    )
    return RunCase(workload, _build_assumed_pool(row, gpu, gpus), gpus, stated)


def read_version(text: str) -> str | None:
    """Return the framework version in a cell. If the cell holds no version, return None."""
    try:
        parse_version(text.strip())
    except SpecError:
        return None
    return text.strip()


def with_sample_length(model: Model, length: int | None) -> Model:
    """Return the model for samples of `length`, if its input is a sequence (stored as an image of height 1).

    Other models are returned unchanged.
    """
    dims = model.dimensions
    return (
        model.with_dimensions(image_width=length) if length and isinstance(dims, Images) and dims.image == 1 else model
    )


def compute_global_batch(stated: Mapping[str, int | None]) -> int | None:
    """Return the global batch that a plan implies, as a product. If the plan lacks a factor, return None."""
    data, micro, repeats = stated["data"], stated["micro_batch"], stated["gradient_accumulation"]
    return data * micro * (repeats or 1) if data and micro else None


def read_sequence_length(row: Row, model: Model) -> int:
    """Return the tokens per sample. For models that read no tokens, return 1.

    Raises:
        UnreadableRow: the model reads tokens, and the row has no sequence length.
    """
    if model.trace is not None:
        return model.trace.sequence
    if not zoo.is_transformer(model) or isinstance(model.dimensions, Vision):
        return 1
    sequence = read_integer(row, "seq_len")
    if not sequence:
        raise UnreadableRow("no-sequence")
    return sequence


_OPTIMIZERS: tuple[tuple[str, Optimizer], ...] = (
    ("none", "none"), ("lamb", "lamb"), ("adafactor", "adafactor"), ("8bit", "adamw8bit"), ("8-bit", "adamw8bit"),
    ("muon", "muon"), ("adamw", "adamw"), ("adam", "adam"),
    ("rmsprop", "momentum"), ("sgd", "momentum"), ("momentum", "momentum"), ("nag", "momentum"),
    ("adagrad", "momentum"),
)  # fmt: skip
"""Words for optimizers and their meanings. The first match is used.

SGD has momentum, except for embedding tables. RMSprop and Adagrad store one moment too.
"""


def read_optimizer(row: Row, model: Model) -> Optimizer:
    """Return the optimizer that a row names. If it names none, return AdamW."""
    written = row.get("optimizer", "")
    if written == "sgd" and isinstance(model.dimensions, zoo.EmbeddingTables):
        return "sgd"
    return next((ours for word, ours in _OPTIMIZERS if word in written), "adamw")


def read_partial_plan(row: Row, model: Model, gpus: int) -> dict[str, int | None]:
    """Return the columns of `Plans` by name, with the value that a row gives. A missing value is None.

    Raises:
        UnreadableRow: the product of the parallelism degrees is not the number of GPUs.
    """
    degrees = {ours: read_integer(row, theirs) for theirs, ours in
               (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert"))}  # fmt: skip
    degrees["context"] = degrees["context"] or 1
    if zoo.has_row_shardable_weights(model):
        degrees["expert"] = None
    elif (row.get("family") or model.family) != "moe":
        degrees["expert"] = 1
    if degrees["data"] and degrees["tensor"] and degrees["pipeline"]:
        used = degrees["data"] * degrees["tensor"] * degrees["pipeline"] * (degrees["context"] or 1)
        if used != gpus:
            raise UnreadableRow("impossible-plan")
    checkpointing = row.get("activation_checkpointing", "")
    return {
        **degrees,
        "zero_stage": read_integer(row, "zero_stage"),
        "micro_batch": read_integer(row, "micro_batch_per_gpu"),
        "gradient_accumulation": read_integer(row, "grad_accum"),
        "checkpointing": encode_modules(checkpointing) if checkpointing in RECOMPUTED else None,
        "virtual_stages": 1,
        "expert_tensor": 1,
        "sequence_parallel": None,
    }


_USUAL_NETWORK = {
    "turing": "ethernet-50", "ada-lovelace": "ethernet-100", "volta": "infiniband-edr-4x100",
    "ampere": "infiniband-hdr-8x200", "hopper": "infiniband-ndr-8x400", "blackwell": "infiniband-ndr-8x400",
    "v100-sxm3": "infiniband-edr-8x100", "v100-sxm3-450w": "infiniband-edr-8x100", "gb200": "infiniband-ndr-4x400",
    "h100-64": "infiniband-hdr-4x200",
    "b300": "infiniband-xdr-8x800", "gb300": "infiniband-xdr-4x800",
}  # fmt: skip
"""Usual network of a training cluster, by GPU for GPUs with their own platform, otherwise by architecture."""


def find_usual_network(gpu: Gpu) -> str:
    """Return the name of the network link that usually connects nodes with this GPU."""
    return _USUAL_NETWORK.get(gpu.sibling or gpu.name) or _USUAL_NETWORK.get(gpu.architecture, "ethernet-100")


def _build_assumed_pool(row: Row, gpu: Gpu, gpus: int) -> Pool:
    per_node = min(read_integer(row, "gpus_per_node") or 8, gpus)
    links = find_link(gpu.intra_link), find_link(find_usual_network(gpu))
    return Pool(gpu.name, gpu, per_node, -(-gpus // per_node), *links)
