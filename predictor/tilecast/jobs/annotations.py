"""Annotations of a job, read as the spec of a TrainingJob."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilecast import untrusted
from tilecast.api.base import format_value
from tilecast.api.training_job import MODES, Mode
from tilecast.jobs.interface import Job
from tilecast.jobs.keys import CONFIG_MAP, CONSTRAINTS, MODE, MODEL, OBJECTIVE, TRAINING, WEIGHT
from tilecast.spec import SpecError


def read_training_spec(
    annotations: Mapping[str, str], said: Mapping[str, Any] | None = None, why_not: str = ""
) -> dict[str, Any]:
    """Return the spec of a TrainingJob that a job's annotations describe, as a mapping that is not validated yet.

    Args:
        annotations: annotations of the job.
        said: `model` and `training` as far as they were read from the job's command. Annotations take precedence.
        why_not: reason why neither could be read from the command, for error messages.

    Raises:
        SpecError: an annotation is missing or cannot be read. The message names the annotation.
    """
    known = said or {}
    problem = f"is missing, and the command does not say it: {why_not}" if why_not else "is missing"
    name = annotations.get(MODEL, "").strip()
    if not name and not known.get("model"):
        raise SpecError(MODEL, problem, f"annotate the job with a model, for instance {MODEL}: llama-2-7b")
    if TRAINING not in annotations and not known.get("training"):
        remedy = f"annotate the job, for instance {TRAINING}: " + '{"sequenceLength": 4096, "globalBatchSize": 256}'
        raise SpecError(TRAINING, problem, remedy)
    stated = _parse_mapping(annotations, TRAINING) if TRAINING in annotations else {}
    spec: dict[str, Any] = {
        "model": _parse_model(name) if name else known["model"],
        "training": {**known.get("training", {}), **stated},
    }
    if CONSTRAINTS in annotations:
        spec["constraints"] = _parse_mapping(annotations, CONSTRAINTS)
    if OBJECTIVE in annotations:
        spec["objective"] = annotations[OBJECTIVE]
    return spec


def move_error_to_annotation(error: SpecError) -> SpecError:
    """Return an error about a field of a TrainingJob as an error about the annotation from which the field was read.

    An error about any other field is returned unchanged.
    """
    for field_, mark in _FIELDS.items():
        if error.field == field_ or error.field.startswith(f"{field_}."):
            return error.at(mark + error.field.removeprefix(field_))
    return error


def move_message_to_annotation(text: str) -> str:
    """Return an error message with the annotation that sets a TrainingJob field in place of that leading field."""
    name = next((field_ for field_ in _FIELDS if text.startswith(field_)), None)
    return text if name is None else _FIELDS[name] + text.removeprefix(name)


_FIELDS = {
    "spec.model": MODEL,
    "spec.training": TRAINING,
    "spec.constraints": CONSTRAINTS,
    "spec.objective": OBJECTIVE,
}


def read_mode(job: Job) -> Mode:
    """Return the mode that a job's annotation requests. Without the annotation, return "Advise".

    Raises:
        SpecError: the annotation names an unknown mode.
    """
    given = job.annotations.get(MODE, "Advise")
    for mode in MODES:
        if given == mode:
            return mode
    raise SpecError(MODE, f"{format_value(given)} is no mode", f"use one of {', '.join(MODES)}")


def read_weight(annotations: Mapping[str, object]) -> float:
    """Return the weight that a job's annotations give its completion time in the plan of the queue, by default 1.

    Raises:
        SpecError: the annotation is not a number above 0 and up to 1e6.
    """
    text = str(annotations.get(WEIGHT, "1"))
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1e6:
        raise SpecError(WEIGHT, f"{text[:40]!r} is no weight", "write a number above 0")
    return number


def _parse_model(name: str) -> dict[str, Any]:
    if not name.startswith(CONFIG_MAP):
        return {"preset": name.rpartition("/")[2] if name.count("/") == 1 else name}
    config_map, _, key = name.removeprefix(CONFIG_MAP).partition("/")
    if not config_map or not key:
        raise SpecError(MODEL, f"{format_value(name)} names no key", f"write {CONFIG_MAP}NAME/KEY")
    reference = {"configMapKeyRef": {"name": config_map, "key": key}}
    is_graph = key == "graph.json" or key.endswith(".onnx")
    return {"graphRef" if is_graph else "huggingFace": reference}


def _parse_mapping(annotations: Mapping[str, str], key: str) -> dict[str, Any]:
    text = annotations[key]
    return untrusted.parse_json_mapping(text, key, format_value(text), 'write for instance {"globalBatchSize": 256}')
