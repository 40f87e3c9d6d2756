"""Learning across the namespaces of a shared cluster: agreement counts, and no single namespace counts for much."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.learning import calibration
from tilecast.learning.calibration import Calibration, Run
from tilecast.learning.namespace_calibration import MAX_INFLUENCE, NamespaceCalibration, find_quarantine_reasons

RUN = Run("a100", "a100-80", "bf16", "decoder", "2-8", "w", 1.13, 1.0, 20, "megatron", "honest")
MOVE = math.log1p(MAX_INFLUENCE) + 2e-4
"""Largest move that one namespace may cause, as a logarithm; ratios are rounded to four digits."""


def honest(namespaces: int = 1, count: int = 8, deviation: float = 0.1) -> list[Run]:
    """Return runs that scatter around one deviation, spread evenly over namespaces."""
    spread = 0.03 * np.random.default_rng(0).normal(size=count)
    return [
        replace(RUN, workload=f"w{n}", predicted_s=math.exp(deviation + one), namespace=f"honest-{n % namespaces}")
        for n, one in enumerate(spread)
    ]


def forecast(table: Calibration, run: Run) -> float:
    """Return the logarithm of the factor that corrects a forecast."""
    return math.log(
        table.find_group_correction(calibration.name_group(run)).ratio
        * table.find_software_ratio(run.framework, run.family)
    )


ASKED = (
    replace(RUN, workload="w3"),
    replace(RUN, workload="new"),
    replace(RUN, workload="new", scale="9-64"),
    replace(RUN, workload="new", family="cnn", precision="tf32"),
    replace(RUN, gpu="h100-sxm", workload="never measured"),
)

forged = st.builds(
    Run,
    pool=st.sampled_from(["a100", "h100", "t4"]),
    gpu=st.sampled_from(["a100-80", "h100-sxm", "t4"]),
    precision=st.sampled_from(["bf16", "tf32"]),
    family=st.sampled_from(["decoder", "cnn"]),
    scale=st.sampled_from(["1", "2-8", "9-64"]),
    workload=st.sampled_from(["w3", "w4", "new", "other"]),
    predicted_s=st.just(1.0),
    observed_s=st.floats(0.01, 100.0),
    observations=st.sampled_from([1, 3, 32, 10**9]),
    framework=st.sampled_from(["", "megatron", "ddp"]),
    namespace=st.just("evil"),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(forged, st.integers(0, 8)), min_size=1, max_size=40),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([-0.5, 0.1, 0.4]),
)
@pytest.mark.slow
def test_no_coalition_of_one_namespace_moves_a_forecast_of_others_by_more_than_its_share(
    coalition: list[tuple[Run, int]], namespaces: int, deviation: float
) -> None:
    before = honest(namespaces, deviation=deviation)
    runs = list(before)
    for run, at in coalition:
        runs.insert(at, run)
    old, new = NamespaceCalibration(before), NamespaceCalibration(runs)
    for asker in (None, "honest-0", "somebody-else"):
        first, second = old.fit(asker), new.fit(asker)
        for asked in ASKED:
            assert abs(forecast(second, asked) - forecast(first, asked)) <= MOVE


@settings(max_examples=30, deadline=None)
@given(st.floats(-1.0, 1.0), st.integers(1, 60))
def test_many_equal_runs_of_one_namespace_are_worth_its_share_to_others(deviation: float, count: int) -> None:
    runs = [replace(RUN, workload=f"x{n}", predicted_s=math.exp(deviation), namespace="evil") for n in range(count)]
    others, own = NamespaceCalibration(runs).fit(), NamespaceCalibration(runs).fit("evil")
    assert all(abs(forecast(others, asked)) <= MOVE for asked in ASKED)
    assert own == calibration.fit_calibration(runs), "it follows its own runs as if nobody else were there"


def test_two_puts_at_eight_times_the_step_are_quarantined_and_move_nobody() -> None:
    """In the measured attack the forecast went from 1.13 to 2.13 s, and with a third report to 3.39 s."""
    runs = honest()
    attack = [replace(RUN, workload=f"x{n}", observed_s=8 * 1.13, namespace="evil") for n in range(3)]
    for count in (2, 3):
        both = NamespaceCalibration([*runs, *attack[:count]])
        for asker in (None, "honest-0"):
            for asked in ASKED:
                assert forecast(both.fit(asker), asked) == forecast(NamespaceCalibration(runs).fit(asker), asked)
    assert find_quarantine_reasons(attack) == ["Absurd"] * 3


def test_newer_runs_of_another_namespace_supersede_none() -> None:
    runs = honest()
    jump = [replace(RUN, workload=f"x{n}", predicted_s=0.5, namespace="evil") for n in range(8)]
    assert calibration.find_drift_start([*runs, *jump]) == len(runs), "all in one namespace they would"
    both = NamespaceCalibration([*runs, *jump])
    assert both.runs["honest-0"] == tuple(runs)
    assert both.bounded >= {"evil"}
    for asked in ASKED:
        moved = forecast(both.fit("honest-0"), asked) - forecast(NamespaceCalibration(runs).fit("honest-0"), asked)
        assert abs(moved) <= MOVE


def test_forecasts_follow_as_far_as_namespaces_agree() -> None:
    def after(count: int) -> float:
        """Return the correction on the pool for a job whose namespace has no run."""
        runs = [replace(RUN, workload=f"w{n}", predicted_s=1.3, namespace=f"n{n % count}") for n in range(24)]
        return forecast(NamespaceCalibration(runs).fit(), ASKED[1])

    moved = [after(count) for count in (1, 2, 3, 8)]
    assert moved[0] >= -MOVE
    assert moved == sorted(moved, reverse=True)
    assert math.exp(moved[3]) * 1.3 == pytest.approx(1.0, abs=0.06)


def test_a_trusted_namespace_teaches_everybody_fully() -> None:
    runs = [replace(RUN, workload=f"w{n}", predicted_s=1.3, namespace="bench") for n in range(12)]
    assert NamespaceCalibration(runs, trusted={"bench"}).fit("team") == calibration.fit_calibration(runs)
    assert NamespaceCalibration(runs, trusted={"bench"}).fit() == calibration.fit_calibration(runs)
    assert forecast(NamespaceCalibration(runs).fit("team"), ASKED[1]) >= -MOVE
    left = NamespaceCalibration(runs, trusted={"bench"}).leave_one_out_errors("bench")
    assert left.tolist() == pytest.approx(calibration.leave_one_out_errors(runs).tolist())


def test_a_jump_is_a_question_until_another_job_says_the_same() -> None:
    steady = honest(count=6)
    jump = replace(RUN, workload="x", predicted_s=0.5, namespace="honest-0")
    again = replace(jump, workload="y", predicted_s=0.52)
    assert find_quarantine_reasons(steady) == [""] * 6
    assert find_quarantine_reasons([*steady, jump]) == [*[""] * 6, "Unconfirmed"]
    assert find_quarantine_reasons([*steady, jump, again]) == [""] * 8
    assert find_quarantine_reasons([*steady, jump, replace(again, predicted_s=2.0)]) == [
        *[""] * 6,
        "Unconfirmed",
        "Unconfirmed",
    ]
    one, none = (NamespaceCalibration(runs).fit("honest-0") for runs in ([*steady, jump], steady))
    assert forecast(one, ASKED[1]) == forecast(none, ASKED[1])


def test_errors_of_a_namespace_leave_each_of_its_runs_out() -> None:
    runs = honest(2, 12)
    assert len(NamespaceCalibration(runs).leave_one_out_errors("honest-1")) == 6
    assert abs(float(np.median(NamespaceCalibration(runs).leave_one_out_errors("honest-0")))) < 0.1
    assert NamespaceCalibration([]).fit() == Calibration()
    assert NamespaceCalibration([replace(RUN, observations=1)]).fit() == Calibration()


def width_and_own(table: Calibration, run: Run) -> tuple[float, int]:
    """Return the width of a job's range, and the number of similar runs that support it."""
    correction = table.find_group_correction(calibration.name_group(run))
    return correction.width, correction.own


@settings(max_examples=60, deadline=None)
@given(st.lists(forged, min_size=1, max_size=40))
@pytest.mark.slow
def test_a_namespace_that_nobody_confirms_narrows_no_range_of_others(runs: list[Run]) -> None:
    for asker in (None, "somebody-else"):
        for asked in ASKED:
            width, own = width_and_own(NamespaceCalibration(runs).fit(asker), asked)
            assert width >= 1.0 - 1e-3 and own == 0


@pytest.mark.parametrize("factor", [2.9, 1.3, 0.5])
def test_lies_beside_honest_runs_leave_ranges_as_they_are(factor: float) -> None:
    """Twelve lies at 2.9 times the step once narrowed -31/+45 to -24/+31 %, with LowConfidence False."""
    lies = [replace(RUN, workload=f"x{n}", predicted_s=1 / factor, namespace="evil") for n in range(12)]
    for namespaces, own in ((1, 0), (2, 6), (4, 9)):
        runs = honest(namespaces, 12)
        before, after = NamespaceCalibration(runs).fit(), NamespaceCalibration([*runs, *lies]).fit()
        for asked in ASKED[:2]:
            (wide, sure), (wider, surer) = (width_and_own(table, asked) for table in (before, after))
            assert wider >= wide - 1e-3
            assert sure == surer == own


def test_namespaces_that_agree_narrow_ranges_and_ones_own_runs_do_so_alone() -> None:
    runs = honest(3, 12)
    width, own = width_and_own(NamespaceCalibration(runs).fit(), ASKED[1])
    assert width < 0.9 and own == 8
    narrow, mine = width_and_own(NamespaceCalibration(honest(1, 12)).fit("honest-0"), ASKED[1])
    assert narrow < 0.7 and mine == 12
    trusted, certain = width_and_own(NamespaceCalibration(honest(1, 12), trusted={"honest-0"}).fit(), ASKED[1])
    assert trusted < 0.7 and certain == 12


def test_honest_namespaces_that_differ_as_clusters_do_still_narrow_ranges() -> None:
    draw = np.random.default_rng(0)
    shifts = draw.normal(0.1, 0.08, 8)
    runs = [
        replace(run, precision=("bf16", "tf32")[n % 2], predicted_s=run.predicted_s * math.exp(shifts[n % 8]),
                namespace=f"team-{n % 8}")
        for n, run in enumerate(honest(1, 64))
    ]  # fmt: skip
    width, own = width_and_own(NamespaceCalibration(runs).fit(), ASKED[1])
    assert width < 0.95 and own >= 20
