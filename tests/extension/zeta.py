"""A family: decoders whose graph is that of any other."""

from tilecast.graph import Graph, Shards
from tilecast.models import transformer
from tilecast.spec import Workload


def build(workload: Workload, shards: Shards) -> Graph:
    """The graph of one rank."""
    return transformer.build(workload, shards)
