"""Options that describe a job. Each sets a field of the spec, as a command-line flag or a keyword of the Python API.

Each spec field that affects a forecast has an option. Its name, values and help come from the field's name, type and
the first sentence of its description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from tilecast.api.training import BatchRange, Training
from tilecast.api.training_job import JobBudget, JobConstraints, TrainingJobSpec
from tilecast.inputs.reading import (
    parse_amount,
    parse_batch,
    parse_count,
    parse_deadline,
    parse_number,
    parse_range,
    to_flag,
)

Reader = Callable[[str, str], object]
"""Function that parses the text of an option. Its second argument is the flag to name in errors."""


@dataclass(frozen=True, slots=True)
class JobOption:
    """An option of a job: the path of the spec field that it sets, and its command-line argument."""

    path: str
    help: str
    read: Reader
    """Function that parses a text. Values of other types are used as they are, unless `takes_texts`."""
    choices: Sequence[str] | None = None
    metavar: str | None = None
    is_switch: bool = False
    """Whether the option is true or false."""
    aliases: tuple[str, ...] = ()
    """Other names of the option."""
    takes_texts: bool = False
    """Whether numbers are converted to text and parsed, because the field has another type or only whole numbers."""


NAMES: Mapping[str, tuple[str, ...]] = {
    "training.sequenceLength": ("seq", "sequence_length"),
    "training.globalBatchSize": ("batch", "global_batch_size"),
    "training.activationCheckpointing": ("activation_checkpointing", "checkpointing"),
    # `--gpus` lists pools.
    "constraints.gpus": ("exact_gpus",),
    "deadlineSeconds": ("deadline", "deadline_seconds", "finish_by"),
}
"""Names of options whose names are not just their field's. The first is the option's own name."""

NOT_OPTIONS: Mapping[str, str] = {
    "model": "the job's own argument",
    "baseline": "--baseline",
    "training.checkpointSeconds": "no forecast depends on it",
    "training.restartSeconds": "no forecast depends on it",
    "observationQuery": "of the operator",
    "targetRef": "of the operator",
    "mode": "of the operator",
}
"""Spec fields without an option, and the reason or what to use instead."""

_OF_EVERY_JOB = ("training.steps", "training.tokens", "training.inputSamplesPerSecond")
"""Fields of `training` that options can also set in a job read from a file."""


def split_words(text: str, _flag: str) -> list[str]:
    """Return the words of a text, separated by commas or plus signs."""
    return [word.strip() for word in text.replace("+", ",").split(",")]


def _read_text(text: str, _flag: str) -> str:
    return text


_TYPES: Mapping[object, tuple[Reader, str]] = {
    int: (parse_count, "N"),
    float: (parse_number, "X"),
    str: (_read_text, "TEXT"),
    list: (split_words, "A,B"),
    BatchRange: (parse_range, "MIN..MAX"),
    JobBudget: (parse_amount, "AMOUNT"),
}
"""Parser and placeholder of an option, by the type of its field."""

_BY_PATH: Mapping[str, tuple[Reader, str, str]] = {
    "training.sequenceLength": (partial(parse_count, kilo=1024), "N", " 8k is 8192."),
    "training.globalBatchSize": (
        partial(parse_count, kilo=1024),
        "N",
        " 4Mtokens is as many samples as hold so many tokens, 512 of 8192.",
    ),
    "training.steps": (parse_count, "N", " 100k is 100,000."),
    "training.tokens": (parse_count, "N", " For instance 300B or 15T."),
    "deadlineSeconds": (
        parse_deadline,
        "TIME",
        " Seconds, or 90min, 36h, 14d, 2w; or when the run has to end, counted from now: 2026-12-01, 2026-12-01T18:00.",
    ),
    "budget": (parse_amount, "AMOUNT", " 5000 (USD), or 5000EUR."),
}
"""Parser, placeholder and further help of options that their field's type does not determine, by path."""


def _list_options() -> Iterator[tuple[str, JobOption]]:
    """Yield the options of a job by name, in the order of the spec."""
    for prefix, schema in (("training.", Training), ("constraints.", JobConstraints), ("", TrainingJobSpec)):
        for name, item in schema.model_fields.items():
            path = f"{prefix}{item.alias}"
            if path not in NOT_OPTIONS and path not in ("training", "constraints"):
                own, *others = NAMES.get(path, (name,))
                yield own, _build_option(path, item, tuple(others))


def _build_option(path: str, item: FieldInfo, aliases: tuple[str, ...]) -> JobOption:
    """Return the option that sets a field of the spec."""
    alternatives = get_args(item.annotation)
    kind = alternatives[0] if NoneType in alternatives else item.annotation
    text = (item.description or "").split(". ")[0].rstrip(".") + "."
    origin = get_origin(kind)
    if origin is Literal:
        return JobOption(path, text, _read_text, choices=get_args(kind), aliases=aliases)
    if kind is bool:
        return JobOption(path, text, _read_text, is_switch=True, aliases=aliases)
    read, metavar, more = _BY_PATH.get(path) or (*_TYPES[origin or kind], "")
    takes_texts = read in (parse_deadline, parse_amount)
    return JobOption(path, text + more, read, metavar=metavar, aliases=aliases, takes_texts=takes_texts)


JOB_OPTIONS: Mapping[str, JobOption] = dict(_list_options())
"""Options of a job by name."""
BARE_OPTIONS: Mapping[str, JobOption] = {
    name: option
    for name, option in JOB_OPTIONS.items()
    if option.path.startswith("training.") and option.path not in _OF_EVERY_JOB
}
"""Options, by name, that apply if only a model is given."""
ANY_OPTIONS: Mapping[str, JobOption] = {
    name: option for name, option in JOB_OPTIONS.items() if name not in BARE_OPTIONS
}
"""Options, by name, that apply to every job."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The user's description of a job, with values of options that override fields of its spec."""

    job: object
    """A preset's name, a path or "-", the mapping of a TrainingJob, of a Hugging Face config or of a graph, a config of
    Transformers, or a `Trace`."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values by the name of the option, a key of `JOB_OPTIONS`. Options left out keep the job's value."""
    command: Sequence[str] = ()
    """Words of a launch command, or a launcher's configuration file, that describe the job.

    `job` may then name its model.
    """
    lenient: bool = False
    """Whether to ignore options of the command that are not priced."""
    gpus: int | None = None
    """GPUs of the job, if its command does not say how many."""

    @classmethod
    def from_values(cls, job: object, values: Mapping[str, Any]) -> JobOptions:
        """Return the options for a job, with texts parsed. Values that are None or have unknown names are ignored.

        Raises:
            SpecError: a text cannot be parsed.
        """
        given: dict[str, Any] = {}
        for name, option in JOB_OPTIONS.items():
            used = next((one for one in (name, *option.aliases) if values.get(one) is not None), name)
            value, flag = values.get(used), to_flag(used)
            if name == "batch" and isinstance(value, str):
                given[name] = parse_batch(value, flag, given.get("seq"))
            elif value is not None:
                is_text = isinstance(value, str) or option.takes_texts
                given[name] = option.read(str(value), flag) if is_text else value
        return cls(job, given, tuple(values.get("command") or ()), bool(values.get("lenient")))

    @property
    def title(self) -> str:
        """Name of the job in errors: the name or path that the user gave, or "model" if it is a Python object."""
        return self.job if isinstance(self.job, str) else "model"
