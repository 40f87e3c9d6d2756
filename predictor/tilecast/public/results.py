"""Results of the Python API, which print as the tables of the command line.

Every result has `rows` (dictionaries, as pandas and polars accept them) and shows as a table in a notebook. Most have
`to_dict()`, which returns the command line's JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tilecast import advice as core
from tilecast import diagnose as diagnosing
from tilecast import explain as explaining
from tilecast.advice.what_if.alternatives import find_plan_with_spare_memory
from tilecast.api.advice import AdviceDocument
from tilecast.api.status import Recommendation
from tilecast.planner.problem import UnplannedJob
from tilecast.render import launch as launched
from tilecast.render import queue as queue_screen
from tilecast.render import sweep as sweep_screen
from tilecast.render.columns import align_columns
from tilecast.render.dialects import write_dialect
from tilecast.render.launch.setting import list_launch_settings
from tilecast.render.queue import QueueScreen
from tilecast.render.rows import format_properties, rows_html, rows_table
from tilecast.render.table import advice_headline, describe_priced
from tilecast.render.table import advice_text as advice_table
from tilecast.render.units import GIB, format_duration, format_gibibyte_range, format_gibibytes
from tilecast.spec import SpecError
from tilecast.sweeps import FIELDS, SweepRow

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Forecast(core.Offer):
    """The forecast of one plan on one pool, in seconds and bytes.

    The range of a step is a 90 % interval. It contained 90 % of the measured steps of published runs.
    """

    @classmethod
    def from_offer(cls, offer: core.Offer) -> Forecast:
        """Return the forecast with the fields of an offer."""
        return cls(*_field_values(offer))

    def __str__(self) -> str:
        """Return the forecast as text, with one value per line."""
        return "\n".join(format_properties(self.rows[0]))

    def _repr_html_(self) -> str:
        return rows_html(self.rows)

    @property
    def rows(self) -> Rows:
        """A list with one dictionary that has every scalar value of the forecast."""
        return [_build_offer_row(self, True)]

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast in the format of `status.recommendation` in a TrainingJob."""
        return Recommendation.from_offer(self).document()

    def explain(self) -> explaining.Explanation:
        """Return details of the forecast: operators, roofline, communication and memory."""
        return explaining.explain_plan(self.workload, self.plan, self.pool, self.step_s)

    def diagnose(self, step_seconds: float) -> diagnosing.Diagnosis:
        """Return a diagnosis of a measured step, which names the part of the forecast that is most probably wrong.

        Args:
            step_seconds: the measured step, in seconds.

        Raises:
            SpecError: `step_seconds` is not a valid duration.
        """
        if not 0 < step_seconds < 1e9:
            raise SpecError("step_seconds", f"{step_seconds:g} is no step time", "give seconds, more than 0")
        return diagnosing.diagnose_step(self.workload, self.plan, self.pool, step_seconds)


@dataclass(frozen=True, slots=True)
class Advice(core.Advice):
    """The advice for one job: the best plan of each pool, ordered from best to worst, with reasons."""

    offers: tuple[Forecast, ...]

    @classmethod
    def from_advice(cls, advice: core.Advice) -> Advice:
        """Return the API's advice with the fields of the predictor's advice."""
        return replace(cls(*_field_values(advice)), offers=tuple(map(Forecast.from_offer, advice.offers)))

    @property
    def best(self) -> Forecast | None:
        """The recommended plan, or None if no pool can run the job."""
        return self.offers[0] if self.offers else None

    def __str__(self) -> str:
        """Return the table that `tilecast advise` prints."""
        return advice_table(self).rstrip("\n")

    def _repr_html_(self) -> str:
        return rows_html(self.rows, advice_headline(self), self.notes)

    @property
    def rows(self) -> Rows:
        """One dictionary for each pool: plans from best to worst, then pools that cannot run the job."""
        accepted = [_build_offer_row(offer, offer is self.best) for offer in self.offers]
        names = list(accepted[0]) if accepted else ["pool", "best", "reason"]
        rejected = [
            dict.fromkeys(names) | {"pool": item.pool, "best": False, "reason": f"{item.message}: {item.remedy}"}
            for item in self.rejections
        ]
        return [*accepted, *rejected]

    def to_dict(self) -> dict[str, Any]:
        """Return the advice in the format of `tilecast advise -o json`."""
        return AdviceDocument.from_advice(self).document()

    def launch(self, launcher: str) -> str:
        """Return text with the command, files and script lines that run the recommended plan.

        Args:
            launcher: a name from `tilecast.launchers()`.

        Raises:
            SpecError: there is no recommended plan, or the launcher cannot run it.
        """
        if self.best is None:
            raise SpecError("launch", "nothing is recommended", "see rejections")
        setting, safer = list_launch_settings(self, self.best)
        return launched.launch_text(launcher, setting, safer, is_stated=self.request.plan is not None)

    def write_dialect(self, dialect: str) -> str:
        """Return the ranked pools in a scheduler's format, as `tilecast advise -o DIALECT` prints them.

        Args:
            dialect: `dra`, `kueue`, `karpenter`, `ray`, `skypilot` or `slurm`.

        Raises:
            SpecError: there is no such dialect.
        """
        return write_dialect(dialect, self)


@dataclass(frozen=True, slots=True)
class PoolFit:
    """Whether a job fits into the GPU memory of one pool. Bytes are those of the GPU that needs most memory."""

    pool: str
    fits: bool
    """Whether the bytes that the plan needs at least fit."""
    is_tight: bool
    """Whether the upper end of the memory range exceeds the GPU's memory."""
    plan: str
    """The plan asked about, or the best plan on the fewest GPUs, or the plan that comes nearest to fitting."""
    gpus: int | None
    """GPUs of the plan. None if it does not fit."""
    memory_bytes: float | None
    memory_upper_bytes: float | None
    available_bytes: float | None
    remedy: str
    """The smallest change that would make the job fit. Empty if it fits."""
    memory: Mapping[str, float] | None = None
    """Bytes by purpose. None if no plan was tried."""
    step_seconds: float | None = None
    """Seconds of a step of the plan. None if it does not fit."""
    cost_per_1000_steps: float | None = None
    currency: str = "USD"
    remedy_step_seconds: float | None = None
    """Seconds of a step after the remedy. None if that was not priced."""
    remedy_cost_per_1000_steps: float | None = None
    roomy_gpus: int | None = None
    """Fewest GPUs on which a plan has memory to spare, if this plan is tight."""
    roomy_plan: str = ""
    roomy_step_seconds: float | None = None

    @classmethod
    def from_offer(cls, offer: core.Offer, roomy: core.Offer | None) -> PoolFit:
        """Return the result for a plan that fits.

        If the plan is tight, `roomy` is a plan that has memory to spare.
        """
        if roomy is not None and roomy.gpus <= offer.gpus:
            offer, roomy = roomy, None
        return cls(
            pool=offer.pool.name,
            fits=True,
            is_tight=offer.is_tight,
            plan=str(offer.plan),
            gpus=offer.gpus,
            memory_bytes=offer.memory_bytes,
            memory_upper_bytes=offer.memory_upper_bytes,
            available_bytes=offer.memory_available_bytes,
            remedy="",
            memory=offer.memory,
            step_seconds=offer.step_s,
            cost_per_1000_steps=offer.cost_per_1000_steps,
            currency=offer.pool.currency,
            roomy_gpus=None if roomy is None else roomy.gpus,
            roomy_plan="" if roomy is None else str(roomy.plan),
            roomy_step_seconds=None if roomy is None else roomy.step_s,
        )

    @classmethod
    def from_rejection(cls, rejection: core.Rejection) -> PoolFit:
        """Return the result for a pool that cannot run the job."""
        change = rejection.change
        is_known = rejection.code == "OutOfMemory"
        return cls(
            pool=rejection.pool,
            fits=False,
            is_tight=False,
            plan="" if rejection.plan is None else str(rejection.plan),
            gpus=None,
            memory_bytes=rejection.memory_bytes,
            memory_upper_bytes=None,
            available_bytes=rejection.memory_available_bytes,
            remedy=rejection.remedy if is_known else f"{rejection.message}: {rejection.remedy}",
            memory=rejection.memory,
            currency="USD" if change is None else change.currency,
            remedy_step_seconds=None if change is None else change.step_s,
            remedy_cost_per_1000_steps=None if change is None else change.cost_per_1000_steps,
        )

    def describe_remedy(self) -> str:
        """Return the remedy as text, with the step time and the price of the plan that becomes possible."""
        return describe_priced(self.remedy, self.remedy_step_seconds, self.remedy_cost_per_1000_steps, self.currency)


_BILL = ("parameters", "gradients", "optimizer", "activations")
"""Purposes of memory with a column of their own in the table of `Fits`. The others are summed."""


@dataclass(frozen=True, slots=True)
class Fits:
    """Whether a job fits into memory, for each pool. The value is true if the job fits on any pool."""

    pools: tuple[PoolFit, ...]

    @classmethod
    def from_advice(cls, advice: core.Advice) -> Fits:
        """Return the result for every pool: from its plan in the predictor's advice, or from its rejection."""
        is_free = advice.request.plan is None
        pools = [
            PoolFit.from_offer(
                offer, find_plan_with_spare_memory(advice.request, offer.pool) if offer.is_tight and is_free else None
            )
            for offer in advice.offers
        ]
        return cls((*pools, *map(PoolFit.from_rejection, advice.rejections)))

    def __bool__(self) -> bool:
        """Return whether the job fits into the memory of any pool."""
        return any(one.fits for one in self.pools)

    def __str__(self) -> str:
        """Return a text table with one line for each pool, and a line for each remedy."""
        titles = ("POOL", "FITS", "GPUS", "PLAN", "GiB/GPU", "OF", *map(str.upper, _BILL), "OTHER", "STEP")
        rows = [
            (*_list_fit_cells(one), *_list_memory_cells(one.memory), format_duration(one.step_seconds))
            for one in self.pools
        ]
        lines = align_columns(titles, rows, tuple(title for title in titles if title not in ("POOL", "FITS", "PLAN")))
        more = [
            f"{one.pool}: memory to spare from {one.roomy_gpus} GPUs, {one.roomy_plan}, "
            f"{format_duration(one.roomy_step_seconds)} a step"
            for one in self.pools
            if one.roomy_gpus is not None
        ]
        more += [
            f"{one.pool} would fit with {one.describe_remedy()}" for one in self.pools if one.memory and one.remedy
        ]
        more += [f"{one.pool}: {one.describe_remedy()}" for one in self.pools if one.remedy and not one.memory]
        return "\n".join([*lines, *(["", *more] if more else [])])

    def _repr_html_(self) -> str:
        return rows_html(self.rows)

    @property
    def rows(self) -> Rows:
        """One dictionary for each pool, with the fields of `PoolFit`."""
        return [asdict(one) for one in self.pools]

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary with `fits` (a boolean) and `pools` (the rows)."""
        return {"fits": bool(self), "pools": self.rows}


@dataclass(frozen=True, slots=True)
class Sweep:
    """The advice for each of several values of one input."""

    field: str
    unit: str
    values: tuple[SweepRow, ...]

    @classmethod
    def from_rows(cls, field: str, values: Sequence[SweepRow]) -> Sweep:
        """Return the sweep of an input `field`, given the row of advice for each value."""
        return cls(field, FIELDS[field].unit if field in FIELDS else "", tuple(values))

    def __str__(self) -> str:
        """Return the table that `tilecast sweep` prints."""
        return sweep_screen.sweep_text(self.field, self.unit, self.values).rstrip("\n")

    def _repr_html_(self) -> str:
        return rows_html(self.rows, self.field)

    @property
    def rows(self) -> Rows:
        """One dictionary for each pair of a value and a pool."""
        return [
            {"value": row.value, **_build_offer_row(offer, offer is row.best)}
            for row in self.values
            for offer in row.advice.offers
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the sweep in the format of `tilecast sweep -o json`."""
        return sweep_screen.sweep_document(self.field, self.unit, self.values)


@dataclass(frozen=True, slots=True)
class Queue:
    """The plan of a queue, with the jobs that could not be planned."""

    plan: QueueScreen | None
    """The plan. None if no job can be planned."""
    unplanned: tuple[UnplannedJob, ...]
    """Jobs without a place, and why."""
    empty: queue_screen.EmptyQueue | None = None
    """The refused jobs and the pools, if no job can be planned."""

    @classmethod
    def from_plan(cls, planned: QueueScreen | queue_screen.EmptyQueue) -> Queue:
        """Return the result for a plan, or for the refused jobs if there is no plan."""
        if isinstance(planned, QueueScreen):
            return cls(planned, planned.unplanned)
        return cls(None, planned.unplanned, planned)

    def __str__(self) -> str:
        """Return the table that `tilecast queue` prints."""
        if self.plan is None:
            empty = self.empty or queue_screen.EmptyQueue(self.unplanned)
            return queue_screen.empty_queue_text(empty, "table").rstrip("\n")
        return queue_screen.queue_text(self.plan).rstrip("\n")

    def _repr_html_(self) -> str:
        return rows_html(self.rows)

    @property
    def rows(self) -> Rows:
        """One dictionary for each planned job."""
        return [] if self.plan is None else queue_screen.job_rows(self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in the format of `tilecast queue -o json`."""
        if self.plan is None:
            return queue_screen.empty_queue_document(self.empty or queue_screen.EmptyQueue(self.unplanned))
        return queue_screen.queue_document(self.plan)


class Table(tuple[Mapping[str, Any], ...]):
    """The rows of a catalogue of GPUs, models or links. Each row is a dictionary."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return the rows as a text table."""
        return "\n".join(rows_table(self))

    def _repr_html_(self) -> str:
        return rows_html(self)

    @property
    def rows(self) -> Rows:
        """The rows as a list of plain dictionaries."""
        return [dict(row) for row in self]


def _list_fit_cells(fit: PoolFit) -> tuple[str, ...]:
    """Return the table cells of a pool: its name, verdict, GPUs, plan, needed memory and usable memory."""
    verdict = "tight" if fit.is_tight else "fits" if fit.fits else "no"
    upper = fit.memory_upper_bytes
    needed = "" if fit.memory_bytes is None else format_gibibyte_range(fit.memory_bytes, upper or fit.memory_bytes)
    usable = "" if fit.available_bytes is None else format_gibibytes(fit.available_bytes)
    return fit.pool, verdict, "" if fit.gpus is None else str(fit.gpus), fit.plan, needed, usable


def _list_memory_cells(memory: Mapping[str, float] | None) -> tuple[str, ...]:
    """Return the GiB of each purpose in `_BILL`, and the GiB of all other purposes together, as table cells."""
    if memory is None:
        return ("",) * (len(_BILL) + 1)
    sizes = [memory.get(name, 0.0) for name in _BILL]
    return tuple(f"{size / GIB:.1f}" for size in (*sizes, sum(memory.values()) - sum(sizes)))


def _build_offer_row(offer: core.Offer, is_best: bool) -> dict[str, Any]:
    return {
        "pool": offer.pool.name,
        "best": is_best,
        "gpus": offer.gpus,
        "nodes": offer.nodes,
        "plan": str(offer.plan),
        "precision": offer.workload.precision,
        "global_batch": offer.workload.global_batch,
        "step_seconds": offer.step_s,
        "lower_seconds": offer.lower_s,
        "upper_seconds": offer.upper_s,
        "tokens_per_second": offer.tokens_per_s,
        "tokens_per_second_per_gpu": offer.tokens_per_s_and_gpu,
        "mfu": offer.mfu,
        "finish_seconds": offer.finish_s,
        "cost_per_1000_steps": offer.cost_per_1000_steps,
        "cost_to_finish": offer.cost_to_finish,
        "currency": offer.pool.currency,
        "memory_bytes": offer.memory_bytes,
        "memory_upper_bytes": offer.memory_upper_bytes,
        "memory_available_bytes": offer.memory_available_bytes,
        "bottleneck": offer.bottleneck,
        "reason": offer.reason,
    }


def _field_values(record: core.Offer | core.Advice) -> Iterator[Any]:
    """Yield the values of a record's fields in order, as arguments for the constructor of its subclass."""
    return (getattr(record, item.name) for item in fields(record))
