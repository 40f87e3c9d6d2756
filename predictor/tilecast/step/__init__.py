"""Seconds of a training step of every plan, as parts that sum to the step.

    step = compute + communication + bubble + optimizer + launch + input

Let a step have m micro-batches per rank, p pipeline stages and v virtual stages. The slowest stage takes T per
micro-batch. A 1F1B step then takes m T + (sum of all stages - T) / v (Narayanan et al., arXiv 2104.04473). The first
term is split into computation, launch stalls and exposed communication. The second term is the bubble. Gradients hide
behind the last micro-batch's backward pass, bucket by bucket (`overlap`). The part that does not hide is communication.
Eager frameworks launch kernels one by one from the host, so a pass takes at least as long as its launches.

The formula of each part is in `parts`. `Steps.rows`, the place to start reading, calls these formulas.
`Steps.from_plans` evaluates their arguments by the formulas of `passes`, `replicas` and `weights`. It also says which
columns of plans each argument depends on (`distinct`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilecast import constants, frameworks
from tilecast.constants import Constants
from tilecast.graph import Graph
from tilecast.hardware import Pool
from tilecast.learning.job_calibration import RunSetting, correct_parts, count_samples_per_node
from tilecast.spec import Columns, Floats, Plans, Rows, Workload
from tilecast.step import parts
from tilecast.step.blocks import KernelSeconds
from tilecast.step.distinct import Column, DistinctValues, StepInputs, Value
from tilecast.step.passes import MicroBatch, block_passes, boundary_seconds, compute_micro_batch, visible_send_seconds
from tilecast.step.replicas import (
    SyncSeconds,
    exposed_and_hidden_seconds,
    find_zero_rows,
    link_contention,
    replica_sync_seconds,
    straggler_factor,
)
from tilecast.step.weights import (
    HeldWeights,
    copy_seconds,
    gradient_wait_seconds,
    hook_seconds,
    host_seconds_per_step,
    optimizer_seconds,
    weight_copy_bytes_per_s,
    weight_fetch_seconds,
)
from tilecast.zoo import ShardedGraph

PARTS = ("compute", "communication", "bubble", "optimizer", "launch", "input")
"""Parts of a step, in the order of tables."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one optimizer step of each plan. Every part has shape (n,)."""

    compute: Floats
    communication: Floats
    bubble: Floats
    optimizer: Floats
    launch: Floats
    input: Floats
    hidden: Floats
    """Data-parallel collectives that computation hides. They are not part of the step."""
    spread: Floats
    """Relative half-width of the kernels' 90 % range, averaged over kernels by time, (n,)."""
    correction: Floats
    """Factor on all parts, learned from runs on the pool's cluster and from the job's own runs, (n,)."""
    carried: Floats
    """Part of `correction` that is learned from the job's own runs, (n,)."""
    width: Floats
    """Factor on the half-width of the step's range, learned from all these runs, (n,)."""
    least: Floats
    """Seconds of all kernels at peak compute or memory bandwidth, (n,)."""

    @property
    def total(self) -> Floats:
        return self.compute + self.communication + self.bubble + self.optimizer + self.launch + self.input

    def with_calibration(self, ratio: Floats, width: Floats) -> StepTimes:
        """Return the times with every part multiplied by `ratio`, (n,). No step becomes shorter than `least`."""
        correction = np.maximum(ratio, np.minimum(self.least / self.total, 1.0))
        parts = {name: getattr(self, name) * correction for name in PARTS}
        return replace(self, **parts, hidden=self.hidden * correction, correction=correction, width=width)

    def with_earlier_runs(self, ratios: Floats, width: Floats) -> StepTimes:
        """Return the times with the corrections that are learned from the job's own runs.

        Args:
            ratios: factors on the parts from `JobRuns.find_plan_factors`, (3, n). No step becomes shorter than `least`.
            width: factor on the half-width of the step's range, (n,).
        """
        parts, before = correct_parts({name: getattr(self, name) for name in PARTS}, self.hidden, ratios), self.total
        ratio = np.sum(list(parts.values()), axis=0) / before
        lift = np.maximum(np.minimum(self.least / before, 1.0) / ratio, 1.0)
        parts, ratio = {name: value * lift for name, value in parts.items()}, ratio * lift
        return replace(self, **parts, correction=self.correction * ratio, carried=ratio, width=self.width * width)

    def parts(self, row: int) -> dict[str, float]:
        """Return one plan's breakdown, in seconds. The values sum to `total[row]`."""
        return {name: float(getattr(self, name)[row]) for name in PARTS}


def step(
    workload: Workload,
    sharded: ShardedGraph,
    plans: Plans,
    pool: Pool,
    priced: KernelSeconds,
    fitted: Constants | None = None,
) -> StepTimes:
    """Return the parts of a step of every plan on a pool, corrected by the pool's calibration and the job's own runs.

    Args:
        workload: the job.
        sharded: its graph under the plans' shards.
        plans: the plans, (n,).
        pool: the pool.
        priced: the seconds of the graph's kernels on the pool's GPU.
        fitted: constants to use instead of those that ship.
    """
    return Steps.from_plans(workload, plans, StepInputs.from_plans(sharded, plans, pool), pool, priced, fitted).rows(
        slice(None)
    )


@dataclass(frozen=True, slots=True)
class _CalibrationCorrections(Columns):
    """Factors by which a pool's calibration corrects the steps of n plans. Every field has shape (n,)."""

    ratio: Floats
    width: Floats
    """Factor on the half-width of the range."""


@dataclass(frozen=True, slots=True)
class _PlanGroupSeconds:
    """Seconds that all plans of a group share, for n groups. Plans of a group differ only in ZeRO and virtual stages.

    A matrix (4, n), (6, n) or (7, n) has the rows of `exposed_and_hidden_seconds`.
    """

    micro: MicroBatch
    compute_s: Floats
    exposed_s: Floats
    """Data-parallel communication that computation does not hide, a matrix."""
    hidden_s: Floats
    input_s: Floats
    launch_s: Floats
    """Seconds in which the GPU waits for the host, (n,)."""
    hooks_s: Floats | None
    """Seconds in which the GPU waits for ZeRO's hooks on the host, a matrix. None if the framework has no hooks."""
    least_s: Floats
    """Kernels at peak compute or memory bandwidth, (n,)."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Inputs of the step formulas for every plan of a table. `rows` returns the steps of selected plans."""

    workload: Workload
    graph: Graph
    plans: Plans
    inputs: StepInputs
    pool: Pool
    send_share: float
    """Largest share of the sends of interleaved stages that computation hides."""
    slowdown: float
    """Seconds that one second of hidden collectives adds to computation."""
    runs_hooks: bool
    """Whether the host runs hooks for each tensor of weights."""
    micro: DistinctValues[MicroBatch]
    boundary_s: DistinctValues[Floats]
    """Seconds to send a micro-batch's activations to the next stage and gradients back, per virtual stage."""
    held: DistinctValues[HeldWeights]
    sync: DistinctValues[SyncSeconds]
    straggler: DistinctValues[Floats]
    """Time of the slowest rank divided by the mean over ranks."""
    once_s: DistinctValues[Floats]
    """Seconds that the host takes once per step."""
    calibrated: DistinctValues[_CalibrationCorrections]
    copied_s: DistinctValues[Floats]
    """Seconds per micro-batch for copying and summing weights and gradients."""
    update_s: DistinctValues[Floats]
    """Seconds of the optimizer's update."""

    @classmethod
    def from_plans(
        cls,
        workload: Workload,
        plans: Plans,
        inputs: StepInputs,
        pool: Pool,
        priced: KernelSeconds,
        fitted: Constants | None = None,
    ) -> Steps:
        """Return the arguments of the formulas for a table of plans on a pool.

        Args:
            workload: the job.
            plans: the plans, (n,).
            inputs: the distinct rows of the plans on pools of this shape.
            pool: the pool that the job runs on.
            priced: the seconds of the graph's kernels on the pool's GPU.
            fitted: constants to use instead of those that ship.
        """
        constant, evaluate_per_distinct, speed_at = (
            fitted or constants.shipped_constants(),
            inputs.evaluate_per_distinct,
            inputs.speed_at,
        )
        graph, gpu, columns = inputs.sharded.graph, pool.gpu, pool.calibration.list_factors_by_gpus
        copies_per_s, host_s = weight_copy_bytes_per_s(gpu, constant), host_seconds_per_step(workload, graph, constant)

        def by_degrees(formula: Callable[[ShardedGraph, Plans, Rows], Value]) -> DistinctValues[Value]:
            return evaluate_per_distinct(("degrees",), formula)

        def sync_seconds_at(sharded: ShardedGraph, plans: Plans, rows: Rows) -> SyncSeconds:
            weights, buckets = held.take(rows), inputs.bucket_mib_at(rows)
            return replica_sync_seconds(workload, sharded, plans, weights, pool, constant, buckets, speed_at(rows))

        def boundary_seconds_at(sharded: ShardedGraph, plans: Plans, rows: Rows) -> Floats:
            return boundary_seconds(workload, sharded, plans, pool) / speed_at(rows)

        def copy_seconds_at(_: ShardedGraph, plans: Plans, rows: Rows) -> Floats:
            return copy_seconds(workload, held.take(rows), plans, copies_per_s)

        def optimizer_seconds_at(_: ShardedGraph, plans: Plans, rows: Rows) -> Floats:
            return optimizer_seconds(workload, held.take(rows), plans, gpu, constant)

        layered: tuple[Column, ...] = ("pipeline",) if workload.recompute_layers is not None else ()
        passes = evaluate_per_distinct(
            ("shard", "checkpointing", "links", *layered),
            lambda sharded, plans, rows: block_passes(workload, sharded, plans, pool, priced, constant, speed_at(rows)),
        )
        held = by_degrees(lambda sharded, plans, _: HeldWeights.from_plans(workload, sharded, plans))
        return cls(
            workload=workload,
            graph=graph,
            plans=plans,
            inputs=inputs,
            pool=pool,
            send_share=constant.send_share,
            slowdown=constant.slowdown * link_contention(pool),
            runs_hooks=any(frameworks.find_framework(workload).zero_tensor_us),
            micro=evaluate_per_distinct(
                ("shard", "checkpointing", "links", "pipeline"),
                lambda sharded, plans, rows: compute_micro_batch(sharded, plans, priced, passes.take(rows)),
            ),
            boundary_s=evaluate_per_distinct(("shard", "degrees"), boundary_seconds_at),
            held=held,
            sync=by_degrees(sync_seconds_at),
            straggler=by_degrees(lambda _, plans, __: straggler_factor(workload, plans, constant)),
            once_s=by_degrees(lambda _, plans, __: host_s + gradient_wait_seconds(workload, graph, plans, constant)),
            calibrated=by_degrees(
                lambda _, plans, __: _CalibrationCorrections(*columns(gpu.name, workload, plans.gpus))
            ),
            copied_s=inputs.evaluate_per_zero_stage(("degrees", "accumulates"), copy_seconds_at),
            update_s=inputs.evaluate_per_zero_stage(("degrees",), optimizer_seconds_at),
        )

    def total_seconds(self, rows: slice) -> tuple[Floats, Floats]:
        """Return the step seconds and the host stalls in seconds of some rows, (k,) each.

        The values are those that `rows` gives. Columns that neither value needs are not computed, unless corrections
        need them.
        """
        is_corrected = self.pool.calibration.corrections or self.pool.own.runs
        is_whole = bool(is_corrected) or self.workload.input_samples_per_s is not None
        times = self._evaluate_rows(rows, is_whole=is_whole)
        return times.total, times.launch

    def rows(self, rows: slice | Rows) -> StepTimes:
        """Return the step times of some rows of the table of plans, corrected by measured runs."""
        return self._evaluate_rows(rows, is_whole=True)

    def _evaluate_rows(self, rows: slice | Rows, *, is_whole: bool) -> StepTimes:
        """Return the corrected steps of some rows of the table.

        Neighbouring plans of one group of `Plans.distinct_splits` share one row of the inputs. If `is_whole` is False,
        the columns that are not parts of a step are placeholders, and no correction may need them.
        """
        plans, (some, place) = self.plans.take(rows), self.inputs.find_distinct_rows(rows)
        shared = self._plan_group_seconds(some, interleaves=bool((plans.virtual_stages > 1).any()))
        stage = np.minimum(np.maximum(plans.zero_stage, 0), 3)  # a table may state any number
        zero_row = find_zero_rows(stage, plans.virtual_stages, len(shared.exposed_s))
        updated, staged = (row * len(shared.launch_s) + place for row in (stage, zero_row))
        micro, repeats = shared.micro.stage_seconds().take(place), plans.gradient_accumulation.astype(float)
        straggler = self.straggler.take(some).take(place)
        sends_s = self.boundary_s.take(some).take(place) * plans.virtual_stages
        exposed_s = shared.exposed_s.take(staged)
        steady_s = visible_send_seconds(self.workload, plans, micro, sends_s, self.send_share)
        ones = np.broadcast_to(1.0, len(plans))
        times = StepTimes(
            compute=shared.compute_s.take(staged) * straggler,
            communication=parts.communication_seconds(repeats, micro, steady_s, exposed_s) * straggler,
            bubble=parts.bubble_seconds(plans, micro, sends_s, self.workload.pipeline_schedule) * straggler,
            optimizer=self.update_s.take(some).take(updated),
            launch=shared.launch_s.take(place) + (0.0 if shared.hooks_s is None else shared.hooks_s.take(staged)),
            input=shared.input_s.take(staged),
            hidden=shared.hidden_s.take(staged) if is_whole else ones,
            spread=shared.micro.spread.take(place) if is_whole else ones,
            correction=ones,
            carried=ones,
            width=ones,
            least=shared.least_s.take(place) if is_whole else ones,
        )
        return self._apply_corrections(times, plans, some, place)

    def _plan_group_seconds(self, rows: slice | Rows, *, interleaves: bool) -> _PlanGroupSeconds:
        """Return the seconds that plans share, for some rows of the inputs."""
        plans, micro = self.inputs.plans.take(rows), self.micro.take(rows)
        repeats = plans.gradient_accumulation.astype(float)
        exposed_s, hidden_s = exposed_and_hidden_seconds(
            self.workload, plans, micro, self.sync.take(rows), interleaves=interleaves
        )
        stages = np.arange(len(exposed_s)) % 4
        copied_s = self.copied_s.take(rows)[stages]
        if self.workload.offload == "parameters":
            exposed_s = exposed_s + repeats * weight_fetch_seconds(self.held.take(rows), micro)[stages]
        compute_s = parts.compute_seconds(repeats, micro, copied_s, hidden_s * self.slowdown)
        return _PlanGroupSeconds(
            micro,
            compute_s,
            exposed_s,
            hidden_s,
            parts.input_seconds(self.graph, plans, compute_s),
            parts.launch_seconds(repeats, micro, self.once_s.take(rows)),
            repeats * hook_seconds(self.workload, self.graph, plans, micro)[stages] if self.runs_hooks else None,
            repeats / plans.pipeline * micro.roofline_s,
        )

    def _apply_corrections(self, times: StepTimes, plans: Plans, rows: slice | Rows, place: Rows) -> StepTimes:
        """Return the times with all learned corrections. No step is shorter than the input pipeline takes."""
        per_node, own, samples_per_s = self.pool.gpus_per_node, self.pool.own, self.workload.input_samples_per_s
        if self.pool.calibration.corrections:
            calibrated = self.calibrated.take(rows).take(place)
            times = times.with_calibration(calibrated.ratio, calibrated.width)
        if own.runs:
            here = RunSetting.from_workload(self.pool.gpu.name, self.pool.gpu.architecture, self.workload)
            times = times.with_earlier_runs(*own.find_plan_factors(here, plans, per_node))
            times = replace(times, input=times.input + own.estimate_input_waits_s(plans, per_node))
        if samples_per_s is None:
            return times
        # Loaders work ahead, so their rate only bounds the step from below.
        missing_s = np.maximum(count_samples_per_node(plans, per_node) / samples_per_s - times.total, 0.0)
        return replace(times, input=times.input + missing_s)


def step_with_bucket_sizes(
    workload: Workload,
    sharded: ShardedGraph,
    plans: Plans,
    pool: Pool,
    priced: KernelSeconds,
    sizes_mib: Sequence[float],
) -> Floats:
    """Return the seconds of a step of one plan with gradient buckets of k sizes, (k,).

    `sharded` and `plans` have one row.
    """
    rows, sizes = np.zeros(len(sizes_mib), np.intp), np.array(sizes_mib, float)
    sharded, plans = sharded.take(rows), plans.take(rows)
    inputs = StepInputs.from_plans(sharded, plans, pool, bucket_mib=sizes)
    return Steps.from_plans(workload, plans, inputs, pool, priced).rows(slice(None)).total


def step_on_faster_links(
    workload: Workload, sharded: ShardedGraph, plans: Plans, pool: Pool, priced: KernelSeconds, speeds: Floats
) -> Floats:
    """Return the step seconds of n plans for k factors on the speed of all links, (n, k).

    A factor multiplies bandwidths and divides latencies, so it divides the seconds of every exchange.
    """
    rows, place = (axis.ravel() for axis in np.indices((len(plans), len(speeds))))
    sharded, plans = sharded.take(rows), plans.take(rows)
    inputs = StepInputs.from_plans(sharded, plans, pool, speed=speeds[place])
    return Steps.from_plans(workload, plans, inputs, pool, priced).rows(slice(None)).total.reshape(-1, len(speeds))
