"""`tilecast validate runs -o html`: the summary as one self-contained page."""

from __future__ import annotations

import csv
import re
from html import escape
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from test_html import stays_inside, tags
from test_validate_runs import ROW
from tilecast.cli import main
from tilecast.validate.runs import read_table
from tilecast.validate.scores import BINS
from tilecast_lab.validate import intervals, residuals, runs, scores
from tilecast_lab.validate import report as reports
from tilecast_lab.validate.intervals import Interval, Intervals

SOURCES = ("a/lab", "b/lab", "<script>alert(1)</script>", "d & e", "f", "g", "h")
LENGTHS = (512, 1024, 2048)


def rows() -> list[dict[str, str]]:
    """Return forecasts of 42 runs as measurements; those with 2,048 tokens take 1.5 times as long; one has a peak."""
    result = [
        {**ROW, "id": f"r{number}-{length}", "source": source, "split_group": source, "seq_len": str(length),
         "micro_batch_per_gpu": str(micro), "global_batch": str(32 * micro), "url_or_repo_path": "", "framework": "x"}
        for number, source in enumerate(SOURCES) for length in LENGTHS for micro in (1, 2)
    ]  # fmt: skip
    for row, item in zip(result, runs.forecast(result), strict=True):
        assert item.seconds is not None
        row["step_time_s_derived"] = f"{item.seconds * (1.5 if row['seq_len'] == '2048' else 1.0):.6f}"
        row["peak_mem_gb_per_gpu"] = ""
    result[0]["peak_mem_gb_per_gpu"] = "20"
    return result


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "a<b>.csv"
    table = rows()
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, table[0])
        writer.writeheader()
        writer.writerows(table)
    return path


@pytest.fixture(scope="module")
def report(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    with pytest.MonkeyPatch.context() as patch, path.open("w", encoding="utf-8") as out:
        patch.setattr("sys.stdout", out)
        assert main(["validate", "runs", str(measured), "-o", "html"]) == 0
    return path


@pytest.mark.slow
def test_the_page_is_whole_and_needs_nothing_else(report: Path) -> None:
    text, seen = report.read_text(), tags(report)
    assert text.startswith("<!doctype html>") and text.endswith("</html>\n")
    assert not [tag for tag, _ in seen if tag in ("script", "img", "iframe", "object", "video", "form")]
    named = [value for _, attributes in seen for key in ("src", "href") if (value := attributes.get(key))]
    assert named == ["data:,"]
    assert "url(" not in text and "@import" not in text
    identifiers = [value for _, attributes in seen if (value := attributes.get("id"))]
    assert len(set(identifiers)) == len(identifiers)


@pytest.mark.slow
def test_every_input_has_a_picture_with_a_title_and_a_table(report: Path) -> None:
    text, seen = report.read_text(), tags(report)
    pictures = [attributes for tag, attributes in seen if tag == "svg"]
    stated = [name for name, key in residuals.COVARIATES if any(key(row) for row in rows())]
    assert len(stated) == len(residuals.COVARIATES)
    assert len(pictures) == len(stated) + 2  # the parts of a step, and all rows
    identifiers = {attributes.get("id") for _, attributes in seen}
    assert all(picture["role"] == "img" and picture["aria-labelledby"] in identifiers for picture in pictures)
    for name in stated:
        assert f">Forecast over measured by {name}</title>" in text
        assert f"<caption>Forecast over measured by {name}</caption>" in text
    tables = [tag for tag, _ in seen if tag == "table"]
    assert len([tag for tag, _ in seen if tag == "caption"]) == len(tables) == len(pictures) + 2  # errors, and peaks
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in seen if tag == "th")


def test_bins_that_are_off_are_marked_and_others_are_not(report: Path) -> None:
    table = re.search(
        r"<caption>Forecast over measured by sequence</caption>.*?</table>", report.read_text(), re.DOTALL
    )
    assert table is not None
    lines = {
        one[1]: (one[0], re.findall(r"<td[^>]*>(.*?)</td>", one[2]))
        for one in re.findall(r'<tr( class="off")?><th scope="row">(\d+)</th>(.*?)</tr>', table[0])
    }
    assert [lines[str(length)][1] for length in LENGTHS] == [
        ["14", "7", "1.00", "0.00", ""], ["14", "7", "1.00", "0.00", ""], ["14", "7", "0.67", "0.00", "off"],
    ]  # fmt: skip
    assert [bool(lines[str(length)][0]) for length in LENGTHS] == [False, False, True]
    assert report.read_text().count("2048: 0.67 ± 0.00, 14 of 7, off</title>") == 1


def test_every_row_has_a_mark_and_every_source_a_line(report: Path) -> None:
    text = report.read_text()
    assert len(re.findall(r"<title>[^<]*, forecast [^<]*, measured [^<]*</title>", text)) == 42
    for source in ("a/lab", "d &amp; e", "&lt;script&gt;alert(1)&lt;/script&gt;"):
        assert f'<th scope="row">{source}</th><td class="n">6</td>' in text
    assert "other sources" in text  # seven sources, six colours


def test_what_the_table_holds_stays_text(report: Path) -> None:
    text = report.read_text()
    assert "<script" not in text and "a&lt;b&gt;.csv" in text


@pytest.mark.slow
def test_the_page_says_what_the_summary_says(report: Path, measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = report.read_text()
    assert main(["validate", "runs", str(measured), "--parts"]) == 0
    output = capsys.readouterr().out
    for line in output.splitlines():
        if line.startswith(("42 rows", "grade A", "macro error", "90 %", "called too", "measured peaks", "mean over")):
            assert f"<p>{escape(line)}</p>" in page
    (total,) = re.findall(r"^all +42 +7 +(.*)$", output, re.MULTILINE)
    cells = "".join(f'<td class="n">{cell}</td>' for cell in total.split())
    assert f'<th scope="row">all</th><td class="n">42</td><td class="n">7</td>{cells}' in page
    for name, share, factor, error in re.findall(r"^([a-z ]+?) +([\d.]+%) +([\d.]+) +([\d.]+)", output, re.MULTILINE):
        cells = "".join(f'<td class="n">{cell}</td>' for cell in (share, factor, error))
        assert f'<th scope="row">{name}</th>{cells}' in page


def test_rows_that_do_not_count_are_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    row = {**ROW, "step_time_s_derived": ""}
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    assert main(["validate", "runs", str(path), "-o", "html"]) == 0
    text = capsys.readouterr().out
    assert "no graded row with a measured step time" in text and "<svg" not in text and text.endswith("</html>\n")


def test_tables_are_read_and_prepared_once(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(module: ModuleType, name: str) -> None:
        usual = getattr(module, name)

        def call(*given: object) -> object:
            calls.append(name)
            return usual(*given)

        monkeypatch.setattr(module, name, call)

    counted(reports, "read_table")
    counted(runs, "prepare")
    assert main(["validate", "runs", str(measured)]) == 0
    assert calls == ["read_table", "prepare"]


def test_whiskers_span_two_standard_errors() -> None:
    row = Interval("a name that is much longer than there is room", 1.2, 0.1, "5 rows")
    assert np.log(row.ends) == pytest.approx(np.log(1.2) + np.array([-0.2, 0.2]))
    assert Interval("alone", 0.7, float("nan"), "5 rows").ends == (0.7, 0.7)
    picture = intervals.svg(Intervals("t", "ratio", [row], (0.9, 1.1)), "x")
    assert "a name that is much long…</text>" in picture
    assert "<title>a name that is much longer than there is room: 1.20 ± 0.10, 5 rows</title>" in picture


def test_the_summary_lists_what_the_strata_hold(measured: Path) -> None:
    table = read_table(measured)
    scored = scores.score_forecasts(table, runs.forecast(table))
    everything, *others = (item for item, _ in scores.strata(scored))
    assert (everything.rows, everything.groups) == (42, 7)
    assert everything.macro == pytest.approx(1 / 9, rel=1e-3)  # a third of the rows is a third too fast
    assert everything.bias == pytest.approx(0.0, abs=1e-3)
    assert {item.name.split()[0] for item in others} == {name for name, _ in BINS}


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.slow
def test_nothing_runs_out_of_the_window(report: Path, tmp_path: Path, width: int) -> None:
    stays_inside(report, tmp_path, width)
