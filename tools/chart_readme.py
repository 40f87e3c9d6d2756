"""Write the chart's README: values from the comments of values.yaml, and settings from values.schema.json.

    python tools/chart_readme.py               # writes charts/tilecast/README.md

A comment belongs to the key below it. If the schema lists the keys of a mapping, each key is documented; any other
mapping is one value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "charts" / "tilecast"
README = CHART / "README.md"
LONGEST_DEFAULT = 60
"""Most characters of a default in the table; for a longer one it names the file instead."""

_HEAD = """\
# The Tilecast chart

{description}. By default the operator writes to TrainingJobs, GPUPools and Events alone.

```sh
helm install tilecast charts/tilecast --namespace tilecast --create-namespace --set image.repository=REGISTRY/tilecast
helm test tilecast --namespace tilecast
helm show crds charts/tilecast | kubectl apply --server-side --force-conflicts -f -
helm upgrade tilecast charts/tilecast --namespace tilecast --reset-then-reuse-values
helm uninstall tilecast --namespace tilecast
```

`helm install` brings the CRDs; the third line applies new ones before an upgrade
([operations](../../docs/operations.md)). Kubernetes {kubernetes}. `helm test` prints the log of its pod (Helm 3.21).
Do not add `--logs`: it fails. `values.schema.json` refuses other keys and types. `make chart` makes this file.

## Values
"""


def readme() -> str:
    """Return the README as Markdown."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    kubernetes = chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0") + " or later"
    lines = [_HEAD.format(description=chart["description"], kubernetes=kubernetes)]
    lines += ["| key | default | meaning |", "|---|---|---|"]
    for key, default, meaning in rows(text, schema):
        lines.append(f"| `{key}` | {default} | {meaning} |")
    lines += ["", "## Settings", "", "| `settings.` | meaning |", "|---|---|"]
    for name, setting in schema["properties"]["settings"]["properties"].items():
        lines.append(f"| `{name}` | {setting['description']} |")
    return "\n".join(lines) + "\n"


def rows(text: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield key, default and meaning of every value, and of every group that has its own comment.

    Args:
        text: the content of values.yaml.
        schema: the content of values.schema.json.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)  # noqa: S101
    yield from _rows("", root, text.splitlines(), schema)


def _rows(
    path: str, node: yaml.MappingNode, lines: list[str], schema: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        name, meaning = path + key.value, _comment(lines, key.start_mark.line)
        known = schema["properties"][key.value]
        if isinstance(value, yaml.MappingNode) and value.value and "properties" in known:
            if meaning:
                yield name, "", meaning
            yield from _rows(f"{name}.", value, lines, known)
        else:
            yield name, _default(value), meaning


def _comment(lines: list[str], line: int) -> str:
    """Return the comment that ends right above a line."""
    first = line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(text.strip().lstrip("# ") for text in lines[first:line]).replace("|", "\\|")


def _default(node: yaml.Node) -> str:
    value = yaml.SafeLoader("").construct_object(node, deep=True)
    shown = json.dumps(value)
    return f"`{shown}`" if len(shown) <= LONGEST_DEFAULT else "see values.yaml"


if __name__ == "__main__":
    README.write_text(readme(), encoding="utf-8")
