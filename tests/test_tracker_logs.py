"""Steps in what experiment trackers recorded: TensorBoard, Weights & Biases, MLflow, Lightning and Transformers."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.logs import read_log
from tilecast.logs.formats import mlflow, mlflow_database
from tilecast.logs.protobuf import MessageError, iterate_fields
from tilecast.logs.text import iterate_lines
from tilecast.spec import SpecError

Point = tuple[int, float, float, bool]
"""Step, its seconds, when it was recorded, and whether an evaluation preceded it."""


def _run(seconds: float, seed: int = 0) -> list[Point]:
    """Return the steps of a run with a slow start, evaluations, outliers and a restart, in which two ranks write."""
    drawn, now, points = np.random.default_rng(seed), 1.7e9, list[Point]()
    for step in [*range(1, 61), *range(41, 141)]:
        is_paused = step % 4 == 0
        took = seconds * drawn.uniform(0.995, 1.005) * (20 if step == 1 else 7 if is_paused or step in (50, 93) else 1)
        now += took
        points += [(step, took, now, is_paused)] * 2
    return points


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _message(number: int, content: bytes | str) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _event(step: int, time: float, tag: str, value: float) -> bytes:
    scalar = _message(1, tag) + b"\x15" + struct.pack("<f", value)
    event = b"\x09" + struct.pack("<d", time) + b"\x10" + _varint(step) + _message(5, _message(1, scalar))
    return struct.pack("<QI", len(event), 0) + event + bytes(4)


def _write_tensorboard(folder: Path, points: Sequence[Point], tag: str = "train/loss") -> Path:
    data = b""
    for step, seconds, time, is_paused in points:
        data += _event(step, time, "eval/loss", 1.0) if is_paused else b""
        data += _event(step, time, tag, seconds) + _event(step, time, "train/lr", 0.1)
    file = folder / "events.out.tfevents.1795778505.node.7.0"
    file.write_bytes(data)
    return file


def _blocks(records: Sequence[bytes]) -> bytes:
    """Return the records as LevelDB writes them, in blocks of 32 KiB."""
    data = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    for record in records:
        rest, is_first = record, True
        while rest or is_first:
            room = 32768 - len(data) % 32768
            if room < 7:
                data += bytes(room)
                continue
            piece, rest = rest[: room - 7], rest[room - 7 :]
            kind = (1 if is_first else 4) if not rest else (2 if is_first else 3)
            data += struct.pack("<IHB", 0, len(piece), kind) + piece
            is_first = False
    return data


def _history(values: dict[str, object]) -> bytes:
    items = b"".join(_message(1, _message(2, key) + _message(16, json.dumps(value))) for key, value in values.items())
    return _message(2, items)


def _write_wandb(folder: Path, points: Sequence[Point]) -> Path:
    config = {"world_size": 8, "tensor_model_parallel_size": 2, "micro_batch_size": 1}
    items = b"".join(_message(1, _message(1, key) + _message(16, json.dumps(value))) for key, value in config.items())
    records = [_message(17, _message(4, items))]
    for row, (step, _, time, is_paused) in enumerate(points):
        if is_paused:
            records.append(_history({"eval/loss": 2.0, "_step": row, "_timestamp": time}))
        values = {"train/loss": 1.0, "text": "x" * 3000, "train/global_step": step, "_step": row, "_timestamp": time}
        records.append(_history(values))
    run = folder / "offline-run-20261125_080000-abcd1234"
    run.mkdir()
    (run / "run-abcd1234.wandb").write_bytes(_blocks(records))
    return folder


def _write_mlflow(folder: Path, points: Sequence[Point]) -> Path:
    run = folder / "mlruns" / "0" / "13130a9c8d1c40b4a5645cee09714f06"
    for name in ("metrics", "params"):
        (run / name).mkdir(parents=True)
    (run / "meta.yaml").write_text("run_id: 13130a9c8d1c40b4a5645cee09714f06\n")
    (run / "params" / "world_size").write_text("8")
    losses = [f"{int(time * 1000)} 1.0 {step}" for step, _, time, _ in points]
    evaluated = [f"{int(time * 1000) - 1} 1.0 {step}" for step, _, time, is_paused in points if is_paused]
    (run / "metrics" / "loss").write_text("\n".join(losses))
    (run / "metrics" / "eval_loss").write_text("\n".join(evaluated))
    return folder / "mlruns"


MLFLOW_TABLES = """
CREATE TABLE metrics (
    key VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT NOT NULL, run_uuid VARCHAR(32) NOT NULL,
    step BIGINT DEFAULT '0' NOT NULL, is_nan BOOLEAN DEFAULT '0' NOT NULL,
    CONSTRAINT metric_pk PRIMARY KEY (key, timestamp, step, run_uuid, value, is_nan)
);
CREATE TABLE params (key VARCHAR(250) NOT NULL, value VARCHAR(8000) NOT NULL, run_uuid VARCHAR(32) NOT NULL);
"""
"""The tables that are read, as MLflow 3.18 makes them."""


def _write_mlflow_database(
    folder: Path, points: Sequence[Point], run: str = "13130a9c8d1c40b4a5645cee09714f06"
) -> Path:
    file = folder / "mlflow.db"
    is_new = not file.exists()
    with closing(sqlite3.connect(file)) as connection:
        if is_new:
            connection.executescript(MLFLOW_TABLES)
        rows = [("loss", 1.0, int(time * 1000) + row % 2, run, step) for row, (step, _, time, _) in enumerate(points)]
        rows += [("eval_loss", 1.0, at - 1, run, step) for _, _, at, _, step in rows if step % 4 == 0]
        rows += [("system/cpu", 1.0, at + number, run, 0) for _, _, at, _, _ in rows for number in range(3)]
        connection.executemany("INSERT OR IGNORE INTO metrics VALUES (?, ?, ?, ?, ?, 0)", rows)
        connection.execute("INSERT INTO params VALUES ('world_size', '8', ?)", (run,))
        connection.commit()
    return file


def _write_csv(folder: Path, points: Sequence[Point]) -> Path:
    lines = ["epoch,step,train_loss,train|time,val_loss"]
    for step, _, time, is_paused in points:
        lines += [f"0,{step},,,3.1"] if is_paused else []
        lines.append(f"0,{step},2.5,{time:.3f},")
    file = folder / "metrics.csv"
    file.write_text("\n".join(lines))
    return file


WRITERS: dict[str, Callable[[Path, Sequence[Point]], Path]] = {
    "TensorBoard": _write_tensorboard,
    "Weights & Biases": _write_wandb,
    "MLflow": _write_mlflow,
    "MLflow database": _write_mlflow_database,
    "Lightning CSV": _write_csv,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("seconds", [0.35, 4.2])
def test_the_median_step_of_every_tracker_is_found(name: str, seconds: float, tmp_path: Path) -> None:
    found = read_log(str(WRITERS[name](tmp_path, _run(seconds))))
    assert found.format == name
    assert found.seconds == pytest.approx(seconds, rel=0.01)
    assert found.steps > 50


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_leads_to_its_run(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path, _run(1.0))
    assert read_log(str(tmp_path)).format == name


def test_a_metric_of_the_step_comes_before_times(tmp_path: Path) -> None:
    points = [(step, 0.8, 60.0 * step, False) for step in range(50)]
    assert read_log(str(_write_tensorboard(tmp_path, points, "iteration-time"))).seconds == pytest.approx(0.8)


def test_the_arguments_of_a_run_are_read(tmp_path: Path) -> None:
    for name in ("Weights & Biases", "MLflow", "MLflow database"):
        (folder := tmp_path / name).mkdir()
        found = read_log(str(WRITERS[name](folder, _run(1.0))))
        assert found.gpus == 8
    assert read_log(str(tmp_path / "Weights & Biases")).plan is not None


def _state(entries: Sequence[dict[str, float]]) -> str:
    return json.dumps({"global_step": 200, "log_history": list(entries)})


def test_a_run_of_transformers_is_measured_without_its_evaluations(tmp_path: Path) -> None:
    file = tmp_path / "trainer_state.json"
    losses = [{"loss": 2.0, "step": step, "epoch": 0.1} for step in range(10, 210, 10)]
    evaluated = [{"eval_loss": 2.0, "eval_runtime": 30.0, "step": step} for step in (100, 200)]
    file.write_text(_state([*losses, *evaluated, {"train_runtime": 360.0, "train_loss": 2.0, "step": 200}]))
    assert read_log(str(file)).seconds == 1.5
    before = {"train_runtime": 9000.0, "step": 100}
    file.write_text(_state([before, *losses[10:], {"train_runtime": 150.0, "step": 200}]))
    assert read_log(str(file)).seconds == 1.5
    file.write_text(_state(losses))
    with pytest.raises(SpecError, match="no steps of Transformers"):
        read_log(str(file))


def test_a_folder_of_several_runs_names_one(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        _write_csv(tmp_path / name, _run(1.0))
    with pytest.raises(SpecError, match=r"has 2 runs of Lightning CSV; .*second/metrics.csv"):
        read_log(str(tmp_path))


def test_a_csv_without_times_says_so(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("epoch,step,train_loss\n0,1,2.5\n")
    with pytest.raises(SpecError, match="no column with a time of a step"):
        read_log(str(file))


@pytest.mark.parametrize("column", ["train|time", "train/time"])
def test_the_clock_of_lightning_is_that_of_its_separator(column: str, tmp_path: Path) -> None:
    """Lightning 2.6 separates by a slash. It writes the clock without the rows that only an evaluation has."""
    beside = column.replace("time", "batches")
    lines = [f"epoch,step,{beside},{column},train_loss,validate/time"]
    for step, _, time, is_paused in _run(0.4):
        lines += [f"0,{step},{step},{time:.4f},,", f"0,{step},,,2.5,"]
        lines += [f",{step},,,,0.5"] if is_paused else []
    (file := tmp_path / "metrics.csv").write_text("\n".join(lines))
    assert read_log(str(file)).seconds == pytest.approx(0.4, rel=0.01)


def test_a_metric_named_like_the_clock_of_lightning_alone_is_no_clock(tmp_path: Path) -> None:
    lines = ["step,train/time,loss", *(f"{step},{0.5 + step % 3 / 100},1" for step in range(50))]
    (file := tmp_path / "metrics.csv").write_text("\n".join(lines))
    with pytest.raises(SpecError, match="no column with a time of a step"):
        read_log(str(file))


def test_links_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    _write_csv(tmp_path / "there", _run(1.0))
    (here := tmp_path / "here").mkdir()
    (here / "metrics.csv").symlink_to(tmp_path / "there" / "metrics.csv")
    with pytest.raises(SpecError, match="without a run"):
        read_log(str(here))


def _broken(data: bytes, seed: int) -> Iterator[bytes]:
    drawn = np.random.default_rng(seed)
    for _ in range(40):
        copy = bytearray(data[: drawn.integers(len(data))])
        for at in drawn.integers(max(len(copy), 1), size=20):
            copy[at : at + 1] = bytes([drawn.integers(256)])
        yield bytes(copy)


@pytest.mark.parametrize("name", ["TensorBoard", "Weights & Biases", "MLflow database"])
def test_broken_files_are_refused_or_read(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path, _run(1.0)[:40])
    (file,) = (item for item in tmp_path.rglob("*") if item.is_file())
    for data in _broken(file.read_bytes(), 3):
        file.write_bytes(data)
        try:
            assert read_log(str(file)).seconds > 0
        except SpecError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("line", ["9" * 400 + " 1.0 7", "1700000000000 1.0 " + "9" * 400, "1700000000000 nan 7"])
@pytest.mark.parametrize("name", ["loss", "step"])
def test_numbers_that_are_none_of_a_step_are_skipped(name: str, line: str, tmp_path: Path) -> None:
    folder = _write_mlflow(tmp_path, _run(1.0))
    (loss,) = folder.rglob("loss")
    file = loss.with_name(name)
    file.write_text(loss.read_text().replace(" 1.0 ", " 7 ") + "\n" + line)
    with suppress(SpecError):
        assert read_log(str(folder)).seconds > 0
    (file := tmp_path / "trainer_state.json").write_text(_state([{"train_runtime": 100.0, "step": 10**400}]))
    with pytest.raises(SpecError, match="no steps of Transformers"):
        read_log(str(file))


def test_empty_pieces_of_a_record_take_no_time(tmp_path: Path) -> None:
    (file := tmp_path / "run-x.wandb").write_bytes(
        b":W&B\0\0\0" + struct.pack("<IHB", 0, 0, 2) + (struct.pack("<IHB", 0, 0, 3) * 4679 + bytes(8)) * 8
    )
    start = process_time()
    with pytest.raises(SpecError, match="no steps"):
        read_log(str(file))
    assert process_time() - start < 2


@given(st.binary(max_size=64))
def test_any_bytes_are_fields_or_an_error(data: bytes) -> None:
    with suppress(MessageError):
        assert all(number >= 0 for number, _, _ in iterate_fields(data))


def test_points_of_mlflow_are_bounded_over_all_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _write_mlflow(tmp_path, _run(1.0))
    (loss,) = folder.rglob("loss")
    for number in range(20):
        loss.with_name(f"loss_{number}").write_text(loss.read_text())
    lines: list[str] = []

    def counted(path: Path) -> Iterator[str]:
        for line in iterate_lines(path):
            lines.append(line)
            yield line

    assert read_log(str(folder)).seconds == pytest.approx(1.0, rel=0.01)
    monkeypatch.setattr(mlflow, "MAX_POINTS", 440, raising=False)
    monkeypatch.setattr(mlflow, "iterate_lines", counted)
    assert read_log(str(folder)).seconds == pytest.approx(1.0, rel=0.01)
    assert len(lines) <= 440 + 1, "a line more for the parameter"


def test_a_run_of_a_database_is_named_by_its_id(tmp_path: Path) -> None:
    _write_mlflow_database(tmp_path, _run(1.0), "a" * 32)
    file = _write_mlflow_database(tmp_path, _run(2.0, seed=1), "b" * 32)
    with pytest.raises(
        SpecError, match=f"mlflow.db: has 2 runs; name one of them, for instance .*mlflow.db/{'b' * 32}$"
    ):
        read_log(str(file))
    assert read_log(str(file / ("a" * 32))).seconds == pytest.approx(1.0, rel=0.01)
    assert read_log(str(file / ("b" * 32))).seconds == pytest.approx(2.0, rel=0.01)
    with pytest.raises(SpecError, match=r"mlflow\.db/c: is no run with metrics in this database; name one of its runs"):
        read_log(str(file / "c"))


ENDLESS_VIEW = """
DROP TABLE metrics;
CREATE VIEW metrics AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n;
"""


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        ("DROP TABLE metrics", "without the metrics of MLflow"),
        (ENDLESS_VIEW, "without the metrics of MLflow"),
        ("DROP TABLE metrics; CREATE TABLE metrics (a)", "no such column"),
        ("INSERT INTO metrics VALUES ('loss', 'x', 'y', 'r', x'00', 0)", "or too few"),
        ("INSERT INTO metrics VALUES (zeroblob(2000000), 1, 1, 'r', 1, 0)", "cannot be read"),
    ],
)
def test_another_database_is_refused_in_one_line(statements: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(MLFLOW_TABLES)
        connection.executescript(statements)
    with pytest.raises(SpecError, match=problem) as caught:
        read_log(str(file))
    assert "\n" not in str(caught.value)


def test_no_run_breaks_the_line_of_an_error(tmp_path: Path) -> None:
    _write_mlflow_database(tmp_path, _run(1.0), "a")
    _write_mlflow_database(tmp_path, _run(1.0), "b")
    file = _write_mlflow_database(tmp_path, _run(1.0), "c\nd")
    with pytest.raises(SpecError, match=r"mlflow\.db/b$") as caught:
        read_log(str(file))
    assert "\n" not in str(caught.value)


def test_the_work_that_a_database_takes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _write_mlflow_database(tmp_path, _run(1.0))
    monkeypatch.setattr(mlflow_database, "MAX_INSTRUCTIONS", 1000)
    monkeypatch.setattr(mlflow_database, "_CHUNK", 100)
    with pytest.raises(SpecError, match="cannot be read as a database of MLflow; interrupted"):
        read_log(str(file))
