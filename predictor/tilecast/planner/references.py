"""Simulate a queue without a common plan, in four usual ways to assign jobs to pools, for comparison with the plan."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from tilecast.planner.assignment import Assignment
from tilecast.planner.columns import QueueColumns
from tilecast.planner.policies import POLICIES
from tilecast.planner.timeline import FreeNodes
from tilecast.spec import Floats, Ints


@dataclass(frozen=True, slots=True)
class QueueOutcome:
    """Chosen option and simulated end of each job of a queue."""

    option: list[int]
    finish: Floats
    """End of each job in seconds from now, (n,)."""


def choose_fastest(columns: QueueColumns) -> list[int]:
    """Return the fastest option of each job. Of equally fast options, take the one with the fewest GPUs."""
    return _choose_least(columns, (columns.seconds, columns.gpus))


def _choose_least(columns: QueueColumns, by: tuple[Floats | Ints, Floats | Ints]) -> list[int]:
    """Return the option of each job with the least value in the first column of `by`. The second column breaks ties.

    Args:
        columns: the queue.
        by: two values of each option, (m,) each.
    """
    order = np.lexsort((by[1], by[0], columns.job))
    return [int(item) for item in order[columns.first[:-1]]]


def choose_cheapest(columns: QueueColumns) -> list[int]:
    """Return the cheapest option of each job. Of equally cheap options, take the fastest."""
    return _choose_least(columns, (columns.cost, columns.seconds))


def choose_earliest(columns: QueueColumns) -> list[int]:
    """Return for each job the option with the earliest end, if jobs choose one after another in queue order."""
    lines = [_GpuFreeTimes(np.array(pool.free), pool.gpus_per_node) for pool in columns.pools]
    chosen = []
    for job in range(len(columns.weight)):
        begin = max(float(columns.arrival[job]), 0.0)
        best, ends = -1, (math.inf, 0)
        for item in columns.get_option_range(job):
            gpus = int(columns.gpus[item])
            after = (max(lines[columns.pool[item]].find_free_time(gpus), begin) + columns.seconds[item], gpus)
            if best < 0 or after < ends:
                best, ends = item, after
        lines[columns.pool[best]].occupy(int(columns.gpus[best]), ends[0])
        chosen.append(best)
    return chosen


class _GpuFreeTimes:
    """Times in seconds at which each GPU of a pool becomes free, if jobs start strictly in order."""

    def __init__(self, free: np.ndarray, per_node: int) -> None:
        self.per_node = per_node
        self.until = np.full((len(free), per_node), math.inf)
        self.until[np.arange(per_node) < free[:, None]] = 0.0
        self._ready: dict[int, float] = {}

    def find_free_time(self, gpus: int) -> float:
        """Return the time in seconds at which `gpus` GPUs are first free at once, on one node or on whole nodes."""
        if gpus not in self._ready:
            self._ready[gpus] = float(
                np.partition(self._list_node_free_times(gpus), self._count_nodes(gpus) - 1)[self._count_nodes(gpus) - 1]
            )
        return self._ready[gpus]

    def occupy(self, gpus: int, end: float) -> None:
        """Mark the `gpus` GPUs that become free first as used until `end` seconds from now."""
        for node in np.argsort(self._list_node_free_times(gpus), kind="stable")[: self._count_nodes(gpus)]:
            row = self.until[node]
            row[: min(gpus, self.per_node)] = end
            row.sort()
        self._ready = {}

    def _count_nodes(self, gpus: int) -> int:
        return -(-gpus // self.per_node)

    def _list_node_free_times(self, gpus: int) -> Floats:
        """Return for each node the time in seconds at which it has enough free GPUs for its part of a job, (nodes,)."""
        return self.until[:, min(gpus, self.per_node) - 1]


def simulate_options(columns: QueueColumns, option: list[int]) -> QueueOutcome:
    """Return the simulated outcome of a queue for the given option of each job."""
    return QueueOutcome(option, Assignment(columns, POLICIES["completion"], list(option)).finish)


def simulate_kueue(columns: QueueColumns, flavors: Mapping[str, Sequence[str]] = MappingProxyType({})) -> QueueOutcome:
    """Return the simulated outcome of a queue that Kueue schedules without advice.

    In queue order, each job starts on the first pool with room, and waits while no pool has room. The job uses the
    number of GPUs that it requests, or the nearest number for which it has an option on the pool.

    Args:
        columns: the queue.
        flavors: pools in the order in which Kueue tries them, by name of the job. Pools that are not listed follow in
            their order in `columns`. Equal jobs need equal lists.
    """
    count = len(columns.weight)
    rooms = [_FreePoolCapacity(FreeNodes(pool.gpus_per_node, pool.free), dict(pool.quotas)) for pool in columns.pools]
    option, finish = [-1] * count, np.full(count, math.inf)
    coming = sorted((max(float(at), 0.0), job) for job, at in enumerate(columns.arrival))
    waiting, running = dict[int, list[int]](), list[tuple[float, int, list[int]]]()
    line_of, wishes = _group_waiting_lines(columns, flavors)
    place = 0
    while place < count or running:
        moment = min(coming[place][0] if place < count else math.inf, running[0][0] if running else math.inf)
        opened = set[int]()
        while running and running[0][0] <= moment:
            _, job, nodes = heapq.heappop(running)
            item = option[job]
            rooms[columns.pool[item]].release_gpus(columns.problem.jobs[job].queue, int(columns.gpus[item]), nodes)
            opened.add(int(columns.pool[item]))
        while place < count and coming[place][0] <= moment:
            job = coming[place][1]
            heapq.heappush(waiting.setdefault(line_of[int(columns.kind[job])], []), job)
            place, opened = place + 1, set(range(len(rooms)))
        # A pool where no job ended has no more room than when the waiting jobs last found none there.
        able = {line: [wish for wish in wishes[line] if wish[0] in opened] for line, jobs in waiting.items() if jobs}
        while able:
            line = min(able, key=lambda item: waiting[item][0])
            job = waiting[line][0]
            queue = columns.problem.jobs[job].queue
            taken = next((wish for wish in able[line] if rooms[wish[0]].has_room(queue, wish[1])), None)
            if taken is not None:
                pool, gpus, place_ = taken
                option[job] = item = int(columns.first[job]) + place_
                finish[job] = moment + columns.seconds[item]
                heapq.heappush(running, (float(finish[job]), job, rooms[pool].take_gpus(queue, gpus)))
                heapq.heappop(waiting[line])
            if taken is None or not waiting[line]:
                del able[line]
    return QueueOutcome(option, finish)


@dataclass(slots=True)
class _FreePoolCapacity:
    """Free GPUs of a pool and unused quotas of queues during a simulation."""

    nodes: FreeNodes
    quotas: dict[str, int]

    def has_room(self, queue: str, gpus: int) -> bool:
        return self.quotas.get(queue, gpus) >= gpus and self.nodes.has_room(gpus)

    def take_gpus(self, queue: str, gpus: int) -> list[int]:
        if queue in self.quotas:
            self.quotas[queue] -= gpus
        return self.nodes.allocate(gpus)

    def release_gpus(self, queue: str, gpus: int, nodes: list[int]) -> None:
        if queue in self.quotas:
            self.quotas[queue] += gpus
        self.nodes.release(gpus, nodes)


def _group_waiting_lines(
    columns: QueueColumns, flavors: Mapping[str, Sequence[str]]
) -> tuple[dict[int, int], list[list[tuple[int, int, int]]]]:
    """Return the index of the waiting line of each job class, and the options that Kueue tries for each line.

    Jobs with the same options and the same queue share a waiting line. While the first job of a line cannot start, no
    job of that line can.
    """
    lines, line_of, wishes = dict[tuple[object, ...], int](), dict[int, int](), list[list[tuple[int, int, int]]]()
    for kind, job in zip(*np.unique(columns.kind, return_index=True), strict=True):
        wish = _list_kueue_options(columns, int(job), flavors)
        place = (columns.problem.jobs[int(job)].queue, *wish)
        if place not in lines:
            lines[place] = len(wishes)
            wishes.append(wish)
        line_of[int(kind)] = lines[place]
    return line_of, wishes


def _list_kueue_options(
    columns: QueueColumns, job: int, flavors: Mapping[str, Sequence[str]]
) -> list[tuple[int, int, int]]:
    """Return the options that Kueue tries for a job, in the order in which it tries them.

    Each option is a tuple (pool index, GPUs, position among the options of the job).
    """
    options = columns.get_option_range(job)
    present = int(columns.present[job])
    is_own = present >= 0 and not columns.problem.jobs[job].is_advised
    own = present if is_own else min(options, key=lambda item: columns.seconds[item])
    asked = columns.gpus[own]
    nearest = dict[int, int]()
    for item in [own] if columns.is_running[job] else options:
        pool = int(columns.pool[item])
        if pool not in nearest or abs(columns.gpus[item] - asked) < abs(columns.gpus[nearest[pool]] - asked):
            nearest[pool] = item
    turns = {name: turn for turn, name in enumerate(flavors.get(columns.problem.jobs[job].name, ()))}
    order = sorted(nearest, key=lambda pool: (turns.get(columns.pools[pool].name, len(turns)), pool))
    return [(pool, int(columns.gpus[nearest[pool]]), nearest[pool] - options[0]) for pool in order]


REFERENCES: Mapping[str, tuple[str, Callable[[QueueColumns], QueueOutcome]]] = {
    "ownBest": (
        "each on its own best pool, first come first served",
        lambda held: simulate_options(held, choose_fastest(held)),
    ),
    "earliest": ("each where it would finish first", lambda held: simulate_options(held, choose_earliest(held))),
    "flavors": ("Kueue's order of flavors", simulate_kueue),
    "cheapest": ("each on its cheapest pool", lambda held: simulate_options(held, choose_cheapest(held))),
}
"""Ways to place jobs without a common plan, by name. Each has a summary and a function that returns the outcome."""
