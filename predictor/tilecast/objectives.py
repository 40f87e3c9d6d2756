"""Objectives, one record each: what is minimised, what it requires, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias


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
    minimises: Literal["seconds", "price"] = "seconds"
    """Quantity to minimise among plans with equally many GPUs."""
    fewest_gpus: bool = False
    """Whether the number of GPUs is minimised first."""
    is_whole_run: bool = False
    """Whether it is about the whole run, whose length must be known, and not about a step."""
    needs_price: bool = False
    bound: Literal["", "deadlineSeconds", "budget"] = ""
    """Field of the job that bounds the plans; no other objective uses that field."""
    missed: str = ""
    """Code of plans that exceed that bound."""

    @property
    def is_price(self) -> bool:
        """Whether it minimises a price, rather than a time."""
        return self.minimises == "price"

    @property
    def saves_gpus(self) -> bool:
        """Whether a slower step on a part of a GPU can be better."""
        return self.is_price or self.fewest_gpus


OBJECTIVES: dict[str, ObjectiveRecord] = {
    record.name: record
    for record in (
        ObjectiveRecord("time", "the shortest step", "fastest", "slower"),
        ObjectiveRecord("cost", "the cheapest step", "cheapest", "dearer", "price", needs_price=True),
        ObjectiveRecord("timeToFinish", "the shortest run", "first to finish", "later", is_whole_run=True),
        ObjectiveRecord(
            "cheapestBeforeDeadline", "the cheapest run that meets deadlineSeconds", "cheapest before the deadline",
            "dearer", "price", is_whole_run=True, needs_price=True, bound="deadlineSeconds", missed="DeadlineMissed",
        ),
        ObjectiveRecord(
            "fastestWithinBudget", "the shortest that keeps to the budget", "fastest within the budget", "slower",
            is_whole_run=True, needs_price=True, bound="budget", missed="OverBudget",
        ),
        ObjectiveRecord(
            "fewestGpus", "the fewest GPUs that hold the job", "fewest GPUs", "slower", fewest_gpus=True,
        ),
    )
}  # fmt: skip
"""Every objective by its name in jobs and in `--objective`."""

if TYPE_CHECKING:
    Objective: TypeAlias = str
else:
    Objective = Literal[tuple(OBJECTIVES)]
    """Names that documents accept."""


def bounded_by(bound: str) -> list[str]:
    """Return the objectives that a field of the job bounds."""
    return [name for name, record in OBJECTIVES.items() if record.bound == bound]
