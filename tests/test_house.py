"""Rules that the repository keeps: packaging, import boundaries, and the commands that the README promises."""

from __future__ import annotations

import ast
import importlib
import operator
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_standard_library_is_not_shadowed() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not (ROOT / "predictor" / "__init__.py").exists()
    assert operator.__file__ is not None
    assert ROOT not in Path(operator.__file__).parents


def test_the_packages_come_from_this_checkout() -> None:
    for name, folder in (("tilecast", "predictor"), ("tilecast_lab", "lab"), ("tilecast_operator", "operator")):
        file = importlib.import_module(name).__file__
        assert file is not None
        assert Path(file).is_relative_to(ROOT / folder)


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(set(names)) == len(names)


def test_the_lock_files_name_hashes_and_no_index() -> None:
    for path in ROOT.glob("requirements*.lock"):
        text = path.read_text()
        assert not re.search(r"https?://|--index-url|--extra-index-url", text), path.name
        pinned = len(re.findall(r"^[A-Za-z0-9_.\[\]-]+==", text, re.MULTILINE))
        assert pinned > 0
        assert len(re.findall("--hash=sha256:", text)) >= pinned


def test_the_layers_name_modules_that_exist() -> None:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    for module in re.findall(r"[\w.]+", " ".join(layers)):
        base = ROOT / ("operator" if module.startswith("tilecast_operator") else "predictor") / module.replace(".", "/")
        assert base.is_dir() or base.with_suffix(".py").is_file(), module


def test_the_readme_names_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named >= {"demo", "test", "check", "cluster-demo"}
    assert named <= targets


def test_committed_files_are_small() -> None:
    for folder in ("predictor", "operator", "lab", "charts", "crds", "docs", "examples", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.stat().st_size <= 2 * 2**20, path


FOLDERS = ("bench", "lab", "operator", "predictor", "tests", "tools")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Return every syntax node of every source, with its path."""
    return [(path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]


@pytest.mark.slow
def test_private_modules_of_other_packages_are_imported_in_two_places() -> None:
    """Both modules say why: what they import from kopf or PyTorch has no public name."""
    places = {
        path.name
        for path, node in nodes()
        if isinstance(node, ast.ImportFrom) and re.match(r"(kopf|torch)\._", node.module or "")
        if not path.is_relative_to(ROOT / "tests")
    }
    assert places == {"kopf_internals.py", "torch_export.py"}
