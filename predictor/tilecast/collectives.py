"""Time of collective operations among ranks: one pure function per algorithm, on columns.

The law is alpha-beta with the choice NCCL makes between its protocols. A collective of buffer S over n
ranks, g of them in each node, costs

    launch + hops · latency + wire / rate,      rate = min(bulk after its ramp, low-latency at once)

where `wire` is what each rank sends: 2 (n-1)/n S for a ring all-reduce, (n-1)/n S for all-gather,
reduce-scatter and all-to-all, S for send/recv (bus-bandwidth factors of nccl-tests, doc/PERFORMANCE.md).
When the ranks span nodes the ring crosses the network once per node, so the rate is the lesser of the
GPU's link and the group's share of the node's network interfaces: g of the node's GPUs are in this group
and the other groups use the rest at the same time. `size_bytes` is the whole buffer of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tilecast.hardware import Link
from tilecast.spec import Floats


@dataclass(frozen=True, slots=True)
class Group:
    """Communication groups as columns: `ranks` in the group, `local` of them in each node, of
    `node_ranks` ranks that use the node's network at once. Shapes broadcast."""

    ranks: Floats
    local: Floats
    node_ranks: Floats

    @property
    def nodes(self) -> Floats:
        return self.ranks / self.local


def ring_all_reduce(size_bytes: Floats, group: Group, intra: Link, inter: Link) -> Floats:
    """Reduce-scatter then all-gather around one ring: 2 (n-1) hops, 2 (n-1)/n S on the wire."""
    return _ring(size_bytes, group, intra, inter, passes=2.0)


def tree_all_reduce(size_bytes: Floats, group: Group, intra: Link, inter: Link) -> Floats:
    """A chain inside the node and a double binary tree between nodes: 2 log2(nodes) network hops, 2 S on
    the wire. What NCCL prefers at scale for small buffers."""
    hops_s = 2 * (group.local - 1) * intra.latency_s + 2 * np.log2(np.maximum(group.nodes, 1)) * inter.latency_s
    return _launch(group, intra, inter) + hops_s + _wire(2 * size_bytes, group, intra, inter)


def switch_all_reduce(size_bytes: Floats, group: Group, intra: Link, inter: Link) -> Floats:
    """Reduction in the NVLink switch (NVLS), inside one node; infinite where there is none."""
    if not intra.reduction_bytes_per_s:
        return np.full(np.broadcast(size_bytes, group.ranks).shape, np.inf)
    seconds = intra.launch_s + group.local * intra.latency_s + intra.ramp_s + size_bytes / intra.reduction_bytes_per_s
    return np.where(group.nodes > 1, np.inf, seconds)


def all_reduce(size_bytes: Floats, group: Group, intra: Link, inter: Link) -> Floats:
    """The fastest of ring, tree and switch."""
    found = [algorithm(size_bytes, group, intra, inter) for algorithm in ALL_REDUCE.values()]
    return np.where(group.ranks > 1, np.minimum.reduce(found), 0.0)


def all_gather(size_bytes: Floats, group: Group, intra: Link, inter: Link) -> Floats:
    """Ring all-gather; `size_bytes` is the gathered buffer. Reduce-scatter costs the same."""
    return np.where(group.ranks > 1, _ring(size_bytes, group, intra, inter, passes=1.0), 0.0)


def all_to_all(size_bytes: Floats, group: Group, intra: Link, inter: Link) -> Floats:
    """Pairwise exchange: (n-1)/n of the buffer leaves the rank, of which the share for other nodes goes
    through the network, of which every rank of the node has an equal part."""
    away = size_bytes * (group.ranks - group.local) / np.maximum(group.ranks, 1)
    near = size_bytes * (group.local - 1) / np.maximum(group.ranks, 1)
    network = np.where(group.nodes > 1, _rate_time(away, inter, inter.bandwidth_bytes_per_s / group.node_ranks), 0.0)
    inside = _rate_time(near, intra, intra.bandwidth_bytes_per_s * np.ones_like(group.ranks))
    latency_s = np.where(group.nodes > 1, inter.latency_s, intra.latency_s)
    seconds = _launch(group, intra, inter) + (group.ranks - 1) * latency_s * 0.5 + np.maximum(network, inside)
    return np.where(group.ranks > 1, seconds, 0.0)


def dispatch(size_bytes: Floats, group: Group, intra: Link, inter: Link, fanout: float) -> Floats:
    """Two-level all-to-all of data that go to `fanout` ranks each: a datum crosses the network once per node that
    holds any of its ranks and is copied inside. With independent ranks it reaches N (1 - (1 - 1/N)^fanout) of N
    nodes. Never slower than the flat exchange of all copies, which is what `size_bytes` counts."""
    flat = all_to_all(size_bytes, group, intra, inter)
    nodes = np.maximum(group.nodes, 1.0)
    reached = nodes * (1 - (1 - 1 / nodes) ** fanout)
    away = size_bytes / fanout * reached * (nodes - 1) / nodes
    near = size_bytes * (group.ranks - 1) / np.maximum(group.ranks, 1)
    network = _rate_time(away, inter, inter.bandwidth_bytes_per_s / group.node_ranks)
    inside = _rate_time(near, intra, intra.bandwidth_bytes_per_s * np.ones_like(group.ranks))
    launch = _launch(group, intra, inter) + nodes * inter.latency_s + group.local * intra.latency_s
    return np.where(nodes > 1, np.minimum(flat, launch + network + inside), flat)


def send_recv(size_bytes: Floats, group: Group, intra: Link, inter: Link) -> Floats:
    """One message from a rank to the next, at the pace of the slowest hop of the chain: over the network as soon
    as the group spans nodes, where every rank of the node has an equal part of it."""
    crosses = group.ranks > group.local
    rate = np.where(crosses, inter.bandwidth_bytes_per_s / group.node_ranks, intra.bandwidth_bytes_per_s)
    seconds = np.where(
        crosses,
        inter.launch_s + inter.latency_s + _rate_time(size_bytes, inter, rate),
        intra.launch_s + intra.latency_s + _rate_time(size_bytes, intra, rate),
    )
    return np.where(group.ranks > 1, seconds, 0.0)


Algorithm = Callable[[Floats, Group, Link, Link], Floats]

ALL_REDUCE: Mapping[str, Algorithm] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "switch": switch_all_reduce,
}

COLLECTIVES: Mapping[str, Algorithm] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": all_gather,
    "all_to_all": all_to_all,
    "send_recv": send_recv,
}
"""Every collective by nccl-tests' name; each takes (size_bytes, group, intra, inter) and returns seconds."""


def _ring(size_bytes: Floats, group: Group, intra: Link, inter: Link, *, passes: float) -> Floats:
    network_hops = np.where(group.nodes > 1, group.nodes, 0.0)
    inside_hops = group.ranks - 1 - np.maximum(network_hops - 1, 0)
    hops_s = passes * (inside_hops * intra.latency_s + np.maximum(network_hops - 1, 0) * inter.latency_s)
    wire = passes * size_bytes * (group.ranks - 1) / np.maximum(group.ranks, 1)
    seconds: Floats = _launch(group, intra, inter) + hops_s + _wire(wire, group, intra, inter)
    return seconds


def _wire(wire_bytes: Floats, group: Group, intra: Link, inter: Link) -> Floats:
    """Seconds to move the bytes around the ring: the slower of the GPU's link and the network."""
    # On a shared bus (PCIe without a switch per pair) every further rank halves what a pair gets: with two
    # ranks the bus serves one exchange, with n ranks n - 1 of them.
    sharing = 1.0 if intra.switched else np.maximum(group.local - 1, 1.0) ** 0.5
    inside = np.where(group.local > 1, _rate_time(wire_bytes, intra, intra.bandwidth_bytes_per_s / sharing), 0.0)
    network = np.where(group.nodes > 1, _rate_time(wire_bytes, inter, _share(group, inter)), 0.0)
    return np.maximum(inside, network)


def _rate_time(wire_bytes: Floats, link: Link, bandwidth_bytes_per_s: Floats | float) -> Floats:
    bulk = wire_bytes / (bandwidth_bytes_per_s * link.efficiency)
    return np.minimum(bulk + link.ramp_s, bulk / link.low_latency_ratio)


def _share(group: Group, inter: Link) -> Floats:
    """Network bandwidth of the group, per direction: its ranks' share of the node's interfaces."""
    part = np.minimum(group.local / group.node_ranks, 1.0)
    return np.asarray(inter.bandwidth_bytes_per_s * part, dtype=float)


def _launch(group: Group, intra: Link, inter: Link) -> Floats:
    return np.where(group.nodes > 1, inter.launch_s, intra.launch_s)
