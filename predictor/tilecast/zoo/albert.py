"""ALBERT: an encoder whose layers share one set of weights (Lan et al., arXiv 1909.11942, section 3.1)."""

from __future__ import annotations

from dataclasses import replace

from tilecast.graph import Graph, Shards
from tilecast.spec import Workload
from tilecast.zoo import transformer


def build(workload: Workload, shards: Shards) -> Graph:
    """Build the graph of the encoder.

    The L layers share one set of weights, of which each owns an L-th.
    """
    graph = transformer.build(workload, shards)
    shared = tuple(replace(block, parameters=block.parameters / block.repeat) for block in graph.layers)
    return replace(graph, layers=shared)
