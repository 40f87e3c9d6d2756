"""Placement of a job's ranks on nodes and NVLink domains.

Ranks are placed with tensor innermost, then context, data and pipeline; experts fold over tensor and data ranks.
"""

from __future__ import annotations

import numpy as np

from tilecast.collectives import RankGroup
from tilecast.hardware import Pool
from tilecast.spec import Floats, Ints, distinct_rows


def joined_gpus(gpus: Ints, pool: Pool) -> Ints:
    """Return the number of a job's GPUs that the link inside nodes joins, (n,).

    It joins the GPUs of a node, or of an NVLink domain of several nodes. A job larger than a domain takes equally many
    whole nodes of each domain, as many as divide its number of GPUs.

    Args:
        gpus: number of GPUs of each job, (n,).
        pool: the pool that the jobs run on.
    """
    ranks = np.minimum(gpus, pool.gpus_per_node)
    for width in range(2 * pool.gpus_per_node, pool.domain + 1, pool.gpus_per_node):
        ranks = np.where(gpus % width == 0, width, ranks)
    return np.where(gpus <= pool.domain, gpus, ranks)


def communication_group(ranks: Floats, inner: Floats, gpus: Ints, pool: Pool) -> RankGroup:
    """Return a communication group of each job, whose members are `inner` ranks apart.

    A node, or a domain of nodes, holds as many members as fit and divide the group.

    Args:
        ranks: members of the group, (n,).
        inner: distance of two neighbours of the group, in ranks, (n,).
        gpus: number of GPUs of each job, (n,).
        pool: the pool that the jobs run on.
    """
    node = joined_gpus(gpus, pool).astype(float)
    fitting = np.clip(np.floor(node / inner), 1.0, ranks)
    # All nodes have equally many members: the largest number that fits and divides the group.
    sizes, most = ranks.astype(np.int64), fitting.astype(np.int64)
    few = distinct_rows(sizes, most)
    candidates = np.arange(1, max(2, int(most.max(initial=1)) + 1))
    divides = (sizes[few.first, None] % candidates == 0) & (candidates <= most[few.first, None])
    local = np.where(divides, candidates, 1).max(axis=1).astype(float)[few.index]
    return RankGroup(ranks, local, node, np.maximum(node / pool.gpus_per_node, 1.0))
