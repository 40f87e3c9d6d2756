"""Placement of a job's ranks on nodes and NVLink domains.

Ranks are placed with tensor innermost, then context, data and pipeline; experts fold over tensor and data ranks.
"""

from __future__ import annotations

import numpy as np

from tilecast.collectives import RankGroup
from tilecast.hardware import Pool
from tilecast.spec import Floats, Ints, distinct_rows


def count_gpus_on_each_node(gpus: Ints, pool: Pool) -> Ints:
    """Return the number of GPUs that each job uses on each of its nodes, (n,).

    The number is equal on all nodes of a job. A job that does not fill whole nodes uses equal parts of nodes: 12 GPUs
    in nodes of 8 are three halves of a node. Two parts may be on one node.
    """
    whole = pool.gpus_per_node
    # Parts that divide a node always fill it. Of nodes with an odd number of GPUs, a part may leave some GPUs idle.
    is_power = whole & (whole - 1) == 0
    part = np.ones_like(gpus)
    for size in range(2, whole + 1):
        if not is_power or whole % size == 0:
            part = np.where(gpus % size == 0, size, part)
    return np.where(gpus <= whole, gpus, part)


def count_joined_gpus(gpus: Ints, pool: Pool) -> Ints:
    """Return how many of a job's GPUs are joined by the link inside nodes, (n,).

    The link joins the GPUs of a node, or of an NVLink domain of several nodes. A job larger than a domain uses the same
    number of whole nodes in each domain: the largest number whose GPUs divide those of the job. A part of a node counts
    as a node of that size.

    Args:
        gpus: number of GPUs of each job, (n,).
        pool: the pool that the jobs run on.
    """
    ranks = count_gpus_on_each_node(gpus, pool)
    for width in range(2 * pool.gpus_per_node, pool.domain + 1, pool.gpus_per_node):
        ranks = np.where(gpus % width == 0, width, ranks)
    return np.where(gpus <= pool.domain, gpus, ranks)


def classify_by_links(gpus: Ints, pool: Pool) -> Ints:
    """Return the number of each job's class, (n,). Jobs of one class use the same links for each group of ranks."""
    joined = count_joined_gpus(gpus, pool)
    return np.asarray(2 * joined + ((gpus > pool.gpus_per_node) & (joined < pool.gpus_per_node)))


def build_communication_group(ranks: Floats, inner: Floats, gpus: Ints, pool: Pool) -> RankGroup:
    """Return each job's communication group, in which neighbours are `inner` ranks apart.

    A node, or a domain of nodes, holds as many members as fit and divide the group.

    Args:
        ranks: members of the group, (n,).
        inner: distance of two neighbours of the group, in ranks, (n,).
        gpus: number of GPUs of each job, (n,).
        pool: the pool that the jobs run on.
    """
    node = count_joined_gpus(gpus, pool).astype(float)
    fitting = np.clip(np.floor(node / inner), 1.0, ranks)
    # All nodes have equally many members: the largest number that fits and divides the group.
    sizes, most = ranks.astype(np.int64), fitting.astype(np.int64)
    few = distinct_rows(sizes, most)
    candidates = np.arange(1, max(2, int(most.max(initial=1)) + 1))
    divides = (sizes[few.first, None] % candidates == 0) & (candidates <= most[few.first, None])
    local = np.where(divides, candidates, 1).max(axis=1).astype(float)[few.index]
    # A part of a node has its share of the node's network, which other parts use at the same time.
    sharing = np.where(gpus > pool.gpus_per_node, np.maximum(node, pool.gpus_per_node), node)
    return RankGroup(ranks, local, sharing, np.maximum(node / pool.gpus_per_node, 1.0))
