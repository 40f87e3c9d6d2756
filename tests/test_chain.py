"""The best path through a chain and its best cut, compared with every path and every cut of small chains."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast import chain
from tilecast.chain import Chain


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    links, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([2, 5, 1000]))  # few levels make ties, many make none
    cost = rng.integers(1, levels + 1, (links, width)) / levels
    change = rng.integers(0, levels + 1, (max(links - 1, 0), width, width)) / levels / 2
    # Fast strategies hold more memory, so that the budget matters.
    memory = np.floor(1e9 * (1.2 - cost) * rng.uniform(0.5, 1.5, cost.shape))
    working = np.floor(rng.integers(0, levels + 1, cost.shape) * 1e9 / levels)
    if draw(st.booleans()) and width > 1:
        cost[rng.integers(links), rng.integers(width)] = np.inf
    least = memory.min(axis=1).sum()
    budget = least + draw(st.floats(0, 1)) * (memory.max(axis=1).sum() + working.max() - least)
    return Chain(cost, change, memory, working, float(budget))


def brute(one: Chain) -> float:
    """Return the least cost of any path that fits; infinite if none does."""
    every = (np.array(path) for path in itertools.product(range(one.cost.shape[1]), repeat=len(one.cost)))
    priced = (chain.price_strategies(one, path) for path in every)
    return min((cost for cost, held in priced if held <= one.budget), default=np.inf)


@settings(max_examples=300)
@given(one=chains())
@pytest.mark.slow
def test_the_path_is_the_best_of_all_paths_that_fit(one: Chain) -> None:
    path, best = chain.find_cheapest_path(one), brute(one)
    if path is None:
        assert best == np.inf
        return
    cost, held = chain.price_strategies(one, path.strategies)
    assert held <= one.budget
    assert (path.cost, path.memory) == (cost, held)
    assert path.cost == pytest.approx(best, rel=1e-11)
    assert path.bound == pytest.approx(path.cost, rel=1e-11)


@settings(max_examples=60)
@given(one=chains(), most=st.sampled_from([1, 2, 5]))
def test_with_few_labels_the_bound_still_holds(one: Chain, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "MOST_LABELS", most)
        path = chain.find_cheapest_path(one)
    best = brute(one)
    if path is not None:
        assert path.memory <= one.budget
        assert path.bound <= best * (1 + 1e-11)
        assert path.cost >= best * (1 - 1e-11)


@settings(max_examples=200)
@given(
    cost=st.lists(st.floats(0.01, 10), min_size=1, max_size=8),
    stages=st.integers(1, 4),
    held=st.lists(st.floats(0, 1), min_size=8, max_size=8),
    room=st.floats(0.5, 4),
)
@pytest.mark.slow
def test_the_cut_is_the_fairest_of_all_cuts_that_fit(
    cost: list[float], stages: int, held: list[float], room: float
) -> None:
    count = len(cost)
    upto = np.concatenate([[0.0], np.cumsum(held[:count])])
    # Earlier stages hold more micro-batches in flight.
    fits = np.array([(stages - stage) * (upto[None, :] - upto[:, None]) <= room for stage in range(stages)])
    every = [(0, *inner) for inner in itertools.combinations(range(1, count), stages - 1)] if count >= stages else []
    best = np.inf
    for first in every:
        ends = (*first[1:], count)
        if all(fits[stage, first[stage], ends[stage]] for stage in range(stages)):
            best = min(best, max(sum(cost[first[stage] : ends[stage]]) for stage in range(stages)))
    path = chain.find_stage_starts(np.array(cost), fits, stages)
    assert (path is None) == (best == np.inf)
    if path is not None:
        ends = [*path[1:], count]
        assert all(fits[stage, path[stage], ends[stage]] for stage in range(stages))
        assert max(sum(cost[path[stage] : ends[stage]]) for stage in range(stages)) == pytest.approx(best)
