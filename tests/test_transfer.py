"""Corrections from a job's own run for its forecasts elsewhere: laws, and results on pairs of measured runs."""

from __future__ import annotations

import csv
import itertools
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.cli import main
from tilecast.learning.job_calibration import (
    MAX_RATIO,
    NO_PARTS,
    SEPARATE_PARTS,
    JobRun,
    JobRuns,
    MeasuredParts,
    RunSetting,
    correct_parts,
    part_deviations,
)
from tilecast.spec import Plan, Plans
from tilecast.validate.transfer import pair_runs
from tilecast_lab.validate import runs as tables
from tilecast_lab.validate import transfer

A100 = RunSetting("a100-80", "ampere", "bf16", 2048, 64)
H100 = replace(A100, gpu="h100-sxm", architecture="hopper")
PLAN = Plan(data=8, zero_stage=3, micro_batch=4, gradient_accumulation=2)

places = st.builds(
    RunSetting,
    st.sampled_from(["a100-40", "a100-80", "h100-sxm"]),
    st.sampled_from(["ampere", "hopper"]),
    st.sampled_from(["bf16", "fp16"]),
    st.sampled_from([1024, 2048]),
    st.sampled_from([32, 64]),
)
plans = st.builds(
    Plan, data=st.sampled_from([1, 8]), tensor=st.sampled_from([1, 2]), micro_batch=st.sampled_from([1, 4])
)
owns = st.builds(JobRun, places, plans, st.floats(-0.9, 0.9), st.integers(1, 30))


def at(runs: JobRuns, place: RunSetting, plan: Plan = PLAN) -> tuple[float, float]:
    ratios, width = runs.find_plan_factors(place, Plans.from_plans(plan), 8)
    assert np.ptp(ratios) == 0, "runs that tell no parts move all of them alike"
    return float(ratios[0, 0]), float(width[0])


def test_without_runs_forecasts_stay() -> None:
    assert at(JobRuns(), H100) == (1.0, 1.0)


@settings(max_examples=100)
@given(owns, places, plans)
def test_one_run_moves_its_job_everywhere_with_the_sign_of_its_deviation(
    own: JobRun, place: RunSetting, plan: Plan
) -> None:
    ratio, width = at(JobRuns((own,)), place, plan)
    moved = -math.log(ratio)
    assert 0 <= moved * math.copysign(1, own.deviation) <= abs(own.deviation) + 1e-12
    assert moved != 0 or abs(own.deviation) < 1e-9
    assert 0 < width < 1


@settings(max_examples=100)
@given(st.lists(owns, min_size=1, max_size=6), places, plans)
@pytest.mark.slow
def test_a_range_never_widens_with_another_run(runs: list[JobRun], place: RunSetting, plan: Plan) -> None:
    widths = [at(JobRuns(tuple(runs[:count])), place, plan)[1] for count in range(len(runs) + 1)]
    assert all(later <= before * (1 + 1e-9) for before, later in itertools.pairwise(widths))


@settings(max_examples=50)
@given(st.lists(owns, min_size=1, max_size=6), places, plans)
@pytest.mark.slow
def test_no_correction_is_larger_than_a_forecast_can_be_off(runs: list[JobRun], place: RunSetting, plan: Plan) -> None:
    assert 1 / MAX_RATIO <= at(JobRuns(tuple(runs)), place, plan)[0] <= MAX_RATIO


def test_a_run_moves_the_more_the_more_it_shares() -> None:
    runs = JobRuns((JobRun(A100, PLAN, 0.3, reports=20),))
    other = replace(PLAN, tensor=2, data=4)
    moved = [
        -math.log(at(runs, *where)[0])
        for where in (
            (replace(H100, sequence_length=8192), other),
            (H100, other),
            (replace(H100, sequence_length=8192), PLAN),
            (H100, PLAN),
            (replace(A100, gpu="a100-40"), PLAN),
            (A100, PLAN),
        )
    ]
    assert moved == sorted(moved)
    assert moved[0] > 0
    assert moved[-1] > 0.9 * 0.3, "its own step is what was measured"


def moved_by(deviation: float, place: RunSetting, plan: Plan) -> float:
    """Return the share of a run's deviation that moves a forecast."""
    return -math.log(at(JobRuns((JobRun(A100, PLAN, deviation),)), place, plan)[0]) / deviation


@pytest.mark.parametrize(
    ("least", "most", "place", "plan"),
    [
        (0.9, 1.0, replace(A100, global_batch=128), replace(PLAN, data=16)),
        (0.75, 0.9, replace(A100, global_batch=256), replace(PLAN, micro_batch=16)),
        (0.5, 0.75, A100, replace(PLAN, data=4, tensor=2)),
        (0.2, 0.5, A100, replace(PLAN, zero_stage=1)),
        (0.5, 0.9, replace(A100, gpu="a100-40"), PLAN),
        (0.0, 0.2, H100, PLAN),
    ],
    ids=["another count", "another micro-batch", "other degrees", "another ZeRO stage", "same architecture", "another"],
)
def test_what_carries_over_is_what_published_pairs_say(
    least: float, most: float, place: RunSetting, plan: Plan
) -> None:
    assert least <= moved_by(0.1, place, plan) <= most


def test_a_very_large_deviation_carries_over_less_but_stays_where_it_was_measured() -> None:
    elsewhere = replace(A100, global_batch=128), replace(PLAN, data=16)
    assert moved_by(0.9, *elsewhere) < 0.6 * moved_by(0.1, *elsewhere)
    assert moved_by(0.9, A100, PLAN) > 0.9


def test_a_run_of_another_workload_moves_a_little_and_narrows_a_little() -> None:
    own = JobRun(A100, PLAN, 0.3, reports=20)
    for place in (A100, H100):
        moved, width = at(JobRuns((replace(own, is_relative=True),)), place)
        in_full, narrow = at(JobRuns((own,)), place)
        # Runs on two architectures have only the job in common, whatever their workloads.
        assert 0 < -math.log(moved) <= -(0.6 if place == A100 else 1.0) * math.log(in_full)
        assert narrow <= width < 1
    _, other = at(JobRuns((replace(own, is_relative=True),)), H100, replace(PLAN, tensor=2, data=4))
    assert other == at(JobRuns((replace(own, is_relative=True),)), H100)[1], "whatever the plan"


@pytest.mark.parametrize("sign", [-1, 1])
def test_runs_of_another_workload_move_nobody_beyond_their_bound(sign: int) -> None:
    run = JobRun(A100, PLAN, sign * 0.7, is_relative=True)
    runs = tuple(replace(run, plan=replace(PLAN, zero_stage=stage, tensor=2, data=4)) for stage in range(4))
    assert abs(math.log(at(JobRuns(runs), A100)[0])) == pytest.approx(math.log(1.1))


PIPELINE = replace(PLAN, data=4, pipeline=2)


def columns(runs: JobRuns, gpus_per_node: int = 8, plan: Plan = PLAN) -> tuple[list[float], float]:
    ratios, width = runs.find_plan_factors(H100, Plans.from_plans(plan), gpus_per_node)
    return ratios[:, 0].tolist(), float(width[0])


def test_a_part_that_a_run_tells_is_corrected_by_its_own_deviation() -> None:
    parts = (("together", 0.0), ("communication", -0.5), ("optimizer", 0.2))
    elsewhere = (("together", -0.3), ("optimizer", 0.2))
    slow = JobRun(A100, PLAN, -0.3, reports=20, gpus_per_node=8, parts=parts, parts_elsewhere=elsewhere)
    silent = replace(slow, parts=(), parts_elsewhere=())
    (together, communication, optimizer), width = columns(JobRuns((slow,)))
    assert optimizer < together == 1 < communication < math.exp(0.5)
    by_step, same = columns(JobRuns((silent,)))
    assert width == same, "ranges do not depend on what runs say"
    assert by_step == [by_step[0]] * 3
    for other, _ in (columns(JobRuns((slow,)), gpus_per_node=4), columns(JobRuns((slow,)), plan=PIPELINE)):
        assert other[0] == other[1] > 1 > other[2], "other links: what it waited for them is of the rest"
    both, _ = columns(JobRuns((slow, replace(silent, place=H100))))
    assert 1 < both[0] < both[1], "what a run does not tell goes by its step"


@settings(max_examples=200)
@given(
    st.fixed_dictionaries({name: st.floats(1e-4, 2.0) for name in ("compute", "communication", "optimizer", "input")}),
    st.floats(0.0, 2.0),
    st.fixed_dictionaries({name: st.floats(1e-3, 2.0) for name in SEPARATE_PARTS}),
    st.sets(st.sampled_from(SEPARATE_PARTS)),
    st.floats(0.3, 3.0),
)
def test_a_forecast_that_is_corrected_in_full_is_the_measured_step(
    expected_s: dict[str, float], hidden_s: float, measured_s: dict[str, float], known: set[str], rest: float
) -> None:
    apart_s = {name: measured_s[name] for name in sorted(known)}
    rest_s = rest * (sum(expected_s.values()) - sum(expected_s[name] for name in apart_s))
    spent_s = rest_s + sum(apart_s.values())
    exchanged_s = expected_s["communication"] + hidden_s
    known_deviations = dict(part_deviations(expected_s, exchanged_s, spent_s, apart_s))
    together = known_deviations["together"]
    ratios = np.exp([[-known_deviations.get(name, together)] for name in ("together", *SEPARATE_PARTS)])
    after = correct_parts({name: np.array([part]) for name, part in expected_s.items()}, np.array([hidden_s]), ratios)
    ratio = spent_s / sum(expected_s.values())
    bounded = np.clip(ratio, 1 / MAX_RATIO, MAX_RATIO) / ratio
    assert sum(after.values())[0] == pytest.approx(spent_s * bounded, rel=1e-9)
    for name, part in apart_s.items():
        assert after[name][0] == pytest.approx(part * bounded, rel=1e-6, abs=1e-9)


def test_where_nothing_is_exchanged_nothing_is_waited_for() -> None:
    parts = {"compute": np.ones(2), "communication": np.array([0.0, 0.1]), "optimizer": np.full(2, 0.1)}
    after = correct_parts(parts, np.array([0.0, 0.4]), np.array([[1.0], [2.0], [1.0]]))
    assert after["communication"].tolist() == pytest.approx([0.0, 0.7])


@settings(max_examples=50)
@given(st.lists(st.none() | st.floats(0.0, 3.0), min_size=5, max_size=5), st.floats(0.0, 1.0))
def test_parts_move_towards_newer_ones(values: list[float | None], weight: float) -> None:
    parts, newer = MeasuredParts(*values), MeasuredParts(1.0, 1.0, None, 1.0, None)
    after = parts.blend_with(newer, weight)
    for old, new, one in zip(parts.values, newer.values, after.values, strict=True):
        assert one == (new if old is None else old if new is None else pytest.approx(old + weight * (new - old)))
    assert parts.blend_with(NO_PARTS, weight) == parts and NO_PARTS.blend_with(parts, weight) == parts
    assert parts.scale_by(2.0).sum_s == pytest.approx(2 * parts.sum_s)


def test_runs_that_agree_say_more_than_one() -> None:
    one = JobRun(A100, PLAN, 0.3)
    more = (one, JobRun(replace(A100, gpu="l4", architecture="ada-lovelace"), PLAN, 0.3))
    assert at(JobRuns(more), H100)[0] < at(JobRuns((one,)), H100)[0] < 1.0


ROW = {
    "source": "s", "gpu": "A100-SXM4-80GB", "gpus_per_node": "8", "n_gpus": "8", "framework": "x",
    "model_name": "m", "family": "decoder", "n_layers": "24", "hidden": "2048", "n_heads": "16", "n_kv_heads": "16",
    "ffn_hidden": "8192", "gated_mlp": "0", "vocab": "51200", "seq_len": "2048", "micro_batch_per_gpu": "2",
    "grad_accum": "4", "global_batch": "64", "precision": "bf16", "dp": "8", "tp": "1", "pp": "1", "zero_stage": "1",
    "activation_checkpointing": "none", "flash_attention": "1", "optimizer": "adamw", "split_group": "g",
}  # fmt: skip
ROWS = [
    {**ROW, "id": "a"},
    {**ROW, "id": "b", "gpu": "H100-SXM-80GB"},
    {**ROW, "id": "c", "n_gpus": "16", "dp": "16", "global_batch": "128"},
    {**ROW, "id": "d", "tp": "2", "dp": "4", "grad_accum": "8"},
    {**ROW, "id": "e", "model_name": "other", "gpu": "H100-SXM-80GB"},
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write a table of runs that all took a third longer than forecast."""
    path = tmp_path / "runs.csv"
    steps = [item.seconds for item in tables.forecast(ROWS)]
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, [*ROWS[0], "step_time_s_derived"])
        writer.writeheader()
        writer.writerows(
            {**row, "step_time_s_derived": f"{1.33 * (step or 1):.6g}"} for row, step in zip(ROWS, steps, strict=True)
        )
    return path


def test_pairs_are_of_one_source_and_model(table: Path) -> None:
    subjects = transfer.read_subjects([table])
    ids = [row["id"] for row in subjects.measured.rows]
    named = {
        kind: {f"{ids[one]}{ids[other]}" for one, other in zip(*both, strict=True)}
        for kind, both in pair_runs(subjects).items()
    }
    assert named == {
        "other GPU": {"ab", "ba", "bc", "cb", "bd", "db"},
        "other count": {"ac", "ca", "cd", "dc"},
        "other plan": {"ad", "da"},
    }


def test_a_deviation_that_all_runs_share_is_corrected(table: Path) -> None:
    subjects = transfer.read_subjects([table])
    for kind, both in pair_runs(subjects).items():
        line = transfer.summarize_pairs(subjects, transfer.forecast_pairs(subjects, kind, *both))
        assert line.errors["raw"] == pytest.approx(0.248, abs=0.001)
        assert line.errors["scaled"] < 0.001 < line.errors["corrected"] < line.errors["raw"]
        assert line.interval == pytest.approx((line.gain, line.gain)), "one source cannot vary"
        assert line.width < 1


def test_the_command_prints_a_line_for_each_kind(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "transfer", str(table)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "5 measured runs of 1 sources"
    assert [line[:11].strip() for line in lines[3:]] == ["other GPU", "other count", "other plan"]


def test_a_table_without_measured_steps_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("id,gpu,n_gpus,precision\na,t4,1,fp16\n")
    assert main(["validate", "transfer", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.data
@pytest.mark.skipif("TILECAST_DATA" not in os.environ, reason="TILECAST_DATA is not set")
def test_one_run_corrects_the_published_runs_on_other_gpus_and_counts() -> None:
    folder = Path(os.environ["TILECAST_DATA"]) / "e2e"
    subjects = transfer.read_subjects([folder / "published_dev.csv", folder / "neusight_dev.csv"])
    lines = {
        kind: transfer.summarize_pairs(subjects, transfer.forecast_pairs(subjects, kind, *both))
        for kind, both in pair_runs(subjects).items()
    }
    other = lines["other GPU"]
    # The GPUs of these tables are of different architectures, to which little carries over.
    assert other.errors["corrected"] < 1.02 * other.errors["raw"]
    assert other.errors["corrected"] < other.errors["scaled"] < other.errors["bandwidth"]
    assert lines["other count"].gain < 0.72
    assert lines["other plan"].gain < 1.0
    assert lines["other batch"].gain < 0.85
    assert all(item.errors["corrected"] < item.errors["scaled"] for item in lines.values())
    assert all(item.covered[1] >= 0.9 for item in lines.values())
    for item in lines.values():
        resampled = (
            (item.interval, item.gain),
            (item.covered_interval, item.covered[1]),
            (item.width_interval, item.width),
        )
        assert all(low <= figure <= high for (low, high), figure in resampled)
    assert np.isfinite(other.interval).all()
