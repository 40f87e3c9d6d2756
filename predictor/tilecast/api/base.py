"""Base classes of all documents: strict pydantic models with camelCase keys, and rules that involve several fields.

Validation errors become one-line messages.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin

from annotated_types import MaxLen
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from tilecast.api.fields import value_at_path
from tilecast.plan_columns import PLAN_COLUMNS
from tilecast.spec import SpecError

GROUP = "tilecast.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
MAX_NAME = 253
MAX_BATCH = 2**24
MAX_SEQUENCE = 2**24
MAX_GPUS = 2**17
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
"""Pattern of the names that the API server allows.

The operator requests objects by these names, so nothing else may pass: a name with `../` in it would lead to the
objects of another namespace.
"""


def to_object_name(text: str) -> str:
    """Return a valid name of a Kubernetes object (RFC 1123 subdomain) that resembles the text.

    The name has lower-case letters without accents, digits, dashes and dots. If no such character is left, the name is
    "model".
    """
    plain = unicodedata.normalize("NFKD", text.casefold()).encode("ascii", "ignore").decode()
    words = (re.sub(r"[^a-z0-9]+", "-", part).strip("-") for part in plain.split("."))
    return ".".join(word for word in words if word)[:MAX_NAME].strip("-.") or "model"


def round_to_six_digits(value: float) -> float:
    """Return a number rounded to six significant digits, so that advice is equal on all machines."""
    return float(f"{value:.6g}")


def round_to_six_digits_if_known(value: float | None) -> float | None:
    """Return a number rounded to six significant digits. If the number is None, return None."""
    return None if value is None else round_to_six_digits(value)


@dataclass(frozen=True, slots=True)
class ValidationRule:
    """A condition that involves several fields, as a CEL rule for the API server and as a Python function."""

    cel: str
    """Condition in CEL over `self`, as in `x-kubernetes-validations`.

    An expression that a rule needs twice is written twice, because no version of Kubernetes enables `cel.bind` (the
    list is in `pkg/cel/environment/base.go` of its API server).
    """
    holds: Callable[[Any], bool]
    """Function that checks the same condition on the pydantic model."""
    problem: str
    remedy: str


class ApiModel(BaseModel):
    """Base of documents that users write: camelCase keys, no unknown keys, no silent conversion."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        defer_build=True,
    )
    rules: ClassVar[tuple[ValidationRule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> ApiModel:
        for rule in self.rules:
            if not rule.holds(self):
                raise PydanticCustomError("rule", "{problem}", {"problem": rule.problem, "remedy": rule.remedy})
        return self


def optional_field(description: str, **bounds: Any) -> Any:
    """Return a pydantic field that documents may leave out. `bounds` are keyword arguments of Field."""
    return Field(default=None, description=description, **bounds)


def list_field(description: str, **bounds: Any) -> Any:
    """Return a pydantic field for a list that is empty by default. `bounds` are keyword arguments of Field."""
    return Field(default_factory=list, description=description, **bounds)


TIME: Mapping[str, Any] = {"max_length": 32, "json_schema_extra": {"format": "date-time"}}
"""Bounds of a time field."""


def time_field(description: str) -> Any:
    """Return a required pydantic field for a time in ISO 8601."""
    return Field(description=description, **TIME)


def list_map_keyed_by(name: str) -> dict[str, Any]:
    """Return schema entries by which server-side apply merges a list. The field `name` identifies its items."""
    return {"json_schema_extra": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [name]}}


def plan_field(name: str, **bounds: Any) -> Any:
    """Return the pydantic field for a degree or setting of a plan, such as the tensor-parallel degree.

    Args:
        name: key of `PLAN_COLUMNS`.
        **bounds: keyword arguments of pydantic's Field.
    """
    column = PLAN_COLUMNS[name]
    text = f"{column.description}{column.detail}."
    return Field(**{"alias": column.key, "ge": column.least, "description": text, **bounds})


def optional_plan_field(name: str, **bounds: Any) -> Any:
    """Return a pydantic field, which may be left out, for a degree or setting of a plan.

    If a document leaves it out, the search chooses the value.

    Args:
        name: key of `PLAN_COLUMNS`.
        **bounds: keyword arguments of pydantic's Field.
    """
    column = PLAN_COLUMNS[name]
    text = f"{column.description}; absent takes the fastest that fits."
    return Field(**{"alias": column.key, "ge": column.least, "default": None, "description": text, **bounds})


class StatusModel(ApiModel):
    """Base of documents that the operator writes. Models accept values by field name as well as by camelCase key."""

    model_config = ConfigDict(populate_by_name=True)

    @classmethod
    def parse_valid_items(cls, value: object) -> list[Self]:
        """Return the valid items of a list, parsed into models.

        Invalid items are ignored, because users with write access may have changed the document. If `value` is not a
        list, return an empty list.
        """
        items = []
        for item in value if isinstance(value, list) else []:
            with suppress(ValidationError):
                items.append(cls.model_validate(item))
        return items

    @classmethod
    def from_truncated_values(cls, **values: Any) -> Self:
        """Return a model of the values, with texts and lists cut to the maximum lengths of their fields.

        None and empty lists are left out.

        Args:
            values: values by the name or the alias of a field.
        """
        limits = _length_limits(cls)
        items = {key: value for key, value in values.items() if value is not None and value != []}
        cut = {key: value[: limits[key]] if key in limits else value for key, value in items.items()}
        return cls.model_validate(cut)

    def document(self) -> dict[str, Any]:
        """Return a dictionary of the fields that were set, with the keys of the document (camelCase)."""
        return self.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)


class UnboundedModel(StatusModel):
    """Base of models that inherit the fields of a status, but do not limit the length of texts and lists."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for field in cls.model_fields.values():
            field.metadata = [bound for bound in field.metadata if not isinstance(bound, MaxLen)]


@cache
def _length_limits(schema: type[ApiModel]) -> Mapping[str, int]:
    """Return the maximum length of each text or list field that has a limit, by the field's name and by its alias."""
    return {
        key: bound.max_length
        for name, field in schema.model_fields.items()
        if field.annotation is not None and _has_length(field.annotation)
        for bound in field.metadata
        if isinstance(bound, MaxLen)
        for key in (name, str(field.alias))
    }


def _has_length(annotation: Any) -> bool:
    """Return whether the values of a type annotation are texts or lists, and so have a length."""
    kinds = [get_origin(item) or item for item in (annotation, *get_args(annotation))]
    return any(kind in (str, list) for kind in kinds) and dict not in kinds


class Toleration(ApiModel):
    """A taint that the job must tolerate to run on the pool."""

    key: str | None = optional_field("Key of the taint; absent tolerates every key.", min_length=1, max_length=316)
    operator: str | None = optional_field(
        "Equal compares the value, Exists does not.", pattern="^(Equal|Exists)$", max_length=6
    )
    value: str | None = optional_field("Value of the taint.", max_length=63)
    effect: str | None = optional_field(
        "Effect of the taint; absent tolerates every effect.",
        pattern="^(NoSchedule|PreferNoSchedule|NoExecute)$",
        max_length=16,
    )

    def to_pod_toleration(self) -> dict[str, str]:
        """Return the toleration as a dictionary for a pod's `spec.tolerations`."""
        return self.model_dump(by_alias=True, exclude_none=True)


SchemaT = TypeVar("SchemaT", bound=ApiModel)


def check_envelope(document: Mapping[str, Any], kind: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the spec of a custom resource after checking `apiVersion`, `kind` and `metadata`.

    Raises:
        SpecError: one of these fields is not valid for a resource `kind` of Tilecast's API group.
    """
    if not isinstance(document, Mapping):
        raise SpecError(kind, "is not a mapping", "write apiVersion, kind, metadata and spec")
    for field, expected in (("apiVersion", API_VERSION), ("kind", kind)):
        given = document.get(field)
        if given != expected:
            problem = "is missing" if given is None else f"{format_value(given)} is not {expected}"
            raise SpecError(field, problem, f"write {field}: {expected}")
    outer = ("apiVersion", "kind", "metadata", "spec", "status")
    for key in document:
        if key not in outer:
            raise SpecError(format_value(key, quote=False), "unknown field", _suggest_name(str(key), outer))
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise SpecError("metadata.name", "is missing or no name", "write metadata: {name: my-name}")
    spec = document.get("spec")
    if not isinstance(spec, Mapping):
        problem = "is missing" if spec is None else f"{format_value(spec)} is not a mapping"
        raise SpecError("spec", problem, f"see the examples of a {kind}")
    return name, spec


def read_mapping(value: Mapping[str, Any], key: str, where: str, remedy: str) -> Mapping[str, Any]:
    """Return the mapping under a key, or an empty mapping if the key is absent or its value is None.

    Raises:
        SpecError: the value of the key is not a mapping. The message calls the value `where`.
    """
    inner = value.get(key)
    if inner is None:
        return {}
    if not isinstance(inner, Mapping):
        raise SpecError(f"{where}: {key}", f"{format_value(inner)} is not a mapping", remedy)
    return inner


def validate_model(schema: type[SchemaT], value: Mapping[str, Any], root: str) -> SchemaT:
    """Return a mapping as a validated model of class `schema`. In errors, paths of fields begin with `root`.

    Raises:
        SpecError: a field is unknown, missing, of the wrong type or out of bounds, a rule is violated, or the value is
            nested too deeply. The message names the first problem in the order of `_ORDER`.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = min(errors, key=lambda item: _ORDER.get(item["type"], 2))
        raise _to_spec_error(first, schema, value, root) from None
    except RecursionError:
        raise SpecError(root, "is nested too deeply", "flatten it") from None


def format_value(value: object, quote: bool = True) -> str:
    """Return a value as text for an error message: one line of at most 60 characters, without control characters."""
    text = repr(value) if quote else repr(str(value))[1:-1]
    return text if len(text) <= 60 else f"{text[:57]}..."


_ORDER: Mapping[str, int] = {"extra_forbidden": 0, "missing": 1, "rule": 3}
"""Order in which kinds of errors are reported. Others have 2.

A misspelt key also appears as a missing one, and a wrong value also breaks rules, so the cause comes first.
"""

_TYPES: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
}

_BOUNDS: Mapping[str, str] = {
    "greater_than": "use more than {gt}",
    "greater_than_equal": "use {ge} or more",
    "less_than": "use less than {lt}",
    "less_than_equal": "use {le} or less",
}


def _to_spec_error(error: ErrorDetails, schema: type[ApiModel], value: Mapping[str, Any], root: str) -> SpecError:
    kind, loc, context = error["type"], error["loc"], error.get("ctx", {})
    path = root + "".join(
        f"[{part}]" if isinstance(part, int) else f".{format_value(part, quote=False)}" for part in loc
    )
    got = value_at_path(value, loc)
    if kind == "rule":
        return SpecError(path, str(context["problem"]), str(context["remedy"]))
    if kind == "extra_forbidden":
        return SpecError(path, "unknown field", _suggest_name(str(loc[-1]), _list_known_keys(schema, loc[:-1])))
    if kind == "missing":
        return SpecError(path, "is missing", f"add it: {_build_field_remedy(schema, loc)}")
    if kind in _BOUNDS:
        return SpecError(path, f"{format_value(got)} is out of range", _BOUNDS[kind].format(**context))
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        if isinstance(got, bool) and set(choices) & {"Off", "On"}:
            return SpecError(path, "YAML reads a bare Off as false", 'write it in quotes: "Off"')
        return SpecError(path, f"{format_value(got)} is not allowed", _suggest_name(str(got), choices, "use one of"))
    if kind in _TYPES:
        is_model = kind in ("model_type", "model_attributes_type")
        remedy = _build_mapping_remedy(schema, loc) if is_model else _build_field_remedy(schema, loc)
        return SpecError(path, f"{format_value(got)} is not {_TYPES[kind]}", remedy)
    return SpecError(
        path, f"{format_value(got)}: {error['msg'][0].lower()}{error['msg'][1:]}", _build_field_remedy(schema, loc)
    )


def _suggest_name(word: str, names: Sequence[str], otherwise: str = "known here:") -> str:
    near = get_close_matches(word[:64].lower(), [name.lower() for name in names], n=1, cutoff=0.6)
    if near:
        return f"did you mean {next(name for name in names if name.lower() == near[0])}?"
    listed = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"{otherwise} {listed}"


def _find_field(schema: type[ApiModel], loc: tuple[int | str, ...]) -> tuple[type[ApiModel] | None, FieldInfo | None]:
    """Return the model class in the type of the field at a pydantic error location in `schema`, and the field.

    The class is None if the field does not exist or its type contains no model. The field is None if it does not exist.
    For an empty location, return `schema` and None.
    """
    current: type[ApiModel] | None = schema
    field: FieldInfo | None = None
    for part in loc:
        if current is None or isinstance(part, int):
            continue
        field = next((item for item in current.model_fields.values() if item.alias == part), None)
        current = _find_model_in_type(field.annotation) if field else None
    return current, field


def _find_model_in_type(annotation: Any) -> type[ApiModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        return annotation
    return next((model for item in getattr(annotation, "__args__", ()) if (model := _find_model_in_type(item))), None)


def _list_known_keys(schema: type[ApiModel], loc: tuple[int | str, ...]) -> list[str]:
    model, _ = _find_field(schema, loc)
    return [str(item.alias) for item in model.model_fields.values()] if model else []


def _build_mapping_remedy(schema: type[ApiModel], loc: tuple[int | str, ...]) -> str:
    """Return a remedy that lists the required keys of a mapping, or its first three keys if none is required."""
    model, _ = _find_field(schema, loc)
    fields = list((model or schema).model_fields.values())
    needed = [str(item.alias) for item in fields if item.is_required()]
    keys = " and ".join(needed) or " or ".join(str(item.alias) for item in fields[:3])
    return f"write a mapping with {keys}"


def _build_field_remedy(schema: type[ApiModel], loc: tuple[int | str, ...]) -> str:
    _, field = _find_field(schema, loc)
    text = field.description if field and field.description else "see the field's description"
    return text[0].lower() + text[1:].split(". ")[0].rstrip(".")
