"""The page about the command line: every command on it runs, and it covers every verb and the main options."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tilecast.api import pool_learning
from tilecast.api.calibration import ObservedRun
from tilecast.cli import VERBS, main
from tilecast.cli.progress import track_progress
from tilecast.learning.calibration import Run
from tilecast.render.dialects import DIALECTS
from tilecast.sweeps import FIELDS
from tilecast.zoo.traced import document, onnx_file

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "cli.md").read_text()
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder as a reader has it: the examples and some files of their own."""
    from test_calibrate import LOG
    from test_traced_onnx import gpt_in_onnx

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    gpt_in_onnx(tmp_path / "model.onnx", ["batch", 64])
    trace = onnx_file.read(tmp_path / "model.onnx", None)
    (tmp_path / "graph.json").write_text(document.write(trace))
    (tmp_path / "all_reduce_perf.log").write_text(LOG)
    (table,) = re.findall(r"^```csv\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "runs.csv").write_text(table)
    (tmp_path / "kernels.csv").write_text("gpu,dtype,m,n,k,latency_us\na100-80,bf16,4096,4096,4096,560\n")
    (tmp_path / "collectives.csv").write_text("op,bytes,n_gpus,link,latency_us\nall_reduce,1e6,8,nvlink4,40\n")
    (runs,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "measured.json").write_text(runs)
    run = Run("h100", "h100-sxm", "bf16", "decoder", "2-8", "w", 1.2, 1.0, 5, "none", "team")
    learnt = pool_learning.pool_learning_document(
        "h100", [ObservedRun("1", "2026-01-01T00:00:00Z", run, "a", "trainer", "put")], []
    )
    (tmp_path / "learnings.json").write_text(json.dumps({"kind": "List", "items": [learnt]}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow
def test_a_command_of_the_page_runs(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    assert words[0] == "tilecast"
    assert main(words[1:]) == 0
    output = capsys.readouterr()
    assert "left out" not in output.err
    scored(words[1:], output.out, folder)


def scored(words: list[str], out: str, folder: Path) -> None:
    """Check the output of a command of the page: a recommendation, a forecast for every row, facts with numbers."""
    verb, kind = words[0], words[words.index("-o") + 1] if "-o" in words else "table"
    if verb in ("advise", "sweep") and kind.endswith(".svg"):
        assert (folder / kind).read_text().startswith("<svg")
    elif verb == "scan" and kind == "json":
        jobs = {item["name"]: item for item in json.loads(out)["jobs"]}
        assert jobs["own-script"]["outcome"] == "notRead"
        assert jobs["llama-finetune"]["model"] == jobs["qlora"]["model"] == "llama-3.1-8b"
    elif verb == "scan":
        assert out.startswith("JOB") and "team-a/llama-finetune" in out
    elif verb == "trace":
        assert json.loads((folder / kind).read_text())["operators"]
    elif words[:2] == ["validate", "transfer"]:
        raw, corrected = (float(cell.rstrip("%")) for cell in out.splitlines()[-1].split()[5:7])
        assert corrected < raw
    elif verb == "queue":
        assert "llama-7b-pretrain" in out
        assert "x  " not in out
    elif verb == "fits":
        assert "fits" in out or "tight" in out
    elif verb == "validate" and kind == "html":
        assert "2 rows, 2 predicted, 0 refused" in out and out.endswith("</html>\n")
    elif verb == "validate":
        rows = list(csv.DictReader((folder / "forecasts.csv").open()))
        assert f"{len(rows)} rows, {len(rows)} predicted, 0 refused" in out or words[1] != "runs"
        assert len(rows) == (2 if words[1] == "runs" else 1)
        column = "predicted_s" if words[1] == "runs" else "predicted_us"
        assert all(float(row[column]) > 0 and not row["reason"] for row in rows)
    elif verb == "calibrate":
        fitted = tomllib.loads((folder / kind).read_text())
        assert fitted["name"] == "ours"
        errors = [[float(cell.rstrip("%")) for cell in line.split()[-3:-1]] for line in out.splitlines() if "%" in line]
        assert errors
        assert all(after <= before for before, after in errors)
    elif kind == "html":
        assert "Recommendation" in out or "step" in out
        assert out.endswith("</html>\n")
    elif kind == "json":
        document = json.loads(out)
        assert document["recommendation"]["stepSeconds"]["target"] > 0 if verb == "advise" else document["facts"]
    elif kind == "csv":
        rows = list(csv.DictReader(io.StringIO(out)))
        assert rows
        assert all(float(row["stepSeconds"]) > 0 for row in rows)
    elif "--launch" in words:
        assert "\n# gpt2-xl on a100-80, 1x8 GPUs" in out
        assert "torchrun" in out
    elif kind in DIALECTS:
        assert "one of these, best first" in out
    elif verb == "advise":
        assert any(line.startswith(">") for line in out.splitlines())
        assert "How sure?" in out
    elif verb == "sweep":
        assert re.search(r"\d(\.\d+)?m?s\b", out)
    elif verb == "learning":
        assert len(out.splitlines()) == 2 and "+20%" in out
    else:
        assert out.strip()


def test_the_page_knows_every_verb_and_every_number_of_a_pool() -> None:
    shown = {shlex.split(command)[1] for command in COMMANDS}
    # Servers run until they are stopped.
    assert shown == set(VERBS) - {"mcp", "web"} and "`tilecast web`" in PAGE
    for field in FIELDS:
        assert field in PAGE or field.replace("interNode", "intraNode") in PAGE, field


class _Terminal:
    """Standard error that claims to be a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_a_bar_shows_late_and_to_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(track_progress(range(3), "things")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert list(track_progress(range(3), "things")) == [0, 1, 2]
    assert "things" not in terminal.text
    monkeypatch.setattr("tilecast.cli.progress.PATIENCE_S", -1.0)
    assert list(track_progress(range(3), "things")) == [0, 1, 2]
    assert "things" in terminal.text


def test_the_runs_table_of_the_page_is_scored_in_full(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "runs", "runs.csv"]) == 0
    assert "2 rows, 2 predicted, 0 refused" in capsys.readouterr().out
    assert main(["calibrate", "runs.csv"]) == 0
    assert "2 measured runs" in capsys.readouterr().out
