"""Kernels and host time of every block of a graph on one GPU, as the workload's framework runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tilecast import constants, frameworks, kernels, zoo
from tilecast.constants import Constants, FusedAttention
from tilecast.graph import KIND_NAMES, KINDS, Block, Graph, KernelTable, Op
from tilecast.hardware import Gpu
from tilecast.kernels import tiles
from tilecast.memo import Memo
from tilecast.spec import PRECISIONS, Floats, Rows, Workload
from tilecast.zoo import ShardedGraph
from tilecast.zoo.deepseek import Deepseek
from tilecast.zoo.layers import QUANTIZE
from tilecast.zoo.modules import (
    NO_GRADIENT,
    SHARED_MLP,
    find_shared_half,
    is_repeated_in_full,
    list_modules_of_operator,
)

FACTORS = ("matrix", "attention", "convolution", "exchange", "gradients")
"""Parts of a step that have a fitted factor each.

They are matrix products, fused attention, convolutions, exchanges inside layers, and the synchronisation of gradients.
Kernels bound by memory have one factor for each kind of host instead.
"""


_COMPUTING = {"gemm": "matrix", "attention": "attention", "conv": "convolution"}


_FACTOR_OF = [_COMPUTING.get(name) for name in KIND_NAMES]
_GROUPS = KINDS["conv"].dims.index("groups")


_FP8 = PRECISIONS.index("fp8")


_ATTENTION, _MATRIX = KIND_NAMES.index("attention"), KIND_NAMES.index("gemm")
_SIDES = KINDS["gemm"].dims
_NUMBERS_OF_WORD = {"fp16": 8, "bf16": 8, "tf32": 4}
"""Numbers that tensor cores read at once, for the precisions whose unaligned products were measured."""


@dataclass(frozen=True, slots=True)
class _PassSeconds:
    """One pass through a block: seconds of the GPU and of the host, (S,) for S shards."""

    gpu_s: Floats
    host_s: Floats

    def __add__(self, other: _PassSeconds) -> _PassSeconds:
        return _PassSeconds(self.gpu_s + other.gpu_s, self.host_s + other.host_s)

    def scaled(self, share: float) -> _PassSeconds:
        return _PassSeconds(self.gpu_s * share, self.host_s * share)


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Times of the forward and backward pass through one layer of a block.

    Recomputation runs a part of the forward pass again: `repeated` if it is full, `core` if it is selective, and an
    entry of `modules` for each module of `recomputation.MODULES` that it names.
    """

    block: Block
    forward: _PassSeconds
    repeated: _PassSeconds
    core: _PassSeconds
    backward: _PassSeconds
    modules: Mapping[str, _PassSeconds]
    shared_s: Mapping[tuple[str, str], Floats]
    """GPU seconds of the two halves of a shared MLP, by phase and by the exchange of experts beside each, (S,)."""


@dataclass(frozen=True, slots=True)
class KernelSeconds:
    """Seconds of the kernels of a sharded graph on one GPU, shared by all plans on that GPU."""

    blocks: tuple[BlockTimes, ...]
    spread: Floats
    """Relative half-width of the kernels' 90 % range, averaged over kernels by time, (S,)."""
    roofline_s: Floats
    """Seconds of all kernels of a micro-batch at peak compute or memory bandwidth, (S,)."""


def kernel_seconds(
    workload: Workload,
    sharded: ShardedGraph,
    gpu: Gpu,
    fitted: Constants | None = None,
    timed: kernels.KernelTimes | None = None,
) -> KernelSeconds:
    """Return the seconds of all kernels of a graph, by block. The predictor is called once.

    Args:
        workload: the job.
        sharded: its graph under S shards.
        gpu: the GPU.
        fitted: constants to use instead of those that ship.
        timed: seconds of the distinct kernels of the graph. If None, they are predicted.

    Raises:
        SpecError: the GPU cannot run the workload's precision.
    """
    gpu.peak(workload.precision)
    if fitted is not None or timed is not None:
        return _compute_kernel_seconds(workload, sharded.graph, gpu, fitted or constants.shipped_constants(), timed)

    def price_kernels() -> tuple[Graph, KernelSeconds]:
        return sharded.graph, _compute_kernel_seconds(alike, sharded.graph, gpu, constants.shipped_constants())

    # The graph is kept with its times, so that its id is not reused for another graph.
    alike = zoo.with_fixed_batch(workload)
    return _PRICED.get((id(sharded.graph), alike, gpu), price_kernels)[1]


_PRICED: Memo[tuple[Graph, KernelSeconds]] = Memo(32)


_KERNELS: Memo[tuple[Graph, tuple[KernelTable, list[Rows]]]] = Memo(4)


def _compute_kernel_seconds(
    workload: Workload, graph: Graph, gpu: Gpu, fitted: Constants, timed: kernels.KernelTimes | None = None
) -> KernelSeconds:
    # The graph is kept with its kernels, so that its id is not reused for another graph.
    table, rows = _KERNELS.get(id(graph), lambda: (graph, graph.kernels()))[1]
    times = timed or kernels.predict_kernel_times(table, gpu)
    forward_launch_s, backward_launch_s = fitted.launch_s[find_launch_mode(workload)]
    recomputed = recomputed_fraction(workload)
    casts = 1.0 if gpu.supports("mxfp8") else frameworks.find_framework(workload).fp8_cast_launches
    zero = _PassSeconds(np.zeros(1), np.zeros(1))
    items, position = [], 0
    weight, spread, roofline_s = np.zeros((3, graph.shards))
    for block in graph.blocks:
        passes = dict.fromkeys(("forward", "repeated", "core", "backward"), zero)
        modules = dict.fromkeys(block.freed_bytes, zero)
        shared_s: dict[tuple[str, str], Floats] = {}
        for op in block.ops:
            index = rows[position]
            position += 1
            seconds = operator_seconds(workload, op, times, index, fitted)
            launch_s = forward_launch_s if op.phase == "forward" else backward_launch_s
            launches = op.count * op.launches * (casts if op.name.endswith(QUANTIZE) else 1.0)
            # Host-paced kernels have their launches in their seconds, and no other kernel covers these.
            launches_s = np.zeros(1) if op.host_paced else np.atleast_1d(launches * launch_s)
            kernels_pass = _PassSeconds(seconds, launches_s)
            passes[op.phase] = passes[op.phase] + kernels_pass
            if op.name.startswith(SHARED_MLP):
                half = op.phase, find_shared_half(op.name)
                shared_s[half] = shared_s.get(half, 0.0) + seconds
            is_repeated = op.phase == "forward" and is_repeated_in_full(workload, op.name)
            if is_repeated:
                passes["repeated"] = passes["repeated"] + kernels_pass
            if op.phase == "forward" and (share := recomputed(op)):
                passes["core"] = passes["core"] + kernels_pass.scaled(share)
            if is_repeated and modules:
                for name in list_operator_modules(workload, op) & modules.keys():
                    modules[name] = modules[name] + kernels_pass
            weight = weight + seconds * block.repeat
            spread = spread + seconds * block.repeat * times.spread[index]
            roofline_s = roofline_s + times.roofline_s[index] * op.count * block.repeat
        items.append(BlockTimes(block, **passes, modules=modules, shared_s=shared_s))
    return KernelSeconds(tuple(items), spread / np.maximum(weight, 1e-30), roofline_s)


def find_launch_mode(workload: Workload) -> str:
    """Return how the host launches kernels: `graph`, or the workload's execution, such as `eager`.

    The result is a key of `launch_us`, `collective_us`, `step_ms` and `gradient_us` in the constants.
    """
    is_graph = workload.execution == "eager" and frameworks.find_framework(workload).host == "graph"
    return "graph" if is_graph else workload.execution


def _memory_kernel_kind(workload: Workload) -> str:
    """Return how kernels that move memory run, such as `fused`. It is a key of `memory` in the constants."""
    if workload.execution in ("eager", "cudaGraphs") and frameworks.has_fused_kernels(workload):
        return "fused"
    # Traces and networks that are no transformers list every operator that runs.
    host = find_launch_mode(workload)
    return "listed" if not zoo.is_transformer(workload.model) and host == "eager" else host


def recomputed_fraction(workload: Workload) -> Callable[[Op], float]:
    """Return a function that gives the fraction of a forward operator which selective recomputation repeats."""
    if frameworks.find_framework(workload).selective == "attention":
        return lambda op: float(op.selective)
    rates = {_ATTENTION: 0.0, _MATRIX: 0.5}
    return lambda op: 0.0 if op.name.startswith(NO_GRADIENT) else rates.get(int(op.table.kind[0]), 1.0)


def list_operator_modules(workload: Workload, op: Op) -> frozenset[str]:
    """Return which modules of `recomputation.MODULES` a layer's forward operator belongs to."""
    return list_modules_of_operator(
        op.name,
        selective=op.selective,
        fuses_norms=frameworks.find_framework(workload).fuses_norms,
        latent=isinstance(workload.model.dimensions, Deepseek),
    )


def operator_seconds(
    workload: Workload,
    op: Op,
    times: kernels.KernelTimes,
    rows: Rows,
    fitted: Constants | None = None,
) -> Floats:
    """Return the GPU seconds of an operator in one repetition of its block, (S,), with the framework's factors.

    The seconds are at least those at peak compute or memory bandwidth. For an operator that the host paces, they are
    also at least those of its launches.

    Args:
        workload: the job.
        op: the operator.
        times: seconds of the distinct kernels of the graph.
        rows: kernel of the operator under each shard, as a row of `times`, (S,).
        fitted: constants to use instead of those that ship.
    """
    seconds = times.seconds[rows] * op.count
    for factor in correction_factors(workload, op, times, rows, fitted).values():
        seconds = seconds * factor
    return np.maximum(seconds, times.roofline_s[rows] * op.count)


def correction_factors(
    workload: Workload,
    op: Op,
    times: kernels.KernelTimes,
    rows: Rows,
    fitted: Constants | None = None,
) -> dict[str, Floats]:
    """Return the factors from an operator's isolated seconds to its seconds in a step, by name of constant.

    Each has shape (S,) or (1,). `operator_seconds` describes the arguments.
    """
    fitted = fitted or constants.shipped_constants()
    factors: dict[str, Floats] = {}
    if op.host_paced:
        host = find_launch_mode(workload)
        launch_s = fitted.launch_s[host][op.phase == "backward"]
        return {f"launch_us.{host}": np.maximum(op.launches * launch_s / times.seconds[rows], 1.0)}
    if times.irregular[rows].any():
        factors["alignment.irregular"] = np.where(times.irregular[rows], fitted.irregular, 1.0)
    if op.table.kind[0] == _MATRIX and (slowed := _unaligned_factor(workload, op, times, rows, fitted)) is not None:
        factors["alignment.unaligned"] = slowed
    if times.implicit[rows].any():
        # A convolution that waits for its addresses draws less power, so the slower of both limits counts, not both.
        share = times.gpu.sustained_ratio[PRECISIONS[op.table.precision[0]]]
        slower = np.where(times.implicit[rows] > 0, fitted.implicit ** times.implicit[rows] * share, 1.0)
        factors["implicit.convolution"] = np.maximum(slower, 1.0)
    if op.table.kind[0] == _MATRIX and op.table.precision[0] == _FP8:
        is_measured = times.gpu.compute_capability < fitted.kernels.unmeasured_fp8_capability
        if is_measured and frameworks.find_framework(workload).fp8_products == "cublas":
            factors["fp8.cublas"] = np.full(1, fitted.fp8_cublas)
    part, runner = _FACTOR_OF[op.table.kind[0]], _memory_kernel_kind(workload)
    if part:
        factors[f"factor.{part}"] = np.full(1, fitted.factor[part])
        slowdown = _power_factor(PRECISIONS[int(op.table.precision[0])], times.gpu, fitted)
        if slowdown > 1.0:
            factors[f"power.{times.gpu.architecture}"] = np.full(1, slowdown)
    else:
        factors[f"memory.{runner}"] = np.full(1, fitted.memory_factor(runner, times.gpu))
    if part == "convolution" and workload.precision == "fp32":
        framework, is_grouped = frameworks.find_framework(workload), op.table.dims[0, _GROUPS] > 1
        older = framework.grouped_convolution if is_grouped else framework.dense_convolution
        if older != 1.0:
            factors["framework.convolution"] = np.full(1, older)
    if op.table.kind[0] == _ATTENTION and (fused := find_fused_attention(workload, times.gpu, fitted)):
        factors[f"attention.{fused.name}"] = np.full(1, fused.time_factor(times.gpu, op.phase))
    return factors


def has_attention_kernels(workload: Workload, gpu: Gpu) -> bool:
    """Return whether the attention library that a workload names has kernels for its attention on a GPU.

    If the workload names none, return True.
    """
    library = constants.shipped_constants().attention.get(workload.attention)
    return library is None or library.runs_on(gpu, is_mixed=workload.is_mixed)


def _power_factor(precision: str, gpu: Gpu, fitted: Constants) -> float:
    """Return the factor, at least 1, by which a GPU's power limit slows matrix products in a step."""
    if gpu.architecture not in fitted.joules_per_flop or tiles.find_compute_units(precision, gpu) != "tensor":
        return 1.0
    alone = gpu.peak(precision) * gpu.sustained_ratio[precision]
    return max(1.0, alone * fitted.joules_per_flop[gpu.architecture] / gpu.tdp_w)


def _unaligned_factor(
    workload: Workload, op: Op, times: kernels.KernelTimes, rows: Rows, fitted: Constants
) -> Floats | None:
    """Return the factor on the seconds of a matrix product whose rows do not fill whole words, (S,), or None for 1.

    Compilers pad such products (PyTorch, inductor/config.py: shape_padding; XLA, cublas_pad_for_gemms), and so do
    frameworks that pad the vocabulary. The other graph executors run old libraries, which were not measured.
    """
    aligned = frameworks.has_fused_kernels(workload) or find_launch_mode(workload) != "eager"
    if aligned or frameworks.find_framework(workload).pads_vocabulary:
        return None
    precision = PRECISIONS[int(op.table.precision[0])]
    if precision not in _NUMBERS_OF_WORD or tiles.find_compute_units(precision, times.gpu) != "tensor":
        return None
    batch, m, n, k = (op.table.dims[:, _SIDES.index(name)] for name in ("batch", "m", "n", "k"))
    # Y = X W' has rows of n and k numbers. The gradient of W has rows of m and n, since tokens are summed over.
    sides = (m, n) if op.name.endswith(".weight-gradient") else (n, k)
    loaded = np.full(len(batch), float(_NUMBERS_OF_WORD[precision]))
    for side in sides:
        for number in (4, 2, 1):
            loaded = np.where((loaded > number) & (side % (2 * number) != 0), number, loaded)
    if (loaded == _NUMBERS_OF_WORD[precision]).all():
        return None
    rate = fitted.unaligned * loaded * times.gpu.sm_count * times.gpu.boost_clock_hz
    least_s = np.where(loaded < _NUMBERS_OF_WORD[precision], 2.0 * batch * m * n * k / rate, 0.0)
    return np.maximum(least_s / times.seconds[rows], 1.0)


def find_fused_attention(workload: Workload, gpu: Gpu, fitted: Constants) -> FusedAttention | None:
    """Return the library of fused attention that runs a workload's attention on a GPU.

    The framework tries libraries in its order (`frameworks.Framework.attention`). The result is None if none of them
    runs on the GPU.
    """
    for choice in frameworks.list_attention_choices(workload):
        library = fitted.attention[choice.library]
        if choice.is_tried_on(gpu.compute_capability) and library.runs_on(gpu, is_mixed=workload.is_mixed):
            return library
    return None
