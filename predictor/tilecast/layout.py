"""Split of a model's layers over pipeline stages, by the rules of frameworks or by the layout in a job.

The module also lists the costs of pipeline schedules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilecast.spec import FOLDED_SCHEDULES, SCHEDULE_CODES, Ints, Schedule, SpecError


def split_layers(layers: int, pipeline: int, *, counts_ends: bool) -> tuple[int, ...]:
    """Return the number of layers on each pipeline stage, as a tuple of `pipeline` numbers.

    If `layers` is not a multiple of `pipeline` and `counts_ends` is true, embedding and loss count as a layer each, or
    the loss alone does, if that makes the stages equal. Otherwise the first stages are full, and the last stages hold
    the rest or nothing.
    """
    ends = choose_end_layers(layers, pipeline) if counts_ends else 0
    if ends:
        full = (layers + ends) // pipeline
        return (full - (ends == 2), *(full,) * (pipeline - 2), full - 1)
    full = -(-layers // pipeline)
    whole, rest = divmod(layers, full)
    return ((full,) * whole + (rest,) + (0,) * pipeline)[:pipeline]


def choose_end_layers(layers: int, pipeline: int) -> int:
    """Return how many ends must count as layers to make all stages equal: 2, 1 or 0.

    2 stands for embedding and loss, and 1 for the loss. Return 0 if the layers alone divide evenly by the stages. Also
    return 0 if counting the ends does not make the stages equal, or leaves a stage without a layer.
    """
    if layers % pipeline == 0:
        return 0
    return next((ends for ends in (2, 1) if (layers + ends) % pipeline == 0 and layers + ends >= 2 * pipeline), 0)


@lru_cache(1 << 14)
def count_virtual_stage_end_layers(layers: int, pipeline: int, virtual: int) -> int | None:
    """Return how many ends must count as layers so that each stage has `virtual` virtual stages of equal size.

    The ends are embedding and loss. 2 counts both, 1 counts the loss, and 0 counts neither. If no number makes the
    virtual stages equal, return None.
    """
    # Two stages that divide by themselves stay equal if each loses a layer.
    ends = {0: 0, choose_end_layers(layers, pipeline): 0} | ({2: 0} if pipeline == 2 else {})
    return next((one for one in ends if (layers + one) % (pipeline * virtual) == 0), None)


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """A pipeline layout that a job sets: the number of layers on each virtual stage."""

    pieces: tuple[int, ...]
    """Layers of each virtual stage of the whole pipeline, in the order of a forward pass, including `predicted`."""
    predicted: int = 0
    """Number of multi-token-prediction layers, which come after all other layers."""

    @property
    def layers(self) -> int:
        """Number of layers, without the multi-token-prediction layers."""
        return sum(self.pieces) - self.predicted


_EXAMPLE = 'write for instance "Et*3|(tt|)*29,m|L": E embedding, t layer, m multi-token prediction, L loss'
_MOST_LETTERS = 1 << 14


@lru_cache(64)
def parse_layout(text: str) -> PipelineLayout:
    """Return the pipeline layout that `text` describes in the notation of Megatron-Core.

    The notation is that of transformer/pipeline_parallel_layer_layout.py. `|` separates virtual stages. `*3` repeats
    the letter or the bracket in front of it. Commas are ignored.

    Raises:
        SpecError: the text is not a layout.
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
    return PipelineLayout(tuple(stage.count("t") + stage.count("m") for stage in stages), letters.count("m"))


@dataclass(frozen=True, slots=True)
class ScheduleCosts:
    """Bubble and memory of a pipeline schedule.

    The bubble of p stages lasts (p - 1) (F + B - `filled` W) seconds, or (p / 2 - 1) (F + 2 B - 3 W) seconds if the
    schedule `is_bidirectional`. F and B are the seconds of a stage's forward and backward pass. W is the part of B that
    computes the gradients of weights.
    """

    virtual: tuple[int, int]
    """Least and most virtual stages of a pipeline rank."""
    filled: float = 0.0
    """Multiple of W by which the schedule shortens the bubble per stage."""
    is_bidirectional: bool = False
    """Whether micro-batches enter the pipeline at both of its ends."""
    extra_in_flight: float | None = None
    """Micro-batches in flight on every stage, beyond the number of stages. None means the numbers of 1F1B."""
    weight_copies: float = 1.0
    """Copies of the weights that a rank holds."""
    least_rounds: int = 0
    """Least number of micro-batches, in multiples of the pipeline ranks."""
    source: str = ""


MOST_PIECES = 1024
SCHEDULES: Mapping[Schedule, ScheduleCosts] = {
    "1f1b": ScheduleCosts((1, 1), source="arXiv 2104.04473, section 2.2.1"),
    "interleaved": ScheduleCosts((2, MOST_PIECES), source="arXiv 2104.04473, section 2.2.2"),
    "zeroBubble": ScheduleCosts((1, 1), filled=2.0, extra_in_flight=0.0, source="arXiv 2401.10241, table 2: ZB-H1"),
    "interleavedZeroBubble": ScheduleCosts(
        (2, MOST_PIECES), filled=2.0, source="PyTorch, distributed/pipelining: ScheduleInterleavedZeroBubble, ZB1P"
    ),
    "zbv": ScheduleCosts((2, 2), filled=3.0, extra_in_flight=0.0, source="arXiv 2401.10241, section 6: ZB-V"),
    "dualPipe": ScheduleCosts(
        (1, 1),
        is_bidirectional=True,
        extra_in_flight=1.0,
        weight_copies=2.0,
        least_rounds=2,
        source="arXiv 2412.19437, section 3.2.1, table 2",
    ),
    "dualPipeV": ScheduleCosts(
        (2, 2),
        is_bidirectional=True,
        extra_in_flight=0.5,
        least_rounds=2,
        source="deepseek-ai/DualPipe, README: DualPipeV, 2 p pieces on p ranks",
    ),
}


def find_schedule_costs(schedule: Schedule | None) -> ScheduleCosts:
    """Return the bubble and memory of a pipeline schedule. None stands for 1F1B with any number of virtual stages."""
    return ScheduleCosts((1, MOST_PIECES)) if schedule is None else SCHEDULES[schedule]


def list_schedule_costs(codes: Ints, own: Schedule | None) -> list[tuple[ScheduleCosts, Ints | None]]:
    """Return the costs of each schedule that n plans use, with the rows of its plans, or None for all rows.

    Args:
        codes: the column `Plans.schedule`, (n,).
        own: the job's schedule, for plans without a schedule of their own.
    """
    if not codes.any():
        return [(find_schedule_costs(own), None)]
    used = np.flatnonzero(np.bincount(codes))
    names = [*SCHEDULE_CODES]
    return [(find_schedule_costs(names[code] or own), np.flatnonzero(codes == code)) for code in used.tolist()]


def is_folded(schedule: Schedule | None) -> bool:
    """Return whether a schedule puts both the first and the last part of the model on the first rank."""
    return schedule in FOLDED_SCHEDULES
