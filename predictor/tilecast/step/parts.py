"""The parts of a step of m micro-batches on p pipeline stages with v virtual stages, one formula for each.

The slowest stage takes T per micro-batch, and all stages in sequence take A. A step of 1F1B takes m T + (A - T) / v
(Narayanan et al., arXiv 2104.04473, section 2.2). T is computation, launch stalls and exposed communication, so the
parts are

    compute        m (passes of the slowest stage + copies of weights) + slow-down by hidden collectives
    communication  m (exchanges inside layers + visible sends to the next stage) + exposed collectives of replicas
    bubble         (A + v (p - 1) sends - T) / v, or a share of it under another schedule
    optimizer      bytes that the update moves / bandwidth
    launch         m (stalls of the slowest stage) + host time once per step
    input          copy of the batch to the GPU that compute does not hide

All columns are (n,), in seconds; `repeats` is m. `Steps.rows` multiplies the first three by the time of the slowest
rank over the mean. The optimizer's part is in `weights`.
"""

from __future__ import annotations

import numpy as np

from tilecast import constants
from tilecast.graph import Graph
from tilecast.layout import ScheduleCosts, list_schedule_costs
from tilecast.spec import Floats, Plans, Schedule
from tilecast.step.passes import MicroBatch, StageSeconds


def compute_seconds(repeats: Floats, micro: MicroBatch, copied_s: Floats, slowdown_s: Floats) -> Floats:
    """Return the seconds of computation in a step, (n,).

    The seconds are those of all micro-batches with their copies of weights (`copied_s`), and the slow-down by overlap.
    """
    return repeats * (micro.gpu_s + copied_s) + slowdown_s


def communication_seconds(repeats: Floats, micro: StageSeconds, sends_s: Floats, exposed_s: Floats) -> Floats:
    """Return the seconds of a step's communication that computation does not hide, (n,).

    Args:
        repeats: micro-batches of a step, (n,).
        micro: seconds of a micro-batch on the slowest stage, with its collectives.
        sends_s: seconds per micro-batch of sending activations to the next stage and gradients back, over all virtual
            stages, (n,).
        exposed_s: seconds of data-parallel collectives, (n,).
    """
    return repeats * (micro.communication_s + sends_s) + exposed_s


def bubble_seconds(plans: Plans, micro: StageSeconds, sends_s: Floats, schedule: Schedule | None) -> Floats:
    """Return the seconds in which a stage is idle while the pipeline fills and drains, (n,).

    Some schedules have only a share of the bubble of 1F1B: they compute weight gradients in it, or feed micro-batches
    at both ends. Weight gradients take as long as the forward pass, but at most half of the backward pass.
    """
    waited = (micro.all_s + sends_s * (plans.pipeline - 1) - micro.slowest_s) / plans.virtual_stages
    for law, rows in list_schedule_costs(plans.schedule, schedule):
        if not (law.filled or law.is_bidirectional):
            continue
        if rows is None:
            waited = waited * _bubble_share(law, plans, micro)
        else:
            waited[rows] *= _bubble_share(law, plans.take(rows), micro.take(rows))
    return np.where(plans.pipeline > 1, np.maximum(waited, 0.0), 0.0)


def _bubble_share(law: ScheduleCosts, plans: Plans, micro: StageSeconds) -> Floats:
    """Return a schedule's bubble as a share of that of 1F1B, (n,)."""
    later, both, backward = plans.pipeline - 1.0, micro.slowest_s, micro.backward_s
    weights_s = np.minimum(both - backward, backward / 2)
    rest = both - law.filled * weights_s
    if law.is_bidirectional:
        rest, later = both + backward - 3 * weights_s, plans.pipeline * plans.virtual_stages / 2 - 1.0
    return np.asarray(np.maximum(rest, 0.0) * later / np.maximum(both * (plans.pipeline - 1.0), 1e-30))


def launch_seconds(repeats: Floats, micro: MicroBatch, once_s: Floats) -> Floats:
    """Return the seconds of a step in which the GPU waits for the host to launch kernels, (n,).

    Every micro-batch stalls the GPU, `repeats` times per step. `once_s` is the stall outside micro-batches.
    """
    return repeats * micro.stall_s + once_s


def input_seconds(graph: Graph, plans: Plans, compute_s: Floats) -> Floats:
    """Return the seconds of copying a batch to the GPU that computation does not hide, (n,)."""
    samples = plans.micro_batch * plans.gradient_accumulation
    host = samples * (graph.host_bytes_per_sample / constants.shipped_constants().host.copy_bytes_per_s)
    return np.maximum(host - compute_s, 0.0)
