"""Time of collective operations among ranks: one pure function per algorithm, on columns.

The law is alpha-beta. It is evaluated for each of NCCL's protocols (LL, LL128, Simple), and the fastest one counts:

    start + hops · hop latency + max(bytes / rate inside the node, bytes / rate of the network)

An algorithm determines the hops of a message in sequence, and the bytes that the busiest rank and the busiest node
send. The link determines the rest (`tilecast.hardware.Link`). A collective takes the fastest of its algorithms, as
NCCL's own cost model chooses (nccl, src/graph/tuning.cc). `size_bytes` is the whole buffer of one rank: the gathered
output of an all-gather, the input of a reduce-scatter (nccl-tests, doc/PERFORMANCE.md).

Every function takes `size_bytes` and the columns of a `Group`, which broadcast, and returns seconds of that shape:
infinite if the algorithm cannot run, 0 for a single rank. None raises.

`seconds` is the usual entry point. `COLLECTIVES` lists every collective with its algorithms.
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
    """Communication groups as columns, whose shapes broadcast.

    `ranks` is the number of ranks in the group, and `local` the number of them in each node. `node_ranks` is the number
    of ranks that use the node's network at once. If one NVLink domain spans nodes, "node" means all nodes that it
    joins, and `joined` is their number.
    """

    ranks: Floats
    local: Floats
    node_ranks: Floats
    joined: Floats | float = 1.0

    @property
    def nodes(self) -> Floats:
        return self.ranks / self.local


@dataclass(frozen=True, slots=True)
class _LinkLoad:
    """Load that an algorithm puts on links: a number of sequential hops, and bytes inside the node and in the network.

    The busiest rank sends `near_bytes` inside its node. The ranks of the busiest node send `far_bytes` into the
    network.
    """

    near_hops: Floats
    far_hops: Floats
    near_bytes: Floats
    far_bytes: Floats
    scattered: bool = False
    """Whether every node sends to every other, so that all of them meet in the network's uplinks."""


def ring_all_reduce(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the time of a reduce-scatter and then an all-gather around one ring.

    It takes 2 (n-1) hops, and every rank sends 2 (n-1)/n S (Patarasuk and Yuan, JPDC 2009).
    """
    return _fastest_protocol_s(_compute_ring_load(size_bytes, group, intra, passes=2.0), group, intra, inter)


def tree_all_reduce(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the time of an all-reduce by a chain inside each node and a double binary tree between nodes.

    It takes 2 log2 N network hops (Sanders, Speck and Träff, 2009). A node sends twice the buffer: half of it up each
    of the two trees, and half of it down to two children in one of them. With two nodes, each sends the buffer once.
    """
    load = _LinkLoad(
        near_hops=2 * (group.local - 1),
        far_hops=2 * np.log2(np.maximum(group.nodes, 1.0)),
        near_bytes=2 * size_bytes / constants.shipped_constants().nccl.tree_share,
        far_bytes=np.where(group.nodes > 2, 2.0, 1.0) * size_bytes / constants.shipped_constants().nccl.tree_share,
    )
    return _fastest_protocol_s(load, group, intra, inter)


def hierarchical_all_reduce(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the time of an all-reduce in three phases that do not overlap (Horovod's hierarchical all-reduce).

    The phases are a reduce-scatter inside the node, a ring all-reduce of each 1/g of the buffer between nodes, and an
    all-gather inside the node.
    """
    inside = RankGroup(group.local, group.local, group.node_ranks, group.joined)
    near = _compute_ring_load(size_bytes, inside, intra, passes=2.0)
    nodes = np.maximum(group.nodes, 1.0)
    far_bytes = 2 * size_bytes * (nodes - 1) / nodes
    load = _LinkLoad(near.near_hops, 2 * (nodes - 1), near.near_bytes, far_bytes)
    return _fastest_protocol_s(load, group, intra, inter, overlapped=False)


def nvls_all_reduce(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the time of reduction and multicast in the NVLink switch, and a tree between nodes (NVLS and NVLSTree).

    A rank sends the buffer once and 1/g of the result. The time is infinite if no switch can reduce.
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
    """Return the time of an all-gather or reduce-scatter around one ring: n-1 hops, (n-1)/n S from every rank."""
    return _fastest_protocol_s(_compute_ring_load(size_bytes, group, intra, passes=1.0), group, intra, inter)


def pat_gather(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the time of an all-gather or reduce-scatter by parallel aggregated trees: log2 n hops.

    NCCL runs it with one rank per node and in the Simple protocol, at `pat_share` of the rate.
    """
    nil = np.zeros_like(group.ranks)
    wire = size_bytes * (group.ranks - 1) / np.maximum(group.ranks, 1.0) / constants.shipped_constants().nccl.pat_share
    load = _LinkLoad(nil, np.log2(np.maximum(group.ranks, 1.0)), nil, wire)
    seconds = _fastest_protocol_s(load, group, intra, inter, protocols=("simple",))
    return np.where((group.local > 1) & (group.ranks > 1), np.inf, seconds)


def flat_all_to_all(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the time of a pairwise exchange, in which every rank sends 1/n of its buffer to each other rank.

    Data for another node cross the network directly from the rank that has them.
    """
    away = size_bytes * (group.ranks - group.local) / np.maximum(group.ranks, 1.0)
    near = size_bytes * (group.local - 1) / np.maximum(group.ranks, 1.0)
    own = size_bytes * intra.own_share / np.maximum(group.ranks, 1.0)
    far = group.nodes > 1
    load = _LinkLoad(np.where(far, 0.0, 1.0), np.where(far, 1.0, 0.0), near + own, away * group.local, scattered=True)
    peers_s = (group.local - 1) * intra.peer_s + (group.ranks - group.local) * inter.peer_s
    return np.where(group.ranks > 1, _fastest_protocol_s(load, group, intra, inter) + peers_s, 0.0)


def two_level_all_to_all(size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the time of an exchange inside the node and then one message to each other node.

    The exchange inside the node collects the data for each other node (NCCL's PXN).
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
    """Copies of tokens that a router sends: `fanout` per token, to ranks in `top_groups` of `groups` equal groups.

    Groups are of neighbouring ranks, so that a limit on groups limits nodes (DeepSeek-V3, arXiv 2412.19437, section
    2.1.2: at most four nodes for each token).
    """

    fanout: float
    groups: float = 1.0
    top_groups: float = 1.0

    def count_distinct(self, destinations: Floats) -> Floats:
        """Return the expected number of different destinations (nodes or ranks) of a token's copies, (n,).

        `destinations` is the number of equal destinations. A token can only reach destinations with a group that its
        router chose. Each copy goes to one of these at random.
        """
        share = self.top_groups / self.groups
        reachable = destinations * (1 - (1 - share) ** np.maximum(self.groups / destinations, 1.0))
        reachable = np.maximum(np.where(share < 1, reachable, destinations), 1.0)
        return np.asarray(reachable * (1 - (1 - 1 / reachable) ** self.fanout))


def deduplicated_all_to_all(
    size_bytes: Floats, group: RankGroup, intra: Link, inter: Link, copies: TokenCopies
) -> Floats:
    """Return the time of an exchange in which a token crosses the network once for each node that has its experts.

    In that node, the token is forwarded once to each rank that has some of the experts, while other tokens still arrive
    (DeepEP, csrc/kernels/internode.cu; HybridEP). Inside one node, a token goes once to each of these ranks.
    `size_bytes` counts every copy.
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
    """Return the time to send one message from every rank to the next rank of a chain, which its slowest hop sets.

    That hop crosses the network if the group spans nodes. Then every rank of a node sends a message at once.
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
    """Return the time in which all workers push their gradients and then, after the last push, pull the sum.

    It is 2 max(S / B, w S / (q B')) for w workers that send at B and q servers, each on a separate node with a network
    of B' (Li et al., OSDI 2014; the bound of Jiang et al., OSDI 2020, for either phase).
    """
    return 2 * asynchronous_parameter_server(size_bytes, group, intra, inter, servers)


def asynchronous_parameter_server(
    size_bytes: Floats, group: RankGroup, intra: Link, inter: Link, servers: float | Floats = 1.0
) -> Floats:
    """Return the time between two updates of a worker if no worker waits for the others.

    Pushes of some workers fill one direction of the network while pulls of others fill the other: max(S / B, w S / (q
    B')) (Jiang et al., OSDI 2020, section 2).
    """
    served = size_bytes * group.ranks / servers
    share = _compute_network_bandwidth(group, inter) / inter.bandwidth_bytes_per_s
    far_bytes = np.maximum(size_bytes * group.local, served * share)
    nil, one = np.zeros_like(group.ranks), np.ones_like(group.ranks)
    return _fastest_protocol_s(_LinkLoad(nil, one, nil, far_bytes), group, intra, inter)


Algorithm = Callable[[Floats, RankGroup, Link, Link], Floats]

LeastBytes = Callable[[RankGroup, Link], tuple[Floats | float, Floats | float]]
"""Function from a group and its intra-node link to the shares of the buffer that a rank and that a node must send."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation: its algorithms by name, and the fewest bytes that any algorithm must send.

    Each algorithm takes (size_bytes, group, intra, inter) and returns seconds.
    """

    algorithms: Mapping[str, Algorithm]
    least_bytes: LeastBytes
    program: str = ""
    """Name of the program of nccl-tests that measures it, without `_perf`; empty if none does."""
    spellings: tuple[str, ...] = ()
    """Other names that tables use for it, with or without underscores."""


def _gather_bound(group: RankGroup, intra: Link) -> tuple[Floats, Floats]:
    return (group.local - 1) / group.ranks, (group.nodes - 1) / group.nodes


def _reduce_bound(group: RankGroup, intra: Link) -> tuple[Floats | float, Floats]:
    near = 1.0 if intra.reduction_bytes_per_s else 2 * (group.local - 1) / group.local
    return near, 2 * (group.nodes - 1) / group.nodes


def _all_to_all_bound(group: RankGroup, intra: Link) -> tuple[Floats, Floats]:
    return (group.local - 1) / group.ranks, group.local * (group.ranks - group.local) / group.ranks


def _send_bound(group: RankGroup, intra: Link) -> tuple[Floats, Floats]:
    far = group.nodes > 1
    return np.where(far, 0.0, 1.0), np.where(far, group.local, 0.0)


_GATHER: Mapping[str, Algorithm] = {"ring": ring_gather, "pat": pat_gather}
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(
        {
            "ring": ring_all_reduce,
            "tree": tree_all_reduce,
            "hierarchical": hierarchical_all_reduce,
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
"""Every collective by the name in nccl-tests, and parameter servers that wait for all workers or for none."""
PROGRAMS: Mapping[str, str] = {item.program: name for name, item in COLLECTIVES.items() if item.program}
"""Collectives by the name of nccl-tests' program, without `_perf`."""
SPELLINGS: Mapping[str, str] = {
    text: name
    for name, item in COLLECTIVES.items()
    if item.program
    for text in (name, name.replace("_", ""), *item.spellings)
}
"""Collectives by every name that tables use."""


def fastest_collective_s(collective: str, size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the time of the fastest algorithm of a collective, which is a key of `COLLECTIVES`."""
    return _price_by_domain(
        lambda link: np.minimum.reduce(
            [algorithm(size_bytes, group, link, inter) for algorithm in COLLECTIVES[collective].algorithms.values()]
        ),
        group,
        intra,
    )


def dispatch_s(
    size_bytes: Floats, group: RankGroup, intra: Link, inter: Link, copies: TokenCopies, dispatch: ExpertDispatch
) -> Floats:
    """Return the time in which tokens get to the ranks of their experts, or the results back, (n,).

    Args:
        size_bytes: bytes of every copy of a rank's tokens, (n,).
        group: the ranks.
        intra: the link inside a node.
        inter: the network.
        copies: copies of a token.
        dispatch: how they are sent. NCCL sends every copy. A gather brings all tokens to all ranks.
    """
    if dispatch == "allToAll":
        return fastest_collective_s("all_to_all", size_bytes, group, intra, inter)
    if dispatch == "allGather":
        return fastest_collective_s("all_gather", size_bytes / copies.fanout * group.ranks, group, intra, inter)
    return _price_by_domain(lambda link: deduplicated_all_to_all(size_bytes, group, link, inter, copies), group, intra)


def parameter_server_s(
    size_bytes: Floats, group: RankGroup, intra: Link, inter: Link, servers: float | Floats, *, waits: bool
) -> Floats:
    """Return the time of a parameter server on `servers` separate nodes.

    If `waits` is true, the server waits for all workers before it answers. Otherwise it waits for none.
    """
    law = synchronous_parameter_server if waits else asynchronous_parameter_server
    return _price_by_domain(lambda link: law(size_bytes, group, link, inter, servers), group, intra)


def bandwidth_bound_s(collective: str, size_bytes: Floats, group: RankGroup, intra: Link, inter: Link) -> Floats:
    """Return the seconds that any algorithm of a collective needs at line rate, as a lower bound.

    A rank must send some bytes inside its node, and a node must send some into the network. The bound is the larger
    of the two times that this takes.
    """
    near, away = COLLECTIVES[collective].least_bytes(group, intra)
    bound = np.maximum(
        near * size_bytes / intra.bandwidth_bytes_per_s, away * size_bytes / _compute_network_bandwidth(group, inter)
    )
    return np.where(group.ranks > 1, bound, 0.0)


def _compute_ring_load(size_bytes: Floats, group: RankGroup, intra: Link, *, passes: float) -> _LinkLoad:
    """Return the load of a ring that visits all ranks node by node and carries `passes` times the buffer.

    A rank also copies or adds its own chunk of the buffer.
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
    """Return the time of a load in its fastest protocol.

    Bytes inside the node and in the network move at once (`overlapped`), or one after the other. A protocol that one of
    the two links lacks is not available to the collective.
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
    """Return start, hop and share of p protocols, (3, p)."""
    return np.array([(one.start_s, one.hop_s, one.share) for one in protocols]).T.copy()


def _compute_bandwidth_fraction(group: RankGroup, intra: Link) -> Floats | float:
    """Return the fraction of the bandwidth of a node's link that each GPU of the group gets.

    A shared bus (PCIe without a switch per pair) carries n - 1 exchanges at once if n ranks use it. Each exchange is
    then slower by about the root of n - 1.
    """
    if intra.wired:
        counts, shares = zip(*intra.wired, strict=True)
        return np.asarray(np.interp(group.local, counts, shares), dtype=float)
    if intra.switched:
        return 1.0
    return np.asarray(np.maximum(group.local / max(intra.domain, 1) - 1, 1.0) ** -0.5, dtype=float)


def _compute_network_bandwidth(group: RankGroup, inter: Link, *, scattered: bool = False) -> Floats:
    """Return the network bandwidth that the group has in each of its nodes, per direction.

    All ranks that use the node's network share it equally, and a GPU drives only its own interfaces. In the uplinks of
    a tier, a ring or tree is the traffic of one node. A scattered exchange is the traffic of every node to nodes
    outside the tier.
    """
    part = np.minimum(group.local / group.node_ranks, group.local * inter.gpu_nics / (inter.nics * group.joined))
    rate = inter.bandwidth_bytes_per_s * group.joined * np.minimum(part, 1.0)
    for tier in inter.tiers:
        below = tier.nodes / group.joined
        outside = below * (1 - below / group.nodes) if scattered else 1.0
        slower = np.maximum(outside * tier.oversubscription / below, 1.0)
        rate = rate / np.where(group.nodes > below, slower, 1.0)
    return np.asarray(rate, dtype=float)


def _price_by_domain(price: Callable[[Link], Floats], group: RankGroup, intra: Link) -> Floats:
    """Return the result of `price` on the link inside the node, or on the link beyond it if the group is larger."""
    if intra.beyond is None:
        return price(intra)
    return np.where(group.local > intra.domain, price(intra.beyond), price(intra))
