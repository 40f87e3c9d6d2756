"""Plans of a queue: the timeline, the references, the solver against all plans, and refusals."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tilecast.planner.assignment import Assignment, QueueScore
from tilecast.planner.columns import QueueColumns, build_columns, isolated_s
from tilecast.planner.policies import POLICIES
from tilecast.planner.problem import JobOption, PoolCapacity, QueuedJob, QueueProblem, check_problem
from tilecast.planner.references import REFERENCES
from tilecast.planner.relaxation import JobClasses, bound_completion_in_order
from tilecast.planner.repeats import TriedMoves
from tilecast.planner.solver import solve
from tilecast.planner.timeline import (
    FreeNodes,
    PoolSimulation,
    PoolTasks,
    SimulationState,
    _simulate_mixed_sizes,
    _start_few_tasks,
    simulate_pool,
    simulate_start_times,
)
from tilecast.planner.totals import build_report, list_late_jobs
from tilecast.spec import Floats, SpecError


def option(pool: str, gpus: int, seconds: float, cost: float | None = 1.0, width: float = 0.1) -> JobOption:
    return JobOption(pool, gpus, seconds, seconds * math.exp(-width), seconds * math.exp(width), cost)


def job(name: str, *options: JobOption, **others: object) -> QueuedJob:
    return QueuedJob(name, options, **others)  # type: ignore[arg-type]


# The timeline.


def test_jobs_of_one_size_take_the_place_that_is_free_first() -> None:
    assert simulate_start_times(PoolCapacity("a", 1, 2), PoolTasks([1, 1, 1, 1], [3.0, 1.0, 5.0, 1.0])) == [0, 0, 1, 3]


def test_a_gang_waits_for_whole_nodes_and_smaller_jobs_pass_it() -> None:
    # One GPU of the first node is busy for 4 s; the gang of two nodes waits for it, the last job does not.
    assert simulate_start_times(PoolCapacity("a", 2, 2), PoolTasks([1, 4, 1], [4.0, 1.0, 2.0])) == [0, 4, 0]


def test_small_jobs_fill_nodes_that_are_begun() -> None:
    # 1 + 1 GPUs go to one node, so the job of a whole node starts at once.
    assert simulate_start_times(PoolCapacity("a", 2, 2), PoolTasks([1, 1, 2], [9.0, 9.0, 1.0])) == [0, 0, 0]


def test_a_quota_holds_back_its_queue_alone() -> None:
    pool = PoolCapacity("a", 1, 4, quotas={"small": 1})
    tasks = PoolTasks([1, 1, 1], [5.0, 5.0, 5.0], queues=["small", "small", "other"])
    assert simulate_start_times(pool, tasks) == [0, 5, 0]


def test_what_others_hold_is_not_given_away() -> None:
    assert simulate_start_times(PoolCapacity("a", 2, 2, held_gpus=3), PoolTasks([1, 1], [2.0, 2.0])) == [0, 2]


def test_a_job_that_comes_later_starts_later() -> None:
    assert simulate_start_times(PoolCapacity("a", 1, 1), PoolTasks([1, 1], [2.0, 2.0], ready_s=[3.0, -1.0])) == [3, 0]


@pytest.mark.parametrize("seed", range(30))
def test_no_node_is_ever_asked_for_more_than_it_has(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    pool = PoolCapacity("a", draw.randint(1, 4), draw.choice([1, 2, 4]), quotas={"q": draw.randint(2, 6)})
    sizes = [size for size in (1, 2, 4, 8) if pool.can_hold(size)]
    gpus = [draw.choice(sizes) for _ in range(25)]
    seconds = [draw.uniform(1, 9) for _ in gpus]
    queues = [draw.choice(["", "q"]) for _ in gpus]
    begin = simulate_start_times(pool, PoolTasks(gpus, seconds, [draw.uniform(-5, 20) for _ in gpus], queues))
    for moment in begin:
        here = [i for i, at in enumerate(begin) if at <= moment < at + seconds[i] and math.isfinite(at)]
        assert sum(gpus[i] for i in here) <= pool.gpus
        assert sum(gpus[i] for i in here if queues[i] == "q") <= pool.quotas["q"]
    assert all(
        math.isfinite(at) or (queue == "q" and size > pool.quotas["q"])
        for at, size, queue in zip(begin, gpus, queues, strict=True)
    )


@pytest.mark.parametrize("seed", range(30))
def test_few_jobs_start_as_in_the_general_simulation(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    pool = PoolCapacity("a", draw.randint(1, 8), draw.choice([1, 2, 4, 8]), held_gpus=draw.choice([0, 0, 1]))
    sizes = [size for size in (1, 2, 3, 4, 8, 16, 32, 64) if pool.can_hold(size)]
    for _ in range(10):
        gpus = [draw.choice(sizes or [1]) for _ in range(draw.randint(1, 25))]
        seconds = [draw.choice([1.0, 2.0, 3.0, draw.uniform(1, 9)]) for _ in gpus]
        tasks = PoolTasks(gpus, seconds, names=list(range(3, 3 + 2 * len(gpus), 2)))
        few = _start_few_tasks(pool, tasks)
        general = PoolSimulation([math.inf] * len(gpus))
        _simulate_mixed_sizes(tasks, SimulationState(0.0, FreeNodes(pool.gpus_per_node, pool.free), {}), general)
        assert (few.begin, few.order) == (general.begin, general.order)


@pytest.mark.parametrize("seed", range(20))
def test_jobs_of_one_size_and_queue_start_as_in_the_general_simulation(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    size, count = draw.choice([1, 2, 4, 8]), draw.randint(1, 40)
    quotas = draw.choice([{"q": draw.randint(0, 16)}, {"other": 3}, {"q": draw.randint(0, 16), "other": 1}])
    pool = PoolCapacity("a", draw.randint(1, 4), 4, quotas=quotas)
    tasks = PoolTasks([size] * count, [draw.uniform(1, 9) for _ in range(count)], queues=["q"] * count)
    made, general = simulate_pool(pool, tasks), PoolSimulation([math.inf] * count)
    _simulate_mixed_sizes(tasks, SimulationState(0.0, FreeNodes(4, pool.free), dict(quotas)), general)
    assert made.begin == general.begin
    assert not made.moments  # no state is stored where the starts need no simulation


@pytest.mark.parametrize("count", [30, 160])
@pytest.mark.parametrize("seed", range(20))
def test_moves_are_simulated_from_where_they_change_something_as_from_the_beginning(seed: int, count: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    quotas = {"q": 5} if seed % 2 else {}
    pools = tuple(PoolCapacity(f"p{i}", 2, 4, quotas=quotas) for i in range(2))
    jobs = []
    for index in range(count):
        ways = [option(pool.name, gpus, draw.uniform(1, 9)) for pool in pools for gpus in (1, 2, 4, 8)]
        queue, coming_s = draw.choice(["", "q"]), float(draw.randrange(20)) * (seed % 5 == 4)
        ways = [way for way in ways if not (queue and quotas) or way.gpus <= 4]
        jobs.append(job(f"j{index}", *ways, arrival_s=coming_s, queue=queue))
    held = build_columns(check_problem(QueueProblem(tuple(jobs), pools))[0])
    current = Assignment(
        held, POLICIES["completion"], [draw.choice(held.get_option_range(row)) for row in range(len(jobs))]
    )
    for _ in range(25):
        moves = {
            row: draw.choice(held.get_option_range(row)) for row in draw.sample(range(len(jobs)), draw.randint(1, 3))
        }
        score, changed = current.try_moves(moves)
        if draw.random() < 0.5:
            current.apply_moves(moves, changed)
            anew = Assignment(held, current.policy, list(current.option))
            assert current.score == anew.score == score
            assert current.finish.tolist() == anew.finish.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_places_of_one_job_that_are_tried_in_turn_are_each_simulated_as_from_the_beginning(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    pools = tuple(PoolCapacity(f"p{i}", 2, 4) for i in range(3))
    ways = [option(pool.name, gpus, draw.uniform(1, 9)) for pool in pools for gpus in (1, 2, 4)]
    jobs = tuple(job(f"j{index}", *ways, arrival_s=-index) for index in range(90))
    held = build_columns(check_problem(QueueProblem(jobs, pools))[0])
    current = Assignment(
        held, POLICIES["completion"], [draw.choice(held.get_option_range(row)) for row in range(len(jobs))]
    )
    rows = draw.sample(range(len(jobs)), 3)
    for _ in range(12):
        row, before = draw.choice(rows), current.simulated
        moves = {row: draw.choice(held.get_option_range(row))}
        score, changed = current.try_moves(moves)
        assert current.simulated - before == sum(len(line.jobs) for line in changed.values())
        anew = Assignment(held, current.policy, [moves.get(one, way) for one, way in enumerate(current.option)])
        assert score == anew.score
        assert all(line.finish.tolist() == anew.pools[pool].finish.tolist() for pool, line in changed.items())
        if draw.random() < 0.4:
            current.apply_moves(moves, changed)


def few_kinds(seed: int, count: int) -> QueueProblem:
    """Draw a queue of few kinds of jobs, on pools of which some have quotas."""
    draw = random.Random(seed)  # noqa: S311
    pools = tuple(
        PoolCapacity(f"p{i}", draw.randint(1, 3), 2, quotas=draw.choice([{}, {"": 3}, {"": 2, "q": 2}]))
        for i in range(3)
    )
    sizes = (1, 2) if seed % 2 else (1,)
    kinds = [
        (draw.choice(["", "q"]), [option(pool.name, gpus, draw.uniform(5, 40)) for pool in pools for gpus in sizes])
        for _ in range(2)
    ]
    drawn = (draw.choice(kinds) for _ in range(count))
    jobs = (job(f"j{i}", *ways, arrival_s=i - count, queue=queue) for i, (queue, ways) in enumerate(drawn))
    return QueueProblem(tuple(jobs), pools)


@pytest.mark.parametrize("policy", ["completion", "makespan", "cost"])
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6])
def test_moves_that_repeat_one_another_give_equal_scores(seed: int, policy: str) -> None:
    draw = random.Random(seed)  # noqa: S311
    held = build_columns(check_problem(few_kinds(seed, 12))[0])
    current = Assignment(held, POLICIES[policy], [draw.choice(held.get_option_range(row)) for row in range(12)])
    drawn = []
    for _ in range(60):
        some = [row for row in draw.sample(range(12), draw.randint(1, 2)) if len(held.get_option_range(row)) > 1]
        moves = {
            row: draw.choice([way for way in held.get_option_range(row) if way != current.option[row]]) for row in some
        }
        drawn += [moves] if moves else []
    scores, repeated = [current.try_moves(moves)[0] for moves in drawn], 0
    for one, score in zip(drawn, scores, strict=True):
        for other, same in zip(drawn, scores, strict=True):
            tried = TriedMoves.from_columns(held)
            assert tried is not None
            assert not tried.is_repeated(current, one)
            if tried.is_repeated(current, other):
                repeated += one != other
                assert same == pytest.approx(score, rel=1e-9)
    assert repeated


def test_only_arrived_jobs_of_one_kind_are_interchangeable() -> None:
    problem = few_kinds(1, 12)
    late = replace(problem, jobs=(*problem.jobs[:-1], replace(problem.jobs[-1], arrival_s=1.0)))
    unlike = replace(problem, jobs=tuple(replace(one, weight=1.0 + row) for row, one in enumerate(problem.jobs)))
    for item in (late, unlike):
        assert TriedMoves.from_columns(build_columns(check_problem(item)[0])) is None


def test_a_queue_of_few_kinds_is_planned_with_few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, real = [], Assignment.try_moves
    monkeypatch.setattr(Assignment, "try_moves", lambda *given: trials.append(1) or real(*given))
    plan = solve(few_kinds(2, 30), is_bounded=False)
    few = len(trials)
    unlike = (replace(one, own_weight=1.0, weight=1 + row * 1e-6) for row, one in enumerate(few_kinds(2, 30).jobs))
    apart = solve(QueueProblem(tuple(unlike), few_kinds(2, 30).pools), is_bounded=False)
    assert few < 0.5 * (len(trials) - few)
    assert plan.score[1] <= apart.score[1] * (1 + 1e-3)


def test_the_bound_knows_quotas() -> None:
    jobs = tuple(job(f"j{i}", option("a", 1, 10.0), queue="q") for i in range(4))
    pools = (PoolCapacity("a", 4, 1, quotas={"q": 1}),)
    plan = solve(QueueProblem(jobs, pools))
    assert plan.score[1] == pytest.approx(25)
    assert plan.gap == pytest.approx(0, abs=0.01)
    free = (*jobs, job("free", option("a", 1, 10.0)))  # has no quota, so that the pool may be used whole
    both = solve(QueueProblem(free, pools))
    assert both.bound is not None and both.bound <= both.score[1]


# The solver against every plan.


def small(seed: int) -> QueueProblem:
    """Draw a queue with few enough plans to try them all."""
    draw = random.Random(seed)  # noqa: S311
    pools = tuple(PoolCapacity(f"p{i}", draw.randint(1, 3), draw.choice([1, 2, 4])) for i in range(draw.randint(2, 3)))
    speeds = [draw.uniform(0.5, 4) for _ in pools]
    jobs = []
    for index in range(draw.randint(4, 6)):
        work = draw.uniform(1, 20)
        ways = [
            option(pool.name, gpus, seconds, seconds * gpus * draw.uniform(1, 3))
            for pool, speed in zip(pools, speeds, strict=True)
            for gpus in (1, 2, 4)
            if pool.can_hold(gpus) and draw.random() < 0.6
            for seconds in [work / speed / draw.uniform(0.7, 1.4) / gpus ** draw.uniform(0.5, 0.95)]
        ]
        if ways:
            due = draw.choice([None, draw.uniform(3, 30)])
            weight = draw.choice([1.0, 1.0, 2.0])
            jobs.append(job(f"j{index}", *ways, arrival_s=-draw.uniform(0, 5), weight=weight, deadline_s=due))
    return QueueProblem(tuple(jobs), pools)


def best_of_all(held: QueueColumns, policy: str) -> QueueScore:
    """Return the best score of all plans, simulating each combination of pool and jobs once."""

    @cache
    def of_pool(pool: int, chosen: tuple[tuple[int, int], ...]) -> tuple[float, Floats]:
        jobs, ways = np.array(chosen).T
        begin = simulate_start_times(held.pools[pool], PoolTasks(held.gpus[ways].tolist(), held.seconds[ways].tolist()))
        peaks, sums = POLICIES[policy].terms(held, jobs, ways, np.array(begin) + held.seconds[ways])
        finish = np.array(begin) + held.seconds[ways]
        missed = float((held.weight[jobs] * (finish > held.due[jobs])).sum())
        return -math.inf if peaks is None else float(peaks.max()), np.array([missed, *(item.sum() for item in sums)])

    def score(plan: tuple[int, ...]) -> QueueScore:
        pools: dict[int, list[tuple[int, int]]] = {}
        for row, way in enumerate(plan):
            pools.setdefault(int(held.pool[way]), []).append((row, way))
        parts = [of_pool(pool, tuple(chosen)) for pool, chosen in pools.items()]
        peak, sums = max(part[0] for part in parts), np.sum([part[1] for part in parts], axis=0)
        return tuple(sums) if peak == -math.inf else (sums[0], peak, *sums[1:])

    return min(
        score(plan) for plan in itertools.product(*(held.get_option_range(row) for row in range(len(held.weight))))
    )


@pytest.mark.parametrize("queues", [15, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.slow
def test_the_plan_is_close_to_the_best_there_is(policy: str, queues: int) -> None:
    behind = []
    for seed in range(queues):
        problem = small(seed)
        held = build_columns(check_problem(problem)[0])
        if math.prod(len(held.get_option_range(row)) for row in range(len(held.weight))) > MOST_PLANS:
            continue
        plan, best = solve(problem, policy), best_of_all(held, policy)
        deciding = POLICIES[policy].deciding
        assert plan.score[:deciding] == pytest.approx(best[:deciding])
        assert plan.bound is not None
        assert plan.bound <= best[deciding] * (1 + 1e-6)
        behind.append(plan.score[deciding] / best[deciding] - 1)
    assert len(behind) >= 0.8 * queues
    assert np.mean(behind) <= 0.01
    assert max(behind) <= 0.05


MOST_PLANS = 3000


def test_the_bound_reaches_the_plan_where_jobs_that_take_the_whole_pool_come_in_the_best_order() -> None:
    # Smith's order is the best, so that all of a gap is what the bound loses by dividing time.
    jobs = [job(f"j{index}", option("a", 1, 10.0 * 1.4**index), weight=1 + index % 3) for index in range(12)]
    jobs.sort(key=lambda item: item.options[0].seconds / item.weight)
    plan = solve(QueueProblem(tuple(jobs), (PoolCapacity("a", 1, 1),)))
    assert plan.gap == pytest.approx(0, abs=0.002)


def test_the_bound_knows_that_a_job_with_room_starts_now() -> None:
    # In a better order, the short job would start first.
    jobs = (job("long", option("a", 1, 10.0)), job("short", option("a", 1, 1.0), weight=5))
    problem = QueueProblem(jobs, (PoolCapacity("a", 1, 1),))
    plan, free = solve(problem), solve(problem, order="free")
    assert plan.score[1] == pytest.approx((10 + 5 * 11) / 6)
    assert plan.bound is not None and free.bound is not None
    assert plan.gap == pytest.approx(0, abs=0.01)
    assert free.bound <= free.score[1] * (1 + 1e-9) < plan.bound


@pytest.mark.parametrize("seed", range(24))
def test_no_plan_is_below_the_bound_that_knows_the_order(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    quotas = {"q": draw.randint(1, 4)} if seed % 3 == 0 else {}
    pools = tuple(
        PoolCapacity(
            f"p{i}", draw.randint(2, 3), draw.choice([1, 2, 4]), held_gpus=draw.choice([0, 0, 1]), quotas=quotas
        )
        for i in range(2)
    )
    jobs = []
    for index in range(5):
        work, power = draw.uniform(1, 20), draw.uniform(0.5, 1.0)
        ways = [
            option(pool.name, gpus, work * draw.uniform(0.5, 2) / gpus**power)
            for pool in pools
            for gpus in draw.sample((1, 2, 4, 8), 2)
        ]
        coming_s = draw.choice([-1.0, 0.0, draw.uniform(0, 5)]) if seed % 4 == 1 else -float(index)
        is_running = index < draw.choice([0, 2])
        jobs.append(
            job(f"j{index}", *ways, arrival_s=coming_s, weight=draw.choice([1.0, 5.0]), queue=draw.choice(["", "q"]),
                is_running=is_running, present=(ways[0].pool, ways[0].gpus) if is_running else None)
        )  # fmt: skip
    held = build_columns(check_problem(QueueProblem(tuple(jobs), pools))[0])
    plans = list(itertools.product(*(held.get_option_range(row) for row in range(len(held.weight)))))
    several = [
        Assignment(held, POLICIES["completion"], list(plan)) for plan in draw.sample(plans, min(len(plans), 300))
    ]
    best = min(several, key=lambda plan: plan.score[1])
    bound = bound_completion_in_order(held, float(best.finish.max()))
    if math.isfinite(best.score[1]):  # else a running job has more than its quota, and nothing says when it ends
        assert bound is not None and bound <= best.score[1] * (1 + 1e-6)


def test_a_running_job_on_parts_of_nodes_holds_them_and_bounds_know_it() -> None:
    """A job of 6 GPUs on nodes of 4 leaves no whole node of two, and one of three."""
    for nodes, starts in ((2, (0.0, 10.0)), (3, (0.0, 0.0))):
        long = job("long", option("a", 6, 10.0), is_running=True, present=("a", 6))
        problem = QueueProblem((long, job("next", option("a", 4, 1.0))), (PoolCapacity("a", nodes, 4),))
        plan = solve(problem)
        assert (plan.finish - [10.0, 1.0]).tolist() == pytest.approx(starts)
        assert plan.bound is not None and plan.bound <= plan.score[1] * (1 + 1e-9)
        ready = PoolTasks((6, 4), (10.0, 1.0), ready_s=(0.0, 0.0))
        assert simulate_start_times(problem.pools[0], ready) == pytest.approx(starts)
    assert simulate_start_times(PoolCapacity("a", 3, 4), PoolTasks((6, 6), (10.0, 1.0))) == [0.0, 10.0]


# Effects of a plan.


def fast_and_slow(count: int) -> QueueProblem:
    """Return a queue where half of the jobs are four times as fast on the first pool, the others hardly faster."""
    pools = (PoolCapacity("fast", 2, 1), PoolCapacity("slow", 2, 1))
    jobs = [job(f"j{i}", option("fast", 1, 10.0), option("slow", 1, 40.0 if i % 2 else 11.0)) for i in range(count)]
    return QueueProblem(tuple(jobs), pools)


def test_the_fast_pool_goes_to_those_that_gain_most() -> None:
    plan = solve(fast_and_slow(8))
    where = [plan.columns.options[item].pool for item in plan.option]
    assert where == ["slow", "fast"] * 4
    shown = build_report(plan)
    assert shown.plan.completion_s < min(held.completion_s for held in shown.references.values())


def test_who_pays_is_said_with_those_who_gain() -> None:
    shown = build_report(solve(fast_and_slow(4)))
    assert [place.payers for place in shown.job_times if place.gain_s < 0] == [("j3",)]


def test_the_same_queue_gets_the_same_plan() -> None:
    assert solve(small(3)).option == solve(small(3)).option


@pytest.mark.slow
def test_equal_jobs_share_pools_as_the_relaxation_says() -> None:
    pools = (PoolCapacity("a", 6, 1), PoolCapacity("b", 3, 1))
    ways = (option("a", 1, 10.0), option("b", 1, 20.0))
    plan = solve(QueueProblem(tuple(job(f"j{i:03}", *ways) for i in range(150)), pools))
    on_a = sum(plan.columns.options[item].pool == "a" for item in plan.option)
    assert on_a == pytest.approx(120, abs=3)


def test_jobs_that_differ_only_in_where_they_were_advised_are_one_class_of_the_relaxation() -> None:
    ways = option("p0", 1, 5.0), option("p0", 2, 3.0), option("p1", 1, 4.0)
    pools = PoolCapacity("p0", 2, 2), PoolCapacity("p1", 2, 2)
    places = [None, *[(way.pool, way.gpus) for way in ways]]
    jobs = [job(f"j{i}", *ways, present=places[i % 4], is_advised=i % 4 > 0) for i in range(8)]
    running = job("run", *ways, present=("p0", 1), is_running=True)
    held = build_columns(check_problem(QueueProblem((*jobs, running), pools))[0])
    classes = JobClasses.from_columns(held)
    assert [len(some) for some in classes.jobs] == [1, 8]
    assert len(set(held.kind.tolist())) == 5


def test_a_deadline_is_met_where_cost_decides() -> None:
    ways = (option("a", 1, 10.0, 9.0), option("b", 1, 20.0, 1.0))
    pools = (PoolCapacity("a", 1, 1), PoolCapacity("b", 1, 1))
    free = solve(QueueProblem((job("j", *ways),), pools), "cost")
    due = solve(QueueProblem((job("j", *ways, deadline_s=15.0),), pools), "cost")
    horizon = solve(QueueProblem((job("j", *ways),), pools, horizon_s=15.0), "cost")
    assert [plan.score[1] for plan in (free, due, horizon)] == [1, 9, 9]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_deadline_is_met_under_every_policy_and_a_late_job_says_what_would_help(policy: str) -> None:
    # Alone, the job would leave the fast pool to the other one, which is listed first and gains more there.
    pools = (PoolCapacity("a", 1, 1), PoolCapacity("b", 1, 1))
    first = job("first", option("a", 1, 10.0, 1.0), option("b", 1, 19.0, 9.0), arrival_s=-1.0)
    second = job("second", option("a", 1, 9.0, 9.0), option("b", 1, 12.0, 9.0), deadline_s=10.0)
    plan = solve(QueueProblem((first, second), pools), policy)
    assert dict(zip((item.name for item in plan.columns.problem.jobs), plan.finish, strict=True))["second"] == 9
    assert list_late_jobs(plan) == []
    hurried = replace(second, deadline_s=8.0), replace(first, deadline_s=5.0, options=first.options[:1])
    late = list_late_jobs(solve(QueueProblem(hurried, pools), policy))
    assert [(item.late_s, item.latest_start_s) for item in late] == [(5.0, -5.0), (4.0, -1.0)]


def large(seed: int, count: int) -> QueueProblem:
    """Draw a queue of malleable jobs that is too large to be annealed at once."""
    draw = random.Random(seed)  # noqa: S311
    pools = tuple(PoolCapacity(name, 4, 8) for name in "abc")
    jobs = []
    for index in range(count):
        work, power = 10 ** draw.uniform(0, 3), draw.uniform(0.6, 0.95)
        speed = {pool.name: draw.uniform(0.5, 4) for pool in pools}
        ways = [option(name, gpus, work / speed[name] / gpus**power) for name in speed for gpus in (1, 2, 4, 8, 16, 32)]
        jobs.append(job(f"j{index}", *ways, arrival_s=float(index - count), weight=float(draw.randint(1, 5))))
    return QueueProblem(tuple(jobs), pools)


@pytest.mark.parametrize("seed", range(3))
def test_no_move_of_one_job_improves_the_plan_of_a_larger_queue(seed: int) -> None:
    plan = solve(large(seed, 48))
    held = Assignment(plan.columns, plan.policy, list(plan.option))
    ways = ((row, way) for row in range(len(plan.option)) for way in plan.columns.get_option_range(row))
    gains = [1 - held.try_moves({row: way})[0][1] / plan.score[1] for row, way in ways if way != plan.option[row]]
    assert max(gains) <= 1e-9
    assert plan.gap is not None and plan.gap <= 0.06


def test_a_larger_queue_is_annealed_if_its_plan_may_be_far_from_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    values = []
    for far in (100.0, 0.0):
        monkeypatch.setattr("tilecast.planner.solver.FAR", far)
        values.append(solve(large(0, 48), effort=60_000).score[1])
    assert values[1] < 0.99 * values[0]


def test_a_free_order_starts_a_short_job_of_a_large_weight_first() -> None:
    long = job("long", option("a", 1, 100.0), arrival_s=-2.0)
    short = job("short", option("a", 1, 1.0), arrival_s=-1.0, weight=5.0)
    problem = QueueProblem((long, short), (PoolCapacity("a", 1, 1),))
    kueue, free = solve(problem), solve(problem, order="free")
    assert kueue.finish.tolist() == [100, 101]
    assert [item.name for item in free.columns.problem.jobs] == ["short", "long"]
    assert free.finish.tolist() == [1, 101]
    assert free.score[1] < kueue.score[1]
    # What Kueue would do without a plan does not change with the order of the plan.
    shown = [build_report(plan).references["ownBest"].completion_s for plan in (kueue, free)]
    assert shown[0] == pytest.approx(shown[1])
    gains = {place.gain_s for place in build_report(free).job_times}
    assert gains == {100.0, -1.0}


def test_references_of_a_free_order_are_kueues_for_jobs_that_were_created_at_once() -> None:
    jobs = [job("long", option("a", 1, 100.0)), job("short", option("a", 1, 1.0), weight=5.0)]
    problem = QueueProblem(tuple(jobs), (PoolCapacity("a", 1, 1),))
    kueue, free = (build_report(solve(problem, order=order)) for order in ("kueue", "free"))
    assert free.plan.completion_s < kueue.plan.completion_s
    for name, totals in kueue.references.items():
        assert free.references[name].completion_s == pytest.approx(totals.completion_s), name


def test_a_free_order_keeps_priorities_and_what_runs() -> None:
    pools = (PoolCapacity("a", 1, 1),)
    jobs = (
        job("low", option("a", 1, 1.0), weight=9.0),
        job("high", option("a", 1, 50.0), priority=1),
        job("runs", option("a", 1, 90.0), present=("a", 1), is_running=True),
    )
    plan = solve(QueueProblem(jobs, pools), order="free")
    assert [item.name for item in plan.columns.problem.jobs] == ["runs", "high", "low"]
    with pytest.raises(SpecError, match="order"):
        solve(QueueProblem(jobs, pools), order="random")


def test_a_higher_priority_starts_first() -> None:
    jobs = (job("low", option("a", 1, 5.0)), job("high", option("a", 1, 5.0), priority=1))
    plan = solve(QueueProblem(jobs, (PoolCapacity("a", 1, 1),)))
    assert [item.name for item in plan.columns.problem.jobs] == ["high", "low"]
    assert plan.finish.tolist() == [5, 10]


# Changes of a plan, and parts that stay.


def two_pools(seconds: float, **others: object) -> QueueProblem:
    """Return a job at present on b, where it takes 10 s; on a it takes `seconds`."""
    pools = (PoolCapacity("a", 1, 1), PoolCapacity("b", 1, 1))
    ways = (option("a", 1, seconds), option("b", 1, 10.0))
    return QueueProblem((job("j", *ways, present=("b", 1), **others),), pools)


def test_nothing_moves_for_a_difference_that_no_forecast_can_tell() -> None:
    assert build_report(solve(two_pools(9.8))).solution.finish.tolist() == [10.0]
    assert build_report(solve(two_pools(5.0))).solution.finish.tolist() == [5.0]


def test_what_runs_moves_only_where_its_owner_lets_it_and_the_gain_is_beyond_the_range() -> None:
    assert solve(two_pools(5.0, is_running=True)).finish.tolist() == [10.0]
    assert solve(two_pools(5.0, is_running=True, move_s=4.5)).finish.tolist() == [10.0]
    assert solve(two_pools(5.0, is_running=True, move_s=1.0)).finish.tolist() == [6.0]


@pytest.mark.slow
def test_a_queue_that_is_planned_stays_as_it_is_when_one_job_arrives() -> None:
    pools = tuple(PoolCapacity(f"p{i}", 4, 2) for i in range(4))
    draw = random.Random(1)  # noqa: S311
    jobs = [
        job(f"j{i:03}", *(option(pool.name, 1, draw.uniform(5, 50)) for pool in pools), arrival_s=-200.0 + i)
        for i in range(120)
    ]
    before = solve(QueueProblem(tuple(jobs), pools))
    places = {item.name: before.columns.options[way] for item, way in zip(jobs, before.option, strict=True)}
    known = tuple(replace(item, present=(places[item.name].pool, places[item.name].gpus)) for item in jobs)
    after = solve(QueueProblem((*known, job("new", *(option(pool.name, 1, 9.0) for pool in pools))), pools))
    moved = sum(
        after.columns.options[way].pool != places[item.name].pool
        for item, way in zip(after.columns.problem.jobs, after.option, strict=True)
        if item.name in places
    )
    assert moved <= 3


# References.


def test_the_references_are_what_they_are_called() -> None:
    pools = (PoolCapacity("first", 1, 1), PoolCapacity("second", 1, 1))
    jobs = tuple(job(f"j{i}", option("first", 1, 20.0, 1.0), option("second", 1, 10.0, 5.0)) for i in range(3))
    held = build_columns(check_problem(QueueProblem(jobs, pools))[0])
    ends = {name: find(held).finish.tolist() for name, (_, find) in REFERENCES.items()}
    assert ends == {
        "ownBest": [10, 20, 30],
        "earliest": [10, 20, 20],
        "flavors": [20, 10, 20],
        "cheapest": [20, 40, 60],
    }


def test_kueue_lets_a_smaller_job_pass_and_keeps_to_quotas() -> None:
    pools = (PoolCapacity("a", 1, 2, quotas={"q": 1}), PoolCapacity("b", 1, 1))
    jobs = (
        job("one", option("a", 1, 10.0), queue="q"),
        job("two", option("a", 1, 10.0), queue="q"),
        job("big", option("a", 2, 10.0)),
        job("three", option("a", 1, 4.0), option("b", 1, 4.0)),
    )
    held = build_columns(check_problem(QueueProblem(jobs, pools))[0])
    assert REFERENCES["flavors"][1](held).finish.tolist() == [10, 20, 30, 4]


def test_a_share_of_the_cluster_is_what_fairness_is_measured_by() -> None:
    pools = (PoolCapacity("a", 2, 1), PoolCapacity("b", 2, 1))
    ways = (option("a", 1, 10.0), option("b", 1, 20.0))
    assert isolated_s(ways, pools, 1) == pytest.approx(10.0)
    # A quarter of each pool is half a GPU: half of the time on a, half on b.
    assert isolated_s(ways, pools, 4) == pytest.approx(1 / (0.5 / 10 + 0.5 / 20))


# Invalid input.


def test_what_cannot_be_planned_is_named_and_the_rest_is_planned() -> None:
    pools = (PoolCapacity("a", 1, 2, quotas={"none": 0}), PoolCapacity("empty", 0, 8), PoolCapacity("full", 1, 1, 1))
    jobs = (
        job("fits", option("a", 1, 5.0)),
        job("large", option("a", 4, 5.0)),
        job("nowhere", option("empty", 1, 5.0), option("full", 1, 5.0)),
        job("unknown", option("c", 1, 5.0)),
        job("quota", option("a", 1, 5.0), queue="none"),
        job("late", option("a", 1, 5.0), deadline_s=-3.0),
        job("never", option("a", 1, math.inf)),
        job("bare"),
    )
    plan = solve(QueueProblem(jobs, pools))
    assert [item.name for item in plan.columns.problem.jobs] == ["fits", "late"]
    problem_text = {item.job: item.problem for item in plan.refused}
    assert problem_text == {
        "large": "a has no place for 4 GPUs at once (1 nodes of 2)",
        "nowhere": "empty has no GPU free of others; full has no GPU free of others",
        "unknown": "there is no pool c",
        "quota": "queue none may have 0 GPUs of a, it takes 1",
        "late": "its deadline is past",
        "never": "a: the forecast of inf s is no time",
        "bare": "no pool can run it",
    }


@pytest.mark.parametrize(
    ("problem", "policy", "problem_text"),
    [
        (QueueProblem((), (PoolCapacity("a", -1, 8),)), "completion", "are no pool"),
        (QueueProblem((), (PoolCapacity("a", 1, 8, quotas={"q": -1}),)), "completion", "has a quota of -1"),
        (QueueProblem((), (PoolCapacity("a", 1, 8),) * 2), "completion", "2 are named a"),
        (QueueProblem((job("j"), job("j")), ()), "completion", "2 are named j"),
        (QueueProblem((), ()), "best", "is not known"),
        (QueueProblem((job("j", option("a", 1, 1.0, None)),), (PoolCapacity("a", 1, 1),)), "cost", "has no price"),
    ],
)
def test_what_is_no_queue_is_refused_in_one_line(problem: QueueProblem, policy: str, problem_text: str) -> None:
    with pytest.raises(SpecError, match=problem_text):
        solve(problem, policy)


def test_an_empty_queue_has_an_empty_plan() -> None:
    assert solve(QueueProblem((), (PoolCapacity("a", 1, 1),))).option == []


def test_an_option_that_another_beats_in_everything_is_not_looked_at() -> None:
    ways = (option("a", 1, 5.0, 1.0), option("a", 2, 6.0, 2.0), option("a", 2, 4.0, 2.0))
    able, _ = check_problem(QueueProblem((job("j", *ways),), (PoolCapacity("a", 1, 2),)))
    assert [(item.gpus, item.seconds) for item in able.jobs[0].options] == [(1, 5.0), (2, 4.0)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["completion", "makespan", "fairness"])
@pytest.mark.slow
def test_an_owner_orders_its_own_jobs_and_moves_nobody_elses(policy: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    pools = tuple(PoolCapacity(name, nodes, 8) for name, nodes in (("fast", 1), ("middle", 2), ("slow", 3)))
    jobs = []
    for number in range(18):
        seconds = float(draw.uniform(50, 500))
        options = tuple(
            JobOption(name, 8, seconds * factor, 0.9 * seconds * factor, 1.1 * seconds * factor)
            for name, factor in (("fast", 1.0), ("middle", 1.6), ("slow", 4.0))
        )
        jobs.append(QueuedJob(f"{number}", options, owner="ab"[number % 2], arrival_s=-float(100 - number)))
    weights = draw.choice([1e-6, 1.0, 1e6], size=len(jobs))
    weighed = [
        replace(job, own_weight=float(one) if job.owner == "b" else 1.0) for job, one in zip(jobs, weights, strict=True)
    ]
    before, after = (solve(QueueProblem(tuple(some), pools), policy) for some in (jobs, weighed))
    other = [number for number, job in enumerate(before.columns.problem.jobs) if job.owner == "a"]
    assert [after.option[number] for number in other] == [before.option[number] for number in other]
    assert all(after.finish[number] <= before.finish[number] + 1e-6 for number in other)
    own = np.array([job.own_weight for job in after.columns.problem.jobs])
    assert (own * after.finish).sum() <= (own * before.finish).sum() * (1 + 1e-9)


def test_the_job_that_its_owner_weighs_most_gets_the_place_of_another_of_its_own() -> None:
    pools = (PoolCapacity("fast", 1, 8), PoolCapacity("slow", 1, 8))
    options = tuple(JobOption(name, 8, s, 0.99 * s, 1.01 * s) for name, s in (("fast", 100.0), ("slow", 150.0)))
    jobs = tuple(QueuedJob(str(n), options, owner="a", own_weight=1e3 if n == 1 else 1.0) for n in range(2))
    solution = solve(QueueProblem(jobs, pools))
    assert [solution.columns.options[item].pool for item in solution.option] == ["slow", "fast"]
