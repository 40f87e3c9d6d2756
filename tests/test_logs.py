"""Steps in the logs of training programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.cli import main
from tilecast.inputs.logs import MAX_BYTES, find_logged_step, read_logged_step
from tilecast.spec import SpecError

START = datetime(2026, 11, 25, 8, 0, 0)


def _stamp(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]


LINES: dict[str, Callable[[int, float, float], str]] = {
    "Megatron-LM": lambda step, seconds, now: (
        f" [2026-11-25 08:00:00] iteration {step:8d}/  500000 | consumed samples: {step * 256:12d} | elapsed time per "
        f"iteration (ms): {seconds * 1e3:.1f} | throughput per GPU (TFLOP/s/GPU): 401.2 | learning rate: 1.5E-04 |"
    ),
    "MaxText": lambda step, seconds, now: (
        f"completed step: {step}, seconds: {seconds:.3f}, TFLOP/s/device: 392.1, Tokens/s/device: 8123.4, loss: 7.1"
    ),
    "DeepSpeed": lambda step, seconds, now: (
        f"steps: {step} loss: 8.1234 iter time (s): {seconds:.3f} samples/sec: 12.970"
    ),
    "NeMo": lambda step, seconds, now: (
        f"Training epoch 0, iteration {step}/999 | lr: 1e-05 | global_batch_size: 256 | global_step: {step} | "
        f"reduced_train_loss: 8.1 | train_step_timing in s: {seconds:.4g}"
    ),
    "nanoGPT": lambda step, seconds, now: f"iter {step}: loss 3.2811, time {seconds * 1e3:.2f}ms, mfu 41.20%",
    "torchtitan": lambda step, seconds, now: (
        f"[rank0]:[titan] {_stamp(now)} - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss:  8.2  "
        "memory: 41.2GiB(52%)  tps: 6,012  tflops: 309.1  mfu: 31.2%"
    ),
    "tqdm": lambda step, seconds, now: f" 10%|#         | {step}/1000 [00:12<10:12,  {seconds:.2f}s/it]",
}


def _log(name: str, seconds: float, *, ranks: int = 1, steps: int = 40, seed: int = 0) -> list[str]:
    """Return a log with a slow start, two pauses, a restart and lines of other kinds."""
    drawn, lines, now = np.random.default_rng(seed), ["loading checkpoint", "step 0: train loss 10.9"], 0.0
    for step in [*range(1, steps), *range(steps - 5, steps + 20)]:
        took = seconds * drawn.uniform(0.995, 1.005) * (30 if step == 1 else 8 if step in (17, 29) else 1)
        now += took
        lines += [LINES[name](step, took, now)] * ranks
        if step % 7 == 0:
            lines.append("validation loss at iteration 7 | lm loss value: 3.1")
    return lines


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seconds", [0.31, 4.27, 31.5])
def test_the_median_step_of_every_format_is_found(name: str, ranks: int, seconds: float) -> None:
    found = find_logged_step(_log(name, seconds, ranks=ranks))
    assert found is not None and found.format == name
    assert found.seconds == pytest.approx(seconds, rel=0.03 if name == "tqdm" else 0.01)
    assert found.steps >= 30


def test_other_forms_of_a_line_are_read() -> None:
    karpathy = [f"step {step:5d} | loss: 3.2 | norm: 0.3 | dt: 340.21ms | tok/sec: 1541122.90" for step in range(20)]
    found = find_logged_step(karpathy)
    assert found is not None and found.seconds == pytest.approx(0.34021)
    fast = find_logged_step([f"{step}/1000 [00:01<00:20, 4.00it/s]" for step in range(20)])
    assert fast is not None and fast.seconds == pytest.approx(0.25)


def test_a_finished_run_of_transformers_has_a_mean_step(tmp_path: Path) -> None:
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"log_history": [{"loss": 2.1, "step": 50}, {"train_runtime": 300.0, "step": 200}]}))
    assert read_logged_step(str(file)).seconds == 1.5


@pytest.mark.parametrize("name", LINES)
def test_a_log_with_hardly_a_step_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "short.log"
    file.write_text("\n".join(LINES[name](step, 1.0, float(step)) for step in (1, 2)))
    with pytest.raises(SpecError, match="shows no steps"):
        read_logged_step(str(file))


def test_what_is_no_log_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "noise.log").write_bytes(bytes(range(256)) * 64)
    (tmp_path / "line.log").write_text("x" * 2**20)
    (tmp_path / "state.json").write_text("{")
    large = tmp_path / "large.log"
    large.touch()
    with large.open("r+b") as handle:
        handle.truncate(MAX_BYTES + 1)
    refused = {
        "noise.log": "no steps",
        "line.log": "no steps",
        "state.json": "no steps",
        "large.log": "more than",
        "none.log": "cannot be read",
    }
    for name, words in refused.items():
        with pytest.raises(SpecError, match=words):
            read_logged_step(str(tmp_path / name))


@given(st.lists(st.text(max_size=200), max_size=20))
def test_no_text_breaks_the_reader(lines: list[str]) -> None:
    found = find_logged_step(lines)
    assert found is None or found.seconds > 0


def test_a_log_corrects_the_forecast_as_its_seconds_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.log"
    file.write_text("\n".join(LINES["Megatron-LM"](step, 0.9, 0.0) for step in range(1, 50)))
    job = ["advise", "gpt2-xl", "--seq", "1024", "--batch", "64", "--gpus", "h100-sxm:8", "-o", "csv"]
    assert main([*job, "--measured", f"a100-80:8=@{file}"]) == 0
    by_log = capsys.readouterr().out
    assert main([*job, "--measured", "a100-80:8=0.9s"]) == 0
    assert by_log == capsys.readouterr().out
    plan = ["--plan", "zero1-dp8,mb8", "-o", "table"]
    assert main([*job[:-2], "--gpus", "a100-80:8", *plan, "--measured", f"@{file}"]) == 0
    assert "900ms" in capsys.readouterr().out


def test_a_time_of_no_calendar_is_skipped() -> None:
    lines = ["2026-13-41 10:00:01 step: 0 x", *(LINES["torchtitan"](step, 1.0, float(step)) for step in range(1, 9))]
    found = find_logged_step(lines)
    assert found is not None and found.seconds == pytest.approx(1.0)


def test_a_folder_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is no file"):
        read_logged_step(str(tmp_path))
