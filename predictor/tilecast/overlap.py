"""Overlap of the communication of gradients and weights with a forward or backward pass, in closed form.

DistributedDataParallel packs gradients into buckets in the order in which the backward pass computes the gradients. It
reduces the buckets one by one during the pass (Li et al., VLDB 2020, section 3.2). The model assumes that gradients
become ready evenly over a pass of w seconds. A first bucket holds the fraction f of all bytes and takes c0 seconds to
reduce. Then come n equal buckets, which take c seconds each. The pass does not hide

    exposed = max(c, n c - w (1 - f) (1 - 1/n), c0 + n c - w (1 - f))

seconds. From some bucket on, the network is busy without a gap. In the three terms, this bucket is the last one, the
first of the equal buckets, or the small first bucket. The end time is linear in the position of this bucket among the
equal buckets, so no other bucket gives a later end.

Weights are gathered before the layers that need them, as FSDP prefetches the next block during the computation of a
block (Zhao et al., VLDB 2023, section 3.3). This timeline is the same one run backwards, with f = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilecast import frameworks
from tilecast.spec import Columns, Floats, Plans, Workload

MIB = 2.0**20


def hides_gradients(workload: Workload) -> bool:
    """Return whether a job overlaps the reduction of gradients with the backward pass at ZeRO stages 0 to 2.

    The framework must support this overlap, and the job must not disable it.
    """
    return workload.overlap and frameworks.find_framework(workload).overlap


@dataclass(frozen=True, slots=True)
class BucketLimits(Columns):
    """Upper limits of the bytes in a gradient bucket for each of n plans, (n,)."""

    first: Floats
    """Limit in bytes of the bucket that is reduced first. It is 0 if the first bucket has the limit of the others."""
    rest: Floats
    """Limit in bytes of the other buckets. It is infinite if one bucket holds all gradients."""

    @classmethod
    def single_bucket(cls, rows: int) -> BucketLimits:
        """Return the limits of `rows` plans whose gradients all fit into one bucket."""
        return cls(np.zeros(rows), np.full(rows, np.inf))

    @classmethod
    def from_sizes(cls, workload: Workload, sizes_mib: Floats) -> BucketLimits:
        """Return the limits, in bytes, of buckets whose sizes in MiB a user gave, (n,).

        The first bucket has the framework's default size if that is smaller.
        """
        return cls(np.minimum(frameworks.find_framework(workload).bucket_mib[0], sizes_mib) * MIB, sizes_mib * MIB)

    @classmethod
    def from_plans(cls, workload: Workload, plans: Plans, gradient_bytes: float, block_bytes: Floats) -> BucketLimits:
        """Return the limits of the gradient buckets of plans in a workload's framework, (n,).

        A framework without buckets reduces the gradients of each block at once.

        A framework that can overlap the reduction with the backward pass uses a single bucket if the job disables the
        overlap (Megatron-Core, distributed/distributed_data_parallel.py: bucket_size is None without
        overlap_grad_reduce). A framework that cannot overlap reduction and backward pass uses its usual buckets.

        Args:
            workload: the job.
            plans: plans of the job, (n,).
            gradient_bytes: bytes of one element of a gradient.
            block_bytes: bytes of the gradients of one block, (n,).
        """
        cells, rows = frameworks.find_framework(workload), len(plans)
        if cells.overlap and not workload.overlap:
            return cls.single_bucket(rows)
        if workload.bucket_mib is not None and cells.has_buckets:
            return cls.from_sizes(workload, np.full(rows, workload.bucket_mib))
        if cells.bucket_mib[1]:
            first, rest = (np.full(rows, size * MIB) for size in cells.bucket_mib)
            return cls(first, rest)
        if cells.bucket_elements:
            elements = np.maximum(cells.bucket_elements, cells.bucket_elements_per_replica * plans.replicas)
            return cls(np.zeros(rows), elements * gradient_bytes)
        return cls(np.zeros(rows), block_bytes)

    def count_buckets(self, size_bytes: Floats) -> Floats:
        """Return the number of buckets that `size_bytes` of gradients fill, at least 1, (n,)."""
        return np.asarray(np.maximum(np.ceil(size_bytes / np.maximum(self.rest, 1.0)), 1.0))


def exposed_seconds(
    busy_s: Floats, count: Floats, pass_s: Floats, first_s: Floats | float = 0.0, first_fraction: Floats | float = 0.0
) -> Floats:
    """Return the seconds of collectives that a forward or backward pass does not hide, (n,).

    Args:
        busy_s: total seconds of `count` equal collectives, (n,).
        count: number of equal collectives, at least 1, (n,).
        pass_s: seconds of the pass, during which the data of the collectives become ready evenly, (n,).
        first_s: seconds of one more collective that runs before the equal collectives, (n,).
        first_fraction: fraction of all bytes that this first collective carries, from 0 to 1, (n,).
    """
    each_s, later_s = busy_s / count, pass_s * (1.0 - first_fraction)
    return np.asarray(np.maximum(np.maximum(each_s, busy_s - later_s * (1 - 1 / count)), first_s + busy_s - later_s))
