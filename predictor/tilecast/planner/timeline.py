"""Simulate when Kueue starts the jobs of a pool: in queue order, skipping jobs that do not fit.

The strategy is Kueue's `BestEffortFIFO`. A job uses GPUs of one node, or whole nodes. Of the nodes with enough free
GPUs, the fullest is used. No job is preempted, and no GPUs are reserved for a job that does not fit yet.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tilecast.planner.problem import PoolCapacity

SNAPSHOT_INTERVAL = 32
"""Number of job starts between stored states from which a simulation can be resumed."""
TaskLine: TypeAlias = tuple[int, str]
"""GPU count and queue of jobs that wait in one line. They start in order."""


@dataclass(slots=True)
class FreeNodes:
    """Free GPUs of each node of a pool during a simulation."""

    per_node: int
    free: list[int]
    """Free GPUs of each node."""
    _by_free: list[dict[int, None]] = field(init=False)
    """Nodes by their number of free GPUs. The node that reached that number last is at the end."""

    def __post_init__(self) -> None:
        self._by_free = [{} for _ in range(self.per_node + 1)]
        for node in range(len(self.free) - 1, -1, -1):
            self._by_free[self.free[node]][node] = None

    def find_room(self) -> int:
        """Return the largest number of GPUs that a job could get now, on one node or on whole nodes."""
        by_free, room = self._by_free, self.per_node
        whole = by_free[room]
        if whole:
            return len(whole) * room
        room -= 1
        while room and not by_free[room]:
            room -= 1
        return room

    def has_room(self, gpus: int) -> bool:
        """Return whether a job of `gpus` GPUs could start now."""
        return gpus <= self.find_room()

    def allocate(self, gpus: int) -> list[int]:
        """Allocate `gpus` free GPUs and return the indices of their nodes. The pool must have room for them."""
        if gpus < self.per_node:
            room = gpus
            while not self._by_free[room]:
                room += 1
            node, _ = self._by_free[room].popitem()
            self.free[node] = room = room - gpus
            self._by_free[room][node] = None
            return [node]
        whole = self._by_free[self.per_node]
        taken = [whole.popitem()[0] for _ in range(-(-gpus // self.per_node))]
        for node in taken:
            self.free[node] = 0
            self._by_free[0][node] = None
        return taken

    def release(self, gpus: int, nodes: Sequence[int]) -> None:
        """Release the GPUs that a job of `gpus` GPUs has on the given nodes."""
        each, by_free = min(gpus, self.per_node), self._by_free
        for node in nodes:
            room = self.free[node]
            del by_free[room][node]
            self.free[node] = room = room + each
            by_free[room][node] = None

    def copy(self) -> FreeNodes:
        """Return a copy that can be changed independently."""
        made = FreeNodes.__new__(FreeNodes)
        made.per_node, made.free = self.per_node, self.free.copy()
        made._by_free = [nodes.copy() for nodes in self._by_free]
        return made


@dataclass(frozen=True, slots=True)
class PoolTasks:
    """GPUs, run times and queues of the jobs of one pool, in queue order. All lists have equal lengths."""

    gpus: Sequence[int]
    seconds: Sequence[float]
    ready_s: Sequence[float] | None = None
    """Earliest start of each job in seconds from now. None if all can start now."""
    queues: Sequence[str] | None = None
    """Queue whose quota each job uses. None if there are no quotas."""
    names: Sequence[int] | None = None
    """Identifier of each job, ascending. None for 0, 1, 2 and so on."""


@dataclass(slots=True)
class SimulationState:
    """State of a pool at one moment of a simulation: free nodes, unused quotas and running jobs."""

    at_s: float
    nodes: FreeNodes
    left: dict[str, int]
    """Unused GPUs of each quota."""
    running: list[tuple[float, int, int, str, list[int]]] = field(default_factory=list)
    """Heap of running jobs. Each has its end, identifier, GPUs, queue and nodes."""
    passed: dict[TaskLine, int] = field(default_factory=dict)
    """Number of jobs of each line that have started."""
    started: int = 0

    def copy(self) -> SimulationState:
        """Return a copy that can be changed independently."""
        passed, running = self.passed.copy(), self.running.copy()
        return SimulationState(self.at_s, self.nodes.copy(), self.left.copy(), running, passed, self.started)


@dataclass(frozen=True, slots=True)
class PoolSimulation:
    """Simulated start times of the jobs of a pool, and states from which the simulation can be resumed."""

    begin: list[float]
    order: list[int] = field(default_factory=list)
    """Identifiers of the tasks in the order in which they start."""
    moments: list[SimulationState] = field(default_factory=list)
    """Stored states, ascending. Empty if all tasks have the same size."""

    def find_last_moment(self, started: int) -> SimulationState | None:
        """Return the last stored state in which at most `started` jobs have started, or None if there is none."""
        place = bisect_right(self.moments, started, key=lambda moment: moment.started)
        return self.moments[place - 1] if place else None


def simulate_start_times(pool: PoolCapacity, tasks: PoolTasks) -> list[float]:
    """Return the start of each job in seconds from now. A job that can never start has an infinite start."""
    return simulate_pool(pool, tasks).begin


def simulate_pool(
    pool: PoolCapacity,
    tasks: PoolTasks,
    other: PoolSimulation | None = None,
    since: SimulationState | None = None,
    begin: list[float] | None = None,
) -> PoolSimulation:
    """Return the simulated start times of the jobs of a pool, with states from which to resume.

    Without `other`, `since` and `begin`, the simulation starts at time 0.

    Args:
        pool: the pool.
        tasks: all jobs of the pool.
        other: an earlier simulation with equal starts up to the state `since`.
        since: the state of `other` from which to resume.
        begin: start times of jobs that have started in that state. Infinite for all other jobs.
    """
    if tasks.ready_s is None and tasks.gpus and min(tasks.gpus) == max(tasks.gpus):
        places = _count_equal_tasks(pool, tasks)
        if places is not None:
            return PoolSimulation(_start_equal_tasks(places, tasks.seconds))
    if tasks.ready_s is None and not pool.quotas and len(tasks.gpus) <= SNAPSHOT_INTERVAL:
        return _start_few_tasks(pool, tasks)
    if other is None or since is None or begin is None:
        made = PoolSimulation([math.inf] * len(tasks.gpus))
        _simulate_mixed_sizes(
            tasks, SimulationState(0.0, FreeNodes(pool.gpus_per_node, pool.free), dict(pool.quotas)), made
        )
        return made
    earlier = [moment for moment in other.moments if moment.started <= since.started]
    made = PoolSimulation(begin, other.order[: since.started], earlier)
    _simulate_mixed_sizes(tasks, since.copy(), made)
    return made


def _count_equal_tasks(pool: PoolCapacity, tasks: PoolTasks) -> int | None:
    """Return how many of some tasks of one size can run at once, or None if they have several queues with quotas."""
    places = _count_jobs_that_fit(pool, tasks.gpus[0])
    if not pool.quotas:
        return places
    if tasks.queues is None or tasks.queues.count(tasks.queues[0]) < len(tasks.queues):
        return None
    quota = pool.quotas.get(tasks.queues[0])
    return places if quota is None else min(places, quota // tasks.gpus[0])


def _count_jobs_that_fit(pool: PoolCapacity, gpus: int) -> int:
    """Return how many jobs of `gpus` GPUs fit into the pool at once."""
    if gpus <= pool.gpus_per_node:
        return sum(free // gpus for free in pool.free)
    return pool.free.count(pool.gpus_per_node) // -(-gpus // pool.gpus_per_node)


def _start_equal_tasks(places: int, seconds: Sequence[float]) -> list[float]:
    """Return the start times in seconds of jobs with equal GPU counts.

    Args:
        places: number of jobs that can run at once.
        seconds: run time of each job, in queue order.
    """
    if not places:
        return [math.inf] * len(seconds)
    ends: list[float] = []
    begins = []
    for index, length in enumerate(seconds):
        start = 0.0 if index < places else ends[0]
        begins.append(start)
        if index < places:
            heapq.heappush(ends, length)
        else:
            heapq.heapreplace(ends, start + length)
    return begins


def _start_few_tasks(pool: PoolCapacity, tasks: PoolTasks) -> PoolSimulation:
    """Return the simulation of a few jobs in a pool without quotas, in less time than `_simulate_mixed_sizes` takes.

    All jobs must be ready to start. Both functions give the same result. A search of a small queue spends most of its
    time in such simulations.
    """
    per_node, gpus, seconds = pool.gpus_per_node, tasks.gpus, tasks.seconds
    free = list(pool.free)
    nodes: list[list[int]] = [[] for _ in range(per_node + 1)]
    for node in range(len(free) - 1, -1, -1):
        nodes[free[node]].append(node)
    whole, waiting = nodes[per_node], list(range(len(gpus)))
    begin, order, running, moment = [math.inf] * len(gpus), list[int](), list[tuple[float, int, list[int]]](), 0.0
    while True:
        room = _find_room(nodes, per_node)
        still = list[int]()
        for place, task in enumerate(waiting):
            if not room:
                still += waiting[place:]
                break
            size = gpus[task]
            if size > room:
                still.append(task)
                continue
            if size < per_node:
                level = size
                while not nodes[level]:
                    level += 1
                taken = [nodes[level].pop()]
                free[taken[0]] = level = level - size
                nodes[level].append(taken[0])
            else:
                taken = [whole.pop() for _ in range(-(-size // per_node))]
                for node in taken:
                    free[node] = 0
                    nodes[0].append(node)
            begin[task] = moment
            order.append(task)
            heapq.heappush(running, (moment + seconds[task], task, taken))
            room = len(whole) * per_node if whole else _find_room(nodes, per_node)
        waiting = still
        if not waiting or not running:
            break
        moment = running[0][0]
        while running and running[0][0] <= moment:
            _, task, taken = heapq.heappop(running)
            each = min(gpus[task], per_node)
            for node in taken:
                nodes[free[node]].remove(node)
                free[node] += each
                nodes[free[node]].append(node)
    return PoolSimulation(begin, order if tasks.names is None else [tasks.names[task] for task in order])


def _find_room(nodes: Sequence[Sequence[int]], per_node: int) -> int:
    """Return the most GPUs that a job could get now, on one node or on whole nodes.

    Args:
        nodes: nodes by their number of free GPUs.
        per_node: GPUs of a node.
    """
    if nodes[per_node]:
        return len(nodes[per_node]) * per_node
    return next((level for level in range(per_node - 1, 0, -1) if nodes[level]), 0)


def _simulate_mixed_sizes(tasks: PoolTasks, state: SimulationState, made: PoolSimulation) -> None:
    """Simulate jobs of several sizes. At every end or arrival, the jobs that fit start in queue order.

    Args:
        tasks: the jobs.
        state: the state to begin at, which is changed in place.
        made: the simulation to which start times and states are written.
    """
    seconds, ready, names = tasks.seconds, tasks.ready_s, tasks.names
    lines, later = _group_into_lines(tasks)
    nodes, left, running, passed, place = state.nodes, state.left, state.running, state.passed, 0
    heads = {line: members[at] for line, members in lines.items() if (at := passed.get(line, 0)) < len(members)}
    begin, order, push, pop = made.begin, made.order, heapq.heappush, heapq.heappop
    allocate, release, find_room = nodes.allocate, nodes.release, nodes.find_room
    due = state.started + SNAPSHOT_INTERVAL if ready is None else len(seconds) + 1
    moment = state.at_s
    while True:
        if len(order) >= due:
            state.started, state.at_s = len(order), moment
            due = len(order) + SNAPSHOT_INTERVAL
            made.moments.append(state.copy())
        while heads:
            room = find_room()
            if not room:
                break
            first, line = len(seconds), None
            for other, head in heads.items():
                if head < first and other[0] <= room and (not left or left.get(other[1], room) >= other[0]):
                    first, line = head, other
            if line is None:
                break
            size, queue = line
            passed[line] = at = passed.get(line, 0) + 1
            members = lines[line]
            if at < len(members):
                heads[line] = members[at]
            else:
                del heads[line]
            if queue in left:
                left[queue] -= size
            begin[first] = moment
            name = first if names is None else names[first]
            order.append(name)
            push(running, (moment + seconds[first], name, size, queue, allocate(size)))
        if not running and place == len(later):
            return
        coming = later[place][0] if place < len(later) else math.inf
        moment = min(running[0][0], coming) if running else coming
        while running and running[0][0] <= moment:
            _, _, size, queue, taken = pop(running)
            release(size, taken)
            if queue in left:
                left[queue] += size
        while place < len(later) and later[place][0] <= moment:
            _, first, line = later[place]
            insort(lines[line], first, passed.get(line, 0))
            heads[line] = lines[line][passed.get(line, 0)]
            place += 1


def _group_into_lines(tasks: PoolTasks) -> tuple[dict[TaskLine, list[int]], list[tuple[float, int, TaskLine]]]:
    """Return the jobs that are ready, grouped by GPU count and queue, and the jobs that arrive later.

    A job that arrives later is a tuple (arrival time, job, (GPUs, queue)). These tuples are sorted.
    """
    lines, later = dict[TaskLine, list[int]](), list[tuple[float, int, TaskLine]]()
    if tasks.ready_s is None and tasks.queues is None:
        sizes = np.array(tasks.gpus)
        return {(size, ""): np.flatnonzero(sizes == size).tolist() for size in sorted(set(tasks.gpus))}, later
    for task, size in enumerate(tasks.gpus):
        line = size, tasks.queues[task] if tasks.queues else ""
        lines.setdefault(line, [])
        if tasks.ready_s is None or tasks.ready_s[task] <= 0:
            lines[line].append(task)
        else:
            later.append((tasks.ready_s[task], task, line))
    return lines, sorted(later)
