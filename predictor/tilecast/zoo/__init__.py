"""Models as graphs of operators.

`build` turns a workload and its distinct shards into the operators of one rank. `find_preset` finds a published model
by name. `build_model` builds a model from dimensions that a user wrote.

To add a family: write a dataclass of its dimensions and `build(workload, shards) -> Graph` in a file here, and add a
row to `families.FAMILIES`. To add a model: add a table to a file in `presets/`. To add a `model_type` of Hugging Face:
add a table to a file in `huggingface/types/`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np

from tilecast import frameworks, fuse, shipped
from tilecast.graph import KIND_NAMES, Block, Graph, Op, Shards, require_few_operators
from tilecast.layout import is_folded, parse_layout
from tilecast.memo import Memo
from tilecast.model import Model
from tilecast.recomputation import CHECKPOINTING, Checkpointing, split_modules
from tilecast.spec import (
    PRECISIONS,
    Floats,
    Ints,
    Plan,
    Plans,
    Rows,
    SpecError,
    Workload,
    distinct_rows,
)
from tilecast.zoo import hybrid, preferences, towers, traced
from tilecast.zoo.adapters import count_quantized_head
from tilecast.zoo.cnn.resnet import FaceResNet
from tilecast.zoo.dimensions import Transformer
from tilecast.zoo.families import ADAPTED, FAMILIES, Builder, Family
from tilecast.zoo.layers import QUANTIZE
from tilecast.zoo.modules import list_modules
from tilecast.zoo.preferences import has_token_embeddings, is_trained_on_preferences
from tilecast.zoo.reading import build_model
from tilecast.zoo.recommender import EmbeddingTables
from tilecast.zoo.stages import FullestStages, find_stage_kinds, is_folded_by_plan

__all__ = [
    "ADAPTED",
    "FAMILIES",
    "EmbeddingTables",
    "Family",
    "Transformer",
    "build_model",
    "has_token_embeddings",
    "is_trained_on_preferences",
    "list_modules",
]


def recomputed_layer_fraction(workload: Workload, sharded: ShardedGraph, plans: Plans) -> Floats:
    """Return the fraction of a pipeline stage's layers that the job recomputes, for each of n plans, (n,)."""
    if workload.recompute_layers is None:
        return np.ones(len(plans))
    graph = sharded.graph
    if graph.has_stages:
        held = find_stage_kinds(graph, plans.pipeline, is_folded_by_plan(graph, plans)).layers.sum(axis=0).max(axis=0)
    else:
        held = sum(block.repeat for block in graph.layers) * sharded.largest_layer_fraction(plans)
    return np.asarray(np.minimum(workload.recompute_layers / np.maximum(held, 1.0), 1.0))


def list_layer_saved_bytes(workload: Workload, sharded: ShardedGraph, plans: Plans) -> list[Floats]:
    """Return the bytes that one layer saves for the backward pass of a micro-batch: one array (n,) for each block.

    If the job recomputes only some layers, the bytes are the mean over recomputed layers and all other layers.
    """
    kept = [one for _, one in yield_kept_bytes_by_block(sharded, plans.checkpointing)]
    if workload.recompute_layers is None:
        return kept
    again = recomputed_layer_fraction(workload, sharded, plans)
    whole = yield_kept_bytes_by_block(sharded, np.zeros_like(plans.checkpointing))
    return [again * one + (1.0 - again) * all_kept for one, (_, all_kept) in zip(kept, whole, strict=True)]


def yield_kept_bytes_by_block(sharded: ShardedGraph, codes: Ints) -> Iterator[tuple[Block, Floats]]:
    """Yield each block of layers with the bytes that one of its layers saves for the backward pass, (n,).

    The bytes are those of one micro-batch. `codes` has the recomputation code of each of n plans.
    """
    used = np.flatnonzero(np.bincount(codes))
    place = np.searchsorted(used, codes)
    for item in sharded.graph.layers:
        modes = [np.broadcast_to(item.kept_bytes(int(one)), sharded.graph.shards) for one in used]
        yield item, np.stack(modes)[place, sharded.index]


def list_recomputation_modes(model: Model) -> tuple[Checkpointing, ...]:
    """Return the recomputation modes that save memory for a model.

    A traced model accepts every mode.
    """
    return CHECKPOINTING if model.trace is not None else FAMILIES[model.family].recomputes


def refuse_useless_recomputation(model: Model, mode: Checkpointing, field: str) -> None:
    """Raise SpecError unless the recomputation mode saves memory for the model.

    Raises:
        SpecError: the model has nothing to recompute in this mode. The error names the setting `field`.
    """
    if names := split_modules(mode):
        if lacking := set(names) - (known := list_modules(model)):
            problem = f"layers of {model.name} have no {' and no '.join(sorted(lacking))} to recompute"
            known_modules = (
                f"modules among {', '.join(sorted(known))}" if known else " or ".join(list_recomputation_modes(model))
            )
            raise SpecError(field, problem, f"use {known_modules}")
        return
    if mode not in (supported := list_recomputation_modes(model)):
        problem = f"{model.name} has nothing that {mode} recomputation would save memory of"
        raise SpecError(field, problem, f"use {' or '.join(supported)}")


def build(workload: Workload, shards: Shards) -> Graph:
    """Return the graph of the operators that one rank runs, after the workload's fusion passes.

    Every dimension of an operator is an array with one value per shard in `shards`, (S,).

    Raises:
        SearchTooLargeError: the model has more operators than a search can price.
        SpecError: the model's family is unknown, or LoRA cannot train it.
    """
    workload, shards = preferences.adapt_to_loss(workload, shards)
    graph = find_builder(workload)(workload, shards)
    ends, folds = frameworks.find_framework(workload).counts_ends, is_folded(workload.pipeline_schedule)
    graph = replace(graph, counts_ends=ends, is_folded=folds)
    if workload.pipeline_layout is not None:
        graph = replace(graph, layout=parse_layout(workload.pipeline_layout).pieces)
    if workload.model.towers:
        graph = towers.prepend_towers(graph, workload, shards, _find_family_builder)
    require_few_operators(sum(len(block.ops) for block in graph.blocks))
    graph = keep_layers_in_16_bits(workload, fuse.apply_passes(graph, fuse.passes(workload)))
    return preferences.add_forward_passes(workload, graph)


def count_operators(workload: Workload) -> int:
    """Return the number of distinct operators in the model's graph.

    Raises:
        SearchTooLargeError: the model has more operators than a search can price.
        SpecError: the graph cannot be built.
    """
    one = np.ones(1, np.int64)
    shards = Shards(one, one, one, one, sequence_parallel=0 * one)
    return _OPERATORS.get(
        with_fixed_batch(workload), lambda: sum(len(block.ops) for block in build(workload, shards).blocks)
    )


_OPERATORS: Memo[int] = Memo(32)


def find_builder(workload: Workload) -> Builder:
    """Return the function that builds the graph of the workload's model.

    Raises:
        SpecError: the model's family is unknown, or LoRA cannot train it.
    """
    if workload.lora_rank and workload.model.family not in ADAPTED:
        raise SpecError(
            "training.loraRank",
            f"{workload.model.name} is of family {workload.model.family}, which has no adapters",
            f"leave it out, or choose a model of family {', '.join(ADAPTED)}",
        )
    return _find_family_builder(workload.model)


def _find_family_builder(model: Model) -> Builder:
    if model.trace is not None:
        return traced.build
    if model.family not in FAMILIES:
        raise SpecError("model.family", f"unknown family {model.family!r}", f"use one of {', '.join(FAMILIES)}")
    return FAMILIES[model.family].build


@dataclass(frozen=True, slots=True)
class ShardedGraph:
    """A graph built for S distinct shards, with the index of the shard that each of n plans has.

    `index[i]` is the shard of plan i, (n,).
    """

    graph: Graph
    index: Rows
    shard_degree: int | None = None
    """Data-parallel ranks over which ZeRO shards weights and states (`Workload.shard_degree`)."""
    has_frozen_parts: bool = False
    """Whether whole parts of the model are frozen (`Workload.frozen_parts`), so that stages train unequal shares."""

    def take(self, rows: Rows | slice) -> ShardedGraph:
        """Return the graph for selected plans only, in the order of `rows`."""
        index = self.index[rows]
        return self if len(index) == len(self.index) == 1 else replace(self, index=index)

    def expand_to_plans(self, column: Floats) -> Floats:
        """Return an array with one value per plan, (n,), from one with one value per shard, (S,) or (1,)."""
        return np.full(len(self.index), column[0]) if len(column) == 1 else column[self.index]

    def sum(self, blocks: Sequence[Block], column: str) -> Floats:
        """Return the sum of a column of `Block` over blocks and their repetitions, for each plan, (n,)."""
        return self.expand_to_plans(_sum_column(blocks, column))

    def largest_layer_fraction(
        self, plans: Plans, quantity: Literal["cost", "parameters", "activations"] = "cost"
    ) -> Floats:
        """Return the largest fraction of the layers of a traced model that any pipeline stage has, (n,).

        The fraction is measured in `quantity`: cost, parameters or activations. Stages are always cut to balance cost.
        """
        shares: Floats = np.ones(1) if self.graph.stages is None else getattr(self.graph.stages, quantity)
        return np.take(shares, np.minimum(plans.pipeline, len(shares)) - 1)

    def sum_fullest_stage(self, column: str, plans: Plans) -> Floats:
        """Return the sum of a column over the blocks of the pipeline stage with the most parameters, (n,)."""
        return self._sum_fullest_stage(plans, column)[0]

    def _sum_fullest_stage(self, plans: Plans, *columns: str) -> tuple[Floats, ...]:
        """Return the sum of each column over the blocks of the pipeline stage with the most parameters, (n,) each.

        The last item is the number of parameters in that stage's layers, (n,).
        """
        stages = self._find_fullest_stages(plans)
        return (*(stages.sum(self.graph, column) for column in columns), stages.layers)

    def _find_fullest_stages(self, plans: Plans) -> FullestStages:
        # Several formulas ask one after the other for the same plans.
        stages = next(iter(self.graph.fullest_stages), None)
        if stages is None or not stages.is_for_plans(self.index, plans):
            shares = self.largest_layer_fraction(plans, "parameters")
            stages = FullestStages.from_plans(self.graph, self.index, plans, shares)
            self.graph.fullest_stages[:] = [stages]
        return stages

    def held_parameters(self, plans: Plans) -> tuple[Floats, Floats]:
        """Return the number of parameters on the fullest rank before and after ZeRO shards them, two arrays (n,).

        The first array counts all parameters of the rank's pipeline stage. The second counts the share that remains on
        the rank after ZeRO has sharded them over the data-parallel ranks (arXiv 1910.02054).
        """
        everything, experts, _ = self._sum_fullest_stage(plans, "parameters", "expert_parameters")
        return everything, self._shard(everything, np.minimum(experts, everything), plans)

    def _shard(self, everything: Floats, experts: Floats, plans: Plans) -> Floats:
        """Return the number of parameters that remain on a rank after ZeRO has sharded them, (n,).

        Of `everything`, `experts` belong to experts.
        """
        shards = plans.shard_ranks(self.shard_degree)
        copies = plans.replicas / shards
        return np.asarray(
            (everything - experts) / shards + experts * copies / np.maximum(plans.expert_replicas, copies)
        )

    def trainable_fraction(self, plans: Plans) -> Floats:
        """Return the trained parameters as a fraction of the fullest stage's parameters, (n,).

        Without LoRA and frozen parts, it is 1. With frozen parts, the trained parameters are those of the stage that
        trains most.
        """
        if self.has_frozen_parts:
            everything, _ = self._sum_fullest_stage(plans, "parameters")
            return np.asarray(self._count_trained(plans)[0] / np.maximum(everything, 1.0))
        everything, frozen, _ = self._sum_fullest_stage(plans, "parameters", "frozen_parameters")
        return np.asarray(1.0 - frozen / np.maximum(everything, 1.0))

    def trainable_fraction_of_shards(self, plans: Plans) -> Floats:
        """Return the fraction of the parameters that a rank holds after ZeRO that are trained, (n,).

        It differs from that of all parameters if experts, which fewer ranks share, are trained and the rest is frozen,
        or the other way round.
        """
        if not self.has_frozen_parts:
            return self.trainable_fraction(plans)
        trained, experts = self._count_trained(plans)
        own = self._shard(trained, experts, plans)
        return np.asarray(np.minimum(own / np.maximum(self.held_parameters(plans)[1], 1e-9), 1.0))

    def trainable_fractions(self, plans: Plans) -> tuple[Floats, Floats]:
        """Return the fractions of parameters that are trained, outside and inside experts, (n,) each."""
        if not self.has_frozen_parts:
            whole = self.trainable_fraction(plans)
            return whole, whole
        everything, experts, _ = self._sum_fullest_stage(plans, "parameters", "expert_parameters")
        trained, trained_experts = self._count_trained(plans)
        dense = (trained - trained_experts) / np.maximum(everything - experts, 1.0)
        return np.minimum(dense, 1.0), np.minimum(trained_experts / np.maximum(experts, 1.0), 1.0)

    def _count_trained(self, plans: Plans) -> tuple[Floats, Floats]:
        """Return the trained parameters of the stage that trains most, and those in experts among them, (n,) each.

        No stage is said to train more than the fullest stage holds.
        """
        stages, everything = self._find_fullest_stages(plans), self.sum_fullest_stage("parameters", plans)
        trained = np.minimum(stages.find_most(self.graph, "trained_parameters"), everything)
        return trained, np.minimum(stages.find_most(self.graph, "trained_expert_parameters"), trained)

    def layer_parameter_fraction(self, plans: Plans) -> Floats:
        """Return the fraction of the fullest stage's parameters that belong to layers, (n,)."""
        everything, layers = self._sum_fullest_stage(plans, "parameters")
        return np.asarray(np.minimum(layers / np.maximum(everything, 1.0), 1.0))

    def frozen_bytes(self, workload: Workload, plans: Plans) -> Floats:
        """Return the mean number of bytes of a frozen weight in the fullest stage, (n,).

        Weights of layers may be quantized, and that of the projection to logits. All others have the type of
        activations.
        """
        whole = 2.0 if workload.is_mixed else 4.0
        if workload.frozen_bits == 16:
            return np.full(len(plans), whole)
        share = self.layer_parameter_fraction(plans)
        if head := count_quantized_head(workload):
            everything = self.sum_fullest_stage("parameters", plans)
            share = np.minimum(share + head / plans.tensor / np.maximum(everything, 1.0), 1.0)
        quantized = frameworks.frozen_weight_bits(workload) / 8.0
        return np.asarray(share * quantized + (1.0 - share) * whole)

    def gathered_bytes(self, workload: Workload, plans: Plans) -> Floats:
        """Return the mean number of bytes per weight when ranks all-gather the weights of the fullest stage, (n,)."""
        trainable = self.trainable_fraction(plans)
        return trainable * workload.weight_bytes + (1.0 - trainable) * self.frozen_bytes(workload, plans)


def _sum_column(blocks: Sequence[Block], column: str) -> Floats:
    """Return the sum of a column of `Block` over blocks and their repetitions, for each shard, (S,) or (1,)."""
    return sum((block.repeat * getattr(block, column) for block in blocks), np.zeros(1))


def keep_layers_in_16_bits(workload: Workload, graph: Graph) -> Graph:
    """Return the graph with a part of its products in BF16, for layers that the framework does not quantize to NVFP4.

    The layers of the graph are equal, so each layer runs the same fraction of its products in BF16, without a cast. The
    graph of a job in another precision is returned unchanged.
    """
    if workload.precision != "nvfp4":
        return graph
    depth = max(1, sum(block.repeat for block in graph.layers))
    share = min(frameworks.find_framework(workload).nvfp4_layers_in_bf16 / depth, 1.0)
    quantized, wide = PRECISIONS.index("nvfp4"), PRECISIONS.index("bf16")

    def split(op: Op) -> tuple[Op, ...]:
        table = op.table
        if op.name.endswith(QUANTIZE):
            return (replace(op, count=op.count * (1.0 - share)),)
        if not (table.precision == quantized).all():
            return (op,)
        kept = replace(table, precision=np.full_like(table.precision, wide))
        return replace(op, count=op.count * (1.0 - share)), replace(
            op, name=f"{op.name}.bf16", table=kept, count=op.count * share
        )

    layers = (replace(block, ops=tuple(one for op in block.ops for one in split(op))) for block in graph.layers)
    return replace(graph, layers=tuple(layers))


def build_sharded_graph(workload: Workload, plans: Plans) -> ShardedGraph:
    """Return the model's graph for the distinct shards in a table of plans.

    A cached graph is reused if it covers all these shards.
    """
    expert = np.minimum(plans.expert, max_expert_ranks(workload.model))
    columns = (plans.micro_batch, plans.tensor, plans.context, expert, plans.sequence_parallel, plans.expert_tensor)
    rows = distinct_rows(*columns)
    shares = [column[rows.first] for column in columns]
    keys = list(zip(*(share.tolist() for share in shares), strict=True))
    alike = with_fixed_batch(workload)
    graphs = _GRAPHS.get(alike, lambda: deque(maxlen=_GRAPHS_PER_WORKLOAD))
    known = next(((graph, places) for graph, places in tuple(graphs) if places.keys() >= set(keys)), None)
    if known is None:
        known = build(alike, Shards(*shares)), {one: place for place, one in enumerate(keys)}
        graphs.appendleft(known)
    graph, places = known
    return ShardedGraph(
        graph,
        np.array([places[one] for one in keys], np.intp)[rows.index],
        workload.shard_degree,
        bool(workload.frozen_parts),
    )


def with_fixed_batch(workload: Workload) -> Workload:
    """Return the workload with its global batch and number of steps replaced by constants.

    Workloads that differ only in these two have equal graphs and kernels, and so can share cached results.
    """
    return replace(workload, global_batch=1, steps=None)


_Shares: TypeAlias = tuple[int, ...]
_GRAPHS: Memo[deque[tuple[Graph, dict[_Shares, int]]]] = Memo(8)
"""Cache of the last graphs of each workload, with the index of each shard in them."""
_GRAPHS_PER_WORKLOAD = 3


def count_parameters(workload: Workload) -> float:
    """Return the number of parameters of the whole model."""
    whole = build_sharded_graph(workload, Plans.from_plans(Plan()))
    blocks = whole.graph.blocks
    return float((whole.sum(blocks, "parameters") + whole.sum(blocks, "table_parameters"))[0])


_MOST_RANKS = 2**30
"""A number of ranks that no job reaches."""


def max_expert_ranks(model: Model) -> int:
    """Return the largest useful degree of expert parallelism for the model."""
    return _MOST_RANKS if has_row_shardable_weights(model) else max(1, count_experts(model))


def count_experts(model: Model) -> int:
    """Return the number of experts in a layer, or 0 for a model without experts."""
    return model.dimensions.experts if isinstance(model.dimensions, Transformer) else 0


def has_distributed_tables(model: Model) -> bool:
    """Return whether the model's embedding tables are distributed over all ranks."""
    return isinstance(model.dimensions, EmbeddingTables) and model.dimensions.spread_tables


def has_row_shardable_weights(model: Model) -> bool:
    """Return whether the model has embedding tables or a classifier whose rows can be sharded over ranks.

    Such weights can be distributed over any number of ranks.
    """
    return has_distributed_tables(model) or isinstance(model.dimensions, FaceResNet)


def is_transformer(model: Model) -> bool:
    """Return whether the model is a stack of transformer layers with known dimensions."""
    return isinstance(model.dimensions, Transformer)


def reads_images(model: Model) -> bool:
    """Return whether training samples are decoded from images or volumes.

    A traced model reads images if one of its inputs has the shape (batch, 3, height, width).
    """
    if model.trace is not None:
        shapes = [model.trace.shapes[name] for name in model.trace.inputs]
        return any(len(shape) == 4 and shape[1] == 3 for shape in shapes)
    return FAMILIES[model.family].reads_images


def runs_fused_attention(workload: Workload) -> bool:
    """Return whether the model runs a fused attention kernel when it is not split over GPUs."""
    blocks = build_sharded_graph(workload, Plans.from_plans(Plan())).graph.blocks
    return any((op.table.kind == KIND_NAMES.index("attention")).any() for block in blocks for op in block.ops)


def has_equal_sequences(model: Model) -> bool:
    """Return whether all ranks get sequences of equal length, cut from one stream of tokens.

    The result is False for a traced model, where this is unknown.
    """
    return model.trace is None and FAMILIES[model.family].packs


def has_equal_samples(model: Model) -> bool:
    """Return whether the samples of all ranks have the same size and need no decoding on the host.

    This holds for packed sequences and for latents. The result is False for a traced model, where it is unknown.
    """
    return has_equal_sequences(model) or (model.trace is None and FAMILIES[model.family].latents)


def auto_model_suffix(model: Model) -> str | None:
    """Return the suffix of the Transformers `AutoModel…` class whose models compute their loss.

    Return an empty string if no such class computes the loss. Return None if Transformers has no such model.
    """
    family = None if model.trace is not None else FAMILIES[model.family].auto
    if family is None or model.auto is not None:
        return family if model.auto is None else model.auto
    return "" if model.towers else family


_HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def find_preset(name: str) -> Model:
    """Return the published model with this name.

    Case, dashes, spaces and underscores are ignored, and also words that tables of measurements add, such as the
    framework, the data set or the training phase (`_QUALIFIERS`). Text in brackets counts only if a preset matches it.
    The suffix "cut to 4 layers" selects a model with only the first four layers.

    Raises:
        SpecError: no preset has the name. The message suggests the most similar preset.
    """
    if cut := _CUT.fullmatch(name):
        return _keep_first_layers(find_preset(cut[1]), int(cut[2]))
    table, keys = _map_keys_to_names(), _make_lookup_keys(name)
    for key in keys:
        if key in table:
            return _read_preset(table[key])
    begun = list_presets_by_prefix(name)
    near = None if begun else _find_nearest(keys[-1])
    meant = _format_choice(begun) if begun else table[near] if near else ""
    hint = f"did you mean {meant}?" if meant else "`tilecast show models` lists them"
    if not meant and _HUB_NAME.fullmatch(name):
        hint += (
            "; of a model on the Hugging Face Hub, give its config.json as model.huggingFace, inline or in a ConfigMap"
        )
    raise SpecError("model.preset", f"unknown model {name!r}", hint)


def list_presets_by_prefix(prefix: str) -> list[str]:
    """Return the names of the presets that begin with `prefix`, in the order of `presets`.

    If `prefix` ends in a digit, no further digit may follow. A single letter matches no preset.
    """
    key = _make_lookup_keys(prefix)[-1]
    if len(key) < _LEADING:
        return []
    begins = re.compile(r"[^a-z\d.]*".join(map(re.escape, key)) + (r"(?!\d)" if key[-1].isdigit() else ""))
    return list(dict.fromkeys(known for known in _map_keys_to_names().values() if begins.match(known)))


def _format_choice(names: Sequence[str]) -> str:
    """Return names as a phrase: `a`, `a or b`, `a, b or c`. Only the first `_LISTED` names of a long list are shown."""
    if len(names) > _LISTED:
        return f"one of {', '.join(names[:_LISTED])} (`tilecast show models` lists {len(names) - _LISTED} more)"
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


@lru_cache(maxsize=256)
def _find_nearest(key: str) -> str | None:
    """Return the key of the preset that a mistyped key probably means, or None if no preset is similar.

    The result is the longest preset key with which the typed key begins. If there is none, it is the key with the most
    similar spelling.
    """
    table = _map_keys_to_names()
    within = [known for known in table if len(known) >= _TELLING and key.startswith(known)]
    if within:
        return max(within, key=len)
    alike = get_close_matches(key, table, n=3, cutoff=_CLOSE)
    return next((known for known in alike if known[0] == key[0]), None)


_CLOSE = 0.75
"""Least similarity, by difflib's ratio, at which a name counts as a misspelling of another."""
_TELLING = 3
"""Fewest characters of a preset's key for it to be suggested when a typed name begins with it."""
_LEADING = 2
"""Fewest characters of a typed name for it to count as the beginning of preset names, such as t5 or yi."""
_LISTED = 12
"""Most presets of a family that a message names."""


def is_preset(name: str) -> bool:
    """Return whether a preset has this name, compared as in `find_preset`."""
    cut = _CUT.fullmatch(name)
    return any(key in _map_keys_to_names() for key in _make_lookup_keys(cut[1] if cut else name))


_CUT = re.compile(r"(.+?)[\s,(-]+cut to ([1-9]\d{0,3}) layers?\)?", re.IGNORECASE)


def _keep_first_layers(model: Model, layers: int) -> Model:
    """Return the model reduced to its first `layers` layers.

    Raises:
        SpecError: the model has fewer layers, or no layers at all.
    """
    if layers > model.layers:
        problem = f"{model.name} has {model.layers or 'no'} layers, not {layers}"
        remedy = f"cut it to at most {model.layers}" if model.layers else "name it whole"
        raise SpecError("model.preset", problem, remedy)
    return replace(model, layers=layers)


@cache
def presets() -> Mapping[str, Model]:
    """Return all published models by key. A model has one key for its name and one for each alias."""
    return {key: _read_preset(name) for key, name in _map_keys_to_names().items()}


@cache
def _read_preset(name: str) -> Model:
    table = {key: value for key, value in _read_preset_tables()[name].items() if key != "aliases"}
    if "pattern" in table:
        table["pattern"] = hybrid.read_pattern(table["pattern"], table["layers"])
    return build_model({"name": name, **table})


@cache
def _read_preset_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the TOML table of every preset by preset name."""
    files = shipped.read_tables("tilecast.zoo", "presets").values()
    return {name: table for tables in files for name, table in tables.items()}


@cache
def _map_keys_to_names() -> Mapping[str, str]:
    """Return the name of each preset by key. A preset has one key for its name and one for each alias."""
    names: dict[str, str] = {}
    for name, table in _read_preset_tables().items():
        keys = dict.fromkeys((_make_lookup_key(spelling) for spelling in (name, *table.get("aliases", ()))), name)
        if taken := keys.keys() & names.keys():
            raise SpecError(f"preset {name}", f"{names[min(taken)]} also answers to {min(taken)!r}", "rename one")
        names |= keys
    return names


_QUALIFIERS = re.compile(
    r"""\b(?:
      pytorch | torch | tf[12]? | tensorflow[12]? | mxnet | mindspore | paddle | jax | elasticflow | adaptdl | mlperf
    | oneflow | gluon-?(?:cv|nlp) | ngc | d2 | detectron2 | [139]x(?:-(?:syncbn|cls-agnostic))?$
    | hf | instruct | chat | cased | uncased
    | imagenet(?:-?1k)? | coco(?:-?2017)? | pascal-?voc | voc | wikitext-?103 | wmt(?:-?\d\d)? | openimages | brats
    | librispeech | ljspeech
    | pre-?training | pretrain | fine-?tuning | sft | q?lora | noclip | phase-?[12] | phase | fpn
    )\b""",
    re.VERBOSE,
)
"""Words in a model's name that do not change what is computed for a sample."""
_SYNONYMS = ((r"(?<=\d)-?v1(?:\.5|b)\b", ""), (r"squad-?v?[12]\.[01]", "squad"), (r"cifar-?100?\b", "cifar"))
"""Spellings with the same meaning, and their replacements.

The usual ResNet is "v1.5" or "v1b". The number of CIFAR's classes is negligible beside the rest of a model.
"""


def _make_lookup_keys(name: str) -> tuple[str, str]:
    """Return two keys of a name: one with the text in brackets, and one without that text."""
    return _make_lookup_key(name), _make_lookup_key(re.sub(r"\(.*?\)", "", name))


def _make_lookup_key(name: str) -> str:
    """Return a name reduced to the key by which presets are found.

    The key omits the owner, the words of `_QUALIFIERS`, and all characters but letters, digits and dots.
    """
    key = re.sub(r"[\s_]+", "-", re.sub(r"^[\w.-]+/(?=[a-z])", "", name.lower()))
    for pattern, word in _SYNONYMS:
        key = re.sub(pattern, word, key)
    return "".join(ch for ch in _QUALIFIERS.sub("", key) if ch.isalnum() or ch == ".")
