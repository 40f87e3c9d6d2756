"""Split of a model's layers over the stages of a pipeline: the rules of frameworks, and layouts that a job states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tilecast.spec import Schedule, SpecError


def split_layers(layers: int, pipeline: int, *, counts_ends: bool) -> tuple[int, ...]:
    """Return the number of layers of each of `pipeline` stages. The last stages may have none.

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


@dataclass(frozen=True, slots=True)
class Layout:
    """A stated layout of a pipeline."""

    pieces: tuple[int, ...]
    """Layers of each virtual stage of the whole pipeline, in the order of a pass, with those of `predicted`."""
    predicted: int = 0
    """Number of layers that predict a further token, after all others."""

    @property
    def layers(self) -> int:
        """Number of layers, without the multi-token-prediction layers."""
        return sum(self.pieces) - self.predicted


_EXAMPLE = 'write for instance "Et*3|(tt|)*29,m|L": E embedding, t layer, m multi-token prediction, L loss'
_MOST_LETTERS = 1 << 14


@lru_cache(64)
def parse_layout(text: str) -> Layout:
    """Parse a layout as Megatron-Core writes it (transformer/pipeline_parallel_layer_layout.py).

    `|` separates virtual stages, `*3` repeats the letter or the brackets before it, and commas mean nothing.

    Raises:
        SpecError: the text is no layout.
    """
    field, letters = "training.pipelineLayout", re.sub(r"[,\s]", "", text)
    for pattern in (r"\(([^()]*)\)\*(\d{1,4})", r"([EtmL|])\*(\d{1,4})"):
        while found := re.search(pattern, letters):
            if len(letters) + len(found[1]) * int(found[2]) > _MOST_LETTERS:
                raise SpecError(field, f"{text[:40]!r} has too many layers", "repeat fewer of them")
            letters = letters[: found.start()] + found[1] * int(found[2]) + letters[found.end() :]
    stages = letters.split("|")
    if re.search(r"[^EtmL|]", letters) or not re.fullmatch(r"Et*m*L?", letters.replace("|", "")):
        raise SpecError(field, f"{text[:40]!r} is no layout", _EXAMPLE)
    if not stages[0].startswith("E") or not stages[-1].endswith("L"):
        problem = f"{text[:40]!r} does not begin with the embedding E and end with the loss L"
        raise SpecError(field, problem, _EXAMPLE)
    return Layout(tuple(stage.count("t") + stage.count("m") for stage in stages), letters.count("m"))


@dataclass(frozen=True, slots=True)
class ScheduleLaw:
    """Costs of a pipeline schedule.

    With F and B the seconds of the forward and the backward pass of a stage, and W those of the gradients of weights in
    B, the bubble of p stages is (p - 1) (F + B - `filled` W); with `both_ways` it is (p / 2 - 1) (F + 2 B - 3 W).
    """

    virtual: tuple[int, int]
    """Least and most pieces of the model on a stage."""
    filled: float = 0.0
    both_ways: bool = False
    """Whether micro-batches enter the pipeline at both of its ends."""
    more_in_flight: float | None = None
    """Micro-batches that every stage has in flight besides as many as there are stages; None is as in 1F1B."""
    copies: float = 1.0
    """Copies of the weights that a rank holds."""
    source: str = ""


MOST_PIECES = 1024
SCHEDULES: Mapping[Schedule, ScheduleLaw] = {
    "1f1b": ScheduleLaw((1, 1), source="arXiv 2104.04473, section 2.2.1"),
    "interleaved": ScheduleLaw((2, MOST_PIECES), source="arXiv 2104.04473, section 2.2.2"),
    "zeroBubble": ScheduleLaw((1, 1), filled=2.0, more_in_flight=0.0, source="arXiv 2401.10241, table 2: ZB-H1"),
    "interleavedZeroBubble": ScheduleLaw(
        (2, MOST_PIECES), filled=2.0, source="PyTorch, distributed/pipelining: ScheduleInterleavedZeroBubble, ZB1P"
    ),
    "zbv": ScheduleLaw((2, 2), filled=3.0, more_in_flight=0.0, source="arXiv 2401.10241, section 6: ZB-V"),
    "dualPipe": ScheduleLaw(
        (1, 1), both_ways=True, more_in_flight=1.0, copies=2.0, source="arXiv 2412.19437, section 3.2.1, table 2"
    ),
    "dualPipeV": ScheduleLaw(
        (2, 2),
        both_ways=True,
        more_in_flight=0.5,
        source="deepseek-ai/DualPipe, README: DualPipeV, 2 p pieces on p ranks",
    ),
}


def schedule_law(schedule: Schedule | None) -> ScheduleLaw:
    """Return the costs of a pipeline schedule. None stands for 1F1B with any number of virtual stages."""
    return ScheduleLaw((1, MOST_PIECES)) if schedule is None else SCHEDULES[schedule]
