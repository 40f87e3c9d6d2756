"""Split of a model's layers over the stages of a pipeline: the rules of frameworks, and layouts that a job states."""

from __future__ import annotations

from functools import lru_cache


def split_layers(layers: int, pipeline: int, *, counts_ends: bool) -> tuple[int, ...]:
    """Return the number of layers of each of `pipeline` stages; it may be 0 for the last ones.

    Stages are equal if the layers divide. Otherwise, with `counts_ends`, embedding and loss, or the loss alone, count
    as a layer if that makes them divide. Otherwise all stages but the last ones are full.
    """
    ends = counted_ends(layers, pipeline) if counts_ends else 0
    if ends:
        full = (layers + ends) // pipeline
        return (full - (ends == 2), *(full,) * (pipeline - 2), full - 1)
    full = -(-layers // pipeline)
    whole, rest = divmod(layers, full)
    return ((full,) * whole + (rest,) + (0,) * pipeline)[:pipeline]


def counted_ends(layers: int, pipeline: int) -> int:
    """Return how many of embedding and loss have to count as layers so that all layers divide by the stages.

    2 are both, 1 is the loss. 0 means that the layers divide by themselves, or in no way that leaves every stage a
    layer.
    """
    if layers % pipeline == 0:
        return 0
    return next((ends for ends in (2, 1) if (layers + ends) % pipeline == 0 and layers + ends >= 2 * pipeline), 0)


@lru_cache(1 << 14)
def counted_ends_of_pieces(layers: int, pipeline: int, virtual: int) -> int | None:
    """Return how many of embedding and loss have to count as layers for `virtual` equal pieces on each stage.

    None means that no number does. Whatever the number of pieces, a stage holds the layers of `split_layers`.
    """
    # Two stages that divide by themselves stay equal if each loses a layer.
    ends = {0: 0, counted_ends(layers, pipeline): 0} | ({2: 0} if pipeline == 2 else {})
    return next((one for one in ends if (layers + one) % (pipeline * virtual) == 0), None)
