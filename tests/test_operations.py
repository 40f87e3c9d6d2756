"""docs/operations.md names every condition, reason and setting of the operator."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from tilecast_operator.settings import Settings, name_variable

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
OPERATOR = ROOT / "operator" / "tilecast_operator"
NAMES = (
    "outcome advisor controllers/capacity controllers/pools report/job_status report/better_placement report/pools "
    "report/advice"
)
SOURCES = [OPERATOR / f"{name}.py" for name in NAMES.split()]
WORD = r'"([A-Z][a-z]+(?:[A-Z][a-z]+)+)"'


def test_every_condition_and_reason_is_documented() -> None:
    words = {word for path in SOURCES for word in re.findall(WORD, path.read_text(encoding="utf-8"))}
    words -= {"ClusterQueue", "ResourceFlavor", "TrainingJob", "GPUPool"}
    assert {"CapacityAvailable", "TooFewNodes", "ModelNotReadable", "ScaledDown"} <= words
    undocumented = sorted(word for word in words if word not in TEXT)
    assert not undocumented


def test_settings_that_are_named_exist() -> None:
    known = {name_variable(item) for item in fields(Settings)}
    named = set(re.findall(r"TILECAST_[A-Z_0-9]+", TEXT))
    assert named <= known, named - known
