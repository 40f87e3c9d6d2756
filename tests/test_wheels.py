"""Wheels: what each distribution of this repository holds, and that no user gets the laboratory with Tilecast."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent
LABORATORY = re.compile(r"(^|/)(lab|tilecast_lab|tilecast_fit|bench|tests)/|left_out|kernel_readers")


def names(project: Path, folder: Path) -> list[str]:
    """Return the names of the files in the wheel of a project."""
    (wheel,) = WheelBuilder(str(project)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(wheel).namelist()


def of_the_laboratory(files: list[str]) -> list[str]:
    return [name for name in files if LABORATORY.search(name)]


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return names(ROOT, tmp_path_factory.mktemp("product"))


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return names(ROOT / "lab", tmp_path_factory.mktemp("laboratory"))


def test_the_wheel_has_no_laboratory(product: list[str]) -> None:
    assert of_the_laboratory(product) == []
    folders = {name.partition("/")[0] for name in product}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"tilecast", "tilecast_operator"}
    assert "tilecast/validate/reading.py" in product


def test_the_laboratory_is_a_wheel_of_its_own(product: list[str], laboratory: list[str]) -> None:
    own = {name for name in laboratory if ".dist-info/" not in name}
    assert own and own == {name for name in own if name.startswith("tilecast_lab/")}
    assert set(of_the_laboratory(laboratory)) >= own, "the search above would find it"
    assert {"tilecast_lab/validate/left_out.toml", "tilecast_lab/collect/device.py"} <= own
    assert any(name.endswith(".dist-info/entry_points.txt") for name in laboratory)


def test_the_image_is_built_without_the_laboratory() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    paths = [
        path for name in let_in for path in (ROOT / name, *(ROOT / name).rglob("*")) if "__pycache__" not in path.parts
    ]
    files = [str(path.relative_to(ROOT)) for path in paths]
    assert "predictor/tilecast/cli/validate.py" in files
    assert of_the_laboratory(files) == []
