"""Parse measured steps in the syntax of `--measured` and of the end of `--baseline`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from tilecast import untrusted
from tilecast.advice.measured import Measurement
from tilecast.api.base import ApiModel, optional_field, validate_model
from tilecast.api.parts import PartSeconds
from tilecast.hardware import Pool, find_gpu
from tilecast.inputs import reading
from tilecast.inputs.gpu_list import build_assumed_pool
from tilecast.learning.job_calibration import NO_PARTS, MeasuredParts
from tilecast.spec import PartialPlan, SpecError

if TYPE_CHECKING:
    from tilecast.logs import LoggedRun

_STEP = re.compile(r"(\d{1,9}(?:\.\d{0,9})?(?:e-?\d{1,2})?) *(ms|s|min|)", re.ASCII)
_UNITS: Mapping[str, float] = {"ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0}
_REMEDY = "write for instance a100-80:8=1.9s, a100-80:8/tp=2,dp=4=450ms, or a100-80:8=@train.log"


class MeasuredStep(PartSeconds):
    """One entry of a file of measured steps. The fields are those of a report of `tilecast_observe`."""

    pool: str = Field(min_length=1, max_length=63, description="Pool or GPU that the job ran on.")
    gpus: int = Field(ge=1, le=10**6, description="GPUs that it ran on.")
    plan: str | None = optional_field("Its plan, as tables print it.", max_length=128)
    step_seconds: float = Field(gt=0, lt=1e9, description="The step as measured.")


class _RunsFile(ApiModel):
    runs: list[MeasuredStep] = Field(min_length=1, max_length=64)


@dataclass(frozen=True, slots=True)
class UnresolvedRun:
    """A measured step as a user wrote it, with the name of its pool or GPU."""

    pool: str
    gpus: int
    plan: PartialPlan | None
    seconds: float
    parts: MeasuredParts = NO_PARTS
    field: str = "--measured"


def parse_measurements(texts: Sequence[str], *, has_offer: bool = False) -> tuple[float | None, list[UnresolvedRun]]:
    """Parse the values of `--measured`. Return the seconds of a value without a pool, and the runs that name a pool.

    The seconds are None unless the only value names no pool.

    A log may replace the seconds: `@train.log`, `a100-80=@train.log` or `a100-80:8=@train.log`. If the text leaves out
    the number of GPUs or the plan, they are taken from the log.

    Args:
        texts: the values.
        has_offer: whether there is a baseline or a plan that a log without a pool can belong to. Otherwise a log that
            names its GPUs is a run on them.

    Raises:
        SpecError: a value cannot be parsed, or a file does not contain measured steps.
    """
    seconds: float | None = None
    lines: list[UnresolvedRun] = []
    for text in texts:
        if text.startswith("@") and (log := _read_log_without_pool(text[1:])) is not None:
            if log.gpu is not None and log.gpus is not None and not (has_offer and len(texts) == 1):
                lines.append(UnresolvedRun(log.gpu, log.gpus, log.plan, log.seconds, field=text[1:]))
            elif len(texts) == 1:
                seconds = log.seconds
            else:
                raise SpecError(text[1:], "does not say its GPUs", f"write POOL:N={text[:80]}")
        elif text.startswith("@"):
            lines += _read_runs_file(text[1:])
        elif "=" in text:
            lines.append(_parse_run(text, "--measured"))
        elif seconds is None and len(texts) == 1:
            seconds = _parse_seconds(text)
        else:
            raise SpecError("--measured", f"{text[:40]!r} names no pool beside another measurement", _REMEDY)
    return seconds, lines


def split_baseline(text: str) -> tuple[str, list[UnresolvedRun]]:
    """Split `POOL:N[:PLAN]=STEP` at the last equals sign into the baseline and a list with the measured run.

    If the text has no step, the list is empty.
    """
    head, equals, step = text.rpartition("=")
    if not equals or _STEP.fullmatch(step.strip()) is None or (head.count(":") == 2 and _ends_in_plan_key(head)):
        return text, []
    where, _, plan = head.partition(":")[2].partition(":")
    line = _parse_run(f"{head.partition(':')[0]}:{where}{'/' if plan else ''}{plan}={step}", "--baseline")
    return head, [line]


def _ends_in_plan_key(head: str) -> bool:
    """Return whether a text ends in a key of a plan, such as `dp`. Then a degree follows, not a step."""
    return re.search(r"[:,][a-z]+$", head) is not None


def _parse_seconds(text: str) -> float:
    if match := _STEP.fullmatch(text.strip()):
        return float(match[1]) * _UNITS[match[2]]
    try:
        return float(text)
    except ValueError:
        raise SpecError("--measured", f"cannot read {text[:40]!r}", _REMEDY) from None


def _parse_run(text: str, field: str) -> UnresolvedRun:
    head, _, step = text.rpartition("=")
    if step.startswith("@"):
        return _read_logged_run(head, step[1:], field)
    if match := _STEP.fullmatch(step.strip()):
        seconds = float(match[1]) * _UNITS[match[2]]
    else:
        raise SpecError(field, f"{step[:40]!r} is no step time", _REMEDY)
    where, _, plan = head.partition("/")
    pool, gpus = reading.parse_name_and_count(field, where)
    return UnresolvedRun(pool, gpus, PartialPlan.parse(plan, field) if plan else None, seconds, field=field)


def _read_logged_run(head: str, name: str, field: str) -> UnresolvedRun:
    """Return the run of a log. `POOL[:N][/PLAN]` takes precedence over what the log says.

    Raises:
        SpecError: the log cannot be read, the number of GPUs is unknown, or text and log contradict each other.
    """
    from tilecast.logs import read_log

    log = read_log(name)
    where, _, plan = head.partition("/")
    if ":" in where:
        pool, gpus = reading.parse_name_and_count(field, where)
        if log.gpus not in (None, gpus):
            raise SpecError(field, f"{name} says that it ran on {log.gpus} GPUs, not {gpus}", "correct the number")
    elif log.gpus is None:
        raise SpecError(field, f"{name} does not say its number of GPUs", f"write {where[:63]}:N=@{name}")
    else:
        pool, gpus = where.strip(), log.gpus
    own = PartialPlan.parse(plan, field) if plan else log.plan
    return UnresolvedRun(pool, gpus, own, log.seconds, field=field)


def _read_log_without_pool(name: str) -> LoggedRun | None:
    """Return the run in a log. Return None if `name` is a JSON file of runs."""
    if not name or (name.endswith(".json") and not name.endswith("trainer_state.json")):
        return None
    from tilecast.logs import read_log

    return read_log(name)


def _read_runs_file(name: str) -> list[UnresolvedRun]:
    if not name:
        raise SpecError("--measured", "@ names no file", "write @FILE.json")
    try:
        document: Any = untrusted.parse_json(reading.read_text(name))
    except ValueError:
        raise SpecError(
            name, "is no JSON", 'give {"runs": [{"pool": "a100-80", "gpus": 8, "stepSeconds": 1.9}]}'
        ) from None
    runs = validate_model(_RunsFile, document if isinstance(document, Mapping) else {"runs": document}, name).runs
    return [
        UnresolvedRun(
            one.pool,
            one.gpus,
            PartialPlan.parse(one.plan, f"{name}: plan") if one.plan else None,
            one.step_seconds,
            one.parts,
            name,
        )
        for one in runs
    ]


def find_measured_pools(runs: Sequence[UnresolvedRun], pools: Sequence[Pool]) -> list[Measurement]:
    """Return the runs with their pools. A run's name is a pool's name, or else a GPU in nodes of its usual size.

    Raises:
        SpecError: a run names neither a pool nor a known GPU.
    """
    named = {pool.name: pool for pool in pools}
    measurements = []
    for run in runs:
        pool = named.get(run.pool) or build_pool_for_run(run.pool, run.gpus, run.field)
        measurements.append(Measurement(pool, run.gpus, run.seconds, run.plan, run.parts, run.field))
    return measurements


def build_pool_for_run(name: str, gpus: int, field: str) -> Pool:
    """Return a pool of `gpus` GPUs, in nodes of the GPU's usual size. Errors name `field`.

    Raises:
        SpecError: no GPU has the name, or the GPUs do not fill whole nodes.
    """
    try:
        gpu = find_gpu(name)
    except SpecError as error:
        raise SpecError(field, f"there is no pool or GPU {name!r}", error.remedy) from None
    try:
        return replace(build_assumed_pool(gpu, gpus), name=name)
    except SpecError as error:
        raise error.at(field) from None
