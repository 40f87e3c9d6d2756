"""The Gantt charts of a queue's page: bars as high as the jobs' GPUs, and round moments."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilecast.render.gantt import assign_lanes, choose_ticks

JOB = st.tuples(st.integers(0, 50), st.integers(1, 30), st.integers(1, 64))
JOBS = st.lists(JOB.map(lambda job: (job[0], job[0] + job[1], job[2])), max_size=20).map(sorted)


@given(JOBS)
def test_jobs_that_run_at_once_share_no_lane(jobs: list[tuple[int, int, int]]) -> None:
    lanes = assign_lanes(jobs)
    for (_, _, gpus), pieces in zip(jobs, lanes, strict=True):
        assert sum(high - low for low, high in pieces) == gpus
    for index, (start, end, _) in enumerate(jobs):
        for other in range(index):
            if jobs[other][1] > start and jobs[other][0] < end:
                for low, high in lanes[index]:
                    assert all(high <= first or last <= low for first, last in lanes[other])


@given(JOBS)
def test_lanes_reach_no_higher_than_the_most_gpus_at_once(jobs: list[tuple[int, int, int]]) -> None:
    lanes = assign_lanes(jobs)
    most = max((sum(gpus for first, last, gpus in jobs if first <= start < last) for start, _, _ in jobs), default=0)
    assert max((high for pieces in lanes for _, high in pieces), default=0) <= most


@given(st.floats(1.0, 1e9))
def test_moments_are_few_and_round(end_s: float) -> None:
    moments, unit = choose_ticks(end_s)
    size = {"s": 1, "min": 60, "h": 3600, "d": 86400}[unit]
    assert moments[0] == 0 and 1 <= len(moments) <= 10 and moments[-1] <= end_s * 1.001
    if len(moments) > 1:
        assert (moments[1] / size) % 1 == 0
