"""`python -m tilecast_lab support`: plots of errors and the support matrix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from test_validate_runs import ROW
from tilecast_lab import support

STEP = support.MeasuredStep(
    source="a/b", model="m", gpu="H100", precision="bf16", family="language", gpus="2-8", error=0.05, is_in_range=True
)


def steps(*errors: float, **changes: str) -> list[support.MeasuredStep]:
    return [replace(STEP, error=error, is_in_range=abs(error) < 0.3, **changes) for error in errors]  # type: ignore[arg-type]


def test_every_model_of_a_source_counts_equally() -> None:
    errors = support.GroupErrors.from_steps([*steps(0.1, 0.1, 0.1), *steps(-0.5, model="n")])
    assert errors.mean == pytest.approx(0.3)
    assert errors.median == pytest.approx(0.1) and errors.covered == 0.75 and errors.sources == 1


@pytest.mark.parametrize(
    ("error", "sources", "grade"), [(0.05, 2, "A"), (0.05, 1, "B"), (0.15, 2, "B"), (0.25, 2, "C"), (0.25, 1, "C")]
)
def test_a_grade_needs_a_small_error_and_sources(error: float, sources: int, grade: str) -> None:
    measured = [step for index in range(sources) for step in steps(error, source=f"s{index}")]
    assert support.GroupErrors.from_steps(measured).grade == grade


def test_a_cell_of_too_few_steps_stays_empty() -> None:
    matrix = support.format_matrix(
        [*steps(0.1, 0.1, 0.1), *steps(0.1, gpu="L4"), *steps(0.1, 0.1, 0.1, precision="fp8")]
    )
    assert "| GPU | bf16 | fp8 |" in matrix and "| H100 | **B** 10% (3; 1) | **B** 10% (3; 1) |" in matrix
    assert "L4" not in matrix


def test_a_plot_names_every_group_and_escapes_it() -> None:
    groups = support.group_errors(
        [*steps(0.1, 0.2, 0.3, source="<&>"), *steps(0.02, 0.03, 0.04)], lambda step: step.source
    )
    assert list(groups) == ["a/b", "<&>"]
    root = ElementTree.fromstring(support.draw_errors("Error by source", groups))  # noqa: S314 (our own text)
    titles = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[1:] == [
        "a/b: median 3.0%, 90 % within 3.8%, 3 steps", "<&>: median 20.0%, 90 % within 28.0%, 3 steps"
    ]  # fmt: skip
    places = [float(node.attrib["cx"]) for node in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert places[0] < places[1]


def test_the_page_is_made_of_measured_rows(tmp_path: Path) -> None:
    rows = [{**ROW, "id": f"r{index}", "source": "someone/runs"} for index in range(3)]
    support.write_page([*rows, {**ROW, "gpu": "nobody's"}, {**ROW, "trust": "C"}], tmp_path)
    page = (tmp_path / "support.md").read_text()
    assert "3 measured training steps of 1 sources" in page and "## Support matrix" in page
    for name in ("source", "gpu", "family", "count"):
        assert f"figures/error-by-{name}.svg" in page and (tmp_path / "figures" / f"error-by-{name}.svg").exists()
