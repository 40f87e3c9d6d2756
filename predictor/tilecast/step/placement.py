"""Which ranks of a job share a node or an NVLink domain. Ranks are placed tensor innermost, then context, data and
pipeline; experts fold over tensor and data ranks."""

from __future__ import annotations

import numpy as np

from tilecast.collectives import Group
from tilecast.hardware import Pool
from tilecast.spec import Floats, Ints


def joined(gpus: Ints, pool: Pool) -> Ints:
    """GPUs that the link inside nodes joins, of jobs of so many, (n,): those of a node, or of the NVLink domain that
    several nodes share. A job of more than a domain takes equally many whole nodes of each, as many as divide it."""
    ranks = np.minimum(gpus, pool.gpus_per_node)
    for width in range(2 * pool.gpus_per_node, pool.domain + 1, pool.gpus_per_node):
        ranks = np.where(gpus % width == 0, width, ranks)
    return np.where(gpus <= pool.domain, gpus, ranks)


def group_of(ranks: Floats, inner: Floats, gpus: Ints, pool: Pool) -> Group:
    """A group of jobs of so many GPUs whose members lie `inner` ranks apart: as many of them share a node, or a domain
    of nodes, as fit."""
    node = joined(gpus, pool).astype(float)
    fitting = np.clip(np.floor(node / inner), 1.0, ranks)
    # Nodes hold equally many members: the largest number that fits and divides the group.
    candidates = np.arange(1, max(2, int(fitting.max(initial=1.0)) + 1))
    divides = (ranks.astype(np.int64)[:, None] % candidates == 0) & (candidates <= fitting[:, None])
    local = np.where(divides, candidates, 1).max(axis=1).astype(float)
    return Group(ranks, local, node, np.maximum(node / pool.gpus_per_node, 1.0))
