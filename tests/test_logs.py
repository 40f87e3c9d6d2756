"""Steps in the logs of training programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.cli import main
from tilecast.inputs.measurements import parse_measurements
from tilecast.logs import MAX_BYTES, TEXT_FORMATS, LoggedRun, find_logged_run, read_log
from tilecast.spec import PartialPlan, SpecError
from tilecast.validate.runs import read_table

START = datetime(2026, 11, 25, 8, 0, 0)


def _find(lines: list[str]) -> LoggedRun | None:
    return find_logged_run(lines, TEXT_FORMATS)


def _stamp(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]


def _rate(seconds: float) -> str:
    """Return a rate as tqdm writes it."""
    return f"{seconds:.2f}s/it" if seconds > 1 else f"{1 / seconds:.2f}it/s"


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
    "torchtune": lambda step, seconds, now: (
        f"1|{step}|Loss: 1.2345678:  5%|5         | {step}/1000 [00:31<09:24,  {_rate(seconds)}]"
    ),
    "tqdm": lambda step, seconds, now: f" 10%|#         | {step}/1000 [00:12<10:12,  {_rate(seconds)}]",
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
    found = _find(_log(name, seconds, ranks=ranks))
    assert found is not None and found.format == name
    assert found.seconds == pytest.approx(seconds, rel=0.01)
    assert found.steps >= 30


def test_other_forms_of_a_line_are_read() -> None:
    karpathy = [f"step {step:5d} | loss: 3.2 | norm: 0.3 | dt: 340.21ms | tok/sec: 1541122.90" for step in range(20)]
    found = _find(karpathy)
    assert found is not None and found.seconds == pytest.approx(0.34021)
    fast = _find([f"{step}/1000 [00:01<00:20, 4.00it/s]" for step in range(20)])
    assert fast is not None and fast.seconds == pytest.approx(0.25)


def test_a_finished_run_of_transformers_has_a_mean_step(tmp_path: Path) -> None:
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"log_history": [{"loss": 2.1, "step": 50}, {"train_runtime": 300.0, "step": 200}]}))
    assert read_log(str(file)).seconds == 1.5


@pytest.mark.parametrize("name", LINES)
def test_a_log_with_hardly_a_step_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "short.log"
    file.write_text("\n".join(LINES[name](step, 1.0, float(step)) for step in (1, 2)))
    with pytest.raises(SpecError, match="shows no steps"):
        read_log(str(file))


def test_what_is_no_log_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "noise.log").write_bytes(bytes(range(256)) * 64)
    (tmp_path / "line.log").write_text("x" * 2**20)
    (tmp_path / "state.json").write_text("{")
    large = tmp_path / "large.log"
    large.touch()
    with large.open("r+b") as handle:
        handle.truncate(MAX_BYTES + 1)
    refused = {
        "noise.log": "binary file",
        "line.log": "no steps",
        "state.json": "no steps",
        "large.log": "more than",
        "none.log": "cannot be read",
    }
    for name, words in refused.items():
        with pytest.raises(SpecError, match=words):
            read_log(str(tmp_path / name))


@given(st.lists(st.text(max_size=200), max_size=20))
def test_no_text_breaks_the_reader(lines: list[str]) -> None:
    found = _find(lines)
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
    found = _find(lines)
    assert found is not None and found.seconds == pytest.approx(1.0)


def test_a_folder_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is a folder without a run"):
        read_log(str(tmp_path))


def test_the_timer_of_deepspeed_gives_a_step_by_its_times() -> None:
    lines = [
        f"[{_stamp(2.5 * step)}] [INFO] [timer.py:264:stop] epoch=0/micro_step={step}/global_step={step}, "
        "RunningAvgSamplesPerSec=12.9, CurrSamplesPerSec=13.3, MemAllocated=4.34GB, MaxMemAllocated=5.67GB"
        for step in range(10, 400, 10)
    ]
    found = _find(lines)
    assert found is not None and (found.format, found.seconds) == ("DeepSpeed", pytest.approx(2.5, rel=0.01))


def test_times_in_whole_seconds_give_a_step_below_a_second() -> None:
    lines = [f"[titan] {_stamp(0.31 * step)[:-4]} - root - INFO - step: {step}  loss: 8.2" for step in range(1, 1500)]
    found = _find(lines)
    assert found is not None and found.seconds == pytest.approx(0.31, rel=0.01)


def test_two_ranks_that_buffer_their_lines_are_one_run() -> None:
    """Each rank writes fifty lines at once, and the job restarts twice."""
    for name in LINES:
        lines, now = list[str](), 0.0
        for start in (1, 101, 61):
            times = {step: now + 2.0 * (step - start) for step in range(start, start + 150)}
            now += 500.0
            for block in range(start, start + 150, 50):
                lines += [LINES[name](step, 2.0, times[step]) for step in range(block, block + 50)] * 2
        found = _find(lines)
        assert found is not None and found.seconds == pytest.approx(2.0, rel=0.01), name


@pytest.mark.parametrize("name", ["Megatron-LM", "torchtitan", "nanoGPT"])
def test_evaluations_and_checkpoints_before_most_steps_are_cut(name: str) -> None:
    lines, now = list[str](), 0.0
    for step in range(1, 61):
        is_paused = step % 3 != 0
        now += (took := 9.0 if is_paused else 2.0)
        if is_paused:
            lines.append("Saving the checkpoint (or staging if async is enabled)." if step % 2 else "validation: 3.1")
        lines.append(LINES[name](step, took, now))
    found = _find(lines)
    assert found is not None and found.seconds == pytest.approx(2.0)


def test_bars_of_other_loops_do_not_count() -> None:
    lines = [f"Tokenizing: 10%|  | {step}/90000 [00:01<00:20, 5000.00it/s]" for step in range(0, 90000, 1000)]
    lines += [f"{step}/1000 [00:01<00:20, 2.50s/it]" for step in range(1, 300)]
    lines += [f"{step}/120 [00:01<00:20, 8.00it/s]" for step in range(1, 120)]
    found = _find(lines)
    assert found is not None and found.seconds == 2.5


MEGATRON = """using world size: 16, data-parallel size: 4, context-parallel size: 1, tensor-model-parallel size: 2, \
pipeline-model-parallel size: 2
------------------------ arguments ------------------------
  context_parallel_size ........................... 1
  micro_batch_size ................................ 2
  pipeline_model_parallel_size .................... 2
  sequence_parallel ............................... True
  tensor_model_parallel_size ...................... 2
  use_distributed_optimizer ....................... True
  world_size ...................................... 16
"""
TITAN = """[titan] 2026-11-25 08:00:00,001 - root - INFO - {mesh}
[titan] 2026-11-25 08:00:00,002 - root - INFO - CUDA capacity: NVIDIA H100 80GB HBM3 with 79.11GiB memory
[titan] 2026-11-25 08:00:00,003 - root - INFO - Trainer is initialized with local batch size 4, global batch size 64
"""
MESHES = [
    "Building 3-D device mesh with ['pp', 'dp_shard', 'tp'], [2, 4, 2]",
    "Building device mesh with parallelism: pp=2, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1, etp=1",
]


def test_gpus_and_plan_are_read_from_the_arguments_of_megatron() -> None:
    found = _find([*MEGATRON.splitlines(), *_log("Megatron-LM", 1.0)])
    assert found is not None and found.gpus == 16
    assert found.plan == PartialPlan(tensor=2, pipeline=2, micro_batch=2, sequence_parallel=True, zero_stage=1)


@pytest.mark.parametrize("mesh", MESHES)
def test_gpus_and_plan_are_read_from_the_mesh_of_torchtitan(mesh: str) -> None:
    found = _find([*TITAN.format(mesh=mesh).splitlines(), *_log("torchtitan", 1.0)])
    assert found is not None and (found.gpus, found.gpu) == (16, "NVIDIA H100 80GB HBM3")
    assert found.plan == PartialPlan(tensor=2, pipeline=2, micro_batch=4, zero_stage=3)


def test_what_a_log_says_of_gpus_and_plan_completes_the_text(tmp_path: Path) -> None:
    megatron, titan = tmp_path / "megatron.log", tmp_path / "titan.log"
    megatron.write_text("\n".join([MEGATRON, *_log("Megatron-LM", 1.0)]))
    titan.write_text("\n".join([TITAN.format(mesh=MESHES[1]), *_log("torchtitan", 1.0)]))
    _, (run,) = parse_measurements([f"a100-80=@{megatron}"])
    assert (run.pool, run.gpus, run.plan and run.plan.tensor) == ("a100-80", 16, 2)
    _, (run,) = parse_measurements([f"a100-80:16/tp=4=@{megatron}"])
    assert run.plan == PartialPlan(tensor=4)
    seconds, (run,) = parse_measurements([f"@{titan}"])
    assert (seconds, run.pool, run.gpus) == (None, "NVIDIA H100 80GB HBM3", 16)
    seconds, runs = parse_measurements([f"@{titan}"], has_offer=True)
    assert (seconds, runs) == (pytest.approx(1.0, rel=0.01), [])
    with pytest.raises(SpecError, match="ran on 16 GPUs, not 8"):
        parse_measurements([f"a100-80:8=@{megatron}"])


def test_a_log_without_its_number_of_gpus_needs_one(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_text("\n".join(_log("nanoGPT", 1.0)))
    with pytest.raises(SpecError, match="does not say its number of GPUs"):
        parse_measurements([f"a100-80=@{file}"])
    with pytest.raises(SpecError, match="does not say its GPUs"):
        parse_measurements([f"@{file}", "a100-80:8=1s"])


def test_a_runs_table_may_name_logs(tmp_path: Path) -> None:
    (tmp_path / "titan.log").write_text("\n".join([TITAN.format(mesh=MESHES[0]), *_log("torchtitan", 1.5)]))
    table = tmp_path / "runs.csv"
    head = "id,gpu,n_gpus,precision,model_name,seq_len,global_batch,step_time_s_derived,tp,dp,pp\n"
    table.write_text(f"{head}monday,,,bf16,llama-2-7b,4096,64,@titan.log,,,\n")
    (row,) = read_table(table)
    assert float(row["step_time_s_derived"]) == pytest.approx(1.5, rel=0.01)
    filled = [row[name] for name in ("gpu", "n_gpus", "tp", "dp", "pp")]
    assert filled == ["NVIDIA H100 80GB HBM3", "16", "2", "4", "2"]
    assert main(["calibrate", str(table)]) == 0
    table.write_text(f"{head}monday,,8,bf16,llama-2-7b,4096,64,@titan.log,,,\n")
    with pytest.raises(SpecError, match="ran on 16 GPUs"):
        read_table(table)
    table.write_text(f"{head}monday,,8,bf16,llama-2-7b,4096,64,@../titan.log,,,\n")
    with pytest.raises(SpecError, match="outside the folder"):
        read_table(table)


def test_errors_about_logs_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary.log").write_bytes(b"\x7fELF\0" + bytes(1000))
    (tmp_path / "line.log").write_text("x" * 2**20)
    (tmp_path / "empty.log").write_text("")
    (tmp_path / "folder").mkdir()
    for name in ("binary.log", "line.log", "empty.log", "folder", "none.log"):
        job = ["advise", "gpt2-xl", "--seq", "1024", "--batch", "64", "--gpus", "h100-sxm:8"]
        assert main([*job, "--measured", f"a100-80:8=@{tmp_path / name}"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and name in error and "; " in error


def test_a_long_line_beside_steps_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    lines = _log("Megatron-LM", 1.0)
    file.write_text("\n".join([*lines[:30], "y" * 2**21, *lines[30:]]))
    assert read_log(str(file)).seconds == pytest.approx(1.0, rel=0.01)


def _unbounded(parsed: object) -> list[object]:
    """Return the repeats without an upper bound in a parsed regular expression."""
    found: list[object] = []
    for kind, value in parsed:  # type: ignore[attr-defined]
        if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            found += [value] if value[1] == _constants.MAXREPEAT else _unbounded(value[2])
        elif kind is _constants.SUBPATTERN:
            found += _unbounded(value[-1])
        elif kind is _constants.BRANCH:
            found += [one for part in value[1] for one in _unbounded(part)]
    return found


@pytest.mark.parametrize("name", LINES)
def test_patterns_of_lines_look_at_a_bounded_text_behind_each_place(name: str) -> None:
    """A repeat without a bound reads a line to its end from every place where it begins, which is quadratic."""
    assert _unbounded(_parser.parse("(a.*?b|c)(?:d+)")), "the check sees both"
    (item,) = (item for item in TEXT_FORMATS if item.name == name)
    for pattern in (*item.patterns, *item.facts, *([item.argument] if item.argument else [])):
        assert _unbounded(_parser.parse(pattern.pattern)) == [], pattern.pattern
