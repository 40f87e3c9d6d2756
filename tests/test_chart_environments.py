"""The chart in clusters that are stricter, shared, or reached through a proxy."""

from __future__ import annotations

import re

import pytest

from conftest import Helm
from test_chart import CHART, ROOT, of_kind, rendered

pytestmark = pytest.mark.cluster


def test_helm_prints_the_log_of_its_test_and_nobody_is_told_to_ask_for_it(helm: Helm) -> None:
    (pod,) = of_kind(rendered(helm), "Pod")
    annotations = pod["metadata"]["annotations"]
    assert annotations["helm.sh/hook-output-log-policy"] == "hook-succeeded,hook-failed"
    # Helm deletes the pod before `--logs` reads it, and `--logs` names no container.
    pages = [ROOT / "README.md", CHART / "README.md", CHART / "templates" / "NOTES.txt", *(ROOT / "docs").glob("*.md")]
    assert not [page for page in pages if re.search("helm test .*--logs", page.read_text())]
