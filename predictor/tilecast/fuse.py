"""Fusion passes, by which compilers, hand-written kernels or libraries change the operators of an eager framework.

A model family lists every operator of eager execution, and the operators that a pass puts in place of others.
`Op.unless` names the pass that removes an operator, `Op.only` the pass that adds an operator. `passes` returns the
passes of a workload, and `apply` runs them over a graph. Two passes change more than the list of operators. `attention`
also decides which tensors are kept for the backward pass, so the block is built for it. `optimizer` changes the weight
update, which `tilecast.step` prices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tilecast import frameworks
from tilecast.graph import Block, Graph, Op
from tilecast.spec import Execution, PassName, Workload


class FusionPass(NamedTuple):
    """A fusion pass; frameworks may run it too (`frameworks.Framework.fuses`)."""

    purpose: str
    executions: tuple[Execution, ...] = ()
    """Executions that run the pass."""
    is_hand_written: bool = False
    """Whether hand-written kernels include the pass."""


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
    """Return the names of the fusion passes that run over a workload's graph.

    They depend on its execution, its framework, its hand-written kernels, its attention and its optimizer.
    """
    cells = frameworks.find_framework(workload)
    chosen = cells.fuses | {name for name, item in PASSES.items() if workload.execution in item.executions}
    if not workload.compiled_loss:
        chosen -= {"loss"}
    own_kernels = frameworks.has_fused_kernels(workload)
    if own_kernels:
        chosen |= {name for name, item in PASSES.items() if item.is_hand_written}
    can_be_flash = workload.is_mixed and workload.model.head_dim <= 256 and len(cells.attention) > 0
    if workload.attention not in ("auto", "eager") or (workload.attention == "auto" and can_be_flash):
        chosen |= {"attention"}
    if workload.fused_loss:
        chosen |= {"loss"}
    is_adam = workload.optimizer in ("adam", "adamw")
    updates_at_once = cells.optimizer == "fused" or (cells.optimizer == "fused-adam" and is_adam)
    if workload.fused_optimizer and (own_kernels or updates_at_once):
        chosen |= {"optimizer"}
    return chosen


def remains(op: Op, names: frozenset[PassName]) -> bool:
    """Return whether an operator still runs after the named fusion passes."""
    return op.unless not in names and (op.only is None or op.only in names)


def apply(graph: Graph, names: frozenset[PassName]) -> Graph:
    """Return the graph with the operators that the named fusion passes leave, in order."""

    def fused(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        return tuple(replace(block, ops=tuple(op for op in block.ops if remains(op, names))) for block in blocks)

    return replace(graph, first=fused(graph.first), layers=fused(graph.layers), last=fused(graph.last))
