"""Count the FLOPs of a model's step, independent of hardware and kernels."""

from __future__ import annotations

from tilecast.graph import Graph
from tilecast.spec import Plan


def count_model_flops(plan: Plan, graph: Graph, shard: int) -> float:
    """Return the FLOPs of a step, summed over all ranks of a plan. Recomputation is not counted.

    Args:
        plan: the plan.
        graph: the model, split as the plan splits it.
        shard: index of the plan's shard in the graph.
    """
    table, rows = graph.kernels()
    flops = table.flops()
    operators = ((block, op) for block in graph.blocks for op in block.ops)
    of_rank = sum(
        block.repeat * op.count * flops[index[shard]] for (block, op), index in zip(operators, rows, strict=True)
    )
    return float(of_rank) * plan.tensor * plan.context * plan.data * plan.gradient_accumulation
