"""The advice as JSON: printed advice conforms to its schema, and the schema covers everything printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tilecast import zoo
from tilecast.advice import Advice, Request, advise
from tilecast.api import advice
from tilecast.api.status import Recommendation
from tilecast.cli import main
from tilecast.hardware import find_gpu
from tilecast.inputs.gpu_list import build_assumed_pool
from tilecast.spec import Workload

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json.loads((ROOT / "schemas" / "advice.schema.json").read_text())
JOB = str(ROOT / "examples" / "jobs" / "llama-7b-pretrain.yaml")
MIXED = str(ROOT / "examples" / "clusters" / "mixed.yaml")


def valid(document: Any) -> None:
    jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)


def test_the_committed_schema_is_what_the_models_say() -> None:
    """`make crds` regenerates the schema."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert (ROOT / "schemas" / "advice.schema.json").read_text() == advice.format_schema()


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "advice").glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.slow
def test_every_reviewed_advice_is_valid(path: Path) -> None:
    valid(json.loads(path.read_text()))


@pytest.mark.parametrize(
    "arguments",
    [
        [JOB, "--nodes", MIXED, "--baseline", "a100-80:8", "--measured", "130", "--explain", "--max-gpus", "16"],
        ["gpt2", "--seq", "512", "--batch", "64", "--gpus", "t4:4", "--precision", "fp16", "--per-layer"],
        ["llama-3.1-405b", "--seq", "8192", "--batch", "64", "--gpus", "t4:8,a100-80:8"],
        ["mixtral-8x7b", "--seq", "4096", "--batch", "64", "--gpus", "h100-sxm:16", "--plan", "tp=2,ep=4", "--explain"],
    ],
    ids=["everything", "per-layer", "nothing", "plan"],
)
@pytest.mark.slow
def test_what_is_printed_is_valid(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *arguments, "-o", "json"]) in (0, 3)
    document = json.loads(capsys.readouterr().out)
    valid(document)
    assert document["schemaVersion"] == "1"


@pytest.mark.slow
def test_the_schema_refuses_what_is_not_in_it() -> None:
    document = json.loads((ROOT / "tests" / "advice" / "llama-7b-pretrain.json").read_text())
    for broken in (
        {**document, "surprise": 1},
        {**document, "schemaVersion": "2"},
        {key: value for key, value in document.items() if key != "inputsHash"},
        {**document, "recommendation": {**document["recommendation"], "gpus": "many"}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            valid(broken)


def test_every_field_is_described() -> None:
    for name, definition in {"AdviceDocument": SCHEMA, **SCHEMA["$defs"]}.items():
        for field, schema in definition.get("properties", {}).items():
            description = schema.get("description") or SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]["description"]
            assert description, f"{name}.{field}"


def test_long_names_and_lists_are_printed_whole() -> None:
    """Only the status in a cluster bounds names to 63 characters and tolerations to 16."""
    name, tolerations = "a" * 100, [{"key": f"team-{number}", "operator": "Exists"} for number in range(20)]
    advised = advise_on(name, tuple(tolerations))
    document = advice.AdviceDocument.from_advice(advised).document()
    valid(document)
    assert document["recommendation"]["pool"] == document["pareto"][0]["pool"] == name
    assert document["recommendation"]["tolerations"] == tolerations
    status = Recommendation.from_offer(advised.offers[0]).document()
    assert (len(status["pool"]), len(status["tolerations"])) == (63, 16)


def advise_on(name: str, tolerations: tuple[dict[str, str], ...]) -> Advice:
    """Return the advice for GPT-2 on a pool with a name and tolerations."""
    pool = replace(build_assumed_pool(find_gpu("l4"), 8), name=name, tolerations=tolerations)
    return advise(Request("gpt2", Workload(zoo.find_preset("gpt2"), 1024, 64)), [pool])
