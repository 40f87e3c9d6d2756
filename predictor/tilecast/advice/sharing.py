"""Advise a job that cannot fill a whole GPU to use a MIG slice, or to share a GPU with other jobs.

A MIG slice is a GPU by itself (`tilecast.hardware.MigProfile`) and priced like any other. There are two ways to share a
whole GPU between jobs, each of which keeps its memory to itself:

* With time-slicing, one process computes at a time. If each of k jobs keeps the GPU busy for a share b of its steps,
  they slow each other down by max(1, k b).
* With the Multi-Process Service (MPS), all compute at once. Each has a k-th of the multiprocessors
  (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE), and so about a k-th of the bandwidth and the L2. Each runs as on a GPU of that
  size.

The slow-down is relative to the same job on the whole GPU. The cost of a job is its slow-down times its share of the
GPU.

`find_sharing_options` is the entry point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tilecast import constants, hardware, memory, search, uncertainty
from tilecast.cost import price_of_1000_steps
from tilecast.hardware import Gpu, Pool
from tilecast.objectives import OBJECTIVES, Objective
from tilecast.search import PlanLimits, PricedPlans
from tilecast.spec import Plan, Workload

SharingMethod = Literal["mig", "mps", "timeSlicing"]

MAX_SLOWDOWN = 1.25
"""Largest slow-down at which sharing is recommended if the objective is time."""
MAX_RELATIVE_COST = 0.8
"""Largest cost of a step, relative to a whole GPU, at which sharing is recommended if the objective is cost."""
MAX_JOBS = 8
"""Most equal jobs that share one GPU without MIG."""


@dataclass(frozen=True, slots=True)
class GpuSharingOption:
    """Forecast of a job on a MIG slice or on a shared GPU. `slowdown` is relative to a whole GPU of its own."""

    kind: SharingMethod
    profile: str
    """MIG profile. Empty without MIG."""
    jobs: int
    """Number of such jobs that run on one GPU at once."""
    share: float
    """Share of the GPU that the job takes."""
    plan: Plan
    step_s: float
    lower_s: float
    upper_s: float
    slowdown: float
    memory_bytes: float
    memory_available_bytes: float
    """Memory of the MIG slice. Without MIG, memory of the whole GPU, which its jobs use together."""
    cost_per_1000_steps: float | None

    @property
    def resource(self) -> str:
        """Name of the Kubernetes resource that a pod requests."""
        return f"nvidia.com/mig-{self.profile}" if self.kind == "mig" else "nvidia.com/gpu"

    @property
    def relative_cost(self) -> float:
        """Cost of a step relative to the whole GPU."""
        return self.slowdown * self.share


@dataclass(frozen=True, slots=True)
class SharingAdvice:
    """The options for running a job on a fraction of a GPU, and the recommended one of them."""

    pool: Pool
    whole_s: float
    """Seconds of the step on a whole GPU."""
    options: tuple[GpuSharingOption, ...]
    best: GpuSharingOption | None


@dataclass(frozen=True, slots=True)
class SharingJob:
    """One of the jobs that share a GPU by time-slicing.

    `busy` is the fraction of a step in which the job computes.
    """

    memory_bytes: float
    busy: float


def time_slicing_slowdown(members: Sequence[SharingJob], gpu: Gpu) -> float | None:
    """Return the factor by which jobs that time-slice a GPU slow each other down, or None if they do not fit.

    The jobs fit if the GPU has enough memory for all of them together. The factor is the sum of their busy fractions,
    at least 1.
    """
    if sum(member.memory_bytes for member in members) > memory.usable_bytes(gpu):
        return None
    return max(1.0, sum(member.busy for member in members))


def find_sharing_options(workload: Workload, pool: Pool, objective: Objective = "time") -> SharingAdvice | None:
    """Return the options for running the job on a MIG slice or on a shared GPU of the pool.

    Returns:
        None if the job does not fit one GPU, or the pool's GPUs are MIG slices already.

    Raises:
        SpecError: the pool's GPU cannot run the workload's precision.
    """
    whole = None if pool.gpu.mig else _find_fastest_run(workload, pool, pool.gpu)
    if whole is None:
        return None
    options = [
        *_iterate_mig_options(workload, pool, whole),
        *_choose_sharing_option(_iterate_sharing_options(workload, pool, whole, "mps"), objective),
        *_choose_sharing_option(_iterate_sharing_options(workload, pool, whole, "timeSlicing"), objective),
    ]
    worth = [option for option in options if _is_worthwhile(option, objective)]
    # Isolated options come first: neighbours on a shared GPU take bandwidth from each other, and share faults.
    isolated = [option for option in worth if option.kind == "mig"]
    return SharingAdvice(
        pool=pool,
        whole_s=whole.step_s,
        options=tuple(options),
        best=min(isolated or worth, key=lambda option: option.relative_cost, default=None),
    )


def _is_worthwhile(option: GpuSharingOption, objective: Objective) -> bool:
    if OBJECTIVES[objective].saves_gpus:
        return option.relative_cost <= MAX_RELATIVE_COST
    return option.slowdown <= MAX_SLOWDOWN


@dataclass(frozen=True, slots=True)
class _FastestDeviceRun:
    """The fastest plan of a job on one device."""

    workload: Workload
    priced: PricedPlans
    row: int

    @property
    def step_s(self) -> float:
        return float(self.priced.step_s[self.row])

    @property
    def busy_fraction(self) -> float:
        """Fraction of the step in which the GPU computes."""
        parts = self.priced.times.parts(self.row)
        return (parts["compute"] + parts["optimizer"]) / self.step_s

    @property
    def memory_bytes(self) -> float:
        return float(self.priced.memory_bytes[self.row])

    def to_option(
        self,
        kind: SharingMethod,
        pool: Pool,
        whole: _FastestDeviceRun,
        jobs: int,
        share: float,
        profile: str = "",
        contention_factor: float = 1.0,
    ) -> GpuSharingOption:
        """Return the run as an option for sharing a GPU.

        `contention_factor` is the factor by which other jobs on the GPU slow the run down. The step of the option is
        never shorter than that of `whole`, the run on a whole GPU.
        """
        step_s = max(self.step_s, whole.step_s) * contention_factor
        upper = uncertainty.interval(self.workload, self.priced, self.row)[1] / self.step_s
        factor = float(np.exp(np.hypot(np.log(upper), constants.shipped_constants().sharing[kind])))
        price = pool.price_per_gpu_hour
        return GpuSharingOption(
            kind=kind,
            profile=profile,
            jobs=jobs,
            share=share,
            plan=self.priced.plans.row(self.row),
            step_s=step_s,
            lower_s=step_s / factor,
            upper_s=step_s * factor,
            slowdown=step_s / whole.step_s,
            memory_bytes=self.memory_bytes,
            memory_available_bytes=self.priced.usable_bytes,
            cost_per_1000_steps=None if price is None else price_of_1000_steps(price * share, step_s),
        )


def _find_fastest_run(workload: Workload, pool: Pool, gpu: Gpu, most_bytes: float = np.inf) -> _FastestDeviceRun | None:
    """Return the fastest plan that fits one device within `most_bytes`. If there is no such plan, return None."""
    plans = search.enumerate_plans(workload, replace(pool, gpu=gpu), PlanLimits(gpus=1))
    if not len(plans):
        return None
    priced = search.price(workload, plans, replace(pool, gpu=gpu))
    step_s = np.where(priced.fits & (priced.memory_bytes <= most_bytes), priced.step_s, np.inf)
    row = int(step_s.argmin())
    return _FastestDeviceRun(workload, priced, row) if np.isfinite(step_s[row]) else None


def _iterate_mig_options(workload: Workload, pool: Pool, whole: _FastestDeviceRun) -> Iterator[GpuSharingOption]:
    """Yield the options with MIG: the fastest run on one slice of each profile."""
    for profile in hardware.list_mig_profiles(pool.gpu):
        run = _find_fastest_run(workload, pool, profile.slice_gpu(pool.gpu)) if profile.share < 1 else None
        if run is not None:
            yield run.to_option("mig", pool, whole, profile.instances, profile.share, profile.name)


def _iterate_sharing_options(
    workload: Workload, pool: Pool, whole: _FastestDeviceRun, kind: SharingMethod
) -> Iterator[GpuSharingOption]:
    """Yield the options of k jobs on the whole GPU, with MPS or with time-slicing, for k = 2, 3, … while they fit."""
    usable = memory.usable_bytes(pool.gpu)
    for jobs in range(2, MAX_JOBS + 1):
        run = _find_fastest_run(
            workload, pool, _build_gpu_under_mps(pool.gpu, jobs) if kind == "mps" else pool.gpu, usable / jobs
        )
        if run is None:
            return
        members = [SharingJob(run.memory_bytes, run.busy_fraction)] * jobs
        contention_factor = 1.0 if kind == "mps" else time_slicing_slowdown(members, pool.gpu)
        if contention_factor is None:
            return
        yield run.to_option(kind, pool, whole, jobs, 1 / jobs, contention_factor=contention_factor)


def _build_gpu_under_mps(gpu: Gpu, jobs: int) -> Gpu:
    """Return the GPU as one of k jobs under MPS sees it: with the whole memory, and a k-th of everything else."""
    sms = gpu.sm_count // jobs
    return replace(
        gpu,
        sm_count=sms,
        memory_bandwidth_bytes_per_s=gpu.memory_bandwidth_bytes_per_s / jobs,
        l2_bytes=gpu.l2_bytes / jobs,
        l2_bandwidth_bytes_per_s=gpu.l2_bandwidth_bytes_per_s / jobs,
        peak_flops={name: rate * sms / gpu.sm_count for name, rate in gpu.peak_flops.items()},
    )


def _choose_sharing_option(options: Iterator[GpuSharingOption], objective: Objective) -> list[GpuSharingOption]:
    """Return a list with the cheapest worthwhile option. If none is worthwhile, the list holds the first option."""
    every = list(options)
    worth = [option for option in every if _is_worthwhile(option, objective)]
    return [min(worth, key=lambda option: option.relative_cost)] if worth else every[:1]
