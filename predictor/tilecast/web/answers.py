"""Turn the values of the page's form into the advice as HTML.

The form may contain text from anyone. So an answer is computed inside `confine`: it reads no file of the machine,
starts no program and opens no connection.
"""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from html import escape

import yaml

from tilecast import zoo
from tilecast.explain import explain_plan
from tilecast.inputs.job_options import JobOptions
from tilecast.inputs.launches import split_command
from tilecast.inputs.pools import PoolOptions
from tilecast.inputs.reading import InputWarning
from tilecast.public.advising import AdviceInputs, AdviceResult, compute_advice
from tilecast.public.api import errors_about_arguments
from tilecast.public.confinement import Permissions, confine
from tilecast.public.tools import warm_up
from tilecast.render import html
from tilecast.scaling import find_scaling_curves
from tilecast.spec import SpecError
from tilecast.untrusted import parse_json_mapping

MOST_CHARACTERS = 40_000
"""Most characters of all values of a form together."""
_OPTIONS = ("seq", "batch", "precision", "framework", "objective")
"""Fields of the form with the same name as a job option."""


@dataclass(frozen=True, slots=True)
class Form:
    """Values of the page's form. A field that the user left empty is an empty text."""

    model: str = ""
    """Name of a preset."""
    pasted: str = ""
    """A config.json or a launch command, instead of a preset."""
    gpus: str = ""
    seq: str = ""
    batch: str = ""
    precision: str = ""
    framework: str = ""
    objective: str = ""

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

    def to_inputs(self) -> AdviceInputs:
        """Return the form as inputs for advice.

        Raises:
            SpecError: the pasted text is neither a JSON object nor a command, or a field is missing.
        """
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
        """Return the command line for the same advice. It names a pasted config `config.json`."""
        words = ["tilecast", "advise"]
        if not self.pasted:
            words.append(self.model)
        elif self.pasted.startswith("{"):
            words.append("config.json")
        for name in (*_OPTIONS, "gpus"):
            if value := getattr(self, name):
                words += [f"--{name}", value]
        if self.pasted and not self.pasted.startswith("{"):
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
    try:
        with warnings.catch_warnings(record=True) as caught, confine(Permissions()):
            warnings.simplefilter("always", InputWarning)
            with errors_about_arguments():
                result = compute_advice(form.to_inputs())
            parts = [*_write_sections(result), _write_copies(form, result)]
    except SpecError as error:
        # The path of a file that was refused is one of this machine.
        if error.field.startswith("/"):
            raise SpecError("file", "is not read by this page", "paste what is in it") from None
        raise
    notes = [f"<p>{escape(str(one.message))}</p>" for one in caught if issubclass(one.category, InputWarning)]
    return "\n".join(part for part in (*notes, *parts) if part)


def _write_sections(result: AdviceResult) -> list[str]:
    advice, best = result.advice, result.advice.best
    explanation = explain_plan(best.workload, best.plan, best.pool, best.step_s) if best else None
    return html.list_sections(advice, explanation, find_scaling_curves(advice.request, result.pools), level=2)


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
