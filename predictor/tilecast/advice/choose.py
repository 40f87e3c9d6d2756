"""Choose the plan of a pool to recommend, among those that the forecast cannot tell apart.

The plans that tie with the best one are narrowed down in three steps. Those with memory to spare stay; then those that
are not clearly behind in the criterion that the objective leaves open (price where time counts, time where price
counts); then those that are not clearly behind on a slow host. Of the rest, the plan is taken that a practitioner tries
first: data parallelism before ZeRO before tensor parallelism before pipelines, nothing recomputed, fewer GPUs.

A plan that a practitioner tries even earlier, and that is behind the chosen one in neither criterion, is taken instead,
however it does on a slow host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np

from tilecast import memory, uncertainty, zoo
from tilecast.advice.rank import Candidates, Details
from tilecast.advice.values import Offer, Request
from tilecast.memo import Memo
from tilecast.search import Mask
from tilecast.spec import CHECKPOINTING, Floats, Ints, Plan, Plans, Workload, distinct
from tilecast.uncertainty import Errors

MAX_TIED = 128
"""Most plans of a pool that are compared with its best one, to see whether the forecast can tell them apart."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The recommended plan of a field, and what else the forecast cannot tell from the best."""

    candidates: Candidates
    eligible: Mask
    """Rows that it was chosen from."""
    row: int
    value: float
    best: float
    """Lowest value of all eligible plans. Plans that tie may be behind it."""
    other: float
    """Value of the criterion that the objective leaves open: `Candidates.other` of the plan."""
    preference: tuple[int, ...]
    """`simplicity` of the plan."""
    ties: int
    details: Details
    place: int
    """Index of the recommended plan in `details`."""
    errors: Errors
    """Uncertainties of its forecast, in columns of length one."""

    @property
    def gpus(self) -> int:
        return int(self.candidates.gpus[self.row])

    @property
    def is_tight(self) -> bool:
        return bool(self.candidates.take(slice(self.row, self.row + 1)).tight[0])

    def offer(self) -> Offer:
        """Return the plan in full."""
        return self.details.offer(self.place)

    def scaled(self, factor: float, other: float = 1.0) -> Choice:
        """Return the choice with its value, and the criterion that the objective leaves open, multiplied by factors."""
        return replace(self, value=self.value * factor, best=self.best * factor, other=self.other * other)


def choose(request: Request, candidates: Candidates, eligible: Mask) -> Choice | None:
    """Return the plan to recommend among the eligible ones, as the module docstring says; None if none is left."""
    value = candidates.value(request)
    eligible = eligible & np.isfinite(value)
    if not eligible.any():
        return None
    if request.goal.fewest_gpus:
        eligible = eligible & (candidates.gpus == candidates.gpus[eligible].min())
    rows = np.flatnonzero(eligible)
    best = float(value[rows].min())
    near = _best_of_each_kind(candidates, rows[value[rows] <= best * np.exp(uncertainty.most_tied())], request)
    details, some = Details.of(candidates, near), candidates.take(near)
    tied = Ties(some, details.errors())
    places = tied.least(np.arange(len(near)), value[near])
    ties = len(places) - 1
    tight = some.tight[places]
    places = places if tight.all() else places[~tight]
    other, cautious = some.other(request), _value_on_slow_host(some, request)
    places = tied.least(places, other)
    columns = simplicity(some.take(places))
    order = np.lexsort((some.step_s[places], cautious[places], *columns[::-1]))
    ordered = places[order]
    careful = ordered[np.isin(ordered, tied.least(places, cautious))][0]
    no_worse = (value[near[ordered]] <= value[near[careful]]) & ~(other[ordered] > other[careful])
    first = order[no_worse][0]
    place = int(places[first])
    return Choice(
        candidates=candidates,
        eligible=eligible,
        row=int(near[place]),
        value=float(value[near[place]]),
        best=best,
        other=float(other[place]),
        preference=tuple(int(column[first]) for column in columns),
        ties=ties,
        details=details,
        place=place,
        errors=tied.errors.take(np.array([place])),
    )


def _value_on_slow_host(candidates: Candidates, request: Request) -> Floats:
    """Return what the objective minimises, on a slow host, (n,)."""
    return np.asarray(
        candidates.value(request) * uncertainty.cautious(candidates.step_s, candidates.launch_s) / candidates.step_s
    )


@dataclass(frozen=True, slots=True)
class Ties:
    """Plans that may tie, and the uncertainties of their forecasts, (k,)."""

    candidates: Candidates
    errors: Errors

    def least(self, places: Ints, column: Floats) -> Ints:
        """Return the places that the forecast cannot tell from the one with the lowest value in a column.

        Places that are ahead of one of those are included too. All places are returned if a value of the column is
        unknown or zero.
        """
        values = column[places]
        if not np.all(values > 0):
            return places
        first = int(places[np.argmin(values)])
        tied = np.log(values / values.min()) <= self._width(first)[places]
        return np.asarray(places[values <= values[tied].max()])

    def _width(self, first: int) -> Floats:
        """Return the logarithm of the ratio up to which the forecast cannot tell each plan from the first, (k,)."""
        plans = self.candidates.plans
        columns = [getattr(plans, item.name) for item in fields(Plans) if item.name not in _REPLICAS]
        alike = np.all([column == column[first] for column in (*columns, self.candidates.variant)], axis=0)
        return uncertainty.tie_within(self.errors, self.errors.take(np.array([first])), alike)


_REPLICAS = ("data", "gradient_accumulation")
"""Columns that say how often a GPU's work is repeated, not what the work is."""


def _best_of_each_kind(candidates: Candidates, rows: Ints, request: Request) -> Ints:
    """Return the best `MAX_TIED` of the rows, best first, and the best of each kind of plan.

    Plans are of one kind if they are equal in all that decides among ties. Of each kind, the best plan and the best
    plan on a slow host are included.
    """
    some = candidates.take(rows)
    order = np.lexsort((some.step_s, some.value(request)))
    rows, some = rows[order], some.take(order)
    if len(rows) <= MAX_TIED:
        return rows
    mask = np.arange(len(rows)) < MAX_TIED
    slow = np.argsort(_value_on_slow_host(some, request), kind="stable")
    kinds = [*simplicity(some), some.tight.astype(np.int64)]
    mask[distinct(*kinds).first] = True
    mask[slow[distinct(*(column[slow] for column in kinds)).first]] = True
    return rows[mask]


def simplicity(candidates: Candidates) -> tuple[Ints, ...]:
    """Return columns that are lower for a plan that is tried earlier, the most important first.

    They prefer the job's own batch and precision; then no splitting, ZeRO, tensor parallelism, context or expert
    parallelism, pipelines, in this order; fewer degrees of parallelism at once; nothing recomputed; a lower ZeRO stage;
    fewer ranks that a replica is split over; fewer GPUs.
    """
    plans = candidates.plans
    sharded = np.minimum(plans.zero_stage, 1)
    split = [sharded, plans.tensor > 1, (plans.context > 1) | (plans.expert > 1), plans.pipeline > 1]
    rung = np.max([step * np.asarray(used, np.int64) for step, used in enumerate(split, 1)], axis=0)
    degrees = (plans.tensor, plans.pipeline, plans.context, plans.expert, plans.virtual_stages)
    several = np.sum([degree > 1 for degree in degrees], axis=0)
    replica = plans.tensor * plans.pipeline * plans.context
    return candidates.variant, rung, several, plans.checkpointing, plans.zero_stage, replica, candidates.gpus


HALF, THIRD = 1 / 2, 1 / 3
"""Shares of a GPU's memory up to which a model counts as small.

A model that takes at most `HALF`, with its training state and one sample, is not split over ranks. If it takes at most
`THIRD`, its training state is not split either.
"""


def sensible(request: Request, candidates: Candidates, eligible: Mask) -> Mask:
    """Keep the eligible rows that a practitioner would use without a special reason.

    A model that a GPU holds with room to spare is replicated, not split, as long as every GPU has a sample. A replica
    that is small, or has no NVLink, is split in two ways at most. Tensor parallelism stays on GPUs that NVLink joins,
    where the node has any, and on at most `MOST_TENSOR` of them.

    A rule that would leave nothing is skipped. No rule applies to a stated plan, and a stated limit on tensor
    parallelism lifts the rules on it.
    """
    if request.plan is not None:
        return eligible
    plans = candidates.plans
    split = (plans.tensor > 1) | (plans.pipeline > 1) | (plans.context > 1) | (plans.expert > 1)
    masks = [~(split & _fits_whole(candidates, HALF))]
    if np.any(eligible & ~split & (plans.data > 1) & (plans.zero_stage == 0)):
        masks.append(~((plans.zero_stage > 0) & _fits_whole(candidates, THIRD)))
    masks.append(~is_split_too_far(candidates))
    if request.constraints.max_tensor is None:
        masks += [plans.tensor <= fastest_domain(candidates), plans.tensor <= MOST_TENSOR]
    for mask in masks:
        narrowed = eligible & mask
        eligible = narrowed if narrowed.any() else eligible
    return eligible


MOST_TENSOR = 8
"""Most ranks that split a product, even where NVLink joins the GPUs of a whole rack.

Of the 3,460 measured steps at hand three use more, all over a network between nodes.
"""


def fastest_domain(candidates: Candidates) -> int:
    """Return how many GPUs of a node the fastest link joins: those of an NVLink island, where there are islands."""
    intra = candidates.pool.intra
    return intra.domain if intra.beyond else candidates.pool.domain


MOST_WAYS = 2
LEAST_SPLIT = 32
"""Limits on splitting a replica in several ways among tensor, pipeline and context parallelism.

A replica is split in at most `MOST_WAYS` ways if it has fewer than `LEAST_SPLIT` GPUs or no NVLink. Of the 3,460
measured steps at hand, 32 split it in three ways, none of them on fewer than 32 GPUs (four nodes) and none without
NVLink, so no measurement supports a gain that is forecast for such a plan.
"""


def is_split_too_far(candidates: Candidates) -> Mask:
    """Return which plans split a replica in more ways than `MOST_WAYS` where that limit applies, (n,).

    Within a node without NVLink, sharding counts as one of the ways: no measured run shards what tensor parallelism and
    a pipeline split over a bus.
    """
    plans, pool = candidates.plans, candidates.pool
    degrees = (plans.tensor, plans.pipeline, plans.context)
    replica, ways = math.prod(degrees), sum((degree > 1).astype(np.int8) for degree in degrees)
    has_bus = pool.intra.kind != "nvlink"
    if has_bus:
        ways = ways + ((replica <= pool.gpus_per_node) & (plans.zero_stage > 0))
    return np.asarray(((replica < LEAST_SPLIT) | has_bus) & (ways > MOST_WAYS))


def _fits_whole(candidates: Candidates, share: float) -> Mask:
    """Return which plans leave a sample for every GPU and a model that fits whole in this share of its memory, (n,)."""
    most = share * candidates.pool.gpu.memory_bytes
    fits = np.array([whole_bytes(workload) <= most for workload in candidates.variants], bool)
    return np.asarray(fits[candidates.variant] & (candidates.gpus <= candidates.batch))


def whole_bytes(workload: Workload) -> float:
    """Return the bytes of training state and activations of a job that is not split.

    One sample at a time is assumed, or the job's own micro-batch. The result is infinite for a model whose own code
    spreads it over all ranks.
    """
    if zoo.spreads_rows(workload.model):
        return np.inf
    return _WHOLE.get(workload, lambda: _whole_bytes(workload))


_WHOLE: Memo[Workload, float] = Memo(64)


def _whole_bytes(workload: Workload) -> float:
    micro = workload.micro_batch or 1
    plan = Plan(
        micro_batch=micro,
        gradient_accumulation=workload.global_batch // micro,
        checkpointing=workload.checkpointing or CHECKPOINTING[0],
    )
    plans = Plans.of(plan)
    bill = memory.footprint(workload, zoo.shard(workload, plans), plans)
    return float((bill.parameters + bill.gradients + bill.optimizer + bill.activations)[0])
