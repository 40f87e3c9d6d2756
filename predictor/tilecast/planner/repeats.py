"""Recognize moves that repeat another one, because equal jobs are interchangeable.

Two moves give plans of equal score if, in every pool, equal jobs with equal options stand in the same places of the
line. A search then needs to try only one of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tilecast.planner.assignment import Assignment, PoolTimeline
from tilecast.planner.columns import QueueColumns


@dataclass(slots=True)
class TriedMoves:
    """Moves that were tried since the plan last changed. Each stands for all moves that repeat it."""

    kind: list[int]
    """Class of each option: equal options of equal jobs."""
    _seen: set[tuple[object, ...]] = field(default_factory=set)
    _lines: dict[int, tuple[PoolTimeline, list[int], list[int]]] = field(default_factory=dict)
    """Last timeline of each pool, with the kind and the run of each of its jobs. A run is of neighbours of one kind."""

    @classmethod
    def from_columns(cls, columns: QueueColumns) -> TriedMoves | None:
        """Return an empty record for the moves of a queue.

        If all jobs differ, or if some arrive later, return None: then no move is known to repeat another one.
        """
        counts = np.bincount(columns.need) if len(columns.need) else np.zeros(0)
        if not (counts > 1).any() or (columns.arrival > 0).any():
            return None
        place = np.arange(len(columns.options)) - columns.first[columns.job]
        return cls((columns.need[columns.job] * (int(place.max()) + 1) + place).tolist())

    def is_repeated(self, current: Assignment, moves: Mapping[int, int]) -> bool:
        """Return whether moves of one or two jobs repeat moves that were tried before. Otherwise record them.

        Moves repeat others if they take jobs from the same runs, and put them into the same runs or between the same
        neighbours. Of two jobs, which one starts first matters as well, because a run may be divided by the other job.
        """
        parts: list[object] = [min(moves) == next(iter(moves))]
        for job, option in moves.items():
            old = current.option[job]
            line, _, runs = self._describe_line(current, int(current.columns.pool[old]))
            run = runs[bisect_left(line.jobs, job)]
            line, kinds, runs = self._describe_line(current, int(current.columns.pool[option]))
            place, kind = bisect_left(line.jobs, job), self.kind[option]
            if place and kinds[place - 1] == kind:
                slot = runs[place - 1]
            elif place < len(kinds) and kinds[place] == kind:
                slot = runs[place]
            else:
                slot = -1 - place
            parts += (self.kind[old], kind, run, slot)
        key = tuple(parts)
        if key in self._seen:
            return True
        self._seen.add(key)
        return False

    def forget(self) -> None:
        """Forget all moves, because the plan has changed."""
        self._seen.clear()

    def _describe_line(self, current: Assignment, pool: int) -> tuple[PoolTimeline, list[int], list[int]]:
        line, known = current.pools[pool], self._lines.get(pool)
        if known is not None and known[0] is line:
            return known
        kinds, runs = [self.kind[current.option[job]] for job in line.jobs], list[int]()
        for place, kind in enumerate(kinds):
            runs.append(runs[-1] + (kind != kinds[place - 1]) if place else 0)
        self._lines[pool] = made = line, kinds, runs
        return made
