"""`python -m tilecast_lab reprice`: a forecast that moves is seen."""

from __future__ import annotations

import csv
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from test_validate_runs import ROW
from tilecast_lab import reprice


def write_table(folder: Path, *rows: dict[str, str]) -> None:
    (folder / "e2e").mkdir()
    with (folder / "e2e" / "runs.csv").open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(ROW))
        writer.writeheader()
        writer.writerows(rows)


def test_forecasts_are_committed_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {**ROW, "id": "r2", "gpu": "nobody's"}
    write_table(tmp_path, ROW, refused)
    monkeypatch.setattr(reprice, "COMMITTED", tmp_path / "forecasts.csv")
    monkeypatch.setattr(reprice, "MEASURED", tmp_path / "none")
    text, is_moved = reprice.run(tmp_path, write=True)
    assert is_moved and "1 of 2 forecasts moved" in text  # one is new, one is refused as before
    text, is_moved = reprice.run(tmp_path, write=False)
    assert not is_moved and "0 of 2 forecasts moved" in text


def test_a_moved_forecast_is_listed_with_its_source(tmp_path: Path) -> None:
    rows = [{**ROW, "source": "someone/runs"}]
    (before,) = reprice.reprice(rows, {}).values()
    assert before.after_s
    committed = {reprice.digest(rows[0]): before.after_s / 1.25}
    (after,) = reprice.reprice(rows, committed).values()
    assert after.is_moved and not replace(after, before_s=after.after_s).is_moved
    line = reprice.table({"x": after}).splitlines()[1]
    assert re.match(r"someone/runs +1 +1 +\+25\.0% +\+25\.0%", line)


def test_a_row_that_is_refused_now_has_moved() -> None:
    assert reprice.RepricedRow("x", 1.0, 1.0, None).is_moved
    assert reprice.RepricedRow("x", 1.0, None, 1.0).is_moved
    assert not reprice.RepricedRow("x", 1.0, None, None).is_moved


@pytest.mark.slow
def test_no_forecast_of_the_own_measured_steps_moved_unseen() -> None:
    repriced = reprice.reprice(reprice.read_rows(), reprice.read_committed(reprice.COMMITTED))
    assert repriced
    moved = [item for item in repriced.values() if item.is_moved]
    assert not moved, f"{reprice.table(repriced)}\nread what moved and why; `make accuracy ARGS=--write` accepts it"


@pytest.mark.data
def test_no_forecast_of_a_measured_step_moved_unseen() -> None:
    folder = os.environ.get("TILECAST_DATA")
    if not folder:
        pytest.skip("TILECAST_DATA does not point to the measured tables")
    # Every eighth row: all of them take minutes, and `make accuracy` compares them.
    repriced = reprice.reprice(reprice.read_rows(Path(folder))[::8], reprice.read_committed(reprice.COMMITTED))
    moved = [item for item in repriced.values() if item.is_moved]
    assert not moved, f"{reprice.table(repriced)}\nread what moved and why; `make accuracy ARGS=--write` accepts it"
