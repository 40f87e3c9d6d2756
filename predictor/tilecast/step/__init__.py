"""One training step of every plan, as parts that sum.

    step = compute + communication + bubble + optimizer + launch + input

With m micro-batches per rank and p pipeline stages of which the slowest takes T per micro-batch, a 1F1B step takes m T
+ (sum of all stages - T) / v, where v is the number of virtual stages (Narayanan et al., arXiv 2104.04473). The first
term is split into computation, launch stalls and exposed communication, the second is the bubble. Gradients hide behind
the last micro-batch's backward pass, bucket by bucket (`overlap`); the part that does not hide is communication. Eager
frameworks launch kernels one by one from the host: a pass takes no less than its launches.

`step` prices a table of plans. `Steps` keeps what plans share, for repeated use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilecast import constants, overlap
from tilecast.constants import Constants
from tilecast.graph import Graph
from tilecast.hardware import Pool
from tilecast.job_calibration import JobRuns, RunSetting, corrected_parts, node_samples
from tilecast.spec import Distinct, Floats, Ints, Plans, Rows, Workload, distinct
from tilecast.step.blocks import KernelSeconds
from tilecast.step.passes import MicroBatch, block_passes, boundary_seconds, micro_batch
from tilecast.step.placement import joined
from tilecast.step.replicas import Shared, contention, gradient_sync, shared_by_degrees
from tilecast.step.weights import (
    HOST_BYTES_PER_S,
    Held,
    copied_bytes_per_s,
    copied_seconds,
    fetch_seconds,
    gradient_seconds,
    once_seconds,
)
from tilecast.zoo import Sharded

PARTS = ("compute", "communication", "bubble", "optimizer", "launch", "input")
"""Parts of a step, in the order of tables."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one optimizer step of each plan, every part (n,)."""

    compute: Floats
    communication: Floats
    bubble: Floats
    optimizer: Floats
    launch: Floats
    input: Floats
    hidden: Floats
    """Collectives of replicas that computation hides; they are no part of the step."""
    spread: Floats
    """Relative half-width of the kernels' own 90 % range, weighted by time, (n,)."""
    correction: Floats
    """Factor on the parts that is learned from runs on the pool's cluster and from the job's own, (n,)."""
    carried: Floats
    """Part of that factor that is learned from the job's own runs, (n,)."""
    width: Floats
    """Factor on the half-width of the whole step's range that is learned from the same runs, (n,)."""
    least: Floats
    """Seconds of all kernels at the peak of compute or memory, (n,)."""

    @property
    def total(self) -> Floats:
        return self.compute + self.communication + self.bubble + self.optimizer + self.launch + self.input

    def corrected(self, ratio: Floats, width: Floats) -> StepTimes:
        """Return the times with every part multiplied by the ratio, (n,), which lowers no step below `least`."""
        correction = np.maximum(ratio, np.minimum(self.least / self.total, 1.0))
        parts = {name: getattr(self, name) * correction for name in PARTS}
        return replace(self, **parts, hidden=self.hidden * correction, correction=correction, width=width)

    def carrying(self, ratios: Floats, width: Floats) -> StepTimes:
        """Return the times with the corrections that are learned from the job's own runs.

        Parts are multiplied by the ratios of `JobRuns.factors`, (3, n), which lower no step below `least`. The
        half-width of the step's range is multiplied by `width`, (n,).
        """
        parts, before = corrected_parts({name: getattr(self, name) for name in PARTS}, self.hidden, ratios), self.total
        ratio = np.sum(list(parts.values()), axis=0) / before
        lift = np.maximum(np.minimum(self.least / before, 1.0) / ratio, 1.0)
        parts, ratio = {name: value * lift for name, value in parts.items()}, ratio * lift
        return replace(self, **parts, correction=self.correction * ratio, carried=ratio, width=self.width * width)

    def waiting(self, waited_s: Floats) -> StepTimes:
        """Return the times with `waited_s` more seconds of waiting for input, (n,)."""
        return replace(self, input=self.input + waited_s)

    def bounded(self, least_s: Floats) -> StepTimes:
        """Return the times with no step below `least_s`, (n,): the difference is added to the wait for input."""
        return replace(self, input=self.input + np.maximum(least_s - self.total, 0.0))

    def parts(self, row: int) -> dict[str, float]:
        """Return one plan's breakdown, in seconds; the values sum to `total[row]`."""
        return {name: float(getattr(self, name)[row]) for name in PARTS}


def step(
    workload: Workload,
    sharded: Sharded,
    plans: Plans,
    pool: Pool,
    priced: KernelSeconds,
    fitted: Constants | None = None,
) -> StepTimes:
    """Return the step of every plan on a pool, corrected by the pool's calibration.

    `priced` are the graph's kernels on the pool's GPU.
    """
    return Steps.of(workload, sharded, plans, pool, priced, fitted).rows(slice(None))


@dataclass(frozen=True, slots=True)
class Alike:
    """Groups of plans of a table that share parts of a step, on nodes of one size and NVLink domains of one size."""

    common: Distinct
    """Neighbours that are equal in all but ZeRO stage and virtual stages. All other fields are for the first rows of
    these."""
    cells: Rows
    """First rows of groups with equal shard, recomputation and ranks of a node, which share the passes through a
    block."""
    cell_of_stage: Rows
    stage: Distinct
    """Rows with equal cell and pipeline, which share a micro-batch."""
    split: Distinct
    """Rows with equal degrees, which share their weights' communication and update."""
    split_of_copied: Rows
    copied: Distinct
    """Rows with equal split that all accumulate gradients or all do not, which share the copies of their weights."""
    hop: Distinct
    """Rows with equal shard and degrees, which share what stages send each other."""
    firsts: tuple[tuple[Sharded, Plans], ...]
    """Tables of the cells, and of the first rows of `stage`, `split`, `copied` and `hop`."""

    @classmethod
    def of(cls, sharded: Sharded, plans: Plans, pool: Pool, apart: Sequence[Ints] = ()) -> Alike:
        """Return the groups of these plans on the pool's nodes.

        Plans must also be equal in the columns of `apart` to share what they send.
        """
        degrees = (plans.tensor, plans.expert, plans.context, plans.pipeline, plans.data, *apart)
        common = plans.distinct_splits(*apart)
        sharded, plans = sharded.take(common.first), plans.take(common.first)
        others = (column[common.first] for column in apart)
        cell = distinct(sharded.index, plans.checkpointing, joined(plans.gpus, pool), *others)
        stage = distinct(cell.index, plans.pipeline)
        split = distinct(*(column[common.first] for column in degrees))
        copied = distinct(split.index, np.minimum(plans.gradient_accumulation, 2))
        hop = distinct(sharded.index, split.index)
        rows = (cell.first, stage.first, split.first, copied.first, hop.first)
        firsts = tuple((sharded.take(some), plans.take(some)) for some in rows)
        of_stage, of_copied = cell.index[stage.first], split.index[copied.first]
        return cls(common, cell.first, of_stage, stage, split, of_copied, copied, hop, firsts)


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a plan table, without the parts that differ from plan to plan.

    Plans share most of the parts of a step, so each formula is evaluated once for every distinct row of the columns it
    reads. `rows` combines the results for each plan.
    """

    workload: Workload
    graph: Graph
    plans: Plans
    fitted: Constants
    alike: Alike
    micro: MicroBatch
    held: Held
    """Weights of each split."""
    shared: Shared
    boundary_s: Floats
    copied_s: Floats
    """Seconds in which a micro-batch copies and sums weights and gradients, for each row of `Alike.copied` at each ZeRO
    stage from 0 to 3, (4, k)."""
    copied_bytes_per_s: float
    """Memory bandwidth that these copies reach."""
    contention: float
    once_s: Floats
    """Host time once per step, of each split."""
    gpus_per_node: int
    calibrated: tuple[Floats, Floats] | None
    """Ratio and width of the pool's calibration for each split; None where it has none."""
    own: JobRuns
    """The job's own runs."""
    place: RunSetting

    @classmethod
    def of(
        cls,
        workload: Workload,
        sharded: Sharded,
        plans: Plans,
        pool: Pool,
        priced: KernelSeconds,
        fitted: Constants | None = None,
        alike: Alike | None = None,
        caps: overlap.BucketLimits | None = None,
        speed: Floats | None = None,
    ) -> Steps:
        """Return the parts of steps that the plans of a table share on a pool.

        Args:
            workload: the job.
            sharded: the model under the plans' shards.
            plans: the table, (n,).
            pool: where the job runs.
            priced: the graph's kernels on the pool's GPU.
            fitted: constants to use instead of those that ship.
            alike: the groups of the table, where they are known already.
            caps: the buckets of each of its splits, to use instead of the framework's.
            speed: how many times as fast as the pool's the links of each plan are, (n,).
        """
        fitted = fitted or constants.shipped()
        alike = alike or Alike.of(sharded, plans, pool)

        def speed_at(rows: Rows) -> Floats | float:
            return 1.0 if speed is None else speed[alike.common.first[rows]]

        cells, stage, split, copied, hop = alike.firsts
        bytes_per_s, held = copied_bytes_per_s(pool.gpu, fitted), Held.of(workload, *split)
        passes = block_passes(workload, *cells, pool, priced, fitted, speed_at(alike.cells))
        shared = shared_by_degrees(workload, *split, held, pool, fitted, caps)
        return cls(
            workload,
            sharded.graph,
            plans,
            fitted,
            alike,
            micro_batch(*stage, priced, passes, alike.cell_of_stage),
            held,
            shared.hastened(speed_at(alike.split.first)),
            boundary_seconds(workload, *hop, pool) / speed_at(alike.hop.first),
            _copied_seconds(workload, held.take(alike.split_of_copied), copied[1], bytes_per_s),
            bytes_per_s,
            contention(pool),
            once_seconds(workload, sharded.graph, fitted) + gradient_seconds(workload, sharded.graph, split[1], fitted),
            pool.gpus_per_node,
            pool.calibration.factors(pool.gpu.name, workload, split[1].gpus) if pool.calibration.corrections else None,
            pool.own,
            RunSetting.of(pool.gpu.name, pool.gpu.architecture, workload),
        )

    def rows(self, rows: slice | Rows) -> StepTimes:
        """Return the steps of these rows of the table."""
        plans, alike = self.plans.take(rows), self.alike
        place = alike.common.index[rows]
        if isinstance(rows, slice) and len(place):
            some: slice | Rows = slice(place[0], place[-1] + 1)  # consecutive rows have consecutive first rows
            place = place - place[0]
        else:
            some, place = np.unique(place, return_inverse=True)
        micro, split = self.micro.take(alike.stage.index[some]), alike.split.index[some]
        shared = self.shared.take(split)
        staged = np.minimum(np.maximum(plans.zero_stage, 0), 3) * len(split) + place
        columns = self._by_zero_stage(some, micro, shared)
        compute, exposed, update, fed, hidden = (column.take(staged) for column in columns)
        waited, boundary = shared.waited[place], self.boundary_s[alike.hop.index[some]][place] * plans.virtual_stages
        stages, repeats = plans.pipeline, plans.gradient_accumulation.astype(float)
        bubble = (micro.all_s[place] + boundary * (stages - 1) - micro.slowest_s[place]) / plans.virtual_stages
        bubble = np.where(stages > 1, np.maximum(bubble, 0.0), 0.0)
        communication = repeats * (micro.communication_s[place] + boundary) + exposed
        ones = np.broadcast_to(1.0, len(plans))
        times = StepTimes(
            compute=compute * waited,
            communication=communication * waited,
            bubble=bubble * waited,
            optimizer=update,
            launch=repeats * micro.stall_s[place] + self.once_s[split][place],
            input=fed,
            hidden=hidden,
            spread=micro.spread[place],
            correction=ones,
            carried=ones,
            width=ones,
            least=repeats / stages * micro.roofline_s[place],
        )
        if self.calibrated is not None:
            ratio, width = (one[split][place] for one in self.calibrated)
            times = times.corrected(ratio, width)
        if self.own.runs:
            times = times.carrying(*self.own.factors(self.place, plans, self.gpus_per_node))
            times = times.waiting(self.own.waited_s(plans, self.gpus_per_node))
        if self.workload.input_samples_per_s is None:
            return times
        return times.bounded(_delivered_seconds(plans, self.gpus_per_node, self.workload.input_samples_per_s))

    def _by_zero_stage(self, some: slice | Rows, micro: MicroBatch, shared: Shared) -> tuple[Floats, ...]:
        """Return the parts of a step that depend on the ZeRO stage, at each stage from 0 to 3, (4, n) each.

        These are computation, exposed communication of replicas, weight update, wait for input and hidden
        communication, for some of the rows of `Alike.common`. The stage of the plans themselves is ignored.
        """
        workload, alike = self.workload, self.alike
        plans = self.plans.take(alike.common.first[some])
        repeats = plans.gradient_accumulation.astype(float)
        exposed, hidden = gradient_sync(workload, plans, micro, shared)
        slowed = hidden * (self.fitted.slowdown * self.contention)
        compute = repeats * (micro.gpu_s + self.copied_s[:, alike.copied.index[some]]) + slowed
        if workload.offload == "parameters":
            weights = self.held.take(alike.split.index[some])
            held = np.stack([weights.parameters, weights.parameters, weights.parameters, weights.own])
            exposed = exposed + repeats * fetch_seconds(weights, held, micro)
        update = np.stack([shared.update_s, shared.update_own_s, shared.update_own_s, shared.update_own_s])
        return compute, exposed, update, _input_seconds(self.graph, plans, compute), hidden


def _copied_seconds(workload: Workload, held: Held, plans: Plans, bytes_per_s: float) -> Floats:
    """Return the seconds of a micro-batch's copies of weights and gradients at each ZeRO stage from 0 to 3, (4, n)."""
    four = np.tile(np.arange(len(plans)), 4)
    staged = replace(plans.take(four), zero_stage=np.repeat(np.arange(4), len(plans)))
    return copied_seconds(workload, held.take(four), staged, bytes_per_s).reshape(4, -1)


def bucketed(
    workload: Workload, sharded: Sharded, plans: Plans, pool: Pool, priced: KernelSeconds, sizes_mib: Sequence[float]
) -> Floats:
    """Return the seconds of a step of one plan with buckets of each of k sizes, (k,).

    `sharded` and `plans` have one row.
    """
    rows = np.zeros(len(sizes_mib), np.intp)
    sharded, plans = sharded.take(rows), plans.take(rows)
    alike = Alike.of(sharded, plans, pool, [np.arange(len(rows))])
    caps = overlap.BucketLimits.of_sizes(workload, np.array(sizes_mib, float))
    steps = Steps.of(workload, sharded, plans, pool, priced, None, alike, caps)
    return steps.rows(slice(None)).total


def hastened(
    workload: Workload, sharded: Sharded, plans: Plans, pool: Pool, priced: KernelSeconds, speeds: Floats
) -> Floats:
    """Return the seconds of a step of n plans with links each of k times as fast, (n, k).

    Bandwidth and latency both change, so every exchange takes that much less.
    """
    rows, place = (axis.ravel() for axis in np.indices((len(plans), len(speeds))))
    sharded, plans = sharded.take(rows), plans.take(rows)
    alike = Alike.of(sharded, plans, pool, [place])
    steps = Steps.of(workload, sharded, plans, pool, priced, None, alike, speed=speeds[place])
    return steps.rows(slice(None)).total.reshape(-1, len(speeds))


def _input_seconds(graph: Graph, plans: Plans, compute: Floats) -> Floats:
    """Return the time of the copy of a batch to the GPU that does not hide behind the step (loaders prefetch one)."""
    samples = plans.micro_batch * plans.gradient_accumulation
    host = samples * (graph.host_bytes_per_sample / HOST_BYTES_PER_S)
    return np.maximum(host - compute, 0.0)


def _delivered_seconds(plans: Plans, gpus_per_node: int, samples_per_s: float) -> Floats:
    """Return the seconds in which the input pipelines of a plan's nodes deliver the samples of a step, (n,).

    Each pipeline delivers `samples_per_s`. Loaders work ahead, so this bounds the step and adds nothing else to it.
    """
    return node_samples(plans, gpus_per_node) / samples_per_s
