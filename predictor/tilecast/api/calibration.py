"""Documents for calibration: measured runs and corrections, in a GPUPool's status or in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from pydantic import Field

from tilecast import untrusted
from tilecast.api.base import ApiModel, StatusModel, list_field, optional_field, validate_model
from tilecast.api.documents import MAX_JSON_BYTES
from tilecast.api.fields import as_mapping, value_at_path
from tilecast.hardware import Pool
from tilecast.learning.calibration import GPU_RANGES, Calibration, Correction, GroupKey, Run
from tilecast.learning.job_calibration import NO_PARTS, MeasuredParts
from tilecast.spec import Precision, SpecError

MAX_RUNS = 64
"""Most runs of one namespace on a pool that are kept. The newest are kept."""
MAX_CORRECTIONS = 32
_PRECISIONS = "|".join(get_args(Precision))
_SCALES = "|".join(name for _, name in GPU_RANGES)


class RunRecord(StatusModel):
    """A job that ran on the pool, with the uncorrected forecast of its plan and the measured step."""

    uid: str = Field(min_length=1, max_length=64, description="UID of the job.")
    precision: str = Field(pattern=f"^({_PRECISIONS})$", max_length=8, description="Precision it was trained in.")
    family: str = Field(min_length=1, max_length=32, description="Model family.")
    scale: str = Field(pattern=f"^({_SCALES})$", max_length=8, description="Range of its GPU count.")
    workload: str = Field(min_length=1, max_length=16, description="Digest of the workload.")
    predicted_seconds: float = Field(gt=0, le=1e9, description="Raw forecast of its step.")
    observed_seconds: float = Field(gt=0, le=1e9, description="Median of its measured steps.")
    observations: int = Field(ge=1, le=10**9, description="Reports that the median is of.")
    framework: str = Field(default="", max_length=32, description="Framework that it trained with; none names none.")
    time: str = Field(max_length=32, description="When the last of them arrived, RFC 3339.")


class CorrectionRecord(StatusModel):
    """A correction of forecasts that was learnt from a group of runs."""

    precision: str | None = optional_field("Precision; absent stands for all.", max_length=8)
    family: str | None = optional_field("Model family; absent stands for all.", max_length=32)
    scale: str | None = optional_field("Range of GPU counts; absent stands for all.", max_length=8)
    ratio: float = Field(gt=0, description="What raw forecasts of the group are multiplied by.")
    range_factor: float = Field(gt=0, description="What the half-width of their range is multiplied by.")
    runs: int = Field(ge=0, description="Runs of the group.")
    observations: int = Field(ge=0, description="Reports of those runs.")


class PoolCalibration(StatusModel):
    """Corrections that the cluster's runs give, for jobs of namespaces without runs of their own."""

    corrections: list[CorrectionRecord] = list_field(
        "Corrections that hold on this pool now.", max_length=MAX_CORRECTIONS
    )
    runs: list[RunRecord] = list_field(
        "Deprecated and no longer written: a PoolLearning keeps runs, with who measured them.", max_length=MAX_RUNS
    )


class PoolError(StatusModel):
    """Error of the forecasts for the pool's runs, as (predicted - observed) / observed."""

    raw_ratio: float | None = optional_field("Median signed relative error of the raw forecasts.")
    calibrated_ratio: float | None = optional_field(
        "The same of forecasts corrected by all runs but the one that is forecast."
    )


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """A run with its job and the time and origin of its newest report."""

    uid: str
    time: str
    run: Run
    job: str = ""
    """Name of the job."""
    account: str = ""
    """Service account of the newest report, if it had a token."""
    source: str = ""
    namespace_uid: str = ""
    gpus: int | None = None
    plan: str | None = None
    """How the job was split, in the format of tables."""
    parts: MeasuredParts = NO_PARTS
    """Seconds of the step's parts, as far as they were reported."""


def run_from_record(pool: str, gpu: str, record: RunRecord, namespace: str = "") -> Run:
    """Return the run that a record of a pool's status describes."""
    return Run(
        pool, gpu, record.precision, record.family, record.scale, record.workload,
        record.predicted_seconds, record.observed_seconds, record.observations, record.framework, namespace,
    )  # fmt: skip


def read_pool_runs(pool: str, gpu: str, status: Mapping[str, Any]) -> list[ObservedRun]:
    """Return the runs in a GPUPool's status, in the order of the status (oldest first).

    Releases without the PoolLearning resource stored runs in the status. They did not store the job and user that
    reported a run.
    """
    records = RunRecord.parse_valid_items(value_at_path(status, ("calibration", "runs")))
    return [ObservedRun(one.uid, one.time, run_from_record(pool, gpu, one)) for one in records]


def read_runs(gpupools: Iterable[Mapping[str, Any]], pools: Iterable[Pool]) -> list[ObservedRun]:
    """Return all runs in the statuses of GPUPools, oldest first. GPUPools that are not in `pools` are ignored."""
    gpus = {pool.name: pool.gpu.name for pool in pools}
    runs: list[ObservedRun] = []
    for document in gpupools:
        name = value_at_path(document, ("metadata", "name"))
        if isinstance(name, str) and name in gpus:
            runs += read_pool_runs(name, gpus[name], as_mapping(document.get("status")))
    return sorted(runs, key=lambda item: (item.time, item.uid))


def build_correction_records(table: Calibration, gpu: str) -> list[CorrectionRecord]:
    """Return the corrections for a GPU as records, the coarsest groups of runs first.

    Groups of a single workload are left out.
    """
    chosen: Sequence[Correction] = [
        item for item in table.corrections if item.group[:1] == (gpu,) and len(item.group) < _WORKLOAD
    ]
    names = ("precision", "family", "scale")
    return [
        CorrectionRecord.from_truncated_values(
            **dict(zip(names, item.group[1:], strict=False)),
            ratio=item.ratio,
            range_factor=item.width,
            runs=item.own,
            observations=item.observations,
        )
        for item in sorted(chosen, key=lambda item: (len(item.group), item.group))[:MAX_CORRECTIONS]
    ]


def read_corrections(gpupools: Iterable[Mapping[str, Any]], pools: Iterable[Pool]) -> Calibration:
    """Return a calibration with the corrections in the statuses of GPUPools. GPUPools not in `pools` are ignored.

    This is for users who may not read PoolLearnings, which contain the measured runs.
    """
    gpus = {pool.name: pool.gpu.name for pool in pools}
    shown: dict[GroupKey, Correction] = {}
    for document in gpupools:
        gpu = gpus.get(str(value_at_path(document, ("metadata", "name"))))
        rows = value_at_path(document, ("status", "calibration", "corrections"))
        for one in CorrectionRecord.parse_valid_items(rows) if gpu else []:
            parts = tuple(part for part in (gpu, one.precision, one.family, one.scale) if part)
            shown[parts] = Correction(parts, one.ratio, one.range_factor, one.runs, one.runs, one.observations)
    total = max((item.runs for item in shown.values()), default=0)
    return Calibration(tuple(replace(item, runs=total) for item in shown.values()))


_WORKLOAD = 5


def format_calibration(table: Calibration) -> str:
    """Return a calibration as JSON text that `parse_calibration` can read."""
    parts = {"corrections": table.corrections, "software": table.software}
    return json.dumps({name: [asdict(item) for item in part] for name, part in parts.items()}, indent=1) + "\n"


class _CorrectionRow(ApiModel):
    group: list[str] = Field(max_length=_WORKLOAD)
    ratio: float = Field(gt=0.01, lt=100)
    width: float = Field(gt=0.01, lt=100)
    runs: int = Field(ge=0)
    own: int = Field(ge=0)
    observations: int = Field(ge=0)


class _CalibrationFile(ApiModel):
    corrections: list[_CorrectionRow]
    software: list[_CorrectionRow] = Field(default_factory=list)


def parse_calibration(text: str, name: str) -> Calibration:
    """Return the calibration in JSON text from `format_calibration`. Errors call the text `name`.

    Raises:
        SpecError: the text is not a calibration.
    """
    try:
        document = untrusted.parse_json(text, max_bytes=MAX_JSON_BYTES)
    except ValueError:
        document = None
    if not isinstance(document, Mapping):
        raise SpecError(name, "is no calibration", "give a file that `tilecast calibrate RUNS.csv -o FILE` wrote")
    file = validate_model(_CalibrationFile, document, name)
    return Calibration(_parse_corrections(file.corrections), _parse_corrections(file.software))


def _parse_corrections(rows: Sequence[_CorrectionRow]) -> tuple[Correction, ...]:
    return tuple(
        Correction(tuple(row.group), row.ratio, row.width, row.runs, row.own, row.observations) for row in rows
    )
