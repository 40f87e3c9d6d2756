"""Fusion passes, in which compilers, hand-written kernels or libraries replace operators of eager execution.

A model family lists every operator of eager execution, and every operator that a fusion pass adds. `Op.unless` names
the pass that removes an operator. `Op.only` names the pass that adds an operator. `passes` returns the passes of a
workload, and `apply_passes` runs them over a graph.

Two passes change more than the list of operators. `attention` also decides which tensors are saved for the backward
pass, so a block is built with or without it. `optimizer` changes the weight update, which `tilecast.step` prices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tilecast import frameworks
from tilecast.graph import Block, Graph, Op
from tilecast.spec import Execution, PassName, Workload


class FusionPass(NamedTuple):
    """A fusion pass, with the executions that run it, and whether hand-written kernels include it.

    A framework may also run the pass in every execution (`frameworks.Framework.fuses`).
    """

    purpose: str
    executions: tuple[Execution, ...] = ()
    """Executions, such as `compiled`, that run the pass."""
    is_hand_written: bool = False
    """Whether a framework's hand-written kernels include the pass."""


_COMPILERS: tuple[Execution, ...] = ("compiled", "xla")
PASSES: dict[PassName, FusionPass] = {
    "elementwise": FusionPass(
        "chains of element-wise operators become one pass over memory, or vanish into their neighbour", _COMPILERS, True
    ),
    "norm": FusionPass(
        "norms convert between 16 bit and FP32 on the fly, without casts of their own", _COMPILERS, True
    ),
    "batchnorm": FusionPass("batch norms take the sum and the activation behind them along", _COMPILERS, True),
    "loss": FusionPass("softmax and cross-entropy read the logits in place, without copies in FP32", _COMPILERS),
    "layout": FusionPass("convolutions keep their tensors channels last, without copies between layouts", _COMPILERS),
    "attention": FusionPass("scores, mask, softmax and values are one kernel that never writes the scores to memory"),
    "optimizer": FusionPass("one kernel reads and writes every state of a weight once"),
}
"""Every fusion pass by name."""


def passes(workload: Workload) -> frozenset[PassName]:
    """Return the names of the fusion passes that a workload runs.

    The passes depend on the execution, framework, hand-written kernels, attention, loss and optimizer of the workload.
    """
    cells = frameworks.find_framework(workload)
    chosen = cells.fuses | {name for name, item in PASSES.items() if workload.execution in item.executions}
    if not workload.compiled_loss:
        chosen -= {"loss"}
    own_kernels = frameworks.has_fused_kernels(workload)
    if own_kernels:
        chosen |= {name for name, item in PASSES.items() if item.is_hand_written}
    # Scores that are capped are computed by operators (Hugging Face, modeling_gemma2.py; LitGPT, litgpt/model.py; NeMo,
    # gemma2.py), unless a job names a library: FlashAttention-2 caps them from 2.6 on.
    can_be_flash = workload.is_mixed and workload.model.head_dim <= 256 and len(cells.attention) > 0
    can_be_flash = can_be_flash and not workload.model.dimensions.caps_scores
    if workload.attention not in ("auto", "eager") or (workload.attention == "auto" and can_be_flash):
        chosen |= {"attention"}
    if workload.fused_loss:
        chosen |= {"loss"}
    is_adam = workload.optimizer in ("adam", "adamw")
    updates_at_once = cells.optimizer == "fused" or (cells.optimizer == "fused-adam" and is_adam)
    if workload.fused_optimizer and (own_kernels or updates_at_once):
        chosen |= {"optimizer"}
    return chosen


def is_kept(op: Op, passes: frozenset[PassName]) -> bool:
    """Return whether an operator remains in a graph after the named fusion passes."""
    return op.unless not in passes and (op.only is None or op.only in passes)


def apply_passes(graph: Graph, passes: frozenset[PassName]) -> Graph:
    """Return a graph after fusion passes, without operators that these passes replace or that only other passes add."""

    def fuse_blocks(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        return tuple(replace(block, ops=tuple(op for op in block.ops if is_kept(op, passes))) for block in blocks)

    first, layers, last = fuse_blocks(graph.first), fuse_blocks(graph.layers), fuse_blocks(graph.last)
    return replace(graph, first=first, layers=layers, last=last)
