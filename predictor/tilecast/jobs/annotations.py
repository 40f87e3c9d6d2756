"""What the annotations of a job ask for, in the terms of a TrainingJob."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tilecast.api.base import check, shown
from tilecast.api.training_job import MODES, Mode, TrainingJobSpec
from tilecast.jobs.interface import Job
from tilecast.jobs.keys import CONFIG_MAP, CONSTRAINTS, MODE, MODEL, OBJECTIVE, TRAINING
from tilecast.spec import SpecError


def described(job: Job) -> dict[str, Any]:
    """What a job's annotations ask for, as the spec of a TrainingJob, unchecked.

    Raises:
        SpecError: an annotation is missing or cannot be read; the message names it.
    """
    marks = job.annotations
    name = marks.get(MODEL, "").strip()
    if not name:
        raise SpecError(MODEL, "is missing", f"annotate the job with a model, for instance {MODEL}: llama-2-7b")
    if TRAINING not in marks:
        remedy = f"annotate the job, for instance {TRAINING}: " + '{"sequenceLength": 4096, "globalBatchSize": 256}'
        raise SpecError(TRAINING, "is missing", remedy)
    found: dict[str, Any] = {"model": _model(name), "training": _json(marks, TRAINING)}
    if CONSTRAINTS in marks:
        found["constraints"] = _json(marks, CONSTRAINTS)
    if OBJECTIVE in marks:
        found["objective"] = marks[OBJECTIVE]
    return found


def advice_spec(job: Job) -> TrainingJobSpec:
    """The same, checked.

    Raises:
        SpecError: an annotation is missing or wrong; the message names it.
    """
    found = described(job)
    try:
        return check(TrainingJobSpec, found, "spec")
    except SpecError as error:
        raise in_annotations(error) from None


def in_annotations(error: SpecError) -> SpecError:
    """The same error with the annotation's name in place of the field of a TrainingJob."""
    for field_, mark in _FIELDS.items():
        if error.field == field_ or error.field.startswith(f"{field_}."):
            return SpecError(mark + error.field.removeprefix(field_), error.problem, error.remedy)
    return error


def in_words(text: str) -> str:
    """The message of an error about a TrainingJob, with the annotation's name in place of the field."""
    found = next((field_ for field_ in _FIELDS if text.startswith(field_)), None)
    return text if found is None else _FIELDS[found] + text.removeprefix(found)


_FIELDS = {
    "spec.model": MODEL,
    "spec.training": TRAINING,
    "spec.constraints": CONSTRAINTS,
    "spec.objective": OBJECTIVE,
}


def mode_of(job: Job) -> Mode:
    """The mode that a job's annotation asks for; Advise where there is none.

    Raises:
        SpecError: there is no such mode.
    """
    found = job.annotations.get(MODE, "Advise")
    for mode in MODES:
        if found == mode:
            return mode
    raise SpecError(MODE, f"{shown(found)} is no mode", f"use one of {', '.join(MODES)}")


def _model(name: str) -> dict[str, Any]:
    if not name.startswith(CONFIG_MAP):
        return {"preset": name.rpartition("/")[2] if name.count("/") == 1 else name}
    config_map, _, key = name.removeprefix(CONFIG_MAP).partition("/")
    if not config_map or not key:
        raise SpecError(MODEL, f"{shown(name)} names no key", f"write {CONFIG_MAP}NAME/KEY")
    reference = {"configMapKeyRef": {"name": config_map, "key": key}}
    is_graph = key == "graph.json" or key.endswith(".onnx")
    return {"graphRef" if is_graph else "huggingFace": reference}


def _json(marks: Mapping[str, str], mark: str) -> dict[str, Any]:
    try:
        found = json.loads(marks[mark])
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SpecError(mark, f"{shown(marks[mark])} is no JSON mapping", 'write for instance {"globalBatchSize": 256}')
    return found
