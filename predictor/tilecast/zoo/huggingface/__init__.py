"""Models from the `config.json` of the Hugging Face Hub.

Configs of transformers, of diffusers, of timm, and of the authors of Mamba can be read. The tables in `types/` say
which key holds which dimension; nothing else of the file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from tilecast import shipped, zoo
from tilecast.model import Model
from tilecast.spec import SpecError
from tilecast.zoo.huggingface import heads, parts, patterns, reading
from tilecast.zoo.huggingface.expressions import first_key
from tilecast.zoo.reading import dimension_type, required_dimensions


def supported_types() -> tuple[str, ...]:
    """Return every `model_type` of transformers and `_class_name` of diffusers that can be read, sorted."""
    return tuple(sorted(name for name in _type_tables() if not name.startswith("*")))


def expressions_of(kind: str) -> tuple[str, ...]:
    """Return the expressions that turn a config of a `model_type` into dimensions."""
    return tuple(_type_tables()[kind]["read"].values())


def defaults(kind: str) -> Mapping[str, Any]:
    """Return the values that transformers fills in where a config of this type lacks keys, by key.

    A type without an entry takes that of the type that its table continues.
    """
    if kind not in _written_defaults() and "like" in _written_tables()[kind]:
        return defaults(_written_tables()[kind]["like"])
    return _written_defaults().get(kind, {})


@cache
def _written_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return the file of defaults, by type."""
    return shipped.read_table("tilecast.zoo.huggingface", "defaults.toml")


def is_config(document: Mapping[str, Any]) -> bool:
    """Return whether a document is a model's config rather than a Kubernetes object."""
    signs = ("model_type", "_class_name", "ssm_cfg", "architectures", "architecture")
    return "kind" not in document and any(key in document for key in signs)


def without_labels(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the number of labels in place of the tables of their names, which can be long."""
    labels = config.get("id2label")
    items = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
    return {"num_labels": len(labels), **items} if isinstance(labels, Mapping) else items


def model(config: Mapping[str, Any], field: str = "config.json") -> Model:
    """Return the model that a config describes, with the head that its `architectures` names.

    Args:
        config: the file's content.
        field: name of the file in errors.

    Raises:
        SpecError: the type is not supported, or a key is missing or impossible; if a preset has the config's
            dimensions, the error names it.
    """
    try:
        if "architecture" in config and "model_type" not in config:
            return _read_timm(config, field)
        kind = _find_type_table(config, field)
        if parts.is_single_network(_type_tables()[kind]):
            _check_stated(kind, config, field)
        return _read_model(kind, config, field, config)
    except SpecError as error:
        known = _similar_presets(config)
        if not known:
            raise
        text = f"{error.remedy}; or use the preset {known[0]}, which has these dimensions"
        raise error.at(error.field, text) from None


def _read_timm(config: Mapping[str, Any], field: str) -> Model:
    """Return the preset that a config of timm names."""
    name = str(config["architecture"])
    if zoo.is_preset(name):
        return zoo.preset(name)
    problem = f"no preset is called {name[:60]!r}"
    raise SpecError(f"{field}.architecture", problem, "trace it: `tilecast trace timm/NAME -o graph.json`")


def _find_type_table(config: Mapping[str, Any], field: str) -> str:
    """Return the name of the table that reads a config.

    It is the table of its `model_type`, of its class if it states no type, or a general one that fits its keys.

    Raises:
        SpecError: there is none.
    """
    stated = config.get("model_type", config.get("_class_name"))
    if isinstance(stated, str) and (named := _types_by_letters().get(_keep_letters(stated))):
        return named
    if isinstance(layer := config.get("ssm_cfg"), Mapping):
        return "*mamba2" if layer.get("layer") == "Mamba2" else "*mamba"
    if stated is None and (named := _match_class(heads.first_architecture(config))):
        return named
    why = _refusal_reasons().get(str(stated))
    if why is None and (stated is None or isinstance(stated, str)) and (likely := _guess_table(config)):
        return likely
    problem = "is missing" if stated is None else f"{str(stated)[:40]!r} is not supported"
    problem += f": {why}" if why else ""
    raise SpecError(f"{field}.model_type", problem, "trace the model with `tilecast trace`, or name a preset")


@cache
def _refusal_reasons() -> Mapping[str, str]:
    """Return the reasons why frequently requested types are not read, by type."""
    return shipped.read_table("tilecast.zoo.huggingface", "refused.toml")


def _match_class(name: str) -> str:
    """Return the longest type whose name a class of transformers begins with, or an empty string."""
    spelled = _keep_letters(name)
    begun = (kind for letters, kind in _types_by_letters().items() if spelled.startswith(letters))
    return max(begun, key=len, default="")


@cache
def _types_by_letters() -> Mapping[str, str]:
    """Return every type by the letters and digits of its name."""
    return {_keep_letters(kind): kind for kind in supported_types()}


def _keep_letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _guess_table(config: Mapping[str, Any]) -> str:
    """Return the general table that fits the keys of a decoder of unknown type, or an empty string."""
    if (named := heads.first_architecture(config)) and not named.endswith(("ForCausalLM", "LMHeadModel")):
        return ""
    if config.get("kv_lora_rank"):
        kind = "*latent"
    else:
        kind = "*moe" if reading.evaluate_or_none(_type_tables()["*moe"]["read"]["experts"], config) else "*"
    read = _type_tables()[kind]["read"]
    stated = all(reading.evaluate_or_none(read[name], config) for name in ("layers", "hidden", "heads", "vocab"))
    return kind if stated and (config.get("intermediate_size") or kind == "*") else ""


def _read_model(kind: str, config: Mapping[str, Any], path: str, whole: Mapping[str, Any]) -> Model:
    """Return the model that a type's table reads from a config, with its towers.

    `path` is the place of the config in errors. The model has the name that `whole` states.
    """
    table = _type_tables()[kind]
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
    further = config.get("num_nextn_predict_layers")
    if isinstance(further, int) and not isinstance(further, bool) and further > 0:
        notes.append(f"The {further} layers that predict further tokens (num_nextn_predict_layers) are not priced.")
    read = parts.add_towers(model, table.get("towers", ()), config, path, _read_tower)
    if "crossed" in table:
        read = parts.join_encoder_decoder(read, config, path)
    auto = heads.choose_auto_class(config, model, table.get("auto"))
    return replace(read, name=_name_model(whole, kind), notes=(*read.notes, *notes), auto=auto)


def _check_stated(kind: str, config: Mapping[str, Any], path: str) -> None:
    """Raise SpecError unless a file states a dimension that its type needs; defaults alone describe no model."""
    table = _type_tables()[kind]
    read = table["read"]
    asked = [name for name in required_dimensions(table["family"]) if name in read]
    if not any(reading.evaluate_or_none(read[name], config) is not None for name in asked):
        raise SpecError(f"{path}.{first_key(read[asked[0]])}", "is missing", f"a config of {kind} states it")


def _read_language_model(kind: str, table: Mapping[str, Any], config: Mapping[str, Any], path: str) -> Model:
    """Return the language model among several networks.

    The config has it under a key or, if the table says so, is that of the language model itself.
    """
    usual = table["language_type"]
    key = parts.find_part_key(table["language"], config)
    if key == ".":
        return _read_dimensions(usual, config, path)
    part, place = _find_part(kind, config, key, path)
    inherited = {name: config[name] for name in _INHERITED if name in config}
    stated = part.get("model_type")
    own = stated if isinstance(stated, str) and parts.is_single_network(_type_tables().get(stated)) else usual
    return _read_model(own, {**inherited, **part}, place, part)


def _find_part(kind: str, config: Mapping[str, Any], key: str, path: str) -> tuple[Mapping[str, Any], str]:
    """Return the part of a config under a key, and its place in errors.

    Raises:
        SpecError: there is no mapping under the key.
    """
    place, part = f"{path}.{key}", config.get(key)
    if not isinstance(part, Mapping):
        raise SpecError(place, "is missing or no mapping", f"a config of {kind} holds its model there")
    return part, place


_GENERAL = ("*", "*moe", "*latent")
"""Tables for models of unknown types."""
_INHERITED = ("tie_word_embeddings",)


def _read_tower(kind: str, config: Mapping[str, Any], path: str, whole: object) -> Model | None:
    """Return the tower that a part of a config of type `whole` describes, or None if the type of the part is unknown.

    It is read by the type that the part states if that is a single network, else by the usual type, `kind`.
    """
    stated = config.get("model_type")
    if isinstance(stated, str) and stated and stated != kind and stated != whole:
        if parts.is_single_network(_type_tables().get(stated)):
            kind = stated
        elif stated not in _type_tables() and _match_class(stated) != kind and not parts.has_same_prefix(stated, kind):
            return None
    return _read_model(kind, config, path, config)


def _read_dimensions(kind: str, config: Mapping[str, Any], path: str) -> Model:
    """Return the model of a single network.

    Raises:
        SpecError: a key is missing or impossible.
    """
    table = dict(_type_tables()[kind])
    read, usual = table.pop("read"), {} if kind.startswith("*") else defaults(kind)
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
    for name in required_dimensions(table["family"], table.get("pattern", ())):
        if name not in table:
            key = first_key(read[name]) if name in read else name
            raise SpecError(f"{path}.{key}", "is missing", f"a config of {kind} states it")
    described = {key: value for key, value in table.items() if key not in _NOT_DIMENSIONS}
    try:
        sizes = heads.read_head(config, table).items()
        head = {name: size for name, size in sizes if dimension_type(table["family"], name)}
        return zoo.model_from({"name": kind, **described, **head})
    except SpecError as error:
        dimension = error.field.removeprefix("model.")
        names = {"kvHeads": "kv_heads", "headDim": "head_dim"}
        expression = read.get(names.get(dimension, dimension))
        place = f"{path}.{first_key(expression)}" if expression else path
        raise SpecError(place, error.problem, error.remedy) from None


_NOT_DIMENSIONS = (
    "assumed", "accepts", "auto", "crossed", "towers", "language", "language_type", "within", "within_type",
)  # fmt: skip


def _name_model(config: Mapping[str, Any], kind: str) -> str:
    stated = config.get("_name_or_path") or config.get("model_type") or config.get("_class_name") or kind.strip("*")
    return str(stated).rstrip("/").rpartition("/")[2][:63] or kind


@cache
def _type_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of each type, filled in from the table that it continues."""
    return {name: _fill_table(name) for name in _written_tables()}


@cache
def _written_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of each type as it is written."""
    files = shipped.read_tables("tilecast.zoo.huggingface", "types").values()
    return {name: table for tables in files for name, table in tables.items()}


def _fill_table(name: str) -> dict[str, Any]:
    own = dict(_written_tables()[name])
    base = _fill_table(own.pop("like")) if "like" in own else {}
    return {**base, **own, "read": {**base.get("read", {}), **own.get("read", {})}}


def _similar_presets(config: Mapping[str, Any]) -> list[str]:
    """Return the names of presets that a config may describe.

    These are the preset that the config names, or the presets whose layers, width, heads and words are all among the
    numbers of the config or of its `text_config`. Numbers of other networks within it do not count.
    """
    stated = str(config.get("_name_or_path", "")).rstrip("/")
    if stated and zoo.is_preset(stated):
        return [zoo.preset(stated).name]
    stating = (config, config.get("text_config"))
    numbers = {value for part in stating if isinstance(part, Mapping) for value in part.values() if type(value) is int}
    known = (one for one in zoo.presets().values() if one.vocab)
    return sorted({one.name for one in known if {one.layers, one.hidden, one.vocab, one.heads} <= numbers})
