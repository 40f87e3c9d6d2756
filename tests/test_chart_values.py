"""Descriptions and checks of the chart's values, without helm."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import chart_readme  # noqa: E402

CHART = chart_readme.CHART
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
LEFT_TO_KUBERNETES = {
    "affinity", "tolerations[]", "networkPolicy.from[]", "web.from[]", "serviceMonitor.tlsConfig", "global",
    "podSecurityContext", "securityContext", "extraEnv[]", "extraEnvFrom[]", "extraVolumes[]", "extraVolumeMounts[]",
}  # fmt: skip
"""Values that the schema leaves open: a parent chart's, and objects of Kubernetes, which the API server checks."""


def test_the_readme_is_that_of_its_generator() -> None:
    assert chart_readme.README.read_text() == chart_readme.readme(), "run `make chart`"


def test_every_value_is_explained() -> None:
    rows = list(chart_readme.rows((CHART / "values.yaml").read_text(), SCHEMA))
    assert not [key for key, _, meaning in rows if not meaning]
    assert ("discovery.enabled", "`true`") in [(key, default) for key, default, _ in rows]


def test_the_schema_knows_every_value_and_is_open_nowhere() -> None:
    def objects(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] | schema
        if "object" in schema.get("type", ""):
            yield path, schema
        for key, inner in schema.get("properties", {}).items():
            yield from objects(f"{path}.{key}" if path else key, inner)
        if "items" in schema:
            yield from objects(f"{path}[]", schema["items"])

    tables = dict(objects("", SCHEMA))
    assert {path for path, schema in tables.items() if schema.get("additionalProperties") is None} == LEFT_TO_KUBERNETES
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    read = {key for key, schema in SCHEMA["properties"].items() if not schema.get("deprecated")}
    assert read == set(values) | {"global"}
    for key, value in values.items():
        known = tables.get(key, {}).get("properties")
        if known and key != "settings":
            assert set(known) == set(value), key
