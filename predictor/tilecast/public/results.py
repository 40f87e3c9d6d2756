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
from tilecast.api.advice import AdviceDocument
from tilecast.api.status import Recommendation
from tilecast.planner.problem import UnplannedJob
from tilecast.render import launch as launched
from tilecast.render import queue as queue_screen
from tilecast.render import sweep as sweep_screen
from tilecast.render.columns import align_columns
from tilecast.render.queue import QueueScreen
from tilecast.render.rows import format_properties, rows_html, rows_table
from tilecast.render.table import advice_headline
from tilecast.render.table import advice_text as advice_table
from tilecast.render.units import format_gibibytes
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
        """A list of one dictionary, which has every scalar value of the forecast."""
        return [_offer_row(self, True)]

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
        accepted = [_offer_row(offer, offer is self.best) for offer in self.offers]
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
        return launched.launch_text(launcher, launched.LaunchSetting.from_offer(self.request.name, self.best))


@dataclass(frozen=True, slots=True)
class PoolFit:
    """The answer whether a job fits into one pool's GPU memory. Bytes are those of the fullest GPU."""

    pool: str
    fits: bool
    """Whether what the plan cannot do without fits."""
    is_tight: bool
    """Whether the upper end of the range does not fit."""
    plan: str
    """The plan that was asked about, the best one on the fewest GPUs, or the one that is nearest to fitting."""
    gpus: int | None
    """GPUs of the plan; None where it does not fit."""
    memory_bytes: float | None
    memory_upper_bytes: float | None
    available_bytes: float | None
    remedy: str
    """The nearest change that would make it fit; empty where it does."""


@dataclass(frozen=True, slots=True)
class Fits:
    """The answer whether a job fits into memory, for each pool. It is truthy if the job fits on any pool."""

    pools: tuple[PoolFit, ...]

    @classmethod
    def from_advice(cls, advice: core.Advice) -> Fits:
        """Return the memory needs of each pool's plan or rejection in the predictor's advice."""
        pools = []
        for offer in advice.offers:
            sizes = (offer.memory_bytes, offer.memory_upper_bytes, offer.memory_available_bytes)
            pools.append(PoolFit(offer.pool.name, True, offer.is_tight, str(offer.plan), offer.gpus, *sizes, ""))
        for item in advice.rejections:
            needed = (item.memory_bytes, None, item.memory_available_bytes)
            plan = "" if item.plan is None else str(item.plan)
            remedy = item.remedy if item.code == "OutOfMemory" else f"{item.message}: {item.remedy}"
            pools.append(PoolFit(item.pool, False, False, plan, None, *needed, remedy))
        return cls(tuple(pools))

    def __bool__(self) -> bool:
        """Return whether the job fits into the memory of any pool."""
        return any(one.fits for one in self.pools)

    def __str__(self) -> str:
        """Return a text table with one line for each pool."""
        rows = [
            (
                one.pool,
                "tight" if one.is_tight else "fits" if one.fits else "no",
                "" if one.gpus is None else str(one.gpus),
                one.plan,
                "" if one.memory_bytes is None else format_gibibytes(one.memory_bytes),
                "" if one.available_bytes is None else format_gibibytes(one.available_bytes),
                one.remedy,
            )
            for one in self.pools
        ]
        return "\n".join(
            align_columns(("POOL", "FITS", "GPUS", "PLAN", "GiB", "OF", "REMEDY"), rows, ("GPUS", "GiB", "OF"))
        )

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
            {"value": row.value, **_offer_row(offer, offer is row.best)}
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
    """None where no job can be planned."""
    unplanned: tuple[UnplannedJob, ...]
    """Jobs without a place, and why."""

    @classmethod
    def from_plan(cls, planned: QueueScreen | tuple[UnplannedJob, ...]) -> Queue:
        """Return the result for a plan, or for the refused jobs if there is no plan."""
        return cls(planned, planned.unplanned) if isinstance(planned, QueueScreen) else cls(None, planned)

    def __str__(self) -> str:
        """Return the table that `tilecast queue` prints."""
        if self.plan is None:
            return queue_screen.empty_queue_text(self.unplanned, "table").rstrip("\n")
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
            return queue_screen.empty_queue_document(self.unplanned)
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


def _offer_row(offer: core.Offer, is_best: bool) -> dict[str, Any]:
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
