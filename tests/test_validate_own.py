"""`tilecast validate` on tables of one's own, without the laboratory, and what says that it needs it."""

from __future__ import annotations

import csv
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tilecast.cli import main
from tilecast.validate import reading, runs, scores
from tilecast.validate.cells import REASONS
from tilecast_lab.validate import runs as published

ROW = {
    "id": "a", "gpu": "a100-80", "n_gpus": "8", "precision": "bf16", "model_name": "llama-2-7b", "seq_len": "4096",
    "global_batch": "64", "step_time_s_derived": "17.9", "dp": "8", "zero_stage": "3",
}  # fmt: skip
IMAGES = ROW | {"model_name": "resnet-50", "seq_len": "", "global_batch": "2048", "zero_stage": "", "precision": "fp16"}
ROWS = [
    ROW,
    ROW | {"id": "b", "n_gpus": "16", "dp": "16", "step_time_s_derived": "9.6"},
    ROW | {"id": "c", "gpu": "h100-sxm", "compiled": "1", "step_time_s_derived": "7.5"},
    ROW | {"id": "d", "dp": "", "zero_stage": "", "n_gpus": "32"},
    ROW | {"id": "e", "tp": "4", "dp": "2", "pp": "2", "n_gpus": "16", "micro_batch_per_gpu": "2", "zero_stage": "1"},
    ROW | {"id": "f", "activation_checkpointing": "full", "micro_batch_per_gpu": "4", "grad_accum": "2"},
    ROW | {"id": "g", "gpu": "v100-sxm", "precision": "fp16", "model_name": "bert-large", "seq_len": "512"},
    ROW | {"id": "h", "model_name": "mixtral-8x7b", "n_gpus": "64", "dp": "64", "ep": "8", "micro_batch_per_gpu": "1"},
    ROW | {"id": "i", "framework": "deepspeed", "gpus_per_node": "4", "optimizer": "lamb", "cp": "2", "dp": "4"},
    IMAGES | {"id": "j", "optimizer": "sgd", "gpu": "l4"},
    IMAGES | {"id": "k", "model_name": "dlrm-small", "optimizer": "sgd", "global_batch": "65536"},
    ROW | {"id": "l", "gpu": "t4"},
    ROW | {"id": "m", "model_name": "no-such-model"},
    ROW | {"id": "n", "dp": "3", "tp": "1", "pp": "1"},
    ROW | {"id": "o", "seq_len": ""},
]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the laboratory."""
    monkeypatch.setattr("tilecast.cli.validate.entry_points", lambda **_: ())


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(dict.fromkeys(key for row in ROWS for key in row)))
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def test_the_laboratory_offers_every_command() -> None:
    found = entry_points(group="tilecast.validate")
    assert found.names == {"runs", "kernels", "collectives", "measured", "transfer"}
    assert all(callable(one.load()) for one in found)


@pytest.mark.slow
def test_forecasts_do_not_depend_on_the_laboratory(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for number in range(2):
        assert main(["validate", "runs", str(table), "--rows", str(tmp_path / f"{number}.csv")]) == 0
        texts.append(capsys.readouterr().out)
        monkeypatch.setattr("tilecast.cli.validate.entry_points", lambda **_: ())
    assert "roofline" in texts[0] and "roofline" not in texts[1]
    assert texts[0].partition("\n\n")[0] == texts[1].partition("\n\n")[0]
    written = (tmp_path / "1.csv").read_text()
    assert (tmp_path / "0.csv").read_text() == written
    lines = list(csv.DictReader(written.splitlines()))
    reasons = {row["id"]: row["reason"] for row in lines if row["reason"]}
    assert reasons == {
        "l": "precision-not-supported", "m": "unknown-model", "n": "impossible-plan", "o": "no-sequence",
    }  # fmt: skip
    assert set(reasons.values()) <= set(REASONS)
    assert "pip install ./lab" in REASONS["unknown-model"]
    assert all(float(row["predicted_s"]) > 0 for row in lines if not row["reason"])


@pytest.mark.usefixtures("alone")
def test_the_summary_is_how_good_forecasts_are(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "runs", str(table)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("15 rows, 11 predicted, 4 refused\n")
    scored = scores.score_forecasts(ROWS, runs.forecast_rows(ROWS))
    name, mask = scores.list_row_subsets(scored)[0]
    everything = scores.subset_errors(name, scored, mask)
    assert everything.rows == 11 and f"\n{everything}\n" in output
    for line in ("gpu h100-sxm", "precision bf16", "scale 2-8", "90 % range covers", "called too large"):
        assert f"\n{line}" in output


@pytest.mark.usefixtures("alone")
def test_a_run_corrects_the_others_of_its_model(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "transfer", str(table)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "11 measured runs of 1 sources"
    assert [line[:22].strip() for line in lines[3:]] == ["other GPU", "other count", "other plan"]
    assert lines[2].split() == ["a", "run", "on", "pairs", "raw", "corrected", "scaled", "gain", "in", "range", "range"]
    assert len({len(line) for line in lines[2:]}) == 1


def test_a_table_of_one_s_own_says_how_far_each_forecast_is_off() -> None:
    """A deviation that all runs share is corrected in part by any of them."""
    from tilecast.validate import calibration, transfer

    rows = [{**row, "table": "t"} for row in ROWS[:3]]
    forecasts = runs.forecast_rows(rows)
    slow = [
        {**row, "step_time_s_derived": f"{1.33 * (item.seconds or 1):.6g}"}
        for row, item in zip(rows, forecasts, strict=True)
    ]
    subjects = transfer.build_transfer_runs(calibration.forecast_runs(slow), ["s"] * 3)
    for kind, (seen, asked) in transfer.pair_runs(subjects).items():
        errors = {
            name: column.max() for name, column in transfer.pair_errors(subjects, kind, seen, asked).errors.items()
        }
        assert errors["raw"] == pytest.approx(0.248, abs=0.001)
        assert errors["scaled"] < 0.001 < errors["corrected"] < errors["raw"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["kernels", "x.csv"], "validate kernels"),
        (["collectives", "x.csv", "--rows", "y.csv"], "validate collectives"),
        (["runs", "x.csv", "-o", "html"], "--output"),
        (["runs", "x.csv", "--parts"], "--parts"),
        (["runs", "x.csv", "--graphs", "."], "--graphs"),
    ],
)
def test_what_needs_the_laboratory_says_so_in_a_line(
    words: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", *words]) == 2
    remedy = "run `pip install ./lab` in a checkout of the repository"
    line = f"tilecast: {field}: needs tilecast-lab, which is not installed; {remedy}\n"
    assert capsys.readouterr().err == line


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("verb", ["runs", "transfer"])
def test_a_table_that_is_none_is_one_line(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    for text in ("op,bytes\nall_reduce,1\n", "\x00\xff"):
        path.write_text(text, encoding="latin-1")
        assert main(["validate", verb, str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_nothing_measured_is_read() -> None:
    other = {**ROW, "step_time_s_derived": "7.25", "trust": "B", "split_group": "x"}
    assert reading.read_run(other) == reading.read_run(ROW)
    (one,), (published_one,) = runs.forecast_rows([ROW]), published.forecast([ROW])
    assert one.seconds == published_one.seconds == published_one.left_out_s
