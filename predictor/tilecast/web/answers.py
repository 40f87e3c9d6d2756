"""Turn the values of the page's form into the advice as HTML.

The form may contain text from anyone. So an answer is computed inside `confine`: it reads no file of the machine,
starts no program and opens no connection.
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from html import escape
from pathlib import Path

import yaml

from tilecast import readers, zoo
from tilecast.explain import explain_plan
from tilecast.inputs.job_options import JOB_OPTIONS, JobOptions
from tilecast.inputs.launches import is_script, split_command
from tilecast.inputs.pools import PoolOptions
from tilecast.inputs.reading import InputWarning
from tilecast.public.advising import AdviceInputs, AdviceResult, compute_advice
from tilecast.public.api import name_arguments_in_errors
from tilecast.public.confinement import OUTSIDE, Permissions, confine
from tilecast.public.tools import warm_up
from tilecast.render import html
from tilecast.scaling import find_scaling_curves
from tilecast.spec import SpecError
from tilecast.untrusted import parse_json_mapping

MOST_CHARACTERS = 40_000
"""Most characters of all values of a form."""
MAIN_OPTIONS = ("seq", "batch", "precision", "framework", "objective")
MORE_OPTIONS = (
    "steps", "tokens", "lora_rank", "quantization", "optimizer", "activation_checkpointing", "attention",
    "framework_version", "max_gpus", "max_nodes", "deadline", "budget",
)  # fmt: skip
"""Fields of the form, behind a fold, that are options of a job with the same name."""
_OPTIONS = (*MAIN_OPTIONS, *MORE_OPTIONS)
LABELS: Mapping[str, str] = {
    "model": "Model (a preset)",
    "pasted": "Or paste a config.json, a launch command, a shell script, or a TOML or YAML configuration",
    "file": "A file that it names, if it does (paste its text, as of fsdp.json)",
    "seq": "Sequence length (tokens per sample)",
    "batch": "Global batch (samples per step)",
    "gpus": "GPU pools, as h100-sxm:16",
    "precision": "Precision",
    "framework": "Framework",
    "objective": "Objective",
    "steps": "Steps of the run",
    "tokens": "Tokens of the run, instead of steps",
    "lora_rank": "LoRA rank",
    "quantization": "Frozen weights under LoRA",
    "optimizer": "Optimizer",
    "activation_checkpointing": "Activation checkpointing",
    "attention": "Attention",
    "framework_version": "Version of the framework",
    "max_gpus": "GPUs at most",
    "max_nodes": "Nodes at most",
    "deadline": "Deadline, as 36h or 14d",
    "budget": "Budget",
}
"""Label of each field of the form."""


DEFAULTS: Mapping[str, str] = {
    "precision": "bf16",
    "framework": "none",
    "objective": "time",
    "quantization": "16 bits",
    "optimizer": "adamw",
    "activation_checkpointing": "auto: searched",
    "attention": "auto",
}
"""Meaning of a choice that the user leaves open, for a job whose pasted text does not say it."""


@dataclass(frozen=True, slots=True)
class Form:
    """Values of the page's form. A field that the user left empty is an empty text."""

    model: str = ""
    """Name of a preset."""
    pasted: str = ""
    """A config.json, a launch command, a script or a configuration, instead of a preset."""
    file: str = ""
    """Text of the file that the command or script names."""
    gpus: str = ""
    seq: str = ""
    batch: str = ""
    precision: str = ""
    framework: str = ""
    objective: str = ""
    steps: str = ""
    tokens: str = ""
    lora_rank: str = ""
    quantization: str = ""
    optimizer: str = ""
    activation_checkpointing: str = ""
    attention: str = ""
    framework_version: str = ""
    max_gpus: str = ""
    max_nodes: str = ""
    deadline: str = ""
    budget: str = ""

    @classmethod
    def from_values(cls, values: Mapping[str, str]) -> Form:
        """Return the form from values by field name. Unknown names are ignored.

        Raises:
            SpecError: the values are too long.
        """
        known = {item.name: values.get(item.name, "").strip() for item in fields(cls)}
        if sum(map(len, known.values())) > MOST_CHARACTERS:
            raise SpecError("form", f"has more than {MOST_CHARACTERS:,} characters", "paste less")
        return cls(**known)

    def with_file(self, name: str) -> Form:
        """Return a form whose pasted script first writes the file `name`. The script's comments at the top stay first.

        In a pasted configuration, the name of the file is replaced by its text.
        """
        if readers.name_configuration(self.pasted):
            value = re.compile(rf"""(:[ \t]+)(["']?){re.escape(name)}\2(?=[ \t]*(?:#.*)?$)""", re.MULTILINE)
            return replace(self, pasted=value.sub(lambda found: found[1] + json.dumps(self.file.strip()), self.pasted))
        lines = self.pasted.splitlines()
        head = next((place for place, line in enumerate(lines) if line.strip() and line[:1] != "#"), len(lines))
        end = "END"
        while end in self.file:
            end += "_"
        written = [f"cat > {shlex.quote(name)} <<'{end}'", *self.file.splitlines(), end]
        return replace(self, pasted="\n".join([*lines[:head], *written, *lines[head:], ""]))

    def to_inputs(self) -> AdviceInputs:
        """Return the form as inputs for advice.

        Raises:
            SpecError: the pasted text is neither a JSON object nor a command, or a field is missing.
        """
        if not self.gpus:
            raise SpecError("gpus", "is missing", "write for instance h100-sxm:16,a100-80:2x8")
        values: dict[str, object] = {name: value for name in _OPTIONS if (value := getattr(self, name))}
        model: object = self.model or None
        if self.pasted.startswith("{"):
            model = parse_json_mapping(self.pasted, "pasted", "it", "paste a whole config.json")
        elif self.pasted:
            model, values["command"] = None, split_command(self.pasted, "pasted")
        elif model is None:
            raise SpecError("model", "is missing", "choose a preset, or paste a config.json or a launch command")
        else:
            model = zoo.find_preset(self.model).name
        return AdviceInputs(
            JobOptions.from_values(model, values), PoolOptions.from_arguments(None, self.gpus or None, None, None, None)
        )

    def write_command(self) -> str:
        """Return the command line that gives the same advice.

        A pasted config is named `config.json`, a pasted script `job.sh`, and another configuration `job.toml` or
        `job.yaml`.
        """
        words = ["tilecast", "advise"]
        if not self.pasted:
            words.append(self.model)
        elif self.pasted.startswith("{"):
            words.append("config.json")
        elif configuration := readers.name_configuration(self.pasted):
            words.append(f"job{Path(configuration).suffix}")
        elif is_script(self.pasted):
            words.append("job.sh")
        for name in (*_OPTIONS, "gpus"):
            if value := getattr(self, name):
                words += [f"--{name.replace('_', '-')}", value]
        if self.pasted and not self.pasted.startswith("{") and not is_script(self.pasted):
            words += ["--", *split_command(self.pasted, "pasted")]
        return shlex.join(words)

    def write_python(self) -> str:
        """Return the Python API call for the same advice."""
        arguments = []
        if not self.pasted:
            arguments.append(repr(self.model))
        elif self.pasted.startswith("{"):
            arguments.append("json.load(open('config.json'))")
        else:
            arguments += ["None", f"command={self.pasted!r}"]
        for name in (*_OPTIONS, "gpus"):
            if value := getattr(self, name):
                arguments.append(f"{name}={int(value) if value.isascii() and value.isdecimal() else repr(value)}")
        first = "import json\n" if arguments[0].startswith("json") else ""
        return f"{first}import tilecast\n\nprint(tilecast.advise({', '.join(arguments)}))"


def write_answer(form: Form) -> str:
    """Return the advice for a form as HTML without a page around it.

    Raises:
        SpecError: a value is missing or invalid. The error names fields as the form does.
    """
    warm_up()
    note = "The file that you pasted was not needed."
    try:
        parts = _compute_parts(form, form)
    except SpecError as error:
        name = _find_refused_file(error, form.pasted)
        if not name:
            raise
        if not form.file or name == _NAMELESS:
            raise _refuse_file(name, "paste its text as --file too, or run `tilecast advise` beside the file") from None
        try:
            parts, note = _compute_parts(form.with_file(name), form), f"Your file was read as {name}."
        except SpecError as second:
            if other := _find_refused_file(second, form.pasted):
                remedy = "one file can be pasted here; run `tilecast advise` beside the files"
                raise _refuse_file(other, remedy) from None
            raise
    notes = [f"<p>{escape(note)}</p>"] if form.file else []
    return "\n".join(part for part in (*notes, *parts) if part)


_NAMELESS = "file"
"""Name of a file that the pasted text does not name."""


def _refuse_file(name: str, remedy: str) -> SpecError:
    return SpecError(name, "is a file, and this page reads none", remedy)


def _find_refused_file(error: SpecError, pasted: str) -> str:
    """Return the name, as in the pasted text, of the file whose reading was refused. For another error, return "".

    The error itself has a path on this machine.
    """
    if not (error.field.startswith("/") or error.problem == OUTSIDE):
        return ""
    parts = Path(error.field).parts
    for start in range(len(parts)):
        end = "/".join(parts[start:])
        if end in pasted and (found := re.search(rf"{re.escape(end)}(?![\w.-])", pasted)):
            before = re.search(r"[\w./~-]*$", pasted[max(found.start() - 200, 0) : found.start()])
            return f"{before[0] if before else ''}{end}"
    return _NAMELESS


def _compute_parts(form: Form, shown: Form) -> list[str]:
    """Return the parts of the answer to a form as HTML.

    Args:
        form: the form to answer.
        shown: the form that the user filled in, which is copied.
    """
    with warnings.catch_warnings(record=True) as caught, confine(Permissions()):
        warnings.simplefilter("always", InputWarning)
        with name_arguments_in_errors():
            result = compute_advice(form.to_inputs())
        sections = [_name_fields(section, form.pasted) for section in _write_sections(result)]
        parts = [*sections, _write_copies(shown, result)]
    warned = (str(one.message) for one in caught if issubclass(one.category, InputWarning))
    return [*(f"<p>{_name_fields(escape(text))}</p>" for text in warned), *parts]


def short_label(name: str) -> str:
    """Return the label of a form field without the hint that the label contains."""
    return re.split(r", | \(", LABELS[name])[0]


_FLAG = re.compile(r"(?<![\w(!-])--([a-z][a-z-]*)(?![\w-])")
"""A flag in a sentence. Variables of CSS stand in parentheses."""
_ELSEWHERE = ("nodes", "link", "plan", "launch", "baseline", "calibration")
"""Flags beside those of jobs for which the page has no field."""
_REWORDED: Mapping[str, str] = {
    " Give --nodes FILE for nodes of your own.": "",
    "; --baseline POOL:N names another": "",
    "--launch NAME finds the best plan of one": "choose one as --framework to see its best plan",
    "of --launch, ": "of the launchers, ",
    "each has a best plan of its own.": "each has a best plan of its own, which --framework shows.",
}
"""Words of the command line on what the page has no field for, and those of the page."""


def _name_fields(text: str, pasted: str = "") -> str:
    """Return a text that names fields by their labels in the form instead of flags. Flags in `pasted` are kept."""
    for words, own in _REWORDED.items():
        text = text.replace(words, own)

    def name_flag(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        if re.search(rf"{re.escape(found[0])}(?![\w-])", pasted) or not (
            name in LABELS or name in JOB_OPTIONS or name in _ELSEWHERE
        ):
            return found[0]
        opened, closed = "\N{LEFT DOUBLE QUOTATION MARK}", "\N{RIGHT DOUBLE QUOTATION MARK}"
        return f"{opened}{short_label(name)}{closed}" if name in LABELS else found[1].replace("-", " ")

    return _FLAG.sub(name_flag, text)


_UNSPOKEN = "|".join(name for name in LABELS if "_" in name)
_ARGUMENT = re.compile(rf"\b({'|'.join(LABELS)})\b(?= [^'\s]*\d)|\b({_UNSPOKEN})\b")
"""An argument of Python's API before its value in a remedy, or one whose name is no word."""


def describe_error(error: SpecError) -> str:
    """Return an error as text that names the fields by their labels."""
    path = error.field.removesuffix(".preset")
    field = re.sub(r"(?<![\w.])\w+(?![\w.])", lambda word: short_label(word[0]) if word[0] in LABELS else word[0], path)
    rest = _ARGUMENT.sub(lambda found: short_label(found[0]), _name_fields(str(error)[len(error.field) :]))
    rest = rest.replace("`tilecast show models` lists them", "the field lists them as you type")
    rest = re.sub("name the model before --.*$", "name it in what you paste", rest)
    rest = re.sub("give (.*) behind --$", r"paste \1", rest)
    return f"{_name_fields(field)}{rest}"


def _write_sections(result: AdviceResult) -> list[str]:
    advice, best = result.advice, result.advice.best
    explanation = explain_plan(best.workload, best.plan, best.pool, best.step_s) if best else None
    sections = html.list_sections(advice, explanation, find_scaling_curves(advice.request, result.pools), level=2)
    return [*sections[:3], html.write_caveats(advice), *sections[3:]]


def _write_copies(form: Form, result: AdviceResult) -> str:
    """Return the form as a command, as Python and as a TrainingJob, each with a button to copy it."""
    texts = {
        "command": form.write_command(),
        "Python": form.write_python(),
        "TrainingJob": yaml.safe_dump(json.loads(json.dumps(dict(result.job.document))), sort_keys=False),
    }
    parts = "".join(
        f'<details><summary>Copy as {name}</summary><button type="button" data-copy>Copy</button>'
        f'<div class="scroll" tabindex="0"><pre>{escape(text)}</pre></div></details>'
        for name, text in texts.items()
    )
    return f"<h2>Take it with you</h2>{parts}"
