"""Itemised memory of the fullest GPU of a plan, in bytes.

Static bytes per parameter follow ZeRO (arXiv 1910.02054, section 3 and 5) and the framework's data types
(`tilecast.frameworks`): weights, gradients, and the optimizer's master weights and moments. Stage 1 shards the
optimizer's states over the data-parallel ranks, stage 2 also the gradients, stage 3 also the weights. Embedding tables
that are updated row by row have no gradients, and their weights and moments are in FP32. Activations are those of the
graph (arXiv 2205.05198), times the micro-batches in flight: min(m, p) on the first of p 1F1B stages. If images differ
in size, memory is that of the largest batch.

The memory is that of the fullest moment of a step. Most frameworks allocate a layer's gradients after the backward pass
has freed the activations of the layers behind it, and free them in the update. So gradients and all activations exist
together only if a framework keeps gradients between steps, or if several micro-batches add to them. The moments that
are compared are the start of the backward pass, its last layer, and the update, when activations and 16-bit copies of
weights are gone.

Three figures of a run can be measured, and each is forecast: the bytes of tensors (`Footprint.allocated`, PyTorch's
max_memory_allocated), what the allocator holds (`reserved`, max_memory_reserved) and what the device reports (`device`,
nvidia-smi).

`Footprint` has the itemised bytes. `footprint` computes it. `FootprintTable` does so for many plans at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from tilecast import constants, frameworks, fuse, overlap, zoo
from tilecast.constants import ChannelBuffers
from tilecast.frameworks import Framework
from tilecast.hardware import Gpu
from tilecast.layout import list_schedule_costs
from tilecast.model import Model
from tilecast.recomputation import FULL, SELECTIVE, is_module_set
from tilecast.spec import (
    ELEMENT_BYTES,
    Columns,
    DistinctRows,
    Floats,
    Ints,
    Plans,
    Rows,
    Schedule,
    Workload,
    distinct_rows,
)
from tilecast.zoo import ShardedGraph
from tilecast.zoo.cnn.images import Images
from tilecast.zoo.stages import find_stage_kinds, is_folded_by_plan

Figure = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True, slots=True)
class _OptimizerStates:
    """Sizes of the optimizer's states besides the master copy, and of the temporary copies that an update needs."""

    moments: float
    """Number of moments per weight of the layers, in the type of moments."""
    end_moments: float
    """Number of moments per weight before or after the layers, in the type of moments."""
    quantized_bytes: float = 0.0
    """Bytes per weight of states whose type the optimizer fixes."""
    lists: float = 0.0
    """Copies of all moments that an update needs, unless it is fused."""
    tensors: float = 0.0
    """FP32 copies of the largest weight that an update needs."""


# Adafactor keeps a mean for each row and column (arXiv 1804.04235, section 3). Muon keeps one moment of the matrices of
# layers and updates all others with AdamW (Keller Jordan, Muon, README). 8-bit Adam keeps an FP32 scale for each block
# of 256 moments (arXiv 2110.02861, section 2; bitsandbytes, optim/optimizer.py), 4-bit Adam one for 128 (torchao,
# optim/subclass_4bit.py).
_OPTIMIZERS: Mapping[str, _OptimizerStates] = {
    "none": _OptimizerStates(0, 0), "sgd": _OptimizerStates(0, 0), "momentum": _OptimizerStates(1, 1),
    "adam": _OptimizerStates(2, 2, lists=1), "adamw": _OptimizerStates(2, 2, lists=1),
    "lamb": _OptimizerStates(2, 2, lists=1), "adafactor": _OptimizerStates(0, 0, tensors=1),
    "muon": _OptimizerStates(1, 2, tensors=1), "adamw8bit": _OptimizerStates(0, 0, 2 * (1 + 4 / 256)),
    "adamw4bit": _OptimizerStates(0, 0, 2 * (1 / 2 + 4 / 128)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the fullest rank of each plan at the fullest moment of a step. Every column is (n,).

    `total`, the bytes that the plan needs to run, is the sum of all columns except `cached`.
    """

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    working: Floats
    buffers: Floats
    """Communication buffers and gradient placeholders of the framework."""
    fragmentation: Floats
    context: Floats
    """Bytes of libraries and communicators outside the allocator."""
    cached: Floats
    """Further bytes that the allocator holds while the GPU has room: unused blocks and workspaces."""
    error: float
    """Half-width of the range as a share of the forecast (`Framework.memory_error`)."""

    @property
    def allocated(self) -> Floats:
        """Bytes of all tensors, (n,)."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.working + self.buffers

    @property
    def least(self) -> Floats:
        """Least bytes that the allocator needs, (n,)."""
        return self.allocated + self.fragmentation

    @property
    def total(self) -> Floats:
        return self.least + self.context

    @property
    def reserved(self) -> Floats:
        """Bytes that the allocator holds if the GPU has memory to spare, (n,)."""
        return self.least + self.cached

    @property
    def device(self) -> Floats:
        """Bytes in use that the device reports, (n,).

        The GPU must have memory to spare. `thread_stack_bytes` are not included.
        """
        return self.reserved + self.context

    @property
    def lower_bytes(self) -> Floats:
        """Lower end of the range of a run's memory, in bytes, (n,)."""
        return self.total * (1.0 - self.error)

    @property
    def upper_bytes(self) -> Floats:
        """Upper end of the range of a run's memory, in bytes, (n,), if the allocator never has to release any."""
        return upper_bytes(self.device, self.error)

    def figure_range(self, figure: Figure) -> tuple[Floats, Floats]:
        """Return both ends of the range of one of the three measured figures, (n,) each.

        The range goes from the plan's least bytes to the bytes that an allocator with room holds. It is widened by
        `error`.
        """
        least = {"allocated": self.allocated, "reserved": self.least, "device": self.total}
        return least[figure] * (1.0 - self.error), getattr(self, figure) * (1.0 + self.error)

    def items(self, row: int) -> dict[str, float]:
        """Return the bytes of each item of one row. The items sum to the row's `total`."""
        names = (item.name for item in fields(self) if item.name not in ("cached", "error"))
        return {name: float(getattr(self, name)[row]) for name in names}


def upper_bytes(device: Floats, error: float) -> Floats:
    """Return the upper end of the range of a run's memory, from its bytes on the device and the relative error."""
    return device * (1.0 + error)


def usable_bytes(gpu: Gpu) -> float:
    """Return the bytes of a GPU's memory that a job can use, without the driver's part and the context's stacks."""
    return gpu.memory_bytes * constants.shipped_constants().device_memory.usable_share - thread_stack_bytes(gpu)


def thread_stack_bytes(gpu: Gpu) -> float:
    """Return the bytes that a CUDA context reserves for thread stacks. A MIG slice reserves its fraction of them."""
    known = constants.shipped_constants()
    return known.device_memory.thread_bytes * known.resident_threads.on_gpu(gpu) * gpu.sm_count


_DEGREES = ("data", "tensor", "pipeline", "context", "expert", "expert_tensor")
"""Dimensions of parallelism that have a communicator each."""


def channel_buffers(gpu: Gpu | None) -> ChannelBuffers:
    """Return the sizes of NCCL's channel buffers on a GPU. If `gpu` is None, they are for the fastest kind of link."""
    link, known = gpu.intra_link if gpu else "", constants.shipped_constants().channel_buffers
    return next((known[prefix] for prefix in known if link.startswith(prefix)), [*known.values()][-1])


def context_bytes(workload: Workload, plans: Plans, gpu: Gpu | None) -> Floats:
    """Return the bytes of libraries and communicators of each plan, (n,)."""
    groups = np.sum([getattr(plans, name) > 1 for name in _DEGREES], axis=0, dtype=float)
    return _library_bytes(workload, groups, plans.expert, gpu)


def shared_context_bytes(workload: Workload, plans: Plans, gpu: Gpu) -> float:
    """Return the bytes of libraries and communicators for a job whose layers have different plans."""
    groups = sum(bool(np.any(getattr(plans, name) > 1)) for name in _DEGREES)
    return float(_library_bytes(workload, np.array(float(groups)), plans.expert.max(), gpu))


def _library_bytes(workload: Workload, groups: Floats, experts: Ints, gpu: Gpu | None) -> Floats:
    """Return the bytes of libraries, of `groups` communicators, and of the peers of expert-parallel ranks, (n,)."""
    opened, peers = channel_buffers(gpu), np.clip(experts - 1, 0, constants.shipped_constants().nccl.node_peers)
    libraries = frameworks.find_framework(workload).context_bytes
    return np.asarray(libraries + opened.communicator_bytes * groups + opened.peer_bytes * peers)


def footprint(
    workload: Workload, sharded: ShardedGraph, plans: Plans, gpu: Gpu | None = None, *, updates: bool = True
) -> Footprint:
    """Return the memory of each plan's fullest rank.

    Args:
        workload: job.
        sharded: graph and the shard of each plan.
        plans: n plans.
        gpu: GPU, whose link determines the memory of communicators.
        updates: whether to compare the weight update with the passes when looking for the fullest moment of a step.
    """
    return FootprintTable.from_plans(workload, sharded, plans, gpu).rows(slice(None), updates=updates)


@dataclass(frozen=True, slots=True)
class FootprintTable:
    """Memory of the plans of a table.

    Each formula is evaluated once for all plans that are equal in the columns it reads. `rows` returns the memory of
    selected plans.
    """

    workload: Workload
    error: float
    cached_fraction: float
    plans: Plans
    alike: DistinctRows
    """Groups of neighbouring plans from `Plans.distinct_splits`."""
    degrees: DistinctRows
    """Rows of `alike` with distinct degrees of parallelism."""
    states: _StateBytes
    """Weights, gradients and optimizer states for each row of `degrees`, at ZeRO 0, then at ZeRO 1, 2 and 3."""
    context: Floats
    """Bytes of libraries and communicators for each row of `degrees`."""
    activations: DistinctRows
    """Rows of `alike` with distinct shard, recomputation and pipeline, on which the bytes of a micro-batch depend."""
    micro: _MicroBatchBytes
    holds_gradients: bool
    """Whether gradients are allocated before the backward pass, even with a single micro-batch."""
    frees_casts: bool
    """Whether cached 16-bit copies of a layer's weights are freed with the activations that it recomputes."""
    keeps_gathered: bool
    """Whether weights that ZeRO 3 gathers for a backward pass stay whole in any of the plans."""

    @classmethod
    def from_plans(cls, workload: Workload, sharded: ShardedGraph, plans: Plans, gpu: Gpu | None) -> FootprintTable:
        """Return the memory of a table of plans."""
        alike = plans.distinct_splits()
        return cls.from_distinct(workload, sharded.take(alike.first), plans.take(alike.first), plans, gpu, alike)

    @classmethod
    def from_distinct(
        cls,
        workload: Workload,
        sharded: ShardedGraph,
        some: Plans,
        plans: Plans,
        gpu: Gpu | None,
        alike: DistinctRows,
    ) -> FootprintTable:
        """Return the memory of a table of plans from its distinct rows.

        Args:
            workload: the job.
            sharded: the graph under the shards of the distinct rows.
            some: the distinct rows.
            plans: the whole table.
            gpu: the GPU, or None.
            alike: `plans.distinct_splits()`, which says which distinct row each plan has.
        """
        workload, sharded = _enlarge_images(workload, sharded, some)
        framework = frameworks.find_framework(workload)
        accumulates = (np.minimum(some.gradient_accumulation, 2),) if framework.updates_in_backward else ()
        experts, pipeline = (some.expert, some.expert_tensor), some.pipeline
        if some.schedule.any():
            pipeline = 4 * pipeline + some.stage_holdings
        degrees = distinct_rows(some.tensor, *experts, some.context, pipeline, some.data, *accumulates)
        activations = distinct_rows(sharded.index, some.checkpointing, pipeline)
        four = np.tile(degrees.first, 4)
        staged = replace(some.take(four), zero_stage=np.repeat(np.arange(4), len(degrees)))
        states = _state_bytes(workload, sharded.take(four), staged, gpu)
        micro = _micro_batch_bytes(workload, sharded.take(activations.first), some.take(activations.first))
        context = context_bytes(workload, some.take(degrees.first), gpu)
        known = constants.shipped_constants().device_memory
        share = known.varied if _find_largest_image_size(workload.model) else known.cached
        cached = share - known.fragmentation if framework.allocator == "caching" else 0.0
        # Late blocks of a convolutional network have most weights, and early ones most activations.
        holds = framework.holds_gradients or zoo.list_recomputation_modes(workload.model) == ("none",)
        frees = framework.weights == "autocast" and workload.is_mixed
        return cls(
            workload, framework.memory_error, cached, plans, alike, degrees, states.collapse_constants(), context,
            activations, micro.collapse_constants(), holds, frees,
            bool(frameworks.keeps_gathered_weights(workload, replace(some, zero_stage=np.full(len(some), 3))).any()),
        )  # fmt: skip

    def on_gpu(self, gpu: Gpu) -> FootprintTable:
        """Return the memory of the same plans on another GPU with equal `reads_weights_in_both_layouts`."""
        plans = self.plans.take(self.alike.first[self.degrees.first])
        return replace(self, context=context_bytes(self.workload, plans, gpu))

    def context_bytes_of(self, rows: slice | Rows) -> Floats:
        """Return the bytes of libraries and communicators of some plans of the table, (k,)."""
        return self.context[self.degrees.index[self.alike.index[rows]]]

    def rows(self, rows: slice | Rows, *, updates: bool = True) -> Footprint:
        """Return the memory of some plans at the fullest moment of a step, (k,).

        If `updates` is False, the weight update is not considered.
        """
        return replace(self._evaluate_rows(rows, updates=updates), context=self.context_bytes_of(rows))

    def allocator_bytes(self, rows: slice | Rows) -> tuple[Floats, Floats]:
        """Return `Footprint.least` and `Footprint.reserved` of some plans, (k,) each."""
        bill = self._evaluate_rows(rows, updates=True)
        least = bill.least
        return least, least + bill.cached

    def _evaluate_rows(self, rows: slice | Rows, *, updates: bool) -> Footprint:
        """Return the memory of some plans like `rows`, but without libraries and communicators."""
        plans, place = self.plans.take(rows), self.alike.index[rows]
        stage = np.clip(plans.zero_stage, 0, 3)  # a table may state any number
        states = self.states.take(stage * len(self.degrees) + self.degrees.index.take(place))
        micro = self.micro.take(self.activations.index[place])
        activations = np.zeros(len(plans))
        if self.workload.training:
            activations = _activation_bytes(plans, micro, self.workload.pipeline_schedule)
        moment = self._find_fullest_moment(plans, states, micro, activations, updates=updates)
        parameters, gradients, kept, working = moment
        dynamic = kept + working
        return Footprint(
            parameters,
            gradients,
            states.optimizer,
            kept,
            working,
            states.buffers,
            constants.shipped_constants().device_memory.fragmentation * dynamic,
            np.broadcast_to(0.0, len(plans)),
            self.cached_fraction * dynamic + micro.workspace if self.cached_fraction > 0 else np.zeros(len(plans)),
            self.error,
        )

    def _find_fullest_moment(
        self, plans: Plans, states: _StateBytes, micro: _MicroBatchBytes, activations: Floats, *, updates: bool
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Return weights, gradients, activations and scratch memory at the fullest moment of a step, (k,) each."""
        accumulates = plans.gradient_accumulation > 1
        held = states.gradients if self.holds_gradients else np.where(accumulates, states.gradients, states.bucketed)
        grown = states.gradients - held
        casts, loss, layer = states.casts, micro.head_working, micro.layer_working
        if self.frees_casts:
            # The forward pass caches the copies of all layers, the backward pass of a recomputed layer its own alone.
            # The loss needs less in the forward pass: an FP32 copy of the logits beside the normalised one.
            freed = micro.recomputed * casts
            loss, layer = np.where(freed > 0, np.maximum(loss - freed, 0.5 * loss), loss), layer - freed
        # The reference model's copies take the place of those that are cached for recomputed layers.
        loss = loss + (1.0 - micro.recomputed) * states.reference_casts
        # The activations of the loss are freed when the gradient of the last layer is computed and reduced. In the
        # first layer all gradients are there.
        begin = np.maximum(loss, layer + states.reduced + np.minimum(states.head_gradients, grown) - micro.head)
        end = micro.first + layer + states.reduced + grown
        at_end = end > activations + begin
        gradients = np.where(at_end, states.gradients, held)
        kept, working = np.where(at_end, micro.first, activations), np.where(at_end, layer + states.reduced, begin)
        gathered = states.gathered
        if self.keeps_gathered:
            # The weights of a stage are whole when a backward pass ends, which has freed the activations of one
            # micro-batch of one piece of the stage. The next forward pass spreads them.
            saved = micro.early
            if self.workload.frozen_parts:
                # The first stage may save little for a frozen tower, so that another stage is the fullest.
                saved = np.maximum(saved, np.maximum(micro.later, micro.late))
            freed = np.where(at_end, 0.0, saved / plans.virtual_stages)
            gathered = np.maximum(gathered, states.whole - freed)
        working = working + gathered
        parameters = states.parameters + casts
        if self.frees_casts:
            # Copies that are freed may be more than all scratch memory of that moment.
            parameters, working = parameters + np.minimum(working, 0.0), np.maximum(working, 0.0)
        if not updates:
            return parameters, gradients, kept, working
        # Activations and copies are freed before the update.
        at_update = states.gradients + states.update > gradients + kept + working + casts
        if not at_update.any():
            return parameters, gradients, kept, working
        return (
            np.where(at_update, states.parameters, parameters),
            np.where(at_update, states.gradients, gradients),
            np.where(at_update, 0.0, kept),
            np.where(at_update, states.update, working),
        )


def _enlarge_images(workload: Workload, sharded: ShardedGraph, plans: Plans) -> tuple[Workload, ShardedGraph]:
    """Return the job and its graph with all images enlarged to the largest size, if the size of images varies.

    Memory is that of the largest batch, whereas seconds are those of the average batch.
    """
    if (sides := _find_largest_image_size(workload.model)) is None:
        return workload, sharded
    largest = replace(workload, model=workload.model.with_dimensions(image=sides[0], image_width=sides[1]))
    return largest, zoo.build_sharded_graph(largest, plans)


def _find_largest_image_size(model: Model) -> tuple[int, int] | None:
    """Return the height and width of the largest image in pixels, or None if all images have one size."""
    dims = model.dimensions
    if not isinstance(dims, Images) or dims.largest_image is None:
        return None
    return dims.largest_image, dims.largest_image_width or dims.largest_image


@dataclass(frozen=True, slots=True)
class _StateBytes(Columns):
    """Bytes of weights, gradients and optimizer states on the fullest rank of each plan, (n,)."""

    parameters: Floats
    casts: Floats
    """16-bit copies of weights, which exist until the backward pass has read them."""
    gradients: Floats
    bucketed: Floats
    """Gradient buckets that stay allocated between steps."""
    head_gradients: Floats
    """Gradients of the blocks after the layers."""
    optimizer: Floats
    reference_casts: Floats
    """16-bit copies of the weights of a reference model, which exist until its forward pass ends."""
    gathered: Floats
    whole: Floats
    """Weights that stay whole from a backward pass to the next forward pass under ZeRO 3."""
    reduced: Floats
    """Whole gradient of a block, before ZeRO shards it."""
    update: Floats
    """Temporary tensors of the weight update."""
    buffers: Floats


@dataclass(frozen=True, slots=True)
class _ParameterBytes:
    """Bytes per trainable parameter of each copy, the gradient and the optimizer states."""

    weight: float
    cast: float
    """Copy of the weight that matrix products read. 0 if they read the weight itself."""
    gradient: float
    master: float
    moment: float
    update: float
    """Copy of the gradient that the update reads. 0 if it reads the gradient itself."""

    @classmethod
    def from_framework(cls, workload: Workload, framework: Framework) -> _ParameterBytes:
        if not workload.is_mixed:
            return cls(4.0, 0.0, 4.0, 0.0, 4.0, 0.0)
        copy = 0.0 if framework.weights in ("master", "pure") else 2.0
        master = 4.0 if framework.weights == "master" else 0.0
        return cls(
            frameworks.HELD_BYTES[framework.weights], copy, frameworks.gradient_bytes(workload), master,
            framework.moment_bytes(workload), 4.0 if framework.casts_gradients else 0.0,
        )  # fmt: skip


def _state_bytes(workload: Workload, sharded: ShardedGraph, plans: Plans, gpu: Gpu | None) -> _StateBytes:
    """Return the bytes of weights, gradients, optimizer states and buffers of each plan, (n,)."""
    parameters, own = _count_held_parameters(workload, sharded, plans)
    trainable, framework = sharded.trainable_fraction(plans), frameworks.find_framework(workload)
    own_trainable = sharded.trainable_fraction_of_shards(plans)
    per_parameter, zero = _ParameterBytes.from_framework(workload, framework), np.zeros(len(plans))

    def spread(stage_from: int) -> Floats:
        """Return the number of parameters whose state a rank stores, (n,).

        ZeRO shards the state from stage `stage_from` on.
        """
        return np.where(plans.zero_stage >= stage_from, own, parameters)

    def spread_trained(stage_from: int) -> Floats:
        """Return the same number for trained parameters, (n,)."""
        return np.where(plans.zero_stage >= stage_from, own * own_trainable, parameters * trainable)

    tables = sharded.sum_fullest_stage("table_parameters", plans)
    held = _weight_bytes(workload, sharded, plans, per_parameter, gpu) + 4.0 * tables
    casts = _weight_cast_bytes(workload, sharded, plans, per_parameter)
    gradients = bucketed = optimizer = update = zero
    offloads = workload.offload == "parameters"
    if workload.training and not offloads:
        summed = frameworks.sums_whole_gradients(workload, plans)
        whole = np.where(summed, parameters * trainable, spread_trained(framework.gradient_sharding_stage))
        gradients = whole * per_parameter.gradient
        copied = (plans.replicas > 1) & (plans.zero_stage == 0)
        bucketed = np.where(copied, framework.gradient_copies - 1.0, 0.0) * gradients
        gradients = gradients + bucketed
        gradients = gradients + (4.0 * tables if framework.table_gradients == "whole" else 0.0)
    if workload.training and workload.optimizer != "none" and workload.offload == "none":
        own_states, layers = _OPTIMIZERS[workload.optimizer], sharded.layer_parameter_fraction(plans)
        number = layers * own_states.moments + (1 - layers) * own_states.end_moments
        moments = number * per_parameter.moment + own_states.quantized_bytes
        optimizer = (
            spread_trained(1) * (per_parameter.master + moments + per_parameter.update)
            + tables * own_states.moments * 4.0
        )
        if "optimizer" not in fuse.passes(workload):
            update = spread_trained(1) * own_states.lists * per_parameter.moment
        if framework.upcasts_gradients and per_parameter.gradient < per_parameter.master:
            update = update + spread_trained(1) * per_parameter.master
        ends = (*sharded.graph.first, *sharded.graph.last)
        largest = _find_largest_over_shards(sharded, [item.parameters for item in ends], len(plans))
        update = update + own_states.tensors * 4.0 * np.minimum(largest, spread(1)) * trainable
    block = _find_largest_over_shards(sharded, [item.parameters for item in sharded.graph.blocks], len(plans))
    if framework.updates_in_backward and not workload.lora_rank and not offloads:
        alone = (plans.gpus == 1) & (plans.gradient_accumulation == 1)
        gradients = np.where(alone, np.minimum(gradients, block * per_parameter.gradient), gradients)
        optimizer, update = np.where(alone, 0.0, optimizer), np.where(alone, 0.0, update)
    last = sum((sharded.expand_to_plans(item.parameters) for item in sharded.graph.last), zero)
    head = np.minimum(last * trainable * per_parameter.gradient, gradients)
    # A sharded model is gathered block by block, the current one and the next; embedding and head are blocks too.
    layer = _find_largest_over_shards(sharded, [item.parameters for item in sharded.graph.layers], len(plans))
    blocks = np.minimum(block, parameters) + (framework.gathered_blocks - 1) * np.minimum(layer, parameters)
    gathered = np.where(plans.zero_stage >= 3, blocks * sharded.gathered_bytes(workload, plans), 0.0)
    keeps = frameworks.keeps_gathered_weights(workload, plans) & workload.training
    whole_weights = np.where(keeps, parameters * sharded.gathered_bytes(workload, plans), 0.0)
    # The buffer from which a block's whole gradient is reduced exists beside it, in the type of the shards.
    spreads = workload.training and framework.weights in ("sharded", "pure")
    whole = np.minimum(layer, parameters) * trainable * (workload.weight_bytes + per_parameter.gradient)
    reduced = np.where((plans.zero_stage >= 2) & (plans.replicas > 1) & spreads, whole, 0.0)
    return _StateBytes(
        zero if offloads else held, zero if offloads else casts, gradients, bucketed, head, optimizer,
        _reference_cast_bytes(workload, plans, parameters, per_parameter), gathered,
        whole_weights, reduced, update,
        _buffer_bytes(workload, sharded, plans, per_parameter, parameters * trainable),
    )  # fmt: skip


def _count_held_parameters(workload: Workload, sharded: ShardedGraph, plans: Plans) -> tuple[Floats, Floats]:
    """Return the number of parameters on the fullest rank before and after ZeRO shards them, (n,) each.

    A schedule may put the weights of a stage on two ranks. In this case, ZeRO shards the states over both ranks.
    """
    parameters, own = sharded.held_parameters(plans)
    copies = np.ones(len(plans))
    for law, rows in list_schedule_costs(plans.schedule, workload.pipeline_schedule):
        copies[slice(None) if rows is None else rows] = law.weight_copies
    return parameters * np.where(plans.pipeline > 1, copies, 1.0), own


def _weight_bytes(
    workload: Workload, sharded: ShardedGraph, plans: Plans, per_parameter: _ParameterBytes, gpu: Gpu | None
) -> Floats:
    """Return the bytes of all weights and their copies on a rank, (n,)."""
    parameters, own = _count_held_parameters(workload, sharded, plans)
    trainable, framework = sharded.trainable_fraction(plans), frameworks.find_framework(workload)
    resident = np.where(plans.zero_stage >= 3, own, parameters)
    # Under ZeRO 2 a framework with shards holds the shards in FP32 and all weights in 16 bit.
    shard = np.where(plans.zero_stage >= 2, own, parameters) if framework.weights == "sharded" else resident
    whole = np.where(plans.zero_stage >= 3, 0.0, parameters)
    if workload.frozen_parts:
        held = shard * per_parameter.weight  # a frozen part is stored as it is trained elsewhere
    else:
        held = trainable * shard * per_parameter.weight
        held = held + (1 - trainable) * resident * sharded.frozen_bytes(workload, plans)
    held = held + _reference_bytes(workload, plans, parameters, own, per_parameter)
    return np.asarray(held + _fp8_bytes(workload, framework, gpu) * sharded.layer_parameter_fraction(plans) * whole)


def _reference_bytes(
    workload: Workload, plans: Plans, parameters: Floats, own: Floats, per_parameter: _ParameterBytes
) -> Floats:
    """Return the bytes of the weights of the reference model that a loss on preferences holds, (n,).

    They have the type of the trained weights (TRL, trainer/dpo_trainer.py: ref_model). Below ZeRO 3, they are whole on
    each rank (trl/models/utils.py: prepare_deepspeed). Shards of FSDP that are not sharded again after their first
    forward pass stay gathered in 16 bits.
    """
    if not workload.holds_reference:
        return np.zeros(len(plans))
    if not workload.is_mixed:
        return np.where(plans.zero_stage >= 3, own, parameters) * 4.0
    if frameworks.find_framework(workload).weights == "sharded":
        gathered = np.where(plans.zero_stage == 2, parameters * workload.weight_bytes, 0.0)
        return np.where(plans.zero_stage >= 2, own, parameters) * per_parameter.weight + gathered
    return np.where(plans.zero_stage >= 3, own, parameters) * per_parameter.weight


def _reference_cast_bytes(
    workload: Workload, plans: Plans, parameters: Floats, per_parameter: _ParameterBytes
) -> Floats:
    """Return the bytes of the 16-bit copies that autocast caches in a reference model's forward pass, (n,)."""
    if not (workload.holds_reference and frameworks.find_framework(workload).weights == "autocast"):
        return np.zeros(len(plans))
    return np.where(plans.zero_stage >= 3, 0.0, parameters) * per_parameter.cast


def _weight_cast_bytes(
    workload: Workload, sharded: ShardedGraph, plans: Plans, per_parameter: _ParameterBytes
) -> Floats:
    """Return the bytes of the 16-bit copies of weights that exist while a step needs them, (n,).

    Autocast copies only the weights of matrix products. An embedding's weights are among them only if the head shares
    them.
    """
    if not (workload.training and per_parameter.cast):
        return np.zeros(len(plans))
    parameters, _ = sharded.held_parameters(plans)
    if frameworks.find_framework(workload).weights == "autocast":
        first, last = (
            sum((sharded.expand_to_plans(item.parameters) for item in blocks), np.zeros(len(plans)))
            for blocks in (sharded.graph.first, sharded.graph.last)
        )
        unread = np.where((last >= first) & (plans.pipeline == 1), first, 0.0)
        parameters = parameters - unread
    whole = np.where(plans.zero_stage >= 3, 0.0, parameters)
    cast = 1.0 if workload.frozen_parts else sharded.trainable_fraction(plans)
    return np.asarray(cast * whole * per_parameter.cast)


def reads_weights_in_both_layouts(gpu: Gpu) -> bool:
    """Return whether FP8 products on a GPU read one copy of a weight both by rows and by columns."""
    return gpu.architecture == "blackwell" and gpu.compute_capability < 12


def _fp8_bytes(workload: Workload, framework: Framework, gpu: Gpu | None) -> float:
    """Return the bytes per weight that quantized copies add to a layer.

    FP8 products on Hopper and Ada read one copy by rows and one by columns. Those on Blackwell can use either copy
    (Transformer Engine, pytorch/csrc/extensions/util.cpp: non_tn_fp8_gemm_supported). In MXFP8 and NVFP4 the blocks of
    the two copies differ, so both are stored (pytorch/tensor/mxfp8_tensor.py, nvfp4_tensor.py).
    """
    if not workload.is_quantized:
        return 0.0
    element, has_blocks = ELEMENT_BYTES[workload.precision], workload.precision != "fp8"
    copies = 1.0 if not has_blocks and gpu is not None and reads_weights_in_both_layouts(gpu) else 2.0
    if frameworks.has_only_fp8_weights(workload):
        return copies * element - 2.0
    held = 2.0 if framework.fp8_weights_alone else framework.fp8_weight_bytes
    return held * element * copies / 2.0


def _buffer_bytes(
    workload: Workload, sharded: ShardedGraph, plans: Plans, per_parameter: _ParameterBytes, trainable: Floats
) -> Floats:
    """Return the bytes of the framework's communication buffers and gradient placeholders, (n,).

    `trainable` is the number of a rank's parameters with gradients, (n,).
    """
    framework = frameworks.find_framework(workload)
    if not workload.training:
        return np.zeros(len(plans))
    bucket = overlap.BucketLimits.from_plans(
        workload, plans, per_parameter.gradient, trainable * per_parameter.gradient
    ).rest
    copies = np.array(framework.bucket_copies)[plans.zero_stage]
    buckets = np.where(plans.replicas > 1, copies * np.minimum(bucket, trainable * per_parameter.gradient), 0.0)
    # Convolutional networks use none of the library's layers, which have the placeholders.
    is_network = zoo.list_recomputation_modes(workload.model) == ("none",)
    if is_network or not (framework.wgrad_placeholders and workload.is_mixed):
        return np.asarray(buckets)
    # Each shape of a layer's weights has a permanent placeholder, the output layer one while its gradient is computed.
    graph = sharded.graph
    dense = [item.parameters - item.expert_parameters for item in graph.layers]
    ends = [item.parameters for item in (*graph.first, *graph.last)]
    placeholders = _find_largest_over_shards(sharded, dense, len(plans)) + _find_largest_over_shards(
        sharded, ends, len(plans)
    )
    return np.asarray(buckets + np.minimum(placeholders, trainable) * workload.weight_bytes)


@dataclass(frozen=True, slots=True)
class _MicroBatchBytes(Columns):
    """Bytes of one micro-batch, (n,).

    For the backward pass, the first stage saves `early` for each micro-batch in flight, a later stage saves `later`,
    and the last stage saves `late` for one micro-batch. If there is no pipeline, `early` has all activations. The other
    columns except `head` and `tail` are scratch memory.
    """

    early: Floats
    later: Floats
    late: Floats
    first: Floats
    """Activations of the blocks before the layers."""
    layer_working: Floats
    head_working: Floats
    head: Floats
    """Activations of the blocks after the layers if the first stage has these blocks, otherwise 0."""
    tail: Floats
    """Activations of these blocks that the first stage of a pipeline keeps for one micro-batch, in addition to `early`.
    """
    workspace: Floats
    recomputed: Floats
    """Share of the layers that is recomputed in full. It is a fraction, not bytes."""


def _micro_batch_bytes(workload: Workload, sharded: ShardedGraph, plans: Plans) -> _MicroBatchBytes:
    """Return the bytes of activations and scratch memory of one micro-batch of each plan, (n,)."""
    graph, code = sharded.graph, plans.checkpointing
    kept = [
        one * (1.0 - workload.offloaded_activations) for one in zoo.list_layer_saved_bytes(workload, sharded, plans)
    ]
    first = sum((sharded.expand_to_plans(item.activation_bytes[0]) for item in graph.first), np.zeros(len(plans)))
    last = sum((sharded.expand_to_plans(item.activation_bytes[0]) for item in graph.last), np.zeros(len(plans)))
    layer_working = _find_largest_over_shards(sharded, [item.working_bytes for item in graph.layers], len(plans))
    head_working = _find_largest_over_shards(sharded, [item.working_bytes for item in graph.last], len(plans))
    copied = _find_largest_over_shards(sharded, [item.copied_bytes for item in graph.layers], len(plans))
    if not workload.training:
        nothing = np.zeros(len(plans))
        working = 2 * layer_working + copied + head_working + first
        return _MicroBatchBytes(
            nothing, nothing, nothing, nothing, working, nothing, nothing, nothing, nothing, nothing
        )
    # The layer that is recomputed is whole again while its backward pass runs.
    whole = _find_largest_over_shards(
        sharded, [np.broadcast_to(item.activation_bytes, (3, graph.shards))[0] for item in graph.layers], len(plans)
    )
    selective = np.where(code == SELECTIVE, np.minimum(whole, layer_working * 2), layer_working)
    layer_working = np.where(code == FULL, whole, selective)
    if (named := is_module_set(code)).any():
        # Outputs of modules are whole again while the backward pass of their layer runs.
        again = np.minimum(whole, layer_working + whole - _largest_saved_bytes_of_layer(sharded, code))
        layer_working = np.where(named, again, layer_working)
    if workload.offloaded_activations:
        # Activations of one layer are on their way to or from the host while another layer runs. Of a layer that is
        # recomputed, a framework counts the one tensor that it saves, rather than the layer.
        layers = np.where(code == FULL, frameworks.find_framework(workload).layers_in_transfer, 2.0)
        layer_working = layer_working + workload.offloaded_activations * layers * _largest_saved_bytes_of_layer(
            sharded, code
        )
    layer_working = layer_working + copied
    early, later, late = _stage_activation_bytes(sharded, plans, kept)
    early = early + first + np.where(plans.pipeline > 1, 0.0, last)
    workspace = _find_largest_over_shards(sharded, [item.workspace_bytes for item in graph.blocks], len(plans))
    recomputed = (code == FULL) * zoo.recomputed_layer_fraction(workload, sharded, plans)
    # The backward pass of the loss follows its forward pass, so one micro-batch at a time has these activations.
    tail = np.where((plans.pipeline > 1) & (is_folded_by_plan(graph, plans) > 0), last, 0.0)
    head = np.where(plans.pipeline > 1, tail, last)
    return _MicroBatchBytes(
        early, later, late + last, first, layer_working, head_working, head, tail, workspace, recomputed
    )


def _stage_activation_bytes(
    sharded: ShardedGraph, plans: Plans, layers: Sequence[Floats]
) -> tuple[Floats, Floats, Floats]:
    """Return the bytes that the layers of three stages save for the backward pass of a micro-batch, (n,) each.

    The stages are the first one, a later one and the last one. `layers` has the bytes of one layer of each block, (n,).
    The later stage is the one that saves most. It is treated as the second stage, which has more micro-batches in
    flight than any stage after it.
    """
    graph = sharded.graph
    if not graph.has_stages:
        total = sum((block.repeat * one for block, one in zip(graph.layers, layers, strict=True)), np.zeros(len(plans)))
        share = total * sharded.largest_layer_fraction(plans, "activations")
        return share, np.where(plans.pipeline > 1, share, 0.0), share
    folded = is_folded_by_plan(graph, plans)
    kinds = find_stage_kinds(graph, plans.pipeline, folded)
    each = kinds.sum_layers(layers)
    # Ranks of a folded pipeline have equally many micro-batches in flight.
    alive = np.where(folded > 0, 1.0, (plans.pipeline - kinds.number) / np.maximum(plans.pipeline - 1, 1))
    later = (each * alive * (1 - kinds.first)).max(axis=0)
    return (each * kinds.first).max(axis=0), later, (each * kinds.last).max(axis=0)


def _activation_bytes(plans: Plans, micro: _MicroBatchBytes, schedule: Schedule | None) -> Floats:
    """Return the bytes of activations on the fullest stage, for all micro-batches in flight, (n,)."""
    first, second = micro_batches_in_flight(plans, schedule)
    return np.maximum(np.maximum(micro.early * first + micro.tail, micro.later * second), micro.late)


def host_activation_bytes(workload: Workload, sharded: ShardedGraph, plans: Plans) -> Floats:
    """Return the largest number of bytes of a GPU's offloaded activations in its host's memory, (n,)."""
    away = [workload.offloaded_activations * one for one in zoo.list_layer_saved_bytes(workload, sharded, plans)]
    early, later, late = _stage_activation_bytes(sharded, plans, away)
    first, second = micro_batches_in_flight(plans, workload.pipeline_schedule)
    return np.maximum(np.maximum(early * first, later * second), late)


def micro_batches_in_flight(plans: Plans, schedule: Schedule | None = None) -> tuple[Floats, Floats]:
    """Return how many micro-batches the first and the second stage have in flight, (n,) each.

    The unit is a micro-batch in all layers of a stage. Stage k of 1F1B, counted from 0, has p - k micro-batches in
    flight. A stage with v virtual stages has v - 1 rounds of p virtual stages in flight, and two more for each stage
    behind it (Megatron-Core, pipeline_parallel/schedules.py: get_pp_rank_microbatches). Under schedules that put stages
    from both ends of the model on one rank, all ranks have equally many micro-batches in flight.
    """
    pieces, count = plans.virtual_stages, plans.gradient_accumulation.astype(float)
    laws = list_schedule_costs(plans.schedule, schedule)
    if laws[0][1] is None and (more := laws[0][0].extra_in_flight) is not None:
        every = np.minimum(plans.pipeline + np.where(plans.pipeline > 1, more, 0.0), count)
        return every, every
    each, share = np.minimum(pieces, 2), 1.0 / pieces
    first = (pieces - 1 + each) * plans.pipeline + (1 - each)
    first, second = np.minimum(first * share, count), np.minimum((first - each) * share, count)
    for law, rows in laws:
        if rows is not None and law.extra_in_flight is not None:
            pipeline = plans.pipeline[rows]
            every = np.minimum(pipeline + np.where(pipeline > 1, law.extra_in_flight, 0.0), count[rows])
            first[rows] = second[rows] = every
    return first, second


def _largest_saved_bytes_of_layer(sharded: ShardedGraph, code: Ints) -> Floats:
    """Return the most bytes that any layer saves for the backward pass of one micro-batch, (n,).

    `code` has the recomputation code of each of n plans.
    """
    kept = [one for _, one in zoo.yield_kept_bytes_by_block(sharded, code)]
    return np.maximum.reduce(kept) if kept else np.zeros(len(code))


def _find_largest_over_shards(sharded: ShardedGraph, columns: list[Floats], rows: int) -> Floats:
    """Return the largest value among some columns for each of n plans, (n,). If there are no columns, return 0.

    Each column has a value for each shard, (S,).
    """
    gathered = [sharded.expand_to_plans(column) for column in columns]
    return np.maximum.reduce(gathered) if gathered else np.zeros(rows)
