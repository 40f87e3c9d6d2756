"""Convert a preset's name, a file or a Python object to a TrainingJob document.

Readers of manifests and graphs are imported inside functions, because a preset does not need them.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilecast import zoo
from tilecast.advice import Request
from tilecast.api import base, training_job
from tilecast.api.job_kinds import list_job_kinds
from tilecast.inputs import adapters, hub
from tilecast.inputs.job_options import ANY_OPTIONS, BARE_OPTIONS, JOB_OPTIONS, JobOptions
from tilecast.inputs.reading import (
    InputWarning,
    get_metadata_name,
    is_file_argument,
    read_text,
    to_flag,
)
from tilecast.spec import SpecError
from tilecast.trace import Trace
from tilecast.zoo import huggingface
from tilecast.zoo.traced import document as graph_document
from tilecast.zoo.traced import onnx_file

if TYPE_CHECKING:
    from tilecast.api.documents import Document
    from tilecast.inputs.manifest import ManifestJob
    from tilecast.manifests import JobReading
    from tilecast.readers import LaunchReading


@dataclass(frozen=True, slots=True)
class JobInput:
    """A TrainingJob document read from a file or built from flags, with its ConfigMaps."""

    document: Document
    config_maps: Mapping[str, Document] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    """For each field that a flag filled: its path, and the flag."""
    source: ManifestJob | None = None
    """Job of another kind from which the TrainingJob was derived."""
    notes: tuple[str, ...] = ()
    """Sentences for the reader of the advice, such as the revision of a model."""
    launch: LaunchReading | None = None
    """The launch command or configuration from which the TrainingJob was derived."""
    reading: JobReading | None = None
    """What a manifest says about its pods, including `launch`."""

    def request(self) -> Request:
        """Return the checked request for advice that the document describes.

        Raises:
            SpecError: the job is invalid. If a flag filled the wrong field, the error names the flag.
        """
        try:
            return training_job.read_request(self.document, self.config_maps)
        except SpecError as error:
            if self.source and error.field not in self.flags:
                from tilecast import jobs

                raise jobs.move_error_to_annotation(error) from None
            raise self.name_flag_in_error(error) from None

    def name_flag_in_error(self, error: SpecError) -> SpecError:
        """Return an error that names the flag which set the wrong field. If no flag set it, return the error unchanged.

        The field of the error may lack the prefix `spec.`. If flags describe the job, an error about several fields
        names their flags.
        """
        place = re.sub(r"\[\d+\]$", "", error.field)
        flag = self.flags.get(place) or self.flags.get(f"spec.{place}")
        if flag is not None:
            return error.at(flag)
        if place in ("spec", "spec.training") and "spec.training.globalBatchSize" in self.flags:
            return _name_flags_in_error(error)
        return error

    def replace_fields_by_flags(self, text: str) -> str:
        """Return a text that names flags instead of spec fields, if flags describe the job.

        Otherwise return the text unchanged.
        """
        return _replace_fields_by_flags(text) if "spec.training.globalBatchSize" in self.flags else text

    @classmethod
    def from_model(cls, options: JobOptions, name: str, model: dict[str, Any]) -> JobInput:
        """Return a new TrainingJob for a `spec.model`, with training options from the flags."""
        return _build_job_of_model(options, name, model)

    def with_field(self, path: Sequence[str], value: object, flag: str) -> JobInput:
        """Return a copy of the job with `value` at `path` in its spec. Later errors about this field name `flag`.

        Raises:
            SpecError: the parent of the field is not a mapping.
        """
        document = deepcopy(self.document)
        spec = place = document.get("spec")
        for part in path[:-1]:
            if isinstance(place, dict):
                place = place.setdefault(part, {})
        if not isinstance(spec, dict) or not isinstance(place, dict):
            raise SpecError(flag, f"the job has no mapping that {'.'.join(path)} could be in", "correct the job")
        place[path[-1]] = value
        other = {"steps": "tokens", "tokens": "steps"}.get(path[-1])
        if path[0] == "training" and other and f"spec.training.{other}" not in self.flags:
            place.pop(other, None)
        return replace(self, document=document, flags={**self.flags, ".".join(("spec", *path)): flag})

    def number(self, path: Sequence[str]) -> float | None:
        """Return the number at `path` in the spec. Return None if the field is missing or not a number."""
        place: Any = self.document.get("spec")
        for part in path:
            place = place.get(part) if isinstance(place, Mapping) else None
        return float(place) if isinstance(place, int | float) and not isinstance(place, bool) else None


def _name_flags_in_error(error: SpecError) -> SpecError:
    """Return a copy of an error about several spec fields that names flags instead of the fields.

    The copy is about the field at the beginning of the problem, or about both fields of a problem such as `steps and
    tokens both say`. Otherwise it is about the first flag that its text names.
    """
    problem, remedy = _replace_fields_by_flags(error.problem), _replace_fields_by_flags(error.remedy)
    flags = {option.path.rpartition(".")[2]: to_flag(name) for name, option in reversed(list(JOB_OPTIONS.items()))}
    first, _, rest = error.problem.partition(" ")
    if first in flags:
        second = re.match(r"and (\w+) (both .*)", rest)
        if second and second[1] in flags:
            return type(error)(f"{flags[first]} and {flags[second[1]]}", _replace_fields_by_flags(second[2]), remedy)
        return type(error)(flags[first], _replace_fields_by_flags(rest), remedy)
    named = re.search(r"--[a-z-]+", f"{problem} {remedy}")
    return type(error)(named[0] if named else error.field, problem, remedy)


def _replace_fields_by_flags(text: str) -> str:
    """Return a text that names flags instead of spec fields.

    A field of one word, such as `steps`, is replaced only after the name of its mapping, as in `training.steps`.
    """
    for name, option in JOB_OPTIONS.items():
        mapping, _, field_name = option.path.rpartition(".")
        if field_name.islower() and not mapping:
            continue
        paths = [option.path] if field_name.islower() else [option.path, field_name]
        text = re.sub(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, paths))})(?![\w-])", to_flag(name), text)
    return text


def read_job(options: JobOptions) -> JobInput:
    """Return the job that the options name, with the options' values set in its spec.

    Raises:
        SpecError: the file cannot be read or contains no job, or an option does not apply to the job.
    """
    from tilecast.inputs import launches

    if launches.is_launch(options):
        result = launches.read_launch_job(options, read_job_without_launch)
    else:
        result = read_job_without_launch(options)
    for name, option in ANY_OPTIONS.items():
        if name in options.values:
            result = result.with_field(option.path.split("."), options.values[name], to_flag(name))
    return result


def read_job_without_launch(options: JobOptions) -> JobInput:
    """Return the job that `options.job` describes, which is a name, a path or an object.

    If it describes only a model, the flags set the training options.

    Raises:
        SpecError: as in `read_job`.
    """
    named = isinstance(options.job, str)
    return _read_named_job(options, str(options.job)) if named else _read_object(options, options.job)


def _read_named_job(options: JobOptions, name: str) -> JobInput:
    """Return the job for `name`, which is a path of a file or folder, or a preset's name."""
    if (held := _find_config_in_folder(name)) is not None:
        options, name = replace(options, job=held), held
    if name.lower().endswith(".onnx"):
        return _build_job_of_model(
            options,
            *_put_graph_in_config_map(
                Path(name).stem, graph_document.write(read_onnx(name, options.values.get("seq")))
            ),
        )
    if name.lower().endswith(_WEIGHTS):
        remedy = "give the model's config.json, an ONNX file, or the graph that `tilecast trace` writes"
        raise SpecError(name, "holds weights, not what is computed with them", remedy)
    if is_file_argument(name):
        return _read_job_file(options, name)
    if hub.is_hub_name(name) and (name.startswith(hub.PREFIX) or not zoo.is_preset(name)):
        return _read_hub_job(options, name)
    preset = _find_preset(name)
    return _build_job_of_model(options, preset, {"preset": preset})


def _read_hub_job(options: JobOptions, name: str) -> JobInput:
    """Return the job for a model of the Hugging Face Hub.

    Raises:
        SpecError: the model is not found. Without `hf://` the error also says that no preset has the name.
    """
    try:
        found = hub.read_hub_config(name)
    except hub.HubUnavailableError as error:
        if name.startswith(hub.PREFIX):
            raise
        try:
            preset = _find_preset(name)
        except SpecError as unknown:
            meant = f"{unknown.remedy} Else " if "did you mean" in unknown.remedy else ""
            problem = f"unknown model {name!r}: it is no preset, and {error.problem}"
            raise SpecError("model", problem, f"{meant}{error.remedy}") from None
        return _build_job_of_model(options, preset, {"preset": preset})
    text = json.dumps(found.config)
    job = _read_only_job(options, [dict(found.config)], text, name)
    return replace(job, notes=(*job.notes, found.note))


def _read_object(options: JobOptions, job: object) -> JobInput:
    """Return the job for a `Trace`, a mapping, or a config object of Transformers.

    Raises:
        SpecError: the object has another type.
    """
    if isinstance(job, Trace):
        return _build_job_of_model(options, *_put_graph_in_config_map("traced", graph_document.write(job)))
    if job is None:
        raise SpecError("model", "is missing", "name a preset such as llama-3.1-8b, or give a path or a config")
    to_dict = getattr(job, "to_dict", None)
    document = to_dict() if callable(to_dict) else job
    if not isinstance(document, Mapping):
        remedy = "give a preset's name, a path, a Hugging Face config, a TrainingJob, or a torch.nn.Module with inputs"
        raise SpecError("model", f"{type(job).__name__} is no model that can be read", remedy)
    text = json.dumps(dict(document), default=str)
    return _read_only_job(options, [json.loads(text)], text, "model")


_WEIGHTS = (".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".gguf", ".h5", ".pkl")
"""Suffixes of the names of files with weights."""


def _find_preset(name: str) -> str:
    """Return the canonical name of the preset that `name` refers to.

    Raises:
        SpecError: there is no such preset. If config.json files of this model family can be read, the remedy says so.
    """
    try:
        return zoo.find_preset(name).name
    except SpecError as error:
        kind, kinds = (
            _normalize_model_type(name.rpartition("/")[2]),
            set(map(_normalize_model_type, huggingface.list_supported_types())),
        )
        is_of_one = any(re.match(rf"{re.escape(known)}[-\d]", kind) for known in kinds)
        is_known = kind in kinds and not zoo.list_presets_by_prefix(name)
        if is_known or ("did you mean" not in error.remedy and is_of_one):
            remedy = "give its config.json, which can be read; `tilecast show models` lists the presets"
            raise error.at(error.field, remedy) from None
        raise


def _normalize_model_type(name: str) -> str:
    return name.lower().replace("_", "-")


def read_onnx(path: str, sequence: int | None) -> Trace:
    """Return the operator graph of the ONNX file `path`. If given, `sequence` is the length of the dynamic dimension.

    Raises:
        SpecError: `sequence` is out of range, or the file is not a readable graph.
    """
    if sequence is not None and not 1 <= sequence <= base.MAX_SEQUENCE:
        raise SpecError("--seq", f"{sequence} is no number of tokens", "give an integer from 1")
    return onnx_file.read(Path(path), sequence)


_FOLDER = (adapters.FILE, "config.json")
"""Files of a model's folder that describe the model. The first one that exists is read."""


def _find_config_in_folder(job: str) -> str | None:
    """Return the path of the model's config in the folder `job`. Return None if `job` is not a folder.

    Also return None if the folder has no config, but `job` is the name of a preset.

    Raises:
        SpecError: the folder has no config, and `job` is not the name of a preset.
    """
    if not os.path.isdir(job):  # noqa: PTH112 (never raises)
        return None
    for name in _FOLDER:
        if (path := Path(job) / name).is_file():
            return str(path)
    try:
        zoo.find_preset(job)
    except SpecError:
        problem = f"is a folder without {' or '.join(_FOLDER)}"
        raise SpecError(job, problem, "name a file in it, or a preset") from None
    return None


def _build_adapter_job(options: JobOptions, config: Document) -> JobInput:
    """Return the job that trains a PEFT LoRA adapter on its base model.

    The flag `--lora-rank` takes precedence over the adapter's rank. A warning says how the adapter is forecast
    and lists its fields that the forecast ignores.

    Raises:
        SpecError: the adapter is not a LoRA, or its base model is not a preset.
    """
    adapter = adapters.read_adapter(config, options.title)
    notes = []
    if "lora_rank" not in options.values:
        options = replace(options, values={**options.values, "lora_rank": adapter.rank})
        notes = [f"priced as {adapter.base} with --lora-rank {adapter.rank}, on every dense layer"]
    if adapter.unpriced:
        notes.append(
            f"without {', '.join(adapter.unpriced)}, which {'is' if len(adapter.unpriced) == 1 else 'are'} not priced"
        )
    if notes:
        _warn(f"{options.title}: {'; '.join(notes)}")
    return _build_job_of_model(options, adapter.base, {"preset": adapter.base})


def _read_job_file(options: JobOptions, name: str) -> JobInput:
    from tilecast.api import documents

    if name != "-" and Path(name).exists() and not (Path(name).is_file() or Path(name).is_dir()):
        raise SpecError(name, "is no regular file", "give a file with a job or a model")
    text = read_text(name)
    return _read_only_job(options, documents.load_documents(text, name), text, name)


def _read_only_job(options: JobOptions, items: Sequence[Document], text: str, name: str) -> JobInput:
    """Return the only job among the documents that `text` contains. Errors call the text `name`."""
    from tilecast.inputs.manifest import find_document

    if not items:
        is_peft = Path(name).name == adapters.FILE
        remedy = adapters.INSTEAD if is_peft else "give a TrainingJob, a config.json or a graph, or name a preset"
        raise SpecError(name, "holds no jobs and no model", remedy)
    if len(items) == 1 and graph_document.is_document(items[0]):
        graph_document.read(items[0], name)
        return _build_job_of_model(options, *_put_graph_in_config_map(Path(name).stem, json.dumps(items[0])))
    if len(items) == 1 and huggingface.is_config(items[0]):
        preset = huggingface.model(items[0], name).name
        if (quantization := items[0].get("quantization_config")) is not None and "quantization" not in options.values:
            _warn_about_quantization(name, quantization)
        return _build_job_of_model(
            options, preset, {"huggingFace": {"config": huggingface.remove_label_tables(items[0])}}
        )
    if len(items) == 1 and adapters.is_adapter(items[0]):
        return _build_adapter_job(options, items[0])
    if len(items) == 1 and not {"apiVersion", "kind"} & set(items[0]):
        remedy = "give apiVersion and kind of a TrainingJob, or the model_type of a Hugging Face config.json"
        remedy = adapters.INSTEAD if Path(name).name == adapters.FILE else remedy
        raise SpecError(name, "is neither a job, a config.json nor a graph document", remedy)
    own = [document for document in items if document.get("kind") == training_job.KIND]
    described = None if own else find_document(items)
    if described is not None:
        return read_described_job(options, described, text, items)
    own = own or [*items]
    if len(own) == 1 and (kind := own[0].get("kind", training_job.KIND)) != training_job.KIND:
        remedy = f"give a TrainingJob, {list_job_kinds()}"
        raise SpecError(name, f"{kind} is not a kind of job that is read", remedy)
    if len(own) != 1:
        raise SpecError(name, f"holds {len(own)} jobs", "give a file with one TrainingJob")
    for option in BARE_OPTIONS:
        if option in options.values:
            raise SpecError(to_flag(option), "describes a bare model", f"change {name} instead")
    config_maps = {get_metadata_name(item): item for item in items if item.get("kind") == "ConfigMap"}
    return JobInput(own[0], config_maps)


def read_described_job(options: JobOptions, document: Document, text: str, items: Sequence[Document]) -> JobInput:
    """Return the job that a manifest of another kind describes, by its annotations and its command.

    Args:
        options: the job's options. Options of a bare model apply if the command describes the job.
        document: the manifest.
        text: text that contains the manifest.
        items: objects of the text.

    Raises:
        SpecError: neither annotations nor the command describe the job.
    """
    from tilecast.inputs.manifest import ManifestJob, read_annotations, read_described_spec

    annotations = read_annotations(document)
    objects = {(str(item.get("kind")), get_metadata_name(item)): item for item in items}
    source = ManifestJob.from_documents(text, items)
    spec, reading = read_described_spec(document, annotations, objects, lenient=options.lenient)
    name = source.job.name if source else base.to_object_name(get_metadata_name(document) or "job")
    flags = {} if reading is None else reading.list_origins(spec["training"])
    config_maps = {get_metadata_name(item): item for item in items if item.get("kind") == "ConfigMap"}
    launch = None if reading is None else reading.launch
    result = JobInput(
        training_job.training_job_document(name, spec), config_maps, flags, source, launch=launch, reading=reading
    )
    for option_name, option in BARE_OPTIONS.items():
        if option_name in options.values:
            if reading is None:
                raise SpecError(to_flag(option_name), "describes a bare model", f"change {options.title} instead")
            result = result.with_field(option.path.split("."), options.values[option_name], to_flag(option_name))
    return result


def _warn_about_quantization(name: str, quantization: object) -> None:
    """Warn that the forecast ignores the quantization in a config.json, and suggest flags that include it."""
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    text = f"quantization_config ({method})" if isinstance(method, str) else "quantization_config"
    fp8, others = (
        "give --precision fp8 where the products run in FP8",
        "give --lora-rank and --quantization nf4 for QLoRA",
    )
    remedy = f"weights are priced in the training precision; {fp8 if 'fp8' in str(method) else others}"
    _warn(f"{name}: {text} is not priced; {remedy}")


def _warn(text: str) -> None:
    warnings.warn(text, InputWarning, stacklevel=2)


def _put_graph_in_config_map(name: str, graph: str) -> tuple[str, dict[str, Any], dict[str, Document]]:
    """Return a job's name, its `spec.model`, and its ConfigMap by name. The ConfigMap contains the text of a graph."""
    named = base.to_object_name(name)
    reference = {"graphRef": {"configMapKeyRef": {"name": named}}}
    return named, reference, {named: {"kind": "ConfigMap", "data": {"graph.json": graph}}}


def _build_job_of_model(
    options: JobOptions, name: str, model: dict[str, Any], config_maps: Mapping[str, Document] | None = None
) -> JobInput:
    """Return a new TrainingJob for a `spec.model`, with training options from the flags.

    Raises:
        SpecError: `--batch` is missing.
    """
    if "batch" not in options.values:
        raise SpecError("--batch", "is missing", "say how many samples one optimizer step takes")
    fields = {name: option.path.removeprefix("training.") for name, option in BARE_OPTIONS.items()}
    training = {key: options.values[name] for name, key in fields.items() if name in options.values}
    document = training_job.training_job_document(base.to_object_name(name), {"model": model, "training": training})
    return JobInput(
        document, config_maps or {}, {f"spec.training.{key}": to_flag(name) for name, key in fields.items()}
    )
