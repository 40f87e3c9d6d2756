"""Objectives, one record each: what is made least, what it needs to know, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class ObjectiveRecord:
    """What is best, and all that follows from it."""

    name: str
    summary: str
    """What is best, as schemas tell it."""
    best: str
    """What reasons call the recommendation."""
    other: str
    """And the others."""
    minimises: Literal["seconds", "price"] = "seconds"
    """Of two plans with as many GPUs as the objective lets them have."""
    fewest_gpus: bool = False
    """Whether the number of GPUs counts before that."""
    is_whole_run: bool = False
    """Whether it is about the run, whose length has to be known, and not about a step."""
    needs_price: bool = False
    bound: Literal["", "deadlineSeconds", "budget"] = ""
    """The field of the job that bounds the plans; no other objective has a use for it."""
    missed: str = ""
    """The code of what is beyond that bound."""

    @property
    def is_price(self) -> bool:
        """Whether a price is made least, rather than a time."""
        return self.minimises == "price"

    @property
    def saves_gpus(self) -> bool:
        """Whether a slower step on less of a GPU can be better."""
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
"""Every objective by the name that jobs and `--objective` give it."""

if TYPE_CHECKING:
    Objective: TypeAlias = str
else:
    Objective = Literal[tuple(OBJECTIVES)]
    """What documents accept."""


def bounded_by(bound: str) -> list[str]:
    """The objectives that a field of the job bounds."""
    return [name for name, record in OBJECTIVES.items() if record.bound == bound]
