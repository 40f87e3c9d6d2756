"""Objects stored under earlier releases stay valid: today's CRDs are compared with every chart in tests/releases."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tilecast import __version__

ROOT = Path(__file__).resolve().parent.parent
RELEASES = sorted((ROOT / "tests" / "releases").glob("*.tgz"))
LOWER = ("minimum", "minLength", "minItems", "minProperties")
UPPER = ("maximum", "maxLength", "maxItems", "maxProperties")

Schema = Mapping[str, Any]


def crds_of(chart: Path) -> dict[str, Schema]:
    """Return the CRDs in a packed chart by name.

    They are in `crds/`, or before 0.2.0 in `files/crds` as templates.
    """
    with tarfile.open(chart) as packed:
        texts = [packed.extractfile(name) for name in packed.getnames() if "/crds/" in name and name.endswith(".yaml")]
        documents = [yaml.safe_load(text) for text in texts if text]
    return {document["metadata"]["name"]: document for document in documents}


def crds_of_today() -> dict[str, Schema]:
    documents = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    return {document["metadata"]["name"]: document for document in documents}


def narrowed(old: Schema, new: Schema, path: str) -> Iterator[str]:
    """Yield each place where `new` refuses or prunes what `old` let a user store."""
    if old.get("type") != new.get("type"):
        yield f"{path}: {old.get('type')} became {new.get('type')}"
    if gone := set(old.get("enum", new.get("enum", ()))) - set(new.get("enum", old.get("enum", ()))):
        yield f"{path}: {sorted(gone)} are refused"
    if "enum" in new and "enum" not in old:
        yield f"{path}: an enum came"
    if missing := set(new.get("required", ())) - set(old.get("required", ())):
        yield f"{path}: {sorted(missing)} became required"
    for bound, sign in (*((name, 1) for name in LOWER), *((name, -1) for name in UPPER)):
        # A pattern may replace an enum whose values are all within the new bound.
        longest = max(map(len, map(str, old.get("enum", ()))), default=None) if bound == "maxLength" else None
        if longest is not None and bound not in old and longest <= new.get(bound, longest):
            continue
        if bound in new and (bound not in old or sign * new[bound] > sign * old[bound]):
            yield f"{path}: {bound} went from {old.get(bound)} to {new[bound]}"
    for name, child in old.get("properties", {}).items():
        if name in new.get("properties", {}):
            yield from narrowed(child, new["properties"][name], f"{path}.{name}")
        elif not new.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}.{name} is pruned"
    for key in ("items", "additionalProperties"):
        if isinstance(old.get(key), Mapping):
            yield from narrowed(old[key], new.get(key, {}), f"{path}[]")


def specs(crds: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return the schema of each kind's only version, by the CRD's name."""
    return {name: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for name, crd in crds.items()}


def test_crds_of_the_chart_are_those_of_the_repository() -> None:
    for path in (ROOT / "crds").glob("*.yaml"):
        assert (ROOT / "charts" / "tilecast" / "crds" / path.name).read_text() == path.read_text(), "run `make crds`"


def test_one_version_names_package_chart_and_crds() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "tilecast" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    for crd in crds_of_today().values():
        assert crd["metadata"]["annotations"] == {"tilecast.dev/release": __version__}
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("chart", RELEASES, ids=lambda chart: chart.stem)
@pytest.mark.slow
def test_the_schema_only_grows(chart: Path) -> None:
    today = specs(crds_of_today())
    before = specs(crds_of(chart))
    assert before.keys() <= today.keys()
    losses = [loss for name, old in before.items() for loss in narrowed(old, today[name], name)]
    assert not losses


def test_a_narrower_schema_is_noticed() -> None:
    fields = {"a": {"type": "integer", "minimum": 0}, "b": {"type": "string", "enum": ["x", "y"]}}
    old = {"type": "object", "properties": fields}
    new = {"type": "object", "required": ["b"], "properties": {"b": {"type": "string", "enum": ["x"], "maxLength": 0}}}
    assert list(narrowed(old, new, "spec")) == [
        "spec: ['b'] became required",
        "spec.a is pruned",
        "spec.b: ['y'] are refused",
        "spec.b: maxLength went from None to 0",
    ]
