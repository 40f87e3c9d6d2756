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
from tilecast.zoo.reading import type_of


def supported() -> tuple[str, ...]:
    """Return every `model_type` that can be read, and every `_class_name` of diffusers, in alphabetical order."""
    return tuple(sorted(name for name in _tables() if not name.startswith("*")))


def expressions_of(kind: str) -> tuple[str, ...]:
    """Return the expressions that turn a config of a `model_type` into dimensions."""
    return tuple(_tables()[kind]["read"].values())


def defaults(kind: str) -> Mapping[str, Any]:
    """Return the keys that transformers fills in where a config of a type leaves them out, with their values."""
    return _defaults().get(kind, {})


def is_config(document: Mapping[str, Any]) -> bool:
    """Return whether a document is a model's config rather than a Kubernetes object."""
    return "kind" not in document and any(key in document for key in _SIGNS)


_SIGNS = ("model_type", "_class_name", "ssm_cfg", "architectures", "architecture")


def without_labels(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the number of its labels in place of their names, which can be many thousands."""
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
            return _of_timm(config, field)
        kind = _kind(config, field)
        if parts.is_single(_tables()[kind]):
            _check_stated(kind, config, field)
        return _read(kind, config, field, config)
    except SpecError as error:
        known = _presets(config)
        if not known:
            raise
        text = f"{error.remedy}; or use the preset {known[0]}, which has these dimensions"
        raise error.at(error.field, text) from None


def _of_timm(config: Mapping[str, Any], field: str) -> Model:
    """Return the preset that a config of timm names."""
    name = str(config["architecture"])
    if zoo.is_preset(name):
        return zoo.preset(name)
    raise SpecError(
        f"{field}.architecture",
        f"no preset is called {name[:60]!r}",
        "trace it: `tilecast trace timm/NAME -o graph.json`",
    )


def _kind(config: Mapping[str, Any], field: str) -> str:
    """Return the name of the table that reads a config.

    It is that of its `model_type`, that of its class if it states no type, or a general one that fits its keys.

    Raises:
        SpecError: there is none.
    """
    stated = config.get("model_type", config.get("_class_name"))
    if isinstance(stated, str) and (named := _spelled().get(_letters(stated))):
        return named
    if isinstance(layer := config.get("ssm_cfg"), Mapping):
        return "*mamba2" if layer.get("layer") == "Mamba2" else "*mamba"
    if stated is None and (named := _of_class(heads.task(config))):
        return named
    why = _refused().get(str(stated))
    if why is None and (stated is None or isinstance(stated, str)) and (likely := _likely(config)):
        return likely
    problem = "is missing" if stated is None else f"{str(stated)[:40]!r} is not supported"
    problem += f": {why}" if why else ""
    raise SpecError(f"{field}.model_type", problem, "trace the model with `tilecast trace`, or name a preset")


@cache
def _refused() -> Mapping[str, str]:
    """Return why frequently requested types are not read."""
    return shipped.read_table("tilecast.zoo.huggingface", "refused.toml")


def _of_class(name: str) -> str:
    """Return the type whose name a class begins with, the longest such, or an empty string."""
    spelled = _letters(name)
    return max((kind for letters, kind in _spelled().items() if spelled.startswith(letters)), key=len, default="")


@cache
def _spelled() -> Mapping[str, str]:
    """Return every type by the letters and digits of its name alone."""
    return {_letters(kind): kind for kind in supported()}


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _likely(config: Mapping[str, Any]) -> str:
    """Return the general table that fits the keys of a decoder of unknown type, or an empty string."""
    if (named := heads.task(config)) and not named.endswith(("ForCausalLM", "LMHeadModel")):
        return ""
    if config.get("kv_lora_rank"):
        kind = "*latent"
    else:
        kind = "*moe" if reading.value(_tables()["*moe"]["read"]["experts"], config) else "*"
    read = _tables()[kind]["read"]
    stated = all(reading.value(read[name], config) for name in ("layers", "hidden", "heads", "vocab"))
    return kind if stated and (config.get("intermediate_size") or kind == "*") else ""


def _read(kind: str, config: Mapping[str, Any], path: str, whole: Mapping[str, Any]) -> Model:
    """Return the model that a type's table reads from a config, with its towers."""
    table = _tables()[kind]
    if "within" in table:
        key = table["within"]
        part = config.get(key)
        if not isinstance(part, Mapping):
            raise SpecError(f"{path}.{key}", "is missing or no mapping", f"a config of {kind} holds its model there")
        model = _read(table["within_type"], part, f"{path}.{key}", part)
    elif "language" in table:
        model = _language(kind, table, config, path)
    else:
        model = _single(kind, config, path)
    notes = [_sentence(table["assumed"])] if "assumed" in table else []
    if kind in _GENERAL:
        notes.append(
            f"The model_type {config.get('model_type')!s:.40} is not known: it is read by its keys as a decoder."
        )
    if further := reading.count(config.get("num_nextn_predict_layers")):
        notes.append(f"The {further} layers that predict further tokens (num_nextn_predict_layers) are not priced.")
    read = parts.towers(model, table.get("towers", ()), config, path, _read_tower)
    if "crossed" in table:
        read = parts.crossed(read, config, path)
    auto = heads.auto(config, model, table.get("auto"))
    return replace(read, name=_name(whole, kind), notes=(*read.notes, *notes), auto=auto)


def _check_stated(kind: str, config: Mapping[str, Any], path: str) -> None:
    """Raise SpecError if a file states none of the dimensions of its type.

    Such a file does not mean the default of its type.

    Raises:
        SpecError: it is such a file.
    """
    read = _tables()[kind]["read"]
    asked = [name for name in zoo.needs(_tables()[kind]["family"]) if name in read]
    if not any(reading.value(read[name], config) is not None for name in asked):
        raise SpecError(f"{path}.{reading.first_key(read[asked[0]])}", "is missing", f"a config of {kind} states it")


def _language(kind: str, table: Mapping[str, Any], config: Mapping[str, Any], path: str) -> Model:
    """Return the language model among several networks.

    It is read from a key of its own or, if the table says so, from the file itself.
    """
    usual = table["language_type"]
    key = parts.place(table["language"], config)
    if key == ".":
        return _single(usual, config, path)
    part = config.get(key)
    if not isinstance(part, Mapping):
        raise SpecError(f"{path}.{key}", "is missing or no mapping", f"a config of {kind} holds its model there")
    inherited = {name: config[name] for name in _INHERITED if name in config}
    stated = part.get("model_type")
    own = stated if isinstance(stated, str) and parts.is_single(_tables().get(stated)) else usual
    return _read(own, {**inherited, **part}, f"{path}.{key}", part)


_GENERAL = ("*", "*moe", "*latent")
"""Tables for models of unknown types."""
_INHERITED = ("tie_word_embeddings",)


def _read_tower(kind: str, config: Mapping[str, Any], path: str, whole: object) -> Model | None:
    """Return the tower that a part of a config of type `whole` describes.

    It is read by its own type if that is one of a single network, else by the usual one, `kind`. None if its type is
    not known.
    """
    stated = config.get("model_type")
    if isinstance(stated, str) and stated and stated != kind and stated != whole:
        if parts.is_single(_tables().get(stated)):
            kind = stated
        elif stated not in _tables() and _of_class(stated) != kind and not parts.has_same_prefix(stated, kind):
            return None
    return _read(kind, config, path, config)


def _single(kind: str, config: Mapping[str, Any], path: str) -> Model:
    """Return the model of a single network."""
    table = dict(_tables()[kind])
    read, defaults = table.pop("read"), _defaults().get(kind, {})
    scope = reading.Scope(config, defaults)
    for key, known in table.get("accepts", {}).items():
        if (stated := scope.merged.get(key)) not in known:
            problem = "is missing" if stated is None else f"{str(stated)[:40]!r} is not supported"
            raise SpecError(
                f"{path}.{key}", problem, f"{' and '.join(known)} are read; trace others with `tilecast trace`"
            )
    reading.fill(table, read, scope, path)
    if "pattern" in table:
        try:
            table["pattern"] = patterns.PATTERNS[table["pattern"]](scope.merged, table.get("layers", 0))
        except SpecError as error:
            raise error.at(f"{path}.{error.field}") from None
    for name in zoo.needs(table["family"], table.get("pattern", ())):
        if name not in table:
            key = reading.first_key(read[name]) if name in read else name
            raise SpecError(f"{path}.{key}", "is missing", f"a config of {kind} states it")
    described = {key: value for key, value in table.items() if key not in _NOT_DIMENSIONS}
    try:
        head = {name: size for name, size in heads.of(config, table).items() if type_of(table["family"], name)}
        return zoo.model_from({"name": kind, **described, **head})
    except SpecError as error:
        dimension = error.field.removeprefix("model.")
        names = {"kvHeads": "kv_heads", "headDim": "head_dim"}
        expression = read.get(names.get(dimension, dimension))
        raise SpecError(
            f"{path}.{reading.first_key(expression)}" if expression else path, error.problem, error.remedy
        ) from None


_NOT_DIMENSIONS = (
    "assumed", "accepts", "auto", "crossed", "towers", "language", "language_type", "within", "within_type",
)  # fmt: skip


def _name(config: Mapping[str, Any], kind: str) -> str:
    stated = config.get("_name_or_path") or config.get("model_type") or config.get("_class_name") or kind.strip("*")
    return str(stated).rstrip("/").rpartition("/")[2][:63] or kind


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of each type, filled in from the table that it continues."""
    return {name: _filled(name) for name in _raw()}


@cache
def _raw() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of each type as it is written."""
    tables: dict[str, dict[str, Any]] = {}
    for part in shipped.read_tables("tilecast.zoo.huggingface", "types").values():
        tables |= part
    return tables


def _filled(name: str) -> dict[str, Any]:
    own = {key: value for key, value in _raw()[name].items() if key != "like"}
    base = _filled(_raw()[name]["like"]) if "like" in _raw()[name] else {}
    return {**base, **own, "read": {**base.get("read", {}), **own.get("read", {})}}


@cache
def _defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return what transformers fills in where a config leaves a key out, by type.

    A type without an entry takes that of the type that its table continues.
    """
    stated = shipped.read_table("tilecast.zoo.huggingface", "defaults.toml")
    tables = {}
    for name in supported():
        base = name
        while base not in stated and "like" in _raw()[base]:
            base = _raw()[base]["like"]
        tables[name] = stated.get(base, {})
    return tables


def _presets(config: Mapping[str, Any]) -> list[str]:
    """Return the names of presets that a config may describe.

    That is the preset which the config names, or those whose layers, width, heads and words are all among the numbers
    of the config or of its `text_config`. Numbers of other networks within it do not count.
    """
    stated = str(config.get("_name_or_path", "")).rstrip("/")
    if stated and zoo.is_preset(stated):
        return [zoo.preset(stated).name]
    stating = (config, config.get("text_config"))
    numbers = {value for part in stating if isinstance(part, Mapping) for value in part.values() if type(value) is int}
    return sorted(
        {
            known.name
            for known in zoo.presets().values()
            if known.vocab and {known.layers, known.hidden, known.vocab, known.heads} <= numbers
        }
    )
