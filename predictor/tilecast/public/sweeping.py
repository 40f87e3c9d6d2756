"""Compute the advice for several values of one input, which is a number of the job or of the pools."""

from __future__ import annotations

from collections.abc import Sequence

from tilecast.advice import advise
from tilecast.api.training_job import TrainingJobSpec
from tilecast.hardware import Pool
from tilecast.inputs import job as job_inputs
from tilecast.inputs import pools as pool_inputs
from tilecast.inputs.job import JobInput
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.pools import PoolOptions
from tilecast.inputs.tracking import Track, iterate_without_progress
from tilecast.spec import SpecError
from tilecast.sweeps import FIELDS, SweepRange, SweepRow, SweepValue, vary_pools


def run_sweep(
    job: JobOptions, pools: PoolOptions, over: SweepRange, track: Track = iterate_without_progress
) -> list[SweepRow]:
    """Return a row of advice for each value of the range `over`.

    Raises:
        SpecError: the job, the pools, the field or a value is invalid.
    """
    base_job, base_pools = job_inputs.read_job(job), pool_inputs.read_pools(pools)
    try:
        return [_compute_sweep_row(base_job, base_pools, over, value) for value in track(over.values, over.field)]
    except SpecError as error:
        raise base_job.name_flag_in_error(error) from None


def _compute_sweep_row(job: JobInput, pools: Sequence[Pool], over: SweepRange, value: SweepValue) -> SweepRow:
    text = f"x{value.number:g}" if value.is_factor else f"{value.number:g}"
    if over.varies_pools:
        return SweepRow(value.number, text, advise(job.request(), vary_pools(pools, over.field, value)))
    path = over.field.split(".")
    if path[0] not in {str(item.alias) for item in TrainingJobSpec.model_fields.values()}:
        remedy = f"write {', '.join(FIELDS)}, or a number of a job's spec, as training.globalBatchSize"
        raise SpecError("--over", f"{over.field!r} is no number that is known", remedy)
    number = value.resolve(job.number(path), "--over")
    whole = int(number) if number == int(number) else number
    return SweepRow(number, text, advise(job.with_field(path, whole, "--over").request(), pools))
