"""Objectives, and the quantities that they minimise.

Everything that depends on an objective is in its `ObjectiveRecord`, and everything that depends on a quantity in its
`Quantity`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from tilecast.hardware import Pool
    from tilecast.spec import Floats

    Amount = TypeVar("Amount", float, Floats)


@dataclass(frozen=True, slots=True)
class Quantity:
    """Quantity that an objective minimises, as an amount per step: seconds, or what every GPU uses up over time."""

    name: str
    less: str
    """Word for a plan with less of the quantity: `cheaper`."""
    more: str
    """Word for a plan with more of the quantity: `dearer`."""
    worse_code: str
    """Code of plans that are not recommended because they have more of the quantity."""
    gain: str
    """Format string for the gain of a better plan. `ratio` is the new amount over the old."""
    per_gpu_hour: Callable[[Pool], float | None] | None = None
    """Function from a pool to the amount that one of its GPUs uses per hour, if known. None if the quantity is seconds.
    """
    if_unknown: tuple[str, str, str] = ("", "", "")
    """Code, message and remedy of the rejection of a pool for which `per_gpu_hour` is unknown."""
    winning_changes: tuple[Literal["nodes", "links", "price"], ...] = ("links",)
    """Changes that are tried, in this order, to make a pool the recommended one."""
    noun: str = ""
    """Word for the quantity in ratios, as in `1.4x the time`. Empty if it is the name."""
    amount_format: str = ""
    """Format string that adds the amount for 1000 steps to reasons. Empty if offers have a field for it."""

    @property
    def measure(self) -> str:
        """Word for the quantity in ratios, as in `1.4x the time`."""
        return self.noun or self.name

    @property
    def grows_with_gpus(self) -> bool:
        """Whether the amount is proportional to the number of GPUs."""
        return self.per_gpu_hour is not None

    def is_known(self, pool: Pool) -> bool:
        """Return whether the amount that the pool's GPUs use is known."""
        return self.per_gpu_hour is None or self.per_gpu_hour(pool) is not None

    def amount(self, pool: Pool, gpus: Amount, seconds: Amount) -> Amount:
        """Return how much of the quantity `gpus` GPUs of a pool use in `seconds`. NaN means unknown."""
        if self.per_gpu_hour is None:
            return seconds
        hourly = self.per_gpu_hour(pool)
        return gpus * (float("nan") if hourly is None else hourly) / 3600 * seconds


SECONDS = Quantity(
    "seconds",
    "shorter",
    "longer",
    "Slower",
    "take {ratio:.2f}x the time",
    winning_changes=("nodes", "links"),
    noun="time",
)
PRICE = Quantity(
    "price", "cheaper", "dearer", "Dearer", "cost {ratio:.2f}x the price",
    per_gpu_hour=lambda pool: pool.price_per_gpu_hour,
    if_unknown=("PriceUnknown", "no price known", "give its GPUPool a price"),
    winning_changes=("price",),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ObjectiveRecord:
    """An objective, and all properties that depend on it."""

    name: str
    summary: str
    """Description of the best plan, for schemas."""
    best: str
    """Word for the recommendation, in reasons."""
    other: str
    """Word for the other plans, in reasons."""
    quantity: Quantity = SECONDS
    """Quantity to minimise among plans with equally many GPUs."""
    fewest_gpus: bool = False
    """Whether the number of GPUs is minimised first."""
    is_whole_run: bool = False
    """Whether the quantity is that of the whole run, whose length must be known, rather than of a step."""
    bound: Literal["", "deadlineSeconds", "budget"] = ""
    """Field of the job that limits the plans. Other objectives exclude no plan by it."""
    missed: str = ""
    """Code of plans that exceed this limit."""

    @property
    def counterpart(self) -> Quantity:
        """Quantity that breaks ties: the price if the objective minimises seconds, otherwise the seconds."""
        return PRICE if self.quantity is SECONDS else SECONDS

    @property
    def needed_quantities(self) -> tuple[Quantity, ...]:
        """Quantities that must be known on a pool before the objective can rank its plans."""
        return (self.quantity, PRICE) if self.bound == "budget" else (self.quantity,)

    @property
    def needs_price(self) -> bool:
        return PRICE in self.needed_quantities

    @property
    def saves_gpus(self) -> bool:
        """Whether the objective may prefer fewer GPUs, or a part of one, to a faster step."""
        return self.quantity.grows_with_gpus or self.fewest_gpus


OBJECTIVES: dict[str, ObjectiveRecord] = {
    record.name: record
    for record in (
        ObjectiveRecord("time", "the shortest step", "fastest", "slower"),
        ObjectiveRecord("cost", "the cheapest step", "cheapest", "dearer", PRICE),
        ObjectiveRecord("timeToFinish", "the shortest run", "first to finish", "later", is_whole_run=True),
        ObjectiveRecord(
            "cheapestBeforeDeadline", "the cheapest run that meets deadlineSeconds", "cheapest before the deadline",
            "dearer", PRICE, is_whole_run=True, bound="deadlineSeconds", missed="DeadlineMissed",
        ),
        ObjectiveRecord(
            "fastestWithinBudget", "the shortest that keeps to the budget", "fastest within the budget", "slower",
            is_whole_run=True, bound="budget", missed="OverBudget",
        ),
        ObjectiveRecord(
            "fewestGpus", "the fewest GPUs that hold the job", "fewest GPUs", "slower", fewest_gpus=True,
        ),
        ObjectiveRecord(
            "fewestGpusBeforeDeadline", "the fewest GPUs whose run meets deadlineSeconds",
            "fewest GPUs before the deadline", "slower", fewest_gpus=True, is_whole_run=True, bound="deadlineSeconds",
            missed="DeadlineMissed",
        ),
    )
}  # fmt: skip
"""Every objective by its name in jobs and in `--objective`."""

if TYPE_CHECKING:
    Objective: TypeAlias = str
else:
    Objective = Literal[tuple(OBJECTIVES)]
    """Names that documents accept."""


def list_objectives_bounded_by(field: str) -> list[str]:
    """Return the names of the objectives whose bound is `field`, such as `deadlineSeconds` or `budget`."""
    return [name for name, record in OBJECTIVES.items() if record.bound == field]
