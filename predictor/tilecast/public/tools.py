"""Tools for agents: the functions of the Python API with JSON input and output, each with a JSON schema.

Types of arguments come from the signatures of the Python API, and descriptions from the job's options, so that nothing
is written twice. `tilecast mcp` serves the tools.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, Unpack, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tilecast import untrusted
from tilecast.inputs.job_options import JOB_OPTIONS
from tilecast.inputs.pools import PoolOptions
from tilecast.inputs.reading import InputWarning
from tilecast.planner.policies import POLICIES
from tilecast.planner.solver import ORDERS
from tilecast.public import api, catalog
from tilecast.render.launch import LAUNCHERS
from tilecast.render.rows import rows_table
from tilecast.spec import SpecError

Answer = tuple[dict[str, Any], str]
"""The result of a tool as JSON-compatible data, and as the table that the command line prints."""

_POOLS: Mapping[str, str] = {
    "gpus": 'Pools by GPU and count: "h100-sxm:16,l4:16", {"h100-sxm": 16}, or instance types, "p5.48xlarge:2".',
    "nodes": "Instead of gpus: a path to Nodes and GPUPools as kubectl prints them, or these objects.",
    "context": "Instead of gpus: a context of kubectl whose nodes are read.",
    "calibration": "Path of corrections that `tilecast calibrate` wrote.",
    "link": "Link in or between the nodes of every pool, for which gpus names none.",
}
_DESCRIPTIONS: Mapping[str, str] = {
    **_POOLS,
    "model": "A preset's name such as llama-3.1-8b; a path of a config.json, a job's manifest, a graph or an ONNX "
    "file; the same as an object. It may be left out if command names the model.",
    "command": "Launch command that says the job: torchrun pretrain_gpt.py --tensor-model-parallel-size 8 …",
    "lenient": "Ignore options of the command that change speed or memory and are not priced.",
    "plan": 'The only plan to price, such as "tp=2,dp=8".',
    "baseline": "What runs today, as POOL:N[:PLAN][=STEP], for comparison.",
    "measured": 'Measured steps, "POOL:N[/PLAN]=STEP" each, or an object from POOL:N to seconds; they correct all.',
    "launcher": "Limit plans to those that this launcher can run.",
    "jobs": "A file or folder of TrainingJobs and annotated jobs of other kinds, or a list of these objects.",
    "policy": "Order in which the queue is planned.",
    "order": "The order in which jobs may start: Kueue's, or any that the policy likes.",
    "horizon": 'Deadline of jobs that have none: seconds, or a text such as "36h".',
    "what_if": 'Nodes to add or remove in a second plan for comparison: "POOL:+N" or "POOL:-N".',
    "if_submitted": "One more job, as a path or an object: also when it would start and end on each pool.",
    "at": "The time that counts as now, in ISO 8601.",
}
"""Descriptions of arguments that are not job options."""
_CHOICES: Mapping[str, Sequence[str]] = {
    "launcher": tuple(LAUNCHERS),
    "policy": tuple(POLICIES),
    "order": tuple(ORDERS),
}
_NO_ARGUMENTS = ("inputs", *(alias for option in JOB_OPTIONS.values() for alias in option.aliases))
"""Arguments of the Python API that tools do not have: tensors and synonyms."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function for agents, with the Python type of each argument by name."""

    name: str
    description: str
    arguments: Mapping[str, Any]
    required: tuple[str, ...]
    run: Callable[[dict[str, Any]], Answer]

    def write_schema(self, without: Sequence[str] = ()) -> dict[str, Any]:
        """Return the JSON schema of the arguments, except those named by `without`."""
        return {
            "type": "object",
            "properties": {
                name: _write_property(name, hint) for name, hint in self.arguments.items() if name not in without
            },
            "required": list(self.required),
            "additionalProperties": False,
        }


def call_tool(name: str, arguments: Mapping[str, Any]) -> Answer:
    """Return the result of a tool. Warnings about the input are added to the text, one line each.

    Raises:
        SpecError: there is no such tool, or an argument is unknown, missing or invalid.
    """
    tools = list_tools()
    if name not in tools:
        raise SpecError("tool", f"{name[:40]!r} is not known", f"known: {', '.join(tools)}")
    try:
        given = _check_arguments(tools[name], arguments)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", InputWarning)
            document, text = tools[name].run(given)
    except SpecError as error:
        # An argument is named in its error, and may be long and have several lines.
        raise type(error)(*map(_format_on_one_line, (error.field, error.problem, error.remedy))) from None
    notes = [str(one.message) for one in caught if issubclass(one.category, InputWarning)]
    return document, "\n".join([text, *notes])


MAX_ERROR_PART = 500
"""Most characters of the field, the problem and the remedy of an error, each."""


def _format_on_one_line(text: str) -> str:
    """Return a text with blanks instead of characters that cannot be printed, cut to `MAX_ERROR_PART` characters."""
    if len(text) > MAX_ERROR_PART:
        text = f"{text[: MAX_ERROR_PART - 2]} …"
    return untrusted.blank_unprintable(text)


@cache
def warm_up() -> None:
    """Price one job, so that libraries that inspect the machine are loaded before the first request."""
    api.forecast("gpt2", seq=1024, batch=8, gpus="l4:1", plan="dp=1")


@cache
def list_tools() -> Mapping[str, Tool]:
    """Return all tools by name."""
    settings = get_type_hints(api.JobSettings)
    described: tuple[tuple[Callable[..., Any], str], ...] = (
        (api.advise, "The best pool and plan for a training job, with range, cost, reasons and alternatives."),
        (api.forecast, "The forecast of one plan on one pool: step time, range, memory and cost."),
        (api.fits, "Whether a job fits into memory, on how few GPUs of each pool, and else what would help."),
        (api.queue, "Which job of a queue on which pool, and when each starts and ends."),
    )
    tools = [_build_tool(function, text, settings) for function, text in described]
    hints = {name: settings[name] for name in ("gpus", "nodes", "context", "link")}
    text = "The GPU pools of a cluster or of a list of GPUs: nodes, links, memory and price."
    return {one.name: one for one in (*tools, Tool("pools", text, hints, (), _list_pools))}


def _build_tool(function: Callable[..., Any], description: str, settings: Mapping[str, Any]) -> Tool:
    """Return the tool for a function of the Python API. If the function takes `**settings`, they are `JobSettings`."""
    hints, arguments = get_type_hints(function, localns={"Unpack": Unpack}), dict[str, Any]()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= {key: hint for key, hint in settings.items() if key not in _NO_ARGUMENTS}
        else:
            arguments[name] = _JSON_TYPES.get(name, hints[name])
    required = ("jobs",) if "jobs" in arguments else ()
    return Tool(function.__name__, description, arguments, required, partial(_run_tool, function))


_JSON_TYPES: Mapping[str, Any] = {
    "model": str | dict[str, Any] | None,
    "jobs": str | list[dict[str, Any]],
    "if_submitted": str | dict[str, Any] | None,
    "nodes": str | dict[str, Any] | list[dict[str, Any]] | None,
}
"""JSON types of arguments that the Python API accepts as arbitrary objects."""


def _run_tool(function: Callable[..., Any], given: dict[str, Any]) -> Answer:
    """Call a function of the Python API. Its first argument, the model or the jobs, is passed by position."""
    subject = given.pop("jobs" if function is api.queue else "model", None)
    result = function(subject, **given)
    return result.to_dict(), str(result)


def _list_pools(given: dict[str, Any]) -> Answer:
    values = [given.get(name) for name in ("nodes", "gpus", "context", "calibration", "link")]
    with api.name_arguments_in_errors():
        rows = [dict(row) for row in catalog.list_pools(PoolOptions.from_arguments(*values))]
    return {"pools": rows}, "\n".join(rows_table(rows))


@cache
def _find_adapter(name: str, hint: Any) -> TypeAdapter[Any]:
    """Return the pydantic adapter that validates an argument of type `hint`."""
    return TypeAdapter(_JSON_TYPES.get(name, hint))


def _write_property(name: str, hint: Any) -> dict[str, Any]:
    """Return the JSON schema of an argument."""
    option = JOB_OPTIONS.get(name)
    schema = {key: value for key, value in _find_adapter(name, hint).json_schema().items() if key != "title"}
    if "anyOf" in schema:
        # An argument that is left out is the same as one that is null.
        kinds = [kind for kind in schema.pop("anyOf") if kind.get("type") != "null"]
        schema |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    choices = _CHOICES.get(name) or (option.choices if option else None)
    if choices:
        schema = {"type": "string", "enum": list(choices)}
    text = _DESCRIPTIONS.get(name) or (option.help if option else "")
    return {"description": text, **schema} if text else schema


def _check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated arguments of a tool, without those that are null.

    Raises:
        SpecError: an argument is unknown, missing, or of another type.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if name not in tool.arguments:
            near = get_close_matches(name, tool.arguments, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"see the schema of {tool.name}"
            raise SpecError(name[:40], f"is no argument of {tool.name}", remedy)
        try:
            _find_adapter(name, tool.arguments[name]).validate_python(value, strict=True)
        except ValidationError as error:
            kinds = sorted({item["msg"].removeprefix("Input ") for item in error.errors()})
            raise SpecError(name, " or ".join(kinds), f"see the schema of {tool.name}") from None
        if isinstance(value, str) and (not value.strip() or "\0" in value):
            problem = "has a zero byte" if "\0" in value else "is empty"
            raise SpecError(name, problem, f"leave it out, or see the schema of {tool.name}")
    for name in tool.required:
        if name not in given:
            raise SpecError(name, "is missing", f"see the schema of {tool.name}")
    if "model" in tool.arguments and not given.keys() & {"model", "command"}:
        remedy = "name a preset such as llama-3.1-8b, give a path or a config, or give command"
        raise SpecError("model", "is missing", remedy)
    return given
