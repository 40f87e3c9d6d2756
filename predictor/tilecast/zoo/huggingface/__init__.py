"""Read models from the `config.json` of the Hugging Face Hub.

The configs are those of transformers, of diffusers, of timm, and of the authors of Mamba. The tables in `types/` say
which key of a config has which dimension. All other keys are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from tilecast import shipped, zoo
from tilecast.model import Model
from tilecast.spec import SpecError
from tilecast.zoo.huggingface import heads, parts, patterns, reading, remarks
from tilecast.zoo.huggingface.expressions import find_first_key
from tilecast.zoo.reading import find_dimension_type, list_required_dimensions


def list_supported_types() -> tuple[str, ...]:
    """Return, sorted, every `model_type` of transformers and `_class_name` of diffusers that can be read."""
    return tuple(sorted(name for name in _complete_type_tables() if not name.startswith("*")))


def list_expressions(kind: str) -> tuple[str, ...]:
    """Return the expressions that compute a model's dimensions from a config of this type."""
    return tuple(_complete_type_tables()[kind]["read"].values())


def find_defaults(kind: str) -> Mapping[str, Any]:
    """Return the default values of config keys in transformers, for configs of this type.

    A type without an entry in `defaults.toml` has the defaults of the type that it extends (`like`).
    """
    if kind not in _read_defaults() and "like" in _read_type_tables()[kind]:
        return find_defaults(_read_type_tables()[kind]["like"])
    return _read_defaults().get(kind, {})


@cache
def _read_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return the content of `defaults.toml`: default values by type and key."""
    return shipped.read_table("tilecast.zoo.huggingface", "defaults.toml")


def is_config(document: Mapping[str, Any]) -> bool:
    """Return whether a document is a model's `config.json` rather than a Kubernetes object."""
    signs = ("model_type", "_class_name", "ssm_cfg", "architectures", "architecture")
    return "kind" not in document and any(key in document for key in signs)


def remove_label_tables(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with its tables of label names replaced by the number of labels."""
    labels = config.get("id2label")
    items = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
    return {"num_labels": len(labels), **items} if isinstance(labels, Mapping) else items


def model(config: Mapping[str, Any], field: str = "config.json") -> Model:
    """Return the model that a config describes, with the head that its `architectures` names.

    Args:
        config: content of the config file.
        field: name of the file in errors.

    Raises:
        SpecError: the type is not supported, or a key is missing or has an impossible value. The error suggests a
            preset if one differs from the config in at most one dimension.
    """
    try:
        if "architecture" in config and "model_type" not in config:
            return _read_timm(config, field)
        kind = _find_type_table(config, field)
        if parts.is_single_network(_complete_type_tables()[kind]):
            _require_set_dimension(kind, config, field)
        return _read_model(kind, config, field, config)
    except SpecError as error:
        if not (preset := _suggest_preset(config)):
            raise
        raise error.at(error.field, f"{error.remedy}; or use {preset}") from None


def _read_timm(config: Mapping[str, Any], field: str) -> Model:
    """Return the preset that a config of timm names.

    Raises:
        SpecError: no preset has the name.
    """
    name = str(config["architecture"])
    if zoo.is_preset(name):
        return zoo.find_preset(name)
    problem = f"no preset is called {name[:60]!r}"
    raise SpecError(f"{field}.architecture", problem, "trace it: `tilecast trace timm/NAME -o graph.json`")


def _find_type_table(config: Mapping[str, Any], field: str) -> str:
    """Return the name of the table by which to read a config.

    The table is found by `model_type`. Without one, it is found by the config's class. For a decoder of unknown type,
    it is the general table that fits the config's keys.

    Raises:
        SpecError: no table fits.
    """
    stated = config.get("model_type", config.get("_class_name"))
    if isinstance(stated, str) and (named := _map_letters_to_types().get(_keep_letters(stated))):
        return named
    if isinstance(layer := config.get("ssm_cfg"), Mapping):
        return "*mamba2" if layer.get("layer") == "Mamba2" else "*mamba"
    if stated is None and (named := _find_type_of_class(heads.first_architecture(config))):
        return named
    why = _read_refusal_reasons().get(str(stated))
    if why is None and (stated is None or isinstance(stated, str)) and (likely := _guess_table(config)):
        return likely
    problem = "is missing" if stated is None else f"{str(stated)[:40]!r} is not supported"
    problem += f": {why}" if why else ""
    raise SpecError(f"{field}.model_type", problem, "trace the model with `tilecast trace`, or name a preset")


@cache
def _read_refusal_reasons() -> Mapping[str, str]:
    """Return, by type, why some frequently requested types cannot be read."""
    return shipped.read_table("tilecast.zoo.huggingface", "refused.toml")


def _find_type_of_class(name: str) -> str:
    """Return the longest model type with which the name of a transformers class begins, or an empty string."""
    spelled = _keep_letters(name)
    begun = (kind for letters, kind in _map_letters_to_types().items() if spelled.startswith(letters))
    return max(begun, key=len, default="")


@cache
def _map_letters_to_types() -> Mapping[str, str]:
    """Return every supported type, keyed by the letters and digits of its name."""
    return {_keep_letters(kind): kind for kind in list_supported_types()}


def _keep_letters(name: str) -> str:
    """Return the letters and digits of a name in lower case."""
    return "".join(character for character in name.lower() if character.isalnum())


def _guess_table(config: Mapping[str, Any]) -> str:
    """Return the general table that fits a decoder of unknown type, or an empty string if none fits."""
    if (named := heads.first_architecture(config)) and not named.endswith(("ForCausalLM", "LMHeadModel")):
        return ""
    if config.get("kv_lora_rank"):
        kind = "*latent"
    else:
        kind = "*moe" if reading.evaluate_or_none(_complete_type_tables()["*moe"]["read"]["experts"], config) else "*"
    read = _complete_type_tables()[kind]["read"]
    stated = all(reading.evaluate_or_none(read[name], config) for name in ("layers", "hidden", "heads", "vocab"))
    return kind if stated and (config.get("intermediate_size") or kind == "*") else ""


def _read_model(kind: str, config: Mapping[str, Any], path: str, outer_config: Mapping[str, Any]) -> Model:
    """Return the model, with its towers, that a config of type `kind` describes.

    `path` is the config's place in error messages. The model is named after `outer_config`.
    """
    table = _complete_type_tables()[kind]
    if "within" in table:
        part, place = _find_part(kind, config, table["within"], path)
        model = _read_model(table["within_type"], part, place, part)
    elif "language" in table:
        model = _read_language_model(kind, table, config, path)
    else:
        model = _read_dimensions(kind, config, path)
    notes = []
    if text := table.get("assumed"):
        notes.append(f"{text[0].upper()}{text[1:]}.")
    if kind in _GENERAL:
        stated = config.get("model_type")
        notes.append(f"The model_type {stated!s:.40} is not known: it is read by its keys as a decoder.")
    read = parts.add_towers(model, table.get("towers", ()), config, path, _read_tower)
    if "crossed" in table:
        read = parts.join_encoder_decoder(read, config, path)
    auto = heads.choose_auto_class(config, model, table.get("auto"))
    return replace(read, name=_name_model(outer_config, kind), notes=(*read.notes, *notes), auto=auto)


def _require_set_dimension(kind: str, config: Mapping[str, Any], path: str) -> None:
    """Raise SpecError unless the config sets a required dimension of its type. Defaults alone describe no model."""
    table = _complete_type_tables()[kind]
    read = table["read"]
    asked = [name for name in list_required_dimensions(table["family"]) if name in read]
    if not any(reading.evaluate_or_none(read[name], config) is not None for name in asked):
        raise SpecError(f"{path}.{find_first_key(read[asked[0]])}", "is missing", f"a config of {kind} states it")


def _read_language_model(kind: str, table: Mapping[str, Any], config: Mapping[str, Any], path: str) -> Model:
    """Return the language model of a config that describes several networks.

    Its dimensions are in a nested config, or in the config itself if the table gives the key ".".
    """
    usual = table["language_type"]
    key = parts.find_part_key(table["language"], config)
    if key == ".":
        return _read_dimensions(usual, config, path)
    part, place = _find_part(kind, config, key, path)
    inherited = {name: config[name] for name in _INHERITED if name in config}
    stated = part.get("model_type")
    own = stated if isinstance(stated, str) and parts.is_single_network(_complete_type_tables().get(stated)) else usual
    return _read_model(own, {**inherited, **part}, place, part)


def _find_part(kind: str, config: Mapping[str, Any], key: str, path: str) -> tuple[Mapping[str, Any], str]:
    """Return the nested config under a key, and its path in error messages.

    Raises:
        SpecError: the value of the key is not a mapping.
    """
    place, part = f"{path}.{key}", config.get(key)
    if not isinstance(part, Mapping):
        raise SpecError(place, "is missing or no mapping", f"a config of {kind} holds its model there")
    return part, place


_GENERAL = ("*", "*moe", "*latent")
"""Tables for models of unknown types."""
_INHERITED = ("tie_word_embeddings",)


def _read_tower(kind: str, config: Mapping[str, Any], path: str, outer_type: object) -> Model | None:
    """Return the tower that a nested config describes, or None if its type is unknown.

    The nested config is read as its `model_type` if that is a single network, and otherwise as the usual type `kind`.
    `outer_type` is the `model_type` of the outer config.
    """
    stated = config.get("model_type")
    if isinstance(stated, str) and stated and stated != kind and stated != outer_type:
        if parts.is_single_network(_complete_type_tables().get(stated)):
            kind = stated
        elif (
            stated not in _complete_type_tables()
            and _find_type_of_class(stated) != kind
            and not parts.has_same_prefix(stated, kind)
        ):
            return None
    return _read_model(kind, config, path, config)


def _read_dimensions(kind: str, config: Mapping[str, Any], path: str) -> Model:
    """Return the model that a config of a single network describes.

    Raises:
        SpecError: a key is missing or has an impossible value.
    """
    table = dict(_complete_type_tables()[kind])
    read, usual = table.pop("read"), {} if kind.startswith("*") else find_defaults(kind)
    whole = {**usual, **config}
    for key, known in table.get("accepts", {}).items():
        if (stated := whole.get(key)) not in known:
            problem = "is missing" if stated is None else f"{str(stated)[:40]!r} is not supported"
            remedy = f"{' and '.join(known)} are read; trace others with `tilecast trace`"
            raise SpecError(f"{path}.{key}", problem, remedy)
    reading.fill_dimensions(table, read, config, usual, path)
    if "pattern" in table:
        try:
            table["pattern"] = patterns.PATTERNS[table["pattern"]](whole, table.get("layers", 0))
        except SpecError as error:
            raise error.at(f"{path}.{error.field}") from None
    for name in list_required_dimensions(table["family"], table.get("pattern", ())):
        if name not in table:
            key = find_first_key(read[name]) if name in read else name
            raise SpecError(f"{path}.{key}", "is missing", f"a config of {kind} states it")
    described = {key: value for key, value in table.items() if key not in _NOT_DIMENSIONS}
    try:
        sizes = heads.read_head(config, table).items()
        head = {name: size for name, size in sizes if find_dimension_type(table["family"], name)}
        built = zoo.build_model({"name": kind, **described, **head})
    except SpecError as error:
        dimension = error.field.removeprefix("model.")
        names = {"kvHeads": "kv_heads", "headDim": "head_dim"}
        expression = read.get(names.get(dimension, dimension))
        place = f"{path}.{find_first_key(expression)}" if expression else path
        raise SpecError(place, error.problem, error.remedy) from None
    inner = path.partition(".json.")[2]
    notes = [
        *remarks.describe_defaults(built, read, config, usual, inner),
        *remarks.describe_unread_keys(_complete_type_tables()[kind], config),
    ]
    if kind in _GENERAL and "ffn_hidden" not in table:
        notes.append(f"The config states no width of the MLP: {built.ffn_hidden} is assumed.")
    return replace(built, notes=tuple(notes))


_NOT_DIMENSIONS = (
    "assumed", "accepts", "auto", "crossed", "towers", "language", "language_type", "within", "within_type",
)  # fmt: skip


def _name_model(config: Mapping[str, Any], kind: str) -> str:
    """Return the name of the model: its path on the Hub, or its type."""
    stated = config.get("_name_or_path") or config.get("model_type") or config.get("_class_name") or kind.strip("*")
    return str(stated).rstrip("/").rpartition("/")[2][:63] or kind


def _suggest_preset(config: Mapping[str, Any]) -> str:
    """Return a phrase that names a preset similar to a config, or an empty text.

    The comparison uses the dimensions of the config, or of its `text_config`. These dimensions are read by the table of
    the config's type, or by the table of decoders in general.
    """
    inner = config.get("text_config")
    part = inner if isinstance(inner, Mapping) else config
    stated = part.get("model_type")
    kind = _map_letters_to_types().get(_keep_letters(stated), "*") if isinstance(stated, str) else "*"
    table = _complete_type_tables()[kind]
    return remarks.suggest_preset(
        table["read"] or _complete_type_tables()["*"]["read"], {**part, **_select_name_or_path(config)}
    )


def _select_name_or_path(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with only the `_name_or_path` of a config, or an empty mapping if the config has none."""
    return {"_name_or_path": config["_name_or_path"]} if "_name_or_path" in config else {}


@cache
def _complete_type_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of each Hugging Face model type.

    A table with `like` inherits the entries of the type that `like` names.
    """
    return {name: _fill_table(name) for name in _read_type_tables()}


@cache
def _read_type_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of each type as it is in the TOML files."""
    files = shipped.read_tables("tilecast.zoo.huggingface", "types").values()
    return {name: table for tables in files for name, table in tables.items()}


def _fill_table(name: str) -> dict[str, Any]:
    """Return the table of a type, completed from the types that it extends."""
    own = dict(_read_type_tables()[name])
    base = _fill_table(own.pop("like")) if "like" in own else {}
    return {**base, **own, "read": {**base.get("read", {}), **own.get("read", {})}}
