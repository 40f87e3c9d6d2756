"""Laws of collective times, for every entry of the table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.collectives import ALL_REDUCE, COLLECTIVES, Group, all_gather, all_reduce
from tilecast.hardware import find_link, links

INTRA = [name for name, link in links().items() if not link.per_node]
INTER = [name for name, link in links().items() if link.per_node]


def group(ranks: float, local: float, node: float = 8) -> Group:
    return Group(np.array([ranks]), np.array([local]), np.array([node]))


def seconds(name: str, size: float, where: Group, intra: str = "nvlink4", inter: str = "infiniband-ndr-8x400") -> float:
    return float(COLLECTIVES[name](np.array([size]), where, find_link(intra), find_link(inter))[0])


@pytest.mark.parametrize("name", COLLECTIVES)
@given(
    size=st.floats(1, 1e10),
    nodes=st.sampled_from([1, 2, 16]),
    intra=st.sampled_from(INTRA),
    inter=st.sampled_from(INTER),
)
def test_never_faster_than_the_wire_and_never_slower_for_less(
    name: str, size: float, nodes: int, intra: str, inter: str
) -> None:
    where = group(8 * nodes, 8)
    took = seconds(name, size, where, intra, inter)
    assert np.isfinite(took)
    # In-switch reduction sends each byte once; every other algorithm needs at least (n-1)/n of the buffer.
    least = size * 0.5 / max(find_link(intra).bandwidth_bytes_per_s, find_link(inter).bandwidth_bytes_per_s)
    assert took > least
    assert seconds(name, size * 2, where, intra, inter) >= took


@pytest.mark.parametrize("local", [1, 2, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_group_that_spans_nodes_feels_the_network(name: str, local: int) -> None:
    fast, slow = (
        seconds(name, 1e8, group(8, local), "nvlink4", network) for network in ("infiniband-ndr-8x400", "ethernet-10")
    )
    assert slow > 5 * fast


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_rank_has_nobody_to_talk_to(name: str) -> None:
    assert seconds(name, 1e9, group(1, 1)) == 0.0


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_large_buffers_reach_the_bus_bandwidth_formula(name: str) -> None:
    """nccl-tests, doc/PERFORMANCE.md: bus bandwidth = factor x size / time."""
    link, size = find_link("nvlink3"), 4e9
    factor = {"all_reduce": 2 * 7 / 8}.get(name, 7 / 8)
    bus = factor * size / seconds(name, size, group(8, 8), "nvlink3")
    assert bus == pytest.approx(link.bandwidth_bytes_per_s * link.efficiency, rel=0.02)


def test_all_reduce_is_the_fastest_of_its_algorithms() -> None:
    size, where = np.geomspace(1e3, 1e9, 30), Group(np.full(30, 64.0), np.full(30, 8.0), np.full(30, 8.0))
    intra, inter = find_link("nvlink4"), find_link("infiniband-ndr-8x400")
    each = np.array([algorithm(size, where, intra, inter) for algorithm in ALL_REDUCE.values()])
    assert np.array_equal(all_reduce(size, where, intra, inter), each.min(axis=0))


def test_reduce_scatter_and_all_gather_together_are_a_ring_all_reduce() -> None:
    intra, inter, size = find_link("pcie4"), find_link("ethernet-25"), np.array([1e9])
    where = group(8, 8)
    both = 2 * all_gather(size, where, intra, inter)
    assert float(ALL_REDUCE["ring"](size, where, intra, inter)[0]) == pytest.approx(float(both[0]), rel=0.02)


def test_a_group_that_owns_the_node_has_the_whole_network() -> None:
    """Eight groups of one rank per node share what one group of eight ranks per node has alone."""
    alone = seconds("all_reduce", 1e9, group(32, 8))
    shared = seconds("all_reduce", 1e9, group(4, 1))
    assert shared > 4 * alone
