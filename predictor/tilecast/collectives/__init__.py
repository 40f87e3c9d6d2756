"""Seconds of collective operations among ranks, with one pure function per algorithm.

The seconds follow the alpha-beta model. For each of NCCL's protocols (LL, LL128, Simple) they are

    start + hops · hop latency + max(bytes / rate inside the node, bytes / rate of the network)

and the fastest protocol counts. The algorithm determines the number of hops in sequence, the bytes that the busiest
rank sends inside its node, and the bytes that the busiest node sends. The link determines start, latency and rates
(`tilecast.hardware.Link`). A collective runs its fastest algorithm, as in NCCL's cost model (nccl,
src/graph/tuning.cc).

`size_bytes` is the whole buffer of one rank. This is the output of an all-gather, or the input of a reduce-scatter
(nccl-tests, doc/PERFORMANCE.md). `intra` is the link inside a node, and `inter` is the network. Every function takes
`size_bytes` and the columns of a `RankGroup`, which broadcast, and returns seconds of the broadcast shape. The seconds
are infinite if the algorithm cannot run, and 0 for a single rank. No function raises an exception.

`fastest_collective_s` is the usual entry point. `COLLECTIVES` lists every collective with its algorithms.
`link_calibration` fits the constants of a link to measured collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilecast import constants
from tilecast.hardware import MESSAGE, PROTOCOLS, Link, LinkProtocol
from tilecast.spec import ExpertDispatch, Floats


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Sizes of communication groups, as columns whose shapes broadcast.

    If an NVLink domain spans several nodes, all columns count these nodes as one node.
    """

    ranks: Floats
    """Number of ranks in the group."""
    local: Floats
    """Number of ranks of the group in each of its nodes."""
    node_ranks: Floats
    """Number of ranks of a node that use the network at the same time, also for other groups."""
    joined: Floats | float = 1.0
    """Number of nodes that an NVLink domain connects, or 1."""

    @property
    def nodes(self) -> Floats:
        """Number of nodes of the group."""
        return self.ranks / self.local


@dataclass(frozen=True, slots=True)
class _LinkLoad:
    """Hops and bytes of an algorithm. Names with `near` are inside the node, names with `far` in the network."""

    near_hops: Floats
    """Number of hops in sequence inside the node."""
    far_hops: Floats
    """Number of hops in sequence in the network."""
    near_bytes: Floats
    """Bytes that the busiest rank sends inside its node."""
    far_bytes: Floats
    """Bytes that the ranks of the busiest node together send into the network."""
    scattered: bool = False
    """Whether every node sends to every other node, so that the uplinks carry the traffic of all nodes."""


def ring_all_reduce(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the seconds of an all-reduce around one ring, as a reduce-scatter and then an all-gather.

    It takes 2 (n-1) hops. Every rank sends 2 (n-1)/n of the buffer (Patarasuk and Yuan, JPDC 2009).
    """
    return _fastest_protocol_s(_compute_ring_load(size_bytes, group, intra, passes=2.0), group, intra, inter)


def tree_all_reduce(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the seconds of an all-reduce with a chain inside each node and a double binary tree between nodes.

    It takes 2 log2 N hops in the network for N nodes (Sanders, Speck and Träff, 2009). A node sends half of the buffer
    up each of the two trees. In one tree it also sends half of the buffer down to each of two children. So a node sends
    two buffers. With two nodes, each node sends one buffer.
    """
    load = _LinkLoad(
        near_hops=2 * (group.local - 1),
        far_hops=2 * np.log2(np.maximum(group.nodes, 1.0)),
        near_bytes=2 * size_bytes / constants.shipped_constants().nccl.tree_share,
        far_bytes=np.where(group.nodes > 2, 2.0, 1.0) * size_bytes / constants.shipped_constants().nccl.tree_share,
    )
    return _fastest_protocol_s(load, group, intra, inter)


def nvls_all_reduce(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the seconds of an all-reduce in the NVLink switch, with a tree between nodes (NCCL's NVLS and NVLSTree).

    The switch adds and multicasts. Each of the g ranks of a node sends the whole buffer, and 1/g of the result. The
    seconds are infinite if the switch cannot reduce, or if a group has one rank in each of several nodes.
    """
    if not intra.reduction_bytes_per_s:
        return np.full(np.broadcast(size_bytes, group.ranks, group.local).shape, np.inf)
    simple = inter.protocols["simple"]
    network_s = simple.start_s + 2 * np.log2(np.maximum(group.nodes, 1.0)) * simple.hop_s
    near_s = size_bytes * (1 + 1 / group.local) / intra.reduction_bytes_per_s
    far_s = (
        np.where(group.nodes > 2, 2.0, 1.0) * size_bytes / (_compute_network_bandwidth(group, inter) * inter.efficiency)
    )
    far = group.nodes > 1
    seconds = intra.reduction_start_s + np.where(far, network_s + np.maximum(near_s, far_s), near_s)
    return np.where(group.ranks > 1, np.where(group.local > 1, seconds, np.inf), 0.0)


def ring_gather(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the seconds of an all-gather or reduce-scatter around one ring.

    It takes n-1 hops. Every rank sends (n-1)/n of the buffer.
    """
    return _fastest_protocol_s(_compute_ring_load(size_bytes, group, intra, passes=1.0), group, intra, inter)


def pat_gather(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the seconds of an all-gather or reduce-scatter with parallel aggregated trees (NCCL's PAT).

    It takes log2 n hops. NCCL runs it only with one rank per node and in the Simple protocol. It reaches the fraction
    `pat_share` of the rate.
    """
    nil = np.zeros_like(group.ranks)
    wire = size_bytes * (group.ranks - 1) / np.maximum(group.ranks, 1.0) / constants.shipped_constants().nccl.pat_share
    load = _LinkLoad(nil, np.log2(np.maximum(group.ranks, 1.0)), nil, wire)
    seconds = _fastest_protocol_s(load, group, intra, inter, protocols=("simple",))
    return np.where((group.local > 1) & (group.ranks > 1), np.inf, seconds)


def flat_all_to_all(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the seconds of an all-to-all in which every rank sends 1/n of its buffer directly to each other rank."""
    away = size_bytes * (group.ranks - group.local) / np.maximum(group.ranks, 1.0)
    near = size_bytes * (group.local - 1) / np.maximum(group.ranks, 1.0)
    own = size_bytes * intra.own_share / np.maximum(group.ranks, 1.0)
    far = group.nodes > 1
    load = _LinkLoad(np.where(far, 0.0, 1.0), np.where(far, 1.0, 0.0), near + own, away * group.local, scattered=True)
    peers_s = (group.local - 1) * intra.peer_s + (group.ranks - group.local) * inter.peer_s
    return np.where(group.ranks > 1, _fastest_protocol_s(load, group, intra, inter) + peers_s, 0.0)


def two_level_all_to_all(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the seconds of an all-to-all in two steps: inside each node, and then between nodes (NCCL's PXN).

    In the first step, the ranks of a node collect the data for each other node. In the second step, every rank sends
    one message to each other node. The seconds are infinite for a single node.
    """
    nodes = np.maximum(group.nodes, 1.0)
    away = size_bytes * (nodes - 1) / nodes
    near = size_bytes * (group.ranks - 1) / np.maximum(group.ranks, 1.0)
    load = _LinkLoad(np.ones_like(nodes), np.ones_like(nodes), near, away * group.local, scattered=True)
    peers_s = (group.local - 1) * intra.peer_s + (nodes - 1) * inter.peer_s
    seconds = _fastest_protocol_s(load, group, intra, inter, overlapped=False) + peers_s
    return np.where(group.ranks > 1, np.where(nodes > 1, seconds, np.inf), 0.0)


@dataclass(frozen=True, slots=True)
class TokenCopies:
    """Number of copies of each token that a router sends to experts, and the groups of ranks that it chooses from.

    The ranks of a group are neighbours. So a limit on groups also limits the nodes that a token reaches, for instance
    to four nodes (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    fanout: float
    """Copies of each token, one per chosen expert."""
    groups: float = 1.0
    """Number of equal groups into which ranks are divided."""
    top_groups: float = 1.0
    """Number of groups to which the copies of one token may go."""

    def count_distinct(self, destinations: Floats) -> Floats:
        """Return the expected number of different nodes, or of different ranks, that the copies of a token reach, (n,).

        `destinations` is the number of nodes or ranks over which experts are spread, (n,). A copy goes to a random
        destination among those that hold a chosen group.
        """
        share = self.top_groups / self.groups
        reachable = destinations * (1 - (1 - share) ** np.maximum(self.groups / destinations, 1.0))
        reachable = np.maximum(np.where(share < 1, reachable, destinations), 1.0)
        return np.asarray(reachable * (1 - (1 - 1 / reachable) ** self.fanout))


def deduplicated_all_to_all(
    size_bytes: Floats, group: RankGroup, intra: Link, inter: Link, copies: TokenCopies
) -> Floats:
    """Return the seconds of an all-to-all that sends a token at most once to each node and to each rank.

    A token crosses the network once per node that has some of its experts. In that node it is forwarded once to each
    rank that has some of its experts. Forwarding overlaps with the arrival of other tokens (DeepEP,
    csrc/kernels/internode.cu; HybridEP). `size_bytes` counts one copy of each token per expert.
    """
    nodes, ranks = np.maximum(group.nodes, 1.0), np.maximum(group.ranks, 1.0)
    token_bytes = size_bytes / copies.fanout
    away = token_bytes * copies.count_distinct(nodes) * (nodes - 1) / nodes
    near = token_bytes * copies.count_distinct(ranks) * (group.local - 1) / np.maximum(group.local, 1.0)
    far = group.nodes > 1
    hops = np.where(group.local > 1, 1.0, 0.0)
    load = _LinkLoad(hops, np.where(far, 1.0, 0.0), near, away * group.local, scattered=True)
    return _fastest_protocol_s(load, group, intra, inter)


def direct_send(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the seconds in which every rank sends one message of `size_bytes` to the next rank of a chain.

    The slowest message counts. If the group spans nodes, this message crosses the network, and all ranks of a node send
    at the same time.
    """
    far = group.nodes > 1
    one, nil = np.ones_like(group.ranks), np.zeros_like(group.ranks)
    sent = np.broadcast_to(size_bytes, np.broadcast(size_bytes, group.ranks).shape)
    load = _LinkLoad(
        np.where(far, nil, one),
        np.where(far, one, nil),
        np.where(far, 0.0, sent),
        np.where(far, sent * group.local, 0.0),
    )
    return _fastest_protocol_s(load, group, intra, inter, protocols=(*PROTOCOLS, MESSAGE))


def synchronous_parameter_server(
    size_bytes: Floats, group: RankGroup, intra: Link, inter: Link, servers: float | Floats = 1.0
) -> Floats:
    """Return the seconds in which all workers push their gradients to the servers and then pull the sum.

    The seconds are 2 max(S / B, w S / (q B')) for a buffer of S bytes, w workers with bandwidth B, and q servers on
    separate nodes with bandwidth B' (Li et al., OSDI 2014; the bound of Jiang et al., OSDI 2020, for either phase).
    """
    return 2 * asynchronous_parameter_server(size_bytes, group, intra, inter, servers)


def asynchronous_parameter_server(
    size_bytes: Floats, group: RankGroup, intra: Link, inter: Link, servers: float | Floats = 1.0
) -> Floats:
    """Return the seconds in which a worker pushes its gradients and pulls weights, if no worker waits for the others.

    The seconds are max(S / B, w S / (q B')), in the symbols of `synchronous_parameter_server` (Jiang et al., OSDI 2020,
    section 2). Pushes and pulls overlap, because they fill opposite directions of the network.
    """
    served = size_bytes * group.ranks / servers
    share = _compute_network_bandwidth(group, inter) / inter.bandwidth_bytes_per_s
    far_bytes = np.maximum(size_bytes * group.local, served * share)
    nil, one = np.zeros_like(group.ranks), np.ones_like(group.ranks)
    return _fastest_protocol_s(_LinkLoad(nil, one, nil, far_bytes), group, intra, inter)


Algorithm = Callable[[Floats, RankGroup, Link, Link], Floats]

LeastBytes = Callable[[RankGroup, Link], tuple[Floats | float, Floats | float]]
"""Function from a group and the link inside a node to two fractions of the buffer.

They are the fraction that a rank must send inside its node, and the fraction that a node must send into the network.
"""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation, with its algorithms and the share of the buffer that any algorithm must send."""

    algorithms: Mapping[str, Algorithm]
    """Functions from (size_bytes, group, intra, inter) to seconds, by name of the algorithm."""
    least_bytes: LeastBytes
    """Function that returns the fractions of the buffer that any algorithm must send."""
    program: str = ""
    """Program of nccl-tests that measures the collective, without `_perf`. It is empty if there is none."""
    spellings: tuple[str, ...] = ()
    """Other names of the collective in tables of measurements."""


def _gather_bound(group: RankGroup, intra: Link) -> tuple[Floats, Floats]:
    """Return the shares of the buffer that an all-gather or reduce-scatter must send, inside and between nodes.

    Both have the shape of `group`. `LeastBytes` describes them.
    """
    return (group.local - 1) / group.ranks, (group.nodes - 1) / group.nodes


def _reduce_bound(group: RankGroup, intra: Link) -> tuple[Floats | float, Floats]:
    """Return the shares of the buffer that an all-reduce must send, inside and between nodes (`LeastBytes`)."""
    near = 1.0 if intra.reduction_bytes_per_s else 2 * (group.local - 1) / group.local
    return near, 2 * (group.nodes - 1) / group.nodes


def _all_to_all_bound(group: RankGroup, intra: Link) -> tuple[Floats, Floats]:
    """Return the shares of the buffer that an all-to-all must send, inside and between nodes (`LeastBytes`)."""
    return (group.local - 1) / group.ranks, group.local * (group.ranks - group.local) / group.ranks


def _send_bound(group: RankGroup, intra: Link) -> tuple[Floats, Floats]:
    """Return the shares of the buffer that a send along a chain must send, inside and between nodes (`LeastBytes`)."""
    far = group.nodes > 1
    return np.where(far, 0.0, 1.0), np.where(far, group.local, 0.0)


_GATHER: Mapping[str, Algorithm] = {"ring": ring_gather, "pat": pat_gather}
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(
        {
            "ring": ring_all_reduce,
            "tree": tree_all_reduce,
            "nvls": nvls_all_reduce,
        },
        _reduce_bound,
        "all_reduce",
    ),
    "all_gather": Collective(_GATHER, _gather_bound, "all_gather"),
    "reduce_scatter": Collective(_GATHER, _gather_bound, "reduce_scatter"),
    "all_to_all": Collective(
        {"flat": flat_all_to_all, "two-level": two_level_all_to_all}, _all_to_all_bound, "alltoall"
    ),
    "send_recv": Collective({"direct": direct_send}, _send_bound, "sendrecv", ("p2p",)),
    "parameter_server": Collective(
        {"synchronous": synchronous_parameter_server}, lambda group, intra: (0.0, 2 * group.local)
    ),
    "stale_parameter_server": Collective(
        {"asynchronous": asynchronous_parameter_server}, lambda group, intra: (0.0, group.local)
    ),
}
"""Every collective by name. The last two are parameter servers, synchronous and asynchronous."""
PROGRAMS: Mapping[str, str] = {item.program: name for name, item in COLLECTIVES.items() if item.program}
"""Names of collectives, by program of nccl-tests without `_perf`."""
SPELLINGS: Mapping[str, str] = {
    text: name
    for name, item in COLLECTIVES.items()
    if item.program
    for text in (name, name.replace("_", ""), *item.spellings)
}
"""Names of collectives, by every name that tables of measurements use."""


def fastest_collective_s(collective: str, size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the seconds of a collective, a key of `COLLECTIVES`, with its fastest algorithm."""
    return _evaluate_by_domain(
        lambda link: np.minimum.reduce(
            [algorithm(size_bytes, group, link, inter) for algorithm in COLLECTIVES[collective].algorithms.values()]
        ),
        group,
        intra,
    )


def dispatch_s(
    size_bytes: Floats, group: RankGroup, intra: Link, inter: Link, copies: TokenCopies, dispatch: ExpertDispatch
) -> Floats:
    """Return the seconds in which tokens reach the ranks of their experts, (n,).

    The results of the experts take as long to return.

    Args:
        size_bytes: bytes of all tokens of a rank, counted once per chosen expert, (n,).
        group: the ranks that hold the experts.
        intra: the link inside a node.
        inter: the network.
        copies: number of copies of each token, and the groups of ranks that they may reach.
        dispatch: collective that sends the tokens. `allToAll` sends one copy per expert. `allGather` sends all tokens
            to all ranks. Other values send one copy per rank.
    """
    if dispatch == "allToAll":
        return fastest_collective_s("all_to_all", size_bytes, group, intra, inter)
    if dispatch == "allGather":
        return fastest_collective_s("all_gather", size_bytes / copies.fanout * group.ranks, group, intra, inter)
    return _evaluate_by_domain(
        lambda link: deduplicated_all_to_all(size_bytes, group, link, inter, copies), group, intra
    )


def parameter_server_s(
    size_bytes: Floats, group: RankGroup, intra: Link, inter: Link, servers: float | Floats, *, is_synchronous: bool
) -> Floats:
    """Return the seconds in which workers exchange gradients with parameter servers on `servers` separate nodes.

    Synchronous servers wait for the gradients of all workers before they answer.
    """
    exchange_s = synchronous_parameter_server if is_synchronous else asynchronous_parameter_server
    return _evaluate_by_domain(lambda link: exchange_s(size_bytes, group, link, inter, servers), group, intra)


def bandwidth_bound_s(collective: str, size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return a lower bound on the seconds of any algorithm of a collective, from bytes and bandwidth alone.

    A rank must send some bytes inside its node, and a node must send some bytes into the network. The bound is the
    larger one of these two times.
    """
    near, away = COLLECTIVES[collective].least_bytes(group, intra)
    bound = np.maximum(
        near * size_bytes / intra.bandwidth_bytes_per_s, away * size_bytes / _compute_network_bandwidth(group, inter)
    )
    return np.where(group.ranks > 1, bound, 0.0)


def _compute_ring_load(size_bytes: Floats, group: RankGroup, intra: Link, *, passes: float) -> _LinkLoad:
    """Return the hops and bytes of a ring that visits all ranks node by node, `passes` times.

    A rank also copies or adds 1/n of the buffer.
    """
    ranks = np.maximum(group.ranks, 1.0)
    far_hops = np.maximum(group.nodes - 1, 0)
    wire = passes * size_bytes * (ranks - 1) / ranks
    near = np.where(group.local > 1, wire + size_bytes * intra.own_share / ranks, 0.0)
    return _LinkLoad(passes * (ranks - 1 - far_hops), passes * far_hops, near, np.where(group.nodes > 1, wire, 0.0))


_ABSENT = LinkProtocol(np.inf, 0.0, 1.0)


def _fastest_protocol_s(
    load: _LinkLoad,
    group: RankGroup,
    intra: Link,
    inter: Link,
    *,
    overlapped: bool = True,
    protocols: tuple[str, ...] = PROTOCOLS,
) -> Floats:
    """Return the seconds that an algorithm's hops and bytes take in the fastest protocol that both links have.

    Args:
        load: hops and bytes of the algorithm.
        group: the ranks.
        intra: the link inside a node.
        inter: the network.
        overlapped: whether transfers inside the node and in the network overlap. Otherwise their seconds add up.
        protocols: names of the protocols that may be used.
    """
    near_s = load.near_bytes / (
        intra.bandwidth_bytes_per_s * intra.efficiency * _compute_bandwidth_fraction(group, intra)
    )
    far_s = load.far_bytes / (_compute_network_bandwidth(group, inter, scattered=load.scattered) * inter.efficiency)
    near, far = load.near_hops > 0, load.far_hops > 0
    together = np.maximum if overlapped else np.add
    # One row for each protocol, over all shapes that broadcast.
    axes = (1,) * np.broadcast(near_s, far_s, near, far, group.ranks).ndim
    table = _stack_protocols(tuple(link.protocols.get(name, _ABSENT) for link in (intra, inter) for name in protocols))
    starts, hops, shares = table.reshape(3, 2, -1, *axes)
    start_s = np.maximum(np.where(near, starts[0], 0.0), np.where(far, starts[1], 0.0))
    hops_s = load.near_hops * hops[0] + load.far_hops * hops[1]
    seconds = start_s + hops_s + together(near_s / shares[0], far_s / shares[1])
    return np.where(group.ranks > 1, seconds.min(axis=0), 0.0)


@lru_cache
def _stack_protocols(protocols: tuple[LinkProtocol, ...]) -> Floats:
    """Return `start_s`, `hop_s` and `share` of p protocols as rows of an array, (3, p)."""
    return np.array([(one.start_s, one.hop_s, one.share) for one in protocols]).T.copy()


def _compute_bandwidth_fraction(group: RankGroup, intra: Link) -> Floats | float:
    """Return the fraction of the link's bandwidth inside a node that each GPU of the group gets.

    On a shared bus (PCIe), n ranks make n - 1 exchanges at once. Each exchange is then slower by about the square root
    of n - 1.
    """
    if intra.wired:
        counts, shares = zip(*intra.wired, strict=True)
        return np.asarray(np.interp(group.local, counts, shares), dtype=float)
    if intra.switched:
        return 1.0
    return np.asarray(np.maximum(group.local / max(intra.domain, 1) - 1, 1.0) ** -0.5, dtype=float)


def _compute_network_bandwidth(group: RankGroup, inter: Link, *, scattered: bool = False) -> Floats:
    """Return the network bandwidth of the group in each of its nodes, in bytes per second and direction.

    All ranks that use a node's network share it equally. A GPU uses only its own network interfaces. A ring or tree
    loads the uplinks of a tier with the traffic of one node. If traffic is `scattered`, every node below a switch sends
    to every node outside, which loads the uplinks with the traffic of all nodes below the switch.
    """
    part = np.minimum(group.local / group.node_ranks, group.local * inter.gpu_nics / (inter.nics * group.joined))
    rate = inter.bandwidth_bytes_per_s * group.joined * np.minimum(part, 1.0)
    for tier in inter.tiers:
        below = tier.nodes / group.joined
        outside = below * (1 - below / group.nodes) if scattered else 1.0
        slower = np.maximum(outside * tier.oversubscription / below, 1.0)
        rate = rate / np.where(group.nodes > below, slower, 1.0)
    return np.asarray(rate, dtype=float)


def _evaluate_by_domain(seconds_on: Callable[[Link], Floats], group: RankGroup, intra: Link) -> Floats:
    """Return the seconds of groups, (n,), on the link inside a node, or beyond its domain for larger groups.

    Args:
        seconds_on: function from a link to the seconds of the groups on this link.
        group: the ranks.
        intra: the link inside a node.
    """
    if intra.beyond is None:
        return seconds_on(intra)
    return np.where(group.local > intra.domain, seconds_on(intra.beyond), seconds_on(intra))
