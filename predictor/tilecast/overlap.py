"""Overlap of communication of gradients and weights with a pass of computation: a timeline of buckets in closed form.

DistributedDataParallel packs gradients into buckets in the order in which the backward pass makes them, and reduces one
bucket after the other while the pass goes on (Li et al., VLDB 2020, section 3.2). Here gradients become ready evenly
over the pass. A first bucket with a share f of all bytes takes c0, and n equal buckets take c each. Behind a pass of w
seconds, the time

    exposed = max(c, n c - w (1 - f) (1 - 1/n), c0 + n c - w (1 - f))

stays visible. From some bucket on, the network is busy without a gap. The three terms are the timelines in which that
bucket is the last one, the first of the equal ones, or the small first one. The end is linear in the number of that
bucket among the equal ones, so no other bucket can end later. Weights that are gathered before the layers that need
them follow the same timeline, run backwards, so FSDP's prefetch of one block during the computation of the one before
(Zhao et al., VLDB 2023, section 3.3) has the same law with f = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilecast import frameworks
from tilecast.spec import Columns, Floats, Plans, Workload

MIB = 2.0**20


def hides_gradients(workload: Workload) -> bool:
    """Return whether the framework hides the reduction of gradients behind the backward pass below ZeRO 3.

    The job may disable it.
    """
    return workload.overlap and frameworks.find_framework(workload).overlap


@dataclass(frozen=True, slots=True)
class BucketLimits(Columns):
    """Most bytes of gradients that a bucket holds, (n,)."""

    first: Floats
    """Limit of the bucket that is reduced first; 0 where the first bucket is like the others."""
    rest: Floats
    """Limit of the other buckets; infinite where one bucket holds everything."""

    @classmethod
    def single_bucket(cls, rows: int) -> BucketLimits:
        """Return the limits of a single bucket for all gradients, (rows,)."""
        return cls(np.zeros(rows), np.full(rows, np.inf))

    @classmethod
    def of_sizes(cls, workload: Workload, sizes_mib: Floats) -> BucketLimits:
        """Return the limits of buckets of given sizes, (n,).

        The framework's first bucket keeps its size if that is smaller.
        """
        return cls(np.minimum(frameworks.find_framework(workload).bucket_mib[0], sizes_mib) * MIB, sizes_mib * MIB)

    @classmethod
    def of(cls, workload: Workload, plans: Plans, gradient_bytes: float, block_bytes: Floats) -> BucketLimits:
        """Return the limits of the buckets of a workload's framework.

        A framework without buckets reduces the gradients of each block at once. A framework that hides gradients behind
        the backward pass has a single bucket for a job that disables this (Megatron-Core,
        distributed/distributed_data_parallel.py: bucket_size is None without overlap_grad_reduce). A framework that
        never hides gradients keeps its buckets.

        Args:
            workload: the job.
            plans: its plans, (n,).
            gradient_bytes: bytes of an element of the gradients.
            block_bytes: bytes of the gradients of a block, (n,).
        """
        cells, rows = frameworks.find_framework(workload), len(plans)
        if cells.overlap and not workload.overlap:
            return cls.single_bucket(rows)
        if workload.bucket_mib is not None and cells.has_buckets:
            return cls.of_sizes(workload, np.full(rows, workload.bucket_mib))
        if cells.bucket_mib[1]:
            first, rest = (np.full(rows, size * MIB) for size in cells.bucket_mib)
            return cls(first, rest)
        if cells.bucket_elements:
            elements = np.maximum(cells.bucket_elements, cells.bucket_elements_per_replica * plans.replicas)
            return cls(np.zeros(rows), elements * gradient_bytes)
        return cls(np.zeros(rows), block_bytes)

    def count(self, size_bytes: Floats) -> Floats:
        """Return the number of equal buckets that hold `size_bytes`, at least one, (n,)."""
        return np.asarray(np.maximum(np.ceil(size_bytes / np.maximum(self.rest, 1.0)), 1.0))


def exposed_seconds(
    busy_s: Floats, count: Floats, pass_s: Floats, first_s: Floats | float = 0.0, first_share: Floats | float = 0.0
) -> Floats:
    """Return the seconds of collectives that a pass of computation does not hide, (n,).

    Args:
        busy_s: seconds of all `count` equal collectives together, (n,).
        count: number of equal collectives, at least one, (n,).
        pass_s: seconds of the pass, during which the data of the collectives become ready evenly, (n,).
        first_s: seconds of one more collective before the equal ones, (n,).
        first_share: share of that collective in all bytes, from 0 to 1, (n,).
    """
    each_s, later_s = busy_s / count, pass_s * (1.0 - first_share)
    return np.asarray(np.maximum(np.maximum(each_s, busy_s - later_s * (1 - 1 / count)), first_s + busy_s - later_s))
