"""Read the model of a TrainingJob: by name, from its dimensions, or from a ConfigMap."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilecast import untrusted, zoo
from tilecast.api.fields import as_mapping
from tilecast.api.model_source import ModelSource
from tilecast.model import Model
from tilecast.spec import SpecError
from tilecast.trace import Trace
from tilecast.zoo import huggingface, traced
from tilecast.zoo.traced import document as graph_document
from tilecast.zoo.traced import onnx_file


@dataclass(frozen=True, slots=True)
class ModelReference:
    """Name and key of the ConfigMap that contains a job's model, and the job's field that refers to it."""

    field: str
    """Path of the reference in the job, for errors."""
    name: str
    key: str
    otherwise: str
    """Remedy for a user without a ConfigMap."""


def config_map_content(reference: ModelReference, config_map: Mapping[str, Any] | None) -> bytes:
    """Return the bytes of the key of a ConfigMap that a reference names, from `data` or `binaryData`.

    Args:
        reference: the reference.
        config_map: the ConfigMap, or None if there is none.

    Raises:
        SpecError: the ConfigMap or its key is missing, or its bytes are not base64.
    """
    if config_map is None:
        remedy = f"create it beside the job, or {reference.otherwise}"
        raise SpecError(f"{reference.field}.name", f"there is no ConfigMap {reference.name}", remedy)
    text, binary = (as_mapping(config_map.get(part)) for part in ("data", "binaryData"))
    if reference.key in text:
        return str(text[reference.key]).encode()
    if reference.key not in binary:
        keys = ", ".join(sorted(str(key) for key in (*text, *binary))[:8]) or "nothing"
        problem = f"ConfigMap {reference.name} has no {reference.key}"
        raise SpecError(f"{reference.field}.key", problem, f"it holds {keys}"[:200])
    try:
        return base64.b64decode(str(binary[reference.key]))
    except ValueError:
        problem = f"{reference.key} of ConfigMap {reference.name} is not base64"
        remedy = "store it with `kubectl create configmap --from-file`"
        raise SpecError(f"{reference.field}.key", problem, remedy) from None


def read_model(
    name: str, source: ModelSource, reference: ModelReference | None, stored: bytes | None, sequence: int | None
) -> Model:
    """Return the model that the `spec.model` of a job describes.

    Args:
        name: name of the job.
        source: its `spec.model`.
        reference: the ConfigMap key that contains the model. None if no ConfigMap does.
        stored: content of that ConfigMap key. None if no ConfigMap was read.
        sequence: tokens per sample from the job's spec. None if the spec has none.

    Raises:
        SpecError: the model is unknown or cannot be read, or its ConfigMap was not read.
    """
    if reference is not None and stored is None:
        raise SpecError(reference.field, "is not read here", reference.otherwise)
    if reference is not None and stored is not None and source.graph_ref is not None:
        return traced.build_model(reference.name, _parse_graph(reference, stored, sequence))
    if source.hugging_face is not None:
        config = source.hugging_face.config or {}
        if reference is not None and stored is not None:
            config = _parse_json(reference, stored, "store the text of the model's config.json")
        return huggingface.model(config, "spec.model.huggingFace.config")
    try:
        if source.transformer is not None:
            return source.transformer.to_model(name)
        return zoo.find_preset(str(source.preset))
    except SpecError as error:
        field = "spec.model.preset" if source.transformer is None else "spec.model.transformer"
        raise error.at(field) from None


def _parse_json(reference: ModelReference, stored: bytes, remedy: str) -> dict[str, Any]:
    """Return the content of a ConfigMap key as a JSON mapping. Errors suggest `remedy`."""
    subject = f"{reference.key} of ConfigMap {reference.name}"
    return untrusted.parse_json_mapping(stored, f"{reference.field}.key", subject, remedy)


def _parse_graph(reference: ModelReference, stored: bytes, sequence: int | None) -> Trace:
    """Return the graph in a ConfigMap key: JSON of `tilecast trace`, or an ONNX file."""
    field = f"{reference.field}.key"
    if stored.lstrip()[:1] == b"{":
        value = _parse_json(reference, stored, "store what `tilecast trace` wrote")
        return graph_document.read(value, field)
    try:
        return onnx_file.parse(stored, field, sequence)
    except SpecError as error:
        if error.field != "--seq":
            raise
        raise error.at("spec.training.sequenceLength") from None


def sequence_length(model: Model, requested_length: int | None) -> int:
    """Return the number of tokens in a sample.

    For a model without a vocabulary, the number is 1. For a traced graph, it is the length of the trace. CLIP and
    Whisper by default have the length to which they pad texts.

    Raises:
        SpecError: the spec has no length although the model needs one, or the length is invalid for the model.
    """
    field = "spec.training.sequenceLength"
    if model.trace is not None:
        if requested_length not in (None, 1) and model.trace.sequence == 1:
            raise SpecError(field, f"{model.name} reads no tokens", "leave it out")
        if requested_length not in (None, model.trace.sequence):
            problem = f"{model.name} was traced with {model.trace.sequence} tokens per sample"
            raise SpecError(field, problem, "leave it out, or trace anew")
        return model.trace.sequence
    if model.vocab == 0:
        if requested_length not in (None, 1):
            takes = "reads images, not tokens" if zoo.reads_images(model) else "takes samples of one length"
            raise SpecError(field, f"{model.name} {takes}", "leave it out")
        return 1
    if requested_length is None and (usual := model.get_dimensions(zoo.Transformer).text_length):
        return usual
    if requested_length is None:
        raise SpecError(field, "is missing", f"{model.name} reads tokens: say how many per sample")
    if model.positions and requested_length > model.positions:
        raise SpecError(
            field, f"{requested_length} is above the {model.positions} positions that {model.name} has", "shorten it"
        )
    return requested_length
