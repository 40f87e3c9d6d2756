"""Numbers that were fitted or that describe a product are in TOML files, each with its source."""

from __future__ import annotations

import ast
import math
import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tilecast import constants, hardware, shipped
from tilecast.constants import Constants, RangeHalfWidths
from tilecast.hardware import instances
from tilecast.hardware.schema import ConstantsFile, MigGpuFile
from tilecast.learning import calibration, job_calibration
from tilecast.shipped import NumbersFile
from tilecast.spec import SpecError

TABLE = tomllib.loads(files("tilecast").joinpath("constants.toml").read_text(encoding="utf-8"))
PACKAGE = Path(str(files("tilecast")))


def places(table: Mapping[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of every source in a table, and of every number that has a source of its own."""
    for key, value in table.items():
        is_cell = isinstance(value, list) and isinstance(value[-1], str)
        if key == "source" or is_cell:
            yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, *above, key)


SOURCES = list(places(TABLE))


def read(table: Mapping[str, Any]) -> None:
    Constants.from_table(table)
    RangeHalfWidths.from_table(table)


@pytest.mark.parametrize("path", SOURCES, ids=".".join)
def test_no_source_may_be_missing(path: tuple[str, ...]) -> None:
    """A table without its source and a number without its own are refused, with file, key and remedy."""
    table = deepcopy(TABLE)
    *above, key = path
    here = table
    for name in above:
        here = here[name]
    here[key] = "" if key == "source" else here[key][0]
    with pytest.raises(SpecError, match=r"^constants\.toml: .*has no source; write .*source to its table$") as refused:
        read(table)
    assert refused.value.field.startswith(f"constants.toml: {'.'.join(above)}.")


@pytest.mark.parametrize(
    "path",
    ["matrices", "kernels.direct_shares", "overlap.slow", "tiles.simt.depth", "attention.cudnn.speed", "range.all"],
)
def test_an_unknown_key_is_refused(path: str) -> None:
    table = deepcopy(TABLE)
    *above, key = path.split(".")
    here = table
    for name in above:
        here = here[name]
    here[key] = [1.0, "a guess"]
    with pytest.raises(SpecError, match=rf"^constants\.toml: {path}: is unknown; remove it; known: "):
        read(table)


def test_a_key_must_be_there_and_a_number() -> None:
    table = deepcopy(TABLE)
    del table["overlap"]["slowdown"]
    with pytest.raises(SpecError, match=r"^constants\.toml: overlap\.slowdown: is missing; add it, with its source$"):
        read(table)
    for value in (["0.4", "a guess"], True, "0.4"):
        table["overlap"]["slowdown"] = value
        with pytest.raises(SpecError, match=r"^constants\.toml: overlap\.slowdown: .* is no number; write a number"):
            read(table)
    del table["overlap"]
    with pytest.raises(SpecError, match=r"^constants\.toml: overlap: is missing; add it"):
        read(table)


def test_a_source_counts_for_the_tables_inside() -> None:
    tables = {"source": "", "host": {"source": "measured", "rate": {"eager": 1.0}}, "other": {"eager": [1.0, "read"]}}
    file = NumbersFile("hosts.toml", tables)
    assert file.read_numbers("host.rate") == file.read_numbers("other") == {"eager": 1.0}
    with pytest.raises(SpecError, match=r"^hosts\.toml: network: is no table; add the table$"):
        file.read_numbers("network")


def test_the_digest_is_of_the_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another wording of a source changes no `inputsHash`; another value does."""
    before, table = constants.digest_constants(), deepcopy(TABLE)
    monkeypatch.setattr(constants, "_read_constants", lambda: table)
    for section, key, value, is_same in (
        ("overlap", "source", "another wording", True),
        ("kernels", "direct_share", [TABLE["kernels"]["direct_share"][0], "another wording"], True),
        ("kernels", "direct_share", [0.2, TABLE["kernels"]["direct_share"][1]], False),
    ):
        table[section][key] = value
        assert (constants.digest_constants.__wrapped__() == before) is is_same


DEFINED: Mapping[str, set[str | float]] = {
    # Policies that Tilecast chose: what it recommends, how much it trusts a run, what it shows.
    "advice/choose.py": {1.01, 1.02},
    "advice/enumeration.py": {"FEWER_BATCHES"},
    "advice/incumbent.py": {0.03},
    "advice/measured.py": {1.5},
    "advice/reasons.py": {0.8, 1.05},
    "advice/what_if/alternatives.py": {"SIZES_MIB", "USUAL_STAGES"},
    "advice/what_if/changes.py": {"FURTHER"},
    "advice/what_if/fits.py": {"FAR"},
    "api/base.py": {0.6, "_ORDER"},
    "learning/calibration.py": {0.9, 1.2533, 1.4826, 1.645, 2.5, "LEVELS", "GPU_RANGES"},
    "learning/consensus.py": {2.5},
    "hardware/__init__.py": {0.7},
    "collectives/link_calibration.py": {0.0005, 0.2, 0.9, 1.1},
    "learning/namespace_calibration.py": {1.25, 1.5},
    "inputs/gpu_list.py": {0.8},
    "inputs/launches.py": {1.01},
    "planner/owners.py": {0.03},
    "planner/problem.py": {0.02, 0.05, 0.95},
    "planner/relaxation.py": {1.5},
    "planner/solver.py": {0.0005, 0.01, 0.03, 0.05, 0.3, 0.4, 0.6, 0.95, "_TEMPERATURES", "_TEMPERATURES_AGAIN"},
    "public/scanning.py": {0.05},
    "public/advising.py": {0.05},
    "advice/sharing.py": {0.8, 1.25},
    "zoo/__init__.py": {0.75},
    # Units, types and quantiles.
    "cli/parser.py": {0.7, 0.75},
    "cost.py": {3.6},
    "diagnose.py": {0.95},
    "frameworks.py": {"HELD_BYTES"},
    "inputs/job_options.py": {"_BY_PATH"},
    "inputs/measurements.py": {"_UNITS"},
    "logs/text.py": {"_UNITS"},
    # Names of metrics in logs, with the seconds of their unit.
    "logs/metrics.py": {"STEP_METRICS"},
    # Suffixes.
    "inputs/reading.py": {"_THOUSANDS"},
    "nodes/quantities.py": {"_SUFFIXES"},
    "plan_columns.py": {"PLAN_COLUMNS"},
    "spec.py": {"ELEMENT_BYTES", "FROZEN_BITS", "PREFERENCE_LOSSES", "STATE_BYTES"},
    # Options of launchers, by their own names.
    "readers/megatron.py": {"_VOCABULARIES"},
    "readers/recipes.py": {"_AXES"},
    # Algorithms from papers, which the table's comment names.
    "layout.py": {"SCHEDULES"},
    "search/enumeration.py": {"VIRTUAL_STAGES"},
    "step/blocks.py": {"_NUMBERS_OF_WORD"},
    "sweeps.py": {"FIELDS"},
    "uncertainty.py": {0.95, 1.1},
    "validate/calibration.py": {"COUNTS"},
    "validate/runs.py": {"_OPEN"},
    "validate/scores.py": {0.05, 0.9},
    # What an algorithm computes, counted from its formula: FLOPs, passes over an array, bytes, operators.
    "graph.py": {2.5, "KINDS"},
    "memory.py": {"_OPTIMIZERS"},
    "step/weights.py": {"_CALLS", "_FUSED_OPTIMIZER_BYTES", "_STEPWISE_OPTIMIZER_BYTES"},
    "zoo/layers.py": {0.75, 4.25, 7.5, 12.5, "CHAINS", "_GELU"},
    "zoo/parts.py": {"NORMED"},
    "zoo/recommender.py": {"_MOMENTS"},
    "zoo/traced/operators.py": {"OPERATORS"},
    # Layers of published networks, and Euler's constant.
    "zoo/cnn/detection.py": {0.25, 1.5},
    "zoo/cnn/efficientdet.py": {0.25},
    "zoo/cnn/csp.py": {0.25},
    "zoo/cnn/segmentation.py": {0.25},
    "zoo/cnn/stylegan.py": {0.25},
    "zoo/cnn/mobile.py": {0.9},
    "zoo/cnn/builder.py": {0.25},
    "zoo/transformer_xl.py": {0.5772},
    # Inputs of the utilization network: others need another network.
    "kernels/features.py": {0.0003, 0.003, 0.03, 1.5, 2.5, "ALIGNMENTS", "ATTENTION_TILES", "HEATED_S", "SPILL_SHARES"},
}
"""Numbers in Python that were reviewed, by module: fractions, and names of tables at module level.

A number belongs here if it is a definition, mathematics or a limit that Tilecast chose. One that was fitted or
measured, or that describes a GPU, a library or a host, belongs in a TOML file with its source.
"""
DRAWN = "render"
"""Folder of text and pictures, whose numbers are sizes and shares of a page."""


def fractions(tree: ast.Module) -> Iterator[float]:
    """Yield the float literals that are neither whole, nor a half, nor a power of ten."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in (0.0, 0.5):
            is_power = math.isfinite(node.value) and math.log10(node.value).is_integer()
            if not (is_power or node.value.is_integer()):
                yield node.value


def numbers(node: ast.AST) -> int:
    """Return how many number literals an expression has, outside functions and types."""
    if isinstance(node, ast.Lambda | ast.Subscript):
        return 0
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    return sum(numbers(child) for child in ast.iter_child_nodes(node))


def tables(tree: ast.Module, *, of_floats: bool) -> Iterator[str]:
    """Yield the names of module-level tables of two numbers or more, or only of those that have a float."""
    displays = (ast.Dict, ast.List, ast.Set, ast.Tuple)
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None or numbers(node.value) < 2:
            continue
        inside = list(ast.walk(node.value))
        has_float = any(isinstance(item, ast.Constant) and isinstance(item.value, float) for item in inside)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            is_table = isinstance(target, ast.Name) and any(isinstance(item, displays) for item in inside)
            if is_table and (has_float or not of_floats):
                yield ast.unparse(target)


def literals(source: str, module: str) -> set[str | float]:
    """Return the fractions and the names of tables of a module's source."""
    tree = ast.parse(source)
    # A network of the zoo is its layers, so that tables of whole numbers there are definitions.
    return {*fractions(tree), *tables(tree, of_floats=module.startswith("zoo/"))}


@pytest.mark.slow
def test_no_module_holds_a_fact() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).as_posix()
        if not module.startswith(f"{DRAWN}/"):
            found[module] = literals(path.read_text(encoding="utf-8"), module) - DEFINED.get(module, set())
    found = {module: unknown for module, unknown in found.items() if unknown}
    assert not found, "a fact belongs in a TOML file with its source; a definition in DEFINED"


def test_a_fact_in_a_module_would_be_found() -> None:
    assert literals("RATE: float = 0.37", "step/new.py") == {0.37}
    assert literals("def share(gpu):\n    return gpu.bytes * 0.985", "memory.py") == {0.985}
    assert literals("_THREADS: dict[float, int] = {7.5: 1024, 8.0: 1536}", "memory.py") == {7.5, "_THREADS"}
    assert literals("CHANNELS = ((2, 2), (8, 6))", "memory.py") == {"CHANNELS"}
    assert literals("BATCH = 2\nHALF = 0.5\nGIGA = 1e9\nPAGE = 4096.0", "memory.py") == set()


def test_hardware_files_state_their_sources(tmp_path: Path) -> None:
    """A GPU, a link, a table of protocols and an instance type without one are refused."""
    folder = PACKAGE / "hardware"
    gpu = (folder / "gpus" / "h100-sxm.toml").read_text(encoding="utf-8")
    path = tmp_path / "gpu.toml"
    for text in (gpu.partition("[sources]")[0], gpu.partition("[sources]")[0] + "[sources]\n"):
        path.write_text(text)
        with pytest.raises(SpecError, match=r"^gpu\.toml: sources: "):
            hardware.load_gpu(path)
    for name in ("aws", "gcp", "defaults"):
        table = tomllib.loads((folder / "nodes" / f"{name}.toml").read_text(encoding="utf-8"))
        instances.require_sources(name, table)
        for place in table.get("sources", {}):
            left = {key: value for key, value in table["sources"].items() if key != place}
            with pytest.raises(SpecError, match=rf"^{name}: sources\.{place}: is missing; say where"):
                instances.require_sources(name, {**table, "sources": left})
        for row in table.get("network", ()):
            with pytest.raises(SpecError, match=rf"^{name}: network\.0\.source: is missing; say where"):
                instances.require_sources(name, {"network": [{**row, "source": ""}]})
    for row in (ConstantsFile, MigGpuFile):
        assert row.model_fields["source"].is_required()


@pytest.mark.parametrize(
    ("deviations", "section"),
    [(calibration.shipped_deviations, "deviation"), (job_calibration.shipped_deviations, "job")],
)
def test_deviations_state_their_source(
    deviations: Any, section: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    table = shipped.read_table("tilecast.learning", "calibration.toml")
    del table[section]["source"]
    monkeypatch.setattr(shipped, "read_table", lambda package, name: table)
    request.addfinalizer(deviations.cache_clear)
    deviations.cache_clear()
    with pytest.raises(SpecError, match=rf"^calibration\.toml: {section}\.\w+: has no source; write "):
        deviations()
