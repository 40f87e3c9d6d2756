"""What `-o ray` and `-o skypilot` print, before these programs' own validators; see tools/schedulers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import schedulers
import tilecast
from tilecast.hardware import list_gpus, read_gpu_file
from tilecast.render.dialects import parts

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    given = [
        tilecast.advise("gpt2", seq=1024, batch=64, gpus="p5.48xlarge:1,a100-80:8,l4:8,rtx-4090:8,g6.xlarge:8"),
        tilecast.advise("gpt2", seq=1024, batch=64, gpus="l4:8"),
        tilecast.advise(
            str(ROOT / "examples/jobs/llama-7b-pretrain.yaml"), nodes=str(ROOT / "examples/clusters/mixed.yaml")
        ),
    ]
    return {name: [one.write_dialect(name) for one in given] for name in ("ray", "skypilot")}


def ask(home: Path, **given: Any) -> dict[str, Any]:
    return schedulers.check({"ray": [], "skypilot": [], "products": {}, "skypilotNames": {}, **given}, home)


def test_the_validators_take_what_is_printed(texts: dict[str, list[str]], tmp_path: Path) -> None:
    assert ask(tmp_path, **texts)["errors"] == []


def test_the_validators_refuse_what_is_wrong(texts: dict[str, list[str]], tmp_path: Path) -> None:
    wrong = {
        "ray": [texts["ray"][2].replace('"fallback_strategy": [', '"fallback_strategy": [{"num_gpus": 1}, ')],
        "skypilot": [
            texts["skypilot"][2].replace("accelerators", "gpus"),
            texts["skypilot"][2].replace("num_nodes", "n"),
        ],
    }
    errors = ask(tmp_path, **wrong)["errors"]
    assert [text.split(":")[0] for text in errors].count("ray") >= 1
    assert [text.split(":")[0] for text in errors].count("skypilot") >= 2


def test_gpus_have_the_names_that_the_programs_give_them(tmp_path: Path) -> None:
    names = parts.read_gpu_names()
    products = {name: read_gpu_file(name).product for name in list_gpus()}
    found = ask(tmp_path, products=products, skypilotNames={name: one.skypilot for name, one in names.items()})["names"]
    assert {name: one.ray for name, one in names.items()} == {name: one["ray"] for name, one in found.items()}
    # Only catalogs of clouds tell the V100 of 32 GB; labels of nodes do not.
    assert {name for name, one in found.items() if not one["matches"]} <= {name for name in names if "v100" in name}
