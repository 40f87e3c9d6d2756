"""Pages of the documentation that are made when it is built.

They are the reference of the API objects, from crds/, and the list of models of Hugging Face, from the tables of
their types. Their files in docs/ are for readers of the repository, whom they tell where the lists come from.

mkdocs calls `on_files`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
CRDS = ("trainingjobs", "gpupools", "poollearnings", "queueadvices")
TYPES = ROOT / "predictor" / "tilecast" / "zoo" / "huggingface" / "types"
GROUPS = {
    "decoders": "Decoders, dense and with experts",
    "hybrids": "State-space models and hybrids",
    "encoders": "Encoders",
    "pairs": "Encoder-decoders",
    "images": "Images and sound, and the towers of others",
    "several": "Several networks",
    "diffusers": "diffusers, by `_class_name`",
}
"""Title of each table of types."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace two pages of docs/ by generated ones."""
    for name, content in (("reference.md", reference()), ("model-types.md", model_types())):
        if (written := files.get_file_from_path(name)) is not None:
            files.remove(written)
        files.append(File.generated(config, name, content=content))
    return files


def model_types() -> str:
    """Return the list of every `model_type` and `_class_name` that can be read, as Markdown."""
    lines = ["# Every model_type", "", "[Models](models.md) says how a `config.json` of these types is read.", ""]
    for name, title in GROUPS.items():
        table = tomllib.loads((TYPES / f"{name}.toml").read_text(encoding="utf-8"))
        names = sorted((kind for kind in table if not kind.startswith("*")), key=str.lower)
        lines += [f"## {title}", "", ", ".join(f"`{kind}`" for kind in names), ""]
    return "\n".join(lines)


def reference() -> str:
    """Return the reference of the API objects as Markdown."""
    lines = [
        "# API reference",
        "",
        "Made from the CustomResourceDefinitions ; `kubectl explain` shows the same.",
        "",
    ]
    for name in CRDS:
        lines += _crd(yaml.safe_load((ROOT / "crds" / f"{name}.yaml").read_text(encoding="utf-8")))
    return "\n".join(lines)


def _crd(document: Mapping[str, Any]) -> Iterator[str]:
    spec = document["spec"]
    names, (version,) = spec["names"], spec["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    short = ", ".join(f"`{name}`" for name in names.get("shortNames", []))
    yield f"## {names['kind']}"
    yield ""
    yield f"`{spec['group']}/{version['name']}`, {spec['scope'].lower()}, short name {short}. {schema['description']}"
    yield ""
    yield "| column | shows |"
    yield "|---|---|"
    for column in version.get("additionalPrinterColumns", []):
        wide = " (`-o wide`)" if column.get("priority") else ""
        yield f"| {column['name']}{wide} | {_cell(column.get('description') or '`' + column['jsonPath'] + '`')} |"
    yield ""
    for part in ("spec", "status"):
        if part not in schema["properties"]:
            continue
        yield from _object(f"{names['kind']}.{part}", schema["properties"][part])


def _object(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of an object's fields, then those of the objects in it."""
    yield f"### {path}"
    yield ""
    if schema.get("description"):
        yield schema["description"]
        yield ""
    yield "| field | type | meaning |"
    yield "|---|---|---|"
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        mark = " (required)" if name in required else ""
        yield f"| `{name}`{mark} | {_type(field)} | {_cell(_meaning(field))} |"
    yield ""
    for rule in schema.get("x-kubernetes-validations", []):
        yield f"- refused: {rule['message']}"
    if schema.get("x-kubernetes-validations"):
        yield ""
    for name, field in schema["properties"].items():
        inner = field.get("items", field)
        if inner.get("properties"):
            yield from _object(f"{path}.{name}" + ("[]" if "items" in field else ""), inner)


def _type(field: Mapping[str, Any]) -> str:
    if "items" in field:
        return f"list of {_type(field['items'])}"
    if isinstance(field.get("additionalProperties"), Mapping):
        return f"map of {_type(field['additionalProperties'])}"
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    return str(field.get("format") or field.get("type", "any"))


def _meaning(field: Mapping[str, Any]) -> str:
    parts = [field.get("description", "")]
    if "enum" in field:
        parts.append("One of " + ", ".join(f"`{value}`" for value in field["enum"]) + ".")
    least, most = field.get("minimum"), field.get("maximum")
    if least is not None and most is not None:
        above = "above " if field.get("exclusiveMinimum") else ""
        parts.append(f"From {above}{least:g} to {most:g}.")
    if "default" in field:
        value = str(field["default"]).lower() if isinstance(field["default"], bool) else field["default"]
        parts.append(f"Default `{value}`.")
    return " ".join(part for part in parts if part)


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")
