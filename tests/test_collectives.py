"""Laws of collective times, for every algorithm of the table, every link and every collective."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast import collectives, search, zoo
from tilecast.collectives import COLLECTIVES, RankGroup, TokenCopies, bandwidth_bound_s, dispatch_s
from tilecast.hardware import Link, NetworkTier, Pool, find_gpu, find_link, list_links
from tilecast.recomputation import Checkpointing
from tilecast.spec import ExpertOverlap, Plan, Plans, Workload
from tilecast.step.blocks import kernel_seconds

INTRA = [name for name, link in list_links().items() if not link.per_node]
INTER = [name for name, link in list_links().items() if link.per_node]
EACH = [(collective, name) for collective, record in COLLECTIVES.items() for name in record.algorithms]
GATHERS = ("all_gather", "reduce_scatter")
NDR = "infiniband-ndr-8x400"

sizes = st.floats(1, 1e10)
shapes = st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 16, 64]))
insides = st.sampled_from(INTRA)
networks = st.sampled_from(INTER)


def group(ranks: float, local: float, node: float = 8) -> RankGroup:
    return RankGroup(np.array([float(ranks)]), np.array([float(local)]), np.array([float(node)]))


def seconds(name: str, size: float, where: RankGroup, intra: str | Link = "nvlink4", inter: str | Link = NDR) -> float:
    pair = [find_link(link) if isinstance(link, str) else link for link in (intra, inter)]
    return float(collectives.fastest_collective_s(name, np.array([size]), where, *pair)[0])


@pytest.mark.parametrize(("collective", "name"), EACH)
@given(size=sizes, shape=shapes, intra=insides, inter=networks)
@pytest.mark.slow
def test_no_algorithm_beats_the_line_or_the_fastest_of_its_collective(
    collective: str, name: str, size: float, shape: tuple[int, int], intra: str, inter: str
) -> None:
    local, nodes = shape
    where, inside, network = group(local * nodes, local), find_link(intra), find_link(inter)
    if inside.beyond is not None:
        return
    took, twice = (
        float(COLLECTIVES[collective].algorithms[name](np.array([buffer]), where, inside, network)[0])
        for buffer in (size, 2 * size)
    )
    bound = float(bandwidth_bound_s(collective, np.array([size]), where, inside, network)[0])
    assert bound <= took <= twice
    assert seconds(collective, size, where, intra, inter) <= took


@pytest.mark.parametrize("collective", COLLECTIVES)
@given(size=sizes, shape=shapes, intra=insides, inter=networks)
@pytest.mark.slow
def test_some_algorithm_always_runs_and_more_bytes_take_longer(
    collective: str, size: float, shape: tuple[int, int], intra: str, inter: str
) -> None:
    local, nodes = shape
    took, twice = (
        seconds(collective, buffer, group(local * nodes, local), intra, inter) for buffer in (size, size * 2)
    )
    assert np.isfinite(took)
    assert (took > 0) == (local * nodes > 1)
    assert twice >= took


@given(size=sizes, shape=shapes, intra=insides, inter=networks)
def test_reducing_for_all_costs_no_less_than_reducing_for_one(
    size: float, shape: tuple[int, int], intra: str, inter: str
) -> None:
    local, nodes = shape
    inside, network, buffer = find_link(intra), find_link(inter), np.array([size])
    where = group(local * nodes, local)
    ring = COLLECTIVES["all_reduce"].algorithms["ring"](buffer, where, inside, network)
    assert ring >= COLLECTIVES["reduce_scatter"].algorithms["ring"](buffer, where, inside, network)
    alone = group(local, local)
    assert seconds("all_reduce", size, alone, intra, inter) >= seconds("reduce_scatter", size, alone, intra, inter)


@pytest.mark.parametrize("local", [1, 2, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_group_that_spans_nodes_feels_the_network(name: str, local: int) -> None:
    fast, slow = (seconds(name, 1e8, group(8, local), "nvlink4", network) for network in (NDR, "ethernet-10"))
    assert slow > 5 * fast


@pytest.mark.parametrize(("collective", "name"), EACH)
def test_one_rank_has_nobody_to_talk_to(collective: str, name: str) -> None:
    one = COLLECTIVES[collective].algorithms[name](np.array([1e9]), group(1, 1), find_link("nvlink4"), find_link(NDR))
    assert float(one[0]) == 0.0


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_large_buffers_reach_the_bus_bandwidth_formula(name: str) -> None:
    """nccl-tests, doc/PERFORMANCE.md: bus bandwidth = factor x size / time. A rank's own part costs some of it."""
    link, size = replace(find_link("nvlink3"), own_share=0.0), 4e9
    factor = {"all_reduce": 2 * 7 / 8}.get(name, 7 / 8)
    bus = factor * size / seconds(name, size, group(8, 8), link)
    assert bus == pytest.approx(link.bandwidth_bytes_per_s * link.efficiency, rel=0.02)
    with_own = factor * size / seconds(name, size, group(8, 8), "nvlink3")
    assert 0.9 * bus < with_own < bus


def test_reduce_scatter_and_all_gather_together_are_a_ring_all_reduce() -> None:
    intra, inter, size = find_link("pcie4"), find_link("ethernet-25"), np.array([1e9])
    both = sum(seconds(name, 1e9, group(8, 8), intra, inter) for name in GATHERS)
    ring = COLLECTIVES["all_reduce"].algorithms["ring"](size, group(8, 8), intra, inter)
    assert float(ring[0]) == pytest.approx(both, rel=0.02)


def test_a_group_that_owns_the_node_has_the_whole_network() -> None:
    """Eight groups of one rank per node share the network that one group of eight ranks per node has to itself."""
    alone = seconds("all_gather", 1e9, group(32, 8), inter="infiniband-edr-4x100")
    shared = seconds("all_gather", 1e9, group(4, 1), inter="infiniband-edr-4x100")
    assert shared > 4 * alone


def test_one_gpu_drives_its_own_interface_and_not_the_others() -> None:
    alone, eight = (seconds("send_recv", 1e9, group(2, 1, node)) for node in (1, 8))
    assert alone == pytest.approx(eight)
    one_port = replace(find_link(NDR), nics=1)
    assert seconds("send_recv", 1e9, group(2, 1, 1), inter=one_port) < alone / 7


def test_small_buffers_go_by_tree_and_large_ones_by_ring_or_switch() -> None:
    """The expected order is that of NCCL's cost model over 64 nodes."""
    where, inter = group(512, 8), find_link(NDR)

    def order(size: float, intra: str) -> list[str]:
        seconds = {
            name: float(run(np.array([size]), where, find_link(intra), inter)[0])
            for name, run in COLLECTIVES["all_reduce"].algorithms.items()
        }
        return sorted(seconds, key=seconds.__getitem__)

    assert order(1e4, "nvlink3")[0] == "tree"
    assert order(1e10, "nvlink3")[0] == "ring"
    assert order(1e4, "nvlink3")[-1] == "nvls"
    assert order(2e9, "nvlink4")[0] in ("nvls", "ring")


def test_trees_beat_rings_where_every_node_has_one_rank() -> None:
    size, where = np.array([1e4]), group(64, 1)
    ring, pat = (
        COLLECTIVES["all_gather"].algorithms[name](size, where, find_link("nvlink4"), find_link(NDR))
        for name in ("ring", "pat")
    )
    assert pat < ring


def test_bridged_pairs_fall_back_to_the_bus() -> None:
    pair, bus = find_link("nvlink4-pair"), find_link("pcie5")
    assert seconds("all_reduce", 1e8, group(2, 2), pair) < seconds("all_reduce", 1e8, group(2, 2), bus) / 3
    four = seconds("all_reduce", 1e8, group(4, 4), pair)
    assert seconds("all_reduce", 1e8, group(4, 4), replace(bus, domain=2)) == four
    assert four < seconds("all_reduce", 1e8, group(4, 4), bus)


def test_gpus_wired_without_a_switch_are_faster_the_more_take_part() -> None:
    two, four = (seconds("all_gather", 1e9, group(n, n), "nvlink3-board") * n / (n - 1) for n in (2, 4))
    assert two > 2 * four
    assert seconds("all_gather", 1e9, group(4, 4), "nvlink3-board") == seconds(
        "all_gather", 1e9, group(4, 4), "nvlink3"
    )


def test_an_oversubscribed_tier_slows_exchanges_and_not_rings() -> None:
    """A ring crosses a leaf's uplinks once; an all-to-all crosses them with all of the leaf's nodes at once."""
    flat = find_link(NDR)
    tiered = replace(flat, tiers=(NetworkTier(8, 4.0),))
    ratio = {
        name: seconds(name, 1e9, group(256, 8), inter=tiered) / seconds(name, 1e9, group(256, 8), inter=flat)
        for name in ("all_gather", "all_to_all")
    }
    assert ratio["all_gather"] == 1.0
    assert 2.5 < ratio["all_to_all"] < 4
    inside_leaf = group(64, 8)
    assert seconds("all_to_all", 1e9, inside_leaf, inter=tiered) == seconds("all_to_all", 1e9, inside_leaf, inter=flat)


@given(size=sizes, nodes=st.sampled_from([1, 2, 8]), fanout=st.floats(1, 8))
def test_copies_that_share_a_node_cross_the_network_once(size: float, nodes: int, fanout: float) -> None:
    where, intra, inter = group(8 * nodes, 8), find_link("nvlink4"), find_link(NDR)
    once, each = (
        dispatch_s(np.array([size]), where, intra, inter, TokenCopies(fanout), how) for how in ("deepEP", "allToAll")
    )
    assert once <= each


@given(places=st.sampled_from([1, 2, 4, 8, 16, 64]), fanout=st.integers(1, 16), top=st.integers(1, 8))
def test_a_token_goes_to_no_more_places_than_it_has_copies_or_groups(places: int, fanout: int, top: int) -> None:
    limited, free = (TokenCopies(fanout, 8, groups).count_distinct(np.array([float(places)])) for groups in (top, 8))
    assert 1 - 1e-9 <= limited <= free * (1 + 1e-9)
    assert free <= min(places, fanout) * (1 + 1e-9)
    if places == 8:
        assert limited <= top * (1 + 1e-9)


def test_a_gather_of_tokens_costs_as_many_copies_as_there_are_ranks() -> None:
    where, intra, inter = group(8, 8), find_link("nvlink4"), find_link(NDR)
    copies = TokenCopies(2.0)
    gathered = dispatch_s(np.array([2e8]), where, intra, inter, copies, "allGather")
    assert gathered == seconds("all_gather", 8e8, where)
    assert gathered > dispatch_s(np.array([2e8]), where, intra, inter, copies, "allToAll")


@given(size=st.floats(1e8, 1e10), ranks=st.integers(3, 64))
def test_a_stale_parameter_server_beats_the_ring_from_half_as_many_servers_as_workers(size: float, ranks: int) -> None:
    """max(S/B, n S/(q B)) and 2 (n-1)/n S/B are equal at q = n^2 / (2 (n-1)) servers."""
    where, intra, inter = group(ranks, 1, 1), find_link("nvlink4"), replace(find_link("ethernet-10"), peer_s=1e-9)
    free = {name: replace(one, start_s=1e-12, hop_s=1e-12) for name, one in inter.protocols.items()}
    inter, buffer, meet = replace(inter, protocols=free), np.array([size]), ranks**2 / (2 * (ranks - 1))
    ring = COLLECTIVES["all_reduce"].algorithms["ring"](buffer, where, intra, inter)
    server = collectives.asynchronous_parameter_server
    assert server(buffer, where, intra, inter, servers=1.01 * meet) < ring
    assert server(buffer, where, intra, inter, servers=0.99 * meet) > ring


@given(ranks=st.integers(4, 256), links_=st.sampled_from(INTER))
def test_a_synchronous_parameter_server_wins_small_and_loses_large(ranks: int, links_: str) -> None:
    """The server has two hops where the ring has 2 (n-1), and sends 2 S where the ring sends 2 (n-1)/n S.

    With as many servers as workers there is one size below which the server is faster and above which the ring is.
    """
    where, intra, inter = group(ranks, 1, 1), find_link("nvlink4"), find_link(links_)
    buffer = np.geomspace(1, 1e13, 200)
    many = RankGroup(*(np.full(200, column[0]) for column in (where.ranks, where.local, where.node_ranks)))
    ring = COLLECTIVES["all_reduce"].algorithms["ring"](buffer, many, intra, inter)
    server = collectives.synchronous_parameter_server(buffer, many, intra, inter, servers=float(ranks))
    faster = server < ring
    assert faster[0]
    assert not faster[-1]
    assert np.all(collectives.asynchronous_parameter_server(buffer, many, intra, inter, float(ranks)) <= server)


def test_another_micro_batch_hides_the_exchange_of_experts_but_for_the_multiprocessors_it_takes() -> None:
    pool = Pool("h100-sxm", find_gpu("h100-sxm"), 8, 4, find_link("nvlink4"), find_link(NDR))
    plans = Plans.from_plans(Plan(data=32, expert=32, zero_stage=1, gradient_accumulation=8))
    job = Workload(zoo.find_preset("qwen3-30b-a3b"), 4096, 256, framework="megatron")

    def parts(overlap: ExpertOverlap) -> tuple[float, float]:
        times = search.price(replace(job, expert_overlap=overlap), plans, pool).times
        return float(times.communication[0]), float(times.compute[0])

    (plain, compute), (beside, same) = parts("none"), parts("microBatch")
    assert compute == same
    assert 0 < beside < plain


@pytest.mark.parametrize("checkpointing", ["none", "full", "layernorm+moe_act", "moe"])
def test_shared_experts_hide_of_each_exchange_what_their_half_takes(checkpointing: Checkpointing) -> None:
    pool = Pool("h100-sxm", find_gpu("h100-sxm"), 8, 4, find_link("nvlink4"), find_link(NDR))
    plan = Plan(data=32, expert=32, zero_stage=1, gradient_accumulation=8, checkpointing=checkpointing)
    job = Workload(zoo.find_preset("deepseek-v3"), 4096, 256, framework="megatron")

    def parts(model: str, overlap: ExpertOverlap) -> tuple[float, float]:
        some = replace(job, model=zoo.find_preset(model), expert_overlap=overlap)
        times = search.price(some, Plans.from_plans(plan), pool).times
        return float(times.communication[0]), float(times.compute[0])

    (plain, compute), (beside, same) = (parts("deepseek-v3", one) for one in ("none", "sharedExpert"))
    assert compute == same
    assert 0 < beside < plain
    # A model without a shared MLP has nothing to run beside the exchange.
    assert parts("qwen3-30b-a3b", "sharedExpert") == parts("qwen3-30b-a3b", "none")
    # What is hidden is at most the shared MLP itself: the step without its operators is no shorter.
    sharded = zoo.build_sharded_graph(job, Plans.from_plans(plan))
    priced = kernel_seconds(job, sharded, pool.gpu)
    layers = sum(float(sum(one.shared_s.values())[0]) * one.block.repeat for one in priced.blocks if one.shared_s)
    assert plain - beside < 8 * layers * (2 if checkpointing in ("full", "moe") else 1)
